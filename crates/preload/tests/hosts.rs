//! Programs of libibverbs, librdmacm and perftest on devices that reach other hosts:
//! between addresses of the loopback interface, and, as root and with ip(8), between
//! network namespaces.
//!
//! Skipped where a program is not installed: `apt-get install ibverbs-utils
//! ibverbs-providers rdmacm-utils perftest`.

#[macro_use]
#[allow(unused_macros, reason = "each file of tests uses a part")]
mod common;

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, mpsc};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use common::{compiled, ended_late};
use testing::hosts::{Namespaces, has_listener, succeeds};
use testing::program;

/// Much longer than anything takes, except on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// One list at a time: each of its programs polls.
static TURN: Mutex<()> = Mutex::new(());

/// A host: an address and, in a network namespace, its name.
struct Host {
    namespace: Option<String>,
    address: String,
}

impl Host {
    /// A host on an address of the loopback interface, different in each run of these tests, as
    /// processes with the same address share its ports.
    fn local(number: u8) -> Self {
        let [.., high, low] = std::process::id().to_be_bytes();
        Self {
            namespace: None,
            address: format!("127.{number}.{high}.{low}"),
        }
    }

    /// The hosts of two namespaces.
    fn pair(namespaces: &Namespaces) -> [Self; 2] {
        [("192.0.2.1", 0), ("192.0.2.2", 1)].map(|(address, at)| Self {
            namespace: Some(namespaces.0[at].clone()),
            address: String::from(address),
        })
    }

    fn plain(&self, line: &str) -> Command {
        let inside = match &self.namespace {
            Some(name) => format!("ip netns exec {name} {line}"),
            None => line.to_owned(),
        };
        let mut words = inside.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command.args(words).stdin(Stdio::null());
        command
    }

    fn start(&self, directory: &Folder, line: &str) -> Child {
        self.start_on(&self.address, directory, line)
    }

    /// Starts a program on a device that is named by an address or an interface.
    fn start_on(&self, device: &str, directory: &Folder, line: &str) -> Child {
        let library = env::current_exe().unwrap();
        let library = library.parent().unwrap().join("libringverbs_preload.so");
        let set = format!(
            "env LD_PRELOAD={} RINGVERBS_EMBEDDED=roce:{device} RINGVERBS_DIRECTORY={} {line}",
            library.display(),
            directory.0.display()
        );
        let mut command = self.plain(&set);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap_or_else(|e| panic!("{line}: {e}"))
    }

    fn listens(&self, port: u16) -> bool {
        let table = self.plain("cat /proc/net/tcp /proc/net/tcp6");
        let table = { table }.output().unwrap().stdout;
        has_listener(&String::from_utf8_lossy(&table), port)
    }

    /// Returns the bytes that its network interface has sent.
    fn sent(&self) -> u64 {
        let table = { self.plain("cat /proc/net/dev") }.output().unwrap().stdout;
        let table = String::from_utf8_lossy(&table);
        let line = table.lines().find_map(|line| line.split_once("veth0:"));
        let words = line.unwrap().1.split_whitespace();
        { words }.nth(8).unwrap().parse().unwrap()
    }
}

/// A directory for the files that replace sysfs.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("ringverbs-hosts-{name}-{}", std::process::id());
        let path = env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A server, which is killed when this is dropped.
struct Server(Option<Child>);

impl Server {
    fn is_running(&mut self) -> bool {
        let running = |child: &mut Child| child.try_wait().unwrap().is_none();
        self.0.as_mut().is_some_and(running)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn finish(child: Child) -> Output {
    program::wait_with_timeout(child, PATIENCE)
}

fn has_succeeded(output: &Output) -> bool {
    output.status.success() || ended_late(&String::from_utf8_lossy(&output.stderr))
}

/// Runs both ends of a program, of which the client names the server last. With a TCP
/// port the server is waited for; without one the client is started again until it
/// finds the server.
fn pair(directory: &Folder, hosts: [&Host; 2], port: Option<u16>, lines: [&str; 2]) {
    let [server, client] = lines;
    let mut serving = Server(Some(hosts[0].start(directory, server)));
    let end = Instant::now() + PATIENCE;
    while port.is_some_and(|port| !hosts[0].listens(port)) && serving.is_running() {
        assert!(Instant::now() < end, "{server}: nobody listens");
        sleep(Duration::from_millis(10));
    }
    let client = format!("{client} {}", hosts[0].address);
    let asked = loop {
        let asked = finish(hosts[1].start(directory, &client));
        let again = port.is_none() && serving.is_running() && Instant::now() < end;
        if asked.status.success() || !again {
            break asked;
        }
        sleep(Duration::from_millis(50));
    };
    let asked_well = has_succeeded(&asked);
    if !asked_well && serving.is_running() {
        let _ = serving.0.as_mut().map(Child::kill);
    }
    let served = finish(serving.0.take().unwrap());
    assert!(
        asked_well && has_succeeded(&served),
        "{client}: {asked:?}\n{server}: {served:?}"
    );
}

const PROGRAMS: [&str; 10] = [
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ib_send_bw",
    "ib_write_bw",
    "ib_read_lat",
    "ib_atomic_bw",
    "rping",
    "ucmatose",
    "udaddy",
    "mckey",
];

fn installed() -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    let has = |name: &str| env::split_paths(&path).any(|place| place.join(name).is_file());
    let missing = PROGRAMS.iter().find(|name| !has(name));
    if let Some(missing) = missing {
        let packages = "ibverbs-utils ibverbs-providers rdmacm-utils perftest";
        testing::skip!(missing: packages, "{missing} is not installed");
    }
    missing.is_none()
}

fn programs(name: &str, a: &Host, b: &Host, port: u16) {
    let _turn = TURN.lock().unwrap_or_else(|it| it.into_inner());
    let directory = Folder::new(name);
    let found = finish(a.start(&directory, "ibv_devinfo -v"));
    let text = String::from_utf8_lossy(&found.stdout);
    let gid = format!("::ffff:{}", a.address);
    let gids: Vec<&str> = text.lines().filter(|it| it.contains("GID[")).collect();
    let right = |it: &&str| it.contains(&gid) && it.contains("RoCE v2");
    assert!(gids.len() == 1 && gids.iter().all(right), "{text}");

    let port_text = format!("-p {port}");
    for line in [
        "ibv_rc_pingpong -c -g 0 -n 100",
        "ibv_srq_pingpong -g 0 -n 100",
        "ibv_ud_pingpong -g 0 -n 100 -s 1000",
        "ib_send_bw -x 0 -n 200 -s 20000 -F",
        "ib_write_bw -x 0 -n 200 -s 20000 -F",
        "ib_read_lat -x 0 -n 100 -s 20000 -F",
        "ib_atomic_bw -x 0 -n 200 -F",
    ] {
        let line = format!("{line} {port_text}");
        pair(&directory, [a, b], Some(port), [&line, &line]);
    }
    for [server, client] in [
        [
            "rping -s -V -S 20000 -C 20 -a",
            "rping -c -V -C 20 -S 20000 -a",
        ],
        ["ucmatose -b", "ucmatose -s"],
        ["udaddy -b", "udaddy -s"],
    ] {
        let server = format!("{server} {}", a.address);
        pair(&directory, [a, b], None, [&server, client]);
    }
}

/// Multicast to the members on both hosts, two of which share an address.
fn multicast(name: &str, a: &Host, b: &Host) {
    let _turn = TURN.lock().unwrap_or_else(|it| it.into_inner());
    let directory = Folder::new(name);
    let start = |host: &Host, options: &str| {
        let line = format!("mckey -m 239.1.77.2 -b {} -C 10{options}", host.address);
        host.start(&directory, &line)
    };
    let members = [a, a, b].map(|host| Server(Some(start(host, ""))));
    // A member that is not ready yet misses messages, so there are more.
    let end = Instant::now() + PATIENCE;
    let mut members = Vec::from(members);
    while !members.is_empty() {
        assert!(Instant::now() < end, "{} members wait", members.len());
        let sent = finish(start(b, " -s"));
        assert!(sent.status.success(), "{sent:?}");
        members.retain_mut(|member| {
            let status = member.0.as_mut().unwrap().try_wait().unwrap();
            assert!(status.is_none_or(|it| it.success()), "a member failed");
            status.is_none()
        });
    }
}

#[test]
fn programs_on_the_loopback_interface() {
    if !installed() {
        return;
    }
    programs("local", &Host::local(48), &Host::local(49), 18591);
    multicast("local-multicast", &Host::local(54), &Host::local(55));
}

/// Each process accepts connections on its own ports, also while other processes end.
#[test]
fn processes_share_an_address() {
    if !installed() {
        return;
    }
    let _turn = TURN.lock().unwrap_or_else(|it| it.into_inner());
    let directory = Folder::new("shared");
    let (a, b) = (Host::local(51), Host::local(52));
    let mut idle: Vec<Server> = ["7301", "7302", "7303"]
        .iter()
        .map(|port| format!("rping -s -p {port} -a {}", a.address))
        .map(|line| Server(Some(a.start(&directory, &line))))
        .collect();
    for round in 0..3 {
        for number in 0..3 {
            let port = 7311 + number;
            let server = format!("rping -s -V -S 5000 -C 30 -p {port} -a {}", a.address);
            let client = format!("rping -c -V -S 5000 -C 30 -p {port} -a");
            pair(
                &directory,
                [&a, if round == 1 { &a } else { &b }],
                None,
                [&server, &client],
            );
        }
        drop(idle.pop());
    }
}

#[test]
fn programs_in_two_namespaces() {
    if !installed() {
        return;
    }
    let Some(namespaces) = Namespaces::new("programs", 1500) else {
        return;
    };
    let [a, b] = Host::pair(&namespaces);
    programs("namespaces", &a, &b, 18592);
    multicast("namespaces-multicast", &a, &b);
}

/// Programs are told of an address that their interface gets, and two that share it
/// serve there at the ports at which they listen already.
#[test]
fn a_new_address_is_used() {
    if !installed() {
        return;
    }
    let _turn = TURN.lock().unwrap_or_else(|it| it.into_inner());
    let Some(namespaces) = Namespaces::new("follow", 1500) else {
        return;
    };
    let directory = Folder::new("follow");
    let [a, b] = Host::pair(&namespaces);
    let address = |what: &str, address: &str| {
        let name = &namespaces.0[0];
        let line = format!("-n {name} address {what} {address} dev veth0");
        assert!(succeeds("ip", &line), "ip {line}");
    };
    let on_interface = |line: &str| Server(Some(a.start_on("veth0", &directory, line)));
    let mut servers = ["7401", "7402"].map(|port| {
        let server = on_interface(&format!("rping -s -P -S 1000 -a :: -p {port}"));
        (port, server)
    });
    let end = Instant::now() + PATIENCE * 2;
    let asks = |port: &str, at: &str| {
        let client = format!("rping -c -V -C 5 -S 1000 -p {port} -a {at}");
        let output = finish(b.start_on("veth0", &directory, &client));
        has_succeeded(&output)
    };
    for (port, server) in &mut servers {
        while !asks(port, "192.0.2.1") {
            assert!(
                server.is_running() && Instant::now() < end,
                "nobody listens"
            );
        }
    }
    // Its output is read while it runs.
    let mut watcher = on_interface("stdbuf -oL ibv_asyncwatch -d mlx5_0");
    let output = watcher.0.as_mut().unwrap().stdout.take().unwrap();
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        lines.try_for_each(|line| sender.send(line))
    });
    let next_line = || lines.recv_timeout(PATIENCE).expect("no line");
    assert!(next_line().contains("async event FD"));
    // The GIDs that a newly started program sees.
    let has_gid = |gid: &str| {
        let found = finish(a.start_on("veth0", &directory, "ibv_devinfo -v"));
        let text = String::from_utf8_lossy(&found.stdout).into_owned();
        assert!(found.status.success(), "{text}");
        text.lines()
            .any(|it| it.contains("GID[") && it.contains(gid))
    };
    // Addresses that the system makes by itself are announced, too.
    let mut told = 0;
    let mut await_gid = |gid: &str, wanted: bool| {
        while has_gid(gid) != wanted {
            let line = next_line();
            assert!(
                line.contains("(18), port 1"),
                "not IBV_EVENT_GID_CHANGE: {line}"
            );
            told += 1;
        }
    };
    for (new, gid, network) in [
        ("192.0.2.77", "::ffff:192.0.2.77", "24"),
        ("fd00::77", "fd00::77", "64"),
    ] {
        assert!(!has_gid(gid));
        address("add", &format!("{new}/{network}"));
        await_gid(gid, true);
        for (port, _) in &servers {
            // A server may notice the address later than the program above.
            while !asks(port, new) {
                assert!(Instant::now() < end, "{port} at {new}");
            }
        }
        address("del", &format!("{new}/{network}"));
        await_gid(gid, false);
        // The other addresses still work.
        assert!(asks("7401", "192.0.2.1"));
        address("add", &format!("{new}/{network}"));
        await_gid(gid, true);
        assert!(asks("7402", new), "again at {new}");
    }
    assert!(told >= 2, "told {told} times");
    assert!(servers.iter_mut().all(|(_, server)| server.is_running()));
}

/// Queue pairs of an address that is removed fail in time; when it is back, a server goes
/// on to serve there.
#[test]
fn a_removed_address_can_return() {
    if !installed() {
        return;
    }
    let _turn = TURN.lock().unwrap_or_else(|it| it.into_inner());
    let Some(namespaces) = Namespaces::new("address", 1500) else {
        return;
    };
    let directory = Folder::new("address");
    let [a, b] = Host::pair(&namespaces);
    let address = |what: &str| {
        let line = format!(
            "-n {} address {what} 192.0.2.1/24 dev veth0",
            namespaces.0[0]
        );
        assert!(succeeds("ip", &line), "ip {line}");
    };
    let mut server = Server(Some(
        a.start(&directory, "rping -s -P -S 1000 -a 192.0.2.1"),
    ));
    // Waits until the server listens.
    let end = Instant::now() + PATIENCE * 2;
    let few = "rping -c -V -C 5 -S 1000 -a 192.0.2.1";
    while !finish(b.start(&directory, few)).status.success() {
        assert!(Instant::now() < end, "nobody listens");
    }
    let line = "ib_write_bw -x 0 -s 4096 -D 600 -F -p 18593";
    let idle = Server(Some(a.start(&directory, line)));
    while !a.listens(18593) {
        assert!(Instant::now() < end, "nobody listens");
        sleep(Duration::from_millis(10));
    }
    let client = b.start(&directory, &format!("{line} {}", a.address));
    while b.sent() < 2_000_000 {
        assert!(Instant::now() < end, "nothing is written");
        sleep(Duration::from_millis(10));
    }
    address("del");
    let output = finish(client);
    let said = [&output.stdout[..], &output.stderr[..]].concat();
    let said = String::from_utf8_lossy(&said);
    // IBV_WC_RETRY_EXC_ERR
    assert!(said.contains("Failed status 12"), "{said}");
    drop(idle);
    address("add");
    let output = finish(b.start(&directory, few));
    assert!(output.status.success(), "{output:?}");
    assert!(server.is_running());
}

/// Waits for the ends of programs, which must succeed in time.
fn all_end(programs: Vec<Child>, limit: Duration, what: &str) {
    let started = Instant::now();
    for program in programs {
        let output = finish(program);
        assert!(output.status.success(), "{what}: {output:?}");
    }
    assert!(started.elapsed() < limit, "{what}: {:?}", started.elapsed());
}

/// Ends of connections do not wait for peers that have ended, or do not answer.
#[test]
fn processes_end_with_their_peers() {
    const COUNT: u16 = 12;
    /// Much shorter than the connection manager waits, 60 s.
    const LIMIT: Duration = Duration::from_secs(15);
    let _turn = TURN.lock().unwrap_or_else(|it| it.into_inner());
    let Some(namespaces) = Namespaces::new("ends", 1500) else {
        return;
    };
    let directory = Folder::new("ends");
    let libraries = ["-lrdmacm", "-libverbs"];
    let Some(program) = compiled("cc", "exits.c", &libraries, &directory.0) else {
        return;
    };
    let program = program.display();
    let [a, b] = Host::pair(&namespaces);
    let read_line = |child: &mut Child, wanted: &str| {
        // One byte at a time: the rest of the output is read later.
        let mut line = String::new();
        let mut output = BufReader::with_capacity(1, child.stdout.as_mut().unwrap());
        output.read_line(&mut line).unwrap();
        assert_eq!(line.trim_end(), wanted);
    };
    let serve = |port: u16, options: &str| {
        let line = format!("{program} serve {} {port}{options}", a.address);
        let mut server = a.start_on("veth0", &directory, &line);
        read_line(&mut server, "listens");
        server
    };
    let connect = |port: u16, options: &str| {
        let line = format!("{program} connect {} {port}{options}", a.address);
        b.start_on("veth0", &directory, &line)
    };

    // On both hosts, processes that share the address end at the same time.
    for round in 0..4 {
        let ports = 7500..7500 + COUNT;
        let mut all: Vec<Child> = ports.clone().map(|port| serve(port, "")).collect();
        all.extend(ports.map(|port| connect(port, "")));
        all_end(all, LIMIT, &format!("round {round}"));
    }

    let held = || {
        let mut server = serve(7471, &format!(" {COUNT} hold"));
        let mut clients: Vec<Child> = (0..COUNT).map(|_| connect(7471, " hold")).collect();
        { clients.iter_mut() }.for_each(|client| read_line(client, "connected"));
        read_line(&mut server, "connected");
        (server, clients)
    };
    let terminate = |child: &Child| {
        assert!(succeeds("kill", &format!("-TERM {}", child.id())));
    };
    let kill = |child: &mut Child| {
        child.kill().unwrap();
        child.wait().unwrap();
    };
    // A server whose clients take no notice; some and all of them are gone.
    for gone in [0, COUNT / 2, COUNT] {
        let (server, mut clients) = held();
        clients
            .drain(..usize::from(gone))
            .for_each(|mut it| kill(&mut it));
        terminate(&server);
        all_end(vec![server], LIMIT, &format!("{gone} clients are gone"));
        clients.iter().for_each(terminate);
        all_end(clients, LIMIT, "clients without their server");
    }
    let (mut server, clients) = held();
    kill(&mut server);
    clients.iter().for_each(terminate);
    all_end(clients, LIMIT, "clients of a killed server");
    // A host without processes refuses.
    let started = Instant::now();
    let output = finish(connect(7471, ""));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("Connection refused"), "{said}");
    assert!(started.elapsed() < LIMIT);
}
