//! The passive side.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::events::EventChannels;
use super::linger::LingeringEngine;
use super::setup::{PassiveSide, begin_accept, each_address, from_manager, from_verbs};
use super::{RdmaStream, StreamOptions, wait};
use crate::cm::manager::PortSpace;
use crate::cm::{HalfOpen, Handshake, Handshakes, Listener, Request};
use crate::{ProtectionDomain, cm};

/// Accepts streams, like `std::net::TcpListener`.
///
/// Any thread may use it; several may accept at once.
pub struct RdmaListener {
    listener: Listener,
    state: Mutex<ListenerState>,
    options: StreamOptions,
}

#[derive(Default)]
struct ListenerState {
    /// Streams whose peers have not confirmed yet.
    handshakes: Handshakes<PassiveSide>,
    /// Devices on which a stream has arrived, by name.
    devices: HashMap<String, ListenerDevice>,
}

/// What the streams of a device share.
struct ListenerDevice {
    domain: ProtectionDomain,
    /// The latest channels.
    channels: VecDeque<Weak<EventChannels>>,
}

/// Maximum number of channels that are looked through for ones without a stream: as many
/// as there can be requests whose peers have not confirmed.
const MAX_CHANNELS: usize = 32;

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
            state: Mutex::default(),
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

    /// Waits for the next stream, whose peer has confirmed that it is connected. Requests of
    /// other protocols are rejected silently.
    ///
    /// Before that, a stream has a queue pair but neither memory nor a descriptor, and at most
    /// 48 streams do. Peers that never confirm do not keep others from connecting
    /// ([`Handshakes`]).
    ///
    /// # Errors
    /// `OutOfMemory` if the memory of its buffers cannot be registered (see `ulimit -l`), which
    /// resets the peer's stream; EIO if the device was removed. The listener remains usable.
    pub fn accept(&self) -> io::Result<(RdmaStream, SocketAddr)> {
        loop {
            if let Some((engine, peer)) = self.accept_ready(true)? {
                return Ok((RdmaStream::new(engine), peer));
            }
        }
    }

    /// Returns an endless iterator over the streams, as they arrive.
    pub fn incoming(&self) -> impl Iterator<Item = io::Result<RdmaStream>> + '_ {
        std::iter::repeat_with(|| self.accept().map(|(stream, _)| stream))
    }

    /// Returns the next stream. Without one, it waits for events; if not `always`, only while
    /// requests wait for others to end.
    pub(super) fn accept_ready(
        &self,
        always: bool,
    ) -> io::Result<Option<(LingeringEngine, SocketAddr)>> {
        loop {
            let next = self.lock().next(&self.listener, &self.options)?;
            match next {
                Handshake::Established(half_open, side) => {
                    let peer = side.peer_addr;
                    return Ok(Some((side.finish(half_open)?, peer)));
                }
                Handshake::Pending(None) if !always => return Ok(None),
                Handshake::Pending(until) => {
                    let fd = self.listener.as_fd();
                    wait::readable([fd, fd], until)?;
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, ListenerState> {
        // A panic leaves the state consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the connection manager id.
    pub fn as_listener(&self) -> &cm::Listener {
        &self.listener
    }
}

impl ListenerState {
    fn next(
        &mut self,
        listener: &Listener,
        options: &StreamOptions,
    ) -> io::Result<Handshake<PassiveSide>> {
        let devices = &mut self.devices;
        let accept = |request: Request| -> Result<Option<(HalfOpen, PassiveSide)>, Failure> {
            let Some(peer) = request.peer_addr()? else {
                return Ok(None);
            };
            let device = device_of(devices, &request)?;
            let channels = device.channels(&request)?;
            Ok(begin_accept(
                request,
                peer,
                &device.domain,
                &channels,
                options,
            )?)
        };
        (self.handshakes.next(listener, accept)).map_err(|Failure(error)| error)
    }
}

/// An error of either kind.
struct Failure(io::Error);

impl From<cm::Error> for Failure {
    fn from(error: cm::Error) -> Self {
        Self(from_manager(error))
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self(error)
    }
}

fn device_of<'a>(
    devices: &'a mut HashMap<String, ListenerDevice>,
    request: &Request,
) -> io::Result<&'a mut ListenerDevice> {
    let device = request.device().map_err(from_manager)?;
    match devices.entry(device.name().to_owned()) {
        Entry::Occupied(entry) => Ok(entry.into_mut()),
        Entry::Vacant(entry) => {
            let context = device.open().map_err(from_verbs)?;
            Ok(entry.insert(ListenerDevice {
                domain: context.alloc_pd().map_err(from_verbs)?,
                channels: VecDeque::new(),
            }))
        }
    }
}

impl ListenerDevice {
    /// Returns channels for a request: those of others that wait for their peers, if none of
    /// these has become a stream yet.
    fn channels(&mut self, request: &Request) -> io::Result<Arc<EventChannels>> {
        let mut all = self.channels.iter().filter_map(Weak::upgrade);
        if let Some(shared) = all.find(|it| it.are_unused()) {
            return Ok(shared);
        }
        drop(all);
        self.channels.retain(|it| it.strong_count() != 0);
        if self.channels.len() == MAX_CHANNELS {
            self.channels.pop_front();
        }
        let connections = request.open_channel().map_err(from_manager)?;
        let created = EventChannels::new(self.domain.context(), connections);
        let created = created.map_err(from_verbs)?;
        self.channels.push_back(Arc::downgrade(&created));
        Ok(created)
    }
}

impl AsFd for RdmaListener {
    /// Readable when there is a request, or a peer has confirmed.
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
