//! Conversion of queue pair attributes between the C interface and the kernel's.

use core::ffi::c_int;

use uverbs::{AccessFlags, AhAttr, QpAttr, QpAttrMask, QpCap, QpState};

use crate::abi::*;
use crate::ah::address;
use crate::errno::Errno;

/// Converts capabilities to the C interface.
pub fn cap_to_c(cap: &QpCap) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

fn address_to_c(from: &AhAttr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: from.grh.dgid },
            flow_label: from.grh.flow_label,
            sgid_index: from.grh.sgid_index,
            hop_limit: from.grh.hop_limit,
            traffic_class: from.grh.traffic_class,
        },
        dlid: from.dlid,
        sl: from.sl,
        src_path_bits: from.src_path_bits,
        static_rate: from.static_rate,
        is_global: from.is_global.into(),
        port_num: from.port_num,
    }
}

/// Converts the attribute mask. EOPNOTSUPP for attributes beyond those of the basic commands
/// and, if `rate_limit`, the rate limit.
pub fn attr_mask_from_c(mask: c_int, rate_limit: bool) -> Result<QpAttrMask, Errno> {
    let mask = mask as u32;
    let unknown = match rate_limit {
        true => mask & !IBV_QP_RATE_LIMIT,
        false => mask,
    };
    if unknown >= IBV_QP_RATE_LIMIT {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(QpAttrMask::from_bits_retain(mask as _))
}

/// Converts attributes from the C interface.
pub fn attr_from_c(from: &ibv_qp_attr) -> QpAttr {
    QpAttr {
        qp_state: QpState(from.qp_state as _),
        cur_qp_state: QpState(from.cur_qp_state as _),
        path_mtu: from.path_mtu as u8,
        path_mig_state: from.path_mig_state as u8,
        qkey: from.qkey,
        rq_psn: from.rq_psn,
        sq_psn: from.sq_psn,
        dest_qp_num: from.dest_qp_num,
        qp_access_flags: AccessFlags::from_bits_retain(from.qp_access_flags as _),
        ah_attr: address(&from.ah_attr),
        alt_ah_attr: address(&from.alt_ah_attr),
        cap: QpCap::default(),
        pkey_index: from.pkey_index,
        alt_pkey_index: from.alt_pkey_index,
        en_sqd_async_notify: from.en_sqd_async_notify != 0,
        sq_draining: from.sq_draining != 0,
        max_rd_atomic: from.max_rd_atomic,
        max_dest_rd_atomic: from.max_dest_rd_atomic,
        min_rnr_timer: from.min_rnr_timer,
        port_num: from.port_num,
        timeout: from.timeout,
        retry_cnt: from.retry_cnt,
        rnr_retry: from.rnr_retry,
        alt_port_num: from.alt_port_num,
        alt_timeout: from.alt_timeout,
        rate_limit: 0,
    }
}

/// Converts attributes to the C interface.
pub fn attr_to_c(from: &QpAttr, to: &mut ibv_qp_attr) {
    to.qp_state = from.qp_state.0 as u32;
    to.cur_qp_state = from.cur_qp_state.0 as u32;
    to.path_mtu = from.path_mtu.into();
    to.path_mig_state = from.path_mig_state.into();
    to.qkey = from.qkey;
    to.rq_psn = from.rq_psn;
    to.sq_psn = from.sq_psn;
    to.dest_qp_num = from.dest_qp_num;
    to.qp_access_flags = from.qp_access_flags.bits();
    to.cap = cap_to_c(&from.cap);
    to.ah_attr = address_to_c(&from.ah_attr);
    to.alt_ah_attr = address_to_c(&from.alt_ah_attr);
    to.pkey_index = from.pkey_index;
    to.alt_pkey_index = from.alt_pkey_index;
    to.sq_draining = from.sq_draining.into();
    to.max_rd_atomic = from.max_rd_atomic;
    to.max_dest_rd_atomic = from.max_dest_rd_atomic;
    to.min_rnr_timer = from.min_rnr_timer;
    to.port_num = from.port_num;
    to.timeout = from.timeout;
    to.retry_cnt = from.retry_cnt;
    to.rnr_retry = from.rnr_retry;
    to.alt_port_num = from.alt_port_num;
    to.alt_timeout = from.alt_timeout;
}
