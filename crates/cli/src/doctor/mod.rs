//! `ringverbs doctor`: finds out why RDMA does not work on this host.
//!
//! [`facts`] inspects the host, [`diagnose`] derives findings from the facts
//! alone, and this module prints the findings.

mod diagnose;
mod facts;
pub mod files;
mod finding;
mod libmlx5;
mod provider;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;

use crate::error::Error;
use crate::escape::escaped;
use crate::out::{self, paint};
use finding::{Finding, Level};

/// Arguments of `doctor`.
#[derive(clap::Args)]
#[command(after_help = "Exit status: 0 if there is no problem, 1 if there is one.")]
pub struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The result, as printed in JSON.
#[derive(Serialize)]
struct Report {
    works: bool,
    findings: Vec<Finding>,
}

/// Runs the checks and prints the findings.
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
        writeln!(
            out,
            "{word} {:<11}{}",
            finding.check,
            escaped(&finding.found)
        )?;
        if let Some(fix) = &finding.fix {
            let label = paint(out::DIM, "fix:");
            writeln!(out, "{:20}{label} {}", "", paint(out::NAME, fix))?;
        }
    }
    let problems = findings
        .iter()
        .filter(|finding| finding.level == Level::Problem);
    let problems = problems.count();
    match problems {
        0 => writeln!(out, "\nNo problems found.")?,
        1 => writeln!(out, "\nOne problem found.")?,
        count => writeln!(out, "\n{count} problems found.")?,
    }
    if problems != 0 {
        let command = paint(out::NAME, "ringverbs pingpong --device embedded");
        writeln!(
            out,
            "The embedded device works without any of this: {command}"
        )?;
    }
    Ok(out.flush()?)
}
