//! Queue pairs, and the send and receive queues of the network interface, as
//! the driver sees them: their buffers, indices and attributes. What they do
//! on the wire is the transport's.

use super::buffer::Buffer;
use super::core::Core;
use super::eq::event;
use super::wqe::{self, Kept, Local, Reading};
use crate::bits::{field, get_array, get64};
use crate::packet::{Grh, Link, Path, Roce};
use crate::platform::Platform;
use crate::profile::PortKind;
use crate::transport::{Datagram, Operation, QpConfig, RecvWork, SendWork, Service};

/// The half of a queue that the driver posts to.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    pub(crate) buffer: Buffer,
    /// Where it begins in the buffer.
    pub(crate) offset: u64,
    pub(crate) log_size: u32,
    pub(crate) log_stride: u32,
    /// Where the driver writes how much it has posted.
    pub(crate) doorbell: u64,
    pub(crate) head: u16,
    pub(crate) tail: u16,
}

impl Ring {
    fn mask(&self) -> u16 {
        // The largest queues have 2^15 entries or blocks.
        ((1u32 << self.log_size) - 1) as u16
    }

    fn empty(&self) -> bool {
        self.head == self.tail
    }
}

/// A WQE that came by BlueFlame.
#[derive(Debug, Clone)]
pub(crate) struct BlueFlame {
    pub(crate) index: u16,
    pub(crate) bytes: Vec<u8>,
}

impl BlueFlame {
    /// The first byte that is another one in the ring: where, what the ring
    /// has, and what this has.
    fn differs(&self, ring: &[u8]) -> Option<(usize, u8, u8)> {
        let both = ring.iter().zip(&self.bytes).enumerate();
        both.map(|(at, (&ring, &copy))| (at, ring, copy))
            .find(|(_, ring, copy)| ring != copy)
    }
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) service: Service,
    pub(crate) pd: u32,
    pub(crate) privileged: bool,
    pub(crate) uidx: u32,
    pub(crate) send_cq: u32,
    pub(crate) recv_cq: u32,
    pub(crate) srqn: Option<u32>,
    /// Of an XRC target.
    pub(crate) xrcd: Option<u32>,
    pub(crate) counter_set: u32,
    pub(crate) send: Option<Ring>,
    pub(crate) recv: Option<Ring>,
    pub(crate) blue_flame: Option<BlueFlame>,
    /// Most data in a completion, of what is received and what is read.
    pub(crate) scatter_received: u8,
    pub(crate) scatter_read: u8,
    /// The context as the driver gave it, merged over the transitions: it
    /// gets it back.
    pub(crate) context: Box<[u8; super::super::command::qp::CONTEXT_SIZE]>,
    pub(crate) config: QpConfig,
    pub(crate) in_error: bool,
}

impl Qp {
    pub(crate) fn is_in_error(&self) -> bool {
        self.in_error
    }
}

/// A send queue of the network interface.
#[derive(Debug)]
pub(crate) struct Sq {
    pub(crate) pd: u32,
    pub(crate) cqn: u32,
    pub(crate) uidx: u32,
    pub(crate) state: u32,
    /// What it sends by.
    pub(crate) tis: u32,
    pub(crate) ring: Ring,
    pub(crate) context: Vec<u8>,
    pub(crate) blue_flame: Option<BlueFlame>,
}

/// A receive queue of the network interface.
#[derive(Debug)]
pub(crate) struct Rq {
    pub(crate) pd: u32,
    pub(crate) cqn: u32,
    pub(crate) uidx: u32,
    pub(crate) state: u32,
    pub(crate) ring: Ring,
    pub(crate) context: Vec<u8>,
}

/// All that share the numbers that doorbells and completions name.
#[derive(Debug)]
pub(crate) enum Queue {
    Qp(Box<Qp>),
    Sq(Box<Sq>),
    Rq(Box<Rq>),
}

impl Queue {
    pub(crate) fn pd(&self) -> Option<u32> {
        match self {
            Queue::Qp(qp) => Some(qp.pd),
            Queue::Sq(sq) => Some(sq.pd),
            Queue::Rq(rq) => Some(rq.pd),
        }
    }

    pub(crate) fn completes_to(&self, cqn: u32) -> bool {
        match self {
            Queue::Qp(qp) => {
                (qp.send.is_some() && qp.send_cq == cqn)
                    || ((qp.recv.is_some() || qp.srqn.is_some()) && qp.recv_cq == cqn)
            }
            Queue::Sq(sq) => sq.cqn == cqn,
            Queue::Rq(rq) => rq.cqn == cqn,
        }
    }

    pub(crate) fn uses_srq(&self, srqn: u32) -> bool {
        matches!(self, Queue::Qp(qp) if qp.srqn == Some(srqn))
    }
}

/// What a send request is known by while it is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendId {
    pub(crate) index: u16,
    pub(crate) opcode: u8,
    pub(crate) signaled: bool,
}

impl SendId {
    fn pack(self) -> u64 {
        u64::from(self.index) | u64::from(self.opcode) << 16 | u64::from(self.signaled) << 24
    }

    pub(crate) fn unpack(id: u64) -> SendId {
        SendId {
            index: id as u16,
            opcode: (id >> 16) as u8,
            signaled: id & 1 << 24 != 0,
        }
    }
}

/// Fetches the next entry of a send queue into `bytes`. Gives how long it is,
/// and moves on.
pub(crate) enum Fetched {
    /// Nothing is posted.
    Nothing,
    /// An entry of so many bytes; what is wrong with it, if it is so wrong
    /// that the rest of the queue cannot be found.
    Entry(usize),
    /// It makes no sense.
    Wrong(&'static str),
}

impl<P: Platform> Core<P> {
    /// The queue pair of a number.
    pub(crate) fn qp(&self, qpn: u32) -> Option<&Qp> {
        match self.queues.get(qpn) {
            Some(Queue::Qp(qp)) => Some(qp),
            _ => None,
        }
    }

    /// The same, to change it.
    pub(crate) fn qp_mut(&mut self, qpn: u32) -> Option<&mut Qp> {
        match self.queues.get_mut(qpn) {
            Some(Queue::Qp(qp)) => Some(qp),
            _ => None,
        }
    }

    /// Reads the entry at the head of a send queue.
    pub(crate) fn fetch(&mut self, number: u32, out: &mut [u8; wqe::LONGEST_SEND]) -> Fetched {
        let strict = self.settings.strict;
        let (ring, blue_flame) = match self.queues.get_mut(number) {
            Some(Queue::Qp(qp)) => match &mut qp.send {
                Some(ring) => (ring, &mut qp.blue_flame),
                None => return Fetched::Nothing,
            },
            Some(Queue::Sq(sq)) => (&mut sq.ring, &mut sq.blue_flame),
            _ => return Fetched::Nothing,
        };
        if ring.empty() {
            match self.platform.read_index(ring.doorbell) {
                Ok(tail) => ring.tail = tail as u16,
                Err(_) => return Fetched::Wrong("the doorbell record is not in memory"),
            }
            if ring.empty() {
                return Fetched::Nothing;
            }
        }
        let index = ring.head;
        let block = |n: u16| {
            let slot = index.wrapping_add(n) & ring.mask();
            ring.offset + u64::from(slot) * wqe::BLOCK as u64
        };
        let read = |n: u16, out: &mut [u8]| ring.buffer.read(&self.platform, block(n), out);
        let mut difference = None;
        let copy = blue_flame
            // One that came after its entry was read from the ring goes, or it
            // would be taken when the index comes round again.
            .take_if(|copy| copy.index.wrapping_sub(index) as i16 <= 0)
            .filter(|copy| copy.index == index);
        let mut overlay = |out: &mut [u8]| {
            if let Some(copy) = &copy {
                difference = difference.or_else(|| copy.differs(out));
                let n = copy.bytes.len().min(out.len());
                out[..n].copy_from_slice(&copy.bytes[..n]);
            }
        };
        if read(0, &mut out[..wqe::BLOCK]).is_err() {
            return Fetched::Wrong("the send queue is not in memory");
        }
        overlay(&mut out[..wqe::BLOCK]);
        let Some(length) = wqe::length(out) else {
            return Fetched::Wrong("a work request without segments");
        };
        let blocks = length.div_ceil(wqe::BLOCK) as u16;
        let posted = ring.tail.wrapping_sub(index);
        if blocks > posted {
            return Fetched::Wrong("a work request longer than what is posted");
        }
        for n in 1..blocks {
            let at = usize::from(n) * wqe::BLOCK;
            if read(n, &mut out[at..at + wqe::BLOCK]).is_err() {
                return Fetched::Wrong("the send queue is not in memory");
            }
        }
        overlay(&mut out[..length]);
        if strict
            && let Some((at, ring, copy)) = difference
            && at < length
            && !wqe::is_write_combining_test(out, at)
        {
            self.complain(|| {
                format!(
                    "queue {number}, index {index}: the ring differs from the BlueFlame copy, \
                     first at byte {at}: {ring:#04x}, and {copy:#04x} in the copy"
                )
            });
        }
        if strict && wqe::index(out) != index {
            return Fetched::Wrong("the work request has another index than its place");
        }
        if strict && wqe::queue(out) != number {
            return Fetched::Wrong("the work request names another queue");
        }
        let ring = match self.queues.get_mut(number) {
            Some(Queue::Qp(qp)) => qp.send.as_mut(),
            Some(Queue::Sq(sq)) => Some(&mut sq.ring),
            _ => None,
        };
        if let Some(ring) = ring {
            ring.head = ring.head.wrapping_add(blocks);
        }
        Fetched::Entry(length)
    }

    /// The next work request of a queue pair.
    pub(crate) fn next_send_work(&mut self, qpn: u32) -> Option<SendWork<Local>> {
        // Not made anew each time: it is long, and most entries are short.
        let fresh = || Box::new([0; wqe::LONGEST_SEND]);
        let mut bytes = self.entry.take().unwrap_or_else(fresh);
        let work = self.parse_send_work(qpn, &mut bytes);
        self.entry = Some(bytes);
        work
    }

    fn parse_send_work(
        &mut self,
        qpn: u32,
        bytes: &mut [u8; wqe::LONGEST_SEND],
    ) -> Option<SendWork<Local>> {
        let fetched = self.fetch(qpn, bytes);
        let strict = self.settings.strict;
        let qp = self.qp(qpn)?;
        let reading = Reading {
            service: qp.service,
            pd: qp.pd,
            privileged: qp.privileged,
            strict,
        };
        let limit = qp.scatter_read;
        let (index, head) = match &qp.send {
            Some(ring) => (wqe::index(bytes), ring.head),
            None => return None,
        };
        let work = match fetched {
            Fetched::Nothing => return None,
            Fetched::Wrong(why) => {
                self.complain(|| format!("queue pair {qpn}, index {head}: {why}"));
                self.post_queue_event(event::WQ_CATASTROPHIC, 0, qpn);
                // Nothing after it can be found: it ends what is posted.
                if let Some(Qp {
                    send: Some(ring), ..
                }) = self.qp_mut(qpn)
                {
                    ring.head = ring.tail;
                }
                let mut work = wqe::send(&[], &reading);
                work.operation = Operation::Invalid(crate::transport::Status::LocalQpOperation);
                work.signaled = true;
                work.index = head;
                work
            }
            Fetched::Entry(length) => {
                let mut work = wqe::send(&bytes[..length], &reading);
                work.index = index;
                if let Some(why) = work.fault {
                    self.complain(|| format!("queue pair {qpn}, index {index}: {why}"));
                }
                work
            }
        };
        let id = SendId {
            index: work.index,
            opcode: work.opcode,
            signaled: work.signaled,
        };
        self.stats.send_requests += 1;
        let mut local = work.local;
        // Operations on keys have their entry there.
        let data = !matches!(work.operation, Operation::Local);
        self.stats.sends_inline += u64::from(data && !local.inline.is_empty());
        if work.signaled && work.operation.is_read_or_atomic() {
            local.kept = Kept::up_to(limit);
        }
        let datagram = work.av.map(|av| Box::new(self.datagram(qpn, &av)));
        let mut send = SendWork::new(id.pack(), work.operation, work.length, local);
        send.imm = work.immediate;
        send.fence = work.fence;
        send.solicited = work.solicited;
        send.va = work.va;
        send.rkey = work.rkey;
        send.xrc_srqn = work.xrc_srqn;
        send.datagram = datagram;
        send.stream = work.stream;
        Some(send)
    }

    /// Where a datagram goes, by its address vector.
    fn datagram(&self, qpn: u32, av: &[u8; 48]) -> Datagram {
        const QKEY: crate::bits::Field = field(0, 31, 0);
        const DC_KEY: usize = 0;
        const DQPN: crate::bits::Field = field(8, 23, 0);
        const SL: crate::bits::Field = field(12, 27, 24);
        const PATH_BITS: crate::bits::Field = field(12, 22, 16);
        const RLID: crate::bits::Field = field(12, 15, 0);
        const MAC: usize = 20;
        const TCLASS: crate::bits::Field = field(24, 15, 8);
        const HOP_LIMIT: crate::bits::Field = field(24, 7, 0);
        const GRH: crate::bits::Field = field(28, 30, 30);
        const SGID_INDEX: crate::bits::Field = field(28, 27, 20);
        const FLOW_LABEL: crate::bits::Field = field(28, 19, 0);
        const RGID: usize = 32;

        let address = Address {
            grh: GRH.is_set(av),
            rlid: RLID.get(av) as u16,
            path_bits: PATH_BITS.get(av) as u8,
            sl: SL.get(av) as u8,
            sgid_index: SGID_INDEX.get(av) as usize,
            flow_label: FLOW_LABEL.get(av),
            traffic_class: TCLASS.get(av) as u8,
            hop_limit: HOP_LIMIT.get(av) as u8,
            dgid: get_array(av, RGID),
            dmac: get_array(av, MAC),
            udp_source: RLID.get(av) as u16,
        };
        // With its highest bit set the queue pair's own key is meant.
        let qkey = QKEY.get(av);
        let own = self.qp(qpn).map_or(0, |qp| qp.config.qkey);
        Datagram {
            path: self.path(&address),
            qpn: DQPN.get(av),
            qkey: if qkey & 1 << 31 != 0 { own } else { qkey },
            dc_key: get64(av, DC_KEY),
        }
    }

    /// An address vector with what its indices stand for.
    pub(crate) fn path(&self, address: &Address) -> Path {
        let ethernet = self.settings.profile.port == PortKind::Ethernet;
        let entry = if ethernet {
            self.roce_addresses
                .get(address.sgid_index)
                .copied()
                .flatten()
        } else {
            None
        };
        let (link, sgid, roce) = if ethernet {
            (
                Link::Ether {
                    smac: entry.map_or(self.nic.mac, |e| e.mac),
                    dmac: address.dmac,
                    vlan: entry.and_then(|e| e.vlan),
                },
                entry.map_or([0; 16], |e| e.gid),
                match entry {
                    Some(e) if e.version == 0 => Roce::V1,
                    _ => Roce::V2,
                },
            )
        } else {
            (
                Link::Ib {
                    slid: self.settings.lid | u16::from(address.path_bits & 0x7f),
                    dlid: address.rlid,
                    sl: address.sl,
                },
                self.port_gid(),
                Roce::V2,
            )
        };
        Path {
            link,
            grh: (ethernet || address.grh).then_some(Grh {
                sgid,
                dgid: address.dgid,
                flow_label: address.flow_label,
                traffic_class: address.traffic_class,
                hop_limit: address.hop_limit,
            }),
            roce,
            udp_source: address.udp_source,
        }
    }

    /// The next receive request of a queue pair's own queue.
    pub(crate) fn next_of_qp(&mut self, qpn: u32) -> Option<RecvWork<Local>> {
        let qp = match self.queues.get_mut(qpn) {
            Some(Queue::Qp(qp)) => qp,
            _ => return None,
        };
        let (pd, privileged) = (qp.pd, qp.privileged);
        let ring = qp.recv.as_mut()?;
        let (index, length) = match take_receive(&self.platform, ring) {
            Ok(taken) => taken?,
            Err(()) => {
                self.complain(|| format!("the receive queue of queue pair {qpn} is not in memory"));
                self.post_queue_event(event::WQ_CATASTROPHIC, 0, qpn);
                return None;
            }
        };
        let (index, bytes) = (index, length);
        let (local, length) = wqe::receive(&bytes.0[..bytes.1], pd, privileged);
        self.stats.receive_requests += 1;
        Some(RecvWork {
            id: u64::from(index),
            length,
            local,
        })
    }
}

/// An entry of a receive queue.
pub(crate) type ReceiveEntry = ([u8; wqe::LONGEST_RECEIVE], usize);

/// Takes the entry at the head of a receive queue: its index and its bytes.
pub(crate) fn take_receive<P: Platform>(
    platform: &P,
    ring: &mut Ring,
) -> Result<Option<(u16, ReceiveEntry)>, ()> {
    if ring.empty() {
        ring.tail = platform.read_index(ring.doorbell).map_err(|_| ())? as u16;
        if ring.empty() {
            return Ok(None);
        }
    }
    let index = ring.head;
    let slot = u64::from(index & ring.mask());
    let length = (1usize << ring.log_stride).min(wqe::LONGEST_RECEIVE);
    let mut bytes = [0; wqe::LONGEST_RECEIVE];
    ring.buffer
        .read(
            platform,
            ring.offset + (slot << ring.log_stride),
            &mut bytes[..length],
        )
        .map_err(|_| ())?;
    ring.head = ring.head.wrapping_add(1);
    Ok(Some((index, (bytes, length))))
}

/// The fields of an address vector or address path.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Address {
    pub(crate) grh: bool,
    pub(crate) rlid: u16,
    pub(crate) path_bits: u8,
    pub(crate) sl: u8,
    pub(crate) sgid_index: usize,
    pub(crate) flow_label: u32,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    pub(crate) dgid: [u8; 16],
    pub(crate) dmac: [u8; 6],
    pub(crate) udp_source: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_comes_back_as_it_was() {
        let id = SendId {
            index: 0xfffe,
            opcode: 0x12,
            signaled: true,
        };
        assert_eq!(SendId::unpack(id.pack()), id);
    }
}
