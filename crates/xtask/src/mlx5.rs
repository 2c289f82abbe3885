//! Programs that run on the stand-in for mlx5's driver
//! (`provider-plugin/bench/mlx5_*.c`), with the stock provider or with ours.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::standin::{Provider, StandIn, printed};

/// What such a program is compiled and compared with.
pub const NEEDS: &[(&str, &str)] = &[
    ("cc", "build-essential"),
    ("/usr/include/infiniband/mlx5dv.h", "libibverbs-dev"),
    // A file of the package that no installation of ours moves.
    ("/etc/libibverbs.d/mlx5.driver", "ibverbs-providers"),
];

/// What libibverbs reads of sysfs when it has no netlink: one ConnectX-6 Dx,
/// known by its PCI id, whose character device is /dev/null's (1:3).
const DEVICE: &[(&str, &str)] = &[
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
];

/// Compiles the stand-in for the driver, and makes the sysfs tree.
///
/// # Errors
/// No compiler, missing headers, a folder that cannot be written.
pub fn stand_in(dir: &Path) -> Result<StandIn> {
    StandIn::build(dir, "mlx5_standin.c", DEVICE)
}

/// A compiled program and what it is run with.
#[derive(Clone)]
pub struct Program {
    stand_in: StandIn,
    path: PathBuf,
    /// Variables of the environment.
    variables: Vec<(&'static str, String)>,
}

impl Program {
    /// Compiles the program and the stand-in, and makes the sysfs tree.
    ///
    /// # Errors
    /// No compiler, missing headers, a folder that cannot be written.
    pub fn build(dir: &Path, name: &str, files: &[&str]) -> Result<Self> {
        let stand_in = stand_in(dir)?;
        let path = stand_in.program(name, files)?;
        Ok(Self {
            stand_in,
            path,
            variables: Vec::new(),
        })
    }

    /// Sets a variable of the environment that it is run in.
    pub fn set(&mut self, name: &'static str, value: &str) {
        self.variables.push((name, value.to_owned()));
    }

    /// What the program prints; its first line names the provider that served.
    ///
    /// # Errors
    /// The program failed, or another provider served.
    pub fn run(&self, provider: Provider, arguments: &[&str]) -> Result<String> {
        let command = self.stand_in.command(&self.path, provider, arguments);
        self.run_as(command, provider)
    }

    /// The same, of the program among the libraries ([`StandIn::command_near`]).
    ///
    /// # Errors
    /// As there.
    pub fn run_near(&self, provider: Provider, arguments: &[&str]) -> Result<String> {
        let command = (self.stand_in).command_near(&self.path, provider, arguments);
        self.run_as(command, provider)
    }

    fn run_as(&self, mut command: Command, provider: Provider) -> Result<String> {
        command.env_remove("RINGVERBS_DEVICES");
        // These variables change the behaviour of the stock provider.
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("MLX5_") {
                command.env_remove(name);
            }
        }
        for (name, value) in &self.variables {
            command.env(name, value);
        }
        let text = printed(&mut command)?;
        let served = text.lines().next().unwrap_or_default();
        let expected = match provider {
            Provider::Stock | Provider::StockAt(_) => served.contains("libmlx5"),
            Provider::Ours(_) => served.contains("ringverbs"),
        };
        ensure!(
            expected,
            "another provider served than was asked for: {served}"
        );
        Ok(text)
    }
}
