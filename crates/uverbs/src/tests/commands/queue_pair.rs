//! Queue pairs.

use zerocopy::IntoBytes;

use super::super::with_pd;
use super::*;
use crate::abi::ids::*;
use crate::abi::write::{self, CMD_FLAG_EXTENDED, cmd};
use crate::kernel::fake::Target;
use crate::*;

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
        sent_attrs(&only(&fake)),
        [
            SentAttr::Object(ATTR_CREATE_QP_HANDLE, 0),
            in64(ATTR_CREATE_QP_TYPE, 4),
            in64(ATTR_CREATE_QP_USER_HANDLE, 0x1234_5678_9abc_def0),
            SentAttr::In(ATTR_CREATE_QP_CAP, CAP.as_bytes().to_vec()),
            SentAttr::Object(ATTR_CREATE_QP_PD_HANDLE, pd.handle().0.into()),
            SentAttr::Object(ATTR_CREATE_QP_SEND_CQ_HANDLE, cq.handle().0.into()),
            SentAttr::Object(ATTR_CREATE_QP_RECV_CQ_HANDLE, cq.handle().0.into()),
            SentAttr::Out(ATTR_CREATE_QP_RESP_CAP, 20),
            SentAttr::Out(ATTR_CREATE_QP_RESP_QP_NUM, 4),
            SentAttr::Out(ATTR_UHW_OUT, 32),
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
    wq::create_table(&context, &[WqHandle(1)]).unwrap();
    let mut live = fake.live_objects().into_iter();
    let table = live.find(|it| it.1 == OBJECT_RWQ_IND_TBL).unwrap();
    fake.take_calls();
    let init = QpInit {
        qp_type: QpType::RC,
        pd: Some(pd.handle()),
        send_cq: Some(cq.handle()),
        recv_cq: Some(cq.handle()),
        srq: Some(srq.handle()),
        xrcd: Some(xrcd.handle()),
        table: Some(WqTableHandle(table.0)),
        cap: CAP,
        sq_sig_all: true,
        flags: QpCreateFlags::BLOCK_MULTICAST_LOOPBACK,
        source_qpn: Some(77),
        user_handle: 1,
        async_fd: Some(borrowed_fd(55)),
    };
    // The maximum number of attributes.
    let mut out = [0; 4];
    let qp = Qp::create(&context, &init, udata(&[1], &mut out)).unwrap();
    let call = only(&fake);
    assert_eq!(call.attrs.len(), 17);
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
    assert_eq!(
        call.object_number(ATTR_CREATE_QP_IND_TABLE_HANDLE),
        Some(table.0.into())
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

/// Every field has a distinct value.
pub(super) fn full_attr() -> (QpAttr, write::ModifyQp) {
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
    // Fields that only a query has, and those that only a modification has.
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
