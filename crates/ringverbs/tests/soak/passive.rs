//! The passive ends: they receive, are written, read and counted up, and check
//! what arrives; and now and then one dies.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use ringverbs::qp::State;
use ringverbs::{
    AccessFlags, Completion, Context, Endpoint, QueuePair, RemoteAddr, RemoteRegion,
    SharedReceiveQueue, Status, Transport,
};

use super::Counts;
use super::link_state::{CONSTANT, CONSTANT_NUMBER, LinkState, Order, REGION, SLOT, connect};
use super::pool::Pool;
use super::resources::ThreadResources;
use testing::{is_pattern, pattern};

/// Receives of a queue pair of its own, fewer than may be under way: peers run
/// into an empty queue.
const RECEIVES: u32 = 4;
/// Receives in the shared queue.
const SHARED: usize = 24;

struct End {
    qp: QueuePair,
    region: RemoteRegion,
    link_state: Arc<LinkState>,
    /// Receives in its own queue, by the numbers of their buffers.
    posted: HashSet<u32>,
    /// When it is to die of itself.
    dies: Instant,
    dying: bool,
}

pub struct Passive {
    ends: HashMap<usize, End>,
    orders: Receiver<Order>,
    shared_posted: HashSet<u32>,
    srq: SharedReceiveQueue,
    resources: ThreadResources,
}

impl Passive {
    pub fn new(context: Context, orders: Receiver<Order>, seed: u64) -> Self {
        let resources = ThreadResources::new(context, seed);
        let srq = resources.domain.shared_receive_queue();
        Self {
            ends: HashMap::new(),
            orders,
            shared_posted: HashSet::new(),
            srq: srq.depth(64).build().unwrap(),
            resources,
        }
    }

    /// Until all active threads are gone.
    pub fn run(mut self) -> Counts {
        loop {
            let order = if self.poll() {
                self.orders.try_recv()
            } else {
                let pause = self.orders.recv_timeout(Duration::from_micros(200));
                pause.map_err(|error| match error {
                    RecvTimeoutError::Timeout => TryRecvError::Empty,
                    RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
                })
            };
            match order {
                Ok(Order::Connect {
                    link,
                    shared,
                    link_state,
                    peer,
                    answer,
                }) => {
                    self.remove(link);
                    // Nobody waits for it any more if the other side is done.
                    let _ = answer.send(self.connect(link, shared, link_state, &peer));
                }
                Ok(Order::Gone { link, link_state }) => {
                    if self
                        .ends
                        .get(&link)
                        .is_some_and(|end| Arc::ptr_eq(&end.link_state, &link_state))
                    {
                        self.remove(link);
                    }
                }
                Err(TryRecvError::Empty) => {}
                Err(TryRecvError::Disconnected) => return self.end(),
            }
            self.fill_shared();
            self.kill_due();
        }
    }

    fn connect(
        &mut self,
        link: usize,
        shared: bool,
        link_state: Arc<LinkState>,
        peer: &Endpoint,
    ) -> (Endpoint, RemoteAddr) {
        let ThreadResources { domain, cq, .. } = &self.resources;
        let builder = domain.queue_pair(Transport::Reliable, cq);
        let builder = builder.recv_depth(RECEIVES);
        let mut qp = if shared {
            builder.srq(&self.srq).build().unwrap()
        } else {
            builder.build().unwrap()
        };
        let access =
            AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
        let region = self.resources.domain.alloc_remote(REGION, access).unwrap();
        let mut constant = vec![0; SLOT];
        pattern(CONSTANT_NUMBER, &mut constant);
        region.write_at(CONSTANT, &constant).unwrap();
        connect(&mut qp, &self.resources.local, peer);
        let told = (qp.endpoint(&self.resources.local), region.key());
        let lifetime = Duration::from_millis(300 + self.resources.numbers.below(5000) as u64);
        let mut end = End {
            qp,
            region,
            link_state,
            posted: HashSet::new(),
            dies: Instant::now() + lifetime,
            dying: false,
        };
        if !shared {
            for _ in 0..RECEIVES {
                end.receive(&mut self.resources.pool);
            }
        }
        self.ends.insert(link, end);
        told
    }

    fn fill_shared(&mut self) {
        while self.shared_posted.len() < SHARED {
            let (number, buffer) = self.resources.pool.take();
            self.srq.receive(buffer, number.into()).unwrap();
            self.shared_posted.insert(number);
        }
    }

    /// Reads completions. Returns whether there were any.
    fn poll(&mut self) -> bool {
        let mut completions: [Completion; 8] = Default::default();
        let count = self.resources.cq.poll(&mut completions).unwrap();
        for completion in completions.into_iter().take(count) {
            self.completed(completion);
        }
        count > 0
    }

    fn completed(&mut self, mut completion: Completion) {
        let number = completion.token as u32;
        let buffer = completion.take_buffer().unwrap();
        let end = self
            .ends
            .iter_mut()
            .find(|(_, end)| end.qp.qp_num() == completion.qp_num);
        let was_shared = self.shared_posted.remove(&number);
        let Some((link, end)) = end else {
            // The shared queue's outlive the queue pair that used them.
            assert!(was_shared, "of a queue pair that is gone: {completion:?}");
            self.resources.pool.put_back(number, buffer);
            return;
        };
        assert!(was_shared || end.posted.remove(&number), "{completion:?}");
        match completion.result {
            Ok(success) => {
                let message = end.link_state.take_next().expect("a message too many");
                assert_eq!(success.byte_len as usize, message.len, "{message:?}");
                assert_eq!(success.immediate(), Some(message.number as u32));
                assert_eq!(success.is_remote_write(), message.slot.is_some());
                let whole = match message.slot {
                    None => is_pattern(message.number, &buffer),
                    Some(slot) => {
                        let mut there = vec![0; message.len];
                        end.region.read_at(slot * SLOT, &mut there).unwrap();
                        is_pattern(message.number, &there)
                    }
                };
                assert!(whole, "the bytes of {message:?} are others");
                self.resources.counts.messages += 1;
            }
            Err(failure) => {
                if !end.dying {
                    // The requester's failure, which says why, comes meanwhile.
                    std::thread::sleep(Duration::from_secs(1));
                    panic!("receive of link {link} failed before the kill: {failure}");
                }
                assert_eq!(failure.status, Status::WR_FLUSH_ERR);
            }
        }
        self.resources.pool.put_back(number, buffer);
        if !was_shared && !end.dying {
            end.receive(&mut self.resources.pool);
        }
    }

    /// Those whose time has come.
    fn kill_due(&mut self) {
        let now = Instant::now();
        let due = self.ends.iter().filter(|(_, end)| end.dies <= now);
        for link in due.map(|(link, _)| *link).collect::<Vec<_>>() {
            let Some(end) = self.ends.get_mut(&link) else {
                continue;
            };
            end.link_state.kill();
            self.resources.counts.passive_kills += u64::from(!end.dying);
            if end.dying || !self.resources.numbers.one_in(3) {
                self.remove(link);
            } else {
                // In the error state for a while, its receives flushed.
                end.qp.set_error().unwrap();
                end.dying = true;
                end.dies = now + Duration::from_millis(self.resources.numbers.below(50) as u64);
            }
        }
    }

    /// Destroys an end, whatever it is doing.
    fn remove(&mut self, link: usize) {
        let Some(mut end) = self.ends.remove(&link) else {
            return;
        };
        end.link_state.kill();
        if self.resources.numbers.one_in(2) {
            drop(end.qp);
            end.posted
                .drain()
                .for_each(|number| self.resources.pool.released(number));
        } else {
            let released = end.qp.close_and_drain(&mut self.resources.cq, None);
            for released in released.unwrap_or_else(|error| panic!("{error}")) {
                let number = released.token as u32;
                assert!(end.posted.remove(&number), "{released:?}");
                let buffer = released.payload.into_buffer().unwrap();
                self.resources.pool.put_back(number, buffer);
            }
            assert!(end.posted.is_empty(), "did not come back: {:?}", end.posted);
        }
        end.region.close().unwrap();
    }

    fn end(mut self) -> Counts {
        for link in self.ends.keys().copied().collect::<Vec<_>>() {
            self.remove(link);
        }
        // The last of those that used shared receives.
        while self.poll() {}
        for released in self.srq.close().unwrap() {
            let number = released.token as u32;
            assert!(self.shared_posted.remove(&number), "{released:?}");
            self.resources
                .pool
                .put_back(number, released.payload.into_buffer().unwrap());
        }
        assert!(self.shared_posted.is_empty(), "{:?}", self.shared_posted);
        self.resources.close()
    }
}

impl End {
    fn receive(&mut self, pool: &mut Pool) {
        assert_ne!(self.qp.state(), State::ERR);
        let (number, buffer) = pool.take();
        self.qp.receive(buffer, number.into()).unwrap();
        self.posted.insert(number);
    }
}
