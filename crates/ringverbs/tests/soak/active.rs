//! The active ends: they send, write, read and count up, check what comes back,
//! and die, or find the other end dead; then they connect again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::qp::{self, QpAttr, QpAttrMask};
use ringverbs::{
    AccessFlags, Buffer, Completion, Context, Endpoint, Error, QueuePair, RemoteAddr, RemoteRegion,
    Status, Transport, WorkRequest,
};

use super::link_state::{
    CONSTANT, CONSTANT_NUMBER, LinkState, Message, Order, SLOT, SLOTS, WORDS, connect,
};
use super::pool::Pool;
use super::resources::ThreadResources;
use super::{Counts, is_rxe};
use testing::{Rng, is_pattern, pattern};

/// Operations that a queue holds.
const DEPTH: u32 = 32;
/// Of them, those of the longest unsignaled run, with the write and the read
/// at its ends.
const RUN: usize = 8;
/// Whose pattern is where an atomic's old value comes.
const PREFILL: u64 = 0;

/// What an operation is to show when it is done.
#[derive(Clone, Copy, Debug)]
enum Expected {
    Done,
    /// So many bytes of this number's pattern; a slot is free again.
    Bytes(u64, usize, Option<usize>),
    /// The old value of a word.
    Old(u64),
}

#[derive(Debug)]
struct Operation {
    token: u64,
    /// The buffer that it has; runs have a part of a region.
    buffer: Option<u32>,
    signaled: bool,
    expected: Expected,
}

/// One end, connected or not.
pub struct Link {
    number: usize,
    shared: bool,
    state: State,
}

enum State {
    Down,
    Connecting(Box<Call>),
    Up(Box<Connection>),
}

struct Call {
    qp: QueuePair,
    /// It had another connection, and was reset.
    was_reset: bool,
    link_state: Arc<LinkState>,
    answer: Receiver<(Endpoint, RemoteAddr)>,
}

struct Connection {
    qp: QueuePair,
    was_reset: bool,
    link_state: Arc<LinkState>,
    there: RemoteAddr,
    /// What unsignaled runs write.
    source: RemoteRegion,
    in_flight: VecDeque<Operation>,
    slots: Vec<usize>,
    messages: usize,
    token: u64,
    words: [u64; 2],
    /// When it is to die of itself.
    dies: Instant,
    /// In the error state; what is in flight is flushed.
    dying: bool,
    shared: bool,
}

pub struct Active {
    links: Vec<Link>,
    orders: Sender<Order>,
    resources: ThreadResources,
}

impl Active {
    /// With links of these numbers.
    pub fn new(
        context: Context,
        links: impl Iterator<Item = usize>,
        orders: Sender<Order>,
        seed: u64,
    ) -> Self {
        let links = links.map(|number| Link {
            number,
            shared: number % 2 == 1,
            state: State::Down,
        });
        Self {
            links: links.collect(),
            orders,
            resources: ThreadResources::new(context, seed),
        }
    }

    pub fn run(mut self, end: Instant) -> Counts {
        while Instant::now() < end {
            for at in 0..self.links.len() {
                self.step(at);
            }
            if !self.poll() {
                thread::sleep(Duration::from_micros(100));
            }
        }
        self.end()
    }

    /// A step of one link's.
    fn step(&mut self, at: usize) {
        let state = std::mem::replace(&mut self.links[at].state, State::Down);
        let state = match state {
            State::Down => {
                let ThreadResources { domain, cq, .. } = &self.resources;
                let builder = domain.queue_pair(Transport::Reliable, cq);
                let qp = builder.send_depth(DEPTH).recv_depth(1).build().unwrap();
                self.call(at, qp, false)
            }
            State::Connecting(mut call) => match call.answer.try_recv() {
                Ok((peer, there)) => {
                    connect(&mut call.qp, &self.resources.local, &peer);
                    self.resources.counts.lives += 1;
                    State::Up(Box::new(self.connection(at, *call, there)))
                }
                Err(TryRecvError::Empty) => State::Connecting(call),
                Err(TryRecvError::Disconnected) => panic!("the passive side is gone"),
            },
            State::Up(connection) => self.work(at, connection),
        };
        self.links[at].state = state;
    }

    fn call(&self, at: usize, qp: QueuePair, was_reset: bool) -> State {
        let (tell, answer) = channel();
        let link_state = Arc::new(LinkState::default());
        let order = Order::Connect {
            link: self.links[at].number,
            shared: self.links[at].shared,
            link_state: Arc::clone(&link_state),
            peer: qp.endpoint(&self.resources.local),
            answer: tell,
        };
        self.orders.send(order).expect("the passive side is gone");
        State::Connecting(Box::new(Call {
            qp,
            was_reset,
            link_state,
            answer,
        }))
    }

    fn connection(&mut self, at: usize, call: Call, there: RemoteAddr) -> Connection {
        let access = AccessFlags::LOCAL_WRITE;
        let source = self.resources.domain.alloc_remote(SLOT, access).unwrap();
        let mut bytes = vec![0; SLOT];
        pattern(CONSTANT_NUMBER, &mut bytes);
        source.write_at(0, &bytes).unwrap();
        let lifetime = Duration::from_millis(20 + self.resources.numbers.below(1500) as u64);
        Connection {
            qp: call.qp,
            was_reset: call.was_reset,
            link_state: call.link_state,
            there,
            source,
            in_flight: VecDeque::new(),
            slots: (0..SLOTS).collect(),
            messages: 0,
            token: 0,
            words: [0; 2],
            dies: Instant::now() + lifetime,
            dying: false,
            shared: self.links[at].shared,
        }
    }

    fn work(&mut self, at: usize, mut connection: Box<Connection>) -> State {
        if connection.dying {
            return if connection.in_flight.is_empty() {
                self.reconnect_or_close(at, connection)
            } else {
                State::Up(connection)
            };
        }
        if Instant::now() >= connection.dies {
            return self.kill(at, connection);
        }
        for _ in 0..4 {
            connection.post(&mut self.resources.numbers, &mut self.resources.pool);
        }
        State::Up(connection)
    }

    /// Dies in the middle of its work, in one of several ways.
    fn kill(&mut self, at: usize, mut connection: Box<Connection>) -> State {
        connection.link_state.kill();
        self.resources.counts.active_kills += 1;
        match self.resources.numbers.below(4) {
            // Dropped: what is in flight goes with it.
            0 => {
                for operation in connection.in_flight.drain(..) {
                    if let Some(number) = operation.buffer {
                        self.resources.pool.released(number);
                    }
                }
                drop(connection.qp);
                // The poller lets go of what it has met when it looks again.
                self.poll();
                self.gone(at, &connection.link_state);
                State::Down
            }
            // Closed: everything is given back at once.
            1 => {
                let released = connection.qp.close_and_drain(&mut self.resources.cq, None);
                let released = released.unwrap_or_else(|error| panic!("{error}"));
                for released in released {
                    let operation = next(&mut connection.in_flight, released.token);
                    let buffer = released.payload.into_buffer();
                    give_back(&mut self.resources.pool, &operation, buffer);
                }
                let left = connection.in_flight.iter().find(|left| left.signaled);
                assert!(left.is_none(), "did not come back: {left:?}");
                connection.source.close().unwrap();
                self.gone(at, &connection.link_state);
                State::Down
            }
            // A reset would lose what is in flight; then an error, below.
            2 => {
                if connection.qp.in_flight().0 > 0 {
                    let refused = connection.qp.modify(&reset(), QpAttrMask::STATE);
                    assert!(matches!(refused, Err(Error::Busy { .. })), "{refused:?}");
                }
                self.set_error(connection)
            }
            _ => self.set_error(connection),
        }
    }

    fn set_error(&mut self, mut connection: Box<Connection>) -> State {
        connection.qp.set_error().unwrap();
        connection.dying = true;
        State::Up(connection)
    }

    /// Everything has been flushed: a new life, of a new queue pair or of this.
    fn reconnect_or_close(&mut self, at: usize, connection: Box<Connection>) -> State {
        let Connection {
            mut qp,
            link_state,
            source,
            ..
        } = *connection;
        assert_eq!(qp.in_flight().0, 0);
        // Runs are brought to an end by what follows them.
        source.close().unwrap();
        self.gone(at, &link_state);
        if self.resources.numbers.one_in(2) {
            qp.close().unwrap();
            State::Down
        } else {
            qp.modify(&reset(), QpAttrMask::STATE).unwrap();
            self.resources.counts.resets += 1;
            self.call(at, qp, true)
        }
    }

    fn gone(&self, at: usize, link_state: &Arc<LinkState>) {
        let order = Order::Gone {
            link: self.links[at].number,
            link_state: Arc::clone(link_state),
        };
        self.orders.send(order).expect("the passive side is gone");
    }

    /// Reads completions. Returns whether there were any.
    fn poll(&mut self) -> bool {
        let mut completions: [Completion; 8] = Default::default();
        let count = self.resources.cq.poll(&mut completions).unwrap();
        for completion in completions.into_iter().take(count) {
            let links = self.links.iter_mut();
            let connection = links
                .filter_map(|link| match &mut link.state {
                    State::Up(connection) => Some(connection),
                    _ => None,
                })
                .find(|connection| connection.qp.qp_num() == completion.qp_num);
            let connection = connection
                .unwrap_or_else(|| panic!("of a queue pair that is gone: {completion:?}"));
            connection.completed(
                completion,
                &mut self.resources.pool,
                &mut self.resources.counts,
            );
        }
        count > 0
    }

    /// Those that are alive bring their work to an end, and all of it has to
    /// have arrived.
    fn end(mut self) -> Counts {
        let patience = Instant::now() + Duration::from_secs(60);
        loop {
            self.poll();
            let mut busy = Vec::new();
            for at in 0..self.links.len() {
                let link = &mut self.links[at];
                if let State::Up(connection) = &mut link.state {
                    let waits = !connection.dying
                        && !connection.link_state.is_killed()
                        && connection.link_state.in_flight_messages() > 0;
                    if waits || !connection.in_flight.is_empty() {
                        busy.push((link.number, connection.in_flight.len()));
                    } else {
                        connection.link_state.kill();
                    }
                }
            }
            if busy.is_empty() {
                break;
            }
            assert!(Instant::now() < patience, "never ends: {busy:?}");
            thread::sleep(Duration::from_micros(200));
        }
        for at in 0..self.links.len() {
            match std::mem::replace(&mut self.links[at].state, State::Down) {
                State::Down => {}
                State::Connecting(call) => {
                    self.gone(at, &call.link_state);
                    call.qp.close().unwrap();
                }
                State::Up(connection) => {
                    self.gone(at, &connection.link_state);
                    connection.qp.close().unwrap();
                    connection.source.close().unwrap();
                }
            }
        }
        self.resources.close()
    }
}

fn reset() -> QpAttr {
    QpAttr {
        qp_state: qp::State::RESET,
        ..QpAttr::default()
    }
}

/// The operation of that token. Unsignaled ones before it have been brought to
/// an end without a word.
fn next(in_flight: &mut VecDeque<Operation>, token: u64) -> Operation {
    loop {
        let operation = in_flight
            .pop_front()
            .unwrap_or_else(|| panic!("{token} is not in flight"));
        if operation.token == token {
            return operation;
        }
        assert!(!operation.signaled, "{operation:?} was passed over");
    }
}

fn give_back(pool: &mut Pool, operation: &Operation, buffer: Option<Buffer>) {
    match (operation.buffer, buffer) {
        (Some(number), Some(buffer)) => pool.put_back(number, buffer),
        (None, None) => {}
        (_, buffer) => panic!("{operation:?} came back with {buffer:?}"),
    }
}

impl Connection {
    fn started(&mut self, buffer: Option<u32>, signaled: bool, expected: Expected) {
        self.in_flight.push_back(Operation {
            token: self.token,
            buffer,
            signaled,
            expected,
        });
        self.token += 1;
    }

    fn post(&mut self, numbers: &mut Rng, pool: &mut Pool) {
        if self.qp.in_flight().0 as usize + RUN + 2 > DEPTH as usize {
            return;
        }
        let longest = if numbers.one_in(2) { 256 } else { SLOT };
        let len = numbers.below(longest + 1);
        let number = numbers.next();
        let at = |offset: usize| self.there.offset(offset);
        let may_send = self.link_state.in_flight_messages() < SLOTS / 2;
        match numbers.below(7) {
            0 if may_send => {
                // Of one packet, so that no receive of the shared queue goes
                // down half filled with a queue pair.
                let len = if self.shared { len.min(1000) } else { len };
                let (buffer, data) = filled(pool, number, len);
                self.messages += 1;
                let slot = None;
                self.link_state.push(Message { number, len, slot });
                let request = WorkRequest::send(data).immediate(number as u32);
                self.qp.post(request.token(self.token)).unwrap();
                self.started(Some(buffer), true, Expected::Done);
            }
            1 if may_send => {
                let slot = self.messages % SLOTS;
                let to = at(slot * SLOT);
                let (buffer, data) = filled(pool, number, len);
                self.messages += 1;
                let slot = Some(slot);
                self.link_state.push(Message { number, len, slot });
                let request = WorkRequest::write(data, to).immediate(number as u32);
                self.qp.post(request.token(self.token)).unwrap();
                self.started(Some(buffer), true, Expected::Done);
            }
            2 => {
                let Some(slot) = self.slots.pop() else { return };
                let to = at((SLOTS + slot) * SLOT);
                let (buffer, data) = filled(pool, number, len);
                self.qp.write(data, to, self.token).unwrap();
                self.started(Some(buffer), true, Expected::Done);
                self.read(pool, to, Expected::Bytes(number, len, Some(slot)), len);
            }
            3 => {
                let from = at(CONSTANT);
                self.read(pool, from, Expected::Bytes(CONSTANT_NUMBER, len, None), len);
            }
            4 => {
                let to = at(WORDS);
                let (buffer, old) = filled(pool, PREFILL, 8);
                let request = WorkRequest::fetch_add(old, to, number);
                self.qp.post(request.token(self.token)).unwrap();
                self.started(Some(buffer), true, Expected::Old(self.words[0]));
                self.words[0] = self.words[0].wrapping_add(number);
            }
            5 => {
                let (to, was) = (at(WORDS + 8), self.words[1]);
                let (buffer, old) = filled(pool, PREFILL, 8);
                // Every other one finds another value, and changes nothing.
                let compare = if number % 2 == 0 { was } else { !was };
                let request = WorkRequest::compare_swap(old, to, compare, number);
                self.qp.post(request.token(self.token)).unwrap();
                self.started(Some(buffer), true, Expected::Old(was));
                if compare == was {
                    self.words[1] = number;
                }
            }
            6 => {
                let Some(slot) = self.slots.pop() else { return };
                self.run(pool, numbers, (SLOTS + slot) * SLOT, len, slot);
            }
            _ => {}
        }
    }

    fn read(&mut self, pool: &mut Pool, from: RemoteAddr, expected: Expected, len: usize) {
        // Other bytes than are to come.
        let (buffer, data) = filled(pool, !self.token, len);
        self.qp.read(data, from, self.token).unwrap();
        self.started(Some(buffer), true, expected);
    }

    /// An unsignaled run: the constant, piece by piece, all rung for once, and
    /// then read back.
    fn run(&mut self, pool: &mut Pool, numbers: &mut Rng, to: usize, len: usize, slot: usize) {
        let pieces = 1 + numbers.below(RUN - 1);
        let piece = len.div_ceil(pieces).max(1);
        let mut sizes = Vec::new();
        let (source, token, there) = (&self.source, self.token, self.there);
        let posted = self.qp.batch(|batch| {
            for begin in (0..len).step_by(piece) {
                let end = (begin + piece).min(len);
                let data = source.slice(begin..end).unwrap();
                let to = there.offset(to + begin);
                let request = WorkRequest::write(data, to).unsignaled();
                let request = request.token(token + sizes.len() as u64);
                batch.post(request).unwrap();
                sizes.push(end - begin);
            }
            Ok::<_, Error>(())
        });
        posted.unwrap();
        for _ in sizes {
            self.started(None, false, Expected::Done);
        }
        let from = there.offset(to);
        let expected = Expected::Bytes(CONSTANT_NUMBER, len, Some(slot));
        self.read(pool, from, expected, len);
    }

    fn completed(&mut self, mut completion: Completion, pool: &mut Pool, counts: &mut Counts) {
        let operation = next(&mut self.in_flight, completion.token);
        let payload = std::mem::take(&mut completion.payload);
        let buffer = payload.into_buffer();
        match completion.result {
            Ok(_) => {
                counts.operations += 1;
                let bytes: &[u8] = buffer.as_deref().unwrap_or_default();
                match operation.expected {
                    Expected::Done => {}
                    Expected::Bytes(of, len, slot) => {
                        assert_eq!(bytes.len(), len);
                        assert!(is_pattern(of, bytes), "{operation:?} read other bytes");
                        self.slots.extend(slot);
                    }
                    Expected::Old(value) if *bytes == value.to_ne_bytes() => {}
                    // See Tally.
                    Expected::Old(_) => {
                        assert!(is_pattern(PREFILL, bytes), "{operation:?}: {bytes:?}");
                        counts.without_data += 1;
                    }
                }
            }
            Err(failure) => {
                if !self.link_state.is_killed() {
                    let late_error =
                        is_rxe() && self.was_reset && failure.status == Status::WR_FLUSH_ERR;
                    assert!(
                        late_error,
                        "{operation:?} failed before the kill (reset: {}): {failure}",
                        self.was_reset
                    );
                    self.link_state.kill();
                    counts.late_errors += 1;
                }
                counts.failures += 1;
                if !self.dying {
                    self.qp.set_error().unwrap();
                    self.dying = true;
                }
            }
        }
        give_back(pool, &operation, buffer);
    }
}

/// A buffer with a number's bytes.
fn filled(pool: &mut Pool, number: u64, len: usize) -> (u32, Buffer) {
    let (buffer, mut data) = pool.take();
    data.set_len(len).unwrap();
    pattern(number, &mut data);
    (buffer, data)
}
