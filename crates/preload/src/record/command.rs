//! Commands of `RDMA_VERBS_IOCTL` as calls of libibverbs: their inputs before the command, and
//! what it returns after it.

use std::collections::HashMap;
use std::ffi::{c_int, c_ulong, c_void};
use std::net::Ipv6Addr;
use std::os::fd::RawFd;
use std::time::Instant;

use uverbs::abi::ids::*;
use uverbs::abi::ioctl::RDMA_VERBS_IOCTL;
use uverbs::abi::later::{
    ATTR_REG_MR_ACCESS_FLAGS, ATTR_REG_MR_ADDR, ATTR_REG_MR_IOVA, ATTR_REG_MR_LENGTH,
    ATTR_REG_MR_PD_HANDLE, ATTR_REG_MR_RESP_LKEY, ATTR_REG_MR_RESP_RKEY, METHOD_REG_MR,
};
use uverbs::abi::write::cmd::*;
use uverbs::abi::write::extended::*;
use uverbs::abi::write::{
    AhAttr, AllocMw, AllocMwResp, AllocPdResp, AttachMcast, CreateAh, CreateAhResp, CreateFlowResp,
    CreateQpResp, DestroyFlow, ExCreateRwqIndTableResp, ExDestroyRwqIndTable, ExModifyCq,
    ExModifyQp, ExModifyWq, ModifyQp, ModifySrq, OpenQp, OpenXrcdResp, QpDest, QueryQp, QuerySrq,
    RegMr, RegMrResp, ReqNotifyCq, ReregMr, ReregMrResp, ResizeCq, ResizeCqResp,
};
use uverbs::{QpAttrMask, QpCap};
use zerocopy::FromBytes;

use super::{Recorder, current, names, now};
use crate::explain::json::Object;
use crate::explain::{lock, thread};
use crate::request::Request;
use crate::{config, host, internal, posts, table};

/// Object types of drivers begin here.
const DRIVER_OBJECTS: u16 = 1 << 12;
/// `IB_UVERBS_QP_CREATE_SQ_SIG_ALL`.
const SIGNALS_ALL: u32 = 1 << 4;

/// The program's objects: what later calls, posts and completions name.
#[derive(Debug, Default)]
pub(super) struct Objects {
    /// Names of devices, by the descriptor of the context.
    devices: HashMap<RawFd, String>,
    /// By descriptor of the context, and handle.
    known: HashMap<(RawFd, u32), Known>,
    /// Queue pairs whose sends all complete, by descriptor of the context, and number.
    signals_all: HashMap<(RawFd, u32), bool>,
}

#[derive(Clone, Debug)]
struct Known {
    name: String,
    /// Of a queue pair: its number and user handle.
    queue_pair: Option<(u32, u64)>,
}

impl Objects {
    /// Returns the name of an object of a context, given its type.
    fn name(&self, fd: RawFd, kind: &str, handle: u32) -> String {
        let known = self.known.get(&(fd, handle));
        known.map_or_else(|| format!("{kind} {handle}"), |known| known.name.clone())
    }

    /// Returns whether all sends of a queue pair complete.
    pub(super) fn signals_all(&self, fd: RawFd, number: u32) -> bool {
        self.signals_all.get(&(fd, number)).copied() == Some(true)
    }

    /// Forgets a context, whose descriptor is another one.
    fn forget(&mut self, fd: RawFd) {
        self.devices.remove(&fd);
        self.known.retain(|(of, _), _| *of != fd);
        self.signals_all.retain(|(of, _), _| *of != fd);
    }
}

/// Returns the name of the device that a descriptor is of.
fn device_of(fd: RawFd) -> String {
    match table::embedded_device_of(fd) {
        Some(number) => config::device_name(number),
        None => host::device_of_host(fd),
    }
}

/// What a call is about.
enum About {
    /// It creates an object of this type, whose handle is this attribute.
    Creates(&'static str, u16),
    /// As above, by a write command, whose answer has the handle.
    Writes(&'static str),
    Uses(String),
    /// Destroys the object with this handle.
    Destroys(String, u32),
    Nothing,
}

/// A call that is under way.
pub(crate) struct Call {
    recorder: &'static Recorder,
    fd: RawFd,
    name: &'static str,
    request: Request,
    about: About,
    arguments: Object,
    /// Address of a completion queue that it creates; number and user handle of a queue pair
    /// that it modifies.
    queue: u64,
    queue_pair: Option<(u32, u64)>,
    time: u64,
    began: Instant,
}

/// What the caller of a command hooks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Created {
    /// User handle of a completion queue.
    pub(crate) completion_queue: Option<u64>,
}

impl Call {
    /// Describes a call before its command is executed; `None` without a record.
    #[inline]
    pub(crate) fn begin(fd: RawFd, request: c_ulong, argument: *mut c_void) -> Option<Self> {
        match super::is_on() && request == RDMA_VERBS_IOCTL {
            true => Self::describe(fd, argument),
            false => None,
        }
    }

    #[cold]
    fn describe(fd: RawFd, argument: *mut c_void) -> Option<Self> {
        let recorder = current()?;
        let _scope = internal::enter();
        let request = Request::read(argument)?;
        let mut call = Self {
            recorder,
            fd,
            name: "",
            about: About::Nothing,
            arguments: Object::new(),
            queue: 0,
            queue_pair: None,
            time: now(),
            began: Instant::now(),
            request,
        };
        call.fill();
        call.began = Instant::now();
        Some(call)
    }

    /// Returns the descriptor of its context.
    pub(crate) fn context(&self) -> RawFd {
        self.fd
    }

    /// Returns the name of an object of this context.
    fn object(&self, kind: &str, handle: u32) -> String {
        lock(&self.recorder.objects).name(self.fd, kind, handle)
    }

    /// Adds an argument that is JSON.
    fn add(&mut self, name: &str, value: impl std::fmt::Display) {
        let arguments = std::mem::replace(&mut self.arguments, Object::new());
        self.arguments = arguments.raw(name, value);
    }

    fn add_text(&mut self, name: &str, value: &str) {
        self.add(name, crate::explain::json::quoted(value));
    }

    /// Adds an object that an attribute names, if the command has it.
    fn add_object(&mut self, name: &str, kind: &str, id: u16) {
        if let Some(handle) = self.request.handle(id) {
            let object = self.object(kind, handle);
            self.add_text(name, &object);
        }
    }

    /// Adds a number, if the command has it.
    fn add_number<T: FromBytes + std::fmt::Display>(&mut self, name: &str, id: u16) {
        if let Some(value) = self.request.input::<T>(id) {
            self.add(name, value);
        }
    }

    fn uses(&mut self, kind: &str, handle: u32) {
        self.about = About::Uses(self.object(kind, handle));
    }

    fn destroys(&mut self, kind: &str, handle: u32) {
        self.about = About::Destroys(self.object(kind, handle), handle);
    }

    /// Sets name, arguments and object.
    fn fill(&mut self) {
        let method = (self.request.object, self.request.method);
        // The handle of an object is the first attribute of what destroys it.
        let mut destroys = |name, kind| {
            let handle = self.request.handle(0).unwrap_or_default();
            (self.name, self.about) = (name, About::Nothing);
            self.destroys(kind, handle);
        };
        match method {
            (OBJECT_DEVICE, METHOD_INVOKE_WRITE) => self.fill_write(),
            (OBJECT_DEVICE, METHOD_GET_CONTEXT) => self.name = "open_device",
            (OBJECT_DEVICE, METHOD_QUERY_CONTEXT) => self.name = "query_context",
            (OBJECT_DEVICE, METHOD_QUERY_PORT) => {
                self.name = "query_port";
                self.add_number::<u8>("port_num", ATTR_QUERY_PORT_PORT_NUM);
            }
            (OBJECT_DEVICE, METHOD_QUERY_GID_TABLE) => self.name = "query_gid_table",
            (OBJECT_DEVICE, METHOD_QUERY_GID_ENTRY) => {
                self.name = "query_gid";
                self.add_number::<u32>("index", ATTR_QUERY_GID_ENTRY_GID_INDEX);
            }
            (OBJECT_ASYNC_EVENT, METHOD_ASYNC_EVENT_ALLOC) => self.name = "create_async_events",
            (OBJECT_CQ, METHOD_CQ_CREATE) => self.fill_completion_queue(),
            (OBJECT_QP, METHOD_QP_CREATE) => self.fill_queue_pair(),
            (OBJECT_SRQ, METHOD_SRQ_CREATE) => self.fill_shared_queue(),
            (OBJECT_MR, METHOD_REG_DMABUF_MR) => {
                self.name = "reg_dmabuf_mr";
                self.about = About::Creates("mr", ATTR_REG_DMABUF_MR_HANDLE);
                self.add_object("pd", "pd", ATTR_REG_DMABUF_MR_PD_HANDLE);
                self.add_number::<u64>("offset", ATTR_REG_DMABUF_MR_OFFSET);
                self.add_number::<u64>("length", ATTR_REG_DMABUF_MR_LENGTH);
                self.add_number::<u64>("iova", ATTR_REG_DMABUF_MR_IOVA);
                self.add_access(ATTR_REG_DMABUF_MR_ACCESS_FLAGS);
            }
            (OBJECT_MR, METHOD_DM_MR_REG) => {
                self.name = "reg_dm_mr";
                self.about = About::Creates("mr", ATTR_REG_DM_MR_HANDLE);
                self.add_object("pd", "pd", ATTR_REG_DM_MR_PD_HANDLE);
                self.add_object("dm", "dm", ATTR_REG_DM_MR_DM_HANDLE);
                self.add_number::<u64>("offset", ATTR_REG_DM_MR_OFFSET);
                self.add_number::<u64>("length", ATTR_REG_DM_MR_LENGTH);
                self.add_access(ATTR_REG_DM_MR_ACCESS_FLAGS);
            }
            (OBJECT_MR, METHOD_REG_MR) => {
                self.name = "reg_mr";
                self.about = About::Creates("mr", 0);
                self.add_object("pd", "pd", ATTR_REG_MR_PD_HANDLE);
                self.add_number::<u64>("address", ATTR_REG_MR_ADDR);
                self.add_number::<u64>("length", ATTR_REG_MR_LENGTH);
                self.add_number::<u64>("iova", ATTR_REG_MR_IOVA);
                self.add_access(ATTR_REG_MR_ACCESS_FLAGS);
            }
            (OBJECT_MR, METHOD_ADVISE_MR) => self.name = "advise_mr",
            (OBJECT_MR, METHOD_QUERY_MR) => self.name = "query_mr",
            (OBJECT_DM, METHOD_DM_ALLOC) => {
                self.name = "alloc_dm";
                self.about = About::Creates("dm", ATTR_ALLOC_DM_HANDLE);
                self.add_number::<u64>("length", ATTR_ALLOC_DM_LENGTH);
            }
            (OBJECT_WQ, METHOD_WQ_CREATE) => {
                self.name = "create_wq";
                self.about = About::Creates("wq", ATTR_CREATE_WQ_HANDLE);
                self.add_object("pd", "pd", ATTR_CREATE_WQ_PD_HANDLE);
                self.add_object("cq", "cq", ATTR_CREATE_WQ_CQ_HANDLE);
                self.add_number::<u32>("max_wr", ATTR_CREATE_WQ_MAX_WR);
                self.add_number::<u32>("max_sge", ATTR_CREATE_WQ_MAX_SGE);
            }
            (OBJECT_COUNTERS, METHOD_COUNTERS_CREATE) => {
                self.name = "create_counters";
                self.about = About::Creates("counters", ATTR_CREATE_COUNTERS_HANDLE);
            }
            (OBJECT_COUNTERS, METHOD_COUNTERS_READ) => self.name = "read_counters",
            (OBJECT_MR, METHOD_MR_DESTROY) => destroys("dereg_mr", "mr"),
            (OBJECT_MW, METHOD_MW_DESTROY) => destroys("dealloc_mw", "mw"),
            (OBJECT_PD, METHOD_PD_DESTROY) => destroys("dealloc_pd", "pd"),
            (OBJECT_AH, METHOD_AH_DESTROY) => destroys("destroy_ah", "ah"),
            (OBJECT_CQ, METHOD_CQ_DESTROY) => destroys("destroy_cq", "cq"),
            (OBJECT_QP, METHOD_QP_DESTROY) => destroys("destroy_qp", "qp"),
            (OBJECT_SRQ, METHOD_SRQ_DESTROY) => destroys("destroy_srq", "srq"),
            (OBJECT_XRCD, METHOD_XRCD_DESTROY) => destroys("close_xrcd", "xrcd"),
            (OBJECT_WQ, METHOD_WQ_DESTROY) => destroys("destroy_wq", "wq"),
            (OBJECT_RWQ_IND_TBL, METHOD_RWQ_IND_TBL_DESTROY) => {
                destroys("destroy_rwq_ind_table", "rwq_ind_table");
            }
            (OBJECT_FLOW, 0) => destroys("destroy_flow", "flow"),
            (OBJECT_DM, METHOD_DM_FREE) => destroys("free_dm", "dm"),
            (OBJECT_COUNTERS, METHOD_COUNTERS_DESTROY) => destroys("destroy_counters", "counters"),
            (object, number) => {
                self.name = match object < DRIVER_OBJECTS {
                    true => "ioctl",
                    false => "driver_ioctl",
                };
                self.add("object", object);
                self.add("method", number);
            }
        }
    }

    fn add_access(&mut self, id: u16) {
        if let Some(access) = self.request.input::<u32>(id) {
            self.add("access", names::access(access));
        }
    }

    fn fill_completion_queue(&mut self) {
        self.name = "create_cq";
        self.about = About::Creates("cq", ATTR_CREATE_CQ_HANDLE);
        self.queue = (self.request.input(ATTR_CREATE_CQ_USER_HANDLE)).unwrap_or_default();
        self.add_number::<u32>("cqe", ATTR_CREATE_CQ_CQE);
        self.add_number::<u32>("comp_vector", ATTR_CREATE_CQ_COMP_VECTOR);
        let channel = self.request.handle(ATTR_CREATE_CQ_COMP_CHANNEL);
        if let Some(channel) = channel.filter(|it| *it as i32 >= 0) {
            self.add_text("channel", &format!("channel {channel}"));
        }
        if let Some(flags) = self.request.input::<u32>(ATTR_CREATE_CQ_FLAGS) {
            self.add("flags", flags);
        }
    }

    fn fill_queue_pair(&mut self) {
        self.name = "create_qp";
        self.about = About::Creates("qp", ATTR_CREATE_QP_HANDLE);
        let request = &self.request;
        // A constant is beside the data where it has a payload.
        let kind = request
            .input::<u64>(ATTR_CREATE_QP_TYPE)
            .unwrap_or_default() as u32;
        let flags: u32 = request.input(ATTR_CREATE_QP_FLAGS).unwrap_or_default();
        let cap = request.input::<[u32; 5]>(ATTR_CREATE_QP_CAP);
        self.add("qp_type", names::queue_pair_type(kind));
        for (name, kind, id) in [
            ("pd", "pd", ATTR_CREATE_QP_PD_HANDLE),
            ("send_cq", "cq", ATTR_CREATE_QP_SEND_CQ_HANDLE),
            ("recv_cq", "cq", ATTR_CREATE_QP_RECV_CQ_HANDLE),
            ("srq", "srq", ATTR_CREATE_QP_SRQ_HANDLE),
            ("xrcd", "xrcd", ATTR_CREATE_QP_XRCD_HANDLE),
            (
                "rwq_ind_table",
                "rwq_ind_table",
                ATTR_CREATE_QP_IND_TABLE_HANDLE,
            ),
        ] {
            self.add_object(name, kind, id);
        }
        if let Some(cap) = cap {
            self.add_capacity(cap);
        }
        self.add("sq_sig_all", flags & SIGNALS_ALL != 0);
        if flags & !SIGNALS_ALL != 0 {
            self.add("create_flags", flags & !SIGNALS_ALL);
        }
    }

    fn add_capacity(&mut self, cap: [u32; 5]) {
        for (name, value) in CAPACITY.iter().zip(cap) {
            self.add(name, value);
        }
    }

    fn fill_shared_queue(&mut self) {
        self.name = "create_srq";
        self.about = About::Creates("srq", ATTR_CREATE_SRQ_HANDLE);
        self.add_object("pd", "pd", ATTR_CREATE_SRQ_PD_HANDLE);
        self.add_object("xrcd", "xrcd", ATTR_CREATE_SRQ_XRCD_HANDLE);
        self.add_object("cq", "cq", ATTR_CREATE_SRQ_CQ_HANDLE);
        self.add_number::<u32>("max_wr", ATTR_CREATE_SRQ_MAX_WR);
        self.add_number::<u32>("max_sge", ATTR_CREATE_SRQ_MAX_SGE);
        self.add_number::<u32>("srq_limit", ATTR_CREATE_SRQ_LIMIT);
        let kind: u64 = self.request.input(ATTR_CREATE_SRQ_TYPE).unwrap_or_default();
        if kind != 0 {
            self.add("srq_type", kind as u32);
        }
    }

    fn core<T: FromBytes + Default>(&self) -> T {
        self.request.input(ATTR_CORE_IN).unwrap_or_default()
    }

    /// As [`fill`](Self::fill), of a write command.
    fn fill_write(&mut self) {
        let command = self.request.input::<u64>(ATTR_WRITE_CMD);
        let command = command.unwrap_or_default() as u32;
        match command {
            CMD_QUERY_DEVICE | EX_QUERY_DEVICE => self.name = "query_device",
            CMD_QUERY_PORT => self.name = "query_port",
            CMD_ALLOC_PD => (self.name, self.about) = ("alloc_pd", About::Writes("pd")),
            CMD_REG_MR => {
                (self.name, self.about) = ("reg_mr", About::Writes("mr"));
                let given: RegMr = self.core();
                self.add_text("pd", &self.object("pd", given.pd_handle));
                self.add("address", given.start);
                self.add("length", given.length);
                self.add("iova", given.hca_va);
                self.add("access", names::access(given.access_flags));
            }
            CMD_REREG_MR => {
                self.name = "rereg_mr";
                let given: ReregMr = self.core();
                self.uses("mr", given.mr_handle);
                self.add("flags", given.flags);
                self.add("address", given.start);
                self.add("length", given.length);
                self.add("access", names::access(given.access_flags));
            }
            CMD_ALLOC_MW => {
                (self.name, self.about) = ("alloc_mw", About::Writes("mw"));
                let given: AllocMw = self.core();
                self.add_text("pd", &self.object("pd", given.pd_handle));
                self.add("mw_type", given.mw_type);
            }
            CMD_CREATE_COMP_CHANNEL => {
                (self.name, self.about) = ("create_comp_channel", About::Writes("channel"));
            }
            CMD_RESIZE_CQ => {
                self.name = "resize_cq";
                let given: ResizeCq = self.core();
                self.uses("cq", given.cq_handle);
                self.add("cqe", given.cqe);
            }
            EX_MODIFY_CQ => {
                self.name = "modify_cq";
                let given: ExModifyCq = self.core();
                self.uses("cq", given.cq_handle);
                self.add("cq_count", given.attr.cq_count);
                self.add("cq_period", given.attr.cq_period);
            }
            CMD_MODIFY_QP => self.fill_modification(&self.core(), None),
            EX_MODIFY_QP => {
                let given: ExModifyQp = self.core();
                self.fill_modification(&given.base, Some(given.rate_limit));
            }
            CMD_QUERY_QP => {
                self.name = "query_qp";
                let given: QueryQp = self.core();
                self.uses("qp", given.qp_handle);
            }
            CMD_OPEN_QP => {
                (self.name, self.about) = ("open_qp", About::Writes("qp"));
                let given: OpenQp = self.core();
                self.add_text("xrcd", &self.object("xrcd", given.pd_handle));
                self.add("qp_num", given.qpn);
            }
            CMD_OPEN_XRCD => (self.name, self.about) = ("open_xrcd", About::Writes("xrcd")),
            CMD_MODIFY_SRQ => {
                self.name = "modify_srq";
                let given: ModifySrq = self.core();
                self.uses("srq", given.srq_handle);
                for (bit, name, value) in [
                    (1, "max_wr", given.max_wr),
                    (2, "srq_limit", given.srq_limit),
                ] {
                    if given.attr_mask & bit != 0 {
                        self.add(name, value);
                    }
                }
            }
            CMD_QUERY_SRQ => {
                self.name = "query_srq";
                let given: QuerySrq = self.core();
                self.uses("srq", given.srq_handle);
            }
            // By the kernel on rdma_rxe.
            CMD_REQ_NOTIFY_CQ => {
                self.name = "req_notify_cq";
                let given: ReqNotifyCq = self.core();
                self.uses("cq", given.cq_handle);
                self.add("solicited_only", given.solicited_only);
            }
            CMD_CREATE_AH => {
                (self.name, self.about) = ("create_ah", About::Writes("ah"));
                let given: CreateAh = self.core();
                self.add_text("pd", &self.object("pd", given.pd_handle));
                self.add("ah_attr", path_of_ah(&given.attr));
            }
            CMD_ATTACH_MCAST | CMD_DETACH_MCAST => {
                self.name = match command {
                    CMD_ATTACH_MCAST => "attach_mcast",
                    _ => "detach_mcast",
                };
                let given: AttachMcast = self.core();
                self.uses("qp", given.qp_handle);
                self.add_text("gid", &Ipv6Addr::from(given.gid).to_string());
                self.add("lid", given.mlid);
            }
            EX_MODIFY_WQ => {
                self.name = "modify_wq";
                let given: ExModifyWq = self.core();
                self.uses("wq", given.wq_handle);
                self.add("wq_state", given.wq_state);
            }
            EX_CREATE_WQ_TABLE => {
                self.name = "create_rwq_ind_table";
                self.about = About::Writes("rwq_ind_table");
            }
            EX_DESTROY_WQ_TABLE => {
                self.name = "destroy_rwq_ind_table";
                let given: ExDestroyRwqIndTable = self.core();
                self.destroys("rwq_ind_table", given.ind_tbl_handle);
            }
            EX_CREATE_FLOW => (self.name, self.about) = ("create_flow", About::Writes("flow")),
            EX_DESTROY_FLOW => {
                self.name = "destroy_flow";
                let given: DestroyFlow = self.core();
                self.destroys("flow", given.flow_handle);
            }
            _ => {
                self.name = "write_command";
                self.add("command", command);
            }
        }
    }

    fn fill_modification(&mut self, given: &ModifyQp, rate_limit: Option<u32>) {
        self.name = "modify_qp";
        self.uses("qp", given.qp_handle);
        let objects = lock(&self.recorder.objects);
        let known = objects.known.get(&(self.fd, given.qp_handle));
        self.queue_pair = known.and_then(|it| it.queue_pair);
        drop(objects);
        let mask = QpAttrMask::from_bits_retain(given.attr_mask);
        // `enum ibv_mtu` begins with 256 bytes.
        let mtu = 128_u32.checked_shl(given.path_mtu.into());
        let values: [(QpAttrMask, &str, String); 21] = [
            (QpAttrMask::STATE, "qp_state", names::state(given.qp_state)),
            (
                QpAttrMask::CUR_STATE,
                "cur_qp_state",
                names::state(given.cur_qp_state),
            ),
            (
                QpAttrMask::ACCESS_FLAGS,
                "qp_access_flags",
                names::access(given.qp_access_flags),
            ),
            (
                QpAttrMask::PKEY_INDEX,
                "pkey_index",
                given.pkey_index.to_string(),
            ),
            (QpAttrMask::PORT, "port_num", given.port_num.to_string()),
            (QpAttrMask::QKEY, "qkey", given.qkey.to_string()),
            (QpAttrMask::AV, "ah_attr", path_of(&given.dest)),
            (
                QpAttrMask::PATH_MTU,
                "path_mtu",
                mtu.unwrap_or_default().to_string(),
            ),
            (
                QpAttrMask::DEST_QPN,
                "dest_qp_num",
                given.dest_qp_num.to_string(),
            ),
            (QpAttrMask::RQ_PSN, "rq_psn", given.rq_psn.to_string()),
            (QpAttrMask::SQ_PSN, "sq_psn", given.sq_psn.to_string()),
            (QpAttrMask::TIMEOUT, "timeout", given.timeout.to_string()),
            (
                QpAttrMask::RETRY_CNT,
                "retry_cnt",
                given.retry_cnt.to_string(),
            ),
            (
                QpAttrMask::RNR_RETRY,
                "rnr_retry",
                given.rnr_retry.to_string(),
            ),
            (
                QpAttrMask::MIN_RNR_TIMER,
                "min_rnr_timer",
                given.min_rnr_timer.to_string(),
            ),
            (
                QpAttrMask::MAX_QP_RD_ATOMIC,
                "max_rd_atomic",
                given.max_rd_atomic.to_string(),
            ),
            (
                QpAttrMask::MAX_DEST_RD_ATOMIC,
                "max_dest_rd_atomic",
                given.max_dest_rd_atomic.to_string(),
            ),
            (
                QpAttrMask::EN_SQD_ASYNC_NOTIFY,
                "en_sqd_async_notify",
                given.en_sqd_async_notify.to_string(),
            ),
            (
                QpAttrMask::PATH_MIG_STATE,
                "path_mig_state",
                given.path_mig_state.to_string(),
            ),
            (
                QpAttrMask::ALT_PATH,
                "alt_ah_attr",
                path_of(&given.alt_dest),
            ),
            (
                QpAttrMask::RATE_LIMIT,
                "rate_limit",
                rate_limit.unwrap_or_default().to_string(),
            ),
        ];
        for (bit, name, value) in values {
            if mask.contains(bit) {
                self.add(name, value);
            }
        }
    }

    /// Records the call, given the error number of its command; 0 if it has succeeded.
    pub(crate) fn end(mut self, errno: c_int) -> Created {
        let took = self.began.elapsed().as_nanos();
        let scope = internal::enter();
        let mut created = Created::default();
        let mut result = Object::new();
        let object = match std::mem::replace(&mut self.about, About::Nothing) {
            About::Uses(name) => Some(name),
            About::Destroys(name, handle) => {
                if errno == 0 {
                    lock(&self.recorder.objects)
                        .known
                        .remove(&(self.fd, handle));
                }
                Some(name)
            }
            about @ (About::Creates(..) | About::Writes(_)) if errno == 0 => {
                if self.queue != 0 {
                    created.completion_queue = Some(self.queue);
                }
                self.request.read_attributes();
                self.created(&about, &mut result)
            }
            About::Creates(..) | About::Writes(_) | About::Nothing => None,
        };
        if self.name == "open_device" && errno == 0 {
            lock(&self.recorder.objects).forget(self.fd);
        }
        if self.name == "rereg_mr" && errno == 0 {
            if let Some(answer) = self.request.output::<ReregMrResp>(ATTR_CORE_OUT) {
                result = result.raw("lkey", answer.lkey).raw("rkey", answer.rkey);
            }
        }
        if self.name == "resize_cq" && errno == 0 {
            if let Some(answer) = self.request.output::<ResizeCqResp>(ATTR_CORE_OUT) {
                result = result.raw("cqe", answer.cqe);
            }
        }
        let device = {
            let devices = &mut lock(&self.recorder.objects).devices;
            let device = devices.entry(self.fd);
            device.or_insert_with(|| device_of(self.fd)).clone()
        };
        let mut line = Object::new()
            .text("type", "call")
            .raw("time", self.time)
            .raw("took", took)
            .raw("thread", thread())
            .text("call", self.name)
            .text("device", &device)
            .raw("context", self.fd);
        if let Some(object) = object {
            line = line.text("object", &object);
        }
        let line = line
            .raw("arguments", self.arguments.end())
            .raw("result", result.end())
            .raw("errno", errno);
        self.recorder.append(&[line.end()], true);
        drop(scope);
        if let (Some((number, user_handle)), 0) = (self.queue_pair, errno) {
            posts::hook_builders(self.fd, user_handle, number);
        }
        created
    }

    /// Notes a new object, and adds what the command has returned. Returns its name.
    fn created(&self, about: &About, result: &mut Object) -> Option<String> {
        let request = &self.request;
        let mut add = |name: &str, value: u32| {
            let before = std::mem::replace(result, Object::new());
            *result = before.raw(name, value);
        };
        let mut keys = |lkey: u32, rkey: u32| {
            add("lkey", lkey);
            add("rkey", rkey);
            format!("mr {lkey:#x}")
        };
        let mut queue_pair = None;
        let (handle, name) = match *about {
            About::Creates("qp", id) => {
                let number: u32 = request.output(ATTR_CREATE_QP_RESP_QP_NUM)?;
                if let Some(cap) = request.output::<[u32; 5]>(ATTR_CREATE_QP_RESP_CAP) {
                    let values = CAPACITY.iter().zip(cap);
                    values.for_each(|(name, value)| add(name, value));
                }
                let flags: u32 = request.input(ATTR_CREATE_QP_FLAGS).unwrap_or_default();
                let user_handle = request
                    .input(ATTR_CREATE_QP_USER_HANDLE)
                    .unwrap_or_default();
                queue_pair = Some((number, user_handle));
                let signals_all = flags & SIGNALS_ALL != 0;
                let mut objects = lock(&self.recorder.objects);
                objects.signals_all.insert((self.fd, number), signals_all);
                (request.handle(id)?, format!("qp {number:#x}"))
            }
            About::Creates("cq", id) => {
                let handle = request.handle(id)?;
                if let Some(cqe) = request.output::<u32>(ATTR_CREATE_CQ_RESP_CQE) {
                    add("cqe", cqe);
                }
                (handle, format!("cq {handle}"))
            }
            About::Creates("srq", id) => {
                let handle = request.handle(id)?;
                if let Some(entries) = request.output::<u32>(ATTR_CREATE_SRQ_RESP_MAX_WR) {
                    add("max_wr", entries);
                }
                (handle, format!("srq {handle}"))
            }
            About::Creates("mr", id) => {
                let ids = match request.method {
                    METHOD_REG_DMABUF_MR => {
                        [ATTR_REG_DMABUF_MR_RESP_LKEY, ATTR_REG_DMABUF_MR_RESP_RKEY]
                    }
                    METHOD_DM_MR_REG => [ATTR_REG_DM_MR_RESP_LKEY, ATTR_REG_DM_MR_RESP_RKEY],
                    _ => [ATTR_REG_MR_RESP_LKEY, ATTR_REG_MR_RESP_RKEY],
                };
                let [lkey, rkey] = ids.map(|id| request.output::<u32>(id).unwrap_or_default());
                (request.handle(id)?, keys(lkey, rkey))
            }
            About::Creates(kind, id) => {
                let handle = request.handle(id)?;
                (handle, format!("{kind} {handle}"))
            }
            About::Writes("mr") => {
                let answer: RegMrResp = request.output(ATTR_CORE_OUT)?;
                (answer.mr_handle, keys(answer.lkey, answer.rkey))
            }
            About::Writes("mw") => {
                let answer: AllocMwResp = request.output(ATTR_CORE_OUT)?;
                add("rkey", answer.rkey);
                (answer.mw_handle, format!("mw {:#x}", answer.rkey))
            }
            About::Writes("qp") => {
                let answer: CreateQpResp = request.output(ATTR_CORE_OUT)?;
                let user_handle = self.core::<OpenQp>().user_handle;
                queue_pair = Some((answer.qpn, user_handle));
                (answer.qp_handle, format!("qp {:#x}", answer.qpn))
            }
            About::Writes(kind) => {
                // The handle is the first member of the answer, or follows its mask and length.
                let at = match kind {
                    "flow" => std::mem::offset_of!(CreateFlowResp, flow_handle),
                    "rwq_ind_table" => {
                        std::mem::offset_of!(ExCreateRwqIndTableResp, ind_tbl_handle)
                    }
                    "pd" => std::mem::offset_of!(AllocPdResp, pd_handle),
                    "ah" => std::mem::offset_of!(CreateAhResp, ah_handle),
                    "xrcd" => std::mem::offset_of!(OpenXrcdResp, xrcd_handle),
                    _ => 0,
                };
                let words: [u32; 3] = request.output(ATTR_CORE_OUT)?;
                let handle = *words.get(at / size_of::<u32>())?;
                (handle, format!("{kind} {handle}"))
            }
            _ => return None,
        };
        let known = Known {
            name: name.clone(),
            queue_pair,
        };
        let mut objects = lock(&self.recorder.objects);
        objects.known.insert((self.fd, handle), known);
        Some(name)
    }
}

/// Names of [`QpCap`]'s members, in the kernel's order.
const CAPACITY: [&str; 5] = [
    "max_send_wr",
    "max_recv_wr",
    "max_send_sge",
    "max_recv_sge",
    "max_inline_data",
];
const _: () = assert!(size_of::<QpCap>() == 20);

/// Returns a path as an `ibv_ah_attr` in JSON.
fn path_of(path: &QpDest) -> String {
    let object = Object::new()
        .raw("is_global", path.is_global)
        .raw("dlid", path.dlid)
        .raw("sl", path.sl)
        .raw("port_num", path.port_num);
    let object = match path.is_global {
        0 => object,
        _ => object
            .text("dgid", &Ipv6Addr::from(path.dgid).to_string())
            .raw("sgid_index", path.sgid_index)
            .raw("hop_limit", path.hop_limit)
            .raw("traffic_class", path.traffic_class)
            .raw("flow_label", path.flow_label),
    };
    object.end()
}

/// As above, of an address handle.
fn path_of_ah(path: &AhAttr) -> String {
    path_of(&QpDest {
        dgid: path.grh.dgid,
        flow_label: path.grh.flow_label,
        dlid: path.dlid,
        sgid_index: path.grh.sgid_index,
        hop_limit: path.grh.hop_limit,
        traffic_class: path.grh.traffic_class,
        sl: path.sl,
        src_path_bits: path.src_path_bits,
        static_rate: path.static_rate,
        is_global: path.is_global,
        port_num: path.port_num,
        ..QpDest::default()
    })
}

/// Called when the program closes a descriptor: records the end of a context.
#[inline]
pub(crate) fn closed(fd: RawFd) {
    if super::is_on() {
        note_closed(fd);
    }
}

#[cold]
fn note_closed(fd: RawFd) {
    if internal::is_internal() {
        return;
    }
    let Some(recorder) = current() else { return };
    let _scope = internal::enter();
    let mut objects = lock(&recorder.objects);
    let Some(device) = objects.devices.get(&fd).cloned() else {
        return;
    };
    objects.forget(fd);
    drop(objects);
    let line = Object::new()
        .text("type", "call")
        .raw("time", now())
        .raw("took", 0)
        .raw("thread", thread())
        .text("call", "close_device")
        .text("device", &device)
        .raw("context", fd)
        .raw("arguments", "{}")
        .raw("result", "{}")
        .raw("errno", 0);
    recorder.append(&[line.end()], true);
}
