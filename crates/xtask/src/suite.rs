//! Runs the driver's cases in a guest, or on this machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rxe_tests::compare::Results;
use rxe_tests::driver::case::matches_filter;
use rxe_tests::driver::selection;
use rxe_tests::guest::stock::VerdictCache;
use rxe_tests::guest::vm::{self, Line, RECORD};
use rxe_tests::guest::{Architecture, Hardware, Job, Suite, compile, host, tree};
use rxe_tests::record::{Outcome, Provider, Record, StockExpectation};

use crate::{dist, driver, native};

/// The plugin's name; libibverbs appends `-rdmav<ABI>.so`.
pub const PLUGIN: &str = "libringverbs";

/// The cases to run, and their options.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// The folder built by `dist`; without it only stock runs.
    pub plugin: Option<PathBuf>,
    /// Only the short list.
    pub short: bool,
    /// Only cases whose group and name contain one of these; all if empty.
    pub filter: Vec<String>,
    /// Another kernel package.
    pub kernel: Option<String>,
    /// Run every case with stock, without the cached verdicts; otherwise where it is needed.
    pub fresh_stock: bool,
}

/// Time limit for all cases of a guest. An idle machine needs a third of it.
pub const LIMIT: Duration = Duration::from_secs(75 * 60);

/// Reserves huge pages in a guest, which some tests of pyverbs need.
pub const HUGE_PAGES: &str = "echo 40 > /proc/sys/vm/nr_hugepages";

/// Boots the guest of `suite` and runs the cases in it.
pub fn in_guest(suite: Suite, request: &Request) -> Result<Results> {
    let began = Instant::now();
    let image = tree::image(suite, request.kernel.as_deref())?;
    let tree = began.elapsed();
    let architecture = suite.architecture();
    let driver_program = driver::build_for(architecture)?;
    let share = TempDir::new(&format!("share-{suite}"))?;
    let has_programs = programs()?.is_some();
    if let Some(sources) = programs()? {
        let log = share.0.join("compile.log");
        compile::programs(&image, &sources, &share.0.join("programs"), &log)?;
    }
    let mut script = String::from("exec rxe-driver suite --scratch /tmp/rxe --out /share/records");
    script.push_str(" --pyverbs /opt/rdma-core/tests");
    if native::has_matching_case(&request.filter)? {
        native::build(architecture, &share.0.join("native"))?;
        script.insert_str(0, "cp -r /share/native /opt/native\n");
        script.push_str(" --native /opt/native");
    }
    if has_programs {
        // Copied to the guest's memory: the share is slower.
        script.insert_str(0, "cp -r /share/programs /opt/programs\n");
        script.push_str(" --programs /opt/programs");
    }
    if request.plugin.is_some() {
        script.push_str(&format!(" --plugin /opt/ringverbs/{PLUGIN}"));
        if matches_filter(&request.filter, selection::GROUP) {
            script.push_str(&installers(architecture, &share.0)?);
        }
    }
    if request.short {
        script.push_str(" --short");
    }
    let verdicts = VerdictCache::open(&image, &driver::root().join("rxe-tests"))?;
    if !request.fresh_stock && request.plugin.is_some() {
        fs::write(share.0.join("stock"), verdicts.records())?;
        script.push_str(" --stock-verdicts /share/stock --stock-if-needed");
    }
    for filter in &request.filter {
        script.push_str(&format!(" --filter '{}'", filter.replace('\'', "")));
    }
    let job = Job {
        script,
        share: Some(share.0.clone()),
        plugin: request.plugin.clone(),
        driver: Some(driver_program),
        shell: false,
        limit: LIMIT,
        hardware: Hardware::default(),
    };
    let mut results = Results::default();
    results.add_time("making the guest", tree);
    results.add_time("building for the guest", began.elapsed() - tree);
    let mut progress = Progress::new(suite.name());
    let ended = vm::run(&image, &job, |line| match line {
        Line::Record(line) => progress.record(&mut results, line),
        Line::Text(text) => progress.text(text),
    });
    // The results of a guest that crashed count, too.
    match ended {
        Ok(ended) if ended.status != 0 => {
            eprintln!("{suite}: the driver ended with status {}", ended.status);
            results.complete = false;
        }
        Ok(ended) => {
            results.add_time("boot", ended.boot_time);
            eprintln!(
                "{suite}: booted in {:.1} s, cases took {:.0} s",
                ended.boot_time.as_secs_f64(),
                ended.run_time.as_secs_f64()
            );
        }
        Err(error) => {
            eprintln!("{suite}: {error:#}");
            results.complete = false;
        }
    }
    save_records(&share.0.join("records"), suite.name())?;
    if results.complete {
        verdicts.save(&results)?;
    }
    Ok(results)
}

/// Builds `cargo xtask` as a static program, which installs in a guest, and returns its
/// path.
pub fn build_installer(architecture: &Architecture) -> Result<PathBuf> {
    let installer = ["build", "-p", "xtask", "--bin", "xtask"];
    driver::build_static_for(architecture.target, &installer)?
        .remove("xtask")
        .context("cargo has not built xtask")
}

/// Copies the installers of the plugin and the command to the share, and returns the
/// driver's options for them. They install the folder of the request's plugin. Debian
/// packages are built only if cargo-deb is installed.
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

/// Runs the cases on this machine, which must have rdma_rxe and rdma-core's tools and
/// headers.
pub fn on_host(request: &Request) -> Result<Results> {
    ensure!(
        host::is_root(),
        "--host creates an rxe device and needs root; run the same command as root"
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
    let driver_program = driver::build()?;
    let work = TempDir::new("host")?;
    let mut command = Command::new(driver_program);
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
    let mut progress = Progress::new("host");
    for line in std::io::BufRead::lines(std::io::BufReader::new(out)) {
        let line = line?;
        match line.strip_prefix(RECORD) {
            Some(record) => progress.record(&mut results, record),
            None => progress.text(&line),
        }
    }
    if !child.wait()?.success() {
        results.complete = false;
    }
    save_records(&work.0.join("records"), "host")?;
    Ok(results)
}

/// Prints failures immediately, and progress.
pub struct Progress {
    title: String,
    began: Instant,
    last_printed: Instant,
    /// When the last record was received.
    last_record: Instant,
    done: usize,
}

impl Progress {
    /// Starts the progress of a run with this title.
    pub fn new(what: &str) -> Progress {
        Progress {
            title: what.to_owned(),
            began: Instant::now(),
            last_printed: Instant::now(),
            last_record: Instant::now(),
            done: 0,
        }
    }

    /// Prints a line that is not a record.
    pub fn text(&self, text: &str) {
        if !text.trim().is_empty() {
            eprintln!("  {text}");
        }
    }

    /// Parses a record, and adds it to the results.
    pub fn record(&mut self, results: &mut Results, line: &str) {
        let record = match Record::parse(line) {
            Ok(record) => record,
            Err(error) => {
                eprintln!("{}: unreadable record ({error}): {line}", self.title);
                results.unreadable += 1;
                return;
            }
        };
        if let Record::Environment { .. } = &record {
            self.last_record = Instant::now();
        }
        if let Record::Case(case) = &record {
            self.done += 1;
            let part = format!("{} [{}]", case.group, case.provider);
            results.add_time(&part, self.last_record.elapsed());
            self.last_record = Instant::now();
            // Expected failures of stock are not printed.
            let expected = case.provider == Provider::Stock
                && matches!(
                    case.stock,
                    StockExpectation::MustFail | StockExpectation::FailsSoFar
                );
            if case.outcome == Outcome::Fail && !expected {
                let detail = case.detail.replace('\n', " / ");
                eprintln!(
                    "  {}: [{}] {} {}: {detail}",
                    self.title, case.provider, case.group, case.name
                );
            }
            if self.last_printed.elapsed() > Duration::from_secs(10) {
                eprintln!(
                    "  {}: {:>4} s, {} results, last {} {} [{}]",
                    self.title,
                    self.began.elapsed().as_secs(),
                    self.done,
                    case.group,
                    case.name,
                    case.provider
                );
                self.last_printed = Instant::now();
            }
        }
        results.add(record);
    }
}

/// Returns the folder of the test programs if it has a manifest.
fn programs() -> Result<Option<PathBuf>> {
    let folder = driver::root().join("rxe-tests/programs");
    Ok(folder.join("manifest.txt").exists().then_some(folder))
}

/// Copies the records of a run to the target directory.
fn save_records(records: &Path, name: &str) -> Result<()> {
    if records.exists() {
        let to = results_file(name)?;
        fs::copy(records, &to)?;
        eprintln!("{name}: records in {}", to.display());
    }
    Ok(())
}

/// Returns the path for the records of the run `name`.
pub fn results_file(name: &str) -> Result<PathBuf> {
    let folder = driver::target_dir().join("guest-results");
    fs::create_dir_all(&folder)?;
    Ok(folder.join(format!("{name}.jsonl")))
}

/// A temporary folder, removed on drop.
pub struct TempDir(pub PathBuf);

impl TempDir {
    /// Creates an empty folder; `name` becomes part of its name.
    pub fn new(name: &str) -> Result<TempDir> {
        let path = std::env::temp_dir().join(format!("ringverbs-{name}-{}", std::process::id()));
        if path.exists() {
            // A killed process with this number has left it.
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir_all(&path)?;
        Ok(TempDir(path))
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
