//! Links libgcc's unwinder into the plugin: hardly any C program has libgcc_s loaded,
//! and loading it takes as long as all else that loading the plugin does. Without the
//! static library the plugin needs libgcc_s.so.1.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // `cc` is the compiler of this machine.
    if std::env::var_os("TARGET") != std::env::var_os("HOST") {
        return;
    }
    let printed = Command::new("cc")
        .arg("-print-file-name=libgcc_eh.a")
        .output();
    let Ok(printed) = printed else { return };
    let path = String::from_utf8_lossy(&printed.stdout);
    // A name alone is a library that was not found.
    if let Some(folder) = Path::new(path.trim()).parent() {
        if folder.is_absolute() {
            println!("cargo:rustc-link-search=native={}", folder.display());
            println!("cargo:rustc-link-lib=static:+whole-archive,-bundle=gcc_eh");
        }
    }
}
