//! Why something failed: commands, work requests, accesses to memory, queues and packets.
//!
//! Each cause is one value with both sides of the comparison, made where the rule is checked.
//! [`Hca::observe`](crate::Hca::observe) passes all of them to an observer.

use std::fmt;

use roce::packet::Path;
use roce::rule::Violation;
use roce::transport::{self, Operation, Service};

use crate::layout::event;
use crate::rights::Rights;
use crate::status::CommandError;

/// The cause of a failure, or an event.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A command was refused.
    Command {
        /// Its opcode.
        opcode: u16,
        /// What broke which rule.
        error: CommandError,
    },
    /// The transport dropped a packet, refused a request, or ended a work request.
    Transport {
        /// The queue pair, if it is known.
        qpn: Option<u32>,
        /// Why.
        cause: transport::Cause,
    },
    /// An access to memory failed. A cause of the transport follows that says what became of
    /// the request.
    Access(AccessError),
    /// The work request that ends. The cause of the transport about its queue pair that
    /// follows says why.
    WorkRequest(WorkRequest),
    /// The driver or a program has misused the device.
    Misuse(Misuse),
    /// A frame of an Ethernet port was dropped, or ends its receive with an error.
    Frame {
        /// The receive queue, if one was selected.
        queue: Option<u32>,
        /// Length of the frame in bytes.
        length: usize,
        /// Why.
        cause: FrameDrop,
    },
    /// An asynchronous event.
    Event {
        /// Its type, one of [`event`].
        kind: u8,
        /// Its subtype, of a completion queue its syndrome.
        subtype: u8,
        /// Number of the queue, or of the port.
        number: u32,
    },
}

/// An observer of causes ([`Hca::observe`](crate::Hca::observe)).
pub struct Observer(Box<dyn FnMut(&Cause) + Send>);

impl Observer {
    /// Creates an observer that is called for each cause.
    pub fn new(observe: impl FnMut(&Cause) + Send + 'static) -> Self {
        Self(Box::new(observe))
    }

    pub(crate) fn tell(&mut self, cause: &Cause) {
        (self.0)(cause);
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}

/// A work request that ended with an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkRequest {
    /// The queue pair.
    pub qpn: u32,
    /// Its service.
    pub service: Service,
    /// Number of the work requests that the queue had before it, since the queue pair was in
    /// RESET; it wraps, of a receive after 16 bits. `None` for a receive of an SRQ.
    pub number: Option<u32>,
    /// The operation; `None` for a receive.
    pub operation: Option<Operation>,
    /// Bytes of the message, or of the receive.
    pub length: u32,
    /// The first buffers.
    pub buffers: [Buffer; 4],
    /// Number of all buffers. Inline data have none.
    pub buffer_count: usize,
    /// Remote address and rkey.
    pub remote: Option<(u64, u32)>,
    /// Number of the queue pair at the other end.
    pub peer: Option<u32>,
    /// The path to it.
    pub path: Option<Path>,
    /// Its port is the same one.
    pub is_loopback: bool,
    /// It is malformed: the operation is not known.
    pub is_malformed: bool,
}

/// A local buffer of a work request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Buffer {
    /// First address.
    pub va: u64,
    /// Length in bytes.
    pub length: u32,
    /// The lkey.
    pub key: u32,
}

impl WorkRequest {
    /// Returns the buffers that are known.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers[..self.buffer_count.min(self.buffers.len())]
    }
}

impl fmt::Display for WorkRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_malformed {
            return f.write_str("malformed");
        }
        let name = self.operation.map_or("receive", |it| it.name());
        write!(f, "{name}, {} bytes", self.length)?;
        for Buffer { va, length, key } in self.buffers() {
            write!(f, ", {length} at {va:#x} with lkey {key:#x}")?;
        }
        if self.buffer_count > self.buffers.len() {
            let more = self.buffer_count - self.buffers.len();
            write!(f, ", {more} more buffers")?;
        }
        if let Some((va, rkey)) = self.remote {
            write!(f, ", remote {va:#x} with rkey {rkey:#x}")?;
        }
        match self.peer {
            Some(peer) => write!(f, ", to queue pair {peer:#x}"),
            None => Ok(()),
        }
    }
}

/// An access to memory that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AccessError {
    /// The queue pair.
    pub qpn: u32,
    /// The key.
    pub key: u32,
    /// First address.
    pub va: u64,
    /// Length in bytes.
    pub length: u64,
    /// The rule that the access breaks.
    pub rule: AccessRule,
    /// The key that breaks it, if it is not `key`, but one to which that refers.
    pub inner: Option<InnerKey>,
}

/// A key to which another one refers, and the part of it that an access needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InnerKey {
    /// The key.
    pub key: u32,
    /// First address.
    pub va: u64,
    /// Length in bytes.
    pub length: u64,
}

/// A rule of accesses to memory, with what the key has. Rights have the bits of an mkey
/// context.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessRule {
    /// The key exists. Another one may have its number, with this low byte.
    Exists(Option<u8>),
    /// The key is valid: it was neither invalidated, nor never bound.
    Valid,
    /// The protection domain is that of the key.
    Domain {
        /// Of the queue pair.
        own: u32,
        /// Of the key.
        key: u32,
    },
    /// The key is bound to this queue pair.
    QueuePair(u32),
    /// The key has the rights.
    Rights {
        /// Rights that the access needs.
        needed: u32,
        /// Rights of the key.
        has: u32,
    },
    /// The range is within that of the key.
    Range {
        /// First address of the key.
        start: u64,
        /// Length of the key.
        length: u64,
    },
    /// The pages or keys to which the key refers cover the range.
    Covered,
    /// Keys refer to others at most this deep.
    Depth(u32),
    /// Windows may refer to the key.
    Bindable,
    /// A key to which others refer has no signatures and no encryption.
    Unprotected,
    /// The memory of the key is mapped.
    Mapped,
    /// The key may be invalidated by this request.
    Invalidation,
    /// The list of buffers has this number of bytes.
    List(u64),
}

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            key,
            va,
            length,
            rule,
            inner,
            ..
        } = self;
        write!(f, "access to {length} bytes at {va:#x} with key {key:#x}: ")?;
        if let Some(InnerKey { key, va, length }) = inner {
            write!(
                f,
                "of {length} bytes at {va:#x} with key {key:#x} within it: "
            )?;
        }
        rule.fmt(f)
    }
}

impl fmt::Display for AccessRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exists(None) => f.write_str("no key has this number"),
            Self::Exists(Some(variant)) => {
                write!(f, "the key of this number ends with {variant:#04x}")
            }
            Self::Valid => f.write_str("the key is not valid"),
            Self::Domain { own, key } => write!(
                f,
                "protection domain {own} of the queue pair is not {key} of the key"
            ),
            Self::QueuePair(qpn) => write!(f, "the key is for queue pair {qpn:#x}"),
            Self::Rights { needed, has } => {
                write!(f, "the key has {}, not ", RightsList(*has))?;
                RightsList(needed & !has).fmt(f)
            }
            Self::Range { start, length } => {
                write!(f, "the key is for {length} bytes from {start:#x} on")
            }
            Self::Covered => f.write_str("the key has no pages or keys for all of it"),
            Self::Depth(limit) => write!(f, "keys refer to others more than {limit} deep"),
            Self::Bindable => f.write_str("the key does not permit windows"),
            Self::Unprotected => f.write_str("the key has signatures or encryption"),
            Self::Mapped => f.write_str("the memory of the key is not mapped"),
            Self::Invalidation => f.write_str("the key may not be invalidated"),
            Self::List(length) => write!(f, "the list of buffers has {length} bytes"),
        }
    }
}

/// Why a frame was dropped.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameDrop {
    /// The link is down: it was not sent.
    LinkDown,
    /// The queue of the link has this length, and is full: it was not sent.
    QueueFull(u64),
    /// There is no packet buffer for it: it was not sent.
    NoBuffer,
    /// It is longer than this.
    TooLong(u64),
    /// No steering rule directs it to a queue.
    NoRule,
    /// The queue is in another state than ready.
    State(u32),
    /// No receive is posted.
    NoReceive,
    /// The receive queue is not in memory.
    Unmapped,
    /// The fault of this line loses it.
    Injected(usize),
}

impl fmt::Display for FrameDrop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LinkDown => f.write_str("the link is down"),
            Self::QueueFull(length) => write!(f, "the link's queue of {length} bytes is full"),
            Self::NoBuffer => f.write_str("there is no packet buffer"),
            Self::TooLong(room) => write!(f, "there is room for {room} bytes"),
            Self::NoRule => f.write_str("no steering rule directs it to a queue"),
            Self::State(state) => write!(f, "the queue is in state {state}"),
            Self::NoReceive => f.write_str("no receive is posted"),
            Self::Unmapped => f.write_str("the receive queue is not in memory"),
            Self::Injected(line) => write!(f, "the injected fault of line {line}"),
        }
    }
}

/// Rights of a key, by the names of `enum ibv_access_flags`.
struct RightsList(u32);

impl fmt::Display for RightsList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [
            (Rights::LOCAL_READ, "LOCAL_READ"),
            (Rights::LOCAL_WRITE, "LOCAL_WRITE"),
            (Rights::REMOTE_READ, "REMOTE_READ"),
            (Rights::REMOTE_WRITE, "REMOTE_WRITE"),
            (Rights::ATOMIC, "REMOTE_ATOMIC"),
        ];
        let mut names = names.iter().filter(|(right, _)| self.0 & right.0 != 0);
        match names.next() {
            None => return f.write_str("no rights"),
            Some((_, first)) => f.write_str(first)?,
        }
        names.try_for_each(|(_, name)| write!(f, " and {name}"))
    }
}

/// Misuse of the device by the driver or a program.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Misuse {
    /// A work request is malformed, or cannot be executed.
    WorkRequest {
        /// The queue.
        queue: u32,
        /// Its index in the queue.
        index: u16,
        /// What broke which rule.
        violation: Violation,
    },
    /// The copy of a work request in a BlueFlame register differs from that in the ring.
    BlueFlame {
        /// The queue.
        queue: u32,
        /// Its index in the queue.
        index: u16,
        /// The first byte that differs.
        at: usize,
        /// The byte in the ring.
        ring: u8,
        /// The byte in the copy.
        copy: u8,
    },
    /// A queue is not in memory.
    Unmapped {
        /// The kind of queue.
        what: &'static str,
        /// Its number.
        number: u32,
    },
    /// A queue that a doorbell or a completion names does not exist.
    NoQueue {
        /// The kind of queue.
        what: &'static str,
        /// Its number.
        number: u32,
        /// What names it.
        by: &'static str,
    },
    /// More completions than a completion queue has entries.
    CqOverrun {
        /// Its number.
        cqn: u32,
        /// Number of entries.
        entries: u32,
    },
    /// More events than an event queue has entries; one is lost.
    EqOverrun {
        /// Its number.
        eqn: u32,
        /// Type of the lost event.
        kind: u8,
    },
    /// A write to a UAR page that is not allocated, or to a place without a register.
    Uar {
        /// The page.
        page: u32,
        /// Offset in the page, if it is allocated.
        offset: Option<u64>,
        /// Number of bytes.
        length: usize,
    },
    /// A command slot that cannot be executed.
    CommandSlot {
        /// The slot.
        slot: u32,
        /// Its address.
        entry: u64,
        /// What is wrong.
        fault: SlotFault,
    },
}

/// What is wrong with a command slot.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotFault {
    /// The driver owns it.
    NotHandedOver,
    /// It is not in memory.
    Unmapped,
    /// The delivery status that the driver reads.
    Delivery(u8),
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::WorkRequest {
                queue,
                index,
                violation,
            } => write!(f, "queue {queue}, index {index}: {violation}"),
            Self::BlueFlame {
                queue,
                index,
                at,
                ring,
                copy,
            } => write!(
                f,
                "queue {queue}, index {index}: the ring differs from the BlueFlame copy, \
                 first at byte {at}: {ring:#04x}, and {copy:#04x} in the copy"
            ),
            Self::Unmapped { what, number } => write!(f, "{what} {number} is not in memory"),
            Self::NoQueue { what, number, by } => {
                write!(f, "{by} {what} {number:#x}, which does not exist")
            }
            Self::CqOverrun { cqn, entries } => {
                write!(
                    f,
                    "completion queue {cqn} is in error: overrun of its {entries} entries"
                )
            }
            Self::EqOverrun { eqn, kind } => {
                write!(
                    f,
                    "event queue {eqn} is full: an event of type {kind:#x} is lost"
                )
            }
            Self::Uar {
                page, offset: None, ..
            } => write!(f, "a write to UAR page {page}, which is not allocated"),
            Self::Uar {
                page,
                offset: Some(offset),
                length,
            } => write!(f, "a write of {length} bytes to UAR {page}+{offset:#x}"),
            Self::CommandSlot { slot, entry, fault } => match fault {
                SlotFault::NotHandedOver => {
                    write!(f, "command slot {slot} was rung for but is not handed over")
                }
                SlotFault::Unmapped => {
                    write!(f, "command slot {slot} at {entry:#x} is not in memory")
                }
                SlotFault::Delivery(status) => {
                    write!(f, "command slot {slot}: delivery status {status:#x}")
                }
            },
        }
    }
}

/// Subtypes of a port change.
pub(crate) const PORT_DOWN: u8 = 1;
pub(crate) const PORT_ACTIVE: u8 = 4;

/// Returns the name of an event type.
fn event_name(kind: u8) -> &'static str {
    match kind {
        event::COMM_EST => "connection established",
        event::SQ_DRAINED => "send queue drained",
        event::SRQ_LAST_WQE => "last receive of the SRQ consumed",
        event::SRQ_LIMIT => "SRQ limit reached",
        event::CQ_ERROR => "completion queue in error",
        event::WQ_CATASTROPHIC => "queue in error",
        event::WQ_INVALID_REQUEST => "invalid request",
        event::WQ_ACCESS => "access violation",
        event::SRQ_CATASTROPHIC => "SRQ in error",
        event::PORT_CHANGE => "port change",
        event::DCT_DRAINED => "DC target drained",
        _ => "event",
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Command { opcode, error } => {
                let name = crate::opcode::name(*opcode);
                write!(f, "{name} ({opcode:#x}) refused: {error}")
            }
            Self::Transport { qpn, cause } => match qpn {
                Some(qpn) => write!(f, "queue pair {qpn:#x}: {cause}"),
                None => cause.fmt(f),
            },
            Self::Access(error) => write!(f, "queue pair {:#x}: {error}", error.qpn),
            Self::WorkRequest(work) => write!(f, "queue pair {:#x}: {work}", work.qpn),
            Self::Misuse(misuse) => misuse.fmt(f),
            Self::Frame {
                queue,
                length,
                cause,
            } => match queue {
                Some(queue) => write!(f, "queue {queue:#x}: frame of {length} bytes: {cause}"),
                None => write!(f, "frame of {length} bytes dropped: {cause}"),
            },
            Self::Event {
                kind,
                subtype,
                number,
            } => {
                let name = event_name(*kind);
                if *kind == event::PORT_CHANGE {
                    let state = match *subtype {
                        PORT_DOWN => "down",
                        PORT_ACTIVE => "active",
                        _ => "in another state",
                    };
                    return write!(
                        f,
                        "asynchronous event: port {number} is {state} ({kind:#x}/{subtype:#x})"
                    );
                }
                write!(
                    f,
                    "asynchronous event: {name}: {number:#x} ({kind:#x}/{subtype:#x})"
                )
            }
        }
    }
}
