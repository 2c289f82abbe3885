//! The same seed gives the same frames.

use std::collections::BTreeSet;

use ringverbs_testkit::{Capture, Fabric, Kind, Link};

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

/// Exchanges messages of several packets between devices, with chaos if there is a seed; returns
/// the order of their completions, too.
fn chaotic(seed: Option<u64>) -> (Capture, u128, Vec<(bool, u64)>) {
    let builder = Fabric::builder();
    let builder = match seed {
        Some(seed) => builder.chaos(seed),
        None => builder,
    };
    let fabric = builder.build(2).unwrap();
    let (mut a, mut b) = pair(&fabric);
    let mut order = Vec::new();
    for number in 0..40u8 {
        b.qp.receive(b.buffer(&[0; 9000]), number.into()).unwrap();
        a.qp.send(a.buffer(&[number; 9000]), number.into()).unwrap();
        if number % 8 == 7 {
            for _ in 0..8 {
                for (is_receive, side) in [(false, &mut a), (true, &mut b)] {
                    let completion = side.complete();
                    assert!(completion.result.is_ok(), "{seed:?}: {completion:?}");
                    order.push((is_receive, completion.token));
                }
            }
        }
    }
    (fabric.capture(), fabric.now().as_nanos(), order)
}

#[test]
fn the_same_chaos_gives_the_same_capture() {
    let times: BTreeSet<u128> = (0..6)
        .map(|seed| {
            let first = chaotic(Some(seed));
            let again = chaotic(Some(seed));
            assert_eq!(again.0.pcapng(), first.0.pcapng(), "{seed}");
            assert!(again.1 == first.1 && again.2 == first.2, "{seed}");
            // Completions of a queue stay in order.
            for side in [false, true] {
                let tokens = first.2.iter().filter(|it| it.0 == side).map(|it| it.1);
                assert!(tokens.eq(0..40), "{seed}: {:?}", first.2);
            }
            first.1
        })
        .collect();
    assert!(times.len() > 3, "{times:?}");
}

/// Of the kinds of chaos, those that change which packets there are.
#[test]
fn chaos_loses_packets_and_refuses_receives() {
    let plain = chaotic(None).0;
    assert_eq!([Kind::RnrNak, Kind::Nak].map(|it| plain.count(it)), [0, 0]);
    let chaotic: Vec<Capture> = (0..16).map(|seed| chaotic(Some(seed)).0).collect();
    for (kind, decision) in [(Kind::RnrNak, "not-ready"), (Kind::Nak, "loss")] {
        assert!(chaotic.iter().any(|it| it.count(kind) > 0), "{decision}");
    }
}
