//! The smallest engine that there can be, for tests, fuzzing and measurements:
//! flat memory, keys in a list, queues that the caller fills.

use std::collections::VecDeque;

use super::{
    Access, AtomicOp, Fault, Host, QpConfig, QpEvent, QpState, Queue, RecvDone, RecvWork, SendDone,
    SendWork, Status, Target, Transport,
};
use crate::fabric::{Fabric, Port, PortConfig};
use crate::packet::{Gid, Grh, Link, LinkKind, Path, Pool, gid_of_ipv4};

/// Local buffers: one range of the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// Where it begins.
    pub start: usize,
    /// Accesses from this offset on fail.
    pub length: u32,
}

/// Memory that a peer may name.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// The key.
    pub rkey: u32,
    /// Its first address.
    pub va: u64,
    /// Where in the memory that is.
    pub start: usize,
    /// How long.
    pub length: u32,
    /// What the peer may do.
    pub access: [bool; 3],
}

/// The queues of a queue pair, and what came of their work requests.
#[derive(Default)]
pub struct Queues {
    /// The queue pair.
    pub qpn: u32,
    /// Sends that are posted.
    pub sends: VecDeque<SendWork<Range>>,
    /// Receives that are posted.
    pub recvs: VecDeque<RecvWork<Range>>,
    /// Sends that have ended: identifier and result.
    pub sent: Vec<(u64, SendDone)>,
    /// Receives that have ended.
    pub received: Vec<(u64, RecvDone)>,
    /// Events.
    pub events: Vec<QpEvent>,
    /// Local operations that were run.
    pub ran: Vec<u64>,
}

/// Memory, keys and queues of one HCA.
#[derive(Default)]
pub struct Model {
    /// The memory.
    pub memory: Vec<u8>,
    /// What peers may access.
    pub regions: Vec<Region>,
    /// By queue pair; of an XRC SRQ by its number plus 2^24.
    pub queues: Vec<Queues>,
    /// Ended sends and receives are only counted.
    pub count_only: bool,
    /// How many sends have ended well.
    pub sends_ended: u64,
    /// How many receives have ended well.
    pub recvs_ended: u64,
}

/// The queues of an XRC SRQ are found under its number plus this.
pub const XRC_SRQ: u32 = 1 << 24;
/// XRC SRQs from this number on are in a domain that no target is in.
pub const XRC_STRANGERS: u32 = 0x80_0000;

impl Model {
    /// The queues of a number, made when first asked for.
    pub fn queues(&mut self, qpn: u32) -> &mut Queues {
        let index = match self.queues.iter().position(|q| q.qpn == qpn) {
            Some(index) => index,
            None => {
                self.queues.push(Queues {
                    qpn,
                    ..Queues::default()
                });
                self.queues.len() - 1
            }
        };
        &mut self.queues[index]
    }

    fn local(&mut self, local: Range, offset: u32, length: usize) -> Result<&mut [u8], Fault> {
        let end = offset as usize + length;
        if end > local.length as usize {
            return Err(Fault::Protection);
        }
        let start = local.start + offset as usize;
        self.memory
            .get_mut(start..local.start + end)
            .ok_or(Fault::Protection)
    }

    fn remote(
        &mut self,
        rkey: u32,
        va: u64,
        length: usize,
        access: Access,
    ) -> Result<&mut [u8], Fault> {
        let region = *self
            .regions
            .iter()
            .find(|r| r.rkey == rkey)
            .ok_or(Fault::Protection)?;
        let offset = va.checked_sub(region.va).ok_or(Fault::Protection)?;
        let end = offset.checked_add(length as u64).ok_or(Fault::Protection)?;
        if !region.access[access as usize] || end > u64::from(region.length) {
            return Err(Fault::Protection);
        }
        let start = region.start + offset as usize;
        self.memory
            .get_mut(start..start + length)
            .ok_or(Fault::Memory)
    }
}

impl Host for Model {
    type Local = Range;

    fn next_send(&mut self, qpn: u32) -> Option<SendWork<Range>> {
        self.queues(qpn).sends.pop_front()
    }

    fn gather(
        &mut self,
        _qpn: u32,
        local: &mut Range,
        offset: u32,
        out: &mut [u8],
    ) -> Result<(), Fault> {
        out.copy_from_slice(self.local(*local, offset, out.len())?);
        Ok(())
    }

    fn scatter(
        &mut self,
        _qpn: u32,
        local: &mut Range,
        offset: u32,
        data: &[u8],
    ) -> Result<(), Fault> {
        self.local(*local, offset, data.len())?
            .copy_from_slice(data);
        Ok(())
    }

    fn store_atomic(&mut self, _qpn: u32, local: &mut Range, value: u64) -> Result<(), Fault> {
        self.local(*local, 0, 8)?
            .copy_from_slice(&value.to_le_bytes());
        Ok(())
    }

    fn run_local(&mut self, qpn: u32, work: &mut SendWork<Range>) -> Result<(), Status> {
        self.queues(qpn).ran.push(work.id);
        Ok(())
    }

    fn send_done(&mut self, qpn: u32, work: SendWork<Range>, done: SendDone) {
        self.sends_ended += u64::from(done.status == Status::Success);
        if !self.count_only {
            self.queues(qpn).sent.push((work.id, done));
        }
    }

    fn may_name(&self, _: u32, xrc_srqn: u32) -> bool {
        xrc_srqn < XRC_STRANGERS
    }

    fn next_recv(&mut self, qpn: u32, xrc_srqn: Option<u32>) -> Option<RecvWork<Range>> {
        self.queues(xrc_srqn.map_or(qpn, |n| n + XRC_SRQ))
            .recvs
            .pop_front()
    }

    fn recv_done(&mut self, qpn: u32, work: RecvWork<Range>, done: RecvDone) {
        self.recvs_ended += u64::from(done.status == Status::Success);
        if !self.count_only {
            self.queues(qpn).received.push((work.id, done));
        }
    }

    fn check_remote(
        &mut self,
        _target: Target,
        rkey: u32,
        va: u64,
        length: u32,
        access: Access,
    ) -> Result<(), Fault> {
        self.remote(rkey, va, length as usize, access).map(|_| ())
    }

    fn remote_write(
        &mut self,
        _target: Target,
        rkey: u32,
        va: u64,
        data: &[u8],
    ) -> Result<(), Fault> {
        self.remote(rkey, va, data.len(), Access::Write)?
            .copy_from_slice(data);
        Ok(())
    }

    fn remote_read(
        &mut self,
        _target: Target,
        rkey: u32,
        va: u64,
        out: &mut [u8],
    ) -> Result<(), Fault> {
        out.copy_from_slice(self.remote(rkey, va, out.len(), Access::Read)?);
        Ok(())
    }

    fn remote_atomic(
        &mut self,
        _target: Target,
        rkey: u32,
        va: u64,
        operation: AtomicOp,
    ) -> Result<u64, Fault> {
        let memory = self.remote(rkey, va, 8, Access::Atomic)?;
        let mut bytes = [0; 8];
        bytes.copy_from_slice(memory);
        let before = u64::from_le_bytes(bytes);
        let after = match operation {
            AtomicOp::FetchAdd { add } => before.wrapping_add(add),
            AtomicOp::CompareSwap { compare, swap } if before == compare => swap,
            AtomicOp::CompareSwap { .. } => before,
        };
        memory.copy_from_slice(&after.to_le_bytes());
        Ok(before)
    }

    fn invalidate(&mut self, _target: Target, rkey: u32) -> Result<(), Fault> {
        let index = self
            .regions
            .iter()
            .position(|r| r.rkey == rkey)
            .ok_or(Fault::Protection)?;
        self.regions.swap_remove(index);
        Ok(())
    }

    fn event(&mut self, qpn: u32, event: QpEvent) {
        self.queues(qpn).events.push(event);
    }
}

/// One HCA: transport, engine, port.
pub struct Hca {
    /// The transport.
    pub transport: Transport<Range>,
    /// The engine.
    pub host: Model,
    /// The port.
    pub port: Port,
    /// Its number, from 0.
    pub index: usize,
    kind: LinkKind,
    inbox: VecDeque<crate::packet::Packet>,
}

impl Hca {
    /// Posts a send.
    pub fn post_send(&mut self, qpn: u32, work: SendWork<Range>) {
        self.host.queues(qpn).sends.push_back(work);
        self.transport.ring(qpn, Queue::Send);
    }

    /// Posts a receive.
    pub fn post_recv(&mut self, qpn: u32, id: u64, start: usize, length: u32) {
        let local = Range { start, length };
        self.host
            .queues(qpn)
            .recvs
            .push_back(RecvWork { id, length, local });
        self.transport.ring(qpn, Queue::Receive);
    }

    /// Takes in and does whatever there is; whether there was something.
    pub fn turn(&mut self, now: u64) -> bool {
        let mut active = false;
        self.port.recv_all(now, 256, &mut self.inbox);
        while let Some(packet) = self.inbox.pop_front() {
            active = true;
            drop(self.transport.receive(&mut self.host, now, packet));
        }
        active |= self.transport.run(&mut self.host, now, 256);
        let mut sent = false;
        let transport = &mut self.transport;
        self.port.send_all(
            now,
            std::iter::from_fn(|| transport.pop()).inspect(|_| sent = true),
        );
        active | sent
    }

    /// The GID of an HCA.
    #[must_use]
    pub fn gid(index: usize) -> Gid {
        gid_of_ipv4([10, 0, 0, index as u8 + 1])
    }

    /// The MAC address of an HCA.
    #[must_use]
    pub fn mac(index: usize) -> [u8; 6] {
        [2, 0, 0, 0, 0, index as u8 + 1]
    }

    /// The way from here to another HCA.
    #[must_use]
    pub fn path_to(&self, peer: usize) -> Path {
        let grh = Grh {
            sgid: Self::gid(self.index),
            dgid: Self::gid(peer),
            ..Grh::default()
        };
        match self.kind {
            LinkKind::Ib => Path::ib(self.index as u16 + 1, peer as u16 + 1),
            LinkKind::Ethernet => {
                let link = Link::Ether {
                    smac: Self::mac(self.index),
                    dmac: Self::mac(peer),
                    vlan: None,
                };
                let grh = Some(Grh {
                    hop_limit: 64,
                    ..grh
                });
                Path {
                    link,
                    grh,
                    ..Path::ib(0, 0)
                }
            }
        }
    }
}

/// Some HCAs, and time.
pub struct World {
    /// The HCAs.
    pub hcas: Vec<Hca>,
    /// The network between them.
    pub fabric: Fabric,
    /// Nanoseconds.
    pub now: u64,
}

impl World {
    /// HCAs with `memory` bytes each.
    #[must_use]
    pub fn new(count: usize, kind: LinkKind, memory: usize, seed: u64) -> Self {
        let fabric = Fabric::new(seed);
        let pool = Pool::new();
        let hcas = (0..count)
            .map(|index| Hca {
                transport: Transport::new(pool.clone()),
                host: Model {
                    memory: vec![0; memory],
                    ..Model::default()
                },
                port: fabric.port(match kind {
                    LinkKind::Ib => PortConfig::ib(index as u16 + 1),
                    LinkKind::Ethernet => PortConfig::ethernet(Hca::mac(index)),
                }),
                index,
                kind,
                inbox: VecDeque::new(),
            })
            .collect();
        Self {
            hcas,
            fabric,
            now: 0,
        }
    }

    /// Connects queue pair `a.1` of HCA `a.0` with `b`, both ready to send.
    pub fn connect(&mut self, a: (usize, u32), b: (usize, u32), config: &QpConfig) {
        for (here, there) in [(a, b), (b, a)] {
            let hca = &mut self.hcas[here.0];
            let config = QpConfig {
                path: Some(hca.path_to(there.0)),
                remote_qpn: there.1,
                ..config.clone()
            };
            let _ = hca.transport.create(here.1, config.clone());
            hca.raise(here.1, &config, self.now);
        }
    }

    /// One turn of every HCA; whether something was done.
    pub fn turn(&mut self) -> bool {
        let now = self.now;
        self.hcas
            .iter_mut()
            .fold(false, |active, hca| hca.turn(now) | active)
    }

    /// Goes on until nothing is left to do, or for `limit` nanoseconds.
    pub fn settle(&mut self, limit: u64) {
        let end = self.now + limit;
        loop {
            while self.turn() {}
            let next = self
                .hcas
                .iter()
                .flat_map(|h| [h.transport.deadline(), h.port.deadline()])
                .flatten()
                .min();
            match next {
                Some(at) if at <= end => self.now = self.now.max(at),
                _ => break,
            }
        }
    }
}

impl Hca {
    /// Takes a queue pair from reset to ready to send.
    pub fn raise(&mut self, qpn: u32, config: &QpConfig, now: u64) {
        for to in [QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend] {
            let _ = self
                .transport
                .modify(&mut self.host, now, qpn, to, config.clone());
        }
    }
}
