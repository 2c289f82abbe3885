//! A driver for tests: queues of crates/mlx5, and registered memory.

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
    /// Dropping the host asserts that the device has no complaints about it.
    pub checks_complaints: bool,
}

pub type Cq = CompletionQueue<Arc<Context>>;
pub type Qp = QueuePair<Arc<Context>>;
pub type Srq = SharedReceiveQueue<Arc<Context>>;

/// Registered memory. The device writes to it, so it is accessed by copying.
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
            checks_complaints: true,
        }
    }

    /// Returns the number of a UAR of the context.
    pub fn uar(&self) -> u32 {
        self.device.cq_uar_page().unwrap()
    }

    /// Queries the context's information.
    pub fn device_info(&self) -> uverbs::ContextInfo {
        mlx5::ioctl::query_context(&self.context, &mut [0; 72]).unwrap()
    }

    /// Creates one device, driven by its thread.
    pub fn single(profile: &str) -> Self {
        // Posts are not announced to the device.
        let network = Network::new(Drive::Watch).unwrap();
        Self::new(&network.strict_device(profile).unwrap())
    }

    /// Creates two devices of a network.
    pub fn pair(profile: &str, drive: Drive) -> (Self, Self) {
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
        let shared = srq.map(|srq| Arc::clone(srq.recv.entries()));
        let qp = QueuePair::create(&self.context, &self.device, &init, shared).unwrap();
        cq.ring
            .attach(&qp.queues, Role::SEND | Role::RECEIVE)
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

    /// Returns the path to this host.
    pub fn path(&self) -> AhAttr {
        let port = self.context.query_port(1).unwrap().legacy;
        let ethernet = port.link_layer == 2;
        let mut gids = [GidEntry::default(); 4];
        let count = self.context.query_gid_table(&mut gids[..]);
        // On Ethernet the last GID is that of RoCE v2.
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
        // SAFETY: allocated by `memory_at`, and no longer registered.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(self.bytes, self.len)) });
    }
}

impl Drop for Host {
    /// Asserts that the device has no complaints about the driver.
    fn drop(&mut self) {
        let complaints = self.embedded.complaints();
        let expected = ["is in error: overrun", "of an entry"];
        let is_unexpected = |it: &&String| !expected.iter().any(|text| it.contains(text));
        let complaint = complaints.iter().find(is_unexpected);
        if self.checks_complaints && !std::thread::panicking() {
            assert_eq!(complaint, None);
        }
    }
}

/// The operation of a send work request.
#[derive(Clone, Copy)]
pub enum Operation<'a> {
    Send,
    Write(&'a Memory, usize),
    Read(&'a Memory, usize),
    Add(&'a Memory, u64),
    Swap(&'a Memory, u64, u64),
}

impl Operation<'_> {
    /// Builds a work request with remote memory and operands, but without data.
    pub fn request<'a>(self, wr_id: u64, opcode: Opcode) -> SendWr<'a, Address> {
        let mut wr = SendWr::new(wr_id, opcode, SendFlags::SIGNALED);
        let (to, at) = match self {
            Operation::Send => return wr,
            Operation::Write(to, at) | Operation::Read(to, at) => (to, at),
            Operation::Add(to, _) | Operation::Swap(to, ..) => (to, 0),
        };
        wr.remote = RemoteMemory {
            addr: to.address() + at as u64,
            rkey: to.keys.rkey,
        };
        wr.operands = match self {
            Operation::Add(_, compare_add) => Operands::Atomic {
                compare_add,
                swap: 0,
            },
            Operation::Swap(_, compare_add, swap) => Operands::Atomic { compare_add, swap },
            _ => Operands::None,
        };
        wr
    }
}

/// Posts one work request.
pub fn post(qp: &mut Qp, wr_id: u64, work: Operation<'_>, sge: Sge) {
    let opcode = match work {
        Operation::Send => Opcode::SEND,
        Operation::Write(..) => Opcode::RDMA_WRITE,
        Operation::Read(..) => Opcode::RDMA_READ,
        Operation::Add(..) => Opcode::ATOMIC_FETCH_AND_ADD,
        Operation::Swap(..) => Opcode::ATOMIC_CMP_AND_SWP,
    };
    qp.send.begin();
    let list = [sge];
    let wr = SendWr {
        data: Data::Sges(&list),
        ..work.request(wr_id, opcode)
    };
    // SAFETY: the tests keep the memory until they have polled the completion.
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

/// Polls for the next completion, and drives the device.
pub fn poll(host: &Host, cq: &mut Cq) -> WorkCompletion {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(wc) = poll_once(cq) {
            return wc;
        }
        assert!(Instant::now() < deadline, "no completion");
        host.embedded.drive();
    }
}

pub fn poll_once(cq: &mut Cq) -> Option<WorkCompletion> {
    let mut out = [MaybeUninit::<WorkCompletion>::uninit()];
    // SAFETY: as in `post`.
    match unsafe { cq.ring.poll(&mut out) }.unwrap() {
        0 => None,
        // SAFETY: one completion was written.
        _ => Some(unsafe { out[0].assume_init() }),
    }
}

/// Polls for the next completion; the network's thread drives the device.
pub fn wait(cq: &mut Cq) -> WorkCompletion {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(wc) = poll_once(cq) {
            return wc;
        }
        assert!(Instant::now() < deadline, "no completion");
        std::thread::yield_now();
    }
}

pub fn modify(qp: &Qp, attr: &QpAttr, mask: Mask) {
    qp.object.modify(attr, mask, Udata::none()).unwrap();
}

/// Moves a queue pair to RTS.
pub fn connect(qp: &Qp, kind: QpType, peer: u32, path: AhAttr) {
    connect_with_access(qp, kind, peer, path, all());
}

/// Moves a queue pair to RTS, with the given access rights of the peer.
pub fn connect_with_access(qp: &Qp, kind: QpType, peer: u32, path: AhAttr, access: AccessFlags) {
    let when = |condition, mask| if condition { mask } else { Mask::empty() };
    let requests = matches!(kind, QpType::RC | QpType::XRC_INI);
    let responds = matches!(kind, QpType::RC | QpType::XRC_TGT);
    let ud = kind == QpType::UD;
    let attr = QpAttr {
        qp_state: QpState::INIT,
        port_num: 1,
        qkey: QKEY,
        qp_access_flags: access,
        ..QpAttr::default()
    };
    let access_mask = if ud { Mask::QKEY } else { Mask::ACCESS_FLAGS };
    modify(
        qp,
        &attr,
        Mask::STATE | Mask::PKEY_INDEX | Mask::PORT | access_mask,
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
    let reads = when(responds, Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER);
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
    let retries = when(requests || responds, Mask::TIMEOUT) | when(requests, retries);
    modify(qp, &attr, Mask::STATE | Mask::SQ_PSN | retries);
}

/// Moves a raw packet queue pair to RTS.
pub fn start_packets(qp: &Qp) {
    for (qp_state, mask) in [
        (QpState::INIT, Mask::PORT),
        (QpState::RTR, Mask::empty()),
        (QpState::RTS, Mask::empty()),
    ] {
        let attr = QpAttr {
            qp_state,
            port_num: 1,
            ..QpAttr::default()
        };
        modify(qp, &attr, Mask::STATE | mask);
    }
}

/// Returns an Ethernet frame of 64 bytes with IPv4 and UDP, to the MAC address that ends with
/// 7, from the one that ends with `source`.
pub fn udp_frame(source: u8, source_port: u16) -> Vec<u8> {
    let mut frame = vec![0; 64];
    frame[..6].copy_from_slice(&[2, 0, 0, 0, 0, 7]);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, source]);
    frame[12..14].copy_from_slice(&[8, 0]);
    // Version and length of the header, length, time to live, protocol.
    (frame[14], frame[17], frame[22], frame[23]) = (0x45, 50, 64, 17);
    frame[26..34].copy_from_slice(&[192, 0, 2, 1, 192, 0, 2, 2]);
    frame[34..36].copy_from_slice(&source_port.to_be_bytes());
    (frame[37], frame[39]) = (9, 30);
    frame
}

/// Connects two queue pairs of two hosts.
pub fn connect_pair(kind: QpType, (a, ha): (&Qp, &Host), (b, hb): (&Qp, &Host)) {
    connect(a, kind, b.object.qp_num(), hb.path());
    connect(b, kind, a.object.qp_num(), ha.path());
}
