//! `ringverbs top`: objects, rates and errors of running programs on embedded devices, and of the
//! devices of the host.

mod host;
mod json;
mod question;
mod rates;
mod text;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use console::Term;
use embedded::{Network, ProcessStatus, RunningProcesses};
use host::HostDevice;
use question::Question;

use crate::error::Error;
use crate::{out, running};

/// Arguments of `top`.
#[derive(clap::Args)]
#[command(after_help = "\
Examples: ringverbs top /tmp/net
          ringverbs top 4711 --once
          ringverbs top /tmp/net --once --interval 1 --json")]
pub struct Args {
    /// Directory of the devices' network (--directory of ringverbs run), number of a process, or
    /// roce: the processes that reach other hosts. By default the default directory, and the
    /// devices of the host
    #[arg(value_name = "DIRECTORY|PID|roce")]
    target: Option<PathBuf>,
    /// Seconds between two looks, from 0.1 on; 1 without --once
    #[arg(long, value_name = "SECONDS", value_parser = interval)]
    interval: Option<Duration>,
    /// Look once; with --interval twice, for rates
    #[arg(long)]
    once: bool,
    /// Print JSON: a document for each look, on one line unless --once
    #[arg(long)]
    json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    const RANGE: std::ops::RangeInclusive<f64> = 0.1..=86400.0;
    match text.parse() {
        Ok(seconds) if RANGE.contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("use seconds from 0.1 on".to_owned()),
    }
}

/// The answers to one look.
#[derive(Default)]
pub(super) struct View {
    processes: Vec<ProcessStatus>,
    /// Devices of the host.
    devices: Vec<HostDevice>,
    /// Processes that have not answered.
    silent: usize,
}

impl View {
    fn look(processes: &RunningProcesses) -> Result<Self, Error> {
        let (processes, silent) = processes.status().map_err(Error::subcommand)?;
        Ok(Self {
            processes,
            devices: Vec::new(),
            silent,
        })
    }
}

/// Shows running programs, until it is ended by a signal.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let shows_host = args.target.is_none();
    let question = match &args.target {
        Some(target) => Some(running::find(target)?),
        None => default_processes()?,
    };
    let question = question.map(Question::new).transpose()?;
    let look = || {
        let view = question.as_ref().map(|it| View::look(&it.processes()));
        let mut view = view.transpose()?.unwrap_or_default();
        if shows_host {
            view.devices = host::devices();
        }
        Ok::<View, Error>(view)
    };
    let mut before = None;
    if args.once {
        if let Some(interval) = args.interval {
            before = Some(look()?);
            thread::sleep(interval);
        }
        let now = look()?;
        match args.json {
            true => out::json(&json::document(before.as_ref(), &now))?,
            false => print(&text::lines(before.as_ref(), &now, usize::MAX), usize::MAX)?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let interval = args.interval.unwrap_or(Duration::from_secs(1));
    let terminal = io::stdout().is_terminal().then(Term::stdout);
    loop {
        let now = look()?;
        let (rows, columns) = match terminal.as_ref().and_then(Term::size_checked) {
            Some((rows, columns)) => (rows.into(), columns.into()),
            None => (usize::MAX, usize::MAX),
        };
        if args.json {
            out::json_line(&json::document(before.as_ref(), &now))?;
        } else {
            if let Some(terminal) = &terminal {
                terminal.clear_screen()?;
            }
            print(&text::lines(before.as_ref(), &now, columns), rows)?;
        }
        before = Some(now);
        thread::sleep(interval);
    }
}

/// Returns the processes of the default directory; `None` if there is no such directory, but a
/// device of the host.
fn default_processes() -> Result<Option<RunningProcesses>, Error> {
    let directory = Network::default_directory();
    if !directory.exists() && !host::devices().is_empty() {
        return Ok(None);
    }
    running::find(&directory).map(Some)
}

/// Prints lines, as many as fit.
fn print(lines: &[String], rows: usize) -> Result<(), Error> {
    let mut out = out::stdout();
    let room = rows.saturating_sub(1);
    for line in lines.iter().take(room) {
        writeln!(out, "{line}")?;
    }
    Ok(out.flush()?)
}
