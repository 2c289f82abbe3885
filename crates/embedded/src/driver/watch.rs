//! Polling of doorbell records, by which the engine detects work without being called.
//!
//! A driver updates the record before it rings the doorbell, so a changed record stands for
//! a doorbell. Two doorbells in one register can overwrite each other, but records are
//! separate; therefore registers are only a hint which of many records to read first.

use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ring::ReadOnlyMapping;

/// Value of an arming record that the device has processed. No driver writes it
/// (three of its bits are never set).
const PROCESSED: u32 = u32::MAX;

/// Number of queue pairs, in total and per UAR, above which registers are read first,
/// because reading all records takes longer.
const MAX_SCANNED: usize = 64;
const MAX_SCANNED_PER_UAR: usize = 8;
/// Number of scans in which each record is read once.
const PARTS: usize = 128;
/// Number of queues whose records are read without a pause for commands.
const PART_OF_MANY: usize = 512;

/// Offsets of the doorbell registers of a UAR: two registers of two halves each.
const REGISTERS: [usize; 4] = [0x800, 0x900, 0xa00, 0xb00];

/// The doorbell registers of a context. Each contains the first words of the last WQE, with
/// the number of its queue pair.
#[derive(Debug)]
struct Registers {
    context: u64,
    mapping: ReadOnlyMapping,
    uars: Vec<Uar>,
}

#[derive(Debug)]
struct Uar {
    /// Offset in the mapping.
    offset: usize,
    seen: [u64; REGISTERS.len()],
}

impl Registers {
    /// Calls `each` for the queue pair in each register that has changed.
    fn scan(&mut self, mut each: impl FnMut(u32)) {
        for uar in &mut self.uars {
            for (seen, register) in uar.seen.iter_mut().zip(REGISTERS) {
                let Some(pointer) = self.mapping.address(uar.offset + register, 8, 8) else {
                    return;
                };
                // SAFETY: an aligned word of the mapping.
                let word = unsafe { pointer.cast::<AtomicU64>().as_ref() };
                // Acquire: the record was written before.
                let value = word.load(Ordering::Acquire);
                if value != *seen {
                    *seen = value;
                    let [.., a, b, c, _] = value.to_ne_bytes();
                    each(u32::from_be_bytes([0, a, b, c]));
                }
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
        // SAFETY: the caller of `add_queue` or `add_arm` guarantees that the word is
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
    /// Calls `on_doorbell` for each changed record.
    fn scan(&mut self, mut on_doorbell: impl FnMut(Doorbell)) {
        let value = self.send.0.load();
        if value != self.send.1 {
            self.send.1 = value;
            on_doorbell(Doorbell::Send(self.qpn));
        }
        let value = self.receive.0.load();
        if value != self.receive.1 {
            self.receive.1 = value;
            on_doorbell(Doorbell::Receive(self.qpn));
        }
    }
}

/// The arming record of a completion queue.
#[derive(Debug)]
struct Arm {
    cqn: u32,
    record: Record,
}

impl Arm {
    /// Calls `on_doorbell` if the record has changed.
    fn scan(&self, mut on_doorbell: impl FnMut(Doorbell)) {
        let value = self.record.load();
        if value == PROCESSED {
            return;
        }
        // Reset, so that writing the same value again is detected. If the word changes
        // concurrently, the exchange fails and the next scan finds the new value.
        let word = self.record.word();
        let _ = word.compare_exchange(value, PROCESSED, Ordering::Relaxed, Ordering::Relaxed);
        on_doorbell(Doorbell::Arm(self.cqn, u32::from_be(value)));
    }
}

/// A detected doorbell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Doorbell {
    /// Work was posted to the send queue of this queue pair.
    Send(u32),
    /// Work was posted to the receive queue of this queue pair.
    Receive(u32),
    /// This completion queue was armed, with this word.
    Arm(u32, u32),
}

/// Something with a number.
trait Numbered {
    fn number(&self) -> u32;
}

impl Numbered for Queue {
    fn number(&self) -> u32 {
        self.qpn
    }
}

impl Numbered for Arm {
    fn number(&self) -> u32 {
        self.cqn
    }
}

/// Values in a row, also found by number. Adding and removing do not depend on how many there
/// are.
#[derive(Debug)]
struct Row<T> {
    values: Vec<T>,
    /// Index of each number.
    places: HashMap<u32, usize>,
}

impl<T> Default for Row<T> {
    fn default() -> Self {
        Self {
            values: Vec::new(),
            places: HashMap::new(),
        }
    }
}

impl<T: Numbered> Row<T> {
    fn add(&mut self, value: T) {
        self.places.insert(value.number(), self.values.len());
        self.values.push(value);
    }

    fn remove(&mut self, number: u32) {
        if let Some(at) = self.places.remove(&number) {
            self.values.swap_remove(at);
            if let Some(moved) = self.values.get(at) {
                self.places.insert(moved.number(), at);
            }
        }
    }

    fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.values.get_mut(*self.places.get(&number)?)
    }

    /// Returns one of several parts.
    fn part(&mut self, part: usize, parts: usize) -> &mut [T] {
        let at = |part: usize| self.values.len() * part / parts;
        let range = at(part)..at(part + 1);
        &mut self.values[range]
    }
}

/// The watched records.
#[derive(Debug, Default)]
pub(crate) struct DoorbellWatch {
    queues: Row<Queue>,
    arms: Row<Arm>,
    registers: Vec<Registers>,
    /// Number of the part that is read next.
    part: usize,
}

impl DoorbellWatch {
    /// Watches the records of a queue pair; the receive record is the first.
    ///
    /// # Safety
    /// `address` must be that of two aligned words that stay valid until they
    /// are no longer watched.
    pub(crate) unsafe fn add_queue(&mut self, qpn: u32, address: u64) {
        let (receive, send) = (record(address), record(address + 4));
        let (received, sent) = (receive.load(), send.load());
        let queue = Queue {
            qpn,
            send: (send, sent),
            receive: (receive, received),
        };
        self.queues.add(queue);
    }

    /// Watches the arming record of a completion queue, the second of its two
    /// records.
    ///
    /// # Safety
    /// As for [`DoorbellWatch::add_queue`].
    pub(crate) unsafe fn add_arm(&mut self, cqn: u32, address: u64) {
        let record = record(address + 4);
        record.word().store(PROCESSED, Ordering::Relaxed);
        self.arms.add(Arm { cqn, record });
    }

    /// Adds a context, whose UARs are in the mapping.
    pub(crate) fn add_context(&mut self, context: u64, registers: ReadOnlyMapping) {
        self.registers.push(Registers {
            context,
            mapping: registers,
            uars: Vec::new(),
        });
    }

    /// Adds the doorbell registers of a UAR at an offset of its context's mapping.
    pub(crate) fn add_uar(&mut self, context: u64, offset: usize) {
        let seen = [0; REGISTERS.len()];
        if let Some(registers) = self.registers.iter_mut().find(|it| it.context == context) {
            registers.uars.push(Uar { offset, seen });
        }
    }

    pub(crate) fn remove_uar(&mut self, context: u64, offset: usize) {
        if let Some(registers) = self.registers.iter_mut().find(|it| it.context == context) {
            registers.uars.retain(|uar| uar.offset != offset);
        }
    }

    pub(crate) fn remove_context(&mut self, context: u64) {
        self.registers
            .retain(|registers| registers.context != context);
    }

    /// Sets the send record of a queue that was reset to 0. Drivers count from 0 again,
    /// but not all reset the record; the same value as before would be no change.
    pub(crate) fn reset_sends(&mut self, qpn: u32) {
        if let Some(queue) = self.queues.get_mut(qpn) {
            let (record, seen) = &mut queue.send;
            record.word().store(0, Ordering::Relaxed);
            *seen = 0;
        }
    }

    pub(crate) fn remove_queue(&mut self, qpn: u32) {
        self.queues.remove(qpn);
    }

    pub(crate) fn remove_arm(&mut self, cqn: u32) {
        self.arms.remove(cqn);
    }

    /// Returns whether no doorbell can occur.
    pub(crate) fn is_empty(&self) -> bool {
        self.queues.values.is_empty() && self.arms.values.is_empty()
    }

    /// Returns whether reading all records takes longer than reading registers.
    pub(crate) fn is_large(&self) -> bool {
        let uars: usize = self.registers.iter().map(|it| it.uars.len()).sum();
        uars != 0 && self.queues.values.len() > MAX_SCANNED.max(MAX_SCANNED_PER_UAR * uars)
    }

    /// Calls `on_doorbell` for each changed record. Work posted before a completion queue was
    /// armed is reported before the arming.
    pub(crate) fn scan_all(&mut self, on_doorbell: &mut dyn FnMut(Doorbell)) {
        for queue in &mut self.queues.values {
            queue.scan(&mut *on_doorbell);
        }
        self.scan_arms(on_doorbell);
    }

    /// Calls `on_doorbell` for each request for notification.
    pub(crate) fn scan_arms(&mut self, on_doorbell: &mut dyn FnMut(Doorbell)) {
        for arm in &self.arms.values {
            arm.scan(&mut *on_doorbell);
        }
    }

    /// Returns the number of parts in which to read all records, so that commands need not
    /// wait for the others.
    pub(crate) fn parts(&self) -> usize {
        let longest = self.queues.values.len().max(self.arms.values.len());
        longest.div_ceil(PART_OF_MANY)
    }

    /// Scans one of several parts of all records.
    pub(crate) fn scan_part(
        &mut self,
        part: usize,
        parts: usize,
        on_doorbell: &mut dyn FnMut(Doorbell),
    ) {
        for queue in self.queues.part(part, parts) {
            queue.scan(&mut *on_doorbell);
        }
        for arm in self.arms.part(part, parts) {
            arm.scan(&mut *on_doorbell);
        }
    }

    /// Scans the records of a queue pair that is about to end, and of those that registers
    /// hint at: their requests may be for it.
    pub(crate) fn scan_ending(&mut self, qpn: u32, on_doorbell: &mut dyn FnMut(Doorbell)) {
        self.scan_by_registers(on_doorbell);
        if let Some(queue) = self.queues.get_mut(qpn) {
            queue.scan(on_doorbell);
        }
    }

    /// Scans the records that registers hint at, and a part of the others.
    pub(crate) fn scan_hinted(&mut self, on_doorbell: &mut dyn FnMut(Doorbell)) {
        self.scan_by_registers(on_doorbell);
        self.scan_next_part(on_doorbell);
    }

    /// Scans the next part of the records.
    fn scan_next_part(&mut self, on_doorbell: &mut dyn FnMut(Doorbell)) {
        self.scan_part(self.part, PARTS, on_doorbell);
        self.part = (self.part + 1) % PARTS;
    }

    /// Scans the records of the queue pairs that registers name.
    fn scan_by_registers(&mut self, on_doorbell: &mut dyn FnMut(Doorbell)) {
        let Self {
            queues, registers, ..
        } = self;
        for registers in registers {
            registers.scan(|qpn| {
                if let Some(queue) = queues.get_mut(qpn) {
                    queue.scan(&mut *on_doorbell);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::uio::pwrite;
    use nix::unistd::ftruncate;

    use super::*;
    use crate::driver::files::{UAR, UARS};

    #[test]
    fn each_changed_record_and_each_arming_is_a_doorbell() {
        let words: [AtomicU32; 4] = Default::default();
        let address = words.as_ptr().expose_provenance() as u64;
        let mut watch = DoorbellWatch::default();
        // SAFETY: words of this test, which outlive the watch.
        unsafe {
            watch.add_queue(5, address);
            watch.add_arm(6, address + 8);
        }
        let seen = |watch: &mut DoorbellWatch| {
            let mut all = Vec::new();
            watch.scan_all(&mut |doorbell| all.push(doorbell));
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
        watch.remove_queue(5);
        watch.remove_arm(6);
        assert!(watch.is_empty());
    }

    /// With many queue pairs, records that registers hint at are read first, and the others
    /// within a bounded number of scans.
    #[test]
    fn doorbells_of_many_queue_pairs_are_found() {
        const LENGTH: usize = 3 * MAX_SCANNED_PER_UAR * UARS as usize;
        let file = memfd_create(c"registers", MFdFlags::empty()).unwrap();
        ftruncate(&file, UARS as i64 * UAR as i64).unwrap();
        let map = || ReadOnlyMapping::new(file.as_fd(), 0, UARS as usize * UAR).unwrap();
        let words: Vec<AtomicU64> = (0..LENGTH).map(|_| AtomicU64::new(0)).collect();
        let arm = AtomicU64::new(0);
        let mut watch = DoorbellWatch::default();
        watch.add_context(1, map());
        watch.add_context(2, map());
        for context in [1, 2] {
            for uar in 0..UARS as usize {
                watch.add_uar(context, uar * UAR);
            }
        }
        // SAFETY: words of this test, which outlive the watch.
        unsafe {
            for (n, word) in words.iter().enumerate().rev() {
                let qpn = 0x12_3400 + n as u32;
                watch.add_queue(qpn, word.as_ptr().expose_provenance() as u64);
            }
            watch.add_arm(7, arm.as_ptr().expose_provenance() as u64);
        }
        let posted = |n: usize| {
            // The second word, in memory.
            words[n].fetch_add(1 << 32, Ordering::Release);
        };
        let ring = |qpn: u32, at: usize, index: u8| {
            let [_, a, b, c] = qpn.to_be_bytes();
            pwrite(&file, &[0, 0, index, 8, a, b, c, 2], at as i64).unwrap();
        };
        let hinted = |watch: &mut DoorbellWatch| {
            let mut all = Vec::new();
            watch.scan_hinted(&mut |doorbell| all.push(doorbell));
            all
        };
        let seen = |watch: &mut DoorbellWatch| {
            let mut all = Vec::new();
            watch.scan_all(&mut |doorbell| all.push(doorbell));
            all
        };
        assert!(watch.is_large());
        assert!(seen(&mut watch).is_empty());
        // A register of the last UAR shows one of two, and another one names none.
        posted(3);
        posted(100);
        ring(0x12_3400 + 100, 7 * UAR + 0xb00, 1);
        ring(0xff_ffff, UAR + 0x800, 1);
        arm.store(0, Ordering::Release);
        assert_eq!(hinted(&mut watch), [Doorbell::Send(0x12_3400 + 100)]);
        let rest = [Doorbell::Send(0x12_3403), Doorbell::Arm(7, 0)];
        assert_eq!(seen(&mut watch), rest);
        // Records that no register names are read within PARTS scans.
        let last = LENGTH - 1;
        for n in [0, 5, last] {
            posted(n);
        }
        arm.store(0, Ordering::Release);
        let mut found = Vec::new();
        for scans in 0..PARTS {
            posted(100);
            ring(0x12_3400 + 100, 0x900, scans as u8);
            let new = hinted(&mut watch);
            assert!(new.contains(&Doorbell::Send(0x12_3400 + 100)));
            found.extend(new);
        }
        for n in [0, 5, last] {
            assert!(found.contains(&Doorbell::Send(0x12_3400 + n as u32)), "{n}");
        }
        assert!(found.contains(&Doorbell::Arm(7, 0)));
        // Removed registers give no hints.
        watch.remove_uar(1, UAR);
        watch.remove_context(2);
        assert!(watch.is_large());
        posted(7);
        ring(0x12_3407, UAR + 0x900, 2);
        posted(8);
        ring(0x12_3408, 2 * UAR + 0x900, 2);
        let found = hinted(&mut watch);
        assert!(!found.contains(&Doorbell::Send(0x12_3407)), "{found:?}");
        assert!(found.contains(&Doorbell::Send(0x12_3408)), "{found:?}");
        watch.remove_context(1);
        assert!(!watch.is_large());
        posted(9);
        let rest = [Doorbell::Send(0x12_3409), Doorbell::Send(0x12_3407)];
        assert_eq!(seen(&mut watch), rest);
    }
}
