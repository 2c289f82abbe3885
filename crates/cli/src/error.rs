//! Errors of the command.

use std::fmt;
use std::io;

use ringverbs::{Command, KernelError};

/// The reason why a command failed.
#[derive(Debug)]
pub enum Error {
    /// There is no device.
    NoDevice,
    /// There is no device with that name.
    NoSuchDevice {
        /// The name.
        name: String,
        /// The names of the existing devices.
        available: Vec<String>,
    },
    /// The port is not active.
    PortDown {
        /// The device.
        device: String,
        /// The port, from 1.
        port: u8,
    },
    /// The device has no such port.
    NoSuchPort {
        /// The device.
        device: String,
        /// The requested port.
        port: u8,
        /// The number of ports.
        ports: u8,
    },
    /// A verb failed.
    Verb {
        /// The step that failed, such as "opening rxe0".
        step: String,
        /// The error.
        source: ringverbs::Error,
    },
    /// An error that only one subcommand has.
    Subcommand(Box<dyn std::error::Error + Send + Sync>),
    /// Output could not be written.
    Output(io::Error),
}

impl Error {
    /// Returns whether the reader of the output has closed it.
    pub fn is_broken_pipe(&self) -> bool {
        matches!(self, Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe)
    }

    /// Returns advice on how to fix the error, if there is any.
    pub fn advice(&self) -> Option<&'static str> {
        match self {
            Self::NoDevice | Self::PortDown { .. } => Some(
                "run `ringverbs doctor` to find out why; \
                 `--device embedded` is a ConnectX in this process, \
                 `--device embedded:` one that your other processes can reach",
            ),
            Self::Verb {
                source: ringverbs::Error::Kernel(source @ KernelError::Refused { .. }),
                ..
            } if source.command() == Command::Open => {
                Some("run `ringverbs doctor` to find out why")
            }
            _ => None,
        }
    }

    /// Wraps an error that only one subcommand has.
    pub fn subcommand(error: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self::Subcommand(Box::new(error))
    }

    /// For `map_err`: adds the step that failed to the error of a verb.
    pub fn verb(step: impl Into<String>) -> impl FnOnce(ringverbs::Error) -> Self {
        let step = step.into();
        move |source| Self::Verb { step, source }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice => f.write_str("there is no RDMA device"),
            Self::NoSuchDevice { name, available } if available.is_empty() => {
                write!(f, "there is no device {name:?}, nor any other device")
            }
            Self::NoSuchDevice { name, available } => {
                write!(
                    f,
                    "there is no device {name:?}; available: {}",
                    available.join(", ")
                )
            }
            Self::PortDown { device, port } => {
                write!(f, "port {port} of {device} is not active")
            }
            Self::NoSuchPort {
                device,
                port,
                ports,
            } => write!(f, "{device} has no port {port}; its ports are 1 to {ports}"),
            Self::Verb { step, source } => write!(f, "{step}: {source}"),
            Self::Subcommand(error) => error.fmt(f),
            Self::Output(error) => write!(f, "writing output: {error}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Self::Output(error)
    }
}
