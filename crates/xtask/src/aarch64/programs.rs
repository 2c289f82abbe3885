//! Debian's programs for arm64 on an embedded device, with its libmlx5 and with the
//! plugin: `cargo xtask aarch64 --programs`.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rxe_tests::driver::process::Running;
use rxe_tests::guest::apt::Apt;
use rxe_tests::guest::host;
use rxe_tests::guest::suite::AARCH64;

use crate::dist;

/// What is installed into the tree, beside what it depends on.
const PACKAGES: [&str; 3] = ["ibverbs-utils", "perftest", "ibverbs-providers"];
/// The folder of libibverbs' providers.
const PROVIDERS: &str = "usr/lib/aarch64-linux-gnu/libibverbs";
/// The pause before a client is started again.
const PAUSE: Duration = Duration::from_millis(200);
/// QEMU takes its time, and more beside others.
const PATIENCE: Duration = Duration::from_secs(120);

/// Programs of two processes, server and client.
const PAIRS: [&[&str]; 7] = [
    &["ibv_rc_pingpong", "-g", "1", "-c", "-n", "200"],
    &["ibv_uc_pingpong", "-g", "1", "-c", "-n", "200"],
    &["ibv_ud_pingpong", "-g", "1", "-c", "-n", "200"],
    &["ibv_srq_pingpong", "-g", "1", "-c", "-n", "200"],
    &["ib_write_bw", "-d", "mlx5_0", "-n", "100"],
    &["ib_read_bw", "-d", "mlx5_0", "-n", "100"],
    &["ib_send_bw", "-d", "mlx5_0", "-n", "100"],
];

/// Runs all of them with both providers.
pub fn run() -> Result<ExitCode> {
    super::needs()?;
    let dist = dist::whole_for_aarch64()?;
    let tree = tree()?;
    let installed = tree.join(PROVIDERS).join(dist::LIBRARY);
    fs::copy(dist.join(dist::LIBRARY), installed).context("cannot install the plugin")?;
    // The last one is asked first.
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
        let machine = Machine {
            tree: &tree,
            preload: dist.join(dist::PRELOAD),
            directory: &directory,
            ours,
        };
        let alone = machine.alone(&["ibv_devinfo"]);
        let alone = alone.and_then(|ended| machine.judge(&ended));
        let mut report = |program: &str, result: Result<()>| match result {
            Ok(()) => println!("ok      {name}: {program}"),
            Err(error) => {
                failed += 1;
                println!("FAILED  {name}: {program}: {error:#}");
            }
        };
        report("ibv_devinfo", alone);
        for program in PAIRS {
            port += 1;
            report(program[0], machine.pair(program, port));
        }
    }
    let _ = fs::remove_dir_all(&directory);
    Ok(match failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

struct Machine<'a> {
    tree: &'a Path,
    preload: PathBuf,
    directory: &'a Path,
    ours: bool,
}

impl Machine<'_> {
    /// Returns a program of the tree on the embedded device.
    fn command(&self, program: &[&str]) -> Command {
        let mut command = Command::new("qemu-aarch64");
        command.arg("-L").arg(self.tree);
        let mut preload = self.preload.display().to_string();
        if self.ours {
            // Before libmlx5, with which perftest is linked, as `ringverbs run` does.
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

    fn start(&self, program: &[&str], name: &str) -> Result<Running> {
        Running::start(self.command(program), &self.directory.join(name))
    }

    /// Runs one program to its end.
    fn alone(&self, program: &[&str]) -> Result<Running> {
        let mut running = self.start(program, "client.out")?;
        wait(&mut running, Instant::now() + PATIENCE)?;
        Ok(running)
    }

    /// Runs a server and a client. The client is started until the server listens.
    fn pair(&self, program: &[&str], port: u16) -> Result<()> {
        let port = port.to_string();
        let server = [program, &["-p", &port]].concat();
        let client = [&server[..], &["localhost"]].concat();
        let mut server = self.start(&server, "server.out")?;
        let end = Instant::now() + PATIENCE;
        let served = loop {
            let client = self.alone(&client)?;
            if client.ended().is_some_and(|status| status.success()) || Instant::now() >= end {
                break self.judge(&client);
            }
            if server.poll()?.is_some() {
                bail!("the server has ended; its client: {}", client.output());
            }
            sleep(PAUSE);
        };
        served.context("client")?;
        wait(&mut server, end).context("server")?;
        self.judge(&server).context("server")
    }

    /// Checks that a program has succeeded, with the provider that is wanted.
    fn judge(&self, program: &Running) -> Result<()> {
        let text = program.output();
        let status = program.ended().context("it has not ended")?;
        ensure!(status.success(), "{status}: {text}");
        let serves = program.says_it_serves("mlx5_0");
        ensure!(
            serves == self.ours,
            "the plugin serves it: {serves}; {text}"
        );
        Ok(())
    }
}

fn wait(running: &mut Running, end: Instant) -> Result<()> {
    while running.poll()?.is_none() {
        ensure!(
            Instant::now() < end,
            "it does not end: {}",
            running.output()
        );
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns the tree of Debian's packages for arm64, of the release that is installed
/// here. They are fetched once.
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
