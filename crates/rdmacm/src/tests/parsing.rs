//! Decoding of events.

use uverbs::Errno;
use zerocopy::IntoBytes;

use super::*;
use crate::event::{Form, Truncated};

fn parse(kind: EventKind, status: i32, form: Form, param: &[u8]) -> Message {
    Message::parse(&event(1, 2, kind, status, param), form)
        .unwrap()
        .1
}

#[test]
fn lengths() {
    let bytes = event(1, 2, EventKind::ESTABLISHED, 0, &[]);
    assert_eq!(bytes.len(), 336);
    for len in 0..bytes.len() {
        let result = Message::parse(&bytes[..len], Form::Connection);
        assert_eq!(result.err(), Some(Truncated));
    }
    let longer = [bytes.as_slice(), &[9; 40]].concat();
    assert!(Message::parse(&longer, Form::Datagram).is_ok());
}

#[test]
fn outcomes() {
    use EventKind as K;
    use Form::{Connection, Datagram};
    let errno = |raw| Err(Reason::Errno(Errno::new(raw)));
    for (kind, status, form, outcome) in [
        (K::ADDR_RESOLVED, 0, Connection, Ok(())),
        (K::ADDR_RESOLVED, -5, Connection, errno(5)),
        (K::ADDR_ERROR, -113, Connection, errno(113)),
        (K::ROUTE_ERROR, i32::MIN, Connection, errno(i32::MAX)),
        (K::UNREACHABLE, -110, Connection, errno(110)),
        (K::UNREACHABLE, 3, Connection, Err(Reason::Other(3))),
        (
            K::UNREACHABLE,
            2,
            Datagram,
            Err(Reason::Sidr(SidrStatus::REJECT)),
        ),
        (
            K::REJECTED,
            8,
            Connection,
            Err(Reason::Rejected(RejectReason::INVALID_SERVICE_ID)),
        ),
        (
            K::REJECTED,
            999,
            Connection,
            Err(Reason::Rejected(RejectReason(999))),
        ),
        (K::REJECTED, -111, Connection, errno(111)),
        // A failure without a reason is a failure.
        (K::REJECTED, 0, Connection, Err(Reason::Other(0))),
        (K::CONNECT_ERROR, 0, Connection, Err(Reason::Other(0))),
        (K::DISCONNECTED, 0, Connection, Ok(())),
        (EventKind(77), 0, Datagram, Ok(())),
        (EventKind(77), 1, Datagram, Err(Reason::Other(1))),
    ] {
        let message = parse(kind, status, form, &[]);
        assert_eq!(message.result(), outcome, "{kind:?} {status}");
        assert_eq!((message.kind(), message.status()), (kind, status));
        if let Err(reason) = outcome {
            assert!(!reason.to_string().is_empty());
        }
    }
    assert_eq!(format!("{:?}", EventKind(77)), "EventKind(77)");
    assert_eq!(format!("{:?}", EventKind::USER), "USER");
}

#[test]
fn private_data_is_bounded() {
    for len in [0, 1, 56, 255] {
        let conn = abi::ConnParam {
            private_data: core::array::from_fn(|index| index as u8),
            private_data_len: len,
            ..abi::ConnParam::default()
        };
        let message = parse(EventKind::ESTABLISHED, 0, Form::Connection, conn.as_bytes());
        let data = message.private_data();
        assert_eq!(data.len(), usize::from(len));
        assert!(
            data.iter()
                .enumerate()
                .all(|(index, byte)| index == usize::from(*byte))
        );
        assert!(message.datagram().is_none());

        let ud = abi::UdParam {
            qp_num: u32::MAX,
            private_data: [7; 256],
            private_data_len: len,
            ..abi::UdParam::default()
        };
        let message = parse(EventKind::ESTABLISHED, 0, Form::Datagram, ud.as_bytes());
        assert_eq!(message.private_data(), vec![7; usize::from(len)]);
        assert_eq!(message.datagram().unwrap().qp_num, 0xff_ffff);
        assert!(message.connection().is_none());
    }
}

#[test]
fn a_users_own_number() {
    let number = 0x1122_3344_5566_7788_u64.to_ne_bytes();
    let message = parse(EventKind::USER, 0, Form::Connection, &number);
    assert_eq!(message.user_argument(), Some(0x1122_3344_5566_7788));
    let message = parse(EventKind::ESTABLISHED, 0, Form::Connection, &number);
    assert_eq!(message.user_argument(), None);
}
