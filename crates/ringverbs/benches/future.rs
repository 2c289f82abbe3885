//! Cost of a future against the plain layer: 64-byte writes on the embedded
//! device, in one process and one run.
//!
//! `cargo bench -p ringverbs --bench future [ROUNDS]`. The rows alternate, and the fastest
//! round of each counts, because other programs only add time.
#![allow(missing_docs, reason = "a program")]

use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context as Task, Poll, Waker};
use std::time::Instant;

use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair, Operation};
use ringverbs::{
    AccessFlags, Buffer, CompletionQueue, Device, LocalAddress, ProtectionDomain, QueuePair,
    RemoteAddr, Transport,
};

const LENGTH: usize = 64;
const WRITES: usize = 2000;
const DEPTHS: [usize; 2] = [1, 16];

struct Setup {
    domain: ProtectionDomain,
    local: LocalAddress,
    key: RemoteAddr,
}

impl Setup {
    fn buffers(&self) -> Vec<Buffer> {
        let pages = self.domain.alloc(16 * LENGTH).expect("memory");
        pages.into_buffers(LENGTH).take(16).collect()
    }

    fn queue_pair<'q, Q>(&self, cq: &'q Q) -> QueuePair
    where
        ringverbs::CompletionQueueRef: From<&'q Q>,
    {
        let builder = self.domain.queue_pair(Transport::Reliable, cq);
        builder.build().expect("a queue pair")
    }

    fn connect(&self, a: &mut QueuePair, b: &mut QueuePair) {
        let (at_a, at_b) = (a.endpoint(&self.local), b.endpoint(&self.local));
        a.connect(&self.local, &at_b).expect("connected");
        b.connect(&self.local, &at_a).expect("connected");
    }
}

/// Posts and polls, `depth` at a time.
fn plain(setup: &Setup, qp: &mut QueuePair, cq: &mut CompletionQueue, depth: usize) {
    let mut free = setup.buffers();
    free.truncate(depth);
    let (mut posted, mut done) = (0, 0);
    while done < WRITES {
        while posted < WRITES {
            let Some(buffer) = free.pop() else { break };
            qp.write(buffer, setup.key, 0).expect("posted");
            posted += 1;
        }
        let mut completion = cq.poll_until_one().expect("completed");
        free.extend(completion.take_buffer());
        done += 1;
    }
}

/// The same with futures; awaits the oldest one.
async fn futures(setup: &Setup, qp: &AsyncQueuePair, depth: usize) {
    let mut free = setup.buffers();
    free.truncate(depth);
    let mut flying: VecDeque<Operation<Buffer>> = VecDeque::with_capacity(depth);
    let (mut posted, mut done) = (0, 0);
    while done < WRITES {
        while posted < WRITES {
            let Some(buffer) = free.pop() else { break };
            flying.push_back(qp.write(buffer, setup.key));
            posted += 1;
        }
        let Some(oldest) = flying.pop_front() else {
            return;
        };
        free.push(oldest.await.expect("completed"));
        done += 1;
    }
}

/// Polls repeatedly without sleeping, like the plain layer's loop.
fn spin<F: Future>(future: F) -> F::Output {
    let mut future: Pin<&mut F> = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Task::from_waker(Waker::noop())) {
            return output;
        }
        std::hint::spin_loop();
    }
}

fn main() {
    let rounds = std::env::args().filter_map(|argument| argument.parse().ok());
    let rounds: usize = { rounds }.next().unwrap_or(20);
    let device = Device::embedded().expect("the embedded device");
    let domain = device.open().expect("a context").alloc_pd();
    let domain = domain.expect("a protection domain");
    let region = domain.alloc_remote(4096, AccessFlags::REMOTE_WRITE);
    let region = region.expect("remote memory");
    let setup = Setup {
        local: domain.context().local_address(1).expect("an address"),
        key: region.key(),
        domain,
    };

    let cq = setup.domain.context().completion_queue().entries(64);
    let mut cq = cq.build().expect("a queue");
    let (mut a, mut b) = (setup.queue_pair(&cq), setup.queue_pair(&cq));
    setup.connect(&mut a, &mut b);

    let make = |cq: &AsyncCompletionQueue| {
        let (mut a, mut b) = (setup.queue_pair(cq), setup.queue_pair(cq));
        setup.connect(&mut a, &mut b);
        let make = |qp| AsyncQueuePair::new(qp, cq).expect("asynchronous");
        (make(a), make(b))
    };
    let queue = || setup.domain.context().completion_queue().entries(64);
    let undriven = AsyncCompletionQueue::polled(queue()).expect("a queue");
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().expect("a runtime");
    let spawned = runtime.block_on(async { AsyncCompletionQueue::spawn(queue()) });
    let spawned = spawned.expect("a queue");
    let (polled, _peer) = make(&undriven);
    let (driven, _peer) = make(&spawned);

    println!(
        "64-byte writes on the embedded device, ns each, the fastest of {rounds} rounds of {WRITES}"
    );
    for depth in DEPTHS {
        let mut best = [u128::MAX; 3];
        for _ in 0..rounds {
            let mut run = |row: usize, run: &mut dyn FnMut()| {
                let begin = Instant::now();
                run();
                let each = begin.elapsed().as_nanos() / WRITES as u128;
                best[row] = best[row].min(each);
            };
            run(0, &mut || plain(&setup, &mut a, &mut cq, depth));
            run(1, &mut || spin(futures(&setup, &polled, depth)));
            run(2, &mut || runtime.block_on(futures(&setup, &driven, depth)));
        }
        let [plain, polled, driven] = best;
        println!("{depth:2} in flight: plain {plain}, futures polled {polled}, on tokio {driven}");
    }
}
