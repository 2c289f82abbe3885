//! Attributes of the methods, as Linux declares them
//! (`DECLARE_UVERBS_NAMED_METHOD` in drivers/infiniband/core and hw/mlx5).

use uverbs::abi::ids::*;
use uverbs::abi::later::*;

use crate::driver::event::FileKind;
use mlx5_abi::ids as driver;

/// Type of an attribute.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// Input data and their length. `extensible`: longer input is accepted if the
    /// excess is zero.
    In {
        min: u16,
        max: u16,
        extensible: bool,
    },
    /// Output buffer and its length.
    Out { min: u16, max: u16 },
    /// The object or descriptor to create.
    New,
    /// An object of a type.
    Object(u16),
    /// An object of any type.
    AnyObject,
    /// A descriptor of a type.
    Fd(FileKind),
    /// Any descriptor of the program (`UVERBS_ATTR_RAW_FD`).
    ProgramFd,
    /// A value of an enumeration, with the data that belongs to it, of these lengths.
    Enum(&'static [u16]),
    /// Handles of up to `max` objects of a type, at least one.
    Objects { kind: u16, max: u16 },
}

/// An attribute of a method.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Spec {
    pub(crate) id: u16,
    pub(crate) form: Form,
    pub(crate) mandatory: bool,
}

impl Spec {
    const fn new(id: u16, form: Form) -> Self {
        Self {
            id,
            form,
            mandatory: true,
        }
    }

    const fn optional(self) -> Self {
        Self {
            mandatory: false,
            ..self
        }
    }
}

const fn exactly(id: u16, length: u16) -> Spec {
    let form = Form::In {
        min: length,
        max: length,
        extensible: false,
    };
    Spec::new(id, form)
}

/// `UVERBS_ATTR_CONST_IN`.
const fn constant(id: u16) -> Spec {
    exactly(id, 8)
}

/// `UVERBS_ATTR_FLAGS_IN`, optional unless declared otherwise.
const fn flags(id: u16) -> Spec {
    let form = Form::In {
        min: 4,
        max: 8,
        extensible: false,
    };
    Spec::new(id, form).optional()
}

const fn out(id: u16, length: u16) -> Spec {
    let form = Form::Out {
        min: length,
        max: length,
    };
    Spec::new(id, form)
}

/// Input for a structure of at least `min` bytes (`UVERBS_ATTR_MIN_SIZE`).
const fn in_struct(id: u16, min: u16) -> Spec {
    let form = Form::In {
        min,
        max: u16::MAX,
        extensible: false,
    };
    Spec::new(id, form)
}

/// Output buffer for a structure of at least `min` bytes.
const fn out_struct(id: u16, min: u16) -> Spec {
    let max = u16::MAX;
    Spec::new(id, Form::Out { min, max })
}

/// A mask of headers, or their values.
const fn match_parameters(id: u16) -> Spec {
    /// `struct mlx5_ifc_fte_match_param_bits`.
    const MAX: u16 = 0x200;
    let form = Form::In {
        min: 1,
        max: MAX,
        extensible: false,
    };
    Spec::new(id, form)
}

const fn new_object(id: u16) -> Spec {
    Spec::new(id, Form::New)
}

const fn object(id: u16, kind: u16) -> Spec {
    Spec::new(id, Form::Object(kind))
}

const fn events(id: u16) -> Spec {
    Spec::new(id, Form::Fd(FileKind::Async)).optional()
}

/// `UVERBS_ATTR_UHW`: driver data.
const DRIVER_IN: Spec = {
    let form = Form::In {
        min: 0,
        max: u16::MAX,
        extensible: false,
    };
    Spec::new(ATTR_UHW_IN, form).optional()
};
const DRIVER_OUT: Spec = out_struct(ATTR_UHW_OUT, 0).optional();

/// Returns the attributes of a method; `None` if the method does not exist.
pub(crate) fn method(object_id: u16, method_id: u16) -> Option<&'static [Spec]> {
    Some(match (object_id, method_id) {
        (OBJECT_DEVICE, METHOD_INVOKE_WRITE) => {
            &const {
                let input = Form::In {
                    min: 4,
                    max: u16::MAX,
                    extensible: false,
                };
                [
                    constant(ATTR_WRITE_CMD),
                    Spec::new(ATTR_CORE_IN, input).optional(),
                    out_struct(ATTR_CORE_OUT, 0).optional(),
                    DRIVER_IN,
                    DRIVER_OUT,
                ]
            }
        }
        (OBJECT_DEVICE, METHOD_GET_CONTEXT) => {
            &const {
                [
                    out(ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 4).optional(),
                    out(ATTR_GET_CONTEXT_CORE_SUPPORT, 8).optional(),
                    DRIVER_IN,
                    DRIVER_OUT,
                ]
            }
        }
        (OBJECT_DEVICE, METHOD_QUERY_CONTEXT) => {
            &const {
                [
                    out(ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, 4).optional(),
                    out(ATTR_QUERY_CONTEXT_CORE_SUPPORT, 8).optional(),
                    out_struct(driver::ATTR_QUERY_CONTEXT_RESP, 72),
                ]
            }
        }
        (OBJECT_DEVICE, METHOD_QUERY_PORT) => {
            &const {
                [
                    constant(ATTR_QUERY_PORT_PORT_NUM),
                    out_struct(ATTR_QUERY_PORT_RESP, 48),
                ]
            }
        }
        (OBJECT_DEVICE, METHOD_QUERY_PORT_SPEED) => {
            &const {
                [
                    constant(ATTR_QUERY_PORT_SPEED_PORT_NUM),
                    out(ATTR_QUERY_PORT_SPEED_RESP, 8),
                ]
            }
        }
        (OBJECT_DEVICE, METHOD_QUERY_GID_TABLE) => {
            &const {
                [
                    constant(ATTR_QUERY_GID_TABLE_ENTRY_SIZE),
                    flags(ATTR_QUERY_GID_TABLE_FLAGS),
                    out_struct(ATTR_QUERY_GID_TABLE_RESP_ENTRIES, 0),
                    out(ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, 8),
                ]
            }
        }
        (OBJECT_DEVICE, METHOD_QUERY_GID_ENTRY) => {
            &const {
                [
                    constant(ATTR_QUERY_GID_ENTRY_PORT),
                    constant(ATTR_QUERY_GID_ENTRY_GID_INDEX),
                    Spec {
                        mandatory: true,
                        ..flags(ATTR_QUERY_GID_ENTRY_FLAGS)
                    },
                    out_struct(ATTR_QUERY_GID_ENTRY_RESP_ENTRY, 32),
                ]
            }
        }
        (OBJECT_ASYNC_EVENT, METHOD_ASYNC_EVENT_ALLOC) => {
            &const { [new_object(ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE)] }
        }
        (OBJECT_CQ, METHOD_CQ_CREATE) => {
            &const {
                let channel = Form::Fd(FileKind::Completions);
                [
                    new_object(ATTR_CREATE_CQ_HANDLE),
                    exactly(ATTR_CREATE_CQ_CQE, 4),
                    exactly(ATTR_CREATE_CQ_USER_HANDLE, 8),
                    Spec::new(ATTR_CREATE_CQ_COMP_CHANNEL, channel).optional(),
                    exactly(ATTR_CREATE_CQ_COMP_VECTOR, 4),
                    flags(ATTR_CREATE_CQ_FLAGS),
                    out(ATTR_CREATE_CQ_RESP_CQE, 4),
                    events(ATTR_CREATE_CQ_EVENT_FD),
                    DRIVER_IN,
                    DRIVER_OUT,
                ]
            }
        }
        (OBJECT_QP, METHOD_QP_CREATE) => {
            &const {
                let cap = Form::In {
                    min: 20,
                    max: 20,
                    extensible: true,
                };
                [
                    new_object(ATTR_CREATE_QP_HANDLE),
                    object(ATTR_CREATE_QP_XRCD_HANDLE, OBJECT_XRCD).optional(),
                    object(ATTR_CREATE_QP_PD_HANDLE, OBJECT_PD).optional(),
                    object(ATTR_CREATE_QP_SRQ_HANDLE, OBJECT_SRQ).optional(),
                    object(ATTR_CREATE_QP_SEND_CQ_HANDLE, OBJECT_CQ).optional(),
                    object(ATTR_CREATE_QP_RECV_CQ_HANDLE, OBJECT_CQ).optional(),
                    object(ATTR_CREATE_QP_IND_TABLE_HANDLE, OBJECT_RWQ_IND_TBL).optional(),
                    exactly(ATTR_CREATE_QP_USER_HANDLE, 8),
                    Spec::new(ATTR_CREATE_QP_CAP, cap),
                    constant(ATTR_CREATE_QP_TYPE),
                    flags(ATTR_CREATE_QP_FLAGS),
                    exactly(ATTR_CREATE_QP_SOURCE_QPN, 4).optional(),
                    events(ATTR_CREATE_QP_EVENT_FD),
                    out_struct(ATTR_CREATE_QP_RESP_CAP, 20),
                    out(ATTR_CREATE_QP_RESP_QP_NUM, 4),
                    DRIVER_IN,
                    DRIVER_OUT,
                ]
            }
        }
        (OBJECT_SRQ, METHOD_SRQ_CREATE) => {
            &const {
                [
                    new_object(ATTR_CREATE_SRQ_HANDLE),
                    object(ATTR_CREATE_SRQ_PD_HANDLE, OBJECT_PD),
                    constant(ATTR_CREATE_SRQ_TYPE),
                    exactly(ATTR_CREATE_SRQ_USER_HANDLE, 8),
                    exactly(ATTR_CREATE_SRQ_MAX_WR, 4),
                    exactly(ATTR_CREATE_SRQ_MAX_SGE, 4),
                    exactly(ATTR_CREATE_SRQ_LIMIT, 4),
                    object(ATTR_CREATE_SRQ_XRCD_HANDLE, OBJECT_XRCD).optional(),
                    object(ATTR_CREATE_SRQ_CQ_HANDLE, OBJECT_CQ).optional(),
                    exactly(ATTR_CREATE_SRQ_MAX_NUM_TAGS, 4).optional(),
                    events(ATTR_CREATE_SRQ_EVENT_FD),
                    out(ATTR_CREATE_SRQ_RESP_MAX_WR, 4),
                    out(ATTR_CREATE_SRQ_RESP_MAX_SGE, 4),
                    out(ATTR_CREATE_SRQ_RESP_SRQ_NUM, 4).optional(),
                    DRIVER_IN,
                    DRIVER_OUT,
                ]
            }
        }
        (OBJECT_MR, METHOD_QUERY_MR) => {
            &const {
                [
                    object(ATTR_QUERY_MR_HANDLE, OBJECT_MR),
                    out(ATTR_QUERY_MR_RESP_LKEY, 4),
                    out(ATTR_QUERY_MR_RESP_RKEY, 4),
                    out(ATTR_QUERY_MR_RESP_LENGTH, 8),
                    out(ATTR_QUERY_MR_RESP_IOVA, 8).optional(),
                ]
            }
        }
        (OBJECT_CQ, METHOD_CQ_DESTROY) => {
            &const {
                [
                    object(ATTR_DESTROY_CQ_HANDLE, OBJECT_CQ),
                    out(ATTR_DESTROY_CQ_RESP, 8),
                ]
            }
        }
        (OBJECT_QP, METHOD_QP_DESTROY) => {
            &const {
                [
                    object(ATTR_DESTROY_QP_HANDLE, OBJECT_QP),
                    out(ATTR_DESTROY_QP_RESP, 4),
                ]
            }
        }
        (OBJECT_SRQ, METHOD_SRQ_DESTROY) => {
            &const {
                [
                    object(ATTR_DESTROY_SRQ_HANDLE, OBJECT_SRQ),
                    out(ATTR_DESTROY_SRQ_RESP, 4),
                ]
            }
        }
        (OBJECT_WQ, METHOD_WQ_CREATE) => {
            &const {
                [
                    new_object(ATTR_CREATE_WQ_HANDLE),
                    object(ATTR_CREATE_WQ_PD_HANDLE, OBJECT_PD),
                    object(ATTR_CREATE_WQ_CQ_HANDLE, OBJECT_CQ),
                    exactly(ATTR_CREATE_WQ_USER_HANDLE, 8),
                    constant(ATTR_CREATE_WQ_TYPE),
                    events(ATTR_CREATE_WQ_EVENT_FD),
                    exactly(ATTR_CREATE_WQ_MAX_WR, 4),
                    exactly(ATTR_CREATE_WQ_MAX_SGE, 4),
                    Spec {
                        mandatory: true,
                        ..flags(ATTR_CREATE_WQ_FLAGS)
                    },
                    out(ATTR_CREATE_WQ_RESP_MAX_WR, 4),
                    out(ATTR_CREATE_WQ_RESP_MAX_SGE, 4),
                    out(ATTR_CREATE_WQ_RESP_WQ_NUM, 4).optional(),
                    DRIVER_IN,
                    DRIVER_OUT,
                ]
            }
        }
        (OBJECT_WQ, METHOD_WQ_DESTROY) => {
            &const {
                [
                    object(ATTR_DESTROY_WQ_HANDLE, OBJECT_WQ),
                    out(ATTR_DESTROY_WQ_RESP, 4),
                ]
            }
        }
        (OBJECT_RWQ_IND_TBL, METHOD_RWQ_IND_TBL_DESTROY) => {
            &const { [object(ATTR_DESTROY_RWQ_IND_TBL_HANDLE, OBJECT_RWQ_IND_TBL)] }
        }
        (OBJECT_MR, METHOD_DM_MR_REG) => {
            &const {
                [
                    new_object(ATTR_REG_DM_MR_HANDLE),
                    exactly(ATTR_REG_DM_MR_OFFSET, 8),
                    exactly(ATTR_REG_DM_MR_LENGTH, 8),
                    object(ATTR_REG_DM_MR_PD_HANDLE, OBJECT_PD),
                    flags(ATTR_REG_DM_MR_ACCESS_FLAGS),
                    object(ATTR_REG_DM_MR_DM_HANDLE, OBJECT_DM),
                    out(ATTR_REG_DM_MR_RESP_LKEY, 4),
                    out(ATTR_REG_DM_MR_RESP_RKEY, 4),
                ]
            }
        }
        (OBJECT_MR, METHOD_REG_DMABUF_MR) => {
            &const {
                [
                    new_object(ATTR_REG_DMABUF_MR_HANDLE),
                    object(ATTR_REG_DMABUF_MR_PD_HANDLE, OBJECT_PD),
                    exactly(ATTR_REG_DMABUF_MR_OFFSET, 8),
                    exactly(ATTR_REG_DMABUF_MR_LENGTH, 8),
                    exactly(ATTR_REG_DMABUF_MR_IOVA, 8),
                    exactly(ATTR_REG_DMABUF_MR_FD, 4),
                    flags(ATTR_REG_DMABUF_MR_ACCESS_FLAGS),
                    out(ATTR_REG_DMABUF_MR_RESP_LKEY, 4),
                    out(ATTR_REG_DMABUF_MR_RESP_RKEY, 4),
                ]
            }
        }
        (OBJECT_MR, METHOD_ADVISE_MR) => {
            &const {
                [
                    object(ATTR_ADVISE_MR_PD_HANDLE, OBJECT_PD),
                    constant(ATTR_ADVISE_MR_ADVICE),
                    Spec {
                        mandatory: true,
                        ..flags(ATTR_ADVISE_MR_FLAGS)
                    },
                    in_struct(ATTR_ADVISE_MR_SGE_LIST, 16),
                ]
            }
        }
        (OBJECT_DM, METHOD_DM_ALLOC) => {
            &const {
                [
                    new_object(ATTR_ALLOC_DM_HANDLE),
                    exactly(ATTR_ALLOC_DM_LENGTH, 8),
                    exactly(ATTR_ALLOC_DM_ALIGNMENT, 4),
                    out(driver::ATTR_ALLOC_DM_START_OFFSET, 8),
                    out(driver::ATTR_ALLOC_DM_PAGE_INDEX, 2).optional(),
                    constant(driver::ATTR_ALLOC_DM_TYPE).optional(),
                ]
            }
        }
        (OBJECT_COUNTERS, METHOD_COUNTERS_CREATE) => {
            &const { [new_object(ATTR_CREATE_COUNTERS_HANDLE)] }
        }
        (OBJECT_COUNTERS, METHOD_COUNTERS_DESTROY) => {
            &const { [object(ATTR_DESTROY_COUNTERS_HANDLE, OBJECT_COUNTERS)] }
        }
        (OBJECT_COUNTERS, METHOD_COUNTERS_READ) => {
            &const {
                [
                    object(ATTR_READ_COUNTERS_HANDLE, OBJECT_COUNTERS),
                    out_struct(ATTR_READ_COUNTERS_BUFF, 0),
                    flags(ATTR_READ_COUNTERS_FLAGS),
                ]
            }
        }
        (OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_DESTROY) => {
            &const { [object(ATTR_DESTROY_FLOW_ACTION_HANDLE, OBJECT_FLOW_ACTION)] }
        }
        (OBJECT_DM, METHOD_DM_FREE) => &const { [object(ATTR_FREE_DM_HANDLE, OBJECT_DM)] },
        (OBJECT_MR, METHOD_MR_DESTROY) => &const { [object(ATTR_DESTROY_MR_HANDLE, OBJECT_MR)] },
        (OBJECT_MW, METHOD_MW_DESTROY) => &const { [object(ATTR_DESTROY_MW_HANDLE, OBJECT_MW)] },
        (OBJECT_PD, METHOD_PD_DESTROY) => &const { [object(ATTR_DESTROY_PD_HANDLE, OBJECT_PD)] },
        (OBJECT_AH, METHOD_AH_DESTROY) => &const { [object(ATTR_DESTROY_AH_HANDLE, OBJECT_AH)] },
        (OBJECT_XRCD, METHOD_XRCD_DESTROY) => {
            &const { [object(ATTR_DESTROY_XRCD_HANDLE, OBJECT_XRCD)] }
        }
        _ => return driver_method(object_id, method_id),
    })
}

/// As [`method`], for those that the driver adds.
fn driver_method(object_id: u16, method_id: u16) -> Option<&'static [Spec]> {
    use driver::*;
    /// Bytes of the header of a command, and of that of an answer.
    const HEADER: u16 = 16;
    Some(match (object_id, method_id) {
        (OBJECT_DEVICE, METHOD_QUERY_DRIVER_PORT) => {
            &const {
                [
                    exactly(ATTR_QUERY_DRIVER_PORT_NUMBER, 4),
                    out_struct(ATTR_QUERY_DRIVER_PORT, 8),
                ]
            }
        }
        (OBJECT_DEVX, METHOD_DEVX_OTHER) => {
            &const {
                [
                    in_struct(ATTR_DEVX_OTHER_IN, HEADER),
                    out_struct(ATTR_DEVX_OTHER_OUT, HEADER),
                ]
            }
        }
        (OBJECT_DEVX, METHOD_DEVX_QUERY_UAR) => {
            &const {
                [
                    exactly(ATTR_DEVX_QUERY_UAR_USER_INDEX, 4),
                    out(ATTR_DEVX_QUERY_UAR_DEVICE_INDEX, 4),
                ]
            }
        }
        (OBJECT_DEVX, METHOD_DEVX_QUERY_EQN) => {
            &const {
                [
                    exactly(ATTR_DEVX_QUERY_EQN_VECTOR, 4),
                    out(ATTR_DEVX_QUERY_EQN_NUMBER, 4),
                ]
            }
        }
        (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_CREATE) => {
            &const {
                [
                    new_object(ATTR_DEVX_OBJ_CREATE_HANDLE),
                    in_struct(ATTR_DEVX_OBJ_CREATE_IN, HEADER),
                    out_struct(ATTR_DEVX_OBJ_CREATE_OUT, HEADER),
                ]
            }
        }
        (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_MODIFY | METHOD_DEVX_OBJ_QUERY) => {
            &const {
                [
                    Spec::new(ATTR_DEVX_OBJ_QUERY_HANDLE, Form::AnyObject),
                    in_struct(ATTR_DEVX_OBJ_QUERY_IN, HEADER),
                    out_struct(ATTR_DEVX_OBJ_QUERY_OUT, HEADER),
                ]
            }
        }
        (OBJECT_DEVX, METHOD_DEVX_SUBSCRIBE_EVENT) => {
            &const {
                let channel = Form::Fd(FileKind::DevxEvents { omit_data: false });
                [
                    Spec::new(ATTR_DEVX_SUBSCRIBE_CHANNEL, channel),
                    object(ATTR_DEVX_SUBSCRIBE_OBJECT, OBJECT_DEVX_OBJ).optional(),
                    in_struct(ATTR_DEVX_SUBSCRIBE_EVENTS, 2),
                    exactly(ATTR_DEVX_SUBSCRIBE_EVENTFD, 4).optional(),
                    exactly(ATTR_DEVX_SUBSCRIBE_COOKIE, 8).optional(),
                ]
            }
        }
        (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_ASYNC_QUERY) => {
            &const {
                let file = Form::Fd(FileKind::DevxAnswers);
                [
                    Spec::new(ATTR_DEVX_ASYNC_QUERY_HANDLE, Form::AnyObject),
                    in_struct(ATTR_DEVX_ASYNC_QUERY_IN, HEADER),
                    Spec::new(ATTR_DEVX_ASYNC_QUERY_FD, file),
                    exactly(ATTR_DEVX_ASYNC_QUERY_WR_ID, 8),
                    constant(ATTR_DEVX_ASYNC_QUERY_LENGTH),
                ]
            }
        }
        (OBJECT_DEVX_ASYNC_CMD_FD, METHOD_DEVX_CMD_FD_ALLOC) => {
            &const { [new_object(ATTR_DEVX_CMD_FD_HANDLE)] }
        }
        (OBJECT_DEVX_ASYNC_EVENT_FD, METHOD_DEVX_EVENT_FD_ALLOC) => {
            &const {
                [
                    new_object(ATTR_DEVX_EVENT_FD_HANDLE),
                    flags(ATTR_DEVX_EVENT_FD_FLAGS),
                ]
            }
        }
        (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_DESTROY) => {
            &const { [object(ATTR_DEVX_OBJ_DESTROY_HANDLE, OBJECT_DEVX_OBJ)] }
        }
        (OBJECT_DEVX_UMEM, METHOD_DEVX_UMEM_REG) => {
            &const {
                [
                    new_object(ATTR_DEVX_UMEM_REG_HANDLE),
                    exactly(ATTR_DEVX_UMEM_REG_ADDR, 8),
                    exactly(ATTR_DEVX_UMEM_REG_LEN, 8),
                    flags(ATTR_DEVX_UMEM_REG_ACCESS),
                    constant(ATTR_DEVX_UMEM_REG_PAGE_SIZES).optional(),
                    Spec::new(ATTR_DEVX_UMEM_REG_DMABUF, Form::ProgramFd).optional(),
                    out(ATTR_DEVX_UMEM_REG_NUMBER, 4),
                ]
            }
        }
        (OBJECT_DEVX_UMEM, METHOD_DEVX_UMEM_DEREG) => {
            &const { [object(ATTR_DEVX_UMEM_DEREG_HANDLE, OBJECT_DEVX_UMEM)] }
        }
        (OBJECT_PD, METHOD_PD_QUERY) => {
            &const {
                [
                    object(ATTR_QUERY_PD_HANDLE, OBJECT_PD),
                    out(ATTR_QUERY_PD_NUMBER, 4),
                ]
            }
        }
        (OBJECT_UAR, METHOD_UAR_ALLOC) => {
            &const {
                [
                    new_object(ATTR_ALLOC_UAR_HANDLE),
                    constant(ATTR_ALLOC_UAR_TYPE),
                    out(ATTR_ALLOC_UAR_MMAP_OFFSET, 8),
                    out(ATTR_ALLOC_UAR_MMAP_LENGTH, 4),
                    out(ATTR_ALLOC_UAR_PAGE_ID, 4),
                ]
            }
        }
        (OBJECT_DM, METHOD_DM_MAP_OP) => {
            &const {
                [
                    object(ATTR_MAP_OP_HANDLE, OBJECT_DM),
                    exactly(ATTR_MAP_OP_OPERATION, 1),
                    out(ATTR_MAP_OP_START_OFFSET, 8),
                    out(ATTR_MAP_OP_PAGE_INDEX, 2),
                ]
            }
        }
        (OBJECT_DM, METHOD_DM_QUERY) => {
            &const {
                [
                    object(ATTR_QUERY_DM_HANDLE, OBJECT_DM),
                    out(ATTR_QUERY_DM_START_OFFSET, 8),
                    out(ATTR_QUERY_DM_PAGE_INDEX, 2),
                    out(ATTR_QUERY_DM_LENGTH, 8),
                ]
            }
        }
        (OBJECT_FLOW_MATCHER, METHOD_FLOW_MATCHER_CREATE) => {
            &const {
                // `enum mlx5_ib_flow_type`: the first has a priority.
                let types = Form::Enum(&[2, 0, 0, 0]);
                [
                    new_object(ATTR_FLOW_MATCHER_CREATE_HANDLE),
                    match_parameters(ATTR_FLOW_MATCHER_MATCH_MASK),
                    Spec::new(ATTR_FLOW_MATCHER_FLOW_TYPE, types),
                    exactly(ATTR_FLOW_MATCHER_MATCH_CRITERIA, 1),
                    flags(ATTR_FLOW_MATCHER_FLOW_FLAGS),
                    constant(ATTR_FLOW_MATCHER_FT_TYPE).optional(),
                ]
            }
        }
        (OBJECT_FLOW_MATCHER, METHOD_FLOW_MATCHER_DESTROY) => {
            &const {
                [object(
                    ATTR_FLOW_MATCHER_DESTROY_HANDLE,
                    OBJECT_FLOW_MATCHER,
                )]
            }
        }
        (OBJECT_FLOW, METHOD_CREATE_FLOW) => {
            &const {
                let actions = Form::Objects {
                    kind: OBJECT_FLOW_ACTION,
                    max: 2,
                };
                let counters = Form::Objects {
                    kind: OBJECT_DEVX_OBJ,
                    max: 1,
                };
                [
                    new_object(ATTR_CREATE_FLOW_HANDLE),
                    match_parameters(ATTR_CREATE_FLOW_MATCH_VALUE),
                    object(ATTR_CREATE_FLOW_DEST_QP, OBJECT_QP).optional(),
                    object(ATTR_CREATE_FLOW_DEST_DEVX, OBJECT_DEVX_OBJ).optional(),
                    object(ATTR_CREATE_FLOW_MATCHER, OBJECT_FLOW_MATCHER),
                    Spec::new(ATTR_CREATE_FLOW_ACTIONS, actions).optional(),
                    exactly(ATTR_CREATE_FLOW_TAG, 4).optional(),
                    Spec::new(ATTR_CREATE_FLOW_COUNTERS, counters).optional(),
                    in_struct(ATTR_CREATE_FLOW_COUNTERS_OFFSET, 4).optional(),
                    flags(ATTR_CREATE_FLOW_FLAGS),
                ]
            }
        }
        (OBJECT_FLOW, METHOD_DESTROY_FLOW) => {
            &const { [object(ATTR_DESTROY_FLOW_HANDLE, OBJECT_FLOW)] }
        }
        (OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_MODIFY_HEADER) => {
            &const {
                [
                    new_object(ATTR_MODIFY_HEADER_HANDLE),
                    in_struct(ATTR_MODIFY_HEADER_ACTIONS, 8),
                    constant(ATTR_MODIFY_HEADER_TABLE),
                ]
            }
        }
        (OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_REFORMAT) => {
            &const {
                [
                    new_object(ATTR_REFORMAT_HANDLE),
                    constant(ATTR_REFORMAT_TYPE),
                    constant(ATTR_REFORMAT_TABLE),
                    in_struct(ATTR_REFORMAT_DATA, 1).optional(),
                ]
            }
        }
        (OBJECT_UAR, METHOD_UAR_DESTROY) => {
            &const { [object(ATTR_DESTROY_UAR_HANDLE, OBJECT_UAR)] }
        }
        _ => return None,
    })
}
