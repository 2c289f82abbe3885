//! What each command sends, attribute by attribute, and what it makes of the
//! answer.

use zerocopy::IntoBytes;

use super::{context, with_pd};
use crate::abi::ids::*;
use crate::abi::write::{self, CMD_FLAG_EXTENDED, cmd};
use crate::kernel::fake::{IoctlCall, Target};
use crate::*;

/// An attribute as it was sent: number, length, and bytes in or object number.
#[derive(Debug, PartialEq)]
enum Sent {
    /// Bytes in.
    In(u16, Vec<u8>),
    /// Room for an answer.
    Out(u16, u16),
    /// An object's number or descriptor.
    Object(u16, u64),
}

fn sent(call: &IoctlCall) -> Vec<Sent> {
    let convert = |recorded: &crate::kernel::fake::Recorded| {
        let attr = recorded.attr;
        assert_eq!(attr.flags, 1, "every attribute is mandatory");
        match (attr.len, recorded.bytes.is_empty()) {
            (0, _) => Sent::Object(attr.attr_id, attr.data),
            (_, false) => Sent::In(attr.attr_id, recorded.bytes.clone()),
            (len, true) => Sent::Out(attr.attr_id, len),
        }
    };
    call.attrs.iter().map(convert).collect()
}

fn in32(id: u16, value: u32) -> Sent {
    Sent::In(id, value.to_ne_bytes().to_vec())
}

fn in64(id: u16, value: u64) -> Sent {
    Sent::In(id, value.to_ne_bytes().to_vec())
}

/// The only call since the last look.
fn only(fake: &crate::kernel::fake::FakeKernel) -> IoctlCall {
    let mut calls = fake.take_ioctls();
    assert_eq!(calls.len(), 1, "{calls:#?}");
    calls.remove(0)
}

fn is_method(call: &IoctlCall, object: u16, method: u16) {
    assert_eq!((call.object, call.method), (object, method));
}

/// Checks a write command: number, exact structure, and room for the answer.
fn is_write<T>(call: &IoctlCall, number: u32, request: T, answer: u16)
where
    T: zerocopy::FromBytes + PartialEq + core::fmt::Debug,
{
    is_method(call, OBJECT_DEVICE, METHOD_INVOKE_WRITE);
    assert_eq!(call.u64(ATTR_WRITE_CMD), Some(number.into()));
    assert_eq!(call.core_in::<T>().unwrap(), request);
    assert_eq!(
        call.attr(ATTR_CORE_OUT)
            .map_or(0, |recorded| recorded.attr.len),
        answer
    );
}

/// Input bytes to a driver that takes no addresses.
fn udata<'a>(input: &'a [u8], output: &'a mut [u8]) -> Udata<'a> {
    // SAFETY: the fake's driver does nothing with its data.
    unsafe { Udata::new(input, output) }
}

#[test]
fn get_context() {
    let (fake, context) = context();
    fake.on(Target::Method(OBJECT_DEVICE, METHOD_GET_CONTEXT), |reply| {
        reply.set(ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 7u32.as_bytes());
        reply.set(ATTR_GET_CONTEXT_CORE_SUPPORT, 1u64.as_bytes());
        reply.set_driver_out(&[9; 100]);
        Ok(())
    });
    let mut answer = [0xff; 12];
    let info = context.get_context(udata(&[1, 2, 3], &mut answer)).unwrap();
    assert_eq!(
        info,
        ContextInfo {
            num_comp_vectors: 7,
            core_support: 1
        }
    );
    assert!(info.optional_mr_access());
    assert_eq!(answer, [9; 12], "a longer answer is cut off");
    let call = only(&fake);
    is_method(&call, OBJECT_DEVICE, METHOD_GET_CONTEXT);
    assert_eq!(
        sent(&call),
        [
            Sent::Out(ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 4),
            Sent::Out(ATTR_GET_CONTEXT_CORE_SUPPORT, 8),
            Sent::In(ATTR_UHW_IN, vec![1, 2, 3]),
            Sent::Out(ATTR_UHW_OUT, 12),
        ]
    );
    context.query_context().unwrap();
    is_method(&only(&fake), OBJECT_DEVICE, METHOD_QUERY_CONTEXT);
}

#[test]
fn driver_data_that_is_not_answered_reads_as_zero() {
    let (fake, context) = context();
    fake.on(Target::Write(cmd::CMD_ALLOC_PD), |reply| {
        reply.set_driver_out(&[5; 4]);
        Ok(())
    });
    let mut answer = [0xff; 16];
    let _pd = Pd::alloc(&context, Udata::output(&mut answer)).unwrap();
    assert_eq!(answer, [5, 5, 5, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn long_driver_data_goes_by_address() {
    let (fake, context) = context();
    let input: Vec<u8> = (0..100).collect();
    let _pd = Pd::alloc(&context, udata(&input, &mut [])).unwrap();
    let call = only(&fake);
    assert_eq!(call.driver_in(), input);
    assert!(
        call.attr(ATTR_UHW_OUT).is_none(),
        "no room asked for, none given"
    );
}

#[test]
fn too_much_driver_data_is_refused_before_the_kernel_is_asked() {
    let (fake, context) = context();
    let mut huge = vec![0; 65536];
    let error = Pd::alloc(&context, Udata::output(&mut huge)).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EINVAL);
    assert_eq!(error.command(), Command::AllocPd);
    let error = Pd::alloc(&context, udata(&huge, &mut [])).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EINVAL);
    assert!(fake.take_calls().is_empty());
}

#[test]
fn protection_domain() {
    let (fake, context) = context();
    let pd = Pd::alloc(&context, Udata::none()).unwrap();
    is_write(
        &only(&fake),
        cmd::CMD_ALLOC_PD,
        write::AllocPd { response: 0 },
        4,
    );
    let handle = pd.handle();
    assert_eq!(fake.live_objects(), [(handle.0, OBJECT_PD)]);
    pd.destroy().unwrap();
    let call = only(&fake);
    is_method(&call, OBJECT_PD, METHOD_PD_DESTROY);
    assert_eq!(
        sent(&call),
        [Sent::Object(ATTR_DESTROY_PD_HANDLE, handle.0.into())]
    );
    assert!(fake.live_objects().is_empty());
}

#[test]
fn memory_region() {
    let (fake, context, pd) = with_pd();
    fake.on(Target::Write(cmd::CMD_REG_MR), |reply| {
        reply.set_core_out(&write::RegMrResp {
            mr_handle: 0x77,
            lkey: 0xa1,
            rkey: 0xa2,
        });
        Ok(())
    });
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
    let init = MrInit {
        pd: pd.handle(),
        addr: 0x1000,
        length: 0x2000,
        iova: 0x9000,
        access,
    };
    // SAFETY: the fake touches no memory.
    let mut region = unsafe { Mr::register(&context, &init, Udata::none()) }.unwrap();
    let request = write::RegMr {
        response: 0,
        start: 0x1000,
        length: 0x2000,
        hca_va: 0x9000,
        pd_handle: pd.handle().0,
        access_flags: 0b101,
    };
    is_write(&only(&fake), cmd::CMD_REG_MR, request, 12);
    assert_eq!(
        (region.handle(), region.lkey(), region.rkey()),
        (MrHandle(0x77), 0xa1, 0xa2)
    );

    fake.on(Target::Write(cmd::CMD_REREG_MR), |reply| {
        reply.set_core_out(&write::ReregMrResp {
            lkey: 0xb1,
            rkey: 0xb2,
        });
        Ok(())
    });
    let cases = [
        (
            Rereg {
                translation: Some((1, 2, 3)),
                ..Rereg::default()
            },
            (1, 1, 2, 3, 0, 0),
        ),
        (
            Rereg {
                pd: Some(PdHandle(44)),
                ..Rereg::default()
            },
            (2, 0, 0, 0, 44, 0),
        ),
        (
            Rereg {
                access: Some(AccessFlags::LOCAL_WRITE),
                ..Rereg::default()
            },
            (4, 0, 0, 0, 0, 1),
        ),
    ];
    for (change, (flags, start, length, hca_va, pd_handle, access_flags)) in cases {
        // SAFETY: as above.
        unsafe { region.rereg(&change, Udata::none()) }.unwrap();
        let request = write::ReregMr {
            response: 0,
            mr_handle: 0x77,
            flags,
            start,
            length,
            hca_va,
            pd_handle,
            access_flags,
        };
        is_write(&only(&fake), cmd::CMD_REREG_MR, request, 8);
    }
    assert_eq!(
        (region.lkey(), region.rkey()),
        (0xb1, 0xb2),
        "the keys are the new ones"
    );
    // The fake knows the region by its own number.
    region.into_handle();
}

#[test]
fn region_of_a_dma_buffer() {
    let (fake, context, pd) = with_pd();
    fake.on(Target::Method(OBJECT_MR, METHOD_REG_DMABUF_MR), |reply| {
        reply.set(ATTR_REG_DMABUF_MR_RESP_LKEY, 0x11u32.as_bytes());
        reply.set(ATTR_REG_DMABUF_MR_RESP_RKEY, 0x22u32.as_bytes());
        Ok(())
    });
    let access = AccessFlags::LOCAL_WRITE;
    let init = DmabufMrInit {
        pd: pd.handle(),
        offset: 1,
        length: 2,
        iova: 3,
        fd: 9,
        access,
    };
    let region = Mr::register_dmabuf(&context, &init, Udata::none()).unwrap();
    assert_eq!((region.lkey(), region.rkey()), (0x11, 0x22));
    let call = only(&fake);
    assert_eq!(
        sent(&call),
        [
            Sent::Object(ATTR_REG_DMABUF_MR_HANDLE, 0),
            Sent::Out(ATTR_REG_DMABUF_MR_RESP_LKEY, 4),
            Sent::Out(ATTR_REG_DMABUF_MR_RESP_RKEY, 4),
            Sent::Object(ATTR_REG_DMABUF_MR_PD_HANDLE, pd.handle().0.into()),
            in64(ATTR_REG_DMABUF_MR_OFFSET, 1),
            in64(ATTR_REG_DMABUF_MR_LENGTH, 2),
            in64(ATTR_REG_DMABUF_MR_IOVA, 3),
            in32(ATTR_REG_DMABUF_MR_FD, 9),
            in32(ATTR_REG_DMABUF_MR_ACCESS_FLAGS, 1),
        ]
    );

    fake.on(Target::Method(OBJECT_MR, METHOD_QUERY_MR), |reply| {
        reply.set(ATTR_QUERY_MR_RESP_LKEY, 0x11u32.as_bytes());
        reply.set(ATTR_QUERY_MR_RESP_RKEY, 0x22u32.as_bytes());
        reply.set(ATTR_QUERY_MR_RESP_LENGTH, 2u64.as_bytes());
        reply.set_unwritten(ATTR_QUERY_MR_RESP_IOVA);
        Ok(())
    });
    let attr = mr::query(&context, region.handle()).unwrap();
    assert_eq!(
        attr,
        MrAttr {
            lkey: 0x11,
            rkey: 0x22,
            length: 2,
            iova: 0
        },
        "iova is optional"
    );
    let call = only(&fake);
    assert_eq!(
        sent(&call).first(),
        Some(&Sent::Object(
            ATTR_QUERY_MR_HANDLE,
            region.handle().0.into()
        ))
    );

    let sges = [
        Sge {
            addr: 1,
            length: 2,
            lkey: 3,
        },
        Sge {
            addr: 4,
            length: 5,
            lkey: 6,
        },
    ];
    context
        .advise_mr(
            pd.handle(),
            Advice::PREFETCH_WRITE,
            AdviseFlags::FLUSH,
            &sges,
        )
        .unwrap();
    assert_eq!(
        sent(&only(&fake)),
        [
            Sent::Object(ATTR_ADVISE_MR_PD_HANDLE, pd.handle().0.into()),
            in64(ATTR_ADVISE_MR_ADVICE, 1),
            in32(ATTR_ADVISE_MR_FLAGS, 1),
            Sent::In(ATTR_ADVISE_MR_SGE_LIST, sges.as_bytes().to_vec()),
        ]
    );
}

#[test]
fn memory_window() {
    let (fake, context, pd) = with_pd();
    let window = Mw::alloc(&context, pd.handle(), MwType::TYPE_2, Udata::none()).unwrap();
    let request = write::AllocMw {
        response: 0,
        pd_handle: pd.handle().0,
        mw_type: 2,
        reserved: [0; 3],
    };
    is_write(&only(&fake), cmd::CMD_ALLOC_MW, request, 8);
    let handle = window.handle();
    window.destroy().unwrap();
    assert_eq!(
        sent(&only(&fake)),
        [Sent::Object(ATTR_DESTROY_MW_HANDLE, handle.0.into())]
    );
}

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
        sent(&only(&fake)),
        [
            Sent::Object(ATTR_CREATE_CQ_HANDLE, 0),
            in32(ATTR_CREATE_CQ_CQE, 100),
            in64(ATTR_CREATE_CQ_USER_HANDLE, 0xdead_beef_0123),
            in32(ATTR_CREATE_CQ_COMP_VECTOR, 0),
            Sent::Out(ATTR_CREATE_CQ_RESP_CQE, 4),
        ]
    );
    let init = CqInit {
        channel: Some(31),
        comp_vector: 3,
        flags: CqFlags::TIMESTAMP_COMPLETION | CqFlags::IGNORE_OVERRUN,
        async_fd: Some(32),
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
        sent(&only(&fake)),
        [
            Sent::Object(ATTR_DESTROY_CQ_HANDLE, handle.into()),
            Sent::Out(ATTR_DESTROY_CQ_RESP, 8)
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
        sent(&only(&fake)),
        [
            Sent::Object(ATTR_CREATE_SRQ_HANDLE, 0),
            Sent::Object(ATTR_CREATE_SRQ_PD_HANDLE, pd.handle().0.into()),
            in64(ATTR_CREATE_SRQ_USER_HANDLE, 0x55),
            in32(ATTR_CREATE_SRQ_MAX_WR, 50),
            in32(ATTR_CREATE_SRQ_MAX_SGE, 4),
            in32(ATTR_CREATE_SRQ_LIMIT, 3),
            Sent::Out(ATTR_CREATE_SRQ_RESP_MAX_WR, 4),
            Sent::Out(ATTR_CREATE_SRQ_RESP_MAX_SGE, 4),
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
            fd: Some(3),
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
            async_fd: Some(8),
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

const CAP: QpCap = QpCap {
    max_send_wr: 1,
    max_recv_wr: 2,
    max_send_sge: 3,
    max_recv_sge: 4,
    max_inline_data: 5,
};

#[test]
fn queue_pair() {
    let (fake, context, pd) = with_pd();
    let cq = Cq::create(
        &context,
        &CqInit {
            cqe: 1,
            ..CqInit::default()
        },
        Udata::none(),
    )
    .unwrap();
    fake.take_calls();
    fake.on(Target::Method(OBJECT_QP, METHOD_QP_CREATE), |reply| {
        let given = QpCap {
            max_send_wr: 11,
            max_recv_wr: 12,
            max_send_sge: 13,
            max_recv_sge: 14,
            max_inline_data: 15,
        };
        reply.set(ATTR_CREATE_QP_RESP_CAP, given.as_bytes());
        reply.set(ATTR_CREATE_QP_RESP_QP_NUM, 0xabcdefu32.as_bytes());
        reply.set_driver_out(&[3; 32]);
        Ok(())
    });
    let init = QpInit {
        qp_type: QpType::UD,
        pd: Some(pd.handle()),
        send_cq: Some(cq.handle()),
        recv_cq: Some(cq.handle()),
        cap: CAP,
        user_handle: 0x1234_5678_9abc_def0,
        ..QpInit::default()
    };
    let mut mapping = [0; 32];
    let qp = Qp::create(&context, &init, Udata::output(&mut mapping)).unwrap();
    assert_eq!(
        (qp.qp_num(), qp.cap().max_inline_data, mapping),
        (0xabcdef, 15, [3; 32])
    );
    assert_eq!(
        sent(&only(&fake)),
        [
            Sent::Object(ATTR_CREATE_QP_HANDLE, 0),
            in64(ATTR_CREATE_QP_TYPE, 4),
            in64(ATTR_CREATE_QP_USER_HANDLE, 0x1234_5678_9abc_def0),
            Sent::In(ATTR_CREATE_QP_CAP, CAP.as_bytes().to_vec()),
            Sent::Object(ATTR_CREATE_QP_PD_HANDLE, pd.handle().0.into()),
            Sent::Object(ATTR_CREATE_QP_SEND_CQ_HANDLE, cq.handle().0.into()),
            Sent::Object(ATTR_CREATE_QP_RECV_CQ_HANDLE, cq.handle().0.into()),
            Sent::Out(ATTR_CREATE_QP_RESP_CAP, 20),
            Sent::Out(ATTR_CREATE_QP_RESP_QP_NUM, 4),
            Sent::Out(ATTR_UHW_OUT, 32),
        ]
    );

    fake.on(Target::Method(OBJECT_QP, METHOD_QP_DESTROY), |reply| {
        reply.set(ATTR_DESTROY_QP_RESP, 2u32.as_bytes());
        Ok(())
    });
    assert_eq!(qp.destroy().unwrap(), 2);
}

#[test]
fn queue_pair_with_everything() {
    let (fake, context, pd) = with_pd();
    let xrcd = Xrcd::open(&context, &XrcdOpen::default(), Udata::none()).unwrap();
    let request = write::OpenXrcd {
        response: 0,
        fd: u32::MAX,
        oflags: 0,
    };
    is_write(&only(&fake), cmd::CMD_OPEN_XRCD, request, 4);
    let cq = Cq::create(
        &context,
        &CqInit {
            cqe: 1,
            ..CqInit::default()
        },
        Udata::none(),
    )
    .unwrap();
    let init = SrqInit {
        pd: pd.handle(),
        user_handle: 0,
        max_wr: 1,
        max_sge: 1,
        limit: 0,
        kind: SrqKind::Basic,
        async_fd: None,
    };
    let srq = Srq::create(&context, &init, Udata::none()).unwrap();
    fake.take_calls();
    let init = QpInit {
        qp_type: QpType::RC,
        pd: Some(pd.handle()),
        send_cq: Some(cq.handle()),
        recv_cq: Some(cq.handle()),
        srq: Some(srq.handle()),
        xrcd: Some(xrcd.handle()),
        cap: CAP,
        sq_sig_all: true,
        flags: QpCreateFlags::BLOCK_MULTICAST_LOOPBACK,
        source_qpn: Some(77),
        user_handle: 1,
        async_fd: Some(55),
    };
    // As many attributes as there can be.
    let mut out = [0; 4];
    let qp = Qp::create(&context, &init, udata(&[1], &mut out)).unwrap();
    let call = only(&fake);
    assert_eq!(call.attrs.len(), 16);
    assert_eq!(
        call.u32(ATTR_CREATE_QP_FLAGS),
        Some(1 << 1 | 1 << 12),
        "signal all is a flag"
    );
    assert_eq!(call.u32(ATTR_CREATE_QP_SOURCE_QPN), Some(77));
    assert_eq!(call.object_number(ATTR_CREATE_QP_EVENT_FD), Some(55));
    assert_eq!(
        call.object_number(ATTR_CREATE_QP_SRQ_HANDLE),
        Some(srq.handle().0.into())
    );
    assert_eq!(
        call.object_number(ATTR_CREATE_QP_XRCD_HANDLE),
        Some(xrcd.handle().0.into())
    );
    drop(qp);
    fake.take_calls();

    let open = QpOpen {
        xrcd: xrcd.handle(),
        qpn: 0x123,
        qp_type: QpType::XRC_TGT,
        user_handle: 9,
    };
    fake.on(Target::Write(cmd::CMD_OPEN_QP), |reply| {
        let handle = 0x777;
        reply.set_core_out(&write::CreateQpResp {
            qp_handle: handle,
            qpn: 0x123,
            max_send_wr: 8,
            ..Default::default()
        });
        Ok(())
    });
    let opened = Qp::open(&context, &open, Udata::none()).unwrap();
    assert_eq!(
        (opened.handle(), opened.qp_num(), opened.cap().max_send_wr),
        (QpHandle(0x777), 0x123, 8)
    );
    let request = write::OpenQp {
        response: 0,
        user_handle: 9,
        pd_handle: xrcd.handle().0,
        qpn: 0x123,
        qp_type: 10,
        reserved: [0; 7],
    };
    is_write(&only(&fake), cmd::CMD_OPEN_QP, request, 32);
    opened.into_handle();
    let error = Qp::open(
        &context,
        &QpOpen {
            qp_type: QpType(256),
            ..open
        },
        Udata::none(),
    )
    .unwrap_err();
    assert_eq!(error.errno().raw(), libc::EINVAL);
    assert!(fake.take_calls().is_empty());
}

fn any_qp(
    fake: &crate::kernel::fake::FakeKernel,
    context: &std::sync::Arc<Context>,
    pd: &Pd<std::sync::Arc<Context>>,
) -> Qp<std::sync::Arc<Context>> {
    let init = QpInit {
        qp_type: QpType::RC,
        pd: Some(pd.handle()),
        ..QpInit::default()
    };
    let qp = Qp::create(context, &init, Udata::none()).unwrap();
    fake.take_calls();
    qp
}

/// Every field has a value of its own.
fn full_attr() -> (QpAttr, write::ModifyQp) {
    let path = |n: u8| AhAttr {
        grh: GlobalRoute {
            dgid: [n; 16],
            flow_label: 0x1_0000 + u32::from(n),
            sgid_index: n + 1,
            hop_limit: n + 2,
            traffic_class: n + 3,
        },
        dlid: 0x200 + u16::from(n),
        sl: n + 4,
        src_path_bits: n + 5,
        static_rate: n + 6,
        is_global: true,
        port_num: n + 7,
    };
    let dest = |n: u8| write::QpDest {
        dgid: [n; 16],
        flow_label: 0x1_0000 + u32::from(n),
        dlid: 0x200 + u16::from(n),
        reserved: 0,
        sgid_index: n + 1,
        hop_limit: n + 2,
        traffic_class: n + 3,
        sl: n + 4,
        src_path_bits: n + 5,
        static_rate: n + 6,
        is_global: 1,
        port_num: n + 7,
    };
    let attr = QpAttr {
        qp_state: QpState::RTR,
        cur_qp_state: QpState::INIT,
        path_mtu: 3,
        path_mig_state: 2,
        qkey: 0x9001,
        rq_psn: 0x9002,
        sq_psn: 0x9003,
        dest_qp_num: 0x9004,
        qp_access_flags: AccessFlags::from_bits_retain(0x9005),
        ah_attr: path(0x10),
        alt_ah_attr: path(0x30),
        cap: QpCap::default(),
        pkey_index: 0x9006,
        alt_pkey_index: 0x9007,
        en_sqd_async_notify: true,
        sq_draining: false,
        max_rd_atomic: 0x51,
        max_dest_rd_atomic: 0x52,
        min_rnr_timer: 0x53,
        port_num: 0x54,
        timeout: 0x55,
        retry_cnt: 0x56,
        rnr_retry: 0x57,
        alt_port_num: 0x58,
        alt_timeout: 0x59,
        rate_limit: 0,
    };
    let kernel = write::ModifyQp {
        dest: dest(0x10),
        alt_dest: dest(0x30),
        qp_handle: 0,
        attr_mask: 0,
        qkey: 0x9001,
        rq_psn: 0x9002,
        sq_psn: 0x9003,
        dest_qp_num: 0x9004,
        qp_access_flags: 0x9005,
        pkey_index: 0x9006,
        alt_pkey_index: 0x9007,
        qp_state: 2,
        cur_qp_state: 1,
        path_mtu: 3,
        path_mig_state: 2,
        en_sqd_async_notify: 1,
        max_rd_atomic: 0x51,
        max_dest_rd_atomic: 0x52,
        min_rnr_timer: 0x53,
        port_num: 0x54,
        timeout: 0x55,
        retry_cnt: 0x56,
        rnr_retry: 0x57,
        alt_port_num: 0x58,
        alt_timeout: 0x59,
        reserved: [0; 2],
    };
    (attr, kernel)
}

#[test]
fn modify_queue_pair() {
    let (fake, context, pd) = with_pd();
    let qp = any_qp(&fake, &context, &pd);
    let (attr, kernel) = full_attr();
    let mask = QpAttrMask::from_bits_retain(0x1f_ffff);
    qp.modify(&attr, mask, Udata::none()).unwrap();
    let base = write::ModifyQp {
        qp_handle: qp.handle().0,
        attr_mask: 0x1f_ffff,
        ..kernel
    };
    is_write(&only(&fake), cmd::CMD_MODIFY_QP, base, 0);

    // A rate limit needs the extended command.
    let limited = QpAttr {
        rate_limit: 1_000_000,
        ..attr
    };
    qp.modify(&limited, mask | QpAttrMask::RATE_LIMIT, Udata::none())
        .unwrap();
    let base = write::ModifyQp {
        attr_mask: 0x1f_ffff | 1 << 25,
        ..base
    };
    let request = write::ExModifyQp {
        base,
        rate_limit: 1_000_000,
        reserved: 0,
    };
    is_write(
        &only(&fake),
        CMD_FLAG_EXTENDED | cmd::CMD_MODIFY_QP,
        request,
        8,
    );

    // So does driver data.
    let mut out = [0; 8];
    qp.modify(&attr, QpAttrMask::STATE, Udata::output(&mut out))
        .unwrap();
    let base = write::ModifyQp {
        attr_mask: 1,
        ..base
    };
    let request = write::ExModifyQp {
        base,
        rate_limit: 0,
        reserved: 0,
    };
    let call = only(&fake);
    is_write(&call, CMD_FLAG_EXTENDED | cmd::CMD_MODIFY_QP, request, 8);
    assert_eq!(call.attr(ATTR_UHW_OUT).unwrap().attr.len, 8);
}

#[test]
fn query_queue_pair() {
    let (fake, context, pd) = with_pd();
    let qp = any_qp(&fake, &context, &pd);
    let (attr, kernel) = full_attr();
    fake.on(Target::Write(cmd::CMD_QUERY_QP), move |reply| {
        let answer = write::QueryQpResp {
            dest: kernel.dest,
            alt_dest: kernel.alt_dest,
            max_send_wr: CAP.max_send_wr,
            max_recv_wr: CAP.max_recv_wr,
            max_send_sge: CAP.max_send_sge,
            max_recv_sge: CAP.max_recv_sge,
            max_inline_data: CAP.max_inline_data,
            qkey: kernel.qkey,
            rq_psn: kernel.rq_psn,
            sq_psn: kernel.sq_psn,
            dest_qp_num: kernel.dest_qp_num,
            qp_access_flags: kernel.qp_access_flags,
            pkey_index: kernel.pkey_index,
            alt_pkey_index: kernel.alt_pkey_index,
            qp_state: kernel.qp_state,
            cur_qp_state: kernel.cur_qp_state,
            path_mtu: kernel.path_mtu,
            path_mig_state: kernel.path_mig_state,
            sq_draining: 1,
            max_rd_atomic: kernel.max_rd_atomic,
            max_dest_rd_atomic: kernel.max_dest_rd_atomic,
            min_rnr_timer: kernel.min_rnr_timer,
            port_num: kernel.port_num,
            timeout: kernel.timeout,
            retry_cnt: kernel.retry_cnt,
            rnr_retry: kernel.rnr_retry,
            alt_port_num: kernel.alt_port_num,
            alt_timeout: kernel.alt_timeout,
            sq_sig_all: 1,
            reserved: [0; 5],
        };
        reply.set_core_out(&answer);
        Ok(())
    });
    let (got, init) = qp.query(QpAttrMask::STATE | QpAttrMask::CAP).unwrap();
    // What a query says and a modification does not, and the other way round.
    assert_eq!(
        got,
        QpAttr {
            cap: CAP,
            sq_draining: true,
            en_sqd_async_notify: false,
            ..attr
        }
    );
    assert_eq!(
        init,
        QpInitQuery {
            cap: CAP,
            sq_sig_all: true
        }
    );
    let request = write::QueryQp {
        response: 0,
        qp_handle: qp.handle().0,
        attr_mask: 1 | 1 << 19,
    };
    is_write(&only(&fake), cmd::CMD_QUERY_QP, request, 128);
}

#[test]
fn multicast() {
    let (fake, context, pd) = with_pd();
    let qp = any_qp(&fake, &context, &pd);
    let (gid, qp_handle) = ([7; 16], qp.handle().0);
    qp.attach_multicast(&gid, 0xc001).unwrap();
    let request = write::AttachMcast {
        gid,
        qp_handle,
        mlid: 0xc001,
        reserved: 0,
    };
    is_write(&only(&fake), cmd::CMD_ATTACH_MCAST, request, 0);
    qp.detach_multicast(&gid, 0xc001).unwrap();
    let request = write::DetachMcast {
        gid,
        qp_handle,
        mlid: 0xc001,
        reserved: 0,
    };
    is_write(&only(&fake), cmd::CMD_DETACH_MCAST, request, 0);
}

#[test]
fn address_handle() {
    let (fake, context, pd) = with_pd();
    let (attr, _) = full_attr();
    let ah = Ah::create(&context, pd.handle(), &attr.ah_attr, 0x66, Udata::none()).unwrap();
    let request = write::CreateAh {
        response: 0,
        user_handle: 0x66,
        pd_handle: pd.handle().0,
        reserved: 0,
        attr: write::AhAttr {
            grh: write::GlobalRoute {
                dgid: [0x10; 16],
                flow_label: 0x1_0010,
                sgid_index: 0x11,
                hop_limit: 0x12,
                traffic_class: 0x13,
                reserved: 0,
            },
            dlid: 0x210,
            sl: 0x14,
            src_path_bits: 0x15,
            static_rate: 0x16,
            is_global: 1,
            port_num: 0x17,
            reserved: 0,
        },
    };
    is_write(&only(&fake), cmd::CMD_CREATE_AH, request, 4);
    let handle = ah.handle();
    ah.destroy().unwrap();
    assert_eq!(
        sent(&only(&fake)),
        [Sent::Object(ATTR_DESTROY_AH_HANDLE, handle.0.into())]
    );
}

#[test]
fn queries() {
    let (fake, context) = context();
    fake.on(Target::Write(cmd::CMD_QUERY_DEVICE), |reply| {
        reply.set_core_out(&DeviceAttr {
            max_qp: 5,
            ..DeviceAttr::default()
        });
        Ok(())
    });
    assert_eq!(context.query_device().unwrap().max_qp, 5);
    is_write(
        &only(&fake),
        cmd::CMD_QUERY_DEVICE,
        write::QueryDevice { response: 0 },
        176,
    );

    // An older kernel answers less, and says so.
    fake.on(
        Target::Write(CMD_FLAG_EXTENDED | cmd::CMD_QUERY_DEVICE),
        |reply| {
            let base = DeviceAttr {
                max_cq: 6,
                ..DeviceAttr::default()
            };
            let answer = DeviceAttrEx {
                base,
                response_length: 232,
                timestamp_mask: 9,
                xrc_odp_caps: 8,
                ..Default::default()
            };
            reply.set(
                ATTR_CORE_OUT,
                answer.as_bytes().get(..232).unwrap_or_default(),
            );
            Ok(())
        },
    );
    let attr = context.query_device_ex(Udata::none()).unwrap();
    assert_eq!(
        (attr.base.max_cq, attr.timestamp_mask, attr.xrc_odp_caps),
        (6, 9, 0)
    );
    let request = write::ExQueryDevice {
        comp_mask: 0,
        reserved: 0,
    };
    is_write(
        &only(&fake),
        CMD_FLAG_EXTENDED | cmd::CMD_QUERY_DEVICE,
        request,
        304,
    );

    fake.on(Target::Method(OBJECT_DEVICE, METHOD_QUERY_PORT), |reply| {
        let attr = PortAttr {
            port_cap_flags2: 4,
            active_speed_ex: 0x100,
            ..PortAttr::default()
        };
        reply.set(ATTR_QUERY_PORT_RESP, attr.as_bytes());
        Ok(())
    });
    let attr = context.query_port(2).unwrap();
    assert_eq!((attr.port_cap_flags2, attr.active_speed_ex), (4, 0x100));
    assert_eq!(
        sent(&only(&fake)),
        [
            in64(ATTR_QUERY_PORT_PORT_NUM, 2),
            Sent::Out(ATTR_QUERY_PORT_RESP, 48)
        ]
    );
}

#[test]
fn gids() {
    let (fake, context) = context();
    let entry = GidEntry {
        gid: [3; 16],
        gid_index: 1,
        port_num: 2,
        gid_type: 2,
        netdev_ifindex: 4,
    };
    fake.on(
        Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_TABLE),
        move |reply| {
            reply.set(ATTR_QUERY_GID_TABLE_RESP_ENTRIES, entry.as_bytes());
            reply.set(ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, 1u64.as_bytes());
            Ok(())
        },
    );
    let mut entries = [GidEntry {
        gid_index: 9,
        ..GidEntry::default()
    }; 3];
    assert_eq!(context.query_gid_table(&mut entries), Ok(1));
    assert_eq!(entries, [entry, GidEntry::default(), GidEntry::default()]);
    assert_eq!(
        sent(&only(&fake)),
        [
            in64(ATTR_QUERY_GID_TABLE_ENTRY_SIZE, 32),
            in32(ATTR_QUERY_GID_TABLE_FLAGS, 0),
            Sent::Out(ATTR_QUERY_GID_TABLE_RESP_ENTRIES, 96),
            Sent::Out(ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, 8),
        ]
    );
    fake.on(
        Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_TABLE),
        |reply| {
            reply.set(ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, u64::MAX.as_bytes());
            Ok(())
        },
    );
    let error = context.query_gid_table(&mut entries).unwrap_err();
    assert!(matches!(
        error,
        Error::BadAnswer {
            command: Command::QueryGidTable,
            ..
        }
    ));
    fake.take_calls();

    fake.on(
        Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_ENTRY),
        move |reply| {
            reply.set(ATTR_QUERY_GID_ENTRY_RESP_ENTRY, entry.as_bytes());
            Ok(())
        },
    );
    assert_eq!(context.query_gid_entry(2, 1), Ok(entry));
    assert_eq!(
        sent(&only(&fake)),
        [
            in64(ATTR_QUERY_GID_ENTRY_PORT, 2),
            in64(ATTR_QUERY_GID_ENTRY_GID_INDEX, 1),
            in32(ATTR_QUERY_GID_ENTRY_FLAGS, 0),
            Sent::Out(ATTR_QUERY_GID_ENTRY_RESP_ENTRY, 32),
        ]
    );
}
