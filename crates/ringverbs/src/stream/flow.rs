//! Who may send when: credits and the end of the stream, without any I/O.
//!
//! A side may have as many messages on the way as there are receives posted for
//! them (the window: the receives of the side that has fewer). Each message takes
//! a credit, and each receive that is posted again gives one back, in the
//! [`Note`] of the next message that goes the other way. When half of the window
//! is owed and there is no data to go along, a message without bytes takes it.
//!
//! Such a message takes a credit itself. That this never comes to a stop is due
//! to two rules:
//!
//! - Data leaves [`RESERVE`] credits alone, the end of the stream one.
//! - A message without bytes gives half of the window, more than the reserve.
//!
//! For suppose that one side, A, has no credit, and nothing is on its way. Then
//! the last message that A sent was one without bytes, since others leave a
//! credit. Where it arrived it brought more credits than the reserve, so the
//! other side could send data, which brings back the credit of that message; and
//! if it has no data, it needs nothing of A. The two directions do not wait for
//! each other: one that nobody reads from does not stop the other.

use super::wire::{Hello, Note};

/// Credits that data leaves alone.
pub(super) const RESERVE: u32 = 2;

/// The state of one side.
#[derive(Debug)]
pub(super) struct Flow {
    /// Messages that may be sent.
    credits: u32,
    /// Messages that may be on the way, in each direction.
    window: u32,
    /// Receives that were posted again, and that the peer does not know of.
    owed: u32,
    /// Our end of the stream.
    end: End,
    /// The peer's bytes are all here.
    peer_ended: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Open,
    Wanted,
    Sent,
}

/// The peer does not keep to the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Violation {
    /// Immediate data that is missing, or means nothing.
    Note,
    /// More credits than there are receives.
    Credits,
    /// Bytes, or another end, after the end.
    AfterEnd,
}

impl Violation {
    pub fn text(self) -> &'static str {
        match self {
            Self::Note => "stream protocol: a message without a valid note",
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
            end: End::Open,
            peer_ended: false,
        }
    }

    /// Messages with data that may be sent now.
    pub fn room(&self) -> u32 {
        match self.end {
            End::Open => self.credits.saturating_sub(RESERVE),
            End::Wanted | End::Sent => 0,
        }
    }

    /// The note of a message with data; there must be [`room`](Self::room).
    pub fn data(&mut self) -> Note {
        self.message(false)
    }

    /// The note of a message without bytes, if one is due.
    pub fn due(&mut self) -> Option<Note> {
        if self.end == End::Wanted && self.credits >= RESERVE {
            self.end = End::Sent;
            return Some(self.message(true));
        }
        (self.credits > 0 && self.owed >= self.window / 2).then(|| self.message(false))
    }

    fn message(&mut self, fin: bool) -> Note {
        self.credits = self.credits.saturating_sub(1);
        // A note holds all: they are no more than the window, a `u16`.
        let credits = u16::try_from(self.owed).unwrap_or(u16::MAX);
        self.owed -= u32::from(credits);
        Note { credits, fin }
    }

    /// A message has come.
    pub fn received(&mut self, note: Note, len: usize) -> Result<(), Violation> {
        if self.peer_ended && (note.fin || len > 0) {
            return Err(Violation::AfterEnd);
        }
        let credits = self.credits + u32::from(note.credits);
        if credits > self.window {
            return Err(Violation::Credits);
        }
        self.credits = credits;
        self.peer_ended |= note.fin;
        Ok(())
    }

    /// Receives of messages that are done with are posted again.
    pub fn posted(&mut self, receives: u32) {
        self.owed = self.owed.saturating_add(receives).min(self.window);
    }

    /// No more data: the end goes out when it may.
    pub fn finish(&mut self) {
        if self.end == End::Open {
            self.end = End::Wanted;
        }
    }

    /// Whether no more data is taken.
    pub fn is_finished(&self) -> bool {
        self.end != End::Open
    }

    /// Whether the end has been handed out to be sent.
    pub fn end_is_sent(&self) -> bool {
        self.end == End::Sent
    }

    /// Whether the peer's end has come.
    pub fn peer_ended(&self) -> bool {
        self.peer_ended
    }
}

#[cfg(test)]
#[path = "flow_tests.rs"]
mod tests;
