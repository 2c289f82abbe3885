//! Reports, and the summary at the end, as text and as JSON.

use std::fmt::Write as _;
use std::process;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use embedded::softhca::cause::WorkRequest;
use embedded::{Activity, PeerFailure};

use super::json::{Object, quoted};
use super::objects::{Origin, Post, QueuePair, Region};
use super::stack::{Frame, Symbols};
use crate::check::{CheckSummary, Rule};
use crate::config;

/// Version of the members of JSON, which changes if one gets another meaning.
const VERSION: u32 = 1;

/// Why something failed, and where in the program it was asked for.
pub(super) struct Report {
    /// The number of the device.
    pub(super) device: usize,
    /// The class of the cause, as in the JSON.
    pub(super) class: &'static str,
    pub(super) message: String,
    /// How often this was met.
    pub(super) count: u64,
    pub(super) queue_pair: Option<(u32, Arc<QueuePair>)>,
    /// The work request that ended, and its post.
    pub(super) work: Option<(WorkRequest, Option<Post>)>,
    /// The key of an access that failed, and its region.
    pub(super) region: Option<(u32, Region)>,
    /// The cause at the other end.
    pub(super) other_end: Option<String>,
    /// What the peer is asked, if it may be in another process: how it has failed the work
    /// request.
    pub(super) question: Option<PeerFailure>,
    /// The call that was refused.
    pub(super) call: Option<Origin>,
    /// The rule of `check` that the program has broken.
    pub(super) rule: Option<Rule>,
    /// Other calls that led to the error, with their places.
    pub(super) origins: Vec<(&'static str, Origin)>,
}

/// Returns the time in nanoseconds since 1970, as in captures. Reports are written at once.
fn now() -> u128 {
    let time = SystemTime::now().duration_since(UNIX_EPOCH);
    time.map_or(0, |it| it.as_nanos())
}

/// Adds a line about a call of the program, and its stack.
fn add_origin(text: &mut String, what: &str, origin: &Origin, symbols: &mut Symbols) {
    let _ = writeln!(text, "    {what} by thread {}", origin.thread);
    let frames = origin.stack.frames(symbols);
    for (at, frame) in frames.iter().enumerate() {
        let word = match at {
            0 => "at",
            // The callers of an earlier call from there.
            _ if origin.is_earlier => "by, earlier,",
            _ => "by",
        };
        let _ = writeln!(text, "        {word} {frame}");
    }
}

/// Returns the names of a region's rights.
fn rights(region: &Region) -> String {
    let names: Vec<&str> = region.access.iter_names().map(|(name, _)| name).collect();
    match names.is_empty() {
        true => "LOCAL_READ only".to_owned(),
        false => names.join(" and "),
    }
}

impl Report {
    /// Returns the report as text. Lines after the first are indented.
    pub(super) fn text(&self, symbols: &mut Symbols) -> String {
        let (device, message) = (config::device_name(self.device), &self.message);
        let rule = self
            .rule
            .map(|rule| format!("{} {}: ", rule.class(), rule.name()));
        let rule = rule.unwrap_or_default();
        let mut text = format!("ringverbs: {device}: {rule}{message}");
        // Writing to a string does not fail.
        if self.count > 1 {
            let _ = write!(text, " ({} such)", self.count);
        }
        text.push('\n');
        if let Some((work, post)) = &self.work {
            let _ = match post {
                Some(post) => writeln!(text, "    work request: wr_id {:#x}, {work}", post.wr_id),
                None => writeln!(text, "    work request: wr_id not known, {work}"),
            };
            if let Some(post) = post {
                add_origin(&mut text, "posted", &post.origin, symbols);
            }
        }
        if let Some(call) = &self.call {
            add_origin(&mut text, "called", call, symbols);
        }
        for (what, origin) in &self.origins {
            add_origin(&mut text, what, origin, symbols);
        }
        if let Some(other_end) = &self.other_end {
            let _ = writeln!(text, "    the other end: {other_end}");
        }
        if let Some((number, queue_pair)) = &self.queue_pair {
            let (kind, state) = (queue_pair.kind_name(), queue_pair.state_name());
            let process = process::id();
            let what = format!(
                "queue pair {number:#x} ({kind}, last set to {state}): created in process {process}"
            );
            add_origin(&mut text, &what, &queue_pair.created, symbols);
        }
        if let Some((key, region)) = &self.region {
            let Region { length, start, .. } = region;
            let rights = rights(region);
            let what = format!(
                "key {key:#x}: a region of {length} bytes from {start:#x} on, {rights}: registered"
            );
            add_origin(&mut text, &what, &region.registered, symbols);
            if let Some(deregistered) = &region.deregistered {
                add_origin(&mut text, "deregistered", deregistered, symbols);
            }
        }
        text
    }

    /// Returns the report as a line of JSON.
    pub(super) fn json(&self, symbols: &mut Symbols) -> String {
        let mut line = Object::new()
            .raw("version", VERSION)
            .text("type", "report")
            .raw("time", now())
            .text("device", &config::device_name(self.device))
            .text("class", self.class)
            .text("message", &self.message)
            .raw("count", self.count)
            .raw("process", process::id());
        let queue_pair = (self.queue_pair.as_ref()).map(|(number, queue_pair)| {
            Object::new()
                .raw("number", number)
                .text("kind", queue_pair.kind_name())
                .text("state", queue_pair.state_name())
                .raw("created", json_origin(&queue_pair.created, symbols))
                .end()
        });
        line = line.optional("queue_pair", queue_pair);
        let work = self.work.as_ref();
        let work = work.map(|(work, post)| json_work(work, post.as_ref(), symbols));
        line = line.optional("work_request", work);
        let region = (self.region.as_ref()).map(|(key, region)| {
            let deregistered = region.deregistered.as_ref();
            let deregistered = deregistered.map(|it| json_origin(it, symbols));
            Object::new()
                .raw("key", key)
                .hexadecimal("start", region.start)
                .raw("length", region.length)
                .list(
                    "access",
                    region.access.iter_names().map(|(name, _)| quoted(name)),
                )
                .raw("registered", json_origin(&region.registered, symbols))
                .optional("deregistered", deregistered)
                .end()
        });
        line = line.optional("region", region);
        line = line.optional("other_end", self.other_end.as_deref().map(quoted));
        let call = self.call.as_ref().map(|call| json_origin(call, symbols));
        line = line.optional("call", call);
        if self.rule.is_some() {
            let origins = self.origins.iter().map(|(what, origin)| {
                Object::new()
                    .text("what", what)
                    .raw("call", json_origin(origin, symbols))
                    .end()
            });
            line = line
                .optional("rule", self.rule.map(|rule| quoted(rule.name())))
                .list("origins", origins);
        }
        line.end() + "\n"
    }
}

/// What the peer of a queue pair says about a work request that it has failed.
pub(super) struct Answer<'a> {
    /// The number of the device.
    pub(super) device: usize,
    pub(super) qpn: u32,
    /// The work request; its `wr_id` may not be known.
    pub(super) wr_id: Option<u64>,
    pub(super) operation: &'static str,
    /// The peer's queue pair.
    pub(super) peer: u32,
    /// Printable ASCII; `None` if the peer has not answered.
    pub(super) reason: Option<&'a str>,
}

impl Answer<'_> {
    /// Returns the answer as a line of text.
    pub(super) fn text(&self) -> String {
        let Self {
            qpn,
            operation,
            peer,
            ..
        } = self;
        let device = config::device_name(self.device);
        let wr_id = match self.wr_id {
            Some(wr_id) => format!("wr_id {wr_id:#x}"),
            None => "wr_id not known".to_owned(),
        };
        let said = match self.reason {
            Some(reason) => format!("says: {reason}"),
            None => format!(
                "has not said why: queue pair {peer:#x} is gone, or its process is not run with \
                 --explain"
            ),
        };
        format!(
            "ringverbs: {device}: queue pair {qpn:#x}: {operation}, {wr_id}: the other end {said}\n"
        )
    }

    /// Returns the answer as a line of JSON.
    pub(super) fn json(&self) -> String {
        Object::new()
            .raw("version", VERSION)
            .text("type", "other_end")
            .text("device", &config::device_name(self.device))
            .raw("process", process::id())
            .raw("queue_pair", self.qpn)
            .optional("wr_id", self.wr_id.map(|wr_id| format!("\"{wr_id:#x}\"")))
            .text("operation", self.operation)
            .raw("peer", self.peer)
            .optional("message", self.reason.map(quoted))
            .end()
            + "\n"
    }
}

/// Returns the summary of a check as a line of JSON.
pub(super) fn json_of(summary: &CheckSummary) -> String {
    Object::new()
        .raw("version", VERSION)
        .text("type", "check")
        .raw("process", process::id())
        .raw("errors", summary.errors)
        .raw("suppressed", summary.suppressed)
        .list("not_checked", summary.left_out.iter().map(|it| quoted(it)))
        .end()
        + "\n"
}

fn json_work(work: &WorkRequest, post: Option<&Post>, symbols: &mut Symbols) -> String {
    let name = work
        .operation
        .map_or("receive", |operation| operation.name());
    let buffers = work.buffers().iter().map(|buffer| {
        Object::new()
            .hexadecimal("address", buffer.va)
            .raw("length", buffer.length)
            .raw("lkey", buffer.key)
            .end()
    });
    let remote = work.remote.map(|(va, rkey)| {
        Object::new()
            .hexadecimal("address", va)
            .raw("rkey", rkey)
            .end()
    });
    Object::new()
        .optional("wr_id", post.map(|post| format!("\"{:#x}\"", post.wr_id)))
        .text("operation", name)
        .raw("length", work.length)
        .list("buffers", buffers)
        .raw("buffer_count", work.buffer_count)
        .optional("remote", remote)
        .optional("peer", work.peer.map(|peer| peer.to_string()))
        .optional(
            "posted",
            post.map(|post| json_origin(&post.origin, symbols)),
        )
        .end()
}

fn json_origin(origin: &Origin, symbols: &mut Symbols) -> String {
    let frames = origin.stack.frames(symbols);
    Object::new()
        .raw("thread", origin.thread)
        .raw("earlier", origin.is_earlier)
        .list("stack", frames.iter().map(json_frame))
        .end()
}

fn json_frame(frame: &Frame) -> String {
    let (file, line) = frame.line.as_ref().map(|(file, line)| (file, line)).unzip();
    Object::new()
        .hexadecimal("address", frame.address as u64)
        .text("module", &frame.module)
        .hexadecimal("offset", frame.offset as u64)
        .optional("function", frame.function.as_deref().map(quoted))
        .optional("file", file.map(|file| quoted(file)))
        .optional("line", line.map(u32::to_string))
        .end()
}

/// What a process has done.
pub(super) struct Summary {
    /// By number of the device.
    pub(super) devices: Vec<Activity>,
    /// Number of queue pairs that were created.
    pub(super) queue_pairs: u64,
    /// Number of posts, and of polls that are checked, in signal handlers: they are not noted.
    pub(super) unseen: u64,
    /// How often each kind of cause was met, and its first message.
    pub(super) errors: Vec<(u64, String)>,
}

impl Summary {
    /// Returns whether a byte has arrived, here or at a peer.
    fn has_data(&self) -> bool {
        let moved = |it: &Activity| it.bytes_delivered != 0 || it.bytes_received != 0;
        self.devices.iter().any(moved)
    }

    pub(super) fn text(&self) -> String {
        let (process, queue_pairs) = (process::id(), self.queue_pairs);
        let (devices, errors) = (self.devices.len(), self.errors.len());
        let carried = match self.has_data() {
            true => "RDMA has carried data",
            false => "RDMA has carried no data",
        };
        let mut text = format!(
            "ringverbs: summary of process {process}: {carried}; devices: {devices}, queue pairs: \
             {queue_pairs}, kinds of errors: {errors}\n"
        );
        for (number, device) in self.devices.iter().enumerate() {
            let name = config::device_name(number);
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "    {name}: {} sends, {} bytes read from memory; {} receives, {} bytes \
                 written",
                device.sends, device.bytes_sent, device.receives, device.bytes_received
            );
            for (operation, requests, bytes) in device.operations.iter() {
                let _ = writeln!(text, "        {operation}: {requests}, {bytes} bytes");
            }
        }
        if self.unseen != 0 {
            let count = self.unseen;
            let _ = writeln!(
                text,
                "    {count} posts or polls in signal handlers, which are not followed: wr_id are \
                 not known after them"
            );
        }
        for (count, message) in &self.errors {
            let times = if *count == 1 { "time" } else { "times" };
            let _ = writeln!(text, "    {count} {times}: {message}");
        }
        text
    }

    pub(super) fn json(&self) -> String {
        let devices = self.devices.iter().enumerate().map(|(number, device)| {
            let operations = device.operations.iter().map(|(name, requests, bytes)| {
                Object::new()
                    .text("operation", name)
                    .raw("requests", requests)
                    .raw("bytes", bytes)
                    .end()
            });
            Object::new()
                .text("device", &config::device_name(number))
                .raw("sends", device.sends)
                .raw("receives", device.receives)
                .raw("bytes_read", device.bytes_sent)
                .raw("bytes_written", device.bytes_received)
                .list("operations", operations)
                .end()
        });
        let errors = self.errors.iter().map(|(count, message)| {
            Object::new()
                .raw("count", count)
                .text("message", message)
                .end()
        });
        Object::new()
            .raw("version", VERSION)
            .text("type", "summary")
            .raw("process", process::id())
            .raw("carried_data", self.has_data())
            .raw("queue_pairs", self.queue_pairs)
            .raw("in_signal_handlers", self.unseen)
            .list("devices", devices)
            .list("errors", errors)
            .end()
            + "\n"
    }
}
