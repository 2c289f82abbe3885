//! Stand-ins for the kernel (`provider-plugin/bench`): a preloaded library and a sysfs
//! tree in a folder of their own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::driver;

/// The dynamic loader, by the name that the ABI gives it.
const LOADER: &str = "/lib64/ld-linux-x86-64.so.2";

/// The provider that libibverbs must use.
#[derive(Clone, Copy)]
pub enum Provider<'a> {
    /// The system's stock provider.
    Stock,
    /// Another build of the stock provider, as `RDMAV_DRIVERS` names it.
    StockAt(&'a Path),
    /// Ours, as `RDMAV_DRIVERS` names it.
    Ours(&'a Path),
}

/// A compiled stand-in and its sysfs tree.
#[derive(Clone)]
pub struct StandIn {
    dir: PathBuf,
    library: PathBuf,
}

impl StandIn {
    /// Compiles `source` and creates the sysfs tree of `device`: files below `/sys/class`,
    /// with their contents.
    ///
    /// # Errors
    /// No compiler, missing headers, a folder that cannot be written.
    pub fn build(dir: &Path, source: &str, device: &[(&str, &str)]) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let library = dir.join(source).with_extension("so");
        let options = ["-fPIC", "-shared", "-fvisibility=hidden"];
        compile(&[source], &library, &options)?;
        for (file, content) in device {
            let path = dir.join("sys/class").join(file);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent)?;
            }
            fs::write(&path, content)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(Self {
            dir: dir.to_owned(),
            library,
        })
    }

    /// Compiles a library for a program to be linked with, and returns its path.
    ///
    /// # Errors
    /// As [`StandIn::build`].
    pub fn library(&self, source: &str) -> Result<PathBuf> {
        let path = self.dir.join(source).with_extension("so");
        compile(&[source], &path, &["-fPIC", "-shared"])?;
        Ok(path)
    }

    /// Compiles a program that uses libibverbs, and returns its path. `files` are sources
    /// and libraries.
    ///
    /// # Errors
    /// As [`StandIn::build`].
    pub fn program(&self, name: &str, files: &[&str]) -> Result<PathBuf> {
        let path = self.dir.join(name);
        compile(files, &path, &["-libverbs", "-ldl", "-lpthread"])?;
        Ok(path)
    }

    /// Returns the command of a program on the stand-in, with all symbols resolved at
    /// startup.
    pub fn command(&self, program: &Path, provider: Provider, arguments: &[&str]) -> Command {
        self.configure(Command::new(program), provider, arguments)
    }

    /// As [`StandIn::command`], with the program mapped by the loader, and so among the
    /// libraries instead of far from them.
    pub fn command_among_libraries(
        &self,
        program: &Path,
        provider: Provider,
        arguments: &[&str],
    ) -> Command {
        let mut loader = Command::new(LOADER);
        loader.arg(program);
        self.configure(loader, provider, arguments)
    }

    fn configure(&self, mut command: Command, provider: Provider, arguments: &[&str]) -> Command {
        command
            .args(arguments)
            .env("LD_PRELOAD", &self.library)
            .env("SYSFS_PATH", self.dir.join("sys"))
            .env("LD_BIND_NOW", "1")
            .env_remove("IBV_DRIVERS")
            .env_remove("RDMAV_DRIVERS")
            .env_remove("GLIBC_TUNABLES")
            .stderr(Stdio::inherit());
        if let Provider::StockAt(path) | Provider::Ours(path) = provider {
            command.env("RDMAV_DRIVERS", path);
        }
        command
    }
}

/// Runs a program and returns its output.
///
/// # Errors
/// The program cannot be run, or failed.
pub fn output_of(command: &mut Command) -> Result<String> {
    let program = Path::new(command.get_program()).display().to_string();
    let output = command
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {} failed with {}: its messages are above",
        command
            .get_args()
            .map(|argument| argument.to_string_lossy())
            .collect::<Vec<_>>()
            .join(" "),
        output.status
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn compile(files: &[&str], output: &Path, options: &[&str]) -> Result<()> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(&compiler)
        .current_dir(driver::root().join("provider-plugin/bench"))
        .args(["-O2", "-g", "-std=gnu11", "-Wall", "-Wextra"])
        .args(files)
        .arg("-o")
        .arg(output)
        .args(options)
        .status()
        .with_context(|| format!("cannot run {compiler}: install a C compiler (gcc)"))?;
    ensure!(
        status.success(),
        "{compiler} could not compile {}: the headers of libibverbs-dev and linux-libc-dev \
         are needed (apt-get install libibverbs-dev ibverbs-providers)",
        files.join(", ")
    );
    Ok(())
}
