//! The devices and descriptors of this process.
//!
//! A child of fork begins with none: the thread that drives the devices is not in
//! it, and locks may have been held. What it inherits is never touched.

use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};

use embedded::{Drive, Embedded, Network};
use uverbs::kernel::Kernel;
use uverbs::{Errno, Error};

use crate::config::{self, complain};
use crate::table::{self, Kind, Object, Program, Table};
use crate::{fault, own};

static CURRENT: AtomicPtr<World> = AtomicPtr::new(ptr::null_mut());
static GENERATION: AtomicU8 = AtomicU8::new(1);

/// The devices and descriptors of a process.
pub(crate) struct World {
    pub(crate) table: Table,
    /// Differs from that of the processes of which this one is a child.
    pub(crate) generation: u8,
    process: libc::pid_t,
    devices: Mutex<Option<&'static [Embedded]>>,
    /// The same, to be read without a lock.
    ready: OnceLock<&'static [Embedded]>,
}

fn process() -> libc::pid_t {
    // SAFETY: a call without arguments.
    unsafe { libc::getpid() }
}

/// Runs in a child of fork: only atomics and close(2).
extern "C" fn forked() {
    // The parent's world stays as it is: its locks may be taken.
    CURRENT.store(ptr::null_mut(), Ordering::Relaxed);
    let generation = GENERATION.load(Ordering::Relaxed);
    GENERATION.store(table::next_generation(generation), Ordering::Relaxed);
    table::each_marked(0..usize::MAX, |fd, own| {
        if own {
            // So that the parent's place in the network and its sockets end with it.
            // SAFETY: the device of which this is a descriptor is the parent's, and
            // not used here.
            unsafe { crate::real::close(fd) };
            table::clear(fd);
        }
    });
}

impl World {
    /// Returns that of this process.
    pub(crate) fn current() -> &'static Self {
        static FORKS: Once = Once::new();
        let current = CURRENT.load(Ordering::Acquire);
        if !current.is_null() {
            // SAFETY: worlds are never freed.
            return unsafe { &*current };
        }
        // SAFETY: the handler may be called in any child.
        FORKS.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(forked)) });
        let new = Box::into_raw(Box::new(Self {
            table: Table::default(),
            generation: GENERATION.load(Ordering::Relaxed),
            process: process(),
            devices: Mutex::new(None),
            ready: OnceLock::new(),
        }));
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        match CURRENT.compare_exchange(ptr::null_mut(), new, success, failure) {
            // SAFETY: worlds are never freed once they are current.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: made above, and not current: another thread was first.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: worlds are never freed.
                unsafe { &*other }
            }
        }
    }

    /// Returns whether this process only shares the memory of the one whose devices
    /// these are, until it calls exec.
    pub(crate) fn is_foreign(&self) -> bool {
        self.process != process()
    }

    /// Returns the devices. The first call joins the network.
    pub(crate) fn devices(&self) -> Result<&'static [Embedded], Errno> {
        if let Some(devices) = self.ready.get() {
            return Ok(devices);
        }
        let mut made = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(devices) = *made {
            return Ok(devices);
        }
        let _inside = own::enter();
        let devices = join()?;
        *made = Some(devices);
        // Nobody else sets it: the lock is held.
        let _ = self.ready.set(devices);
        Ok(devices)
    }

    /// Opens a device.
    pub(crate) fn open_device(&self, number: usize, cloexec: bool) -> Result<RawFd, Errno> {
        let devices = self.devices()?;
        let _inside = own::enter();
        let device = devices.get(number).ok_or(Errno::new(libc::ENXIO))?;
        let program = Arc::new(Program {
            kernel: OnceLock::new(),
        });
        let (kernel, fd) = device.open(Arc::<Program>::clone(&program))?;
        // Nobody else sets it.
        let _ = program.kernel.set(Arc::downgrade(&kernel));
        self.add(kernel, fd, Kind::Device(number), cloexec)
    }

    /// Opens a channel of the connection manager. Its ids are on the first device.
    pub(crate) fn open_manager(&self, cloexec: bool) -> Result<RawFd, Errno> {
        let devices = self.devices()?;
        let _inside = own::enter();
        let device = devices.first().ok_or(Errno::new(libc::ENXIO))?;
        let kernel: Arc<dyn Kernel> = Arc::from(device.connection_manager());
        let fd = kernel.open(c"/dev/infiniband/rdma_cm", libc::O_RDWR)?;
        self.add(kernel, fd, Kind::Manager, cloexec)
    }

    fn add(
        &self,
        kernel: Arc<dyn Kernel>,
        fd: RawFd,
        kind: Kind,
        cloexec: bool,
    ) -> Result<RawFd, Errno> {
        let nonblocking = AtomicBool::new(false);
        let object = Object {
            kernel,
            fd,
            kind,
            nonblocking,
        };
        self.table.add(Arc::new(object), cloexec)
    }
}

/// Returns a device of this process, if there are any: all are driven together.
#[inline]
fn any() -> Option<&'static Embedded> {
    let current = CURRENT.load(Ordering::Acquire);
    if current.is_null() {
        return None;
    }
    // SAFETY: worlds are never freed.
    unsafe { &*current }.ready.get()?.first()
}

/// Called before the program waits for events: wakes the devices if they sleep, since
/// the stock providers do not.
#[inline]
pub(crate) fn about_to_wait() {
    if let Some(device) = any().filter(|_| !own::is_inside()) {
        device.notify_doorbell();
    }
}

/// Called when a poll has found nothing: works for the devices, or sleeps.
pub(crate) fn idle() {
    if let Some(device) = any() {
        let _inside = own::enter();
        device.idle();
    }
}

/// Called when a poll has found something.
pub(crate) fn found() {
    if let Some(device) = any() {
        device.poll_succeeded();
    }
}

/// Joins the network and creates the devices. They exist until the process ends.
fn join() -> Result<&'static [Embedded], Errno> {
    let config = config::get().ok_or(Errno::new(libc::ENOENT))?;
    let failed = |error: Error| {
        let (errno, reason) = match &error {
            Error::Refused { errno, .. } if errno.raw() == libc::EUSERS => {
                (*errno, "32 processes use it already".to_owned())
            }
            Error::Refused { errno, .. } => (*errno, error.to_string()),
            Error::Invalid { what, .. } => (Errno::new(libc::EACCES), (*what).to_owned()),
            _ => (Errno::new(libc::EIO), error.to_string()),
        };
        match &config.host {
            Some(host) => complain(&format!("{host}: {reason}")),
            None => complain(&format!("{}: {reason}", config.directory.display())),
        }
        errno
    };
    embedded::at_thread_start(own::enter_for_good);
    fault::install();
    // C providers do not call `rung`.
    let network = match &config.host {
        Some(host) => Network::roce(Drive::Watch, host),
        None => Network::joined(Drive::Watch, &config.directory),
    };
    let network = network.map_err(failed)?;
    let devices = config.profiles.iter();
    let devices = devices.map(|profile| network.device(profile).map_err(failed));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    Ok(devices.leak())
}
