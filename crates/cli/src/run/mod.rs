//! `ringverbs run`: runs a program with the plugin serving its devices, whatever
//! libraries the program is linked to.
//!
//! Sets the variables that the plugin and libibverbs read, and executes the
//! program. `RDMAV_DRIVERS` names the plugin before the configured providers.
//! `LD_PRELOAD` makes the plugin register before a provider that the program is linked
//! to, as perftest is to libmlx5. `RINGVERBS_DEVICES` selects the devices that the
//! plugin serves.
//!
//! With `--embedded` this process stays as the program's parent, to report one that has not
//! used RDMA ([`supervise`]); otherwise the program takes its place.
//!
//! With `--embedded` a second library is preloaded, which gives the program embedded
//! devices (`crates/preload`); libibverbs then selects the provider as on a real
//! system, unless `--plugin` or `--devices` requests the plugin.

mod carried;
mod chaos;
pub mod check;
pub mod environment;
pub(crate) mod faults;
mod mount;
mod node;
mod program;
mod search;
mod supervise;
mod values;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write as _;
use std::marker::PhantomData;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::str::FromStr;

use embedded::softhca::card::Card;
use embedded::softhca::link_shape::LinkShape;
use embedded::sysfs::{MAX_DEVICES, NameError, device_names};
use embedded::usage::{Totals, Usage};
use embedded::{
    CaptureOptions, CaptureRing, CaptureSnap, FileSizeLimit, GidTable, GidTableError, Network,
};
use ringverbs::KernelError;
use uverbs::environment::variable;

use crate::error::Error;
use crate::out;
use crate::timeline;
use chaos::{ChaosSeed, Decisions};
use faults::{FaultFile, FaultReport};
use mount::MountError;
use node::Node;
use program::PreloadBlocked;
use supervise::End;

/// Text that stands for a value of `T`, which the preloaded library parses again.
#[derive(Clone, Debug)]
struct Text<T> {
    text: String,
    parsed: PhantomData<T>,
}

impl<T: FromStr> FromStr for Text<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        text.parse::<T>().map(|_| Self {
            text: text.to_owned(),
            parsed: PhantomData,
        })
    }
}

/// Which devices a program gets.
#[derive(Clone, clap::Args)]
pub struct Options {
    /// Give the program embedded devices, named mlx5_0, mlx5_1 ...: roce or ib,
    /// separated by commas; or one that reaches other hosts, by address or interface:
    /// roce:192.0.2.1, roce:eth0. The system's providers serve them; with
    /// --devices mlx5 ringverbs does
    #[arg(
        long,
        value_name = "DEVICES",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = DEFAULT_DEVICES
    )]
    embedded: Option<String>,
    /// Directory of the embedded devices' network: programs that name the same one
    /// reach each other. Default: ringverbs in $XDG_RUNTIME_DIR, or
    /// /tmp/ringverbs-UID
    #[arg(long, value_name = "PATH")]
    directory: Option<PathBuf>,
    /// Names of the devices, in order, separated by commas. `rdma link add NAME type rxe ...`
    /// then succeeds in the program, and does nothing [default: mlx5_0, mlx5_1 ...]
    #[arg(long, value_name = "NAMES")]
    name: Option<String>,
    /// GIDs of roce devices without an address, in order, separated by commas: v1 and v2
    /// (versions of RoCE, of the link-local address), v1-ipv4, v2-ipv4, v1-ipv6, v2-ipv6 (each
    /// repetition is another address), none (an empty entry) [default: v1,v2,v1-ipv4,v2-ipv4]
    #[arg(long, value_name = "LIST")]
    gids: Option<String>,
    /// Cards that the devices report to be: cx5, cx6dx, cx7 or bf3; one for all, or one for each,
    /// separated by commas
    #[arg(long, value_name = "CARDS", value_delimiter = ',')]
    card: Vec<String>,
    /// Rate, delay and queue of a device's link: 25Gbit,delay=5us,jitter=1us,queue=256KiB (drop
    /// beyond it),pause (wait instead),ecn=64KiB (mark beyond it). Once for all devices, or once for each
    #[arg(long, value_name = "LINK")]
    link: Vec<Text<LinkShape>>,
    /// A server in TOML: devices and GPUs with their places in a PCI tree, NUMA nodes and
    /// interfaces
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["card", "name"]
    )]
    node: Option<PathBuf>,
    /// The numbers of queue pairs and memory keys follow from this seed, and from the order in
    /// which programs open the devices of a directory. Default: other numbers each time
    #[arg(long, value_name = "N", value_parser = values::number)]
    seed: Option<u64>,
    /// Do not count retries to a peer on another host that has been silent for less than this:
    /// its program may be stopped, in a debugger, where a card would acknowledge
    #[arg(
        long,
        value_name = "SECONDS",
        value_parser = values::seconds
    )]
    patience: Option<u64>,
    /// Let the devices do what the specification allows and fast ones rarely do: late and in another
    /// order. What they decide follows from the seed; without one, from a random one, which is printed
    #[arg(
        long,
        value_name = "SEED",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "random"
    )]
    chaos: Option<ChaosSeed>,
    /// Only these of the decisions, separated by commas, or after @ those in a file
    #[arg(long, value_name = "LIST", requires = "chaos")]
    chaos_only: Option<Decisions>,
    /// Inject the faults of a file, as docs/faults.md describes, and report at the end how often
    /// each has happened
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// Record which faults happen, also those of `ringverbs fault`, as a file of faults that makes
    /// the same happen again: each process in a file FILE with its number
    #[arg(long, value_name = "FILE")]
    record_faults: Option<PathBuf>,
    /// Report, on standard error or in a file, why embedded devices refuse commands, fail work
    /// requests and drop packets
    #[arg(
        long,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1"
    )]
    explain: Option<PathBuf>,
    /// Form of these reports: text, or json with an object on each line
    #[arg(
        long,
        value_name = "FORM",
        value_parser = ["text", "json"],
        requires = "explain"
    )]
    explain_format: Option<String>,
    /// Capture the frames of embedded devices for Wireshark: each process in a file FILE with its
    /// number
    #[arg(long, value_name = "FILE")]
    capture: Option<PathBuf>,
    /// Capture this of each frame: headers (zeros for the payload), all, or a number of bytes
    /// [default: headers]
    #[arg(long, value_name = "BYTES", requires = "capture")]
    capture_snap: Option<Text<CaptureSnap>>,
    /// Capture in these many files of this size, of which the oldest makes room for the next:
    /// 4x16MiB
    #[arg(long, value_name = "FILESxSIZE", requires = "capture")]
    capture_ring: Option<Text<CaptureRing>>,
    /// Record the program's verbs calls, posts and completions as lines of JSON, without payload:
    /// each process in a file FILE with its number. docs/trace.md
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Kinds of devices that ringverbs serves, separated by commas; default:
    /// RINGVERBS_DEVICES, or all if that is unset
    #[arg(long, value_name = "KINDS", value_parser = values::kinds)]
    devices: Option<String>,
    /// The plugin: a libringverbs-rdmavN.so, or the directory that contains it.
    /// Default: beside this command, or the provider directory of libibverbs
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
}

/// Arguments of `run`.
#[derive(clap::Args)]
#[command(after_help = "\
Static programs, and programs with elevated privileges, whose loader ignores the \
environment, cannot be run with preloaded libraries; --mount shows static ones the files \
of the devices.
Examples: ringverbs run -- ib_write_bw -d mlx5_0
          ringverbs run --embedded -- ibv_rc_pingpong -g 1 localhost")]
pub struct Args {
    #[command(flatten)]
    options: Options,
    /// Exit with status 3 if the program ends well, but its processes have sent or received
    /// fewer bytes than this over RDMA [default: 1]; 0 also silences the warning that it
    /// used none
    #[arg(
        long,
        value_name = "BYTES",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "1",
        requires = "embedded",
        value_parser = values::bytes
    )]
    require_rdma: Option<u64>,
    /// Write a page with a sequence diagram of packets, posts and completions, for a browser
    #[arg(
        long,
        value_name = "FILE.html",
        requires = "embedded",
        conflicts_with_all = ["capture", "record"]
    )]
    timeline: Option<PathBuf>,
    /// Mount the files of the devices in sysfs, as they are when the program starts: for programs
    /// that are statically linked, or built for musl, and read them
    #[arg(long, requires = "embedded")]
    mount: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// The devices of `--embedded` without a list.
const DEFAULT_DEVICES: &str = "roce";
/// All kinds that the plugin supports.
const DEVICES: &str = "rxe,mlx5";
/// The provider name to which libibverbs appends `-rdmavN.so`.
const STEM: &str = "libringverbs";
/// The library for embedded devices.
const PRELOAD: &str = "libringverbs_preload.so";

/// The variable that lists a program's embedded devices.
const EMBEDDED: &str = "RINGVERBS_EMBEDDED";
/// The variable that names the file or socket of a record.
const RECORD: &str = "RINGVERBS_RECORD";
/// The variable that names the file of a program's usage.
const USAGE: &str = "RINGVERBS_USAGE";

/// The reason why the program was not run, or has failed.
#[derive(Debug)]
pub enum RunError {
    /// None of these paths contains the plugin.
    NoPlugin(Vec<PathBuf>),
    /// None of these directories contains the library for embedded devices.
    NoPreload(Vec<PathBuf>),
    /// The carried libraries cannot be unpacked to any of these directories, for these reasons.
    NoCache(Vec<(PathBuf, String)>),
    /// There is no embedded device of this name.
    UnknownDevice(String),
    /// There are so many devices, more than a process may have.
    TooManyDevices(usize),
    /// `--name` does not name the devices.
    Names(NameError),
    /// There is no card of this name.
    UnknownCard(String),
    /// There are these many cards for these many devices.
    Cards(usize, usize),
    /// There are these many links for these many devices.
    Links(usize, usize),
    /// The node file cannot be used, for this reason.
    Node(PathBuf, String),
    /// `--node` is given with devices.
    NodeWithDevices(String),
    /// `--gids` is no GID table.
    Gids(GidTableError),
    /// `--gids` is given without a device that has a GID table of its own.
    GidsWithoutDevice(String),
    /// `--patience` is given for devices that reach no other hosts.
    PatienceWithoutHost(String),
    /// An option is given without the embedded devices that it is for.
    WithoutDevices(&'static str),
    /// The program does not exist, and its name is a list of devices.
    DevicesAsProgram(String),
    /// The directory cannot be used for a network.
    Directory(PathBuf, String),
    /// The files of the devices cannot be mounted.
    Mount(MountError),
    /// The library for embedded devices cannot be preloaded into the program.
    PreloadBlocked(PathBuf, PreloadBlocked),
    /// As above, of a static program that was to be checked.
    StaticUnchecked(PathBuf),
    /// The path contains a separator of `LD_PRELOAD`.
    Separator(PathBuf),
    /// The limit on the size of files leaves no room for those of a device.
    FileSize(FileSizeLimit),
    /// The file for the reports of this option cannot be written.
    Reports(&'static str, PathBuf, std::io::Error),
    /// The file of faults cannot be used, for this reason.
    Faults(PathBuf, String),
    /// The capture cannot be written.
    Capture(PathBuf, std::io::Error),
    /// The timeline cannot be written.
    Timeline(timeline::TimelineError),
    /// The record cannot be written.
    Record(PathBuf, std::io::Error),
    /// The record of faults cannot be written.
    FaultRecord(PathBuf, std::io::Error),
    /// `trace` is given `--record`.
    RecordTwice,
    /// A signal of this number has ended the search for a seed.
    Stopped(u32),
    /// The file of suppressions cannot be read.
    Suppressions(PathBuf, std::io::Error),
    /// The variable's value cannot be printed, for this reason.
    Value(String, &'static str),
    /// The program has not used RDMA as `--require-rdma` demands.
    Unused(String),
    /// The program could not be executed.
    Exec(OsString, std::io::Error),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPlugin(paths) => {
                write!(f, "there is no {STEM}-rdmavN.so in {}", PathList(paths))?;
                f.write_str("; name it with --plugin")
            }
            Self::NoPreload(paths) => {
                write!(f, "there is no {PRELOAD} in {}", PathList(paths))?;
                f.write_str(
                    "; put it beside this command, or use the command in target/dist of cargo \
                     xtask dist, which carries it",
                )
            }
            Self::NoCache(reasons) => {
                f.write_str("the libraries cannot be unpacked: ")?;
                for (path, reason) in reasons {
                    write!(f, "{}: {reason}; ", path.display())?;
                }
                f.write_str(
                    "set XDG_CACHE_HOME to a directory of your own, on a file system that is \
                     not mounted noexec",
                )
            }
            Self::UnknownDevice(name) => {
                write!(f, "--embedded: there is no device \"{name}\"; there are ")?;
                for (number, (name, about)) in Network::profiles().enumerate() {
                    let comma = if number == 0 { "" } else { ", " };
                    write!(f, "{comma}{name} ({about})")?;
                }
                f.write_str(", or roce: with one address or interface, and no others")
            }
            Self::TooManyDevices(count) => write!(
                f,
                "--embedded: {count} devices; a program has at most {MAX_DEVICES}"
            ),
            Self::Names(error) => write!(f, "--name: {error}"),
            Self::UnknownCard(name) => {
                write!(f, "--card: there is no card \"{name}\"; there are ")?;
                for (number, card) in Card::ALL.iter().enumerate() {
                    let comma = if number == 0 { "" } else { ", " };
                    write!(f, "{comma}{} ({})", card.name, card.about)?;
                }
                Ok(())
            }
            Self::Cards(cards, devices) => write!(
                f,
                "--card: {cards} cards for {devices} devices; name one for all, or one for each"
            ),
            Self::Links(links, devices) => write!(
                f,
                "--link: given {links} times for {devices} devices; once for all, or once for each"
            ),
            Self::Node(path, reason) => write!(f, "--node: {}:{reason}", path.display()),
            Self::NodeWithDevices(devices) => write!(
                f,
                "--node: the file says which devices there are; leave \"={devices}\" away"
            ),
            Self::Gids(error) => write!(f, "--gids: {error}"),
            Self::GidsWithoutDevice(devices) => {
                write!(f, "--gids: {devices} has no roce device without an address")
            }
            Self::PatienceWithoutHost(devices) => write!(
                f,
                "--patience: {devices} reaches no other hosts; on one host stopped programs are \
                 known"
            ),
            Self::WithoutDevices(option) => write!(f, "{option} needs --embedded"),
            Self::DevicesAsProgram(devices) => write!(
                f,
                "there is no program {devices}; for devices write --embedded={devices}"
            ),
            Self::Directory(path, reason) => {
                write!(f, "--directory: {}: {reason}", path.display())
            }
            Self::Mount(error) => write!(f, "--mount: {error}"),
            Self::PreloadBlocked(path, reason) => write!(f, "{}: {reason}", path.display()),
            Self::StaticUnchecked(path) => write!(
                f,
                "{}: the program is statically linked and loads no libraries, so that nothing \
                 would be checked; link it dynamically, or, if it makes its embedded device by \
                 the crate ringverbs, run it with RINGVERBS_CHECK=1 in the environment, without \
                 this command",
                path.display()
            ),
            Self::Separator(path) => write!(
                f,
                "{}: LD_PRELOAD cannot hold a path with a space, colon or semicolon",
                path.display()
            ),
            Self::FileSize(limit) => write!(f, "{limit}"),
            Self::Reports(option, path, error) => {
                write!(f, "{option}: {}: {error}", path.display())
            }
            Self::Faults(path, reason) => write!(f, "--faults: {}:{reason}", path.display()),
            Self::Capture(path, error) => write!(f, "--capture: {}: {error}", path.display()),
            Self::Timeline(error) => write!(f, "--timeline: {error}"),
            Self::RecordTwice => f.write_str(
                "--record: trace lists the record itself; `run --record` writes it, and `trace FILE` \
                 lists it",
            ),
            Self::Record(path, error) => write!(f, "--record: {}: {error}", path.display()),
            Self::FaultRecord(path, error) => {
                write!(f, "--record-faults: {}: {error}", path.display())
            }
            Self::Stopped(signal) => {
                write!(f, "stopped by signal {signal}; the program was killed")
            }
            Self::Suppressions(path, error) => {
                write!(f, "--suppressions: {}: {error}", path.display())
            }
            Self::Value(name, reason) => write!(f, "the value of {name} {reason}"),
            Self::Unused(used) => f.write_str(used),
            Self::Exec(program, error) => {
                write!(f, "running {}: {error}", Path::new(program).display())
            }
        }
    }
}

/// Displays paths separated by commas.
struct PathList<'a>(&'a [PathBuf]);

impl fmt::Display for PathList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, path) in self.0.iter().enumerate() {
            let comma = if number == 0 { "" } else { ", " };
            write!(f, "{comma}{}", path.display())?;
        }
        Ok(())
    }
}

impl std::error::Error for RunError {}

impl From<RunError> for Error {
    fn from(error: RunError) -> Self {
        Self::subcommand(error)
    }
}

/// Executes the program; returns if that fails, or if the program has ended.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let [program, arguments @ ..] = &args.command[..] else {
        return Ok(ExitCode::FAILURE); // required
    };
    let blocked = match args.options.embedded {
        Some(_) => check_program(program, args.mount)?,
        None => None,
    };
    let mut settings = Settings::of(&args.options)?;
    let timeline = args.timeline.as_deref().map(timeline::Files::create);
    let timeline = timeline.transpose().map_err(RunError::Timeline)?;
    if let Some(files) = &timeline {
        settings.set("RINGVERBS_CAPTURE", files.capture().into());
        settings.set(RECORD, files.record().into());
        if args.options.explain.is_none() {
            settings.set("RINGVERBS_EXPLAIN", files.explanations().into());
            settings.set("RINGVERBS_EXPLAIN_FORMAT", "json".into());
        }
    }
    if args.mount {
        if variable(EMBEDDED).is_some() {
            // A library that is preloaded into this process would show the files of its devices
            // in the place of the host's.
            let mut command = Command::new("/proc/self/exe");
            let command = command.args(env::args_os().skip(1)).env_remove(EMBEDDED);
            return Err(RunError::Exec("/proc/self/exe".into(), command.exec()).into());
        }
        let devices = mounted(&args.options, &settings)?;
        mount::mount_files(&devices).map_err(RunError::Mount)?;
    }
    if blocked == Some(PreloadBlocked::OtherLibc) {
        // Its loader would refuse the program.
        settings.preload.clear();
    }
    let mut command = Command::new(program);
    command.args(arguments);
    let usage = match blocked {
        Some(_) if args.require_rdma.is_none() => None,
        _ => usage(args, &mut settings)?,
    };
    let error = if usage.is_none() && timeline.is_none() {
        command.envs(settings.variables(variable));
        command.exec()
    } else {
        let faults = settings.count_faults()?;
        command.envs(settings.variables(variable));
        match supervise::run(&mut command) {
            Ok(end) => {
                end_left_connections(&args.options);
                faults.iter().for_each(FaultReport::print);
                drop(faults);
                if let Some(Err(error)) = timeline.map(timeline::Files::finish) {
                    // The program's end is still to be told.
                    out::print_error(&error.into());
                }
                return Ok(match usage {
                    Some(usage) => report(args, program, end, usage.totals()?, usage),
                    None => end.mirror().into(),
                });
            }
            Err(error) => error,
        }
    };
    Err(RunError::Exec(program.clone(), error).into())
}

/// Runs a program whose processes send their records to a socket.
pub fn recorded(options: &Options, command: &[OsString], socket: &Path) -> Result<End, Error> {
    let [program, arguments @ ..] = command else {
        return Ok(End::Exited(0)); // required
    };
    if options.record.is_some() {
        return Err(RunError::RecordTwice.into());
    }
    check_program(program, false)?;
    let mut settings = Settings::of(options)?;
    settings.set_record(socket.to_owned())?;
    let faults = settings.count_faults()?;
    let mut command = Command::new(program);
    command.args(arguments).envs(settings.variables(variable));
    let end = supervise::run(&mut command);
    let end = end.map_err(|error| RunError::Exec(program.clone(), error))?;
    end_left_connections(options);
    faults.iter().for_each(FaultReport::print);
    Ok(end)
}

/// Tells the peers on other hosts of the program's processes that were killed, if no other process
/// does.
fn end_left_connections(options: &Options) {
    let host = options
        .embedded
        .as_deref()
        .and_then(|it| it.strip_prefix("roce:"));
    // If it fails, they find out by themselves.
    let _ = host.map(Network::end_left_connections);
}

/// Creates the file in which the program's processes count what they use, unless nobody reads
/// it: an outer `ringverbs run` does already, or the program must be process 1.
fn usage(args: &Args, settings: &mut Settings) -> Result<Option<Usage>, Error> {
    let is_counted = args.require_rdma.is_some()
        || variable(USAGE).is_none() && std::process::id() != 1 && args.options.embedded.is_some();
    let Some(directory) = settings.directory.as_deref().filter(|_| is_counted) else {
        return Ok(None);
    };
    let usage = Usage::create(directory)?;
    settings.set(USAGE, usage.path().into());
    Ok(Some(usage))
}

/// Exit status of a program that ended well but without the RDMA that `--require-rdma`
/// demands.
const TOO_LITTLE: u8 = 3;

/// Programs that only look at devices.
const QUERIES: [&str; 11] = [
    "fi_info",
    "ibstat",
    "ibstatus",
    "ibv_asyncwatch",
    "ibv_devices",
    "ibv_devinfo",
    "lstopo",
    "lstopo-no-graphics",
    "rdma",
    "show_gids",
    "ucx_info",
];

/// Ends as the program did; reports one that ended well but has not used RDMA.
fn report(args: &Args, program: &OsStr, end: End, totals: Totals, usage: Usage) -> ExitCode {
    // Removes the file: a signal may end this process now.
    drop(usage);
    let code = end.mirror();
    let required = args.require_rdma.unwrap_or(1);
    if end != End::Exited(0) || totals.bytes >= required {
        return code.into();
    }
    let name = Path::new(program).file_name().and_then(OsStr::to_str);
    if args.require_rdma.is_none() && name.is_some_and(|name| QUERIES.contains(&name)) {
        return code.into();
    }
    let used = match (totals.opened, totals.bytes) {
        (0, _) => "the program opened no RDMA device".to_owned(),
        (_, 0) => "the program opened an RDMA device, but no byte went over it".to_owned(),
        (_, bytes) => format!("{bytes} bytes went over RDMA, fewer than {required}"),
    };
    match args.require_rdma {
        Some(_) => {
            out::print_error(&RunError::Unused(used).into());
            TOO_LITTLE.into()
        }
        None => {
            out::print_warning(&used);
            code.into()
        }
    }
}

/// Adds the variables with which the plugin serves the devices.
fn plugin(options: &Options, settings: &mut Settings) -> Result<(), Error> {
    let plugin = match &options.plugin {
        Some(path) => find_plugin(path).ok_or_else(|| RunError::NoPlugin(vec![path.clone()]))?,
        None => find_library(find_plugin, RunError::NoPlugin)?,
    };
    // A relative path would depend on the working directory.
    let plugin = std::path::absolute(plugin)?;
    settings.plugin(&plugin, options.devices.as_deref(), variable)?;
    Ok(())
}

/// Checks that the library for embedded devices can be preloaded into a program. Returns why it
/// cannot if the program gets mounted files instead.
fn check_program(program: &OsStr, is_mounted: bool) -> Result<Option<PreloadBlocked>, RunError> {
    match program::find(program) {
        Some(path) => match program::preload_blocked(&path) {
            Some(reason @ (PreloadBlocked::Static | PreloadBlocked::OtherLibc)) if is_mounted => {
                Ok(Some(reason))
            }
            Some(reason) => Err(RunError::PreloadBlocked(path, reason)),
            None => Ok(None),
        },
        None => {
            let name = program.to_str();
            match name.filter(|name| unknown_device(name).is_none()) {
                Some(devices) => Err(RunError::DevicesAsProgram(devices.to_owned())),
                None => Ok(None),
            }
        }
    }
}

/// Returns the devices whose files are mounted.
fn mounted(options: &Options, settings: &Settings) -> Result<mount::Devices, RunError> {
    let given = options.embedded.as_deref().unwrap_or(DEFAULT_DEVICES);
    let node = read_node(options, given)?;
    let list = |text: String| text.split(',').map(str::to_owned).collect();
    let (names, cards): (_, Vec<String>) = match &node {
        Some(node) => (Some(node.names()), list(node.cards())),
        None => (options.name.clone(), options.card.clone()),
    };
    let gids = options.gids.as_deref().map(str::parse);
    Ok(mount::Devices {
        devices: node
            .as_ref()
            .map_or_else(|| given.to_owned(), Node::profiles),
        names: names.map(list).unwrap_or_default(),
        cards: cards.iter().filter_map(|name| Card::named(name)).collect(),
        gids: gids
            .transpose()
            .map_err(RunError::Gids)?
            .unwrap_or_default(),
        seed: options.seed,
        node: node.as_ref().map(Node::lines),
        directory: settings.directory.clone().unwrap_or_default(),
    })
}

/// Adds the variables that give a program embedded devices.
fn embedded(devices: &str, directory: Option<&Path>, settings: &mut Settings) -> Result<(), Error> {
    if let Some(device) = unknown_device(devices) {
        return Err(RunError::UnknownDevice(device.to_owned()).into());
    }
    let count = devices.split(',').count();
    if count > MAX_DEVICES {
        return Err(RunError::TooManyDevices(count).into());
    }
    let library = find_preload()?;
    let directory = directory.map_or_else(Network::default_directory, Path::to_owned);
    let directory = Network::own_directory(&directory).map_err(|error| {
        let reason = match error {
            KernelError::Invalid { what, .. } => what.to_owned(),
            error => error.to_string(),
        };
        RunError::Directory(directory, reason)
    })?;
    settings.preload(&library)?;
    settings.set(EMBEDDED, devices.into());
    settings.set("RINGVERBS_DIRECTORY", directory.clone().into());
    settings.directory = Some(directory);
    Ok(())
}

/// Finds the library for embedded devices.
fn find_preload() -> Result<PathBuf, RunError> {
    let find = |directory: &Path| Some(directory.join(PRELOAD)).filter(|path| path.is_file());
    find_library(find, RunError::NoPreload)
}

/// Refuses options that need embedded devices.
fn refuse_without_devices(options: &Options) -> Result<(), RunError> {
    let given = [
        ("--directory", options.directory.is_some()),
        ("--name", options.name.is_some()),
        ("--gids", options.gids.is_some()),
        ("--card", !options.card.is_empty()),
        ("--link", !options.link.is_empty()),
        ("--node", options.node.is_some()),
        ("--seed", options.seed.is_some()),
        ("--patience", options.patience.is_some()),
        ("--explain", options.explain.is_some()),
        ("--chaos", options.chaos.is_some()),
        ("--faults", options.faults.is_some()),
        ("--record-faults", options.record_faults.is_some()),
        ("--capture", options.capture.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        Some((option, _)) => Err(RunError::WithoutDevices(option)),
        None => Ok(()),
    }
}

/// Checks that records can be written, before the program starts: creates a file beside them, and
/// removes it.
fn check_record(path: &Path) -> std::io::Result<()> {
    // That of this process, which records nothing.
    let own = embedded::process_path(path);
    let created = fs::File::create(&own).and_then(|mut file| file.write_all(b"\n"));
    let _ = fs::remove_file(own);
    created
}

/// Returns where an option lets reports go: `1` for standard error, or the file, whose path must
/// not depend on the working directory and which must be writable.
fn reports(option: &'static str, target: &Path) -> Result<OsString, Error> {
    if target == Path::new("1") {
        return Ok(target.into());
    }
    let path = std::path::absolute(target)?;
    let mut options = fs::OpenOptions::new();
    // A FIFO that nobody reads is an error.
    options.custom_flags(libc::O_NONBLOCK);
    match options.append(true).create(true).open(&path) {
        Ok(_) => Ok(path.into()),
        Err(error) => Err(RunError::Reports(option, path, error).into()),
    }
}

/// Reads the node file, if one is named.
fn read_node(options: &Options, devices: &str) -> Result<Option<Node>, RunError> {
    let Some(path) = &options.node else {
        return Ok(None);
    };
    if devices != DEFAULT_DEVICES {
        return Err(RunError::NodeWithDevices(devices.to_owned()));
    }
    let refused = |reason: String| RunError::Node(path.clone(), reason);
    let text = fs::read_to_string(path).map_err(|error| refused(format!(" {error}")))?;
    let online = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = memory.strip_prefix("MemTotal:").unwrap_or_default();
    let memory = memory
        .split_whitespace()
        .next()
        .and_then(|it| it.parse().ok());
    let node = Node::parse(&text, &online, memory.unwrap_or(0))
        .map_err(|error| refused(error.to_string()))?;
    Ok(Some(node))
}

/// Checks the cards of devices.
fn check_cards(cards: &[String], devices: &str) -> Result<(), RunError> {
    if let Some(name) = cards.iter().find(|name| Card::named(name).is_none()) {
        return Err(RunError::UnknownCard(name.clone()));
    }
    match devices.split(',').count() {
        count if cards.len() == 1 || cards.len() == count => Ok(()),
        count => Err(RunError::Cards(cards.len(), count)),
    }
}

/// Checks a GID table for devices.
fn check_gids(list: &str, devices: &str) -> Result<(), RunError> {
    list.parse::<GidTable>().map_err(RunError::Gids)?;
    let has_own = |device: &str| device.starts_with("roce") && !device.contains(':');
    match devices.split(',').any(has_own) {
        true => Ok(()),
        false => Err(RunError::GidsWithoutDevice(devices.to_owned())),
    }
}

/// Returns the first of a list of devices that does not exist.
fn unknown_device(devices: &str) -> Option<&str> {
    let host = devices.strip_prefix("roce:");
    if host.is_some_and(|host| !host.is_empty() && !host.contains(',')) {
        return None;
    }
    let is_profile = |device: &&str| Network::profiles().any(|(name, _)| name == *device);
    devices.split(',').find(|device| !is_profile(device))
}

/// Finds a library: one that was built or installed with this command, the one that it carries,
/// or one that is installed.
fn find_library(
    find: impl Fn(&Path) -> Option<PathBuf>,
    missing: fn(Vec<PathBuf>) -> RunError,
) -> Result<PathBuf, RunError> {
    let (own, system) = (own_directories(), system_directories());
    let found = own.iter().filter_map(|path| find(path));
    // A copy of a command that carries them may be where others can put a library beside it.
    let mut found = found.filter(|path| !carried::exist() || carried::is_safe_file(path));
    if let Some(found) = found.next() {
        return Ok(found);
    }
    let unpacked = carried::unpack();
    let directories = unpacked.iter().flatten().chain(&system);
    let found = directories.into_iter().find_map(|path| find(path));
    match (found, unpacked) {
        (Some(found), _) => Ok(found),
        (None, Err(error)) => Err(error),
        (None, Ok(_)) => Err(missing([own, system].concat())),
    }
}

/// Returns the directories of libraries that belong to this command: its own, as in
/// `target/dist`, and those of its prefix.
fn own_directories() -> Vec<PathBuf> {
    let Some(command) = env::current_exe().ok() else {
        return Vec::new();
    };
    let beside = command.parent().map(Path::to_owned);
    let prefix = beside.as_deref().and_then(Path::parent);
    let prefix = prefix.map(|prefix| {
        let providers = provider_directories(prefix);
        [prefix.join("lib/ringverbs")].into_iter().chain(providers)
    });
    beside
        .into_iter()
        .chain(prefix.into_iter().flatten())
        .collect()
}

/// Returns the directories in which the plugin is installed.
fn system_directories() -> Vec<PathBuf> {
    provider_directories(Path::new("/usr")).into()
}

/// Returns the directories of libibverbs's providers below a prefix.
fn provider_directories(prefix: &Path) -> [PathBuf; 3] {
    let triplet = format!("lib/{}-linux-gnu/libibverbs", env::consts::ARCH);
    [
        prefix.join(triplet),
        prefix.join("lib64/libibverbs"),
        prefix.join("lib/libibverbs"),
    ]
}

/// Returns the plugin's file: `path` itself, or the first one in that directory.
/// All names lead to the same file, and a preloaded plugin ignores its name.
fn find_plugin(path: &Path) -> Option<PathBuf> {
    if path.is_file() {
        return Some(path.to_owned());
    }
    let entries = fs::read_dir(path).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let name = names.filter(|name| stem(name) == Some(STEM)).min()?;
    Some(path.join(name))
}

/// Returns `NAME` of `NAME-rdmavN.so`.
fn stem(name: &str) -> Option<&str> {
    let (stem, number) = name.strip_suffix(".so")?.rsplit_once("-rdmav")?;
    let number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    number.then_some(stem)
}

/// Variables of the program's environment.
#[derive(Clone, Debug, Default)]
struct Settings {
    preload: Vec<PathBuf>,
    /// Directory of the embedded devices' network.
    directory: Option<PathBuf>,
    /// Faults that the program gets.
    faults: Option<FaultFile>,
    others: Vec<(&'static str, OsString)>,
}

/// Prepends `first` to a variable's list, which colons separate.
fn prepend(first: &OsStr, list: Option<OsString>) -> OsString {
    let mut result = first.to_owned();
    if let Some(rest) = list.filter(|rest| !rest.is_empty()) {
        result.push(":");
        result.push(rest);
    }
    result
}

impl Settings {
    /// Returns the variables that options stand for.
    fn of(options: &Options) -> Result<Self, Error> {
        let mut settings = Self::default();
        if let Some(given) = &options.embedded {
            if let Some(limit) = FileSizeLimit::exceeded() {
                return Err(RunError::FileSize(limit).into());
            }
            let node = read_node(options, given)?;
            let devices = &node.as_ref().map_or_else(|| given.clone(), Node::profiles);
            embedded(devices, options.directory.as_deref(), &mut settings)?;
            if let Some(gids) = &options.gids {
                check_gids(gids, devices)?;
                settings.set("RINGVERBS_GIDS", gids.into());
            }
            if let Some(names) = &options.name {
                device_names(names, devices.split(',').count()).map_err(RunError::Names)?;
                settings.set("RINGVERBS_NAMES", names.into());
            }
            if !options.card.is_empty() {
                check_cards(&options.card, devices)?;
                settings.set("RINGVERBS_CARD", options.card.join(",").into());
            }
            if let Some(node) = &node {
                settings.set("RINGVERBS_NAMES", node.names().into());
                settings.set("RINGVERBS_CARD", node.cards().into());
                settings.set_node(node)?;
            }
            if !options.link.is_empty() {
                let count = devices.split(',').count();
                if ![1, count].contains(&options.link.len()) {
                    return Err(RunError::Links(options.link.len(), count).into());
                }
                let links: Vec<&str> = options.link.iter().map(|link| &*link.text).collect();
                settings.set("RINGVERBS_LINK", links.join(";").into());
            }
            if let Some(seed) = options.seed {
                settings.set("RINGVERBS_SEED", seed.to_string().into());
            }
            if let Some(patience) = options.patience {
                if !devices.starts_with("roce:") {
                    return Err(RunError::PatienceWithoutHost(devices.clone()).into());
                }
                settings.set("RINGVERBS_PATIENCE", patience.to_string().into());
            }
            chaos::set(options, &mut settings)?;
            if let Some(path) = &options.faults {
                let file = FaultFile::read(path)?;
                settings.set("RINGVERBS_FAULTS", file.absolute()?);
                settings.faults = Some(file);
            }
            if let Some(path) = &options.record_faults {
                let path = std::path::absolute(path)?;
                let refused = |error| RunError::FaultRecord(path.clone(), error);
                check_record(&path).map_err(refused)?;
                settings.set("RINGVERBS_RECORD_FAULTS", path.into());
            }
            if let Some(target) = &options.explain {
                settings.set("RINGVERBS_EXPLAIN", reports("--explain", target)?);
                if let Some(form) = &options.explain_format {
                    settings.set("RINGVERBS_EXPLAIN_FORMAT", form.into());
                }
            }
        }
        if options.embedded.is_none() {
            refuse_without_devices(options)?;
        }
        settings.set_capture(options)?;
        settings.record(options)?;
        if options.embedded.is_none() || options.plugin.is_some() || options.devices.is_some() {
            plugin(options, &mut settings)?;
        }
        Ok(settings)
    }

    /// As [`of`](Self::of), for devices of the host that the system's providers serve, unless the
    /// options ask for ours.
    fn of_host(options: &Options) -> Result<Self, Error> {
        refuse_without_devices(options)?;
        let mut settings = Self::default();
        settings.record(options)?;
        if options.plugin.is_some() || options.devices.is_some() {
            plugin(options, &mut settings)?;
        }
        Ok(settings)
    }

    /// Adds the variables of a record, if one is asked for.
    fn record(&mut self, options: &Options) -> Result<(), Error> {
        let Some(path) = &options.record else {
            return Ok(());
        };
        let path = std::path::absolute(path)?;
        let refused = |error| RunError::Record(path.clone(), error);
        check_record(&path).map_err(refused)?;
        self.set_record(path)
    }

    /// Adds the variables of a capture, which must be writable. Its path must not depend on the
    /// working directory.
    fn set_capture(&mut self, options: &Options) -> Result<(), Error> {
        let Some(path) = &options.capture else {
            return Ok(());
        };
        let path = std::path::absolute(path)?;
        let refused = |error| RunError::Capture(path.clone(), error);
        CaptureOptions::new(&path).check().map_err(refused)?;
        self.set("RINGVERBS_CAPTURE", path.clone().into());
        if let Some(snap) = &options.capture_snap {
            self.set("RINGVERBS_CAPTURE_SNAP", snap.text.clone().into());
        }
        if let Some(ring) = &options.capture_ring {
            self.set("RINGVERBS_CAPTURE_RING", ring.text.clone().into());
        }
        Ok(())
    }

    /// Adds the variable of a record: a file, or a socket. The library for embedded devices writes
    /// it, on other devices as well.
    fn set_record(&mut self, target: PathBuf) -> Result<(), Error> {
        self.preload_first()?;
        self.set(RECORD, target.into());
        Ok(())
    }

    /// Adds the library for embedded devices, before the plugin.
    fn preload_first(&mut self) -> Result<(), RunError> {
        let library = find_preload()?;
        if !self.preload.contains(&library) {
            self.preload(&library)?;
            self.preload.rotate_right(1);
        }
        Ok(())
    }

    /// Writes what the preloaded library reads of a node to the network's directory. The name
    /// follows from the content, so that programs with the same node share the file.
    fn set_node(&mut self, node: &Node) -> Result<(), Error> {
        let Some(directory) = &self.directory else {
            return Ok(());
        };
        let lines = node.lines();
        let mut hasher = DefaultHasher::new();
        lines.hash(&mut hasher);
        let path = directory.join(format!("node-{:016x}", hasher.finish()));
        if fs::read(&path).is_ok_and(|found| found == lines.as_bytes()) {
            self.set("RINGVERBS_NODE", path.into());
            return Ok(());
        }
        // A program that reads it meanwhile sees it whole.
        let new = path.with_extension(std::process::id().to_string());
        fs::write(&new, lines)?;
        fs::rename(&new, &path)?;
        self.set("RINGVERBS_NODE", path.into());
        Ok(())
    }

    /// Lets the program's processes count the faults that they get.
    fn count_faults(&mut self) -> Result<Option<FaultReport>, Error> {
        let (Some(file), Some(directory)) = (self.faults.take(), &self.directory) else {
            return Ok(None);
        };
        let report = file.count(directory)?;
        self.set("RINGVERBS_FAULT_COUNTS", report.path().into());
        Ok(Some(report))
    }

    fn set(&mut self, name: &'static str, value: OsString) {
        self.others.push((name, value));
    }

    /// Adds a library to preload.
    fn preload(&mut self, library: &Path) -> Result<(), RunError> {
        let bytes = library.as_os_str().as_encoded_bytes();
        if bytes.iter().any(|byte| b" :;".contains(byte)) {
            return Err(RunError::Separator(library.to_owned()));
        }
        self.preload.push(library.to_owned());
        Ok(())
    }

    /// Adds the plugin's variables, given their previous values.
    fn plugin(
        &mut self,
        plugin: &Path,
        devices: Option<&str>,
        previous: impl Fn(&str) -> Option<OsString>,
    ) -> Result<(), RunError> {
        self.preload(plugin)?;
        // libibverbs appends the version of its private interface.
        let name = plugin.file_name().and_then(OsStr::to_str).and_then(stem);
        if let Some(name) = name {
            let stem = plugin.with_file_name(name);
            let drivers = prepend(stem.as_os_str(), previous("RDMAV_DRIVERS"));
            self.set("RDMAV_DRIVERS", drivers);
        }
        let devices = match devices {
            Some(devices) => devices.into(),
            None => previous("RINGVERBS_DEVICES").unwrap_or_else(|| DEVICES.into()),
        };
        self.set("RINGVERBS_DEVICES", devices);
        Ok(())
    }

    /// Returns the variables to set, given their previous values.
    fn variables(
        self,
        previous: impl Fn(&str) -> Option<OsString>,
    ) -> Vec<(&'static str, OsString)> {
        let libraries = self.preload.iter().rev();
        let list = libraries.fold(previous("LD_PRELOAD"), |rest, library| {
            Some(prepend(library.as_os_str(), rest))
        });
        let list = list.map(|list| ("LD_PRELOAD", list));
        list.into_iter().chain(self.others).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_checked() {
        assert!(check_gids("v2,none,v2-ipv4", "ib,roce").is_ok());
        let said = |list, devices| check_gids(list, devices).unwrap_err().to_string();
        assert!(said("v3", "roce").starts_with("--gids: there is no GID \"v3\"; use v1,"));
        assert!(said("none", "roce").starts_with("--gids: all entries are empty"));
        for devices in ["ib", "roce:192.0.2.1"] {
            let expected = format!("--gids: {devices} has no roce device without an address");
            assert_eq!(said("v2", devices), expected);
        }
    }

    #[test]
    fn the_plugin_precedes_previous_settings() {
        let previous = |name: &str| match name {
            "LD_PRELOAD" => Some("/lib/other.so".into()),
            "RDMAV_DRIVERS" => Some("rxe".into()),
            _ => None,
        };
        let plugin = Path::new("/opt/x/libringverbs-rdmav34.so");
        type Previous<'a> = &'a dyn Fn(&str) -> Option<OsString>;
        let variables = |devices, previous: Previous| {
            let mut settings = Settings::default();
            settings.plugin(plugin, devices, previous).unwrap();
            settings.variables(previous)
        };
        let found = variables(None, &previous);
        let expected: Vec<(&str, OsString)> = vec![
            (
                "LD_PRELOAD",
                "/opt/x/libringverbs-rdmav34.so:/lib/other.so".into(),
            ),
            ("RDMAV_DRIVERS", "/opt/x/libringverbs:rxe".into()),
            ("RINGVERBS_DEVICES", "rxe,mlx5".into()),
        ];
        assert_eq!(found, expected);
        assert_eq!(variables(None, &|_| Some("mlx5".into()))[2].1, "mlx5");
        assert_eq!(variables(Some("rxe"), &|_| Some("mlx5".into()))[2].1, "rxe");
        let spaced = Path::new("/a b/libringverbs-rdmav34.so");
        assert!(Settings::default().preload(spaced).is_err());
        // The library for embedded devices precedes the plugin, whatever the order of calls.
        let mut both = Settings::default();
        both.preload(Path::new("/opt/x/embedded.so")).unwrap();
        both.plugin(plugin, None, previous).unwrap();
        let list = "/opt/x/embedded.so:/opt/x/libringverbs-rdmav34.so:/lib/other.so";
        assert_eq!(both.variables(previous)[0], ("LD_PRELOAD", list.into()));
    }

    #[test]
    fn stem_of_a_plugin_file_name() {
        assert_eq!(stem("libringverbs-rdmav34.so"), Some("libringverbs"));
        for other in ["libringverbs.so", "libringverbs-rdmav.so", "x-rdmav3a.so"] {
            assert_eq!(stem(other), None, "{other}");
        }
    }
}
