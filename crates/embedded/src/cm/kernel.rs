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
use super::id::Port;
use super::state::State;
use crate::user::{Access, copy_in, copyable};
use crate::{Result, refuse};

/// Path of the device.
const PATH: &CStr = c"/dev/infiniband/rdma_cm";
/// Maximum length of an option value.
const MAX_OPTION_LENGTH: usize = 64;

/// A network's connection manager as the kernel of a channel.
#[derive(Debug)]
pub(crate) struct ManagerKernel<O> {
    /// Keeps the manager.
    owner: O,
    port: Port,
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

impl<O: AsRef<Manager>> ManagerKernel<O> {
    /// Creates the kernel of channels whose ids have a port.
    pub(crate) fn new(owner: O, port: Port) -> Self {
        Self { owner, port }
    }

    fn manager(&self) -> &Manager {
        self.owner.as_ref()
    }

    /// Runs a command. Without a thread, messages are handled before (from peers) and after
    /// (sent by the command within this process).
    fn run<T>(&self, command: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        self.manager().drive();
        let result = command(&mut self.manager().lock());
        self.manager().drive();
        result
    }
}

/// Executes a command; `option` is the option value that it contains.
fn execute(
    state: &mut State,
    fd: RawFd,
    command: u32,
    bytes: &[u8],
    option: &[u8],
) -> Result<Answer> {
    state.channel(fd)?;
    match command {
        cmd::CMD_CREATE_ID => {
            let it: abi::CreateId = body(bytes)?;
            return Ok(Answer::number(it.response, state.create(fd, &it)?));
        }
        cmd::CMD_DESTROY_ID => {
            let it: abi::DestroyId = body(bytes)?;
            state.id(fd, it.id)?;
            return Ok(Answer::number(it.response, state.destroy(it.id)?));
        }
        cmd::CMD_BIND_IP => {
            let it: abi::BindIp = body(bytes)?;
            state.bind(fd, it.id, &it.addr)?;
        }
        cmd::CMD_BIND => {
            let it: abi::Bind = body(bytes)?;
            state.bind(fd, it.id, prefix(&it.addr, it.addr_size)?)?;
        }
        cmd::CMD_RESOLVE_IP => {
            let it: abi::ResolveIp = body(bytes)?;
            state.resolve_address(fd, it.id, (&it.src_addr, &it.dst_addr))?;
        }
        cmd::CMD_RESOLVE_ADDR => {
            let it: abi::ResolveAddr = body(bytes)?;
            let from = prefix(&it.src_addr, it.src_size)?;
            let to = prefix(&it.dst_addr, it.dst_size)?;
            state.resolve_address(fd, it.id, (from, to))?;
        }
        cmd::CMD_RESOLVE_ROUTE => {
            let it: abi::ResolveRoute = body(bytes)?;
            state.resolve_route(fd, it.id)?;
        }
        cmd::CMD_QUERY_ROUTE => {
            let it: abi::Query = body(bytes)?;
            let answer = state.query_route(fd, it.id)?;
            return Ok(Answer::Write(it.response, answer.as_bytes().to_vec()));
        }
        cmd::CMD_QUERY => {
            let it: abi::Query = body(bytes)?;
            return Ok(Answer::Write(it.response, state.query(fd, &it)?));
        }
        cmd::CMD_CONNECT => {
            let it: abi::Connect = body(bytes)?;
            state.connect(fd, it.id, &it.conn_param)?;
        }
        cmd::CMD_LISTEN => {
            let it: abi::Listen = body(bytes)?;
            state.listen(fd, it.id, it.backlog)?;
        }
        cmd::CMD_ACCEPT => {
            let it: abi::Accept = body(bytes)?;
            state.accept(fd, it.id, it.uid, &it.conn_param)?;
        }
        cmd::CMD_REJECT => {
            let it: abi::Reject = body(bytes)?;
            let data = prefix(&it.private_data, it.private_data_len.into())?;
            state.reject(fd, it.id, it.reason, data)?;
        }
        cmd::CMD_DISCONNECT => {
            let it: abi::Disconnect = body(bytes)?;
            state.disconnect(fd, it.id)?;
        }
        cmd::CMD_INIT_QP_ATTR => {
            let it: abi::InitQpAttr = body(bytes)?;
            let to = u8::try_from(it.qp_state).or_else(|_| refuse(libc::EINVAL))?;
            let answer = state.id(fd, it.id)?.attributes(QpState(to))?;
            return Ok(Answer::Write(it.response, answer.as_bytes().to_vec()));
        }
        cmd::CMD_GET_EVENT => {
            let it: abi::GetEvent = body(bytes)?;
            let event = state.next_event(fd)?.event;
            return Ok(Answer::Write(it.response, event.as_bytes().to_vec()));
        }
        cmd::CMD_SET_OPTION => {
            let it: abi::SetOption = body(bytes)?;
            state.set_option(fd, &it, option)?;
        }
        cmd::CMD_NOTIFY => {
            let it: abi::Notify = body(bytes)?;
            state.notify(fd, it.id, it.event)?;
        }
        cmd::CMD_JOIN_IP_MCAST => {
            let it: abi::JoinIpMcast = body(bytes)?;
            let number = state.join(fd, (it.id, it.uid), &it.addr, 0)?;
            return Ok(Answer::number(it.response, number));
        }
        cmd::CMD_JOIN_MCAST => {
            let it: abi::JoinMcast = body(bytes)?;
            let group = prefix(&it.addr, it.addr_size)?;
            let number = state.join(fd, (it.id, it.uid), group, it.join_flags)?;
            return Ok(Answer::number(it.response, number));
        }
        cmd::CMD_LEAVE_MCAST => {
            let it: abi::DestroyId = body(bytes)?;
            return Ok(Answer::number(it.response, state.leave(fd, it.id)?));
        }
        cmd::CMD_MIGRATE_ID => {
            let it: abi::MigrateId = body(bytes)?;
            return Ok(Answer::number(it.response, state.migrate(fd, &it)?));
        }
        newer::CMD_WRITE_CM_EVENT => {
            let it: abi::WriteCmEvent = body(bytes)?;
            state.write_event(fd, &it)?;
        }
        _ => return refuse(libc::EINVAL),
    }
    Ok(Answer::None)
}

// SAFETY: descriptors are files that the manager created and keeps until they
// are closed here; each is looked up by its number. Nothing is mapped through
// them.
unsafe impl<O: AsRef<Manager> + Debug + Send + Sync> Kernel for ManagerKernel<O> {
    fn open(&self, path: &CStr, _: c_int) -> Result<RawFd> {
        if path != PATH {
            return refuse(libc::ENOENT);
        }
        self.manager().start()?;
        self.run(|state| state.open(self.port))
    }

    unsafe fn close(&self, fd: RawFd) -> Result<()> {
        self.run(|state| state.close(fd))
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
        let answer = self.run(|state| execute(state, fd, header.cmd, bytes, &option))?;
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
        self.manager().wait(fd, timeout)
    }

    unsafe fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<()> {
        // Commands never block, so only non-blocking mode is supported.
        self.run(|state| state.channel(fd).map(drop))?;
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
