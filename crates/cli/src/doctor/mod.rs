//! `ringverbs doctor`: why RDMA does not work here.
//!
//! [`facts`] looks at the machine, [`diagnose`] makes findings of what was
//! seen, without looking at anything else, and here they are printed.

mod diagnose;
mod facts;
mod provider;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;

use crate::error::Error;
use crate::out::{self, paint};
use crate::shown::shown;

/// What `doctor` is told.
#[derive(clap::Args)]
#[command(after_help = "Exit status: 0 if nothing stands in the way, 1 if something does.")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Works, but will hurt some programs.
    Warning,
    /// RDMA does not work until this is mended.
    Problem,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    level: Level,
    /// What was looked at, in a word.
    check: &'static str,
    /// What was found.
    found: String,
    /// The command that mends it.
    #[serde(skip_serializing_if = "Option::is_none")]
    mend: Option<String>,
}

/// All there is to say, as JSON has it.
#[derive(Serialize)]
struct Report {
    works: bool,
    findings: Vec<Finding>,
}

/// Looks, and says what was found.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let facts = facts::Facts::gather(Path::new("/"));
    let findings = diagnose::diagnose(&facts);
    let works = findings
        .iter()
        .all(|finding| finding.level != Level::Problem);
    if args.json {
        out::json(&Report { works, findings })?;
    } else {
        print(&findings)?;
    }
    Ok(if works {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn print(findings: &[Finding]) -> Result<(), Error> {
    let mut out = out::stdout();
    for finding in findings {
        let (style, word) = match finding.level {
            Level::Ok => (out::GOOD, "ok"),
            Level::Warning => (out::WARN, "warning"),
            Level::Problem => (out::BAD, "problem"),
        };
        let word = paint(style, format_args!("{word:<8}"));
        writeln!(out, "{word} {:<11}{}", finding.check, shown(&finding.found))?;
        if let Some(mend) = &finding.mend {
            let label = paint(out::DIM, "mend it:");
            writeln!(out, "{:20}{label} {}", "", paint(out::NAME, mend))?;
        }
    }
    let problems = findings
        .iter()
        .filter(|finding| finding.level == Level::Problem);
    let problems = problems.count();
    match problems {
        0 => writeln!(out, "\nNothing stands in the way of RDMA here.")?,
        1 => writeln!(out, "\nOne problem stands in the way of RDMA here.")?,
        count => writeln!(out, "\n{count} problems stand in the way of RDMA here.")?,
    }
    if problems != 0 {
        let command = paint(out::NAME, "ringverbs pingpong --device embedded");
        writeln!(
            out,
            "A ConnectX in the process needs nothing of this: {command}"
        )?;
    }
    Ok(out.flush()?)
}
