//! Running the devices of a network: a turn of all of them, and the thread
//! that does nothing else.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::epoll::Epoll;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;
use softhca::fabric::Fabric;
use softhca::packet::Pool;
use uverbs::Errno;

use crate::cm::Manager;
use crate::directory::Directory;
use crate::network::{Device, Drive};
use crate::segment::{self, DEVICES, PATIENCE, Segment};
use crate::{Result, leaving, refuse};

/// How long after the last event the thread spins. Then it sleeps: on a busy
/// machine, who yields waits for everybody, and who sleeps is let in when the
/// time is up.
const SPIN: Duration = Duration::from_micros(30);
/// How long it sleeps at first, and at most.
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// The devices of a network. Dropped, it ends the thread.
pub(crate) struct Runner {
    shared: Arc<Shared>,
    /// Who makes connections by address.
    manager: Manager,
    thread: Option<JoinHandle<()>>,
}

pub(crate) struct Shared {
    fabric: Fabric,
    pool: Pool,
    devices: Mutex<Vec<Arc<Device>>>,
    /// How many there are.
    count: AtomicUsize,
    stop: AtomicBool,
    joined: Option<Joined>,
}

/// The way to other processes.
struct Joined {
    segment: Mutex<Segment>,
    /// What it waits for, and what wakes who sleeps there.
    epoll: Epoll,
    wake: EventFd,
    /// What the numbers of devices begin with.
    first_device: u16,
}

/// What a turn has found.
#[derive(Clone, Copy, Debug, Default)]
struct Turn {
    busy: bool,
    in_use: bool,
    /// When something is due, from now.
    due: Option<Duration>,
}

impl Joined {
    fn new(directory: Arc<Directory>, fabric: &Fabric, pool: Pool) -> Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let wake = EventFd::from_value_and_flags(0, flags);
        let wake = wake.map_err(|errno| Errno::new(errno as i32))?;
        let epoll = segment::epoll(&wake)?;
        let segment = Segment::join(directory, fabric, pool, &epoll)?;
        Ok(Self {
            first_device: segment.first_device(),
            segment: Mutex::new(segment),
            epoll,
            wake,
        })
    }

    fn pump(&self) -> bool {
        match self.segment.try_lock() {
            Ok(mut segment) => segment.pump(&self.epoll),
            Err(TryLockError::Poisoned(mut segment)) => segment.get_mut().pump(&self.epoll),
            // Somebody else is at it, perhaps without a processor to go on: who
            // drives without a pause would keep it for a tick.
            Err(TryLockError::WouldBlock) => {
                thread::yield_now();
                false
            }
        }
    }

    /// Before a time-out counts: takes in what has come meanwhile, and says
    /// whether there may be more, or others have not read what they were sent.
    fn is_behind(&self) -> bool {
        let behind = |segment: &mut Segment| segment.pump(&self.epoll) || segment.is_unread();
        match self.segment.try_lock() {
            Ok(mut segment) => behind(&mut segment),
            Err(TryLockError::Poisoned(mut segment)) => behind(segment.get_mut()),
            Err(TryLockError::WouldBlock) => true,
        }
    }

    /// Has frames moved on; whether there are some that this process has sent and
    /// no socket has yet.
    fn is_sending(&self) -> bool {
        let sending = |segment: &mut Segment| {
            segment.pump(&self.epoll);
            segment.is_sending()
        };
        match self.segment.try_lock() {
            Ok(mut segment) => sending(&mut segment),
            Err(TryLockError::Poisoned(mut segment)) => sending(segment.get_mut()),
            Err(TryLockError::WouldBlock) => true,
        }
    }

    /// Until a frame comes, somebody wakes this, or the time is up.
    fn sleep(&self, limit: Option<Duration>) {
        let epoll = PollFd::new(self.epoll.0.as_fd(), PollFlags::POLLIN);
        // Woken for nothing is no harm.
        let _ = ppoll(&mut [epoll], limit.map(TimeSpec::from_duration), None);
        // It may not have been this that woke it.
        let _ = self.wake.read();
    }
}

impl Shared {
    /// A turn of the devices, and of the way to others.
    fn turn(&self, devices: &[Arc<Device>]) -> Turn {
        let mut found = turn(devices, self.joined.as_ref());
        if let Some(joined) = &self.joined {
            found.busy |= joined.pump();
        }
        found
    }

    /// Until something is to be looked at, or the time is up.
    fn sleep(&self, limit: Option<Duration>) {
        match (&self.joined, limit) {
            (Some(joined), limit) => joined.sleep(limit),
            (None, Some(limit)) => thread::park_timeout(limit),
            (None, None) => thread::park(),
        }
    }

    /// Waits until what the devices have sent is in the sockets of whom it is for,
    /// as long as a frame may wait.
    pub(crate) fn let_go(&self) {
        let end = Instant::now() + PATIENCE;
        while self.is_sending() && Instant::now() < end {
            thread::yield_now();
        }
    }

    fn is_sending(&self) -> bool {
        let Some(joined) = &self.joined else {
            return false;
        };
        // A turn that is under way may not have sent all of which it has told.
        let in_turn = match self.devices.try_lock() {
            Ok(devices) => devices.iter().any(|device| device.is_in_turn()),
            Err(TryLockError::Poisoned(_)) => false,
            Err(TryLockError::WouldBlock) => true,
        };
        in_turn || joined.is_sending()
    }

    fn devices(&self) -> MutexGuard<'_, Vec<Arc<Device>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn turn(devices: &[Arc<Device>], joined: Option<&Joined>) -> Turn {
    let mut found = Turn::default();
    for device in devices {
        let mut state = device.lock_for_turn();
        if state.due() == Some(0) {
            let behind = joined.is_some_and(Joined::is_behind);
            let behind = behind || state.hca.is_backlogged();
            state.hca.set_patient(behind);
        }
        found.busy |= state.turn();
        found.in_use |= state.is_in_use();
        if let Some(due) = state.due().map(Duration::from_nanos) {
            found.due = Some(found.due.map_or(due, |other| other.min(due)));
        }
    }
    found
}

impl Runner {
    /// Without devices; joined to other processes' in a directory, or not.
    pub(crate) fn new(
        fabric: Fabric,
        pool: Pool,
        drive: Drive,
        directory: Option<Arc<Directory>>,
    ) -> Result<Arc<Self>> {
        let manager = Manager::new(directory.clone());
        let joined = directory.map(|directory| Joined::new(directory, &fabric, pool.clone()));
        let joined = joined.transpose()?;
        let shared = Arc::new(Shared {
            joined,
            fabric,
            pool,
            devices: Mutex::default(),
            count: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
        });
        if shared.joined.is_some() {
            leaving::note(Arc::downgrade(&shared));
        }
        let thread = match drive {
            Drive::Caller => None,
            Drive::Thread => {
                let shared = Arc::clone(&shared);
                let builder = thread::Builder::new().name("ringverbs-hca".into());
                match builder.spawn(move || run(&shared)) {
                    Ok(thread) => Some(thread),
                    Err(error) => return refuse(error.raw_os_error().unwrap_or(libc::EAGAIN)),
                }
            }
        };
        Ok(Arc::new(Self {
            shared,
            manager,
            thread,
        }))
    }

    /// Adds a device that `make` makes, given its number.
    pub(crate) fn add(
        &self,
        make: impl FnOnce(usize, &Fabric, Pool) -> std::result::Result<Arc<Device>, Errno>,
    ) -> Result<Arc<Device>> {
        let mut devices = self.shared.devices();
        let mut number = devices.len();
        if let Some(joined) = &self.shared.joined {
            if number >= DEVICES.into() {
                return refuse(libc::ENOMEM);
            }
            number += usize::from(joined.first_device);
        }
        let device = make(number, &self.shared.fabric, self.shared.pool.clone())?;
        devices.push(Arc::clone(&device));
        self.shared.count.store(devices.len(), Ordering::Release);
        Ok(device)
    }

    /// A turn of all devices; whether anything happened or is left to do, or
    /// somebody else is at it.
    pub(crate) fn drive(&self) -> bool {
        match self.shared.devices.try_lock() {
            Ok(devices) => self.shared.turn(&devices).busy,
            Err(TryLockError::Poisoned(devices)) => self.shared.turn(devices.get_ref()).busy,
            Err(TryLockError::WouldBlock) => true,
        }
    }

    /// Whether there is a thread that runs the devices.
    pub(crate) fn has_thread(&self) -> bool {
        self.thread.is_some()
    }

    /// The network's connection manager.
    pub(crate) fn manager(&self) -> &Manager {
        &self.manager
    }

    /// Has the thread look.
    pub(crate) fn wake(&self) {
        match (&self.shared.joined, &self.thread) {
            // Full is awake.
            (Some(joined), _) => drop(joined.wake.write(1)),
            (None, Some(thread)) => thread.thread().unpark(),
            (None, None) => {}
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != thread::current().id()
        {
            // It has only ended if it panicked.
            let _ = thread.join();
        }
        self.shared.let_go();
    }
}

/// The thread.
fn run(shared: &Shared) {
    // With one processor, spinning only keeps the others from their work.
    let alone = thread::available_parallelism().is_ok_and(|count| count.get() == 1);
    let mut devices: Vec<Arc<Device>> = Vec::new();
    let mut last = Instant::now();
    let mut sleep = SHORTEST;
    while !shared.stop.load(Ordering::Relaxed) {
        if devices.len() != shared.count.load(Ordering::Acquire) {
            devices.clone_from(&shared.devices());
        }
        let found = shared.turn(&devices);
        if found.busy {
            last = Instant::now();
            sleep = SHORTEST;
            continue;
        }
        if !found.in_use {
            // Whatever comes is a command, or a frame, and wakes.
            shared.sleep(None);
            last = Instant::now();
            continue;
        }
        let idle = last.elapsed();
        if idle < SPIN && !alone {
            std::hint::spin_loop();
        } else {
            let until = found.due.map_or(sleep, |due| sleep.min(due));
            shared.sleep(Some(until));
            sleep = (sleep * 2).min(LONGEST);
        }
    }
}
