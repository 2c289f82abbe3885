//! States of an id, to explain errors of the kernel.

use crate::Command;

/// State of an id, as far as its commands and the events read so far show. The
/// kernel's state may be further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum State {
    /// Created.
    Idle,
    /// Bound to a local address.
    Bound,
    /// Its address is being resolved.
    ResolvingAddress,
    /// Bound to a device that reaches the peer.
    AddressResolved,
    /// Its route is being resolved.
    ResolvingRoute,
    /// Ready to connect.
    RouteResolved,
    /// Listening for connection requests.
    Listening,
    /// A connection request that has not been answered.
    Requested,
    /// A connection was requested.
    Connecting,
    /// The peer has accepted, and waits until the queue pair is ready.
    Responded,
    /// Accepted; waiting for the peer.
    Accepting,
    /// Connected; for a datagram id: the peer is known to it, or it to the
    /// peer.
    Established,
    /// The connection failed, or was rejected by either side.
    Failed,
    /// Disconnecting or disconnected.
    Disconnected,
    /// The device is gone; the id can only be destroyed.
    DeviceRemoved,
}

/// Returns whether a command can succeed in a state. Only used after an error.
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

/// Describes what the command requires.
pub(crate) const fn needed(command: Command) -> &'static str {
    match command {
        Command::Bind | Command::BindIp => "binding needs a new id",
        Command::ResolveAddr | Command::ResolveIp => "resolving an address needs a new or bound id",
        Command::Listen => "listening needs a new or bound id",
        Command::ResolveRoute => "the route is resolved after ADDR_RESOLVED",
        Command::Connect => "connecting comes after ROUTE_RESOLVED",
        Command::Accept => "only a connection request can be accepted, once",
        Command::Establish => "only a connect response can be accepted, once",
        Command::Reject => "only a connection request or response can be rejected",
        Command::Disconnect => "the id has no connection",
        _ => "the id has no device: bind it or resolve an address first",
    }
}
