//! Frames that a device sends and receives, as an observer is shown them.

use roce::packet::Packet;
use roce::pcap::Direction;

use crate::cause::Cause;

/// A frame that a device has sent or received.
#[derive(Clone, Copy, Debug)]
pub struct ObservedFrame<'a> {
    /// The frame, with its ICRC.
    pub packet: &'a Packet,
    /// Its direction.
    pub direction: Direction,
    /// The device's queue that has sent it, or that it is for; `None` if there is none, or
    /// several.
    pub queue: Option<u32>,
    /// Why it was dropped or refused, or a work request has failed by it.
    pub causes: &'a [Cause],
    /// Lines of the injected faults that it has set off.
    pub faults: &'a [usize],
}

/// An observer of a device's frames ([`Hca::observe_frames`](crate::Hca::observe_frames)). It is
/// called in the midst of the work, and must not wait.
pub trait FrameObserver: Send {
    /// Called for each frame: when the device hands it to its link, or has processed it.
    fn observe(&mut self, frame: &ObservedFrame<'_>);

    /// Called when the device has no more frames for now.
    fn flush(&mut self);
}
