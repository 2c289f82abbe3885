//! Pages of buffers in flight that are protected, to find who accesses them.
//!
//! The pages of receives cannot be accessed at all, if early reads are looked for: a read of the
//! program before the device has written there is a fault, too.
//!
//! A place in the program whose buffers have changed is armed: the pages of the buffers that it
//! posts next are readable only. A write of the program is a fault: its handler ([`on_fault`])
//! keeps the call stack, and makes the pages writable. So does a write of a device, or of the
//! program beside the buffer, for that page only; it is protected again with the next buffer.
//!
//! Only whole pages of a region in private anonymous memory are protected, so that nothing but the
//! program's data is in them: the kernel writes there only what a system call of the program
//! returns.
//!
//! ```text
//! post ── arm ──► ARMED ── write ──► WRITING ── stack is kept ──► WRITTEN ─┐
//!                   │ └─ lift ──► LIFTED ────────────────────────────────┐ │
//! poll ── drop ─────┴────────────────────────────────────────────────────┴─┴─► FREE
//! ```

use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_uint, c_void};
use std::hint;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::SeqCst, fence};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::explain::{self, Origin, Stack, lock};
use crate::fault::{self, SignalBlock, page_size};
use crate::{doorbells, hooks, internal, memory_map, own};

/// Maximum number of buffers that are guarded at a time, of sends and receives.
const MAX_GUARDS: usize = 64;
/// Maximum number of places in the program that are armed.
const MAX_SITES: usize = 1024;
/// Number of writes to buffers of a place, after which these are not guarded any more.
const MAX_WRITES: u32 = 8;
/// Maximum number of frames of a writer that are kept.
const MAX_FRAMES: usize = 24;
/// Maximum number of parts of memory, and of messages, in a call (UIO_MAXIOV).
const MAX_PARTS: usize = 1024;
/// Bytes of a signal handler's own stack that must be left to walk the stack.
const ROOM: usize = 16 << 10;

/// States of a guard, in the low bits of [`Slot::state`].
const FREE: u64 = 0;
const ARMED: u64 = 1;
/// A thread notes itself as writer.
const WRITING: u64 = 2;
const WRITTEN: u64 = 3;
/// The pages are not protected any more.
const LIFTED: u64 = 4;
/// The guard was dropped while a thread noted itself, which frees it.
const ABANDONED: u64 = 5;
const STATE: u64 = 7;

/// Returns whether the pages of a guard may be protected: a thread that notes itself makes them
/// writable only then.
fn holds_pages(state: u64) -> bool {
    [ARMED, WRITING, ABANDONED].contains(&(state & STATE))
}

/// A buffer that is guarded, and who has written to it.
struct Slot {
    /// The state, and above it a number that no other guard has.
    state: AtomicU64,
    start: AtomicUsize,
    end: AtomicUsize,
    /// Start and end of its pages.
    pages: [AtomicUsize; 2],
    /// The program may not read it either.
    is_unreadable: AtomicBool,
    thread: AtomicI32,
    count: AtomicUsize,
    /// The first `count` addresses to which calls return, innermost first.
    frames: [AtomicUsize; MAX_FRAMES],
}

static SLOTS: [Slot; MAX_GUARDS] = [const {
    Slot {
        state: AtomicU64::new(FREE),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        pages: [const { AtomicUsize::new(0) }; 2],
        is_unreadable: AtomicBool::new(false),
        thread: AtomicI32::new(0),
        count: AtomicUsize::new(0),
        frames: [const { AtomicUsize::new(0) }; MAX_FRAMES],
    }
}; MAX_GUARDS];

/// Number of guards that have protected pages, or are about to.
static GUARDING: AtomicUsize = AtomicUsize::new(0);
/// Number of guards since the program began: the number of the next one.
static ARMINGS: AtomicU64 = AtomicU64::new(0);
/// Held while pages are protected and guards change their pages; by the handler of faults never.
static LOCKED: AtomicBool = AtomicBool::new(false);

struct Lock {
    /// A signal handler would wait for the thread that it interrupts.
    _blocked: SignalBlock,
}

impl Lock {
    fn take() -> Self {
        let blocked = SignalBlock::all();
        let mut rounds = 0_u32;
        while LOCKED.swap(true, SeqCst) {
            rounds += 1;
            match rounds % 64 {
                0 => thread::yield_now(),
                _ => hint::spin_loop(),
            }
        }
        Self { _blocked: blocked }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        LOCKED.store(false, SeqCst);
    }
}

impl Slot {
    /// Returns the pages, and the state that they are of.
    fn pages(&self) -> (u64, Range<usize>) {
        loop {
            let state = self.state.load(SeqCst);
            let [start, end] = &self.pages;
            let pages = start.load(SeqCst)..end.load(SeqCst);
            fence(SeqCst);
            // Its fields change only while it is free.
            if self.state.load(SeqCst) == state {
                return (state, pages);
            }
        }
    }

    /// Changes the state, if it is still this one.
    fn exchange(&self, from: u64, to: u64) -> bool {
        let to = from & !STATE | to;
        self.state
            .compare_exchange(from, to, SeqCst, SeqCst)
            .is_ok()
    }

    /// Protects pages of a guard that has been armed. Returns whether that has succeeded.
    fn protect(&self, armed: u64, pages: &Range<usize>) -> bool {
        let is_protected = protect(pages, protection(self.is_unreadable.load(SeqCst)));
        // A writer who has noted itself since, after a fault by another guard of these pages, may
        // have made them writable before they were protected.
        if self.state.load(SeqCst) != armed {
            unprotect(pages);
        }
        is_protected
    }

    /// Notes this thread as the writer, given the address of its instruction in a handler of its
    /// fault, unless the guard has another state than this one.
    fn note_writer(&self, state: u64, at: Option<usize>) {
        if !self.exchange(state, WRITING) {
            return;
        }
        self.thread.store(explain::thread(), SeqCst);
        let mut count = 0;
        let mut note = |address: usize| {
            if let Some(frame) = self.frames.get(count) {
                frame.store(address, SeqCst);
                count += 1;
            }
            count < MAX_FRAMES
        };
        if let Some(at) = at {
            // A stack has addresses to which calls return.
            note(at.wrapping_add(1));
        }
        if at.is_none() || has_room() {
            let mut is_above = at.is_none();
            Stack::walk(|address| {
                let goes_on = !is_above || note(address);
                is_above |= at == Some(address);
                goes_on
            });
        }
        self.count.store(count, SeqCst);
        if at.is_some() {
            unprotect(&self.pages().1);
        }
        if !self.exchange(state & !STATE | WRITING, WRITTEN) {
            self.exchange(state & !STATE | ABANDONED, FREE);
        }
    }
}

/// Returns whether this signal handler's stack has room to walk the stack.
fn has_room() -> bool {
    let mut stack = std::mem::MaybeUninit::<libc::stack_t>::zeroed();
    // SAFETY: the call writes to a variable of this function, for which zero is a value.
    let stack = unsafe {
        libc::sigaltstack(std::ptr::null(), stack.as_mut_ptr());
        stack.assume_init()
    };
    let here = stack.ss_flags;
    stack.ss_flags & libc::SS_ONSTACK == 0
        || (&raw const here).addr() >= stack.ss_sp.addr().saturating_add(ROOM)
}

/// Sets the protection of pages. Returns whether that has succeeded.
fn protect(pages: &Range<usize>, protection: i32) -> bool {
    // SAFETY: pages with data of the program, which it may read and write: a write to protected
    // ones is a fault that `on_fault` handles.
    unsafe { own::syscall(libc::SYS_mprotect, pages.start, pages.len(), protection) == 0 }
}

fn unprotect(pages: &Range<usize>) -> bool {
    protect(pages, libc::PROT_READ | libc::PROT_WRITE)
}

/// Returns the protection of the pages of a guard.
fn protection(is_unreadable: bool) -> i32 {
    match is_unreadable {
        true => libc::PROT_NONE,
        false => libc::PROT_READ,
    }
}

fn intersection(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}

/// Makes pages read-only of guards against writes that are armed, in a range. The lock is held.
fn protect_armed_in(range: &Range<usize>) {
    for slot in &SLOTS {
        let (state, pages) = slot.pages();
        let common = intersection(&pages, range);
        let is_armed = state & STATE == ARMED && !slot.is_unreadable.load(SeqCst);
        if is_armed && !common.is_empty() {
            slot.protect(state, &common);
        }
    }
}

/// Returns the pages that guards have made read-only, or had until a moment ago. The lock is held:
/// no others will be until it is released.
fn read_only_pages() -> [Range<usize>; MAX_GUARDS] {
    std::array::from_fn(|index| {
        let (state, pages) = SLOTS[index].pages();
        match holds_pages(state) && !SLOTS[index].is_unreadable.load(SeqCst) {
            true => pages,
            false => 0..0,
        }
    })
}

/// Returns whether pages have data of the program alone, and are writable, but for those that
/// are guarded against writes, which cannot become unreadable. The lock is held.
fn can_guard(pages: &Range<usize>, is_unreadable: bool) -> bool {
    let mut next = pages.start;
    // Before the map is read: a writer may end a guard meanwhile.
    let read_only = read_only_pages();
    memory_map::each(pages, |mapping| {
        let part = intersection(&mapping.range, pages);
        let is_guarded = || read_only.iter().any(|it| intersection(it, &part) == part);
        let fits = part.start == next
            && mapping.is_anonymous
            && !mapping.is_shared()
            && (mapping.is_data() || mapping.is_read_only() && !is_unreadable && is_guarded());
        if fits {
            next = part.end;
        }
        fits
    }) && next == pages.end
}

/// Makes the pages of a guard writable. The lock is held.
fn restore(pages: &Range<usize>, is_unreadable: bool) {
    // The program may have mapped something else there, by calls that are not seen.
    let is_known = memory_map::each(pages, |mapping| {
        let is_protected = match is_unreadable {
            true => mapping.is_inaccessible(),
            false => mapping.is_read_only(),
        };
        if mapping.is_anonymous && !mapping.is_shared() && is_protected {
            unprotect(&intersection(&mapping.range, pages));
        }
        true
    });
    if !is_known {
        unprotect(pages);
    }
}

/// A buffer in flight whose pages are guarded, while it exists.
#[derive(Debug)]
pub(super) struct Guard {
    slot: usize,
    number: u64,
}

impl Guard {
    /// Guards a buffer in a region. `None` if that is not possible.
    pub(super) fn arm(buffer: &Range<usize>, region: &Range<usize>) -> Option<Self> {
        let page = page_size();
        let down = |address: usize| address / page * page;
        let up = |address: usize| address.checked_next_multiple_of(page);
        let start = down(buffer.start).max(up(region.start)?);
        Self::protect(buffer, start..up(buffer.end)?.min(down(region.end)), false)
    }

    /// Guards a buffer in a region against reads, as far as it has pages of its own. `None` if that
    /// is not possible: also where a fault does not tell reads from writes.
    pub(super) fn arm_against_reads(buffer: &Range<usize>, region: &Range<usize>) -> Option<Self> {
        if !fault::TELLS_WRITES {
            return None;
        }
        let page = page_size();
        let common = intersection(buffer, region);
        let start = common.start.checked_next_multiple_of(page)?;
        Self::protect(buffer, start..common.end / page * page, true)
    }

    fn protect(buffer: &Range<usize>, pages: Range<usize>, is_unreadable: bool) -> Option<Self> {
        if pages.is_empty() || !fault::is_installed() || doorbells::is_traced_now() {
            return None;
        }
        let _lock = Lock::take();
        let mut slots = SLOTS.iter().enumerate();
        let (index, slot) = slots.find(|(_, slot)| slot.state.load(SeqCst) & STATE == FREE)?;
        if !can_guard(&pages, is_unreadable) {
            return None;
        }
        GUARDING.fetch_add(1, SeqCst);
        slot.start.store(buffer.start, SeqCst);
        slot.end.store(buffer.end, SeqCst);
        slot.pages[0].store(pages.start, SeqCst);
        slot.pages[1].store(pages.end, SeqCst);
        slot.is_unreadable.store(is_unreadable, SeqCst);
        let number = (ARMINGS.fetch_add(1, SeqCst) + 1) * (STATE + 1);
        slot.state.store(number | ARMED, SeqCst);
        let guard = Self {
            slot: index,
            number,
        };
        if !slot.protect(number | ARMED, &pages) {
            guard.release();
            std::mem::forget(guard);
            return None;
        }
        Some(guard)
    }

    /// Returns who has written to the buffer, or read it if it is guarded against that.
    pub(super) fn accessor(&self) -> Option<Origin> {
        let slot = SLOTS.get(self.slot)?;
        if slot.state.load(SeqCst) != self.number | WRITTEN {
            return None;
        }
        let frames = slot.frames.iter().take(slot.count.load(SeqCst));
        Some(Origin {
            thread: slot.thread.load(SeqCst),
            stack: Arc::new(Stack::of(frames.map(|it| it.load(SeqCst)).collect())),
            is_earlier: false,
        })
    }

    /// Ends it. The lock is held.
    fn release(&self) {
        let Some(slot) = SLOTS.get(self.slot) else {
            return;
        };
        loop {
            let (state, pages) = slot.pages();
            let next = match state & STATE {
                ARMED => {
                    restore(&pages, slot.is_unreadable.load(SeqCst));
                    FREE
                }
                WRITING => ABANDONED,
                _ => FREE,
            };
            if slot.exchange(state, next) {
                if state & STATE == ARMED {
                    protect_armed_in(&pages);
                }
                break;
            }
        }
        GUARDING.fetch_sub(1, SeqCst);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _lock = Lock::take();
        self.release();
    }
}

/// Ends the protection of the pages that guards have in a range.
fn lift_in(range: &Range<usize>) {
    let _lock = Lock::take();
    for slot in &SLOTS {
        let (state, pages) = slot.pages();
        if state & STATE == ARMED && !intersection(&pages, range).is_empty() {
            restore(&pages, slot.is_unreadable.load(SeqCst));
            // Otherwise a writer has made them writable.
            slot.exchange(state, LIFTED);
        }
    }
}

/// Called before the program changes the mapping of pages, or lets the kernel write there: what
/// guards do in a range ends.
#[inline]
pub(crate) fn lift(range: &Range<usize>) {
    if GUARDING.load(SeqCst) != 0 {
        lift_in(range);
    }
}

/// Called before a system call of the program that reads or writes memory, which would fail with
/// EFAULT.
#[inline]
pub(crate) fn before_call(memory: *mut c_void, length: usize) {
    lift(&bytes_at(memory, length));
}

/// Called when such a call has returned so many bytes: this thread is the writer of guarded
/// buffers among them.
#[inline]
pub(crate) fn after_call(memory: *mut c_void, returned: isize) {
    if GUARDING.load(SeqCst) != 0 && returned > 0 {
        note_call(&bytes_at(memory, returned.unsigned_abs()));
    }
}

/// Calls `each` for the parts of memory of a call; for none if the kernel refuses them.
fn each_part(parts: *const libc::iovec, count: usize, mut each: impl FnMut(&Range<usize>)) {
    if count > MAX_PARTS {
        return;
    }
    for index in 0..count {
        let part = hooks::read::<libc::iovec>(parts.wrapping_add(index).addr());
        let Some(part) = part else { return };
        // SAFETY: an integer and a raw pointer may have any value.
        let part = unsafe { part.assume_init() };
        each(&bytes_at(part.iov_base, part.iov_len));
    }
}

/// As [`before_call`], for memory in parts.
#[inline]
pub(crate) fn before_parts(parts: *const libc::iovec, count: c_int) {
    if GUARDING.load(SeqCst) != 0 {
        each_part(parts, usize::try_from(count).unwrap_or_default(), lift_in);
    }
}

/// As [`after_call`], for memory in parts.
#[inline]
pub(crate) fn after_parts(parts: *const libc::iovec, count: c_int, returned: isize) {
    if GUARDING.load(SeqCst) == 0 || returned <= 0 {
        return;
    }
    let mut left = returned.unsigned_abs();
    each_part(parts, usize::try_from(count).unwrap_or_default(), |part| {
        let length = part.len().min(left);
        left -= length;
        note_call(&(part.start..part.start + length));
    });
}

/// As [`before_call`], for recvmsg(2), whose writes have no writer, and sendmsg(2).
#[inline]
pub(crate) fn before_message(message: *const libc::msghdr) {
    if GUARDING.load(SeqCst) == 0 {
        return;
    }
    if let Some(message) = hooks::read::<libc::msghdr>(message.addr()) {
        // SAFETY: integers and raw pointers may have any value.
        let message = unsafe { message.assume_init() };
        each_part(message.msg_iov, message.msg_iovlen, lift_in);
    }
}

/// As [`before_message`], for several.
#[inline]
pub(crate) fn before_messages(messages: *const libc::mmsghdr, count: c_uint) {
    if GUARDING.load(SeqCst) == 0 {
        return;
    }
    // The kernel takes no more.
    for index in 0..(count as usize).min(MAX_PARTS) {
        before_message(messages.wrapping_add(index).cast());
    }
}

fn bytes_at(memory: *mut c_void, length: usize) -> Range<usize> {
    memory.addr()..memory.addr().saturating_add(length)
}

fn note_call(written: &Range<usize>) {
    for slot in &SLOTS {
        let state = slot.state.load(SeqCst);
        let buffer = slot.start.load(SeqCst)..slot.end.load(SeqCst);
        let is_written = !slot.is_unreadable.load(SeqCst);
        let overlaps = !intersection(&buffer, written).is_empty();
        if state & STATE == LIFTED && is_written && overlaps {
            slot.note_writer(state, None);
        }
    }
}

/// As [`lift`], of all guards: before a command, which may use any memory.
#[inline]
pub(crate) fn lift_all() {
    lift(&(0..usize::MAX));
}

/// Called in a child of fork, where pages are protected as in its parent.
pub(crate) fn after_fork() {
    LOCKED.store(false, SeqCst);
    if GUARDING.swap(0, SeqCst) == 0 {
        return;
    }
    for slot in &SLOTS {
        let (state, pages) = slot.pages();
        if holds_pages(state) {
            unprotect(&pages);
        }
        slot.state.store(FREE, SeqCst);
    }
}

thread_local! {
    /// The last access of this thread that is repeated although no guard was found: the address,
    /// the instruction, and the number of guards until then. If the fault recurs, it is not of a
    /// guard.
    static REPEATED: Cell<(usize, usize, u64)> = const { Cell::new((0, 0, 0)) };
}

/// Handles a fault of an instruction: if the address is in a page that is guarded, or was, the
/// instruction can be repeated. Runs in a signal handler; takes no lock and allocates nothing.
///
/// # Safety
/// The second argument must be the context of a handler of this thread.
pub(crate) unsafe fn on_fault(address: usize, context: *mut c_void) -> bool {
    if ARMINGS.load(SeqCst) == 0 {
        return false;
    }
    // SAFETY: guaranteed by the caller.
    let (at, is_write) = unsafe { (fault::instruction(context), fault::is_write(context)) };
    let start = address & !(page_size() - 1);
    let page = start..start + page_size();
    loop {
        let armings = ARMINGS.load(SeqCst);
        let mut is_guarded = false;
        for slot in &SLOTS {
            let (state, pages) = slot.pages();
            if !holds_pages(state) || !pages.contains(&address) {
                continue;
            }
            is_guarded = true;
            let buffer = slot.start.load(SeqCst)..slot.end.load(SeqCst);
            // Devices write by the same addresses.
            if internal::is_internal() || !buffer.contains(&address) {
                continue;
            }
            // The device will overwrite what the program writes into a receive.
            if is_write && slot.is_unreadable.load(SeqCst) {
                continue;
            }
            if state & STATE == ARMED {
                slot.note_writer(state, Some(at));
            }
        }
        if is_guarded {
            return unprotect(&page);
        }
        if ARMINGS.load(SeqCst) == armings {
            // Another thread may have ended the guard since the fault.
            let this = (address, at, armings);
            let last = REPEATED.try_with(|it| it.replace(this));
            return last.is_ok_and(|last| last != this);
        }
    }
}

/// Places in the program whose posts are guarded.
#[derive(Debug)]
pub(super) struct Sites {
    /// The number of writes that were found of each.
    writes: Mutex<HashMap<usize, u32>>,
    is_empty: AtomicBool,
}

impl Sites {
    pub(super) fn new() -> Self {
        Self {
            writes: Mutex::default(),
            is_empty: AtomicBool::new(true),
        }
    }

    /// Notes that a buffer has changed that was posted here, and whether its writer was found.
    pub(super) fn note_change(&self, posted: &Origin, is_written: bool) {
        let mut writes = lock(&self.writes);
        let is_full = writes.len() >= MAX_SITES;
        match writes.entry(posted.stack.site()) {
            Entry::Occupied(mut entry) => *entry.get_mut() += u32::from(is_written),
            Entry::Vacant(_) if is_full => {}
            Entry::Vacant(entry) => _ = entry.insert(0),
        }
        self.is_empty.store(false, SeqCst);
    }

    /// Returns whether the buffers of a post are to be guarded.
    pub(super) fn contain(&self, posted: &Origin) -> bool {
        if self.is_empty.load(SeqCst) {
            return false;
        }
        let writes = lock(&self.writes);
        let found = writes.get(&posted.stack.site());
        found.is_some_and(|writes| *writes < MAX_WRITES)
    }
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;
    use std::ptr;
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// New pages, which stay mapped.
    fn pages(count: usize) -> Range<usize> {
        fault::install();
        let length = count * page_size();
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, rights, private, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        let start = start.expose_provenance();
        start..start + length
    }

    fn write(address: usize) {
        // SAFETY: pages of `pages`, which nothing else refers to; aligned.
        let word = unsafe { AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(address)) };
        word.fetch_add(1, SeqCst);
    }

    fn read(address: usize) {
        // SAFETY: as in `write`.
        let word = unsafe { AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(address)) };
        word.load(SeqCst);
    }

    /// Sets a flag in the end, also of a test that has failed, whose threads wait for it.
    struct SetInTheEnd<'a>(&'a AtomicBool);

    impl Drop for SetInTheEnd<'_> {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }

    fn is_writable(address: usize) -> bool {
        memory_map::at(address).unwrap().unwrap().is_data()
    }

    #[test]
    fn the_writer_is_found() {
        let all = pages(4);
        let page = page_size();
        let buffer = all.start + page + 64..all.start + 2 * page + 64;
        let guard = Guard::arm(&buffer, &all).unwrap();
        assert!(!is_writable(buffer.start) && !is_writable(buffer.end));
        assert!(is_writable(all.start) && is_writable(all.start + 3 * page));
        // Beside it: the other page stays as it is.
        write(buffer.end);
        assert!(is_writable(buffer.end) && !is_writable(buffer.start));
        assert!(guard.accessor().is_none());
        {
            // A device.
            let _scope = internal::enter();
            write(buffer.start);
        }
        assert!(guard.accessor().is_none() && is_writable(buffer.start));
        drop(guard);
        let guard = Guard::arm(&buffer, &all).unwrap();
        write(buffer.start);
        assert_eq!(guard.accessor().unwrap().thread, explain::thread());
        assert!(is_writable(buffer.start) && is_writable(buffer.end));
    }

    #[test]
    fn the_reader_is_found() {
        if !fault::TELLS_WRITES {
            return;
        }
        let all = pages(4);
        let page = page_size();
        let buffer = all.start + 64..all.start + 3 * page;
        let arm = || Guard::arm_against_reads(&buffer, &all).unwrap();
        let guard = arm();
        // The first page has other data.
        read(buffer.start);
        read(all.start);
        read(buffer.end);
        assert!(guard.accessor().is_none() && !is_writable(all.start + page));
        // A system call that writes there reads nothing.
        let start = ptr::with_exposed_provenance_mut(buffer.start + page);
        before_call(start, 8);
        after_call(start, 8);
        assert!(guard.accessor().is_none());
        drop(guard);
        let guard = arm();
        // Neither a second one, nor one against writes.
        assert!(Guard::arm_against_reads(&buffer, &all).is_none());
        assert!(Guard::arm(&buffer, &all).is_none());
        {
            // A device.
            let _scope = internal::enter();
            write(all.start + page);
        }
        read(all.start + page);
        assert!(guard.accessor().is_none());
        read(all.start + 2 * page);
        assert_eq!(guard.accessor().unwrap().thread, explain::thread());
        drop(guard);
        assert!(is_writable(all.start + page) && is_writable(all.start + 2 * page));
        let guard = arm();
        // A write is none of its business.
        write(all.start + page);
        assert!(guard.accessor().is_none() && is_writable(all.start + page));
        drop(guard);
        let guard = Guard::arm(&buffer, &all).unwrap();
        assert!(Guard::arm_against_reads(&buffer, &all).is_none());
        drop(guard);
        assert!(is_writable(all.start + page));
    }

    #[test]
    fn guards_share_pages() {
        let all = pages(1);
        let at = |offset| all.start + offset;
        let first = Guard::arm(&(at(0)..at(64)), &all).unwrap();
        let second = Guard::arm(&(at(64)..at(128)), &all).unwrap();
        drop(first);
        assert!(!is_writable(at(0)));
        write(at(64));
        assert!(second.accessor().is_some());
        let third = Guard::arm(&(at(128)..at(192)), &all).unwrap();
        lift(&(at(0)..at(4096)));
        assert!(is_writable(at(0)));
        drop((second, third));
        assert!(is_writable(at(0)));
    }

    /// A thread that writes to a buffer has noted itself, and not yet made its pages writable.
    #[test]
    fn pages_with_a_writer_are_guarded() {
        let all = pages(1);
        let at = |offset| all.start + offset;
        let first = Guard::arm(&(at(0)..at(64)), &all).unwrap();
        let slot = &SLOTS[first.slot];
        let armed = slot.state.load(SeqCst);
        assert!(slot.exchange(armed, WRITING) && !is_writable(at(0)));
        let second = Guard::arm(&(at(64)..at(128)), &all).unwrap();
        drop(first);
        let third = Guard::arm(&(at(128)..at(192)), &all).unwrap();
        assert!(slot.exchange(armed & !STATE | ABANDONED, FREE));
        drop((second, third));
        assert!(is_writable(at(0)));
    }

    /// A thread has written to a guarded buffer before the pages are protected, again.
    #[test]
    fn pages_that_were_written_stay_writable() {
        let all = pages(1);
        let guard = Guard::arm(&(all.start..all.start + 64), &all).unwrap();
        let slot = &SLOTS[guard.slot];
        let armed = slot.state.load(SeqCst);
        assert!(slot.exchange(armed, WRITTEN));
        assert!(slot.protect(armed, &all) && is_writable(all.start));
    }

    #[test]
    fn other_memory_is_not_guarded() {
        let all = pages(3);
        let page = page_size();
        let part = all.start + 8..all.end - 8;
        // No whole page of the region.
        assert!(Guard::arm(&(all.start + 8..all.start + 16), &part).is_none());
        let guard = Guard::arm(&part, &part).unwrap();
        assert!(is_writable(all.start) && !is_writable(all.start + page));
        drop(guard);
        // Of a file, and read-only.
        let code = Guard::arm as *const () as usize;
        let code = code / page * page..code / page * page + page;
        assert!(Guard::arm(&code, &code).is_none());
        assert!(protect(&all, libc::PROT_READ));
        assert!(Guard::arm(&all, &all).is_none());
        assert!(unprotect(&all));
        // SAFETY: pages of this test.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(all.start), all.len()) };
        assert!(Guard::arm(&all, &all).is_none());
    }

    #[test]
    fn a_write_whose_guard_has_ended_is_repeated_once() {
        let all = pages(1);
        drop(Guard::arm(&all, &all).unwrap());
        let mut context = MaybeUninit::<libc::ucontext_t>::zeroed();
        // SAFETY: zero is a value of each field that is read.
        let mut faults = || unsafe { on_fault(all.start, context.as_mut_ptr().cast()) };
        // Guards of other tests let it be repeated as well.
        assert!(faults() && (0..100).any(|_| !faults()));
    }

    #[test]
    fn writes_while_guards_begin_and_end_succeed() {
        let all = pages(1);
        let start = all.start;
        let ends = AtomicBool::new(false);
        let writer = |offset| {
            let ends = &ends;
            move || {
                let mut count = 0;
                while !ends.load(SeqCst) {
                    write(start + offset);
                    count += 1;
                }
                // SAFETY: as in `write`.
                let word = unsafe {
                    AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(start + offset))
                };
                assert_eq!(word.load(SeqCst), count);
            }
        };
        // A hundred guards, and more until so many were written to: the writers may begin late.
        let guards = |offset, least| {
            let all = &all;
            move || {
                let buffer = start + offset..start + offset + 64;
                let mut found = 0;
                for number in 0..1_000_000 {
                    if number >= 100 && found >= least {
                        break;
                    }
                    let guard = Guard::arm(&buffer, all).unwrap();
                    thread::yield_now();
                    found += usize::from(guard.accessor().is_some());
                }
                found
            }
        };
        thread::scope(|scope| {
            let _end = SetInTheEnd(&ends);
            scope.spawn(writer(0));
            scope.spawn(writer(2048));
            let guards =
                [(0, 1), (1024, 0)].map(|(offset, least)| scope.spawn(guards(offset, least)));
            let [written, beside] = guards.map(|it| it.join().unwrap());
            assert!(written != 0 && beside == 0);
        });
        assert!(is_writable(start));
    }
}
