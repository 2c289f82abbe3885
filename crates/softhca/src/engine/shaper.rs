//! The link of a port with a rate, a delay and a queue: frames that are sent leave later, and
//! may be dropped or marked.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;

use roce::packet::{LinkKind, Packet};

/// Bytes on the cable beside a frame: checksum, preamble and gap.
const FRAME_OVERHEAD: usize = 24;
const ETHERNET_HEADER: usize = 14;
/// A port without a given queue takes no more frames from the device while these bytes wait.
const MAX_BACKLOG: u64 = 256 << 10;
const NANOS: u128 = 1_000_000_000;

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

/// Parses a number with one of these units.
fn number(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text
        .find(|it: char| !it.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    digits.parse::<u64>().ok()?.checked_mul(*factor)
}

impl FromStr for LinkShape {
    type Err = LinkShapeError;

    /// Parses a description such as `25Gbit,delay=5us,jitter=1us,queue=256KiB,ecn=64KiB`.
    fn from_str(text: &str) -> Result<Self, LinkShapeError> {
        const RATES: &[(&str, u64)] =
            &[("Kbit", 1000), ("Mbit", 1_000_000), ("Gbit", 1_000_000_000)];
        const TIMES: &[(&str, u64)] = &[
            ("ns", 1),
            ("us", 1000),
            ("ms", 1_000_000),
            ("s", 1_000_000_000),
        ];
        const SIZES: &[(&str, u64)] = &[("", 1), ("KiB", 1 << 10), ("MiB", 1 << 20)];
        const MAX_TIME: u64 = 10_000_000_000;
        let mut shape = Self::default();
        for part in text.split(',') {
            let refused = |reason| {
                Err(LinkShapeError {
                    part: part.to_owned(),
                    reason,
                })
            };
            let time = |text| number(text, TIMES).filter(|time| *time <= MAX_TIME);
            let size = |text| number(text, SIZES).filter(|size| *size != 0);
            let bad_time = "is no time up to 10s, such as 5us";
            let bad_size = "is no number of bytes, such as 64KiB";
            match part.split_once('=') {
                None => match number(part, RATES).filter(|rate| *rate >= 1000) {
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
                Some(("queue", text)) => match size(text) {
                    Some(queue) => shape.queue = Some(queue),
                    None => return refused(bad_size),
                },
                Some(("ecn", text)) => match size(text) {
                    Some(mark) => shape.mark = Some(mark),
                    None => return refused(bad_size),
                },
                Some(_) => return refused("is unknown; use delay, jitter, queue and ecn"),
            }
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

/// A frame that has not left.
#[derive(Debug)]
struct Waiting {
    due: u64,
    packet: Packet,
}

/// The frames of a port that have not left.
#[derive(Debug)]
pub(crate) struct Shaper {
    shape: LinkShape,
    /// When the last frame is on the cable, in nanoseconds times the rate.
    free_at: u128,
    last_due: u64,
    /// When there is room for further frames, if the device waits for it.
    room_at: Option<u64>,
    waiting: VecDeque<Waiting>,
    random: u64,
}

impl Shaper {
    pub(crate) fn new(shape: LinkShape) -> Self {
        Self {
            shape,
            free_at: 0,
            last_due: 0,
            room_at: None,
            waiting: VecDeque::new(),
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Returns the bytes that wait for the cable.
    fn backlog(&self, now: u64) -> u64 {
        let Some(rate) = self.shape.rate else {
            return 0;
        };
        let ahead = self
            .free_at
            .saturating_sub(u128::from(now) * u128::from(rate));
        (ahead / (8 * NANOS)) as u64
    }

    /// Returns whether the device should send no more for now. If so, there is a deadline.
    pub(crate) fn is_full(&mut self, now: u64) -> bool {
        let is_full = self.shape.queue.is_none() && self.backlog(now) >= MAX_BACKLOG;
        let room = self
            .free_at
            .saturating_sub(u128::from(MAX_BACKLOG) * 8 * NANOS);
        let rate = self.shape.rate.filter(|_| is_full);
        // One byte more, so that there is room by then.
        self.room_at = rate.map(|rate| ((room + 8 * NANOS) / u128::from(rate)) as u64 + 1);
        is_full
    }

    /// Sends a frame. Returns the length of the queue if it is full, and the frame dropped.
    pub(crate) fn push(&mut self, now: u64, mut packet: Packet) -> Result<(), u64> {
        let header = match packet.kind() {
            LinkKind::Ip => ETHERNET_HEADER,
            LinkKind::Ethernet | LinkKind::Ib => 0,
        };
        let length = (packet.frame().len() + header + FRAME_OVERHEAD) as u64;
        let backlog = self.backlog(now);
        if let Some(queue) = self.shape.queue.filter(|queue| backlog + length > *queue) {
            return Err(queue);
        }
        if self.shape.mark.is_some_and(|mark| backlog >= mark) {
            mark_congestion(&mut packet);
        }
        let mut due = now;
        if let Some(rate) = self.shape.rate {
            let rate = u128::from(rate);
            let start = self.free_at.max(u128::from(now) * rate);
            self.free_at = start + u128::from(length) * 8 * NANOS;
            due = self.free_at.div_ceil(rate) as u64;
        }
        due += self.shape.delay;
        if self.shape.jitter != 0 {
            due += self.next_random() % (self.shape.jitter + 1);
        }
        self.last_due = due.max(self.last_due);
        let due = self.last_due;
        self.waiting.push_back(Waiting { due, packet });
        Ok(())
    }

    /// Returns the next frame that has left by `now`.
    pub(crate) fn pop(&mut self, now: u64) -> Option<Packet> {
        self.waiting.front().filter(|it| it.due <= now)?;
        self.waiting.pop_front().map(|it| it.packet)
    }

    /// Returns when the next frame leaves, or there is room for others.
    pub(crate) fn deadline(&self) -> Option<u64> {
        let next = self.waiting.front().map(|it| it.due);
        next.into_iter().chain(self.room_at).min()
    }

    /// Xorshift: jitter needs no better one.
    fn next_random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

/// Marks an IP packet that may be marked as having met congestion.
fn mark_congestion(packet: &mut Packet) {
    const CONGESTION: u8 = 0b11;
    let at = match packet.kind() {
        LinkKind::Ib => return,
        LinkKind::Ip => 0,
        LinkKind::Ethernet => ETHERNET_HEADER,
    };
    let frame = packet.frame_mut();
    let ethertype = frame.get(12..14).map(<[u8]>::to_vec);
    let is_ip = at == 0 || matches!(ethertype.as_deref(), Some([0x08, 0x00] | [0x86, 0xdd]));
    let Some(header) = frame.get_mut(at..at + 20).filter(|_| is_ip) else {
        return;
    };
    match header[0] >> 4 {
        4 if header[1] & CONGESTION != 0 => {
            let before = u16::from_be_bytes([header[0], header[1]]);
            header[1] |= CONGESTION;
            let after = u16::from_be_bytes([header[0], header[1]]);
            // The incremental update of RFC 1624.
            let checksum = u16::from_be_bytes([header[10], header[11]]);
            let mut sum = u32::from(!checksum) + u32::from(!before) + u32::from(after);
            while sum > 0xffff {
                sum = (sum & 0xffff) + (sum >> 16);
            }
            header[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
        }
        6 if header[1] >> 4 & CONGESTION != 0 => header[1] |= CONGESTION << 4,
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use roce::packet::Pool;

    use super::*;

    fn packet(length: usize) -> Packet {
        let mut frame = vec![0; length];
        // IPv4 that may be marked.
        frame[..2].copy_from_slice(&[0x45, 0b10]);
        Pool::new().copy_of(LinkKind::Ip, &frame).unwrap()
    }

    /// Bytes on the cable are 38 more.
    const LENGTH: usize = 962;

    #[test]
    fn frames_leave_at_the_rate_after_the_delay() {
        let mut shaper = Shaper::new("8Mbit,delay=5us".parse().unwrap());
        for _ in 0..3 {
            shaper.push(1000, packet(LENGTH)).unwrap();
        }
        // 1000 bytes take a millisecond.
        assert_eq!(shaper.deadline(), Some(1_006_000));
        assert!(shaper.pop(1_005_999).is_none());
        assert!(shaper.pop(1_006_000).is_some());
        assert_eq!(shaper.deadline(), Some(2_006_000));
        assert_eq!(shaper.backlog(1_001_000), 2000);
        // After a pause, without credit for it.
        while shaper.pop(u64::MAX).is_some() {}
        shaper.push(9_000_000, packet(LENGTH)).unwrap();
        assert_eq!(shaper.deadline(), Some(10_005_000));
    }

    #[test]
    fn a_queue_drops_and_marks() {
        let mut shaper = Shaper::new("8Mbit,queue=3000,ecn=1500".parse().unwrap());
        let pushed: Vec<_> = (0..4).map(|_| shaper.push(0, packet(LENGTH))).collect();
        assert_eq!(pushed, [Ok(()), Ok(()), Ok(()), Err(3000)]);
        let marks: Vec<u8> = std::iter::from_fn(|| shaper.pop(u64::MAX))
            .map(|packet| packet.frame()[1])
            .collect();
        assert_eq!(marks, [0b10, 0b10, 0b11]);
        assert!(!shaper.is_full(0));
        let mut waits = Shaper::new("8Mbit".parse().unwrap());
        for _ in 0..300 {
            waits.push(0, packet(LENGTH)).unwrap();
        }
        assert!(waits.is_full(0));
        // 37,856 bytes too many take as many microseconds.
        assert_eq!(waits.room_at.map(|at| at / 1000), Some(37_857));
        assert!(!waits.is_full(waits.room_at.unwrap()) && waits.room_at.is_none());
    }

    #[test]
    fn a_mark_keeps_the_checksum_right() {
        for (kind, at) in [(LinkKind::Ip, 0), (LinkKind::Ethernet, ETHERNET_HEADER)] {
            let mut frame = vec![0; at + 60];
            if at != 0 {
                frame[12] = 8;
            }
            frame[at..at + 12]
                .copy_from_slice(&[0x45, 1, 0, 60, 0, 0, 0x40, 0, 64, 17, 0x12, 0x34]);
            let sum = |frame: &[u8]| {
                let words = frame[at..at + 20].chunks(2);
                words
                    .map(|it| u32::from(it[0]) << 8 | u32::from(it[1]))
                    .sum::<u32>()
                    % 0xffff
            };
            let before = sum(&frame);
            let mut packet = Pool::new().copy_of(kind, &frame).unwrap();
            mark_congestion(&mut packet);
            assert_eq!(packet.frame()[at + 1], 0b11);
            assert_eq!(sum(packet.frame()), before);
        }
    }

    #[test]
    fn jitter_keeps_the_order() {
        let mut shaper = Shaper::new("delay=1us,jitter=10us".parse().unwrap());
        let mut last = 0;
        for now in 0..1000 {
            shaper.push(now, packet(100)).unwrap();
            let due = shaper.waiting.back().unwrap().due;
            assert!(due >= last && due <= last.max(now + 11_000));
            last = due;
        }
    }

    #[test]
    fn descriptions_are_parsed() {
        let shape = "25Gbit,delay=5us,jitter=100ns,queue=1MiB,ecn=64KiB".parse();
        let expected = LinkShape {
            rate: Some(25_000_000_000),
            delay: 5000,
            jitter: 100,
            queue: Some(1 << 20),
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
            "1Gbit,queue=0",
            "speed=3",
            "1Gbit,",
            "99999999999Gbit",
        ] {
            assert!(bad.parse::<LinkShape>().is_err(), "{bad}");
        }
    }
}
