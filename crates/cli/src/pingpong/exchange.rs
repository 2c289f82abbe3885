//! The TCP exchange, in which each side learns the addresses of the other's queue
//! pairs.
//!
//! The C tools read each message with one read(2) and treat a short read as an error, so
//! each message is written with one write(2).

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::destination::{DONE, Destination, MESSAGE_LEN, MessageError};
use crate::side::{self, SideError, is_timeout};

/// Time in which the other side must respond.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The reason why the exchange failed.
#[derive(Debug)]
pub enum ExchangeError {
    /// The sides are not connected.
    Side(SideError),
    /// The connection failed or timed out.
    Io {
        /// The step that failed.
        step: &'static str,
        /// The reason.
        source: io::Error,
    },
    /// The other side sent a malformed message.
    Malformed {
        /// The message's number, from 0.
        message: usize,
        /// The reason.
        source: MessageError,
    },
    /// The other side did not confirm.
    NotConfirmed,
}

impl fmt::Display for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Side(error) => error.fmt(f),
            Self::Io { step, source } if is_timeout(source) => {
                write!(f, "{step}: no response in {} seconds", TIMEOUT.as_secs())
            }
            Self::Io { step, source } if source.kind() == io::ErrorKind::UnexpectedEof => write!(
                f,
                "{step}: the other side has closed the connection; see its messages"
            ),
            Self::Io { step, source } => {
                write!(f, "{step}: {source}; see the messages of the other side")
            }
            Self::Malformed { message, source } => write!(
                f,
                "message {message} of the other side is malformed: {source}; \
                 is it a ping-pong of the same --type?"
            ),
            Self::NotConfirmed => {
                f.write_str("the other side did not confirm; is it a ping-pong of the same --type?")
            }
        }
    }
}

impl std::error::Error for ExchangeError {}

impl From<SideError> for ExchangeError {
    fn from(error: SideError) -> Self {
        Self::Side(error)
    }
}

fn failed(step: &'static str) -> impl FnOnce(io::Error) -> ExchangeError {
    move |source| ExchangeError::Io { step, source }
}

/// Runs the client's part, from connecting to confirming. Both sides have the
/// same number of queue pairs.
pub fn client(
    host: &str,
    port: u16,
    ours: &[Destination],
) -> Result<Vec<Destination>, ExchangeError> {
    let mut stream = side::connect(host, port)?;
    set_options(&stream)?;
    send(&mut stream, ours)?;
    let theirs = receive(&mut stream, ours.len())?;
    stream.write_all(DONE).map_err(failed("confirming"))?;
    Ok(theirs)
}

/// A server that listens for its client.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
}

impl Server {
    /// Listens, as [`side::listen`] does.
    pub fn listen(port: u16) -> Result<Self, ExchangeError> {
        let listener = side::listen(port)?;
        Ok(Self { listener })
    }

    /// Serves one client: receives its addresses, connects to them with
    /// `connect`, and only then sends the local addresses, because the client
    /// starts to send when it has them.
    pub fn serve<E: From<ExchangeError>>(
        self,
        ours: &[Destination],
        connect: impl FnOnce(&[Destination]) -> Result<(), E>,
    ) -> Result<Vec<Destination>, E> {
        let mut stream = side::accept(&self.listener).map_err(ExchangeError::from)?;
        set_options(&stream)?;
        let theirs = receive(&mut stream, ours.len())?;
        connect(&theirs)?;
        send(&mut stream, ours)?;
        let mut done = [0; DONE.len()];
        stream
            .read_exact(&mut done)
            .map_err(failed("waiting for the client to confirm"))?;
        match &done == DONE {
            true => Ok(theirs),
            false => Err(ExchangeError::NotConfirmed.into()),
        }
    }
}

fn set_options(stream: &TcpStream) -> Result<(), ExchangeError> {
    side::set_options(stream, TIMEOUT).map_err(failed("setting up the connection"))
}

fn send(stream: &mut TcpStream, ours: &[Destination]) -> Result<(), ExchangeError> {
    let messages: Vec<u8> = ours.iter().flat_map(Destination::encode).collect();
    stream
        .write_all(&messages)
        .map_err(failed("sending the local addresses"))
}

fn receive(stream: &mut TcpStream, count: usize) -> Result<Vec<Destination>, ExchangeError> {
    (0..count)
        .map(|message| {
            let mut bytes = [0; MESSAGE_LEN];
            stream
                .read_exact(&mut bytes)
                .map_err(failed("waiting for the other side's addresses"))?;
            Destination::decode(&bytes)
                .map_err(|source| ExchangeError::Malformed { message, source })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn destinations(base: u32, count: u32) -> Vec<Destination> {
        let destination = |qpn| Destination {
            qpn: base + qpn,
            psn: 7,
            ..Destination::default()
        };
        (0..count).map(destination).collect()
    }

    fn server() -> (Server, u16) {
        let server = Server::listen(0).unwrap();
        let port = server.listener.local_addr().unwrap().port();
        (server, port)
    }

    #[test]
    fn both_sides_receive_the_other_sides_addresses() {
        for count in [1, 256] {
            let (server, port) = server();
            let ours = destinations(100, count);
            let serving = thread::spawn(move || {
                let mut connected = Vec::new();
                let theirs = server.serve(&destinations(9000, count), |theirs| {
                    connected = theirs.to_vec();
                    Ok::<_, ExchangeError>(())
                });
                (theirs.unwrap(), connected)
            });
            assert_eq!(
                client("localhost", port, &ours).unwrap(),
                destinations(9000, count)
            );
            assert_eq!(serving.join().unwrap(), (ours.clone(), ours));
        }
    }

    /// Returns the error of a server whose client sends `bytes` and closes.
    fn serve_bytes(bytes: &'static [u8]) -> ExchangeError {
        let (server, port) = server();
        let sending = thread::spawn(move || {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            // The server may have closed the connection at any time.
            let _ = stream.write_all(bytes);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read(&mut [0; MESSAGE_LEN]);
        });
        let error = server.serve(&destinations(1, 1), |_| Ok::<_, ExchangeError>(()));
        sending.join().unwrap();
        error.unwrap_err()
    }

    #[test]
    fn server_refuses_other_protocols() {
        for cut in [&b""[..], b"GET /"] {
            let error = serve_bytes(cut).to_string();
            assert!(error.contains("has closed the connection"), "{error}");
        }
        let http = b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: everything\r\n\r\n";
        let error = serve_bytes(http);
        assert!(
            matches!(error, ExchangeError::Malformed { message: 0, .. }),
            "{error:?}"
        );
        assert!(error.to_string().contains("--type"));
        let unconfirmed = b"0000:000011:000007:00000000000000000000000000000000\0none\0";
        assert!(matches!(
            serve_bytes(unconfirmed),
            ExchangeError::NotConfirmed
        ));
    }

    #[test]
    fn refused_connection_names_the_address() {
        let (server, port) = server();
        drop(server);
        let error = client("127.0.0.1", port, &destinations(1, 1)).unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&format!("127.0.0.1 port {port}")),
            "{error}"
        );
    }

    #[test]
    fn port_in_use_is_named() {
        let (_server, port) = server();
        let error = Server::listen(port).unwrap_err();
        assert!(error.to_string().contains(&port.to_string()), "{error}");
    }
}
