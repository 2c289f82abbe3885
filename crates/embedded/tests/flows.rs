//! Matchers and their flows: what a driver can do wrong, and the frames that they select.

use embedded_testing::driver::*;
use embedded_testing::raw::*;
use libc::{EBUSY, EEXIST, EINVAL, ENOENT, EOPNOTSUPP};
use mlx5::ioctl::devx::DevxHandle;
use mlx5::ioctl::flow::{self, FlowActions, FlowMatcher, FlowTarget, MatcherHandle, MatcherInit};
use mlx5::ioctl::ids::*;
use ringverbs_embedded::{Drive, Embedded, Network};
use uverbs::{Context, Error, QpHandle, QpType};

const OK: i32 = 0;
/// Length of `fte_match_param`.
const MAX: usize = 0x200;

fn errno<T>(done: Result<T, Error>) -> i32 {
    match done {
        Ok(_) => OK,
        Err(Error::Refused { errno, .. }) => errno.raw(),
        Err(error) => panic!("{error}"),
    }
}

/// Returns match parameters with bytes at an offset.
fn parameters(at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut all = vec![0; 0x40];
    all[at..at + bytes.len()].copy_from_slice(bytes);
    all
}

const SOURCE_MAC: usize = 0;
const UDP_PORTS: usize = 0x1c;

/// A host with a raw packet queue pair in RTS.
fn packets(host: &Host) -> (Cq, Qp) {
    let mut cq = host.cq(64);
    let mut qp = host.qp(QpType::RAW_PACKET, &mut cq);
    start_packets(&qp);
    qp.recv.as_mut().unwrap().announce();
    (cq, qp)
}

fn matcher<'a>(
    context: &'a Context,
    mask: &[u8],
    priority: u16,
) -> Result<FlowMatcher<&'a Context>, Error> {
    let init = MatcherInit {
        mask,
        criteria: u8::from(mask.iter().any(|byte| *byte != 0)),
        priority,
        ..MatcherInit::default()
    };
    FlowMatcher::create(&context, &init)
}

fn actions(target: FlowTarget) -> FlowActions {
    FlowActions {
        target: Some(target),
        ..FlowActions::default()
    }
}

#[test]
fn flows_select_frames_by_the_bits_of_their_matcher() {
    const ROOM: usize = 128;
    let network = Network::new(Drive::Caller).unwrap();
    let embedded = network.strict_device("roce").unwrap();
    // Contexts of one device: its frames are passed between their transport domains.
    let (a, b) = (Host::new(&embedded), Host::new(&embedded));
    let (mut cq, mut sender) = packets(&a);
    let mut receivers = [packets(&b), packets(&b)];
    let (from, to) = (a.memory(64), b.memory(2 * ROOM));
    let context = &*b.context;
    let mask = parameters(SOURCE_MAC, &[0xff; 6]);
    let address = |last| parameters(SOURCE_MAC, &[2, 0, 0, 0, 0, last]);
    let by_address = matcher(context, &mask, 1).unwrap();
    let by_port = matcher(context, &parameters(UDP_PORTS, &[0xff, 0xff]), 0).unwrap();
    let all = matcher(context, &[0; MAX], 2).unwrap();
    let [first, second] = [0, 1].map(|at: usize| FlowTarget::Qp(receivers[at].1.object.handle()));
    let create = |matcher: &FlowMatcher<_>, value: &[u8], target| {
        flow::create(context, matcher.handle(), value, &actions(target)).unwrap()
    };
    let flows = [
        create(&by_address, &address(1), first),
        create(&by_address, &address(2), second),
        create(&by_address, &address(3), first),
        create(&by_address, &address(3), second),
        create(
            &by_port,
            &parameters(UDP_PORTS, &1234u16.to_be_bytes()),
            FlowTarget::Drop,
        ),
        create(&all, &[0; MAX], second),
    ];
    let mut arrivals = |source, port| {
        for (number, (_, qp)) in receivers.iter_mut().enumerate() {
            receive(qp, 5, to.sge(number * ROOM, ROOM));
        }
        from.set(0, &udp_frame(source, port));
        post(&mut sender, 9, Operation::Send, from.sge(0, 64));
        assert_eq!(poll(&a, &mut cq).status, 0);
        while b.embedded.drive() {}
        [0, 1].map(|at: usize| {
            let wc = poll_once(&mut receivers[at].0);
            if wc.is_some() {
                assert_eq!(to.get(at * ROOM, 64), udp_frame(source, port));
            }
            wc.is_some()
        })
    };
    assert_eq!(arrivals(1, 1), [true, false]);
    assert_eq!(arrivals(2, 1), [false, true]);
    assert_eq!(arrivals(3, 1), [true, true], "both flows");
    assert_eq!(arrivals(4, 1), [false, true], "the matcher of all frames");
    assert_eq!(
        arrivals(1, 1234),
        [false, false],
        "dropped, by its priority"
    );
    for flow in [flows[2], flows[4], flows[5]] {
        uverbs::flow::destroy(context, flow).unwrap();
    }
    assert_eq!(arrivals(3, 1), [false, true]);
    assert_eq!(arrivals(1, 1234), [true, false]);
    assert_eq!(arrivals(4, 1), [false, false]);
    assert_eq!(errno(by_address.destroy()), EBUSY);
    for flow in [flows[0], flows[1], flows[3]] {
        uverbs::flow::destroy(context, flow).unwrap();
    }
}

#[test]
fn bad_matchers_and_flows_are_refused_and_leave_nothing() {
    let embedded = Embedded::new("roce").unwrap();
    let host = Host::new(&embedded);
    let context = &*host.context;
    let before = embedded.objects();
    let mask = parameters(SOURCE_MAC, &[0xff; 6]);
    let init = MatcherInit {
        mask: &mask,
        criteria: 1,
        ..MatcherInit::default()
    };
    let inner = [vec![0; 0x80], vec![1]].concat();
    let long = [0; MAX + 4];
    for (case, init, expected) in [
        ("valid", init, OK),
        (
            "received frames",
            MatcherInit {
                table: Some(0),
                ..init
            },
            OK,
        ),
        (
            "sent frames",
            MatcherInit {
                table: Some(1),
                ..init
            },
            EOPNOTSUPP,
        ),
        (
            "sent frames, by a flag",
            MatcherInit {
                flags: 1 << 2,
                ..init
            },
            EOPNOTSUPP,
        ),
        (
            "both",
            MatcherInit {
                table: Some(0),
                flags: 1 << 2,
                ..init
            },
            EINVAL,
        ),
        (
            "another flag",
            MatcherInit {
                flags: 1 << 1,
                ..init
            },
            EINVAL,
        ),
        (
            "inner headers",
            MatcherInit {
                criteria: 1 << 2,
                ..init
            },
            EOPNOTSUPP,
        ),
        (
            "other fields",
            MatcherInit {
                mask: &inner,
                ..init
            },
            EOPNOTSUPP,
        ),
        (
            "fields that do not count",
            MatcherInit {
                mask: &inner,
                criteria: 0,
                ..init
            },
            OK,
        ),
        ("no mask", MatcherInit { mask: &[], ..init }, EINVAL),
        (
            "a long mask",
            MatcherInit {
                mask: &long,
                ..init
            },
            EINVAL,
        ),
        (
            "the last priority",
            MatcherInit {
                priority: u16::MAX,
                ..init
            },
            EINVAL,
        ),
    ] {
        assert_eq!(
            errno(FlowMatcher::create(&context, &init)),
            expected,
            "{case}"
        );
        assert_eq!(embedded.objects(), before, "{case}");
    }
    // Types: the number is in the field that is reserved otherwise.
    let mut command = Command::new(OBJECT_FLOW_MATCHER, METHOD_FLOW_MATCHER_CREATE);
    command
        .object(ATTR_FLOW_MATCHER_CREATE_HANDLE, 0)
        .input(ATTR_FLOW_MATCHER_MATCH_MASK, &mask)
        .attr(ATTR_FLOW_MATCHER_FLOW_TYPE, 2, 0)
        .input(ATTR_FLOW_MATCHER_MATCH_CRITERIA, &[1]);
    for (kind, length, expected) in [
        (0, 2, OK),
        (0, 0, EINVAL),
        (1, 2, EINVAL),
        (1, 0, EOPNOTSUPP),
        (4, 0, EOPNOTSUPP),
        (1 << 8, 2, EINVAL),
    ] {
        let mut changed = command.clone();
        let attr = changed.find(ATTR_FLOW_MATCHER_FLOW_TYPE);
        (attr.enum_or_reserved, attr.len) = (kind, length);
        // SAFETY: it names no address.
        let done = unsafe { changed.run(context) };
        assert_eq!(done.err().unwrap_or(OK), expected, "{kind} {length}");
    }

    let (mut cq, qp) = packets(&host);
    let datagrams = host.qp(QpType::UD, &mut cq);
    let to = FlowTarget::Qp(qp.object.handle());
    let matcher = matcher(context, &mask, 0).unwrap();
    let value = parameters(SOURCE_MAC, &[2, 0, 0, 0, 0, 9]);
    let good = actions(to);
    let before = embedded.objects();
    let counted = FlowActions {
        counter: Some((DevxHandle(7), None)),
        ..good
    };
    let changed = FlowActions {
        flow_actions: ([7; 3], 1),
        ..good
    };
    let object = FlowTarget::Devx(DevxHandle(4711));
    let datagrams = FlowTarget::Qp(datagrams.object.handle());
    for (case, value, actions, expected) in [
        ("valid", &value[..], good, OK),
        (
            "a tag",
            &value,
            FlowActions {
                tag: Some(0xff_ffff),
                ..good
            },
            OK,
        ),
        (
            "a long tag",
            &value,
            FlowActions {
                tag: Some(1 << 24),
                ..good
            },
            EINVAL,
        ),
        ("dropped", &value, actions(FlowTarget::Drop), OK),
        ("no destination", &value, FlowActions::default(), EINVAL),
        (
            "the next table",
            &value,
            actions(FlowTarget::DefaultMiss),
            EOPNOTSUPP,
        ),
        ("a datagram queue pair", &value, actions(datagrams), EINVAL),
        (
            "no queue pair",
            &value,
            actions(FlowTarget::Qp(QpHandle(4711))),
            ENOENT,
        ),
        ("no object", &value, actions(object), ENOENT),
        ("a counter", &value, counted, EOPNOTSUPP),
        ("an action", &value, changed, EOPNOTSUPP),
        ("no value", &[], good, EINVAL),
        ("a long value", &long, good, EINVAL),
        ("inner headers", &inner, good, EOPNOTSUPP),
    ] {
        let done = flow::create(context, matcher.handle(), value, &actions);
        if let Ok(flow) = &done {
            assert_eq!(errno(matcher.destroy()), EBUSY);
            uverbs::flow::destroy(context, *flow).unwrap();
        }
        assert_eq!(errno(done), expected, "{case}");
        assert_eq!(embedded.objects(), before, "{case}");
    }
    let nothing = flow::create(context, MatcherHandle(4711), &value, &good);
    assert_eq!(errno(nothing), ENOENT);
    // Flows of the same frames have the same tag, and are all dropped or none.
    let first = flow::create(context, matcher.handle(), &value, &good).unwrap();
    for (case, actions, expected) in [
        ("the same", good, OK),
        (
            "another tag",
            FlowActions {
                tag: Some(1),
                ..good
            },
            EEXIST,
        ),
        ("dropped", actions(FlowTarget::Drop), EEXIST),
    ] {
        let done = flow::create(context, matcher.handle(), &value, &actions);
        assert_eq!(errno(done), expected, "{case}");
    }
    uverbs::flow::destroy(context, first).unwrap();
    // The rest is closed with the context.
}

#[test]
fn the_driver_has_no_attributes_of_a_port() {
    let host = Host::single("roce");
    let mut answer = [0xff; 64];
    mlx5::ioctl::query_port(&host.context, 1, &mut answer).unwrap();
    assert_eq!(answer, [0; 64]);
    let other = mlx5::ioctl::query_port(&host.context, 2, &mut answer);
    assert_eq!(errno(other), EINVAL);
}

#[test]
fn infiniband_has_no_matchers() {
    let host = Host::single("ib");
    assert_eq!(errno(matcher(&host.context, &[1; 6], 0)), EOPNOTSUPP);
}
