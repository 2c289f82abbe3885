//! Futures of operations, on the device that `RXE_DEV` names, or on the embedded
//! one: what they return, and what happens when they are dropped, forgotten, moved
//! or polled by several threads, outlive their queue pair or their runtime.

#![forbid(unsafe_code)]

mod connections;
mod ends;
mod handshakes;
mod operations;
mod pool;
mod random;
mod receives;
mod shared_receives;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context as Task, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair, Driver};
use ringverbs::{Buffer, Context, Device, LocalAddress, ProtectionDomain, QueuePair, Transport};

/// How long a wait may take that something is to end.
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) struct Bench {
    pub(crate) domain: ProtectionDomain,
    pub(crate) local: LocalAddress,
}

/// What is connected to what.
pub(crate) type Pair = (AsyncQueuePair, AsyncQueuePair);

impl Bench {
    pub(crate) fn new() -> Self {
        let name = std::env::var("RXE_DEV");
        let device = name.map_or_else(|_| Device::embedded(), |name| Device::named(&name));
        Self::on(&device.unwrap().open().unwrap())
    }

    pub(crate) fn on(context: &Context) -> Self {
        Self {
            domain: context.alloc_pd().unwrap(),
            local: context.local_address(1).unwrap(),
        }
    }

    pub(crate) fn queue(&self) -> (AsyncCompletionQueue, Driver) {
        let queue = self.domain.context().completion_queue().entries(512);
        AsyncCompletionQueue::new(queue).unwrap()
    }

    /// A queue whose driver is a thread.
    pub(crate) fn driven(&self) -> AsyncCompletionQueue {
        let (cq, driver) = self.queue();
        std::thread::spawn(move || driver.run_blocking().unwrap());
        self.until_driven(&cq);
        cq
    }

    /// Waits until the driver runs: then a task that waits is not woken at once.
    pub(crate) fn until_driven(&self, cq: &AsyncCompletionQueue) {
        let probe = AsyncQueuePair::new(self.queue_pair(cq), cq).unwrap();
        until(|| {
            let woken = Arc::new(Woken::default());
            let waker = Waker::from(Arc::clone(&woken));
            let mut message = probe.message::<Buffer>();
            let polled = Pin::new(&mut message).poll(&mut Task::from_waker(&waker));
            assert!(polled.is_pending());
            woken.count() == 0
        });
    }

    pub(crate) fn queue_pair(&self, cq: &AsyncCompletionQueue) -> QueuePair {
        let builder = self.domain.queue_pair(Transport::Reliable, cq);
        let builder = builder.inline(64).send_depth(16).recv_depth(16);
        builder.memory_windows().build().unwrap()
    }

    /// Two connected queue pairs.
    pub(crate) fn pair(&self, cq: &AsyncCompletionQueue) -> Pair {
        let make = || AsyncQueuePair::new(self.queue_pair(cq), cq).unwrap();
        let (a, b) = (make(), make());
        let (at_a, at_b) = (a.endpoint(&self.local), b.endpoint(&self.local));
        a.connect(&self.local, &at_b.unwrap()).unwrap();
        b.connect(&self.local, &at_a.unwrap()).unwrap();
        (a, b)
    }

    pub(crate) fn buffer(&self, len: usize) -> Buffer {
        let mut pages = self.domain.alloc(len).unwrap().into_buffer();
        pages.split_to(len)
    }

    pub(crate) fn filled(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self.buffer(bytes.len().max(1));
        buffer.copy_from(bytes).unwrap();
        buffer
    }
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A task that counts how often it was woken.
#[derive(Default)]
pub(crate) struct Woken(AtomicUsize);

impl Woken {
    pub(crate) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The smallest executor that there is. It fails if nothing wakes it.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Task::from_waker(&waker)) {
            return output;
        }
        let begin = Instant::now();
        std::thread::park_timeout(LONG);
        assert!(begin.elapsed() < LONG, "nothing woke this");
    }
}

/// Polls once, with a waker that does nothing.
pub(crate) fn poll_once<F: Future + Unpin>(future: &mut F) -> Poll<F::Output> {
    Pin::new(future).poll(&mut Task::from_waker(Waker::noop()))
}

/// Waits until something is so.
pub(crate) fn until(mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < end, "it never was");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_current_thread();
    { runtime }.enable_all().build().unwrap()
}
