//! Blocking streams.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::linger::LingeringEngine;
use super::setup::{connect, each_address, from_manager, from_verbs};
use super::{ConnectInfo, StreamOptions};

/// A byte stream to and from a peer, like `std::net::TcpStream`.
///
/// `&RdmaStream` can be read and written, too, and [`try_clone`](Self::try_clone)
/// returns another handle, so that one thread can read while another writes.
///
/// After the last handle is dropped, written data and the end mark are still delivered:
/// the drop waits up to 100 ms for the peer's device (not in a runtime of tokio), then a thread
/// for all such streams waits up to 5 s more.
/// [`close`](Self::close) reports whether they arrived.
pub struct RdmaStream {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<StreamState>,
    /// Notified after progress, and when the thread that waits for events returns.
    cond: Condvar,
}

struct StreamState {
    engine: LingeringEngine,
    /// Whether a thread waits for events, on behalf of all threads.
    has_watcher: bool,
    read_timeout: Option<Duration>,
    write_timeout: Option<Duration>,
}

impl RdmaStream {
    /// Connects to a listener.
    ///
    /// # Errors
    /// `ConnectionRefused` if nothing listens there; `HostUnreachable`,
    /// `NetworkUnreachable` if no RDMA device has a route; `TimedOut`; `InvalidData` if the
    /// listener is not a stream listener.
    pub fn connect(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::connect_with(address, &StreamOptions::default())
    }

    /// As [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `InvalidInput` for invalid options.
    pub fn connect_with(address: impl ToSocketAddrs, options: &StreamOptions) -> io::Result<Self> {
        each_address(address, |address| connect(address, options)).map(Self::new)
    }

    pub(super) fn new(engine: LingeringEngine) -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(StreamState {
                    engine,
                    has_watcher: false,
                    read_timeout: None,
                    write_timeout: None,
                }),
                cond: Condvar::new(),
            }),
        }
    }

    /// Returns the engine if this is the only handle.
    #[cfg(feature = "tokio")]
    pub(super) fn into_engine(self) -> Result<LingeringEngine, Self> {
        match Arc::try_unwrap(self.shared) {
            Ok(shared) => {
                let state = shared.state.into_inner();
                Ok(state.unwrap_or_else(PoisonError::into_inner).engine)
            }
            Err(shared) => Err(Self { shared }),
        }
    }

    /// Returns another handle of the same stream.
    ///
    /// # Errors
    /// None.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            shared: Arc::clone(&self.shared),
        })
    }

    /// Returns addresses and queue pair numbers of both ends. A system call.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn connect_info(&self) -> io::Result<ConnectInfo> {
        self.shared.lock().engine.connect_info().map_err(from_verbs)
    }

    /// Returns the local address.
    ///
    /// # Errors
    /// `NotConnected` if the connection manager no longer has it.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let state = self.shared.lock();
        let address = state.engine.connection().local_addr();
        address
            .map_err(from_manager)?
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Returns the peer's address.
    ///
    /// # Errors
    /// `NotConnected` if the connection manager no longer has it.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let state = self.shared.lock();
        let address = state.engine.connection().peer_addr();
        address
            .map_err(from_manager)?
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// Sets the time after which a read fails with `TimedOut`; `None`, the
    /// default, means never.
    ///
    /// # Errors
    /// `InvalidInput` for a timeout of zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.shared.lock().read_timeout = check_timeout(timeout)?;
        Ok(())
    }

    /// Sets the time after which a write fails with `TimedOut`; `None`, the
    /// default, means never.
    ///
    /// # Errors
    /// `InvalidInput` for a timeout of zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.shared.lock().write_timeout = check_timeout(timeout)?;
        Ok(())
    }

    /// Shuts down a direction. After `Write` no more data can be written, and the peer reads
    /// the end of the stream after the data. `Read` does nothing: the peer is not notified,
    /// and its data can still be read. `Both` does both. To close the stream, drop it or
    /// call [`close`](Self::close).
    ///
    /// # Errors
    /// The error of a broken connection.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if how == Shutdown::Read {
            return Ok(());
        }
        self.shared.wait_for(
            |state| state.write_timeout,
            |engine| {
                engine.finish();
                engine.end_is_posted()
            },
        )
    }

    /// Ends the stream, waits until all written data has arrived at the peer's device, and
    /// disconnects. The peer's program may not have read the data yet. (If the peer has
    /// also closed its side and disconnected, this does not wait.)
    ///
    /// # Errors
    /// `TimedOut`, or the error of a broken connection: data may not have arrived.
    pub fn close(self, timeout: Duration) -> io::Result<()> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.shared.lock();
        state.engine.finish();
        while state.has_watcher {
            drop(state);
            // The thread that waits for events drives the stream.
            self.shared
                .wait_until(deadline, |engine| engine.is_flushed())?;
            state = self.shared.lock();
            if state.engine.is_flushed()?.is_some() {
                break;
            }
        }
        let left = deadline.map_or(timeout, |deadline| {
            deadline.saturating_duration_since(Instant::now())
        });
        let outcome = state.engine.close(left);
        self.shared.cond.notify_all();
        outcome
    }
}

fn check_timeout(timeout: Option<Duration>) -> io::Result<Option<Duration>> {
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        let text = "a timeout must not be zero";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(timeout)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, StreamState> {
        // A panic leaves the engine consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for<R>(
        &self,
        timeout: impl FnOnce(&StreamState) -> Option<Duration>,
        attempt: impl FnMut(&mut Engine) -> io::Result<Option<R>>,
    ) -> io::Result<R> {
        let timeout = timeout(&self.lock());
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.wait_until(deadline, attempt)
    }

    /// Retries until there is a result. One thread waits for events and the others wait for
    /// that thread, because an event that one thread has read would not wake another.
    fn wait_until<R>(
        &self,
        deadline: Option<Instant>,
        mut attempt: impl FnMut(&mut Engine) -> io::Result<Option<R>>,
    ) -> io::Result<R> {
        let mut state = self.lock();
        loop {
            if state.engine.progress() {
                self.cond.notify_all();
            }
            if let Some(result) = attempt(&mut state.engine)? {
                return Ok(result);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| deadline <= now) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if state.has_watcher {
                state = match deadline {
                    None => self
                        .cond
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner),
                    Some(deadline) => {
                        self.cond
                            .wait_timeout(state, deadline - now)
                            .unwrap_or_else(PoisonError::into_inner)
                            .0
                    }
                };
                continue;
            }
            state.engine.take_events()?;
            if state.engine.arm()? {
                continue;
            }
            state.has_watcher = true;
            let events = Arc::clone(state.engine.events());
            drop(state);
            let waited = events.wait(deadline);
            state = self.lock();
            state.has_watcher = false;
            if events.has_connection_event() {
                state.engine.handle_connection_events();
            }
            self.cond.notify_all();
            waited?;
        }
    }
}

impl Read for &RdmaStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(buf)])
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        if bufs.iter().all(|buf| buf.is_empty()) {
            return Ok(0);
        }
        self.shared.wait_for(
            |state| state.read_timeout,
            |engine| {
                let mut bufs = bufs.iter_mut();
                let mut current: &mut [u8] = &mut [];
                engine.read_with(|mut bytes| {
                    let mut taken = 0;
                    while !bytes.is_empty() {
                        if current.is_empty() {
                            match bufs.next() {
                                Some(next) => current = next,
                                None => break,
                            }
                        }
                        let count = bytes.len().min(current.len());
                        let (here, rest) = std::mem::take(&mut current).split_at_mut(count);
                        here.copy_from_slice(&bytes[..count]);
                        current = rest;
                        bytes = &bytes[count..];
                        taken += count;
                    }
                    taken
                })
            },
        )
    }
}

impl Write for &RdmaStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buf)])
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        self.shared
            .wait_for(|state| state.write_timeout, |engine| engine.write(bufs))
    }

    /// Does nothing: written data was already posted to the device.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for RdmaStream {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        (&*self).read(buf)
    }

    fn read_vectored(&mut self, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&*self).read_vectored(bufs)
    }
}

impl Write for RdmaStream {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        (&*self).write(buf)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        (&*self).write_vectored(bufs)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for RdmaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.shared.state.try_lock() {
            Ok(state) => (*state.engine).fmt(f),
            Err(_) => f.write_str("RdmaStream"),
        }
    }
}
