//! The messages of vfio-user: a header of 16 bytes and what follows, all in
//! the host's byte order. Facts from QEMU's `docs/interop/vfio-user.rst`.

/// Bytes of a header.
pub const HEADER: usize = 16;
/// No message is longer.
pub const LONGEST: usize = 64 << 10;

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
const TYPE: u32 = 0xf;

/// The header of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Comes back in the reply.
    pub id: u16,
    /// What is asked.
    pub command: u16,
    /// Bytes, with the header.
    pub size: usize,
    flags: u32,
}

impl Header {
    /// The header at the beginning of `bytes`. An error says what is wrong
    /// with it, after which the stream cannot be followed.
    pub fn parse(bytes: &[u8; HEADER]) -> Result<Header, &'static str> {
        let size = get32(bytes, 4) as usize;
        if !(HEADER..=LONGEST).contains(&size) {
            return Err("a message of an impossible size");
        }
        Ok(Header {
            id: get16(bytes, 0),
            command: get16(bytes, 2),
            size,
            flags: get32(bytes, 8),
        })
    }

    /// Whether it is an answer to something asked by us; we ask nothing.
    pub fn is_reply(&self) -> bool {
        self.flags & TYPE == REPLY
    }

    /// Whether an answer is wanted.
    pub fn wants_reply(&self) -> bool {
        self.flags & NO_REPLY == 0
    }

    /// The header of the answer to this message: with `error`, an errno, or
    /// none.
    pub fn reply(&self, size: usize, error: i32) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[0..2].copy_from_slice(&self.id.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.command.to_ne_bytes());
        bytes[4..8].copy_from_slice(&(size as u32).to_ne_bytes());
        let flags = if error == 0 { REPLY } else { REPLY | ERROR };
        bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
        bytes[12..16].copy_from_slice(&error.to_ne_bytes());
        bytes
    }
}

/// The number at byte `at`; 0 past the end.
pub fn get16(bytes: &[u8], at: usize) -> u16 {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(chunk) => u16::from_ne_bytes(*chunk),
        None => 0,
    }
}

/// The number at byte `at`; 0 past the end.
pub fn get32(bytes: &[u8], at: usize) -> u32 {
    match bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        Some(chunk) => u32::from_ne_bytes(*chunk),
        None => 0,
    }
}

/// The number at byte `at`; 0 past the end.
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
    fn a_header_answers_for_itself() {
        let mut bytes = [0; HEADER];
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
