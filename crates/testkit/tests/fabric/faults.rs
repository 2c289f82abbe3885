//! Faults of wires and nodes, as a program sees them.

use std::time::Duration;

use ringverbs::AsyncEventType;
use ringverbs::completion::Status;
use ringverbs::qp::State;
use ringverbs_testkit::{Fabric, Fault, Frames, Kind, assert_success, connect};

use crate::pair::{LONG, Side, pair};

/// Sends a message of several packets from a to b, with a fault; returns whether it
/// arrived.
fn send_with(set: impl FnOnce(Frames) -> Fault) -> (Fabric, Fault) {
    let fabric = Fabric::roce(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    let fault = set(fabric.frames().from(fabric.node(0)));
    let message: Vec<u8> = (0..10_000u32).map(|n| n as u8).collect();
    b.qp.receive(b.buffer(&[0; 10_000]), 1).unwrap();
    a.qp.send(a.buffer(&message), 2).unwrap();
    assert!(a.complete().result.is_ok());
    let mut received = b.complete();
    assert!(received.result.is_ok());
    assert!(*received.take_buffer().unwrap() == message[..]);
    (fabric, fault)
}

#[test]
fn frames_are_lost_delayed_reordered_duplicated_and_corrupted() {
    // A message of 10,000 bytes has packets of up to 1024 or 4096 bytes.
    let (fabric, fault) = send_with(|frames| frames.nth(2).lose());
    assert_eq!(fault.hits(), 1);
    // A later packet reveals the gap at once.
    assert_eq!(fabric.capture().count(Kind::Nak), 1);
    let (fabric, _) = send_with(|frames| frames.nth(2).corrupt());
    assert_eq!(fabric.capture().count(Kind::Nak), 1);
    let (fabric, _) = send_with(|frames| frames.nth(2).reorder());
    assert_eq!(fabric.capture().count(Kind::Nak), 1);
    let (fabric, fault) = send_with(Frames::duplicate);
    assert!(fault.hits() >= 3);
    assert_eq!(fabric.capture().count(Kind::Nak), 0);
    let second = Duration::from_millis(50);
    let (fabric, _) = send_with(|frames| frames.delay(second));
    assert!(fabric.now() >= second);
}

#[test]
fn lost_acknowledgements_are_repaired_when_healed() {
    let fabric = Fabric::infiniband(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    let acks = fabric.frames().from(fabric.node(1)).kind(Kind::Ack).lose();
    b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
    a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
    // It arrives once, but the sender gets no acknowledgement.
    assert!(b.complete().result.is_ok());
    assert!(a.cq.poll_for(Duration::from_millis(100)).unwrap().is_none());
    assert!(acks.hits() >= 2);
    acks.heal();
    assert!(a.complete().result.is_ok());
    assert!(b.cq.poll_for(LONG).unwrap().is_none());
}

#[test]
fn a_sender_waits_for_a_slow_receiver() {
    let fabric = Fabric::roce(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
    fabric.node(1).hold_receives(3);
    a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
    assert!(a.complete().result.is_ok());
    assert!(b.complete().result.is_ok());
    assert_eq!(fabric.capture().count(Kind::RnrNak), 3);
}

#[test]
fn nodes_take_faults_of_a_text() {
    let fabric = Fabric::roce(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    let [sender, receiver] = [0, 1].map(|node| fabric.node(node));
    let error = sender.inject("lose\nlose nth=x").unwrap_err();
    assert_eq!((error.line, error.column), (2, 10));
    assert_eq!(sender.injected(), []);
    sender.inject("lose opcode=send nth=1..2").unwrap();
    receiver.inject("rnr nth=2\nduplicate").unwrap();
    for number in 0..2 {
        b.qp.receive(b.buffer(&[0; 8]), number).unwrap();
        a.qp.send(a.buffer(&[5; 8]), number).unwrap();
        assert!(a.complete().result.is_ok());
        assert!(b.complete().result.is_ok());
    }
    let expected = [("lose opcode=send nth=1..2".to_owned(), 2)];
    assert_eq!(sender.injected(), expected);
    assert_eq!(fabric.capture().count(Kind::RnrNak), 2, "one, twice");
    assert_eq!(receiver.injected()[0], ("rnr nth=2".to_owned(), 1));
    receiver.end_injected();
    assert_eq!(receiver.injected(), []);
}

#[test]
fn a_dead_peer_exhausts_retries() {
    let fabric = Fabric::roce(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
    fabric.node(1).die();
    a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
    let failure = a.complete().result.unwrap_err();
    assert_eq!(failure.status, Status::RETRY_EXC_ERR);
    assert!(b.cq.poll_for(LONG).unwrap().is_none());
    // The host comes back; a new connection works.
    fabric.node(1).revive();
    let mut again = Side::new(&fabric, 0).unwrap();
    let mut there = Side::new(&fabric, 1).unwrap();
    connect(&mut again.qp, &mut there.qp).unwrap();
    there.qp.receive(there.buffer(&[0; 8]), 1).unwrap();
    again.qp.send(again.buffer(&[6; 8]), 2).unwrap();
    assert!(again.complete().result.is_ok());
}

#[test]
fn a_link_goes_down_and_comes_up() {
    let fabric = Fabric::roce(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    let events = b.qp.context().async_events();
    fabric.node(1).link_down();
    fabric.settle();
    let event = events.try_event().unwrap().unwrap();
    assert_eq!(event.event, AsyncEventType::PORT_ERR);
    b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
    a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
    assert!(a.cq.poll_for(Duration::from_millis(100)).unwrap().is_none());
    fabric.node(1).link_up();
    assert!(a.complete().result.is_ok());
    let event = events.try_event().unwrap().unwrap();
    assert_eq!(event.event, AsyncEventType::PORT_ACTIVE);
}

#[test]
fn a_queue_pair_fails() {
    let fabric = Fabric::roce(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
    assert!(fabric.node(1).fail_queue_pair(&b.qp));
    let failure = b.complete().result.unwrap_err();
    assert_eq!(failure.status, Status::WR_FLUSH_ERR);
    assert_eq!(b.qp.query().unwrap().qp_state, State::ERR);
    a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
    let failure = a.complete().result.unwrap_err();
    assert_eq!(failure.status, Status::RETRY_EXC_ERR);
}

#[test]
fn a_device_fails() {
    let fabric = Fabric::roce(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    let events = b.qp.context().async_events();
    b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
    fabric.node(1).fail();
    let event = events.try_event().unwrap().unwrap();
    assert_eq!(event.event, AsyncEventType::DEVICE_FATAL);
    assert!(events.try_event().unwrap_err().is_device_gone());
    assert!(b.qp.set_error().unwrap_err().is_device_gone());
    assert!(b.domain.alloc(64).unwrap_err().is_device_gone());
    assert!(b.cq.poll_until_one().unwrap_err().is_device_gone());
    a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
    let failure = a.complete().result.unwrap_err();
    assert_eq!(failure.status, Status::RETRY_EXC_ERR);
    // Everything there was destroyed with the device.
    assert_eq!(fabric.node(1).objects(), 0);
    drop(b);
}

/// Returns what an assertion about a send says.
fn said_of_send(a: &mut Side) -> String {
    a.qp.send(a.buffer(&[5; 64]), 2).unwrap();
    let completion = a.complete();
    let context = a.qp.context().clone();
    let asserts = std::panic::AssertUnwindSafe(|| assert_success(&context, &completion));
    match std::panic::catch_unwind(asserts) {
        Ok(()) => String::new(),
        Err(said) => *said.downcast::<String>().unwrap(),
    }
}

#[test]
fn assertions_say_what_the_other_end_has_found() {
    for fabric in [Fabric::roce(2), Fabric::infiniband(2)] {
        let fabric = fabric.unwrap();
        let connected = || pair(&fabric);
        let (mut a, mut b) = connected();
        b.qp.receive(b.buffer(&[0; 64]), 1).unwrap();
        assert_eq!(said_of_send(&mut a), "");
        let mut short = b.domain.alloc(16).unwrap().into_buffers(16);
        b.qp.receive(short.next().unwrap(), 1).unwrap();
        let said = said_of_send(&mut a);
        let parts = [
            "Send: ",
            "the peer refused it: invalid request; the other end: queue pair 0x",
            "a message of 64 bytes or more does not fit into the receive of 16",
        ];
        for part in parts {
            assert!(said.contains(part), "no {part}: {said}");
        }
        // One end is connected, the other one in INIT.
        let (mut a, b) = (
            Side::new(&fabric, 0).unwrap(),
            Side::new(&fabric, 1).unwrap(),
        );
        let here = a.qp.context().local_address(1).unwrap();
        let there = b.qp.context().local_address(1).unwrap();
        let peer = b.qp.endpoint(&there);
        a.qp.connect(&here, &peer).unwrap();
        let said = said_of_send(&mut a);
        assert!(said.contains("no answer of the peer after "), "{said}");
        let state = format!("the other end: queue pair {:#x}: it is in ", b.qp.qp_num());
        assert!(said.contains(&state), "{said}");
    }
}
