//! What connections by address cost: time, threads and descriptors of a process.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use rdmacm::{ConnParam, Event, EventChannel, EventKind, Id, PortSpace};
use ringverbs_embedded::{Drive, Embedded, Network};

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
                let name = format!("ringverbs-connections-{}", std::process::id());
                let path = directory.insert(std::env::temp_dir().join(name));
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

fn ask(channel: &EventChannel, to: SocketAddr) -> Id {
    let id = channel.create_id(PortSpace::TCP).unwrap();
    id.resolve_address(None, to, TIMEOUT).unwrap();
    next(channel, EventKind::ADDR_RESOLVED);
    id.resolve_route(TIMEOUT).unwrap();
    next(channel, EventKind::ROUTE_RESOLVED);
    id.connect(&param(1)).unwrap();
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

fn count(what: &str) -> usize {
    std::fs::read_dir(format!("/proc/self/{what}"))
        .unwrap()
        .count()
}

fn alone() -> std::sync::MutexGuard<'static, ()> {
    ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Prints connections per second, in turn by one thread.
#[test]
#[ignore = "a measurement"]
fn rate() {
    let _alone = alone();
    for topology in ALL {
        let pair = Pair::new(topology, Drive::Thread);
        let [near, far] = pair.channels();
        let (_listener, at) = listen(&far, pair.address);
        let begin = Instant::now();
        let mut rounds = 0;
        while begin.elapsed() < Duration::from_secs(2) {
            round(&near, &far, at);
            rounds += 1;
        }
        let rate = f64::from(rounds) / begin.elapsed().as_secs_f64();
        println!(
            "{topology:?}: {rate:.0} connections per second; {} threads, {} descriptors",
            count("task"),
            count("fd"),
        );
    }
}

/// Prints descriptors for each of 100 connections, requests, listeners.
#[test]
#[ignore = "a measurement"]
fn descriptors() {
    let _alone = alone();
    for topology in ALL {
        let pair = Pair::new(topology, Drive::Thread);
        let [near, far] = pair.channels();
        let before = count("fd");
        let (_listener, at) = listen(&far, pair.address);
        let listening = count("fd");
        round(&near, &far, at);
        let once = count("fd");
        let asked: Vec<Id> = (0..100).map(|_| ask(&near, at)).collect();
        thread::sleep(Duration::from_millis(100));
        let unread = count("fd");
        let mut passive = Vec::new();
        for _ in &asked {
            let id = next(&far, EventKind::CONNECT_REQUEST).take_request();
            let id = id.unwrap();
            id.accept(&param(2)).unwrap();
            passive.push(id);
            next(&near, EventKind::CONNECT_RESPONSE);
        }
        asked.iter().for_each(|id| id.establish().unwrap());
        asked
            .iter()
            .for_each(|_| drop(next(&far, EventKind::ESTABLISHED)));
        println!(
            "{topology:?}: listener {}, first connection {}, 100 requests {}, 100 connections {}",
            listening - before,
            once - listening,
            unread as i64 - once as i64,
            count("fd") as i64 - once as i64,
        );
    }
}
