//! `cargo xtask softhca --test`: the programs of rdma-core and perftest and
//! pyverbs on the HCA, by rdma-core's own provider, and with `--ours` by the
//! plugin too; two HCAs over a bad wire; planted faults.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use rxe_tests::compare::{Results, Verdict};
use rxe_tests::guest::suite::X86_64;
use rxe_tests::guest::vm::Line;
use rxe_tests::guest::{Hardware, Job, compile};
use rxe_tests::record::{Case, Outcome as Ended, Provider, Record, Stock};

use super::{Arguments, Hcas, Machine, SETUP, known};
use crate::{driver, suite};
use suite::PLUGIN;

/// How long the cases of one guest may take, and those of the short list.
const LIMIT: Duration = Duration::from_secs(60 * 60);
const SHORT_LIMIT: Duration = Duration::from_secs(20 * 60);

/// Two HCAs over a wire that loses and reorders.
const PAIR: &str = include_str!("pair.sh");
/// What the HCA counts of work requests.
const COUNTERS: &str = include_str!("counters.sh");
/// What the network interface hears of itself.
const INTERFACE: &str = include_str!("interface.sh");
/// Faults that are planted while programs run.
const FAULTS: &str = include_str!("faults.sh");

/// The guest that runs the lists, and that of the Rust crate's cases.
const PROGRAMS: &str = "programs";
const NATIVE: &str = "native";

/// What a script's line begins with that says how a case ended.
pub const PASS: &str = "@pass ";
pub const FAIL: &str = "@fail ";
/// The same of what passed at a later attempt, whose number follows; behind its
/// name is why the first failed.
const LATE: &str = "@late ";

/// What strict mode says in the log.
const STRICT: &str = "strict: ";
/// What it says once of each of these cases of the Rust crate, which fill a
/// completion queue beyond its end to see that the program is told.
const OVERRUN: [&str; 2] = ["device", "completions"];
const IS_OVERRUN: &str = "is in error: overrun";

/// What became of one guest.
struct Run {
    what: String,
    results: Results,
    /// Under the rule of ours beside rdma-core's.
    compared: bool,
    /// Reports of strict mode, and what the kernel warned of.
    reports: Vec<String>,
    seconds: u64,
}

/// Runs the tests for every profile and prints what came of them.
pub fn test(arguments: &Arguments) -> Result<ExitCode> {
    let sum = runs(arguments)?;
    println!(
        "{} passed, {} failed, {} skipped",
        sum.passed, sum.failed, sum.skipped
    );
    Ok(if sum.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Every case of a profile with either provider, or those of the Rust crate;
/// prints what came of them.
pub fn full(
    profile: &str,
    native: bool,
    kernel: Option<&str>,
    filter: &[String],
) -> Result<Outcome> {
    runs(&Arguments {
        profile: vec![profile.to_owned()],
        short: false,
        native,
        filter: filter.to_vec(),
        ..Arguments::brief(kernel)
    })
}

fn runs(arguments: &Arguments) -> Result<Outcome> {
    let machine = Machine::new(arguments)?;
    let mut runs = Vec::new();
    for profile in &arguments.profile {
        if arguments.native {
            runs.push(native(&machine, arguments, profile)?);
            continue;
        }
        let scripts = |f: &String| f.starts_with("pair") || f.starts_with("faults");
        if arguments.filter.is_empty() || !arguments.filter.iter().all(scripts) {
            runs.push(programs(&machine, arguments, profile)?);
        }
        if wanted(arguments, "pair") {
            runs.push(script(&machine, arguments, profile, "pair", 2, PAIR, None)?);
        }
        if wanted(arguments, "faults") {
            let share = compiled_programs(&machine)?;
            let folder = Some(share.0.clone());
            let run = script(&machine, arguments, profile, "faults", 1, FAULTS, folder);
            runs.push(run?);
        }
    }
    let mut sum = Outcome::default();
    for run in &runs {
        let outcome = show(run);
        sum.passed += outcome.passed;
        sum.failed += outcome.failed;
        sum.skipped += outcome.skipped;
        sum.system = outcome.system;
        for (part, time) in outcome.spent {
            *sum.spent.entry(part).or_default() += time;
        }
    }
    Ok(sum)
}

/// Whether a script's cases are to run.
fn wanted(arguments: &Arguments, script: &str) -> bool {
    arguments.filter.is_empty() || arguments.filter.iter().any(|f| f.starts_with(script))
}

/// How a run in one guest went.
#[derive(Default)]
pub struct Outcome {
    /// Cases.
    pub passed: usize,
    /// Cases, and reports of strict mode and of the kernel.
    pub failed: usize,
    /// Cases.
    pub skipped: usize,
    /// The kernel and rdma-core.
    pub system: String,
    /// How long each part took.
    pub spent: BTreeMap<String, Duration>,
}

/// That the drivers load and unload, what they say of the device, and
/// ping-pongs with either provider, all in strict mode; prints what came of it.
pub fn brief(kernel: Option<&str>) -> Result<Outcome> {
    let arguments = Arguments::brief(kernel);
    let machine = Machine::new(&arguments)?;
    let run = programs(&machine, &arguments, &arguments.profile[0])?;
    Ok(show(&run))
}

/// The list of programs, and pyverbs.
fn programs(machine: &Machine, arguments: &Arguments, profile: &str) -> Result<Run> {
    let mut options = String::new();
    if arguments.short {
        options.push_str(" --short");
    } else {
        options.push_str(" --pyverbs /opt/rdma-core/tests");
        // `cargo xtask programs` has the rest: the kernel's drivers have no part in it.
        options.push_str(" --brief perftest");
    }
    let plugin = match arguments.ours {
        true => format!("/opt/ringverbs/{PLUGIN}"),
        false => String::new(),
    };
    if arguments.ours {
        options.push_str(&format!(" --plugin {plugin}"));
    }
    for filter in &arguments.filter {
        options.push_str(&format!(" --filter '{}'", filter.replace('\'', "")));
    }
    let counters = match wanted(arguments, "counters") {
        true => format!("PLUGIN={plugin}\n{COUNTERS}"),
        false => String::new(),
    };
    let interface = match wanted(arguments, "interface") {
        true => INTERFACE,
        false => "",
    };
    let share = compiled_programs(machine)?;
    let folder = share.0.join("programs");
    fs::rename(folder.join("connectx.txt"), folder.join("manifest.txt"))?;
    options.push_str(" --programs /opt/programs");
    // Some of pyverbs needs large pages.
    let script = format!(
        "{SETUP}
cp -r /share/programs /opt/programs
echo 40 > /proc/sys/vm/nr_hugepages
{SUITE}{options} || exit 1
{counters}
{interface}
{END}"
    );
    let shared = Some(share.0.clone());
    guest(machine, arguments, profile, PROGRAMS, 1, script, shared)
}

/// Compiles the test programs for the guest, into `programs` of a share.
fn compiled_programs(machine: &Machine) -> Result<suite::Work> {
    let share = suite::Work::new("programs")?;
    let sources = driver::root().join("rxe-tests/programs");
    let (folder, log) = (share.0.join("programs"), share.0.join("compile.log"));
    compile::programs(&machine.image, &sources, &folder, &log)?;
    Ok(share)
}

/// The driver's lists on the HCA.
const SUITE: &str = "\
cm=; [ -n \"$RDMA_ADDR\" ] || cm=--no-cm
rxe-driver suite --scratch /tmp/rxe --device $RDMA_DEV --gid $RDMA_GID \
    --address ${RDMA_ADDR:-127.0.0.1} $cm";

/// The Rust crate's programs, built for the guest.
fn native(machine: &Machine, arguments: &Arguments, profile: &str) -> Result<Run> {
    let share = suite::Work::new("native")?;
    crate::native::build(&X86_64, &share.0)?;
    let mut options = String::from(" --native /opt/native");
    if arguments.ours {
        options.push_str(&format!(" --plugin /opt/ringverbs/{PLUGIN}"));
    }
    for filter in native_filters(&arguments.filter) {
        options.push_str(&format!(" --filter '{}'", filter.replace('\'', "")));
    }
    let script = format!(
        "{SETUP}
cp -r /share /opt/native
{SUITE}{options} || exit 1
{END}"
    );
    let share = Some(share.0.clone());
    guest(machine, arguments, profile, NATIVE, 1, script, share)
}

/// Filters that choose among the Rust crate's cases alone.
fn native_filters(filters: &[String]) -> Vec<String> {
    if filters.is_empty() {
        return vec![NATIVE.to_owned()];
    }
    let named = |filter: &String| match filter.starts_with(NATIVE) {
        true => filter.clone(),
        false => format!("{NATIVE} {filter}"),
    };
    filters.iter().map(named).collect()
}

/// Has the plugin serve what follows, and shows that it does. The programs of
/// the scripts are linked to libibverbs alone.
const OURS: &str = "\
export RDMAV_DRIVERS=/opt/ringverbs/libringverbs
if RINGVERBS_LOG=info ibv_devinfo 2>&1 | grep -q \"ringverbs INFO: serves device=$RDMA_DEV\"; then
    echo '@pass ringverbs serves the device'
else
    echo '@fail ringverbs serves the device'
fi
";

/// Runs one of the scripts.
fn script(
    machine: &Machine,
    arguments: &Arguments,
    profile: &str,
    group: &str,
    hcas: u32,
    script: &str,
    share: Option<PathBuf>,
) -> Result<Run> {
    let ours = if arguments.ours { OURS } else { "" };
    let script = format!("{SETUP}\n{ours}\n{script}\n{END}");
    guest(machine, arguments, profile, group, hcas, script, share)
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
    share: Option<PathBuf>,
) -> Result<Run> {
    let what = format!("{} {profile} {group}", arguments.suite);
    eprintln!("== {what}");
    let began = Instant::now();
    let job = Job {
        script,
        share,
        plugin: machine.plugin.clone(),
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
    let mut progress = suite::Progress::new(&what);
    let mut records = File::create(suite::results_file(&what.replace(' ', "-"))?)?;
    let case = |line: &str, outcome| case(group, line, outcome, arguments.ours);
    let ended = machine.run(&hcas, job, |line| match line {
        Line::Record(line) => {
            // At once: what was run before a guest went down counts too.
            let _ = writeln!(records, "{line}");
            progress.record(&mut results, line);
        }
        Line::Text(text) => {
            if let Some(name) = text.strip_prefix(PASS) {
                results.take(case(name, Ended::Pass));
            } else if let Some(line) = text.strip_prefix(LATE) {
                let (attempts, name) = line.split_once(' ').unwrap_or(("", line));
                if let Record::Case(case) = case(name, Ended::Pass) {
                    results.take(Record::Case(Case {
                        attempts: attempts.parse().unwrap_or(2),
                        earlier: case.detail,
                        detail: String::new(),
                        ..case
                    }));
                }
            } else if let Some(name) = text.strip_prefix(FAIL) {
                eprintln!("  {what}: {name}");
                results.take(case(name, Ended::Fail));
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
            results.spend("boot", ended.boot);
            if ended.status != 0 {
                let why = format!("the guest: exit status {}", ended.status);
                results.take(case(&why, Ended::Fail));
            }
            let strict = log.lines().filter_map(|line| line.split_once(STRICT));
            let mut strict: Vec<_> = strict.map(|(_, report)| report).collect();
            let ran = |name: &&&str| results.cases.iter().any(|case| case.name == **name);
            for name in OVERRUN.iter().filter(|it| group == NATIVE && ran(it)) {
                match strict.iter().position(|it| it.ends_with(IS_OVERRUN)) {
                    Some(at) => drop(strict.remove(at)),
                    None if arguments.serve.iter().any(|it| it == "--strict") => {
                        reports.push(format!("strict: nothing of the queue that {name} overruns"));
                    }
                    None => {}
                }
            }
            reports.extend(strict.into_iter().map(|report| format!("strict: {report}")));
        }
        Err(error) => results.take(case(&format!("the guest: {error:#}"), Ended::Fail)),
    }
    let compared = group == NATIVE || arguments.ours && group == PROGRAMS;
    if !compared {
        for case in &mut results.cases {
            known::excuse(case, profile);
        }
    }
    Ok(Run {
        what,
        results,
        compared,
        reports,
        seconds: began.elapsed().as_secs(),
    })
}

/// A case of a script; its name may say after a colon why it failed.
/// With ours it must pass, whatever stock does.
pub(super) fn case(group: &str, line: &str, outcome: Ended, ours: bool) -> Record {
    let (name, detail) = line.split_once(": ").unwrap_or((line, ""));
    Record::Case(Case {
        group: group.to_owned(),
        name: name.to_owned(),
        provider: if ours {
            Provider::Ours
        } else {
            Provider::Stock
        },
        outcome,
        stock: if ours {
            Stock::NotRun
        } else {
            Stock::Reference
        },
        attempts: 1,
        earlier: String::new(),
        seconds: 0.0,
        detail: detail.to_owned(),
        figures: BTreeMap::new(),
        cached: false,
    })
}

/// Prints what came of a guest, and counts it.
fn show(run: &Run) -> Outcome {
    let results = &run.results;
    let mut outcome = Outcome {
        system: format!("kernel {}, rdma-core {}", results.kernel, results.rdma_core),
        spent: results.spent.clone(),
        ..Outcome::default()
    };
    println!("\n{}: {}, {} s", run.what, outcome.system, run.seconds);
    if run.compared {
        println!("{}", results.text(&run.what));
        for (_, verdict, _) in results.verdicts() {
            match verdict {
                Verdict::Pass => outcome.passed += 1,
                Verdict::Fail => outcome.failed += 1,
                Verdict::Skip => outcome.skipped += 1,
            }
        }
        outcome.failed += results.unreadable + usize::from(!results.complete);
        outcome.failed += usize::from(results.refused.is_some());
    } else {
        list(results, &mut outcome);
    }
    for report in &run.reports {
        println!("  REPORT {report}");
    }
    outcome.failed += run.reports.len();
    outcome
}

/// Every case is to pass.
fn list(results: &Results, outcome: &mut Outcome) {
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
    for case in &results.cases {
        match case.outcome {
            Ended::Pass => outcome.passed += 1,
            Ended::Skip => {
                outcome.skipped += 1;
                *reasons.entry(&case.detail).or_default() += 1;
            }
            Ended::Fail => {
                outcome.failed += 1;
                println!("  FAILED {} {}: {}", case.group, case.name, case.detail);
            }
        }
    }
    print!("{}", results.repeated_text());
    for (reason, count) in reasons {
        println!("  skipped {count}: {}", reason.replace('\n', " / "));
    }
}

#[cfg(test)]
mod tests {
    use super::native_filters;

    #[test]
    fn filters_choose_among_the_native_cases_alone() {
        let chosen = |filters: &[&str]| {
            let filters: Vec<String> = filters.iter().map(|&f| f.to_owned()).collect();
            native_filters(&filters)
        };
        assert_eq!(chosen(&[]), ["native"]);
        assert_eq!(chosen(&["soak"]), ["native soak"]);
        assert_eq!(chosen(&["native c-", "kv"]), ["native c-", "native kv"]);
    }
}
