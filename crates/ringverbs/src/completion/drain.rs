//! Draining a queue pair.

use std::time::Duration;

use super::wait::{deadline, is_over};
use super::{Completion, CompletionQueue};
use crate::qp::Released;
use crate::{CloseError, QueuePair, Result};

/// The operations of a drained queue pair.
#[derive(Debug, Default)]
pub struct Drained {
    /// Completions of the queue pair, in order, including flushed ones.
    pub completions: Vec<Completion>,
    /// Operations without a completion until the timeout; some devices drop
    /// receives that were never consumed.
    pub released: Vec<Released>,
}

impl QueuePair {
    /// Moves the queue pair to the error state, reads its completions until
    /// nothing of it is in flight or the timeout has passed, and destroys it. All
    /// its memory is returned. Completions of other queue pairs are passed to
    /// `others`.
    ///
    /// `recv_cq` is needed if receives complete in another queue than sends. A
    /// timeout beyond the range of the clock is unlimited.
    ///
    /// # Errors
    /// Returns the queue pair, as [`QueuePair::close_and_drain`]. It is in the
    /// error state then, and the completions read so far were passed to `others`.
    pub fn drain(
        mut self,
        send_cq: &mut CompletionQueue,
        mut recv_cq: Option<&mut CompletionQueue>,
        timeout: Duration,
        mut others: impl FnMut(Completion),
    ) -> Result<Drained, CloseError<Self>> {
        let deadline = deadline(Some(timeout));
        if let Err(error) = self.set_error()
            && !error.is_device_gone()
        {
            return Err(CloseError::new(self, error));
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
                    // Reported at the end: it concerns no operation of this queue
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
