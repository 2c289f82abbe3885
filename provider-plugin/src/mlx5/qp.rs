//! Queue pairs: queues in the process's memory, resolved by the QP table of their
//! completion queues.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::slice;
use core::sync::atomic::{AtomicU32, Ordering};
use std::ffi::OsStr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use mlx5::commands::{Capabilities, data_in_order, enable_memcpy, stop_at_wrong_signatures};
use mlx5::{
    DcType, KeyChanges, PacketHash, PacketObjects, PacketOptions, QpChanges, QpOptions, QpQueues,
    QueueAllocator, QueuePair, RecvQueue, Role, SendQueue, TsoLimits, modify_dct,
};
use uverbs::environment::variable;
use uverbs::{
    AccessFlags, MrInit, PdHandle, QpAttr, QpAttrMask, QpCap, QpCreateFlags, QpInit, QpOpen,
    QpState, Udata,
};

use super::Mlx5;
use super::cq::Cq;
use super::key_config::KeyConfig;
use super::memory::Allocators;
use super::pd::ThreadDomain;
use crate::abi::*;
use crate::access::locked;
use crate::alloc::try_box;
use crate::context::CtxRef;
use crate::cq::cq_of;
use crate::entry;
use crate::errno::Errno;
use crate::mlx5dv::abi::{mlx5dv_qp_ex, send_ops};
use crate::mlx5dv::{Functions, set_batch_functions};
use crate::mr::may_be_bound;
use crate::qp::{NewQp, QpOps, SendAttr, qp_of};
use crate::srq::srq_of;

/// Operations that change memory keys.
const KEYS: u64 = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;

/// Whether CQEs may carry data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ScatterToCqe {
    /// If every send is signalled, unless the environment disables it.
    #[default]
    Default,
    /// CQEs carry no data.
    Disabled,
    /// Also if not every send is signalled.
    Allowed,
}

/// Device-specific options of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether CQEs may carry data.
    pub scatter_to_cqe: ScatterToCqe,
    /// Credits are counted by packets.
    pub packet_credits: bool,
    /// Whether it is a DC initiator or target.
    pub dc_type: Option<DcType>,
    /// Device-specific operations of `ibv_wr_*` (`send_ops_flags` of mlx5dv).
    pub operations: u64,
    /// How raw packets are received.
    pub packets: PacketOptions,
    /// The queue pair stops at a wrong signature.
    pub sig_pipelining: bool,
    /// Receives complete in any order.
    pub out_of_order: bool,
}

/// Data of a queue pair besides its queues.
pub struct QpData {
    queues: Arc<QpQueues>,
    /// The capabilities at creation, since the kernel does not know the layout of the queues.
    cap: QpCap,
    /// The device objects of a raw packet queue pair.
    pub packets: PacketObjects,
    /// It is a DC target.
    is_target: bool,
    ece: Ece,
    /// For copies in local memory.
    pub memcpy: Option<Memcpy>,
    /// The change of a memory key; used in the critical section of `send_lock`.
    pub key_config: UnsafeCell<KeyConfig>,
    /// Functions of mlx5dv for `ibv_wr_*`.
    pub functions: Functions,
}

/// Enhanced connection options, as bits.
#[derive(Default)]
struct Ece {
    /// Options to request at the next change of attributes; 0: none.
    requested: AtomicU32,
    /// Options that the device granted.
    granted: AtomicU32,
}

/// Resources for copies in local memory (`wr_memcpy`).
pub struct Memcpy {
    /// Maximum bytes of a copy.
    pub max_length: u64,
    /// The queue pair has to be enabled for copies.
    by_qp: bool,
    /// The region of `scratch`; deregistered before `scratch` is freed, as fields drop in
    /// order.
    region: uverbs::Mr<CtxRef>,
    /// Memory that the device may write to.
    scratch: Box<Scratch>,
}

#[repr(C, align(64))]
struct Scratch(UnsafeCell<[u8; 64]>);

// SAFETY: only the device uses it.
unsafe impl Sync for Scratch {}

impl Memcpy {
    /// EOPNOTSUPP if the device does not copy.
    fn new(ctx: &CtxRef, pd: Option<PdHandle>) -> Result<Self, Errno> {
        let caps = Capabilities::query(ctx)?;
        if caps.longest_memcpy == 0 {
            return Err(Errno::OPNOTSUPP);
        }
        let scratch = try_box(Scratch(UnsafeCell::new([0; 64]))).map_err(|(_, errno)| errno)?;
        let addr = scratch.0.get().expose_provenance() as u64;
        let init = MrInit {
            pd: pd.ok_or(Errno::INVAL)?,
            addr,
            length: 64,
            iova: addr,
            access: AccessFlags::LOCAL_WRITE,
        };
        // SAFETY: the memory outlives the region, and only the device uses it.
        let region = unsafe { uverbs::Mr::register(ctx, &init, Udata::none())? };
        Ok(Self {
            max_length: caps.longest_memcpy,
            by_qp: caps.memcpy_by_qp,
            scratch,
            region,
        })
    }

    /// Address and lkey of the scratch memory.
    pub fn scratch(&self) -> (u64, u32) {
        (self.scratch.0.get().addr() as u64, self.region.lkey())
    }
}

/// A queue pair of a ConnectX.
pub type Qp = crate::qp::Qp<Mlx5>;

/// The completion queues of a queue pair, each once.
///
/// # Safety
/// The completion queues are live.
unsafe fn cqs<'a>(qp: &Qp) -> impl Iterator<Item = &'a Cq> {
    let base = &qp.public.qp_ex.qp_base;
    let both = base.send_cq != base.recv_cq;
    // With XRC one of them is missing, or both.
    let [send_cq, recv_cq] = [base.send_cq, base.recv_cq].map(|cq| (!cq.is_null()).then_some(cq));
    let each = [send_cq, recv_cq.filter(|_| both)];
    // SAFETY: as the caller says.
    each.into_iter().flatten().map(|cq| unsafe { cq_of(cq) })
}

/// Splits a queue pair into the parts of [`NewQp`].
fn parts(new_qp: QueuePair<CtxRef>, is_target: bool, memcpy: Option<Memcpy>) -> NewQp<Mlx5> {
    NewQp {
        object: new_qp.object,
        send: new_qp.send,
        recv: new_qp.recv,
        device_data: QpData {
            queues: new_qp.queues,
            cap: new_qp.cap,
            packets: new_qp.packets,
            is_target,
            ece: Ece {
                granted: new_qp.ece.into(),
                ..Ece::default()
            },
            memcpy,
            key_config: UnsafeCell::default(),
            functions: Functions::new(mlx5dv_qp_ex::NONE),
        },
        cap: new_qp.cap,
    }
}

/// Returns whether CQEs may carry data, by the value of `MLX5_SCATTER_TO_CQE` when the queue
/// pair is created, as with the stock provider. Programs whose work requests name memory that
/// the processor cannot access, such as device memory, set it to 0.
fn scatter_to_cqe(setting: Option<&OsStr>) -> bool {
    setting.is_none_or(|value| value != "0")
}

/// Returns whether the device computes and checks the checksums of packets, by a bit of
/// `device_cap_flags`.
pub fn has_checksums(ctx: &CtxRef, bit: u32) -> Result<bool, Errno> {
    let device = ctx.query_device()?;
    Ok(device.device_cap_flags & bit != 0)
}

/// Returns the maximum bytes of data of a TSO packet; `None` without TSO for raw packets.
fn max_tso(ctx: &CtxRef) -> Result<Option<u32>, Errno> {
    let (longest, types) = ctx.mlx5()?.features(ctx)?.segmentation;
    Ok((types & 1 << IBV_QPT_RAW_PACKET != 0).then_some(longest))
}

/// Returns whether the receives of queue pairs of a type may be consumed in any order.
fn has_out_of_order(ctx: &CtxRef, kind: u32) -> Result<bool, Errno> {
    if !ctx.mlx5()?.features(ctx)?.out_of_order {
        return Ok(false);
    }
    let has = Capabilities::query(ctx)?.out_of_order;
    Ok(match kind {
        IBV_QPT_UD => has.ud,
        IBV_QPT_UC => has.uc,
        IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV => has.xrc,
        IBV_QPT_DRIVER => has.dc,
        IBV_QPT_RC => has.rc,
        _ => false,
    })
}

impl QpData {
    /// Whether it is a DC initiator.
    pub fn is_initiator(&self) -> bool {
        self.queues.is_dc_initiator()
    }
}

/// Returns the options of a new queue pair for the device's crate.
fn create_options(
    ctx: &CtxRef,
    attr: &ibv_qp_init_attr,
    send_attr: &SendAttr,
    requested: &Options,
    is_target: bool,
) -> Result<QpOptions, Errno> {
    let options = QpOptions {
        // Without `send_ops_flags` any operation may be posted.
        keys: match send_attr.operations {
            _ if requested.operations & send_ops::KEYS != 0 => KeyChanges::Layouts,
            Some(operations) if operations & KEYS == 0 => KeyChanges::None,
            _ => KeyChanges::Windows,
        },
        scatter_to_cqe: match requested.scatter_to_cqe {
            ScatterToCqe::Default => scatter_to_cqe(variable("MLX5_SCATTER_TO_CQE").as_deref()),
            ScatterToCqe::Disabled => false,
            ScatterToCqe::Allowed => true,
        },
        allow_scatter_to_cqe: requested.scatter_to_cqe == ScatterToCqe::Allowed,
        packet_credits: requested.packet_credits,
        memcpy: requested.operations & send_ops::MEMCPY != 0,
        raw_wqe: requested.operations & send_ops::RAW_WQE != 0,
        sig_pipelining: requested.sig_pipelining,
        checksums: match (attr.qp_type, send_attr.source_qpn) {
            (IBV_QPT_RAW_PACKET, _) => has_checksums(ctx, IBV_DEVICE_RAW_IP_CSUM)?,
            (IBV_QPT_UD, Some(_)) => has_checksums(ctx, IBV_DEVICE_UD_IP_CSUM)?,
            _ => false,
        },
        segmentation: match send_attr.max_tso_header {
            0 => TsoLimits::default(),
            max_headers => TsoLimits {
                max_headers,
                longest: max_tso(ctx)?.ok_or(Errno::OPNOTSUPP)?,
            },
        },
        out_of_order: requested.out_of_order,
        packets: requested.packets,
        dc_type: requested.dc_type,
    };
    Ok(match is_target && options.scatter_to_cqe {
        true => QpOptions {
            scatter_to_cqe: ctx.mlx5()?.features(ctx)?.dct_scatter_to_cqe,
            ..options
        },
        false => options,
    })
}

/// EOPNOTSUPP for requested operations and options that the device does not have for this type.
fn check_supported(
    ctx: &CtxRef,
    attr: &ibv_qp_init_attr,
    requested: &Options,
) -> Result<(), Errno> {
    let supported = match attr.qp_type {
        IBV_QPT_RC => send_ops::ALL,
        IBV_QPT_DRIVER => send_ops::RAW_WQE | send_ops::MEMCPY,
        _ => send_ops::RAW_WQE,
    };
    if requested.operations & !supported != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    if requested.sig_pipelining && !ctx.mlx5()?.resumes_queues() {
        return Err(Errno::OPNOTSUPP);
    }
    if requested.out_of_order && !has_out_of_order(ctx, attr.qp_type)? {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(())
}

/// Adds a queue pair without completions to its completion queues.
///
/// # Safety
/// The completion queues are null or live.
unsafe fn attach(attr: &ibv_qp_init_attr, queues: &Arc<QpQueues>) -> Result<(), Errno> {
    let as_ref = |cq: *mut ibv_cq| {
        // SAFETY: null or live, as the caller says.
        (!cq.is_null()).then(|| -> &Cq { unsafe { cq_of(cq) } })
    };
    let (send_cq, recv_cq) = (as_ref(attr.send_cq), as_ref(attr.recv_cq));
    if let Some(cq) = send_cq {
        cq.attach(queues, Role::SEND)?;
    }
    if let Some(cq) = recv_cq {
        if let Err(errno) = cq.attach(queues, Role::RECEIVE) {
            if let Some(cq) = send_cq {
                cq.detach(queues);
            }
            return Err(errno);
        }
    }
    Ok(())
}

impl QpOps for Mlx5 {
    type SendQueue = SendQueue;
    type RecvQueue = RecvQueue;
    type QpData = QpData;
    type QpOptions = Options;

    const CREATE_FLAGS: QpCreateFlags = QpCreateFlags::BLOCK_MULTICAST_LOOPBACK
        .union(QpCreateFlags::SCATTER_FCS)
        .union(QpCreateFlags::CVLAN_STRIPPING)
        .union(QpCreateFlags::PCI_WRITE_END_PADDING);
    const DC: bool = true;
    const PACKETS: bool = true;
    const UNDERLAY: bool = true;
    const RATE_LIMITS: bool = true;

    /// EOPNOTSUPP for types other than RC, UC, UD, raw packet, XRC and DC; EINVAL if a
    /// required attribute of DC is missing.
    unsafe fn make_qp(
        ctx: &CtxRef,
        attr: &ibv_qp_init_attr,
        init: &QpInit,
        send_attr: &SendAttr,
        requested: &Options,
        thread: Option<&ThreadDomain>,
        domain: *mut ibv_pd,
    ) -> Result<NewQp<Self>, Errno> {
        // SAFETY: live, and of this context.
        let shared = init.srq.map(|_| unsafe {
            let srq = srq_of::<Self>(attr.srq);
            locked(srq.single, &srq.lock, || {
                Arc::clone((*srq.recv.get()).entries())
            })
        });
        let is_target = match (attr.qp_type, requested.dc_type) {
            (IBV_QPT_DRIVER, Some(DcType::Initiator { .. })) if !attr.send_cq.is_null() => false,
            (IBV_QPT_DRIVER, Some(DcType::Target { .. })) if send_attr.operations.is_none() => true,
            (IBV_QPT_DRIVER, _) | (_, Some(_)) => return Err(Errno::INVAL),
            (_, None) => false,
        };
        let options = create_options(ctx, attr, send_attr, requested, is_target)?;
        check_supported(ctx, attr, requested)?;
        let memcpy = match requested.operations & send_ops::MEMCPY {
            0 => None,
            _ => Some(Memcpy::new(ctx, init.pd)?),
        };
        let uar = thread.and_then(Option::as_ref);
        // SAFETY: null or live, as the caller says.
        let allocator = unsafe { Allocators::of(ctx, domain) };
        let new_qp = QueuePair::create_with(
            ctx,
            ctx.mlx5()?,
            init,
            shared,
            &options,
            uar,
            allocator
                .as_ref()
                .map(|allocator| allocator as &dyn QueueAllocator),
        )?;
        let mut new_qp = parts(new_qp, is_target, memcpy);
        let room = new_qp.send.max_layout();
        new_qp.device_data.key_config.get_mut().reserve(room)?;
        // SAFETY: null or live, as the caller says.
        unsafe { attach(attr, &new_qp.device_data.queues) }?;
        Ok(new_qp)
    }

    fn open_qp(ctx: &CtxRef, init: &QpOpen) -> Result<NewQp<Self>, Errno> {
        Ok(parts(QueuePair::open(ctx, ctx.mlx5()?, init)?, false, None))
    }

    unsafe fn make_rss_qp(
        ctx: &CtxRef,
        init: &QpInit,
        hash: &ibv_rx_hash_conf,
        options: &Options,
    ) -> Result<NewQp<Self>, Errno> {
        let packets = options.packets;
        let others = Options {
            packets: PacketOptions::default(),
            ..*options
        };
        if others != Options::default() {
            return Err(Errno::OPNOTSUPP);
        }
        let key = match hash.rx_hash_key.is_null() {
            true => &[],
            // SAFETY: the application's key, as the caller says.
            false => unsafe {
                slice::from_raw_parts(hash.rx_hash_key, hash.rx_hash_key_len.into())
            },
        };
        let hash = PacketHash {
            function: hash.rx_hash_function,
            fields: hash.rx_hash_fields_mask,
            key,
        };
        let new_qp = QueuePair::create_rss(ctx, ctx.mlx5()?, init, &hash, packets)?;
        Ok(parts(new_qp, false, None))
    }

    fn modify_qp(qp: &Qp, attr: &QpAttr, mask: QpAttrMask) -> Result<Option<u32>, Errno> {
        let ece = &qp.device_data.ece;
        let changes = QpChanges {
            ece: ece.requested.load(Ordering::Relaxed),
            out_of_order: qp.device_data.queues.is_out_of_order()
                && mask.contains(QpAttrMask::STATE)
                && attr.qp_state == QpState::INIT,
            ..QpChanges::default()
        };
        let granted = |options| {
            if changes.ece != 0 {
                ece.requested.store(0, Ordering::Relaxed);
                ece.granted.store(options, Ordering::Relaxed);
            }
        };
        if qp.device_data.is_target {
            let (number, options) = modify_dct(&qp.object, attr, mask, &changes)?;
            // The command that makes the target ready to receive carries the request.
            if number.is_some() {
                granted(options);
            }
            return Ok(number);
        }
        // An underlay queue pair has the attributes of the queue pair that it sends as.
        if qp.device_data.queues.is_underlay()
            && !(QpAttrMask::STATE | QpAttrMask::CUR_STATE).contains(mask)
        {
            return Err(Errno::INVAL);
        }
        granted(mlx5::modify_qp(&qp.object, attr, mask, &changes)?);
        if mask.contains(QpAttrMask::STATE) && attr.qp_state == QpState::INIT {
            let object = &qp.object;
            let (ctx, handle, number) = (object.context(), object.handle(), object.qp_num());
            if qp.device_data.queues.has_sig_pipelining() {
                stop_at_wrong_signatures(ctx, handle, number)?;
            }
            if (qp.device_data.memcpy.as_ref()).is_some_and(|memcpy| memcpy.by_qp) {
                enable_memcpy(ctx, handle, number)?;
            }
        }
        Ok(None)
    }

    unsafe fn state_changed(qp: &Qp, state: u32) {
        let packets = qp.public.qp_ex.qp_base.qp_type == IBV_QPT_RAW_PACKET;
        let announces = packets || qp.device_data.queues.is_underlay();
        if announces && state == IBV_QPS_RTR {
            // SAFETY: as below.
            if let Some(recv) = unsafe { qp.recv_queue().as_mut() } {
                locked(qp.single, &qp.recv_lock, || recv.announce());
            }
        }
        if state != IBV_QPS_RESET {
            return;
        }
        // The device counts from 0 again.
        // SAFETY: live, as the queue pair is; cells are used in their critical sections.
        unsafe {
            for cq in cqs(qp) {
                cq.clean(&qp.device_data.queues);
            }
            locked(qp.single, &qp.send_lock, || (*qp.send.get()).reset());
            if let Some(recv) = qp.recv_queue().as_mut() {
                locked(qp.single, &qp.recv_lock, || recv.reset());
            }
        }
    }

    fn sizes(qp: &Qp) -> Option<QpCap> {
        Some(qp.device_data.cap)
    }

    fn device_operations(qp_type: u32) -> u64 {
        match qp_type {
            IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_XRC_SEND | IBV_QPT_DRIVER => KEYS,
            _ => 0,
        }
    }

    fn requests_operations(options: &Options) -> bool {
        options.operations != 0
    }

    fn set_device_functions(qp: &mut Qp, _operations: u64, options: &Options) {
        let functions = mlx5dv_qp_ex::of(qp.addressing, options.operations);
        if functions.wr_mkey_configure.is_some() {
            set_batch_functions(&mut qp.public.qp_ex);
        }
        qp.device_data.functions = Functions::new(functions);
    }

    /// The device does not check which regions may be bound.
    fn accepts_bind(mr: &verbs_mr, access: u32) -> bool {
        may_be_bound(mr, access)
    }

    /// Discards unread completions.
    unsafe fn qp_destroyed(qp: &Qp) {
        // SAFETY: as the caller says.
        for cq in unsafe { cqs(qp) } {
            cq.detach(&qp.device_data.queues);
        }
    }
}

/// `struct ibv_ece`.
#[repr(C)]
pub struct ibv_ece {
    vendor_id: u32,
    options: u32,
    comp_mask: u32,
}

/// The vendor of these options.
const ECE_VENDOR: u32 = 0x15b3;

/// `ibv_set_ece`: requests the options at the next change of attributes. EINVAL for those of
/// another vendor, EOPNOTSUPP if the device has none.
pub unsafe extern "C" fn set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours, the application its options.
    entry::int(|| unsafe {
        let ece = &*ece;
        if ece.comp_mask != 0 || ece.vendor_id != ECE_VENDOR {
            return Err(Errno::INVAL);
        }
        if !CtxRef::of((*qp).context).mlx5()?.has_ece() {
            return Err(Errno::OPNOTSUPP);
        }
        let qp: &Qp = qp_of(qp);
        qp.device_data
            .ece
            .requested
            .store(ece.options, Ordering::Relaxed);
        qp.device_data.ece.granted.store(0, Ordering::Relaxed);
        Ok(())
    })
}

/// `ibv_query_ece`: the options that the device has, or granted of the peer's.
pub unsafe extern "C" fn query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours, the application room.
    entry::int(|| unsafe {
        let qp: &Qp = qp_of(qp);
        ece.write(ibv_ece {
            vendor_id: ECE_VENDOR,
            options: qp.device_data.ece.granted.load(Ordering::Relaxed),
            comp_mask: 0,
        });
        Ok(())
    })
}

/// `struct ibv_qp_rate_limit_attr`.
#[repr(C)]
pub struct ibv_qp_rate_limit_attr {
    rate_limit: u32,
    max_burst_sz: u32,
    typical_pkt_sz: u16,
    comp_mask: u32,
}

/// `ibv_modify_qp_rate_limit`. EINVAL for a limit of bursts without a rate, or that the
/// device does not have.
pub unsafe extern "C" fn modify_qp_rate_limit(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_rate_limit_attr,
) -> c_int {
    const LIMITS_BURSTS: u32 = 1;
    // SAFETY: libibverbs passes a live queue pair of ours, the application its attributes.
    entry::int(|| unsafe {
        let (ctx, attr) = (CtxRef::of((*qp).context), &*attr);
        let burst = (attr.max_burst_sz, attr.typical_pkt_sz);
        if attr.comp_mask != 0 {
            return Err(Errno::INVAL);
        }
        if burst != (0, 0) {
            let [.., flags] = ctx.mlx5()?.features(&ctx)?.pacing;
            if attr.rate_limit == 0 || flags & LIMITS_BURSTS == 0 {
                return Err(Errno::INVAL);
            }
        }
        let qp: &Qp = qp_of(qp);
        let rate = QpAttr {
            rate_limit: attr.rate_limit,
            ..QpAttr::default()
        };
        let changes = QpChanges {
            burst: Some(burst),
            ..QpChanges::default()
        };
        mlx5::modify_qp(&qp.object, &rate, QpAttrMask::RATE_LIMIT, &changes)?;
        Ok(())
    })
}

/// `ibv_query_qp_data_in_order`: 1 if the device writes the data of a message in order.
/// 0 if that is unknown, or the queue pair is not ready to send.
pub unsafe extern "C" fn query_qp_data_in_order(
    qp: *mut ibv_qp,
    _opcode: u32,
    flags: u32,
) -> c_int {
    /// `IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS` and `..._DEVICE_ONLY`.
    const SUPPORTED: u32 = 1 << 0 | 1 << 1;
    let query = || -> Result<bool, Errno> {
        // SAFETY: libibverbs passes a live queue pair of ours.
        let (qp, ctx, state): (&Qp, _, _) =
            unsafe { (qp_of(qp), CtxRef::of((*qp).context), (*qp).state) };
        let object = &qp.object;
        Ok(flags & !SUPPORTED == 0
            && state == IBV_QPS_RTS
            && Capabilities::query(&ctx)?.data_in_order
            && data_in_order(&ctx, object.handle(), object.qp_num())?)
    };
    // AssertUnwindSafe: nothing is changed.
    let answer = catch_unwind(AssertUnwindSafe(query));
    matches!(answer, Ok(Ok(true))).into()
}

#[cfg(test)]
mod tests {
    use super::scatter_to_cqe;

    #[test]
    fn scatter_to_cqe_setting_is_parsed() {
        assert!(scatter_to_cqe(None));
        assert!(scatter_to_cqe(Some("1".as_ref())));
        assert!(!scatter_to_cqe(Some("0".as_ref())));
    }
}
