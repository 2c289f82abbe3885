//! Links that mark frames: a congestion notification follows a mark, and the counters that
//! sysfs shows have both.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use device_testing::embedded::driver::*;
use ringverbs_embedded::roce::fabric::{Delivery, Tap};
use ringverbs_embedded::roce::packet::{CNP, LinkKind, Packet};
use ringverbs_embedded::softhca::card::Card;
use ringverbs_embedded::softhca::link_shape::LinkShape;
use ringverbs_embedded::{Drive, Embedded, GidTable, Network, sysfs};
use uverbs::QpType;

/// Counts of frames, by what they are.
#[derive(Debug, Default)]
struct Frames {
    marked: AtomicU64,
    notifications: AtomicU64,
}

struct Counter(Arc<Frames>);

impl Tap for Counter {
    fn transfer(&mut self, _: u64, _: usize, _: usize, packet: &mut Packet) -> Delivery {
        let start = match packet.kind() {
            LinkKind::Ethernet => 14,
            LinkKind::Ip | LinkKind::Ib => 0,
        };
        let header = &packet.frame()[start..];
        let (class, length) = match header[0] >> 4 {
            4 => (header[1], 20),
            _ => (header[0] << 4 | header[1] >> 4, 40),
        };
        if class & 3 == 3 {
            self.0.marked.fetch_add(1, Ordering::Relaxed);
        }
        if header[length + 8] == CNP {
            // DSCP 48 without ECN, as a ConnectX sends it.
            assert_eq!(class, 48 << 2);
            self.0.notifications.fetch_add(1, Ordering::Relaxed);
        }
        Delivery::default()
    }
}

/// Returns counters as sysfs shows them: marks, notifications sent and handled.
fn counters(device: &Embedded) -> [u64; 3] {
    let names = [
        "np_ecn_marked_roce_packets",
        "np_cnp_sent",
        "rp_cnp_handled",
    ];
    names.map(|name| {
        let path = format!("ports/1/hw_counters/{name}");
        let text = sysfs::content(device, None, &path).unwrap();
        text.trim().parse().unwrap()
    })
}

#[test]
fn a_notification_follows_a_mark() {
    const SIZE: usize = 1 << 20;
    let network = Network::new(Drive::Caller).unwrap();
    let frames = Arc::new(Frames::default());
    let link: LinkShape = "1Gbit,queue=256KiB,pause,ecn=16KiB".parse().unwrap();
    let [a, b] = [link, LinkShape::NONE].map(|link| {
        let device = network.device_of_card("roce", &Card::SOFTHCA, link, &GidTable::default());
        Host::new(&device.unwrap())
    });
    network
        .fabric()
        .set_tap(Some(Box::new(Counter(frames.clone()))));
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let (mut qa, qb) = (a.qp(QpType::RC, &mut cqa), b.qp(QpType::RC, &mut cqb));
    connect_pair(QpType::RC, (&qa, &a), (&qb, &b));
    let (from, to) = (a.memory(SIZE), b.memory(SIZE));
    from.set(SIZE - 8, &[7; 8]);
    post(&mut qa, 1, Operation::Write(&to, 0), from.sge(0, SIZE));
    assert_eq!(poll(&a, &mut cqa).status, 0);
    assert_eq!(to.get(SIZE - 8, 8), [7; 8]);
    let marked = frames.marked.load(Ordering::Relaxed);
    let notifications = frames.notifications.load(Ordering::Relaxed);
    assert!(marked > 0 && notifications > 0, "{frames:?}");
    assert!(notifications <= marked, "{frames:?}");
    assert_eq!(counters(&b.embedded), [marked, notifications, 0]);
    assert_eq!(counters(&a.embedded), [0, 0, notifications]);
    // A queue that pauses drops nothing.
    assert_eq!(a.embedded.queue_counters().local_ack_timeout_err, 0);
    assert_eq!(b.embedded.queue_counters().out_of_sequence, 0);
}
