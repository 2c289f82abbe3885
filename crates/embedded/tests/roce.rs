//! RoCE v2 over UDP between addresses of the loopback interface. The networks share nothing
//! else, as two hosts.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use device_testing::embedded::driver::*;
use ringverbs_embedded::roce::pcap::Capture;
use ringverbs_embedded::{Drive, Embedded, Network};
use uverbs::QpType;

const PORT: u16 = 4791;

fn device(address: &str) -> Embedded {
    let network = Network::roce(Drive::Watch, address).unwrap();
    network.strict_device("roce").unwrap()
}

fn bytes(seed: usize, count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 7 + seed * 31) as u8).collect()
}

/// Sends messages of several packets and, over RC, uses remote memory.
fn exchange(kind: QpType, (a, b): (&Host, &Host), size: usize) {
    let (mut cqa, mut cqb) = (a.cq(64), b.cq(64));
    let (mut qa, mut qb) = (a.qp(kind, &mut cqa), b.qp(kind, &mut cqb));
    connect_pair(kind, (&qa, a), (&qb, b));
    let (from, to) = (a.memory(size), b.memory(size));
    for round in 0..10 {
        let data = bytes(round, size);
        from.set(0, &data);
        receive(&mut qb, round as u64, to.sge(0, size));
        post(&mut qa, round as u64, Operation::Send, from.sge(0, size));
        let (sent, received) = (wait(&mut cqa), wait(&mut cqb));
        assert_eq!((sent.status, sent.wr_id), (0, round as u64));
        assert_eq!((received.status, received.wr_id), (0, round as u64));
        assert_eq!(to.get(0, size), data);
    }
    if kind != QpType::RC {
        return;
    }
    let back = a.memory(size);
    post(&mut qa, 1, Operation::Read(&to, 0), back.sge(0, size));
    assert_eq!(wait(&mut cqa).status, 0);
    assert_eq!(back.get(0, size), bytes(9, size));
    from.set(0, &bytes(77, size));
    post(&mut qa, 2, Operation::Write(&to, 0), from.sge(0, size));
    assert_eq!(wait(&mut cqa).status, 0);
    assert_eq!(to.get(0, size), bytes(77, size));
    to.set(0, &40u64.to_ne_bytes());
    post(&mut qa, 3, Operation::Add(&to, 2), back.sge(0, 8));
    assert_eq!(wait(&mut cqa).status, 0);
    assert_eq!(to.get(0, 8), 42u64.to_ne_bytes());
}

#[test]
fn messages_arrive_at_another_address() {
    let (a, b) = (device("127.42.0.1"), device("127.42.0.2"));
    let (a, b) = (Host::new(&a), Host::new(&b));
    for size in [8, 10_001, 300_000] {
        exchange(QpType::RC, (&a, &b), size);
        exchange(QpType::RC, (&b, &a), size);
    }
    exchange(QpType::UC, (&a, &b), 4096);
    // Two queue pairs of one device.
    exchange(QpType::RC, (&a, &a), 10_001);
    for device in [&a, &b] {
        assert_eq!(device.embedded.complaints(), [""; 0]);
    }
}

#[test]
fn messages_arrive_over_ipv6() {
    // Skipped on a host without IPv6.
    let Ok(network) = Network::roce(Drive::Watch, "::1") else {
        return testing::skip!("::1 is not an address of this host, or its port 4791 is in use");
    };
    let a = Host::new(&network.device("roce").unwrap());
    exchange(QpType::RC, (&a, &a), 10_001);
}

/// What a capture is written to.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Packets have no Ethernet headers, which nobody would have sent.
#[test]
fn captured_packets_start_at_ip() {
    let network = Network::roce(Drive::Watch, "127.42.0.3").unwrap();
    let captured = Shared::default();
    let capture = Capture::new(captured.clone()).unwrap();
    network.fabric().capture(Some(capture));
    let a = Host::new(&network.strict_device("roce").unwrap());
    let b = Host::new(&device("127.42.0.4"));
    exchange(QpType::RC, (&a, &b), 10_001);
    exchange(QpType::UC, (&a, &b), 10_001);
    exchange(QpType::RC, (&a, &a), 10_001);
    network.fabric().capture(None);
    let captured = captured.0.lock().unwrap();
    let (mut rest, mut packets) = (&captured[..], 0);
    let word = |bytes: &[u8], at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());
    while !rest.is_empty() {
        let (block, after) = rest.split_at(word(rest, 4) as usize);
        rest = after;
        // An Enhanced Packet Block: its interface, and its first byte.
        if word(block, 0) == 6 {
            assert_eq!((word(block, 8), block[28]), (2, 0x45));
            packets += 1;
        }
    }
    assert!(packets > 100, "{packets}");
}

/// Arbitrary datagrams from a host that is not a peer.
#[test]
fn malformed_datagrams_are_ignored() {
    let (a, b) = (device("127.43.0.1"), device("127.43.0.2"));
    let (a, b) = (Host::new(&a), Host::new(&b));
    let peer = UdpSocket::bind("127.43.0.3:0").unwrap();
    let to: IpAddr = "127.43.0.2".parse().unwrap();
    let longest = vec![1; 60_000];
    let datagrams = [&[][..], &[4], &[0; 15], &[0; 16], &[0xff; 4310], &longest];
    for datagram in datagrams.into_iter().cycle().take(600) {
        let _ = peer.send_to(datagram, (to, PORT));
    }
    exchange(QpType::RC, (&a, &b), 10_001);
}

#[test]
fn a_missing_peer_is_reported() {
    let a = Host::new(&device("127.44.0.1"));
    let mut path = a.path();
    path.grh.dgid[15] = 9;
    let mut cq = a.cq(16);
    let mut qp = a.qp(QpType::RC, &mut cq);
    connect(&qp, QpType::RC, 0x41, path);
    let from = a.memory(64);
    post(&mut qp, 9, Operation::Send, from.sge(0, 64));
    let failed = wait(&mut cq);
    // IBV_WC_RETRY_EXC_ERR
    assert_eq!((failed.wr_id, failed.status), (9, 12));
}

#[test]
fn a_network_has_one_device() {
    let network = Network::roce(Drive::Watch, "127.45.0.1").unwrap();
    assert!(network.device("ib").is_err());
    let _device = network.device("roce").unwrap();
    assert!(network.device("roce").is_err());
}

/// Devices that share nothing but the address, as those of several processes.
#[test]
fn an_address_is_shared() {
    let devices: Vec<Host> = (0..3).map(|_| Host::new(&device("127.45.0.2"))).collect();
    let far = Host::new(&device("127.45.0.3"));
    for one in &devices {
        exchange(QpType::RC, (one, &far), 20_000);
        exchange(QpType::RC, (&far, one), 20_000);
    }
    // Between members of the same address.
    exchange(QpType::RC, (&devices[0], &devices[1]), 20_000);
    exchange(QpType::UC, (&devices[2], &devices[1]), 4096);
    exchange(QpType::RC, (&devices[2], &devices[2]), 20_000);
    // The remaining members take over the received packets of those that ended.
    let mut devices = devices;
    devices.remove(1);
    exchange(QpType::RC, (&far, &devices[0]), 300_000);
    exchange(QpType::RC, (&far, &devices[1]), 300_000);
    for device in devices.iter().chain([&far]) {
        assert_eq!(device.embedded.complaints(), [""; 0]);
    }
}

/// Over UC, a lost packet loses the message.
#[test]
fn processes_of_an_address_lose_no_packet() {
    const SIZE: usize = 1 << 20;
    let [a, b] = [(); 2].map(|()| Host::new(&device("127.45.0.4")));
    let (mut cqa, mut cqb) = (a.cq(64), b.cq(64));
    let (mut qa, qb) = (a.qp(QpType::UC, &mut cqa), b.qp(QpType::UC, &mut cqb));
    connect_pair(QpType::UC, (&qa, &a), (&qb, &b));
    let (from, to) = (a.memory(SIZE), b.memory(SIZE));
    for round in 0..20 {
        let last = bytes(round + 1, 8);
        from.set(SIZE - 8, &last);
        post(&mut qa, 1, Operation::Write(&to, 0), from.sge(0, SIZE));
        assert_eq!(poll(&a, &mut cqa).status, 0);
        let end = Instant::now() + Duration::from_secs(5);
        while to.get(SIZE - 8, 8) != last {
            assert!(Instant::now() < end, "round {round}");
            thread::yield_now();
        }
    }
}

/// The requester learns why its message is refused, not only that there is no answer.
#[test]
fn a_refusal_reaches_a_process_of_the_address() {
    const SIZE: usize = 1 << 20;
    let [a, b] = [(); 2].map(|()| Host::new(&device("127.45.0.5")));
    let (from, to) = (a.memory(SIZE), b.memory(64));
    for round in 0..100 {
        let (mut cqa, mut cqb) = (a.cq(64), b.cq(64));
        let mut qa = a.qp(QpType::RC, &mut cqa);
        let mut qb = b.qp(QpType::RC, &mut cqb);
        connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
        receive(&mut qb, 1, to.sge(0, 64));
        post(&mut qa, 1, Operation::Send, from.sge(0, SIZE));
        // IBV_WC_REM_INV_REQ_ERR
        assert_eq!(poll(&a, &mut cqa).status, 9, "round {round}");
    }
}

const QPN: &str = "RINGVERBS_TEST_QPN";

/// The process of [`a_refusal_leaves_a_process_that_ends`].
#[test]
#[ignore = "run by another test"]
fn refusing_process() {
    let peer = std::env::var(QPN).expect("run by another test");
    let host = Host::new(&device("127.45.0.7"));
    let mut cq = host.cq(64);
    let mut qp = host.qp(QpType::RC, &mut cq);
    connect(&qp, QpType::RC, peer.parse().unwrap(), host.path());
    let to = host.memory(64);
    receive(&mut qp, 1, to.sge(0, 64));
    println!("\nqpn {}", qp.object.qp_num());
    // IBV_WC_LOC_LEN_ERR
    assert_eq!(poll(&host, &mut cq).status, 1);
    std::process::exit(0);
}

/// As soon as the responder knows of its error, it ends.
#[test]
fn a_refusal_leaves_a_process_that_ends() {
    const SIZE: usize = 1 << 18;
    let a = Host::new(&device("127.45.0.7"));
    let from = a.memory(SIZE);
    for round in 0..20 {
        let mut cq = a.cq(64);
        let mut qp = a.qp(QpType::RC, &mut cq);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["refusing_process", "--exact", "--ignored", "--nocapture"])
            .env(QPN, qp.object.qp_num().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let number = lines.find_map(|line| Some(line.unwrap().strip_prefix("qpn ")?.to_owned()));
        connect(&qp, QpType::RC, number.unwrap().parse().unwrap(), a.path());
        post(&mut qp, 1, Operation::Send, from.sge(0, SIZE));
        // IBV_WC_REM_INV_REQ_ERR
        assert_eq!(poll(&a, &mut cq).status, 9, "round {round}");
        assert!(child.wait().unwrap().success());
    }
}

/// A process that does not run delays others for a short time only.
#[test]
fn a_stopped_process_of_an_address_delays_no_other() {
    const SIZE: usize = 1 << 20;
    let [a, b] = [(); 2].map(|()| Host::new(&device("127.45.0.6")));
    let network = Network::roce(Drive::Caller, "127.45.0.6").unwrap();
    let stopped = Host::new(&network.strict_device("roce").unwrap());
    let (mut cqa, mut cqs) = (a.cq(64), stopped.cq(64));
    let mut qa = a.qp(QpType::UC, &mut cqa);
    let qs = stopped.qp(QpType::UC, &mut cqs);
    connect_pair(QpType::UC, (&qa, &a), (&qs, &stopped));
    let (from, to) = (a.memory(SIZE), stopped.memory(SIZE));
    for _ in 0..16 {
        post(&mut qa, 1, Operation::Write(&to, 0), from.sge(0, SIZE));
    }
    exchange(QpType::RC, (&a, &b), 300_000);
    for _ in 0..16 {
        assert_eq!(poll(&a, &mut cqa).status, 0);
    }
}

/// Receives a datagram; returns its length and the type of service.
fn receive_from(socket: &UdpSocket) -> (usize, Option<u8>) {
    let (mut bytes, mut control) = ([0u8; 4096], [0u64; 16]);
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    // SAFETY: zero is a value of each field.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the header names two buffers with their lengths.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, 0) };
    // SAFETY: the system has filled the header in, and the control buffer.
    let found = unsafe { libc::CMSG_FIRSTHDR(&raw const header).as_ref() };
    let found =
        found.filter(|it| (it.cmsg_level, it.cmsg_type) == (libc::IPPROTO_IP, libc::IP_TOS));
    // SAFETY: a message of this type has at least a byte.
    let class = found.map(|it| unsafe { *libc::CMSG_DATA(it) });
    (length.try_into().unwrap(), class)
}

#[test]
fn the_traffic_class_is_that_of_the_path() {
    let there = UdpSocket::bind(("127.52.0.9", PORT)).unwrap();
    let on: libc::c_int = 1;
    // SAFETY: the value is an int, and readable.
    let set = unsafe {
        libc::setsockopt(
            there.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_RECVTOS,
            (&raw const on).cast(),
            size_of_val(&on) as _,
        )
    };
    assert_eq!(set, 0);
    let a = Host::new(&device("127.52.0.1"));
    // Expedited forwarding; the device responds to congestion marks, and sets the ECN bits.
    for (class, sent) in [(0xb8, 0xba), (0xba, 0xba), (0xb9, 0xb9)] {
        let mut path = a.path();
        path.grh.dgid[15] = 9;
        path.grh.traffic_class = class;
        let mut cq = a.cq(16);
        let mut qp = a.qp(QpType::UC, &mut cq);
        connect(&qp, QpType::UC, 0x41, path);
        let from = a.memory(64);
        post(&mut qp, 9, Operation::Send, from.sge(0, 64));
        assert_eq!(wait(&mut cq).status, 0);
        // BTH, payload, ICRC.
        assert_eq!(receive_from(&there), (12 + 64 + 4, Some(sent)));
    }
}
