//! The last causes: for programs that ask why something failed ([`Embedded::explanation`]), and
//! for the errors of refused commands ([`Kernel::refusal`]).
//!
//! Kept is what ends a work request, a copy of a value; nothing is formatted before somebody
//! asks.
//!
//! [`Embedded::explanation`]: crate::Embedded::explanation
//! [`Kernel::refusal`]: uverbs::kernel::Kernel::refusal

use std::collections::VecDeque;

use nix::unistd::{Pid, gettid};
use roce::transport::{self, Failure, Refusal};
use softhca::cause::{AccessError, Cause as DeviceCause};

use crate::driver::cause::{Cause, VerbError, described};

/// Number of causes that are kept.
const KEPT: usize = 64;

/// The last causes of a device.
#[derive(Debug, Default)]
pub(crate) struct Explanations {
    /// An access that failed, before the cause of its request is known.
    access: Option<AccessError>,
    /// Causes by queue pair, oldest first.
    recent: VecDeque<(u32, transport::Cause, Option<AccessError>)>,
    /// Queue pairs whose peers had to try again, since no receive was posted or memory was
    /// absent, with the last of these causes; oldest first.
    not_ready: VecDeque<(u32, Refusal)>,
    /// The last refused command, and the thread that gave it.
    refusal: Option<(Pid, Cause)>,
}

impl Explanations {
    /// Keeps a cause, if it ends a work request or is a refused command.
    pub(crate) fn keep(&mut self, cause: &Cause) {
        match cause {
            Cause::Verb { .. } => self.refusal = Some((gettid(), *cause)),
            Cause::Device(DeviceCause::Access(error)) => self.access = Some(*error),
            Cause::Device(DeviceCause::Transport {
                qpn: Some(qpn),
                cause,
            }) => {
                let access = self.access.take();
                match cause {
                    transport::Cause::Failed(Failure::Flushed) | transport::Cause::Dropped(_) => {}
                    // The peer tries again.
                    transport::Cause::Refused(refusal) if refusal.is_retried() => {
                        self.not_ready.retain(|(known, _)| known != qpn);
                        push(&mut self.not_ready, (*qpn, *refusal));
                    }
                    transport::Cause::Failed(_) | transport::Cause::Refused(_) => {
                        self.recent.retain(|(known, ..)| known != qpn);
                        push(&mut self.recent, (*qpn, *cause, access));
                    }
                }
            }
            _ => {}
        }
    }

    /// Returns why the last work request of a queue pair, or the last request of its peer, has
    /// failed.
    pub(crate) fn of_queue_pair(&self, qpn: u32) -> Option<(transport::Cause, String)> {
        let (_, cause, access) = self.recent.iter().find(|(known, ..)| *known == qpn)?;
        Some((*cause, described(cause, access.as_ref())))
    }

    /// As above, of all queue pairs that are kept.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u32, String)> {
        let kept = self.recent.iter();
        kept.map(|(qpn, cause, access)| (*qpn, described(cause, access.as_ref())))
    }

    /// Returns why the peer of a queue pair had to try again the last time.
    pub(crate) fn not_ready(&self, qpn: u32) -> Option<String> {
        let (_, refusal) = self.not_ready.iter().find(|(known, _)| *known == qpn)?;
        Some(transport::Cause::Refused(*refusal).to_string())
    }

    /// Returns why the last refused command was.
    pub(crate) fn refusal(&self) -> Option<String> {
        self.refusal.map(|(_, cause)| cause.to_string())
    }

    /// As above, if this thread gave it, without the command.
    pub(crate) fn own_refusal(&self) -> Option<VerbError> {
        match self.refusal? {
            (thread, Cause::Verb { error, .. }) if thread == gettid() => Some(error),
            _ => None,
        }
    }

    /// Forgets a queue pair, whose number another one gets.
    pub(crate) fn forget(&mut self, qpn: u32) {
        self.recent.retain(|(known, ..)| *known != qpn);
        self.not_ready.retain(|(known, _)| *known != qpn);
    }
}

/// Adds a value to those that are kept.
fn push<T>(kept: &mut VecDeque<T>, value: T) {
    if kept.len() == KEPT {
        kept.pop_front();
    }
    kept.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(qpn: u32, failure: Failure) -> Cause {
        Cause::Device(DeviceCause::Transport {
            qpn: Some(qpn),
            cause: failure.into(),
        })
    }

    #[test]
    fn the_last_cause_of_each_queue_pair_is_kept() {
        let mut explanations = Explanations::default();
        explanations.keep(&failed(
            1,
            Failure::Retries {
                count: 3,
                timeout: 14,
                excused: 0,
            },
        ));
        explanations.keep(&failed(2, Failure::NoReads));
        explanations.keep(&failed(1, Failure::Flushed));
        let (_, reason) = explanations.of_queue_pair(1).unwrap();
        assert!(
            reason.contains("no answer of the peer after 3 retries"),
            "{reason}"
        );
        explanations.forget(1);
        assert_eq!(explanations.of_queue_pair(1), None);
        for qpn in 3..100 {
            explanations.keep(&failed(qpn, Failure::NoPath));
        }
        assert_eq!(explanations.of_queue_pair(2), None);
        assert!(explanations.of_queue_pair(99).is_some());
        assert_eq!(explanations.recent.len(), KEPT);
        assert_eq!(explanations.not_ready(4), None);
        explanations.keep(&Cause::Device(DeviceCause::Transport {
            qpn: Some(4),
            cause: Refusal::NoReceive.into(),
        }));
        let reason = explanations.not_ready(4).unwrap();
        assert!(reason.ends_with("no receive is posted"), "{reason}");
        assert!(
            explanations
                .recent
                .iter()
                .all(|it| it.1 == Failure::NoPath.into())
        );
        explanations.forget(4);
        assert_eq!(explanations.not_ready(4), None);
    }
}
