//! Control socket for fault injection and counters: each line is a command,
//! answered by a JSON document.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use serde_json::{Value, json};

use crate::command::opcode;
use crate::fabric::Faults;
use crate::hca::Hca;
use crate::platform::Platform;

/// Limit of a line in bytes.
const MAX_LINE: usize = 4096;

/// Help text: all commands.
pub const HELP: &str = "\
stat                            counters, objects, queue pairs, complaints
link up|down                    the cable
command OPCODE [COUNT]          the next commands of a name or number fail
lose-event TYPE [COUNT]         the next events of a type are lost
lose-completion [COUNT]         the next completions are lost
return-receive [COUNT]          the next receives that connections take from shared
                                queues come back: their memory is not there
qp-error QPN                    a queue pair fails
cq-error CQN                    a completion queue fails
health SYNDROME [fatal]         the health syndrome; 0 is healthy. After a fatal
                                one nothing works until the driver resets the HCA
wire [NAME=VALUE ...]           what happens to frames that the port sends:
                                loss, duplicate, reorder, corrupt (0 to 1),
                                delay, jitter, reorder-delay (nanoseconds);
                                what is not named does not happen
A line may begin with the number of the HCA, from 0 on, as `1 link down`.";

/// The control socket and its clients.
pub struct Control {
    listener: UnixListener,
    clients: Vec<(UnixStream, Vec<u8>)>,
}

impl Control {
    /// Listens at `path`.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn new(path: &Path) -> io::Result<Control> {
        let listener = UnixListener::bind(path)?;
        listener.set_nonblocking(true)?;
        Ok(Control {
            listener,
            clients: Vec::new(),
        })
    }

    /// The descriptors to poll for readiness.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        std::iter::once(self.listener.as_fd())
            .chain(self.clients.iter().map(|(socket, _)| socket.as_fd()))
    }

    /// Accepts connections and executes the received lines.
    pub fn turn<'a, P: Platform + 'a>(&mut self, hcas: impl Iterator<Item = &'a mut Hca<P>>) {
        while let Ok((socket, _)) = self.listener.accept() {
            if socket.set_nonblocking(true).is_ok() {
                self.clients.push((socket, Vec::new()));
            }
        }
        if self.clients.is_empty() {
            return;
        }
        let mut hcas: Vec<_> = hcas.collect();
        self.clients.retain_mut(|(socket, line)| {
            let mut bytes = [0; 512];
            loop {
                match socket.read(&mut bytes) {
                    Ok(0) => return false,
                    Ok(n) => line.extend_from_slice(&bytes[..n]),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => return false,
                }
                if line.len() > MAX_LINE {
                    return false;
                }
            }
            while let Some(end) = line.iter().position(|byte| *byte == b'\n') {
                let order: Vec<u8> = line.drain(..=end).collect();
                let order = String::from_utf8_lossy(&order);
                let answer = match execute(order.trim(), &mut hcas) {
                    Ok(answer) => answer,
                    Err(why) => json!({ "error": why }),
                };
                let mut text = String::new();
                let _ = writeln!(text, "{answer}");
                if socket.write_all(text.as_bytes()).is_err() {
                    return false;
                }
            }
            true
        });
    }
}

fn number(text: Option<&str>, default: Option<u32>) -> Result<u32, String> {
    let Some(text) = text else {
        return default.ok_or_else(|| "a number is missing".to_owned());
    };
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("`{text}` is not a number"))
}

fn execute<P: Platform>(line: &str, hcas: &mut [&mut Hca<P>]) -> Result<Value, String> {
    let mut words = line.split_whitespace().peekable();
    let chosen = match words.peek().and_then(|word| word.parse::<usize>().ok()) {
        Some(chosen) => {
            words.next();
            chosen
        }
        None => 0,
    };
    let order = words.next().unwrap_or("help");
    if order == "help" {
        return Ok(json!({ "orders": HELP.lines().collect::<Vec<_>>() }));
    }
    if order == "stat" {
        return Ok(Value::Array(hcas.iter().map(|hca| stat(hca)).collect()));
    }
    let hca = hcas
        .get_mut(chosen)
        .ok_or_else(|| format!("there is no HCA {chosen}"))?;
    match order {
        "link" => match words.next() {
            Some("up") => hca.set_cable(true),
            Some("down") => hca.set_cable(false),
            _ => return Err("link up, or link down".to_owned()),
        },
        "command" => {
            let name = words.next().unwrap_or_default();
            let opcode = match opcode::named(name) {
                Some(opcode) => opcode,
                None => number(Some(name), None)? as u16,
            };
            let count = number(words.next(), Some(1))?;
            hca.faults().fail_commands(opcode, count);
        }
        "lose-event" => {
            let kind = number(words.next(), None)? as u8;
            let count = number(words.next(), Some(1))?;
            hca.faults().lose_events(kind, count);
        }
        "lose-completion" => {
            let count = number(words.next(), Some(1))?;
            hca.faults().lose_completions(count);
        }
        "return-receive" => {
            let count = number(words.next(), Some(1))?;
            hca.faults().return_receives(count);
        }
        "qp-error" => {
            let qpn = number(words.next(), None)?;
            if !hca.fail_queue_pair(qpn) {
                return Err(format!("there is no queue pair {qpn}"));
            }
        }
        "cq-error" => {
            let cqn = match words.next() {
                Some("of") => {
                    let qpn = number(words.next(), None)?;
                    let cqn = hca.completion_queue_of(qpn);
                    cqn.ok_or_else(|| format!("there is no queue pair {qpn}"))?
                }
                word => number(word, None)?,
            };
            if !hca.fail_completion_queue(cqn) {
                return Err(format!("there is no completion queue {cqn}"));
            }
        }
        "wire" => hca.port().set_faults(wire(words)?),
        "health" => {
            let syndrome = u8::try_from(number(words.next(), None)?);
            let syndrome = syndrome.map_err(|_| "a syndrome has 8 bits")?;
            match words.next() {
                None => hca.set_health(syndrome, false),
                Some("fatal") => hca.set_health(syndrome, true),
                Some(other) => return Err(format!("fatal, or nothing, not `{other}`")),
            }
        }
        other => return Err(format!("no such order: {other}")),
    }
    Ok(json!({ "ok": line }))
}

/// Parses the faults of a wire from `NAME=VALUE` words.
fn wire<'a>(words: impl Iterator<Item = &'a str>) -> Result<Faults, String> {
    let mut faults = Faults::default();
    for word in words {
        let wrong = || format!("`{word}` is not NAME=VALUE of a wire");
        let (name, value) = word.split_once('=').ok_or_else(wrong)?;
        let probability = || match value.parse::<f64>() {
            Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
            _ => Err(wrong()),
        };
        let time = || value.parse::<u64>().map_err(|_| wrong());
        match name {
            "loss" => faults.loss = probability()?,
            "duplicate" => faults.duplicate = probability()?,
            "reorder" => faults.reorder = probability()?,
            "corrupt" => faults.corrupt = probability()?,
            "delay" => faults.delay = time()?,
            "jitter" => faults.jitter = time()?,
            "reorder-delay" => faults.reorder_delay = time()?,
            _ => return Err(wrong()),
        }
    }
    Ok(faults)
}

fn stat<P: Platform>(hca: &Hca<P>) -> Value {
    let counters: serde_json::Map<_, _> = hca
        .stats()
        .named()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), json!(value)))
        .collect();
    let objects: serde_json::Map<_, _> = hca
        .objects()
        .into_iter()
        .map(|(name, value)| (name.to_owned(), json!(value)))
        .collect();
    let queue_pairs: Vec<_> = hca
        .queue_pairs()
        .into_iter()
        .map(|(qpn, service, view)| {
            json!({
                "qpn": qpn,
                "service": format!("{service:?}"),
                "state": format!("{:?}", view.state),
                "send_psn": view.send_psn,
                "recv_psn": view.recv_psn,
                "outstanding": view.outstanding,
            })
        })
        .collect();
    json!({
        "profile": hca.settings().profile.name,
        "counters": counters,
        "transport": format!("{:?}", hca.transport_counters()),
        "port": format!("{:?}", hca.port().counters()),
        "objects": objects,
        "queue_pairs": queue_pairs,
        "complaints": hca.complaints(),
    })
}

/// Sends a line to the control socket of a running server and returns the answer.
///
/// # Errors
/// Nothing listens there, or no answer arrives.
pub fn request(path: &Path, line: &str) -> io::Result<String> {
    use std::io::BufRead;
    let mut socket = UnixStream::connect(path)?;
    writeln!(socket, "{line}")?;
    let mut answer = String::new();
    io::BufReader::new(socket).read_line(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wire_is_described_by_names_and_values() {
        let faults = wire("loss=0.01 delay=5000".split(' ')).unwrap();
        assert_eq!((faults.loss, faults.delay), (0.01, 5000));
        assert_eq!(wire("".split_whitespace()), Ok(Faults::default()));
        for wrong in ["loss", "loss=2", "loss=x", "delay=-1", "colour=red"] {
            assert!(wire([wrong].into_iter()).is_err(), "{wrong}");
        }
    }
}
