//! The sides of a measurement: queue pairs, memory, completions.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use ringverbs::{
    AccessFlags, Buffer, Completion, CompletionQueue, Context, Endpoint, Operation, PortAddress,
    PostError, ProtectionDomain, RemoteAddr, RemoteRegion, SharedBuffer, Transport, WorkRequest,
};

use super::error::PerfError;
use super::protocol::{
    Address, Goal, Memory, PeerConnection, PerfOperation, Phase, PhaseResult, ProtocolError, Setup,
};
use super::stats::Samples;
use crate::error::Error;
use crate::poller::Poller;
use crate::side::{AddressedQp, GRH, SidePort};

/// Time without completions after which the measurement fails.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time after which a message without a reply counts as lost.
const LOSS_TIMEOUT: Duration = Duration::from_millis(200);
/// Number of consecutive lost messages after which the measurement fails.
const MAX_CONSECUTIVE_LOSSES: u32 = 25;
/// Time without messages after which the missing ones count as lost.
const DRAIN_TIMEOUT: Duration = Duration::from_millis(50);
/// Time without completions after which the TCP connection is checked for messages.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Interval of checks whether the other side is connected while operations complete.
const PEER_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of completions per poll.
const BATCH: usize = 32;
/// Maximum size of all buffers of a side, in bytes.
const MEMORY_LIMIT: u64 = 1 << 30;
/// Default of the maximum number of outstanding operations of a queue pair.
pub const DEFAULT_DEPTH: u32 = 64;
/// The bit of a token that the other side in this process sets.
const OTHER_SIDE: u64 = 1 << 32;
/// The bits of a token below [`OTHER_SIDE`]: the index of the connection.
const CONNECTION: u64 = OTHER_SIDE - 1;
/// The first bit of a token's number of operations that complete with a signaled one: itself,
/// and the unsignaled ones posted before it.
const COUNT_SHIFT: u32 = 33;

/// The common setup, and the local port.
#[derive(Clone, Copy, Debug)]
pub struct SideOptions {
    pub setup: Setup,
    pub port: u8,
    pub gid_index: Option<u8>,
}

impl Setup {
    /// Size of an operation's buffer in bytes.
    fn buffer_size(&self) -> usize {
        self.size.max(8) as usize
    }

    /// Receives of a queue pair: none if messages consume none, more on transports without
    /// flow control.
    fn recv_depth(&self) -> u32 {
        match self.transport.is_lossy() {
            _ if !self.consumes_receives() => 0,
            true => self.depth.saturating_mul(4),
            false => self.depth,
        }
    }

    /// Returns whether all operations read the same memory, rather than store data in a buffer
    /// of their own.
    fn has_source(&self) -> bool {
        matches!(self.operation, PerfOperation::Send | PerfOperation::Write)
    }

    /// Buffers for the data that the operations of a queue pair return.
    fn buffers(&self) -> u32 {
        if self.has_source() { 0 } else { self.depth }
    }

    /// Maximum number of operations of a queue pair that are posted in a group, of which the
    /// last one is signaled. The completion of an operation returns its buffer, if it has one.
    fn group_size(&self) -> u32 {
        if self.has_source() {
            self.depth.div_ceil(4)
        } else {
            1
        }
    }

    /// Completions of a side.
    fn cq_entries(&self) -> u32 {
        let queue_pair = self.depth.saturating_add(self.recv_depth());
        queue_pair.saturating_mul(self.queue_pairs)
    }

    /// Size of a receive's buffer in bytes.
    fn recv_buffer_size(&self) -> usize {
        match self.operation {
            // Immediate data consumes a receive, but no memory of it.
            PerfOperation::Write => 8,
            _ if self.transport.qp_transport() == Transport::Datagram => self.buffer_size() + GRH,
            _ => self.buffer_size(),
        }
    }

    /// Size of the buffers of all queue pairs of a side in bytes.
    pub fn memory(&self) -> u64 {
        let receives = u64::from(self.recv_depth()) * self.recv_buffer_size() as u64;
        let queue_pair = u64::from(self.buffers()) * self.buffer_size() as u64 + receives;
        queue_pair.saturating_mul(self.queue_pairs.into())
    }

    /// Checks whether the buffers are within the memory limit, which does not apply to a
    /// single outstanding operation.
    pub fn check_memory(&self) -> Result<(), PerfError> {
        if self.memory() <= MEMORY_LIMIT || self.depth == 1 && self.queue_pairs == 1 {
            return Ok(());
        }
        Err(PerfError::Memory {
            setup: *self,
            limit: MEMORY_LIMIT,
            max_depth: Self {
                depth: DEFAULT_DEPTH,
                ..*self
            }
            .with_reduced_depth()
            .depth,
        })
    }

    /// Halves the depth until the buffers are within the memory limit.
    pub fn with_reduced_depth(mut self) -> Self {
        while self.depth > 1 && self.memory() > MEMORY_LIMIT {
            self.depth /= 2;
        }
        self
    }
}

/// A queue pair with its outstanding operations.
struct Connection {
    addressed: AddressedQp,
    outstanding: u32,
}

/// One side of a measurement.
struct Side {
    setup: Setup,
    local: SidePort,
    connections: Vec<Connection>,
    /// Distinguishes the side's tokens from those of the other side in this process.
    token_base: u64,
    /// Free buffers for operations.
    free: Vec<Buffer>,
    /// Memory that sends and writes read, for messages of the maximum size.
    source: Option<SharedBuffer>,
    /// The part of it that the phase's messages read.
    message: Option<SharedBuffer>,
    /// Memory for the other side's operations.
    region: Option<RemoteRegion>,
    /// The other side's memory.
    remote: RemoteAddr,
    /// Outstanding operations of all queue pairs.
    outstanding: u32,
    /// Index of the connection that posts next.
    next: usize,
    /// The number of the phase, which the immediate data of lossy messages contains.
    phase: u8,
    /// Message size in bytes.
    size: u32,
    /// Whether each message is sent back.
    echo: bool,
    /// Messages received in this phase.
    received: u64,
    /// The immediate data of the last message.
    last_immediate: Option<u32>,
    /// Messages to send back: connection and immediate data.
    pending_replies: VecDeque<(usize, Option<u32>)>,
    /// The operations that the side posts as its depth allows.
    pipeline: Option<Pipeline>,
}

/// Operations that are posted as the depth allows, until the goal is reached.
#[derive(Clone, Copy)]
struct Pipeline {
    countdown: Countdown,
    operations: u64,
    /// The time until the last completion.
    time: Option<Duration>,
}

/// The pipelined operations of a side in a phase.
#[derive(Clone, Copy, Debug, Default)]
pub struct PostSummary {
    pub operations: u64,
    pub time: Duration,
}

fn failed(step: &str) -> impl FnOnce(ringverbs::Error) -> Error {
    move |error| Error::verb(format!("perf: {step}"))(error)
}

/// Determines the end of a phase.
#[derive(Clone, Copy)]
struct Countdown {
    goal: Goal,
    start: Instant,
}

impl Pipeline {
    fn is_running(&self) -> bool {
        self.countdown.is_running(self.operations)
    }
}

impl Countdown {
    fn new(goal: Goal) -> Self {
        Self {
            goal,
            start: Instant::now(),
        }
    }

    fn is_running(&self, operations: u64) -> bool {
        match self.goal {
            Goal::Operations(all) => operations < all,
            Goal::Milliseconds(all) => self.start.elapsed() < Duration::from_millis(all),
        }
    }
}

/// Checks from time to time whether the other side is connected. Only a reliable transport
/// reports that it is gone: on others all operations complete, whoever receives them.
struct PeerCheck<'p> {
    peer: Option<&'p PeerConnection<TcpStream>>,
    last: Instant,
}

impl<'p> PeerCheck<'p> {
    fn new(setup: Setup, peer: Option<&'p PeerConnection<TcpStream>>) -> Self {
        Self {
            peer: peer.filter(|_| setup.transport.is_lossy()),
            last: Instant::now(),
        }
    }

    fn check_if_due(&mut self) -> Result<(), ProtocolError> {
        let Some(peer) = self.peer else {
            return Ok(());
        };
        if self.last.elapsed() < PEER_CHECK_INTERVAL {
            return Ok(());
        }
        self.last = Instant::now();
        peer.check_open()
    }
}

impl Side {
    /// Creates all objects: receives for messages, and memory for one-sided operations, of
    /// the other side.
    fn new(
        context: &Context,
        options: SideOptions,
        cq: &CompletionQueue,
        token_base: u64,
    ) -> Result<Self, Error> {
        let setup = options.setup;
        let transport = setup.transport.qp_transport();
        let port = (options.port, options.gid_index);
        let local = SidePort::new(context, port, transport, setup.size)?;
        let domain = &local.domain;
        let (depth, count) = (setup.depth, setup.queue_pairs);
        let recv_depth = setup.recv_depth();
        let buffers = |domain: &ProtectionDomain, size: usize, count: u32| {
            let count = count as usize;
            let region = domain.alloc(size.saturating_mul(count));
            region.map(|region| region.into_buffers(size).take(count))
        };
        let size = setup.buffer_size();
        let number = (setup.buffers() * count).max(1);
        let mut own = buffers(domain, size, number).map_err(failed("memory"))?;
        let source = setup.has_source().then(|| own.next()).flatten();
        let mut side = Self {
            setup,
            region: Self::alloc_remote(domain, setup)?,
            connections: Vec::new(),
            token_base,
            free: own.collect(),
            source: source.map(Buffer::freeze),
            message: None,
            remote: RemoteAddr::new(0, 0),
            outstanding: 0,
            next: 0,
            phase: 0,
            size: 0,
            echo: false,
            received: 0,
            last_immediate: None,
            pending_replies: VecDeque::new(),
            pipeline: None,
            local,
        };
        for _ in 0..count {
            let builder = side.local.domain.queue_pair(transport, cq);
            let builder = builder.send_depth(depth).recv_depth(recv_depth.max(1));
            let addressed = AddressedQp::new(builder, &side.local.address);
            let addressed = addressed.map_err(failed("queue pair"))?;
            side.connections.push(Connection {
                addressed,
                outstanding: 0,
            });
        }
        if recv_depth > 0 {
            let receives = buffers(
                &side.local.domain,
                setup.recv_buffer_size(),
                recv_depth * count,
            );
            let mut receives = receives.map_err(failed("memory"))?;
            for at in 0..side.connections.len() {
                for buffer in receives.by_ref().take(recv_depth as usize) {
                    side.post_receive(at, buffer)?;
                }
            }
        }
        Ok(side)
    }

    /// Allocates the memory for the other side's operations.
    fn alloc_remote(
        domain: &ProtectionDomain,
        setup: Setup,
    ) -> Result<Option<RemoteRegion>, Error> {
        let access = match setup.operation {
            PerfOperation::Send => return Ok(None),
            PerfOperation::Write => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
            PerfOperation::Read => AccessFlags::REMOTE_READ,
            PerfOperation::Atomic => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_ATOMIC,
        };
        let region = domain.alloc_remote(setup.buffer_size(), access);
        region
            .map(Some)
            .map_err(failed("memory for the other side"))
    }

    /// Returns the addresses of the queue pairs and the memory.
    fn address(&self) -> Address {
        let local = &self.local.address;
        let endpoint = |it: &Connection| it.addressed.qp.endpoint(local).to_string();
        let key = self.region.as_ref().map(RemoteRegion::key);
        let key = key.unwrap_or_default();
        Address {
            endpoints: self.connections.iter().map(endpoint).collect(),
            memory: Memory {
                addr: key.addr,
                rkey: key.rkey,
            },
        }
    }

    /// Connects to the other side's queue pairs.
    fn connect(&mut self, peer: &Address) -> Result<(), Error> {
        if peer.endpoints.len() != self.connections.len() {
            return Err(ProtocolError::Value("number of endpoints").into());
        }
        for (connection, endpoint) in self.connections.iter_mut().zip(&peer.endpoints) {
            let endpoint: Endpoint = endpoint
                .parse()
                .map_err(Error::verb("reading the other side's endpoint"))?;
            let addressed = &mut connection.addressed;
            let connected = match addressed.qp.transport() {
                Transport::Datagram => {
                    let peer = PortAddress::from(&endpoint);
                    let handle = self
                        .local
                        .domain
                        .address_handle_to(&self.local.address, peer);
                    handle.map(|handle| addressed.set_destination(handle, endpoint.qp_num))
                }
                _ => addressed.qp.connect(&self.local.address, &endpoint),
            };
            connected.map_err(failed("connecting the queue pairs"))?;
        }
        self.remote = RemoteAddr::new(peer.memory.addr, peer.memory.rkey);
        Ok(())
    }

    /// Begins a phase, and posts the first of its operations.
    fn begin_phase(&mut self, phase: &Phase) -> Result<(), Error> {
        self.phase = phase.number;
        self.size = phase.size;
        let source = self.source.as_ref();
        let message = source.map(|it| it.slice(..phase.size as usize)).transpose();
        self.message = message.map_err(failed("setting a message's length"))?;
        self.echo = phase.echo;
        self.received = 0;
        self.last_immediate = None;
        self.pending_replies.clear();
        self.pipeline = None;
        match phase.goal {
            Some(goal) => self.begin_pipeline(goal),
            None => Ok(()),
        }
    }

    fn begin_pipeline(&mut self, goal: Goal) -> Result<(), Error> {
        self.pipeline = Some(Pipeline {
            countdown: Countdown::new(goal),
            operations: 0,
            time: None,
        });
        self.advance()
    }

    /// Returns the pipelined operations if all have completed; none if there is no pipeline.
    fn pipelined(&self) -> Option<PostSummary> {
        let Some(pipeline) = self.pipeline else {
            return Some(PostSummary::default());
        };
        pipeline.time.map(|time| PostSummary {
            operations: pipeline.operations,
            time,
        })
    }

    /// Returns whether nothing is outstanding or to be posted.
    fn is_idle(&self) -> bool {
        self.pending_replies.is_empty() && self.outstanding == 0 && self.pipelined().is_some()
    }

    fn post_receive(&mut self, at: usize, buffer: Buffer) -> Result<(), Error> {
        let Some(connection) = self.connections.get_mut(at) else {
            return Ok(());
        };
        let posted = connection
            .addressed
            .qp
            .receive(buffer, self.token_base | at as u64);
        posted.map_err(|error| failed("posting a receive")(error.into_error()))
    }

    /// Returns the immediate data of a lossy message: the phase, and the message's number.
    fn immediate(&self, number: u64) -> Option<u32> {
        let lossy = self.setup.transport.is_lossy();
        lossy.then(|| u32::from(self.phase) << 24 | (number & 0xff_ffff) as u32)
    }

    /// Posts an operation, for which there must be a free buffer if it needs one. It is
    /// signaled if `completes` is the number of operations that complete with it.
    fn post(
        &mut self,
        at: usize,
        immediate: Option<u32>,
        completes: Option<u32>,
    ) -> Result<(), Error> {
        let Some(connection) = self.connections.get_mut(at) else {
            return Ok(());
        };
        connection.outstanding += 1;
        self.outstanding += 1;
        let count = u64::from(completes.unwrap_or(0)) << COUNT_SHIFT;
        let token = self.token_base | count | at as u64;
        let posted = match &self.message {
            Some(message) => {
                let message = message.clone();
                let request = match self.setup.operation {
                    PerfOperation::Send => connection.addressed.send(message),
                    _ => WorkRequest::write(message, self.remote),
                };
                let request = match immediate {
                    Some(value) => request.immediate(value),
                    None => request,
                };
                let request = match completes {
                    Some(_) => request,
                    None => request.unsignaled(),
                };
                let posted = connection.addressed.qp.post(request.token(token));
                posted.map_err(PostError::into_error)
            }
            None => {
                let mut buffer = self.free.pop().ok_or(PerfError::NoBuffer)?;
                let resized = buffer.set_len(self.size as usize);
                resized.map_err(failed("setting a buffer's length"))?;
                let request = match self.setup.operation {
                    PerfOperation::Atomic => WorkRequest::fetch_add(buffer, self.remote, 1),
                    _ => WorkRequest::read(buffer, self.remote),
                };
                let posted = connection.addressed.qp.post(request.token(token));
                posted.map_err(PostError::into_error)
            }
        };
        posted.map_err(failed("posting"))
    }

    /// Posts a group of the phase's operations on a connection that has room, of which the
    /// last one is signaled.
    fn post_group(&mut self, at: usize, pipeline: &mut Pipeline) -> Result<(), Error> {
        let outstanding = self.connections.get(at).map_or(0, |it| it.outstanding);
        let room = (self.setup.depth - outstanding).min(self.setup.group_size());
        let mut count = 0;
        loop {
            let immediate = self.immediate(pipeline.operations);
            pipeline.operations += 1;
            count += 1;
            let is_last = count == room || !pipeline.is_running();
            self.post(at, immediate, is_last.then_some(count))?;
            if is_last {
                return Ok(());
            }
        }
    }

    /// Returns the next connection, round robin, that has room for an operation.
    fn next_connection(&mut self) -> Option<usize> {
        let count = self.connections.len();
        for _ in 0..count {
            let at = self.next;
            self.next = (at + 1) % count;
            let connection = self.connections.get(at)?;
            if connection.outstanding < self.setup.depth {
                return Some(at);
            }
        }
        None
    }

    /// Posts what the phase allows now: replies, then pipelined operations.
    fn advance(&mut self) -> Result<(), Error> {
        while let Some((at, immediate)) = self.pending_replies.front().copied() {
            let connection = self.connections.get(at);
            if connection.is_none_or(|it| it.outstanding >= self.setup.depth) {
                break;
            }
            self.pending_replies.pop_front();
            self.post(at, immediate, Some(1))?;
        }
        let Some(mut pipeline) = self.pipeline.filter(|it| it.time.is_none()) else {
            return Ok(());
        };
        while pipeline.is_running() {
            let Some(at) = self.next_connection() else {
                break;
            };
            self.post_group(at, &mut pipeline)?;
        }
        if self.outstanding == 0 {
            pipeline.time = Some(pipeline.countdown.start.elapsed());
        }
        self.pipeline = Some(pipeline);
        Ok(())
    }

    /// Processes a completion: frees the buffer, or posts the receive again.
    fn complete(&mut self, completion: &mut Completion) -> Result<(), Error> {
        let immediate = match &completion.result {
            Ok(success) => success.immediate(),
            Err(failure) => {
                return Err(PerfError::Failed {
                    operation: completion.operation,
                    status: failure.to_string(),
                }
                .into());
            }
        };
        let at = (completion.token & CONNECTION) as usize;
        let buffer = completion.take_buffer();
        if completion.operation != Operation::Receive {
            let count = (completion.token >> COUNT_SHIFT) as u32;
            if let Some(connection) = self.connections.get_mut(at) {
                connection.outstanding -= count;
            }
            self.outstanding -= count;
            self.free.extend(buffer);
        } else if let Some(buffer) = buffer {
            self.post_receive(at, buffer)?;
            self.count_message(at, immediate);
        }
        Ok(())
    }

    /// Counts a received message, unless it is a late one of an earlier phase.
    fn count_message(&mut self, at: usize, immediate: Option<u32>) {
        if immediate.is_some_and(|value| value >> 24 != u32::from(self.phase)) {
            return;
        }
        self.received += 1;
        self.last_immediate = immediate;
        // A client never has more outstanding; the limit bounds memory.
        let limit = (self.setup.depth * self.setup.queue_pairs) as usize;
        if self.echo && self.pending_replies.len() < limit {
            self.pending_replies.push_back((at, immediate));
        }
    }
}

/// A side of [`Sides`].
#[derive(Clone, Copy)]
pub enum SideIndex {
    /// The client, or the server of another process's client.
    Own,
    /// The server of the client in this process.
    Other,
}

/// The sides in this process, one or both. They share a completion queue and a thread.
pub struct Sides {
    own: Side,
    other: Option<Side>,
    poller: Poller,
    completions: Vec<Completion>,
}

impl Sides {
    /// Creates one side.
    pub fn one(context: &Context, options: SideOptions) -> Result<Self, Error> {
        Self::new(context, options, false)
    }

    /// Creates and connects both sides.
    pub fn both(context: &Context, options: SideOptions) -> Result<Self, Error> {
        let mut sides = Self::new(context, options, true)?;
        if let Some(other) = &mut sides.other {
            sides.own.connect(&other.address())?;
            other.connect(&sides.own.address())?;
        }
        Ok(sides)
    }

    fn new(context: &Context, options: SideOptions, both: bool) -> Result<Self, Error> {
        let setup = options.setup;
        setup.check_memory()?;
        let entries = setup.cq_entries().saturating_mul(1 + u32::from(both));
        let poller = Poller::new(context, entries.saturating_add(2), setup.events);
        let poller = poller.map_err(failed("completion queue"))?;
        let side = |token_base| Side::new(context, options, &poller.cq, token_base);
        Ok(Self {
            own: side(0)?,
            other: both.then(|| side(OTHER_SIDE)).transpose()?,
            completions: (0..BATCH).map(|_| Completion::default()).collect(),
            poller,
        })
    }

    /// Returns the addresses of the own side.
    pub fn address(&self) -> Address {
        self.own.address()
    }

    /// Connects the own side.
    pub fn connect(&mut self, peer: &Address) -> Result<(), Error> {
        self.own.connect(peer)
    }

    /// Returns a side; of one side, always that.
    fn side(&mut self, index: SideIndex) -> &mut Side {
        match (index, &mut self.other) {
            (SideIndex::Other, Some(other)) => other,
            _ => &mut self.own,
        }
    }

    /// Begins a phase of a side, and posts the first of its operations.
    pub fn begin_phase(&mut self, index: SideIndex, phase: &Phase) -> Result<(), Error> {
        self.side(index).begin_phase(phase)
    }

    /// Waits for completions, processes them, and posts what they allow. Returns the number
    /// of completions, 0 after `timeout`.
    fn progress(&mut self, timeout: Duration) -> Result<usize, Error> {
        let polled = self.poller.poll(&mut self.completions, timeout);
        let count = polled.map_err(failed("polling"))?;
        for completion in self.completions.iter_mut().take(count) {
            let side = match &mut self.other {
                Some(other) if completion.token & OTHER_SIDE != 0 => other,
                _ => &mut self.own,
            };
            side.complete(completion)?;
        }
        self.own.advance()?;
        if let Some(other) = &mut self.other {
            other.advance()?;
        }
        Ok(count)
    }

    /// As [`progress`](Self::progress), but fails if nothing completes within [`TIMEOUT`].
    fn progress_or_fail(&mut self) -> Result<usize, Error> {
        match self.progress(TIMEOUT)? {
            0 => Err(PerfError::Timeout(TIMEOUT.as_secs()).into()),
            count => Ok(count),
        }
    }

    /// Measures single operations: half of the round trip of messages, the time from
    /// posting to completion of other operations. Queue pairs are used round robin. Returns
    /// the times, and the number of lost messages.
    pub fn measure_latency(
        &mut self,
        goal: Goal,
        mut tick: impl FnMut(u64),
    ) -> Result<(Samples, u64), Error> {
        let mut samples = Samples::default();
        let (mut number, mut lost, mut consecutive) = (0, 0, 0);
        let countdown = Countdown::new(goal);
        while countdown.is_running(number) {
            let at = self.own.next_connection().ok_or(PerfError::NoBuffer)?;
            let immediate = self.own.immediate(number);
            let before = self.own.received;
            let start = Instant::now();
            self.own.post(at, immediate, Some(1))?;
            number += 1;
            tick(number);
            while self.own.outstanding > 0 {
                self.progress_or_fail()?;
            }
            if !self.own.setup.consumes_receives() {
                samples.add(start.elapsed());
                continue;
            }
            let replied = match immediate {
                None => {
                    while self.own.received == before {
                        self.progress_or_fail()?;
                    }
                    true
                }
                Some(_) => loop {
                    if self.own.last_immediate == immediate {
                        break true;
                    }
                    let remaining = LOSS_TIMEOUT.saturating_sub(start.elapsed());
                    if remaining.is_zero() || self.progress(remaining)? == 0 {
                        break self.own.last_immediate == immediate;
                    }
                },
            };
            if replied {
                samples.add(start.elapsed() / 2);
                consecutive = 0;
            } else {
                lost += 1;
                consecutive += 1;
                if consecutive == MAX_CONSECUTIVE_LOSSES {
                    return Err(PerfError::Lost(consecutive).into());
                }
            }
        }
        Ok((samples, lost))
    }

    /// Keeps the maximum number of operations outstanding until the goal is reached. Fails if
    /// another process's side, `peer`, is gone.
    pub fn post_pipelined(
        &mut self,
        goal: Goal,
        peer: Option<&PeerConnection<TcpStream>>,
        mut tick: impl FnMut(u64),
    ) -> Result<PostSummary, Error> {
        let mut check = PeerCheck::new(self.own.setup, peer);
        self.own.begin_pipeline(goal)?;
        loop {
            if let Some(summary) = self.own.pipelined() {
                return Ok(summary);
            }
            self.progress_or_fail()?;
            check.check_if_due()?;
            tick(self.own.pipeline.map_or(0, |it| it.operations));
        }
    }

    /// Serves the other side until nothing is outstanding and `peer` has sent a message. Where
    /// no RDMA messages arrive, it does not wait for that. Fails if the other side is gone
    /// before its own operations have completed.
    pub fn serve(&mut self, peer: &PeerConnection<TcpStream>) -> Result<(), Error> {
        let mut check = PeerCheck::new(self.own.setup, Some(peer));
        loop {
            let idle = self.own.is_idle();
            if idle && !self.own.setup.consumes_receives() {
                return Ok(());
            }
            let count = match idle {
                true => self.progress(CHECK_INTERVAL)?,
                false => self.progress_or_fail()?,
            };
            if count == 0 && peer.is_readable()? {
                return Ok(());
            }
            if !idle {
                check.check_if_due()?;
            }
        }
    }

    /// Waits until a side's operations have completed, and it has received the `sent`
    /// messages of the phase or lost some. Returns what it received and posted.
    pub fn drain(&mut self, index: SideIndex, sent: u64) -> Result<PhaseResult, Error> {
        while !self.side(index).is_idle() {
            self.progress_or_fail()?;
        }
        let setup = self.own.setup;
        while setup.consumes_receives() && self.side(index).received < sent {
            let count = match setup.transport.is_lossy() {
                true => self.progress(DRAIN_TIMEOUT)?,
                false => self.progress_or_fail()?,
            };
            if count == 0 {
                break;
            }
        }
        let side = self.side(index);
        let posted = side.pipelined().unwrap_or_default();
        Ok(PhaseResult {
            received: match setup.consumes_receives() {
                true => side.received,
                false => sent,
            },
            operations: posted.operations,
            nanoseconds: u64::try_from(posted.time.as_nanos()).unwrap_or(u64::MAX),
        })
    }
}
