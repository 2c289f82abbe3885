//! Functions that take descriptors.

use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::BorrowedFd;
use std::slice;
use std::sync::atomic::Ordering;

use rdmacm::abi::{self, CmdHdr, cmd};
use uverbs::Errno;
use zerocopy::{FromBytes, IntoBytes};

use super::{count, export, failed, require_room, result, sockets, waiting};
use crate::check::{self, Checker};
use crate::fault;
use crate::hooks;
use crate::host;
use crate::internal::{self, mark_internal};
use crate::process::{self, ProcessState, wake_devices};
use crate::promises;
use crate::real::{self, Optional};
use crate::record::{self, Call};
use crate::standard_error;
use crate::table::{self, Lookup, Object, ObjectKind, find, find_for_use};

/// Maximum number of attempts of [`replace`].
const MAX_ATTEMPTS: usize = 1000;

/// Calls dup2(2) or dup3(2) until another thread is not just opening the same number (EBUSY):
/// that may be a thread of the devices, which the program does not know.
fn replace(duplicate: impl Fn() -> c_int) -> c_int {
    for _ in 0..MAX_ATTEMPTS {
        let fd = duplicate();
        if fd >= 0 || real::errno() != libc::EBUSY {
            return fd;
        }
        std::thread::yield_now();
    }
    duplicate()
}

/// Registers a duplicate that the C library has created.
fn register_duplicate(object: Lookup, fd: c_int) -> c_int {
    if fd < 0 {
        return fd;
    }
    let registered = match object {
        Lookup::Open(object) => ProcessState::current().table.insert(fd, object),
        Lookup::Netlink => table::set_netlink(fd),
        _ => return fd,
    };
    if let Err(errno) = registered {
        // SAFETY: the descriptor is new.
        unsafe { real::close(fd) };
        return failed(errno.raw());
    }
    fd
}

/// Unregisters a descriptor that was closed or replaced.
fn unregister(object: &Lookup, fd: c_int) {
    match object {
        Lookup::Open(_) => drop(ProcessState::current().table.remove(fd)),
        Lookup::Netlink => table::clear(fd),
        Lookup::Stale => {
            table::clear(fd);
            process::closed_inherited();
        }
        Lookup::Foreign | Lookup::Other => {}
    }
}

/// Sets whether reading events blocks.
fn set_nonblocking(object: &Object, nonblocking: bool) -> Result<c_int, Errno> {
    object.nonblocking.store(nonblocking, Ordering::Relaxed);
    Ok(0)
}

/// Reads an event. The device's side does not block: a wait of the program is a cancellation
/// point, and must not be unwound from within the device.
fn read_event(object: &Object, buffer: &mut [u8]) -> isize {
    if !object.nonblocking.load(Ordering::Relaxed) && !internal::is_in_handler() {
        let advising = process::explainer().filter(|it| it.advises());
        if let Some(explainer) = advising {
            let _scope = internal::enter();
            Checker::waits(explainer, object.fd);
        }
    }
    loop {
        let scope = internal::enter();
        // SAFETY: the device keeps its descriptor open while the object exists.
        let read = unsafe { object.kernel.read(object.fd, buffer) };
        drop(scope);
        let waits = !object.nonblocking.load(Ordering::Relaxed);
        if !read.is_err_and(|errno| errno.raw() == libc::EAGAIN) {
            return count(read);
        }
        if !waits {
            wake_devices();
            return count(read);
        }
        // SAFETY: as above.
        let fd = unsafe { BorrowedFd::borrow_raw(object.fd) };
        if !waiting::wait_readable(fd) && !restarts_calls() {
            return -1;
        }
    }
}

/// Executes and records a command on a device of the host.
fn recorded(call: Call, command: impl FnOnce() -> c_int) -> c_int {
    let fd = call.context();
    let result = command();
    let errno = real::errno();
    let created = call.end(if result == 0 { 0 } else { errno });
    if let Some(queue) = created.completion_queue {
        hooks::queue_created(queue);
        hooks::hook_created(fd, false);
    }
    real::set_errno(errno);
    result
}

/// Returns whether a system call that a signal has interrupted is restarted: all handlers of
/// the program ask for that. (Which of them has run is unknown.)
fn restarts_calls() -> bool {
    let before = real::errno();
    let restarts = (1..=libc::SIGRTMAX()).all(|number| {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        let none = std::ptr::null();
        // SAFETY: a query into an action of this function. Zero is a value of each field.
        let (found, action) = unsafe {
            let found = real::sigaction(number, none, action.as_mut_ptr());
            (found == 0, action.assume_init())
        };
        let handler = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        !found
            || !handler
            || action.sa_flags & libc::SA_RESTART != 0
            || fault::SIGNALS.contains(&number)
    });
    real::set_errno(before);
    restarts
}

/// Reports the event that a command of the connection manager has returned, if it is a failure.
fn explain_event(command: &[u8]) {
    let Some(explainer) = process::explainer() else {
        return;
    };
    let body = command.get(size_of::<CmdHdr>()..).unwrap_or_default();
    let Ok((request, _)) = abi::GetEvent::read_from_prefix(body) else {
        return;
    };
    // Only the members up to the status: the program's structure may be older, and shorter.
    let length = offset_of!(abi::EventResp, param);
    let Some(found) =
        hooks::read::<[u8; offset_of!(abi::EventResp, param)]>(request.response as usize)
    else {
        return;
    };
    let mut event = [0; size_of::<abi::EventResp>()];
    // SAFETY: bytes may have any value.
    event[..length].copy_from_slice(&unsafe { found.assume_init() });
    if let Ok((event, message)) = rdmacm::Message::parse(&event, rdmacm::event::Form::Connection) {
        explainer.connection_event(event.id, &message);
    }
}

/// Passes a command to the connection manager, with descriptors translated.
fn write_manager_command(object: &Object, fd: c_int, command: &[u8]) -> Result<usize, Errno> {
    let header = CmdHdr::read_from_prefix(command).ok();
    let number = header.map(|(header, _)| header.cmd);
    let mut translated;
    let mut passed = command;
    if number == Some(cmd::CMD_MIGRATE_ID) {
        let (header, body) = command.split_at(size_of::<CmdHdr>());
        if let Ok(mut migrate) = abi::MigrateId::read_from_bytes(body) {
            if let Lookup::Open(from) = find(migrate.fd as c_int) {
                migrate.fd = from.fd as u32;
            }
            translated = header.to_vec();
            translated.extend_from_slice(migrate.as_bytes());
            passed = &translated;
        }
    }
    let _scope = internal::enter();
    loop {
        // SAFETY: the device keeps its descriptor open while the object exists; the
        // program vouches for addresses in the command, as to the kernel.
        let done = unsafe { object.kernel.write(object.fd, passed) };
        let again = done.is_err_and(|errno| errno.raw() == libc::EAGAIN);
        // SAFETY: no pointer is passed.
        let flags = unsafe { real::fcntl(fd, libc::F_GETFL, 0) };
        // As in the kernel, closing the descriptor does not end the wait.
        let waits = flags < 0 || flags & libc::O_NONBLOCK == 0;
        if done.is_err_and(|errno| errno.raw() == libc::EIO) {
            process::report_shared_channel();
        }
        if number == Some(cmd::CMD_GET_EVENT) && done.is_ok() {
            explain_event(command);
        }
        if !again || number != Some(cmd::CMD_GET_EVENT) || !waits {
            return done;
        }
        let mut entry = libc::pollfd {
            fd: object.fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry is passed.
        if unsafe { real::poll(&raw mut entry, 1, -1) } < 0 {
            return Err(Errno::new(real::errno()));
        }
    }
}

/// Returns the flags of a descriptor that the library itself uses. The program may have closed it
/// by a system call that is not seen: its owner closes it as if it were open, since Rust's library
/// ends the process if an owned descriptor is not.
fn flags_of_own(fd: c_int) -> c_int {
    // SAFETY: no pointer is passed.
    match unsafe { real::fcntl(fd, libc::F_GETFD, 0) } {
        -1 if real::errno() == libc::EBADF => libc::FD_CLOEXEC,
        flags => flags,
    }
}

/// Closes a range of descriptors, except those that the library itself uses.
fn close_descriptor_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let end = (last as usize).saturating_add(1);
    let mut internal_fds = Vec::new();
    let mut open = Vec::new();
    table::each_marked(first as usize..end, |fd, is_internal| {
        if is_internal {
            internal_fds.push(fd)
        } else {
            open.push(fd)
        }
    });
    let open: Vec<_> = open.into_iter().map(|fd| (fd, find(fd))).collect();
    let mut next = first;
    let close = |from: c_uint, to: c_uint| {
        // SAFETY: the caller closes these descriptors.
        if from <= to && unsafe { real::close_range(from, to, flags) } != 0 {
            return real::errno();
        }
        0
    };
    let mut errno = 0;
    for fd in internal_fds {
        let fd = fd as c_uint;
        if fd > next {
            errno = errno.max(close(next, fd - 1));
        }
        next = fd + 1;
    }
    errno = errno.max(close(next, last));
    const CLOEXEC: c_int = 1 << 2;
    if errno == 0 && flags & CLOEXEC == 0 {
        for (fd, object) in &open {
            unregister(object, *fd);
        }
        if (first..=last).contains(&(libc::STDERR_FILENO as c_uint)) {
            standard_error::closing(libc::STDERR_FILENO);
        }
    }
    if errno == 0 { 0 } else { failed(errno) }
}

export! {
    accept4(
        fd: c_int, address: *mut libc::sockaddr, length: *mut libc::socklen_t, flags: c_int
    ) -> c_int {
        // SAFETY: guaranteed by the caller.
        mark_internal(unsafe { real::accept4(fd, address, length, flags) })
    }

    pipe2(fds: *mut c_int, flags: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        let result = unsafe { real::pipe2(fds, flags) };
        if result == 0 {
            // SAFETY: the call succeeded, so it has written both.
            unsafe { internal::mark_internal_pair(fds) };
        }
        result
    }

    epoll_create1(flags: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        mark_internal(unsafe { real::epoll_create1(flags) })
    }

    eventfd(value: c_uint, flags: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        mark_internal(unsafe { real::eventfd(value, flags) })
    }

    memfd_create(name: *const c_char, flags: c_uint) -> c_int {
        // SAFETY: guaranteed by the caller.
        mark_internal(unsafe { real::memfd_create(name, flags) })
    }

    timerfd_create(clock: c_int, flags: c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        mark_internal(unsafe { real::timerfd_create(clock, flags) })
    }

    close(fd: c_int) -> c_int {
        if table::is_internal(fd) {
            if !internal::is_internal() {
                return failed(libc::EBADF);
            }
            table::set_internal(fd, false);
        }
        record::closed(fd);
        promises::closed(fd);
        host::closing(fd);
        standard_error::closing(fd);
        let object = find(fd);
        // Before closing, so that the number is not reused while it is in the table.
        unregister(&object, fd);
        if let Lookup::Open(object) = &object {
            hooks::before_close(object);
        }
        // SAFETY: guaranteed by the caller.
        unsafe { real::close(fd) }
    }

    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
        if first > last {
            return failed(libc::EINVAL);
        }
        close_descriptor_range(first, last, flags)
    }

    closefrom(first: c_int) -> () {
        close_descriptor_range(first.max(0) as c_uint, c_uint::MAX, 0);
    }

    // Programs close all descriptors by number before they execute another one, and in order to
    // become daemons.
    syscall(
        number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize
    ) -> c_long {
        match number {
            // Its own calls also get here if it is linked as one unit.
            // SAFETY: guaranteed by the caller.
            _ if internal::is_internal() => unsafe { real::syscall(number, a, b, c, d, e, f) },
            // SAFETY: guaranteed by the caller, as of that function. The system, too, takes 32
            // bits of each argument.
            libc::SYS_close => unsafe { close(a as c_int) }.into(),
            // SAFETY: as above.
            libc::SYS_close_range => unsafe {
                close_range(a as c_uint, b as c_uint, c as c_int).into()
            },
            // SAFETY: guaranteed by the caller.
            _ => unsafe { real::syscall(number, a, b, c, d, e, f) },
        }
    }

    dup(fd: c_int) -> c_int {
        let object = find(fd);
        // SAFETY: guaranteed by the caller.
        let duplicate = unsafe { real::dup(fd) };
        match object {
            Lookup::Other => mark_internal(duplicate),
            object => register_duplicate(object, duplicate),
        }
    }

    dup2(from: c_int, to: c_int) -> c_int {
        if from == to {
            // SAFETY: guaranteed by the caller.
            return unsafe { real::dup2(from, to) };
        }
        if table::is_internal(to) {
            return failed(libc::EBUSY);
        }
        let (object, before) = (find(from), find(to));
        // SAFETY: guaranteed by the caller.
        let fd = replace(|| unsafe { real::dup2(from, to) });
        if fd >= 0 {
            unregister(&before, to);
            standard_error::duplicated(fd);
        }
        register_duplicate(object, fd)
    }

    dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
        if table::is_internal(to) {
            return failed(libc::EBUSY);
        }
        let (object, before) = (find(from), find(to));
        // SAFETY: guaranteed by the caller.
        let fd = replace(|| unsafe { real::dup3(from, to, flags) });
        if fd >= 0 {
            unregister(&before, to);
            standard_error::duplicated(fd);
        }
        register_duplicate(object, fd)
    }

    fcntl = fcntl64 (fd: c_int, command: c_int, argument: Optional) -> c_int {
        let object = find(fd);
        match (&object, command) {
            (Lookup::Open(_) | Lookup::Netlink, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) => {
                // SAFETY: guaranteed by the caller.
                register_duplicate(object, unsafe { real::fcntl(fd, command, argument) })
            }
            (Lookup::Open(events), libc::F_GETFL) if events.kind == ObjectKind::Events => {
                let nonblocking = match events.nonblocking.load(Ordering::Relaxed) {
                    true => libc::O_NONBLOCK,
                    false => 0,
                };
                libc::O_RDONLY | nonblocking
            }
            (Lookup::Open(events), libc::F_SETFL) if events.kind == ObjectKind::Events => {
                let nonblocking = argument as c_int & libc::O_NONBLOCK != 0;
                result(set_nonblocking(events, nonblocking))
            }
            (Lookup::Other, libc::F_GETFD) if table::is_internal(fd) => flags_of_own(fd),
            // SAFETY: guaranteed by the caller.
            (_, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) => unsafe {
                mark_internal(real::fcntl(fd, command, argument))
            },
            // SAFETY: guaranteed by the caller.
            _ => unsafe { real::fcntl(fd, command, argument) },
        }
    }

    ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
        match find_for_use(fd) {
            Lookup::Open(object)
                if object.kind == ObjectKind::Events && request == libc::FIONBIO =>
            {
                // SAFETY: guaranteed by the caller.
                let nonblocking = unsafe { argument.cast::<c_int>().read_unaligned() } != 0;
                result(set_nonblocking(&object, nonblocking))
            }
            Lookup::Open(object) if matches!(object.kind, ObjectKind::Device(_)) => {
                let call = Call::begin(fd, request, argument);
                // A command may need memory that is writable.
                check::lift_all();
                let _scope = internal::enter();
                // SAFETY: the device keeps its descriptor open while the object exists;
                // the caller vouches for addresses in the command, as to the kernel.
                let done = unsafe { object.kernel.ioctl(object.fd, request, argument) };
                table::close_displaced();
                // A completion queue is hooked below, as its device has told.
                let errno = done.err().map_or(0, |errno| errno.raw());
                call.map(|call| call.end(errno));
                if let ObjectKind::Device(number) = object.kind {
                    hooks::after_command(fd, number);
                }
                result(done)
            }
            Lookup::Stale | Lookup::Foreign => failed(libc::EIO),
            _ => {
                // SAFETY: guaranteed by the caller.
                let command = || unsafe { real::ioctl(fd, request, argument) };
                let result = match Call::begin(fd, request, argument) {
                    None => command(),
                    Some(call) => recorded(call, command),
                };
                if result == 0 {
                    host::after_command(fd, request, argument);
                }
                result
            }
        }
    }

    read(fd: c_int, buffer: *mut c_void, length: usize) -> isize {
        match find_for_use(fd) {
            Lookup::Open(object) if object.kind == ObjectKind::Events => {
                // Events are shorter, and a read returns one.
                let length = length.min(64);
                // SAFETY: guaranteed by the caller.
                let buffer = unsafe { slice::from_raw_parts_mut(buffer.cast(), length) };
                read_event(&object, buffer)
            }
            Lookup::Open(_) => failed(libc::EINVAL) as isize,
            Lookup::Stale | Lookup::Foreign => failed(libc::EIO) as isize,
            Lookup::Other | Lookup::Netlink => {
                check::before_call(buffer, length);
                // SAFETY: guaranteed by the caller.
                let count = unsafe { real::read(fd, buffer, length) };
                check::after_call(buffer, count);
                count
            }
        }
    }

    __read_chk(fd: c_int, buffer: *mut c_void, length: usize, room: usize) -> isize {
        require_room(length, room);
        // SAFETY: guaranteed by the caller.
        unsafe { read(fd, buffer, length) }
    }

    write(fd: c_int, buffer: *const c_void, length: usize) -> isize {
        match find_for_use(fd) {
            Lookup::Open(object) if object.kind == ObjectKind::Manager => {
                // SAFETY: guaranteed by the caller.
                let command = unsafe { slice::from_raw_parts(buffer.cast(), length) };
                count(write_manager_command(&object, fd, command))
            }
            Lookup::Netlink => {
                // SAFETY: guaranteed by the caller.
                let request = unsafe { slice::from_raw_parts(buffer.cast(), length) };
                count(sockets::request(fd, request))
            }
            Lookup::Open(_) => failed(libc::EINVAL) as isize,
            Lookup::Stale | Lookup::Foreign => failed(libc::EIO) as isize,
            Lookup::Other => {
                check::before_call(buffer.cast_mut(), length);
                // SAFETY: guaranteed by the caller.
                unsafe { real::write(fd, buffer, length) }
            }
        }
    }
}
