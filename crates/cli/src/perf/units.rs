//! Human-readable numbers: bytes in binary units, times in decimal units.

/// Formats a number of bytes: `64 B`, `4 KiB`, `1.5 MiB`.
pub fn size(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

/// Formats a rate: `1.5 MiB/s`.
pub fn rate(bytes_per_second: f64) -> String {
    const UNITS: [&str; 5] = ["B/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s"];
    scaled(bytes_per_second, 1024.0, &UNITS)
}

/// Formats a time: `1.5 µs`.
pub fn time(nanoseconds: f64) -> String {
    scaled(nanoseconds, 1000.0, &["ns", "µs", "ms", "s"])
}

/// Formats a value with at most three digits, in the largest unit in which it is at least
/// 1.
fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut units = units.iter();
    let mut unit = units.next().copied().unwrap_or_default();
    for larger in units {
        if value < step {
            break;
        }
        value /= step;
        unit = larger;
    }
    let digits = match value {
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    let text = format!("{value:.digits$}");
    let text = match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.'),
        false => &text,
    };
    format!("{text} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_binary_and_times_decimal_units() {
        for (bytes, text) in [
            (1, "1 B"),
            (64, "64 B"),
            (1000, "1000 B"),
            (1024, "1 KiB"),
            (4096, "4 KiB"),
            (5000, "4.88 KiB"),
            (1 << 20, "1 MiB"),
            (3 << 29, "1.5 GiB"),
            (1 << 60, "1048576 TiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(time(950.0), "950 ns");
        assert_eq!(time(12_340.0), "12.3 µs");
        assert_eq!(time(1e6), "1 ms");
        assert_eq!(time(3e11), "300 s");
        assert_eq!(rate(1536.0 * 1024.0), "1.5 MiB/s");
        assert_eq!(rate(0.0), "0 B/s");
    }
}
