//! The state of running processes' devices, for whoever looks from outside.
//!
//! A command asks by a file of the directory, and each process answers by a file of its own
//! ([`control_file`]):
//!
//! ```text
//! asked 8125317000000
//! time 8125317042000
//! process 4711 ibv_rc_pingpong
//! device up mlx5_0
//! objects 1 queue pair
//! counter sends 1000
//! queue-pair 0x2c9aad RC RTS 0x41 192.0.2.1 1 1 499 500
//! completion-queue 0x40 3 501
//! error 0x2c9aad remote access error: ...
//! ```
//!
//! Nothing is counted for this that would not be counted without.

use std::fmt::Write as _;
use std::process;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use roce::packet::ip_of_gid;
use uverbs::{Command, Error, QpState, QpType, state_name};

use crate::driver::object::{Cq, Object, Qp};
use crate::driver::state::State;
use crate::program_name;
use crate::runtime::control::{Controlled, Place, RunningProcesses};
use crate::runtime::network::refused;
use crate::wires::control_file;

/// The name of the files.
const NAME: &str = "status";
/// Maximum number of queue pairs, and of completion queues, in an answer.
const MAX_QUEUES: usize = 1024;
/// How long a question waits for answers.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// The state of the devices of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessStatus {
    /// Its number.
    pub process: u32,
    /// The name of its program: text of that program.
    pub program: String,
    /// When it answered, by the host's monotonic clock.
    pub time: Duration,
    /// The capture that a command has started, with what has become of it.
    pub capture: Option<String>,
    /// Its devices.
    pub devices: Vec<DeviceStatus>,
}

/// The state of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Its name.
    pub name: String,
    /// Its link is up.
    pub is_up: bool,
    /// Numbers of objects, by kind.
    pub objects: Vec<(String, u64)>,
    /// Counters, by name; some that are 0 are missing.
    pub counters: Vec<(String, u64)>,
    /// Its queue pairs, at most 1024 of a process.
    pub queue_pairs: Vec<QueuePairStatus>,
    /// Its completion queues, at most 1024 of a process.
    pub completion_queues: Vec<CompletionQueueStatus>,
    /// Queue pairs and completion queues beyond these.
    pub omitted: u64,
    /// Why the last work request of a queue pair, or of its peer, has failed, for up to 64 queue
    /// pairs by number.
    pub errors: Vec<(u32, String)>,
    /// Why the last refused command was.
    pub refusal: Option<String>,
}

impl DeviceStatus {
    /// Returns a counter; 0 if it is missing.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        let found = self.counters.iter().find(|(known, _)| known == name);
        found.map_or(0, |(_, value)| *value)
    }
}

/// The state of a queue pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueuePairStatus {
    /// Its number.
    pub number: u32,
    /// Its type: `RC`, `UD` and so on.
    pub kind: String,
    /// Its state: `RTS` and so on.
    pub state: String,
    /// Its peer's number, if it is connected.
    pub peer: Option<u32>,
    /// The address that its path leads to.
    pub address: Option<String>,
    /// Sends that have not completed, and how many it takes. One that the device has not taken
    /// counts once for each 64 bytes of its WQE.
    pub sends: (u32, u32),
    /// Posted receives, and how many it takes; `None` if they are those of a shared receive
    /// queue.
    pub receives: Option<(u32, u32)>,
}

/// The state of a completion queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompletionQueueStatus {
    /// Its number.
    pub number: u32,
    /// Completions that the program has not read.
    pub unread: u32,
    /// Number of entries.
    pub entries: u32,
}

/// Returns the time of the host's monotonic clock.
fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from);
    time.map_or(0, |it| u64::try_from(it.as_nanos()).unwrap_or(u64::MAX))
}

/// Returns a text without ends of lines.
fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// Answers questions about the state of this process.
pub(crate) struct StatusControl {
    place: Place,
    /// The question that was answered last.
    answered: Mutex<Option<String>>,
}

impl StatusControl {
    pub(crate) fn new(place: Place) -> Self {
        control_file::remove_answer(&place.directory, NAME, place.number);
        Self {
            place,
            answered: Mutex::default(),
        }
    }

    /// Answers the question of the file, if it is another one than the last.
    pub(crate) fn read(&self, controlled: &Controlled<'_>, capture: Option<&str>) {
        let Place { directory, number } = &self.place;
        let question = control_file::read(directory, NAME);
        let mut answered = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(question) = question.filter(|it| answered.as_ref() != Some(it)) else {
            return;
        };
        let asked = question.trim_end();
        let mut text = format!("asked {asked}\ntime {}\n", now());
        // Writing to a string does not fail.
        let program = one_line(&program_name());
        let _ = writeln!(text, "process {} {program}", process::id());
        if let Some(capture) = capture {
            let _ = writeln!(text, "capture {}", one_line(capture));
        }
        let room = MAX_QUEUES / controlled.devices.len().max(1);
        for (index, device) in controlled.devices.iter().enumerate() {
            let name = one_line(&controlled.name(index));
            describe(&mut device.lock(), &name, room, &mut text);
        }
        control_file::answer(directory, NAME, *number, &text);
        *answered = Some(question);
    }
}

/// Describes a device, with so many of its queue pairs and of its completion queues.
fn describe(state: &mut State, name: &str, room: usize, text: &mut String) {
    let link = match state.is_up().unwrap_or(false) {
        true => "up",
        false => "down",
    };
    let _ = writeln!(text, "device {link} {name}");
    let mut objects: Vec<(&str, u64)> = Vec::new();
    for object in state.objects.all() {
        let name = object.data.summary().name;
        match objects.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => objects.push((name, 1)),
        }
    }
    objects.sort_unstable();
    for (name, count) in objects {
        let _ = writeln!(text, "objects {count} {name}");
    }
    for (name, value) in counters(state) {
        let _ = writeln!(text, "counter {name} {value}");
    }
    let mut queue_pairs: Vec<&Qp> = state.objects.all().filter_map(Object::of).collect();
    queue_pairs.sort_unstable_by_key(|it| it.number);
    let mut queues: Vec<&Cq> = state.objects.all().filter_map(Object::of).collect();
    queues.sort_unstable_by_key(|it| it.number);
    let omitted = |list: usize| list.saturating_sub(room);
    let omitted = omitted(queue_pairs.len()) + omitted(queues.len());
    for qp in queue_pairs.into_iter().take(room) {
        describe_queue_pair(state, qp, text);
    }
    for cq in queues.into_iter().take(room) {
        let unread = state.hca.unread_completions(cq.number).unwrap_or(0);
        let (number, entries) = (cq.number, cq.cqe);
        let _ = writeln!(text, "completion-queue {number:#x} {unread} {entries}");
    }
    if omitted != 0 {
        let _ = writeln!(text, "omitted {omitted}");
    }
    let explanations = state.explanations();
    for (number, reason) in explanations.all() {
        let _ = writeln!(text, "error {number:#x} {}", one_line(&reason));
    }
    if let Some(reason) = explanations.refusal() {
        let _ = writeln!(text, "refusal {}", one_line(&reason));
    }
}

fn describe_queue_pair(state: &State, qp: &Qp, text: &mut String) {
    let kind = match QpType(qp.kind) {
        QpType::RC => "RC",
        QpType::UC => "UC",
        QpType::UD => "UD",
        QpType::RAW_PACKET => "RAW_PACKET",
        QpType::XRC_INI => "XRC_SEND",
        QpType::XRC_TGT => "XRC_RECV",
        QpType::DRIVER => "DC",
        _ => "OTHER",
    };
    let depths = state.hca.queue_depths(qp.number);
    let connection = state.hca.connection(qp.number);
    let current = match depths {
        Some(depths) => depths.state.to_string(),
        None => state_name(QpState(qp.attributes.qp_state))
            .unwrap_or("-")
            .to_owned(),
    };
    let connected = connection.filter(|it| it.state.receives());
    let peer = connected.as_ref().map(|it| format!("{:#x}", it.peer));
    let grh = connected.and_then(|it| it.path?.grh);
    let address = grh.map(|grh| ip_of_gid(grh.dgid).to_string());
    let [sends, receives, ..] = qp.cap;
    let posted = depths.and_then(|it| it.receives).map(|it| it.to_string());
    let absent = || "-".to_owned();
    let _ = writeln!(
        text,
        "queue-pair {:#x} {kind} {current} {} {} {} {sends} {} {receives}",
        qp.number,
        peer.unwrap_or_else(absent),
        address.unwrap_or_else(absent),
        depths.map_or(0, |it| it.sends),
        posted.unwrap_or_else(absent),
    );
}

/// Returns the counters of a device: of traffic always, of errors if they are not 0.
fn counters(state: &State) -> impl Iterator<Item = (&'static str, u64)> {
    let stats = state.hca.stats();
    let packets = state.hca.transport_counters();
    let events = state.hca.q_counters(state.counter_set).unwrap_or_default();
    let traffic = [
        ("sends", stats.send_requests),
        ("receives", stats.receive_requests),
        ("bytes_sent", stats.bytes_gathered),
        ("bytes_received", stats.bytes_scattered),
        ("completions", stats.cqes),
        ("packets_sent", packets.packets_sent),
        ("packets_received", packets.packets_received),
    ];
    let errors = [
        ("completions_with_error", stats.cqes_with_error),
        ("commands_refused", stats.commands_refused),
        ("link_downed", stats.link_downed),
        ("packets_retransmitted", packets.retransmitted),
        ("timeouts", packets.timeouts),
        ("naks_received", packets.naks),
        ("rnr_naks_received", packets.rnr_naks),
        ("no_receive_posted", packets.not_ready),
        ("duplicate_requests", packets.duplicates),
        ("out_of_sequence", packets.out_of_sequence),
        ("wrong_icrc", packets.bad_icrc),
        ("malformed_packets", packets.malformed),
        ("wrong_pkey", packets.pkey_violations),
        ("wrong_qkey", packets.qkey_violations),
        ("packets_dropped", packets.dropped),
        ("raw_packets_dropped", stats.ethernet_dropped),
        ("retries_exceeded", events.transport_retries_exceeded.into()),
        ("rnr_retries_exceeded", events.rnr_nak_retry_err.into()),
        ("access_errors", events.resp_remote_access_errors.into()),
        (
            "access_errors_of_peers",
            events.req_remote_access_errors.into(),
        ),
        ("completion_queue_overruns", events.cq_overflow.into()),
    ];
    let errors = errors.into_iter().filter(|(_, value)| *value != 0);
    traffic.into_iter().chain(errors)
}

/// Parses a number, in hexadecimal after `0x`.
fn number(text: &str) -> Option<u32> {
    match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Parses an answer to the question of a time or a later one; `None` if it is another, or
/// malformed. Lines of a kind that is not known are skipped.
fn parse(text: &str, asked: u64) -> Option<ProcessStatus> {
    let mut status = ProcessStatus::default();
    let mut was_asked = None;
    for line in text.lines() {
        let (kind, rest) = line.split_once(' ')?;
        match kind {
            "asked" => was_asked = Some(rest.parse::<u64>().ok()?),
            "time" => status.time = Duration::from_nanos(rest.parse().ok()?),
            "process" => {
                let (process, program) = rest.split_once(' ')?;
                status.process = process.parse().ok()?;
                program.clone_into(&mut status.program);
            }
            "capture" => status.capture = Some(rest.to_owned()),
            "device" => {
                let (link, name) = rest.split_once(' ')?;
                status.devices.push(DeviceStatus {
                    name: name.to_owned(),
                    is_up: link == "up",
                    ..DeviceStatus::default()
                });
            }
            _ => {
                if let Some(device) = status.devices.last_mut() {
                    parse_line_of(device, kind, rest)?;
                }
            }
        }
    }
    // Who asks at the same time asks for the same.
    was_asked.is_some_and(|it| it >= asked).then_some(status)
}

/// Parses a line of a device.
fn parse_line_of(device: &mut DeviceStatus, kind: &str, rest: &str) -> Option<()> {
    let two = || rest.split_once(' ');
    match kind {
        "objects" => {
            let (count, name) = two()?;
            device.objects.push((name.to_owned(), count.parse().ok()?));
        }
        "counter" => {
            let (name, value) = two()?;
            device.counters.push((name.to_owned(), value.parse().ok()?));
        }
        "omitted" => device.omitted = rest.parse().ok()?,
        "error" => {
            let (queue_pair, reason) = two()?;
            let error = (number(queue_pair)?, reason.to_owned());
            device.errors.push(error);
        }
        "refusal" => device.refusal = Some(rest.to_owned()),
        "completion-queue" => {
            let mut words = rest.split(' ').map(number);
            device.completion_queues.push(CompletionQueueStatus {
                number: words.next()??,
                unread: words.next()??,
                entries: words.next()??,
            });
        }
        "queue-pair" => {
            let words: Vec<&str> = rest.split(' ').collect();
            let [name, kind, state, peer, address, sends, max, receives, most] = words[..] else {
                return None;
            };
            let present = |word: &str| (word != "-").then(|| word.to_owned());
            let most = number(most)?;
            device.queue_pairs.push(QueuePairStatus {
                number: number(name)?,
                kind: kind.to_owned(),
                state: state.to_owned(),
                peer: number(peer),
                address: present(address),
                sends: (number(sends)?, number(max)?),
                receives: number(receives).map(|it| (it, most)),
            });
        }
        _ => {}
    }
    Some(())
}

impl RunningProcesses {
    /// Asks for the state of the devices. Returns the answers, by process, and how many processes
    /// have not answered within a second: they are stopped, or of another version.
    ///
    /// # Errors
    /// Those of writing the file that asks.
    pub fn status(&self) -> std::result::Result<(Vec<ProcessStatus>, usize), Error> {
        let asked = now();
        let question = format!("{asked}\n");
        let told = control_file::replace(&self.directory, NAME, None, Some(&question));
        let told = told.map_err(refused(Command::Open))?;
        Ok(self.answers(NAME, told, MAX_WAIT, |text| {
            parse(text, asked).map(|it| (it.process, it))
        }))
    }

    /// Removes the question of [`status`](Self::status), so that processes that start later do
    /// not answer it.
    pub fn end_status(&self) {
        self.directory.remove_lock(NAME);
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;
    use crate::{Drive, Network};

    const ANSWER: &str = "asked 8\ntime 9\nprocess 4711 a b\ncapture /f: 3 frames\nlater x\n\
        device up mlx5_0\nobjects 1 queue pair\ncounter sends 7\n\
        queue-pair 0x41 RC RTS 0x52 192.0.2.1 1 16 - 0\nqueue-pair 0x42 UD INIT - - 0 4 3 8\n\
        completion-queue 0x40 3 501\nomitted 2\nnews x y\nerror 0x41 because: of\nrefusal why\n";

    #[test]
    fn answers_are_parsed() {
        let text = ANSWER;
        let status = parse(text, 8).unwrap();
        assert_eq!((status.process, &*status.program), (4711, "a b"));
        assert_eq!(status.capture.as_deref(), Some("/f: 3 frames"));
        let [device] = &status.devices[..] else {
            panic!("{status:?}");
        };
        assert_eq!(device.objects, [("queue pair".to_owned(), 1)]);
        assert_eq!((device.counter("sends"), device.counter("none")), (7, 0));
        let [connected, datagrams] = &device.queue_pairs[..] else {
            panic!("{device:?}");
        };
        assert_eq!((connected.peer, connected.receives), (Some(0x52), None));
        assert_eq!((datagrams.peer, datagrams.receives), (None, Some((3, 8))));
        assert_eq!(device.completion_queues[0].unread, 3);
        assert_eq!(device.errors, [(0x41, "because: of".to_owned())]);
        assert_eq!(
            (device.omitted, device.refusal.as_deref()),
            (2, Some("why"))
        );
        // Of an earlier question.
        assert_eq!(parse(text, 9), None);
        for (part, wrong) in [
            ("asked 8", "asked"),
            ("4711", "-1"),
            ("0x41 RC", "0xg RC"),
            (" 1 16 -", " 1 16"),
            ("40 3 501", "40 3"),
            ("sends 7", "sends seven"),
        ] {
            let text = text.replace(part, wrong);
            assert_eq!(parse(&text, 8), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn no_answer_panics(text in "((asked|time|process|device up|queue-pair|error|x) [ -~]{0,20}\n){0,9}") {
            let _ = parse(&text, 0);
        }
    }

    /// A network of a directory of its own, which is removed.
    struct Joined(Network, PathBuf);

    impl Joined {
        fn new() -> Self {
            let name = format!("ringverbs-status-{}", process::id());
            let path = std::env::temp_dir().join(name);
            Self(Network::joined(Drive::Thread, &path).unwrap(), path)
        }
    }

    impl Drop for Joined {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.1);
        }
    }

    #[test]
    fn a_process_answers_each_question() {
        let network = Joined::new();
        network.0.set_names(&["first".to_owned()]);
        let _devices = ["roce", "ib"].map(|it| network.0.device(it).unwrap());
        let processes = RunningProcesses::in_directory(&network.1).unwrap();
        for _ in 0..2 {
            let (answers, silent) = processes.status().unwrap();
            let [status] = &answers[..] else {
                panic!("{answers:?}");
            };
            assert_eq!((status.process, silent), (process::id(), 0));
            let names = status.devices.iter().map(|it| &*it.name);
            assert_eq!(names.collect::<Vec<_>>(), ["first", "mlx5_1"]);
            assert!(status.devices.iter().all(|it| it.queue_pairs.is_empty()));
        }
        processes.end_status();
    }
}
