//! The words of the language, for reading and writing.

use std::fmt;

use roce::packet::NakCode;

use super::{Action, Fault, Matcher, PacketKind, Peer, QpName, VERBS, Way};
use crate::opcode;
use crate::units::{SIZES, TIMES, Unit};

pub(super) const NAKS: [(&str, NakCode); 4] = [
    ("sequence", NakCode::SequenceError),
    ("invalid-request", NakCode::InvalidRequest),
    ("remote-access", NakCode::RemoteAccess),
    ("remote-operational", NakCode::RemoteOperation),
];

pub(super) const KINDS: [(&str, PacketKind); 12] = [
    ("send", PacketKind::Send),
    ("write", PacketKind::Write),
    ("read", PacketKind::Read),
    ("read-response", PacketKind::ReadResponse),
    ("atomic", PacketKind::Atomic),
    ("atomic-response", PacketKind::AtomicResponse),
    ("ack", PacketKind::Ack),
    ("nak", PacketKind::Nak),
    ("rnr-nak", PacketKind::RnrNak),
    ("cnp", PacketKind::Cnp),
    ("management", PacketKind::Management),
    ("other", PacketKind::Other),
];

pub(super) const WAYS: [(&str, Way); 2] = [("out", Way::Out), ("in", Way::In)];

/// Errors that a verb can fail with.
pub(super) const ERRNOS: [(&str, i32); 14] = [
    ("EPERM", 1),
    ("ENOENT", 2),
    ("EIO", 5),
    ("EBADF", 9),
    ("EAGAIN", 11),
    ("ENOMEM", 12),
    ("EACCES", 13),
    ("EFAULT", 14),
    ("EBUSY", 16),
    ("ENODEV", 19),
    ("EINVAL", 22),
    ("ENOSPC", 28),
    ("ENOSYS", 38),
    ("EOPNOTSUPP", 95),
];

/// Returns what a word stands for.
pub(super) fn named<T: Copy>(table: &[(&str, T)], word: &str) -> Option<T> {
    table.iter().find(|(name, _)| *name == word).map(|it| it.1)
}

fn name<T: PartialEq>(table: &[(&'static str, T)], value: &T) -> &'static str {
    let found = table.iter().find(|(_, it)| it == value);
    found.map_or("?", |(name, _)| name)
}

/// Writes a number with the greatest unit that divides it.
struct Measure(u64, &'static [Unit]);

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(value, units) = *self;
        let divides = |(_, factor): &&Unit| value % factor == 0 && value != 0;
        let smallest = units[units.len() - 1];
        let (unit, factor) = *units.iter().find(divides).unwrap_or(&smallest);
        write!(f, "{}{unit}", value / factor)
    }
}

fn time(value: u64) -> Measure {
    Measure(value, &TIMES)
}

pub(super) fn write_fault(fault: &Fault, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write_action(&fault.action, f)?;
    write_matcher(&fault.matcher, f)
}

fn write_action(action: &Action, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    match action {
        Action::Lose => f.write_str("lose"),
        Action::Delay { least, most } if least == most => write!(f, "delay {}", time(*least)),
        Action::Delay { least, most } => write!(f, "delay {}..{}", time(*least), time(*most)),
        Action::Duplicate => f.write_str("duplicate"),
        Action::Corrupt => f.write_str("corrupt"),
        Action::Reorder(by) => write!(f, "reorder {}", time(*by)),
        Action::Nak(code) => write!(f, "nak {}", name(&NAKS, code)),
        Action::Rnr => f.write_str("rnr"),
        Action::SlowReceiver(by) => write!(f, "slow-receiver {}", time(*by)),
        Action::LinkDown(None) => f.write_str("link-down"),
        Action::LinkDown(Some(by)) => write!(f, "link-down {}", time(*by)),
        Action::LinkUp => f.write_str("link-up"),
        Action::QpError => f.write_str("qp-error"),
        Action::CqError => f.write_str("cq-error"),
        Action::DeviceFatal => f.write_str("device-fatal"),
        Action::Die => f.write_str("die"),
        Action::Health(syndrome, false) => write!(f, "health {syndrome:#x}"),
        Action::Health(syndrome, true) => write!(f, "health {syndrome:#x} fatal"),
        Action::FailVerb { verb, errno } => {
            let verb = VERBS.get(*verb).unwrap_or(&"?");
            write!(f, "fail {verb} {}", name(&ERRNOS, errno))
        }
        Action::FailCommand(code) => write!(f, "fail {}", opcode::name(*code)),
        Action::Memlock(size) => write!(f, "memlock {}", Measure(*size, &SIZES)),
        Action::LoseEvent(kind) => write!(f, "lose-event {kind:#x}"),
        Action::LoseCompletion => f.write_str("lose-completion"),
        Action::ReturnReceive => f.write_str("return-receive"),
    }
}

fn write_matcher(matcher: &Matcher, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if let Some(device) = matcher.device {
        write!(f, " device={device}")?;
    }
    if let Some(program) = &matcher.program {
        write!(f, " program={program}")?;
    }
    match matcher.qp {
        Some(QpName::Number(number)) => write!(f, " qp={number:#x}")?,
        Some(QpName::Order(order)) => write!(f, " qp=#{order}")?,
        None => {}
    }
    match matcher.peer {
        Some(Peer::Qp(number)) => write!(f, " peer={number:#x}")?,
        Some(Peer::Address(address)) => write!(f, " peer={address}")?,
        None => {}
    }
    if let Some(kind) = &matcher.opcode {
        write!(f, " opcode={}", name(&KINDS, kind))?;
    }
    if let Some(way) = &matcher.way {
        write!(f, " way={}", name(&WAYS, way))?;
    }
    if !matcher.nth.is_all() {
        write!(f, " nth={}", matcher.nth)?;
    }
    if let Some(chance) = matcher.chance {
        write!(f, " chance={chance}")?;
    }
    if let Some(seed) = matcher.seed {
        write!(f, " seed={seed}")?;
    }
    if let Some(after) = matcher.after {
        write!(f, " after={}", time(after))?;
    }
    match matcher.until {
        Some(until) => write!(f, " until={}", time(until)),
        None => Ok(()),
    }
}
