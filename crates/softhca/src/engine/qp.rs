//! Queue pairs, and the send and receive queues of the network interface, as the driver
//! sees them: buffers, indices and attributes. The transport implements their protocol.

use std::collections::VecDeque;

use roce::bits::{field, get_array, get64};
use roce::packet::{Grh, Link, Path, Roce};
use roce::rule::{Rule, Violation};
use roce::transport::{
    Datagram, EngineError, Operation, QpConfig, RecvWork, SendWork, Service, Status,
};

use super::buffer::Buffer;
use super::core::Core;
use super::eq::event;
use super::wqe::{self, CqeScatter, LocalBuffers, SendWqe, WqeContext};
use crate::cause::Misuse;
use crate::layout::rqc;
use crate::platform::Platform;
use crate::profile::PortKind;

/// Bytes of a queue pair context.
pub(crate) const CONTEXT_SIZE: usize = crate::layout::qpc::SIZE;

/// The ring of a send or receive queue.
#[derive(Debug, Default)]
pub(crate) struct Ring {
    pub(crate) buffer: Buffer,
    /// Offset in the buffer.
    pub(crate) offset: u64,
    pub(crate) log_size: u32,
    pub(crate) log_stride: u32,
    /// Address of the doorbell record: the driver's producer index.
    pub(crate) doorbell: u64,
    pub(crate) head: u16,
    pub(crate) tail: u16,
    /// Of a send queue: number of the work requests that were taken since the reset; it wraps.
    pub(crate) taken: u32,
    /// Of a send queue: its doorbell has rung since the reset. Before, the record may be
    /// that of the work requests before the reset.
    pub(crate) rung: bool,
}

impl Ring {
    /// Empties the queue.
    pub(crate) fn reset(&mut self) {
        (self.head, self.tail, self.taken, self.rung) = (0, 0, 0, false);
    }

    fn mask(&self) -> u16 {
        // `log_size` is 15 at most: the largest queues have 2^15 entries or blocks.
        ((1u32 << self.log_size) - 1) as u16
    }

    fn is_empty(&self) -> bool {
        self.head == self.tail
    }
}

/// A WQE received through BlueFlame.
#[derive(Debug, Clone)]
pub(crate) struct BlueFlame {
    pub(crate) index: u16,
    pub(crate) bytes: Vec<u8>,
}

/// The first byte of a BlueFlame copy that differs from the ring: its offset, the byte in the
/// ring, and the byte in the copy.
type Difference = (usize, u8, u8);

impl BlueFlame {
    /// Returns the first byte that differs from the ring.
    fn first_difference(&self, ring: &[u8]) -> Option<Difference> {
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
    /// XRC domain of an XRC target.
    pub(crate) xrcd: Option<u32>,
    pub(crate) counter_set: u32,
    pub(crate) send: Option<Ring>,
    pub(crate) recv: Option<Ring>,
    /// Messages may consume the posted receives in any order: here every second receive
    /// before the first.
    pub(crate) out_of_order: bool,
    /// The receive that was skipped, if any.
    pub(crate) skipped_receive: Option<u16>,
    pub(crate) blue_flame: Option<BlueFlame>,
    /// Maximum number of bytes scattered into a CQE: of receives, and of reads.
    pub(crate) recv_scatter_limit: u8,
    pub(crate) read_scatter_limit: u8,
    /// Context as the driver gave it, merged over the transitions, and returned by
    /// queries.
    pub(crate) context: Box<[u8; CONTEXT_SIZE]>,
    pub(crate) config: QpConfig,
    pub(crate) in_error: bool,
    /// The device transfers the data of rendezvous (`tag_matching`): `transfers` is
    /// the number in progress, and `device_requests` has the generated work requests not yet taken.
    pub(crate) offloads_rendezvous: bool,
    pub(crate) transfers: u32,
    pub(crate) device_requests: VecDeque<SendWork<LocalBuffers>>,
    /// Sending stops after a signature error; the stop is pending.
    pub(crate) drains_on_signature_error: bool,
    pub(crate) drain_pending: bool,
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
    /// May use the reserved lkey.
    pub(crate) privileged: bool,
    pub(crate) cqn: u32,
    pub(crate) uidx: u32,
    pub(crate) state: u32,
    /// WQEs are completed in the error state.
    pub(crate) flushes: bool,
    /// Number of the transport interface send (TIS).
    pub(crate) tis: u32,
    pub(crate) ring: Ring,
    pub(crate) context: Vec<u8>,
    pub(crate) blue_flame: Option<BlueFlame>,
}

/// A receive queue of the network interface.
#[derive(Debug)]
pub(crate) struct Rq {
    pub(crate) pd: u32,
    /// May use the reserved lkey.
    pub(crate) privileged: bool,
    pub(crate) cqn: u32,
    pub(crate) uidx: u32,
    pub(crate) state: u32,
    /// WQEs are completed in the error state.
    pub(crate) flushes: bool,
    /// The VLAN tag of a received frame is removed and reported in the CQE.
    pub(crate) strips_vlan: bool,
    /// Counts dropped frames.
    pub(crate) counter_set: u32,
    /// Several frames are received into one WQE, if it is a striding receive queue.
    pub(crate) strides: Option<Strides>,
    pub(crate) ring: Ring,
    pub(crate) context: Vec<u8>,
}

/// The strides of a striding receive queue.
#[derive(Debug)]
pub(crate) struct Strides {
    /// Bytes of a stride.
    pub(crate) size: u32,
    /// Strides of a WQE.
    pub(crate) count: u32,
    /// Bytes before each frame.
    pub(crate) shift: u32,
    /// The WQE that receives, by index, and the number of its strides that are used.
    pub(crate) current: Option<(u16, ReceiveEntry, u32)>,
}

/// Queues in the number space that doorbells and completions use.
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

/// Identifier of an outstanding send request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendId {
    pub(crate) index: u16,
    pub(crate) opcode: u8,
    pub(crate) signaled: bool,
    /// Number of the work requests of the queue before this one; it wraps.
    pub(crate) number: u32,
}

impl SendId {
    fn pack(self) -> u64 {
        u64::from(self.index)
            | u64::from(self.opcode) << 16
            | u64::from(self.signaled) << 24
            | u64::from(self.number) << 32
    }

    pub(crate) fn unpack(id: u64) -> SendId {
        SendId {
            index: id as u16,
            opcode: (id >> 16) as u8,
            signaled: id & 1 << 24 != 0,
            number: (id >> 32) as u32,
        }
    }
}

/// Result of [`Core::fetch`].
pub(crate) enum FetchedWqe {
    /// Nothing is posted.
    Nothing,
    /// A WQE of this length in bytes.
    Entry(usize),
    /// The WQE is malformed or inaccessible, so that the rest of the queue cannot be
    /// found; what broke which rule.
    Malformed(Box<Violation>),
}

#[cold]
fn malformed(what: &'static str, value: impl TryInto<u64>, rule: Rule) -> FetchedWqe {
    FetchedWqe::Malformed(violation(what, value, rule))
}

#[cold]
fn violation(what: &'static str, value: impl TryInto<u64>, rule: Rule) -> Box<Violation> {
    Box::new(Violation::new(what, value, rule))
}

impl Ring {
    /// Reads the WQE at an index of a send queue into `out`, with the blocks that its BlueFlame
    /// copy has; others follow up to `tail`. Returns its length, and the first difference of the
    /// copy.
    pub(super) fn read_wqe<P: Platform>(
        &self,
        platform: &P,
        (index, tail): (u16, u16),
        copy: Option<&BlueFlame>,
        out: &mut [u8; wqe::MAX_SEND_WQE],
    ) -> Result<(usize, Option<Difference>), Box<Violation>> {
        let read = |n: u16, out: &mut [u8]| {
            let slot = index.wrapping_add(n) & self.mask();
            let at = self.offset + u64::from(slot) * wqe::BLOCK as u64;
            let what = "offset in the send queue's memory";
            let read = self.buffer.read(platform, at, out);
            read.map_err(|_| violation(what, at, Rule::Readable))
        };
        let mut difference = None;
        let mut overlay = |out: &mut [u8]| {
            if let Some(copy) = copy {
                difference = difference.or_else(|| copy.first_difference(out));
                let n = copy.bytes.len().min(out.len());
                out[..n].copy_from_slice(&copy.bytes[..n]);
            }
        };
        read(0, &mut out[..wqe::BLOCK])?;
        overlay(&mut out[..wqe::BLOCK]);
        let Some(length) = wqe::length(out) else {
            let what = "number of segments of the work request";
            return Err(violation(what, 0, Rule::NonZero));
        };
        let blocks = length.div_ceil(wqe::BLOCK) as u16;
        let posted = tail.wrapping_sub(index);
        if blocks > posted {
            let what = "number of blocks of the work request";
            return Err(violation(what, blocks, Rule::AtMost(posted.into())));
        }
        for n in 1..blocks {
            let at = usize::from(n) * wqe::BLOCK;
            read(n, &mut out[at..at + wqe::BLOCK])?;
        }
        overlay(&mut out[..length]);
        Ok((length, difference))
    }
}

impl<P: Platform> Core<P> {
    /// Returns a queue pair by its number.
    pub(crate) fn qp(&self, qpn: u32) -> Option<&Qp> {
        match self.queues.get(qpn) {
            Some(Queue::Qp(qp)) => Some(qp),
            _ => None,
        }
    }

    /// Returns a queue pair by its number, for modification.
    pub(crate) fn qp_mut(&mut self, qpn: u32) -> Option<&mut Qp> {
        match self.queues.get_mut(qpn) {
            Some(Queue::Qp(qp)) => Some(qp),
            _ => None,
        }
    }

    /// Returns the receive queues in the error state, and whether receives were posted to
    /// them that are not flushed.
    pub(crate) fn receive_queues_in_error(&self) -> impl Iterator<Item = (u32, bool)> + '_ {
        self.queues.iter().filter_map(|(number, queue)| {
            let ring = match queue {
                Queue::Qp(qp) if qp.in_error => qp.recv.as_ref()?,
                Queue::Rq(rq) if rq.state == rqc::state::ERR && rq.flushes => &rq.ring,
                _ => return None,
            };
            let posted = self.platform.read_index(ring.doorbell);
            Some((number, posted.is_ok_and(|it| it as u16 != ring.head)))
        })
    }

    /// Reads the WQE at the head of a send queue into `out`, and advances the head.
    pub(crate) fn fetch(&mut self, number: u32, out: &mut [u8; wqe::MAX_SEND_WQE]) -> FetchedWqe {
        let (ring, blue_flame, flushes) = match self.queues.get_mut(number) {
            Some(Queue::Qp(qp)) => match &mut qp.send {
                Some(ring) => (ring, &mut qp.blue_flame, qp.in_error),
                None => return FetchedWqe::Nothing,
            },
            Some(Queue::Sq(sq)) => (&mut sq.ring, &mut sq.blue_flame, sq.flushes),
            _ => return FetchedWqe::Nothing,
        };
        if ring.is_empty() {
            if !ring.rung {
                return FetchedWqe::Nothing;
            }
            match self.platform.read_index(ring.doorbell) {
                Ok(tail) => ring.tail = tail as u16,
                Err(_) => {
                    let (what, at) = ("address of the doorbell record", ring.doorbell);
                    return malformed(what, at, Rule::Readable);
                }
            }
            if ring.is_empty() {
                return FetchedWqe::Nothing;
            }
        }
        if let Some(chaos) = &mut self.chaos {
            if !flushes && chaos.holds_send(number, ring.taken, self.platform.now()) {
                return FetchedWqe::Nothing;
            }
        }
        let index = ring.head;
        let copy = blue_flame
            // A copy whose WQE was already read from the ring is dropped, or it would
            // be used when the index wraps around.
            .take_if(|copy| copy.index.wrapping_sub(index) as i16 <= 0)
            .filter(|copy| copy.index == index);
        let range = (index, ring.tail);
        let (length, difference) = match ring.read_wqe(&self.platform, range, copy.as_ref(), out) {
            Ok(read) => read,
            Err(violation) => return FetchedWqe::Malformed(violation),
        };
        let blocks = length.div_ceil(wqe::BLOCK) as u16;
        if self.settings.strict {
            if let Err(violation) = self.check_fetched((number, index), &out[..length], difference)
            {
                return FetchedWqe::Malformed(violation);
            }
        }
        let ring = match self.queues.get_mut(number) {
            Some(Queue::Qp(qp)) => qp.send.as_mut(),
            Some(Queue::Sq(sq)) => Some(&mut sq.ring),
            _ => None,
        };
        if let Some(ring) = ring {
            ring.head = ring.head.wrapping_add(blocks);
            ring.taken = ring.taken.wrapping_add(1);
        }
        FetchedWqe::Entry(length)
    }

    /// Checks in strict mode that a WQE is of its queue and position, and reports a BlueFlame
    /// copy that differs from the ring.
    fn check_fetched(
        &mut self,
        (queue, index): (u32, u16),
        entry: &[u8],
        difference: Option<Difference>,
    ) -> Result<(), Box<Violation>> {
        if let Some((at, ring, copy)) = difference {
            if at < entry.len() && !wqe::is_write_combining_test(entry, at) {
                self.report_misuse(Misuse::BlueFlame {
                    queue,
                    index,
                    at,
                    ring,
                    copy,
                });
            }
        }
        let found = wqe::index(entry);
        if found != index {
            let (what, rule) = ("index in the work request", Rule::Is(index.into()));
            return Err(violation(what, found, rule));
        }
        let found = wqe::queue(entry);
        if found != queue {
            let (what, rule) = ("queue in the work request", Rule::Is(queue.into()));
            return Err(violation(what, found, rule));
        }
        Ok(())
    }

    /// Returns the next work request of a queue pair.
    pub(crate) fn next_send_work(&mut self, qpn: u32) -> Option<SendWork<LocalBuffers>> {
        if let Some(work) = self.qp_mut(qpn)?.device_requests.pop_front() {
            return Some(work);
        }
        // The buffer is reused rather than cleared each time: it is long, and most WQEs
        // are short.
        let new_buffer = || Box::new([0; wqe::MAX_SEND_WQE]);
        let mut bytes = self.send_wqe_buffer.take().unwrap_or_else(new_buffer);
        let work = self.parse_send_work(qpn, &mut bytes);
        self.send_wqe_buffer = Some(bytes);
        work
    }

    fn parse_send_work(
        &mut self,
        qpn: u32,
        bytes: &mut [u8; wqe::MAX_SEND_WQE],
    ) -> Option<SendWork<LocalBuffers>> {
        if self.follower.is_some() {
            self.follow_sends(qpn);
        }
        let fetched = self.fetch(qpn, bytes);
        let strict = self.settings.strict;
        let qp = self.qp(qpn)?;
        let context = WqeContext {
            service: qp.service,
            pd: qp.pd,
            privileged: qp.privileged,
            strict,
        };
        let limit = qp.read_scatter_limit;
        let (index, head, taken) = match &qp.send {
            Some(ring) => (wqe::index(bytes), ring.head, ring.taken),
            None => return None,
        };
        let is_entry = matches!(fetched, FetchedWqe::Entry(_));
        let work = match fetched {
            FetchedWqe::Nothing => return None,
            FetchedWqe::Malformed(violation) => {
                self.report_work_request(qpn, head, *violation);
                self.post_queue_event(event::WQ_CATASTROPHIC, 0, qpn);
                // The WQEs after it cannot be found, so they are dropped.
                if let Some(Qp {
                    send: Some(ring), ..
                }) = self.qp_mut(qpn)
                {
                    ring.head = ring.tail;
                }
                let mut work = wqe::parse_send(&[], &context);
                work.violation = Some(violation);
                work.signaled = true;
                work.index = head;
                work
            }
            FetchedWqe::Entry(length) => {
                let mut work = wqe::parse_send(&bytes[..length], &context);
                work.index = index;
                if let Some(violation) = &work.violation {
                    self.report_work_request(qpn, index, **violation);
                }
                work
            }
        };
        // A malformed one was not counted.
        let number = taken.wrapping_sub(u32::from(is_entry));
        self.stats.send_requests += 1;
        if self.counts_operations {
            self.operations.count(&work.operation, work.length);
        }
        // For local operations, `inline` holds the WQE rather than data.
        let has_data = !matches!(work.operation, Operation::Local) && work.violation.is_none();
        self.stats.sends_inline += u64::from(has_data && !work.local.inline.is_empty());
        let scatters = work.signaled && work.operation == Operation::Read;
        let mut send = self.send_work(qpn, work, number);
        // Responses of atomics are always stored in memory: drivers differ in what they take the
        // byte order in a CQE for (libmlx5 the host's, UCX big endian).
        if scatters {
            send.local.cqe_scatter = CqeScatter::up_to(limit);
        }
        if has_data {
            send.length = self.convert_list(&mut send.local, send.length);
        }
        Some(send)
    }

    /// Returns the work request of a WQE, which has a number in its queue.
    pub(super) fn send_work(&self, qpn: u32, work: SendWqe, number: u32) -> SendWork<LocalBuffers> {
        let id = SendId {
            index: work.index,
            opcode: work.opcode,
            signaled: work.signaled,
            number,
        };
        let datagram = work.av.map(|av| Box::new(self.datagram(qpn, &av)));
        let refused = work.violation.map(|violation| {
            Box::new(EngineError {
                status: Status::LocalQpOperation,
                violation: *violation,
            })
        });
        let mut send = SendWork::new(id.pack(), work.operation, work.length, work.local);
        send.imm = work.immediate;
        send.fence = work.fence;
        send.solicited = work.solicited;
        send.va = work.va;
        send.rkey = work.rkey;
        send.xrc_srqn = work.xrc_srqn;
        send.datagram = datagram;
        send.stream = work.stream;
        send.refused = refused;
        send.local.number = number;
        send
    }

    /// Returns the destination that an address vector describes.
    fn datagram(&self, qpn: u32, av: &[u8; 48]) -> Datagram {
        const QKEY: roce::bits::Field = field(0, 31, 0);
        const DC_KEY: usize = 0;
        const DQPN: roce::bits::Field = field(8, 23, 0);
        const SL: roce::bits::Field = field(12, 27, 24);
        const PATH_BITS: roce::bits::Field = field(12, 22, 16);
        const RLID: roce::bits::Field = field(12, 15, 0);
        const MAC: usize = 20;
        const TCLASS: roce::bits::Field = field(24, 15, 8);
        const HOP_LIMIT: roce::bits::Field = field(24, 7, 0);
        const GRH: roce::bits::Field = field(28, 30, 30);
        const SGID_INDEX: roce::bits::Field = field(28, 27, 20);
        const FLOW_LABEL: roce::bits::Field = field(28, 19, 0);
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
        // The highest bit selects the queue pair's own key.
        let qkey = QKEY.get(av);
        let own = self.qp(qpn).map_or(0, |qp| qp.config.qkey);
        Datagram {
            path: self.path(&address),
            qpn: DQPN.get(av),
            qkey: if qkey & 1 << 31 != 0 { own } else { qkey },
            dc_key: get64(av, DC_KEY),
        }
    }

    /// Returns the path for an address, with its indices resolved.
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
            let ether = || Link::Ether {
                smac: entry.map_or(self.nic.mac, |e| e.mac),
                dmac: address.dmac,
                vlan: entry.and_then(|e| e.vlan),
            };
            (
                match self.settings.starts_at_ip {
                    true => Link::Ip,
                    false => ether(),
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

    /// Returns the next receive request of a queue pair's own receive queue.
    pub(crate) fn next_qp_receive(&mut self, qpn: u32) -> Option<RecvWork<LocalBuffers>> {
        if self.follower.is_some() {
            self.follow_receives(qpn);
        }
        let qp = match self.queues.get_mut(qpn) {
            Some(Queue::Qp(qp)) => qp,
            _ => return None,
        };
        let (pd, privileged) = (qp.pd, qp.privileged);
        let ring = qp.recv.as_mut()?;
        let wqe_read = match qp.skipped_receive.take() {
            Some(skipped) => read_receive(&self.platform, ring, skipped).map(Some),
            None if qp.out_of_order => take_second(&self.platform, ring, &mut qp.skipped_receive),
            None => take_receive(&self.platform, ring),
        };
        let (index, bytes) = match wqe_read {
            Ok(wqe_read) => wqe_read?,
            Err(()) => {
                self.report_misuse(Misuse::Unmapped {
                    what: "receive queue",
                    number: qpn,
                });
                self.post_queue_event(event::WQ_CATASTROPHIC, 0, qpn);
                return None;
            }
        };
        let (local, length) = wqe::parse_receive(&bytes.0[..bytes.1], pd, privileged);
        self.stats.receive_requests += 1;
        Some(RecvWork {
            id: u64::from(index),
            length,
            local,
        })
    }
}

/// A receive WQE, and its length in bytes.
pub(crate) type ReceiveEntry = ([u8; wqe::MAX_RECV_WQE], usize);

/// Takes the WQE at the head of a receive queue. Returns its index and its bytes.
pub(crate) fn take_receive<P: Platform>(
    platform: &P,
    ring: &mut Ring,
) -> Result<Option<(u16, ReceiveEntry)>, ()> {
    if ring.is_empty() {
        ring.tail = platform.read_index(ring.doorbell).map_err(|_| ())? as u16;
        if ring.is_empty() {
            return Ok(None);
        }
    }
    let wqe_read = read_receive(platform, ring, ring.head)?;
    ring.head = ring.head.wrapping_add(1);
    Ok(Some(wqe_read))
}

/// As [`take_receive`], but takes the second of two WQEs; the next call takes the first.
fn take_second<P: Platform>(
    platform: &P,
    ring: &mut Ring,
    skipped: &mut Option<u16>,
) -> Result<Option<(u16, ReceiveEntry)>, ()> {
    let first = ring.head;
    let second = first.wrapping_add(1);
    // The doorbell record may announce a second receive that was not read yet.
    if second == ring.tail || ring.is_empty() {
        ring.tail = platform.read_index(ring.doorbell).map_err(|_| ())? as u16;
    }
    if ring.is_empty() || second == ring.tail {
        return take_receive(platform, ring);
    }
    let wqe_read = read_receive(platform, ring, second)?;
    ring.head = second.wrapping_add(1);
    *skipped = Some(first);
    Ok(Some(wqe_read))
}

/// Reads the WQE of an index.
pub(super) fn read_receive<P: Platform>(
    platform: &P,
    ring: &Ring,
    index: u16,
) -> Result<(u16, ReceiveEntry), ()> {
    let slot = u64::from(index & ring.mask());
    let length = (1usize << ring.log_stride).min(wqe::MAX_RECV_WQE);
    let mut bytes = [0; wqe::MAX_RECV_WQE];
    ring.buffer
        .read(
            platform,
            ring.offset + (slot << ring.log_stride),
            &mut bytes[..length],
        )
        .map_err(|_| ())?;
    Ok((index, (bytes, length)))
}

/// Fields of an address vector or address path.
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
    fn a_wr_id_is_returned_unchanged() {
        let id = SendId {
            index: 0xfffe,
            opcode: 0x12,
            signaled: true,
            number: u32::MAX - 1,
        };
        assert_eq!(SendId::unpack(id.pack()), id);
    }
}
