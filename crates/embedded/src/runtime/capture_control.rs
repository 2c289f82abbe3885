//! Captures of running processes, which a command starts and stops by a file of their directory
//! ([`control_file`]):
//!
//! ```text
//! start 8125317000000
//! file /tmp/frames.pcapng
//! snap headers
//! ring 4x16MiB
//! ```
//!
//! `stop` takes the place of this for a process alone, if the others go on. Each process answers
//! with the file that it writes, or why it does not.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use uverbs::{Command, Error};

use crate::capture::{CaptureClock, CaptureOptions, Recorder};
use crate::random::random;
use crate::runtime::control::{Controlled, Place, RunningProcesses};
use crate::runtime::network::refused;
use crate::wires::control_file;

/// The name of the files.
const NAME: &str = "capture-control";
/// The text that ends the capture of one process.
const STOP: &str = "stop\n";
/// How long a command waits for answers.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// A capture that a command has asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Order {
    /// Names it in answers.
    id: u64,
    options: CaptureOptions,
}

impl Order {
    /// Parses a text; `None` if it is malformed, or of another version.
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines().map(|line| line.split_once(' '));
        let mut value = |name| {
            let line = lines.next().flatten();
            line.filter(|(known, _)| *known == name).map(|it| it.1)
        };
        let id = value("start")?.parse().ok()?;
        let path = Path::new(value("file")?);
        let snap = value("snap")?.parse().ok()?;
        let options = CaptureOptions::new(path).with_snap(snap);
        let options = match lines.next() {
            None => options,
            Some(line) => {
                let ring = line.and_then(|(name, ring)| (name == "ring").then_some(ring));
                options.with_ring(ring?.parse().ok()?)
            }
        };
        let is_whole = lines.next().is_none() && path.is_absolute();
        is_whole.then_some(Self { id, options })
    }
}

/// What has become of a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CaptureState {
    /// It is written to this file: the first, if there are several.
    Started(PathBuf),
    /// It has not begun, for a reason.
    Refused(String),
    /// It has ended with this file, as it was asked to.
    Stopped(PathBuf),
    /// It has ended with this file, for a reason.
    Failed(PathBuf, String),
}

/// The answer of a process about a capture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaptureAnswer {
    /// Its number.
    pub process: u32,
    /// What has become of the capture.
    pub state: CaptureState,
    /// Number of frames in its files, also in those that are removed.
    pub frames: u64,
}

/// A capture of this process.
struct Active {
    id: u64,
    recorder: Arc<Recorder>,
    /// Its first file.
    path: PathBuf,
    /// The file with which it ended, and the error that ended it.
    ended: Arc<Mutex<Option<(PathBuf, String)>>>,
}

impl Active {
    /// Returns why it has ended, if it has.
    fn failed(&self) -> Option<(PathBuf, String)> {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.clone()
    }
}

#[derive(Default)]
struct Current {
    /// The text that was applied last.
    applied: Option<String>,
    active: Option<Active>,
}

/// The captures of this process that commands have asked for.
pub(crate) struct CaptureControl {
    place: Place,
    current: Mutex<Current>,
}

impl CaptureControl {
    pub(crate) fn new(place: Place) -> Self {
        // Of earlier processes of these numbers.
        control_file::remove_answer(&place.directory, NAME, place.number);
        control_file::remove_own(&place.directory, NAME);
        Self {
            place,
            current: Mutex::default(),
        }
    }

    /// Starts or ends a capture, if the file has changed. Returns whether it has.
    pub(crate) fn read(&self, controlled: &Controlled<'_>) -> bool {
        let text = control_file::read(&self.place.directory, NAME);
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.applied == text {
            return false;
        }
        if let Some(active) = current.active.take() {
            self.end(&active, controlled);
        }
        if let Some(order) = text.as_deref().and_then(Order::parse) {
            current.active = self.start(order, controlled);
        } else if text.as_deref().is_some_and(|text| text != STOP) {
            tracing::debug!("the file of captures cannot be understood");
        }
        current.applied = text;
        true
    }

    fn start(&self, order: Order, controlled: &Controlled<'_>) -> Option<Active> {
        let Order { id, options } = order;
        let names = (0..controlled.devices.len().max(controlled.names.len()))
            .map(|index| controlled.name(index));
        let options = options.with_names(&names.collect::<Vec<_>>());
        if (controlled.recorder)().is_some_and(|it| !it.has_ended()) {
            let reason = "the program has a capture of its own".to_owned();
            self.answer(id, &CaptureState::Refused(reason), 0);
            return None;
        }
        let ended: Arc<Mutex<Option<(PathBuf, String)>>> = Arc::default();
        let on_end = {
            let ended = Arc::clone(&ended);
            move |path: &Path, error: &io::Error| {
                let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
                *ended = Some((path.to_owned(), error.to_string()));
            }
        };
        let path = PathBuf::from(options.to_string());
        match Recorder::create(&options, CaptureClock::Host, Some(Box::new(on_end))) {
            Ok(recorder) => {
                (controlled.record)(Some(Arc::clone(&recorder)));
                self.answer(id, &CaptureState::Started(path.clone()), 0);
                Some(Active {
                    id,
                    recorder,
                    path,
                    ended,
                })
            }
            Err(error) => {
                let reason = format!("{}: {error}", path.display());
                self.answer(id, &CaptureState::Refused(reason), 0);
                None
            }
        }
    }

    fn end(&self, active: &Active, controlled: &Controlled<'_>) {
        let is_it = |it: Arc<Recorder>| Arc::ptr_eq(&it, &active.recorder);
        if (controlled.recorder)().is_some_and(is_it) {
            (controlled.record)(None);
        }
        let last = active.recorder.end();
        let state = match (active.failed(), last) {
            (Some((path, reason)), _) => CaptureState::Failed(path, reason),
            (None, Some(path)) => CaptureState::Stopped(path),
            // The program has begun another one, which has ended this.
            (None, None) => CaptureState::Stopped(active.path.clone()),
        };
        self.answer(active.id, &state, active.recorder.frames());
    }

    fn answer(&self, id: u64, state: &CaptureState, frames: u64) {
        let mut text = format!("id {id}\nprocess {}\nframes {frames}\n", process::id());
        let line = |text: &str| text.replace('\n', " ");
        // Writing to a string does not fail.
        let _ = match state {
            CaptureState::Started(path) => writeln!(text, "started {}", path.display()),
            CaptureState::Refused(reason) => writeln!(text, "refused {}", line(reason)),
            CaptureState::Stopped(path) => writeln!(text, "stopped {}", path.display()),
            CaptureState::Failed(path, reason) => {
                writeln!(text, "failed {}\nreason {}", path.display(), line(reason))
            }
        };
        let Place { directory, number } = &self.place;
        control_file::answer(directory, NAME, *number, &text);
    }

    /// Describes the capture that is in progress, or has failed.
    pub(crate) fn state(&self) -> Option<String> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let active = current.active.as_ref()?;
        Some(match active.failed() {
            Some((path, reason)) => format!("{}: ended: {reason}", path.display()),
            None => {
                let frames = active.recorder.frames();
                format!("{}: {frames} frames", active.path.display())
            }
        })
    }
}

/// Parses an answer about a capture; `None` if it is about another one, or malformed.
fn parse_answer(text: &str, id: u64) -> Option<CaptureAnswer> {
    let mut lines = text.lines().map(|line| line.split_once(' '));
    let mut next = || lines.next().flatten();
    let mut value = |name| next().filter(|(known, _)| *known == name).map(|it| it.1);
    let is_it = value("id")?.parse() == Ok(id);
    let process = value("process")?.parse().ok()?;
    let frames = value("frames")?.parse().ok()?;
    let (kind, rest) = next()?;
    let state = match kind {
        "started" => CaptureState::Started(rest.into()),
        "refused" => CaptureState::Refused(rest.to_owned()),
        "stopped" => CaptureState::Stopped(rest.into()),
        "failed" => {
            let (_, reason) = next()?;
            CaptureState::Failed(rest.into(), reason.to_owned())
        }
        _ => return None,
    };
    is_it.then_some(CaptureAnswer {
        process,
        state,
        frames,
    })
}

impl RunningProcesses {
    /// Starts a capture in each process, also in those that start later, in the place of one
    /// that was started so. The path must be absolute. Returns the answers, and how many
    /// processes have not answered within two seconds.
    ///
    /// # Errors
    /// Those of writing the file that tells the processes; EINVAL for a path that is not
    /// absolute, or cannot be written as a line of text.
    pub fn start_capture(
        &self,
        path: &Path,
        snap: &str,
        ring: Option<&str>,
    ) -> Result<(Vec<CaptureAnswer>, usize), Error> {
        let id = random();
        let file = path.to_str().unwrap_or_default();
        let mut text = format!("start {id}\nfile {file}\nsnap {snap}\n");
        if let Some(ring) = ring {
            text += &format!("ring {ring}\n");
        }
        if Order::parse(&text).is_none() {
            return crate::refuse(libc::EINVAL).map_err(refused(Command::Open));
        }
        let told = control_file::replace(&self.directory, NAME, self.only, Some(&text));
        let told = told.map_err(refused(Command::Open))?;
        Ok(self.capture_answers(id, told, |_| true))
    }

    /// Ends the capture of [`start_capture`](Self::start_capture). Returns the answers, and how
    /// many processes have not answered within two seconds; `None` if there is no capture.
    ///
    /// # Errors
    /// Those of writing the file that tells the processes.
    pub fn stop_capture(&self) -> Result<Option<(Vec<CaptureAnswer>, usize)>, Error> {
        let text = control_file::text_for(&self.directory, NAME, self.only);
        let order = text.as_deref().and_then(Order::parse);
        if self.only.is_none() {
            control_file::remove_all_single(&self.directory, NAME);
        }
        // A process alone goes by the text for all when its own is removed.
        let new = self.only.map(|_| STOP);
        let told = control_file::replace(&self.directory, NAME, self.only, new);
        let told = told.map_err(refused(Command::Open))?;
        let Some(order) = order else { return Ok(None) };
        let has_ended = |it: &CaptureAnswer| !matches!(it.state, CaptureState::Started(_));
        Ok(Some(self.capture_answers(order.id, told, has_ended)))
    }

    fn capture_answers(
        &self,
        id: u64,
        told: usize,
        is_final: impl Fn(&CaptureAnswer) -> bool,
    ) -> (Vec<CaptureAnswer>, usize) {
        self.answers(NAME, told, MAX_WAIT, |text| {
            let answer = parse_answer(text, id).filter(&is_final)?;
            Some((answer.process, answer))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::{CaptureRing, CaptureSnap};

    #[test]
    fn orders_are_whole_or_refused() {
        let text = "start 7\nfile /tmp/frames.pcapng\nsnap 128\nring 2x64KiB\n";
        let order = Order::parse(text).unwrap();
        let ring = CaptureRing {
            files: 2,
            size: 64 << 10,
        };
        let options = CaptureOptions::new("/tmp/frames.pcapng")
            .with_snap(CaptureSnap::Bytes(128))
            .with_ring(ring);
        assert_eq!(order, Order { id: 7, options });
        assert!(Order::parse("start 7\nfile /a\nsnap all\n").is_some());
        for wrong in [
            "",
            "stop\n",
            "start 7\n",
            "start x\nfile /a\nsnap all\n",
            "start 7\nfile a\nsnap all\n",
            "start 7\nfile /a\nsnap some\n",
            "start 7\nfile /a\nb\nsnap all\n",
            "start 7\nfile /a\nsnap all\nring 1\n",
            "start 7\nfile /a\nsnap all\nmore x\n",
            "start 7\nfile /a\nsnap all\nring 2x64KiB\nmore\n",
        ] {
            assert_eq!(Order::parse(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn answers_are_about_one_capture() {
        let text = "id 7\nprocess 4711\nframes 3\nfailed /a b\nreason no space\n";
        let answer = parse_answer(text, 7).unwrap();
        let state = CaptureState::Failed("/a b".into(), "no space".to_owned());
        assert_eq!((answer.process, answer.frames), (4711, 3));
        assert_eq!(answer.state, state);
        assert_eq!(parse_answer(text, 8), None);
        for wrong in [
            "",
            "id 7\n",
            "id 7\nprocess x\nframes 3\nstarted /a\n",
            "id 7\nprocess 1\nframes 3\nfailed /a\n",
            "id 7\nprocess 1\nframes 3\nlost /a\n",
        ] {
            assert_eq!(parse_answer(wrong, 7), None, "{wrong:?}");
        }
    }
}
