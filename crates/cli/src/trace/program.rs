//! Lists the calls of a program while it runs: its processes connect to a socket, and send their
//! records.

use std::ffi::OsString;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::sys::signal::{SigSet, SigmaskHow};
use replay::Event;

use super::calls::{self, Selection};
use crate::error::Error;
use crate::out;
use crate::run::{self, Options};
use crate::temporary::TemporaryFolder;

/// How long processes that outlive the program are listened to.
const LISTENING: Duration = Duration::from_millis(200);

/// Prints lines of all processes.
struct List {
    selection: Selection,
    state: Mutex<State>,
    /// The program has ended.
    has_ended: AtomicBool,
}

#[derive(Default)]
struct State {
    /// When the first process began.
    start: Option<u64>,
    /// The output is closed: what follows is read, so that the program does not wait.
    is_closed: bool,
}

impl List {
    fn print(&self, line: &str) {
        let Ok(event) = Event::parse(line) else {
            return;
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let time = event.time().unwrap_or_default();
        let start = *state.start.get_or_insert(time);
        if state.is_closed || !self.selection.contains(&event) {
            return;
        }
        if let Some(line) = calls::line(&event, start) {
            // At once: the program may write there, too.
            let line = format!("{line}\n");
            state.is_closed = out::stderr().write_all(line.as_bytes()).is_err();
        }
    }

    /// Prints the lines of a process, until its end.
    fn read(&self, stream: UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(LISTENING))?;
        let mut input = BufReader::new(stream);
        let mut line = String::new();
        loop {
            match input.read_line(&mut line) {
                Ok(0) => return Ok(()),
                Ok(_) => {
                    self.print(&line);
                    line.clear();
                }
                // The line keeps the bytes that were read.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if self.has_ended.load(Ordering::Relaxed) {
                        return Ok(());
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Accepts processes, until the program has ended.
fn accept(listener: &UnixListener, list: &Arc<List>) {
    let mut readers: Vec<JoinHandle<()>> = Vec::new();
    while let Ok((stream, _)) = listener.accept() {
        let list = Arc::clone(list);
        if list.has_ended.load(Ordering::Relaxed) && listener.set_nonblocking(true).is_err() {
            // Processes that have connected are accepted; then this fails.
            break;
        }
        // A process whose record cannot be read goes on.
        readers.push(thread::spawn(move || drop(list.read(stream))));
    }
    readers.into_iter().for_each(|reader| drop(reader.join()));
}

/// Runs a program, and lists its calls on standard error.
pub fn run(
    options: &Options,
    command: &[OsString],
    selection: Selection,
) -> Result<ExitCode, Error> {
    let folder = TemporaryFolder::new("trace").map_err(|(_, error)| error)?;
    // The extension tells a program that outlives this one what has ended.
    let socket = folder.path().join("calls.trace");
    let listener = UnixListener::bind(&socket)?;
    let list = Arc::new(List {
        selection,
        state: Mutex::default(),
        has_ended: AtomicBool::new(false),
    });
    // Signals are for the thread that waits for the program.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let before = before.map_err(io::Error::from)?;
    let acceptor = {
        let list = Arc::clone(&list);
        thread::spawn(move || accept(&listener, &list))
    };
    before.thread_set_mask().map_err(io::Error::from)?;
    let end = run::recorded(options, command, &socket);
    list.has_ended.store(true, Ordering::Relaxed);
    let woken = UnixStream::connect(&socket).is_ok();
    if woken {
        let _ = acceptor.join();
    }
    drop(folder);
    Ok(end?.mirror().into())
}

/// Lists the calls of a record on standard output.
pub fn list(path: &Path, selection: &Selection) -> Result<ExitCode, Error> {
    let refused = |error| super::UnreadableRecord(path.to_owned(), error);
    let file = fs::File::open(path).map_err(|error| refused(replay::RecordError::Read(error)))?;
    let record = replay::Record::read(BufReader::new(file)).map_err(refused)?;
    let start = record.events.first().and_then(Event::time);
    let mut out = out::stdout();
    for event in record.events.iter().filter(|it| selection.contains(it)) {
        if let Some(line) = calls::line(event, start.unwrap_or_default()) {
            writeln!(out, "{line}")?;
        }
    }
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}
