//! Messages of the ping-pong protocol over TCP.
//!
//! ibv_rc_pingpong and its relatives exchange one message per queue pair and
//! direction: LID, queue pair number and packet sequence number in hexadecimal,
//! then the GID as four words of eight digits, separated by colons, with a NUL at
//! the end. The client confirms with `done` and a NUL.

use std::fmt;

/// Length of a message in bytes, including the NUL.
pub const MESSAGE: usize = 52;
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
pub enum Malformed {
    /// Wrong length.
    Length(usize),
    /// Not four fields separated by colons with a NUL at the end.
    Shape,
    /// A field does not consist of that many hexadecimal digits.
    Field(&'static str),
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(length) => write!(f, "a message has {MESSAGE} bytes, this one {length}"),
            Self::Shape => f.write_str("not LID:QPN:PSN:GID with a NUL at the end"),
            Self::Field(field) => write!(f, "the {field} is not in hexadecimal digits"),
        }
    }
}

/// 24 bits.
const MASK: u32 = 0xff_ffff;

impl Destination {
    /// Encodes the message. Numbers are truncated to 24 bits.
    pub fn encode(&self) -> [u8; MESSAGE] {
        let gid: String = self.gid.iter().map(|byte| format!("{byte:02x}")).collect();
        let (qpn, psn) = (self.qpn & MASK, self.psn & MASK);
        let text = format!("{:04x}:{qpn:06x}:{psn:06x}:{gid}\0", self.lid);
        let mut message = [0; MESSAGE];
        for (to, from) in message.iter_mut().zip(text.bytes()) {
            *to = from;
        }
        message
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// For anything but the output of [`encode`](Self::encode), with letters in
    /// either case.
    pub fn decode(message: &[u8]) -> Result<Self, Malformed> {
        let message: &[u8; MESSAGE] = message
            .try_into()
            .map_err(|_| Malformed::Length(message.len()))?;
        let [lid, qpn, psn, gid] = fields(message).ok_or(Malformed::Shape)?;
        let mut bytes = [0; 16];
        for (to, pair) in bytes.iter_mut().zip(gid.chunks(2)) {
            *to = hexadecimal(pair).ok_or(Malformed::Field("GID"))? as u8;
        }
        Ok(Self {
            lid: hexadecimal(lid).ok_or(Malformed::Field("LID"))? as u16,
            qpn: hexadecimal(qpn).ok_or(Malformed::Field("queue pair number"))?,
            psn: hexadecimal(psn).ok_or(Malformed::Field("packet sequence number"))?,
            gid: bytes,
        })
    }

    /// Returns whether there is a GID: like the C tools, checks its lower half.
    pub fn has_gid(&self) -> bool {
        self.gid.iter().skip(8).any(|byte| *byte != 0)
    }
}

/// Returns the four fields if separators and lengths are right.
fn fields(message: &[u8; MESSAGE]) -> Option<[&[u8]; 4]> {
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
    const THEIRS: &[u8; MESSAGE] = b"0000:000011:c49e39:00000000000000000000ffffc0a84d01\0";

    fn destination() -> impl Strategy<Value = Destination> {
        let number = || 0..=MASK;
        (any::<u16>(), number(), number(), any::<[u8; 16]>())
            .prop_map(|(lid, qpn, psn, gid)| Destination { lid, qpn, psn, gid })
    }

    #[test]
    fn the_c_tools_message() {
        let destination = Destination::decode(THEIRS).unwrap();
        assert_eq!(destination.qpn, 0x11);
        assert_eq!(destination.psn, 0xc49e39);
        assert_eq!(destination.gid[10..], [0xff, 0xff, 192, 168, 77, 1]);
        assert!(destination.has_gid());
        assert_eq!(&destination.encode(), THEIRS);
    }

    #[test]
    fn an_unused_message_is_zero_and_has_no_gid() {
        let unused = Destination::default();
        assert!(!unused.has_gid());
        assert_eq!(Destination::decode(&unused.encode()), Ok(unused));
    }

    #[test]
    fn malformed_fields_are_named() {
        let changed = |at: usize, to: u8| {
            let mut message = *THEIRS;
            message[at] = to;
            Destination::decode(&message).unwrap_err()
        };
        assert_eq!(changed(0, b'x'), Malformed::Field("LID"));
        assert_eq!(changed(5, b'+'), Malformed::Field("queue pair number"));
        assert_eq!(
            changed(12, b' '),
            Malformed::Field("packet sequence number")
        );
        assert_eq!(changed(50, 0xff), Malformed::Field("GID"));
        assert_eq!(changed(4, b'0'), Malformed::Shape);
        assert_eq!(changed(20, b':'), Malformed::Shape);
        assert_eq!(changed(51, b'0'), Malformed::Shape);
        assert_eq!(Destination::decode(b"done\0"), Err(Malformed::Length(5)));
        assert_eq!(Destination::decode(b""), Err(Malformed::Length(0)));
    }

    proptest! {
        #[test]
        fn a_destination_is_read_as_written(destination in destination()) {
            prop_assert_eq!(Destination::decode(&destination.encode()), Ok(destination));
        }

        /// Any input is refused, or equals its own encoding.
        #[test]
        fn any_input_is_refused_or_equals_its_encoding(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(destination) = Destination::decode(&bytes) {
                prop_assert!(destination.encode().eq_ignore_ascii_case(&bytes));
            }
        }

        /// The same for input that is almost well formed.
        #[test]
        fn one_wrong_byte(destination in destination(), at in 0..MESSAGE, to: u8) {
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
