//! `cargo xtask softhca`: a guest with a ConnectX in software, for a command,
//! a shell, or the tests of it.

pub mod check;
pub mod known;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rxe_tests::guest::suite::X86_64;
use rxe_tests::guest::vm::{self, Ended, Line};
use rxe_tests::guest::{Hardware, Job, Qemu, Suite, tree};

use crate::suite::Work;
use crate::{dist, driver, guest, native};

/// Where the program listens, in its folder.
const SOCKET: &str = "hca.sock";
/// Where it takes orders.
const CONTROL: &str = "control.sock";
/// What it says.
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
    /// What the port is, by the name of a profile (`softhca profiles`); more
    /// than one make more HCAs, or with `--test` as many runs
    #[arg(long, default_value = "roce")]
    profile: Vec<String>,
    /// Run rdma-core's and perftest's programs and pyverbs in the guest, then
    /// two HCAs over a wire that loses packets, and planted faults
    #[arg(long, conflicts_with_all = ["run", "share", "no_setup", "hcas"])]
    test: bool,
    /// With `--test`, also with ringverbs as the provider, on both sides and on
    /// one, in the same boot: what passes with rdma-core's must pass with ours.
    /// It is the plugin of `--plugin`, or one that is built now
    #[arg(long, requires = "test")]
    ours: bool,
    /// With `--test`, the short list, without pyverbs
    #[arg(long, requires = "test")]
    short: bool,
    /// With `--test`, only cases whose group and name contain this (or one of
    /// these)
    #[arg(long, requires = "test")]
    filter: Vec<String>,
    /// How many HCAs the guest has, at least
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
    /// Leave loading the drivers to the command
    #[arg(long)]
    no_setup: bool,
    /// Seconds that the command may take
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// The program to serve with, in place of a fresh build
    #[arg(long)]
    program: Option<PathBuf>,
    /// Where the sockets and the log of the program go, in place of a
    /// temporary folder
    #[arg(long)]
    dir: Option<PathBuf>,
    /// More arguments of `softhca serve`, such as `--strict`
    #[arg(last = true)]
    serve: Vec<String>,
}

impl Arguments {
    /// A run of `--test` that takes a few minutes.
    fn brief(kernel: Option<&str>) -> Arguments {
        Arguments {
            suite: Suite::Trixie,
            kernel: kernel.map(str::to_owned),
            profile: vec!["roce".to_owned()],
            test: true,
            ours: true,
            short: true,
            // The others are run without the kernel's drivers (crates/preload).
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

/// What the guest does before the command: the drivers, then the wait for
/// their device, whose name and GID the command finds in the environment.
const SETUP: &str = include_str!("softhca-setup.sh");

/// And before one that runs the Rust crate's programs, which are the same on
/// rdma_rxe.
const NATIVE: &str = "\
export PATH=/share:$PATH
export RXE_DEV=$RDMA_DEV RXE_GID=$RDMA_GID RXE_ADDR=$RDMA_ADDR";

/// Makes what is missing, starts the HCA and the guest, runs the command.
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
    let native = arguments.native.then(|| Work::new("native")).transpose()?;
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

/// What is needed to run guests with HCAs.
struct Machine {
    image: tree::Image,
    program: PathBuf,
    /// What the guest finds in /opt/ringverbs.
    plugin: Option<PathBuf>,
    dir: PathBuf,
    /// The folder is somebody's, and stays.
    keep: bool,
}

impl Machine {
    fn new(arguments: &Arguments) -> Result<Machine> {
        ensure!(
            arguments.suite.architecture() == &X86_64,
            "softhca's guests are x86-64"
        );
        let image = tree::image(arguments.suite, arguments.kernel.as_deref())?;
        // Made now, if it is not there.
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

    /// Boots the guest with the HCAs for a job. Also gives what the HCAs have
    /// logged.
    fn run(
        &self,
        hcas: &Hcas,
        mut job: Job,
        mut show: impl FnMut(Line<'_>),
    ) -> Result<(Ended, String)> {
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
            // Under emulation the processors' counters drift apart while one
            // waits for the device, and on a busy machine the test of the timer
            // finds none.
            kernel_arguments: "tsc=unstable no_timer_check".to_owned(),
        };
        let result = vm::run(&self.image, &job, |line| {
            let text = match line {
                Line::Text(text) => text,
                line => return show(line),
            };
            if let Some(order) = text.strip_prefix(TELL) {
                self.tell(order);
            } else if let Some(names) = text.strip_prefix(SEEN) {
                let (all, said) = self.seen(names);
                show(Line::Text(&ended(all, &format!("the wire: {said}"))));
            } else if text == MARK {
                before = self.stat();
            } else if let Some(wanted) = text.strip_prefix(COUNTED) {
                let (all, said) = counted(wanted, &before, &self.stat());
                show(Line::Text(&ended(all, &said)));
            } else {
                show(line);
            }
        });
        drop(server);
        let log = self.dir.join(LOG);
        let said = fs::read_to_string(&log).unwrap_or_default();
        if result.is_err() {
            eprintln!("the HCA's log is {}", log.display());
        } else if !self.keep {
            let _ = fs::remove_dir_all(&self.dir);
            fs::create_dir_all(&self.dir)?;
        }
        Ok((result?, said))
    }

    /// What the HCAs say of themselves; nothing if they do not.
    fn stat(&self) -> String {
        let out = Command::new(&self.program)
            .arg("stat")
            .arg(self.dir.join(CONTROL))
            .output();
        out.map(|out| String::from_utf8_lossy(&out.stdout).into_owned())
            .unwrap_or_default()
    }

    /// Whether the HCAs have counted every one of these: what they say of them.
    fn seen(&self, names: &str) -> (bool, String) {
        let text = self.stat();
        let counts: Vec<_> = names
            .split_whitespace()
            .map(|name| (name, count(&text, name)))
            .collect();
        let said: Vec<_> = counts
            .iter()
            .map(|(name, n)| format!("{n} {name}"))
            .collect();
        (counts.iter().all(|(_, n)| *n > 0), said.join(", "))
    }

    /// Gives the HCAs an order that a script in the guest has asked for.
    fn tell(&self, order: &str) {
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

/// A line of the guest that begins with this is an order to the HCAs.
const TELL: &str = "@tell ";
/// And with this, names of counters that must not be 0.
const SEEN: &str = "@seen ";
/// A line that is this begins a count,
const MARK: &str = "@mark";
/// and one that begins with this ends it: `NAME=FEWEST-MOST ... : CASE`.
const COUNTED: &str = "@counted ";

/// The sum of all counters of a name in what `softhca stat` prints: the
/// engine's as JSON, the others as text within it.
fn count(text: &str, name: &str) -> u64 {
    let number = |rest: &str| {
        let rest = rest.trim_start();
        let end = rest.find(|c: char| !c.is_ascii_digit());
        rest[..end.unwrap_or(rest.len())].parse().unwrap_or(0)
    };
    let of = |before: String| text.split(&before).skip(1).map(number).sum::<u64>();
    of(format!(" {name}: ")) + of(format!("\"{name}\":"))
}

/// The line that says how a case ended that this program has judged; shown as
/// well, for the counts in it.
fn ended(well: bool, said: &str) -> String {
    eprintln!("  {said}");
    format!("{}{said}", if well { check::PASS } else { check::FAIL })
}

/// Whether counters have grown by so much between two statistics, and what to
/// say of it; a count without bounds is only told.
fn counted(wanted: &str, before: &str, after: &str) -> (bool, String) {
    let (ranges, case) = wanted.split_once(" : ").unwrap_or((wanted, wanted));
    let mut all = !before.is_empty() && !after.is_empty();
    let mut said = Vec::new();
    for range in ranges.split_whitespace() {
        let (name, bounds) = range.split_once('=').unwrap_or((range, "-"));
        let (fewest, most) = bounds.split_once('-').unwrap_or((bounds, bounds));
        let grown = count(after, name).saturating_sub(count(before, name));
        let fewest = fewest.parse().unwrap_or(0);
        let most = most.parse().unwrap_or(u64::MAX);
        all &= (fewest..=most).contains(&grown);
        said.push(format!("{grown} {name}"));
    }
    (all, format!("{case}: {}", said.join(", ")))
}

fn socket(dir: &Path, hca: u32) -> PathBuf {
    match hca {
        0 => dir.join(SOCKET),
        n => dir.join(format!("{SOCKET}.{n}")),
    }
}

/// Builds the program, optimised: the guest waits for it.
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

/// A command that gives the program after it more of the processor than others
/// have; `None` where that is not allowed.
fn before_others() -> Option<Command> {
    const NICE: [&str; 2] = ["-n", "-10"];
    let out = Command::new("nice").args(NICE).arg("true").output().ok()?;
    // Without the right it goes on, and says so.
    (out.status.success() && out.stderr.is_empty()).then(|| {
        let mut command = Command::new("nice");
        command.args(NICE);
        command
    })
}

/// The running program; ended when dropped.
struct Server(Child);

impl Server {
    /// Starts it and waits until it listens.
    fn start(program: &Path, dir: &Path, hcas: &Hcas) -> Result<Server> {
        let log = File::create(dir.join(LOG))?;
        // The guest's processors poll for what the HCA does: it goes before
        // them, where that is allowed.
        let mut command = match before_others() {
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
                let said = fs::read_to_string(dir.join(LOG)).unwrap_or_default();
                bail!("softhca ended at once ({status}): {}", said.trim());
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
        // It ends with QEMU's connection; this is for when that never came.
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
    use super::{count, counted};

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
            let (all, said) = counted(wanted, &before, &after);
            assert_eq!(all, end, "{wanted}");
            assert!(said.starts_with("a case: 7 doorbells"), "{said}");
        }
        // Nobody answered.
        assert!(!counted("arms=0-0 : a case", "", &after).0);
    }
}
