//! The devices and descriptors of this process.
//!
//! A child of fork starts without devices: the thread that drives them does not exist in the
//! child, and locks may have been held. The inherited state is never accessed. Contexts with
//! nothing but protection domains are listed before the fork ([`Inherited`]), and made anew when
//! the child first uses a device.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use embedded::{Descriptors, Drive, Embedded, InheritedContext, Network, usage};
use uverbs::kernel::Kernel;
use uverbs::{Errno, Error};

use crate::calls::find_data_start;
use crate::check::Checker;
use crate::config::{self, print_error};
use crate::explain::{Explainer, Target};
use crate::table::{self, Object, ObjectKind, ProgramDescriptors, Table};
use crate::{doorbells, fault, internal};

static CURRENT: AtomicPtr<ProcessState> = AtomicPtr::new(ptr::null_mut());
static GENERATION: AtomicU8 = AtomicU8::new(1);
/// The contexts that this process has inherited, until it uses a device; or those that the next
/// child inherits.
static INHERITED: AtomicPtr<Vec<Inherited>> = AtomicPtr::new(ptr::null_mut());
/// This process has reported the use of a context that is its parent's.
static REPORTED: AtomicBool = AtomicBool::new(false);
/// How long a fork waits for threads that use the devices.
const MAX_FORK_WAIT: Duration = Duration::from_millis(100);

/// A context that a child of fork has, too.
struct Inherited {
    /// The number of its device.
    number: usize,
    context: InheritedContext,
    /// The program's descriptors of it.
    fds: Vec<RawFd>,
    /// As above, of each of its event files.
    events: Vec<Vec<RawFd>>,
}

/// Replaces the list of inherited contexts. Returns the former one.
fn exchange_inherited(new: *mut Vec<Inherited>) -> Vec<Inherited> {
    let former = INHERITED.swap(new, Ordering::AcqRel);
    if former.is_null() {
        return Vec::new();
    }
    // SAFETY: made from a box, and taken once.
    *unsafe { Box::from_raw(former) }
}

/// Runs before a fork, in the parent.
extern "C" fn before_fork() {
    let current = CURRENT.load(Ordering::Acquire);
    if current.is_null() || internal::is_internal() {
        return;
    }
    // SAFETY: states are never freed.
    let state = unsafe { &*current };
    // A process that has used no device passes on what it has inherited.
    if let (Some(devices), false) = (state.ready.get(), state.is_foreign()) {
        // In a handler that interrupts code of the devices, this thread may hold their locks.
        let wait = match internal::is_interrupted() {
            true => Duration::ZERO,
            false => MAX_FORK_WAIT,
        };
        let _scope = internal::enter();
        let list = state.inheritable(devices, Instant::now() + wait);
        exchange_inherited(match list.is_empty() {
            true => ptr::null_mut(),
            false => Box::into_raw(Box::new(list)),
        });
    }
}

/// The devices and descriptors of a process.
pub(crate) struct ProcessState {
    pub(crate) table: Table,
    /// Differs from the generation of parent processes.
    pub(crate) generation: u8,
    process: libc::pid_t,
    devices: Mutex<Option<&'static [Embedded]>>,
    /// Answers that sockets for RDMA netlink, by their ports, have no room for yet.
    pub(crate) answers: Mutex<HashMap<u32, VecDeque<Vec<u8>>>>,
    /// The same devices, readable without a lock.
    ready: OnceLock<&'static [Embedded]>,
    /// What reports the causes of the devices.
    explainer: OnceLock<&'static Explainer>,
}

fn pid() -> libc::pid_t {
    // SAFETY: a call without arguments.
    unsafe { libc::getpid() }
}

/// Runs in a child of fork; uses only atomics and close(2).
extern "C" fn after_fork() {
    // The parent's state is abandoned, since its locks may be held.
    CURRENT.store(ptr::null_mut(), Ordering::Relaxed);
    let generation = GENERATION.load(Ordering::Relaxed);
    GENERATION.store(table::next_generation(generation), Ordering::Relaxed);
    REPORTED.store(false, Ordering::Relaxed);
    doorbells::after_fork();
    let _scope = internal::enter();
    table::each_marked(0..usize::MAX, |fd, own| {
        if own {
            // Closed, so that the parent's membership and sockets end with the parent.
            // SAFETY: the descriptor belongs to a device of the parent, which is not used
            // here.
            unsafe { crate::real::close(fd) };
            table::clear(fd);
        }
    });
}

impl ProcessState {
    /// Returns the state of this process.
    pub(crate) fn current() -> &'static Self {
        static FORKS: Once = Once::new();
        let current = CURRENT.load(Ordering::Acquire);
        if !current.is_null() {
            // SAFETY: states are never freed.
            return unsafe { &*current };
        }
        FORKS.call_once(|| {
            // SAFETY: the handlers may be called in any process.
            _ = unsafe { libc::pthread_atfork(Some(before_fork), None, Some(after_fork)) };
        });
        let new = Box::into_raw(Box::new(Self {
            table: Table::default(),
            generation: GENERATION.load(Ordering::Relaxed),
            process: pid(),
            devices: Mutex::new(None),
            answers: Mutex::default(),
            ready: OnceLock::new(),
            explainer: OnceLock::new(),
        }));
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        match CURRENT.compare_exchange(ptr::null_mut(), new, success, failure) {
            // SAFETY: states are never freed once they are current.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: created above, and not current: another thread was first.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: states are never freed.
                unsafe { &*other }
            }
        }
    }

    /// Returns whether the state belongs to another process that shares its memory with this
    /// one (vfork).
    pub(crate) fn is_foreign(&self) -> bool {
        self.process != pid()
    }

    /// Returns the devices. The first call joins the network.
    pub(crate) fn devices(&self) -> Result<&'static [Embedded], Errno> {
        if let Some(devices) = self.ready.get() {
            return Ok(devices);
        }
        let mut created = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(devices) = *created {
            return Ok(devices);
        }
        let _scope = internal::enter();
        let devices = join()?;
        self.adopt(devices);
        self.explain(devices);
        *created = Some(devices);
        // Succeeds: only the holder of the lock sets it.
        let _ = self.ready.set(devices);
        Ok(devices)
    }

    /// Reports the causes of devices, and errors of the program, if that is asked for.
    fn explain(&self, devices: &'static [Embedded]) {
        let Some(config) = config::get() else { return };
        let names = (config.explain.as_ref(), config.check.as_ref());
        let Some(name) = names.0.or(names.1) else {
            return;
        };
        let checker = names.1.and_then(|_| {
            let checker = Checker::new(config).map_err(|error| print_error(&error));
            checker.ok()
        });
        match Target::open(name) {
            Ok(target) => {
                let explains = config.explain.is_some();
                let format = config.explain_format;
                // SAFETY: a process joins the network once.
                let explainer = unsafe { Explainer::new((target, format), explains, checker) };
                let explainer = self
                    .explainer
                    .get_or_init(|| Box::leak(Box::new(explainer)));
                explainer.observe(devices);
            }
            Err(error) => print_error(&format!("{}: {error}", name.display())),
        }
    }

    /// Lists the contexts that a child of fork can have, too; none if other threads hold the
    /// locks until then.
    fn inheritable(&self, devices: &[Embedded], until: Instant) -> Vec<Inherited> {
        let Some(open) = self.table.list(until) else {
            return Vec::new();
        };
        let fds_of = |fd, kind: &dyn Fn(ObjectKind) -> bool| {
            let same = open.iter().filter(|(_, it)| it.fd == fd && kind(it.kind));
            same.map(|(fd, _)| *fd).collect::<Vec<_>>()
        };
        let mut list: Vec<Inherited> = Vec::new();
        for (fd, object) in &open {
            let ObjectKind::Device(number) = object.kind else {
                continue;
            };
            if list.iter().any(|it| it.fds.contains(fd)) {
                continue;
            }
            let device = devices.get(number);
            let context = device.and_then(|device| device.inheritable(object.fd, until));
            list.extend(context.map(|context| {
                Inherited {
                    number,
                    fds: fds_of(object.fd, &|kind| matches!(kind, ObjectKind::Device(_))),
                    events: (context.events())
                        .map(|fd| fds_of(fd, &|kind| kind == ObjectKind::Events))
                        .collect(),
                    context,
                }
            }));
        }
        list
    }

    /// Makes the inherited contexts anew whose descriptors the program has not closed.
    fn adopt(&self, devices: &[Embedded]) {
        let inherited = exchange_inherited(ptr::null_mut());
        for (number, device) in devices.iter().enumerate() {
            let of_device = inherited.iter().filter(|it| it.number == number);
            self.adopt_on(device, &of_device.collect::<Vec<_>>());
        }
    }

    fn adopt_on(&self, device: &Embedded, inherited: &[&Inherited]) {
        let stale = |fds: &[RawFd]| {
            let is_stale = |fd: &&RawFd| matches!(table::find(**fd), table::Lookup::Stale);
            fds.iter().filter(is_stale).copied().collect::<Vec<_>>()
        };
        let (mut contexts, mut programs, mut open) = (Vec::new(), Vec::new(), Vec::new());
        for it in inherited {
            let fds = stale(&it.fds);
            let Some(first) = fds.first() else { continue };
            // SAFETY: creates a descriptor, unless the number is not open.
            let fd = unsafe { libc::fcntl(*first, libc::F_DUPFD_CLOEXEC, 0) };
            if fd < 0 {
                continue;
            }
            // SAFETY: created above, and owned by nothing else.
            let registers = unsafe { OwnedFd::from_raw_fd(fd) };
            contexts.push((it.context.clone(), registers));
            programs.push(Arc::new(ProgramDescriptors {
                kernel: OnceLock::new(),
            }));
            open.push((it.number, fds, &it.events));
        }
        let descriptors = programs
            .iter()
            .map(|it| Arc::clone(it) as Arc<dyn Descriptors>);
        let adopted = device.adopt(contexts, &descriptors.collect::<Vec<_>>());
        let Ok(adopted) = adopted else {
            // Their use is reported.
            return;
        };
        for (((kernel, fd, events), program), (number, fds, fds_of_events)) in
            adopted.into_iter().zip(programs).zip(open)
        {
            // Succeeds: the value is new.
            let _ = program.kernel.set(Arc::downgrade(&kernel));
            let object = |fd, kind| Object {
                kernel: Arc::clone(&kernel),
                fd,
                kind,
                nonblocking: AtomicBool::new(false),
            };
            let context = Arc::new(object(fd, ObjectKind::Device(number)));
            for fd in fds {
                let _ = self.table.insert(fd, Arc::clone(&context));
            }
            for (fd, of_program) in events.into_iter().zip(fds_of_events) {
                let events = Arc::new(object(fd, ObjectKind::Events));
                for fd in stale(of_program) {
                    let _ = self.table.replace(fd, Arc::clone(&events));
                }
            }
        }
    }

    /// Opens a device.
    pub(crate) fn open_device(&self, number: usize, cloexec: bool) -> Result<RawFd, Errno> {
        let devices = self.devices()?;
        let _scope = internal::enter();
        let device = devices.get(number).ok_or(Errno::new(libc::ENXIO))?;
        let program = Arc::new(ProgramDescriptors {
            kernel: OnceLock::new(),
        });
        let (kernel, fd) = device.open(Arc::<ProgramDescriptors>::clone(&program))?;
        // Succeeds: the value is new.
        let _ = program.kernel.set(Arc::downgrade(&kernel));
        usage::count_open();
        self.add(kernel, fd, ObjectKind::Device(number), cloexec)
    }

    /// Opens an event channel of the connection manager, whose ids are on the first device.
    pub(crate) fn open_manager(&self, cloexec: bool) -> Result<RawFd, Errno> {
        let devices = self.devices()?;
        let _scope = internal::enter();
        let device = devices.first().ok_or(Errno::new(libc::ENXIO))?;
        let kernel: Arc<dyn Kernel> = Arc::from(device.connection_manager());
        let fd = kernel.open(c"/dev/infiniband/rdma_cm", libc::O_RDWR)?;
        self.add(kernel, fd, ObjectKind::Manager, cloexec)
    }

    fn add(
        &self,
        kernel: Arc<dyn Kernel>,
        fd: RawFd,
        kind: ObjectKind,
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

/// Makes inherited contexts anew, for a program that uses a descriptor of its parent. Returns
/// whether that may have become one of this process; reports it otherwise.
pub(crate) fn adopt_for_use() -> bool {
    if !INHERITED.load(Ordering::Acquire).is_null() && ProcessState::current().devices().is_ok() {
        return true;
    }
    report_use_of_parent();
    false
}

/// Reports, once, the use of something that is the parent's.
pub(crate) fn report_use_of_parent() {
    if !REPORTED.swap(true, Ordering::Relaxed) {
        print_error(
            "what a parent process has made of a device does not work after a fork (EIO), but for \
             contexts with nothing but protection domains: open the device after the fork",
        );
    }
}

/// Reports, once, that raw packets take a right that the process lacks.
pub(crate) fn report_missing_right() {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    if !REPORTED.swap(true, Ordering::Relaxed) {
        print_error(
            "raw packets on a network interface take CAP_NET_RAW in its network namespace (EPERM): \
             run the program as root, or with the interface in namespaces of its own (`unshare \
             --map-root-user --net`)",
        );
    }
}

/// Returns the first device of this process, if there is one. Driving it drives all.
#[inline]
fn any_device() -> Option<&'static Embedded> {
    let current = CURRENT.load(Ordering::Acquire);
    if current.is_null() {
        return None;
    }
    // SAFETY: states are never freed.
    unsafe { &*current }.ready.get()?.first()
}

/// Returns what reports the causes of this process's devices, if that is asked for.
#[inline]
pub(crate) fn explainer() -> Option<&'static Explainer> {
    let current = CURRENT.load(Ordering::Acquire);
    if current.is_null() {
        return None;
    }
    // SAFETY: states are never freed.
    unsafe { &*current }.explainer.get().copied()
}

/// Returns whether errors of the program are reported.
pub(crate) fn checks() -> bool {
    explainer().is_some_and(|explainer| explainer.checker.is_some())
}

/// Returns the devices of this process, none before it has joined the network.
pub(crate) fn ready_devices() -> &'static [Embedded] {
    let current = CURRENT.load(Ordering::Acquire);
    if current.is_null() {
        return &[];
    }
    // SAFETY: states are never freed.
    unsafe { &*current }
        .ready
        .get()
        .copied()
        .unwrap_or_default()
}

/// Returns the devices if memory of a range may be registered with them, and the program, not
/// a device, changes it. Takes no lock.
#[inline]
pub(crate) fn devices_of_memory(range: &Range<usize>) -> Option<&'static [Embedded]> {
    if !embedded::may_be_registered(range) || internal::is_internal() {
        return None;
    }
    let current = CURRENT.load(Ordering::Acquire);
    if current.is_null() {
        return None;
    }
    // SAFETY: states are never freed.
    let state = unsafe { &*current };
    (!state.is_foreign()).then_some(*state.ready.get()?)
}

/// Called before the program waits for events in a call that does not drive the devices:
/// their thread does.
#[inline]
pub(crate) fn wake_devices() {
    if let Some(device) = any_device().filter(|_| !internal::is_internal()) {
        device.notify_armed();
    }
}

/// Called after a doorbell.
pub(crate) fn doorbell_rung() {
    if let Some(device) = any_device() {
        device.notify_doorbell();
    }
}

/// Returns the device that a thread drives in a call that waits. If it only looks for events,
/// drives the devices once and returns `None`.
#[inline]
pub(crate) fn waiting_device(waits: bool) -> Option<&'static Embedded> {
    let device = any_device().filter(|_| internal::may_drive())?;
    if waits {
        return Some(device);
    }
    let _scope = internal::enter();
    device.try_drive();
    None
}

/// The completion queue of a thread's last empty poll.
struct PolledQueue {
    /// Its address, its handle, and the generation of the process.
    identity: (usize, u32, u8),
    /// The device, once the queue was polled twice in turn.
    device: Option<Embedded>,
}

thread_local! {
    static POLLED: RefCell<PolledQueue> = const {
        RefCell::new(PolledQueue { identity: (0, 0, 0), device: None })
    };
}

/// Called when a poll has found nothing: drives the devices, or sleeps. The queue is given by
/// its address, its handle and its context's descriptor. Returns false if the queue is a parent
/// process's, which is reported.
pub(crate) fn idle(queue: usize, handle: u32, command_fd: RawFd) -> bool {
    let Some(device) = any_device() else {
        return !is_of_parent(command_fd);
    };
    if !internal::may_drive() {
        return true;
    }
    let _scope = internal::enter();
    let identity = (queue, handle, GENERATION.load(Ordering::Relaxed));
    let polled = POLLED.try_with(|polled| {
        let mut polled = polled.borrow_mut();
        if polled.identity != identity {
            // A thread that polls several queues in turn waits for all of them.
            polled.identity = identity;
            polled.device = None;
        } else if !polled
            .device
            .as_ref()
            .is_some_and(Embedded::polled_queue_exists)
        {
            let number = match table::find(command_fd) {
                table::Lookup::Open(object) => match object.kind {
                    ObjectKind::Device(number) => Some(number),
                    _ => None,
                },
                table::Lookup::Stale => {
                    report_use_of_parent();
                    return false;
                }
                _ => None,
            };
            let current = ProcessState::current().ready.get();
            let of = number.and_then(|number| current?.get(number));
            polled.device = of.map(|device| device.polling(handle));
        }
        polled.device.as_ref().unwrap_or(device).idle();
        true
    });
    polled.unwrap_or_else(|_| {
        // The thread is ending.
        device.idle();
        true
    })
}

/// Returns whether a descriptor is that of a device of a parent process, which is reported.
fn is_of_parent(fd: RawFd) -> bool {
    let is_stale = matches!(table::find(fd), table::Lookup::Stale);
    if is_stale {
        report_use_of_parent();
    }
    is_stale
}

/// Called when a poll has found a completion.
pub(crate) fn poll_succeeded() {
    if let Some(device) = any_device() {
        device.poll_succeeded();
    }
}

/// Called before a request for notification overwrites an earlier one.
pub(crate) fn read_armings() {
    if let Some(device) = any_device().filter(|_| internal::may_drive()) {
        let _scope = internal::enter();
        device.read_armings();
    }
}

/// Joins the network and creates the devices. They exist until the process ends.
fn join() -> Result<&'static [Embedded], Errno> {
    let config = config::get().ok_or(Errno::new(libc::ENOENT))?;
    let failed = |error: Error| {
        let (errno, reason) = match &error {
            Error::Refused { errno, .. } if errno.raw() == libc::EUSERS => {
                let reason = match &config.host {
                    Some(_) => "64 processes use it already: end some",
                    None => {
                        "256 processes use it already: end some, or give programs that need not \
                         reach them another directory (ringverbs run --directory)"
                    }
                };
                (*errno, reason.to_owned())
            }
            Error::Refused { errno, .. } => (*errno, error.to_string()),
            Error::Invalid { what, .. } => (Errno::new(libc::EACCES), (*what).to_owned()),
            _ => (Errno::new(libc::EIO), error.to_string()),
        };
        match &config.host {
            Some(host) => print_error(&format!("{host}: {reason}")),
            None => print_error(&format!("{}: {reason}", config.directory.display())),
        }
        errno
    };
    if !config::has_room_for_files() {
        return Err(Errno::new(libc::EFBIG));
    }
    if let Some(file) = &config.usage {
        if let Err(error) = usage::count_in(file) {
            print_error(&format!("{}: {error}", file.display()));
        }
    }
    embedded::set_scope_hooks(internal::enter_scope, internal::leave_scope);
    fault::install();
    find_data_start();
    doorbells::open_files();
    embedded::guard_doorbells(&doorbells::Guard);
    // C providers do not call `notify_doorbell`: the guard does.
    let network = match &config.host {
        Some(host) => Network::roce(Drive::Watch, host),
        None => Network::joined(Drive::Watch, &config.directory),
    };
    let network = network.map_err(failed)?;
    if let Some(seed) = config.seed {
        network.set_seed(seed);
    }
    let devices = config.profiles.iter().zip(&config.cards).zip(&config.links);
    let device = |((profile, card), link): ((&&str, &&'static _), &_)| {
        network.device_of_card(profile, card, *link, &config.gids)
    };
    let devices = devices.map(|of| device(of).map_err(failed));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    Ok(devices.leak())
}
