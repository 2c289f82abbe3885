//! The structures against the C header, where that is installed.

use core::mem::{offset_of, size_of};
use std::fmt::Write as _;

use testing::c_headers::{are_installed, compile};

use super::*;

/// What the header says, and what we say.
struct Fact {
    c: String,
    ours: usize,
}

/// Offsets of members (`ours = "c.path"` where the names differ), and the size
/// unless the structure is one that grew (`..`).
macro_rules! facts {
    ($facts:ident: $($t:ident { $($field:ident $(= $c:literal)?),* $(,)? } $($grew:ident)?;)+) => {$(
        $({
            #[allow(unused_mut, unused_assignments)]
            let mut name = stringify!($field);
            $(name = $c;)?
            $facts.push(Fact {
                c: format!("offsetof(struct {}, {name})", stringify!($t)),
                ours: offset_of!($t, $field),
            });
        })*
        facts!(@size $facts $t $($grew)?);
    )+};
    (@size $facts:ident $t:ident grew) => {};
    (@size $facts:ident $t:ident) => {
        $facts.push(Fact {
            c: format!("sizeof(struct {})", stringify!($t)),
            ours: size_of::<$t>(),
        });
    };
}

fn facts() -> Vec<Fact> {
    let mut facts = Vec::new();
    facts!(facts:
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat };
        ibv_context_ops {
            alloc_mw, bind_mw, dealloc_mw, poll_cq, req_notify_cq, post_srq_recv, post_send,
            post_recv,
        };
        ibv_pd { context, handle };
        ibv_td { context };
        ibv_xrcd { context };
        ibv_mr { context, pd, addr, length, handle, lkey, rkey };
        ibv_dm { context, memcpy_to_dm, memcpy_from_dm, comp_mask, handle };
        ibv_alloc_dm_attr { length, log_align_req, comp_mask };
        ibv_mw { context, pd, rkey, handle, type_ = "type" };
        ibv_ah { context, pd, handle };
        ibv_comp_channel { context, fd, refcnt };
        ibv_cq {
            context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed,
            async_events_completed,
        };
        ibv_cq_ex {
            handle, cqe, comp_mask, status, wr_id, start_poll, next_poll, end_poll, read_opcode,
            read_vendor_err, read_byte_len, read_imm_data, read_qp_num, read_src_qp,
            read_wc_flags, read_slid, read_sl, read_dlid_path_bits, read_completion_ts,
            read_cvlan, read_flow_tag, read_tm_info, read_completion_wallclock_ns,
        };
        ibv_srq { context, srq_context, pd, handle, mutex, cond, events_completed };
        ibv_qp {
            context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex,
            cond, events_completed,
        };
        ibv_qp_ex {
            qp_base, comp_mask, wr_id, wr_flags, wr_atomic_cmp_swp, wr_set_sge_list, wr_start,
            wr_complete, wr_abort,
        } grew;
        ibv_sge { addr, length, lkey };
        ibv_data_buf { addr, length };
        ibv_mw_bind_info { mr, addr, length, mw_access_flags };
        ibv_mw_bind { wr_id, send_flags, bind_info };
        ibv_send_wr {
            wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr,
            xrc_remote_srqn = "qp_type.xrc.remote_srqn", extra = "bind_mw",
        };
        ibv_recv_wr { wr_id, next, sg_list, num_sge };
        ibv_wc {
            wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags,
            pkey_index, slid, sl, dlid_path_bits,
        };
        ibv_ops_wr { wr_id, next, opcode, flags, tm };
        ibv_wc_tm_info { tag, priv_ = "priv" };
        ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path };
        ibv_device_attr {
            fw_ver, node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id,
            vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge, max_sge_rd,
            max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom,
            max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw,
            max_raw_ipv6_qp, max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach,
            max_total_mcast_qp_attach, max_ah, max_fmr, max_map_per_fmr, max_srq, max_srq_wr,
            max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt,
        };
        ibv_device_attr_ex {
            orig_attr, comp_mask, odp_caps, completion_timestamp_mask, hca_core_clock,
            device_cap_flags_ex, tso_caps, rss_caps, max_wq_type_rq, packet_pacing_caps,
            raw_packet_caps, tm_caps, cq_mod_caps, max_dm_size, pci_atomic_caps, xrc_odp_caps,
            phys_port_cnt_ex,
        };
        ibv_port_attr {
            state, max_mtu, active_mtu, gid_tbl_len, port_cap_flags, max_msg_sz, bad_pkey_cntr,
            qkey_viol_cntr, pkey_tbl_len, lid, sm_lid, lmc, max_vl_num, sm_sl, subnet_timeout,
            init_type_reply, active_width, active_speed, phys_state, link_layer, flags,
            port_cap_flags2,
        } grew;
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class };
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num };
        ibv_srq_attr { max_wr, max_sge, srq_limit };
        ibv_srq_init_attr { srq_context, attr };
        ibv_srq_init_attr_ex { srq_context, attr, comp_mask, srq_type, pd, xrcd, cq, tm_cap };
        ibv_wq {
            context, wq_context, pd, cq, wq_num, handle, state, wq_type, post_recv, mutex, cond,
            events_completed, comp_mask,
        };
        ibv_rwq_ind_table { context, ind_tbl_handle, ind_tbl_num, comp_mask };
        ibv_wq_init_attr {
            wq_context, wq_type, max_wr, max_sge, pd, cq, comp_mask, create_flags,
        };
        ibv_wq_attr { attr_mask, wq_state, curr_wq_state, flags, flags_mask };
        ibv_rwq_ind_table_init_attr { log_ind_tbl_size, ind_tbl, comp_mask };
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data };
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all };
        ibv_qp_init_attr_ex {
            qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all, comp_mask, pd, xrcd,
            create_flags, max_tso_header, rwq_ind_tbl, rx_hash_conf, source_qpn, send_ops_flags,
        };
        ibv_qp_attr {
            qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num,
            qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, alt_pkey_index,
            en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer,
            port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout, rate_limit,
        };
        ibv_cq_init_attr_ex {
            cqe, cq_context, channel, comp_vector, wc_flags, comp_mask, flags, parent_domain,
        };
        ibv_modify_cq_attr { attr_mask, moderate };
        ibv_td_init_attr { comp_mask };
        ibv_parent_domain_init_attr { pd, td, comp_mask, alloc, free, pd_context };
        ibv_ece { vendor_id, options, comp_mask };
        ibv_xrcd_init_attr { comp_mask, fd, oflags };
        ibv_values_ex { comp_mask, raw_clock };
    );
    let nested = [
        ("tm.handle", offset_of!(ibv_ops_wr, tm.handle)),
        (
            "tm.add.recv_wr_id",
            offset_of!(ibv_ops_wr, tm.add.recv_wr_id),
        ),
        ("tm.add.num_sge", offset_of!(ibv_ops_wr, tm.add.num_sge)),
        ("tm.add.mask", offset_of!(ibv_ops_wr, tm.add.mask)),
    ];
    facts.extend(nested.map(|(name, ours)| Fact {
        c: format!("offsetof(struct ibv_ops_wr, {name})"),
        ours,
    }));
    macro_rules! values {
        ($($name:ident),+ $(,)?) => {
            $(facts.push(Fact { c: stringify!($name).to_owned(), ours: $name as usize });)+
        };
    }
    values!(
        IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_SEND,
        IBV_WR_SEND_WITH_IMM,
        IBV_WR_RDMA_READ,
        IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_ATOMIC_FETCH_AND_ADD,
        IBV_WR_LOCAL_INV,
        IBV_WR_BIND_MW,
        IBV_WR_SEND_WITH_INV,
        IBV_WR_TSO,
        IBV_SEND_FENCE,
        IBV_SEND_SIGNALED,
        IBV_SEND_SOLICITED,
        IBV_SEND_INLINE,
        IBV_SEND_IP_CSUM,
        IBV_WC_LOC_LEN_ERR,
        IBV_WC_WR_FLUSH_ERR,
        IBV_WC_REM_ACCESS_ERR,
        IBV_WC_RETRY_EXC_ERR,
        IBV_WC_GENERAL_ERR,
        IBV_WC_RECV,
        IBV_WC_RECV_RDMA_WITH_IMM,
        IBV_WC_LOCAL_INV,
        IBV_WC_GRH,
        IBV_WC_WITH_IMM,
        IBV_WC_WITH_INV,
        IBV_WC_EX_WITH_BYTE_LEN,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK,
        IBV_WC_STANDARD_FLAGS,
        IBV_CQ_INIT_ATTR_MASK_PD,
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED,
        IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
        IBV_ACCESS_MW_BIND,
        IBV_ACCESS_ON_DEMAND,
        IBV_ACCESS_RELAXED_ORDERING,
        IBV_ACCESS_OPTIONAL_RANGE,
        IBV_DM_MASK_HANDLE,
        IBV_MW_TYPE_2,
        IBV_REREG_MR_CHANGE_ACCESS,
        IBV_QPT_RC,
        IBV_QPT_UC,
        IBV_QPT_UD,
        IBV_QPT_RAW_PACKET,
        IBV_DEVICE_UD_IP_CSUM,
        IBV_DEVICE_RAW_IP_CSUM,
        IBV_QP_CREATE_SOURCE_QPN,
        IBV_RAW_PACKET_CAP_IP_CSUM,
        IBV_QPT_XRC_SEND,
        IBV_QPT_DRIVER,
        IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        IBV_QP_EX_WITH_RDMA_WRITE,
        IBV_QP_EX_WITH_SEND_WITH_INV,
        IBV_QP_EX_WITH_TSO,
        IBV_QP_STATE,
        IBV_QP_CAP,
        IBV_QP_DEST_QPN,
        IBV_QP_RATE_LIMIT,
        IBV_QPS_RTS,
        IBV_QPS_ERR,
        IBV_WR_TAG_SYNC,
        IBV_OPS_TM_SYNC,
        IBV_SRQT_TM,
        IBV_SRQ_INIT_ATTR_TM,
        IBV_SRQ_MAX_WR,
        IBV_SRQ_LIMIT,
        IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT,
        IBV_VALUES_MASK_RAW_CLOCK,
    );
    facts
}

#[test]
fn structures_and_values_are_those_of_the_header() {
    let mut c = String::from("#include <stddef.h>\n#include <infiniband/verbs.h>\n");
    if !are_installed(&c, "libibverbs-dev libc6-dev") {
        return;
    }
    for Fact { c: what, ours } in facts() {
        let line = format!("(size_t)({what}) == {ours}");
        writeln!(c, "_Static_assert({line}, \"not so: {what}\");").unwrap();
    }
    assert_eq!(compile(&c), Some(Ok(())));
}
