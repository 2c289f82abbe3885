//! `cargo xtask softhca --test`: the programs of rdma-core and perftest, and pyverbs, on
//! the HCA, with rdma-core's provider, and with `--ours` also with the plugin; two HCAs
//! over a lossy wire; injected faults.

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
use rxe_tests::guest::{Hardware, Job, compile, tree};
use rxe_tests::record::{Case, Outcome as CaseOutcome, Provider, Record, StockExpectation};

use super::{Arguments, Hcas, Machine, SETUP, known_failures};
use crate::{driver, suite};
use suite::PLUGIN;

/// Time limits of the cases of one guest, and of the short list.
const LIMIT: Duration = Duration::from_secs(60 * 60);
const SHORT_LIMIT: Duration = Duration::from_secs(20 * 60);

/// Two HCAs over a wire that loses and reorders packets.
const PAIR: &str = include_str!("pair.sh");
/// The HCA's counters of work requests.
const COUNTERS: &str = include_str!("counters.sh");
/// The network interface's self-tests, and loopback of its own frames.
const INTERFACE: &str = include_str!("interface.sh");
/// What programs see of the device, compared with the embedded device.
const SHOWN: &str = include_str!("shown.sh");
/// The differences that are allowed, with their reasons.
const SHOWN_DIFFERENCES: &str = include_str!("shown.txt");
/// Faults that are injected while programs run.
const FAULTS: &str = include_str!("faults.sh");
/// Linux's storage over RDMA between two HCAs.
const STORAGE: &str = include_str!("storage.sh");
/// The packages with its programs.
const STORAGE_PACKAGES: &[&str] = &["nfs-kernel-server", "nvme-cli", "open-iscsi"];

/// The groups of the lists and of the Rust crate's cases.
const PROGRAMS: &str = "programs";
const NATIVE: &str = "native";

/// Prefixes of a script's line with the result of a case.
pub const PASS: &str = "@pass ";
pub const FAIL: &str = "@fail ";
/// Prefix of the line of a case that passed at a later attempt, whose number follows; after
/// its name is the reason for the first failure.
const LATE: &str = "@late ";

/// Prefix of reports of strict mode in the log.
const STRICT: &str = "strict: ";
/// The cases of the Rust crate that overrun a completion queue on purpose, and their
/// report, which strict mode logs once for each.
const OVERRUN_CASES: [&str; 2] = ["device", "completions"];
const OVERRUN_REPORT: &str = "is in error: overrun";

/// The results of one guest.
struct GuestRun {
    title: String,
    results: Results,
    /// Ours is compared with rdma-core's provider.
    compared: bool,
    /// Reports of strict mode, and warnings of the kernel.
    reports: Vec<String>,
    seconds: u64,
}

/// Runs the tests for every profile and prints the results.
pub fn test(arguments: &Arguments) -> Result<ExitCode> {
    let total = run_all(arguments)?;
    println!(
        "{} passed, {} failed, {} skipped",
        total.passed, total.failed, total.skipped
    );
    Ok(if total.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs all cases of a profile with both providers, or those of the Rust crate, and
/// prints the results.
pub fn full(
    profile: &str,
    native: bool,
    kernel: Option<&str>,
    filter: &[String],
) -> Result<Outcome> {
    run_all(&Arguments {
        profile: vec![profile.to_owned()],
        short: false,
        native,
        filter: filter.to_vec(),
        ..Arguments::brief(kernel)
    })
}

fn run_all(arguments: &Arguments) -> Result<Outcome> {
    let machine = Machine::new(arguments)?;
    let mut runs = Vec::new();
    for profile in &arguments.profile {
        if arguments.native {
            runs.push(native(&machine, arguments, profile)?);
            continue;
        }
        let scripts = |f: &String| {
            ["pair", "shown", "faults", "storage"]
                .iter()
                .any(|it| f.starts_with(it))
        };
        if arguments.filter.is_empty() || !arguments.filter.iter().all(scripts) {
            runs.push(programs(&machine, arguments, profile)?);
        }
        if wanted(arguments, "pair") {
            runs.push(script(&machine, arguments, profile, "pair", 2, PAIR, None)?);
        }
        // The plugin's folder has the library of embedded devices.
        if wanted(arguments, "shown") && machine.plugin.is_some() {
            let shown = shown(profile);
            let run = script(&machine, arguments, profile, "shown", 1, &shown, None);
            runs.push(run?);
        }
        if wanted(arguments, "faults") {
            let share = compiled_programs(&machine)?;
            let folder = Some(share.0.clone());
            let run = script(&machine, arguments, profile, "faults", 1, FAULTS, folder);
            runs.push(run?);
        }
        // Takes minutes, so it runs by its name alone.
        if !arguments.filter.is_empty() && wanted(arguments, "storage") {
            let share = suite::TempDir::new("storage")?;
            let packages = share.0.join("packages");
            tree::unpack_more(&machine.image, STORAGE_PACKAGES, &packages)?;
            let folder = Some(share.0.clone());
            let run = script(&machine, arguments, profile, "storage", 2, STORAGE, folder);
            runs.push(run?);
        }
    }
    let mut total = Outcome::default();
    for run in &runs {
        let outcome = print_run(run);
        total.passed += outcome.passed;
        total.failed += outcome.failed;
        total.skipped += outcome.skipped;
        total.system = outcome.system;
        for (part, time) in outcome.times {
            *total.times.entry(part).or_default() += time;
        }
    }
    Ok(total)
}

/// Returns whether the filters select a script.
fn wanted(arguments: &Arguments, script: &str) -> bool {
    arguments.filter.is_empty() || arguments.filter.iter().any(|f| f.starts_with(script))
}

/// The counts of a run in one guest.
#[derive(Default)]
pub struct Outcome {
    /// Passed cases.
    pub passed: usize,
    /// Failed cases, and reports of strict mode and of the kernel.
    pub failed: usize,
    /// Skipped cases.
    pub skipped: usize,
    /// The kernel and rdma-core.
    pub system: String,
    /// Duration of each part.
    pub times: BTreeMap<String, Duration>,
}

/// Loads and unloads the drivers, checks their messages, runs ping-pongs with both providers,
/// and compares what the drivers and the embedded device show, all in strict mode; prints the
/// results.
pub fn brief(kernel: Option<&str>) -> Result<Outcome> {
    let arguments = Arguments::brief(kernel);
    let machine = Machine::new(&arguments)?;
    let run = programs(&machine, &arguments, &arguments.profile[0])?;
    Ok(print_run(&run))
}

/// Runs the list of programs, and pyverbs.
fn programs(machine: &Machine, arguments: &Arguments, profile: &str) -> Result<GuestRun> {
    let mut options = String::new();
    if arguments.short {
        options.push_str(" --short");
    } else {
        options.push_str(" --pyverbs /opt/rdma-core/tests");
        // `cargo xtask programs` runs the rest, which does not depend on the kernel's
        // drivers.
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
    // The full run has a guest of its own for it.
    let shown = match arguments.short && machine.plugin.is_some() {
        true => shown(profile),
        false => String::new(),
    };
    let share = compiled_programs(machine)?;
    let folder = share.0.join("programs");
    fs::rename(folder.join("connectx.txt"), folder.join("manifest.txt"))?;
    options.push_str(" --programs /opt/programs");
    let huge_pages = suite::HUGE_PAGES;
    let script = format!(
        "{SETUP}
cp -r /share/programs /opt/programs
{huge_pages}
{SUITE}{options} || exit 1
{counters}
{interface}
{shown}
{END}"
    );
    let shared = Some(share.0.clone());
    guest(machine, arguments, profile, PROGRAMS, 1, script, shared)
}

/// Returns the script that compares what mlx5_ib and the embedded device show.
fn shown(profile: &str) -> String {
    format!("PROFILE={profile}\ncat > /tmp/shown.txt <<'END'\n{SHOWN_DIFFERENCES}END\n{SHOWN}")
}

/// Compiles the test programs for the guest, into `programs` of a share.
fn compiled_programs(machine: &Machine) -> Result<suite::TempDir> {
    let share = suite::TempDir::new("programs")?;
    let sources = driver::root().join("rxe-tests/programs");
    let (folder, log) = (share.0.join("programs"), share.0.join("compile.log"));
    compile::programs(&machine.image, &sources, &folder, &log)?;
    Ok(share)
}

/// Runs the driver's lists on the HCA.
const SUITE: &str = "\
cm=; [ -n \"$RDMA_ADDR\" ] || cm=--no-cm
rxe-driver suite --scratch /tmp/rxe --device $RDMA_DEV --gid $RDMA_GID \
    --address ${RDMA_ADDR:-127.0.0.1} $cm";

/// Runs the Rust crate's programs, built for the guest.
fn native(machine: &Machine, arguments: &Arguments, profile: &str) -> Result<GuestRun> {
    let share = suite::TempDir::new("native")?;
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

/// Returns filters that select only cases of the Rust crate.
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

/// Makes the plugin serve the following programs, and checks that. They are linked only
/// to libibverbs.
const USE_PLUGIN: &str = "\
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
) -> Result<GuestRun> {
    let ours = if arguments.ours { USE_PLUGIN } else { "" };
    let script = format!("{SETUP}\n{ours}\n{script}\n{END}");
    guest(machine, arguments, profile, group, hcas, script, share)
}

/// Prints the kernel's messages on the device; unloads and loads its drivers.
const END: &str = include_str!("end.sh");
const KERNEL_MESSAGE: &str = "@kernel ";
/// Prefix of the line with the kernel's and rdma-core's versions.
const SYSTEM: &str = "@system ";

fn guest(
    machine: &Machine,
    arguments: &Arguments,
    profile: &str,
    group: &str,
    count: u32,
    script: String,
    share: Option<PathBuf>,
) -> Result<GuestRun> {
    let title = format!("{} {profile} {group}", arguments.suite);
    eprintln!("== {title}");
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
    let mut progress = suite::Progress::new(&title);
    let mut records = File::create(suite::results_file(&title.replace(' ', "-"))?)?;
    let case = |line: &str, outcome| case(group, line, outcome, arguments.ours);
    let ended = machine.run(&hcas, job, |line| match line {
        Line::Record(line) => {
            // Written immediately, for guests that crash.
            let _ = writeln!(records, "{line}");
            progress.record(&mut results, line);
        }
        Line::Text(text) => {
            if let Some(name) = text.strip_prefix(PASS) {
                results.add(case(name, CaseOutcome::Pass));
            } else if let Some(line) = text.strip_prefix(LATE) {
                let (attempts, name) = line.split_once(' ').unwrap_or(("", line));
                if let Record::Case(case) = case(name, CaseOutcome::Pass) {
                    results.add(Record::Case(Case {
                        attempts: attempts.parse().unwrap_or(2),
                        earlier: case.detail,
                        detail: String::new(),
                        ..case
                    }));
                }
            } else if let Some(name) = text.strip_prefix(FAIL) {
                eprintln!("  {title}: {name}");
                results.add(case(name, CaseOutcome::Fail));
            } else if let Some(message) = text.strip_prefix(KERNEL_MESSAGE) {
                reports.push(message.to_owned());
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
            results.add_time("boot", ended.boot_time);
            if ended.status != 0 {
                let name = format!("the guest: exit status {}", ended.status);
                results.add(case(&name, CaseOutcome::Fail));
            }
            let strict = log.lines().filter_map(|line| line.split_once(STRICT));
            let mut strict: Vec<_> = strict.map(|(_, report)| report).collect();
            let ran = |name: &&&str| results.cases.iter().any(|case| case.name == **name);
            for name in OVERRUN_CASES.iter().filter(|it| group == NATIVE && ran(it)) {
                match strict.iter().position(|it| it.ends_with(OVERRUN_REPORT)) {
                    Some(at) => drop(strict.remove(at)),
                    None if arguments.serve.iter().any(|it| it == "--strict") => {
                        reports.push(format!(
                            "strict: no report of the queue that {name} overruns"
                        ));
                    }
                    None => {}
                }
            }
            reports.extend(strict.into_iter().map(|report| format!("strict: {report}")));
        }
        Err(error) => results.add(case(&format!("the guest: {error:#}"), CaseOutcome::Fail)),
    }
    let compared = group == NATIVE || arguments.ours && group == PROGRAMS;
    if !compared {
        for case in &mut results.cases {
            known_failures::mark_known_failure(case, profile);
        }
    }
    Ok(GuestRun {
        title,
        results,
        compared,
        reports,
        seconds: began.elapsed().as_secs(),
    })
}

/// Returns the record of a script's case. The reason for a failure follows the name
/// after a colon. With ours the case must pass, independently of stock.
pub(super) fn case(group: &str, line: &str, outcome: CaseOutcome, ours: bool) -> Record {
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
            StockExpectation::NotRun
        } else {
            StockExpectation::Reference
        },
        attempts: 1,
        earlier: String::new(),
        seconds: 0.0,
        detail: detail.to_owned(),
        figures: BTreeMap::new(),
        cached: false,
    })
}

/// Prints and counts the results of a guest.
fn print_run(run: &GuestRun) -> Outcome {
    let results = &run.results;
    let mut outcome = Outcome {
        system: format!("kernel {}, rdma-core {}", results.kernel, results.rdma_core),
        times: results.times.clone(),
        ..Outcome::default()
    };
    println!("\n{}: {}, {} s", run.title, outcome.system, run.seconds);
    if run.compared {
        println!("{}", results.text(&run.title));
        for (_, verdict, _) in results.verdicts() {
            match verdict {
                Verdict::Pass => outcome.passed += 1,
                Verdict::Fail => outcome.failed += 1,
                Verdict::Skip => outcome.skipped += 1,
            }
        }
        outcome.failed += results.unreadable + usize::from(!results.complete);
        outcome.failed += usize::from(results.plugin_refusal.is_some());
    } else {
        print_case_counts(results, &mut outcome);
    }
    for report in &run.reports {
        println!("  REPORT {report}");
    }
    outcome.failed += run.reports.len();
    outcome
}

/// Prints and counts results of which all must pass.
fn print_case_counts(results: &Results, outcome: &mut Outcome) {
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
            CaseOutcome::Pass => outcome.passed += 1,
            CaseOutcome::Skip => {
                outcome.skipped += 1;
                *reasons.entry(&case.detail).or_default() += 1;
            }
            CaseOutcome::Fail => {
                outcome.failed += 1;
                println!("  FAILED {} {}: {}", case.group, case.name, case.detail);
            }
        }
    }
    print!("{}", results.retried_text());
    for (reason, count) in reasons {
        println!("  skipped {count}: {}", reason.replace('\n', " / "));
    }
}

#[cfg(test)]
mod tests {
    use super::native_filters;

    #[test]
    fn filters_select_only_native_cases() {
        let selected = |filters: &[&str]| {
            let filters: Vec<String> = filters.iter().map(|&f| f.to_owned()).collect();
            native_filters(&filters)
        };
        assert_eq!(selected(&[]), ["native"]);
        assert_eq!(selected(&["soak"]), ["native soak"]);
        assert_eq!(selected(&["native c-", "kv"]), ["native c-", "native kv"]);
    }
}
