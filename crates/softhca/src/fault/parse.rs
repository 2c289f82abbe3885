//! The parser.

use std::fmt;
use std::ops::RangeInclusive;

use super::text::{ERRNOS, KINDS, NAKS, WAYS, named};
use super::{
    Action, Fault, MAX_FAULTS, MAX_TEXT, Matcher, PacketKind, Peer, Positions, QpName, Subject,
    VERBS, Way,
};
use crate::opcode;
use crate::units::{self, SIZES, TIMES};

/// Where a text cannot be understood, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Why.
    pub reason: Reason,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.line, self.column, self.reason)
    }
}

impl std::error::Error for ParseError {}

/// Why a text was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// No action has this name.
    Action(String),
    /// No matcher has this name.
    Matcher(String),
    /// A matcher is given twice.
    Twice(String),
    /// The action does not have this argument.
    Argument(String),
    /// The action lacks an argument, which is described.
    Missing(&'static str),
    /// A word is not what is expected here, which is described.
    Value(String, &'static str),
    /// The matcher has no meaning for the action.
    Unfit(String),
    /// The fault cannot happen, for this reason.
    Impossible(&'static str),
    /// There are too many faults.
    TooMany,
    /// The text is too long.
    TooLong,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Action(word) => write!(f, "there is no action {word:?}"),
            Self::Matcher(word) => write!(f, "there is no matcher {word:?}"),
            Self::Twice(name) => write!(f, "{name:?} is given twice"),
            Self::Argument(word) => {
                write!(f, "the action takes no {word:?}; matchers are NAME=VALUE")
            }
            Self::Missing(what) => write!(f, "the action takes {what}"),
            Self::Value(word, expected) => write!(f, "{word:?} is not {expected}"),
            Self::Unfit(name) => write!(f, "the action does not take {name:?}"),
            Self::Impossible(reason) => f.write_str(reason),
            Self::TooMany => write!(f, "there are more than {MAX_FAULTS} faults"),
            Self::TooLong => write!(f, "the text is longer than {MAX_TEXT} bytes"),
        }
    }
}

/// A word, and its column.
#[derive(Clone, Copy, Debug)]
struct Word<'a> {
    text: &'a str,
    column: usize,
}

type Result<T> = std::result::Result<T, (usize, Reason)>;

impl Word<'_> {
    /// Refuses the word, which is not what is expected.
    fn refuse<T>(&self, expected: &'static str) -> Result<T> {
        Err((self.column, Reason::Value(self.text.to_owned(), expected)))
    }

    fn among<T: Copy>(&self, table: &[(&str, T)], expected: &'static str) -> Result<T> {
        named(table, self.text).map_or_else(|| self.refuse(expected), Ok)
    }

    fn number(&self, most: u64, expected: &'static str) -> Result<u64> {
        let value = number(self.text).filter(|value| *value <= most);
        value.map_or_else(|| self.refuse(expected), Ok)
    }

    fn time(&self) -> Result<u64> {
        time(self.text).map_or_else(|| self.refuse(TIME), Ok)
    }
}

const TIME: &str = "a time up to 1000s, such as 5us, 2ms or 1s";
/// The longest time in nanoseconds.
pub(super) const MAX_TIME: u64 = 1_000_000_000_000;
/// Greatest number of a queue pair.
const MAX_QPN: u64 = (1 << 24) - 1;

pub(super) fn parse(text: &str) -> std::result::Result<Vec<Fault>, ParseError> {
    let mut list = Vec::new();
    let error = |line, (column, reason)| ParseError {
        line,
        column,
        reason,
    };
    if text.len() > MAX_TEXT {
        return Err(error(1, (1, Reason::TooLong)));
    }
    for (line, content) in (1..).zip(text.lines()) {
        let words = words(content);
        let Some((action, rest)) = words.split_first() else {
            continue;
        };
        let fault = parse_fault(line, *action, rest).map_err(|it| error(line, it))?;
        if list.len() == MAX_FAULTS {
            return Err(error(line, (action.column, Reason::TooMany)));
        }
        list.push(fault);
    }
    Ok(list)
}

/// Splits a line, without its comment.
fn words(line: &str) -> Vec<Word<'_>> {
    let mut words = Vec::new();
    let mut start = None;
    let ends = line.char_indices().chain([(line.len(), ' ')]);
    for (column, (at, char)) in (1..).zip(ends) {
        match (char.is_whitespace(), start) {
            (true, Some((from, column))) => {
                let text: &str = &line[from..at];
                words.push(Word { text, column });
                start = None;
            }
            // Within a word it belongs to it, as in `qp=#2`.
            (false, None) if char == '#' => break,
            (false, None) => start = Some((at, column)),
            _ => {}
        }
    }
    words
}

fn parse_fault(line: usize, name: Word<'_>, rest: &[Word<'_>]) -> Result<Fault> {
    let is_matcher = |word: &Word<'_>| word.text.contains('=');
    let count = rest.iter().position(is_matcher).unwrap_or(rest.len());
    let (arguments, matchers) = rest.split_at(count);
    let mut arguments = Arguments {
        end: name.column + name.text.chars().count(),
        list: arguments.iter().copied(),
    };
    let action = parse_action(name, &mut arguments)?;
    if let Some(word) = arguments.list.next() {
        return Err((word.column, Reason::Argument(word.text.to_owned())));
    }
    let mut matcher = Matcher::default();
    let mut names: Vec<&str> = Vec::new();
    for word in matchers {
        let Some((name, value)) = word.text.split_once('=') else {
            return Err((word.column, Reason::Argument(word.text.to_owned())));
        };
        if names.contains(&name) {
            return Err((word.column, Reason::Twice(name.to_owned())));
        }
        names.push(name);
        let value = Word {
            text: value,
            column: word.column + name.chars().count() + 1,
        };
        if !is_fit(name, action.subject()) {
            return Err((word.column, unknown_or_unfit(name)));
        }
        parse_matcher(name, value, &mut matcher)?;
    }
    check(&action, &matcher).map_err(|reason| (name.column, Reason::Impossible(reason)))?;
    Ok(Fault {
        line,
        action,
        matcher,
    })
}

/// The arguments that were not read.
struct Arguments<'a, I: Iterator<Item = Word<'a>>> {
    list: I,
    /// The column after the last one.
    end: usize,
}

impl<'a, I: Iterator<Item = Word<'a>>> Arguments<'a, I> {
    fn next(&mut self, what: &'static str) -> Result<Word<'a>> {
        let word = self.list.next().ok_or((self.end, Reason::Missing(what)))?;
        self.end = word.column + word.text.chars().count();
        Ok(word)
    }
}

fn parse_action<'a>(
    name: Word<'a>,
    arguments: &mut Arguments<'a, impl Iterator<Item = Word<'a>>>,
) -> Result<Action> {
    /// How long a packet is held back if that is not said.
    const REORDER: u64 = 20_000;
    Ok(match name.text {
        "lose" => Action::Lose,
        "delay" => parse_delay(arguments.next("a time, or two as in 1ms..2ms")?)?,
        "duplicate" => Action::Duplicate,
        "corrupt" => Action::Corrupt,
        "reorder" => match arguments.list.next() {
            Some(word) => Action::Reorder(word.time()?),
            None => Action::Reorder(REORDER),
        },
        "nak" => {
            let word = arguments.next("a code of a NAK")?;
            let expected = "sequence, invalid-request, remote-access or remote-operational";
            Action::Nak(word.among(&NAKS, expected)?)
        }
        "rnr" => Action::Rnr,
        "slow-receiver" => Action::SlowReceiver(arguments.next("a time")?.time()?),
        "link-down" => {
            let time = arguments.list.next().map(|word| word.time());
            Action::LinkDown(time.transpose()?)
        }
        "link-up" => Action::LinkUp,
        "qp-error" => Action::QpError,
        "cq-error" => Action::CqError,
        "device-fatal" => Action::DeviceFatal,
        "die" => Action::Die,
        "health" => {
            let syndrome = arguments.next("a syndrome")?;
            let syndrome = syndrome.number(255, "a syndrome from 0 to 255")? as u8;
            match arguments.list.next() {
                None => Action::Health(syndrome, false),
                Some(word) if word.text == "fatal" => Action::Health(syndrome, true),
                Some(word) => return word.refuse("fatal"),
            }
        }
        "fail" => {
            let command = arguments.next("a verb, or a command of the device")?;
            match VERBS.iter().position(|it| *it == command.text) {
                Some(verb) => {
                    let errno = arguments.next("an error number's name, such as ENOMEM")?;
                    let expected = "the name of an error number, such as ENOMEM or EINVAL";
                    let errno = errno.among(&ERRNOS, expected)?;
                    Action::FailVerb { verb, errno }
                }
                None => match opcode::by_name(command.text) {
                    Some(code) => Action::FailCommand(code),
                    None => {
                        return command
                            .refuse("a verb as ibv_create_qp, or a command as CREATE_QP");
                    }
                },
            }
        }
        "memlock" => {
            let word = arguments.next("a size")?;
            let size = units::parse(word.text, &SIZES);
            let expected = "a size, such as 64KiB or 0";
            Action::Memlock(size.map_or_else(|| word.refuse(expected), Ok)?)
        }
        "lose-event" => {
            let word = arguments.next("a type of events")?;
            Action::LoseEvent(word.number(255, "a type from 0 to 255")? as u8)
        }
        "lose-completion" => Action::LoseCompletion,
        "return-receive" => Action::ReturnReceive,
        other => return Err((name.column, Reason::Action(other.to_owned()))),
    })
}

fn parse_delay(word: Word<'_>) -> Result<Action> {
    let (least, most) = match word.text.split_once("..") {
        None => (word.time()?, word.time()?),
        Some((least, most)) => match time(least).zip(time(most)) {
            Some((least, most)) if least <= most => (least, most),
            _ => return word.refuse("two times, the lesser first, as 1ms..2ms"),
        },
    };
    Ok(Action::Delay { least, most })
}

/// The names of matchers, each with the subjects that have a meaning for it.
const MATCHERS: [(&str, &[Subject]); 11] = {
    use Subject::*;
    const ALL: &[Subject] = &[Packets, Requests, Once, Calls];
    const PACKETS: &[Subject] = &[Packets, Requests, Once];
    [
        ("device", ALL),
        ("program", ALL),
        ("qp", PACKETS),
        ("peer", PACKETS),
        ("opcode", PACKETS),
        ("way", &[Packets, Once]),
        ("nth", ALL),
        ("chance", ALL),
        ("seed", ALL),
        ("after", ALL),
        ("until", &[Packets, Requests, Calls]),
    ]
};

fn is_fit(name: &str, subject: Subject) -> bool {
    let found = MATCHERS.iter().find(|(known, _)| *known == name);
    found.is_some_and(|(_, subjects)| subjects.contains(&subject))
}

fn unknown_or_unfit(name: &str) -> Reason {
    match MATCHERS.iter().any(|(known, _)| *known == name) {
        true => Reason::Unfit(name.to_owned()),
        false => Reason::Matcher(name.to_owned()),
    }
}

fn parse_matcher(name: &str, value: Word<'_>, matcher: &mut Matcher) -> Result<()> {
    match name {
        "device" => matcher.device = Some(value.number(63, "a number from 0 to 63")? as usize),
        "program" => {
            if value.text.is_empty() || value.text.len() > 255 || value.text.contains('/') {
                return value.refuse("the name of a program, without its directory");
            }
            matcher.program = Some(value.text.to_owned());
        }
        "qp" => {
            let expected = "a number of 24 bits as 0x41, or #2 for the second that was created";
            matcher.qp = Some(match value.text.strip_prefix('#') {
                None => QpName::Number(value.number(MAX_QPN, expected)? as u32),
                Some(order) => match number(order).filter(|it| (1..=MAX_QPN).contains(it)) {
                    Some(order) => QpName::Order(order as u32),
                    None => return value.refuse(expected),
                },
            });
        }
        "peer" => {
            matcher.peer = Some(match value.text.parse() {
                Ok(address) => Peer::Address(address),
                Err(_) => {
                    let expected = "the number of a queue pair, or an IP address";
                    Peer::Qp(value.number(MAX_QPN, expected)? as u32)
                }
            });
        }
        "opcode" => {
            let expected = "send, write, read, read-response, atomic, atomic-response, ack, nak, \
                            rnr-nak, cnp, management or other";
            let kind: PacketKind = value.among(&KINDS, expected)?;
            matcher.opcode = Some(kind);
        }
        "way" => {
            let way: Way = value.among(&WAYS, "in or out")?;
            matcher.way = Some(way);
        }
        "nth" => {
            let ranges = value.text.split(',').map(range).collect::<Option<_>>();
            let positions = ranges.and_then(Positions::new);
            let expected =
                "a position from 1, a range as 2..5, 2.. or ..5, or several in order as 3,7..9";
            matcher.nth = positions.map_or_else(|| value.refuse(expected), Ok)?;
        }
        "chance" => {
            let chance = value.text.parse::<f64>().ok();
            let chance = chance.filter(|it| (0.0..=1.0).contains(it));
            let expected = "a probability from 0 to 1";
            matcher.chance = Some(chance.map_or_else(|| value.refuse(expected), Ok)?);
        }
        "seed" => matcher.seed = Some(value.number(u64::MAX, "a number of 64 bits")?),
        "after" => matcher.after = Some(value.time()?),
        _ => matcher.until = Some(value.time()?),
    }
    Ok(())
}

/// Checks what no part alone can break.
fn check(action: &Action, matcher: &Matcher) -> std::result::Result<(), &'static str> {
    let is_failure = matches!(action, Action::QpError | Action::CqError);
    if is_failure && matcher.qp.is_none() && !matcher.needs_packet() {
        return Err("it takes qp=, or a matcher of packets, whose queue pair then fails");
    }
    if matcher.seed.is_some() && matcher.chance.is_none() {
        return Err("a seed without a chance has no effect");
    }
    if let (Some(after), Some(until)) = (matcher.after, matcher.until) {
        if after >= until {
            return Err("it ends before it begins");
        }
    }
    Ok(())
}

/// Parses a number: decimal, or hexadecimal after `0x`.
fn number(text: &str) -> Option<u64> {
    let (digits, radix) = match text.strip_prefix("0x") {
        Some(digits) => (digits, 16),
        None => (text, 10),
    };
    // `from_str_radix` takes a sign.
    let is_digit = |char: char| char.is_digit(radix);
    let digits = Some(digits).filter(|it| it.chars().all(is_digit))?;
    u64::from_str_radix(digits, radix).ok()
}

fn time(text: &str) -> Option<u64> {
    units::parse(text, &TIMES).filter(|time| *time <= MAX_TIME)
}

/// Parses a position, or a range of positions.
fn range(text: &str) -> Option<RangeInclusive<u64>> {
    let position = |text| number(text).filter(|it| *it != 0);
    let (first, last) = match text.split_once("..") {
        None => (position(text)?, position(text)?),
        Some(("", "")) => return None,
        Some(("", last)) => (1, position(last)?),
        Some((first, "")) => (position(first)?, u64::MAX),
        Some((first, last)) => (position(first)?, position(last)?),
    };
    (first <= last).then_some(first..=last)
}
