//! Draining a queue pair, or one half of it.

use std::time::Duration;

use super::{RecvHalf, Released, SendHalf};
use crate::completion::wait::{deadline, is_over};
use crate::completion::{Completion, CompletionQueue};
use crate::operation::Operation;
use crate::{CloseError, Error, QueuePair, Result};

/// The operations of a drained queue pair.
#[derive(Debug, Default)]
pub struct Drained {
    /// Completions of the queue pair, in order, including flushed ones.
    pub completions: Vec<Completion>,
    /// Operations that did not complete before the timeout; some devices drop receives
    /// that were never consumed.
    pub released: Vec<Released>,
}

impl QueuePair {
    /// Moves the queue pair to the error state, reads its completions until no operation
    /// is in flight or the timeout has passed, and destroys it. All of its memory is
    /// returned. Completions of other queue pairs are passed to `others`.
    ///
    /// `recv_cq` is required if receives complete in another queue than sends. A timeout
    /// beyond the range of the clock is unlimited.
    ///
    /// # Errors
    /// Returns the queue pair, as [`QueuePair::close_and_drain`]. The queue pair is then in
    /// the error state, and the completions read so far were passed to `others`.
    pub fn drain(
        mut self,
        send_cq: &mut CompletionQueue,
        mut recv_cq: Option<&mut CompletionQueue>,
        timeout: Duration,
        mut others: impl FnMut(Completion),
    ) -> Result<Drained, CloseError<Self>> {
        let deadline = deadline(Some(timeout));
        if let Err(error) = self.set_error() {
            if !error.is_device_gone() {
                return Err(CloseError::new(self, error));
            }
        }
        let qp_num = self.qp_num();
        let mut completions = Vec::new();
        let mut failed = None;
        loop {
            let before = self.in_flight();
            let mut read = |queue: &mut CompletionQueue| loop {
                match queue.poll_one() {
                    Ok(Some(completion)) if completion.qp_num == qp_num => {
                        completions.push(completion);
                    }
                    Ok(Some(completion)) => others(completion),
                    Ok(None) => break,
                    // Returned at the end: it concerns no operation of this queue
                    // pair.
                    Err(error) => failed = Some(error),
                }
            };
            read(send_cq);
            if let Some(queue) = recv_cq.as_deref_mut() {
                read(queue);
            }
            if self.in_flight() == (0, 0) || is_over(deadline) {
                break;
            }
            if self.in_flight() == before {
                std::thread::yield_now();
            }
        }
        if let Some(error) = failed {
            completions.into_iter().for_each(others);
            return Err(CloseError::new(self, error));
        }
        match self.close_and_drain(send_cq, recv_cq) {
            Ok(released) => Ok(Drained {
                completions,
                released,
            }),
            Err(back) => {
                completions.into_iter().for_each(others);
                Err(back)
            }
        }
    }
}

impl SendHalf {
    /// Moves the queue pair to the error state and reads completions until no operation of
    /// this half is in flight, or the timeout has passed. Returns the completions of this
    /// half, including flushed ones, each with its memory. Completions of other queue
    /// pairs and of the other half are passed to `others`.
    ///
    /// Operations that [`in_flight`](Self::in_flight) still counts afterwards
    /// complete later, or are released with the queue pair. The other half is
    /// drained by its own thread, from its own completion queue or from the
    /// completions that `others` passes on.
    ///
    /// # Errors
    /// [`Error::Invalid`] if its operations do not complete in `cq`;
    /// [`Error::Corruption`] for a completion that matches no operation in flight, after
    /// all others were read and passed to `others`.
    pub fn drain(
        &mut self,
        cq: &mut CompletionQueue,
        timeout: Duration,
        others: impl FnMut(Completion),
    ) -> Result<Vec<Completion>> {
        check_completion_queue(cq.serves(self.completes_in()))?;
        ignore_removed_device(self.set_error())?;
        let is_own = completions_of(self.qp_num(), false);
        read_completions(cq, timeout, is_own, || self.in_flight() == 0, others)
    }
}

impl RecvHalf {
    /// As [`SendHalf::drain`]. Receives of a shared receive queue belong to that
    /// queue and are not waited for.
    ///
    /// # Errors
    /// As [`SendHalf::drain`].
    pub fn drain(
        &mut self,
        cq: &mut CompletionQueue,
        timeout: Duration,
        others: impl FnMut(Completion),
    ) -> Result<Vec<Completion>> {
        check_completion_queue(cq.serves(self.completes_in()))?;
        ignore_removed_device(self.set_error())?;
        let is_own = completions_of(self.qp_num(), true);
        read_completions(cq, timeout, is_own, || self.in_flight() == 0, others)
    }
}

fn check_completion_queue(matches: bool) -> Result<()> {
    matches.then_some(()).ok_or(Error::Invalid {
        what: "this is not the completion queue of the half",
    })
}

/// Returns a filter for the completions of a queue pair: of its receives, or of
/// all its other operations.
fn completions_of(qp_num: u32, receives: bool) -> impl Fn(&Completion) -> bool {
    move |completion| {
        completion.qp_num == qp_num && (completion.operation == Operation::Receive) == receives
    }
}

/// Ignores the error of a removed device, which has stopped its operations.
fn ignore_removed_device(result: Result<()>) -> Result<()> {
    match result {
        Err(error) if !error.is_device_gone() => Err(error),
        _ => Ok(()),
    }
}

fn read_completions(
    cq: &mut CompletionQueue,
    timeout: Duration,
    is_own: impl Fn(&Completion) -> bool,
    done: impl Fn() -> bool,
    mut others: impl FnMut(Completion),
) -> Result<Vec<Completion>> {
    let deadline = deadline(Some(timeout));
    let mut completions = Vec::new();
    let mut failed = None;
    // After the timeout, pending completions are still read, but not an unlimited number
    // of new ones of other queue pairs.
    let mut polls_left = cq.capacity();
    while polls_left > 0 {
        let timed_out = is_over(deadline);
        polls_left -= u32::from(timed_out);
        match cq.poll_one() {
            Ok(Some(completion)) if is_own(&completion) => completions.push(completion),
            Ok(Some(completion)) => others(completion),
            Ok(None) if timed_out || done() => break,
            Ok(None) => std::thread::yield_now(),
            // Returned at the end: it concerns no operation of this half.
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        None => Ok(completions),
        Some(error) => {
            completions.into_iter().for_each(others);
            Err(error)
        }
    }
}
