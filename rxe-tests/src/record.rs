//! The driver's records, one JSON object per line.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The provider that serves the device in a run.
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
    /// No provider: the Rust crate on both sides.
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

/// The result of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Passed.
    Pass,
    /// Failed or timed out.
    Fail,
    /// The program cannot run here.
    Skip,
}

/// The expected result of a case with stock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StockExpectation {
    /// None: if stock passes, ours must pass.
    #[default]
    Reference,
    /// Failure, since this release has the defect that the case shows.
    MustFail,
    /// Failure, since no known release has fixed the defect. A stock that passes is
    /// reported, and is not a failure.
    FailsSoFar,
    /// Stock does not run the case.
    NotRun,
}

/// The result of one case with one provider.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// The kind of case, for example `pingpong`.
    pub group: String,
    /// The case's name within the group.
    pub name: String,
    /// The provider that served the device.
    pub provider: Provider,
    /// The result of the last attempt.
    pub outcome: Outcome,
    /// The result expected of stock.
    #[serde(default)]
    pub stock: StockExpectation,
    /// The number of attempts. Its maximum is the same for every provider.
    pub attempts: u32,
    /// Duration of the last attempt.
    pub seconds: f64,
    /// Why the case failed or was skipped.
    #[serde(default)]
    pub detail: String,
    /// Why the first attempt failed, if there was another.
    #[serde(default)]
    pub earlier: String,
    /// Measured figures, by name and unit.
    #[serde(default)]
    pub figures: BTreeMap<String, f64>,
    /// The result is that of an earlier run.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cached: bool,
}

/// A record of the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "record", rename_all = "kebab-case")]
pub enum Record {
    /// The system that the cases run on.
    Environment {
        /// The kernel's release.
        kernel: String,
        /// rdma-core's version, as the package names it.
        rdma_core: String,
    },
    /// The result of a case.
    Case(Case),
    /// The plugin refused this rdma-core, which it does not know, and stock took over.
    /// No case was run with ours.
    Refused {
        /// The plugin's message.
        line: String,
    },
    /// The provider libraries mapped in a process of ours: the proof that it served.
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
    /// Returns the record as a line of text, without a newline.
    pub fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }

    /// Parses the output of [`Record::line`].
    pub fn parse(line: &str) -> Result<Record, serde_json::Error> {
        serde_json::from_str(line)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_round_trip_through_a_line() {
        let record = Record::Case(Case {
            group: "pingpong".into(),
            name: "rc/poll".into(),
            provider: Provider::OursServer,
            outcome: Outcome::Fail,
            stock: StockExpectation::MustFail,
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
