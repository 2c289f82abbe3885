//! Driving the devices of a network: a turn of all devices, and the thread that
//! repeats it.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::ops::{Deref, Range};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Barrier, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ring::Sleeper;
use roce::fabric::Fabric;
use roce::packet::Pool;
use softhca::chaos::Chaos;
use uverbs::{Errno, threads};

use crate::capture::Recorder;
use crate::cleanup::with_cleanup;
use crate::cm::{Clock, Manager};
use crate::directory::Directory;
use crate::drive::Drive;
use crate::driver::cause::Cause;
use crate::driver::files::uar_counts;
use crate::links::Links;
use crate::peers::PeerProcesses;
use crate::runtime::control::{Control, Controlled, Place};
use crate::runtime::device::Device;
use crate::runtime::exit_flush::{Flush, flush_at_exit};
use crate::runtime::nodes::Nodes;
use crate::runtime::reasons::{Reach, Reasons};
use crate::runtime::time::SimulatedTime;
use crate::runtime::usage;
use crate::runtime::wait::{Backoff, WaitCondition, Waiters, prepare_thread};
use crate::scope::{init_thread, request_short_slice};
use crate::wires::reason_datagram::REASONS;
use crate::wires::segment::{MAX_DEVICES, Segment};
use crate::wires::udp::{HostAddresses, UdpPorts, UdpWire};
use crate::wires::wire::{Link, MAX_FRAME_WAIT, Wire, sleep_until_readable};
use crate::{Result, refuse};

/// Drives the devices of a network. Dropping it ends the thread.
pub(crate) struct Runner {
    shared: Arc<Shared>,
    /// Identifier of the network.
    network: u16,
    /// Seed of its devices' numbers.
    seed: OnceLock<u64>,
    /// How long peers on other hosts may be silent.
    patience: OnceLock<Duration>,
    /// Decides what the devices do late, or in another order.
    chaos: OnceLock<Arc<Chaos>>,
    /// Numbers of its devices.
    numbers: Range<usize>,
    /// Addresses of its device, if they are the host's.
    addresses: Option<HostAddresses>,
    /// Links of its devices' ports, if a wire decides about them.
    links: Option<Arc<Links>>,
    /// Processes that have the devices which a wire reaches.
    peers: Option<Arc<dyn PeerProcesses>>,
    thread: Option<JoinHandle<()>>,
}

/// The wire of a network.
pub(crate) enum WireConfig {
    /// The devices of the network reach only each other.
    None,
    /// Shared memory, to the processes of this host that use the same directory.
    Directory(Arc<Directory>),
    /// RoCE v2 over UDP, to other hosts.
    Udp(UdpPorts),
}

/// The right to wait for frames, which one thread at a time has.
#[derive(Default)]
struct FrameRight(AtomicBool);

impl FrameRight {
    /// Returns whether this thread has it now.
    fn take(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }

    fn give_up(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    fn is_taken(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

pub(crate) struct Shared {
    fabric: Fabric,
    pool: Pool,
    /// Manager of connections by address.
    manager: Manager,
    /// Questions to peers and from them; `None` if there is no wire.
    reasons: Option<Arc<Reasons>>,
    /// Files of the network's directory by which commands control this process.
    control: Option<Control>,
    /// Records the frames of the devices.
    recorder: Mutex<Option<Arc<Recorder>>>,
    /// Ends the process, if a fault says so.
    on_die: OnceLock<fn()>,
    devices: Mutex<Vec<Arc<Device>>>,
    /// Number of devices.
    device_count: AtomicUsize,
    stop: AtomicBool,
    link: Option<Link>,
    /// Queue pairs 1 of a simulated network.
    nodes: Option<Nodes>,
    /// Polling threads that wait for a turn of another thread.
    waiters: Waiters,
    frame_right: FrameRight,
    /// Number of turns that threads of the program have taken.
    polling_turns: AtomicU64,
    /// Number of waits for events that have ended.
    event_waits: AtomicU64,
    /// The network's thread must take a turn even if polling threads take turns.
    wake_requested: AtomicBool,
    /// Whether the network's thread has to [flush](Flush): one of the states below.
    thread_flush: AtomicU8,
    /// Tells whoever rings a doorbell whether the network's thread sleeps.
    sleeper: Sleeper,
    /// Simulated time; `None` for the system's.
    time: Option<SimulatedTime>,
}

/// States of the network's thread.
const NO_THREAD: u8 = 0;
const NOT_REQUESTED: u8 = 1;
const REQUESTED: u8 = 2;
const FLUSHED: u8 = 3;

/// How long the end of the process waits for the thread that has the wire: on a busy host it
/// may not run for some time.
const MAX_CLOSE_WAIT: Duration = Duration::from_secs(1);
/// Longest sleep before the thread sleeps until it is woken.
const MAX_SLEEP: Duration = Duration::from_millis(200);
/// Longest sleep while a driver may write doorbells without a wake-up.
const MAX_UNTOLD_SLEEP: Duration = Duration::from_millis(10);
/// Bounds of the network thread's sleep while threads of the program take turns; it doubles
/// each time.
const MIN_REST: Duration = Duration::from_micros(50);
const MAX_REST: Duration = Duration::from_millis(1);
/// As above, if these threads wait for events: between two waits they take no turns.
const MAX_EVENT_REST: Duration = Duration::from_micros(250);
/// Number of turns after which a thread that waits for an event looks whether it has
/// occurred.
const TURNS_PER_LOOK: u64 = 16;
/// Shortest sleep that is announced to threads that write doorbells.
const MIN_ANNOUNCED_SLEEP: Duration = Duration::from_micros(200);
/// Longest sleep where the system lacks the barrier that announcing needs.
const MAX_UNANNOUNCED_SLEEP: Duration = Duration::from_millis(1);

/// Longest sleep of a thread that cannot be woken, since the process has no descriptor left.
const MAX_BLIND_SLEEP: Duration = Duration::from_millis(1);

/// The thread that takes a turn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TurnCaller {
    /// A thread that polls, and will read the completions of its turn next.
    PollingThread,
    /// The network's thread.
    NetworkThread,
}

/// Result of a turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    /// Something happened, or more is left to do.
    pub(crate) busy: bool,
    in_use: bool,
    /// Remote operations wrote memory; they complete only at the requester.
    remote_writes: bool,
    /// Completions were written.
    completed: bool,
    /// A device waits for frames to be sent ([`Hca::confirm_sent`](softhca::Hca::confirm_sent)).
    awaits_confirmation: bool,
    /// Time until something is due.
    pub(crate) due: Option<Duration>,
    /// When it began; `None` without a device.
    pub(crate) time: Option<Instant>,
}

impl Shared {
    /// Runs a turn of the devices, and moves frames from and to other
    /// processes.
    fn turn(&self, devices: impl Deref<Target = Vec<Arc<Device>>>, caller: TurnCaller) -> Turn {
        let mut result = run_devices(&devices, self.link.as_ref());
        let mut has_caller = false;
        let plans = caller == TurnCaller::NetworkThread;
        if let Some(reasons) = &self.reasons {
            let (busy, due) = reasons.turn(&devices, plans);
            result.busy |= busy;
            result.due = due.map_or(result.due, |due| Some(cap_sleep(due, result.due)));
        }
        if let Some(link) = &self.link {
            let answer_expected = result.completed && caller == TurnCaller::PollingThread;
            let now = result.time.unwrap_or_else(Instant::now);
            let moved = link.pump(now, answer_expected, result.awaits_confirmation);
            result.busy |= moved.busy;
            result.busy |= (self.reasons.as_ref()).is_some_and(|it| it.has_arrived());
            has_caller = moved.has_caller;
            if moved.sent_all {
                for device in devices.iter() {
                    device.lock_for_turn().confirm_sent();
                }
            }
        }
        if let Some(due) = self.manager.turn(plans) {
            result.due = Some(cap_sleep(due, result.due));
        }
        if let (Some(nodes), Some(time)) = (&self.nodes, &self.time) {
            result.busy |= nodes.exchange(&devices, time.now());
        }
        while let Some(cause) = self.manager.drops().next() {
            for device in devices.iter() {
                device.lock_for_turn().report(&Cause::Management(cause));
            }
        }
        // Unlocked first: the threads that wake may take turns at once.
        drop(devices);
        if has_caller {
            result.busy |= self.read_control(&self.devices(), false);
        }
        if result.busy {
            self.waiters.wake(result.remote_writes);
            if let Some(time) = &self.time {
                time.record_activity();
            }
        }
        result
    }

    /// Sleeps until the thread is woken or the time is up. Also until a frame arrives if
    /// `frames` is true, unless another thread waits for frames.
    fn sleep(&self, frames: bool, limit: Option<Duration>) {
        if !self.wake_requested.load(Ordering::Relaxed) {
            match (&self.link, limit) {
                (Some(link), limit) => {
                    let frames = frames && self.frame_right.take();
                    link.sleep(frames, limit);
                    if frames {
                        self.frame_right.give_up();
                    }
                }
                (None, Some(limit)) => thread::park_timeout(limit),
                (None, None) => thread::park(),
            }
        }
        self.sleeper.awake();
    }

    /// Wakes the network's thread, which has announced a sleep.
    fn rouse(&self, thread: Option<&JoinHandle<()>>) {
        match (&self.link, thread) {
            (Some(link), _) => link.wake(),
            (None, Some(thread)) => thread.thread().unpark(),
            (None, None) => {}
        }
    }

    fn is_sending(&self) -> bool {
        let Some(link) = &self.link else {
            return false;
        };
        // A turn in progress may not have sent all frames whose completions it
        // has written.
        let in_turn = match self.devices.try_lock() {
            Ok(devices) => devices.iter().any(|device| device.is_sending()),
            Err(TryLockError::Poisoned(_)) => false,
            Err(TryLockError::WouldBlock) => true,
        };
        in_turn || link.is_sending()
    }

    fn devices(&self) -> MutexGuard<'_, Vec<Arc<Device>>> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what the files that control this process say. The caller has locked the devices;
    /// with `again`, one of them is new. Returns whether anything was done.
    fn read_control(&self, devices: &[Arc<Device>], again: bool) -> bool {
        let Some(control) = &self.control else {
            return false;
        };
        let controlled = Controlled {
            devices,
            on_die: self.on_die.get().copied(),
            recorder: &|| self.recorder().clone(),
            record: &|recorder| drop(self.record_frames(devices, recorder)),
            names: control.names(),
        };
        control.read(&controlled, again)
    }

    fn recorder(&self) -> MutexGuard<'_, Option<Arc<Recorder>>> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what records the frames of all devices, which the caller has locked, and of the wire.
    /// Returns what did before.
    fn record_frames(
        &self,
        devices: &[Arc<Device>],
        recorder: Option<Arc<Recorder>>,
    ) -> Option<Arc<Recorder>> {
        for (index, device) in devices.iter().enumerate() {
            device.record_frames(recorder.as_ref(), index);
        }
        if let Some(link) = &self.link {
            link.record_frames(recorder.as_ref());
        }
        std::mem::replace(&mut *self.recorder(), recorder)
    }
}

/// Runs each device once.
fn run_devices(devices: &[Arc<Device>], link: Option<&Link>) -> Turn {
    let mut result = Turn::default();
    for device in devices {
        let mut state = device.lock_for_turn();
        let now = state.time();
        result.time = Some(now.system);
        if state.is_timer_due(now) {
            let behind = link.is_some_and(Link::is_backlogged);
            let behind = behind || state.hca.is_backlogged();
            state.hca.set_patient(behind);
        }
        let before = state.hca.stats();
        let mut busy = state.turn(now);
        let parts = state.parts();
        for part in 0..parts {
            if busy {
                break;
            }
            // Commands may take the lock between two parts.
            drop(state);
            state = device.lock_for_turn();
            busy = state.turn_of_part(part, parts);
        }
        result.busy |= busy;
        let after = state.hca.stats();
        usage::count_moved(state.take_moved());
        result.remote_writes |= before.remote_writes != after.remote_writes;
        // `State::turn` does not report completions and writes that need no further turn.
        result.completed |= before.cqes != after.cqes;
        result.awaits_confirmation |= state.hca.awaits_confirmation();
        result.busy |= result.remote_writes || result.completed || result.awaits_confirmation;
        result.in_use |= state.is_in_use();
        if let Some(due) = state.due(now).map(Duration::from_nanos) {
            result.due = Some(result.due.map_or(due, |other| other.min(due)));
        }
    }
    result
}

/// The wire of a network, and what depends on it.
struct WireParts {
    link: Option<Link>,
    manager: Manager,
    network: u16,
    numbers: Range<usize>,
    addresses: Option<HostAddresses>,
    links: Option<Arc<Links>>,
    peers: Option<Arc<dyn PeerProcesses>>,
    reasons: Option<Arc<Reasons>>,
    control: Option<Control>,
}

impl WireParts {
    /// A network within the process.
    fn alone(time: Option<&SimulatedTime>) -> Result<Self> {
        Ok(Self {
            link: None,
            manager: match time {
                // Differs from the sequence that programs draw from the same seed.
                Some(time) => Manager::of_nodes(time.clock(), time.seed().rotate_left(32)),
                None => Manager::new(None, Clock::Host),
            },
            network: match time {
                Some(_) => 0,
                None => random_network(),
            },
            numbers: 0..usize::MAX,
            addresses: None,
            links: None,
            peers: None,
            reasons: None,
            control: None,
        })
    }

    /// A network of the processes that share a directory.
    fn in_directory(directory: Arc<Directory>, fabric: &Fabric, pool: &Pool) -> Result<Self> {
        let network = directory.id()?;
        let links: Arc<Links> = Arc::default();
        let mut joined = None;
        let controlled = Arc::clone(&directory);
        let link = Link::new(|epoll| {
            let mut segment = Segment::join(Arc::clone(&directory), fabric, pool.clone(), epoll)?;
            let member = (directory, segment.number());
            let manager = Manager::new(Some(member), Clock::Host);
            let reasons = Reasons::of(Reach::Directory(segment.number()), &manager);
            let agents = manager.agents();
            segment.set_agents(agents.with(REASONS, Arc::clone(&reasons) as _));
            segment.set_links(Arc::clone(&links));
            let first = segment.first_device().into();
            let control = Control::new(Place {
                directory: controlled,
                number: segment.number(),
            });
            joined = Some((manager, reasons, first, segment.processes(), control));
            Ok(Wire::Directory(Box::new(segment)))
        })?;
        let Some((manager, reasons, first, peers, control)) = joined else {
            return refuse(libc::EINVAL);
        };
        Ok(Self {
            link: Some(link),
            manager,
            network,
            numbers: first..first + usize::from(MAX_DEVICES),
            addresses: None,
            links: Some(links),
            peers: Some(peers),
            reasons: Some(reasons),
            control: Some(control),
        })
    }

    /// A network of hosts, by UDP. One device has all addresses of the wire.
    fn by_udp(ports: UdpPorts, fabric: &Fabric, pool: &Pool) -> Result<Self> {
        let addresses = ports.addresses();
        let (links, peers) = (ports.links(), ports.processes());
        let control = ports.shared().map(|it| {
            Control::new(Place {
                directory: it.directory,
                number: it.member.into(),
            })
        });
        let own = Arc::clone(&addresses.list);
        let manager = Manager::of_hosts(own, ports.shared(), Clock::Host);
        let member = ports.shared().map_or(0, |it| it.member);
        let reasons = Reasons::of(Reach::Hosts(member), &manager);
        let agents = manager.agents();
        let agents = agents.with(REASONS, Arc::clone(&reasons) as _);
        let link = Link::new(|epoll| {
            let udp = UdpWire::new(ports, agents, fabric, pool.clone(), epoll)?;
            Ok(Wire::Udp(Box::new(udp)))
        })?;
        Ok(Self {
            link: Some(link),
            manager,
            network: random_network(),
            numbers: 0..1,
            addresses: Some(addresses),
            links: Some(links),
            peers,
            reasons: Some(reasons),
            control,
        })
    }
}

fn random_network() -> u16 {
    RandomState::new().hash_one(()) as u16
}

/// Starts the network's thread. Returns when it has opened its files.
fn start_thread(shared: &Arc<Shared>, drive: Drive) -> Result<JoinHandle<()>> {
    let shared = Arc::clone(shared);
    let ready = Arc::new(Barrier::new(2));
    let started = Arc::clone(&ready);
    match threads::spawn("ringverbs-hca", move || run(&shared, drive, &started)) {
        Ok(thread) => {
            ready.wait();
            Ok(thread)
        }
        Err(error) => refuse(error.raw_os_error().unwrap_or(libc::EAGAIN)),
    }
}

impl Runner {
    /// Creates a runner without devices.
    pub(crate) fn new(
        fabric: Fabric,
        pool: Pool,
        drive: Drive,
        config: WireConfig,
        time: Option<SimulatedTime>,
    ) -> Result<Arc<Self>> {
        let WireParts {
            link,
            manager,
            network,
            numbers,
            addresses,
            links,
            peers,
            reasons,
            control,
        } = match config {
            WireConfig::None => WireParts::alone(time.as_ref()),
            WireConfig::Directory(directory) => WireParts::in_directory(directory, &fabric, &pool),
            WireConfig::Udp(ports) => WireParts::by_udp(ports, &fabric, &pool),
        }?;
        let nodes = (time.is_some()).then(|| Nodes::new(manager.agents(), pool.clone()));
        let shared = Arc::new(Shared {
            link,
            nodes,
            fabric,
            pool,
            manager,
            reasons,
            control,
            recorder: Mutex::default(),
            on_die: OnceLock::new(),
            devices: Mutex::default(),
            device_count: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            waiters: Waiters::default(),
            frame_right: FrameRight::default(),
            polling_turns: AtomicU64::new(0),
            event_waits: AtomicU64::new(0),
            wake_requested: AtomicBool::new(false),
            thread_flush: AtomicU8::new(match drive {
                Drive::Caller => NO_THREAD,
                Drive::Thread | Drive::Watch => NOT_REQUESTED,
            }),
            // With simulated time every doorbell must call `wake`, so the thread always
            // counts as asleep.
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
        // New threads inherit the time slice of their creator: a short one starts them
        // sooner on a busy host.
        request_short_slice();
        let thread = match drive {
            Drive::Caller => None,
            Drive::Thread | Drive::Watch => Some(start_thread(&shared, drive)?),
        };
        Ok(Arc::new(Self {
            shared,
            network,
            seed: OnceLock::new(),
            patience: OnceLock::new(),
            chaos: OnceLock::new(),
            numbers,
            addresses,
            links,
            peers,
            thread,
        }))
    }

    /// Adds the device that `make` creates, given its numbers in the network and in this
    /// process.
    pub(crate) fn add(
        &self,
        make: impl FnOnce(usize, usize, &Fabric, Pool) -> std::result::Result<Arc<Device>, Errno>,
    ) -> Result<Arc<Device>> {
        let mut devices = self.shared.devices();
        let index = devices.len();
        if index >= self.numbers.len() {
            return refuse(libc::ENOMEM);
        }
        let number = self.numbers.start + index;
        let device = make(number, index, &self.shared.fabric, self.shared.pool.clone())?;
        let has_link = self.shared.link.is_some();
        {
            let mut state = device.lock();
            state.hca.set_confirmed(has_link);
            if self.shared.nodes.is_some() {
                state.hca.keep_management();
            }
        }
        if let Some(recorder) = &*self.shared.recorder() {
            device.record_frames(Some(recorder), index);
        }
        devices.push(Arc::clone(&device));
        self.shared
            .device_count
            .store(devices.len(), Ordering::Release);
        self.shared.read_control(&devices, true);
        Ok(device)
    }

    /// Sets what records the frames of all devices and of the wire. Returns what did before.
    pub(crate) fn record_frames(&self, recorder: Option<Arc<Recorder>>) -> Option<Arc<Recorder>> {
        self.shared.record_frames(&self.shared.devices(), recorder)
    }

    /// Sets the names of the devices, for whoever looks at them from outside.
    pub(crate) fn set_names(&self, names: &[String]) {
        if let Some(control) = &self.shared.control {
            control.set_names(names);
        }
    }

    /// Runs a turn of all devices. Returns whether anything happened or more is left
    /// to do; `None` if another thread is driving.
    pub(crate) fn turn(&self) -> Option<bool> {
        self.take_turn().map(|turn| turn.busy)
    }

    /// As [`Runner::turn`]; returns the whole result.
    pub(crate) fn take_turn(&self) -> Option<Turn> {
        self.shared.polling_turns.fetch_add(1, Ordering::Relaxed);
        let turn = match self.shared.devices.try_lock() {
            Ok(devices) => self.shared.turn(devices, TurnCaller::PollingThread),
            Err(TryLockError::Poisoned(devices)) => self
                .shared
                .turn(devices.into_inner(), TurnCaller::PollingThread),
            Err(TryLockError::WouldBlock) => return None,
        };
        self.wake_for_manager();
        Some(turn)
    }

    /// Returns what sends frames, for tests of the end of a process.
    #[cfg(test)]
    pub(crate) fn wire(&self) -> (&dyn Flush, Option<&Link>) {
        (&*self.shared, self.shared.link.as_ref())
    }

    /// Makes all devices read the records of requests for notification.
    pub(crate) fn read_armings(&self) {
        for device in self.shared.devices().iter() {
            device.lock().read_armings();
        }
    }

    /// Sleeps until a turn meets the condition ([`Waiters::wait`]), a frame arrives, or the
    /// time is up. One thread at a time waits for frames; its turns wake the others.
    pub(crate) fn wait(&self, condition: &WaitCondition, limit: Duration) {
        let waiters = &self.shared.waiters;
        let condition = Some(condition);
        let wait_for_turn = || {
            waiters.wait(condition, |wake| match wake {
                Some(wake) => sleep_until_readable([wake], Some(limit)),
                None => thread::sleep(limit.min(MAX_BLIND_SLEEP)),
            });
        };
        let Some(link) = &self.shared.link else {
            return wait_for_turn();
        };
        if !self.shared.frame_right.take() {
            return wait_for_turn();
        }
        waiters.wait(condition, |wake| match wake {
            Some(wake) => {
                link.wait(|arrived| sleep_until_readable([arrived, wake], Some(limit)));
            }
            None => thread::sleep(limit.min(MAX_BLIND_SLEEP)),
        });
        self.shared.frame_right.give_up();
        self.pass_frames_on();
    }

    /// Takes turns while there is something to do, and otherwise calls `sleep`, until that
    /// returns true. `sleep` gets descriptors and a limit: it sleeps until the time is up, a
    /// descriptor is readable, or what it waits for has occurred, and returns whether that has
    /// occurred.
    pub(crate) fn wait_for(
        &self,
        sleep: &mut dyn FnMut(&[BorrowedFd<'_>], Option<Duration>) -> bool,
    ) {
        let shared = &*self.shared;
        // Whether this thread has the right to wait for frames; and whether it had or waited for
        // it, and may be the one that was woken to take it.
        let (has_right, has_waited) = (Cell::new(false), Cell::new(false));
        let leave = || {
            if has_right.get() {
                shared.frame_right.give_up();
            }
            if has_waited.get() && !shared.frame_right.is_taken() {
                self.pass_frames_on();
            }
        };
        with_cleanup(leave, || {
            while let Some(due) = self.take_turns(sleep) {
                if !has_right.get() && shared.link.is_some() {
                    has_waited.set(true);
                    has_right.set(shared.frame_right.take());
                }
                let done = match &shared.link {
                    None => Some(sleep(&[], due)),
                    Some(link) if has_right.get() => link.wait(|arrived| sleep(&[arrived], due)),
                    // Until it is this thread's turn to wait for frames.
                    Some(_) => shared.waiters.wait(None, |wake| match wake {
                        Some(wake) => sleep(&[wake], due),
                        None => sleep(&[], Some(cap_sleep(MAX_BLIND_SLEEP, due))),
                    }),
                };
                if done == Some(true) {
                    break;
                }
            }
        });
        shared.event_waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes turns while there is something to do. Returns the time until something is due;
    /// `None` if `sleep` has returned true.
    fn take_turns(
        &self,
        sleep: &mut dyn FnMut(&[BorrowedFd<'_>], Option<Duration>) -> bool,
    ) -> Option<Option<Duration>> {
        let shared = &*self.shared;
        for turns in 1_u64.. {
            shared.polling_turns.fetch_add(1, Ordering::Relaxed);
            // Waits for a turn of another thread, which may have looked at a queue before this
            // thread posted to it.
            let turn = shared.turn(shared.devices(), TurnCaller::PollingThread);
            self.wake_for_manager();
            if !turn.busy {
                return Some(turn.due);
            }
            if turns % TURNS_PER_LOOK == 0 && sleep(&[], Some(Duration::ZERO)) {
                break;
            }
        }
        None
    }

    /// Called by a thread that has waited for frames: another one takes over.
    fn pass_frames_on(&self) {
        if !self.shared.waiters.wake_one() {
            // Pairs with that of the network's thread between its announcement and its attempt
            // to wait for frames.
            fence(Ordering::SeqCst);
            if self.is_asleep() {
                self.wake_thread();
            }
        }
    }

    /// Returns the threads that wait.
    pub(crate) fn waiters(&self) -> &Waiters {
        &self.shared.waiters
    }

    /// Returns whether the network's thread sleeps, so that a doorbell must wake it.
    #[inline]
    pub(crate) fn is_asleep(&self) -> bool {
        self.shared.sleeper.is_asleep()
    }

    /// Returns the time by which a turn must be taken if nothing else happens.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let devices = self.shared.devices();
        let deadlines = devices.iter().map(|device| device.lock().hca.deadline());
        let deadlines = deadlines.chain([self.manager().deadline()]);
        deadlines.flatten().min()
    }

    /// Returns the simulated time.
    pub(crate) fn time(&self) -> Option<&SimulatedTime> {
        self.shared.time.as_ref()
    }

    pub(crate) fn seed(&self) -> Option<u64> {
        self.seed.get().copied()
    }

    /// Returns how long peers on other hosts may be silent.
    pub(crate) fn patience(&self) -> Duration {
        self.patience.get().copied().unwrap_or_default()
    }

    /// Sets how long peers on other hosts may be silent, if it is not set.
    pub(crate) fn set_patience(&self, patience: Duration) {
        self.patience.get_or_init(|| patience);
    }

    /// Sets the seed of the devices' numbers, if it is not set.
    pub(crate) fn set_seed(&self, seed: u64) {
        self.seed.get_or_init(|| seed);
    }

    pub(crate) fn chaos(&self) -> Option<Arc<Chaos>> {
        self.chaos.get().cloned()
    }

    /// Sets the source of decisions about what devices do late, if there is none.
    pub(crate) fn set_chaos(&self, chaos: Chaos) {
        self.chaos.get_or_init(|| Arc::new(chaos));
    }

    /// Returns the fabric that connects the devices.
    pub(crate) fn fabric(&self) -> &Fabric {
        &self.shared.fabric
    }

    /// Returns whether a thread drives the devices.
    pub(crate) fn has_thread(&self) -> bool {
        self.thread.is_some()
    }

    /// Returns the descriptor that wakes the network's thread.
    pub(crate) fn wake_descriptor(&self) -> Option<RawFd> {
        self.shared.link.as_ref().map(Link::wake_descriptor)
    }

    /// Returns the network's connection manager.
    pub(crate) fn manager(&self) -> &Manager {
        &self.shared.manager
    }

    /// Returns the devices.
    pub(crate) fn devices(&self) -> Vec<Arc<Device>> {
        self.shared.devices().clone()
    }

    /// Returns what ends the process, if a fault says so.
    pub(crate) fn on_die(&self) -> &OnceLock<fn()> {
        &self.shared.on_die
    }

    /// Returns the questions to peers, if there is a wire.
    pub(crate) fn reasons(&self) -> Option<&Reasons> {
        self.shared.reasons.as_deref()
    }

    /// Sends the connection manager's datagrams. What is left, and a deadline, are for the
    /// network's thread.
    pub(crate) fn send_management(&self) {
        if (self.shared.link.as_ref()).is_some_and(Link::send_management) {
            self.wake_thread();
        }
        self.wake_for_manager();
    }

    /// Wakes the network's thread if the connection manager, or a question to a peer, has
    /// something due before it planned to wake.
    fn wake_for_manager(&self) {
        let repeats = || self.reasons().is_some_and(Reasons::needs_thread);
        if self.has_thread() && (self.manager().needs_turn() || repeats()) {
            self.wake_thread();
        }
    }

    /// Returns the network's identifier, a part of its devices' MAC addresses.
    pub(crate) fn network(&self) -> u16 {
        self.network
    }

    /// Returns the addresses of its device, if they are the host's.
    pub(crate) fn addresses(&self) -> Option<&HostAddresses> {
        self.addresses.as_ref()
    }

    /// Returns the links of its devices' ports, if a wire decides about them.
    pub(crate) fn links(&self) -> Option<&Arc<Links>> {
        self.links.as_ref()
    }

    /// Returns the processes that have the devices which a wire reaches.
    pub(crate) fn peers(&self) -> Option<&Arc<dyn PeerProcesses>> {
        self.peers.as_ref()
    }

    /// Wakes the threads that drive the network, after a command.
    pub(crate) fn wake(&self) {
        if self.shared.time.is_none() {
            // The command may have taken turns.
            self.shared.waiters.wake(true);
        }
        self.wake_thread();
    }

    /// Wakes the network's thread, unless it is awake or somebody else wakes it.
    pub(crate) fn wake_thread(&self) {
        if let Some(time) = &self.shared.time {
            return time.record_call();
        }
        self.shared.wake_requested.store(true, Ordering::Relaxed);
        if self.shared.sleeper.claim_wake() {
            self.shared.rouse(self.thread.as_ref());
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
        if let Some(link) = &self.link {
            // Not blocking: the thread that has the wire may no longer exist.
            let end = Instant::now() + MAX_CLOSE_WAIT;
            while !link.close() && Instant::now() < end {
                thread::yield_now();
            }
        }
        let end = Instant::now() + MAX_FRAME_WAIT;
        while self.is_sending() && Instant::now() < end {
            thread::yield_now();
        }
    }

    fn request_flush(&self) {
        let order = Ordering::Relaxed;
        let requested =
            self.thread_flush
                .compare_exchange(NOT_REQUESTED, REQUESTED, Ordering::Release, order);
        if let (Ok(_), Some(link)) = (requested, &self.link) {
            self.wake_requested.store(true, Ordering::Release);
            link.wake();
        }
    }

    fn awaits_flush(&self) -> bool {
        self.thread_flush.load(Ordering::Acquire) == REQUESTED
    }
}

/// Shortens a sleep so that it ends when something is due.
pub(crate) fn cap_sleep(sleep: Duration, due: Option<Duration>) -> Duration {
    due.map_or(sleep, |due| sleep.min(due))
}

/// Pages of doorbell registers of a driver that does not call
/// [`Embedded::notify_doorbell`](crate::Embedded::notify_doorbell).
pub trait DoorbellGuard: Sync {
    /// Arranges that the next doorbell in any page calls
    /// [`Embedded::notify_doorbell`](crate::Embedded::notify_doorbell). Returns whether that is
    /// possible. Called by the threads of networks before they sleep.
    fn protect(&self) -> bool;
}

/// The guard set by [`guard_doorbells`].
static DOORBELL_GUARD: OnceLock<&'static dyn DoorbellGuard> = OnceLock::new();

/// Returns whether the next doorbell will wake the network's thread.
fn is_guarded() -> bool {
    DOORBELL_GUARD.get().is_some_and(|guard| guard.protect())
}

/// Sets what tells networks with [`Drive::Watch`] of doorbells while their threads sleep. Only
/// the first call has an effect.
pub fn guard_doorbells(guard: &'static dyn DoorbellGuard) {
    let _ = DOORBELL_GUARD.set(guard);
}

/// The thread's main loop.
fn run(shared: &Shared, drive: Drive, started: &Barrier) {
    init_thread();
    prepare_thread();
    started.wait();
    let mut devices: Vec<Arc<Device>> = Vec::new();
    let mut backoff = Backoff::NEW;
    let (mut polling_turns, mut event_waits, mut rest) = (0, 0, MIN_REST);
    let mut uar_changes = 0;
    while !shared.stop.load(Ordering::Relaxed) {
        if shared.thread_flush.load(Ordering::Relaxed) == REQUESTED {
            shared.flush();
            shared.thread_flush.store(FLUSHED, Ordering::Release);
        }
        let (polling_turns_before, event_waits_before) = (polling_turns, event_waits);
        polling_turns = shared.polling_turns.load(Ordering::Relaxed);
        event_waits = shared.event_waits.load(Ordering::Relaxed);
        let requested = shared.wake_requested.swap(false, Ordering::Relaxed);
        if polling_turns != polling_turns_before && !requested {
            // Threads of the program do the work: this thread would contend for the devices'
            // locks and the processor.
            shared.sleeper.announce_rest();
            shared.sleep(false, Some(rest));
            let longest = match event_waits != event_waits_before {
                true => MAX_EVENT_REST,
                false => MAX_REST,
            };
            rest = (rest * 2).min(longest);
            backoff = Backoff::NEW;
            continue;
        }
        rest = MIN_REST;
        let uar_changes_before = uar_changes;
        uar_changes = uar_counts().changes;
        if uar_changes != uar_changes_before {
            // The program has not yet mapped the page.
            backoff = Backoff::NEW;
        }
        if devices.len() != shared.device_count.load(Ordering::Acquire) {
            devices.clone_from(&shared.devices());
        }
        let turn = shared.turn(&devices, TurnCaller::NetworkThread);
        if turn.busy {
            backoff = Backoff::NEW;
        } else if !turn.in_use {
            // Activity begins with a command or a frame, and both wake this thread.
            shared.sleeper.announce_rest();
            shared.sleep(true, turn.due);
            backoff = Backoff::NEW;
        } else {
            match backoff.pause(MAX_SLEEP) {
                None => std::hint::spin_loop(),
                Some(sleep) if sleep >= MIN_ANNOUNCED_SLEEP && shared.sleeper.announce() => {
                    let limit = match drive {
                        Drive::Watch if is_guarded() => None,
                        Drive::Watch => Some(sleep.min(MAX_UNTOLD_SLEEP)),
                        _ if sleep == MAX_SLEEP => None,
                        _ => Some(sleep),
                    };
                    // Finds the doorbells before the announcement.
                    let turn = shared.turn(&devices, TurnCaller::NetworkThread);
                    if turn.busy {
                        shared.sleeper.awake();
                        backoff = Backoff::NEW;
                    } else {
                        let limit = limit.map(|limit| cap_sleep(limit, turn.due));
                        shared.sleep(true, limit.or(turn.due));
                    }
                }
                Some(sleep) => {
                    let sleep = sleep.min(MAX_UNANNOUNCED_SLEEP);
                    shared.sleeper.announce_rest();
                    shared.sleep(true, Some(cap_sleep(sleep, turn.due)));
                }
            }
        }
    }
}
