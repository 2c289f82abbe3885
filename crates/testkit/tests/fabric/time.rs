//! Simulated time.

use std::time::{Duration, Instant};

use ringverbs_testkit::{Fabric, Kind};

use crate::pair::pair;

#[test]
fn a_retransmission_takes_simulated_time_only() {
    let fabric = Fabric::roce(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    let began = Instant::now();
    // Three messages of one packet each; the third is lost, with nothing behind it.
    let fault = fabric.frames().from(fabric.node(0)).nth(3).lose();
    for number in 0..3u8 {
        b.qp.receive(b.buffer(&[0; 8]), number.into()).unwrap();
        a.qp.send(a.buffer(&[number; 8]), number.into()).unwrap();
    }
    for number in 0..3u8 {
        let mut received = b.complete();
        assert!(received.result.is_ok());
        assert_eq!(*received.take_buffer().unwrap(), [number; 8]);
        assert!(a.complete().result.is_ok());
    }
    assert_eq!(fault.hits(), 1);
    assert!(fabric.now() > Duration::from_millis(60), "{fabric:?}");
    assert!(began.elapsed() < Duration::from_secs(1));
    assert_eq!(fabric.capture().count(Kind::Send), 4);
}

#[test]
fn poll_for_ends_in_simulated_time() {
    let fabric = Fabric::infiniband(2).unwrap();
    let (mut a, _b) = pair(&fabric);
    let began = Instant::now();
    let hour = Duration::from_secs(3600);
    assert!(a.cq.poll_for(hour).unwrap().is_none());
    assert!((hour..hour + Duration::from_secs(1)).contains(&fabric.now()));
    assert!(began.elapsed() < Duration::from_secs(1));
}
