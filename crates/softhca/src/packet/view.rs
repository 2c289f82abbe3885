//! Parsing received frames.

use super::header::{Aeth, AtomicEth, BTH, Bth, DCETH, DcEth, Deth, ICRC, Reth, u32_at};
use super::icrc::icrc;
use super::opcode::{Class, Opcode, Traits};
use super::path::{L3, Link, LinkKind, Network, NotPacket};
use super::pool::Packet;

/// Reasons for rejecting a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// It is not RDMA.
    Other,
    /// Lengths or versions are wrong.
    Malformed,
    /// The ICRC is wrong.
    BadIcrc,
}

/// The payload of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload<'a> {
    /// Bytes of a frame, or of a buffer.
    Bytes(&'a [u8]),
    /// Memory of the sender, which is that of the receiver as well: its address and
    /// length. It may change at any time.
    Memory(u64, usize),
}

impl<'a> Payload<'a> {
    /// Its length in bytes.
    #[inline]
    #[must_use]
    pub fn len(self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Memory(_, length) => length,
        }
    }

    /// Whether there is none.
    #[inline]
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The bytes: none of a payload in memory, which only RDMA writes have.
    #[inline]
    #[must_use]
    pub fn bytes(self) -> &'a [u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Memory(..) => &[],
        }
    }
}

/// A parsed packet, with every length checked, and a correct ICRC if it has one.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The whole frame.
    pub frame: &'a [u8],
    /// The network headers.
    pub network: Network,
    /// The base transport header.
    pub bth: Bth,
    /// The opcode; none if reserved.
    pub opcode: Option<Opcode>,
    extended: &'a [u8],
    /// The payload without padding.
    pub payload: Payload<'a>,
}

impl<'a> View<'a> {
    /// Parses and checks a frame.
    ///
    /// # Errors
    /// See [`Refused`].
    #[inline]
    pub fn read(kind: LinkKind, frame: &'a [u8]) -> Result<Self, Refused> {
        Self::parse(kind, frame, true)
    }

    /// As [`View::read`]. A packet that is not sealed has no ICRC to check.
    ///
    /// # Errors
    /// See [`Refused`].
    #[inline]
    pub fn of(packet: &'a Packet) -> Result<Self, Refused> {
        Self::parse(packet.kind(), packet.frame(), packet.is_sealed())
    }

    /// Parses a packet whose ICRC was checked before.
    #[inline]
    pub(crate) fn again(packet: &'a Packet) -> Result<Self, Refused> {
        Self::parse(packet.kind(), packet.frame(), false)
    }

    /// Returns a packet that was never in a frame.
    #[inline]
    pub(crate) fn looped_back(
        link: Link,
        l3: L3,
        bth: Bth,
        extended: &'a [u8],
        payload: Payload<'a>,
    ) -> Self {
        Self {
            frame: &[],
            network: Network {
                link,
                l3,
                l3_at: 0,
                bth_at: 0,
                end: 0,
            },
            bth,
            opcode: Opcode::decode(bth.opcode),
            extended,
            payload,
        }
    }

    #[inline]
    fn parse(kind: LinkKind, frame: &'a [u8], sealed: bool) -> Result<Self, Refused> {
        let network = Network::read(kind, frame).map_err(|e| match e {
            NotPacket::Other => Refused::Other,
            NotPacket::Malformed => Refused::Malformed,
        })?;
        let frame = &frame[..network.end];
        let after = network.bth_at + BTH;
        let Some(Ok(bth)) = frame.get(network.bth_at..after).map(<&[u8; BTH]>::try_from) else {
            return Err(Refused::Malformed);
        };
        let bth = Bth::read(bth);
        let end = network.end - ICRC;
        if sealed {
            let expected = icrc(frame, kind, network.l3, network.l3_at, network.bth_at);
            if frame[end..] != expected.to_le_bytes() {
                return Err(Refused::BadIcrc);
            }
        }
        if bth.version != 0 || (end - after) % 4 != 0 {
            return Err(Refused::Malformed);
        }
        let opcode = Opcode::decode(bth.opcode);
        let payload_at = after + opcode.map_or(0, Opcode::extended_length);
        let payload_end = end - usize::from(bth.pad);
        if payload_at > payload_end {
            return Err(Refused::Malformed);
        }
        Ok(Self {
            frame,
            network,
            bth,
            opcode,
            extended: &frame[after..payload_at],
            payload: Payload::Bytes(&frame[payload_at..payload_end]),
        })
    }

    /// Whether the opcode has any of `traits`; false if the opcode is reserved.
    #[inline]
    #[must_use]
    pub fn has(&self, traits: Traits) -> bool {
        self.opcode.is_some_and(|o| o.traits().has(traits))
    }

    /// Bytes of the class-specific extended header, which precedes RETH and
    /// AtomicETH.
    #[inline]
    fn skip(&self) -> usize {
        match self.opcode.map(|o| o.class) {
            Some(Class::Ud) => 8,
            Some(Class::Xrc) if !self.has(Traits::RESPONSE) => 4,
            Some(Class::Dc) if !self.has(Traits::RESPONSE) => DCETH,
            _ => 0,
        }
    }

    #[inline]
    fn at<const N: usize>(&self, at: usize) -> Option<&'a [u8; N]> {
        self.extended.get(at..)?.first_chunk()
    }

    /// The RETH, if the operation has one.
    #[inline]
    #[must_use]
    pub fn reth(&self) -> Option<Reth> {
        if !self.has(Traits::RETH) {
            return None;
        }
        self.at(self.skip()).map(Reth::read)
    }

    /// The AtomicETH, if the operation has one.
    #[inline]
    #[must_use]
    pub fn atomic(&self) -> Option<AtomicEth> {
        if !self.has(Traits::ATOMIC) || self.has(Traits::RESPONSE) {
            return None;
        }
        self.at(self.skip()).map(AtomicEth::read)
    }

    /// The AETH, if the operation has one and its syndrome is not reserved.
    #[inline]
    #[must_use]
    pub fn aeth(&self) -> Option<Aeth> {
        if !self.has(Traits::AETH) {
            return None;
        }
        self.at(0).and_then(Aeth::read)
    }

    /// The value of the AtomicAckETH, if the operation has one.
    #[inline]
    #[must_use]
    pub fn atomic_value(&self) -> Option<u64> {
        if !(self.has(Traits::ATOMIC) && self.has(Traits::RESPONSE)) {
            return None;
        }
        self.at(4).map(|b| u64::from_be_bytes(*b))
    }

    /// The DETH, if the packet is a datagram.
    #[inline]
    #[must_use]
    pub fn deth(&self) -> Option<Deth> {
        (self.opcode?.class == Class::Ud).then(|| self.at(0).map(Deth::read))?
    }

    /// The SRQ number in the XRCETH of an XRC request.
    #[inline]
    #[must_use]
    pub fn xrc_srqn(&self) -> Option<u32> {
        if self.opcode?.class != Class::Xrc || self.has(Traits::RESPONSE) {
            return None;
        }
        self.at::<4>(0).map(|b| u32_at(b, 0) & 0xff_ffff)
    }

    /// The DCETH of a request over a dynamic connection.
    #[inline]
    #[must_use]
    pub fn dceth(&self) -> Option<DcEth> {
        if self.opcode?.class != Class::Dc || self.has(Traits::RESPONSE) {
            return None;
        }
        self.at(0).map(DcEth::read)
    }

    /// The immediate data or the key to invalidate; 0 if there is neither.
    #[inline]
    #[must_use]
    pub fn imm(&self) -> u32 {
        if self.has(Traits::IMM) || self.has(Traits::INVALIDATE) {
            self.extended
                .last_chunk()
                .map_or(0, |b| u32::from_be_bytes(*b))
        } else {
            0
        }
    }
}
