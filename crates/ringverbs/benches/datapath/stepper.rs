//! Exact counts of instructions by single-stepping.
//!
//! What is counted is what `provider-plugin/bench/stepper.c` counts of the C
//! program: instructions of the stand-in for the kernel are left out, and a
//! string instruction that repeats itself counts once.

use std::arch::asm;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What some calls took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Instructions.
    pub instructions: usize,
    /// Locked ones, `xchg` with memory included.
    pub locked: usize,
    /// lfence, mfence and sfence.
    pub fences: usize,
}

const MOST: usize = 1 << 17;
const LEFT_OUT: &str = "standin.so";

/// The address of each instruction.
struct Trace(UnsafeCell<[usize; MOST]>);

// SAFETY: one thread counts at a time, and reads only between two counts.
unsafe impl Sync for Trace {}

static TRACE: Trace = Trace(UnsafeCell::new([0; MOST]));
static LENGTH: AtomicUsize = AtomicUsize::new(0);

/// Records the address of the next instruction.
extern "C" fn record_instruction(
    _: libc::c_int,
    _: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
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

/// The addresses of the instructions that `run` executes, and the few around
/// it, which are the same of every `run`.
#[inline(never)]
fn trace<T>(run: fn(&mut T), on: &mut T) -> &'static [usize] {
    // SAFETY: the handler keeps to what may be done in one; the flag is the
    // processor's trap flag, which raises SIGTRAP after each instruction.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = record_instruction as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        libc::sigaction(libc::SIGTRAP, &action, std::ptr::null_mut());
        LENGTH.store(0, Ordering::Relaxed);
        asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq");
        run(on);
        asm!("pushfq", "and qword ptr [rsp], ~0x100", "popfq");
    }
    let length = LENGTH.load(Ordering::Relaxed);
    assert!(length < MOST, "more instructions than can be counted");
    // SAFETY: nothing is written until the next count.
    unsafe { &(&*TRACE.0.get())[..length] }
}

/// The type of an instruction.
#[derive(Default)]
struct Kind {
    locked: bool,
    fence: bool,
    repeated: bool,
}

/// Decodes the type of the instruction at an address.
fn kind(address: usize) -> Kind {
    // SAFETY: an instruction that was executed: up to 15 bytes of code, of which
    // those that are looked at belong to it.
    let byte = |at: usize| unsafe { ((address + at) as *const u8).read() };
    let (mut at, mut kind, mut rep) = (0, Kind::default(), false);
    loop {
        match byte(at) {
            0xf0 => kind.locked = true,
            0xf2 | 0xf3 => rep = true,
            0x66 | 0x67 | 0x2e | 0x36 | 0x3e | 0x26 | 0x64 | 0x65 => {}
            _ => break,
        }
        at += 1;
    }
    if byte(at) & 0xf0 == 0x40 {
        at += 1;
    }
    match byte(at) {
        // xchg with memory locks without a prefix
        0x86 | 0x87 => kind.locked |= byte(at + 1) < 0xc0,
        0x0f => kind.fence = byte(at + 1) == 0xae && byte(at + 2) >= 0xe8,
        // movs, cmps, stos, lods, scas
        0xa4..=0xa7 | 0xaa..=0xaf => kind.repeated = rep,
        _ => {}
    }
    kind
}

/// A file that is mapped, or a part of it.
struct Module {
    from: usize,
    to: usize,
    name: String,
}

fn modules() -> Vec<Module> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc");
    let hex = |text: &str| usize::from_str_radix(text, 16).ok();
    let module = |line: &str| {
        let mut words = line.split_whitespace();
        let (from, to) = words.next()?.split_once('-')?;
        Some(Module {
            from: hex(from)?,
            to: hex(to)?,
            name: words.nth(4).unwrap_or("?").to_owned(),
        })
    };
    maps.lines().filter_map(module).collect()
}

/// Counts what `run` executes, and prints where that is if asked to, each
/// instruction's address in its file.
pub fn count<T>(print: bool, run: fn(&mut T), on: &mut T) -> Count {
    let modules = modules();
    let mut count = Count::default();
    let mut before = 0;
    for &address in trace(run, on) {
        let module = modules.iter().find(|m| (m.from..m.to).contains(&address));
        let name = module.map_or("?", |module| &module.name);
        let kind = kind(address);
        let again = kind.repeated && address == before;
        if !name.contains(LEFT_OUT) && !again {
            count.instructions += 1;
            count.locked += usize::from(kind.locked);
            count.fences += usize::from(kind.fence);
            if print {
                let first = modules.iter().find(|module| module.name == name);
                let base = first.map_or(0, |module| module.from);
                println!("step {:#x} {name}", address - base);
            }
        }
        before = address;
    }
    count
}
