//! The states of an id, to explain why the kernel refused.

use crate::Command;

/// Where an id is in its life, as far as its commands and the events that were
/// read of it tell. The kernel may be ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Made.
    Idle,
    /// Bound to a local address.
    Bound,
    /// Its address is being resolved.
    ResolvingAddress,
    /// It is bound to a device that reaches the peer.
    AddressResolved,
    /// Its route is being resolved.
    ResolvingRoute,
    /// It can connect.
    RouteResolved,
    /// It takes connection requests.
    Listening,
    /// It is a connection request that awaits an answer.
    Requested,
    /// It has asked for a connection.
    Connecting,
    /// The peer has accepted, and awaits that the queue pair is ready.
    Responded,
    /// It has accepted, and awaits the peer.
    Accepting,
    /// Connected; of a datagram id: it knows its peer, or the peer knows it.
    Established,
    /// The connection failed, or was rejected, on either side.
    Failed,
    /// Disconnecting or disconnected.
    Disconnected,
    /// The device is gone; the id can only be destroyed.
    DeviceRemoved,
}

/// Whether a command can succeed in a state. Only asked after a refusal.
pub(crate) const fn allows(state: State, command: Command) -> bool {
    use State::{
        Accepting, AddressResolved, Bound, Connecting, Disconnected, Established, Idle, Requested,
        Responded, RouteResolved,
    };
    match command {
        Command::Bind | Command::BindIp => matches!(state, Idle),
        Command::ResolveAddr | Command::ResolveIp | Command::Listen => {
            matches!(state, Idle | Bound)
        }
        Command::ResolveRoute => matches!(state, AddressResolved),
        Command::Connect => matches!(state, RouteResolved),
        Command::Accept => matches!(state, Requested),
        Command::Establish => matches!(state, Responded),
        Command::Reject => matches!(state, Requested | Responded),
        Command::Disconnect => matches!(
            state,
            Connecting | Responded | Accepting | Established | Disconnected
        ),
        Command::InitQpAttr | Command::Notify | Command::JoinMcast | Command::JoinIpMcast => {
            !matches!(state, Idle | State::DeviceRemoved)
        }
        _ => true,
    }
}

/// What the command needs, in words.
pub(crate) const fn needed(command: Command) -> &'static str {
    match command {
        Command::Bind | Command::BindIp => "only a new id is bound",
        Command::ResolveAddr | Command::ResolveIp => {
            "an address is resolved on an id that is new or bound"
        }
        Command::Listen => "an id listens that is new or bound",
        Command::ResolveRoute => "a route is resolved after ADDR_RESOLVED",
        Command::Connect => "connecting comes after ROUTE_RESOLVED",
        Command::Accept => "only a connection request is accepted, once",
        Command::Establish => "only a connect response is accepted, once",
        Command::Reject => "only a connection request or response is rejected",
        Command::Disconnect => "only a connection is disconnected",
        _ => "the id has no device yet, or no more: bind it or resolve an address first",
    }
}
