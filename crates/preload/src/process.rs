//! The devices and descriptors of this process.
//!
//! A child of fork starts without devices: the thread that drives them does not exist in the
//! child, and locks may have been held. The inherited state is never accessed. Contexts with
//! nothing but protection domains, and event channels of the connection manager, are listed before
//! the fork ([`Inheritance`]). The child makes contexts anew when it first uses a device, and takes
//! a channel when it first uses that.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use embedded::softhca::work::WorkObserver;
use embedded::{
    CaptureOptions, Descriptors, Drive, Embedded, FaultCounts, FaultRecord, InheritedChannel,
    InheritedContext, Network, usage,
};
use uverbs::kernel::Kernel;
use uverbs::{Errno, Error};

use crate::calls::find_data_start;
use crate::chaos;
use crate::check::{self, Checker};
use crate::config::{self, Config, print_error};
use crate::explain::{Explainer, Target};
use crate::table::{self, Object, ObjectKind, ProgramDescriptors, Table};
use crate::{doorbells, fault, host, internal, own, real, record};

static CURRENT: AtomicPtr<ProcessState> = AtomicPtr::new(ptr::null_mut());
static GENERATION: AtomicU8 = AtomicU8::new(1);
/// What this process has inherited, until it uses a device; or what the next child inherits.
static INHERITED: AtomicPtr<Inheritance> = AtomicPtr::new(ptr::null_mut());
/// This process has reported the use of what is another's since a fork.
static REPORTED: AtomicBool = AtomicBool::new(false);
/// This process has inherited channels, of which it may have used none.
static HAS_INHERITED_CHANNELS: AtomicBool = AtomicBool::new(false);
/// How long a fork waits for threads that use the devices.
const MAX_FORK_WAIT: Duration = Duration::from_secs(1);

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

/// An event channel that a child of fork can have in the place of its parent.
struct InheritedManager {
    channel: InheritedChannel,
    /// The program's descriptors of it.
    fds: Vec<RawFd>,
    /// The process that had it (pidfd_open(2)); `None` before Linux 5.3.
    owner: Option<Arc<OwnedFd>>,
    /// This process has tried to take it, or closed it.
    is_done: AtomicBool,
}

impl InheritedManager {
    /// Returns the program's descriptors that are still of it.
    fn open_fds(&self) -> impl Iterator<Item = RawFd> {
        let is_stale = |fd: &RawFd| matches!(table::find(*fd), table::Lookup::Stale);
        self.fds.iter().copied().filter(is_stale)
    }

    /// Returns the device's descriptors that a child must not close.
    fn kept(&self) -> impl Iterator<Item = RawFd> {
        let owner = self.owner.as_ref().map(|it| it.as_raw_fd());
        self.channel.descriptors().chain(owner)
    }

    /// Returns whether the process that had it has ended.
    fn is_orphaned(&self) -> bool {
        let Some(owner) = &self.owner else {
            return false;
        };
        let mut entry = libc::pollfd {
            fd: owner.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry.
        unsafe { real::poll(&raw mut entry, 1, 0) > 0 }
    }

    fn is_pending(&self) -> bool {
        !self.is_done.load(Ordering::Acquire)
    }

    /// Closes the device's descriptors.
    fn close(&self) {
        if self.is_done.swap(true, Ordering::AcqRel) {
            return;
        }
        let _scope = internal::enter();
        for fd in self.kept() {
            if table::is_internal(fd) {
                table::clear(fd);
                // SAFETY: the descriptor is that of a parent's device, kept for this channel.
                unsafe { real::close(fd) };
            }
        }
    }
}

/// What a child of fork has of its parent's devices.
#[derive(Default)]
struct Inheritance {
    contexts: Vec<Inherited>,
    channels: Vec<InheritedManager>,
}

impl Inheritance {
    fn is_empty(&self) -> bool {
        self.contexts.is_empty() && self.channels.is_empty()
    }

    /// Returns whether a child must not close a descriptor of the devices.
    fn keeps(&self, fd: RawFd) -> bool {
        let mut pending = self.channels.iter().filter(|it| it.is_pending());
        pending.any(|it| it.kept().any(|kept| kept == fd))
    }
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
        let new = match list.is_empty() {
            true => ptr::null_mut(),
            false => Box::into_raw(Box::new(list)),
        };
        let former = INHERITED.swap(new, Ordering::AcqRel);
        if !former.is_null() {
            // SAFETY: made above for an earlier child, and taken once.
            drop(unsafe { Box::from_raw(former) });
        }
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
    /// What it has inherited, once it has used a device.
    inherited: OnceLock<&'static Inheritance>,
    /// Held while a channel is taken.
    takes_channel: Mutex<()>,
}

fn pid() -> libc::pid_t {
    // SAFETY: a call without arguments.
    unsafe { libc::getpid() }
}

/// Returns a descriptor of this process, which is readable once the process has ended.
fn pidfd() -> Option<OwnedFd> {
    // SAFETY: creates a descriptor.
    let fd = unsafe { own::syscall(libc::SYS_pidfd_open, pid(), 0) } as RawFd;
    // SAFETY: created above, and owned by nothing else.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(internal::mark_internal(fd)) })
}

/// Runs in a child of fork; uses only atomics, the list of [`before_fork`] and close(2).
extern "C" fn after_fork() {
    let inherited = INHERITED.load(Ordering::Acquire);
    // SAFETY: not freed in a child.
    let inherited = unsafe { inherited.as_ref() };
    let has_channels = inherited.is_some_and(|it| !it.channels.is_empty());
    HAS_INHERITED_CHANNELS.store(has_channels, Ordering::Relaxed);
    // The parent's state is abandoned, since its locks may be held.
    CURRENT.store(ptr::null_mut(), Ordering::Relaxed);
    let generation = GENERATION.load(Ordering::Relaxed);
    GENERATION.store(table::next_generation(generation), Ordering::Relaxed);
    REPORTED.store(false, Ordering::Relaxed);
    doorbells::after_fork();
    check::after_fork();
    let _scope = internal::enter();
    table::each_marked(0..usize::MAX, |fd, own| {
        if own && !inherited.is_some_and(|it| it.keeps(fd)) {
            // Closed, so that the parent's membership and sockets end with the parent.
            // SAFETY: the descriptor belongs to a device of the parent, which is not used
            // here.
            unsafe { real::close(fd) };
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
            inherited: OnceLock::new(),
            takes_channel: Mutex::default(),
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
        self.observe_work(devices);
        *created = Some(devices);
        // Succeeds: only the holder of the lock sets it.
        let _ = self.ready.set(devices);
        Ok(devices)
    }

    /// Reports the causes of devices, and errors of the program, if that is asked for.
    fn explain(&self, devices: &'static [Embedded]) {
        let Some(config) = config::get() else { return };
        let names = (config.explain.as_ref(), config.check.report.as_ref());
        let Some(name) = names.0.or(names.1) else {
            return;
        };
        let checker = names.1.and_then(|_| {
            let checker = Checker::new(&config.check).map_err(|error| print_error(&error));
            checker.ok()
        });
        match Target::open(name) {
            Ok(target) => {
                let explains = config.explain.is_some();
                let format = config.check.format;
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

    /// Follows the work requests of queues that no hook sees, if a checker or a record needs them.
    fn observe_work(&self, devices: &'static [Embedded]) {
        let explainer = self.explainer.get().copied();
        let checker = explainer.and_then(|it| Some((it, it.checker.as_ref()?)));
        let records = record::is_on();
        if checker.is_none() && !records {
            return;
        }
        for (number, device) in devices.iter().enumerate() {
            device.observe_work(Some(WorkObserver::new(move |event| {
                let _scope = internal::enter();
                let is_checked = checker
                    .is_some_and(|(explainer, it)| it.seen_by_device(explainer, number, event));
                let is_recorded = records && record::seen_by_device(number, event);
                is_checked || is_recorded
            })));
        }
    }

    /// Lists what a child of fork can have, too; nothing if other threads hold the locks until
    /// then.
    fn inheritable(&self, devices: &[Embedded], until: Instant) -> Inheritance {
        let Some(open) = self.table.list(until) else {
            return Inheritance::default();
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
        Inheritance {
            contexts: list,
            channels: self.inheritable_channels(devices, &open, until),
        }
    }

    /// Lists the channels of this process, and those that it has inherited and not used.
    fn inheritable_channels(
        &self,
        devices: &[Embedded],
        open: &[(RawFd, Arc<Object>)],
        until: Instant,
    ) -> Vec<InheritedManager> {
        let mut list: Vec<InheritedManager> = Vec::new();
        let has_channels = open.iter().any(|(_, it)| it.kind == ObjectKind::Manager);
        let own_process = has_channels.then(pidfd).flatten().map(Arc::new);
        let inherited = self.inherited.get().into_iter();
        for it in inherited
            .flat_map(|it| &it.channels)
            .filter(|it| it.is_pending())
        {
            list.push(InheritedManager {
                channel: it.channel.clone(),
                fds: it.open_fds().collect(),
                owner: it.owner.clone(),
                is_done: AtomicBool::new(false),
            });
        }
        for (fd, object) in open.iter().filter(|(_, it)| it.kind == ObjectKind::Manager) {
            if list.iter().any(|it| it.fds.contains(fd)) {
                continue;
            }
            let device = devices.first();
            let channel = device.and_then(|it| it.inheritable_channel(object.fd, until));
            let same = open.iter().filter(|(_, it)| Arc::ptr_eq(it, object));
            list.extend(channel.map(|channel| InheritedManager {
                channel,
                fds: same.map(|(fd, _)| *fd).collect(),
                owner: own_process.clone(),
                is_done: AtomicBool::new(false),
            }));
        }
        list
    }

    /// Takes an inherited channel, by a descriptor of the program, unless another process has
    /// used it first.
    fn take_channel(&self, devices: &[Embedded], fd: RawFd) {
        let _turn = self
            .takes_channel
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let inherited = self.inherited.get().into_iter();
        let mut pending = inherited
            .flat_map(|it| &it.channels)
            .filter(|it| it.is_pending());
        let Some(found) = pending.find(|it| it.open_fds().any(|of_it| of_it == fd)) else {
            return;
        };
        let Some(device) = devices.first() else {
            return;
        };
        let _scope = internal::enter();
        let Ok((kernel, own)) = device.adopt_channel(&found.channel) else {
            report_shared_channel();
            return found.close();
        };
        let object = Arc::new(Object {
            kernel: Arc::from(kernel),
            fd: own,
            kind: ObjectKind::Manager,
            nonblocking: AtomicBool::new(false),
        });
        // The program's descriptor is that of the parent, whose readiness is the same.
        for fd in found.open_fds().collect::<Vec<_>>() {
            let _ = self.table.insert(fd, Arc::clone(&object));
        }
        found.is_done.store(true, Ordering::Release);
    }

    /// Makes the inherited contexts anew whose descriptors the program has not closed.
    fn adopt(&self, devices: &[Embedded]) {
        // SAFETY: not freed in a child.
        let Some(inherited) =
            (unsafe { INHERITED.swap(ptr::null_mut(), Ordering::AcqRel).as_ref() })
        else {
            return;
        };
        // Succeeds: a process joins the network once.
        let _ = self.inherited.set(inherited);
        for (number, device) in devices.iter().enumerate() {
            let of_device = inherited.contexts.iter().filter(|it| it.number == number);
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
        let opened = device.open(Arc::<ProgramDescriptors>::clone(&program));
        let (kernel, fd) = opened.inspect_err(|errno| report_failed_call(*errno))?;
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
        check::manager_was_opened();
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

/// Returns what this process has inherited.
fn inheritance() -> Option<&'static Inheritance> {
    // SAFETY: states are never freed.
    let state = unsafe { CURRENT.load(Ordering::Acquire).as_ref() };
    if let Some(inherited) = state.and_then(|it| it.inherited.get()) {
        return Some(inherited);
    }
    // In a process with devices, the list is that of its next child.
    let has_devices = state.is_some_and(|it| it.ready.get().is_some());
    // SAFETY: without devices the process makes no other list, and frees none.
    (!has_devices).then(|| unsafe { INHERITED.load(Ordering::Acquire).as_ref() })?
}

/// Called when the program uses a descriptor of its parent: makes inherited contexts anew, and
/// takes the descriptor's channel.
pub(crate) fn adopt_for_use(fd: RawFd) {
    let state = ProcessState::current();
    if inheritance().is_some() {
        if let Ok(devices) = state.devices() {
            state.take_channel(devices, fd);
        }
    }
}

/// Returns whether this process has inherited channels, of which it may have used none.
#[inline]
pub(crate) fn has_inherited_channels() -> bool {
    HAS_INHERITED_CHANNELS.load(Ordering::Relaxed)
}

/// Takes the inherited channels of processes that have ended, since this one waits for events,
/// which may be theirs. With `all`, also those of processes that are about to end. Returns a
/// descriptor that is readable at the end of a process with others that nobody has used.
pub(crate) fn take_orphaned_channels(all: bool) -> Option<RawFd> {
    if internal::is_internal() {
        return None;
    }
    let channels = inheritance().map_or(&[][..], |it| &it.channels);
    let mut owner = None;
    for it in channels
        .iter()
        .filter(|it| it.is_pending() && it.channel.is_free())
    {
        let Some(fd) = it.open_fds().next() else {
            continue;
        };
        match all || it.is_orphaned() {
            true => adopt_for_use(fd),
            false => owner = owner.or(it.owner.as_ref().map(|it| it.as_raw_fd())),
        }
    }
    HAS_INHERITED_CHANNELS.store(owner.is_some(), Ordering::Relaxed);
    owner
}

/// Called after the program has closed a descriptor of its parent.
pub(crate) fn closed_inherited() {
    for it in inheritance().into_iter().flat_map(|it| &it.channels) {
        if it.is_pending() && it.open_fds().next().is_none() {
            it.close();
        }
    }
}

/// Reports, once, the use of something that is the parent's.
pub(crate) fn report_use_of_parent() {
    report(
        "what a parent process has made of a device does not work after a fork (EIO), but for \
         contexts with nothing but protection domains: open the device after the fork",
    );
}

/// Reports, once, the use of a channel that is another process's.
pub(crate) fn report_shared_channel() {
    report(
        "an event channel of the connection manager, and what listens with it, does not work after \
         a fork (EIO) in all but the process that uses it first",
    );
}

fn report(sentence: &str) {
    if !REPORTED.swap(true, Ordering::Relaxed) {
        print_error(sentence);
    }
}

/// Says that a system call of the devices has failed.
fn failed_call(errno: Errno) -> String {
    let reason = std::io::Error::from_raw_os_error(errno.raw());
    match errno.raw() {
        libc::EMFILE | libc::ENFILE => "no descriptor is left: allow more (ulimit -n)".to_owned(),
        libc::EPERM | libc::ENOSYS => format!(
            "a system call that the devices need is refused, perhaps by a filter (seccomp): {reason}"
        ),
        _ => format!("a system call that the devices need has failed: {reason}"),
    }
}

/// Reports, once, a failed system call.
pub(crate) fn report_failed_call(errno: Errno) {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    if !REPORTED.swap(true, Ordering::Relaxed) {
        print_error(&failed_call(errno));
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
        return host::explainer();
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

/// Waits until the devices have done what they are doing: each has its lock meanwhile. For
/// functions that the program calls, in which no thread drives the devices. Returns false in a
/// signal handler, which may have interrupted who holds the lock.
pub(crate) fn settle() -> bool {
    let device = any_device().filter(|_| !internal::is_in_handler());
    if let Some(device) = &device {
        let _scope = internal::enter();
        device.read_armings();
    }
    device.is_some()
}

/// Records the faults that happen. A program whose record cannot be written ends: it must not run
/// unobserved.
fn record_faults(network: &Network, path: &Path) {
    let on_end = |path: &Path, reason: &dyn std::fmt::Display| {
        print_error(&format!(
            "{}: the record of faults ends here: {reason}",
            path.display()
        ));
    };
    match network.record_faults(path, Box::new(on_end)) {
        Ok(record) => {
            let record = Box::into_raw(Box::new(record));
            FAULT_RECORD.store(record, Ordering::Release);
            // SAFETY: the handler may be called at any time, and exists until the process ends.
            unsafe { libc::atexit(at_exit) };
        }
        Err(error) => {
            print_error(&format!("{}: {error}", path.display()));
            // SAFETY: as in `capture`.
            unsafe { libc::_exit(1) };
        }
    }
}

/// The record of faults of this process, or in a child of its parent. It is never freed.
static FAULT_RECORD: AtomicPtr<FaultRecord> = AtomicPtr::new(ptr::null_mut());

extern "C" fn at_exit() {
    finish_fault_record();
}

/// Called at the end of the process.
pub(crate) fn finish_fault_record() {
    if internal::is_internal() || internal::is_interrupted() {
        return;
    }
    let _scope = internal::enter();
    // SAFETY: never freed.
    if let Some(record) = unsafe { FAULT_RECORD.load(Ordering::Acquire).as_ref() } {
        record.finish();
    }
}

/// Injects the faults that are asked for.
fn inject(network: &Network, config: &Config) {
    let Some(faults) = &config.faults else {
        return;
    };
    let counts = config.fault_counts.as_deref().and_then(|file| {
        let counts = FaultCounts::open(file);
        counts
            .map_err(|error| print_error(&format!("{}: {error}", file.display())))
            .ok()
    });
    network.inject(faults, counts.map(Arc::new));
}

/// Ends the process as by a failure of its host.
fn die() {
    // SAFETY: a signal for this process.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
}

/// Captures the frames of the devices. A program whose capture cannot be written ends: it must
/// not run unobserved.
fn capture(network: &Network, options: &CaptureOptions) {
    let on_end = |path: &Path, error: &std::io::Error| {
        print_error(&format!(
            "{}: the capture ends here: {error}",
            path.display()
        ));
    };
    if let Err(error) = network.capture(options, Some(Box::new(on_end))) {
        print_error(&format!("{options}: {error}"));
        // SAFETY: a call without pointers, which ends the process. Exit handlers may use the
        // devices, which this thread is about to make.
        unsafe { libc::_exit(1) };
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
            Error::Refused { errno, .. } => (*errno, failed_call(*errno)),
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
    network.set_on_die(die);
    network.set_names(&config.names);
    if let Some(seed) = config.seed {
        network.set_seed(seed);
    }
    network.set_patience(config.patience);
    let chaos = chaos::of(config);
    if let Some(chaos) = &chaos {
        network.set_chaos(chaos.clone());
    }
    if let Some(options) = &config.capture {
        capture(&network, options);
    }
    let devices = config.profiles.iter().zip(&config.cards).zip(&config.links);
    let device = |((profile, card), link): ((&&str, &&'static _), &_)| {
        network.device_of_card(profile, card, *link, &config.gids)
    };
    let devices = devices.map(|of| device(of).map_err(failed));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    if let (Some(chaos), Some(device)) = (chaos, devices.first()) {
        chaos::start(chaos, device.number());
    }
    if let Some(path) = &config.fault_record {
        record_faults(&network, path);
    }
    inject(&network, config);
    Ok(devices.leak())
}
