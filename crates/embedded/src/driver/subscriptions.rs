//! DevX event channels: answers to asynchronous queries, and events of objects that a
//! program created by commands.

use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

use mlx5_abi::ids::*;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use roce::bits::get32;
use softhca::command::opcode as op;
use softhca::engine::eq::event;
use softhca::rule::Rule;

use crate::driver::cause::{Class, Result, at_most, invalid, refuse, require, system};
use crate::driver::data::{DevxObject, Report, Subscription};
use crate::driver::event::{Event, EventCounter, EventFile, FileKind};
use crate::driver::files::File;
use crate::driver::object::Object;
use crate::driver::request::Request;
use crate::driver::state::State;

/// Maximum number of bytes of unread answers of a file.
const MAX_UNREAD_BYTES: usize = 1 << 20;
/// Maximum number of events in one command.
const MAX_EVENTS: usize = 16;
/// Maximum number of subscriptions of a device.
const MAX_SUBSCRIPTIONS: usize = 1 << 16;
/// `MLX5_IB_UAPI_DEVX_CR_EV_CH_FLAGS_OMIT_DATA`.
const OMIT_DATA: u32 = 1 << 0;

/// Event types that the engine does not generate.
const PATH_MIGRATED: u8 = 0x01;
const PATH_MIGRATION_FAILED: u8 = 0x07;
const XRQ_ERROR: u8 = 0x18;
const DCT_KEY_VIOLATION: u8 = 0x1d;

/// Returns whether an event belongs to an object.
fn has_object(number: u16) -> bool {
    let known = [
        event::COMPLETION,
        PATH_MIGRATED,
        event::COMM_EST,
        event::SQ_DRAINED,
        event::CQ_ERROR,
        event::WQ_CATASTROPHIC,
        PATH_MIGRATION_FAILED,
        event::WQ_INVALID_REQUEST,
        event::WQ_ACCESS,
        event::SRQ_CATASTROPHIC,
        event::SRQ_LAST_WQE,
        event::SRQ_LIMIT,
        XRQ_ERROR,
        event::DCT_DRAINED,
        DCT_KEY_VIOLATION,
    ];
    u8::try_from(number).is_ok_and(|number| known.contains(&number))
}

/// Returns whether an entry of an event queue is about an object.
fn is_about(entry: &[u8; 64], object: &DevxObject) -> bool {
    const NUMBER: usize = 32 + 24;
    const FAILED_CQ: usize = 32;
    let (at, creators): (usize, &[u16]) = match entry[1] {
        event::COMPLETION => (NUMBER, &[op::CREATE_CQ]),
        event::CQ_ERROR => (FAILED_CQ, &[op::CREATE_CQ]),
        event::SRQ_LIMIT | event::SRQ_CATASTROPHIC => {
            (NUMBER, &[op::CREATE_RMP, op::CREATE_XRC_SRQ])
        }
        _ => {
            let queues = &[op::CREATE_QP, op::CREATE_DCT, op::CREATE_SQ, op::CREATE_RQ];
            (NUMBER, queues)
        }
    };
    creators.contains(&object.opcode) && get32(entry, at) & 0xff_ffff == object.number
}

/// Increments an eventfd, unless its counter is full.
fn signal(fd: &OwnedFd) {
    let mut ready = [PollFd::new(fd.as_fd(), PollFlags::POLLOUT)];
    if poll(&mut ready, PollTimeout::ZERO).is_ok_and(|ready| ready == 1) {
        let _ = nix::unistd::write(fd, &1u64.to_ne_bytes());
    }
}

/// Returns a copy of a descriptor of an eventfd.
///
/// # Errors
/// EBADF for one that is not open, EINVAL for another file.
fn eventfd(fd: RawFd) -> Result<OwnedFd> {
    let link = std::fs::read_link(format!("/proc/thread-self/fd/{fd}"));
    let Ok(link) = link else {
        return refuse(Class::BadDescriptor, "fd_num", fd, Rule::Exists);
    };
    let is_eventfd = link.as_os_str() == "anon_inode:[eventfd]";
    require(is_eventfd, "fd_num", fd, Rule::OfType("eventfd"))?;
    // SAFETY: F_DUPFD_CLOEXEC makes a descriptor, whatever the number is.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return refuse(Class::BadDescriptor, "fd_num", fd, Rule::Exists);
    }
    // SAFETY: a new descriptor that nothing else closes.
    Ok(unsafe { std::os::fd::FromRawFd::from_raw_fd(copy) })
}

impl State {
    fn alloc_file(
        &mut self,
        fd: RawFd,
        request: &mut Request,
        (kind, handle): (FileKind, u16),
    ) -> Result<()> {
        let id = self.context(fd)?.id;
        let file = EventFile::new(kind, id);
        let (events, number) = file.map_err(system("event file of context", id))?;
        let published = request.publish(number)?;
        self.files.insert(number, File::Events(events));
        request.set_handle(handle, published as u32);
        Ok(())
    }

    pub(crate) fn alloc_command_file(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        self.alloc_file(
            fd,
            request,
            (FileKind::DevxAnswers, ATTR_DEVX_CMD_FD_HANDLE),
        )
    }

    pub(crate) fn alloc_devx_events(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let flags = request.flags(ATTR_DEVX_EVENT_FD_FLAGS, OMIT_DATA)?;
        let omit_data = flags & OMIT_DATA != 0;
        let kind = FileKind::DevxEvents { omit_data };
        self.alloc_file(fd, request, (kind, ATTR_DEVX_EVENT_FD_HANDLE))
    }

    /// Executes a query whose answer is read from a file.
    pub(crate) fn devx_query_async(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let input = self.checked_query(fd, request)?;
        let length: u16 = request.constant(ATTR_DEVX_ASYNC_QUERY_LENGTH)?;
        let wr_id: u64 = request.value(ATTR_DEVX_ASYNC_QUERY_WR_ID)?;
        let Some(file) = self.event_file(request, ATTR_DEVX_ASYNC_QUERY_FD) else {
            let id = ATTR_DEVX_ASYNC_QUERY_FD;
            return refuse(
                Class::BadDescriptor,
                "attribute",
                id,
                Rule::OfType("event file"),
            );
        };
        let unread = file.unread() + usize::from(length);
        if unread > MAX_UNREAD_BYTES {
            let rule = Rule::AtMost(MAX_UNREAD_BYTES as u64);
            return refuse(Class::Again, "unread bytes of the file", unread, rule);
        }
        let mut record = wr_id.to_ne_bytes().to_vec();
        record.extend(self.hca.execute(&input, length.into()));
        file.push(Event {
            record,
            counter: None,
        });
        Ok(())
    }

    /// Subscribes a file to events of an object, or to events of the device.
    pub(crate) fn devx_subscribe(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let has_user = self.uid(fd) != 0;
        require(has_user, "descriptor", fd, Rule::With("a context for DevX"))?;
        let Some(channel) = self.event_file(request, ATTR_DEVX_SUBSCRIBE_CHANNEL) else {
            let id = ATTR_DEVX_SUBSCRIBE_CHANNEL;
            return refuse(
                Class::BadDescriptor,
                "attribute",
                id,
                Rule::OfType("event file"),
            );
        };
        let object = request.optional_handle(ATTR_DEVX_SUBSCRIBE_OBJECT);
        let by_eventfd = request.has(ATTR_DEVX_SUBSCRIBE_EVENTFD);
        let has_cookie = request.has(ATTR_DEVX_SUBSCRIBE_COOKIE);
        let list = request
            .bytes(ATTR_DEVX_SUBSCRIBE_EVENTS)
            .unwrap_or_default();
        let is_one = !(by_eventfd && has_cookie);
        let rule = Rule::Without("an eventfd");
        require(is_one, "attribute", ATTR_DEVX_SUBSCRIBE_COOKIE, rule)?;
        let length = list.len();
        require(
            length % 2 == 0,
            "length of the list",
            length,
            Rule::MultipleOf(2),
        )?;
        at_most("events", length as u64 / 2, MAX_EVENTS as u64)?;
        let numbers = list
            .chunks_exact(2)
            .map(|it| u16::from_ne_bytes([it[0], it[1]]));
        let numbers: Vec<u16> = numbers.collect();
        let known = |number: &u16| match object {
            Some(_) => has_object(*number),
            None => *number == u16::from(event::PORT_CHANGE),
        };
        if let Some(number) = numbers.iter().find(|number| !known(number)) {
            return invalid("event", *number, Rule::Supported);
        }
        let count = self.subscriptions.len() + numbers.len();
        if count > MAX_SUBSCRIPTIONS {
            let rule = Rule::AtMost(MAX_SUBSCRIPTIONS as u64);
            return refuse(Class::NoMemory, "subscriptions", count, rule);
        }
        let mut new = Vec::new();
        for number in numbers {
            let report = match (by_eventfd, has_cookie) {
                (true, _) => {
                    let fd: u32 = request.value(ATTR_DEVX_SUBSCRIBE_EVENTFD)?;
                    Report::EventFd(eventfd(fd as RawFd)?)
                }
                (false, true) => Report::Cookie(request.value(ATTR_DEVX_SUBSCRIBE_COOKIE)?),
                (false, false) => Report::Cookie(0),
            };
            new.push(Subscription {
                channel: Arc::clone(&channel),
                object,
                event: number as u8,
                report,
                reported: EventCounter::default(),
            });
        }
        self.subscriptions.extend(new);
        Ok(())
    }

    /// Reports an event to the programs that have subscribed to it.
    pub(crate) fn notify_subscribers(&self, entry: &[u8; 64]) {
        for it in &self.subscriptions {
            let object = it
                .object
                .and_then(|handle| self.objects.with_handle(handle));
            let is_relevant = match it.object {
                None => true,
                Some(_) => object
                    .and_then(Object::of)
                    .is_some_and(|object| is_about(entry, object)),
            };
            if it.event != entry[1] || !is_relevant {
                continue;
            }
            match &it.report {
                Report::EventFd(fd) => signal(fd),
                Report::Cookie(cookie) => {
                    let omit_data = it.channel.omits_data();
                    let mut record = cookie.to_ne_bytes().to_vec();
                    if !omit_data {
                        record.extend(entry);
                    }
                    let counter = Some(Arc::clone(&it.reported));
                    it.channel
                        .push_coalesced(Event { record, counter }, omit_data);
                }
            }
        }
    }

    /// Ends the subscriptions to an object.
    pub(crate) fn unsubscribe_object(&mut self, handle: u32) {
        self.subscriptions.retain(|it| it.object != Some(handle));
    }

    /// Ends the subscriptions of a file.
    pub(crate) fn unsubscribe_channel(&mut self, file: &Arc<EventFile>) {
        self.subscriptions
            .retain(|it| !Arc::ptr_eq(&it.channel, file));
    }
}
