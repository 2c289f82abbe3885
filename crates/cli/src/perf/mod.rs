//! `ringverbs perf`: latency and bandwidth.
//!
//! [`side`] has the sides with their queue pairs, [`protocol`] the messages between client
//! and server, [`stats`] the statistics, [`plot`] the plot. Without a host and `--server`,
//! both sides are in this process and share a thread.

mod conditions;
mod error;
mod plot;
mod protocol;
mod side;
mod stats;
mod units;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use ringverbs::Context;
use serde::Serialize;

use crate::device;
use crate::error::Error;
use crate::escape::escaped;
use crate::out;
use conditions::Conditions;
use error::PerfError;
use plot::PlotFile;
use protocol::{
    Address, Goal, Hello, MAX_DEPTH, MAX_OUTSTANDING, MAX_QUEUE_PAIRS, PeerConnection,
    PerfOperation, PerfTransport, Phase, PhaseEnd, PhaseReady, PhaseResult, ProtocolError,
    Response, Setup, VERSION,
};
use side::{SideIndex, SideOptions, Sides};
use stats::{Bandwidth, Latency, Row};

/// Arguments of `perf`.
#[derive(clap::Args)]
#[command(after_help = "\
Latency: half of the round trip of a send, and on UC also of a write, which then carries
immediate data; for other operations the time from posting to completion.
Bandwidth: of the messages that arrived, with --depth operations outstanding on each queue
pair; M is a million. Sends and writes are from one buffer, and one in a quarter of the depth
is signaled. Messages that UC and UD lose are counted.
Examples:
  ringverbs perf                                  writes of 4 KiB, within this process
  ringverbs perf --op send --sizes 8..65536       a sweep over powers of two
  ringverbs perf -q 8 --bidirectional --duration 5
  ringverbs perf --type ud --op send --sizes 64   datagrams
  ringverbs perf --server                         and on the other machine:
  ringverbs perf --op read --plot read.png HOST")]
pub struct Args {
    /// Measure with the server on this host
    #[arg(conflicts_with = "server")]
    host: Option<String>,
    /// Serve one client
    #[arg(short = 'S', long)]
    server: bool,
    /// What to measure
    #[arg(short, long = "op", value_name = "OPERATION", default_value = "write")]
    operation: PerfOperation,
    /// Transport
    #[arg(short, long = "type", value_name = "TYPE", default_value = "rc")]
    transport: PerfTransport,
    /// Message sizes in bytes: a list, or FROM..TO for all powers of two in that
    /// range [default: 4096, for datagrams 1024]
    #[arg(short, long, value_parser = parse_sizes)]
    sizes: Option<Sizes>,
    /// Operations of each size, for latency and again for bandwidth
    #[arg(short = 'n', long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000_000))]
    iters: u32,
    /// Measure each size for this time instead of a number of operations: latency,
    /// and again bandwidth
    #[arg(short = 'D', long, value_name = "SECONDS", conflicts_with = "iters", value_parser = parse_duration)]
    duration: Option<Duration>,
    /// Maximum number of outstanding operations of a queue pair, for bandwidth [default:
    /// 64, fewer for large messages]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    depth: Option<u32>,
    /// Number of queue pairs, used round robin
    #[arg(short = 'q', long, value_name = "NUMBER", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_QUEUE_PAIRS)))]
    queue_pairs: u32,
    /// Bandwidth of both directions at once
    #[arg(short, long)]
    bidirectional: bool,
    /// Sleep until there are completions (default: poll)
    #[arg(short, long)]
    events: bool,
    /// TCP port of the server
    #[arg(short, long, default_value_t = 18516)]
    port: u16,
    /// Use this device (default: the one that RINGVERBS_DEVICE names, else the first active
    /// one, or, if there is none and both sides are in this process, `embedded`: a
    /// ConnectX in software; `embedded:` or `embedded:DIRECTORY` reaches your other
    /// processes, `roce:eth0` or `roce:192.0.2.1` other hosts)
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
    /// Plot latency and bandwidth over the message size into a file, *.svg or *.png
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Message sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sizes(Vec<u32>);

/// Parses `8,64,4096` or `8..4096`.
fn parse_sizes(text: &str) -> Result<Sizes, String> {
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

/// Parses a number of seconds.
fn parse_duration(text: &str) -> Result<Duration, String> {
    const MAX_SECONDS: f64 = 86_400.0;
    match text.trim().parse() {
        Ok(seconds) if (0.001..=MAX_SECONDS).contains(&seconds) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        Ok(_) => Err(format!("0.001 to {MAX_SECONDS} seconds")),
        Err(_) => Err(format!("{text:?} is not a number of seconds")),
    }
}

/// The results, as printed in JSON.
#[derive(Debug, Serialize)]
struct Report {
    device: String,
    operation: PerfOperation,
    transport: PerfTransport,
    completions: &'static str,
    depth: u32,
    queue_pairs: u32,
    bidirectional: bool,
    conditions: Conditions,
    rows: Vec<Row>,
    /// The error that ended the measurement before the last size.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Args {
    /// Returns the message sizes.
    fn sizes(&self) -> Vec<u32> {
        match (&self.sizes, self.operation, self.transport) {
            // An atomic always has 8 bytes.
            (_, PerfOperation::Atomic, _) => vec![8],
            (Some(Sizes(sizes)), ..) => sizes.clone(),
            (None, _, PerfTransport::Ud) => vec![1024],
            (None, ..) => vec![4096],
        }
    }

    fn goal(&self) -> Goal {
        match self.duration {
            Some(time) => Goal::Milliseconds(time.as_millis() as u64),
            None => Goal::Operations(self.iters.into()),
        }
    }

    /// Returns the valid setup, and whether its depth is less than the default.
    fn setup(&self) -> Result<(Setup, bool), PerfError> {
        if !self.transport.supports(self.operation) {
            return Err(PerfError::UnsupportedOperation {
                transport: self.transport,
                operation: self.operation,
            });
        }
        let setup = Setup {
            operation: self.operation,
            transport: self.transport,
            size: self.sizes().into_iter().max().unwrap_or(1),
            depth: self.depth.unwrap_or(side::DEFAULT_DEPTH),
            queue_pairs: self.queue_pairs,
            events: self.events,
            bidirectional: self.bidirectional,
        };
        if setup.depth.saturating_mul(setup.queue_pairs) > MAX_OUTSTANDING {
            return Err(PerfError::Outstanding {
                depth: setup.depth,
                queue_pairs: setup.queue_pairs,
                limit: MAX_OUTSTANDING,
            });
        }
        let fitted = match self.depth {
            Some(_) => setup,
            None => setup.with_reduced_depth(),
        };
        fitted.check_memory()?;
        Ok((fitted, fitted.depth < setup.depth))
    }

    fn side_options(&self, setup: Setup) -> SideOptions {
        SideOptions {
            setup,
            port: self.ib_port,
            gid_index: self.gid_idx,
        }
    }
}

/// Runs the client, the server, or both sides.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let (setup, reduced) = args.setup()?;
    let plot = args.plot.as_deref().map(PlotFile::create).transpose()?;
    let both_sides = args.host.is_none() && !args.server;
    let device = device::open(args.device.as_deref(), args.ib_port, both_sides)?;
    let context = &device.context;
    if !args.json && device.fallback_reason.is_some() {
        let mut out = out::stdout();
        writeln!(out, "{}", escaped(&device))?;
        out.flush()?;
    }
    if args.server {
        let listener = crate::side::listen(args.port)?;
        out::print_waiting(&format!("waiting for a client on TCP port {}", args.port));
        serve(args, context, &listener)?;
        return Ok(ExitCode::SUCCESS);
    }
    if !args.json && reduced {
        let mut out = out::stdout();
        writeln!(
            out,
            "{} outstanding instead of {}, because of messages of {} (--depth sets another number)",
            setup.depth,
            side::DEFAULT_DEPTH,
            units::size(setup.size.into())
        )?;
        out.flush()?;
    }
    let client = match &args.host {
        Some(host) => {
            let stream = crate::side::connect(host, args.port)?;
            Client::connect(args, setup, context, stream)?
        }
        None => Client::with_local_server(args, setup, context)?,
    };
    let (report, error) = measure(args, context, client)?;
    if let Some(plot) = plot {
        if !report.rows.is_empty() {
            let options = conditions::options(&setup, args.goal());
            let captions = plot::Captions {
                title: format!("RDMA {} on {}", setup.operation.name(), report.device),
                round_trip: setup.consumes_receives(),
                bidirectional: setup.bidirectional,
                options,
                conditions: report.conditions.caption(),
            };
            plot.draw(&captions, &report.rows)?;
        }
    }
    if args.json {
        out::json(&report)?;
    }
    error.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// Serves one client until it disconnects.
fn serve(args: &Args, context: &Context, listener: &TcpListener) -> Result<(), Error> {
    let mut client = PeerConnection::from_stream(crate::side::accept(listener)?)?;
    let accepted = client
        .receive()
        .and_then(Hello::parse)
        .map_err(Error::from)
        .and_then(|hello| create_side(args, context, &hello));
    let (mut sides, setup) = match accepted {
        Ok(accepted) => accepted,
        Err(error) => {
            client.send(&Response::<Address>::Refused(error.to_string()))?;
            return Err(error);
        }
    };
    client.send(&Response::Accepted(sides.address()))?;
    client.disable_read_timeout()?;
    loop {
        let phase: Phase = match client.receive() {
            Ok(phase) => phase,
            Err(ProtocolError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if phase.size == 0 || phase.size > setup.size {
            return Err(ProtocolError::Value("size").into());
        }
        client.send(&Response::Accepted(PhaseReady { ready: true }))?;
        sides.begin_phase(SideIndex::Own, &phase)?;
        sides.serve(&client)?;
        let end: PhaseEnd = client.receive()?;
        let result = sides.drain(SideIndex::Own, end.operations)?;
        client.send(&Response::Accepted(result))?;
    }
}

/// Creates the server's side with the client's setup, and connects it.
fn create_side(args: &Args, context: &Context, hello: &Hello) -> Result<(Sides, Setup), Error> {
    let mut sides = Sides::one(context, args.side_options(hello.setup))?;
    sides.connect(&hello.address)?;
    Ok((sides, hello.setup))
}

/// The client: its side, and the server.
struct Client {
    sides: Sides,
    server: Server,
    setup: Setup,
    goal: Goal,
    /// The number of the current phase.
    number: u8,
}

enum Server {
    Remote(PeerConnection<TcpStream>),
    /// The other one of the client's sides.
    Local,
}

impl Client {
    fn connect(
        args: &Args,
        setup: Setup,
        context: &Context,
        stream: TcpStream,
    ) -> Result<Self, Error> {
        let mut sides = Sides::one(context, args.side_options(setup))?;
        let mut server = PeerConnection::from_stream(stream)?;
        let address: Address = server.request(&Hello {
            version: VERSION,
            setup,
            address: sides.address(),
        })?;
        server.disable_read_timeout()?;
        sides.connect(&address)?;
        Ok(Self {
            sides,
            server: Server::Remote(server),
            setup,
            goal: args.goal(),
            number: 0,
        })
    }

    fn with_local_server(args: &Args, setup: Setup, context: &Context) -> Result<Self, Error> {
        Ok(Self {
            sides: Sides::both(context, args.side_options(setup))?,
            server: Server::Local,
            setup,
            goal: args.goal(),
            number: 0,
        })
    }

    fn begin_phase(&mut self, size: u32, echo: bool, goal: Option<Goal>) -> Result<(), Error> {
        self.number = self.number.wrapping_add(1);
        let phase = Phase {
            number: self.number,
            size,
            echo,
            goal,
        };
        let own = Phase {
            echo: false,
            goal: None,
            ..phase
        };
        self.sides.begin_phase(SideIndex::Own, &own)?;
        match &mut self.server {
            Server::Local => self.sides.begin_phase(SideIndex::Other, &phase),
            Server::Remote(server) => match server.request(&phase)? {
                PhaseReady { ready: true } => Ok(()),
                PhaseReady { ready: false } => Err(ProtocolError::Value("start").into()),
            },
        }
    }

    /// Ends a phase. Returns the server's result, and the number of the server's messages
    /// that arrived.
    fn end_phase(&mut self, operations: u64) -> Result<(PhaseResult, u64), Error> {
        let result = match &mut self.server {
            Server::Local => self.sides.drain(SideIndex::Other, operations)?,
            Server::Remote(server) => {
                server.send(&PhaseEnd { operations })?;
                self.sides.serve(server)?;
                server.response()?
            }
        };
        let own = self.sides.drain(SideIndex::Own, result.operations)?;
        Ok((result, own.received))
    }

    /// Measures latency, then bandwidth, of one size.
    fn measure(&mut self, size: u32, mut tick: impl FnMut(Progress)) -> Result<Row, Error> {
        let echo = self.setup.consumes_receives();
        self.begin_phase(size, echo, None)?;
        let goal = self.goal;
        let latency = (self.sides).measure_latency(goal, |count| tick(Progress::Latency(count)));
        let (samples, lost) = latency?;
        let iterations = samples.count();
        let latency =
            Latency::of(samples).ok_or(PerfError::Lost(lost.try_into().unwrap_or(u32::MAX)))?;
        self.end_phase(iterations + lost)?;

        let server_goal = self.setup.bidirectional.then_some(goal);
        self.begin_phase(size, false, server_goal)?;
        let server = match &self.server {
            Server::Remote(server) => Some(server),
            Server::Local => None,
        };
        let count = |count| tick(Progress::Bandwidth(count));
        let posted = self.sides.post_pipelined(goal, server, count)?;
        let (server, received) = self.end_phase(posted.operations)?;
        // The server's numbers are not trusted.
        let messages = server.received.saturating_add(received);
        let sent = posted.operations.saturating_add(server.operations);
        let time = posted.time.max(Duration::from_nanos(server.nanoseconds));
        Ok(Row {
            size,
            iterations,
            latency,
            bandwidth: Bandwidth::of(messages, size.into(), time.as_secs_f64()),
            lost: (self.setup.transport.is_lossy())
                .then(|| lost.saturating_add(sent.saturating_sub(messages))),
        })
    }
}

/// Progress within one size: the operations so far of either half.
enum Progress {
    Latency(u64),
    Bandwidth(u64),
}

/// Measures all sizes with the server, and prints each row as soon as it is complete. An
/// error ends the measurement; the rows before it are returned with the error.
fn measure(
    args: &Args,
    context: &Context,
    mut client: Client,
) -> Result<(Report, Option<Error>), Error> {
    let (sizes, setup) = (args.sizes(), client.setup);
    let mut bar = Bar::new(args.goal(), sizes.len());
    let conditions = Conditions::of(context, args.ib_port, args.host.as_deref());
    let mut report = Report {
        device: conditions.device.clone(),
        operation: args.operation,
        transport: args.transport,
        completions: if args.events { "events" } else { "polled" },
        depth: setup.depth,
        queue_pairs: setup.queue_pairs,
        bidirectional: setup.bidirectional,
        conditions,
        rows: Vec::new(),
        error: None,
    };
    if !args.json {
        bar.suspend(|| print_heading(&report, &setup, args.goal()))?;
    }
    let mut failed = None;
    for size in sizes {
        let name = args.operation.name();
        bar.next(format!("{name} {}", units::size(size.into())));
        match client.measure(size, |progress| bar.tick(progress)) {
            Ok(row) => {
                if !args.json {
                    bar.suspend(|| print_row(&row))?;
                }
                report.rows.push(row);
            }
            Err(error) => {
                report.error = Some(error.to_string());
                failed = Some(error);
                break;
            }
        }
    }
    bar.finish();
    Ok((report, failed))
}

/// A progress bar, shown if standard error is a terminal. Each half (latency, bandwidth)
/// of a size has [`Bar::STEPS`] steps.
struct Bar {
    bar: ProgressBar,
    goal: Goal,
    /// The number of the current size, from 1.
    size: u64,
    /// Whether the current half is the second one, and its start.
    half: Option<(bool, Instant)>,
}

impl Bar {
    const STEPS: u64 = 1000;

    fn new(goal: Goal, sizes: usize) -> Self {
        let bar = ProgressBar::new(2 * Self::STEPS * sizes as u64);
        if let Ok(style) = ProgressStyle::with_template("{msg:24} {bar:40} {percent:>3}% {eta:>4}")
        {
            bar.set_style(style);
        }
        Self {
            bar,
            goal,
            size: 0,
            half: None,
        }
    }

    fn suspend<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    fn next(&mut self, message: String) {
        self.size += 1;
        self.half = None;
        self.bar.set_message(message);
    }

    /// Called after each operation; updates the bar every 64 operations.
    fn tick(&mut self, progress: Progress) {
        let (second, count) = match progress {
            Progress::Latency(count) => (false, count),
            Progress::Bandwidth(count) => (true, count),
        };
        if count % 64 != 0 {
            return;
        }
        let start = match self.half {
            Some((half, start)) if half == second => start,
            _ => self.half.insert((second, Instant::now())).1,
        };
        let (done, total) = match self.goal {
            Goal::Operations(total) => (count, total),
            Goal::Milliseconds(total) => (start.elapsed().as_millis() as u64, total),
        };
        let done = (done * Self::STEPS / total.max(1)).min(Self::STEPS);
        let halves = 2 * (self.size - 1) + u64::from(second);
        self.bar.set_position(halves * Self::STEPS + done);
    }

    fn finish(self) {
        self.bar.finish_and_clear();
    }
}

/// Columns of the table. Their width is fixed, because each row is printed when it is
/// complete.
const HEADING: [&str; 9] = [
    "bytes", "min", "p50", "p90", "p99", "p99.9", "max", "MiB/s", "Mmsg/s",
];
/// The last column, for transports that lose messages.
const LOST_HEADING: &str = "lost";
const WIDTH: usize = 9;

fn print_heading(report: &Report, setup: &Setup, goal: Goal) -> Result<(), Error> {
    let mut out = out::stdout();
    let title = format!("{} on {}", report.operation.name(), report.device);
    writeln!(
        out,
        "{}: {}; latency in µs",
        out::paint(out::NAME, title),
        conditions::options(setup, goal)
    )?;
    let lost = setup.transport.is_lossy().then_some(LOST_HEADING);
    let heading = cells(HEADING.into_iter().chain(lost));
    writeln!(out, "{}", out::paint(out::DIM, heading))?;
    Ok(out.flush()?)
}

fn print_row(row: &Row) -> Result<(), Error> {
    let latency = &row.latency;
    let time = |nanos: u64| format!("{:.2}", nanos as f64 * 1e-3);
    let mebi = f64::from(1 << 20);
    let values = [
        row.size.to_string(),
        time(latency.min),
        time(latency.p50),
        time(latency.p90),
        time(latency.p99),
        time(latency.p999),
        time(latency.max),
        format!("{:.2}", row.bandwidth.bytes_per_second / mebi),
        format!("{:.4}", row.bandwidth.messages_per_second * 1e-6),
    ];
    let lost = row.lost.map(|count| count.to_string());
    let mut out = out::stdout();
    writeln!(out, "{}", cells(values.into_iter().chain(lost)))?;
    Ok(out.flush()?)
}

/// Aligns the cells of a line.
fn cells(cells: impl Iterator<Item: std::fmt::Display>) -> String {
    let cells: Vec<String> = cells.map(|cell| format!("{cell:>WIDTH$}")).collect();
    cells.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_lists_or_ranges_of_powers_of_two() {
        assert_eq!(parse_sizes("8,64, 4096"), Ok(Sizes(vec![8, 64, 4096])));
        assert_eq!(parse_sizes("8..64"), Ok(Sizes(vec![8, 16, 32, 64])));
        assert_eq!(parse_sizes("5..9"), Ok(Sizes(vec![8])));
        assert_eq!(parse_sizes("1..1073741824").unwrap().0.len(), 31);
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
            assert!(parse_sizes(wrong).is_err(), "{wrong}");
        }
    }
}
