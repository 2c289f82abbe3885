//! The doorbell records: how the engine learns of work without being called.
//!
//! Every doorbell is preceded by its record, so a record that has moved is a
//! doorbell. Two doorbells in one register can hide each other, two records
//! cannot; and the register is never looked at.

use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// What an arming record holds once the device has seen it: no driver writes
/// this (three of its bits are never set).
const SEEN: u32 = u32::MAX;

/// A word of the process's memory that it writes and the device reads.
#[derive(Debug)]
struct Record(*const AtomicU32);

// SAFETY: it leads to an atomic word and nothing else.
unsafe impl Send for Record {}

impl Record {
    fn load(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: valid until it is no longer watched, by the contract of
        // whoever watches it.
        unsafe { &*self.0 }
    }
}

fn record(address: u64) -> Record {
    Record(ptr::with_exposed_provenance(address as usize))
}

/// A queue pair's records.
#[derive(Debug)]
struct Queue {
    qpn: u32,
    send: (Record, u32),
    receive: (Record, u32),
}

/// A completion queue's arming record.
#[derive(Debug)]
struct Arm {
    cqn: u32,
    record: Record,
}

/// What a record says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rung {
    /// Something was posted to this queue pair's send queue.
    Send(u32),
    /// Or to its receive queue.
    Receive(u32),
    /// This completion queue was armed, by that word.
    Arm(u32, u32),
}

/// All records.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    queues: Vec<Queue>,
    arms: Vec<Arm>,
}

impl Watch {
    /// Watches the records of a queue pair, first that of receives.
    ///
    /// # Safety
    /// Two aligned words, valid until they are no longer watched.
    pub(crate) unsafe fn queue(&mut self, qpn: u32, address: u64) {
        let (receive, send) = (record(address), record(address + 4));
        let (received, sent) = (receive.load(), send.load());
        self.queues.push(Queue {
            qpn,
            send: (send, sent),
            receive: (receive, received),
        });
    }

    /// Watches the arming record of a completion queue, the second of its
    /// two.
    ///
    /// # Safety
    /// As of [`Watch::queue`].
    pub(crate) unsafe fn arm(&mut self, cqn: u32, address: u64) {
        let record = record(address + 4);
        record.word().store(SEEN, Ordering::Relaxed);
        self.arms.push(Arm { cqn, record });
    }

    pub(crate) fn forget_queue(&mut self, qpn: u32) {
        self.queues.retain(|queue| queue.qpn != qpn);
    }

    pub(crate) fn forget_arm(&mut self, cqn: u32) {
        self.arms.retain(|arm| arm.cqn != cqn);
    }

    /// Whether nothing can come.
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.arms.is_empty()
    }

    /// Calls `rung` for each record that has moved. Work that was posted
    /// before it was armed comes before that.
    pub(crate) fn look(&mut self, mut rung: impl FnMut(Rung)) {
        for queue in &mut self.queues {
            let now = queue.send.0.load();
            if now != queue.send.1 {
                queue.send.1 = now;
                rung(Rung::Send(queue.qpn));
            }
            let now = queue.receive.0.load();
            if now != queue.receive.1 {
                queue.receive.1 = now;
                rung(Rung::Receive(queue.qpn));
            }
        }
        for arm in &self.arms {
            let now = arm.record.load();
            if now == SEEN {
                continue;
            }
            // Taken, so that the same word is another arming. If it is being
            // written again, that one is found next time.
            let word = arm.record.word();
            let _ = word.compare_exchange(now, SEEN, Ordering::Relaxed, Ordering::Relaxed);
            rung(Rung::Arm(arm.cqn, u32::from_be(now)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_moves_is_a_doorbell_and_every_arming_is_one() {
        let words: [AtomicU32; 4] = Default::default();
        let address = words.as_ptr().expose_provenance() as u64;
        let mut watch = Watch::default();
        // SAFETY: words of this test, longer alive than the watch.
        unsafe {
            watch.queue(5, address);
            watch.arm(6, address + 8);
        }
        let seen = |watch: &mut Watch| {
            let mut all = Vec::new();
            watch.look(|rung| all.push(rung));
            all
        };
        assert!(seen(&mut watch).is_empty());
        words[1].store(1, Ordering::Release);
        // The first arming of a queue that nothing was read from is 0.
        words[3].store(0, Ordering::Release);
        assert_eq!(seen(&mut watch), [Rung::Send(5), Rung::Arm(6, 0)]);
        assert!(seen(&mut watch).is_empty());
        words[3].store(0, Ordering::Release);
        words[0].store(1, Ordering::Release);
        assert_eq!(seen(&mut watch), [Rung::Receive(5), Rung::Arm(6, 0)]);
        watch.forget_queue(5);
        watch.forget_arm(6);
        assert!(watch.is_empty());
    }
}
