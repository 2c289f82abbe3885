//! Devices, the networks that connect them, and how they are driven.

use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use softhca::Settings;
use softhca::fabric::Fabric;
use softhca::packet::Pool;
use softhca::profile::{PROFILES, Profile};
use uverbs::discovery::DriverId;
use uverbs::{Command, Context, Errno, Error};

use crate::directory::{Directory, Sharing};
use crate::files::{ContextFile, File};
use crate::kernel::EmbeddedKernel;
use crate::runner::Runner;
use crate::state::State;
use crate::{Result, refuse};

/// What runs the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drive {
    /// A dedicated thread. It spins for some ten microseconds after the last
    /// activity, then sleeps for growing intervals of at most a millisecond. A
    /// command, or waiting for an event through the context, wakes it. While
    /// there are no queues it sleeps indefinitely.
    #[default]
    Thread,
    /// The caller, through [`Embedded::drive`]. The engine makes no progress
    /// otherwise, except while a thread waits for an event through the context.
    Caller,
}

/// A set of devices that can reach each other.
///
/// A handle: clones refer to the same network. The devices exist as long as the
/// network, and the network as long as any handle of it, of a device or of a
/// context.
#[derive(Clone)]
pub struct Network {
    runner: Arc<Runner>,
}

/// A software HCA in this process.
///
/// A handle: clones refer to the same device. Usable from any thread.
#[derive(Clone)]
pub struct Embedded {
    pub(crate) device: Arc<Device>,
    pub(crate) runner: Arc<Runner>,
}

/// A device, shared by the threads that give it commands and the one that
/// drives it.
pub(crate) struct Device {
    state: Mutex<State>,
    /// Number of threads that wait for the lock to run a command.
    waiting: AtomicUsize,
    number: usize,
}

fn refused(command: Command) -> impl Fn(Errno) -> Error {
    move |errno| Error::Refused {
        command,
        handle: None,
        errno,
    }
}

impl Network {
    /// Creates a network without devices.
    ///
    /// # Errors
    /// EAGAIN and similar if a thread cannot be created.
    pub fn new(drive: Drive) -> std::result::Result<Self, Error> {
        Self::made(drive, None)
    }

    /// Creates a network without devices that is shared with other processes:
    /// those that name the same directory, in which each process has a socket.
    /// If the directory does not exist it is created, accessible to this user
    /// only. An existing one must belong to this user or root, must not be
    /// writable by others, and must not be a symbolic link; so only this user
    /// and root can participate. Requires `/proc`.
    ///
    /// Input from other processes is as untrusted as that from any network: it
    /// can only reach what a queue pair or a key permits. A process that has
    /// ended, for whatever reason, no longer responds.
    ///
    /// # Errors
    /// [`Error::Invalid`], with what to do, if the directory belongs to another
    /// user, is writable by others, or is a symbolic link; EUSERS if 32
    /// processes already participate; errors of creating files and sockets
    /// there; and those of [`new`](Self::new).
    pub fn joined(drive: Drive, directory: &Path) -> std::result::Result<Self, Error> {
        Self::joined_with(drive, directory, Sharing::Own)
    }

    /// As [`joined`](Self::joined), for a directory that may be shared with
    /// other users.
    ///
    /// # Errors
    /// As [`joined`](Self::joined).
    pub fn joined_with(
        drive: Drive,
        directory: &Path,
        sharing: Sharing,
    ) -> std::result::Result<Self, Error> {
        Self::made(drive, Some(Directory::open(directory, sharing)?))
    }

    fn made(drive: Drive, directory: Option<Directory>) -> std::result::Result<Self, Error> {
        let directory = directory.map(Arc::new);
        let runner = Runner::new(Fabric::new(1), Pool::new(), drive, directory);
        let runner = runner.map_err(refused(Command::Open))?;
        Ok(Self { runner })
    }

    /// Adds a device with a profile ([`profiles`](Self::profiles)). Each device
    /// has addresses of its own.
    ///
    /// # Errors
    /// ENODEV if the profile does not exist; ENOMEM.
    pub fn device(&self, profile: &str) -> std::result::Result<Embedded, Error> {
        self.add(profile, false).map_err(refused(Command::Open))
    }

    /// As [`device`](Self::device), with a strict device: reserved fields that
    /// are set, and work requests that contradict their queue, are recorded as
    /// complaints ([`Embedded::complaints`]) and are errors.
    ///
    /// # Errors
    /// As [`device`](Self::device).
    pub fn strict_device(&self, profile: &str) -> std::result::Result<Embedded, Error> {
        self.add(profile, true).map_err(refused(Command::Open))
    }

    fn add(&self, profile: &str, strict: bool) -> Result<Embedded> {
        let Some(profile) = Profile::named(profile) else {
            return refuse(libc::ENODEV);
        };
        let device = self.runner.add(|number, fabric, pool| {
            // There are fewer device numbers than LIDs.
            let number = u16::try_from(number).ok().filter(|number| *number < 0x4000);
            let number = number.ok_or(Errno::new(libc::ENOMEM))?;
            let settings = Settings {
                strict,
                ..Settings::numbered(profile, number)
            };
            let state = State::new(settings, fabric, pool)?;
            Ok(Arc::new(Device {
                state: Mutex::new(state),
                waiting: AtomicUsize::new(0),
                number: number.into(),
            }))
        })?;
        Ok(Embedded {
            device,
            runner: Arc::clone(&self.runner),
        })
    }

    /// Returns the names and descriptions of the profiles.
    pub fn profiles() -> impl Iterator<Item = (&'static str, &'static str)> {
        PROFILES.iter().map(|profile| (profile.name, profile.about))
    }
}

impl Embedded {
    /// Creates a device on a network of its own, driven by a thread.
    ///
    /// # Errors
    /// As [`Network::new`] and [`Network::device`].
    pub fn new(profile: &str) -> std::result::Result<Self, Error> {
        Network::new(Drive::Thread)?.device(profile)
    }

    /// Opens a context on the device, for `mlx5::DeviceContext::open`, which
    /// then creates the kernel context.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn context(&self) -> std::result::Result<Context, Error> {
        let (file, fd) = ContextFile::new().map_err(refused(Command::Open))?;
        let file = File::Context(Box::new(file));
        self.device.lock().files.insert(fd, file);
        let kernel = EmbeddedKernel::new(self.clone());
        // SAFETY: the descriptor is new, and only this kernel closes it.
        Ok(unsafe { Context::from_owned_fd(Box::new(kernel), fd, DriverId::MLX5) })
    }

    /// Returns the network that contains the device.
    pub fn network(&self) -> Network {
        Network {
            runner: Arc::clone(&self.runner),
        }
    }

    /// Performs a bounded amount of pending work of the whole network. Returns
    /// true if there was any, if more is left, or if another thread is driving;
    /// loops call it until it returns false. Any thread may call it, also in
    /// addition to the network's own thread.
    pub fn drive(&self) -> bool {
        self.runner.drive()
    }

    /// Connects or disconnects the cable.
    pub fn set_cable(&self, plugged: bool) {
        self.command(|state| state.hca.set_cable(plugged));
    }

    /// Makes a queue pair fail as a device error would: its error paths cannot
    /// be reached otherwise.
    #[doc(hidden)]
    pub fn fail_queue_pair(&self, qpn: u32) -> bool {
        self.command(|state| state.hca.fail_queue_pair(qpn))
    }

    /// Returns the first complaints of the device about invalid input.
    pub fn complaints(&self) -> Vec<String> {
        self.device.lock().hca.complaints().to_vec()
    }

    /// Returns the number of objects in its contexts.
    pub fn objects(&self) -> usize {
        self.device.lock().objects.len()
    }

    /// Returns the number of memory ranges that the device may access.
    pub fn ranges(&self) -> usize {
        self.device.lock().hca.platform().ranges()
    }

    /// Returns the node GUID, in host byte order.
    pub fn node_guid(&self) -> u64 {
        self.device.lock().hca.settings().guid
    }

    /// Returns its number in the network.
    pub fn number(&self) -> usize {
        self.device.number
    }

    /// Runs `what` on the device, and wakes the engine.
    pub(crate) fn command<T>(&self, what: impl FnOnce(&mut State) -> T) -> T {
        let result = what(&mut self.device.lock());
        self.runner.wake();
        result
    }
}

impl Device {
    /// Locks the device for a command.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// Returns whether a thread holds the device's lock.
    pub(crate) fn is_in_turn(&self) -> bool {
        matches!(self.state.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// Locks the device for a turn, after the threads that wait for it.
    pub(crate) fn lock_for_turn(&self) -> MutexGuard<'_, State> {
        // The mutex is not fair, and turns follow each other without a pause.
        while self.waiting.load(Ordering::Relaxed) != 0 {
            std::thread::yield_now();
        }
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for Embedded {
    /// Whether both refer to the same device.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.device, &other.device)
    }
}

impl Eq for Embedded {}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").finish_non_exhaustive()
    }
}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Embedded")
            .field(&self.device.number)
            .finish()
    }
}
