//! The event loop that serves HCAs to guests.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::dma::Guest;
use super::server::{Connection, DisconnectReason};
use crate::control::Control;
use crate::hca::Hca;
use crate::platform::Clock;

/// Limit of messages handled for one guest before its HCA runs.
const MESSAGES: usize = 64;

/// An HCA, its listening socket, and the connection of its guest.
struct Slot {
    hca: Hca<Guest>,
    listener: UnixListener,
    connection: Option<Connection>,
    served: bool,
}

/// A set of HCAs, and their control socket.
pub struct Serve {
    slots: Vec<Slot>,
    control: Option<Control>,
    keep: bool,
}

impl Serve {
    /// Creates a server without HCAs. With `keep`, it continues after all guests
    /// have disconnected.
    pub fn new(control: Option<Control>, keep: bool) -> Serve {
        Serve {
            slots: Vec::new(),
            control,
            keep,
        }
    }

    /// Adds an HCA that listens at `path`.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn add(&mut self, hca: Hca<Guest>, path: &Path) -> io::Result<()> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        self.slots.push(Slot {
            hca,
            listener,
            connection: None,
            served: false,
        });
        Ok(())
    }

    /// Serves until every guest has disconnected, and every HCA has had one.
    ///
    /// # Errors
    /// `ppoll` failed.
    pub fn run(&mut self) -> io::Result<()> {
        loop {
            let mut busy = false;
            for slot in &mut self.slots {
                busy |= slot.turn();
            }
            if let Some(control) = &mut self.control {
                control.turn(self.slots.iter_mut().map(|slot| &mut slot.hca));
            }
            let gone = |slot: &Slot| slot.served && slot.connection.is_none();
            if !self.keep && !self.slots.is_empty() && self.slots.iter().all(gone) {
                return Ok(());
            }
            if !busy {
                self.wait()?;
            }
        }
    }

    /// Waits for socket events, or for the earliest deadline of an HCA.
    fn wait(&self) -> io::Result<()> {
        let mut fds = Vec::with_capacity(self.slots.len() + 4);
        for slot in &self.slots {
            let fd = match &slot.connection {
                Some(connection) => connection.socket().as_fd(),
                None => slot.listener.as_fd(),
            };
            fds.push(PollFd::new(fd, PollFlags::POLLIN));
        }
        if let Some(control) = &self.control {
            for fd in control.fds() {
                fds.push(PollFd::new(fd, PollFlags::POLLIN));
            }
        }
        let left = self
            .slots
            .iter()
            .filter_map(|slot| {
                let at = slot.hca.deadline()?;
                Some(at.saturating_sub(slot.hca.platform().now()))
            })
            .min();
        let timeout = left.map(|left| {
            TimeSpec::new((left / 1_000_000_000) as i64, (left % 1_000_000_000) as i64)
        });
        match ppoll(&mut fds, timeout, None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Slot {
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
        let drained = match connection.serve(&mut self.hca, MESSAGES) {
            Ok(drained) => drained,
            Err(ended) => {
                match ended {
                    DisconnectReason::Closed => tracing::info!("the guest has gone"),
                    DisconnectReason::Socket(error) => {
                        tracing::error!("the guest's socket: {error}")
                    }
                    DisconnectReason::Malformed(what) => tracing::error!("the guest sent {what}"),
                }
                self.connection = None;
                self.hca.reset();
                self.hca.platform_mut().unmap_all();
                return true;
            }
        };
        let more = self.hca.run();
        more || !drained
    }

    fn connect(&mut self, socket: UnixStream) {
        match Connection::new(socket, &self.hca) {
            Ok(connection) => {
                tracing::info!("a guest has come");
                self.connection = Some(connection);
                self.served = true;
            }
            Err(error) => tracing::error!("the guest's socket: {error}"),
        }
    }
}
