//! Structures against the installed `mlx5dv.h`, options, `libmlx5.map`.

use core::fmt::Write as _;
use core::mem::{offset_of, size_of};

use mlx5::{CqOptions, MiniFormat};
use testing::c_headers::{are_installed, compile};

use super::abi::*;
use super::create;
use crate::mlx5::qp::{Options, ScatterToCqe};

const INCLUDES: &str = "#include <stddef.h>\n#include <infiniband/mlx5dv.h>\n";

fn size_of_field<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! fields {
    ($to:ident, $($structure:ident { $($field:ident),+ })+) => {$(
        $({
            let (offset, size) = (
                offset_of!($structure, $field),
                size_of_field::<$structure, _>(|s| &s.$field),
            );
            let c = concat!("struct ", stringify!($structure));
            let field = stringify!($field);
            writeln!($to, "_Static_assert(offsetof({c}, {field}) == {offset}, \"{field}\");").unwrap();
            writeln!($to, "_Static_assert(sizeof((({c} *)0)->{field}) == {size}, \"{field}\");").unwrap();
        })+
    )+};
}

#[test]
fn structures_are_those_of_the_header() {
    if !are_installed(INCLUDES, "libibverbs-dev libc6-dev") {
        return;
    }
    let mut c = INCLUDES.to_owned();
    fields! { c,
        mlx5dv_context {
            version, flags, comp_mask, cqe_comp_caps, sw_parsing_caps, striding_rq_caps,
            tunnel_offloads_caps, max_dynamic_bfregs, max_clock_info_update_nsec,
            flow_action_flags, dc_odp_caps, hca_core_clock, num_lag_ports, sig_caps,
            dci_streams_caps, max_wr_memcpy_length, crypto_caps
        }
        mlx5dv_context_attr { flags, comp_mask }
        mlx5dv_ctx_allocators { alloc, free, data }
        mlx5dv_cq_init_attr { comp_mask, cqe_comp_res_format, flags, cqe_size }
        mlx5dv_qp_init_attr { comp_mask, create_flags, dc_init_attr, send_ops_flags }
        mlx5dv_dc_init_attr { dc_type, dct_access_key }
        mlx5dv_qp_ex {
            comp_mask, wr_set_dc_addr, wr_mr_interleaved, wr_mr_list, wr_mkey_configure,
            wr_set_mkey_access_flags, wr_set_mkey_layout_list,
            wr_set_mkey_layout_interleaved, wr_set_mkey_sig_block, wr_raw_wqe,
            wr_set_dc_addr_stream, wr_memcpy
        }
        mlx5dv_qp {
            dbrec, sq, rq, bf, comp_mask, uar_mmap_offset, tirn, tisn, rqn, sqn, tir_icm_addr
        }
        mlx5dv_rwq { buf, dbrec, wqe_cnt, stride, comp_mask }
        mlx5dv_wq_init_attr { comp_mask, striding_rq_attrs }
        mlx5dv_striding_rq_init_attr {
            single_stride_log_num_of_bytes, single_wqe_log_num_of_strides, two_byte_shift_en
        }
        mlx5dv_cq { buf, dbrec, cqe_cnt, cqe_size, cq_uar, cqn, comp_mask }
        mlx5dv_srq { buf, dbrec, stride, head, tail, comp_mask, srqn }
        mlx5dv_dm { buf, length, comp_mask, remote_va }
        mlx5dv_steering_anchor_attr { ft_type, priority, comp_mask }
        mlx5dv_steering_anchor { id }
        mlx5dv_ah { av, comp_mask }
        mlx5dv_pd { pdn, comp_mask }
        mlx5dv_obj { qp, cq, srq, rwq, dm, ah, pd }
        mlx5dv_devx_umem { umem_id }
        mlx5dv_devx_umem_in { addr, size, access, pgsz_bitmap, comp_mask, dmabuf_fd }
        mlx5dv_devx_uar { reg_addr, base_addr, page_id, mmap_off, comp_mask }
        mlx5dv_var { page_id, length, mmap_off, comp_mask }
        mlx5dv_pp { index }
        mlx5dv_devx_cmd_comp { fd }
        mlx5dv_devx_event_channel { fd }
        mlx5dv_mkey { lkey, rkey }
        mlx5dv_flow_match_parameters { match_sz }
        mlx5dv_flow_matcher_attr {
            flags, priority, match_criteria_enable, match_mask, comp_mask, ft_type
        }
        mlx5dv_alloc_dm_attr { comp_mask }
        mlx5dv_mkey_init_attr { pd, create_flags, max_entries }
        mlx5dv_mkey_conf_attr { conf_flags, comp_mask }
        mlx5dv_sig_caps { block_size, block_prot, t10dif_bg, crc_type }
        mlx5dv_crypto_caps {
            failed_selftests, crypto_engines, wrapped_import_method, log_max_num_deks, flags
        }
        mlx5dv_sig_t10dif { bg_type, bg, app_tag, ref_tag, flags }
        mlx5dv_sig_crc { seed }
        mlx5dv_sig_block_domain { sig_type, sig, block_size, comp_mask }
        mlx5dv_sig_block_attr { mem, wire, flags, check_mask, copy_mask, comp_mask }
        mlx5dv_crypto_attr {
            crypto_standard, encrypt_on_tx, signature_crypto_order, data_unit_size,
            initial_tweak, dek, keytag, comp_mask
        }
        mlx5dv_mkey_err { err_type, err }
        mlx5dv_sig_err { actual_value, expected_value, offset }
        mlx5dv_crypto_login_attr { credential_id, import_kek_id, credential, comp_mask }
        mlx5dv_crypto_login_attr_ex {
            credential_id, import_kek_id, credential, credential_len, comp_mask
        }
        mlx5dv_crypto_login_query_attr { state, comp_mask }
        mlx5dv_dek_init_attr {
            key_size, has_keytag, key_purpose, pd, opaque, key, comp_mask, crypto_login
        }
        mlx5dv_dek_attr { state, opaque, comp_mask }
        mlx5dv_sched_attr { parent, flags, bw_share, max_avg_bw, comp_mask }
        mlx5dv_clock_info { nsec, last_cycles, frac, mult, shift, mask }
    }
    let interleaved = [
        ("addr", offset_of!(mlx5dv_mr_interleaved, addr)),
        ("bytes_count", offset_of!(mlx5dv_mr_interleaved, bytes)),
        ("bytes_skip", offset_of!(mlx5dv_mr_interleaved, skip)),
        ("lkey", offset_of!(mlx5dv_mr_interleaved, lkey)),
    ];
    for (field, offset) in interleaved {
        let c_offset = format!("offsetof(struct mlx5dv_mr_interleaved, {field})");
        writeln!(c, "_Static_assert({c_offset} == {offset}, \"{field}\");").unwrap();
    }
    for (name, value) in [
        ("MLX5DV_CONTEXT_FLAGS_DEVX", CONTEXT_DEVX),
        ("MLX5DV_CTX_ATTR_BUF_ALLOCATORS", CTX_ATTR_BUF_ALLOCATORS),
        ("MLX5DV_UMEM_MASK_DMABUF", UMEM_MASK_DMABUF as u32),
        ("MLX5DV_QP_EX_WITH_MR_LIST", send_ops::MR_LIST as u32),
        (
            "MLX5DV_QP_EX_WITH_MKEY_CONFIGURE",
            send_ops::MKEY_CONFIGURE as u32,
        ),
        ("MLX5DV_QP_EX_WITH_RAW_WQE", send_ops::RAW_WQE as u32),
        ("MLX5DV_QP_EX_WITH_MEMCPY", send_ops::MEMCPY as u32),
        (
            "MLX5DV_MKEY_INIT_ATTR_FLAGS_REMOTE_INVALIDATE",
            mkey_flag::REMOTE_INVALIDATE,
        ),
        (
            "MLX5DV_MKEY_INIT_ATTR_FLAGS_BLOCK_SIGNATURE",
            mkey_flag::BLOCK_SIGNATURE,
        ),
        ("MLX5DV_MKEY_INIT_ATTR_FLAGS_CRYPTO", mkey_flag::CRYPTO),
        ("MLX5DV_QP_CREATE_SIG_PIPELINING", qp_flag::SIG_PIPELINING),
        ("MLX5DV_SIG_T10DIF_CSUM", guard::CSUM),
        (
            "MLX5DV_SIG_T10DIF_FLAG_APP_REF_ESCAPE",
            dif_flag::APP_REF_ESCAPE.into(),
        ),
        ("MLX5DV_SIG_CRC_TYPE_CRC64_XP10", crc::CRC64_XP10),
        ("MLX5DV_SIG_TYPE_CRC", sig_type::CRC),
        ("MLX5DV_BLOCK_SIZE_520", block_size::BYTES_520),
        ("MLX5DV_BLOCK_SIZE_4048", block_size::BYTES_4048),
        ("MLX5DV_BLOCK_SIZE_4096", block_size::BYTES_4096),
        ("MLX5DV_BLOCK_SIZE_4160", block_size::BYTES_4160),
        (
            "MLX5DV_SIGNATURE_CRYPTO_ORDER_SIGNATURE_BEFORE_CRYPTO_ON_TX",
            SIGNATURE_BEFORE_CRYPTO,
        ),
        ("MLX5DV_MKEY_SIG_BLOCK_BAD_GUARD", mkey_err::BAD_GUARD),
        ("MLX5DV_MKEY_SIG_BLOCK_BAD_REFTAG", mkey_err::BAD_REFTAG),
        ("MLX5DV_MKEY_SIG_BLOCK_BAD_APPTAG", mkey_err::BAD_APPTAG),
        ("MLX5DV_CRYPTO_LOGIN_STATE_NO_LOGIN", login_state::NO_LOGIN),
        ("MLX5DV_CRYPTO_LOGIN_STATE_INVALID", login_state::INVALID),
        ("MLX5DV_CRYPTO_KEY_SIZE_256", KEY_SIZE_256),
        ("MLX5DV_DEK_INIT_ATTR_CRYPTO_LOGIN", DEK_MASK_LOGIN as u32),
        ("MLX5DV_DEK_STATE_ERROR", DEK_ERROR),
        (
            "MLX5DV_CRYPTO_ENGINES_CAP_AES_XTS_MULTI_BLOCK",
            protection_caps::MULTI_BLOCK.into(),
        ),
        (
            "MLX5DV_CRYPTO_CAPS_WRAPPED_CRYPTO_GOING_TO_COMMISSIONING",
            protection_caps::GOING_TO_COMMISSIONING,
        ),
        (
            "MLX5DV_SCHED_ELEM_ATTR_FLAGS_MAX_AVG_BW",
            sched_flag::MAX_AVG_BW,
        ),
        ("MLX5DV_QP_CREATE_TUNNEL_OFFLOADS", qp_flag::TUNNEL_OFFLOADS),
        (
            "MLX5DV_QP_CREATE_TIR_ALLOW_SELF_LOOPBACK_UC",
            qp_flag::TIR_ALLOW_SELF_LOOPBACK_UC,
        ),
        (
            "MLX5DV_QP_CREATE_TIR_ALLOW_SELF_LOOPBACK_MC",
            qp_flag::TIR_ALLOW_SELF_LOOPBACK_MC,
        ),
        (
            "MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE",
            qp_flag::DISABLE_SCATTER_TO_CQE,
        ),
        (
            "MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE",
            qp_flag::ALLOW_SCATTER_TO_CQE,
        ),
        (
            "MLX5DV_QP_CREATE_PACKET_BASED_CREDIT_MODE",
            qp_flag::PACKET_BASED_CREDIT_MODE,
        ),
        ("MLX5DV_CQ_INIT_ATTR_FLAGS_CQE_PAD", CQ_FLAG_CQE_PAD),
        ("MLX5DV_QP_INIT_ATTR_MASK_DC", qp_mask::DC as u32),
        (
            "MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS",
            qp_mask::SEND_OPS_FLAGS as u32,
        ),
        (
            "MLX5DV_QP_INIT_ATTR_MASK_DCI_STREAMS",
            qp_mask::DCI_STREAMS as u32,
        ),
        ("MLX5DV_DCTYPE_DCT", dc_type::DCT),
        ("MLX5DV_DCTYPE_DCI", dc_type::DCI),
        ("MLX5DV_OBJ_PD", obj::PD as u32),
        ("MLX5DV_FLOW_ACTION_DEST_IBV_QP", action::DEST_QP),
        ("MLX5DV_FLOW_ACTION_DROP", action::DROP),
        ("MLX5DV_FLOW_ACTION_IBV_FLOW_ACTION", action::FLOW_ACTION),
        ("MLX5DV_FLOW_ACTION_TAG", action::TAG),
        ("MLX5DV_FLOW_ACTION_DEST_DEVX", action::DEST_DEVX),
        ("MLX5DV_FLOW_ACTION_DEFAULT_MISS", action::DEFAULT_MISS),
        ("MLX5DV_FLOW_ACTION_COUNTERS_DEVX", action::COUNTERS_DEVX),
        ("MLX5DV_SRQ_MASK_SRQN", SRQ_MASK_SRQN as u32),
        (
            "MLX5DV_QP_MASK_UAR_MMAP_OFFSET",
            QP_MASK_UAR_MMAP_OFFSET as u32,
        ),
        (
            "MLX5DV_QP_MASK_RAW_QP_HANDLES",
            QP_MASK_RAW_QP_HANDLES as u32,
        ),
        (
            "MLX5DV_QP_MASK_RAW_QP_TIR_ADDR",
            QP_MASK_RAW_QP_TIR_ADDR as u32,
        ),
        ("MLX5DV_OBJ_RWQ", obj::RWQ as u32),
        (
            "MLX5DV_WQ_INIT_ATTR_MASK_STRIDING_RQ",
            WQ_MASK_STRIDES as u32,
        ),
    ] {
        writeln!(c, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
    }
    // Later than rdma-core 44.
    let newer = format!("{INCLUDES}int newer = MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM;\n");
    if compile(&newer) == Some(Ok(())) {
        fields! { c,
            mlx5dv_context { max_dc_rd_atom, max_dc_init_rd_atom }
            mlx5dv_obj { devx }
        }
        let offset = action::COUNTERS_DEVX_WITH_OFFSET;
        writeln!(
            c,
            "_Static_assert(MLX5DV_FLOW_ACTION_COUNTERS_DEVX_WITH_OFFSET == {offset}, \"\");\n\
             _Static_assert(offsetof(struct mlx5dv_flow_action_attr, bulk_obj.offset) == 16, \"\");"
        )
        .unwrap();
    }
    // Of rdma-core 55.
    let newer = format!("{INCLUDES}int newer = MLX5DV_QP_CREATE_OOO_DP;\n");
    if compile(&newer) == Some(Ok(())) {
        fields! { c,
            mlx5dv_context { reg_c0, ooo_recv_wrs_caps }
            mlx5dv_ooo_recv_wrs_caps { max_rc, max_xrc, max_dct, max_ud, max_uc }
        }
        for (name, value) in [
            ("MLX5DV_QP_CREATE_OOO_DP", u64::from(qp_flag::OOO_DP)),
            (
                "MLX5DV_CONTEXT_MASK_OOO_RECV_WRS",
                context_mask::OOO_RECV_WRS,
            ),
        ] {
            writeln!(c, "_Static_assert({name} == {value}, \"{name}\");").unwrap();
        }
    }
    // Of rdma-core 63.
    let newer = format!("{INCLUDES}struct mlx5dv_export_sizes newer;\n");
    if compile(&newer) == Some(Ok(())) {
        fields! { c,
            mlx5dv_export_sizes { var_attrs_size, devx_umem_attrs_size, devx_obj_attrs_size }
        }
        writeln!(
            c,
            "_Static_assert(MLX5DV_VAR_ALLOC_FLAG_TLP == {VAR_FLAG_TLP}, \"\");"
        )
        .unwrap();
    }
    assert_eq!(compile(&c), Some(Ok(())));
}

#[test]
fn options_are_checked() {
    let cq = |comp_mask, cqe_comp_res_format, flags, cqe_size| {
        let own = mlx5dv_cq_init_attr {
            comp_mask,
            cqe_comp_res_format,
            flags,
            cqe_size,
        };
        create::cq_options(Some(&own)).map_err(|errno| errno.0)
    };
    let plain = CqOptions::default();
    assert_eq!(create::cq_options(None).ok(), Some(plain));
    // Members that are not announced do not count.
    assert_eq!(cq(0, 9, 9, 9), Ok(plain));
    let wide = CqOptions {
        wide: true,
        ..plain
    };
    assert_eq!(cq(cq_mask::CQE_SIZE, 0, 0, 128), Ok(wide));
    assert_eq!(cq(cq_mask::CQE_SIZE, 0, 0, 64), Ok(plain));
    assert_eq!(cq(cq_mask::CQE_SIZE, 0, 0, 100), Err(libc::EINVAL));
    let padded = CqOptions {
        padded: true,
        ..wide
    };
    let both = cq_mask::CQE_SIZE | cq_mask::FLAGS;
    assert_eq!(cq(both, 0, CQ_FLAG_CQE_PAD, 128), Ok(padded));
    assert_eq!(cq(both, 0, CQ_FLAG_CQE_PAD, 64), Err(libc::EINVAL));
    assert_eq!(cq(both, 0, 1 << 7, 128), Err(libc::EOPNOTSUPP));
    let hash = CqOptions {
        compression: Some(MiniFormat::Hash),
        ..plain
    };
    assert_eq!(
        cq(cq_mask::COMPRESSED_CQE, comp_format::HASH, 0, 0),
        Ok(hash)
    );
    assert_eq!(
        cq(cq_mask::COMPRESSED_CQE, 1 << 2, 0, 0),
        Err(libc::EOPNOTSUPP)
    );
    assert_eq!(cq(1 << 3, 0, 0, 0), Err(libc::EOPNOTSUPP));

    let qp = |comp_mask, create_flags| {
        let own = mlx5dv_qp_init_attr {
            comp_mask,
            create_flags,
            dc_init_attr: mlx5dv_dc_init_attr {
                dc_type: 0,
                dct_access_key: 0,
            },
            send_ops_flags: 0,
        };
        create::qp_options(Some(&own)).map_err(|errno| errno.0)
    };
    let plain = Options::default();
    let out_of_order = Options {
        out_of_order: true,
        ..plain
    };
    assert_eq!(
        qp(qp_mask::QP_CREATE_FLAGS, qp_flag::OOO_DP),
        Ok(out_of_order)
    );
    assert_eq!(qp(0, u32::MAX), Ok(plain));
    let scatter_to_cqe = |scatter_to_cqe| {
        Ok(Options {
            scatter_to_cqe,
            ..plain
        })
    };
    let flags = qp_mask::QP_CREATE_FLAGS;
    let (never, always) = (
        qp_flag::DISABLE_SCATTER_TO_CQE,
        qp_flag::ALLOW_SCATTER_TO_CQE,
    );
    assert_eq!(qp(flags, never), scatter_to_cqe(ScatterToCqe::Disabled));
    assert_eq!(qp(flags, always), scatter_to_cqe(ScatterToCqe::Allowed));
    assert_eq!(qp(flags, never | always), Err(libc::EINVAL));
    let tunnels = Options {
        packets: mlx5::PacketOptions {
            tunnels: true,
            ..Default::default()
        },
        ..plain
    };
    assert_eq!(qp(flags, qp_flag::TUNNEL_OFFLOADS), Ok(tunnels));
    assert_eq!(qp(flags, 1 << 30), Err(libc::EOPNOTSUPP));
    assert_eq!(qp(1 << 9, 0), Err(libc::EOPNOTSUPP));
}
