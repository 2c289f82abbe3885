//! Functions of sockets, for RDMA netlink.
//!
//! A program's socket for RDMA netlink is one of `NETLINK_USERSOCK`, the protocol of messages
//! between programs, so the kernel binds it, queues its messages, and wakes who waits for
//! them. Requests are not sent: their answers are, from the socket to itself. Receiving
//! discards messages of other sockets, and names the kernel as the sender.

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::sync::PoisonError;
use std::{mem, ptr, slice};

use libc::{iovec, msghdr, sockaddr, sockaddr_nl, socklen_t};
use uverbs::Errno;
use uverbs::abi::netlink::NETLINK_RDMA;

use super::{count, export, failed, require_room};
use crate::internal::{self, mark_internal};
use crate::process::ProcessState;
use crate::table::{Lookup, find, set_netlink};
use crate::{check, config, netlink, real};

/// Maximum length of a request.
const MAX_REQUEST: usize = 1 << 16;
const ADDRESS_LENGTH: socklen_t = size_of::<sockaddr_nl>() as socklen_t;

fn last_errno() -> Errno {
    Errno::new(real::errno())
}

/// Returns an address without a port, which is the kernel's.
fn kernel_address() -> sockaddr_nl {
    // SAFETY: zeros are valid.
    let mut address: sockaddr_nl = unsafe { mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as u16;
    address
}

/// Returns the address of a socket for netlink, which is bound if it was not.
fn own_address(fd: c_int) -> Result<sockaddr_nl, Errno> {
    let mut address = kernel_address();
    for _ in 0..2 {
        let mut length = ADDRESS_LENGTH;
        // SAFETY: address and length are writable.
        if unsafe { libc::getsockname(fd, (&raw mut address).cast(), &raw mut length) } != 0 {
            return Err(last_errno());
        }
        if address.nl_pid != 0 {
            return Ok(address);
        }
        // SAFETY: the address has this length.
        if unsafe { libc::bind(fd, (&raw const address).cast(), ADDRESS_LENGTH) } != 0 {
            return Err(last_errno());
        }
    }
    Err(Errno::new(libc::EADDRNOTAVAIL))
}

/// Answers a request. Returns its length.
pub(super) fn request(fd: c_int, request: &[u8]) -> Result<usize, Errno> {
    if request.len() > MAX_REQUEST {
        return Err(Errno::new(libc::EMSGSIZE));
    }
    let address = own_address(fd)?;
    let process = ProcessState::current();
    let lock = || {
        process
            .answers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    };
    if lock().contains_key(&address.nl_pid) {
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        let none = ptr::null_mut();
        // SAFETY: nothing is written.
        if unsafe { real::recvfrom(fd, none, 0, flags, ptr::null_mut(), ptr::null_mut()) } >= 0 {
            // As the kernel during a dump.
            return Err(Errno::new(libc::EBUSY));
        }
        // Nothing is unread: they are of a closed socket that had the same port.
        lock().remove(&address.nl_pid);
    }
    let answers = netlink::answers(request, address.nl_pid);
    send_answers(fd, &address, answers.into())?;
    Ok(request.len())
}

/// Sends as many answers as the socket has room for, and stores the others.
fn send_answers(
    fd: c_int,
    address: &sockaddr_nl,
    mut answers: VecDeque<Vec<u8>>,
) -> Result<(), Errno> {
    while let Some(answer) = answers.front() {
        // SAFETY: the answer and the address have these lengths.
        let sent = unsafe {
            real::sendto(
                fd,
                answer.as_ptr().cast(),
                answer.len(),
                libc::MSG_DONTWAIT,
                ptr::from_ref(address).cast(),
                ADDRESS_LENGTH,
            )
        };
        if sent < 0 {
            let errno = last_errno();
            if errno.raw() != libc::EAGAIN {
                return Err(errno);
            }
            let stored = &ProcessState::current().answers;
            let mut stored = stored.lock().unwrap_or_else(PoisonError::into_inner);
            stored.insert(address.nl_pid, answers);
            return Ok(());
        }
        answers.pop_front();
    }
    Ok(())
}

/// Called when the program has received an answer: sends stored ones.
fn send_stored(fd: c_int, address: &sockaddr_nl) {
    let stored = &ProcessState::current().answers;
    let stored = (stored.lock().unwrap_or_else(PoisonError::into_inner)).remove(&address.nl_pid);
    if let Some(answers) = stored {
        // Fails for a socket that the program has shut down.
        let _ = send_answers(fd, address, answers);
    }
}

/// Answers a request that the program sends to an address.
///
/// # Safety
/// The address is null, or readable for its length.
unsafe fn request_to(
    fd: c_int,
    bytes: &[u8],
    address: *const c_void,
    length: socklen_t,
) -> Result<usize, Errno> {
    if !address.is_null() {
        if length < ADDRESS_LENGTH {
            return Err(Errno::new(libc::EINVAL));
        }
        // SAFETY: guaranteed by the caller.
        let address = unsafe { address.cast::<sockaddr_nl>().read_unaligned() };
        if address.nl_pid != 0 {
            return Err(Errno::new(libc::EPERM));
        }
    }
    request(fd, bytes)
}

/// Receives an answer.
///
/// # Safety
/// As of recvmsg.
unsafe fn receive(fd: c_int, message: &mut msghdr, flags: c_int) -> Result<usize, Errno> {
    let own = own_address(fd)?;
    loop {
        let mut sender = kernel_address();
        let mut received = *message;
        received.msg_name = (&raw mut sender).cast();
        received.msg_namelen = ADDRESS_LENGTH;
        // SAFETY: guaranteed by the caller; the address is writable for its length.
        let length = unsafe { real::recvmsg(fd, &raw mut received, flags) };
        let length = usize::try_from(length).map_err(|_| last_errno())?;
        if sender.nl_pid != own.nl_pid {
            if flags & libc::MSG_PEEK != 0 {
                let (nothing, flags) = (ptr::null_mut(), libc::MSG_DONTWAIT);
                // SAFETY: nothing is written.
                unsafe { real::recvfrom(fd, nothing, 0, flags, ptr::null_mut(), ptr::null_mut()) };
            }
            continue;
        }
        if flags & libc::MSG_PEEK == 0 {
            send_stored(fd, &own);
        }
        message.msg_controllen = received.msg_controllen;
        message.msg_flags = received.msg_flags;
        if !message.msg_name.is_null() {
            let room = message.msg_namelen.min(ADDRESS_LENGTH) as usize;
            let address = kernel_address();
            // SAFETY: guaranteed by the caller; neither is longer.
            unsafe {
                ptr::copy_nonoverlapping((&raw const address).cast(), message.msg_name, room)
            };
            message.msg_namelen = ADDRESS_LENGTH;
        }
        return Ok(length);
    }
}

export! {
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
        let is_rdma = domain == libc::AF_NETLINK && protocol == NETLINK_RDMA;
        if !is_rdma || internal::is_internal() || config::get().is_none() {
            // SAFETY: guaranteed by the caller.
            return mark_internal(unsafe { real::socket(domain, kind, protocol) });
        }
        // SAFETY: no pointer is passed.
        let fd = unsafe { real::socket(domain, kind, libc::NETLINK_USERSOCK) };
        if fd < 0 {
            // Libraries use sysfs then.
            return failed(libc::EPROTONOSUPPORT);
        }
        match set_netlink(fd) {
            Ok(()) => fd,
            Err(errno) => {
                // SAFETY: the descriptor is new.
                unsafe { real::close(fd) };
                failed(errno.raw())
            }
        }
    }

    socketpair(domain: c_int, kind: c_int, protocol: c_int, fds: *mut c_int) -> c_int {
        // SAFETY: guaranteed by the caller.
        let result = unsafe { real::socketpair(domain, kind, protocol, fds) };
        if result == 0 {
            // SAFETY: the call succeeded, so it has written both.
            unsafe { internal::mark_internal_pair(fds) };
        }
        result
    }

    send(fd: c_int, buffer: *const c_void, length: usize, flags: c_int) -> isize {
        if let Lookup::Netlink = find(fd) {
            // SAFETY: guaranteed by the caller.
            return count(request(fd, unsafe { slice::from_raw_parts(buffer.cast(), length) }));
        }
        check::before_call(buffer.cast_mut(), length);
        // SAFETY: guaranteed by the caller.
        unsafe { real::send(fd, buffer, length, flags) }
    }

    sendto(
        fd: c_int, buffer: *const c_void, length: usize, flags: c_int,
        address: *const sockaddr, address_length: socklen_t
    ) -> isize {
        if let Lookup::Netlink = find(fd) {
            // SAFETY: guaranteed by the caller.
            let request = unsafe { slice::from_raw_parts(buffer.cast(), length) };
            // SAFETY: guaranteed by the caller.
            return count(unsafe { request_to(fd, request, address.cast(), address_length) });
        }
        check::before_call(buffer.cast_mut(), length);
        // SAFETY: guaranteed by the caller.
        unsafe { real::sendto(fd, buffer, length, flags, address, address_length) }
    }

    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> isize {
        if let Lookup::Netlink = find(fd) {
            // SAFETY: guaranteed by the caller.
            let message = unsafe { *message };
            let parts = match message.msg_iovlen {
                0 => &[],
                // SAFETY: guaranteed by the caller.
                parts => unsafe { slice::from_raw_parts(message.msg_iov, parts) },
            };
            let mut bytes = Vec::new();
            for part in parts.iter().filter(|part| part.iov_len != 0) {
                // SAFETY: guaranteed by the caller.
                bytes.extend_from_slice(unsafe {
                    slice::from_raw_parts(part.iov_base.cast(), part.iov_len)
                });
            }
            // SAFETY: guaranteed by the caller.
            return count(unsafe {
                request_to(fd, &bytes, message.msg_name, message.msg_namelen)
            });
        }
        check::before_message(message);
        // SAFETY: guaranteed by the caller.
        unsafe { real::sendmsg(fd, message, flags) }
    }

    recv(fd: c_int, buffer: *mut c_void, length: usize, flags: c_int) -> isize {
        if let Lookup::Netlink = find(fd) {
            // SAFETY: guaranteed by the caller.
            return unsafe { recvfrom(fd, buffer, length, flags, ptr::null_mut(), ptr::null_mut()) };
        }

        check::before_call(buffer, length);
        // SAFETY: guaranteed by the caller.
        let received = unsafe { real::recv(fd, buffer, length, flags) };
        check::after_call(buffer, received);
        received
    }

    recvfrom(
        fd: c_int, buffer: *mut c_void, length: usize, flags: c_int,
        address: *mut sockaddr, address_length: *mut socklen_t
    ) -> isize {
        if let Lookup::Netlink = find(fd) {
            let mut part = iovec { iov_base: buffer, iov_len: length };
            // SAFETY: zeros are valid.
            let mut message: msghdr = unsafe { mem::zeroed() };
            message.msg_iov = &raw mut part;
            message.msg_iovlen = 1;
            if !address.is_null() {
                message.msg_name = address.cast();
                // SAFETY: guaranteed by the caller.
                message.msg_namelen = unsafe { address_length.read() };
            }
            // SAFETY: guaranteed by the caller.
            let received = unsafe { receive(fd, &mut message, flags) };
            if received.is_ok() && !address.is_null() {
                // SAFETY: guaranteed by the caller.
                unsafe { address_length.write(message.msg_namelen) };
            }
            return count(received);
        }

        check::before_call(buffer, length);
        // SAFETY: guaranteed by the caller.
        let received =
            unsafe { real::recvfrom(fd, buffer, length, flags, address, address_length) };
        check::after_call(buffer, received);
        received
    }

    __recv_chk(
        fd: c_int, buffer: *mut c_void, length: usize, room: usize, flags: c_int
    ) -> isize {
        require_room(length, room);
        // SAFETY: guaranteed by the caller.
        unsafe { recv(fd, buffer, length, flags) }
    }

    __recvfrom_chk(
        fd: c_int, buffer: *mut c_void, length: usize, room: usize, flags: c_int,
        address: *mut sockaddr, address_length: *mut socklen_t
    ) -> isize {
        require_room(length, room);
        // SAFETY: guaranteed by the caller.
        unsafe { recvfrom(fd, buffer, length, flags, address, address_length) }
    }

    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> isize {
        if let Lookup::Netlink = find(fd) {
            // SAFETY: guaranteed by the caller.
            return count(unsafe { receive(fd, &mut *message, flags) });
        }
        check::before_message(message);
        // SAFETY: guaranteed by the caller.
        let received = unsafe { real::recvmsg(fd, message, flags) };
        if received >= 0 {
            // SAFETY: the call succeeded, so the message is readable.
            unsafe { internal::mark_internal_rights(&*message) };
        }
        received
    }
}
