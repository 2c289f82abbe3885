//! Congestion control, for networks that lose packets.
//!
//! | event | reaction |
//! |---|---|
//! | a packet with a payload arrives with a congestion mark (ECN) | The peer is sent a congestion notification (CNP), at most one in 50 µs. |
//! | a CNP arrives | The rate at which the queue pair sends is cut, and grows again by the law of DCQCN ([`Rate`]). |
//! | more than an eighth of a window is lost, or probes get no response | The window is halved; it doubles with each window that arrives. |
//!
//! Marks, CNPs and that they lower the rate: IBA A17.9.3, which leaves the law to the device.
//!
//! A CNP affects one queue pair, which continues with at least [`MIN_RATE`], so a forged
//! CNP can only delay it.

use super::io::Io;
use super::qp::Qp;
use super::state::{Pending, Reply};
use crate::packet::{Bth, CE, CNP, ECT0, Link, PacketBuilder, Path, Psn, Roce, Template, View};

/// Window of a network that loses no packets, in packets.
pub(super) const WINDOW: u32 = 128;
/// Windows of other networks: of a new connection, whose path is unknown; the smallest;
/// and the largest, for which a socket buffer has room by default.
pub(super) const INITIAL_WINDOW: u32 = 32;
const MIN_WINDOW: u32 = 8;
const MAX_WINDOW: u32 = 256;

/// Shortest time between two CNPs of a queue pair, in nanoseconds.
const CNP_INTERVAL: u64 = 50_000;
/// Traffic class of a CNP: DSCP 48, as a ConnectX has it, without ECN.
const CNP_CLASS: u8 = 48 << 2;
/// Length of the reserved bytes of a CNP.
const CNP_PAYLOAD: usize = 16;
/// The BECN bit of a BTH, in the byte before the queue pair's number. ConnectX sets it; to
/// IBA A17.4.8 it is unused.
const BECN: (usize, u8) = (4, 0x40);
/// Distance of a CNP's PSN before the expected one. It is 0 in IBA A17.9.3, and ConnectX
/// ignores it, but rdma_rxe treats a CNP as an acknowledgement, and discards an old one.
const CNP_PSN_OFFSET: u32 = Psn::RANGE / 4;

/// Lowest rate, and the rate at which the limit ends, in bytes per second.
const MIN_RATE: u64 = 1_000_000;
const MAX_RATE: u64 = 12_500_000_000;
/// Additive increase of the rate in a period, in bytes per second.
const RATE_INCREASE: u64 = 256 * 1024;
/// Periods of fast recovery, each of which halves the distance to the rate before the cut.
/// As many periods of additive increase follow, then those of hyper increase.
const FAST_RECOVERY_PERIODS: u32 = 5;
/// Bounds of the period, which is a round trip: it has one cut or one increase. A period
/// that was not measured, as for read responses, is assumed to be long, or the
/// notifications of one full queue would cut the rate repeatedly.
const MIN_PERIOD: u64 = 1_000_000;
const DEFAULT_PERIOD: u64 = 5_000_000;
const MAX_PERIOD: u64 = 20_000_000;
/// 1 in the fixed-point format of `alpha`, and the shift of its gain.
const ONE: u32 = 1 << 16;
const GAIN: u32 = 4;
/// Time by which packets may be ahead of or behind the rate, since a sleeping thread wakes
/// later than requested.
const BURST: u64 = 100_000;
/// Longest pause after a packet, however much was retransmitted.
const MAX_PAUSE: u64 = 50_000_000;
/// Time over which the send rate is measured.
const METER_INTERVAL: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// Rate limit of a queue pair that received CNPs: DCQCN, with one cut in a round trip,
/// since a software queue takes longer to drain than that of hardware. `alpha` estimates
/// the share of periods with a CNP; a cut reduces the rate by half of this share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    /// Current limit and the limit before the cut, in bytes per second.
    current: u64,
    target: u64,
    alpha: u32,
    /// Periods since the cut.
    periods: u32,
    period: u64,
    cut_at: u64,
    /// Start of the period.
    period_start: u64,
    /// When the next packet is due.
    next: u64,
}

impl Rate {
    /// Creates a limit by a cut of the send rate.
    fn new(now: u64, send_rate: u64, round_trip: u64) -> Self {
        let mut rate = Self {
            current: MAX_RATE,
            target: MAX_RATE,
            alpha: ONE,
            periods: 0,
            period: 0,
            cut_at: now,
            period_start: now,
            next: now,
        };
        rate.cut(now, send_rate, round_trip);
        rate
    }

    /// Cuts the rate, at most once in a period. The send rate is less than the limit if
    /// something else limits it.
    fn cut(&mut self, now: u64, send_rate: u64, round_trip: u64) {
        if now.saturating_sub(self.cut_at) < self.period {
            return;
        }
        self.target = self.current.min(send_rate).max(MIN_RATE);
        let part = self.target.saturating_mul(u64::from(self.alpha)) / u64::from(2 * ONE);
        self.current = (self.target - part).max(MIN_RATE);
        self.alpha += (ONE - self.alpha) >> GAIN;
        self.periods = 0;
        self.period = match round_trip {
            0 => DEFAULT_PERIOD,
            trip => trip.clamp(MIN_PERIOD, MAX_PERIOD),
        };
        (self.cut_at, self.period_start) = (now, now);
    }

    /// Increases the rate for the periods that have passed. Returns whether the limit has
    /// ended, after some hundred periods without a cut.
    fn grow(&mut self, now: u64) -> bool {
        while now.saturating_sub(self.period_start) >= self.period {
            self.period_start += self.period;
            self.alpha -= self.alpha >> GAIN;
            self.periods += 1;
            if self.periods > FAST_RECOVERY_PERIODS {
                let faster = self
                    .periods
                    .saturating_sub(2 * FAST_RECOVERY_PERIODS)
                    .max(1);
                self.target += RATE_INCREASE * u64::from(faster);
            }
            self.current = (self.current + self.target).div_ceil(2);
            if self.current >= MAX_RATE {
                return true;
            }
        }
        false
    }

    /// Accounts for a packet. Returns the time of the next packet if sending must pause.
    fn send(&mut self, now: u64, length: u64) -> Option<u64> {
        let time = length * SECOND / self.current;
        let next = self.next.max(now.saturating_sub(BURST)) + time;
        self.next = next.min(now + MAX_PAUSE);
        (self.next > now + BURST).then_some(self.next)
    }
}

/// Measures the send rate, excluding pauses.
#[derive(Default)]
struct RateMeter {
    start: u64,
    last: u64,
    bytes: u64,
    /// Rate of the last interval; 0 before its end.
    rate: u64,
}

impl RateMeter {
    fn record(&mut self, now: u64, length: u64) {
        if now.saturating_sub(self.start) >= METER_INTERVAL {
            let paused = now.saturating_sub(self.last) >= METER_INTERVAL;
            self.rate = self.rate_until(if paused { self.last } else { now });
            (self.start, self.bytes) = (now, 0);
        }
        self.last = now;
        self.bytes += length;
    }

    fn rate_until(&self, end: u64) -> u64 {
        let time = end.saturating_sub(self.start).max(BURST);
        self.bytes.saturating_mul(SECOND) / time
    }

    fn rate(&self, now: u64) -> u64 {
        match self.rate {
            0 => self.rate_until(now),
            rate => rate,
        }
    }
}

/// Congestion state of a queue pair.
#[derive(Default)]
pub(super) struct Congestion {
    /// When the last CNP was sent.
    cnp_sent_at: Option<u64>,
    meter: RateMeter,
    rate: Option<Rate>,
    /// Packets that the rate limits are not sent before this time.
    pub paused_until: Option<u64>,
    /// Packets sent again since the window was set, and the PSN at which it is adapted.
    pub lost: u32,
    round_end: Psn,
}

impl<L> Qp<L> {
    /// Returns the path with ECT(0), unless the program requests ECT(1), if this queue pair
    /// controls congestion.
    pub fn ecn_capable(&self, mut path: Path) -> Path {
        let marked = self.paces && path.roce == Roce::V2 && !matches!(path.link, Link::Ib { .. });
        if let Some(grh) = path.grh.as_mut().filter(|_| marked) {
            if matches!(grh.traffic_class & CE, 0 | CE) {
                grh.traffic_class = grh.traffic_class & !CE | ECT0;
            }
        }
        path
    }

    /// Sets the initial window for a connection that begins at a PSN.
    pub fn open_window(&mut self, psn: Psn) {
        if self.recovers {
            self.set_window(INITIAL_WINDOW, psn.plus(INITIAL_WINDOW));
        }
    }

    /// Sets the window, and the PSN at which it is adapted again.
    fn set_window(&mut self, window: u32, round_end: Psn) {
        self.req.window = window;
        self.congestion.lost = 0;
        self.congestion.round_end = round_end;
        self.set_ack_interval();
    }

    /// Requests an acknowledgement in each quarter of the window; with a rate limit, for
    /// each packet, so that a missing acknowledgement shows a loss.
    fn set_ack_interval(&mut self) {
        self.req.ack_request_mask = match self.congestion.rate {
            Some(_) => 0,
            None => self.req.window / 4 - 1,
        };
    }

    /// Called when `una` has moved.
    pub fn adapt_window(&mut self) {
        let una = self.req.una;
        if !self.recovers || una.before(self.congestion.round_end) {
            return;
        }
        if self.congestion.lost > self.req.window / 8 {
            return self.halve_window();
        }
        let window = (2 * self.req.window).min(MAX_WINDOW);
        self.set_window(window, una.plus(window));
    }

    /// Halves the window.
    pub fn halve_window(&mut self) {
        if self.recovers {
            let window = (self.req.window / 2).max(MIN_WINDOW);
            self.set_window(window, self.req.high.plus(window));
        }
    }

    /// Returns whether the window of responses and the rate permit a work request.
    pub fn may_send(&self, pending: &Pending<L>) -> bool {
        let reads = self.req.read_psns;
        let many = self.recovers
            && pending.work.operation.is_read_or_atomic()
            && reads != 0
            && reads + pending.packets > (2 * self.req.window).min(MAX_WINDOW);
        self.congestion.paused_until.is_none() && !many
    }

    /// Accounts for the packet that was sent last.
    pub fn pace(&mut self, io: &Io) {
        let length = io
            .out
            .back()
            .map_or(0, |packet| packet.frame().len() as u64);
        let congestion = &mut self.congestion;
        congestion.meter.record(io.now, length);
        let Some(rate) = &mut congestion.rate else {
            return;
        };
        if rate.grow(io.now) {
            (congestion.rate, congestion.paused_until) = (None, None);
            self.set_ack_interval();
        } else {
            congestion.paused_until = rate.send(io.now, length);
        }
        self.resp.held = self.congestion.paused_until.is_some()
            && matches!(self.resp.replies.front(), Some(Reply::Read(_)));
    }

    /// Processes a congestion mark: sends a CNP for a packet with a payload, at most one in
    /// [`CNP_INTERVAL`].
    pub fn process_mark(&mut self, io: &mut Io, now: u64, view: &View<'_>) {
        io.counters.marked += 1;
        let cnp_sent_at = &mut self.congestion.cnp_sent_at;
        let recent = cnp_sent_at.is_some_and(|at| now.saturating_sub(at) < CNP_INTERVAL);
        let Some(mut path) = self.config.path.filter(|_| !recent) else {
            return;
        };
        if view.payload.is_empty() {
            return;
        }
        *cnp_sent_at = Some(now);
        if let Some(grh) = &mut path.grh {
            grh.traffic_class = CNP_CLASS;
        }
        let template = Template::new(&path);
        let bth = Bth {
            opcode: CNP,
            pkey: self.config.pkey,
            dest_qpn: self.config.remote_qpn,
            psn: self.resp.expected.minus(CNP_PSN_OFFSET),
            ..Bth::default()
        };
        let mut builder = PacketBuilder::new(&io.pool, &template, bth, CNP_PAYLOAD);
        builder.put(&[0; CNP_PAYLOAD]);
        let mut packet = builder.finish();
        // The ICRC does not cover the BECN bit.
        let (place, bit) = BECN;
        packet.frame_mut()[template.bytes().len() + place] |= bit;
        io.counters.cnps_sent += 1;
        io.send(packet);
        io.record_sender(self.number);
    }

    /// Returns whether a CNP is valid for this queue pair.
    pub fn accepts_cnp(&self, view: &View<'_>) -> bool {
        self.paces
            && self.state.receives()
            && self.is_from_peer(view)
            && self.pkey_matches(view.bth.pkey)
            && view.payload.len() == CNP_PAYLOAD
    }

    /// Processes a CNP: cuts the rate.
    pub fn process_cnp(&mut self, io: &mut Io, now: u64) {
        io.counters.cnps_handled += 1;
        let round_trip = self.req.recovery.round_trip;
        let congestion = &mut self.congestion;
        let send_rate = congestion.meter.rate(now);
        let unlimited = congestion.rate.as_mut().is_none_or(|rate| rate.grow(now));
        match &mut congestion.rate {
            Some(rate) if !unlimited => rate.cut(now, send_rate, round_trip),
            rate => *rate = Some(Rate::new(now, send_rate, round_trip)),
        }
        self.set_ack_interval();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const MB: u64 = 1_000_000;

    /// Sends packets of 1000 bytes for a time through a link of a capacity, which marks
    /// what exceeds it. Returns the bytes per second of the second half.
    fn through(capacity: u64, time: u64) -> u64 {
        let (mut now, mut rate, mut meter) = (0, None::<Rate>, RateMeter::default());
        let (mut queue_until, mut late) = (0, 0);
        while now < time {
            meter.record(now, 1000);
            late += u64::from(now >= time / 2) * 1000;
            queue_until = now.max(queue_until) + 1000 * SECOND / capacity;
            let send_rate = meter.rate(now);
            // Marks from 2 ms of queue on.
            if queue_until - now > 2 * MS {
                match &mut rate {
                    Some(rate) => rate.cut(now, send_rate, 2 * MS),
                    None => rate = Some(Rate::new(now, send_rate, 2 * MS)),
                }
            }
            let pause = rate.as_mut().and_then(|rate| {
                assert!(!rate.grow(now) && rate.current >= MIN_RATE);
                rate.send(now, 1000)
            });
            // Without a limit 1 GB/s.
            now = pause.unwrap_or(now + 1000);
        }
        late * SECOND / (time / 2)
    }

    #[test]
    fn the_rate_settles_at_the_capacity() {
        for capacity in [5 * MB, 20 * MB, 100 * MB] {
            let rate = through(capacity, 4000 * MS);
            let percent = rate * 100 / capacity;
            assert!((75..=101).contains(&percent), "{capacity}: {rate}");
        }
    }

    #[test]
    fn a_cut_is_half_at_first_and_less_when_cuts_are_rare() {
        let mut rate = Rate::new(0, 100 * MB, 1);
        assert_eq!((rate.current, rate.target), (50 * MB, 100 * MB));
        // One cut in a period.
        rate.cut(MS - 1, 100 * MB, 1);
        assert_eq!(rate.current, 50 * MB);
        rate.cut(MS, 40 * MB, 1);
        assert_eq!(rate.current, 20 * MB);
        // Five periods later it is nearly back, and then grows beyond.
        assert!(!rate.grow(6 * MS));
        assert!((38 * MB..40 * MB).contains(&rate.current), "{rate:?}");
        assert!(!rate.grow(20 * MS));
        assert!(rate.current > 40 * MB, "{rate:?}");
        let before = rate.current;
        rate.cut(20 * MS, MAX_RATE, 1);
        assert!(rate.current > before * 3 / 4, "{rate:?}");
    }

    #[test]
    fn cnps_slow_down_to_the_floor_and_no_further() {
        let mut rate = Rate::new(0, 0, 0);
        for now in 0..100_000 {
            rate.cut(now * 10_000, 1, 1);
        }
        assert_eq!(rate.current, MIN_RATE);
        // Whatever is sent again meanwhile, the pause is bounded.
        let until = (0..1000).filter_map(|_| rate.send(SECOND, 4200)).max();
        assert_eq!(until, Some(SECOND + MAX_PAUSE));
    }

    #[test]
    fn the_limit_ends_in_a_bounded_number_of_steps() {
        let mut rate = Rate::new(0, 0, u64::MAX);
        assert_eq!((rate.current, rate.period), (MIN_RATE, MAX_PERIOD));
        assert!(!rate.grow(100 * MAX_PERIOD));
        assert!(rate.grow(u64::MAX));
        assert!(rate.periods < 400, "{}", rate.periods);
    }

    #[test]
    fn packets_leave_at_the_rate_in_short_bursts() {
        let mut rate = Rate::new(0, 20 * MB, 1);
        let (mut now, mut bytes, mut pauses) = (0, 0, 0);
        while now < MS {
            bytes += 1000;
            if let Some(until) = rate.send(now, 1000) {
                assert!(until <= now + 300_000);
                // A thread that wakes late makes up for it.
                now = until + 50_000;
                pauses += 1;
            }
        }
        assert!((9_000..=12_000).contains(&bytes), "{bytes}");
        assert!(pauses < bytes / 1000);
    }

    #[test]
    fn the_meter_leaves_out_pauses() {
        let mut meter = RateMeter::default();
        for burst in 1..4u64 {
            for packet in 0..100 {
                meter.record(burst * SECOND + packet * 10_000, 1000);
            }
        }
        assert_eq!(meter.rate, 100 * 1000 * SECOND / 990_000);
        for packet in 0..10_000u64 {
            meter.record(10 * SECOND + packet * 10_000, 1000);
        }
        assert_eq!(meter.rate(0), 100 * MB);
    }
}
