//! Running a case: server and client, limits, retries, and the proof of who
//! served them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::case::{Case, Placeholders, Ready, Shape};
use super::embedded::{self, Embedded};
use super::process::{self, Library, Plugin, Running};
use super::setup::{self, Device, Wiring};
use crate::guest::progress::clip;
use crate::guest::vm::RECORD;
use crate::record::{self, Outcome, Provider, Record, Stock};

/// A program that says with this status that it cannot run here.
const SKIPPED: i32 = 77;

/// The pauses of a wait of such a length so far: a fiftieth of it, within bounds.
fn pause(waited: Duration) -> Duration {
    (waited / 50).clamp(Duration::from_millis(2), Duration::from_millis(20))
}

/// How long a server may take to be ready for its client.
const READY_LIMIT: Duration = Duration::from_secs(10);

/// How long one side may go on when the other has failed: for its last words,
/// since the case has failed.
const GRACE: Duration = Duration::from_secs(3);

/// Where records go.
#[derive(Debug, Default)]
pub struct Report {
    /// A file besides the standard output.
    pub file: Option<PathBuf>,
}

impl Report {
    /// Hands a record over at once.
    pub fn put(&self, record: &Record) -> Result<()> {
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
    /// The MTU of its card.
    pub mtu: u32,
    /// Ours, where there is one.
    pub plugin: Option<Plugin>,
    /// Embedded devices, instead of the kernel's.
    pub embedded: Option<Embedded>,
    /// A folder for programs to run in.
    pub scratch: PathBuf,
    /// A folder that is searched for programs first.
    pub programs: Option<PathBuf>,
    /// The folder of the Rust crate's test programs.
    pub native: Option<PathBuf>,
    /// Where results go.
    pub report: Report,
    next_port: u16,
    proved: BTreeSet<&'static str>,
    /// What stock printed, of cases that compare.
    printed: BTreeMap<String, String>,
}

/// How one attempt ended.
struct Attempt {
    outcome: Outcome,
    detail: String,
    output: String,
    seen: BTreeSet<String>,
    /// A program has ended by itself and said that it failed.
    gave_up: bool,
}

impl Runner {
    /// A runner for `device`.
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
            proved: BTreeSet::new(),
            printed: BTreeMap::new(),
        }
    }

    /// Runs a case under a provider and reports it.
    pub fn run(&mut self, case: &Case, provider: Provider) -> Result<record::Case> {
        // A defect that must show is no reason to try again.
        let must_fail = matches!(case.stock, Stock::MustFail | Stock::FailsSoFar)
            && provider == Provider::Stock;
        let most = if must_fail { 1 } else { case.attempts };
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
            if attempt.outcome != Outcome::Fail || attempts == most {
                break (attempt, began);
            }
            // Twice the same words of a program that gave up: there is no third.
            // Of ours that would be a failure, and has all its attempts.
            let certain = attempt.gave_up && attempt.detail == earlier;
            if certain && provider == Provider::Stock {
                break (attempt, began);
            }
            if earlier.is_empty() {
                earlier = attempt.detail;
            }
        };
        if attempt.outcome == Outcome::Pass
            && [Provider::Ours, Provider::NativeWithPlugin].contains(&provider)
            && self.proved.insert(case.group)
        {
            self.report.put(&Record::Proof {
                case: format!("{}: {}", case.group, case.name),
                maps: attempt.seen.iter().cloned().collect(),
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
        self.report.put(&Record::Case(result.clone()))?;
        Ok(result)
    }

    /// Reports a case that this device is no place for.
    pub fn pass_over(&self, case: &Case, provider: Provider, why: &str) -> Result<()> {
        self.report.put(&Record::Case(record::Case {
            group: case.group.to_owned(),
            name: case.name.clone(),
            provider,
            outcome: Outcome::Skip,
            stock: case.stock,
            attempts: 0,
            seconds: 0.0,
            detail: why.to_owned(),
            earlier: String::new(),
            figures: BTreeMap::new(),
            cached: false,
        }))
    }

    /// Runs a case once and reads its figures, without reporting it; the
    /// reason if it failed.
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

    /// Keeps what stock printed, and holds what ours prints against it.
    fn compare(&mut self, case: &Case, provider: Provider, attempt: &mut Attempt) {
        if attempt.outcome != Outcome::Pass {
            return;
        }
        if provider == Provider::Stock {
            self.printed
                .insert(case.name.clone(), attempt.output.clone());
            return;
        }
        let why = match self.printed.get(&case.name) {
            None => "there is no output of stock to compare with".to_owned(),
            Some(stock) => match difference(stock, &attempt.output) {
                None => return,
                Some(difference) => difference,
            },
        };
        attempt.outcome = Outcome::Fail;
        attempt.detail = why;
    }

    fn attempt(&mut self, case: &Case, provider: Provider) -> Result<Attempt> {
        let placeholders = self.placeholders();
        let dir = self.scratch.join(format!("case-{}", placeholders.port));
        fs::create_dir_all(&dir)?;
        let (on_server, on_client) = sides(provider);
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
                wait_ready(
                    *ready,
                    placeholders.port,
                    &mut server,
                    self.embedded.as_ref(),
                )?;
                let mut client =
                    self.start(on_client, &placeholders.fill(client), &dir, "client")?;
                wait_all(&mut [&mut server, &mut client], case.limit, GRACE)?;
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
                wait_ready(
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
            embedded.tidy();
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

    fn start(&self, library: Library, argv: &[String], dir: &Path, name: &str) -> Result<Running> {
        let mut command = process::command(library, self.plugin.as_ref(), argv)?;
        if library == Library::Stock {
            let stem = self.device.stock.split(['-', '.']).next();
            command.env("RXE_EXPECT", stem.unwrap_or_default());
        }
        self.surround(&mut command);
        command.current_dir(dir);
        Running::start(command, &dir.join(format!("{name}.txt")))
    }

    /// The environment that every program under test finds.
    pub fn surround(&self, command: &mut Command) {
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
            embedded.give(command);
        }
    }

    /// Judges processes that have ended or were given up.
    fn judge(&self, processes: &[(&Running, Library, &str)]) -> Attempt {
        let mut attempt = Attempt {
            outcome: Outcome::Pass,
            detail: String::new(),
            output: processes
                .first()
                .map(|(p, ..)| p.stdout())
                .unwrap_or_default(),
            seen: BTreeSet::new(),
            gave_up: false,
        };
        for (process, library, name) in processes {
            attempt.seen.extend(process.seen().iter().cloned());
            let how = match process.ended() {
                Some(status) if status.success() => match self.verdict(*library, process) {
                    Ok(()) => continue,
                    Err(why) => why,
                },
                Some(status) if status.code() == Some(SKIPPED) => {
                    attempt.outcome = Outcome::Skip;
                    attempt.detail = reason(&process.output(), 1);
                    continue;
                }
                Some(status) => {
                    attempt.gave_up = true;
                    status.to_string()
                }
                None => "not ended in time".to_owned(),
            };
            attempt.outcome = Outcome::Fail;
            let text = reason(&process.output(), 4);
            attempt.detail.push_str(&format!("{name} {how}: {text}\n"));
        }
        attempt.detail = attempt.detail.trim().to_owned();
        attempt
    }

    /// Whether what was mapped proves that `library` served the device.
    pub fn verdict(&self, library: Library, process: &Running) -> Result<(), String> {
        // Programs end before anybody has looked at what they map. The plugin says that
        // it serves, and no other provider than rdma-core's knows the device.
        if self.embedded.is_some() {
            let ours = process.says_it_serves(&self.device.name);
            return match (library, ours) {
                (Library::Stock, false) | (Library::Ours, true) => Ok(()),
                (Library::Stock, true) => Err("ringverbs served in a run with stock".to_owned()),
                _ => Err("ringverbs has not said that it serves the device".to_owned()),
            };
        }
        process::verdict(
            library,
            self.plugin.as_ref(),
            self.device.stock,
            process.seen(),
            process.says_it_serves(&self.device.name),
        )
    }

    /// Makes the device anew where a case has left it gone or down.
    pub fn restore(&mut self) -> Result<()> {
        if self.device.given {
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

/// Who serves the server's side and the client's.
pub fn sides(provider: Provider) -> (Library, Library) {
    match provider {
        Provider::Stock => (Library::Stock, Library::Stock),
        Provider::Ours => (Library::Ours, Library::Ours),
        Provider::OursServer => (Library::Ours, Library::Stock),
        Provider::OursClient => (Library::Stock, Library::Ours),
        Provider::Native => (Library::None, Library::None),
        Provider::NativeWithC => (Library::Peers, Library::Peers),
        Provider::NativeWithPlugin => (Library::PeersOfOurs, Library::PeersOfOurs),
    }
}

/// Waits until all have ended, or `limit` has passed, or one has gone on for
/// `grace` after another failed. What still runs then is killed and has no
/// exit status.
pub(super) fn wait_all(
    processes: &mut [&mut Running],
    limit: Duration,
    grace: Duration,
) -> Result<()> {
    let began = Instant::now();
    let mut failed: Option<Instant> = None;
    loop {
        let mut going = false;
        for process in processes.iter_mut() {
            match process.poll()? {
                None => going = true,
                Some(status) if !status.success() && failed.is_none() => {
                    failed = Some(Instant::now());
                }
                Some(_) => {}
            }
        }
        if !going {
            return Ok(());
        }
        if began.elapsed() > limit || failed.is_some_and(|at| at.elapsed() > grace) {
            for process in processes.iter_mut() {
                process.kill_unfinished();
            }
            return Ok(());
        }
        thread::sleep(pause(began.elapsed()));
    }
}

/// Waits until a server can be connected to; a server that has ended, or does
/// not show itself in time, is left for its client to find.
fn wait_ready(
    ready: Ready,
    port: u16,
    server: &mut Running,
    embedded: Option<&Embedded>,
) -> Result<()> {
    let began = Instant::now();
    while began.elapsed() < READY_LIMIT && server.poll()?.is_none() {
        let up = match (ready, embedded) {
            (Ready::Cm, Some(embedded)) => embedded.listens(port),
            (Ready::CmAt(port), Some(embedded)) => embedded.listens(port),
            (Ready::Group(_), Some(_)) => {
                thread::sleep(embedded::JOIN);
                true
            }
            (Ready::Tcp, _) => ["/proc/net/tcp", "/proc/net/tcp6"]
                .iter()
                .any(|table| listens(&fs::read_to_string(table).unwrap_or_default(), port)),
            (Ready::Cm, None) => cm_listens(port),
            (Ready::CmAt(port), None) => cm_listens(port),
            (Ready::Group(group), None) => attached(
                &fs::read_to_string("/proc/net/dev_mcast").unwrap_or_default(),
                group,
            ),
        };
        if up {
            return Ok(());
        }
        // The tables of sockets are long to read.
        thread::sleep(pause(began.elapsed()).max(Duration::from_millis(5)));
    }
    Ok(())
}

/// Whether the kernel's table of TCP sockets has one that listens on `port`.
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
    // A datagram identifier does not listen by that name, but has the port.
    String::from_utf8_lossy(&out.stdout)
        .lines()
        .any(|line| format!("{line} ").contains(&port))
}

/// Whether a card of this machine listens to multicast `group` for an rxe
/// queue pair: rxe gives the card the link address of the group's GID, which
/// is the IPv4 address as IPv6 maps it, when the first one is attached.
fn attached(table: &str, group: Ipv4Addr) -> bool {
    let [a, b, c, d] = group.octets();
    let wanted = format!("3333{a:02x}{b:02x}{c:02x}{d:02x}");
    table.split_whitespace().any(|word| word == wanted)
}

/// The first lines that differ; `None` if there are none.
fn difference(stock: &str, ours: &str) -> Option<String> {
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
        shown.push("the ends of lines differ".into());
    }
    Some(shown.join(" / "))
}

/// Why a program failed or was skipped: the line that says so, or else its
/// last lines.
pub(super) fn reason(output: &str, lines: usize) -> String {
    output
        .lines()
        .find_map(|line| {
            line.strip_prefix("SKIPPED: ")
                .or_else(|| line.starts_with("FAILED ").then_some(line))
        })
        .map_or_else(|| last_lines(output, lines), |line| clip(line, 500))
}

/// The last lines with anything on them, joined.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|l| !l.is_empty())
        .collect();
    clip(&lines[lines.len().saturating_sub(count)..].join(" / "), 500)
}

/// Whether the plugin takes the device; if it refuses this rdma-core, what it
/// said.
///
/// # Errors
/// It refuses, but not with one line on the standard error, or stock does not
/// take over.
pub fn refusal(runner: &Runner) -> Result<Option<String>> {
    let argv = [
        "ibv_devinfo".to_owned(),
        "-d".into(),
        runner.device.name.clone(),
    ];
    let once = |library| -> Result<(Option<ExitStatus>, String, BTreeSet<String>)> {
        let mut command = process::command(library, runner.plugin.as_ref(), &argv)?;
        if let (Library::Stock, Some(plugin)) = (library, &runner.plugin) {
            // Both are there: as on a system where ours is installed.
            command.env("RDMAV_DRIVERS", &plugin.path);
        }
        runner.surround(&mut command);
        let mut running = Running::start(command, &runner.scratch.join("refusal.txt"))?;
        wait_all(&mut [&mut running], Duration::from_secs(60), Duration::ZERO)?;
        Ok((running.ended(), running.output(), running.seen().clone()))
    };
    let (status, output, _) = once(Library::Ours)?;
    if status.is_some_and(|status| status.success()) {
        return Ok(None);
    }
    let said = |output: &str| -> Vec<String> {
        let ours = output.lines().filter(|line| line.contains("ringverbs:"));
        ours.map(str::to_owned).collect()
    };
    if said(&output).is_empty() {
        // Not a refusal: the cases will show what is wrong.
        return Ok(None);
    }
    let (status, output, seen) = once(Library::Stock)?;
    let lines = said(&output);
    if lines.len() != 1 {
        bail!(
            "the plugin refuses with {} lines instead of one: {lines:?}",
            lines.len()
        );
    }
    let stock = seen.iter().any(|path| path.contains(runner.device.stock));
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
        assert_eq!(difference("a\nb\n", "a\nb\n"), None);
        let shown = difference("a\nb\nc\n", "a\nx\n").unwrap();
        assert_eq!(
            shown,
            "line 2: stock `b`, ours `x` / line 3: stock `c`, ours `(end)`"
        );
        assert!(difference("a\n", "a").is_some());
    }

    #[test]
    fn a_program_s_own_reason_is_preferred() {
        assert_eq!(reason("x\nSKIPPED: no such thing\ny\n", 1), "no such thing");
        assert_eq!(reason("FAILED a.c:3: why\nafter\n", 1), "FAILED a.c:3: why");
        assert_eq!(reason("one\ntwo\n", 1), "two");
    }

    #[test]
    fn an_attached_group_is_found() {
        let table = "3    rx0             1     0     01005e6f4d01\n\
                     3    rx0             1     0     3333ef014d01\n";
        assert!(attached(table, Ipv4Addr::new(239, 1, 77, 1)));
        assert!(!attached(table, Ipv4Addr::new(239, 111, 77, 1)));
    }

    #[test]
    fn hanging_program_is_killed() {
        let dir = std::env::temp_dir().join(format!("rv-hang-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut running = Running::start(command, &dir.join("out")).unwrap();
        wait_all(
            &mut [&mut running],
            Duration::from_millis(100),
            Duration::ZERO,
        )
        .unwrap();
        assert!(running.ended().is_none());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_client_is_not_waited_for_when_its_server_fails() {
        let dir = std::env::temp_dir().join(format!("rv-grace-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut server = Running::start(Command::new("false"), &dir.join("s")).unwrap();
        let mut command = Command::new("sleep");
        command.arg("60");
        let mut client = Running::start(command, &dir.join("c")).unwrap();
        let began = Instant::now();
        let limit = Duration::from_secs(50);
        wait_all(
            &mut [&mut server, &mut client],
            limit,
            Duration::from_millis(100),
        )
        .unwrap();
        assert!(began.elapsed() < Duration::from_secs(20));
        assert!(server.ended().is_some() && client.ended().is_none());
        fs::remove_dir_all(&dir).unwrap();
    }
}
