//! Ids: what connections are made with.

use core::time::Duration;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;

use uverbs::{AsyncEventType, QpAttr, QpAttrMask, QpState};

use crate::address::{self, Sockaddr};
use crate::channel::Channel;
use crate::entity::{Entity, Key, Reported, lock};
use crate::event::{Form, RejectReason};
use crate::param::{self, ConnParam};
use crate::state::{self, State};
use crate::{
    Address, Command, Error, EventChannel, EventKind, JoinFlags, Multicast, abi, abi::option,
};
use uverbs::open_enum;

open_enum! {
    /// Which space an id's port is of (`enum rdma_ucm_port_space`).
    PortSpace(u16) {
        /// Datagrams to IPoIB.
        IPOIB = 0x0002,
        /// Connections as TCP's.
        TCP = 0x0106,
        /// Datagrams as UDP's.
        UDP = 0x0111,
        /// Any service, by InfiniBand addresses.
        IB = 0x013f,
    }
}

/// An id of the connection manager's: as a socket, it is bound, listens,
/// resolves, connects. Destroyed when dropped; a connection request is
/// rejected by that, a connection disconnected.
///
/// What is begun here ends with an event of the channel. Commands are checked
/// by the kernel; a refusal for the wrong state is [`Error::WrongState`].
/// Commands of one id are serialised by the kernel.
#[derive(Debug)]
pub struct Id {
    channel: Arc<Channel>,
    pub(crate) entity: Arc<Entity>,
}

/// Where an id is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Our address, if it is bound.
    pub local: Option<Address>,
    /// The peer's address, if there is one.
    pub peer: Option<Address>,
    /// The device, if it has one.
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
    /// Port, from 1.
    pub port: u8,
    /// Partition key, host byte order.
    pub pkey: u16,
}

/// Addresses and paths of an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Addresses and device; the partition key is the first path's.
    pub addresses: Addresses,
    paths: [abi::UserPathRec; 2],
    count: usize,
}

impl Route {
    /// The primary path, then the alternate one. Before the route is resolved
    /// there is none.
    pub fn paths(&self) -> &[abi::UserPathRec] {
        self.paths.get(..self.count).unwrap_or(&self.paths)
    }
}

/// An address in an answer.
fn answered(command: Command, bytes: &[u8]) -> Result<Option<Address>, Error> {
    address::parse(bytes).map_err(|_| Error::BadAnswer {
        command,
        what: "an address of an unknown family",
    })
}

fn addresses(command: Command, answer: &abi::QueryAddrResp) -> Result<Addresses, Error> {
    // The sizes are the families'; a size of none is no address.
    let local = answered(command, &answer.src_addr)?.filter(|_| answer.src_size != 0);
    let peer = answered(command, &answer.dst_addr)?.filter(|_| answer.dst_size != 0);
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

/// Whole milliseconds, rounded up.
fn millis(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)
}

impl Id {
    pub(crate) fn new(channel: &Arc<Channel>, entity: Arc<Entity>, number: u32) -> Self {
        // Nobody else has this entity yet, so there is none set.
        let _ = entity.number.set(number);
        Self {
            channel: Arc::clone(channel),
            entity,
        }
    }

    /// What its events name.
    pub fn key(&self) -> Key {
        self.entity.key
    }

    /// The kernel's number of it.
    pub fn number(&self) -> u32 {
        self.entity.number()
    }

    /// Its port space.
    pub fn port_space(&self) -> PortSpace {
        self.entity.port_space
    }

    /// Whether it is for datagrams.
    pub fn is_datagram(&self) -> bool {
        self.entity.form == Form::Datagram
    }

    /// Its state, as far as commands and events that were read tell.
    pub fn state(&self) -> State {
        self.entity.state()
    }

    /// The channel that it is on.
    pub fn channel(&self) -> EventChannel {
        EventChannel {
            inner: Arc::clone(&self.channel),
        }
    }

    /// Says in an error that the state was the reason, if it was.
    fn explain(&self, error: Error, state: State) -> Error {
        match error {
            Error::Refused { command, errno, .. }
                if errno.raw() == libc::EINVAL && !state::allows(state, command) =>
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

    /// Says in an error that there was too much private data, if there was.
    fn explain_data(error: Error, len: usize, max: usize) -> Error {
        match error {
            Error::Refused { command, errno, .. } if errno.raw() == libc::EINVAL && len > max => {
                Error::PrivateDataTooLong { command, len, max }
            }
            other => other,
        }
    }

    /// Runs a command that leads to a state, or leaves all as it is.
    fn go(
        &self,
        state: State,
        command: impl FnOnce(u32) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let before = self.entity.enter(state);
        command(self.number()).map_err(|error| {
            self.entity.back(state, before);
            self.explain(error, before)
        })
    }

    /// Runs a command that leaves the state.
    fn stay<T>(&self, command: impl FnOnce(u32) -> Result<T, Error>) -> Result<T, Error> {
        command(self.number()).map_err(|error| self.explain(error, self.state()))
    }

    /// Binds to a local address; of port 0 the kernel chooses the port. An
    /// address that is a device's also binds to the device.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL, ENODEV; wrong state.
    pub fn bind(&self, address: impl Into<Address>) -> Result<(), Error> {
        let address = Sockaddr::from(&address.into());
        self.go(State::Bound, |id| self.channel.ucm().bind(id, &address))
    }

    /// Begins to find the device that reaches `peer`, from `local` if that is
    /// given. Ends with [`EventKind::ADDR_RESOLVED`] or
    /// [`EventKind::ADDR_ERROR`].
    ///
    /// # Errors
    /// ENODEV, ENETUNREACH and others that are known at once; wrong state.
    pub fn resolve_address(
        &self,
        local: Option<Address>,
        peer: impl Into<Address>,
        timeout: Duration,
    ) -> Result<(), Error> {
        let peer = Sockaddr::from(&peer.into());
        let local = local.as_ref().map(Sockaddr::from);
        self.go(State::ResolvingAddress, |id| {
            let ucm = self.channel.ucm();
            ucm.resolve_addr(id, local.as_ref(), &peer, millis(timeout))
        })
    }

    /// Begins to find the path to the peer. Ends with
    /// [`EventKind::ROUTE_RESOLVED`] or [`EventKind::ROUTE_ERROR`].
    ///
    /// # Errors
    /// Wrong state.
    pub fn resolve_route(&self, timeout: Duration) -> Result<(), Error> {
        self.go(State::ResolvingRoute, |id| {
            self.channel.ucm().resolve_route(id, millis(timeout))
        })
    }

    /// Takes connection requests, each a [`EventKind::CONNECT_REQUEST`]. As
    /// many as `backlog` wait to be read, more are refused; zero is the
    /// kernel's limit (1024).
    ///
    /// # Errors
    /// EADDRINUSE; wrong state.
    pub fn listen(&self, backlog: u32) -> Result<(), Error> {
        self.go(State::Listening, |id| {
            self.channel.ucm().listen(id, backlog)
        })
    }

    /// Asks the peer. Ends with [`EventKind::CONNECT_RESPONSE`] (then
    /// [`establish`](Self::establish)), of a datagram id
    /// [`EventKind::ESTABLISHED`]; or with [`EventKind::REJECTED`],
    /// [`EventKind::UNREACHABLE`], [`EventKind::CONNECT_ERROR`].
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
        self.go(State::Connecting, |id| {
            self.channel.ucm().connect(id, kernel)
        })
        .map_err(|error| Self::explain_data(error, param.private_data.len(), max))
    }

    /// Accepts the connection request that this id is. The queue pair must be
    /// ready to receive ([`qp_attr`](Self::qp_attr)). Ends with
    /// [`EventKind::ESTABLISHED`]; of a datagram id with this call.
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
        self.go(next, |id| self.channel.ucm().accept(id, key, kernel))
            .map_err(|error| Self::explain_data(error, param.private_data.len(), max))
    }

    /// Tells the peer, after [`EventKind::CONNECT_RESPONSE`], that the queue
    /// pair is ready to send. There is no further event here.
    ///
    /// # Errors
    /// Wrong state.
    pub fn establish(&self) -> Result<(), Error> {
        self.go(State::Established, |id| self.channel.ucm().establish(id))
    }

    /// Rejects the connection request that this id is, or the peer's response.
    ///
    /// # Errors
    /// Too much private data; wrong state.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        self.reject_for(RejectReason::CONSUMER_DEFINED, private_data)
    }

    /// Rejects for a reason:
    /// [`CONSUMER_DEFINED`](RejectReason::CONSUMER_DEFINED) or
    /// [`VENDOR_OPTION_NOT_SUPPORTED`](RejectReason::VENDOR_OPTION_NOT_SUPPORTED).
    ///
    /// # Errors
    /// EINVAL for any other reason; as [`reject`](Self::reject).
    pub fn reject_for(&self, reason: RejectReason, private_data: &[u8]) -> Result<(), Error> {
        let command = Command::Reject;
        let reason = u8::try_from(reason.0).map_err(|_| Error::Invalid {
            command,
            what: "a reason to reject is a byte",
        })?;
        let (room, len) = param::room(command, private_data)?;
        self.go(State::Failed, |id| {
            self.channel.ucm().reject(id, reason, room, len)
        })
        .map_err(|error| Self::explain_data(error, private_data.len(), param::MAX_REJECT_DATA))
    }

    /// Disconnects, or answers the peer's disconnecting. Ends with
    /// [`EventKind::DISCONNECTED`]. The queue pair is its user's to take to
    /// the error state.
    ///
    /// # Errors
    /// Wrong state; a datagram id has no connection.
    pub fn disconnect(&self) -> Result<(), Error> {
        self.go(State::Disconnected, |id| self.channel.ucm().disconnect(id))
    }

    /// The attributes that take a queue pair of this id to a state, for
    /// [`Qp::modify`](uverbs::Qp::modify): to `INIT` when the id has a device,
    /// to `RTR` and `RTS` when the peer is known. Of an active id the first
    /// `INIT` gives the peer no access; after
    /// [`EventKind::CONNECT_RESPONSE`] it is to be gone to once more.
    ///
    /// # Errors
    /// EINVAL if the connection is not that far; wrong state.
    pub fn qp_attr(&self, state: QpState) -> Result<(QpAttr, QpAttrMask), Error> {
        let answer = self.stay(|id| self.channel.ucm().init_qp_attr(id, state.0))?;
        param::qp_attr(&answer).map_err(|what| Error::BadAnswer {
            command: Command::InitQpAttr,
            what,
        })
    }

    /// Addresses and device.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn addresses(&self) -> Result<Addresses, Error> {
        let answer = self.stay(|id| self.channel.ucm().query_addr(id))?;
        addresses(Command::QueryAddr, &answer)
    }

    /// Our IP address and port, if it is bound to one.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn local_addr(&self) -> Result<Option<SocketAddr>, Error> {
        Ok(self.addresses()?.local.and_then(|address| address.ip()))
    }

    /// The peer's IP address and port, if there is one.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn peer_addr(&self) -> Result<Option<SocketAddr>, Error> {
        Ok(self.addresses()?.peer.and_then(|address| address.ip()))
    }

    /// Addresses and device, with the addresses as GIDs and services.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn gids(&self) -> Result<Addresses, Error> {
        let answer = self.stay(|id| self.channel.ucm().query_gid(id))?;
        addresses(Command::QueryGid, &answer)
    }

    /// Addresses, device and paths.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn route(&self) -> Result<Route, Error> {
        let command = Command::QueryRoute;
        let answer = self.stay(|id| self.channel.ucm().query_route(id))?;
        let count = usize::try_from(answer.num_paths).unwrap_or(usize::MAX);
        if count > answer.ib_route.len() {
            return Err(Error::BadAnswer {
                command,
                what: "more paths than there is room for",
            });
        }
        let [primary, _] = &answer.ib_route;
        Ok(Route {
            addresses: Addresses {
                local: answered(command, &answer.src_addr)?,
                peer: answered(command, &answer.dst_addr)?,
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

    /// Paths in the subnet administrator's format, as
    /// [`set_ib_path`](Self::set_ib_path) takes them.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn ib_paths(&self) -> Result<Vec<abi::PathRecData>, Error> {
        let (count, paths) = self.stay(|id| self.channel.ucm().query_path(id))?;
        Ok(paths.into_iter().take(count).collect())
    }

    fn set(&self, level: u32, name: u32, value: &[u8]) -> Result<(), Error> {
        self.stay(|id| self.channel.ucm().set_option(id, level, name, value))
    }

    /// Sets the type of service of the connection, before the route is resolved.
    ///
    /// # Errors
    /// None in the normal course.
    pub fn set_type_of_service(&self, tos: u8) -> Result<(), Error> {
        self.set(option::OPTION_ID, option::OPTION_ID_TOS, &[tos])
    }

    /// Whether the local address may be shared, before it is bound.
    ///
    /// # Errors
    /// EINVAL when it is bound.
    pub fn set_reuse_address(&self, reuse: bool) -> Result<(), Error> {
        let value = i32::from(reuse).to_ne_bytes();
        self.set(option::OPTION_ID, option::OPTION_ID_REUSEADDR, &value)
    }

    /// Whether binding to an IPv6 address leaves IPv4 alone, before it is bound.
    ///
    /// # Errors
    /// EINVAL when it is bound.
    pub fn set_ipv6_only(&self, only: bool) -> Result<(), Error> {
        let value = i32::from(only).to_ne_bytes();
        self.set(option::OPTION_ID, option::OPTION_ID_AFONLY, &value)
    }

    /// Sets the acknowledgement timeout of the queue pair, a code of 5 bits:
    /// 4.096 µs × 2^n.
    ///
    /// # Errors
    /// EINVAL of a datagram id.
    pub fn set_ack_timeout(&self, code: u8) -> Result<(), Error> {
        if code > 31 {
            return Err(Error::Invalid {
                command: Command::SetOption,
                what: "an acknowledgement timeout's code has 5 bits",
            });
        }
        self.set(option::OPTION_ID, option::OPTION_ID_ACK_TIMEOUT, &[code])
    }

    /// Gives the path instead of resolving the route; the same event follows.
    /// InfiniBand only.
    ///
    /// # Errors
    /// EINVAL without a primary path among them; wrong state.
    pub fn set_ib_path(&self, paths: &[abi::PathRecData]) -> Result<(), Error> {
        use zerocopy::IntoBytes;
        let before = self.entity.enter(State::ResolvingRoute);
        let result = self.set(option::OPTION_IB, option::OPTION_IB_PATH, paths.as_bytes());
        if result.is_err() {
            self.entity.back(State::ResolvingRoute, before);
        }
        result
    }

    /// Tells of an asynchronous event of the queue pair:
    /// [`COMM_EST`](AsyncEventType::COMM_EST) establishes the connection.
    ///
    /// # Errors
    /// Wrong state.
    pub fn notify(&self, event: AsyncEventType) -> Result<(), Error> {
        self.stay(|id| self.channel.ucm().notify(id, event.0))
    }

    /// Begins to join a multicast group. Ends with
    /// [`EventKind::MULTICAST_JOIN`] or [`EventKind::MULTICAST_ERROR`].
    ///
    /// # Errors
    /// EINVAL of an id that is not for datagrams; wrong state.
    pub fn join_multicast(
        &self,
        group: impl Into<Address>,
        flags: JoinFlags,
    ) -> Result<Multicast, Error> {
        let group = Sockaddr::from(&group.into());
        let owner = Some(Arc::clone(&self.entity));
        let kind = (self.port_space(), Form::Datagram);
        // Known before the command is back, since its event may come before.
        let entity = Entity::new(&self.channel, kind, State::Idle, owner);
        let number = self.stay(|id| {
            let ucm = self.channel.ucm();
            ucm.join_mcast(id, entity.key.0, &group, flags.0)
        })?;
        // Nobody else sets it.
        let _ = entity.number.set(number);
        Ok(Multicast::new(entity))
    }

    /// Moves it to another channel, with its unread events. Gives the number
    /// of its events that were read of the former one.
    ///
    /// # Errors
    /// The kernel's reason; it stays where it is then.
    pub fn migrate(&mut self, to: &EventChannel) -> Result<u32, Error> {
        let _alive = lock(&self.entity.alive);
        self.entity.expect_on(&to.inner);
        let number = self.number();
        let reported = to
            .inner
            .ucm()
            .migrate_id(number, self.channel.file.as_fd())?;
        self.entity.move_to(&to.inner);
        self.channel = Arc::clone(&to.inner);
        Ok(reported)
    }

    /// Puts an [`EventKind::USER`] of this id into the channel's queue, to wake
    /// who waits there.
    ///
    /// # Errors
    /// EINVAL on kernels that do not have this, as Linux 6.12.
    pub fn write_event(&self, argument: u64) -> Result<(), Error> {
        let kind = EventKind::USER.0;
        self.stay(|id| self.channel.ucm().write_cm_event(id, kind, 0, argument))
    }

    /// Destroys it. Unread events of it are gone; of those that were read, the
    /// answer tells. A thread that has just read one does not deliver it.
    ///
    /// # Errors
    /// The id is given back with the kernel's reason.
    pub fn destroy(self) -> Result<Reported, (Self, Error)> {
        match self.end() {
            Ok(reported) => Ok(Reported {
                entity: Arc::clone(&self.entity),
                reported,
            }),
            Err(error) => Err((self, error)),
        }
    }

    fn end(&self) -> Result<u32, Error> {
        let mut alive = lock(&self.entity.alive);
        if !*alive {
            return Ok(0);
        }
        let reported = self.channel.ucm().destroy_id(self.number())?;
        *alive = false;
        Ok(reported)
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "an id was not destroyed");
        }
    }
}
