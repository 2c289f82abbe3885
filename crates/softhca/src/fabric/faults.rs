//! What goes wrong on a link, by chance.

/// What a port does to the frames that it sends.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Faults {
    /// Time on the way, nanoseconds.
    pub delay: u64,
    /// Up to this much more, at random; order is kept.
    pub jitter: u64,
    /// Probability (0 to 1) that a frame is lost.
    pub loss: f64,
    /// Probability that it arrives twice.
    pub duplicate: f64,
    /// Probability that it is held back while later ones pass.
    pub reorder: f64,
    /// For up to this long, nanoseconds; 0 stands for 50 us.
    pub reorder_delay: u64,
    /// Probability that a bit of it changes.
    pub corrupt: f64,
}

/// What a port has seen.
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
    /// Frames sent that were lost, by [`Faults::loss`].
    pub lost: u64,
    /// Frames sent that were changed, by [`Faults::corrupt`].
    pub corrupted: u64,
    /// Frames sent twice, by [`Faults::duplicate`].
    pub duplicated: u64,
    /// Frames sent that were held back, by [`Faults::reorder`].
    pub reordered: u64,
    /// Frames for this port that found its queue full.
    pub overflow: u64,
    /// Frames sent to nobody, or over a link that is down.
    pub discarded: u64,
}
