//! `cargo xtask aarch64 --programs`: Debian's programs for arm64 on an embedded device,
//! with Debian's libmlx5 and with the plugin.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rxe_tests::driver::process::TestProcess;
use rxe_tests::guest::apt::Apt;
use rxe_tests::guest::host;
use rxe_tests::guest::suite::AARCH64;

use crate::dist;

/// The packages in the tree, besides their dependencies.
const PACKAGES: [&str; 3] = ["ibverbs-utils", "perftest", "ibverbs-providers"];
/// The folder of libibverbs' providers.
const PROVIDERS: &str = "usr/lib/aarch64-linux-gnu/libibverbs";
/// The interval between attempts of a client.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit of a program under emulation on a busy machine.
const PROGRAM_LIMIT: Duration = Duration::from_secs(120);

/// Programs with a server and a client.
const PAIRS: [&[&str]; 7] = [
    &["ibv_rc_pingpong", "-g", "1", "-c", "-n", "200"],
    &["ibv_uc_pingpong", "-g", "1", "-c", "-n", "200"],
    &["ibv_ud_pingpong", "-g", "1", "-c", "-n", "200"],
    &["ibv_srq_pingpong", "-g", "1", "-c", "-n", "200"],
    &["ib_write_bw", "-d", "mlx5_0", "-n", "100"],
    &["ib_read_bw", "-d", "mlx5_0", "-n", "100"],
    &["ib_send_bw", "-d", "mlx5_0", "-n", "100"],
];

/// Runs all programs with both providers.
pub fn run() -> Result<ExitCode> {
    super::require_tools()?;
    let dist = dist::dist_for_aarch64()?;
    let tree = tree()?;
    let installed = tree.join(PROVIDERS).join(dist::LIBRARY);
    fs::copy(dist.join(dist::LIBRARY), installed).context("cannot install the plugin")?;
    // libibverbs asks the last driver first.
    let config = tree.join("etc/libibverbs.d/mlx5.driver");
    fs::write(config, "driver mlx5\ndriver ringverbs\n").context("cannot write mlx5.driver")?;
    let name = format!("ringverbs-arm64-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    let mut private = fs::DirBuilder::new();
    private
        .mode(0o700)
        .create(&directory)
        .context("cannot make a folder")?;
    let (mut failed, mut port) = (0, 21_000 + (std::process::id() % 10_000) as u16);
    for ours in [false, true] {
        let name = if ours { "ringverbs" } else { "libmlx5" };
        let programs = Programs {
            tree: &tree,
            preload: dist.join(dist::PRELOAD),
            directory: &directory,
            ours,
        };
        let single = programs.run_single(&["ibv_devinfo"]);
        let single = single.and_then(|ended| programs.check_result(&ended));
        let mut report = |program: &str, result: Result<()>| match result {
            Ok(()) => println!("ok      {name}: {program}"),
            Err(error) => {
                failed += 1;
                println!("FAILED  {name}: {program}: {error:#}");
            }
        };
        report("ibv_devinfo", single);
        for program in PAIRS {
            port += 1;
            report(program[0], programs.run_pair(program, port));
        }
    }
    let _ = fs::remove_dir_all(&directory);
    Ok(match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// The tree's programs, served by the plugin or by libmlx5.
struct Programs<'a> {
    tree: &'a Path,
    preload: PathBuf,
    directory: &'a Path,
    ours: bool,
}

impl Programs<'_> {
    /// Returns the command of a program of the tree on the embedded device.
    fn command(&self, program: &[&str]) -> Command {
        let mut command = Command::new("qemu-aarch64");
        command.arg("-L").arg(self.tree);
        let mut preload = self.preload.display().to_string();
        if self.ours {
            // Before libmlx5, to which perftest is linked, as `ringverbs run` does.
            preload += &format!(":/{PROVIDERS}/{}", dist::LIBRARY);
        }
        command
            .args(["-E", &format!("LD_PRELOAD={preload}")])
            .args(["-E", "LD_LIBRARY_PATH=/usr/lib/aarch64-linux-gnu"]);
        command
            .arg(self.tree.join("usr/bin").join(program[0]))
            .args(&program[1..])
            .env("RINGVERBS_EMBEDDED", "roce")
            .env("RINGVERBS_DIRECTORY", self.directory)
            .env("RINGVERBS_LOG", "info")
            .env("RINGVERBS_DEVICES", if self.ours { "mlx5" } else { "rxe" });
        command
    }

    fn start(&self, program: &[&str], name: &str) -> Result<TestProcess> {
        TestProcess::start(self.command(program), &self.directory.join(name))
    }

    /// Runs one program until it exits.
    fn run_single(&self, program: &[&str]) -> Result<TestProcess> {
        let mut running = self.start(program, "client.out")?;
        wait(&mut running, Instant::now() + PROGRAM_LIMIT)?;
        Ok(running)
    }

    /// Runs a server and a client, which is retried until the server listens.
    fn run_pair(&self, program: &[&str], port: u16) -> Result<()> {
        let port = port.to_string();
        let server = [program, &["-p", &port]].concat();
        let client = [&server[..], &["localhost"]].concat();
        let mut server = self.start(&server, "server.out")?;
        let end = Instant::now() + PROGRAM_LIMIT;
        let served = loop {
            let client = self.run_single(&client)?;
            if client.exit_status().is_some_and(|status| status.success()) || Instant::now() >= end
            {
                break self.check_result(&client);
            }
            if server.poll()?.is_some() {
                bail!("the server has exited; its client: {}", client.output());
            }
            sleep(RETRY_INTERVAL);
        };
        served.context("client")?;
        wait(&mut server, end).context("server")?;
        self.check_result(&server).context("server")
    }

    /// Checks that a program has succeeded, served by the right provider.
    fn check_result(&self, program: &TestProcess) -> Result<()> {
        let text = program.output();
        let status = program.exit_status().context("it has not exited")?;
        ensure!(status.success(), "{status}: {text}");
        let serves = program.has_logged_serving("mlx5_0");
        ensure!(
            serves == self.ours,
            "served by the plugin: {serves}, expected: {}; {text}",
            self.ours
        );
        Ok(())
    }
}

fn wait(running: &mut TestProcess, end: Instant) -> Result<()> {
    while running.poll()?.is_none() {
        ensure!(Instant::now() < end, "timed out: {}", running.output());
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns the tree of Debian's packages for arm64, of the host's release. They are
/// fetched once.
fn tree() -> Result<PathBuf> {
    let folder = host::cache()?.join("arm64");
    let (tree, whole) = (folder.join("tree"), folder.join("whole"));
    if whole.exists() {
        return Ok(tree);
    }
    fs::create_dir_all(&tree).with_context(|| format!("cannot make {}", tree.display()))?;
    Apt::new(&folder, AARCH64.debian, None)?.unpack(&PACKAGES, &tree)?;
    fs::write(&whole, "").with_context(|| format!("cannot write {}", whole.display()))?;
    Ok(tree)
}
