//! Embeds the libraries of the folder that `RINGVERBS_CARRIED` names into the command, as
//! `cargo xtask dist` does. Without it the command carries none, and looks for files.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// FNV-1a. The name need not resist forgery: unpacked files are compared.
struct Hash(u128);

impl Hash {
    fn update(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 ^= u128::from(*byte);
            self.0 = self
                .0
                .wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
}

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=RINGVERBS_CARRIED");
    let folder = env::var_os("RINGVERBS_CARRIED").map(PathBuf::from);
    let text = source(folder.as_deref())?;
    let out = env::var_os("OUT_DIR").ok_or(io::ErrorKind::NotFound)?;
    fs::write(Path::new(&out).join("carried.rs"), text)
}

/// Returns Rust source with the files and links of a folder.
fn source(folder: Option<&Path>) -> io::Result<String> {
    let mut hash = Hash(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
    let (mut files, mut links) = (String::new(), String::new());
    let mut paths = Vec::new();
    if let Some(folder) = folder {
        println!("cargo:rerun-if-changed={}", folder.display());
        for entry in fs::read_dir(folder)? {
            paths.push(entry?.path());
        }
        paths.sort();
    }
    for path in &paths {
        let name = path.file_name().unwrap_or_default();
        hash.update(name.as_encoded_bytes());
        // Writing to a string does not fail.
        let _ = if path.is_symlink() {
            let target = fs::read_link(path)?;
            hash.update(target.as_os_str().as_encoded_bytes());
            write!(links, "({name:?}, {target:?}), ")
        } else {
            println!("cargo:rerun-if-changed={}", path.display());
            hash.update(&fs::read(path)?);
            write!(files, "({name:?}, include_bytes!({path:?})), ")
        };
    }
    Ok(format!(
        "static CARRIED: Libraries = Libraries {{\n    hash: \"{:032x}\",\n    \
         files: &[{files}],\n    links: &[{links}],\n}};\n",
        hash.0
    ))
}
