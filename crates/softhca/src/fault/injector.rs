//! Faults at work: which of them a packet, a call or the time sets off, and packets that are
//! held back.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use roce::fabric::Random;
use roce::packet::{NakCode, Packet};

use super::log::Recorder;
use super::{
    Action, Fault, Faults, MAX_FAULTS, Matcher, OnDecision, PacketKind, Peer, QpName, Subject, Way,
};

/// Maximum number of packets that wait. Further ones are not delayed.
const MAX_DELAYED: usize = 16_384;

/// Is told the position of a fault in its text, each time that it happens.
pub type OnFired = Arc<dyn Fn(usize) + Send + Sync>;

/// What faults may ask of a packet.
#[derive(Clone, Copy, Debug)]
pub struct PacketFacts {
    /// Its way.
    pub way: Way,
    /// The device's own queue pair.
    pub qp: Option<u32>,
    /// The queue pair at the other end.
    pub peer_qp: Option<u32>,
    /// The host at the other end.
    pub peer: Option<IpAddr>,
    /// Its kind.
    pub kind: PacketKind,
    /// It is a request of a reliable service.
    pub is_request: bool,
    /// It begins a message that takes a receive, or ends a write that does.
    pub needs_receive: bool,
    /// Its sequence number.
    pub psn: u32,
}

/// What happens to a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Interception {
    /// Line of the fault that loses it.
    pub lost: Option<usize>,
    pub duplicated: bool,
    /// A random number that selects the bit to flip.
    pub corrupted: Option<u64>,
    /// When it arrives, if it is delayed.
    pub due: Option<u64>,
    /// How the request is answered instead of being executed.
    pub refused: Option<Refused>,
}

/// The answer to a request that a fault refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refused {
    Nak(NakCode),
    NotReady,
}

/// A call that faults may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Call {
    /// A verb, by its index.
    Verb(usize),
    /// A command, by its opcode.
    Command(u16),
    /// A registration, after which so many bytes are registered.
    Registration(u64),
    /// An event of a type.
    Event(u8),
    /// A completion.
    Completion,
    /// A receive of a shared receive queue.
    Receive,
}

impl Call {
    /// Returns whether an action is about it.
    fn is_failed_by(self, action: &Action) -> bool {
        match (self, *action) {
            (Self::Verb(index), Action::FailVerb { verb, .. }) => verb == index,
            (Self::Command(opcode), Action::FailCommand(failed)) => failed == opcode,
            (Self::Registration(total), Action::Memlock(limit)) => total > limit,
            (Self::Event(kind), Action::LoseEvent(lost)) => lost == kind,
            (Self::Completion, Action::LoseCompletion) | (Self::Receive, Action::ReturnReceive) => {
                true
            }
            _ => false,
        }
    }

    /// Returns it without what is not the same for all of its kind.
    pub(super) fn without_size(self) -> Self {
        match self {
            Self::Registration(_) => Self::Registration(0),
            call => call,
        }
    }
}

/// What a fault does to the device, and not to what passes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Effect {
    /// What happens.
    pub action: Action,
    /// The queue pair of the packet that set it off, or that the fault names.
    pub qp: Option<u32>,
    /// Line of the fault.
    pub line: usize,
}

/// A fault, and what it has done.
#[derive(Debug)]
struct Rule {
    fault: Fault,
    /// Its position in the text.
    position: usize,
    /// When it was set.
    set_at: u64,
    matched: u64,
    /// It has happened, and happens once.
    is_over: bool,
    /// How often it has happened.
    happened: u64,
    random: Random,
    /// When the last packet that it delayed is due.
    last_due: u64,
    /// Messages that a slow receiver holds: PSN and end, by queue pair.
    held: HashMap<u32, (u32, u64)>,
}

impl Rule {
    /// Creates a rule of the fault at a position of its text, after so many other rules.
    fn new(fault: Fault, position: usize, others: u64, now: u64) -> Self {
        // Faults without a seed differ from each other, and are the same each time.
        let seed = fault.matcher.seed.unwrap_or(others + 1);
        Self {
            fault,
            position,
            set_at: now,
            matched: 0,
            is_over: false,
            happened: 0,
            random: Random::new(seed),
            last_due: 0,
            held: HashMap::new(),
        }
    }

    /// Returns whether nothing that follows can match.
    fn is_used_up(&self) -> bool {
        self.matched >= self.fault.matcher.nth.last()
    }

    /// Counts that it happens, and tells of it.
    fn fire(&mut self, on_fired: &OnFired) {
        self.happened += 1;
        on_fired(self.position);
    }

    /// Counts what matches all but position and chance; returns whether these match, too.
    fn counts(&mut self) -> bool {
        self.matched = self.matched.saturating_add(1);
        if !self.fault.matcher.nth.contains(self.matched) {
            return false;
        }
        let chance = self.fault.matcher.chance;
        chance.is_none_or(|chance| self.random.chance(chance))
    }

    fn may_fire(&self, now: u64) -> bool {
        let elapsed = now.saturating_sub(self.set_at);
        let Matcher { after, until, .. } = self.fault.matcher;
        let began = after.is_none_or(|after| elapsed >= after);
        !self.is_over && began && until.is_none_or(|until| elapsed < until)
    }

    fn selects(&self, packet: &PacketFacts, orders: &HashMap<u32, u32>) -> bool {
        let matcher = &self.fault.matcher;
        let is_qp = |name| match name {
            QpName::Number(number) => packet.qp == Some(number),
            QpName::Order(order) => packet.qp.and_then(|qp| orders.get(&qp)) == Some(&order),
        };
        let is_peer = |peer| match peer {
            Peer::Qp(number) => packet.peer_qp == Some(number),
            Peer::Address(address) => packet.peer == Some(address),
        };
        let way = match self.fault.action.subject() {
            Subject::Requests => Way::In,
            _ => matcher.way.unwrap_or(Way::Out),
        };
        way == packet.way
            && matcher.opcode.is_none_or(|kind| kind == packet.kind)
            && matcher.qp.is_none_or(is_qp)
            && matcher.peer.is_none_or(is_peer)
    }
}

impl Fault {
    /// Returns whether it happens once, when a packet passes.
    fn waits_for_packet(&self) -> bool {
        let names_its_qp = matches!(self.action, Action::QpError | Action::CqError);
        let matcher = &self.matcher;
        self.action.subject() == Subject::Once
            && (matcher.needs_packet() || matcher.qp.is_some() && !names_its_qp)
    }
}

/// The faults of a device.
pub struct Injector {
    rules: Vec<Rule>,
    on_fired: OnFired,
    /// Numbers of the device's queue pairs by order of creation.
    orders: HashMap<u32, u32>,
    created: u32,
    /// Number of faults that were added.
    added: u64,
    /// Lines of the faults that the last packet has set off.
    on_packet: Vec<usize>,
    /// Packets that are held back, by the time at which they are due and their order.
    delayed: BTreeMap<(u64, u64), (Way, Packet)>,
    sequence: u64,
    effects: VecDeque<Effect>,
    /// Those that are the front end's.
    outer: VecDeque<Effect>,
    /// When a link that is down for a time comes up.
    link_up_at: Option<u64>,
    /// A fault has taken the link down.
    holds_link_down: bool,
    has_calls: bool,
    has_packets: bool,
    needs_qp: bool,
    /// Line of the fault since which nothing is sent or received.
    silenced: Option<usize>,
    recorder: Option<Recorder>,
}

impl fmt::Debug for Injector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Injector");
        debug.field("rules", &self.rules).finish_non_exhaustive()
    }
}

impl Injector {
    /// Creates an injector without faults. `queue_pairs` are the device's, by number;
    /// `on_fired` is told each time that a fault happens.
    #[must_use]
    pub fn new(queue_pairs: impl IntoIterator<Item = u32>, on_fired: OnFired) -> Self {
        let mut injector = Self {
            rules: Vec::new(),
            on_fired,
            orders: HashMap::new(),
            created: 0,
            added: 0,
            on_packet: Vec::new(),
            delayed: BTreeMap::new(),
            sequence: 0,
            effects: VecDeque::new(),
            outer: VecDeque::new(),
            link_up_at: None,
            holds_link_down: false,
            has_calls: false,
            has_packets: false,
            needs_qp: false,
            silenced: None,
            recorder: None,
        };
        let queue_pairs = queue_pairs.into_iter();
        queue_pairs.for_each(|number| injector.add_queue_pair(number));
        injector
    }

    /// Returns one without faults that continues a record; `None` if this one records nothing.
    pub(crate) fn continued(self, on_fired: OnFired) -> Option<Self> {
        let recorder = self.recorder?;
        let mut next = Self::new([], on_fired);
        next.record(recorder);
        next.orders = self.orders;
        next.created = self.created;
        Some(next)
    }

    /// Tells `on_decision` from now on what faults decide.
    pub fn record_decisions(&mut self, on_decision: OnDecision, now: u64) {
        self.record(Recorder::new(on_decision, now));
    }

    fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
        // All of them are counted.
        self.has_packets = true;
        self.needs_qp = true;
        self.has_calls = true;
    }

    /// Returns whether decisions are recorded.
    pub(crate) fn is_recording(&self) -> bool {
        self.recorder.is_some()
    }

    /// Records that the link comes up since the fault that has taken it down ends.
    pub(crate) fn record_link_up(&self, now: u64) {
        if let Some(recorder) = &self.recorder {
            recorder.timed(now, Action::LinkUp, None);
        }
    }

    /// Adds faults: those for which `is_meant`.
    pub fn add(&mut self, faults: &Faults, is_meant: impl Fn(&Fault) -> bool, now: u64) {
        let is_full = self.rules.len() >= MAX_FAULTS;
        self.rules
            .retain(|rule| !(rule.is_over || is_full && rule.is_used_up()));
        let new = faults.list().iter().cloned().zip(self.added..).enumerate();
        let new = new.filter(|(_, (fault, _))| is_meant(fault));
        self.rules
            .extend(new.map(|(at, (fault, others))| Rule::new(fault, at, others, now)));
        self.added += faults.list().len() as u64;
        for Rule { fault, .. } in &self.rules {
            let subject = fault.action.subject();
            let once = fault.waits_for_packet();
            self.has_calls |= subject == Subject::Calls;
            let is_packets = [Subject::Packets, Subject::Requests].contains(&subject);
            // What a device that has fallen silent sends and receives is lost.
            self.has_packets |= is_packets || once || fault.action == Action::Die;
            self.needs_qp |= once || fault.matcher.qp.is_some();
        }
    }

    /// Returns whether there are no faults.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Returns whether there are so many faults that more are refused.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let left = self.rules.iter().filter(|it| !it.is_used_up());
        left.count() >= MAX_FAULTS
    }

    /// Returns whether any fault looks at packets.
    pub(crate) fn has_packets(&self) -> bool {
        self.has_packets
    }

    /// Returns whether any fault asks for the device's own queue pair of packets.
    pub(crate) fn needs_qp(&self) -> bool {
        self.needs_qp
    }

    /// Returns the faults, and how often each has happened. One that happens once is forgotten
    /// when others are added.
    pub fn counts(&self) -> impl Iterator<Item = (&Fault, u64)> {
        self.rules.iter().map(|rule| (&rule.fault, rule.happened))
    }

    /// Returns the lines of the faults that the last packet has set off.
    pub(crate) fn on_packet(&self) -> &[usize] {
        &self.on_packet
    }

    /// Counts a queue pair that was created.
    pub(crate) fn add_queue_pair(&mut self, number: u32) {
        self.created += 1;
        self.orders.insert(number, self.created);
    }

    /// Decides about a packet.
    pub(crate) fn packet(&mut self, now: u64, packet: &PacketFacts) -> Interception {
        let mut result = Interception {
            lost: self.silenced,
            ..Interception::default()
        };
        self.on_packet.clear();
        if self.silenced.is_some() {
            return result;
        }
        if let Some(recorder) = &mut self.recorder {
            let order = packet.qp.and_then(|qp| self.orders.get(&qp));
            recorder.count_packet(packet, order.copied());
        }
        let record = |action| {
            if let Some(recorder) = &self.recorder {
                recorder.packet(action);
            }
        };
        for rule in &mut self.rules {
            let is_subject = match rule.fault.action {
                Action::Rnr | Action::SlowReceiver(_) => packet.needs_receive,
                Action::Nak(_) => packet.is_request,
                _ => {
                    rule.fault.action.subject() == Subject::Packets || rule.fault.waits_for_packet()
                }
            };
            if !is_subject || !rule.may_fire(now) || !rule.selects(packet, &self.orders) {
                continue;
            }
            if let (Action::SlowReceiver(by), Some(qp)) = (rule.fault.action, packet.qp) {
                match rule.held.get(&qp) {
                    Some((psn, end)) if *psn == packet.psn => {
                        if now < *end {
                            result.refused = Some(Refused::NotReady);
                            record(rule.fault.action);
                        }
                        continue;
                    }
                    _ => rule.held.remove(&qp),
                };
                if rule.counts() {
                    rule.held.insert(qp, (packet.psn, now.saturating_add(by)));
                    result.refused = Some(Refused::NotReady);
                    rule.fire(&self.on_fired);
                    record(rule.fault.action);
                    self.on_packet.push(rule.fault.line);
                }
                continue;
            }
            if !rule.counts() {
                continue;
            }
            rule.fire(&self.on_fired);
            record(rule.fault.action);
            self.on_packet.push(rule.fault.line);
            let later = |by| Some(now.saturating_add(by));
            match rule.fault.action {
                Action::Lose => result.lost = Some(rule.fault.line),
                Action::Duplicate => result.duplicated = true,
                Action::Corrupt => result.corrupted = Some(rule.random.next()),
                Action::Reorder(by) => result.due = result.due.max(later(by)),
                Action::Delay { least, most } => {
                    let random = rule.random.next() % (most - least).saturating_add(1);
                    rule.last_due = rule.last_due.max(now.saturating_add(least + random));
                    result.due = result.due.max(Some(rule.last_due));
                }
                Action::Nak(code) => result.refused = Some(Refused::Nak(code)),
                Action::Rnr => result.refused = Some(Refused::NotReady),
                action => {
                    rule.is_over = true;
                    let (qp, line) = (packet.qp, rule.fault.line);
                    self.effects.push_back(Effect { action, qp, line });
                }
            }
        }
        result
    }

    /// Decides about a call: returns the first fault that makes it fail, by its line, and what it
    /// does.
    pub(crate) fn call(&mut self, now: u64, call: Call) -> Option<(usize, Action)> {
        if !self.has_calls {
            return None;
        }
        if let Some(recorder) = &mut self.recorder {
            recorder.count_call(call);
        }
        let mut failed = None;
        for rule in &mut self.rules {
            let action = rule.fault.action;
            if call.is_failed_by(&action) && rule.may_fire(now) && rule.counts() {
                rule.fire(&self.on_fired);
                failed = failed.or(Some((rule.fault.line, action)));
            }
        }
        if let (Some((_, action)), Some(recorder)) = (failed, &self.recorder) {
            recorder.call(call, action);
        }
        failed
    }

    /// As `call`, of a verb, by its name. Returns the line, and the error number.
    pub fn verb(&mut self, now: u64, name: &str) -> Option<(usize, i32)> {
        let number = super::VERBS.iter().position(|it| *it == name)?;
        match self.call(now, Call::Verb(number))? {
            (line, Action::FailVerb { errno, .. }) => Some((line, errno)),
            _ => None,
        }
    }

    /// Returns the line of a fault that does not permit a registration, given the bytes that are
    /// registered with it.
    pub fn registration(&mut self, now: u64, total: u64) -> Option<usize> {
        self.call(now, Call::Registration(total))
            .map(|(line, _)| line)
    }

    /// Holds a packet back.
    ///
    /// # Errors
    /// Returns the packet if too many wait.
    pub(crate) fn delay(&mut self, due: u64, way: Way, packet: Packet) -> Result<(), Packet> {
        if self.delayed.len() >= MAX_DELAYED {
            return Err(packet);
        }
        self.sequence += 1;
        self.delayed.insert((due, self.sequence), (way, packet));
        Ok(())
    }

    /// Returns the next packet that is due by `now`, or, with `all`, the next that waits.
    pub(crate) fn next_due(&mut self, now: u64, all: bool) -> Option<(Way, Packet)> {
        let first = self.delayed.first_entry()?;
        let (due, _) = *first.key();
        (all || due <= now).then(|| first.remove())
    }

    /// Finds the faults that happen by `now` of themselves. `exists` tells whether there is a queue
    /// pair.
    pub(crate) fn run_timers(&mut self, now: u64, exists: impl Fn(u32) -> bool) {
        if self.link_up_at.is_some_and(|at| at <= now) {
            self.link_up_at = None;
            self.effects.push_back(Effect {
                action: Action::LinkUp,
                qp: None,
                line: 0,
            });
        }
        for rule in &mut self.rules {
            let action = rule.fault.action;
            let of_itself = action.subject() == Subject::Once && !rule.fault.waits_for_packet();
            if !of_itself || !rule.may_fire(now) {
                continue;
            }
            let number = match rule.fault.matcher.qp {
                None => None,
                Some(QpName::Number(number)) => Some(number),
                Some(QpName::Order(order)) => {
                    let found = self.orders.iter().find(|(_, it)| **it == order);
                    match found {
                        Some((number, _)) => Some(*number),
                        // It may be created later.
                        None => continue,
                    }
                }
            };
            if number.is_some_and(|number| !exists(number)) {
                continue;
            }
            rule.is_over = true;
            rule.fire(&self.on_fired);
            if let Some(recorder) = &self.recorder {
                let order = number.and_then(|number| self.orders.get(&number));
                let order = order.map(|order| QpName::Order(*order));
                recorder.timed(now, action, order.or(number.map(QpName::Number)));
            }
            self.effects.push_back(Effect {
                action,
                qp: number,
                line: rule.fault.line,
            });
        }
    }

    /// Returns the next effect on the device.
    pub(crate) fn next_effect(&mut self, now: u64) -> Option<Effect> {
        let mut effect = self.effects.pop_front()?;
        while matches!(effect.action, Action::DeviceFatal | Action::Die) {
            if effect.action == Action::Die {
                self.silenced = Some(effect.line);
            }
            self.outer.push_back(effect);
            effect = self.effects.pop_front()?;
        }
        let is_down = match effect.action {
            Action::LinkDown(by) => {
                self.link_up_at = by.map(|by| now.saturating_add(by));
                true
            }
            Action::LinkUp => false,
            _ => return Some(effect),
        };
        self.holds_link_down = is_down;
        Some(effect)
    }

    /// Returns the next effect that is the front end's.
    pub(crate) fn next_outer_effect(&mut self) -> Option<Effect> {
        self.outer.pop_front()
    }

    /// Returns whether a sent packet is held back.
    pub(crate) fn has_unsent(&self) -> bool {
        self.delayed.values().any(|(way, _)| *way == Way::Out)
    }

    /// Returns whether a fault has taken the link down.
    pub(crate) fn holds_link_down(&self) -> bool {
        self.holds_link_down
    }

    /// Returns when something happens of itself.
    pub(crate) fn deadline(&self, now: u64) -> Option<u64> {
        let packet = self.delayed.keys().next().map(|(due, _)| *due);
        let timers = self.rules.iter().filter(|rule| {
            let once = rule.fault.action.subject() == Subject::Once;
            once && !rule.is_over && !rule.fault.waits_for_packet()
        });
        let timers = timers.filter_map(|rule| Some(rule.set_at + rule.fault.matcher.after?));
        // One that waits for its queue pair has no time.
        let timers = timers.filter(|at| *at > now);
        timers.chain(packet).chain(self.link_up_at).min()
    }
}
