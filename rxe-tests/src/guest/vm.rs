//! Boots a guest, runs one job in it, and stops it, also after errors.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use super::compile::copy_tree;
use super::host;
use super::progress::tail;
use super::qemu::Qemu;
use super::static_guest::StaticGuest;
use super::suite::Architecture;
use super::tree::Image;

/// The script that runs as the first process of the guest's root file system.
const START: &str = include_str!("../../guest/start");

/// How long a guest may take from power to its first process. Some 5 s by
/// software emulation on an idle machine, 90 s and more with a load of 20.
const BOOT_LIMIT: Duration = Duration::from_secs(400);

/// Boots of a guest that the emulator crashes.
const MAX_BOOTS: u32 = 3;

/// Linux's message when QEMU's software emulation runs a stale breakpoint. Linux puts
/// one into its own code while it patches it (static keys), and removes the handler
/// afterwards; an emulated processor may still run the old translation.
const STALE_BREAKPOINT: &str = "Oops: int3:";

/// Marks a line on the virtio port as a record for this program: ASCII's record
/// separator.
pub const RECORD: char = '\u{1e}';

/// A job for a guest.
#[derive(Debug, Default)]
pub struct Job {
    /// A shell script; its working directory is the share.
    pub script: String,
    /// The folder that the guest sees as `/share`, readable and writable.
    /// Without it the share is empty and vanishes with the guest.
    pub share: Option<PathBuf>,
    /// A folder whose contents are put at `/opt/ringverbs`.
    pub plugin: Option<PathBuf>,
    /// The in-guest driver, installed as `rxe-driver`.
    pub driver: Option<PathBuf>,
    /// Attaches the terminal to a shell in the guest instead of running the
    /// script.
    pub shell: bool,
    /// How long the job may take, once the guest is up.
    pub limit: Duration,
    /// Differences from the default machine.
    pub hardware: Hardware,
}

/// Differences of a machine from the default one.
#[derive(Debug, Default)]
pub struct Hardware {
    /// The QEMU to run in place of this machine's own.
    pub qemu: Option<Qemu>,
    /// Whether the guest's memory can be mapped by processes that serve
    /// devices to it.
    pub shared_memory: bool,
    /// Arguments of QEMU after all others.
    pub arguments: Vec<String>,
    /// Appended to the kernel's command line.
    pub kernel_arguments: String,
}

/// Exit status and times of a job.
#[derive(Debug)]
pub struct JobExit {
    /// The script's exit status.
    pub status: i32,
    /// From power to the first process.
    pub boot_time: Duration,
    /// From the first process to the end.
    pub run_time: Duration,
}

/// A line from the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// What the job printed.
    Text(&'a str),
    /// A line marked with [`RECORD`], without the mark.
    Record(&'a str),
}

/// Boots `image`, runs `job` in it, and passes each line of its output to `sink`
/// immediately.
///
/// # Errors
/// The guest does not boot, exceeds the limit, or stops without reporting an exit
/// status. The console log is then kept, and the error has its path and its end. A
/// script that fails is not an error: its exit status is returned.
pub fn run(image: &Image, job: &Job, sink: impl FnMut(Line<'_>)) -> Result<JobExit> {
    let architecture = image.suite.architecture();
    boot_and_run(image.suite.name(), architecture, job, sink, |dir| {
        let [ctl, share] = shared_folders(job, dir)?;
        Ok(BootFiles {
            architecture,
            kernel: image.kernel(),
            initrd: image.initrd(),
            disk: Some(image.disk()),
            shares: vec![("ctl", ctl), ("share", share)],
        })
    })
}

/// Boots a static guest, which contains its job. Only the limit and the hardware of
/// `job` are used.
///
/// # Errors
/// As [`run`].
pub fn run_static(guest: &StaticGuest, job: &Job, sink: impl FnMut(Line<'_>)) -> Result<JobExit> {
    let architecture = guest.architecture;
    boot_and_run("static", architecture, job, sink, |_| {
        Ok(BootFiles {
            architecture,
            kernel: guest.kernel.clone(),
            initrd: guest.initrd.clone(),
            disk: None,
            shares: Vec::new(),
        })
    })
}

/// The files that a machine boots from.
struct BootFiles {
    architecture: &'static Architecture,
    kernel: PathBuf,
    initrd: PathBuf,
    disk: Option<PathBuf>,
    /// Shared folders and their mount tags.
    shares: Vec<(&'static str, PathBuf)>,
}

fn boot_and_run(
    name: &str,
    architecture: &Architecture,
    job: &Job,
    mut sink: impl FnMut(Line<'_>),
    system: impl FnOnce(&Path) -> Result<BootFiles>,
) -> Result<JobExit> {
    if job.hardware.qemu.is_none() {
        host::require(&[architecture.qemu], false)?;
    }
    let dir = RunDir::new(name)?;
    let console = dir.path.join("console.log");
    let result = system(&dir.path).and_then(|system| {
        let guest = boot_with_retries(&console, || boot(&system, job, &dir.path, &console))?;
        wait_for_exit(guest, job.limit, &mut sink)
    });
    match result {
        Ok(ended) => Ok(ended),
        Err(error) => {
            dir.keep();
            let errors = tail(&dir.path.join("qemu.log"), 0, 5);
            Err(error.context(format!(
                "the guest of {name} failed; its console log is {}\n{}\n{errors}",
                console.display(),
                tail(&console, 0, 25)
            )))
        }
    }
}

/// Prepares the two shared folders of a Debian guest: its instructions, and the share.
fn shared_folders(job: &Job, dir: &Path) -> Result<[PathBuf; 2]> {
    let ctl = dir.join("ctl");
    fs::create_dir(&ctl)?;
    fs::write(ctl.join("start"), START)?;
    fs::write(ctl.join("job"), &job.script)?;
    if job.shell {
        fs::write(ctl.join("shell"), "")?;
    }
    if let Some(plugin) = &job.plugin {
        copy_tree(plugin, &ctl.join("plugin"))?;
    }
    if let Some(driver) = &job.driver {
        fs::copy(driver, ctl.join("rxe-driver"))
            .with_context(|| format!("cannot copy {}", driver.display()))?;
    }
    let share = match &job.share {
        Some(share) => share
            .canonicalize()
            .with_context(|| format!("no such folder to share: {}", share.display()))?,
        None => {
            let share = dir.join("share");
            fs::create_dir(&share)?;
            share
        }
    };
    Ok([ctl, share])
}

/// A guest whose first process has started.
struct BootedGuest {
    machine: Machine,
    lines: Receiver<String>,
    boot_time: Duration,
}

/// Calls `boot`, and repeats it only if the emulator's known fault crashed the guest
/// before its first process.
fn boot_with_retries<T>(console: &Path, mut boot: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..MAX_BOOTS {
        match boot() {
            Err(error) if tail(console, 0, usize::MAX).contains(STALE_BREAKPOINT) => {
                eprintln!("  {error:#}: a crash of QEMU's emulation; starting the guest again");
            }
            result => return result,
        }
    }
    boot()
}

fn boot(system: &BootFiles, job: &Job, dir: &Path, console: &Path) -> Result<BootedGuest> {
    let began = Instant::now();
    let mut machine = Machine::start(system, console, dir, job)?;
    let lines = machine.lines()?;
    loop {
        let line = next_line(&lines, began, BOOT_LIMIT).context("the guest did not boot")?;
        if parse_line(&line) == Line::Record("guest started") {
            return Ok(BootedGuest {
                machine,
                lines,
                boot_time: began.elapsed(),
            });
        }
    }
}

/// Passes the job's output to `sink` until the job ends.
fn wait_for_exit(
    guest: BootedGuest,
    limit: Duration,
    sink: &mut dyn FnMut(Line<'_>),
) -> Result<JobExit> {
    let BootedGuest {
        mut machine,
        lines,
        boot_time,
    } = guest;
    let began = Instant::now();
    loop {
        let line = next_line(&lines, began, limit).context("the job did not finish")?;
        match parse_line(&line) {
            Line::Record(record) if record.starts_with("guest ended ") => {
                let status = record["guest ended ".len()..].trim().parse()?;
                machine.wait_for_poweroff(Duration::from_secs(10));
                return Ok(JobExit {
                    status,
                    boot_time,
                    run_time: began.elapsed(),
                });
            }
            line => sink(line),
        }
    }
}

/// Returns the guest's next line; fails once `limit` has passed since `began`.
fn next_line(lines: &Receiver<String>, began: Instant, limit: Duration) -> Result<String> {
    match lines.recv_timeout(limit.saturating_sub(began.elapsed())) {
        Ok(line) => Ok(line),
        Err(RecvTimeoutError::Timeout) => bail!("timed out after {} s", limit.as_secs()),
        Err(RecvTimeoutError::Disconnected) => bail!("QEMU ended without output"),
    }
}

/// Separates records from text.
pub fn parse_line(line: &str) -> Line<'_> {
    match line.strip_prefix(RECORD) {
        Some(record) => Line::Record(record),
        None => Line::Text(line),
    }
}

/// A running QEMU; killed when dropped.
struct Machine(Child);

impl Machine {
    fn start(system: &BootFiles, console: &Path, dir: &Path, job: &Job) -> Result<Machine> {
        let hardware = &job.hardware;
        let architecture = system.architecture;
        let qemu = architecture.qemu.0;
        let mut command = match &hardware.qemu {
            Some(qemu) => qemu.command(),
            None => Command::new(host::which(qemu).with_context(|| format!("no {qemu}"))?),
        };
        if architecture.user.is_none() && host::kvm_works() {
            command.args(["-accel", "kvm", "-cpu", "host"]);
        } else {
            command.args(["-accel", "tcg,thread=multi", "-cpu", architecture.cpu]);
        }
        command
            .args(["-M", architecture.board, "-smp", "2", "-m", "4096"])
            .args(["-nodefaults", "-no-user-config", "-display", "none"])
            .args(["-no-reboot", "-nic", "none", "-monitor", "none"])
            .arg("-kernel")
            .arg(&system.kernel)
            .arg("-initrd")
            .arg(&system.initrd)
            .arg("-append")
            // A small hash table of TCP sockets: the driver reads all of it to find
            // listening servers.
            .arg(format!(
                "console={} panic=-1 mitigations=off tsc=reliable random.trust_cpu=on \
                 net.ifnames=0 loglevel=4 thash_entries=1024 {}",
                architecture.console, hardware.kernel_arguments
            ));
        if let Some(disk) = &system.disk {
            // By default QEMU stops the guest silently when the host's disk is full.
            command.arg("-drive").arg(format!(
                "file={},format=raw,if=virtio,snapshot=on,cache=unsafe,\
                 werror=report,rerror=report",
                escape_commas(disk)
            ));
        }
        for (tag, path) in &system.shares {
            command.arg("-virtfs").arg(format!(
                "local,path={},mount_tag={tag},security_model=none,multidevs=remap",
                escape_commas(path)
            ));
        }
        command.args(["-device", "virtio-serial-pci"]);
        let job_port = "virtserialport,chardev=job,name=job";
        if job.shell {
            command
                .args(["-serial", "stdio"])
                .arg("-chardev")
                .arg(format!(
                    "file,id=job,path={}",
                    escape_commas(&dir.join("job.out"))
                ))
                .args(["-device", job_port])
                .stdin(Stdio::inherit())
                .stdout(Stdio::inherit());
        } else {
            command
                .arg("-serial")
                .arg(format!("file:{}", escape_commas(console)))
                .args(["-chardev", "stdio,id=job,signal=off"])
                .args(["-device", job_port])
                // Stays open: at end of file QEMU takes the port for unplugged and
                // drops the guest's output.
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
        }
        if hardware.shared_memory {
            command
                .args(["-object", "memory-backend-memfd,id=mem,size=4G,share=on"])
                .args(["-machine", "memory-backend=mem"]);
        }
        command.args(&hardware.arguments);
        command.stderr(File::create(dir.join("qemu.log"))?);
        // SAFETY: the closure runs between fork and exec and makes one
        // system call; it allocates nothing and takes no lock.
        unsafe {
            command.pre_exec(|| {
                // The guest does not outlive the thread that started it.
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                Ok(())
            });
        }
        Ok(Machine(command.spawn().context("cannot start QEMU")?))
    }

    /// Returns the lines that the job prints; the channel disconnects when QEMU exits.
    fn lines(&mut self) -> Result<Receiver<String>> {
        let (sender, receiver) = mpsc::channel();
        match self.0.stdout.take() {
            Some(out) => {
                thread::spawn(move || forward(out, &sender));
            }
            None => {
                // The shell writes to the terminal: only QEMU's exit is reported.
                let status = self.0.wait()?;
                for line in [
                    format!("{RECORD}guest started"),
                    format!("{RECORD}guest ended {}", status.code().unwrap_or(1)),
                ] {
                    let _ = sender.send(line);
                }
            }
        }
        Ok(receiver)
    }

    /// Waits at most `limit` for the guest to power off; dropping kills it otherwise.
    fn wait_for_poweroff(&mut self, limit: Duration) {
        let began = Instant::now();
        while began.elapsed() < limit {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

fn forward(out: ChildStdout, to: &mpsc::Sender<String>) {
    let mut out = BufReader::new(out);
    let mut line = Vec::new();
    loop {
        line.clear();
        match out.read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        if to
            .send(text.trim_end_matches(['\n', '\r']).to_owned())
            .is_err()
        {
            return;
        }
    }
}

/// Doubles the commas of a path, as QEMU's option parser requires.
fn escape_commas(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// The folder of one run; removed when dropped unless kept.
struct RunDir {
    path: PathBuf,
    keep: std::cell::Cell<bool>,
}

impl RunDir {
    fn new(name: &str) -> Result<RunDir> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let runs = host::cache()?.join("runs");
        remove_old_runs(&runs);
        let path = runs.join(format!(
            "{name}-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        ));
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir_all(&path)
            .with_context(|| format!("cannot make the run's folder {}", path.display()))?;
        Ok(RunDir {
            path,
            keep: std::cell::Cell::new(false),
        })
    }

    fn keep(&self) {
        self.keep.set(true);
    }
}

/// Removes folders of runs that are older than `MAX_AGE`.
fn remove_old_runs(runs: &Path) {
    const MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);
    let Ok(entries) = fs::read_dir(runs) else {
        return;
    };
    for entry in entries.flatten() {
        let age = entry
            .metadata()
            .and_then(|m| m.modified())
            .ok()
            .and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > MAX_AGE) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        if !self.keep.get() {
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_separated_from_text() {
        assert_eq!(
            parse_line("\u{1e}guest started"),
            Line::Record("guest started")
        );
        assert_eq!(parse_line("guest started"), Line::Text("guest started"));
    }

    #[test]
    fn only_emulator_crashes_are_retried() {
        let dir = std::env::temp_dir().join(format!("ringverbs-boots-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let console = dir.join("console.log");
        // Console output of each boot; expected number of boots; whether the last succeeds.
        let cases: [(&[&str], u32, bool); 5] = [
            (&["up"], 1, true),
            (&["Oops: int3: 0000 [#1]", "up"], 2, true),
            (&["Oops: int3:", "Oops: int3:", "up"], 3, true),
            (
                &["Oops: int3:", "Oops: int3:", "Oops: int3:", "up"],
                3,
                false,
            ),
            (&["Oops: general protection fault", "up"], 1, false),
        ];
        for (messages, boots, up) in cases {
            let mut count = 0;
            let result = boot_with_retries(&console, || {
                let message = messages[count as usize];
                count += 1;
                fs::write(&console, format!("[ 2.9] {message}\nCPU: 1\n"))?;
                match message {
                    "up" => Ok(()),
                    _ => bail!("the guest shut down"),
                }
            });
            assert_eq!((count, result.is_ok()), (boots, up), "{messages:?}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn commas_in_paths_are_doubled() {
        assert_eq!(escape_commas(Path::new("/a,b")), "/a,,b");
    }
}
