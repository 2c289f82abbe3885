//! Numbers with units, in descriptions of links, faults and captures.

/// A unit, and how many of the smallest one it is.
pub(crate) type Unit = (&'static str, u64);

/// Units of times, in nanoseconds; the greatest first.
pub(crate) const TIMES: [Unit; 4] = [
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1000),
    ("ns", 1),
];

/// Units of sizes, in bytes; the greatest first.
pub(crate) const SIZES: [Unit; 4] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("", 1),
];

/// Parses a number with one of these units.
pub(crate) fn parse(text: &str, units: &[Unit]) -> Option<u64> {
    let is_unit = |it: char| !it.is_ascii_digit();
    let (digits, unit) = text.split_at(text.find(is_unit).unwrap_or(text.len()));
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    digits.parse::<u64>().ok()?.checked_mul(*factor)
}

/// Parses a number of bytes above 0, such as `64KiB`.
#[must_use]
pub fn parse_size(text: &str) -> Option<u64> {
    parse(text, &SIZES).filter(|size| *size != 0)
}
