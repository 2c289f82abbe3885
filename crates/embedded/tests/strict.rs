//! Invalid commands are rejected with the errors of Linux's uverbs and mlx5_ib.

use device_testing::embedded::driver::*;
use device_testing::embedded::raw::*;
use libc::{EBADF, EBUSY, EFAULT, EINVAL, ENOENT, ENOSPC, EOPNOTSUPP, EPROTONOSUPPORT};
use ringverbs_embedded::Embedded;
use uverbs::abi::ids::*;
use uverbs::abi::write::cmd::*;
use uverbs::abi::write::{
    AllocMw, AllocPd, CMD_FLAG_EXTENDED, CreateCompChannel, ExQueryDevice, ExQueryDeviceResp,
    ModifyQp, ModifySrq, QueryQp, ResizeCq,
};
use uverbs::{CqInit, QpAttrMask as Mask, QpCap, QpInit, QpType, SrqInit, SrqKind, Udata};

const OK: i32 = 0;

/// Returns the result of a command, after destroying the created object.
fn errno(host: &Host, command: &Command) -> i32 {
    // SAFETY: addresses are those of an arena, which is longer alive, or unmapped.
    match unsafe { command.run(&host.context) } {
        Err(errno) => errno,
        Ok(attrs) => {
            let object = command.header.object_id;
            if matches!(object, OBJECT_CQ | OBJECT_QP | OBJECT_SRQ) {
                // SAFETY: as above.
                unsafe { destroy(object, created(&attrs, 0)).run(&host.context) }.unwrap();
            }
            OK
        }
    }
}

/// Returns the result of a command with other driver data.
fn errno_with_driver_data(host: &Host, command: &Command, driver: &[u8]) -> i32 {
    errno(host, command.clone().driver(driver))
}

/// Returns the data with other bytes at an offset.
fn with_bytes(data: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut data = data.to_vec();
    data.resize(data.len().max(at + bytes.len()), 0);
    data[at..at + bytes.len()].copy_from_slice(bytes);
    data
}

fn create_rc_qp(host: &Host, cq: &Cq) -> Command {
    let cq = u64::from(cq.object.handle().0);
    let mut command = create_qp(QpType::RC.0, 4);
    command
        .object(ATTR_CREATE_QP_PD_HANDLE, host.pd.0.into())
        .object(ATTR_CREATE_QP_SEND_CQ_HANDLE, cq)
        .object(ATTR_CREATE_QP_RECV_CQ_HANDLE, cq);
    command
}

/// Valid commands are accepted.
fn exchange(host: &Host) {
    let mut cq = host.cq(16);
    let mut a = host.qp(QpType::RC, &mut cq);
    let mut b = host.qp(QpType::RC, &mut cq);
    connect_pair(QpType::RC, (&a, host), (&b, host));
    let memory = host.memory(128);
    memory.set(0, b"a message");
    receive(&mut b, 1, memory.sge(64, 64));
    post(&mut a, 2, Operation::Send, memory.sge(0, 9));
    let mut got = [wait(&mut cq), wait(&mut cq)].map(|wc| (wc.wr_id, wc.status));
    got.sort_unstable();
    assert_eq!(got, [(1, 0), (2, 0)]);
    assert_eq!(memory.get(64, 9), b"a message");
}

#[test]
fn queues_without_driver_data_are_refused() {
    let host = Host::single("ib");
    let cq = host.cq(4);
    let refused = |result: Result<(), uverbs::Error>| result.unwrap_err().errno().raw();
    let cq_init = CqInit {
        cqe: 4,
        ..CqInit::default()
    };
    let srq_init = SrqInit {
        pd: host.pd,
        user_handle: 0,
        max_wr: 4,
        max_sge: 1,
        limit: 0,
        kind: SrqKind::Basic,
        async_fd: None,
    };
    for round in 0..2 {
        let udata = || match round {
            0 => Udata::none(),
            _ => Udata::output(vec![0; 64].leak()),
        };
        let made = uverbs::cq::create(&host.context, &cq_init, udata());
        assert_eq!(refused(made.map(drop)), EINVAL);
        let made = uverbs::srq::create(&host.context, &srq_init, udata());
        assert_eq!(refused(made.map(drop)), EFAULT);
        for qp_type in [QpType::RC, QpType::UC, QpType::UD, QpType::XRC_INI] {
            for max_recv_wr in [0, 4] {
                let init = QpInit {
                    qp_type,
                    pd: Some(host.pd),
                    send_cq: Some(cq.object.handle()),
                    recv_cq: Some(cq.object.handle()),
                    cap: QpCap {
                        max_recv_wr,
                        ..QpCap::default()
                    },
                    ..QpInit::default()
                };
                let made = uverbs::qp::create(&host.context, &init, udata());
                assert_eq!(refused(made.map(drop)), EINVAL);
            }
        }
        let resized = uverbs::cq::resize(&host.context, cq.object.handle(), 100, udata());
        assert_eq!(refused(resized.map(drop)), EFAULT);
    }
    // A second GET_CONTEXT is rejected.
    let same = uverbs::cq::resize(&host.context, cq.object.handle(), 7, Udata::none());
    assert_eq!(same.unwrap(), 7);
    exchange(&host);
}

#[test]
fn queues_need_mapped_memory() {
    let host = Host::single("ib");
    let cq = host.cq(4);
    let arena = Arena::new(8);
    arena.protect_first();
    let at = |page: usize| arena.address() + (page * PAGE) as u64;
    let (read_only, good, last, beyond) = (at(0), at(1), at(7), at(8));
    let records = at(6);
    let places = [
        (good, records, OK),
        (good, records + 8, OK),
        (good, at(7) - 8, OK),
        (good, records + 4, EINVAL),
        (good, records + 1, EINVAL),
        (good, 0, EFAULT),
        (good, 8, EFAULT),
        (good, beyond, EFAULT),
        (good, read_only, EFAULT),
        (good, 1 << 62, EFAULT),
        (good, u64::MAX - 7, EINVAL),
        (0, records, EFAULT),
        (beyond, records, EFAULT),
        (read_only, records, EFAULT),
        (last, records, EFAULT),
        (good + 8, records, EINVAL),
        (1 << 62, records, EFAULT),
        (u64::MAX - 4095, records, EINVAL),
    ];
    let (cq_command, srq_command, qp_command) = (
        create_cq(127),
        create_srq(host.pd.0, 255),
        create_rc_qp(&host, &cq),
    );
    for (entries, records, expected) in places {
        let what = format!("{entries:#x} {records:#x}");
        // Each of two pages.
        let driver = cq_driver(entries, records, 64, host.uar());
        assert_eq!(
            errno_with_driver_data(&host, &cq_command, &driver),
            expected,
            "{what}"
        );
        let driver = srq_driver(entries, records, 0);
        assert_eq!(
            errno_with_driver_data(&host, &srq_command, &driver),
            expected,
            "{what}"
        );
        let driver = qp_driver(entries, records, [64, 256, 4], 0, host.uar());
        // The device rejects entries at address 0.
        let expected = if entries == 0 { EINVAL } else { expected };
        assert_eq!(
            errno_with_driver_data(&host, &qp_command, &driver),
            expected,
            "{what}"
        );
    }
    for (entries, expected) in [
        (0, EFAULT),
        (beyond, EFAULT),
        (read_only, EFAULT),
        (good + 8, EINVAL),
        (u64::MAX - 4095, EINVAL),
    ] {
        let body = ResizeCq {
            cq_handle: cq.object.handle().0,
            cqe: 63,
            ..ResizeCq::default()
        };
        let driver = [entries.to_ne_bytes(), 64u64.to_ne_bytes()].concat();
        let command = Command::write(CMD_RESIZE_CQ, &body, 8);
        assert_eq!(
            errno_with_driver_data(&host, &command, &driver),
            expected,
            "{entries:#x}"
        );
    }
    arena.check();
    exchange(&host);
}

#[test]
fn driver_data_is_checked_as_by_mlx5_ib() {
    let host = Host::single("ib");
    let cq = host.cq(4);
    let arena = Arena::new(8);
    let (entries, records) = (arena.address(), arena.address() + 7 * PAGE as u64);
    let (one, bits) = (&[1u8][..], |bits: u32| bits.to_ne_bytes());

    let command = create_cq(63);
    let good = cq_driver(entries, records, 64, host.uar());
    for (driver, expected) in [
        (good.clone(), OK),
        // Without a UAR.
        (good[..22].to_vec(), EINVAL),
        (good[..21].to_vec(), EINVAL),
        (good[..8].to_vec(), EINVAL),
        // Bytes behind are ignored.
        (with_bytes(&good, 40, one), OK),
        (with_bytes(&good, 16, &bits(63)), EINVAL),
        (with_bytes(&good, 16, &bits(0)), EINVAL),
        (with_bytes(&good, 16, &bits(128)), OK),
        // Compression, and its format.
        (with_bytes(&good, 20, &[1, 1]), OK),
        (with_bytes(&good, 20, &[1, 2]), OK),
        (with_bytes(&good, 20, &[1, 3]), EINVAL),
        (with_bytes(&good, 20, &[1, 4]), EOPNOTSUPP),
        (with_bytes(&good, 20, &[2, 3]), OK),
        // Flags: padded entries have 128 bytes; the UAR must belong to the context.
        (with_bytes(&good, 22, &[3, 0]), EOPNOTSUPP),
        (
            with_bytes(&with_bytes(&good, 22, &[3, 0]), 16, &bits(128)),
            OK,
        ),
        (with_bytes(&good, 22, &[0, 0]), EINVAL),
        (with_bytes(&good, 25, one), EINVAL),
        (with_bytes(&good, 22, &[6, 0]), OK),
        (with_bytes(&good, 22, &[10, 0]), EINVAL),
        (with_bytes(&good, 22, &[2, 1]), EINVAL),
        (with_bytes(&good, 26, one), EINVAL),
        (with_bytes(&good, 28, one), EINVAL),
        (with_bytes(&good, 31, one), EINVAL),
    ] {
        assert_eq!(
            errno_with_driver_data(&host, &command, &driver),
            expected,
            "{driver:?}"
        );
    }
    for (cqe, expected) in [(0, EINVAL), (1, OK), (1 << 22, EINVAL), (u32::MAX, EINVAL)] {
        assert_eq!(
            errno_with_driver_data(&host, &create_cq(cqe), &good),
            expected,
            "{cqe}"
        );
    }

    let command = create_srq(host.pd.0, 15);
    let good = srq_driver(entries, records, 0);
    for (driver, expected) in [
        (good.clone(), OK),
        (good[..24].to_vec(), OK),
        (good[..8].to_vec(), EFAULT),
        (with_bytes(&good, 40, &[0]), OK),
        (with_bytes(&good, 40, one), EINVAL),
        (with_bytes(&good, 16, one), EINVAL),
        (with_bytes(&good, 20, one), EINVAL),
        (with_bytes(&good, 28, one), EINVAL),
    ] {
        assert_eq!(
            errno_with_driver_data(&host, &command, &driver),
            expected,
            "{driver:?}"
        );
    }
    for (max_wr, expected) in [(0, OK), (1 << 15, EINVAL), (u32::MAX, EINVAL)] {
        let command = create_srq(host.pd.0, max_wr);
        assert_eq!(
            errno_with_driver_data(&host, &command, &good),
            expected,
            "{max_wr}"
        );
    }

    let command = create_rc_qp(&host, &cq);
    let good = qp_driver(entries, records, [16, 16, 4], 0, host.uar());
    for (driver, expected) in [
        (good.clone(), OK),
        (good[..48].to_vec(), OK),
        (good[..47].to_vec(), EINVAL),
        (good[..4].to_vec(), EINVAL),
        (with_bytes(&good, 54, one), EINVAL),
        (with_bytes(&good, 100, &[0]), OK),
        (with_bytes(&good, 100, one), EINVAL),
        // Sizes: bounded powers of two, and receives only where they are possible.
        (with_bytes(&good, 16, &bits(0)), OK),
        (with_bytes(&good, 16, &bits(15)), EINVAL),
        (with_bytes(&good, 16, &bits(1 << 16)), EINVAL),
        (with_bytes(&good, 16, &bits(u32::MAX)), EINVAL),
        (with_bytes(&good, 20, &bits(0)), EINVAL),
        (with_bytes(&good, 20, &bits(3)), EINVAL),
        (with_bytes(&good, 20, &bits(1 << 16)), EINVAL),
        (with_bytes(&good, 24, &bits(0)), EINVAL),
        (with_bytes(&good, 24, &bits(10)), EINVAL),
        (with_bytes(&good, 24, &bits(33)), EINVAL),
        (with_bytes(&good, 24, &bits(u32::MAX)), EINVAL),
        // Flags, the UAR, user indices.
        (with_bytes(&good, 28, &bits(NAMES_UAR | 1 << 1)), OK),
        (
            with_bytes(&good, 28, &bits(NAMES_UAR | 1 << 1 | 1 << 8)),
            OK,
        ),
        (with_bytes(&good, 28, &bits(NAMES_UAR | 1 << 0)), EINVAL),
        (with_bytes(&good, 28, &bits(NAMES_UAR | 1 << 3)), EINVAL),
        (with_bytes(&good, 28, &bits(NAMES_UAR | 1 << 5)), EINVAL),
        (with_bytes(&good, 28, &bits(NAMES_UAR | 1 << 31)), EINVAL),
        (with_bytes(&good, 28, &bits(0)), EINVAL),
        (with_bytes(&good, 37, one), EINVAL),
        (with_bytes(&good, 32, &bits(0xff_fffe)), OK),
        (with_bytes(&good, 32, &bits(0xff_ffff)), EINVAL),
        (with_bytes(&good, 32, &bits(1 << 24)), EINVAL),
    ] {
        assert_eq!(
            errno_with_driver_data(&host, &command, &driver),
            expected,
            "{driver:?}"
        );
    }
    // Without a receive queue of its own, the sizes must be 0.
    let mut none = command.clone();
    none.without(ATTR_CREATE_QP_CAP)
        .input(ATTR_CREATE_QP_CAP, &[0; 20]);
    assert_eq!(errno_with_driver_data(&host, &none, &good), EINVAL);
    let nothing = qp_driver(0, records, [0, 0, 0], 0, host.uar());
    assert_eq!(errno_with_driver_data(&host, &none, &nothing), OK);
    exchange(&host);
}

#[test]
fn driver_data_of_other_commands_is_checked() {
    let host = Host::single("ib");
    let mut cq = host.cq(4);
    let qp = host.qp(QpType::RC, &mut cq);
    let memory = Arena::new(4);
    let window = AllocMw {
        pd_handle: host.pd.0,
        mw_type: 1,
        ..AllocMw::default()
    };
    let window = Command::write(CMD_ALLOC_MW, &window, 8);
    let modify = ModifyQp {
        qp_handle: qp.object.handle().0,
        attr_mask: Mask::STATE.bits(),
        ..ModifyQp::default()
    };
    let unknown = ModifyQp {
        attr_mask: 1 << 21,
        ..modify
    };
    let unknown = Command::write(CMD_MODIFY_QP, &unknown, 0);
    let modify = Command::write(CMD_MODIFY_QP, &modify, 0);
    let resize = ResizeCq {
        cq_handle: cq.object.handle().0,
        cqe: 15,
        ..ResizeCq::default()
    };
    let resize = Command::write(CMD_RESIZE_CQ, &resize, 8);
    let entries = [memory.address().to_ne_bytes(), 64u64.to_ne_bytes()].concat();
    let device = Command::write(CMD_FLAG_EXTENDED | CMD_QUERY_DEVICE, &[0u64], 304);
    let one = &[1u8][..];
    for (command, driver, expected) in [
        (&window, with_bytes(&[], 0, one), EOPNOTSUPP),
        (&window, with_bytes(&[], 5, one), EOPNOTSUPP),
        (&window, with_bytes(&[], 9, one), EOPNOTSUPP),
        (&modify, vec![], OK),
        (&modify, vec![0; 15], EINVAL),
        (&modify, vec![0; 16], OK),
        (&modify, vec![0; 17], OK),
        (&modify, with_bytes(&[0; 16], 0, one), OK),
        (&modify, with_bytes(&[0; 16], 0, &[2]), EOPNOTSUPP),
        (&modify, with_bytes(&[0; 16], 10, one), EOPNOTSUPP),
        (&modify, with_bytes(&[0; 16], 16, one), EOPNOTSUPP),
        (&unknown, vec![], EOPNOTSUPP),
        (&resize, entries[..15].to_vec(), EINVAL),
        (&resize, with_bytes(&entries, 8, &[128]), EINVAL),
        (&resize, with_bytes(&entries, 10, one), EINVAL),
        (&resize, with_bytes(&entries, 15, one), EINVAL),
        (&device, vec![0; 3], OK),
        (&device, vec![0, 1], EINVAL),
    ] {
        assert_eq!(
            errno_with_driver_data(&host, command, &driver),
            expected,
            "{command:?} {driver:?}"
        );
    }
    // The output must have space for a protection domain's number.
    let mut domain = Command::write(CMD_ALLOC_PD, &AllocPd::default(), 4);
    assert_eq!(errno(&host, &domain), EFAULT);
    assert_eq!(errno(&host, domain.out(ATTR_UHW_OUT, 3)), EINVAL);
}

#[test]
fn get_context_refuses_unknown_driver_data() {
    let embedded = Embedded::new("ib").unwrap();
    let context = embedded.context().unwrap();
    let good = with_bytes(&with_bytes(&[0; 32], 0, &[16]), 16, &[1]);
    let errno = |driver: &[u8]| {
        let mut command = Command::new(OBJECT_DEVICE, METHOD_GET_CONTEXT);
        command.out(ATTR_UHW_OUT, 72).driver(driver);
        // SAFETY: no addresses but its own.
        unsafe { command.run(&context) }.err().unwrap_or(OK)
    };
    let one = &[1u8][..];
    for (driver, expected) in [
        (vec![], EINVAL),
        (good[..8].to_vec(), EINVAL),
        (good[..15].to_vec(), EINVAL),
        (good[..16].to_vec(), EINVAL),
        (with_bytes(&good, 0, &[0]), EINVAL),
        (with_bytes(&good, 2, one), libc::ENOMEM),
        (with_bytes(&good, 0, &[0xff; 4]), libc::ENOMEM),
        (with_bytes(&good, 4, &[16]), EINVAL),
        (with_bytes(&good, 8, &[2]), EOPNOTSUPP),
        (with_bytes(&good, 12, one), EOPNOTSUPP),
        (with_bytes(&good, 17, one), EOPNOTSUPP),
        (with_bytes(&good, 23, one), EOPNOTSUPP),
        (with_bytes(&with_bytes(&good, 8, one), 31, one), OK),
        // It is created once.
        (good.clone(), EINVAL),
    ] {
        assert_eq!(errno(&driver), expected, "{driver:?}");
    }
}

#[test]
fn attributes_are_checked_against_the_method() {
    let host = Host::single("ib");
    let arena = Arena::new(4);
    let driver = cq_driver(
        arena.address(),
        arena.address() + PAGE as u64,
        64,
        host.uar(),
    );
    let mut good = create_cq(15);
    good.driver(&driver);
    assert_eq!(errno(&host, &good), OK);
    for attr in &good.attrs {
        let mut doubled = good.clone();
        doubled.attrs.push(*attr);
        assert_eq!(errno(&host, &doubled), EINVAL, "{attr:?} twice");
        let mut reserved = good.clone();
        reserved.find(attr.attr_id).enum_or_reserved = 1;
        assert_eq!(
            errno(&host, &reserved),
            EINVAL,
            "{attr:?} with what is reserved"
        );
        if attr.attr_id < ATTR_UHW_IN {
            let missing = errno(&host, good.clone().without(attr.attr_id));
            assert_eq!(missing, EINVAL, "{attr:?} missing");
            let mut longer = good.clone();
            longer.find(attr.attr_id).len += 1;
            assert_eq!(errno(&host, &longer), EINVAL, "{attr:?} longer");
        }
    }
    let mut nowhere = good.clone();
    nowhere.find(ATTR_CREATE_CQ_RESP_CQE).data = 0;
    assert_eq!(errno(&host, &nowhere), EFAULT);
    nowhere = good.clone();
    nowhere.find(ATTR_UHW_IN).data = arena.address() + 4 * PAGE as u64;
    assert_eq!(errno(&host, &nowhere), EFAULT);
    // Unknown attributes are rejected if they are mandatory.
    for (id, flags, expected) in [
        (8, 1, EPROTONOSUPPORT),
        (8, 0, OK),
        (0x2000, 1, EPROTONOSUPPORT),
    ] {
        let mut unknown = good.clone();
        unknown.attr(id, 0, 0);
        unknown.find(id).flags = flags;
        assert_eq!(errno(&host, &unknown), expected, "{id} {flags}");
    }
    for (flags, expected) in [(3, OK), (4, EINVAL), (1 << 40, EINVAL)] {
        let mut command = good.clone();
        command.constant(ATTR_CREATE_CQ_FLAGS, flags);
        assert_eq!(errno(&host, &command), expected, "{flags:#x}");
    }
    type Change = fn(&mut Command);
    let headers: [(Change, i32); 6] = [
        (|it| it.header.driver_id = 0, EINVAL),
        (|it| it.header.reserved1 = 1, EPROTONOSUPPORT),
        (|it| it.header.reserved2 = 1, EPROTONOSUPPORT),
        (|it| it.header.length = 1, EINVAL),
        (|it| it.header.num_attrs = 1, EINVAL),
        (|it| it.header.method_id = 99, EPROTONOSUPPORT),
    ];
    for (change, expected) in headers {
        let mut command = good.clone();
        change(&mut command);
        assert_eq!(errno(&host, &command), expected);
    }
}

#[test]
fn write_commands_have_their_length() {
    let host = Host::single("ib");
    let body = QueryQp::default();
    assert_eq!(
        errno(&host, &Command::write(CMD_QUERY_QP, &body, 128)),
        ENOENT
    );
    assert_eq!(
        errno(&host, &Command::write(CMD_QUERY_QP, &body, 127)),
        ENOSPC
    );
    assert_eq!(
        errno(&host, &Command::write(CMD_QUERY_QP, &body, 0)),
        ENOSPC
    );
    assert_eq!(
        errno(&host, &Command::write(CMD_QUERY_QP, &[0u64], 128)),
        ENOSPC
    );
    assert_eq!(
        errno(&host, &Command::write(CMD_QUERY_QP, &[0u64, 0, 0], 128)),
        ENOENT
    );
    assert_eq!(
        errno(&host, &Command::write(CMD_QUERY_QP, &[0u64, 0, 1], 128)),
        EOPNOTSUPP
    );
    let channel = CreateCompChannel::default();
    assert_eq!(
        errno(&host, &Command::write(CMD_CREATE_COMP_CHANNEL, &channel, 3)),
        ENOSPC
    );
    for (number, expected) in [(CMD_POLL_CQ, EOPNOTSUPP), (200, EINVAL), (1 << 9, EINVAL)] {
        assert_eq!(
            errno(&host, &Command::write(number, &[0u64; 8], 128)),
            expected
        );
    }
    let device = CMD_FLAG_EXTENDED | CMD_QUERY_DEVICE;
    for (comp_mask, reserved) in [(1, 0), (0, 1)] {
        let body = ExQueryDevice {
            comp_mask,
            reserved,
        };
        assert_eq!(errno(&host, &Command::write(device, &body, 304)), EINVAL);
    }
    // Answers are truncated or zero-padded to the output.
    let command = Command::write(device, &ExQueryDevice::default(), 304);
    // SAFETY: no addresses but its own.
    let attrs = unsafe { command.run(&host.context) }.unwrap();
    let long: ExQueryDeviceResp = answer(&attrs, ATTR_CORE_OUT);
    assert_eq!((long.response_length, long.base.phys_port_cnt), (304, 1));
    // SAFETY: no addresses but its own.
    let short =
        unsafe { Command::write(device, &ExQueryDevice::default(), 184).run(&host.context) };
    assert!(short.is_ok());
    assert_eq!(
        errno(
            &host,
            &Command::write(device, &ExQueryDevice::default(), 183)
        ),
        ENOSPC
    );
    let limit = ModifySrq {
        srq_handle: 0,
        attr_mask: 2,
        ..ModifySrq::default()
    };
    assert_eq!(
        errno(&host, &Command::write(CMD_MODIFY_SRQ, &limit, 0)),
        ENOENT
    );
}

#[test]
fn handles_belong_to_their_context_and_type() {
    let embedded = Embedded::new("ib").unwrap();
    let (host, other) = (Host::new(&embedded), Host::new(&embedded));
    let arena = Arena::new(8);
    let entries = arena.address();
    let (theirs, cq) = (other.cq(4), host.cq(4));
    let command = create_rc_qp(&host, &cq);
    let driver = qp_driver(
        entries,
        entries + 7 * PAGE as u64,
        [16, 16, 4],
        0,
        host.uar(),
    );
    let theirs = theirs.object.handle().0;
    for (id, handle, expected) in [
        (ATTR_CREATE_QP_PD_HANDLE, other.pd.0.into(), ENOENT),
        (ATTR_CREATE_QP_SEND_CQ_HANDLE, theirs.into(), ENOENT),
        (ATTR_CREATE_QP_RECV_CQ_HANDLE, theirs.into(), ENOENT),
        (ATTR_CREATE_QP_SEND_CQ_HANDLE, host.pd.0.into(), EINVAL),
        (
            ATTR_CREATE_QP_PD_HANDLE,
            cq.object.handle().0.into(),
            EINVAL,
        ),
        (ATTR_CREATE_QP_PD_HANDLE, u64::MAX, EINVAL),
        (
            ATTR_CREATE_QP_PD_HANDLE,
            u64::from(host.pd.0) | 1 << 32,
            ENOENT,
        ),
    ] {
        let mut command = command.clone();
        command.find(id).data = handle;
        assert_eq!(
            errno_with_driver_data(&host, &command, &driver),
            expected,
            "{id} {handle}"
        );
    }
    for id in [
        ATTR_CREATE_QP_PD_HANDLE,
        ATTR_CREATE_QP_SEND_CQ_HANDLE,
        ATTR_CREATE_QP_RECV_CQ_HANDLE,
    ] {
        assert_eq!(
            errno_with_driver_data(&host, command.clone().without(id), &driver),
            ENOENT
        );
    }
    // A queue pair cannot use an XRC SRQ.
    let xrcd = uverbs::XrcdOpen {
        fd: None,
        oflags: libc::O_CREAT,
    };
    let xrcd = uverbs::xrcd::open(&host.context, &xrcd, Udata::none()).unwrap();
    let mut shared = create_srq(host.pd.0, 15);
    shared.find(ATTR_CREATE_SRQ_TYPE).data = 1;
    shared
        .object(ATTR_CREATE_SRQ_XRCD_HANDLE, xrcd.0.into())
        .object(ATTR_CREATE_SRQ_CQ_HANDLE, cq.object.handle().0.into());
    let at = entries + 4 * PAGE as u64;
    let places = |index| srq_driver(at, at + PAGE as u64, index);
    assert_eq!(
        errno_with_driver_data(&host, &shared, &places(0xff_ffff)),
        EINVAL
    );
    assert_eq!(
        errno_with_driver_data(&host, &shared, &places(3)[..24]),
        EINVAL
    );
    shared.driver(&places(3));
    // SAFETY: the arena outlives the queue.
    let made_srq = created(&unsafe { shared.run(&host.context) }.unwrap(), 0);
    let mut on_shared = command.clone();
    on_shared.object(ATTR_CREATE_QP_SRQ_HANDLE, made_srq.into());
    let own_none = qp_driver(
        entries,
        entries + 7 * PAGE as u64,
        [16, 0, 0],
        0,
        host.uar(),
    );
    assert_eq!(errno_with_driver_data(&host, &on_shared, &own_none), EINVAL);
    // SAFETY: as above.
    unsafe { destroy(OBJECT_SRQ, made_srq).run(&host.context) }.unwrap();
    // SAFETY: as above.
    unsafe { destroy(OBJECT_XRCD, xrcd.0).run(&host.context) }.unwrap();
}

#[test]
fn shared_queues_with_tag_matching() {
    let host = Host::single("ib");
    let caps = host.context.query_device_ex(Udata::none()).unwrap().tm_caps;
    assert_eq!((caps.flags, caps.max_num_tags, caps.max_sge), (1, 127, 1));
    let cq = host.cq(4);
    let arena = Arena::new(10);
    // An unaligned address, so that the pages are listed.
    let (entries, records) = (arena.address() + 64, arena.address() + 8 * PAGE as u64);
    let driver = srq_driver(entries, records, 3);
    let mut command = create_srq(host.pd.0, 127);
    command.find(ATTR_CREATE_SRQ_TYPE).data = 2;
    let without_cq = command.clone();
    command
        .object(ATTR_CREATE_SRQ_CQ_HANDLE, cq.object.handle().0.into())
        .u32(ATTR_CREATE_SRQ_MAX_NUM_TAGS, 127);
    assert_eq!(errno_with_driver_data(&host, &without_cq, &driver), ENOENT);
    for (tags, expected) in [
        (0, OK),
        (1, OK),
        (127, OK),
        (128, EINVAL),
        (u32::MAX, EINVAL),
    ] {
        let mut command = command.clone();
        command.find(ATTR_CREATE_SRQ_MAX_NUM_TAGS).data = tags.into();
        assert_eq!(
            errno_with_driver_data(&host, &command, &driver),
            expected,
            "{tags} tags"
        );
    }
    let without_tags = command
        .clone()
        .without(ATTR_CREATE_SRQ_MAX_NUM_TAGS)
        .clone();
    assert_eq!(
        errno_with_driver_data(&host, &without_tags, &driver),
        ENOENT
    );
    assert_eq!(
        errno_with_driver_data(&host, &command, &srq_driver(entries, records, 0xff_ffff)),
        EINVAL
    );
    command.driver(&driver);
    // SAFETY: the arena outlives the queue.
    let srq = created(&unsafe { command.run(&host.context) }.unwrap(), 0);
    let limit = ModifySrq {
        srq_handle: srq,
        attr_mask: 1 << 1,
        max_wr: 0,
        srq_limit: 5,
    };
    assert_eq!(errno(&host, &Command::write(CMD_MODIFY_SRQ, &limit, 0)), OK);
    let queried = uverbs::srq::query(&host.context, uverbs::SrqHandle(srq)).unwrap();
    assert_eq!((queried.max_wr, queried.limit), (127, 5));
    // A queue pair on it, whose receives complete to the queue's own.
    let mut command = create_rc_qp(&host, &cq);
    command.object(ATTR_CREATE_QP_SRQ_HANDLE, srq.into());
    let at = arena.address() + 4 * PAGE as u64;
    for blocks in [0, 16] {
        let mut qp = command.clone();
        qp.driver(&qp_driver(
            at,
            records + PAGE as u64,
            [blocks, 0, 0],
            0,
            host.uar(),
        ));
        // SAFETY: as above.
        let made = created(&unsafe { qp.run(&host.context) }.unwrap(), 0);
        // SAFETY: as above.
        let busy = unsafe { destroy(OBJECT_SRQ, srq).run(&host.context) };
        assert_eq!(busy.map(drop), Err(EBUSY));
        // SAFETY: as above.
        unsafe { destroy(OBJECT_QP, made).run(&host.context) }.unwrap();
    }
    // SAFETY: as above.
    unsafe { destroy(OBJECT_SRQ, srq).run(&host.context) }.unwrap();
}

#[test]
fn event_files_belong_to_their_context_and_type() {
    let embedded = Embedded::new("ib").unwrap();
    let (host, other) = (Host::new(&embedded), Host::new(&embedded));
    let arena = Arena::new(4);
    let driver = cq_driver(
        arena.address(),
        arena.address() + PAGE as u64,
        64,
        host.uar(),
    );
    let channel = |host: &Host| {
        let command = Command::write(CMD_CREATE_COMP_CHANNEL, &CreateCompChannel::default(), 4);
        // SAFETY: no addresses but its own.
        let attrs = unsafe { command.run(&host.context) }.unwrap();
        answer::<u32>(&attrs, ATTR_CORE_OUT)
    };
    let events = |host: &Host| {
        let mut command = Command::new(OBJECT_ASYNC_EVENT, METHOD_ASYNC_EVENT_ALLOC);
        command.object(ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, 0);
        // SAFETY: no addresses but its own.
        let attrs = unsafe { command.run(&host.context) }.unwrap();
        created(&attrs, ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE)
    };
    let (mine, theirs) = (
        [channel(&host), events(&host)],
        [channel(&other), events(&other)],
    );
    let on = |id, fd: u64| {
        let mut command = create_cq(15);
        command.object(id, fd).driver(&driver);
        errno(&host, &command)
    };
    let (completions, all) = (ATTR_CREATE_CQ_COMP_CHANNEL, ATTR_CREATE_CQ_EVENT_FD);
    assert_eq!(
        (on(completions, mine[0].into()), on(all, mine[1].into())),
        (OK, OK)
    );
    assert_eq!(
        (on(completions, mine[1].into()), on(all, mine[0].into())),
        (EBADF, EBADF)
    );
    assert_eq!(
        (on(completions, theirs[0].into()), on(all, theirs[1].into())),
        (EBADF, EBADF)
    );
    assert_eq!(
        (on(completions, 9999), on(completions, u64::MAX)),
        (EBADF, EBADF)
    );
    assert_eq!(on(completions, 1 << 40), EINVAL);
    assert_eq!(on(completions, other.context.fd() as u64), EBADF);
    // Event files outlive their context, and do not belong to a later one with the same number.
    let number = other.context.fd();
    drop(other);
    for _ in 0..8 {
        let next = Host::new(&embedded);
        if next.context.fd() == number {
            let mut command = create_cq(15);
            command
                .object(completions, theirs[0].into())
                .driver(&driver);
            assert_eq!(errno(&next, &command), EBADF);
            break;
        }
        // The number may be in use by another file of this process.
        std::mem::forget(next);
    }
    for fd in mine.into_iter().chain(theirs) {
        close(&host.context, fd as i32);
    }
}
