//! Streams and futures.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use futures_core::Stream;
use ringverbs::completion::{
    CompletionStream, ContextEntry, ContextFormat, ReadError, Signaler, TokioReader, WaitObject,
};
use ringverbs::{Error, Inline, RemoteAddr, WorkRequest};

use crate::{Bench, LONG, woken};

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// The smallest executor that there is.
fn block_on<S: Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match Pin::new(&mut *stream).poll_next(&mut Context::from_waker(&waker)) {
            Poll::Ready(item) => return item,
            Poll::Pending => woken(|| std::thread::park_timeout(LONG)),
        }
    }
}

#[test]
fn completion_stream_on_any_executor() {
    let bench = Bench::new();
    let reader = bench.reader::<ContextFormat>(WaitObject::Condvar);
    let (mut a, mut b) = bench.pair(reader.queue(), reader.queue());
    let mut stream = CompletionStream::new(reader).unwrap();
    for token in 0..200 {
        b.receive(bench.buffer(8), token).unwrap();
        a.post(WorkRequest::send(Inline(b"x")).unsignaled())
            .unwrap();
        let entry = block_on(&mut stream).unwrap().unwrap();
        assert_eq!(entry.token, token);
    }
    a.write(Inline(b"x"), RemoteAddr::new(0, 1), 9).unwrap();
    assert_eq!(block_on(&mut stream).unwrap().unwrap_err().token, 9);
}

/// A task that signals the reader when its waker is dropped.
struct SignalOnDrop(Signaler);

impl Wake for SignalOnDrop {
    fn wake(self: Arc<Self>) {}
}

impl Drop for SignalOnDrop {
    fn drop(&mut self) {
        self.0.signal();
    }
}

/// No lock is held while a stream drops the waker of an earlier poll.
#[test]
fn completion_stream_drops_a_waker_that_signals_its_reader() {
    let bench = Bench::new();
    let reader = bench.reader::<ContextFormat>(WaitObject::Condvar);
    let signaler = reader.signaler();
    let (sender, polled) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut stream = CompletionStream::new(reader).unwrap();
        for _ in 0..3 {
            let waker = Waker::from(Arc::new(SignalOnDrop(signaler.clone())));
            let task = &mut Context::from_waker(&waker);
            assert!(Pin::new(&mut stream).poll_next(task).is_pending());
        }
        sender.send(()).unwrap();
    });
    polled.recv_timeout(LONG).unwrap();
}

#[test]
fn tokio_reader_and_a_cancelled_future() {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().unwrap();
    runtime.block_on(async {
        let bench = Bench::new();
        let reader = bench.reader::<ContextFormat>(WaitObject::Fd);
        let (mut a, mut b) = bench.pair(reader.queue(), reader.queue());
        let mut reader = TokioReader::new(reader).unwrap();
        let mut out: [ContextEntry; 4] = Default::default();
        b.receive(bench.buffer(8), 1000).unwrap();
        // Given up in the middle: the buffer stays in flight.
        let short = Duration::from_millis(20);
        assert!(
            tokio::time::timeout(short, reader.read(&mut out))
                .await
                .is_err()
        );
        assert_eq!(b.in_flight().1, 1);
        a.post(WorkRequest::send(Inline(b"late")).unsignaled())
            .unwrap();
        // Time that is up polls once more as well.
        let begin = Instant::now();
        let count = tokio::time::timeout(LONG, reader.read(&mut out)).await;
        assert!(begin.elapsed() < LONG / 4);
        assert_eq!(count.unwrap().unwrap(), 1);
        let buffer = std::mem::take(&mut out[0].payload).into_buffer().unwrap();
        assert_eq!(&buffer[..], b"late");
        for token in 0..500 {
            b.receive(bench.buffer(8), token).unwrap();
            let mut step = async || {
                a.post(WorkRequest::send(Inline(b"x")).unsignaled())
                    .unwrap();
                let next = poll_fn(|task| Pin::new(&mut reader).poll_next(task));
                tokio::time::timeout(LONG, next).await.unwrap()
            };
            let begin = Instant::now();
            assert_eq!(step().await.unwrap().unwrap().token, token);
            assert!(begin.elapsed() < LONG / 4, "at {token}");
        }
    });
}

/// The reader that a reader on tokio lends is replaced.
#[test]
fn replaced_tokio_reader_refuses_to_wait() {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().unwrap();
    runtime.block_on(async {
        let bench = Bench::new();
        let mut other = bench.reader::<ContextFormat>(WaitObject::Fd);
        let mut reader = TokioReader::new(bench.reader(WaitObject::Fd)).unwrap();
        std::mem::swap(reader.reader(), &mut other);
        let mut out = [ContextEntry::default()];
        let read = tokio::time::timeout(Duration::from_secs(10), reader.read(&mut out)).await;
        let read = read.expect("an error at once");
        assert!(
            matches!(read, Err(ReadError::Queue(Error::Invalid { .. }))),
            "{read:?}"
        );
    });
}
