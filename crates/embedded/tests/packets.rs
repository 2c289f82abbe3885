//! Raw packet queue pairs and flows: invalid commands, and teardown.
//! `crates/ringverbs/tests/packets.rs` sends frames.

use std::sync::Arc;

use device_testing::embedded::driver::*;
use device_testing::embedded::raw::*;
use libc::{EBUSY, EFAULT, EINVAL, ENOENT, ENOSPC, EOPNOTSUPP};
use mlx5::ioctl::devx::DevxObject;
use mlx5::{CompletionQueue, DeviceContext, Devx, PacketObjects, QueuePair};
use ringverbs_embedded::softhca::command::opcode as op;
use ringverbs_embedded::{Drive, Embedded, Network};
use uverbs::abi::ids::*;
use uverbs::abi::write::cmd::*;
use uverbs::abi::write::{CMD_FLAG_EXTENDED, CreateFlow, DestroyFlow, FlowAttr};
use uverbs::flow::{Flow, FlowInit, Specs};
use uverbs::{
    CqInit, Error, QpAttr, QpAttrMask as Mask, QpCap, QpHandle, QpInit, QpState, QpType, Udata,
};

const OK: i32 = 0;
const CREATE: u32 = CMD_FLAG_EXTENDED | EX_CMD_CREATE_FLOW;

fn errno<T>(result: Result<T, Error>) -> i32 {
    result.map_or_else(|error| error.errno().raw(), |_| OK)
}

/// The command for a queue pair of 4 receives and 16 blocks, and its driver data.
fn packet_qp(host: &Host, cq: &Cq, arena: &Arena) -> (Command, Vec<u8>) {
    let cq = u64::from(cq.object.handle().0);
    let mut command = create_qp(QpType::RAW_PACKET.0, 4);
    command
        .object(ATTR_CREATE_QP_PD_HANDLE, host.pd.0.into())
        .object(ATTR_CREATE_QP_SEND_CQ_HANDLE, cq)
        .object(ATTR_CREATE_QP_RECV_CQ_HANDLE, cq);
    let start = arena.address();
    let mut driver = vec![0; 56];
    for (at, address) in [(0, start), (8, start + 8192), (40, start + 4096)] {
        driver[at..at + 8].copy_from_slice(&address.to_ne_bytes());
    }
    for (at, word) in [
        (16, 16u32),
        (20, 4),
        (24, 4),
        (28, NAMES_UAR),
        (32, 5),
        (36, host.uar()),
    ] {
        driver[at..at + 4].copy_from_slice(&word.to_ne_bytes());
    }
    (command, driver)
}

fn create(host: &Host, command: &Command, driver: &[u8]) -> Result<u32, i32> {
    // SAFETY: addresses are those of an arena, which is longer alive, or unmapped.
    let made_of = unsafe { command.clone().driver(driver).run(&host.context) };
    made_of.map(|attrs| created(&attrs, ATTR_CREATE_QP_HANDLE))
}

#[test]
fn invalid_queue_pairs_are_rejected_and_leave_nothing() {
    let embedded = Embedded::new("roce").unwrap();
    let host = Host::new(&embedded);
    let (cq, arena, srq) = (host.cq(16), Arena::new(3), host.srq(4));
    let (command, driver) = packet_qp(&host, &cq, &arena);
    let before = (embedded.objects(), embedded.ranges());
    let with = |at: usize, bytes: &[u8]| {
        let mut driver = driver.clone();
        driver[at..at + bytes.len()].copy_from_slice(bytes);
        driver
    };
    for (what, driver, errno) in [
        ("as it should be", driver.clone(), OK),
        ("own frames", with(28, &[0xc0]), OK),
        ("an unknown flag", with(29, &[0x44]), EINVAL),
        ("dynamic connections", with(28, &[0x20]), EINVAL),
        ("no user index", with(32, &[0xff; 3]), EINVAL),
        ("17 blocks", with(16, &[17]), EINVAL),
        ("3 receives", with(20, &[3]), EINVAL),
        ("receives of 8 bytes", with(24, &[3]), EINVAL),
        ("records in between", with(8, &[4]), EINVAL),
        ("no records", with(8, &[0; 8]), EFAULT),
        ("no receive queue there", with(0, &[0; 8]), EFAULT),
        ("no send queue there", with(40, &[0; 8]), EFAULT),
        ("a send queue past the end", with(40, &[0xff; 8]), EINVAL),
        ("a UAR of nobody", with(37, &[1]), EINVAL),
        ("no UAR", with(29, &[0]), EINVAL),
    ] {
        let done = create(&host, &command, &driver);
        assert_eq!(done.err().unwrap_or(OK), errno, "{what}");
        if let Ok(handle) = done {
            uverbs::qp::destroy(&host.context, QpHandle(handle)).unwrap();
        }
        assert_eq!((embedded.objects(), embedded.ranges()), before, "{what}");
    }
    let shared = u64::from(srq.object.handle().0);
    let mut with_srq = command.clone();
    with_srq.object(ATTR_CREATE_QP_SRQ_HANDLE, shared);
    assert_eq!(create(&host, &with_srq, &driver), Err(EINVAL));
    // IB_UVERBS_QP_CREATE_SCATTER_FCS.
    let mut with_flags = command.clone();
    with_flags.u32(ATTR_CREATE_QP_FLAGS, 1 << 8);
    assert_eq!(create(&host, &with_flags, &driver), Err(EOPNOTSUPP));
    let infiniband = Host::single("ib");
    let cq = infiniband.cq(16);
    let (command, driver) = packet_qp(&infiniband, &cq, &arena);
    assert_eq!(create(&infiniband, &command, &driver), Err(EOPNOTSUPP));
}

/// Frames are carried in UDP datagrams, so raw packets are not supported.
#[test]
fn a_device_on_an_ip_address_has_no_raw_packets() {
    let network = Network::roce(Drive::Watch, "127.45.0.9").unwrap();
    let embedded = network.device("roce").unwrap();
    let host = Host::new(&embedded);
    let (cq, arena) = (host.cq(16), Arena::new(3));
    let (command, driver) = packet_qp(&host, &cq, &arena);
    assert_eq!(create(&host, &command, &driver), Err(EOPNOTSUPP));
    let attr = host.context.query_device_ex(uverbs::Udata::none()).unwrap();
    assert_eq!(attr.raw_packet_caps, 0);
    let on_a_network = Host::single("roce");
    let context = &on_a_network.context;
    let attr = context.query_device_ex(uverbs::Udata::none()).unwrap();
    assert_eq!(attr.raw_packet_caps, 5);
}

#[test]
fn states_are_those_of_raw_packets() {
    let host = Host::single("roce");
    let mut cq = host.cq(16);
    let qp = host.qp(QpType::RAW_PACKET, &mut cq);
    let to = |state, mask| {
        let attr = QpAttr {
            qp_state: state,
            port_num: 1,
            ..QpAttr::default()
        };
        errno(
            qp.object
                .modify(&attr, mask | Mask::STATE, uverbs::Udata::none()),
        )
    };
    let now = || qp.object.query(Mask::STATE).unwrap().0.qp_state;
    let none = Mask::empty();
    assert_eq!(to(QpState::INIT, none), EINVAL, "no port");
    assert_eq!(to(QpState::INIT, Mask::PORT | Mask::QKEY), EINVAL);
    assert_eq!(to(QpState::RTS, none), EINVAL);
    assert_eq!((to(QpState::INIT, Mask::PORT), now()), (OK, QpState::INIT));
    assert_eq!(to(QpState::RTR, Mask::AV), EINVAL);
    assert_eq!((to(QpState::RTR, none), now()), (OK, QpState::RTR));
    assert_eq!((to(QpState::RTS, none), now()), (OK, QpState::RTS));
    assert_eq!((to(QpState::ERR, none), now()), (OK, QpState::ERR));
    assert_eq!(to(QpState::INIT, Mask::PORT), EINVAL);
    assert_eq!((to(QpState::RESET, none), now()), (OK, QpState::RESET));
}

#[test]
fn work_requests_are_flushed_in_the_error_state() {
    const FLUSHED: u32 = 5;
    let host = Host::single("roce");
    let memory = host.memory(4096);
    let mut cq = host.cq(16);
    let mut qp = host.qp(QpType::RAW_PACKET, &mut cq);
    let attr = |qp_state| QpAttr {
        qp_state,
        port_num: 1,
        ..QpAttr::default()
    };
    modify(&qp, &attr(QpState::INIT), Mask::STATE | Mask::PORT);
    qp.recv.as_mut().unwrap().announce();
    receive(&mut qp, 1, memory.sge(0, 2048));
    receive(&mut qp, 2, memory.sge(0, 2048));
    modify(&qp, &attr(QpState::ERR), Mask::STATE);
    post(&mut qp, 3, Operation::Send, memory.sge(0, 64));
    for id in 1..=3 {
        let flushed = poll(&host, &mut cq);
        assert_eq!((flushed.status, flushed.wr_id), (FLUSHED, id));
    }
}

#[test]
fn invalid_flows_are_rejected() {
    let host = Host::single("roce");
    let mut cq = host.cq(16);
    let qp = host.qp(QpType::RAW_PACKET, &mut cq);
    let datagrams = host.qp(QpType::UD, &mut cq);
    let flow = |attr: FlowAttr, specs: &[u8], answer| {
        let fixed = CreateFlow {
            qp_handle: qp.object.handle().0,
            flow_attr: attr,
            ..CreateFlow::default()
        };
        let mut command = Command::new(OBJECT_DEVICE, METHOD_INVOKE_WRITE);
        let bytes = [zerocopy_bytes(&fixed), specs.to_vec()].concat();
        command.constant(ATTR_WRITE_CMD, CREATE.into());
        command
            .input(ATTR_CORE_IN, &bytes)
            .out(ATTR_CORE_OUT, answer);
        // SAFETY: it names no address.
        unsafe { command.run(&host.context) }.err().unwrap_or(OK)
    };
    let mut spec = vec![0; 40];
    spec[0] = 0x20;
    spec[4] = 40;
    let attr = FlowAttr {
        size: 40,
        num_of_specs: 1,
        port: 1,
        ..FlowAttr::default()
    };
    assert_eq!(flow(attr, &spec, 8), OK);
    assert_eq!(flow(attr, &spec, 4), ENOSPC);
    assert_eq!(flow(attr, &spec[..32], 8), EINVAL);
    for (what, changed, errno) in [
        ("another port", FlowAttr { port: 2, ..attr }, EINVAL),
        (
            "two headers",
            FlowAttr {
                num_of_specs: 2,
                ..attr
            },
            EINVAL,
        ),
        (
            "no header",
            FlowAttr {
                num_of_specs: 0,
                ..attr
            },
            EINVAL,
        ),
        (
            "more than there are",
            FlowAttr {
                num_of_specs: 11,
                ..attr
            },
            EINVAL,
        ),
        ("more bytes", FlowAttr { size: 48, ..attr }, EINVAL),
        ("fewer bytes", FlowAttr { size: 32, ..attr }, EINVAL),
        (
            "reserved bits",
            FlowAttr {
                reserved: [1, 0],
                ..attr
            },
            EINVAL,
        ),
        ("flags", FlowAttr { flags: 1, ..attr }, EOPNOTSUPP),
        ("a copy of all", FlowAttr { kind: 3, ..attr }, EOPNOTSUPP),
        (
            "the last priority",
            FlowAttr {
                priority: u16::MAX,
                ..attr
            },
            EINVAL,
        ),
        ("all that match", FlowAttr { kind: 1, ..attr }, EINVAL),
    ] {
        assert_eq!(flow(changed, &spec, 8), errno, "{what}");
    }
    for (what, at, byte, errno) in [
        ("an unknown header", 0, 0x50, EOPNOTSUPP),
        ("a short one", 4, 8, EINVAL),
        ("no length", 4, 0, EINVAL),
        ("reserved", 6, 1, EINVAL),
    ] {
        let mut changed = spec.clone();
        changed[at] = byte;
        assert_eq!(flow(attr, &changed, 8), errno, "{what}");
    }
    let init = FlowInit {
        port: 1,
        ..FlowInit::default()
    };
    let to = |qp| {
        errno(uverbs::flow::create(
            &host.context,
            qp,
            &init,
            Specs::default(),
            Udata::none(),
        ))
    };
    assert_eq!(to(datagrams.object.handle()), EINVAL);
    assert_eq!(to(QpHandle(4711)), ENOENT);
}

fn zerocopy_bytes(fixed: &CreateFlow) -> Vec<u8> {
    use zerocopy::IntoBytes as _;
    fixed.as_bytes().to_vec()
}

/// With DevX, objects belong to the user context, and the driver gets their numbers.
#[test]
fn a_devx_context_gets_the_object_numbers() {
    let embedded = Embedded::new("roce").unwrap();
    for devx in [Devx::Needed, Devx::No] {
        let context = Arc::new(embedded.context().unwrap());
        let (_, device) = DeviceContext::open_with(&context, devx).unwrap();
        let (pd, _) = mlx5::alloc_pd(&context).unwrap();
        let cq = CompletionQueue::create(
            &context,
            &device,
            &CqInit {
                cqe: 16,
                ..CqInit::default()
            },
        );
        let cq = cq.unwrap();
        let init = QpInit {
            qp_type: QpType::RAW_PACKET,
            pd: Some(pd),
            send_cq: Some(cq.object.handle()),
            recv_cq: Some(cq.object.handle()),
            cap: QpCap {
                max_send_wr: 4,
                max_recv_wr: 4,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            ..QpInit::default()
        };
        let qp = QueuePair::create(&context, &device, &init, None).unwrap();
        let PacketObjects {
            tir, tis, rq, sq, ..
        } = qp.packets;
        let told = [tir, tis, rq, sq].map(|number| number != 0);
        assert_eq!(told, [matches!(devx, Devx::Needed); 4]);
        if sq != 0 {
            assert_eq!(sq, qp.object.qp_num());
        }
        let flow = FlowInit {
            port: 1,
            ..FlowInit::default()
        };
        let handle = qp.object.handle();
        let flow = Flow::create(&context, handle, &flow, Specs::default()).unwrap();
        drop(flow);
        if rq != 0 {
            // While a table refers to the receive queue, destruction is partial.
            let mut table = vec![0; 0x114];
            table[..2].copy_from_slice(&op::CREATE_RQT.to_be_bytes());
            table[0x3b] = 1;
            table[0x110..].copy_from_slice(&rq.to_be_bytes());
            // SAFETY: it concerns no memory.
            let table = unsafe { DevxObject::create(&context, &table[..], &mut [0; 16]) };
            for _ in 0..2 {
                assert_eq!(errno(uverbs::qp::destroy(&context, handle)), EBUSY);
            }
            drop(table.unwrap());
        }
        drop((qp, cq));
        uverbs::pd::destroy(&context, pd).unwrap();
    }
    assert_eq!(embedded.objects(), 0);
}

#[test]
fn a_queue_pair_with_flows_is_in_use() {
    let embedded = Embedded::new("roce").unwrap();
    let host = Host::new(&embedded);
    let mut cq = host.cq(16);
    let qp = host.qp(QpType::RAW_PACKET, &mut cq);
    let other = host.qp(QpType::RAW_PACKET, &mut cq);
    let init = FlowInit {
        port: 1,
        ..FlowInit::default()
    };
    let flow = |qp: &Qp, last| {
        let specs = Specs::destination_mac([2, 0, 0, 0, 0, last]);
        Flow::create(&host.context, qp.object.handle(), &init, specs).unwrap()
    };
    let flows = [flow(&qp, 1), flow(&qp, 1), flow(&other, 1), flow(&qp, 2)];
    assert_eq!(errno(qp.object.destroy()), EBUSY);
    let bad = DestroyFlow {
        comp_mask: 1,
        flow_handle: flows[0].handle().0,
    };
    let number = CMD_FLAG_EXTENDED | EX_CMD_DESTROY_FLOW;
    // SAFETY: it names no address.
    let done = unsafe { Command::write(number, &bad, 0).run(&host.context) };
    assert_eq!(done.err(), Some(EINVAL));
    // Handles of queue pairs and of flows are distinguished.
    let handle = uverbs::FlowHandle(qp.object.handle().0);
    assert_eq!(errno(uverbs::flow::destroy(&host.context, handle)), EINVAL);
    for flow in &flows {
        assert_eq!(errno(qp.object.destroy()), EBUSY);
        flow.destroy().unwrap();
        assert_eq!(errno(flow.destroy()), EINVAL);
        let handle = flow.handle();
        assert_eq!(errno(uverbs::flow::destroy(&host.context, handle)), ENOENT);
    }
    qp.object.destroy().unwrap();
}

#[test]
fn closing_a_context_destroys_packet_queues() {
    let embedded = Embedded::new("roce").unwrap();
    for _ in 0..10 {
        let host = Host::new(&embedded);
        let mut cq = host.cq(4);
        let qp = host.qp(QpType::RAW_PACKET, &mut cq);
        let init = FlowInit {
            kind: 1,
            port: 1,
            ..FlowInit::default()
        };
        let handle = qp.object.handle();
        let flow = Flow::create(&host.context, handle, &init, Specs::default()).unwrap();
        // As at exit of a program: only the context is closed.
        let context = std::sync::Arc::clone(&host.context);
        std::mem::forget((flow, qp, cq, host));
        // SAFETY: nothing of the context is used after this.
        unsafe { context.kernel().close(context.fd()) }.unwrap();
        std::mem::forget(context);
    }
    assert_eq!(embedded.objects(), 0);
    // Only the event queues remain.
    assert_eq!(embedded.ranges(), 4);
}
