//! What a device sees of the work requests of queue pairs, whoever writes them to the queues.
//!
//! [`Hca::observe_work`](crate::Hca::observe_work) passes all events to an observer.

use std::fmt;

use roce::transport::Status;

use crate::cause::WorkRequest;

/// An event in the life of a work request.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "passed by reference, and not kept"
)]
pub enum WorkEvent {
    /// A queue pair's doorbell has rung for it. Those of shared receive queues are not told.
    Posted(Posted),
    /// It has ended.
    Ended(Ended),
    /// A queue pair was reset or destroyed: the work requests in its queues are gone.
    Emptied {
        /// The queue pair.
        qpn: u32,
    },
}

/// A work request that was posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posted {
    /// The work request. A send with other data than buffers ([`Self::is_inline`]) may have
    /// buffers, too.
    pub work: WorkRequest,
    /// It has a completion also if it succeeds.
    pub is_signaled: bool,
    /// It contains data.
    pub is_inline: bool,
    /// Its completion queue.
    pub queue: CompletionLoad,
}

/// How many completions a completion queue may get before the program reads any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompletionLoad {
    /// Its number.
    pub cqn: u32,
    /// Number of its entries.
    pub entries: u32,
    /// Completions that the program has not read, and work requests that will have one. Those of
    /// shared receive queues and DC targets are not counted.
    pub outstanding: u32,
    /// It has overrun, or does not detect that.
    pub ignores_overrun: bool,
}

/// A work request that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// The queue pair.
    pub qpn: u32,
    /// The completion queue.
    pub cqn: u32,
    /// It is a send.
    pub is_send: bool,
    /// As [`WorkRequest::number`].
    pub number: Option<u32>,
    /// Whether it has succeeded.
    pub status: Status,
    /// Bytes of the message that was received, or of the answer.
    pub length: u32,
    /// It has a completion.
    pub has_completion: bool,
}

/// An observer of work requests.
pub struct WorkObserver(Box<dyn FnMut(&WorkEvent) -> bool + Send>);

impl WorkObserver {
    /// Creates an observer that is called for each event. If it returns false for a work request
    /// that is [`Posted`], no more is told of the queue pair until it is
    /// [`Emptied`](WorkEvent::Emptied), and its work requests are not counted.
    pub fn new(observe: impl FnMut(&WorkEvent) -> bool + Send + 'static) -> Self {
        Self(Box::new(observe))
    }

    pub(crate) fn tell(&mut self, event: &WorkEvent) -> bool {
        (self.0)(event)
    }
}

impl fmt::Debug for WorkObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkObserver")
    }
}
