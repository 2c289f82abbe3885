//! Flow steering: selects the receive queues for a frame from the wire.
//!
//! The driver builds tables of rules. A rule matches bits of the frame's headers, in the
//! layout of flow table entries, and names the destinations: another table, or a TIR,
//! which names a receive queue or a table of them from which a hash selects one. A frame
//! that matches no rule of a table continues in the table's next one.

use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

use roce::bits::{put_bytes, put32};

use super::frame::{Layers, Origin, cast, layers, u16_at};
use super::header_change::{self, Action};
use crate::layout::flow::action;
use crate::layout::fte_match_set_lyr_2_4 as headers;

/// Size of a match value in bytes.
pub(crate) const MATCH_SIZE: usize = 512;
/// Maximum number of tables that a frame traverses.
const MAX_DEPTH: u32 = 64;
/// Maximum number of objects of all kinds, and of rules.
pub(crate) const MAX_OBJECTS: usize = 1 << 16;
/// Maximum number of tables that a frame and its copies visit in total. Comparisons with
/// rules are limited by `MAX_OBJECTS`, so that each rule can be compared once.
const MAX_VISITS: usize = 1024;
/// Base-2 logarithm of the maximum number of destinations of a rule, and of its counters.
pub(crate) const LOG_DESTINATIONS: u32 = 8;
/// Maximum number of receive queues and of counters of a frame.
const MAX_QUEUES: usize = 1 << (LOG_DESTINATIONS + 2);

/// Header bits in the layout that rules match.
pub(crate) type Headers = Box<[u8; MATCH_SIZE]>;

/// Destination of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Destination {
    Table(u32),
    Tir(u32),
    /// A destination that is not modelled.
    Other,
}

/// A rule.
#[derive(Debug, Clone)]
pub(crate) struct FlowRule {
    pub(crate) group: u32,
    pub(crate) tag: u32,
    pub(crate) action: u32,
    pub(crate) value: Headers,
    pub(crate) destinations: Vec<Destination>,
    /// Counters of matching frames.
    pub(crate) counters: Vec<u32>,
    /// Change of matching frames' headers, if the action says so.
    pub(crate) header_change: u32,
}

impl FlowRule {
    /// Returns whether it refers to a TIR, a counter or a change of headers.
    fn is_referenced(&self, number: u32) -> bool {
        let changes = self.action & action::MOD_HDR != 0;
        self.destinations.contains(&Destination::Tir(number))
            || self.counters.contains(&number)
            || changes && self.header_change == number
    }
}

/// A receive queue that steering has selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SelectedQueue {
    pub(crate) rqn: u32,
    /// The tag of the last rule.
    pub(crate) tag: u32,
    /// The frame as rules have changed it, if they have.
    pub(crate) changed: Option<Rc<[u8]>>,
}

/// A transport interface receive (TIR): where steering ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tir {
    pub(crate) destination: TirDestination,
    pub(crate) domain: u32,
    /// Kinds of frames that it accepts from its own transport domain: `UNICAST`,
    /// `MULTICAST`.
    pub(crate) self_loopback: u32,
}

/// Destination of a TIR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TirDestination {
    /// A receive queue.
    Queue(u32),
    /// A table of receive queues (RQT), of which the hash selects one.
    Table(u32),
}

/// A steering object.
#[derive(Debug)]
pub(crate) enum Object {
    Tir(Tir),
    Tis {
        domain: u32,
        /// The port of a bond that frames leave through; 0 for any.
        lag_port: u32,
    },
    /// Receive queues to select from.
    Rqt(Vec<u32>),
    Table {
        /// The table is for received frames.
        receives: bool,
        next: Option<u32>,
        /// By index; the first rule that matches applies.
        rules: BTreeMap<u32, FlowRule>,
    },
    Group {
        criteria: Headers,
    },
    Counter(FlowCounter),
    /// A change of headers.
    HeaderChange(Vec<Action>),
}

/// Counts of the frames that matched rules with a counter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct FlowCounter {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
}

/// All steering objects.
#[derive(Debug)]
pub(crate) struct Steering {
    next: u32,
    objects: HashMap<u32, Object>,
    rules: usize,
    /// Table where every frame starts.
    pub(crate) root: Option<u32>,
}

impl Default for Steering {
    fn default() -> Self {
        Steering {
            next: FIRST_NUMBER,
            objects: HashMap::new(),
            rules: 0,
            root: None,
        }
    }
}

const FIRST_NUMBER: u32 = 0x100;

impl Steering {
    pub(crate) fn clear(&mut self) {
        self.objects.clear();
        self.rules = 0;
        self.root = None;
    }

    /// Adds an object. Returns its number, or `None` if there is no room.
    pub(crate) fn insert(&mut self, object: Object) -> Option<u32> {
        if self.objects.len() >= MAX_OBJECTS {
            return None;
        }
        let mut number = self.next;
        while self.objects.contains_key(&number) {
            number = (number + 1) & 0xff_ffff;
        }
        self.next = (number + 1) & 0xff_ffff;
        self.objects.insert(number, object);
        Some(number)
    }

    pub(crate) fn get(&self, number: u32) -> Option<&Object> {
        self.objects.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> Option<&mut Object> {
        self.objects.get_mut(&number)
    }

    pub(crate) fn remove(&mut self, number: u32) {
        if let Some(Object::Table { rules, .. }) = self.objects.remove(&number) {
            self.rules -= rules.len();
        }
        if self.root == Some(number) {
            self.root = None;
        }
    }

    /// Returns whether rules or TIRs refer to an object that is not a table or a group.
    pub(crate) fn is_referenced(&self, number: u32) -> bool {
        self.objects.values().any(|object| match object {
            Object::Tir(tir) => tir.destination == TirDestination::Table(number),
            Object::Table { rules, .. } => rules.values().any(|rule| rule.is_referenced(number)),
            _ => false,
        })
    }

    /// Returns whether TIRs or RQTs refer to a receive queue.
    pub(crate) fn is_queue_referenced(&self, rqn: u32) -> bool {
        self.objects.values().any(|object| match object {
            Object::Tir(tir) => tir.destination == TirDestination::Queue(rqn),
            Object::Rqt(queues) => queues.contains(&rqn),
            _ => false,
        })
    }

    /// Sets the rule at an index of a table. Returns false if there is no such table or
    /// no room.
    pub(crate) fn set_rule(&mut self, table: u32, index: u32, rule: FlowRule) -> bool {
        let full = self.rules >= MAX_OBJECTS;
        match self.objects.get_mut(&table) {
            Some(Object::Table { rules, .. }) if !full || rules.contains_key(&index) => {
                self.rules += usize::from(rules.insert(index, rule).is_none());
                true
            }
            _ => false,
        }
    }

    /// Removes a rule. Returns whether it existed.
    pub(crate) fn remove_rule(&mut self, table: u32, index: u32) -> bool {
        match self.objects.get_mut(&table) {
            Some(Object::Table { rules, .. }) => {
                let removed = rules.remove(&index).is_some();
                self.rules -= usize::from(removed);
                removed
            }
            _ => false,
        }
    }

    /// Returns the receive queues for a frame. TIRs filter frames from the interface's own
    /// send queues.
    pub(crate) fn steer(&mut self, frame: &[u8], origin: Origin) -> Vec<SelectedQueue> {
        let mut result = SteeringResult {
            queues: Vec::new(),
            counters: Vec::new(),
            visits: MAX_VISITS,
            rules: MAX_OBJECTS,
        };
        if let (Some(root), Some(frame)) = (self.root, SteeredFrame::new(frame, origin)) {
            self.traverse_table(&frame, root, MAX_DEPTH, &mut result);
        }
        for counter in result.counters {
            if let Some(Object::Counter(counter)) = self.objects.get_mut(&counter) {
                counter.packets = counter.packets.wrapping_add(1);
                counter.bytes = counter.bytes.wrapping_add(frame.len() as u64);
            }
        }
        result.queues
    }

    /// Applies a rule's header change. Returns `None` if the result cannot be parsed.
    fn change_header<'a>(&self, frame: &SteeredFrame<'a>, number: u32) -> Option<SteeredFrame<'a>> {
        let mut changed = Rc::from(frame.frame());
        if let (Some(Object::HeaderChange(actions)), Some(frame)) =
            (self.objects.get(&number), Rc::get_mut(&mut changed))
        {
            header_change::apply(frame, actions);
        }
        Some(SteeredFrame {
            headers: match_headers(&changed)?,
            hash: flow_hash(&changed),
            changed: Some(changed),
            ..*frame
        })
    }

    /// Continues in a table.
    fn traverse_table(
        &self,
        frame: &SteeredFrame<'_>,
        table: u32,
        depth: u32,
        result: &mut SteeringResult,
    ) {
        let (Some(Object::Table { next, rules, .. }), Some(depth), Some(visits)) = (
            self.objects.get(&table),
            depth.checked_sub(1),
            result.visits.checked_sub(1),
        ) else {
            return;
        };
        result.visits = visits;
        let mut compared = 0;
        let rule = rules.values().take(result.rules).find(|rule| {
            compared += 1;
            self.matches(frame, rule)
        });
        result.rules -= compared;
        let Some(rule) = rule else {
            if let Some(next) = next {
                self.traverse_table(frame, *next, depth, result);
            }
            return;
        };
        if rule.action & action::COUNT != 0 {
            let remaining = MAX_QUEUES - result.counters.len();
            let counters = rule.counters.iter().take(remaining);
            result.counters.extend(counters);
        }
        if rule.action & action::DROP != 0 || rule.action & action::FWD_DEST == 0 {
            return;
        }
        let changed;
        let frame = if rule.action & action::MOD_HDR != 0 {
            let Some(changed_frame) = self.change_header(frame, rule.header_change) else {
                return;
            };
            changed = changed_frame;
            &changed
        } else {
            frame
        };
        for destination in &rule.destinations {
            match destination {
                Destination::Table(table) => self.traverse_table(frame, *table, depth, result),
                Destination::Tir(tir) => {
                    let queue = self.select_queue(frame, *tir);
                    if let Some(rqn) = queue.filter(|_| result.queues.len() < MAX_QUEUES) {
                        result.queues.push(SelectedQueue {
                            rqn,
                            tag: rule.tag,
                            changed: frame.changed.clone(),
                        });
                    }
                }
                Destination::Other => {}
            }
        }
    }

    fn matches(&self, frame: &SteeredFrame<'_>, rule: &FlowRule) -> bool {
        let Some(Object::Group { criteria }) = self.objects.get(&rule.group) else {
            return false;
        };
        let bytes = criteria.iter().zip(rule.value.iter());
        bytes
            .zip(frame.headers.iter())
            .all(|((mask, value), header)| mask & value == mask & header)
    }

    fn select_queue(&self, frame: &SteeredFrame<'_>, tir: u32) -> Option<u32> {
        let Some(Object::Tir(tir)) = self.objects.get(&tir) else {
            return None;
        };
        let is_own_frame = match frame.origin {
            Origin::Wire => false,
            Origin::Local { domain } => domain == Some(tir.domain),
        };
        if is_own_frame && tir.self_loopback & frame.cast == 0 {
            return None;
        }
        match tir.destination {
            TirDestination::Queue(rqn) => Some(rqn),
            TirDestination::Table(rqt) => match self.objects.get(&rqt) {
                Some(Object::Rqt(queues)) if !queues.is_empty() => {
                    Some(queues[frame.hash as usize % queues.len()])
                }
                _ => None,
            },
        }
    }
}

/// Queues and counters selected for a frame, and the remaining limits.
struct SteeringResult {
    queues: Vec<SelectedQueue>,
    counters: Vec<u32>,
    /// Remaining visits of tables and comparisons with rules.
    visits: usize,
    rules: usize,
}

/// A frame that is being steered.
struct SteeredFrame<'a> {
    original: &'a [u8],
    /// The frame as rules have changed it, if they have.
    changed: Option<Rc<[u8]>>,
    /// Headers and hash of the frame as it is now.
    headers: Headers,
    hash: u32,
    /// The kind of frame that arrived.
    cast: u32,
    origin: Origin,
}

impl<'a> SteeredFrame<'a> {
    fn new(original: &'a [u8], origin: Origin) -> Option<SteeredFrame<'a>> {
        Some(SteeredFrame {
            original,
            changed: None,
            headers: match_headers(original)?,
            hash: flow_hash(original),
            cast: cast(original),
            origin,
        })
    }

    /// Returns the frame as it is now.
    fn frame(&self) -> &[u8] {
        self.changed.as_deref().unwrap_or(self.original)
    }
}

/// Hashes the addresses and ports of a frame, so that a flow always selects the same
/// queue. It is not the hash function that the driver configures.
fn flow_hash(frame: &[u8]) -> u32 {
    let Some(at) = layers(frame) else { return 0 };
    let addresses = if at.ipv4 { 12..20 } else { 8..40 };
    let l3 = frame.get(at.l3 + addresses.start..at.l3 + addresses.end);
    let ports = frame.get(at.l4..at.l4 + 4).unwrap_or(&[]);
    let bytes = l3.unwrap_or(&[]).iter().chain(ports);
    // FNV-1a, with the high bits folded in.
    let hash = bytes.fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    hash ^ hash >> 16
}

/// Returns the headers of a frame in the layout that rules match: link, network and
/// transport layer of the outermost packet.
fn match_headers(frame: &[u8]) -> Option<Headers> {
    const TCP: u8 = 6;
    const UDP: u8 = 17;
    const VLAN: u16 = 0x8100;
    let mut out: Headers = Box::new([0; MATCH_SIZE]);
    let bytes = &mut out[..];
    let addresses = frame.get(..12)?;
    put_bytes(bytes, headers::SMAC, &addresses[6..12]);
    put_bytes(bytes, headers::DMAC, &addresses[..6]);
    let mut ethertype = u16_at(frame, 12)?;
    if ethertype == VLAN {
        put_bytes(bytes, headers::FIRST_VLAN, frame.get(14..16)?);
        headers::CVLAN_TAG.put(bytes, 1);
        ethertype = u16_at(frame, 16)?;
    }
    put_bytes(bytes, headers::ETHERTYPE, &ethertype.to_be_bytes());
    let Some(Layers {
        ipv4,
        l3,
        l4,
        protocol,
    }) = layers(frame)
    else {
        return Some(out);
    };
    headers::IP_PROTOCOL.put(bytes, u32::from(protocol));
    headers::IP_VERSION.put(bytes, if ipv4 { 4 } else { 6 });
    let traffic_class = if ipv4 {
        headers::TTL_HOPLIMIT.put(bytes, u32::from(*frame.get(l3 + 8)?));
        headers::IPV4_IHL.put(bytes, u32::from(frame.get(l3)? & 0xf));
        let fragment = u16_at(frame, l3 + 6)? & 0x3fff != 0;
        headers::FRAG.put(bytes, u32::from(fragment));
        put_bytes(bytes, headers::SRC_IPV4, frame.get(l3 + 12..l3 + 16)?);
        put_bytes(bytes, headers::DST_IPV4, frame.get(l3 + 16..l3 + 20)?);
        *frame.get(l3 + 1)?
    } else {
        headers::TTL_HOPLIMIT.put(bytes, u32::from(*frame.get(l3 + 7)?));
        put_bytes(bytes, headers::SRC_IPV6, frame.get(l3 + 8..l3 + 24)?);
        put_bytes(bytes, headers::DST_IPV6, frame.get(l3 + 24..l3 + 40)?);
        (u16_at(frame, l3)? >> 4) as u8
    };
    headers::TRAFFIC_CLASS.put(bytes, u32::from(traffic_class));
    if let Some(ports) = frame.get(l4..l4 + 4) {
        let ports = u32::from_be_bytes([ports[0], ports[1], ports[2], ports[3]]);
        match protocol {
            TCP => {
                put32(bytes, headers::TCP_SPORT, ports);
                let flags = u16_at(frame, l4 + 12).unwrap_or(0) & 0x1ff;
                headers::TCP_FLAGS.put(bytes, u32::from(flags));
            }
            UDP => put32(bytes, headers::UDP_SPORT, ports),
            _ => {}
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::super::frame::{MULTICAST, UNICAST};
    use super::*;

    /// Returns a UDP over IPv4 frame, from port 7 to 9.
    fn frame(tagged: bool) -> Vec<u8> {
        let mut frame = vec![0xd0, 1, 2, 3, 4, 5, 0x50, 1, 2, 3, 4, 6];
        if tagged {
            frame.extend([0x81, 0, 0x60, 5]);
        }
        frame.extend([8, 0, 0x45, 0x0b, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0]);
        frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0, 7, 0, 9, 0, 12, 0, 0, b'd', b'a', b't', b'a']);
        frame
    }

    #[test]
    fn match_headers_have_the_layout_of_rules() {
        let bytes = match_headers(&frame(true)).unwrap();
        assert_eq!(bytes[..12], [0x50, 1, 2, 3, 4, 6, 8, 0, 0xd0, 1, 2, 3]);
        assert_eq!(bytes[12..16], [4, 5, 0x60, 5], "MAC and tag");
        assert_eq!(bytes[16..20], [17, 0x0b, 0x88, 0], "UDP, tagged, version 4");
        assert_eq!(bytes[0x18..0x20], [0, 0, 0x50, 64, 0, 7, 0, 9]);
        assert_eq!(bytes[0x2c..0x30], [10, 0, 0, 1]);
        assert_eq!(bytes[0x3c..0x40], [10, 0, 0, 2]);
        assert!(bytes[0x40..].iter().all(|byte| *byte == 0));
        assert!(match_headers(&[0; 13]).is_none());
    }

    /// Queues and tags.
    fn steer(steering: &mut Steering, frame: &[u8], origin: Origin) -> Vec<(u32, u32)> {
        let selected = steering.steer(frame, origin);
        selected
            .iter()
            .map(|queue| (queue.rqn, queue.tag))
            .collect()
    }

    fn rule(group: u32, value: Headers, destination: Destination) -> FlowRule {
        FlowRule {
            group,
            tag: 5,
            action: action::FWD_DEST,
            value,
            destinations: vec![destination],
            counters: Vec::new(),
            header_change: 0,
        }
    }

    #[test]
    fn the_first_matching_rule_applies() {
        let mut steering = Steering::default();
        let zero: Headers = Box::new([0; MATCH_SIZE]);
        let mut ports = zero.clone();
        ports[0x1c..0x20].fill(0xff);
        let mut table = |next| {
            let object = Object::Table {
                receives: true,
                next,
                rules: BTreeMap::new(),
            };
            steering.insert(object).unwrap()
        };
        let last = table(None);
        let first = table(Some(last));
        let all = steering
            .insert(Object::Group {
                criteria: zero.clone(),
            })
            .unwrap();
        let by_port = steering.insert(Object::Group { criteria: ports }).unwrap();
        let mut tir = |tir| steering.insert(Object::Tir(tir)).unwrap();
        let mine = tir(Tir {
            destination: TirDestination::Queue(1),
            domain: 3,
            self_loopback: UNICAST | MULTICAST,
        });
        let rest = tir(Tir {
            destination: TirDestination::Queue(2),
            domain: 3,
            self_loopback: MULTICAST,
        });
        let mut value = zero.clone();
        value[0x1c..0x20].copy_from_slice(&[0, 7, 0, 9]);
        assert!(steering.set_rule(first, 3, rule(by_port, value, Destination::Tir(mine))));
        assert!(steering.set_rule(last, 0, rule(all, zero, Destination::Tir(rest))));
        assert!(
            steer(&mut steering, &frame(false), Origin::Wire).is_empty(),
            "no root yet"
        );
        steering.root = Some(first);
        assert_eq!(steer(&mut steering, &frame(false), Origin::Wire), [(1, 5)]);
        let mut other = frame(false);
        other[37] = 10;
        assert_eq!(steer(&mut steering, &other, Origin::Wire), [(2, 5)]);
        let from = |domain| Origin::Local { domain };
        assert_eq!(steer(&mut steering, &frame(false), from(Some(3))), [(1, 5)]);
        assert!(
            steer(&mut steering, &other, from(Some(3))).is_empty(),
            "its own, and not wanted"
        );
        assert_eq!(
            steer(&mut steering, &other, from(Some(4))),
            [(2, 5)],
            "another's"
        );
        assert_eq!(steer(&mut steering, &other, from(None)), [(2, 5)]);
        let mut to_all = other.clone();
        to_all[0] |= 1;
        assert_eq!(steer(&mut steering, &to_all, from(Some(3))), [(2, 5)]);
        assert!(steering.remove_rule(first, 3) && !steering.remove_rule(first, 3));
        assert_eq!(steer(&mut steering, &frame(false), Origin::Wire), [(2, 5)]);
        assert!(steering.set_rule(
            last,
            9,
            rule(all, Box::new([0; MATCH_SIZE]), Destination::Tir(mine))
        ));
        assert_eq!(
            steer(&mut steering, &frame(false), Origin::Wire),
            [(2, 5)],
            "the first"
        );
        // Steering ends if tables form a loop.
        let Some(Object::Table { next, rules, .. }) = steering.get_mut(last) else {
            panic!("no table");
        };
        *next = Some(first);
        rules.clear();
        assert!(steer(&mut steering, &frame(false), Origin::Wire).is_empty());
    }

    #[test]
    fn frames_are_counted_by_the_rules_that_they_match() {
        let mut steering = Steering::default();
        let zero: Headers = Box::new([0; MATCH_SIZE]);
        let counter = |steering: &mut Steering| {
            let object = Object::Counter(FlowCounter::default());
            steering.insert(object).unwrap()
        };
        let (used, unused) = (counter(&mut steering), counter(&mut steering));
        let mut table = || {
            let object = Object::Table {
                receives: true,
                next: None,
                rules: BTreeMap::new(),
            };
            steering.insert(object).unwrap()
        };
        let (first, second) = (table(), table());
        let all = steering
            .insert(Object::Group {
                criteria: zero.clone(),
            })
            .unwrap();
        let counting = |destination| FlowRule {
            action: action::FWD_DEST | action::COUNT,
            counters: vec![used],
            ..rule(all, zero.clone(), destination)
        };
        assert!(steering.set_rule(first, 0, counting(Destination::Table(second))));
        let ignored = FlowRule {
            action: action::DROP,
            counters: vec![unused],
            ..rule(all, zero.clone(), Destination::Other)
        };
        assert!(steering.set_rule(second, 0, ignored));
        steering.root = Some(first);
        let length = frame(false).len() as u64;
        for n in 1..=3 {
            steer(&mut steering, &frame(false), Origin::Wire);
            let counter = |steering: &Steering, number| match steering.get(number) {
                Some(Object::Counter(counter)) => (counter.packets, counter.bytes),
                other => panic!("{other:?}"),
            };
            assert_eq!(counter(&steering, used), (n, n * length));
            assert_eq!(counter(&steering, unused), (0, 0), "without the action");
        }
    }

    /// Returns a table without rules.
    fn table(steering: &mut Steering) -> u32 {
        let object = Object::Table {
            receives: true,
            next: None,
            rules: BTreeMap::new(),
        };
        steering.insert(object).unwrap()
    }

    #[test]
    fn the_copies_of_a_frame_are_bounded() {
        let mut steering = Steering::default();
        let zero: Headers = Box::new([0; MATCH_SIZE]);
        let counter = Object::Counter(FlowCounter::default());
        let counter = steering.insert(counter).unwrap();
        let tir = Tir {
            destination: TirDestination::Queue(1),
            domain: 3,
            self_loopback: 0,
        };
        let tir = steering.insert(Object::Tir(tir)).unwrap();
        let all = steering
            .insert(Object::Group {
                criteria: zero.clone(),
            })
            .unwrap();
        // Each table leads to the next one twice.
        let tables: Vec<u32> = (0..MAX_DEPTH).map(|_| table(&mut steering)).collect();
        for (n, number) in tables.iter().enumerate() {
            let next = tables.get(n + 1).copied();
            let destination = next.map_or(Destination::Tir(tir), Destination::Table);
            let twice = FlowRule {
                action: action::FWD_DEST | action::COUNT,
                destinations: vec![destination; 2],
                counters: vec![counter],
                ..rule(all, zero.clone(), destination)
            };
            assert!(steering.set_rule(*number, 0, twice));
        }
        steering.root = Some(tables[0]);
        let result = steer(&mut steering, &frame(false), Origin::Wire);
        assert!(!result.is_empty() && result.len() <= MAX_QUEUES);
        let Some(Object::Counter(counter)) = steering.get(counter) else {
            panic!("no counter");
        };
        assert!(counter.packets <= MAX_QUEUES as u64);
        // A single rule with too many of them.
        let many = FlowRule {
            destinations: vec![Destination::Tir(tir); 3 * MAX_QUEUES],
            ..rule(all, zero, Destination::Other)
        };
        assert!(steering.set_rule(tables[0], 0, many));
        let result = steer(&mut steering, &frame(false), Origin::Wire);
        assert_eq!(result.len(), MAX_QUEUES);
    }

    #[test]
    fn later_tables_match_changed_headers() {
        let mut steering = Steering::default();
        let zero: Headers = Box::new([0; MATCH_SIZE]);
        let mut ports = zero.clone();
        ports[0x1e..0x20].fill(0xff);
        let tirs = [1, 2].map(|rqn| {
            let tir = Tir {
                destination: TirDestination::Queue(rqn),
                domain: 3,
                self_loopback: 0,
            };
            Destination::Tir(steering.insert(Object::Tir(tir)).unwrap())
        });
        let all = Object::Group {
            criteria: zero.clone(),
        };
        let all = steering.insert(all).unwrap();
        let by_port = steering.insert(Object::Group { criteria: ports }).unwrap();
        let port = |port: u8| {
            // Sets the destination port of UDP.
            let action = [0x10, 0x0c, 0, 16, 0, 0, 0, port];
            Object::HeaderChange(header_change::decode(&action, 1).unwrap())
        };
        let [to_80, to_81] = [80, 81].map(|number| steering.insert(port(number)).unwrap());
        let (first, second) = (table(&mut steering), table(&mut steering));
        let changing = |header_change, destinations| FlowRule {
            action: action::FWD_DEST | action::MOD_HDR,
            header_change,
            destinations,
            ..rule(all, zero.clone(), Destination::Other)
        };
        let destinations = vec![Destination::Table(second), tirs[1]];
        assert!(steering.set_rule(first, 0, changing(to_80, destinations)));
        for (index, before, destination) in [(0, 9, tirs[1]), (1, 80, tirs[0])] {
            let mut value = zero.clone();
            value[0x1f] = before;
            let rule = FlowRule {
                group: by_port,
                value,
                ..changing(to_81, vec![destination])
            };
            assert!(steering.set_rule(second, index, rule));
        }
        steering.root = Some(first);
        let selected = steering.steer(&frame(false), Origin::Wire);
        let ports = selected.iter().map(|queue| {
            let changed = queue.changed.as_ref().unwrap();
            (queue.rqn, changed[37])
        });
        // The second destination does not see the change of the second table.
        assert_eq!(ports.collect::<Vec<_>>(), [(1, 81), (2, 80)]);
    }

    #[test]
    fn frames_of_a_flow_select_the_same_queue() {
        let mut steering = Steering::default();
        let zero: Headers = Box::new([0; MATCH_SIZE]);
        let rqt = steering.insert(Object::Rqt(vec![7, 8, 9, 10])).unwrap();
        let tir = Tir {
            destination: TirDestination::Table(rqt),
            domain: 3,
            self_loopback: 0,
        };
        let tir = steering.insert(Object::Tir(tir)).unwrap();
        let all = steering
            .insert(Object::Group {
                criteria: zero.clone(),
            })
            .unwrap();
        let object = Object::Table {
            receives: true,
            next: None,
            rules: BTreeMap::new(),
        };
        let table = steering.insert(object).unwrap();
        steering.set_rule(table, 0, rule(all, zero, Destination::Tir(tir)));
        steering.root = Some(table);
        let mut selected = std::collections::BTreeSet::new();
        for port in 0..64 {
            let mut frame = frame(false);
            frame[35] = port;
            let one = steer(&mut steering, &frame, Origin::Wire);
            assert_eq!(one, steer(&mut steering, &frame, Origin::Wire));
            selected.insert(one[0].0);
        }
        assert_eq!(selected.len(), 4, "all are used");
    }
}
