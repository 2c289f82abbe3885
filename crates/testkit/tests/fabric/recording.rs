//! Faults that happened by chance, recorded and repeated.

use std::time::Duration;

use ringverbs_testkit::{Capture, Fabric, Frame, Link};

use crate::pair::{Side, pair};

/// Observations of a run: time, device and bytes of each frame, and the time of its end.
#[derive(Debug, PartialEq)]
struct Run {
    frames: Vec<(Duration, usize, Vec<u8>)>,
    end: Duration,
}

/// Exchanges messages of several packets in both directions.
fn exchange(fabric: &Fabric) -> Run {
    let (mut a, mut b) = pair(fabric);
    for number in 0..30u8 {
        let send = |from: &mut Side, to: &mut Side| {
            to.qp.receive(to.buffer(&[0; 9000]), number.into()).unwrap();
            let message = from.buffer(&[number; 9000]);
            from.qp.send(message, number.into()).unwrap();
        };
        send(&mut a, &mut b);
        send(&mut b, &mut a);
        if number % 3 == 2 {
            for side in [&mut a, &mut b] {
                for _ in 0..6 {
                    assert!(side.complete().result.is_ok());
                }
            }
        }
    }
    let capture: Capture = fabric.capture();
    let of = |frame: &Frame| (frame.time, frame.from, frame.bytes.clone());
    Run {
        frames: capture.frames.iter().map(of).collect(),
        end: fabric.now(),
    }
}

/// Runs an exchange with faults by chance, and once more with what was recorded. Returns the
/// record.
fn repeats(link: Link, seed: u64, set: &dyn Fn(&Fabric)) -> String {
    let builder = || Fabric::builder().link(link).seed(seed);
    let fabric = builder().record_faults().build(2).unwrap();
    set(&fabric);
    let first = exchange(&fabric);
    let record = fabric.recorded_faults();
    let again = builder().record_faults().build(2).unwrap();
    again.inject(&record).unwrap();
    let second = exchange(&again);
    let counts: u64 = again.injected().iter().map(|(_, count)| count).sum();
    assert!(counts > 5, "{record}");
    assert_eq!(first.end, second.end, "{record}");
    assert_eq!(first.frames.len(), second.frames.len(), "{record}");
    assert!(first == second, "{record}");
    assert_eq!(again.recorded_faults(), record);
    // A run without faults is another one.
    assert_ne!(exchange(&builder().build(2).unwrap()), first);
    record
}

#[test]
fn recorded_faults_of_frames_happen_again() {
    for link in [Link::Roce, Link::InfiniBand] {
        for seed in [3, 7] {
            let record = repeats(link, seed, &|fabric| {
                fabric.frames().chance(0.03).lose();
                fabric.frames().chance(0.03).corrupt();
                fabric.frames().chance(0.03).duplicate();
                fabric.frames().chance(0.03).reorder();
                fabric.frames().chance(0.02).delay(Duration::from_millis(2));
            });
            for action in [
                "lose",
                "corrupt",
                "duplicate",
                "reorder 20us",
                "reorder 2ms",
            ] {
                let is_it = |line: &str| line.starts_with(&format!("{action} device="));
                assert!(record.lines().any(is_it), "{action}: {record}");
            }
        }
    }
}

#[test]
fn recorded_faults_of_a_text_happen_again() {
    let record = repeats(Link::Roce, 3, &|fabric| {
        let faults = "lose opcode=send chance=0.1 seed=5\nrnr device=1 chance=0.2 seed=6";
        fabric.inject(faults).unwrap();
        fabric.frames().chance(0.03).lose();
    });
    assert!(
        record.contains("\nrnr device=1 qp=#1 opcode=send nth="),
        "{record}"
    );
    assert!(!record.contains("\nrnr device=0"), "{record}");
    assert!(
        record.contains("\nlose device=0 qp=#1 opcode=send way=out nth="),
        "{record}"
    );
}

#[test]
fn counts_are_those_of_the_faults() {
    let fabric = Fabric::builder().record_faults().build(2).unwrap();
    let lost = fabric.frames().chance(0.1).lose();
    exchange(&fabric);
    let hits = lost.hits();
    assert!(hits > 5);
    let again = Fabric::roce(2).unwrap();
    again.inject(&fabric.recorded_faults()).unwrap();
    exchange(&again);
    let counts = again.injected();
    assert_eq!(counts.iter().map(|(_, count)| count).sum::<u64>(), hits);
    // Without a record.
    assert_eq!(again.recorded_faults(), "");
}
