//! Attributes of mlx5_ib's methods, for the fake kernel.

use uverbs::abi::ids::*;
use uverbs::kernel::fake::{AttrSpec, AttrType as Ty, MethodSpec};

use super::ids::*;

const fn must(id: u16, ty: Ty) -> AttrSpec {
    AttrSpec {
        id,
        ty,
        mandatory: true,
    }
}

const fn may(id: u16, ty: Ty) -> AttrSpec {
    AttrSpec {
        id,
        ty,
        mandatory: false,
    }
}

/// The ioctl methods of mlx5_ib, from its declarations (`main.c`, `dm.c`): for
/// [`FakeKernel::add_methods`](uverbs::kernel::fake::FakeKernel::add_methods).
pub const METHODS: &[MethodSpec] = &[
    MethodSpec {
        object: OBJECT_UAR,
        method: METHOD_UAR_ALLOC,
        udata: false,
        attrs: &[
            must(ATTR_ALLOC_UAR_HANDLE, Ty::New(OBJECT_UAR)),
            must(ATTR_ALLOC_UAR_TYPE, Ty::In(8, 8)),
            must(ATTR_ALLOC_UAR_MMAP_OFFSET, Ty::Out(8)),
            must(ATTR_ALLOC_UAR_MMAP_LENGTH, Ty::Out(4)),
            must(ATTR_ALLOC_UAR_PAGE_ID, Ty::Out(4)),
        ],
    },
    MethodSpec {
        object: OBJECT_UAR,
        method: METHOD_UAR_DESTROY,
        udata: false,
        attrs: &[must(ATTR_DESTROY_UAR_HANDLE, Ty::Destroy(OBJECT_UAR))],
    },
    MethodSpec {
        object: OBJECT_CQ,
        method: METHOD_CQ_CREATE,
        udata: true,
        attrs: &[may(ATTR_CREATE_CQ_UAR_INDEX, Ty::In(4, 4))],
    },
    MethodSpec {
        object: OBJECT_PD,
        method: METHOD_PD_QUERY,
        udata: false,
        attrs: &[
            must(ATTR_QUERY_PD_HANDLE, Ty::Object(OBJECT_PD)),
            must(ATTR_QUERY_PD_NUMBER, Ty::Out(4)),
        ],
    },
    MethodSpec {
        object: OBJECT_DM,
        method: METHOD_DM_ALLOC,
        udata: false,
        attrs: &[
            must(ATTR_ALLOC_DM_START_OFFSET, Ty::Out(8)),
            may(ATTR_ALLOC_DM_PAGE_INDEX, Ty::Out(2)),
            may(ATTR_ALLOC_DM_TYPE, Ty::In(8, 8)),
        ],
    },
    MethodSpec {
        object: OBJECT_STEERING_ANCHOR,
        method: METHOD_STEERING_ANCHOR_CREATE,
        udata: false,
        attrs: &[
            must(
                ATTR_STEERING_ANCHOR_CREATE_HANDLE,
                Ty::New(OBJECT_STEERING_ANCHOR),
            ),
            must(ATTR_STEERING_ANCHOR_FT_TYPE, Ty::In(8, 8)),
            must(ATTR_STEERING_ANCHOR_PRIORITY, Ty::In(2, 2)),
            must(ATTR_STEERING_ANCHOR_FT_ID, Ty::Out(4)),
        ],
    },
    MethodSpec {
        object: OBJECT_STEERING_ANCHOR,
        method: METHOD_STEERING_ANCHOR_DESTROY,
        udata: false,
        attrs: &[must(
            ATTR_STEERING_ANCHOR_DESTROY_HANDLE,
            Ty::Destroy(OBJECT_STEERING_ANCHOR),
        )],
    },
    MethodSpec {
        object: OBJECT_DM,
        method: METHOD_DM_QUERY,
        udata: false,
        attrs: &[
            must(ATTR_QUERY_DM_HANDLE, Ty::Object(OBJECT_DM)),
            must(ATTR_QUERY_DM_START_OFFSET, Ty::Out(8)),
            must(ATTR_QUERY_DM_PAGE_INDEX, Ty::Out(2)),
            must(ATTR_QUERY_DM_LENGTH, Ty::Out(8)),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_QUERY_CONTEXT,
        udata: false,
        // The driver requires the response at least up to `dump_fill_mkey`.
        attrs: &[may(ATTR_QUERY_CONTEXT_RESP, Ty::Out(68))],
    },
    MethodSpec {
        object: OBJECT_DEVX,
        method: METHOD_DEVX_OTHER,
        udata: false,
        attrs: &[
            must(ATTR_DEVX_OTHER_IN, Ty::In(16, u16::MAX)),
            must(ATTR_DEVX_OTHER_OUT, Ty::Out(16)),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVX,
        method: METHOD_DEVX_QUERY_EQN,
        udata: false,
        attrs: &[
            must(ATTR_DEVX_QUERY_EQN_VECTOR, Ty::In(4, 4)),
            must(ATTR_DEVX_QUERY_EQN_NUMBER, Ty::Out(4)),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVX_OBJ,
        method: METHOD_DEVX_OBJ_CREATE,
        udata: false,
        attrs: &[
            must(ATTR_DEVX_OBJ_CREATE_HANDLE, Ty::New(OBJECT_DEVX_OBJ)),
            must(ATTR_DEVX_OBJ_CREATE_IN, Ty::In(16, u16::MAX)),
            must(ATTR_DEVX_OBJ_CREATE_OUT, Ty::Out(16)),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVX_OBJ,
        method: METHOD_DEVX_OBJ_DESTROY,
        udata: false,
        attrs: &[must(NAMESPACE, Ty::Destroy(OBJECT_DEVX_OBJ))],
    },
    MethodSpec {
        object: OBJECT_DEVX_UMEM,
        method: METHOD_DEVX_UMEM_REG,
        udata: false,
        attrs: &[
            must(ATTR_DEVX_UMEM_REG_HANDLE, Ty::New(OBJECT_DEVX_UMEM)),
            must(ATTR_DEVX_UMEM_REG_ADDR, Ty::In(8, 8)),
            must(ATTR_DEVX_UMEM_REG_LEN, Ty::In(8, 8)),
            must(ATTR_DEVX_UMEM_REG_ACCESS, Ty::In(4, 8)),
            may(ATTR_DEVX_UMEM_REG_PAGE_SIZES, Ty::In(4, 8)),
            must(ATTR_DEVX_UMEM_REG_NUMBER, Ty::Out(4)),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVX_UMEM,
        method: METHOD_DEVX_UMEM_DEREG,
        udata: false,
        attrs: &[must(NAMESPACE, Ty::Destroy(OBJECT_DEVX_UMEM))],
    },
    MethodSpec {
        object: OBJECT_DEVX_OBJ,
        method: METHOD_DEVX_OBJ_MODIFY,
        udata: false,
        // Any object, also one of verbs.
        attrs: &[
            must(ATTR_DEVX_OBJ_QUERY_HANDLE, Ty::Object(OBJECT_DEVX_OBJ)),
            must(ATTR_DEVX_OBJ_QUERY_IN, Ty::In(16, u16::MAX)),
            must(ATTR_DEVX_OBJ_QUERY_OUT, Ty::Out(16)),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_QUERY_DRIVER_PORT,
        udata: false,
        attrs: &[
            must(ATTR_QUERY_DRIVER_PORT_NUMBER, Ty::In(4, 4)),
            must(ATTR_QUERY_DRIVER_PORT, Ty::Out(8)),
        ],
    },
    MethodSpec {
        object: OBJECT_DM,
        method: METHOD_DM_MAP_OP,
        udata: false,
        attrs: &[
            must(ATTR_MAP_OP_HANDLE, Ty::Object(OBJECT_DM)),
            must(ATTR_MAP_OP_OPERATION, Ty::In(1, 1)),
            must(ATTR_MAP_OP_START_OFFSET, Ty::Out(8)),
            must(ATTR_MAP_OP_PAGE_INDEX, Ty::Out(2)),
        ],
    },
];
