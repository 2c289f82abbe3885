//! Work queues, indirection tables and the queue pairs that use them: what a driver can do
//! wrong, and packets that are spread over several queues.

use device_testing::embedded::driver::*;
use device_testing::embedded::raw::*;
use libc::{EBUSY, EFAULT, EINVAL, ENOENT, ENOSPC, EOPNOTSUPP};
use mlx5::{PacketHash, PacketOptions, QueuePair, Role, WorkQueue, modify_wq};
use ringverbs_embedded::Embedded;
use uverbs::abi::ids::*;
use uverbs::abi::write::cmd::*;
use uverbs::abi::write::{
    CMD_FLAG_EXTENDED, ExCreateRwqIndTableResp, ExDestroyRwqIndTable, ExModifyWq,
};
use uverbs::flow::{Flow, FlowInit, Specs};
use uverbs::wq::{WqChange, WqInit, WqState};
use uverbs::{QpAttr, QpAttrMask as Mask, QpInit, QpState, QpType, WqHandle, WqTableHandle};

const OK: i32 = 0;
const CREATE_TABLE: u32 = CMD_FLAG_EXTENDED | EX_CMD_CREATE_RWQ_IND_TBL;
const DESTROY_TABLE: u32 = CMD_FLAG_EXTENDED | EX_CMD_DESTROY_RWQ_IND_TBL;
const MODIFY: u32 = CMD_FLAG_EXTENDED | EX_CMD_MODIFY_WQ;

/// The command for a work queue of 4 receives of 16 bytes, and its driver data.
fn create_wq(host: &Host, cq: &Cq, arena: &Arena) -> (Command, Vec<u8>) {
    let mut command = Command::new(OBJECT_WQ, METHOD_WQ_CREATE);
    command
        .object(ATTR_CREATE_WQ_HANDLE, 0)
        .object(ATTR_CREATE_WQ_PD_HANDLE, host.pd.0.into())
        .object(ATTR_CREATE_WQ_CQ_HANDLE, cq.object.handle().0.into())
        .constant(ATTR_CREATE_WQ_USER_HANDLE, 99)
        .constant(ATTR_CREATE_WQ_TYPE, 0)
        .u32(ATTR_CREATE_WQ_MAX_WR, 4)
        .u32(ATTR_CREATE_WQ_MAX_SGE, 1)
        .u32(ATTR_CREATE_WQ_FLAGS, 0)
        .out(ATTR_CREATE_WQ_RESP_MAX_WR, 4)
        .out(ATTR_CREATE_WQ_RESP_MAX_SGE, 4)
        .out(ATTR_CREATE_WQ_RESP_WQ_NUM, 4);
    let mut driver = vec![0; 48];
    for (at, address) in [(0, arena.address()), (8, arena.address() + 8192)] {
        driver[at..at + 8].copy_from_slice(&address.to_ne_bytes());
    }
    for (at, word) in [(16, 4u32), (20, 4), (24, 5)] {
        driver[at..at + 4].copy_from_slice(&word.to_ne_bytes());
    }
    (command, driver)
}

fn run(host: &Host, command: &Command) -> Result<Vec<uverbs::abi::ioctl::Attr>, i32> {
    // SAFETY: addresses are those of an arena, which is longer alive, or unmapped.
    unsafe { command.run(&host.context) }
}

fn errno(result: Result<impl Sized, i32>) -> i32 {
    result.err().unwrap_or(OK)
}

/// The command for a table of these queues.
fn create_table(log: u32, queues: &[u32]) -> Command {
    let mut words = vec![0, log];
    words.extend_from_slice(queues);
    words.resize(words.len().next_multiple_of(2), 0);
    Command::write(CREATE_TABLE, &words[..], 16)
}

#[test]
fn bad_work_queues_are_refused_and_leave_nothing() {
    let embedded = Embedded::new("roce").unwrap();
    let host = Host::new(&embedded);
    let (cq, arena) = (host.cq(16), Arena::new(3));
    let (command, driver) = create_wq(&host, &cq, &arena);
    let before = (embedded.objects(), embedded.ranges());
    let with = |at: usize, bytes: &[u8]| {
        let mut driver = driver.clone();
        driver[at..at + bytes.len()].copy_from_slice(bytes);
        driver
    };
    let strides = |log_bytes, log_strides| {
        let mut driver = with(32, &[1]);
        (driver[36], driver[40]) = (log_bytes, log_strides);
        driver
    };
    for (case, driver, expected) in [
        ("valid", driver.clone(), OK),
        ("strides", strides(6, 9), OK),
        ("short strides", strides(5, 9), EINVAL),
        ("long strides", strides(14, 9), EINVAL),
        ("few strides", strides(6, 8), EINVAL),
        ("many strides", strides(6, 17), EINVAL),
        ("an unknown feature", with(32, &[2]), EOPNOTSUPP),
        ("a signature", with(28, &[1]), EOPNOTSUPP),
        ("no user index", with(24, &[0xff; 3]), EINVAL),
        ("no receives", with(16, &[0]), EINVAL),
        ("3 receives", with(16, &[3]), EINVAL),
        ("2 receives, asked for 4", with(16, &[2]), EINVAL),
        ("2^16 receives", with(16, &[0, 0, 1]), EINVAL),
        ("receives of 8 bytes", with(20, &[3]), EINVAL),
        ("receives of 1024 bytes", with(20, &[10]), EINVAL),
        ("unaligned records", with(8, &[4]), EINVAL),
        ("no records", with(8, &[0; 8]), EFAULT),
        ("unmapped entries", with(0, &[0; 8]), EFAULT),
        ("entries past the end", with(0, &[0xff; 8]), EINVAL),
        ("short driver data", driver[..32].to_vec(), EINVAL),
    ] {
        let result = run(&host, command.clone().driver(&driver));
        let handle = result
            .as_ref()
            .ok()
            .map(|it| created(it, ATTR_CREATE_WQ_HANDLE));
        assert_eq!(errno(result), expected, "{case}");
        if let Some(handle) = handle {
            uverbs::wq::destroy(&host.context, WqHandle(handle)).unwrap();
        }
        assert_eq!((embedded.objects(), embedded.ranges()), before, "{case}");
    }
    for (id, value, expected) in [
        (ATTR_CREATE_WQ_TYPE, 1, EINVAL),
        (ATTR_CREATE_WQ_FLAGS, 1 << 1, EOPNOTSUPP),
        (ATTR_CREATE_WQ_FLAGS, 1 << 4, EINVAL),
        (ATTR_CREATE_WQ_CQ_HANDLE, host.pd.0.into(), EINVAL),
        (ATTR_CREATE_WQ_PD_HANDLE, 1 << 20, ENOENT),
    ] {
        let mut bad = command.clone();
        bad.driver(&driver).find(id).data = value;
        assert_eq!(errno(run(&host, &bad)), expected, "{id} {value}");
    }
    // InfiniBand has no such packets.
    let infiniband = Host::single("ib");
    let cq = infiniband.cq(16);
    let (mut command, driver) = create_wq(&infiniband, &cq, &arena);
    assert_eq!(errno(run(&infiniband, command.driver(&driver))), EOPNOTSUPP);
}

#[test]
fn bad_changes_and_tables_are_refused() {
    let embedded = Embedded::new("roce").unwrap();
    let host = Host::new(&embedded);
    let (cq, arena) = (host.cq(16), Arena::new(3));
    let (mut command, driver) = create_wq(&host, &cq, &arena);
    let attrs = run(&host, command.driver(&driver)).unwrap();
    let queue = created(&attrs, ATTR_CREATE_WQ_HANDLE);
    let change = ExModifyWq {
        wq_handle: queue,
        ..ExModifyWq::default()
    };
    let state = |attr_mask, curr_wq_state, wq_state| ExModifyWq {
        attr_mask,
        curr_wq_state,
        wq_state,
        ..change
    };
    let flags = |flags_mask, flags| ExModifyWq {
        attr_mask: 4,
        flags_mask,
        flags,
        ..change
    };
    for (case, change, expected) in [
        ("nothing", change, EINVAL),
        ("an unknown attribute", state(8, 0, 0), EINVAL),
        ("an unknown state", state(1, 0, 3), EINVAL),
        ("another current state", state(3, 1, 1), EINVAL),
        ("ready", state(3, 0, 1), OK),
        ("without VLAN tags", flags(1, 1), OK),
        ("frame check sequences", flags(2, 2), EOPNOTSUPP),
        ("error", state(1, 0, 2), OK),
        ("reset", state(1, 0, 0), OK),
        (
            "no queue",
            ExModifyWq {
                wq_handle: host.pd.0,
                ..state(1, 0, 1)
            },
            EINVAL,
        ),
    ] {
        let result = run(&host, &Command::write(MODIFY, &change, 0));
        assert_eq!(errno(result), expected, "{case}");
    }
    for (case, log, queues, expected) in [
        ("a list that is too short", 2, &[queue, queue][..], EINVAL),
        ("a list that is too long", 0, &[queue, queue], EINVAL),
        ("an object of another type", 0, &[host.pd.0], EINVAL),
        ("no object", 0, &[1 << 20], ENOENT),
        ("a large table", 13, &[queue], EINVAL),
        ("a shift beyond the word", 32, &[queue], EINVAL),
    ] {
        let result = run(&host, &create_table(log, queues));
        assert_eq!(errno(result), expected, "{case}");
    }
    assert_eq!(
        errno(run(&host, &Command::write(CREATE_TABLE, &0u32, 16))),
        ENOSPC
    );
    let command = create_table(1, &[queue, queue]);
    let table: ExCreateRwqIndTableResp = answer(&run(&host, &command).unwrap(), ATTR_CORE_OUT);
    let destroy_queue = || {
        let result = uverbs::wq::destroy(&host.context, WqHandle(queue));
        result.map_or_else(|error| error.errno().raw(), |_| OK)
    };
    assert_eq!(destroy_queue(), EBUSY);
    let destroy = |comp_mask, ind_tbl_handle| {
        let asked = ExDestroyRwqIndTable {
            comp_mask,
            ind_tbl_handle,
        };
        errno(run(&host, &Command::write(DESTROY_TABLE, &asked, 0)))
    };
    assert_eq!(destroy(1, table.ind_tbl_handle), EOPNOTSUPP);
    assert_eq!(destroy(0, queue), EINVAL);
    assert_eq!(destroy(0, table.ind_tbl_handle), OK);
    assert_eq!(destroy(0, table.ind_tbl_handle), ENOENT);
    assert_eq!(destroy_queue(), OK);
}

#[test]
fn packets_are_spread_over_work_queues() {
    const FRAMES: u16 = 32;
    const ROOM: usize = 128;
    let embedded = Embedded::new("roce").unwrap();
    let host = Host::new(&embedded);
    let mut cq = host.cq(256);
    // With the first queue that sends, the context has a UAR for all others.
    let mut sender = host.qp(QpType::RAW_PACKET, &mut cq);
    let before = (embedded.objects(), embedded.ranges());
    let memory = host.memory(2 * usize::from(FRAMES) * ROOM + 64);
    let mut queues: Vec<_> = (0..2)
        .map(|_| {
            let init = WqInit {
                pd: host.pd,
                cq: cq.object.handle(),
                max_wr: FRAMES.into(),
                max_sge: 1,
                flags: 0,
                user_handle: 0,
                async_fd: None,
            };
            let wq = WorkQueue::create(&host.context, &host.device, &init, false, None, None);
            let wq = wq.unwrap();
            cq.ring.attach(&wq.queues, Role::RECEIVE).unwrap();
            wq
        })
        .collect();
    for (number, wq) in queues.iter_mut().enumerate() {
        let ready = WqChange {
            state: Some(WqState::READY),
            ..WqChange::default()
        };
        modify_wq(&wq.object, &ready).unwrap();
        wq.recv.begin();
        for at in 0..usize::from(FRAMES) {
            let room = memory.sge((number * usize::from(FRAMES) + at) * ROOM, ROOM);
            wq.recv.push(number as u64, &[room]).unwrap();
        }
        // SAFETY: the memory is freed after the queues.
        unsafe { wq.recv.publish() };
    }
    let handles = [0, 1].map(|at: usize| queues[at].object.handle());
    let (table, _) = uverbs::wq::create_table(&host.context, &handles).unwrap();
    let init = QpInit {
        qp_type: QpType::RAW_PACKET,
        pd: Some(host.pd),
        table: Some(table),
        ..QpInit::default()
    };
    let create = |fields, key: &[u8]| {
        let (device, function) = (&host.device, 1);
        let hash = PacketHash {
            function,
            fields,
            key,
        };
        let own = PacketOptions {
            self_loopback_unicast: true,
            ..PacketOptions::default()
        };
        QueuePair::create_rss(&host.context, device, &init, &hash, own)
    };
    // Both versions of IP, both transports, a field that does not exist, a short key.
    for (fields, length) in [(0b101, 40), (0b0101_0000, 40), (1 << 9, 40), (0b11, 39)] {
        assert!(create(fields, &[7; 40][..length]).is_err(), "{fields:b}");
    }
    let spread = create(0b1100_0011, &[7; 40]).unwrap();
    let attr = QpAttr {
        qp_state: QpState::INIT,
        port_num: 1,
        ..QpAttr::default()
    };
    let changed = (spread.object).modify(&attr, Mask::STATE | Mask::PORT, uverbs::Udata::none());
    assert_eq!(
        changed.map_err(|error| error.errno().raw()),
        Err(EOPNOTSUPP)
    );
    let flow = FlowInit {
        port: 1,
        ..FlowInit::default()
    };
    let specs = Specs::destination_mac([2, 0, 0, 0, 0, 7]);
    let flow = Flow::create(&host.context, spread.object.handle(), &flow, specs).unwrap();

    start_packets(&sender);
    let place = 2 * usize::from(FRAMES) * ROOM;
    let mut received = [0; 2];
    for port in 0..FRAMES {
        memory.set(place, &udp_frame(8, 1000 + port));
        post(&mut sender, 9, Operation::Send, memory.sge(place, 64));
        for _ in 0..2 {
            let completion = poll(&host, &mut cq);
            assert_eq!(completion.status, 0);
            if completion.wr_id != 9 {
                received[completion.wr_id as usize] += 1;
            }
        }
    }
    assert_eq!(received.iter().sum::<u16>(), FRAMES);
    assert!(received.iter().all(|count| *count != 0), "{received:?}");
    let busy = uverbs::wq::destroy_table(&host.context, WqTableHandle(table.0));
    assert_eq!(busy.map_err(|error| error.errno().raw()), Err(EBUSY));
    drop((flow, spread));
    uverbs::wq::destroy_table(&host.context, table).unwrap();
    for wq in &queues {
        cq.ring.detach(&wq.queues);
    }
    drop(queues);
    drop(memory);
    assert_eq!((embedded.objects(), embedded.ranges()), before);
}
