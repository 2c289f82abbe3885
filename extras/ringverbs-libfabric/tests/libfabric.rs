//! The interfaces on a device whose name is in `RXE_DEV`: rdma_rxe in a guest, `libfabric
//! --test-threads=1`. Without the variable it is the ConnectX in this process.
#![allow(missing_docs, reason = "a test")]

use std::time::{Duration, Instant};

use ringverbs::completion::{
    ContextFormat, DataEntry, DataFormat, EntryFlags, ErrorEntry, RawAddress, ReadError,
    TaggedEntry,
};
use ringverbs::{
    AccessFlags, Buffer, CompletionQueue, Context, Device, Error, Inline, LocalAddress, Operation,
    ProtectionDomain, QueuePair, Region, RemoteAddr, Transport, WorkRequest,
};
use ringverbs_libfabric::{
    AddressVector, Counter, CounterError, MultiReceive, Sender, TagMatch, TaggedEndpoint,
};

const QKEY: u32 = 0x1111_1111;

/// What arrives takes milliseconds; the machine may have other things to do.
const PATIENCE: Duration = Duration::from_secs(60);

fn until<T>(mut ready: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(Instant::now() < end, "nothing in {PATIENCE:?}");
    }
}

/// A device with a domain.
struct Bench {
    context: Context,
    domain: ProtectionDomain,
    local: LocalAddress,
}

impl Bench {
    fn new() -> Self {
        let name = std::env::var("RXE_DEV");
        let device = name.map_or_else(|_| Device::embedded(), |name| Device::named(&name));
        Self::on(device.unwrap())
    }

    fn on(device: Device) -> Self {
        let context = device.open().unwrap();
        Self {
            domain: context.alloc_pd().unwrap(),
            local: context.local_address(1).unwrap(),
            context,
        }
    }

    fn queue(&self) -> CompletionQueue {
        let builder = self.context.completion_queue();
        builder.entries(64).build().unwrap()
    }

    fn queue_pair(&self, cq: &CompletionQueue) -> QueuePair {
        let builder = self.domain.queue_pair(Transport::Reliable, cq);
        builder.inline(64).build().unwrap()
    }

    fn pair(&self, a: &CompletionQueue, b: &CompletionQueue) -> (QueuePair, QueuePair) {
        let (mut a, mut b) = (self.queue_pair(a), self.queue_pair(b));
        let (at_a, at_b) = (a.endpoint(&self.local), b.endpoint(&self.local));
        a.connect(&self.local, &at_b).unwrap();
        b.connect(&self.local, &at_a).unwrap();
        (a, b)
    }

    /// Two connected endpoints, of that depth.
    fn tagged(&self, depth: u32) -> (TaggedEndpoint, TaggedEndpoint) {
        let (left, right) = (self.queue(), self.queue());
        let (a, b) = self.pair(&left, &right);
        let end = |qp, cq| TaggedEndpoint::new(qp, cq, depth, 256).unwrap();
        (end(a, left), end(b, right))
    }

    /// A buffer of that capacity: regions are whole pages.
    fn buffer(&self, len: usize) -> Buffer {
        let mut pages = self.domain.alloc(len).unwrap().into_buffer();
        pages.split_to(len)
    }

    fn filled(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self.buffer(bytes.len());
        buffer.copy_from(bytes).unwrap();
        buffer
    }
}

#[allow(
    clippy::result_large_err,
    reason = "an entry, not an error of the test's"
)]
fn take(end: &mut TaggedEndpoint) -> Result<TaggedEntry, ErrorEntry> {
    until(|| end.next_entry().unwrap())
}

/// Sends a message, and waits until it has arrived.
fn send(from: &mut TaggedEndpoint, tag: u64, message: &[u8]) {
    from.send(tag, message, tag).unwrap();
    assert_eq!(take(from).unwrap().token, tag);
}

/// Receives a message that is there, or comes.
fn receive(bench: &Bench, end: &mut TaggedEndpoint, which: TagMatch) -> (u64, Vec<u8>) {
    end.receive(bench.buffer(256), which, 9);
    let entry = take(end).unwrap();
    let bytes = entry.payload.into_buffer().unwrap().to_vec();
    (entry.tag.unwrap(), bytes)
}

#[test]
fn multi_receive_fills_one_buffer() {
    let bench = Bench::new();
    let mut cq = bench.queue();
    let (mut a, mut b) = bench.pair(&cq, &cq);
    let mut multi = MultiReceive::post(&mut b, bench.buffer(1000), 128, 100).unwrap();
    assert_eq!(multi.posted(), 7);
    for number in 0..7u8 {
        a.post(WorkRequest::send(Inline(&[number; 10])).unsignaled())
            .unwrap();
    }
    for seen in 0..7u8 {
        let completion = until(|| cq.poll_one().unwrap());
        assert!(multi.owns(&completion));
        let message = multi.take(completion).unwrap();
        assert_eq!(message.data, [seen; 10]);
        assert_eq!(message.offset, usize::from(seen) * 128);
        let released = message.flags.contains(EntryFlags::MULTI_RECV);
        assert_eq!(released, seen == 6);
    }
    assert_eq!(multi.into_buffer().unwrap().capacity(), 1000);
}

/// Tokens are the caller's: a receive of another queue pair with the same one is
/// not taken for a piece, and the piece still is.
#[test]
fn multi_receive_identifies_pieces_by_address() {
    let bench = Bench::new();
    let mut cq = bench.queue();
    let (mut a, mut b) = bench.pair(&cq, &cq);
    let (mut c, mut d) = bench.pair(&cq, &cq);
    let mut multi = MultiReceive::post(&mut b, bench.buffer(256), 128, 100).unwrap();
    let mut same_region = bench.buffer(384);
    let rest = same_region.split_off(128);
    d.receive(same_region, 100).unwrap();
    let mut other = MultiReceive::post(&mut d, rest, 128, 7).unwrap();
    let (mut mine, mut theirs, mut alone) = (0, 0, 0);
    // The receive with the same token completes first, while all pieces are in flight.
    for qp in [&mut c, &mut a].into_iter().zip([3, 2]) {
        for _ in 0..qp.1 {
            let send = WorkRequest::send(Inline(b"hello"));
            qp.0.post(send.unsignaled()).unwrap();
            let completion = until(|| cq.poll_one().unwrap());
            let completion = match multi.take(completion) {
                Ok(message) => {
                    assert_eq!((message.data, message.offset), (&b"hello"[..], mine * 128));
                    mine += 1;
                    continue;
                }
                Err(completion) => completion,
            };
            match other.take(completion) {
                Ok(message) => {
                    let expected = (&b"hello"[..], theirs * 128);
                    assert_eq!((message.data, message.offset), expected);
                    theirs += 1;
                }
                Err(completion) => {
                    assert_eq!(completion.token, 100);
                    alone += 1;
                }
            }
        }
    }
    assert_eq!((mine, theirs, alone), (2, 2, 1));
    assert_eq!(multi.into_buffer().unwrap().capacity(), 256);
    assert_eq!(other.into_buffer().unwrap().capacity(), 256);
}

/// A buffer with far more pieces than the queue has room for needs no memory for them.
#[test]
fn multi_receive_of_very_many_pieces() {
    let bench = Bench::on(Device::embedded().unwrap());
    let cq = bench.queue();
    let (_a, mut b) = bench.pair(&cq, &cq);
    let Ok(region) = Region::alloc_on_demand(&bench.domain, 1 << 33) else {
        return testing::skip!("the kernel refuses the address space");
    };
    let posted = MultiReceive::post(&mut b, region.into_buffer(), 1, 0).unwrap();
    assert_eq!(posted.posted(), b.capacity().max_recv_wr as usize);
}

#[test]
fn tagged_messages() {
    let bench = Bench::new();
    let (mut a, mut b) = bench.tagged(8);
    // Expected, in the order of the receives; then unexpected, peeked, claimed.
    let masked = TagMatch {
        tag: 0x100,
        ignore: 0xff,
    };
    b.receive(bench.buffer(64), masked, 1);
    b.receive(bench.buffer(64), TagMatch::exact(0x107), 2);
    for (number, message) in [&b"first"[..], b"second", b"third", b"too long"]
        .iter()
        .enumerate()
    {
        a.send(0x107, message, 10 + number as u64).unwrap();
        assert_eq!(take(&mut a).unwrap().token, 10 + number as u64);
    }
    for (token, message) in [(1, &b"first"[..]), (2, b"second")] {
        let entry = take(&mut b).unwrap();
        let expected = (token, Some(0x107), message.len());
        assert_eq!((entry.token, entry.tag, entry.len), expected);
        assert_eq!(entry.flags, EntryFlags::RECV | EntryFlags::TAGGED);
        assert_eq!(&entry.payload.into_buffer().unwrap()[..], message);
    }
    until(|| {
        assert!(b.next_entry().unwrap().is_none());
        b.peek(TagMatch::any())
    });
    assert_eq!(b.peek(TagMatch::any()), Some((0x107, 5)));
    assert_eq!(b.peek(TagMatch::exact(1)), None);
    let claimed = b.claim(masked).unwrap();
    b.receive(bench.buffer(3), TagMatch::any(), 4);
    b.receive_claimed(claimed, bench.buffer(64), 3).unwrap();
    // Either may have been first: "too long" may have come after the claim.
    let both = [take(&mut b), take(&mut b)];
    for entry in both {
        match entry {
            Err(error) => {
                assert_eq!((error.token, error.errno), (4, libc::EMSGSIZE));
                assert_eq!((error.len, error.overflow_len), (Some(3), Some(5)));
            }
            Ok(entry) => {
                assert_eq!(entry.token, 3);
                assert!(entry.flags.contains(EntryFlags::CLAIM));
                assert_eq!(&entry.payload.into_buffer().unwrap()[..], b"third");
            }
        }
    }
    // More than there are buffers for: the rest waits at the sender.
    for number in 0..40u8 {
        while a.send(7, &[number], number.into()).is_err() {
            if a.next_entry().unwrap().is_none() {
                b.next_entry().unwrap();
                if b.peek(TagMatch::any()).is_some() {
                    b.receive(bench.buffer(8), TagMatch::exact(7), 0);
                }
            }
        }
    }
}

#[test]
fn unmatched_messages_keep_their_buffers_unless_spilled() {
    const DEPTH: u32 = 3;
    let bench = Bench::new();
    let (mut a, mut b) = bench.tagged(DEPTH);
    // The number of receives that are posted, after the messages that are there.
    let posted = |end: &mut TaggedEndpoint| {
        assert!(end.next_entry().unwrap().is_none());
        end.queue_pair().in_flight().1
    };
    for tag in 0..DEPTH {
        send(&mut a, tag.into(), b"early");
    }
    // No receive is left: the peer waits.
    until(|| (posted(&mut b) == 0).then_some(()));
    let early = (1, b"early".to_vec());
    assert_eq!(receive(&bench, &mut b, TagMatch::exact(1)), early);
    assert_eq!(posted(&mut b), 1);

    b.set_spill(2);
    for tag in 10..12 {
        send(&mut a, tag, &[tag as u8; 32]);
        until(|| {
            // Copied, and its buffer is posted again.
            assert_eq!(posted(&mut b), 1);
            b.peek(TagMatch::exact(tag))
        });
    }
    send(&mut a, 12, b"one too many");
    until(|| (posted(&mut b) == 0).then_some(()));

    // In the order in which they came, wherever they are.
    assert_eq!(b.peek(TagMatch::exact(11)), Some((11, 32)));
    let claimed = b.claim(TagMatch::exact(11)).unwrap();
    assert_eq!((claimed.tag(), claimed.len()), (11, 32));
    b.discard(claimed).unwrap();
    for (tag, bytes) in [
        (0, &b"early"[..]),
        (2, b"early"),
        (10, &[10; 32]),
        (12, b"one too many"),
    ] {
        let got = receive(&bench, &mut b, TagMatch::any());
        assert_eq!(got, (tag, bytes.to_vec()));
    }
    assert_eq!(posted(&mut b), DEPTH);
    // There is room for two again.
    for tag in 20..22 {
        send(&mut a, tag, b"");
        until(|| {
            assert_eq!(posted(&mut b), DEPTH);
            b.peek(TagMatch::exact(tag))
        });
    }
}

#[test]
fn tagged_endpoint_waits_on_its_channel() {
    let bench = Bench::new();
    let (_, mut without) = bench.tagged(3);
    let refused = without.wait(Some(Duration::ZERO)).unwrap_err();
    assert!(matches!(refused, Error::Invalid { .. }), "{refused}");

    let channel = bench.context.completion_channel().unwrap();
    let left = bench.queue();
    let builder = bench.context.completion_queue().channel(&channel);
    let right = builder.build().unwrap();
    let (qp, peer) = bench.pair(&left, &right);
    let mut a = TaggedEndpoint::new(qp, left, 3, 32).unwrap();
    let mut b = TaggedEndpoint::new(peer, right, 3, 32).unwrap();
    assert!(b.channel().is_some());
    assert!(!b.arm().unwrap());
    send(&mut a, 5, b"x");
    assert!(b.wait(Some(PATIENCE)).unwrap());
    until(|| {
        assert!(b.next_entry().unwrap().is_none());
        b.peek(TagMatch::any())
    });
    // An entry that was made without the device.
    b.receive(bench.buffer(8), TagMatch::any(), 1);
    assert!(b.arm().unwrap());
    assert!(b.wait(None).unwrap());
    assert!(b.next_entry().unwrap().is_some());
}

#[test]
fn message_claimed_by_another_endpoint_is_refused() {
    let bench = Bench::new();
    let (mut a, mut b) = bench.tagged(4);
    b.set_spill(1);
    send(&mut a, 5, b"message");
    let claimed = until(|| {
        assert!(b.next_entry().unwrap().is_none());
        b.claim(TagMatch::any())
    });
    let claimed = a.discard(claimed).unwrap_err();
    let (claimed, _) = a.receive_claimed(claimed, bench.buffer(64), 2).unwrap_err();
    b.discard(claimed).unwrap();
}

/// Another queue pair completes on the endpoint's queue, with the endpoint's
/// tokens: its buffers come back, and are no messages.
#[test]
fn tagged_endpoint_returns_completions_of_other_queue_pairs() {
    let bench = Bench::new();
    let (cq, elsewhere) = (bench.queue(), bench.queue());
    let stray = bench.queue_pair(&elsewhere);
    let Err(refused) = TaggedEndpoint::new(stray, bench.queue(), 4, 64) else {
        panic!("another queue pair's completion queue");
    };
    assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
    let mut qp = bench.queue_pair(&cq);
    let (mut a, mut b) = bench.pair(&cq, &cq);
    let own = qp.endpoint(&bench.local);
    qp.connect(&bench.local, &own).unwrap();
    let mut end = TaggedEndpoint::new(qp, cq, 4, 64).unwrap();
    // What the peer sends has the form of a tagged message.
    let mut message = [0; 20];
    message[8] = 4;
    let buffer = bench.buffer(64);
    let data = bench.filled(&message);
    let mut addresses = [&buffer, &data].map(|buffer| buffer.as_ptr().addr());
    b.receive(buffer, u64::MAX).unwrap();
    a.send(data, 0).unwrap();
    let mut back = [(); 2].map(|()| {
        let entry = take(&mut end).unwrap();
        assert!(entry.tag.is_none(), "{entry:?}");
        entry.payload.into_buffer().unwrap().as_ptr().addr()
    });
    back.sort_unstable();
    addresses.sort_unstable();
    assert_eq!(back, addresses);
    assert_eq!(end.peek(TagMatch::any()), None);
    // The endpoint is what it was: to itself, its own messages.
    for round in 0..8 {
        send(&mut end, round, b"message");
        let got = receive(&bench, &mut end, TagMatch::exact(round));
        assert_eq!(got, (round, b"message".to_vec()));
    }
    // Failures as well.
    a.set_error().unwrap();
    a.send(bench.filled(b"late"), 3).unwrap();
    let failed = take(&mut end).unwrap_err();
    assert_eq!((failed.token, failed.tag), (3, None));
    assert_eq!(&failed.payload.into_buffer().unwrap()[..], b"late");
}

#[test]
fn counters() {
    let bench = Bench::new();
    let other = bench.queue();
    let reader = bench.context.completion_queue().entries(64);
    let mut counter = Counter::new(reader.reader::<ContextFormat>().build().unwrap());
    let (mut a, _b) = bench.pair(counter.queue(), &other);
    let region = bench
        .domain
        .alloc_remote(64, AccessFlags::REMOTE_WRITE)
        .unwrap();
    for token in 0..10 {
        let write = WorkRequest::write(Inline(b"x"), region.key()).token(token);
        let write = match token % 3 {
            0 => write,
            _ => write.unsignaled(),
        };
        a.post(write).unwrap();
    }
    // A wait whose time is up counts once more: only the time tells that it was woken.
    let begin = Instant::now();
    counter.wait(10, Some(PATIENCE)).unwrap();
    assert!(begin.elapsed() < PATIENCE / 4, "{:?}", begin.elapsed());
    assert_eq!((counter.successes(), counter.errors()), (10, 0));
    let more = counter.wait(11, Some(Duration::from_millis(20)));
    assert!(matches!(more, Err(CounterError::Timeout)));
    a.write(Inline(b"x"), RemoteAddr::new(0, 1), 99).unwrap();
    let failed = counter.wait(11, Some(PATIENCE));
    assert!(matches!(failed, Err(CounterError::Failed)));
    assert_eq!((counter.successes(), counter.errors()), (10, 1));
    assert_eq!(counter.last_error().unwrap().token, 99);
    counter.add(5);
    counter.wait(15, None).unwrap();
    // A signal ends a wait.
    let signaler = counter.signaler();
    std::thread::scope(|scope| {
        scope.spawn(|| signaler.signal());
        let ended = counter.wait(16, Some(PATIENCE));
        assert!(matches!(ended, Err(CounterError::Timeout)));
    });
    assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
}

#[test]
fn source_addresses() {
    let bench = Bench::new();
    let reader = bench.context.completion_queue().entries(64);
    let mut reader = reader.reader::<DataFormat>().build().unwrap();
    let datagram = |cq| {
        let builder = bench.domain.queue_pair(Transport::Datagram, cq);
        let mut qp = builder.inline(64).build().unwrap();
        qp.activate(&bench.local, QKEY).unwrap();
        qp
    };
    let (mut sender, mut receiver) = (datagram(reader.queue()), datagram(reader.queue()));
    let path = bench
        .domain
        .address_handle_to(&bench.local, &bench.local)
        .unwrap();
    let mut peers = AddressVector::<&str>::new().strict();
    let mut out: [(DataEntry, Sender); 4] = Default::default();
    for known in [false, true] {
        receiver.receive(bench.buffer(128), 1).unwrap();
        let send = WorkRequest::send(Inline(b"who")).to(&path, receiver.qp_num(), QKEY);
        sender.post(send.unsignaled()).unwrap();
        let result = until(
            || match reader.read_from(&mut out, |address| peers.sender(address)) {
                Ok(0) => None,
                other => Some(other),
            },
        );
        if known {
            assert_eq!(result.unwrap(), 1);
            let Sender::Peer(peer) = out[0].1 else {
                panic!("{:?}", out[0]);
            };
            assert_eq!(peers.get(peer), Some(&"sender"));
            continue;
        }
        assert!(matches!(result, Err(ReadError::ErrorAvailable)));
        let entry = reader.read_err().unwrap();
        assert_eq!(entry.errno, libc::EADDRNOTAVAIL);
        assert!(
            entry
                .flags
                .contains(EntryFlags::of_operation(Operation::Receive))
        );
        let address = entry.source.unwrap();
        let expected = RawAddress {
            gid: bench.local.gid,
            qp_num: sender.qp_num(),
        };
        assert_eq!(address, expected);
        peers.insert(address, "sender");
    }
}
