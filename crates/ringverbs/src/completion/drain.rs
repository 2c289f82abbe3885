//! Draining a queue pair.

use std::time::Duration;

use super::wait::{deadline, is_over};
use super::{Completion, CompletionQueue};
use crate::qp::Released;
use crate::{CloseError, QueuePair, Result};

/// What a drained queue pair has left behind.
#[derive(Debug, Default)]
pub struct Drained {
    /// Completions of the queue pair, in order, flushed ones included.
    pub completions: Vec<Completion>,
    /// Operations for which the device gave no completion in time; some devices
    /// drop receives that were never used.
    pub released: Vec<Released>,
}

impl QueuePair {
    /// Moves the queue pair to the error state, reads its completions until
    /// nothing of it is in flight or the time is up, and destroys it: every
    /// buffer comes back. Completions of other queue pairs that are met go to
    /// `others`.
    ///
    /// `recv_cq` is needed if receives complete in another queue than sends. A
    /// timeout that the clock cannot tell is none.
    ///
    /// # Errors
    /// As [`QueuePair::close_and_drain`], with the queue pair; it is then in
    /// the error state, and what was read so far went to `others`.
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
                    // Said at the end: it is of nothing that is ours.
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
