//! Binds the library's own calls at link time, so that none of them runs through the functions
//! of another preloaded library: those to exported functions to the library's own, those to
//! other functions of the C library to `__wrap_NAME` (`src/own.rs`).

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/own.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    let source = std::fs::read_to_string("src/own.rs").unwrap_or_default();
    let (_, functions) = source.split_once("own_functions! {").unwrap_or_default();
    for line in functions.lines() {
        // Functions begin lines; their arguments may continue on others.
        let name = line
            .strip_prefix("    ")
            .and_then(|line| line.split_once('('));
        if let Some((name, _)) = name.filter(|(name, _)| !name.starts_with(' ')) {
            println!("cargo:rustc-cdylib-link-arg=-Wl,--wrap={name}");
        }
    }
}
