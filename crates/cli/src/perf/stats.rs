//! Statistics of measured times.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Maximum number of times that are kept (32 MiB).
const MAX_KEPT: usize = 1 << 22;

/// Times of single operations. If there are more than [`MAX_KEPT`], every second one is
/// kept, then every fourth, and so on; extremes and mean are those of all times.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    kept: Vec<u64>,
    /// One of `1 << halvings` times is kept.
    halvings: u32,
    count: u64,
    sum: f64,
    min: u64,
    max: u64,
}

impl Samples {
    /// Adds a time.
    pub fn add(&mut self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.min = if self.count == 0 {
            nanos
        } else {
            self.min.min(nanos)
        };
        self.max = self.max.max(nanos);
        self.sum += nanos as f64;
        if self.count % (1 << self.halvings) == 0 {
            if self.kept.len() == MAX_KEPT {
                let mut even = false;
                self.kept.retain(|_| {
                    even = !even;
                    even
                });
                self.halvings += 1;
            }
            self.kept.push(nanos);
        }
        self.count += 1;
    }

    /// Returns the number of times.
    pub fn count(&self) -> u64 {
        self.count
    }
}

/// Statistics of times, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Latency {
    pub min: u64,
    pub mean: f64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub p999: u64,
    pub max: u64,
}

impl Latency {
    /// Computes the statistics; `None` without times.
    pub fn of(mut samples: Samples) -> Option<Self> {
        let times = &mut samples.kept;
        times.sort_unstable();
        Some(Self {
            min: samples.min,
            mean: samples.sum / samples.count as f64,
            p50: percentile(times, 500)?,
            p90: percentile(times, 900)?,
            p99: percentile(times, 990)?,
            p999: percentile(times, 999)?,
            max: samples.max,
        })
    }
}

/// Returns the percentile by nearest rank.
fn percentile(sorted: &[u64], permille: usize) -> Option<u64> {
    let rank = sorted.len().checked_mul(permille)?.div_ceil(1000).max(1);
    sorted.get(rank - 1).copied()
}

/// Throughput.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bandwidth {
    pub bytes_per_second: f64,
    pub messages_per_second: f64,
}

impl Bandwidth {
    /// Computes the throughput of `messages` messages of `size` bytes in
    /// `seconds`.
    pub fn of(messages: u64, size: u64, seconds: f64) -> Self {
        let messages_per_second = messages as f64 / seconds.max(1e-9);
        Self {
            bytes_per_second: messages_per_second * size as f64,
            messages_per_second,
        }
    }
}

/// The results for one size.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Row {
    pub size: u32,
    /// Operations measured for latency.
    pub iterations: u64,
    #[serde(rename = "latency_ns")]
    pub latency: Latency,
    /// Bandwidth of the messages that arrived, in both directions if both sides post.
    pub bandwidth: Bandwidth,
    /// Messages that did not arrive, on transports that may lose messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lost: Option<u64>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn samples(times: impl IntoIterator<Item = u64>) -> Samples {
        let mut samples = Samples::default();
        for time in times {
            samples.add(Duration::from_nanos(time));
        }
        samples
    }

    #[test]
    fn excess_times_are_thinned_evenly() {
        let count = 3 * MAX_KEPT as u64;
        let samples = samples(1..=count);
        assert_eq!(samples.count(), count);
        assert!(samples.kept.len() <= MAX_KEPT && samples.kept.len() > MAX_KEPT / 2);
        assert!(samples.kept.windows(2).all(|pair| pair[1] - pair[0] == 4));
        let latency = Latency::of(samples).unwrap();
        assert_eq!((latency.min, latency.max), (1, count));
        assert!((latency.mean - (count + 1) as f64 / 2.0).abs() < 1.0);
        assert!(latency.p90.abs_diff(count / 10 * 9) < 10);
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let latency = Latency::of(samples((1..=1000).rev())).unwrap();
        assert_eq!((latency.min, latency.max), (1, 1000));
        assert_eq!((latency.p50, latency.p90), (500, 900));
        assert_eq!((latency.p99, latency.p999), (990, 999));
        assert!((latency.mean - 500.5).abs() < 1e-9);
        let one = Latency::of(samples([7])).unwrap();
        assert_eq!((one.p50, one.p999, one.max), (7, 7, 7));
        assert_eq!(Latency::of(samples([])), None);
    }

    #[test]
    fn bandwidth_of_no_time_is_finite() {
        let none = Bandwidth::of(10, 4096, 0.0);
        assert!(none.bytes_per_second.is_finite());
        let one = Bandwidth::of(1000, 100, 0.5);
        assert_eq!(
            (one.messages_per_second, one.bytes_per_second),
            (2000.0, 200_000.0)
        );
    }

    proptest! {
        #[test]
        fn percentiles_are_times_in_order(times in proptest::collection::vec(any::<u64>(), 1..300)) {
            let latency = Latency::of(samples(times.clone())).unwrap();
            let marks = [latency.min, latency.p50, latency.p90, latency.p99, latency.p999, latency.max];
            prop_assert!(marks.is_sorted());
            prop_assert!(marks.iter().all(|mark| times.contains(mark)));
            // At least 90 % of the times are not above p90.
            let below = times.iter().filter(|time| **time <= latency.p90).count();
            prop_assert!(below * 10 >= times.len() * 9);
        }
    }
}
