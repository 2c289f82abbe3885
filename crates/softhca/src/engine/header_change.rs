//! Changes of a received frame's headers by steering.

use roce::bits::{Field, field, get32};

use super::frame::{Layers, TCP, UDP, fold, layers, u16_at};

/// Maximum number of actions of a change.
pub(crate) const MAX_ACTIONS: u32 = 16;

const ACTION_TYPE: Field = field(0, 31, 28);
const HEADER_FIELD: Field = field(0, 27, 16);
const OFFSET: Field = field(0, 12, 8);
const LENGTH: Field = field(0, 4, 0);
const DATA: usize = 4;
/// Bytes of an action.
const ACTION_SIZE: usize = 8;
const SET: u32 = 1;
const ADD: u32 = 2;

/// Fields before this one are those of the link layer.
const FIRST_OF_LAYER_3: u32 = 6;
const TIME_TO_LIVE: u32 = 0xa;
const IPV4_SOURCE: u32 = 0x15;
const IPV4_DESTINATION: u32 = 0x16;

/// An action on one field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Action {
    field: u32,
    change: Change,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    /// These bits get this value.
    Set {
        mask: u32,
        value: u32,
    },
    Add(u32),
}

/// Decodes `count` actions. Returns `None` if one of them is not modelled.
pub(crate) fn decode(bytes: &[u8], count: u32) -> Option<Vec<Action>> {
    let list = bytes.get(..ACTION_SIZE * count as usize)?;
    let decoded = list.chunks_exact(ACTION_SIZE).map(|bytes| {
        let field = HEADER_FIELD.get(bytes);
        let (data, offset) = (get32(bytes, DATA), OFFSET.get(bytes));
        let change = match ACTION_TYPE.get(bytes) {
            SET => {
                let mask = match LENGTH.get(bytes) {
                    0 => u32::MAX,
                    length => (1 << length) - 1,
                };
                Change::Set {
                    mask: mask << offset,
                    value: data << offset,
                }
            }
            ADD => Change::Add(data),
            _ => return None,
        };
        is_supported_field(field).then_some(Action { field, change })
    });
    (count <= MAX_ACTIONS).then(|| decoded.collect())?
}

fn is_supported_field(field: u32) -> bool {
    matches!(field, 1..=5 | 8..=0xc | 0x15 | 0x16)
}

/// Returns the offset of a field in a frame, and its bytes.
fn locate(field: u32, frame: &[u8]) -> Option<(usize, usize)> {
    // The parts of the addresses, source and destination, and the type.
    match field {
        1 => return Some((6, 4)),
        2 => return Some((10, 2)),
        3 => return Some((12, 2)),
        4 => return Some((0, 4)),
        5 => return Some((4, 2)),
        _ => {}
    }
    let at = layers(frame)?;
    if matches!(field, 8 | 9 | 0xb | 0xc) && is_later_fragment(frame, &at) {
        return None;
    }
    let Layers {
        ipv4,
        l3,
        l4,
        protocol,
    } = at;
    match field {
        8 if protocol == TCP => Some((l4, 2)),
        9 if protocol == TCP => Some((l4 + 2, 2)),
        TIME_TO_LIVE => Some((l3 + if ipv4 { 8 } else { 7 }, 1)),
        0xb if protocol == UDP => Some((l4, 2)),
        0xc if protocol == UDP => Some((l4 + 2, 2)),
        IPV4_SOURCE if ipv4 => Some((l3 + 12, 4)),
        IPV4_DESTINATION if ipv4 => Some((l3 + 16, 4)),
        _ => None,
    }
}

/// Applies actions to a frame, in order. Actions on missing fields have no effect.
/// Checksums are updated incrementally, so that a wrong checksum stays wrong.
pub(crate) fn apply(frame: &mut [u8], actions: &[Action]) {
    for action in actions {
        let Some((at, length)) = locate(action.field, frame) else {
            continue;
        };
        let Some(bytes) = frame.get_mut(at..at + length) else {
            continue;
        };
        let mut old = [0; 4];
        old[..length].copy_from_slice(bytes);
        let shift = 32 - 8 * length as u32;
        let value = u32::from_be_bytes(old) >> shift;
        let value = match action.change {
            Change::Set { mask, value: new } => value & !mask | new & mask,
            Change::Add(data) => value.wrapping_add(data),
        };
        let new = (value << shift).to_be_bytes();
        bytes.copy_from_slice(&new[..length]);
        if old != new {
            update_checksums(frame, action.field, old, new);
        }
    }
}

/// Updates the checksums of a frame after a change of a field, whose bytes are padded with
/// zeros.
fn update_checksums(frame: &mut [u8], field: u32, old: [u8; 4], new: [u8; 4]) {
    let Some(at) = layers(frame).filter(|_| field >= FIRST_OF_LAYER_3) else {
        return;
    };
    if at.ipv4 && matches!(field, TIME_TO_LIVE | IPV4_SOURCE | IPV4_DESTINATION) {
        update_checksum(frame, at.l3 + 10, old, new);
    }
    if field == TIME_TO_LIVE || is_later_fragment(frame, &at) {
        return;
    }
    match at.protocol {
        TCP => update_checksum(frame, at.l4 + 16, old, new),
        // Zero says that there is none.
        UDP if u16_at(frame, at.l4 + 6) != Some(0) => {
            let offset = at.l4 + 6;
            update_checksum(frame, offset, old, new);
            if u16_at(frame, offset) == Some(0) {
                frame[offset..offset + 2].fill(0xff);
            }
        }
        _ => {}
    }
}

/// Updates one checksum (RFC 1624), if the frame has it.
fn update_checksum(frame: &mut [u8], offset: usize, old: [u8; 4], new: [u8; 4]) {
    let Some(checksum) = u16_at(frame, offset) else {
        return;
    };
    let words = |bytes: [u8; 4]| [[bytes[0], bytes[1]], [bytes[2], bytes[3]]];
    let number = |word| u64::from(u16::from_be_bytes(word));
    let removed: u64 = words(old).map(|word| 0xffff - number(word)).iter().sum();
    let added: u64 = words(new).map(number).iter().sum();
    let sum = u64::from(!checksum) + removed + added;
    frame[offset..offset + 2].copy_from_slice(&fold(sum).to_be_bytes());
}

/// Returns whether the header of layer 4 is in an earlier fragment.
fn is_later_fragment(frame: &[u8], at: &Layers) -> bool {
    at.ipv4 && u16_at(frame, at.l3 + 6).is_some_and(|bits| bits & 0x1fff != 0)
}

#[cfg(test)]
mod tests {
    use super::super::frame::{set_checksums, verify_checksums};
    use super::*;

    fn action(kind: u32, field: u32, offset: u32, length: u32, data: u32) -> Vec<u8> {
        let first = kind << 28 | field << 16 | offset << 8 | length;
        [first.to_be_bytes(), data.to_be_bytes()].concat()
    }

    fn udp() -> Vec<u8> {
        let mut frame = vec![1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 8, 0, 0x45];
        frame.resize(42, 0);
        (frame[22], frame[23]) = (64, UDP);
        frame[34..38].copy_from_slice(&[0, 7, 0, 9]);
        frame
    }

    #[test]
    fn fields_are_set_and_added_to() {
        let bytes = [
            action(1, 5, 0, 16, 0xabcd),
            action(1, 1, 8, 8, 0xee),
            action(2, 0xa, 0, 0, 0xffff_ffff),
            action(1, 0x16, 0, 0, 0x0a00_0009),
            action(1, 0xc, 0, 16, 80),
            // Not in this frame.
            action(1, 8, 0, 16, 80),
        ];
        let actions = decode(&bytes.concat(), 6).unwrap();
        let mut frame = udp();
        apply(&mut frame, &actions);
        assert_eq!(frame[..6], [1, 2, 3, 4, 0xab, 0xcd]);
        assert_eq!(frame[6..12], [7, 8, 0xee, 10, 11, 12]);
        assert_eq!(frame[22], 63);
        assert_eq!(frame[30..34], [10, 0, 0, 9]);
        assert_eq!(frame[34..38], [0, 7, 0, 80]);
    }

    /// Returns a packet with right checksums, and actions on its addresses, time to live
    /// and ports.
    fn packet(protocol: u8, payload: &[u8]) -> (Vec<u8>, Vec<Action>) {
        let l4 = if protocol == TCP { 20 } else { 8 };
        let mut frame = udp();
        frame.resize(34 + l4, 0);
        frame.extend_from_slice(payload);
        let length = frame.len() as u16 - 14;
        frame[16..18].copy_from_slice(&length.to_be_bytes());
        frame[23] = protocol;
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        set_checksums(&mut frame, true);
        let port = if protocol == TCP { 9 } else { 0xc };
        let bytes = [
            action(1, IPV4_SOURCE, 0, 0, 0xc0a8_0909),
            action(1, IPV4_DESTINATION, 0, 8, 9),
            action(2, TIME_TO_LIVE, 0, 0, 0xffff_ffff),
            action(2, port, 0, 0, 0x1_fff0),
        ];
        (frame, decode(&bytes.concat(), 4).unwrap())
    }

    #[test]
    fn checksums_change_with_the_fields() {
        for protocol in [TCP, UDP] {
            for payload in [&b"a"[..], b"data", &[0xff; 31]] {
                let (mut frame, actions) = packet(protocol, payload);
                apply(&mut frame, &actions);
                assert_eq!(frame[26..34], [192, 168, 9, 9, 10, 0, 0, 9]);
                assert_eq!(verify_checksums(&frame).0, 0b111, "{protocol}");
                // A wrong checksum stays wrong.
                let (mut frame, actions) = packet(protocol, payload);
                *frame.last_mut().unwrap() ^= 1;
                apply(&mut frame, &actions);
                assert_eq!(verify_checksums(&frame).0, 0b011, "{protocol}");
                let (mut frame, actions) = packet(protocol, payload);
                frame[15] ^= 1;
                apply(&mut frame, &actions);
                assert_eq!(verify_checksums(&frame).0, 0b101, "{protocol}");
            }
        }
    }

    #[test]
    fn absent_checksums_are_not_changed() {
        let (mut frame, actions) = packet(UDP, b"data");
        frame[40..42].fill(0);
        apply(&mut frame, &actions);
        assert_eq!(frame[40..42], [0, 0], "it has none");
        for protocol in [TCP, UDP] {
            let (mut frame, actions) = packet(protocol, b"data");
            // Eight bytes from the beginning of the packet.
            frame[21] = 1;
            set_checksums(&mut frame, false);
            let payload = frame[34..].to_vec();
            apply(&mut frame, &actions);
            assert_eq!(frame[34..], payload, "a later fragment");
            assert_eq!(verify_checksums(&frame).0, 0b011);
        }
    }

    #[test]
    fn a_udp_checksum_is_never_changed_to_zero() {
        let (frame, _) = packet(UDP, b"data");
        for n in 0..=0xffff_u32 {
            let mut frame = frame.clone();
            let port = decode(&action(1, 0xb, 0, 16, n), 1).unwrap();
            apply(&mut frame, &port);
            assert_ne!(frame[40..42], [0, 0], "{n}");
        }
    }

    #[test]
    fn truncated_frames_are_not_changed() {
        let bytes: Vec<u8> = (1..=0x16)
            .filter(|field| is_supported_field(*field))
            .flat_map(|field| action(1, field, 31, 31, u32::MAX))
            .collect();
        let actions = decode(&bytes, bytes.len() as u32 / 8).unwrap();
        for end in 0..udp().len() {
            apply(&mut udp()[..end], &actions);
        }
    }

    #[test]
    fn unsupported_actions_are_rejected() {
        for bytes in [
            action(3, 1, 0, 0, 0),
            action(0, 1, 0, 0, 0),
            action(1, 6, 0, 0, 0),
            action(1, 0x99, 0, 0, 0),
        ] {
            assert_eq!(decode(&bytes, 1), None);
        }
        let one = action(1, 1, 0, 0, 0);
        assert_eq!(decode(&one, 2), None, "fewer than there should be");
        assert_eq!(decode(&one.repeat(17), 17), None, "too many");
        assert_eq!(decode(&[], 0), Some(Vec::new()));
    }
}
