//! Decoding of a copy of a queue's mapping.
//!
//! For tools that read another process's queues while the driver and the process continue.
//! Mapped memory is not accessed, and any bytes are accepted: malformed input is `None`; a
//! half written entry is shown as copied.
//!
//! A mapping does not contain the kind of the queue; [`Kind::of`] guesses it from the
//! entries.

use std::mem::offset_of;

use crate::abi::{AtomicWr, DmaInfo, RdmaWr, RecvWqe, SendWqe, UdWr};
use crate::{Opcode, SendFlags, Sge, WorkCompletion};

/// Bytes before the first entry.
pub const HEADER: usize = size_of::<ring::Header>();

/// Offsets of the header's fields (`struct rxe_queue_buf`).
mod header {
    pub const LOG2_STRIDE: usize = 0;
    pub const MASK: usize = 4;
    pub const PRODUCER: usize = 128;
    pub const CONSUMER: usize = 256;
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_ne_bytes(bytes.try_into().ok()?))
}

/// A snapshot of a queue's geometry and indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Bytes from one entry to the next: a power of two, 64 at least.
    pub stride: usize,
    /// Slots less one: the capacity of the queue.
    pub capacity: u32,
    /// The slot that is written next.
    pub producer: u32,
    /// The slot that is read next.
    pub consumer: u32,
}

impl Snapshot {
    /// Reads a header. `mapped` is the length of the whole mapping, which all
    /// slots must lie in. Indices are masked.
    pub fn read(bytes: &[u8], mapped: usize) -> Option<Self> {
        let log2_stride = word(bytes, header::LOG2_STRIDE)?;
        let mask = word(bytes, header::MASK)?;
        // A cache line at least; an entry of 64 KiB would hold 4000 elements.
        if !(6..=16).contains(&log2_stride) || !mask.wrapping_add(1).is_power_of_two() {
            return None;
        }
        let slots = usize::try_from(mask).ok()?.checked_add(1)?;
        let end = slots.checked_shl(log2_stride)?.checked_add(HEADER)?;
        if slots >> (usize::BITS - log2_stride) != 0 || end > mapped {
            return None;
        }
        Some(Self {
            stride: 1 << log2_stride,
            capacity: mask,
            producer: word(bytes, header::PRODUCER)? & mask,
            consumer: word(bytes, header::CONSUMER)? & mask,
        })
    }

    /// Entries that are produced and not consumed.
    pub fn pending(&self) -> u32 {
        self.producer.wrapping_sub(self.consumer) & self.capacity
    }

    /// The slot `back` before the one that is written next.
    pub fn before(&self, back: u32) -> u32 {
        self.producer.wrapping_sub(back) & self.capacity
    }

    /// Whether a slot is produced and not consumed.
    pub fn is_pending(&self, slot: u32) -> bool {
        (slot.wrapping_sub(self.consumer) & self.capacity) < self.pending()
    }

    /// Offset of a slot's entry in the mapping.
    pub fn offset(&self, slot: u32) -> usize {
        HEADER + (slot & self.capacity) as usize * self.stride
    }
}

/// The kind of queue of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A completion queue.
    Completion,
    /// The send queue of a queue pair.
    Send,
    /// A receive queue, of a queue pair or shared.
    Receive,
}

impl Kind {
    /// Decides by the entries. `None` if nothing was written yet, or if they
    /// could be of more than one kind.
    pub fn of<'a>(entries: impl IntoIterator<Item = &'a [u8]>) -> Option<Self> {
        let kinds = [Self::Completion, Self::Send, Self::Receive];
        let mut votes = [0usize; 3];
        for entry in entries {
            if entry.iter().all(|byte| *byte == 0) {
                continue;
            }
            let fits = [
                Completion::read(entry).is_some_and(|entry| entry.is_plausible()),
                SendEntry::read(entry).is_some_and(|entry| entry.is_plausible()),
                ReceiveEntry::read(entry).is_some_and(|entry| entry.is_plausible()),
            ];
            for (votes, fits) in votes.iter_mut().zip(fits) {
                *votes += usize::from(fits);
            }
        }
        let best = *votes.iter().max()?;
        let mut winners = kinds
            .into_iter()
            .zip(votes)
            .filter(|(_, votes)| *votes == best);
        let (winner, votes) = winners.next()?;
        (votes > 0 && winners.next().is_none()).then_some(winner)
    }
}

/// An entry of a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion(pub WorkCompletion);

impl Completion {
    /// Reads an entry. Fields that only datagrams have are read as they are.
    pub fn read(entry: &[u8]) -> Option<Self> {
        entry.get(..size_of::<WorkCompletion>())?;
        let byte = |at: usize| entry.get(at).copied();
        let half = |at: usize| Some(u16::from_ne_bytes([byte(at)?, byte(at + 1)?]));
        Some(Self(WorkCompletion {
            wr_id: long(entry, offset_of!(WorkCompletion, wr_id))?,
            status: word(entry, offset_of!(WorkCompletion, status))?,
            opcode: word(entry, offset_of!(WorkCompletion, opcode))?,
            vendor_err: word(entry, offset_of!(WorkCompletion, vendor_err))?,
            byte_len: word(entry, offset_of!(WorkCompletion, byte_len))?,
            ex: word(entry, offset_of!(WorkCompletion, ex))?,
            qp_num: word(entry, offset_of!(WorkCompletion, qp_num))?,
            src_qp: word(entry, offset_of!(WorkCompletion, src_qp))?,
            wc_flags: word(entry, offset_of!(WorkCompletion, wc_flags))?,
            pkey_index: half(offset_of!(WorkCompletion, pkey_index))?,
            slid: half(offset_of!(WorkCompletion, slid))?,
            sl: byte(offset_of!(WorkCompletion, sl))?,
            dlid_path_bits: byte(offset_of!(WorkCompletion, dlid_path_bits))?,
            ..WorkCompletion::default()
        }))
    }

    /// Existing statuses and opcodes; rxe sets no vendor error, and queue pairs
    /// of programs have numbers of 16 or more.
    fn is_plausible(&self) -> bool {
        let Self(wc) = self;
        wc.status <= 23
            && matches!(wc.opcode, 0..=9 | 128..=130)
            && wc.vendor_err == 0
            && (16..1 << 24).contains(&wc.qp_num)
    }
}

/// The operands of an entry of a send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remote {
    /// None, or not decoded.
    None,
    /// Of a write, a read or an atomic.
    Memory {
        /// Remote address.
        addr: u64,
        /// Remote key.
        rkey: u32,
    },
    /// Of a datagram. Connected queue pairs have zeros here.
    Datagram {
        /// Queue pair number.
        qpn: u32,
        /// Number of the address handle.
        ah: u32,
    },
}

/// An entry of a send queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendEntry {
    /// The work request's identifier.
    pub wr_id: u64,
    /// The opcode.
    pub opcode: Opcode,
    /// Its flags.
    pub flags: SendFlags,
    /// Immediate data (big-endian) or the key to invalidate.
    pub ex: u32,
    /// The operands.
    pub remote: Remote,
    /// The driver's: a work completion status.
    pub status: u32,
    /// The driver's: state ([`SendEntry::state_name`]).
    pub state: u32,
    /// The driver's: first packet sequence number.
    pub first_psn: u32,
    /// The driver's: last packet sequence number.
    pub last_psn: u32,
    /// Its data.
    pub data: Data,
}

/// The data of a work request, and the driver's progress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Data {
    /// Bytes.
    pub length: u32,
    /// Bytes that are left.
    pub resid: u32,
    /// The driver's current element.
    pub cur_sge: u32,
    /// Scatter/gather elements, as the entry has it.
    pub num_sge: u32,
    /// The elements, as many as the entry has room for; none if inline.
    pub list: Vec<Sge>,
}

impl Data {
    /// Reads the data that begins with `struct rxe_dma_info` at `at`.
    fn read(entry: &[u8], at: usize, inline: bool) -> Option<Self> {
        let num_sge = word(entry, at + offset_of!(DmaInfo, num_sge))?;
        let elements = entry.get(at + size_of::<DmaInfo>()..)?;
        let wanted = if inline { 0 } else { num_sge as usize };
        let list = elements.chunks_exact(size_of::<Sge>()).take(wanted);
        let list = list.map_while(|sge| {
            Some(Sge {
                addr: long(sge, offset_of!(Sge, addr))?,
                length: word(sge, offset_of!(Sge, length))?,
                lkey: word(sge, offset_of!(Sge, lkey))?,
            })
        });
        Some(Self {
            length: word(entry, at + offset_of!(DmaInfo, length))?,
            resid: word(entry, at + offset_of!(DmaInfo, resid))?,
            cur_sge: word(entry, at + offset_of!(DmaInfo, cur_sge))?,
            num_sge,
            list: list.collect(),
        })
    }

    fn is_plausible(&self) -> bool {
        let total: u64 = self.list.iter().map(|sge| u64::from(sge.length)).sum();
        self.resid <= self.length
            && self.cur_sge <= self.num_sge
            && self.list.len() == self.num_sge as usize
            && total == u64::from(self.length)
    }
}

impl SendEntry {
    /// Reads an entry.
    pub fn read(entry: &[u8]) -> Option<Self> {
        const WR: usize = offset_of!(SendWqe, wr.wr);
        entry.get(..size_of::<SendWqe>())?;
        let opcode = Opcode(word(entry, offset_of!(SendWqe, wr.opcode))?);
        let flags = SendFlags::from_bits_retain(word(entry, offset_of!(SendWqe, wr.send_flags))?);
        let remote = match opcode {
            Opcode::RDMA_WRITE
            | Opcode::RDMA_WRITE_WITH_IMM
            | Opcode::RDMA_READ
            | Opcode::ATOMIC_WRITE => Remote::Memory {
                addr: long(entry, WR + offset_of!(RdmaWr, remote_addr))?,
                rkey: word(entry, WR + offset_of!(RdmaWr, rkey))?,
            },
            Opcode::ATOMIC_CMP_AND_SWP | Opcode::ATOMIC_FETCH_AND_ADD => Remote::Memory {
                addr: long(entry, WR + offset_of!(AtomicWr, remote_addr))?,
                rkey: word(entry, WR + offset_of!(AtomicWr, rkey))?,
            },
            Opcode::SEND | Opcode::SEND_WITH_IMM => Remote::Datagram {
                qpn: word(entry, WR + offset_of!(UdWr, remote_qpn))?,
                ah: word(entry, WR + offset_of!(UdWr, ah_num))?,
            },
            _ => Remote::None,
        };
        let inline = flags.contains(SendFlags::INLINE);
        Some(Self {
            wr_id: long(entry, offset_of!(SendWqe, wr.wr_id))?,
            opcode,
            flags,
            ex: word(entry, offset_of!(SendWqe, wr.ex))?,
            remote,
            status: word(entry, offset_of!(SendWqe, status))?,
            state: word(entry, offset_of!(SendWqe, state))?,
            first_psn: word(entry, offset_of!(SendWqe, first_psn))?,
            last_psn: word(entry, offset_of!(SendWqe, last_psn))?,
            data: Data::read(entry, offset_of!(SendWqe, dma), inline)?,
        })
    }

    /// Name of the driver's state (`enum wqe_state`).
    pub fn state_name(&self) -> Option<&'static str> {
        let names = ["posted", "processing", "pending", "done", "error"];
        names.get(usize::try_from(self.state).ok()?).copied()
    }

    fn is_plausible(&self) -> bool {
        let inline = self.flags.contains(SendFlags::INLINE);
        // Operations without data do not write the list.
        let plain = matches!(self.opcode.0, 0..=6 | 9);
        matches!(self.opcode.0, 0..=15)
            && self.flags.bits() < 64
            && self.state <= 4
            && self.status <= 23
            && (inline || !plain || self.data.is_plausible())
    }
}

/// An entry of a receive queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReceiveEntry {
    /// The work request's identifier.
    pub wr_id: u64,
    /// Its data.
    pub data: Data,
    /// Whether reserved fields are zero.
    reserved: bool,
}

impl ReceiveEntry {
    /// Reads an entry.
    pub fn read(entry: &[u8]) -> Option<Self> {
        entry.get(..size_of::<RecvWqe>())?;
        let reserved = word(entry, offset_of!(RecvWqe, reserved))? == 0
            && word(entry, offset_of!(RecvWqe, padding))? == 0;
        Some(Self {
            wr_id: long(entry, offset_of!(RecvWqe, wr_id))?,
            data: Data::read(entry, offset_of!(RecvWqe, dma), false)?,
            reserved,
        })
    }

    fn is_plausible(&self) -> bool {
        self.reserved && self.data.is_plausible()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A header in bytes.
    fn header(log2_stride: u32, mask: u32, producer: u32, consumer: u32) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        for (at, value) in [
            (0, log2_stride),
            (4, mask),
            (128, producer),
            (256, consumer),
        ] {
            bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        bytes
    }

    fn put(entry: &mut [u8], at: usize, value: u32) {
        entry[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }

    /// By offsets counted in the kernel's headers, not by the structures.
    fn completion() -> Vec<u8> {
        let mut entry = vec![0; 64];
        put(&mut entry, 0, 7);
        put(&mut entry, 8, 5);
        put(&mut entry, 12, 128);
        put(&mut entry, 20, 4096);
        put(&mut entry, 28, 0x11);
        entry
    }

    fn receive(stride: usize) -> Vec<u8> {
        let mut entry = vec![0; stride];
        put(&mut entry, 0, 1);
        put(&mut entry, 16, 4096);
        put(&mut entry, 20, 4096);
        put(&mut entry, 28, 1);
        put(&mut entry, 40, 0x1000);
        put(&mut entry, 48, 4096);
        put(&mut entry, 52, 77);
        entry
    }

    fn send(opcode: u32, flags: u32) -> Vec<u8> {
        let mut entry = vec![0; 256];
        put(&mut entry, 0, 2);
        put(&mut entry, 12, opcode);
        put(&mut entry, 16, flags);
        if opcode == 0 {
            put(&mut entry, 24, 0xabc0);
            put(&mut entry, 32, 99);
        }
        put(&mut entry, 148, 3);
        put(&mut entry, 184, 64);
        put(&mut entry, 196, 1);
        put(&mut entry, 208, 0x2000);
        put(&mut entry, 216, 64);
        put(&mut entry, 220, 55);
        entry
    }

    #[test]
    fn a_header_is_checked_against_the_mapping() {
        let bytes = header(6, 7, 10, 6);
        let snapshot = Snapshot::read(&bytes, HEADER + 8 * 64).unwrap();
        assert_eq!(snapshot.pending(), 4);
        assert_eq!((snapshot.producer, snapshot.capacity), (2, 7));
        assert_eq!((snapshot.before(1), snapshot.before(3)), (1, 7));
        assert!(snapshot.is_pending(6) && snapshot.is_pending(1) && !snapshot.is_pending(2));
        assert_eq!(snapshot.offset(1), HEADER + 64);
        assert_eq!(Snapshot::read(&bytes, HEADER + 8 * 64 - 1), None);
        for (log2_stride, mask) in [(5, 7), (17, 7), (6, 6), (6, u32::MAX - 1), (u32::MAX, 7)] {
            assert_eq!(
                Snapshot::read(&header(log2_stride, mask, 0, 0), usize::MAX),
                None
            );
        }
        assert_eq!(Snapshot::read(&bytes[..200], 1 << 20), None);
    }

    #[test]
    fn entries_are_read_at_the_kernels_offsets() {
        let Completion(wc) = Completion::read(&completion()).unwrap();
        assert_eq!((wc.wr_id, wc.status, wc.opcode), (7, 5, 128));
        assert_eq!((wc.byte_len, wc.qp_num), (4096, 0x11));

        let entry = ReceiveEntry::read(&receive(64)).unwrap();
        let sge = |addr, length, lkey| vec![Sge { addr, length, lkey }];
        assert_eq!((entry.wr_id, entry.data.list), (1, sge(0x1000, 4096, 77)));

        let entry = SendEntry::read(&send(0, 2)).unwrap();
        let remote = Remote::Memory {
            addr: 0xabc0,
            rkey: 99,
        };
        assert_eq!((entry.opcode, entry.remote), (Opcode::RDMA_WRITE, remote));
        assert_eq!(entry.state_name(), Some("done"));
        assert_eq!(entry.data.list, sge(0x2000, 64, 55));
    }

    #[test]
    fn inspect_distinguishes_queues() {
        let zeros = vec![0; 64];
        let of = |entries: &[Vec<u8>]| Kind::of(entries.iter().map(Vec::as_slice));
        assert_eq!(of(&[completion(), zeros.clone()]), Some(Kind::Completion));
        assert_eq!(of(&[zeros.clone(), receive(64)]), Some(Kind::Receive));
        assert_eq!(of(&[receive(256)]), Some(Kind::Receive));
        for (opcode, flags) in [(2, 2), (2, 0), (0, 0), (0, 2)] {
            assert_eq!(
                of(&[send(opcode, flags)]),
                Some(Kind::Send),
                "{opcode} {flags}"
            );
        }
        assert_eq!(of(&[zeros]), None);
        assert_eq!(of(&[]), None);
    }

    proptest! {
        #[test]
        fn inspect_accepts_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..700), mapped: usize) {
            if let Some(snapshot) = Snapshot::read(&bytes, mapped) {
                for slot in [0, snapshot.capacity, snapshot.before(1)] {
                    prop_assert!(snapshot.offset(slot) + snapshot.stride <= mapped);
                }
            }
            let _ = Kind::of([bytes.as_slice()]);
        }

        #[test]
        fn any_geometry_stays_in_the_mapping(
            log2_stride in 0u32..40, mask: u32, producer: u32, consumer: u32, mapped: usize
        ) {
            if let Some(snapshot) = Snapshot::read(&header(log2_stride, mask, producer, consumer), mapped) {
                prop_assert!(snapshot.offset(snapshot.capacity) + snapshot.stride <= mapped);
                prop_assert!(snapshot.pending() <= snapshot.capacity);
            }
        }
    }
}
