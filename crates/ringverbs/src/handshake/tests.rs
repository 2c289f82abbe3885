use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn endpoint(number: u32) -> Endpoint {
    Endpoint {
        qp_num: number & 0xff_ffff,
        psn: !number & 0xff_ffff,
        lid: number as u16,
        mtu: Mtu::Bytes1024,
        gid: Gid([number as u8; 16]),
    }
}

fn hello(endpoints: &[u32], regions: &[(u64, u32, usize)], data: Vec<u8>) -> Hello {
    let region = |&(addr, rkey, len)| RemoteMemory::new(RemoteAddr::new(addr, rkey), len);
    Hello {
        endpoints: endpoints.iter().copied().map(endpoint).collect(),
        regions: regions.iter().filter_map(region).collect(),
        data,
    }
}

#[test]
fn malformed_messages_are_refused() {
    let good = hello(&[1, 2], &[(1 << 40, 7, 4096)], b"data".to_vec());
    let bytes = good.encode().unwrap();
    assert_eq!(Hello::decode(&bytes).unwrap(), good);
    // Bytes after it are left in the stream.
    let mut stream = &[&bytes[..], b"more"].concat()[..];
    assert_eq!(Hello::read_from(&mut stream).unwrap(), good);
    assert_eq!(stream, b"more");
    for end in 0..bytes.len() {
        assert!(Hello::decode(&bytes[..end]).is_err(), "{end}");
        let error = Hello::read_from(&mut &bytes[..end]).unwrap_err();
        assert!(matches!(error, HandshakeError::Stream(error)
            if error.kind() == io::ErrorKind::UnexpectedEof));
    }
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        Hello::decode(&bytes).unwrap_err()
    };
    assert!(matches!(with(0, b'G'), HandshakeError::Protocol));
    assert!(matches!(with(7, 2), HandshakeError::Version(2)));
    for at in [11, 15, 19] {
        assert!(matches!(with(at, 1), HandshakeError::TooLong));
    }
    // A queue pair number and a PSN of more than 24 bits, an MTU, and the reserved
    // field.
    for (at, byte) in [(23, 1), (27, 1), (30, 0), (30, 6), (31, 1)] {
        assert!(matches!(with(at, byte), HandshakeError::Malformed { .. }));
    }
    // A region that goes beyond the last address.
    let mut beyond = bytes.clone();
    let at = HEADER + 2 * ENDPOINT;
    beyond[at..at + 8].fill(0xff);
    let error = Hello::decode(&beyond).unwrap_err();
    assert!(matches!(error, HandshakeError::Malformed { .. }));
    // Another protocol.
    let error = Hello::read_from(&mut &b"HTTP/1.1"[..]).unwrap_err();
    assert!(matches!(error, HandshakeError::Protocol));
}

#[test]
fn message_length_is_limited() {
    let longest = hello(&[], &[], vec![1; MAX_LENGTH - HEADER]);
    let bytes = longest.encode().unwrap();
    assert_eq!(Hello::decode(&bytes).unwrap(), longest);
    let longer = hello(&[], &[], vec![1; MAX_LENGTH - HEADER + 1]);
    assert!(matches!(longer.encode(), Err(HandshakeError::TooLong)));
    // Refused by its header, before the rest is read or allocated.
    let mut header = MAGIC.to_vec();
    header.extend([0xff; 12]);
    let mut stream = &header[..];
    let error = Hello::read_from(&mut stream).unwrap_err();
    assert!(matches!(error, HandshakeError::TooLong));
}

proptest! {
    #[test]
    fn messages_round_trip(
        endpoints in vec(any::<u32>(), 0..5),
        regions in vec(any::<(u64, u32, usize)>(), 0..5),
        data in vec(any::<u8>(), 0..100),
    ) {
        let hello = hello(&endpoints, &regions, data);
        let bytes = hello.encode().unwrap();
        prop_assert_eq!(Hello::decode(&bytes).unwrap(), hello);
    }

    /// Any bytes are refused, or written again as the same bytes.
    #[test]
    fn any_bytes_are_refused_or_round_trip(
        mut bytes in vec(any::<u8>(), 0..300),
        counts in any::<Option<[u8; 3]>>(),
    ) {
        if bytes.len() >= HEADER {
            bytes[..8].copy_from_slice(&MAGIC);
            if let Some(counts) = counts {
                bytes[8..HEADER].fill(0);
                for (at, count) in counts.into_iter().enumerate() {
                    bytes[8 + 4 * at] = count % 8;
                }
            }
        }
        let _ = Hello::read_from(&mut &bytes[..]);
        if let Ok(hello) = Hello::decode(&bytes) {
            prop_assert_eq!(hello.encode().unwrap(), bytes);
        }
    }
}
