//! What a device sees of the work requests of queue pairs, whoever writes them to the queues.
//!
//! [`Hca::observe_work`](crate::Hca::observe_work) passes all events to an observer.

use std::fmt;
use std::sync::Arc;

use roce::transport::Status;

use crate::cause::WorkRequest;

/// An event in the life of a work request.
#[non_exhaustive]
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    clippy::large_enum_variant,
    reason = "passed by reference, and not kept"
)]
pub enum WorkEvent {
    /// A queue pair's doorbell has rung for it. Those of shared receive queues are not told.
    Posted(Posted),
    /// The device reads the data of a send, for the first time or again. Only observers of data
    /// ([`WorkObserver::of_data`]) are told.
    Reading {
        /// The queue pair.
        qpn: u32,
        /// As [`WorkRequest::number`].
        number: u32,
    },
    /// It has ended.
    Ended(Ended),
    /// A queue pair was reset or destroyed: the work requests in its queues are gone.
    Emptied {
        /// The queue pair.
        qpn: u32,
    },
}

/// A work request that was posted.
#[derive(Debug, Clone, PartialEq, Eq)]
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
    /// The data of an RDMA write of at most [`MAX_DATA`] bytes, if they can be read. Only observers
    /// of data ([`WorkObserver::of_data`]) are told.
    pub data: Option<Arc<[u8]>>,
}

/// Data of longer work requests are not told.
pub const MAX_DATA: u32 = 64 << 10;

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

impl CompletionLoad {
    /// Returns whether the queue overruns if all work requests complete before the program reads.
    pub fn is_excessive(&self) -> bool {
        self.outstanding > self.entries && !self.ignores_overrun
    }
}

impl fmt::Display for CompletionLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            cqn,
            entries,
            outstanding,
            ..
        } = self;
        write!(
            f,
            "completion queue {cqn:#x} has {entries} entries in the device, and {outstanding} \
             completions are unread or will come of work requests that are posted"
        )
    }
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
pub struct WorkObserver {
    observe: Box<dyn FnMut(&WorkEvent) -> bool + Send>,
    pub(crate) is_of_data: bool,
}

impl WorkObserver {
    /// Creates an observer that is called for each event. If it returns false for a work request
    /// that is [`Posted`], no more is told of the queue pair until it is
    /// [`Emptied`](WorkEvent::Emptied), and its work requests are not counted.
    pub fn new(observe: impl FnMut(&WorkEvent) -> bool + Send + 'static) -> Self {
        Self {
            observe: Box::new(observe),
            is_of_data: false,
        }
    }

    /// As [`new`](Self::new), for an observer that is also told the data of RDMA writes, and when
    /// the device reads data.
    pub fn of_data(observe: impl FnMut(&WorkEvent) -> bool + Send + 'static) -> Self {
        Self {
            is_of_data: true,
            ..Self::new(observe)
        }
    }

    pub(crate) fn tell(&mut self, event: &WorkEvent) -> bool {
        (self.observe)(event)
    }
}

impl fmt::Debug for WorkObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkObserver")
    }
}
