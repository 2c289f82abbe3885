//! Objects, methods and attributes that mlx5_ib adds to the ioctl interface
//! (include/uapi/rdma/mlx5_user_ioctl_cmds.h and mlx5_user_ioctl_verbs.h).

use uverbs::driver::NAMESPACE;

/// `MLX5_IB_OBJECT_UAR`.
pub const OBJECT_UAR: u16 = NAMESPACE + 8;

/// `MLX5_IB_METHOD_UAR_OBJ_ALLOC`.
pub const METHOD_UAR_ALLOC: u16 = NAMESPACE;
/// `MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE`.
pub const ATTR_ALLOC_UAR_HANDLE: u16 = NAMESPACE;
/// `MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE`.
pub const ATTR_ALLOC_UAR_TYPE: u16 = NAMESPACE + 1;
/// `MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET`.
pub const ATTR_ALLOC_UAR_MMAP_OFFSET: u16 = NAMESPACE + 2;
/// `MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH`.
pub const ATTR_ALLOC_UAR_MMAP_LENGTH: u16 = NAMESPACE + 3;
/// `MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID`.
pub const ATTR_ALLOC_UAR_PAGE_ID: u16 = NAMESPACE + 4;

/// `MLX5_IB_METHOD_UAR_OBJ_DESTROY`.
pub const METHOD_UAR_DESTROY: u16 = NAMESPACE + 1;
/// `MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE`.
pub const ATTR_DESTROY_UAR_HANDLE: u16 = NAMESPACE;

/// `MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF`: BlueFlame registers, which take whole
/// WQEs.
pub const UAR_TYPE_BLUE_FLAME: u64 = 0;
/// `MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC`: non-cached registers, for doorbells only.
pub const UAR_TYPE_NON_CACHED: u64 = 1;

/// `MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX`, of the device's QUERY_CONTEXT: the
/// driver's answer from when the context was created.
pub const ATTR_QUERY_CONTEXT_RESP: u16 = NAMESPACE;

/// `MLX5_IB_METHOD_PD_QUERY`, of a protection domain.
pub const METHOD_PD_QUERY: u16 = NAMESPACE;
/// `MLX5_IB_ATTR_QUERY_PD_HANDLE`.
pub const ATTR_QUERY_PD_HANDLE: u16 = NAMESPACE;
/// `MLX5_IB_ATTR_QUERY_PD_RESP_PDN`.
pub const ATTR_QUERY_PD_NUMBER: u16 = NAMESPACE + 1;

/// `MLX5_IB_ATTR_ALLOC_DM_RESP_START_OFFSET`: start address of the memory.
pub const ATTR_ALLOC_DM_START_OFFSET: u16 = NAMESPACE;
/// `MLX5_IB_ATTR_ALLOC_DM_RESP_PAGE_INDEX`: page index by which it is mapped.
pub const ATTR_ALLOC_DM_PAGE_INDEX: u16 = NAMESPACE + 1;

/// `MLX5_IB_METHOD_DM_QUERY`, of device memory.
pub const METHOD_DM_QUERY: u16 = NAMESPACE + 1;
/// `MLX5_IB_ATTR_QUERY_DM_REQ_HANDLE`.
pub const ATTR_QUERY_DM_HANDLE: u16 = NAMESPACE;
/// `MLX5_IB_ATTR_QUERY_DM_RESP_START_OFFSET`.
pub const ATTR_QUERY_DM_START_OFFSET: u16 = NAMESPACE + 1;
/// `MLX5_IB_ATTR_QUERY_DM_RESP_PAGE_INDEX`.
pub const ATTR_QUERY_DM_PAGE_INDEX: u16 = NAMESPACE + 2;
/// `MLX5_IB_ATTR_QUERY_DM_RESP_LENGTH`.
pub const ATTR_QUERY_DM_LENGTH: u16 = NAMESPACE + 3;
