//! Flow control: credits and the end of the stream, without I/O.
//!
//! A side may have as many messages in flight as receives are posted for them. This is the
//! window: the smaller number of receives of both sides. Each message consumes a credit,
//! and each reposted receive returns one, in the [`ImmediateData`] of the next message in
//! the opposite direction. When half of the window is owed and no data is due, a message
//! without bytes carries the credits.
//!
//! Such a message consumes a credit itself. Two rules prevent a deadlock:
//!
//! - Data leaves [`RESERVE`] credits unused, the end of the stream one.
//! - A message without bytes returns half of the window, more than the reserve.
//!
//! Suppose that side A has no credit, and nothing is in flight. Then the last message of A
//! had no bytes, because other messages leave a credit. It gave side B more credits than the
//! reserve, so B can send data, which returns the credit of A's message; if B has no data,
//! it needs nothing from A. The directions do not wait for each other: an unread direction
//! does not block the other.

use super::messages::{Hello, ImmediateData};

/// Credits that data leaves unused.
pub(super) const RESERVE: u32 = 2;

/// The flow control state of one side.
#[derive(Debug)]
pub(super) struct Flow {
    /// Messages that may be sent.
    credits: u32,
    /// Messages that may be in flight in each direction.
    window: u32,
    /// Receives that were reposted and not yet reported to the peer.
    owed: u32,
    /// The end mark of the outgoing stream.
    end: EndMark,
    /// Whether the peer's stream has ended.
    peer_ended: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EndMark {
    NotRequested,
    Requested,
    Sent,
}

/// A protocol violation by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Violation {
    /// Missing or malformed immediate data.
    Immediate,
    /// More credits than there are receives.
    Credits,
    /// Data, or another end mark, after the end.
    AfterEnd,
}

impl Violation {
    pub fn text(self) -> &'static str {
        match self {
            Self::Immediate => "stream protocol: a message without valid immediate data",
            Self::Credits => "stream protocol: the peer gives more credits than it has receives",
            Self::AfterEnd => "stream protocol: data after the end",
        }
    }
}

impl Flow {
    pub fn new(ours: Hello, peers: Hello) -> Self {
        let window = ours.receives.min(peers.receives).into();
        Self {
            credits: window,
            window,
            owed: 0,
            end: EndMark::NotRequested,
            peer_ended: false,
        }
    }

    /// Returns the number of data messages that may be sent now.
    pub fn room(&self) -> u32 {
        match self.end {
            EndMark::NotRequested => self.credits.saturating_sub(RESERVE),
            EndMark::Requested | EndMark::Sent => 0,
        }
    }

    /// Returns the immediate data of a data message; requires [`room`](Self::room).
    pub fn data(&mut self) -> ImmediateData {
        self.message(false)
    }

    /// Returns the immediate data of a message without bytes, if one is due.
    pub fn due(&mut self) -> Option<ImmediateData> {
        if self.end == EndMark::Requested && self.credits >= RESERVE {
            self.end = EndMark::Sent;
            return Some(self.message(true));
        }
        (self.credits > 0 && self.owed >= self.window / 2).then(|| self.message(false))
    }

    fn message(&mut self, fin: bool) -> ImmediateData {
        self.credits = self.credits.saturating_sub(1);
        // All owed credits fit: they do not exceed the window, a `u16`.
        let credits = u16::try_from(self.owed).unwrap_or(u16::MAX);
        self.owed -= u32::from(credits);
        ImmediateData { credits, fin }
    }

    /// Processes the immediate data of a received message.
    pub fn received(&mut self, immediate: ImmediateData, len: usize) -> Result<(), Violation> {
        if self.peer_ended && (immediate.fin || len > 0) {
            return Err(Violation::AfterEnd);
        }
        let credits = self.credits + u32::from(immediate.credits);
        if credits > self.window {
            return Err(Violation::Credits);
        }
        self.credits = credits;
        self.peer_ended |= immediate.fin;
        Ok(())
    }

    /// Records that receives of processed messages were reposted.
    pub fn posted(&mut self, receives: u32) {
        self.owed = self.owed.saturating_add(receives).min(self.window);
    }

    /// Requests the end mark, which is sent when credits allow.
    pub fn finish(&mut self) {
        if self.end == EndMark::NotRequested {
            self.end = EndMark::Requested;
        }
    }

    /// Returns whether no more data is accepted.
    pub fn is_finished(&self) -> bool {
        self.end != EndMark::NotRequested
    }

    /// Returns whether the end mark was returned by [`due`](Self::due).
    pub fn end_is_sent(&self) -> bool {
        self.end == EndMark::Sent
    }

    /// Returns whether the peer's end mark has arrived.
    pub fn peer_ended(&self) -> bool {
        self.peer_ended
    }
}

#[cfg(test)]
mod tests;
