//! `cargo xtask guest`: a machine with rdma_rxe, for a command or a shell.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use crate::suite::TempDir;
use crate::{driver, native, static_guest};
use anyhow::Result;
use rxe_tests::guest::vm::{self, JobExit, Line};
use rxe_tests::guest::{Hardware, Job, Suite, tree};

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// The Debian release: trixie, bookworm, sid, or trixie-arm64
    #[arg(long, default_value = "trixie")]
    suite: Suite,
    /// A kernel package of that release other than linux-image-amd64 (-arm64)
    #[arg(long)]
    kernel: Option<String>,
    /// A shell command to run in the guest, in the folder of the share
    #[arg(long, conflicts_with = "shell")]
    run: Option<String>,
    /// Attach this terminal to a shell in the guest
    #[arg(long)]
    shell: bool,
    /// A folder that the guest sees as /share, readable and writable
    #[arg(long)]
    share: Option<PathBuf>,
    /// A folder whose contents the guest finds in /opt/ringverbs, such as
    /// target/dist, or target/dist-aarch64
    #[arg(long)]
    plugin: Option<PathBuf>,
    /// The share is a folder with the Rust crate's programs and scripts, built
    /// now and found by their names
    #[arg(long, conflicts_with_all = ["share", "shell"])]
    native: bool,
    /// Do not set up rxe0 before the command
    #[arg(long)]
    no_rxe: bool,
    /// A guest of busybox, kernel modules and our static programs, without
    /// Debian or any shared library; it runs its short suite by default
    #[arg(long = "static", conflicts_with_all = ["shell", "share", "native", "plugin", "no_rxe"])]
    without_libraries: bool,
    /// Seconds that the command may take
    #[arg(long, default_value_t = 600)]
    limit: u64,
}

/// Builds the guest if it is not cached, boots it and runs the command.
pub fn guest(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.without_libraries {
        let job = arguments
            .run
            .as_deref()
            .unwrap_or(static_guest::SHORT_SUITE);
        let limit = limit(false, arguments.limit);
        let kernel = arguments.kernel.as_deref();
        let ended = static_guest::run(arguments.suite, kernel, job, limit, show)?;
        return Ok(report(&ended));
    }
    let image = tree::image(arguments.suite, arguments.kernel.as_deref())?;
    let Some(script) = arguments
        .run
        .clone()
        .or_else(|| arguments.shell.then(String::new))
    else {
        println!("{}", image.dir.display());
        return Ok(ExitCode::SUCCESS);
    };
    let architecture = arguments.suite.architecture();
    let driver = if arguments.no_rxe {
        None
    } else {
        Some(driver::build_for(architecture)?)
    };
    let mut setup = String::new();
    let mut share = arguments.share.clone();
    // Removed when the guest has ended.
    let native = arguments
        .native
        .then(|| TempDir::new("native"))
        .transpose()?;
    if let Some(folder) = &native {
        native::build(architecture, &folder.0)?;
        share = Some(folder.0.clone());
        setup.push_str("export PATH=/share:$PATH\n");
    }
    if !arguments.no_rxe {
        setup.push_str("rxe-driver setup > /run/rxe || exit 1\n. /run/rxe\n");
    }
    let job = Job {
        script: format!("{setup}{script}"),
        share,
        plugin: arguments.plugin.clone(),
        driver,
        shell: arguments.shell,
        limit: limit(arguments.shell, arguments.limit),
        hardware: Hardware::default(),
    };
    run(&image, &job)
}

impl Arguments {
    /// Returns arguments that run a command with the Rust crate's programs.
    pub fn native(run: &str, kernel: Option<&str>, limit: u64) -> Arguments {
        Arguments {
            suite: Suite::Trixie,
            kernel: kernel.map(str::to_owned),
            run: Some(run.to_owned()),
            shell: false,
            share: None,
            plugin: None,
            native: true,
            no_rxe: false,
            without_libraries: false,
            limit,
        }
    }
}

/// Returns the time limit of a command or a shell.
pub fn limit(shell: bool, seconds: u64) -> Duration {
    Duration::from_secs(if shell { 86_400 } else { seconds })
}

/// Boots the guest for the job, prints its output, and returns its exit status.
pub fn run(image: &tree::Image, job: &Job) -> Result<ExitCode> {
    Ok(report(&vm::run(image, job, show)?))
}

/// Prints a line of the guest.
pub fn show(line: Line<'_>) {
    match line {
        Line::Text(text) | Line::Record(text) => println!("{text}"),
    }
}

/// Prints times and exit status of a job, and returns the latter.
pub fn report(ended: &JobExit) -> ExitCode {
    eprintln!(
        "boot {:.1} s, run {:.1} s, exit status {}",
        ended.boot_time.as_secs_f64(),
        ended.run_time.as_secs_f64(),
        ended.status
    );
    ExitCode::from(u8::try_from(ended.status).unwrap_or(1))
}
