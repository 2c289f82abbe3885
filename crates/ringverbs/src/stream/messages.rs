//! The stream protocol.
//!
//! Both sides first exchange a [`Hello`] in the private data of the connection request and
//! its answer. Every message is then a send with immediate data: its bytes are bytes of the
//! stream, and the immediate data is an [`ImmediateData`].

use std::io;

/// The receives of one side, which limit the number and length of messages in flight to
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Number of posted receives.
    pub receives: u16,
    /// Length of each in bytes.
    pub size: u32,
}

/// Minimum number of receives; fewer could deadlock (see [`flow`](super::flow)).
pub(super) const MIN_RECEIVES: u16 = 8;

/// Minimum length of a receive.
pub(super) const MIN_SIZE: u32 = 256;

/// Maximum length of a receive; the transport's longest message is 2 GiB.
pub(super) const MAX_SIZE: u32 = 1 << 30;

const MAGIC: [u8; 4] = *b"RVst";
const VERSION: u16 = 1;

/// Length of a hello: magic, version, receives, size, little-endian.
pub(super) const HELLO: usize = 12;

impl Hello {
    pub fn encode(self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.receives.to_le_bytes());
        bytes[8..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    /// # Errors
    /// `InvalidData` if the peer is not a stream, has another version, or sends
    /// values out of range.
    pub fn decode(bytes: &[u8]) -> io::Result<Self> {
        let invalid = |text: &str| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        let Some(bytes) = bytes.first_chunk::<HELLO>() else {
            return invalid("the peer's private data is too short for a stream");
        };
        let [m0, m1, m2, m3, v0, v1, r0, r1, s0, s1, s2, s3] = *bytes;
        if [m0, m1, m2, m3] != MAGIC {
            return invalid("the peer is not a ringverbs stream");
        }
        if u16::from_le_bytes([v0, v1]) != VERSION {
            return invalid("the peer uses another version of the stream protocol");
        }
        let hello = Self {
            receives: u16::from_le_bytes([r0, r1]),
            size: u32::from_le_bytes([s0, s1, s2, s3]),
        };
        if hello.receives < MIN_RECEIVES || !(MIN_SIZE..=MAX_SIZE).contains(&hello.size) {
            return invalid("the peer's number or size of receives is out of range");
        }
        Ok(hello)
    }
}

/// The immediate data of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ImmediateData {
    /// Number of receives that the sender of this message has reposted.
    pub credits: u16,
    /// The end mark of the sender's stream.
    pub fin: bool,
}

const FIN: u32 = 1 << 16;

impl ImmediateData {
    pub fn encode(self) -> u32 {
        u32::from(self.credits) | if self.fin { FIN } else { 0 }
    }

    /// Returns `None` if reserved bits are set.
    pub fn decode(word: u32) -> Option<Self> {
        (word & !(FIN | 0xffff) == 0).then_some(Self {
            credits: word as u16,
            fin: word & FIN != 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padded_hello_is_decoded() {
        let hello = Hello {
            receives: 16,
            size: 65536,
        };
        let mut data = hello.encode().to_vec();
        data.resize(56, 0);
        assert_eq!(Hello::decode(&data).ok(), Some(hello));
    }

    #[test]
    fn malformed_hello_is_refused() {
        let good = Hello {
            receives: 8,
            size: 256,
        };
        assert!(Hello::decode(&good.encode()).is_ok());
        assert!(Hello::decode(&good.encode()[..11]).is_err());
        for (at, value) in [(0, 0), (4, 2), (6, 7), (8, 255), (11, 0x80)] {
            let mut bytes = good.encode();
            bytes[at] = value;
            // 255 in the lowest byte of 256 makes it longer, not wrong.
            assert_eq!(Hello::decode(&bytes).is_ok(), at == 8, "byte {at}");
        }
        let short = Hello { size: 255, ..good };
        assert!(Hello::decode(&short.encode()).is_err());
    }

    #[test]
    fn immediate_data_round_trips_and_reserved_bits_fail() {
        for immediate in [
            ImmediateData::default(),
            ImmediateData {
                credits: u16::MAX,
                fin: true,
            },
            ImmediateData {
                credits: 3,
                fin: false,
            },
        ] {
            assert_eq!(ImmediateData::decode(immediate.encode()), Some(immediate));
        }
        assert_eq!(ImmediateData::decode(1 << 17), None);
        assert_eq!(ImmediateData::decode(1 << 31), None);
    }
}
