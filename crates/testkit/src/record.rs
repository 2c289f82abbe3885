//! The faults of a fabric, as a text that makes them happen again.
//!
//! A fault of frames selects by position and chance among those that a test has named. What it
//! does is recorded as a fault of received packets, by the queue pair's number, the kind of
//! packet, and the position among those; what a fault of a text does, as the device tells it. The
//! wire carries the former out again, where they have happened: the devices count neither what is
//! lost there, nor twice what arrives twice.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use embedded::roce::packet::{Packet, View};
use embedded::softhca::fault::{
    Action, Decision, Fault, FaultLog, LogFull, OnDecision, PacketKind, QpName, Way, When,
};

use crate::capture::Delivery;

/// Where a packet arrives, and its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Arrival {
    node: usize,
    qpn: u32,
    kind: PacketKind,
}

impl Arrival {
    /// Returns that of a frame to a node; `None` of messages of the connection manager, which
    /// faults of a text do not count, and of others than packets.
    pub(crate) fn of(to: usize, raw: &Packet) -> Option<Self> {
        let view = View::parse_packet(raw).ok()?;
        let kind = PacketKind::of(&view);
        (kind != PacketKind::Management).then_some(Self {
            node: to,
            qpn: view.bth.dest_qpn,
            kind,
        })
    }
}

/// A recorded fault of frames that is to happen again.
#[derive(Debug)]
pub(crate) struct RepeatedFault {
    fault: Fault,
    node: usize,
    matched: u64,
    happened: u64,
}

impl RepeatedFault {
    /// Creates it of a fault of a node; `None` if that is none of frames as they are recorded.
    pub(crate) fn of(fault: &Fault, node: usize) -> Option<Self> {
        let matcher = &fault.matcher;
        let is_of_frames = matches!(
            fault.action,
            Action::Lose | Action::Reorder(_) | Action::Duplicate | Action::Corrupt
        );
        let is_counted = matches!(matcher.qp, Some(QpName::Number(_)))
            && matcher.way == Some(Way::In)
            && (matcher.peer, matcher.chance) == (None, None)
            && (matcher.after, matcher.until) == (None, None);
        (is_of_frames && is_counted).then(|| Self {
            fault: fault.clone(),
            node,
            matched: 0,
            happened: 0,
        })
    }

    /// Applies it to a frame, if it is one of its.
    pub(crate) fn apply(&mut self, arrival: Arrival, delivery: &mut Delivery) {
        let matcher = &self.fault.matcher;
        let is_one = self.node == arrival.node
            && matcher.qp == Some(QpName::Number(arrival.qpn))
            && matcher.opcode.is_none_or(|kind| kind == arrival.kind);
        if !is_one {
            return;
        }
        self.matched += 1;
        if !matcher.nth.contains(self.matched) {
            return;
        }
        self.happened += 1;
        match self.fault.action {
            Action::Lose => delivery.lost = true,
            Action::Duplicate => delivery.duplicated = true,
            Action::Corrupt => delivery.corrupted = true,
            Action::Reorder(by) => delivery.delay += Duration::from_nanos(by),
            _ => {}
        }
    }

    /// Returns its text, and how often it has happened.
    pub(crate) fn count(&self) -> (String, u64) {
        (self.fault.to_string(), self.happened)
    }
}

/// A record of faults, shared by the wire and the devices.
#[derive(Clone, Default)]
pub(crate) struct FaultRecord(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    log: FaultLog,
    /// Why it has ended.
    end: Option<LogFull>,
    /// Packets of each kind to a queue pair.
    counts: HashMap<Arrival, u64>,
    /// Frames with faults that no fault of a device can select.
    left_out: u64,
}

impl State {
    fn add(&mut self, node: usize, decision: &Decision) {
        if self.end.is_none() {
            self.end = self.log.add(node, None, decision).err();
        }
    }
}

impl FaultRecord {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns what a device tells its decisions.
    pub(crate) fn of_device(&self, node: usize) -> OnDecision {
        let record = self.clone();
        Arc::new(move |decision: &Decision| record.state().add(node, decision))
    }

    /// Counts a frame, and records what its faults do.
    pub(crate) fn count_frame(&self, arrival: Option<Arrival>, delivery: Delivery) {
        let mut state = self.state();
        let Some(arrival) = arrival else {
            state.left_out += u64::from(delivery != Delivery::default());
            return;
        };
        let count = state.counts.entry(arrival).or_default();
        *count += 1;
        let nth = *count;
        for action in actions(delivery) {
            let decision = Decision {
                action,
                qp: Some(QpName::Number(arrival.qpn)),
                opcode: Some(arrival.kind),
                way: Some(Way::In),
                when: When::Nth(nth),
            };
            state.add(arrival.node, &decision);
        }
    }

    /// Returns the text.
    pub(crate) fn text(&self) -> String {
        let state = self.state();
        let mut text = format!("# Faults that have happened on a fabric.\n{}", state.log);
        if let Some(full) = state.end {
            text += &format!("# The record ends here: {full}.\n");
        }
        if state.left_out != 0 {
            let count = state.left_out;
            text += &format!("# Left out: those of {count} messages of the connection manager.\n");
        }
        text
    }
}

/// Returns what happens to a frame, as faults of a device.
fn actions(delivery: Delivery) -> impl Iterator<Item = Action> {
    let Delivery {
        lost,
        duplicated,
        corrupted,
        delay,
    } = delivery;
    // A lost packet cannot be duplicated or delayed as well.
    let delay = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
    let late = (delay != 0).then_some(Action::Reorder(delay));
    let actions = [
        lost.then_some(Action::Lose),
        late.filter(|_| !lost),
        (duplicated && !lost).then_some(Action::Duplicate),
        (corrupted && !lost).then_some(Action::Corrupt),
    ];
    actions.into_iter().flatten()
}
