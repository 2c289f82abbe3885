//! Queue pairs: the kernel object and its queues.

use std::sync::Arc;

use mlx5_abi::{
    AllocPdResp, BurstInfo, CreateQp, CreateQpResp, MODIFY_QP_OUT_OF_ORDER, ModifyQp, ModifyQpResp,
    QP_FLAG_ALLOW_SCATTER_CQE, QP_FLAG_DCI_STREAM, QP_FLAG_PACKET_BASED_CREDIT_MODE,
    QP_FLAG_SCATTER_CQE, QP_FLAG_TIR_ALLOW_SELF_LB_MC, QP_FLAG_TIR_ALLOW_SELF_LB_UC,
    QP_FLAG_TUNNEL_OFFLOADS, QP_FLAG_TYPE_DCI, QP_FLAG_TYPE_DCT, QP_FLAG_UAR_PAGE_INDEX,
};
use uverbs::{
    Context, ContextRef, PdHandle, Qp, QpAttr, QpAttrMask, QpCap, QpInit, QpOpen, QpState, QpType,
    Udata,
};
use zerocopy::IntoBytes;

use crate::ioctl;
use crate::memory::{Purpose, QueueAllocator};
use crate::plan::{KeyChanges, RecvPlan, SendPlan};
use crate::qp_table::NUMBER;
use crate::shared::SrqEntries;
use crate::{CreateError, DeviceContext, QpQueues, RecvQueue, SendQueue, Service, ThreadUar};

/// Creates a protection domain. Returns its handle, and the device's number of it.
///
/// # Errors
/// Those of ALLOC_PD.
pub fn alloc_pd(context: &Context) -> Result<(PdHandle, u32), CreateError> {
    // The driver fails without room for its answer.
    let mut answer = AllocPdResp::default();
    let handle = uverbs::pd::alloc(context, Udata::output(answer.as_mut_bytes()))?;
    Ok((handle, answer.pdn))
}

/// Finds a protection domain with that handle, possibly created by another process.
/// Returns the device's number of it.
///
/// # Errors
/// Those of PD_QUERY.
pub fn find_pd(context: &Context, pd: PdHandle) -> Result<u32, CreateError> {
    Ok(ioctl::query_pd(context, pd)?)
}

pub(crate) fn flag(set: bool, bit: u32) -> u32 {
    if set { bit } else { 0 }
}

/// A queue pair of dynamic connections (DC), of type [`QpType::DRIVER`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DcType {
    /// Sends to any target; receives nothing.
    Initiator {
        /// With streams: a failed work request stops its stream only.
        streams: Option<DciStreams>,
    },
    /// Receives, into a shared receive queue, from any initiator that has the key.
    /// It gets its number when it becomes ready to receive ([`modify_dct`]).
    Target {
        /// The key.
        access_key: u64,
    },
}

/// Sizes of an initiator's streams, as binary logarithms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DciStreams {
    /// Number of streams.
    pub log_concurrent: u8,
    /// Number of streams that may fail before the queue pair does.
    pub log_errored: u8,
}

/// The version of enhanced connection options that a queue pair is created with, so that
/// the device reports those that it has.
const ECE_VERSION: u32 = 1 << 28;

/// Driver data of a change of a queue pair's attributes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpChanges {
    /// Enhanced connection options (ECE) that are asked for, as bits; 0: none.
    pub ece: u32,
    /// With a rate limit: maximum burst size and typical packet size in bytes.
    pub burst: Option<(u32, u16)>,
    /// Receives may be consumed in any order, with the state INIT
    /// ([`QpOptions::out_of_order`]).
    pub out_of_order: bool,
}

/// Changes attributes of a queue pair. Returns the enhanced connection options that the
/// device grants of the requested ones.
///
/// # Errors
/// As [`Qp::modify`].
pub fn modify_qp<C: ContextRef>(
    qp: &Qp<C>,
    attr: &QpAttr,
    mask: QpAttrMask,
    changes: &QpChanges,
) -> Result<u32, CreateError> {
    if *changes == QpChanges::default() {
        qp.modify(attr, mask, Udata::none())?;
        return Ok(0);
    }
    Ok(modify_with(qp, attr, mask, changes)?.ece_options)
}

fn modify_with<C: ContextRef>(
    qp: &Qp<C>,
    attr: &QpAttr,
    mask: QpAttrMask,
    changes: &QpChanges,
) -> Result<ModifyQpResp, CreateError> {
    let (max_burst_sz, typical_pkt_sz) = changes.burst.unwrap_or_default();
    let request = ModifyQp {
        comp_mask: flag(changes.out_of_order, MODIFY_QP_OUT_OF_ORDER),
        burst_info: BurstInfo {
            max_burst_sz,
            typical_pkt_sz,
            reserved: 0,
        },
        ece_options: changes.ece,
    };
    let mut answer = ModifyQpResp::default();
    // SAFETY: the request names no address.
    let udata = unsafe { Udata::new(request.as_bytes(), answer.as_mut_bytes()) };
    qp.modify(attr, mask, udata)?;
    Ok(answer)
}

/// Changes attributes of a DC target. Returns its number once it is ready to receive, and
/// the options as [`modify_qp`] does.
///
/// # Errors
/// As [`Qp::modify`]; [`CreateError::BadAnswer`] without a number.
pub fn modify_dct<C: ContextRef>(
    target: &Qp<C>,
    attr: &QpAttr,
    mask: QpAttrMask,
    changes: &QpChanges,
) -> Result<(Option<u32>, u32), CreateError> {
    const LENGTH: u32 = 8;
    let answer = modify_with(target, attr, mask, changes)?;
    if !mask.contains(QpAttrMask::STATE) || attr.qp_state != QpState::RTR {
        return Ok((None, answer.ece_options));
    }
    if answer.response_length < LENGTH {
        return Err(CreateError::BadAnswer {
            what: "no number of a DC target",
        });
    }
    Ok((Some(answer.dctn & NUMBER), answer.ece_options))
}

/// Limits of TCP segmentation offload (TSO).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TsoLimits {
    /// Maximum bytes of the headers, from Ethernet to TCP; 0: no TSO.
    pub max_headers: u16,
    /// Maximum bytes of data, a limit of the device ([`crate::Features::segmentation`]).
    pub longest: u32,
}

/// How a queue pair receives raw packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketOptions {
    /// Also receives unicast packets that queue pairs of the same context send.
    pub self_loopback_unicast: bool,
    /// Also receives multicast packets that queue pairs of the same context send.
    pub self_loopback_multicast: bool,
    /// Checksums and hashes may be those of a packet inside a tunnel
    /// ([`crate::Features::tunnels`]).
    pub tunnels: bool,
}

impl PacketOptions {
    /// The flags of CREATE_QP.
    pub(crate) fn flags(self) -> u32 {
        flag(self.self_loopback_unicast, QP_FLAG_TIR_ALLOW_SELF_LB_UC)
            | flag(self.self_loopback_multicast, QP_FLAG_TIR_ALLOW_SELF_LB_MC)
            | flag(self.tunnels, QP_FLAG_TUNNEL_OFFLOADS)
    }
}

/// Options of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpOptions {
    /// Which memory keys work requests may change.
    pub keys: KeyChanges,
    /// CQEs may carry short data of receives, reads and atomics, which polling scatters: the
    /// caller keeps the memory valid until then. Otherwise the device writes all data.
    pub scatter_to_cqe: bool,
    /// CQEs may carry data although not every send is signalled
    /// (`MLX5_QP_FLAG_ALLOW_SCATTER_CQE`).
    pub allow_scatter_to_cqe: bool,
    /// Credits are counted by packets, not by messages.
    pub packet_credits: bool,
    /// Work requests may copy in local memory
    /// ([`SendQueue::push_memcpy`](crate::SendQueue::push_memcpy)).
    pub memcpy: bool,
    /// Raw WQEs of the program may be posted
    /// ([`SendQueue::push_raw`](crate::SendQueue::push_raw)).
    pub raw_wqe: bool,
    /// The queue pair stops at a wrong signature, and later work requests may be cancelled
    /// ([`SendQueue::cancel`](crate::SendQueue::cancel)).
    pub sig_pipelining: bool,
    /// The device computes and checks the checksums of raw packets.
    pub checksums: bool,
    /// Receives complete in any order. Each change to the state INIT has to request it
    /// ([`QpChanges::out_of_order`]).
    pub out_of_order: bool,
    /// Limits of TSO.
    pub segmentation: TsoLimits,
    /// How raw packets are received.
    pub packets: PacketOptions,
    /// Whether it is a DC initiator or target, if its type is [`QpType::DRIVER`].
    pub dc_type: Option<DcType>,
}

impl Default for QpOptions {
    /// The options that every device supports.
    fn default() -> Self {
        Self {
            keys: KeyChanges::Windows,
            scatter_to_cqe: true,
            allow_scatter_to_cqe: false,
            packet_credits: false,
            memcpy: false,
            raw_wqe: false,
            sig_pipelining: false,
            checksums: false,
            out_of_order: false,
            segmentation: TsoLimits::default(),
            packets: PacketOptions::default(),
            dc_type: None,
        }
    }
}

/// Numbers of the device objects behind a raw packet queue pair. The driver reports them
/// to DevX contexts only ([`crate::ioctl::devx`]); otherwise they are 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketObjects {
    /// Transport interface receive: destination of flows.
    pub tir: u32,
    /// Transport interface send.
    pub tis: u32,
    /// Receive queue.
    pub rq: u32,
    /// Send queue.
    pub sq: u32,
    /// Address of the TIR in the device's memory.
    pub tir_address: u64,
}

impl From<&CreateQpResp> for PacketObjects {
    fn from(answer: &CreateQpResp) -> Self {
        Self {
            tir: answer.tirn,
            tis: answer.tisn,
            rq: answer.rqn,
            sq: answer.sqn,
            tir_address: answer.tir_icm_addr,
        }
    }
}

/// A queue pair. The parts are public so that the caller
/// can put each under its own lock or owner.
///
/// The caller attaches `queues` to the completion queues before the first use, and
/// detaches it after the queue pair is destroyed
/// ([`crate::CqeRing::attach`]). The kernel object is destroyed before the
/// queues' memory is freed.
#[derive(Debug)]
pub struct QueuePair<C: ContextRef> {
    /// The kernel object.
    pub object: Qp<C>,
    /// The send queue; without entries if none were requested.
    pub send: SendQueue,
    /// The receive queue; `None` with a shared receive queue, and for XRC.
    pub recv: Option<RecvQueue>,
    /// The entry in the QP table.
    pub queues: Arc<QpQueues>,
    /// The actual capabilities.
    pub cap: QpCap,
    /// The device objects, if its type is [`QpType::RAW_PACKET`].
    pub packets: PacketObjects,
    /// Enhanced connection options that the device has, as bits.
    pub ece: u32,
}

/// Returns the service of a new queue pair.
fn service(init: &QpInit, dc_type: Option<DcType>) -> Result<Service, CreateError> {
    Ok(match (init.qp_type, dc_type) {
        (QpType::RC, None) => Service::ReliableConnection,
        (QpType::UC, None) => Service::UnreliableConnection,
        (QpType::UD, None) if init.source_qpn.is_some() => Service::Underlay,
        (QpType::UD, None) => Service::Datagram,
        (QpType::RAW_PACKET, None) => Service::Packet,
        (QpType::XRC_INI, None) => Service::XrcInitiator,
        (QpType::DRIVER, Some(DcType::Initiator { .. })) => Service::DcInitiator,
        (QpType::XRC_TGT, None) | (QpType::DRIVER, Some(DcType::Target { .. })) => Service::Target,
        _ => {
            return Err(CreateError::Unsupported {
                what: "a queue pair of this type",
            });
        }
    })
}

/// Returns the driver data of a new queue pair, without the sizes of its queues.
fn driver_data(
    queues: &QpQueues,
    service: Service,
    options: &QpOptions,
    uar_page: Option<u32>,
) -> CreateQp {
    let (kind, access_key, streams) = match options.dc_type {
        None => (0, 0, None),
        Some(DcType::Target { access_key }) => (QP_FLAG_TYPE_DCT, access_key, None),
        Some(DcType::Initiator { streams }) => (QP_FLAG_TYPE_DCI, 0, streams),
    };
    let DciStreams {
        log_concurrent,
        log_errored,
    } = streams.unwrap_or_default();
    CreateQp {
        buf_addr: queues.memory.entries.address(),
        db_addr: queues.memory.records.address(),
        flags: flag(queues.scatter_to_cqe, QP_FLAG_SCATTER_CQE)
            | flag(options.allow_scatter_to_cqe, QP_FLAG_ALLOW_SCATTER_CQE)
            | flag(options.packet_credits, QP_FLAG_PACKET_BASED_CREDIT_MODE)
            | flag(uar_page.is_some(), QP_FLAG_UAR_PAGE_INDEX)
            | flag(streams.is_some(), QP_FLAG_DCI_STREAM)
            | options.packets.flags()
            | kind,
        bfreg_index: uar_page.unwrap_or(0),
        uidx: queues.user_index(),
        access_key: match service.has_packets() {
            true => queues.send_at().as_ptr().expose_provenance() as u64,
            false => access_key,
        },
        dci_streams: mlx5_abi::DciStreams {
            log_num_concurent: log_concurrent,
            log_num_errored: log_errored,
        },
        ..CreateQp::default()
    }
}

impl<C: ContextRef> QueuePair<C> {
    /// Creates a queue pair with the default [`QpOptions`].
    ///
    /// # Errors
    /// As [`QueuePair::create_with`].
    pub fn create(
        context: &C,
        device: &DeviceContext,
        init: &QpInit,
        shared: Option<Arc<SrqEntries>>,
    ) -> Result<Self, CreateError> {
        let options = QpOptions::default();
        Self::create_with(context, device, init, shared, &options, None, None)
    }

    /// Creates a queue pair. Its capacities are `cap`, at least the requested
    /// ones. `shared` is the queue that `init.srq` names.
    ///
    /// The memory comes from `allocator`, if there is one.
    ///
    /// With `thread_uar`, its doorbells use that register: posts to all queue pairs of the
    /// register are made one at a time.
    ///
    /// # Errors
    /// [`CreateError::Unsupported`] for a type other than RC, UC, UD, raw packets and
    /// those of XRC and DC; [`CreateError::TooLarge`]; those of memory and of CREATE_QP. Nothing is
    /// left behind.
    pub fn create_with(
        context: &C,
        device: &DeviceContext,
        init: &QpInit,
        shared: Option<Arc<SrqEntries>>,
        options: &QpOptions,
        thread_uar: Option<&ThreadUar<C>>,
        allocator: Option<&dyn QueueAllocator>,
    ) -> Result<Self, CreateError> {
        let service = service(init, options.dc_type)?;
        let mut init = *init;
        if !service.receives() {
            (init.cap.max_recv_wr, init.cap.max_recv_sge) = (0, 0);
        }
        let max_headers = options.segmentation.max_headers;
        let send = SendPlan::new(
            &init.cap,
            service,
            &device.limits,
            options.keys,
            max_headers,
        )?;
        let has_recv_queue = shared.is_none() && service.receives();
        let recv = if has_recv_queue {
            RecvPlan::new_for(&init.cap, &device.limits, options.out_of_order)?
        } else {
            RecvPlan::default()
        };
        let uar = match thread_uar {
            // A target has no doorbell.
            _ if service == Service::Target => None,
            Some(thread_uar) => Some(thread_uar.qp_uar()),
            None => device.allocate_uar(context),
        };
        let index = device.user_index()?;
        let allocator = allocator.map(|allocator| (Purpose::QueuePair, allocator));
        let mut queues = QpQueues::new(index, service, send, recv, shared, allocator)?;
        queues.scatter_to_cqe = options.scatter_to_cqe && !service.has_packets();
        queues.memcpy = options.memcpy;
        queues.raw_wqe = options.raw_wqe;
        queues.sig_pipelining = options.sig_pipelining;
        queues.out_of_order = options.out_of_order;
        queues.set_checksums(options.checksums);
        queues.segmentation = options.segmentation;
        queues.inline_headers = device.limits.inline_headers;
        let queues = Arc::new(queues);
        let request = CreateQp {
            sq_wqe_count: send.blocks,
            rq_wqe_count: recv.entries,
            rq_wqe_shift: recv.shift,
            ece_options: match device.has_ece() {
                true => ECE_VERSION,
                false => 0,
            },
            ..driver_data(
                &queues,
                service,
                options,
                uar.as_ref().map(|uar| uar.page_id),
            )
        };
        let mut answer = CreateQpResp::default();
        // SAFETY: the addresses are those of the queues' memory, which has that
        // many entries and two doorbell records, and is held for the object.
        let udata = unsafe { Udata::new(request.as_bytes(), answer.as_mut_bytes()) };
        let object = Qp::create(context, &init, udata)?;
        queues.memory.hold_for(&object.existence());
        let register = match uar {
            Some(uar) => uar.register,
            None => device.register(context, answer.bfreg_index)?,
        };
        Ok(Self {
            send: SendQueue::new(
                Arc::clone(&queues),
                object.qp_num(),
                init.sq_sig_all,
                register,
            ),
            recv: has_recv_queue.then(|| RecvQueue::new(Arc::clone(&queues))),
            cap: QpCap {
                max_send_wr: send.capacity,
                max_recv_wr: queues.max_recv_wr(),
                max_send_sge: send.max_sge,
                max_recv_sge: recv.max_sge,
                max_inline_data: send.max_inline,
            },
            packets: PacketObjects::from(&answer),
            ece: answer.ece_options,
            queues,
            object,
        })
    }

    /// Opens an existing XRC target, which has no queues.
    ///
    /// # Errors
    /// Those of memory and of OPEN_QP. Nothing is left behind.
    pub fn open(context: &C, device: &DeviceContext, init: &QpOpen) -> Result<Self, CreateError> {
        Self::without_queues(context, device, || Qp::open(context, init, Udata::none()))
    }

    /// Creates a queue pair without queues and doorbell. `make` creates the kernel object.
    pub(crate) fn without_queues(
        context: &C,
        device: &DeviceContext,
        make: impl FnOnce() -> Result<Qp<C>, uverbs::Error>,
    ) -> Result<Self, CreateError> {
        let (send, recv) = (SendPlan::default(), RecvPlan::default());
        let index = device.user_index()?;
        let queues = Arc::new(QpQueues::new(
            index,
            Service::Target,
            send,
            recv,
            None,
            None,
        )?);
        let register = device.register(context, 0)?;
        let object = make()?;
        Ok(Self {
            send: SendQueue::new(Arc::clone(&queues), object.qp_num(), false, register),
            recv: None,
            cap: QpCap::default(),
            packets: PacketObjects::default(),
            ece: 0,
            queues,
            object,
        })
    }
}
