//! Queue pairs: creation, states, destruction.

mod attr;

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::mem::MaybeUninit;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

use ring::BiasedLock;
use uverbs::{
    CqHandle, QpAttr, QpAttrMask, QpCap, QpCreateFlags, QpInit, QpOpen, QpType, Sge, SrqHandle,
    Udata, WqTableHandle,
};

use self::attr::{attr_from_c, attr_mask_from_c, attr_to_c, cap_to_c};
use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, borrowed, destroyed, require_handle};
use crate::entry;
use crate::errno::Errno;
use crate::events;
use crate::layout;
use crate::pd::{self, PdRef, pd_of, thread_domain_of};
use crate::post::RecvQueueOwner;
use crate::wr_ex::Batch;
use crate::writers::{RecvQueueOps, SendQueueOps};
use crate::{ah, cq, post, srq, wr_ex, xrc};

/// Send attributes of `ibv_qp_init_attr_ex`.
#[derive(Clone, Copy, Debug, Default)]
pub struct SendAttr {
    /// The operations that will be posted (`IBV_QP_EX_WITH_*`); `None`: any.
    pub operations: Option<u64>,
    /// Maximum bytes of the headers of a TSO packet.
    pub max_tso_header: u16,
    /// The source QP number of packets, if it is another queue pair's.
    pub source_qpn: Option<u32>,
}

/// What a device implements for queue pairs.
pub trait QpOps: pd::PdOps + ah::AhOps + cq::CqOps + srq::SrqOps {
    /// The send queue.
    type SendQueue: SendQueueOps<Address = Self::Address>;
    /// The receive queue.
    type RecvQueue: RecvQueueOps;
    /// The device's other data of a queue pair; read by any thread.
    type QpData;
    /// The device's options of a queue pair; the default is that of verbs.
    type QpOptions: Default;

    /// Creation flags that are passed to the kernel's driver, which checks them.
    const CREATE_FLAGS: QpCreateFlags = QpCreateFlags::empty();

    /// Whether `IBV_QPT_DRIVER` is a dynamically connected (DC) queue pair.
    const DC: bool = false;

    /// Whether raw packet queue pairs can be created.
    const PACKETS: bool = false;
    /// Whether a queue pair may send as another one (`source_qpn`).
    const UNDERLAY: bool = false;
    /// Whether `ibv_modify_qp` sets rate limits.
    const RATE_LIMITS: bool = false;

    /// Creates the kernel object and its queues. `thread` is the device's data of the
    /// thread domain; `domain` is the protection domain, or null.
    ///
    /// # Safety
    /// The attributes name live objects of the context, in `init` and in the
    /// pointers of `attr`.
    unsafe fn make_qp(
        ctx: &CtxRef,
        attr: &ibv_qp_init_attr,
        init: &QpInit,
        send_attr: &SendAttr,
        options: &Self::QpOptions,
        thread: Option<&Self::ThreadDomain>,
        domain: *mut ibv_pd,
    ) -> Result<NewQp<Self>, Errno>;

    /// Creates the kernel object of an RSS queue pair: the work queues of `init.table`
    /// receive its packets.
    ///
    /// # Safety
    /// The key of `hash` has the length that `hash` gives.
    unsafe fn make_rss_qp(
        _ctx: &CtxRef,
        _init: &QpInit,
        _hash: &ibv_rx_hash_conf,
        _options: &Self::QpOptions,
    ) -> Result<NewQp<Self>, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// Called when the queue pair has its final address, before its first use.
    fn set_final_address(_device_data: &mut Self::QpData) {}

    /// Opens an existing XRC target.
    fn open_qp(_ctx: &CtxRef, _init: &QpOpen) -> Result<NewQp<Self>, Errno> {
        Err(Errno::OPNOTSUPP)
    }

    /// Changes attributes by a command. Returns the QP number if the command assigned one.
    fn modify_qp(qp: &Qp<Self>, attr: &QpAttr, mask: QpAttrMask) -> Result<Option<u32>, Errno> {
        qp.object.modify(attr, mask, Udata::none())?;
        Ok(None)
    }

    /// Called after a command has changed the state.
    ///
    /// # Safety
    /// The queue pair is live.
    unsafe fn state_changed(qp: &Qp<Self>, state: u32);

    /// The capabilities of the queue pair, if the kernel does not know them.
    fn sizes(qp: &Qp<Self>) -> Option<QpCap>;

    /// Called after the kernel object was destroyed.
    ///
    /// # Safety
    /// The completion queues are live.
    unsafe fn qp_destroyed(_qp: &Qp<Self>) {}

    /// Rings the doorbell after a batch was published and the lock released; does nothing
    /// where publishing rings it. Returns an errno.
    fn ring(_qp: &Qp<Self>) -> c_int {
        0
    }

    /// Returns whether `ibv_post_send` accepts an atomic with these operands.
    /// Where the device checks them, a bad one completes with an error instead.
    fn accepts_atomic(_remote_addr: u64, _list: &[Sge]) -> bool {
        true
    }

    /// Returns whether a memory window with these rights may be bound to the
    /// region. Where the device checks that, a bad bind completes with an error
    /// instead.
    fn accepts_bind(_mr: &verbs_mr, _access: u32) -> bool {
        true
    }

    /// Device-specific operations (`IBV_QP_EX_WITH_*`) of a type of queue pair.
    fn device_operations(_qp_type: u32) -> u64 {
        0
    }

    /// Sets the functions of the requested device-specific operations. Called before the
    /// first use.
    fn set_device_functions(_qp: &mut Qp<Self>, _operations: u64, _options: &Self::QpOptions) {}

    /// Returns whether the options request operations of `ibv_wr_*`.
    fn requests_operations(_options: &Self::QpOptions) -> bool {
        false
    }
}

/// A new queue pair.
pub struct NewQp<D: QpOps> {
    /// The kernel object.
    pub object: uverbs::Qp<CtxRef>,
    /// The send queue.
    pub send: D::SendQueue,
    /// The receive queue; `None` with a shared receive queue.
    pub recv: Option<D::RecvQueue>,
    /// The device's other data.
    pub device_data: D::QpData,
    /// The actual capabilities.
    pub cap: QpCap,
}

/// The destination of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Addressing {
    /// The connected peer.
    Connected,
    /// An address handle and a queue pair.
    Datagram,
    /// A shared receive queue of the connected peer (XRC).
    Xrc,
    /// An address handle and a DC target.
    Dc,
}

/// Aligns the next field to a cache line.
#[repr(align(64))]
struct CacheLine;

/// A queue pair.
#[repr(C)]
pub struct Qp<D: QpOps> {
    /// The structure of libibverbs and applications.
    pub public: verbs_qp,
    /// The application promised one caller at a time: no locks.
    pub single: bool,
    /// The destination of its sends.
    pub addressing: Addressing,
    /// Opcodes without operands or destination, as a set of bits.
    pub simple: u16,
    /// Guards `send` and `batch`.
    pub send_lock: BiasedLock,
    /// The batch of `ibv_wr_*`.
    pub batch: UnsafeCell<Batch<D::SendQueue>>,
    /// The send queue.
    pub send: UnsafeCell<D::SendQueue>,
    /// The device's other data.
    pub device_data: D::QpData,
    // The lock and the fields that posting changes share a cache line: threads that post
    // concurrently transfer one line, not two, in half the time (p90 of `contend`).
    _line: CacheLine,
    /// Guards `recv`.
    pub recv_lock: BiasedLock,
    /// The receive queue; `None` with a shared receive queue.
    recv: UnsafeCell<Option<D::RecvQueue>>,
    /// The address of the receive queue, or null. A thread without the lock must not have a
    /// reference into the cell.
    recv_address: *mut D::RecvQueue,
    /// `recv_address` while the state allows receives, otherwise null: one load checks
    /// both.
    receiving: AtomicPtr<D::RecvQueue>,
    /// The kernel object.
    pub object: uverbs::Qp<CtxRef>,
    _pd: PdRef,
}

/// The provider's view of a queue pair.
///
/// # Safety
/// `qp` is a live queue pair of a context of ours and of this kind of device.
#[inline]
pub unsafe fn qp_of<'a, D: QpOps, T>(qp: *mut T) -> &'a Qp<D> {
    const { assert!(core::mem::offset_of!(Qp<D>, public) == 0) };
    // SAFETY: every ibv_qp and ibv_qp_ex of such a context begins a Qp.
    unsafe { &*qp.cast::<Qp<D>>() }
}

impl<D: QpOps> Qp<D> {
    /// Returns whether the state allows send work requests (IBA 10.3.1: from
    /// "ready to send" on; in the error states they are flushed).
    ///
    /// The state is the one that libibverbs keeps; the device may have moved
    /// on to an error state, where posting is allowed too.
    #[inline]
    pub fn may_send(&self) -> bool {
        self.public.qp_ex.qp_base.state >= IBV_QPS_RTS
    }

    /// The receive queue, if there is one and receives can be posted to it in this
    /// state (IBA 10.3.1: in all but "reset"); otherwise null.
    #[inline]
    pub fn receiving(&self) -> *mut D::RecvQueue {
        // Relaxed: the post is ordered after the state change by the application, or races with it.
        self.receiving.load(Ordering::Relaxed)
    }

    /// The receive queue, or null.
    pub fn recv_queue(&self) -> *mut D::RecvQueue {
        self.recv_address
    }

    /// Called after a command has changed the state.
    fn set_receiving(&self, state: u32) {
        let queue = match state {
            IBV_QPS_RESET => null_mut(),
            _ => self.recv_address,
        };
        self.receiving.store(queue, Ordering::Relaxed);
    }
}

impl<D: QpOps> RecvQueueOwner for Qp<D> {
    type Queue = D::RecvQueue;

    #[inline]
    fn lock(&self) -> &BiasedLock {
        &self.recv_lock
    }
    #[inline]
    fn single(&self) -> bool {
        self.single
    }
}

/// Parent of a queue pair: an XRC domain for an XRC target, otherwise a
/// protection domain. The other of the two is null.
pub struct Domain {
    /// The device.
    pub context: *mut ibv_context,
    /// The protection domain.
    pub pd: *mut ibv_pd,
    /// The XRC domain.
    pub xrcd: *mut ibv_xrcd,
}

/// Clears attributes that the QP type does not have: an XRC initiator has no receive queue,
/// a target no queues. EINVAL if a required attribute is missing; the device checks those
/// of `IBV_QPT_DRIVER`.
fn required_attr<D: QpOps>(attr: &ibv_qp_init_attr) -> Result<ibv_qp_init_attr, Errno> {
    let mut attr = *attr;
    match attr.qp_type {
        IBV_QPT_XRC_SEND if D::XRC => {
            (attr.recv_cq, attr.srq) = (null_mut(), null_mut());
            (attr.cap.max_recv_wr, attr.cap.max_recv_sge) = (0, 0);
        }
        IBV_QPT_XRC_RECV if D::XRC => {
            (attr.send_cq, attr.recv_cq, attr.srq) = (null_mut(), null_mut(), null_mut());
            attr.cap = ibv_qp_cap::default();
            return Ok(attr);
        }
        IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV => return Err(Errno::OPNOTSUPP),
        IBV_QPT_DRIVER if D::DC => return Ok(attr),
        _ if attr.recv_cq.is_null() => return Err(Errno::INVAL),
        _ => {}
    }
    if attr.send_cq.is_null() {
        return Err(Errno::INVAL);
    }
    Ok(attr)
}

/// Creates a queue pair, and sets `init_attr.cap` to the actual capabilities.
///
/// # Safety
/// The domain is live, and the attributes name live objects of its context.
unsafe fn create<D: QpOps>(
    domain: Domain,
    init_attr: &mut ibv_qp_init_attr,
    comp_mask: u32,
    flags: QpCreateFlags,
    send_attr: &SendAttr,
    options: &D::QpOptions,
) -> Result<Box<MaybeUninit<Qp<D>>>, Errno> {
    let storage = try_box(MaybeUninit::<Qp<D>>::uninit()).map_err(|(_, errno)| errno)?;
    let attr = required_attr::<D>(init_attr)?;
    // SAFETY: the context is open, as the caller says.
    let (ctx, async_fd) = unsafe {
        (
            CtxRef::of(domain.context),
            borrowed((*domain.context).async_fd),
        )
    };
    // SAFETY: null or live, as the caller says.
    let (send_cq, recv_cq, srq, pd, xrcd) = unsafe {
        (
            attr.send_cq.as_ref().map(|cq| CqHandle(cq.handle)),
            attr.recv_cq.as_ref().map(|cq| CqHandle(cq.handle)),
            attr.srq.as_ref().map(|srq| SrqHandle(srq.handle)),
            (!domain.pd.is_null()).then(|| pd_of(domain.pd).handle()),
            (!domain.xrcd.is_null()).then(|| xrc::handle(domain.xrcd)),
        )
    };
    let cap = &attr.cap;
    let init = QpInit {
        qp_type: QpType(attr.qp_type as _),
        pd,
        xrcd,
        send_cq,
        recv_cq,
        srq,
        cap: QpCap {
            max_send_wr: cap.max_send_wr,
            max_recv_wr: cap.max_recv_wr,
            max_send_sge: cap.max_send_sge,
            max_recv_sge: cap.max_recv_sge,
            max_inline_data: cap.max_inline_data,
        },
        sq_sig_all: attr.sq_sig_all != 0,
        flags,
        source_qpn: send_attr.source_qpn,
        user_handle: storage.as_ptr().expose_provenance() as u64,
        async_fd,
        ..QpInit::default()
    };
    // SAFETY: as the caller says.
    let new_qp = unsafe {
        let thread = domain
            .pd
            .as_ref()
            .and_then(|_| pd_of(domain.pd).thread::<D>());
        D::make_qp(&ctx, &attr, &init, send_attr, options, thread, domain.pd)?
    };
    init_attr.cap = cap_to_c(&new_qp.cap);
    // SAFETY: as the caller says.
    Ok(unsafe { init_qp(storage, domain, &attr, comp_mask, new_qp) })
}

/// Creates an RSS queue pair: work queues receive its packets.
///
/// # Safety
/// The domain is live, and the attributes name live objects of its context.
unsafe fn create_rss<D: QpOps>(
    domain: Domain,
    attr: &ibv_qp_init_attr_ex,
    flags: QpCreateFlags,
    options: &D::QpOptions,
) -> Result<Box<MaybeUninit<Qp<D>>>, Errno> {
    let storage = try_box(MaybeUninit::<Qp<D>>::uninit()).map_err(|(_, errno)| errno)?;
    let cap = &attr.cap;
    let queues = cap.max_send_wr != 0 || cap.max_recv_wr != 0 || cap.max_recv_sge != 0;
    let others = !attr.send_cq.is_null() || !attr.recv_cq.is_null() || !attr.srq.is_null();
    if attr.qp_type != IBV_QPT_RAW_PACKET || attr.rwq_ind_tbl.is_null() || queues || others {
        return Err(Errno::INVAL);
    }
    // SAFETY: as the caller says.
    let (ctx, async_fd, pd, table) = unsafe {
        (
            CtxRef::of(domain.context),
            borrowed((*domain.context).async_fd),
            pd_of(domain.pd).handle(),
            WqTableHandle((*attr.rwq_ind_tbl).ind_tbl_handle as u32),
        )
    };
    let init = QpInit {
        qp_type: QpType::RAW_PACKET,
        pd: Some(pd),
        table: Some(table),
        flags,
        user_handle: storage.as_ptr().expose_provenance() as u64,
        async_fd,
        ..QpInit::default()
    };
    // SAFETY: as the caller says.
    unsafe {
        let new_qp = D::make_rss_qp(&ctx, &init, &attr.rx_hash_conf, options)?;
        // The basic attributes are the extended ones' beginning.
        let attr = &*(&raw const *attr).cast::<ibv_qp_init_attr>();
        Ok(init_qp(storage, domain, attr, 0, new_qp))
    }
}

/// Initialises the C object of a new queue pair.
///
/// # Safety
/// The domain is live, and the attributes name live objects of its context.
pub unsafe fn init_qp<D: QpOps>(
    mut storage: Box<MaybeUninit<Qp<D>>>,
    domain: Domain,
    attr: &ibv_qp_init_attr,
    comp_mask: u32,
    new_qp: NewQp<D>,
) -> Box<MaybeUninit<Qp<D>>> {
    let Domain { context, pd, xrcd } = domain;
    // SAFETY: zeros are valid for the public part: null pointers, absent
    // functions, integers.
    let mut public: verbs_qp = unsafe { core::mem::zeroed() };
    let base = &mut public.qp_ex.qp_base;
    base.context = context;
    base.qp_context = attr.qp_context;
    base.pd = pd;
    base.send_cq = attr.send_cq;
    base.recv_cq = attr.recv_cq;
    base.srq = attr.srq;
    base.handle = new_qp.object.handle().0;
    base.qp_num = new_qp.object.qp_num();
    base.state = IBV_QPS_RESET;
    base.qp_type = attr.qp_type;
    let layout = layout::current();
    if xrcd.is_null() {
        layout.set_qp_comp_mask(&mut public, comp_mask);
    } else {
        layout.set_qp_comp_mask(&mut public, comp_mask | VERBS_QP_XRCD);
        layout.set_qp_xrcd(&mut public, xrcd);
    }
    let addressing = match attr.qp_type {
        IBV_QPT_UD => Addressing::Datagram,
        IBV_QPT_XRC_SEND => Addressing::Xrc,
        IBV_QPT_DRIVER => Addressing::Dc,
        _ => Addressing::Connected,
    };
    let qp = storage.write(Qp {
        public,
        // SAFETY: null or live, as the caller says.
        single: unsafe { thread_domain_of(pd) },
        addressing,
        simple: match addressing {
            Addressing::Connected => post::SIMPLE,
            _ => 0,
        },
        send_lock: BiasedLock::new(),
        batch: UnsafeCell::new(Batch::default()),
        send: UnsafeCell::new(new_qp.send),
        device_data: new_qp.device_data,
        _line: CacheLine,
        recv_lock: BiasedLock::new(),
        recv: UnsafeCell::new(new_qp.recv),
        recv_address: null_mut(),
        receiving: AtomicPtr::new(null_mut()),
        object: new_qp.object,
        // SAFETY: as the caller says.
        _pd: unsafe { PdRef::new(pd) },
    });
    // SAFETY: the object is not used yet, and has its final address.
    if let Some(recv) = unsafe { &mut *qp.recv.get() } {
        qp.recv_address = recv;
    }
    D::set_final_address(&mut qp.device_data);
    let base = &raw mut qp.public.qp_ex.qp_base;
    // SAFETY: the object is not used yet.
    unsafe { events::init(&raw mut (*base).mutex, &raw mut (*base).cond) };
    storage
}

/// `ibv_create_qp`.
pub unsafe extern "C" fn create_qp<D: QpOps>(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: libibverbs passes a live domain of ours and the application's
    // attributes.
    entry::pointer(|| unsafe {
        let domain = Domain {
            context: (*pd).context,
            pd,
            xrcd: null_mut(),
        };
        // `ibv_create_qp` has no member for the XRC domain.
        if D::XRC && (*attr).qp_type == IBV_QPT_XRC_RECV {
            return Err(Errno::INVAL);
        }
        Ok(Box::into_raw(create::<D>(
            domain,
            &mut *attr,
            0,
            QpCreateFlags::empty(),
            &SendAttr::default(),
            &D::QpOptions::default(),
        )?)
        .cast())
    })
}

/// `ibv_create_qp_ex`. EOPNOTSUPP for attributes, flags and operations that
/// the device does not have for this type of queue pair.
pub unsafe extern "C" fn create_qp_ex<D: QpOps>(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: libibverbs passes an open context and the application's attributes.
    entry::pointer(|| unsafe { create_qp_with::<D>(context, attr, &D::QpOptions::default()) })
}

/// As [`create_qp_ex`], with options of the device.
///
/// # Errors
/// As there.
///
/// # Safety
/// An open context of ours, and the application's attributes.
pub unsafe fn create_qp_with<D: QpOps>(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    options: &D::QpOptions,
) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: libibverbs passes the application's attributes, of which only
    // the announced members are read. They begin as `ibv_qp_init_attr` does.
    unsafe {
        let (flags, send_attr) = parse_extended::<D>(attr, options)?;
        let domain = domain_of::<D>(context, attr)?;
        let rss_members = (*attr).comp_mask & RSS_MEMBERS;
        if rss_members != 0 {
            if rss_members != RSS_MEMBERS {
                return Err(Errno::INVAL);
            }
            if send_attr.operations.is_some() || send_attr.max_tso_header != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            return Ok(Box::into_raw(create_rss::<D>(domain, &*attr, flags, options)?).cast());
        }
        let basic = &mut *attr.cast();
        let storage = create::<D>(domain, basic, VERBS_QP_EX, flags, &send_attr, options)?;
        // From here on `destroy_qp` frees it.
        let raw_qp = Box::into_raw(storage).cast::<Qp<D>>();
        if let Some(operations) = send_attr.operations {
            let qp = &mut *raw_qp;
            let batch = qp.batch.get_mut();
            let reserved = batch.reserve(qp.addressing, &(*attr).cap, send_attr.max_tso_header);
            if let Err(errno) = reserved {
                destroy_qp::<D>(raw_qp.cast());
                return Err(errno);
            }
            // All operations of the type: programs call functions that they did not request,
            // which works with libmlx5.
            let all = wr_ex::operations::<D>((*attr).qp_type);
            wr_ex::set_functions::<D>(&mut qp.public, qp.addressing, all);
            D::set_device_functions(qp, operations, options);
        }
        Ok(raw_qp.cast())
    }
}

/// Members of the attributes that an RSS queue pair needs.
const RSS_MEMBERS: u32 = IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH;

/// Checks what the extended attributes have besides the basic ones.
///
/// # Safety
/// The basic attributes and the announced members are readable; no others are read.
unsafe fn parse_extended<D: QpOps>(
    attr: *const ibv_qp_init_attr_ex,
    options: &D::QpOptions,
) -> Result<(QpCreateFlags, SendAttr), Errno> {
    let members = IBV_QP_INIT_ATTR_PD
        | IBV_QP_INIT_ATTR_CREATE_FLAGS
        | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
        | if D::XRC { IBV_QP_INIT_ATTR_XRCD } else { 0 }
        | if D::PACKETS {
            RSS_MEMBERS | IBV_QP_INIT_ATTR_MAX_TSO_HEADER
        } else {
            0
        };
    // SAFETY: as the caller says.
    unsafe {
        let (comp_mask, qp_type) = ((*attr).comp_mask, (*attr).qp_type);
        let has = |member| comp_mask & member != 0;
        let create_flags = match has(IBV_QP_INIT_ATTR_CREATE_FLAGS) {
            true => (*attr).create_flags,
            false => 0,
        };
        // The number is passed to the kernel instead of the flag.
        let flags = match D::UNDERLAY {
            true => create_flags & !IBV_QP_CREATE_SOURCE_QPN,
            false => create_flags,
        };
        let source_qpn = (flags != create_flags).then(|| (*attr).source_qpn);
        let flags = QpCreateFlags::from_bits_retain(flags);
        if comp_mask & !members != 0 || !D::CREATE_FLAGS.contains(flags) {
            return Err(Errno::OPNOTSUPP);
        }
        if source_qpn.is_some() && qp_type != IBV_QPT_UD {
            return Err(Errno::INVAL);
        }
        let max_tso_header = match has(IBV_QP_INIT_ATTR_MAX_TSO_HEADER) {
            true if qp_type != IBV_QPT_RAW_PACKET => return Err(Errno::INVAL),
            true => (*attr).max_tso_header,
            false => 0,
        };
        let operations = if has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) {
            let send_ops_flags = (*attr).send_ops_flags;
            if send_ops_flags & !wr_ex::operations::<D>(qp_type) != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            Some(send_ops_flags)
        } else {
            D::requests_operations(options).then_some(0)
        };
        if source_qpn.is_some() && operations.is_some() {
            return Err(Errno::OPNOTSUPP);
        }
        let send_attr = SendAttr {
            operations,
            max_tso_header,
            source_qpn,
        };
        Ok((flags, send_attr))
    }
}

/// Returns what the queue pair belongs to: a target of XRC to an XRC domain, others to a
/// protection domain. EINVAL if it is missing.
///
/// # Safety
/// As for [`parse_extended`].
unsafe fn domain_of<D: QpOps>(
    context: *mut ibv_context,
    attr: *const ibv_qp_init_attr_ex,
) -> Result<Domain, Errno> {
    let mut domain = Domain {
        context,
        pd: null_mut(),
        xrcd: null_mut(),
    };
    // SAFETY: as the caller says.
    unsafe {
        let comp_mask = (*attr).comp_mask;
        if D::XRC && (*attr).qp_type == IBV_QPT_XRC_RECV {
            let xrcd = (comp_mask & IBV_QP_INIT_ATTR_XRCD != 0).then(|| (*attr).xrcd);
            domain.xrcd = xrcd.filter(|xrcd| !xrcd.is_null()).ok_or(Errno::INVAL)?;
        } else {
            let pd = (comp_mask & IBV_QP_INIT_ATTR_PD != 0).then(|| (*attr).pd);
            domain.pd = pd.filter(|pd| !pd.is_null()).ok_or(Errno::INVAL)?;
        }
    }
    Ok(domain)
}

const _: () = {
    use core::mem::offset_of;
    // The basic attributes are the extended ones' beginning.
    assert!(offset_of!(ibv_qp_init_attr_ex, cap) == offset_of!(ibv_qp_init_attr, cap));
    assert!(
        offset_of!(ibv_qp_init_attr_ex, sq_sig_all) == offset_of!(ibv_qp_init_attr, sq_sig_all)
    );
};

/// `ibv_modify_qp`. libibverbs keeps the state.
pub unsafe extern "C" fn modify_qp<D: QpOps>(
    ibqp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours and the
    // application's attributes, of which the kernel uses those in the mask.
    entry::int(|| unsafe {
        let attr_mask = attr_mask_from_c(mask, D::RATE_LIMITS)?;
        let from = &*attr;
        let qp: &Qp<D> = qp_of(ibqp);
        require_handle((*ibqp).handle, qp.object.handle().0)?;
        let mut to = attr_from_c(from);
        if attr_mask.contains(QpAttrMask::RATE_LIMIT) {
            to.rate_limit = from.rate_limit;
        }
        if let Some(number) = D::modify_qp(qp, &to, attr_mask)? {
            (*ibqp).qp_num = number;
        }
        if mask as u32 & IBV_QP_STATE != 0 {
            after_state_change(qp, from.qp_state);
        }
        Ok(())
    })
}

/// Called after a command has changed the state.
///
/// # Safety
/// The queue pair is live.
unsafe fn after_state_change<D: QpOps>(qp: &Qp<D>, state: u32) {
    // SAFETY: as the caller says.
    unsafe { D::state_changed(qp, state) };
    qp.set_receiving(state);
}

/// Applies a state change that did not come from `ibv_modify_qp`; sets the public state,
/// too.
///
/// # Safety
/// The queue pair is live, and no other call changes it.
pub unsafe fn set_state<D: QpOps>(qp: *mut ibv_qp, state: u32) {
    // SAFETY: as the caller says.
    unsafe {
        after_state_change(qp_of::<D, _>(qp), state);
        (*qp).state = state;
    }
}

/// `ibv_query_qp`.
pub unsafe extern "C" fn query_qp<D: QpOps>(
    ibqp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours and room for the
    // answers.
    entry::int(|| unsafe {
        let qp: &Qp<D> = qp_of(ibqp);
        require_handle((*ibqp).handle, qp.object.handle().0)?;
        let (mut from, mut query_init) = qp.object.query(attr_mask_from_c(mask, false)?)?;
        if let Some(cap) = D::sizes(qp) {
            from.cap = cap;
            query_init.cap = cap;
        }
        attr_to_c(&from, &mut *attr);
        *init = ibv_qp_init_attr {
            qp_context: (*ibqp).qp_context,
            send_cq: (*ibqp).send_cq,
            recv_cq: (*ibqp).recv_cq,
            srq: (*ibqp).srq,
            cap: cap_to_c(&query_init.cap),
            qp_type: (*ibqp).qp_type,
            sq_sig_all: query_init.sq_sig_all.into(),
        };
        Ok(())
    })
}

/// `ibv_destroy_qp`. EBUSY, and the queue pair is unchanged, while it is in a
/// multicast group. Waits until the application has acknowledged every event that
/// it read.
pub unsafe extern "C" fn destroy_qp<D: QpOps>(ibqp: *mut ibv_qp) -> c_int {
    // SAFETY: libibverbs passes a live queue pair of ours, which no other call
    // uses any more except those that acknowledge events; its completion
    // queues are live as long as it is.
    entry::int(|| unsafe {
        let qp: &Qp<D> = qp_of(ibqp);
        require_handle((*ibqp).handle, qp.object.handle().0)?;
        match qp.object.destroy() {
            Ok(events_reported) => events::wait_qp(ibqp, events_reported),
            Err(error) => destroyed(Err(error.into()))?,
        }
        D::qp_destroyed(qp_of(ibqp));
        drop(Box::from_raw(ibqp.cast::<Qp<D>>()));
        Ok(())
    })
}
