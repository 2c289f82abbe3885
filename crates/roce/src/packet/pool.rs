//! Packets and the pool of their buffers.

use std::sync::{Arc, Mutex, PoisonError};

use super::header::ICRC_BYTES;
use super::icrc::icrc;
use super::path::{LinkKind, NetworkHeaders};

/// Capacity of a buffer in bytes: a payload of 4096 with every header, and some
/// more for frames that are not RDMA.
pub const PACKET_CAPACITY: usize = 4352;

/// Always [`PACKET_CAPACITY`] bytes, except while the packet is dropped.
type Buffer = Box<[u8]>;

/// A pool of packet buffers. Cheap to clone; all clones are one pool. The HCAs of a
/// process should share one pool: a buffer returns to the pool that it came from,
/// even if another HCA drops it.
#[derive(Clone, Default)]
pub struct Pool {
    free: Arc<Mutex<Vec<Buffer>>>,
    defers_icrc: bool,
}

impl Pool {
    /// Creates an empty pool. It grows on demand and does not shrink.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty pool for packets that get their ICRC only when they leave this
    /// host's memory, or when their bytes are inspected or changed ([`Packet::add_icrc`]).
    #[must_use]
    pub fn with_deferred_icrc() -> Self {
        Self {
            defers_icrc: true,
            ..Self::default()
        }
    }

    /// Whether new packets have no ICRC yet.
    pub(super) fn defers_icrc(&self) -> bool {
        self.defers_icrc
    }

    /// Returns an empty frame. Allocates only if no buffer is free.
    #[must_use]
    pub fn get(&self, kind: LinkKind) -> Packet {
        let free = self
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        let buffer = free.unwrap_or_else(|| vec![0; PACKET_CAPACITY].into_boxed_slice());
        Packet {
            buffer,
            pool: self.clone(),
            length: 0,
            kind,
            has_icrc: true,
        }
    }

    /// Returns a copy of `frame`; none if it is longer than [`PACKET_CAPACITY`].
    #[must_use]
    pub fn copy_of(&self, kind: LinkKind, frame: &[u8]) -> Option<Packet> {
        let mut packet = self.get(kind);
        packet.buffer.get_mut(..frame.len())?.copy_from_slice(frame);
        packet.length = frame.len();
        Some(packet)
    }

    /// The number of free buffers.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }
}

/// A frame, from the first byte of the link header to the ICRC (without the
/// Ethernet FCS or the InfiniBand VCRC). Its buffer returns to its pool when it is
/// dropped.
pub struct Packet {
    buffer: Buffer,
    pool: Pool,
    length: usize,
    kind: LinkKind,
    /// The frame has its ICRC, or is not RDMA.
    has_icrc: bool,
}

impl Packet {
    /// The link that the frame is for.
    #[inline]
    #[must_use]
    pub fn kind(&self) -> LinkKind {
        self.kind
    }

    /// Sets the link that the frame is for.
    #[inline]
    pub fn set_kind(&mut self, kind: LinkKind) {
        self.kind = kind;
    }

    /// The frame. Without [`Packet::has_icrc`], the four bytes of the ICRC are unspecified.
    #[inline]
    #[must_use]
    pub fn frame(&self) -> &[u8] {
        &self.buffer[..self.length]
    }

    /// Whether the frame has its ICRC, or is not RDMA.
    #[inline]
    #[must_use]
    pub fn has_icrc(&self) -> bool {
        self.has_icrc
    }

    /// Marks the frame as one whose ICRC must not be checked: the frame has not left this
    /// host's memory, or its ICRC is already checked.
    #[inline]
    pub fn mark_without_icrc(&mut self) {
        self.has_icrc = false;
    }

    /// Adds the ICRC, if the frame has none.
    pub fn add_icrc(&mut self) {
        if self.has_icrc {
            return;
        }
        self.has_icrc = true;
        let frame = &mut self.buffer[..self.length];
        if let Ok(network) = NetworkHeaders::read(self.kind, frame) {
            let frame = &mut frame[..network.end];
            let value = icrc(frame, self.kind, network.l3, network.l3_at, network.bth_at);
            let end = frame.len() - ICRC_BYTES;
            frame[end..].copy_from_slice(&value.to_le_bytes());
        }
    }

    /// The frame, mutable and with its ICRC.
    #[inline]
    pub fn frame_mut(&mut self) -> &mut [u8] {
        self.add_icrc();
        &mut self.buffer[..self.length]
    }

    /// The whole buffer of [`PACKET_CAPACITY`] bytes, with unspecified content.
    /// [`Packet::set_length`] makes the written part the frame.
    #[inline]
    pub fn buffer_mut(&mut self) -> &mut [u8] {
        &mut self.buffer
    }

    /// Makes the first `length` bytes of the buffer the frame, at most
    /// [`PACKET_CAPACITY`].
    #[inline]
    pub fn set_length(&mut self, length: usize) {
        self.length = length.min(PACKET_CAPACITY);
    }
}

impl Clone for Packet {
    fn clone(&self) -> Self {
        let mut copy = self.pool.get(self.kind);
        copy.length = self.length;
        copy.frame_mut().copy_from_slice(self.frame());
        copy.has_icrc = self.has_icrc;
        copy
    }
}

impl Drop for Packet {
    fn drop(&mut self) {
        // `take` leaves an empty box, which allocates nothing.
        let buffer = std::mem::take(&mut self.buffer);
        self.pool
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(buffer);
    }
}

impl std::fmt::Debug for Packet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Packet")
            .field("kind", &self.kind)
            .field("length", &self.length)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_return_to_the_pool() {
        let pool = Pool::new();
        let a = pool.get(LinkKind::Ib);
        let b = a.clone();
        drop((a, b));
        assert_eq!(pool.free(), 2);
        let c = pool.copy_of(LinkKind::Ethernet, &[1, 2, 3]).unwrap();
        assert_eq!((pool.free(), c.frame()), (1, &[1, 2, 3][..]));
        assert!(
            pool.copy_of(LinkKind::Ethernet, &[0; PACKET_CAPACITY + 1])
                .is_none()
        );
        assert_eq!(pool.free(), 1);
    }
}
