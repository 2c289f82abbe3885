//! Attributes of a queue pair, and conversion from and to the kernel's
//! structures.

use bitflags::bitflags;

use crate::abi::write::{ModifyQp, QueryQpResp};
use crate::{AccessFlags, AhAttr, QpCap, QpHandle, QpState};

bitflags! {
    /// Selects attributes of a [`QpAttr`].
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct QpAttrMask: u32 {
        /// `qp_state`.
        const STATE = 1 << 0;
        /// `cur_qp_state`.
        const CUR_STATE = 1 << 1;
        /// `en_sqd_async_notify`.
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// `qp_access_flags`.
        const ACCESS_FLAGS = 1 << 3;
        /// `pkey_index`.
        const PKEY_INDEX = 1 << 4;
        /// `port_num`.
        const PORT = 1 << 5;
        /// `qkey`.
        const QKEY = 1 << 6;
        /// `ah_attr`.
        const AV = 1 << 7;
        /// `path_mtu`.
        const PATH_MTU = 1 << 8;
        /// `timeout`.
        const TIMEOUT = 1 << 9;
        /// `retry_cnt`.
        const RETRY_CNT = 1 << 10;
        /// `rnr_retry`.
        const RNR_RETRY = 1 << 11;
        /// `rq_psn`.
        const RQ_PSN = 1 << 12;
        /// `max_rd_atomic`.
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// `alt_ah_attr`, `alt_pkey_index`, `alt_port_num`, `alt_timeout`.
        const ALT_PATH = 1 << 14;
        /// `min_rnr_timer`.
        const MIN_RNR_TIMER = 1 << 15;
        /// `sq_psn`.
        const SQ_PSN = 1 << 16;
        /// `max_dest_rd_atomic`.
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// `path_mig_state`.
        const PATH_MIG_STATE = 1 << 18;
        /// `cap`.
        const CAP = 1 << 19;
        /// `dest_qp_num`.
        const DEST_QPN = 1 << 20;
        /// `rate_limit`.
        const RATE_LIMIT = 1 << 25;
        const _ = !0;
    }
}

/// Attributes of a queue pair. Numbers are the codes of the InfiniBand
/// specification where it defines them (path MTU, timeouts, rates).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpAttr {
    /// State.
    pub qp_state: QpState,
    /// State that the queue pair is assumed to be in.
    pub cur_qp_state: QpState,
    /// Code of the path MTU: 1 is 256 bytes, 5 is 4096.
    pub path_mtu: u8,
    /// Path migration: 0 migrated, 1 rearm, 2 armed.
    pub path_mig_state: u8,
    /// Queue key (UD only).
    pub qkey: u32,
    /// First packet sequence number to receive, 24 bits.
    pub rq_psn: u32,
    /// First packet sequence number to send, 24 bits.
    pub sq_psn: u32,
    /// The peer's queue pair number, 24 bits.
    pub dest_qp_num: u32,
    /// Access rights of the peer.
    pub qp_access_flags: AccessFlags,
    /// Path to the peer.
    pub ah_attr: AhAttr,
    /// Alternate path.
    pub alt_ah_attr: AhAttr,
    /// Sizes; query only, as the kernel cannot change them.
    pub cap: QpCap,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// Index of the alternate path's partition key.
    pub alt_pkey_index: u16,
    /// Request an event when the send queue has drained.
    pub en_sqd_async_notify: bool,
    /// The send queue is draining; query only.
    pub sq_draining: bool,
    /// Maximum number of outstanding RDMA reads and atomics as initiator.
    pub max_rd_atomic: u8,
    /// Maximum number of outstanding RDMA reads and atomics as target.
    pub max_dest_rd_atomic: u8,
    /// Code of the time that the peer waits after "receiver not ready".
    pub min_rnr_timer: u8,
    /// Port number, from 1.
    pub port_num: u8,
    /// Code of the acknowledgement timeout: 4.096 µs × 2^n, 0 is infinite.
    pub timeout: u8,
    /// Retries after a timeout, 0 to 7.
    pub retry_cnt: u8,
    /// Retries after "receiver not ready"; 7 is unlimited.
    pub rnr_retry: u8,
    /// Port of the alternate path.
    pub alt_port_num: u8,
    /// Timeout of the alternate path.
    pub alt_timeout: u8,
    /// Rate limit in kbit/s; raw packet queue pairs only.
    pub rate_limit: u32,
}

impl QpAttr {
    pub(crate) fn to_kernel(self, qp: QpHandle, mask: QpAttrMask) -> ModifyQp {
        ModifyQp {
            dest: self.ah_attr.to_qp_dest(),
            alt_dest: self.alt_ah_attr.to_qp_dest(),
            qp_handle: qp.0,
            attr_mask: mask.bits(),
            qkey: self.qkey,
            rq_psn: self.rq_psn,
            sq_psn: self.sq_psn,
            dest_qp_num: self.dest_qp_num,
            qp_access_flags: self.qp_access_flags.bits(),
            pkey_index: self.pkey_index,
            alt_pkey_index: self.alt_pkey_index,
            qp_state: self.qp_state.0,
            cur_qp_state: self.cur_qp_state.0,
            path_mtu: self.path_mtu,
            path_mig_state: self.path_mig_state,
            en_sqd_async_notify: self.en_sqd_async_notify.into(),
            max_rd_atomic: self.max_rd_atomic,
            max_dest_rd_atomic: self.max_dest_rd_atomic,
            min_rnr_timer: self.min_rnr_timer,
            port_num: self.port_num,
            timeout: self.timeout,
            retry_cnt: self.retry_cnt,
            rnr_retry: self.rnr_retry,
            alt_port_num: self.alt_port_num,
            alt_timeout: self.alt_timeout,
            reserved: [0; 2],
        }
    }

    pub(crate) fn from_kernel(resp: &QueryQpResp) -> Self {
        Self {
            qp_state: QpState(resp.qp_state),
            cur_qp_state: QpState(resp.cur_qp_state),
            path_mtu: resp.path_mtu,
            path_mig_state: resp.path_mig_state,
            qkey: resp.qkey,
            rq_psn: resp.rq_psn,
            sq_psn: resp.sq_psn,
            dest_qp_num: resp.dest_qp_num,
            qp_access_flags: AccessFlags::from_bits_retain(resp.qp_access_flags),
            ah_attr: AhAttr::from_qp_dest(&resp.dest),
            alt_ah_attr: AhAttr::from_qp_dest(&resp.alt_dest),
            cap: QpCap {
                max_send_wr: resp.max_send_wr,
                max_recv_wr: resp.max_recv_wr,
                max_send_sge: resp.max_send_sge,
                max_recv_sge: resp.max_recv_sge,
                max_inline_data: resp.max_inline_data,
            },
            pkey_index: resp.pkey_index,
            alt_pkey_index: resp.alt_pkey_index,
            en_sqd_async_notify: false,
            sq_draining: resp.sq_draining != 0,
            max_rd_atomic: resp.max_rd_atomic,
            max_dest_rd_atomic: resp.max_dest_rd_atomic,
            min_rnr_timer: resp.min_rnr_timer,
            port_num: resp.port_num,
            timeout: resp.timeout,
            retry_cnt: resp.retry_cnt,
            rnr_retry: resp.rnr_retry,
            alt_port_num: resp.alt_port_num,
            alt_timeout: resp.alt_timeout,
            rate_limit: 0,
        }
    }
}
