//! The commands, one method each, on an open rdma_cm device file.
//!
//! [`Ucm`] runs a command and checks the format of the answer; it returns
//! structures of the ABI. Programs use [`Id`](crate::Id) and
//! [`EventChannel`](crate::EventChannel).

use std::os::fd::{AsRawFd, BorrowedFd};

use uverbs::kernel::{Descriptor, Kernel};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::abi::{self, cmd, newer, query};
use crate::{Command, Error};

/// Size of the longest command with its header.
const MAX_COMMAND: usize = 336;
/// Maximum number of paths in the answer to a query; the same as librdmacm's.
pub const MAX_PATHS: usize = 6;
/// The kernel writes a path only if more than its size is left, hence the 8.
const PATHS_SIZE: usize =
    size_of::<abi::QueryPathResp>() + MAX_PATHS * size_of::<abi::PathRecData>() + 8;

/// An open rdma_cm device file, borrowed for the duration of commands. Only a
/// channel provides one:
///
/// ```compile_fail,E0451
/// let _ = ringverbs_rdmacm::command::Ucm { file: unreachable!() };
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Ucm<'k> {
    /// Always the rdma_cm device: the data written to it are commands that
    /// contain addresses.
    pub(crate) file: &'k Descriptor<Box<dyn Kernel>>,
}

/// A command whose answer is written to an address.
trait WithResponse: IntoBytes + Immutable {
    fn response(&mut self) -> &mut u64;
}

macro_rules! with_response {
    ($($name:ident),+) => {$(
        impl WithResponse for abi::$name {
            fn response(&mut self) -> &mut u64 {
                &mut self.response
            }
        }
    )+};
}
with_response!(
    CreateId,
    DestroyId,
    Query,
    InitQpAttr,
    JoinIpMcast,
    JoinMcast,
    GetEvent,
    MigrateId
);

impl Ucm<'_> {
    /// Writes a command.
    ///
    /// # Safety
    /// The addresses in `body` must be valid: a response address for writing
    /// `out_len` bytes, an option value's for reading.
    unsafe fn write<B: IntoBytes + Immutable>(
        &self,
        (command, number): (Command, u32),
        id: Option<u32>,
        body: &B,
        out_len: usize,
    ) -> Result<(), Error> {
        const { assert!(size_of::<abi::CmdHdr>() + size_of::<B>() <= MAX_COMMAND) };
        let header = abi::CmdHdr {
            cmd: number,
            // The casts cannot truncate: the structures have at most 440 bytes.
            in_len: size_of::<B>() as u16,
            out_len: out_len as u16,
        };
        let mut frame = [0u8; MAX_COMMAND];
        let (head, rest) = frame.split_at_mut(size_of::<abi::CmdHdr>());
        head.copy_from_slice(header.as_bytes());
        for (to, from) in rest.iter_mut().zip(body.as_bytes()) {
            *to = *from;
        }
        let len = size_of::<abi::CmdHdr>() + size_of::<B>();
        let bytes = frame.get(..len).unwrap_or(&frame);
        // SAFETY: the caller vouches for the addresses in the command.
        match unsafe { self.file.write(bytes) } {
            Ok(written) if written == len => Ok(()),
            Ok(_) => Err(Error::BadAnswer {
                command,
                what: "the kernel took only part of the command",
            }),
            Err(errno) => Err(Error::Refused { command, id, errno }),
        }
    }

    /// Runs a command that has no answer and contains no address.
    fn run<B: IntoBytes + Immutable>(
        &self,
        command: (Command, u32),
        id: u32,
        body: &B,
    ) -> Result<(), Error> {
        // SAFETY: callers pass only commands without addresses.
        unsafe { self.write(command, Some(id), body, 0) }
    }

    /// Runs a command with an answer. Bytes that the kernel does not write are
    /// zero.
    fn query<B: WithResponse, R: FromBytes + IntoBytes>(
        &self,
        command: (Command, u32),
        id: Option<u32>,
        mut body: B,
    ) -> Result<R, Error> {
        let mut answer = R::new_zeroed();
        *body.response() = (&raw mut answer).expose_provenance() as u64;
        // SAFETY: the only address is that of the answer, which is writable for
        // its size.
        unsafe { self.write(command, id, &body, size_of::<R>()) }?;
        Ok(answer)
    }

    /// Creates an id. `uid` identifies it in events and must not be zero: the
    /// kernel delivers no events for an id without one.
    ///
    /// # Errors
    /// EINVAL for an unknown port space, ENOMEM.
    pub fn create_id(&self, uid: u64, port_space: u16, qp_type: u8) -> Result<u32, Error> {
        let body = abi::CreateId {
            uid,
            ps: port_space,
            qp_type,
            ..Default::default()
        };
        let answer: abi::CreateIdResp =
            self.query((Command::CreateId, cmd::CMD_CREATE_ID), None, body)?;
        Ok(answer.id)
    }

    /// Destroys an id, its unread events, and unread connection requests to it.
    /// Returns the number of its events that were read.
    ///
    /// # Errors
    /// ENOENT if the id does not exist, EINVAL if it belongs to another file.
    pub fn destroy_id(&self, id: u32) -> Result<u32, Error> {
        let body = abi::DestroyId {
            id,
            ..Default::default()
        };
        let answer: abi::DestroyIdResp =
            self.query((Command::DestroyId, cmd::CMD_DESTROY_ID), Some(id), body)?;
        Ok(answer.events_reported)
    }

    /// Binds to a `struct sockaddr_in` or `sockaddr_in6`.
    ///
    /// # Errors
    /// EADDRINUSE, EADDRNOTAVAIL, ENODEV, EINVAL if it is already bound.
    pub fn bind_ip(&self, id: u32, addr: [u8; abi::SOCKADDR_IN6]) -> Result<(), Error> {
        let body = abi::BindIp {
            addr,
            id,
            ..Default::default()
        };
        self.run((Command::BindIp, cmd::CMD_BIND_IP), id, &body)
    }

    /// Binds to an address of any family.
    ///
    /// # Errors
    /// As [`bind_ip`](Self::bind_ip); EINVAL if the size does not match the
    /// family.
    pub fn bind(&self, id: u32, addr: &crate::address::Sockaddr) -> Result<(), Error> {
        let body = abi::Bind {
            id,
            addr_size: addr.len,
            reserved: 0,
            addr: addr.bytes,
        };
        self.run((Command::Bind, cmd::CMD_BIND), id, &body)
    }

    /// Starts to resolve IP addresses. A source of all zeros means none.
    ///
    /// # Errors
    /// EINVAL in the wrong state, ENODEV, EADDRINUSE.
    pub fn resolve_ip(
        &self,
        id: u32,
        src_addr: [u8; abi::SOCKADDR_IN6],
        dst_addr: [u8; abi::SOCKADDR_IN6],
        timeout_ms: u32,
    ) -> Result<(), Error> {
        let body = abi::ResolveIp {
            src_addr,
            dst_addr,
            id,
            timeout_ms,
        };
        self.run((Command::ResolveIp, cmd::CMD_RESOLVE_IP), id, &body)
    }

    /// Starts to resolve addresses of any family.
    ///
    /// # Errors
    /// As [`resolve_ip`](Self::resolve_ip).
    pub fn resolve_addr(
        &self,
        id: u32,
        source: Option<&crate::address::Sockaddr>,
        destination: &crate::address::Sockaddr,
        timeout_ms: u32,
    ) -> Result<(), Error> {
        let body = abi::ResolveAddr {
            id,
            timeout_ms,
            src_size: source.map_or(0, |addr| addr.len),
            dst_size: destination.len,
            reserved: 0,
            src_addr: source.map_or([0; 128], |addr| addr.bytes),
            dst_addr: destination.bytes,
        };
        self.run((Command::ResolveAddr, cmd::CMD_RESOLVE_ADDR), id, &body)
    }

    /// Starts to resolve the route.
    ///
    /// # Errors
    /// EINVAL in the wrong state.
    pub fn resolve_route(&self, id: u32, timeout_ms: u32) -> Result<(), Error> {
        let body = abi::ResolveRoute { id, timeout_ms };
        self.run((Command::ResolveRoute, cmd::CMD_RESOLVE_ROUTE), id, &body)
    }

    /// Queries addresses, device and paths.
    ///
    /// # Errors
    /// ENOENT if the id was destroyed.
    pub fn query_route(&self, id: u32) -> Result<abi::QueryRouteResp, Error> {
        let body = abi::Query {
            id,
            ..Default::default()
        };
        self.query((Command::QueryRoute, cmd::CMD_QUERY_ROUTE), Some(id), body)
    }

    /// Queries addresses and device.
    ///
    /// # Errors
    /// ENOENT if the id was destroyed.
    pub fn query_addr(&self, id: u32) -> Result<abi::QueryAddrResp, Error> {
        let body = abi::Query {
            id,
            option: query::QUERY_ADDR,
            ..Default::default()
        };
        self.query((Command::QueryAddr, cmd::CMD_QUERY), Some(id), body)
    }

    /// As [`query_addr`](Self::query_addr), with the addresses as `struct
    /// sockaddr_ib`.
    ///
    /// # Errors
    /// ENOENT if the id was destroyed.
    pub fn query_gid(&self, id: u32) -> Result<abi::QueryAddrResp, Error> {
        let body = abi::Query {
            id,
            option: query::QUERY_GID,
            ..Default::default()
        };
        self.query((Command::QueryGid, cmd::CMD_QUERY), Some(id), body)
    }

    /// Queries the paths, in the subnet administrator's format. Returns their
    /// number and the paths.
    ///
    /// # Errors
    /// ENOENT if the id was destroyed.
    pub fn query_path(&self, id: u32) -> Result<(usize, [abi::PathRecData; MAX_PATHS]), Error> {
        let body = abi::Query {
            id,
            option: query::QUERY_PATH,
            ..Default::default()
        };
        let command = Command::QueryPath;
        let answer: [u8; PATHS_SIZE] = self.query((command, cmd::CMD_QUERY), Some(id), body)?;
        let malformed = Error::BadAnswer {
            command,
            what: "more paths than the maximum",
        };
        let (head, rest) = abi::QueryPathResp::read_from_prefix(&answer).map_err(|_| malformed)?;
        let mut paths = [abi::PathRecData::default(); MAX_PATHS];
        let count = usize::try_from(head.num_paths).map_err(|_| malformed)?;
        if count > MAX_PATHS {
            return Err(malformed);
        }
        let size = size_of::<abi::PathRecData>();
        for (path, bytes) in paths.iter_mut().zip(rest.chunks_exact(size)).take(count) {
            *path = abi::PathRecData::read_from_bytes(bytes).map_err(|_| malformed)?;
        }
        Ok((count, paths))
    }

    /// Requests a connection from the peer, or a datagram service.
    ///
    /// # Errors
    /// EINVAL in the wrong state, or for too much private data.
    pub fn connect(&self, id: u32, conn_param: abi::ConnParam) -> Result<(), Error> {
        let body = abi::Connect {
            conn_param,
            id,
            ..Default::default()
        };
        self.run((Command::Connect, cmd::CMD_CONNECT), id, &body)
    }

    /// Listens for connection requests. For a backlog of zero, or above the
    /// sysctl `net.rdma_ucm.max_backlog` (1024), the kernel uses that sysctl.
    ///
    /// # Errors
    /// EINVAL in the wrong state, EADDRINUSE.
    pub fn listen(&self, id: u32, backlog: u32) -> Result<(), Error> {
        let body = abi::Listen { id, backlog };
        self.run((Command::Listen, cmd::CMD_LISTEN), id, &body)
    }

    /// Accepts a connection request. `uid` identifies the id in subsequent
    /// events.
    ///
    /// # Errors
    /// EINVAL in the wrong state, or for too much private data; the peer has
    /// then been rejected.
    pub fn accept(&self, id: u32, uid: u64, conn_param: abi::ConnParam) -> Result<(), Error> {
        let body = abi::Accept {
            uid,
            conn_param,
            id,
            ..Default::default()
        };
        self.run((Command::Accept, cmd::CMD_ACCEPT), id, &body)
    }

    /// Accepts a connect response, which tells the peer that the connection is
    /// established.
    ///
    /// # Errors
    /// As [`accept`](Self::accept).
    pub fn establish(&self, id: u32) -> Result<(), Error> {
        let body = abi::Accept {
            id,
            ..Default::default()
        };
        self.run((Command::Establish, cmd::CMD_ACCEPT), id, &body)
    }

    /// Rejects a connection request or response. Reason zero stands for
    /// "defined by the consumer"; the kernel accepts only zero and 35.
    ///
    /// # Errors
    /// EINVAL in the wrong state, for any other reason, or for too much private
    /// data.
    pub fn reject(
        &self,
        id: u32,
        reason: u8,
        private_data: [u8; abi::MAX_PRIVATE_DATA],
        private_data_len: u8,
    ) -> Result<(), Error> {
        let body = abi::Reject {
            id,
            private_data_len,
            reason,
            reserved: [0; 2],
            private_data,
        };
        self.run((Command::Reject, cmd::CMD_REJECT), id, &body)
    }

    /// Disconnects, or acknowledges a disconnection.
    ///
    /// # Errors
    /// EINVAL if there is no connection.
    pub fn disconnect(&self, id: u32) -> Result<(), Error> {
        let body = abi::Disconnect { id };
        self.run((Command::Disconnect, cmd::CMD_DISCONNECT), id, &body)
    }

    /// Queries the attributes for modifying the id's queue pair to a state.
    ///
    /// # Errors
    /// EINVAL if the id has no device, or the connection has not reached that
    /// state.
    pub fn init_qp_attr(&self, id: u32, qp_state: u8) -> Result<abi::QpAttr, Error> {
        let body = abi::InitQpAttr {
            id,
            qp_state: qp_state.into(),
            ..Default::default()
        };
        self.query((Command::InitQpAttr, cmd::CMD_INIT_QP_ATTR), Some(id), body)
    }

    /// Reads the file's next event.
    ///
    /// # Errors
    /// EAGAIN if there is none and the file is non-blocking, EINTR.
    pub fn get_event(&self) -> Result<abi::EventResp, Error> {
        let body = abi::GetEvent::default();
        self.query((Command::GetEvent, cmd::CMD_GET_EVENT), None, body)
    }

    /// Sets an option. `value` must have the option's length.
    ///
    /// # Errors
    /// ENOSYS for an unknown option, EINVAL for a wrong length or state.
    pub fn set_option(&self, id: u32, level: u32, name: u32, value: &[u8]) -> Result<(), Error> {
        let command = Command::SetOption;
        let body = abi::SetOption {
            optval: value.as_ptr().expose_provenance() as u64,
            id,
            level,
            optname: name,
            optlen: u32::try_from(value.len()).map_err(|_| Error::Invalid {
                command,
                what: "an option longer than 4 GiB",
            })?,
        };
        // SAFETY: the only address is that of the value, which is readable for
        // its length.
        unsafe { self.write((command, cmd::CMD_SET_OPTION), Some(id), &body, 0) }
    }

    /// Reports an asynchronous event of the queue pair.
    ///
    /// # Errors
    /// EINVAL if there is no connection.
    pub fn notify(&self, id: u32, event: u32) -> Result<(), Error> {
        let body = abi::Notify { id, event };
        self.run((Command::Notify, cmd::CMD_NOTIFY), id, &body)
    }

    /// Starts to join an IP multicast group as a full member.
    ///
    /// # Errors
    /// As [`join_mcast`](Self::join_mcast).
    pub fn join_ip_mcast(
        &self,
        id: u32,
        uid: u64,
        addr: [u8; abi::SOCKADDR_IN6],
    ) -> Result<u32, Error> {
        let body = abi::JoinIpMcast {
            uid,
            addr,
            id,
            ..Default::default()
        };
        let command = (Command::JoinIpMcast, cmd::CMD_JOIN_IP_MCAST);
        let answer: abi::CreateIdResp = self.query(command, Some(id), body)?;
        Ok(answer.id)
    }

    /// Starts to join a multicast group. Returns the membership's number.
    ///
    /// # Errors
    /// EINVAL if the id has no device or is not a datagram id.
    pub fn join_mcast(
        &self,
        id: u32,
        uid: u64,
        addr: &crate::address::Sockaddr,
        join_flags: u16,
    ) -> Result<u32, Error> {
        let body = abi::JoinMcast {
            uid,
            id,
            addr_size: addr.len,
            join_flags,
            addr: addr.bytes,
            ..Default::default()
        };
        let command = (Command::JoinMcast, cmd::CMD_JOIN_MCAST);
        let answer: abi::CreateIdResp = self.query(command, Some(id), body)?;
        Ok(answer.id)
    }

    /// Leaves a multicast group. Returns the number of the membership's events
    /// that were read.
    ///
    /// # Errors
    /// ENOENT if the membership does not exist.
    pub fn leave_mcast(&self, membership: u32) -> Result<u32, Error> {
        let body = abi::DestroyId {
            id: membership,
            ..Default::default()
        };
        let command = (Command::LeaveMcast, cmd::CMD_LEAVE_MCAST);
        let answer: abi::DestroyIdResp = self.query(command, Some(membership), body)?;
        Ok(answer.events_reported)
    }

    /// Moves an id from the file `from` to this one, with its unread events.
    /// Returns the number of its events that were read from the former file.
    ///
    /// # Errors
    /// ENOENT or EINVAL if the id does not belong to that file.
    pub fn migrate_id(&self, id: u32, from: BorrowedFd<'_>) -> Result<u32, Error> {
        let command = Command::MigrateId;
        let body = abi::MigrateId {
            id,
            fd: from.as_raw_fd() as u32,
            ..Default::default()
        };
        let answer: abi::MigrateResp =
            self.query((command, cmd::CMD_MIGRATE_ID), Some(id), body)?;
        Ok(answer.events_reported)
    }

    /// Adds a user-defined event to the file's queue.
    ///
    /// # Errors
    /// EINVAL if the kernel does not support the command, as Linux 6.12.
    pub fn write_cm_event(&self, id: u32, event: u32, status: u32, arg: u64) -> Result<(), Error> {
        let body = abi::WriteCmEvent {
            id,
            reserved: 0,
            event,
            status,
            arg,
            rest: [0; 296],
        };
        self.run(
            (Command::WriteCmEvent, newer::CMD_WRITE_CM_EVENT),
            id,
            &body,
        )
    }
}
