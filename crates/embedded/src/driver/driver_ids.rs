//! Objects, methods and attributes that mlx5_ib adds to the ioctl interface
//! (`mlx5_user_ioctl_cmds.h`).

use uverbs::driver::NAMESPACE;

pub(crate) const OBJECT_DEVX: u16 = NAMESPACE;
pub(crate) const OBJECT_DEVX_OBJ: u16 = NAMESPACE + 1;
pub(crate) const OBJECT_DEVX_UMEM: u16 = NAMESPACE + 2;
pub(crate) const OBJECT_FLOW_MATCHER: u16 = NAMESPACE + 3;
pub(crate) const OBJECT_DEVX_ASYNC_CMD_FD: u16 = NAMESPACE + 4;
pub(crate) const OBJECT_DEVX_ASYNC_EVENT_FD: u16 = NAMESPACE + 5;
pub(crate) const OBJECT_UAR: u16 = NAMESPACE + 8;

// Methods of `OBJECT_DEVX`, and their attributes.
pub(crate) const METHOD_OTHER: u16 = NAMESPACE;
pub(crate) const METHOD_QUERY_UAR: u16 = NAMESPACE + 1;
pub(crate) const METHOD_QUERY_EQN: u16 = NAMESPACE + 2;
pub(crate) const METHOD_SUBSCRIBE_EVENT: u16 = NAMESPACE + 3;
pub(crate) const ATTR_OTHER_IN: u16 = NAMESPACE;
pub(crate) const ATTR_OTHER_OUT: u16 = NAMESPACE + 1;
pub(crate) const ATTR_QUERY_UAR_USER_INDEX: u16 = NAMESPACE;
pub(crate) const ATTR_QUERY_UAR_DEVICE_INDEX: u16 = NAMESPACE + 1;
pub(crate) const ATTR_QUERY_EQN_VECTOR: u16 = NAMESPACE;
pub(crate) const ATTR_QUERY_EQN_NUMBER: u16 = NAMESPACE + 1;
pub(crate) const ATTR_SUBSCRIBE_CHANNEL: u16 = NAMESPACE;
pub(crate) const ATTR_SUBSCRIBE_OBJECT: u16 = NAMESPACE + 1;
pub(crate) const ATTR_SUBSCRIBE_EVENTS: u16 = NAMESPACE + 2;
pub(crate) const ATTR_SUBSCRIBE_EVENTFD: u16 = NAMESPACE + 3;
pub(crate) const ATTR_SUBSCRIBE_COOKIE: u16 = NAMESPACE + 4;

// Methods of `OBJECT_DEVX_OBJ`, and their attributes: the handle is the first of all.
pub(crate) const METHOD_OBJ_CREATE: u16 = NAMESPACE;
pub(crate) const METHOD_OBJ_DESTROY: u16 = NAMESPACE + 1;
pub(crate) const METHOD_OBJ_MODIFY: u16 = NAMESPACE + 2;
pub(crate) const METHOD_OBJ_QUERY: u16 = NAMESPACE + 3;
pub(crate) const METHOD_OBJ_ASYNC_QUERY: u16 = NAMESPACE + 4;
pub(crate) const ATTR_OBJ_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_OBJ_IN: u16 = NAMESPACE + 1;
pub(crate) const ATTR_OBJ_OUT: u16 = NAMESPACE + 2;
pub(crate) const ATTR_ASYNC_QUERY_FD: u16 = NAMESPACE + 2;
pub(crate) const ATTR_ASYNC_QUERY_WR_ID: u16 = NAMESPACE + 3;
pub(crate) const ATTR_ASYNC_QUERY_LENGTH: u16 = NAMESPACE + 4;

// Methods of `OBJECT_DEVX_UMEM`, and their attributes.
pub(crate) const METHOD_UMEM_REG: u16 = NAMESPACE;
pub(crate) const METHOD_UMEM_DEREG: u16 = NAMESPACE + 1;
pub(crate) const ATTR_UMEM_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_UMEM_ADDRESS: u16 = NAMESPACE + 1;
pub(crate) const ATTR_UMEM_LENGTH: u16 = NAMESPACE + 2;
pub(crate) const ATTR_UMEM_ACCESS: u16 = NAMESPACE + 3;
pub(crate) const ATTR_UMEM_NUMBER: u16 = NAMESPACE + 4;
pub(crate) const ATTR_UMEM_PAGE_SIZES: u16 = NAMESPACE + 5;

// Methods of the files, and their attributes.
pub(crate) const METHOD_FILE_ALLOC: u16 = NAMESPACE;
pub(crate) const ATTR_FILE_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_FILE_FLAGS: u16 = NAMESPACE + 1;

// The method of a protection domain, and its attributes.
pub(crate) const METHOD_PD_QUERY: u16 = NAMESPACE;
pub(crate) const ATTR_PD_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_PD_NUMBER: u16 = NAMESPACE + 1;

// The method of the device that queries the driver's attributes of a port.
pub(crate) const METHOD_QUERY_DRIVER_PORT: u16 = NAMESPACE;
pub(crate) const ATTR_DRIVER_PORT_NUMBER: u16 = NAMESPACE;
pub(crate) const ATTR_DRIVER_PORT: u16 = NAMESPACE + 1;

// Methods and attributes of device memory that the driver adds.
pub(crate) const METHOD_DM_MAP_OP: u16 = NAMESPACE;
pub(crate) const METHOD_DM_QUERY: u16 = NAMESPACE + 1;
pub(crate) const ATTR_ALLOC_DM_START_OFFSET: u16 = NAMESPACE;
pub(crate) const ATTR_ALLOC_DM_PAGE_INDEX: u16 = NAMESPACE + 1;
pub(crate) const ATTR_ALLOC_DM_TYPE: u16 = NAMESPACE + 2;
pub(crate) const ATTR_MAP_OP_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_MAP_OP_OPERATION: u16 = NAMESPACE + 1;
pub(crate) const ATTR_MAP_OP_START_OFFSET: u16 = NAMESPACE + 2;
pub(crate) const ATTR_MAP_OP_PAGE_INDEX: u16 = NAMESPACE + 3;
pub(crate) const ATTR_QUERY_DM_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_QUERY_DM_START_OFFSET: u16 = NAMESPACE + 1;
pub(crate) const ATTR_QUERY_DM_PAGE_INDEX: u16 = NAMESPACE + 2;
pub(crate) const ATTR_QUERY_DM_LENGTH: u16 = NAMESPACE + 3;

// Methods of `OBJECT_FLOW_MATCHER`, and their attributes: the handle is the first of all.
pub(crate) const METHOD_MATCHER_CREATE: u16 = NAMESPACE;
pub(crate) const METHOD_MATCHER_DESTROY: u16 = NAMESPACE + 1;
pub(crate) const ATTR_MATCHER_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_MATCHER_MASK: u16 = NAMESPACE + 1;
pub(crate) const ATTR_MATCHER_TYPE: u16 = NAMESPACE + 2;
pub(crate) const ATTR_MATCHER_CRITERIA: u16 = NAMESPACE + 3;
pub(crate) const ATTR_MATCHER_FLAGS: u16 = NAMESPACE + 4;
pub(crate) const ATTR_MATCHER_TABLE: u16 = NAMESPACE + 5;

// Methods of flows that the driver adds, and their attributes.
pub(crate) const METHOD_FLOW_CREATE: u16 = NAMESPACE;
pub(crate) const METHOD_FLOW_DESTROY: u16 = NAMESPACE + 1;
pub(crate) const ATTR_FLOW_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_FLOW_VALUE: u16 = NAMESPACE + 1;
pub(crate) const ATTR_FLOW_QP: u16 = NAMESPACE + 2;
pub(crate) const ATTR_FLOW_DEVX: u16 = NAMESPACE + 3;
pub(crate) const ATTR_FLOW_MATCHER: u16 = NAMESPACE + 4;
pub(crate) const ATTR_FLOW_ACTIONS: u16 = NAMESPACE + 5;
pub(crate) const ATTR_FLOW_TAG: u16 = NAMESPACE + 6;
pub(crate) const ATTR_FLOW_COUNTERS: u16 = NAMESPACE + 7;
pub(crate) const ATTR_FLOW_COUNTER_OFFSETS: u16 = NAMESPACE + 8;
pub(crate) const ATTR_FLOW_FLAGS: u16 = NAMESPACE + 9;

// Methods of flow actions that the driver adds, and their attributes.
pub(crate) const METHOD_CHANGE_HEADER: u16 = NAMESPACE;
pub(crate) const METHOD_REFORMAT: u16 = NAMESPACE + 1;
pub(crate) const ATTR_CHANGE_HEADER_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_CHANGE_HEADER_ACTIONS: u16 = NAMESPACE + 1;
pub(crate) const ATTR_CHANGE_HEADER_TABLE: u16 = NAMESPACE + 2;
pub(crate) const ATTR_REFORMAT_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_REFORMAT_TYPE: u16 = NAMESPACE + 1;
pub(crate) const ATTR_REFORMAT_TABLE: u16 = NAMESPACE + 2;
pub(crate) const ATTR_REFORMAT_DATA: u16 = NAMESPACE + 3;

// Methods of `OBJECT_UAR`, and their attributes.
pub(crate) const METHOD_UAR_ALLOC: u16 = NAMESPACE;
pub(crate) const METHOD_UAR_DESTROY: u16 = NAMESPACE + 1;
pub(crate) const ATTR_UAR_HANDLE: u16 = NAMESPACE;
pub(crate) const ATTR_UAR_TYPE: u16 = NAMESPACE + 1;
pub(crate) const ATTR_UAR_MMAP_OFFSET: u16 = NAMESPACE + 2;
pub(crate) const ATTR_UAR_MMAP_LENGTH: u16 = NAMESPACE + 3;
pub(crate) const ATTR_UAR_PAGE: u16 = NAMESPACE + 4;
