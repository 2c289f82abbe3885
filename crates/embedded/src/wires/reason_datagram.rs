//! Management datagrams by which a device asks that of a peer why it has failed a work request,
//! since a NAK does not say it.
//!
//! A question is answered by one datagram of the same size, with a part of the reason; each
//! further part needs a further question. So a forged question makes nobody send more than was
//! sent.
//!
//! The class is one of the vendors' first range, whose datagrams name no vendor; the mark tells
//! ours from theirs. A ConnectX and Linux answer a class without an agent with an error status.

use crate::management::ReasonDrop;
use crate::wires::agent::{ATTRIBUTE, CLASS, LOCAL_ID, MAD_SIZE, REMOTE_ID, TRANSACTION};

/// The management class: of the range that is 0x09 to 0x0f.
pub(crate) const REASONS: u8 = 0x0d;
/// Versions of management datagrams, and of the class.
const VERSIONS: (u8, u8) = (1, 1);
/// Methods, and their place.
const METHOD: usize = 3;
const GET: u8 = 0x01;
const GET_RESPONSE: u8 = 0x81;
const STATUS: usize = 4;
/// The only attribute. It is none of the connection manager's, which select a process by other
/// bytes.
const REASON: u16 = 1;
/// Marks the datagrams, with the version of what follows.
const MARK: [u8; 4] = *b"rvr\x01";
/// The queue pair that the datagram is for, in the upper 24 bits. Among processes that share an
/// address, the first bits of it name the one that has it, as those of an id of the connection
/// manager.
const TO: usize = REMOTE_ID;
/// The queue pair of the sender.
const FROM: usize = 32;
/// How the peer has failed the work request.
const FAILURE: usize = 35;
const OFFSET: usize = 36;
const LENGTH: usize = 38;
const TEXT: usize = 40;
/// Bytes of a reason in a datagram, and the maximum number of all.
const PART: usize = MAD_SIZE - TEXT;
pub(crate) const MAX_REASON: usize = 4 * PART;

/// How the peer of a queue pair has failed a work request, as the requester sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerFailure {
    /// It has refused the request, by a NAK.
    Refused,
    /// It had no receive, or no memory, in time.
    NotReady,
    /// It has not answered.
    Silent,
}

impl PeerFailure {
    const ALL: [Self; 3] = [Self::Refused, Self::NotReady, Self::Silent];

    fn number(self) -> u8 {
        self as u8
    }
}

/// A datagram about a reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReasonDatagram<'a> {
    pub(crate) transaction: u64,
    /// The queue pairs of the receiver and of the sender.
    pub(crate) to: u32,
    pub(crate) from: u32,
    pub(crate) failure: PeerFailure,
    /// Number of the reason's bytes before those of this datagram.
    pub(crate) offset: usize,
    pub(crate) body: Body<'a>,
}

/// The kinds of datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Body<'a> {
    Question,
    /// A part of the reason, and the length of all of it; 0 if none is known.
    Answer {
        length: usize,
        part: &'a [u8],
    },
    /// The receiver does not answer such questions.
    Unsupported,
}

fn u16_at(bytes: &[u8; MAD_SIZE], at: usize) -> usize {
    u16::from_be_bytes([bytes[at], bytes[at + 1]]).into()
}

fn qpn_at(bytes: &[u8; MAD_SIZE], at: usize) -> u32 {
    u32::from_be_bytes([0, bytes[at], bytes[at + 1], bytes[at + 2]])
}

/// Returns the part of a reason that begins at an offset.
pub(crate) fn part_at(reason: &[u8], offset: usize) -> &[u8] {
    let reason = &reason[..reason.len().min(MAX_REASON)];
    let part = reason.get(offset..).unwrap_or(&[]);
    &part[..part.len().min(PART)]
}

/// Returns the queue pair that a datagram of the class is for.
pub(crate) fn receiver_of(bytes: &[u8]) -> Option<u32> {
    let bytes = bytes.first_chunk()?;
    Some(qpn_at(bytes, TO))
}

impl<'a> ReasonDatagram<'a> {
    /// Reads a datagram.
    ///
    /// # Errors
    /// Why it is dropped.
    pub(crate) fn parse(bytes: &'a [u8; MAD_SIZE]) -> Result<Self, ReasonDrop> {
        let versions = (bytes[0], bytes[CLASS + 1]);
        let is_valid = versions == VERSIONS
            && bytes[CLASS] == REASONS
            && u16_at(bytes, ATTRIBUTE) == usize::from(REASON)
            && bytes[LOCAL_ID..LOCAL_ID + 4] == MARK;
        let [number, low] = [bytes[FAILURE], bytes[TO + 3]];
        let failure = PeerFailure::ALL.get(usize::from(number)).copied();
        let Some(failure) = failure.filter(|_| is_valid && low == 0) else {
            return Err(ReasonDrop::Format);
        };
        let (offset, length) = (u16_at(bytes, OFFSET), u16_at(bytes, LENGTH));
        if offset % PART != 0 || offset >= MAX_REASON || length > MAX_REASON {
            return Err(ReasonDrop::Format);
        }
        let body = match (bytes[METHOD], u16_at(bytes, STATUS)) {
            (GET, 0) if length == 0 => Body::Question,
            (GET_RESPONSE, 0) => {
                let is_within = offset < length || length == 0 && offset == 0;
                let Some(rest) = length.checked_sub(offset).filter(|_| is_within) else {
                    return Err(ReasonDrop::Format);
                };
                let part = &bytes[TEXT..TEXT + rest.min(PART)];
                Body::Answer { length, part }
            }
            (GET_RESPONSE, _) => Body::Unsupported,
            _ => return Err(ReasonDrop::Format),
        };
        let mut transaction = [0; 8];
        transaction.copy_from_slice(&bytes[TRANSACTION..TRANSACTION + 8]);
        Ok(Self {
            transaction: u64::from_be_bytes(transaction),
            to: qpn_at(bytes, TO),
            from: qpn_at(bytes, FROM),
            failure,
            offset,
            body,
        })
    }

    /// Returns the datagram as it is sent.
    pub(crate) fn bytes(&self) -> [u8; MAD_SIZE] {
        let mut bytes = [0; MAD_SIZE];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let (method, length, part) = match self.body {
            Body::Question => (GET, 0, &[][..]),
            Body::Answer { length, part } => (GET_RESPONSE, length, part),
            Body::Unsupported => (GET_RESPONSE, 0, &[][..]),
        };
        put(0, &[VERSIONS.0, REASONS, VERSIONS.1, method]);
        if self.body == Body::Unsupported {
            // "Method/attribute combination not supported" (IBA 13.4.7).
            put(STATUS, &(3_u16 << 2).to_be_bytes());
        }
        put(TRANSACTION, &self.transaction.to_be_bytes());
        put(ATTRIBUTE, &REASON.to_be_bytes());
        put(LOCAL_ID, &MARK);
        put(TO, &(self.to << 8).to_be_bytes());
        put(FROM, &(self.from << 8).to_be_bytes());
        put(FAILURE, &[self.failure.number()]);
        // Both are at most `MAX_REASON`.
        put(OFFSET, &(self.offset as u16).to_be_bytes());
        put(LENGTH, &(length as u16).to_be_bytes());
        put(TEXT, part);
        bytes
    }
}

/// Returns a peer's text without what controls a terminal, and not longer than a reason.
pub(crate) fn printable(text: &[u8]) -> String {
    let text = &text[..text.len().min(MAX_REASON)];
    let shown = |byte: &u8| match *byte {
        byte @ b' '..=b'~' => char::from(byte),
        _ => '?',
    };
    text.iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn datagram(body: Body<'_>, offset: usize) -> ReasonDatagram<'_> {
        ReasonDatagram {
            transaction: 0x0102_0304_0506_0708,
            to: 0x12_3456,
            from: 0xab_cdef,
            failure: PeerFailure::NotReady,
            offset,
            body,
        }
    }

    #[test]
    fn datagrams_are_read_as_written() {
        let reason = [b'a'; PART + 7];
        let answer = |offset| Body::Answer {
            length: reason.len(),
            part: part_at(&reason, offset),
        };
        let nothing = Body::Answer {
            length: 0,
            part: &[],
        };
        for (body, offset) in [
            (Body::Question, 0),
            (Body::Question, 3 * PART),
            (answer(0), 0),
            (answer(PART), PART),
            (nothing, 0),
            (Body::Unsupported, 0),
        ] {
            let written = datagram(body, offset);
            assert_eq!(ReasonDatagram::parse(&written.bytes()), Ok(written));
        }
        assert_eq!(part_at(&reason, PART).len(), 7);
        assert!(part_at(&reason, 2 * PART).is_empty());
    }

    #[test]
    fn malformed_datagrams_are_dropped() {
        let valid = datagram(Body::Question, 0).bytes();
        for (at, value) in [
            (0, 2),
            (CLASS, 7),
            (CLASS + 1, 2),
            (METHOD, 2),
            (ATTRIBUTE, 1),
            (LOCAL_ID + 3, 2),
            (TO + 3, 1),
            (FAILURE, 3),
            (OFFSET + 1, 1),
            (OFFSET, 0xff),
            (LENGTH + 1, 1),
        ] {
            let mut bytes = valid;
            bytes[at] = value;
            assert_eq!(
                ReasonDatagram::parse(&bytes),
                Err(ReasonDrop::Format),
                "{at}"
            );
        }
    }

    proptest! {
        /// Whatever arrives is within bounds, and what is read is what was sent.
        #[test]
        fn arbitrary_datagrams_are_bounded(
            random in proptest::collection::vec(any::<u8>(), MAD_SIZE),
            has_header in any::<bool>(),
        ) {
            let mut bytes: [u8; MAD_SIZE] = random.try_into().unwrap();
            if has_header {
                let header = datagram(Body::Question, 0).bytes();
                let kept = [METHOD, OFFSET, OFFSET + 1, LENGTH, LENGTH + 1].map(|at| (at, bytes[at]));
                bytes[..TEXT].copy_from_slice(&header[..TEXT]);
                kept.iter().for_each(|(at, byte)| bytes[*at] = *byte);
                bytes[METHOD] = [GET, GET_RESPONSE][usize::from(bytes[METHOD] & 1)];
                bytes[OFFSET] &= 3;
                bytes[LENGTH] &= 3;
            }
            if let Ok(read) = ReasonDatagram::parse(&bytes) {
                if let Body::Answer { length, part } = read.body {
                    prop_assert!(read.offset + part.len() <= length && length <= MAX_REASON);
                    let text = printable(part);
                    prop_assert!(text.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
                }
                let again = read.bytes();
                prop_assert_eq!(ReasonDatagram::parse(&again), Ok(read));
            }
        }
    }
}
