//! The layouts against the installed C header, if there is one: each becomes a static
//! assertion of a C file.

use std::fmt::Write as _;

use testing::c_headers::{are_installed, compile};

use super::*;

const INCLUDES: &str = "#include <stddef.h>\n#include <rdma/mlx5-abi.h>\n\
    #include <rdma/mlx5_user_ioctl_cmds.h>\n#include <rdma/mlx5_user_ioctl_verbs.h>\n\
    #include <rdma/ib_user_ioctl_cmds.h>\n";

/// A structure by its name in C, with names, offsets and sizes of its fields.
pub struct Structure {
    pub name: &'static str,
    pub size: usize,
    pub fields: &'static [(&'static str, usize, usize)],
}

const CONSTANTS: &[(&str, u64)] = &[
    ("MLX5_IB_ALLOC_UCTX_DEVX", ALLOC_UCTX_DEVX as u64),
    ("MLX5_LIB_CAP_4K_UAR", LIB_CAP_4K_UAR),
    ("MLX5_LIB_CAP_DYN_UAR", LIB_CAP_DYN_UAR),
    (
        "MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_CORE_CLOCK_OFFSET",
        context_flag::CORE_CLOCK_OFFSET as u64,
    ),
    (
        "MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_DUMP_FILL_MKEY",
        context_flag::DUMP_FILL_MKEY as u64,
    ),
    (
        "MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_ECE",
        context_flag::ECE as u64,
    ),
    (
        "MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE",
        commands_with_driver_data::QUERY_DEVICE as u64,
    ),
    (
        "MLX5_USER_CMDS_SUPP_UHW_CREATE_AH",
        commands_with_driver_data::CREATE_AH as u64,
    ),
    ("MLX5_USER_INLINE_MODE_NONE", INLINE_MODE_NONE as u64),
    ("1 << MLX5_IB_CLOCK_INFO_V1", CLOCK_INFO_V1 as u64),
    ("MLX5_IB_MMAP_REGULAR_PAGE", mmap::REGULAR_PAGE as u64),
    ("MLX5_IB_MMAP_WC_PAGE", mmap::WC_PAGE as u64),
    ("MLX5_IB_MMAP_NC_PAGE", mmap::NC_PAGE as u64),
    ("MLX5_IB_MMAP_CORE_CLOCK", mmap::CORE_CLOCK as u64),
    ("MLX5_IB_MMAP_CLOCK_INFO", mmap::CLOCK_INFO as u64),
    ("MLX5_IB_MMAP_DEVICE_MEM", mmap::DEVICE_MEM as u64),
    (
        "MLX5_IB_CREATE_CQ_FLAGS_CQE_128B_PAD",
        CQ_FLAG_CQE_128B_PAD as u64,
    ),
    (
        "MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX",
        CQ_FLAG_UAR_PAGE_INDEX as u64,
    ),
    ("MLX5_IB_CQE_RES_FORMAT_HASH", mini_format::HASH as u64),
    ("MLX5_IB_CQE_RES_FORMAT_CSUM", mini_format::CSUM as u64),
    (
        "MLX5_IB_CQE_RES_FORMAT_CSUM_STRIDX",
        mini_format::CSUM_STRIDX as u64,
    ),
    ("MLX5_IB_ALLOW_MPW", multi_packet::ALLOWED as u64),
    ("MLX5_IB_SUPPORT_EMPW", multi_packet::ENHANCED as u64),
    (
        "MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_COMP",
        device_flag::CQE_128B_COMP as u64,
    ),
    (
        "MLX5_IB_QUERY_DEV_RESP_FLAGS_CQE_128B_PAD",
        device_flag::CQE_128B_PAD as u64,
    ),
    (
        "MLX5_IB_QUERY_DEV_RESP_PACKET_BASED_CREDIT_MODE",
        device_flag::PACKET_BASED_CREDIT_MODE as u64,
    ),
    (
        "MLX5_IB_QUERY_DEV_RESP_FLAGS_SCAT2CQE_DCT",
        device_flag::SCAT2CQE_DCT as u64,
    ),
    ("MLX5_SRQ_FLAG_SIGNATURE", SRQ_FLAG_SIGNATURE as u64),
    ("MLX5_QP_FLAG_SCATTER_CQE", QP_FLAG_SCATTER_CQE as u64),
    (
        "MLX5_QP_FLAG_TUNNEL_OFFLOADS",
        QP_FLAG_TUNNEL_OFFLOADS as u64,
    ),
    ("MLX5_QP_FLAG_TYPE_DCT", QP_FLAG_TYPE_DCT as u64),
    ("MLX5_QP_FLAG_TYPE_DCI", QP_FLAG_TYPE_DCI as u64),
    (
        "MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_UC",
        QP_FLAG_TIR_ALLOW_SELF_LB_UC as u64,
    ),
    (
        "MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_MC",
        QP_FLAG_TIR_ALLOW_SELF_LB_MC as u64,
    ),
    (
        "MLX5_QP_FLAG_ALLOW_SCATTER_CQE",
        QP_FLAG_ALLOW_SCATTER_CQE as u64,
    ),
    (
        "MLX5_QP_FLAG_PACKET_BASED_CREDIT_MODE",
        QP_FLAG_PACKET_BASED_CREDIT_MODE as u64,
    ),
    ("MLX5_QP_FLAG_UAR_PAGE_INDEX", QP_FLAG_UAR_PAGE_INDEX as u64),
    ("MLX5_QP_FLAG_DCI_STREAM", QP_FLAG_DCI_STREAM as u64),
    ("MLX5_IB_CREATE_QP_RESP_MASK_TIRN", qp_object::TIRN as u64),
    ("MLX5_IB_CREATE_QP_RESP_MASK_TISN", qp_object::TISN as u64),
    ("MLX5_IB_CREATE_QP_RESP_MASK_RQN", qp_object::RQN as u64),
    ("MLX5_IB_CREATE_QP_RESP_MASK_SQN", qp_object::SQN as u64),
    ("MLX5_RX_HASH_FUNC_TOEPLITZ", HASH_TOEPLITZ as u64),
    (
        "MLX5_RX_HASH_SRC_IPV4 | MLX5_RX_HASH_DST_IPV4",
        hash_field::IPV4,
    ),
    (
        "MLX5_RX_HASH_SRC_IPV6 | MLX5_RX_HASH_DST_IPV6",
        hash_field::IPV6,
    ),
    (
        "MLX5_RX_HASH_SRC_PORT_TCP | MLX5_RX_HASH_DST_PORT_TCP",
        hash_field::PORT_TCP,
    ),
    (
        "MLX5_RX_HASH_SRC_PORT_UDP | MLX5_RX_HASH_DST_PORT_UDP",
        hash_field::PORT_UDP,
    ),
    ("MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF", ids::UAR_TYPE_BLUE_FLAME),
    ("MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC", ids::UAR_TYPE_NON_CACHED),
    (
        "MLX5_IB_ATTR_CREATE_FLOW_FLAGS_DEFAULT_MISS",
        ids::FLOW_DEFAULT_MISS as u64,
    ),
    ("MLX5_IB_ATTR_CREATE_FLOW_FLAGS_DROP", ids::FLOW_DROP as u64),
    ("1 << UVERBS_ID_NS_SHIFT", ids::NAMESPACE as u64),
    ("MLX5_IB_UAPI_QUERY_PORT_VPORT", port_flag::VPORT),
    (
        "MLX5_IB_UAPI_QUERY_PORT_VPORT_VHCA_ID",
        port_flag::VPORT_VHCA_ID,
    ),
    (
        "MLX5_IB_UAPI_QUERY_PORT_VPORT_STEERING_ICM_RX",
        port_flag::VPORT_STEERING_ICM_RX,
    ),
    (
        "MLX5_IB_UAPI_QUERY_PORT_VPORT_STEERING_ICM_TX",
        port_flag::VPORT_STEERING_ICM_TX,
    ),
    (
        "MLX5_IB_UAPI_QUERY_PORT_VPORT_REG_C0",
        port_flag::VPORT_REG_C0,
    ),
    (
        "MLX5_IB_UAPI_QUERY_PORT_ESW_OWNER_VHCA_ID",
        port_flag::ESW_OWNER_VHCA_ID,
    ),
    ("MLX5_IB_CREATE_WQ_STRIDING_RQ", CREATE_WQ_STRIDES as u64),
];

fn assertions() -> String {
    let mut c = INCLUDES.to_owned();
    let mut assert = |what: String| {
        let _ = writeln!(c, "_Static_assert({what}, {what:?});");
    };
    for Structure { name, size, fields } in STRUCTURES {
        // The last field of this one is an array without a size in C.
        let open = *name == "mlx5_ib_create_flow";
        if !open {
            assert(format!("sizeof(struct {name}) == {size}"));
        }
        for (field, offset, size) in *fields {
            assert(format!("offsetof(struct {name}, {field}) == {offset}"));
            if !open || *field != "data" {
                assert(format!("sizeof(((struct {name} *)0)->{field}) == {size}"));
            }
        }
    }
    let send_queue = std::mem::offset_of!(CreateQp, access_key);
    assert(format!(
        "offsetof(struct mlx5_ib_create_qp, sq_buf_addr) == {send_queue}"
    ));
    for (name, value) in CONSTANTS {
        assert(format!("({name}) == {value}"));
    }
    for (name, value) in ids::OF_LINUX_6_1 {
        assert(format!("({name}) == {value}"));
    }
    c
}

#[test]
fn the_c_headers_agree() {
    if !are_installed(INCLUDES, "linux-libc-dev") {
        return;
    }
    let c = assertions();
    if let Some(Err(complaints)) = compile(&c) {
        panic!("{complaints}");
    }
    // And the assertions do assert.
    let wrong = c.replace(
        "sizeof(struct mlx5_ib_create_cq) == 32",
        "sizeof(struct mlx5_ib_create_cq) == 33",
    );
    assert_ne!(wrong, c);
    assert!(matches!(compile(&wrong), Some(Err(_))));
}
