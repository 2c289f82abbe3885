//! The limits of each row.

use super::measure::Row;

/// The limits of one row; figures without a limit are only reported.
#[derive(Clone, Copy, Default)]
pub struct Limits {
    /// Our time over the stock provider's.
    pub ratio: Option<f64>,
    /// Instructions of one operation.
    pub instructions: Option<f64>,
}

const fn limits(ratio: f64, instructions: Option<f64>) -> Limits {
    Limits {
        ratio: Some(ratio),
        instructions,
    }
}

/// Returns the limits of a row, by its name.
pub fn for_row(row: &str) -> Limits {
    match row {
        "send/1" => limits(0.35, Some(125.0)),
        "send/16" => limits(0.28, Some(56.0)),
        "send-inline/1" => limits(0.35, Some(135.0)),
        "send-inline/16" => limits(0.28, Some(65.0)),
        "recv/1" => limits(0.55, None),
        "recv/16" => limits(0.45, None),
        "poll/1" => limits(0.80, None),
        "poll/16" => limits(0.75, Some(16.0)),
        "poll-empty/1" => limits(0.35, None),
        "cursor/1" => limits(0.80, None),
        "cursor/16" => limits(0.85, None),
        "single-poll/1" => limits(0.65, None),
        _ => Limits::default(),
    }
}

/// Returns the row of a bare C loop with the same calls into a library as this row, if
/// there is one. Between a program and a library an indirect call can take so long that
/// both providers are within a few percent of it.
pub fn floor_of(row: &str) -> Option<String> {
    matches!(row, "poll-empty/1" | "cursor/1" | "cursor/16").then(|| format!("floor-{row}"))
}

/// The most that ours may take of its floor's time where that is more than the limit
/// allows: such a limit cannot be met.
const MAX_OF_FLOOR: f64 = 1.15;

/// Returns whether a row's time exceeds its limit, and its floor's time too.
pub fn exceeds_time(row: &Row) -> bool {
    let exceeds = |limit| row.ratio.median > limit && row.ours_ns > MAX_OF_FLOOR * row.calls_ns;
    for_row(&row.name).ratio.is_some_and(exceeds)
}

/// Returns the maximum of locked operations in one call: none if one thread uses the
/// queue, with or without a promise; one if several threads have used it.
pub fn max_locked_per_call(row: &str) -> f64 {
    if row.starts_with("several-") {
        1.0
    } else {
        0.0
    }
}

/// Returns the number of operations in one call of a row, from its name.
pub fn batch(row: &str) -> f64 {
    row.rsplit_once('/')
        .and_then(|(_, batch)| batch.parse().ok())
        .unwrap_or(1.0)
}

/// The precision of counts that the bench program prints.
pub const ROUNDING: f64 = 0.001;

/// Describes every count that exceeds its limit. Floors have no limits.
pub fn exceeded_counts(rows: &[Row]) -> Vec<String> {
    let mut exceeded = Vec::new();
    for row in rows.iter().filter(|row| !row.is_floor()) {
        let name = &row.name;
        let ours = &row.ours_count;
        if let Some(limit) = for_row(name).instructions {
            if ours.instructions > limit + ROUNDING {
                exceeded.push(format!(
                    "{name}: {:.1} instructions, at most {limit}",
                    ours.instructions
                ));
            }
        }
        let locked = ours.locked * batch(name);
        if locked > max_locked_per_call(name) + ROUNDING * batch(name) {
            exceeded.push(format!(
                "{name}: {locked:.2} locked operations a call, at most {}",
                max_locked_per_call(name)
            ));
        }
        if ours.fences > ROUNDING {
            exceeded.push(format!(
                "{name}: {:.3} fences an operation, at most 0",
                ours.fences
            ));
        }
    }
    exceeded
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::Count;

    fn row(name: &str, instructions: f64, locked: f64, fences: f64) -> Row {
        Row {
            name: name.to_owned(),
            ours_count: Count {
                instructions,
                locked,
                fences,
            },
            ..Row::default()
        }
    }

    #[test]
    fn a_count_at_its_limit_passes_and_above_it_fails() {
        assert!(exceeded_counts(&[row("send/1", 125.0, 0.0, 0.0)]).is_empty());
        assert_eq!(exceeded_counts(&[row("send/1", 125.1, 0.0, 0.0)]).len(), 1);
        assert!(exceeded_counts(&[row("several-poll/16", 16.0, 0.0625, 0.0)]).is_empty());
        assert_eq!(
            exceeded_counts(&[row("several-poll/16", 15.0, 0.125, 0.0)]).len(),
            1
        );
    }

    #[test]
    fn a_time_exceeds_its_limit_unless_it_is_close_to_its_floor() {
        let timed = |ratio: f64, ours_ns, calls_ns| {
            let mut row = row("cursor/16", 1.0, 0.0, 0.0);
            row.ratio.median = ratio;
            (row.ours_ns, row.calls_ns) = (ours_ns, calls_ns);
            row
        };
        assert!(!exceeds_time(&timed(0.85, 10.0, 0.0)));
        assert!(exceeds_time(&timed(0.86, 10.0, 0.0)));
        assert!(exceeds_time(&timed(0.86, 10.0, 8.6)));
        assert!(!exceeds_time(&timed(0.86, 10.0, 8.8)));
    }

    #[test]
    fn only_a_queue_that_several_threads_use_takes_a_lock() {
        for name in ["send/1", "single-send/1"] {
            assert_eq!(exceeded_counts(&[row(name, 1.0, 1.0, 0.0)]).len(), 1);
            assert!(exceeded_counts(&[row(name, 1.0, 0.0, 0.0)]).is_empty());
        }
    }

    #[test]
    fn a_fence_is_reported_and_a_floor_is_not() {
        assert_eq!(exceeded_counts(&[row("recv/1", 1.0, 0.0, 1.0)]).len(), 1);
        assert!(exceeded_counts(&[row("floor-send/1", 1.0, 9.0, 9.0)]).is_empty());
    }
}
