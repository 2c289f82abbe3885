//! Connections by IP address, through the kernel's connection manager (as
//! librdmacm).
//!
//! ```text
//! Listener::bind ─► next_request ─► Request ─── prepare, accept ──► Connection
//! Connector::resolve ────────────────────────── prepare, connect ─► Connection
//! ```
//!
//! A [`Connection`] is a connection manager id with its own event channel, so a
//! program can wait for each in its own thread, or for all by `poll`: connections
//! implement [`AsFd`](std::os::fd::AsFd). The caller owns the queue pair and creates it
//! on the device that the address resolves to ([`Connector::device`],
//! [`Request::device`]); this module moves it through its states.
//!
//! With the feature `tokio`, [`AsyncListener`], [`AsyncConnector`] and
//! [`AsyncConnection`] wait as futures, for an
//! [`AsyncQueuePair`](crate::future::AsyncQueuePair).
//!
//! An embedded device has its own connection manager. Its addresses are those of the
//! host's interfaces, and its ports belong to the process, or to all processes that use
//! the same directory. The connection manager of
//! [`Device::roce`](crate::Device::roce) uses the device's own addresses and connects to
//! other hosts. A program selects a device by [`Listener::bind_on`] and
//! [`Connector::resolve_on`]. Without them, a program built with the feature `embedded`
//! uses the device in the environment variable `RINGVERBS_DEVICE` (`embedded`,
//! `embedded:DIRECTORY` or `roce:INTERFACE`). A privileged program (`AT_SECURE`) ignores
//! the variable.
//!
//! [`manager`] has the connection manager's own types, for features that this module
//! does not cover.

#![forbid(unsafe_code)]

mod connection;
mod error;
mod handshakes;
mod listener;
#[cfg(feature = "tokio")]
mod on_tokio;
mod source;

pub use connection::{Connection, Connector, Service};
pub use error::Error;
pub use handshakes::{Handshake, Handshakes};
pub use listener::{HalfOpen, Listener, Request};
#[cfg(feature = "tokio")]
pub use on_tokio::{AsyncConnection, AsyncConnector, AsyncListener};

/// The kernel's connection manager interface: channels, ids, events, options,
/// multicast.
pub use rdmacm as manager;

use std::time::Duration;

use rdmacm::{EventChannel, EventKind, Id};
use uverbs::{QpAttr, QpAttrMask, QpState};

use crate::qp::QueuePair;

/// The result type of this module.
pub type Result<T> = std::result::Result<T, Error>;

/// The parameters of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options<'a> {
    /// Private data for the peer, up to 56 bytes in a request and 196 in an
    /// answer (datagram services: 180 and 136). The peer sees it padded with
    /// zeros.
    pub private_data: &'a [u8],
    /// Maximum number of outstanding RDMA reads and atomics of the peer. `None`: 1 in a
    /// request, the number that the peer asks for in an answer.
    pub responder_resources: Option<u8>,
    /// Maximum number of outstanding RDMA reads and atomics of this side. `None`: as for
    /// `responder_resources`.
    pub initiator_depth: Option<u8>,
    /// Number of retries after a timeout, 0 to 7; chosen by the connecting side.
    /// Default 6: with 7, rdma_rxe retries forever and never detects that a peer is gone.
    pub retry_count: u8,
    /// Number of the peer's retries while no receive is posted here, 0 to 7; 7 means no
    /// limit.
    pub rnr_retry_count: u8,
}

impl Default for Options<'_> {
    fn default() -> Self {
        Self {
            private_data: &[],
            responder_resources: None,
            initiator_depth: None,
            retry_count: 6,
            rnr_retry_count: 7,
        }
    }
}

/// Checks that the queue pair is on the id's device and has its transport.
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

/// Moves the queue pair to a state with the connection manager's attributes.
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

/// Moves the queue pair from RESET to INIT, where receives can be posted; a datagram
/// queue pair to RTS.
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

/// Waits for an event on a channel that only one id uses. Informational events are
/// skipped.
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
        if is_awaited(&event, awaited)? {
            return Ok(event);
        }
    }
}

/// Returns whether this is the awaited event; false for an informational event.
fn is_awaited(event: &rdmacm::Event, awaited: EventKind) -> Result<bool> {
    match event.kind() {
        kind if kind == awaited => {
            event.message().result().map_err(|_| Error::of(event))?;
            Ok(true)
        }
        EventKind::ADDR_CHANGE | EventKind::TIMEWAIT_EXIT | EventKind::USER => Ok(false),
        _ => Err(Error::of(event)),
    }
}
