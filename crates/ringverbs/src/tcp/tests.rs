use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use super::*;
use crate::Gid;

const LONG: Duration = Duration::from_secs(60);

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (ours, listener.accept().unwrap().0)
}

fn endpoint(qp_num: u32) -> Endpoint {
    Endpoint {
        qp_num,
        psn: 0xab_cdef,
        lid: 0,
        mtu: crate::qp::Mtu::Bytes4096,
        gid: Gid([0xfe; 16]),
    }
}

fn line(of: &Endpoint) -> Vec<u8> {
    [GREETING, of.to_string().as_bytes(), b"\n"].concat()
}

/// The result of [`exchange`] with a peer that sends `bytes` and then waits.
fn exchange_with(bytes: &[u8], timeout: Duration) -> Result<Endpoint, ExchangeError> {
    let (ours, mut peer) = pair();
    peer.write_all(bytes).unwrap();
    exchange(&ours, &endpoint(1), timeout)
}

#[test]
fn exchange_leaves_the_stream_usable() {
    for (blocking, peers) in [(true, true), (false, true), (false, false)] {
        let (ours, mut peer) = pair();
        ours.set_nonblocking(!blocking).unwrap();
        peer.set_nonblocking(!peers).unwrap();
        let other = thread::spawn(move || {
            let theirs = exchange(&peer, &endpoint(0xff_ffff), LONG).unwrap();
            peer.set_nonblocking(false).unwrap();
            peer.write_all(b"more").unwrap();
            barrier(&peer, LONG).unwrap();
            theirs
        });
        assert_eq!(
            exchange(&ours, &endpoint(7), LONG).unwrap(),
            endpoint(0xff_ffff)
        );
        ours.set_nonblocking(false).unwrap();
        let mut more = [0; 4];
        (&ours).read_exact(&mut more).unwrap();
        assert_eq!(&more, b"more");
        barrier(&ours, LONG).unwrap();
        assert_eq!(other.join().unwrap(), endpoint(7));
    }
}

#[test]
fn line_has_the_fixed_length() {
    assert_eq!(line(&endpoint(0)).len(), LINE);
    assert_eq!(line(&endpoint(0xff_ffff)).len(), LINE);
}

/// An invalid prefix is refused without waiting for the rest of the line.
#[test]
fn foreign_protocol_is_refused_at_once() {
    let error = exchange_with(b"GET / HTTP/1.1\r\n", LONG).unwrap_err();
    let ExchangeError::Malformed { got, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(got, b"GET / HTTP/1.1\r\n");
    assert!(
        error.to_string().contains("GET / HTTP/1.1\\r\\n"),
        "{error}"
    );
    // A later version of the format, and control characters of a terminal.
    assert!(matches!(
        exchange_with(b"ringverbs 2 ", LONG),
        Err(ExchangeError::Malformed { .. })
    ));
    let error = exchange_with(&[0x1b; 4096], LONG).unwrap_err().to_string();
    assert!(error.len() < 300 && !error.contains('\x1b'), "{error}");
}

#[test]
fn invalid_endpoint_is_refused() {
    let good = line(&endpoint(7));
    assert_eq!(exchange_with(&good, LONG).unwrap(), endpoint(7));
    let begin = GREETING.len();
    // Each byte in turn is invalid.
    for at in begin..LINE {
        for byte in [b'g', b' ', b'+', b'\n', b':', 0, 0xff, b'A'] {
            if good[at] == byte {
                continue;
            }
            let mut bad = good.clone();
            bad[at] = byte;
            assert!(
                matches!(
                    exchange_with(&bad, LONG),
                    Err(ExchangeError::Malformed { .. })
                ),
                "{}",
                bad.escape_ascii()
            );
        }
    }
    // MTU codes from 1 to 5.
    let mtu = begin + 6 + 1 + 6 + 1 + 4 + 1;
    for code in [b'0', b'6', b'9', b'f'] {
        let mut bad = good.clone();
        bad[mtu] = code;
        assert!(matches!(
            exchange_with(&bad, LONG),
            Err(ExchangeError::Malformed { .. })
        ));
    }
}

#[test]
fn silent_peer_times_out() {
    for said in [&b""[..], b"ring", &line(&endpoint(7))[..LINE - 1]] {
        let begin = Instant::now();
        let error = exchange_with(said, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, ExchangeError::Timeout { .. }), "{error}");
        assert!(begin.elapsed() >= Duration::from_millis(50));
        assert!(error.to_string().contains("50 ms"), "{error}");
    }
    assert!(matches!(
        exchange_with(&line(&endpoint(7)), Duration::ZERO),
        Err(ExchangeError::Timeout { .. })
    ));
}

/// The timeout covers the whole message, not each byte.
#[test]
fn slow_peer_times_out() {
    let (ours, mut peer) = pair();
    let dripping = thread::spawn(move || {
        // Much more time than the message may take, but less than the test may
        // take.
        for byte in line(&endpoint(7)).into_iter().cycle().take(60 * LINE) {
            if peer.write_all(&[byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
        panic!("the exchange did not time out");
    });
    let error = exchange(&ours, &endpoint(1), Duration::from_millis(100)).unwrap_err();
    assert!(matches!(error, ExchangeError::Timeout { .. }), "{error}");
    drop(ours);
    dripping.join().unwrap();
}

#[test]
fn disconnected_peer_is_reported() {
    for said in [0, 1, LINE - 1] {
        let (ours, mut peer) = pair();
        peer.write_all(&line(&endpoint(7))[..said]).unwrap();
        drop(peer);
        let error = exchange(&ours, &endpoint(1), LONG).unwrap_err();
        assert!(matches!(error, ExchangeError::Closed { .. }), "{error}");
    }
}

/// The wait for a peer that does not read is limited, even with a blocking stream.
#[test]
fn peer_that_does_not_read_times_out() {
    let (ours, _peer) = pair();
    ours.set_nonblocking(true).unwrap();
    // Until the peer's buffer is full, too.
    let mut full = 0;
    while full < 5 {
        if (&ours).write(&[0; 4096]).unwrap_or(0) > 0 {
            full = 0;
        } else {
            full += 1;
            thread::sleep(Duration::from_millis(10));
        }
    }
    ours.set_nonblocking(false).unwrap();
    let error = exchange(&ours, &endpoint(1), Duration::from_millis(50)).unwrap_err();
    let ExchangeError::Timeout { during, .. } = error else {
        panic!("{error}");
    };
    assert!(during.contains("telling"), "{during}");
}

#[test]
fn barrier_refuses_other_messages() {
    let (ours, mut peer) = pair();
    peer.write_all(&line(&endpoint(7))).unwrap();
    let error = barrier(&ours, LONG).unwrap_err();
    assert!(matches!(error, ExchangeError::Malformed { .. }), "{error}");
    let (ours, _peer) = pair();
    let error = barrier(&ours, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(error, ExchangeError::Timeout { .. }), "{error}");
}
