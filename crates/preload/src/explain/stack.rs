//! Call stacks: captured as addresses, and symbolised when they are reported.
//!
//! Frames of this library, of libibverbs, librdmacm and providers are left out at the beginning, so
//! that a stack begins where the program calls RDMA.

use std::ffi::CStr;
use std::fmt;
use std::path::Path;

use crate::hooks::file_of;

/// Maximum number of captured frames, and of reported ones.
const MAX_CAPTURED: usize = 32;
const MAX_REPORTED: usize = 8;

/// Beginnings of names of libraries whose frames are left out at the beginning of a stack.
const LEFT_OUT: [&str; 4] = ["libibverbs", "libmlx5", "libringverbs", "librdmacm"];

/// Crates of Rust programs, which make system calls in place of libibverbs.
const CRATES: [&str; 6] = [
    "ringverbs",
    "ringverbs_uverbs",
    "ringverbs_mlx5",
    "ringverbs_rxe",
    "ringverbs_ring",
    "ringverbs_rdmacm",
];
/// Crates whose functions these call, and are called by.
const STANDARD: [&str; 3] = ["core", "alloc", "std"];

/// Addresses to which calls return, innermost first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stack(Vec<usize>);

impl Stack {
    /// Captures the stack of this thread.
    pub(crate) fn capture() -> Self {
        let mut addresses = Vec::with_capacity(MAX_CAPTURED);
        Self::walk(|address| {
            addresses.push(address);
            addresses.len() < MAX_CAPTURED
        });
        Self(addresses)
    }

    /// Calls `each` for the addresses of the frames of this thread, innermost first, until it
    /// returns false. Allocates nothing.
    pub(crate) fn walk(mut each: impl FnMut(usize) -> bool) {
        // SAFETY: on Unix, unwinding needs no synchronisation.
        unsafe {
            backtrace::trace_unsynchronized(|frame| {
                // Beyond the first frame of a thread there may be an address of 0.
                let address = frame.ip().expose_provenance();
                address != 0 && each(address)
            });
        }
    }

    /// Returns a stack that was captured by [`Self::walk`].
    pub(crate) fn of(addresses: Vec<usize>) -> Self {
        Self(addresses)
    }

    /// Returns a number of the place in the program, the same for calls from there.
    pub(crate) fn site(&self) -> usize {
        let mut addresses = self.0.iter().copied();
        addresses
            .find(|address| !is_left_out(*address))
            .unwrap_or_default()
    }

    /// Returns the addresses to tell calls by different ways apart: in Rust all system calls are
    /// made at one place.
    pub(crate) fn addresses(&self) -> &[usize] {
        &self.0
    }

    /// Returns the frames from the program's call of RDMA on, up to `main` or a thread's function.
    pub(crate) fn frames(&self, symbols: &mut Symbols) -> Vec<Frame> {
        let program = self.0.iter().skip_while(|address| is_left_out(**address));
        let mut frames = Vec::new();
        let mut reported = 0;
        let mut is_before_program = true;
        for address in program.take_while(|address| **address != 0) {
            let before = frames.len();
            symbols.resolve(*address, &mut frames);
            if frames.last().is_some_and(Frame::starts_thread) {
                frames.pop();
                break;
            }
            let last = frames.last().and_then(|frame| frame.function.as_deref());
            if is_before_program && last.is_some_and(|it| is_of(it, &CRATES)) {
                frames.clear();
                reported = 0;
                continue;
            }
            // Generic functions may have no crate in their names.
            let has_crate = |it: &str| it.split('<').next().is_some_and(|name| name.contains("::"));
            let may_be_before = |it: &str| is_of(it, &STANDARD) || !has_crate(it);
            is_before_program &= last.is_some_and(may_be_before);
            // Callers of a `main` that has no symbol.
            if last.is_some_and(|it| it.starts_with("__libc_start")) {
                frames.truncate(before);
                break;
            }
            reported += 1;
            if last == Some("main") || reported == MAX_REPORTED {
                break;
            }
        }
        // libibverbs has functions in its header, which call the provider.
        let is_of_header = |frame: &&Frame| {
            let file = frame.line.as_ref().map(|(file, _)| Path::new(file));
            file.is_some_and(|file| file.ends_with("infiniband/verbs.h"))
        };
        let before = frames.iter().take_while(is_of_header).count();
        if before < frames.len() {
            frames.drain(..before);
        }
        frames
    }
}

/// Returns the file that contains an address: its name, and where it is loaded.
fn module(address: usize) -> Option<(String, usize)> {
    let found = file_of(std::ptr::with_exposed_provenance(address))?;
    if found.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of a file that is loaded.
    let name = unsafe { CStr::from_ptr(found.dli_fname) }.to_string_lossy();
    Some((name.into_owned(), found.dli_fbase.addr()))
}

/// Returns the last component of a path.
fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns whether an address is in this library, libibverbs or a provider.
fn is_left_out(address: usize) -> bool {
    let Some((name, base)) = module(address) else {
        return false;
    };
    let own = module(is_left_out as *const () as usize).map(|(_, base)| base);
    let name = file_name(&name);
    own == Some(base) || LEFT_OUT.iter().any(|beginning| name.starts_with(beginning))
}

/// Returns whether a function is of one of several crates.
fn is_of(function: &str, crates: &[&str]) -> bool {
    // With its type, if it is a method of a trait.
    let name = function.trim_start_matches('<').split("::").next();
    name.is_some_and(|name| crates.contains(&name))
}

/// A frame of a call stack.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    /// The address to which the call returns.
    pub(crate) address: usize,
    /// The executable or library, and the offset in it.
    pub(crate) module: String,
    pub(crate) offset: usize,
    /// The function, if there are symbols.
    pub(crate) function: Option<String>,
    /// The line, if there is debug information.
    pub(crate) line: Option<(String, u32)>,
}

impl Frame {
    /// Returns whether it is one of the C library, which calls a thread's function.
    fn starts_thread(&self) -> bool {
        let function = self.function.as_deref();
        self.module.starts_with("libc.so")
            && function.is_some_and(|it| ["start_thread", "clone", "clone3"].contains(&it))
    }
}

/// The right to symbolise, which one thread at a time has: there is one in a process.
#[derive(Debug)]
pub(crate) struct Symbols(());

impl Symbols {
    /// # Safety
    /// There is no other one in this process.
    pub(crate) const unsafe fn new() -> Self {
        Self(())
    }

    /// Adds the frame of an address, and those of functions that are inlined there.
    fn resolve(&mut self, address: usize, frames: &mut Vec<Frame>) {
        let (module, base) = module(address).unwrap_or_default();
        let frame = Frame {
            address,
            module: file_name(&module).to_owned(),
            offset: address.wrapping_sub(base),
            ..Frame::default()
        };
        let before = frames.len();
        // It looks one byte before the address to which the call returns, which is the call.
        let call = std::ptr::without_provenance_mut(address);
        // SAFETY: this is the only `Symbols`, and borrowed. The address is looked up, not read.
        unsafe {
            backtrace::resolve_unsynchronized(call, |symbol| {
                let function = symbol.name().map(|name| format!("{name:#}"));
                let file = symbol.filename().map(|file| file.display().to_string());
                frames.push(Frame {
                    function,
                    line: file.zip(symbol.lineno()),
                    ..frame.clone()
                });
            });
        }
        if frames.len() == before {
            frames.push(frame);
        }
    }
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.function, &self.line) {
            (Some(function), Some((file, line))) => {
                write!(f, "{function} ({}:{line})", file_name(file))
            }
            (Some(function), None) => {
                write!(f, "{function} ({}+{:#x})", self.module, self.offset)
            }
            (None, _) if self.module.is_empty() => write!(f, "{:#x}", self.address),
            (None, _) => write!(f, "{}+{:#x}", self.module, self.offset),
        }
    }
}
