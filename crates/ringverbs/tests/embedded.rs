//! On the ConnectX in this process: what an example does, and two devices.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use embedded::{Drive, Network};
use ringverbs::{
    Advice, AdviseFlags, CompletionQueue, Context, Device, Gid, Inline, ProtectionDomain,
    QueuePair, Region, Transport, WorkRequest, qp::Membership,
};

/// A message from one context to another, and what came of it.
fn send(from: &Context, to: &Context, text: &[u8]) -> Vec<u8> {
    let (near, far) = (from.alloc_pd().unwrap(), to.alloc_pd().unwrap());
    let mut sent = from.completion_queue().entries(16).build().unwrap();
    let mut arrived = to.completion_queue().entries(16).build().unwrap();
    let sender = near.queue_pair(Transport::Reliable, &sent).build();
    let receiver = far.queue_pair(Transport::Reliable, &arrived).build();
    let (mut sender, mut receiver) = (sender.unwrap(), receiver.unwrap());
    let (here, there) = (from.local_address(1).unwrap(), to.local_address(1).unwrap());
    let (a, b) = (sender.endpoint(&here), receiver.endpoint(&there));
    sender.connect(&here, &b).unwrap();
    receiver.connect(&there, &a).unwrap();
    let mut outgoing = near.alloc(4096).unwrap().into_buffer();
    outgoing.copy_from(text).unwrap();
    // The device maps these pages when it writes to them.
    let incoming = Region::alloc_on_demand(&far, 8192).unwrap();
    far.advise(Advice::PREFETCH_WRITE, AdviseFlags::FLUSH, &[&incoming])
        .unwrap();
    receiver.receive(incoming.into_buffer(), 1).unwrap();
    sender.send(outgoing, 2).unwrap();
    let done = sent.poll_until_one().unwrap();
    assert_eq!(done.token, 2);
    done.result.unwrap();
    let mut done = arrived.poll_until_one().unwrap();
    assert_eq!(done.token, 1);
    done.result.as_ref().unwrap();
    done.take_buffer().unwrap().to_vec()
}

#[test]
fn message_passes_through_the_embedded_device() {
    let device = Device::embedded().unwrap();
    assert_eq!(device, Device::named("embedded").unwrap());
    let (a, b) = (device.open().unwrap(), device.open().unwrap());
    assert_eq!(&send(&a, &b, b"one device, two contexts")[..3], b"one");
    assert_eq!(&send(&a, &a, b"itself")[..6], b"itself");
}

#[test]
fn devices_of_a_network_reach_each_other() {
    for profile in ["ib", "roce"] {
        let network = Network::new(Drive::Thread).unwrap();
        let open = || {
            let device = Device::from(network.device(profile).unwrap());
            device.open().unwrap()
        };
        let (a, b) = (open(), open());
        assert_eq!(&send(&a, &b, b"over there")[..10], b"over there");
    }
}

#[test]
fn a_wait_ends_with_its_time() {
    let context = Device::embedded().unwrap().open().unwrap();
    let channel = context.completion_channel().unwrap();
    let nothing = channel.wait(Some(Duration::from_millis(20))).unwrap();
    assert_eq!(nothing, None);
}

#[test]
fn drive_by_thread_and_by_caller_can_be_queried() {
    let device = Device::embedded().unwrap();
    assert_eq!(device.name(), "embedded");
    let context = device.inspect().unwrap();
    assert_eq!(context.num_comp_vectors(), 4);
    assert_eq!(context.query_port(1).unwrap().legacy.state, 4);
    // 100 Gbit/s.
    assert_eq!(context.query_port_speed(1).unwrap(), 1000);
    let no_port = context.query_port_speed(2).unwrap_err();
    assert_eq!(no_port.errno(), libc::EINVAL);
}

#[test]
fn shared_directory_requires_the_shared_name() {
    let directory = format!("ringverbs-shared-{}", std::process::id());
    let directory = std::env::temp_dir().join(directory);
    std::fs::create_dir(&directory).unwrap();
    std::fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
    let at = |how: &str| Device::named(&format!("{how}:{}", directory.display()));
    let refused = at("embedded").unwrap_err().to_string();
    assert!(refused.contains("other users may write"), "{refused}");
    let device = at("embedded-shared").unwrap();
    assert_eq!(at("embedded-shared").unwrap(), device);
    assert!(device.is_embedded() && directory.join("0.socket").exists());
    std::fs::remove_dir_all(&directory).unwrap();
}

/// The error says what is wrong with a directory.
#[test]
fn a_directory_that_cannot_be_used_is_explained() {
    let directory = std::env::temp_dir().join(format!("ringverbs-bad-{}", std::process::id()));
    std::fs::create_dir(&directory).unwrap();
    let file = directory.join("file");
    std::fs::write(&file, "").unwrap();
    let long = directory.join("a".repeat(300));
    for (path, reason) in [
        (directory.join("missing/one"), "nor its parent exists"),
        (file.clone(), "is not a directory"),
        (file.join("below"), "is not a directory"),
        (long, "too long"),
        (std::path::PathBuf::new(), "directory is empty"),
    ] {
        let error = Device::embedded_at(&path).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(reason), "{text}");
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

/// Processes that mean different directories learn it from the queue pair's
/// connection, not from a time-out.
#[test]
fn a_peer_on_another_network_is_refused() {
    let open = || {
        let network = Network::new(Drive::Thread).unwrap();
        let device = Device::from(network.device("roce").unwrap());
        device.open().unwrap()
    };
    let (a, b) = (open(), open());
    let (near, far) = (a.alloc_pd().unwrap(), b.alloc_pd().unwrap());
    let (here, there) = (a.local_address(1).unwrap(), b.local_address(1).unwrap());
    let (sent, arrived) = (
        a.completion_queue().build().unwrap(),
        b.completion_queue().build().unwrap(),
    );
    let mut qp = near.queue_pair(Transport::Reliable, &sent).build().unwrap();
    let peer = far.queue_pair(Transport::Reliable, &arrived);
    let peer = peer.build().unwrap().endpoint(&there);
    let error = qp.connect(&here, &peer).unwrap_err();
    assert_eq!(error.errno(), libc::EHOSTUNREACH);
    assert!(error.to_string().contains("same directory"), "{error}");
}

const QKEY: u32 = 0x1234;
/// The queue pair number of multicast packets.
const MULTICAST_QPN: u32 = 0xff_ffff;

/// A datagram queue pair.
struct Datagrams {
    context: Context,
    domain: ProtectionDomain,
    cq: CompletionQueue,
    qp: QueuePair,
}

impl Datagrams {
    fn new(context: &Context) -> Self {
        let domain = context.alloc_pd().unwrap();
        let cq = context.completion_queue().entries(32).build().unwrap();
        let mut qp = domain.queue_pair(Transport::Datagram, &cq).build().unwrap();
        let local = context.local_address(1).unwrap();
        qp.activate(&local, QKEY).unwrap();
        let mut datagrams = Self {
            context: context.clone(),
            domain,
            cq,
            qp,
        };
        (0..4).for_each(|_| datagrams.receive());
        datagrams
    }

    fn receive(&mut self) {
        let buffer = self.domain.alloc(100).unwrap().into_buffer();
        self.qp.receive(buffer, 1).unwrap();
    }

    fn join(&mut self, group: Gid) -> Membership {
        self.qp.join(group, 0).unwrap()
    }

    fn send(&mut self, group: Gid, text: &'static [u8]) {
        let local = self.context.local_address(1).unwrap();
        let path = self.domain.address_handle_to(&local, group).unwrap();
        let request = WorkRequest::send(Inline(text)).to(&path, MULTICAST_QPN, QKEY);
        self.qp.post(request.unsignaled()).unwrap();
    }

    /// Returns the next message.
    fn next(&mut self) -> Vec<u8> {
        let done = self.cq.poll_for(Duration::from_secs(60)).unwrap();
        let mut done = done.expect("no datagram has arrived");
        let length = done.result.unwrap().byte_len as usize;
        self.receive();
        done.take_buffer().unwrap()[40..length].to_vec()
    }
}

/// Each member gets each message once: on the sender's device, on another host, and in two
/// processes (here: networks) that share an address.
#[test]
fn multicast_reaches_every_member_once() {
    let open = |address| {
        let network = Network::roce(Drive::Thread, address).unwrap();
        let device = Device::from(network.device("roce").unwrap());
        device.open().unwrap()
    };
    let (near, far, other) = (open("127.53.0.1"), open("127.53.0.2"), open("127.53.0.2"));
    let mut members = [&near, &near, &far, &far, &other].map(Datagrams::new);
    for address in ["239.1.2.3", "239.1.2.4"] {
        let group: Gid = format!("::ffff:{address}").parse().unwrap();
        let mut memberships = members.each_mut().map(|it| Some(it.join(group)));
        members[0].send(group, b"one");
        assert_eq!(members.each_mut().map(Datagrams::next), [b"one"; 5]);
        members[4].send(group, b"two");
        assert_eq!(members.each_mut().map(Datagrams::next), [b"two"; 5]);
        // The other queue pair of its device is still a member, as is the other process.
        memberships[2] = None;
        memberships[4] = None;
        members[1].send(group, b"three");
        for number in [0, 1, 3] {
            assert_eq!(members[number].next(), b"three");
        }
        let _again = [2, 4].map(|number| members[number].join(group));
        members[2].send(group, b"four");
        assert_eq!(members.each_mut().map(Datagrams::next), [b"four"; 5]);
    }
    let wrong = members[0].qp.join("fe80::1".parse().unwrap(), 0);
    assert!(wrong.is_err(), "{wrong:?}");
}

/// The device tells why a work request failed, at both ends, and why a command was refused.
#[test]
fn failures_are_explained() {
    let network = Network::new(Drive::Thread).unwrap();
    let open = || {
        Device::from(network.device("roce").unwrap())
            .open()
            .unwrap()
    };
    let (a, b) = (open(), open());
    let (near, far) = (a.alloc_pd().unwrap(), b.alloc_pd().unwrap());
    let mut sent = a.completion_queue().entries(16).build().unwrap();
    let mut arrived = b.completion_queue().entries(16).build().unwrap();
    let sender = near.queue_pair(Transport::Reliable, &sent).build();
    let receiver = far.queue_pair(Transport::Reliable, &arrived).build();
    let (mut sender, mut receiver) = (sender.unwrap(), receiver.unwrap());
    let (here, there) = (a.local_address(1).unwrap(), b.local_address(1).unwrap());
    let (x, y) = (sender.endpoint(&here), receiver.endpoint(&there));
    sender.connect(&here, &y).unwrap();
    receiver.connect(&there, &x).unwrap();
    assert_eq!((sender.explanation(), receiver.explanation()), (None, None));
    let short = far.alloc(4096).unwrap().into_buffer();
    receiver.receive(short, 1).unwrap();
    sender
        .send(near.alloc(8192).unwrap().into_buffer(), 2)
        .unwrap();
    let failed = sent.poll_until_one().unwrap();
    failed.result.unwrap_err();
    let refused = arrived.poll_until_one().unwrap();
    refused.result.unwrap_err();
    let reason = failed.explanation(&a).unwrap();
    assert_eq!(Some(&reason), a.explanation(failed.qp_num).as_ref());
    let begin = "work request failed: the peer refused it: invalid request; the other end: queue \
                 pair 0x";
    assert!(reason.starts_with(begin), "{reason}");
    let expected = "does not fit into the receive of 4096";
    assert!(reason.contains(expected), "{reason}");
    let reason = receiver.explanation().unwrap();
    assert!(
        reason.starts_with("request of the peer refused: "),
        "{reason}"
    );
    assert!(reason.contains(expected), "{reason}");
    let error = b.query_port(9).unwrap_err();
    let reason = "Invalid argument (os error 22): port_num 0x9 ";
    assert!(error.to_string().contains(reason), "{error}");
}
