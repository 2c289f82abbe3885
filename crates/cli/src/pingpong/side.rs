//! One side of a ping-pong: its queue pairs, buffers and message exchange.
//!
//! The order is that of the C tools: a queue pair sends when its last send has
//! completed and an answer has arrived, until enough sends have completed; the
//! side stops when there are enough of both. The counts are the sums over all
//! queue pairs.

use std::time::{Duration, Instant};

use ringverbs::qp::{ReadyToReceive, ReadyToSend};
use ringverbs::{
    AddressHandle, Buffer, Completion, Context, Gid, LocalAddress, Operation, ProtectionDomain,
    QueuePair, SharedReceiveQueue, Transport, WorkRequest,
};

use super::error::PingPongError;
use super::options::{Options, Type};
use super::wire::{Destination, SRQ_MESSAGES};
use crate::error::Error;
use crate::poller::Poller;

/// Time without progress after which the other side is given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// Completions read at once.
const BATCH: usize = 16;
/// Page size that the C tools assume in their check.
const PAGE: usize = 4096;
/// Bytes of the global route header in front of a datagram.
const GRH: usize = 40;
/// The queue key of ibv_ud_pingpong.
const QKEY: u32 = 0x1111_1111;

/// Who sends first, and fills the messages. The other side sends back what it
/// receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sends first.
    Client,
    /// Answers.
    Server,
}

/// A side, before the other one is known.
pub struct Side {
    options: Options,
    local: LocalAddress,
    domain: ProtectionDomain,
    connections: Vec<Connection>,
    srq: Option<SharedReceiveQueue>,
    poller: Poller,
}

/// A queue pair with its message.
struct Connection {
    qp: QueuePair,
    /// `None` while it is being sent.
    outgoing: Option<Buffer>,
    /// A message that is not answered yet.
    received: Option<Buffer>,
    /// Whether it waits for an answer.
    waiting: bool,
    /// Destination of datagrams.
    path: Option<(AddressHandle, u32)>,
}

/// The result.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Time from the first send to the last completion.
    pub elapsed: Duration,
    /// Number of times that the side slept.
    pub events: u64,
}

/// Progress of the exchange.
struct Progress {
    iterations: u32,
    sent: u32,
    received: u32,
}

impl Progress {
    fn is_done(&self) -> bool {
        self.sent >= self.iterations && self.received >= self.iterations
    }
}

fn doing(what: &str) -> impl FnOnce(ringverbs::Error) -> Error {
    Error::native(format!("ping-pong: {what}"))
}

impl Side {
    /// Creates all objects and posts receives: the other side may send as soon as
    /// it knows the address.
    pub fn new(context: &Context, options: Options) -> Result<Self, Error> {
        let local = match options.gid_index {
            Some(index) => context.local_address_with(options.ib_port, index),
            None => context.local_address(options.ib_port),
        };
        let local = local.map_err(doing("the port's address"))?;
        let datagrams = options.transport == Type::Ud;
        let mtu = local.mtu.bytes();
        if datagrams && options.size > mtu {
            return Err(PingPongError::Datagram { mtu }.into());
        }
        let domain = context.alloc_pd().map_err(doing("protection domain"))?;
        let count = options.queue_pairs;
        let entries = options.rx_depth.saturating_add(count);
        let poller = Poller::new(context, entries, options.events);
        let poller = poller.map_err(doing("completion queue"))?;
        let srq = (options.transport == Type::Srq).then(|| {
            domain
                .shared_receive_queue()
                .depth(options.rx_depth)
                .build()
                .map_err(doing("shared receive queue"))
        });
        let srq = srq.transpose()?;

        let size = options.size as usize;
        let room = size + if datagrams { GRH } else { 0 };
        let buffers = (options.rx_depth as usize).saturating_add(count as usize);
        let region = domain.alloc(room.saturating_mul(buffers));
        let mut buffers = region.map_err(doing("memory"))?.into_buffers(room);
        let mut side = Self {
            options,
            local,
            domain,
            connections: Vec::new(),
            srq,
            poller,
        };
        for outgoing in buffers.by_ref().take(count as usize) {
            let connection = side.connection(outgoing)?;
            side.connections.push(connection);
        }
        for buffer in buffers.take(options.rx_depth as usize) {
            side.receive(0, buffer)?;
        }
        Ok(side)
    }

    /// Creates a queue pair in a state that accepts receives.
    fn connection(&self, outgoing: Buffer) -> Result<Connection, Error> {
        let transport = self.options.transport.native();
        let builder = self.domain.queue_pair(transport, &self.poller.cq);
        let builder = builder.send_depth(1);
        let builder = match &self.srq {
            Some(srq) => builder.srq(srq),
            None => builder.recv_depth(self.options.rx_depth),
        };
        let mut qp = builder.build().map_err(doing("queue pair"))?;
        let ready = match transport {
            Transport::Datagram => qp.activate(&self.local, QKEY),
            _ => qp.initialize(&self.local),
        };
        ready.map_err(doing("queue pair to INIT"))?;
        Ok(Connection {
            qp,
            outgoing: Some(outgoing),
            received: None,
            waiting: true,
            path: None,
        })
    }

    fn receive(&mut self, connection: usize, buffer: Buffer) -> Result<(), Error> {
        let posted = match (&mut self.srq, self.connections.get_mut(connection)) {
            (Some(srq), _) => srq.receive(buffer, 0),
            (None, Some(connection)) => connection.qp.receive(buffer, 0),
            (None, None) => Ok(()),
        };
        posted.map_err(|error| doing("posting a receive")(error.into_error()))
    }

    /// Returns this side's addresses, as many as are exchanged; those without a
    /// queue pair are zero.
    pub fn destinations(&self) -> Vec<Destination> {
        let destination = |connection: &Connection| {
            let endpoint = connection.qp.endpoint(&self.local);
            Destination {
                lid: endpoint.lid,
                qpn: endpoint.qp_num,
                psn: endpoint.psn,
                gid: endpoint.gid.0,
            }
        };
        let mut ours: Vec<_> = self.connections.iter().map(destination).collect();
        if self.srq.is_some() {
            ours.resize(SRQ_MESSAGES, Destination::default());
        }
        ours
    }

    /// Returns the addresses that belong to queue pairs.
    pub fn used<'a>(&self, messages: &'a [Destination]) -> &'a [Destination] {
        messages.get(..self.connections.len()).unwrap_or(messages)
    }

    /// Connects to the other side.
    pub fn connect(&mut self, theirs: &[Destination]) -> Result<(), Error> {
        let used = theirs.iter().filter(|at| at.qpn != 0).count();
        if used != self.connections.len() {
            return Err(PingPongError::QueuePairs {
                ours: self.connections.len(),
                theirs: used,
            }
            .into());
        }
        let ours = self.destinations();
        let (local, options, domain) = (self.local, self.options, self.domain.clone());
        for ((connection, ours), theirs) in self.connections.iter_mut().zip(ours).zip(theirs) {
            if !theirs.has_gid() {
                return Err(PingPongError::NoGid.into());
            }
            let mut path = local.path_to(Gid(theirs.gid), theirs.lid);
            path.sl = options.sl;
            let (qpn, psn, mtu) = (theirs.qpn, theirs.psn, options.mtu);
            let qp = &mut connection.qp;
            let ready = match qp.transport() {
                Transport::Datagram => domain
                    .address_handle(&path)
                    .map(|handle| connection.path = Some((handle, qpn))),
                Transport::Unreliable => qp
                    .transition(ReadyToReceive::unreliable(path, qpn, psn, mtu))
                    .and_then(|()| qp.transition(ReadyToSend::unreliable(ours.psn))),
                _ => {
                    let receive = ReadyToReceive::reliable(path, qpn, psn, mtu);
                    let send = ReadyToSend::reliable(ours.psn);
                    qp.transition(receive.max_dest_rd_atomic(1))
                        .and_then(|()| qp.transition(send.max_rd_atomic(1)))
                }
            };
            ready.map_err(doing("connecting to the other side's queue pair"))?;
        }
        Ok(())
    }

    /// Exchanges messages until there were enough in both directions.
    pub fn play(mut self, role: Role) -> Result<Outcome, Error> {
        let mut pattern = vec![0x7b; self.options.size as usize];
        if self.options.check {
            make_pattern(&mut pattern);
        }
        for connection in &mut self.connections {
            if let Some(outgoing) = &mut connection.outgoing {
                outgoing.copy_from(&pattern).map_err(doing("memory"))?;
            }
        }
        let mut progress = Progress {
            iterations: self.options.iters,
            sent: 0,
            received: 0,
        };
        let start = Instant::now();
        if role == Role::Client {
            for connection in &mut self.connections {
                connection.send()?;
            }
        }
        let mut completions: [Completion; BATCH] = std::array::from_fn(|_| Completion::default());
        while !progress.is_done() {
            let polled = self.poller.poll(&mut completions, PATIENCE);
            let count = polled.map_err(doing("polling"))?;
            if count == 0 {
                return Err(PingPongError::Silence {
                    seconds: PATIENCE.as_secs(),
                    sent: progress.sent,
                    received: progress.received,
                    repeats: self.options.transport.native() == Transport::Reliable,
                }
                .into());
            }
            for completion in completions.iter_mut().take(count) {
                self.completed(&mut progress, role, completion, &pattern)?;
            }
        }
        Ok(Outcome {
            elapsed: start.elapsed(),
            events: self.poller.events,
        })
    }

    fn completed(
        &mut self,
        progress: &mut Progress,
        role: Role,
        completion: &mut Completion,
        pattern: &[u8],
    ) -> Result<(), Error> {
        if let Err(failure) = completion.result {
            return Err(PingPongError::Failed {
                operation: completion.operation,
                status: failure.to_string(),
                sent: progress.sent,
                received: progress.received,
            }
            .into());
        }
        let qp_num = completion.qp_num;
        let of = |connection: &Connection| connection.qp.qp_num() == qp_num;
        let (Some(buffer), Some(at)) = (
            completion.take_buffer(),
            self.connections.iter().position(of),
        ) else {
            return Err(PingPongError::Stray(qp_num).into());
        };
        let receive = completion.operation == Operation::Receive;
        if receive {
            progress.received += 1;
            self.check(progress, role, self.message(&buffer), pattern)?;
        } else {
            progress.sent += 1;
        }
        let Some(connection) = self.connections.get_mut(at) else {
            return Ok(());
        };
        if receive {
            connection.waiting = false;
            connection.received = Some(buffer);
        } else {
            connection.outgoing = Some(buffer);
        }
        // A message may arrive before the last send has completed.
        if connection.outgoing.is_some() {
            if let Some(received) = connection.received.take() {
                self.answer(role, at, received)?;
            }
        }
        let more = progress.sent < progress.iterations;
        match self.connections.get_mut(at) {
            Some(connection) if more && !connection.waiting && connection.outgoing.is_some() => {
                connection.send()
            }
            _ => Ok(()),
        }
    }

    /// Returns the message in a received buffer.
    fn message<'a>(&self, received: &'a [u8]) -> &'a [u8] {
        match self.options.transport {
            Type::Ud => received.get(GRH..).unwrap_or_default(),
            _ => received,
        }
    }

    /// Checks, with `--chk`, whether a message is what was sent.
    fn check(
        &self,
        progress: &Progress,
        role: Role,
        message: &[u8],
        pattern: &[u8],
    ) -> Result<(), Error> {
        // Messages of a C client are zero at the start of each page; those of
        // this program, and those that come back to a client, are the pattern
        // everywhere.
        let right = match role {
            _ if !self.options.check => true,
            Role::Client => message == pattern,
            Role::Server => {
                message.len() == pattern.len()
                    && message.iter().step_by(PAGE).all(|byte| *byte == 0)
            }
        };
        match right {
            true => Ok(()),
            false => Err(PingPongError::Content {
                message: progress.received,
            }
            .into()),
        }
    }

    /// Answers a received message. The outgoing buffer is free: the server copies
    /// the message into it. The received buffer is posted again.
    fn answer(&mut self, role: Role, at: usize, received: Buffer) -> Result<(), Error> {
        if role == Role::Server {
            let message = self.message(&received);
            if let Some(outgoing) = self
                .connections
                .get_mut(at)
                .and_then(|connection| connection.outgoing.as_mut())
            {
                let length = message.len().min(outgoing.capacity());
                let copied = outgoing.copy_from(message.get(..length).unwrap_or_default());
                copied.map_err(doing("memory"))?;
            }
        }
        self.receive(at, received)
    }
}

impl Connection {
    fn send(&mut self) -> Result<(), Error> {
        let Some(buffer) = self.outgoing.take() else {
            return Ok(());
        };
        self.waiting = true;
        let posted = match &self.path {
            Some((handle, qpn)) => {
                let request = WorkRequest::send(buffer).to(handle, *qpn, QKEY);
                self.qp.post(request)
            }
            None => self.qp.send(buffer, 0),
        };
        posted.map_err(|error| doing("posting a send")(error.into_error()))
    }
}

/// Fills a recognisable pattern, which is zero where the C tools check.
fn make_pattern(pattern: &mut [u8]) {
    for (at, byte) in pattern.iter_mut().enumerate() {
        *byte = match at % PAGE {
            0 => 0,
            rest => (rest.wrapping_mul(31) ^ (at / PAGE)) as u8,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_differs_by_page_and_has_zeros_that_c_tools_expect() {
        let mut pattern = vec![0xff; 3 * PAGE + 5];
        make_pattern(&mut pattern);
        assert!(pattern.iter().step_by(PAGE).all(|byte| *byte == 0));
        assert_ne!(pattern[1..PAGE], pattern[PAGE + 1..2 * PAGE]);
    }

    #[test]
    fn done_needs_both_directions() {
        let progress = |sent, received| Progress {
            iterations: 3,
            sent,
            received,
        };
        assert!(!progress(3, 2).is_done() && !progress(2, 3).is_done());
        assert!(progress(3, 3).is_done() && progress(5, 4).is_done());
    }
}
