//! Loopback on the network interface: the frames that reach it and other interfaces.

use roce::fabric::Fabric;
use roce::transport::Queue;

use super::causes::observe;
use crate::cause::{Cause, FrameDrop};
use crate::command::opcode as op;
use crate::link_shape::LinkShape;
use crate::testing::driver::{Cq, Driver, Input, Qp, SIGNALED, segment, status, word};

const BROADCAST: [u8; 6] = [0xff; 6];
const MULTICAST: [u8; 6] = [0x33, 0x33, 0, 0, 0, 1];
const OTHER_ADDRESS: [u8; 6] = [2, 0, 0, 0, 0, 9];

/// Flags for unicast and multicast, in a TIR and in the vport context.
const UNICAST_FLAG: u32 = 1;
const MULTICAST_FLAG: u32 = 2;

/// An interface that sends and receives, with the objects that a driver creates for it.
struct Interface {
    driver: Driver,
    sq: Qp,
    rq: Qp,
    /// For received frames.
    cq: Cq,
    tir: u32,
    page: u64,
}

/// Creates a work queue: its number and its ring of 16 WQEs of 64 bytes.
fn work_queue(driver: &mut Driver, opcode: u16, cqn: u32, tis: u32) -> Qp {
    work_queue_with(driver, opcode, cqn, tis, |input| input)
}

/// Like `work_queue`; `fill` modifies the command first.
fn work_queue_with(
    driver: &mut Driver,
    opcode: u16,
    cqn: u32,
    tis: u32,
    fill: impl FnOnce(Input) -> Input,
) -> Qp {
    let (ring, doorbell) = (driver.pages(1), driver.pages(1));
    let create = Input::new(opcode, 0x118)
        .or(0x28, 0, cqn)
        .or(0x4c, 0, tis)
        .or(0x58, 0, driver.pd)
        .put64(0x60, doorbell)
        .or(0x70, 16, 6)
        .or(0x70, 0, 4)
        .put64(0x110, ring);
    let number = driver.create(fill(create));
    // To the ready state.
    let modify = Input::new(opcode + 1, 0x110)
        .or(8, 0, number)
        .or(0x20, 20, 1);
    driver.execute(&modify, 16);
    Qp {
        number,
        recv: ring,
        send: ring,
        doorbell,
        posted: 0,
        received: 0,
    }
}

/// Steers all frames to a TIR, by a new table.
fn steer_to(driver: &mut Driver, tir: u32) {
    let table = driver.create(Input::new(op::CREATE_FLOW_TABLE, 0x40));
    let on_table = |opcode, length| Input::new(opcode, length).or(0x14, 0, table);
    // A group whose rules match any frame.
    let group = driver.create(on_table(op::CREATE_FLOW_GROUP, 0x240));
    let rule = on_table(op::SET_FLOW_TABLE_ENTRY, 0x348)
        .or(0x44, 0, group)
        .or(0x4c, 0, 4)
        .or(0x50, 0, 1)
        .or(0x340, 24, 2)
        .or(0x340, 0, tir);
    driver.execute(&rule, 16);
    driver.execute(&on_table(op::SET_FLOW_TABLE_ROOT, 0x40), 16);
}

impl Interface {
    /// All frames are steered to its TIR, whose transport domain is 7; `sq_domain` is
    /// that of its send queue. The link is up.
    fn with(number: u16, fabric: &Fabric, sq_domain: u32) -> Interface {
        Interface::on(Driver::with("roce", number, fabric, true), sq_domain)
    }

    fn on(mut driver: Driver, sq_domain: u32) -> Interface {
        driver.execute(
            &Input::new(op::ACCESS_REG, 0x20)
                .or(8, 0, 0x5006)
                .or(0x10, 8, 1),
            0x20,
        );
        let tis = driver.create(Input::new(op::CREATE_TIS, 0xc0).or(0x44, 0, sq_domain));
        let (sent, cq) = (driver.create_cq(4), driver.create_cq(4));
        let sq = work_queue(&mut driver, op::CREATE_SQ, sent.number, tis);
        let mut rq = work_queue(&mut driver, op::CREATE_RQ, cq.number, 0);
        let tir = Input::new(op::CREATE_TIR, 0x110)
            .or(0x3c, 0, rq.number)
            .or(0x44, 0, 7);
        let tir = driver.create(tir);
        steer_to(&mut driver, tir);
        let page = driver.pages(2);
        for _ in 0..8 {
            let receive_segment = segment(2048, driver.key, page + 4096);
            driver.post_recv(&mut rq, &receive_segment);
        }
        Interface {
            driver,
            sq,
            rq,
            cq,
            tir,
            page,
        }
    }

    fn new(sq_domain: u32) -> Interface {
        Interface::with(0, &Fabric::new(1), sq_domain)
    }

    fn mac(&self) -> [u8; 6] {
        self.driver.hca.settings().mac
    }

    fn send(&mut self, to: [u8; 6]) {
        let mut frame = [0xa5; 60];
        frame[..6].copy_from_slice(&to);
        frame[6..12].copy_from_slice(&self.mac());
        frame[12..14].copy_from_slice(&[0x88, 0xb5]);
        self.driver.write(self.page, &frame);
        // No inline header.
        let mut segments = vec![0; 16];
        segments.extend_from_slice(&segment(60, self.driver.key, self.page));
        self.driver.post(&mut self.sq, 0x0a, SIGNALED, &segments);
    }

    /// Returns the number of frames received.
    fn received(&mut self) -> usize {
        self.driver.run();
        let mut count = 0;
        while let Some(entry) = self.driver.poll(&mut self.cq) {
            assert_eq!(word(&entry, 44), 60, "the length");
            assert_eq!(self.driver.read(self.page + 4096 + 14, 46), [0xa5; 46]);
            let receive_segment = segment(2048, self.driver.key, self.page + 4096);
            self.driver.post_recv(&mut self.rq, &receive_segment);
            count += 1;
        }
        count
    }

    /// Returns which of its own frames it receives: broadcast, multicast, to its own
    /// address, to another address.
    fn own_frames_received(&mut self) -> [usize; 4] {
        [BROADCAST, MULTICAST, self.mac(), OTHER_ADDRESS].map(|to| {
            self.send(to);
            self.received()
        })
    }

    /// Sets the kinds of frames that the TIR accepts from its own domain.
    fn set_tir_loopback(&mut self, own: u32) {
        let modify = Input::new(op::MODIFY_TIR, 0x110)
            .or(8, 0, self.tir)
            .or(0x14, 4, 1)
            .or(0x44, 24, own);
        self.driver.execute(&modify, 16);
    }

    /// Disables loopback of the frames in `disabled`, and enables it for the others in
    /// `selected`.
    fn set_port_loopback(&mut self, selected: u32, disabled: u32) {
        // The field select bits have the opposite order.
        let select = (selected & UNICAST_FLAG) << 11 | (selected & MULTICAST_FLAG) << 9;
        let modify = Input::new(op::MODIFY_NIC_VPORT_CONTEXT, 0x200)
            .or(0xc, 0, select)
            .or(0x100, 1, disabled);
        self.driver.execute(&modify, 16);
    }

    fn disabled_port_loopback(&mut self) -> u32 {
        let query = Input::new(op::QUERY_NIC_VPORT_CONTEXT, 16);
        word(&self.driver.execute(&query, 0x110), 0x10) >> 1 & 3
    }
}

#[test]
pub(super) fn dropped_frames_have_causes() {
    let fabric = Fabric::new(1);
    let mut sender = Interface::with(0, &fabric, 7);
    let mut receiver = Interface::with(1, &fabric, 7);
    let allocate = Input::new(op::ALLOC_Q_COUNTER, 16);
    let counter_set = receiver.driver.create(allocate);
    let modify = Input::new(op::MODIFY_RQ, 0x110)
        .or(8, 0, receiver.rq.number)
        .put64(0x10, 1 << 3)
        .or(0x20, 20, 1)
        .or(0x2c, 24, counter_set);
    receiver.driver.execute(&modify, 16);
    let mut told = observe(&mut receiver.driver);
    let mut exchange = |receiver: &mut Interface| {
        sender.send(BROADCAST);
        receiver.driver.run();
        told()
    };
    assert_eq!(exchange(&mut receiver), []);
    // All receives.
    for _ in 0..7 {
        assert_eq!(exchange(&mut receiver), []);
    }
    let queue = Some(receiver.rq.number);
    let dropped = |queue, cause| Cause::Frame {
        queue,
        length: 60,
        cause,
    };
    let expected = [dropped(queue, FrameDrop::NoReceive)];
    assert_eq!(exchange(&mut receiver), expected);
    let counters = receiver.driver.hca.q_counters(counter_set).unwrap();
    assert_eq!(counters.out_of_buffer, 1);
    // A receive that is too short.
    let receive_segment = segment(20, receiver.driver.key, receiver.page + 4096);
    receiver
        .driver
        .post_recv(&mut receiver.rq, &receive_segment);
    let expected = [dropped(queue, FrameDrop::TooLong(20))];
    assert_eq!(exchange(&mut receiver), expected);
    // The reset state.
    let modify = Input::new(op::MODIFY_RQ, 0x110).or(8, 0, receiver.rq.number);
    receiver.driver.execute(&modify, 16);
    let expected = [dropped(queue, FrameDrop::State(0))];
    assert_eq!(exchange(&mut receiver), expected);
    let dropped = receiver.driver.hca.stats().ethernet_dropped;
    assert_eq!(dropped, 2);
}

#[test]
pub(super) fn frames_that_cannot_be_sent_have_causes() {
    let fabric = Fabric::new(1);
    let mut sender = Interface::with(0, &fabric, 7);
    let mut told = observe(&mut sender.driver);
    let dropped = |queue, length, cause| Cause::Frame {
        queue,
        length,
        cause,
    };
    // Longer than a packet can be.
    let mut segments = vec![0; 16];
    segments.extend_from_slice(&segment(0x8000, sender.driver.key, sender.page));
    (sender.driver).post(&mut sender.sq, 0x0a, SIGNALED, &segments);
    assert_eq!(told(), [dropped(None, 0x8000, FrameDrop::NoBuffer)]);
    // No rule of the receiver directs them to a queue.
    let mut receiver = Driver::with("roce", 1, &fabric, true);
    let mut told_there = observe(&mut receiver);
    sender.send(BROADCAST);
    receiver.run();
    assert_eq!(told_there(), [dropped(None, 60, FrameDrop::NoRule)]);
    // The receive queue is not in memory.
    let mut unmapped = Interface::with(2, &fabric, 7);
    let cqn = unmapped.cq.number;
    let rq = work_queue_with(&mut unmapped.driver, op::CREATE_RQ, cqn, 0, |input| {
        input.put64(0x110, 1 << 40)
    });
    let tir = Input::new(op::CREATE_TIR, 0x110)
        .or(0x3c, 0, rq.number)
        .or(0x44, 0, 7);
    let tir = unmapped.driver.create(tir);
    steer_to(&mut unmapped.driver, tir);
    unmapped.driver.write(rq.doorbell, &1_u32.to_be_bytes());
    let mut told_there = observe(&mut unmapped.driver);
    sender.send(BROADCAST);
    unmapped.driver.run();
    let causes = told_there();
    let expected = dropped(Some(rq.number), 60, FrameDrop::Unmapped);
    assert!(causes.contains(&expected), "{causes:?}");
    sender.driver.hca.set_cable(false);
    told();
    sender.send(BROADCAST);
    assert_eq!(told(), [dropped(None, 60, FrameDrop::LinkDown)]);
    // A link whose queue has no room for a frame.
    let link = LinkShape {
        rate: Some(1_000_000),
        queue: Some(0),
        ..LinkShape::NONE
    };
    let mut shaped = Interface::on(Driver::shaped("roce", 3, &fabric, link), 7);
    let mut told = observe(&mut shaped.driver);
    shaped.send(BROADCAST);
    assert_eq!(told(), [dropped(None, 60, FrameDrop::QueueFull(0))]);
}

#[test]
fn an_interface_receives_its_own_frames_if_its_tir_allows() {
    let mut interface = Interface::new(7);
    assert_eq!(interface.own_frames_received(), [0; 4]);
    interface.set_tir_loopback(UNICAST_FLAG);
    assert_eq!(interface.own_frames_received(), [0, 0, 1, 1]);
    interface.set_tir_loopback(MULTICAST_FLAG);
    assert_eq!(interface.own_frames_received(), [1, 1, 0, 0]);
    interface.set_tir_loopback(UNICAST_FLAG | MULTICAST_FLAG);
    assert_eq!(interface.own_frames_received(), [1; 4]);
    let stats = interface.driver.hca.stats();
    assert_eq!(
        (stats.bytes_gathered, stats.bytes_scattered),
        (16 * 60, 8 * 60)
    );
    interface.set_tir_loopback(0);
    assert_eq!(interface.own_frames_received(), [0; 4]);
    // The field select names another field.
    let modify = Input::new(op::MODIFY_TIR, 0x110)
        .or(8, 0, interface.tir)
        .or(0x44, 24, 3);
    interface.driver.execute(&modify, 16);
    assert_eq!(interface.own_frames_received(), [0; 4]);
}

#[test]
fn interfaces_receive_each_others_frames_if_the_port_allows() {
    let mut interface = Interface::new(8);
    assert_eq!(interface.own_frames_received(), [1; 4], "as after power-on");
    interface.set_port_loopback(UNICAST_FLAG | MULTICAST_FLAG, UNICAST_FLAG | MULTICAST_FLAG);
    assert_eq!(
        interface.disabled_port_loopback(),
        UNICAST_FLAG | MULTICAST_FLAG
    );
    assert_eq!(interface.own_frames_received(), [0; 4]);
    // The TIR's setting does not apply to frames of other domains.
    interface.set_tir_loopback(UNICAST_FLAG | MULTICAST_FLAG);
    assert_eq!(interface.own_frames_received(), [0; 4]);
    interface.set_tir_loopback(0);
    // The command changes the selected field alone.
    interface.set_port_loopback(UNICAST_FLAG, 0);
    assert_eq!(interface.disabled_port_loopback(), MULTICAST_FLAG);
    assert_eq!(interface.own_frames_received(), [0, 0, 1, 1]);
    interface.set_port_loopback(MULTICAST_FLAG, UNICAST_FLAG);
    assert_eq!(interface.disabled_port_loopback(), 0);
    assert_eq!(interface.own_frames_received(), [1; 4]);
    interface.set_port_loopback(0, UNICAST_FLAG | MULTICAST_FLAG);
    assert_eq!(interface.disabled_port_loopback(), 0);
    interface.set_port_loopback(MULTICAST_FLAG, MULTICAST_FLAG);
    assert_eq!(interface.disabled_port_loopback(), MULTICAST_FLAG);
    assert_eq!(interface.own_frames_received(), [0, 0, 1, 1]);
    interface
        .driver
        .execute(&Input::new(op::TEARDOWN_HCA, 16), 16);
    assert_eq!(interface.disabled_port_loopback(), 0, "after the teardown");
}

#[test]
fn a_receive_queue_removes_vlan_tags_unless_disabled() {
    let mut interface = Interface::new(8);
    let mut frame = [0xa5; 64];
    frame[..6].copy_from_slice(&interface.mac());
    frame[12..16].copy_from_slice(&[0x81, 0, 0x61, 0x23]);
    let modify = |interface: &mut Interface, disable: u32, selected: u32| {
        let modify = Input::new(op::MODIFY_RQ, 0x110)
            .or(8, 0, interface.rq.number)
            .or(0x14, 0, selected)
            .or(0x20, 20, 1)
            .or(0x20, 28, disable);
        interface.driver.execute(&modify, 16);
        let query = Input::new(op::QUERY_RQ, 16).or(8, 0, interface.rq.number);
        word(&interface.driver.execute(&query, 0x100), 0x20) >> 28 & 1
    };
    // As created; disabled; enabled by a command that does not select it; enabled.
    for (change, expected) in [
        (None, (60, 1, 0x6123)),
        (Some((1, 2)), (64, 0, 0)),
        (Some((0, 0)), (64, 0, 0)),
        (Some((0, 2)), (60, 1, 0x6123)),
    ] {
        if let Some((disable, selected)) = change {
            let disabled = modify(&mut interface, disable, selected);
            assert_eq!(disabled, u32::from(expected.1 == 0));
        }
        interface.driver.write(interface.page, &frame);
        let mut segments = vec![0; 16];
        segments.extend_from_slice(&segment(64, interface.driver.key, interface.page));
        (interface.driver).post(&mut interface.sq, 0x0a, SIGNALED, &segments);
        interface.driver.run();
        let entry = interface.driver.poll(&mut interface.cq).unwrap();
        let vlan = u16::from_be_bytes([entry[30], entry[31]]);
        assert_eq!((word(&entry, 44), entry[29] & 1, vlan), expected);
        assert_eq!(
            interface.driver.read(interface.page + 4096, 12),
            frame[..12]
        );
    }
}

#[test]
fn frames_share_a_wqe_of_a_striding_receive_queue() {
    const SIZE: u32 = 64;
    let mut interface = Interface::new(8);
    // 512 strides of 64 bytes, two bytes before each frame; 16 entries of 32 bytes.
    let (ring, doorbell) = (interface.driver.pages(1), interface.driver.pages(1));
    let memory = interface.driver.pages(8);
    let (cqn, pd) = (interface.cq.number, interface.driver.pd);
    let create = |kind: u32| {
        Input::new(op::CREATE_RQ, 0x118)
            .or(0x28, 0, cqn)
            .or(0x50, 28, kind)
            .or(0x58, 0, pd)
            .put64(0x60, doorbell)
            .or(0x70, 16, 5)
            .or(0x70, 0, 4)
            .or(0x74, 7, 1)
            .put64(0x110, ring)
    };
    let (list, cyclic) = (create(2), create(3));
    assert_ne!(interface.driver.command(&list, 16).0, 0);
    // The numbers of strides.
    for (field, status) in [(7, 0), (8, 3), (10, 3), (15, 3)] {
        let other = create(3).or(0x74, 8, field);
        assert_eq!(interface.driver.command(&other, 16).0, status, "{field}");
    }
    let rq = interface.driver.create(cyclic);
    let ready = Input::new(op::MODIFY_RQ, 0x110)
        .or(8, 0, rq)
        .or(0x20, 20, 1);
    interface.driver.execute(&ready, 16);
    // Each entry begins with a segment that is zero.
    for entry in 0..2u64 {
        let receive_segment = segment(SIZE * 512, interface.driver.key, memory);
        interface
            .driver
            .write(ring + entry * 32 + 16, &receive_segment);
    }
    interface.driver.write(doorbell, &2u32.to_be_bytes());
    let tir = Input::new(op::CREATE_TIR, 0x110)
        .or(0x3c, 0, rq)
        .or(0x44, 0, 7);
    let tir = interface.driver.create(tir);
    steer_to(&mut interface.driver, tir);
    // A frame of 60 bytes takes one stride, one of 64 bytes two. The first frame is the
    // short one, so that the last stride of the WQE is skipped.
    let send = |interface: &mut Interface, length: u32| {
        interface.driver.write(interface.page, &[0xa5; 64]);
        interface.driver.write(interface.page, &interface.mac());
        let mut segments = vec![0; 16];
        segments.extend_from_slice(&segment(length, interface.driver.key, interface.page));
        (interface.driver).post(&mut interface.sq, 0x0a, SIGNALED, &segments);
        interface.driver.run();
    };
    let mut used_strides = 0;
    for n in 0..257 {
        let length = if n == 0 { 60 } else { 64 };
        send(&mut interface, length);
        let count = if n == 0 { 1 } else { 2 };
        let entry = interface.driver.poll(&mut interface.cq).unwrap();
        let stride_fields = |entry: &[u8]| {
            let half = |at: usize| u16::from_be_bytes([entry[at], entry[at + 1]]);
            (half(2), half(60), word(entry, 44))
        };
        if n == 256 {
            assert_eq!(stride_fields(&entry), (0, 511, 1 << 31 | 1 << 16));
            let entry = interface.driver.poll(&mut interface.cq).unwrap();
            assert_eq!(stride_fields(&entry), (1, 0, 2 << 16 | 64));
            break;
        }
        assert_eq!(
            stride_fields(&entry),
            (0, used_strides, count << 16 | length)
        );
        let at = memory + u64::from(used_strides) * u64::from(SIZE) + 2;
        assert_eq!(interface.driver.read(at, 6), interface.mac());
        used_strides += count as u16;
    }
}

#[test]
fn the_reserved_lkey_requires_a_flag() {
    const RESERVED: u32 = 0x300;
    for (sends, receives, expected) in [
        (0, 0, ((13, 4), None)),
        (0, 1, ((13, 4), None)),
        (1, 0, ((0, 0), Some((14, 4)))),
        (1, 1, ((0, 0), Some((2, 0)))),
    ] {
        let mut interface = Interface::new(8);
        let driver = &mut interface.driver;
        let mut sent = driver.create_cq(4);
        let mut sq = work_queue_with(driver, op::CREATE_SQ, sent.number, 0, |input| {
            input.or(0x20, 31, sends)
        });
        let mut rq = work_queue_with(driver, op::CREATE_RQ, interface.cq.number, 0, |input| {
            input.or(0x20, 31, receives)
        });
        let tir = Input::new(op::CREATE_TIR, 0x110).or(0x3c, 0, rq.number);
        let tir = driver.create(tir);
        steer_to(driver, tir);
        let page = interface.page;
        driver.post_recv(&mut rq, &segment(2048, RESERVED, page + 4096));
        let mut segments = vec![0; 16];
        segments.extend_from_slice(&segment(60, RESERVED, page));
        driver.post(&mut sq, 0x0a, SIGNALED, &segments);
        let send_status = driver.poll(&mut sent).map(|entry| status(&entry));
        let recv_status = driver.poll(&mut interface.cq).map(|entry| status(&entry));
        assert_eq!((send_status, recv_status), (Some(expected.0), expected.1));
    }
}

#[test]
fn rules_have_at_most_the_reported_destinations() {
    let mut driver = Driver::new("roce");
    let query = Input::new(op::QUERY_HCA_CAP, 16).or(4, 0, 7 << 1 | 1);
    let capabilities = driver.execute(&query, 16 + 4096);
    assert_eq!(word(&capabilities, 16 + 0x50) & 0xff, 8, "the logarithm");
    let counter = driver.create(Input::new(op::ALLOC_FLOW_COUNTER, 16));
    let table = driver.create(Input::new(op::CREATE_FLOW_TABLE, 0x40));
    for (destinations, counters, status) in [(256, 256, 0), (257, 0, 8), (0, 257, 8)] {
        let rule = Input::new(op::SET_FLOW_TABLE_ENTRY, 0x340 + 8 * 600)
            .or(0x14, 0, table)
            .or(0x4c, 0, 0xc)
            .or(0x50, 0, destinations)
            .or(0x54, 0, counters);
        let list = (0..counters).map(|n| 0x340 + 8 * (destinations + n) as usize);
        let rule = list.fold(rule, |rule, at| rule.or(at, 0, counter));
        assert_eq!(driver.command(&rule, 16).0, status);
    }
}

impl Interface {
    /// Moves the send queue or the receive queue to a state.
    fn modify(&mut self, opcode: u16, number: u32, state: u32) -> u8 {
        let modify = Input::new(opcode, 0x110)
            .or(8, 0, number)
            .or(0x20, 20, state);
        self.driver.command(&modify, 16).0
    }

    /// Returns the completions of a queue: their status and the index of the WQE.
    fn completions(&self, cq: &mut Cq) -> Vec<((u8, u8), u32)> {
        std::iter::from_fn(|| self.driver.poll(cq))
            .map(|entry| (status(&entry), word(&entry, 60) >> 16))
            .collect()
    }
}

/// The WQE of a frame, which is readable or not.
fn send_segments(interface: &Interface, readable: bool) -> Vec<u8> {
    let key = interface.driver.key ^ u32::from(!readable);
    let mut segments = vec![0; 16];
    segments.extend_from_slice(&segment(60, key, interface.page));
    segments
}

#[test]
fn a_send_queue_flushes_in_the_error_state() {
    let mut interface = Interface::new(8);
    let driver = &mut interface.driver;
    let mut sent = driver.create_cq(4);
    let mut sq = work_queue_with(driver, op::CREATE_SQ, sent.number, 0, |input| {
        input.or(0x20, 28, 1)
    });
    let [readable_segments, unreadable_segments] =
        [true, false].map(|readable| send_segments(&interface, readable));
    let driver = &mut interface.driver;
    driver.write_wqe(&mut sq, 0x0a, 0, &readable_segments);
    driver.write_wqe(&mut sq, 0x0a, 0, &unreadable_segments);
    driver.write_wqe(&mut sq, 0x0a, 0, &readable_segments);
    driver.post(&mut sq, 0x0a, SIGNALED, &readable_segments);
    driver.post(&mut sq, 0x0a, SIGNALED, &readable_segments);
    let flushed = (13, 5);
    assert_eq!(
        interface.completions(&mut sent),
        [((13, 4), 1), (flushed, 2), (flushed, 3), (flushed, 4)]
    );
    assert_eq!(interface.driver.hca.stats().ethernet_sent, 1);
    // The reset discards a doorbell before it, and the doorbell record.
    let entry = interface
        .driver
        .write_wqe(&mut sq, 0x0a, SIGNALED, &readable_segments);
    let at = u64::from(interface.driver.uar) * 4096 + 0x800;
    interface.driver.hca.write(at, &entry[..8]);
    interface.driver.hca.flush_blue_flame();
    for state in [0, 1] {
        assert_eq!(interface.modify(op::MODIFY_SQ, sq.number, state), 0);
        interface.driver.run();
    }
    assert_eq!(interface.completions(&mut sent), []);
    sq.posted = 0;
    interface
        .driver
        .post(&mut sq, 0x0a, SIGNALED, &readable_segments);
    assert_eq!(interface.completions(&mut sent), [((0, 0), 0)]);
    // Posted, but the doorbell is not rung.
    interface
        .driver
        .write_wqe(&mut sq, 0x0a, 0, &readable_segments);
    assert_eq!(interface.modify(op::MODIFY_SQ, sq.number, 3), 0);
    interface.driver.run();
    assert_eq!(interface.completions(&mut sent), [(flushed, 1)]);
    assert_eq!(interface.driver.hca.stats().ethernet_sent, 2);
    assert_eq!(interface.modify(op::MODIFY_SQ, sq.number, 2), 3);
}

#[test]
fn a_send_queue_sends_only_if_it_is_ready() {
    let mut interface = Interface::new(8);
    let readable_segments = send_segments(&interface, true);
    for state in [0, 3] {
        let number = interface.sq.number;
        assert_eq!(interface.modify(op::MODIFY_SQ, number, state), 0);
        (interface.driver).post(&mut interface.sq, 0x0a, SIGNALED, &readable_segments);
        // Created without the flag by which it flushes.
        assert_eq!(interface.driver.hca.stats().ethernet_sent, 0);
    }
}

#[test]
fn a_receive_queue_flushes_in_the_error_state() {
    let mut interface = Interface::new(8);
    let driver = &mut interface.driver;
    let mut cq = driver.create_cq(4);
    let mut rq = work_queue_with(driver, op::CREATE_RQ, cq.number, 0, |input| {
        input.or(0x20, 18, 1)
    });
    let receive_segment = segment(2048, driver.key, interface.page + 4096);
    driver.post_recv(&mut rq, &receive_segment);
    driver.post_recv(&mut rq, &receive_segment);
    assert_eq!(interface.modify(op::MODIFY_RQ, rq.number, 3), 0);
    let flushed = (14, 5);
    assert_eq!(interface.completions(&mut cq), [(flushed, 0), (flushed, 1)]);
    interface.driver.post_recv(&mut rq, &receive_segment);
    interface.driver.hca.ring(rq.number, Queue::Receive);
    assert_eq!(interface.completions(&mut cq), [(flushed, 2)]);
    // Without the flag.
    let number = interface.rq.number;
    assert_eq!(interface.modify(op::MODIFY_RQ, number, 3), 0);
    assert!(interface.driver.poll(&mut interface.cq).is_none());
    assert_eq!(interface.modify(op::MODIFY_RQ, number, 2), 3);
}

#[test]
fn referenced_objects_are_not_destroyed() {
    const BUSY: u8 = 6;
    let mut driver = Driver::new("roce");
    let cqn = driver.create_cq(4).number;
    let tis = driver.create(Input::new(op::CREATE_TIS, 0xc0));
    let sq = work_queue(&mut driver, op::CREATE_SQ, cqn, tis).number;
    let [rq_of_tir, rq_of_rqt] =
        [0; 2].map(|_| work_queue(&mut driver, op::CREATE_RQ, cqn, 0).number);
    let rqt = Input::new(op::CREATE_RQT, 0x114)
        .or(0x38, 0, 1)
        .or(0x110, 0, rq_of_rqt);
    let rqt = driver.create(rqt);
    let tir = driver.create(Input::new(op::CREATE_TIR, 0x110).or(0x3c, 0, rq_of_tir));
    let rqt_tir = Input::new(op::CREATE_TIR, 0x110)
        .or(0x24, 28, 1)
        .or(0x40, 0, rqt);
    let rqt_tir = driver.create(rqt_tir);
    let counter = driver.create(Input::new(op::ALLOC_FLOW_COUNTER, 16));
    let change = Input::new(op::ALLOC_MODIFY_HEADER_CONTEXT, 0x18)
        .or(0xc, 0, 1)
        .or(0x10, 0, 0x100a_0000);
    let change = driver.create(change);
    let tables = [0; 2].map(|_| driver.create(Input::new(op::CREATE_FLOW_TABLE, 0x40)));
    let rule = |table| {
        Input::new(op::SET_FLOW_TABLE_ENTRY, 0x350)
            .or(0x14, 0, table)
            .or(0x4c, 0, 0x4c)
            .or(0x50, 0, 1)
            .or(0x54, 0, 1)
            .or(0x5c, 0, change)
            .or(0x340, 24, 2)
            .or(0x340, 0, tir)
            .or(0x348, 0, counter)
    };
    for table in tables {
        driver.execute(&rule(table), 16);
    }
    let referenced_by_rule = [
        Input::new(op::DESTROY_TIR, 16).or(8, 0, tir),
        Input::new(op::DEALLOC_FLOW_COUNTER, 16).or(8, 0, counter),
        Input::new(op::DEALLOC_MODIFY_HEADER_CONTEXT, 16).or(8, 0, change),
    ];
    let destroy = |opcode, number| Input::new(opcode, 16).or(8, 0, number);
    let others = [
        (op::DESTROY_RQ, rq_of_tir, op::DESTROY_TIR, tir),
        (op::DESTROY_RQT, rqt, op::DESTROY_TIR, rqt_tir),
        (op::DESTROY_RQ, rq_of_rqt, op::DESTROY_RQT, rqt),
        (op::DESTROY_TIS, tis, op::DESTROY_SQ, sq),
    ];
    // One rule is deleted, the other one goes with its table.
    let delete = [
        Input::new(op::DELETE_FLOW_TABLE_ENTRY, 0x40).or(0x14, 0, tables[0]),
        Input::new(op::DESTROY_FLOW_TABLE, 0x40).or(0x14, 0, tables[1]),
    ];
    for input in &delete {
        for in_use in &referenced_by_rule {
            assert_eq!(driver.command(in_use, 16).0, BUSY);
        }
        driver.execute(input, 16);
    }
    for in_use in &referenced_by_rule[1..] {
        driver.execute(in_use, 16);
    }
    for (opcode, number, user, by) in others {
        assert_eq!(driver.command(&destroy(opcode, number), 16).0, BUSY);
        driver.execute(&destroy(user, by), 16);
        if opcode != op::DESTROY_RQT {
            driver.execute(&destroy(opcode, number), 16);
        }
    }
}

#[test]
fn a_receive_queue_flushes_its_remaining_strides() {
    let mut interface = Interface::new(8);
    let driver = &mut interface.driver;
    let mut cq = driver.create_cq(4);
    // 512 strides of 64 bytes.
    let mut rq = work_queue_with(driver, op::CREATE_RQ, cq.number, 0, |input| {
        input.or(0x20, 18, 1).or(0x50, 28, 3)
    });
    let tir = driver.create(Input::new(op::CREATE_TIR, 0x110).or(0x3c, 0, rq.number));
    steer_to(driver, tir);
    let memory = driver.pages(8);
    // Each entry begins with a segment that is zero.
    let receive_segment = [vec![0; 16], segment(64 * 512, driver.key, memory)].concat();
    driver.post_recv(&mut rq, &receive_segment);
    driver.post_recv(&mut rq, &receive_segment);
    interface.send(interface.mac());
    let received = interface.driver.poll(&mut cq).map(|entry| status(&entry));
    assert_eq!(received, Some((2, 0)));
    assert_eq!(interface.modify(op::MODIFY_RQ, rq.number, 3), 0);
    for (index, first) in [(0, 1), (1, 0)] {
        let entry = interface.driver.poll(&mut cq).unwrap();
        assert_eq!(status(&entry), (14, 5));
        let half = |at: usize| u16::from_be_bytes([entry[at], entry[at + 1]]);
        assert_eq!((half(2), half(60)), (index, first));
        assert_eq!(word(&entry, 44) >> 16, 512 - u32::from(first));
    }
    assert!(interface.driver.poll(&mut cq).is_none());
}

#[test]
fn the_loopback_setting_of_the_port_overrides_the_tir() {
    let mut interface = Interface::new(7);
    interface.set_tir_loopback(UNICAST_FLAG | MULTICAST_FLAG);
    interface.set_port_loopback(UNICAST_FLAG | MULTICAST_FLAG, UNICAST_FLAG | MULTICAST_FLAG);
    assert_eq!(interface.own_frames_received(), [0; 4]);
    interface.set_port_loopback(UNICAST_FLAG | MULTICAST_FLAG, 0);
    assert_eq!(interface.own_frames_received(), [1; 4]);
}

#[test]
fn loopback_settings_do_not_affect_other_ports() {
    let fabric = Fabric::new(1);
    let mut a = Interface::with(0, &fabric, 7);
    let mut b = Interface::with(1, &fabric, 7);
    for interface in [&mut a, &mut b] {
        interface.set_port_loopback(UNICAST_FLAG | MULTICAST_FLAG, UNICAST_FLAG | MULTICAST_FLAG);
    }
    for to in [BROADCAST, MULTICAST, b.mac(), OTHER_ADDRESS] {
        a.send(to);
        assert_eq!((a.received(), b.received()), (0, 1), "{to:x?}");
    }
    a.send(a.mac());
    assert_eq!((a.received(), b.received()), (0, 0));
}

#[test]
fn ethernet_ports_have_the_loopback_capability() {
    for (profile, expected) in [("roce", 3), ("roce-umr", 3), ("ib", 0)] {
        let mut driver = Driver::new(profile);
        let query = Input::new(op::QUERY_HCA_CAP, 16).or(4, 0, 1);
        let capabilities = driver.execute(&query, 16 + 4096);
        assert_eq!(
            word(&capabilities, 16 + 0x7c) >> 29 & 3,
            expected,
            "{profile}"
        );
    }
}

/// Connects a queue pair to another one of the same port with RoCE v2.
fn connect(driver: &mut Driver, qp: u32, remote: u32, mac: [u8; 6], gid: u64) {
    let mac = mac.iter().fold(0, |mac, byte| mac << 8 | u64::from(*byte));
    driver.modify(op::RST2INIT_QP, qp, |input| input.or(0xa8, 13, 7));
    driver.modify(op::INIT2RTR_QP, qp, |input| {
        input
            .or(0x20, 29, 3)
            .or(0x2c, 0, remote)
            .or(0x34, 23, 1)
            .or(0x38, 0, 64)
            .put64(0x48, gid)
            .or(0x54, 0, (mac >> 32) as u32)
            .or(0x58, 0, mac as u32)
            .or(0xa8, 21, 4)
            .or(0xac, 0, 100)
    });
    driver.modify(op::RTR2RTS_QP, qp, |input| input.or(0x90, 0, 100));
}

#[test]
fn loopback_settings_do_not_affect_queue_pairs() {
    // The lower half of a GID of the port.
    const GID: u64 = 0xffff_c0a8_4e01;
    for disabled in [0, UNICAST_FLAG | MULTICAST_FLAG] {
        let mut interface = Interface::new(7);
        interface.set_port_loopback(UNICAST_FLAG | MULTICAST_FLAG, disabled);
        let mac = interface.mac();
        let driver = &mut interface.driver;
        let mut address = Input::new(op::SET_ROCE_ADDRESS, 0x30).put64(0x18, GID);
        address.0[0x22..0x28].copy_from_slice(&mac);
        driver.execute(&address.or(0x28, 0, 2), 16);
        let mut cq = driver.create_cq(4);
        let mut a = driver.create_qp(0, &cq, None);
        let mut b = driver.create_qp(0, &cq, None);
        connect(driver, a.number, b.number, mac, GID);
        connect(driver, b.number, a.number, mac, GID);
        let (page, key) = (driver.pages(1), driver.key);
        driver.write(page, b"to oneself");
        driver.post_recv(&mut b, &segment(64, key, page + 64));
        driver.post(&mut a, 0x0a, SIGNALED, &segment(10, key, page));
        assert_eq!(driver.read(page + 64, 10), b"to oneself", "off: {disabled}");
        for _ in 0..2 {
            let entry = driver.poll(&mut cq).expect("two completions");
            assert!(matches!(status(&entry), (0 | 2, 0)), "{entry:x?}");
        }
        assert_eq!(interface.received(), 0, "off: {disabled}");
    }
}
