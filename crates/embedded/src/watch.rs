//! Doorbell records: how the engine detects work without being called.
//!
//! Every doorbell is preceded by an update of its record, so a changed record
//! is a doorbell. Two doorbells in one register can overwrite each other, two
//! records cannot; therefore a register is only a hint where to look first, if
//! there are many records.

use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ring::ReadOnlyMapping;

use crate::files::{UAR, UARS};

/// Value of an arming record that the device has processed. No driver writes it
/// (three of its bits are never set).
const SEEN: u32 = u32::MAX;

/// Number of queue pairs for each context beyond which registers are read: their records
/// then take more time.
const MANY: usize = 64;
/// Number of times that only the records found by registers are read.
const MOST_HINTED: u32 = 32;

/// Where the doorbell registers of a UAR are: two halves of each of two.
const REGISTERS: [usize; 4] = [0x800, 0x900, 0xa00, 0xb00];

/// The doorbell registers of a context. The first words of the last WQE are there, with
/// the number of its queue pair.
#[derive(Debug)]
struct Registers {
    context: u64,
    mapping: ReadOnlyMapping,
    seen: [u64; UARS as usize * REGISTERS.len()],
}

impl Registers {
    /// Calls `each` for the queue pair in each register that has changed.
    fn look(&mut self, mut each: impl FnMut(u32)) {
        for (n, seen) in self.seen.iter_mut().enumerate() {
            let at = n / REGISTERS.len() * UAR + REGISTERS[n % REGISTERS.len()];
            let Some(place) = self.mapping.address(at, 8, 8) else {
                return;
            };
            // SAFETY: an aligned word of the mapping.
            let word = unsafe { place.cast::<AtomicU64>().as_ref() };
            // Acquire: the record was written before.
            let now = word.load(Ordering::Acquire);
            if now != *seen {
                *seen = now;
                let [.., a, b, c, _] = now.to_ne_bytes();
                each(u32::from_be_bytes([0, a, b, c]));
            }
        }
    }
}

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

impl Queue {
    /// Calls `rung` for each changed record.
    fn look(&mut self, mut rung: impl FnMut(Doorbell)) {
        let now = self.send.0.load();
        if now != self.send.1 {
            self.send.1 = now;
            rung(Doorbell::Send(self.qpn));
        }
        let now = self.receive.0.load();
        if now != self.receive.1 {
            self.receive.1 = now;
            rung(Doorbell::Receive(self.qpn));
        }
    }
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
    /// By number.
    queues: Vec<Queue>,
    arms: Vec<Arm>,
    registers: Vec<Registers>,
    /// Number of times that only records found by registers were read.
    hinted: u32,
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
        let queue = Queue {
            qpn,
            send: (send, sent),
            receive: (receive, received),
        };
        let place = self.queues.partition_point(|queue| queue.qpn < qpn);
        self.queues.insert(place, queue);
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

    /// Adds the doorbell registers of a context.
    pub(crate) fn context(&mut self, context: u64, registers: ReadOnlyMapping) {
        self.registers.push(Registers {
            context,
            mapping: registers,
            seen: Default::default(),
        });
    }

    pub(crate) fn forget_context(&mut self, context: u64) {
        self.registers
            .retain(|registers| registers.context != context);
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

    /// Lets the next [`Watch::look`] read all records.
    pub(crate) fn look_everywhere(&mut self) {
        self.hinted = MOST_HINTED;
    }

    /// Calls `rung` for each changed record. Work that was posted before a
    /// completion queue was armed is reported before the arming. If there are many
    /// records, some may be left for a later call.
    pub(crate) fn look(&mut self, mut rung: impl FnMut(Doorbell)) {
        if self.queues.len() > MANY * self.registers.len() && self.hinted < MOST_HINTED {
            self.hinted += 1;
            if self.look_by_registers(&mut rung) {
                return;
            }
        }
        self.hinted = 0;
        for queue in &mut self.queues {
            queue.look(&mut rung);
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

    /// Reads the records of the queue pairs that registers name. Returns whether one had
    /// changed.
    fn look_by_registers(&mut self, mut rung: impl FnMut(Doorbell)) -> bool {
        let Self {
            queues, registers, ..
        } = self;
        let mut found = false;
        for registers in registers {
            registers.look(|qpn| {
                if let Ok(place) = queues.binary_search_by_key(&qpn, |queue| queue.qpn) {
                    queues[place].look(|doorbell| {
                        found = true;
                        rung(doorbell);
                    });
                }
            });
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::uio::pwrite;
    use nix::unistd::ftruncate;

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

    /// With many queue pairs, registers show where to look first, and what they do not
    /// show is found soon.
    #[test]
    fn doorbells_of_many_queue_pairs_are_found() {
        let file = memfd_create(c"registers", MFdFlags::empty()).unwrap();
        ftruncate(&file, UARS as i64 * UAR as i64).unwrap();
        let map = || ReadOnlyMapping::new(file.as_fd(), 0, UARS as usize * UAR).unwrap();
        let words: Vec<AtomicU64> = (0..3 * MANY).map(|_| AtomicU64::new(0)).collect();
        let arm = AtomicU64::new(0);
        let mut watch = Watch::default();
        watch.context(1, map());
        watch.context(2, map());
        // SAFETY: words of this test, which outlive the watch.
        unsafe {
            for (n, word) in words.iter().enumerate().rev() {
                let qpn = 0x12_3400 + n as u32;
                watch.queue(qpn, word.as_ptr().expose_provenance() as u64);
            }
            watch.arm(7, arm.as_ptr().expose_provenance() as u64);
        }
        let posted = |n: usize| {
            // The second word, in memory.
            words[n].fetch_add(1 << 32, Ordering::Release);
        };
        let rung = |qpn: u32, at: usize, index: u8| {
            let [_, a, b, c] = qpn.to_be_bytes();
            pwrite(&file, &[0, 0, index, 8, a, b, c, 2], at as i64).unwrap();
        };
        let seen = |watch: &mut Watch| {
            let mut all = Vec::new();
            watch.look(|rung| all.push(rung));
            all
        };
        assert!(seen(&mut watch).is_empty());
        // A register of the last UAR shows one of two, and another one names none.
        posted(3);
        posted(100);
        rung(0x12_3400 + 100, 7 * UAR + 0xb00, 1);
        rung(0xff_ffff, UAR + 0x800, 1);
        arm.store(0, Ordering::Release);
        assert_eq!(seen(&mut watch), [Doorbell::Send(0x12_3400 + 100)]);
        let rest = [Doorbell::Send(0x12_3403), Doorbell::Arm(7, 0)];
        assert_eq!(seen(&mut watch), rest);
        // Records that no register names are read after at most MOST_HINTED looks.
        posted(5);
        let mut looks = 0;
        loop {
            posted(100);
            rung(0x12_3400 + 100, 0x900, looks);
            let found = seen(&mut watch);
            looks += 1;
            assert!(found.contains(&Doorbell::Send(0x12_3400 + 100)));
            if found.contains(&Doorbell::Send(0x12_3405)) {
                break;
            }
        }
        assert!(u32::from(looks) <= MOST_HINTED + 1);
        // Nor at all, before a queue pair goes.
        posted(6);
        posted(100);
        rung(0x12_3400 + 100, 0x900, looks);
        watch.look_everywhere();
        assert!(seen(&mut watch).contains(&Doorbell::Send(0x12_3406)));
        watch.forget_context(1);
        watch.forget_context(2);
        posted(9);
        assert_eq!(seen(&mut watch), [Doorbell::Send(0x12_3409)]);
    }
}
