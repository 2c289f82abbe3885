//! What a completion queue must be able to do, row by row, on a device whose
//! name is in `RXE_DEV`: rdma_rxe in a guest, `completions --test-threads=1`.
//! Without the variable it is the ConnectX in this process. `WAITS` is how often
//! the wake-up stress waits.

mod asynchronous;
mod layers;
mod reading;
mod waiting;

use std::time::{Duration, Instant};

use ringverbs::completion::{CompletionReader, Format, ReadError, WaitObject};
use ringverbs::{
    Buffer, CompletionQueue, Context, Device, LocalAddress, ProtectionDomain, QueuePair, Transport,
};

pub(crate) const QKEY: u32 = 0x1111_1111;

/// How long a wait may take that something is to end.
pub(crate) const LONG: Duration = Duration::from_secs(120);

/// What `wait` gives, which has [`LONG`] and must not have needed it. A wait
/// whose time is up looks once more before it says so: the time that it took is
/// all that tells a wake-up which was lost from one that came.
pub(crate) fn woken<T>(wait: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = wait();
    let took = begin.elapsed();
    assert!(took < LONG / 4, "nothing woke this in {took:?}");
    result
}

pub(crate) fn context() -> Context {
    let name = std::env::var("RXE_DEV");
    let device = name.map_or_else(|_| Device::embedded(), |name| Device::named(&name));
    device.unwrap().open().unwrap()
}

/// A device with a domain.
pub(crate) struct Bench {
    pub(crate) context: Context,
    pub(crate) domain: ProtectionDomain,
    pub(crate) local: LocalAddress,
}

impl Bench {
    pub(crate) fn new() -> Self {
        let context = context();
        Self {
            domain: context.alloc_pd().unwrap(),
            local: context.local_address(1).unwrap(),
            context,
        }
    }

    pub(crate) fn reader<F: Format>(&self, object: WaitObject) -> CompletionReader<F> {
        let queue = self.context.completion_queue().entries(256).reader();
        queue.wait_object(object).build().unwrap()
    }

    /// Two connected queue pairs.
    pub(crate) fn pair(&self, a: &CompletionQueue, b: &CompletionQueue) -> (QueuePair, QueuePair) {
        let make = |cq| {
            let builder = self.domain.queue_pair(Transport::Reliable, cq);
            builder.inline(64).build().unwrap()
        };
        let (mut a, mut b) = (make(a), make(b));
        let (at_a, at_b) = (a.endpoint(&self.local), b.endpoint(&self.local));
        a.connect(&self.local, &at_b).unwrap();
        b.connect(&self.local, &at_a).unwrap();
        (a, b)
    }

    /// A queue pair of datagrams.
    pub(crate) fn datagram(&self, cq: &CompletionQueue) -> QueuePair {
        let builder = self.domain.queue_pair(Transport::Datagram, cq);
        let mut qp = builder.inline(64).build().unwrap();
        qp.activate(&self.local, QKEY).unwrap();
        qp
    }

    /// A buffer of that capacity: regions are whole pages.
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

/// The next entry, by reading again and again.
pub(crate) fn next<F: Format>(reader: &mut CompletionReader<F>) -> Result<F::Entry, ReadError> {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(entry) = reader.read_one()? {
            return Ok(entry);
        }
        assert!(Instant::now() < end, "no entry in 20 s");
    }
}

/// Nothing is to be read for a while.
pub(crate) fn nothing<F: Format>(reader: &mut CompletionReader<F>) {
    let end = Instant::now() + Duration::from_millis(50);
    while Instant::now() < end {
        assert!(reader.read_one().unwrap().is_none());
    }
}
