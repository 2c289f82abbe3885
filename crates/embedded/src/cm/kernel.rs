//! System calls of an event channel: commands by write(2) that contain an
//! address for the answer.

use std::ffi::{CStr, c_int, c_void};
use std::fmt::Debug;
use std::os::fd::{BorrowedFd, RawFd};

use nix::poll::PollTimeout;
use rdmacm::abi::{self, cmd, newer};
use uverbs::QpState;
use uverbs::kernel::Kernel;
use zerocopy::{FromBytes, IntoBytes};

use super::Manager;
use super::id::LocalPort;
use super::ids::Ids;
use crate::user::{Access, copy_in, copyable};
use crate::{Result, refuse};

/// Path of the device.
const PATH: &CStr = c"/dev/infiniband/rdma_cm";
/// Maximum length of an option value.
const MAX_OPTION_LENGTH: usize = 64;

/// A device whose network has a connection manager.
pub(crate) trait ManagerOwner {
    fn manager(&self) -> &Manager;

    /// Called before a command: handles what has arrived, unless a thread does.
    fn turn(&self);

    /// Called after a command that has left datagrams to send or an earlier deadline.
    fn wake(&self);

    /// Waits until a channel is readable, or the time is up. Returns whether the channel is
    /// readable.
    fn wait(&self, channel: BorrowedFd<'_>, timeout: PollTimeout) -> Result<bool>;
}

/// A network's connection manager as the kernel of a channel.
#[derive(Debug)]
pub(crate) struct ManagerKernel<O> {
    owner: O,
    port: LocalPort,
}

/// Answer to a command.
enum Answer {
    None,
    /// Bytes to write to an address.
    Write(u64, Vec<u8>),
}

impl Answer {
    fn number(at: u64, number: u32) -> Self {
        Self::Write(at, number.to_ne_bytes().to_vec())
    }
}

/// Parses the command's structure; EINVAL if the command is shorter. As in the kernel, it may
/// be longer: librdmacm's structures may be newer.
fn body<T: FromBytes>(bytes: &[u8]) -> Result<T> {
    let read = T::read_from_prefix(bytes);
    read.map_or_else(|_| refuse(libc::EINVAL), |(value, _)| Ok(value))
}

/// Returns the first `size` bytes of an address field.
fn prefix(address: &[u8], size: u16) -> Result<&[u8]> {
    address
        .get(..usize::from(size))
        .map_or_else(|| refuse(libc::EINVAL), Ok)
}

impl<O: ManagerOwner> ManagerKernel<O> {
    /// Creates the kernel of channels whose ids have a port.
    pub(crate) fn new(owner: O, port: LocalPort) -> Self {
        Self { owner, port }
    }

    /// Runs a command.
    fn run<T>(&self, command: impl FnOnce(&mut Ids) -> Result<T>) -> Result<T> {
        self.owner.turn();
        let manager = self.owner.manager();
        let result = manager.shared.with(command);
        if manager.needs_turn() {
            self.owner.wake();
        }
        result
    }
}

/// Executes a command; `option` is the option value that it contains.
fn execute(ids: &mut Ids, fd: RawFd, command: u32, bytes: &[u8], option: &[u8]) -> Result<Answer> {
    ids.channel(fd)?.take_ownership()?;
    match command {
        cmd::CMD_CREATE_ID => {
            let it: abi::CreateId = body(bytes)?;
            return Ok(Answer::number(it.response, ids.create(fd, &it)?));
        }
        cmd::CMD_DESTROY_ID => {
            let it: abi::DestroyId = body(bytes)?;
            ids.id(fd, it.id)?;
            return Ok(Answer::number(it.response, ids.destroy(it.id)?));
        }
        cmd::CMD_BIND_IP => {
            let it: abi::BindIp = body(bytes)?;
            ids.bind(fd, it.id, &it.addr)?;
        }
        cmd::CMD_BIND => {
            let it: abi::Bind = body(bytes)?;
            ids.bind(fd, it.id, prefix(&it.addr, it.addr_size)?)?;
        }
        cmd::CMD_RESOLVE_IP => {
            let it: abi::ResolveIp = body(bytes)?;
            ids.resolve_address(fd, it.id, (&it.src_addr, &it.dst_addr))?;
        }
        cmd::CMD_RESOLVE_ADDR => {
            let it: abi::ResolveAddr = body(bytes)?;
            let from = prefix(&it.src_addr, it.src_size)?;
            let to = prefix(&it.dst_addr, it.dst_size)?;
            ids.resolve_address(fd, it.id, (from, to))?;
        }
        cmd::CMD_RESOLVE_ROUTE => {
            let it: abi::ResolveRoute = body(bytes)?;
            ids.resolve_route(fd, it.id)?;
        }
        cmd::CMD_QUERY_ROUTE => {
            let it: abi::Query = body(bytes)?;
            let answer = ids.query_route(fd, it.id)?;
            return Ok(Answer::Write(it.response, answer.as_bytes().to_vec()));
        }
        cmd::CMD_QUERY => {
            let it: abi::Query = body(bytes)?;
            return Ok(Answer::Write(it.response, ids.query(fd, &it)?));
        }
        cmd::CMD_CONNECT => {
            let it: abi::Connect = body(bytes)?;
            ids.connect(fd, it.id, &it.conn_param)?;
        }
        cmd::CMD_LISTEN => {
            let it: abi::Listen = body(bytes)?;
            ids.listen(fd, it.id, it.backlog)?;
        }
        cmd::CMD_ACCEPT => {
            let it: abi::Accept = body(bytes)?;
            ids.accept(fd, it.id, it.uid, &it.conn_param)?;
        }
        cmd::CMD_REJECT => {
            let it: abi::Reject = body(bytes)?;
            let data = prefix(&it.private_data, it.private_data_len.into())?;
            ids.reject(fd, it.id, it.reason, data)?;
        }
        cmd::CMD_DISCONNECT => {
            let it: abi::Disconnect = body(bytes)?;
            ids.disconnect(fd, it.id)?;
        }
        cmd::CMD_INIT_QP_ATTR => {
            let it: abi::InitQpAttr = body(bytes)?;
            let to = u8::try_from(it.qp_state).or_else(|_| refuse(libc::EINVAL))?;
            let answer = ids.id(fd, it.id)?.attributes(QpState(to))?;
            return Ok(Answer::Write(it.response, answer.as_bytes().to_vec()));
        }
        cmd::CMD_GET_EVENT => {
            let it: abi::GetEvent = body(bytes)?;
            let event = ids.next_event(fd)?.event;
            return Ok(Answer::Write(it.response, event.as_bytes().to_vec()));
        }
        cmd::CMD_SET_OPTION => {
            let it: abi::SetOption = body(bytes)?;
            ids.set_option(fd, &it, option)?;
        }
        cmd::CMD_NOTIFY => {
            let it: abi::Notify = body(bytes)?;
            ids.notify(fd, it.id, it.event)?;
        }
        cmd::CMD_JOIN_IP_MCAST => {
            let it: abi::JoinIpMcast = body(bytes)?;
            let number = ids.join(fd, (it.id, it.uid), &it.addr, 0)?;
            return Ok(Answer::number(it.response, number));
        }
        cmd::CMD_JOIN_MCAST => {
            let it: abi::JoinMcast = body(bytes)?;
            let group = prefix(&it.addr, it.addr_size)?;
            let number = ids.join(fd, (it.id, it.uid), group, it.join_flags)?;
            return Ok(Answer::number(it.response, number));
        }
        cmd::CMD_LEAVE_MCAST => {
            let it: abi::DestroyId = body(bytes)?;
            return Ok(Answer::number(it.response, ids.leave(fd, it.id)?));
        }
        cmd::CMD_MIGRATE_ID => {
            let it: abi::MigrateId = body(bytes)?;
            return Ok(Answer::number(it.response, ids.migrate(fd, &it)?));
        }
        newer::CMD_WRITE_CM_EVENT => {
            let it: abi::WriteCmEvent = body(bytes)?;
            ids.write_event(fd, &it)?;
        }
        _ => return refuse(libc::EINVAL),
    }
    Ok(Answer::None)
}

// SAFETY: descriptors are files that the manager created and keeps until they
// are closed here; each is looked up by its number. Nothing is mapped through
// them.
unsafe impl<O: ManagerOwner + Debug + Send + Sync> Kernel for ManagerKernel<O> {
    fn open(&self, path: &CStr, _: c_int) -> Result<RawFd> {
        if path != PATH {
            return refuse(libc::ENOENT);
        }
        self.run(|ids| ids.open(self.port))
    }

    unsafe fn close(&self, fd: RawFd) -> Result<()> {
        self.run(|ids| ids.close(fd))
    }

    unsafe fn ioctl(&self, _: RawFd, _: libc::Ioctl, _: *mut c_void) -> Result<c_int> {
        refuse(libc::ENOTTY)
    }

    unsafe fn read(&self, _: RawFd, _: &mut [u8]) -> Result<usize> {
        refuse(libc::EINVAL)
    }

    unsafe fn write(&self, fd: RawFd, buffer: &[u8]) -> Result<usize> {
        let Ok((header, bytes)) = abi::CmdHdr::read_from_prefix(buffer) else {
            return refuse(libc::EINVAL);
        };
        if usize::from(header.in_len) != bytes.len() {
            return refuse(libc::EINVAL);
        }
        let mut option = Vec::new();
        if header.cmd == cmd::CMD_SET_OPTION {
            let it: abi::SetOption = body(bytes)?;
            let length = it.optlen as usize;
            if length > MAX_OPTION_LENGTH {
                return refuse(libc::ENOSYS);
            }
            // SAFETY: the caller vouches for the value's address and length.
            option = unsafe { copy_in(it.optval, length) }?;
        }
        let answer = self.run(|ids| execute(ids, fd, header.cmd, bytes, &option))?;
        if let Answer::Write(address, bytes) = answer {
            let to = std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
            let length = bytes.len().min(header.out_len.into());
            copyable(address, length as u64, Access::Write)?;
            // SAFETY: the caller vouches for the address in the command, for
            // the length that it states; the answer is separate memory.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, length) };
        }
        Ok(buffer.len())
    }

    unsafe fn wait_readable(&self, fd: RawFd, timeout_ms: c_int) -> Result<bool> {
        let timeout = PollTimeout::try_from(timeout_ms).unwrap_or(PollTimeout::NONE);
        // SAFETY: the caller guarantees that the descriptor is open.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        self.owner.wait(fd, timeout)
    }

    unsafe fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<()> {
        // Commands never block, so only non-blocking mode is supported.
        self.run(|ids| ids.channel(fd).map(drop))?;
        if nonblocking {
            Ok(())
        } else {
            refuse(libc::EINVAL)
        }
    }

    fn device_number(&self, _: &CStr) -> Result<libc::dev_t> {
        refuse(libc::ENOENT)
    }

    fn list_directory(&self, _: &CStr) -> Result<Vec<String>> {
        refuse(libc::ENOENT)
    }

    fn netlink(&self, _: &[u8], _: &mut dyn FnMut(&[u8]) -> bool) -> Result<()> {
        refuse(libc::EPROTONOSUPPORT)
    }

    fn sysfs_path(&self) -> String {
        "/sys".to_owned()
    }
}
