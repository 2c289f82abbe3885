//! Attributes of each command, from the kernel's declarations of its methods
//! (`uverbs_std_types*.c`).

use crate::abi::ids::*;
use crate::abi::later::*;

/// Type of an attribute.
#[derive(Clone, Copy, Debug)]
pub enum AttrType {
    /// Input data: minimum and maximum length.
    In(u16, u16),
    /// Output data: minimum length.
    Out(u16),
    /// The object to create.
    New(u16),
    /// The descriptor to create.
    NewFd,
    /// An existing object.
    Object(u16),
    /// The object to destroy.
    Destroy(u16),
    /// An existing descriptor.
    Fd,
    /// A value of an enumeration of so many, without data.
    Enum(u8),
}

use AttrType as Ty;

/// An attribute of a method.
#[derive(Clone, Copy, Debug)]
pub struct AttrSpec {
    /// Its number.
    pub id: u16,
    /// Its type.
    pub ty: AttrType,
    /// Whether the method requires it.
    pub mandatory: bool,
}

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

const U32: Ty = Ty::In(4, 4);
const U64: Ty = Ty::In(8, 8);
const CONST: Ty = Ty::In(8, 8);
const FLAGS: Ty = Ty::In(4, 8);
const OUT32: Ty = Ty::Out(4);
const OUT64: Ty = Ty::Out(8);

/// A method, or attributes that a driver adds to a common one.
#[derive(Clone, Copy, Debug)]
pub struct MethodSpec {
    /// Number of the object.
    pub object: u16,
    /// Number of the method.
    pub method: u16,
    /// Whether it takes driver data.
    pub udata: bool,
    /// Its attributes.
    pub attrs: &'static [AttrSpec],
}

const METHODS: &[MethodSpec] = &[
    MethodSpec {
        object: OBJECT_COUNTERS,
        method: METHOD_COUNTERS_CREATE,
        udata: false,
        attrs: &[must(ATTR_CREATE_COUNTERS_HANDLE, Ty::New(OBJECT_COUNTERS))],
    },
    MethodSpec {
        object: OBJECT_COUNTERS,
        method: METHOD_COUNTERS_DESTROY,
        udata: false,
        attrs: &[must(
            ATTR_DESTROY_COUNTERS_HANDLE,
            Ty::Destroy(OBJECT_COUNTERS),
        )],
    },
    MethodSpec {
        object: OBJECT_COUNTERS,
        method: METHOD_COUNTERS_READ,
        udata: false,
        attrs: &[
            must(ATTR_READ_COUNTERS_HANDLE, Ty::Object(OBJECT_COUNTERS)),
            must(ATTR_READ_COUNTERS_BUFF, OUT64),
            must(ATTR_READ_COUNTERS_FLAGS, FLAGS),
        ],
    },
    MethodSpec {
        object: OBJECT_DM,
        method: METHOD_DM_ALLOC,
        udata: false,
        attrs: &[
            must(ATTR_ALLOC_DM_HANDLE, Ty::New(OBJECT_DM)),
            must(ATTR_ALLOC_DM_LENGTH, U64),
            must(ATTR_ALLOC_DM_ALIGNMENT, U32),
        ],
    },
    MethodSpec {
        object: OBJECT_DM,
        method: METHOD_DM_FREE,
        udata: false,
        attrs: &[must(ATTR_FREE_DM_HANDLE, Ty::Destroy(OBJECT_DM))],
    },
    MethodSpec {
        object: OBJECT_MR,
        method: METHOD_DM_MR_REG,
        udata: false,
        attrs: &[
            must(ATTR_REG_DM_MR_HANDLE, Ty::New(OBJECT_MR)),
            must(ATTR_REG_DM_MR_OFFSET, U64),
            must(ATTR_REG_DM_MR_LENGTH, U64),
            must(ATTR_REG_DM_MR_PD_HANDLE, Ty::Object(OBJECT_PD)),
            must(ATTR_REG_DM_MR_ACCESS_FLAGS, FLAGS),
            must(ATTR_REG_DM_MR_DM_HANDLE, Ty::Object(OBJECT_DM)),
            must(ATTR_REG_DM_MR_RESP_LKEY, OUT32),
            must(ATTR_REG_DM_MR_RESP_RKEY, OUT32),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_INVOKE_WRITE,
        udata: true,
        attrs: &[
            must(ATTR_WRITE_CMD, CONST),
            may(ATTR_CORE_IN, Ty::In(4, u16::MAX)),
            may(ATTR_CORE_OUT, Ty::Out(0)),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_GET_CONTEXT,
        udata: true,
        attrs: &[
            may(ATTR_GET_CONTEXT_NUM_COMP_VECTORS, OUT32),
            may(ATTR_GET_CONTEXT_CORE_SUPPORT, OUT64),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_QUERY_CONTEXT,
        udata: false,
        attrs: &[
            may(ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS, OUT32),
            may(ATTR_QUERY_CONTEXT_CORE_SUPPORT, OUT64),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_QUERY_PORT,
        udata: false,
        attrs: &[
            must(ATTR_QUERY_PORT_PORT_NUM, CONST),
            must(ATTR_QUERY_PORT_RESP, Ty::Out(42)),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_QUERY_PORT_SPEED,
        udata: false,
        attrs: &[
            must(ATTR_QUERY_PORT_SPEED_PORT_NUM, CONST),
            must(ATTR_QUERY_PORT_SPEED_RESP, OUT64),
        ],
    },
    MethodSpec {
        object: OBJECT_DMAH,
        method: METHOD_DMAH_ALLOC,
        udata: false,
        attrs: &[
            must(ATTR_ALLOC_DMAH_HANDLE, Ty::New(OBJECT_DMAH)),
            may(ATTR_ALLOC_DMAH_CPU_ID, U32),
            may(ATTR_ALLOC_DMAH_TPH_MEM_TYPE, Ty::Enum(2)),
            may(ATTR_ALLOC_DMAH_PH, Ty::In(1, 1)),
        ],
    },
    MethodSpec {
        object: OBJECT_DMAH,
        method: METHOD_DMAH_FREE,
        udata: false,
        attrs: &[must(ATTR_FREE_DMA_HANDLE, Ty::Destroy(OBJECT_DMAH))],
    },
    MethodSpec {
        object: OBJECT_MR,
        method: METHOD_REG_MR,
        udata: true,
        attrs: &[
            must(ATTR_REG_MR_HANDLE, Ty::New(OBJECT_MR)),
            must(ATTR_REG_MR_PD_HANDLE, Ty::Object(OBJECT_PD)),
            may(ATTR_REG_MR_DMA_HANDLE, Ty::Object(OBJECT_DMAH)),
            must(ATTR_REG_MR_IOVA, U64),
            may(ATTR_REG_MR_ADDR, U64),
            must(ATTR_REG_MR_LENGTH, U64),
            must(ATTR_REG_MR_ACCESS_FLAGS, FLAGS),
            may(ATTR_REG_MR_FD, Ty::Fd),
            may(ATTR_REG_MR_FD_OFFSET, U64),
            must(ATTR_REG_MR_RESP_LKEY, Ty::Out(4)),
            must(ATTR_REG_MR_RESP_RKEY, Ty::Out(4)),
        ],
    },
    MethodSpec {
        object: OBJECT_DMABUF,
        method: METHOD_DMABUF_ALLOC,
        udata: false,
        attrs: &[
            must(ATTR_ALLOC_DMABUF_HANDLE, Ty::NewFd),
            must(ATTR_ALLOC_DMABUF_PGOFF, U64),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_QUERY_GID_TABLE,
        udata: false,
        attrs: &[
            must(ATTR_QUERY_GID_TABLE_ENTRY_SIZE, CONST),
            may(ATTR_QUERY_GID_TABLE_FLAGS, FLAGS),
            must(ATTR_QUERY_GID_TABLE_RESP_ENTRIES, Ty::Out(0)),
            must(ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, OUT64),
        ],
    },
    MethodSpec {
        object: OBJECT_DEVICE,
        method: METHOD_QUERY_GID_ENTRY,
        udata: false,
        attrs: &[
            must(ATTR_QUERY_GID_ENTRY_PORT, CONST),
            must(ATTR_QUERY_GID_ENTRY_GID_INDEX, CONST),
            must(ATTR_QUERY_GID_ENTRY_FLAGS, FLAGS),
            must(ATTR_QUERY_GID_ENTRY_RESP_ENTRY, Ty::Out(32)),
        ],
    },
    MethodSpec {
        object: OBJECT_ASYNC_EVENT,
        method: METHOD_ASYNC_EVENT_ALLOC,
        udata: false,
        attrs: &[must(ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, Ty::NewFd)],
    },
    MethodSpec {
        object: OBJECT_CQ,
        method: METHOD_CQ_CREATE,
        udata: true,
        attrs: &[
            must(ATTR_CREATE_CQ_HANDLE, Ty::New(OBJECT_CQ)),
            must(ATTR_CREATE_CQ_CQE, U32),
            must(ATTR_CREATE_CQ_USER_HANDLE, U64),
            may(ATTR_CREATE_CQ_COMP_CHANNEL, Ty::Fd),
            must(ATTR_CREATE_CQ_COMP_VECTOR, U32),
            may(ATTR_CREATE_CQ_FLAGS, FLAGS),
            must(ATTR_CREATE_CQ_RESP_CQE, OUT32),
            may(ATTR_CREATE_CQ_EVENT_FD, Ty::Fd),
        ],
    },
    MethodSpec {
        object: OBJECT_CQ,
        method: METHOD_CQ_DESTROY,
        udata: false,
        attrs: &[
            must(ATTR_DESTROY_CQ_HANDLE, Ty::Destroy(OBJECT_CQ)),
            must(ATTR_DESTROY_CQ_RESP, Ty::Out(8)),
        ],
    },
    MethodSpec {
        object: OBJECT_QP,
        method: METHOD_QP_CREATE,
        udata: true,
        attrs: &[
            must(ATTR_CREATE_QP_HANDLE, Ty::New(OBJECT_QP)),
            may(ATTR_CREATE_QP_XRCD_HANDLE, Ty::Object(OBJECT_XRCD)),
            may(ATTR_CREATE_QP_PD_HANDLE, Ty::Object(OBJECT_PD)),
            may(ATTR_CREATE_QP_SRQ_HANDLE, Ty::Object(OBJECT_SRQ)),
            may(ATTR_CREATE_QP_SEND_CQ_HANDLE, Ty::Object(OBJECT_CQ)),
            may(ATTR_CREATE_QP_RECV_CQ_HANDLE, Ty::Object(OBJECT_CQ)),
            may(
                ATTR_CREATE_QP_IND_TABLE_HANDLE,
                Ty::Object(OBJECT_RWQ_IND_TBL),
            ),
            must(ATTR_CREATE_QP_USER_HANDLE, U64),
            must(ATTR_CREATE_QP_CAP, Ty::In(20, 20)),
            must(ATTR_CREATE_QP_TYPE, CONST),
            may(ATTR_CREATE_QP_FLAGS, FLAGS),
            may(ATTR_CREATE_QP_SOURCE_QPN, U32),
            may(ATTR_CREATE_QP_EVENT_FD, Ty::Fd),
            must(ATTR_CREATE_QP_RESP_CAP, Ty::Out(20)),
            must(ATTR_CREATE_QP_RESP_QP_NUM, OUT32),
        ],
    },
    MethodSpec {
        object: OBJECT_QP,
        method: METHOD_QP_DESTROY,
        udata: false,
        attrs: &[
            must(ATTR_DESTROY_QP_HANDLE, Ty::Destroy(OBJECT_QP)),
            must(ATTR_DESTROY_QP_RESP, OUT32),
        ],
    },
    MethodSpec {
        object: OBJECT_SRQ,
        method: METHOD_SRQ_CREATE,
        udata: true,
        attrs: &[
            must(ATTR_CREATE_SRQ_HANDLE, Ty::New(OBJECT_SRQ)),
            must(ATTR_CREATE_SRQ_PD_HANDLE, Ty::Object(OBJECT_PD)),
            must(ATTR_CREATE_SRQ_TYPE, CONST),
            must(ATTR_CREATE_SRQ_USER_HANDLE, U64),
            must(ATTR_CREATE_SRQ_MAX_WR, U32),
            must(ATTR_CREATE_SRQ_MAX_SGE, U32),
            must(ATTR_CREATE_SRQ_LIMIT, U32),
            may(ATTR_CREATE_SRQ_XRCD_HANDLE, Ty::Object(OBJECT_XRCD)),
            may(ATTR_CREATE_SRQ_CQ_HANDLE, Ty::Object(OBJECT_CQ)),
            may(ATTR_CREATE_SRQ_MAX_NUM_TAGS, U32),
            may(ATTR_CREATE_SRQ_EVENT_FD, Ty::Fd),
            must(ATTR_CREATE_SRQ_RESP_MAX_WR, OUT32),
            must(ATTR_CREATE_SRQ_RESP_MAX_SGE, OUT32),
            may(ATTR_CREATE_SRQ_RESP_SRQ_NUM, OUT32),
        ],
    },
    MethodSpec {
        object: OBJECT_SRQ,
        method: METHOD_SRQ_DESTROY,
        udata: false,
        attrs: &[
            must(ATTR_DESTROY_SRQ_HANDLE, Ty::Destroy(OBJECT_SRQ)),
            must(ATTR_DESTROY_SRQ_RESP, OUT32),
        ],
    },
    MethodSpec {
        object: OBJECT_WQ,
        method: METHOD_WQ_CREATE,
        udata: true,
        attrs: &[
            must(ATTR_CREATE_WQ_HANDLE, Ty::New(OBJECT_WQ)),
            must(ATTR_CREATE_WQ_PD_HANDLE, Ty::Object(OBJECT_PD)),
            must(ATTR_CREATE_WQ_CQ_HANDLE, Ty::Object(OBJECT_CQ)),
            must(ATTR_CREATE_WQ_USER_HANDLE, U64),
            must(ATTR_CREATE_WQ_TYPE, CONST),
            may(ATTR_CREATE_WQ_EVENT_FD, Ty::Fd),
            must(ATTR_CREATE_WQ_MAX_WR, U32),
            must(ATTR_CREATE_WQ_MAX_SGE, U32),
            must(ATTR_CREATE_WQ_FLAGS, FLAGS),
            must(ATTR_CREATE_WQ_RESP_MAX_WR, OUT32),
            must(ATTR_CREATE_WQ_RESP_MAX_SGE, OUT32),
            may(ATTR_CREATE_WQ_RESP_WQ_NUM, OUT32),
        ],
    },
    MethodSpec {
        object: OBJECT_WQ,
        method: METHOD_WQ_DESTROY,
        udata: false,
        attrs: &[
            must(ATTR_DESTROY_WQ_HANDLE, Ty::Destroy(OBJECT_WQ)),
            must(ATTR_DESTROY_WQ_RESP, OUT32),
        ],
    },
    MethodSpec {
        object: OBJECT_RWQ_IND_TBL,
        method: METHOD_RWQ_IND_TBL_DESTROY,
        udata: false,
        attrs: &[must(
            ATTR_DESTROY_RWQ_IND_TBL_HANDLE,
            Ty::Destroy(OBJECT_RWQ_IND_TBL),
        )],
    },
    MethodSpec {
        object: OBJECT_MR,
        method: METHOD_ADVISE_MR,
        udata: false,
        attrs: &[
            must(ATTR_ADVISE_MR_PD_HANDLE, Ty::Object(OBJECT_PD)),
            must(ATTR_ADVISE_MR_ADVICE, CONST),
            must(ATTR_ADVISE_MR_FLAGS, FLAGS),
            must(ATTR_ADVISE_MR_SGE_LIST, Ty::In(16, u16::MAX)),
        ],
    },
    MethodSpec {
        object: OBJECT_MR,
        method: METHOD_QUERY_MR,
        udata: false,
        attrs: &[
            must(ATTR_QUERY_MR_HANDLE, Ty::Object(OBJECT_MR)),
            must(ATTR_QUERY_MR_RESP_LKEY, OUT32),
            must(ATTR_QUERY_MR_RESP_RKEY, OUT32),
            must(ATTR_QUERY_MR_RESP_LENGTH, OUT64),
            may(ATTR_QUERY_MR_RESP_IOVA, OUT64),
        ],
    },
    MethodSpec {
        object: OBJECT_MR,
        method: METHOD_REG_DMABUF_MR,
        udata: false,
        attrs: &[
            must(ATTR_REG_DMABUF_MR_HANDLE, Ty::New(OBJECT_MR)),
            must(ATTR_REG_DMABUF_MR_PD_HANDLE, Ty::Object(OBJECT_PD)),
            must(ATTR_REG_DMABUF_MR_OFFSET, U64),
            must(ATTR_REG_DMABUF_MR_LENGTH, U64),
            must(ATTR_REG_DMABUF_MR_IOVA, U64),
            must(ATTR_REG_DMABUF_MR_FD, U32),
            may(ATTR_REG_DMABUF_MR_ACCESS_FLAGS, FLAGS),
            must(ATTR_REG_DMABUF_MR_RESP_LKEY, OUT32),
            must(ATTR_REG_DMABUF_MR_RESP_RKEY, OUT32),
        ],
    },
    MethodSpec {
        object: OBJECT_MR,
        method: METHOD_MR_DESTROY,
        udata: false,
        attrs: &[must(ATTR_DESTROY_MR_HANDLE, Ty::Destroy(OBJECT_MR))],
    },
    MethodSpec {
        object: OBJECT_PD,
        method: METHOD_PD_DESTROY,
        udata: false,
        attrs: &[must(ATTR_DESTROY_PD_HANDLE, Ty::Destroy(OBJECT_PD))],
    },
    MethodSpec {
        object: OBJECT_MW,
        method: METHOD_MW_DESTROY,
        udata: false,
        attrs: &[must(ATTR_DESTROY_MW_HANDLE, Ty::Destroy(OBJECT_MW))],
    },
    MethodSpec {
        object: OBJECT_AH,
        method: METHOD_AH_DESTROY,
        udata: false,
        attrs: &[must(ATTR_DESTROY_AH_HANDLE, Ty::Destroy(OBJECT_AH))],
    },
    MethodSpec {
        object: OBJECT_XRCD,
        method: METHOD_XRCD_DESTROY,
        udata: false,
        attrs: &[must(ATTR_DESTROY_XRCD_HANDLE, Ty::Destroy(OBJECT_XRCD))],
    },
];

/// The methods of a kernel: common ones, and those that drivers add.
#[derive(Clone)]
pub struct Methods(Vec<&'static [MethodSpec]>);

impl Default for Methods {
    fn default() -> Self {
        Self(vec![METHODS])
    }
}

impl Methods {
    pub fn add(&mut self, methods: &'static [MethodSpec]) {
        self.0.push(methods);
    }

    /// Returns the declarations of a method; several if a driver adds
    /// attributes.
    pub fn of(&self, object: u16, method: u16) -> impl Iterator<Item = &'static MethodSpec> {
        let all = self.0.iter().copied().flatten();
        all.filter(move |spec| spec.object == object && spec.method == method)
    }

    pub fn attrs(&self, object: u16, method: u16) -> impl Iterator<Item = &'static AttrSpec> {
        self.of(object, method).flat_map(|spec| spec.attrs)
    }

    pub fn attr(&self, object: u16, method: u16, id: u16) -> Option<AttrType> {
        let udata = self.of(object, method).any(|spec| spec.udata);
        match id {
            ATTR_UHW_IN if udata => Some(Ty::In(0, u16::MAX)),
            ATTR_UHW_OUT if udata => Some(Ty::Out(0)),
            _ => self
                .attrs(object, method)
                .find(|attr| attr.id == id)
                .map(|attr| attr.ty),
        }
    }

    pub fn is_input(&self, object: u16, method: u16, id: u16) -> bool {
        matches!(self.attr(object, method, id), Some(Ty::In(..)))
    }

    pub fn is_output(&self, object: u16, method: u16, id: u16) -> bool {
        matches!(self.attr(object, method, id), Some(Ty::Out(_)))
    }

    /// Returns the attribute that receives the handle of the created object.
    pub fn new_object_attr(&self, object: u16, method: u16) -> Option<u16> {
        self.attrs(object, method)
            .find(|attr| matches!(attr.ty, Ty::New(_) | Ty::NewFd))
            .map(|attr| attr.id)
    }
}
