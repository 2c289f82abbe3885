//! Connections by IP address, through the kernel's connection manager, as
//! librdmacm makes them.
//!
//! ```text
//! Listener::bind ─► next_request ─► Request ─── prepare, accept ──► Connection
//! Connector::resolve ────────────────────────── prepare, connect ─► Connection
//! ```
//!
//! A [`Connection`] is an id of the connection manager's with an event channel
//! of its own, so that each can be waited for in its own thread, or all by
//! `poll`: they are [`AsFd`](std::os::fd::AsFd). The queue pair stays its
//! user's: it is made on the device that the address leads to
//! ([`Connector::device`], [`Request::device`]) and taken through its states
//! here.
//!
//! An embedded device has a connection manager of its own: addresses of the
//! machine itself (127.0.0.0/8, `::1`), and ports of the process or of all
//! processes that name the same directory. A program chooses it by naming the
//! device ([`Listener::bind_on`], [`Connector::resolve_on`]). Where it names none
//! and was built with the feature `embedded`, the environment may:
//! `RINGVERBS_DEVICE=embedded`, or `embedded:DIRECTORY`. In a program with raised
//! rights (`AT_SECURE`) it does not count.
//!
//! What these helpers do not do, the connection manager's own types do:
//! [`manager`].

mod connection;
mod error;
mod listener;
mod via;

pub use connection::{Connection, Connector, Service};
pub use error::Error;
pub use listener::{Listener, Request};

/// The kernel's connection manager itself: channels, ids, events, options,
/// multicast.
pub use rdmacm as manager;

use std::time::Duration;

use rdmacm::{EventChannel, EventKind, Id};
use uverbs::{QpAttr, QpAttrMask, QpState};

use crate::qp::QueuePair;

/// What the helpers here return.
pub type Result<T> = std::result::Result<T, Error>;

/// What two peers agree on when they connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options<'a> {
    /// Bytes for the peer: 56 in a request, 196 in an answer (of datagram
    /// services 180 and 136). What the peer sees has zeros behind it.
    pub private_data: &'a [u8],
    /// RDMA reads and atomics of the peer that may be outstanding here. `None`:
    /// 1 in a request, what the peer asks for in an answer.
    pub responder_resources: Option<u8>,
    /// RDMA reads and atomics of ours that may be outstanding. `None` as above.
    pub initiator_depth: Option<u8>,
    /// Retries after a timeout, 0 to 7; the connecting side's.
    pub retry_count: u8,
    /// How often the peer retries when there is no receive here, 0 to 7; 7 is
    /// for ever.
    pub rnr_retry_count: u8,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            private_data: &[],
            responder_resources: None,
            initiator_depth: None,
            retry_count: 7,
            rnr_retry_count: 7,
        }
    }
}

/// Whether the queue pair is on the id's device, and of its kind.
fn check_queue_pair(id: &Id, qp: &QueuePair) -> Result<()> {
    let bound = id.addresses()?.device.ok_or(Error::NoDevice)?;
    let on_device = qp.context().device().is_none_or(|device| {
        let found = device.found();
        match found.index {
            Some(index) => index == bound.index,
            None => found.node_guid == Some(bound.node_guid),
        }
    });
    if !on_device {
        return Err(Error::WrongDevice);
    }
    if id.is_datagram() != (qp.transport() == crate::Transport::Datagram) {
        return Err(Error::WrongTransport);
    }
    Ok(())
}

/// Takes the queue pair to a state, with the connection manager's attributes.
fn advance(
    id: &Id,
    qp: &mut QueuePair,
    state: QpState,
    change: impl FnOnce(&mut QpAttr),
) -> Result<()> {
    let (mut attr, mask) = id.qp_attr(state)?;
    change(&mut attr);
    Ok(qp.modify(&attr, mask)?)
}

/// From RESET to INIT, where receives can be posted; of datagrams, to RTS.
fn prepare(id: &Id, qp: &mut QueuePair) -> Result<()> {
    check_queue_pair(id, qp)?;
    if qp.state() != QpState::RESET {
        return Ok(());
    }
    advance(id, qp, QpState::INIT, |_| {})?;
    if id.is_datagram() {
        for (qp_state, mask) in [
            (QpState::RTR, QpAttrMask::STATE),
            (QpState::RTS, QpAttrMask::STATE | QpAttrMask::SQ_PSN),
        ] {
            let attr = QpAttr {
                qp_state,
                ..QpAttr::default()
            };
            qp.modify(&attr, mask)?;
        }
    }
    Ok(())
}

/// Waits for an event of an id that has the channel for itself. Events that
/// change nothing are passed over.
fn await_event(
    channel: &EventChannel,
    awaited: EventKind,
    timeout: Option<Duration>,
) -> Result<rdmacm::Event> {
    let deadline = timeout.and_then(|timeout| std::time::Instant::now().checked_add(timeout));
    loop {
        let left =
            deadline.map(|deadline| deadline.saturating_duration_since(std::time::Instant::now()));
        let event = channel.wait(left)?.ok_or(Error::Timeout { awaited })?;
        if event.kind() == awaited {
            event.message().result().map_err(|_| Error::of(&event))?;
            return Ok(event);
        }
        match event.kind() {
            EventKind::ADDR_CHANGE | EventKind::TIMEWAIT_EXIT | EventKind::USER => {}
            _ => return Err(Error::of(&event)),
        }
    }
}
