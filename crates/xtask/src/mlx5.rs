//! Programs that run on the stand-in for mlx5's driver
//! (`provider-plugin/bench/mlx5_*.c`), with the C provider or with ours.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::driver;

/// Which provider libibverbs is to take.
#[derive(Clone, Copy)]
pub enum Provider<'a> {
    /// The C provider that the system has.
    Stock,
    /// Ours, as `RDMAV_DRIVERS` names it.
    Ours(&'a Path),
}

/// What such a program is compiled and compared with.
pub const NEEDS: &[(&str, &str)] = &[
    ("cc", "build-essential"),
    ("/usr/include/infiniband/mlx5dv.h", "libibverbs-dev"),
    // A file of the package that no installation of ours moves.
    ("/etc/libibverbs.d/mlx5.driver", "ibverbs-providers"),
];

/// A compiled program and what it is run with.
pub struct Program {
    dir: PathBuf,
    name: &'static str,
}

impl Program {
    /// Compiles the program and the stand-in, and makes the sysfs tree.
    ///
    /// # Errors
    /// No compiler, missing headers, a folder that cannot be written.
    pub fn build(dir: &Path, name: &'static str, files: &[&str]) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        compile(
            &["mlx5_standin.c"],
            &dir.join("mlx5_standin.so"),
            &["-fPIC", "-shared", "-fvisibility=hidden"],
        )?;
        compile(files, &dir.join(name), &["-libverbs", "-ldl", "-lpthread"])?;
        sysfs_tree(&dir.join("sys"))?;
        Ok(Self {
            dir: dir.to_owned(),
            name,
        })
    }

    /// What the program prints; its first line names the provider that served.
    ///
    /// # Errors
    /// The program failed, or another provider served.
    pub fn run(&self, provider: Provider, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.dir.join(self.name));
        command
            .args(arguments)
            .env("LD_PRELOAD", self.dir.join("mlx5_standin.so"))
            .env("SYSFS_PATH", self.dir.join("sys"))
            .env("LD_BIND_NOW", "1")
            .env("RINGVERBS_DEVICES", "mlx5")
            .env_remove("IBV_DRIVERS")
            .env_remove("RDMAV_DRIVERS")
            .env_remove("GLIBC_TUNABLES")
            .stderr(Stdio::inherit());
        // What changes what the C provider does.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("MLX5_") {
                command.env_remove(name);
            }
        }
        if let Provider::Ours(path) = provider {
            command.env("RDMAV_DRIVERS", path);
        }
        let output = command
            .output()
            .with_context(|| format!("cannot run {}", self.name))?;
        ensure!(
            output.status.success(),
            "{} failed with {}: its reason is above",
            self.name,
            output.status
        );
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let served = text.lines().next().unwrap_or_default();
        let expected = match provider {
            Provider::Stock => served.contains("libmlx5"),
            Provider::Ours(_) => served.contains("ringverbs"),
        };
        ensure!(
            expected,
            "another provider served than was asked for: {served}"
        );
        Ok(text)
    }
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

/// What libibverbs reads of sysfs when it has no netlink: one ConnectX-6 Dx,
/// known by its PCI id, whose character device is /dev/null's (1:3).
fn sysfs_tree(root: &Path) -> Result<()> {
    let class = root.join("class");
    for (file, content) in [
        ("infiniband_verbs/abi_version", "6\n"),
        ("infiniband_verbs/uverbs0/dev", "1:3\n"),
        ("infiniband_verbs/uverbs0/ibdev", "mlx5_0\n"),
        ("infiniband_verbs/uverbs0/abi_version", "1\n"),
        ("infiniband/mlx5_0/node_type", "1: CA\n"),
        ("infiniband/mlx5_0/node_guid", "0200:00ff:fe00:0001\n"),
        (
            "infiniband/mlx5_0/device/modalias",
            "pci:v000015B3d0000101Dsv000015B3sd00000001bc02sc07i00\n",
        ),
    ] {
        let path = class.join(file);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
