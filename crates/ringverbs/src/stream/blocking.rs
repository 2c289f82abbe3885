//! Streams that wait.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::linger::Lingering;
use super::setup::{connect, each_address, from_manager};
use super::{StreamOptions, wait};

/// A stream of bytes to a peer and from it, as `std::net::TcpStream` is.
///
/// `&RdmaStream` reads and writes, too, and [`try_clone`](Self::try_clone)
/// gives another handle, so that one thread may read while another writes.
///
/// When the last handle is dropped, what was written still arrives, and the end
/// behind it: the drop waits for the peer's device up to 100 ms, and a thread
/// up to 5 s more. [`close`](Self::close) tells whether it did.
pub struct RdmaStream {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// Something has happened, or nobody watches any more.
    turn: Condvar,
}

struct State {
    engine: Lingering,
    /// A thread waits for events, for all of them.
    watched: bool,
    read_timeout: Option<Duration>,
    write_timeout: Option<Duration>,
}

impl RdmaStream {
    /// Connects to a listener.
    ///
    /// # Errors
    /// `ConnectionRefused` if nobody listens there; `HostUnreachable`,
    /// `NetworkUnreachable` if no RDMA device leads there; `TimedOut`;
    /// `InvalidData` if who listens is no stream.
    pub fn connect(address: impl ToSocketAddrs) -> io::Result<Self> {
        Self::connect_with(address, &StreamOptions::default())
    }

    /// The same, with other than the usual buffers.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `InvalidInput` for options that cannot
    /// be.
    pub fn connect_with(address: impl ToSocketAddrs, options: &StreamOptions) -> io::Result<Self> {
        each_address(address, |address| connect(address, options)).map(Self::new)
    }

    pub(super) fn new(engine: Lingering) -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    engine,
                    watched: false,
                    read_timeout: None,
                    write_timeout: None,
                }),
                turn: Condvar::new(),
            }),
        }
    }

    /// The engine, if this is the only handle.
    #[cfg(feature = "tokio")]
    pub(super) fn into_engine(self) -> Result<Lingering, Self> {
        match Arc::try_unwrap(self.shared) {
            Ok(shared) => {
                let state = shared.state.into_inner();
                Ok(state.unwrap_or_else(PoisonError::into_inner).engine)
            }
            Err(shared) => Err(Self { shared }),
        }
    }

    /// Another handle to the same stream.
    ///
    /// # Errors
    /// None.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            shared: Arc::clone(&self.shared),
        })
    }

    /// Our address.
    ///
    /// # Errors
    /// `NotConnected` if the connection manager knows of none any more.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        let state = self.shared.lock();
        let address = state.engine.connection().local_addr();
        address
            .map_err(from_manager)?
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `NotConnected` if the connection manager knows of none any more.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let state = self.shared.lock();
        let address = state.engine.connection().peer_addr();
        address
            .map_err(from_manager)?
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// How long a read waits before it fails with `TimedOut`; `None` is for
    /// ever.
    ///
    /// # Errors
    /// `InvalidInput` for no time at all.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.shared.lock().read_timeout = check_timeout(timeout)?;
        Ok(())
    }

    /// The same of a write.
    ///
    /// # Errors
    /// `InvalidInput` for no time at all.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.shared.lock().write_timeout = check_timeout(timeout)?;
        Ok(())
    }

    /// Ends a direction. `Write`: no more is written, and the peer reads an end
    /// after what was. `Read` does nothing: the peer is not told, and what it
    /// sends can still be read. `Both` is both; to close is to drop, or
    /// [`close`](Self::close).
    ///
    /// # Errors
    /// That of a broken connection.
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

    /// Ends the stream, waits until all that was written has arrived at the
    /// peer's device, and disconnects. It has not been read there then. (A peer that
    /// has closed its side as well, and is gone, is not waited for.)
    ///
    /// # Errors
    /// `TimedOut`, or that of a broken connection: it may not all have arrived.
    pub fn close(self, timeout: Duration) -> io::Result<()> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.shared.lock();
        state.engine.finish();
        while state.watched {
            drop(state);
            // Another handle waits: it drives the stream, and we with it.
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
        self.shared.turn.notify_all();
        outcome
    }
}

fn check_timeout(timeout: Option<Duration>) -> io::Result<Option<Duration>> {
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        let text = "a timeout of no time";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    Ok(timeout)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Between two statements of the engine it is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for<R>(
        &self,
        timeout: impl FnOnce(&State) -> Option<Duration>,
        attempt: impl FnMut(&mut Engine) -> io::Result<Option<R>>,
    ) -> io::Result<R> {
        let timeout = timeout(&self.lock());
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.wait_until(deadline, attempt)
    }

    /// Tries until there is a result. One thread waits for events, and the
    /// others for it: an event that one has read would not wake another.
    fn wait_until<R>(
        &self,
        deadline: Option<Instant>,
        mut attempt: impl FnMut(&mut Engine) -> io::Result<Option<R>>,
    ) -> io::Result<R> {
        let mut state = self.lock();
        loop {
            if state.engine.progress() {
                self.turn.notify_all();
            }
            if let Some(result) = attempt(&mut state.engine)? {
                return Ok(result);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| deadline <= now) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            if state.watched {
                state = match deadline {
                    None => self
                        .turn
                        .wait(state)
                        .unwrap_or_else(PoisonError::into_inner),
                    Some(deadline) => {
                        self.turn
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
            state.watched = true;
            let fds = state.engine.fds().map(|fd| {
                // SAFETY: they stay open without the lock too: the engine lives
                // as long as `self`, which is borrowed.
                unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
            });
            drop(state);
            let ready = wait::readable(fds, deadline);
            state = self.lock();
            state.watched = false;
            if let Ok([_, true]) = ready {
                state.engine.look_at_connection();
            }
            self.turn.notify_all();
            ready?;
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

    /// Does nothing: what was written is on its way.
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
