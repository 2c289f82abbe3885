//! States of an id, to explain errors of the kernel.

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
    /// The device was removed; the id can only be destroyed.
    DeviceRemoved,
}
