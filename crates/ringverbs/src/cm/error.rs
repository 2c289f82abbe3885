//! Errors of the connection manager.

use std::fmt;

use rdmacm::{Event, EventKind, Reason};

use crate::Device;

/// The reason why a connection was not established.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The connection manager refused a command.
    Manager(rdmacm::Error),
    /// A verb failed.
    Verbs(crate::Error),
    /// The connection manager or the peer reports a failure.
    Failed {
        /// The event that reported it.
        kind: EventKind,
        /// The reason.
        reason: Option<Reason>,
        /// Private data of the peer's rejection, padded with zeros.
        private_data: Vec<u8>,
        /// The embedded device whose network has no listener at the address.
        device: Option<String>,
    },
    /// The awaited event did not occur in time.
    Timeout {
        /// The awaited event.
        awaited: EventKind,
    },
    /// The address resolves to no RDMA device that is visible to this process.
    NoDevice,
    /// The queue pair is on another device than the one that the address resolves to.
    WrongDevice,
    /// A datagram queue pair was used for a connection, or vice versa.
    WrongTransport,
}

impl Error {
    /// Builds the error of an unexpected event.
    pub(super) fn of(event: &Event) -> Self {
        let message = event.message();
        let private_data = match event.kind() {
            EventKind::REJECTED | EventKind::UNREACHABLE => message.private_data().to_vec(),
            _ => Vec::new(),
        };
        Self::Failed {
            kind: event.kind(),
            reason: message.result().err(),
            private_data,
            device: None,
        }
    }

    /// Adds the name of the queried embedded device if its network has no listener at
    /// the address.
    pub(super) fn with_device(mut self, queried: &Device) -> Self {
        if let Self::Failed { reason, device, .. } = &mut self {
            if reason.is_some_and(|reason| reason.is_no_listener()) {
                *device = Some(queried.name().to_owned());
            }
        }
        self
    }

    /// Returns whether the peer's program rejected the request, or nothing listens at the
    /// address.
    pub fn is_rejected(&self) -> bool {
        matches!(
            self,
            Self::Failed {
                reason: Some(Reason::Rejected(_) | Reason::Sidr(_)),
                ..
            }
        )
    }
}

impl From<rdmacm::Error> for Error {
    fn from(error: rdmacm::Error) -> Self {
        Self::Manager(error)
    }
}

impl From<crate::Error> for Error {
    fn from(error: crate::Error) -> Self {
        Self::Verbs(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Manager(error) => {
                error.fmt(f)?;
                let is_missing = error.errno().raw() == libc::ENOENT;
                if crate::error::EMBEDDED && is_missing && error.command() == rdmacm::Command::Open
                {
                    f.write_str(
                        "; or name a device without the kernel: RINGVERBS_DEVICE=embedded:, or \
                         roce:INTERFACE",
                    )?;
                }
                Ok(())
            }
            Self::Verbs(error) => error.fmt(f),
            Self::Failed {
                kind,
                reason,
                device,
                ..
            } => {
                write!(f, "connection manager: {kind:?}")?;
                if let Some(reason) = reason {
                    write!(f, ": {reason}")?;
                }
                match device.as_deref() {
                    None => Ok(()),
                    Some("embedded") => f.write_str(
                        "; the device `embedded` reaches this process only, `embedded:DIRECTORY` \
                         all processes that use the same directory",
                    ),
                    Some(device) => write!(f, "; does the listener use {device}, too?"),
                }
            }
            Self::Timeout { awaited } => {
                write!(f, "connection manager: no {awaited:?} before the timeout")?;
                match *awaited {
                    EventKind::CONNECT_RESPONSE => {
                        f.write_str("; does the listener's program accept connections?")
                    }
                    _ => Ok(()),
                }
            }
            Self::NoDevice => f.write_str(
                "the address resolves to no RDMA device of this process; see `ip route` and the \
                 devices' GIDs",
            ),
            Self::WrongDevice => f.write_str(
                "the queue pair is on another device than the one that the address resolves to; \
                 create it in a context of device()",
            ),
            Self::WrongTransport => f.write_str(
                "connections need Transport::Reliable, datagram services Transport::Datagram",
            ),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // Its text is part of this one's.
            Self::Manager(error) => error.source(),
            Self::Verbs(error) => error.source(),
            _ => None,
        }
    }
}
