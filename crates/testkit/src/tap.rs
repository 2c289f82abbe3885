//! The wire of a fabric: applies faults to each frame, and captures it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use embedded::roce::fabric::{Delivery as Transit, Random, Tap};
use embedded::roce::packet::Packet as Raw;

use crate::capture::{Delivery, Frame, Packet};
use crate::faults::Rule;
use crate::record::{Arrival, FaultRecord, RepeatedFault};

/// Maximum number of captured frames.
const MAX_FRAMES: usize = 1 << 20;

/// State of the wire, shared by the fabric and its tap.
#[derive(Default)]
pub(crate) struct Wire {
    pub rules: Vec<Rule>,
    pub frames: Vec<Frame>,
    /// Nodes that neither send nor receive.
    pub dead: Vec<usize>,
    /// Transit time of every frame, in nanoseconds.
    pub delay: u64,
    pub random: Random,
    pub seed: u64,
    pub captures: bool,
    /// The record of faults, if there is one.
    pub record: Option<FaultRecord>,
    /// Recorded faults that happen again.
    pub repeated: Vec<RepeatedFault>,
}

pub(crate) type SharedWire = Arc<Mutex<Wire>>;

pub(crate) fn lock(wire: &SharedWire) -> MutexGuard<'_, Wire> {
    // The state is consistent between rules, which may panic.
    wire.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Wire {
    /// Returns the next random number.
    fn next(&mut self) -> u64 {
        self.random.next()
    }

    /// Returns true with the given probability.
    fn chance(&mut self, probability: f64) -> bool {
        ((self.next() >> 11) as f64) < probability * (1u64 << 53) as f64
    }

    /// Flips a bit behind the link header. Which one follows from seed and time, not from a draw:
    /// it is the same if the fault was recorded and happens again.
    fn corrupt(&self, now: u64, raw: &mut Raw) {
        let start = raw.kind().header_bytes();
        let number = Random::new(self.seed ^ now).next();
        let frame = raw.frame_mut();
        let length = frame.len().saturating_sub(start).max(1);
        if let Some(byte) = frame.get_mut(start + (number >> 8) as usize % length) {
            *byte ^= 1 << (number & 7);
        }
    }
}

/// The tap on the network's fabric.
pub(crate) struct WireTap(pub SharedWire);

impl Tap for WireTap {
    fn transfer(&mut self, now: u64, from: usize, to: usize, raw: &mut Raw) -> Transit {
        let mut wire = lock(&self.0);
        let mut frame = Frame {
            time: Duration::from_nanos(now.saturating_sub(1)),
            from,
            to,
            delivery: Delivery::default(),
            packet: Packet::read(raw.kind(), raw.frame()),
            bytes: raw.frame().to_vec(),
            kind: raw.kind(),
        };
        let mut delivery = Delivery::default();
        let mut rules = std::mem::take(&mut wire.rules);
        for rule in &mut rules {
            if rule.applies(&frame, |probability| wire.chance(probability)) {
                rule.action.apply(&mut delivery);
            }
        }
        rules.retain(|rule| !rule.is_finished());
        wire.rules = rules;
        if wire.record.is_some() || !wire.repeated.is_empty() {
            let arrival = Arrival::of(to, raw);
            if let Some(arrival) = arrival {
                for fault in &mut wire.repeated {
                    fault.apply(arrival, &mut delivery);
                }
            }
            if let Some(record) = &wire.record {
                record.count_frame(arrival, delivery);
            }
        }
        delivery.lost |= wire.dead.contains(&from) || wire.dead.contains(&to);
        if delivery.corrupted {
            wire.corrupt(now, raw);
        }
        let delay = wire.delay + u64::try_from(delivery.delay.as_nanos()).unwrap_or(u64::MAX);
        let transit = Transit {
            lost: delivery.lost,
            duplicated: delivery.duplicated,
            delay,
        };
        frame.delivery = delivery;
        if wire.captures && wire.frames.len() < MAX_FRAMES {
            wire.frames.push(frame);
        }
        transit
    }
}
