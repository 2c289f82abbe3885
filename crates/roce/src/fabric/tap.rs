//! Decisions about single frames, for tests.

use crate::packet::Packet;

/// A tap's decision about the delivery of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Delivery {
    /// The frame is lost.
    pub lost: bool,
    /// The frame arrives twice.
    pub duplicated: bool,
    /// Transit time in nanoseconds, added to that of the port's
    /// [`Faults`](super::Faults).
    pub delay: u64,
}

/// Decides what happens to each frame.
pub trait Tap: Send {
    /// Called at `now` for a frame that port `from` sends to port `to`, numbered in
    /// order of creation, before the port's random faults. It may change the frame.
    /// A multicast frame is passed once for each receiver. The fabric is locked
    /// meanwhile.
    fn transfer(&mut self, now: u64, from: usize, to: usize, packet: &mut Packet) -> Delivery;
}
