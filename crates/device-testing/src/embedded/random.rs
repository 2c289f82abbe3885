//! A driver that executes random commands on a device, beside a correct driver of the same
//! device.
//!
//! Commands are well-formed at first, with existing objects, descriptors and keys. Some are
//! then mutated: attributes are removed, duplicated, shortened, lengthened, changed or taken
//! from another method. Addresses are unmapped, misaligned, or in the arena: memory that is
//! used for nothing else, and whose bytes change while queues are in it.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use embedded::{Drive, Embedded, Network};
use rdmacm::abi as cm;
use uverbs::abi::ids::*;
use uverbs::abi::ioctl::Attr;
use uverbs::abi::later::*;
use uverbs::abi::write::cmd::*;
use uverbs::abi::write::extended::*;
use uverbs::abi::write::*;
use uverbs::kernel::Kernel;
use uverbs::{Context, QpAttrMask as Mask, QpType};
use zerocopy::{FromZeros, IntoBytes};

use mlx5::ioctl::ids::{
    ATTR_CREATE_FLOW_ACTIONS, ATTR_CREATE_FLOW_DEST_QP, ATTR_CREATE_FLOW_FLAGS,
    ATTR_CREATE_FLOW_HANDLE, ATTR_CREATE_FLOW_MATCH_VALUE, ATTR_CREATE_FLOW_MATCHER,
    ATTR_FLOW_MATCHER_CREATE_HANDLE, ATTR_FLOW_MATCHER_DESTROY_HANDLE, ATTR_FLOW_MATCHER_FLOW_TYPE,
    ATTR_FLOW_MATCHER_MATCH_CRITERIA, ATTR_FLOW_MATCHER_MATCH_MASK, ATTR_MODIFY_HEADER_ACTIONS,
    ATTR_MODIFY_HEADER_HANDLE, ATTR_MODIFY_HEADER_TABLE, FLOW_DROP, METHOD_CREATE_FLOW,
    METHOD_FLOW_ACTION_MODIFY_HEADER, METHOD_FLOW_MATCHER_CREATE, METHOD_FLOW_MATCHER_DESTROY,
    OBJECT_FLOW_MATCHER,
};

use crate::embedded::driver::*;
use crate::embedded::raw::*;

/// Pages of the arena.
const ARENA: usize = 64;
/// Number of commands of a sequence.
pub const COMMANDS: u32 = 120;
const GROUPS: [[u8; 16]; 2] = [
    [0xff; 16],
    [0xff, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
];

/// Random numbers from a seed (splitmix64), or from bytes.
pub struct Random<'a> {
    state: u64,
    bytes: Option<&'a [u8]>,
}

impl<'a> Random<'a> {
    pub fn seeded(state: u64) -> Self {
        Self { state, bytes: None }
    }

    /// Takes each number from two bytes; after the last byte all numbers are 0.
    pub fn from_bytes(bytes: &'a [u8]) -> Self {
        Self {
            state: 0,
            bytes: Some(bytes),
        }
    }

    fn is_exhausted(&self) -> bool {
        self.bytes.is_some_and(<[u8]>::is_empty)
    }

    fn next(&mut self) -> u64 {
        if let Some(bytes) = &mut self.bytes {
            let (now, rest) = bytes.split_at(bytes.len().min(2));
            *bytes = rest;
            return now.iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
        }
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut it = self.state;
        it = (it ^ it >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        it = (it ^ it >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        it ^ it >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }

    /// Picks one of the values, or rarely an arbitrary number.
    fn pick_mostly<T: Copy + Into<u64>>(&mut self, all: &[T]) -> u64 {
        match all {
            [_, ..] if !self.one_in(30) => self.pick(all).into(),
            _ => self.number(),
        }
    }

    fn number(&mut self) -> u64 {
        match self.below(6) {
            0 => 0,
            1 => self.below(8),
            2 => self.below(300),
            3 => 1 << self.below(64),
            4 => u64::MAX,
            _ => self.below(1 << 32),
        }
    }
}

/// State of the random driver in one context.
struct Client {
    context: Arc<Context>,
    /// The number of a UAR.
    uar: u32,
    objects: BTreeMap<u16, Vec<u32>>,
    files: Vec<RawFd>,
    /// Multicast groups that the queue pairs have joined.
    groups: Vec<AttachMcast>,
    /// The queue pairs, by handle.
    queue_pairs: BTreeMap<u32, QueuePair>,
}

/// A queue pair of the driver.
#[derive(Clone, Copy)]
struct QueuePair {
    kind: QpType,
    number: u32,
    state: u8,
    /// Address and size of the send queue, and address of the doorbell records.
    sends: u64,
    blocks: u32,
    records: u64,
}

/// The effect of a command, if it succeeds.
#[derive(Clone, Copy)]
enum Change {
    None,
    Created(QueuePair),
    State(u32, u8),
}

struct RandomDriver<'a> {
    random: Random<'a>,
    arena: &'a Arena,
    clients: [Client; 2],
    /// Index of the client that executes commands.
    current: usize,
    keys: Vec<u32>,
    numbers: Vec<u32>,
    gid: [u8; 16],
    manager: Box<dyn Kernel>,
    channel: RawFd,
    ids: Vec<u32>,
    change: Change,
    /// An attribute of the command was moved to another address.
    moved: bool,
    /// A file of this process, for XRC domains.
    file: std::fs::File,
    succeeded: u64,
}

impl RandomDriver<'_> {
    fn client(&mut self) -> &mut Client {
        &mut self.clients[self.current]
    }

    /// Picks an object of a kind; sometimes one of another kind or context.
    fn object(&mut self, kind: u16) -> u32 {
        let client = if self.random.one_in(25) {
            1 - self.current
        } else {
            self.current
        };
        let kind = match self.random.below(60) {
            0 => self
                .random
                .pick(&[OBJECT_PD, OBJECT_CQ, OBJECT_QP, OBJECT_SRQ, OBJECT_MR]),
            _ => kind,
        };
        let all = self.clients[client]
            .objects
            .get(&kind)
            .cloned()
            .unwrap_or_default();
        self.random.pick_mostly(&all) as u32
    }

    fn file(&mut self) -> u64 {
        let client = if self.random.one_in(15) {
            1 - self.current
        } else {
            self.current
        };
        let files: Vec<u32> = self.clients[client]
            .files
            .iter()
            .map(|&fd| fd as u32)
            .collect();
        self.random.pick_mostly(&files)
    }

    /// Picks an address: in the arena, unmapped or inaccessible.
    fn address(&mut self) -> u64 {
        let (start, end) = (
            self.arena.address(),
            self.arena.address() + self.arena.len() as u64,
        );
        let page = start + self.random.below(ARENA as u64) * PAGE as u64;
        match self.random.below(80) {
            0 => 0,
            1 => self.random.below(4096),
            2 => end,
            3 => start - 8,
            4 => end - 64,
            5 => u64::MAX - self.random.below(8192),
            6 => 1 << 47 | page & 0xfff_f000,
            7 => page + self.random.below(4096),
            _ => page,
        }
    }

    fn records(&mut self) -> u64 {
        match self.random.below(10) {
            0 => self.address(),
            _ => self.arena.address() + self.random.below(self.arena.len() as u64 / 8) * 8,
        }
    }

    /// Picks a size: mostly a power of two, sometimes one more or less.
    fn size(&mut self, max: u64) -> u32 {
        let size = 4u32 << self.random.below(max - 2);
        match self.random.below(40) {
            0 => size - 1,
            1 => size + 1,
            2 => self.random.number() as u32,
            _ => size,
        }
    }

    fn create_cq(&mut self) -> Command {
        let mut command = create_cq(self.size(9));
        let vector = self.random.pick(&[0, 0, 1, 2, 3, 3, 3, 4]);
        command.find(ATTR_CREATE_CQ_COMP_VECTOR).data = vector;
        let has_files = !self.client().files.is_empty();
        if has_files && self.random.one_in(2) {
            let file = self.file();
            command.object(ATTR_CREATE_CQ_COMP_CHANNEL, file);
        }
        if has_files && self.random.one_in(4) {
            let file = self.file();
            command.object(ATTR_CREATE_CQ_EVENT_FD, file);
        }
        if self.random.one_in(4) {
            command.constant(ATTR_CREATE_CQ_FLAGS, self.random.below(3));
        }
        let size = self.random.pick(&[64, 64, 128]);
        let mut driver = cq_driver(self.address(), self.records(), size, self.client().uar);
        driver[20] = u8::from(self.random.one_in(4));
        driver[21] = self.random.pick(&[1, 1, 2, 2, 4, 5]);
        command.driver(&driver);
        command
    }

    fn create_qp(&mut self) -> Command {
        let kinds = [
            QpType::RC,
            QpType::RC,
            QpType::UC,
            QpType::UD,
            QpType::XRC_INI,
            QpType::XRC_TGT,
            QpType::DRIVER,
            QpType::RAW_PACKET,
        ];
        let kind = self.random.pick(&kinds);
        self.create_qp_of(kind)
    }

    fn create_qp_of(&mut self, kind: QpType) -> Command {
        let shared = self.random.one_in(3);
        let xrc = matches!(kind, QpType::XRC_INI | QpType::XRC_TGT);
        let own = !shared && !xrc && kind != QpType::DRIVER;
        let receives = if own { self.size(8) } else { 0 };
        let mut command = create_qp(kind.0, receives);
        if kind == QpType::XRC_TGT {
            let xrcd = self.object(OBJECT_XRCD);
            command.object(ATTR_CREATE_QP_XRCD_HANDLE, xrcd.into());
        } else {
            let (pd, send, recv) = (
                self.object(OBJECT_PD),
                self.object(OBJECT_CQ),
                self.object(OBJECT_CQ),
            );
            command
                .object(ATTR_CREATE_QP_PD_HANDLE, pd.into())
                .object(ATTR_CREATE_QP_SEND_CQ_HANDLE, send.into())
                .object(ATTR_CREATE_QP_RECV_CQ_HANDLE, recv.into());
        }
        if shared && kind != QpType::XRC_INI {
            let srq = self.object(OBJECT_SRQ);
            command.object(ATTR_CREATE_QP_SRQ_HANDLE, srq.into());
        }
        if self.random.one_in(6) {
            command.constant(
                ATTR_CREATE_QP_FLAGS,
                self.random.pick(&[1 << 12, 1 << 12, 1 << 1, 1 << 8]),
            );
        }
        let shift = if own {
            4 + self.random.below(3) as u32
        } else {
            0
        };
        let index = self
            .random
            .pick(&[0, 1, 2, 3, 4, 5, 6, 7, 0xff_fffe, 0xff_ffff]);
        let sizes = [self.size(8), receives, shift];
        let (entries, records) = (self.address(), self.records());
        let sends = match kind {
            QpType::RAW_PACKET => self.address(),
            _ => entries.wrapping_add(u64::from(receives) << shift.min(9)),
        };
        self.change = Change::Created(QueuePair {
            kind,
            number: 0,
            state: 0,
            sends,
            blocks: sizes[0],
            records,
        });
        let mut driver = qp_driver(entries, records, sizes, index, self.client().uar);
        driver[28] = self.random.pick(&[0, 0, 2]);
        if kind == QpType::DRIVER {
            // A DC target or initiator.
            driver[28] |= self.random.pick(&[0x10, 0x10, 0x20, 0x20, 0x30]);
        }
        if kind == QpType::RAW_PACKET {
            driver[28] = self.random.pick(&[0, 0, 0x40, 0xc0]);
            driver[40..48].copy_from_slice(&sends.to_ne_bytes());
        }
        command.driver(&driver);
        command
    }

    fn create_wq(&mut self) -> Command {
        let mut command = Command::new(OBJECT_WQ, METHOD_WQ_CREATE);
        let (pd, cq) = (self.object(OBJECT_PD), self.object(OBJECT_CQ));
        let receives = self.size(8);
        command
            .object(ATTR_CREATE_WQ_HANDLE, 0)
            .object(ATTR_CREATE_WQ_PD_HANDLE, pd.into())
            .object(ATTR_CREATE_WQ_CQ_HANDLE, cq.into())
            .constant(ATTR_CREATE_WQ_USER_HANDLE, 0)
            .constant(ATTR_CREATE_WQ_TYPE, 0)
            .u32(ATTR_CREATE_WQ_MAX_WR, receives)
            .u32(ATTR_CREATE_WQ_MAX_SGE, 1)
            .u32(ATTR_CREATE_WQ_FLAGS, self.random.pick(&[0, 0, 1, 2]))
            .out(ATTR_CREATE_WQ_RESP_MAX_WR, 4)
            .out(ATTR_CREATE_WQ_RESP_MAX_SGE, 4)
            .out(ATTR_CREATE_WQ_RESP_WQ_NUM, 4);
        let (entries, records) = (self.address(), self.records());
        let strides = u32::from(self.random.one_in(4));
        let words = [
            receives,
            4 + self.random.below(3) as u32,
            self.random.below(8) as u32,
            0,
            strides,
            6 + self.random.below(3) as u32,
            9 + self.random.below(3) as u32,
            self.random.below(2) as u32,
        ];
        let addresses = [entries.to_ne_bytes(), records.to_ne_bytes()].concat();
        command.driver(&[&addresses[..], words.as_bytes()].concat());
        command
    }

    /// Builds a command for work queues, indirection tables or their queue pairs.
    fn work_queue_command(&mut self) -> Command {
        match self.random.below(8) {
            0 => {
                let log = self.random.pick(&[0u32, 0, 1, 2]);
                let mut words = vec![0, log];
                words.extend((0..1 << log).map(|_| self.object(OBJECT_WQ)));
                words.resize(words.len().next_multiple_of(2), 0);
                Command::write(EX_CREATE_WQ_TABLE, &words[..], 16)
            }
            1 | 2 => {
                let table = self.object(OBJECT_RWQ_IND_TBL);
                let mut command = create_qp(QpType::RAW_PACKET.0, 0);
                let pd = self.object(OBJECT_PD);
                command
                    .object(ATTR_CREATE_QP_PD_HANDLE, pd.into())
                    .object(ATTR_CREATE_QP_IND_TABLE_HANDLE, table.into());
                let mut driver = vec![7; 152];
                driver[..16].fill(0);
                driver[144..].fill(0);
                // Fields of the headers, the function, the length of the key, own frames.
                driver[0] = self.random.pick(&[0, 0b11, 0b1100_0011, 0b11_1100, 0b1111]);
                (driver[8], driver[9]) = (1, self.random.pick(&[40, 40, 40, 39]));
                driver[148] = self.random.pick(&[0, 0x40, 0xc0]);
                command.driver(&driver);
                command
            }
            3 => {
                let body = ExModifyWq {
                    attr_mask: self.random.below(8) as u32,
                    wq_handle: self.object(OBJECT_WQ),
                    wq_state: self.random.pick(&[0, 1, 1, 1, 2, 3]),
                    curr_wq_state: self.random.below(3) as u32,
                    flags: self.random.below(2) as u32,
                    flags_mask: self.random.below(3) as u32,
                };
                Command::write(EX_MODIFY_WQ, &body, 0)
            }
            4 => {
                let kind = self.random.pick(&[OBJECT_WQ, OBJECT_RWQ_IND_TBL]);
                destroy(kind, self.object(kind))
            }
            _ => self.create_wq(),
        }
    }

    fn create_srq(&mut self) -> Command {
        let pd = self.object(OBJECT_PD);
        let mut command = create_srq(pd, self.size(9));
        command.find(ATTR_CREATE_SRQ_MAX_SGE).data = self.random.below(8);
        let kind = self.random.below(4);
        if kind != 0 {
            let cq = self.object(OBJECT_CQ);
            command.object(ATTR_CREATE_SRQ_CQ_HANDLE, cq.into());
        }
        match kind {
            1 => {
                let xrcd = self.object(OBJECT_XRCD);
                command.find(ATTR_CREATE_SRQ_TYPE).data = 1;
                command
                    .object(ATTR_CREATE_SRQ_XRCD_HANDLE, xrcd.into())
                    .out(ATTR_CREATE_SRQ_RESP_SRQ_NUM, 4);
            }
            2 => {
                command.find(ATTR_CREATE_SRQ_TYPE).data = 2;
                command.u32(ATTR_CREATE_SRQ_MAX_NUM_TAGS, self.random.below(140) as u32);
            }
            _ => {}
        }
        let driver = srq_driver(self.address(), self.records(), self.random.below(4) as u32);
        command.driver(&driver);
        command
    }

    fn region(&mut self) -> Command {
        let (start, length) = (self.address(), self.random.below(3 * PAGE as u64));
        let hca_va = match self.random.below(4) {
            0 => start.wrapping_add(0x10_0000),
            1 => start & 0xfff,
            _ => start,
        };
        let access_flags = match self.random.below(8) {
            0 => self.random.number() as u32,
            _ => self.random.pick(&[0, 1, 0xf, 0xf, 0x1f, 0x4f]),
        };
        let pd_handle = self.object(OBJECT_PD);
        if self.random.one_in(4) {
            let body = ReregMr {
                response: 0,
                mr_handle: self.object(OBJECT_MR),
                flags: self.random.below(9) as u32,
                start,
                length,
                hca_va,
                pd_handle,
                access_flags,
            };
            return Command::write(CMD_REREG_MR, &body, 8);
        }
        let body = RegMr {
            response: 0,
            start,
            length,
            hca_va,
            pd_handle,
            access_flags,
        };
        Command::write(CMD_REG_MR, &body, 12)
    }

    /// Builds the next state transition of a queue pair, or a random modification.
    fn modify_qp(&mut self) -> Command {
        let mut it = ModifyQp::new_zeroed();
        it.qp_handle = self.object(OBJECT_QP);
        let pair = self.client().queue_pairs.get(&it.qp_handle).copied();
        let kind = pair.map_or(QpType::RC, |pair| pair.kind);
        let own = pair.map_or(0, |pair| pair.number);
        it.qp_state = 1 + pair.map_or(0, |pair| pair.state.min(2));
        (it.port_num, it.path_mtu) = (1, 1 + self.random.below(5) as u8);
        (it.dest.port_num, it.dest.dlid) = (1, 1);
        it.dest.dgid = self.gid;
        it.dest.is_global = u8::from(!self.random.one_in(8));
        it.dest_qp_num = match self.random.one_in(2) {
            true => own,
            false => self.random.pick_mostly(&self.numbers.clone()) as u32,
        };
        it.qp_access_flags = 0xf;
        (it.qkey, it.timeout, it.retry_cnt, it.rnr_retry) = (QKEY, 1, 2, 2);
        (it.max_rd_atomic, it.max_dest_rd_atomic, it.min_rnr_timer) = (4, 4, 1);
        let when = |condition, mask| if condition { mask } else { Mask::empty() };
        let requests = matches!(kind, QpType::RC | QpType::XRC_INI);
        let responds = matches!(kind, QpType::RC | QpType::XRC_TGT);
        let ud = kind == QpType::UD;
        let rights = if ud { Mask::QKEY } else { Mask::ACCESS_FLAGS };
        let path = Mask::AV | Mask::PATH_MTU | Mask::DEST_QPN | Mask::RQ_PSN;
        let reads = Mask::MAX_DEST_RD_ATOMIC | Mask::MIN_RNR_TIMER;
        let retries = Mask::RETRY_CNT | Mask::RNR_RETRY | Mask::MAX_QP_RD_ATOMIC;
        // Attributes of a DC target, otherwise of an initiator.
        let target = self.random.one_in(2);
        let rest = match it.qp_state {
            1 if kind == QpType::DRIVER => {
                Mask::PKEY_INDEX | Mask::PORT | when(target, Mask::ACCESS_FLAGS)
            }
            2 if kind == QpType::DRIVER => {
                Mask::AV | Mask::PATH_MTU | when(target, Mask::MIN_RNR_TIMER)
            }
            1 if kind == QpType::RAW_PACKET => Mask::PORT,
            _ if kind == QpType::RAW_PACKET => Mask::empty(),
            3 if kind == QpType::DRIVER => Mask::SQ_PSN | Mask::TIMEOUT | retries,
            1 => Mask::PKEY_INDEX | Mask::PORT | rights,
            2 => when(!ud, path) | when(responds, reads),
            _ => Mask::SQ_PSN | when(requests || responds, Mask::TIMEOUT) | when(requests, retries),
        };
        let mask = Mask::STATE | rest;
        it.attr_mask = mask.bits();
        match self.random.below(10) {
            0 => it.attr_mask ^= 1 << self.random.below(26),
            1 if self.random.one_in(2) => {
                (it.qp_state, it.attr_mask) = (self.random.below(8) as u8, 1);
            }
            2 => {
                let at = self.random.below(104) as usize;
                it.as_mut_bytes()[at] = self.random.next() as u8;
            }
            _ => {}
        }
        self.change = Change::State(it.qp_handle, it.qp_state);
        if self.random.one_in(3) {
            let base = it;
            let it = ExModifyQp {
                base,
                rate_limit: 0,
                reserved: 0,
            };
            let mut command = Command::write(EX_MODIFY_QP, &it, 8);
            command.out(ATTR_UHW_OUT, 8);
            return command;
        }
        Command::write(CMD_MODIFY_QP, &it, 0)
    }

    fn other_command(&mut self) -> Command {
        let pd_handle = self.object(OBJECT_PD);
        match self.random.below(16) {
            0 => {
                let mw_type = self.random.below(4) as u8;
                let reserved = [0; 3];
                let body = AllocMw {
                    response: 0,
                    pd_handle,
                    mw_type,
                    reserved,
                };
                Command::write(CMD_ALLOC_MW, &body, 8)
            }
            1 => {
                let mut body = CreateAh {
                    pd_handle,
                    ..CreateAh::default()
                };
                (body.attr.port_num, body.attr.dlid) = (1, 1);
                body.attr.is_global = self.random.below(2) as u8;
                body.attr.grh.dgid = self.random.pick(&GROUPS);
                let mut command = Command::write(CMD_CREATE_AH, &body, 4);
                command.out(ATTR_UHW_OUT, 16);
                command
            }
            2 => {
                let fds = [u32::MAX, self.file.as_raw_fd() as u32];
                let body = OpenXrcd {
                    response: 0,
                    fd: self.random.pick_mostly(&fds) as u32,
                    oflags: self
                        .random
                        .pick(&[libc::O_CREAT, libc::O_CREAT, 0, libc::O_EXCL])
                        as u32,
                };
                Command::write(CMD_OPEN_XRCD, &body, 4)
            }
            3 => {
                let body = OpenQp {
                    pd_handle: self.object(OBJECT_XRCD),
                    qpn: self.random.pick_mostly(&self.numbers.clone()) as u32,
                    qp_type: 10,
                    ..OpenQp::default()
                };
                Command::write(CMD_OPEN_QP, &body, 32)
            }
            4 => Command::write(CMD_CREATE_COMP_CHANNEL, &CreateCompChannel::default(), 4),
            5 => {
                let mut command = Command::new(OBJECT_ASYNC_EVENT, METHOD_ASYNC_EVENT_ALLOC);
                command.object(ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE, 0);
                command
            }
            6 => {
                let body = QueryQp {
                    qp_handle: self.object(OBJECT_QP),
                    ..QueryQp::default()
                };
                Command::write(CMD_QUERY_QP, &body, 128)
            }
            7 => {
                let body = ResizeCq {
                    cq_handle: self.object(OBJECT_CQ),
                    cqe: self.size(9),
                    ..ResizeCq::default()
                };
                let mut command = Command::write(CMD_RESIZE_CQ, &body, 8);
                let size = self.random.pick(&[64u64, 64, 128]);
                command.driver([self.address(), size].as_bytes());
                command
            }
            8 => {
                let body = ModifySrq {
                    srq_handle: self.object(OBJECT_SRQ),
                    attr_mask: self.random.below(4) as u32,
                    max_wr: 0,
                    srq_limit: self.random.below(600) as u32,
                };
                Command::write(CMD_MODIFY_SRQ, &body, 0)
            }
            9 => {
                let body = QuerySrq {
                    srq_handle: self.object(OBJECT_SRQ),
                    ..QuerySrq::default()
                };
                Command::write(CMD_QUERY_SRQ, &body, 16)
            }
            10 => {
                let queue_pairs = self.client().queue_pairs.iter();
                let ud = queue_pairs.filter(|(_, pair)| pair.kind == QpType::UD);
                let ud: Vec<_> = ud.map(|(handle, _)| *handle).collect();
                let body = AttachMcast {
                    gid: self.random.pick(&GROUPS),
                    qp_handle: self.random.pick_mostly(&ud) as u32,
                    ..AttachMcast::default()
                };
                let number = self.random.pick(&[CMD_ATTACH_MCAST, CMD_DETACH_MCAST]);
                Command::write(number, &body, 0)
            }
            11 => {
                let number =
                    self.random.below(60) as u32 | self.random.pick(&[0, CMD_FLAG_EXTENDED]);
                // Commands with addresses in their structures are built by `region`.
                match number & 0xff {
                    CMD_REG_MR | CMD_REREG_MR => self.region(),
                    _ => Command::write(number, &[0u32; 32], 304),
                }
            }
            12 => {
                let mut command = Command::new(OBJECT_MR, METHOD_QUERY_MR);
                let mr = self.object(OBJECT_MR);
                command
                    .object(ATTR_QUERY_MR_HANDLE, mr.into())
                    .out(ATTR_QUERY_MR_RESP_LKEY, 4)
                    .out(ATTR_QUERY_MR_RESP_RKEY, 4)
                    .out(ATTR_QUERY_MR_RESP_LENGTH, 8);
                command
            }
            13 => self.create_flow(),
            14 => destroy_flow(self.object(OBJECT_FLOW)),
            _ => self.query(),
        }
    }

    /// Builds a command on device memory, or advice about regions.
    fn memory_command(&mut self) -> Command {
        let (pd, dm) = (self.object(OBJECT_PD), self.object(OBJECT_DM));
        match self.random.below(6) {
            0 | 1 => {
                let mut command = Command::new(OBJECT_DM, METHOD_DM_ALLOC);
                let lengths = [64u64, 4096, 5000, 1 << 17];
                command
                    .object(ATTR_ALLOC_DM_HANDLE, 0)
                    .constant(ATTR_ALLOC_DM_LENGTH, self.random.pick_mostly(&lengths))
                    .u32(ATTR_ALLOC_DM_ALIGNMENT, self.random.below(14) as u32)
                    .out(0x1000, 8)
                    .out(0x1001, 2)
                    .constant(0x1002, self.random.below(8) / 7);
                command
            }
            2 | 3 => {
                let mut command = Command::new(OBJECT_MR, METHOD_DM_MR_REG);
                let access = 1 << 5 | self.random.pick(&[0, 1, 0xf, 0xf, 0x1f]);
                command
                    .object(ATTR_REG_DM_MR_HANDLE, 0)
                    .constant(ATTR_REG_DM_MR_OFFSET, self.random.pick_mostly(&[0u64, 64]))
                    .constant(
                        ATTR_REG_DM_MR_LENGTH,
                        self.random.pick_mostly(&[64u64, 4096]),
                    )
                    .object(ATTR_REG_DM_MR_PD_HANDLE, pd.into())
                    .u32(ATTR_REG_DM_MR_ACCESS_FLAGS, access)
                    .object(ATTR_REG_DM_MR_DM_HANDLE, dm.into())
                    .out(ATTR_REG_DM_MR_RESP_LKEY, 4)
                    .out(ATTR_REG_DM_MR_RESP_RKEY, 4);
                command
            }
            4 => {
                let mut command = Command::new(OBJECT_DM, self.random.pick(&[0x1000, 0x1001]));
                command
                    .object(0x1000, dm.into())
                    .out(0x1001, 8)
                    .out(0x1002, 2)
                    .out(0x1003, 8);
                command
            }
            _ => {
                let key = self.random.pick_mostly(&self.keys.clone());
                let segment = [self.address(), self.random.below(300) | key << 32];
                let mut command = Command::new(OBJECT_MR, METHOD_ADVISE_MR);
                command
                    .object(ATTR_ADVISE_MR_PD_HANDLE, pd.into())
                    .constant(ATTR_ADVISE_MR_ADVICE, self.random.below(4))
                    .u32(ATTR_ADVISE_MR_FLAGS, self.random.below(2) as u32)
                    .input(ATTR_ADVISE_MR_SGE_LIST, segment.as_bytes());
                command
            }
        }
    }

    /// Builds a matcher, or a flow of one.
    fn matcher_command(&mut self) -> Command {
        let headers: Vec<u8> = (0..0x40)
            .map(|_| self.random.pick(&[0, 0, 0xff, 2]))
            .collect();
        let mut command;
        if self.random.one_in(2) {
            command = Command::new(OBJECT_FLOW_MATCHER, METHOD_FLOW_MATCHER_CREATE);
            command
                .object(ATTR_FLOW_MATCHER_CREATE_HANDLE, 0)
                .input(ATTR_FLOW_MATCHER_MATCH_MASK, &headers)
                .attr(ATTR_FLOW_MATCHER_FLOW_TYPE, 2, self.random.below(3))
                .input(
                    ATTR_FLOW_MATCHER_MATCH_CRITERIA,
                    &[self.random.below(2) as u8],
                );
            return command;
        }
        let matcher = self.object(OBJECT_FLOW_MATCHER);
        let packets = self.packets();
        let qp = self.random.pick_mostly(&packets);
        command = Command::new(OBJECT_FLOW, METHOD_CREATE_FLOW);
        command
            .object(ATTR_CREATE_FLOW_HANDLE, 0)
            .input(ATTR_CREATE_FLOW_MATCH_VALUE, &headers)
            .object(ATTR_CREATE_FLOW_MATCHER, matcher.into());
        match self.random.one_in(3) {
            true => command.u32(ATTR_CREATE_FLOW_FLAGS, FLOW_DROP),
            false => command.object(ATTR_CREATE_FLOW_DEST_QP, qp),
        };
        if self.random.one_in(3) {
            let action = self.object(OBJECT_FLOW_ACTION);
            command.input(ATTR_CREATE_FLOW_ACTIONS, &action.to_ne_bytes());
        }
        command
    }

    /// Builds a command on counters of flows, a flow action, or a flow that can use them.
    fn flow_object_command(&mut self) -> Command {
        let mut command;
        match self.random.below(6) {
            0 => {
                command = Command::new(OBJECT_COUNTERS, METHOD_COUNTERS_CREATE);
                command.object(ATTR_CREATE_COUNTERS_HANDLE, 0);
            }
            1 => {
                let counters = self.object(OBJECT_COUNTERS);
                command = Command::new(OBJECT_COUNTERS, METHOD_COUNTERS_READ);
                command
                    .object(ATTR_READ_COUNTERS_HANDLE, counters.into())
                    .out(ATTR_READ_COUNTERS_BUFF, self.random.pick(&[0, 8, 24, 800]))
                    .u32(ATTR_READ_COUNTERS_FLAGS, self.random.below(3) as u32);
            }
            2 => {
                // Sets, or adds to, fields.
                let count = 1 + self.random.below(3);
                let actions = (0..count).flat_map(|_| {
                    let kind = self.random.pick(&[0x10, 0x10, 0x20, 0x30]);
                    [kind, self.random.below(0x18) as u8, 0, 16, 0, 0, 0, 80]
                });
                let actions: Vec<u8> = actions.collect();
                command = Command::new(OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_MODIFY_HEADER);
                command
                    .object(ATTR_MODIFY_HEADER_HANDLE, 0)
                    .input(ATTR_MODIFY_HEADER_ACTIONS, &actions)
                    .constant(ATTR_MODIFY_HEADER_TABLE, self.random.below(8) / 7);
            }
            3 | 4 => command = self.create_flow(),
            _ => {
                let kind = self.random.pick(&[OBJECT_COUNTERS, OBJECT_FLOW_ACTION]);
                command = destroy(kind, self.object(kind));
            }
        }
        command
    }

    /// Adds the description of counters, in the arena, to a flow.
    fn describe_counters(&mut self, flow: &mut Command) {
        let address = match self.random.one_in(5) {
            true => self.address(),
            false => self.scratch(),
        };
        let points = [self.random.below(2) as u32, 2, 1, 0, 0, 300];
        if let Some(at) = address.checked_sub(self.arena.address()) {
            if at + 24 <= self.arena.len() as u64 {
                self.arena.set(at as usize, points.as_bytes());
            }
        }
        let count = self.random.pick_mostly(&[1u32, 2, 3]) as u32;
        let [low, high] = [address as u32, (address >> 32) as u32];
        flow.driver([1, 0, low, high, count, 0].as_bytes());
    }

    /// Returns the raw packet queue pairs.
    fn packets(&self) -> Vec<u32> {
        let queue_pairs = self.clients[self.current].queue_pairs.iter();
        let packets = queue_pairs.filter(|(_, pair)| pair.kind == QpType::RAW_PACKET);
        packets.map(|(handle, _)| *handle).collect()
    }

    /// Builds a flow, mostly to a raw packet queue pair, or mostly creates one if there is
    /// none.
    fn create_flow(&mut self) -> Command {
        let packets = self.packets();
        if packets.is_empty() && !self.random.one_in(4) {
            return self.create_qp_of(QpType::RAW_PACKET);
        }
        const LENGTHS: [(u32, u16); 4] = [(0x20, 40), (0x30, 32), (0x40, 16), (0x41, 16)];
        let mut body = CreateFlow {
            qp_handle: self.random.pick_mostly(&packets) as u32,
            ..CreateFlow::default()
        };
        // With actions for all frames, or mostly for those that match.
        let acts = self.random.one_in(2);
        let kind = match acts {
            true => 0,
            false => self.random.pick(&[0, 0, 0, 1, 2, 3]),
        };
        let count = if kind == 0 { self.random.below(4) } else { 0 };
        let mut specs = Vec::new();
        let mut is_counted = false;
        for _ in 0..count {
            if acts || self.random.one_in(4) {
                let kind = self.random.pick(&[0x1000u32, 0x1002, 0x1003, 0x1003]);
                let number = match kind {
                    0x1000 => self.random.below(3) as u32,
                    0x1002 => self.object(OBJECT_FLOW_ACTION),
                    _ => self.object(OBJECT_COUNTERS),
                };
                is_counted |= kind == 0x1003;
                specs.extend([kind, 16, number, 0].as_bytes());
                continue;
            }
            let (kind, length) = self.random.pick(&LENGTHS);
            specs.extend(kind.to_ne_bytes());
            specs.extend(length.to_ne_bytes());
            specs.extend([0; 2]);
            let parts = (8..length).map(|_| self.random.pick(&[0, 0xff, 2]));
            specs.extend(parts.collect::<Vec<u8>>());
        }
        let attr = &mut body.flow_attr;
        (attr.kind, attr.port) = (kind, 1);
        (attr.size, attr.num_of_specs) = (specs.len() as u16, count as u8);
        attr.priority = self.random.below(3) as u16;
        let mut command = Command::new(OBJECT_DEVICE, METHOD_INVOKE_WRITE);
        command
            .constant(ATTR_WRITE_CMD, EX_CREATE_FLOW.into())
            .input(ATTR_CORE_IN, &[body.as_bytes(), &specs].concat())
            .out(ATTR_CORE_OUT, 8);
        if is_counted && !self.random.one_in(4) {
            self.describe_counters(&mut command);
        }
        command
    }

    fn query(&mut self) -> Command {
        let method = self.random.pick(&[
            METHOD_QUERY_PORT,
            METHOD_GET_CONTEXT,
            METHOD_QUERY_CONTEXT,
            METHOD_QUERY_GID_TABLE,
            METHOD_QUERY_GID_ENTRY,
            METHOD_QUERY_PORT_SPEED,
        ]);
        let mut command = Command::new(OBJECT_DEVICE, method);
        match method {
            METHOD_QUERY_PORT => command.constant(0, 1).out(1, 48),
            METHOD_QUERY_PORT_SPEED => command.constant(0, 1).out(1, 8),
            METHOD_GET_CONTEXT => command
                .out(0, 4)
                .out(1, 8)
                .driver(&[16; 32])
                .out(ATTR_UHW_OUT, 72),
            METHOD_QUERY_CONTEXT => command.out(0, 4).out(1, 8).out(0x1000, 72),
            METHOD_QUERY_GID_TABLE => {
                let size = self.random.pick_mostly(&[32u64, 8, 40]);
                command.constant(0, size).u32(1, 0).out(2, 128).out(3, 8)
            }
            _ => command
                .constant(0, 1)
                .constant(1, self.random.below(3))
                .u32(2, 0)
                .out(3, 32),
        };
        command
    }

    fn destroy(&mut self) -> Command {
        let kind = self.random.pick(&[
            OBJECT_PD,
            OBJECT_CQ,
            OBJECT_QP,
            OBJECT_QP,
            OBJECT_SRQ,
            OBJECT_MR,
            OBJECT_MW,
            OBJECT_AH,
            OBJECT_XRCD,
            OBJECT_DM,
            OBJECT_FLOW_MATCHER,
        ]);
        let handle = self.object(kind);
        destroy(kind, handle)
    }

    fn command(&mut self) -> Command {
        self.change = Change::None;
        self.moved = false;
        let mut command = match self.random.below(33) {
            0 => {
                let mut command = Command::write(CMD_ALLOC_PD, &AllocPd::default(), 4);
                command.out(ATTR_UHW_OUT, 4);
                command
            }
            1..4 => self.create_cq(),
            4..7 => self.create_qp(),
            7 => self.create_srq(),
            8 => self.region(),
            9..17 => self.modify_qp(),
            17..22 => self.other_command(),
            22..25 => self.work_queue_command(),
            25..27 => self.memory_command(),
            27..29 => self.matcher_command(),
            29..31 => self.flow_object_command(),
            _ => self.destroy(),
        };
        if self.random.one_in(3) {
            for _ in 0..=self.random.below(2) {
                self.mutate(&mut command);
            }
        }
        command
    }

    /// Picks an address in the arena with enough space for any attribute.
    fn scratch(&mut self) -> u64 {
        let room = self.arena.len() as u64 - (1 << 16);
        self.arena.address() + self.random.below(room / 8) * 8
    }

    fn mutate(&mut self, command: &mut Command) {
        let queues = [OBJECT_CQ, OBJECT_QP, OBJECT_SRQ, OBJECT_WQ];
        let is_flow =
            |attr: &Attr| attr.attr_id == ATTR_WRITE_CMD && attr.data == u64::from(EX_CREATE_FLOW);
        let addresses =
            queues.contains(&command.header.object_id) || command.attrs.iter().any(is_flow);
        let region = command
            .attrs
            .iter()
            .any(|attr| attr.attr_id == ATTR_CORE_IN && matches!(usize::from(attr.len), 40 | 48));
        let Some(last) = command.attrs.len().checked_sub(1) else {
            return;
        };
        let at = self.random.below(last as u64 + 1) as usize;
        let scratch = self.scratch();
        match self.random.below(10) {
            0 => drop(command.attrs.remove(at)),
            1 => command.attrs.push(command.attrs[at]),
            // Of one attribute only: two answers must not be written to the same place.
            2 if !self.moved => {
                self.moved = true;
                let lengths = [0, 1, 3, 4, 5, 8, 9, 16, 20, 40, 48, 72, 1000, u16::MAX];
                let attr = &mut command.attrs[at];
                (attr.len, attr.data) = (self.random.pick(&lengths), scratch);
            }
            // The address and length of a region with on-demand paging are not checked when
            // it is registered, and must not be read from anywhere.
            3 if !region => {
                let address = self.address();
                let attr = &mut command.attrs[at];
                let number = self.random.number() % (1 << 32);
                attr.data = if attr.len > 8 { address } else { number };
            }
            4 => command.attrs[at].flags ^= 1,
            5 => command.attrs[at].enum_or_reserved = 1,
            6 => {
                command.attrs[at].attr_id = self
                    .random
                    .pick(&[0, 1, 2, 3, 5, 9, 14, 40, 0x1000, 0x1001])
            }
            7 => match self.random.below(6) {
                0 => command.header.object_id = self.random.below(19) as u16,
                1 => command.header.method_id = self.random.below(8) as u16,
                2 => command.header.reserved1 = self.random.number(),
                3 => command.header.length = self.random.number() as u16,
                4 => (command.header.num_attrs, command.header.length) = (1, 16),
                _ => command.header.driver_id = self.random.below(3) as u32,
            },
            8 => {
                let (mut at, byte) = (self.random.next() as usize, self.random.next() as u8);
                if command.header.object_id == OBJECT_QP {
                    // Up to the address of a send queue.
                    at %= 24;
                }
                let (id, from) = match self.random.one_in(2) {
                    true if !region => (ATTR_CORE_IN, 0),
                    _ if addresses => (ATTR_UHW_IN, 16),
                    _ => (ATTR_UHW_IN, 8),
                };
                command.set_byte(id, from, at, byte);
            }
            _ => command.truncate(ATTR_UHW_IN, self.random.below(60) as usize),
        }
    }

    /// Executes a command, and records the objects that it has created or destroyed.
    fn run(&mut self, command: &Command) {
        let context = Arc::clone(&self.client().context);
        // SAFETY: addresses are unmapped, the command's own or the arena's, by `address` and
        // `mutate`; the arena outlives the contexts.
        let Ok(attrs) = (unsafe { command.run(&context) }) else {
            return;
        };
        self.succeeded += 1;
        let change = std::mem::replace(&mut self.change, Change::None);
        let answer_word = |id, offset| {
            let attr = attrs.iter().find(|attr| attr.attr_id == id).unwrap();
            let from = std::ptr::with_exposed_provenance::<u32>(attr.data as usize + offset);
            // SAFETY: the command has written an answer there that is longer than the offset.
            unsafe { from.read_unaligned() }
        };
        let header = command.header;
        let number = attrs
            .iter()
            .find(|attr| attr.attr_id == ATTR_WRITE_CMD)
            .map(|attr| attr.data as u32);
        let client = &mut self.clients[self.current];
        if let Change::State(handle, state) = change {
            if let Some(pair) = client.queue_pairs.get_mut(&handle) {
                pair.state = state;
            }
        }
        let objects = &mut client.objects;
        let mut new = |kind, handle| objects.entry(kind).or_default().push(handle);
        match (header.object_id, header.method_id, number) {
            (OBJECT_DEVICE, METHOD_INVOKE_WRITE, Some(number)) => match number {
                CMD_ALLOC_PD => new(OBJECT_PD, answer_word(ATTR_CORE_OUT, 0)),
                CMD_ALLOC_MW => new(OBJECT_MW, answer_word(ATTR_CORE_OUT, 0)),
                CMD_CREATE_AH => new(OBJECT_AH, answer_word(ATTR_CORE_OUT, 0)),
                CMD_OPEN_XRCD => new(OBJECT_XRCD, answer_word(ATTR_CORE_OUT, 0)),
                CMD_OPEN_QP => new(OBJECT_QP, answer_word(ATTR_CORE_OUT, 0)),
                EX_CREATE_FLOW => new(OBJECT_FLOW, answer_word(ATTR_CORE_OUT, 4)),
                EX_CREATE_WQ_TABLE => new(OBJECT_RWQ_IND_TBL, answer_word(ATTR_CORE_OUT, 8)),
                EX_DESTROY_FLOW => {
                    let attr = attrs.iter().find(|attr| attr.attr_id == ATTR_CORE_IN);
                    let attr = attr.unwrap();
                    let handle = match attr.len {
                        0..=8 => (attr.data >> 32) as u32,
                        _ => {
                            let at = attr.data as usize + 4;
                            let from = std::ptr::with_exposed_provenance::<u32>(at);
                            // SAFETY: the command was read from there.
                            unsafe { from.read_unaligned() }
                        }
                    };
                    let all = objects.entry(OBJECT_FLOW).or_default();
                    let at = all.iter().position(|it| *it == handle);
                    all.remove(at.expect("a foreign flow was destroyed"));
                }
                CMD_REG_MR => {
                    new(OBJECT_MR, answer_word(ATTR_CORE_OUT, 0));
                    self.keys.push(answer_word(ATTR_CORE_OUT, 4));
                }
                CMD_ATTACH_MCAST => {
                    let attr = (attrs.iter())
                        .find(|attr| attr.attr_id == ATTR_CORE_IN)
                        .unwrap();
                    let from = std::ptr::with_exposed_provenance::<AttachMcast>(attr.data as usize);
                    // SAFETY: the command was read from there.
                    let group = unsafe { from.read_unaligned() };
                    self.clients[self.current].groups.push(group);
                }
                CMD_CREATE_COMP_CHANNEL => {
                    let fd = answer_word(ATTR_CORE_OUT, 0) as i32;
                    self.clients[self.current].files.push(fd);
                }
                _ => {}
            },
            (OBJECT_ASYNC_EVENT, ..) => self.clients[self.current]
                .files
                .push(created(&attrs, 0) as i32),
            (OBJECT_FLOW, METHOD_CREATE_FLOW, _) => {
                new(OBJECT_FLOW, created(&attrs, ATTR_CREATE_FLOW_HANDLE));
            }
            (OBJECT_FLOW_MATCHER, METHOD_FLOW_MATCHER_CREATE, _) => {
                let handle = created(&attrs, ATTR_FLOW_MATCHER_CREATE_HANDLE);
                new(OBJECT_FLOW_MATCHER, handle);
            }
            (OBJECT_COUNTERS, METHOD_COUNTERS_CREATE, _) => {
                new(OBJECT_COUNTERS, created(&attrs, 0));
            }
            (OBJECT_FLOW_ACTION, METHOD_FLOW_ACTION_MODIFY_HEADER, _) => {
                let handle = created(&attrs, ATTR_MODIFY_HEADER_HANDLE);
                new(OBJECT_FLOW_ACTION, handle);
            }
            (OBJECT_DM, METHOD_DM_ALLOC, _) => new(OBJECT_DM, created(&attrs, 0)),
            (OBJECT_MR, METHOD_DM_MR_REG, _) => {
                new(OBJECT_MR, created(&attrs, 0));
                self.keys.push(answer_word(ATTR_REG_DM_MR_RESP_LKEY, 0));
            }
            (OBJECT_CQ, METHOD_CQ_CREATE, _) => new(OBJECT_CQ, created(&attrs, 0)),
            (OBJECT_SRQ, METHOD_SRQ_CREATE, _) => new(OBJECT_SRQ, created(&attrs, 0)),
            (OBJECT_WQ, METHOD_WQ_CREATE, _) => new(OBJECT_WQ, created(&attrs, 0)),
            (OBJECT_QP, METHOD_QP_CREATE, _) => {
                new(OBJECT_QP, created(&attrs, 0));
                let number = answer_word(ATTR_CREATE_QP_RESP_QP_NUM, 0);
                self.numbers.push(number);
                if let Change::Created(pair) = change {
                    let pair = QueuePair { number, ..pair };
                    self.clients[self.current]
                        .queue_pairs
                        .insert(created(&attrs, 0), pair);
                }
            }
            (kind, method, _) => {
                // Only existing objects of the client can be destroyed.
                let destroys = match kind {
                    OBJECT_CQ | OBJECT_QP | OBJECT_SRQ | OBJECT_MR | OBJECT_WQ | OBJECT_DM
                    | OBJECT_COUNTERS | OBJECT_FLOW_ACTION => method == 1,
                    OBJECT_FLOW_MATCHER => method == METHOD_FLOW_MATCHER_DESTROY,
                    OBJECT_PD | OBJECT_MW | OBJECT_AH | OBJECT_XRCD | OBJECT_RWQ_IND_TBL => {
                        method == 0
                    }
                    _ => false,
                };
                if destroys {
                    let id = match kind {
                        OBJECT_FLOW_MATCHER => ATTR_FLOW_MATCHER_DESTROY_HANDLE,
                        _ => 0,
                    };
                    let handle = created(&attrs, id);
                    self.clients[self.current].queue_pairs.remove(&handle);
                    let all = self.clients[self.current].objects.entry(kind).or_default();
                    let at = all.iter().position(|it| *it == handle);
                    all.remove(at.expect("a foreign object was destroyed"));
                }
            }
        }
    }

    /// Changes words in the arena: of queues, of doorbell records, or unused ones.
    fn write_arena(&mut self) {
        for _ in 0..self.random.below(30) {
            let at = self.random.below(self.arena.len() as u64 / 8) as usize * 8;
            let mut word = match self.random.below(5) {
                0 => self.address().to_be_bytes(),
                1 => {
                    let key = self.random.pick_mostly(&self.keys.clone()) as u32;
                    (self.random.below(200) << 32 | u64::from(key)).to_be_bytes()
                }
                // A control segment: opcode, and the queue pair and its length.
                2 => {
                    let number = self.random.pick_mostly(&self.numbers.clone()) as u32;
                    let opcode = self
                        .random
                        .pick(&[0u64, 0x8, 0x9, 0xa, 0xb, 0x10, 0x11, 0x12, 0x25]);
                    let length = self.random.below(8);
                    (opcode << 32 | u64::from(number) << 8 | length).to_be_bytes()
                }
                3 => self.random.below(70).to_be_bytes(),
                _ => (self.random.below(70) << 32 | self.random.below(70)).to_be_bytes(),
            };
            if self.random.one_in(20) {
                word[self.random.below(8) as usize] = self.random.next() as u8;
            }
            self.arena.set(at, &word);
        }
    }

    /// Posts almost valid work requests, by writing the queue pair's memory and
    /// doorbell record.
    fn post_work(&mut self) {
        let queue_pairs: Vec<_> = self.client().queue_pairs.values().copied().collect();
        let Some(pair) =
            queue_pairs.get(self.random.below(queue_pairs.len().max(1) as u64) as usize)
        else {
            return;
        };
        let count = 1 + self.random.below(4);
        for n in 0..count {
            let opcode = self
                .random
                .pick(&[0x8u32, 0x9, 0xa, 0xb, 0x10, 0x11, 0x12, 0x25, 0]);
            let (remote, local) = (self.address(), self.address());
            let keys = self.keys.clone();
            let mut key = || self.random.pick_mostly(&keys) as u32;
            let (rkey, lkey) = (key(), key());
            let length = self.random.below(200) as u32;
            let segments = self.random.pick(&[1u32, 2, 3, 3, 3, 4]);
            let halves = |it: u64| [(it >> 32) as u32, it as u32];
            let [a, b] = halves(remote);
            let [c, d] = halves(local);
            let words = [
                (n as u32) << 8 | opcode,
                pair.number << 8 | segments,
                0x8,
                0,
                a,
                b,
                rkey,
                0,
                length,
                lkey,
                c,
                d,
            ];
            let at = pair
                .sends
                .wrapping_add(n % u64::from(pair.blocks.max(1)) * 64);
            let at = at.wrapping_sub(self.arena.address());
            let bytes = words.map(u32::to_be_bytes).concat();
            if at < (self.arena.len() - 64) as u64 {
                self.arena.set(at as usize, &bytes);
            }
        }
        let at = pair.records.wrapping_sub(self.arena.address());
        if at < (self.arena.len() - 8) as u64 {
            let receives = self.random.below(4) as u32;
            self.arena.set(
                at as usize,
                [receives.to_be(), (count as u32).to_be()].as_bytes(),
            );
        }
    }

    fn read_events(&mut self) {
        let context = Arc::clone(&self.client().context);
        for fd in self.client().files.clone() {
            let mut room = [0; 16];
            let room = &mut room[..self.random.below(17) as usize];
            // SAFETY: an event file of this context that is open.
            unsafe {
                context.kernel().set_nonblocking(fd, true).unwrap();
                let _ = context.kernel().read(fd, room);
            }
        }
        if self.random.one_in(8) {
            if let Some(fd) = self.client().files.pop() {
                close(&context, fd);
            }
        }
    }

    fn run_cm_command(&mut self) {
        let number = self.random.below(25) as u32;
        let lengths = [
            8, 16, 24, 24, 40, 136, 64, 272, 288, 296, 264, 128, 144, 304, 0, 12,
        ];
        let length = self.random.pick(&lengths);
        let header = cm::CmdHdr {
            cmd: number,
            in_len: length,
            out_len: self.random.pick(&[0, 4, 8, 208, 280, 400]),
        };
        let mut bytes = vec![0u8; length.into()];
        for at in (0..bytes.len()).step_by(8) {
            let word = match (at, self.random.below(4)) {
                (0 | 8, 0..3) => self.address(),
                (_, 0) => 0x0100_007f_0000_0002,
                (_, 1) => {
                    u64::from(self.random.below(400) as u32) << 32
                        | self.random.pick_mostly(&self.ids.clone())
                }
                (_, 2) => self.random.pick(&[0x106, 0x111, 2, 10, 4, 28]),
                _ => self.random.number(),
            };
            let rest = &mut bytes[at..];
            let length = rest.len().min(8);
            rest[..length].copy_from_slice(&word.to_ne_bytes()[..length]);
        }
        let response = (bytes.get(8..16)).map(|it| u64::from_ne_bytes(it.try_into().unwrap()));
        let buffer = [header.as_bytes(), &bytes].concat();
        // SAFETY: addresses are in the first two words, and unmapped or the arena's.
        let done = unsafe { self.manager.write(self.channel, &buffer) };
        if done.is_ok() && number == 0 && header.out_len >= 4 {
            let at = std::ptr::with_exposed_provenance::<u32>(response.unwrap() as usize);
            // SAFETY: the command has answered there.
            self.ids.push(unsafe { at.read_unaligned() });
        }
    }

    /// Destroys all objects of both drivers, which must succeed.
    fn destroy_all(&mut self) {
        for current in [0, 1, 0] {
            self.current = current;
            for group in std::mem::take(&mut self.client().groups) {
                self.run(&Command::write(CMD_DETACH_MCAST, &group, 0));
            }
            let flows = self.client().objects.get(&OBJECT_FLOW).cloned();
            for handle in flows.unwrap_or_default() {
                self.run(&destroy_flow(handle));
            }
            let kinds = [
                OBJECT_AH,
                OBJECT_MW,
                OBJECT_MR,
                OBJECT_QP,
                OBJECT_RWQ_IND_TBL,
                OBJECT_WQ,
                OBJECT_SRQ,
                OBJECT_CQ,
                OBJECT_XRCD,
                OBJECT_DM,
                OBJECT_FLOW_MATCHER,
                OBJECT_COUNTERS,
                OBJECT_FLOW_ACTION,
                OBJECT_PD,
            ];
            for kind in kinds {
                for handle in self
                    .client()
                    .objects
                    .get(&kind)
                    .cloned()
                    .unwrap_or_default()
                {
                    self.run(&destroy(kind, handle));
                }
            }
        }
        for client in &self.clients {
            let left: Vec<_> = client
                .objects
                .iter()
                .filter(|(_, all)| !all.is_empty())
                .collect();
            assert!(left.is_empty(), "objects cannot be destroyed: {left:?}");
        }
    }
}

fn destroy_flow(flow_handle: u32) -> Command {
    let body = DestroyFlow {
        comp_mask: 0,
        flow_handle,
    };
    Command::write(EX_DESTROY_FLOW, &body, 0)
}

/// Asserts that a correct driver still works.
fn check_correct_driver(hosts: &(Host, Host)) {
    let (a, b) = hosts;
    let (mut cqa, mut cqb) = (a.cq(16), b.cq(16));
    let mut qa = a.qp(QpType::RC, &mut cqa);
    let mut qb = b.qp(QpType::RC, &mut cqb);
    connect_pair(QpType::RC, (&qa, a), (&qb, b));
    let (from, to) = (a.memory(64), b.memory(64));
    from.set(0, b"a message");
    receive(&mut qb, 1, to.sge(0, 64));
    post(&mut qa, 2, Operation::Send, from.sge(0, 9));
    assert_eq!(poll(a, &mut cqa).status, 0);
    let wc = poll(b, &mut cqb);
    assert_eq!((wc.wr_id, wc.status, wc.byte_len), (1, 0, 9));
    assert_eq!(to.get(0, 9), b"a message");
}

fn open(embedded: &Embedded) -> Client {
    let context = Arc::new(embedded.context().unwrap());
    let (_, device) = mlx5::DeviceContext::open(&context).unwrap();
    Client {
        context,
        uar: device.cq_uar_page().unwrap(),
        objects: BTreeMap::new(),
        files: Vec::new(),
        groups: Vec::new(),
        queue_pairs: BTreeMap::new(),
    }
}

/// Runs a sequence. Returns the number of commands that succeeded.
pub fn sequence(mut random: Random<'_>) -> u64 {
    let arena = &Arena::new(ARENA);
    let network = Network::new(Drive::Caller).unwrap();
    let profile = random.pick(&["ib", "roce"]);
    let embedded = match random.one_in(2) {
        true => network.strict_device(profile),
        false => network.device(profile),
    }
    .unwrap();
    let mut hosts = (Host::new(&embedded), Host::new(&embedded));
    // The random driver causes complaints.
    (hosts.0.checks_complaints, hosts.1.checks_complaints) = (false, false);
    let clients = [open(&embedded), open(&embedded)];
    // UARs are allocated on first use.
    check_correct_driver(&hosts);
    let before = (embedded.objects(), embedded.ranges());
    let manager = embedded.connection_manager();
    let channel = manager
        .open(c"/dev/infiniband/rdma_cm", libc::O_RDWR)
        .unwrap();
    let mut driver = RandomDriver {
        random,
        arena,
        clients,
        current: 0,
        keys: Vec::new(),
        numbers: Vec::new(),
        gid: hosts.0.path().grh.dgid,
        manager,
        channel,
        ids: Vec::new(),
        change: Change::None,
        moved: false,
        file: std::fs::File::open("/dev/null").unwrap(),
        succeeded: 0,
    };
    for _ in 0..4 {
        driver.current = 1 - driver.current;
        let mut domain = Command::write(CMD_ALLOC_PD, &AllocPd::default(), 4);
        driver.run(domain.out(ATTR_UHW_OUT, 4));
        let queue = driver.create_cq();
        driver.run(&queue);
    }
    for _ in 0..COMMANDS {
        if driver.random.is_exhausted() {
            break;
        }
        driver.current = usize::from(driver.random.one_in(5));
        let command = driver.command();
        driver.run(&command);
        match driver.random.below(8) {
            0 => driver.write_arena(),
            3 | 4 => driver.post_work(),
            1 => driver.read_events(),
            2 => driver.run_cm_command(),
            _ => {}
        }
        for _ in 0..driver.random.below(6) {
            embedded.drive();
        }
    }
    arena.check();
    check_correct_driver(&hosts);
    driver.destroy_all();
    for _ in 0..10 {
        embedded.drive();
    }
    assert_eq!((embedded.objects(), embedded.ranges()), before);
    check_correct_driver(&hosts);
    for client in &mut driver.clients {
        for fd in std::mem::take(&mut client.files) {
            close(&client.context, fd);
        }
    }
    // SAFETY: the channel was opened here, and is no longer used.
    unsafe { driver.manager.close(driver.channel) }.unwrap();
    arena.check();
    driver.succeeded
}
