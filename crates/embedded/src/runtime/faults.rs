//! Faults of a text, on the devices of a network, and how often each has happened.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use softhca::fault::{Fault, Faults, MAX_FAULTS, OnFired};

use crate::runtime::embedded::Embedded;
use crate::runtime::network::Network;
use crate::runtime::shared_words::{LENGTH, SharedWords, WORDS};

/// The first word of a file of counts: a version.
const VERSION: u64 = 0x7276_6661_756c_7401;
/// The first word of the counts.
const FIRST: usize = 16;

const _: () = assert!(FIRST + MAX_FAULTS <= WORDS);

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
        self.0.word(FIRST + position).load(Ordering::Relaxed)
    }

    /// Counts a fault.
    fn add(&self, position: usize) {
        if position < MAX_FAULTS {
            let word = self.0.word(FIRST + position);
            word.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Returns the name of this process's program, as the system keeps it: its first 15 bytes.
fn program() -> String {
    let name = fs::read_to_string("/proc/self/comm").unwrap_or_default();
    name.trim_end_matches('\n').to_owned()
}

/// Returns whether a fault is meant for a device of this process, by its index.
fn is_meant(fault: &Fault, device: usize, program: &str) -> bool {
    /// Length of a program's name in `/proc`.
    const LENGTH: usize = 15;
    let named = fault.matcher.program.as_deref();
    let is_program = named.is_none_or(|name| {
        let short = name.as_bytes().get(..LENGTH).unwrap_or(name.as_bytes());
        short == program.as_bytes()
    });
    is_program && fault.matcher.device.is_none_or(|it| it == device)
}

impl Network {
    /// Sets faults of the devices, in the place of those that were set before: those that are
    /// meant for this process and each device. `counts` has how often they happen. `on_die` is
    /// called when a fault ends the process, with the device locked; without it the device falls
    /// silent.
    pub fn inject(&self, faults: &Faults, counts: Option<Arc<FaultCounts>>, on_die: Option<fn()>) {
        let program = program();
        let on_fired: OnFired = match counts {
            Some(counts) => Arc::new(move |position| counts.add(position)),
            None => Arc::new(|_| {}),
        };
        for (index, device) in self.devices().iter().enumerate() {
            let mut state = device.lock();
            state.on_die = on_die;
            let is_meant = |fault: &Fault| is_meant(fault, index, &program);
            state.hca.inject(faults, is_meant, Arc::clone(&on_fired));
        }
        self.wake();
    }
}

impl Embedded {
    /// Adds faults of this device to those that are set.
    pub fn add_faults(&self, faults: &Faults) {
        self.command(|state| state.hca.add_faults(faults));
    }

    /// Ends the faults of this device.
    pub fn end_faults(&self) {
        self.command(|state| state.hca.end_faults());
    }
}
