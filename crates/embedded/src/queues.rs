//! Creation of queues (completion queues, queue pairs, shared receive queues),
//! and destruction of objects in the device.

use std::mem::offset_of;
use std::ops::Deref;
use std::os::fd::RawFd;

use mlx5_abi::{
    CQ_FLAG_CQE_128B_PAD, CQ_FLAG_REAL_TIME_TS, CQ_FLAG_UAR_PAGE_INDEX, CreateCq, CreateCqResp,
    CreateQp, CreateQpResp, CreateSrq, CreateSrqResp, DciStreams, QP_FLAG_ALLOW_SCATTER_CQE,
    QP_FLAG_DCI_STREAM, QP_FLAG_SCATTER_CQE, QP_FLAG_TIR_ALLOW_SELF_LB_MC,
    QP_FLAG_TIR_ALLOW_SELF_LB_UC, QP_FLAG_TYPE_DCI, QP_FLAG_TYPE_DCT, QP_FLAG_UAR_PAGE_INDEX,
    SRQ_FLAG_SIGNATURE, mini_format,
};
use softhca::bits::{Field, field, flag};
use softhca::command::opcode as op;
use uverbs::abi::ids::*;
use uverbs::abi::verbs::QpCap;
use uverbs::abi::write::{ResizeCq, ResizeCqResp};
use uverbs::{QpCreateFlags, QpType};

use crate::command::{self, Input, NUMBER, PAGES_AT, make, run};
use crate::dynamic::INITIATOR_SERVICE;
use crate::event::EventCounter;
use crate::object::{Cq, Events, MemoryRange, Object, ObjectData, Qp, Srq, SrqKind};
use crate::request::Request;
use crate::state::{State, VECTORS};
use crate::user::{Access, pin};
use crate::{Result, refuse};

/// Bytes of a queue's doorbell records.
const RECORDS: u64 = 8;

const CQ: usize = 0x10;
const CQ_ENTRY_SIZE: Field = field(CQ, 23, 21);
const CQ_IGNORE_OVERRUN: Field = flag(CQ, 17);
const CQ_COMPRESS: Field = flag(CQ, 14);
const CQ_FORMAT: Field = field(CQ, 13, 12);
const CQ_LOG_SIZE: Field = field(CQ + 0xc, 28, 24);
const CQ_UAR: Field = field(CQ + 0xc, 23, 0);
const CQ_EQN: Field = field(CQ + 0x14, 7, 0);
const CQ_PAGE_OFFSET: Field = field(CQ + 0x8, 11, 6);
const CQ_PAGE_SIZE: Field = field(CQ + 0x18, 28, 24);
const CQ_RECORDS: usize = CQ + 0x38;
/// Maximum number of entries of a completion queue, as a logarithm.
const MAX_LOG_CQ_SIZE: u32 = 22;

const QP: usize = 0x18;
/// Service type of XRC queue pairs.
pub(crate) const XRC_SERVICE: u32 = 3;
pub(crate) const QP_SERVICE: Field = field(QP, 23, 16);
/// `offload_type` of a queue pair: the device transfers the data of rendezvous.
const QP_OFFLOAD: Field = field(QP, 7, 4);
const OFFLOAD_RENDEZVOUS: u32 = 1;
const QP_BLOCK_LOOPBACK: Field = flag(QP + 0x4, 30);
pub(crate) const QP_PD: Field = field(QP + 0x4, 23, 0);
const QP_LOG_RQ: Field = field(QP + 0x8, 22, 19);
const QP_RQ_STRIDE: Field = field(QP + 0x8, 18, 16);
pub(crate) const QP_NO_SQ: Field = flag(QP + 0x8, 15);
const QP_LOG_SQ: Field = field(QP + 0x8, 14, 11);
const QP_UAR: Field = field(QP + 0xc, 23, 0);
const QP_USER_INDEX: Field = field(QP + 0x10, 23, 0);
const QP_PAGE_SIZE: Field = field(QP + 0x14, 28, 24);
const QP_PAGE_OFFSET: Field = field(QP + 0x90, 11, 6);
const QP_LOG_STREAMS: Field = field(QP + 0x7c, 28, 24);
const QP_LOG_ERRORED_STREAMS: Field = field(QP + 0x80, 28, 24);
const QP_SEND_CQ: Field = field(QP + 0x7c, 23, 0);
const QP_RECV_CQ: Field = field(QP + 0x9c, 23, 0);
const QP_RECORDS: usize = QP + 0xa0;
pub(crate) const QP_RQ_TYPE: Field = field(QP + 0xac, 26, 24);
const QP_SRQ: Field = field(QP + 0xac, 23, 0);
const QP_SCATTER_READ: Field = field(QP + 0xc4, 15, 8);
const QP_SCATTER_RECEIVED: Field = field(QP + 0xc4, 7, 0);
/// Values of the receive queue type, and of the two scatter fields.
pub(crate) const RQ_SHARED: u32 = 1;
const RQ_NONE: u32 = 3;
const SCATTER_READ_32: u32 = 0x11;
const SCATTER_READ_64: u32 = 0x22;
pub(crate) const SCATTER_RECEIVED_32: u32 = 0x1;
pub(crate) const SCATTER_RECEIVED_64: u32 = 0x2;
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

const POOL_STATE: Field = field(0x20, 23, 20);
pub(crate) const WQ: usize = 0x50;
pub(crate) const WQ_PD: Field = field(WQ + 0x8, 23, 0);
pub(crate) const WQ_PAGE_OFFSET: Field = field(WQ + 0x4, 20, 16);
pub(crate) const WQ_RECORDS: usize = WQ + 0x10;
pub(crate) const WQ_STRIDE: Field = field(WQ + 0x20, 19, 16);
pub(crate) const WQ_PAGE_SIZE: Field = field(WQ + 0x20, 12, 8);
pub(crate) const WQ_LOG_SIZE: Field = field(WQ + 0x20, 4, 0);
const READY: u32 = 1;

const XRC: usize = 0x10;
const XRC_LOG_SIZE: Field = field(XRC, 27, 24);
const XRC_STRIDE: Field = field(XRC + 0x4, 26, 24);
const XRC_DOMAIN: Field = field(XRC + 0x4, 23, 0);
const XRC_CQ: Field = field(XRC + 0x8, 23, 0);
const XRC_PAGE_OFFSET: Field = field(XRC + 0x8, 31, 26);
const XRC_PAGE_SIZE: Field = field(XRC + 0x10, 29, 24);
const XRC_USER_INDEX: Field = field(XRC + 0x10, 23, 0);
const XRC_PD: Field = field(XRC + 0x18, 23, 0);
const XRC_LIMIT: Field = field(XRC + 0x1c, 31, 16);
const XRC_RECORDS: usize = XRC + 0x28;
/// Offset of an XRQ's work queue and pages, relative to those of a receive memory pool.
const XRQ_OFFSET: usize = 0x40;
/// Topology and offload of an XRQ: tag matching, and transfers of rendezvous.
const XRQ_TOPOLOGY: Field = field(0x10, 11, 8);
const XRQ_OFFLOAD: Field = field(0x10, 3, 0);
const XRQ_USER_INDEX: Field = field(0x14, 23, 0);
const XRQ_CQ: Field = field(0x18, 23, 0);
const XRQ_LOG_TAGS: Field = field(0x30, 31, 28);
const TAG_MATCHING: u32 = 1;
const TRANSFERS: u32 = 1;
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
        let input = Input::new(op::CREATE_CQ, PAGES_AT + 8)
            .by(self.uid(fd))
            .set(CQ_ENTRY_SIZE, entry_size)
            .set(CQ_IGNORE_OVERRUN, u32::from(flags & IGNORE_OVERRUN != 0))
            .set(CQ_COMPRESS, compressed.into())
            .set(CQ_FORMAT, format)
            .set(CQ_LOG_SIZE, log_size)
            .set(CQ_UAR, uar)
            .set(CQ_EQN, self.event_queue(vector))
            .long(CQ_RECORDS, addresses.records)
            .pages((CQ_PAGE_SIZE, CQ_PAGE_OFFSET), (addresses.entries, bytes))?;
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
        let handle = self.objects.insert(Object {
            file: fd,
            dependencies: Vec::new(),
            uses: 0,
            ranges,
            data: ObjectData::Cq(cq),
        });
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
        const OPERATION: Field = field(4, 15, 0);
        const RESIZE: u32 = 1;
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
            let input = Input::new(op::MODIFY_CQ, PAGES_AT + 8)
                .set(OPERATION, RESIZE)
                .set(NUMBER, number)
                .set(CQ_ENTRY_SIZE, entry_size)
                .set(CQ_LOG_SIZE, log_size)
                .pages((CQ_PAGE_SIZE, CQ_PAGE_OFFSET), (entries, bytes))?;
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
            QpType::XRC_INI => XRC_SERVICE,
            QpType::XRC_TGT => return self.create_target(fd, request),
            QpType::DRIVER => match request.driver::<CreateQp>().flags & FLAGS_OF_DC {
                QP_FLAG_TYPE_DCT => return self.create_dc_target(fd, request),
                QP_FLAG_TYPE_DCI => INITIATOR_SERVICE,
                _ => return refuse(libc::EOPNOTSUPP),
            },
            // SAFETY: guaranteed by the caller.
            QpType::RAW_PACKET => return unsafe { self.create_packet_qp(fd, request) },
            _ => return refuse(libc::EINVAL),
        };
        // Initiators of XRC and of dynamic connections have no receives.
        let initiator = [XRC_SERVICE, INITIATOR_SERVICE].contains(&service);
        let srq = match service {
            // UCX names one; it stays unused.
            INITIATOR_SERVICE => None,
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
        let mut input = Input::new(op::CREATE_QP, PAGES_AT + 8)
            .by(self.uid(fd))
            .set(QP_SERVICE, service)
            .set(QP_BLOCK_LOOPBACK, u32::from(block != 0))
            .set(QP_PD, self.objects.pd(fd, pd)?)
            .set(QP_UAR, uar)
            .set(QP_USER_INDEX, driver.uidx)
            .set(QP_SEND_CQ, self.objects.cq(fd, send_cq)?.number)
            .long(QP_RECORDS, addresses.records)
            .pages((QP_PAGE_SIZE, QP_PAGE_OFFSET), (addresses.entries, bytes))?;
        if let Some(cq) = recv_cq {
            input = input.set(QP_RECV_CQ, self.objects.cq(fd, cq)?.number);
        }
        if let Some(streams) = streams {
            input = input
                .set(QP_LOG_STREAMS, streams.log_num_concurent.into())
                .set(QP_LOG_ERRORED_STREAMS, streams.log_num_errored.into());
        }
        input = match blocks {
            0 => input.set(QP_NO_SQ, 1),
            _ => input.set(QP_LOG_SQ, blocks.ilog2()),
        };
        input = match (srq, receives) {
            (Some(srq), _) => input
                .set(QP_RQ_TYPE, RQ_SHARED)
                .set(QP_SRQ, self.objects.srq(fd, srq)?.number),
            (None, 0) => input.set(QP_RQ_TYPE, RQ_NONE),
            (None, _) => input
                .set(QP_LOG_RQ, receives.ilog2())
                .set(QP_RQ_STRIDE, shift - 4),
        };
        // Rendezvous data are transferred by queue pairs without a send queue.
        if let (Some(srq), 0) = (srq, blocks) {
            if self.objects.srq(fd, srq)?.kind == SrqKind::Tags {
                input = input.set(QP_OFFLOAD, OFFLOAD_RENDEZVOUS);
            }
        }
        let by_entry = |cq, narrow, wide| {
            let entry = self.objects.cq(fd, cq).map(|cq| cq.entry);
            entry.map(|entry| if entry == 128 { wide } else { narrow })
        };
        if let Some(recv_cq) = recv_cq.filter(|_| scatter && connected) {
            let value = by_entry(recv_cq, SCATTER_RECEIVED_32, SCATTER_RECEIVED_64)?;
            input = input.set(QP_SCATTER_RECEIVED, value);
        }
        // Data of a read are written to its CQE only if every send is
        // signalled, or the driver allows it explicitly; libmlx5 cannot read them
        // back on XRC.
        let allowed = signal_all || driver.flags & QP_FLAG_ALLOW_SCATTER_CQE != 0;
        if scatter && service == 0 && allowed {
            let value = by_entry(send_cq, SCATTER_READ_32, SCATTER_READ_64)?;
            input = input.set(QP_SCATTER_READ, value);
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
        let object = Object {
            file: fd,
            dependencies,
            uses: 0,
            ranges,
            data: ObjectData::Qp(Box::new(qp)),
        };
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
            SrqKind::Tags => XRQ_OFFSET,
            _ => 0,
        };
        let input = Input::new(kind.create_opcode(), PAGES_AT + 8 + offset).by(self.uid(fd));
        let input = match kind {
            SrqKind::Xrc => {
                let xrcd = request.handle(ATTR_CREATE_SRQ_XRCD_HANDLE)?;
                dependencies.push(xrcd);
                input
                    .set(XRC_LOG_SIZE, entries.ilog2())
                    .set(XRC_STRIDE, entry.ilog2() - 4)
                    .set(XRC_DOMAIN, self.objects.xrcd(fd, xrcd)?.number)
                    .set(XRC_CQ, cq_number)
                    .set(XRC_USER_INDEX, user_index)
                    .set(XRC_PD, pd_number)
                    .long(XRC_RECORDS, addresses.records)
            }
            SrqKind::Basic | SrqKind::Tags => input
                .set(WQ_PD.at(offset), pd_number)
                .set(WQ_STRIDE.at(offset), entry.ilog2())
                .set(WQ_LOG_SIZE.at(offset), entries.ilog2())
                .long(WQ_RECORDS + offset, addresses.records),
        };
        let input = match kind {
            SrqKind::Basic => input.set(POOL_STATE, READY),
            SrqKind::Xrc => input,
            SrqKind::Tags => {
                if !request.has(ATTR_CREATE_SRQ_MAX_NUM_TAGS) {
                    return refuse(libc::ENOENT);
                }
                let tags: u32 = request.value(ATTR_CREATE_SRQ_MAX_NUM_TAGS)?;
                require(tags <= MAX_TAGS)?;
                input
                    .set(XRQ_TOPOLOGY, TAG_MATCHING)
                    .set(XRQ_OFFLOAD, TRANSFERS)
                    .set(XRQ_USER_INDEX, user_index)
                    .set(XRQ_CQ, cq_number)
                    .set(XRQ_LOG_TAGS, u32::BITS - tags.leading_zeros())
            }
        };
        let fields = match kind {
            SrqKind::Xrc => (XRC_PAGE_SIZE, XRC_PAGE_OFFSET),
            _ => (WQ_PAGE_SIZE.at(offset), WQ_PAGE_OFFSET.at(offset)),
        };
        let input = input.pages_at(PAGES_AT + offset, fields, (addresses.entries, bytes))?;
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
        let handle = self.objects.insert(Object {
            file: fd,
            dependencies,
            uses: 0,
            ranges,
            data: ObjectData::Srq(srq),
        });
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
        const LIMIT: Field = field(0xc, 15, 0);
        let opcode = match kind {
            SrqKind::Xrc => op::ARM_XRC_SRQ,
            SrqKind::Basic | SrqKind::Tags => op::ARM_RQ,
        };
        let input = Input::about(opcode, number).set(LIMIT, limit);
        run(&mut self.hca, &input, 16).map(drop)
    }

    /// Returns the armed limit, or 0.
    pub(crate) fn srq_limit(&mut self, number: u32, kind: SrqKind) -> Result<u32> {
        const LIMIT: Field = field(WQ + 0x4, 15, 0);
        let (opcode, limit) = match kind {
            SrqKind::Basic => (op::QUERY_RMP, LIMIT),
            SrqKind::Xrc => (op::QUERY_XRC_SRQ, XRC_LIMIT),
            SrqKind::Tags => (op::QUERY_XRQ, LIMIT.at(XRQ_OFFSET)),
        };
        let input = Input::about(opcode, number);
        run(&mut self.hca, &input, PAGES_AT).map(|output| limit.get(&output))
    }

    /// Destroys the device's part of an object.
    pub(crate) fn destroy_in_device(&mut self, fd: RawFd, handle: u32) -> Result<()> {
        let data = &self.objects.get(fd, handle)?.data;
        // An object that was opened several times stays in the device until the
        // last one is destroyed.
        let opened = match data {
            ObjectData::Xrcd(it) => self.objects.xrcds(it.number).count(),
            ObjectData::Qp(it) if it.domain.is_some() => self.objects.qps(it.number).count(),
            _ => 1,
        };
        if opened > 1 {
            return Ok(());
        }
        let (opcode, number) = match data {
            ObjectData::Pd { number } => (op::DEALLOC_PD, *number),
            ObjectData::Mr(mr) => (op::DESTROY_MKEY, mr.key >> 8),
            ObjectData::Mw { key } => (op::DESTROY_MKEY, key >> 8),
            ObjectData::Cq(cq) => (op::DESTROY_CQ, cq.number),
            ObjectData::Qp(qp) if qp.target.is_some() => {
                let number = qp.number;
                return self.destroy_dc_target(number);
            }
            ObjectData::Qp(qp) => match (qp.number, qp.packet) {
                (number, None) => (op::DESTROY_QP, number),
                (number, Some(mut packet)) => {
                    let destroyed = self.destroy_packet_objects(&mut packet);
                    self.objects.qp_mut(fd, handle)?.packet = Some(packet);
                    destroyed?;
                    self.watch.remove_queue(number);
                    return Ok(());
                }
            },
            ObjectData::Srq(srq) => (srq.kind.destroy_opcode(), srq.number),
            ObjectData::Wq(wq) => (op::DESTROY_RQ, wq.number),
            ObjectData::WqTable { number } => (op::DESTROY_RQT, *number),
            ObjectData::Xrcd(it) => (op::DEALLOC_XRCD, it.number),
            ObjectData::Ah | ObjectData::Dm(_) | ObjectData::Matcher(_) => return Ok(()),
            ObjectData::Flow(flow) => {
                let flow = *flow;
                return self.remove_flow(&flow);
            }
            ObjectData::Counters(counters) => (op::DEALLOC_FLOW_COUNTER, counters.number),
            ObjectData::HeaderChange { number } => (op::DEALLOC_MODIFY_HEADER_CONTEXT, *number),
            ObjectData::Uar { number, .. } => (op::DEALLOC_UAR, *number),
            ObjectData::Umem { number } => (op::DESTROY_UMEM, *number),
            ObjectData::Devx(it) => {
                let (opcode, number, destroy) = (it.opcode, it.number, it.destroy.clone());
                return self.destroy_devx(opcode, number, &destroy);
            }
        };
        let input = Input::new(opcode, 16).set(NUMBER, number);
        command::run(&mut self.hca, &input, 16)?;
        match opcode {
            op::DESTROY_CQ => self.watch.remove_arm(number),
            op::DESTROY_QP => self.watch.remove_queue(number),
            _ => {}
        }
        Ok(())
    }
}
