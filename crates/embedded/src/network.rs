//! Devices, what joins them, and who runs them.

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

/// Who runs the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drive {
    /// A thread of its own. It spins for some ten microseconds after
    /// something happened, then sleeps, longer and longer, a millisecond at
    /// most; a command, or a wait for an event through the
    /// context, wakes it. While there are no queues it sleeps for good.
    #[default]
    Thread,
    /// The caller, by [`Embedded::drive`]. Nothing happens otherwise, but
    /// during a wait for an event through the context.
    Caller,
}

/// Devices that reach each other.
///
/// A handle: clones are the same network. Its devices live as long as it does,
/// and it lives as long as a handle of it, of a device or of a context does.
#[derive(Clone)]
pub struct Network {
    runner: Arc<Runner>,
}

/// A software HCA of this process.
///
/// A handle: clones are the same device. Any thread.
#[derive(Clone)]
pub struct Embedded {
    pub(crate) device: Arc<Device>,
    pub(crate) runner: Arc<Runner>,
}

/// A device, shared by those who give it commands and the one who runs it.
pub(crate) struct Device {
    state: Mutex<State>,
    /// Threads that want the lock for a command.
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
    /// A network without devices.
    ///
    /// # Errors
    /// EAGAIN and the like if a thread cannot be made.
    pub fn new(drive: Drive) -> std::result::Result<Self, Error> {
        Self::made(drive, None)
    }

    /// A network without devices, which those of other processes are on that
    /// name the same directory: a socket in it for each process. It is made, for
    /// this user alone, if there is none. One that is there must be this user's
    /// or root's, with nobody else who may write there, and no symbolic link:
    /// who takes part is this user, or root. It needs `/proc`.
    ///
    /// What comes from another process is as trusted as what a network brings: it
    /// reaches what a queue pair or a key lets it reach, and no more. A process
    /// that is gone, however it went, no longer answers.
    ///
    /// # Errors
    /// [`Error::Invalid`], with what to do, for a directory of another user, one
    /// that others may write in, and a symbolic link; EUSERS if 32 processes are
    /// there already; those of making files and sockets there; and as
    /// [`new`](Self::new).
    pub fn joined(drive: Drive, directory: &Path) -> std::result::Result<Self, Error> {
        Self::joined_with(drive, directory, Sharing::Own)
    }

    /// The same, of a directory that may be shared with other users.
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

    /// Adds a device of a profile ([`profiles`](Self::profiles)). Each has
    /// addresses of its own.
    ///
    /// # Errors
    /// ENODEV if there is no such profile; ENOMEM.
    pub fn device(&self, profile: &str) -> std::result::Result<Embedded, Error> {
        self.add(profile, false).map_err(refused(Command::Open))
    }

    /// The same, as a strict device: reserved fields that are set, and work
    /// requests that contradict their place, are complaints
    /// ([`Embedded::complaints`]) and errors.
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
            // There are fewer devices than LIDs.
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

    /// The profiles that there are: name, and what it is.
    pub fn profiles() -> impl Iterator<Item = (&'static str, &'static str)> {
        PROFILES.iter().map(|profile| (profile.name, profile.about))
    }
}

impl Embedded {
    /// A device on a network of its own, run by a thread.
    ///
    /// # Errors
    /// As [`Network::new`] and [`Network::device`].
    pub fn new(profile: &str) -> std::result::Result<Self, Error> {
        Network::new(Drive::Thread)?.device(profile)
    }

    /// A context on the device, for `mlx5::DeviceContext::open`: its kernel
    /// context is made by that.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn context(&self) -> std::result::Result<Context, Error> {
        let (file, fd) = ContextFile::new().map_err(refused(Command::Open))?;
        let file = File::Context(Box::new(file));
        self.device.lock().files.insert(fd, file);
        let kernel = EmbeddedKernel::new(self.clone());
        // SAFETY: the descriptor is new, and closed by this kernel alone.
        Ok(unsafe { Context::from_owned_fd(Box::new(kernel), fd, DriverId::MLX5) })
    }

    /// The network that it is in.
    pub fn network(&self) -> Network {
        Network {
            runner: Arc::clone(&self.runner),
        }
    }

    /// Does what there is to do in the whole network, within bounds. True if
    /// something happened or is left to do, or another thread is driving: a loop
    /// calls it until false. Any thread, also beside the network's own.
    pub fn drive(&self) -> bool {
        self.runner.drive()
    }

    /// Pulls the cable, or plugs it in.
    pub fn set_cable(&self, plugged: bool) {
        self.command(|state| state.hca.set_cable(plugged));
    }

    /// Has the device fail: its error paths are reached by no other way.
    #[doc(hidden)]
    pub fn fail_queue_pair(&self, qpn: u32) -> bool {
        self.command(|state| state.hca.fail_queue_pair(qpn))
    }

    /// What the device has been told that it should not have been, the first
    /// of it.
    pub fn complaints(&self) -> Vec<String> {
        self.device.lock().hca.complaints().to_vec()
    }

    /// How many objects its contexts have.
    pub fn objects(&self) -> usize {
        self.device.lock().objects.len()
    }

    /// How many ranges of memory it has been given.
    pub fn ranges(&self) -> usize {
        self.device.lock().hca.platform().ranges()
    }

    /// The GUID of its node, in the host's byte order.
    pub fn node_guid(&self) -> u64 {
        self.device.lock().hca.settings().guid
    }

    /// Its number in its network.
    pub fn number(&self) -> usize {
        self.device.number
    }

    /// Does something with the device, and has it noticed.
    pub(crate) fn command<T>(&self, what: impl FnOnce(&mut State) -> T) -> T {
        let result = what(&mut self.device.lock());
        self.runner.wake();
        result
    }
}

impl Device {
    /// The device, for a command.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        state
    }

    /// Whether somebody is at it.
    pub(crate) fn is_in_turn(&self) -> bool {
        matches!(self.state.try_lock(), Err(TryLockError::WouldBlock))
    }

    /// The device, for a turn: after those who wait for it.
    pub(crate) fn lock_for_turn(&self) -> MutexGuard<'_, State> {
        // The lock is not a fair one, and a turn follows the other.
        while self.waiting.load(Ordering::Relaxed) != 0 {
            std::thread::yield_now();
        }
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for Embedded {
    /// Whether it is the same device.
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
