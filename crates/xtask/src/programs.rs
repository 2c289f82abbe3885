//! `cargo xtask programs`: programs of the system on embedded devices, with rdma-core's
//! libmlx5 and with ours.

mod frameworks;
mod list;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rxe_tests::compare::{Results, Verdict};
use rxe_tests::driver::embedded::COLLECTIVES;
use rxe_tests::guest::host::{self, which};
use rxe_tests::guest::vm::{self, Line};
use rxe_tests::guest::{Job, Suite, tree};
use rxe_tests::record::{Case, Outcome, Provider, Record};

use crate::libmlx5::LIBMLX5;
use crate::softhca::known_failures;
use crate::suite::{self, PLUGIN, TempDir};
use crate::{dist, driver};

/// Programs that the lists and the tests of crates/preload run, and their packages.
pub const NEEDS: &[(&str, &str)] = &[
    ("ibv_devinfo", "ibverbs-utils"),
    ("/etc/libibverbs.d/mlx4.driver", "ibverbs-providers"),
    ("/usr/include/infiniband/verbs.h", "libibverbs-dev"),
    ("/usr/include/rdma/rdma_cma.h", "librdmacm-dev"),
    ("rping", "rdmacm-utils"),
    ("ib_send_bw", "perftest"),
    ("fi_pingpong", "libfabric-bin"),
    ("ucx_perftest", "ucx-utils"),
    ("mpirun", "openmpi-bin"),
    ("mpicc", "libopenmpi-dev"),
    ("cc", "gcc"),
];

/// The folder of rdma-core's compressed tests in Debian's python3-pyverbs.
const PYVERBS: &str = "/usr/share/doc/rdma-core/tests";

/// The folder of rdma-core's tests in guests' trees.
const TREE_PYVERBS: &str = "/opt/rdma-core/tests";

/// The MPI program.
const COLLECTIVES_SOURCE: &str = "crates/preload/tests/c/collectives.c";

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// All cases, and rdma-core's tests (pyverbs): about ten minutes
    #[arg(long)]
    full: bool,
    /// The kind of port: roce or ib
    #[arg(long, default_value = "roce")]
    port: Vec<String>,
    /// Only cases whose group and name contain this (or one of these)
    #[arg(long)]
    filter: Vec<String>,
    /// Run the scripts of rxe-tests/frameworks instead, which install what they need
    #[arg(long, conflicts_with_all = ["full", "in_place", "suite"])]
    frameworks: bool,
    /// Only list the scripts, with their duration and where the programs come from
    #[arg(long, requires = "frameworks")]
    list: bool,
    /// Also those that download or build for minutes; without this, only if named by --filter
    #[arg(long, requires = "frameworks")]
    large: bool,
    /// Write the results into the table of docs/embedded.md
    #[arg(long, requires = "frameworks")]
    write: bool,
    /// Replace rdma-core's libmlx5.so.1 by ours, instead of preloading the plugin; needs
    /// root
    #[arg(long)]
    in_place: bool,
    /// Run them in a guest of this Debian release, also trixie-arm64
    #[arg(long)]
    suite: Option<Suite>,
    /// With --suite, run them in its tree on this machine, without a guest; needs root
    #[arg(long, requires = "suite")]
    chroot: bool,
    /// A folder built by `cargo xtask dist`, instead of building now
    #[arg(long)]
    dist: Option<PathBuf>,
}

impl Arguments {
    /// Returns the plugin's folder.
    fn dist(&self) -> Result<PathBuf> {
        match (&self.dist, self.suite) {
            (Some(dist), _) => Ok(std::path::absolute(dist)?),
            (None, Some(suite)) => dist::dist_for(suite.architecture()),
            (None, None) => dist::dist(),
        }
    }
}

/// Runs all cases on a kind of port, or the short list in a guest, for `cargo xtask test`.
pub fn full(suite: Option<Suite>, port: &str, filter: &[String]) -> Result<Outcomes> {
    let arguments = Arguments {
        full: suite.is_none(),
        port: vec![port.to_owned()],
        filter: filter.to_vec(),
        frameworks: false,
        list: false,
        large: false,
        write: false,
        in_place: false,
        suite,
        chroot: false,
        dist: None,
    };
    let outcomes = run_on_port(&arguments, &arguments.dist()?, port)?;
    println!("{}", outcomes.text);
    Ok(outcomes)
}

/// Results of the lists on one kind of port.
pub struct Outcomes {
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
    /// Duration of each part.
    pub times: BTreeMap<String, Duration>,
    /// Tables and failures.
    pub text: String,
}

/// Runs the lists; prints each result immediately, and tables at the end.
pub fn programs(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.frameworks {
        return run_frameworks(arguments);
    }
    let dist = arguments.dist()?;
    let mut failed = 0;
    let mut texts = Vec::new();
    for port in &arguments.port {
        let outcomes = run_on_port(arguments, &dist, port)?;
        failed += outcomes.failed;
        texts.push(format!(
            "{}{port}: {} passed, {} failed, {} skipped",
            outcomes.text, outcomes.passed, outcomes.failed, outcomes.skipped
        ));
    }
    println!("\n{}", texts.join("\n\n"));
    Ok(match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

fn run_frameworks(arguments: &Arguments) -> Result<ExitCode> {
    let options = frameworks::Options {
        filter: &arguments.filter,
        large: arguments.large,
        write: arguments.write,
    };
    if arguments.list {
        frameworks::list(&options);
        return Ok(ExitCode::SUCCESS);
    }
    let dist = match &arguments.dist {
        Some(dist) => std::path::absolute(dist)?,
        None => dist::dist_with_command()?,
    };
    Ok(match frameworks::run(&options, &dist)? {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

fn run_on_port(arguments: &Arguments, dist: &Path, port: &str) -> Result<Outcomes> {
    let gid = if port.starts_with("ib") { "0" } else { "1" };
    let mut options = ["suite", "--port", port, "--gid", gid]
        .map(str::to_owned)
        .to_vec();
    if !arguments.full {
        options.push("--short".to_owned());
    }
    for filter in &arguments.filter {
        options.extend(["--filter".to_owned(), filter.clone()]);
    }
    let folder = match arguments.suite {
        Some(_) => Path::new("/opt/ringverbs"),
        None => dist,
    };
    if arguments.full && arguments.suite.is_some() {
        options.extend(["--pyverbs", TREE_PYVERBS].map(str::to_owned));
    }
    let mut named = vec![("--embedded", dist::PRELOAD), ("--plugin", PLUGIN)];
    if arguments.in_place {
        named.push(("--in-place", LIBMLX5));
    }
    for (option, name) in named {
        let path = folder.join(name).display().to_string();
        options.extend([option.to_owned(), path]);
    }
    let began = Instant::now();
    let mut results = Results::default();
    let mut last = Instant::now();
    let mut handle_line = |line: Line<'_>| match line {
        Line::Record(line) => match Record::parse(line) {
            Ok(record) => {
                if let Record::Case(case) = &record {
                    println!("{}", result_line(case));
                    let part = format!("{} [{}]", case.group, case.provider);
                    results.add_time(&part, last.elapsed());
                }
                last = Instant::now();
                results.add(record);
            }
            Err(error) => {
                println!("unreadable record: {error}");
                results.unreadable += 1;
            }
        },
        Line::Text(line) => println!("{line}"),
    };
    let succeeded = match arguments.suite {
        Some(suite) if arguments.chroot => {
            let packages = if arguments.full { FRAMEWORKS } else { "" };
            run_in_chroot(suite, packages, dist, &options, &mut handle_line)?
        }
        Some(suite) => run_in_guest(suite, dist, &options, &mut handle_line)?,
        None => run_on_host(port, arguments, &options, &mut handle_line)?,
    };
    Ok(judge(results, port, succeeded, began.elapsed()))
}

/// Runs the driver on this machine.
fn run_on_host(
    port: &str,
    arguments: &Arguments,
    options: &[String],
    handle_line: &mut dyn FnMut(Line<'_>),
) -> Result<bool> {
    let work = TempDir::new(&format!("programs-{port}"))?;
    let tools = work.0.join("tools");
    fs::create_dir(&tools)?;
    compile_collectives(&tools);
    compile_rules(&tools)?;
    let mut command = Command::new(driver::build()?);
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = [tools.clone()].into_iter().chain(env::split_paths(&path));
    command
        .env("PATH", env::join_paths(folders)?)
        .args(options)
        .args(["--rdma-core", &rdma_core()])
        .arg("--programs")
        .arg(&tools)
        .arg("--scratch")
        .arg(work.0.join("scratch"));
    if arguments.full {
        command.arg("--pyverbs").arg(unpack_pyverbs(&work.0));
    }
    run_driver(command, handle_line)
}

/// Runs the driver and handles its output.
fn run_driver(mut command: Command, handle_line: &mut dyn FnMut(Line<'_>)) -> Result<bool> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let out = child.stdout.take().context("no output of the driver")?;
    for line in BufReader::new(out).lines() {
        handle_line(vm::parse_line(&line?));
    }
    Ok(child.wait()?.success())
}

/// Packages that guests do not need.
const FRAMEWORKS: &str = "libfabric-bin libopenmpi-dev openmpi-bin ucx-utils";

/// Runs the driver in a tree whose changes vanish with the mounts. $1 the tree, $2 an empty
/// folder, $3 the plugin's folder, $4 the driver, $5 the MPI program's source, $6 packages
/// to install, then the driver's arguments.
const ENTER: &str = r#"
tree=$1 work=$2 plugin=$3 driver=$4 source=$5 packages=$6; shift 6
mount -t tmpfs none "$work"; cd "$work"; mkdir upper other root
mount -t overlay -o "lowerdir=$tree,upperdir=upper,workdir=other" overlay root
cd root; mount -t proc proc proc; mount --rbind /dev dev; mount --rbind /sys sys
mkdir opt/ringverbs; mount --bind "$plugin" opt/ringverbs
cp "$driver" usr/local/bin/rxe-driver; cp "$source" root/collectives.c; cp /etc/resolv.conf etc
enter() {
    chroot . /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
        LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"
}
if [ "$packages" ]; then
    enter apt-get -qq update; enter apt-get -qq -y install $packages > apt.log 2>&1 || cat apt.log
    enter mpicc -O1 -o /usr/local/bin/ringverbs-collectives /root/collectives.c
fi
enter rxe-driver "$@"
"#;

/// Runs the driver in the tree of a suite, with the tree's programs and further packages.
fn run_in_chroot(
    suite: Suite,
    packages: &str,
    dist: &Path,
    options: &[String],
    handle_line: &mut dyn FnMut(Line<'_>),
) -> Result<bool> {
    ensure!(host::is_root(), "a tree needs root (mount and chroot)");
    let architecture = suite.architecture();
    ensure!(
        architecture.user.is_none(),
        "programs of {suite} do not run on this machine"
    );
    let image = tree::image(suite, None)?;
    let work = TempDir::new("programs-chroot")?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--", "sh", "-ec", ENTER, "sh"])
        .arg(image.tree())
        .args([&work.0, dist, &driver::build()?])
        .arg(driver::root().join(COLLECTIVES_SOURCE))
        .arg(packages)
        .args(options)
        .args([
            "--rdma-core",
            &image.rdma_core()?,
            "--scratch",
            "/tmp/scratch",
        ]);
    run_driver(command, handle_line)
}

/// Runs the driver in a guest, with the programs of its tree.
fn run_in_guest(
    suite: Suite,
    dist: &Path,
    options: &[String],
    handle_line: &mut dyn FnMut(Line<'_>),
) -> Result<bool> {
    let mut script = format!("{}\nexec rxe-driver", suite::HUGE_PAGES);
    for option in options {
        script.push_str(&format!(" '{}'", option.replace('\'', "")));
    }
    let job = Job {
        script,
        plugin: Some(dist.to_owned()),
        driver: Some(driver::build_for(suite.architecture())?),
        limit: suite::LIMIT,
        ..Job::default()
    };
    let ended = vm::run(&tree::image(suite, None)?, &job, handle_line)?;
    Ok(ended.status == 0)
}

/// Counts the results: ours must pass what stock passes, and stock everything except known
/// failures.
fn judge(mut results: Results, port: &str, succeeded: bool, time: Duration) -> Outcomes {
    let mut known = String::new();
    let mut skipped = 0;
    results.cases.retain_mut(|case| {
        let failed = case.outcome == Outcome::Fail;
        known_failures::mark_known_failure(case, &format!("embedded-{port}"));
        // Known failures of ours are removed, so that they are not compared with stock's
        // results.
        let is_known = failed && case.outcome == Outcome::Skip && case.provider != Provider::Stock;
        if is_known {
            skipped += 1;
            let (group, name, provider) = (&case.group, &case.name, case.provider);
            known.push_str(&format!(
                "  skipped {group} {name} [{provider}]: {}\n",
                case.detail
            ));
        }
        !is_known
    });
    let mut outcomes = Outcomes {
        passed: 0,
        failed: results.unreadable + usize::from(!succeeded || !results.complete),
        skipped,
        times: results.times.clone(),
        text: String::new(),
    };
    let mut failures = String::new();
    for (case, verdict, reason) in results.verdicts() {
        match verdict {
            _ if case.outcome == Outcome::Fail => {
                outcomes.failed += 1;
                let (group, name, provider) = (&case.group, &case.name, case.provider);
                let reason = if reason.is_empty() {
                    &case.detail
                } else {
                    &reason
                };
                let reason = reason.replace('\n', " / ");
                failures.push_str(&format!("  FAILED {group} {name} [{provider}]: {reason}\n"));
            }
            Verdict::Fail => outcomes.failed += 1,
            Verdict::Pass => outcomes.passed += 1,
            Verdict::Skip => outcomes.skipped += 1,
        }
    }
    let seconds = time.as_secs();
    let text = results.text(&format!("embedded {port}, {seconds} s"));
    outcomes.text = format!("{text}\n{known}{failures}");
    outcomes
}

fn result_line(case: &Case) -> String {
    let outcome = match case.outcome {
        Outcome::Pass => "ok",
        Outcome::Fail => "FAILED",
        Outcome::Skip => "skipped",
    };
    let detail = match case.outcome {
        Outcome::Pass => String::new(),
        _ => format!(": {}", case.detail.replace('\n', " / ")),
    };
    format!(
        "{outcome:<7} {:<11} {:>5.1} s  {} {}{detail}",
        case.provider, case.seconds, case.group, case.name
    )
}

/// Compiles the MPI program, if mpicc is installed.
fn compile_collectives(folder: &Path) {
    if which("mpicc").is_none() {
        return;
    }
    let status = Command::new("mpicc")
        .args(["-O1", "-o"])
        .arg(folder.join(COLLECTIVES))
        .arg(driver::root().join(COLLECTIVES_SOURCE))
        .status();
    if !status.is_ok_and(|status| status.success()) {
        eprintln!("{COLLECTIVES_SOURCE} does not compile");
    }
}

/// Compiles the test programs whose answer is the same on every device, beside their list.
fn compile_rules(folder: &Path) -> Result<()> {
    let sources = driver::root().join("rxe-tests/programs");
    let program = folder.join("rules");
    let status = Command::new("make")
        .args(["-s", "-C"])
        .arg(&sources)
        .arg(format!("O={}", folder.display()))
        .arg(&program)
        .status()
        .context("cannot run make: apt-get install make")?;
    ensure!(status.success(), "{} does not compile", program.display());
    let list = "rules.txt";
    fs::copy(sources.join(list), folder.join(list))?;
    Ok(())
}

/// Unpacks rdma-core's tests and returns their folder. If they are missing, the driver
/// reports that.
fn unpack_pyverbs(work: &Path) -> PathBuf {
    let folder = work.join("pyverbs");
    if Path::new(PYVERBS).is_dir() {
        let copied = Command::new("cp")
            .args(["-r", PYVERBS])
            .arg(&folder)
            .status();
        let unpacked = Command::new("gzip")
            .args(["-d", "-r"])
            .arg(&folder)
            .status();
        if copied.is_err() || unpacked.is_err() {
            eprintln!("{PYVERBS} cannot be unpacked");
        }
    } else {
        eprintln!("rdma-core's tests are not installed: apt-get install python3-pyverbs");
    }
    folder
}

/// Returns the installed version of rdma-core; 44, the oldest supported one, if dpkg does
/// not know it.
fn rdma_core() -> String {
    let out = Command::new("dpkg-query")
        .args(["-W", "-f", "${Version}", "libibverbs1"])
        .output();
    let version = out.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    version
        .ok()
        .filter(|version| !version.is_empty())
        .unwrap_or_else(|| "44".to_owned())
}
