//! Messages of Unix sockets with file descriptors. No descriptor that a peer passes stays
//! open unnoticed, however many it passes.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use nix::libc;

/// The largest number of descriptors in a message of Linux (SCM_MAX_FD).
const MAX_FDS: usize = 253;
/// Length of the header of a control message, and the alignment of messages.
const HEADER: usize = size_of::<libc::cmsghdr>();
const ALIGNMENT: usize = size_of::<usize>();
/// Room for all descriptors of a message, as nix leaks those of a message that is cut.
const ROOM: usize = (HEADER + MAX_FDS * size_of::<RawFd>()).next_multiple_of(ALIGNMENT);

/// A received message.
#[derive(Debug)]
pub struct Received {
    /// Number of bytes; 0 at the end of the connection.
    pub length: usize,
    /// The descriptors.
    pub fds: Vec<OwnedFd>,
    /// Descriptors are missing: this process has reached its limit.
    pub is_cut: bool,
}

/// Receives bytes and all descriptors that are passed with them, with close-on-exec set.
///
/// # Errors
/// Those of `recvmsg`.
pub fn receive(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    flags: libc::c_int,
) -> io::Result<Received> {
    let mut control = [0_usize; ROOM / ALIGNMENT];
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut message = libc::msghdr {
        msg_name: ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: &raw mut part,
        msg_iovlen: 1,
        msg_control: (&raw mut control).cast(),
        msg_controllen: ROOM as _,
        msg_flags: 0,
    };
    let flags = flags | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the message names `bytes` and `control` with their lengths, which live on.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    let mut fds = Vec::new();
    // SAFETY: the kernel has written the control messages up to `msg_controllen`, which it
    // has set.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: it is in `control`, aligned, and written by the kernel.
        let found = unsafe { *header };
        if (found.cmsg_level, found.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            let count = (found.cmsg_len as usize).saturating_sub(HEADER) / size_of::<RawFd>();
            for index in 0..count {
                // SAFETY: the message has `count` numbers. The kernel has just created the
                // descriptor for this process, and nothing else owns its number.
                fds.push(unsafe {
                    let data = libc::CMSG_DATA(header).cast::<RawFd>().add(index);
                    OwnedFd::from_raw_fd(data.read_unaligned())
                });
            }
        }
        // SAFETY: as for the first one.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok(Received {
        length,
        fds,
        is_cut: message.msg_flags & libc::MSG_CTRUNC != 0,
    })
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;

    use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

    use super::*;

    #[test]
    fn all_descriptors_of_a_message_are_received() {
        let (near, far) = UnixDatagram::pair().unwrap();
        for count in [0, 1, 2, 3, 17, MAX_FDS] {
            let raw = vec![far.as_raw_fd(); count];
            let control = [ControlMessage::ScmRights(&raw)];
            let flags = MsgFlags::empty();
            sendmsg::<()>(
                far.as_raw_fd(),
                &[IoSlice::new(b"bytes")],
                &control[..usize::from(count != 0)],
                flags,
                None,
            )
            .unwrap();
            let mut bytes = [0; 8];
            let received = receive(near.as_fd(), &mut bytes, 0).unwrap();
            assert_eq!(
                (received.length, received.fds.len(), received.is_cut),
                (5, count, false)
            );
        }
        let error = receive(near.as_fd(), &mut [0], libc::MSG_DONTWAIT).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
