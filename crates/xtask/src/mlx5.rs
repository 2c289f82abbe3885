//! Programs that run on the stand-in for mlx5's driver
//! (`provider-plugin/bench/mlx5_*.c`), with the stock provider or with ours.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::standin::{Provider, StandIn, output_of};

/// The packages that these programs need.
pub const NEEDS: &[(&str, &str)] = &[
    ("cc", "build-essential"),
    ("/usr/include/infiniband/mlx5dv.h", "libibverbs-dev"),
    // A file of the package that no installation of ours moves.
    ("/etc/libibverbs.d/mlx4.driver", "ibverbs-providers"),
];

/// The sysfs files of one ConnectX-6 Dx, which libibverbs reads without netlink and
/// recognizes by its PCI id; the character device is /dev/null (1:3).
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

/// Compiles the stand-in for the driver, and creates the sysfs tree.
///
/// # Errors
/// No compiler, missing headers, a folder that cannot be written.
pub fn stand_in(dir: &Path) -> Result<StandIn> {
    StandIn::build(dir, "mlx5_standin.c", DEVICE)
}

/// A compiled program and its stand-in.
#[derive(Clone)]
pub struct Program {
    stand_in: StandIn,
    path: PathBuf,
    /// Environment variables.
    variables: Vec<(&'static str, String)>,
}

impl Program {
    /// Compiles the program and the stand-in, and creates the sysfs tree.
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

    /// Sets an environment variable of the program.
    pub fn set(&mut self, name: &'static str, value: &str) {
        self.variables.push((name, value.to_owned()));
    }

    /// Runs the program and returns its output, whose first line names the provider.
    ///
    /// # Errors
    /// The program failed, or another provider served.
    pub fn run(&self, provider: Provider, arguments: &[&str]) -> Result<String> {
        let command = self.stand_in.command(&self.path, provider, arguments);
        self.run_command(command, provider)
    }

    /// As [`Program::run`], with the program mapped among the libraries
    /// ([`StandIn::command_among_libraries`]).
    ///
    /// # Errors
    /// As [`Program::run`].
    pub fn run_among_libraries(&self, provider: Provider, arguments: &[&str]) -> Result<String> {
        let command = (self.stand_in).command_among_libraries(&self.path, provider, arguments);
        self.run_command(command, provider)
    }

    fn run_command(&self, mut command: Command, provider: Provider) -> Result<String> {
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
        let text = output_of(&mut command)?;
        let served = text.lines().next().unwrap_or_default();
        let expected = match provider {
            Provider::Stock | Provider::StockAt(_) => served.contains("libmlx5"),
            Provider::Ours(_) => served.contains("ringverbs"),
        };
        ensure!(expected, "another provider has served: {served}");
        Ok(text)
    }
}
