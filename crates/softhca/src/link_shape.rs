//! Descriptions of links with a rate, a delay and a queue.

use std::fmt;
use std::str::FromStr;

use crate::units::{TIMES, Unit, parse, parse_size};

/// Properties of a link, of what a port sends. By default none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkShape {
    /// Bits in a second, with all that is on a cable.
    pub rate: Option<u64>,
    /// Delay in nanoseconds.
    pub delay: u64,
    /// Greatest further delay in nanoseconds, at random. Frames stay in order.
    pub jitter: u64,
    /// Bytes that may wait at this rate: further frames are dropped. Without it the device
    /// waits.
    pub queue: Option<u64>,
    /// Whether a full queue stops the device instead (priority flow control).
    pub pause: bool,
    /// Bytes that wait from which on frames are marked as having met congestion (ECN).
    pub mark: Option<u64>,
}

impl LinkShape {
    /// No properties: frames leave at once.
    pub const NONE: LinkShape = LinkShape {
        rate: None,
        delay: 0,
        jitter: 0,
        queue: None,
        pause: false,
        mark: None,
    };

    /// Returns whether the link has any of the properties.
    #[must_use]
    pub fn is_shaped(&self) -> bool {
        *self != Self::NONE
    }
}

/// A part of a description that is wrong, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinkShapeError {
    part: String,
    reason: &'static str,
}

impl fmt::Display for LinkShapeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" {}", self.part, self.reason)
    }
}

impl std::error::Error for LinkShapeError {}

impl FromStr for LinkShape {
    type Err = LinkShapeError;

    /// Parses a description such as `25Gbit,delay=5us,jitter=1us,queue=256KiB,pause,ecn=64KiB`.
    fn from_str(text: &str) -> Result<Self, LinkShapeError> {
        const RATES: [Unit; 3] = [("Gbit", 1_000_000_000), ("Mbit", 1_000_000), ("Kbit", 1000)];
        const MAX_TIME: u64 = 10_000_000_000;
        let mut shape = Self::default();
        for part in text.split(',') {
            let refused = |reason| {
                Err(LinkShapeError {
                    part: part.to_owned(),
                    reason,
                })
            };
            let time = |text| parse(text, &TIMES).filter(|time| *time <= MAX_TIME);
            let bad_time = "is no time up to 10s, such as 5us";
            let bad_size = "is no number of bytes, such as 64KiB";
            match part.split_once('=') {
                None if part == "pause" => shape.pause = true,
                None => match parse(part, &RATES).filter(|rate| *rate >= 1000) {
                    Some(rate) => shape.rate = Some(rate),
                    None => return refused("is no rate, such as 25Gbit"),
                },
                Some(("delay", text)) => match time(text) {
                    Some(delay) => shape.delay = delay,
                    None => return refused(bad_time),
                },
                Some(("jitter", text)) => match time(text) {
                    Some(jitter) => shape.jitter = jitter,
                    None => return refused(bad_time),
                },
                Some(("queue", text)) => match parse_size(text) {
                    Some(queue) => shape.queue = Some(queue),
                    None => return refused(bad_size),
                },
                Some(("ecn", text)) => match parse_size(text) {
                    Some(mark) => shape.mark = Some(mark),
                    None => return refused(bad_size),
                },
                Some(_) => return refused("is unknown; use delay, jitter, queue, pause and ecn"),
            }
        }
        if shape.pause && shape.queue.is_none() {
            return Err(LinkShapeError {
                part: text.to_owned(),
                reason: "has no queue that could pause the device",
            });
        }
        if shape.rate.is_none() && (shape.queue.is_some() || shape.mark.is_some()) {
            return Err(LinkShapeError {
                part: text.to_owned(),
                reason: "has a queue, which takes a rate",
            });
        }
        Ok(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_are_parsed() {
        let shape = "25Gbit,delay=5us,jitter=100ns,queue=1MiB,pause,ecn=64KiB".parse();
        let expected = LinkShape {
            rate: Some(25_000_000_000),
            delay: 5000,
            jitter: 100,
            queue: Some(1 << 20),
            pause: true,
            mark: Some(64 << 10),
        };
        assert_eq!(shape, Ok(expected));
        for bad in [
            "",
            "25",
            "25Gb",
            "0Gbit",
            "delay=5",
            "delay=11s",
            "queue=64KiB",
            "queue=64KiB,pause",
            "1Gbit,pause",
            "1Gbit,queue=64KiB,pause=1",
            "1Gbit,queue=0",
            "speed=3",
            "1Gbit,",
            "99999999999Gbit",
        ] {
            assert!(bad.parse::<LinkShape>().is_err(), "{bad}");
        }
    }
}
