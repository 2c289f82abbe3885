//! Doorbell records: how the engine detects work without being called.
//!
//! Every doorbell is preceded by an update of its record, so a changed record
//! is a doorbell. Two doorbells in one register could overwrite each other, two
//! records cannot; therefore the register is never read.

use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

/// Value of an arming record that the device has processed. No driver writes it
/// (three of its bits are never set).
const SEEN: u32 = u32::MAX;

/// A word in the process's memory, written by the process and read by the
/// device.
#[derive(Debug)]
struct Record(*const AtomicU32);

// SAFETY: the pointer is only used for atomic accesses to the word.
unsafe impl Send for Record {}

impl Record {
    fn load(&self) -> u32 {
        self.word().load(Ordering::Acquire)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the caller of `queue` or `arm` guarantees that the word is
        // valid until it is no longer watched.
        unsafe { &*self.0 }
    }
}

fn record(address: u64) -> Record {
    Record(ptr::with_exposed_provenance(address as usize))
}

/// Doorbell records of a queue pair.
#[derive(Debug)]
struct Queue {
    qpn: u32,
    send: (Record, u32),
    receive: (Record, u32),
}

/// Arming record of a completion queue.
#[derive(Debug)]
struct Arm {
    cqn: u32,
    record: Record,
}

/// A detected doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doorbell {
    /// Work was posted to the send queue of this queue pair.
    Send(u32),
    /// Work was posted to the receive queue of this queue pair.
    Receive(u32),
    /// This completion queue was armed, by that word.
    Arm(u32, u32),
}

/// The watched records.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    queues: Vec<Queue>,
    arms: Vec<Arm>,
}

impl Watch {
    /// Watches the records of a queue pair; the receive record is the first.
    ///
    /// # Safety
    /// `address` must be that of two aligned words that stay valid until they
    /// are no longer watched.
    pub(crate) unsafe fn queue(&mut self, qpn: u32, address: u64) {
        let (receive, send) = (record(address), record(address + 4));
        let (received, sent) = (receive.load(), send.load());
        self.queues.push(Queue {
            qpn,
            send: (send, sent),
            receive: (receive, received),
        });
    }

    /// Watches the arming record of a completion queue, the second of its two
    /// records.
    ///
    /// # Safety
    /// As for [`Watch::queue`].
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

    /// Returns whether no doorbell can occur.
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.arms.is_empty()
    }

    /// Calls `rung` for each changed record. Work that was posted before a
    /// completion queue was armed is reported before the arming.
    pub(crate) fn look(&mut self, mut rung: impl FnMut(Doorbell)) {
        for queue in &mut self.queues {
            let now = queue.send.0.load();
            if now != queue.send.1 {
                queue.send.1 = now;
                rung(Doorbell::Send(queue.qpn));
            }
            let now = queue.receive.0.load();
            if now != queue.receive.1 {
                queue.receive.1 = now;
                rung(Doorbell::Receive(queue.qpn));
            }
        }
        for arm in &self.arms {
            let now = arm.record.load();
            if now == SEEN {
                continue;
            }
            // Reset, so that writing the same value again is another arming. If
            // the word changes concurrently, the exchange fails and the next
            // call finds the new value.
            let word = arm.record.word();
            let _ = word.compare_exchange(now, SEEN, Ordering::Relaxed, Ordering::Relaxed);
            rung(Doorbell::Arm(arm.cqn, u32::from_be(now)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_changed_record_and_each_arming_is_a_doorbell() {
        let words: [AtomicU32; 4] = Default::default();
        let address = words.as_ptr().expose_provenance() as u64;
        let mut watch = Watch::default();
        // SAFETY: words of this test, which outlive the watch.
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
        // The first arming of a queue from which nothing was read is 0.
        words[3].store(0, Ordering::Release);
        assert_eq!(seen(&mut watch), [Doorbell::Send(5), Doorbell::Arm(6, 0)]);
        assert!(seen(&mut watch).is_empty());
        words[3].store(0, Ordering::Release);
        words[0].store(1, Ordering::Release);
        assert_eq!(
            seen(&mut watch),
            [Doorbell::Receive(5), Doorbell::Arm(6, 0)]
        );
        watch.forget_queue(5);
        watch.forget_arm(6);
        assert!(watch.is_empty());
    }
}
