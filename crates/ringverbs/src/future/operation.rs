//! The futures.

use std::fmt;
use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll, ready};

use super::queue_pair::{NotPosted, Shared};
use super::slots::Outcome;
use super::{Cause, OperationError, Owned};
use crate::{Error, Success, WorkRequest};

/// The future of an operation; it returns the operation's memory.
///
/// If the future is dropped, the operation continues, and its memory is released when it
/// completes. (An operation that is waiting for room in the send queue is never posted.)
/// Different threads may poll it.
#[must_use = "unless awaited, the operation's memory is released when it completes"]
pub struct Operation<D: Owned> {
    shared: Arc<Shared>,
    state: OperationState<D>,
}

/// Slow-path states are boxed.
enum OperationState<D> {
    Posted(u32),
    /// The send queue was full.
    Full(Box<WorkRequest<D>>),
    Refused(Box<OperationError<D>>),
    Ended,
}

/// Returns the error of a future that is polled after completion.
fn ended<D>() -> OperationError<D> {
    let what = "the future was polled after completion";
    OperationError::new(Cause::Refused(Error::Invalid { what }), None)
}

/// Returns the memory of an operation that has ended.
fn finish<D: Owned>(outcome: Outcome) -> Result<(D, Success), OperationError<D>> {
    let data = D::from_payload(outcome.payload);
    match (outcome.result, data) {
        (Ok(success), Some(data)) => Ok((data, success)),
        (Ok(_), None) => Err(ended()),
        (Err(end), data) => Err(OperationError::new(end, data)),
    }
}

impl<D: Owned> Operation<D> {
    pub(super) fn new(shared: &Arc<Shared>, posted: Result<u32, NotPosted<D>>) -> Self {
        let state = match posted {
            Ok(slot) => OperationState::Posted(slot),
            Err(NotPosted::Full(request)) => OperationState::Full(Box::new(request)),
            Err(NotPosted::Refused(refused)) => OperationState::Refused(Box::new(refused)),
        };
        Self {
            shared: Arc::clone(shared),
            state,
        }
    }

    /// Returns whether the operation was posted; false if it was refused or is waiting for room
    /// in the send queue.
    pub fn is_posted(&self) -> bool {
        matches!(
            self.state,
            OperationState::Posted(_) | OperationState::Ended
        )
    }
}

impl<D: Owned> Unpin for Operation<D> {}

impl<D: Owned> Future for Operation<D> {
    type Output = Result<D, OperationError<D>>;

    fn poll(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        loop {
            if let OperationState::Posted(slot) = this.state {
                let outcome = ready!(this.shared.poll(slot, task));
                this.state = OperationState::Ended;
                return Poll::Ready(finish(outcome).map(|(data, _)| data));
            }
            this.state = match mem::replace(&mut this.state, OperationState::Ended) {
                OperationState::Full(request) => match this.shared.post_or_wait(*request, task) {
                    Ok(slot) => OperationState::Posted(slot),
                    Err(NotPosted::Full(request)) => {
                        this.state = OperationState::Full(Box::new(request));
                        return Poll::Pending;
                    }
                    Err(NotPosted::Refused(refused)) => return Poll::Ready(Err(refused)),
                },
                OperationState::Refused(refused) => return Poll::Ready(Err(*refused)),
                OperationState::Posted(_) | OperationState::Ended => {
                    return Poll::Ready(Err(ended()));
                }
            };
        }
    }
}

impl<D: Owned> Drop for Operation<D> {
    fn drop(&mut self) {
        if let OperationState::Posted(slot) = self.state {
            self.shared.abandon(slot);
        }
    }
}

impl<D: Owned> fmt::Debug for Operation<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("queue_pair", &self.shared.qp_num)
            .field("is_posted", &self.is_posted())
            .finish()
    }
}

/// A message that has arrived.
#[derive(Debug)]
pub struct Message<D> {
    /// The memory that was posted; a buffer has the message's length.
    pub data: D,
    /// Fields of the completion: immediate data, an invalidated key, the
    /// sender of a datagram.
    pub success: Success,
}

/// The future of a receive; it returns a [`Message`]. If it is dropped, its message goes to
/// the next receive; see [`AsyncQueuePair::receive`](super::AsyncQueuePair::receive).
#[must_use = "unless awaited, the message goes to the next receive"]
pub struct Receive<D: Owned> {
    shared: Arc<Shared>,
    state: ReceiveState<D>,
}

enum ReceiveState<D> {
    Claim(u64),
    Refused(Box<OperationError<D>>),
    Ended,
}

impl<D: Owned> Receive<D> {
    pub(super) fn new(shared: &Arc<Shared>, claim: u64) -> Self {
        Self {
            shared: Arc::clone(shared),
            state: ReceiveState::Claim(claim),
        }
    }

    pub(super) fn refused(shared: &Arc<Shared>, refused: OperationError<D>) -> Self {
        Self {
            shared: Arc::clone(shared),
            state: ReceiveState::Refused(Box::new(refused)),
        }
    }
}

impl<D: Owned> Unpin for Receive<D> {}

impl<D: Owned> Future for Receive<D> {
    type Output = Result<Message<D>, OperationError<D>>;

    fn poll(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        if let ReceiveState::Claim(claim) = this.state {
            let outcome = ready!(this.shared.poll_message(claim, task));
            this.state = ReceiveState::Ended;
            return Poll::Ready(finish(outcome).map(|(data, success)| Message { data, success }));
        }
        Poll::Ready(Err(
            match mem::replace(&mut this.state, ReceiveState::Ended) {
                ReceiveState::Refused(refused) => *refused,
                ReceiveState::Claim(_) | ReceiveState::Ended => ended(),
            },
        ))
    }
}

impl<D: Owned> Drop for Receive<D> {
    fn drop(&mut self) {
        if let ReceiveState::Claim(claim) = self.state {
            self.shared.withdraw(claim);
        }
    }
}

impl<D: Owned> fmt::Debug for Receive<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Receive")
            .field("queue_pair", &self.shared.qp_num)
            .finish()
    }
}

/// The future of [`AsyncQueuePair::room`](super::AsyncQueuePair::room).
#[derive(Debug)]
#[must_use = "futures do nothing unless awaited"]
pub struct Room {
    shared: Arc<Shared>,
}

impl Room {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
        }
    }
}

impl Future for Room {
    type Output = Result<(), Cause>;

    fn poll(self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<Self::Output> {
        self.shared.poll_room(task)
    }
}
