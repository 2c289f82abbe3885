//! Raw packets: whole Ethernet frames, sent and received past the kernel's network
//! stack.
//!
//! A [`PacketQueue`] has its own registered buffers. Received frames are [`Frame`]s, which
//! own their buffer and return it when they are dropped. Frames to send are buffers from
//! [`PacketQueue::buffer`]. [`Frame::into_buffer`] forwards a received frame without a copy.
//!
//! Flows ([`PacketQueue::add_flow`]) select the frames that a queue receives; without a flow
//! it receives none. ConnectX requires CAP_NET_RAW for the queue and for flows; the embedded
//! device requires no privileges.
//!
//! ```
//! use ringverbs::Device;
//! use ringverbs::packet::{Checksums, FlowMatch};
//!
//! # fn main() -> Result<(), ringverbs::Error> {
//! # let device = Device::embedded()?;
//! let (here, there) = (device.open()?, device.open()?);
//! let mut sender = here.alloc_pd()?.packet_queue().build()?;
//! let mut receiver = there.alloc_pd()?.packet_queue().build()?;
//! const MAC: [u8; 6] = [2, 0, 0, 0, 0, 7];
//! receiver.add_flow(FlowMatch::Destination(MAC))?;
//! if let Some(mut frame) = sender.buffer(60) {
//!     frame.fill(0);
//!     frame[..6].copy_from_slice(&MAC);
//!     frame[12..14].copy_from_slice(&[0x88, 0xb5]);
//!     sender.send(frame, Checksums::Unchanged).map_err(|refused| refused.error)?;
//! }
//! loop {
//!     sender.poll(drop)?;
//!     if let Some(frame) = receiver.receive()? {
//!         assert_eq!((frame.len(), &frame[..6]), (60, &MAC[..]));
//!         break;
//!     }
//! }
//! # Ok(()) }
//! ```

#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::fmt;
use std::ops::Deref;

use uverbs::flow::{Flow, FlowInit, Specs};

use crate::completion::{Status, Timestamp};
use crate::context::Ctx;
use crate::data::Payload;
use crate::device::Packets;
use crate::memory::{BufferPool, PoolBuffer};
use crate::operation::Operation;
use crate::pd::Identity;
use crate::qp::{PostError, QpAttr, QpAttrMask, State, WorkRequest};
use crate::{
    CloseError, CompletionChannel, CompletionQueue, Context, Error, ProtectionDomain, QueuePair,
    Result,
};

/// Minimum length of a sent frame: an Ethernet header with a VLAN tag, which some devices
/// always read.
const HEADER: usize = 18;
const TOO_SHORT: &str = "a frame has at least 18 bytes";
/// Default length of the longest frame: an Ethernet header with a VLAN tag, and 1500 bytes.
const DEFAULT_FRAME: usize = 1518;
/// Default depth of both queues.
const DEFAULT_DEPTH: u32 = 256;
/// `IB_RAW_PACKET_CAP_IP_CSUM`.
const CAP_CHECKSUMS: u32 = 1 << 2;

/// A MAC address.
pub type MacAddress = [u8; 6];

/// The frames that a flow selects for a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FlowMatch {
    /// Frames to this MAC address, unicast or multicast.
    Destination(MacAddress),
    /// Frames to multicast addresses that no other flow selects.
    AllMulticast,
    /// All frames that no other flow selects: promiscuous mode.
    All,
}

impl FlowMatch {
    /// Returns the flow's type (`enum ib_flow_attr_type`) and its match specifications.
    fn encode(self) -> (u32, Specs) {
        match self {
            Self::Destination(mac) => (0, Specs::destination_mac(mac)),
            Self::All => (1, Specs::default()),
            Self::AllMulticast => (2, Specs::default()),
        }
    }
}

/// Checksum offload of sent frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Checksums {
    /// Frames are sent unchanged.
    #[default]
    Unchanged,
    /// The device computes the checksums of the IPv4 header and of TCP or UDP.
    Compute,
}

/// Builder of a [`PacketQueue`], from [`ProtectionDomain::packet_queue`].
#[derive(Debug)]
#[must_use]
pub struct PacketQueueBuilder {
    domain: ProtectionDomain,
    port: u8,
    send_depth: u32,
    recv_depth: u32,
    frame_size: usize,
    frames: Option<usize>,
    timestamps: bool,
    own_frames: bool,
    channel: Option<CompletionChannel>,
}

impl ProtectionDomain {
    /// Returns a builder of a queue for raw packets.
    pub fn packet_queue(&self) -> PacketQueueBuilder {
        PacketQueueBuilder {
            domain: self.clone(),
            port: 1,
            send_depth: DEFAULT_DEPTH,
            recv_depth: DEFAULT_DEPTH,
            frame_size: DEFAULT_FRAME,
            frames: None,
            timestamps: false,
            own_frames: false,
            channel: None,
        }
    }
}

impl PacketQueueBuilder {
    /// Sets the port, from 1; default 1.
    pub fn port(mut self, port: u8) -> Self {
        self.port = port;
        self
    }

    /// Sets the depth of the send queue, in frames; default 256. A queue with depth 0 only
    /// receives.
    pub fn send_depth(mut self, frames: u32) -> Self {
        self.send_depth = frames;
        self
    }

    /// Sets the depth of the receive queue, in frames; default 256. A queue with depth 0
    /// only sends.
    pub fn recv_depth(mut self, frames: u32) -> Self {
        self.recv_depth = frames;
        self
    }

    /// Sets the length of the longest frame, from the destination address on and without
    /// the frame check sequence; default 1518. The device drops frames that exceed the
    /// port's MTU.
    pub fn frame_size(mut self, bytes: usize) -> Self {
        self.frame_size = bytes;
        self
    }

    /// Sets the number of buffers; default: the send depth plus twice the receive depth, so
    /// that the program can hold as many received frames as the receive queue has.
    pub fn buffers(mut self, count: usize) -> Self {
        self.frames = Some(count);
        self
    }

    /// Requests a device timestamp of each received frame ([`Frame::timestamp`]).
    pub fn timestamps(mut self) -> Self {
        self.timestamps = true;
        self
    }

    /// Also receives frames that queues of the same context send. Frames from other contexts
    /// of the same device are always received.
    pub fn own_frames(mut self) -> Self {
        self.own_frames = true;
        self
    }

    /// Sets the channel that receives an event when the queue is
    /// [armed](PacketQueue::arm).
    pub fn channel(mut self, channel: &CompletionChannel) -> Self {
        self.channel = Some(channel.clone());
        self
    }

    /// Registers the buffers and creates the queue, ready to send, with receives posted.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on a device without raw packets (rdma_rxe) or
    /// timestamps; [`Error::Invalid`] if the queue neither sends nor receives, or for a frame
    /// size below an Ethernet header; [`Error::Limit`] for sizes above the device's limits;
    /// EPERM without CAP_NET_RAW; EOPNOTSUPP for a port that is not Ethernet; ENOMEM.
    pub fn build(self) -> Result<PacketQueue> {
        let invalid = |what| Err(Error::Invalid { what });
        if self.send_depth == 0 && self.recv_depth == 0 {
            return invalid("a packet queue needs a send or a receive depth");
        }
        if self.frame_size < HEADER {
            return invalid(TOO_SHORT);
        }
        let context = self.domain.context();
        let mut queue = context
            .completion_queue()
            .entries(self.send_depth.saturating_add(self.recv_depth));
        if self.timestamps {
            queue = queue.timestamps();
        }
        if let Some(channel) = &self.channel {
            queue = queue.channel(channel);
        }
        let completions = queue.build()?;
        let caps = context.query_device_ex()?.raw_packet_caps;
        let packets = Packets {
            checksums: caps & CAP_CHECKSUMS != 0,
            own_frames: self.own_frames,
        };
        let mut qp = self
            .domain
            .packet_queue_pair(packets, &completions)
            .send_depth(self.send_depth)
            .recv_depth(self.recv_depth)
            .build()?;
        let [send_depth, recv_depth] = [self.send_depth, self.recv_depth].map(|n| n as usize);
        let buffers = self.frames.unwrap_or(send_depth + 2 * recv_depth);
        let pool = BufferPool::new(&self.domain, &[(self.frame_size, buffers)])?;
        let port = QpAttr {
            port_num: self.port,
            ..QpAttr::default()
        };
        for (state, attributes) in [
            (State::INIT, QpAttrMask::PORT),
            (State::RTR, QpAttrMask::empty()),
            (State::RTS, QpAttrMask::empty()),
        ] {
            let to = QpAttr {
                qp_state: state,
                ..port
            };
            qp.modify(&to, attributes | QpAttrMask::STATE)?;
        }
        qp.announce_receives();
        let mut queue = PacketQueue {
            flows: Vec::new(),
            qp,
            completions,
            pool,
            spare: Vec::with_capacity(buffers),
            send_depth: self.send_depth,
            recv_depth: self.recv_depth,
            frame_size: self.frame_size,
            port: self.port,
            checksums: packets.checksums,
            posted: 0,
            counters: Counters::default(),
        };
        queue.refill()?;
        Ok(queue)
    }
}

/// Counts of the frames that a queue has sent and received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Frames whose send has completed.
    pub sent: u64,
    /// Frames that were received.
    pub received: u64,
    /// Frames that were dropped because they were longer than a buffer.
    pub too_long: u64,
}

/// A queue pair for raw packets, with its buffers and its completion queue.
///
/// [`poll`](Self::poll) returns received frames, completes sends, and posts free buffers as
/// receives: frames that arrive while no receive is posted are lost. A later poll reposts
/// the buffer of a dropped frame.
///
/// Posting and polling do not allocate. Buffers of completed sends, and frames passed to
/// [`give_back`](Self::give_back), are reused without a lock. Dropping a frame locks the
/// pool, and so does a poll without another free buffer.
///
/// A queue is `Send` and has one owner at a time; its frames and buffers may be moved to any
/// thread. Dropping the queue removes its flows and ends the device's access to its memory.
/// Frames and buffers that the program holds stay valid.
pub struct PacketQueue {
    /// Declared before the queue pair, which flows must not outlive.
    flows: Vec<(FlowMatch, Flow<Ctx>)>,
    /// Declared before its completion queue. Private: see
    /// [`ProtectionDomain::packet_queue_pair`].
    qp: QueuePair,
    completions: CompletionQueue,
    pool: BufferPool,
    /// Free buffers outside the pool, reused without its lock; has capacity for all buffers.
    spare: Vec<PoolBuffer>,
    send_depth: u32,
    recv_depth: u32,
    frame_size: usize,
    port: u8,
    /// Whether the device computes checksums.
    checksums: bool,
    /// Frames that were posted to be sent.
    posted: u64,
    counters: Counters,
}

impl PacketQueue {
    /// Returns the context.
    pub fn context(&self) -> &Context {
        self.completions.context()
    }

    /// Returns the number of the queue pair.
    pub fn qp_num(&self) -> u32 {
        self.qp.qp_num()
    }

    /// Returns the identifier that asynchronous events carry; unique in the context.
    pub fn id(&self) -> u64 {
        self.qp.id()
    }

    /// Returns the length of the longest frame.
    pub fn frame_size(&self) -> usize {
        self.frame_size
    }

    /// Returns the counts of sent and received frames at the last poll.
    pub fn counters(&self) -> Counters {
        let in_flight = self.qp.in_flight().0;
        Counters {
            sent: self.posted.saturating_sub(in_flight.into()),
            ..self.counters
        }
    }

    /// Returns whether the device computes checksums, and checks those of received
    /// frames.
    pub fn has_checksums(&self) -> bool {
        self.checksums
    }

    /// Returns the numbers of outstanding sends and of posted receives.
    pub fn in_flight(&self) -> (u32, u32) {
        self.qp.in_flight()
    }

    /// Takes a buffer for a frame of `len` bytes; it contains the bytes of its last use.
    /// Returns `None` if all buffers are in use, or if they are shorter than `len`.
    pub fn buffer(&mut self, len: usize) -> Option<PoolBuffer> {
        if len > self.frame_size {
            return None;
        }
        let Some(mut buffer) = self.spare.pop() else {
            return self.pool.get(len);
        };
        buffer.set_len(len).ok()?;
        Some(buffer)
    }

    /// Returns a frame or buffer to the queue without a lock, unlike dropping it. A frame or
    /// buffer of another queue is dropped.
    pub fn give_back(&mut self, frame: impl Into<PoolBuffer>) {
        keep(&mut self.spare, &self.pool, frame.into());
    }

    /// Receives matching frames until the flow is removed or the queue is dropped. If several
    /// queues match a frame, each receives a copy.
    ///
    /// # Errors
    /// EPERM without CAP_NET_RAW; EINVAL if the queue does not receive; [`Error::Invalid`] if
    /// the queue already has this flow; ENOSPC.
    pub fn add_flow(&mut self, flow_match: FlowMatch) -> Result<()> {
        if self.flows.iter().any(|(have, _)| *have == flow_match) {
            return Err(Error::Invalid {
                what: "the queue has this flow already",
            });
        }
        let (kind, specs) = flow_match.encode();
        let init = FlowInit {
            kind,
            port: self.port,
            ..FlowInit::default()
        };
        let flow = Flow::create(self.context().uverbs(), self.qp.handle(), &init, specs)?;
        self.flows.push((flow_match, flow));
        Ok(())
    }

    /// Removes a flow. Returns whether the queue had it. Frames that have already arrived are
    /// still received.
    ///
    /// # Errors
    /// The kernel's error; the flow is not removed.
    pub fn remove_flow(&mut self, flow_match: FlowMatch) -> Result<bool> {
        let Some(at) = self.flows.iter().position(|(have, _)| *have == flow_match) else {
            return Ok(false);
        };
        let (_, flow) = &self.flows[at];
        match flow.destroy() {
            Err(error) if !flow.has_ended() => return Err(error.into()),
            _ => {}
        }
        self.flows.swap_remove(at);
        Ok(true)
    }

    /// Returns the number of frames that can be sent before another poll.
    fn room(&self) -> usize {
        self.send_depth.saturating_sub(self.qp.in_flight().0) as usize
    }

    /// Sends a frame. A later poll frees its buffer when the send has completed, which does
    /// not mean that the frame was received.
    ///
    /// # Errors
    /// Returns the frame with [`Error::QueueFull`], [`Error::Limit`] if it is longer
    /// than [`frame_size`](Self::frame_size), [`Error::Invalid`] if it is shorter than an
    /// Ethernet header, [`Error::Unsupported`] for checksums that the device does not
    /// compute, or [`Error::WrongDomain`] for a buffer of another protection domain.
    pub fn send(
        &mut self,
        frame: PoolBuffer,
        checksums: Checksums,
    ) -> Result<(), PostError<PoolBuffer>> {
        let mut frames = std::iter::once(frame);
        self.send_all(&mut frames, checksums)?;
        match frames.next() {
            None => Ok(()),
            Some(frame) => Err(PostError {
                error: Error::QueueFull {
                    capacity: self.send_depth,
                },
                data: Some(frame),
                token: 0,
            }),
        }
    }

    /// Sends frames with one doorbell and one completion, until the queue is full. Returns
    /// the number of frames taken from the iterator; a full queue is not an error.
    ///
    /// # Errors
    /// As [`send`](Self::send), with the first frame that was refused. Earlier frames are
    /// sent.
    pub fn send_all(
        &mut self,
        frames: &mut impl Iterator<Item = PoolBuffer>,
        checksums: Checksums,
    ) -> Result<usize, PostError<PoolBuffer>> {
        let room = self.room();
        let limits = Limits {
            frame_size: self.frame_size,
            checksums: self.checksums,
            domain: self.qp.domain().identity(),
        };
        let mut refused = None;
        let (mut taken, mut sent) = (0, 0);
        let posted = self.qp.batch(|batch| {
            let mut post = |frame, is_last: bool| {
                let mut request = WorkRequest::send(frame);
                if checksums == Checksums::Compute {
                    request = request.checksums();
                }
                if !is_last {
                    request = request.unsignaled();
                }
                batch.post(request)
            };
            // The completion of the last one ends them all.
            let mut last = None;
            while taken < room && refused.is_none() {
                let Some(frame) = frames.next() else { break };
                if let Err(error) = limits.check(&frame, checksums) {
                    refused = Some(PostError {
                        error,
                        data: Some(frame),
                        token: 0,
                    });
                    break;
                }
                taken += 1;
                if let Some(before) = last.replace(frame) {
                    refused = post(before, false).err();
                    sent += u64::from(refused.is_none());
                }
            }
            if let Some(frame) = last {
                let last_refused = post(frame, true).err();
                sent += u64::from(last_refused.is_none());
                refused = refused.take().or(last_refused);
            }
            Ok::<_, Error>(())
        });
        self.posted += sent;
        match (refused, posted) {
            (Some(refused), _) => Err(refused),
            (None, Ok(())) => Ok(taken),
            (None, Err(error)) => Err(PostError {
                error: error.into(),
                data: None,
                token: 0,
            }),
        }
    }

    /// Posts free buffers as receives.
    fn refill(&mut self) -> Result<()> {
        let missing = self.recv_depth.saturating_sub(self.qp.in_flight().1) as usize;
        let Self { spare, pool, .. } = self;
        if missing > spare.len() {
            pool.get_several(self.frame_size, missing - spare.len(), spare);
        }
        if missing == 0 || spare.is_empty() {
            return Ok(());
        }
        self.qp.receive_batch(|batch| {
            for _ in 0..missing {
                let Some(buffer) = spare.pop() else { break };
                if let Err(refused) = batch.receive(buffer, 0) {
                    spare.extend(refused.data);
                    return Err(refused.error);
                }
            }
            Ok(())
        })
    }

    /// Passes a batch of received frames to `each`; returns their number. Never blocks,
    /// except on an embedded device (see [`CompletionQueue`]).
    ///
    /// # Errors
    /// [`Error::Failed`] if a send or receive failed, after which the queue no longer sends or
    /// receives; [`Error::Driver`] for a completion whose length exceeds the buffer;
    /// [`Error::Corruption`]. Earlier frames were passed to `each`.
    pub fn poll(&mut self, each: impl FnMut(Frame)) -> Result<usize> {
        self.poll_up_to(usize::MAX, each)
    }

    /// Returns the next received frame; otherwise as [`poll`](Self::poll).
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn receive(&mut self) -> Result<Option<Frame>> {
        let mut frame = None;
        self.poll_up_to(1, |received| frame = Some(received))?;
        Ok(frame)
    }

    fn poll_up_to(&mut self, max: usize, mut each: impl FnMut(Frame)) -> Result<usize> {
        self.refill()?;
        let Self {
            pool,
            spare,
            counters,
            ..
        } = self;
        let spare = RefCell::new(spare);
        let keep = |payload: Payload| {
            if let Some(buffer) = payload.into_pool_buffer() {
                keep(&mut spare.borrow_mut(), pool, buffer);
            }
        };
        let mut received = 0;
        let mut failed = None;
        let read = self.completions.each_entry(
            |mut entry| {
                let operation = entry.operation();
                let payload = entry.take_payload();
                let fields = match entry.result() {
                    Ok(fields) => fields,
                    Err(failure) => {
                        keep(payload);
                        let too_long = failure.status == Status::LOC_LEN_ERR;
                        if too_long && operation == Operation::Receive {
                            counters.too_long += 1;
                        } else {
                            failed = Some(Error::Failed { operation, failure });
                        }
                        return failed.is_none();
                    }
                };
                if operation != Operation::Receive {
                    keep(payload);
                    return true;
                }
                let Some(buffer) = payload.into_pool_buffer() else {
                    return true;
                };
                let length = fields.byte_len() as usize;
                // The buffer's length is bounded in any case.
                if buffer.len() != length {
                    failed = Some(length_error(length, buffer.capacity()));
                    return false;
                }
                received += 1;
                counters.received += 1;
                each(Frame {
                    buffer,
                    checksums_ok: fields.checksums_ok(),
                    timestamp: fields.timestamp(),
                });
                received < max
            },
            |ended| keep(ended.payload),
        );
        match failed {
            Some(error) => Err(error),
            None => read.map(|_| received),
        }
    }

    /// Destroys the queue and its flows. Frames that were not polled are lost.
    ///
    /// # Errors
    /// Returns the queue with the kernel's error.
    pub fn close(mut self) -> Result<(), CloseError<Self>> {
        while let Some((what, flow)) = self.flows.pop() {
            match flow.destroy() {
                Err(error) if !flow.has_ended() => {
                    self.flows.push((what, flow));
                    return Err(CloseError::new(self, error));
                }
                _ => {}
            }
        }
        let closed = self.qp.close();
        closed.map_err(|refused| refused.map(|qp| Self { qp, ..self }))
    }

    /// Requests an event in the [channel](PacketQueueBuilder::channel) for the next completion
    /// of a receive or a send, then checks the queue again: the caller may wait for an event
    /// only if this returns `false`.
    ///
    /// # Errors
    /// [`Error::Invalid`] without a channel; EIO if the device was removed.
    pub fn arm(&mut self) -> Result<bool> {
        self.refill()?;
        self.completions.arm(false)
    }
}

/// Keeps a free buffer if it belongs to `pool`; `spare` has capacity for all of them.
#[inline]
fn keep(spare: &mut Vec<PoolBuffer>, pool: &BufferPool, buffer: PoolBuffer) {
    if buffer.is_of(pool) && spare.len() < spare.capacity() {
        spare.push(buffer);
    }
}

#[cold]
fn length_error(length: usize, capacity: usize) -> Error {
    Error::Driver {
        what: "length of a received frame",
        message: format!("{length} bytes in a buffer of {capacity}"),
    }
}

/// Limits of sent frames.
struct Limits {
    frame_size: usize,
    checksums: bool,
    domain: Identity,
}

impl Limits {
    fn check(&self, frame: &PoolBuffer, checksums: Checksums) -> Result<()> {
        if frame.len() < HEADER {
            return Err(Error::Invalid { what: TOO_SHORT });
        }
        if frame.len() > self.frame_size {
            return Err(Error::Limit {
                what: "bytes of a frame",
                asked: frame.len() as u64,
                allowed: self.frame_size as u64,
            });
        }
        if checksums == Checksums::Compute && !self.checksums {
            return Err(Error::Unsupported {
                what: "checksums of sent frames",
            });
        }
        match frame.memory().identity() == self.domain {
            true => Ok(()),
            false => Err(Error::WrongDomain { what: "frame" }),
        }
    }
}

impl fmt::Debug for PacketQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PacketQueue")
            .field("qp_num", &self.qp_num())
            .field("in_flight", &self.in_flight())
            .finish_non_exhaustive()
    }
}

/// A received frame: its bytes from the destination address on, without the frame check
/// sequence. Dropping it returns its buffer to the queue.
pub struct Frame {
    buffer: PoolBuffer,
    checksums_ok: bool,
    timestamp: Option<Timestamp>,
}

impl Frame {
    /// Returns whether the device has validated the checksums of the IPv4 header and of TCP or
    /// UDP; false for frames that it does not check.
    pub fn checksums_ok(&self) -> bool {
        self.checksums_ok
    }

    /// Returns the device's timestamp of the arrival if the queue was built with
    /// [`timestamps`](PacketQueueBuilder::timestamps).
    pub fn timestamp(&self) -> Option<Timestamp> {
        self.timestamp
    }

    /// Returns the frame's buffer, for example to modify and forward it.
    pub fn into_buffer(self) -> PoolBuffer {
        self.buffer
    }
}

impl From<Frame> for PoolBuffer {
    fn from(frame: Frame) -> Self {
        frame.buffer
    }
}

impl Deref for Frame {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buffer
    }
}

impl AsRef<[u8]> for Frame {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("len", &self.len())
            .field("checksums_ok", &self.checksums_ok)
            .field("timestamp", &self.timestamp)
            .finish()
    }
}
