//! On a real device, in a guest: `device --include-ignored --test-threads=1`, with the
//! device's name in `RXE_DEV`: rdma_rxe, or a ConnectX that softhca plays. As
//! `embedded`, and without that variable, it is a ConnectX in this process.

mod attacks;
mod events;
mod lifetimes;
mod memory;
mod operations;
mod queues;
mod times;
mod windows;

use std::process::Command;
use std::time::{Duration, Instant};

use embedded::Embedded;
use ringverbs::qp::QueuePairBuilder;
use ringverbs::{
    Buffer, Completion, CompletionQueue, Context, Device, Error, LocalAddress, ProtectionDomain,
    QueuePair, Transport,
};

/// The port that an embedded device has, if not Ethernet's.
const PORT: &str = "EMBEDDED_PORT";

/// The device under test.
pub(crate) fn context() -> Context {
    let device = match (std::env::var("RXE_DEV"), std::env::var(PORT)) {
        (Ok(name), _) => Device::named(&name).unwrap(),
        (Err(_), Ok(port)) => Device::from(Embedded::new(&port).unwrap()),
        (Err(_), Err(_)) => Device::embedded().unwrap(),
    };
    device.open().unwrap()
}

/// All of the below once more, where ports have LIDs.
#[test]
fn all_tests_on_infiniband() {
    if [PORT, "RXE_DEV"].iter().any(|it| std::env::var(it).is_ok()) {
        return;
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    let again = again.args(["--skip", "all_tests_on_infiniband"]);
    let ended = again.env(PORT, "ib").output().unwrap();
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{text}");
    assert!(!text.contains(" 0 passed"), "{text}");
}

/// What a device has; `None`, said aloud, if the crate says that it has not.
pub(crate) fn has<T>(result: Result<T, Error>) -> Option<T> {
    match result {
        Err(Error::Unsupported { what }) => {
            testing::skip!("the device lacks {what}");
            None
        }
        result => Some(result.unwrap()),
    }
}

/// Two queue pairs that are connected, on one completion queue.
pub(crate) struct Pair {
    pub(crate) a: QueuePair,
    pub(crate) b: QueuePair,
    pub(crate) cq: CompletionQueue,
    pub(crate) domain: ProtectionDomain,
    pub(crate) local: LocalAddress,
    pub(crate) context: Context,
}

impl Pair {
    pub(crate) fn new(transport: Transport) -> Self {
        Self::with_inline(transport, 64)
    }

    pub(crate) fn with_inline(transport: Transport, inline: u32) -> Self {
        Self::with(transport, |builder| match transport {
            Transport::Datagram => builder.inline(inline),
            _ => builder.inline(inline).memory_windows(),
        })
    }

    pub(crate) fn with(
        transport: Transport,
        describe: impl Fn(QueuePairBuilder) -> QueuePairBuilder,
    ) -> Self {
        let context = context();
        let domain = context.alloc_pd().unwrap();
        let cq = context.completion_queue().entries(256).build().unwrap();
        let make = || {
            let builder = domain.queue_pair(transport, &cq);
            describe(builder.send_pieces(4).recv_pieces(4))
                .build()
                .unwrap()
        };
        let (mut a, mut b) = (make(), make());
        let local = context.local_address(1).unwrap();
        if transport == Transport::Datagram {
            a.activate(&local, QKEY).unwrap();
            b.activate(&local, QKEY).unwrap();
        } else {
            let (at_a, at_b) = (a.endpoint(&local), b.endpoint(&local));
            a.connect(&local, &at_b).unwrap();
            b.connect(&local, &at_a).unwrap();
        }
        Self {
            a,
            b,
            cq,
            domain,
            local,
            context,
        }
    }

    pub(crate) fn buffer(&self, len: usize) -> Buffer {
        self.domain.alloc(len).unwrap().into_buffer()
    }

    pub(crate) fn filled(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self.buffer(bytes.len().max(1));
        buffer.copy_from(bytes).unwrap();
        buffer
    }

    /// The next `count` completions, by token.
    pub(crate) fn wait(&mut self, count: usize) -> Vec<Completion> {
        wait(&mut self.cq, count)
    }

    /// The completion of that token alone.
    pub(crate) fn wait_for(&mut self, token: u64) -> Completion {
        let mut all = self.wait(1);
        let completion = all.remove(0);
        assert_eq!(completion.token, token, "{completion:?}");
        completion
    }
}

pub(crate) const QKEY: u32 = 0x1111_1111;

/// The next `count` completions, by token.
pub(crate) fn wait(cq: &mut CompletionQueue, count: usize) -> Vec<Completion> {
    let end = Instant::now() + Duration::from_secs(20);
    let mut all = Vec::new();
    while all.len() < count {
        assert!(
            Instant::now() < end,
            "only {} of {count}: {all:?}",
            all.len()
        );
        all.extend(cq.poll_one().unwrap());
    }
    all.sort_by_key(|completion| completion.token);
    all
}

/// Nothing comes for a while.
pub(crate) fn nothing(cq: &mut CompletionQueue) {
    let end = Instant::now() + Duration::from_millis(100);
    while Instant::now() < end {
        assert!(cq.poll_one().unwrap().is_none());
    }
}
