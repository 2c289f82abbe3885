//! Structures of the objects of a program that [`object`](super::object) does not define.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use mlx5_abi::FlowCountersDesc;
use uverbs::QpState;

use crate::addresses::PacketAccess;
use crate::driver::command::Input;
use crate::driver::event::{EventCounter, EventFile};
use crate::driver::object::Events;

/// Counters of flows.
#[derive(Debug)]
pub(crate) struct Counters {
    /// The device's counter.
    pub(crate) number: u32,
    /// The counted value for each index, as the first flow describes them; not used while no
    /// flow uses the counters.
    pub(crate) points: Vec<FlowCountersDesc>,
}

/// An object that a program created by a command.
#[derive(Debug)]
pub(crate) struct DevxObject {
    /// The command that created it.
    pub(crate) opcode: u16,
    /// Type of a general object.
    pub(crate) general: u32,
    pub(crate) number: u32,
    /// The command that destroys it.
    pub(crate) destroy: Input,
    /// The interface's raw packets, of a queue of packets.
    pub(crate) _packets: Option<Arc<dyn PacketAccess>>,
}

/// Attributes of a target, which are passed to the device when it becomes ready to receive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) state: QpState,
    pub(crate) pd: u32,
    pub(crate) cq: u32,
    pub(crate) srq: u32,
    pub(crate) scatter: u32,
    pub(crate) user_index: u32,
    pub(crate) access_key: u64,
}

/// The header fields that a rule matches: their bits as a mask, and the values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Match {
    pub(crate) mask: Headers,
    pub(crate) value: Headers,
}

/// Outer headers in the layout that rules match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Headers(pub(crate) [u8; 64]);

/// The destination of matching frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Destination {
    Drop,
    /// The flow tables of the kernel, which has none here.
    Kernel,
    Tir(u32),
}

/// The actions of a flow on matching frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Actions {
    pub(crate) destination: Destination,
    /// The tag of their completions.
    pub(crate) tag: Option<u32>,
    /// The number of a counter.
    pub(crate) counter: Option<u32>,
    /// The number of a change of their headers.
    pub(crate) header_change: Option<u32>,
}

/// A rule of the device, shared by flows with the same match.
#[derive(Debug)]
pub(crate) struct FlowRule {
    pub(crate) group: u32,
    pub(crate) what: Match,
    /// The actions of the flow that created it: its tag and its change of headers are those
    /// of all.
    pub(crate) first: Actions,
    /// The actions, one for each flow.
    pub(crate) actions: Vec<Actions>,
}

/// The rules for received frames.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    pub(crate) table: Option<u32>,
    /// By index in the table: lower ones are matched first.
    pub(crate) rules: BTreeMap<u32, FlowRule>,
}

/// A flow.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flow {
    /// Index of its rule.
    pub(crate) index: u32,
    pub(crate) actions: Actions,
}

/// A matcher.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matcher {
    pub(crate) mask: Headers,
    pub(crate) priority: u16,
}

/// A flow action: a change of headers.
#[derive(Debug)]
pub(crate) struct HeaderChange {
    pub(crate) number: u32,
}

/// The device objects of a raw packet queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    /// The state that the program has set.
    pub(crate) state: QpState,
    pub(crate) tis: Option<u32>,
    pub(crate) sq: Option<u32>,
    pub(crate) rq: Option<u32>,
    /// The destination of flows; `None` without a receive queue.
    pub(crate) tir: Option<u32>,
}

/// A work queue.
#[derive(Debug)]
pub(crate) struct WorkQueue {
    pub(crate) number: u32,
    pub(crate) state: u32,
    pub(crate) events: Events,
}

/// A subscription of a file to events of a type.
#[derive(Debug)]
pub(crate) struct Subscription {
    pub(crate) channel: Arc<EventFile>,
    /// The handle of the object; `None` for events of the device.
    pub(crate) object: Option<u32>,
    pub(crate) event: u8,
    pub(crate) report: Report,
    /// Identifies its events in the file.
    pub(crate) reported: EventCounter,
}

#[derive(Debug)]
pub(crate) enum Report {
    /// A record in the file, with this cookie.
    Cookie(u64),
    /// A count of this eventfd.
    EventFd(OwnedFd),
}
