//! A kernel that records commands and returns prepared answers, for tests
//! without RDMA.
//!
//! By default all commands succeed. The fake checks each command's attributes
//! as the kernel does (whether they are known and mandatory, lengths, kinds of
//! objects; table in `methods.rs`, to which a driver's tests add by
//! [`FakeKernel::add_methods`]), assigns handles to new objects, marks outputs
//! written (without writing: the caller clears them), and tracks which objects
//! are alive. [`FakeKernel::on`] changes the answer to one command: values, an
//! errno, missing outputs.
//!
//! ```
//! use ringverbs_uverbs::kernel::fake::{FakeKernel, Target};
//! use ringverbs_uverbs::{Context, Errno, Pd, Udata, abi::write::cmd};
//!
//! let fake = FakeKernel::new();
//! let context = fake.context();
//! fake.on(Target::Write(cmd::CMD_ALLOC_PD), |_| Err(Errno::new(libc::ENOMEM)));
//! let error = Pd::alloc(&&context, Udata::none()).unwrap_err();
//! assert_eq!(error.errno().raw(), libc::ENOMEM);
//! ```

mod call;
mod check;
mod methods;

use core::ffi::{CStr, c_int, c_void};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use call::{Call, DRIVER, IoctlCall, Recorded, Reply, Target};
pub use methods::{AttrSpec, AttrType, MethodSpec};

use super::Kernel;
use crate::abi::ioctl::RDMA_VERBS_IOCTL;
use crate::abi::netlink::NlMsgHdr;
use crate::{Context, Errno};
use zerocopy::FromBytes;

type Handler = Box<dyn FnMut(&mut Reply<'_>) -> Result<(), Errno> + Send>;

#[derive(Default)]
struct State {
    calls: Vec<Call>,
    handlers: HashMap<Target, Handler>,
    methods: methods::Methods,
    /// Handle number to object type.
    live: BTreeMap<u32, u16>,
    open: Vec<RawFd>,
    contents: HashMap<RawFd, Vec<u8>>,
    reads: HashMap<RawFd, VecDeque<Result<Vec<u8>, Errno>>>,
    files: BTreeMap<String, Vec<u8>>,
    device_numbers: HashMap<String, libc::dev_t>,
    netlink: HashMap<u16, Vec<Vec<u8>>>,
    write_error: Option<Errno>,
    next_handle: u32,
    next_fd: RawFd,
}

/// The fake kernel. `Arc<FakeKernel>` implements [`Kernel`].
#[derive(Default)]
pub struct FakeKernel {
    state: Mutex<State>,
}

impl core::fmt::Debug for FakeKernel {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("FakeKernel")
    }
}

impl FakeKernel {
    /// Creates a kernel without files, whose commands all succeed.
    pub fn new() -> Arc<Self> {
        let fake = Self::default();
        {
            let mut state = fake.lock();
            // Distinct from each other, and from numbers that a bug would
            // likely produce.
            state.next_handle = 0x0100;
            state.next_fd = 1000;
        }
        Arc::new(fake)
    }

    /// Creates a context on this kernel, with one of the fake's own
    /// descriptors.
    pub fn context(self: &Arc<Self>) -> Context {
        let fd = self.lock().new_fd();
        // SAFETY: the descriptor belongs to the fake and is issued once.
        unsafe { Context::from_owned_fd(Box::new(Arc::clone(self)), fd, DRIVER) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a command by `handler` from now on. It is called after the
    /// attributes were checked, outputs marked and handles assigned; if it
    /// returns an error, no object is created or destroyed.
    pub fn on(
        &self,
        target: Target,
        handler: impl FnMut(&mut Reply<'_>) -> Result<(), Errno> + Send + 'static,
    ) {
        self.lock().handlers.insert(target, Box::new(handler));
    }

    /// Restores the default answer to a command, see [`on`](Self::on).
    pub fn reset(&self, target: Target) {
        self.lock().handlers.remove(&target);
    }

    /// Returns the calls since the last `take_calls`.
    pub fn take_calls(&self) -> Vec<Call> {
        core::mem::take(&mut self.lock().calls)
    }

    /// The ioctl commands among [`take_calls`](Self::take_calls).
    pub fn take_ioctls(&self) -> Vec<IoctlCall> {
        let calls = self.take_calls().into_iter();
        calls
            .filter_map(|call| {
                if let Call::Ioctl(call) = call {
                    Some(call)
                } else {
                    None
                }
            })
            .collect()
    }

    /// Returns the objects that are alive: handle number and object type.
    pub fn live_objects(&self) -> Vec<(u32, u16)> {
        self.lock()
            .live
            .iter()
            .map(|(&handle, &object)| (handle, object))
            .collect()
    }

    /// Returns the open descriptors.
    pub fn open_fds(&self) -> Vec<RawFd> {
        self.lock().open.clone()
    }

    /// Queues the result of a read of `fd`; without one a read fails with
    /// EAGAIN.
    pub fn push_read(&self, fd: RawFd, result: Result<Vec<u8>, Errno>) {
        self.lock().reads.entry(fd).or_default().push_back(result);
    }

    /// Creates a file at `path`; the directories above it are implied.
    pub fn set_file(&self, path: &str, contents: impl Into<Vec<u8>>) {
        self.lock().files.insert(path.to_owned(), contents.into());
    }

    /// Creates a character device at `path`.
    pub fn set_device_number(&self, path: &str, number: libc::dev_t) {
        self.lock().device_numbers.insert(path.to_owned(), number);
    }

    /// Sets the datagrams that answer netlink requests of a message type;
    /// without any, netlink is not available (EPROTONOSUPPORT).
    pub fn set_netlink(&self, message_type: u16, datagrams: Vec<Vec<u8>>) {
        self.lock().netlink.insert(message_type, datagrams);
    }

    /// Makes write(2) fail, or succeed again.
    pub fn set_write_error(&self, errno: Option<Errno>) {
        self.lock().write_error = errno;
    }

    /// Adds methods of a driver, and attributes that it adds to common ones.
    pub fn add_methods(&self, methods: &'static [MethodSpec]) {
        self.lock().methods.add(methods);
    }

    fn run(
        &self,
        mut call: IoctlCall,
        raw: *mut c_void,
        methods: &methods::Methods,
    ) -> Result<c_int, Errno> {
        call.result = self.answer(&mut call, raw, methods);
        let result = call.result;
        self.lock().calls.push(Call::Ioctl(call));
        result.map(|()| 0)
    }

    fn answer(
        &self,
        call: &mut IoctlCall,
        raw: *mut c_void,
        methods: &methods::Methods,
    ) -> Result<(), Errno> {
        let target = call.target();
        let mut state = self.lock();
        let effect = check::check(methods, call, &state.live)?;
        let mut reply = Reply::new(call, raw, methods);
        reply.mark_outputs();
        let mut created = None;
        match effect {
            check::Effect::Creates(object) => {
                state.next_handle += 1;
                created = Some((state.next_handle, object));
                reply.set_new_object(state.next_handle);
            }
            check::Effect::CreatesFd => reply.set_new_object(state.new_fd() as u32),
            check::Effect::Destroys(_) | check::Effect::None => {}
        }
        // Removed while it runs, so that it may use the fake.
        if let Some(mut handler) = state.handlers.remove(&target) {
            drop(state);
            let result = handler(&mut reply);
            state = self.lock();
            state.handlers.entry(target).or_insert(handler);
            result?;
        }
        if let Some((handle, object)) = created {
            state.live.insert(handle, object);
        }
        if let check::Effect::Destroys(handle) = effect {
            state.live.remove(&handle);
        }
        Ok(())
    }
}

impl State {
    fn new_fd(&mut self) -> RawFd {
        self.next_fd += 1;
        self.open.push(self.next_fd);
        self.next_fd
    }
}

// SAFETY: descriptors are numbers from 1001 on, each issued once, and no test
// process has as many files; a test that makes the fake answer with another
// number vouches for it. The kernel is not real, and nothing is mapped.
unsafe impl Kernel for Arc<FakeKernel> {
    fn open(&self, path: &CStr, flags: c_int) -> Result<RawFd, Errno> {
        let mut state = self.lock();
        let path = path.to_string_lossy().into_owned();
        let result = match state.files.get(&path).cloned() {
            Some(contents) => {
                let fd = state.new_fd();
                state.contents.insert(fd, contents);
                Ok(fd)
            }
            None if state.device_numbers.contains_key(&path) => Ok(state.new_fd()),
            None => Err(Errno::new(libc::ENOENT)),
        };
        state.calls.push(Call::Open {
            path,
            flags,
            result,
        });
        result
    }

    unsafe fn close(&self, fd: RawFd) -> Result<(), Errno> {
        let mut state = self.lock();
        state.calls.push(Call::Close(fd));
        match state.open.iter().position(|&open| open == fd) {
            Some(index) => {
                state.open.remove(index);
                state.contents.remove(&fd);
                Ok(())
            }
            None => Err(Errno::new(libc::EBADF)),
        }
    }

    unsafe fn ioctl(
        &self,
        fd: RawFd,
        request: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int, Errno> {
        if request != RDMA_VERBS_IOCTL {
            return Err(Errno::new(libc::ENOTTY));
        }
        let methods = self.lock().methods.clone();
        // SAFETY: the caller vouches for the argument of this request, which is
        // a header with its attributes.
        let call = unsafe { IoctlCall::read(fd, argument, &methods) }?;
        self.run(call, argument, &methods)
    }

    unsafe fn read(&self, fd: RawFd, buffer: &mut [u8]) -> Result<usize, Errno> {
        let mut state = self.lock();
        state.calls.push(Call::Read(fd));
        let result = match state.reads.get_mut(&fd).and_then(VecDeque::pop_front) {
            Some(result) => result,
            None => state
                .contents
                .get(&fd)
                .cloned()
                .ok_or(Errno::new(libc::EAGAIN)),
        }?;
        let len = result.len().min(buffer.len());
        for (to, from) in buffer.iter_mut().zip(&result) {
            *to = *from;
        }
        Ok(len)
    }

    unsafe fn write(&self, fd: RawFd, buffer: &[u8]) -> Result<usize, Errno> {
        let mut state = self.lock();
        state.calls.push(Call::Write {
            fd,
            bytes: buffer.to_vec(),
        });
        state.write_error.map_or(Ok(buffer.len()), Err)
    }

    unsafe fn wait_readable(&self, fd: RawFd, _timeout_ms: c_int) -> Result<bool, Errno> {
        Ok(self
            .lock()
            .reads
            .get(&fd)
            .is_some_and(|reads| !reads.is_empty()))
    }

    unsafe fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<(), Errno> {
        self.lock()
            .calls
            .push(Call::SetNonblocking { fd, nonblocking });
        Ok(())
    }

    fn device_number(&self, path: &CStr) -> Result<libc::dev_t, Errno> {
        let path = path.to_string_lossy();
        self.lock()
            .device_numbers
            .get(&*path)
            .copied()
            .ok_or(Errno::new(libc::ENOENT))
    }

    fn list_directory(&self, path: &CStr) -> Result<Vec<String>, Errno> {
        let prefix = format!("{}/", path.to_string_lossy());
        let state = self.lock();
        let below = state
            .files
            .keys()
            .filter_map(|file| file.strip_prefix(&prefix));
        let mut names: Vec<String> = below
            .filter_map(|rest| rest.split('/').next())
            .map(str::to_owned)
            .collect();
        names.dedup();
        if names.is_empty() {
            Err(Errno::new(libc::ENOENT))
        } else {
            Ok(names)
        }
    }

    fn netlink(&self, request: &[u8], receive: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), Errno> {
        let header = NlMsgHdr::read_from_prefix(request).map(|(header, _)| header);
        let header = header.map_err(|_| Errno::new(libc::EINVAL))?;
        let mut state = self.lock();
        state.calls.push(Call::Netlink(request.to_vec()));
        let datagrams = state.netlink.get(&header.msg_type).cloned();
        drop(state);
        for datagram in datagrams.ok_or(Errno::new(libc::EPROTONOSUPPORT))? {
            if receive(&datagram) {
                return Ok(());
            }
        }
        // A real socket would time out.
        Err(Errno::new(libc::EAGAIN))
    }

    fn sysfs_path(&self) -> String {
        "/sys".to_owned()
    }
}
