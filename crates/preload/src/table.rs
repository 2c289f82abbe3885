//! The program's descriptors of embedded devices.
//!
//! A descriptor of the program is a duplicate of one that the device keeps, so the program
//! may duplicate and close its own in any order: the device's is closed after the last of
//! them. A byte array marks these descriptors, so that others cost one load.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread;
use std::time::Instant;

use embedded::cause::{PACKET_SOCKET, VerbError};
use embedded::{Descriptors, ObjectChange};
use uverbs::Errno;
use uverbs::kernel::Kernel;

use crate::host;
use crate::internal;
use crate::process::{self, ProcessState};
use crate::real;

/// Exclusive upper bound of the program's descriptors of devices.
const MAX_DESCRIPTORS: usize = 1 << 20;
/// Mark of a descriptor that this library uses itself.
const INTERNAL: u8 = u8::MAX;
/// Mark of a socket for RDMA netlink.
const NETLINK: u8 = u8::MAX - 1;
/// Largest generation, after which numbering starts at 1 again.
const MAX_GENERATION: u8 = NETLINK - 1;

/// Generation of the process in which a number became a descriptor of a device; 0 for other
/// descriptors.
static MARKS: [AtomicU8; MAX_DESCRIPTORS] = [const { AtomicU8::new(0) }; MAX_DESCRIPTORS];
/// One above the largest number that was ever marked.
static MARKED_END: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// A table has displaced objects.
static HAS_DISPLACED: AtomicBool = AtomicBool::new(false);

/// Closes objects whose descriptors have become those of others. Called after commands.
pub(crate) fn close_displaced() {
    if HAS_DISPLACED.load(Ordering::Relaxed) {
        HAS_DISPLACED.store(false, Ordering::Relaxed);
        let displaced = std::mem::take(&mut *ProcessState::current().table.lock_displaced());
        // Not under the lock.
        drop(displaced);
    }
}

/// What a descriptor refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ObjectKind {
    /// An open device, by its number.
    Device(usize),
    /// A completion channel, or asynchronous events.
    Events,
    /// A channel of the connection manager.
    Manager,
}

/// A descriptor of a device, closed with the last one of the program.
pub(crate) struct Object {
    pub(crate) kernel: Arc<dyn Kernel>,
    /// The device's descriptor.
    pub(crate) fd: RawFd,
    pub(crate) kind: ObjectKind,
    /// `O_NONBLOCK` of an event file, whose descriptor never blocks.
    pub(crate) nonblocking: AtomicBool,
}

impl Drop for Object {
    fn drop(&mut self) {
        let _scope = internal::enter();
        // SAFETY: the kernel issued the descriptor; this is its only owner.
        let _ = unsafe { self.kernel.close(self.fd) };
    }
}

/// Result of looking up a descriptor.
pub(crate) enum Lookup {
    /// Not a descriptor of a device.
    Other,
    /// A descriptor of a device of a parent process.
    Stale,
    /// A descriptor of a device of the process that shares its memory with this one (vfork).
    Foreign,
    /// A socket for RDMA netlink. It has no state, so children of fork may use it, too.
    Netlink,
    Open(Arc<Object>),
}

/// The descriptors of a process.
#[derive(Default)]
pub(crate) struct Table {
    open: Mutex<HashMap<RawFd, Arc<Object>>>,
    /// Objects whose descriptors the program has closed by calls that were not seen, which became
    /// known when a command got the number again. The device executes the command, so they are
    /// closed after it ([`close_displaced`]).
    displaced: Mutex<Vec<Arc<Object>>>,
}

fn mark(fd: RawFd) -> Option<&'static AtomicU8> {
    MARKS.get(usize::try_from(fd).ok()?)
}

/// Returns the next generation.
pub(crate) fn next_generation(generation: u8) -> u8 {
    if generation == MAX_GENERATION {
        1
    } else {
        generation + 1
    }
}

/// Looks a number up.
#[inline]
pub(crate) fn find(fd: RawFd) -> Lookup {
    match mark(fd).map_or(0, |mark| mark.load(Ordering::Acquire)) {
        0 | INTERNAL => Lookup::Other,
        NETLINK => Lookup::Netlink,
        generation => find_marked(fd, generation),
    }
}

/// Returns the number of the embedded device that a descriptor of the program is of.
pub(crate) fn embedded_device_of(fd: RawFd) -> Option<usize> {
    match find(fd) {
        Lookup::Open(object) => match object.kind {
            ObjectKind::Device(device) => Some(device),
            _ => None,
        },
        _ => None,
    }
}

/// As above, also of a device of the host if the program is checked on that.
pub(crate) fn device_of(fd: RawFd) -> Option<usize> {
    match host::is_on() {
        true => host::device_of(fd),
        false => embedded_device_of(fd),
    }
}

/// As [`find`], for a program that uses the descriptor: a context or channel that a child of fork
/// has inherited becomes its own.
#[inline]
pub(crate) fn find_for_use(fd: RawFd) -> Lookup {
    match find(fd) {
        Lookup::Stale => find_inherited(fd),
        other => other,
    }
}

#[cold]
fn find_inherited(fd: RawFd) -> Lookup {
    process::adopt_for_use(fd);
    match find(fd) {
        Lookup::Stale => process::report_use_of_parent(),
        other => return other,
    }
    Lookup::Stale
}

#[cold]
fn find_marked(fd: RawFd, generation: u8) -> Lookup {
    let process = ProcessState::current();
    if process.generation != generation {
        return Lookup::Stale;
    }
    if process.is_foreign() {
        return Lookup::Foreign;
    }
    let object = process.table.lock().get(&fd).cloned();
    object.map_or(Lookup::Other, Lookup::Open)
}

/// Returns whether the library itself uses the descriptor.
pub(crate) fn is_internal(fd: RawFd) -> bool {
    mark(fd).is_some_and(|mark| mark.load(Ordering::Relaxed) == INTERNAL)
}

/// Marks a descriptor as used by the library itself, or clears the mark.
pub(crate) fn set_internal(fd: RawFd, internal: bool) {
    if let Some(mark) = mark(fd) {
        if internal {
            MARKED_END.fetch_max(fd as usize + 1, Ordering::Relaxed);
        }
        mark.store(if internal { INTERNAL } else { 0 }, Ordering::Relaxed);
    }
}

/// Marks a socket for RDMA netlink.
pub(crate) fn set_netlink(fd: RawFd) -> Result<(), Errno> {
    let mark = mark(fd).ok_or(Errno::new(libc::EMFILE))?;
    MARKED_END.fetch_max(fd as usize + 1, Ordering::Relaxed);
    mark.store(NETLINK, Ordering::Relaxed);
    Ok(())
}

/// Clears the mark of a descriptor without an object.
pub(crate) fn clear(fd: RawFd) {
    if let Some(mark) = mark(fd) {
        mark.store(0, Ordering::Relaxed);
    }
}

/// Calls `each` with every marked descriptor of a range, and whether the library itself uses
/// it.
pub(crate) fn each_marked(range: std::ops::Range<usize>, mut each: impl FnMut(RawFd, bool)) {
    let end = range.end.min(MARKED_END.load(Ordering::Relaxed));
    let marks = MARKS.get(range.start.min(end)..end).unwrap_or_default();
    for (fd, mark) in (range.start..).zip(marks) {
        match mark.load(Ordering::Relaxed) {
            0 => {}
            mark => each(fd as RawFd, mark == INTERNAL),
        }
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, HashMap<RawFd, Arc<Object>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_displaced(&self) -> MutexGuard<'_, Vec<Arc<Object>>> {
        self.displaced
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns all descriptors; `None` if another thread holds the lock until then.
    pub(crate) fn list(&self, until: Instant) -> Option<Vec<(RawFd, Arc<Object>)>> {
        loop {
            match self.open.try_lock() {
                Ok(open) => {
                    return Some(open.iter().map(|(fd, it)| (*fd, Arc::clone(it))).collect());
                }
                Err(TryLockError::WouldBlock) if Instant::now() < until => thread::yield_now(),
                Err(_) => return None,
            }
        }
    }

    /// Makes a descriptor of the program that of another object.
    pub(crate) fn replace(&self, fd: RawFd, object: Arc<Object>) -> Result<(), Errno> {
        // SAFETY: a query of the descriptor's flags.
        let flags = unsafe { real::fcntl(fd, libc::F_GETFD, 0) };
        let cloexec = if flags & libc::FD_CLOEXEC != 0 {
            libc::O_CLOEXEC
        } else {
            0
        };
        // SAFETY: the device keeps its descriptor open while the object exists; the other is
        // one of a parent's device.
        if flags < 0 || unsafe { real::dup3(object.fd, fd, cloexec) } < 0 {
            return Err(Errno::new(real::errno()));
        }
        self.insert(fd, object)
    }

    /// Creates a new descriptor of the program for an object.
    pub(crate) fn add(&self, object: Arc<Object>, cloexec: bool) -> Result<RawFd, Errno> {
        let command = match cloexec {
            true => libc::F_DUPFD_CLOEXEC,
            false => libc::F_DUPFD,
        };
        // SAFETY: the device keeps its descriptor open while the object exists.
        let fd = unsafe { real::fcntl(object.fd, command, 0) };
        if fd < 0 {
            return Err(Errno::new(real::errno()));
        }
        match self.associate(fd, object) {
            Ok(None) => Ok(fd),
            Ok(Some(before)) => {
                self.lock_displaced().push(before);
                HAS_DISPLACED.store(true, Ordering::Relaxed);
                Ok(fd)
            }
            Err(errno) => {
                // SAFETY: the descriptor was created above.
                unsafe { real::close(fd) };
                Err(errno)
            }
        }
    }

    /// Associates a descriptor with an object. This may close another object: no device is locked.
    pub(crate) fn insert(&self, fd: RawFd, object: Arc<Object>) -> Result<(), Errno> {
        self.associate(fd, object).map(drop)
    }

    /// As above; returns the object of a descriptor that was closed by a call that was not seen.
    fn associate(&self, fd: RawFd, object: Arc<Object>) -> Result<Option<Arc<Object>>, Errno> {
        let mark = mark(fd).ok_or(Errno::new(libc::EMFILE))?;
        let before = self.lock().insert(fd, object);
        MARKED_END.fetch_max(fd as usize + 1, Ordering::Relaxed);
        mark.store(ProcessState::current().generation, Ordering::Release);
        Ok(before)
    }

    /// Removes a descriptor that the program closes, and returns its object, which is closed
    /// with the last reference.
    pub(crate) fn remove(&self, fd: RawFd) -> Option<Arc<Object>> {
        let removed = self.lock().remove(&fd);
        clear(fd);
        removed
    }
}

/// Translates between the descriptors of the program and of a context.
pub(crate) struct ProgramDescriptors {
    /// The context's kernel, which owns this translation.
    pub(crate) kernel: OnceLock<Weak<dyn Kernel>>,
}

impl fmt::Debug for ProgramDescriptors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProgramDescriptors").finish_non_exhaustive()
    }
}

impl Descriptors for ProgramDescriptors {
    fn device(&self, program: RawFd) -> RawFd {
        match find(program) {
            Lookup::Open(object) => object.fd,
            _ => program,
        }
    }

    fn publish(&self, device: RawFd) -> Result<RawFd, Errno> {
        let kernel = self.kernel.get().and_then(Weak::upgrade);
        let object = Object {
            kernel: kernel.ok_or(Errno::new(libc::EIO))?,
            fd: device,
            kind: ObjectKind::Events,
            nonblocking: AtomicBool::new(false),
        };
        let object = Arc::new(object);
        let table = &ProcessState::current().table;
        match table.add(Arc::clone(&object), true) {
            Ok(fd) => Ok(fd),
            Err(errno) => {
                // On this error the device closes its descriptor itself.
                std::mem::forget(object);
                Err(errno)
            }
        }
    }

    fn command_refused(&self, error: &VerbError) {
        if error.what == PACKET_SOCKET && error.errno().raw() == libc::EPERM {
            process::report_missing_right();
        }
        crate::explain::command_refused(error);
    }

    fn queue_created(&self, user_handle: u64) {
        crate::hooks::queue_created(user_handle);
    }

    fn object_changed(&self, change: &ObjectChange) {
        crate::explain::object_changed(change);
    }
}
