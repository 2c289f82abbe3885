//! `ringverbs check`: runs a program on embedded devices, or on those of the host, and reports its
//! errors that no device reports. The library for embedded devices finds them; see docs/check.md.

use std::ffi::OsString;
use std::fs::{self, File};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use uverbs::environment::variable;

use super::chaos::ChaosSeed;
use super::faults::FaultReport;
use super::program::PreloadBlocked;
use super::search::{self, Search};
use super::{
    DEFAULT_DEVICES, EMBEDDED, Options, RunError, Settings, check_program, reports, supervise,
    values,
};
use crate::error::Error;
use crate::temporary::TemporaryFolder;

/// Exit status of a program with errors.
const HAS_ERRORS: u8 = 99;

/// Arguments of `check`.
#[derive(clap::Args)]
#[command(after_help = "\
What is reported, why it matters and how to mend it: docs/check.md.
Example: ringverbs check -- ibv_rc_pingpong -g 1 localhost")]
pub struct Args {
    #[command(flatten)]
    options: Options,
    /// Check the program on the host's devices, such as rdma_rxe or a card, without the rules that
    /// need embedded ones
    #[arg(long, conflicts_with_all = ["embedded", "guard", "early_reads"])]
    host: bool,
    /// Append reports to a file [default: standard error]
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Errors that are known: a rule and text of the report on each line
    #[arg(long, value_name = "FILE")]
    suppressions: Option<PathBuf>,
    /// Also report what fails on other devices; this is no error
    #[arg(long)]
    advice: bool,
    /// Write-protect buffers in flight, once some have changed, to find who writes to them
    #[arg(long)]
    guard: bool,
    /// Protect receives against reads before their completions, where they have pages of their own
    #[arg(long)]
    early_reads: bool,
    /// Exit status if there are errors; 0: the program's
    #[arg(long, value_name = "N", default_value_t = HAS_ERRORS)]
    error_status: u8,
    /// Run the program without chaos, and then with these many seeds from that of --chaos on [default:
    /// 1], until it fails or hangs; then look for the fewest decisions with which it does
    #[arg(long, value_name = "N", requires = "chaos", value_parser = values::runs)]
    runs: Option<NonZeroU32>,
    /// Seconds after which a program hangs
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 60,
        requires = "runs",
        value_parser = values::seconds
    )]
    timeout: u64,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true)]
    command: Vec<OsString>,
}

/// A file to which the processes of the program append a byte for each error.
struct Errors(PathBuf);

impl Errors {
    fn create(directory: &Path) -> Result<Self, Error> {
        let path = directory.join(format!("check-{}", std::process::id()));
        File::create(&path)?;
        Ok(Self(path))
    }

    fn count(&self) -> u64 {
        fs::metadata(&self.0).map_or(0, |it| it.len())
    }
}

impl Drop for Errors {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Returns the variables of embedded devices.
fn embedded_settings(args: &Args) -> Result<Settings, Error> {
    let given = args.options.embedded.clone();
    Settings::of(&Options {
        embedded: given.or(Some(DEFAULT_DEVICES.to_owned())),
        // The search has seeds of its own.
        chaos: args.options.chaos.filter(|_| args.runs.is_none()),
        ..args.options.clone()
    })
}

/// Returns the variables for devices of the host, which the system's providers serve unless ours
/// are asked for.
fn host_settings(options: &Options) -> Result<Settings, Error> {
    let mut settings = Settings::of_host(options)?;
    settings.preload_first()?;
    settings.set("RINGVERBS_CHECK_HOST", "1".into());
    // Of `ringverbs env`.
    settings.set(EMBEDDED, "".into());
    Ok(settings)
}

/// Creates the folder of the file that counts errors, where there is no network's.
fn temporary_folder() -> Result<TemporaryFolder, RunError> {
    let refused = |(path, error)| RunError::Reports("check", path, error);
    TemporaryFolder::new("check").map_err(refused)
}

/// Runs the program until it ends.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let [program, arguments @ ..] = &args.command[..] else {
        return Ok(ExitCode::FAILURE); // required
    };
    match check_program(program, false) {
        Err(RunError::PreloadBlocked(path, PreloadBlocked::Static)) => {
            return Err(RunError::StaticUnchecked(path).into());
        }
        checked => _ = checked?,
    }
    let mut settings = match args.host {
        true => host_settings(&args.options)?,
        false => embedded_settings(args)?,
    };
    let report = args.report.as_deref().unwrap_or(Path::new("1"));
    settings.set("RINGVERBS_CHECK", reports("--report", report)?);
    if let Some(path) = &args.suppressions {
        let unreadable = |error| RunError::Suppressions(path.clone(), error);
        let path = fs::canonicalize(path).map_err(unreadable)?;
        settings.set("RINGVERBS_CHECK_SUPPRESSIONS", path.into());
    }
    if args.advice {
        settings.set("RINGVERBS_CHECK_ADVICE", "1".into());
    }
    if args.guard {
        settings.set("RINGVERBS_CHECK_GUARD", "1".into());
    }
    if args.early_reads {
        settings.set("RINGVERBS_CHECK_EARLY_READS", "1".into());
    }
    let temporary = match settings.directory {
        Some(_) => None,
        None => Some(temporary_folder()?),
    };
    let folder = temporary.as_ref().map(|it| it.path().to_owned());
    let directory = settings.directory.clone().or(folder).unwrap_or_default();
    if let Some(runs) = args.runs {
        let search = Search {
            command: &args.command,
            first: args.options.chaos.and_then(ChaosSeed::given).unwrap_or(1),
            runs,
            timeout: Duration::from_secs(args.timeout),
            error_status: args.error_status,
        };
        return search::run(&search, &settings, &directory);
    }
    let faults = settings.count_faults()?;
    let errors = Errors::create(&directory)?;
    settings.set("RINGVERBS_CHECK_ERRORS", errors.0.clone().into());
    let mut command = Command::new(program);
    command.args(arguments).envs(settings.variables(variable));
    let end = supervise::run(&mut command);
    let end = end.map_err(|error| RunError::Exec(program.clone(), error))?;
    let count = errors.count();
    faults.iter().for_each(FaultReport::print);
    // A signal may end this process now.
    drop((errors, faults, temporary));
    let code = end.mirror();
    Ok(match (count, args.error_status) {
        (0, _) | (_, 0) => code,
        (_, status) => status,
    }
    .into())
}
