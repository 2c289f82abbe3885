//! `cargo xtask softhca --test`: the programs of rdma-core and perftest and
//! pyverbs on the HCA, by rdma-core's own provider; two HCAs over a bad wire;
//! planted faults.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use rxe_tests::compare::Results;
use rxe_tests::guest::vm::Line;
use rxe_tests::guest::{Hardware, Job};
use rxe_tests::record::{Case, Outcome as Ended, Provider, Record, Stock};

use super::{Arguments, Hcas, Machine, SETUP};
use crate::{driver, suite};

/// How long the cases of one guest may take, and those of the short list.
const LIMIT: Duration = Duration::from_secs(60 * 60);
const SHORT_LIMIT: Duration = Duration::from_secs(20 * 60);

/// Two HCAs over a wire that loses and reorders.
const PAIR: &str = include_str!("pair.sh");
/// Faults that are planted while programs run.
const FAULTS: &str = include_str!("faults.sh");

/// What a script's line begins with that says how a case ended.
pub const PASS: &str = "@pass ";
pub const FAIL: &str = "@fail ";

/// What strict mode says in the log.
const STRICT: &str = "strict: ";

/// What became of one guest.
struct Run {
    what: String,
    results: Results,
    /// Reports of strict mode, and what the kernel warned of.
    reports: Vec<String>,
    seconds: u64,
}

/// Runs the tests for every profile and prints what came of them.
pub fn test(arguments: &Arguments) -> Result<ExitCode> {
    let machine = Machine::new(arguments)?;
    let mut runs = Vec::new();
    let wanted = |group: &str| {
        arguments.filter.is_empty() || arguments.filter.iter().any(|f| f.starts_with(group))
    };
    for profile in &arguments.profile {
        let scripts = |f: &String| f.starts_with("pair") || f.starts_with("faults");
        if arguments.filter.is_empty() || !arguments.filter.iter().all(scripts) {
            runs.push(programs(&machine, arguments, profile)?);
        }
        if wanted("pair") {
            runs.push(script(&machine, arguments, profile, "pair", 2, PAIR)?);
        }
        if wanted("faults") {
            runs.push(script(&machine, arguments, profile, "faults", 1, FAULTS)?);
        }
    }
    let mut failed = 0;
    for run in &runs {
        failed += show(run);
    }
    let sum = |outcome| {
        let cases = runs.iter().flat_map(|run| &run.results.cases);
        cases.filter(|case| case.outcome == outcome).count()
    };
    println!(
        "{} passed, {failed} failed, {} skipped",
        sum(Ended::Pass),
        sum(Ended::Skip)
    );
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// How a run in one guest went.
pub struct Outcome {
    /// Cases.
    pub passed: usize,
    /// Cases, and reports of strict mode and of the kernel.
    pub failed: usize,
    /// Cases.
    pub skipped: usize,
    /// The kernel and rdma-core.
    pub system: String,
}

/// That the drivers load and unload, what they say of the device, and
/// ping-pongs, all in strict mode; prints what came of it.
pub fn brief(kernel: Option<&str>) -> Result<Outcome> {
    let arguments = Arguments::brief(kernel);
    let machine = Machine::new(&arguments)?;
    let run = programs(&machine, &arguments, &arguments.profile[0])?;
    let count = |outcome| {
        let cases = run.results.cases.iter();
        cases.filter(|case| case.outcome == outcome).count()
    };
    Ok(Outcome {
        passed: count(Ended::Pass),
        failed: show(&run),
        skipped: count(Ended::Skip),
        system: format!(
            "kernel {}, rdma-core {}",
            run.results.kernel, run.results.rdma_core
        ),
    })
}

/// The list of programs, and pyverbs.
fn programs(machine: &Machine, arguments: &Arguments, profile: &str) -> Result<Run> {
    let mut options = String::new();
    if arguments.short {
        options.push_str(" --short");
    } else {
        options.push_str(" --pyverbs /opt/rdma-core/tests");
    }
    for filter in &arguments.filter {
        options.push_str(&format!(" --filter '{}'", filter.replace('\'', "")));
    }
    // Some of pyverbs needs large pages.
    let script = format!(
        "{SETUP}
echo 40 > /proc/sys/vm/nr_hugepages
cm=; [ -n \"$RDMA_ADDR\" ] || cm=--no-cm
rxe-driver suite --scratch /tmp/rxe --device $RDMA_DEV --gid $RDMA_GID \\
    --address ${{RDMA_ADDR:-127.0.0.1}} $cm{options} || exit 1
{END}"
    );
    guest(machine, arguments, profile, "programs", 1, script)
}

/// One of the scripts.
fn script(
    machine: &Machine,
    arguments: &Arguments,
    profile: &str,
    group: &str,
    hcas: u32,
    script: &str,
) -> Result<Run> {
    let script = format!("{SETUP}\n{script}\n{END}");
    guest(machine, arguments, profile, group, hcas, script)
}

/// What the kernel has to say of the device; that its drivers go and come.
const END: &str = include_str!("end.sh");
const REMARK: &str = "@kernel ";
/// Then follow the kernel's and rdma-core's versions.
const SYSTEM: &str = "@system ";

fn guest(
    machine: &Machine,
    arguments: &Arguments,
    profile: &str,
    group: &str,
    count: u32,
    script: String,
) -> Result<Run> {
    let what = format!("{} {profile} {group}", arguments.suite);
    eprintln!("== {what}");
    let began = Instant::now();
    let job = Job {
        script,
        share: None,
        plugin: None,
        driver: Some(driver::build()?),
        shell: false,
        limit: if arguments.short { SHORT_LIMIT } else { LIMIT },
        hardware: Hardware::default(),
    };
    let hcas = Hcas {
        profiles: vec![profile.to_owned()],
        count,
        options: arguments.serve.clone(),
    };
    let mut results = Results::default();
    let mut reports = Vec::new();
    let mut progress = suite::Show::new(&what);
    let ended = machine.run(&hcas, job, |line| match line {
        Line::Record(line) => progress.record(&mut results, line),
        Line::Text(text) => {
            if let Some(name) = text.strip_prefix(PASS) {
                results.take(case(group, name, Ended::Pass));
            } else if let Some(name) = text.strip_prefix(FAIL) {
                eprintln!("  {what}: {name}");
                results.take(case(group, name, Ended::Fail));
            } else if let Some(remark) = text.strip_prefix(REMARK) {
                reports.push(remark.to_owned());
            } else if let Some((kernel, rdma_core)) = text
                .strip_prefix(SYSTEM)
                .and_then(|text| text.split_once(' '))
            {
                kernel.clone_into(&mut results.kernel);
                rdma_core.clone_into(&mut results.rdma_core);
            } else {
                progress.text(text);
            }
        }
    });
    match ended {
        Ok((ended, log)) => {
            if ended.status != 0 {
                let why = format!("the guest: exit status {}", ended.status);
                results.take(case(group, &why, Ended::Fail));
            }
            let strict = log.lines().filter_map(|line| line.split_once(STRICT));
            reports.extend(strict.map(|(_, report)| format!("strict: {report}")));
        }
        Err(error) => results.take(case(group, &format!("the guest: {error:#}"), Ended::Fail)),
    }
    Ok(Run {
        what,
        results,
        reports,
        seconds: began.elapsed().as_secs(),
    })
}

/// A case of a script; its name may say after a colon why it failed.
fn case(group: &str, line: &str, outcome: Ended) -> Record {
    let (name, detail) = line.split_once(": ").unwrap_or((line, ""));
    Record::Case(Case {
        group: group.to_owned(),
        name: name.to_owned(),
        provider: Provider::Stock,
        outcome,
        stock: Stock::Reference,
        attempts: 1,
        earlier: String::new(),
        seconds: 0.0,
        detail: detail.to_owned(),
        figures: BTreeMap::new(),
    })
}

/// Prints what came of a guest; how much of it failed.
fn show(run: &Run) -> usize {
    let results = &run.results;
    println!(
        "\n{}: kernel {}, rdma-core {}, {} s",
        run.what, results.kernel, results.rdma_core, run.seconds
    );
    println!(
        "  {:<10} {:>6} {:>6} {:>7}",
        "group", "passed", "failed", "skipped"
    );
    for ((group, _), count) in results.counts() {
        println!(
            "  {group:<10} {:>6} {:>6} {:>7}",
            count.passed, count.failed, count.skipped
        );
    }
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    let mut failed = 0;
    for case in &results.cases {
        match case.outcome {
            Ended::Pass => {}
            Ended::Skip => *reasons.entry(&case.detail).or_default() += 1,
            Ended::Fail => {
                failed += 1;
                println!("  FAILED {} {}: {}", case.group, case.name, case.detail);
            }
        }
    }
    for (reason, count) in reasons {
        println!("  skipped {count}: {}", reason.replace('\n', " / "));
    }
    for report in &run.reports {
        println!("  REPORT {report}");
    }
    failed + run.reports.len()
}
