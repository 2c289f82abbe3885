//! Fabrics that several threads use, and several fabrics.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use ringverbs::cm::manager::PortSpace;
use ringverbs::cm::{Connector, Listener, Options};
use ringverbs::stream::{RdmaListener, RdmaStream, StreamOptions};
use ringverbs_testkit::{Fabric, Frame, Kind};

use crate::pair::{Side, pair};

#[test]
fn each_end_has_a_thread() {
    let fabric = Fabric::builder().threads().build(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    // Every third frame, so that no order of events uses up the retries.
    let mut count = 0;
    let third = move |_: &Frame| {
        count += 1;
        count % 3 == 0
    };
    fabric.frames().matching(third).lose();
    thread::scope(|scope| {
        let (ready, is_ready) = std::sync::mpsc::channel();
        scope.spawn(move || {
            for number in 0..20u8 {
                b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
                ready.send(()).unwrap();
                let mut received = b.complete();
                assert!(received.result.is_ok());
                assert_eq!(*received.take_buffer().unwrap(), [number; 8]);
            }
        });
        scope.spawn(move || {
            for number in 0..20u8 {
                is_ready.recv().unwrap();
                a.qp.send(a.buffer(&[number; 8]), 1).unwrap();
                assert!(a.complete().result.is_ok());
            }
        });
    });
    assert!(fabric.now() > Duration::from_millis(60));
}

/// Another thread's receive is late in real time; simulated time waits for it.
#[test]
fn time_waits_for_active_threads() {
    let fabric = Fabric::builder().threads().build(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    thread::scope(|scope| {
        scope.spawn(|| {
            b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
            assert!(b.complete().result.is_ok());
        });
        a.qp.send(a.buffer(&[1; 8]), 1).unwrap();
        assert!(a.complete().result.is_ok());
    });
}

#[test]
fn fabrics_are_independent() {
    thread::scope(|scope| {
        for seed in 0..8 {
            scope.spawn(move || {
                let fabric = Fabric::builder().seed(seed).build(2).unwrap();
                let (mut a, mut b) = pair(&fabric);
                let fault = fabric.frames().nth(1).lose();
                b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
                a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
                assert!(a.complete().result.is_ok());
                assert_eq!((fault.hits(), fabric.capture().count(Kind::Send)), (1, 2));
            });
        }
    });
}

#[test]
fn completion_channels_wait_in_simulated_time() {
    let fabric = Fabric::roce(2).unwrap();
    let (mut a, mut b) = (
        Side::new(&fabric, 0).unwrap(),
        Side::new(&fabric, 1).unwrap(),
    );
    let channel = a.qp.context().completion_channel().unwrap();
    a.cq =
        a.qp.context()
            .completion_queue()
            .channel(&channel)
            .build()
            .unwrap();
    let domain = a.domain.clone();
    a.qp = domain
        .queue_pair(ringverbs::Transport::Reliable, &a.cq)
        .build()
        .unwrap();
    ringverbs_testkit::connect(&mut a.qp, &mut b.qp).unwrap();
    fabric.frames().nth(1).lose();
    a.cq.arm(false).unwrap();
    b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
    a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
    assert!(channel.wait(None).unwrap().is_some());
    assert!(a.cq.poll_one().unwrap().unwrap().result.is_ok());
    let before = fabric.now();
    assert!(
        channel
            .wait(Some(Duration::from_secs(3600)))
            .unwrap()
            .is_none()
    );
    assert!(fabric.now() >= before + Duration::from_secs(3600));
}

fn address() -> SocketAddr {
    "127.0.0.1:7471".parse().unwrap()
}

#[test]
fn programs_connect_by_address() {
    let fabric = Fabric::builder().threads().build(2).unwrap();
    let (mut a, mut b) = (
        Side::new(&fabric, 0).unwrap(),
        Side::new(&fabric, 1).unwrap(),
    );
    let (here, there) = (fabric.node(0).device(), fabric.node(1).device());
    let listener = Listener::bind_on(&there, PortSpace::TCP, address(), 1).unwrap();
    let limit = Duration::from_secs(10);
    let accepted = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let request = listener.next_request(Some(limit)).unwrap().unwrap();
            request.prepare(&mut b.qp).unwrap();
            b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
            let connection = request.accept(&mut b.qp, &Options::default()).unwrap();
            accepted.wait();
            assert!(b.complete().result.is_ok());
            connection.wait_disconnected(Some(limit)).unwrap();
        });
        let connector = Connector::resolve_on(&here, PortSpace::TCP, None, address(), limit);
        let options = Options::default();
        let connection = connector
            .unwrap()
            .connect(&mut a.qp, &options, Some(limit))
            .unwrap();
        // The last message of the connection's setup has arrived: the next frame is the send's.
        accepted.wait();
        fabric.frames().from(fabric.node(0)).nth(1).lose();
        a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
        assert!(a.complete().result.is_ok());
        connection.disconnect(&mut a.qp).unwrap();
    });
    assert!(fabric.now() > Duration::from_millis(60));
}

#[test]
fn streams_run_on_a_background_thread() {
    let fabric = Fabric::builder().background().build(2).unwrap();
    let options = |node: usize| StreamOptions::new().device(&fabric.node(node).device());
    let listener = RdmaListener::bind_with(address(), &options(1)).unwrap();
    fabric.frames().chance(0.05).lose();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut bytes = [0; 20_000];
            stream.read_exact(&mut bytes).unwrap();
            stream.write_all(&bytes).unwrap();
        });
        let mut stream = RdmaStream::connect_with(address(), &options(0)).unwrap();
        stream.write_all(&[7; 20_000]).unwrap();
        let mut bytes = [0; 20_000];
        stream.read_exact(&mut bytes).unwrap();
        assert!(bytes == [7; 20_000]);
    });
}
