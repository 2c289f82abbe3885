//! BTH opcodes: a service class in the upper three bits, an operation in the lower
//! five.

use super::header::DCETH_BYTES;

/// The service class in an opcode's upper three bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Class {
    /// Reliable connection.
    Rc = 0 << 5,
    /// Unreliable connection.
    Uc = 1 << 5,
    /// Unreliable datagram.
    Ud = 3 << 5,
    /// Extended reliable connection.
    Xrc = 5 << 5,
    /// Dynamic connections; the specification leaves this value to manufacturers.
    Dc = 6 << 5,
}

/// The opcode of a congestion notification packet (CNP), which belongs to no service
/// class (IBA A17.9.3). Sixteen reserved bytes follow its BTH.
pub const CNP: u8 = 0x81;

/// The operation in an opcode's lower five bits.
#[allow(missing_docs, reason = "the specification's names")]
pub mod op {
    pub const SEND_FIRST: u8 = 0x00;
    pub const SEND_MIDDLE: u8 = 0x01;
    pub const SEND_LAST: u8 = 0x02;
    pub const SEND_LAST_IMM: u8 = 0x03;
    pub const SEND_ONLY: u8 = 0x04;
    pub const SEND_ONLY_IMM: u8 = 0x05;
    pub const WRITE_FIRST: u8 = 0x06;
    pub const WRITE_MIDDLE: u8 = 0x07;
    pub const WRITE_LAST: u8 = 0x08;
    pub const WRITE_LAST_IMM: u8 = 0x09;
    pub const WRITE_ONLY: u8 = 0x0a;
    pub const WRITE_ONLY_IMM: u8 = 0x0b;
    pub const READ_REQUEST: u8 = 0x0c;
    pub const READ_RESPONSE_FIRST: u8 = 0x0d;
    pub const READ_RESPONSE_MIDDLE: u8 = 0x0e;
    pub const READ_RESPONSE_LAST: u8 = 0x0f;
    pub const READ_RESPONSE_ONLY: u8 = 0x10;
    pub const ACKNOWLEDGE: u8 = 0x11;
    pub const ATOMIC_ACKNOWLEDGE: u8 = 0x12;
    pub const COMPARE_SWAP: u8 = 0x13;
    pub const FETCH_ADD: u8 = 0x14;
    pub const SEND_LAST_INV: u8 = 0x16;
    pub const SEND_ONLY_INV: u8 = 0x17;
}

/// Flags of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OpcodeFlags(u16);

#[allow(missing_docs, reason = "named after headers and positions")]
impl OpcodeFlags {
    pub const SEND: Self = Self(1 << 0);
    pub const WRITE: Self = Self(1 << 1);
    pub const READ: Self = Self(1 << 2);
    pub const ATOMIC: Self = Self(1 << 3);
    /// Sent by the responder to the requester.
    pub const RESPONSE: Self = Self(1 << 4);
    /// Begins a message (first, only).
    pub const START: Self = Self(1 << 5);
    /// Ends a message (last, only).
    pub const END: Self = Self(1 << 6);
    pub const IMM: Self = Self(1 << 7);
    pub const INVALIDATE: Self = Self(1 << 8);
    pub const RETH: Self = Self(1 << 9);
    pub const AETH: Self = Self(1 << 10);
    /// May have a payload.
    pub const PAYLOAD: Self = Self(1 << 11);
    const VALID: Self = Self(1 << 12);

    const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether any bit of `other` is set.
    #[inline]
    #[must_use]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

const fn flags_of(operation: u8) -> OpcodeFlags {
    use OpcodeFlags as F;
    let send = F::SEND.or(F::PAYLOAD).or(F::VALID);
    let write = F::WRITE.or(F::PAYLOAD).or(F::VALID);
    let only = F::START.or(F::END);
    let response = F::RESPONSE.or(F::VALID);
    let read_response = response.or(F::READ).or(F::PAYLOAD);
    match operation {
        op::SEND_FIRST => send.or(F::START),
        op::SEND_MIDDLE => send,
        op::SEND_LAST => send.or(F::END),
        op::SEND_LAST_IMM => send.or(F::END).or(F::IMM),
        op::SEND_ONLY => send.or(only),
        op::SEND_ONLY_IMM => send.or(only).or(F::IMM),
        op::SEND_LAST_INV => send.or(F::END).or(F::INVALIDATE),
        op::SEND_ONLY_INV => send.or(only).or(F::INVALIDATE),
        op::WRITE_FIRST => write.or(F::START).or(F::RETH),
        op::WRITE_MIDDLE => write,
        op::WRITE_LAST => write.or(F::END),
        op::WRITE_LAST_IMM => write.or(F::END).or(F::IMM),
        op::WRITE_ONLY => write.or(only).or(F::RETH),
        op::WRITE_ONLY_IMM => write.or(only).or(F::RETH).or(F::IMM),
        op::READ_REQUEST => F::READ.or(F::VALID).or(only).or(F::RETH),
        op::READ_RESPONSE_FIRST => read_response.or(F::START).or(F::AETH),
        op::READ_RESPONSE_MIDDLE => read_response,
        op::READ_RESPONSE_LAST => read_response.or(F::END).or(F::AETH),
        op::READ_RESPONSE_ONLY => read_response.or(only).or(F::AETH),
        op::ACKNOWLEDGE => response.or(F::AETH).or(only),
        op::ATOMIC_ACKNOWLEDGE => response.or(F::ATOMIC).or(F::AETH).or(only),
        op::COMPARE_SWAP | op::FETCH_ADD => F::ATOMIC.or(F::VALID).or(only),
        _ => F(0),
    }
}

const FLAGS: [OpcodeFlags; 32] = {
    let mut table = [OpcodeFlags(0); 32];
    let mut i = 0;
    while i < 32 {
        table[i] = flags_of(i as u8);
        i += 1;
    }
    table
};

/// A valid opcode, split into service class and operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Opcode {
    /// The service class.
    pub class: Class,
    /// One of [`op`].
    pub operation: u8,
}

impl Opcode {
    /// Decodes an opcode byte. Returns none if it is reserved or if its service
    /// class does not have the operation.
    #[inline]
    #[must_use]
    pub fn decode(byte: u8) -> Option<Self> {
        let operation = byte & 0x1f;
        let flags = FLAGS[usize::from(operation)];
        if !flags.has(OpcodeFlags::VALID) {
            return None;
        }
        let unreliable = !flags.has(OpcodeFlags(
            OpcodeFlags::RESPONSE.0
                | OpcodeFlags::ATOMIC.0
                | OpcodeFlags::READ.0
                | OpcodeFlags::INVALIDATE.0,
        ));
        let class = match byte >> 5 {
            0 => Class::Rc,
            1 if unreliable => Class::Uc,
            3 if operation == op::SEND_ONLY || operation == op::SEND_ONLY_IMM => Class::Ud,
            5 => Class::Xrc,
            6 => Class::Dc,
            _ => return None,
        };
        Some(Self { class, operation })
    }

    /// The byte on the wire.
    #[inline]
    #[must_use]
    pub const fn encode(self) -> u8 {
        self.class as u8 | self.operation
    }

    /// The properties of the operation.
    #[inline]
    #[must_use]
    pub const fn flags(self) -> OpcodeFlags {
        FLAGS[(self.operation & 0x1f) as usize]
    }

    /// Bytes of the extended headers that follow the BTH.
    #[inline]
    #[must_use]
    pub const fn extended_length(self) -> usize {
        let flags = self.flags();
        let mut length = 0;
        match self.class {
            Class::Ud => length += 8,
            Class::Xrc if !flags.has(OpcodeFlags::RESPONSE) => length += 4,
            Class::Dc if !flags.has(OpcodeFlags::RESPONSE) => length += DCETH_BYTES,
            _ => {}
        }
        if flags.has(OpcodeFlags::RETH) {
            length += 16;
        }
        if flags.has(OpcodeFlags::AETH) {
            length += 4;
        }
        if flags.has(OpcodeFlags::ATOMIC) {
            length += if flags.has(OpcodeFlags::RESPONSE) {
                8
            } else {
                28
            };
        }
        if flags.has(OpcodeFlags::IMM) || flags.has(OpcodeFlags::INVALIDATE) {
            length += 4;
        }
        length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_and_encode_agree() {
        let mut valid = 0;
        for byte in 0..=255u8 {
            if let Some(opcode) = Opcode::decode(byte) {
                assert_eq!(opcode.encode(), byte);
                valid += 1;
            }
        }
        // RC, XRC and DC have 23 operations, UC 12, UD 2.
        assert_eq!(valid, 23 + 23 + 23 + 12 + 2);
    }

    #[test]
    fn lengths_of_extended_headers() {
        let length = |byte| Opcode::decode(byte).unwrap().extended_length();
        assert_eq!(length(0x04), 0); // RC SEND only
        assert_eq!(length(0x05), 4); // + ImmDt
        assert_eq!(length(0x0a), 16); // RC WRITE only: RETH
        assert_eq!(length(0x0b), 20);
        assert_eq!(length(0x07), 0);
        assert_eq!(length(0x0c), 16);
        assert_eq!(length(0x0d), 4);
        assert_eq!(length(0x0e), 0);
        assert_eq!(length(0x11), 4);
        assert_eq!(length(0x12), 12);
        assert_eq!(length(0x13), 28);
        assert_eq!(length(0x64), 8); // UD: DETH
        assert_eq!(length(0x65), 12);
        assert_eq!(length(0xa7), 4); // XRC WRITE middle: XRCETH
        assert_eq!(length(0xaa), 20);
        assert_eq!(length(0xb1), 4);
        assert_eq!(length(0xca), 40); // DC WRITE only: DCETH, RETH
        assert_eq!(length(0xd1), 4);
    }
}
