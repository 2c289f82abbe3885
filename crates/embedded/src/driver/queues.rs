//! Creation of queue pairs with queues of their own, and what all queues share: their memory,
//! and checks of their sizes.

use std::mem::offset_of;
use std::ops::Deref;
use std::os::fd::RawFd;

use mlx5_abi::{
    CreateQp, CreateQpResp, DciStreams, QP_FLAG_ALLOW_SCATTER_CQE, QP_FLAG_DCI_STREAM,
    QP_FLAG_SCATTER_CQE, QP_FLAG_TIR_ALLOW_SELF_LB_MC, QP_FLAG_TIR_ALLOW_SELF_LB_UC,
    QP_FLAG_TYPE_DCI, QP_FLAG_TYPE_DCT, QP_FLAG_UAR_PAGE_INDEX,
};
use softhca::command::opcode as op;
use softhca::layout::qpc::{rq_type, scatter, st};
use softhca::layout::{PAGE_LIST, qpc, rmpc};
use softhca::rule::Rule;
use uverbs::abi::ids::*;
use uverbs::abi::verbs::QpCap;
use uverbs::{QpCreateFlags, QpType};

use crate::driver::cause::{
    Result, at_most, between, invalid, is, known_bits, memory, require, require_support,
    supported_bits, unsupported,
};
use crate::driver::command::{Input, make};
use crate::driver::event::EventCounter;
use crate::driver::object::{Events, MemoryRange, Object, Qp, SrqKind};
use crate::driver::request::Request;
use crate::driver::state::State;
use crate::user::{Access, fault_in};

/// Bytes of a queue's doorbell records.
const RECORDS: u64 = 8;

/// `MLX5_IB_INVALID_BFREG`: in answers, the register is one of such a UAR.
pub(crate) const NO_REGISTER: u32 = 1 << 31;
const FLAGS_OF_DC: u32 = QP_FLAG_TYPE_DCT | QP_FLAG_TYPE_DCI;
const DCI: u64 = QP_FLAG_TYPE_DCI as u64;
/// A queue pair receives no multicasts of its own.
const BLOCK_MULTICAST: u32 = QpCreateFlags::BLOCK_MULTICAST_LOOPBACK.bits();
/// Binary logarithm of the largest number of streams of an initiator, and of those in error.
pub(crate) const LOG_MAX_STREAMS: u8 = 6;
/// A raw packet queue pair receives unicast and multicast frames of its own context.
pub(crate) const FLAGS_OF_LOOPBACK: u32 =
    QP_FLAG_TIR_ALLOW_SELF_LB_UC | QP_FLAG_TIR_ALLOW_SELF_LB_MC;
/// The user index that means none; valid ones are smaller.
pub(crate) const NO_USER_INDEX: u32 = 0xff_ffff;
/// `IB_UVERBS_QP_CREATE_SQ_SIG_ALL`.
pub(crate) const SIGNAL_ALL: u32 = 1 << 12;
/// Maximum number of blocks of a send queue and of entries of a receive queue;
/// logarithms of the size of a receive entry in bytes.
pub(crate) const MAX_QUEUE_ENTRIES: u32 = 1 << 15;
pub(crate) const LOG_STRIDES: std::ops::RangeInclusive<u32> = 4..=9;
pub(crate) const SEND_BLOCK: u64 = 64;

/// Offset of the work queue in commands on a receive memory pool, a receive queue or a send
/// queue.
pub(crate) const WQ: usize = rmpc::AT + rmpc::WQ;

/// Returns the creation flags of a queue pair.
///
/// # Errors
/// EINVAL for flags that are unknown, or that the type does not support.
pub(crate) fn create_flags(request: &Request, kind: QpType) -> Result<u32> {
    let raw = QpCreateFlags::SCATTER_FCS | QpCreateFlags::CVLAN_STRIPPING;
    let datagram = QpCreateFlags::BLOCK_MULTICAST_LOOPBACK | QpCreateFlags::PCI_WRITE_END_PADDING;
    let known = SIGNAL_ALL | (raw | datagram).bits();
    let flags = request.flags(ATTR_CREATE_QP_FLAGS, known)?;
    let allowed = match kind {
        QpType::UD => SIGNAL_ALL | datagram.bits(),
        QpType::RAW_PACKET => known,
        _ => SIGNAL_ALL,
    };
    known_bits("flags", flags, allowed.into())?;
    Ok(flags)
}

/// Returns the sizes for queries: with the actual number of receives, as mlx5_ib does.
pub(crate) fn queried_cap(cap: QpCap, receives: u32) -> [u32; 5] {
    zerocopy::transmute!(QpCap {
        max_recv_wr: receives,
        ..cap
    })
}

/// Returns whether a queue may have `count` blocks or entries.
pub(crate) fn is_queue_size(count: u32) -> bool {
    count.is_power_of_two() && count <= MAX_QUEUE_ENTRIES
}

/// Checks the number of blocks or entries of a queue.
pub(crate) fn check_queue_size(what: &'static str, count: u32) -> Result<()> {
    let rule = Rule::PowerOfTwo(MAX_QUEUE_ENTRIES.into());
    require(is_queue_size(count), what, count, rule)
}

/// Checks the number of entries of a receive queue and their size, as a logarithm.
pub(crate) fn check_receives(count: u32, shift: u32) -> Result<()> {
    check_queue_size("rq_wqe_count", count)?;
    let (least, most) = (*LOG_STRIDES.start(), *LOG_STRIDES.end());
    between("rq_wqe_shift", shift, (least.into(), most.into()))
}

/// Checks that the driver data have at least a length.
pub(crate) fn check_driver_length(request: &Request, least: usize) -> Result<()> {
    let length = request.driver_length();
    let rule = Rule::AtLeast(least as u64);
    require(length >= least, "length of the driver input", length, rule)
}

/// Checks a user index.
pub(crate) fn check_user_index(index: u32) -> Result<()> {
    at_most("uidx", index, u64::from(NO_USER_INDEX) - 1)
}

/// Faults in the memory of a queue.
fn fault_in_queue(address: u64, length: u64) -> Result<()> {
    let faulted_in = fault_in(address, length, Access::Write);
    faulted_in.map_err(memory("memory of the queue", address, Rule::Writable))
}

/// Refuses a command that has an attribute.
pub(crate) fn check_absent(request: &Request, ids: &[u16]) -> Result<()> {
    match ids.iter().find(|id| request.has(**id)) {
        Some(id) => invalid("attribute", *id, Rule::Absent),
        None => Ok(()),
    }
}

/// Refuses a queue pair whose number the program has chosen.
pub(crate) fn check_no_source(request: &Request) -> Result<()> {
    require_support(
        !request.has(ATTR_CREATE_QP_SOURCE_QPN),
        "attribute",
        ATTR_CREATE_QP_SOURCE_QPN,
        Rule::Absent,
    )
}

/// Addresses of a queue.
pub(crate) struct QueueAddresses {
    pub(crate) entries: u64,
    pub(crate) records: u64,
}

impl QueueAddresses {
    /// Returns the memory ranges of a queue of `bytes` bytes. The address of a queue without
    /// entries is ignored.
    ///
    /// # Errors
    /// EINVAL for records that are not at a multiple of eight.
    pub(crate) fn ranges(&self, bytes: u64) -> Result<Vec<MemoryRange>> {
        let mut ranges = vec![(self.records, RECORDS)];
        if bytes != 0 {
            ranges.insert(0, (self.entries, bytes));
        }
        let is_aligned = self.records % RECORDS == 0;
        require(
            is_aligned,
            "db_addr",
            self.records,
            Rule::MultipleOf(RECORDS),
        )?;
        Ok(ranges)
    }
}

/// Returns the loopback flags of a TIR ([`FLAGS_OF_LOOPBACK`]).
pub(crate) fn loopback_flags(driver_flags: u32) -> u32 {
    (driver_flags & FLAGS_OF_LOOPBACK) >> FLAGS_OF_LOOPBACK.trailing_zeros()
}

/// The driver data of a queue pair, validated.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QpDriver(CreateQp);

impl Deref for QpDriver {
    type Target = CreateQp;

    fn deref(&self) -> &CreateQp {
        &self.0
    }
}

impl QpDriver {
    pub(crate) fn new(request: &Request) -> Result<Self> {
        /// The first version of the structure.
        const MIN_LENGTH: usize = offset_of!(CreateQp, ece_options);
        const RESERVED: usize = offset_of!(CreateQp, reserved);
        check_driver_length(request, MIN_LENGTH)?;
        let is_known = request.driver_is_cleared(RESERVED);
        require(is_known, "reserved driver input", RESERVED, Rule::Zero)?;
        let driver: CreateQp = request.driver();
        let flags = driver.flags;
        let kind: u32 = request.constant(ATTR_CREATE_QP_TYPE)?;
        let allowed = match QpType(kind) {
            QpType::DRIVER if flags & QP_FLAG_TYPE_DCI != 0 => FLAGS_OF_DC | QP_FLAG_DCI_STREAM,
            QpType::DRIVER => FLAGS_OF_DC,
            QpType::RAW_PACKET => FLAGS_OF_LOOPBACK,
            _ => 0,
        };
        // Signatures are not supported.
        let known = QP_FLAG_SCATTER_CQE | QP_FLAG_ALLOW_SCATTER_CQE | QP_FLAG_UAR_PAGE_INDEX;
        known_bits("driver flags", flags, (known | allowed).into())?;
        check_user_index(driver.uidx)?;
        Ok(Self(driver))
    }

    /// Returns whether short messages are to be scattered into CQEs.
    pub(crate) fn scatters(&self) -> bool {
        self.flags & QP_FLAG_SCATTER_CQE != 0
    }

    /// Returns an initiator's streams.
    ///
    /// # Errors
    /// EINVAL for more than the device has.
    fn streams(&self) -> Result<Option<DciStreams>> {
        if self.flags & QP_FLAG_DCI_STREAM == 0 {
            return Ok(None);
        }
        let streams = self.dci_streams;
        let most = LOG_MAX_STREAMS.into();
        at_most("log_num_concurent", streams.log_num_concurent, most)?;
        at_most("log_num_errored", streams.log_num_errored, most)?;
        Ok(Some(streams))
    }

    /// Returns the UAR that the driver data name, if any.
    pub(crate) fn uar_page(&self) -> Option<u32> {
        (self.flags & QP_FLAG_UAR_PAGE_INDEX != 0).then_some(self.bfreg_index)
    }

    /// Returns the addresses of the queue, of raw packets those of its receives.
    pub(crate) fn addresses(&self) -> QueueAddresses {
        QueueAddresses {
            entries: self.buf_addr,
            records: self.db_addr,
        }
    }
}

/// A command that creates a queue pair with queues of its own.
struct QpRequest {
    /// Service, as the device encodes it.
    service: u32,
    is_initiator: bool,
    /// Handles of the objects that it uses.
    pd: u32,
    send_cq: u32,
    recv_cq: Option<u32>,
    srq: Option<u32>,
    create: u32,
    driver: QpDriver,
    streams: Option<DciStreams>,
    uar: u32,
    cap: QpCap,
}

impl QpRequest {
    fn signals_all(&self) -> bool {
        self.create & SIGNAL_ALL != 0
    }

    fn received_bytes(&self) -> u64 {
        u64::from(self.driver.rq_wqe_count) << self.driver.rq_wqe_shift
    }

    /// Returns the length of the queues' memory.
    fn bytes(&self) -> u64 {
        self.received_bytes() + u64::from(self.driver.sq_wqe_count) * SEND_BLOCK
    }

    fn dependencies(&self) -> Vec<u32> {
        let needed = [Some(self.pd), Some(self.send_cq), self.recv_cq, self.srq];
        needed.into_iter().flatten().collect()
    }
}

impl State {
    /// Creates a queue in the device, and grants access to the queue's memory.
    ///
    /// # Safety
    /// The memory must be valid for the queue until the queue is destroyed.
    pub(crate) unsafe fn create_with_memory(
        &mut self,
        ranges: &[MemoryRange],
        input: &Input,
    ) -> Result<u32> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.grant_memory(ranges) }?;
        let created = make(&mut self.hca, input);
        if created.is_err() {
            for (address, length) in ranges.iter().copied() {
                self.hca.platform_mut().revoke(address, length);
            }
        }
        created
    }

    /// Grants the device access to the memory of a queue.
    ///
    /// # Safety
    /// As for [`State::create_with_memory`].
    pub(crate) unsafe fn grant_memory(&mut self, ranges: &[MemoryRange]) -> Result<()> {
        for (address, length) in ranges.iter().copied() {
            fault_in_queue(address, length)?;
        }
        for (address, length) in ranges.iter().copied() {
            // SAFETY: guaranteed by the caller.
            unsafe { self.hca.platform_mut().grant(address, length) };
        }
        Ok(())
    }

    pub(crate) fn events(&self, request: &Request, user_handle: u64, id: u16) -> Events {
        Events {
            user_handle,
            file: self.event_file(request, id),
            reported: EventCounter::default(),
        }
    }

    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn create_qp(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let kind: u32 = request.constant(ATTR_CREATE_QP_TYPE)?;
        let service = match QpType(kind) {
            QpType::RC => st::RC,
            QpType::UC => st::UC,
            QpType::UD => st::UD,
            QpType::XRC_INI => st::XRC,
            QpType::XRC_TGT => return self.create_target(fd, request),
            QpType::DRIVER => match request.driver::<CreateQp>().flags & FLAGS_OF_DC {
                QP_FLAG_TYPE_DCT => return self.create_dc_target(fd, request),
                QP_FLAG_TYPE_DCI => st::DCI,
                flags => return unsupported("driver flags", flags, Rule::Contains(DCI)),
            },
            // SAFETY: guaranteed by the caller.
            QpType::RAW_PACKET => return unsafe { self.create_packet_qp(fd, request) },
            _ => return invalid("qp_type", kind, Rule::Supported),
        };
        let parsed = self.parse_qp(fd, request, (QpType(kind), service))?;
        self.check_qp(fd, &parsed)?;
        let user_handle = request.value(ATTR_CREATE_QP_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_QP_EVENT_FD);
        let input = self.encode_qp(fd, &parsed)?;
        let addresses = parsed.driver.addresses();
        let ranges = addresses.ranges(parsed.bytes())?;
        // SAFETY: guaranteed by the caller.
        let number = unsafe { self.create_with_memory(&ranges, &input) }?;
        // SAFETY: as in `create_cq`.
        unsafe { self.watch.add_queue(number, addresses.records) };
        let register = self.register(fd, parsed.driver.uar_page())?;
        let qp = Qp {
            cap: queried_cap(parsed.cap, parsed.driver.rq_wqe_count),
            signal_all: parsed.signals_all(),
            send_blocks: parsed.driver.sq_wqe_count,
            register,
            shared_queue: parsed.srq,
            receive_queue: self.receive_queue(fd, &parsed)?,
            ..Qp::without_queues(number, QpType(kind), events)
        };
        let object = Object::new(fd, qp)
            .using(parsed.dependencies())
            .with_memory(ranges);
        let answer = CreateQpResp {
            bfreg_index: register.unwrap_or(NO_REGISTER),
            ..CreateQpResp::default()
        };
        let cap = zerocopy::transmute!(parsed.cap);
        self.add_qp(request, object, number, cap, answer);
        Ok(())
    }

    /// Returns the user handle of the completion queue that a new queue pair's receives complete
    /// into, if it is the one that the queue pair names.
    fn receive_queue(&self, fd: RawFd, parsed: &QpRequest) -> Result<Option<u64>> {
        let shared = parsed
            .srq
            .map(|srq| self.objects.srq(fd, srq))
            .transpose()?;
        let has_another = shared.is_some_and(|it| it.kind != SrqKind::Basic);
        let Some(cq) = parsed.recv_cq.filter(|_| !has_another) else {
            return Ok(None);
        };
        Ok(Some(self.objects.cq(fd, cq)?.events.user_handle))
    }

    /// Reads the attributes of a new queue pair with queues of its own, and resolves what
    /// they name.
    fn parse_qp(
        &self,
        fd: RawFd,
        request: &Request,
        (kind, service): (QpType, u32),
    ) -> Result<QpRequest> {
        // Initiators of XRC and of dynamic connections have no receives.
        let is_initiator = [st::XRC, st::DCI].contains(&service);
        let srq = match service {
            // UCX names one; it stays unused.
            st::DCI => None,
            _ => request.optional_handle(ATTR_CREATE_QP_SRQ_HANDLE),
        };
        check_absent(request, &[ATTR_CREATE_QP_XRCD_HANDLE])?;
        if is_initiator && srq.is_some() {
            return invalid("attribute", ATTR_CREATE_QP_SRQ_HANDLE, Rule::Absent);
        }
        let pd = request.handle(ATTR_CREATE_QP_PD_HANDLE)?;
        let send_cq = request.handle(ATTR_CREATE_QP_SEND_CQ_HANDLE)?;
        let recv_cq = match is_initiator {
            true => None,
            false => Some(request.handle(ATTR_CREATE_QP_RECV_CQ_HANDLE)?),
        };
        let create = create_flags(request, kind)?;
        if let Some(srq) = srq {
            let is_of_xrc = self.objects.srq(fd, srq)?.kind == SrqKind::Xrc;
            let rule = Rule::OfType("basic SRQ, or one with tags");
            require(!is_of_xrc, "handle", srq, rule)?;
        }
        let driver = QpDriver::new(request)?;
        supported_bits("flags", create, (SIGNAL_ALL | BLOCK_MULTICAST).into())?;
        check_no_source(request)?;
        let streams = driver.streams()?;
        let uar = match driver.uar_page() {
            Some(uar) => self.check_uar(fd, uar)?,
            None => self.default_uar(fd)?,
        };
        Ok(QpRequest {
            service,
            is_initiator,
            pd,
            send_cq,
            recv_cq,
            srq,
            create,
            driver,
            streams,
            uar,
            cap: request.value(ATTR_CREATE_QP_CAP)?,
        })
    }

    /// Checks the sizes of a new queue pair, and its completion queues.
    fn check_qp(&self, fd: RawFd, parsed: &QpRequest) -> Result<()> {
        let QpRequest { driver, cap, .. } = parsed;
        let (blocks, receives) = (driver.sq_wqe_count, driver.rq_wqe_count);
        at_most("max_recv_wr", cap.max_recv_wr, MAX_QUEUE_ENTRIES.into())?;
        // Receives come from the queue pair's own queue or from an SRQ; an XRC initiator has
        // neither.
        let has_own_queue = !parsed.is_initiator && parsed.srq.is_none() && cap.max_recv_wr != 0;
        if has_own_queue {
            check_receives(receives, driver.rq_wqe_shift)?;
        } else {
            is("rq_wqe_count", receives, 0)?;
            is("rq_wqe_shift", driver.rq_wqe_shift, 0)?;
        }
        if blocks != 0 {
            check_queue_size("sq_wqe_count", blocks)?;
        }
        for cq in [Some(parsed.send_cq), parsed.recv_cq].into_iter().flatten() {
            let has_real_time = self.objects.cq(fd, cq)?.real_time;
            let rule = Rule::Without("wall clock time");
            require_support(!has_real_time, "completion queue", cq, rule)?;
        }
        let received = parsed.received_bytes();
        let is_aligned = received % SEND_BLOCK == 0;
        require(
            is_aligned,
            "bytes of receives",
            received,
            Rule::MultipleOf(SEND_BLOCK),
        )?;
        // The kernel lets the device reject entries at address 0.
        let has_address = parsed.bytes() == 0 || driver.buf_addr != 0;
        require(has_address, "buf_addr", driver.buf_addr, Rule::NonZero)
    }

    /// Encodes the command that creates a queue pair.
    fn encode_qp(&self, fd: RawFd, parsed: &QpRequest) -> Result<Input> {
        let QpRequest {
            service, driver, ..
        } = parsed;
        let (blocks, receives) = (driver.sq_wqe_count, driver.rq_wqe_count);
        let addresses = driver.addresses();
        let mut input = Input::new(op::CREATE_QP, PAGE_LIST + 8)
            .by(self.uid(fd))
            .fields(
                qpc::AT,
                [
                    (qpc::ST, *service),
                    (
                        qpc::BLOCK_LB_MC,
                        u32::from(parsed.create & BLOCK_MULTICAST != 0),
                    ),
                    (qpc::PD, self.objects.pd(fd, parsed.pd)?),
                    (qpc::UAR_PAGE, parsed.uar),
                    (qpc::USER_INDEX, driver.uidx),
                    (qpc::CQN_SND, self.objects.cq(fd, parsed.send_cq)?.number),
                ],
            )
            .long(qpc::AT + qpc::DBR_ADDR, addresses.records)
            .pages(
                (qpc::LOG_PAGE_SIZE.at(qpc::AT), qpc::PAGE_OFFSET.at(qpc::AT)),
                (addresses.entries, parsed.bytes()),
            )?;
        if let Some(cq) = parsed.recv_cq {
            input = input.set(qpc::CQN_RCV.at(qpc::AT), self.objects.cq(fd, cq)?.number);
        }
        if let Some(streams) = parsed.streams {
            input = input.fields(
                qpc::AT,
                [
                    (
                        qpc::LOG_NUM_DCI_STREAM_CHANNELS,
                        streams.log_num_concurent.into(),
                    ),
                    (
                        qpc::LOG_NUM_DCI_ERRORED_STREAMS,
                        streams.log_num_errored.into(),
                    ),
                ],
            );
        }
        input = match blocks {
            0 => input.set(qpc::NO_SQ.at(qpc::AT), 1),
            _ => input.set(qpc::LOG_SQ_SIZE.at(qpc::AT), blocks.ilog2()),
        };
        input = match (parsed.srq, receives) {
            (Some(srq), _) => input
                .set(qpc::RQ_TYPE.at(qpc::AT), rq_type::SRQ)
                .set(qpc::SRQN.at(qpc::AT), self.objects.srq(fd, srq)?.number),
            (None, 0) => input.set(qpc::RQ_TYPE.at(qpc::AT), rq_type::ZERO_SIZE),
            (None, _) => input
                .set(qpc::LOG_RQ_SIZE.at(qpc::AT), receives.ilog2())
                .set(qpc::LOG_RQ_STRIDE.at(qpc::AT), driver.rq_wqe_shift - 4),
        };
        // Rendezvous data are transferred by queue pairs without a send queue.
        if let (Some(srq), 0) = (parsed.srq, blocks) {
            if self.objects.srq(fd, srq)?.kind == SrqKind::Tags {
                input = input.set(qpc::OFFLOAD_TYPE.at(qpc::AT), qpc::OFFLOAD_TYPE_RNDV);
            }
        }
        self.encode_scatter(fd, input, parsed)
    }

    /// Encodes whether data of short messages are scattered into CQEs.
    fn encode_scatter(&self, fd: RawFd, mut input: Input, parsed: &QpRequest) -> Result<Input> {
        let by_entry = |cq, narrow, wide| {
            let entry = self.objects.cq(fd, cq).map(|cq| cq.entry);
            entry.map(|entry| if entry == 128 { wide } else { narrow })
        };
        let scatter = parsed.driver.scatters();
        let is_connected = parsed.service != st::UD;
        if let Some(recv_cq) = parsed.recv_cq.filter(|_| scatter && is_connected) {
            let value = by_entry(recv_cq, scatter::RES_32, scatter::RES_64)?;
            input = input.set(qpc::CS_RES.at(qpc::AT), value);
        }
        // Data of a read are written to its CQE only if every send is
        // signalled, or the driver allows it explicitly; libmlx5 cannot read them
        // back on XRC.
        let allowed = parsed.signals_all() || parsed.driver.flags & QP_FLAG_ALLOW_SCATTER_CQE != 0;
        if scatter && parsed.service == st::RC && allowed {
            let value = by_entry(parsed.send_cq, scatter::REQ_32, scatter::REQ_64)?;
            input = input.set(qpc::CS_REQ.at(qpc::AT), value);
        }
        Ok(input)
    }

    /// Allocates a register for a queue pair that names no UAR.
    pub(crate) fn register(&mut self, fd: RawFd, named_uar: Option<u32>) -> Result<Option<u32>> {
        Ok(match named_uar {
            Some(_) => None,
            None => Some(self.context(fd)?.allocate_register()),
        })
    }

    /// Adds a queue pair, and answers with its handle, size and number, and the driver's
    /// answer.
    pub(crate) fn add_qp(
        &mut self,
        request: &mut Request,
        object: Object,
        number: u32,
        cap: [u32; 5],
        driver: CreateQpResp,
    ) {
        self.explanations().forget(number);
        let handle = self.objects.insert(object);
        request.set_handle(ATTR_CREATE_QP_HANDLE, handle);
        request.answer_struct(ATTR_CREATE_QP_RESP_CAP, &cap);
        request.answer(ATTR_CREATE_QP_RESP_QP_NUM, &number);
        request.driver_answer(&driver);
    }
}
