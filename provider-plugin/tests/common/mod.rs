//! What the tests of the built plugin share.
#![allow(dead_code)] // each test uses a part

pub mod fake;

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

/// The crate's folder.
pub const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// A directory that goes when the test ends.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new(name: &str) -> Dir {
        let path = env::temp_dir().join(format!("ringverbs-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Dir(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Runs the C compiler.
pub fn cc(arguments: &[&str]) {
    let output = Command::new("cc")
        .args(arguments)
        .output()
        .expect("a C compiler (cc)");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// The plugin that was built for this test.
pub fn plugin() -> PathBuf {
    // This test is in <target>/<profile>/deps, and so is the library.
    let exe = env::current_exe().unwrap();
    let deps = exe.parent().unwrap();
    [deps.to_owned(), deps.parent().unwrap().to_owned()]
        .map(|d| d.join("libringverbs_provider.so"))
        .into_iter()
        .filter(|p| p.exists())
        .max_by_key(|p| p.metadata().unwrap().modified().unwrap())
        .expect("the plugin is built with its tests")
}
