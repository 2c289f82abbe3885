//! The link of a port with a rate, a delay and a queue: frames that are sent leave later, and
//! may be dropped or marked.

use std::collections::VecDeque;

use roce::packet::{LinkKind, Packet};

use crate::link_shape::LinkShape;

/// Bytes on the cable beside a frame: checksum, preamble and gap.
const FRAME_OVERHEAD: usize = 24;
const ETHERNET_HEADER: usize = 14;
/// A port without a given queue takes no more frames from the device while these bytes wait.
const MAX_BACKLOG: u64 = 256 << 10;
const NANOS: u128 = 1_000_000_000;

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

    /// Returns the bytes that stop the device while they wait; `None` if further frames are
    /// dropped.
    fn limit(&self) -> Option<u64> {
        match self.shape.queue {
            None => Some(MAX_BACKLOG),
            paused => paused.filter(|_| self.shape.pause),
        }
    }

    /// Returns whether the device should send no more for now. If so, there is a deadline.
    pub(crate) fn is_full(&mut self, now: u64) -> bool {
        let limit = self.limit();
        let is_full = limit.is_some_and(|limit| self.backlog(now) >= limit);
        let waiting = u128::from(limit.unwrap_or(0)) * 8 * NANOS;
        let room = self.free_at.saturating_sub(waiting);
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
        let drops = |queue: &u64| !self.shape.pause && backlog + length > *queue;
        if let Some(queue) = self.shape.queue.filter(drops) {
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
    fn a_queue_that_pauses_drops_nothing() {
        let mut shaper = Shaper::new("8Mbit,queue=3000,pause".parse().unwrap());
        for _ in 0..3 {
            assert!(!shaper.is_full(0));
            shaper.push(0, packet(LENGTH)).unwrap();
        }
        assert!(shaper.is_full(0));
        // What the device had begun is sent all the same.
        shaper.push(0, packet(LENGTH)).unwrap();
        assert!(shaper.is_full(1_000_000));
        let room_at = shaper.room_at.unwrap();
        assert_eq!(room_at / 1000, 1001);
        assert!(!shaper.is_full(room_at));
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
}
