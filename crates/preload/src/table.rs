//! The program's descriptors of embedded devices.
//!
//! A descriptor of the program is a duplicate of one that the device keeps, so the
//! program may duplicate and close its own in any order: the device's is closed after
//! the last of them. Whether a number is one of these is a byte of an array, so other
//! descriptors cost one load.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use embedded::Descriptors;
use uverbs::Errno;
use uverbs::kernel::Kernel;

use crate::own;
use crate::real;
use crate::world::World;

/// Numbers of descriptors that can be the program's. Larger ones are not given out.
const LIMIT: usize = 1 << 20;
/// Mark of a descriptor that this library uses itself.
const OWN: u8 = u8::MAX;
/// Last generation; then they begin at 1 again.
const LAST: u8 = OWN - 1;

/// The generation of the process in which a number became a descriptor of the
/// program; 0 for others.
static MARKS: [AtomicU8; LIMIT] = [const { AtomicU8::new(0) }; LIMIT];
/// One above the largest number that was ever marked.
static MARKED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// What a descriptor refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
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
    pub(crate) kind: Kind,
    /// `O_NONBLOCK` of an event file, whose descriptor never blocks.
    pub(crate) nonblocking: AtomicBool,
}

impl Drop for Object {
    fn drop(&mut self) {
        let _inside = own::enter();
        // SAFETY: the kernel issued the descriptor; this is its only owner.
        let _ = unsafe { self.kernel.close(self.fd) };
    }
}

/// What is known of a number.
pub(crate) enum Lookup {
    /// It is none of the program's descriptors of devices.
    Other,
    /// It was one in the process of which this one is a child.
    Stale,
    /// It is one of the process whose memory this one shares, after vfork.
    Foreign,
    Open(Arc<Object>),
}

/// The descriptors of a process.
#[derive(Default)]
pub(crate) struct Table {
    open: Mutex<HashMap<RawFd, Arc<Object>>>,
}

fn mark(fd: RawFd) -> Option<&'static AtomicU8> {
    MARKS.get(usize::try_from(fd).ok()?)
}

/// Returns the generation after another one.
pub(crate) fn next_generation(generation: u8) -> u8 {
    if generation == LAST {
        1
    } else {
        generation + 1
    }
}

/// Looks a number up.
#[inline]
pub(crate) fn find(fd: RawFd) -> Lookup {
    match mark(fd).map_or(0, |mark| mark.load(Ordering::Acquire)) {
        0 | OWN => Lookup::Other,
        generation => find_marked(fd, generation),
    }
}

#[cold]
fn find_marked(fd: RawFd, generation: u8) -> Lookup {
    let world = World::current();
    if world.generation != generation {
        return Lookup::Stale;
    }
    if world.is_foreign() {
        return Lookup::Foreign;
    }
    let object = world.table.lock().get(&fd).cloned();
    object.map_or(Lookup::Other, Lookup::Open)
}

/// Returns whether this library uses the descriptor itself.
pub(crate) fn is_own(fd: RawFd) -> bool {
    mark(fd).is_some_and(|mark| mark.load(Ordering::Relaxed) == OWN)
}

/// Notes that this library uses a descriptor itself, or has closed it.
pub(crate) fn set_own(fd: RawFd, own: bool) {
    if let Some(mark) = mark(fd) {
        if own {
            MARKED.fetch_max(fd as usize + 1, Ordering::Relaxed);
        }
        mark.store(if own { OWN } else { 0 }, Ordering::Relaxed);
    }
}

/// Forgets a number that is stale.
pub(crate) fn clear(fd: RawFd) {
    if let Some(mark) = mark(fd) {
        mark.store(0, Ordering::Relaxed);
    }
}

/// Calls `each` with every marked number of a range, and whether this library uses
/// it itself.
pub(crate) fn each_marked(range: std::ops::Range<usize>, mut each: impl FnMut(RawFd, bool)) {
    let end = range.end.min(MARKED.load(Ordering::Relaxed));
    let marks = MARKS.get(range.start.min(end)..end).unwrap_or_default();
    for (fd, mark) in (range.start..).zip(marks) {
        match mark.load(Ordering::Relaxed) {
            0 => {}
            mark => each(fd as RawFd, mark == OWN),
        }
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, HashMap<RawFd, Arc<Object>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a new descriptor of the program for an object.
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
        match self.insert(fd, object) {
            Ok(()) => Ok(fd),
            Err(errno) => {
                // SAFETY: the descriptor was made above.
                unsafe { real::close(fd) };
                Err(errno)
            }
        }
    }

    /// Notes that a number refers to an object now.
    pub(crate) fn insert(&self, fd: RawFd, object: Arc<Object>) -> Result<(), Errno> {
        let mark = mark(fd).ok_or(Errno::new(libc::EMFILE))?;
        let before = self.lock().insert(fd, object);
        MARKED.fetch_max(fd as usize + 1, Ordering::Relaxed);
        mark.store(World::current().generation, Ordering::Release);
        // Closes the device's descriptor, perhaps: not under the lock.
        drop(before);
        Ok(())
    }

    /// Forgets a number that the program closes. What it referred to is closed when
    /// the result is dropped.
    pub(crate) fn remove(&self, fd: RawFd) -> Option<Arc<Object>> {
        let removed = self.lock().remove(&fd);
        clear(fd);
        removed
    }
}

/// The descriptors of a context, as its program knows them.
pub(crate) struct Program {
    /// The context's kernel, which refers to this.
    pub(crate) kernel: OnceLock<Weak<dyn Kernel>>,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").finish_non_exhaustive()
    }
}

impl Descriptors for Program {
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
            kind: Kind::Events,
            nonblocking: AtomicBool::new(false),
        };
        let object = Arc::new(object);
        let table = &World::current().table;
        match table.add(Arc::clone(&object), true) {
            Ok(fd) => Ok(fd),
            Err(errno) => {
                // The device closes its descriptor itself.
                std::mem::forget(object);
                Err(errno)
            }
        }
    }
}
