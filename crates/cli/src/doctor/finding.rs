//! Findings: the results of the checks.

use serde::Serialize;

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// No problem.
    Ok,
    /// RDMA works, but not for all programs or not at full speed.
    Warning,
    /// RDMA does not work until this is fixed.
    Problem,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub level: Level,
    /// The name of the check.
    pub check: &'static str,
    /// The observation.
    pub found: String,
    /// The command that fixes the problem.
    #[serde(rename = "mend", skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}
