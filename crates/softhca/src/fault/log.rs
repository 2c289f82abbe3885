//! What faults have decided, as faults that decide the same again.
//!
//! A fault with a probability or a time, or one that is set while a program runs, happens at
//! positions that differ from run to run. A [`Recorder`] counts all that passes a device by the
//! matchers that tell it most exactly, and says at which position something happened; a
//! [`FaultLog`] has a fault for each action and thing, with all of its positions.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::injector::Call;
use super::{
    Action, Fault, MAX_FAULTS, MAX_TEXT, Matcher, PacketFacts, PacketKind, Positions, QpName,
    Subject, Way,
};

/// Is told each decision.
pub type OnDecision = Arc<dyn Fn(&Decision) + Send + Sync>;

/// When something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// At a position among what the decision selects.
    Nth(u64),
    /// At a time, in nanoseconds since decisions are recorded.
    After(u64),
}

/// That a fault has happened, and to what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// What happened.
    pub action: Action,
    /// To which queue pair, if there is one.
    pub qp: Option<QpName>,
    /// To a packet of which kind.
    pub opcode: Option<PacketKind>,
    /// To a packet of which way; `None` for requests, which are received.
    pub way: Option<Way>,
    /// When.
    pub when: When,
}

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Counted {
    Packets(Way),
    Requests,
    /// Requests that need a receive.
    Receives,
}

/// Of which queue pair, by order of creation; `None` counts those of all.
type Counter = (Counted, Option<u32>, PacketKind);

/// Counts what passes a device.
pub(super) struct Recorder {
    on_decision: OnDecision,
    /// When it began.
    start: u64,
    packets: HashMap<Counter, u64>,
    calls: HashMap<Call, u64>,
    /// The packet that was counted last, and its queue pair.
    current: Option<(PacketFacts, Option<u32>)>,
}

impl Recorder {
    pub(super) fn new(on_decision: OnDecision, start: u64) -> Self {
        Self {
            on_decision,
            start,
            packets: HashMap::new(),
            calls: HashMap::new(),
            current: None,
        }
    }

    /// Counts a packet of a queue pair, by order of creation.
    pub(super) fn count_packet(&mut self, packet: &PacketFacts, order: Option<u32>) {
        self.current = Some((*packet, order));
        let counted = [
            (Counted::Packets(packet.way), true),
            (Counted::Requests, packet.is_request),
            (Counted::Receives, packet.needs_receive),
        ];
        for (counted, is_one) in counted {
            if !is_one {
                continue;
            }
            // Once if it has no queue pair.
            for qp in [order.map(Some), Some(None)].into_iter().flatten() {
                let count = self.packets.entry((counted, qp, packet.kind)).or_default();
                *count = count.saturating_add(1);
            }
        }
    }

    /// Says what happens to the packet that was counted last.
    pub(super) fn packet(&self, action: Action) {
        let Some((packet, order)) = &self.current else {
            return;
        };
        // The answers of a slow receiver depend on time.
        let action = match action {
            Action::SlowReceiver(_) => Action::Rnr,
            action => action,
        };
        let (counted, way) = match action {
            Action::Nak(_) => (Counted::Requests, None),
            Action::Rnr => (Counted::Receives, None),
            _ => (Counted::Packets(packet.way), Some(packet.way)),
        };
        let counter = (counted, *order, packet.kind);
        let nth = self.packets.get(&counter).copied().unwrap_or(1);
        (self.on_decision)(&Decision {
            action,
            qp: order.map(QpName::Order),
            opcode: Some(packet.kind),
            way,
            when: When::Nth(nth),
        });
    }

    /// Counts a call.
    pub(super) fn count_call(&mut self, call: Call) {
        if call == Call::Registration(0) {
            // No limit is below it.
            return;
        }
        let count = self.calls.entry(call.without_size()).or_default();
        *count = count.saturating_add(1);
    }

    /// Says what happens to a call that was counted.
    pub(super) fn call(&self, call: Call, action: Action) {
        // How much was registered before is the same at the same registration.
        let action = match action {
            Action::Memlock(_) => Action::Memlock(0),
            action => action,
        };
        let nth = self.calls.get(&call.without_size()).copied();
        (self.on_decision)(&Decision {
            action,
            qp: None,
            opcode: None,
            way: None,
            when: When::Nth(nth.unwrap_or(1)),
        });
    }

    /// Says what happens of itself.
    pub(super) fn timed(&self, now: u64, action: Action, qp: Option<QpName>) {
        (self.on_decision)(&Decision {
            action,
            qp,
            opcode: None,
            way: None,
            when: When::After(now.saturating_sub(self.start)),
        });
    }
}

/// Why a log has no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFull {
    /// It has the most faults that a text may have.
    Faults,
    /// It has the length that a text may have.
    Length,
    /// The decision is later than a fault can be set.
    Time,
}

impl fmt::Display for LogFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Faults => write!(f, "more than {MAX_FAULTS} faults"),
            Self::Length => write!(f, "longer than {MAX_TEXT} bytes"),
            Self::Time => f.write_str("later than 1000s"),
        }
    }
}

impl std::error::Error for LogFull {}

/// The decisions of a process, as a text of faults.
#[derive(Debug, Default)]
pub struct FaultLog {
    faults: Vec<Fault>,
    /// Each as it is written, with its line break.
    lines: Vec<String>,
    length: usize,
}

impl FaultLog {
    /// Room in a text for the caller's own lines.
    pub const RESERVED: usize = 512;

    /// Returns the number of faults.
    #[must_use]
    pub fn len(&self) -> usize {
        self.faults.len()
    }

    /// Returns whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.faults.is_empty()
    }

    /// Adds a decision of a device of a program.
    ///
    /// # Errors
    /// The text would not be accepted.
    pub fn add(
        &mut self,
        device: usize,
        program: Option<&str>,
        decision: &Decision,
    ) -> Result<(), LogFull> {
        let matcher = Matcher {
            device: Some(device),
            program: program.map(str::to_owned),
            qp: decision.qp,
            opcode: decision.opcode,
            way: decision.way,
            ..Matcher::default()
        };
        // What happens once has a fault each time.
        let is_repeated = decision.action.subject() != Subject::Once;
        let is_same = |it: &Fault| {
            let its = &it.matcher;
            let is_same_packet =
                (its.qp, its.opcode, its.way) == (matcher.qp, matcher.opcode, matcher.way);
            it.action == decision.action
                && is_same_packet
                && its.device == matcher.device
                && its.program == matcher.program
        };
        let same = self.faults.iter().position(|it| is_repeated && is_same(it));
        let (at, fault) = match decision.when {
            When::Nth(nth) => match same {
                Some(at) => {
                    let mut fault = self.faults[at].clone();
                    fault.matcher.nth.push(nth);
                    (at, fault)
                }
                None => (
                    self.faults.len(),
                    Fault {
                        line: 0,
                        action: decision.action,
                        matcher: Matcher {
                            nth: Positions::range(nth..=nth),
                            ..matcher
                        },
                    },
                ),
            },
            When::After(after) if after > super::parse::MAX_TIME => return Err(LogFull::Time),
            When::After(after) => (
                self.faults.len(),
                Fault {
                    line: 0,
                    action: decision.action,
                    matcher: Matcher {
                        after: Some(after),
                        ..matcher
                    },
                },
            ),
        };
        let line = format!("{fault}\n");
        let former = self.lines.get(at).map_or(0, String::len);
        let length = self.length - former + line.len();
        match at {
            MAX_FAULTS.. => return Err(LogFull::Faults),
            _ if length > MAX_TEXT - Self::RESERVED => return Err(LogFull::Length),
            _ => {}
        }
        self.length = length;
        match self.faults.get_mut(at) {
            Some(place) => {
                *place = fault;
                self.lines[at] = line;
            }
            None => {
                self.faults.push(fault);
                self.lines.push(line);
            }
        }
        Ok(())
    }
}

impl fmt::Display for FaultLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| f.write_str(line))
    }
}
