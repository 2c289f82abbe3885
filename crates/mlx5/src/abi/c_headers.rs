//! The layouts against the installed C headers, where there are any: each
//! becomes a static assertion of a C file.

use std::fmt::Write as _;
use std::mem::offset_of;

use testing::c_headers::{are_installed, compile};

use super::*;
use crate::wc::syndrome;

const INCLUDES: &str = "#include <stddef.h>\n\
    #include <infiniband/mlx5dv.h>\n";

fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

/// Assertions of the fields of a Rust structure, by the same names in C or,
/// after a colon, by others. With `size`, of the structure's size as well.
macro_rules! fields {
    ($to:ident, $c:literal, $rust:ty { $($path:tt $(: $name:literal)?),+ $(,)? }) => {
        $({
            let name = fields!(@name $path $(, $name)?);
            let offset = offset_of!($rust, $path);
            let size = size_of_field::<$rust, _>(|s| &s.$path);
            assert(&mut $to, format!("offsetof(struct {}, {name}) == {offset}", $c));
            assert(&mut $to, format!("sizeof(((struct {} *)0)->{name}) == {size}", $c));
        })+
    };
    ($to:ident, $c:literal, size $rust:ty { $($fields:tt)+ }) => {
        assert(&mut $to, format!("sizeof(struct {}) == {}", $c, size_of::<$rust>()));
        fields!($to, $c, $rust { $($fields)+ });
    };
    (@name $path:tt, $name:literal) => { $name };
    (@name $path:tt) => { stringify!($path) };
}

fn assert(to: &mut String, what: String) {
    let _ = writeln!(to, "_Static_assert({what}, {what:?});");
}

fn assertions() -> String {
    let mut c = INCLUDES.to_owned();
    fields!(c, "mlx5_wqe_ctrl_seg", size ControlSegment {
        opmod_idx_opcode, qpn_ds, signature, dci_stream_channel_id, fm_ce_se, imm,
    });
    fields!(c, "mlx5_wqe_data_seg", size DataSegment { byte_count, lkey, addr });
    fields!(c, "mlx5_wqe_av", size WqeAddressVector {
        qkey: "key.qkey.qkey", low_key: "key.qkey.reserved", dqp_dct,
        stat_rate_sl, fl_mlid, rlid, reserved0, rmac, tclass, hop_limit,
        grh_gid_fl, rgid,
    });
    fields!(c, "mlx5_wqe_umr_ctrl_seg", size UmrSegment {
        flags, rsvd0, klm_octowords, translation_offset, mkey_mask, rsvd1,
    });
    fields!(c, "mlx5_wqe_mkey_context_seg", size KeySegment {
        free, reserved1, access_flags, sf, qpn_mkey, reserved2, flags_pd,
        start_addr, len, bsf_octword_size, reserved3,
        translations_octword_size, reserved4, log_page_size, reserved,
    });
    fields!(c, "mlx5_wqe_umr_klm_seg", size DataSegment {
        byte_count, lkey: "mkey", addr: "address",
    });
    fields!(c, "mlx5_wqe_srq_next_seg", size NextSegment {
        rsvd0, next_wqe_index, signature, rsvd1,
    });
    fields!(c, "mlx5_wqe_tm_seg", size TagSegment {
        opcode, flags, index, rsvd0, sw_cnt, rsvd1, append_tag, append_mask,
    });
    fields!(c, "mlx5_tm_cqe", size TagCqe { success, hw_phase_cnt, rsvd0 });
    fields!(c, "ibv_tmh", size TagHeader { opcode, reserved, app_ctx, tag });
    fields!(c, "mlx5_cqe64", size Cqe {
        rsvd0, wqe_id, rsvd4, ml_path, rsvd20, slid, flags_rqpn, hds_ip_ext,
        l4_hdr_type_etc, vlan_info, srqn_uidx, imm_inval_pkey, app, app_op,
        app_info, byte_cnt, timestamp, sop_drop_qpn, wqe_counter, signature,
        op_own,
    });
    let timestamp = offset_of!(Cqe, timestamp);
    let error = [
        ("vendor_err_synd", timestamp + VENDOR_SYNDROME),
        ("syndrome", timestamp + SYNDROME),
        ("s_wqe_opcode_qpn", offset_of!(Cqe, sop_drop_qpn)),
        ("wqe_counter", offset_of!(Cqe, wqe_counter)),
        ("op_own", offset_of!(Cqe, op_own)),
    ];
    for (field, offset) in error {
        assert(
            &mut c,
            format!("offsetof(struct mlx5_err_cqe, {field}) == {offset}"),
        );
    }
    for (name, value) in constants() {
        assert(&mut c, format!("(unsigned int)({name}) == {value}"));
    }
    c
}

fn constants() -> Vec<(&'static str, u32)> {
    let mut all: Vec<(&str, u32)> = vec![
        ("MLX5_INLINE_SEG", INLINE_SEGMENT),
        ("MLX5_INVALID_LKEY", INVALID_LKEY),
        ("MLX5_EXTENDED_UD_AV", EXTENDED_AV),
    ];
    let masks = [
        ("MLX5_WQE_UMR_CTRL_MKEY_MASK_LEN", umr_mask::LEN),
        (
            "MLX5_WQE_UMR_CTRL_MKEY_MASK_START_ADDR",
            umr_mask::START_ADDR,
        ),
        ("MLX5_WQE_UMR_CTRL_MKEY_MASK_MKEY", umr_mask::MKEY),
        ("MLX5_WQE_UMR_CTRL_MKEY_MASK_QPN", umr_mask::QPN),
        (
            "MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_LOCAL_WRITE",
            umr_mask::LOCAL_WRITE,
        ),
        (
            "MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_READ",
            umr_mask::REMOTE_READ,
        ),
        (
            "MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_REMOTE_WRITE",
            umr_mask::REMOTE_WRITE,
        ),
        (
            "MLX5_WQE_UMR_CTRL_MKEY_MASK_ACCESS_ATOMIC",
            umr_mask::ATOMIC,
        ),
        ("MLX5_WQE_UMR_CTRL_MKEY_MASK_FREE", umr_mask::FREE),
    ];
    all.extend(masks.iter().map(|(name, value)| (*name, *value as u32)));
    let bytes: &[(&str, u8)] = &[
        ("MLX5_WQE_CTRL_CQ_UPDATE", CONTROL_CQ_UPDATE),
        ("MLX5_WQE_CTRL_SOLICITED", CONTROL_SOLICITED),
        ("MLX5_WQE_CTRL_FENCE", CONTROL_FENCE),
        ("MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE", CONTROL_SMALL_FENCE),
        ("MLX5_WQE_UMR_CTRL_FLAG_INLINE", umr_flag::INLINE),
        ("MLX5_WQE_UMR_CTRL_FLAG_CHECK_FREE", umr_flag::CHECK_FREE),
        (
            "MLX5_WQE_UMR_CTRL_FLAG_TRNSLATION_OFFSET",
            umr_flag::TRANSLATION_OFFSET,
        ),
        ("MLX5_WQE_UMR_CTRL_FLAG_CHECK_QPN", umr_flag::CHECK_QPN),
        ("MLX5_WQE_MKEY_CONTEXT_FREE", KEY_FREE),
        (
            "MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_ATOMIC",
            key_access::ATOMIC,
        ),
        (
            "MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_WRITE",
            key_access::REMOTE_WRITE,
        ),
        (
            "MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_REMOTE_READ",
            key_access::REMOTE_READ,
        ),
        (
            "MLX5_WQE_MKEY_CONTEXT_ACCESS_FLAGS_LOCAL_WRITE",
            key_access::LOCAL_WRITE,
        ),
        ("MLX5_OPCODE_UMR", opcode::UMR),
        ("MLX5_OPCODE_SEND_INVAL", opcode::SEND_INVAL),
        ("MLX5_OPCODE_TSO", opcode::TSO),
        ("MLX5_OPCODE_RDMA_WRITE", opcode::RDMA_WRITE),
        ("MLX5_OPCODE_RDMA_WRITE_IMM", opcode::RDMA_WRITE_IMM),
        ("MLX5_OPCODE_SEND", opcode::SEND),
        ("MLX5_OPCODE_SEND_IMM", opcode::SEND_IMM),
        ("MLX5_OPCODE_RDMA_READ", opcode::RDMA_READ),
        ("MLX5_OPCODE_ATOMIC_CS", opcode::ATOMIC_CS),
        ("MLX5_OPCODE_ATOMIC_FA", opcode::ATOMIC_FA),
        ("MLX5_CQE_REQ", cqe_opcode::REQ),
        ("MLX5_CQE_RESP_WR_IMM", cqe_opcode::RESP_WR_IMM),
        ("MLX5_CQE_RESP_SEND", cqe_opcode::RESP_SEND),
        ("MLX5_CQE_RESP_SEND_IMM", cqe_opcode::RESP_SEND_IMM),
        ("MLX5_CQE_RESP_SEND_INV", cqe_opcode::RESP_SEND_INV),
        ("MLX5_CQE_RESIZE_CQ", cqe_opcode::RESIZE_CQ),
        ("MLX5_CQE_REQ_ERR", cqe_opcode::REQ_ERR),
        ("MLX5_CQE_RESP_ERR", cqe_opcode::RESP_ERR),
        ("MLX5_CQE_INVALID", cqe_opcode::INVALID),
        ("MLX5_CQE_OWNER_MASK", CQE_OWNER),
        ("MLX5_INLINE_SCATTER_32", CQE_SCATTER_32),
        ("MLX5_INLINE_SCATTER_64", CQE_SCATTER_64),
        ("MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR", syndrome::LOCAL_LENGTH),
        ("MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR", syndrome::LOCAL_QP_OP),
        ("MLX5_CQE_SYNDROME_LOCAL_PROT_ERR", syndrome::LOCAL_PROT),
        ("MLX5_CQE_SYNDROME_WR_FLUSH_ERR", syndrome::WR_FLUSH),
        ("MLX5_CQE_SYNDROME_MW_BIND_ERR", syndrome::MW_BIND),
        ("MLX5_CQE_SYNDROME_BAD_RESP_ERR", syndrome::BAD_RESP),
        ("MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR", syndrome::LOCAL_ACCESS),
        (
            "MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR",
            syndrome::REMOTE_INVAL_REQ,
        ),
        (
            "MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR",
            syndrome::REMOTE_ACCESS,
        ),
        ("MLX5_CQE_SYNDROME_REMOTE_OP_ERR", syndrome::REMOTE_OP),
        (
            "MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR",
            syndrome::RETRY_EXCEEDED,
        ),
        (
            "MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR",
            syndrome::RNR_RETRY_EXCEEDED,
        ),
        (
            "MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR",
            syndrome::REMOTE_ABORTED,
        ),
    ];
    all.extend(bytes.iter().map(|(name, value)| (*name, u32::from(*value))));
    all
}

#[test]
fn the_c_headers_agree() {
    if !are_installed(INCLUDES, "libibverbs-dev linux-libc-dev") {
        return;
    }
    let c = assertions();
    // Of 2.14 and later releases: the member was `rsvd[2]` before.
    let with_streams = format!(
        "{INCLUDES}int streams = offsetof(struct mlx5_wqe_ctrl_seg, dci_stream_channel_id);\n"
    );
    let c = match compile(&with_streams) {
        Some(Ok(())) => c,
        _ => c.replace("dci_stream_channel_id", "rsvd"),
    };
    if let Some(Err(complaints)) = compile(&c) {
        panic!("{complaints}");
    }
    // And the assertions do assert.
    let wrong = c.replace(
        "sizeof(struct mlx5_cqe64) == 64",
        "sizeof(struct mlx5_cqe64) == 65",
    );
    assert_ne!(wrong, c);
    assert!(matches!(compile(&wrong), Some(Err(_))));
}
