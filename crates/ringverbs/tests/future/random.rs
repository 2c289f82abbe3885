//! Random sequences: whatever is dropped, forgotten or given up, each message
//! arrives once, in order, with its bytes.

use std::collections::VecDeque;
use std::task::Poll;
use std::time::{Duration, Instant};

use ringverbs::future::{AsyncQueuePair, Operation, Receive};
use ringverbs::{Buffer, WorkRequest};
use testing::{Rng, is_pattern, pattern, setting};

use crate::{Bench, poll_once};

const LEN: usize = 100;

/// One direction of a connection.
struct Direction {
    /// Messages posted, and received.
    sent: u64,
    received: u64,
    /// Of messages that futures wait for to be sent.
    sends: VecDeque<(u64, Operation<Buffer>)>,
    receives: VecDeque<Receive<Buffer>>,
    spare: Vec<Buffer>,
}

impl Direction {
    fn buffer(&mut self, bench: &Bench) -> Buffer {
        let mut buffer = self.spare.pop().unwrap_or_else(|| bench.buffer(LEN));
        buffer.fill_up();
        buffer
    }

    fn step(
        &mut self,
        bench: &Bench,
        (from, to): (&AsyncQueuePair, &AsyncQueuePair),
        random: &mut Rng,
    ) {
        match random.below(12) {
            0..=2 if self.sends.back().is_none_or(|(_, send)| send.is_posted()) => {
                let mut buffer = self.buffer(bench);
                pattern(self.sent, &mut buffer);
                let send = from.send(buffer);
                // One that is not posted must not be dropped: it would be missing.
                let posted = send.is_posted();
                match random.below(4) {
                    0 if posted => drop(send),
                    1 if posted && random.one_in(8) => std::mem::forget(send),
                    _ => self.sends.push_back((self.sent, send)),
                }
                self.sent += 1;
            }
            3 => {
                let mut buffer = self.buffer(bench);
                pattern(self.sent, &mut buffer);
                let ready = self.sends.back().is_none_or(|(_, send)| send.is_posted());
                if ready && from.post_unsignaled(WorkRequest::send(buffer)).is_ok() {
                    self.sent += 1;
                }
            }
            4..=6 => {
                let buffer = self.buffer(bench);
                let receive = to.receive(buffer);
                self.receives.push_back(receive);
            }
            7 => {
                let buffer = self.buffer(bench);
                let _ = to.post_receive(buffer);
                self.receives.push_back(to.message());
            }
            8 => {
                // Given up, perhaps with a message.
                let at = random.below(self.receives.len() + 1);
                drop(self.receives.remove(at));
            }
            9 => {
                if let Some((number, mut send)) = self.sends.pop_front() {
                    match poll_once(&mut send) {
                        Poll::Pending => self.sends.push_front((number, send)),
                        Poll::Ready(result) => {
                            let buffer = result.unwrap();
                            assert!(is_pattern(number, &buffer));
                            self.spare.push(buffer);
                        }
                    }
                }
            }
            _ => self.receive(),
        }
    }

    /// The oldest future gets the next message.
    fn receive(&mut self) {
        let Some(mut receive) = self.receives.pop_front() else {
            return;
        };
        match poll_once(&mut receive) {
            Poll::Pending => self.receives.push_front(receive),
            Poll::Ready(Ok(message)) => {
                assert!(
                    is_pattern(self.received, &message.data),
                    "{}",
                    self.received
                );
                self.received += 1;
                self.spare.push(message.data);
            }
            // The queue was full.
            Poll::Ready(Err(error)) => self.spare.extend(error.data),
        }
    }
}

#[test]
fn random_futures_lose_no_message() {
    let seconds = setting("RINGVERBS_FUTURES_SECONDS", 5);
    let mut seed = setting("RINGVERBS_FUTURES_SEED", 1);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut messages = 0;
    while Instant::now() < end {
        let mut random = Rng(seed);
        let bench = Bench::new();
        let cq = match random.below(2) {
            0 => bench.driven(),
            _ => bench.queue().0,
        };
        let (a, b) = bench.pair(&cq);
        let direction = || Direction {
            sent: 0,
            received: 0,
            sends: VecDeque::new(),
            receives: VecDeque::new(),
            spare: Vec::new(),
        };
        let mut directions = [direction(), direction()];
        for _ in 0..2000 {
            let which = random.below(2);
            let pair = if which == 0 { (&a, &b) } else { (&b, &a) };
            directions[which].step(&bench, pair, &mut random);
        }
        // Everything that was sent arrives.
        for (at, direction) in directions.iter_mut().enumerate() {
            let pair = if at == 0 { (&a, &b) } else { (&b, &a) };
            let end = Instant::now() + crate::LONG;
            while direction.received < direction.sent {
                assert!(
                    Instant::now() < end,
                    "seed {seed}: {} of {}",
                    direction.received,
                    direction.sent
                );
                if pair.1.in_flight().unwrap().1 == 0 {
                    pair.1.post_receive(bench.buffer(LEN)).unwrap();
                }
                if direction.receives.is_empty() {
                    direction.receives.push_back(pair.1.message());
                }
                direction.receive();
                if let Some((_, send)) = direction.sends.front_mut() {
                    if poll_once(send).is_ready() {
                        direction.sends.pop_front();
                    }
                }
            }
            messages += direction.received;
        }
        seed += 1;
    }
    assert!(messages > 0);
}
