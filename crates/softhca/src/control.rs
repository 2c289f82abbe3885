//! Control socket for fault injection and counters: each line is a command,
//! answered with a JSON document.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use roce::fabric::Faults as WireFaults;
use serde_json::{Value, json};

use crate::fault::Faults;
use crate::hca::Hca;
use crate::opcode;
use crate::platform::Platform;

/// Limit of a line in bytes.
const MAX_LINE: usize = 4096;

/// Help text: all commands.
pub const HELP: &str = "\
stat                            counters, objects, queue pairs, complaints
link up|down                    plug in or unplug the cable
command OPCODE [COUNT]          fail the next commands with this name or number
lose-event TYPE [COUNT]         lose the next events of a type
lose-completion [COUNT]         lose the next completions
return-receive [COUNT]          complete the next receives that connections take from
                                SRQs as returned
qp-error QPN                    move a queue pair to the error state
cq-error CQN | of QPN           move a completion queue, or the send CQ of a queue
                                pair, to the error state
health SYNDROME [fatal]         set the health syndrome; 0 is healthy. After a fatal
                                one the HCA does not work until the driver resets it
wire [NAME=VALUE ...]           set the faults of the frames that the port sends:
                                loss, duplicate, reorder, corrupt (0 to 1),
                                delay, jitter, reorder-delay (nanoseconds);
                                those that are not named are off
fault FAULT                     add a fault of docs/faults.md: `fault lose nth=3`
fault end                       end these faults
A line may begin with the number of an HCA, from 0 on: `1 link down`.";

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

    /// Accepts connections and executes the commands received.
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
            let mut buffer = [0; 512];
            loop {
                match socket.read(&mut buffer) {
                    Ok(0) => return false,
                    Ok(n) => line.extend_from_slice(&buffer[..n]),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(_) => return false,
                }
                if line.len() > MAX_LINE {
                    return false;
                }
            }
            while let Some(end) = line.iter().position(|byte| *byte == b'\n') {
                let command: Vec<u8> = line.drain(..=end).collect();
                let command = String::from_utf8_lossy(&command);
                let response = match execute(command.trim(), &mut hcas) {
                    Ok(response) => response,
                    Err(message) => json!({ "error": message }),
                };
                let mut text = String::new();
                let _ = writeln!(text, "{response}");
                if socket.write_all(text.as_bytes()).is_err() {
                    return false;
                }
            }
            true
        });
    }
}

fn parse_number(text: Option<&str>, default: Option<u32>) -> Result<u32, String> {
    let Some(text) = text else {
        return default.ok_or_else(|| "missing number".to_owned());
    };
    let parsed = match text.strip_prefix("0x") {
        Some(hex) => u32::from_str_radix(hex, 16),
        None => text.parse(),
    };
    parsed.map_err(|_| format!("`{text}` is not a number"))
}

fn execute<P: Platform>(line: &str, hcas: &mut [&mut Hca<P>]) -> Result<Value, String> {
    let mut words = line.split_whitespace().peekable();
    let index = match words.peek().and_then(|word| word.parse::<usize>().ok()) {
        Some(index) => {
            words.next();
            index
        }
        None => 0,
    };
    let command = words.next().unwrap_or("help");
    if command == "help" {
        return Ok(json!({ "orders": HELP.lines().collect::<Vec<_>>() }));
    }
    if command == "stat" {
        return Ok(Value::Array(hcas.iter().map(|hca| stat(hca)).collect()));
    }
    let hca = hcas
        .get_mut(index)
        .ok_or_else(|| format!("there is no HCA {index}"))?;
    match command {
        "link" => match words.next() {
            Some("up") => hca.set_cable(true),
            Some("down") => hca.set_cable(false),
            _ => return Err("expected `link up` or `link down`".to_owned()),
        },
        "command" => {
            let name = words.next().unwrap_or_default();
            let opcode = match opcode::by_name(name) {
                Some(opcode) => opcode,
                None => parse_number(Some(name), None)? as u16,
            };
            let count = parse_number(words.next(), Some(1))?;
            hca.faults().fail_commands(opcode, count);
        }
        "lose-event" => {
            let kind = parse_number(words.next(), None)? as u8;
            let count = parse_number(words.next(), Some(1))?;
            hca.faults().lose_events(kind, count);
        }
        "lose-completion" => {
            let count = parse_number(words.next(), Some(1))?;
            hca.faults().lose_completions(count);
        }
        "return-receive" => {
            let count = parse_number(words.next(), Some(1))?;
            hca.faults().return_receives(count);
        }
        "qp-error" => {
            let qpn = parse_number(words.next(), None)?;
            if !hca.fail_queue_pair(qpn) {
                return Err(format!("there is no queue pair {qpn}"));
            }
        }
        "cq-error" => {
            let cqn = match words.next() {
                Some("of") => {
                    let qpn = parse_number(words.next(), None)?;
                    let cqn = hca.send_cq_of(qpn);
                    cqn.ok_or_else(|| format!("there is no queue pair {qpn}"))?
                }
                word => parse_number(word, None)?,
            };
            if !hca.fail_completion_queue(cqn) {
                return Err(format!("there is no completion queue {cqn}"));
            }
        }
        "wire" => hca.port().set_faults(parse_faults(words)?),
        "fault" => {
            let text: Vec<&str> = words.collect();
            match text[..] {
                ["end"] => hca.end_faults(),
                _ => {
                    let faults = Faults::parse(&text.join(" "));
                    hca.add_faults(&faults.map_err(|error| error.reason.to_string())?);
                }
            }
        }
        "health" => {
            let syndrome = u8::try_from(parse_number(words.next(), None)?);
            let syndrome = syndrome.map_err(|_| "a syndrome has 8 bits")?;
            match words.next() {
                None => hca.set_health(syndrome, false),
                Some("fatal") => hca.set_health(syndrome, true),
                Some(other) => return Err(format!("expected `fatal` or nothing, not `{other}`")),
            }
        }
        other => return Err(format!("unknown command: {other}")),
    }
    Ok(json!({ "ok": line }))
}

/// Parses the faults of a wire from `NAME=VALUE` words.
fn parse_faults<'a>(words: impl Iterator<Item = &'a str>) -> Result<WireFaults, String> {
    let mut faults = WireFaults::default();
    for word in words {
        let invalid = || format!("`{word}` is not a fault as NAME=VALUE");
        let (name, value) = word.split_once('=').ok_or_else(invalid)?;
        let probability = || match value.parse::<f64>() {
            Ok(value) if (0.0..=1.0).contains(&value) => Ok(value),
            _ => Err(invalid()),
        };
        let time = || value.parse::<u64>().map_err(|_| invalid());
        match name {
            "loss" => faults.loss = probability()?,
            "duplicate" => faults.duplicate = probability()?,
            "reorder" => faults.reorder = probability()?,
            "corrupt" => faults.corrupt = probability()?,
            "delay" => faults.delay = time()?,
            "jitter" => faults.jitter = time()?,
            "reorder-delay" => faults.reorder_delay = time()?,
            _ => return Err(invalid()),
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
        "complaints": hca.complaints().iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

/// Sends a line to the control socket of a running server and returns the response.
///
/// # Errors
/// Nothing listens there, or no response arrives.
pub fn request(path: &Path, line: &str) -> io::Result<String> {
    use std::io::BufRead;
    let mut socket = UnixStream::connect(path)?;
    writeln!(socket, "{line}")?;
    let mut response = String::new();
    io::BufReader::new(socket).read_line(&mut response)?;
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_parsed_from_names_and_values() {
        let faults = parse_faults("loss=0.01 delay=5000".split(' ')).unwrap();
        assert_eq!((faults.loss, faults.delay), (0.01, 5000));
        assert_eq!(
            parse_faults("".split_whitespace()),
            Ok(WireFaults::default())
        );
        for invalid in ["loss", "loss=2", "loss=x", "delay=-1", "colour=red"] {
            assert!(parse_faults([invalid].into_iter()).is_err(), "{invalid}");
        }
    }
}
