//! `ringverbs pingpong`: messages back and forth.
//!
//! Uses the protocol of ibv_rc_pingpong and the other C tools, so either side may be
//! one of them. Without a host and `--server`, both sides are in this process.

mod destination;
mod error;
mod exchange;
mod options;
mod side;

use std::io::Write;
use std::net::Ipv6Addr;
use std::process::ExitCode;

use ringverbs::Context;
use serde::Serialize;

use crate::device;
use crate::error::Error;
use crate::escape::escaped;
use crate::out;
use destination::Destination;
use error::PingPongError;
use exchange::Server;
use options::{Mtu, Options, PingPongType};
use side::{Outcome, Role, Side};

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
    transport: PingPongType,
    /// TCP port for exchanging addresses
    #[arg(short, long, default_value_t = 18515)]
    port: u16,
    /// Use this device (default: the one that RINGVERBS_DEVICE names, else the first active
    /// one, or, if there is none and both sides are in this process, `embedded`: a
    /// ConnectX in software; `embedded:` or `embedded:DIRECTORY` reaches your other
    /// processes, `roce:eth0` or `roce:192.0.2.1` other hosts)
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
    /// Message size in bytes [default: 4096, for datagrams 1024]
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
    /// Number of queue pairs, with --type srq
    #[arg(short = 'q', long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=destination::SRQ_MESSAGES as i64))]
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
    /// Number of waits for a completion event.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_events: Option<u64>,
}

/// Runs one side or both sides.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let both_sides = args.host.is_none() && !args.server;
    let device = device::open(args.device.as_deref(), args.ib_port, both_sides)?;
    let context = &device.context;
    if !args.json {
        let mut out = out::stdout();
        writeln!(out, "  {:<16}{}", "device:", escaped(&device))?;
        out.flush()?;
    }
    let queue_pairs = match args.transport {
        PingPongType::Srq => args.num_qp,
        _ => 1,
    };
    if queue_pairs > args.rx_depth {
        return Err(PingPongError::TooFewReceives {
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
        mtu: args.mtu.path_mtu(),
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
        None => run_both_sides(args, context, options)?,
    };
    report(args, &device.name, &outcome)?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn size(&self) -> u32 {
        let default = match self.transport {
            PingPongType::Ud => 1024,
            _ => 4096,
        };
        self.size.unwrap_or(default)
    }
}

fn client(args: &Args, context: &Context, options: Options, host: &str) -> Result<Outcome, Error> {
    let poller = side::poller(context, options, 1)?;
    let mut side = Side::new(context, &poller, options, Role::Client)?;
    let ours = side.destinations();
    print_addresses(args, "local", side.in_use(&ours))?;
    let theirs = exchange::client(host, args.port, &ours)?;
    print_addresses(args, "remote", side.in_use(&theirs))?;
    side.connect(&theirs)?;
    side::run(poller, &mut [side])
}

fn server(args: &Args, context: &Context, options: Options) -> Result<Outcome, Error> {
    // Everything that can fail on this side is done before the client connects, because a C
    // client waits for the server's addresses without a timeout.
    let poller = side::poller(context, options, 1)?;
    let mut side = Side::new(context, &poller, options, Role::Server)?;
    let ours = side.destinations();
    print_addresses(args, "local", side.in_use(&ours))?;
    let server = Server::listen(args.port)?;
    out::print_waiting(&format!("waiting for a client on TCP port {}", args.port));
    server.serve(&ours, |theirs| {
        print_addresses(args, "remote", side.in_use(theirs))?;
        side.connect(theirs)
    })?;
    side::run(poller, &mut [side])
}

/// Runs both sides in this process, from one thread.
fn run_both_sides(args: &Args, context: &Context, options: Options) -> Result<Outcome, Error> {
    let poller = side::poller(context, options, 2)?;
    let mut server = Side::new(context, &poller, options, Role::Server)?;
    let mut client = Side::new(context, &poller, options, Role::Client)?;
    let (server_addresses, client_addresses) = (server.destinations(), client.destinations());
    print_addresses(args, "server", server.in_use(&server_addresses))?;
    print_addresses(args, "client", client.in_use(&client_addresses))?;
    server.connect(&client_addresses)?;
    client.connect(&server_addresses)?;
    side::run(poller, &mut [server, client])
}

/// Prints the addresses of a side, in the format of the C tools.
fn print_addresses(args: &Args, side: &str, addresses: &[Destination]) -> Result<(), Error> {
    if args.json {
        return Ok(());
    }
    let mut out = out::stdout();
    for address in addresses {
        writeln!(
            out,
            "  {:<16}LID 0x{:04x}, QPN 0x{:06x}, PSN 0x{:06x}, GID {}",
            format!("{side} address:"),
            address.lid,
            address.qpn,
            address.psn,
            Ipv6Addr::from(address.gid)
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
            PingPongType::Rc => "rc",
            PingPongType::Uc => "uc",
            PingPongType::Ud => "ud",
            PingPongType::Srq => "srq",
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
