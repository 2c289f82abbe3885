//! `ringverbs pingpong`: messages back and forth.
//!
//! Uses the protocol of ibv_rc_pingpong and its relatives, so either side may be
//! one of them. Without a host and `--server`, both sides are in this process.

mod exchange;
mod side;
mod wire;

use std::fmt;
use std::io::Write;
use std::net::Ipv6Addr;
use std::process::ExitCode;
use std::thread;

use ringverbs::{Context, Operation, Transport};
use serde::Serialize;

use crate::device;
use crate::error::Error;
use crate::out;
use crate::shown::shown;
pub use exchange::ExchangeError;
use exchange::Server;
use side::{Outcome, Role, Side};
use wire::Destination;

/// Arguments of `pingpong`. The options are named like those of the C tools.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  ringverbs pingpong                    both sides in this process, with or without a device
  ringverbs pingpong --server           wait for a client: ringverbs, or ibv_rc_pingpong HOST
  ringverbs pingpong HOST               connect to a server: ringverbs, or ibv_rc_pingpong
  ringverbs pingpong --type uc HOST     connect to ibv_uc_pingpong")]
pub struct Args {
    /// Connect to the server on this host
    #[arg(conflicts_with = "server")]
    host: Option<String>,
    /// Wait for a client
    #[arg(short = 'S', long)]
    server: bool,
    /// Transport, as in the name of ibv_*_pingpong
    #[arg(short, long = "type", value_name = "TYPE", default_value = "rc")]
    transport: Type,
    /// TCP port for exchanging addresses
    #[arg(short, long, default_value_t = 18515)]
    port: u16,
    /// Use this device (default: the first active one, or, if there is none and
    /// both sides are in this process, `embedded`: a ConnectX in software;
    /// `embedded:DIRECTORY`, such as `embedded:$XDG_RUNTIME_DIR/wire`, reaches
    /// your other processes)
    #[arg(
        short = 'd',
        long = "ib-dev",
        visible_alias = "device",
        value_name = "DEV"
    )]
    device: Option<String>,
    /// Use this port of the device
    #[arg(short, long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..))]
    ib_port: u8,
    /// Bytes of a message [default: 4096, for datagrams 1024]
    #[arg(short, long, value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    size: Option<u32>,
    /// Path MTU
    #[arg(short, long, default_value = "1024")]
    mtu: Mtu,
    /// Number of posted receives
    #[arg(short, long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    rx_depth: u32,
    /// Number of exchanges
    #[arg(short = 'n', long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Sleep until there are completions (default: poll)
    #[arg(short, long)]
    events: bool,
    /// Queue pairs, with --type srq
    #[arg(short = 'q', long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=511))]
    num_qp: u32,
    /// Service level
    #[arg(short = 'l', long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(..16))]
    sl: u8,
    /// Index of the local GID (default: that of an IPv4 address, else another
    /// RoCE v2 GID)
    #[arg(short, long)]
    gid_idx: Option<u8>,
    /// Check received messages
    #[arg(short, long = "chk")]
    check: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The C tools, by part of their name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Type {
    /// Reliable connection (ibv_rc_pingpong)
    Rc,
    /// Unreliable connection (ibv_uc_pingpong)
    Uc,
    /// Unreliable datagrams (ibv_ud_pingpong)
    Ud,
    /// Reliable connections with a shared receive queue (ibv_srq_pingpong)
    Srq,
}

impl Type {
    fn native(self) -> Transport {
        match self {
            Self::Rc | Self::Srq => Transport::Reliable,
            Self::Uc => Transport::Unreliable,
            Self::Ud => Transport::Datagram,
        }
    }
}

/// MTUs, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Mtu {
    #[value(name = "256")]
    B256,
    #[value(name = "512")]
    B512,
    #[value(name = "1024")]
    B1024,
    #[value(name = "2048")]
    B2048,
    #[value(name = "4096")]
    B4096,
}

impl Mtu {
    fn path(self) -> ringverbs::qp::Mtu {
        match self {
            Self::B256 => ringverbs::qp::Mtu::Bytes256,
            Self::B512 => ringverbs::qp::Mtu::Bytes512,
            Self::B1024 => ringverbs::qp::Mtu::Bytes1024,
            Self::B2048 => ringverbs::qp::Mtu::Bytes2048,
            Self::B4096 => ringverbs::qp::Mtu::Bytes4096,
        }
    }
}

/// Options of a side.
#[derive(Clone, Copy, Debug)]
struct Options {
    transport: Type,
    ib_port: u8,
    gid_index: Option<u8>,
    size: u32,
    mtu: ringverbs::qp::Mtu,
    rx_depth: u32,
    iters: u32,
    queue_pairs: u32,
    events: bool,
    sl: u8,
    check: bool,
}

/// The reason why a ping-pong failed.
#[derive(Debug)]
pub enum PingPongError {
    /// The sides could not exchange their addresses.
    Exchange(ExchangeError),
    /// The other side sent no GID.
    NoGid,
    /// An operation failed.
    Failed {
        /// The operation.
        operation: Operation,
        /// The reason.
        status: String,
        /// Messages sent before.
        sent: u32,
        /// Messages received before.
        received: u32,
    },
    /// A message does not fit a datagram.
    Datagram {
        /// The port's MTU.
        mtu: u32,
    },
    /// The other side has a different number of queue pairs.
    QueuePairs {
        /// On this side.
        ours: usize,
        /// On the other side.
        theirs: usize,
    },
    /// There are fewer receives than queue pairs.
    Depth {
        /// Receives.
        rx_depth: u32,
        /// Queue pairs.
        queue_pairs: u32,
    },
    /// A completion names an unknown queue pair.
    Stray(u32),
    /// A message has unexpected content.
    Content {
        /// Its number, from 1.
        message: u32,
    },
    /// There was no progress for some time.
    Silence {
        /// The time.
        seconds: u64,
        /// Messages sent before.
        sent: u32,
        /// Messages received before.
        received: u32,
        /// Whether the transport retransmits lost packets.
        repeats: bool,
    },
    /// A side in this process has panicked.
    Panicked,
}

impl fmt::Display for PingPongError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exchange(error) => error.fmt(f),
            Self::NoGid => f.write_str(
                "the other side gave no GID, which Ethernet needs; \
                 start ibv_*_pingpong there with -g and a GID's index (ibv_devinfo -v lists them)",
            ),
            Self::Failed {
                operation,
                status,
                sent,
                received,
            } => write!(
                f,
                "{operation:?} failed after {sent} sent and {received} received: {status}; \
                 do both sides have the same --size, --mtu and --iters?"
            ),
            Self::Datagram { mtu } => write!(
                f,
                "a datagram carries at most the port's MTU, {mtu} bytes; choose a smaller --size"
            ),
            Self::QueuePairs { ours, theirs } => write!(
                f,
                "the other side has {theirs} queue pairs, this one {ours}; \
                 they must have the same --num-qp and --type"
            ),
            Self::Depth {
                rx_depth,
                queue_pairs,
            } => write!(
                f,
                "{rx_depth} receives are too few for {queue_pairs} queue pairs; \
                 raise --rx-depth or lower --num-qp"
            ),
            Self::Stray(qp_num) => write!(
                f,
                "a completion names queue pair {qp_num:#x}, which this side does not have"
            ),
            Self::Content { message } => write!(
                f,
                "message {message} is not what was sent; has the other side --chk too?"
            ),
            Self::Silence {
                seconds,
                sent,
                received,
                repeats,
            } => {
                write!(
                    f,
                    "no progress for {seconds} s after {sent} sent and {received} received; "
                )?;
                f.write_str(match repeats {
                    true => "has the other side ended? do both have the same --iters?",
                    false => "this --type does not retransmit lost packets",
                })
            }
            Self::Panicked => f.write_str("one of the two sides has panicked"),
        }
    }
}

impl std::error::Error for PingPongError {}

/// The result, as printed in JSON.
#[derive(Serialize)]
struct Report<'a> {
    device: &'a str,
    transport: &'static str,
    size: u32,
    iterations: u32,
    bytes: u64,
    seconds: f64,
    megabits_per_second: f64,
    microseconds_per_iteration: f64,
    /// How often this side slept; if both sides are here, the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_events: Option<u64>,
}

/// Runs one side, or both.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let alone = args.host.is_none() && !args.server;
    let chosen = device::context(args.device.as_deref(), args.ib_port, alone)?;
    let context = &chosen.context;
    if !args.json {
        let mut out = out::stdout();
        writeln!(out, "  {:<16}{}", "device:", shown(&chosen))?;
        out.flush()?;
    }
    let queue_pairs = match args.transport {
        Type::Srq => args.num_qp,
        _ => 1,
    };
    if queue_pairs > args.rx_depth {
        return Err(PingPongError::Depth {
            rx_depth: args.rx_depth,
            queue_pairs,
        }
        .into());
    }
    let options = Options {
        transport: args.transport,
        ib_port: args.ib_port,
        gid_index: args.gid_idx,
        size: args.size(),
        mtu: args.mtu.path(),
        rx_depth: args.rx_depth,
        iters: args.iters,
        queue_pairs,
        events: args.events,
        sl: args.sl,
        check: args.check,
    };
    let outcome = match &args.host {
        Some(host) => client(args, context, options, host)?,
        None if args.server => server(args, context, options)?,
        None => both(args, context, options)?,
    };
    report(args, &chosen.name, &outcome)?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn size(&self) -> u32 {
        let default = match self.transport {
            Type::Ud => 1024,
            _ => 4096,
        };
        self.size.unwrap_or(default)
    }
}

fn client(args: &Args, context: &Context, options: Options, host: &str) -> Result<Outcome, Error> {
    let mut side = Side::new(context, options)?;
    let ours = side.destinations();
    say(args, "local", side.used(&ours))?;
    let theirs = exchange::client(host, args.port, &ours)?;
    say(args, "remote", side.used(&theirs))?;
    side.connect(&theirs)?;
    side.play(Role::Client)
}

fn server(args: &Args, context: &Context, options: Options) -> Result<Outcome, Error> {
    // Everything that can fail here is done before a client connects, because a C
    // client would wait for the answer for ever.
    let mut side = Side::new(context, options)?;
    let ours = side.destinations();
    say(args, "local", side.used(&ours))?;
    let server = Server::listen(args.port)?;
    server.serve(&ours, |theirs| {
        say(args, "remote", side.used(theirs))?;
        side.connect(theirs)
    })?;
    side.play(Role::Server)
}

/// Runs both sides in this process, each in its own thread.
fn both(args: &Args, context: &Context, options: Options) -> Result<Outcome, Error> {
    let mut server = Side::new(context, options)?;
    let mut client = Side::new(context, options)?;
    let (at_server, at_client) = (server.destinations(), client.destinations());
    say(args, "server", server.used(&at_server))?;
    say(args, "client", client.used(&at_client))?;
    server.connect(&at_client)?;
    client.connect(&at_server)?;
    thread::scope(|scope| {
        let serving = scope.spawn(|| server.play(Role::Server));
        let outcome = client.play(Role::Client);
        let served = serving
            .join()
            .unwrap_or_else(|_| Err(PingPongError::Panicked.into()));
        served.and(outcome)
    })
}

/// Prints the address of a side, in the format of the C tools.
fn say(args: &Args, who: &str, sides: &[Destination]) -> Result<(), Error> {
    if args.json {
        return Ok(());
    }
    let mut out = out::stdout();
    for at in sides {
        writeln!(
            out,
            "  {:<16}LID 0x{:04x}, QPN 0x{:06x}, PSN 0x{:06x}, GID {}",
            format!("{who} address:"),
            at.lid,
            at.qpn,
            at.psn,
            Ipv6Addr::from(at.gid)
        )?;
    }
    Ok(out.flush()?)
}

fn report(args: &Args, device: &str, outcome: &Outcome) -> Result<(), Error> {
    let seconds = outcome.elapsed.as_secs_f64();
    let bytes = u64::from(args.size()) * u64::from(args.iters) * 2;
    let report = Report {
        device,
        transport: match args.transport {
            Type::Rc => "rc",
            Type::Uc => "uc",
            Type::Ud => "ud",
            Type::Srq => "srq",
        },
        size: args.size(),
        iterations: args.iters,
        bytes,
        seconds,
        megabits_per_second: bytes as f64 * 8e-6 / seconds,
        microseconds_per_iteration: seconds * 1e6 / f64::from(args.iters),
        completion_events: args.events.then_some(outcome.events),
    };
    if args.json {
        return out::json(&report);
    }
    let mut out = out::stdout();
    writeln!(
        out,
        "{bytes} bytes in {seconds:.2} seconds = {:.2} Mbit/sec",
        report.megabits_per_second
    )?;
    writeln!(
        out,
        "{} iters in {seconds:.2} seconds = {:.2} usec/iter",
        args.iters, report.microseconds_per_iteration
    )?;
    Ok(out.flush()?)
}
