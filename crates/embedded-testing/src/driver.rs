//! What the tests drive the device with: crates/mlx5, and memory.

use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::{Duration, Instant};

use embedded::{Drive, Embedded, Network};
use mlx5::{
    Address, CompletionQueue, CqOptions, DeviceContext, QueuePair, Role, SharedReceiveQueue,
};
use uverbs::mr::MrKeys;
use uverbs::{
    AccessFlags, AhAttr, Context, CqInit, GidEntry, GlobalRoute, MrHandle, MrInit, Opcode,
    PdHandle, QpAttr, QpAttrMask as Mask, QpCap, QpInit, QpState, QpType, SendFlags, Sge, SrqInit,
    SrqKind, Udata, WorkCompletion,
};
use uverbs::{Data, Operands, RemoteMemory, SendWr};

pub const QKEY: u32 = 0x1111_1111;

/// A context with a protection domain.
pub struct Host {
    pub embedded: Embedded,
    pub context: Arc<Context>,
    pub device: DeviceContext,
    pub pd: PdHandle,
    /// It is whom the device's complaints are about.
    pub blamed: bool,
}

pub type Cq = CompletionQueue<Arc<Context>>;
pub type Qp = QueuePair<Arc<Context>>;
pub type Srq = SharedReceiveQueue<Arc<Context>>;

/// Registered memory. Written to by the device, so looked at by copies.
pub struct Memory {
    bytes: *mut u8,
    len: usize,
    pub mr: MrHandle,
    pub keys: MrKeys,
    context: Arc<Context>,
}

pub fn all() -> AccessFlags {
    AccessFlags::LOCAL_WRITE
        | AccessFlags::REMOTE_READ
        | AccessFlags::REMOTE_WRITE
        | AccessFlags::REMOTE_ATOMIC
}

impl Host {
    pub fn new(embedded: &Embedded) -> Self {
        let context = Arc::new(embedded.context().unwrap());
        let (_, device) = DeviceContext::open(&context).unwrap();
        let (pd, _) = mlx5::alloc_pd(&context).unwrap();
        Self {
            embedded: embedded.clone(),
            context,
            device,
            pd,
            blamed: true,
        }
    }

    /// The number of a UAR of the context.
    pub fn uar(&self) -> u32 {
        self.device.cq_uar_page().unwrap()
    }

    /// What the kernel says of a context.
    pub fn device_info(&self) -> uverbs::ContextInfo {
        mlx5::ioctl::query_context(&self.context, &mut [0; 72]).unwrap()
    }

    /// One device, driven by its thread.
    pub fn alone(profile: &str) -> Self {
        let network = Network::new(Drive::Thread).unwrap();
        Self::new(&network.strict_device(profile).unwrap())
    }

    /// Two devices of a network, driven as said.
    pub fn two(profile: &str, drive: Drive) -> (Self, Self) {
        let network = Network::new(drive).unwrap();
        let host = || Self::new(&network.strict_device(profile).unwrap());
        (host(), host())
    }

    pub fn memory(&self, len: usize) -> Memory {
        self.memory_at(len, all(), None)
    }

    pub fn memory_at(&self, len: usize, access: AccessFlags, iova: Option<u64>) -> Memory {
        let bytes = Box::into_raw(vec![0u8; len].into_boxed_slice()).cast::<u8>();
        let addr = bytes.expose_provenance() as u64;
        let init = MrInit {
            pd: self.pd,
            addr,
            length: len as u64,
            iova: iova.map_or(addr, |iova| iova + addr % 4096),
            access,
        };
        // SAFETY: the memory is freed after the region is destroyed, and
        // reached by raw pointers only.
        let (mr, keys) = unsafe { uverbs::mr::register(&self.context, &init, Udata::none()) }
            .expect("registering memory");
        Memory {
            bytes,
            len,
            mr,
            keys,
            context: Arc::clone(&self.context),
        }
    }

    pub fn cq(&self, cqe: u32) -> Cq {
        self.cq_with(cqe, CqOptions::default())
    }

    pub fn cq_with(&self, cqe: u32, options: CqOptions) -> Cq {
        let init = CqInit {
            cqe,
            ..CqInit::default()
        };
        CompletionQueue::create_with(&self.context, &self.device, &init, options, None).unwrap()
    }

    pub fn qp(&self, kind: QpType, cq: &mut Cq) -> Qp {
        self.qp_with(kind, cq, None)
    }

    pub fn qp_with(&self, kind: QpType, cq: &mut Cq, srq: Option<&Srq>) -> Qp {
        let init = QpInit {
            qp_type: kind,
            pd: Some(self.pd),
            send_cq: Some(cq.object.handle()),
            recv_cq: Some(cq.object.handle()),
            srq: srq.map(|srq| srq.object.handle()),
            cap: QpCap {
                max_send_wr: 64,
                max_recv_wr: if srq.is_some() { 0 } else { 64 },
                max_send_sge: 2,
                max_recv_sge: 2,
                max_inline_data: 64,
            },
            user_handle: 77,
            ..QpInit::default()
        };
        let shared = srq.map(|srq| Arc::clone(srq.recv.work()));
        let qp = QueuePair::create(&self.context, &self.device, &init, shared).unwrap();
        cq.ring
            .attach(&qp.work, Role::SEND | Role::RECEIVE)
            .unwrap();
        qp
    }

    pub fn srq(&self, max_wr: u32) -> Srq {
        let init = SrqInit {
            pd: self.pd,
            user_handle: 88,
            max_wr,
            max_sge: 1,
            limit: 0,
            kind: SrqKind::Basic,
            async_fd: None,
        };
        SharedReceiveQueue::create(&self.context, &self.device, &init).unwrap()
    }

    /// The way to this host.
    pub fn path(&self) -> AhAttr {
        let port = self.context.query_port(1).unwrap().legacy;
        let ethernet = port.link_layer == 2;
        let mut gids = [GidEntry::default(); 2];
        let count = self.context.query_gid_table(&mut gids[..]);
        // On Ethernet, the GID of RoCE v2, which may have one of RoCE v1 before it.
        let gid = gids[..count.unwrap()].last().unwrap();
        AhAttr {
            grh: GlobalRoute {
                dgid: gid.gid,
                hop_limit: 64,
                sgid_index: gid.gid_index as u8,
                ..GlobalRoute::default()
            },
            dlid: port.lid,
            is_global: ethernet,
            port_num: 1,
            ..AhAttr::default()
        }
    }
}

impl Memory {
    pub fn address(&self) -> u64 {
        self.bytes.expose_provenance() as u64
    }

    pub fn sge(&self, from: usize, length: usize) -> Sge {
        assert!(from + length <= self.len);
        Sge {
            addr: self.address() + from as u64,
            length: length as u32,
            lkey: self.keys.lkey,
        }
    }

    pub fn set(&self, from: usize, bytes: &[u8]) {
        assert!(from + bytes.len() <= self.len);
        // SAFETY: inside the memory.
        unsafe { self.bytes.add(from).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub fn get(&self, from: usize, length: usize) -> Vec<u8> {
        assert!(from + length <= self.len);
        // SAFETY: inside the memory.
        let byte = |at| unsafe { self.bytes.add(at).read_volatile() };
        (from..from + length).map(byte).collect()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        uverbs::mr::destroy(&self.context, self.mr).unwrap();
        // SAFETY: made by `memory_at`, and no longer the device's.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.bytes, self.len)) });
    }
}

impl Drop for Host {
    /// Nothing that the driver did was wrong.
    fn drop(&mut self) {
        let complaints = self.embedded.complaints();
        let programs = ["is in error: overrun", "may not be bound"];
        let about_driver = |it: &&String| !programs.iter().any(|their| it.contains(their));
        let complaint = complaints.iter().find(about_driver);
        if self.blamed && !std::thread::panicking() {
            assert_eq!(complaint, None);
        }
    }
}

/// What a send work request says.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    Send,
    Write(&'a Memory, usize),
    Read(&'a Memory, usize),
    Add(&'a Memory, u64),
    Swap(&'a Memory, u64, u64),
}

impl Work<'_> {
    /// Its remote memory and operands, as a work request without data.
    pub fn request<'a>(self, wr_id: u64, opcode: Opcode) -> SendWr<'a, Address> {
        let mut wr = SendWr::new(wr_id, opcode, SendFlags::SIGNALED);
        let (to, at) = match self {
            Work::Send => return wr,
            Work::Write(to, at) | Work::Read(to, at) => (to, at),
            Work::Add(to, _) | Work::Swap(to, ..) => (to, 0),
        };
        wr.remote = RemoteMemory {
            addr: to.address() + at as u64,
            rkey: to.keys.rkey,
        };
        wr.operands = match self {
            Work::Add(_, compare_add) => Operands::Atomic {
                compare_add,
                swap: 0,
            },
            Work::Swap(_, compare_add, swap) => Operands::Atomic { compare_add, swap },
            _ => Operands::None,
        };
        wr
    }
}

/// Posts one work request.
pub fn post(qp: &mut Qp, wr_id: u64, work: Work<'_>, sge: Sge) {
    let opcode = match work {
        Work::Send => Opcode::SEND,
        Work::Write(..) => Opcode::RDMA_WRITE,
        Work::Read(..) => Opcode::RDMA_READ,
        Work::Add(..) => Opcode::ATOMIC_FETCH_AND_ADD,
        Work::Swap(..) => Opcode::ATOMIC_CMP_AND_SWP,
    };
    qp.send.begin();
    let list = [sge];
    let wr = SendWr {
        data: Data::Sges(&list),
        ..work.request(wr_id, opcode)
    };
    // SAFETY: the tests keep their memory until they have the completion.
    unsafe {
        qp.send.push(&wr).unwrap();
        assert!(qp.send.publish());
    }
}

pub fn receive(qp: &mut Qp, wr_id: u64, sge: Sge) {
    let recv = qp.recv.as_mut().unwrap();
    recv.begin();
    recv.push(wr_id, &[sge]).unwrap();
    // SAFETY: as in `post`.
    unsafe { recv.publish() };
}

/// The next completion, which comes within a time that no machine takes.
pub fn poll(host: &Host, cq: &mut Cq) -> WorkCompletion {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(wc) = poll_once(cq) {
            return wc;
        }
        assert!(Instant::now() < until, "no completion");
        host.embedded.drive();
    }
}

pub fn poll_once(cq: &mut Cq) -> Option<WorkCompletion> {
    let mut out = [MaybeUninit::<WorkCompletion>::uninit()];
    // SAFETY: as in `post`.
    match unsafe { cq.ring.poll(&mut out) }.unwrap() {
        0 => None,
        // SAFETY: as many places were written.
        _ => Some(unsafe { out[0].assume_init() }),
    }
}

/// The next completion, by the device's own thread.
pub fn wait(cq: &mut Cq) -> WorkCompletion {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(wc) = poll_once(cq) {
            return wc;
        }
        assert!(Instant::now() < until, "no completion");
        std::thread::yield_now();
    }
}

pub fn modify(qp: &Qp, attr: &QpAttr, mask: Mask) {
    qp.object.modify(attr, mask, Udata::none()).unwrap();
}

/// Takes a queue pair to RTS.
pub fn connect(qp: &Qp, kind: QpType, peer: u32, path: AhAttr) {
    connect_for(qp, kind, peer, path, all());
}

/// Takes a queue pair to RTS, whose peer may do that much.
pub fn connect_for(qp: &Qp, kind: QpType, peer: u32, path: AhAttr, access: AccessFlags) {
    let when = |condition, mask| if condition { mask } else { Mask::empty() };
    let asks = matches!(kind, QpType::RC | QpType::XRC_INI);
    let answers = matches!(kind, QpType::RC | QpType::XRC_TGT);
    let ud = kind == QpType::UD;
    let attr = QpAttr {
        qp_state: QpState::INIT,
        port_num: 1,
        qkey: QKEY,
        qp_access_flags: access,
        ..QpAttr::default()
    };
    let rights = if ud { Mask::QKEY } else { Mask::ACCESS_FLAGS };
    modify(
        qp,
        &attr,
        Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | rights,
    );
    let attr = QpAttr {
        qp_state: QpState::RTR,
        path_mtu: 5,
        dest_qp_num: peer,
        rq_psn: 100,
        max_dest_rd_atomic: 4,
        min_rnr_timer: 1,
        ah_attr: path,
        ..QpAttr::default()
    };
    let route = Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
    let route = if ud { Mask::empty() } else { route };
    let reads = when(answers, Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER);
    modify(qp, &attr, Mask::STATE | route | reads);
    let attr = QpAttr {
        qp_state: QpState::RTS,
        sq_psn: 100,
        timeout: 14,
        retry_cnt: 7,
        rnr_retry: 7,
        max_rd_atomic: 4,
        ..QpAttr::default()
    };
    let retries = Mask::RETRY_CNT | Mask::RNR_RETRY | Mask::MAX_QP_RD_ATOMIC;
    let retries = when(asks || answers, Mask::TIMEOUT) | when(asks, retries);
    modify(qp, &attr, Mask::STATE | Mask::SQ_PSN | retries);
}

/// Connects two queue pairs of two hosts.
pub fn join(kind: QpType, (a, ha): (&Qp, &Host), (b, hb): (&Qp, &Host)) {
    connect(a, kind, b.object.qp_num(), hb.path());
    connect(b, kind, a.object.qp_num(), ha.path());
}
