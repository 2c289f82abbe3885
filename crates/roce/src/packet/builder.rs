//! Building packets.

use super::header::{BTH_BYTES, Bth, ICRC_BYTES};
use super::icrc::icrc;
use super::path::Template;
use super::pool::{PACKET_CAPACITY, Packet, Pool};

/// A packet under construction: network headers and BTH first, then extended
/// headers and payload in the order of the wire, then [`PacketBuilder::finish`].
pub struct PacketBuilder<'a> {
    packet: Packet,
    template: &'a Template,
    bth_at: usize,
    at: usize,
    pad: usize,
    defers_icrc: bool,
}

impl<'a> PacketBuilder<'a> {
    /// Begins a packet with `payload` bytes of payload. Sets the BTH's pad count
    /// from that.
    #[inline]
    #[must_use]
    pub fn new(pool: &Pool, template: &'a Template, mut bth: Bth, payload: usize) -> Self {
        let mut packet = pool.get(template.kind());
        let network = template.bytes();
        let pad = payload.wrapping_neg() & 3;
        bth.pad = pad as u8;
        let buffer = packet.buffer_mut();
        buffer[..network.len()].copy_from_slice(network);
        let bth_at = network.len();
        let at = bth_at + BTH_BYTES;
        buffer[bth_at..at].copy_from_slice(&bth.bytes());
        Self {
            packet,
            template,
            bth_at,
            at,
            pad,
            defers_icrc: pool.defers_icrc(),
        }
    }

    /// Appends an extended header.
    #[inline]
    pub fn put(&mut self, header: &[u8]) {
        self.space(header.len()).copy_from_slice(header);
    }

    /// Appends `length` bytes for the caller to fill in. Payloads up to the largest
    /// ([`super::Mtu::B4096`]) fit.
    #[inline]
    pub fn space(&mut self, length: usize) -> &mut [u8] {
        let start = self.at.min(PACKET_CAPACITY);
        self.at = (start + length).min(PACKET_CAPACITY);
        &mut self.packet.buffer_mut()[start..self.at]
    }

    /// Adds the padding, fills in the lengths and appends the ICRC, unless the pool defers
    /// it.
    #[inline]
    #[must_use]
    pub fn finish(mut self) -> Packet {
        let pad = self.pad;
        self.space(pad + ICRC_BYTES)[..pad].fill(0);
        self.packet.set_length(self.at);
        let kind = self.template.kind();
        let (l3, l3_at) = self.template.l3();
        let bth_at = self.bth_at;
        let frame = self.packet.frame_mut();
        self.template.finish(frame);
        if self.defers_icrc {
            self.packet.mark_without_icrc();
            return self.packet;
        }
        let icrc = icrc(frame, kind, l3, l3_at, bth_at).to_le_bytes();
        let end = frame.len() - ICRC_BYTES;
        frame[end..].copy_from_slice(&icrc);
        self.packet
    }
}
