//! `cargo xtask programs`: programs of the system on embedded devices, with
//! rdma-core's libmlx5 beside ours.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rxe_tests::compare::{Results, Verdict};
use rxe_tests::driver::embedded::COLLECTIVES;
use rxe_tests::guest::host::which;
use rxe_tests::guest::vm::RECORD;
use rxe_tests::record::{Case, Outcome, Provider, Record};

use crate::libmlx5::LIBMLX5;
use crate::softhca::known;
use crate::suite::{PLUGIN, Work};
use crate::{dist, driver};

/// Programs that the lists and the tests of crates/preload run, and their packages.
pub const NEEDS: &[(&str, &str)] = &[
    ("ibv_devinfo", "ibverbs-utils"),
    ("/etc/libibverbs.d/mlx5.driver", "ibverbs-providers"),
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

/// Where Debian's python3-pyverbs has rdma-core's tests, packed.
const PYVERBS: &str = "/usr/share/doc/rdma-core/tests";

/// The MPI program.
const COLLECTIVES_SOURCE: &str = "crates/preload/tests/c/collectives.c";

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// All cases, and rdma-core's own tests (pyverbs): some ten minutes
    #[arg(long)]
    full: bool,
    /// The kind of port: roce or ib
    #[arg(long, default_value = "roce")]
    port: Vec<String>,
    /// Only cases whose group and name contain this (or one of these)
    #[arg(long)]
    filter: Vec<String>,
    /// Put our libmlx5.so.1 in the place of rdma-core's, instead of preloading the
    /// plugin; needs root
    #[arg(long)]
    in_place: bool,
    /// A folder that `cargo xtask dist` has made, instead of building now
    #[arg(long)]
    dist: Option<PathBuf>,
}

/// Every case on a kind of port, for `cargo xtask test`.
pub fn full(port: &str, filter: &[String]) -> Result<Outcomes> {
    let arguments = Arguments {
        full: true,
        port: vec![port.to_owned()],
        filter: filter.to_vec(),
        in_place: false,
        dist: None,
    };
    let outcomes = on_port(&arguments, &dist::dist()?, port)?;
    println!("{}", outcomes.text);
    Ok(outcomes)
}

/// Results of the lists on one kind of port.
pub struct Outcomes {
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
    /// How long each part took.
    pub spent: BTreeMap<String, Duration>,
    /// Tables, and what failed.
    pub text: String,
}

/// Runs the lists; prints each result as it comes, and tables at the end.
pub fn programs(arguments: &Arguments) -> Result<ExitCode> {
    let dist = match &arguments.dist {
        Some(dist) => std::path::absolute(dist)?,
        None => dist::dist()?,
    };
    let mut failed = 0;
    let mut texts = Vec::new();
    for port in &arguments.port {
        let outcomes = on_port(arguments, &dist, port)?;
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

fn on_port(arguments: &Arguments, dist: &Path, port: &str) -> Result<Outcomes> {
    let work = Work::new(&format!("programs-{port}"))?;
    let tools = work.0.join("tools");
    fs::create_dir(&tools)?;
    collectives(&tools);
    let mut command = Command::new(driver::build()?);
    let path = env::var_os("PATH").unwrap_or_default();
    let places = [tools].into_iter().chain(env::split_paths(&path));
    command
        .env("PATH", env::join_paths(places)?)
        .args(["suite", "--port", port])
        .args(["--gid", if port.starts_with("ib") { "0" } else { "1" }])
        .args(["--rdma-core", &rdma_core()])
        .arg("--scratch")
        .arg(work.0.join("scratch"))
        .arg("--embedded")
        .arg(dist.join(dist::PRELOAD))
        .arg("--plugin")
        .arg(dist.join(PLUGIN));
    if arguments.in_place {
        command.arg("--in-place").arg(dist.join(LIBMLX5));
    }
    if !arguments.full {
        command.arg("--short");
    }
    if arguments.full {
        command.arg("--pyverbs").arg(pyverbs(&work.0));
    }
    for filter in &arguments.filter {
        command.args(["--filter", filter]);
    }
    let began = Instant::now();
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let out = child.stdout.take().context("no output of the driver")?;
    let mut results = Results::default();
    let mut last = Instant::now();
    for line in BufReader::new(out).lines() {
        let line = line?;
        match line.strip_prefix(RECORD).map(Record::parse) {
            Some(Ok(record)) => {
                if let Record::Case(case) = &record {
                    println!("{}", line_of(case));
                    let part = format!("{} [{}]", case.group, case.provider);
                    results.spend(&part, last.elapsed());
                }
                last = Instant::now();
                results.take(record);
            }
            Some(Err(error)) => {
                println!("unreadable record: {error}");
                results.unreadable += 1;
            }
            None => println!("{line}"),
        }
    }
    let ended = child.wait()?.success();
    Ok(judge(results, port, ended, began.elapsed()))
}

/// Counts: ours must do what stock does, and stock everything but what is known.
fn judge(mut results: Results, port: &str, ended: bool, time: Duration) -> Outcomes {
    let mut excused = String::new();
    let mut skipped = 0;
    results.cases.retain_mut(|case| {
        let failed = case.outcome == Outcome::Fail;
        known::excuse(case, &format!("embedded-{port}"));
        // Stock's are what ours is held against; these would be held against stock.
        let is_over = failed && case.outcome == Outcome::Skip && case.provider != Provider::Stock;
        if is_over {
            skipped += 1;
            let (group, name, provider) = (&case.group, &case.name, case.provider);
            excused.push_str(&format!(
                "  skipped {group} {name} [{provider}]: {}\n",
                case.detail
            ));
        }
        !is_over
    });
    let mut outcomes = Outcomes {
        passed: 0,
        failed: results.unreadable + usize::from(!ended || !results.complete),
        skipped,
        spent: results.spent.clone(),
        text: String::new(),
    };
    let mut failures = String::new();
    for (case, verdict, why) in results.verdicts() {
        match verdict {
            _ if case.outcome == Outcome::Fail => {
                outcomes.failed += 1;
                let (group, name, provider) = (&case.group, &case.name, case.provider);
                let why = if why.is_empty() { &case.detail } else { &why };
                let why = why.replace('\n', " / ");
                failures.push_str(&format!("  FAILED {group} {name} [{provider}]: {why}\n"));
            }
            Verdict::Fail => outcomes.failed += 1,
            Verdict::Pass => outcomes.passed += 1,
            Verdict::Skip => outcomes.skipped += 1,
        }
    }
    let seconds = time.as_secs();
    let text = results.text(&format!("embedded {port}, {seconds} s"));
    outcomes.text = format!("{text}\n{excused}{failures}");
    outcomes
}

fn line_of(case: &Case) -> String {
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

/// Compiles the MPI program, if there is a compiler for it.
fn collectives(folder: &Path) {
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

/// Unpacks rdma-core's tests. Without them the folder is empty, which the driver
/// reports.
fn pyverbs(work: &Path) -> PathBuf {
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

/// The version of rdma-core that is installed; 44, the oldest supported one, if dpkg
/// does not know it.
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
