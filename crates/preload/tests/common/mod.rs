//! A network in a directory of its own, and programs on it, with rdma-core's provider
//! or with ours.

#![allow(dead_code, reason = "each file of tests uses a part")]

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use testing::hosts::{free_port, has_listener, succeeds};

/// Much longer than anything takes, except on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// One list at a time: each of its programs polls.
static TURN: Mutex<()> = Mutex::new(());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    Stock,
    Ours,
}

/// A network in a directory of its own, and programs on it.
pub struct World {
    pub directory: PathBuf,
    provider: Provider,
    devices: &'static str,
    /// Programs report causes to the file `explanations` of the directory.
    pub explains: bool,
    /// Programs are checked, with reports to the file `errors`.
    pub checks: bool,
    /// What the devices' links do.
    pub link: Option<&'static str>,
}

/// Cargo's target directory of this build.
pub fn built(name: &str) -> PathBuf {
    let test = env::current_exe().unwrap();
    test.parent().unwrap().join(name)
}

impl World {
    pub fn new(provider: Provider, devices: &'static str) -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("ringverbs-preload-{}-{number}", std::process::id());
        let directory = env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700)).unwrap();
        // libibverbs appends the version of its private interface.
        for version in [34, 57, 59, 64, 65] {
            let link = directory.join(format!("libringverbs-rdmav{version}.so"));
            symlink(built("libringverbs_provider.so"), link).unwrap();
        }
        Self {
            directory,
            provider,
            devices,
            explains: false,
            checks: false,
            link: None,
        }
    }

    fn plugin(&self) -> PathBuf {
        self.directory.join("libringverbs-rdmav34.so")
    }

    fn log(&self) -> PathBuf {
        self.directory.join("provider.log")
    }

    pub fn command(&self, line: &str) -> Command {
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .env("LD_PRELOAD", built("libringverbs_preload.so"))
            .env("RINGVERBS_EMBEDDED", self.devices)
            .env("RINGVERBS_DIRECTORY", &self.directory)
            .env("RINGVERBS_LOG", "info")
            .env("RINGVERBS_LOG_FILE", self.log())
            .env_remove("RDMAV_DRIVERS")
            .env_remove("IBV_DRIVERS")
            .env_remove("RINGVERBS_DEVICES")
            .stdin(Stdio::null());
        if let Some(link) = self.link {
            command.env("RINGVERBS_LINK", link);
        }
        if self.explains {
            let file = self.directory.join("explanations");
            command.env("RINGVERBS_EXPLAIN", file);
        }
        if self.checks {
            command.env("RINGVERBS_CHECK", self.directory.join("errors"));
        }
        if self.provider == Provider::Ours {
            // Programs that are linked to libmlx5, as perftest is, register that first.
            let (devices, plugin) = (built("libringverbs_preload.so"), self.plugin());
            let both = format!("{}:{}", devices.display(), plugin.display());
            command
                .env("LD_PRELOAD", both)
                .env("RDMAV_DRIVERS", self.directory.join("libringverbs"));
        }
        command
    }

    /// Runs a ping-pong whose client writes a file, which a variable names, to a disk of 64 KiB,
    /// and copies what is on the disk to the directory. Returns what both have printed; `None`
    /// if there is no such disk.
    pub fn pair_on_small_disk(&self, variable: &str, file: &str) -> Option<String> {
        let small = self.directory.join("small");
        fs::create_dir(&small).unwrap();
        let mount = format!("mount -t tmpfs -o size=64k none {}", small.display());
        if !succeeds("unshare", &format!("-rm {mount}")) {
            testing::skip!("no user namespace");
            return None;
        }
        let line = format!("ibv_rc_pingpong -g 1 -n 500 -p {}", free_port());
        let script = self.directory.join("client.sh");
        let commands = format!(
            "{mount} && {variable}={} {line} localhost && cp {}/* {}",
            small.join(file).display(),
            small.display(),
            self.directory.display()
        );
        fs::write(&script, commands).unwrap();
        Some(self.pair(&line, &format!("unshare -rm sh {}", script.display())))
    }

    /// Starts a program, with its output in a file.
    pub fn start(&self, line: &str, output: &str) -> Running {
        self.start_with(line, output, Stdio::null())
    }

    /// As [`start`](Self::start), with an input.
    pub fn start_with(&self, line: &str, output: &str, input: Stdio) -> Running {
        let path = self.directory.join(output);
        let file = File::create(&path).unwrap();
        let mut command = self.command(line);
        let command = command.stdout(file.try_clone().unwrap()).stderr(file);
        let command = command.stdin(input);
        Running {
            child: command.spawn().unwrap_or_else(|e| panic!("{line}: {e}")),
            line: line.to_owned(),
            path,
        }
    }

    /// Runs both ends of a program, which must succeed.
    pub fn pair(&self, server: &str, client: &str) -> String {
        for attempt in 0.. {
            for name in self.listening() {
                // Of a program that did not close its ids.
                fs::remove_file(self.directory.join(name)).unwrap();
            }
            let mut server = self.start(server, "server.txt");
            self.wait_for(&mut server);
            let mut client = self.start(client, "client.txt");
            // Each end of perftest measures the processor's clock, on a busy machine in vain,
            // and clients connect whether or not their server listens by now.
            let again = ["Can't produce a report", "RDMA_CM_EVENT_REJECTED; error: 8"];
            let stops_early = |end: &mut Running| {
                let failed = end.end() != Some(0);
                attempt < 10 && failed && again.iter().any(|it| end.said().contains(it))
            };
            if !stops_early(&mut client) {
                let said = client.good();
                if !stops_early(&mut server) {
                    server.good();
                    return said;
                }
            }
            let _ = fs::remove_file(self.directory.join("explanations"));
            let _ = fs::remove_file(self.directory.join("errors"));
        }
        unreachable!("the last attempt returns")
    }

    /// Waits until a server listens: on a TCP port that it was given, or on a port
    /// of the network. A program that has ended is left to the caller.
    pub fn wait_for(&self, server: &mut Running) {
        let words: Vec<&str> = server.line.split(' ').collect();
        let port = words.windows(2).find(|pair| pair[0] == "-p");
        let port = port.filter(|_| !words.contains(&"-R")).map(|pair| pair[1]);
        if words[0] == "mckey" {
            // Its sender waits for three seconds.
            return;
        }
        let end = Instant::now() + PATIENCE;
        while server.child.try_wait().unwrap().is_none() && Instant::now() < end {
            let ready = match port {
                Some(port) => listens(port.parse().unwrap()),
                None => !self.listening().is_empty(),
            };
            if ready {
                return;
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Returns the files of ports of the network on which a process listens: they have its
    /// number.
    fn listening(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.directory).unwrap();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let has_number = |name: &String| {
            let found = fs::metadata(self.directory.join(name));
            name.starts_with("cm-") && found.is_ok_and(|it| it.len() != 0)
        };
        names.filter(has_number).collect()
    }

    /// Checks at the end that the log names the intended provider.
    pub fn finish(self) {
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let ours = log.contains("serves") && log.contains("mlx5_0");
        assert_eq!(ours, self.provider == Provider::Ours, "{log}");
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Returns whether rping, which has said this, was done and failed after that: its second thread
/// may ask for an event when the first has closed their channel.
pub fn ended_late(said: &str) -> bool {
    let last = said.trim_end().lines().next_back();
    let disconnected = ["client", "server"].map(|end| format!("{end} DISCONNECT EVENT..."));
    last == Some("rdma_get_cm_event: Bad file descriptor")
        && said
            .lines()
            .any(|it| disconnected.iter().any(|said| it == said))
}

pub struct Running {
    pub child: Child,
    line: String,
    path: PathBuf,
}

impl Running {
    pub fn said(&self) -> String {
        fs::read_to_string(&self.path).unwrap_or_default()
    }

    /// Waits for the end of the program; returns the exit status, if there is one.
    pub fn end(&mut self) -> Option<i32> {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(
                Instant::now() < end,
                "{}: no end: {}",
                self.line,
                self.said()
            );
            sleep(Duration::from_millis(5));
        }
    }

    pub fn good(&mut self) -> String {
        let (status, said) = (self.end(), self.said());
        let good = status == Some(0) || ended_late(&said);
        assert!(good, "{}: {status:?}: {said}", self.line);
        said
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Programs of others, without mistakes.
pub struct CorrectPrograms {
    /// Command lines without a port: programs that get one by `-p`.
    pub pairs: &'static [&'static str],
    /// Values of `UCX_TLS` for `ucx_perftest`.
    pub transports: &'static [&'static str],
}

impl CorrectPrograms {
    /// Runs those that are installed, and calls `each` with the name after each. Returns false
    /// if the first are missing.
    pub fn run(&self, world: &World, each: impl Fn(&str)) -> bool {
        if !installed(&["ibv_rc_pingpong", "ib_write_bw", "rping"]) {
            return false;
        }
        for line in self.pairs {
            let line = format!("{line} -p {}", free_port());
            world.pair(&line, &format!("{line} localhost"));
            each(&line);
        }
        let line = "rping -a 127.0.0.1 -C 20 -V";
        world.pair(&format!("{line} -s"), &format!("{line} -c"));
        each(line);
        if installed(&["fi_pingpong"]) {
            let line = "fi_pingpong -p verbs -e msg -c -I 20";
            let port = free_port();
            let mut server = world.start(&format!("{line} -B {port}"), "server.txt");
            wait_for_port(port, &mut server);
            let client = format!("{line} -P {port} 127.0.0.1");
            world.start(&client, "client.txt").end();
            server.end();
            each(line);
        }
        if installed(&["ucx_perftest"]) {
            for transport in self.transports {
                let line = format!("env UCX_TLS={transport} UCX_NET_DEVICES=mlx5_0:1 ucx_perftest");
                let line = format!("{line} -p {}", free_port());
                let more = "-t tag_lat -s 8192 -n 30 -w 3";
                world.pair(&line, &format!("{line} 127.0.0.1 {more}"));
                each(transport);
            }
        }
        true
    }
}

/// Returns whether programs are installed; prints which one is missing.
pub fn installed(programs: &[&str]) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| env::split_paths(&path).any(|place| place.join(name).is_file());
    let missing = programs.iter().find(|name| !has(name));
    if let Some(missing) = missing {
        let package = match *missing {
            "fi_pingpong" => "libfabric-bin",
            "ucx_perftest" => "ucx-utils",
            "mpirun" | "mpicc" => "openmpi-bin libopenmpi-dev",
            "cc" => "gcc libibverbs-dev librdmacm-dev",
            "gdb" | "strace" | "tshark" | "valgrind" | "rr" => missing,
            _ => "ibverbs-utils ibverbs-providers rdmacm-utils perftest",
        };
        testing::skip!(missing: package, "{missing} is not installed");
    }
    missing.is_none()
}

/// Returns whether there is a listener on a TCP port.
pub fn listens(port: u16) -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = fs::read_to_string(table).unwrap_or_default();
        has_listener(&table, port)
    })
}

/// Waits until a server listens on a TCP port, or has ended.
pub fn wait_for_port(port: u16, server: &mut Running) {
    let end = Instant::now() + PATIENCE;
    while server.child.try_wait().unwrap().is_none() && !listens(port) && Instant::now() < end {
        sleep(Duration::from_millis(10));
    }
}

pub fn turn() -> std::sync::MutexGuard<'static, ()> {
    TURN.lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Compiles a program of this folder; `None`, with the reason printed, where the
/// compiler or a library is missing.
pub fn compiled(compiler: &str, name: &str, libraries: &[&str], folder: &Path) -> Option<PathBuf> {
    if !installed(&[compiler]) {
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/c")
        .join(name);
    let program = folder.join(source.file_stem().unwrap());
    let mut command = Command::new(compiler);
    command
        .args(["-O1", "-Wall", "-o"])
        .arg(&program)
        .arg(source);
    let output = command.args(libraries).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() && said.contains("No such file or directory") {
        let complaint = said.lines().next().unwrap_or_default();
        testing::skip!(missing: "libibverbs-dev librdmacm-dev", "{name} needs headers: {complaint}");
        return None;
    }
    assert!(output.status.success(), "{name}: {said}");
    Some(program)
}

/// Generates a test of each list with each provider.
macro_rules! with_each_provider {
    ($($name:ident: $list:ident;)*) => {
        mod stock {
            $(#[test] fn $name() { super::$list(super::Provider::Stock); })*
        }
        mod ours {
            $(#[test] fn $name() { super::$list(super::Provider::Ours); })*
        }
    };
}
