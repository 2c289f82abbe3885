//! Parsing received frames.

use super::header::{
    Aeth, AtomicEth, BTH_BYTES, Bth, DCETH_BYTES, DcEth, Deth, ICRC_BYTES, Reth, u32_at,
};
use super::icrc::icrc;
use super::opcode::{Class, Opcode, OpcodeFlags};
use super::path::{L3, Link, LinkKind, NetworkError, NetworkHeaders};
use super::pool::Packet;

/// Reasons for rejecting a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ParseError {
    /// It is not RDMA.
    NotRdma,
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
    /// Address and length in the memory that sender and receiver share. It may change
    /// at any time.
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

    /// The bytes; none for a payload in memory, which only RDMA writes have.
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
    pub network: NetworkHeaders,
    /// The base transport header.
    pub bth: Bth,
    /// The opcode; none if reserved.
    pub opcode: Option<Opcode>,
    extended_headers: &'a [u8],
    /// The payload without padding.
    pub payload: Payload<'a>,
}

impl<'a> View<'a> {
    /// Parses and checks a frame.
    ///
    /// # Errors
    /// See [`ParseError`].
    #[inline]
    pub fn read(kind: LinkKind, frame: &'a [u8]) -> Result<Self, ParseError> {
        Self::parse(kind, frame, true)
    }

    /// As [`View::read`], whatever the ICRC.
    ///
    /// # Errors
    /// See [`ParseError`].
    pub fn read_unchecked(kind: LinkKind, frame: &'a [u8]) -> Result<Self, ParseError> {
        Self::parse(kind, frame, false)
    }

    /// Returns the offset of the payload in the frame.
    #[must_use]
    pub fn payload_at(&self) -> usize {
        self.network.bth_at + BTH_BYTES + self.extended_headers.len()
    }

    /// Parses a packet. Its ICRC is checked if it has one.
    ///
    /// # Errors
    /// See [`ParseError`].
    #[inline]
    pub fn parse_packet(packet: &'a Packet) -> Result<Self, ParseError> {
        Self::parse(packet.kind(), packet.frame(), packet.has_icrc())
    }

    /// Parses a packet whose ICRC is already checked.
    #[inline]
    pub(crate) fn parse_checked(packet: &'a Packet) -> Result<Self, ParseError> {
        Self::parse(packet.kind(), packet.frame(), false)
    }

    /// Returns a packet that loops back without a frame.
    #[inline]
    pub(crate) fn looped_back(
        link: Link,
        l3: L3,
        bth: Bth,
        extended_headers: &'a [u8],
        payload: Payload<'a>,
    ) -> Self {
        Self {
            frame: &[],
            network: NetworkHeaders {
                link,
                l3,
                l3_at: 0,
                bth_at: 0,
                end: 0,
            },
            bth,
            opcode: Opcode::decode(bth.opcode),
            extended_headers,
            payload,
        }
    }

    #[inline]
    fn parse(kind: LinkKind, frame: &'a [u8], check_icrc: bool) -> Result<Self, ParseError> {
        let network = NetworkHeaders::read(kind, frame).map_err(|e| match e {
            NetworkError::NotRdma => ParseError::NotRdma,
            NetworkError::Malformed => ParseError::Malformed,
        })?;
        let frame = &frame[..network.end];
        let headers_at = network.bth_at + BTH_BYTES;
        let Some(Ok(bth)) = frame
            .get(network.bth_at..headers_at)
            .map(<&[u8; BTH_BYTES]>::try_from)
        else {
            return Err(ParseError::Malformed);
        };
        let bth = Bth::read(bth);
        let end = network.end - ICRC_BYTES;
        if check_icrc {
            let expected = icrc(frame, kind, network.l3, network.l3_at, network.bth_at);
            if frame[end..] != expected.to_le_bytes() {
                return Err(ParseError::BadIcrc);
            }
        }
        if bth.version != 0 || (end - headers_at) % 4 != 0 {
            return Err(ParseError::Malformed);
        }
        let opcode = Opcode::decode(bth.opcode);
        let payload_at = headers_at + opcode.map_or(0, Opcode::extended_length);
        let payload_end = end - usize::from(bth.pad);
        if payload_at > payload_end {
            return Err(ParseError::Malformed);
        }
        Ok(Self {
            frame,
            network,
            bth,
            opcode,
            extended_headers: &frame[headers_at..payload_at],
            payload: Payload::Bytes(&frame[payload_at..payload_end]),
        })
    }

    /// Whether the opcode has any of `flags`; false if the opcode is reserved.
    #[inline]
    #[must_use]
    pub fn has(&self, flags: OpcodeFlags) -> bool {
        self.opcode.is_some_and(|o| o.flags().has(flags))
    }

    /// Bytes of the class-specific extended header, which precedes RETH and
    /// AtomicETH.
    #[inline]
    fn class_header_bytes(&self) -> usize {
        match self.opcode.map(|o| o.class) {
            Some(Class::Ud) => 8,
            Some(Class::Xrc) if !self.has(OpcodeFlags::RESPONSE) => 4,
            Some(Class::Dc) if !self.has(OpcodeFlags::RESPONSE) => DCETH_BYTES,
            _ => 0,
        }
    }

    #[inline]
    fn header_at<const N: usize>(&self, at: usize) -> Option<&'a [u8; N]> {
        self.extended_headers.get(at..)?.first_chunk()
    }

    /// The RETH, if the operation has one.
    #[inline]
    #[must_use]
    pub fn reth(&self) -> Option<Reth> {
        if !self.has(OpcodeFlags::RETH) {
            return None;
        }
        self.header_at(self.class_header_bytes()).map(Reth::read)
    }

    /// The AtomicETH, if the operation has one.
    #[inline]
    #[must_use]
    pub fn atomic(&self) -> Option<AtomicEth> {
        if !self.has(OpcodeFlags::ATOMIC) || self.has(OpcodeFlags::RESPONSE) {
            return None;
        }
        self.header_at(self.class_header_bytes())
            .map(AtomicEth::read)
    }

    /// The AETH, if the operation has one and its syndrome is not reserved.
    #[inline]
    #[must_use]
    pub fn aeth(&self) -> Option<Aeth> {
        if !self.has(OpcodeFlags::AETH) {
            return None;
        }
        self.header_at(0).and_then(Aeth::read)
    }

    /// The value of the AtomicAckETH, if the operation has one.
    #[inline]
    #[must_use]
    pub fn atomic_value(&self) -> Option<u64> {
        if !(self.has(OpcodeFlags::ATOMIC) && self.has(OpcodeFlags::RESPONSE)) {
            return None;
        }
        self.header_at(4).map(|b| u64::from_be_bytes(*b))
    }

    /// The DETH, if the packet is a datagram.
    #[inline]
    #[must_use]
    pub fn deth(&self) -> Option<Deth> {
        (self.opcode?.class == Class::Ud).then(|| self.header_at(0).map(Deth::read))?
    }

    /// The SRQ number in the XRCETH of an XRC request.
    #[inline]
    #[must_use]
    pub fn xrc_srqn(&self) -> Option<u32> {
        if self.opcode?.class != Class::Xrc || self.has(OpcodeFlags::RESPONSE) {
            return None;
        }
        self.header_at::<4>(0).map(|b| u32_at(b, 0) & 0xff_ffff)
    }

    /// The DCETH of a request over a dynamic connection.
    #[inline]
    #[must_use]
    pub fn dceth(&self) -> Option<DcEth> {
        if self.opcode?.class != Class::Dc || self.has(OpcodeFlags::RESPONSE) {
            return None;
        }
        self.header_at(0).map(DcEth::read)
    }

    /// The immediate data or the key to invalidate; 0 if there is neither.
    #[inline]
    #[must_use]
    pub fn imm(&self) -> u32 {
        if self.has(OpcodeFlags::IMM) || self.has(OpcodeFlags::INVALIDATE) {
            self.extended_headers
                .last_chunk()
                .map_or(0, |b| u32::from_be_bytes(*b))
        } else {
            0
        }
    }
}
