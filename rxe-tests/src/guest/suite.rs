//! The Debian releases that a guest is made from.

use std::fmt;
use std::str::FromStr;

/// A Debian release, named as its archive names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Suite {
    /// Debian 12: kernel 6.1, rdma-core 44.
    Bookworm,
    /// Debian 13: kernel 6.12, rdma-core 56.1. The default.
    Trixie,
    /// Debian unstable: it moves.
    Sid,
}

impl Suite {
    /// All suites, the default one first.
    pub const ALL: [Suite; 3] = [Suite::Trixie, Suite::Bookworm, Suite::Sid];

    /// The name in the archive, which is also the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Suite::Bookworm => "bookworm",
            Suite::Trixie => "trixie",
            Suite::Sid => "sid",
        }
    }

    /// Whether the archive replaces its packages from day to day. Such a tree
    /// is made anew when it has grown old, a released one only when this
    /// code asks for other contents.
    pub fn moves(self) -> bool {
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
            .find(|suite| suite.name() == s)
            .ok_or_else(|| format!("unknown suite `{s}`; known are trixie, bookworm and sid"))
    }
}

/// What is installed in every tree besides the minimal base system: the
/// programs under test, what runs them, and a compiler for the test programs
/// in C, which are built against this suite's own headers.
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

/// The kernel package that is booted unless another one is named.
pub const KERNEL: &str = "linux-image-amd64";
