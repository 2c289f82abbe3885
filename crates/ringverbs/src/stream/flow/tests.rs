//! Two sides with an ordered link between them, in random interleavings.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::super::messages::{Hello, ImmediateData};
use super::*;

/// One side: its receives and the program that uses it.
struct Side {
    flow: Flow,
    /// Number of posted receives.
    free: u32,
    /// Messages that have arrived and are not read.
    inbox: VecDeque<Vec<u8>>,
    /// Bytes that the program will send, and has sent.
    to_send: VecDeque<u8>,
    sent: Vec<u8>,
    read: Vec<u8>,
}

struct Pair {
    sides: [Side; 2],
    /// Messages in flight to each side.
    links: [VecDeque<(ImmediateData, Vec<u8>)>; 2],
    sizes: [usize; 2],
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Write(usize),
    Deliver,
    Read,
    Finish,
}

impl Pair {
    fn new(receives: [u16; 2], sizes: [usize; 2], data: [Vec<u8>; 2]) -> Self {
        let hello = |side: usize| Hello {
            receives: receives[side],
            size: sizes[side] as u32,
        };
        let [a, b] = data;
        let side = |side: usize, data: Vec<u8>| Side {
            flow: Flow::new(hello(side), hello(1 - side)),
            free: receives[side].into(),
            inbox: VecDeque::new(),
            to_send: data.into(),
            sent: Vec::new(),
            read: Vec::new(),
        };
        Self {
            sides: [side(0, a), side(1, b)],
            links: [VecDeque::new(), VecDeque::new()],
            sizes,
        }
    }

    fn pump(&mut self, at: usize) -> bool {
        let mut did = false;
        while let Some(immediate) = self.sides[at].flow.due() {
            self.links[1 - at].push_back((immediate, Vec::new()));
            did = true;
        }
        did
    }

    /// Performs a step at a side, if possible. Returns whether it had an effect.
    fn perform(&mut self, at: usize, perform: Action) -> bool {
        let side = &mut self.sides[at];
        match perform {
            Action::Write(len) => {
                let len = len.min(self.sizes[1 - at]).min(side.to_send.len());
                if len == 0 || side.flow.room() == 0 {
                    return false;
                }
                let bytes: Vec<u8> = side.to_send.drain(..len).collect();
                side.sent.extend(&bytes);
                let immediate = side.flow.data();
                self.links[1 - at].push_back((immediate, bytes));
            }
            Action::Deliver => {
                let Some((immediate, bytes)) = self.links[at].pop_front() else {
                    return false;
                };
                assert!(side.free > 0, "a message finds no receive");
                assert_eq!(ImmediateData::decode(immediate.encode()), Some(immediate));
                side.flow
                    .received(immediate, bytes.len())
                    .expect("in order");
                if bytes.is_empty() {
                    side.flow.posted(1);
                } else {
                    side.free -= 1;
                    side.inbox.push_back(bytes);
                }
                self.pump(at);
            }
            Action::Read => {
                let Some(bytes) = side.inbox.pop_front() else {
                    return false;
                };
                side.read.extend(bytes);
                side.free += 1;
                side.flow.posted(1);
                self.pump(at);
            }
            Action::Finish => {
                if side.flow.is_finished() {
                    return false;
                }
                side.flow.finish();
                self.pump(at);
            }
        }
        true
    }

    /// Continues until no step has an effect. A side reads only if its `reads` is set.
    fn settle(&mut self, reads: [bool; 2]) {
        loop {
            let mut did = false;
            for (at, reads) in reads.into_iter().enumerate() {
                did |= self.perform(at, Action::Write(usize::MAX));
                did |= self.perform(at, Action::Deliver);
                did |= reads && self.perform(at, Action::Read);
            }
            if !did {
                return;
            }
        }
    }

    fn finish(&mut self) {
        for at in 0..2 {
            self.perform(at, Action::Finish);
        }
        self.settle([true, true]);
        for at in 0..2 {
            let (here, there) = (&self.sides[at], &self.sides[1 - at]);
            assert_eq!(here.sent, there.read);
            assert!(here.flow.end_is_sent() && there.flow.peer_ended());
        }
    }
}

fn actions() -> impl Strategy<Value = Vec<(usize, Action)>> {
    let perform = prop_oneof![
        4 => (1usize..40).prop_map(Action::Write),
        4 => Just(Action::Deliver),
        3 => Just(Action::Read),
    ];
    prop::collection::vec((0usize..2, perform), 0..600)
}

fn data() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..4000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    /// From any state, if both sides read, all data and the end marks arrive.
    #[test]
    fn all_data_arrives(
        receives in [8u16..20, 8u16..20], size in [1usize..40, 1usize..40],
        a in data(), b in data(), actions in actions(), end in 0usize..600, ender in 0usize..2,
    ) {
        let total = [a.len(), b.len()];
        let mut pair = Pair::new(receives, size, [a, b]);
        for (count, (at, perform)) in actions.into_iter().enumerate() {
            if count == end {
                pair.perform(ender, Action::Finish);
            }
            pair.perform(at, perform);
        }
        let ended = [0, 1].map(|at| pair.sides[at].flow.is_finished());
        pair.settle([true, true]);
        for at in 0..2 {
            // A side that has ended sends no more; the other sends everything.
            prop_assert!(ended[at] || pair.sides[at].sent.len() == total[at]);
        }
        pair.finish();
    }

    /// A side that does not read blocks the data of the other side, not its own.
    #[test]
    fn directions_are_independent(
        receives in [8u16..20, 8u16..20], size in [1usize..40, 1usize..40],
        a in data(), b in data(), actions in actions(), deaf in 0usize..2,
    ) {
        let total = [a.len(), b.len()];
        let mut pair = Pair::new(receives, size, [a, b]);
        for (at, perform) in actions {
            if !(at == deaf && matches!(perform, Action::Read)) {
                pair.perform(at, perform);
            }
        }
        let mut reads = [true; 2];
        reads[deaf] = false;
        pair.settle(reads);
        prop_assert_eq!(pair.sides[deaf].sent.len(), total[deaf]);
        prop_assert_eq!(pair.sides[1 - deaf].read.len(), total[deaf]);
        pair.finish();
    }

    /// No message of a peer causes a panic.
    #[test]
    fn no_message_panics(notes in prop::collection::vec((any::<u32>(), 0usize..3, any::<bool>()), 0..100)) {
        let hello = Hello { receives: 8, size: 256 };
        let mut flow = Flow::new(hello, hello);
        for (word, len, write) in notes {
            if let Some(immediate) = ImmediateData::decode(word & 0x1_000f) { if flow.received(immediate, len).is_ok() {
                flow.posted(1);
            } }
            if write && flow.room() > 0 {
                flow.data();
            }
            while flow.due().is_some() {}
            prop_assert!(flow.credits <= 8 && flow.owed <= 8);
        }
    }
}

#[test]
fn protocol_violations_are_detected() {
    let hello = Hello {
        receives: 8,
        size: 256,
    };
    let mut flow = Flow::new(hello, hello);
    let immediate = |credits, fin| ImmediateData { credits, fin };
    assert_eq!(
        flow.received(immediate(1, false), 0),
        Err(Violation::Credits)
    );
    assert_eq!(flow.received(immediate(0, true), 5), Ok(()));
    assert_eq!(
        flow.received(immediate(0, false), 1),
        Err(Violation::AfterEnd)
    );
    assert_eq!(
        flow.received(immediate(0, true), 0),
        Err(Violation::AfterEnd)
    );
    // Credits still arrive.
    flow.data();
    assert_eq!(flow.received(immediate(1, false), 0), Ok(()));
}
