//! One side of a measurement: connections, memory, completions.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ringverbs::{
    AccessFlags, AddressHandle, Buffer, Completion, Context, Endpoint, LocalAddress, Operation,
    PortAddress, ProtectionDomain, QueuePair, RemoteAddr, RemoteRegion, Transport, WorkRequest,
};

use super::error::PerfError;
use super::protocol::{Address, Goal, Measured, Memory, ProtocolError, Setup};
use super::stats::Samples;
use crate::error::Error;
use crate::poller::Poller;

/// Time without progress after which the other side is given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time after which a message that is not answered counts as lost.
const LOST: Duration = Duration::from_millis(200);
/// Lost messages in a row after which the other side is given up.
const LOST_IN_A_ROW: u32 = 25;
/// Time without messages after which no more are expected, if some were lost.
const QUIET: Duration = Duration::from_millis(50);
/// Time without completions after which the other side's messages over TCP are
/// looked for.
const TICK: Duration = Duration::from_millis(1);
/// Completions read at once.
const BATCH: usize = 32;
/// Limit for all buffers of a side.
const MEMORY: u64 = 1 << 30;
/// Operations outstanding of a queue pair, unless another number is asked for.
pub const DEPTH: u32 = 64;
/// Bytes of the global route header in front of a datagram.
const GRH: usize = 40;
/// The queue key of datagrams.
const QKEY: u32 = 0x1111_1111;

/// How the sides are set up, and the local port.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub setup: Setup,
    pub port: u8,
    pub gid_index: Option<u8>,
}

impl Setup {
    /// The bytes of an operation's buffer.
    fn room(&self) -> usize {
        self.size.max(8) as usize
    }

    /// Receives of a queue pair: more where nothing makes a sender wait for them.
    fn recv_depth(&self) -> u32 {
        match self.transport.is_lossy() {
            true => self.depth.saturating_mul(4),
            false => self.depth,
        }
    }

    /// The bytes of a receive's buffer.
    fn recv_room(&self) -> usize {
        match self.operation {
            // Immediate data takes a receive, and no memory.
            Measured::Write => 8,
            _ if self.transport.native() == Transport::Datagram => self.room() + GRH,
            _ => self.room(),
        }
    }

    /// The bytes of all buffers of a side.
    pub fn memory(&self) -> u64 {
        let receives = u64::from(self.recv_depth()) * self.recv_room() as u64;
        let received = if self.is_received() { receives } else { 0 };
        let each = u64::from(self.depth) * self.room() as u64 + received;
        each.saturating_mul(self.queue_pairs.into())
    }

    /// Checks whether the buffers are within the limit. One operation at a time
    /// always is.
    pub fn check_memory(&self) -> Result<(), PerfError> {
        if self.memory() <= MEMORY || self.depth == 1 && self.queue_pairs == 1 {
            return Ok(());
        }
        Err(PerfError::Memory {
            setup: *self,
            limit: MEMORY,
            fits: Self {
                depth: DEPTH,
                ..*self
            }
            .reduced()
            .depth,
        })
    }

    /// Returns it with the depth halved until the buffers are within the limit.
    pub fn reduced(mut self) -> Self {
        while self.depth > 1 && self.memory() > MEMORY {
            self.depth /= 2;
        }
        self
    }
}

/// A queue pair.
struct Connection {
    qp: QueuePair,
    /// Destination of datagrams.
    path: Option<(AddressHandle, u32)>,
    outstanding: u32,
}

/// One side.
pub struct Side {
    setup: Setup,
    local: LocalAddress,
    domain: ProtectionDomain,
    connections: Vec<Connection>,
    poller: Poller,
    /// Free buffers for operations.
    free: Vec<Buffer>,
    /// Memory for the other side's operations.
    region: Option<RemoteRegion>,
    completions: Vec<Completion>,
    /// Operations posted and not completed.
    outstanding: u32,
    /// The connection whose turn it is.
    turn: usize,
    /// The number of the phase, which lossy messages carry.
    phase: u8,
    /// Whether messages are answered.
    echo: bool,
    /// Messages received in this phase.
    received: u64,
    /// The immediate data of the last one.
    last: Option<u32>,
    /// Messages to be answered: connection and immediate data.
    unanswered: VecDeque<(usize, Option<u32>)>,
}

/// Operations of a phase.
#[derive(Clone, Copy, Debug, Default)]
pub struct Posted {
    pub operations: u64,
    pub time: Duration,
}

fn doing(what: &str) -> impl FnOnce(ringverbs::Error) -> Error {
    Error::native(format!("measuring: {what}"))
}

/// Counts operations or time.
struct Countdown {
    goal: Goal,
    start: Instant,
}

impl Countdown {
    fn new(goal: Goal) -> Self {
        Self {
            goal,
            start: Instant::now(),
        }
    }

    fn goes_on(&self, operations: u64) -> bool {
        match self.goal {
            Goal::Operations(all) => operations < all,
            Goal::Milliseconds(all) => self.start.elapsed() < Duration::from_millis(all),
        }
    }
}

impl Side {
    /// Creates all objects. Messages need receives on the other side, one-sided
    /// operations need memory there.
    pub fn new(context: &Context, plan: Plan) -> Result<Self, Error> {
        let setup = plan.setup;
        setup.check_memory()?;
        let local = match plan.gid_index {
            Some(index) => context.local_address_with(plan.port, index),
            None => context.local_address(plan.port),
        };
        let local = local.map_err(doing("the port's address"))?;
        let transport = setup.transport.native();
        let mtu = local.mtu.bytes();
        if transport == Transport::Datagram && setup.size > mtu {
            return Err(PerfError::Datagram { mtu }.into());
        }
        let domain = context.alloc_pd().map_err(doing("protection domain"))?;
        let (depth, count) = (setup.depth, setup.queue_pairs);
        let recv_depth = if setup.is_received() {
            setup.recv_depth()
        } else {
            0
        };
        let entries = depth.saturating_add(recv_depth).saturating_mul(count);
        let poller = Poller::new(context, entries.saturating_add(2), setup.events);
        let poller = poller.map_err(doing("completion queue"))?;
        let buffers = |room: usize, count: u32| {
            let count = count as usize;
            let region = domain.alloc(room.saturating_mul(count));
            region.map(|region| region.into_buffers(room).take(count))
        };
        let free = buffers(setup.room(), depth * count).map_err(doing("memory"))?;
        let mut side = Self {
            setup,
            local,
            region: Self::reachable(&domain, setup)?,
            connections: Vec::new(),
            poller,
            free: free.collect(),
            completions: (0..BATCH).map(|_| Completion::default()).collect(),
            outstanding: 0,
            turn: 0,
            phase: 0,
            echo: false,
            received: 0,
            last: None,
            unanswered: VecDeque::new(),
            domain: domain.clone(),
        };
        for _ in 0..count {
            let mut qp = domain
                .queue_pair(transport, &side.poller.cq)
                .send_depth(depth)
                .recv_depth(recv_depth.max(1))
                .build()
                .map_err(doing("queue pair"))?;
            let ready = match transport {
                Transport::Datagram => qp.activate(&local, QKEY),
                _ => qp.initialize(&local),
            };
            ready.map_err(doing("queue pair to INIT"))?;
            side.connections.push(Connection {
                qp,
                path: None,
                outstanding: 0,
            });
        }
        if recv_depth > 0 {
            let mut receives =
                buffers(setup.recv_room(), recv_depth * count).map_err(doing("memory"))?;
            for at in 0..side.connections.len() {
                for buffer in receives.by_ref().take(recv_depth as usize) {
                    side.receive(at, buffer)?;
                }
            }
        }
        Ok(side)
    }

    fn reachable(domain: &ProtectionDomain, setup: Setup) -> Result<Option<RemoteRegion>, Error> {
        let access = match setup.operation {
            Measured::Send => return Ok(None),
            Measured::Write => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
            Measured::Read => AccessFlags::REMOTE_READ,
            Measured::Atomic => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_ATOMIC,
        };
        let region = domain.alloc_remote(setup.room(), access);
        region.map(Some).map_err(doing("memory for the other side"))
    }

    /// Returns the queue pairs and the memory for the other side.
    pub fn address(&self) -> Address {
        let endpoint = |it: &Connection| it.qp.endpoint(&self.local).to_string();
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
    pub fn connect(&mut self, peer: &Address) -> Result<RemoteAddr, Error> {
        if peer.endpoints.len() != self.connections.len() {
            return Err(ProtocolError::Value("number of endpoints").into());
        }
        for (connection, endpoint) in self.connections.iter_mut().zip(&peer.endpoints) {
            let endpoint: Endpoint = endpoint
                .parse()
                .map_err(Error::native("reading the other side's endpoint"))?;
            let connected = match connection.qp.transport() {
                Transport::Datagram => {
                    let peer = PortAddress::from(&endpoint);
                    let handle = self.domain.address_handle_to(&self.local, peer);
                    handle.map(|handle| connection.path = Some((handle, endpoint.qp_num)))
                }
                _ => connection.qp.connect(&self.local, &endpoint),
            };
            connected.map_err(doing("connecting the queue pairs"))?;
        }
        Ok(RemoteAddr::new(peer.memory.addr, peer.memory.rkey))
    }

    /// Begins a phase.
    pub fn phase(&mut self, number: u8, echo: bool) {
        self.phase = number;
        self.echo = echo;
        self.received = 0;
        self.last = None;
        self.unanswered.clear();
    }

    fn receive(&mut self, at: usize, buffer: Buffer) -> Result<(), Error> {
        let Some(connection) = self.connections.get_mut(at) else {
            return Ok(());
        };
        let posted = connection.qp.receive(buffer, at as u64);
        posted.map_err(|error| doing("posting a receive")(error.into_error()))
    }

    /// The immediate data of a message: the phase, and the message's number.
    fn immediate(&self, number: u64) -> Option<u32> {
        let lossy = self.setup.transport.is_lossy();
        lossy.then(|| u32::from(self.phase) << 24 | (number & 0xff_ffff) as u32)
    }

    /// Posts an operation of `size` bytes. There must be a free buffer.
    fn begin(
        &mut self,
        at: usize,
        size: u32,
        remote: RemoteAddr,
        immediate: Option<u32>,
    ) -> Result<(), Error> {
        let (Some(mut buffer), Some(connection)) = (self.free.pop(), self.connections.get_mut(at))
        else {
            return Err(PerfError::NoBuffer.into());
        };
        let fits = buffer.set_len(size as usize);
        fits.map_err(doing("cutting a buffer"))?;
        let marked = |request: WorkRequest<Buffer>| match immediate {
            Some(value) => request.immediate(value),
            None => request,
        };
        let request = match (self.setup.operation, &connection.path) {
            (Measured::Send, Some((path, qpn))) => {
                marked(WorkRequest::send(buffer)).to(path, *qpn, QKEY)
            }
            (Measured::Send, None) => marked(WorkRequest::send(buffer)),
            (Measured::Write, _) => marked(WorkRequest::write(buffer, remote)),
            (Measured::Read, _) => WorkRequest::read(buffer, remote),
            (Measured::Atomic, _) => WorkRequest::fetch_add(buffer, remote, 1),
        };
        let posted = connection.qp.post(request.token(at as u64));
        connection.outstanding += 1;
        self.outstanding += 1;
        posted.map_err(|error| doing("posting")(error.into_error()))
    }

    /// Returns the next connection that may have one more operation outstanding.
    fn next(&mut self) -> Option<usize> {
        let count = self.connections.len();
        for _ in 0..count {
            let at = self.turn;
            self.turn = (at + 1) % count;
            let connection = self.connections.get(at)?;
            if connection.outstanding < self.setup.depth {
                return Some(at);
            }
        }
        None
    }

    /// Waits for completions and processes them: buffers become free, receives
    /// are posted again. Returns their number, 0 after `patience`.
    fn progress(&mut self, patience: Duration) -> Result<usize, Error> {
        let polled = self.poller.poll(&mut self.completions, patience);
        let count = polled.map_err(doing("polling"))?;
        for slot in 0..count {
            let Some(completion) = self.completions.get_mut(slot) else {
                break;
            };
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
            let at = completion.token as usize;
            let operation = completion.operation;
            let Some(buffer) = completion.take_buffer() else {
                continue;
            };
            if operation == Operation::Receive {
                self.receive(at, buffer)?;
                self.arrived(at, immediate);
            } else {
                if let Some(connection) = self.connections.get_mut(at) {
                    connection.outstanding -= 1;
                }
                self.outstanding -= 1;
                self.free.push(buffer);
            }
        }
        Ok(count)
    }

    /// Counts a message, unless it is a late one of an earlier phase.
    fn arrived(&mut self, at: usize, immediate: Option<u32>) {
        if immediate.is_some_and(|value| value >> 24 != u32::from(self.phase)) {
            return;
        }
        self.received += 1;
        self.last = immediate;
        // A client has fewer outstanding.
        let limit = (self.setup.depth * self.setup.queue_pairs) as usize;
        if self.echo && self.unanswered.len() < limit {
            self.unanswered.push_back((at, immediate));
        }
    }

    /// As [`progress`](Self::progress), which must succeed in time.
    fn must_progress(&mut self) -> Result<(), Error> {
        match self.progress(PATIENCE)? {
            0 => Err(PerfError::Silence(PATIENCE.as_secs()).into()),
            _ => Ok(()),
        }
    }

    /// Measures single operations: for messages half of the round trip, for others
    /// the time from posting to completion. Queue pairs take turns. Returns the
    /// times, and the number of lost messages.
    pub fn latency(
        &mut self,
        size: u32,
        remote: RemoteAddr,
        goal: Goal,
        mut tick: impl FnMut(u64),
    ) -> Result<(Samples, u64), Error> {
        let mut samples = Samples::default();
        let (mut number, mut lost, mut in_a_row) = (0, 0, 0);
        let countdown = Countdown::new(goal);
        while countdown.goes_on(number) {
            let at = self.next().ok_or(PerfError::NoBuffer)?;
            let immediate = self.immediate(number);
            let before = self.received;
            let start = Instant::now();
            self.begin(at, size, remote, immediate)?;
            number += 1;
            tick(number);
            while self.outstanding > 0 {
                self.must_progress()?;
            }
            if !self.setup.is_received() {
                samples.add(start.elapsed());
                continue;
            }
            let answered = match immediate {
                None => {
                    while self.received == before {
                        self.must_progress()?;
                    }
                    true
                }
                Some(_) => loop {
                    if self.last == immediate {
                        break true;
                    }
                    let left = LOST.saturating_sub(start.elapsed());
                    if left.is_zero() || self.progress(left)? == 0 {
                        break self.last == immediate;
                    }
                },
            };
            if answered {
                samples.add(start.elapsed() / 2);
                in_a_row = 0;
            } else {
                lost += 1;
                in_a_row += 1;
                if in_a_row == LOST_IN_A_ROW {
                    return Err(PerfError::Lost(in_a_row).into());
                }
            }
        }
        Ok((samples, lost))
    }

    /// Keeps the maximum of operations outstanding until the goal is reached.
    pub fn post_all(
        &mut self,
        size: u32,
        remote: RemoteAddr,
        goal: Goal,
        mut tick: impl FnMut(u64),
    ) -> Result<Posted, Error> {
        let countdown = Countdown::new(goal);
        let mut operations = 0;
        loop {
            while countdown.goes_on(operations) {
                let Some(at) = self.next() else {
                    break;
                };
                let immediate = self.immediate(operations);
                self.begin(at, size, remote, immediate)?;
                operations += 1;
                tick(operations);
            }
            if self.outstanding == 0 {
                return Ok(Posted {
                    operations,
                    time: countdown.start.elapsed(),
                });
            }
            self.must_progress()?;
        }
    }

    /// Receives messages, and answers them in a phase with echo, until there are
    /// none and `ended` says so.
    pub fn serve_until(
        &mut self,
        size: u32,
        remote: RemoteAddr,
        mut ended: impl FnMut() -> Result<bool, ProtocolError>,
    ) -> Result<(), Error> {
        if !self.setup.is_received() {
            return Ok(());
        }
        loop {
            while let Some((at, immediate)) = self.unanswered.front().copied() {
                let connection = self.connections.get(at);
                let full = connection.is_none_or(|it| it.outstanding >= self.setup.depth);
                if full || self.free.is_empty() {
                    break;
                }
                self.unanswered.pop_front();
                self.begin(at, size, remote, immediate)?;
            }
            let idle = self.progress(TICK)? == 0;
            if idle && self.unanswered.is_empty() && self.outstanding == 0 && ended()? {
                return Ok(());
            }
        }
    }

    /// Receives the rest of `sent` messages of a phase and returns the number of
    /// those that arrived.
    pub fn drain(&mut self, sent: u64) -> Result<u64, Error> {
        if !self.setup.is_received() {
            return Ok(sent);
        }
        while self.received < sent {
            match self.setup.transport.is_lossy() {
                true if self.progress(QUIET)? == 0 => break,
                true => {}
                false => self.must_progress()?,
            }
        }
        Ok(self.received)
    }
}
