//! A minimal engine for tests, fuzzing and measurements: flat memory, a list of keys,
//! and queues that the caller fills.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{
    Access, AtomicOp, Cause, Counted, EngineError, Fault, Host, MessageStart, QpConfig, QpEvent,
    QpState, Queue, RecvDone, RecvWork, SendDone, SendWork, Status, Target, Transport,
};
use crate::fabric::{Fabric, Port, PortConfig};
use crate::packet::{Gid, LinkKind, Path, Payload, Pool, gid_of_ipv4};

/// Local buffers: one range of the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// Offset of the first byte in the memory.
    pub start: usize,
    /// Length; accesses from this offset on fail.
    pub length: u32,
}

/// Remote memory: what peers may access.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// rkey.
    pub rkey: u32,
    /// First virtual address.
    pub va: u64,
    /// Offset of the first byte in the memory.
    pub start: usize,
    /// Length in bytes.
    pub length: u32,
    /// Permitted accesses, indexed by [`Access`].
    pub access: [bool; 3],
}

/// The queues of a queue pair, and the completions of their work requests.
#[derive(Default)]
pub struct Queues {
    /// Queue pair number.
    pub qpn: u32,
    /// Posted sends.
    pub sends: VecDeque<SendWork<Range>>,
    /// Posted receives.
    pub recvs: VecDeque<RecvWork<Range>>,
    /// Completed sends: identifier and result.
    pub sent: Vec<(u64, SendDone)>,
    /// Completed receives: identifier and result.
    pub received: Vec<(u64, RecvDone)>,
    /// Events.
    pub events: Vec<QpEvent>,
    /// Identifiers of the local operations that were run.
    pub ran: Vec<u64>,
}

/// Memory, keys and queues of one HCA.
#[derive(Default)]
pub struct Model {
    /// The memory.
    pub memory: Vec<u8>,
    /// Regions that peers may access.
    pub regions: Vec<Region>,
    /// Queues by queue pair number; those of an XRC SRQ by its number plus [`XRC_SRQ`].
    pub queues: Vec<Queues>,
    /// The first causes that were reported, with the queue pair.
    pub causes: Vec<(Option<u32>, Cause)>,
    /// Completions are counted, not recorded.
    pub count_only: bool,
    /// Number of sends that succeeded.
    pub sends_ended: u64,
    /// Number of receives that succeeded.
    pub recvs_ended: u64,
    /// Counted events.
    pub counted: Vec<Counted>,
    /// How long peers may be silent before retries count, in nanoseconds.
    pub max_silence: u64,
    /// So many of the next accesses on behalf of peers find memory absent.
    pub absent: u32,
}

/// Number of causes that are kept.
const MAX_CAUSES: usize = 10_000;
/// Offset that is added to the number of an XRC SRQ to find its queues.
pub const XRC_SRQ: u32 = 1 << 24;
/// XRC SRQs from this number on are in a domain that no target belongs to.
pub const XRC_STRANGERS: u32 = 0x80_0000;

impl Model {
    /// Returns the queues of a number, created on first use.
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

    /// Fails if the memory that a peer's packet needs is absent.
    fn page_in(&mut self) -> Result<(), Fault> {
        match self.absent.checked_sub(1) {
            None => Ok(()),
            Some(left) => {
                self.absent = left;
                Err(Fault::Absent)
            }
        }
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
    type LocalBuffers = Range;

    fn next_send(&mut self, qpn: u32) -> Option<SendWork<Range>> {
        self.queues(qpn).sends.pop_front()
    }

    fn max_silence(&self, _path: &Path, _qpn: u32) -> u64 {
        self.max_silence
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
        self.page_in()?;
        self.local(*local, offset, data.len())?
            .copy_from_slice(data);
        Ok(())
    }

    fn store_atomic(&mut self, _qpn: u32, local: &mut Range, value: u64) -> Result<(), Fault> {
        self.local(*local, 0, 8)?
            .copy_from_slice(&value.to_le_bytes());
        Ok(())
    }

    fn run_local(&mut self, qpn: u32, work: &mut SendWork<Range>) -> Result<(), EngineError> {
        self.queues(qpn).ran.push(work.id);
        Ok(())
    }

    fn send_done(&mut self, qpn: u32, work: SendWork<Range>, done: SendDone) {
        self.sends_ended += u64::from(done.status() == Status::Success);
        if !self.count_only {
            self.queues(qpn).sent.push((work.id, done));
        }
    }

    fn may_name(&self, _: u32, xrc_srqn: u32) -> bool {
        xrc_srqn < XRC_STRANGERS
    }

    fn next_recv(
        &mut self,
        qpn: u32,
        xrc_srqn: Option<u32>,
        _: Option<&MessageStart<'_>>,
    ) -> Option<RecvWork<Range>> {
        self.queues(xrc_srqn.map_or(qpn, |n| n + XRC_SRQ))
            .recvs
            .pop_front()
    }

    fn recv_done(&mut self, qpn: u32, work: RecvWork<Range>, done: RecvDone) -> bool {
        self.recvs_ended += u64::from(done.status() == Status::Success);
        if !self.count_only {
            self.queues(qpn).received.push((work.id, done));
        }
        false
    }

    fn check_remote(
        &mut self,
        _target: Target,
        rkey: u32,
        va: u64,
        length: u32,
        access: Access,
    ) -> Result<(), Fault> {
        self.page_in()?;
        self.remote(rkey, va, length as usize, access).map(|_| ())
    }

    fn remote_write(
        &mut self,
        _target: Target,
        rkey: u32,
        va: u64,
        data: Payload<'_>,
    ) -> Result<(), Fault> {
        self.remote(rkey, va, data.len(), Access::Write)?
            .copy_from_slice(data.bytes());
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

    fn report(&mut self, qpn: Option<u32>, cause: Cause) {
        #[cfg(test)]
        super::tests::causes::record(cause);
        if !self.count_only && self.causes.len() < MAX_CAUSES {
            self.causes.push((qpn, cause));
        }
    }

    fn count(&mut self, _qpn: u32, event: Counted) {
        if !self.count_only {
            self.counted.push(event);
        }
    }

    fn event(&mut self, qpn: u32, event: QpEvent) {
        self.queues(qpn).events.push(event);
    }
}

/// One HCA: transport, engine and port.
pub struct Hca {
    /// The transport.
    pub transport: Transport<Range>,
    /// The engine.
    pub host: Model,
    /// The port.
    pub port: Arc<Port>,
    /// Index of the HCA, from 0.
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

    /// Processes arrived packets and due timers. Returns whether there were any.
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

    /// Returns the GID of an HCA.
    #[must_use]
    pub fn gid(index: usize) -> Gid {
        gid_of_ipv4([10, 0, 0, index as u8 + 1])
    }

    /// Returns the MAC address of an HCA.
    #[must_use]
    pub fn mac(index: usize) -> [u8; 6] {
        [2, 0, 0, 0, 0, index as u8 + 1]
    }

    /// Returns the path from this HCA to another.
    #[must_use]
    pub fn path_to(&self, peer: usize) -> Path {
        let (sgid, dgid) = (Self::gid(self.index), Self::gid(peer));
        match self.kind {
            LinkKind::Ib => Path::ib(self.index as u16 + 1, peer as u16 + 1),
            LinkKind::Ethernet => Path::roce_v2(Self::mac(self.index), Self::mac(peer), sgid, dgid),
            LinkKind::Ip => Path::ip(sgid, dgid),
        }
    }
}

/// A number of HCAs on one fabric, with a simulated clock.
pub struct World {
    /// The HCAs.
    pub hcas: Vec<Hca>,
    /// The network between them.
    pub fabric: Fabric,
    /// Current time in nanoseconds.
    pub now: u64,
}

impl World {
    /// Creates HCAs with `memory` bytes each. With [`LinkKind::Ip`], the first two are
    /// connected.
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
                port: Arc::new(fabric.port(match kind {
                    LinkKind::Ib => PortConfig::ib(index as u16 + 1),
                    LinkKind::Ethernet => PortConfig::ethernet(Hca::mac(index)),
                    LinkKind::Ip => PortConfig::ip(),
                })),
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

    /// Connects queue pair `a.1` of HCA `a.0` with `b`; both become ready to send.
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

    /// Runs one turn of every HCA. Returns whether anything was done.
    pub fn turn(&mut self) -> bool {
        let now = self.now;
        self.hcas
            .iter_mut()
            .fold(false, |active, hca| hca.turn(now) | active)
    }

    /// Runs until nothing is left to do, or for `limit` nanoseconds.
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
    /// Moves a queue pair from reset to ready to send.
    pub fn raise(&mut self, qpn: u32, config: &QpConfig, now: u64) {
        for to in [QpState::Init, QpState::ReadyToReceive, QpState::ReadyToSend] {
            let _ = self
                .transport
                .modify(&mut self.host, now, qpn, to, config.clone());
        }
    }
}
