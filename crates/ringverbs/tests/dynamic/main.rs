//! Dynamic connections on the embedded device: one initiator, many targets, and what
//! happens to memory and addresses when either is gone.
#![allow(missing_docs, reason = "a test")]

use std::time::Duration;

use embedded::{Drive, Network};
use ringverbs::dynamic::{DcAddress, DcInitiator, DcTarget};
use ringverbs::qp::LocalAddress;
use ringverbs::{
    AccessFlags, Buffer, Completion, CompletionQueue, Context, Device, Error, Inline, Operation,
    ProtectionDomain, RemoteRegion, SharedReceiveQueue, Status, WorkRequest,
};

const PATIENCE: Duration = Duration::from_secs(30);
const KEY: u64 = 0x1234_5678_9abc;

struct Side {
    cq: CompletionQueue,
    domain: ProtectionDomain,
    local: LocalAddress,
}

impl Side {
    fn new(context: &Context) -> Self {
        Self {
            cq: context.completion_queue().entries(256).build().unwrap(),
            domain: context.alloc_pd().unwrap(),
            local: context.local_address(1).unwrap(),
        }
    }

    fn initiator(&self) -> DcInitiator {
        let builder = self.domain.dc_initiator(&self.cq).inline(64);
        builder.build(&self.local).unwrap()
    }

    fn target(&self, srq: &SharedReceiveQueue) -> DcTarget {
        let rights = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
        let builder = self.domain.dc_target(&self.cq, srq, KEY);
        let builder = builder.access(rights | AccessFlags::REMOTE_ATOMIC);
        builder.build(&self.local).unwrap()
    }

    /// A shared queue with so many receives.
    fn srq(&self, receives: u64) -> SharedReceiveQueue {
        let mut srq = self.domain.shared_receive_queue().build().unwrap();
        for token in 0..receives {
            srq.receive(self.buffer(b""), token).unwrap();
        }
        srq
    }

    fn buffer(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self.domain.alloc(4096).unwrap().into_buffer();
        buffer.copy_from(bytes).unwrap();
        buffer
    }

    /// The address of a peer's target.
    fn address(&self, peer: &Self, target: &DcTarget) -> DcAddress {
        let path = self.domain.address_handle_to(&self.local, &peer.local);
        target.address(path.unwrap()).unwrap()
    }

    fn wait(&mut self) -> Completion {
        let completion = self.cq.poll_for(PATIENCE).unwrap();
        completion.expect("nothing completes")
    }
}

fn two(profile: &str) -> (Side, Side) {
    let network = Network::new(Drive::Thread).unwrap();
    let open = || {
        let device = Device::from(network.device(profile).unwrap());
        Side::new(&device.open().unwrap())
    };
    (open(), open())
}

#[test]
fn one_initiator_reaches_many_targets() {
    for profile in ["ib", "roce"] {
        let (mut a, mut b) = two(profile);
        let srq = b.srq(40);
        let targets: Vec<_> = (0..8).map(|_| b.target(&srq)).collect();
        let mut initiator = a.initiator();
        let addresses: Vec<_> = targets.iter().map(|it| a.address(&b, it)).collect();
        for (token, address) in (0..).zip(addresses.iter().cycle().take(32)) {
            let text = format!("message {token}");
            let request = WorkRequest::send(a.buffer(text.as_bytes()));
            let request = request.token(token).immediate(token as u32);
            initiator.post(request, address).unwrap();
            let mut sent = a.wait();
            assert_eq!((sent.token, sent.status()), (token, Status::SUCCESS));
            assert_eq!(sent.take_buffer().unwrap()[..], *text.as_bytes());
            let mut received = b.wait();
            let success = received.result.unwrap();
            assert_eq!(received.operation, Operation::Receive);
            assert_eq!(success.immediate(), Some(token as u32));
            assert_eq!(received.take_buffer().unwrap()[..], *text.as_bytes());
        }
        assert_eq!((initiator.in_flight(), srq.in_flight()), (0, 8));
    }
}

#[test]
fn memory_is_written_read_and_changed_atomically() {
    let (mut a, b) = two("roce");
    let srq = b.srq(1);
    let target = b.target(&srq);
    let address = a.address(&b, &target);
    let mut initiator = a.initiator();
    let rights = AccessFlags::LOCAL_WRITE
        | AccessFlags::REMOTE_WRITE
        | AccessFlags::REMOTE_READ
        | AccessFlags::REMOTE_ATOMIC;
    let region = RemoteRegion::alloc(&b.domain, 4096, rights).unwrap();
    let there = region.remote().key();
    let posted = initiator.batch(|batch| {
        let write = WorkRequest::write(Inline(b"12345678"), there);
        batch.post(write.unsignaled(), &address)?;
        batch.post(
            WorkRequest::write(Inline(b"abc"), there.offset(8)),
            &address,
        )
    });
    posted.map_err(Error::from).unwrap();
    a.wait().result.unwrap();
    let mut into = a.buffer(b"");
    into.set_len(11).unwrap();
    let read = WorkRequest::read(into, there);
    initiator.post(read.token(2), &address).unwrap();
    assert_eq!(a.wait().take_buffer().unwrap()[..], *b"12345678abc");
    region.store_u64(64, 40).unwrap();
    let mut old = a.buffer(b"");
    old.set_len(8).unwrap();
    let add = WorkRequest::fetch_add(old, there.offset(64), 2);
    initiator.post(add, &address).unwrap();
    let old = a.wait().take_buffer().unwrap();
    assert_eq!(u64::from_ne_bytes(old[..].try_into().unwrap()), 40);
    assert_eq!(region.load_u64(64).unwrap(), 42);
}

#[test]
fn wrong_addresses_are_refused_or_fail() {
    let (mut a, b) = two("roce");
    let srq = b.srq(4);
    let target = b.target(&srq);
    let path = a.domain.address_handle_to(&a.local, &b.local).unwrap();
    let error = DcAddress::new(path.clone(), 1 << 24, KEY).unwrap_err();
    assert!(matches!(error, Error::Limit { .. }), "{error}");
    let good = target.address(path.clone()).unwrap();
    assert!(!format!("{good:?} {target:?}").contains(&format!("{KEY}")));
    let mut initiator = a.initiator();
    // Addresses of another domain, and of a datagram.
    let other = a.domain.context().alloc_pd().unwrap();
    let foreign = other.address_handle_to(&a.local, &b.local).unwrap();
    let foreign = target.address(foreign).unwrap();
    let text = || WorkRequest::send(Inline(b"text"));
    let error = initiator.post(text(), &foreign).unwrap_err().error;
    assert!(matches!(error, Error::WrongDomain { .. }), "{error}");
    let datagram = text().to(&path, 1, 2);
    let error = initiator.post(datagram, &good).unwrap_err().error;
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    let invalidate = WorkRequest::local_invalidate(1);
    let error = initiator.post(invalidate, &good).unwrap_err().error;
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    assert_eq!(initiator.in_flight(), 0);
    // A wrong key, then what follows it.
    let wrong = DcAddress::new(path, target.number(), KEY ^ 1).unwrap();
    let buffer = a.buffer(b"for nobody");
    initiator
        .post(WorkRequest::send(buffer).token(1), &wrong)
        .unwrap();
    initiator.post(text().token(2), &good).unwrap();
    let mut failed = a.wait();
    assert_eq!(failed.token, 1);
    assert!(!failed.status().is_success());
    assert_eq!(failed.take_buffer().unwrap()[..], *b"for nobody");
    let flushed = a.wait();
    assert_eq!((flushed.token, flushed.status()), (2, Status::WR_FLUSH_ERR));
    assert_eq!(srq.in_flight(), 4);
}

#[test]
fn addresses_and_memory_in_flight_outlive_their_handles() {
    let (mut a, b) = two("roce");
    let srq = b.srq(2);
    let target = b.target(&srq);
    let address = a.address(&b, &target);
    let mut initiator = a.initiator();
    // A send to a target that was destroyed fails.
    drop(target);
    let send = WorkRequest::send(a.buffer(b"late"));
    initiator.post(send.token(7), &address).unwrap();
    drop(address);
    let done = a.wait();
    assert_eq!(done.token, 7);
    assert!(!done.status().is_success());
    // Dropped with something in flight.
    let target = b.target(&srq);
    let address = a.address(&b, &target);
    let mut initiator = a.initiator();
    for token in 0..8 {
        let send = WorkRequest::send(a.buffer(b"more than there are receives"));
        initiator.post(send.token(token), &address).unwrap();
    }
    drop((initiator, address));
    drop(target);
    drop(srq);
    assert!(a.cq.poll_for(Duration::from_millis(20)).unwrap().is_none());
}

#[test]
fn refused_closes_report_the_users() {
    let (a, b) = two("ib");
    let srq = b.srq(1);
    let target = b.target(&srq);
    let refused = srq.close().unwrap_err();
    assert!(matches!(refused.error, Error::Busy { .. }), "{refused}");
    a.initiator().close().unwrap();
    target.close().unwrap();
    refused.into_object().close().unwrap();
    // As many as there may be.
    let initiators: Vec<_> = (0..64).map(|_| a.initiator()).collect();
    let first = initiators[0].qp_num();
    assert!(initiators[1..].iter().all(|it| it.qp_num() != first));
}
