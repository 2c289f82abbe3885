//! The passive side.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::linger::LingeringEngine;
use super::setup::{accept, each_address, from_manager, from_verbs};
use super::{RdmaStream, StreamOptions};
use crate::cm::manager::PortSpace;
use crate::cm::{Listener, Request};
use crate::{ProtectionDomain, cm};

/// Accepts streams, like `std::net::TcpListener`.
///
/// Any thread may use it; several may accept at once.
pub struct RdmaListener {
    listener: Listener,
    /// A protection domain for each device on which a stream has arrived.
    domains: Mutex<HashMap<String, ProtectionDomain>>,
    options: StreamOptions,
}

impl RdmaListener {
    /// Listens at an address of an RDMA device's network interface, or at the unspecified
    /// address, which means all devices. For port 0 the kernel chooses a port.
    ///
    /// # Errors
    /// `AddrInUse`, `AddrNotAvailable`; `NotFound` without a connection manager
    /// (module rdma_ucm).
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::bind_with(address, &StreamOptions::default())
    }

    /// As [`bind`](Self::bind), with options for the streams.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); `InvalidInput` for invalid options.
    pub fn bind_with(address: impl ToSocketAddrs, options: &StreamOptions) -> io::Result<Self> {
        options.check()?;
        let listener = each_address(address, |address| {
            let listener = match &options.device {
                Some(device) => Listener::bind_on(device, PortSpace::TCP, address, 0),
                None => Listener::bind(address),
            };
            listener.map_err(from_manager)
        })?;
        Ok(Self {
            listener,
            domains: Mutex::default(),
            options: options.clone(),
        })
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let address = self.listener.local_addr().map_err(from_manager)?;
        address.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
    }

    /// Waits for the next stream. Requests of other protocols are rejected silently.
    ///
    /// # Errors
    /// `OutOfMemory` if the memory of its buffers cannot be registered (see `ulimit -l`);
    /// EIO if the device was removed. The listener remains usable.
    pub fn accept(&self) -> io::Result<(RdmaStream, SocketAddr)> {
        loop {
            if let Some((engine, peer)) = self.accept_within(None)? {
                return Ok((RdmaStream::new(engine), peer));
            }
        }
    }

    /// Returns an endless iterator over the streams, as they arrive.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<RdmaStream>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(stream, _)| stream))
    }

    /// Returns `None` if no request arrived in time, or it was of another protocol.
    pub(super) fn accept_within(
        &self,
        timeout: Option<Duration>,
    ) -> io::Result<Option<(LingeringEngine, SocketAddr)>> {
        match self.request_within(timeout)? {
            Some(request) => self.answer(request),
            None => Ok(None),
        }
    }

    /// Returns the next request, if one arrives in time.
    pub(super) fn request_within(&self, timeout: Option<Duration>) -> io::Result<Option<Request>> {
        self.listener.next_request(timeout).map_err(from_manager)
    }

    /// Answers a stream's request: opens its device, registers memory and creates the
    /// queues, which takes some time. `None` for a request of another protocol.
    pub(super) fn answer(
        &self,
        request: Request,
    ) -> io::Result<Option<(LingeringEngine, SocketAddr)>> {
        let domain = self.domain(&request)?;
        let Some(peer) = request.peer_addr().map_err(from_manager)? else {
            return Ok(None);
        };
        let engine = accept(request, &domain, &self.options)?;
        Ok(engine.map(|engine| (engine, peer)))
    }

    fn domain(&self, request: &Request) -> io::Result<ProtectionDomain> {
        let device = request.device().map_err(from_manager)?;
        let mut domains = self.domains.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(domain) = domains.get(device.name()) {
            return Ok(domain.clone());
        }
        let domain = device
            .open()
            .and_then(|context| context.alloc_pd())
            .map_err(from_verbs)?;
        domains.insert(device.name().to_owned(), domain.clone());
        Ok(domain)
    }

    /// Returns the connection manager id.
    pub fn as_listener(&self) -> &cm::Listener {
        &self.listener
    }
}

impl AsFd for RdmaListener {
    /// Readable when there is a request.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl fmt::Debug for RdmaListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RdmaListener")
            .field("address", &self.local_addr().ok())
            .finish()
    }
}
