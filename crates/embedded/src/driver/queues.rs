//! Creation of queues (completion queues, queue pairs, shared receive queues),
//! and destruction of objects in the device.

use std::mem::offset_of;
use std::ops::Deref;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering;

use mlx5_abi::{
    CQ_FLAG_CQE_128B_PAD, CQ_FLAG_REAL_TIME_TS, CQ_FLAG_UAR_PAGE_INDEX, CreateCq, CreateCqResp,
    CreateQp, CreateQpResp, CreateSrq, CreateSrqResp, DciStreams, QP_FLAG_ALLOW_SCATTER_CQE,
    QP_FLAG_DCI_STREAM, QP_FLAG_SCATTER_CQE, QP_FLAG_TIR_ALLOW_SELF_LB_MC,
    QP_FLAG_TIR_ALLOW_SELF_LB_UC, QP_FLAG_TYPE_DCI, QP_FLAG_TYPE_DCT, QP_FLAG_UAR_PAGE_INDEX,
    SRQ_FLAG_SIGNATURE, mini_format,
};
use roce::bits::Field;
use softhca::command::opcode as op;
use softhca::layout::qpc::{rq_type, scatter, st};
use softhca::layout::{PAGE_LIST, arm_rq, cqc, header, qpc, rmpc, rqc, wq, xrc_srqc, xrqc};
use uverbs::abi::ids::*;
use uverbs::abi::verbs::QpCap;
use uverbs::abi::write::{DestroyCqResp, ResizeCq, ResizeCqResp};
use uverbs::{QpCreateFlags, QpType};

use crate::driver::command::{Input, NUMBER, make, run};
use crate::driver::event::EventCounter;
use crate::driver::object::{
    Cq, Created, Events, MemoryRange, Object, ObjectData, Qp, Srq, SrqKind, Summary,
};
use crate::driver::request::Request;
use crate::driver::state::{State, VECTORS};
use crate::user::{Access, pin};
use crate::{Result, refuse};

/// Bytes of a queue's doorbell records.
const RECORDS: u64 = 8;

/// Maximum number of entries of a completion queue, as a logarithm.
const MAX_LOG_CQ_SIZE: u32 = 22;

/// `MLX5_IB_INVALID_BFREG`: in answers, the register is one of such a UAR.
pub(crate) const NO_REGISTER: u32 = 1 << 31;
const FLAGS_OF_DC: u32 = QP_FLAG_TYPE_DCT | QP_FLAG_TYPE_DCI;
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

/// Maximum number of tags in the list of a shared receive queue.
pub(crate) const MAX_TAGS: u32 = 127;
/// Values of `ib_uverbs_srq_type`.
const SRQ_BASIC: u64 = 0;
const SRQ_XRC: u64 = 1;
const SRQ_TAGS: u64 = 2;
/// Bytes of the header of an entry, and of each element of its list.
const SEGMENT: u32 = 16;

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
    require(flags & !allowed == 0)?;
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

pub(crate) fn require(condition: bool) -> Result<()> {
    if condition {
        Ok(())
    } else {
        refuse(libc::EINVAL)
    }
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
        require(self.records % RECORDS == 0)?;
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
        require(request.driver_length() >= MIN_LENGTH && request.driver_is_cleared(RESERVED))?;
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
        require(flags & !(known | allowed) == 0)?;
        require(driver.uidx < NO_USER_INDEX)?;
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
        let logs = [streams.log_num_concurent, streams.log_num_errored];
        require(logs.iter().all(|log| *log <= LOG_MAX_STREAMS))?;
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

impl ObjectData for Cq {
    fn kind(&self) -> u16 {
        OBJECT_CQ
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "completion queue",
            number: self.number,
            length: 0,
        }
    }

    fn number(&self) -> Option<u32> {
        Some(self.number)
    }

    fn events(&self) -> Option<&Events> {
        Some(&self.events)
    }

    fn represents(&self, object: Created) -> bool {
        object == Created::new(op::CREATE_CQ, self.number)
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DESTROY_CQ, self.number)?;
        state.watch.remove_arm(self.number);
        Ok(())
    }

    fn release(&self, _: &mut State, _: RawFd, _: u32) {
        if let Some(channel) = &self.channel {
            channel.forget(&self.completions);
        }
    }

    fn report(&self, request: &mut Request) {
        let counts = DestroyCqResp {
            comp_events_reported: self.completions.load(Ordering::Relaxed),
            async_events_reported: self.events.reported.load(Ordering::Relaxed),
        };
        request.answer(ATTR_DESTROY_CQ_RESP, &counts);
    }
}

impl ObjectData for Srq {
    fn kind(&self) -> u16 {
        OBJECT_SRQ
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "shared receive queue",
            number: self.number,
            length: 0,
        }
    }

    fn number(&self) -> Option<u32> {
        Some(self.number)
    }

    fn events(&self) -> Option<&Events> {
        Some(&self.events)
    }

    fn represents(&self, object: Created) -> bool {
        object == Created::new(self.kind.create_opcode(), self.number)
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(self.kind.destroy_opcode(), self.number)
    }

    fn report(&self, request: &mut Request) {
        self.events.report(request, ATTR_DESTROY_SRQ_RESP);
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
            pin(address, length, Access::Write)?;
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
    pub(crate) unsafe fn create_cq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        /// The first version of the structure.
        const MIN_LENGTH: usize = offset_of!(CreateCq, flags);
        const KNOWN: u16 = CQ_FLAG_CQE_128B_PAD | CQ_FLAG_UAR_PAGE_INDEX | CQ_FLAG_REAL_TIME_TS;
        /// The answer ends with the number.
        const ANSWER: usize = offset_of!(CreateCqResp, reserved);
        const TIMESTAMPS: u32 = 1 << 0;
        const IGNORE_OVERRUN: u32 = 1 << 1;
        require(request.driver_length() >= MIN_LENGTH)?;
        request.check_driver_output(ANSWER)?;
        let driver: CreateCq = request.driver();
        let (entry, flags) = (driver.cqe_size, driver.flags);
        let reserved = (driver.reserved0, driver.reserved1);
        require(flags & !KNOWN == 0 && matches!(entry, 64 | 128) && reserved == (0, 0))?;
        let uar = match flags & CQ_FLAG_UAR_PAGE_INDEX != 0 {
            true => self.check_uar(fd, driver.uar_page_index.into())?,
            false => self.default_uar(fd)?,
        };
        let compressed = driver.cqe_comp_en == 1;
        let format = match driver.cqe_comp_res_format {
            _ if !compressed => 0,
            mini_format::HASH => 0,
            mini_format::CSUM => 1,
            mini_format::CSUM_STRIDX => return refuse(libc::EOPNOTSUPP),
            _ => return refuse(libc::EINVAL),
        };
        let real_time = flags & CQ_FLAG_REAL_TIME_TS != 0;
        let entry_size = match (entry, flags & CQ_FLAG_CQE_128B_PAD != 0) {
            (64, false) => 0,
            (128, false) => 1,
            (128, true) => 2,
            _ => return refuse(libc::EOPNOTSUPP),
        };
        let vector: u32 = request.value(ATTR_CREATE_CQ_COMP_VECTOR)?;
        require(vector < VECTORS)?;
        // As in the driver: one more than requested, rounded up to a power of
        // two.
        let requested: u32 = request.value(ATTR_CREATE_CQ_CQE)?;
        require((1..1 << MAX_LOG_CQ_SIZE).contains(&requested))?;
        let log_size = (requested + 1).next_power_of_two().ilog2();
        let flags = request.flags(ATTR_CREATE_CQ_FLAGS, TIMESTAMPS | IGNORE_OVERRUN)?;
        let channel = self.event_file(request, ATTR_CREATE_CQ_COMP_CHANNEL);
        let user_handle = request.value(ATTR_CREATE_CQ_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_CQ_EVENT_FD);
        let addresses = QueueAddresses {
            entries: driver.buf_addr,
            records: driver.db_addr,
        };
        let bytes = u64::from(entry) << log_size;
        let input = Input::new(op::CREATE_CQ, PAGE_LIST + 8)
            .by(self.uid(fd))
            .fields(
                cqc::AT,
                [
                    (cqc::CQE_SZ, entry_size),
                    (cqc::OI, u32::from(flags & IGNORE_OVERRUN != 0)),
                    (cqc::CQE_COMPRESSION_EN, compressed.into()),
                    (cqc::MINI_CQE_RES_FORMAT, format),
                    (cqc::LOG_CQ_SIZE, log_size),
                    (cqc::UAR_PAGE, uar),
                    (cqc::C_EQN, self.event_queue(vector)),
                ],
            )
            .long(cqc::AT + cqc::DBR_ADDR, addresses.records)
            .pages(
                (cqc::LOG_PAGE_SIZE.at(cqc::AT), cqc::PAGE_OFFSET.at(cqc::AT)),
                (addresses.entries, bytes),
            )?;
        let ranges = addresses.ranges(bytes)?;
        // SAFETY: guaranteed by the caller.
        let number = unsafe { self.create_with_memory(&ranges, &input) }?;
        // SAFETY: the doorbell records stay valid until the queue is destroyed,
        // which also ends watching them.
        unsafe { self.watch.add_arm(number, addresses.records) };
        let cq = Cq {
            number,
            cqe: (1 << log_size) - 1,
            entry,
            entry_size,
            real_time,
            channel,
            completions: EventCounter::default(),
            events,
        };
        let handle = self.objects.insert(Object::new(fd, cq).with_memory(ranges));
        request.queue_created(user_handle);
        request.set_handle(ATTR_CREATE_CQ_HANDLE, handle);
        request.answer(ATTR_CREATE_CQ_RESP_CQE, &((1u32 << log_size) - 1));
        let answer = CreateCqResp {
            cqn: number,
            reserved: 0,
        };
        request.driver_answer_until(&answer, ANSWER);
        Ok(())
    }

    /// Moves the completion queue to another buffer.
    ///
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn resize_cq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: ResizeCq = request.core()?;
        let cq = self.objects.cq(fd, requested.cq_handle)?;
        require((1..1 << MAX_LOG_CQ_SIZE).contains(&requested.cqe))?;
        let log_size = (requested.cqe + 1).next_power_of_two().ilog2();
        let cqe = (1 << log_size) - 1;
        if cqe != cq.cqe {
            let driver: mlx5_abi::ResizeCq = request.driver();
            let entries = driver.buf_addr;
            match request.driver_length() {
                0 => return refuse(libc::EFAULT),
                length => require(length >= size_of_val(&driver))?,
            }
            let (number, entry, entry_size) = (cq.number, cq.entry, cq.entry_size);
            // The size of an entry must not change.
            let reserved = (driver.reserved0, driver.reserved1);
            require(driver.cqe_size == entry as u16 && reserved == (0, 0))?;
            let bytes = u64::from(entry) << log_size;
            let input = Input::new(op::MODIFY_CQ, PAGE_LIST + 8)
                .set(header::OP_MOD, cqc::OP_MOD_RESIZE)
                .set(NUMBER, number)
                .fields(
                    cqc::AT,
                    [(cqc::CQE_SZ, entry_size), (cqc::LOG_CQ_SIZE, log_size)],
                )
                .pages(
                    (cqc::LOG_PAGE_SIZE.at(cqc::AT), cqc::PAGE_OFFSET.at(cqc::AT)),
                    (entries, bytes),
                )?;
            // SAFETY: guaranteed by the caller.
            unsafe { self.create_with_memory(&[(entries, bytes)], &input) }?;
            if let Some(old) = self
                .objects
                .replace_memory(requested.cq_handle, (entries, bytes))
            {
                self.hca.platform_mut().revoke(old.0, old.1);
            }
            self.objects.cq_mut(fd, requested.cq_handle)?.cqe = cqe;
        }
        request.core_answer(&ResizeCqResp { cqe, reserved: 0 });
        Ok(())
    }

    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn create_qp(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let kind: u32 = request.constant(ATTR_CREATE_QP_TYPE)?;
        let service = match QpType(kind) {
            QpType::RC => 0,
            QpType::UC => 1,
            QpType::UD => 2,
            QpType::XRC_INI => st::XRC,
            QpType::XRC_TGT => return self.create_target(fd, request),
            QpType::DRIVER => match request.driver::<CreateQp>().flags & FLAGS_OF_DC {
                QP_FLAG_TYPE_DCT => return self.create_dc_target(fd, request),
                QP_FLAG_TYPE_DCI => st::DCI,
                _ => return refuse(libc::EOPNOTSUPP),
            },
            // SAFETY: guaranteed by the caller.
            QpType::RAW_PACKET => return unsafe { self.create_packet_qp(fd, request) },
            _ => return refuse(libc::EINVAL),
        };
        // Initiators of XRC and of dynamic connections have no receives.
        let initiator = [st::XRC, st::DCI].contains(&service);
        let srq = match service {
            // UCX names one; it stays unused.
            st::DCI => None,
            _ => request.optional_handle(ATTR_CREATE_QP_SRQ_HANDLE),
        };
        let has_foreign = request.has(ATTR_CREATE_QP_XRCD_HANDLE);
        require(!has_foreign && (srq.is_none() || !initiator))?;
        let pd = request.handle(ATTR_CREATE_QP_PD_HANDLE)?;
        let send_cq = request.handle(ATTR_CREATE_QP_SEND_CQ_HANDLE)?;
        let recv_cq = match initiator {
            true => None,
            false => Some(request.handle(ATTR_CREATE_QP_RECV_CQ_HANDLE)?),
        };
        let create = create_flags(request, QpType(kind))?;
        if let Some(srq) = srq {
            require(self.objects.srq(fd, srq)?.kind != SrqKind::Xrc)?;
        }
        let driver = QpDriver::new(request)?;
        let block = create & QpCreateFlags::BLOCK_MULTICAST_LOOPBACK.bits();
        if create & !(SIGNAL_ALL | block) != 0 || request.has(ATTR_CREATE_QP_SOURCE_QPN) {
            return refuse(libc::EOPNOTSUPP);
        }
        let streams = driver.streams()?;
        let named_uar = driver.uar_page();
        let uar = match named_uar {
            Some(uar) => self.check_uar(fd, uar)?,
            None => self.default_uar(fd)?,
        };
        let (blocks, receives) = (driver.sq_wqe_count, driver.rq_wqe_count);
        let shift = driver.rq_wqe_shift;
        let cap: QpCap = request.value(ATTR_CREATE_QP_CAP)?;
        require(cap.max_recv_wr <= MAX_QUEUE_ENTRIES)?;
        // Receives come from the queue pair's own queue or from an SRQ; an XRC initiator has
        // neither.
        let has_own_queue = !initiator && srq.is_none() && cap.max_recv_wr != 0;
        require(match has_own_queue {
            true => is_queue_size(receives) && LOG_STRIDES.contains(&shift),
            false => receives == 0 && shift == 0,
        })?;
        require(blocks == 0 || is_queue_size(blocks))?;
        for cq in [Some(send_cq), recv_cq].into_iter().flatten() {
            if self.objects.cq(fd, cq)?.real_time {
                return refuse(libc::EOPNOTSUPP);
            }
        }
        let addresses = driver.addresses();
        let received = u64::from(receives) << shift;
        require(received % SEND_BLOCK == 0)?;
        let bytes = received + u64::from(blocks) * SEND_BLOCK;
        // The kernel lets the device reject entries at address 0.
        require(bytes == 0 || addresses.entries != 0)?;
        let user_handle = request.value(ATTR_CREATE_QP_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_QP_EVENT_FD);
        let signal_all = create & SIGNAL_ALL != 0;
        let connected = service != 2;
        let scatter = driver.scatters();
        let mut input = Input::new(op::CREATE_QP, PAGE_LIST + 8)
            .by(self.uid(fd))
            .fields(
                qpc::AT,
                [
                    (qpc::ST, service),
                    (qpc::BLOCK_LB_MC, u32::from(block != 0)),
                    (qpc::PD, self.objects.pd(fd, pd)?),
                    (qpc::UAR_PAGE, uar),
                    (qpc::USER_INDEX, driver.uidx),
                    (qpc::CQN_SND, self.objects.cq(fd, send_cq)?.number),
                ],
            )
            .long(qpc::AT + qpc::DBR_ADDR, addresses.records)
            .pages(
                (qpc::LOG_PAGE_SIZE.at(qpc::AT), qpc::PAGE_OFFSET.at(qpc::AT)),
                (addresses.entries, bytes),
            )?;
        if let Some(cq) = recv_cq {
            input = input.set(qpc::CQN_RCV.at(qpc::AT), self.objects.cq(fd, cq)?.number);
        }
        if let Some(streams) = streams {
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
        input = match (srq, receives) {
            (Some(srq), _) => input
                .set(qpc::RQ_TYPE.at(qpc::AT), rq_type::SRQ)
                .set(qpc::SRQN.at(qpc::AT), self.objects.srq(fd, srq)?.number),
            (None, 0) => input.set(qpc::RQ_TYPE.at(qpc::AT), rq_type::ZERO_SIZE),
            (None, _) => input
                .set(qpc::LOG_RQ_SIZE.at(qpc::AT), receives.ilog2())
                .set(qpc::LOG_RQ_STRIDE.at(qpc::AT), shift - 4),
        };
        // Rendezvous data are transferred by queue pairs without a send queue.
        if let (Some(srq), 0) = (srq, blocks) {
            if self.objects.srq(fd, srq)?.kind == SrqKind::Tags {
                input = input.set(qpc::OFFLOAD_TYPE.at(qpc::AT), qpc::OFFLOAD_TYPE_RNDV);
            }
        }
        let by_entry = |cq, narrow, wide| {
            let entry = self.objects.cq(fd, cq).map(|cq| cq.entry);
            entry.map(|entry| if entry == 128 { wide } else { narrow })
        };
        if let Some(recv_cq) = recv_cq.filter(|_| scatter && connected) {
            let value = by_entry(recv_cq, scatter::RES_32, scatter::RES_64)?;
            input = input.set(qpc::CS_RES.at(qpc::AT), value);
        }
        // Data of a read are written to its CQE only if every send is
        // signalled, or the driver allows it explicitly; libmlx5 cannot read them
        // back on XRC.
        let allowed = signal_all || driver.flags & QP_FLAG_ALLOW_SCATTER_CQE != 0;
        if scatter && service == 0 && allowed {
            let value = by_entry(send_cq, scatter::REQ_32, scatter::REQ_64)?;
            input = input.set(qpc::CS_REQ.at(qpc::AT), value);
        }
        let ranges = addresses.ranges(bytes)?;
        // SAFETY: guaranteed by the caller.
        let number = unsafe { self.create_with_memory(&ranges, &input) }?;
        // SAFETY: as in `create_cq`.
        unsafe { self.watch.add_queue(number, addresses.records) };
        let register = self.register(fd, named_uar)?;
        let qp = Qp {
            cap: queried_cap(cap, receives),
            signal_all,
            register,
            ..Qp::without_queues(number, QpType(kind), events)
        };
        let mut dependencies = vec![pd, send_cq];
        dependencies.extend(recv_cq);
        dependencies.extend(srq);
        let object = Object::new(fd, qp).using(dependencies).with_memory(ranges);
        let answer = CreateQpResp {
            bfreg_index: register.unwrap_or(NO_REGISTER),
            ..CreateQpResp::default()
        };
        self.add_qp(request, object, number, zerocopy::transmute!(cap), answer);
        Ok(())
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
        let handle = self.objects.insert(object);
        request.set_handle(ATTR_CREATE_QP_HANDLE, handle);
        request.answer_struct(ATTR_CREATE_QP_RESP_CAP, &cap);
        request.answer(ATTR_CREATE_QP_RESP_QP_NUM, &number);
        request.driver_answer(&driver);
    }

    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn create_srq(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        /// Of the version with a user index.
        const INDEX_LENGTH: usize = offset_of!(CreateSrq, reserved1);
        let kind = match request.constant(ATTR_CREATE_SRQ_TYPE)? {
            SRQ_BASIC => SrqKind::Basic,
            SRQ_XRC => SrqKind::Xrc,
            SRQ_TAGS => SrqKind::Tags,
            _ => return refuse(libc::EINVAL),
        };
        let has_cq = kind != SrqKind::Basic;
        let driver: CreateSrq = request.driver();
        let reserved = (driver.reserved0, driver.reserved1);
        require(reserved == (0, 0) && request.driver_is_cleared(size_of_val(&driver)))?;
        require(driver.flags & SRQ_FLAG_SIGNATURE == 0)?;
        let user_index = driver.uidx;
        let has_index = request.driver_length() >= INDEX_LENGTH;
        require(!has_cq || (has_index && user_index < NO_USER_INDEX))?;
        let max_wr: u32 = request.value(ATTR_CREATE_SRQ_MAX_WR)?;
        let max_sge: u32 = request.value(ATTR_CREATE_SRQ_MAX_SGE)?;
        // As in the driver: one entry more than requested, and 16 bytes per
        // entry more than its list.
        require(max_wr < MAX_QUEUE_ENTRIES && max_sge < 32)?;
        let entries = (max_wr + 1).next_power_of_two();
        let entry = (SEGMENT + max_sge * SEGMENT)
            .next_power_of_two()
            .max(2 * SEGMENT);
        require(LOG_STRIDES.contains(&entry.ilog2()))?;
        let pd = request.handle(ATTR_CREATE_SRQ_PD_HANDLE)?;
        let user_handle = request.value(ATTR_CREATE_SRQ_USER_HANDLE)?;
        let events = self.events(request, user_handle, ATTR_CREATE_SRQ_EVENT_FD);
        let addresses = QueueAddresses {
            entries: driver.buf_addr,
            records: driver.db_addr,
        };
        let bytes = u64::from(entries) * u64::from(entry);
        let pd_number = self.objects.pd(fd, pd)?;
        let mut dependencies = vec![pd];
        let mut cq_number = 0;
        if has_cq {
            let cq = request.handle(ATTR_CREATE_SRQ_CQ_HANDLE)?;
            cq_number = self.objects.cq(fd, cq)?.number;
            dependencies.push(cq);
        }
        let offset = match kind {
            SrqKind::Tags => xrqc::PAGE_LIST_SHIFT,
            _ => 0,
        };
        let input = Input::new(kind.create_opcode(), PAGE_LIST + 8 + offset).by(self.uid(fd));
        let input = match kind {
            SrqKind::Xrc => {
                let xrcd = request.handle(ATTR_CREATE_SRQ_XRCD_HANDLE)?;
                dependencies.push(xrcd);
                input
                    .fields(
                        xrc_srqc::AT,
                        [
                            (xrc_srqc::LOG_XRC_SRQ_SIZE, entries.ilog2()),
                            (xrc_srqc::LOG_RQ_STRIDE, entry.ilog2() - 4),
                            (xrc_srqc::XRCD, self.objects.xrcd(fd, xrcd)?.number),
                            (xrc_srqc::CQN, cq_number),
                            (xrc_srqc::USER_INDEX, user_index),
                            (xrc_srqc::PD, pd_number),
                        ],
                    )
                    .long(xrc_srqc::AT + xrc_srqc::DB_RECORD_ADDR, addresses.records)
            }
            SrqKind::Basic | SrqKind::Tags => input
                .set(wq::PD.at(WQ + offset), pd_number)
                .set(wq::LOG_WQ_STRIDE.at(WQ + offset), entry.ilog2())
                .set(wq::LOG_WQ_SZ.at(WQ + offset), entries.ilog2())
                .long(WQ + wq::DBR_ADDR + offset, addresses.records),
        };
        let input = match kind {
            SrqKind::Basic => input.set(rmpc::STATE.at(rmpc::AT), rqc::state::RDY),
            SrqKind::Xrc => input,
            SrqKind::Tags => {
                if !request.has(ATTR_CREATE_SRQ_MAX_NUM_TAGS) {
                    return refuse(libc::ENOENT);
                }
                let tags: u32 = request.value(ATTR_CREATE_SRQ_MAX_NUM_TAGS)?;
                require(tags <= MAX_TAGS)?;
                input.fields(
                    xrqc::AT,
                    [
                        (xrqc::TOPOLOGY, xrqc::TOPOLOGY_TAG_MATCHING),
                        (xrqc::OFFLOAD, xrqc::OFFLOAD_RNDV),
                        (xrqc::USER_INDEX, user_index),
                        (xrqc::CQN, cq_number),
                        (xrqc::LOG_MATCHING_LIST_SZ, u32::BITS - tags.leading_zeros()),
                    ],
                )
            }
        };
        let fields = match kind {
            SrqKind::Xrc => (
                xrc_srqc::LOG_PAGE_SIZE.at(xrc_srqc::AT),
                xrc_srqc::PAGE_OFFSET.at(xrc_srqc::AT),
            ),
            _ => (
                wq::LOG_WQ_PG_SZ.at(WQ + offset),
                wq::PAGE_OFFSET.at(WQ + offset),
            ),
        };
        let input = input.pages_at(PAGE_LIST + offset, fields, (addresses.entries, bytes))?;
        let ranges = addresses.ranges(bytes)?;
        // SAFETY: guaranteed by the caller.
        let number = unsafe { self.create_with_memory(&ranges, &input) }?;
        let srq = Srq {
            number,
            max_wr: entries - 1,
            max_sge: entry / SEGMENT - 1,
            kind,
            events,
        };
        let answers = (srq.max_wr, srq.max_sge);
        let handle = self
            .objects
            .insert(Object::new(fd, srq).using(dependencies).with_memory(ranges));
        request.set_handle(ATTR_CREATE_SRQ_HANDLE, handle);
        request.answer(ATTR_CREATE_SRQ_RESP_MAX_WR, &answers.0);
        request.answer(ATTR_CREATE_SRQ_RESP_MAX_SGE, &answers.1);
        if kind == SrqKind::Xrc {
            request.answer(ATTR_CREATE_SRQ_RESP_SRQ_NUM, &number);
        }
        request.driver_answer(&CreateSrqResp {
            srqn: number,
            reserved: 0,
        });
        Ok(())
    }

    /// Requests an event when fewer receives than `limit` are left.
    pub(crate) fn arm_srq(&mut self, number: u32, kind: SrqKind, limit: u32) -> Result<()> {
        let opcode = match kind {
            SrqKind::Xrc => op::ARM_XRC_SRQ,
            SrqKind::Basic | SrqKind::Tags => op::ARM_RQ,
        };
        let input = Input::about(opcode, number).set(arm_rq::LWM, limit);
        run(&mut self.hca, &input, 16).map(drop)
    }

    /// Returns the armed limit, or 0.
    pub(crate) fn srq_limit(&mut self, number: u32, kind: SrqKind) -> Result<u32> {
        const LIMIT: Field = wq::LWM.at(WQ);
        let (opcode, limit) = match kind {
            SrqKind::Basic => (op::QUERY_RMP, LIMIT),
            SrqKind::Xrc => (op::QUERY_XRC_SRQ, xrc_srqc::LWM.at(xrc_srqc::AT)),
            SrqKind::Tags => (op::QUERY_XRQ, LIMIT.at(xrqc::PAGE_LIST_SHIFT)),
        };
        let input = Input::about(opcode, number);
        run(&mut self.hca, &input, PAGE_LIST).map(|output| limit.get(&output))
    }
}
