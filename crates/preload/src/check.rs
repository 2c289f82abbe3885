//! Errors of the program that no device reports: `RINGVERBS_CHECK`.
//!
//! ```text
//! post ── hooks ──► SendQueue: bytes of each buffer ◄── before_gather, before_scatter ── device
//! poll ── hooks ──► Checker: the same bytes? ──► Explainer ──► report
//! doorbell ── device ──► WorkEvent: of queues that no hook sees ──► Checker
//! ioctl ── ObjectChange ──► Objects ──► Checker: what is left when a context is closed?
//! ```
//!
//! A rule reports what is wrong on any device. Where this process cannot tell, it is silent,
//! and the summary names what was left out.

mod advice;
mod completion_queue;
mod content;
mod device;
mod freed;
mod gids;
mod guard;
mod memory;
mod notification;
mod ranges;
mod receives;
mod receiving;
mod relocations;
mod remote;
mod rights;
mod sends;
mod shared;
mod watched;
mod windows;
mod writes;

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use embedded::softhca::cause::WorkRequest;
use embedded::{ObjectChange, Suppressions};
use uverbs::{QpState, QpType};

use crate::config::CheckConfig;
pub(crate) use crate::explain::Origin;
use crate::explain::{Explainer, Finding, Post, QueuePair, Stranger, WRITTEN, lock, thread};
use crate::memory_map;
use crate::promises;
pub(crate) use completion_queue::CompletionQueue;
use completion_queue::Entry;
use device::SeenWrites;
pub(crate) use freed::defer as defer_freeing;
pub(crate) use gids::{manager_was_opened, was_read as gid_was_read};
use guard::Sites;
pub(crate) use guard::{
    after_call, after_fork, after_parts, before_call, before_message, before_messages,
    before_parts, lift, lift_all, on_fault,
};
pub(crate) use memory::recover;
use receives::Completed;
pub(crate) use receives::{ReceiveQueue, Received};
use remote::{Name, Request, Unordered};
use sends::Fault;
pub(crate) use sends::{SendQueue, Sent, Sge};
use watched::Use;
use windows::Windows;
pub(crate) use windows::{BindInfo, Binding, IbvMw};

/// A rule that a program can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Rule {
    BufferChanged,
    OverlappingAccess,
    ReceiveOverwritten,
    ReadBeforeCompletion,
    BufferUnmapped,
    BufferFreed,
    RegionDeregistered,
    WrongReceiveQueue,
    QueueNeverDrains,
    CompletionQueueTooSmall,
    EventsNotAcknowledged,
    WindowLeftBound,
    AnotherDomain,
    AnotherContext,
    UseAfterDestroy,
    BuilderWithoutStart,
    TwoThreads,
    Leak,
    // Advice.
    LongQueue,
    LongInlineData,
    NoGlobalRoute,
    HopLimit,
    LinkLocalGid,
    NoReadsAccepted,
    NoTimeout,
    ShortTimeout,
    NoRetries,
    EndlessRetries,
    LimitNotSetAgain,
    FixedGidIndex,
    UnsignaledInMixedQueue,
    UnusedRights,
    CompletionsLeft,
}

impl Rule {
    const ALL: [Self; 33] = [
        Self::BufferChanged,
        Self::OverlappingAccess,
        Self::ReceiveOverwritten,
        Self::ReadBeforeCompletion,
        Self::BufferUnmapped,
        Self::BufferFreed,
        Self::RegionDeregistered,
        Self::WrongReceiveQueue,
        Self::QueueNeverDrains,
        Self::CompletionQueueTooSmall,
        Self::EventsNotAcknowledged,
        Self::WindowLeftBound,
        Self::AnotherDomain,
        Self::AnotherContext,
        Self::UseAfterDestroy,
        Self::BuilderWithoutStart,
        Self::TwoThreads,
        Self::Leak,
        Self::LongQueue,
        Self::LongInlineData,
        Self::NoGlobalRoute,
        Self::HopLimit,
        Self::LinkLocalGid,
        Self::NoReadsAccepted,
        Self::NoTimeout,
        Self::ShortTimeout,
        Self::NoRetries,
        Self::EndlessRetries,
        Self::LimitNotSetAgain,
        Self::FixedGidIndex,
        Self::UnsignaledInMixedQueue,
        Self::UnusedRights,
        Self::CompletionsLeft,
    ];

    /// Returns its name in reports and suppressions.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::BufferChanged => "buffer-changed",
            Self::OverlappingAccess => "overlapping-access",
            Self::ReceiveOverwritten => "receive-overwritten",
            Self::ReadBeforeCompletion => "read-before-completion",
            Self::BufferUnmapped => "buffer-unmapped",
            Self::BufferFreed => "buffer-freed",
            Self::RegionDeregistered => "region-deregistered",
            Self::WrongReceiveQueue => "wrong-receive-queue",
            Self::QueueNeverDrains => "queue-never-drains",
            Self::CompletionQueueTooSmall => "completion-queue-too-small",
            Self::EventsNotAcknowledged => "events-not-acknowledged",
            Self::WindowLeftBound => "window-left-bound",
            Self::AnotherDomain => "another-domain",
            Self::AnotherContext => "another-context",
            Self::UseAfterDestroy => "use-after-destroy",
            Self::BuilderWithoutStart => "builder-without-start",
            Self::TwoThreads => "two-threads",
            Self::Leak => "leak",
            Self::LongQueue => "long-queue",
            Self::LongInlineData => "long-inline-data",
            Self::NoGlobalRoute => "no-global-route",
            Self::HopLimit => "hop-limit",
            Self::LinkLocalGid => "link-local-gid",
            Self::NoReadsAccepted => "no-reads-accepted",
            Self::NoTimeout => "no-timeout",
            Self::ShortTimeout => "short-timeout",
            Self::NoRetries => "no-retries",
            Self::EndlessRetries => "endless-retries",
            Self::LimitNotSetAgain => "limit-not-set-again",
            Self::FixedGidIndex => "fixed-gid-index",
            Self::UnsignaledInMixedQueue => "unsignaled-in-mixed-queue",
            Self::UnusedRights => "unused-rights",
            Self::CompletionsLeft => "completions-left",
        }
    }

    /// Returns what a report of it is: an error, or advice.
    pub(crate) fn class(self) -> &'static str {
        match self {
            Self::LongQueue
            | Self::LongInlineData
            | Self::NoGlobalRoute
            | Self::HopLimit
            | Self::LinkLocalGid
            | Self::NoReadsAccepted
            | Self::NoTimeout
            | Self::ShortTimeout
            | Self::NoRetries
            | Self::EndlessRetries
            | Self::LimitNotSetAgain
            | Self::FixedGidIndex
            | Self::UnsignaledInMixedQueue
            | Self::UnusedRights
            | Self::CompletionsLeft => "advice",
            _ => "error",
        }
    }

    /// Returns whether it is checked on embedded devices alone, which tell what they access, and
    /// when.
    fn needs_embedded(self) -> bool {
        matches!(
            self,
            Self::BufferChanged
                | Self::OverlappingAccess
                | Self::ReceiveOverwritten
                | Self::ReadBeforeCompletion
                | Self::BufferUnmapped
                | Self::BufferFreed
                | Self::RegionDeregistered
                | Self::AnotherDomain
                | Self::AnotherContext
                | Self::FixedGidIndex
                | Self::UnusedRights
                | Self::CompletionsLeft
        )
    }
}

/// Types of objects that a program must destroy before it closes their context.
const OWNED: [&str; 6] = [
    "protection domain",
    "memory region",
    "memory window",
    "completion queue",
    "queue pair",
    "shared receive queue",
];

/// A queue pair that is posted to, and the completion queue of the work requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Posting<'a> {
    pub(crate) device: usize,
    pub(crate) number: u32,
    pub(crate) queue_pair: &'a Arc<QueuePair>,
    /// With the number of its entries; `None` if it is not known.
    pub(crate) completions: Option<(&'a Arc<CompletionQueue>, u32)>,
}

/// What [`Checker::posting`] has found.
#[derive(Debug, Default)]
pub(crate) struct Posted {
    /// Number of sends that are followed.
    pub(crate) count: usize,
    /// An error, if the provider takes the work requests.
    finding: Option<Finding>,
    /// The same, by what shared receive queues have posted.
    kept: Option<Finding>,
}

/// A completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) wr_id: u64,
    /// As `enum ibv_wc_status`.
    pub(crate) status: u32,
    /// Of a receive; false of a failed one, which does not tell.
    pub(crate) is_receive: bool,
    /// The queue pair; `None` if the completion queue does not tell.
    pub(crate) qpn: Option<u32>,
}

impl Completion {
    /// `IBV_WC_LOC_PROT_ERR`.
    const LOCAL_PROTECTION: u32 = 4;

    fn has_failed(&self) -> bool {
        self.status != 0
    }
}

/// Checks a process.
#[derive(Debug)]
pub(crate) struct Checker {
    suppressions: Suppressions,
    /// Gets a byte for each error that is reported.
    errors_file: Option<File>,
    errors: AtomicU64,
    suppressed: AtomicU64,
    /// Queue pairs that could not be followed.
    lost: AtomicU64,
    windows: Mutex<Windows>,
    seen_writes: Mutex<SeenWrites>,
    /// Advice is reported, too.
    advises: bool,
    /// The places in the program whose posts are guarded, if that is asked for.
    guarded: Option<Sites>,
    /// Receives are guarded against reads.
    finds_early_reads: bool,
    /// How often the limits of shared receive queues were set, by device and handle.
    limits: Mutex<HashMap<(usize, u32), u32>>,
    /// The devices are those of the host: what they read and write, and when, is not known.
    is_on_host: bool,
}

impl Checker {
    /// # Errors
    /// A file cannot be opened, or the suppressions are wrong.
    pub(crate) fn new(config: &CheckConfig) -> Result<Self, String> {
        let of = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
        let suppressions = match &config.suppressions {
            None => Suppressions::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| of(path, error))?;
                let rules = Rule::ALL.map(Rule::name);
                Suppressions::parse(&text, |it| rules.contains(&it))
                    .map_err(|line| format!("{}:{line}: there is no such rule", path.display()))?
            }
        };
        let open = |path: &Path| {
            let file = OpenOptions::new().append(true).open(path);
            file.map_err(|error| of(path, error))
        };
        Ok(Self {
            suppressions,
            errors_file: config.errors.as_deref().map(open).transpose()?,
            errors: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            windows: Mutex::default(),
            seen_writes: Mutex::default(),
            advises: config.advice,
            guarded: config.guard.then(Sites::new),
            finds_early_reads: config.early_reads,
            limits: Mutex::default(),
            is_on_host: false,
        })
    }

    /// Leaves out what only embedded devices tell.
    pub(crate) fn on_host(self) -> Self {
        Self {
            is_on_host: true,
            guarded: None,
            finds_early_reads: false,
            ..self
        }
    }

    /// Returns whether a rule is not checked on these devices.
    fn leaves_out(&self, rule: Rule) -> bool {
        self.is_on_host && rule.needs_embedded()
    }

    /// Begins to observe what devices read and write.
    pub(crate) fn observe(&self) {
        promises::look_for_contexts();
        self.look_for_libraries();
        embedded::observe_data(watched::before_gather, watched::before_scatter);
        if self.advises && !self.leaves_out(Rule::UnusedRights) {
            embedded::observe_peer_accesses(rights::used);
        }
    }

    /// Looks for libraries that the program has loaded, which may free buffers: called before it
    /// can post some of a new region.
    pub(crate) fn look_for_libraries(&self) {
        if !self.leaves_out(Rule::BufferFreed) {
            freed::note_program();
        }
    }

    /// Returns whether a report is to be printed, and counts it.
    pub(crate) fn counts(&self, rule: Rule, text: &str) -> bool {
        if self.suppressions.contain(rule.name(), text) {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        if rule.class() == "advice" {
            return true;
        }
        self.errors.fetch_add(1, Ordering::Relaxed);
        if let Some(mut file) = self.errors_file.as_ref() {
            // The exit status then is the program's.
            let _ = file.write_all(b"E");
        }
        true
    }

    /// Returns the summary.
    pub(crate) fn summary(&self) -> CheckSummary {
        let mut left_out = Vec::new();
        let rules = Rule::ALL.into_iter().filter(|it| self.leaves_out(*it));
        let rules: Vec<_> = rules.map(Rule::name).collect();
        if !rules.is_empty() {
            left_out.push(format!("on devices of the host: {}", rules.join(", ")));
        }
        let lost = self.lost.load(Ordering::Relaxed);
        if lost != 0 {
            left_out.push(format!(
                "sends of {lost} queue pairs: work requests or completions do not pass by \
                 ibv_post_send, ibv_wr_* and ibv_poll_cq, one has failed, or it is DC or XRC"
            ));
        }
        CheckSummary {
            errors: self.errors.load(Ordering::Relaxed),
            suppressed: self.suppressed.load(Ordering::Relaxed),
            left_out,
        }
    }

    fn lose(&self, queue_pair: &QueuePair, queue: &mut SendQueue) {
        if queue.lose() {
            self.lost.fetch_add(1, Ordering::Relaxed);
            // Answers are not told from messages.
            lock(&queue_pair.receives_in_flight).ignore_messages();
        }
    }

    /// Notes sends before the provider has them.
    pub(crate) fn posting(
        &self,
        explainer: &Explainer,
        posting: Posting<'_>,
        sends: impl IntoIterator<Item = Sent>,
    ) -> Posted {
        let queue_pair = posting.queue_pair;
        let is_lost = lock(&queue_pair.in_flight).is_lost();
        let mut sends = Vec::from_iter(sends.into_iter().filter(|_| !is_lost));
        let peer = *lock(&queue_pair.peer);
        // Not under the lock, which is waited for under the device's.
        let reads = !self.leaves_out(Rule::BufferChanged);
        for sent in sends.iter_mut().filter(|_| reads) {
            let guards = self.guarded.as_ref();
            let guards = guards.is_some_and(|it| it.contain(&sent.origin));
            let key = (posting.device, posting.number);
            sent.read(key, peer, &explainer.objects, guards);
        }
        let mut queue = lock(&queue_pair.in_flight);
        if queue.is_lost() {
            return Posted::default();
        }
        if explainer.objects.has_unseen(queue_pair) {
            self.lose(queue_pair, &mut queue);
            return Posted::default();
        }
        // Answers arrive at other queue pairs.
        if [QpType::XRC_INI, QpType::DRIVER].contains(&queue_pair.kind) {
            self.lose(queue_pair, &mut queue);
            return Posted::default();
        }
        let completions = posting.completions.map(|(queue, _)| queue);
        let mut posted = Posted::default();
        let mut last = None;
        for sent in sends {
            last = Some(sent.origin.clone());
            if !queue.push(sent, completions) {
                self.lose(queue_pair, &mut queue);
                return Posted::default();
            }
            posted.count += 1;
        }
        let own = queue.len();
        drop(queue);
        posted.finding = last.and_then(|origin| {
            let advice = || self.no_room_for_failures(posting, origin.clone(), own);
            posted.kept = too_small_with_waiting(posting, origin.clone());
            too_small(posting, origin.clone()).or_else(advice)
        });
        posted
    }

    /// Notes receives before the provider has them.
    pub(crate) fn posting_receives(
        &self,
        explainer: &Explainer,
        posting: Posting<'_>,
        receives: impl IntoIterator<Item = Received>,
    ) -> Posted {
        let receives = self.guarded_receives(explainer, posting.device, receives);
        let mut queue = lock(&posting.queue_pair.receives_in_flight);
        if explainer.objects.has_unseen(posting.queue_pair) {
            queue.lose();
            return Posted::default();
        }
        let completions = posting.completions.map(|(queue, _)| queue);
        let mut posted = Posted::default();
        let mut last = None;
        for received in receives {
            last = Some(received.origin.clone());
            if !queue.push(received, completions, &explainer.objects) {
                return Posted::default();
            }
            posted.count += 1;
        }
        drop(queue);
        posted.finding = last.and_then(|origin| {
            posted.kept = too_small_with_waiting(posting, origin.clone());
            too_small(posting, origin)
        });
        posted
    }

    /// Handles receives of a shared receive queue that the provider has taken.
    pub(crate) fn accepted_shared(queue: (usize, u32), origin: Origin) {
        shared::accepted(queue, origin);
    }

    /// Notes receives of a shared receive queue before the provider has them. Returns how many.
    pub(crate) fn posting_shared(
        &self,
        explainer: &Explainer,
        queue: (usize, u32),
        receives: impl IntoIterator<Item = Received>,
    ) -> usize {
        let receives = self.guarded_receives(explainer, queue.0, receives);
        shared::push(queue, receives, &explainer.objects)
    }

    /// Guards the buffers of receives on a device, if early reads are looked for.
    fn guarded_receives(
        &self,
        explainer: &Explainer,
        device: usize,
        receives: impl IntoIterator<Item = Received>,
    ) -> Vec<Received> {
        let mut receives = Vec::from_iter(receives);
        if self.finds_early_reads {
            for received in &mut receives {
                received.guard(device, &explainer.objects);
            }
        }
        receives
    }

    /// Takes the last receives of a shared receive queue back, which the provider has refused.
    pub(crate) fn refused_shared(queue: (usize, u32), count: usize) {
        shared::take_back(queue, count);
    }

    /// Reports a receive that is posted to a queue pair with a shared receive queue.
    pub(crate) fn wrong_receive_queue(
        &self,
        explainer: &Explainer,
        (device, number): (usize, u32),
        queue_pair: &Arc<QueuePair>,
        origin: &Origin,
    ) {
        explainer.report_error(Finding {
            rule: Rule::WrongReceiveQueue,
            device,
            queue_pair: Some((number, Arc::clone(queue_pair))),
            message: format!(
                "a receive is posted to queue pair {number:#x} by ibv_post_recv, but it has a \
                 shared receive queue: its messages get the receives of that one"
            ),
            origins: vec![("posted", origin.clone())],
        });
    }

    /// Handles work requests that the provider has taken.
    pub(crate) fn accepted(&self, explainer: &Explainer, posting: Posting<'_>, posted: Posted) {
        let Some((queue, _)) = posting.completions else {
            return;
        };
        if let Some(kept) = posted.kept {
            shared::keep(queue, kept);
        }
        let finding = posted.finding;
        if let Some(finding) = finding.and_then(|it| queue.report_when_polled(it)) {
            explainer.report_error(finding);
        }
    }

    /// Handles sends that the provider has refused, the last ones, for this reason.
    pub(crate) fn refused(
        &self,
        explainer: &Explainer,
        (device, number): (usize, u32),
        queue_pair: &Arc<QueuePair>,
        (count, errno): (usize, i32),
        origin: &Origin,
    ) {
        let mut queue = lock(&queue_pair.in_flight);
        queue.take_back(count);
        let first = queue
            .first_of_unsignaled()
            .filter(|_| errno == libc::ENOMEM);
        let Some(first) = first.map(|sent| sent.origin.clone()) else {
            return;
        };
        drop(queue);
        explainer.report_error(Finding {
            rule: Rule::QueueNeverDrains,
            device,
            queue_pair: Some((number, Arc::clone(queue_pair))),
            message: format!(
                "queue pair {number:#x}: the send queue is full, and none of its work requests \
                 is signaled: no completion will ever make room"
            ),
            origins: vec![
                ("refused: posted", origin.clone()),
                ("first of them: posted", first),
            ],
        });
    }

    /// Handles a work request, or a doorbell, that was not seen.
    pub(crate) fn lose_order(&self, queue_pair: &QueuePair) {
        self.lose(queue_pair, &mut lock(&queue_pair.in_flight));
    }

    /// Handles a work request that binds a window, or unbinds it.
    pub(crate) fn bound(&self, queue_pair: (usize, u32), binding: &Binding, origin: &Origin) {
        lock(&self.windows).bind(queue_pair, binding, origin);
    }

    /// Handles a work request that invalidates a key.
    pub(crate) fn invalidated(&self, device: usize, key: u32) {
        lock(&self.windows).invalidate(device, key);
    }

    /// Handles work requests of a queue pair that may not be carried out.
    pub(crate) fn forget_windows(&self, (device, number): (usize, u32)) {
        lock(&self.windows).forget(device, number);
    }

    /// Handles an object that was destroyed, of whose asynchronous events the program has read so
    /// many and acknowledged others.
    pub(crate) fn object_destroyed(
        &self,
        explainer: &Explainer,
        (device, handle): (usize, u32),
        (read, acknowledged): (u32, u32),
    ) {
        lock(&self.windows).destroyed(device, handle);
        if let Some(kept) = shared::destroyed((device, handle)) {
            explainer.report_error(kept);
        }
        // Another thread may acknowledge them.
        if read == acknowledged || !is_single_threaded() {
            return;
        }
        let Some(Stranger::Destroyed(object, destroyed)) =
            explainer.objects.stranger(device, -1, handle)
        else {
            return;
        };
        let function = match object.name {
            "queue pair" => "ibv_destroy_qp",
            "completion queue" => "ibv_destroy_cq",
            _ => "ibv_destroy_srq",
        };
        explainer.report_error(Finding {
            rule: Rule::EventsNotAcknowledged,
            device,
            queue_pair: None,
            message: format!(
                "{object} is destroyed, of which {read} asynchronous events were read and \
                 {acknowledged} acknowledged: {function} waits for ibv_ack_async_event"
            ),
            origins: vec![("destroyed", destroyed), ("created", object.created)],
        });
    }

    /// Reports what is advised of a queue pair that is created or modified.
    pub(crate) fn advise(&self, explainer: &Explainer, device: usize, change: &ObjectChange) {
        if !self.advises {
            return;
        }
        let (number, advice) = match *change {
            ObjectChange::ReceiveLimitSet { handle } => {
                *lock(&self.limits).entry((device, handle)).or_default() += 1;
                return;
            }
            ObjectChange::GidQueried { index } => return gids::was_read(device, index),
            ObjectChange::RegionRegistered { key, access, .. } => {
                if !self.leaves_out(Rule::UnusedRights) {
                    rights::region_registered((device, key), access);
                }
                return;
            }
            ObjectChange::RegionDeregistered { key } => {
                return rights::region_deregistered((device, key));
            }
            ObjectChange::QueuePairDestroyed { number } => {
                return rights::queue_pair_destroyed((device, number));
            }
            ObjectChange::Destroyed { handle, events, .. } => {
                let count = lock(&self.limits).remove(&(device, handle));
                if count == Some(1) && events != 0 {
                    Self::limit_was_not_set_again(explainer, device, handle);
                }
                return;
            }
            ObjectChange::QueuePairCreated {
                number,
                entries,
                max_inline,
                ..
            } => (number, advice::of_created(entries, max_inline)),
            ObjectChange::QueuePairModified {
                number,
                state,
                ref attributes,
            } => {
                let queue_pair = explainer.objects.queue_pair(device, number);
                let Some(kind) = queue_pair.map(|it| it.kind) else {
                    return;
                };
                let has_rights = [QpType::RC, QpType::UC].contains(&kind);
                if has_rights && !self.leaves_out(Rule::UnusedRights) && !gids::manager_is_used() {
                    rights::queue_pair_modified((device, number), attributes.access);
                }
                let mut advice =
                    advice::of_modified((kind, gids::is_ethernet(device)), state, attributes);
                let has_gid = state == QpState::RTR && attributes.is_global;
                if has_gid && !self.leaves_out(Rule::FixedGidIndex) {
                    advice.extend(gids::not_read(device, attributes.source.0.into()));
                }
                (number, advice)
            }
            _ => return,
        };
        for (rule, message) in advice {
            let queue_pair = explainer.objects.queue_pair(device, number);
            explainer.report_error(Finding {
                rule,
                device,
                queue_pair: queue_pair.map(|it| (number, it)),
                message: format!("queue pair {number:#x}: {message}"),
                origins: vec![("called", Origin::here())],
            });
        }
    }

    /// Returns what is advised of a completion queue that overruns if work fails.
    fn no_room_for_failures(
        &self,
        posting: Posting<'_>,
        origin: Origin,
        own: usize,
    ) -> Option<Finding> {
        let (queue, entries) = posting.completions.filter(|_| self.advises)?;
        let all = queue.excess_of_failures(entries, own)?;
        let number = posting.number;
        Some(Finding {
            rule: Rule::UnsignaledInMixedQueue,
            device: posting.device,
            queue_pair: Some((number, Arc::clone(posting.queue_pair))),
            message: format!(
                "queue pair {number:#x}: its completion queue has {entries} entries, and gets \
                 {all} completions, also of other queues, if what is posted fails: unsignaled \
                 sends that fail or are flushed have completions"
            ),
            origins: vec![
                ("posted", origin),
                ("completion queue: created", queue.created.clone()),
            ],
        })
    }

    /// Reports what is known at the end of the process.
    pub(crate) fn ended(&self, explainer: &Explainer) {
        for finding in shared::ended() {
            explainer.report_error(finding);
        }
        self.advise_of_rights(explainer);
    }

    /// Reports rights that no peer has used.
    fn advise_of_rights(&self, explainer: &Explainer) {
        if !self.advises || self.leaves_out(Rule::UnusedRights) {
            return;
        }
        for finding in rights::findings() {
            explainer.report_error(finding);
        }
    }

    /// Reports a shared receive queue that had one event about its limit, and was used without
    /// another.
    fn limit_was_not_set_again(explainer: &Explainer, device: usize, handle: u32) {
        let Some(Stranger::Destroyed(object, destroyed)) =
            explainer.objects.stranger(device, -1, handle)
        else {
            return;
        };
        explainer.report_error(Finding {
            rule: Rule::LimitNotSetAgain,
            device,
            queue_pair: None,
            message: format!(
                "{object}: its limit was set once, and not again after the event that it was \
                 reached"
            ),
            origins: vec![("destroyed", destroyed), ("created", object.created)],
        });
    }

    /// Returns whether advice is asked for.
    pub(crate) fn advises(&self) -> bool {
        self.advises
    }

    /// Handles a thread that is about to wait for an event of a channel, given by the device's
    /// descriptor.
    pub(crate) fn waits(explainer: &Explainer, channel: RawFd) {
        let thread = thread();
        for (device, queue) in explainer.objects.completion_queues() {
            let left = queue
                .notification
                .waits(channel, thread, is_single_threaded);
            let Some((left, requested)) = left else {
                continue;
            };
            explainer.report_error(Finding {
                rule: Rule::CompletionsLeft,
                device,
                queue_pair: None,
                message: format!(
                    "ibv_get_cq_event waits for an event of a completion queue in which {left} \
                     completions were when it was asked for, and are not polled: by the \
                     specification they cause none"
                ),
                origins: vec![
                    ("waits", Origin::here()),
                    ("ibv_req_notify_cq: called", requested),
                    ("completion queue: created", queue.created.clone()),
                ],
            });
        }
    }

    /// Handles a region that was deregistered.
    pub(crate) fn region_deregistered(&self, explainer: &Explainer, device: usize, key: u32) {
        let Some(bound) = lock(&self.windows).take_bound_to(device, key) else {
            return;
        };
        explainer.report_error(Finding {
            rule: Rule::WindowLeftBound,
            device,
            queue_pair: None,
            message: format!(
                "key {key:#x} is deregistered while a memory window is bound to its region, by \
                 queue pair {:#x}",
                bound.queue_pair
            ),
            origins: vec![("deregistered", Origin::here()), ("bound", bound.origin)],
        });
    }

    /// Handles a completion before the program has it.
    pub(crate) fn completed(&self, explainer: &Explainer, device: usize, completion: &Completion) {
        let Some(number) = completion.qpn else {
            // It may be of any queue pair.
            for queue_pair in explainer.objects.queue_pairs_of(device) {
                self.lose_order(&queue_pair);
            }
            return;
        };
        let is_received = completion.is_receive && !completion.has_failed();
        if self.advises && !completion.has_failed() {
            rights::worked();
        }
        if is_received {
            watched::arrived(number);
        }
        let Some(queue_pair) = explainer.objects.queue_pair(device, number) else {
            return;
        };
        if is_received {
            let completed = lock(&queue_pair.receives_in_flight).complete(completion.wr_id);
            if let Some(completed) = completed {
                received(explainer, (device, number), &queue_pair, completed);
            }
            return;
        }
        let mut queue = lock(&queue_pair.in_flight);
        if explainer.objects.has_unseen(&queue_pair) {
            // It may be the completion of one that was posted in a signal handler.
            self.lose(&queue_pair, &mut queue);
            return;
        }
        if completion.has_failed() {
            let finding = (completion.status == Completion::LOCAL_PROTECTION && !queue.is_lost())
                .then(|| {
                    failed_for_region(
                        explainer,
                        (device, number),
                        &queue_pair,
                        &queue,
                        completion.wr_id,
                    )
                })
                .flatten();
            // The queue pair is in error, and work requests are flushed.
            self.lose(&queue_pair, &mut queue);
            lock(&queue_pair.receives_in_flight).lose();
            self.forget_windows((device, number));
            drop(queue);
            finding
                .into_iter()
                .for_each(|it| explainer.report_error(it));
            return;
        }
        if queue.is_lost() {
            return;
        }
        let Some(mut completed) = queue.complete(completion.wr_id) else {
            self.lose(&queue_pair, &mut queue);
            return;
        };
        let entry = completed.last_mut().and_then(|sent| sent.entry.take());
        let mut findings = Vec::from_iter(entry.and_then(Entry::polled));
        for sent in &completed {
            findings.extend(fault_of(explainer, (device, number), &queue_pair, sent));
            let unordered = sent.succeeded().into_iter();
            findings
                .extend(unordered.map(|it| unordered_accesses(device, number, &queue_pair, it)));
        }
        drop(queue);
        for finding in findings {
            if let (Some(guarded), Rule::BufferChanged) = (&self.guarded, finding.rule) {
                let is_written = finding.origins.iter().any(|(what, _)| *what == WRITTEN);
                let posted = finding.origins.first();
                posted
                    .iter()
                    .for_each(|(_, it)| guarded.note_change(it, is_written));
            }
            explainer.report_error(finding);
        }
    }

    /// Reports a builder that a thread uses, of which it has not begun to build.
    pub(crate) fn no_start(
        &self,
        explainer: &Explainer,
        (device, number): (usize, u32),
        queue_pair: &Arc<QueuePair>,
        (origin, builder): (Origin, i32),
    ) {
        let holder = match builder {
            0 => "no thread".to_owned(),
            thread => format!("thread {thread}"),
        };
        let thread = origin.thread;
        explainer.report_error(Finding {
            rule: Rule::BuilderWithoutStart,
            device,
            queue_pair: Some((number, Arc::clone(queue_pair))),
            message: format!(
                "queue pair {number:#x}: a builder was called by thread {thread}, but \
                 ibv_wr_start by {holder}"
            ),
            origins: vec![("called", origin)],
        });
    }

    /// Reports a completion queue without a lock that two threads read at once.
    pub(crate) fn two_readers(
        &self,
        explainer: &Explainer,
        device: usize,
        queue: &CompletionQueue,
        other: i32,
    ) {
        let called = Origin::here();
        let thread = called.thread;
        explainer.report_error(Finding {
            rule: Rule::TwoThreads,
            device,
            queue_pair: None,
            message: format!(
                "ibv_start_poll of a single-threaded completion queue is called by thread \
                 {thread} before thread {other} has called ibv_end_poll"
            ),
            origins: vec![("called", called), ("created", queue.created.clone())],
        });
    }

    /// Reports a queue without a lock that two threads use at once by one call each, this one and
    /// another.
    pub(crate) fn two_callers(
        &self,
        explainer: &Explainer,
        device: usize,
        (what, function): (String, &str),
        queue_pair: Option<(u32, Arc<QueuePair>)>,
        other: Origin,
    ) {
        let own = Origin::here();
        let (first, second) = (own.thread, other.thread);
        explainer.report_error(Finding {
            rule: Rule::TwoThreads,
            device,
            queue_pair,
            message: format!(
                "{what}: {function} is called by thread {second} while thread {first} is in it"
            ),
            origins: vec![("called", other), ("the other thread: called", own)],
        });
    }

    /// Reports a queue pair without a lock for which two threads build work requests at once.
    pub(crate) fn two_builders(
        &self,
        explainer: &Explainer,
        (device, number): (usize, u32),
        queue_pair: &Arc<QueuePair>,
        other: i32,
    ) {
        let called = Origin::here();
        let thread = called.thread;
        explainer.report_error(Finding {
            rule: Rule::TwoThreads,
            device,
            queue_pair: Some((number, Arc::clone(queue_pair))),
            message: format!(
                "queue pair {number:#x} of a thread domain: ibv_wr_start is called by thread \
                 {thread} before thread {other} has called ibv_wr_complete"
            ),
            origins: vec![("called", called)],
        });
    }

    /// Handles a command on a context that was refused since it names an object that the context
    /// does not have.
    pub(crate) fn no_object(
        &self,
        explainer: &Explainer,
        (device, context): (usize, RawFd),
        handle: u32,
    ) {
        let called = ("called", Origin::here());
        let (rule, message, origins) = match explainer.objects.stranger(device, context, handle) {
            Some(Stranger::Destroyed(object, destroyed)) => (
                Rule::UseAfterDestroy,
                format!("{object} is used after it was destroyed"),
                vec![
                    called,
                    ("destroyed", destroyed),
                    ("created", object.created),
                ],
            ),
            Some(Stranger::OfAnother(object, created)) => (
                Rule::AnotherContext,
                format!("{object} is used with another context than its own"),
                vec![called, ("created", created)],
            ),
            None => return,
        };
        explainer.report_error(Finding {
            rule,
            device,
            queue_pair: None,
            message,
            origins,
        });
    }

    /// Reports a call with a queue that was destroyed.
    pub(crate) fn destroyed(
        &self,
        explainer: &Explainer,
        device: usize,
        (what, origin): (String, Origin),
        [destroyed, created]: [Origin; 2],
    ) {
        explainer.report_error(Finding {
            rule: Rule::UseAfterDestroy,
            device,
            queue_pair: None,
            message: format!("{what} after it was destroyed"),
            origins: vec![
                ("called", origin),
                ("destroyed", destroyed),
                ("created", created),
            ],
        });
    }

    /// Handles a completion queue that is destroyed, of whose events the program has read so
    /// many and acknowledged others.
    pub(crate) fn completion_queue_destroyed(
        &self,
        explainer: &Explainer,
        device: usize,
        queue: &CompletionQueue,
        (read, acknowledged): (u32, u32),
    ) {
        // Another thread may acknowledge them.
        if read == acknowledged || !is_single_threaded() {
            return;
        }
        explainer.report_error(Finding {
            rule: Rule::EventsNotAcknowledged,
            device,
            queue_pair: None,
            message: format!(
                "a completion queue is destroyed, of which {read} events were read and \
                 {acknowledged} acknowledged: ibv_destroy_cq waits for ibv_ack_cq_events"
            ),
            origins: vec![
                ("destroyed", Origin::here()),
                ("created", queue.created.clone()),
            ],
        });
    }

    /// Reports the objects of a context that the program closes.
    pub(crate) fn context_closed(&self, explainer: &Explainer, device: usize, context: RawFd) {
        let closed = Origin::here();
        for object in explainer.objects.take_context(device, context) {
            if !OWNED.contains(&object.name) {
                continue;
            }
            explainer.report_error(Finding {
                rule: Rule::Leak,
                device,
                queue_pair: None,
                message: format!("{object} is left when its context is closed"),
                origins: vec![("created", object.created), ("closed", closed.clone())],
            });
        }
    }
}

/// Returns the receive of a shared receive queue that the device has seen as this work request.
pub(crate) fn shared_receive(work: &WorkRequest) -> Option<Post> {
    let buffer = work
        .buffers()
        .first()
        .filter(|_| work.operation.is_none())?;
    let (wr_id, origin) = shared::find(work.qpn, buffer.va)?;
    Some(Post {
        wr_id,
        opcode: None,
        buffer: Some(buffer.va),
        remote: None,
        origin,
    })
}

/// Reports what is wrong with a completed receive.
fn received(
    explainer: &Explainer,
    (device, number): (usize, u32),
    queue_pair: &Arc<QueuePair>,
    completed: Completed,
) {
    let Completed {
        received,
        is_filled,
        overwritten,
        freed,
    } = completed;
    let wr_id = received.wr_id;
    if let Some(freed) = freed.filter(|_| is_filled && !has_ended(queue_pair)) {
        explainer.report_error(Finding {
            rule: Rule::BufferFreed,
            device,
            queue_pair: Some((number, Arc::clone(queue_pair))),
            message: format!(
                "queue pair {number:#x}: a buffer was freed after wr_id {wr_id:#x} was posted for \
                 receiving with it and before its completion was polled"
            ),
            origins: vec![("posted", received.origin.clone()), ("freed", freed)],
        });
    } else if is_filled {
        let fault = fault_of_receive(explainer, (device, number), queue_pair, &received);
        fault.into_iter().for_each(|it| explainer.report_error(it));
    }
    if let Some(reader) = received.reader().filter(|_| !has_ended(queue_pair)) {
        explainer.report_error(Finding {
            rule: Rule::ReadBeforeCompletion,
            device,
            queue_pair: Some((number, Arc::clone(queue_pair))),
            message: format!(
                "queue pair {number:#x}: the buffer of the receive with wr_id {wr_id:#x} was read \
                 before its completion was polled, and before anything had arrived there"
            ),
            origins: vec![("read", reader), ("posted", received.origin.clone())],
        });
    }
    if let Some(finding) = received.entry.and_then(Entry::polled) {
        explainer.report_error(finding);
    }
    let Some((address, later)) = overwritten else {
        return;
    };
    explainer.report_error(Finding {
        rule: Rule::ReceiveOverwritten,
        device,
        queue_pair: Some((number, Arc::clone(queue_pair))),
        message: format!(
            "queue pair {number:#x}: what was received with wr_id {wr_id:#x} was changed at \
             {address:#x} by a later message before its completion was polled"
        ),
        origins: vec![
            ("posted", received.origin),
            ("the later one: posted", later),
        ],
    });
}

/// Returns whether the program has moved a queue pair to ERR: the device accesses its buffers no
/// more, though completions from before may be left.
fn has_ended(queue_pair: &QueuePair) -> bool {
    *lock(&queue_pair.state) == QpState::ERR
}

/// Returns what is wrong with the buffers of a receive that has got data.
fn fault_of_receive(
    explainer: &Explainer,
    (device, number): (usize, u32),
    queue_pair: &Arc<QueuePair>,
    received: &Received,
) -> Option<Finding> {
    if has_ended(queue_pair) {
        return None;
    }
    let wr_id = received.wr_id;
    let then = format!("after wr_id {wr_id:#x} was posted with it and before its completion");
    received.buffers.iter().find_map(|(buffer, key)| {
        let (length, address) = (buffer.end - buffer.start, buffer.start);
        let what = format!("queue pair {number:#x}: {length} bytes at {address:#x}");
        let mut origins = vec![("posted", received.origin.clone())];
        let region = explainer.objects.region(device, *key);
        let (rule, message) = match region.and_then(|region| region.deregistered) {
            Some(deregistered) => {
                origins.push(("deregistered", deregistered));
                let message = format!("{what}: key {key:#x} was deregistered {then} was polled");
                (Rule::RegionDeregistered, message)
            }
            None if is_unmapped(address) => {
                let message = format!("{what} were unmapped, {then} was polled");
                (Rule::BufferUnmapped, message)
            }
            None => return None,
        };
        Some(Finding {
            rule,
            device,
            queue_pair: Some((number, Arc::clone(queue_pair))),
            message,
            origins,
        })
    })
}

/// Returns what is wrong if a work request may not access its buffers since their region was
/// deregistered after it was posted.
fn failed_for_region(
    explainer: &Explainer,
    key: (usize, u32),
    queue_pair: &Arc<QueuePair>,
    sends: &SendQueue,
    wr_id: u64,
) -> Option<Finding> {
    match sends.find(wr_id) {
        Some(sent) if has_ended(queue_pair) || watched::has_arrived(key.1, sent.at) => None,
        Some(sent) => (sent.buffers.iter())
            .find_map(|buffer| deregistered(explainer, key, queue_pair, sent, buffer)),
        // Failed completions do not tell: it is a receive.
        None => {
            let completed = lock(&queue_pair.receives_in_flight).complete(wr_id)?;
            fault_of_receive(explainer, key, queue_pair, &completed.received)
        }
    }
}

/// Returns what is wrong if the region of a send's buffer was deregistered.
fn deregistered(
    explainer: &Explainer,
    (device, number): (usize, u32),
    queue_pair: &Arc<QueuePair>,
    sent: &Sent,
    buffer: &sends::Buffer,
) -> Option<Finding> {
    let (wr_id, length, address, key) = (sent.wr_id, buffer.length, buffer.address, buffer.lkey);
    let region = explainer.objects.region(device, key)?;
    let origins = vec![
        ("posted", sent.origin.clone()),
        ("deregistered", region.deregistered?),
    ];
    Some(Finding {
        rule: Rule::RegionDeregistered,
        device,
        queue_pair: Some((number, Arc::clone(queue_pair))),
        message: format!(
            "queue pair {number:#x}: {length} bytes at {address:#x}: key {key:#x} was deregistered \
             after wr_id {wr_id:#x} was posted with it and before its completion was polled"
        ),
        origins,
    })
}

/// Returns what is wrong with a completed send.
fn fault_of(
    explainer: &Explainer,
    (device, number): (usize, u32),
    queue_pair: &Arc<QueuePair>,
    sent: &Sent,
) -> Option<Finding> {
    for buffer in &sent.buffers {
        let (wr_id, length, address) = (sent.wr_id, buffer.length, buffer.address);
        let what = format!("queue pair {number:#x}: {length} bytes at {address:#x}");
        let posted = format!("after wr_id {wr_id:#x} was posted with it");
        let then = format!("{posted} and before its completion was polled");
        let mut origins = vec![("posted", sent.origin.clone())];
        if let Some(freed) = buffer.freed().filter(|_| !has_ended(queue_pair)) {
            origins.push(("freed", freed.clone()));
            return Some(Finding {
                rule: Rule::BufferFreed,
                device,
                queue_pair: Some((number, Arc::clone(queue_pair))),
                message: format!("{what} were freed, {then}"),
                origins,
            });
        }
        let mut fault = buffer.fault_before();
        if fault.is_none() {
            // What has arrived may have told the program that the peer has the data.
            if has_ended(queue_pair) || watched::has_arrived(number, sent.at) {
                continue;
            }
            fault = buffer.fault();
        }
        let (rule, message) = match fault {
            Some(Fault::Changed(_) | Fault::ChangedBefore(..)) if is_shared(address) => continue,
            Some(Fault::Changed(offset)) => {
                let message = format!("{what} have changed from byte {offset} on, {then}");
                (Rule::BufferChanged, message)
            }
            Some(Fault::ChangedBefore(usage, at)) => {
                let accessed = match usage {
                    Use::Gather => "read",
                    Use::Answer => "wrote",
                };
                let message = format!(
                    "{what} had changed from byte {at} on when the device {accessed} them, {posted}"
                );
                (Rule::BufferChanged, message)
            }
            Some(Fault::Overlaps(reader)) => {
                let message = format!(
                    "{what} were changed by a read or atomic of queue pair {reader:#x}, {then}"
                );
                let reader = explainer.objects.queue_pair(device, reader);
                let reader = reader.and_then(|it| it.last_send());
                origins.extend(reader.map(|origin| ("the other queue pair: posted last", origin)));
                (Rule::OverlappingAccess, message)
            }
            Some(Fault::Overtaken(receiver)) => {
                let message = format!(
                    "{what} were changed by what queue pair {receiver:#x} received before the \
                     device read them, {posted}"
                );
                (Rule::OverlappingAccess, message)
            }
            Some(Fault::Unmapped) => (
                Rule::BufferUnmapped,
                format!("{what} were unmapped, {then}"),
            ),
            None => {
                let key = (device, number);
                match deregistered(explainer, key, queue_pair, sent, buffer) {
                    None => continue,
                    finding => return finding,
                }
            }
        };
        if rule == Rule::BufferChanged {
            origins.extend(buffer.writer().map(|writer| (WRITTEN, writer)));
        }
        return Some(Finding {
            rule,
            device,
            queue_pair: Some((number, Arc::clone(queue_pair))),
            message,
            origins,
        });
    }
    None
}

/// Returns the error of two accesses to remote memory, given the queue pair of the one that has
/// ended later.
fn unordered_accesses(
    device: usize,
    number: u32,
    queue_pair: &Arc<QueuePair>,
    Unordered { requests, range }: Unordered,
) -> Finding {
    let text = |request: &Request| {
        let operation = match request.usage {
            Use::Gather => "write",
            Use::Answer => "read",
        };
        let (_, number) = request.queue_pair;
        let name = match request.name {
            Name::Posted(wr_id) => format!("wr_id {wr_id:#x}"),
            Name::Seen(number) => format!("work request {number}"),
        };
        format!("RDMA {operation} ({name}) of queue pair {number:#x}")
    };
    let [first, second] = requests;
    let message = format!(
        "{} was posted before the {} had begun, and nothing orders them: both access {} bytes at \
         remote address {:#x}",
        text(&second),
        text(&first),
        range.end - range.start,
        range.start,
    );
    let origin = |request: Request, of_posted, of_seen| match request.name {
        Name::Posted(_) => (of_posted, request.origin),
        Name::Seen(_) => (of_seen, request.origin),
    };
    Finding {
        rule: Rule::OverlappingAccess,
        device,
        queue_pair: Some((number, Arc::clone(queue_pair))),
        message,
        origins: vec![
            origin(
                first,
                "the earlier one: posted",
                "the earlier one: queue pair created",
            ),
            origin(
                second,
                "the later one: posted",
                "the later one: queue pair created",
            ),
        ],
    }
}

/// Returns the error of a completion queue that is too small, by a work request that was posted.
fn completion_queue_too_small(
    device: usize,
    queue_pair: Option<(u32, &Arc<QueuePair>)>,
    queue: &CompletionQueue,
    posted: Origin,
    message: String,
) -> Finding {
    Finding {
        rule: Rule::CompletionQueueTooSmall,
        device,
        queue_pair: queue_pair.map(|(number, it)| (number, Arc::clone(it))),
        message,
        origins: vec![
            ("posted", posted),
            ("completion queue: created", queue.created.clone()),
        ],
    }
}

/// Returns the error of work requests of which too many can complete before the next poll.
fn too_small(posting: Posting<'_>, origin: Origin) -> Option<Finding> {
    let (queue, entries) = posting.completions?;
    let outstanding = queue.excess(entries)?;
    let number = posting.number;
    let message = format!(
        "queue pair {number:#x}: its completion queue has {entries} entries, and {outstanding} \
         work requests are posted that complete into it"
    );
    let queue_pair = Some((number, posting.queue_pair));
    let device = posting.device;
    Some(completion_queue_too_small(
        device, queue_pair, queue, origin, message,
    ))
}

/// As above, with the receives of shared receive queues. Queue pairs with other completion queues
/// may use those later.
fn too_small_with_waiting(posting: Posting<'_>, origin: Origin) -> Option<Finding> {
    let (queue, entries) = posting.completions?;
    let all = queue.excess_with_waiting(entries)?;
    let number = posting.number;
    let message = format!(
        "queue pair {number:#x}: its completion queue has {entries} entries, and {all} work \
         requests are posted that complete into it, those of a shared receive queue included"
    );
    let queue_pair = Some((number, posting.queue_pair));
    let device = posting.device;
    Some(completion_queue_too_small(
        device, queue_pair, queue, origin, message,
    ))
}

/// Returns whether the program has one thread. Not for the fast path.
fn is_single_threaded() -> bool {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return false;
    };
    let own = threads.filter_map(Result::ok).filter(|thread| {
        let name = std::fs::read_to_string(thread.path().join("comm"));
        name.is_ok_and(|name| name.trim_end() != "ringverbs-hca")
    });
    own.count() == 1
}

/// Returns whether memory may be changed by other mappings of the same pages, or by other
/// processes. Not for the fast path.
fn is_shared(address: u64) -> bool {
    !matches!(memory_map::at(address as usize), Ok(Some(mapping)) if !mapping.is_shared())
}

/// Returns whether there is no memory at an address, rather than memory that cannot be read.
fn is_unmapped(address: u64) -> bool {
    let is_readable = memory::read(address, &mut [MaybeUninit::uninit()]).is_some();
    !is_readable && matches!(memory_map::at(address as usize), Ok(None))
}

/// The counts of the summary, and what was not checked.
pub(crate) struct CheckSummary {
    pub(crate) errors: u64,
    pub(crate) suppressed: u64,
    pub(crate) left_out: Vec<String>,
}

impl CheckSummary {
    /// Returns it as text.
    pub(crate) fn text(&self) -> String {
        let process = std::process::id();
        let mut text = format!(
            "ringverbs: check of process {process}: errors: {}",
            self.errors
        );
        if self.suppressed != 0 {
            text += &format!(", suppressed: {}", self.suppressed);
        }
        text.push('\n');
        for left_out in &self.left_out {
            text += &format!("    not checked: {left_out}\n");
        }
        text
    }
}
