//! Reports of causes: why a command was refused, a work request failed or a packet was dropped.
//!
//! With `RINGVERBS_EXPLAIN`, each device has an observer that reports each kind of cause, when it
//! is first met at a place in the program and then at the tenth, hundredth time and so on. The
//! report is written at once, under the device's lock: a reader that does not read delays the
//! device.
//!
//! ```text
//! device ── Cause ──► Explainer ──► Report ── text, JSON ──► Target
//! ioctl ── ObjectChange ──► Objects ──┘  ▲
//! post ── hooks::posts ── Post ──► Objects
//! ```

pub(crate) mod json;
mod objects;
mod report;
mod stack;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use embedded::cause::{
    Cause, Class, DropCause as ManagementDrop, ReasonDrop, VerbError, described,
};
use embedded::roce::transport::{self, DropCause, Failure, QpState};
use embedded::softhca::cause::{
    AccessError, AccessRule, Cause as DeviceCause, FrameDrop, Misuse, WorkRequest,
};
use embedded::softhca::engine::eq::event;
use embedded::softhca::rule::Rule;
use embedded::{Embedded, ObjectChange, PeerFailure, ReasonHandler};

use crate::check::{self, Checker};
use crate::table::{self, Lookup};
use crate::{hooks, internal, process, standard_error};
pub(crate) use objects::{Objects, Origin, Post, QueuePair, Stranger, is_operation, lock, thread};
use report::{Answer, Report, Summary};
pub(crate) use stack::Stack;
use stack::Symbols;

/// Maximum number of kinds of causes; others are not reported.
const MAX_KINDS: usize = 1024;

/// How long a process that ends waits for the reasons of peers: no longer than questions are
/// repeated; and how often it looks.
const MAX_ANSWER_WAIT: Duration = Duration::from_millis(300);
const ANSWER_POLL: Duration = Duration::from_millis(1);

/// Where reports go.
#[derive(Debug)]
pub(crate) enum Target {
    StandardError,
    File(File),
}

impl Target {
    /// Opens the target that the variable names: a file, to which reports are appended, or with
    /// `1` standard error.
    pub(crate) fn open(name: &Path) -> std::io::Result<Self> {
        if name == Path::new("1") {
            return Ok(Self::StandardError);
        }
        let mut options = OpenOptions::new();
        // A FIFO that nobody reads is an error.
        options.custom_flags(libc::O_NONBLOCK);
        let file = options.append(true).create(true).open(name)?;
        Ok(Self::File(file))
    }

    /// Writes a report in one call, so that those of several processes do not mix.
    fn write(&self, line: &str) {
        match self {
            Self::StandardError => standard_error::write(line),
            Self::File(file) => standard_error::write_all(file.as_raw_fd(), line.as_bytes()),
        }
    }
}

/// The form of reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Format {
    #[default]
    Text,
    /// An object on each line.
    Json,
}

impl Format {
    /// Returns the form of a name.
    pub(crate) fn named(name: &OsStr) -> Option<Self> {
        match name.to_str()? {
            "text" => Some(Self::Text),
            "json" => Some(Self::Json),
            _ => None,
        }
    }
}

/// A kind of cause that was met.
struct Met {
    count: u64,
    /// The first message, without numbers that differ.
    message: String,
}

/// Causes that a process has reported.
struct Reports {
    /// Kinds of causes.
    met: HashMap<u64, Met>,
    /// An access that failed: the cause that follows says of which request.
    access: Option<AccessError>,
    /// A work request that ends: the cause that follows says why.
    work: Option<WorkRequest>,
    /// The last refusal or drop of each queue pair, by device, number, and what its peer sees.
    refusals: HashMap<(usize, u32, PeerFailure), String>,
    /// Work requests whose peers were asked why they fail, by device and queue pair.
    asked: HashMap<(usize, u32), AskedWork>,
    /// Kinds of errors of the program.
    errors: HashMap<u64, u64>,
    symbols: Symbols,
}

impl Reports {
    /// # Safety
    /// There are no others in this process.
    unsafe fn new() -> Self {
        Self {
            met: HashMap::new(),
            access: None,
            work: None,
            refusals: HashMap::new(),
            asked: HashMap::new(),
            errors: HashMap::new(),
            // SAFETY: guaranteed by the caller.
            symbols: unsafe { Symbols::new() },
        }
    }

    /// Counts a cause. Returns how often its kind was met, if it is to be reported.
    fn count(&mut self, kind: u64, message: impl FnOnce() -> String) -> Option<u64> {
        if self.met.len() >= MAX_KINDS && !self.met.contains_key(&kind) {
            return None;
        }
        let met = self.met.entry(kind).or_insert_with(|| Met {
            count: 0,
            message: message(),
        });
        met.count += 1;
        is_power_of_ten(met.count).then_some(met.count)
    }

    /// Returns the report of a device's cause, if it is to be reported.
    fn report(
        &mut self,
        device: usize,
        cause: &Cause,
        objects: &Objects,
        checks: bool,
    ) -> Option<Report> {
        match cause {
            Cause::Device(DeviceCause::Access(error)) => {
                self.access = Some(*error);
                return None;
            }
            Cause::Device(DeviceCause::WorkRequest(work)) => {
                self.work = Some(*work);
                return None;
            }
            _ => {}
        }
        let whole = cause;
        let access = self.access.take();
        let work = self.work.take_if(|work| is_about(cause, work));
        if let Cause::Device(DeviceCause::Transport {
            qpn: Some(qpn),
            cause,
        }) = cause
        {
            let fails = match cause {
                transport::Cause::Dropped(_) => is_worth_a_report(whole),
                _ => true,
            };
            if fails {
                self.note_refusal((device, *qpn), cause, access.as_ref());
            }
        }
        // A peer may send until it learns that the queue pair was destroyed. One that is still
        // known is being destroyed.
        let had = |number| {
            objects.was_destroyed(device, number) || objects.queue_pair(device, number).is_some()
        };
        let late = late_for(cause).is_some_and(had);
        if late || !is_worth_a_report(cause) {
            return None;
        }
        let queue_pair = queue_pair_of(cause);
        let known = queue_pair.and_then(|number| objects.queue_pair(device, number));
        let numbered = known.as_ref().filter(|it| !objects.has_unseen(it));
        let post = (numbered.zip(work.as_ref()))
            .and_then(|(it, work)| it.post_of(work).or_else(|| check::shared_receive(work)));
        // The failure of the work request follows, with the same reason.
        if is_malformed_request(cause) && known.as_ref().is_some_and(|it| !it.is_raw()) {
            return None;
        }
        // A command is refused in the thread that gives it.
        let call = matches!(cause, Cause::Verb { .. }).then(Origin::here);
        let origin = post.as_ref().map(|post| &post.origin).or(call.as_ref());
        let site = origin.map_or(0, |origin| origin.stack.site());
        let mut message = described(cause, access.as_ref());
        let kind = kind(device, cause, access.as_ref(), site);
        let count = self.count(kind, || message.clone())?;
        let (mut other_end, mut question) = (None, None);
        if let Some((work, failure)) = work.as_ref().zip(peer_failure_of(cause)) {
            let key = work.peer.map(|peer| (device, peer));
            let loopback = key.filter(|_| work.is_loopback);
            other_end = loopback.and_then(|key| self.describe_other_end(key, failure, objects));
            // Another process may have the same address.
            let is_here = loopback.is_some_and(|(device, number)| {
                objects.queue_pair(device, number).is_some()
                    || objects.was_destroyed(device, number)
            });
            question = Some(failure).filter(|_| !is_here);
        }
        if matches!(
            cause,
            Cause::Device(DeviceCause::Transport {
                cause: transport::Cause::Dropped(DropCause::NoReceive),
                ..
            })
        ) {
            let never = known
                .as_ref()
                .is_some_and(|it| has_had_no_receive(it, objects));
            message.push_str(if never { NEVER_POSTED } else { "" });
        }
        let is_request = work.is_some_and(|work| work.operation.is_some());
        let is_foreign = access.is_some_and(|it| matches!(it.rule, AccessRule::Domain { .. }));
        // The key of a peer's request may be wrong, but that of a receive is the program's.
        let is_own = |access: AccessError| {
            let buffers = work.as_ref().map_or(&[][..], WorkRequest::buffers);
            is_request || buffers.iter().any(|buffer| buffer.key == access.key)
        };
        let is_foreign = is_foreign && access.is_some_and(is_own);
        let rule = (checks && is_foreign).then_some(check::Rule::AnotherDomain);
        let key = access.map(|access| access.key);
        let region = key.and_then(|key| Some((key, objects.region(device, key)?)));
        Some(Report {
            device,
            class: rule.map_or_else(|| class_name(cause), |_| "error"),
            message,
            count,
            queue_pair: queue_pair.zip(known),
            work: work.map(|work| (work, post)),
            region,
            other_end,
            question,
            call,
            rule,
            origins: Vec::new(),
        })
    }

    /// Forgets what a queue pair has refused, which is created or reset.
    fn forget(&mut self, device: usize, number: u32) {
        (self.refusals).retain(|&(of, qpn, _), _| (of, qpn) != (device, number));
    }

    /// Asks the peer of the work request in a report, if it is in another process.
    fn ask_peer(&mut self, embedded: &Embedded, report: &mut Report) {
        let Some((failure, (work, post))) = report.question.zip(report.work.as_ref()) else {
            return;
        };
        if self.asked.len() >= MAX_KINDS || !embedded.ask_peer(work, failure) {
            return;
        }
        report.other_end = None;
        let asked = AskedWork {
            wr_id: post.as_ref().map(|post| post.wr_id),
            operation: work.operation.map_or("receive", |it| it.name()),
            peer: work.peer.unwrap_or_default(),
        };
        self.asked.insert((report.device, work.qpn), asked);
    }

    /// Remembers why a queue pair has refused a request or dropped a packet, for the report of
    /// its peer.
    fn note_refusal(
        &mut self,
        key: (usize, u32),
        cause: &transport::Cause,
        access: Option<&AccessError>,
    ) {
        let Some(failure) = PeerFailure::of_responder(cause) else {
            return;
        };
        let key = (key.0, key.1, failure);
        if self.refusals.len() >= MAX_KINDS && !self.refusals.contains_key(&key) {
            self.refusals.clear();
        }
        self.refusals.insert(key, described(cause, access));
    }

    /// Describes what the queue pair at the other end has refused last, if its peer sees it as
    /// this failure.
    fn describe_other_end(
        &self,
        (device, number): (usize, u32),
        failure: PeerFailure,
        objects: &Objects,
    ) -> Option<String> {
        let Some(queue_pair) = objects.queue_pair(device, number) else {
            return Some(match objects.was_destroyed(device, number) {
                true => format!("queue pair {number:#x} was destroyed"),
                false => format!("there is no queue pair {number:#x}"),
            });
        };
        // Of a NAK that is lost the peer sees silence.
        let refused = (failure == PeerFailure::Silent).then_some(PeerFailure::Refused);
        let mut failures = refused.into_iter().chain([failure]);
        let refusal = failures.find_map(|it| self.refusals.get(&(device, number, it)))?;
        let never =
            refusal.ends_with("no receive is posted") && has_had_no_receive(&queue_pair, objects);
        let never = if never { NEVER_POSTED } else { "" };
        let state = queue_pair.state_name();
        Some(format!(
            "queue pair {number:#x} ({state}): {refusal}{never}"
        ))
    }
}

/// A work request whose peer was asked why it fails.
struct AskedWork {
    /// `None` if it is not known.
    wr_id: Option<u64>,
    operation: &'static str,
    /// The peer's queue pair.
    peer: u32,
}

/// Returns what the peer has done, if a cause is a failure of a work request by it.
fn peer_failure_of(cause: &Cause) -> Option<PeerFailure> {
    match cause {
        Cause::Device(DeviceCause::Transport {
            cause: transport::Cause::Failed(failure),
            ..
        }) => PeerFailure::of_requester(failure),
        _ => None,
    }
}

/// Exchanges reasons with the peers of a device's queue pairs.
struct PeerExchange {
    explainer: &'static Explainer,
    device: usize,
}

impl ReasonHandler for PeerExchange {
    fn reason(&self, qpn: u32, failure: PeerFailure) -> Option<String> {
        let _scope = internal::enter();
        let Self { explainer, device } = self;
        let objects = &explainer.objects;
        let said = lock(&explainer.reports).describe_other_end((*device, qpn), failure, objects);
        let said = said.or_else(|| {
            let queue_pair = objects.queue_pair(*device, qpn)?;
            let state = queue_pair.state_name();
            (failure == PeerFailure::Silent)
                .then(|| format!("queue pair {qpn:#x} ({state}): it has dropped no packet"))
        })?;
        Some(format!("process {}: {said}", std::process::id()))
    }

    fn answered(&self, qpn: u32, reason: Option<&str>) {
        let _scope = internal::enter();
        let Self { explainer, device } = self;
        let asked = lock(&explainer.reports).asked.remove(&(*device, qpn));
        let Some(asked) = asked else { return };
        let AskedWork {
            wr_id,
            operation,
            peer,
        } = asked;
        let answer = Answer {
            device: *device,
            qpn,
            wr_id,
            operation,
            peer,
            reason,
        };
        explainer.target.write(&match explainer.format {
            Format::Text => answer.text(),
            Format::Json => answer.json(),
        });
    }
}

/// The syndrome of a completion queue that was overrun.
const CQ_OVERRUN: u8 = 1;

/// Follows "no receive is posted" in a message.
const NEVER_POSTED: &str = ", and none was since it was created";

/// Returns whether no receive was ever posted to a queue pair.
fn has_had_no_receive(queue_pair: &QueuePair, objects: &Objects) -> bool {
    lock(&queue_pair.receives).total == 0 && !objects.has_unseen(queue_pair)
}

/// Returns whether a cause ends a work request.
fn is_about(cause: &Cause, work: &WorkRequest) -> bool {
    match cause {
        Cause::Device(DeviceCause::Transport {
            qpn: Some(qpn),
            cause,
        }) if *qpn == work.qpn => {
            work.operation.is_some() == matches!(cause, transport::Cause::Failed(_))
        }
        _ => false,
    }
}

fn is_malformed_request(cause: &Cause) -> bool {
    let Cause::Device(DeviceCause::Misuse(misuse)) = cause else {
        return false;
    };
    matches!(misuse, Misuse::WorkRequest { .. })
}

/// Returns the number of a queue pair that does not exist, to which a packet was sent.
fn late_for(cause: &Cause) -> Option<u32> {
    match cause {
        Cause::Device(DeviceCause::Transport {
            cause: transport::Cause::Dropped(DropCause::UnknownQp(number)),
            ..
        }) => Some(*number),
        _ => None,
    }
}

/// Returns the number of the queue pair that a cause is about.
fn queue_pair_of(cause: &Cause) -> Option<u32> {
    match cause {
        Cause::Verb { error, .. } => error.queue_pair(),
        Cause::Device(DeviceCause::Transport { qpn, .. }) => *qpn,
        Cause::Device(DeviceCause::Misuse(
            Misuse::WorkRequest { queue, .. } | Misuse::BlueFlame { queue, .. },
        )) => Some(*queue),
        Cause::Device(DeviceCause::Event { kind, number, .. }) => matches!(
            *kind,
            event::WQ_CATASTROPHIC | event::WQ_ACCESS | event::WQ_INVALID_REQUEST
        )
        .then_some(*number),
        _ => None,
    }
}

/// Returns a name for what a cause is about, which does not change between releases.
fn class_name(cause: &Cause) -> &'static str {
    match cause {
        Cause::Verb { .. } => "command",
        Cause::Device(DeviceCause::Transport { cause, .. }) => match cause {
            transport::Cause::Failed(_) => "work request",
            transport::Cause::Refused(_) => "request",
            transport::Cause::Dropped(_) => "packet",
        },
        Cause::Device(DeviceCause::Misuse(_)) => "misuse",
        Cause::Device(DeviceCause::Frame { .. }) => "frame",
        Cause::Device(DeviceCause::Event { .. }) | Cause::Event { .. } => "event",
        Cause::Management(_) => "management",
        _ => "other",
    }
}

/// The name of a write to a buffer in [`Finding::origins`].
pub(crate) const WRITTEN: &str = "written";

/// An error of the program.
#[derive(Debug)]
pub(crate) struct Finding {
    pub(crate) rule: check::Rule,
    pub(crate) device: usize,
    pub(crate) queue_pair: Option<(u32, Arc<QueuePair>)>,
    pub(crate) message: String,
    /// The calls that led to the error, with their places in the program. Errors of one rule
    /// whose first places are the same, and [`WRITTEN`] ones, are of one kind.
    pub(crate) origins: Vec<(&'static str, Origin)>,
}

/// Reports the causes of a process's devices, and errors of the program.
pub(crate) struct Explainer {
    target: Target,
    format: Format,
    /// Causes are reported.
    explains: bool,
    pub(crate) checker: Option<Checker>,
    pub(crate) objects: Objects,
    reports: Mutex<Reports>,
    has_summary: AtomicBool,
}

thread_local! {
    /// Changes by the current command of this thread.
    static CHANGES: RefCell<Vec<ObjectChange>> = const { RefCell::new(Vec::new()) };
    /// Handle in the current command that its context does not have.
    static NO_OBJECT: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Called in a command that was refused.
pub(crate) fn command_refused(error: &VerbError) {
    if error.class() == Class::NotFound && error.what == "handle" {
        let handle = u32::try_from(error.value).ok();
        let _ = NO_OBJECT.try_with(|it| it.set(handle));
    }
}

/// Called in a command that has changed an object.
pub(crate) fn object_changed(change: &ObjectChange) {
    let _ = CHANGES.try_with(|changes| changes.borrow_mut().push(*change));
}

impl Explainer {
    /// # Safety
    /// There is no other one in this process.
    pub(crate) unsafe fn new(
        (target, format): (Target, Format),
        explains: bool,
        checker: Option<Checker>,
    ) -> Self {
        Self {
            target,
            format,
            explains,
            checker,
            objects: Objects::default(),
            // SAFETY: guaranteed by the caller.
            reports: Mutex::new(unsafe { Reports::new() }),
            has_summary: AtomicBool::new(false),
        }
    }

    /// Reports the causes of devices, and a summary at the exit of the process.
    pub(crate) fn observe(&'static self, devices: &[Embedded]) {
        if let Some(checker) = &self.checker {
            checker.observe();
        }
        for (number, device) in devices.iter().enumerate() {
            let asking = device.clone();
            device.observe(Some(Arc::new(move |cause: &Cause| {
                let _scope = internal::enter();
                let reports = &mut *lock(&self.reports);
                let checks = self.checker.is_some();
                if let Some(mut report) = reports.report(number, cause, &self.objects, checks) {
                    if self.explains {
                        reports.ask_peer(&asking, &mut report);
                    }
                    self.write(&report, &mut reports.symbols);
                }
            })));
            if self.explains {
                device.exchange_reasons(Arc::new(PeerExchange {
                    explainer: self,
                    device: number,
                }));
            }
        }
        extern "C" fn at_exit() {
            if let Some(explainer) = process::explainer() {
                explainer.summarise();
            }
        }
        // SAFETY: the function may be called at any time, and exists until the process ends.
        unsafe { libc::atexit(at_exit) };
    }

    /// Writes a report, unless it is suppressed or of what is not asked for.
    fn write(&self, report: &Report, symbols: &mut Symbols) {
        let is_wanted = match (report.rule, &self.checker) {
            (Some(rule), Some(checker)) => checker.counts(rule, &report.text(symbols)),
            _ => self.explains,
        };
        if is_wanted {
            self.target.write(&match self.format {
                Format::Text => report.text(symbols),
                Format::Json => report.json(symbols),
            });
        }
    }

    /// Returns whether advice is reported.
    pub(crate) fn advises(&self) -> bool {
        self.checker.as_ref().is_some_and(Checker::advises)
    }

    /// Handles what a command of this thread, on a descriptor of the program, has changed.
    /// Returns the changes.
    pub(crate) fn after_command(&self, fd: RawFd, device: usize) -> Vec<ObjectChange> {
        let changes = CHANGES.try_with(RefCell::take).unwrap_or_default();
        let no_object = NO_OBJECT.try_with(Cell::take).unwrap_or_default();
        let context = match table::find(fd) {
            Lookup::Open(context) => Some(context.fd),
            _ => None,
        };
        if let (Some(checker), Some(handle), Some(context)) = (&self.checker, no_object, context) {
            checker.no_object(self, (device, context), handle);
        }
        self.changed((fd, device), context, &changes);
        changes
    }

    /// Handles changes by a command of this thread, on a descriptor of the program, which is that
    /// of a device and a context.
    pub(crate) fn changed(
        &self,
        (fd, device): (RawFd, usize),
        context: Option<RawFd>,
        changes: &[ObjectChange],
    ) {
        for change in changes {
            self.objects.changed(device, change);
            let fresh = match *change {
                ObjectChange::QueuePairCreated { number, .. } => Some(number),
                ObjectChange::QueuePairModified { number, state, .. } => {
                    (state == uverbs::QpState::RESET).then_some(number)
                }
                _ => None,
            };
            if let Some(number) = fresh.filter(|_| self.explains) {
                lock(&self.reports).forget(device, number);
            }
            let Some(checker) = &self.checker else {
                continue;
            };
            if let Some(context) = context {
                self.objects.created(device, context, change);
            }
            self.check_change(checker, (fd, device), change);
        }
    }

    /// Checks a change of an object by a command on a descriptor of a device.
    fn check_change(&self, checker: &Checker, (fd, device): (RawFd, usize), change: &ObjectChange) {
        checker.advise(self, device, change);
        match *change {
            ObjectChange::RegionRegistered { .. } => checker.look_for_libraries(),
            ObjectChange::CompletionQueueDestroyed {
                user_handle,
                events,
            } => {
                let queue = self.objects.remove_completion_queue(device, user_handle);
                let acknowledged = hooks::acknowledged_events(fd, user_handle);
                if let Some((queue, acknowledged)) = queue.zip(acknowledged) {
                    let counts = (events, acknowledged);
                    checker.completion_queue_destroyed(self, device, &queue, counts);
                }
            }
            ObjectChange::Destroyed {
                handle,
                user_handle,
                events,
            } => {
                let acknowledged = (events != 0)
                    .then(|| self.objects.name_of_destroyed(device, handle))
                    .flatten()
                    .and_then(|name| hooks::acknowledged_asynchronous(fd, name, user_handle));
                let counts = (events, acknowledged.unwrap_or(events));
                checker.object_destroyed(self, (device, handle), counts);
            }
            ObjectChange::RegionDeregistered { key } => {
                checker.region_deregistered(self, device, key);
            }
            ObjectChange::QueuePairModified { number, state, .. }
                if state == uverbs::QpState::RESET || state == uverbs::QpState::ERR =>
            {
                checker.forget_windows((device, number));
            }
            _ => {}
        }
    }

    /// Called before the program's last descriptor of a context is closed.
    pub(crate) fn context_closed(&self, device: usize, context: RawFd) {
        // Libraries close their contexts when the process ends.
        if self.has_summary.load(Ordering::Relaxed) {
            return;
        }
        if let Some(checker) = &self.checker {
            checker.context_closed(self, device, context);
        }
    }

    /// Reports a poll of a completion queue that was destroyed. Returns whether it was.
    pub(crate) fn poll_of_destroyed(&self, device: usize, user_handle: u64) -> bool {
        let Some(origins) = self.objects.destroyed_queue(device, user_handle) else {
            return false;
        };
        if let Some(checker) = &self.checker {
            let what = "a completion queue is polled".to_owned();
            checker.destroyed(self, device, (what, Origin::here()), origins);
        }
        true
    }

    /// Reports a call from a place, if there is one, with a queue pair that was destroyed: 0 is
    /// the call that is under way. Returns whether it was.
    pub(crate) fn post_to_destroyed(
        &self,
        device: usize,
        number: u32,
        site: Option<usize>,
    ) -> bool {
        let Some(checker) = &self.checker else {
            return false;
        };
        let Some(origins) = self.objects.destroyed(device, "queue pair", number) else {
            return false;
        };
        let what = format!("queue pair {number:#x} is posted to");
        let origin = match site {
            None => return true,
            Some(0) => Origin::here(),
            Some(site) => self.objects.call_from(site),
        };
        checker.destroyed(self, device, (what, origin), origins);
        true
    }

    /// Reports a post from a place to a shared receive queue that was destroyed, given by device
    /// and handle. Returns whether it was.
    pub(crate) fn post_to_destroyed_shared(
        &self,
        checker: &Checker,
        (device, handle): (usize, u32),
        site: usize,
    ) -> bool {
        let found = self.objects.stranger(device, -1, handle);
        let Some(Stranger::Destroyed(object, destroyed)) = found else {
            return false;
        };
        let what = format!("{object} is posted to");
        let called = self.objects.call_from(site);
        let origins = [destroyed, object.created];
        checker.destroyed(self, device, (what, called), origins);
        true
    }

    /// Reports an error of the program.
    pub(crate) fn report_error(&self, finding: Finding) {
        let _scope = internal::enter();
        let Finding {
            rule,
            device,
            queue_pair,
            message,
            origins,
        } = finding;
        let mut hasher = DefaultHasher::new();
        (device, rule).hash(&mut hasher);
        match origins.first() {
            Some((what, origin)) if what.ends_with("created") => {
                origin.stack.addresses().hash(&mut hasher);
            }
            Some((_, origin)) => origin.stack.site().hash(&mut hasher),
            None => {}
        }
        for (_, origin) in origins.iter().filter(|(what, _)| *what == WRITTEN) {
            origin.stack.site().hash(&mut hasher);
        }
        let reports = &mut *lock(&self.reports);
        let met = reports.errors.entry(hasher.finish()).or_default();
        *met += 1;
        let count = *met;
        if !is_power_of_ten(count) || reports.errors.len() > MAX_KINDS {
            return;
        }
        let report = Report {
            device,
            class: rule.class(),
            rule: Some(rule),
            message,
            count,
            queue_pair,
            work: None,
            region: None,
            other_end: None,
            question: None,
            call: None,
            origins,
        };
        self.write(&report, &mut reports.symbols);
    }

    /// Reports a post that the provider refused.
    pub(crate) fn post_refused(
        &self,
        (device, number): (usize, u32),
        queue_pair: &Arc<QueuePair>,
        (what, errno): (&'static str, i32),
        post: &Post,
    ) {
        if !self.explains {
            return;
        }
        let mut hasher = DefaultHasher::new();
        ("post", device, what, errno, post.origin.stack.site()).hash(&mut hasher);
        let error = std::io::Error::from_raw_os_error(errno);
        let wr_id = post.wr_id;
        let reason = match (errno, queue_pair.state_name()) {
            // libmlx5 refuses with this number what is sent too early, too.
            (libc::ENOMEM, state @ ("RESET" | "INIT" | "RTR")) if what != "receive" => {
                format!(", the queue pair is in {state}")
            }
            (libc::ENOMEM, _) => ", the queue is full".to_owned(),
            _ => String::new(),
        };
        let message = format!(
            "queue pair {number:#x}: {what} with wr_id {wr_id:#x} refused: {error}{reason}"
        );
        let queue_pair = Some((number, Arc::clone(queue_pair)));
        self.report_refused(device, (hasher.finish(), message), queue_pair, post);
    }

    /// Reports a receive of a shared receive queue, given by device and handle, that the provider
    /// refused.
    pub(crate) fn shared_post_refused(&self, key: (usize, u32), errno: i32, post: &Post) {
        if !self.explains {
            return;
        }
        let (device, handle) = key;
        let mut hasher = DefaultHasher::new();
        ("shared post", device, errno, post.origin.stack.site()).hash(&mut hasher);
        let error = std::io::Error::from_raw_os_error(errno);
        let wr_id = post.wr_id;
        let reason = match errno {
            libc::ENOMEM => ", the queue is full",
            _ => "",
        };
        let message = format!(
            "shared receive queue {handle:#x}: receive with wr_id {wr_id:#x} refused: \
             {error}{reason}"
        );
        self.report_refused(device, (hasher.finish(), message), None, post);
    }

    /// Reports a post that was refused, of a kind and with a message.
    fn report_refused(
        &self,
        device: usize,
        (kind, message): (u64, String),
        queue_pair: Option<(u32, Arc<QueuePair>)>,
        post: &Post,
    ) {
        let reports = &mut *lock(&self.reports);
        let Some(count) = reports.count(kind, || message.clone()) else {
            return;
        };
        let report = Report {
            device,
            class: "post",
            message,
            count,
            queue_pair,
            work: None,
            region: None,
            other_end: None,
            question: None,
            call: Some(post.origin.clone()),
            rule: None,
            origins: Vec::new(),
        };
        self.write(&report, &mut reports.symbols);
    }

    /// Reports an event of the connection manager that the program reads, if it is a failure.
    /// `id` is its number.
    pub(crate) fn connection_event(&self, id: u32, event: &rdmacm::Message) {
        let Err(reason) = event.result() else {
            return;
        };
        if !self.explains {
            return;
        }
        let call = Origin::here();
        let _scope = internal::enter();
        let kind = event.kind();
        let reason = format!("event {kind:?}: {reason}");
        let mut hasher = DefaultHasher::new();
        ("connection", kind.0, &reason, call.stack.site()).hash(&mut hasher);
        let ends = addresses_of(id).unwrap_or_default();
        let message = format!("connection{ends} failed, {reason}");
        let reports = &mut *lock(&self.reports);
        let Some(count) = reports.count(hasher.finish(), || message.clone()) else {
            return;
        };
        let report = Report {
            // Ids are on the first device.
            device: 0,
            class: "connection",
            message,
            count,
            queue_pair: None,
            work: None,
            region: None,
            other_end: None,
            question: None,
            call: Some(call),
            rule: None,
            origins: Vec::new(),
        };
        self.write(&report, &mut reports.symbols);
    }

    /// Writes the summary, once.
    pub(crate) fn summarise(&self) {
        // Locks may be held by what a signal handler interrupts.
        if internal::is_internal() || internal::is_interrupted() {
            return;
        }
        if self.has_summary.swap(true, Ordering::Relaxed) {
            return;
        }
        let _scope = internal::enter();
        let devices = process::ready_devices();
        let end = Instant::now() + MAX_ANSWER_WAIT;
        while devices.iter().any(Embedded::awaits_reasons) && Instant::now() < end {
            devices.iter().for_each(|device| _ = device.drive());
            std::thread::sleep(ANSWER_POLL);
        }
        if self.explains {
            self.summarise_causes();
        }
        if let Some(checker) = &self.checker {
            checker.ended(self);
            let summary = checker.summary();
            self.target.write(&match self.format {
                Format::Text => summary.text(),
                Format::Json => report::json_of(&summary),
            });
        }
    }

    fn summarise_causes(&self) {
        let devices = process::ready_devices();
        let summary = Summary {
            devices: devices.iter().map(Embedded::activity).collect(),
            queue_pairs: self.objects.queue_pairs_created(),
            unseen: self.objects.unseen(),
            errors: {
                let reports = lock(&self.reports);
                let mut errors: Vec<(u64, String)> = (reports.met.values())
                    .map(|met| (met.count, met.message.clone()))
                    .collect();
                errors.sort_unstable_by(|a, b| b.cmp(a));
                errors
            },
        };
        self.target.write(&match self.format {
            Format::Text => summary.text(),
            Format::Json => summary.json(),
        });
    }
}

/// Returns the addresses of a connection, to follow that word, if its id has a device.
fn addresses_of(id: u32) -> Option<String> {
    // Ids are on the first device.
    let known = process::ready_devices().first()?.connection_ids();
    let found = known.into_iter().find(|it| it.id == id)?;
    Some(match (found.local, found.peer?) {
        (Some(local), peer) => format!(" from {local} to {peer}"),
        (None, peer) => format!(" to {peer}"),
    })
}

/// Returns the kind of a cause: causes that differ in numbers only, and have the same place in
/// the program, are of one kind.
fn kind(device: usize, cause: &Cause, access: Option<&AccessError>, site: usize) -> u64 {
    let text = format!("{cause:?} {access:?}");
    let mut hasher = DefaultHasher::new();
    (device, site).hash(&mut hasher);
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric());
    words
        .filter(|word| !word.starts_with(|letter: char| letter.is_ascii_digit()))
        .for_each(|word| word.hash(&mut hasher));
    hasher.finish()
}

fn is_power_of_ten(mut count: u64) -> bool {
    while count > 1 && count % 10 == 0 {
        count /= 10;
    }
    count == 1
}

/// Returns whether a cause tells something: not what a transport repairs, what follows from
/// another cause, and what libraries try to find out what a device has.
fn is_worth_a_report(cause: &Cause) -> bool {
    match cause {
        // libibverbs tries several commands for a context.
        Cause::Verb { error, .. } if error.rule == Rule::InState("with a context") => false,
        Cause::Verb { error, .. } => !matches!(
            error.class(),
            Class::Unsupported | Class::Unknown | Class::Again | Class::NoData
        ),
        // Reported as that of the program's command.
        Cause::Device(DeviceCause::Command { .. }) => false,
        Cause::Device(DeviceCause::Transport {
            cause: transport::Cause::Refused(refusal),
            ..
        }) => !refusal.is_retried(),
        Cause::Device(DeviceCause::Transport { cause, .. }) => !matches!(
            cause,
            transport::Cause::Failed(Failure::Flushed)
                | transport::Cause::Dropped(
                    DropCause::OutOfSequence { .. }
                        | DropCause::Duplicate(_)
                        | DropCause::MissingResponse { .. }
                        | DropCause::StaleResponse(_)
                        | DropCause::OwnMulticast
                        | DropCause::Closing
                        | DropCause::AbsentMemory
                        | DropCause::State(QpState::Error)
                )
        ),
        // Late and repeated messages: the connection manager repairs these losses.
        Cause::Management(
            ManagementDrop::NotDue { .. }
            | ManagementDrop::NoConnection { .. }
            | ManagementDrop::NoCredit { .. },
        ) => false,
        // Of peers that ask or answer late, or are not connected with their queue pair any more.
        Cause::Management(ManagementDrop::Reason(
            ReasonDrop::NotPeer { .. } | ReasonDrop::NotShared | ReasonDrop::Unasked,
        )) => false,
        // A frame for somebody else.
        Cause::Device(DeviceCause::Frame { cause, .. }) => *cause != FrameDrop::NoRule,
        // Its overrun was reported.
        Cause::Device(DeviceCause::Event {
            kind: event::CQ_ERROR,
            subtype: CQ_OVERRUN,
            ..
        }) => false,
        Cause::Device(DeviceCause::Event { kind, .. }) => !matches!(
            *kind,
            event::COMM_EST
                | event::SQ_DRAINED
                | event::SRQ_LAST_WQE
                | event::SRQ_LIMIT
                | event::DCT_DRAINED
                | event::WQ_ACCESS
                | event::WQ_INVALID_REQUEST
        ),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use embedded::roce::transport::EngineError;
    use embedded::softhca::rule::Violation;
    use uverbs::QpType;

    use super::*;

    fn device_cause(cause: impl Into<transport::Cause>) -> Cause {
        Cause::Device(DeviceCause::Transport {
            qpn: Some(2),
            cause: cause.into(),
        })
    }

    fn dropped(packet: u32) -> Cause {
        device_cause(DropCause::QueueKey { packet, own: 1 })
    }

    /// Reports that symbolise nothing.
    fn reports() -> Reports {
        // SAFETY: no stack is symbolised.
        unsafe { Reports::new() }
    }

    #[test]
    fn numbers_do_not_make_a_kind() {
        let kind = |device, cause: &Cause, site| kind(device, cause, None, site);
        assert_eq!(kind(0, &dropped(2), 9), kind(0, &dropped(33), 9));
        assert_ne!(kind(0, &dropped(2), 9), kind(1, &dropped(2), 9));
        assert_ne!(kind(0, &dropped(2), 9), kind(0, &dropped(2), 8));
        let other = device_cause(DropCause::NoReceive);
        assert_ne!(kind(0, &dropped(2), 9), kind(0, &other, 9));
    }

    #[test]
    fn repetitions_are_reported_ever_more_rarely() {
        let (mut reports, objects) = (reports(), Objects::default());
        let found: Vec<Report> = (1..=1000)
            .filter_map(|number| reports.report(0, &dropped(number), &objects, false))
            .collect();
        assert_eq!(found.len(), 4);
        let ending = ": Q_Key 0x1 is not 0x1 of the queue pair";
        assert!(found[0].message.ends_with(ending), "{}", found[0].message);
        assert_eq!(found[3].count, 1000);
    }

    #[test]
    fn a_failed_access_is_told_with_its_request() {
        let (mut reports, objects) = (reports(), Objects::default());
        let access = AccessError {
            qpn: 2,
            key: 3,
            va: 16,
            length: 8,
            rule: AccessRule::Valid,
            inner: None,
        };
        let access = Cause::Device(DeviceCause::Access(access));
        assert!(reports.report(0, &access, &objects, false).is_none());
        let failed = device_cause(Failure::LocalMemory(transport::Fault::Protection));
        let report = reports.report(0, &failed, &objects, false).unwrap();
        let message = report.message;
        assert!(message.contains("the key is not valid)"), "{message}");
        // Flushing follows: it is no cause of its own.
        let flushed = device_cause(Failure::Flushed);
        assert!(reports.report(0, &flushed, &objects, false).is_none());
    }

    fn created(number: u32) -> ObjectChange {
        ObjectChange::QueuePairCreated {
            number,
            kind: QpType::RC,
            user_handle: 0,
            entries: [1, 1],
            send_blocks: 1,
            signals_all: false,
            max_inline: 0,
            shared_queue: None,
            receive_queue: None,
        }
    }

    #[test]
    fn a_malformed_work_request_is_told_once() {
        let (mut reports, objects) = (reports(), Objects::default());
        let violation = Violation::new("opcode", 0x3f, Rule::Known);
        let misuse = Cause::Device(DeviceCause::Misuse(Misuse::WorkRequest {
            queue: 2,
            index: 7,
            violation,
        }));
        let status = transport::Status::LocalQpOperation;
        let failed = device_cause(Failure::Engine(EngineError { status, violation }));
        // Queues that are no queue pairs have no completion with the reason.
        assert!(reports.report(0, &misuse, &objects, false).is_some());
        objects.changed(0, &created(2));
        assert!(reports.report(0, &misuse, &objects, false).is_none());
        let message = reports.report(0, &failed, &objects, false).unwrap().message;
        assert!(
            message.ends_with("opcode 0x3f is not a known value"),
            "{message}"
        );
    }

    #[test]
    fn packets_for_a_destroyed_queue_pair_are_not_reported() {
        let (mut reports, objects) = (reports(), Objects::default());
        let unknown = |number| device_cause(DropCause::UnknownQp(number));
        assert!(reports.report(0, &unknown(5), &objects, false).is_some());
        objects.changed(0, &created(7));
        assert!(reports.report(0, &unknown(7), &objects, false).is_none());
        objects.changed(0, &ObjectChange::QueuePairDestroyed { number: 7 });
        assert!(reports.report(0, &unknown(7), &objects, false).is_none());
    }

    #[test]
    fn forms_have_names() {
        let named = |name: &str| Format::named(name.as_ref());
        assert_eq!(named("json"), Some(Format::Json));
        assert_eq!(named("text"), Some(Format::Text));
        assert_eq!(named("xml"), None);
    }
}
