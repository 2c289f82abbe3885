//! Completion queues and shared receive queues.

use zerocopy::IntoBytes;

use super::super::{context, with_pd};
use super::*;
use crate::abi::ids::*;
use crate::abi::write::{self, CMD_FLAG_EXTENDED, cmd};
use crate::kernel::fake::Target;
use crate::*;

#[test]
fn completion_queue() {
    let (fake, context) = context();
    fake.on(Target::Method(OBJECT_CQ, METHOD_CQ_CREATE), |reply| {
        reply.set(ATTR_CREATE_CQ_RESP_CQE, 127u32.as_bytes());
        Ok(())
    });
    let init = CqInit {
        cqe: 100,
        user_handle: 0xdead_beef_0123,
        ..CqInit::default()
    };
    let plain = Cq::create(&context, &init, Udata::none()).unwrap();
    assert_eq!(plain.cqe(), 127);
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            SentAttr::Object(ATTR_CREATE_CQ_HANDLE, 0),
            in32(ATTR_CREATE_CQ_CQE, 100),
            in64(ATTR_CREATE_CQ_USER_HANDLE, 0xdead_beef_0123),
            in32(ATTR_CREATE_CQ_COMP_VECTOR, 0),
            SentAttr::Out(ATTR_CREATE_CQ_RESP_CQE, 4),
        ]
    );
    let init = CqInit {
        channel: Some(borrowed_fd(31)),
        comp_vector: 3,
        flags: CqFlags::TIMESTAMP_COMPLETION | CqFlags::IGNORE_OVERRUN,
        async_fd: Some(borrowed_fd(32)),
        ..init
    };
    let full = Cq::create(&context, &init, Udata::none()).unwrap();
    let call = only(&fake);
    assert_eq!(call.object_number(ATTR_CREATE_CQ_COMP_CHANNEL), Some(31));
    assert_eq!(call.object_number(ATTR_CREATE_CQ_EVENT_FD), Some(32));
    assert_eq!(call.u32(ATTR_CREATE_CQ_COMP_VECTOR), Some(3));
    assert_eq!(call.u32(ATTR_CREATE_CQ_FLAGS), Some(3));
    let handle = full.handle().0;

    fake.on(Target::Write(cmd::CMD_RESIZE_CQ), |reply| {
        reply.set_core_out(&write::ResizeCqResp {
            cqe: 255,
            reserved: 0,
        });
        reply.set_driver_out(&[6; 16]);
        Ok(())
    });
    let mut mapping = [0; 16];
    assert_eq!(full.resize(200, Udata::output(&mut mapping)), Ok(255));
    assert_eq!(mapping, [6; 16]);
    let request = write::ResizeCq {
        response: 0,
        cq_handle: handle,
        cqe: 200,
    };
    is_write(&only(&fake), cmd::CMD_RESIZE_CQ, request, 8);

    for solicited_only in [false, true] {
        full.req_notify(solicited_only).unwrap();
        let request = write::ReqNotifyCq {
            cq_handle: handle,
            solicited_only: solicited_only.into(),
        };
        is_write(&only(&fake), cmd::CMD_REQ_NOTIFY_CQ, request, 0);
    }

    full.modify_moderation(5, 6).unwrap();
    let request = write::ExModifyCq {
        cq_handle: handle,
        attr_mask: 1,
        attr: write::CqModeration {
            cq_count: 5,
            cq_period: 6,
        },
        reserved: 0,
    };
    is_write(&only(&fake), CMD_FLAG_EXTENDED | 57, request, 0);

    fake.on(Target::Method(OBJECT_CQ, METHOD_CQ_DESTROY), |reply| {
        let answer = write::DestroyCqResp {
            comp_events_reported: 3,
            async_events_reported: 4,
        };
        reply.set(ATTR_DESTROY_CQ_RESP, answer.as_bytes());
        Ok(())
    });
    assert_eq!(
        full.destroy().unwrap(),
        CqEvents {
            completion: 3,
            asynchronous: 4
        }
    );
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            SentAttr::Object(ATTR_DESTROY_CQ_HANDLE, handle.into()),
            SentAttr::Out(ATTR_DESTROY_CQ_RESP, 8)
        ]
    );
}

#[test]
fn shared_receive_queue() {
    let (fake, context, pd) = with_pd();
    fake.on(Target::Method(OBJECT_SRQ, METHOD_SRQ_CREATE), |reply| {
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_WR, 63u32.as_bytes());
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_SGE, 5u32.as_bytes());
        reply.set(ATTR_CREATE_SRQ_RESP_SRQ_NUM, 99u32.as_bytes());
        Ok(())
    });
    let init = SrqInit {
        pd: pd.handle(),
        user_handle: 0x55,
        max_wr: 50,
        max_sge: 4,
        limit: 3,
        kind: SrqKind::Basic,
        async_fd: None,
    };
    let srq = Srq::create(&context, &init, Udata::none()).unwrap();
    assert_eq!((srq.max_wr(), srq.max_sge(), srq.srq_num()), (63, 5, None));
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            SentAttr::Object(ATTR_CREATE_SRQ_HANDLE, 0),
            SentAttr::Object(ATTR_CREATE_SRQ_PD_HANDLE, pd.handle().0.into()),
            in64(ATTR_CREATE_SRQ_USER_HANDLE, 0x55),
            in32(ATTR_CREATE_SRQ_MAX_WR, 50),
            in32(ATTR_CREATE_SRQ_MAX_SGE, 4),
            in32(ATTR_CREATE_SRQ_LIMIT, 3),
            SentAttr::Out(ATTR_CREATE_SRQ_RESP_MAX_WR, 4),
            SentAttr::Out(ATTR_CREATE_SRQ_RESP_MAX_SGE, 4),
            in64(ATTR_CREATE_SRQ_TYPE, 0),
        ]
    );

    let cq = Cq::create(
        &context,
        &CqInit {
            cqe: 1,
            ..CqInit::default()
        },
        Udata::none(),
    )
    .unwrap();
    let xrcd = Xrcd::open(
        &context,
        &XrcdOpen {
            fd: Some(borrowed_fd(3)),
            oflags: libc::O_CREAT,
        },
        Udata::none(),
    )
    .unwrap();
    fake.take_calls();
    let kind = SrqKind::Xrc {
        xrcd: xrcd.handle(),
        cq: cq.handle(),
    };
    let xrc = Srq::create(
        &context,
        &SrqInit {
            kind,
            async_fd: Some(borrowed_fd(8)),
            ..init
        },
        Udata::none(),
    )
    .unwrap();
    assert_eq!(xrc.srq_num(), Some(99));
    let call = only(&fake);
    assert_eq!(
        call.object_number(ATTR_CREATE_SRQ_XRCD_HANDLE),
        Some(xrcd.handle().0.into())
    );
    assert_eq!(
        call.object_number(ATTR_CREATE_SRQ_CQ_HANDLE),
        Some(cq.handle().0.into())
    );
    assert_eq!(call.object_number(ATTR_CREATE_SRQ_EVENT_FD), Some(8));
    assert_eq!(call.u64(ATTR_CREATE_SRQ_TYPE), Some(1));
    let kind = SrqKind::TagMatching {
        cq: cq.handle(),
        max_num_tags: 12,
    };
    let _tags = Srq::create(&context, &SrqInit { kind, ..init }, Udata::none()).unwrap();
    let call = only(&fake);
    assert_eq!(call.u32(ATTR_CREATE_SRQ_MAX_NUM_TAGS), Some(12));
    assert_eq!(call.u64(ATTR_CREATE_SRQ_TYPE), Some(2));

    let handle = srq.handle().0;
    let cases = [
        (
            SrqModify {
                max_wr: Some(100),
                limit: None,
            },
            1,
            100,
            0,
        ),
        (
            SrqModify {
                max_wr: None,
                limit: Some(7),
            },
            2,
            0,
            7,
        ),
        (
            SrqModify {
                max_wr: Some(1),
                limit: Some(2),
            },
            3,
            1,
            2,
        ),
    ];
    for (change, attr_mask, max_wr, srq_limit) in cases {
        srq.modify(&change, udata(&[1; 8], &mut [])).unwrap();
        let call = only(&fake);
        assert_eq!(call.driver_in(), [1; 8]);
        let request = write::ModifySrq {
            srq_handle: handle,
            attr_mask,
            max_wr,
            srq_limit,
        };
        is_write(&call, cmd::CMD_MODIFY_SRQ, request, 0);
    }
    fake.on(Target::Write(cmd::CMD_QUERY_SRQ), |reply| {
        reply.set_core_out(&write::QuerySrqResp {
            max_wr: 1,
            max_sge: 2,
            srq_limit: 3,
            reserved: 0,
        });
        Ok(())
    });
    assert_eq!(
        srq.query(),
        Ok(SrqAttr {
            max_wr: 1,
            max_sge: 2,
            limit: 3
        })
    );
    let request = write::QuerySrq {
        response: 0,
        srq_handle: handle,
        reserved: 0,
    };
    is_write(&only(&fake), cmd::CMD_QUERY_SRQ, request, 16);
    fake.on(Target::Method(OBJECT_SRQ, METHOD_SRQ_DESTROY), |reply| {
        reply.set(ATTR_DESTROY_SRQ_RESP, 6u32.as_bytes());
        Ok(())
    });
    assert_eq!(srq.destroy().unwrap(), 6);
}

#[test]
fn work_queues_and_their_table() {
    let (fake, context, pd) = with_pd();
    let cq = Cq::create(&context, &CqInit::default(), Udata::none()).unwrap();
    fake.take_calls();
    fake.on(Target::Method(OBJECT_WQ, METHOD_WQ_CREATE), |reply| {
        reply.set(ATTR_CREATE_WQ_RESP_WQ_NUM, 0x1234u32.as_bytes());
        Ok(())
    });
    let init = WqInit {
        pd: pd.handle(),
        cq: cq.handle(),
        max_wr: 100,
        max_sge: 3,
        flags: 1,
        user_handle: 0xdead_beef_0123,
        async_fd: Some(borrowed_fd(32)),
    };
    let queue = Wq::create(&context, &init, Udata::none()).unwrap();
    assert_eq!(queue.wq_num(), 0x1234);
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            SentAttr::Object(ATTR_CREATE_WQ_HANDLE, 0),
            in64(ATTR_CREATE_WQ_USER_HANDLE, 0xdead_beef_0123),
            SentAttr::Object(ATTR_CREATE_WQ_PD_HANDLE, pd.handle().0.into()),
            SentAttr::Object(ATTR_CREATE_WQ_CQ_HANDLE, cq.handle().0.into()),
            in64(ATTR_CREATE_WQ_TYPE, 0),
            in32(ATTR_CREATE_WQ_MAX_WR, 100),
            in32(ATTR_CREATE_WQ_MAX_SGE, 3),
            in32(ATTR_CREATE_WQ_FLAGS, 1),
            SentAttr::Object(ATTR_CREATE_WQ_EVENT_FD, 32),
            SentAttr::Out(ATTR_CREATE_WQ_RESP_MAX_WR, 4),
            SentAttr::Out(ATTR_CREATE_WQ_RESP_MAX_SGE, 4),
            SentAttr::Out(ATTR_CREATE_WQ_RESP_WQ_NUM, 4),
        ]
    );

    let change = WqChange {
        state: Some(WqState::READY),
        current: None,
        flags: Some((2, 3)),
    };
    queue.modify(&change, Udata::none()).unwrap();
    let request = write::ExModifyWq {
        attr_mask: 5,
        wq_handle: queue.handle().0,
        wq_state: 1,
        curr_wq_state: 0,
        flags: 2,
        flags_mask: 3,
    };
    let number = CMD_FLAG_EXTENDED | cmd::EX_CMD_MODIFY_WQ;
    is_write(&only(&fake), number, request, 0);

    let number = CMD_FLAG_EXTENDED | cmd::EX_CMD_CREATE_RWQ_IND_TBL;
    fake.on(Target::Write(number), |reply| {
        reply.set_core_out(&write::ExCreateRwqIndTableResp {
            comp_mask: 0,
            response_length: 16,
            ind_tbl_handle: 7,
            ind_tbl_num: 8,
        });
        Ok(())
    });
    for count in [0, 3, 1 << 14] {
        let queues = vec![queue.handle(); count];
        let error = wq::create_table(&context, &queues).unwrap_err();
        assert_eq!(error.errno().raw(), libc::EINVAL, "{count}");
    }
    assert!(fake.take_ioctls().is_empty());
    let handle = queue.handle();
    for (count, length) in [(1, 16), (2, 16), (4, 24), (1 << 13, 8 + (4 << 13))] {
        let made = wq::create_table(&context, &vec![handle; count]).unwrap();
        assert_eq!(made, (WqTableHandle(7), 8));
        let call = only(&fake);
        let given = call.bytes(ATTR_CORE_IN).unwrap();
        assert_eq!(given.len(), length);
        assert_eq!(given[4..8], count.trailing_zeros().to_ne_bytes());
        assert_eq!(given[8 + 4 * (count - 1)..][..4], handle.0.to_ne_bytes());
    }
    let tables = fake.live_objects();
    for (handle, object) in tables {
        if object == OBJECT_RWQ_IND_TBL {
            wq::destroy_table(&context, WqTableHandle(handle)).unwrap();
        }
    }
    fake.take_ioctls();
    drop(queue);
    is_method(&only(&fake), OBJECT_WQ, METHOD_WQ_DESTROY);
    let objects: Vec<_> = fake.live_objects().into_iter().map(|it| it.1).collect();
    assert!(!objects.contains(&OBJECT_WQ) && !objects.contains(&OBJECT_RWQ_IND_TBL));
}
