//! Reports of causes: why a command was refused, a work request failed or a packet was dropped.
//!
//! With `RINGVERBS_EXPLAIN`, each device has an observer that writes a line for each kind of
//! cause, when it is first met and then at the tenth, hundredth time and so on. The line is
//! written at once, under the device's lock: a reader that does not read delays the device.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use embedded::Embedded;
use embedded::cause::{Cause, Class};
use embedded::roce::transport::{self, DropCause, Failure, QpState, Refusal};
#[cfg(test)]
use embedded::softhca::cause::AccessRule;
use embedded::softhca::cause::{AccessError, Cause as DeviceCause, FrameDrop};
use embedded::softhca::engine::eq::event;
use embedded::softhca::rule::Rule;

use crate::config::write_stderr;

/// Maximum number of kinds of causes; others are not reported.
const MAX_KINDS: usize = 1024;

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
        let file = OpenOptions::new().append(true).create(true).open(name)?;
        Ok(Self::File(file))
    }

    /// Writes a report in one call, so that those of several processes do not mix.
    fn write(&self, line: &str) {
        match self {
            Self::StandardError => write_stderr(line),
            // A report that cannot be written is lost.
            Self::File(file) => _ = (&mut &*file).write_all(line.as_bytes()),
        }
    }
}

/// Causes that a process has reported.
#[derive(Default)]
struct Reports {
    /// Numbers of causes by kind.
    counts: HashMap<u64, u64>,
    /// An access that failed: the cause that follows says of which request.
    access: Option<AccessError>,
}

impl Reports {
    /// Returns the line for a cause of a device, if it is to be reported.
    fn line(&mut self, device: usize, cause: &Cause) -> Option<String> {
        if let Cause::Device(DeviceCause::Access(error)) = cause {
            self.access = Some(*error);
            return None;
        }
        let access = self.access.take();
        if !is_worth_a_report(cause) || (access.is_none() && is_refused_by_engine(cause)) {
            return None;
        }
        let kind = kind(device, cause, access.as_ref());
        if self.counts.len() >= MAX_KINDS && !self.counts.contains_key(&kind) {
            return None;
        }
        let count = self.counts.entry(kind).or_default();
        *count += 1;
        if !is_power_of_ten(*count) {
            return None;
        }
        let mut line = format!("ringverbs: mlx5_{device}: {cause}");
        // Writing to a string does not fail.
        let _ = access.map_or(Ok(()), |access| write!(line, " ({access})"));
        if *count > 1 {
            let _ = write!(line, " ({count} such)");
        }
        line.push('\n');
        Some(line)
    }
}

/// Reports the causes of devices.
pub(crate) fn observe(devices: &[Embedded], target: Target) {
    let shared = Arc::new((Mutex::<Reports>::default(), target));
    for (number, device) in devices.iter().enumerate() {
        let shared = Arc::clone(&shared);
        device.observe(Some(Arc::new(move |cause: &Cause| {
            let (reports, target) = &*shared;
            let mut reports = reports.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(line) = reports.line(number, cause) {
                target.write(&line);
            }
        })));
    }
}

/// Returns the kind of a cause: causes that differ in numbers only are of one kind.
fn kind(device: usize, cause: &Cause, access: Option<&AccessError>) -> u64 {
    let text = format!("{cause:?} {access:?}");
    let mut hasher = DefaultHasher::new();
    device.hash(&mut hasher);
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
        Cause::Device(DeviceCause::Transport { cause, .. }) => !matches!(
            cause,
            transport::Cause::Failed(Failure::Flushed)
                | transport::Cause::Refused(Refusal::NoReceive | Refusal::AbsentMemory)
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
        // A frame for somebody else.
        Cause::Device(DeviceCause::Frame { cause, .. }) => *cause != FrameDrop::NoRule,
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

/// Returns whether a cause is that of a work request which the engine refused. Unless an
/// access failed, it has been reported as misuse before, with the index of the work request.
fn is_refused_by_engine(cause: &Cause) -> bool {
    matches!(
        cause,
        Cause::Device(DeviceCause::Transport {
            cause: transport::Cause::Failed(Failure::Engine(_)),
            ..
        })
    )
}

#[cfg(test)]
mod tests {
    use embedded::roce::transport::EngineError;
    use embedded::softhca::cause::Misuse;
    use embedded::softhca::rule::Violation;

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

    #[test]
    fn numbers_do_not_make_a_kind() {
        let kind = |device, cause: &Cause| kind(device, cause, None);
        assert_eq!(kind(0, &dropped(2)), kind(0, &dropped(33)));
        assert_ne!(kind(0, &dropped(2)), kind(1, &dropped(2)));
        let other = device_cause(DropCause::NoReceive);
        assert_ne!(kind(0, &dropped(2)), kind(0, &other));
    }

    #[test]
    fn repetitions_are_reported_ever_more_rarely() {
        let mut reports = Reports::default();
        let lines: Vec<String> = (1..=1000)
            .filter_map(|number| reports.line(0, &dropped(number)))
            .collect();
        assert_eq!(lines.len(), 4);
        assert!(lines[0].ends_with(": Q_Key 0x1 is not 0x1 of the queue pair\n"));
        assert!(lines[3].ends_with(" (1000 such)\n"), "{}", lines[3]);
    }

    #[test]
    fn a_failed_access_is_told_with_its_request() {
        let mut reports = Reports::default();
        let access = AccessError {
            qpn: 2,
            key: 3,
            va: 16,
            length: 8,
            rule: AccessRule::Valid,
            inner: None,
        };
        let access = Cause::Device(DeviceCause::Access(access));
        assert_eq!(reports.line(0, &access), None);
        let failed = Failure::LocalMemory(transport::Fault::Protection);
        let line = reports.line(0, &device_cause(failed)).unwrap();
        assert!(line.contains("the key is not valid)"), "{line}");
        // Flushing follows: it is no cause of its own.
        assert_eq!(reports.line(0, &device_cause(Failure::Flushed)), None);
    }

    #[test]
    fn a_refused_work_request_is_told_once() {
        let mut reports = Reports::default();
        let violation = Violation::new("opcode", 0x3f, Rule::Known);
        let misuse = Cause::Device(DeviceCause::Misuse(Misuse::WorkRequest {
            queue: 2,
            index: 7,
            violation,
        }));
        let line = reports.line(0, &misuse).unwrap();
        let expected = "ringverbs: mlx5_0: queue 2, index 7: opcode 0x3f is not a known value\n";
        assert_eq!(line, expected);
        let status = transport::Status::LocalQpOperation;
        let failed = device_cause(Failure::Engine(EngineError { status, violation }));
        assert_eq!(reports.line(0, &failed), None);
        // An access alone is told with the work request.
        let access = AccessError {
            qpn: 2,
            key: 3,
            va: 0,
            length: 0,
            rule: AccessRule::Invalidation,
            inner: None,
        };
        let access = Cause::Device(DeviceCause::Access(access));
        assert_eq!(reports.line(0, &access), None);
        let line = reports.line(0, &failed).unwrap();
        assert!(line.contains("the key may not be invalidated)"), "{line}");
    }
}
