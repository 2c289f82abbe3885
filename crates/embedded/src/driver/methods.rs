//! Dispatch of commands, and commands on contexts, files and objects in general.

use std::mem::offset_of;
use std::os::fd::RawFd;
use std::sync::Arc;

use mlx5_abi::ids::*;
use mlx5_abi::{
    ALLOC_UCTX_DEVX, AllocUcontextReq, AllocUcontextResp, CLOCK_INFO_V1, INLINE_MODE_NONE,
    LIB_CAP_DYN_UAR, commands_with_driver_data, context_flag,
};
use softhca::command::opcode as op;
use softhca::platform::Clock;
use softhca::rule::Rule;
use uverbs::abi::ids::*;
use uverbs::abi::later::*;
use uverbs::abi::verbs::CORE_SUPPORT_OPTIONAL_MR_ACCESS;

use crate::driver::cause::{
    Class, Result, at_most, invalid, is, refuse, require, reserved, supported_bits, system,
    unsupported,
};
use crate::driver::command::{self, Input, NUMBER, make};
use crate::driver::event::{EventFile, FileKind};
use crate::driver::files::{ContextFile, File, PER_UAR, REGISTERS, UAR, UARS};
use crate::driver::object::Object;
use crate::driver::request::Request;
use crate::driver::spec::{self, Form};
use crate::driver::state::{State, VECTORS};

/// Maximum number of recorded queue pairs that were destroyed with sends outstanding.
const MAX_ABANDONED: usize = 64;

impl State {
    /// Executes a command.
    ///
    /// # Safety
    /// Addresses that the command or its driver data contain must be valid for
    /// what the command makes the device do with them, until its object is
    /// destroyed.
    pub(crate) unsafe fn execute(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let made = match self.files.get(&fd) {
            Some(File::Context(context)) => context.initialized,
            Some(File::Events(_)) => {
                return refuse(Class::NotADevice, "descriptor", fd, Rule::OfType("device"));
            }
            None => return refuse(Class::BadDescriptor, "descriptor", fd, Rule::Exists),
        };
        let method = (request.object, request.method);
        let Some(attributes) = spec::method(request.object, request.method) else {
            return unknown_method(request);
        };
        request.check(attributes, |form, data| self.check_object(fd, form, data))?;
        if method == (OBJECT_DEVICE, METHOD_GET_CONTEXT) {
            return self.get_context(fd, request);
        }
        require(made, "descriptor", fd, Rule::InState("with a context"))?;
        let done = match method {
            // SAFETY: guaranteed by the caller.
            (OBJECT_DEVICE, METHOD_INVOKE_WRITE) => unsafe { self.write(fd, request) },
            (OBJECT_DEVICE, METHOD_QUERY_CONTEXT) => {
                answer_context(request);
                let length = request.room(ATTR_QUERY_CONTEXT_RESP);
                let answer = driver_context(self.context(fd)?, length);
                request.answer(ATTR_QUERY_CONTEXT_RESP, &answer);
                Ok(())
            }
            (OBJECT_DEVICE, METHOD_QUERY_PORT) => self.query_port(request),
            (OBJECT_DEVICE, METHOD_QUERY_DRIVER_PORT) => Self::query_driver_port(request),
            (OBJECT_DEVICE, METHOD_QUERY_PORT_SPEED) => self.query_port_speed(request),
            (OBJECT_DEVICE, METHOD_QUERY_GID_TABLE) => self.query_gid_table(request),
            (OBJECT_DEVICE, METHOD_QUERY_GID_ENTRY) => self.query_gid_entry(request),
            (OBJECT_ASYNC_EVENT, METHOD_ASYNC_EVENT_ALLOC) => self.alloc_events(fd, request),
            // SAFETY: guaranteed by the caller.
            (OBJECT_CQ, METHOD_CQ_CREATE) => unsafe { self.create_cq(fd, request) },
            // SAFETY: guaranteed by the caller.
            (OBJECT_QP, METHOD_QP_CREATE) => unsafe { self.create_qp(fd, request) },
            // SAFETY: guaranteed by the caller.
            (OBJECT_SRQ, METHOD_SRQ_CREATE) => unsafe { self.create_srq(fd, request) },
            (OBJECT_MR, METHOD_QUERY_MR) => self.query_mr(fd, request),
            (OBJECT_MR, METHOD_ADVISE_MR) => self.advise_mr(request),
            (OBJECT_MR, METHOD_DM_MR_REG) => self.reg_dm_mr(fd, request),
            (OBJECT_MR, METHOD_REG_DMABUF_MR) => self.reg_dmabuf_mr(fd, request),
            (OBJECT_DM, METHOD_DM_ALLOC) => self.alloc_dm(fd, request),
            (OBJECT_DM, METHOD_DM_FREE) => self.remove(fd, request, ATTR_FREE_DM_HANDLE),
            (OBJECT_DM, METHOD_DM_QUERY) => self.query_dm(fd, request),
            // Operations that an access to a mapped address performs.
            (OBJECT_DM, METHOD_DM_MAP_OP) => {
                unsupported("method", METHOD_DM_MAP_OP, Rule::Supported)
            }
            (OBJECT_MR, METHOD_MR_DESTROY) => self.remove(fd, request, ATTR_DESTROY_MR_HANDLE),
            (OBJECT_MW, METHOD_MW_DESTROY) => self.remove(fd, request, ATTR_DESTROY_MW_HANDLE),
            (OBJECT_PD, METHOD_PD_DESTROY) => self.remove(fd, request, ATTR_DESTROY_PD_HANDLE),
            (OBJECT_AH, METHOD_AH_DESTROY) => self.remove(fd, request, ATTR_DESTROY_AH_HANDLE),
            (OBJECT_CQ, METHOD_CQ_DESTROY) => self.remove(fd, request, ATTR_DESTROY_CQ_HANDLE),
            (OBJECT_QP, METHOD_QP_DESTROY) => self.remove(fd, request, ATTR_DESTROY_QP_HANDLE),
            (OBJECT_SRQ, METHOD_SRQ_DESTROY) => self.remove(fd, request, ATTR_DESTROY_SRQ_HANDLE),
            (OBJECT_XRCD, METHOD_XRCD_DESTROY) => {
                self.remove(fd, request, ATTR_DESTROY_XRCD_HANDLE)
            }
            // SAFETY: guaranteed by the caller.
            (OBJECT_WQ, METHOD_WQ_CREATE) => unsafe { self.create_wq(fd, request) },
            (OBJECT_WQ, METHOD_WQ_DESTROY) => self.remove(fd, request, ATTR_DESTROY_WQ_HANDLE),
            (OBJECT_RWQ_IND_TBL, METHOD_RWQ_IND_TBL_DESTROY) => {
                self.remove(fd, request, ATTR_DESTROY_RWQ_IND_TBL_HANDLE)
            }
            (OBJECT_DEVX, METHOD_DEVX_OTHER) => self.devx_other(fd, request),
            (OBJECT_DEVX, METHOD_DEVX_QUERY_EQN) => self.devx_query_eqn(request),
            // Dynamic UARs without an object are not supported.
            (OBJECT_DEVX, METHOD_DEVX_QUERY_UAR) => {
                invalid("method", METHOD_DEVX_QUERY_UAR, Rule::Supported)
            }
            // SAFETY: guaranteed by the caller.
            (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_CREATE) => unsafe { self.devx_create(fd, request) },
            (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_QUERY) => self.devx_query(fd, request),
            (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_MODIFY) => self.devx_modify(fd, request),
            (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_DESTROY) => {
                self.remove(fd, request, ATTR_DEVX_OBJ_DESTROY_HANDLE)
            }
            // SAFETY: guaranteed by the caller.
            (OBJECT_DEVX_UMEM, METHOD_DEVX_UMEM_REG) => unsafe { self.register_umem(fd, request) },
            (OBJECT_DEVX_UMEM, METHOD_DEVX_UMEM_DEREG) => {
                self.remove(fd, request, ATTR_DEVX_UMEM_DEREG_HANDLE)
            }
            (OBJECT_DEVX, METHOD_DEVX_SUBSCRIBE_EVENT) => self.devx_subscribe(fd, request),
            (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_ASYNC_QUERY) => self.devx_query_async(fd, request),
            (OBJECT_DEVX_ASYNC_CMD_FD, METHOD_DEVX_CMD_FD_ALLOC) => {
                self.alloc_command_file(fd, request)
            }
            (OBJECT_DEVX_ASYNC_EVENT_FD, METHOD_DEVX_EVENT_FD_ALLOC) => {
                self.alloc_devx_events(fd, request)
            }
            (OBJECT_PD, METHOD_PD_QUERY) => {
                let number = self.objects.pd(fd, request.handle(ATTR_QUERY_PD_HANDLE)?)?;
                request.answer(ATTR_QUERY_PD_NUMBER, &number);
                Ok(())
            }
            (OBJECT_FLOW_MATCHER, METHOD_FLOW_MATCHER_CREATE) => self.create_matcher(fd, request),
            (OBJECT_FLOW_MATCHER, METHOD_FLOW_MATCHER_DESTROY) => {
                self.remove(fd, request, ATTR_FLOW_MATCHER_DESTROY_HANDLE)
            }
            (OBJECT_FLOW, METHOD_CREATE_FLOW) => self.create_matched_flow(fd, request),
            (OBJECT_FLOW, METHOD_DESTROY_FLOW) => {
                self.remove(fd, request, ATTR_DESTROY_FLOW_HANDLE)
            }
            (OBJECT_COUNTERS, METHOD_COUNTERS_CREATE) => self.create_counters(fd, request),
            (OBJECT_COUNTERS, METHOD_COUNTERS_READ) => self.read_counters(fd, request),
            (OBJECT_COUNTERS, METHOD_COUNTERS_DESTROY) => {
                self.remove(fd, request, ATTR_DESTROY_COUNTERS_HANDLE)
            }
            (OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_MODIFY_HEADER) => {
                self.create_header_change(fd, request)
            }
            // The device has no tunnels.
            (OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_REFORMAT) => {
                unsupported("method", METHOD_FLOW_ACTION_REFORMAT, Rule::Supported)
            }
            (OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_DESTROY) => {
                self.remove(fd, request, ATTR_DESTROY_FLOW_ACTION_HANDLE)
            }
            (OBJECT_UAR, METHOD_UAR_ALLOC) => self.alloc_uar(fd, request),
            (OBJECT_UAR, METHOD_UAR_DESTROY) => self.remove(fd, request, ATTR_DESTROY_UAR_HANDLE),
            _ => unknown_method(request),
        };
        // As in the kernel: driver output is marked written.
        done.inspect(|()| request.put(ATTR_UHW_OUT, &[]))
    }

    /// Returns the open device of a descriptor, if it is one.
    pub(crate) fn opened(&self, fd: RawFd) -> Option<&ContextFile> {
        match self.files.get(&fd) {
            Some(File::Context(context)) => Some(context),
            _ => None,
        }
    }

    /// Returns the open device of a descriptor.
    pub(crate) fn context(&mut self, fd: RawFd) -> Result<&mut ContextFile> {
        match self.files.get_mut(&fd) {
            Some(File::Context(context)) => Ok(context),
            _ => refuse(
                Class::BadDescriptor,
                "descriptor",
                fd,
                Rule::OfType("device"),
            ),
        }
    }

    /// Checks that an attribute names an object of this context and of the
    /// right type.
    fn check_object(&self, fd: RawFd, form: &Form, data: u64) -> Result<()> {
        match *form {
            Form::Object(kind) => {
                at_most("handle", data, i64::MAX as u64)?;
                let handle = handle_of(data)?;
                let found = self.objects.get(fd, handle)?.data.kind();
                let checked = is("type of the object", found, kind.into());
                checked.map_err(|error| error.of(handle))
            }
            Form::AnyObject => {
                let handle = handle_of(data)?;
                self.objects.get(fd, handle).map(drop)
            }
            Form::Fd(kind) => {
                let number = RawFd::try_from(data as i64)
                    .or_else(|_| invalid("descriptor", data, Rule::Known))?;
                let context = match self.files.get(&fd) {
                    Some(File::Context(context)) => context.id,
                    _ => return refuse(Class::BadDescriptor, "descriptor", fd, Rule::Exists),
                };
                match self.files.get(&number) {
                    Some(File::Events(events)) if events.matches(kind, context) => Ok(()),
                    _ => {
                        let rule = Rule::OfType("event file of the context");
                        refuse(Class::BadDescriptor, "descriptor", number, rule)
                    }
                }
            }
            _ => Ok(()),
        }
    }

    fn get_context(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        /// The first version of the structure.
        const FIRST: usize = offset_of!(AllocUcontextReq, flags);
        const MIN_LENGTH: usize = offset_of!(AllocUcontextReq, max_cqe_version);
        const MAX_REGISTERS: u32 = 512;
        let length = request.driver_length();
        require(
            length == FIRST || length >= MIN_LENGTH,
            "length of the driver input",
            length,
            Rule::AtLeast(MIN_LENGTH as u64),
        )?;
        let requested: AllocUcontextReq = request.driver();
        let flags = requested.flags;
        supported_bits("flags", flags, ALLOC_UCTX_DEVX.into())?;
        reserved("comp_mask", requested.comp_mask)?;
        reserved("reserved0", requested.reserved0)?;
        reserved("reserved1", requested.reserved1)?;
        reserved("reserved2", requested.reserved2)?;
        let registers = requested.total_num_bfregs;
        if registers > MAX_REGISTERS {
            let rule = Rule::AtMost(MAX_REGISTERS.into());
            return refuse(Class::NoMemory, "total_num_bfregs", registers, rule);
        }
        let registers = registers.next_multiple_of(PER_UAR);
        // The device supports only completions with user indices.
        let version = requested.max_cqe_version;
        require(version >= 1, "max_cqe_version", version, Rule::AtLeast(1))?;
        let low_latency = requested.num_low_latency_bfregs;
        require(
            low_latency < registers,
            "num_low_latency_bfregs",
            low_latency,
            Rule::AtMost(u64::from(registers).saturating_sub(1)),
        )?;
        let is_new = !self.context(fd)?.initialized;
        require(is_new, "descriptor", fd, Rule::InState("without a context"))?;
        let platform = self.hca.platform();
        let (cycles, nanoseconds) = (platform.now(), platform.wall_clock());
        self.context(fd)?.record_clock(cycles, nanoseconds)?;
        let (mut uid, mut uar) = (0, None);
        if flags & ALLOC_UCTX_DEVX != 0 {
            uid = make(&mut self.hca, &Input::new(op::CREATE_UCTX, 32))?;
            let made = make(&mut self.hca, &Input::new(op::ALLOC_UAR, 16).by(uid));
            if made.is_err() {
                command::run(&mut self.hca, &Input::about(op::DESTROY_UCTX, uid), 16)?;
            }
            uar = Some(made?);
        }
        let context = self.context(fd)?;
        context.set_initialized(requested.lib_caps & LIB_CAP_DYN_UAR != 0);
        (context.uid, context.uar) = (uid, uar);
        let answer = driver_context(context, request.room(ATTR_UHW_OUT));
        if !context.allocates_uars {
            let id = context.id;
            for uar in 0..UARS as usize {
                self.watch.add_uar(id, uar * UAR);
            }
        }
        request.driver_answer(&answer);
        answer_context(request);
        Ok(())
    }

    fn alloc_events(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let id = self.context(fd)?.id;
        let file = EventFile::new(FileKind::Async, id);
        let (events, number) = file.map_err(system("event file of context", id))?;
        let published = request.publish(number)?;
        let context = self.context(fd)?;
        if context.events.is_none() {
            context.events = Some(Arc::clone(&events));
        }
        self.files.insert(number, File::Events(events));
        request.set_handle(ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, published as u32);
        Ok(())
    }

    /// Returns the event file that an attribute names, if any.
    pub(crate) fn event_file(&self, request: &Request, id: u16) -> Option<Arc<EventFile>> {
        match self.files.get(&request.fd(id)?) {
            Some(File::Events(events)) => Some(Arc::clone(events)),
            _ => None,
        }
    }

    /// Destroys the object that an attribute names, if it is of the command's
    /// type.
    fn remove(&mut self, fd: RawFd, request: &mut Request, id: u16) -> Result<()> {
        let handle = request.handle(id)?;
        let object = self.destroy(fd, handle, request.object)?;
        object.data.report(request);
        Ok(())
    }

    /// Destroys an object. The device does not access the object's memory afterwards, since
    /// it does so only under the lock that the caller holds.
    pub(crate) fn destroy(&mut self, fd: RawFd, handle: u32, kind: u16) -> Result<Object> {
        let object = self.objects.unused(fd, handle, kind)?;
        if let Some(number) = object.data.send_queue() {
            // Doorbells that were not polled yet are not included.
            let unfinished = self.hca.outstanding_sends(number);
            if unfinished != 0 && self.abandoned.len() < MAX_ABANDONED {
                self.abandoned.push((number, unfinished));
            }
        }
        let Some(mut object) = self.objects.remove(handle) else {
            return refuse(Class::NotFound, "handle", handle, Rule::Exists);
        };
        if let Err(errno) = object.data.destroy(self) {
            self.objects.restore(handle, object);
            return Err(errno);
        }
        for (address, length) in object.ranges.iter().copied() {
            self.hca.platform_mut().revoke(address, length);
        }
        if let Some(events) = object.data.events() {
            let default = self.files.get(&fd).and_then(File::default_events);
            if let Some(file) = events.file.as_ref().or(default) {
                file.forget(&events.reported);
            }
        }
        object.data.release(self, fd, handle);
        Ok(object)
    }

    /// Destroys an object of the device.
    pub(crate) fn destroy_number(&mut self, opcode: u16, number: u32) -> Result<()> {
        let input = Input::new(opcode, 16).set(NUMBER, number);
        command::run(&mut self.hca, &input, 16).map(drop)
    }

    /// Destroys a context whose descriptor is being closed.
    pub(crate) fn close_context(&mut self, fd: RawFd) {
        self.destroy_all(fd);
        let Some(File::Context(context)) = self.files.remove(&fd) else {
            return;
        };
        self.watch.remove_context(context.id);
        let domain = (context.transport_domain)
            .map(|domain| Input::about(op::DEALLOC_TRANSPORT_DOMAIN, domain));
        let uar = (context.uar).map(|uar| Input::about(op::DEALLOC_UAR, uar));
        let user = (context.uid != 0).then(|| Input::about(op::DESTROY_UCTX, context.uid));
        for input in [domain, uar, user].into_iter().flatten() {
            // Logged on failure; the context's objects are destroyed either way.
            let _ = command::run(&mut self.hca, &input, 16);
        }
    }

    /// Destroys all objects of a context.
    pub(crate) fn destroy_all(&mut self, fd: RawFd) {
        loop {
            let before = self.objects.in_context(fd);
            for (handle, kind) in &before {
                self.leave_groups(fd, *handle);
                // Objects that others use are destroyed in a later iteration.
                let _ = self.destroy(fd, *handle, *kind);
            }
            let left = self.objects.in_context(fd).len();
            if left == 0 {
                return;
            }
            if left == before.len() {
                tracing::error!(
                    fd,
                    left,
                    "objects of a closed context could not be destroyed"
                );
                return;
            }
        }
    }
}

fn unknown_method(request: &Request) -> Result<()> {
    let method = u32::from(request.object) << 16 | u32::from(request.method);
    refuse(Class::Unknown, "object and method", method, Rule::Supported)
}

/// Returns the handle that an attribute contains.
fn handle_of(data: u64) -> Result<u32> {
    u32::try_from(data).or_else(|_| refuse(Class::NotFound, "handle", data, Rule::Exists))
}

/// Returns the driver's answer about a context; `room` is the size of the output buffer.
fn driver_context(context: &ContextFile, room: usize) -> AllocUcontextResp {
    const MAX_ENTRIES: u32 = 1 << 15;
    AllocUcontextResp {
        qp_tab_size: 1 << 17,
        bf_reg_size: 512,
        tot_bfregs: match context.allocates_uars {
            true => 0,
            false => REGISTERS,
        },
        cache_line_size: 64,
        max_sq_desc_sz: 1024,
        max_rq_desc_sz: 512,
        max_send_wqebb: MAX_ENTRIES,
        max_recv_wr: MAX_ENTRIES,
        max_srq_recv_wr: MAX_ENTRIES,
        num_ports: 1,
        comp_mask: context_flag::SQD2RTS | context_flag::MKEY_UPDATE_TAG,
        response_length: room.min(size_of::<AllocUcontextResp>()) as u32,
        cqe_version: 1,
        cmds_supp_uhw: commands_with_driver_data::QUERY_DEVICE
            | commands_with_driver_data::CREATE_AH,
        eth_min_inline: INLINE_MODE_NONE,
        clock_info_versions: CLOCK_INFO_V1,
        log_uar_size: UAR.ilog2(),
        num_uars_per_page: ContextFile::uars_per_page(),
        ..AllocUcontextResp::default()
    }
}

fn answer_context(request: &mut Request) {
    // Both commands have the same attributes.
    request.answer(ATTR_GET_CONTEXT_NUM_COMP_VECTORS, &VECTORS);
    let support = CORE_SUPPORT_OPTIONAL_MR_ACCESS;
    request.answer(ATTR_GET_CONTEXT_CORE_SUPPORT, &support);
}
