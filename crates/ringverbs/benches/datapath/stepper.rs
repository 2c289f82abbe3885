//! Exact counts of instructions: the processor stops after each one.

use std::arch::asm;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What an operation took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Instructions.
    pub instructions: usize,
    /// Locked ones, `xchg` with memory included.
    pub locked: usize,
}

const MOST: usize = 1 << 16;

/// Where each instruction was.
struct Trace(UnsafeCell<[usize; MOST]>);

// SAFETY: one thread counts at a time, and reads only between two counts.
unsafe impl Sync for Trace {}

static TRACE: Trace = Trace(UnsafeCell::new([0; MOST]));
static LENGTH: AtomicUsize = AtomicUsize::new(0);

/// Takes the address of the next instruction down.
extern "C" fn stepped(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel's, for the time of the handler.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    let at = LENGTH.load(Ordering::Relaxed);
    if at < MOST {
        let address = context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
        // SAFETY: the one thread that counts is stopped here.
        unsafe { (*TRACE.0.get())[at] = address };
        LENGTH.store(at + 1, Ordering::Relaxed);
    }
}

/// The addresses of the instructions that `f` executes, and the few around it.
fn trace<R>(f: impl FnOnce() -> R) -> (&'static [usize], R) {
    // SAFETY: the handler keeps to what may be done in one; the flag is the
    // processor's trap flag, which raises SIGTRAP after each instruction.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = stepped as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGTRAP, &action, std::ptr::null_mut());
        LENGTH.store(0, Ordering::Relaxed);
        asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq");
        let result = f();
        asm!("pushfq", "and qword ptr [rsp], ~0x100", "popfq");
        result
    };
    let length = LENGTH.load(Ordering::Relaxed);
    assert!(length < MOST, "more instructions than can be counted");
    // SAFETY: nothing is written until the next count.
    let trace = unsafe { &(&*TRACE.0.get())[..length] };
    (trace, result)
}

/// Whether the instruction at that address locks the bus.
fn is_locked(address: usize) -> bool {
    // SAFETY: an instruction that was executed: up to 15 bytes of code, of which
    // those that are looked at belong to it.
    let byte = |at: usize| unsafe { ((address + at) as *const u8).read() };
    let mut at = 0;
    while [0x66, 0x67, 0xf2, 0xf3, 0x2e, 0x36, 0x3e, 0x26, 0x64, 0x65].contains(&byte(at)) {
        at += 1;
    }
    if byte(at) == 0xf0 {
        return true;
    }
    if byte(at) & 0xf0 == 0x40 {
        at += 1;
    }
    matches!(byte(at), 0x86 | 0x87) && byte(at + 1) < 0xc0
}

/// Counts what `f` executes, and prints where that is if asked to.
pub fn count<R>(print: bool, f: impl FnOnce() -> R) -> (Count, R) {
    let (around, ()) = trace(|| ());
    let around = around.len();
    let (trace, result) = trace(f);
    if print {
        let base = base();
        for address in trace {
            println!("step {:x}", address - base);
        }
    }
    let count = Count {
        instructions: trace.len() - around,
        locked: trace.iter().filter(|&&address| is_locked(address)).count(),
    };
    (count, result)
}

/// Where this program begins.
fn base() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let first = maps.split('-').next().unwrap_or_default();
    usize::from_str_radix(first, 16).unwrap_or_default()
}
