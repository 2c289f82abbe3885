//! `ringverbs trace`: lists the verbs calls of a program, or decodes the queues of a running one.
//!
//! The list is that of a record ([`calls`]): of a program that is run ([`program`]), or from a file.
//!
//! A program on rxe, with any library, maps its queues from
//! `/dev/infiniband/uverbsN`. `trace` finds the mappings in `/proc/PID/maps` and copies
//! them through `/proc/PID/mem`, which it opens read-only: the process is not
//! stopped, attached to or written. The kernel requires permission to trace the
//! process.

mod calls;
mod process;
mod program;
mod queue;
mod text;

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use crate::error::Error;
use crate::out;
use crate::run::Options;
use calls::Selection;
pub use process::TraceError;
use process::{Mapping, Process};
use queue::{Queue, QueueKind};

/// Arguments of `trace`.
#[derive(clap::Args)]
#[command(after_help = "\
`trace -- PROGRAM` runs a program as `run` does, with the same options, and lists its calls on \
standard error; `trace record-4711.jsonl` lists those of a record of `run --record`.
`trace PID` decodes the queues of a running program on rxe. Reading the memory of another process requires permission to trace it: the same \
user (and kernel.yama.ptrace_scope=0), or root.
The queues are copied while the program and the driver run, so an entry may be \
half written. Only queues of rxe are supported.")]
pub struct Args {
    /// The process ID of a running program, or a record
    #[arg(required_unless_present = "command", value_name = "PID|FILE")]
    target: Option<Target>,
    /// List only these, separated by commas: call, post, completion, types of objects (qp, cq, mr)
    /// or calls (create_qp)
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    only: Vec<String>,
    /// Show only the queue mapped at this offset of the device (as listed)
    #[arg(short, long, value_parser = parse_offset, value_name = "OFFSET")]
    queue: Option<u64>,
    /// The type of the queue, if it cannot be determined from its entries
    #[arg(long = "as", value_name = "KIND")]
    kind: Option<QueueKind>,
    /// Number of entries to show of each queue, newest last
    #[arg(short = 'n', long, default_value_t = 8, value_name = "COUNT")]
    last: u32,
    /// Continue, and show new entries
    #[arg(short, long, conflicts_with = "json")]
    follow: bool,
    /// Polling interval of --follow in milliseconds
    #[arg(long, default_value_t = 50, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..))]
    interval: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    options: Options,
    /// The program to run, and its arguments
    #[arg(last = true, conflicts_with_all = ["target", "queue", "kind", "follow", "json"])]
    command: Vec<OsString>,
}

/// The process to look into, or the record to list.
#[derive(Clone, Debug)]
enum Target {
    Process(u32),
    Record(PathBuf),
}

impl FromStr for Target {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        match text.parse() {
            Ok(0) => Err("this is no process ID"),
            Ok(process) => Ok(Self::Process(process)),
            Err(_) => Ok(Self::Record(text.into())),
        }
    }
}

/// The record that cannot be read, and why.
#[derive(Debug)]
struct UnreadableRecord(PathBuf, replay::RecordError);

impl fmt::Display for UnreadableRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.0.display(), self.1)
    }
}

impl std::error::Error for UnreadableRecord {}

impl From<UnreadableRecord> for Error {
    fn from(error: UnreadableRecord) -> Self {
        Self::subcommand(error)
    }
}

/// Parses a number, in decimal or, with 0x, in hexadecimal.
fn parse_offset(text: &str) -> Result<u64, std::num::ParseIntError> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    }
}

/// Lists calls, or finds and prints queues.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let selection = Selection(args.only.clone());
    match &args.target {
        None => program::run(&args.options, &args.command, selection),
        Some(Target::Record(path)) => program::list(path, &selection),
        Some(Target::Process(pid)) => queues(args, *pid),
    }
}

fn queues(args: &Args, pid: u32) -> Result<ExitCode, Error> {
    let process = Process::open(pid)?;
    let mut mappings = process.mappings()?;
    if let Some(offset) = args.queue {
        mappings.retain(|mapping| mapping.offset == offset);
    }
    let read = |mapping: &Mapping| Queue::read(&process, mapping, args.kind, args.last);
    let queues: Vec<Queue> = mappings.iter().filter_map(read).collect();
    if queues.is_empty() {
        return Err(TraceError::NoQueue {
            pid,
            mappings: mappings.len(),
        }
        .into());
    }
    if args.json {
        out::json(&queues)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = out::stdout();
    for queue in &queues {
        text::queue(&mut out, queue)?;
    }
    out.flush()?;
    if args.follow {
        follow(args, &process, &mappings, &queues)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints new entries until the process exits or unmaps its queues. If more entries than
/// a queue holds are new between two polls, some are missed.
fn follow(
    args: &Args,
    process: &Process,
    mappings: &[Mapping],
    queues: &[Queue],
) -> Result<(), Error> {
    let mut producers: HashMap<u64, u32> = queues
        .iter()
        .map(|queue| (queue.offset, queue.producer))
        .collect();
    let mut out = out::stdout();
    loop {
        thread::sleep(Duration::from_millis(args.interval));
        let mut alive = false;
        for mapping in mappings {
            let Some(queue) = Queue::read(process, mapping, args.kind, u32::MAX) else {
                continue;
            };
            alive = true;
            let before = producers.insert(queue.offset, queue.producer);
            let before = before.unwrap_or(queue.producer);
            let new = queue.producer.wrapping_sub(before) & queue.capacity;
            let skip = queue.entries.len().saturating_sub(new as usize);
            for entry in queue.entries.iter().skip(skip) {
                text::entry(&mut out, &queue, entry, true)?;
            }
        }
        out.flush()?;
        if !alive {
            return Ok(());
        }
    }
}
