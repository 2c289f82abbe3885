//! A kernel with a connection manager that records commands and returns
//! prepared answers, for tests without RDMA.
//!
//! By default it checks each command's format as the kernel does and reports
//! success; it assigns numbers to ids, and counts their events.

use core::ffi::{CStr, c_int, c_void};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex};

use uverbs::Errno;
use uverbs::kernel::Kernel;
use zerocopy::{FromBytes, IntoBytes};

use crate::abi::{self, cmd, newer};
use crate::entity::lock;

/// A recorded command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedCommand {
    /// The file descriptor.
    pub fd: RawFd,
    /// Command number.
    pub command: u32,
    /// Bytes of the command's structure.
    pub body: Vec<u8>,
}

impl RecordedCommand {
    /// Returns the command's structure.
    ///
    /// # Panics
    /// If its size differs.
    pub fn body<T: FromBytes>(&self) -> T {
        T::read_from_bytes(&self.body).expect("of that size")
    }
}

#[derive(Default)]
struct State {
    commands: Vec<RecordedCommand>,
    /// Prepared errors and answers by command, each used once, in order.
    replies: HashMap<u32, VecDeque<Result<Vec<u8>, Errno>>>,
    /// Events by file: the bytes written as the answer.
    events: HashMap<RawFd, VecDeque<Vec<u8>>>,
    /// Ids and memberships: number of events that were read.
    objects: BTreeMap<u32, u32>,
    files: BTreeMap<String, Vec<u8>>,
    /// Open files and their content.
    open: BTreeMap<RawFd, Vec<u8>>,
    next: u32,
}

/// The fake kernel. A clone refers to the same kernel.
#[derive(Clone, Default)]
pub struct FakeCm {
    state: Arc<Mutex<State>>,
}

impl core::fmt::Debug for FakeCm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("FakeCm")
    }
}

/// Path of the device.
pub const DEVICE: &str = "/dev/infiniband/rdma_cm";

impl FakeCm {
    /// Creates a kernel that has the device, also in sysfs.
    pub fn new() -> Self {
        let fake = Self::empty();
        fake.set_file(DEVICE, "");
        fake.set_file("/sys/class/misc/rdma_cm/abi_version", "4\n");
        fake.set_file("/sys/class/misc/rdma_cm/dev", "10:58\n");
        fake
    }

    /// Creates a kernel without files.
    pub fn empty() -> Self {
        let fake = Self::default();
        // Unlikely to be produced by a bug.
        lock(&fake.state).next = 0x100;
        fake
    }

    /// Creates a file at `path`.
    pub fn set_file(&self, path: &str, contents: &str) {
        let contents = contents.as_bytes().to_vec();
        lock(&self.state).files.insert(path.to_owned(), contents);
    }

    /// Prepares the answer to the next such command: an error, or bytes, which
    /// are truncated to the size of the command's buffer.
    pub fn reply(&self, command: u32, reply: Result<Vec<u8>, Errno>) {
        let mut state = lock(&self.state);
        state.replies.entry(command).or_default().push_back(reply);
    }

    /// Adds an event to the queue of a file.
    pub fn push_event(&self, fd: RawFd, event: &[u8]) {
        let mut state = lock(&self.state);
        state
            .events
            .entry(fd)
            .or_default()
            .push_back(event.to_vec());
    }

    /// Returns the commands since the last `take_commands`.
    pub fn take_commands(&self) -> Vec<RecordedCommand> {
        core::mem::take(&mut lock(&self.state).commands)
    }

    /// Creates an id, as for a connection request.
    pub fn new_object(&self) -> u32 {
        lock(&self.state).new_object()
    }

    /// Returns the numbers of the ids and memberships that are alive.
    pub fn live_objects(&self) -> Vec<u32> {
        lock(&self.state).objects.keys().copied().collect()
    }

    /// Returns the open descriptors.
    pub fn open_fds(&self) -> Vec<RawFd> {
        lock(&self.state).open.keys().copied().collect()
    }
}

/// Returns the size of a command's structure, and the minimum size of its
/// answer buffer.
fn form(command: u32) -> Option<(usize, usize)> {
    const ID: usize = size_of::<abi::CreateIdResp>();
    Some(match command {
        cmd::CMD_CREATE_ID => (size_of::<abi::CreateId>(), ID),
        cmd::CMD_DESTROY_ID | cmd::CMD_LEAVE_MCAST => (size_of::<abi::DestroyId>(), ID),
        cmd::CMD_BIND_IP => (size_of::<abi::BindIp>(), 0),
        cmd::CMD_RESOLVE_IP => (size_of::<abi::ResolveIp>(), 0),
        cmd::CMD_RESOLVE_ROUTE => (size_of::<abi::ResolveRoute>(), 0),
        cmd::CMD_QUERY_ROUTE => (size_of::<abi::Query>(), 200),
        cmd::CMD_CONNECT => (size_of::<abi::Connect>(), 0),
        cmd::CMD_LISTEN => (size_of::<abi::Listen>(), 0),
        cmd::CMD_ACCEPT => (size_of::<abi::Accept>(), 0),
        cmd::CMD_REJECT => (size_of::<abi::Reject>(), 0),
        cmd::CMD_DISCONNECT => (size_of::<abi::Disconnect>(), 0),
        cmd::CMD_INIT_QP_ATTR => (size_of::<abi::InitQpAttr>(), size_of::<abi::QpAttr>()),
        cmd::CMD_GET_EVENT => (size_of::<abi::GetEvent>(), 324),
        cmd::CMD_SET_OPTION => (size_of::<abi::SetOption>(), 0),
        cmd::CMD_NOTIFY => (size_of::<abi::Notify>(), 0),
        cmd::CMD_JOIN_IP_MCAST => (size_of::<abi::JoinIpMcast>(), ID),
        cmd::CMD_MIGRATE_ID => (size_of::<abi::MigrateId>(), 0),
        cmd::CMD_QUERY => (size_of::<abi::Query>(), 8),
        cmd::CMD_BIND => (size_of::<abi::Bind>(), 0),
        cmd::CMD_RESOLVE_ADDR => (size_of::<abi::ResolveAddr>(), 0),
        cmd::CMD_JOIN_MCAST => (size_of::<abi::JoinMcast>(), ID),
        newer::CMD_WRITE_CM_EVENT => (size_of::<abi::WriteCmEvent>(), 0),
        _ => return None,
    })
}

/// Returns the offset of the answer's address in the command's structure.
fn response_offset(command: u32) -> Option<usize> {
    match command {
        cmd::CMD_CREATE_ID => Some(8),
        cmd::CMD_DESTROY_ID
        | cmd::CMD_LEAVE_MCAST
        | cmd::CMD_QUERY_ROUTE
        | cmd::CMD_QUERY
        | cmd::CMD_INIT_QP_ATTR
        | cmd::CMD_GET_EVENT
        | cmd::CMD_JOIN_IP_MCAST
        | cmd::CMD_JOIN_MCAST
        | cmd::CMD_MIGRATE_ID => Some(0),
        _ => None,
    }
}

impl State {
    fn new_object(&mut self) -> u32 {
        self.next += 1;
        self.objects.insert(self.next, 0);
        self.next
    }

    /// Returns the bytes of the answer.
    fn answer(&mut self, fd: RawFd, command: u32, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let reply = self.replies.get_mut(&command).and_then(VecDeque::pop_front);
        if let Some(reply) = reply {
            let answer = reply?;
            if !answer.is_empty() {
                return Ok(answer);
            }
        }
        let id = body
            .get(8..12)
            .map_or(0, |id| u32::from_ne_bytes([id[0], id[1], id[2], id[3]]));
        Ok(match command {
            cmd::CMD_CREATE_ID | cmd::CMD_JOIN_IP_MCAST | cmd::CMD_JOIN_MCAST => {
                self.new_object().to_ne_bytes().to_vec()
            }
            cmd::CMD_DESTROY_ID | cmd::CMD_LEAVE_MCAST => {
                let read = self.objects.remove(&id).ok_or(Errno::new(libc::ENOENT))?;
                read.to_ne_bytes().to_vec()
            }
            cmd::CMD_GET_EVENT => {
                let queue = self.events.get_mut(&fd);
                let event = queue.and_then(VecDeque::pop_front);
                let event = event.ok_or(Errno::new(libc::EAGAIN))?;
                if let Ok((resp, _)) = abi::EventResp::read_from_prefix(&event) {
                    if let Some(read) = self.objects.get_mut(&resp.id) {
                        *read += 1;
                    }
                }
                event
            }
            _ => Vec::new(),
        })
    }
}

// SAFETY: each descriptor is a new one of /dev/null, and is closed by `close`.
// Nothing is mapped, and the kernel is not real.
unsafe impl Kernel for FakeCm {
    fn open(&self, path: &CStr, _flags: c_int) -> Result<RawFd, Errno> {
        let mut state = lock(&self.state);
        let contents = state.files.get(&*path.to_string_lossy()).cloned();
        let contents = contents.ok_or(Errno::new(libc::ENOENT))?;
        // A real descriptor, since callers borrow it as one.
        let file = File::open("/dev/null").map_err(|_| Errno::new(libc::EMFILE))?;
        let fd = file.into_raw_fd();
        state.open.insert(fd, contents);
        Ok(fd)
    }

    unsafe fn close(&self, fd: RawFd) -> Result<(), Errno> {
        let is_open = lock(&self.state).open.remove(&fd);
        is_open.ok_or(Errno::new(libc::EBADF))?;
        // SAFETY: opened by `open`, owned by nothing else, and removed from the
        // table.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(())
    }

    unsafe fn ioctl(
        &self,
        _fd: RawFd,
        _request: libc::Ioctl,
        _argument: *mut c_void,
    ) -> Result<c_int, Errno> {
        Err(Errno::new(libc::ENOTTY))
    }

    unsafe fn read(&self, fd: RawFd, buffer: &mut [u8]) -> Result<usize, Errno> {
        let state = lock(&self.state);
        let contents = state.open.get(&fd).ok_or(Errno::new(libc::EBADF))?;
        for (to, from) in buffer.iter_mut().zip(contents) {
            *to = *from;
        }
        Ok(contents.len().min(buffer.len()))
    }

    unsafe fn write(&self, fd: RawFd, buffer: &[u8]) -> Result<usize, Errno> {
        let einval = Errno::new(libc::EINVAL);
        let (header, body) = abi::CmdHdr::read_from_prefix(buffer).map_err(|_| einval)?;
        let (in_len, out_len) = form(header.cmd).ok_or(einval)?;
        if usize::from(header.in_len) != body.len() || body.len() != in_len {
            return Err(einval);
        }
        if usize::from(header.out_len) < out_len {
            return Err(Errno::new(libc::ENOSPC));
        }
        let mut state = lock(&self.state);
        state.commands.push(RecordedCommand {
            fd,
            command: header.cmd,
            body: body.to_vec(),
        });
        let answer = state.answer(fd, header.cmd, body)?;
        drop(state);
        if let Some(offset) = response_offset(header.cmd) {
            let mut address = [0; 8];
            address.copy_from_slice(&body[offset..offset + 8]);
            let to = u64::from_ne_bytes(address) as usize;
            let to = core::ptr::with_exposed_provenance_mut::<u8>(to);
            let len = answer.len().min(header.out_len.into());
            // SAFETY: the caller vouches for the address in the command, for
            // the length that it states.
            unsafe { core::ptr::copy_nonoverlapping(answer.as_ptr(), to, len) };
        }
        Ok(buffer.len())
    }

    unsafe fn wait_readable(&self, fd: RawFd, timeout_ms: c_int) -> Result<bool, Errno> {
        let waiting = |state: &State| state.events.get(&fd).is_some_and(|queue| !queue.is_empty());
        if waiting(&lock(&self.state)) {
            return Ok(true);
        }
        // Short, so that a test that waits without limit is not a busy loop.
        let pause = u64::try_from(timeout_ms).unwrap_or(1).min(1);
        std::thread::sleep(core::time::Duration::from_millis(pause));
        Ok(waiting(&lock(&self.state)))
    }

    unsafe fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<(), Errno> {
        let is_open = lock(&self.state).open.contains_key(&fd) && nonblocking;
        if is_open {
            Ok(())
        } else {
            Err(Errno::new(libc::EBADF))
        }
    }

    fn device_number(&self, path: &CStr) -> Result<libc::dev_t, Errno> {
        let state = lock(&self.state);
        let exists = state.files.contains_key(&*path.to_string_lossy());
        if exists {
            Ok(libc::makedev(10, 58))
        } else {
            Err(Errno::new(libc::ENOENT))
        }
    }

    fn list_directory(&self, _path: &CStr) -> Result<Vec<String>, Errno> {
        Err(Errno::new(libc::ENOENT))
    }

    fn netlink(
        &self,
        _request: &[u8],
        _receive: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<(), Errno> {
        Err(Errno::new(libc::EPROTONOSUPPORT))
    }

    fn sysfs_path(&self) -> String {
        "/sys".to_owned()
    }
}

/// Builds the bytes of an event, as the kernel writes them.
pub fn event(uid: u64, id: u32, kind: crate::EventKind, status: i32, param: &[u8]) -> Vec<u8> {
    let mut event = abi::EventResp {
        uid,
        id,
        event: kind.0,
        status: status as u32,
        ..Default::default()
    };
    for (to, from) in event.param.iter_mut().zip(param) {
        *to = *from;
    }
    event.as_bytes().to_vec()
}
