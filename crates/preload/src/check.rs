//! Errors of the program that no device reports: `RINGVERBS_CHECK`.
//!
//! ```text
//! post ── hooks ──► SendQueue: bytes of each buffer ◄── before_scatter ── device
//! poll ── hooks ──► Checker: the same bytes? ──► Explainer ──► report
//! ioctl ── ObjectChange ──► Objects ──► Checker: what is left when a context is closed?
//! ```
//!
//! A rule reports what is wrong on any device. Where this process cannot tell, it is silent,
//! and the summary names what was left out.

mod content;
mod sends;
mod suppressions;
mod watched;

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use uverbs::QpType;

use crate::config::Config;
use crate::explain::{Explainer, Finding, Origin, QueuePair, lock};
use sends::Fault;
pub(crate) use sends::{SendQueue, Sent, Sge};
use suppressions::Suppressions;

/// A rule that a program can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Rule {
    BufferChanged,
    BufferUnmapped,
    RegionDeregistered,
    QueueNeverDrains,
    Leak,
}

impl Rule {
    const ALL: [Self; 5] = [
        Self::BufferChanged,
        Self::BufferUnmapped,
        Self::RegionDeregistered,
        Self::QueueNeverDrains,
        Self::Leak,
    ];

    /// Returns its name in reports and suppressions.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::BufferChanged => "buffer-changed",
            Self::BufferUnmapped => "buffer-unmapped",
            Self::RegionDeregistered => "region-deregistered",
            Self::QueueNeverDrains => "queue-never-drains",
            Self::Leak => "leak",
        }
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

/// A completion.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Completion {
    pub(crate) wr_id: u64,
    pub(crate) has_failed: bool,
    /// Of a receive.
    pub(crate) is_receive: bool,
    /// The queue pair; `None` if the completion queue does not tell.
    pub(crate) qpn: Option<u32>,
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
    /// Buffers that could not be read, since the system does not permit it.
    cannot_read: AtomicBool,
}

impl Checker {
    /// # Errors
    /// A file cannot be opened, or the suppressions are wrong.
    pub(crate) fn new(config: &Config) -> Result<Self, String> {
        let of = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
        let suppressions = match &config.suppressions {
            None => Suppressions::default(),
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| of(path, error))?;
                let rules = Rule::ALL.map(Rule::name);
                Suppressions::parse(&text, &rules)
                    .map_err(|line| format!("{}:{line}: there is no such rule", path.display()))?
            }
        };
        let open = |path: &Path| {
            let file = OpenOptions::new().append(true).open(path);
            file.map_err(|error| of(path, error))
        };
        Ok(Self {
            suppressions,
            errors_file: config.check_errors.as_deref().map(open).transpose()?,
            errors: AtomicU64::new(0),
            suppressed: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            cannot_read: AtomicBool::new(false),
        })
    }

    /// Begins to observe what devices write.
    pub(crate) fn observe() {
        embedded::observe_scatters(watched::before_scatter);
    }

    /// Returns whether a report is to be printed, and counts it.
    pub(crate) fn counts(&self, rule: Rule, text: &str) -> bool {
        if self.suppressions.contain(rule.name(), text) {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            return false;
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
        let lost = self.lost.load(Ordering::Relaxed);
        if lost != 0 {
            left_out.push(format!(
                "sends of {lost} queue pairs: work requests or completions do not pass by \
                 ibv_post_send, ibv_wr_* and ibv_poll_cq, one has failed, or it is DC or XRC"
            ));
        }
        if self.cannot_read.load(Ordering::Relaxed) {
            left_out.push("buffers: process_vm_readv is not permitted".to_owned());
        }
        CheckSummary {
            errors: self.errors.load(Ordering::Relaxed),
            suppressed: self.suppressed.load(Ordering::Relaxed),
            left_out,
        }
    }

    fn lose(&self, queue: &mut SendQueue) {
        if queue.lose() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Notes sends before the provider has them. Returns their number.
    pub(crate) fn posting(
        &self,
        explainer: &Explainer,
        device: usize,
        queue_pair: &QueuePair,
        sends: impl IntoIterator<Item = Sent>,
    ) -> usize {
        let mut queue = lock(&queue_pair.in_flight);
        if queue.is_lost() {
            return 0;
        }
        // Answers arrive at other queue pairs.
        if [QpType::XRC_INI, QpType::DRIVER].contains(&queue_pair.kind) {
            self.lose(&mut queue);
            return 0;
        }
        let mut count = 0;
        for mut sent in sends {
            if sent.read(device, &explainer.objects).is_err() {
                self.cannot_read.store(true, Ordering::Relaxed);
            }
            if !queue.push(sent) {
                self.lose(&mut queue);
                return 0;
            }
            count += 1;
        }
        count
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
        self.lose(&mut lock(&queue_pair.in_flight));
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
        if completion.is_receive && !completion.has_failed {
            watched::arrived(number);
            return;
        }
        let Some(queue_pair) = explainer.objects.queue_pair(device, number) else {
            return;
        };
        let mut queue = lock(&queue_pair.in_flight);
        if completion.has_failed {
            // The queue pair is in error, and sends are flushed.
            self.lose(&mut queue);
            return;
        }
        if queue.is_lost() {
            return;
        }
        let Some(completed) = queue.complete(completion.wr_id) else {
            self.lose(&mut queue);
            return;
        };
        let mut findings = Vec::new();
        for sent in &completed {
            if watched::has_arrived(number, sent.at) {
                // It may have told the program that the peer has the data.
                continue;
            }
            findings.extend(self.fault_of(explainer, (device, number), &queue_pair, sent));
        }
        drop(queue);
        for finding in findings {
            explainer.report_error(finding);
        }
    }

    /// Returns what is wrong with a completed send.
    fn fault_of(
        &self,
        explainer: &Explainer,
        (device, number): (usize, u32),
        queue_pair: &Arc<QueuePair>,
        sent: &Sent,
    ) -> Option<Finding> {
        for buffer in &sent.buffers {
            let (wr_id, length, address) = (sent.wr_id, buffer.length, buffer.address);
            let what = format!("queue pair {number:#x}: {length} bytes at {address:#x}");
            let then = format!(
                "after wr_id {wr_id:#x} was posted with it and before its completion was polled"
            );
            let mut origins = vec![("posted", sent.origin.clone())];
            let (rule, message) = match buffer.fault() {
                Some(Fault::Changed(_)) if is_shared(address) => continue,
                Some(Fault::Changed(offset)) => {
                    let from = offset.map_or(String::new(), |at| format!(" from byte {at} on"));
                    let message = format!("{what} have changed{from}, {then}");
                    (Rule::BufferChanged, message)
                }
                Some(Fault::Unmapped) => (
                    Rule::BufferUnmapped,
                    format!("{what} were unmapped, {then}"),
                ),
                None => {
                    let region = explainer.objects.region(device, buffer.lkey);
                    let Some(deregistered) = region.and_then(|region| region.deregistered) else {
                        continue;
                    };
                    origins.push(("deregistered", deregistered));
                    let key = buffer.lkey;
                    let message = format!("{what}: key {key:#x} was deregistered {then}");
                    (Rule::RegionDeregistered, message)
                }
            };
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

    /// Reports the objects of a context that the program closes.
    pub(crate) fn context_closed(&self, explainer: &Explainer, device: usize, context: RawFd) {
        let closed = Origin::here();
        for object in explainer.objects.take_context(device, context) {
            if !OWNED.contains(&object.name) {
                continue;
            }
            let (name, number) = (object.name, object.number);
            let number = match number {
                0 => String::new(),
                number => format!(" {number:#x}"),
            };
            explainer.report_error(Finding {
                rule: Rule::Leak,
                device,
                queue_pair: None,
                message: format!("{name}{number} is left when its context is closed"),
                origins: vec![("created", object.created), ("closed", closed.clone())],
            });
        }
    }
}

/// Returns whether memory may be changed by other mappings of the same pages, or by other
/// processes. Not for the fast path.
fn is_shared(address: u64) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        return true;
    };
    let of_line = |line: &str| {
        let mut words = line.split(' ');
        let (start, end) = words.next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let contains = (number(start)?..number(end)?).contains(&address);
        contains.then(|| words.next().is_none_or(|flags| flags.ends_with('s')))
    };
    maps.lines().find_map(of_line).unwrap_or(true)
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
