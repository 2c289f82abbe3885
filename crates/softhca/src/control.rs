//! Control socket for fault injection and counters: each line is a command,
//! answered with a JSON document.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use serde_json::{Value, json};

use crate::fault::{Action, Fault, Faults, MAX_FAULTS, QpName, Subject};
use crate::hca::Hca;
use crate::platform::Platform;

/// Limit of a line in bytes.
const MAX_LINE: usize = 4096;

/// Help text: all commands.
pub const HELP: &str = "\
FAULT   add a fault of docs/faults.md: `lose opcode=send nth=3`, `link-down 1s`. With
        device=1 it is that of the second HCA, without it that of each
end     end the faults: what they hold back passes, and a link that they hold down comes up
stat    counters, objects, queue pairs, faults and how often they have happened, complaints";

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

fn execute<P: Platform>(line: &str, hcas: &mut [&mut Hca<P>]) -> Result<Value, String> {
    match line {
        "" | "help" => return Ok(json!({ "orders": HELP.lines().collect::<Vec<_>>() })),
        "stat" => return Ok(Value::Array(hcas.iter_mut().map(|hca| stat(hca)).collect())),
        "end" => hcas.iter_mut().for_each(|hca| hca.end_faults()),
        _ => add_faults(line, hcas)?,
    }
    Ok(json!({ "ok": line }))
}

/// Adds a fault to the HCAs that it names.
fn add_faults<P: Platform>(line: &str, hcas: &mut [&mut Hca<P>]) -> Result<(), String> {
    let faults = Faults::parse(line).map_err(|error| error.reason.to_string())?;
    let [
        Fault {
            action, matcher, ..
        },
    ] = faults.list()
    else {
        return Err("expected a fault, `end` or `stat`".to_owned());
    };
    match action {
        Action::FailVerb { .. } | Action::Memlock(_) => {
            return Err("verbs of programs fail on embedded devices only".to_owned());
        }
        Action::DeviceFatal => return Err("use `health 1 fatal`".to_owned()),
        _ => {}
    }
    if matcher.program.is_some() {
        return Err("a guest's programs are not known".to_owned());
    }
    if let Some(index) = matcher.device.filter(|index| *index >= hcas.len()) {
        return Err(format!("there is no HCA {index}"));
    }
    let is_meant = |index| matcher.device.is_none_or(|device| device == index);
    let is_now = action.subject() == Subject::Once && matcher.after.is_none();
    if let Some(QpName::Number(number)) = matcher.qp.filter(|_| is_now) {
        let mut meant = hcas
            .iter()
            .enumerate()
            .filter(|(index, _)| is_meant(*index));
        if !meant.any(|(_, hca)| hca.send_cq_of(number).is_some()) {
            return Err(format!("there is no queue pair {number:#x}"));
        }
    }
    for (index, hca) in hcas.iter_mut().enumerate() {
        if !is_meant(index) {
            continue;
        }
        if hca.injector().is_some_and(|it| it.is_full()) {
            return Err(format!("HCA {index} has {MAX_FAULTS} faults: `end` them"));
        }
        hca.add_faults(&faults);
    }
    Ok(())
}

fn stat<P: Platform>(hca: &mut Hca<P>) -> Value {
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
    // By the name of the action.
    let mut injected = serde_json::Map::new();
    for (fault, count) in hca.injector().iter().flat_map(|it| it.counts()) {
        let text = fault.to_string();
        let name = text.split(' ').next().unwrap_or_default();
        let former = injected.get(name).and_then(Value::as_u64).unwrap_or(0);
        injected.insert(name.to_owned(), json!(former + count));
    }
    json!({
        "profile": hca.settings().profile.name,
        "counters": counters,
        "transport": format!("{:?}", hca.transport_counters()),
        "port": format!("{:?}", hca.port().counters()),
        "objects": objects,
        "queue_pairs": queue_pairs,
        "injected": injected,
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
    use crate::command::opcode as op;
    use crate::testing::driver::{Driver, Input};

    #[test]
    fn orders_are_faults_of_the_hcas_that_they_name() {
        let [mut one, mut two] = [(); 2].map(|()| Driver::new("ib"));
        let mut tell = |line: &str| execute(line, &mut [&mut one.hca, &mut two.hca]);
        for refused in [
            "lose colour=red",
            "lose device=2",
            "lose program=rping",
            "qp-error qp=0x7",
            "fail ibv_create_qp ENOMEM",
            "memlock 1KiB",
            "device-fatal",
            "# a comment",
            "link down",
            "wire loss=1",
        ] {
            assert!(tell(refused).is_err(), "{refused}");
        }
        tell("lose chance=0.5").unwrap();
        tell("fail ALLOC_PD nth=1 device=1").unwrap();
        tell("health 0x10 device=1").unwrap();
        let alloc = Input::new(op::ALLOC_PD, 16);
        assert_eq!(one.command(&alloc, 16).0, 0);
        assert_eq!(two.command(&alloc, 16).0, 1);
        assert_eq!(two.command(&alloc, 16).0, 0);
        two.run();
        let mut tell = |line: &str| execute(line, &mut [&mut one.hca, &mut two.hca]).unwrap();
        let stat = tell("stat");
        assert_eq!(stat[0]["injected"], json!({ "lose": 0 }));
        let both = json!({ "lose": 0, "fail": 1, "health": 1 });
        assert_eq!(stat[1]["injected"], both);
        tell("end");
        assert_eq!(tell("stat")[1]["injected"], json!({}));
        for _ in 0..MAX_FAULTS {
            tell("lose");
        }
        let full = execute("lose", &mut [&mut one.hca, &mut two.hca]);
        assert!(full.unwrap_err().contains("`end` them"));
    }
}
