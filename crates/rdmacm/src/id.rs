//! Ids, by which connections are made.

use core::time::Duration;
use std::net::SocketAddr;
use std::sync::Arc;

use uverbs::{AsyncEventType, QpAttr, QpAttrMask, QpState};

use crate::address::{self, Sockaddr};
use crate::entity::{Channel, Entity, Key, ReportedEvents, lock};
use crate::error;
use crate::event::{Form, RejectReason};
use crate::param::{self, ConnParam};
use crate::state::State;
use crate::{
    Address, Command, Error, EventKind, JoinFlags, Multicast, PortSpace, abi, abi::option,
};

/// An id of the connection manager. Like a socket it binds, listens, resolves
/// addresses and connects. Destroyed when dropped, which rejects a connection
/// request and disconnects a connection.
///
/// Each operation completes with an event of the channel. The kernel checks the
/// commands; an error caused by the wrong state is [`Error::WrongState`]. The
/// kernel serialises the commands of an id.
#[derive(Debug)]
pub struct Id {
    pub(crate) channel: Arc<Channel>,
    pub(crate) entity: Arc<Entity>,
}

/// Addresses and device of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Local address, if it is bound.
    pub local: Option<Address>,
    /// Peer address, if it has a peer.
    pub peer: Option<Address>,
    /// Device, if it is bound to one.
    pub device: Option<BoundDevice>,
}

/// The device that an id is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundDevice {
    /// Index of the device
    /// ([`discovery::Device::index`](uverbs::discovery::Device::index)).
    pub index: u32,
    /// Node GUID, host byte order.
    pub node_guid: u64,
    /// Port number, from 1.
    pub port: u8,
    /// Partition key, host byte order.
    pub pkey: u16,
}

/// Addresses and paths of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Addresses and device; the partition key is that of the first path.
    pub addresses: Addresses,
    paths: [abi::UserPathRec; 2],
    count: usize,
}

impl Route {
    /// Returns the primary path, followed by the alternate one. Empty before
    /// the route is resolved.
    pub fn paths(&self) -> &[abi::UserPathRec] {
        self.paths.get(..self.count).unwrap_or(&self.paths)
    }
}

/// Parses an address in an answer.
fn parse_address(command: Command, bytes: &[u8]) -> Result<Option<Address>, Error> {
    address::parse(bytes).map_err(|_| Error::BadAnswer {
        command,
        what: "an address of an unknown family",
    })
}

fn addresses(command: Command, answer: &abi::QueryAddrResp) -> Result<Addresses, Error> {
    // A size of zero means no address; other sizes are implied by the family.
    let local = parse_address(command, &answer.src_addr)?.filter(|_| answer.src_size != 0);
    let peer = parse_address(command, &answer.dst_addr)?.filter(|_| answer.dst_size != 0);
    Ok(Addresses {
        local,
        peer,
        device: (answer.port_num != 0).then(|| BoundDevice {
            index: answer.ibdev_index,
            node_guid: u64::from_be(answer.node_guid),
            port: answer.port_num,
            pkey: u16::from_be(answer.pkey),
        }),
    })
}

/// Converts to milliseconds, rounding up.
fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}

impl Id {
    pub(crate) fn new(channel: &Arc<Channel>, entity: Arc<Entity>, number: u32) -> Self {
        // The entity is not shared yet, so its number is not set.
        let _ = entity.number.set(number);
        Self {
            channel: Arc::clone(channel),
            entity,
        }
    }

    /// Returns the key that its events carry.
    pub fn key(&self) -> Key {
        self.entity.key
    }

    /// Returns the kernel's number of the id.
    pub fn number(&self) -> u32 {
        self.entity.number()
    }

    /// Returns its port space.
    pub fn port_space(&self) -> PortSpace {
        self.entity.port_space
    }

    /// Returns whether it is a datagram id.
    pub fn is_datagram(&self) -> bool {
        self.entity.form == Form::Datagram
    }

    /// Returns its state, as far as its commands and the events read so far
    /// show.
    pub fn state(&self) -> State {
        self.entity.state()
    }

    /// Turns an error into [`Error::WrongState`] if the state was the reason.
    fn explain(&self, error: Error, state: State) -> Error {
        match error {
            Error::Refused { command, errno, .. }
                if errno.raw() == libc::EINVAL && !error::allows(state, command) =>
            {
                Error::WrongState {
                    command,
                    id: self.number(),
                    state,
                }
            }
            other => other,
        }
    }

    /// Turns an error into [`Error::PrivateDataTooLong`] if that was the
    /// reason.
    fn explain_data(error: Error, len: usize, max: usize) -> Error {
        match error {
            Error::Refused { command, errno, .. } if errno.raw() == libc::EINVAL && len > max => {
                Error::PrivateDataTooLong { command, len, max }
            }
            other => other,
        }
    }

    /// Runs a command that leads to a state; restores the former state on
    /// error.
    fn transition(
        &self,
        state: State,
        command: impl FnOnce(u32) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let before = self.entity.enter_state(state);
        command(self.number()).map_err(|error| {
            self.entity.restore_state(state, before);
            self.explain(error, before)
        })
    }

    /// Runs a command that does not change the state.
    fn run<T>(&self, command: impl FnOnce(u32) -> Result<T, Error>) -> Result<T, Error> {
        command(self.number()).map_err(|error| self.explain(error, self.state()))
    }

    /// Binds to a local address. For port 0 the kernel chooses a port. The
    /// address of a device also binds the id to that device.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL, ENODEV; wrong state.
    pub fn bind(&self, address: impl Into<Address>) -> Result<(), Error> {
        let address = Sockaddr::from(&address.into());
        self.transition(State::Bound, |id| self.channel.ucm().bind(id, &address))
    }

    /// Starts to find the device that reaches `peer`, from `local` if given.
    /// Completes with [`EventKind::ADDR_RESOLVED`] or
    /// [`EventKind::ADDR_ERROR`].
    ///
    /// # Errors
    /// ENODEV, ENETUNREACH and other errors that are detected immediately;
    /// wrong state.
    pub fn resolve_address(
        &self,
        local: Option<Address>,
        peer: impl Into<Address>,
        timeout: Duration,
    ) -> Result<(), Error> {
        let peer = Sockaddr::from(&peer.into());
        let local = local.as_ref().map(Sockaddr::from);
        self.transition(State::ResolvingAddress, |id| {
            let ucm = self.channel.ucm();
            ucm.resolve_addr(id, local.as_ref(), &peer, millis(timeout))
        })
    }

    /// Starts to find the path to the peer. Completes with
    /// [`EventKind::ROUTE_RESOLVED`] or [`EventKind::ROUTE_ERROR`].
    ///
    /// # Errors
    /// Wrong state.
    pub fn resolve_route(&self, timeout: Duration) -> Result<(), Error> {
        self.transition(State::ResolvingRoute, |id| {
            self.channel.ucm().resolve_route(id, millis(timeout))
        })
    }

    /// Listens for connection requests, each an [`EventKind::CONNECT_REQUEST`].
    /// At most `backlog` unread requests are queued, others are rejected; zero
    /// selects the kernel's limit (1024).
    ///
    /// # Errors
    /// EADDRINUSE; wrong state.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        self.transition(State::Listening, |id| {
            self.channel.ucm().listen(id, backlog)
        })
    }

    /// Requests a connection from the peer. Completes with
    /// [`EventKind::CONNECT_RESPONSE`] (then call
    /// [`establish`](Self::establish)), or [`EventKind::ESTABLISHED`] for a
    /// datagram id; on failure with [`EventKind::REJECTED`],
    /// [`EventKind::UNREACHABLE`] or [`EventKind::CONNECT_ERROR`].
    ///
    /// # Errors
    /// Too much private data; wrong state.
    pub fn connect(&self, param: &ConnParam<'_>) -> Result<(), Error> {
        let kernel = param.to_kernel(Command::Connect)?;
        let max = match (self.port_space(), self.entity.form) {
            (PortSpace::IB, Form::Connection) => 92,
            (PortSpace::IB, Form::Datagram) => 216,
            (_, Form::Connection) => param::MAX_CONNECT_DATA,
            (_, Form::Datagram) => param::MAX_UD_CONNECT_DATA,
        };
        self.transition(State::Connecting, |id| {
            self.channel.ucm().connect(id, kernel)
        })
        .map_err(|error| Self::explain_data(error, param.private_data.len(), max))
    }

    /// Accepts the connection request that this id represents. The queue pair
    /// must be ready to receive ([`qp_attr`](Self::qp_attr)). Completes with
    /// [`EventKind::ESTABLISHED`]; for a datagram id, with this call.
    ///
    /// # Errors
    /// Too much private data, wrong state; the peer has then been rejected.
    pub fn accept(&self, param: &ConnParam<'_>) -> Result<(), Error> {
        let kernel = param.to_kernel(Command::Accept)?;
        let (next, max) = match self.entity.form {
            Form::Connection => (State::Accepting, param::MAX_ACCEPT_DATA),
            Form::Datagram => (State::Established, param::MAX_UD_ACCEPT_DATA),
        };
        let key = self.key().0;
        self.transition(next, |id| self.channel.ucm().accept(id, key, kernel))
            .map_err(|error| Self::explain_data(error, param.private_data.len(), max))
    }

    /// After [`EventKind::CONNECT_RESPONSE`], tells the peer that the queue
    /// pair is ready to send. No further event follows on this side.
    ///
    /// # Errors
    /// Wrong state.
    pub fn establish(&self) -> Result<(), Error> {
        self.transition(State::Established, |id| self.channel.ucm().establish(id))
    }

    /// Rejects the connection request that this id represents, or the peer's
    /// response.
    ///
    /// # Errors
    /// Too much private data; wrong state.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        self.reject_for(RejectReason::CONSUMER_DEFINED, private_data)
    }

    /// Rejects with a reason:
    /// [`CONSUMER_DEFINED`](RejectReason::CONSUMER_DEFINED) or
    /// [`VENDOR_OPTION_NOT_SUPPORTED`](RejectReason::VENDOR_OPTION_NOT_SUPPORTED).
    ///
    /// # Errors
    /// EINVAL for any other reason; otherwise as [`reject`](Self::reject).
    pub fn reject_for(&self, reason: RejectReason, private_data: &[u8]) -> Result<(), Error> {
        let command = Command::Reject;
        let reason = u8::try_from(reason.0).map_err(|_| Error::Invalid {
            command,
            what: "the reason is not between 0 and 255",
        })?;
        let (field, len) = param::private_data_field(command, private_data)?;
        self.transition(State::Failed, |id| {
            self.channel.ucm().reject(id, reason, field, len)
        })
        .map_err(|error| Self::explain_data(error, private_data.len(), param::MAX_REJECT_DATA))
    }

    /// Disconnects, or acknowledges that the peer disconnected. Completes with
    /// [`EventKind::DISCONNECTED`]. The caller must move the queue pair to the
    /// error state.
    ///
    /// # Errors
    /// Wrong state; a datagram id has no connection.
    pub fn disconnect(&self) -> Result<(), Error> {
        self.transition(State::Disconnected, |id| self.channel.ucm().disconnect(id))
    }

    /// Returns the attributes that move a queue pair of this id to a state, for
    /// [`Qp::modify`](uverbs::Qp::modify): `INIT` once the id has a device,
    /// `RTR` and `RTS` once the peer is known. On the active side, the first
    /// `INIT` grants the peer no access; modify to `INIT` again after
    /// [`EventKind::CONNECT_RESPONSE`].
    ///
    /// # Errors
    /// EINVAL if the connection has not reached that state; wrong state.
    pub fn qp_attr(&self, state: QpState) -> Result<(QpAttr, QpAttrMask), Error> {
        let answer = self.run(|id| self.channel.ucm().init_qp_attr(id, state.0))?;
        param::qp_attr(&answer).map_err(|what| Error::BadAnswer {
            command: Command::InitQpAttr,
            what,
        })
    }

    /// Queries addresses and device.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn addresses(&self) -> Result<Addresses, Error> {
        let answer = self.run(|id| self.channel.ucm().query_addr(id))?;
        addresses(Command::QueryAddr, &answer)
    }

    /// Returns the local IP address and port, if it is bound to one.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn local_addr(&self) -> Result<Option<SocketAddr>, Error> {
        Ok(self.addresses()?.local.and_then(|address| address.ip()))
    }

    /// Returns the peer's IP address and port, if it has a peer.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn peer_addr(&self) -> Result<Option<SocketAddr>, Error> {
        Ok(self.addresses()?.peer.and_then(|address| address.ip()))
    }

    /// Queries addresses and device, with the addresses as GIDs and service
    /// IDs.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn gids(&self) -> Result<Addresses, Error> {
        let answer = self.run(|id| self.channel.ucm().query_gid(id))?;
        addresses(Command::QueryGid, &answer)
    }

    /// Queries addresses, device and paths.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn route(&self) -> Result<Route, Error> {
        let command = Command::QueryRoute;
        let answer = self.run(|id| self.channel.ucm().query_route(id))?;
        let count = usize::try_from(answer.num_paths).unwrap_or(usize::MAX);
        if count > answer.ib_route.len() {
            return Err(Error::BadAnswer {
                command,
                what: "more paths than the maximum",
            });
        }
        let [primary, _] = &answer.ib_route;
        Ok(Route {
            addresses: Addresses {
                local: parse_address(command, &answer.src_addr)?,
                peer: parse_address(command, &answer.dst_addr)?,
                device: (answer.port_num != 0).then(|| BoundDevice {
                    index: answer.ibdev_index,
                    node_guid: u64::from_be(answer.node_guid),
                    port: answer.port_num,
                    pkey: u16::from_be_bytes(primary.pkey),
                }),
            },
            paths: answer.ib_route,
            count,
        })
    }

    /// Queries the paths in the subnet administrator's format, which
    /// [`set_ib_path`](Self::set_ib_path) accepts.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn ib_paths(&self) -> Result<Vec<abi::PathRecData>, Error> {
        let (count, paths) = self.run(|id| self.channel.ucm().query_path(id))?;
        Ok(paths.into_iter().take(count).collect())
    }

    fn set(&self, level: u32, name: u32, value: &[u8]) -> Result<(), Error> {
        self.run(|id| self.channel.ucm().set_option(id, level, name, value))
    }

    /// Sets the type of service of the connection. Call before the route is
    /// resolved.
    ///
    /// # Errors
    /// None in normal operation.
    pub fn set_type_of_service(&self, tos: u8) -> Result<(), Error> {
        self.set(option::OPTION_ID, option::OPTION_ID_TOS, &[tos])
    }

    /// Sets whether the local address may be shared. Call before binding.
    ///
    /// # Errors
    /// EINVAL if it is bound.
    pub fn set_reuse_address(&self, reuse: bool) -> Result<(), Error> {
        let value = i32::from(reuse).to_ne_bytes();
        self.set(option::OPTION_ID, option::OPTION_ID_REUSEADDR, &value)
    }

    /// Sets whether binding to an IPv6 address excludes IPv4. Call before
    /// binding.
    ///
    /// # Errors
    /// EINVAL if it is bound.
    pub fn set_ipv6_only(&self, only: bool) -> Result<(), Error> {
        let value = i32::from(only).to_ne_bytes();
        self.set(option::OPTION_ID, option::OPTION_ID_AFONLY, &value)
    }

    /// Sets the acknowledgement timeout of the queue pair, as a 5-bit code:
    /// 4.096 µs × 2^n.
    ///
    /// # Errors
    /// EINVAL for a datagram id.
    pub fn set_ack_timeout(&self, code: u8) -> Result<(), Error> {
        if code > 31 {
            return Err(Error::Invalid {
                command: Command::SetOption,
                what: "the acknowledgement timeout code exceeds 31",
            });
        }
        self.set(option::OPTION_ID, option::OPTION_ID_ACK_TIMEOUT, &[code])
    }

    /// Sets the path instead of resolving the route; the same event follows.
    /// InfiniBand only.
    ///
    /// # Errors
    /// EINVAL if no path is a primary one; wrong state.
    pub fn set_ib_path(&self, paths: &[abi::PathRecData]) -> Result<(), Error> {
        use zerocopy::IntoBytes;
        let before = self.entity.enter_state(State::ResolvingRoute);
        let result = self.set(option::OPTION_IB, option::OPTION_IB_PATH, paths.as_bytes());
        if result.is_err() {
            self.entity.restore_state(State::ResolvingRoute, before);
        }
        result
    }

    /// Reports an asynchronous event of the queue pair:
    /// [`COMM_EST`](AsyncEventType::COMM_EST) establishes the connection.
    ///
    /// # Errors
    /// Wrong state.
    pub fn notify(&self, event: AsyncEventType) -> Result<(), Error> {
        self.run(|id| self.channel.ucm().notify(id, event.0))
    }

    /// Starts to join a multicast group. Completes with
    /// [`EventKind::MULTICAST_JOIN`] or [`EventKind::MULTICAST_ERROR`].
    ///
    /// # Errors
    /// EINVAL if it is not a datagram id; wrong state.
    pub fn join_multicast(
        &self,
        group: impl Into<Address>,
        flags: JoinFlags,
    ) -> Result<Multicast, Error> {
        let group = Sockaddr::from(&group.into());
        let owner = Some(Arc::clone(&self.entity));
        let kind = (self.port_space(), Form::Datagram);
        // Registered before the command, since its event may arrive before the
        // command returns.
        let entity = Entity::new(&self.channel, kind, State::Idle, owner);
        let number = self.run(|id| {
            let ucm = self.channel.ucm();
            ucm.join_mcast(id, entity.key.0, &group, flags.0)
        })?;
        // Set only here.
        let _ = entity.number.set(number);
        Ok(Multicast::new(entity))
    }

    /// Adds an [`EventKind::USER`] of this id to the channel's queue, to wake a
    /// waiting thread.
    ///
    /// # Errors
    /// EINVAL if the kernel does not support it, as Linux 6.12.
    pub fn write_event(&self, argument: u64) -> Result<(), Error> {
        let kind = EventKind::USER.0;
        self.run(|id| self.channel.ucm().write_cm_event(id, kind, 0, argument))
    }

    /// Destroys the id. Its unread events are discarded; the result accounts
    /// for those that were read. If another thread has just read an event of
    /// the id, that event is not delivered.
    ///
    /// # Errors
    /// The kernel's reason, with the id.
    pub fn destroy(self) -> Result<ReportedEvents, (Self, Error)> {
        match self.end() {
            Ok(count) => Ok(ReportedEvents {
                entity: Arc::clone(&self.entity),
                count,
            }),
            Err(error) => Err((self, error)),
        }
    }

    fn end(&self) -> Result<u32, Error> {
        let mut alive = lock(&self.entity.alive);
        if !*alive {
            return Ok(0);
        }
        let count = self.channel.ucm().destroy_id(self.number())?;
        *alive = false;
        Ok(count)
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "destroying an id failed");
        }
    }
}
