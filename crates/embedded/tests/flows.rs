//! Matchers and their flows: what a driver can do wrong, and the frames that they select.

use device_testing::embedded::driver::*;
use device_testing::embedded::raw::*;
use libc::{EBUSY, EEXIST, EFAULT, EINVAL, ENOENT, EOPNOTSUPP};
use mlx5::ioctl::devx::{self, DevxHandle, DevxObject};
use mlx5::ioctl::flow::{self, FlowActions, FlowMatcher, FlowTarget, MatcherHandle, MatcherInit};
use mlx5::ioctl::ids::*;
use mlx5::{CounterPoint, DeviceContext, Devx};
use ringverbs_embedded::{Drive, Embedded, Network};
use roce::bits::{field, get64};
use softhca::command::opcode as op;
use uverbs::abi::ids::ATTR_CORE_OUT;
use uverbs::abi::write::{CMD_FLAG_EXTENDED, CreateFlow, FlowAttr, cmd};
use uverbs::flow::{FlowInit, Specs};
use uverbs::{Context, Counters, Error, FlowHandle, QpHandle, QpType};
use zerocopy::IntoBytes;

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
        counter: Some((DevxHandle(4711), None)),
        ..good
    };
    let changed = FlowActions {
        flow_actions: ([4711; 3], 2),
        ..good
    };
    let too_many = FlowActions {
        flow_actions: ([4711; 3], 3),
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
        ("the kernel", &value, actions(FlowTarget::DefaultMiss), OK),
        ("a datagram queue pair", &value, actions(datagrams), EINVAL),
        (
            "no queue pair",
            &value,
            actions(FlowTarget::Qp(QpHandle(4711))),
            ENOENT,
        ),
        ("no object", &value, actions(object), ENOENT),
        ("no counter", &value, counted, ENOENT),
        ("no actions", &value, changed, ENOENT),
        ("too many actions", &value, too_many, EINVAL),
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
        ("to the kernel", actions(FlowTarget::DefaultMiss), OK),
        (
            "the default tag",
            FlowActions {
                tag: Some(0),
                ..good
            },
            OK,
        ),
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

/// A sender, and a receiver whose frames can be counted.
struct Traffic {
    sender: (Cq, Qp),
    receiver: (Cq, Qp),
    memory: Memory,
    buffer: Memory,
    from: Host,
    to: Host,
}

impl Traffic {
    /// Creates both as contexts of a device. The receiver has DevX.
    fn new(embedded: &Embedded) -> Self {
        let from = Host::new(embedded);
        let context = std::sync::Arc::new(embedded.context().unwrap());
        let (_, device) = DeviceContext::open_with(&context, Devx::Needed).unwrap();
        let (pd, _) = mlx5::alloc_pd(&context).unwrap();
        let to = Host {
            embedded: embedded.clone(),
            context,
            device,
            pd,
            checks_complaints: true,
        };
        Self {
            sender: packets(&from),
            receiver: packets(&to),
            memory: from.memory(64),
            buffer: to.memory(64),
            from,
            to,
        }
    }

    fn qp(&self) -> QpHandle {
        self.receiver.1.object.handle()
    }

    /// Sends a frame, and returns it as it arrives, if it does.
    fn send(&mut self, frame: &[u8]) -> Option<Vec<u8>> {
        let (cq, qp) = &mut self.receiver;
        receive(qp, 5, self.buffer.sge(0, 64));
        self.memory.set(0, frame);
        post(
            &mut self.sender.1,
            9,
            Operation::Send,
            self.memory.sge(0, 64),
        );
        assert_eq!(poll(&self.from, &mut self.sender.0).status, 0);
        while self.to.embedded.drive() {}
        poll_once(cq).map(|_| self.buffer.get(0, 64))
    }
}

/// Adds an action that names an object.
fn name(specs: &mut Specs, kind: u32, handle: u32) {
    specs.add(kind, &[&handle.to_ne_bytes(), &[0; 4]]).unwrap();
}

const TAG_SPEC: u32 = 0x1000;
const DROP_SPEC: u32 = 0x1001;
const ACTION_SPEC: u32 = 0x1002;
const COUNT_SPEC: u32 = 0x1003;

/// Creates a flow of one source address.
fn flow_from(
    traffic: &Traffic,
    source: u8,
    mut specs: Specs,
    points: Option<&[CounterPoint]>,
) -> Result<FlowHandle, Error> {
    let mut parts = [[0; 16]; 2];
    parts[0][6..12].copy_from_slice(&[2, 0, 0, 0, 0, source]);
    parts[1][6..12].fill(0xff);
    specs.add(0x20, &[&parts[0], &parts[1]]).unwrap();
    let init = FlowInit {
        port: 1,
        ..FlowInit::default()
    };
    mlx5::create_flow(&traffic.to.context, traffic.qp(), &init, specs, points)
}

fn counted(counters: &Counters<&Context>) -> Specs {
    let mut specs = Specs::default();
    name(&mut specs, COUNT_SPEC, counters.handle().0);
    specs
}

#[test]
fn counters_of_flows_count_packets_and_bytes() {
    let network = Network::new(Drive::Caller).unwrap();
    let embedded = network.strict_device("roce").unwrap();
    let mut traffic = Traffic::new(&embedded);
    let context = std::sync::Arc::clone(&traffic.to.context);
    let context = &*context;
    let counters = Counters::create(&context).unwrap();
    let read = |values: &mut [u64]| errno(counters.read(values, 1));
    let mut values = [7; 3];
    assert_eq!(read(&mut values), EINVAL, "no flow uses them");
    let point = |description, index| CounterPoint { description, index };
    let points = [point(1, 0), point(0, 2)];
    let create = |traffic: &Traffic, source, points: Option<&[CounterPoint]>| {
        flow_from(traffic, source, counted(&counters), points)
    };
    assert_eq!(errno(create(&traffic, 1, None)), EINVAL, "of what");
    let other = [point(0, 0), point(2, 0)];
    assert_eq!(errno(create(&traffic, 1, Some(&other))), EINVAL);
    let first = create(&traffic, 1, Some(&points)).unwrap();
    let second = create(&traffic, 2, None).unwrap();
    assert_eq!(errno(create(&traffic, 3, Some(&points))), EINVAL, "again");
    // The frames of the same rule are counted once.
    let same = create(&traffic, 2, None).unwrap();
    for source in [1, 2, 2, 3] {
        let arrived = traffic.send(&udp_frame(source, 1));
        assert_eq!(arrived.is_some(), source != 3);
    }
    assert_eq!(read(&mut values), OK);
    assert_eq!(values, [3 * 64, 0, 3]);
    assert_eq!(read(&mut values[..2]), EINVAL);
    assert_eq!(errno(counters.read(&mut values, 2)), EINVAL, "a flag");
    assert_eq!(read(&mut [0; 100]), OK);
    uverbs::flow::destroy(context, first).unwrap();
    uverbs::flow::destroy(context, same).unwrap();
    assert!(traffic.send(&udp_frame(1, 1)).is_none());
    assert!(traffic.send(&udp_frame(2, 1)).is_some());
    let mut drops = counted(&counters);
    drops.add(DROP_SPEC, &[]).unwrap();
    name(&mut drops, TAG_SPEC, 5);
    let dropped = flow_from(&traffic, 3, drops, None).unwrap();
    assert!(traffic.send(&udp_frame(3, 1)).is_none());
    assert_eq!(read(&mut values), OK);
    assert_eq!(values, [5 * 64, 0, 5]);
    for flow in [second, dropped] {
        uverbs::flow::destroy(context, flow).unwrap();
    }
    assert_eq!(read(&mut values), EINVAL);
    assert_eq!(errno(create(&traffic, 1, None)), EINVAL);
    let again = create(&traffic, 1, Some(&[point(0, 0), point(0, 0)])).unwrap();
    assert_eq!((read(&mut values), values), (OK, [10, 0, 0]));
    // A rule for frames that match has one counter at most.
    let mut twice = counted(&counters);
    name(&mut twice, COUNT_SPEC, counters.handle().0);
    assert_eq!(errno(flow_from(&traffic, 4, twice, None)), EINVAL);
    let handle = counters.into_handle();
    let busy = destroy_counters(context, handle.0);
    assert_eq!(busy, EBUSY);
    uverbs::flow::destroy(context, again).unwrap();
    assert_eq!(destroy_counters(context, handle.0), OK);
    // The rest is closed with the context.
    let counters = Counters::create(&context).unwrap();
    flow_from(&traffic, 1, counted(&counters), Some(&points)).unwrap();
    counters.into_handle();
    drop(traffic);
}

fn destroy_counters(context: &Context, handle: u32) -> i32 {
    use uverbs::abi::ids::*;
    let mut command = Command::new(OBJECT_COUNTERS, METHOD_COUNTERS_DESTROY);
    command.object(ATTR_DESTROY_COUNTERS_HANDLE, handle.into());
    // SAFETY: it names no address.
    let done = unsafe { command.run(context) };
    done.err().unwrap_or(OK)
}

#[test]
fn the_driver_data_of_a_flow_are_checked() {
    let embedded = Embedded::new("roce").unwrap();
    let traffic = Traffic::new(&embedded);
    let context = &*traffic.to.context;
    let counters = Counters::create(&context).unwrap();
    let before = embedded.objects();
    let memory = [0u32, 0];
    let address = memory.as_ptr().expose_provenance() as u64;
    let data = |descriptions: u32, address: u64, count: u32| {
        let mut data = [0; 24];
        data[..4].copy_from_slice(&descriptions.to_ne_bytes());
        data[8..16].copy_from_slice(&address.to_ne_bytes());
        data[16..20].copy_from_slice(&count.to_ne_bytes());
        data.to_vec()
    };
    let good = data(1, address, 1);
    for (case, kind, data, expected) in [
        ("valid", COUNT_SPEC, good.clone(), OK),
        ("longer", COUNT_SPEC, [&good[..], &[0; 9]].concat(), OK),
        ("without counters", DROP_SPEC, good.clone(), OK),
        ("only a header", DROP_SPEC, vec![0; 8], OK),
        ("no description", COUNT_SPEC, vec![0; 8], EINVAL),
        ("a short header", DROP_SPEC, vec![0; 7], EOPNOTSUPP),
        ("cut off", COUNT_SPEC, good[..20].to_vec(), EINVAL),
        ("two", DROP_SPEC, data(2, address, 1), EINVAL),
        (
            "other data",
            COUNT_SPEC,
            [&good[..], &[1]].concat(),
            EOPNOTSUPP,
        ),
        ("many", COUNT_SPEC, data(1, address, 8192), EINVAL),
        ("no memory", COUNT_SPEC, data(1, 8, 1), EFAULT),
        ("around", COUNT_SPEC, data(1, u64::MAX - 3, 1), EFAULT),
        ("an unknown action", 0x1004, good.clone(), EINVAL),
        ("a handle of another type", ACTION_SPEC, Vec::new(), EINVAL),
    ] {
        let body = CreateFlow {
            qp_handle: traffic.qp().0,
            flow_attr: FlowAttr {
                size: if kind == DROP_SPEC { 8 } else { 16 },
                num_of_specs: 1,
                port: 1,
                ..FlowAttr::default()
            },
            ..CreateFlow::default()
        };
        let length = u32::from(body.flow_attr.size);
        let mut spec = [kind, length, counters.handle().0, 0].as_bytes().to_vec();
        spec.truncate(length as usize);
        let body = [body.as_bytes(), &spec].concat();
        let number = CMD_FLAG_EXTENDED | cmd::EX_CMD_CREATE_FLOW;
        let mut command = Command::write(number, &body[..], 8);
        if !data.is_empty() {
            command.driver(&data);
        }
        // SAFETY: the memory of the counters' description outlives the command.
        let done = unsafe { command.run(context) };
        if let Ok(attrs) = &done {
            let answer = attrs.iter().find(|it| it.attr_id == ATTR_CORE_OUT).unwrap();
            let at = std::ptr::with_exposed_provenance::<[u32; 2]>(answer.data as usize);
            // SAFETY: the command has written its answer there.
            let [_, flow] = unsafe { at.read_unaligned() };
            uverbs::flow::destroy(context, FlowHandle(flow)).unwrap();
        }
        assert_eq!(done.err().unwrap_or(OK), expected, "{case}");
        assert_eq!(embedded.objects(), before, "{case}");
    }
}

#[test]
fn flows_of_matchers_count_by_objects_of_devx() {
    let network = Network::new(Drive::Caller).unwrap();
    let embedded = network.strict_device("roce").unwrap();
    let mut traffic = Traffic::new(&embedded);
    let context = std::sync::Arc::clone(&traffic.to.context);
    let context = &*context;
    let mut alloc = [0; 16];
    field(0, 31, 16).put(&mut alloc, op::ALLOC_FLOW_COUNTER.into());
    let mut output = [0; 16];
    // SAFETY: it names no address.
    let counter = unsafe { DevxObject::create(&context, &alloc, &mut output) }.unwrap();
    let number = field(8, 31, 0).get(&output);
    let all = matcher(context, &[0; MAX], 2).unwrap();
    let create = |target, offset| {
        let actions = FlowActions {
            counter: Some((counter.handle(), offset)),
            ..actions(target)
        };
        flow::create(context, all.handle(), &[0; MAX], &actions)
    };
    let to = FlowTarget::Qp(traffic.qp());
    assert_eq!(errno(create(to, Some(1))), EINVAL, "the next counter");
    let flow = create(to, Some(0)).unwrap();
    assert!(traffic.send(&udp_frame(1, 1)).is_some());
    uverbs::flow::destroy(context, flow).unwrap();
    let flow = create(FlowTarget::Drop, None).unwrap();
    assert!(traffic.send(&udp_frame(1, 1)).is_none());
    let mut query = [0; 0x20];
    field(0, 31, 16).put(&mut query, op::QUERY_FLOW_COUNTER.into());
    field(0x1c, 31, 0).put(&mut query, number);
    let mut answer = [0; 0x20];
    // SAFETY: it names no address.
    let done = unsafe { devx::query(context, counter.handle().0, &query, &mut answer) };
    done.unwrap();
    assert_eq!((get64(&answer, 0x10), get64(&answer, 0x18)), (2, 128));
    // Nothing to count with.
    let wrong = FlowActions {
        counter: Some((DevxHandle(all.handle().0), None)),
        ..actions(to)
    };
    let done = flow::create(context, all.handle(), &[0; MAX], &wrong);
    assert_eq!(errno(done), EINVAL);
    assert_eq!(errno(counter.destroy()), EBUSY);
    uverbs::flow::destroy(context, flow).unwrap();
}

/// Returns an action that sets a field.
fn set(field: u32, length: u32, value: u32) -> Vec<u8> {
    let head = 1 << 28 | field << 16 | length;
    [head.to_be_bytes(), value.to_be_bytes()].concat()
}

const SET_MAC_HIGH: u32 = 1;
const SET_UDP_SOURCE: u32 = 0xb;

#[test]
fn flow_actions_change_headers() {
    let network = Network::new(Drive::Caller).unwrap();
    let embedded = network.strict_device("roce").unwrap();
    let mut traffic = Traffic::new(&embedded);
    let context = std::sync::Arc::clone(&traffic.to.context);
    let context = &*context;
    let port = flow::change_header(context, &set(SET_UDP_SOURCE, 16, 4000), 0).unwrap();
    let both = [
        set(SET_UDP_SOURCE, 16, 5000),
        set(SET_MAC_HIGH, 0, 0x0600_0000),
    ]
    .concat();
    let both = flow::change_header(context, &both, 0).unwrap();
    let by_address = matcher(context, &parameters(SOURCE_MAC, &[0xff; 6]), 1).unwrap();
    let value = parameters(SOURCE_MAC, &[2, 0, 0, 0, 0, 1]);
    let good = FlowActions {
        flow_actions: ([port.0, both.0, 0], 1),
        ..actions(FlowTarget::Qp(traffic.qp()))
    };
    let create =
        |actions: &FlowActions| flow::create(context, by_address.handle(), &value, actions);
    let first = create(&good).unwrap();
    assert_eq!(traffic.send(&udp_frame(1, 1)), Some(udp_frame(1, 4000)));
    let same = create(&good).unwrap();
    for (case, flow_actions, expected) in [
        ("no change", ([0; 3], 0), EEXIST),
        ("another change", ([both.0; 3], 1), EEXIST),
        ("two changes", ([port.0, both.0, 0], 2), EINVAL),
        ("not an action", ([by_address.handle().0; 3], 1), EINVAL),
        ("none", ([4711; 3], 1), ENOENT),
    ] {
        let changed = FlowActions {
            flow_actions,
            ..good
        };
        assert_eq!(errno(create(&changed)), expected, "{case}");
    }
    let mut specs = Specs::default();
    name(&mut specs, ACTION_SPEC, both.0);
    let second = flow_from(&traffic, 2, specs, None).unwrap();
    let arrived = traffic.send(&udp_frame(2, 1)).unwrap();
    let mut expected = udp_frame(2, 5000);
    expected[6] = 6;
    assert_eq!(arrived, expected);
    let mut unknown = Specs::default();
    name(&mut unknown, ACTION_SPEC, 4711);
    assert_eq!(errno(flow_from(&traffic, 3, unknown, None)), EINVAL);
    for flow in [first, second] {
        assert_eq!(errno(flow::destroy_action(context, port)), EBUSY);
        uverbs::flow::destroy(context, flow).unwrap();
    }
    flow::destroy_action(context, both).unwrap();
    assert_eq!(errno(flow::destroy_action(context, both)), ENOENT);
    assert_eq!(traffic.send(&udp_frame(1, 1)), Some(udp_frame(1, 4000)));
    uverbs::flow::destroy(context, same).unwrap();
    // The rest is closed with the context.
    create(&good).unwrap();
}

#[test]
fn bad_flow_actions_are_refused() {
    let embedded = Embedded::new("roce").unwrap();
    let mut host = Host::new(&embedded);
    host.checks_complaints = false;
    let before = embedded.objects();
    let good = set(SET_UDP_SOURCE, 16, 1);
    for (case, bytes, table, expected) in [
        ("the most", good.repeat(16), 0, OK),
        ("too many", good.repeat(17), 0, EOPNOTSUPP),
        (
            "more than the field can count",
            good.repeat(257),
            0,
            EOPNOTSUPP,
        ),
        ("not entire", good.repeat(2)[..12].to_vec(), 0, EINVAL),
        ("nothing", Vec::new(), 0, EINVAL),
        ("a field that does not change", set(0x50, 16, 1), 0, EINVAL),
        (
            "another action",
            vec![0x70, 0xb, 0, 0, 0, 0, 0, 0],
            0,
            EINVAL,
        ),
        ("sent frames", good.clone(), 1, EOPNOTSUPP),
        ("an unknown table", good.clone(), 9, EINVAL),
    ] {
        let done = flow::change_header(&host.context, &bytes, table);
        if let Ok(action) = done {
            flow::destroy_action(&host.context, action).unwrap();
        }
        assert_eq!(errno(done), expected, "{case}");
        assert_eq!(embedded.objects(), before, "{case}");
    }
    let tunnel = flow::reformat_packet(&host.context, 0, &[1; 64], 1);
    assert_eq!(errno(tunnel), EOPNOTSUPP);
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
    let change = flow::change_header(&host.context, &set(SET_UDP_SOURCE, 16, 1), 0);
    assert_eq!(errno(change), EOPNOTSUPP);
}
