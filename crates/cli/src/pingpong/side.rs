//! The sides of a ping-pong: queue pairs, buffers and message exchange.
//!
//! As in the C tools, a queue pair sends when its last send has completed and a reply has
//! arrived, until `iters` sends have completed; the side stops after `iters` sends and
//! receives. Both are counted over all queue pairs.

use std::time::{Duration, Instant};

use ringverbs::qp::{ReadyToReceive, ReadyToSend};
use ringverbs::{Buffer, Completion, Context, Gid, Operation, SharedReceiveQueue, Transport};

use super::destination::{Destination, SRQ_MESSAGES};
use super::error::PingPongError;
use super::options::{Options, PingPongType};
use crate::error::Error;
use crate::poller::Poller;
use crate::side::{AddressedQp, GRH, SidePort};

/// Time without completions after which the ping-pong fails.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of completions per poll.
const BATCH: usize = 16;
/// Page size of the C tools' check (`--chk`).
const PAGE: usize = 4096;

/// The role of a side. The client creates the messages, and the server sends each one
/// back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sends first.
    Client,
    /// Replies.
    Server,
}

/// A side with its queue pairs and buffers.
pub struct Side {
    options: Options,
    role: Role,
    local: SidePort,
    connections: Vec<Connection>,
    srq: Option<SharedReceiveQueue>,
    /// The client's message.
    pattern: Vec<u8>,
    sent: u32,
    received: u32,
}

/// A queue pair with its message.
struct Connection {
    addressed: AddressedQp,
    /// `None` while it is being sent.
    outgoing: Option<Buffer>,
    /// A received message that has no reply yet.
    received: Option<Buffer>,
    /// Whether the queue pair waits for a message.
    waiting: bool,
}

/// The result of a ping-pong.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// Time from the first send to the last completion.
    pub elapsed: Duration,
    /// Number of waits for a completion event.
    pub events: u64,
}

fn failed(step: &str) -> impl FnOnce(ringverbs::Error) -> Error {
    Error::verb(format!("ping-pong: {step}"))
}

/// Creates a completion queue for one side, or for both.
pub fn poller(context: &Context, options: Options, sides: u32) -> Result<Poller, Error> {
    let entries = options.rx_depth.saturating_add(options.queue_pairs);
    let poller = Poller::new(context, entries.saturating_mul(sides), options.events);
    poller.map_err(failed("completion queue"))
}

/// Exchanges messages until each side has sent and received enough. The sides, one or both,
/// complete in the poller's queue.
pub fn run(mut poller: Poller, sides: &mut [Side]) -> Result<Outcome, Error> {
    let start = Instant::now();
    for side in &mut *sides {
        side.start()?;
    }
    let mut completions: [Completion; BATCH] = std::array::from_fn(|_| Completion::default());
    while let Some(waiting) = sides.iter().find(|side| !side.is_done()) {
        let polled = poller.poll(&mut completions, TIMEOUT);
        let count = polled.map_err(failed("polling"))?;
        if count == 0 {
            return Err(waiting.timeout().into());
        }
        for completion in completions.iter_mut().take(count) {
            let qp_num = completion.qp_num;
            let owner = sides.iter_mut().find_map(|side| {
                let at = side.connection(qp_num)?;
                Some((side, at))
            });
            let (side, at) = owner.ok_or(PingPongError::UnknownQueuePair(qp_num))?;
            side.process_completion(at, completion)?;
        }
    }
    Ok(Outcome {
        elapsed: start.elapsed(),
        events: poller.events,
    })
}

impl Side {
    /// Creates all objects and posts the receives, because the other side may send as soon
    /// as it has the addresses.
    pub fn new(
        context: &Context,
        poller: &Poller,
        options: Options,
        role: Role,
    ) -> Result<Self, Error> {
        let port = (options.ib_port, options.gid_index);
        let local = SidePort::new(
            context,
            port,
            options.transport.qp_transport(),
            options.size,
        )?;
        let domain = &local.domain;
        let count = options.queue_pairs;
        let srq = (options.transport == PingPongType::Srq).then(|| {
            domain
                .shared_receive_queue()
                .depth(options.rx_depth)
                .build()
                .map_err(failed("shared receive queue"))
        });
        let srq = srq.transpose()?;

        let size = options.size as usize;
        let header = match options.transport {
            PingPongType::Ud => GRH,
            _ => 0,
        };
        let buffer_size = size + header;
        let buffers = (options.rx_depth as usize).saturating_add(count as usize);
        let region = domain.alloc(buffer_size.saturating_mul(buffers));
        let mut buffers = region.map_err(failed("memory"))?.into_buffers(buffer_size);
        let mut pattern = vec![0x7b; size];
        if options.check {
            fill_pattern(&mut pattern);
        }
        let mut side = Self {
            options,
            role,
            local,
            connections: Vec::new(),
            srq,
            pattern,
            sent: 0,
            received: 0,
        };
        for mut outgoing in buffers.by_ref().take(count as usize) {
            let copied = outgoing.copy_from(&side.pattern);
            copied.map_err(failed("memory"))?;
            let connection = side.create_connection(poller, outgoing)?;
            side.connections.push(connection);
        }
        for buffer in buffers.take(options.rx_depth as usize) {
            side.post_receive(0, buffer)?;
        }
        Ok(side)
    }

    /// Creates a queue pair in state INIT, or RTS for datagrams: receives can be posted.
    fn create_connection(&self, poller: &Poller, outgoing: Buffer) -> Result<Connection, Error> {
        let transport = self.options.transport.qp_transport();
        let builder = self.local.domain.queue_pair(transport, &poller.cq);
        let builder = builder.send_depth(1);
        let builder = match &self.srq {
            Some(srq) => builder.srq(srq),
            None => builder.recv_depth(self.options.rx_depth),
        };
        let addressed = AddressedQp::new(builder, &self.local.address);
        Ok(Connection {
            addressed: addressed.map_err(failed("queue pair"))?,
            outgoing: Some(outgoing),
            received: None,
            waiting: true,
        })
    }

    fn post_receive(&mut self, connection: usize, buffer: Buffer) -> Result<(), Error> {
        let posted = match (&mut self.srq, self.connections.get_mut(connection)) {
            (Some(srq), _) => srq.receive(buffer, 0),
            (None, Some(connection)) => connection.addressed.qp.receive(buffer, 0),
            (None, None) => Ok(()),
        };
        posted.map_err(|error| failed("posting a receive")(error.into_error()))
    }

    /// Returns the addresses to send to the other side; those without a queue pair are
    /// zero.
    pub fn destinations(&self) -> Vec<Destination> {
        let destination = |connection: &Connection| {
            let endpoint = connection.addressed.qp.endpoint(&self.local.address);
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
    pub fn in_use<'a>(&self, messages: &'a [Destination]) -> &'a [Destination] {
        messages.get(..self.connections.len()).unwrap_or(messages)
    }

    /// Connects the queue pairs to the other side's.
    pub fn connect(&mut self, theirs: &[Destination]) -> Result<(), Error> {
        let count = theirs.iter().filter(|at| at.qpn != 0).count();
        if count != self.connections.len() {
            return Err(PingPongError::QueuePairCount {
                ours: self.connections.len(),
                theirs: count,
            }
            .into());
        }
        let ours = self.destinations();
        let (local, options) = (&self.local, self.options);
        for ((connection, ours), theirs) in self.connections.iter_mut().zip(ours).zip(theirs) {
            if !theirs.has_gid() {
                return Err(PingPongError::NoGid.into());
            }
            let mut path = local.address.path_to(Gid(theirs.gid), theirs.lid);
            path.sl = options.sl;
            let (qpn, psn, mtu) = (theirs.qpn, theirs.psn, options.mtu);
            let addressed = &mut connection.addressed;
            let qp = &mut addressed.qp;
            let ready = match qp.transport() {
                Transport::Datagram => local
                    .domain
                    .address_handle(&path)
                    .map(|handle| addressed.set_destination(handle, qpn)),
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
            ready.map_err(failed("connecting to the other side's queue pair"))?;
        }
        Ok(())
    }

    /// Sends the client's first messages.
    fn start(&mut self) -> Result<(), Error> {
        if self.role == Role::Client {
            for connection in &mut self.connections {
                connection.send()?;
            }
        }
        Ok(())
    }

    fn is_done(&self) -> bool {
        self.sent >= self.options.iters && self.received >= self.options.iters
    }

    fn timeout(&self) -> PingPongError {
        PingPongError::Timeout {
            seconds: TIMEOUT.as_secs(),
            sent: self.sent,
            received: self.received,
            retransmits: self.options.transport.qp_transport() == Transport::Reliable,
        }
    }

    /// Returns the index of a queue pair of this side.
    fn connection(&self, qp_num: u32) -> Option<usize> {
        let has_number = |connection: &Connection| connection.addressed.qp.qp_num() == qp_num;
        self.connections.iter().position(has_number)
    }

    fn process_completion(&mut self, at: usize, completion: &mut Completion) -> Result<(), Error> {
        if let Err(failure) = completion.result {
            return Err(PingPongError::Failed {
                operation: completion.operation,
                status: failure.to_string(),
                sent: self.sent,
                received: self.received,
            }
            .into());
        }
        let Some(buffer) = completion.take_buffer() else {
            return Err(PingPongError::UnknownQueuePair(completion.qp_num).into());
        };
        let receive = completion.operation == Operation::Receive;
        if receive {
            self.received += 1;
            self.check(self.message(&buffer))?;
        } else {
            self.sent += 1;
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
                self.reply(at, received)?;
            }
        }
        let more = self.sent < self.options.iters;
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
            PingPongType::Ud => received.get(GRH..).unwrap_or_default(),
            _ => received,
        }
    }

    /// Checks the data of a message, with `--chk`.
    fn check(&self, message: &[u8]) -> Result<(), Error> {
        let pattern = &self.pattern;
        // The client's own messages come back to it. A server knows of a C client's
        // messages only that each page starts with a zero.
        let matches = match self.role {
            _ if !self.options.check => true,
            Role::Client => message == pattern.as_slice(),
            Role::Server => {
                message.len() == pattern.len()
                    && message.iter().step_by(PAGE).all(|byte| *byte == 0)
            }
        };
        match matches {
            true => Ok(()),
            false => Err(PingPongError::DataMismatch {
                message: self.received,
            }
            .into()),
        }
    }

    /// Prepares the reply to a received message: the server copies the message into the
    /// outgoing buffer, which is free. The received buffer is posted again.
    fn reply(&mut self, at: usize, received: Buffer) -> Result<(), Error> {
        if self.role == Role::Server {
            let message = self.message(&received);
            if let Some(outgoing) = self
                .connections
                .get_mut(at)
                .and_then(|connection| connection.outgoing.as_mut())
            {
                let length = message.len().min(outgoing.capacity());
                let copied = outgoing.copy_from(message.get(..length).unwrap_or_default());
                copied.map_err(failed("memory"))?;
            }
        }
        self.post_receive(at, received)
    }
}

impl Connection {
    fn send(&mut self) -> Result<(), Error> {
        let Some(buffer) = self.outgoing.take() else {
            return Ok(());
        };
        self.waiting = true;
        let posted = self.addressed.qp.post(self.addressed.send(buffer));
        posted.map_err(|error| failed("posting a send")(error.into_error()))
    }
}

/// Fills in a pattern that is zero at the start of each page, which the C tools check.
fn fill_pattern(pattern: &mut [u8]) {
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
    fn pattern_differs_by_page_and_has_the_zeros_of_the_c_tools() {
        let mut pattern = vec![0xff; 3 * PAGE + 5];
        fill_pattern(&mut pattern);
        assert!(pattern.iter().step_by(PAGE).all(|byte| *byte == 0));
        assert_ne!(pattern[1..PAGE], pattern[PAGE + 1..2 * PAGE]);
    }
}
