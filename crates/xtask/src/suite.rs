//! Running the driver's cases in a guest, or on this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rxe_tests::compare::Results;
use rxe_tests::driver::case::chosen;
use rxe_tests::driver::selection;
use rxe_tests::guest::stock::Cache;
use rxe_tests::guest::vm::{self, Line, RECORD};
use rxe_tests::guest::{Architecture, Hardware, Job, Suite, compile, host, tree};
use rxe_tests::record::{Outcome, Provider, Record, Stock};

use crate::{dist, driver, native};

/// What libibverbs appends `-rdmav<ABI>.so` to.
pub const PLUGIN: &str = "libringverbs";

/// Which cases to run, and with what.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The folder that `dist` made; without it only stock is run.
    pub plugin: Option<PathBuf>,
    /// The short list.
    pub short: bool,
    /// Only cases whose group and name contain one of these; all if empty.
    pub filter: Vec<String>,
    /// Another kernel package.
    pub kernel: Option<String>,
    /// Run every case with stock, whatever verdicts the cache has.
    pub fresh_stock: bool,
}

/// How long all cases of a guest may take: a third of it on an idle machine.
pub const LIMIT: Duration = Duration::from_secs(75 * 60);

/// Boots the guest of `suite` and runs the cases in it.
pub fn in_guest(suite: Suite, request: &Request) -> Result<Results> {
    let began = Instant::now();
    let image = tree::image(suite, request.kernel.as_deref())?;
    let tree = began.elapsed();
    let architecture = suite.architecture();
    let program = driver::build_for(architecture)?;
    let share = Work::new(&format!("share-{suite}"))?;
    let has_programs = programs()?.is_some();
    if let Some(sources) = programs()? {
        let log = share.0.join("compile.log");
        compile::programs(&image, &sources, &share.0.join("programs"), &log)?;
    }
    let mut script = String::from("exec rxe-driver suite --scratch /tmp/rxe --out /share/records");
    script.push_str(" --pyverbs /opt/rdma-core/tests");
    if native::chosen_by(&request.filter)? {
        native::build(architecture, &share.0.join("native"))?;
        script.insert_str(0, "cp -r /share/native /opt/native\n");
        script.push_str(" --native /opt/native");
    }
    if has_programs {
        // From the disk in memory rather than over the share.
        script.insert_str(0, "cp -r /share/programs /opt/programs\n");
        script.push_str(" --programs /opt/programs");
    }
    if request.plugin.is_some() {
        script.push_str(&format!(" --plugin /opt/ringverbs/{PLUGIN}"));
        if chosen(&request.filter, selection::GROUP) {
            script.push_str(&installers(architecture, &share.0)?);
        }
    }
    if request.short {
        script.push_str(" --short");
    }
    let verdicts = Cache::open(&image, &driver::root().join("rxe-tests"))?;
    if !request.fresh_stock && request.plugin.is_some() {
        fs::write(share.0.join("stock"), verdicts.records())?;
        script.push_str(" --stock-verdicts /share/stock");
    }
    for filter in &request.filter {
        script.push_str(&format!(" --filter '{}'", filter.replace('\'', "")));
    }
    let job = Job {
        script,
        share: Some(share.0.clone()),
        plugin: request.plugin.clone(),
        driver: Some(program),
        shell: false,
        limit: LIMIT,
        hardware: Hardware::default(),
    };
    let mut results = Results::default();
    results.spend("making the guest", tree);
    results.spend("building for the guest", began.elapsed() - tree);
    let mut show = Progress::new(suite.name());
    let ended = vm::run(&image, &job, |line| match line {
        Line::Record(line) => show.record(&mut results, line),
        Line::Text(text) => show.text(text),
    });
    // A guest that went down has shown what it has shown: that counts too.
    match ended {
        Ok(ended) if ended.status != 0 => {
            eprintln!("{suite}: the driver ended with status {}", ended.status);
            results.complete = false;
        }
        Ok(ended) => {
            results.spend("boot", ended.boot);
            eprintln!(
                "{suite}: booted in {:.1} s, cases took {:.0} s",
                ended.boot.as_secs_f64(),
                ended.run.as_secs_f64()
            );
        }
        Err(error) => {
            eprintln!("{suite}: {error:#}");
            results.complete = false;
        }
    }
    keep(&share.0.join("records"), suite.name())?;
    if results.complete {
        verdicts.keep(&results)?;
    }
    Ok(results)
}

/// Builds `cargo xtask` as a static program, which installs in a guest, and says
/// where it is.
pub fn build_installer(architecture: &Architecture) -> Result<PathBuf> {
    let installer = ["build", "-p", "xtask", "--bin", "xtask"];
    driver::build_static_for(architecture.target, &installer)?
        .remove("xtask")
        .context("cargo has not built xtask")
}

/// Puts what installs the plugin and the command into the share, and says so to
/// the driver. What is installed is in the folder of the request's plugin.
/// Packages there are only where their maker is installed.
fn installers(architecture: &Architecture, share: &Path) -> Result<String> {
    fs::copy(build_installer(architecture)?, share.join("xtask"))?;
    let mut arguments = String::from(" --installer /share/xtask");
    for (number, package) in dist::packages_for(architecture)?.iter().enumerate() {
        let name = format!("{number}.deb");
        fs::copy(package, share.join(&name))?;
        arguments.push_str(&format!(" --deb /share/{name}"));
    }
    Ok(arguments)
}

/// Runs the cases on this machine, which must have rdma_rxe, rdma-core's
/// tools and its headers.
pub fn on_host(request: &Request) -> Result<Results> {
    ensure!(
        host::is_root(),
        "--host makes an rxe device and needs root; run the same command as root"
    );
    host::require(
        &[
            ("ibv_rc_pingpong", "ibverbs-utils"),
            ("rping", "rdmacm-utils"),
            ("ib_send_bw", "perftest"),
            ("rdma", "iproute2"),
            ("make", "make"),
            ("cc", "gcc"),
        ],
        false,
    )?;
    let program = driver::build()?;
    let work = Work::new("host")?;
    let mut command = Command::new(program);
    command
        .arg("suite")
        .arg("--scratch")
        .arg(work.0.join("scratch"))
        .arg("--out")
        .arg(work.0.join("records"));
    if let Some(sources) = programs()? {
        let out = work.0.join("programs");
        compile::copy_tree(&sources, &out)?;
        let status = Command::new("make")
            .arg("-C")
            .arg(&out)
            .arg("O=.")
            .status()?;
        ensure!(
            status.success(),
            "the test programs do not build; libibverbs-dev is needed"
        );
        command.arg("--programs").arg(out);
    }
    if let Some(plugin) = &request.plugin {
        command
            .arg("--plugin")
            .arg(std::path::absolute(plugin)?.join(PLUGIN));
    }
    if request.short {
        command.arg("--short");
    }
    for filter in &request.filter {
        command.args(["--filter", filter]);
    }
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let out = child.stdout.take().context("no output of the driver")?;
    let mut results = Results::default();
    let mut show = Progress::new("host");
    for line in std::io::BufRead::lines(std::io::BufReader::new(out)) {
        let line = line?;
        match line.strip_prefix(RECORD) {
            Some(record) => show.record(&mut results, record),
            None => show.text(&line),
        }
    }
    if !child.wait()?.success() {
        results.complete = false;
    }
    keep(&work.0.join("records"), "host")?;
    Ok(results)
}

/// Shows how the cases go: failures at once, and a sign of life.
pub struct Progress {
    what: String,
    began: Instant,
    said: Instant,
    /// When the last record came.
    last: Instant,
    done: usize,
}

impl Progress {
    /// For what is named so.
    pub fn new(what: &str) -> Progress {
        Progress {
            what: what.to_owned(),
            began: Instant::now(),
            said: Instant::now(),
            last: Instant::now(),
            done: 0,
        }
    }

    /// A line that is no record.
    pub fn text(&self, text: &str) {
        if !text.trim().is_empty() {
            eprintln!("  {text}");
        }
    }

    /// A record, which is taken into the results.
    pub fn record(&mut self, results: &mut Results, line: &str) {
        let record = match Record::parse(line) {
            Ok(record) => record,
            Err(error) => {
                eprintln!("{}: unreadable record ({error}): {line}", self.what);
                results.unreadable += 1;
                return;
            }
        };
        if let Record::Environment { .. } = &record {
            self.last = Instant::now();
        }
        if let Record::Case(case) = &record {
            self.done += 1;
            let part = format!("{} [{}]", case.group, case.provider);
            results.spend(&part, self.last.elapsed());
            self.last = Instant::now();
            // A defect of stock's that shows is no news.
            let expected = case.provider == Provider::Stock
                && matches!(case.stock, Stock::MustFail | Stock::FailsSoFar);
            if case.outcome == Outcome::Fail && !expected {
                let detail = case.detail.replace('\n', " / ");
                eprintln!(
                    "  {}: [{}] {} {}: {detail}",
                    self.what, case.provider, case.group, case.name
                );
            }
            if self.said.elapsed() > Duration::from_secs(10) {
                eprintln!(
                    "  {}: {:>4} s, {} results, last {} {} [{}]",
                    self.what,
                    self.began.elapsed().as_secs(),
                    self.done,
                    case.group,
                    case.name,
                    case.provider
                );
                self.said = Instant::now();
            }
        }
        results.take(record);
    }
}

/// The folder of the test programs; none without a manifest in it.
fn programs() -> Result<Option<PathBuf>> {
    let folder = driver::root().join("rxe-tests/programs");
    Ok(folder.join("manifest.txt").exists().then_some(folder))
}

/// Keeps the records of a run where `target/` keeps such things.
fn keep(records: &Path, name: &str) -> Result<()> {
    if records.exists() {
        let to = results_file(name)?;
        fs::copy(records, &to)?;
        eprintln!("{name}: records in {}", to.display());
    }
    Ok(())
}

/// Where the records of a run of that name are kept.
pub fn results_file(name: &str) -> Result<PathBuf> {
    let folder = driver::target_dir().join("guest-results");
    fs::create_dir_all(&folder)?;
    Ok(folder.join(format!("{name}.jsonl")))
}

/// A folder that vanishes with its owner.
pub struct Work(pub PathBuf);

impl Work {
    /// An empty one, for that purpose.
    pub fn new(name: &str) -> Result<Work> {
        let path = std::env::temp_dir().join(format!("ringverbs-{name}-{}", std::process::id()));
        if path.exists() {
            // Left by a process of this number that was killed.
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir_all(&path)?;
        Ok(Work(path))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
