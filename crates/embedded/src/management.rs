//! Why management datagrams are dropped.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Maximum number of causes that wait for a turn; further ones are only logged.
const MAX_WAITING: usize = 256;

/// Why a management datagram was dropped: at queue pair 1, by the connection manager, or instead
/// of being sent.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropCause {
    /// A packet for queue pair 1 that is no unreliable datagram with its key and partition.
    Packet,
    /// A packet whose sender is no process of the network.
    Sender,
    /// It does not have the length of a management datagram.
    Length(usize),
    /// No agent has its class and transaction.
    NoAgent {
        /// Its class.
        class: u8,
        /// First half of its transaction id.
        transactions: u32,
    },
    /// It is no message of the connection manager, or a malformed one.
    Format,
    /// A request that the connection manager cannot serve: its addresses are not those that it
    /// came by, or its transport or service are unknown.
    Request {
        /// Communication id of the sender.
        id: u32,
    },
    /// A request, since as many as this already wait for the program.
    Requests(usize),
    /// A message for no connection with its sender.
    NoConnection {
        /// Its attribute id.
        attribute: u16,
        /// Communication id of the receiver.
        id: u32,
    },
    /// A message that is not due in the state of its connection.
    NotDue {
        /// Its attribute id.
        attribute: u16,
        /// Communication id of the receiver.
        id: u32,
        /// The state.
        state: &'static str,
    },
    /// A datagram to a host that has got as many for each of its own as it may, and has not shown
    /// yet that it receives them.
    NoCredit {
        /// Communication id of the sender.
        id: u32,
    },
    /// A datagram about why a request was refused.
    Reason(ReasonDrop),
    /// A datagram to send, since as many as this already wait.
    Outgoing(usize),
    /// A datagram to a process while the link is down.
    LinkDown,
    /// A datagram to a process that had no room for it for too long.
    NoRoom {
        /// Number of the process.
        process: u16,
    },
}

/// Why a datagram of the peers that tell each other why requests are refused was dropped.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasonDrop {
    /// It is malformed, or of another version.
    Format,
    /// This process tells no reasons.
    NotShared,
    /// A question about a queue pair that does not exist, or by another one than its peer.
    NotPeer {
        /// The queue pair.
        qpn: u32,
    },
    /// A question, since as many as this were asked in a short time.
    TooMany(usize),
    /// An answer to no question.
    Unasked,
}

impl fmt::Display for ReasonDrop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Format => f.write_str("it is malformed"),
            Self::NotShared => f.write_str("this process tells no reasons"),
            Self::NotPeer { qpn } => {
                write!(
                    f,
                    "a question about queue pair {qpn:#x} by another than its peer"
                )
            }
            Self::TooMany(limit) => write!(f, "{limit} questions in a short time"),
            Self::Unasked => f.write_str("an answer to no question"),
        }
    }
}

/// Returns the name of a message of the connection manager.
fn message_name(attribute: u16) -> &'static str {
    match attribute {
        0x10 => "REQ",
        0x11 => "MRA",
        0x12 => "REJ",
        0x13 => "REP",
        0x14 => "RTU",
        0x15 => "DREQ",
        0x16 => "DREP",
        0x17 => "SIDR_REQ",
        0x18 => "SIDR_REP",
        _ => "message",
    }
}

impl fmt::Display for DropCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Packet => f.write_str("no unreliable datagram with the key of queue pair 1"),
            Self::Sender => f.write_str("its sender is no process of the network"),
            Self::Length(length) => write!(f, "it has {length} bytes, not 256"),
            Self::NoAgent {
                class,
                transactions,
            } => write!(
                f,
                "no agent has class {class:#x} and transactions {transactions:#x}"
            ),
            Self::Format => f.write_str("no message of the connection manager"),
            Self::Request { id } => {
                write!(f, "REQ of id {id:#x}: its service or addresses are invalid")
            }
            Self::Requests(limit) => write!(f, "REQ: {limit} requests wait for the program"),
            Self::NoConnection { attribute, id } => {
                let name = message_name(attribute);
                write!(f, "{name} for id {id:#x}, which has no connection with it")
            }
            Self::NotDue {
                attribute,
                id,
                state,
            } => {
                let name = message_name(attribute);
                write!(f, "{name} for id {id:#x}, which is in state {state}")
            }
            Self::NoCredit { id } => write!(
                f,
                "not sent by id {id:#x} to a host that has not shown that it receives"
            ),
            Self::Reason(cause) => write!(f, "a peer's reason: {cause}"),
            Self::Outgoing(limit) => write!(f, "not sent, since {limit} wait to be sent"),
            Self::LinkDown => f.write_str("not sent, since the link is down"),
            Self::NoRoom { process } => {
                write!(f, "process {process} had no room for it for too long")
            }
        }
    }
}

/// The datagrams that were dropped since the last turn, if an observer is told of them.
#[derive(Debug, Default)]
pub(crate) struct DropLog {
    is_observed: AtomicBool,
    has_any: AtomicBool,
    causes: Mutex<VecDeque<DropCause>>,
}

impl DropLog {
    /// Keeps the causes from now on, for [`next`](Self::next).
    pub(crate) fn observe(&self) {
        self.is_observed.store(true, Ordering::Relaxed);
    }

    /// Called when a datagram is dropped.
    pub(crate) fn add(&self, cause: DropCause) {
        #[cfg(test)]
        tests::record(cause);
        if self.is_observed.load(Ordering::Relaxed) {
            let mut causes = self.causes.lock().unwrap_or_else(PoisonError::into_inner);
            if causes.len() < MAX_WAITING {
                causes.push_back(cause);
                return self.has_any.store(true, Ordering::Release);
            }
        }
        tracing::debug!("management datagram dropped: {cause}");
    }

    /// Returns the next cause. Costs a load if there is none.
    pub(crate) fn next(&self) -> Option<DropCause> {
        if !self.has_any.load(Ordering::Acquire) {
            return None;
        }
        let mut causes = self.causes.lock().unwrap_or_else(PoisonError::into_inner);
        let next = causes.pop_front();
        self.has_any.store(next.is_some(), Ordering::Release);
        next
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::RefCell;
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::cm::machine_tests;
    use crate::runtime::reasons;
    use crate::wires::segment;

    thread_local! {
        /// The sentences of the causes that this thread's test has met, by name.
        static RECORDED: RefCell<BTreeMap<&'static str, String>> =
            const { RefCell::new(BTreeMap::new()) };
    }

    /// Called when a datagram is dropped.
    pub(crate) fn record(cause: DropCause) {
        RECORDED.with_borrow_mut(|all| _ = all.insert(name(cause), cause.to_string()));
    }

    /// Declares the names of all causes. A new one does not compile until it is here, and then
    /// has to be produced.
    macro_rules! names {
        ($($of:ident $($variant:ident)+;)+) => {
            const NAMES: &[&str] = &[$($(concat!(stringify!($of), "::", stringify!($variant))),+),+];

            $(#[allow(non_snake_case, reason = "the name of the type")]
            fn $of(cause: $of) -> &'static str {
                match cause {
                    $($of::$variant { .. } => concat!(stringify!($of), "::", stringify!($variant))),+
                }
            })+
        };
    }

    names! {
        DropCause Packet Sender Length NoAgent Format Request Requests NoConnection NotDue NoCredit
            Reason Outgoing LinkDown NoRoom;
        ReasonDrop Format NotShared NotPeer TooMany Unasked;
    }

    fn name(cause: DropCause) -> &'static str {
        match cause {
            DropCause::Reason(cause) => ReasonDrop(cause),
            cause => DropCause(cause),
        }
    }

    /// Each cause is that of a datagram, and has a sentence of its own.
    #[test]
    fn every_cause_is_produced() {
        machine_tests::what_is_dropped_has_a_cause();
        segment::tests::dropped_datagrams_have_causes();
        reasons::tests::forged_answers_are_dropped();
        reasons::tests::only_the_peer_of_a_queue_pair_is_answered();
        reasons::tests::floods_are_limited();
        reasons::tests::what_is_no_question_is_dropped();
        let recorded = RECORDED.with_borrow(BTreeMap::clone);
        let is_missing = |name: &&str| {
            // That of the cause within it is recorded.
            !recorded.contains_key(name) && *name != "DropCause::Reason"
        };
        let missing: Vec<&str> = NAMES.iter().copied().filter(is_missing).collect();
        assert_eq!(missing, [""; 0]);
        let sentences: BTreeSet<&String> = recorded.values().collect();
        assert_eq!(sentences.len(), recorded.len(), "{recorded:#?}");
    }
}
