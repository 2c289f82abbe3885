//! Opening and importing a device.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use mlx5_abi::{
    ALLOC_UCTX_DEVX, AllocUcontextReq, AllocUcontextResp, INLINE_MODE_NONE, LIB_CAP_4K_UAR,
    LIB_CAP_DYN_UAR, QueryDeviceResp, context_flag, device_flag, multi_packet,
};
use ring::{BlueFlame, Mapping, ReadOnlyMapping};
use uverbs::{Context, ContextInfo, Udata};
use zerocopy::{IntoBytes, transmute};

use crate::Clock;
use crate::CreateError;
use crate::ProtectedKeys;
use crate::allocated_uars::{AllocatedUars, QpUar};
use crate::ioctl;
use crate::send::packets;
use crate::uar::{ARM, DoorbellRegister, REGISTERS, UAR, UarPage};

/// Doorbell registers of a UAR for queue pairs.
pub(crate) const PER_UAR: u32 = 2;
/// Doorbell registers of a UAR in the driver's numbering.
const NUMBERED_PER_UAR: u32 = 4;

/// Requested registers, and how many of them are exclusive to one queue pair: the
/// stock provider's numbers.
pub(crate) const WANTED_BFREGS: u32 = 16;
pub(crate) const WANTED_EXCLUSIVE: u32 = 4;
/// Maximum that any driver returns.
const MAX_REGISTERS: u32 = 512;

/// CQE version 1: CQEs have a user index.
const CQE_VERSION: u8 = 1;

/// Limits of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of a send work request.
    pub max_send_entry: usize,
    /// Bytes of a receive.
    pub max_recv_entry: usize,
    /// Blocks of a send queue.
    pub max_send_blocks: u32,
    /// Receives of a receive queue.
    pub max_recv_wr: u32,
    /// Receives of a shared receive queue.
    pub max_srq_wr: u32,
    /// Bytes of a packet's headers that a work request of raw packets carries itself.
    pub inline_headers: usize,
    /// Ports.
    pub ports: u32,
}

/// Whether a context may use DevX ([`crate::ioctl::devx`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devx {
    /// It may not.
    No,
    /// It may, if kernel and device support it.
    IfOffered,
    /// It may; opening fails without support.
    Needed,
}

/// Features of a device, as the driver reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Entries of a compressed session, and the formats of mini CQEs as bits of
    /// `enum mlx5_ib_cqe_comp_res_format`.
    pub compressed_entries: u32,
    /// See `compressed_entries`.
    pub compressed_formats: u32,
    /// One work request may send several packets.
    pub multi_packet: bool,
    /// One work request may send several packets in the enhanced format.
    pub enhanced_multi_packet: bool,
    /// CQEs of 128 bytes may be compressed.
    pub wide_compression: bool,
    /// CQEs of 128 bytes may be written whole.
    pub wide_padding: bool,
    /// Queue pairs may count credits by packets ([`crate::QpOptions`]).
    pub packet_credits: bool,
    /// Doorbell registers support BlueFlame.
    pub blue_flame: bool,
    /// CQEs of DC targets may carry data.
    pub dct_scatter_to_cqe: bool,
    /// Receives may be consumed in any order ([`crate::QpOptions::out_of_order`]), of the
    /// services in [`crate::commands::Capabilities::out_of_order`].
    pub out_of_order: bool,
    /// Limits of [`crate::DciStreams`].
    pub streams: crate::DciStreams,
    /// Fields and functions of [`crate::PacketHash`].
    pub packet_hash: (u64, u8),
    /// Rate limits in kbit/s: minimum, maximum, QP types as bits, and flags; bit 0: bursts
    /// can be limited.
    pub pacing: [u32; 4],
    /// Limits of [`crate::Strides`] as binary logarithms: minimum and maximum bytes of a
    /// stride, minimum and maximum strides of a receive; QP types as bits.
    pub strides: [u32; 5],
    /// The tunnels of [`crate::PacketOptions`], as bits of `enum mlx5dv_tunnel_offloads`.
    pub tunnels: u32,
    /// Software parsing (raw WQEs give the offsets of a packet's headers): offloads as bits
    /// of `enum mlx5dv_sw_parsing_offloads`, QP types as bits.
    pub software_parsing: [u32; 2],
    /// TSO: maximum bytes of data, and QP types as bits of [`uverbs::QpType`].
    pub segmentation: (u32, u32),
}

/// An opened mlx5 device: its limits, UARs and user indices.
///
/// Any thread may use it; it locks, and is for the control path.
#[derive(Debug)]
pub struct DeviceContext {
    /// The device's limits.
    pub limits: Limits,
    /// Bytes of a register, of two halves; 0: no BlueFlame.
    register_size: usize,
    uars: UarSource,
    indices: Arc<Indices>,
    pub(crate) arm: CqDoorbell,
    /// The device's time.
    clock: Clock,
    /// Whether it supports enhanced connection options.
    ece: bool,
    /// The null key.
    null_key: Option<u32>,
    /// Queue pairs can leave the state SQD for RTS.
    resumes: bool,
    /// The low bits of keys can be changed.
    key_tags: bool,
    /// Memory keys whose signatures are checked.
    protected_keys: Arc<ProtectedKeys>,
}

/// The register by which completion queues are armed.
#[derive(Debug)]
pub(crate) struct CqDoorbell {
    pub(crate) register: BlueFlame,
    /// The number of its page, which CREATE_CQ names if the process has allocated it.
    pub(crate) number: Option<u32>,
    /// The page's first byte.
    pub(crate) start: NonNull<u8>,
    /// Keeps the register mapped.
    _page: Arc<UarPage>,
}

// SAFETY: `start` is of a page that any thread may use.
unsafe impl Send for CqDoorbell {}
// SAFETY: as above.
unsafe impl Sync for CqDoorbell {}

impl CqDoorbell {
    pub(crate) fn of(page: &Arc<UarPage>, number: Option<u32>) -> Self {
        Self {
            // SAFETY: in the first UAR of the page, which is kept beside it.
            // Several queues are armed through it.
            register: unsafe { BlueFlame::new(page.mapping.as_ptr().add(ARM), 0, true) },
            number,
            start: page.mapping.as_ptr(),
            _page: Arc::clone(page),
        }
    }
}

/// Where the UARs come from.
#[derive(Debug)]
enum UarSource {
    /// Assigned to queue pairs by the driver.
    Driver {
        /// Number of registers.
        count: u32,
        uars_per_page: u32,
        mapped: Mutex<Mapped>,
    },
    /// Allocated by this process.
    Allocated(AllocatedUars),
}

/// UARs that the driver assigns, mapped on first use.
#[derive(Debug)]
struct Mapped {
    pages: BTreeMap<u32, Arc<UarPage>>,
    /// By the driver's numbers.
    registers: BTreeMap<u32, DoorbellRegister>,
}

/// The mmap offset in bytes of a command (`enum mlx5_ib_mmap_cmd`) and an index.
/// In pages it is the index's low half, the command, the index's high half.
pub(crate) fn file_offset(command: u8, index: u16) -> u64 {
    let [high, low] = index.to_be_bytes().map(u64::from);
    let pages = high << 16 | u64::from(command) << 8 | low;
    pages * Mapping::page_size() as u64
}

/// Maps `size` bytes at the [`file_offset`] of a command.
pub(crate) fn map_command(
    context: &Context,
    command: u8,
    index: u16,
    size: usize,
) -> Result<Mapping, CreateError> {
    map_by(context, command, index, |fd, offset| {
        Mapping::new(fd, offset, size)
    })
}

/// As [`map_command`], of a page that is read only.
pub(crate) fn watch_command(
    context: &Context,
    command: u8,
    index: u16,
) -> Result<ReadOnlyMapping, CreateError> {
    map_by(context, command, index, |fd, offset| {
        ReadOnlyMapping::new(fd, offset, Mapping::page_size())
    })
}

fn map_by<T>(
    context: &Context,
    command: u8,
    index: u16,
    map: impl FnOnce(BorrowedFd<'_>, u64) -> std::io::Result<T>,
) -> Result<T, CreateError> {
    let offset = file_offset(command, index);
    map(context.as_fd(), offset).map_err(|error| CreateError::Map {
        page: (offset / Mapping::page_size() as u64) as u32,
        error,
    })
}

fn get_context(
    context: &Context,
    flags: u32,
) -> Result<(ContextInfo, AllocUcontextResp), uverbs::Error> {
    let request = AllocUcontextReq {
        flags,
        total_num_bfregs: WANTED_BFREGS,
        num_low_latency_bfregs: WANTED_EXCLUSIVE,
        max_cqe_version: CQE_VERSION,
        lib_caps: LIB_CAP_4K_UAR | LIB_CAP_DYN_UAR,
        ..AllocUcontextReq::default()
    };
    let mut answer = AllocUcontextResp::default();
    // SAFETY: the request names no address.
    let udata = unsafe { Udata::new(request.as_bytes(), answer.as_mut_bytes()) };
    Ok((context.get_context(udata)?, answer))
}

impl DeviceContext {
    /// Creates the kernel's context for an open device, as
    /// [`Context::get_context`] does, and maps the first registers.
    ///
    /// # Errors
    /// Those of GET_CONTEXT and of mapping; [`CreateError::Unsupported`] of a
    /// device whose completions do not carry user indices (before
    /// ConnectX-4); [`CreateError::BadAnswer`].
    pub fn open(context: &Context) -> Result<(ContextInfo, Self), CreateError> {
        Self::open_with(context, Devx::No)
    }

    /// As [`DeviceContext::open`], for DevX or not.
    ///
    /// # Errors
    /// As there; with [`Devx::Needed`] also if the kernel or the device does not have
    /// it (EINVAL), or the process may not (EPERM).
    pub fn open_with(context: &Context, devx: Devx) -> Result<(ContextInfo, Self), CreateError> {
        let (info, answer) = match devx {
            Devx::No => get_context(context, 0),
            Devx::Needed => get_context(context, ALLOC_UCTX_DEVX),
            Devx::IfOffered => {
                get_context(context, ALLOC_UCTX_DEVX).or_else(|_| get_context(context, 0))
            }
        }?;
        // Old kernels assign UARs although none are requested. rdma-core's provider imports
        // only contexts without UARs.
        let uars = match answer.tot_bfregs {
            0 => Self::allocated_uars,
            _ => Self::driver_uars,
        };
        Ok((info, Self::from_answer(context, &answer, uars)?))
    }

    /// As [`DeviceContext::open`], for a context that was created through another
    /// descriptor of the same file. Allocates separate UARs, which [`DeviceContext::close`]
    /// frees.
    ///
    /// # Errors
    /// Those of QUERY_CONTEXT (EINVAL if the file has no context yet),
    /// of UAR_OBJ_ALLOC, and of [`DeviceContext::open`]. Nothing is left behind.
    pub fn import(context: &Context) -> Result<(ContextInfo, Self), CreateError> {
        let mut answer = AllocUcontextResp::default();
        let info = ioctl::query_context(context, answer.as_mut_bytes())?;
        Ok((
            info,
            Self::from_answer(context, &answer, Self::allocated_uars)?,
        ))
    }

    /// Frees the UARs that were allocated, after all objects made from the context.
    /// Otherwise they exist until the last process has closed the file.
    pub fn close(&self, context: &Context) {
        if let UarSource::Allocated(uars) = &self.uars {
            uars.release(context);
        }
    }

    /// The UARs that the driver assigned to the context.
    fn driver_uars(
        context: &Context,
        answer: &AllocUcontextResp,
    ) -> Result<(UarSource, CqDoorbell), CreateError> {
        let bad = |what| CreateError::BadAnswer { what };
        // Kernels without 4 KiB UARs do not set this field.
        let uars_per_page = answer.num_uars_per_page.max(1);
        if uars_per_page as usize * UAR > Mapping::page_size() {
            return Err(bad("more UARs in a page than fit"));
        }
        if !(1..=MAX_REGISTERS).contains(&answer.tot_bfregs) {
            return Err(bad("the number of registers"));
        }
        let first = Arc::new(UarPage::map(context, 0)?);
        let arm = CqDoorbell::of(&first, None);
        let uars = UarSource::Driver {
            count: answer.tot_bfregs,
            uars_per_page,
            mapped: Mutex::new(Mapped {
                pages: BTreeMap::from([(0, first)]),
                registers: BTreeMap::new(),
            }),
        };
        Ok((uars, arm))
    }

    /// UARs that this process allocates.
    fn allocated_uars(
        context: &Context,
        answer: &AllocUcontextResp,
    ) -> Result<(UarSource, CqDoorbell), CreateError> {
        let (uars, arm) = AllocatedUars::new(context, answer.bf_reg_size as usize)?;
        Ok((UarSource::Allocated(uars), arm))
    }

    /// `uars` is called last, when the rest of the answer is valid.
    fn from_answer(
        context: &Context,
        answer: &AllocUcontextResp,
        uars: impl FnOnce(&Context, &AllocUcontextResp) -> Result<(UarSource, CqDoorbell), CreateError>,
    ) -> Result<Self, CreateError> {
        let bad = |what| CreateError::BadAnswer { what };
        if answer.cqe_version != CQE_VERSION {
            return Err(CreateError::Unsupported {
                what: "a device whose completions carry no user index",
            });
        }
        let register_size = answer.bf_reg_size as usize;
        // The UAR's second half has four of them.
        if register_size > (UAR - REGISTERS) / 4 || register_size % (2 * BlueFlame::BLOCK) != 0 {
            return Err(bad("the size of a register"));
        }
        if answer.max_sq_desc_sz < 64 || answer.max_rq_desc_sz < 16 {
            return Err(bad("the size of a work request"));
        }
        let (uars, arm) = uars(context, answer)?;
        Ok(Self {
            limits: Limits {
                max_send_entry: answer.max_sq_desc_sz.into(),
                max_recv_entry: answer.max_rq_desc_sz.into(),
                max_send_blocks: answer.max_send_wqebb,
                max_recv_wr: answer.max_recv_wr,
                max_srq_wr: answer.max_srq_recv_wr,
                inline_headers: match answer.eth_min_inline {
                    INLINE_MODE_NONE => 0,
                    _ => packets::MAX_INLINE_HEADERS,
                },
                ports: answer.num_ports.into(),
            },
            register_size,
            uars,
            indices: Arc::default(),
            arm,
            clock: Clock::of(context, answer),
            ece: answer.comp_mask & context_flag::ECE != 0,
            null_key: (answer.comp_mask & context_flag::DUMP_FILL_MKEY != 0)
                .then_some(answer.dump_fill_mkey),
            resumes: answer.comp_mask & context_flag::SQD2RTS != 0,
            key_tags: answer.comp_mask & context_flag::MKEY_UPDATE_TAG != 0,
            protected_keys: Arc::default(),
        })
    }

    /// Memory keys whose signatures are checked: completion queues report errors to them
    /// ([`crate::CqeRing::set_protected_keys`]).
    pub fn protected_keys(&self) -> &Arc<ProtectedKeys> {
        &self.protected_keys
    }

    /// Whether work requests may change the low 8 bits of indirect keys.
    pub fn changes_key_tags(&self) -> bool {
        self.key_tags
    }

    /// Whether queue pairs can leave the state SQD for RTS, so that they may stop at a
    /// wrong signature.
    pub fn resumes_queues(&self) -> bool {
        self.resumes
    }

    /// The most receives of a queue.
    pub fn max_recv_wr(&self) -> u32 {
        self.limits.max_recv_wr
    }

    /// Whether queue pairs have enhanced connection options ([`crate::QpChanges::ece`]).
    pub fn has_ece(&self) -> bool {
        self.ece
    }

    /// The null key: writes to it are discarded, reads return any bytes. `None`
    /// if the device has none.
    pub fn null_key(&self) -> Option<u32> {
        self.null_key
    }

    /// Queries the features of the device, which is this context's.
    ///
    /// # Errors
    /// Those of QUERY_DEVICE_EX.
    pub fn features(&self, context: &Context) -> Result<Features, CreateError> {
        let mut answer = QueryDeviceResp::default();
        context.query_device_ex(Udata::output(answer.as_mut_bytes()))?;
        let multi = answer.mlx5_ib_support_multi_pkt_send_wqes;
        let has = |flag| answer.flags & flag != 0;
        Ok(Features {
            compressed_entries: answer.cqe_comp_caps.max_num,
            compressed_formats: answer.cqe_comp_caps.supported_format,
            multi_packet: multi & multi_packet::ALLOWED != 0,
            enhanced_multi_packet: multi & multi_packet::ENHANCED != 0,
            wide_compression: has(device_flag::CQE_128B_COMP),
            wide_padding: has(device_flag::CQE_128B_PAD),
            packet_credits: has(device_flag::PACKET_BASED_CREDIT_MODE),
            blue_flame: self.register_size != 0,
            dct_scatter_to_cqe: has(device_flag::SCAT2CQE_DCT),
            out_of_order: has(device_flag::OOO_DP),
            streams: crate::DciStreams {
                log_concurrent: answer.dci_streams_caps.max_log_num_concurent,
                log_errored: answer.dci_streams_caps.max_log_num_errored,
            },
            packet_hash: (
                answer.rss_caps.rx_hash_fields_mask,
                answer.rss_caps.rx_hash_function,
            ),
            strides: {
                let [all @ .., _]: [u32; 6] = transmute!(answer.striding_rq_caps);
                all
            },
            tunnels: answer.tunnel_offloads_caps,
            software_parsing: transmute!(answer.sw_parsing_caps),
            pacing: transmute!(answer.packet_pacing_caps),
            segmentation: (answer.tso_caps.max_tso, answer.tso_caps.supported_qpts),
        })
    }

    /// The device's time.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// The register by which completion queues are armed.
    #[inline]
    pub fn cq_doorbell(&self) -> &BlueFlame {
        &self.arm.register
    }

    /// Allocates a user index.
    pub(crate) fn user_index(&self) -> Result<UserIndex, CreateError> {
        UserIndex::take(&self.indices)
    }

    /// The page of the register by which completion queues are armed, if the process has
    /// allocated it.
    pub fn cq_uar_page(&self) -> Option<u32> {
        self.arm.number
    }

    /// Bytes of a register, of two halves; 0: no BlueFlame.
    pub(crate) fn register_size(&self) -> usize {
        self.register_size
    }

    /// Allocates the register of a new queue pair, unless the driver assigns it.
    pub(crate) fn allocate_uar(&self, context: &Context) -> Option<QpUar> {
        match &self.uars {
            UarSource::Driver { .. } => None,
            UarSource::Allocated(uars) => Some(uars.take(context)),
        }
    }

    /// The register that the driver has assigned to a queue pair.
    pub(crate) fn register(
        &self,
        context: &Context,
        number: u32,
    ) -> Result<DoorbellRegister, CreateError> {
        let bad = || CreateError::BadAnswer {
            what: "the number of a queue pair's register",
        };
        let (count, uars_per_page, mapped) = match &self.uars {
            UarSource::Driver {
                count,
                uars_per_page,
                mapped,
            } => (*count, *uars_per_page, mapped),
            // The driver assigns none.
            UarSource::Allocated(uars) => return Ok(uars.doorbells()),
        };
        let (uar, which) = (number / NUMBERED_PER_UAR, number % NUMBERED_PER_UAR);
        if which >= PER_UAR || uar * PER_UAR + which >= count {
            return Err(bad());
        }
        // Under the lock, so that all users of a register share its state.
        let mut mapped = mapped.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(register) = mapped.registers.get(&number) {
            return Ok(register.clone());
        }
        let index = uar / uars_per_page;
        let page = match mapped.pages.get(&index) {
            Some(page) => Arc::clone(page),
            None => {
                let page = Arc::new(UarPage::map(context, index)?);
                mapped.pages.insert(index, Arc::clone(&page));
                page
            }
        };
        // Register 0 has no BlueFlame.
        let half = match number {
            0 => 0,
            _ => self.register_size / 2,
        };
        let exclusive = uar * PER_UAR + which >= count.saturating_sub(WANTED_EXCLUSIVE);
        let in_page = (uar % uars_per_page) as usize;
        let at = in_page * UAR + REGISTERS + which as usize * self.register_size;
        // SAFETY: in the page, by the bounds that were checked when the device was opened. An
        // exclusive register belongs to one queue pair at a time, whose posts are serialized.
        let register = unsafe { DoorbellRegister::new(&page, at, half, !exclusive) };
        mapped.registers.insert(number, register.clone());
        Ok(register)
    }
}

/// The allocated numbers, as bits.
#[derive(Debug, Default)]
struct Indices(Mutex<Vec<u64>>);

/// A user index, freed when dropped.
#[derive(Debug)]
pub(crate) struct UserIndex {
    indices: Arc<Indices>,
    index: u32,
}

impl UserIndex {
    /// 24 bits, of which the last number means none.
    const END: usize = 0xff_ffff;

    fn take(indices: &Arc<Indices>) -> Result<Self, CreateError> {
        let mut words = indices.0.lock().unwrap_or_else(PoisonError::into_inner);
        let word = words.iter().position(|word| *word != u64::MAX);
        let word = word.unwrap_or(words.len());
        if word == words.len() {
            words.try_reserve(1).map_err(|_| CreateError::NoMemory)?;
            words.push(0);
        }
        let bit = words[word].trailing_ones();
        let index = word * 64 + bit as usize;
        if index >= Self::END {
            return Err(CreateError::NoMemory);
        }
        words[word] |= 1 << bit;
        Ok(Self {
            indices: Arc::clone(indices),
            index: index as u32,
        })
    }

    pub(crate) fn get(&self) -> u32 {
        self.index
    }
}

impl Drop for UserIndex {
    fn drop(&mut self) {
        let mut words = (self.indices.0.lock()).unwrap_or_else(PoisonError::into_inner);
        if let Some(word) = words.get_mut(self.index as usize / 64) {
            *word &= !(1 << (self.index % 64));
        }
    }
}

#[cfg(any(test, feature = "fake"))]
pub(crate) mod testing {
    //! User indices without a device.

    use super::*;

    impl UserIndex {
        /// A user index outside of any context.
        pub(crate) fn detached(index: u32) -> Self {
            Self {
                indices: Arc::default(),
                index,
            }
        }
    }

    #[test]
    fn freed_indices_are_reused() {
        let indices = Arc::default();
        let take = || UserIndex::take(&indices).unwrap();
        let mut all: Vec<_> = (0..130).map(|_| take()).collect();
        assert!(all.iter().enumerate().all(|(i, n)| n.get() == i as u32));
        drop(all.remove(70));
        drop(all.remove(3));
        let three = take();
        let seventy = take();
        assert_eq!((three.get(), seventy.get()), (3, 70));
    }
}
