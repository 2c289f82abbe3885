//! Selection of frames, and faults.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::capture::{Delivery, Frame, Kind};
use crate::node::Node;
use crate::tap::{SharedWire, lock};

/// An effect on a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    Lose,
    Duplicate,
    Corrupt,
    Delay(Duration),
}

impl Action {
    pub fn apply(self, delivery: &mut Delivery) {
        match self {
            Self::Lose => delivery.lost = true,
            Self::Duplicate => delivery.duplicated = true,
            Self::Corrupt => delivery.corrupted = true,
            Self::Delay(by) => delivery.delay += by,
        }
    }
}

type Predicate = Box<dyn FnMut(&Frame) -> bool + Send>;

/// A selection of frames, and the action on them.
pub(crate) struct Rule {
    from: Option<usize>,
    to: Option<usize>,
    kind: Option<Kind>,
    matching: Option<Predicate>,
    /// Positions among the frames selected so far, from 1: first and last.
    range: (u64, u64),
    probability: Option<f64>,
    matched: u64,
    shared: Arc<FaultState>,
    pub action: Action,
}

/// State that a [`Fault`] shares with its rule.
#[derive(Debug, Default)]
struct FaultState {
    healed: AtomicBool,
    hits: AtomicU64,
}

impl Rule {
    pub fn applies(&mut self, frame: &Frame, mut chance: impl FnMut(f64) -> bool) -> bool {
        if self.shared.healed.load(Ordering::Relaxed)
            || self.from.is_some_and(|from| from != frame.from)
            || self.to.is_some_and(|to| to != frame.to)
        {
            return false;
        }
        let packet = frame.packet.as_ref();
        let is_other = |kind| packet.is_none_or(|packet| packet.kind != kind);
        if self.kind.is_some_and(is_other) {
            return false;
        }
        if self
            .matching
            .as_mut()
            .is_some_and(|matches| !matches(frame))
        {
            return false;
        }
        self.matched += 1;
        let (first, last) = self.range;
        if !(first..=last).contains(&self.matched) || !self.probability.is_none_or(&mut chance) {
            return false;
        }
        self.shared.hits.fetch_add(1, Ordering::Relaxed);
        true
    }

    pub fn is_finished(&self) -> bool {
        self.matched >= self.range.1 || self.shared.healed.load(Ordering::Relaxed)
    }
}

/// The frames that a fault affects, from [`Fabric::frames`](crate::Fabric::frames): all,
/// until methods narrow the selection.
///
/// Frames are counted from the call that sets the fault, including retransmissions and
/// acknowledgements. A fault stays until it is healed or has affected the last frame of its
/// selection.
///
/// ```
/// # fn main() -> ringverbs::Result<()> {
/// # use ringverbs_testkit::{Fabric, Kind};
/// # let fabric = Fabric::roce(2)?;
/// let (a, b) = (fabric.node(0), fabric.node(1));
/// fabric.frames().from(a).to(b).nth(3).lose(); // the third frame from a to b
/// let acks = fabric.frames().from(b).kind(Kind::Ack).lose(); // until healed
/// acks.heal();
/// fabric.frames().chance(0.01).corrupt(); // one in a hundred, by the seed
/// # Ok(()) }
/// ```
#[must_use = "frames are not affected until a method sets a fault"]
pub struct Frames {
    wire: SharedWire,
    rule: Rule,
}

impl Frames {
    pub(crate) fn new(wire: &SharedWire) -> Self {
        Self {
            wire: Arc::clone(wire),
            rule: Rule {
                from: None,
                to: None,
                kind: None,
                matching: None,
                range: (1, u64::MAX),
                probability: None,
                matched: 0,
                shared: Arc::default(),
                action: Action::Lose,
            },
        }
    }

    /// Selects only frames that this node sends.
    pub fn from(mut self, node: &Node) -> Self {
        self.rule.from = Some(node.index());
        self
    }

    /// Selects only frames for this node.
    pub fn to(mut self, node: &Node) -> Self {
        self.rule.to = Some(node.index());
        self
    }

    /// Selects only packets of this kind.
    pub fn kind(mut self, kind: Kind) -> Self {
        self.rule.kind = Some(kind);
        self
    }

    /// Selects only frames for which `matches` returns true. It must not use the fabric.
    pub fn matching(mut self, matches: impl FnMut(&Frame) -> bool + Send + 'static) -> Self {
        self.rule.matching = Some(Box::new(matches));
        self
    }

    /// Selects only the frame at this position, from 1, among those selected so far.
    pub fn nth(mut self, position: u64) -> Self {
        self.rule.range = (position, position);
        self
    }

    /// Selects only the first `count` of the frames selected so far.
    pub fn first(mut self, count: u64) -> Self {
        self.rule.range = (1, count);
        self
    }

    /// Selects all but the first `count` of the frames selected so far.
    pub fn after(mut self, count: u64) -> Self {
        self.rule.range = (count.saturating_add(1), u64::MAX);
        self
    }

    /// Selects each frame with this probability, 0 to 1, drawn from the fabric's seed.
    pub fn chance(mut self, probability: f64) -> Self {
        self.rule.probability = Some(probability);
        self
    }

    /// Loses the frames.
    pub fn lose(self) -> Fault {
        self.set(Action::Lose)
    }

    /// Delivers the frames twice.
    pub fn duplicate(self) -> Fault {
        self.set(Action::Duplicate)
    }

    /// Flips a random bit of each frame, behind the link header. The receiver drops the frame
    /// because of its checksum.
    pub fn corrupt(self) -> Fault {
        self.set(Action::Corrupt)
    }

    /// Delays the frames by this simulated time. Other frames overtake them.
    pub fn delay(self, by: Duration) -> Fault {
        self.set(Action::Delay(by))
    }

    /// Delivers the frames after those that are sent within the next 20 µs.
    pub fn reorder(self) -> Fault {
        self.delay(Duration::from_micros(20))
    }

    fn set(mut self, action: Action) -> Fault {
        self.rule.action = action;
        let fault = Fault(Arc::clone(&self.rule.shared));
        lock(&self.wire).rules.push(self.rule);
        fault
    }
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frames").finish_non_exhaustive()
    }
}

/// A fault that was set. It stays when this is dropped.
#[derive(Clone, Debug)]
pub struct Fault(Arc<FaultState>);

impl Fault {
    /// Ends the fault. Frames that it delayed still arrive late.
    pub fn heal(&self) {
        self.0.healed.store(true, Ordering::Relaxed);
    }

    /// Returns the number of frames affected so far.
    pub fn hits(&self) -> u64 {
        self.0.hits.load(Ordering::Relaxed)
    }
}
