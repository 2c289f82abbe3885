//! Faults of a text, on the devices of a network, and how often each has happened.
//!
//! The text is the program's own, or that of a file in the network's directory
//! ([`FaultControl`]), to which each process answers by a file of its own.

use std::fs;
use std::io;
use std::path::Path;
use std::process;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use softhca::fault::{Fault, Faults, MAX_FAULTS, OnDecision, OnFired, QpName, Subject};
use uverbs::{Command, Error};

use crate::program_name;
use crate::runtime::control::{Place, RunningProcesses, wait_for_answers};
use crate::runtime::device::Device;
use crate::runtime::embedded::Embedded;
use crate::runtime::network::{Network, refused};
use crate::runtime::shared_words::{LENGTH, SharedWords, WORDS};
use crate::wires::control_file;
use crate::wires::segment::MAX_MEMBERS;

/// The first word of a file of counts: a version.
const VERSION: u64 = 0x7276_6661_756c_7401;
/// The words after it: of which text the file is, of which process, and what that has done with
/// the text.
const TEXT: usize = 1;
const PROCESS: usize = 2;
const ANSWER: usize = 3;
/// The first word of the counts.
const COUNTS: usize = 16;
/// The first word of what a process has done with each fault.
const STATES: usize = COUNTS + MAX_FAULTS;

const _: () = assert!(STATES + MAX_FAULTS <= WORDS);

/// Values of [`ANSWER`].
const ACCEPTED: u64 = 1;
const NOT_UNDERSTOOD: u64 = 2;
/// Accepted, and ended since: the counts are final.
const ENDED: u64 = 3;

/// How a process has answered to a fault.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultState {
    /// It has set it.
    Applied,
    /// It has no such device or queue pair.
    Refused,
    /// The fault is for another program.
    OtherProgram,
}

impl FaultState {
    const ALL: [Self; 3] = [Self::Applied, Self::Refused, Self::OtherProgram];

    fn word(self) -> u64 {
        let at = Self::ALL.iter().position(|it| *it == self);
        at.map_or(0, |at| at as u64 + 1)
    }

    fn of(word: u64) -> Option<Self> {
        let at = usize::try_from(word.checked_sub(1)?).ok()?;
        Self::ALL.get(at).copied()
    }
}

/// How often each fault of a text has happened, in a file that processes share.
#[derive(Debug)]
pub struct FaultCounts(SharedWords);

impl FaultCounts {
    /// Creates the file, which must not exist.
    ///
    /// # Errors
    /// Those of creating, writing and mapping it.
    pub fn create(path: &Path) -> io::Result<Self> {
        // Not a hole: on a full file system, an access to the mapping would be a fault.
        let mut file = fs::File::create_new(path)?;
        io::Write::write_all(&mut file, &[0; LENGTH])?;
        let counts = Self(SharedWords::open(path)?);
        counts.0.word(0).store(VERSION, Ordering::Relaxed);
        Ok(counts)
    }

    /// Opens a file of [`create`](Self::create).
    ///
    /// # Errors
    /// Those of opening and mapping it; EINVAL if it is another file.
    pub fn open(path: &Path) -> io::Result<Self> {
        let words = SharedWords::open(path)?;
        match words.word(0).load(Ordering::Relaxed) {
            VERSION => Ok(Self(words)),
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    /// Returns how often the fault at a position has happened.
    #[must_use]
    pub fn of(&self, position: usize) -> u64 {
        match position {
            ..MAX_FAULTS => self.0.word(COUNTS + position).load(Ordering::Relaxed),
            _ => 0,
        }
    }

    /// Tells that the faults are set no more.
    fn end(&self) {
        let answer = self.0.word(ANSWER);
        // Fails if they were not accepted.
        let _ = answer.compare_exchange(ACCEPTED, ENDED, Ordering::Release, Ordering::Relaxed);
    }

    /// Counts a fault.
    fn add(&self, position: usize) {
        if position < MAX_FAULTS {
            let word = self.0.word(COUNTS + position);
            word.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Returns what these devices do with a fault.
fn state_of(fault: &Fault, devices: &[Arc<Device>], program: &str) -> FaultState {
    if !fault.matcher.is_program(program) {
        return FaultState::OtherProgram;
    }
    let device = fault.matcher.device;
    if device.is_some_and(|index| index >= devices.len()) {
        return FaultState::Refused;
    }
    let is_now = fault.action.subject() == Subject::Once && fault.matcher.after.is_none();
    let queue_pair = match fault.matcher.qp {
        Some(QpName::Number(number)) if is_now => number,
        _ => return FaultState::Applied,
    };
    let has = |state: &Device| state.lock().hca.send_cq_of(queue_pair).is_some();
    let mut chosen = (0..).zip(devices);
    match chosen.any(|(index, it)| device.is_none_or(|device| device == index) && has(it)) {
        true => FaultState::Applied,
        false => FaultState::Refused,
    }
}

/// Sets faults of devices, in the place of those that were set before. Returns what they do with
/// each.
fn inject(
    devices: &[Arc<Device>],
    faults: &Faults,
    counts: Option<Arc<FaultCounts>>,
    on_die: Option<fn()>,
) -> Vec<FaultState> {
    let program = program_name();
    let states = faults.list().iter();
    let states = states.map(|fault| state_of(fault, devices, &program));
    let states: Vec<FaultState> = states.collect();
    let on_fired: OnFired = match counts {
        Some(counts) => Arc::new(move |position| counts.add(position)),
        None => Arc::new(|_| {}),
    };
    let is_applied = |fault: &Fault| {
        let at = faults.list().iter().position(|it| it.line == fault.line);
        at.is_some_and(|at| states[at] == FaultState::Applied)
    };
    for (index, device) in devices.iter().enumerate() {
        let mut state = device.lock();
        state.on_die = on_die;
        let is_meant =
            |it: &Fault| it.matcher.device.is_none_or(|at| at == index) && is_applied(it);
        state.hca.inject(faults, is_meant, Arc::clone(&on_fired));
    }
    states
}

/// How long a command waits for answers.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The name of the file with the faults of running processes.
const NAME: &str = "faults";

fn answer_name(number: u16) -> String {
    format!("fault-answer-{number}")
}

/// Returns the FNV-1a hash of a text: the same in each version of the command and the library.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The faults that a file in the directory of a network gives this process.
pub(crate) struct FaultControl {
    place: Place,
    /// The text that was applied last.
    applied: Mutex<Option<String>>,
}

impl FaultControl {
    pub(crate) fn new(place: Place) -> Self {
        // Of earlier processes of these numbers.
        place.directory.remove_lock(&answer_name(place.number));
        control_file::remove_own(&place.directory, NAME);
        Self {
            place,
            applied: Mutex::default(),
        }
    }

    /// Applies the file to the devices, if it has changed; with `again` also if not, since there
    /// is another device. Returns whether anything was applied.
    pub(crate) fn read(&self, devices: &[Arc<Device>], on_die: Option<fn()>, again: bool) -> bool {
        let text = control_file::read(&self.place.directory, NAME);
        let mut applied = self.applied.lock().unwrap_or_else(PoisonError::into_inner);
        if *applied == text && (!again || text.is_none()) {
            return false;
        }
        let Place { directory, number } = &self.place;
        let before = FaultCounts::open(&directory.path_of(&answer_name(*number)));
        match &text {
            None => drop(inject(devices, &Faults::default(), None, None)),
            Some(text) => self.apply(devices, text, on_die),
        }
        if let Ok(before) = before {
            before.end();
        }
        *applied = text;
        true
    }

    fn apply(&self, devices: &[Arc<Device>], text: &str, on_die: Option<fn()>) {
        let Place { directory, number } = &self.place;
        let name = answer_name(*number);
        directory.remove_lock(&name);
        // Without an answer the command says that there is none.
        let counts = FaultCounts::create(&directory.path_of(&name)).ok();
        let counts = counts.map(Arc::new);
        let answer = match Faults::parse(text) {
            Ok(faults) => {
                let states = inject(devices, &faults, counts.clone(), on_die);
                if let Some(counts) = &counts {
                    for (at, state) in states.iter().enumerate() {
                        let word = counts.0.word(STATES + at);
                        word.store(state.word(), Ordering::Relaxed);
                    }
                }
                ACCEPTED
            }
            Err(_) => NOT_UNDERSTOOD,
        };
        if let Some(FaultCounts(words)) = counts.as_deref() {
            words
                .word(PROCESS)
                .store(process::id().into(), Ordering::Relaxed);
            words.word(ANSWER).store(answer, Ordering::Relaxed);
            words.word(TEXT).store(hash(text), Ordering::Release);
        }
    }
}

/// The answer of a process to a file of faults.
#[derive(Debug)]
pub struct FaultAnswer {
    /// Its number.
    pub process: u32,
    counts: FaultCounts,
}

impl FaultAnswer {
    /// Returns whether it has understood the file: another version may not.
    #[must_use]
    pub fn is_accepted(&self) -> bool {
        self.counts.0.word(ANSWER).load(Ordering::Relaxed) != NOT_UNDERSTOOD
    }

    /// Returns whether it injects none of them any more, so that the counts are final.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.counts.0.word(ANSWER).load(Ordering::Acquire) != ACCEPTED
    }

    /// Returns what it has done with the fault at a position, and how often that has happened.
    #[must_use]
    pub fn of(&self, position: usize) -> Option<(FaultState, u64)> {
        if position >= MAX_FAULTS {
            return None;
        }
        let state = self.counts.0.word(STATES + position);
        let state = FaultState::of(state.load(Ordering::Relaxed))?;
        Some((state, self.counts.of(position)))
    }
}

impl RunningProcesses {
    /// Sets the faults of the processes, also of those that start later, in the place of those
    /// that were set before; `None` ends them. Returns how many processes are to answer.
    ///
    /// # Errors
    /// Those of writing the file.
    pub fn set_faults(&self, text: Option<&str>) -> std::result::Result<usize, Error> {
        let told = control_file::replace(&self.directory, NAME, self.only, text);
        let told = told.map_err(refused(Command::Open))?;
        Ok(self.expected(told))
    }

    /// Returns the answers of the processes to a text, also of those that have ended since.
    #[must_use]
    pub fn fault_answers(&self, text: &str) -> Vec<FaultAnswer> {
        let hash = hash(text);
        let answers = (0..MAX_MEMBERS).filter_map(|number| {
            let path = self.directory.path_of(&answer_name(number));
            let counts = FaultCounts::open(&path).ok()?;
            let is_answer = counts.0.word(TEXT).load(Ordering::Acquire) == hash;
            let process = counts.0.word(PROCESS).load(Ordering::Relaxed) as u32;
            let is_meant = is_answer && self.contains(process);
            is_meant.then_some(FaultAnswer { process, counts })
        });
        answers.collect()
    }

    /// As above, of so many processes that are to answer, which are waited for at most two
    /// seconds.
    #[must_use]
    pub fn wait_for_fault_answers(&self, text: &str, expected: usize) -> Vec<FaultAnswer> {
        wait_for_answers(expected, MAX_WAIT, || self.fault_answers(text))
    }

    /// Ends the faults; returns their text, if any are set, and the answers of the processes,
    /// which are waited for at most two seconds.
    ///
    /// # Errors
    /// Those of removing the file.
    pub fn end_faults(&self) -> std::result::Result<(String, Vec<FaultAnswer>), Error> {
        let text = self.faults().unwrap_or_default();
        let answers = self.fault_answers(&text);
        // Processes that are no more do not tell that theirs have ended.
        let expected = self.set_faults(None)?.min(answers.len());
        let ended = || answers.iter().filter(|it| it.has_ended()).collect();
        wait_for_answers::<&FaultAnswer>(expected, MAX_WAIT, ended);
        Ok((text, answers))
    }

    /// Returns the text of the faults that are set.
    #[must_use]
    pub fn faults(&self) -> Option<String> {
        control_file::text_for(&self.directory, NAME, self.only)
    }
}

impl Network {
    /// Sets faults of the devices, in the place of those that were set before: those that are
    /// meant for this process and each device. `counts` has how often they happen.
    pub fn inject(&self, faults: &Faults, counts: Option<Arc<FaultCounts>>) {
        inject(&self.devices(), faults, counts, self.on_die());
        self.wake();
    }
}

impl Embedded {
    /// Adds faults of this device to those that are set.
    pub fn add_faults(&self, faults: &Faults) {
        self.command(|state| state.hca.add_faults(faults));
    }

    /// Tells `on_decision` from now on what faults decide, also those that are set later, as faults
    /// that make the same happen again. It is called with the device locked.
    pub fn record_faults(&self, on_decision: OnDecision) {
        self.command(|state| state.hca.record_faults(on_decision));
    }

    /// Returns the faults of this device, and how often each has happened. One that happens once
    /// is forgotten when others are added.
    pub fn faults(&self) -> Vec<(String, u64)> {
        let mut state = self.device.lock();
        let Some(injector) = state.hca.injector() else {
            return Vec::new();
        };
        let counts = injector.counts();
        counts
            .map(|(fault, count)| (fault.to_string(), count))
            .collect()
    }

    /// Ends the faults of this device.
    pub fn end_faults(&self) {
        self.command(|state| state.hca.end_faults());
    }
}
