//! The netlink and sysfs parsers on arbitrary input.

use proptest::prelude::*;

use crate::discovery::netlink::{
    Attributes, Message, Messages, parse_char_device, parse_copy_on_fork, parse_device,
    parse_object_counts, read_answer,
};
use crate::discovery::sysfs;

/// Attributes whose lengths are mostly right.
fn attributes() -> impl Strategy<Value = Vec<(u16, Vec<u8>)>> {
    let value = prop::collection::vec(any::<u8>(), 0..12);
    prop::collection::vec((0u16..0x1fff, value), 0..12)
}

fn encode(attributes: &[(u16, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (number, value) in attributes {
        bytes.extend((4 + value.len() as u16).to_ne_bytes());
        bytes.extend(number.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

proptest! {
    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_device(&bytes);
        let _ = parse_char_device(&bytes);
        let _ = parse_copy_on_fork(&bytes);
        let _ = parse_object_counts(&bytes);
        let _ = read_answer(&bytes, 1, true, |payload| parse_device(payload).map(drop));
        // Iteration terminates, and never yields more than the input.
        let total: usize = Attributes::new(&bytes).flatten().map(|(_, value)| value.len() + 4).sum();
        prop_assert!(total <= bytes.len());
        let total: usize = Messages::new(&bytes).flatten().map(|message| message.payload.len() + 16).sum();
        prop_assert!(total <= bytes.len());
        let errors = Attributes::new(&bytes).filter(Result::is_err).count();
        prop_assert!(errors <= 1, "nothing after an error");
    }

    #[test]
    fn attributes_are_read_as_written(attributes in attributes()) {
        let bytes = encode(&attributes);
        let read: Vec<_> = Attributes::new(&bytes)
            .map(|attribute| attribute.map(|(number, value)| (number, value.to_vec())))
            .collect::<Result<_, _>>()
            .unwrap();
        prop_assert_eq!(read, attributes);
    }

    #[test]
    fn a_truncated_answer_is_refused(attributes in attributes(), cut in 0usize..100) {
        let bytes = encode(&attributes);
        let cut = bytes.len().saturating_sub(cut);
        for attribute in Attributes::new(&bytes[..cut]).flatten() {
            prop_assert!(attributes.iter().any(|(number, value)| (*number, value.as_slice()) == attribute));
        }
    }

    #[test]
    fn messages_are_read_as_written(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..6)) {
        let mut bytes = Vec::new();
        for (index, payload) in payloads.iter().enumerate() {
            bytes.extend((16 + payload.len() as u32).to_ne_bytes());
            bytes.extend((index as u16).to_ne_bytes());
            bytes.extend([0; 10]);
            bytes.extend(payload);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        let read: Vec<_> = Messages::new(&bytes).map(Result::unwrap).collect();
        prop_assert_eq!(read.len(), payloads.len());
        for (index, Message { header, payload }) in read.iter().enumerate() {
            prop_assert_eq!(usize::from(header.msg_type), index);
            prop_assert_eq!(*payload, payloads[index].as_slice());
        }
    }

    #[test]
    fn any_text(text in ".{0,60}") {
        let _ = sysfs::parse_gid(&text);
        let _ = sysfs::parse_guid(&text);
        let _ = sysfs::parse_pkey(&text);
        let _ = sysfs::parse_device_number(&text);
        let _ = sysfs::parse_node_type(&text);
    }

    #[test]
    fn gids(gid in any::<[u8; 16]>()) {
        let groups: Vec<_> = gid.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect();
        prop_assert_eq!(sysfs::parse_gid(&groups.join(":")), Some(gid));
    }
}
