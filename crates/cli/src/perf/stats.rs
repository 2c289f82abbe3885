//! Statistics of measured times.

use serde::{Deserialize, Serialize};

/// Times of single operations, in nanoseconds.
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
    /// Computes the statistics of times in any order; `None` without times.
    pub fn of(mut times: Vec<u64>) -> Option<Self> {
        times.sort_unstable();
        let sum: f64 = times.iter().map(|time| *time as f64).sum();
        Some(Self {
            min: *times.first()?,
            mean: sum / times.len() as f64,
            p50: percentile(&times, 500)?,
            p90: percentile(&times, 900)?,
            p99: percentile(&times, 990)?,
            p999: percentile(&times, 999)?,
            max: *times.last()?,
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
    pub iterations: u32,
    #[serde(rename = "latency_ns")]
    pub latency: Latency,
    pub bandwidth: Bandwidth,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let latency = Latency::of((1..=1000).rev().collect()).unwrap();
        assert_eq!((latency.min, latency.max), (1, 1000));
        assert_eq!((latency.p50, latency.p90), (500, 900));
        assert_eq!((latency.p99, latency.p999), (990, 999));
        assert!((latency.mean - 500.5).abs() < 1e-9);
        let one = Latency::of(vec![7]).unwrap();
        assert_eq!((one.p50, one.p999, one.max), (7, 7, 7));
        assert_eq!(Latency::of(vec![]), None);
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
            let latency = Latency::of(times.clone()).unwrap();
            let marks = [latency.min, latency.p50, latency.p90, latency.p99, latency.p999, latency.max];
            prop_assert!(marks.is_sorted());
            prop_assert!(marks.iter().all(|mark| times.contains(mark)));
            // At least that share of the times is not above.
            let below = times.iter().filter(|time| **time <= latency.p90).count();
            prop_assert!(below * 10 >= times.len() * 9);
        }
    }
}
