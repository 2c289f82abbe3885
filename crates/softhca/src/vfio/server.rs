//! The event loop that serves HCAs to guests.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::connection::{Connection, DisconnectReason};
use super::dma::Guest;
use crate::control::Control;
use crate::hca::Hca;
use crate::platform::Clock;

/// Limit of messages handled for one guest before its HCA runs.
const MAX_MESSAGES_PER_TURN: usize = 64;

/// Nanoseconds between two flushes of receives that are posted to queues in the error state,
/// for which drivers wait when they drain a queue pair.
const FLUSH_INTERVAL: u64 = 2_000_000;

/// An HCA, its listening socket, and the connection of its guest.
struct Device {
    hca: Hca<Guest>,
    listener: UnixListener,
    connection: Option<Connection>,
    was_connected: bool,
    /// When to flush receives that were posted to queues in the error state. `None` if nothing
    /// has happened since no queue was in that state.
    next_flush: Option<u64>,
}

/// A set of HCAs, and their control socket.
pub struct Server {
    devices: Vec<Device>,
    control: Option<Control>,
    keep_running: bool,
}

impl Server {
    /// Creates a server without HCAs. With `keep_running`, it does not stop when all guests
    /// have disconnected.
    pub fn new(control: Option<Control>, keep_running: bool) -> Server {
        Server {
            devices: Vec::new(),
            control,
            keep_running,
        }
    }

    /// Adds an HCA that listens at `path`.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn add(&mut self, hca: Hca<Guest>, path: &Path) -> io::Result<()> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        self.devices.push(Device {
            hca,
            listener,
            connection: None,
            was_connected: false,
            next_flush: None,
        });
        Ok(())
    }

    /// Serves guests until every HCA has had one and all have disconnected.
    ///
    /// # Errors
    /// `ppoll` failed.
    pub fn run(&mut self) -> io::Result<()> {
        loop {
            let mut busy = false;
            for device in &mut self.devices {
                busy |= device.turn();
            }
            if let Some(control) = &mut self.control {
                control.turn(self.devices.iter_mut().map(|device| &mut device.hca));
            }
            let finished = |device: &Device| device.was_connected && device.connection.is_none();
            if !self.keep_running && !self.devices.is_empty() && self.devices.iter().all(finished) {
                return Ok(());
            }
            if !busy {
                self.wait()?;
            }
        }
    }

    /// Waits for socket events, or for the earliest deadline of an HCA.
    fn wait(&self) -> io::Result<()> {
        let mut fds = Vec::with_capacity(self.devices.len() + 4);
        for device in &self.devices {
            let fd = match &device.connection {
                Some(connection) => connection.socket().as_fd(),
                None => device.listener.as_fd(),
            };
            fds.push(PollFd::new(fd, PollFlags::POLLIN));
        }
        if let Some(control) = &self.control {
            for fd in control.fds() {
                fds.push(PollFd::new(fd, PollFlags::POLLIN));
            }
        }
        let remaining = self
            .devices
            .iter()
            .filter_map(|device| {
                let both = [device.hca.deadline(), device.next_flush];
                let at = both.into_iter().flatten().min()?;
                Some(at.saturating_sub(device.hca.platform().now()))
            })
            .min();
        let timeout = remaining.map(|remaining| {
            TimeSpec::new(
                (remaining / 1_000_000_000) as i64,
                (remaining % 1_000_000_000) as i64,
            )
        });
        match ppoll(&mut fds, timeout, None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Device {
    /// Handles messages and runs the HCA. Returns whether there is more to do.
    fn turn(&mut self) -> bool {
        if self.connection.is_none() {
            match self.listener.accept() {
                Ok((socket, _)) => self.connect(socket),
                Err(_) => return self.hca.run(),
            }
        }
        let Some(connection) = &mut self.connection else {
            return false;
        };
        let drained = match connection.serve(&mut self.hca, MAX_MESSAGES_PER_TURN) {
            Ok(drained) => drained,
            Err(reason) => {
                match reason {
                    DisconnectReason::Closed => tracing::info!("the guest disconnected"),
                    DisconnectReason::Socket(error) => {
                        tracing::error!("socket of the guest: {error}")
                    }
                    DisconnectReason::Malformed(why) => tracing::error!("the guest sent {why}"),
                }
                self.connection = None;
                self.hca.reset();
                self.hca.platform_mut().unmap_all();
                return true;
            }
        };
        let hca_busy = self.hca.run();
        let flushing = self.flush_posted_receives();
        hca_busy || flushing || !drained
    }

    /// Flushes posted receives if that is due, and plans the next time. Returns whether the HCA
    /// may have to run.
    fn flush_posted_receives(&mut self) -> bool {
        let now = self.hca.platform().now();
        let next = now + FLUSH_INTERVAL;
        if *self.next_flush.get_or_insert(next) > now {
            return false;
        }
        let in_error = self.hca.flush_posted_receives();
        self.next_flush = in_error.then_some(next);
        in_error
    }

    fn connect(&mut self, socket: UnixStream) {
        match Connection::new(socket, &self.hca) {
            Ok(connection) => {
                tracing::info!("a guest connected");
                self.connection = Some(connection);
                self.was_connected = true;
            }
            Err(error) => tracing::error!("socket of the guest: {error}"),
        }
    }
}
