//! `cargo xtask softhca`: a guest with a ConnectX in software, for a command
//! or a shell.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rxe_tests::guest::{Hardware, Job, Qemu, Suite, tree};

use crate::{driver, guest};

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
    /// than one make more HCAs
    #[arg(long, default_value = "roce")]
    profile: Vec<String>,
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
    fn count(&self) -> u32 {
        self.hcas.max(self.profile.len() as u32)
    }
}

/// What the guest does before the command: the drivers, then the wait for
/// their device, whose name and GID the command finds in the environment.
const SETUP: &str = include_str!("softhca-setup.sh");

/// Makes what is missing, starts the HCA and the guest, runs the command.
pub fn softhca(arguments: &Arguments) -> Result<ExitCode> {
    let image = tree::image(arguments.suite, arguments.kernel.as_deref())?;
    let qemu = Qemu::get()?;
    let program = match &arguments.program {
        Some(program) => program.clone(),
        None => build()?,
    };
    let dir = match &arguments.dir {
        Some(dir) => dir.clone(),
        None => std::env::temp_dir().join(format!("softhca-{}", std::process::id())),
    };
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let server = Server::start(&program, &dir, arguments)?;
    let result = run(arguments, &image, qemu, &dir);
    drop(server);
    if arguments.dir.is_none() {
        if result.is_err() {
            eprintln!("the HCA said, in {}:", dir.join(LOG).display());
        } else {
            let _ = fs::remove_dir_all(&dir);
        }
    }
    result
}

fn run(arguments: &Arguments, image: &tree::Image, qemu: Qemu, dir: &Path) -> Result<ExitCode> {
    let mut devices = Vec::new();
    for hca in 0..arguments.count() {
        let path = socket(dir, hca);
        devices.push("-device".to_owned());
        devices.push(format!(
            r#"{{"driver":"vfio-user-pci","socket":{{"type":"unix","path":"{}"}}}}"#,
            path.display()
        ));
    }
    let setup = if arguments.no_setup { "" } else { SETUP };
    let command = arguments.run.as_deref().unwrap_or_default();
    let shell = arguments.run.is_none();
    let job = Job {
        script: format!("{setup}\n{command}"),
        share: arguments.share.clone(),
        plugin: arguments.plugin.clone(),
        driver: None,
        shell,
        limit: guest::limit(shell, arguments.limit),
        hardware: Hardware {
            qemu: Some(qemu),
            shared_memory: true,
            arguments: devices,
            // Under emulation the processors' counters drift apart while one
            // waits for the device.
            kernel_arguments: "tsc=unstable".to_owned(),
        },
    };
    guest::run(image, &job)
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

/// The running program; ended when dropped.
struct Server(Child);

impl Server {
    /// Starts it and waits until it listens.
    fn start(program: &Path, dir: &Path, arguments: &Arguments) -> Result<Server> {
        let log = File::create(dir.join(LOG))?;
        let mut command = Command::new(program);
        command.arg("serve");
        for profile in &arguments.profile {
            command.args(["--profile", profile]);
        }
        for hca in 0..arguments.count() {
            let path = socket(dir, hca);
            let _ = fs::remove_file(&path);
            command.arg("--socket").arg(path);
        }
        command.arg("--control").arg(dir.join(CONTROL));
        command.args(&arguments.serve);
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut server = Server(
            command
                .spawn()
                .with_context(|| format!("cannot start {}", program.display()))?,
        );
        let last = socket(dir, arguments.count().saturating_sub(1));
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
