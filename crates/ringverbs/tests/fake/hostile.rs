//! Whatever a ConnectX writes into its completion queue, and in whatever order:
//! each completion gives a typed result, and none writes to the program's
//! memory, be it in flight, given back, or of a queue pair that is gone.

use proptest::prelude::*;
use ringverbs::{Buffer, Error, Inline, QueuePair, RemoteAddr, SharedReceiveQueue, WorkRequest};

use crate::connectx::{Queues, World};

/// What the program does, and the device.
#[derive(Clone, Debug)]
enum Step {
    Send(bool),
    Read,
    FetchAdd,
    Receive,
    SharedReceive,
    /// The device writes an entry, the next one or any other.
    Write(Entry),
    Poll,
    Cursor,
    Raw,
    /// The second queue pair goes, and another comes.
    Renew,
}

#[derive(Clone, Debug)]
struct Entry {
    bytes: Vec<u8>,
    /// The queue pair that it names; of neither, as in the bytes.
    of: usize,
    /// The slot that it names, or as in the bytes.
    slot: Option<u8>,
    /// Its opcode, format and owner bit; the owner bit may be wrong.
    kind: u8,
    in_turn: bool,
    elsewhere: Option<u8>,
}

fn entries() -> impl Strategy<Value = Entry> {
    // Those that mean something, and then anything.
    let opcode = prop_oneof![
        4 => prop_oneof![Just(0u8), Just(1), Just(2), Just(3), Just(4), Just(13), Just(14)],
        1 => any::<u8>(),
    ];
    (
        prop::collection::vec(any::<u8>(), 64),
        0..3usize,
        prop::option::weighted(0.9, 0..9u8),
        opcode,
        prop_oneof![3 => Just(0u8), 1 => Just(4), 1 => Just(8), 1 => 0..16u8],
        prop::bool::weighted(0.95),
        prop::option::weighted(0.05, any::<u8>()),
    )
        .prop_map(
            |(bytes, of, slot, opcode, bits, in_turn, elsewhere)| Entry {
                bytes,
                of,
                slot,
                kind: opcode << 4 | bits & 0xe,
                in_turn,
                elsewhere,
            },
        )
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        2 => any::<bool>().prop_map(Step::Send),
        1 => Just(Step::Read),
        1 => Just(Step::FetchAdd),
        2 => Just(Step::Receive),
        2 => Just(Step::SharedReceive),
        12 => entries().prop_map(Step::Write),
        3 => Just(Step::Poll),
        3 => Just(Step::Cursor),
        1 => Just(Step::Raw),
        1 => Just(Step::Renew),
    ];
    prop::collection::vec(step, 1..120)
}

const PIECE: usize = 64;
const PIECES: usize = 64;
const FILLED: u8 = 0xa5;

struct Program {
    world: World,
    srq: SharedReceiveQueue,
    /// One with receives of its own, one with shared ones.
    pairs: Vec<(QueuePair, Queues)>,
    free: Vec<Buffer>,
    /// Keeps the memory of all the others.
    _first: Buffer,
    /// Where it begins.
    memory: *const u8,
}

impl Program {
    fn new() -> Self {
        let world = World::new(15);
        let srq = world.domain.shared_receive_queue().depth(7);
        let srq = srq.build().unwrap();
        let whole = world.domain.alloc((PIECES + 1) * PIECE).unwrap();
        let mut first = whole.into_buffer();
        first.fill_up();
        first.fill(FILLED);
        let memory = first.as_ptr();
        let mut free = Vec::new();
        for at in (1..=PIECES).rev() {
            free.push(first.split_off(at * PIECE));
        }
        let pairs = vec![world.queue_pair(None), world.queue_pair(Some(&srq))];
        Self {
            world,
            srq,
            pairs,
            free,
            _first: first,
            memory,
        }
    }

    fn write(&mut self, entry: &Entry) {
        let mut bytes: [u8; 64] = entry.bytes[..].try_into().unwrap();
        if let Some((_, queues)) = self.pairs.get(entry.of) {
            bytes[32..36].copy_from_slice(&queues.user_index.to_be_bytes());
        }
        if let Some(slot) = entry.slot {
            bytes[60..62].copy_from_slice(&u16::from(slot).to_be_bytes());
        }
        bytes[63] = entry.kind | u8::from(!entry.in_turn);
        self.world.write(&bytes, entry.elsewhere.map(u32::from));
    }

    /// Takes back what a completion gives back.
    fn took(&mut self, buffers: Vec<Buffer>) {
        for mut buffer in buffers {
            assert!(buffer.len() <= buffer.capacity());
            buffer.set_len(PIECE).unwrap();
            self.free.push(buffer);
        }
    }

    fn step(&mut self, step: &Step) {
        let there = RemoteAddr::new(0x8000, 7);
        let pair = |this: &mut Self, first: bool| if first { 0 } else { this.pairs.len() - 1 };
        match step {
            Step::Send(first) => {
                let at = pair(self, *first);
                if let Some(buffer) = self.free.pop() {
                    if let Err(error) = self.pairs[at].0.send(buffer, 1) {
                        self.free.extend(error.data);
                    }
                }
            }
            Step::Read | Step::FetchAdd => {
                let Some(buffer) = self.free.pop() else {
                    return;
                };
                let request = match step {
                    Step::Read => WorkRequest::read(buffer, there),
                    _ => WorkRequest::fetch_add(buffer, there, 1),
                };
                if let Err(error) = self.pairs[0].0.post(request) {
                    self.free.extend(error.data);
                }
                let _ = self.pairs[0].0.send(Inline(b""), 2);
            }
            Step::Receive => {
                if let Some(buffer) = self.free.pop() {
                    if let Err(error) = self.pairs[0].0.receive(buffer, 3) {
                        self.free.extend(error.data);
                    }
                }
            }
            Step::SharedReceive => {
                if let Some(buffer) = self.free.pop() {
                    if let Err(error) = self.srq.receive(buffer, 4) {
                        self.free.extend(error.data);
                    }
                }
            }
            Step::Write(entry) => self.write(entry),
            Step::Poll => match self.world.cq.poll_one() {
                Ok(None) => {}
                Ok(Some(mut completion)) => {
                    let buffers = completion.take_buffers();
                    self.took(buffers);
                }
                Err(error) => expected(&error),
            },
            Step::Cursor => {
                let mut buffers = Vec::new();
                let mut cursor = self.world.cq.cursor();
                loop {
                    match cursor.next_entry() {
                        Ok(None) => break,
                        Ok(Some(mut entry)) => {
                            if let Ok(fields) = entry.result() {
                                let _ = (fields.byte_len(), fields.immediate());
                                let _ = (fields.invalidated(), fields.has_grh());
                                assert_eq!(fields.timestamp(), None);
                            }
                            buffers.extend(entry.take_payload().into_buffers());
                        }
                        Err(error) => expected(&error),
                    }
                }
                drop(cursor);
                self.took(buffers);
            }
            Step::Raw => {
                self.world.cq.poll_raw(4, |entry| {
                    let _ = (entry.status(), entry.byte_len(), entry.ex());
                });
            }
            Step::Renew => {
                self.pairs.pop();
                self.pairs.push(self.world.queue_pair(Some(&self.srq)));
            }
        }
    }

    /// Nobody has written to the memory, wherever its pieces are.
    fn check(&self) {
        for at in 0..(PIECES + 1) * PIECE {
            // SAFETY: the region is kept by its first piece; nobody writes there,
            // and there is no device.
            let byte = unsafe { self.memory.add(at).read_volatile() };
            assert_eq!(byte, FILLED, "byte {at} was written");
        }
    }
}

fn expected(error: &Error) {
    assert!(matches!(error, Error::Corruption { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn no_completion_writes_to_memory(steps in steps()) {
        let mut program = Program::new();
        for step in &steps {
            program.step(step);
            program.check();
        }
        program.pairs.clear();
        while !matches!(program.world.cq.poll_one(), Ok(None)) {}
        program.check();
    }
}
