//! Operations of one end of a reliable connection on the other, each done
//! once in the end, whatever happens to connections meanwhile.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::thread;
use std::time::{Duration, Instant};

use ringverbs::{AccessFlags, Buffer, Completion, Failure, RemoteAddr, RemoteRegion, WorkRequest};

use super::link::{DEPTH, End, RECEIVES, SIZE, connect};
use testing::{Rng, difference, is_pattern, pattern};

/// Operations of a turn.
const TURN: u64 = 40;
/// When packets of the turn before are no longer on the wire.
const REST: Duration = Duration::from_millis(50);
/// When nothing moves for so long, a connection is given up.
const PATIENCE: Duration = Duration::from_secs(15);
/// Places of the passive end's for writes with immediate data, and for writes
/// that are read back.
const SLOTS: usize = 32;
/// Where the bytes begin that are only read, behind all slots.
const CONSTANT: usize = 2 * SLOTS * SIZE;
/// What number they belong to.
const CONSTANT_NUMBER: u64 = u64::MAX;
/// Where the words for atomics begin.
const WORDS: usize = CONSTANT + SIZE;
/// Of operations that may be empty, one in so many is.
const EMPTY: usize = 10;

/// What is to be done.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Operations.
    pub count: u64,
    pub seed: u64,
    /// Some operations have no bytes.
    pub empty: bool,
    /// How often the passive end dies in the middle.
    pub deaths: u32,
    /// Of the device's, before it gives up.
    pub retries: u8,
    /// A byte of each write changes before it is read back.
    pub spoiled: bool,
}

/// What was done.
#[derive(Debug, Default)]
pub struct Report {
    /// By [`NAMES`].
    done: [u32; 6],
    pub connections: u32,
    /// First failures of a connection, by end and status.
    failures: BTreeMap<String, u32>,
    /// Operations that were flushed, or failed, and were posted again.
    again: u32,
    /// Messages that arrived again.
    repeated: u32,
    /// Atomics that were done, and whose old value nobody knows.
    unanswered: u32,
}

const NAMES: [&str; 6] = [
    "sends",
    "writes with immediate data",
    "writes",
    "reads",
    "fetch-adds",
    "compare-swaps",
];

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (count, name) in self.done.iter().zip(NAMES) {
            write!(f, "{count} {name}, ")?;
        }
        write!(f, "{} reconnects", self.connections - 1)?;
        for (failure, count) in &self.failures {
            write!(f, "; {count} times {failure}")?;
        }
        write!(
            f,
            "; posted again: {}, received again: {}, done without an answer: {}",
            self.again, self.repeated, self.unanswered
        )
    }
}

/// An operation.
#[derive(Clone, Copy, Debug)]
enum Operation {
    /// The message of this index.
    Message(usize),
    Write {
        slot: usize,
        number: u64,
        len: usize,
    },
    /// The bytes of a number, out of a slot that is free then, or the constant.
    Read {
        slot: Option<usize>,
        number: u64,
        len: usize,
    },
    Add(u64),
    /// Puts this into the word, or finds another value than it looks for.
    Swap(u64, bool),
}

/// One that is in flight, or was.
#[derive(Clone, Copy, Debug)]
struct Posted {
    token: u64,
    operation: Operation,
    /// What an atomic finds.
    old: u64,
}

/// What the passive end receives.
#[derive(Clone, Copy, Debug)]
struct Message {
    number: u64,
    len: usize,
    write: bool,
}

struct Work<'a> {
    a: &'a mut End,
    b: &'a mut End,
    plan: &'a Plan,
    /// The passive end's memory.
    region: RemoteRegion,
    /// The active end's buffers, and the passive end's that are not posted.
    free: Vec<Buffer>,
    receives: Vec<Buffer>,
    to_do: VecDeque<Operation>,
    in_flight: VecDeque<Posted>,
    /// Failed or flushed, in order.
    failed: VecDeque<Posted>,
    token: u64,
    /// All messages so far. Of them those that the passive end has received, those
    /// that were acknowledged, and which one comes next on this connection.
    messages: Vec<Message>,
    received: usize,
    acknowledged: usize,
    next: usize,
    slots: Vec<usize>,
    /// Written and not yet read back: slot, number, length.
    written: Vec<(usize, u64, usize)>,
    /// What the words for atomics have by now: added to, swapped.
    words: [u64; 2],
    deaths: u32,
    /// The passive end is in the error state, on purpose.
    given_up: bool,
    report: Report,
    numbers: Rng,
}

/// Operations of the first end on the second. Every one is checked by its
/// content, every buffer comes back.
pub fn operations(a: &mut End, b: &mut End, plan: &Plan) -> Report {
    let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
    let region = b.domain.alloc_remote(WORDS + 16, access).unwrap();
    let mut constant = vec![0; SIZE];
    pattern(CONSTANT_NUMBER, &mut constant);
    region.write_at(CONSTANT, &constant).unwrap();
    let mut work = Work {
        free: a.buffers(DEPTH),
        receives: b.buffers(RECEIVES),
        a,
        b,
        plan,
        region,
        to_do: VecDeque::new(),
        in_flight: VecDeque::new(),
        failed: VecDeque::new(),
        token: 0,
        messages: Vec::new(),
        received: 0,
        acknowledged: 0,
        next: 0,
        slots: (0..SLOTS).collect(),
        written: Vec::new(),
        words: [0; 2],
        deaths: 0,
        given_up: false,
        report: Report::default(),
        numbers: Rng(plan.seed),
    };
    work.connect();
    let mut number = 0;
    while number < plan.count {
        let end = (number + TURN).min(plan.count);
        let fetches = number / TURN % 2 == 1;
        for number in number..end {
            let operation = work.choose(number, fetches);
            work.to_do.push_back(operation);
        }
        number = end;
        work.turn();
    }
    work.finish()
}

fn post_receive(end: &mut End, mut buffer: Buffer) {
    buffer.fill_up();
    end.qp.receive(buffer, 0).unwrap();
}

impl Work<'_> {
    fn choose(&mut self, number: u64, fetch: bool) -> Operation {
        let len = match self.numbers.below(3) {
            _ if self.plan.empty && self.numbers.one_in(EMPTY) => 0,
            0 => 1 + self.numbers.below(64),
            _ => 1 + self.numbers.below(SIZE),
        };
        match (fetch, self.numbers.below(3)) {
            (false, 2) if !self.slots.is_empty() => {
                let slot = self.slots.pop().unwrap();
                Operation::Write { slot, number, len }
            }
            (false, kind) => {
                let write = kind == 1;
                self.messages.push(Message { number, len, write });
                Operation::Message(self.messages.len() - 1)
            }
            (true, 0) => match self.written.pop() {
                Some((slot, number, len)) => {
                    let slot = Some(slot);
                    Operation::Read { slot, number, len }
                }
                None => Operation::Read {
                    slot: None,
                    number: CONSTANT_NUMBER,
                    len,
                },
            },
            (true, 1) => Operation::Add(number + 1),
            // Every other one finds another value, and changes nothing.
            (true, _) => Operation::Swap(number + 1, self.numbers.one_in(2)),
        }
    }

    /// Does what is to be done, and waits until the wire is empty.
    fn turn(&mut self) {
        let mut moved = Instant::now();
        while !self.to_do.is_empty()
            || !self.in_flight.is_empty()
            || self.received < self.messages.len()
        {
            let mut idle = !self.post();
            if self.deaths < self.plan.deaths && !self.given_up && self.in_flight.len() == DEPTH {
                self.deaths += 1;
                self.given_up = true;
                self.b.qp.set_error().unwrap();
            }
            let before = (self.in_flight.len(), self.next);
            let mut failure = self.poll();
            idle &= before == (self.in_flight.len(), self.next);
            if !idle {
                moved = Instant::now();
            } else if moved.elapsed() > PATIENCE {
                failure = failure.or(Some("nothing moves".into()));
            } else {
                thread::sleep(Duration::from_micros(200));
            }
            if let Some(failure) = failure {
                *self.report.failures.entry(failure).or_default() += 1;
                self.reconnect();
                moved = Instant::now();
            }
        }
        thread::sleep(REST);
    }

    /// Posts the next operation, if there is one and it can be.
    fn post(&mut self) -> bool {
        let (Some(&operation), true) = (self.to_do.front(), self.in_flight.len() < DEPTH) else {
            return false;
        };
        let mut old = 0;
        let token = self.token;
        match operation {
            Operation::Message(index) => {
                // A slot is used again when what was in it has been seen.
                if index >= self.received + SLOTS / 2 {
                    return false;
                }
                let Message { number, len, write } = self.messages[index];
                let buffer = self.filled(number, len);
                let request = match write {
                    true => WorkRequest::write(buffer, self.at(index % SLOTS * SIZE)),
                    false => WorkRequest::send(buffer),
                };
                let request = request.immediate(index as u32).token(token);
                self.a.qp.post(request).unwrap();
            }
            Operation::Write { slot, number, len } => {
                let to = self.at((SLOTS + slot) * SIZE);
                let buffer = self.filled(number, len);
                self.a.qp.write(buffer, to, token).unwrap();
            }
            Operation::Read { slot, len, .. } => {
                let from = self.at(slot.map_or(CONSTANT, |slot| (SLOTS + slot) * SIZE));
                let buffer = self.empty(len);
                self.a.qp.read(buffer, from, token).unwrap();
            }
            Operation::Add(add) => {
                old = self.words[0];
                self.words[0] += add;
                let (buffer, to) = (self.empty(8), self.at(WORDS));
                let request = WorkRequest::fetch_add(buffer, to, add);
                self.a.qp.post(request.token(token)).unwrap();
            }
            Operation::Swap(new, hits) => {
                old = self.words[1];
                let compare = if hits { old } else { !old };
                if hits {
                    self.words[1] = new;
                }
                let (buffer, to) = (self.empty(8), self.at(WORDS + 8));
                let request = WorkRequest::compare_swap(buffer, to, compare, new);
                self.a.qp.post(request.token(token)).unwrap();
            }
        }
        self.token += 1;
        self.to_do.pop_front();
        self.in_flight.push_back(Posted {
            token,
            operation,
            old,
        });
        true
    }

    fn filled(&mut self, number: u64, len: usize) -> Buffer {
        let mut buffer = self.free.pop().unwrap();
        buffer.set_len(len).unwrap();
        pattern(number, &mut buffer);
        buffer
    }

    /// With bytes that are no answer.
    fn empty(&mut self, len: usize) -> Buffer {
        let mut buffer = self.free.pop().unwrap();
        buffer.set_len(len).unwrap();
        buffer.fill(0xa5);
        buffer
    }

    fn at(&self, offset: usize) -> RemoteAddr {
        self.region.key().offset(offset)
    }

    /// Reads what both ends have. Says what has failed, if something has.
    fn poll(&mut self) -> Option<String> {
        let mut failure = None;
        while let Some(mut completion) = self.b.cq.poll_one().unwrap() {
            let buffer = completion.take_buffer().unwrap();
            match completion.result {
                Ok(_) => {
                    self.arrived(&completion, buffer);
                }
                Err(Failure { status, .. }) => {
                    self.receives.push(buffer);
                    failure.get_or_insert(format!("{status:?} at the passive end"));
                }
            }
        }
        while let Some(mut completion) = self.a.cq.poll_one().unwrap() {
            let posted = self.in_flight.pop_front().expect("nothing is in flight");
            assert_eq!(completion.token, posted.token, "{completion:?}");
            let buffer = completion.take_buffer().unwrap();
            match completion.result {
                Ok(_) => self.done(posted, &buffer),
                Err(Failure { status, .. }) => {
                    self.failed.push_back(posted);
                    failure.get_or_insert(format!("{status:?} at the active end"));
                }
            }
            self.free.push(buffer);
        }
        failure
    }

    /// A message is there.
    fn arrived(&mut self, completion: &Completion, buffer: Buffer) {
        let success = completion.result.as_ref().unwrap();
        let index = success.immediate().expect("immediate data") as usize;
        // As it dies, rdma_rxe may go on with a message that it has finished:
        // into the next receive (`do_complete` in `rxe_resp.c`).
        let stutters = self.given_up && index + 1 == self.next;
        assert!(index == self.next || stutters, "{index}, not {}", self.next);
        let message = self.messages.get(index).copied();
        let message = message.unwrap_or_else(|| panic!("a message too many: {completion:?}"));
        let Message { number, len, write } = message;
        assert_eq!(success.byte_len as usize, len, "{message:?}");
        assert_eq!(success.is_remote_write(), write, "{message:?}");
        if write {
            let mut there = vec![0; len];
            self.region
                .read_at(index % SLOTS * SIZE, &mut there)
                .unwrap();
            let wrong = difference(number, &there);
            assert!(wrong == "none", "write of {message:?} is wrong {wrong}");
        } else {
            let wrong = difference(number, &buffer);
            assert!(wrong == "none", "send of {message:?} is wrong {wrong}");
        }
        self.next = index + 1;
        if index < self.received {
            self.report.repeated += 1;
        } else {
            self.received = self.next;
        }
        // What is posted to an end that is given up would not be flushed.
        if self.given_up {
            self.receives.push(buffer);
        } else {
            post_receive(self.b, buffer);
        }
    }

    /// An operation of the active end has succeeded.
    fn done(&mut self, posted: Posted, buffer: &Buffer) {
        let kind = match posted.operation {
            Operation::Message(index) => {
                self.acknowledged = self.acknowledged.max(index + 1);
                usize::from(self.messages[index].write)
            }
            Operation::Write { slot, number, len } => {
                self.written.push((slot, number, len));
                if self.plan.spoiled {
                    let (at, mut byte) = ((SLOTS + slot) * SIZE, [0]);
                    self.region.read_at(at, &mut byte).unwrap();
                    self.region.write_at(at, &[byte[0] ^ 1]).unwrap();
                }
                2
            }
            Operation::Read { slot, number, len } => {
                assert_eq!(buffer.len(), len);
                let wrong = difference(number, buffer);
                assert!(wrong == "none", "{posted:?} is wrong {wrong}");
                self.slots.extend(slot);
                3
            }
            Operation::Add(_) | Operation::Swap(..) => {
                assert_eq!(buffer[..], posted.old.to_ne_bytes(), "{posted:?}");
                match posted.operation {
                    Operation::Add(_) => 4,
                    _ => 5,
                }
            }
        };
        self.report.done[kind] += 1;
    }

    fn connect(&mut self) {
        connect(self.a, self.b, self.plan.retries);
        for buffer in self.receives.drain(..) {
            post_receive(self.b, buffer);
        }
        self.given_up = false;
        self.report.connections += 1;
    }

    /// Both ends give up what they have, everything comes back, and what was not
    /// done is done on a new connection.
    fn reconnect(&mut self) {
        assert!(self.report.connections < 100, "too many: {}", self.report);
        self.given_up = true;
        self.a.qp.set_error().unwrap();
        self.b.qp.set_error().unwrap();
        let patience = Instant::now() + Duration::from_secs(10);
        while !self.in_flight.is_empty() || self.receives.len() < RECEIVES {
            assert!(
                Instant::now() < patience,
                "never came back: {:?}, {} receives",
                self.in_flight,
                RECEIVES - self.receives.len()
            );
            self.poll();
            thread::sleep(Duration::from_micros(200));
        }
        assert_eq!(self.free.len(), DEPTH, "buffers are missing");
        assert!(self.received >= self.acknowledged, "a message was lost");
        let failed = std::mem::take(&mut self.failed);
        let again = self.settle(failed);
        self.report.again += again.len() as u32;
        for &operation in again.iter().rev() {
            self.to_do.push_front(operation);
        }
        // As the ends of an application tell each other when they connect.
        self.next = self
            .to_do
            .iter()
            .fold(self.messages.len(), |next, left| match left {
                Operation::Message(index) => next.min(*index),
                _ => next,
            });
        self.a.renew();
        self.b.renew();
        self.connect();
    }

    /// What of the failed operations is to be done again. Atomics that were
    /// done are not, as the words show, which are changed in order.
    fn settle(&mut self, failed: VecDeque<Posted>) -> Vec<Operation> {
        let now = [WORDS, WORDS + 8].map(|at| self.region.load_u64(at).unwrap());
        // What each word may have by now.
        let mut possible = [vec![], vec![]];
        let mut again = Vec::new();
        for Posted { operation, old, .. } in failed {
            let (word, new) = match operation {
                Operation::Add(add) => (0, old + add),
                Operation::Swap(new, true) => (1, new),
                _ => {
                    again.push(operation);
                    continue;
                }
            };
            possible[word].extend([old, new]);
            // Each new value is larger than all before.
            if now[word] >= new {
                self.report.unanswered += 1;
                self.report.done[4 + word] += 1;
            } else {
                again.push(operation);
            }
        }
        for (word, possible) in possible.iter().enumerate() {
            let right = match possible[..] {
                [] => now[word] == self.words[word],
                _ => possible.contains(&now[word]),
            };
            assert!(right, "word {word} has {}, not {possible:?}", now[word]);
        }
        self.words = now;
        again
    }

    fn finish(self) -> Report {
        for (slot, number, len) in self.written {
            let mut there = vec![0; len];
            let at = (SLOTS + slot) * SIZE;
            self.region.read_at(at, &mut there).unwrap();
            assert!(is_pattern(number, &there), "write {number}, {len} bytes");
        }
        let [added, swapped] = self.words;
        assert_eq!(self.region.load_u64(WORDS).unwrap(), added);
        assert_eq!(self.region.load_u64(WORDS + 8).unwrap(), swapped);
        assert_eq!(self.free.len(), DEPTH);
        let report = self.report;
        assert_eq!(
            u64::from(report.done.iter().sum::<u32>()),
            self.plan.count,
            "{report}"
        );
        assert!(
            self.plan.count < 100 || report.done.iter().all(|count| *count > 0),
            "{report}"
        );
        report
    }
}
