//! System calls of a context.

use std::ffi::{CStr, c_int, c_void};
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mlx5_abi::ids::{METHOD_DEVX_OBJ_DESTROY, OBJECT_DEVX_OBJ};
use nix::poll::{PollFd, PollFlags, PollTimeout, ppoll};
use nix::sys::time::TimeSpec;
use softhca::rule::Rule;
use uverbs::abi::ids::{
    ATTR_DESTROY_QP_HANDLE, METHOD_INVOKE_WRITE, METHOD_QP_DESTROY, OBJECT_DEVICE, OBJECT_QP,
};
use uverbs::abi::ioctl::RDMA_VERBS_IOCTL;
use uverbs::discovery::DriverId;
use uverbs::kernel::Kernel;
use uverbs::{Command, Context, Error};

use crate::driver::cause::{self, Cause, Class};
use crate::driver::descriptors::Descriptors;
use crate::driver::event::EventFile;
use crate::driver::files::File;
use crate::driver::request::Request;
use crate::poll::wait;
use crate::runtime::embedded::Embedded;
use crate::runtime::time::{self, Limit, Progress};
use crate::{Result, refuse};

/// A device as the kernel of a context.
#[derive(Debug)]
pub(crate) struct EmbeddedKernel {
    embedded: Embedded,
    /// `None` if the program has the device's own descriptors.
    descriptors: Option<Arc<dyn Descriptors>>,
}

impl EmbeddedKernel {
    pub(crate) fn new(embedded: Embedded, descriptors: Option<Arc<dyn Descriptors>>) -> Self {
        Self {
            embedded,
            descriptors,
        }
    }

    /// Waits until a descriptor is readable, and drives the network meanwhile.
    fn wait_driving(&self, fd: BorrowedFd<'_>, limit: Option<Duration>) -> Result<bool> {
        let began = Instant::now();
        let mut result = Ok(false);
        self.embedded.wait_for(&mut |others, sleep| {
            let rest = limit.map(|limit| limit.saturating_sub(began.elapsed()));
            let longest = match (rest, sleep) {
                (Some(rest), Some(sleep)) => Some(rest.min(sleep)),
                (rest, sleep) => rest.or(sleep),
            };
            let all = std::iter::once(fd).chain(others.iter().copied());
            let mut entries: Vec<_> = all.map(|it| PollFd::new(it, PollFlags::POLLIN)).collect();
            let time = longest.map(TimeSpec::from_duration);
            result = match ppoll(&mut entries, time, None) {
                Ok(_) => Ok(entries[0].any() != Some(false)),
                Err(errno) => refuse(errno as i32),
            };
            result != Ok(false) || rest.is_some_and(|rest| rest.is_zero())
        });
        result
    }

    fn events(&self, fd: RawFd) -> Result<Arc<EventFile>> {
        match self.embedded.device.lock().files.get(&fd) {
            Some(File::Events(events)) => Ok(Arc::clone(events)),
            Some(File::Context(_)) => refuse(libc::EINVAL),
            None => refuse(libc::EBADF),
        }
    }
}

impl Embedded {
    /// Opens a context on the device, for `mlx5::DeviceContext::open`, which
    /// then creates the kernel context.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn context(&self) -> std::result::Result<Context, Error> {
        let fd = self
            .open_file()
            .map_err(|errno| Error::refused(Command::Open, None, errno))?;
        let kernel = EmbeddedKernel::new(self.clone(), None);
        // SAFETY: the descriptor is new, and only this kernel closes it.
        Ok(unsafe { Context::from_owned_fd(Box::new(kernel), fd, DriverId::MLX5) })
    }
}

impl EmbeddedKernel {
    /// Executes a command.
    ///
    /// # Safety
    /// As for [`State::execute`](crate::driver::state::State::execute).
    unsafe fn execute(&self, fd: RawFd, request: &mut Request) -> cause::Result<()> {
        if self.embedded.device.lock().failed {
            return cause::refuse(Class::Removed, "descriptor", fd, Rule::Exists);
        }
        let ends_queue = [
            (OBJECT_QP, METHOD_QP_DESTROY),
            (OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_DESTROY),
        ]
        .contains(&(request.object, request.method));
        self.embedded.command(|state| {
            if ends_queue {
                let handle = request.optional_handle(ATTR_DESTROY_QP_HANDLE);
                let qp = handle.filter(|_| request.object == OBJECT_QP);
                let qp = qp.and_then(|handle| state.objects.qp(fd, handle).ok());
                let number = qp.map(|qp| qp.number);
                state.flush_sends(number);
            }
            let descriptors = self.descriptors.as_ref().filter(|_| state.has_observer());
            state.objects.changes = descriptors.map(|_| Vec::new());
            let done = state.inject_failure(request);
            // SAFETY: guaranteed by the caller.
            let done = done.and_then(|()| unsafe { state.execute(fd, request) });
            let changes = state.objects.changes.take();
            if let Some(descriptors) = descriptors {
                changes
                    .iter()
                    .flatten()
                    .for_each(|it| descriptors.object_changed(it));
            }
            done
        })
    }
}

// SAFETY: descriptors are files that the device created and keeps until they
// are closed here. Each is looked up by its number; other numbers are rejected.
// The file of the registers, which is mapped, keeps its length. Commands access
// only the memory that they name.
unsafe impl Kernel for EmbeddedKernel {
    fn open(&self, _: &CStr, _: c_int) -> Result<RawFd> {
        refuse(libc::ENOENT)
    }

    unsafe fn close(&self, fd: RawFd) -> Result<()> {
        let closed = self.embedded.command(|state| {
            if let Some(File::Context(_)) = state.files.get(&fd) {
                state.close_context(fd);
                return true;
            }
            // Close it under the lock, before the number can be reused for
            // another file.
            match state.files.remove(&fd) {
                Some(File::Events(events)) => {
                    state.unsubscribe_channel(&events);
                    events.close().is_some()
                }
                Some(File::Context(_)) | None => false,
            }
        });
        if closed { Ok(()) } else { refuse(libc::EBADF) }
    }

    unsafe fn ioctl(
        &self,
        fd: RawFd,
        request: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int> {
        if request != RDMA_VERBS_IOCTL {
            return refuse(libc::ENOTTY);
        }
        // SAFETY: the caller guarantees a command with its attributes.
        let request = unsafe { Request::read(argument, self.descriptors.clone()) };
        let (method, write, done) = match request {
            Ok(mut request) => {
                let method = (request.object, request.method);
                // SAFETY: guaranteed by the caller.
                let done = unsafe { self.execute(fd, &mut request) };
                let is_write = method == (OBJECT_DEVICE, METHOD_INVOKE_WRITE);
                let write = done.is_err() && is_write;
                let write = write.then(|| request.write_command().ok()).flatten();
                (Some(method), write, done)
            }
            Err(error) => (None, None, Err(error)),
        };
        match done {
            Ok(()) => Ok(0),
            Err(error) => {
                let cause = Cause::Verb {
                    method,
                    write,
                    error,
                };
                self.embedded.device.lock().report(&cause);
                if let Some(descriptors) = &self.descriptors {
                    descriptors.command_refused(&error);
                }
                Err(error.errno())
            }
        }
    }

    fn refusal(&self) -> Option<String> {
        let error = self.embedded.device.lock().explanations().own_refusal()?;
        Some(error.to_string())
    }

    unsafe fn read(&self, fd: RawFd, buffer: &mut [u8]) -> Result<usize> {
        let events = self.events(fd)?;
        loop {
            if !self.embedded.runner.has_thread() {
                self.embedded.drive();
            }
            if let Some(length) = events.pop(buffer)? {
                return Ok(length);
            }
            if self.descriptors.is_some() {
                // The program waits itself.
                return refuse(libc::EAGAIN);
            }
            if events.is_nonblocking() {
                self.embedded.runner.wake_thread();
                return refuse(libc::EAGAIN);
            }
            // SAFETY: the caller guarantees that the descriptor is open.
            unsafe { self.wait_readable(fd, -1) }?;
        }
    }

    unsafe fn write(&self, _: RawFd, _: &[u8]) -> Result<usize> {
        // Commands by write(2) belong to the other, older interface.
        refuse(libc::EINVAL)
    }

    unsafe fn wait_readable(&self, fd: RawFd, timeout_ms: c_int) -> Result<bool> {
        // SAFETY: the caller guarantees that the descriptor is open.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let limit = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        if self.embedded.runner.has_thread() {
            return self.wait_driving(fd, limit);
        }
        self.embedded.runner.wake();
        if let Some(time) = self.embedded.runner.time() {
            let limit = limit.and_then(|limit| self.embedded.limit(limit));
            loop {
                let ready = wait(fd, PollTimeout::ZERO)?;
                if ready || limit.as_ref().is_some_and(Limit::is_over) {
                    return Ok(ready);
                }
                match time::step(&self.embedded.runner, time) {
                    Progress::Advanced => {}
                    // Only another thread can change anything.
                    Progress::Retry | Progress::Stuck => drop(wait(fd, PollTimeout::from(1u8))?),
                }
            }
        }
        let began = Instant::now();
        loop {
            let busy = self.embedded.drive();
            let over = limit.is_some_and(|limit| began.elapsed() >= limit);
            // Never a long sleep, since other threads may post meanwhile.
            let pause = if busy || over { 0u8 } else { 1 };
            let ready = wait(fd, PollTimeout::from(pause))?;
            if ready || over {
                return Ok(ready);
            }
        }
    }

    unsafe fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<()> {
        self.events(fd)?.set_nonblocking(nonblocking);
        Ok(())
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
