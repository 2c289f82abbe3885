//! What the driver reports, one JSON object on a line.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Which provider serves the device in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Provider {
    /// rdma-core's own on both sides.
    Stock,
    /// ringverbs on both sides.
    Ours,
    /// ringverbs in the server, stock in the client.
    OursServer,
    /// Stock in the server, ringverbs in the client.
    OursClient,
    /// None: the Rust crate on both sides.
    Native,
    /// The Rust crate, with C programs over stock as its peers.
    NativeWithC,
    /// The Rust crate, with C programs over the plugin as its peers.
    NativeWithPlugin,
}

impl fmt::Display for Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Provider::Stock => "stock",
            Provider::Ours => "ours",
            Provider::OursServer => "ours-server",
            Provider::OursClient => "ours-client",
            Provider::Native => "native",
            Provider::NativeWithC => "native-with-c",
            Provider::NativeWithPlugin => "native-with-plugin",
        })
    }
}

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// As it should.
    Pass,
    /// Not as it should, or not in time.
    Fail,
    /// The program said that it cannot run here.
    Skip,
}

/// What stock is expected to do with a case.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stock {
    /// Nothing: where it passes, ours must pass.
    #[default]
    Reference,
    /// To fail, because this release has a defect that the case shows.
    MustFail,
    /// To fail, because no release known has mended the defect. A stock that
    /// passes is news, not a failure.
    FailsSoFar,
    /// It is not asked.
    NotRun,
}

/// One case under one provider.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// The kind of case, for example `pingpong`.
    pub group: String,
    /// Its name within the group.
    pub name: String,
    /// Who served the device.
    pub provider: Provider,
    /// How it ended, after the last attempt.
    pub outcome: Outcome,
    /// What stock is expected to do.
    #[serde(default)]
    pub stock: Stock,
    /// How often it was run; the most that a case has is the same for every
    /// provider.
    pub attempts: u32,
    /// How long the last attempt took.
    pub seconds: f64,
    /// Why it failed or was skipped.
    #[serde(default)]
    pub detail: String,
    /// Why the first attempt failed, where there was another.
    #[serde(default)]
    pub earlier: String,
    /// What it measured, by name and unit.
    #[serde(default)]
    pub figures: BTreeMap<String, f64>,
    /// An earlier run has shown it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cached: bool,
}

/// A line of the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "kebab-case")]
pub enum Record {
    /// Where the cases run.
    Environment {
        /// The kernel's release.
        kernel: String,
        /// rdma-core's version, as the package names it.
        rdma_core: String,
    },
    /// A case has ended.
    Case(Case),
    /// The plugin does not know this rdma-core and has said so; stock took
    /// over. No case was run with ours.
    Refused {
        /// What it said.
        line: String,
    },
    /// What a process of ours had mapped: the proof of who served it.
    Proof {
        /// The case.
        case: String,
        /// The lines of the memory map that name a provider.
        maps: Vec<String>,
    },
    /// All cases have been run.
    End,
}

impl Record {
    /// The record as a line of text, without the line's end.
    pub fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }

    /// Reads what [`Record::line`] wrote.
    pub fn parse(line: &str) -> Result<Record, serde_json::Error> {
        serde_json::from_str(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_the_line() {
        let record = Record::Case(Case {
            group: "pingpong".into(),
            name: "rc/poll".into(),
            provider: Provider::OursServer,
            outcome: Outcome::Fail,
            stock: Stock::MustFail,
            attempts: 3,
            seconds: 1.5,
            detail: "line one\nline two".into(),
            earlier: "line three".into(),
            figures: [("us".to_owned(), 12.0)].into(),
            cached: false,
        });
        let line = record.line();
        assert!(!line.contains('\n'));
        assert_eq!(Record::parse(&line).unwrap(), record);
    }
}
