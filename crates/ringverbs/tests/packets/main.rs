//! Raw packets on the embedded device: between devices of a network, contexts of a
//! device, and queues of a context; and what the owner of frames may do with them.
#![allow(missing_docs, reason = "a test")]

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::{Duration, Instant};

use embedded::{Drive, Network};
use ringverbs::packet::{Checksums, FlowMatch, PacketQueueBuilder};
use ringverbs::{Context, Device, Error, Frame, PacketQueue, PoolBuffer};
use testing::{Rng, setting};

const PATIENCE: Duration = Duration::from_secs(30);
/// Long enough for a frame to arrive that would.
const SHORT: Duration = Duration::from_millis(20);
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 8];
const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 1];

fn queue(context: &Context) -> PacketQueue {
    builder(context).build().unwrap()
}

fn builder(context: &Context) -> PacketQueueBuilder {
    context.alloc_pd().unwrap().packet_queue()
}

/// Two contexts, of a device each.
fn two() -> (Context, Context) {
    let network = Network::new(Drive::Thread).unwrap();
    let open = || {
        let device = Device::from(network.device("roce").unwrap());
        device.open().unwrap()
    };
    (open(), open())
}

/// Fills a frame with bytes that depend on its number.
fn fill(frame: &mut [u8], to: [u8; 6], number: u8) {
    for (byte, at) in frame.iter_mut().zip(0u8..=255) {
        *byte = at.wrapping_mul(7).wrapping_add(number);
    }
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 1, 1]);
    frame[12..14].copy_from_slice(&[0x88, 0xb5]);
}

fn made(queue: &mut PacketQueue, len: usize, to: [u8; 6], number: u8) -> PoolBuffer {
    let mut frame = queue.buffer(len).unwrap();
    fill(&mut frame, to, number);
    frame
}

fn send(queue: &mut PacketQueue, len: usize, to: [u8; 6], number: u8) {
    let frame = made(queue, len, to, number);
    queue.send(frame, Checksums::Unchanged).unwrap();
}

fn expect(frame: &Frame, len: usize, to: [u8; 6], number: u8) {
    let mut expected = vec![0; len];
    fill(&mut expected, to, number);
    assert_eq!(**frame, expected[..]);
}

/// Polls both until the second has received `count` frames, or for so long.
fn collect(
    sender: &mut PacketQueue,
    receiver: &mut PacketQueue,
    count: usize,
    time: Duration,
) -> Vec<Frame> {
    let end = Instant::now() + time;
    let mut frames = Vec::new();
    while frames.len() < count && Instant::now() < end {
        sender.poll(drop).unwrap();
        receiver.poll(|frame| frames.push(frame)).unwrap();
    }
    frames
}

fn receive(sender: &mut PacketQueue, receiver: &mut PacketQueue) -> Frame {
    let mut frames = collect(sender, receiver, 1, PATIENCE);
    assert_eq!(frames.len(), 1, "nothing has arrived");
    frames.remove(0)
}

#[test]
fn frames_go_from_device_to_device() {
    let (a, b) = two();
    let (mut sender, mut receiver) = (queue(&a), queue(&b));
    receiver.add_flow(FlowMatch::Destination(MAC)).unwrap();
    for (number, len) in (0..).zip([18, 60, 64, 65, 1000, 1514, 1518]) {
        send(&mut sender, len, MAC, number);
        let frame = receive(&mut sender, &mut receiver);
        expect(&frame, len, MAC, number);
        assert_eq!(frame.timestamp(), None);
        assert!(!frame.checksums_ok(), "it is not IP");
    }
    while sender.in_flight().0 != 0 {
        sender.poll(drop).unwrap();
    }
    assert_eq!(receiver.counters().received, 7);
    assert_eq!(sender.counters().sent, 7);
}

#[test]
fn vlan_tags_stay_in_frames() {
    let (a, b) = two();
    let (mut sender, mut receiver) = (queue(&a), queue(&b));
    receiver.add_flow(FlowMatch::Destination(MAC)).unwrap();
    let mut frame = made(&mut sender, 100, MAC, 1);
    frame[12..16].copy_from_slice(&[0x81, 0, 0, 5]);
    let expected = frame.to_vec();
    sender.send(frame, Checksums::Unchanged).unwrap();
    assert_eq!(*receive(&mut sender, &mut receiver), expected[..]);
}

#[test]
fn own_frames_are_received_only_on_request() {
    let device = Device::embedded().unwrap();
    let (a, b) = (device.open().unwrap(), device.open().unwrap());
    let (mut sender, mut receiver) = (queue(&a), queue(&b));
    let mut deaf = queue(&a);
    let mut own = builder(&a).own_frames().build().unwrap();
    for queue in [&mut receiver, &mut deaf, &mut own] {
        queue.add_flow(FlowMatch::Destination(MAC)).unwrap();
    }
    send(&mut sender, 100, MAC, 1);
    expect(&receive(&mut sender, &mut receiver), 100, MAC, 1);
    expect(&receive(&mut sender, &mut own), 100, MAC, 1);
    assert!(collect(&mut sender, &mut deaf, 1, SHORT).is_empty());
}

#[test]
fn flows_select_frames() {
    let (a, b) = two();
    let mut sender = queue(&a);
    let (mut one, mut rest, mut groups) = (queue(&b), queue(&b), queue(&b));
    send(&mut sender, 60, MAC, 0);
    assert!(
        collect(&mut sender, &mut one, 1, SHORT).is_empty(),
        "no flow"
    );
    one.add_flow(FlowMatch::Destination(MAC)).unwrap();
    rest.add_flow(FlowMatch::All).unwrap();
    groups.add_flow(FlowMatch::AllMulticast).unwrap();
    let twice = one.add_flow(FlowMatch::Destination(MAC)).unwrap_err();
    assert!(matches!(twice, Error::Invalid { .. }), "{twice}");
    send(&mut sender, 60, MAC, 1);
    expect(&receive(&mut sender, &mut one), 60, MAC, 1);
    send(&mut sender, 60, OTHER, 2);
    expect(&receive(&mut sender, &mut rest), 60, OTHER, 2);
    send(&mut sender, 60, GROUP, 3);
    expect(&receive(&mut sender, &mut groups), 60, GROUP, 3);
    assert!(one.remove_flow(FlowMatch::Destination(MAC)).unwrap());
    assert!(!one.remove_flow(FlowMatch::Destination(MAC)).unwrap());
    send(&mut sender, 60, MAC, 4);
    expect(&receive(&mut sender, &mut rest), 60, MAC, 4);
    assert_ne!(groups.id(), rest.id());
    groups.close().unwrap();
    send(&mut sender, 60, GROUP, 5);
    expect(&receive(&mut sender, &mut rest), 60, GROUP, 5);
    // Two queues with the same flow have a copy each.
    let mut also = queue(&b);
    also.add_flow(FlowMatch::All).unwrap();
    send(&mut sender, 60, OTHER, 6);
    expect(&receive(&mut sender, &mut rest), 60, OTHER, 6);
    expect(&receive(&mut sender, &mut also), 60, OTHER, 6);
    drop(rest);
    send(&mut sender, 60, OTHER, 7);
    expect(&receive(&mut sender, &mut also), 60, OTHER, 7);
}

/// A UDP packet of 5 bytes in IPv4, without checksums.
const UDP: [u8; 47] = *b"\x02\0\0\0\0\x07\x02\0\0\0\x01\x01\x08\0\
    \x45\0\0\x21\0\0\0\0\x40\x11\0\0\x0a\0\0\x01\x0a\0\0\x02\
    \0\x07\0\x09\0\x0d\0\0hello";

#[test]
fn checksums_are_computed_and_checked() {
    let (a, b) = two();
    let (mut sender, mut receiver) = (queue(&a), queue(&b));
    assert!(sender.has_checksums());
    receiver.add_flow(FlowMatch::Destination(MAC)).unwrap();
    let mut go = |checksums, change: fn(&mut [u8])| {
        let mut frame = sender.buffer(UDP.len()).unwrap();
        frame.copy_from_slice(&UDP);
        change(&mut frame);
        sender.send(frame, checksums).unwrap();
        receive(&mut sender, &mut receiver)
    };
    let frame = go(Checksums::Compute, |_| ());
    assert!(frame.checksums_ok());
    assert_eq!(frame[24..26], [0x66, 0xca], "of IPv4");
    assert_ne!(frame[40..42], [0, 0], "of UDP");
    let frame = go(Checksums::Unchanged, |_| ());
    assert!(!frame.checksums_ok());
    assert_eq!(*frame, UDP);
    // A device that computes checksums makes them right for what it is given.
    assert!(go(Checksums::Compute, |frame| frame[46] = b'!').checksums_ok());
}

#[test]
fn requested_timestamps_are_present() {
    let (a, b) = two();
    let mut sender = queue(&a);
    let mut receiver = builder(&b).timestamps().build().unwrap();
    receiver.add_flow(FlowMatch::All).unwrap();
    let mut times = Vec::new();
    for number in 0..3 {
        send(&mut sender, 60, MAC, number);
        let frame = receive(&mut sender, &mut receiver);
        times.push(frame.timestamp().unwrap());
    }
    let clock = b.clock().unwrap();
    for pair in times.windows(2) {
        assert!(clock.between(pair[0], pair[1]) < PATIENCE);
    }
}

#[test]
fn refused_frames_are_returned() {
    let (a, b) = two();
    let mut sender = builder(&a).frame_size(100).send_depth(2).build().unwrap();
    assert_eq!(sender.frame_size(), 100);
    assert!(sender.buffer(101).is_none());
    let mut refused = |frame: PoolBuffer| {
        let len = frame.len();
        let refused = sender.send(frame, Checksums::Unchanged).unwrap_err();
        assert_eq!(refused.data.unwrap().len(), len);
        refused.error
    };
    // A buffer has room for more than the frame.
    let domain = a.alloc_pd().unwrap();
    let mut other = domain.packet_queue().build().unwrap();
    let error = refused(other.buffer(60).unwrap());
    assert!(matches!(error, Error::WrongDomain { .. }), "{error}");
    let error = refused(other.buffer(101).unwrap());
    assert!(
        matches!(
            error,
            Error::Limit {
                asked: 101,
                allowed: 100,
                ..
            }
        ),
        "{error}"
    );
    let error = refused(other.buffer(13).unwrap());
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    let error = refused(other.buffer(0).unwrap());
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    // Those before a bad one are sent.
    let mut receiver = queue(&b);
    receiver.add_flow(FlowMatch::All).unwrap();
    let mut frames = vec![
        made(&mut sender, 60, MAC, 1),
        other.buffer(60).unwrap(),
        made(&mut sender, 60, MAC, 2),
    ]
    .into_iter();
    let refused = sender.send_all(&mut frames, Checksums::Unchanged);
    assert!(matches!(
        refused.unwrap_err().error,
        Error::WrongDomain { .. }
    ));
    assert_eq!(frames.len(), 1);
    expect(&receive(&mut sender, &mut receiver), 60, MAC, 1);
    for (what, wrong) in [
        ("no queue", builder(&a).send_depth(0).recv_depth(0)),
        ("no header", builder(&a).frame_size(13)),
        ("no buffers", builder(&a).buffers(0)),
    ] {
        let error = wrong.build().unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{what}: {error}");
    }
    let error = builder(&a).send_depth(1 << 20).build().unwrap_err();
    assert!(matches!(error, Error::Limit { .. }), "{error}");
    assert_eq!(
        builder(&a).port(2).build().unwrap_err().errno(),
        libc::EINVAL
    );
    let network = Network::new(Drive::Thread).unwrap();
    let infiniband = Device::from(network.device("ib").unwrap()).open().unwrap();
    let error = builder(&infiniband).build().unwrap_err();
    assert_eq!(error.errno(), libc::EOPNOTSUPP, "{error}");
}

/// A receiver with smaller buffers loses the frames that are longer, and no others.
#[test]
fn frames_that_are_too_long_are_dropped() {
    let (a, b) = two();
    let mut sender = builder(&a).frame_size(4000).build().unwrap();
    let mut receiver = builder(&b).frame_size(64).recv_depth(4).build().unwrap();
    receiver.add_flow(FlowMatch::All).unwrap();
    for round in 0..10 {
        send(&mut sender, 65 + usize::from(round) * 300, MAC, round);
        send(&mut sender, 64, MAC, round);
        expect(&receive(&mut sender, &mut receiver), 64, MAC, round);
    }
    assert_eq!(receiver.counters().too_long, 10);
    assert_eq!(receiver.counters().received, 10);
}

#[test]
fn frames_are_dropped_in_any_order() {
    let (a, b) = two();
    let mut sender = queue(&a);
    let mut receiver = builder(&b).recv_depth(8).buffers(16).build().unwrap();
    receiver.add_flow(FlowMatch::All).unwrap();
    let mut held: Vec<(u8, Frame)> = Vec::new();
    for round in 0..200u8 {
        send(&mut sender, 60 + usize::from(round), MAC, round);
        held.push((round, receive(&mut sender, &mut receiver)));
        if held.len() == 8 {
            // The middle, the last, the first.
            held.remove(4);
            held.pop();
            held.remove(0);
        }
        for (number, frame) in &held {
            expect(frame, 60 + usize::from(*number), MAC, *number);
        }
    }
    assert_eq!(receiver.counters().received, 200);
}

/// Frames before and after a panic of the program's closure are received once, without
/// an error.
#[test]
fn a_closure_that_panics_has_consumed_its_frames() {
    let (a, b) = two();
    let (mut sender, mut receiver) = (queue(&a), queue(&b));
    receiver.add_flow(FlowMatch::All).unwrap();
    for number in 0..8 {
        send(&mut sender, 60, MAC, number);
    }
    let end = Instant::now() + PATIENCE;
    while sender.counters().sent < 8 && Instant::now() < end {
        sender.poll(drop).unwrap();
    }
    let mut frames = Vec::new();
    let mut panics = 0;
    while frames.len() < 8 && Instant::now() < end {
        let polled = catch_unwind(AssertUnwindSafe(|| {
            receiver.poll(|frame| {
                frames.push(frame);
                if frames.len() == 3 {
                    resume_unwind(Box::new("the third frame"));
                }
            })
        }));
        match polled {
            Ok(received) => drop(received.unwrap()),
            Err(_) => panics += 1,
        }
    }
    assert_eq!((frames.len(), panics), (8, 1));
    for (number, frame) in (0..).zip(&frames) {
        expect(frame, 60, MAC, number);
    }
    assert_eq!(receiver.poll(drop).unwrap(), 0);
    assert_eq!(receiver.counters().received, 8);
}

#[test]
fn frames_outlive_their_queue() {
    let (a, b) = two();
    let (mut sender, mut receiver) = (queue(&a), queue(&b));
    receiver.add_flow(FlowMatch::All).unwrap();
    let mut frames = Vec::new();
    for number in 0..4 {
        send(&mut sender, 300, MAC, number);
        frames.push(receive(&mut sender, &mut receiver));
    }
    // More of them are on their way, or have arrived and were not read.
    for number in 4..8 {
        send(&mut sender, 300, MAC, number);
    }
    drop(receiver);
    drop(b);
    // Nothing writes to them, nor to what follows in their place.
    let other = queue(&a);
    send(&mut sender, 300, MAC, 9);
    while sender.in_flight().0 != 0 {
        sender.poll(drop).unwrap();
    }
    for (number, frame) in (0..).zip(&frames) {
        expect(frame, 300, MAC, number);
    }
    drop(frames.remove(2));
    // A buffer to be sent outlives its queue, too.
    let buffer = made(&mut sender, 100, MAC, 3);
    drop(sender);
    drop(a);
    let mut expected = [0; 100];
    fill(&mut expected, MAC, 3);
    assert_eq!(*buffer, expected);
    let together = (frames, buffer, other);
    std::thread::spawn(move || drop(together)).join().unwrap();
}

#[test]
fn an_exhausted_pool_loses_frames_until_some_are_dropped() {
    let (a, b) = two();
    let mut sender = queue(&a);
    let mut receiver = builder(&b).recv_depth(4).buffers(4).build().unwrap();
    receiver.add_flow(FlowMatch::All).unwrap();
    assert!(receiver.buffer(60).is_none(), "all of them wait for frames");
    for number in 0..4 {
        send(&mut sender, 60, MAC, number);
    }
    let mut frames = collect(&mut sender, &mut receiver, 4, PATIENCE);
    assert_eq!((frames.len(), receiver.in_flight().1), (4, 0));
    send(&mut sender, 60, MAC, 4);
    assert!(collect(&mut sender, &mut receiver, 1, SHORT).is_empty());
    drop(frames.remove(1));
    receiver.poll(drop).unwrap();
    assert_eq!(receiver.in_flight().1, 1);
    send(&mut sender, 60, MAC, 5);
    expect(&receive(&mut sender, &mut receiver), 60, MAC, 5);
    expect(&frames[1], 60, MAC, 2);
    // Given back to the queue, and to one that it is not of.
    receiver.give_back(frames.remove(0));
    let other = frames.remove(0);
    sender.give_back(other);
    receiver.poll(drop).unwrap();
    assert_eq!(receiver.in_flight().1, 3);
    send(&mut sender, 60, MAC, 6);
    expect(&receive(&mut sender, &mut receiver), 60, MAC, 6);
}

#[test]
fn a_full_queue_takes_no_more_frames() {
    let (a, b) = two();
    let mut sender = builder(&a).send_depth(4).recv_depth(0).build().unwrap();
    let mut receiver = builder(&b).send_depth(0).build().unwrap();
    receiver.add_flow(FlowMatch::All).unwrap();
    assert!(
        sender.add_flow(FlowMatch::All).is_err(),
        "it does not receive"
    );
    let none = receiver.buffer(60).unwrap();
    let error = receiver.send(none, Checksums::Unchanged).unwrap_err().error;
    assert!(matches!(error, Error::QueueFull { .. }), "{error}");
    let mut sent = 0;
    let mut received = 0;
    while sent < 1000 {
        let buffers = std::iter::from_fn(|| sender.buffer(60));
        let frames: Vec<_> = buffers.take(6).collect();
        let count = frames.len();
        let mut frames = frames.into_iter().map(|mut frame| {
            fill(&mut frame, MAC, 1);
            frame
        });
        let taken = sender.send_all(&mut frames, Checksums::Unchanged).unwrap();
        assert!(taken <= 4 && frames.len() == count - taken);
        drop(frames);
        sent += taken;
        sender.poll(drop).unwrap();
        receiver
            .poll(|frame| {
                expect(&frame, 60, MAC, 1);
                received += 1;
            })
            .unwrap();
    }
    received += collect(&mut sender, &mut receiver, sent - received, PATIENCE).len();
    assert_eq!(received, sent);
}

/// What the program holds: a frame, or a buffer, and its bytes.
enum HeldPacket {
    Frame(Frame, Vec<u8>),
    Buffer(PoolBuffer, Vec<u8>),
}

/// Random calls, among them those that destroy and forget what is in use: what the
/// program holds keeps its bytes, and what arrives is what was sent.
#[test]
fn random_calls_keep_every_byte() {
    const SIZES: [usize; 3] = [64, 300, 1518];
    let seed = setting("RINGVERBS_SEED", 1);
    for seed in seed..seed + setting("RINGVERBS_SEQUENCES", 12) {
        let mut random = Rng(seed);
        let domains = <[Context; 2]>::from(two()).map(|context| context.alloc_pd().unwrap());
        let make = |random: &mut Rng| {
            let builder = domains[random.below(2)].packet_queue();
            let builder = builder
                .frame_size(SIZES[random.below(3)])
                .send_depth(1 << random.below(5))
                .recv_depth(1 + random.below(20) as u32)
                .buffers(8 + random.below(40));
            let builder = match random.below(2) {
                0 => builder,
                _ => builder.own_frames().timestamps(),
            };
            let mut queue = builder.build().unwrap();
            queue.add_flow(FlowMatch::Destination(MAC)).unwrap();
            queue
        };
        let mut queues: Vec<_> = (0..3).map(|_| make(&mut random)).collect();
        let mut held: Vec<HeldPacket> = Vec::new();
        let mut arrived = 0;
        for _ in 0..4000 {
            let at = random.below(queues.len());
            let queue = &mut queues[at];
            let flow = [FlowMatch::All, FlowMatch::AllMulticast][random.below(2)];
            match random.below(24) {
                0..5 => {
                    let len = 14 + random.below(queue.frame_size() - 13);
                    if let Some(mut buffer) = queue.buffer(len) {
                        let to = [MAC, OTHER, GROUP][random.below(3)];
                        fill(&mut buffer, to, random.next() as u8);
                        let bytes = buffer.to_vec();
                        held.push(HeldPacket::Buffer(buffer, bytes));
                    }
                }
                5..9 => {
                    let count = 1 + random.below(4);
                    let own = held.extract(|it| matches!(it, HeldPacket::Buffer(..)), count);
                    let mut own = own.into_iter().filter_map(|it| match it {
                        HeldPacket::Buffer(buffer, _) => Some(buffer),
                        HeldPacket::Frame(..) => None,
                    });
                    // Some are of the other domain, too long, or too many.
                    let _ = queue.send_all(&mut own, Checksums::Unchanged);
                }
                9..15 => {
                    let polled = queue.poll(|frame| {
                        let number = frame.get(14).map(|byte| byte.wrapping_sub(14 * 7));
                        let to = frame[..6].try_into().unwrap();
                        if let Some(number) = number {
                            expect(&frame, frame.len(), to, number);
                        }
                        let bytes = frame.to_vec();
                        held.push(HeldPacket::Frame(frame, bytes));
                        arrived += 1;
                    });
                    polled.unwrap();
                }
                15..17 if !held.is_empty() => {
                    drop(held.swap_remove(random.below(held.len())));
                }
                17 if !held.is_empty() => {
                    // Of this queue or another.
                    match held.swap_remove(random.below(held.len())) {
                        HeldPacket::Frame(frame, _) => queue.give_back(frame),
                        HeldPacket::Buffer(buffer, _) => queue.give_back(buffer),
                    }
                }
                18 if !held.is_empty() => {
                    // Sent on, later.
                    let it = held.swap_remove(random.below(held.len()));
                    held.push(match it {
                        HeldPacket::Frame(frame, bytes) => {
                            HeldPacket::Buffer(frame.into_buffer(), bytes)
                        }
                        it => it,
                    });
                }
                19 if random.below(8) == 0 && !held.is_empty() => {
                    std::mem::forget(held.swap_remove(random.below(held.len())));
                }
                20 => drop(queue.add_flow(flow)),
                21 => drop(queue.remove_flow(flow).unwrap()),
                22 => {
                    let other = random.below(queues.len());
                    queues.swap(at, other);
                }
                23 if random.below(4) == 0 => {
                    let new = make(&mut random);
                    let old = std::mem::replace(&mut queues[at], new);
                    match random.below(8) {
                        0 => std::mem::forget(old),
                        _ => drop(old),
                    }
                }
                _ => {}
            }
            for it in &held {
                let (now, before) = match it {
                    HeldPacket::Frame(frame, bytes) => (&**frame, bytes),
                    HeldPacket::Buffer(buffer, bytes) => (&**buffer, bytes),
                };
                assert_eq!(now, before, "seed {seed}");
            }
        }
        assert!(arrived > 50, "{arrived} frames, seed {seed}");
    }
}

trait Extract<T> {
    /// Takes the first of those that fit.
    fn extract(&mut self, fits: impl Fn(&T) -> bool, count: usize) -> Vec<T>;
}

impl<T> Extract<T> for Vec<T> {
    fn extract(&mut self, fits: impl Fn(&T) -> bool, count: usize) -> Vec<T> {
        let mut taken = Vec::new();
        while taken.len() < count {
            let Some(at) = self.iter().position(&fits) else {
                break;
            };
            taken.push(self.remove(at));
        }
        taken
    }
}

/// A received frame is sent on from the buffer that it came in.
#[test]
fn a_frame_is_forwarded_without_a_copy() {
    let (a, b) = two();
    let (mut sender, mut bridge) = (queue(&a), queue(&b));
    let mut end = queue(&a);
    bridge.add_flow(FlowMatch::Destination(MAC)).unwrap();
    end.add_flow(FlowMatch::Destination(OTHER)).unwrap();
    send(&mut sender, 200, MAC, 5);
    let frame = receive(&mut sender, &mut bridge);
    let at = frame.as_ptr();
    let mut buffer = frame.into_buffer();
    assert_eq!(buffer.as_ptr(), at);
    buffer[..6].copy_from_slice(&OTHER);
    bridge.send(buffer, Checksums::Unchanged).unwrap();
    expect(&receive(&mut bridge, &mut end), 200, OTHER, 5);
}

#[test]
fn a_wait_ends_with_a_frame() {
    let (a, b) = two();
    let mut sender = queue(&a);
    let channel = b.completion_channel().unwrap();
    let mut receiver = builder(&b).channel(&channel).build().unwrap();
    receiver.add_flow(FlowMatch::All).unwrap();
    assert!(!receiver.arm().unwrap());
    send(&mut sender, 60, MAC, 1);
    channel.wait(Some(PATIENCE)).unwrap().unwrap();
    expect(&receiver.receive().unwrap().unwrap(), 60, MAC, 1);
    assert!(sender.arm().is_err(), "it has no channel");
}
