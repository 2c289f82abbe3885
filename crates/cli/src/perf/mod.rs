//! `ringverbs perf`: latency and bandwidth.
//!
//! [`side`] is one side with its queue pair, [`protocol`] the communication of
//! both sides, [`stats`] the evaluation, [`plot`] the plot. Without a host and
//! `--server`, both sides are in this process and communicate over the loopback
//! interface.

mod error;
mod plot;
mod protocol;
mod side;
mod stats;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use indicatif::{ProgressBar, ProgressStyle};
use ringverbs::{Context, Device, Endpoint, RemoteAddr};
use serde::Serialize;

use crate::device;
use crate::error::Error;
use crate::escape::escaped;
use crate::out;
use error::PerfError;
use protocol::{
    Answer, Hello, MAX_DEPTH, Measured, PeerConnection, Phase, ProtocolError, Start, VERSION,
    Welcome,
};
use side::{Plan, Side};
use stats::{Bandwidth, Latency, Row};

/// Arguments of `perf`.
#[derive(clap::Args)]
#[command(after_help = "\
Latency: for sends half of the round trip, for others from posting to completion.
Bandwidth: with --depth operations outstanding; M is a million.
Examples:
  ringverbs perf                                  writes of 4096 bytes, within this process
  ringverbs perf --op send --sizes 8..65536       a sweep over powers of two
  ringverbs perf --server                         and on the other machine:
  ringverbs perf --op read --plot read.svg HOST")]
pub struct Args {
    /// Measure with the server on this host
    #[arg(conflicts_with = "server")]
    host: Option<String>,
    /// Serve one client
    #[arg(short = 'S', long)]
    server: bool,
    /// What to measure
    #[arg(short, long = "op", value_name = "OPERATION", default_value = "write")]
    operation: Measured,
    /// Message sizes in bytes: a list, or FROM..TO for all powers of two in that
    /// range
    #[arg(short, long, value_parser = sizes, default_value = "4096")]
    sizes: Sizes,
    /// Operations of each size, for latency and again for bandwidth
    #[arg(short = 'n', long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    iters: u32,
    /// Maximum of outstanding operations, for bandwidth
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    depth: u32,
    /// Sleep until there are completions (default: poll)
    #[arg(short, long)]
    events: bool,
    /// TCP port of the server
    #[arg(short, long, default_value_t = 18516)]
    port: u16,
    /// Use this device (default: what RINGVERBS_DEVICE names, else the first active
    /// one, or, if there is none and both sides are in this process, `embedded`: a
    /// ConnectX in software; `embedded:DIRECTORY`, such as
    /// `embedded:$XDG_RUNTIME_DIR/wire`, reaches your other processes)
    #[arg(short, long, visible_alias = "ib-dev", value_name = "DEV")]
    device: Option<String>,
    /// Use this port of the device
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    ib_port: u8,
    /// Index of the local GID (default: that of an IPv4 address, else another
    /// RoCE v2 GID)
    #[arg(short, long)]
    gid_idx: Option<u8>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Plot latency and bandwidth over the message size into an SVG file
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Message sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sizes(Vec<u32>);

/// Parses `8,64,4096` or `8..4096`.
fn sizes(text: &str) -> Result<Sizes, String> {
    let size = |text: &str| match text.trim().parse() {
        Ok(size) if (1..=protocol::MAX_SIZE).contains(&size) => Ok(size),
        Ok(_) => Err(format!("a message has 1 to {} bytes", protocol::MAX_SIZE)),
        Err(_) => Err(format!("{text:?} is not a number of bytes")),
    };
    let sizes = match text.split_once("..") {
        Some((from, to)) => {
            let (from, to) = (size(from)?, size(to)?);
            let powers = (0..31).map(|power| 1 << power);
            powers.filter(|size| (from..=to).contains(size)).collect()
        }
        None => text
            .split(',')
            .map(size)
            .collect::<Result<Vec<u32>, String>>()?,
    };
    match sizes.is_empty() {
        true => Err("there is no power of two in that range".into()),
        false => Ok(Sizes(sizes)),
    }
}

/// All results.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    operation: Measured,
    completions: &'static str,
    depth: u32,
    rows: Vec<Row>,
    /// The error that ended it before all sizes were measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Measures, or serves.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    if let Some(file) = &args.plot {
        plot::check(file).map_err(PerfError::Plot)?;
    }
    let alone = args.host.is_none() && !args.server;
    let chosen = device::context(args.device.as_deref(), args.ib_port, alone)?;
    let context = &chosen.context;
    if !args.json && chosen.instead.is_some() {
        let mut out = out::stdout();
        writeln!(out, "{}", escaped(&chosen))?;
        out.flush()?;
    }
    if args.server {
        let listener = TcpListener::bind(("::", args.port))
            .or_else(|_| TcpListener::bind(("0.0.0.0", args.port)))
            .map_err(|why| PerfError::Listen {
                port: args.port,
                why,
            })?;
        serve(args, context, &listener)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (report, error) = match &args.host {
        Some(host) => {
            let stream = TcpStream::connect((host.as_str(), args.port));
            let stream = stream.map_err(|why| PerfError::Connect {
                to: format!("{host} port {}", args.port),
                why,
            })?;
            measure(args, context, stream)?
        }
        None => both(args, context)?,
    };
    if let Some(file) = &args.plot {
        if !report.rows.is_empty() {
            let title = format!("{} on {}", report.operation.name(), report.device);
            plot::draw(file, &title, &report.rows).map_err(PerfError::Plot)?;
        }
    }
    if args.json {
        out::json(&report)?;
    }
    error.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Runs both sides in this process.
fn both(args: &Args, context: &Context) -> Result<(Report, Option<Error>), Error> {
    let listen = |why| PerfError::Listen { port: 0, why };
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(listen)?;
    let address = listener.local_addr().map_err(listen)?;
    thread::scope(|scope| {
        let serving = scope.spawn(move || serve(args, context, &listener));
        let connected = TcpStream::connect(address).map_err(|why| PerfError::Connect {
            to: address.to_string(),
            why,
        });
        let measured = connected
            .map_err(Error::from)
            .and_then(|stream| measure(args, context, stream));
        let served = serving
            .join()
            .unwrap_or_else(|_| Err(PerfError::Panicked.into()));
        // The client's error is more specific than the server's.
        let (report, error) = measured?;
        Ok((report, error.or(served.err())))
    })
}

/// Serves one client until it disconnects.
fn serve(args: &Args, context: &Context, listener: &TcpListener) -> Result<(), Error> {
    let (stream, _) = listener.accept().map_err(|why| PerfError::Listen {
        port: args.port,
        why,
    })?;
    let mut line = PeerConnection::over(stream)?;
    let hello: Hello = line.receive()?;
    let mut side = match welcome(args, context, &hello) {
        Ok((side, welcome)) => {
            line.send(&Answer::Yes(welcome))?;
            side
        }
        Err(error) => {
            line.send(&Answer::<Welcome>::No(error.to_string()))?;
            return Err(error);
        }
    };
    loop {
        let phase: Phase = match line.receive() {
            Ok(phase) => phase,
            Err(ProtocolError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if phase.size > hello.size {
            return Err(ProtocolError::Value("size").into());
        }
        line.send(&Answer::Yes(Start { ready: true }))?;
        side.serve(phase.size, phase.messages, phase.echo)?;
    }
}

/// Creates the server's side as the client requests it.
fn welcome(args: &Args, context: &Context, hello: &Hello) -> Result<(Side, Welcome), Error> {
    hello.check()?;
    let plan = Plan {
        operation: hello.operation,
        size: hello.size,
        depth: hello.depth,
        events: hello.events,
        port: args.ib_port,
        gid_index: args.gid_idx,
    };
    let mut side = Side::new(context, plan)?;
    side.connect(&endpoint(&hello.endpoint)?)?;
    let key = side.key();
    let welcome = Welcome {
        endpoint: side.endpoint().to_string(),
        addr: key.addr,
        rkey: key.rkey,
    };
    Ok((side, welcome))
}

fn endpoint(text: &str) -> Result<Endpoint, Error> {
    text.parse()
        .map_err(Error::native("reading the other side's endpoint"))
}

/// Measures all sizes with the server at the other end, and prints each row when it
/// is there. An error at one size ends it; the rows before it are kept.
fn measure(
    args: &Args,
    context: &Context,
    stream: TcpStream,
) -> Result<(Report, Option<Error>), Error> {
    let Sizes(sizes) = &args.sizes;
    // An atomic always has 8 bytes.
    let sizes: Vec<u32> = match args.operation {
        Measured::Atomic => vec![8],
        _ => sizes.clone(),
    };
    let largest = sizes.iter().copied().max().unwrap_or(1);
    let plan = Plan {
        operation: args.operation,
        size: largest,
        depth: args.depth,
        events: args.events,
        port: args.ib_port,
        gid_index: args.gid_idx,
    };
    let mut side = Side::new(context, plan)?;
    let mut line = PeerConnection::over(stream)?;
    let welcome: Welcome = line.request(&Hello {
        version: VERSION,
        operation: args.operation,
        size: largest,
        depth: side.depth(),
        events: args.events,
        endpoint: side.endpoint().to_string(),
    })?;
    side.connect(&endpoint(&welcome.endpoint)?)?;
    let at = RemoteAddr::new(welcome.addr, welcome.rkey);
    let iterations = u64::from(args.iters);
    let bar = bar(iterations * 2 * sizes.len() as u64);
    let device = context.device().map(Device::name).unwrap_or_default();
    let mut report = Report {
        device: device.to_owned(),
        operation: args.operation,
        completions: if args.events { "events" } else { "polled" },
        depth: side.depth(),
        rows: Vec::new(),
        error: None,
    };
    if !args.json {
        bar.suspend(|| print_heading(&report))?;
    }
    let mut measure_size = |size: u32| -> Result<Option<Row>, Error> {
        bar.set_message(format!("{} {size} bytes", args.operation.name()));
        let phase = |line: &mut PeerConnection<TcpStream>, echo| {
            let sends = args.operation == Measured::Send;
            line.request::<Start>(&Phase {
                size,
                messages: if sends { iterations } else { 0 },
                echo: echo && sends,
            })
        };
        // The progress bar is updated between operations, and rarely.
        let mut count = 0u64;
        let mut tick = || {
            count += 1;
            if count % 64 == 0 {
                bar.inc(64);
            }
        };
        phase(&mut line, true)?;
        let times = side.latency(size, at, iterations, &mut tick)?;
        phase(&mut line, false)?;
        let time = side.bandwidth(size, at, iterations, &mut tick)?;
        Ok(Latency::of(times).map(|latency| Row {
            size,
            iterations: args.iters,
            latency,
            bandwidth: Bandwidth::of(iterations, size.into(), time.as_secs_f64()),
        }))
    };
    let mut failed = None;
    for size in sizes {
        match measure_size(size) {
            Ok(Some(row)) => {
                if !args.json {
                    bar.suspend(|| print_row(&row))?;
                }
                report.rows.push(row);
            }
            Ok(None) => {}
            Err(error) => {
                report.error = Some(error.to_string());
                failed = Some(error);
                break;
            }
        }
    }
    bar.finish_and_clear();
    Ok((report, failed))
}

/// Returns a progress bar, shown if standard error is a terminal.
fn bar(length: u64) -> ProgressBar {
    let bar = ProgressBar::new(length);
    if let Ok(style) = ProgressStyle::with_template("{msg:24} {bar:40} {percent:>3}% {eta:>4}") {
        bar.set_style(style);
    }
    bar
}

/// Columns of the table. Rows are printed as they come, so widths are fixed.
const HEADING: [&str; 9] = [
    "bytes", "min", "p50", "p90", "p99", "p99.9", "max", "MB/s", "Mmsg/s",
];
const WIDTH: usize = 9;

fn print_heading(report: &Report) -> Result<(), Error> {
    let mut out = out::stdout();
    let what = format!("{} on {}", report.operation.name(), report.device);
    writeln!(
        out,
        "{}, {}, {} outstanding for bandwidth; latency in microseconds",
        out::paint(out::NAME, what),
        report.completions,
        report.depth
    )?;
    let heading = cells(&HEADING.map(String::from));
    writeln!(out, "{}", out::paint(out::DIM, heading))?;
    Ok(out.flush()?)
}

fn print_row(row: &Row) -> Result<(), Error> {
    let latency = &row.latency;
    let time = |nanos: u64| format!("{:.2}", nanos as f64 * 1e-3);
    let values = [
        row.size.to_string(),
        time(latency.min),
        time(latency.p50),
        time(latency.p90),
        time(latency.p99),
        time(latency.p999),
        time(latency.max),
        format!("{:.2}", row.bandwidth.bytes_per_second * 1e-6),
        format!("{:.4}", row.bandwidth.messages_per_second * 1e-6),
    ];
    let mut out = out::stdout();
    writeln!(out, "{}", cells(&values))?;
    Ok(out.flush()?)
}

/// Aligns the cells of a line.
fn cells(cells: &[String; HEADING.len()]) -> String {
    let cells: Vec<String> = cells.iter().map(|cell| format!("{cell:>WIDTH$}")).collect();
    cells.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_lists_or_ranges_of_powers() {
        assert_eq!(sizes("8,64, 4096"), Ok(Sizes(vec![8, 64, 4096])));
        assert_eq!(sizes("8..64"), Ok(Sizes(vec![8, 16, 32, 64])));
        assert_eq!(sizes("5..9"), Ok(Sizes(vec![8])));
        assert_eq!(sizes("1..1073741824").unwrap().0.len(), 31);
        for wrong in [
            "",
            "x",
            "0",
            "8,,9",
            "-1",
            "5..7",
            "9..8",
            "8..",
            "4294967296",
            "2000000000",
        ] {
            assert!(sizes(wrong).is_err(), "{wrong}");
        }
    }
}
