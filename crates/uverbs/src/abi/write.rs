//! Structures and numbers of the write commands, from `ib_user_verbs.h`.
//!
//! Flexible driver data at the end of the C structures is left out: it is passed
//! in separate attributes ([`super::ids::ATTR_UHW_IN`]). Commands keep their
//! `response` field, which the ioctl path ignores.

use super::kernel_structs;

/// The write interface's only ABI version.
pub const ABI_VERSION: u32 = 6;
/// Set in a command number: the extended variant.
pub const CMD_FLAG_EXTENDED: u32 = 0x8000_0000;

/// Command numbers, without the `IB_USER_VERBS_` prefix.
#[allow(missing_docs, reason = "the names are the kernel header's")]
pub mod cmd {
    pub const CMD_GET_CONTEXT: u32 = 0;
    pub const CMD_QUERY_DEVICE: u32 = 1;
    pub const CMD_QUERY_PORT: u32 = 2;
    pub const CMD_ALLOC_PD: u32 = 3;
    pub const CMD_DEALLOC_PD: u32 = 4;
    pub const CMD_CREATE_AH: u32 = 5;
    pub const CMD_MODIFY_AH: u32 = 6;
    pub const CMD_QUERY_AH: u32 = 7;
    pub const CMD_DESTROY_AH: u32 = 8;
    pub const CMD_REG_MR: u32 = 9;
    pub const CMD_REG_SMR: u32 = 10;
    pub const CMD_REREG_MR: u32 = 11;
    pub const CMD_QUERY_MR: u32 = 12;
    pub const CMD_DEREG_MR: u32 = 13;
    pub const CMD_ALLOC_MW: u32 = 14;
    pub const CMD_BIND_MW: u32 = 15;
    pub const CMD_DEALLOC_MW: u32 = 16;
    pub const CMD_CREATE_COMP_CHANNEL: u32 = 17;
    pub const CMD_CREATE_CQ: u32 = 18;
    pub const CMD_RESIZE_CQ: u32 = 19;
    pub const CMD_DESTROY_CQ: u32 = 20;
    pub const CMD_POLL_CQ: u32 = 21;
    pub const CMD_PEEK_CQ: u32 = 22;
    pub const CMD_REQ_NOTIFY_CQ: u32 = 23;
    pub const CMD_CREATE_QP: u32 = 24;
    pub const CMD_QUERY_QP: u32 = 25;
    pub const CMD_MODIFY_QP: u32 = 26;
    pub const CMD_DESTROY_QP: u32 = 27;
    pub const CMD_POST_SEND: u32 = 28;
    pub const CMD_POST_RECV: u32 = 29;
    pub const CMD_ATTACH_MCAST: u32 = 30;
    pub const CMD_DETACH_MCAST: u32 = 31;
    pub const CMD_CREATE_SRQ: u32 = 32;
    pub const CMD_MODIFY_SRQ: u32 = 33;
    pub const CMD_QUERY_SRQ: u32 = 34;
    pub const CMD_DESTROY_SRQ: u32 = 35;
    pub const CMD_POST_SRQ_RECV: u32 = 36;
    pub const CMD_OPEN_XRCD: u32 = 37;
    pub const CMD_CLOSE_XRCD: u32 = 38;
    pub const CMD_CREATE_XSRQ: u32 = 39;
    pub const CMD_OPEN_QP: u32 = 40;
    /// Extended: create a flow.
    pub const EX_CMD_CREATE_FLOW: u32 = 50;
    /// Extended: destroy a flow.
    pub const EX_CMD_DESTROY_FLOW: u32 = 51;
    /// Extended: modify a work queue.
    pub const EX_CMD_MODIFY_WQ: u32 = 53;
    /// Extended: create an indirection table of work queues.
    pub const EX_CMD_CREATE_RWQ_IND_TBL: u32 = 55;
    /// Extended: destroy an indirection table of work queues.
    pub const EX_CMD_DESTROY_RWQ_IND_TBL: u32 = 56;
    /// Extended: modify a completion queue.
    pub const EX_CMD_MODIFY_CQ: u32 = 57;
}

/// Numbers of extended commands, with [`CMD_FLAG_EXTENDED`].
pub mod extended {
    use super::CMD_FLAG_EXTENDED;
    use super::cmd::*;

    /// Queries a device.
    pub const EX_QUERY_DEVICE: u32 = CMD_FLAG_EXTENDED | CMD_QUERY_DEVICE;
    /// Modifies a queue pair.
    pub const EX_MODIFY_QP: u32 = CMD_FLAG_EXTENDED | CMD_MODIFY_QP;
    /// Modifies a completion queue.
    pub const EX_MODIFY_CQ: u32 = CMD_FLAG_EXTENDED | EX_CMD_MODIFY_CQ;
    /// Modifies a work queue.
    pub const EX_MODIFY_WQ: u32 = CMD_FLAG_EXTENDED | EX_CMD_MODIFY_WQ;
    /// Creates an indirection table.
    pub const EX_CREATE_WQ_TABLE: u32 = CMD_FLAG_EXTENDED | EX_CMD_CREATE_RWQ_IND_TBL;
    /// Destroys an indirection table.
    pub const EX_DESTROY_WQ_TABLE: u32 = CMD_FLAG_EXTENDED | EX_CMD_DESTROY_RWQ_IND_TBL;
    /// Creates a flow.
    pub const EX_CREATE_FLOW: u32 = CMD_FLAG_EXTENDED | EX_CMD_CREATE_FLOW;
    /// Destroys a flow.
    pub const EX_DESTROY_FLOW: u32 = CMD_FLAG_EXTENDED | EX_CMD_DESTROY_FLOW;
}

kernel_structs! {
    /// `struct ib_uverbs_async_event_desc`: one record read from an asynchronous event
    /// file. `element` is the user handle of the queue, or the port number.
    AsyncEventDesc, 16 { element: u64, event_type: u32, reserved: u32 }

    /// `struct ib_uverbs_comp_event_desc`: one record read from a completion channel: the
    /// user handle of the completion queue.
    CompEventDesc, 8 { cq_handle: u64 }

    /// `struct ib_uverbs_cq_moderation_caps`: limits of completion moderation.
    CqModerationCaps, 8 { max_cq_moderation_count: u16, max_cq_moderation_period: u16, reserved: u32 }

    /// `struct ib_uverbs_cmd_hdr`: header of a command given to write(2); lengths in 32-bit
    /// words, header included.
    CmdHdr, 8 { command: u32, in_words: u16, out_words: u16 }

    /// `struct ib_uverbs_query_device`.
    QueryDevice, 8 { response: u64 }

    /// `struct ib_uverbs_query_device_resp`: the device's capabilities. `node_guid` and
    /// `sys_image_guid` are in network byte order.
    QueryDeviceResp, 176 { fw_ver: u64, node_guid: [u8; 8], sys_image_guid: [u8; 8], max_mr_size: u64, page_size_cap: u64, vendor_id: u32, vendor_part_id: u32, hw_ver: u32, max_qp: u32, max_qp_wr: u32, device_cap_flags: u32, max_sge: u32, max_sge_rd: u32, max_cq: u32, max_cqe: u32, max_mr: u32, max_pd: u32, max_qp_rd_atom: u32, max_ee_rd_atom: u32, max_res_rd_atom: u32, max_qp_init_rd_atom: u32, max_ee_init_rd_atom: u32, atomic_cap: u32, max_ee: u32, max_rdd: u32, max_mw: u32, max_raw_ipv6_qp: u32, max_raw_ethy_qp: u32, max_mcast_grp: u32, max_mcast_qp_attach: u32, max_total_mcast_qp_attach: u32, max_ah: u32, max_fmr: u32, max_map_per_fmr: u32, max_srq: u32, max_srq_wr: u32, max_srq_sge: u32, max_pkeys: u16, local_ca_ack_delay: u8, phys_port_cnt: u8, reserved: [u8; 4] }

    /// `struct ib_uverbs_ex_query_device`.
    ExQueryDevice, 8 { comp_mask: u32, reserved: u32 }

    /// `struct ib_uverbs_odp_caps`: on-demand paging capabilities.
    OdpCaps, 24 { general_caps: u64, rc_odp_caps: u32, uc_odp_caps: u32, ud_odp_caps: u32, reserved: u32 }

    /// `struct ib_uverbs_rss_caps`: receive-side scaling capabilities.
    RssCaps, 16 { supported_qpts: u32, max_rwq_indirection_tables: u32, max_rwq_indirection_table_size: u32, reserved: u32 }

    /// `struct ib_uverbs_tm_caps`: tag matching capabilities.
    TmCaps, 24 { max_rndv_hdr_size: u32, max_num_tags: u32, flags: u32, max_ops: u32, max_sge: u32, reserved: u32 }

    /// `struct ib_uverbs_ex_query_device_resp`: extended device capabilities;
    /// `response_length` is the length that the kernel filled.
    ExQueryDeviceResp, 304 { base: QueryDeviceResp, comp_mask: u32, response_length: u32, odp_caps: OdpCaps, timestamp_mask: u64, hca_core_clock: u64, device_cap_flags_ex: u64, rss_caps: RssCaps, max_wq_type_rq: u32, raw_packet_caps: u32, tm_caps: TmCaps, cq_moderation_caps: CqModerationCaps, max_dm_size: u64, xrc_odp_caps: u32, reserved: u32 }

    /// `struct ib_uverbs_query_port_resp`: state and limits of a port.
    QueryPortResp, 40 { port_cap_flags: u32, max_msg_sz: u32, bad_pkey_cntr: u32, qkey_viol_cntr: u32, gid_tbl_len: u32, pkey_tbl_len: u16, lid: u16, sm_lid: u16, state: u8, max_mtu: u8, active_mtu: u8, lmc: u8, max_vl_num: u8, sm_sl: u8, subnet_timeout: u8, init_type_reply: u8, active_width: u8, active_speed: u8, phys_state: u8, link_layer: u8, flags: u8, reserved: u8 }

    /// `struct ib_uverbs_alloc_pd`.
    AllocPd, 8 { response: u64 }

    /// `struct ib_uverbs_alloc_pd_resp`.
    AllocPdResp, 4 { pd_handle: u32 }

    /// `struct ib_uverbs_open_xrcd`.
    OpenXrcd, 16 { response: u64, fd: u32, oflags: u32 }

    /// `struct ib_uverbs_open_xrcd_resp`.
    OpenXrcdResp, 4 { xrcd_handle: u32 }

    /// `struct ib_uverbs_reg_mr`.
    RegMr, 40 { response: u64, start: u64, length: u64, hca_va: u64, pd_handle: u32, access_flags: u32 }

    /// `struct ib_uverbs_reg_mr_resp`.
    RegMrResp, 12 { mr_handle: u32, lkey: u32, rkey: u32 }

    /// `struct ib_uverbs_rereg_mr`.
    ReregMr, 48 { response: u64, mr_handle: u32, flags: u32, start: u64, length: u64, hca_va: u64, pd_handle: u32, access_flags: u32 }

    /// `struct ib_uverbs_rereg_mr_resp`.
    ReregMrResp, 8 { lkey: u32, rkey: u32 }

    /// `struct ib_uverbs_flow_attr`, whose type is `kind`; `size` bytes of specifications follow.
    FlowAttr, 16 { kind: u32, size: u16, priority: u16, num_of_specs: u8, reserved: [u8; 2], port: u8, flags: u32 }

    /// `struct ib_uverbs_create_flow`.
    CreateFlow, 24 { comp_mask: u32, qp_handle: u32, flow_attr: FlowAttr }

    /// `struct ib_uverbs_create_flow_resp`.
    CreateFlowResp, 8 { comp_mask: u32, flow_handle: u32 }

    /// `struct ib_uverbs_destroy_flow`.
    DestroyFlow, 8 { comp_mask: u32, flow_handle: u32 }

    /// `struct ib_uverbs_ex_modify_wq`.
    ExModifyWq, 24 { attr_mask: u32, wq_handle: u32, wq_state: u32, curr_wq_state: u32, flags: u32, flags_mask: u32 }

    /// `struct ib_uverbs_ex_create_rwq_ind_table`, whose queues follow.
    ExCreateRwqIndTable, 8 { comp_mask: u32, log_ind_tbl_size: u32 }

    /// `struct ib_uverbs_ex_create_rwq_ind_table_resp`.
    ExCreateRwqIndTableResp, 16 { comp_mask: u32, response_length: u32, ind_tbl_handle: u32, ind_tbl_num: u32 }

    /// `struct ib_uverbs_ex_destroy_rwq_ind_table`.
    ExDestroyRwqIndTable, 8 { comp_mask: u32, ind_tbl_handle: u32 }

    /// `struct ib_uverbs_alloc_mw`.
    AllocMw, 16 { response: u64, pd_handle: u32, mw_type: u8, reserved: [u8; 3] }

    /// `struct ib_uverbs_alloc_mw_resp`.
    AllocMwResp, 8 { mw_handle: u32, rkey: u32 }

    /// `struct ib_uverbs_create_comp_channel`.
    CreateCompChannel, 8 { response: u64 }

    /// `struct ib_uverbs_create_comp_channel_resp`.
    CreateCompChannelResp, 4 { fd: u32 }

    /// `struct ib_uverbs_resize_cq`.
    ResizeCq, 16 { response: u64, cq_handle: u32, cqe: u32 }

    /// `struct ib_uverbs_resize_cq_resp`.
    ResizeCqResp, 8 { cqe: u32, reserved: u32 }

    /// `struct ib_uverbs_req_notify_cq`.
    ReqNotifyCq, 8 { cq_handle: u32, solicited_only: u32 }

    /// `struct ib_uverbs_destroy_cq_resp`.
    DestroyCqResp, 8 { comp_events_reported: u32, async_events_reported: u32 }

    /// `struct ib_uverbs_global_route`: global route header fields of an address vector.
    GlobalRoute, 24 { dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8, reserved: u8 }

    /// `struct ib_uverbs_ah_attr`: an address vector in the kernel's format.
    AhAttr, 32 { grh: GlobalRoute, dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port_num: u8, reserved: u8 }

    /// `struct ib_uverbs_open_qp`.
    OpenQp, 32 { response: u64, user_handle: u64, pd_handle: u32, qpn: u32, qp_type: u8, reserved: [u8; 7] }

    /// `struct ib_uverbs_create_qp_resp`.
    CreateQpResp, 32 { qp_handle: u32, qpn: u32, max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32, reserved: u32 }

    /// `struct ib_uverbs_qp_dest`: a path in the queue pair commands.
    QpDest, 32 { dgid: [u8; 16], flow_label: u32, dlid: u16, reserved: u16, sgid_index: u8, hop_limit: u8, traffic_class: u8, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port_num: u8 }

    /// `struct ib_uverbs_query_qp`.
    QueryQp, 16 { response: u64, qp_handle: u32, attr_mask: u32 }

    /// `struct ib_uverbs_query_qp_resp`.
    QueryQpResp, 128 { dest: QpDest, alt_dest: QpDest, max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32, qkey: u32, rq_psn: u32, sq_psn: u32, dest_qp_num: u32, qp_access_flags: u32, pkey_index: u16, alt_pkey_index: u16, qp_state: u8, cur_qp_state: u8, path_mtu: u8, path_mig_state: u8, sq_draining: u8, max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, sq_sig_all: u8, reserved: [u8; 5] }

    /// `struct ib_uverbs_modify_qp`.
    ModifyQp, 112 { dest: QpDest, alt_dest: QpDest, qp_handle: u32, attr_mask: u32, qkey: u32, rq_psn: u32, sq_psn: u32, dest_qp_num: u32, qp_access_flags: u32, pkey_index: u16, alt_pkey_index: u16, qp_state: u8, cur_qp_state: u8, path_mtu: u8, path_mig_state: u8, en_sqd_async_notify: u8, max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8, rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, reserved: [u8; 2] }

    /// `struct ib_uverbs_ex_modify_qp`.
    ExModifyQp, 120 { base: ModifyQp, rate_limit: u32, reserved: u32 }

    /// `struct ib_uverbs_ex_modify_qp_resp`.
    ExModifyQpResp, 8 { comp_mask: u32, response_length: u32 }

    /// `struct ib_uverbs_destroy_qp_resp`.
    DestroyQpResp, 4 { events_reported: u32 }

    /// `struct ib_uverbs_sge`: one scatter-gather element.
    Sge, 16 { addr: u64, length: u32, lkey: u32 }

    /// `struct ib_uverbs_wc`: a work completion, with the layout of
    /// `struct ibv_wc`.
    ///
    /// After a failed operation only `wr_id`, `status`, `qp_num` and
    /// `vendor_err` are valid (ibv_poll_cq(3)). Where the device writes it
    /// (rxe), `status` and `opcode` may hold any value.
    WorkCompletion, 48 {
        /// The work request's identifier.
        wr_id: u64,
        /// 0 for success, else a work completion status (`enum ibv_wc_status`).
        status: u32,
        /// The operation (`enum ibv_wc_opcode`).
        opcode: u32,
        /// Vendor-specific error code; always 0 on rxe.
        vendor_err: u32,
        /// Bytes transferred.
        byte_len: u32,
        /// Immediate data (big-endian), or the key that was invalidated.
        ex: u32,
        /// Queue pair that the work request was posted to.
        qp_num: u32,
        /// Sender's queue pair, for datagrams.
        src_qp: u32,
        /// Which of the fields are valid (`enum ibv_wc_flags`).
        wc_flags: u32,
        /// P_Key index.
        pkey_index: u16,
        /// Source LID; none on RoCE.
        slid: u16,
        /// Service level.
        sl: u8,
        /// Path bits of the destination LID.
        dlid_path_bits: u8,
        /// Port; padding in `struct ibv_wc`.
        port_num: u8,
        /// Padding.
        reserved: u8,
    }

    /// `struct ib_uverbs_post_send`.
    PostSend, 24 { response: u64, qp_handle: u32, wr_count: u32, sge_count: u32, wqe_size: u32 }

    /// `struct ib_uverbs_post_send_resp`.
    PostSendResp, 4 { bad_wr: u32 }

    /// `struct ib_uverbs_create_ah`.
    CreateAh, 56 { response: u64, user_handle: u64, pd_handle: u32, reserved: u32, attr: AhAttr }

    /// `struct ib_uverbs_create_ah_resp`.
    CreateAhResp, 4 { ah_handle: u32 }

    /// `struct ib_uverbs_attach_mcast`.
    AttachMcast, 24 { gid: [u8; 16], qp_handle: u32, mlid: u16, reserved: u16 }

    /// `struct ib_uverbs_detach_mcast`.
    DetachMcast, 24 { gid: [u8; 16], qp_handle: u32, mlid: u16, reserved: u16 }

    /// `struct ib_uverbs_modify_srq`.
    ModifySrq, 16 { srq_handle: u32, attr_mask: u32, max_wr: u32, srq_limit: u32 }

    /// `struct ib_uverbs_query_srq`.
    QuerySrq, 16 { response: u64, srq_handle: u32, reserved: u32 }

    /// `struct ib_uverbs_query_srq_resp`.
    QuerySrqResp, 16 { max_wr: u32, max_sge: u32, srq_limit: u32, reserved: u32 }

    /// `struct ib_uverbs_destroy_srq_resp`.
    DestroySrqResp, 4 { events_reported: u32 }

    /// `struct ib_uverbs_cq_moderation`: how many completions, or how many microseconds,
    /// may pass before an event.
    CqModeration, 4 { cq_count: u16, cq_period: u16 }

    /// `struct ib_uverbs_ex_modify_cq`.
    ExModifyCq, 16 { cq_handle: u32, attr_mask: u32, attr: CqModeration, reserved: u32 }

    /// `struct ib_uverbs_send_wr`: only its size matters here, as the `wqe_size`
    /// of a post that carries no work request.
    SendWr, 56 { wr_id: u64, num_sge: u32, opcode: u32, send_flags: u32, imm_or_rkey: u32, wr: [u64; 4] }
}
