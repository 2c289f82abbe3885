//! Booting a guest, running one job in it, and taking it down whatever
//! happens.

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

use super::bare::StaticGuest;
use super::compile::copy_tree;
use super::host;
use super::progress::tail;
use super::qemu::Qemu;
use super::suite::Architecture;
use super::tree::Image;

/// What the guest's root starts with.
const START: &str = include_str!("../../guest/start");

/// How long a guest may take from power to its first process. Some 5 s by
/// software emulation on an idle machine, 90 s and more with a load of 20.
const BOOT_LIMIT: Duration = Duration::from_secs(400);

/// How often a guest is started that the emulator brings down as it boots.
const BOOTS: u32 = 3;

/// What Linux says when QEMU's software emulation runs a breakpoint that is no
/// longer there. Linux puts one into its own code while it changes it (static
/// keys), and has no handler for it any more once the change is done; one
/// emulated processor at times still runs what it translated before.
const STALE_BREAKPOINT: &str = "Oops: int3:";

/// Begins a line on the virtio port that is meant for this program, not for
/// the reader: ASCII's record separator.
pub const RECORD: char = '\u{1e}';

/// What a guest is booted for.
#[derive(Debug, Default)]
pub struct Job {
    /// A shell script; its working directory is the share.
    pub script: String,
    /// The folder that the guest sees as `/share`, readable and writable.
    /// Without it the share is empty and vanishes with the guest.
    pub share: Option<PathBuf>,
    /// A folder whose contents are put at `/opt/ringverbs`.
    pub plugin: Option<PathBuf>,
    /// The in-guest driver, found there as `rxe-driver`.
    pub driver: Option<PathBuf>,
    /// Attaches the terminal to a shell in the guest instead of running the
    /// script.
    pub shell: bool,
    /// How long the job may take, once the guest is up.
    pub limit: Duration,
    /// What the machine has besides the usual.
    pub hardware: Hardware,
}

/// A machine that differs from the usual one.
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

/// How a job ended.
#[derive(Debug)]
pub struct Ended {
    /// The script's exit status.
    pub status: i32,
    /// From power to the first process.
    pub boot: Duration,
    /// From the first process to the end.
    pub run: Duration,
}

/// A line from the guest.
#[derive(Debug, PartialEq, Eq)]
pub enum Line<'a> {
    /// What the job printed.
    Text(&'a str),
    /// A line that the job marked with [`RECORD`], without the mark.
    Record(&'a str),
}

/// Boots `image`, runs `job` in it, and hands every line that it prints to
/// `sink` as it comes.
///
/// # Errors
/// The guest does not come up, does not end in time, or goes down without
/// reporting how the job ended. The console's log is then kept, and the
/// error says where and shows its end. The script's own exit status is no
/// error but part of the answer.
pub fn run(image: &Image, job: &Job, sink: impl FnMut(Line<'_>)) -> Result<Ended> {
    let architecture = image.suite.architecture();
    within(image.suite.name(), architecture, job, sink, |dir| {
        let [ctl, share] = folders(job, dir)?;
        Ok(System {
            architecture,
            kernel: image.kernel(),
            initrd: image.initrd(),
            disk: Some(image.disk()),
            shares: vec![("ctl", ctl), ("share", share)],
        })
    })
}

/// Boots a guest without a distribution. Its job is in `bare` already; of
/// `job`, the limit and the hardware count.
///
/// # Errors
/// As [`run`].
pub fn run_bare(bare: &StaticGuest, job: &Job, sink: impl FnMut(Line<'_>)) -> Result<Ended> {
    let architecture = bare.architecture;
    within("static", architecture, job, sink, |_| {
        Ok(System {
            architecture,
            kernel: bare.kernel.clone(),
            initrd: bare.initrd.clone(),
            disk: None,
            shares: Vec::new(),
        })
    })
}

/// What a machine starts from.
struct System {
    architecture: &'static Architecture,
    kernel: PathBuf,
    initrd: PathBuf,
    disk: Option<PathBuf>,
    /// Folders that it sees, and their names.
    shares: Vec<(&'static str, PathBuf)>,
}

fn within(
    name: &str,
    architecture: &Architecture,
    job: &Job,
    mut sink: impl FnMut(Line<'_>),
    system: impl FnOnce(&Path) -> Result<System>,
) -> Result<Ended> {
    if job.hardware.qemu.is_none() {
        host::require(&[architecture.qemu], false)?;
    }
    let dir = RunDir::new(name)?;
    let console = dir.path.join("console.log");
    let result = system(&dir.path).and_then(|system| {
        let running = persistently(&console, || boot(&system, job, &dir.path, &console))?;
        attend(running, job.limit, &mut sink)
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

/// The folders that a Debian guest sees: what it is to do, and the share.
fn folders(job: &Job, dir: &Path) -> Result<[PathBuf; 2]> {
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

/// A guest that is up.
struct Running {
    machine: Machine,
    lines: Receiver<String>,
    /// From power to the first process.
    boot: Duration,
}

/// Boots with `boot`, and again where the emulator's known fault, and nothing
/// else, has brought the guest down before it was up.
fn persistently<T>(console: &Path, mut boot: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 1..BOOTS {
        match boot() {
            Err(error) if tail(console, 0, usize::MAX).contains(STALE_BREAKPOINT) => {
                eprintln!("  {error:#}: a crash of QEMU's emulation; starting the guest again");
            }
            result => return result,
        }
    }
    boot()
}

fn boot(system: &System, job: &Job, dir: &Path, console: &Path) -> Result<Running> {
    let began = Instant::now();
    let mut machine = Machine::start(system, console, dir, job)?;
    let lines = machine.lines()?;
    loop {
        let line = next(&lines, began, BOOT_LIMIT).context("the guest did not come up")?;
        if parse(&line) == Line::Record("guest started") {
            return Ok(Running {
                machine,
                lines,
                boot: began.elapsed(),
            });
        }
    }
}

/// Hands on what the job prints, up to its end.
fn attend(running: Running, limit: Duration, sink: &mut dyn FnMut(Line<'_>)) -> Result<Ended> {
    let Running {
        mut machine,
        lines,
        boot,
    } = running;
    let began = Instant::now();
    loop {
        let line = next(&lines, began, limit).context("the job did not end")?;
        match parse(&line) {
            Line::Record(record) if record.starts_with("guest ended ") => {
                let status = record["guest ended ".len()..].trim().parse()?;
                machine.down(Duration::from_secs(10));
                return Ok(Ended {
                    status,
                    boot,
                    run: began.elapsed(),
                });
            }
            line => sink(line),
        }
    }
}

/// The next line of a guest that has `limit` since `began`.
fn next(lines: &Receiver<String>, began: Instant, limit: Duration) -> Result<String> {
    match lines.recv_timeout(limit.saturating_sub(began.elapsed())) {
        Ok(line) => Ok(line),
        Err(RecvTimeoutError::Timeout) => bail!("not within {} s", limit.as_secs()),
        Err(RecvTimeoutError::Disconnected) => bail!("QEMU ended without output"),
    }
}

/// Tells a record from text.
pub fn parse(line: &str) -> Line<'_> {
    match line.strip_prefix(RECORD) {
        Some(record) => Line::Record(record),
        None => Line::Text(line),
    }
}

/// A running QEMU; killed when dropped.
struct Machine(Child);

impl Machine {
    fn start(system: &System, console: &Path, dir: &Path, job: &Job) -> Result<Machine> {
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
            // A small table of TCP sockets: the driver reads all of it to see
            // whether a server listens.
            .arg(format!(
                "console={} panic=-1 mitigations=off tsc=reliable random.trust_cpu=on \
                 net.ifnames=0 loglevel=4 thash_entries=1024 {}",
                architecture.console, hardware.kernel_arguments
            ));
        if let Some(disk) = &system.disk {
            // QEMU would stop the guest, without a word, when the host's disk is full.
            command.arg("-drive").arg(format!(
                "file={},format=raw,if=virtio,snapshot=on,cache=unsafe,\
                 werror=report,rerror=report",
                option(disk)
            ));
        }
        for (tag, path) in &system.shares {
            command.arg("-virtfs").arg(format!(
                "local,path={},mount_tag={tag},security_model=none,multidevs=remap",
                option(path)
            ));
        }
        command.args(["-device", "virtio-serial-pci"]);
        let job_port = "virtserialport,chardev=job,name=job";
        if job.shell {
            command
                .args(["-serial", "stdio"])
                .arg("-chardev")
                .arg(format!("file,id=job,path={}", option(&dir.join("job.out"))))
                .args(["-device", job_port])
                .stdin(Stdio::inherit())
                .stdout(Stdio::inherit());
        } else {
            command
                .arg("-serial")
                .arg(format!("file:{}", option(console)))
                .args(["-chardev", "stdio,id=job,signal=off"])
                .args(["-device", job_port])
                // Held open and unused: at its end QEMU would take the port
                // for unplugged and drop what the guest writes.
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

    /// Everything that the job prints, line by line; disconnects when QEMU
    /// has ended.
    fn lines(&mut self) -> Result<Receiver<String>> {
        let (sender, receiver) = mpsc::channel();
        match self.0.stdout.take() {
            Some(out) => {
                thread::spawn(move || forward(out, &sender));
            }
            None => {
                // The terminal has the shell; all there is to wait for is
                // QEMU's end.
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

    /// Waits for the guest to switch itself off; what is left after `limit`
    /// is killed.
    fn down(&mut self, limit: Duration) {
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

/// A path as QEMU's option parser wants it: a comma doubled.
fn option(path: &Path) -> String {
    path.to_string_lossy().replace(',', ",,")
}

/// The files of one run; removed at its end unless kept.
struct RunDir {
    path: PathBuf,
    keep: std::cell::Cell<bool>,
}

impl RunDir {
    fn new(name: &str) -> Result<RunDir> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let runs = host::cache()?.join("runs");
        forget_old(&runs);
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

/// Removes what runs of long ago left.
fn forget_old(runs: &Path) {
    const KEPT: Duration = Duration::from_secs(7 * 24 * 3600);
    let Ok(entries) = fs::read_dir(runs) else {
        return;
    };
    for entry in entries.flatten() {
        let age = entry
            .metadata()
            .and_then(|m| m.modified())
            .ok()
            .and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > KEPT) {
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
        assert_eq!(parse("\u{1e}guest started"), Line::Record("guest started"));
        assert_eq!(parse("guest started"), Line::Text("guest started"));
    }

    #[test]
    fn only_emulator_crashes_boot_again() {
        let dir = std::env::temp_dir().join(format!("ringverbs-boots-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let console = dir.join("console.log");
        // What the console says after each boot, and how many boots there are.
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
        for (says, boots, up) in cases {
            let mut count = 0;
            let result = persistently(&console, || {
                let says = says[count as usize];
                count += 1;
                fs::write(&console, format!("[ 2.9] {says}\nCPU: 1\n"))?;
                match says {
                    "up" => Ok(()),
                    _ => bail!("the guest shut down"),
                }
            });
            assert_eq!((count, result.is_ok()), (boots, up), "{says:?}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn commas_in_paths_are_doubled() {
        assert_eq!(option(Path::new("/a,b")), "/a,,b");
    }
}
