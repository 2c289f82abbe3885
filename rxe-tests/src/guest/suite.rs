//! The Debian releases that a guest is made from.

use std::fmt;
use std::path::Path;
use std::process::Command;
use std::str::FromStr;

use super::host::Tool;

/// A Debian release, named as its archive names it, and an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Suite {
    /// Debian 12: kernel 6.1, rdma-core 44.
    Bookworm,
    /// Debian 13: kernel 6.12, rdma-core 56.1. The default.
    Trixie,
    /// Debian unstable: its versions change.
    Sid,
    /// Debian 13 for arm64.
    TrixieArm64,
}

/// A processor architecture: names of packages and tools, and QEMU's options.
#[derive(Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Debian's name.
    pub debian: &'static str,
    /// Rust's target.
    pub target: &'static str,
    /// The default kernel package.
    pub kernel: &'static str,
    /// QEMU, and its package.
    pub qemu: Tool,
    /// QEMU's option `-M`.
    pub board: &'static str,
    /// The emulated processor.
    pub cpu: &'static str,
    /// The kernel's name of the serial port.
    pub console: &'static str,
    /// QEMU for user programs, if this machine cannot run them itself.
    pub user: Option<&'static str>,
    /// The prefix of binutils and gcc.
    pub tools: &'static str,
}

impl Architecture {
    /// Returns a command that runs a static program on this machine.
    pub fn command(&self, program: &Path) -> Command {
        match self.user {
            None => Command::new(program),
            Some(user) => {
                let mut command = Command::new(user);
                command.arg(program);
                command
            }
        }
    }
}

/// x86-64.
pub const X86_64: Architecture = Architecture {
    debian: "amd64",
    target: "x86_64-unknown-linux-gnu",
    kernel: "linux-image-amd64",
    qemu: ("qemu-system-x86_64", "qemu-system-x86"),
    board: "q35",
    // Without fast string moves: QEMU emulates them byte by byte, and a copy of 64 KiB
    // takes 4 ms.
    cpu: "max,-erms,-fsrm",
    console: "ttyS0",
    user: None,
    tools: "",
};

/// aarch64.
pub const AARCH64: Architecture = Architecture {
    debian: "arm64",
    target: "aarch64-unknown-linux-gnu",
    kernel: "linux-image-arm64",
    qemu: ("qemu-system-aarch64", "qemu-system-arm"),
    board: "virt",
    // Armv8.2, with atomic instructions; `max` has pointer authentication, which is slow.
    cpu: "neoverse-n1",
    console: "ttyAMA0",
    user: Some("qemu-aarch64"),
    tools: "aarch64-linux-gnu-",
};

impl Suite {
    /// The suites of x86-64, the default one first.
    pub const ALL: [Suite; 3] = [Suite::Trixie, Suite::Bookworm, Suite::Sid];

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Suite::Bookworm => "bookworm",
            Suite::Trixie => "trixie",
            Suite::Sid => "sid",
            Suite::TrixieArm64 => "trixie-arm64",
        }
    }

    /// Returns the release's name in the archive.
    pub fn release(self) -> &'static str {
        match self {
            Suite::TrixieArm64 => Suite::Trixie.name(),
            _ => self.name(),
        }
    }

    /// Returns the guest's processor architecture.
    pub fn architecture(self) -> &'static Architecture {
        match self {
            Suite::TrixieArm64 => &AARCH64,
            _ => &X86_64,
        }
    }

    /// Returns whether the archive updates the suite daily. Such a tree is rebuilt when
    /// it is too old, that of a release only when its recipe changes.
    pub fn is_rolling(self) -> bool {
        self == Suite::Sid
    }
}

impl fmt::Display for Suite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Suite {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Suite::ALL
            .into_iter()
            .chain([Suite::TrixieArm64])
            .find(|suite| suite.name() == s)
            .ok_or_else(|| {
                format!("unknown suite `{s}`; known are trixie, bookworm, sid and trixie-arm64")
            })
    }
}

/// Packages in every tree besides the minimal base system: the programs under test,
/// their dependencies, and a compiler for the test programs in C, which are built
/// against this suite's headers.
pub const PACKAGES: &[&str] = &[
    "busybox-static",
    "ca-certificates",
    "cpio",
    "ethtool",
    "gcc",
    "gdb-minimal",
    "ibverbs-providers",
    "ibverbs-utils",
    "infiniband-diags",
    "iproute2",
    "kmod",
    "libc6-dev",
    "libibverbs-dev",
    "librdmacm-dev",
    "make",
    "perftest",
    "procps",
    "python3",
    "python3-pyverbs",
    "rdma-core",
    "rdmacm-utils",
    "strace",
    "xz-utils",
    "zstd",
];
