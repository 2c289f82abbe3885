//! `cargo xtask softhca`: a guest with a ConnectX in software, for a command, a shell, or
//! tests.

pub mod check;
pub mod known_failures;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rxe_tests::guest::suite::X86_64;
use rxe_tests::guest::vm::{self, JobExit, Line};
use rxe_tests::guest::{Hardware, Job, Qemu, Suite, tree};

use crate::suite::TempDir;
use crate::{dist, driver, guest, native};

/// The program's vfio-user socket, in its folder.
const SOCKET: &str = "hca.sock";
/// Its control socket.
const CONTROL: &str = "control.sock";
/// Its log.
const LOG: &str = "softhca.log";

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// The Debian release of the guest: trixie, bookworm or sid
    #[arg(long, default_value = "trixie")]
    suite: Suite,
    /// A kernel package of that release other than linux-image-amd64
    #[arg(long)]
    kernel: Option<String>,
    /// The profile of the HCA (`softhca profiles`); several profiles make several
    /// HCAs, or with `--test` several runs
    #[arg(long, default_value = "roce")]
    profile: Vec<String>,
    /// Run rdma-core's and perftest's programs and pyverbs in the guest, then
    /// two HCAs over a lossy wire, and injected faults
    #[arg(long, conflicts_with_all = ["run", "share", "no_setup", "hcas"])]
    test: bool,
    /// With `--test`, also with ringverbs as the provider, on both sides and on
    /// one, in the same boot: cases that pass with rdma-core's must pass with ours.
    /// The plugin is that of `--plugin`, or is built now
    #[arg(long, requires = "test")]
    ours: bool,
    /// With `--test`, the short list, without pyverbs
    #[arg(long, requires = "test")]
    short: bool,
    /// With `--test`, only cases whose group and name contain this (or one of
    /// these). `storage` alone selects Linux's NVMe, NFS and iSER over RDMA
    #[arg(long, requires = "test")]
    filter: Vec<String>,
    /// Minimum number of HCAs of the guest
    #[arg(long, default_value_t = 1)]
    hcas: u32,
    /// A shell command to run in the guest, in the folder of the share.
    /// Without it, a shell
    #[arg(long)]
    run: Option<String>,
    /// A folder that the guest sees as /share, readable and writable
    #[arg(long)]
    share: Option<PathBuf>,
    /// The share is a folder with the Rust crate's programs and scripts, built
    /// now and found by their names; RXE_DEV and its like are set for them.
    /// With `--test`, the Rust crate's cases alone, and with `--ours` those whose
    /// peers the plugin serves as well
    #[arg(long, conflicts_with = "share")]
    native: bool,
    /// A folder whose contents the guest finds in /opt/ringverbs
    #[arg(long)]
    plugin: Option<PathBuf>,
    /// Do not load the drivers before the command
    #[arg(long)]
    no_setup: bool,
    /// Seconds that the command may take
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// The program softhca, in place of a fresh build
    #[arg(long)]
    program: Option<PathBuf>,
    /// Folder for the program's sockets and log, in place of a temporary one
    #[arg(long)]
    dir: Option<PathBuf>,
    /// More arguments of `softhca serve`, such as `--strict`
    #[arg(last = true)]
    serve: Vec<String>,
}

impl Arguments {
    /// Returns arguments for a run of `--test` of a few minutes.
    fn brief(kernel: Option<&str>) -> Arguments {
        Arguments {
            suite: Suite::Trixie,
            kernel: kernel.map(str::to_owned),
            profile: vec!["roce".to_owned()],
            test: true,
            ours: true,
            short: true,
            // The other cases run without the kernel's drivers (crates/preload).
            filter: ["devices", "pingpong rc"].map(str::to_owned).to_vec(),
            hcas: 1,
            run: None,
            native: false,
            share: None,
            plugin: None,
            no_setup: false,
            limit: 0,
            program: None,
            dir: None,
            serve: vec!["--strict".to_owned()],
        }
    }

    fn count(&self) -> u32 {
        self.hcas.max(self.profile.len() as u32)
    }
}

/// Loads the drivers and waits for their device, whose name and GID the command finds in
/// the environment.
const SETUP: &str = include_str!("softhca-setup.sh");

/// The environment of the Rust crate's programs, which is that of rdma_rxe.
const NATIVE: &str = "\
export PATH=/share:$PATH
export RXE_DEV=$RDMA_DEV RXE_GID=$RDMA_GID RXE_ADDR=$RDMA_ADDR";

/// Builds the guest if it is not cached, starts the HCA and the guest, and runs the
/// command.
pub fn softhca(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.test {
        return check::test(arguments);
    }
    let machine = Machine::new(arguments)?;
    let setup = if arguments.no_setup { "" } else { SETUP };
    let command = arguments.run.as_deref().unwrap_or_default();
    let shell = arguments.run.is_none();
    let mut share = arguments.share.clone();
    let mut before = "";
    // Removed when the guest has ended.
    let native = arguments
        .native
        .then(|| TempDir::new("native"))
        .transpose()?;
    if let Some(folder) = &native {
        native::build(&X86_64, &folder.0)?;
        share = Some(folder.0.clone());
        before = NATIVE;
    }
    let job = Job {
        script: format!("{setup}\n{before}\n{command}"),
        share,
        plugin: machine.plugin.clone(),
        driver: None,
        shell,
        limit: guest::limit(shell, arguments.limit),
        hardware: Hardware::default(),
    };
    let hcas = Hcas {
        profiles: arguments.profile.clone(),
        count: arguments.count(),
        options: arguments.serve.clone(),
    };
    let (ended, _) = machine.run(&hcas, job, guest::show)?;
    Ok(guest::report(&ended))
}

/// The HCAs of a guest.
struct Hcas {
    profiles: Vec<String>,
    count: u32,
    /// More arguments of `softhca serve`.
    options: Vec<String>,
}

/// Resources for running guests with HCAs.
struct Machine {
    image: tree::Image,
    program: PathBuf,
    /// The contents of the guest's /opt/ringverbs.
    plugin: Option<PathBuf>,
    dir: PathBuf,
    /// The folder was given by the user, and is not removed.
    keep: bool,
}

impl Machine {
    fn new(arguments: &Arguments) -> Result<Machine> {
        ensure!(
            arguments.suite.architecture() == &X86_64,
            "softhca's guests are x86-64"
        );
        let image = tree::image(arguments.suite, arguments.kernel.as_deref())?;
        // Builds QEMU's tree if it is not cached.
        Qemu::get()?;
        let program = match &arguments.program {
            Some(program) => program.clone(),
            None => build()?,
        };
        let dir = match &arguments.dir {
            Some(dir) => dir.clone(),
            None => std::env::temp_dir().join(format!("softhca-{}", std::process::id())),
        };
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let plugin = match &arguments.plugin {
            None if arguments.ours => Some(dist::dist()?),
            plugin => plugin.clone(),
        };
        Ok(Machine {
            image,
            program,
            plugin,
            dir,
            keep: arguments.dir.is_some(),
        })
    }

    /// Boots a guest with the HCAs for a job. Also returns the HCAs' log.
    fn run(
        &self,
        hcas: &Hcas,
        mut job: Job,
        mut show: impl FnMut(Line<'_>),
    ) -> Result<(JobExit, String)> {
        let server = Server::start(&self.program, &self.dir, hcas)?;
        let mut before = String::new();
        let mut devices = Vec::new();
        for hca in 0..hcas.count {
            let path = socket(&self.dir, hca);
            devices.push("-device".to_owned());
            devices.push(format!(
                r#"{{"driver":"vfio-user-pci","socket":{{"type":"unix","path":"{}"}}}}"#,
                path.display()
            ));
        }
        job.hardware = Hardware {
            qemu: Some(Qemu::get()?),
            shared_memory: true,
            arguments: devices,
            // Under emulation the time stamp counters of the processors drift apart while
            // one waits for the device, and Linux's test of the timer fails on a busy
            // machine.
            kernel_arguments: "tsc=unstable no_timer_check".to_owned(),
        };
        let result = vm::run(&self.image, &job, |line| {
            let text = match line {
                Line::Text(text) => text,
                line => return show(line),
            };
            if let Some(order) = text.strip_prefix(TELL) {
                self.send_order(order);
            } else if let Some(names) = text.strip_prefix(SEEN) {
                let (ok, text) = self.check_counters(names);
                show(Line::Text(&result_line(ok, &format!("the wire: {text}"))));
            } else if text == MARK {
                before = self.stat();
            } else if let Some(wanted) = text.strip_prefix(COUNTED) {
                let (ok, text) = check_growth(wanted, &before, &self.stat());
                show(Line::Text(&result_line(ok, &text)));
            } else {
                show(line);
            }
        });
        drop(server);
        let log = self.dir.join(LOG);
        let log_text = fs::read_to_string(&log).unwrap_or_default();
        if result.is_err() {
            eprintln!("the HCA's log is {}", log.display());
        } else if !self.keep {
            let _ = fs::remove_dir_all(&self.dir);
            fs::create_dir_all(&self.dir)?;
        }
        Ok((result?, log_text))
    }

    /// Returns the HCAs' statistics; empty if there is no answer.
    fn stat(&self) -> String {
        let out = Command::new(&self.program)
            .arg("stat")
            .arg(self.dir.join(CONTROL))
            .output();
        out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned())
            .unwrap_or_default()
    }

    /// Checks that none of these counters of the HCAs is 0. Returns the result and a text
    /// with the counters.
    fn check_counters(&self, names: &str) -> (bool, String) {
        let text = self.stat();
        let counts: Vec<_> = names
            .split_whitespace()
            .map(|name| (name, count(&text, name)))
            .collect();
        let texts: Vec<_> = counts
            .iter()
            .map(|(name, n)| format!("{n} {name}"))
            .collect();
        (counts.iter().all(|(_, n)| *n > 0), texts.join(", "))
    }

    /// Sends the HCAs an order from a script in the guest.
    fn send_order(&self, order: &str) {
        let status = Command::new(&self.program)
            .arg("tell")
            .arg(self.dir.join(CONTROL))
            .args(order.split_whitespace())
            .stdout(Stdio::null())
            .status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("softhca refused the order: {order}");
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if !self.keep && !self.dir.join(LOG).exists() {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// Prefix of a line of the guest with an order to the HCAs.
const TELL: &str = "@tell ";
/// Prefix of a line with names of counters that must not be 0.
const SEEN: &str = "@seen ";
/// The line that starts the measurement of counters.
const MARK: &str = "@mark";
/// Prefix of the line that ends it: `NAME=MIN-MAX ... : CASE`.
const COUNTED: &str = "@counted ";

/// Returns the sum of all counters of a name in the output of `softhca stat`: those of
/// the engine are JSON, the others text within it.
fn count(text: &str, name: &str) -> u64 {
    let number = |rest: &str| {
        let rest = rest.trim_start();
        let end = rest.find(|c: char| !c.is_ascii_digit());
        rest[..end.unwrap_or(rest.len())].parse().unwrap_or(0)
    };
    let sum = |key: String| text.split(&key).skip(1).map(number).sum::<u64>();
    sum(format!(" {name}: ")) + sum(format!("\"{name}\":"))
}

/// Prints the result of a case that this program has judged, and returns it as a line of
/// the guest.
fn result_line(ok: bool, text: &str) -> String {
    eprintln!("  {text}");
    format!("{}{text}", if ok { check::PASS } else { check::FAIL })
}

/// Checks that counters have grown between two statistics by as much as `wanted` says.
/// Returns the result and a text with the growth; a counter without bounds is only
/// reported.
fn check_growth(wanted: &str, before: &str, after: &str) -> (bool, String) {
    let (ranges, case) = wanted.split_once(" : ").unwrap_or((wanted, wanted));
    let mut ok = !before.is_empty() && !after.is_empty();
    let mut counts = Vec::new();
    for range in ranges.split_whitespace() {
        let (name, bounds) = range.split_once('=').unwrap_or((range, "-"));
        let (min, max) = bounds.split_once('-').unwrap_or((bounds, bounds));
        let growth = count(after, name).saturating_sub(count(before, name));
        let min = min.parse().unwrap_or(0);
        let max = max.parse().unwrap_or(u64::MAX);
        ok &= (min..=max).contains(&growth);
        counts.push(format!("{growth} {name}"));
    }
    (ok, format!("{case}: {}", counts.join(", ")))
}

fn socket(dir: &Path, hca: u32) -> PathBuf {
    match hca {
        0 => dir.join(SOCKET),
        n => dir.join(format!("{SOCKET}.{n}")),
    }
}

/// Builds the program with optimizations, since the guest waits for it.
fn build() -> Result<PathBuf> {
    let target = driver::target_dir();
    let status = Command::new(driver::cargo())
        .current_dir(driver::root())
        .args(["build", "--quiet", "--release", "-p", "ringverbs-softhca"])
        .args(["--bin", "softhca", "--target-dir"])
        .arg(&target)
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "softhca does not build");
    Ok(target.join("release/softhca"))
}

/// Returns a command that runs its arguments with a high priority; `None` if that is not
/// allowed.
fn nice_command() -> Option<Command> {
    const NICE: [&str; 2] = ["-n", "-10"];
    let out = Command::new("nice").args(NICE).arg("true").output().ok()?;
    // Without the right nice only prints a warning.
    (out.status.success() && out.stderr.is_empty()).then(|| {
        let mut command = Command::new("nice");
        command.args(NICE);
        command
    })
}

/// The running program; killed on drop.
struct Server(Child);

impl Server {
    /// Starts the program and waits until it listens.
    fn start(program: &Path, dir: &Path, hcas: &Hcas) -> Result<Server> {
        let log = File::create(dir.join(LOG))?;
        // The guest's processors poll for the HCA's results, so it has a higher priority
        // if that is allowed.
        let mut command = match nice_command() {
            Some(mut command) => {
                command.arg(program);
                command
            }
            None => Command::new(program),
        };
        command.arg("serve");
        for profile in &hcas.profiles {
            command.args(["--profile", profile]);
        }
        for hca in 0..hcas.count {
            let path = socket(dir, hca);
            let _ = fs::remove_file(&path);
            command.arg("--socket").arg(path);
        }
        command.arg("--control").arg(dir.join(CONTROL));
        command.args(&hcas.options);
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut server = Server(
            command
                .spawn()
                .with_context(|| format!("cannot start {}", program.display()))?,
        );
        let last = socket(dir, hcas.count.saturating_sub(1));
        let began = Instant::now();
        while !last.exists() {
            if let Some(status) = server.0.try_wait()? {
                let log = fs::read_to_string(dir.join(LOG)).unwrap_or_default();
                bail!("softhca exited during startup ({status}): {}", log.trim());
            }
            ensure!(
                began.elapsed() < Duration::from_secs(10),
                "softhca does not listen at {}",
                last.display()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The program exits with QEMU's connection. It is killed if QEMU never connected.
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(2) {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::{check_growth, count};

    #[test]
    fn counters_of_all_ports_are_added() {
        let text = r#"[{"port":"PortCounters { sent: 9, lost: 3, reordered: 0 }"},
            {"port":"PortCounters { sent: 1, lost: 4 }"}]"#;
        assert_eq!((count(text, "lost"), count(text, "reordered")), (7, 0));
        assert_eq!(count(r#"{"counters": {"doorbells": 12}}"#, "doorbells"), 12);
    }

    #[test]
    fn a_count_has_bounds() {
        let [before, after] = [1, 8].map(|n| format!(r#"{{"doorbells": {n}}}"#));
        for (wanted, end) in [
            ("doorbells=7-7 : a case", true),
            ("doorbells=8- : a case", false),
            ("doorbells=0-6 : a case", false),
            ("doorbells arms=0-0 : a case", true),
        ] {
            let (ok, text) = check_growth(wanted, &before, &after);
            assert_eq!(ok, end, "{wanted}");
            assert!(text.starts_with("a case: 7 doorbells"), "{text}");
        }
        // No statistics.
        assert!(!check_growth("arms=0-0 : a case", "", &after).0);
    }
}
