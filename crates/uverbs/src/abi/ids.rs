//! Numbers of the ioctl interface: objects, methods, and each method's
//! attributes, as in Linux 6.1's `ib_user_ioctl_cmds.h`, without the
//! `UVERBS_` prefix.
#![allow(
    missing_docs,
    reason = "the names are the kernel header's; each group says what it numbers"
)]

/// Driver data in: input of the device's driver, beside the method's
/// attributes.
pub const ATTR_UHW_IN: u16 = 1 << 12;
/// Driver data out.
pub const ATTR_UHW_OUT: u16 = ATTR_UHW_IN + 1;

// Objects that the ioctl interface names.
pub const OBJECT_DEVICE: u16 = 0;
pub const OBJECT_PD: u16 = 1;
pub const OBJECT_COMP_CHANNEL: u16 = 2;
pub const OBJECT_CQ: u16 = 3;
pub const OBJECT_QP: u16 = 4;
pub const OBJECT_SRQ: u16 = 5;
pub const OBJECT_AH: u16 = 6;
pub const OBJECT_MR: u16 = 7;
pub const OBJECT_MW: u16 = 8;
pub const OBJECT_FLOW: u16 = 9;
pub const OBJECT_XRCD: u16 = 10;
pub const OBJECT_RWQ_IND_TBL: u16 = 11;
pub const OBJECT_WQ: u16 = 12;
pub const OBJECT_FLOW_ACTION: u16 = 13;
pub const OBJECT_DM: u16 = 14;
pub const OBJECT_COUNTERS: u16 = 15;
pub const OBJECT_ASYNC_EVENT: u16 = 16;

// Methods of the device object.
pub const METHOD_INVOKE_WRITE: u16 = 0;
pub const METHOD_INFO_HANDLES: u16 = 1;
pub const METHOD_QUERY_PORT: u16 = 2;
pub const METHOD_GET_CONTEXT: u16 = 3;
pub const METHOD_QUERY_CONTEXT: u16 = 4;
pub const METHOD_QUERY_GID_TABLE: u16 = 5;
pub const METHOD_QUERY_GID_ENTRY: u16 = 6;

// Attributes of `METHOD_INVOKE_WRITE`.
pub const ATTR_CORE_IN: u16 = 0;
pub const ATTR_CORE_OUT: u16 = 1;
pub const ATTR_WRITE_CMD: u16 = 2;

// Attributes of `METHOD_QUERY_PORT`.
pub const ATTR_QUERY_PORT_PORT_NUM: u16 = 0;
pub const ATTR_QUERY_PORT_RESP: u16 = 1;

// Attributes of `METHOD_GET_CONTEXT`.
pub const ATTR_GET_CONTEXT_NUM_COMP_VECTORS: u16 = 0;
pub const ATTR_GET_CONTEXT_CORE_SUPPORT: u16 = 1;

// Attributes of `METHOD_QUERY_CONTEXT`.
pub const ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS: u16 = 0;
pub const ATTR_QUERY_CONTEXT_CORE_SUPPORT: u16 = 1;

// Attributes of `METHOD_CQ_CREATE`.
pub const ATTR_CREATE_CQ_HANDLE: u16 = 0;
pub const ATTR_CREATE_CQ_CQE: u16 = 1;
pub const ATTR_CREATE_CQ_USER_HANDLE: u16 = 2;
pub const ATTR_CREATE_CQ_COMP_CHANNEL: u16 = 3;
pub const ATTR_CREATE_CQ_COMP_VECTOR: u16 = 4;
pub const ATTR_CREATE_CQ_FLAGS: u16 = 5;
pub const ATTR_CREATE_CQ_RESP_CQE: u16 = 6;
pub const ATTR_CREATE_CQ_EVENT_FD: u16 = 7;

// Attributes of `METHOD_CQ_DESTROY`.
pub const ATTR_DESTROY_CQ_HANDLE: u16 = 0;
pub const ATTR_DESTROY_CQ_RESP: u16 = 1;

// Methods of a completion queue.
pub const METHOD_CQ_CREATE: u16 = 0;
pub const METHOD_CQ_DESTROY: u16 = 1;

// Attributes of `METHOD_QP_CREATE`.
pub const ATTR_CREATE_QP_HANDLE: u16 = 0;
pub const ATTR_CREATE_QP_XRCD_HANDLE: u16 = 1;
pub const ATTR_CREATE_QP_PD_HANDLE: u16 = 2;
pub const ATTR_CREATE_QP_SRQ_HANDLE: u16 = 3;
pub const ATTR_CREATE_QP_SEND_CQ_HANDLE: u16 = 4;
pub const ATTR_CREATE_QP_RECV_CQ_HANDLE: u16 = 5;
pub const ATTR_CREATE_QP_IND_TABLE_HANDLE: u16 = 6;
pub const ATTR_CREATE_QP_USER_HANDLE: u16 = 7;
pub const ATTR_CREATE_QP_CAP: u16 = 8;
pub const ATTR_CREATE_QP_TYPE: u16 = 9;
pub const ATTR_CREATE_QP_FLAGS: u16 = 10;
pub const ATTR_CREATE_QP_SOURCE_QPN: u16 = 11;
pub const ATTR_CREATE_QP_EVENT_FD: u16 = 12;
pub const ATTR_CREATE_QP_RESP_CAP: u16 = 13;
pub const ATTR_CREATE_QP_RESP_QP_NUM: u16 = 14;

// Attributes of `METHOD_QP_DESTROY`.
pub const ATTR_DESTROY_QP_HANDLE: u16 = 0;
pub const ATTR_DESTROY_QP_RESP: u16 = 1;

// Attributes of `METHOD_WQ_CREATE`.
pub const ATTR_CREATE_WQ_HANDLE: u16 = 0;
pub const ATTR_CREATE_WQ_PD_HANDLE: u16 = 1;
pub const ATTR_CREATE_WQ_CQ_HANDLE: u16 = 2;
pub const ATTR_CREATE_WQ_USER_HANDLE: u16 = 3;
pub const ATTR_CREATE_WQ_TYPE: u16 = 4;
pub const ATTR_CREATE_WQ_EVENT_FD: u16 = 5;
pub const ATTR_CREATE_WQ_MAX_WR: u16 = 6;
pub const ATTR_CREATE_WQ_MAX_SGE: u16 = 7;
pub const ATTR_CREATE_WQ_FLAGS: u16 = 8;
pub const ATTR_CREATE_WQ_RESP_MAX_WR: u16 = 9;
pub const ATTR_CREATE_WQ_RESP_MAX_SGE: u16 = 10;
pub const ATTR_CREATE_WQ_RESP_WQ_NUM: u16 = 11;

// Attributes of `METHOD_WQ_DESTROY`.
pub const ATTR_DESTROY_WQ_HANDLE: u16 = 0;
pub const ATTR_DESTROY_WQ_RESP: u16 = 1;

// Methods of a work queue.
pub const METHOD_WQ_CREATE: u16 = 0;
pub const METHOD_WQ_DESTROY: u16 = 1;

// The method of an indirection table, and its attribute.
pub const METHOD_RWQ_IND_TBL_DESTROY: u16 = 0;
pub const ATTR_DESTROY_RWQ_IND_TBL_HANDLE: u16 = 0;

// Methods of a queue pair.
pub const METHOD_QP_CREATE: u16 = 0;
pub const METHOD_QP_DESTROY: u16 = 1;

// Attributes of `METHOD_SRQ_CREATE`.
pub const ATTR_CREATE_SRQ_HANDLE: u16 = 0;
pub const ATTR_CREATE_SRQ_PD_HANDLE: u16 = 1;
pub const ATTR_CREATE_SRQ_XRCD_HANDLE: u16 = 2;
pub const ATTR_CREATE_SRQ_CQ_HANDLE: u16 = 3;
pub const ATTR_CREATE_SRQ_USER_HANDLE: u16 = 4;
pub const ATTR_CREATE_SRQ_MAX_WR: u16 = 5;
pub const ATTR_CREATE_SRQ_MAX_SGE: u16 = 6;
pub const ATTR_CREATE_SRQ_LIMIT: u16 = 7;
pub const ATTR_CREATE_SRQ_MAX_NUM_TAGS: u16 = 8;
pub const ATTR_CREATE_SRQ_TYPE: u16 = 9;
pub const ATTR_CREATE_SRQ_EVENT_FD: u16 = 10;
pub const ATTR_CREATE_SRQ_RESP_MAX_WR: u16 = 11;
pub const ATTR_CREATE_SRQ_RESP_MAX_SGE: u16 = 12;
pub const ATTR_CREATE_SRQ_RESP_SRQ_NUM: u16 = 13;

// Attributes of `METHOD_SRQ_DESTROY`.
pub const ATTR_DESTROY_SRQ_HANDLE: u16 = 0;
pub const ATTR_DESTROY_SRQ_RESP: u16 = 1;

// Methods of a shared receive queue.
pub const METHOD_SRQ_CREATE: u16 = 0;
pub const METHOD_SRQ_DESTROY: u16 = 1;

// Methods of device memory.
pub const METHOD_DM_ALLOC: u16 = 0;
pub const METHOD_DM_FREE: u16 = 1;

// Attributes of `METHOD_DM_ALLOC`.
pub const ATTR_ALLOC_DM_HANDLE: u16 = 0;
pub const ATTR_ALLOC_DM_LENGTH: u16 = 1;
pub const ATTR_ALLOC_DM_ALIGNMENT: u16 = 2;

// Attributes of `METHOD_DM_FREE`.
pub const ATTR_FREE_DM_HANDLE: u16 = 0;

// The method of flow actions, and its attribute.
pub const METHOD_FLOW_ACTION_DESTROY: u16 = 1;
pub const ATTR_DESTROY_FLOW_ACTION_HANDLE: u16 = 0;

// Methods of counters.
pub const METHOD_COUNTERS_CREATE: u16 = 0;
pub const METHOD_COUNTERS_DESTROY: u16 = 1;
pub const METHOD_COUNTERS_READ: u16 = 2;

// Attributes of `METHOD_COUNTERS_CREATE`.
pub const ATTR_CREATE_COUNTERS_HANDLE: u16 = 0;

// Attributes of `METHOD_COUNTERS_DESTROY`.
pub const ATTR_DESTROY_COUNTERS_HANDLE: u16 = 0;

// Attributes of `METHOD_COUNTERS_READ`.
pub const ATTR_READ_COUNTERS_HANDLE: u16 = 0;
pub const ATTR_READ_COUNTERS_BUFF: u16 = 1;
pub const ATTR_READ_COUNTERS_FLAGS: u16 = 2;

// Methods of a memory region.
pub const METHOD_DM_MR_REG: u16 = 0;
pub const METHOD_MR_DESTROY: u16 = 1;
pub const METHOD_ADVISE_MR: u16 = 2;
pub const METHOD_QUERY_MR: u16 = 3;
pub const METHOD_REG_DMABUF_MR: u16 = 4;

// Attributes of `METHOD_DM_MR_REG`.
pub const ATTR_REG_DM_MR_HANDLE: u16 = 0;
pub const ATTR_REG_DM_MR_OFFSET: u16 = 1;
pub const ATTR_REG_DM_MR_LENGTH: u16 = 2;
pub const ATTR_REG_DM_MR_PD_HANDLE: u16 = 3;
pub const ATTR_REG_DM_MR_ACCESS_FLAGS: u16 = 4;
pub const ATTR_REG_DM_MR_DM_HANDLE: u16 = 5;
pub const ATTR_REG_DM_MR_RESP_LKEY: u16 = 6;
pub const ATTR_REG_DM_MR_RESP_RKEY: u16 = 7;

// Attributes of `METHOD_MR_DESTROY`.
pub const ATTR_DESTROY_MR_HANDLE: u16 = 0;

// Attributes of `METHOD_ADVISE_MR`.
pub const ATTR_ADVISE_MR_PD_HANDLE: u16 = 0;
pub const ATTR_ADVISE_MR_ADVICE: u16 = 1;
pub const ATTR_ADVISE_MR_FLAGS: u16 = 2;
pub const ATTR_ADVISE_MR_SGE_LIST: u16 = 3;

// Attributes of `METHOD_QUERY_MR`.
pub const ATTR_QUERY_MR_HANDLE: u16 = 0;
pub const ATTR_QUERY_MR_RESP_LKEY: u16 = 1;
pub const ATTR_QUERY_MR_RESP_RKEY: u16 = 2;
pub const ATTR_QUERY_MR_RESP_LENGTH: u16 = 3;
pub const ATTR_QUERY_MR_RESP_IOVA: u16 = 4;

// Attributes of `METHOD_REG_DMABUF_MR`.
pub const ATTR_REG_DMABUF_MR_HANDLE: u16 = 0;
pub const ATTR_REG_DMABUF_MR_PD_HANDLE: u16 = 1;
pub const ATTR_REG_DMABUF_MR_OFFSET: u16 = 2;
pub const ATTR_REG_DMABUF_MR_LENGTH: u16 = 3;
pub const ATTR_REG_DMABUF_MR_IOVA: u16 = 4;
pub const ATTR_REG_DMABUF_MR_FD: u16 = 5;
pub const ATTR_REG_DMABUF_MR_ACCESS_FLAGS: u16 = 6;
pub const ATTR_REG_DMABUF_MR_RESP_LKEY: u16 = 7;
pub const ATTR_REG_DMABUF_MR_RESP_RKEY: u16 = 8;

// Methods of a protection domain.
pub const METHOD_PD_DESTROY: u16 = 0;

// Attributes of `METHOD_PD_DESTROY`.
pub const ATTR_DESTROY_PD_HANDLE: u16 = 0;

// Methods of a memory window.
pub const METHOD_MW_DESTROY: u16 = 0;

// Attributes of `METHOD_MW_DESTROY`.
pub const ATTR_DESTROY_MW_HANDLE: u16 = 0;

// Methods of an XRC domain.
pub const METHOD_XRCD_DESTROY: u16 = 0;

// Attributes of `METHOD_XRCD_DESTROY`.
pub const ATTR_DESTROY_XRCD_HANDLE: u16 = 0;

// Methods of an address handle.
pub const METHOD_AH_DESTROY: u16 = 0;

// Attributes of `METHOD_AH_DESTROY`.
pub const ATTR_DESTROY_AH_HANDLE: u16 = 0;

// Methods of an asynchronous event file.
pub const METHOD_ASYNC_EVENT_ALLOC: u16 = 0;

// Attributes of `METHOD_ASYNC_EVENT_ALLOC`.
pub const ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE: u16 = 0;

// Attributes of `METHOD_QUERY_GID_TABLE`.
pub const ATTR_QUERY_GID_TABLE_ENTRY_SIZE: u16 = 0;
pub const ATTR_QUERY_GID_TABLE_FLAGS: u16 = 1;
pub const ATTR_QUERY_GID_TABLE_RESP_ENTRIES: u16 = 2;
pub const ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES: u16 = 3;

// Attributes of `METHOD_QUERY_GID_ENTRY`.
pub const ATTR_QUERY_GID_ENTRY_PORT: u16 = 0;
pub const ATTR_QUERY_GID_ENTRY_GID_INDEX: u16 = 1;
pub const ATTR_QUERY_GID_ENTRY_FLAGS: u16 = 2;
pub const ATTR_QUERY_GID_ENTRY_RESP_ENTRY: u16 = 3;
