//! What a replay has found.

use std::collections::BTreeMap;
use std::fmt;

/// Something that was different from the record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The number of the recorded process.
    pub process: u32,
    /// When it was recorded, in nanoseconds since 1970.
    pub time: u64,
    /// What differs.
    pub what: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}: {}", self.process, self.what)
    }
}

/// A work request that has failed in the replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// The number of the recorded process.
    pub process: u32,
    /// The recorded number of the queue pair.
    pub queue_pair: u32,
    /// That of the work request.
    pub wr_id: u64,
    /// Its status.
    pub status: String,
    /// Why the device has failed it.
    pub explanation: Option<String>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            process,
            queue_pair,
            wr_id,
            status,
            explanation,
        } = self;
        write!(
            f,
            "process {process}, queue pair {queue_pair:#x}, wr_id {wr_id:#x}: {status}"
        )?;
        match explanation {
            Some(explanation) => write!(f, ": {explanation}"),
            None => Ok(()),
        }
    }
}

/// What a replay has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Numbers of replayed calls, posts and completions.
    pub calls: u64,
    /// As above.
    pub posts: u64,
    /// As above.
    pub completions: u64,
    /// What differs from the records, in the order of the replay.
    pub differences: Vec<Difference>,
    /// Work requests that have failed, without flushed ones.
    pub failures: Vec<Failed>,
    /// What was not replayed, and how often.
    pub left_out: BTreeMap<String, u64>,
    /// Number of completions that the programs have not polled.
    pub unpolled: u64,
}

impl Outcome {
    /// Counts something that is not replayed.
    pub(crate) fn leave_out(&mut self, what: impl Into<String>) {
        *self.left_out.entry(what.into()).or_default() += 1;
    }
}
