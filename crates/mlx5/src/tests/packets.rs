//! Raw packets: frames whose first bytes may be in the WQE, checksums, receives that
//! are announced late, two queues of their own pages.

use std::cell::RefCell;
use std::io;

use uverbs::abi::ids::*;
use uverbs::{Context, QpInit, QpType, Udata, WqInit};

use super::objects::{CREATE_QP, CREATE_WQ, FakeDevice, UcontextAnswer, VALID_ANSWER};
use super::*;
use crate::send::packets::MAX_INLINE_HEADERS;
use crate::{
    CreateError, CursorEntry, CustomMemory, DeviceContext, MAX_HASH_KEY, Operands, PacketHash,
    PacketOptions, Purpose, QpOptions, QueueAllocator, QueuePair, Role, TsoLimits, WorkQueue,
};

const USER_INDEX: u32 = 70;

/// A queue pair whose WQEs carry so many bytes of headers.
fn pair(inline_headers: usize, checksums: bool) -> TestQp {
    let mut queues = qp_queues(USER_INDEX, Service::Packet, &cap(4, 3, 64), None);
    let own = Arc::get_mut(&mut queues).unwrap();
    own.inline_headers = inline_headers;
    own.set_checksums(checksums);
    TestQp::with(queues, false)
}

/// The frame's bytes from `from` on, as an element.
fn piece(frame: &[u8], from: usize, length: usize) -> Sge {
    Sge {
        addr: frame[from..from + length].as_ptr().expose_provenance() as u64,
        length: length as u32,
        lkey: 9,
    }
}

fn post(pair: &mut TestQp, flags: SendFlags, list: &[Sge]) -> Result<(), PostError> {
    pair.send.begin();
    let data = match flags.contains(SendFlags::INLINE) {
        true => Data::Inline(list),
        false => Data::Sges(list),
    };
    let wr = SendWr {
        data,
        ..request(7, Opcode::SEND, flags, list)
    };
    push(&mut pair.send, &wr)?;
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    Ok(())
}

/// The elements in a WQE's bytes.
fn elements(bytes: &[u8], count: usize) -> Vec<(u32, u64)> {
    (bytes.chunks(16).take(count))
        .map(|element| (be32(element, 0), be64(element, 8)))
        .collect()
}

#[test]
fn a_frame_without_inline_headers_is_all_data() {
    let frame: Vec<u8> = (1..=60).collect();
    let mut pair = pair(0, true);
    let list = [piece(&frame, 0, 20), piece(&frame, 20, 40)];
    let flags = SendFlags::SIGNALED | SendFlags::IP_CSUM;
    post(&mut pair, flags, &list).unwrap();
    let bytes = pair.sent(0, 64);
    assert_eq!(be32(&bytes, 0), 0x0a);
    assert_eq!(be32(&bytes, 4), QPN << 8 | 4);
    assert_eq!(bytes[11], 8);
    // The Ethernet segment has the checksum flags only.
    let mut segment = [0; 16];
    segment[4] = 0xc0;
    assert_eq!(bytes[16..32], segment);
    let expected: Vec<_> = list.iter().map(|sge| (sge.length, sge.addr)).collect();
    assert_eq!(elements(&bytes[32..], 2), expected);
}

#[test]
fn headers_are_taken_from_the_first_elements() {
    let frame: Vec<u8> = (1..=60).collect();
    for cuts in [[30, 45], [18, 40], [10, 14], [10, 18], [0, 18], [17, 19]] {
        let mut pair = pair(MAX_INLINE_HEADERS, false);
        let [first, second] = cuts;
        let list = [
            piece(&frame, 0, first),
            piece(&frame, first, second - first),
            piece(&frame, second, 60 - second),
        ];
        post(&mut pair, SendFlags::empty(), &list).unwrap();
        let bytes = pair.sent(0, 128);
        assert_eq!(be16(&bytes, 28), 18, "{cuts:?}");
        assert_eq!(bytes[30..48], frame[..18], "{cuts:?}");
        let count = (be32(&bytes, 4) & 0x3f) as usize - 3;
        // The rest of the frame, without gaps.
        let mut next = frame.as_ptr().addr() as u64 + 18;
        let mut length = 0;
        for (part, addr) in elements(&bytes[48..], count) {
            assert!(part != 0 && addr == next, "{cuts:?}");
            next += u64::from(part);
            length += part;
        }
        assert_eq!(length, 42, "{cuts:?}");
    }
}

#[test]
fn an_inline_frame_is_complete() {
    let frame: Vec<u8> = (1..=60).collect();
    for (headers, length) in [(0, 60), (18, 60), (18, 18)] {
        let mut pair = pair(headers, false);
        let list = [piece(&frame, 0, length)];
        post(&mut pair, SendFlags::INLINE, &list).unwrap();
        let bytes = pair.sent(0, 128);
        let data = if headers == 0 { 32 } else { 48 };
        let rest = length - headers;
        let segments = data / 16
            + if rest == 0 {
                0
            } else {
                (rest + 4).div_ceil(16)
            };
        assert_eq!(be32(&bytes, 4) & 0x3f, segments as u32);
        if rest != 0 {
            assert_eq!(be32(&bytes, data), 1 << 31 | rest as u32);
            assert_eq!(bytes[data + 4..][..rest], frame[headers..length]);
        }
    }
}

#[test]
fn malformed_frames_are_refused() {
    let frame = [0; 64];
    let refused = Err(PostError::BadOperation);
    let mut pair = pair(MAX_INLINE_HEADERS, false);
    for flags in [SendFlags::empty(), SendFlags::INLINE] {
        let short = [piece(&frame, 0, 10), piece(&frame, 10, 7)];
        assert_eq!(post(&mut pair, flags, &short), refused);
        assert_eq!(post(&mut pair, flags, &[]), refused);
    }
    // Checksums that the device does not compute.
    let list = [piece(&frame, 0, 64)];
    assert_eq!(post(&mut pair, SendFlags::IP_CSUM, &list), refused);
    for opcode in [Opcode::SEND_WITH_IMM, Opcode::RDMA_WRITE, Opcode::LOCAL_INV] {
        pair.send.begin();
        let wr = request(7, opcode, SendFlags::empty(), &list);
        assert_eq!(push(&mut pair.send, &wr), refused, "{opcode:?}");
    }
    let long = [list[0]; 4];
    assert_eq!(
        post(&mut pair, SendFlags::empty(), &long),
        Err(PostError::TooManySges)
    );
    assert_eq!(pair.record(1), 0);
}

#[test]
fn receives_are_announced_when_ready() {
    let mut pair = pair(0, false);
    let memory = [0; 64];
    let post = |pair: &mut TestQp, wr_id| {
        pair.recv.begin();
        pair.recv.push(wr_id, &[piece(&memory, 0, 64)]).unwrap();
        // SAFETY: there is no device.
        unsafe { pair.recv.publish() };
    };
    post(&mut pair, 1);
    post(&mut pair, 2);
    assert_eq!(pair.record(0), 0);
    pair.recv.announce();
    assert_eq!(pair.record(0), 2);
    post(&mut pair, 3);
    assert_eq!(pair.record(0), 3);
    pair.recv.reset();
    post(&mut pair, 4);
    assert_eq!(pair.record(0), 0);
}

#[test]
fn received_packets_have_a_checksum_flag() {
    const IPV4: u8 = 2 << 2;
    let memory = [0; 64];
    for checksums in [true, false] {
        let mut pair = pair(0, checksums);
        let mut ring = CqeRing::plain(3).unwrap();
        let mut device = Device::of(&ring);
        ring.attach(&pair.queues, Role::RECEIVE).unwrap();
        let cases = [
            (6, IPV4, 4),
            (2, IPV4, 0),
            (4, IPV4, 0),
            (6, 1 << 2, 0),
            (7, 0xfb, 4),
        ];
        for (slot, (ok, kind, expected)) in (0u16..).zip(cases) {
            pair.recv.begin();
            pair.recv
                .push(slot.into(), &[piece(&memory, 0, 64)])
                .unwrap();
            // SAFETY: there is no device.
            unsafe { pair.recv.publish() };
            device.write_cqe(&TestCqe {
                opcode: 2,
                user_index: USER_INDEX,
                slot,
                byte_count: 60,
                checksum: [ok, kind],
                ..TestCqe::default()
            });
            let mut out = [MaybeUninit::<WorkCompletion>::uninit()];
            // SAFETY: no completion has data.
            assert_eq!(unsafe { poll(&mut ring, &mut out) }.unwrap(), 1);
            // SAFETY: one was written.
            let done = unsafe { out[0].assume_init() };
            let expected = if checksums { expected } else { 0 };
            assert_eq!((done.wr_id, done.byte_len), (slot.into(), 60));
            assert_eq!(done.wc_flags, expected, "{ok} {kind:#x}");
        }
    }
}

#[test]
fn create_qp_names_both_queue_addresses() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    let options = QpOptions::default();
    let qp = machine.qp_of(&device, QpType::RAW_PACKET, &options, 0, None);
    let qp = qp.unwrap();
    let told = machine.driver_in(CREATE_QP);
    let word = |at: usize| u64::from_ne_bytes(told[at..at + 8].try_into().unwrap());
    assert_eq!(word(0), qp.queues.memory.entries.address());
    assert_eq!(word(40), qp.queues.send_at().as_ptr().addr() as u64);
    assert!(word(40) > word(0) && word(40) % 4096 == 0);
    // CQEs of packets carry no data.
    assert_eq!(told[28] & 2, 0);
    // A program that drives the queues itself is told the same.
    let at = |ring: crate::DirectRing| ring.entries.addr().get() as u64;
    assert_eq!(at(qp.send.direct_receives()), word(0));
    assert_eq!(at(qp.send.direct()), word(40));
}

/// A work queue of so many receives.
fn work_queue(
    machine: &FakeDevice,
    device: &DeviceContext,
    max_wr: u32,
    checksums: bool,
) -> Result<WorkQueue<Arc<Context>>, CreateError> {
    work_queue_of(machine, device, max_wr, checksums, None)
}

/// As [`work_queue`], in memory of a allocator.
fn work_queue_of(
    machine: &FakeDevice,
    device: &DeviceContext,
    max_wr: u32,
    checksums: bool,
    allocator: Option<&dyn QueueAllocator>,
) -> Result<WorkQueue<Arc<Context>>, CreateError> {
    let pd = uverbs::pd::alloc(&machine.context, Udata::none()).unwrap();
    let cq = machine.cq(3)?;
    let init = WqInit {
        pd,
        cq: cq.object.handle(),
        max_wr,
        max_sge: 2,
        flags: 0,
        user_handle: 0,
        async_fd: None,
    };
    WorkQueue::create(&machine.context, device, &init, checksums, None, allocator)
}

/// Notes the purposes of memory, and lends none.
#[derive(Default)]
struct Purposes(RefCell<Vec<Purpose>>);

impl QueueAllocator for Purposes {
    fn allocate(&self, purpose: Purpose, _: usize, _: usize) -> io::Result<Option<CustomMemory>> {
        self.0.borrow_mut().push(purpose);
        Ok(None)
    }
}

#[test]
fn memory_of_a_work_queue_has_its_purpose() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    let purposes = Purposes::default();
    work_queue_of(&machine, &device, 5, false, Some(&purposes)).unwrap();
    let expected = [Purpose::WorkQueue, Purpose::Records];
    assert_eq!(*purposes.0.borrow(), expected);
}

#[test]
fn a_work_queue_announces_receives_at_once() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    let mut queue = work_queue(&machine, &device, 5, false).unwrap();
    let told = machine.driver_in(CREATE_WQ);
    assert_eq!(told.len(), 48);
    let word = |at: usize| u64::from_ne_bytes(told[at..at + 8].try_into().unwrap());
    let records = queue.queues.direct().records.cast::<u32>();
    assert_eq!(word(0), queue.queues.direct().entries.addr().get() as u64);
    assert_eq!(word(8), queue.queues.direct().records.addr().get() as u64);
    // Entries, their size, the user index.
    let half = |at: usize| u32::from_ne_bytes(told[at..at + 4].try_into().unwrap());
    assert_eq!((half(16), half(20)), (8, 5));
    assert_eq!(half(24), queue.queues.user_index());
    // SAFETY: the first doorbell record, which nothing writes meanwhile.
    let record = || unsafe { u32::from_be(records.read_volatile()) };
    let memory = [0; 64];
    for posted in 1..=2 {
        queue.recv.begin();
        queue.recv.push(1, &[piece(&memory, 0, 64)]).unwrap();
        // SAFETY: there is no device.
        unsafe { queue.recv.publish() };
        assert_eq!(record(), posted);
    }
    queue.recv.reset();
    assert_eq!(record(), 0);
    drop(queue);
    let none = work_queue(&machine, &device, 0, false).unwrap_err();
    assert!(matches!(none, CreateError::TooLarge { .. }), "{none}");
    let live = machine.fake.live_objects();
    assert!(live.iter().all(|(_, object)| *object != OBJECT_WQ));
}

#[test]
fn create_rss_passes_the_packet_hash() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    machine.fake.on(CREATE_QP, |reply| {
        reply.set(ATTR_CREATE_QP_RESP_CAP, &[0; 20]);
        reply.set(ATTR_CREATE_QP_RESP_QP_NUM, &QPN.to_ne_bytes());
        // The numbers of its objects.
        let words = [0u32, 0, 1, 11, 12, 13, 14, 0, 15, 0];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        reply.set_driver_out(&bytes);
        Ok(())
    });
    let init = QpInit {
        qp_type: QpType::RAW_PACKET,
        pd: Some(uverbs::pd::alloc(&machine.context, Udata::none()).unwrap()),
        ..QpInit::default()
    };
    let make = |key: &[u8]| {
        let hash = PacketHash {
            function: 1,
            fields: 0x8000_0003,
            key,
        };
        let options = PacketOptions {
            tunnels: true,
            ..PacketOptions::default()
        };
        QueuePair::create_rss(&machine.context, &device, &init, &hash, options)
    };
    let qp = make(&[7; 40]).unwrap();
    let told = machine.driver_in(CREATE_QP);
    assert_eq!(told.len(), 152);
    assert_eq!(told[..8], 0x8000_0003u64.to_ne_bytes());
    assert_eq!(told[8..16], [1, 40, 0, 0, 0, 0, 0, 0]);
    assert_eq!(told[16..56], [7; 40]);
    assert!(told[56..148].iter().all(|byte| *byte == 0));
    assert_eq!(told[148..], mlx5_abi::QP_FLAG_TUNNEL_OFFLOADS.to_ne_bytes());
    let packets = qp.packets;
    let numbers = [packets.tir, packets.tis, packets.rq, packets.sq];
    assert_eq!((numbers, packets.tir_address), ([11, 12, 13, 14], 15));
    assert!(qp.recv.is_none() && qp.send.capacity() == 0);
    let long = make(&[7; MAX_HASH_KEY + 1]).unwrap_err();
    assert!(matches!(long, CreateError::TooLarge { .. }), "{long}");
}

#[test]
fn the_driver_reports_inline_headers() {
    // None, those of Ethernet, of IP; a kernel without the field.
    for (inline_mode, headers) in [(1, 0), (2, 18), (3, 18), (0, 18)] {
        let machine = FakeDevice::new();
        let answer = UcontextAnswer {
            inline_mode,
            ..VALID_ANSWER
        };
        let device = machine.open(&answer).unwrap();
        assert_eq!(device.limits.inline_headers, headers, "{inline_mode}");
    }
}

/// A queue pair of packets with at most so many bytes of headers and of data.
fn dividing_pair(max_headers: u16, longest: u32) -> TestQp {
    let cap = cap(4, 3, 64);
    let keys = crate::KeyChanges::None;
    let send = SendPlan::new(&cap, Service::Packet, &LIMITS, keys, max_headers).unwrap();
    let mut queues = qp_queues_with_plan(USER_INDEX, Service::Packet, send, &cap, None);
    let own = Arc::get_mut(&mut queues).unwrap();
    own.segmentation = TsoLimits {
        max_headers,
        longest,
    };
    own.set_checksums(true);
    TestQp::with(queues, false)
}

fn divide(pair: &mut TestQp, headers: &[u8], mss: u16, list: &[Sge]) -> Result<(), PostError> {
    pair.send.begin();
    let wr = SendWr {
        operands: Operands::Tso {
            headers: headers.as_ptr().expose_provenance() as u64,
            length: headers.len() as u16,
            mss,
        },
        ..request(
            7,
            Opcode::TSO,
            SendFlags::SIGNALED | SendFlags::IP_CSUM,
            list,
        )
    };
    push(&mut pair.send, &wr)?;
    // SAFETY: there is no device.
    unsafe { pair.send.publish() };
    Ok(())
}

#[test]
fn a_tso_packet_has_separate_headers() {
    let bytes: Vec<u8> = (0..=255).collect();
    for length in [14usize, 18, 19, 54, 100] {
        let mut pair = dividing_pair(100, 1 << 16);
        let mut ring = CqeRing::plain(3).unwrap();
        let mut device = Device::of(&ring);
        ring.attach(&pair.queues, Role::SEND).unwrap();
        let list = [piece(&bytes, 0, 90), piece(&bytes, 100, 110)];
        let expected: Vec<_> = list.iter().map(|sge| (sge.length, sge.addr)).collect();
        let headers = (14 + length).div_ceil(16);
        let segments = 1 + headers + 2;
        let mut at = 0;
        // More than once around the queue.
        while at < 3 * pair.queues.send.blocks as usize {
            divide(&mut pair, &bytes[20..20 + length], 1000, &list).unwrap();
            let wqe = pair.sent(at * 64, segments * 16);
            assert_eq!(be32(&wqe, 0), (at as u32) << 8 | 0x0e);
            assert_eq!(be32(&wqe, 4) & 0x3f, segments as u32);
            assert_eq!(wqe[16 + 4], 0xc0);
            assert_eq!(be16(&wqe, 16 + 6), 1000);
            assert_eq!(be16(&wqe, 16 + 12), length as u16);
            assert_eq!(wqe[30..30 + length], bytes[20..20 + length]);
            let data = 16 * (1 + headers);
            assert!(wqe[30 + length..data].iter().all(|byte| *byte == 0));
            assert_eq!(elements(&wqe[data..], 2), expected);
            device.write_cqe(&TestCqe {
                user_index: USER_INDEX,
                slot: at as u16,
                request: 0x0e,
                ..TestCqe::default()
            });
            let mut out = [MaybeUninit::<WorkCompletion>::uninit()];
            // SAFETY: no completion has data.
            assert_eq!(unsafe { poll(&mut ring, &mut out) }.unwrap(), 1);
            // SAFETY: one was written.
            let done = unsafe { out[0].assume_init() };
            assert_eq!((done.opcode, done.wr_id), (7, 7));
            at += segments.div_ceil(4);
        }
    }
}

#[test]
fn an_invalid_tso_packet_is_refused() {
    let bytes = [0; 256];
    let refused = Err(PostError::BadOperation);
    let mut dividing = dividing_pair(54, 100);
    let list = [piece(&bytes, 0, 60)];
    assert_eq!(divide(&mut dividing, &bytes[..13], 10, &list), refused);
    assert_eq!(divide(&mut dividing, &bytes[..55], 10, &list), refused);
    let long = [list[0], piece(&bytes, 0, 41)];
    assert_eq!(
        divide(&mut dividing, &bytes[..54], 10, &long),
        Err(PostError::MessageTooLong)
    );
    let wr = request(7, Opcode::TSO, SendFlags::empty(), &list);
    dividing.send.begin();
    assert_eq!(push(&mut dividing.send, &wr), refused);
    assert_eq!(dividing.record(1), 0);
    // A queue that was not made for it, and headers that no WQE has room for.
    let mut other = pair(0, true);
    assert_eq!(divide(&mut other, &bytes[..54], 10, &list), refused);
    let (cap, keys) = (cap(4, 3, 64), crate::KeyChanges::None);
    let plan = SendPlan::new(&cap, Service::Packet, &LIMITS, keys, 2000);
    assert!(matches!(plan, Err(CreateError::TooLarge { .. })));
}

#[test]
fn a_cursor_reads_tag_and_vlan_of_a_packet() {
    let memory = [0; 64];
    let mut pair = pair(0, false);
    let mut ring = CqeRing::plain(3).unwrap();
    let mut device = Device::of(&ring);
    ring.attach(&pair.queues, Role::RECEIVE).unwrap();
    pair.recv.begin();
    pair.recv.push(1, &[piece(&memory, 0, 64)]).unwrap();
    // SAFETY: there is no device.
    unsafe { pair.recv.publish() };
    let written = TestCqe {
        opcode: 2,
        user_index: USER_INDEX,
        byte_count: 60,
        ..TestCqe::default()
    };
    let mut bytes = written.bytes();
    bytes[30..32].copy_from_slice(&[0x61, 0x23]);
    bytes[56..60].copy_from_slice(&[0xff, 0x0a, 0xbc, 0xde]);
    device.write(bytes);
    let mut entry = CursorEntry::default();
    // SAFETY: no completion has data, and the ring is not published.
    let (vlan, tag) = unsafe {
        assert!(ring.next(&mut entry).unwrap());
        (entry.cvlan(), entry.flow_tag())
    };
    assert_eq!((entry.wr_id(), vlan, tag), (1, 0x6123, 0x000a_bcde));
}
