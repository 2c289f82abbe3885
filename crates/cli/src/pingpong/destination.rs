//! Messages of the ping-pong protocol over TCP.
//!
//! ibv_rc_pingpong and its relatives exchange one message per queue pair and
//! direction: LID, queue pair number and packet sequence number in hexadecimal,
//! then the GID as four words of eight digits, separated by colons, with a NUL at
//! the end. The client confirms with `done` and a NUL.

use std::fmt;

/// Length of a message in bytes, including the NUL.
pub const MESSAGE_LEN: usize = 52;
/// The client's confirmation.
pub const DONE: &[u8; 5] = b"done\0";
/// Number of messages that ibv_srq_pingpong exchanges each way, for any number of
/// queue pairs; unused ones are zero.
pub const SRQ_MESSAGES: usize = 256;

/// The address of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Destination {
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// Initial packet sequence number, 24 bits.
    pub psn: u32,
    /// GID; zero if none is used.
    pub gid: [u8; 16],
}

/// The reason why a message is malformed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MessageError {
    /// Wrong length.
    Length(usize),
    /// Not four fields separated by colons with a NUL at the end.
    Shape,
    /// This field has a character that is no hexadecimal digit.
    Field(&'static str),
}

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(length) => {
                write!(f, "a message has {MESSAGE_LEN} bytes, this one {length}")
            }
            Self::Shape => f.write_str("not LID:QPN:PSN:GID with a NUL at the end"),
            Self::Field(field) => write!(f, "the {field} is not in hexadecimal digits"),
        }
    }
}

/// Mask of 24-bit numbers.
const MASK: u32 = 0xff_ffff;

impl Destination {
    /// Encodes the message. Numbers are truncated to 24 bits.
    pub fn encode(&self) -> [u8; MESSAGE_LEN] {
        let gid: String = self.gid.iter().map(|byte| format!("{byte:02x}")).collect();
        let (qpn, psn) = (self.qpn & MASK, self.psn & MASK);
        let text = format!("{:04x}:{qpn:06x}:{psn:06x}:{gid}\0", self.lid);
        let mut message = [0; MESSAGE_LEN];
        for (to, from) in message.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        message
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// Fails for anything but the output of [`encode`](Self::encode), with letters in
    /// either case.
    pub fn decode(message: &[u8]) -> Result<Self, MessageError> {
        let message: &[u8; MESSAGE_LEN] = message
            .try_into()
            .map_err(|_| MessageError::Length(message.len()))?;
        let [lid, qpn, psn, gid] = fields(message).ok_or(MessageError::Shape)?;
        let mut bytes = [0; 16];
        for (to, pair) in bytes.iter_mut().zip(gid.chunks(2)) {
            *to = hexadecimal(pair).ok_or(MessageError::Field("GID"))? as u8;
        }
        Ok(Self {
            lid: hexadecimal(lid).ok_or(MessageError::Field("LID"))? as u16,
            qpn: hexadecimal(qpn).ok_or(MessageError::Field("queue pair number"))?,
            psn: hexadecimal(psn).ok_or(MessageError::Field("packet sequence number"))?,
            gid: bytes,
        })
    }

    /// Returns whether there is a GID: like the C tools, checks its lower half.
    pub fn has_gid(&self) -> bool {
        self.gid.iter().skip(8).any(|byte| *byte != 0)
    }
}

/// Returns the four fields if separators and lengths are right.
fn fields(message: &[u8; MESSAGE_LEN]) -> Option<[&[u8]; 4]> {
    let message = message.strip_suffix(b"\0")?;
    let mut fields = message.split(|byte| *byte == b':');
    let mut field = |length| fields.next().filter(|field| field.len() == length);
    let four = [field(4)?, field(6)?, field(6)?, field(32)?];
    fields.next().is_none().then_some(four)
}

/// Parses hexadecimal digits, without a sign.
fn hexadecimal(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0u32, |number, digit| {
        let digit = char::from(*digit).to_digit(16)?;
        number.checked_mul(16)?.checked_add(digit)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A message of ibv_rc_pingpong.
    const C_MESSAGE: &[u8; MESSAGE_LEN] = b"0000:000011:c49e39:00000000000000000000ffffc0a84d01\0";

    fn destination() -> impl Strategy<Value = Destination> {
        let number = || 0..=MASK;
        (any::<u16>(), number(), number(), any::<[u8; 16]>())
            .prop_map(|(lid, qpn, psn, gid)| Destination { lid, qpn, psn, gid })
    }

    #[test]
    fn message_of_the_c_tools() {
        let destination = Destination::decode(C_MESSAGE).unwrap();
        assert_eq!(destination.qpn, 0x11);
        assert_eq!(destination.psn, 0xc49e39);
        assert_eq!(destination.gid[10..], [0xff, 0xff, 192, 168, 77, 1]);
        assert!(destination.has_gid());
        assert_eq!(&destination.encode(), C_MESSAGE);
    }

    #[test]
    fn unused_destination_is_zero_and_has_no_gid() {
        let unused = Destination::default();
        assert!(!unused.has_gid());
        assert_eq!(Destination::decode(&unused.encode()), Ok(unused));
    }

    #[test]
    fn malformed_fields_are_named() {
        let changed = |at: usize, to: u8| {
            let mut message = *C_MESSAGE;
            message[at] = to;
            Destination::decode(&message).unwrap_err()
        };
        assert_eq!(changed(0, b'x'), MessageError::Field("LID"));
        assert_eq!(changed(5, b'+'), MessageError::Field("queue pair number"));
        assert_eq!(
            changed(12, b' '),
            MessageError::Field("packet sequence number")
        );
        assert_eq!(changed(50, 0xff), MessageError::Field("GID"));
        assert_eq!(changed(4, b'0'), MessageError::Shape);
        assert_eq!(changed(20, b':'), MessageError::Shape);
        assert_eq!(changed(51, b'0'), MessageError::Shape);
        assert_eq!(Destination::decode(b"done\0"), Err(MessageError::Length(5)));
        assert_eq!(Destination::decode(b""), Err(MessageError::Length(0)));
    }

    proptest! {
        #[test]
        fn decode_inverts_encode(destination in destination()) {
            prop_assert_eq!(Destination::decode(&destination.encode()), Ok(destination));
        }

        #[test]
        fn any_input_is_refused_or_equals_its_encoding(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(destination) = Destination::decode(&bytes) {
                prop_assert!(destination.encode().eq_ignore_ascii_case(&bytes));
            }
        }

        #[test]
        fn message_with_a_changed_byte_is_refused_or_equals_its_encoding(destination in destination(), at in 0..MESSAGE_LEN, to: u8) {
            let mut message = destination.encode();
            message[at] = to;
            if let Ok(read) = Destination::decode(&message) {
                prop_assert!(read.encode().eq_ignore_ascii_case(&message));
            }
        }

        #[test]
        fn large_numbers_do_not_shift_later_fields(qpn: u32, psn: u32) {
            let read = Destination::decode(&Destination { qpn, psn, ..Default::default() }.encode());
            let cut = Destination { qpn: qpn & MASK, psn: psn & MASK, ..Default::default() };
            prop_assert_eq!(read, Ok(cut));
        }
    }
}
