//! vfio-user messages: a header of 16 bytes and a body, in host byte order, as
//! specified in QEMU's `docs/interop/vfio-user.rst`.

/// Bytes of a header.
pub const HEADER_SIZE: usize = 16;
/// Limit of a message's size in bytes, with its header.
pub const MAX_MESSAGE: usize = 64 << 10;

/// Commands.
#[allow(missing_docs)]
pub mod command {
    pub const VERSION: u16 = 1;
    pub const DMA_MAP: u16 = 2;
    pub const DMA_UNMAP: u16 = 3;
    pub const GET_INFO: u16 = 4;
    pub const GET_REGION_INFO: u16 = 5;
    pub const GET_REGION_IO_FDS: u16 = 6;
    pub const GET_IRQ_INFO: u16 = 7;
    pub const SET_IRQS: u16 = 8;
    pub const REGION_READ: u16 = 9;
    pub const REGION_WRITE: u16 = 10;
    pub const RESET: u16 = 13;
    pub const REGION_WRITE_MULTI: u16 = 15;
}

const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;
const TYPE_MASK: u32 = 0xf;

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Message ID, repeated in the reply.
    pub id: u16,
    /// Command code.
    pub command: u16,
    /// Size in bytes, including the header.
    pub size: usize,
    flags: u32,
}

impl Header {
    /// Parses a header. After an error the stream is out of sync.
    pub fn parse(bytes: &[u8; HEADER_SIZE]) -> Result<Header, &'static str> {
        let size = get32(bytes, 4) as usize;
        if !(HEADER_SIZE..=MAX_MESSAGE).contains(&size) {
            return Err("a message with an invalid size");
        }
        Ok(Header {
            id: get16(bytes, 0),
            command: get16(bytes, 2),
            size,
            flags: get32(bytes, 8),
        })
    }

    /// Whether the message is a reply. This server sends no requests.
    pub fn is_reply(&self) -> bool {
        self.flags & TYPE_MASK == REPLY
    }

    /// Whether the sender expects a reply.
    pub fn wants_reply(&self) -> bool {
        self.flags & NO_REPLY == 0
    }

    /// Returns the header of the reply. `error` is an errno, or 0 for success.
    pub fn reply(&self, size: usize, error: i32) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[0..2].copy_from_slice(&self.id.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.command.to_ne_bytes());
        bytes[4..8].copy_from_slice(&(size as u32).to_ne_bytes());
        let flags = if error == 0 { REPLY } else { REPLY | ERROR };
        bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
        bytes[12..16].copy_from_slice(&error.to_ne_bytes());
        bytes
    }
}

/// Reads a 16-bit integer at byte `at`; 0 past the end.
pub fn get16(bytes: &[u8], at: usize) -> u16 {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(chunk) => u16::from_ne_bytes(*chunk),
        None => 0,
    }
}

/// Reads a 32-bit integer at byte `at`; 0 past the end.
pub fn get32(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(chunk) => u32::from_ne_bytes(*chunk),
        None => 0,
    }
}

/// Reads a 64-bit integer at byte `at`; 0 past the end.
pub fn get64(bytes: &[u8], at: usize) -> u64 {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(chunk) => u64::from_ne_bytes(*chunk),
        None => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_parsed_and_replied_to() {
        let mut bytes = [0; HEADER_SIZE];
        bytes[0] = 7;
        bytes[2] = command::GET_INFO as u8;
        bytes[4] = 32;
        let header = Header::parse(&bytes).unwrap();
        assert_eq!((header.id, header.command, header.size), (7, 4, 32));
        assert!(header.wants_reply() && !header.is_reply());
        let reply = Header::parse(&header.reply(16, 22)).unwrap();
        assert!(reply.is_reply());
        bytes[4] = 15;
        assert!(Header::parse(&bytes).is_err());
        bytes[4..8].fill(0xff);
        assert!(Header::parse(&bytes).is_err());
    }
}
