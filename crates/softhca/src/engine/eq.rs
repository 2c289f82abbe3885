//! Event queues.

use roce::bits::put32;

use super::buffer::Buffer;
use super::core::Core;
use crate::cause::{Cause, Misuse};
pub use crate::layout::event;
use crate::platform::Platform;

/// Size of an EQE in bytes.
const EQE_SIZE: u64 = 64;
const OWNER_OFFSET: u64 = 63;
const TYPE: usize = 1;
const SUBTYPE: usize = 3;
const DATA: usize = 32;

/// Offset of the CQ number in the data of a completion event.
const COMPLETION_CQN: usize = 24;
/// Offsets in the data of queue pair and SRQ events.
const QP_SRQ_TYPE: usize = 20;
const QP_SRQ_NUMBER: usize = 24;

/// Offset in the data of DC target events.
const DCT_NUMBER: usize = 24;

/// An event queue.
#[derive(Debug)]
pub(crate) struct Eq {
    pub(crate) buffer: Buffer,
    pub(crate) log_size: u32,
    pub(crate) vector: u16,
    /// Mask by event type of the events other than completions that it receives.
    pub(crate) mask: [u64; 4],
    pub(crate) producer: u32,
    pub(crate) consumer: u32,
    pub(crate) armed: bool,
}

impl Eq {
    fn receives(&self, kind: u8) -> bool {
        self.mask[usize::from(kind >> 6)] & 1 << (kind & 63) != 0
    }
}

impl<P: Platform> Core<P> {
    /// Returns the event queue for events of a type.
    pub(crate) fn event_queue_for(&self, kind: u8) -> Option<u32> {
        self.eqs
            .iter()
            .find(|(_, eq)| eq.receives(kind))
            .map(|(number, _)| number)
    }

    /// Writes an EQE, and raises an interrupt if the queue is armed.
    pub(crate) fn post_event(&mut self, eqn: u32, kind: u8, subtype: u8, data: &[u8; 28]) {
        if self.faults.lose_event(kind, || self.platform.now()) {
            return;
        }
        let Some(eq) = self.eqs.get_mut(eqn) else {
            return;
        };
        let size = 1u32 << eq.log_size;
        if eq.producer.wrapping_sub(eq.consumer) & 0xff_ffff >= size {
            self.report_misuse(Misuse::EqOverrun { eqn, kind });
            return;
        }
        let mut bytes = [0; EQE_SIZE as usize - 1];
        bytes[TYPE] = kind;
        bytes[SUBTYPE] = subtype;
        bytes[DATA..DATA + data.len()].copy_from_slice(data);
        let owner = (eq.producer >> eq.log_size & 1) as u8;
        let at = u64::from(eq.producer & (size - 1)) * EQE_SIZE;
        let written = eq.buffer.entry(at, EQE_SIZE).and_then(|address| {
            self.platform.write(address, &bytes)?;
            self.platform.publish(address + OWNER_OFFSET, owner)
        });
        if written.is_err() {
            self.report_misuse(Misuse::Unmapped {
                what: "event queue",
                number: eqn,
            });
            return;
        }
        #[cfg(test)]
        crate::tests::events::record(kind);
        eq.producer = eq.producer.wrapping_add(1);
        self.stats.eqes += 1;
        if eq.armed {
            eq.armed = false;
            self.stats.interrupts += 1;
            let vector = eq.vector;
            self.platform.interrupt(vector);
        }
    }

    /// Handles an EQ doorbell: the consumer index, and whether an interrupt is
    /// requested for the next event.
    pub(crate) fn update_eq(&mut self, word: u32, arm: bool) {
        let eqn = word >> 24;
        let Some(eq) = self.eqs.get_mut(eqn) else {
            self.report_misuse(Misuse::NoQueue {
                what: "event queue",
                number: eqn,
                by: "a doorbell of",
            });
            return;
        };
        eq.consumer = word & 0xff_ffff;
        if !arm {
            return;
        }
        if eq.producer & 0xff_ffff != eq.consumer {
            // Events arrived since the driver last looked.
            eq.armed = false;
            self.stats.interrupts += 1;
            let vector = eq.vector;
            self.platform.interrupt(vector);
        } else {
            eq.armed = true;
        }
    }

    /// Posts an event for completed command slots.
    pub(crate) fn post_command_event(&mut self, slots: u32) {
        if let Some(eqn) = self.event_queue_for(event::COMMAND) {
            let mut data = [0; 28];
            put32(&mut data, 0, slots);
            self.post_event(eqn, event::COMMAND, 0, &data);
        }
    }

    /// Posts a completion event for a completion queue.
    pub(crate) fn post_completion_event(&mut self, eqn: u32, cqn: u32) {
        let mut data = [0; 28];
        put32(&mut data, COMPLETION_CQN, cqn);
        self.post_event(eqn, event::COMPLETION, 0, &data);
    }

    /// Posts an event of a queue pair (`resource` 0), receive queue (1), send queue (2)
    /// or SRQ (0; the event type distinguishes it).
    pub(crate) fn post_queue_event(&mut self, kind: u8, resource: u8, number: u32) {
        self.observe(|_| {
            Some(Cause::Event {
                kind,
                subtype: 0,
                number,
            })
        });
        if let Some(eqn) = self.event_queue_for(kind) {
            let mut data = [0; 28];
            data[QP_SRQ_TYPE] = resource;
            put32(&mut data, QP_SRQ_NUMBER, number);
            self.post_event(eqn, kind, 0, &data);
        }
    }

    /// Posts an event that a DC target is drained.
    pub(crate) fn post_dct_drained(&mut self, dctn: u32) {
        self.observe(|_| {
            Some(Cause::Event {
                kind: event::DCT_DRAINED,
                subtype: 0,
                number: dctn,
            })
        });
        if let Some(eqn) = self.event_queue_for(event::DCT_DRAINED) {
            let mut data = [0; 28];
            put32(&mut data, DCT_NUMBER, dctn);
            self.post_event(eqn, event::DCT_DRAINED, 0, &data);
        }
    }

    /// Posts an event that a completion queue is in error.
    pub(crate) fn post_cq_error(&mut self, cqn: u32, syndrome: u8) {
        self.observe(|_| {
            Some(Cause::Event {
                kind: event::CQ_ERROR,
                subtype: syndrome,
                number: cqn,
            })
        });
        if let Some(eqn) = self.event_queue_for(event::CQ_ERROR) {
            let mut data = [0; 28];
            put32(&mut data, 0, cqn);
            data[11] = syndrome;
            self.post_event(eqn, event::CQ_ERROR, 0, &data);
        }
    }

    /// Posts a port change event.
    pub(crate) fn post_port_change(&mut self, subtype: u8) {
        self.observe(|_| {
            Some(Cause::Event {
                kind: event::PORT_CHANGE,
                subtype,
                number: 1,
            })
        });
        if let Some(eqn) = self.event_queue_for(event::PORT_CHANGE) {
            let mut data = [0; 28];
            // The port number is in the high half of the byte.
            data[8] = 1 << 4;
            self.post_event(eqn, event::PORT_CHANGE, subtype, &data);
        }
    }
}
