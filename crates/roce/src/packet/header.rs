//! Transport headers and their encoding. All fields are big-endian.

use super::psn::Psn;

/// Bytes of a BTH.
pub const BTH_BYTES: usize = 12;
/// Bytes of the invariant CRC at the end of a packet.
pub const ICRC_BYTES: usize = 4;

/// The P_Key of every port: full member of the default partition.
pub const DEFAULT_PKEY: u16 = 0xffff;

/// The destination QP number of multicast packets.
pub const MULTICAST_QPN: u32 = 0xff_ffff;

/// The low 24 bits of a value, as bytes.
#[inline]
fn be24(value: u32) -> [u8; 3] {
    let [_, a, b, c] = value.to_be_bytes();
    [a, b, c]
}

#[inline]
pub(crate) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

#[inline]
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[inline]
pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

/// Base transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Bth {
    /// Opcode byte; see [`super::Opcode`].
    pub opcode: u8,
    /// Solicited event.
    pub solicited: bool,
    /// Migration state.
    pub migrated: bool,
    /// Padding bytes that extend the payload to a multiple of four, 0 to 3.
    pub pad: u8,
    /// Header version; only 0 is defined.
    pub version: u8,
    /// Partition key.
    pub pkey: u16,
    /// Destination QP, 24 bits.
    pub dest_qpn: u32,
    /// Whether the responder must acknowledge the packet.
    pub ack_request: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Decodes the header.
    #[inline]
    #[must_use]
    pub fn read(bytes: &[u8; BTH_BYTES]) -> Self {
        Self {
            opcode: bytes[0],
            solicited: bytes[1] & 0x80 != 0,
            migrated: bytes[1] & 0x40 != 0,
            pad: bytes[1] >> 4 & 3,
            version: bytes[1] & 0xf,
            pkey: u16_at(bytes, 2),
            dest_qpn: u32_at(bytes, 4) & 0xff_ffff,
            ack_request: bytes[8] & 0x80 != 0,
            psn: Psn::new(u32_at(bytes, 8)),
        }
    }

    /// Encodes the header. Reserved bits are zero.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> [u8; BTH_BYTES] {
        let mut out = [0; BTH_BYTES];
        out[0] = self.opcode;
        out[1] = u8::from(self.solicited) << 7
            | u8::from(self.migrated) << 6
            | (self.pad & 3) << 4
            | self.version & 0xf;
        out[2..4].copy_from_slice(&self.pkey.to_be_bytes());
        out[5..8].copy_from_slice(&be24(self.dest_qpn));
        out[8] = u8::from(self.ack_request) << 7;
        out[9..12].copy_from_slice(&be24(self.psn.value()));
        out
    }
}

/// RDMA extended transport header (IBA 9.3.3).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Reth {
    /// Virtual address.
    pub va: u64,
    /// Remote key.
    pub rkey: u32,
    /// Length of the whole message in bytes.
    pub length: u32,
}

impl Reth {
    /// Decodes the header.
    #[inline]
    #[must_use]
    pub fn read(bytes: &[u8; 16]) -> Self {
        Self {
            va: u64_at(bytes, 0),
            rkey: u32_at(bytes, 8),
            length: u32_at(bytes, 12),
        }
    }

    /// Encodes the header.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> [u8; 16] {
        let mut out = [0; 16];
        out[..8].copy_from_slice(&self.va.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        out[12..].copy_from_slice(&self.length.to_be_bytes());
        out
    }
}

/// Atomic extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct AtomicEth {
    /// Virtual address.
    pub va: u64,
    /// Remote key.
    pub rkey: u32,
    /// The value to add, or to swap in.
    pub swap_add: u64,
    /// The value to compare with.
    pub compare: u64,
}

impl AtomicEth {
    /// Decodes the header.
    #[must_use]
    pub fn read(bytes: &[u8; 28]) -> Self {
        Self {
            va: u64_at(bytes, 0),
            rkey: u32_at(bytes, 8),
            swap_add: u64_at(bytes, 12),
            compare: u64_at(bytes, 20),
        }
    }

    /// Encodes the header.
    #[must_use]
    pub fn bytes(&self) -> [u8; 28] {
        let mut out = [0; 28];
        out[..8].copy_from_slice(&self.va.to_be_bytes());
        out[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        out[12..20].copy_from_slice(&self.swap_add.to_be_bytes());
        out[20..].copy_from_slice(&self.compare.to_be_bytes());
        out
    }
}

/// NAK codes of an AETH (IBA 9.7.5.2.2).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum NakCode {
    /// PSN sequence error: a packet is missing.
    SequenceError = 0,
    /// The request is malformed or not allowed.
    InvalidRequest = 1,
    /// Remote access error: key, bounds or rights.
    RemoteAccess = 2,
    /// Remote operational error: the responder failed.
    RemoteOperation = 3,
}

/// The syndrome of an AETH.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syndrome {
    /// Acknowledges everything up to the PSN; holds the credit count, five bits.
    Ack(u8),
    /// Receiver not ready; holds the RNR timer code (IBA 9.7.5.2.8).
    RnrNak(u8),
    /// Negative acknowledgement.
    Nak(NakCode),
}

/// The credit count that means "no flow control" (IBA 9.7.7.2).
pub const CREDITS_UNLIMITED: u8 = 0x1f;

/// ACK extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// ACK, RNR NAK or NAK.
    pub syndrome: Syndrome,
    /// Message sequence number, 24 bits.
    pub msn: u32,
}

impl Aeth {
    /// Decodes the header; none if the syndrome is reserved.
    #[inline]
    #[must_use]
    pub fn read(bytes: &[u8; 4]) -> Option<Self> {
        let low = bytes[0] & 0x1f;
        let syndrome = match bytes[0] >> 5 {
            0 => Syndrome::Ack(low),
            1 => Syndrome::RnrNak(low),
            3 => Syndrome::Nak(match low {
                0 => NakCode::SequenceError,
                1 => NakCode::InvalidRequest,
                2 => NakCode::RemoteAccess,
                3 => NakCode::RemoteOperation,
                _ => return None,
            }),
            _ => return None,
        };
        Some(Self {
            syndrome,
            msn: u32_at(bytes, 0) & 0xff_ffff,
        })
    }

    /// Encodes the header.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> [u8; 4] {
        let syndrome = match self.syndrome {
            Syndrome::Ack(credits) => credits & 0x1f,
            Syndrome::RnrNak(timer) => 0x20 | timer & 0x1f,
            Syndrome::Nak(code) => 0x60 | code as u8,
        };
        let [a, b, c] = be24(self.msn);
        [syndrome, a, b, c]
    }
}

/// Datagram extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Deth {
    /// Queue key.
    pub qkey: u32,
    /// Source QP, 24 bits.
    pub source_qpn: u32,
}

impl Deth {
    /// Decodes the header.
    #[must_use]
    pub fn read(bytes: &[u8; 8]) -> Self {
        Self {
            qkey: u32_at(bytes, 0),
            source_qpn: u32_at(bytes, 4) & 0xff_ffff,
        }
    }

    /// Encodes the header.
    #[must_use]
    pub fn bytes(&self) -> [u8; 8] {
        let mut out = [0; 8];
        out[..4].copy_from_slice(&self.qkey.to_be_bytes());
        out[5..].copy_from_slice(&be24(self.source_qpn));
        out
    }
}

/// Bytes of a [`DcEth`].
pub const DCETH_BYTES: usize = 24;

/// Dynamic-connection header: precedes the other extended headers of a request over
/// a dynamic connection. The format of the hardware is not public. This one is our
/// own: every packet carries what the hardware sends only when it connects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DcEth {
    /// The access key of the target.
    pub key: u64,
    /// The number of the initiator's connection; later connections have higher
    /// numbers.
    pub connection: u64,
    /// The initiator's QP number, 24 bits.
    pub source_qpn: u32,
    /// The oldest unacknowledged PSN; a target that does not know the connection
    /// starts with it.
    pub oldest: Psn,
}

impl DcEth {
    /// Decodes the header.
    #[inline]
    #[must_use]
    pub fn read(bytes: &[u8; DCETH_BYTES]) -> Self {
        Self {
            key: u64_at(bytes, 0),
            connection: u64_at(bytes, 8),
            source_qpn: u32_at(bytes, 16) & 0xff_ffff,
            oldest: Psn::new(u32_at(bytes, 20)),
        }
    }

    /// Encodes the header.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> [u8; DCETH_BYTES] {
        let mut out = [0; DCETH_BYTES];
        out[..8].copy_from_slice(&self.key.to_be_bytes());
        out[8..16].copy_from_slice(&self.connection.to_be_bytes());
        out[17..20].copy_from_slice(&be24(self.source_qpn));
        out[21..].copy_from_slice(&be24(self.oldest.value()));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bth_bits() {
        let bytes = [
            0x0a, 0xf0, 0x12, 0x34, 0x00, 0xab, 0xcd, 0xef, 0x80, 0x01, 0x02, 0x03,
        ];
        let bth = Bth::read(&bytes);
        assert!(bth.solicited && bth.migrated && bth.ack_request);
        assert_eq!((bth.pad, bth.version, bth.pkey), (3, 0, 0x1234));
        assert_eq!((bth.dest_qpn, bth.psn), (0xab_cdef, Psn::new(0x01_0203)));
        assert_eq!(bth.bytes(), bytes);
    }

    #[test]
    fn reserved_syndromes_are_rejected() {
        let good: Vec<u8> = (0..=255u8)
            .filter(|&s| Aeth::read(&[s, 0, 0, 1]).is_some())
            .collect();
        let expected: Vec<u8> = (0..0x40).chain(0x60..0x64).collect();
        assert_eq!(good, expected);
    }

    proptest! {
        #[test]
        fn headers_are_decoded_as_encoded(va: u64, rkey: u32, length: u32, swap_add: u64, compare: u64, qkey: u32, qpn in 0u32..1 << 24) {
            let reth = Reth { va, rkey, length };
            prop_assert_eq!(Reth::read(&reth.bytes()), reth);
            let atomic = AtomicEth { va, rkey, swap_add, compare };
            prop_assert_eq!(AtomicEth::read(&atomic.bytes()), atomic);
            let deth = Deth { qkey, source_qpn: qpn };
            prop_assert_eq!(Deth::read(&deth.bytes()), deth);
            let dc = DcEth { key: va, connection: compare, source_qpn: qpn, oldest: Psn::new(qkey) };
            prop_assert_eq!(DcEth::read(&dc.bytes()), dc);
        }
    }
}
