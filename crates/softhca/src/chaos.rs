//! Decisions that the specification leaves to a device, made so that programs notice what they
//! may not rely on.
//!
//! A [`Chaos`] is the source of all decisions of a device. Each is a hash of the seed and of
//! what is decided ([`Decision`]), not a draw from a generator, so that one decision can be left
//! out and the others stay. Nothing here has state: what is late waits in the engine.

use std::collections::HashSet;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// What is decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A work request of a send queue, with its data, is read late.
    Send,
    /// A completion is written late. All that follow it in its queue wait.
    Completion,
    /// The event of a completion queue is late: its completions may have been polled by then.
    WakeUp,
    /// An asynchronous event of a queue pair is late.
    Event,
    /// A packet arrives late. All that follow it to its queue pair wait.
    Packet,
    /// The last packet of an RDMA write is placed in memory before the others.
    Placement,
    /// An acknowledgement is left to a later one.
    Acknowledgement,
    /// A message meets an RNR NAK, although a receive is posted.
    NotReady,
    /// A packet of a message, not its last, is lost and sent again.
    Loss,
    /// Numbers of queue pairs and memory keys are used again at once, or not at all.
    Number,
    /// Fields of a completion that have no meaning contain something.
    Field,
}

/// The kinds with their names.
const KINDS: [(Kind, &str); 11] = [
    (Kind::Send, "send"),
    (Kind::Completion, "completion"),
    (Kind::WakeUp, "wake-up"),
    (Kind::Event, "event"),
    (Kind::Packet, "packet"),
    (Kind::Placement, "placement"),
    (Kind::Acknowledgement, "acknowledgement"),
    (Kind::NotReady, "not-ready"),
    (Kind::Loss, "loss"),
    (Kind::Number, "number"),
    (Kind::Field, "field"),
];

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut all = KINDS.iter();
        let (_, name) = all.find(|(kind, _)| kind == self).unwrap_or(&KINDS[0]);
        f.write_str(name)
    }
}

/// One decision. Its text is `KIND:DEVICE.QUEUE.INDEX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Decision {
    /// What is decided.
    pub kind: Kind,
    /// Number of the device in its network.
    pub device: u16,
    /// Queue pair in the order of creation, or number of a completion queue.
    pub queue: u32,
    /// Number of its messages, completions, packets or events before this one.
    pub index: u32,
}

impl Decision {
    /// Returns what the device does.
    #[must_use]
    pub fn sentence(&self) -> String {
        let Self { queue, index, .. } = self;
        match self.kind {
            Kind::Send => format!("work request {index} of queue pair {queue} is read late"),
            Kind::Completion => format!("completion {index} of queue pair {queue} is late"),
            Kind::WakeUp => format!("event {index} of completion queue {queue} is late"),
            Kind::Event => format!("asynchronous event {index} of queue pair {queue} is late"),
            Kind::Packet => format!("packet {index} to queue pair {queue} is late"),
            Kind::Placement => format!(
                "the end of RDMA write {index} to queue pair {queue} is in memory before the rest"
            ),
            Kind::Acknowledgement => {
                format!("acknowledgement {index} to queue pair {queue} is left to a later one")
            }
            Kind::NotReady => {
                format!("receive {index} of queue pair {queue} is not ready at first")
            }
            Kind::Loss => format!("packet {index} to queue pair {queue} is lost and sent again"),
            Kind::Number => {
                "numbers of destroyed objects are used again at once, or never".to_owned()
            }
            Kind::Field => {
                format!("failed completion {index} of the process has other undefined fields")
            }
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            device,
            queue,
            index,
        } = self;
        write!(f, "{kind}:{device}.{queue}.{index}")
    }
}

/// A text that is no decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecisionError(String);

impl fmt::Display for DecisionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "\"{}\" is no decision, as completion:0.1.17 is",
            self.0.escape_debug()
        )
    }
}

impl std::error::Error for DecisionError {}

impl FromStr for Decision {
    type Err = DecisionError;

    fn from_str(text: &str) -> Result<Self, DecisionError> {
        let parse = || {
            let (kind, place) = text.split_once(':')?;
            let (kind, _) = KINDS.iter().find(|(_, name)| *name == kind)?;
            let mut numbers = place.split('.');
            let decision = Self {
                kind: *kind,
                device: numbers.next()?.parse().ok()?,
                queue: numbers.next()?.parse().ok()?,
                index: numbers.next()?.parse().ok()?,
            };
            numbers.next().is_none().then_some(decision)
        };
        parse().ok_or_else(|| DecisionError(text.to_owned()))
    }
}

/// Parses a list of decisions, separated by commas or white space.
///
/// # Errors
/// The first that is none.
pub fn parse_list(text: &str) -> Result<Vec<Decision>, DecisionError> {
    let texts = text.split(|it: char| it == ',' || it.is_whitespace());
    texts.filter(|it| !it.is_empty()).map(str::parse).collect()
}

/// Is told each decision to do something unusual, by the thread that drives the device.
pub type DecisionObserver = Arc<dyn Fn(Decision) + Send + Sync>;

/// The source of decisions.
#[derive(Clone)]
pub struct Chaos {
    seed: u64,
    only: Option<HashSet<Decision>>,
    observer: Option<DecisionObserver>,
}

impl fmt::Debug for Chaos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let only = self.only.as_ref().map(HashSet::len);
        f.debug_struct("Chaos")
            .field("seed", &self.seed)
            .field("only", &only)
            .finish_non_exhaustive()
    }
}

/// Delays of a kind with one seed, in nanoseconds, and how many of 2^16 decisions have one. Long
/// ones are rare, so that a program with many messages ends.
const SCALES: [(u64, u64); 4] = [
    (30_000, 0x8000),
    (300_000, 0x2000),
    (3_000_000, 0x400),
    (30_000_000, 0x80),
];
/// The scale up to which packets are late: longer delays would exceed acknowledgement timeouts.
const MAX_PACKET_SCALE: usize = 2;
/// Short programs have few messages: the first of each queue meet more of it.
const FIRST: u32 = 64;
const RATE_OF_FIRST: u64 = 0x5000;
/// Retransmissions use up retries, or take as long as the program has set.
const RATE_OF_RETRANSMISSIONS: u64 = 0x800;

impl Chaos {
    /// Creates the source of all decisions of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            only: None,
            observer: None,
        }
    }

    /// Limits it to these decisions, which are as they are without the limit.
    #[must_use]
    pub fn only(mut self, decisions: impl IntoIterator<Item = Decision>) -> Self {
        self.only = Some(decisions.into_iter().collect());
        self
    }

    /// Sets who is told the decisions.
    #[must_use]
    pub fn observed_by(mut self, observer: DecisionObserver) -> Self {
        self.observer = Some(observer);
        self
    }

    /// Returns how something unusual is done; `None` if the usual is done.
    pub fn decide(&self, decision: Decision) -> Option<Choice> {
        let is_taken = match &self.only {
            Some(only) => only.contains(&decision),
            None => self.hash(0, decision) >> 48 < self.rate(decision),
        };
        if !is_taken {
            return None;
        }
        if let Some(observer) = &self.observer {
            observer(decision);
        }
        Some(Choice {
            bits: self.hash(1, decision),
            scale: SCALES[self.scale(decision.kind)].0,
        })
    }

    /// Returns the bits of a seed for a kind: seeds differ in what is unusual, and how much.
    fn character(&self, kind: Kind) -> u64 {
        mix(mix(self.seed) ^ (kind as u64 + 1))
    }

    fn scale(&self, kind: Kind) -> usize {
        let scale = (self.character(kind) >> 8) as usize % SCALES.len();
        match kind {
            Kind::Packet | Kind::Placement | Kind::Acknowledgement => scale.min(MAX_PACKET_SCALE),
            _ => scale,
        }
    }

    /// Returns how many of 2^16 decisions are to do something unusual.
    fn rate(&self, decision: Decision) -> u64 {
        if self.character(decision.kind) & 1 == 0 {
            return 0;
        }
        let (_, rate) = SCALES[self.scale(decision.kind)];
        match decision.kind {
            Kind::Number | Kind::Field => 1 << 16,
            Kind::NotReady | Kind::Loss => RATE_OF_RETRANSMISSIONS,
            _ if decision.index < FIRST => rate.max(RATE_OF_FIRST),
            _ => rate,
        }
    }

    fn hash(&self, salt: u64, decision: Decision) -> u64 {
        let place = u64::from(decision.device) << 32 | u64::from(decision.queue);
        let what = u64::from(decision.index) << 16 | (decision.kind as u64) << 8 | salt;
        mix(mix(mix(self.seed) ^ place) ^ what)
    }
}

/// The finalizer of splitmix64, with the increment.
fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// How something unusual is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    bits: u64,
    scale: u64,
}

impl Choice {
    /// Returns when something that is due at `now` happens instead, in nanoseconds. Every second
    /// one waits for the end of an interval, in which others of other queues gather.
    #[must_use]
    pub fn due(self, now: u64) -> u64 {
        match self.bits & 1 {
            0 => now + 1 + (self.bits >> 8) % (2 * self.scale),
            _ => (now + 1).next_multiple_of(self.scale),
        }
    }

    /// Returns one of two possibilities.
    #[must_use]
    pub fn is_first(self) -> bool {
        self.bits & 2 == 0
    }

    /// Returns arbitrary bits.
    #[must_use]
    pub fn bits(self) -> u64 {
        self.bits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(queue: u32, index: u32) -> Decision {
        Decision {
            kind: Kind::Completion,
            device: 0,
            queue,
            index,
        }
    }

    #[test]
    fn decisions_have_a_text() {
        for (kind, _) in KINDS {
            let decision = Decision {
                kind,
                device: 3,
                queue: 17,
                index: u32::MAX,
            };
            assert_eq!(decision.to_string().parse(), Ok(decision));
        }
        let list = parse_list("send:0.1.2,field:0.0.0\n wake-up:1.2.3").unwrap();
        assert_eq!(list.len(), 3);
        for wrong in [
            "send",
            "send:1.2",
            "send:1.2.3.4",
            "sent:1.2.3",
            "send:-1.2.3",
        ] {
            assert!(parse_list(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_decision_does_not_depend_on_others() {
        let seeds = (0..20).map(Chaos::new);
        for all in seeds {
            let list = (0..4).flat_map(|queue| (0..200).map(move |n| completion(queue, n)));
            let taken: Vec<_> = list.filter(|it| all.decide(*it).is_some()).collect();
            let some = taken.iter().copied().step_by(3);
            let limited = all.clone().only(some.clone());
            for decision in &taken {
                let expected = some.clone().find(|it| it == decision);
                let expected = expected.and_then(|it| all.decide(it));
                assert_eq!(limited.decide(*decision), expected);
            }
        }
    }

    #[test]
    fn seeds_differ_in_kinds() {
        let has = |seed: u64, kind| {
            let chaos = Chaos::new(seed);
            let mut all = (0..64).map(|index| Decision {
                kind,
                ..completion(0, index)
            });
            all.any(|it| chaos.decide(it).is_some())
        };
        for (kind, name) in KINDS {
            let count = (0..200).filter(|seed| has(*seed, kind)).count();
            assert!((50..150).contains(&count), "{name}: {count}");
        }
    }

    #[test]
    fn delays_are_bounded() {
        for seed in 0..200 {
            let chaos = Chaos::new(seed);
            for index in 0..64 {
                for (kind, most) in [(Kind::Completion, 60_000_000), (Kind::Packet, 6_000_000)] {
                    let choice = chaos.decide(Decision {
                        kind,
                        ..completion(0, index)
                    });
                    let due = choice.map_or(1001, |it| it.due(1000));
                    assert!(due > 1000 && due <= 1000 + most);
                }
            }
        }
    }
}
