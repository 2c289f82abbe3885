//! Dynamically connected transport: the commands of libmlx5. Programs that use it, in
//! `crates/preload` and `cargo xtask programs`, show their traffic.

use device_testing::embedded::driver::*;
use device_testing::embedded::raw::*;
use libc::{EINVAL, EOPNOTSUPP};
use uverbs::abi::ids::*;
use uverbs::abi::write::cmd::CMD_MODIFY_QP;
use uverbs::abi::write::{CMD_FLAG_EXTENDED, ExModifyQp, ModifyQp, QpDest};
use uverbs::{QpAttrMask as Mask, QpState, QpType};

const OK: i32 = 0;
/// `MLX5_QP_FLAG_TYPE_DCT`, `MLX5_QP_FLAG_TYPE_DCI`.
const TARGET: u8 = 1 << 4;
const INITIATOR: u8 = 1 << 5;

/// A command that creates a queue pair with these flags.
fn create_dc_qp(host: &Host, cq: &Cq, flags: u8, queue: [u64; 2]) -> Command {
    let [entries, records] = queue;
    let blocks = if flags == INITIATOR { 4 } else { 0 };
    let mut driver = qp_driver(entries, records, [blocks, 0, 0], 1, host.uar());
    driver[28] = flags;
    let cq = u64::from(cq.object.handle().0);
    let mut command = create_qp(QpType::DRIVER.0, 0);
    command
        .object(ATTR_CREATE_QP_PD_HANDLE, host.pd.0.into())
        .object(ATTR_CREATE_QP_SEND_CQ_HANDLE, cq)
        .object(ATTR_CREATE_QP_RECV_CQ_HANDLE, cq)
        .driver(&driver);
    command
}

fn run(host: &Host, command: &Command) -> Result<Vec<uverbs::abi::ioctl::Attr>, i32> {
    // SAFETY: addresses are those of an arena, which is longer alive.
    unsafe { command.run(&host.context) }
}

/// Moves a queue pair to a state with these attributes; returns the error, and the
/// driver's answer.
fn modify(
    host: &Host,
    handle: u32,
    to: QpState,
    mask: Mask,
    response_length: u16,
) -> (i32, [u32; 2]) {
    let base = ModifyQp {
        qp_handle: handle,
        attr_mask: (mask | Mask::STATE).bits(),
        qp_state: to.0 as _,
        port_num: 1,
        path_mtu: 3,
        min_rnr_timer: 12,
        dest: QpDest {
            port_num: 1,
            ..QpDest::default()
        },
        ..ModifyQp::default()
    };
    let body = ExModifyQp {
        base,
        ..ExModifyQp::default()
    };
    let mut command = Command::write(CMD_FLAG_EXTENDED | CMD_MODIFY_QP, &body, 8);
    if response_length != 0 {
        command.out(ATTR_UHW_OUT, response_length);
    }
    match run(host, &command) {
        Err(errno) => (errno, [0; 2]),
        Ok(attrs) if response_length == 8 => (OK, answer(&attrs, ATTR_UHW_OUT)),
        Ok(_) => (OK, [0; 2]),
    }
}

const TO_INIT: Mask = Mask::ACCESS_FLAGS.union(Mask::PKEY_INDEX).union(Mask::PORT);
const TO_RTR: Mask = Mask::MIN_RNR_TIMER.union(Mask::AV).union(Mask::PATH_MTU);

#[test]
fn a_target_has_a_number_when_it_can_receive() {
    for profile in ["ib", "roce"] {
        let host = Host::single(profile);
        let (cq, srq) = (host.cq(4), host.srq(4));
        let mut command = create_dc_qp(&host, &cq, TARGET, [0, 0]);
        assert_eq!(run(&host, &command).unwrap_err(), EINVAL, "no shared queue");
        let named = u64::from(srq.object.handle().0);
        command.object(ATTR_CREATE_QP_SRQ_HANDLE, named);
        let ranges = host.embedded.ranges();
        let handle = created(&run(&host, &command).unwrap(), ATTR_CREATE_QP_HANDLE);
        assert_eq!(host.embedded.ranges(), ranges, "it has no memory");
        let to = |state, mask, response_length| modify(&host, handle, state, mask, response_length);
        for (state, mask) in [
            (QpState::RTR, TO_RTR),
            (QpState::RTS, Mask::empty()),
            (QpState::INIT, TO_INIT | Mask::QKEY),
            (QpState::INIT, Mask::PORT),
        ] {
            assert_eq!(to(state, mask, 8).0, EINVAL, "{state:?} {mask:?}");
        }
        assert_eq!(to(QpState::INIT, TO_INIT, 8).0, OK);
        assert_eq!(to(QpState::INIT, TO_INIT, 8).0, EINVAL);
        assert_ne!(to(QpState::RTR, TO_RTR, 0).0, OK, "no room for its number");
        assert_eq!(to(QpState::RTR, TO_RTR, 4).0, EINVAL);
        let (error, [length, number]) = to(QpState::RTR, TO_RTR, 8);
        assert_eq!((error, length), (OK, 8));
        assert_ne!(number, 0);
        assert_eq!(to(QpState::ERR, Mask::empty(), 8).0, EINVAL);
        let used = destroy(OBJECT_SRQ, named as u32);
        assert_eq!(run(&host, &used).unwrap_err(), libc::EBUSY);
        run(&host, &destroy(OBJECT_QP, handle)).unwrap();
        // A target that was never created in the device, and one that its context destroys.
        let first = created(&run(&host, &command).unwrap(), ATTR_CREATE_QP_HANDLE);
        run(&host, &destroy(OBJECT_QP, first)).unwrap();
        let last = created(&run(&host, &command).unwrap(), ATTR_CREATE_QP_HANDLE);
        assert_eq!(modify(&host, last, QpState::INIT, TO_INIT, 8).0, OK);
        assert_eq!(modify(&host, last, QpState::RTR, TO_RTR, 8).0, OK);
    }
}

#[test]
fn an_initiator_is_a_queue_pair_without_receives() {
    let host = Host::single("roce");
    let cq = host.cq(4);
    let arena = Arena::new(2);
    let queue = [arena.address(), arena.address() + PAGE as u64];
    for flags in [0, TARGET | INITIATOR] {
        let command = create_dc_qp(&host, &cq, flags, queue);
        assert_eq!(run(&host, &command).unwrap_err(), EOPNOTSUPP);
    }
    // Logarithms of the numbers of streams, and of streams in error: at most 6.
    for (kind, log_streams, log_errored, expected) in [
        (INITIATOR, 6, 6, None),
        (INITIATOR, 7, 2, Some(EINVAL)),
        (INITIATOR, 2, 7, Some(EINVAL)),
        (TARGET, 2, 2, Some(EINVAL)),
    ] {
        let mut driver = qp_driver(queue[0], queue[1], [4, 0, 0], 1, host.uar());
        driver[28] = kind;
        driver[29] |= 1 << 3;
        (driver[52], driver[53]) = (log_streams, log_errored);
        let mut command = create_dc_qp(&host, &cq, kind, queue);
        let done = run(&host, command.without(ATTR_UHW_IN).driver(&driver));
        if let Ok(attrs) = &done {
            let handle = created(attrs, ATTR_CREATE_QP_HANDLE);
            run(&host, &destroy(OBJECT_QP, handle)).unwrap();
        }
        assert_eq!(done.err(), expected, "{kind:x} {log_streams} {log_errored}");
    }
    let made_by = run(&host, &create_dc_qp(&host, &cq, INITIATOR, queue)).unwrap();
    let handle = created(&made_by, ATTR_CREATE_QP_HANDLE);
    let number: u32 = answer(&made_by, ATTR_CREATE_QP_RESP_QP_NUM);
    assert_ne!(number, 0);
    let place = Mask::PKEY_INDEX | Mask::PORT;
    let retries = Mask::TIMEOUT | Mask::RETRY_CNT | Mask::RNR_RETRY;
    let ready = retries | Mask::MAX_QP_RD_ATOMIC | Mask::SQ_PSN;
    for (state, mask, error) in [
        (QpState::ERR, Mask::empty(), EINVAL),
        (QpState::INIT, place | Mask::ACCESS_FLAGS, EINVAL),
        (QpState::INIT, place, OK),
        (QpState::RTS, ready, EINVAL),
        (QpState::RTR, Mask::PATH_MTU | Mask::DEST_QPN, EINVAL),
        (QpState::RTR, Mask::PATH_MTU | Mask::AV, OK),
        (QpState::RTS, ready, OK),
        (QpState::ERR, Mask::empty(), OK),
        (QpState::RESET, Mask::empty(), OK),
    ] {
        let (found, _) = modify(&host, handle, state, mask, 0);
        assert_eq!(found, error, "{state:?} {mask:?}");
    }
    run(&host, &destroy(OBJECT_QP, handle)).unwrap();
    arena.check();
}
