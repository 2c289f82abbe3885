//! What connections by address cost: time, threads and descriptors of a process; and what a
//! process that is killed leaves of them.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{ConnParam, Event, EventChannel, EventKind, Id, PortSpace};
use ringverbs_embedded::{Drive, Embedded, Network};
use testing::open_files;
use uverbs::QpState;

const TIMEOUT: Duration = Duration::from_secs(30);

/// Tests that count what the process has run one at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Topology {
    Process,
    Directory,
    Hosts,
}

const ALL: [Topology; 3] = [Topology::Process, Topology::Directory, Topology::Hosts];

fn unused_directory() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("ringverbs-connections-{}-{number}", std::process::id());
    std::env::temp_dir().join(name)
}

/// Two devices that reach each other, and the address of the second one.
struct Pair {
    devices: [Embedded; 2],
    address: IpAddr,
    directory: Option<PathBuf>,
}

impl Pair {
    fn new(topology: Topology, drive: Drive) -> Self {
        let [.., high, low] = std::process::id().to_be_bytes();
        let own = |last: u8| Ipv4Addr::new(127, last, high, low);
        let mut directory = None;
        let networks = match topology {
            Topology::Process => {
                let network = Network::new(drive).unwrap();
                [network.clone(), network]
            }
            Topology::Directory => {
                let path = directory.insert(unused_directory());
                [(); 2].map(|()| Network::joined(drive, path).unwrap())
            }
            Topology::Hosts => {
                [31, 32].map(|last| Network::roce(drive, &own(last).to_string()).unwrap())
            }
        };
        let address = match topology {
            Topology::Hosts => own(32),
            _ => Ipv4Addr::LOCALHOST,
        };
        Self {
            devices: networks.map(|network| network.device("roce").unwrap()),
            address: address.into(),
            directory,
        }
    }

    fn channels(&self) -> [EventChannel; 2] {
        let open = |at: usize| EventChannel::open_on(self.devices[at].connection_manager());
        [0, 1].map(|at| open(at).unwrap())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if let Some(directory) = &self.directory {
            let _ = std::fs::remove_dir_all(directory);
        }
    }
}

fn next(channel: &EventChannel, kind: EventKind) -> Event {
    let event = channel.wait(Some(TIMEOUT)).unwrap();
    let event = event.unwrap_or_else(|| panic!("no {kind:?}"));
    assert_eq!(event.kind(), kind, "{:?}", event.message().result());
    event
}

fn listen(channel: &EventChannel, address: IpAddr) -> (Id, SocketAddr) {
    let id = channel.create_id(PortSpace::TCP).unwrap();
    id.bind((address, 0)).unwrap();
    id.listen(0).unwrap();
    let at = id.local_addr().unwrap().unwrap();
    (id, at)
}

/// Returns the number of a queue pair that no other connection has, also of other processes.
fn unused_queue_pair() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    (std::process::id() << 12 | NEXT.fetch_add(1, Ordering::Relaxed) & 0xfff) & 0xff_ffff
}

fn ask(channel: &EventChannel, to: SocketAddr) -> Id {
    let id = channel.create_id(PortSpace::TCP).unwrap();
    id.resolve_address(None, to, TIMEOUT).unwrap();
    next(channel, EventKind::ADDR_RESOLVED);
    id.resolve_route(TIMEOUT).unwrap();
    next(channel, EventKind::ROUTE_RESOLVED);
    id.connect(&param(unused_queue_pair())).unwrap();
    id
}

fn param(qp_num: u32) -> ConnParam<'static> {
    ConnParam {
        qp_num,
        ..ConnParam::default()
    }
}

/// Makes and ends a connection.
fn round(near: &EventChannel, far: &EventChannel, at: SocketAddr) {
    let active = ask(near, at);
    let passive = next(far, EventKind::CONNECT_REQUEST)
        .take_request()
        .unwrap();
    passive.accept(&param(2)).unwrap();
    next(near, EventKind::CONNECT_RESPONSE);
    active.establish().unwrap();
    next(far, EventKind::ESTABLISHED);
    active.disconnect().unwrap();
    next(far, EventKind::DISCONNECTED);
    passive.disconnect().unwrap();
    next(near, EventKind::DISCONNECTED);
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Prints connections per second, in turn by one thread, alone and beside a thread of the
/// program that polls every 100 ms and works in between.
#[test]
#[ignore = "a measurement"]
fn rate() {
    let _alone = alone();
    for (topology, busy) in ALL.into_iter().flat_map(|it| [(it, false), (it, true)]) {
        let pair = Pair::new(topology, Drive::Thread);
        let [near, far] = pair.channels();
        let (_listener, at) = listen(&far, pair.address);
        let end = Instant::now() + Duration::from_secs(2);
        let rounds = thread::scope(|scope| {
            if busy {
                scope.spawn(|| {
                    while Instant::now() < end {
                        pair.devices.iter().for_each(|device| device.idle());
                        let work = Instant::now();
                        while work.elapsed() < Duration::from_millis(100) {}
                    }
                });
            }
            let mut rounds = 0;
            while Instant::now() < end {
                round(&near, &far, at);
                rounds += 1;
            }
            rounds
        });
        println!(
            "{topology:?}{}: {} connections per second; {} threads, {} descriptors",
            if busy { ", busy" } else { "" },
            rounds / 2,
            threads(),
            open_files(),
        );
    }
}

/// A channel needs no thread, and an id no descriptor but the lock of its port.
#[test]
fn connections_need_few_descriptors() {
    const COUNT: usize = 100;
    let _alone = alone();
    for topology in ALL {
        let pair = Pair::new(topology, Drive::Thread);
        let of_pairs = threads();
        let [near, far] = pair.channels();
        let (_listener, at) = listen(&far, pair.address);
        // What processes of a directory need to reach each other.
        round(&near, &far, at);
        assert_eq!(threads(), of_pairs, "{topology:?}");
        let before = open_files();
        let active: Vec<Id> = (0..COUNT).map(|_| ask(&near, at)).collect();
        let mut passive = Vec::new();
        for _ in &active {
            let request = next(&far, EventKind::CONNECT_REQUEST).take_request();
            passive.push(request.unwrap());
        }
        let locks = match topology {
            Topology::Process => 0,
            Topology::Directory | Topology::Hosts => COUNT,
        };
        assert_eq!(open_files(), before + locks, "{topology:?}");
        for (active, passive) in active.iter().zip(&passive) {
            passive.accept(&param(2)).unwrap();
            next(&near, EventKind::CONNECT_RESPONSE);
            active.establish().unwrap();
            next(&far, EventKind::ESTABLISHED);
        }
        assert_eq!(open_files(), before + locks, "{topology:?}");
    }
}

/// How far a connection has come when one of its processes is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Requested,
    Accepted,
    Established,
    Disconnecting,
}

const STAGES: [Stage; 4] = [
    Stage::Requested,
    Stage::Accepted,
    Stage::Established,
    Stage::Disconnecting,
];
const VARIABLE: &str = "RINGVERBS_TEST_CONNECTION";

/// Does its part of a connection up to a stage.
fn request_until(channel: &EventChannel, to: SocketAddr, stage: Stage) -> Id {
    let id = ask(channel, to);
    if stage != Stage::Requested {
        next(channel, EventKind::CONNECT_RESPONSE);
        if stage != Stage::Accepted {
            id.establish().unwrap();
        }
    }
    id
}

fn accept_until(channel: &EventChannel, stage: Stage) -> Id {
    let request = next(channel, EventKind::CONNECT_REQUEST).take_request();
    let id = request.unwrap();
    if stage != Stage::Requested {
        id.accept(&param(2)).unwrap();
        if stage != Stage::Accepted {
            next(channel, EventKind::ESTABLISHED);
        }
    }
    id
}

/// The process that [`a_killed_peer_is_noticed_at_once`] kills, and the one of
/// [`a_process_may_end_after_its_last_message`].
#[test]
#[ignore = "run by another test"]
fn killed_process() {
    let variable = std::env::var(VARIABLE).expect("run by another test");
    let words: Vec<&str> = variable.split(' ').collect();
    let network = match words[0].strip_prefix("roce:") {
        Some(address) => Network::roce(Drive::Thread, address).unwrap(),
        None => Network::joined(Drive::Thread, Path::new(words[0])).unwrap(),
    };
    let device = network.device("roce").unwrap();
    let channel = EventChannel::open_on(device.connection_manager()).unwrap();
    if words[1] == "exit" {
        let to = words[2].parse().unwrap();
        let id = request_until(&channel, to, Stage::Established);
        println!("ready");
        let _ = std::io::stdin().read_line(&mut String::new());
        id.disconnect().unwrap();
        std::process::exit(0);
    }
    let stage: usize = words[1].parse().unwrap();
    let Some(stage) = STAGES.get(stage).copied() else {
        let id = ask(&channel, words[2].parse().unwrap());
        next(&channel, EventKind::CONNECT_RESPONSE);
        id.reject(b"last").unwrap();
        std::process::exit(0);
    };
    let _ids = match words.get(2) {
        Some(to) => (request_until(&channel, to.parse().unwrap(), stage), None),
        None => {
            let (listener, at) = listen(&channel, Ipv4Addr::LOCALHOST.into());
            println!("listens {at}");
            (accept_until(&channel, stage), Some(listener))
        }
    };
    println!("ready");
    thread::sleep(TIMEOUT);
}

struct KilledProcess {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl KilledProcess {
    fn new(directory: &Path, stage: usize, to: Option<SocketAddr>) -> Self {
        let to = to.map(|to| format!(" {to}")).unwrap_or_default();
        Self::with(&format!("{} {stage}{to}", directory.display()))
    }

    /// Starts it with the address of its device.
    fn at(address: IpAddr, what: &str, to: SocketAddr) -> Self {
        Self::with(&format!("roce:{address} {what} {to}"))
    }

    fn with(variable: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["killed_process", "--exact", "--ignored", "--nocapture"])
            .env(VARIABLE, variable)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// Waits for a line that contains a word, and returns the rest.
    fn wait_for(&mut self, word: &str) -> String {
        let found = self.lines.find_map(|line| {
            let line = line.unwrap();
            Some(line.split_once(word)?.1.trim().to_owned())
        });
        found.unwrap_or_else(|| panic!("no {word}"))
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for KilledProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The table of what the other process gets, by who is killed, and when. Requests of killed
/// processes stay, as in rdma_cm, but cannot be accepted.
#[test]
fn a_killed_peer_is_noticed_at_once() {
    let _alone = alone();
    for (number, stage) in STAGES.into_iter().enumerate() {
        let directory = unused_directory();
        let network = Network::joined(Drive::Thread, &directory).unwrap();
        let device = network.device("roce").unwrap();
        let channel = EventChannel::open_on(device.connection_manager()).unwrap();
        let expected = match stage {
            Stage::Requested | Stage::Accepted => EventKind::REJECTED,
            Stage::Established | Stage::Disconnecting => EventKind::DISCONNECTED,
        };
        let assert_noticed = |id: &Id, killed: Instant| {
            let event = next(&channel, expected);
            assert!(killed.elapsed() < Duration::from_secs(2), "{stage:?}");
            if expected == EventKind::REJECTED {
                let reason = event.message().result().unwrap_err();
                let consumer = rdmacm::RejectReason::CONSUMER_DEFINED;
                assert_eq!(reason, rdmacm::Reason::Rejected(consumer));
            }
            assert!(id.establish().is_err());
            let more = channel.wait(Some(Duration::from_millis(20))).unwrap();
            assert!(more.is_none(), "{stage:?}");
        };
        // The accepting side.
        let mut peer = KilledProcess::new(&directory, number, None);
        let at: SocketAddr = peer.wait_for("listens").parse().unwrap();
        let id = request_until(&channel, at, stage);
        peer.wait_for("ready");
        if stage == Stage::Disconnecting {
            id.disconnect().unwrap();
        }
        peer.kill();
        assert_noticed(&id, Instant::now());
        drop(id);
        // The requesting side.
        let (_listener, at) = listen(&channel, Ipv4Addr::LOCALHOST.into());
        let mut peer = KilledProcess::new(&directory, number, Some(at));
        let id = accept_until(&channel, stage);
        peer.wait_for("ready");
        if stage == Stage::Disconnecting {
            id.disconnect().unwrap();
        }
        peer.kill();
        if stage == Stage::Requested {
            thread::sleep(Duration::from_millis(200));
            assert!(id.accept(&param(2)).is_err());
        } else {
            assert_noticed(&id, Instant::now());
        }
        // Others are not affected: the address has a listener, or none.
        round(&channel, &channel, at);
        drop((id, peer));
        let _ = std::fs::remove_dir_all(&directory);
    }
}

/// A device that waits for connections, over UDP.
struct Server {
    address: IpAddr,
    channel: EventChannel,
    _listener: Id,
    at: SocketAddr,
    _device: Embedded,
}

impl Server {
    fn new(last: u8) -> Self {
        let address = Self::address(last);
        let network = Network::roce(Drive::Thread, &address.to_string()).unwrap();
        let device = network.device("roce").unwrap();
        let channel = EventChannel::open_on(device.connection_manager()).unwrap();
        let (listener, at) = listen(&channel, address);
        Self {
            address,
            channel,
            _listener: listener,
            at,
            _device: device,
        }
    }

    fn address(last: u8) -> IpAddr {
        let [.., high, low] = std::process::id().to_be_bytes();
        IpAddr::from([127, last, high, low])
    }

    /// Starts a process that connects from an address.
    fn connected(&self, from: IpAddr, what: &str) -> (KilledProcess, Id) {
        let mut peer = KilledProcess::at(from, what, self.at);
        let id = accept_until(&self.channel, Stage::Established);
        peer.wait_for("ready");
        (peer, id)
    }
}

/// Stages of a process of [`killed_process`].
const REQUESTED: &str = "0";
const ESTABLISHED: &str = "2";

/// The peers of a killed process only wait.
#[test]
fn members_of_an_address_tell_the_peers_of_a_killed_one() {
    let _alone = alone();
    let server = Server::new(34);
    let shared = Server::address(35);
    // One process of another address survives; the server is of the address itself, too.
    let (survivor, _survivors) = server.connected(shared, ESTABLISHED);
    for from in [shared, server.address] {
        let mut peers: Vec<_> = (0..8)
            .map(|_| server.connected(from, ESTABLISHED))
            .collect();
        let killed = Instant::now();
        for (peer, _) in &mut peers {
            peer.child.kill().unwrap();
        }
        for _ in 0..peers.len() {
            next(&server.channel, EventKind::DISCONNECTED);
        }
        assert!(killed.elapsed() < Duration::from_secs(3), "{from}");
    }
    let none = server.channel.wait(Some(Duration::from_millis(50)));
    assert!(none.unwrap().is_none());
    drop(survivor);
}

/// The last process of an address has nobody who tells its peer, which asks.
#[test]
fn the_end_of_the_last_process_of_an_address_is_found_out() {
    let _alone = alone();
    let server = Server::new(36);
    let address = Server::address(37);
    let (mut peer, _id) = server.connected(address, ESTABLISHED);
    peer.kill();
    next(&server.channel, EventKind::DISCONNECTED);
    // The next process of the address, if it is earlier.
    let (mut peer, _id) = server.connected(address, ESTABLISHED);
    peer.kill();
    let killed = Instant::now();
    let _next = KilledProcess::at(address, REQUESTED, server.at);
    let mut event = server.channel.wait(Some(TIMEOUT)).unwrap().unwrap();
    if event.kind() == EventKind::CONNECT_REQUEST {
        drop(event.take_request());
        event = next(&server.channel, EventKind::DISCONNECTED);
    }
    assert_eq!(event.kind(), EventKind::DISCONNECTED);
    assert!(
        killed.elapsed() < Duration::from_secs(4),
        "{:?}",
        killed.elapsed()
    );
}

/// Whoever has started the process tells its peers, as `ringverbs run` does.
#[test]
fn the_peers_of_the_last_process_of_an_address_are_told_by_who_started_it() {
    let _alone = alone();
    let server = Server::new(40);
    let address = Server::address(41);
    let (mut peer, _id) = server.connected(address, ESTABLISHED);
    let end_left = || Network::end_left_connections(&address.to_string()).unwrap();
    end_left();
    let none = server
        .channel
        .wait(Some(Duration::from_millis(50)))
        .unwrap();
    assert!(none.is_none(), "its process lives");
    peer.kill();
    end_left();
    // Not by refusals of the address, one in five seconds.
    let told = server
        .channel
        .wait(Some(Duration::from_millis(200)))
        .unwrap();
    assert_eq!(told.map(|it| it.kind()), Some(EventKind::DISCONNECTED));
}

#[test]
fn messages_wait_for_the_link() {
    let pair = Pair::new(Topology::Directory, Drive::Thread);
    let directory = pair.directory.clone().unwrap();
    let [near, far] = pair.channels();
    let (_listener, at) = listen(&far, pair.address);
    round(&near, &far, at);
    Network::set_link(&directory, 0, None, false).unwrap();
    let _active = ask(&near, at);
    // It is repeated after a quarter of a second.
    let early = far.wait(Some(Duration::from_millis(600))).unwrap();
    assert!(early.is_none(), "{:?}", early.map(|event| event.kind()));
    Network::set_link(&directory, 0, None, true).unwrap();
    next(&far, EventKind::CONNECT_REQUEST);
}

#[test]
fn a_process_may_exit_after_it_has_disconnected() {
    let _alone = alone();
    let server = Server::new(38);
    let from = Server::address(39);
    let mut peers: Vec<_> = (0..16).map(|_| server.connected(from, "exit")).collect();
    for (peer, _) in &mut peers {
        drop(peer.child.stdin.take());
    }
    for _ in 0..peers.len() {
        next(&server.channel, EventKind::DISCONNECTED);
    }
}

/// Paths of InfiniBand ports have the LID of the other end, which no message contains.
#[test]
fn infiniband_ports_learn_the_lids_of_their_peers() {
    let _alone = alone();
    let directory = unused_directory();
    let networks = [(); 2].map(|()| Network::joined(Drive::Thread, &directory).unwrap());
    let devices = networks.map(|network| network.device("ib").unwrap());
    let open = |device: &Embedded| EventChannel::open_on(device.connection_manager()).unwrap();
    let [near, far] = devices.each_ref().map(open);
    let (_listener, at) = listen(&far, Ipv4Addr::LOCALHOST.into());
    let active = ask(&near, at);
    let request = next(&far, EventKind::CONNECT_REQUEST).take_request();
    let passive = request.unwrap();
    passive.accept(&param(2)).unwrap();
    next(&near, EventKind::CONNECT_RESPONSE);
    let lids = devices.each_ref().map(|device| {
        let context = Arc::new(device.context().unwrap());
        mlx5::DeviceContext::open(&context).unwrap();
        context.query_port(1).unwrap().legacy.lid
    });
    assert_ne!(lids[0], lids[1]);
    let dlid = |id: &Id| id.qp_attr(QpState::RTR).unwrap().0.ah_attr.dlid;
    assert_eq!([dlid(&passive), dlid(&active)], lids);
    let _ = std::fs::remove_dir_all(&directory);
}

/// Its last message is received, though it has ended meanwhile.
#[test]
fn a_process_may_end_after_its_last_message() {
    let _alone = alone();
    let directory = unused_directory();
    let network = Network::joined(Drive::Thread, &directory).unwrap();
    let device = network.device("roce").unwrap();
    let channel = EventChannel::open_on(device.connection_manager()).unwrap();
    let (_listener, at) = listen(&channel, Ipv4Addr::LOCALHOST.into());
    for _ in 0..40 {
        let mut peer = KilledProcess::new(&directory, STAGES.len(), Some(at));
        let request = next(&channel, EventKind::CONNECT_REQUEST).take_request();
        let id = request.unwrap();
        id.accept(&param(2)).unwrap();
        let event = next(&channel, EventKind::REJECTED);
        assert_eq!(event.message().private_data()[..4], *b"last");
        assert!(peer.child.wait().unwrap().success());
    }
    let _ = std::fs::remove_dir_all(&directory);
}

/// A process that has its port no more is asked in vain, and the one that has it now next.
#[test]
fn a_port_moves_to_another_process() {
    let _alone = alone();
    let directory = unused_directory();
    let networks = [(); 3].map(|()| Network::joined(Drive::Thread, &directory).unwrap());
    let devices = networks.map(|network| network.device("roce").unwrap());
    let channels = devices
        .each_ref()
        .map(|device| EventChannel::open_on(device.connection_manager()).unwrap());
    let [near, far, other] = &channels;
    let (listener, at) = listen(far, Ipv4Addr::LOCALHOST.into());
    round(near, far, at);
    drop(listener);
    let refused = ask(near, at);
    let event = next(near, EventKind::REJECTED);
    let reason = event.message().result().unwrap_err();
    let nobody = rdmacm::RejectReason::INVALID_SERVICE_ID;
    assert_eq!(reason, rdmacm::Reason::Rejected(nobody));
    drop((event, refused));
    // The file of an address names a process that does not listen any more.
    let stale = u128::from(u32::from_be_bytes([127, 0, 0, 1])) | 0xffff << 32;
    let name = format!("cm-106-{}-{stale:032x}.lock", at.port());
    std::fs::write(directory.join(name), "1").unwrap();
    let id = other.create_id(PortSpace::TCP).unwrap();
    id.bind(at).unwrap();
    id.listen(0).unwrap();
    round(near, other, at);
    drop(id);
    drop(channels);
    drop(devices);
    let _ = std::fs::remove_dir_all(&directory);
}
