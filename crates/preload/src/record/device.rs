//! Work requests that no hook sees, as embedded devices see them: of programs that write to the
//! queues themselves.
//!
//! Lines are written with the next call, or at most this often: a line for each would delay the
//! device.

use std::collections::HashSet;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use embedded::roce::transport::{Operation, Status};
use embedded::softhca::work::{Ended, Posted, WorkEvent};

use super::{Recorder, current, names, now};
use crate::config;
use crate::explain::json::Object;
use crate::explain::{is_operation, lock};
use crate::table;

/// Nanoseconds after which lines are written.
const MAX_DELAY: u64 = 50_000_000;
/// When lines were last written.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

/// Queue pairs whose posts pass by hooks, by device and number.
pub(super) type Hooked = HashSet<(usize, u32)>;

/// Notes that the posts of a queue pair pass by hooks, before the provider has the first one.
pub(super) fn note_hooked(recorder: &Recorder, fd: RawFd, number: u32) {
    if let Some(device) = table::embedded_device_of(fd) {
        lock(&recorder.hooked).insert((device, number));
    }
}

/// Handles what a device tells of a work request. Returns whether those of the queue pair are of
/// interest, if it was posted.
pub(crate) fn seen_by_device(device: usize, event: &WorkEvent) -> bool {
    let Some(recorder) = current() else {
        return true;
    };
    let is_hooked = |number| lock(&recorder.hooked).contains(&(device, number));
    let (line, has_failed) = match event {
        WorkEvent::Posted(posted) if !is_hooked(posted.work.qpn) => (of_post(posted), false),
        WorkEvent::Ended(ended) if ended.has_completion && !is_hooked(ended.qpn) => {
            (of_completion(ended), ended.status != Status::Success)
        }
        // The number may become another queue pair's.
        WorkEvent::Emptied { qpn } => {
            lock(&recorder.hooked).remove(&(device, *qpn));
            return true;
        }
        WorkEvent::Posted(_) => return false,
        _ => return true,
    };
    let time = now();
    let is_late = time.saturating_sub(WRITTEN.load(Ordering::Relaxed)) >= MAX_DELAY;
    if is_late {
        WRITTEN.store(time, Ordering::Relaxed);
    }
    let line = line
        .raw("time", time)
        .text("device", &config::device_name(device));
    recorder.append(&[line.end()], is_late || has_failed);
    true
}

fn of_post(posted: &Posted) -> Object {
    let work = &posted.work;
    let mut line = Object::new()
        .text("type", "device_post")
        .raw("qp", work.qpn)
        .raw("send", work.operation.is_some());
    if let Some(number) = work.number {
        line = line.raw("number", number);
    }
    let known = |it: &Operation| !work.is_malformed && !matches!(it, Operation::Local);
    if let Some(operation) = work.operation.filter(known) {
        let opcode = (0..=9).find(|it| is_operation(*it, &operation));
        line = line.raw("opcode", names::operation(opcode.unwrap_or(u32::MAX)));
    }
    line = line.raw("bytes", work.length);
    if work.operation.is_some() {
        line = line
            .raw("signaled", posted.is_signaled)
            .raw("inline", posted.is_inline);
    }
    let elements = work.buffers().iter().map(|it| {
        let element = Object::new().raw("address", it.va);
        element.raw("length", it.length).raw("lkey", it.key).end()
    });
    let line = line.list("sges", elements);
    match work.remote {
        Some((address, rkey)) => {
            let remote = Object::new().raw("address", address).raw("rkey", rkey);
            line.raw("remote", remote.end())
        }
        None => line,
    }
}

fn of_completion(ended: &Ended) -> Object {
    let mut line = Object::new()
        .text("type", "device_completion")
        .raw("qp", ended.qpn)
        .raw("send", ended.is_send);
    if let Some(number) = ended.number {
        line = line.raw("number", number);
    }
    line = line.raw("status", names::status(code_of(ended.status)));
    match ended.status {
        Status::Success => line.raw("bytes", ended.length),
        _ => line,
    }
}

/// Returns the `ibv_wc_status` of a status.
fn code_of(status: Status) -> u32 {
    match status {
        Status::Success => 0,
        Status::LocalLength => 1,
        Status::LocalQpOperation => 2,
        Status::LocalProtection => 4,
        Status::Flushed => 5,
        Status::MemoryBind => 6,
        Status::BadResponse => 7,
        Status::LocalAccess => 8,
        Status::RemoteInvalidRequest => 9,
        Status::RemoteAccess => 10,
        Status::RemoteOperation => 11,
        Status::RetryExceeded => 12,
        Status::RnrRetryExceeded => 13,
        Status::RemoteAborted | Status::Returned => 16,
        Status::Fatal => 19,
    }
}
