//! Wire formats: InfiniBand (LRH, GRH) and RoCE v1 and v2 around the same transport
//! headers.
//!
//! [`View`] parses a frame, [`PacketBuilder`] builds one. A [`Packet`] is a frame and its
//! buffer, which comes from a [`Pool`].

mod builder;
mod header;
mod icrc;
mod opcode;
mod path;
mod pool;
mod psn;
mod udp;
mod view;

#[cfg(test)]
mod tests;

pub use builder::PacketBuilder;
pub use header::{
    Aeth, AtomicEth, BTH_BYTES, Bth, CREDITS_UNLIMITED, DCETH_BYTES, DEFAULT_PKEY, DcEth, Deth,
    ICRC_BYTES, MULTICAST_QPN, NakCode, Reth, Syndrome,
};
pub use icrc::{icrc_cause, icrc_change};
pub use opcode::{CNP, Class, Opcode, OpcodeFlags, op};
pub(crate) use path::{CE, ECT0};
pub use path::{
    Gid, Grh, L3, Link, LinkKind, MAX_NETWORK_BYTES, Mac, NetworkError, NetworkHeaders, Path,
    ROCE_V2_PORT, Roce, Template, gid_of_ip, gid_of_ipv4, ip_of_gid, ipv4_of,
};
pub use pool::{PACKET_CAPACITY, Packet, Pool};
pub use psn::Psn;
pub use udp::{DatagramError, Headers, RecvMeta, Transmit, headroom};
pub use view::{ParseError, Payload, View};

/// Path MTU: the largest payload of a packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1024 bytes.
    #[default]
    B1024,
    /// 2048 bytes.
    B2048,
    /// 4096 bytes.
    B4096,
}

impl Mtu {
    /// All MTUs, smallest first.
    pub const ALL: [Self; 5] = [
        Self::B256,
        Self::B512,
        Self::B1024,
        Self::B2048,
        Self::B4096,
    ];

    /// The MTU in bytes.
    #[inline]
    #[must_use]
    pub const fn bytes(self) -> u32 {
        1 << self.log2()
    }

    /// Base-2 logarithm of the bytes, 8 to 12.
    #[inline]
    #[must_use]
    pub const fn log2(self) -> u32 {
        self as u32 + 8
    }

    /// Returns the MTU for its code in verbs and firmware, 1 (256 bytes) to 5
    /// (4096).
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::B256,
            2 => Self::B512,
            3 => Self::B1024,
            4 => Self::B2048,
            5 => Self::B4096,
            _ => return None,
        })
    }

    /// Returns the code in verbs and firmware; see [`Mtu::from_code`].
    #[must_use]
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    /// The number of packets in a message of `length` bytes, at least one.
    #[inline]
    #[must_use]
    pub const fn packets(self, length: u32) -> u32 {
        if length == 0 {
            1
        } else {
            ((length - 1) >> self.log2()) + 1
        }
    }
}
