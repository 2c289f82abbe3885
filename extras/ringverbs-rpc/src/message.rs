//! The wire protocol; all numbers are little endian.
//!
//! Private data of request and answer: `RVrp`, version (16 bits), window (16),
//! message size (32), maximum of a request (32).
//!
//! A message begins with its kind (8 bits), a flag (8), a code (16), the call (32), a length
//! (32), and 0 (32). Requests continue with the memory for the reply: address (64), rkey (32),
//! length (32). The data follows; a request that is read has instead its address (64), rkey
//! (32), and 0 (32).

use ringverbs::RemoteAddr;

use crate::Error;

const MAGIC: &[u8; 4] = b"RVrp";
const VERSION: u16 = 1;
pub const HELLO: usize = 16;

/// Header lengths of a reply, of a request, and of a request that is read.
pub const HEADER: usize = 16;
pub const REQUEST_HEADER: usize = HEADER + 16;
pub const READ_HEADER: usize = REQUEST_HEADER + 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    pub window: u16,
    pub message_size: u32,
    pub max_message: u32,
}

fn malformed<T>(what: &'static str) -> Result<T, Error> {
    Err(Error::Protocol { what })
}

/// Reads numbers from a message of checked length; zeros after the end.
struct Fields<'b>(&'b [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => [0; N],
        }
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn address(&mut self) -> RemoteAddr {
        RemoteAddr::new(u64::from_le_bytes(self.take()), self.u32())
    }
}

impl Hello {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.window.to_le_bytes());
        bytes.extend(self.message_size.to_le_bytes());
        bytes.extend(self.max_message.to_le_bytes());
        bytes
    }

    /// `bytes` may be padded with zeros.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields(bytes);
        if bytes.len() < HELLO || fields.take() != *MAGIC {
            return malformed("protocol");
        }
        if fields.u16() != VERSION {
            return malformed("protocol version");
        }
        let hello = Self {
            window: fields.u16(),
            message_size: fields.u32(),
            max_message: fields.u32(),
        };
        if hello.window == 0 || (hello.message_size as usize) < READ_HEADER {
            return malformed("window or message size");
        }
        Ok(hello)
    }
}

/// Remote memory for a reply; length 0 means none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplyMemory {
    pub at: RemoteAddr,
    pub len: u32,
}

/// A message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A request, followed by its bytes.
    Request { reply: ReplyMemory },
    /// A request that the server reads from the client's memory.
    Read {
        reply: ReplyMemory,
        from: RemoteAddr,
        len: u32,
    },
    /// A reply, followed by its bytes.
    Reply,
    /// The reply was written to the client's memory.
    Written { len: u32 },
    /// The handler refused the request.
    Refused { code: u16 },
    /// The reply is too long for the call.
    TooLong { len: u32 },
    /// The handler panicked.
    Panicked,
}

const REQUEST: u8 = 1;
const READ: u8 = 2;
const REPLY: u8 = 3;
const WRITTEN: u8 = 4;
const REFUSED: u8 = 5;
const TOO_LONG: u8 = 6;
const PANICKED: u8 = 7;

impl Message {
    /// Writes the header and returns its length. `len` is the length of the data that follows.
    pub fn encode(&self, call: u32, len: usize, to: &mut [u8; READ_HEADER]) -> usize {
        let following = u32::try_from(len).unwrap_or(u32::MAX);
        let (kind, code, len) = match *self {
            Self::Request { .. } => (REQUEST, 0, following),
            Self::Read { len, .. } => (READ, 0, len),
            Self::Reply => (REPLY, 0, following),
            Self::Written { len } => (WRITTEN, 0, len),
            Self::Refused { code } => (REFUSED, code, 0),
            Self::TooLong { len } => (TOO_LONG, 0, len),
            Self::Panicked => (PANICKED, 0, 0),
        };
        *to = [0; READ_HEADER];
        to[0] = kind;
        to[2..4].copy_from_slice(&code.to_le_bytes());
        to[4..8].copy_from_slice(&call.to_le_bytes());
        to[8..12].copy_from_slice(&len.to_le_bytes());
        let mut put_memory = |at: usize, memory: RemoteAddr, len: u32| {
            to[at..at + 8].copy_from_slice(&memory.addr.to_le_bytes());
            to[at + 8..at + 12].copy_from_slice(&memory.rkey.to_le_bytes());
            to[at + 12..at + 16].copy_from_slice(&len.to_le_bytes());
        };
        match *self {
            Self::Request { reply } => {
                put_memory(HEADER, reply.at, reply.len);
                REQUEST_HEADER
            }
            Self::Read { reply, from, .. } => {
                put_memory(HEADER, reply.at, reply.len);
                put_memory(REQUEST_HEADER, from, 0);
                READ_HEADER
            }
            _ => HEADER,
        }
    }

    /// Parses a message; returns its call, its header, and the offset of its data.
    pub fn decode(bytes: &[u8]) -> Result<(u32, Self, usize), Error> {
        if bytes.len() < HEADER {
            return malformed("message length");
        }
        let mut fields = Fields(bytes);
        let [kind, flag] = fields.take();
        let (code, call, len) = (fields.u16(), fields.u32(), fields.u32());
        let zero = fields.u32();
        if flag != 0 || zero != 0 || (code != 0 && kind != REFUSED) {
            return malformed("message header");
        }
        let (begin, follows) = match kind {
            REQUEST => (REQUEST_HEADER, len as usize),
            READ => (READ_HEADER, 0),
            REPLY => (HEADER, len as usize),
            WRITTEN | REFUSED | TOO_LONG | PANICKED => (HEADER, 0),
            _ => return malformed("message kind"),
        };
        if bytes.len() - HEADER < begin - HEADER || bytes.len() - begin != follows {
            return malformed("message length");
        }
        let mut memory = || ReplyMemory {
            at: fields.address(),
            len: fields.u32(),
        };
        let message = match kind {
            REQUEST => Self::Request { reply: memory() },
            READ => {
                let (reply, from) = (memory(), memory());
                if from.len != 0 {
                    return malformed("message header");
                }
                let from = from.at;
                Self::Read { reply, from, len }
            }
            REPLY => Self::Reply,
            WRITTEN => Self::Written { len },
            REFUSED => Self::Refused { code },
            TOO_LONG => Self::TooLong { len },
            _ => Self::Panicked,
        };
        Ok((call, message, begin))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages() -> Vec<Message> {
        let at = RemoteAddr::new(0x1234_5678_9abc, 77);
        let reply = ReplyMemory { at, len: 9 };
        let from = at;
        vec![
            Message::Request { reply },
            Message::Read {
                reply,
                from,
                len: 1 << 20,
            },
            Message::Reply,
            Message::Written { len: 5 },
            Message::Refused { code: 7 },
            Message::TooLong { len: 8 },
            Message::Panicked,
        ]
    }

    #[test]
    fn messages_round_trip() {
        for message in messages() {
            let mut header = [0xff; READ_HEADER];
            let takes_bytes = matches!(message, Message::Request { .. } | Message::Reply);
            let payload: &[u8] = if takes_bytes { b"bytes" } else { b"" };
            let begin = message.encode(3, payload.len(), &mut header);
            let mut bytes = header[..begin].to_vec();
            bytes.extend(payload);
            assert_eq!(Message::decode(&bytes).unwrap(), (3, message, begin));
            // Each shorter and longer one is malformed.
            for len in 0..bytes.len() {
                Message::decode(&bytes[..len]).unwrap_err();
            }
            bytes.push(0);
            Message::decode(&bytes).unwrap_err();
        }
    }

    #[test]
    fn random_bytes_are_decoded_or_refused() {
        let mut state = 1_u32;
        for round in 0..100_000_usize {
            let bytes: Vec<u8> = (0..round % 64)
                .map(|at| {
                    state ^= state << 13;
                    state ^= state >> 17;
                    state ^= state << 5;
                    // Mostly plausible kinds.
                    if at == 0 {
                        (state % 9) as u8
                    } else {
                        (state >> 8) as u8 & ((round % 2) as u8 * 0xff)
                    }
                })
                .collect();
            if let Ok((call, message, begin)) = Message::decode(&bytes) {
                let mut header = [0; READ_HEADER];
                let again = message.encode(call, bytes.len() - begin, &mut header);
                assert_eq!((again, &header[..begin]), (begin, &bytes[..begin]));
            }
            let _ = Hello::decode(&bytes);
        }
    }

    #[test]
    fn padded_hello_is_decoded() {
        let hello = Hello {
            window: 3,
            message_size: 4096,
            max_message: 0,
        };
        let mut bytes = hello.encode();
        bytes.resize(56, 0);
        assert_eq!(Hello::decode(&bytes).unwrap(), hello);
        for at in 0..8 {
            let mut other = bytes.clone();
            other[at] ^= 0x83;
            assert!(Hello::decode(&other) != Ok(hello), "{at}");
        }
        Hello::decode(&bytes[..HELLO - 1]).unwrap_err();
        let none = Hello { window: 0, ..hello };
        Hello::decode(&none.encode()).unwrap_err();
    }
}
