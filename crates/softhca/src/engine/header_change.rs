//! Changes of a received frame's headers by steering.

use super::ethernet::{Layers, layers};
use crate::bits::{Field, field, get32};

/// Maximum number of actions of a change.
pub(crate) const MOST: u32 = 16;

const KIND: Field = field(0, 31, 28);
const HEADER_FIELD: Field = field(0, 27, 16);
const OFFSET: Field = field(0, 12, 8);
const LENGTH: Field = field(0, 4, 0);
const DATA: usize = 4;
/// Bytes of an action.
const ACTION: usize = 8;
const SET: u32 = 1;
const ADD: u32 = 2;

const TCP: u8 = 6;
const UDP: u8 = 17;

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

/// Decodes so many actions. Returns `None` for those that are not modelled.
pub(crate) fn decode(bytes: &[u8], count: u32) -> Option<Vec<Action>> {
    let list = bytes.get(..ACTION * count as usize)?;
    let decoded = list.chunks_exact(ACTION).map(|bytes| {
        let field = HEADER_FIELD.get(bytes);
        let (data, offset) = (get32(bytes, DATA), OFFSET.get(bytes));
        let change = match KIND.get(bytes) {
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
        is_known(field).then_some(Action { field, change })
    });
    (count <= MOST).then(|| decoded.collect())?
}

fn is_known(field: u32) -> bool {
    matches!(field, 1..=5 | 8..=0xc | 0x15 | 0x16)
}

/// Returns where a field is in a frame, and its bytes.
fn place(field: u32, frame: &[u8]) -> Option<(usize, usize)> {
    // The parts of the addresses, source and destination, and the type.
    match field {
        1 => return Some((6, 4)),
        2 => return Some((10, 2)),
        3 => return Some((12, 2)),
        4 => return Some((0, 4)),
        5 => return Some((4, 2)),
        _ => {}
    }
    let Layers {
        ipv4,
        l3,
        l4,
        protocol,
    } = layers(frame)?;
    match field {
        8 if protocol == TCP => Some((l4, 2)),
        9 if protocol == TCP => Some((l4 + 2, 2)),
        0xa => Some((l3 + if ipv4 { 8 } else { 7 }, 1)),
        0xb if protocol == UDP => Some((l4, 2)),
        0xc if protocol == UDP => Some((l4 + 2, 2)),
        0x15 if ipv4 => Some((l3 + 12, 4)),
        0x16 if ipv4 => Some((l3 + 16, 4)),
        _ => None,
    }
}

/// Applies actions to a frame, in order. Fields that it lacks stay as they are. Returns
/// whether checksums are to be computed again.
pub(crate) fn apply(frame: &mut [u8], actions: &[Action]) -> bool {
    let mut changed = false;
    for action in actions {
        let Some((at, bytes)) = place(action.field, frame) else {
            continue;
        };
        let Some(place) = frame.get_mut(at..at + bytes) else {
            continue;
        };
        let old = place
            .iter()
            .fold(0u32, |value, byte| value << 8 | u32::from(*byte));
        let new = match action.change {
            Change::Set { mask, value } => old & !mask | value & mask,
            Change::Add(data) => old.wrapping_add(data),
        };
        place.copy_from_slice(&new.to_be_bytes()[4 - bytes..]);
        changed |= action.field > 5;
    }
    changed
}

#[cfg(test)]
mod tests {
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
        assert!(apply(&mut frame, &actions));
        assert_eq!(frame[..6], [1, 2, 3, 4, 0xab, 0xcd]);
        assert_eq!(frame[6..12], [7, 8, 0xee, 10, 11, 12]);
        assert_eq!(frame[22], 63);
        assert_eq!(frame[30..34], [10, 0, 0, 9]);
        assert_eq!(frame[34..38], [0, 7, 0, 80]);
        let mut frame = udp();
        assert!(!apply(&mut frame, &actions[..2]));
    }

    #[test]
    fn frames_that_end_early_stay_as_they_are() {
        let bytes: Vec<u8> = (1..=0x16)
            .filter(|field| is_known(*field))
            .flat_map(|field| action(1, field, 31, 31, u32::MAX))
            .collect();
        let actions = decode(&bytes, bytes.len() as u32 / 8).unwrap();
        for end in 0..udp().len() {
            apply(&mut udp()[..end], &actions);
        }
    }

    #[test]
    fn unknown_actions_are_refused() {
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
