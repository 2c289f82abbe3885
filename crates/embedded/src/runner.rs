//! Driving the devices of a network: a turn of all devices, and the thread that
//! repeats it.

use std::hash::{BuildHasher, RandomState};
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::epoll::Epoll;
use ring::Sleeper;
use softhca::fabric::Fabric;
use softhca::packet::Pool;
use uverbs::Errno;

use crate::cm::Manager;
use crate::device::{Device, Drive};
use crate::directory::Directory;
use crate::leaving::{Flush, flush_at_exit};
use crate::segment::{DEVICES, Segment};
use crate::time::SimulatedTime;
use crate::udp::{Addresses, UdpPorts, UdpWire};
use crate::wait::{Backoff, Until, Waiters, prompt};
use crate::wire::{Link, PATIENCE, Wire, sleep_until_readable};
use crate::{Result, refuse};

/// Drives the devices of a network. Dropping it ends the thread.
pub(crate) struct Runner {
    shared: Arc<Shared>,
    /// Manager of connections by address.
    manager: Manager,
    /// Identifier of the network.
    network: u16,
    /// Numbers of its devices.
    numbers: Range<usize>,
    /// Addresses of its device, if they are the host's.
    addresses: Option<Addresses>,
    thread: Option<JoinHandle<()>>,
}

/// What the devices of a network reach.
pub(crate) enum Reach {
    /// Each other.
    Process,
    /// Those of processes that name the same directory.
    Directory(Arc<Directory>),
    /// Other hosts.
    Udp(UdpPorts),
}

pub(crate) struct Shared {
    fabric: Fabric,
    pool: Pool,
    devices: Mutex<Vec<Arc<Device>>>,
    /// Number of devices.
    count: AtomicUsize,
    stop: AtomicBool,
    link: Option<Link>,
    /// Threads that poll and wait for others' turns.
    waiters: Waiters,
    /// Held by the polling thread that waits for frames.
    watch: Mutex<()>,
    /// Number of turns of other threads than the network's.
    driven: AtomicU64,
    /// The network's thread was woken, and takes turns whether others do or not.
    woken: AtomicBool,
    /// The network's thread.
    sleeper: Sleeper,
    /// Simulated time; `None` for the system's.
    time: Option<SimulatedTime>,
}

/// Longest sleep while doorbells may be written without a wake-up.
const LONGEST: Duration = Duration::from_millis(200);
/// Sleep of the network's thread while other threads take turns, which doubles from
/// the shortest.
const REST: Duration = Duration::from_micros(50);
const LONGEST_REST: Duration = Duration::from_millis(1);
/// Sleeps shorter than this are not announced to threads that write doorbells, nor
/// are others where the barrier for it is missing.
const ANNOUNCED: Duration = Duration::from_micros(200);
const UNANNOUNCED: Duration = Duration::from_millis(1);

/// The kind of thread that takes a turn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// A thread that polls, and has the completions of its turn next.
    Poll,
    /// The network's thread.
    Network,
}

/// Result of a turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    /// Something happened, or more is left to do.
    pub(crate) busy: bool,
    in_use: bool,
    /// Memory was written by remote operations, which complete nowhere here.
    wrote: bool,
    /// Completions were written.
    completed: bool,
    /// Time until something is due.
    pub(crate) due: Option<Duration>,
}

impl Shared {
    /// Runs a turn of the devices, and moves frames from and to other
    /// processes.
    fn turn(&self, devices: impl Deref<Target = Vec<Arc<Device>>>, by: By) -> Turn {
        let mut found = turn(&devices, self.link.as_ref());
        if let Some(link) = &self.link {
            found.busy |= link.pump(found.completed && by == By::Poll);
        }
        // The threads that wake may take turns at once.
        drop(devices);
        if found.busy {
            self.waiters.wake(found.wrote);
            if let Some(time) = &self.time {
                time.acted();
            }
        }
        found
    }

    /// Sleeps until there is something to do, or the time is up.
    fn sleep(&self, limit: Option<Duration>) {
        match (&self.link, limit) {
            (Some(link), limit) => link.sleep(limit),
            (None, Some(limit)) => thread::park_timeout(limit),
            (None, None) => thread::park(),
        }
    }

    fn is_sending(&self) -> bool {
        let Some(link) = &self.link else {
            return false;
        };
        // A turn in progress may not have sent all frames whose completions it
        // has written.
        let in_turn = match self.devices.try_lock() {
            Ok(devices) => devices.iter().any(|device| device.is_in_turn()),
            Err(TryLockError::Poisoned(_)) => false,
            Err(TryLockError::WouldBlock) => true,
        };
        in_turn || link.is_sending()
    }

    fn devices(&self) -> MutexGuard<'_, Vec<Arc<Device>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn turn(devices: &[Arc<Device>], link: Option<&Link>) -> Turn {
    let mut found = Turn::default();
    for device in devices {
        let mut state = device.lock_for_turn();
        if state.is_timer_due() {
            let behind = link.is_some_and(Link::is_behind);
            let behind = behind || state.hca.is_backlogged();
            state.hca.set_patient(behind);
        }
        let before = state.hca.stats();
        found.busy |= state.turn();
        let after = state.hca.stats();
        found.wrote |= before.remote_writes != after.remote_writes;
        // `State::turn` does not report completions and writes that need no further turn.
        found.completed |= before.cqes != after.cqes;
        found.busy |= found.wrote || found.completed;
        found.in_use |= state.is_in_use();
        if let Some(due) = state.due().map(Duration::from_nanos) {
            found.due = Some(found.due.map_or(due, |other| other.min(due)));
        }
    }
    found
}

impl Runner {
    /// Creates a runner without devices.
    pub(crate) fn new(
        fabric: Fabric,
        pool: Pool,
        drive: Drive,
        reach: Reach,
        time: Option<SimulatedTime>,
    ) -> Result<Arc<Self>> {
        let mut numbers = 0..usize::MAX;
        let mut addresses = None;
        let mut network = match time {
            Some(_) => 0,
            None => RandomState::new().hash_one(()) as u16,
        };
        let (manager, link) = match reach {
            Reach::Process => (Manager::new(drive, None)?, None),
            Reach::Directory(directory) => {
                network = directory.id()?;
                let manager = Manager::new(drive, Some(Arc::clone(&directory)))?;
                let link = Link::new(|epoll| {
                    let segment = Segment::join(directory, &fabric, pool.clone(), epoll)?;
                    let first = segment.first_device().into();
                    numbers = first..first + usize::from(DEVICES);
                    Ok(Wire::Directory(Box::new(segment)))
                })?;
                (manager, Some(link))
            }
            Reach::Udp(ports) => {
                // A device has the addresses of the wire for itself.
                numbers = 0..1;
                let its = ports.addresses();
                let (manager, gateway) =
                    Manager::of_hosts(drive, Arc::clone(&its.list), its.guid(), ports.shared())?;
                addresses = Some(its);
                let make =
                    |epoll: &Epoll| UdpWire::new(ports, gateway, &fabric, pool.clone(), epoll);
                (
                    manager,
                    Some(Link::new(|epoll| {
                        make(epoll).map(|udp| Wire::Udp(Box::new(udp)))
                    })?),
                )
            }
        };
        let shared = Arc::new(Shared {
            link,
            fabric,
            pool,
            devices: Mutex::default(),
            count: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            waiters: Waiters::default(),
            watch: Mutex::default(),
            driven: AtomicU64::new(0),
            woken: AtomicBool::new(false),
            // Doorbells are told to simulated time.
            sleeper: match time {
                Some(_) => Sleeper::asleep(),
                None => Sleeper::new(),
            },
            time,
        });
        if shared.link.is_some() {
            let network: Weak<Shared> = Arc::downgrade(&shared);
            flush_at_exit(network);
        }
        // Threads that this one starts inherit its time slice, and begin sooner on a busy
        // host.
        prompt();
        let thread = match drive {
            Drive::Caller => None,
            Drive::Thread | Drive::Watch => {
                let shared = Arc::clone(&shared);
                let builder = thread::Builder::new().name("ringverbs-hca".into());
                match builder.spawn(move || run(&shared, drive)) {
                    Ok(thread) => Some(thread),
                    Err(error) => return refuse(error.raw_os_error().unwrap_or(libc::EAGAIN)),
                }
            }
        };
        Ok(Arc::new(Self {
            shared,
            manager,
            network,
            numbers,
            addresses,
            thread,
        }))
    }

    /// Adds the device that `make` creates, given its number.
    pub(crate) fn add(
        &self,
        make: impl FnOnce(usize, &Fabric, Pool) -> std::result::Result<Arc<Device>, Errno>,
    ) -> Result<Arc<Device>> {
        let mut devices = self.shared.devices();
        let mut number = devices.len();
        if number >= self.numbers.len() {
            return refuse(libc::ENOMEM);
        }
        number += self.numbers.start;
        let device = make(number, &self.shared.fabric, self.shared.pool.clone())?;
        devices.push(Arc::clone(&device));
        self.shared.count.store(devices.len(), Ordering::Release);
        Ok(device)
    }

    /// Runs a turn of all devices. Returns whether anything happened or more is left
    /// to do; `None` if another thread is driving.
    pub(crate) fn turn(&self) -> Option<bool> {
        self.take_turn().map(|found| found.busy)
    }

    /// As [`Runner::turn`], with all that was found.
    pub(crate) fn take_turn(&self) -> Option<Turn> {
        self.shared.driven.fetch_add(1, Ordering::Relaxed);
        let mut found = match self.shared.devices.try_lock() {
            Ok(devices) => self.shared.turn(devices, By::Poll),
            Err(TryLockError::Poisoned(devices)) => {
                self.shared.turn(devices.into_inner(), By::Poll)
            }
            Err(TryLockError::WouldBlock) => return None,
        };
        found.busy |= self.manager.drive();
        Some(found)
    }

    /// Sleeps until a turn has ended the wait ([`Waiters::wait`]) or a frame has arrived, or
    /// the time is up. One thread at a time waits for frames: the others need no turn of
    /// their own.
    pub(crate) fn wait(&self, until: &Until, limit: Duration) {
        let waiters = &self.shared.waiters;
        let for_turn = || waiters.wait(until, |woken| sleep_until_readable([woken], Some(limit)));
        let Some(link) = &self.shared.link else {
            return for_turn();
        };
        match self.shared.watch.try_lock() {
            Err(TryLockError::WouldBlock) => for_turn(),
            watch => {
                waiters.wait(until, |woken| link.wait(woken, limit));
                drop(watch);
                // The next one waits for frames.
                waiters.wake_one();
            }
        }
    }

    /// Returns the threads that wait.
    pub(crate) fn waiters(&self) -> &Waiters {
        &self.shared.waiters
    }

    /// Returns whether the network's thread sleeps, and would not find a doorbell
    /// soon.
    #[inline]
    pub(crate) fn is_asleep(&self) -> bool {
        self.shared.sleeper.is_asleep()
    }

    /// Returns the time by which a turn must be taken if nothing else happens.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let devices = self.shared.devices();
        let deadlines = devices.iter().map(|device| device.lock().hca.deadline());
        deadlines.flatten().min()
    }

    /// Returns the simulated time.
    pub(crate) fn time(&self) -> Option<&SimulatedTime> {
        self.shared.time.as_ref()
    }

    /// Returns the network that the devices' frames take.
    pub(crate) fn fabric(&self) -> &Fabric {
        &self.shared.fabric
    }

    /// Returns whether a thread drives the devices.
    pub(crate) fn has_thread(&self) -> bool {
        self.thread.is_some()
    }

    /// Returns the network's connection manager.
    pub(crate) fn manager(&self) -> &Manager {
        &self.manager
    }

    /// Returns the network's identifier, a part of its devices' MAC addresses.
    pub(crate) fn network(&self) -> u16 {
        self.network
    }

    /// Returns the addresses of its device, if they are the host's.
    pub(crate) fn addresses(&self) -> Option<&Addresses> {
        self.addresses.as_ref()
    }

    /// Wakes the thread.
    pub(crate) fn wake(&self) {
        if let Some(time) = &self.shared.time {
            return time.called();
        }
        self.shared.woken.store(true, Ordering::Relaxed);
        // A command may have taken turns.
        self.shared.waiters.wake(true);
        if let Some(link) = &self.shared.link {
            link.wake();
        }
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        self.wake();
        if let Some(thread) = self.thread.take() {
            if thread.thread().id() != thread::current().id() {
                // Fails only if the thread panicked.
                let _ = thread.join();
            }
        }
        self.shared.flush();
    }
}

impl Flush for Shared {
    fn flush(&self) {
        let end = Instant::now() + PATIENCE;
        if let Some(link) = &self.link {
            link.close();
        }
        while self.is_sending() && Instant::now() < end {
            thread::yield_now();
        }
    }
}

pub(crate) fn sooner(sleep: Duration, due: Option<Duration>) -> Duration {
    due.map_or(sleep, |due| sleep.min(due))
}

/// Called by a network's threads when they start.
static AT_START: OnceLock<fn()> = OnceLock::new();

/// Sets a function that every network's thread calls when it starts. The first one
/// stays.
pub fn at_thread_start(hook: fn()) {
    let _ = AT_START.set(hook);
}

/// Prepares a network's thread that has started.
pub(crate) fn thread_started() {
    if let Some(hook) = AT_START.get() {
        hook();
    }
    prompt();
}

/// The thread's main loop.
fn run(shared: &Shared, drive: Drive) {
    thread_started();
    let mut devices: Vec<Arc<Device>> = Vec::new();
    let mut backoff = Backoff::NEW;
    let (mut driven, mut rest) = (0, REST);
    while !shared.stop.load(Ordering::Relaxed) {
        let before = driven;
        driven = shared.driven.load(Ordering::Relaxed);
        if driven != before && !shared.woken.swap(false, Ordering::Relaxed) {
            // Threads that poll do the work: this one would take the devices' locks
            // and the processor from them. `unpark` makes the flag visible.
            thread::park_timeout(rest);
            rest = (rest * 2).min(LONGEST_REST);
            backoff = Backoff::NEW;
            continue;
        }
        rest = REST;
        if devices.len() != shared.count.load(Ordering::Acquire) {
            devices.clone_from(&shared.devices());
        }
        let found = shared.turn(&devices, By::Network);
        if found.busy {
            backoff = Backoff::NEW;
        } else if !found.in_use {
            // Any activity starts with a command or a frame, both of which
            // wake.
            shared.sleep(None);
            backoff = Backoff::NEW;
        } else {
            match backoff.pause(LONGEST) {
                None => std::hint::spin_loop(),
                Some(sleep) if sleep < ANNOUNCED => shared.sleep(Some(sooner(sleep, found.due))),
                Some(sleep) if shared.sleeper.announce() => {
                    let found = shared.turn(&devices, By::Network);
                    if found.busy {
                        backoff = Backoff::NEW;
                    } else if sleep == LONGEST && drive == Drive::Thread {
                        shared.sleep(found.due);
                    } else {
                        shared.sleep(Some(sooner(sleep, found.due)));
                    }
                    shared.sleeper.awake();
                }
                Some(sleep) => shared.sleep(Some(sooner(sleep.min(UNANNOUNCED), found.due))),
            }
        }
    }
}
