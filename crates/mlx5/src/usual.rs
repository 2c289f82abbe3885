//! The quick way to read nearly all completions: of sends, writes and received
//! messages that succeeded, in queues of their own.
//!
//! What is unusual is left to [`CompletionRing::read`]: nothing is done for it
//! here. Completions of one queue are read in a row: whose they are is looked
//! up, and what of them is done with is told to the poster, once for all.

use std::hint::cold_path;
use std::mem::{MaybeUninit, offset_of};
use std::ptr::NonNull;

use ring::Owner;

use crate::abi::{Cqe, cqe_opcode, opcode as request};
use crate::cq_ring::is_written;
use crate::cursor::What;
use crate::directory::NUMBER;
use crate::wc::{flags, opcode};
use crate::{CompletionRing, Shown, WorkCompletion};

/// Why reading the quick way has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usual {
    /// There was no room for more.
    Taken,
    /// Nothing more is there.
    Nothing,
    /// A completion, or something that is none, which was left.
    Other,
}

/// Reads a field of an entry once, whatever the device does meanwhile.
macro_rules! field {
    ($entry:expr, $field:ident) => {
        (&raw const (*$entry.as_ptr()).$field).read_volatile()
    };
}

/// `MLX5_CQE_..._SE`: an event was asked for by the peer. Nothing to a reader.
const SOLICITED: u8 = 0x2;
// Of these, neither data in the entry nor a title: those bits are 0.
const SENT: u32 = (cqe_opcode::REQ as u32) << 4;
pub(crate) const RECEIVED: u32 = (cqe_opcode::RESP_SEND as u32) << 4;
const RECEIVED_IMMEDIATE: u32 = (cqe_opcode::RESP_SEND_IMM as u32) << 4;
/// What the two have that others have not, and of it what only the second has.
const IMMEDIATE: u32 = RECEIVED ^ RECEIVED_IMMEDIATE;
const _: () = assert!(IMMEDIATE.is_power_of_two() && RECEIVED & IMMEDIATE == 0);

/// Where completions are read into, one after the other.
///
/// # Safety
/// It begins with a [`WorkCompletion`].
pub unsafe trait Place: Sized {
    /// Whether it keeps when the completion was written.
    const TIMED: bool;

    /// Takes down when that was, if it is kept.
    ///
    /// # Safety
    /// The place is writable.
    unsafe fn set_time(place: *mut MaybeUninit<Self>, time: u64);
}

// SAFETY: it is one.
unsafe impl Place for WorkCompletion {
    const TIMED: bool = false;

    #[inline(always)]
    unsafe fn set_time(_: *mut MaybeUninit<Self>, _: u64) {}
}

/// A completion, and when the device wrote it, in ticks of its clock (of a
/// failure, any number).
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Timed {
    /// What it says.
    pub completion: WorkCompletion,
    /// When.
    pub time: u64,
}

const _: () = assert!(offset_of!(Timed, completion) == 0);

// SAFETY: it begins with one, as is asserted.
unsafe impl Place for Timed {
    const TIMED: bool = true;

    #[inline(always)]
    unsafe fn set_time(place: *mut MaybeUninit<Self>, time: u64) {
        // SAFETY: as the caller says.
        unsafe { (&raw mut (*place.cast::<Self>()).time).write(time) };
    }
}

/// Writes what an entry of a kind says to a place; whether it is one of the usual.
///
/// # Safety
/// As for [`Kind::tell`]; the place is writable.
#[inline(always)]
unsafe fn tell<K: Kind, P: Place>(
    entry: NonNull<Cqe>,
    wr_id: u64,
    place: *mut MaybeUninit<P>,
) -> bool {
    // SAFETY: as the caller says; a place begins with a completion.
    unsafe {
        let told = K::tell(entry, wr_id, &mut *place.cast());
        if P::TIMED {
            P::set_time(place, time_of(entry));
        }
        told
    }
}

/// A kind of completion, all of which is said by an entry's last byte.
trait Kind {
    /// That byte, without the owner bit and [`SOLICITED`].
    const OWNER: u32;
    /// Whether it is of a receive.
    const RECEIVES: bool;

    /// Writes what the entry says; whether it is one of the usual.
    ///
    /// # Safety
    /// An entry of this kind that the device has written.
    unsafe fn tell(entry: NonNull<Cqe>, wr_id: u64, out: &mut MaybeUninit<WorkCompletion>) -> bool;
}

/// A send or a write of this side's.
enum Sent {}
/// A message of the peer's.
enum Received {}
/// One with immediate data.
enum ReceivedImmediate {}

impl Kind for Sent {
    const OWNER: u32 = SENT;
    const RECEIVES: bool = false;

    #[inline(always)]
    unsafe fn tell(entry: NonNull<Cqe>, wr_id: u64, out: &mut MaybeUninit<WorkCompletion>) -> bool {
        // SAFETY: as the caller says.
        let number = u32::from_be(unsafe { field!(entry, sop_drop_qpn) });
        let Some(opcode) = sent(number) else {
            return false;
        };
        out.write(WorkCompletion {
            wr_id,
            opcode,
            qp_num: number & NUMBER,
            ..WorkCompletion::default()
        });
        true
    }
}

/// The opcode of a send or a write, of which the number has the request's.
#[inline(always)]
fn sent(number: u32) -> Option<u32> {
    match number >> 24 {
        SEND => Some(opcode::SEND),
        RDMA_WRITE => Some(opcode::RDMA_WRITE),
        _ => None,
    }
}

/// Bits of the sender's number that say that there is a global header.
const GLOBAL: u32 = 3 << 28;

const SEND: u32 = request::SEND as u32;
const RDMA_WRITE: u32 = request::RDMA_WRITE as u32;

/// A message of the peer's, with immediate data or without.
///
/// # Safety
/// As for [`Kind::tell`].
#[inline(always)]
unsafe fn tell_received<const IMMEDIATE: bool>(
    entry: NonNull<Cqe>,
    wr_id: u64,
    out: &mut MaybeUninit<WorkCompletion>,
) {
    let to = out.as_mut_ptr();
    macro_rules! set {
        ($($field:ident: $value:expr;)+) => { $((&raw mut (*to).$field).write($value);)+ };
    }
    // Each field is written when it has been read, so that few are in registers
    // at a time.
    // SAFETY: as the caller says; all fields are written.
    unsafe {
        set! {
            wr_id: wr_id;
            status: 0;
            opcode: opcode::RECV;
            vendor_err: 0;
            byte_len: u32::from_be(field!(entry, byte_cnt));
        }
        let word = field!(entry, imm_inval_pkey);
        // The field has one of the two.
        set! {
            ex: if IMMEDIATE { word } else { 0 };
            qp_num: u32::from_be(field!(entry, sop_drop_qpn)) & NUMBER;
        }
        let sender = u32::from_be(field!(entry, flags_rqpn));
        let global = sender & GLOBAL != 0;
        set! {
            src_qp: sender & NUMBER;
            wc_flags: if IMMEDIATE { flags::WITH_IMM } else { 0 };
            pkey_index: if IMMEDIATE { 0 } else { u32::from_be(word) as u16 };
            slid: u16::from_be(field!(entry, slid));
            sl: (sender >> 24 & 0xf) as u8;
            dlid_path_bits: field!(entry, ml_path) & 0x7f;
            port_num: 0;
            reserved: 0;
        }
        if global {
            cold_path();
            (*to).wc_flags |= flags::GRH;
        }
    }
}

macro_rules! received {
    ($($kind:ident: $owner:ident, $immediate:literal;)+) => {$(
        impl Kind for $kind {
            const OWNER: u32 = $owner;
            const RECEIVES: bool = true;

            #[inline(always)]
            unsafe fn tell(
                entry: NonNull<Cqe>,
                wr_id: u64,
                out: &mut MaybeUninit<WorkCompletion>,
            ) -> bool {
                // SAFETY: as the caller says.
                unsafe { tell_received::<$immediate>(entry, wr_id, out) };
                true
            }
        }
    )+};
}

received! {
    Received: RECEIVED, false;
    ReceivedImmediate: RECEIVED_IMMEDIATE, true;
}

/// The opcode and flags of a send or a write, as a work completion has them; none
/// of anything else that was sent.
///
/// # Safety
/// As for [`Kind::tell`].
#[inline(always)]
unsafe fn what_sent(entry: NonNull<Cqe>) -> Option<What> {
    // SAFETY: as the caller says.
    let number = u32::from_be(unsafe { field!(entry, sop_drop_qpn) });
    Some(What::new(sent(number)?, 0))
}

/// The same of a message, with immediate data or without, which a bit of `kind`
/// says.
///
/// # Safety
/// As for [`Kind::tell`].
#[inline(always)]
unsafe fn what_received(entry: NonNull<Cqe>, kind: u32) -> What {
    // SAFETY: as the caller says.
    let sender = unsafe { field!(entry, flags_rqpn) };
    // Without a branch.
    let what = What::new(opcode::RECV, 0).with(kind & IMMEDIATE, IMMEDIATE, flags::WITH_IMM);
    if sender & GLOBAL.to_be() != 0 {
        cold_path();
        return what.with(1, 1, flags::GRH);
    }
    what
}

/// The last byte of an entry, of which the rest is read after it.
///
/// # Safety
/// The entry is one of a ring's.
#[inline(always)]
unsafe fn owner_of(entry: NonNull<Cqe>) -> u8 {
    // SAFETY: a byte of the entry, for as long as this takes.
    let owner = unsafe { Owner::new(entry.cast::<u8>().add(offset_of!(Cqe, op_own))) };
    owner.look()
}

/// The slot of the work request that an entry is about.
///
/// # Safety
/// An entry that the device has written.
#[inline(always)]
unsafe fn slot_of(entry: NonNull<Cqe>) -> u32 {
    // SAFETY: as the caller says.
    u16::from_be(unsafe { field!(entry, wqe_counter) }).into()
}

/// When an entry was written.
///
/// # Safety
/// An entry that the device has written.
#[inline(always)]
unsafe fn time_of(entry: NonNull<Cqe>) -> u64 {
    // SAFETY: as the caller says; aligned, since the entry is.
    let time = unsafe {
        let at = entry.cast::<u8>().add(offset_of!(Cqe, timestamp));
        at.cast::<u64>().read_volatile()
    };
    u64::from_be(time)
}

impl CompletionRing {
    /// Reads as many completions of the usual kinds as there are before any
    /// other one, and room in `out`; how many, and why no more.
    ///
    /// # Safety
    /// As for [`CompletionRing::read`].
    #[inline(always)]
    pub unsafe fn take_usual<P: Place>(&mut self, out: &mut [MaybeUninit<P>]) -> (usize, Usual) {
        let mut left = out.len();
        let mut place = out.as_mut_ptr();
        loop {
            let taken = out.len() - left;
            if left == 0 {
                return (taken, Usual::Taken);
            }
            // SAFETY: `next` is an entry of this ring's.
            let owner = unsafe { owner_of(self.next) };
            // SAFETY: as the caller says; the entry is written, in this round;
            // there are so many places.
            let more = unsafe {
                match (u32::from(owner) ^ self.round) & !u32::from(SOLICITED) {
                    SENT => self.take_row::<Sent, P>(place, left),
                    RECEIVED => self.take_row::<Received, P>(place, left),
                    RECEIVED_IMMEDIATE => self.take_row::<ReceivedImmediate, P>(place, left),
                    _ if self.is_in_session() || is_written(owner, self.round as u8) => 0,
                    _ => return (taken, Usual::Nothing),
                }
            };
            let more = match more {
                // SAFETY: as above.
                0 => unsafe { self.take_shared(owner, place, left) },
                some => some,
            };
            if more == 0 {
                return (taken, Usual::Other);
            }
            // SAFETY: as many were written.
            place = unsafe { place.add(more) };
            left -= more;
        }
    }

    /// Shows the next completion in `shown`, if it is one of nearly all and of
    /// a queue that was read last; its identifier, or why not. Its time is in
    /// [`Shown::time`] only.
    ///
    /// # Safety
    /// As for [`CompletionRing::show`].
    #[inline(always)]
    pub unsafe fn show_usual(&mut self, shown: *mut Shown) -> Result<u64, Usual> {
        let entry = self.next;
        // SAFETY: `next` is an entry of this ring's.
        let owner = unsafe { owner_of(entry) };
        // SAFETY: as the caller says; the entry is written, in this round.
        unsafe {
            // What it has that an entry of a message has not.
            let other = u32::from(owner) ^ self.message;
            if other & !(u32::from(SOLICITED) | IMMEDIATE) == 0 {
                return self
                    .show_one::<true>(entry, shown, |entry| Some(what_received(entry, other)));
            }
            // So that messages are all in a row.
            cold_path();
            if other & !u32::from(SOLICITED) == SENT ^ RECEIVED {
                return self.show_one::<false>(entry, shown, |entry| what_sent(entry));
            }
            if self.is_in_session() || is_written(owner, self.round as u8) {
                Err(Usual::Other)
            } else {
                Err(Usual::Nothing)
            }
        }
    }

    /// As [`CompletionRing::show_usual`], after that has left one: of any queue.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    pub unsafe fn show_another(&mut self, shown: *mut Shown) -> Result<u64, Usual> {
        let entry = self.next;
        // SAFETY: an entry of this ring's; if the device has not written it,
        // what is found by it is not looked for.
        let (owner, whose) = unsafe { (owner_of(entry), field!(entry, srqn_uidx)) };
        let receives = u32::from(owner >> 4) != SENT >> 4;
        let known = self.directory.queue(receives, whose).is_some();
        // SAFETY: as the caller says; the entry is written, in this round.
        unsafe {
            let kind = (u32::from(owner) ^ self.round) & !u32::from(SOLICITED);
            if kind & !IMMEDIATE == RECEIVED && !known {
                self.show_shared(kind, shown)
            } else {
                self.show_usual(shown)
            }
        }
    }

    /// As [`CompletionRing::show_one`], of a receive of a shared queue's.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn show_shared(&mut self, kind: u32, shown: *mut Shown) -> Result<u64, Usual> {
        let entry = self.next;
        // SAFETY: the device has written the entry; any bytes are a valid one.
        let (whose, slot) = unsafe { (field!(entry, srqn_uidx), slot_of(entry) as u16) };
        let shared = self.directory.shared(whose).ok_or(Usual::Other)?;
        let mut taking = shared.taking();
        let wr_id = taking.take(slot).ok_or(Usual::Other)?;
        drop(taking);
        // SAFETY: as above, of this kind.
        let what = unsafe { what_received(entry, kind) };
        // SAFETY: as the caller says.
        unsafe { Shown::set(shown, entry, what) };
        // SAFETY: what is behind it is in the memory, or its end.
        unsafe { self.pass(1, entry.byte_add(self.step)) };
        Ok(wr_id)
    }

    /// Shows a completion, which the next entry is (`entry`), of a receive or of
    /// what was sent; `what` says which opcode and flags it has.
    ///
    /// # Safety
    /// As for [`CompletionRing::show`]; the next entry is written, and of such a
    /// kind.
    #[inline(always)]
    unsafe fn show_one<const RECEIVES: bool>(
        &mut self,
        entry: NonNull<Cqe>,
        shown: *mut Shown,
        what: impl FnOnce(NonNull<Cqe>) -> Option<What>,
    ) -> Result<u64, Usual> {
        // SAFETY: the device has written the entry; any bytes are a valid one.
        let (whose, slot) = unsafe { (field!(entry, srqn_uidx), slot_of(entry)) };
        let Some(queue) = self.directory.recent(RECEIVES, whose) else {
            return Err(Usual::Other);
        };
        let Some(found) = queue.find(slot) else {
            return Err(Usual::Other);
        };
        let Some(what) = what(entry) else {
            return Err(Usual::Other);
        };
        queue.complete(found);
        // SAFETY: as the caller says.
        unsafe { Shown::set(shown, entry, what) };
        // SAFETY: what is behind it is in the memory, or its end.
        unsafe { self.pass(1, entry.byte_add(self.step)) };
        Ok(found.wr_id)
    }

    /// Reads the next completion into `out`, if it is one of nearly all.
    ///
    /// # Safety
    /// As for [`CompletionRing::read`].
    #[inline(always)]
    pub unsafe fn read_usual(&mut self, out: &mut MaybeUninit<WorkCompletion>) -> Usual {
        // SAFETY: `next` is an entry of this ring's.
        let owner = unsafe { owner_of(self.next) };
        // SAFETY: as the caller says; the entry is written, in this round.
        let taken = unsafe {
            match (u32::from(owner) ^ self.round) & !u32::from(SOLICITED) {
                SENT => self.take_one::<Sent, false>(out),
                RECEIVED => self.take_one::<Received, false>(out),
                RECEIVED_IMMEDIATE => self.take_one::<ReceivedImmediate, false>(out),
                _ if self.is_in_session() || is_written(owner, self.round as u8) => false,
                _ => return Usual::Nothing,
            }
        };
        // SAFETY: as above.
        if taken || unsafe { self.take_one_other(owner, out) } {
            Usual::Taken
        } else {
            Usual::Other
        }
    }

    /// Reads completions of one kind and queue pair whose receives are a shared
    /// queue's, of which the next entry is the first, into no more than `room`
    /// places from `place` on; how many. None if it is of another kind.
    ///
    /// # Safety
    /// As for [`CompletionRing::read`]; `owner` is the next entry's last byte.
    /// There is room for one, and as much as is said.
    #[inline(never)]
    unsafe fn take_shared<P: Place>(
        &mut self,
        owner: u8,
        place: *mut MaybeUninit<P>,
        room: usize,
    ) -> usize {
        // SAFETY: as the caller says; the entry is written, in this round.
        unsafe {
            match (u32::from(owner) ^ self.round) & !u32::from(SOLICITED) {
                RECEIVED => self.take_shared_row::<Received, P>(place, room),
                RECEIVED_IMMEDIATE => self.take_shared_row::<ReceivedImmediate, P>(place, room),
                _ => 0,
            }
        }
    }

    /// As [`CompletionRing::read_usual`], of one that was left there: of another
    /// queue than the last time, or of a shared one; whether it is one of the usual.
    ///
    /// # Safety
    /// As there; `owner` is the next entry's last byte.
    #[inline(never)]
    unsafe fn take_one_other(&mut self, owner: u8, out: &mut MaybeUninit<WorkCompletion>) -> bool {
        // SAFETY: as the caller says; the entry is written, in this round.
        unsafe {
            match (u32::from(owner) ^ self.round) & !u32::from(SOLICITED) {
                SENT => self.take_one::<Sent, true>(out),
                RECEIVED => self.take_one_received::<Received>(out),
                RECEIVED_IMMEDIATE => self.take_one_received::<ReceivedImmediate>(out),
                _ => false,
            }
        }
    }

    /// As [`CompletionRing::take_one`], of receives, of a shared queue's as well.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn take_one_received<K: Kind>(&mut self, out: &mut MaybeUninit<WorkCompletion>) -> bool {
        // SAFETY: as the caller says; there is one place.
        unsafe { self.take_shared_row::<K, _>(out, 1) != 0 || self.take_one::<K, true>(out) }
    }

    /// As [`CompletionRing::take_row`], of a kind of receives, all of which are
    /// usual.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn take_shared_row<K: Kind, P: Place>(
        &mut self,
        place: *mut MaybeUninit<P>,
        room: usize,
    ) -> usize {
        // There is one at least.
        let most = if room == 1 {
            1
        } else {
            room.min(self.to_end())
        };
        let owner = (K::OWNER | self.round) as u8;
        let mut entry = self.next;
        // SAFETY: the device has written the entry; any bytes are a valid one.
        let whose = unsafe { field!(entry, srqn_uidx) };
        let Some(shared) = self.directory.shared(whose) else {
            return 0;
        };
        let mut taking = shared.taking();
        let mut count = 0;
        while count < most {
            // SAFETY: not at the end, so an entry; of this kind, or it is the
            // end of the row. There are so many places.
            unsafe {
                if count != 0
                    && (owner_of(entry) & !SOLICITED != owner || field!(entry, srqn_uidx) != whose)
                {
                    break;
                }
                let Some(wr_id) = taking.take(slot_of(entry) as u16) else {
                    break;
                };
                tell::<K, P>(entry, wr_id, place.add(count));
                entry = entry.byte_add(self.step);
            }
            count += 1;
        }
        drop(taking);
        if count != 0 {
            // SAFETY: the entry before it was read above.
            self.time = unsafe { time_of(entry.byte_sub(self.step)) };
            self.pass(count, entry);
        }
        count
    }

    /// Reads a completion of this kind, which the next entry is; whether it is
    /// one of the usual, and, unless another is looked up, of the queue that was
    /// read last.
    ///
    /// # Safety
    /// As for [`CompletionRing::read`]; the next entry is written, and of this
    /// kind.
    #[inline(always)]
    unsafe fn take_one<K: Kind, const LOOK_UP: bool>(
        &mut self,
        out: &mut MaybeUninit<WorkCompletion>,
    ) -> bool {
        let entry = self.next;
        // SAFETY: the device has written the entry; any bytes are a valid one.
        let (whose, slot) = unsafe { (field!(entry, srqn_uidx), slot_of(entry)) };
        let queue = if LOOK_UP {
            self.directory.queue(K::RECEIVES, whose)
        } else {
            self.directory.recent(K::RECEIVES, whose)
        };
        let Some(queue) = queue else {
            return false;
        };
        let mut queue = queue.taking();
        // SAFETY: as above; of this kind.
        let tell = |wr_id| unsafe { K::tell(entry, wr_id, out) };
        if !queue.take(slot, tell) {
            return false;
        }
        queue.end();
        // SAFETY: as above.
        self.time = unsafe { time_of(entry) };
        // SAFETY: what is behind it is in the memory, or its end.
        unsafe { self.pass(1, entry.byte_add(self.step)) };
        true
    }

    /// Reads completions of one kind and of queues that are known, of which the
    /// next entry is the first, into no more than `room` places from `place` on;
    /// how many.
    ///
    /// # Safety
    /// As for [`CompletionRing::read`]; the next entry is written, and of this
    /// kind. There is room for one, and as much as is said.
    #[inline(always)]
    unsafe fn take_row<K: Kind, P: Place>(
        &mut self,
        mut place: *mut MaybeUninit<P>,
        room: usize,
    ) -> usize {
        let most = room.min(self.to_end());
        let step = self.step;
        let owner = (K::OWNER | self.round) as u8;
        let mut entry = self.next;
        // SAFETY: the device has written the entry; any bytes are a valid one.
        let mut whose = unsafe { field!(entry, srqn_uidx) };
        self.directory.make_recent(K::RECEIVES, whose);
        let mut left = most;
        // Queues may take turns.
        while let Some(queue) = self.directory.recent(K::RECEIVES, whose) {
            let mut queue = queue.taking();
            let more = loop {
                // SAFETY: as above.
                let slot = unsafe { slot_of(entry) };
                // SAFETY: as above, and of this kind; one of the places.
                let tell = |wr_id| unsafe { tell::<K, P>(entry, wr_id, place) };
                if !queue.take(slot, tell) {
                    break None;
                }
                left -= 1;
                // SAFETY: to the end of the entries, and of the places, at most.
                (entry, place) = unsafe { (entry.byte_add(step), place.add(1)) };
                if left == 0 {
                    break None;
                }
                // SAFETY: not at the end, so an entry.
                let next = unsafe {
                    if owner_of(entry) & !SOLICITED != owner {
                        break None;
                    }
                    field!(entry, srqn_uidx)
                };
                if next != whose {
                    break Some(next);
                }
            };
            queue.end();
            match more {
                Some(next) => {
                    whose = next;
                    self.directory.make_recent(K::RECEIVES, whose);
                }
                None => break,
            }
        }
        let count = most - left;
        if count != 0 {
            // SAFETY: the entry before it was read above.
            self.time = unsafe { time_of(entry.byte_sub(step)) };
            self.pass(count, entry);
        }
        count
    }
}
