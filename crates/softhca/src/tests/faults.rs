//! Faults of a text on a device: what a driver sees, and how often they happen.

use std::sync::{Arc, Mutex};

use roce::transport::{self, Refusal};

use super::causes::observe;
use crate::cause::{Cause, FrameDrop};
use crate::command::opcode as op;
use crate::fault::{Action, Decision, FaultLog, Faults, Injector};
use crate::testing::driver::{Cq, Driver, Input, Qp, SIGNALED, remote, segment};

/// A driver with a connected pair of queue pairs, and faults.
struct Pair {
    driver: Driver,
    cq: Cq,
    a: Qp,
    b: Qp,
    memory: u64,
    counts: Arc<Mutex<Vec<u64>>>,
}

impl Pair {
    fn new(text: &str) -> Self {
        let mut driver = Driver::new("ib");
        let (cq, a, b) = driver.pair();
        let memory = driver.pages(1);
        let mut pair = Self {
            driver,
            cq,
            a,
            b,
            memory,
            counts: Arc::default(),
        };
        pair.inject(text);
        pair
    }

    fn inject(&mut self, text: &str) {
        let faults = Faults::parse(text).unwrap();
        let counts = Arc::clone(&self.counts);
        *counts.lock().unwrap() = vec![0; faults.list().len()];
        let count = Arc::new(move |at: usize| counts.lock().unwrap()[at] += 1);
        self.driver.hca.inject(&faults, |_| true, count);
    }

    /// Records decisions from now on.
    fn record(&mut self) -> Arc<Mutex<FaultLog>> {
        let log: Arc<Mutex<FaultLog>> = Arc::default();
        let kept = Arc::clone(&log);
        let add = move |it: &Decision| kept.lock().unwrap().add(0, None, it).unwrap();
        self.driver.hca.record_faults(Arc::new(add));
        log
    }

    fn counts(&self) -> Vec<u64> {
        self.counts.lock().unwrap().clone()
    }

    /// Sends a message; returns the opcodes and vendor-independent statuses of the completions.
    fn send(&mut self) -> Vec<(u8, u8)> {
        let segment = segment(8, self.driver.key, self.memory);
        self.driver.post_recv(&mut self.b, &segment);
        self.driver.post(&mut self.a, 0x0a, SIGNALED, &segment);
        self.completions(2)
    }

    /// Writes memory; returns as [`Pair::send`].
    fn write(&mut self) -> Vec<(u8, u8)> {
        let mut segments = remote(self.memory, self.driver.key);
        segments.extend(segment(8, self.driver.key, self.memory + 64));
        self.driver.post(&mut self.a, 0x08, SIGNALED, &segments);
        self.completions(1)
    }

    /// Moves time on until there are so many completions.
    fn completions(&mut self, count: usize) -> Vec<(u8, u8)> {
        let mut found = Vec::new();
        for _ in 0..1000 {
            self.driver.run();
            let now = &self.driver.hca.platform().now;
            let due = self.driver.hca.deadline().unwrap_or(0);
            now.set(now.get().max(due));
            if let Some(entry) = self.driver.poll(&mut self.cq) {
                let opcode = entry[63] >> 4;
                let status = if [13, 14].contains(&opcode) {
                    entry[55]
                } else {
                    0
                };
                found.push((opcode, status));
            }
            if found.len() == count {
                break;
            }
        }
        found.sort_unstable();
        found
    }
}

/// Completions of a send that has arrived.
const SENT: [(u8, u8); 2] = [(0, 0), (2, 0)];

#[test]
pub(super) fn packets_are_lost_delayed_repeated_and_corrupted() {
    let actions = [
        "lose",
        "delay 1ms",
        "delay 1ms..2ms",
        "duplicate",
        "corrupt",
        "reorder 1ms",
    ];
    for action in actions {
        for matcher in [
            "opcode=send nth=1",
            "opcode=ack nth=1",
            "way=in opcode=send nth=1",
        ] {
            let mut pair = Pair::new(&format!("{action} {matcher}"));
            let mut told = observe(&mut pair.driver);
            let before = pair.driver.hca.transport_counters();
            assert_eq!(pair.send(), SENT, "{action} {matcher}");
            assert_eq!(pair.send(), SENT, "{action} {matcher}");
            assert_eq!(pair.counts(), [1], "{action} {matcher}");
            let after = pair.driver.hca.transport_counters();
            let again = after.retransmitted - before.retransmitted;
            let is_lost = ["lose", "corrupt"].contains(&action);
            assert!(!is_lost || again > 0, "{action} {matcher}");
            let icrc = after.bad_icrc - before.bad_icrc;
            assert_eq!(icrc, u64::from(action == "corrupt"), "{matcher}");
            let dropped = told()
                .iter()
                .filter(|it| {
                    matches!(
                        it,
                        Cause::Frame {
                            cause: FrameDrop::Injected(1),
                            ..
                        }
                    )
                })
                .count();
            assert_eq!(dropped, usize::from(action == "lose"), "{matcher}");
        }
    }
}

/// Losses by chance are the same for a seed, and others for another one.
#[test]
fn chance_follows_the_seed() {
    let losses = |seed: u32| {
        let mut pair = Pair::new(&format!("lose opcode=send chance=0.3 seed={seed}"));
        (0..30)
            .map(|_| {
                let before = pair.counts()[0];
                pair.send();
                pair.counts()[0] - before
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(losses(7), losses(7));
    assert_ne!(losses(7), losses(8));
    let lost = losses(7).iter().sum::<u64>();
    assert!((1..30).contains(&lost), "{lost}");
}

#[test]
fn matchers_select_queue_pairs_and_peers() {
    for (matcher, expected) in [
        ("qp=#1", 1),
        ("qp=#2", 0),
        ("qp=#3", 0),
        ("qp=A", 1),
        ("qp=B", 0),
        ("peer=B", 1),
        ("peer=A", 0),
        ("qp=#2 way=in", 1),
        ("qp=B peer=A way=in", 1),
        ("opcode=write", 0),
        ("after=1s", 0),
        ("until=1s", 1),
        ("peer=fe80::77", 0),
    ] {
        let mut pair = Pair::new("");
        let matcher = matcher.replace('A', &pair.a.number.to_string());
        let matcher = matcher.replace('B', &pair.b.number.to_string());
        pair.inject(
            &format!("duplicate opcode=send {matcher}")
                .replace("opcode=send opcode=write", "opcode=write"),
        );
        assert_eq!(pair.send(), SENT);
        assert_eq!(pair.counts(), [expected], "{matcher}");
    }
}

#[test]
fn requests_are_refused() {
    for (action, status) in [
        ("nak invalid-request", 0x12),
        ("nak remote-access", 0x13),
        ("nak remote-operational", 0x14),
    ] {
        let mut pair = Pair::new(&format!("{action} nth=2"));
        let mut told = observe(&mut pair.driver);
        assert_eq!(pair.write(), [(0, 0)]);
        assert_eq!(pair.write(), [(13, status)], "{action}");
        let refused = told().iter().any(|it| {
            matches!(
                it,
                Cause::Transport {
                    cause: transport::Cause::Refused(Refusal::InjectedNak(_)),
                    ..
                }
            )
        });
        assert!(refused);
        assert_eq!(pair.counts(), [1]);
    }
    for action in ["nak sequence", "rnr", "slow-receiver 3ms"] {
        let mut pair = Pair::new(&format!("{action} nth=1"));
        let now = pair.driver.hca.platform().now.get();
        assert_eq!(pair.send(), SENT, "{action}");
        assert_eq!(pair.counts(), [1]);
        let took = pair.driver.hca.platform().now.get() - now;
        assert!(action != "slow-receiver 3ms" || took > 3_000_000, "{took}");
    }
    // A write without immediate data takes no receive.
    let mut pair = Pair::new("rnr");
    assert_eq!(pair.write(), [(0, 0)]);
    assert_eq!(pair.counts(), [0]);
}

#[test]
fn queues_and_links_fail_once() {
    for text in [
        "qp-error qp=#1 opcode=send",
        "qp-error qp=#1",
        "qp-error way=in opcode=ack",
    ] {
        let mut pair = Pair::new(text);
        pair.send();
        assert_eq!(pair.counts(), [1], "{text}");
        let a = pair.a.number;
        let state = pair.driver.hca.connection(a).unwrap().state;
        assert_eq!(state, transport::QpState::Error, "{text}");
    }
    let mut pair = Pair::new("link-down 100ms opcode=send nth=2");
    assert_eq!(pair.send(), SENT);
    let downs = |pair: &Pair| pair.driver.hca.stats().link_downed;
    assert_eq!(downs(&pair), 0);
    pair.send();
    assert_eq!(downs(&pair), 1);
    assert!(pair.driver.hca.port().link());
    // The next faults end it.
    pair.inject("link-down");
    pair.driver.run();
    assert!(!pair.driver.hca.port().link());
    pair.inject("");
    assert!(pair.driver.hca.port().link());
}

#[test]
fn commands_completions_and_events_are_lost() {
    let mut pair = Pair::new("fail ALLOC_PD nth=2\nfail NOP\nlose-completion nth=1");
    let status = |pair: &mut Pair| pair.driver.command(&Input::new(op::ALLOC_PD, 16), 16).0;
    assert_eq!([0; 3].map(|_| status(&mut pair)), [0, 1, 0]);
    pair.send();
    assert_eq!(pair.counts(), [1, 0, 1]);
}

/// The front end ends the device, or its process; until then nothing passes.
#[test]
fn the_end_of_the_device_is_the_front_ends() {
    let mut pair = Pair::new("device-fatal opcode=send\ndie opcode=send nth=2");
    assert_eq!(pair.send(), SENT);
    let next = |pair: &mut Pair| pair.driver.hca.next_effect().map(|it| it.action);
    assert_eq!(next(&mut pair), Some(Action::DeviceFatal));
    assert_eq!(next(&mut pair), None);
    assert_eq!(pair.send(), [(13, 0x15)]);
    assert_eq!(next(&mut pair), Some(Action::Die));
}

/// Packets that wait are not lost with their fault.
#[test]
fn faults_end() {
    let mut pair = Pair::new("delay 900s opcode=send");
    let segment = segment(8, pair.driver.key, pair.memory);
    pair.driver.post_recv(&mut pair.b, &segment);
    pair.driver.post(&mut pair.a, 0x0a, SIGNALED, &segment);
    pair.driver.run();
    assert_eq!(pair.counts(), [1]);
    pair.driver.hca.end_faults();
    assert_eq!(pair.completions(2), SENT);
    assert!(pair.driver.hca.injector().is_none());
}

#[test]
fn faults_are_added() {
    let mut pair = Pair::new("");
    for text in ["lose opcode=send nth=1", "fail NOP"] {
        pair.driver.hca.add_faults(&Faults::parse(text).unwrap());
    }
    let before = pair.driver.hca.transport_counters().retransmitted;
    assert_eq!(pair.send(), SENT);
    assert!(pair.driver.hca.transport_counters().retransmitted > before);
    assert_ne!(pair.driver.command(&Input::new(op::NOP, 16), 16).0, 0);
}

#[test]
fn a_verb_fails_with_the_error_of_the_fault_that_happens() {
    let mut injector = Injector::new([], Arc::new(|_| {}));
    let text = "fail ibv_create_qp ENOMEM nth=1\nfail ibv_create_qp EINVAL nth=2";
    injector.add(&Faults::parse(text).unwrap(), |_| true, 0);
    // ENOMEM and EINVAL.
    let mut verb = |name| injector.verb(0, name);
    assert_eq!(verb("ibv_create_cq"), None);
    assert_eq!(verb("ibv_create_qp"), Some((1, 12)));
    assert_eq!(verb("ibv_create_qp"), Some((2, 22)));
    assert_eq!(verb("ibv_create_qp"), None);
}

/// Runs messages and writes with faults, some of which are set between them, and others in the
/// place of those; returns what was recorded.
fn recorded(faults: [&str; 2]) -> String {
    let mut pair = Pair::new("");
    let log = pair.record();
    for text in faults {
        if !text.is_empty() {
            pair.inject(text);
        }
        for _ in 0..20 {
            assert_eq!(pair.send(), SENT, "{text}");
            assert_eq!(pair.write().len(), 1, "{text}");
        }
    }
    log.lock().unwrap().to_string()
}

#[test]
fn what_was_recorded_happens_again() {
    const SHORT: &str = "lose chance=0.2 seed=3\nduplicate way=in chance=0.2 seed=4\n\
        corrupt opcode=ack chance=0.1\nreorder 5us qp=#1 chance=0.1\nrnr chance=0.2\n\
        slow-receiver 3ms opcode=send nth=2\nnak sequence chance=0.1";
    for faults in [[SHORT, ""], ["", SHORT], [SHORT, "lose qp=#2 chance=0.3"]] {
        let first = recorded(faults);
        for action in ["lose", "duplicate", "corrupt", "reorder", "rnr", "nak"] {
            let found = first.lines().any(|it| it.starts_with(action));
            assert!(found, "{action}: {first}");
        }
        assert!(!first.contains("slow-receiver"), "{first}");
        assert_eq!(recorded([&first, ""]), first, "{faults:?}");
    }
    assert_eq!(recorded(["", ""]), "");
}

#[test]
fn calls_and_what_happens_once_are_recorded() {
    let mut pair = Pair::new("");
    let log = pair.record();
    let injector = pair.driver.hca.injector().unwrap();
    assert_eq!(injector.verb(0, "ibv_reg_mr"), None);
    assert_eq!(injector.registration(0, 10), None);
    pair.inject("fail ibv_reg_mr EIO nth=2\nmemlock 20\nlink-down 1ms opcode=send nth=2");
    let injector = pair.driver.hca.injector().unwrap();
    for _ in 0..3 {
        injector.verb(0, "ibv_reg_mr");
    }
    assert_eq!(injector.registration(0, 0), None);
    assert_eq!(injector.registration(0, 20), None);
    assert_eq!(injector.registration(0, 30), Some(2));
    assert_eq!(pair.send(), SENT);
    assert_eq!(pair.send(), SENT);
    pair.inject("link-down");
    pair.driver.run();
    pair.driver.hca.end_faults();
    let text = log.lock().unwrap().to_string();
    // Times depend on how often the driver runs the device.
    let lines = text.lines().map(|it| match it.split_once(" after=") {
        Some((line, _)) => line,
        None => it,
    });
    assert_eq!(
        *lines.collect::<Vec<_>>(),
        [
            "fail ibv_reg_mr EIO device=0 nth=3",
            "memlock 0 device=0 nth=3",
            "link-down 1ms device=0 qp=#1 opcode=send way=out nth=2",
            "link-down device=0",
            "link-up device=0",
        ]
    );
    assert_eq!(text.matches(" after=").count(), 2, "{text}");
}
