//! Programs of libibverbs, librdmacm and perftest on embedded devices, with
//! rdma-core's provider and with ours.
//!
//! Skipped where a program is not installed: `apt-get install ibverbs-utils
//! ibverbs-providers rdmacm-utils perftest`.

use std::env;
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Nothing here takes so long, but on a machine with much else to do.
const PATIENCE: Duration = Duration::from_secs(120);

/// One list at a time: each of its programs polls.
static TURN: Mutex<()> = Mutex::new(());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Provider {
    Stock,
    Ours,
}

/// A network in a directory of its own, and programs on it.
struct World {
    directory: PathBuf,
    provider: Provider,
    devices: &'static str,
}

/// Where cargo puts what this was built with.
fn built(name: &str) -> PathBuf {
    let test = env::current_exe().unwrap();
    test.parent().unwrap().join(name)
}

impl World {
    fn new(provider: Provider, devices: &'static str) -> Self {
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
        }
    }

    fn plugin(&self) -> PathBuf {
        self.directory.join("libringverbs-rdmav34.so")
    }

    fn log(&self) -> PathBuf {
        self.directory.join("provider.log")
    }

    fn command(&self, line: &str) -> Command {
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
        if self.provider == Provider::Ours {
            // Programs that are linked to libmlx5, as perftest is, register that first.
            let (devices, plugin) = (built("libringverbs_preload.so"), self.plugin());
            let both = format!("{}:{}", devices.display(), plugin.display());
            command
                .env("LD_PRELOAD", both)
                .env("RDMAV_DRIVERS", self.directory.join("libringverbs"))
                .env("RINGVERBS_DEVICES", "mlx5");
        }
        command
    }

    /// Starts a program, with its output in a file.
    fn start(&self, line: &str, output: &str) -> Running {
        let path = self.directory.join(output);
        let file = File::create(&path).unwrap();
        let mut command = self.command(line);
        let command = command.stdout(file.try_clone().unwrap()).stderr(file);
        Running {
            child: command.spawn().unwrap_or_else(|e| panic!("{line}: {e}")),
            line: line.to_owned(),
            path,
        }
    }

    /// Runs both ends of a program to their ends, which must be good.
    fn pair(&self, server: &str, client: &str) -> String {
        for name in self.sockets() {
            // Of a program that did not close its ids.
            fs::remove_file(self.directory.join(name)).unwrap();
        }
        let mut server = self.start(server, "server.txt");
        self.wait_for(&mut server);
        let mut client = self.start(client, "client.txt");
        let said = client.good();
        server.good();
        said
    }

    /// Waits until a server listens: on a TCP port that it was given, or on a port
    /// of the network. A program that has ended is left to the caller.
    fn wait_for(&self, server: &mut Running) {
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
                None => !self.sockets().is_empty(),
            };
            if ready {
                return;
            }
            sleep(Duration::from_millis(10));
        }
    }

    /// Returns the sockets of ports of the network.
    fn sockets(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.directory).unwrap();
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let is_port = |name: &String| name.starts_with("cm-") && name.ends_with(".socket");
        names.filter(is_port).collect()
    }

    /// Ends the world: the log must name the intended provider.
    fn finish(self) {
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

struct Running {
    child: Child,
    line: String,
    path: PathBuf,
}

impl Running {
    fn said(&self) -> String {
        fs::read_to_string(&self.path).unwrap_or_default()
    }

    /// Waits for its end; returns the exit status, if it has one.
    fn end(&mut self) -> Option<i32> {
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

    fn good(&mut self) -> String {
        let status = self.end();
        assert_eq!(status, Some(0), "{}: {}", self.line, self.said());
        self.said()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns whether programs are installed; says which one is not.
fn installed(programs: &[&str]) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| env::split_paths(&path).any(|place| place.join(name).is_file());
    let missing = programs.iter().find(|name| !has(name));
    if let Some(missing) = missing {
        println!(
            "skipped: {missing} is not installed (apt-get install ibverbs-utils \
             ibverbs-providers rdmacm-utils perftest)"
        );
    }
    missing.is_none()
}

/// Returns whether somebody listens on a TCP port.
fn listens(port: u16) -> bool {
    let end = format!(":{port:04X}");
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = fs::read_to_string(table).unwrap_or_default();
        table.lines().any(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            matches!(words[..], [_, local, _, "0A", ..] if local.ends_with(&end))
        })
    })
}

/// Returns a TCP port that is free.
fn port() -> u16 {
    let socket = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    socket.local_addr().unwrap().port()
}

fn turn() -> std::sync::MutexGuard<'static, ()> {
    TURN.lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn devices(provider: Provider) {
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(provider, "roce,ib");
    let said = world.start("ibv_devinfo -v", "devices.txt").good();
    for part in [
        "hca_id:\tmlx5_0",
        "hca_id:\tmlx5_1",
        "link_layer:\t\tEthernet",
        "link_layer:\t\tInfiniBand",
        "RoCE v2",
        "fw_ver:\t\t\t\t16.35.4030",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    world.finish();
}

fn pingpongs(provider: Provider) {
    let _turn = turn();
    let names = ["ibv_rc_pingpong", "ibv_xsrq_pingpong"];
    if !installed(&names) {
        return;
    }
    for (devices, gid) in [("roce", " -g 1"), ("ib", "")] {
        let world = World::new(provider, devices);
        for kind in ["rc", "uc", "ud", "srq", "xsrq"] {
            for more in ["", " -e"] {
                let line = format!("ibv_{kind}_pingpong{gid}{more} -n 200 -p {}", port());
                world.pair(&line, &format!("{line} localhost"));
            }
        }
        // Their programs check what they receive.
        let line = format!("ibv_rc_pingpong{gid} -c -n 100 -s 100000 -p {}", port());
        world.pair(&line, &format!("{line} localhost"));
        world.finish();
    }
}

fn perftest(provider: Provider) {
    let _turn = turn();
    if !installed(&["ib_send_lat"]) {
        return;
    }
    let world = World::new(provider, "roce");
    for operation in ["send", "write", "read", "atomic"] {
        for what in ["lat", "bw"] {
            let line = format!("ib_{operation}_{what} -x 1 -n 200 -p {}", port());
            let said = world.pair(&line, &format!("{line} localhost"));
            assert!(said.contains("#bytes"), "{said}");
        }
    }
    for more in ["-e", "-c UD", "-c UC -q 4", "-R"] {
        let program = if more.contains("UC") {
            "write_bw"
        } else {
            "send_bw"
        };
        let line = format!("ib_{program} -x 1 -n 200 -p {} {more}", port());
        world.pair(&line, &format!("{line} 127.0.0.1"));
    }
    world.finish();
}

fn connections(provider: Provider) {
    let _turn = turn();
    if !installed(&["rping", "ucmatose", "udaddy", "mckey", "rstream"]) {
        return;
    }
    // Ports belong to the network, so the default ones are free.
    let world = World::new(provider, "roce");
    for (server, client) in [
        (
            "rping -s -a 127.0.0.1 -C 20 -V",
            "rping -c -a 127.0.0.1 -C 20 -V",
        ),
        ("ucmatose -C 5", "ucmatose -C 5 -s 127.0.0.1"),
        ("udaddy", "udaddy -s 127.0.0.1"),
        ("rdma_server", "rdma_client -s 127.0.0.1"),
        (
            "rstream -S 1024 -C 50",
            "rstream -S 1024 -C 50 -s 127.0.0.1",
        ),
        (
            "riostream -S 1024 -C 50",
            "riostream -S 1024 -C 50 -s 127.0.0.1",
        ),
        (
            "mckey -m 239.1.1.1 -b 127.0.0.1 -C 3",
            "mckey -m 239.1.1.1 -b 127.0.0.1 -C 3 -s",
        ),
    ] {
        world.pair(server, client);
    }
    world.finish();
}

/// A peer that is killed breaks its connections, and nothing else.
fn killed(provider: Provider) {
    let _turn = turn();
    if !installed(&["ib_write_bw", "ibv_rc_pingpong"]) {
        return;
    }
    let world = World::new(provider, "roce");
    let line = format!("ib_write_bw -x 1 -D 60 -p {}", port());
    let mut server = world.start(&line, "server.txt");
    world.wait_for(&mut server);
    let mut client = world.start(&format!("{line} localhost"), "client.txt");
    sleep(Duration::from_millis(700));
    server.child.kill().unwrap();
    // "transport retry counter exceeded", after seconds.
    let began = Instant::now();
    assert_ne!(client.end(), Some(0), "{}", client.said());
    assert!(
        began.elapsed() < Duration::from_secs(50),
        "{}",
        client.said()
    );
    drop((server, client));
    let line = format!("ibv_rc_pingpong -g 1 -n 100 -p {}", port());
    world.pair(&line, &format!("{line} localhost"));
    world.finish();
}

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

with_each_provider! {
    lists_devices: devices;
    plays_ping_pong: pingpongs;
    runs_perftest: perftest;
    connects_by_address: connections;
    survives_a_killed_peer: killed;
}

#[test]
fn the_environment_that_cannot_be_met_is_one_line() {
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let said = |name: &str, value: &Path| {
        let mut command = world.command("ibv_devinfo");
        command.env(name, value);
        let output = command.output().unwrap();
        assert_ne!(output.status.code(), Some(0));
        let text = String::from_utf8(output.stderr).unwrap();
        let lines = text.lines().filter(|line| line.starts_with("ringverbs: "));
        assert_eq!(lines.count(), 1, "{text}");
        text
    };
    let unknown = said("RINGVERBS_EMBEDDED", Path::new("card"));
    assert!(unknown.contains("no device \"card\""), "{unknown}");
    let open = world.directory.join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let writable = said("RINGVERBS_DIRECTORY", &open);
    assert!(writable.contains("chmod go-w"), "{writable}");
    assert_eq!(fs::read_dir(&open).unwrap().count(), 0);
    let nowhere = said("RINGVERBS_DIRECTORY", Path::new("/nowhere/x"));
    assert!(nowhere.contains("/nowhere/x"), "{nowhere}");
}

#[test]
fn a_program_without_devices_is_left_alone() {
    let world = World::new(Provider::Stock, "roce");
    let mut command = world.command("ls /sys/class");
    let with = command.output().unwrap();
    let without = Command::new("ls").arg("/sys/class").output().unwrap();
    assert!(with.status.success());
    assert_eq!(with.stdout, without.stdout);
    assert!(!Path::new(&world.directory).join("0.lock").exists());
}
