//! The same seed gives the same frames.

use ringverbs_testkit::{Capture, Fabric, Link};

use crate::pair::pair;

/// Exchanges messages over a lossy wire.
fn exchange(seed: u64, link: Link) -> (Capture, u128) {
    let fabric = Fabric::builder().seed(seed).link(link).build(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    fabric.frames().chance(0.1).lose();
    fabric.frames().chance(0.1).corrupt();
    fabric.frames().chance(0.1).duplicate();
    fabric.frames().chance(0.1).reorder();
    for number in 0..40u8 {
        b.qp.receive(b.buffer(&[0; 3000]), number.into()).unwrap();
        a.qp.send(a.buffer(&[number; 3000]), number.into()).unwrap();
        if number % 4 == 3 {
            for _ in 0..4 {
                assert!(a.complete().result.is_ok());
                assert!(b.complete().result.is_ok());
            }
        }
    }
    (fabric.capture(), fabric.now().as_nanos())
}

#[test]
fn the_same_seed_gives_the_same_capture() {
    for link in [Link::Roce, Link::InfiniBand] {
        let (first, end) = exchange(7, link);
        assert!(first.frames.iter().any(|frame| frame.delivery.lost));
        let bytes = first.pcapng();
        for _ in 0..20 {
            let (again, end_again) = exchange(7, link);
            assert_eq!(again.pcapng(), bytes);
            assert!(again == first && end_again == end);
        }
        assert_ne!(exchange(8, link).0.pcapng(), bytes);
    }
}
