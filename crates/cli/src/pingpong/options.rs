//! Options of one side.

use ringverbs::Transport;

/// The transport, as in the name of a C tool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PingPongType {
    /// Reliable connection (ibv_rc_pingpong)
    Rc,
    /// Unreliable connection (ibv_uc_pingpong)
    Uc,
    /// Unreliable datagrams (ibv_ud_pingpong)
    Ud,
    /// Reliable connections with a shared receive queue (ibv_srq_pingpong)
    Srq,
}

impl PingPongType {
    pub fn qp_transport(self) -> Transport {
        match self {
            Self::Rc | Self::Srq => Transport::Reliable,
            Self::Uc => Transport::Unreliable,
            Self::Ud => Transport::Datagram,
        }
    }
}

/// MTUs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Mtu {
    #[value(name = "256")]
    B256,
    #[value(name = "512")]
    B512,
    #[value(name = "1024")]
    B1024,
    #[value(name = "2048")]
    B2048,
    #[value(name = "4096")]
    B4096,
}

impl Mtu {
    pub fn path_mtu(self) -> ringverbs::qp::Mtu {
        match self {
            Self::B256 => ringverbs::qp::Mtu::Bytes256,
            Self::B512 => ringverbs::qp::Mtu::Bytes512,
            Self::B1024 => ringverbs::qp::Mtu::Bytes1024,
            Self::B2048 => ringverbs::qp::Mtu::Bytes2048,
            Self::B4096 => ringverbs::qp::Mtu::Bytes4096,
        }
    }
}

/// Options of one side.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub transport: PingPongType,
    pub ib_port: u8,
    pub gid_index: Option<u8>,
    pub size: u32,
    pub mtu: ringverbs::qp::Mtu,
    pub rx_depth: u32,
    pub iters: u32,
    pub queue_pairs: u32,
    pub events: bool,
    pub sl: u8,
    pub check: bool,
}
