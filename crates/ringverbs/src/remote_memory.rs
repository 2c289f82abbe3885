//! Addresses of remote memory, for exchange between peers.

use std::fmt;
use std::str::FromStr;

use crate::{Error, ForeignRegion, MemorySlice, RemoteAddr, RemoteRegion, Result};

/// Remote memory: an address with its rkey, and a length.
///
/// The owner of the memory sends it to its peers: as text (`Display`, `FromStr`:
/// address, length and rkey in hexadecimal, separated by colons), with serde, or in
/// a [`Hello`](crate::handshake::Hello). The length is the owner's claim; the owner's
/// device checks each access in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RemoteMemory {
    key: RemoteAddr,
    len: usize,
}

impl RemoteMemory {
    /// Creates a value from an address and a length; `None` if the memory would exceed the
    /// address space.
    pub fn new(key: RemoteAddr, len: usize) -> Option<Self> {
        let last = len.saturating_sub(1) as u64;
        key.addr.checked_add(last).map(|_| Self { key, len })
    }

    /// Returns the address of the first byte.
    pub fn key(&self) -> RemoteAddr {
        self.key
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`Error::Limit`] if they exceed the memory.
    pub fn at(&self, offset: usize, len: usize) -> Result<RemoteAddr> {
        if offset > self.len || len > self.len - offset {
            return Err(Error::Limit {
                what: "bytes of remote memory",
                asked: offset.saturating_add(len) as u64,
                allowed: self.len as u64,
            });
        }
        Ok(self.key.offset(offset))
    }
}

impl RemoteRegion {
    /// Returns address, rkey and length, for a peer.
    pub fn remote(&self) -> RemoteMemory {
        let (key, len) = (self.key(), self.len());
        RemoteMemory { key, len }
    }
}

impl ForeignRegion {
    /// Returns address, rkey and length, for a peer.
    pub fn remote(&self) -> RemoteMemory {
        let (key, len) = (self.key(), self.len());
        RemoteMemory { key, len }
    }
}

impl MemorySlice {
    /// Returns address, rkey and length, for a peer.
    pub fn remote(&self) -> RemoteMemory {
        let (key, len) = (self.key(), self.len());
        RemoteMemory { key, len }
    }
}

/// Parses hexadecimal numbers separated by colons, each of up to `digits` digits.
fn numbers<const N: usize>(text: &str, digits: [usize; N]) -> Option<[u64; N]> {
    let mut parts = text.trim().split(':');
    let mut numbers = [0; N];
    for (number, digits) in numbers.iter_mut().zip(digits) {
        let part = parts.next()?;
        let is_hexadecimal = part.bytes().all(|byte| byte.is_ascii_hexdigit());
        if !(1..=digits).contains(&part.len()) || !is_hexadecimal {
            return None;
        }
        *number = u64::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(numbers)
}

impl fmt::Display for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RemoteAddr { addr, rkey } = self.key;
        write!(f, "{addr:016x}:{:x}:{rkey:08x}", self.len)
    }
}

impl FromStr for RemoteMemory {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parse = || {
            let [addr, len, rkey] = numbers(text, [16, 16, 8])?;
            Self::new(RemoteAddr::new(addr, rkey as u32), len.try_into().ok()?)
        };
        parse().ok_or(Error::Parse {
            expected: "remote memory (address:length:rkey in hexadecimal)",
        })
    }
}

impl fmt::Display for RemoteAddr {
    /// Address and rkey in hexadecimal, separated by a colon.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}:{:08x}", self.addr, self.rkey)
    }
}

impl FromStr for RemoteAddr {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let [addr, rkey] = numbers(text, [16, 8]).ok_or(Error::Parse {
            expected: "a remote address (address:rkey in hexadecimal)",
        })?;
        Ok(Self::new(addr, rkey as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        for (addr, len, rkey) in [
            (0, 0, 0),
            (0, usize::MAX, u32::MAX),
            (u64::MAX, 1, 1),
            (0x7f12_3456_7000, 4096, 0xabcd),
        ] {
            let key = RemoteAddr::new(addr, rkey);
            assert_eq!(key.to_string().parse::<RemoteAddr>().unwrap(), key);
            let memory = RemoteMemory::new(key, len).unwrap();
            assert_eq!(memory.to_string().parse::<RemoteMemory>().unwrap(), memory);
        }
    }

    #[test]
    fn malformed_text_is_refused() {
        for text in [
            "",
            ":",
            "1",
            "1:",
            "1:2:3",
            "+1:2",
            "1:+2",
            "0x1:2",
            "10000000000000000:1",
            "00000000000000001:1",
            "1:100000000",
            "1: 2",
            "g:1",
        ] {
            assert!(text.parse::<RemoteAddr>().is_err(), "{text}");
        }
        for text in [
            "1:2",
            "1:2:3:4",
            "1::3",
            "ffffffffffffffff:2:0",
            "2:ffffffffffffffff:0",
        ] {
            assert!(text.parse::<RemoteMemory>().is_err(), "{text}");
        }
    }

    #[test]
    fn at_checks_the_range() {
        let memory = RemoteMemory::new(RemoteAddr::new(100, 7), 10).unwrap();
        assert_eq!(memory.at(10, 0).unwrap().addr, 110);
        assert_eq!(memory.at(3, 7).unwrap().addr, 103);
        for (offset, len) in [(11, 0), (3, 8), (usize::MAX, 2), (0, usize::MAX)] {
            assert!(matches!(memory.at(offset, len), Err(Error::Limit { .. })));
        }
    }
}
