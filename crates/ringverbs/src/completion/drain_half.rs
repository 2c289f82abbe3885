//! Giving up one half of a queue pair that was split.

use std::time::Duration;

use super::{Completion, CompletionQueue, wait};
use crate::operation::Operation;
use crate::qp::{RecvHalf, SendHalf};
use crate::{Error, Result};

impl SendHalf {
    /// Moves the queue pair to the error state, and reads completions until
    /// nothing that this half has posted is in flight, or the time is up: what
    /// was done, and what was flushed, each with its memory. Completions of
    /// other queue pairs, and of the other half, go to `others`.
    ///
    /// What [`in_flight`](Self::in_flight) still counts then comes with later
    /// completions, or is released with the queue pair. The other half does the
    /// same in its own thread, on a queue of its own, or from the completions
    /// that it is sent by `others`.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `cq` is not where its operations complete;
    /// [`Error::Corruption`] for a completion of nothing, once all else is read.
    /// What was read goes to `others` then.
    pub fn drain(
        &mut self,
        cq: &mut CompletionQueue,
        timeout: Duration,
        others: impl FnMut(Completion),
    ) -> Result<Vec<Completion>> {
        must_be_its_queue(cq.serves(self.completes_in()))?;
        tolerate_loss(self.set_error())?;
        let mine = completions_of(self.qp_num(), false);
        read(cq, timeout, mine, || self.in_flight() == 0, others)
    }
}

impl RecvHalf {
    /// As [`SendHalf::drain`]. Receives of a shared queue are that queue's, and
    /// are not waited for.
    ///
    /// # Errors
    /// As there.
    pub fn drain(
        &mut self,
        cq: &mut CompletionQueue,
        timeout: Duration,
        others: impl FnMut(Completion),
    ) -> Result<Vec<Completion>> {
        must_be_its_queue(cq.serves(self.completes_in()))?;
        tolerate_loss(self.set_error())?;
        let mine = completions_of(self.qp_num(), true);
        read(cq, timeout, mine, || self.in_flight() == 0, others)
    }
}

fn must_be_its_queue(is_it: bool) -> Result<()> {
    is_it.then_some(()).ok_or(Error::Invalid {
        what: "this is not the completion queue of the half",
    })
}

/// Whether a completion is one of that queue pair's receives, or of all else
/// that it does.
fn completions_of(qp_num: u32, receives: bool) -> impl Fn(&Completion) -> bool {
    move |completion| {
        completion.qp_num == qp_num && (completion.operation == Operation::Receive) == receives
    }
}

/// A device that is gone has stopped by itself.
fn tolerate_loss(result: Result<()>) -> Result<()> {
    match result {
        Err(error) if !error.is_device_gone() => Err(error),
        _ => Ok(()),
    }
}

fn read(
    cq: &mut CompletionQueue,
    timeout: Duration,
    mine: impl Fn(&Completion) -> bool,
    done: impl Fn() -> bool,
    mut others: impl FnMut(Completion),
) -> Result<Vec<Completion>> {
    let deadline = wait::deadline(Some(timeout));
    let mut completions = Vec::new();
    let mut failed = None;
    // When the time is up, what is there by then is read, but not what others
    // go on putting there.
    let mut late = cq.capacity();
    while late > 0 {
        let over = wait::is_over(deadline);
        late -= u32::from(over);
        match cq.poll_one() {
            Ok(Some(completion)) if mine(&completion) => completions.push(completion),
            Ok(Some(completion)) => others(completion),
            Ok(None) if over || done() => break,
            Ok(None) => std::thread::yield_now(),
            // Said at the end: it is of nothing that is ours.
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
