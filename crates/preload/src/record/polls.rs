//! Hooks in the functions that poll, below those of [`crate::hooks`].

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

use super::{current, names, now};
use crate::explain::json::Object;
use crate::explain::thread;
use crate::hooks::{
    self, Context, Cq, Hooked, NextPoll, POLL_CQ, PollCq, StartPoll, Wc, hooked, provider_of,
};
use crate::internal;

static POLLS: Hooked = hooked!(poll);
static EXTENDED_POLLS: Hooked = hooked!(start_poll);
static NEXT_POLLS: Hooked = hooked!(next_poll);

/// Hooks the function of a context that polls, unless it is hooked already.
///
/// # Safety
/// The context's table must be readable and writable, and only changed by atomic accesses.
pub(crate) unsafe fn hook_polls(context: *mut Context) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let entry = &raw mut (*context).operations[POLL_CQ];
        let function = hooks::load(entry);
        if provider_of(function) == function {
            POLLS.exchange(entry, function);
        }
    }
}

/// As above, the functions of an extended queue.
///
/// # Safety
/// The queue must be extended, and not be polled.
pub(crate) unsafe fn hook_extended_queue(queue: *mut Cq) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let entries = [
            (&raw mut (*queue).start_poll, &EXTENDED_POLLS),
            (&raw mut (*queue).next_poll, &NEXT_POLLS),
        ];
        for (entry, hooked) in entries {
            let function = hooks::load(entry);
            if provider_of(function) == function {
                hooked.exchange(entry, function);
            }
        }
    }
}

/// Returns the provider's function that polls, given what is called instead.
pub(crate) fn provider_of_poll(function: *mut c_void) -> *mut c_void {
    let all = [&POLLS, &EXTENDED_POLLS, &NEXT_POLLS];
    all.iter()
        .fold(function, |function, hooked| hooked.provider_of(function))
}

/// A completion that was polled.
struct Polled {
    wr_id: u64,
    status: u32,
    /// Undefined of a failed one, as the length is.
    opcode: u32,
    bytes: Option<u32>,
    number: Option<u32>,
}

/// Records completions; what is pending before if there are none.
///
/// # Safety
/// The queue must exist, and its context must be open.
unsafe fn polled(queue: *mut c_void, completions: impl Iterator<Item = Polled>) {
    let Some(recorder) = current() else { return };
    let _scope = internal::enter();
    // SAFETY: guaranteed by the caller.
    let (handle, fd) = unsafe { hooks::completion_queue(queue) };
    let (time, mut has_failed) = (now(), false);
    let lines: Vec<String> = completions
        .map(|it| {
            let line = Object::new()
                .text("type", "completion")
                .raw("time", time)
                .raw("thread", thread())
                .raw("context", fd)
                .raw("cq", handle);
            let line = match it.number {
                Some(number) => line.raw("qp", number),
                None => line,
            };
            let line = line.raw("wr_id", it.wr_id);
            let line = match it.status {
                0 => line.raw("opcode", names::completed_operation(it.opcode)),
                _ => line,
            };
            let line = line.raw("status", names::status(it.status));
            has_failed |= it.status != 0;
            match it.bytes.filter(|_| it.status == 0) {
                Some(bytes) => line.raw("bytes", bytes).end(),
                None => line.end(),
            }
        })
        .collect();
    recorder.append(&lines, has_failed);
}

/// Called after a poll that has found nothing: a program that waits next leaves nothing pending.
fn found_nothing() {
    if let Some(recorder) = current().filter(|it| it.has_pending.load(Ordering::Relaxed)) {
        recorder.flush();
    }
}

unsafe extern "C" fn poll<const N: usize>(
    queue: *mut c_void,
    max: c_int,
    completions: *mut c_void,
) -> c_int {
    // SAFETY: the address of a provider's function of this type, stored before this function
    // was put into a table.
    let provider: PollCq = unsafe { std::mem::transmute(POLLS.function(N)) };
    // SAFETY: guaranteed by the caller.
    let found = unsafe { provider(queue, max, completions) };
    match usize::try_from(found) {
        Ok(0) => found_nothing(),
        Ok(count) => {
            let completion = |number| {
                // SAFETY: the provider has written so many.
                let wc = unsafe { &*completions.cast::<Wc>().add(number) };
                Polled {
                    wr_id: wc.wr_id,
                    status: wc.status,
                    opcode: wc.opcode,
                    bytes: Some(wc.byte_len),
                    number: Some(wc.qp_num),
                }
            };
            // SAFETY: the program passes a queue.
            unsafe { polled(queue, (0..count).map(completion)) };
        }
        Err(_) => {}
    }
    found
}

/// Records the current completion of an extended queue, whose lock the provider holds.
///
/// # Safety
/// The queue must exist, have a current completion, and its context must be open.
unsafe fn record_current(queue: *mut c_void) {
    // SAFETY: guaranteed by the caller. The functions read the current completion.
    unsafe {
        let cq = queue.cast::<Cq>();
        let status = (*cq).status as u32;
        let read = |function: Option<hooks::ReadCompletion>| function.map(|it| it(queue));
        let completion = Polled {
            wr_id: (*cq).wr_id,
            status,
            opcode: read((*cq).read_opcode.filter(|_| status == 0)).unwrap_or_default(),
            bytes: read((*cq).read_byte_len.filter(|_| status == 0)),
            number: read((*cq).read_qp_num),
        };
        polled(queue, [completion].into_iter());
    }
}

unsafe extern "C" fn start_poll<const N: usize>(
    queue: *mut c_void,
    attributes: *mut c_void,
) -> c_int {
    // SAFETY: as in `poll`.
    let provider: StartPoll = unsafe { std::mem::transmute(EXTENDED_POLLS.function(N)) };
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue, attributes) };
    match result {
        // SAFETY: the program passes a queue.
        0 => unsafe { record_current(queue) },
        _ => found_nothing(),
    }
    result
}

unsafe extern "C" fn next_poll<const N: usize>(queue: *mut c_void) -> c_int {
    // SAFETY: as in `poll`.
    let provider: NextPoll = unsafe { std::mem::transmute(NEXT_POLLS.function(N)) };
    // SAFETY: guaranteed by the caller.
    let result = unsafe { provider(queue) };
    if result == 0 {
        // SAFETY: the program passes a queue.
        unsafe { record_current(queue) };
    }
    result
}
