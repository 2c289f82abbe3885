//! Runs a case: server and client, limits, retries, and the proof of the provider.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::case::{Case, Placeholders, ReadyCheck, Shape};
use super::embedded::{self, Embedded};
use super::process::{self, Library, Plugin, TestProcess};
use super::setup::{self, Device, Wiring};
use crate::guest::progress::clip;
use crate::guest::vm::RECORD;
use crate::record::{self, Outcome, Provider, Record, StockExpectation};

/// The exit status of a program that cannot run here.
const SKIP_STATUS: i32 = 77;

/// Returns the polling interval after a wait of this length: a fiftieth of it, within
/// bounds.
fn poll_interval(waited: Duration) -> Duration {
    (waited / 50).clamp(Duration::from_millis(2), Duration::from_millis(20))
}

/// Time limit for a server to become ready.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// How long one side may run after the other has failed, for its error messages.
const GRACE_PERIOD: Duration = Duration::from_secs(3);

/// The outputs for records: standard output, and optionally a file.
#[derive(Debug, Default)]
pub struct Report {
    /// A file besides the standard output.
    pub file: Option<PathBuf>,
}

impl Report {
    /// Writes a record and flushes it.
    pub fn write(&self, record: &Record) -> Result<()> {
        let line = record.line();
        let mut out = std::io::stdout().lock();
        writeln!(out, "{RECORD}{line}")?;
        out.flush()?;
        if let Some(path) = &self.file {
            let mut file = fs::File::options().create(true).append(true).open(path)?;
            writeln!(file, "{line}")?;
        }
        Ok(())
    }
}

/// Runs cases one after another.
#[derive(Debug)]
pub struct Runner {
    /// The device under test.
    pub device: Device,
    /// The MTU of its network device.
    pub mtu: u32,
    /// The plugin, if it is tested.
    pub plugin: Option<Plugin>,
    /// Embedded devices, instead of the kernel's.
    pub embedded: Option<Embedded>,
    /// The working folder of programs.
    pub scratch: PathBuf,
    /// A folder at the front of PATH.
    pub programs: Option<PathBuf>,
    /// The folder of the Rust crate's test programs.
    pub native: Option<PathBuf>,
    /// The output for results.
    pub report: Report,
    next_port: u16,
    groups_with_proof: BTreeSet<&'static str>,
    /// Output of stock, by case, for cases that compare it.
    stock_outputs: BTreeMap<String, String>,
}

/// The result of one attempt.
struct Attempt {
    outcome: Outcome,
    detail: String,
    output: String,
    mapped_providers: BTreeSet<String>,
    /// A program has exited with a failure status.
    exited_with_failure: bool,
}

impl Runner {
    /// Creates a runner for `device`.
    pub fn new(device: Device, mtu: u32, plugin: Option<Plugin>, scratch: PathBuf) -> Runner {
        Runner {
            device,
            mtu,
            plugin,
            embedded: None,
            scratch,
            programs: None,
            native: None,
            report: Report::default(),
            next_port: 18_600,
            groups_with_proof: BTreeSet::new(),
            stock_outputs: BTreeMap::new(),
        }
    }

    /// Runs a case with a provider and reports it.
    pub fn run(&mut self, case: &Case, provider: Provider) -> Result<record::Case> {
        // An expected failure is not retried.
        let must_fail = matches!(
            case.stock,
            StockExpectation::MustFail | StockExpectation::FailsSoFar
        ) && provider == Provider::Stock;
        let max_attempts = if must_fail { 1 } else { case.attempts };
        let mut attempts = 0;
        let mut earlier = String::new();
        let (attempt, began) = loop {
            attempts += 1;
            let began = Instant::now();
            let mut attempt = self.attempt(case, provider)?;
            self.restore()?;
            if case.same_output {
                self.compare(case, provider, &mut attempt);
            }
            if attempt.outcome != Outcome::Fail || attempts == max_attempts {
                break (attempt, began);
            }
            // A program of stock that failed twice with the same message has no third
            // attempt. Programs of ours always have all.
            let is_repeatable = attempt.exited_with_failure && attempt.detail == earlier;
            if is_repeatable && provider == Provider::Stock {
                break (attempt, began);
            }
            if earlier.is_empty() {
                earlier = attempt.detail;
            }
        };
        if attempt.outcome == Outcome::Pass
            && [Provider::Ours, Provider::NativeWithPlugin].contains(&provider)
            && self.groups_with_proof.insert(case.group)
        {
            self.report.write(&Record::Proof {
                case: format!("{}: {}", case.group, case.name),
                maps: attempt.mapped_providers.iter().cloned().collect(),
            })?;
        }
        let result = record::Case {
            group: case.group.to_owned(),
            name: case.name.clone(),
            provider,
            outcome: attempt.outcome,
            stock: case.stock,
            attempts,
            seconds: (began.elapsed().as_secs_f64() * 1000.0).round() / 1000.0,
            detail: attempt.detail,
            earlier,
            figures: case.figures.read(&attempt.output),
            cached: false,
        };
        self.report.write(&Record::Case(result.clone()))?;
        Ok(result)
    }

    /// Reports a case as skipped.
    pub fn skip(&self, case: &Case, provider: Provider, reason: &str) -> Result<()> {
        self.report.write(&Record::Case(record::Case {
            group: case.group.to_owned(),
            name: case.name.clone(),
            provider,
            outcome: Outcome::Skip,
            stock: case.stock,
            attempts: 0,
            seconds: 0.0,
            detail: reason.to_owned(),
            earlier: String::new(),
            figures: BTreeMap::new(),
            cached: false,
        }))
    }

    /// Runs a case once without reporting it. Returns its figures, or the reason for
    /// the failure.
    pub fn measure(
        &mut self,
        case: &Case,
        provider: Provider,
    ) -> Result<Result<BTreeMap<String, f64>, String>> {
        let attempt = self.attempt(case, provider)?;
        Ok(match attempt.outcome {
            Outcome::Pass => Ok(case.figures.read(&attempt.output)),
            _ => Err(attempt.detail),
        })
    }

    /// Keeps the output of stock, and compares that of ours with it.
    fn compare(&mut self, case: &Case, provider: Provider, attempt: &mut Attempt) {
        if attempt.outcome != Outcome::Pass {
            return;
        }
        if provider == Provider::Stock {
            self.stock_outputs
                .insert(case.name.clone(), attempt.output.clone());
            return;
        }
        let reason = match self.stock_outputs.get(&case.name) {
            None => "there is no output of stock to compare with".to_owned(),
            Some(stock) => match differing_lines(stock, &attempt.output) {
                None => return,
                Some(difference) => difference,
            },
        };
        attempt.outcome = Outcome::Fail;
        attempt.detail = reason;
    }

    fn attempt(&mut self, case: &Case, provider: Provider) -> Result<Attempt> {
        let placeholders = self.placeholders();
        let dir = self.scratch.join(format!("case-{}", placeholders.port));
        fs::create_dir_all(&dir)?;
        let (on_server, on_client) = libraries(provider);
        let result = match &case.shape {
            Shape::Single(line) => {
                let mut one = self.start(on_server, &placeholders.fill(line), &dir, "out")?;
                wait_all(&mut [&mut one], case.limit, Duration::ZERO)?;
                Ok(self.judge(&[(&one, on_server, "")]))
            }
            Shape::Pair {
                server,
                client,
                ready,
            } => {
                let mut server =
                    self.start(on_server, &placeholders.fill(server), &dir, "server")?;
                wait_until_ready(
                    *ready,
                    placeholders.port,
                    &mut server,
                    self.embedded.as_ref(),
                )?;
                let mut client =
                    self.start(on_client, &placeholders.fill(client), &dir, "client")?;
                wait_all(&mut [&mut server, &mut client], case.limit, GRACE_PERIOD)?;
                Ok(self.judge(&[
                    (&client, on_client, "client"),
                    (&server, on_server, "server"),
                ]))
            }
            Shape::Service {
                server,
                client,
                ready,
            } => {
                let mut server =
                    self.start(on_server, &placeholders.fill(server), &dir, "server")?;
                wait_until_ready(
                    *ready,
                    placeholders.port,
                    &mut server,
                    self.embedded.as_ref(),
                )?;
                let mut client =
                    self.start(on_client, &placeholders.fill(client), &dir, "client")?;
                wait_all(&mut [&mut client], case.limit, Duration::ZERO)?;
                server.poll()?;
                Ok(self.judge(&[(&client, on_client, "client")]))
            }
        };
        let _ = fs::remove_dir_all(&dir);
        if let Some(embedded) = &self.embedded {
            embedded.remove_stale_sockets();
        }
        result
    }

    fn placeholders(&mut self) -> Placeholders {
        self.next_port = if self.next_port > 30_000 {
            18_600
        } else {
            self.next_port + 1
        };
        Placeholders {
            dev: self.device.name.clone(),
            gid: self.device.gid,
            addr: self.device.address.to_string(),
            port: self.next_port,
        }
    }

    fn start(
        &self,
        library: Library,
        argv: &[String],
        dir: &Path,
        name: &str,
    ) -> Result<TestProcess> {
        let mut command = process::command(library, self.plugin.as_ref(), argv)?;
        if library == Library::Stock {
            let stem = self.device.stock.split(['-', '.']).next();
            command.env("RXE_EXPECT", stem.unwrap_or_default());
        }
        self.set_environment(&mut command);
        command.current_dir(dir);
        TestProcess::start(command, &dir.join(format!("{name}.txt")))
    }

    /// Sets the environment of a program under test.
    pub fn set_environment(&self, command: &mut Command) {
        command
            .env("RXE_DEV", &self.device.name)
            .env("RXE_GID", self.device.gid.to_string())
            .env("RXE_ADDR", self.device.address.to_string())
            .env("RXE_MTU", self.mtu.to_string());
        let mut path = std::env::var("PATH").unwrap_or_default();
        for folder in [&self.programs, &self.native].into_iter().flatten() {
            path = format!("{}:{path}", folder.display());
        }
        command.env("PATH", path);
        if let Some(embedded) = &self.embedded {
            embedded.configure(command);
        }
    }

    /// Judges processes that have exited or were killed at the limit.
    fn judge(&self, processes: &[(&TestProcess, Library, &str)]) -> Attempt {
        let mut attempt = Attempt {
            outcome: Outcome::Pass,
            detail: String::new(),
            output: processes
                .first()
                .map(|(p, ..)| p.stdout())
                .unwrap_or_default(),
            mapped_providers: BTreeSet::new(),
            exited_with_failure: false,
        };
        for (process, library, name) in processes {
            attempt
                .mapped_providers
                .extend(process.mapped_providers().iter().cloned());
            let how = match process.exit_status() {
                Some(status) if status.success() => match self.check_provider(*library, process) {
                    Ok(()) => continue,
                    Err(reason) => reason,
                },
                Some(status) if status.code() == Some(SKIP_STATUS) => {
                    attempt.outcome = Outcome::Skip;
                    attempt.detail = failure_reason(&process.output(), 1);
                    continue;
                }
                Some(status) => {
                    attempt.exited_with_failure = true;
                    status.to_string()
                }
                None => "timed out".to_owned(),
            };
            attempt.outcome = Outcome::Fail;
            let text = failure_reason(&process.output(), 4);
            attempt.detail.push_str(&format!("{name} {how}: {text}\n"));
        }
        attempt.detail = attempt.detail.trim().to_owned();
        attempt
    }

    /// Checks that `library` served the device.
    pub fn check_provider(&self, library: Library, process: &TestProcess) -> Result<(), String> {
        // Programs may exit before their memory maps are read. The plugin logs that it
        // serves, and rdma-core's is the only other provider that knows the device.
        if self.embedded.is_some() {
            let ours = process.has_logged_serving(&self.device.name);
            return match (library, ours) {
                (Library::Stock, false) | (Library::Ours, true) => Ok(()),
                (Library::Stock, true) => Err("ringverbs served in a run with stock".to_owned()),
                _ => Err("ringverbs has not logged that it serves the device".to_owned()),
            };
        }
        process::check_provider(
            library,
            self.plugin.as_ref(),
            self.device.stock,
            process.mapped_providers(),
            process.has_logged_serving(&self.device.name),
        )
    }

    /// Creates the device again if a case has removed it or left its port down.
    pub fn restore(&mut self) -> Result<()> {
        if self.device.preexisting {
            return Ok(());
        }
        let port = Path::new("/sys/class/infiniband")
            .join(&self.device.name)
            .join("ports/1");
        let state = fs::read_to_string(port.join("state")).unwrap_or_default();
        if state.contains("ACTIVE") {
            return Ok(());
        }
        let mut devices = setup::devices(Wiring::Loopback, self.mtu)?;
        self.device = devices.pop().context("no device was made")?;
        Ok(())
    }
}

/// Returns the libraries that serve the server and the client.
pub fn libraries(provider: Provider) -> (Library, Library) {
    match provider {
        Provider::Stock => (Library::Stock, Library::Stock),
        Provider::Ours => (Library::Ours, Library::Ours),
        Provider::OursServer => (Library::Ours, Library::Stock),
        Provider::OursClient => (Library::Stock, Library::Ours),
        Provider::Native => (Library::None, Library::None),
        Provider::NativeWithC => (Library::StockPeers, Library::StockPeers),
        Provider::NativeWithPlugin => (Library::PluginPeers, Library::PluginPeers),
    }
}

/// Waits until all processes have exited, `limit` has passed, or `grace` has passed
/// since one failed. Processes that still run are then killed and have no exit status.
pub(super) fn wait_all(
    processes: &mut [&mut TestProcess],
    limit: Duration,
    grace: Duration,
) -> Result<()> {
    let began = Instant::now();
    let mut failed: Option<Instant> = None;
    loop {
        let mut any_running = false;
        for process in processes.iter_mut() {
            match process.poll()? {
                None => any_running = true,
                Some(status) if !status.success() && failed.is_none() => {
                    failed = Some(Instant::now());
                }
                Some(_) => {}
            }
        }
        if !any_running {
            return Ok(());
        }
        if began.elapsed() > limit || failed.is_some_and(|at| at.elapsed() > grace) {
            for process in processes.iter_mut() {
                process.kill_unfinished();
            }
            return Ok(());
        }
        thread::sleep(poll_interval(began.elapsed()));
    }
}

/// Waits until a server is ready. If the server exits or times out, its client fails.
fn wait_until_ready(
    ready: ReadyCheck,
    port: u16,
    server: &mut TestProcess,
    embedded: Option<&Embedded>,
) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < READY_LIMIT && server.poll()?.is_none() {
        let up = match (ready, embedded) {
            (ReadyCheck::Cm, Some(embedded)) => embedded.is_listening(port),
            (ReadyCheck::CmPort(port), Some(embedded)) => embedded.is_listening(port),
            (ReadyCheck::Multicast(_), Some(_)) => {
                thread::sleep(embedded::JOIN_DELAY);
                true
            }
            (ReadyCheck::Tcp, _) => ["/proc/net/tcp", "/proc/net/tcp6"]
                .iter()
                .any(|table| listens(&fs::read_to_string(table).unwrap_or_default(), port)),
            (ReadyCheck::Cm, None) => cm_listens(port),
            (ReadyCheck::CmPort(port), None) => cm_listens(port),
            (ReadyCheck::Multicast(group), None) => is_attached(
                &fs::read_to_string("/proc/net/dev_mcast").unwrap_or_default(),
                group,
            ),
        };
        if up {
            return Ok(());
        }
        // Reading the tables of sockets takes long.
        thread::sleep(poll_interval(began.elapsed()).max(Duration::from_millis(5)));
    }
    Ok(())
}

/// Returns whether the kernel's table has a TCP socket that listens on `port`.
fn listens(table: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let port = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut words = line.split_whitespace().skip(1);
        words.next().is_some_and(|local| local.ends_with(&port)) && words.nth(1) == Some(LISTEN)
    })
}

fn cm_listens(port: u16) -> bool {
    let out = Command::new("rdma")
        .args(["resource", "show", "cm_id"])
        .output();
    let Ok(out) = out else { return false };
    let port = format!(":{port} ");
    // A datagram identifier has the port, but not the state LISTEN.
    String::from_utf8_lossy(&out.stdout)
        .lines()
        .any(|line| format!("{line} ").contains(&port))
}

/// Returns whether a network device of this machine receives multicast `group` for an
/// rxe queue pair. When the first queue pair is attached, rxe adds the link-layer address
/// of the group's GID, which is the IPv4-mapped IPv6 address.
fn is_attached(table: &str, group: Ipv4Addr) -> bool {
    let [a, b, c, d] = group.octets();
    let wanted = format!("3333{a:02x}{b:02x}{c:02x}{d:02x}");
    table.split_whitespace().any(|word| word == wanted)
}

/// Describes the first lines that differ; `None` if there are none.
fn differing_lines(stock: &str, ours: &str) -> Option<String> {
    if stock == ours {
        return None;
    }
    let (mut s, mut o) = (stock.lines(), ours.lines());
    let mut shown = Vec::new();
    for number in 1.. {
        let (stock, ours) = (s.next(), o.next());
        if stock.is_none() && ours.is_none() {
            break;
        }
        if stock != ours {
            shown.push(format!(
                "line {number}: stock `{}`, ours `{}`",
                stock.unwrap_or("(end)"),
                ours.unwrap_or("(end)")
            ));
        }
    }
    shown.truncate(5);
    if shown.is_empty() {
        shown.push("line endings differ".into());
    }
    Some(shown.join(" / "))
}

/// Returns why a program failed or was skipped: its line `SKIPPED: ` or `FAILED `, or
/// else its last lines.
pub(super) fn failure_reason(output: &str, lines: usize) -> String {
    output
        .lines()
        .find_map(|line| {
            line.strip_prefix("SKIPPED: ")
                .or_else(|| line.starts_with("FAILED ").then_some(line))
        })
        .map_or_else(|| last_lines(output, lines), |line| clip(line, 500))
}

/// Returns the last non-empty lines, joined.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    clip(&lines[lines.len().saturating_sub(count)..].join(" / "), 500)
}

/// Returns the plugin's message if it refuses this rdma-core.
///
/// # Errors
/// The plugin refuses with more than one line, or stock does not take over.
pub fn plugin_refusal(runner: &Runner) -> Result<Option<String>> {
    let argv = [
        "ibv_devinfo".to_owned(),
        "-d".into(),
        runner.device.name.clone(),
    ];
    let run_devinfo = |library| -> Result<(Option<ExitStatus>, String, BTreeSet<String>)> {
        let mut command = process::command(library, runner.plugin.as_ref(), &argv)?;
        if let (Library::Stock, Some(plugin)) = (library, &runner.plugin) {
            // Both providers are available, as on a system with the plugin installed.
            command.env("RDMAV_DRIVERS", &plugin.path);
        }
        runner.set_environment(&mut command);
        let mut running = TestProcess::start(command, &runner.scratch.join("refusal.txt"))?;
        wait_all(&mut [&mut running], Duration::from_secs(60), Duration::ZERO)?;
        Ok((
            running.exit_status(),
            running.output(),
            running.mapped_providers().clone(),
        ))
    };
    let (status, output, _) = run_devinfo(Library::Ours)?;
    if status.is_some_and(|status| status.success()) {
        return Ok(None);
    }
    let messages = |output: &str| -> Vec<String> {
        let ours = output.lines().filter(|line| line.contains("ringverbs:"));
        ours.map(str::to_owned).collect()
    };
    if messages(&output).is_empty() {
        // Not a refusal: the cases will show the failure.
        return Ok(None);
    }
    let (status, output, mapped) = run_devinfo(Library::Stock)?;
    let lines = messages(&output);
    if lines.len() != 1 {
        bail!(
            "the plugin refuses with {} lines instead of one: {lines:?}",
            lines.len()
        );
    }
    let stock = mapped.iter().any(|path| path.contains(runner.device.stock));
    if !status.is_some_and(|status| status.success()) || !stock {
        bail!("the plugin refuses, but stock does not take over: {output}");
    }
    Ok(lines.into_iter().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listening_socket_is_found() {
        let table = "  sl  local_address rem_address   st tx_queue\n\
                       0: 00000000:4853 00000000:0000 0A 00000000:00000000\n\
                       1: 0100007F:4854 0100007F:9999 01 00000000:00000000\n";
        assert!(listens(table, 0x4853));
        assert!(!listens(table, 0x4854));
    }

    #[test]
    fn differing_outputs_are_shown_by_line() {
        assert_eq!(differing_lines("a\nb\n", "a\nb\n"), None);
        let shown = differing_lines("a\nb\nc\n", "a\nx\n").unwrap();
        assert_eq!(
            shown,
            "line 2: stock `b`, ours `x` / line 3: stock `c`, ours `(end)`"
        );
        assert!(differing_lines("a\n", "a").is_some());
    }

    #[test]
    fn a_program_s_own_message_is_preferred() {
        assert_eq!(
            failure_reason("x\nSKIPPED: no such thing\ny\n", 1),
            "no such thing"
        );
        assert_eq!(
            failure_reason("FAILED a.c:3: why\nafter\n", 1),
            "FAILED a.c:3: why"
        );
        assert_eq!(failure_reason("one\ntwo\n", 1), "two");
    }

    #[test]
    fn an_attached_group_is_found() {
        let table = "3    rx0             1     0     01005e6f4d01\n\
                     3    rx0             1     0     3333ef014d01\n";
        assert!(is_attached(table, Ipv4Addr::new(239, 1, 77, 1)));
        assert!(!is_attached(table, Ipv4Addr::new(239, 111, 77, 1)));
    }

    #[test]
    fn hanging_program_is_killed() {
        let dir = std::env::temp_dir().join(format!("rv-hang-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut running = TestProcess::start(command, &dir.join("out")).unwrap();
        wait_all(
            &mut [&mut running],
            Duration::from_millis(100),
            Duration::ZERO,
        )
        .unwrap();
        assert!(running.exit_status().is_none());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_client_is_killed_after_its_server_fails() {
        let dir = std::env::temp_dir().join(format!("rv-grace-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut server = TestProcess::start(Command::new("false"), &dir.join("s")).unwrap();
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut client = TestProcess::start(command, &dir.join("c")).unwrap();
        let began = Instant::now();
        let limit = Duration::from_secs(50);
        wait_all(
            &mut [&mut server, &mut client],
            limit,
            Duration::from_millis(100),
        )
        .unwrap();
        assert!(began.elapsed() < Duration::from_secs(20));
        assert!(server.exit_status().is_some() && client.exit_status().is_none());
        fs::remove_dir_all(&dir).unwrap();
    }
}
