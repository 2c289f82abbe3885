//! Folders for temporary files.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use uverbs::environment::variable;

/// Number of names that are tried.
const NAMES: u32 = 100;

/// A folder that only this user may read, which is removed at the end.
pub struct TemporaryFolder(PathBuf);

impl TemporaryFolder {
    /// Creates a folder below TMPDIR, or `/tmp`; `purpose` becomes part of its name.
    ///
    /// # Errors
    /// It cannot be created, with the folder that it would be in.
    pub fn new(purpose: &str) -> Result<Self, (PathBuf, io::Error)> {
        let parent = variable("TMPDIR").filter(|it| !it.is_empty());
        let parent = parent.map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
        let process = std::process::id();
        let mut number = 0;
        loop {
            let path = parent.join(format!("ringverbs-{purpose}-{process}-{number}"));
            // Fails if it exists, whoever has made it.
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < NAMES => {
                    number += 1;
                }
                Err(error) => return Err((parent, error)),
            }
        }
    }

    /// Writes a file in it, and returns the file's path.
    #[cfg(test)]
    pub fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TemporaryFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
