//! Draining one half of a split queue pair.

use std::time::Duration;

use super::{Completion, CompletionQueue, wait};
use crate::operation::Operation;
use crate::qp::{RecvHalf, SendHalf};
use crate::{Error, Result};

impl SendHalf {
    /// Moves the queue pair to the error state and reads completions until
    /// nothing that this half has posted is in flight, or the timeout has passed.
    /// Returns its completions, flushed ones included, each with its memory.
    /// Completions of other queue pairs and of the other half are passed to
    /// `others`.
    ///
    /// Operations that [`in_flight`](Self::in_flight) still counts afterwards
    /// complete later, or are released with the queue pair. The other half is
    /// drained by its own thread, from its own completion queue or from the
    /// completions that `others` passes on.
    ///
    /// # Errors
    /// [`Error::Invalid`] if its operations do not complete in `cq`;
    /// [`Error::Corruption`] for a completion of no operation in flight, after
    /// everything else was read. The completions read were passed to `others`
    /// then.
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

/// Returns a filter for the completions of a queue pair: of its receives, or of
/// all its other operations.
fn completions_of(qp_num: u32, receives: bool) -> impl Fn(&Completion) -> bool {
    move |completion| {
        completion.qp_num == qp_num && (completion.operation == Operation::Receive) == receives
    }
}

/// A removed device has stopped by itself.
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
    // After the timeout, completions that are already there are read, but not
    // those that other queue pairs keep adding.
    let mut late = cq.capacity();
    while late > 0 {
        let over = wait::is_over(deadline);
        late -= u32::from(over);
        match cq.poll_one() {
            Ok(Some(completion)) if mine(&completion) => completions.push(completion),
            Ok(Some(completion)) => others(completion),
            Ok(None) if over || done() => break,
            Ok(None) => std::thread::yield_now(),
            // Reported at the end: it concerns no operation of this half.
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
