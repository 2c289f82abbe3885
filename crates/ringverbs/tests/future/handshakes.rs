//! Handshakes over streams of tokio.

use std::io::{Read, Write};
use std::time::Duration;

use ringverbs::future::{AsyncCompletionQueue, AsyncQueuePair};
use ringverbs::handshake::{self, HandshakeError, Hello, MAX_LENGTH};
use ringverbs::{AccessFlags, RemoteMemory};
use tokio::net::UnixStream;

use crate::{Bench, LONG, runtime};

#[test]
fn peers_connect_by_a_handshake() {
    runtime().block_on(async {
        let bench = Bench::new();
        let queue = bench.domain.context().completion_queue().entries(64);
        let cq = AsyncCompletionQueue::spawn(queue).unwrap();
        let region = bench.domain.alloc_remote(4096, AccessFlags::REMOTE_WRITE);
        let region = region.unwrap();
        let make = || AsyncQueuePair::new(bench.queue_pair(&cq), &cq).unwrap();
        let (a, b) = (make(), make());
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let server = async {
            b.initialize(&bench.local).unwrap();
            let receive = b.receive(bench.buffer(8));
            let ours = Hello {
                regions: vec![region.remote()],
                data: b"server".to_vec(),
                ..Hello::default()
            };
            let peer = handshake::connect(&b, &bench.local, &mut there, ours).await;
            assert_eq!(peer.unwrap().data, b"client");
            assert_eq!(&receive.await.unwrap().data[..], b"first");
        };
        let client = async {
            let ours = Hello {
                data: b"client".to_vec(),
                ..Hello::default()
            };
            let peer = handshake::connect(&a, &bench.local, &mut here, ours).await;
            let peer = peer.unwrap();
            assert_eq!(peer.data, b"server");
            let memory: RemoteMemory = peer.regions[0];
            let text = memory.to_string();
            assert_eq!(text.parse::<RemoteMemory>().unwrap(), memory);
            let to = memory.at(8, 5).unwrap();
            a.write(bench.filled(b"there"), to).await.unwrap();
            a.send(bench.filled(b"first")).await.unwrap();
        };
        tokio::join!(server, client);
        let mut bytes = [0; 5];
        region.read_at(8, &mut bytes).unwrap();
        assert_eq!(&bytes, b"there");
    });
}

/// Both sides send the longest message at once, over a stream that buffers less,
/// and read no byte that comes after it.
#[test]
fn the_longest_messages_cross() {
    runtime().block_on(async {
        let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
        for stream in [&here, &there] {
            nix::sys::socket::setsockopt(stream, nix::sys::socket::sockopt::SndBuf, &4096).unwrap();
            stream.set_nonblocking(true).unwrap();
        }
        let mut here = UnixStream::from_std(here).unwrap();
        let mut there = UnixStream::from_std(there).unwrap();
        let ours = Hello {
            data: vec![7; MAX_LENGTH - 20],
            ..Hello::default()
        };
        let small = Hello::default();
        for (a, b) in [(&ours, &ours), (&ours, &small), (&small, &small)] {
            let both = async {
                tokio::join!(
                    handshake::exchange(&mut here, a),
                    handshake::exchange(&mut there, b)
                )
            };
            let (at_a, at_b) = tokio::time::timeout(LONG, both).await.unwrap();
            assert_eq!((&at_a.unwrap(), &at_b.unwrap()), (b, a));
        }
    });
}

#[test]
fn a_hostile_peer_is_an_error() {
    runtime().block_on(async {
        let mut header = Hello::default().encode().unwrap();
        let empty = header.clone();
        header[8..].fill(0xff);
        let long = [&empty[..19], &[1]].concat();
        type Check = fn(&HandshakeError) -> bool;
        let cases: [(&[u8], Check); 5] = [
            (b"GET / HT", |error| {
                matches!(error, HandshakeError::Protocol)
            }),
            (b"RVHELLO\x02", |error| {
                matches!(error, HandshakeError::Version(2))
            }),
            (&header, |error| matches!(error, HandshakeError::TooLong)),
            (&empty[..19], |error| {
                matches!(error, HandshakeError::Stream(_))
            }),
            (&long, |error| matches!(error, HandshakeError::TooLong)),
        ];
        for (bytes, check) in cases {
            let (here, mut there) = std::os::unix::net::UnixStream::pair().unwrap();
            here.set_nonblocking(true).unwrap();
            let mut here = UnixStream::from_std(here).unwrap();
            there.write_all(bytes).unwrap();
            there.shutdown(std::net::Shutdown::Write).unwrap();
            let ours = Hello::default();
            let exchange = handshake::exchange(&mut here, &ours);
            let error = tokio::time::timeout(LONG, exchange).await.unwrap();
            let error = error.unwrap_err();
            assert!(check(&error), "{bytes:?}: {error}");
            drop(here);
            let mut rest = Vec::new();
            let _ = there.read_to_end(&mut rest);
        }
        // One that says nothing: the timeout is the caller's.
        let (mut here, _there) = UnixStream::pair().unwrap();
        let ours = Hello::default();
        let exchange = handshake::exchange(&mut here, &ours);
        let short = Duration::from_millis(20);
        assert!(tokio::time::timeout(short, exchange).await.is_err());
    });
}
