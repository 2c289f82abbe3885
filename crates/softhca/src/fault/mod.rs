//! Faults in a text form: the one language of `ringverbs run --faults`, `ringverbs fault`,
//! softhca's control socket and the test kit.
//!
//! ```text
//! # A fault is a line: an action, its arguments, and what it is limited to.
//! lose opcode=send nth=3
//! delay 2ms qp=#1 chance=0.1 seed=7
//! fail ibv_create_qp ENOMEM nth=2
//! link-down 500ms after=1s
//! ```
//!
//! [`Faults::parse`] accepts a whole text, or refuses it with line and column. An
//! [`Injector`] applies faults to a device ([`Hca::inject`](crate::Hca::inject)).

mod injector;
mod log;
mod parse;
mod positions;
mod text;

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::IpAddr;

use roce::packet::{Aeth, CNP, Class, NakCode, OpcodeFlags, Syndrome, View};

pub(crate) use injector::{Call, Refused};
pub use injector::{Effect, Injector, OnFired, PacketFacts};
pub use log::{Decision, FaultLog, LogFull, OnDecision, When};
pub use parse::{ParseError, Reason};
pub use positions::Positions;

/// Maximum number of faults of a text.
pub const MAX_FAULTS: usize = 128;
/// Maximum length of a text in bytes.
pub const MAX_TEXT: usize = 32 << 10;

/// The verbs that [`Action::FailVerb`] can name: functions of libibverbs that give a command.
pub const VERBS: &[&str] = &[
    "ibv_open_device",
    "ibv_alloc_pd",
    "ibv_dealloc_pd",
    "ibv_reg_mr",
    "ibv_rereg_mr",
    "ibv_dereg_mr",
    "ibv_advise_mr",
    "ibv_reg_dmabuf_mr",
    "ibv_alloc_mw",
    "ibv_dealloc_mw",
    "ibv_create_comp_channel",
    "ibv_create_cq",
    "ibv_resize_cq",
    "ibv_destroy_cq",
    "ibv_create_qp",
    "ibv_query_qp",
    "ibv_modify_qp",
    "ibv_destroy_qp",
    "ibv_open_qp",
    "ibv_attach_mcast",
    "ibv_detach_mcast",
    "ibv_create_srq",
    "ibv_modify_srq",
    "ibv_query_srq",
    "ibv_destroy_srq",
    "ibv_open_xrcd",
    "ibv_close_xrcd",
    "ibv_create_ah",
    "ibv_destroy_ah",
    "ibv_create_wq",
    "ibv_destroy_wq",
    "ibv_alloc_dm",
    "ibv_free_dm",
];

/// The faults of a text, in its order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    list: Vec<Fault>,
}

impl Faults {
    /// Parses a text.
    ///
    /// # Errors
    /// Says where the first thing is that cannot be understood, and why.
    pub fn parse(text: &str) -> Result<Self, ParseError> {
        parse::parse(text).map(|list| Self { list })
    }

    /// Returns a fault of the next `count` things that an action applies to.
    #[must_use]
    pub fn of_next(action: Action, count: u64) -> Self {
        let matcher = Matcher {
            nth: Positions::range(1..=count),
            ..Matcher::default()
        };
        let fault = Fault {
            line: 1,
            action,
            matcher,
        };
        Self { list: vec![fault] }
    }

    /// Returns those of a device, by its position.
    #[must_use]
    pub fn of_device(&self, device: usize) -> Self {
        self.retained(|fault| fault.matcher.device.is_none_or(|it| it == device))
    }

    /// Returns those for which `is_meant`.
    #[must_use]
    pub fn retained(&self, is_meant: impl Fn(&Fault) -> bool) -> Self {
        let list = self.list.iter().filter(|fault| is_meant(fault));
        Self {
            list: list.cloned().collect(),
        }
    }

    /// Returns the faults.
    #[must_use]
    pub fn list(&self) -> &[Fault] {
        &self.list
    }
}

/// A line of the text.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// Number of its line, from 1.
    pub line: usize,
    /// What happens.
    pub action: Action,
    /// To what it is limited.
    pub matcher: Matcher,
}

/// What a fault does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    /// A packet is lost.
    Lose,
    /// A packet arrives later, in nanoseconds; those delayed by one fault stay in order.
    Delay {
        /// At least.
        least: u64,
        /// At most.
        most: u64,
    },
    /// A packet arrives twice.
    Duplicate,
    /// A bit of a packet flips.
    Corrupt,
    /// A packet arrives after those of the next nanoseconds.
    Reorder(u64),
    /// A request of a reliable service is answered by a NAK.
    Nak(NakCode),
    /// A message that needs a receive is answered by an RNR NAK.
    Rnr,
    /// As above, until its first packet has been repeated for these nanoseconds.
    SlowReceiver(u64),
    /// The link goes down, for these nanoseconds or for good.
    LinkDown(Option<u64>),
    /// The link goes up.
    LinkUp,
    /// A queue pair fails, as by an error of the device.
    QpError,
    /// The completion queue of a queue pair's sends fails.
    CqError,
    /// The device fails for good, as a removed one.
    DeviceFatal,
    /// The process that has the device is killed; a device of a guest falls silent.
    Die,
    /// The device shows a health syndrome; with the flag it also stops. 0 ends it.
    Health(u8, bool),
    /// A verb fails with an error number. The index is that of [`VERBS`].
    FailVerb {
        /// Index of its name.
        verb: usize,
        /// The error number.
        errno: i32,
    },
    /// A command of the device fails with an internal error, by its opcode.
    FailCommand(u16),
    /// Registration fails beyond so many bytes of registered memory, as with a small
    /// RLIMIT_MEMLOCK.
    Memlock(u64),
    /// An event of this type is lost.
    LoseEvent(u8),
    /// A completion is lost.
    LoseCompletion,
    /// A receive of a shared receive queue completes as if its memory were absent.
    ReturnReceive,
}

/// What an action applies to, and counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// Packets.
    Packets,
    /// Received requests of reliable services.
    Requests,
    /// Nothing that passes: it happens once, at a time or at the packet that the matcher names.
    Once,
    /// Commands, or what happens in the device.
    Calls,
}

impl Action {
    /// Returns what the action applies to.
    #[must_use]
    pub fn subject(&self) -> Subject {
        match self {
            Self::Lose
            | Self::Delay { .. }
            | Self::Duplicate
            | Self::Corrupt
            | Self::Reorder(_) => Subject::Packets,
            Self::Nak(_) | Self::Rnr | Self::SlowReceiver(_) => Subject::Requests,
            Self::LinkDown(_)
            | Self::LinkUp
            | Self::QpError
            | Self::CqError
            | Self::DeviceFatal
            | Self::Die
            | Self::Health(..) => Subject::Once,
            Self::FailVerb { .. }
            | Self::FailCommand(_)
            | Self::Memlock(_)
            | Self::LoseEvent(_)
            | Self::LoseCompletion
            | Self::ReturnReceive => Subject::Calls,
        }
    }
}

/// A queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpName {
    /// By its number.
    Number(u32),
    /// By the order in which the device's queue pairs were created, from 1.
    Order(u32),
}

/// The other end of a packet's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A queue pair, by its number.
    Qp(u32),
    /// A host, by its address.
    Address(IpAddr),
}

/// The way of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// The device sends it.
    Out,
    /// The device receives it.
    In,
}

/// Kinds of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PacketKind {
    /// A part of a send.
    Send,
    /// A part of an RDMA write.
    Write,
    /// A request for an RDMA read.
    Read,
    /// A part of the answer to an RDMA read.
    ReadResponse,
    /// A request for an atomic operation.
    Atomic,
    /// The answer to an atomic operation.
    AtomicResponse,
    /// A positive acknowledgement.
    Ack,
    /// A negative acknowledgement, other than that of a receiver that is not ready.
    Nak,
    /// An RNR NAK.
    RnrNak,
    /// A notification of congestion.
    Cnp,
    /// A management datagram.
    Management,
    /// What is not RDMA.
    Other,
}

impl PacketKind {
    /// Returns the kind of a packet.
    #[must_use]
    pub fn of(view: &View<'_>) -> Self {
        use OpcodeFlags as F;
        if view.bth.opcode == CNP {
            return Self::Cnp;
        }
        let is_datagram = view.opcode.is_some_and(|it| it.class == Class::Ud);
        if is_datagram && view.bth.dest_qpn <= 1 {
            return Self::Management;
        }
        let is_response = view.has(F::RESPONSE);
        match () {
            () if view.has(F::SEND) => Self::Send,
            () if view.has(F::WRITE) => Self::Write,
            () if view.has(F::READ) && is_response => Self::ReadResponse,
            () if view.has(F::READ) => Self::Read,
            () if view.has(F::ATOMIC) && is_response => Self::AtomicResponse,
            () if view.has(F::ATOMIC) => Self::Atomic,
            () => match view.aeth() {
                Some(Aeth { syndrome, .. }) => match syndrome {
                    Syndrome::Ack(_) => Self::Ack,
                    Syndrome::RnrNak(_) => Self::RnrNak,
                    Syndrome::Nak(_) => Self::Nak,
                },
                None => Self::Other,
            },
        }
    }
}

/// To what a fault is limited. By default to nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matcher {
    /// Devices, by their index in the process.
    pub device: Option<usize>,
    /// Processes, by the name of their program.
    pub program: Option<String>,
    /// Packets, requests and failures of a queue pair.
    pub qp: Option<QpName>,
    /// Packets to or from another end.
    pub peer: Option<Peer>,
    /// Packets of a kind.
    pub opcode: Option<PacketKind>,
    /// Packets of a way.
    pub way: Option<Way>,
    /// Positions, from 1, among those that match all of the above and the time.
    pub nth: Positions,
    /// Probability of each of those.
    pub chance: Option<f64>,
    /// Seed of that probability.
    pub seed: Option<u64>,
    /// Nanoseconds since the fault was set, at least.
    pub after: Option<u64>,
    /// Nanoseconds since the fault was set, less than.
    pub until: Option<u64>,
}

impl Matcher {
    /// Returns whether only a packet can match.
    #[must_use]
    pub fn needs_packet(&self) -> bool {
        self.peer.is_some()
            || self.opcode.is_some()
            || self.way.is_some()
            || self.chance.is_some()
            || !self.nth.is_all()
    }

    /// Returns whether a process of a program is meant, given the name that the system keeps of
    /// it: the first 15 bytes.
    #[must_use]
    pub fn is_program(&self, kept: &str) -> bool {
        const LENGTH: usize = 15;
        self.program.as_deref().is_none_or(|name| {
            let short = name.as_bytes().get(..LENGTH).unwrap_or(name.as_bytes());
            short == kept.as_bytes()
        })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        text::write_fault(self, f)
    }
}

/// Parses a text of anybody. What is accepted is the same after it was written; what is refused
/// has a place in the text.
#[cfg(any(test, feature = "test-utils"))]
pub fn check_text(text: &str) {
    match Faults::parse(text) {
        Ok(faults) => {
            let lines = faults.list().iter().map(|fault| format!("{fault}\n"));
            let written = lines.collect::<String>();
            let again = Faults::parse(&written).map(|it| it.list);
            let expected = (1..).zip(&faults.list).map(|(line, fault)| Fault {
                line,
                ..fault.clone()
            });
            assert_eq!(again, Ok(expected.collect()), "{written}");
        }
        Err(error) => {
            let line = text.lines().nth(error.line - 1).unwrap_or_default();
            assert!(error.column <= line.chars().count() + 1, "{error}");
        }
    }
}
