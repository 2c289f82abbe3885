//! Encoded values: MTU and timeouts.

use std::fmt;
use std::time::Duration;

/// The path MTU: maximum payload bytes of a packet (`enum ibv_mtu`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256 = 1,
    /// 512 bytes.
    Bytes512 = 2,
    /// 1024 bytes.
    Bytes1024 = 3,
    /// 2048 bytes.
    Bytes2048 = 4,
    /// 4096 bytes.
    Bytes4096 = 5,
}

impl Mtu {
    /// Returns the MTU with this code, 1 to 5.
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Bytes256,
            2 => Self::Bytes512,
            3 => Self::Bytes1024,
            4 => Self::Bytes2048,
            5 => Self::Bytes4096,
            _ => return None,
        })
    }

    /// Returns the code.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the MTU in bytes.
    pub const fn bytes(self) -> u32 {
        128 << self as u8
    }
}

impl fmt::Display for Mtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

/// Time after which a reliable connection retransmits if there was no
/// acknowledgement ("local ACK timeout", IBA 9.7.6.1.3): 4.096 µs × 2^code.
/// Devices may wait up to four times as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AckTimeout(u8);

impl AckTimeout {
    /// No timeout: lost packets are never retransmitted.
    pub const NEVER: Self = Self(0);

    /// Returns the timeout with this code, 0 to 31; 0 is [`NEVER`](Self::NEVER).
    pub const fn from_code(code: u8) -> Option<Self> {
        if code < 32 { Some(Self(code)) } else { None }
    }

    /// Returns the code.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Returns the time; `None` for [`NEVER`](Self::NEVER).
    pub const fn duration(self) -> Option<Duration> {
        match self.0 {
            0 => None,
            code => Some(Duration::from_nanos(4096 << code)),
        }
    }
}

impl Default for AckTimeout {
    /// Code 14, 67 ms.
    fn default() -> Self {
        Self(14)
    }
}

impl From<Duration> for AckTimeout {
    /// Rounds up to the next code, from 8.192 µs to 2.4 hours. A longer time becomes
    /// [`NEVER`](Self::NEVER).
    fn from(time: Duration) -> Self {
        let codes = (1..32).map(Self);
        let mut enough = codes.filter(|code| code.duration() >= Some(time));
        enough.next().unwrap_or(Self::NEVER)
    }
}

/// Time that a peer waits before it retries a message that found no receive posted here
/// ("RNR NAK timer", IBA 9.7.5.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RnrTimer(u8);

/// Times by code, in units of 10 µs.
const RNR_TIMES: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

impl RnrTimer {
    /// Returns the time with this code, 0 to 31; 0 is the longest.
    pub const fn from_code(code: u8) -> Option<Self> {
        if code < 32 { Some(Self(code)) } else { None }
    }

    /// Returns the code.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Returns the time.
    pub const fn duration(self) -> Duration {
        Duration::from_micros(RNR_TIMES[self.0 as usize % 32] as u64 * 10)
    }
}

impl Default for RnrTimer {
    /// Code 12, 0.64 ms.
    fn default() -> Self {
        Self(12)
    }
}

impl From<Duration> for RnrTimer {
    /// Rounds up to the next code, from 10 µs to 655.36 ms. A longer time becomes the
    /// longest.
    fn from(time: Duration) -> Self {
        let mut codes = (1..32).map(Self);
        codes
            .find(|code| code.duration() >= time)
            .unwrap_or(Self(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes_round_trip() {
        let all: Vec<_> = (0..=u8::MAX).filter_map(Mtu::from_code).collect();
        assert_eq!(all.len(), 5);
        let bytes: Vec<_> = all.iter().map(|mtu| mtu.bytes()).collect();
        assert_eq!(bytes, [256, 512, 1024, 2048, 4096]);
        assert!(
            all.iter()
                .all(|mtu| Mtu::from_code(mtu.code()) == Some(*mtu))
        );
        assert_eq!(Mtu::Bytes1024.to_string(), "1024");
    }

    #[test]
    fn times_round_up_to_the_next_code() {
        let micros = Duration::from_micros;
        let ack = |time| AckTimeout::from(time).code();
        assert_eq!(ack(Duration::ZERO), 1);
        assert_eq!(ack(Duration::from_nanos(8192)), 1);
        assert_eq!(ack(Duration::from_nanos(8193)), 2);
        assert_eq!(ack(micros(67_000)), 14);
        assert_eq!(ack(Duration::from_secs(8796)), 31);
        assert_eq!(ack(Duration::from_secs(8797)), AckTimeout::NEVER.code());
        let rnr = |time| RnrTimer::from(time).code();
        assert_eq!(rnr(Duration::ZERO), 1);
        assert_eq!(rnr(micros(10)), 1);
        assert_eq!(rnr(Duration::from_nanos(10_001)), 2);
        assert_eq!(rnr(micros(640)), 12);
        assert_eq!(rnr(micros(491_520)), 31);
        assert_eq!(rnr(micros(491_521)), 0);
        assert_eq!(rnr(Duration::MAX), 0);
    }

    #[test]
    fn timer_codes_round_trip() {
        for code in 0..32 {
            let rnr = RnrTimer::from_code(code).unwrap();
            assert_eq!(RnrTimer::from(rnr.duration()), rnr);
            let ack = AckTimeout::from_code(code).unwrap();
            let again = ack.duration().map_or(AckTimeout::NEVER, AckTimeout::from);
            assert_eq!(again, ack);
        }
        assert_eq!(AckTimeout::from_code(32), None);
        assert_eq!(RnrTimer::from_code(32), None);
    }
}
