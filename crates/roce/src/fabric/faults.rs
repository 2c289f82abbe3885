//! Random faults of a link, and port counters.

/// Faults that a port applies to the frames that it sends.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Faults {
    /// Transit time in nanoseconds.
    pub delay: u64,
    /// Largest random addition to the delay, in nanoseconds; order is kept.
    pub jitter: u64,
    /// Probability (0 to 1) that a frame is lost.
    pub loss: f64,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// Probability that a frame is held back while later ones pass.
    pub reorder: f64,
    /// How long a frame is held back at most, in nanoseconds; 0 stands for 50 us.
    pub reorder_delay: u64,
    /// Probability that one bit of a frame is flipped.
    pub corrupt: f64,
}

/// Counters of a port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PortCounters {
    /// Frames sent.
    pub sent: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Frames received.
    pub received: u64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Frames sent and lost, by [`Faults::loss`].
    pub lost: u64,
    /// Frames sent and corrupted, by [`Faults::corrupt`].
    pub corrupted: u64,
    /// Frames sent and duplicated, by [`Faults::duplicate`].
    pub duplicated: u64,
    /// Frames sent and held back, by [`Faults::reorder`].
    pub reordered: u64,
    /// Frames for this port that were dropped because its queue was full.
    pub overflow: u64,
    /// Frames sent without a receiver, with a wrong link kind or a forged source,
    /// or while the link was down.
    pub discarded: u64,
}
