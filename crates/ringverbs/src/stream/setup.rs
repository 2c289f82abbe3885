//! Establishing streams.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;

use super::StreamOptions;
use super::engine::{Engine, StreamQueues};
use super::events::EventChannels;
use super::fault::Fault;
use super::linger::LingeringEngine;
use super::messages::Hello;
use crate::ProtectionDomain;
use crate::cm::manager::PortSpace;
use crate::cm::{Connector, HalfOpen, Options, Request};

pub(super) fn from_manager(error: crate::cm::Error) -> io::Error {
    Fault::manager(&error).to_io()
}

pub(super) fn from_verbs(error: crate::Error) -> io::Error {
    Fault::verbs(&error).to_io()
}

/// Tries the addresses in order.
pub(super) fn each_address<T>(
    addresses: impl ToSocketAddrs,
    mut attempt: impl FnMut(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    let mut last = None;
    for address in addresses.to_socket_addrs()? {
        match attempt(address) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(error),
        }
    }
    Err(last
        .unwrap_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the name has no address")))
}

/// Establishes the active side.
pub(super) fn connect(peer: SocketAddr, options: &StreamOptions) -> io::Result<LingeringEngine> {
    options.check()?;
    let timeout = options.connect_timeout;
    let connector = match &options.device {
        Some(device) => Connector::resolve_on(device, PortSpace::TCP, None, peer, timeout),
        None => Connector::resolve(peer, timeout),
    };
    let connector = connector.map_err(from_manager)?;
    let context = connector
        .device()
        .map_err(from_manager)?
        .open()
        .map_err(from_verbs)?;
    let domain = context.alloc_pd().map_err(from_verbs)?;
    let id = connector.id();
    let channels = EventChannels::new(&context, id.channel()).map_err(from_verbs)?;
    let mut queues = StreamQueues::new(&domain, &channels, options).map_err(from_verbs)?;
    let events = queues.add_to_channels(id.key());
    connector.prepare(&mut queues.qp).map_err(from_manager)?;
    let free = queues.post_receives().map_err(from_verbs)?;
    let hello = options.hello().encode();
    let cm_options = Options {
        private_data: &hello,
        ..Options::default()
    };
    let connection = connector
        .connect(&mut queues.qp, &cm_options, Some(timeout))
        .map_err(from_manager)?;
    // Dropping the connection disconnects.
    let peer = Hello::decode(connection.private_data())?;
    Ok(LingeringEngine::new(Engine::new(
        queues, free, events, connection, peer,
    )))
}

/// The passive side of a stream whose peer has not confirmed yet.
pub(super) struct PassiveSide {
    queues: StreamQueues,
    peer: Hello,
    pub peer_addr: SocketAddr,
}

/// Accepts a request with a queue pair, but without memory or channels of its own. Rejects it and returns `None` if
/// it is of another protocol, or the peer has cancelled.
pub(super) fn begin_accept(
    request: Request,
    peer_addr: SocketAddr,
    domain: &ProtectionDomain,
    channels: &Arc<EventChannels>,
    options: &StreamOptions,
) -> io::Result<Option<(HalfOpen, PassiveSide)>> {
    let peer = match Hello::decode(request.private_data()) {
        Ok(peer) => peer,
        Err(error) => {
            tracing::debug!(%error, "rejected a connection request");
            return Ok(None);
        }
    };
    let mut queues = StreamQueues::new(domain, channels, options).map_err(from_verbs)?;
    let hello = options.hello().encode();
    let cm_options = Options {
        private_data: &hello,
        ..Options::default()
    };
    match request.begin_accept(&mut queues.qp, &cm_options) {
        Ok(half_open) => {
            let side = PassiveSide {
                queues,
                peer,
                peer_addr,
            };
            Ok(Some((half_open, side)))
        }
        Err(error) => {
            tracing::debug!(%error, "a connection request could not be accepted");
            Ok(None)
        }
    }
}

impl PassiveSide {
    /// Registers memory, after the peer has confirmed. Until then its messages are retried.
    pub fn finish(mut self, half_open: HalfOpen) -> io::Result<LingeringEngine> {
        let events = self.queues.add_to_channels(half_open.key());
        let connections = self.queues.channels().connections().clone();
        let connection = half_open.into_connection_on(connections);
        let connection = connection.map_err(from_manager)?;
        let free = self.queues.post_receives().map_err(from_verbs)?;
        Ok(LingeringEngine::new(Engine::new(
            self.queues,
            free,
            events,
            connection,
            self.peer,
        )))
    }
}
