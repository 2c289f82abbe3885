//! Rules that parameters of commands, and fields of work requests, break.

use std::fmt;

/// A rule about a value, with the other side of the comparison.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// At most this.
    AtMost(u64),
    /// At least this.
    AtLeast(u64),
    /// At least the first, at most the second.
    Between(u64, u64),
    /// Equal to this.
    Is(u64),
    /// One of these.
    OneOf(&'static [u64]),
    /// A multiple of this.
    MultipleOf(u64),
    /// A power of two, at most this.
    PowerOfTwo(u64),
    /// No bits but these.
    Bits(u64),
    /// At least these bits.
    Contains(u64),
    /// No bits of both this and the value: the flags exclude each other.
    Excludes(u64),
    /// Zero: reserved, or not known.
    Zero,
    /// Not zero.
    NonZero,
    /// A known value of an enumeration.
    Known,
    /// Well-formed.
    WellFormed,
    /// A range that does not wrap around.
    NoWrap,
    /// Readable memory.
    Readable,
    /// Writable memory.
    Writable,
    /// Within memory, or another range, of this length.
    Within(u64),
    /// An existing object, entry or descriptor.
    Exists,
    /// An object of this type.
    OfType(&'static str),
    /// Of the context that names it.
    OfContext,
    /// Not used by other objects.
    Unused,
    /// Not taken yet.
    Free,
    /// Permitted to the one who asks.
    Permitted,
    /// Supported by the device.
    Supported,
    /// Present.
    Present,
    /// Absent.
    Absent,
    /// Present once.
    Once,
    /// Only together with this.
    With(&'static str),
    /// Not together with this.
    Without(&'static str),
    /// In this state.
    InState(&'static str),
    /// A transition between two states that exists.
    Transition {
        /// State before it.
        from: u8,
        /// State after it.
        to: u8,
    },
    /// Not subject to an injected fault.
    NoFault,
    /// Granted by the system.
    Granted,
    /// A size that has a common multiple with another one.
    CommonMultiple {
        /// The other one.
        with: u64,
        /// The largest multiple.
        limit: u64,
    },
}

impl Rule {
    /// Returns a number of the rule, the same for all its operands.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::AtMost(_) => 0,
            Self::AtLeast(_) => 1,
            Self::Between(..) => 2,
            Self::Is(_) => 3,
            Self::OneOf(_) => 4,
            Self::MultipleOf(_) => 5,
            Self::PowerOfTwo(_) => 6,
            Self::Bits(_) => 7,
            Self::Contains(_) => 8,
            Self::Excludes(_) => 9,
            Self::Zero => 10,
            Self::NonZero => 11,
            Self::Known => 12,
            Self::WellFormed => 13,
            Self::NoWrap => 14,
            Self::Readable => 15,
            Self::Writable => 16,
            Self::Within(_) => 17,
            Self::Exists => 18,
            Self::OfType(_) => 19,
            Self::OfContext => 20,
            Self::Unused => 21,
            Self::Free => 22,
            Self::Permitted => 23,
            Self::Supported => 24,
            Self::Present => 25,
            Self::Absent => 26,
            Self::Once => 27,
            Self::With(_) => 28,
            Self::Without(_) => 29,
            Self::InState(_) => 30,
            Self::Transition { .. } => 31,
            Self::NoFault => 32,
            Self::Granted => 33,
            Self::CommonMultiple { .. } => 34,
        }
    }
}

/// What the value is not: "a multiple of 0x8".
impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(limit) => write!(f, "is not at most {limit:#x}"),
            Self::AtLeast(limit) => write!(f, "is not at least {limit:#x}"),
            Self::Between(low, high) => write!(f, "is not between {low:#x} and {high:#x}"),
            Self::Is(value) => write!(f, "is not {value:#x}"),
            Self::OneOf(values) => {
                f.write_str("is not one of")?;
                let mut separators = [" "].into_iter().chain(std::iter::repeat(", "));
                values.iter().try_for_each(|value| {
                    let separator = separators.next().unwrap_or(" ");
                    write!(f, "{separator}{value:#x}")
                })
            }
            Self::MultipleOf(unit) => write!(f, "is not a multiple of {unit:#x}"),
            Self::PowerOfTwo(limit) => write!(f, "is not a power of two up to {limit:#x}"),
            Self::Bits(bits) => write!(f, "has other bits than {bits:#x}"),
            Self::Contains(bits) => write!(f, "lacks bits of {bits:#x}"),
            Self::Excludes(bits) => write!(f, "has bits that exclude {bits:#x}"),
            Self::Zero => f.write_str("is not zero, but reserved"),
            Self::NonZero => f.write_str("is zero"),
            Self::Known => f.write_str("is not a known value"),
            Self::WellFormed => f.write_str("is malformed"),
            Self::NoWrap => f.write_str("wraps around"),
            Self::Readable => f.write_str("is not readable memory"),
            Self::Writable => f.write_str("is not writable memory"),
            Self::Within(length) => write!(f, "is not within {length:#x} bytes"),
            Self::Exists => f.write_str("does not exist"),
            Self::OfType(kind) => write!(f, "is no {kind}"),
            Self::OfContext => f.write_str("belongs to another context"),
            Self::Unused => f.write_str("is used by other objects"),
            Self::Free => f.write_str("is taken"),
            Self::Permitted => f.write_str("is not permitted"),
            Self::Supported => f.write_str("is not supported"),
            Self::Present => f.write_str("is missing"),
            Self::Absent => f.write_str("is not permitted here"),
            Self::Once => f.write_str("is repeated"),
            Self::With(other) => write!(f, "is not permitted without {other}"),
            Self::Without(other) => write!(f, "is not permitted with {other}"),
            Self::InState(state) => write!(f, "is not {state}"),
            Self::Transition { from, to } => {
                write!(f, "has no transition from state {from} to {to}")
            }
            Self::NoFault => f.write_str("fails by an injected fault"),
            Self::Granted => f.write_str("was refused by the system"),
            Self::CommonMultiple { with, limit } => {
                write!(f, "has no common multiple with {with:#x} up to {limit:#x}")
            }
        }
    }
}

/// A value that breaks a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Violation {
    /// The field, or kind of object.
    pub what: &'static str,
    /// Its value or number.
    pub value: u64,
    /// The rule that it breaks.
    pub rule: Rule,
}

impl Violation {
    /// Creates the violation of a rule by the value of `what`.
    #[cold]
    pub fn new(what: &'static str, value: impl TryInto<u64>, rule: Rule) -> Self {
        Self {
            what,
            value: value.try_into().unwrap_or(u64::MAX),
            rule,
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:#x} {}", self.what, self.value, self.rule)
    }
}

impl std::error::Error for Violation {}
