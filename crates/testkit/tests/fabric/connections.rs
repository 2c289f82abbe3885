//! Connections by address, whose messages cross the wire.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use ringverbs::cm::manager::{
    ConnParam, Event, EventChannel, EventKind, Id, PortSpace, Reason, RejectReason,
};
use ringverbs_testkit::{Capture, CmMessage, Fabric, Kind, Link};

/// Longer than the connection manager waits for an answer, in simulated time.
const LONG: Duration = Duration::from_secs(100);

fn next(channel: &EventChannel) -> Option<Event> {
    channel.wait(Some(LONG)).unwrap()
}

fn expect(channel: &EventChannel, kind: EventKind) -> Event {
    let event = next(channel).unwrap_or_else(|| panic!("no {kind:?}"));
    assert_eq!(event.kind(), kind, "{:?}", event.message().result());
    event
}

fn param(qp_num: u32) -> ConnParam<'static> {
    ConnParam {
        qp_num,
        ..ConnParam::default()
    }
}

/// Two nodes, of which the second listens.
struct World {
    fabric: Fabric,
    here: EventChannel,
    there: EventChannel,
    _listener: Id,
}

impl World {
    fn new(seed: u64, link: Link) -> Self {
        let fabric = Fabric::builder().seed(seed).link(link).build(2).unwrap();
        let [here, there] = [0, 1].map(|node| fabric.node(node).event_channel().unwrap());
        let listener = there.create_id(PortSpace::TCP).unwrap();
        listener.bind(Self::address()).unwrap();
        listener.listen(100).unwrap();
        Self {
            fabric,
            here,
            there,
            _listener: listener,
        }
    }

    fn address() -> SocketAddr {
        "127.0.0.1:7471".parse().unwrap()
    }

    /// Returns an id whose request was sent.
    fn ask(&self) -> Id {
        let id = self.here.create_id(PortSpace::TCP).unwrap();
        id.resolve_address(None, Self::address(), LONG).unwrap();
        expect(&self.here, EventKind::ADDR_RESOLVED);
        id.resolve_route(LONG).unwrap();
        expect(&self.here, EventKind::ROUTE_RESOLVED);
        id.connect(&param(1)).unwrap();
        id
    }

    fn requested(&self) -> Id {
        let mut event = expect(&self.there, EventKind::CONNECT_REQUEST);
        event.take_request().unwrap()
    }

    /// Connects and disconnects.
    fn connect(&self) {
        let a = self.ask();
        let b = self.requested();
        b.accept(&param(2)).unwrap();
        expect(&self.here, EventKind::CONNECT_RESPONSE);
        a.establish().unwrap();
        expect(&self.there, EventKind::ESTABLISHED);
        a.disconnect().unwrap();
        expect(&self.there, EventKind::DISCONNECTED);
        b.disconnect().unwrap();
        expect(&self.here, EventKind::DISCONNECTED);
    }

    fn reject(&self) {
        let _a = self.ask();
        self.requested().reject(b"no").unwrap();
        let event = expect(&self.here, EventKind::REJECTED);
        let refused = Err(Reason::Rejected(RejectReason::CONSUMER_DEFINED));
        assert_eq!(event.message().result(), refused);
    }

    /// Returns how often each message was sent.
    fn counts(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for (_, packet) in self.fabric.capture().packets() {
            if let Kind::Cm(message) = packet.kind {
                *counts.entry(format!("{message:?}")).or_default() += 1;
            }
        }
        counts
    }
}

#[test]
fn messages_cross_the_wire() {
    for link in [Link::Roce, Link::InfiniBand] {
        let world = World::new(3, link);
        world.connect();
        world.reject();
        let counts = world.counts();
        let expected = [
            ("Req", 2),
            ("Rep", 1),
            ("Rtu", 1),
            ("Rej", 1),
            ("Dreq", 1),
            ("Drep", 1),
        ];
        let expected = expected.map(|(name, count)| (name.to_owned(), count));
        assert_eq!(counts, BTreeMap::from(expected));
        let between = |frame: &ringverbs_testkit::Frame| frame.from + frame.to == 1;
        assert!(world.fabric.capture().frames.iter().all(between));
        assert!(world.fabric.now() < Duration::from_millis(1));
    }
}

/// Each message is lost twice, and repeated after 0.25 s and 0.75 s, or when the peer repeats its
/// own after 0.25 s.
#[test]
fn lost_messages_are_repeated() {
    const MESSAGES: [CmMessage; 5] = [
        CmMessage::Req,
        CmMessage::Rep,
        CmMessage::Rtu,
        CmMessage::Dreq,
        CmMessage::Drep,
    ];
    for message in MESSAGES {
        let world = World::new(3, Link::Roce);
        let fault = world
            .fabric
            .frames()
            .kind(Kind::Cm(message))
            .first(2)
            .lose();
        world.connect();
        assert_eq!(fault.hits(), 2, "{message:?}");
        let now = world.fabric.now();
        assert!(now > Duration::from_millis(250), "{message:?}: {now:?}");
        assert!(now < Duration::from_secs(6), "{message:?}: {now:?}");
    }
    let world = World::new(3, Link::Roce);
    let fault = world
        .fabric
        .frames()
        .kind(Kind::Cm(CmMessage::Rej))
        .first(2)
        .lose();
    world.reject();
    assert_eq!(fault.hits(), 2);
    assert!(
        next(&world.there).is_none(),
        "a repeated request was reported"
    );
}

#[test]
fn duplicates_are_harmless() {
    let world = World::new(3, Link::Roce);
    world.fabric.frames().duplicate();
    for _ in 0..10 {
        world.connect();
        world.reject();
    }
    assert!(next(&world.here).is_none());
    assert!(next(&world.there).is_none());
}

#[test]
fn a_dead_node_does_not_answer() {
    let world = World::new(3, Link::Roce);
    let (first, second) = (world.ask(), world.requested());
    second.accept(&param(2)).unwrap();
    expect(&world.here, EventKind::CONNECT_RESPONSE);
    first.establish().unwrap();
    expect(&world.there, EventKind::ESTABLISHED);
    world.fabric.node(1).die();
    let _unanswered = world.ask();
    let before = world.fabric.now();
    expect(&world.here, EventKind::UNREACHABLE);
    first.disconnect().unwrap();
    let event = expect(&world.here, EventKind::DISCONNECTED);
    assert!(event.message().result().is_err());
    assert!(world.fabric.now() >= before + Duration::from_secs(120));
}

fn lossy(seed: u64) -> Capture {
    let world = World::new(seed, Link::Roce);
    world.fabric.frames().chance(0.3).lose();
    world.fabric.frames().chance(0.1).duplicate();
    world
        .fabric
        .frames()
        .chance(0.1)
        .delay(Duration::from_millis(400));
    for _ in 0..5 {
        world.connect();
        world.reject();
    }
    world.fabric.capture()
}

/// 30% loss, duplicates and reordering.
#[test]
fn the_same_seed_gives_the_same_messages() {
    let first = lossy(7);
    assert!(first.frames.iter().filter(|it| it.delivery.lost).count() > 5);
    for _ in 0..5 {
        assert_eq!(lossy(7).pcapng(), first.pcapng());
    }
    for seed in 8..28 {
        assert_ne!(lossy(seed).pcapng(), first.pcapng());
    }
}
