//! The running kernel, called through libc's functions, so that a preloaded
//! interposer sees the calls.

use core::ffi::{CStr, c_int, c_void};
use core::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;

use super::Kernel;
use crate::abi::netlink::NETLINK_RDMA;
use crate::{Errno, environment};

/// The running kernel. Zero-sized, so boxing it allocates nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealKernel;

/// Maximum length of a netlink datagram. A longer one is an error, not
/// truncated; the kernel's dump buffer is 32 KiB at most.
const NETLINK_DATAGRAM: usize = 64 * 1024;
/// Maximum number of datagrams in an answer; a longer answer is treated as endless.
const NETLINK_DATAGRAMS: usize = 4096;

fn check(result: c_int) -> Result<c_int, Errno> {
    if result < 0 {
        Err(Errno::last())
    } else {
        Ok(result)
    }
}

fn check_len(result: isize) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno::last())
}

// SAFETY: descriptors from the kernel are new and are files of this process;
// commands are passed to the kernel unchanged, and its devices do not truncate
// what they map.
unsafe impl Kernel for RealKernel {
    fn open(&self, path: &CStr, flags: c_int) -> Result<RawFd, Errno> {
        // SAFETY: path is NUL-terminated.
        check(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) })
    }

    unsafe fn close(&self, fd: RawFd) -> Result<(), Errno> {
        // SAFETY: the caller owns the descriptor.
        check(unsafe { libc::close(fd) }).map(drop)
    }

    unsafe fn ioctl(
        &self,
        fd: RawFd,
        request: libc::Ioctl,
        argument: *mut c_void,
    ) -> Result<c_int, Errno> {
        // SAFETY: the caller vouches for the argument.
        check(unsafe { libc::ioctl(fd, request, argument) })
    }

    unsafe fn read(&self, fd: RawFd, buffer: &mut [u8]) -> Result<usize, Errno> {
        // SAFETY: the descriptor is open, as the caller guarantees; the kernel
        // writes at most the buffer's length into it.
        check_len(unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) })
    }

    unsafe fn write(&self, fd: RawFd, buffer: &[u8]) -> Result<usize, Errno> {
        // SAFETY: the buffer is readable; the caller vouches for addresses in
        // it.
        check_len(unsafe { libc::write(fd, buffer.as_ptr().cast(), buffer.len()) })
    }

    unsafe fn wait_readable(&self, fd: RawFd, timeout_ms: c_int) -> Result<bool, Errno> {
        let mut entry = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the pointer and the count describe one valid entry.
        check(unsafe { libc::poll(&mut entry, 1, timeout_ms) }).map(|ready| ready > 0)
    }

    unsafe fn set_nonblocking(&self, fd: RawFd, nonblocking: bool) -> Result<(), Errno> {
        // SAFETY: the descriptor is open, as the caller guarantees.
        let flags = check(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
        let flags = if nonblocking {
            flags | libc::O_NONBLOCK
        } else {
            flags & !libc::O_NONBLOCK
        };
        // SAFETY: as above.
        check(unsafe { libc::fcntl(fd, libc::F_SETFL, flags) }).map(drop)
    }

    fn device_number(&self, path: &CStr) -> Result<libc::dev_t, Errno> {
        // SAFETY: all-zero bytes are a valid stat structure.
        let mut stat: libc::stat = unsafe { mem::zeroed() };
        // SAFETY: path is NUL-terminated, stat is writable.
        check(unsafe { libc::stat(path.as_ptr(), &mut stat) })?;
        Ok(stat.st_rdev)
    }

    fn list_directory(&self, path: &CStr) -> Result<Vec<String>, Errno> {
        let error = |e: std::io::Error| Errno::new(e.raw_os_error().unwrap_or(libc::EIO));
        let mut names = Vec::new();
        for entry in
            std::fs::read_dir(std::ffi::OsStr::from_bytes(path.to_bytes())).map_err(error)?
        {
            // Device names are UTF-8; other names are skipped.
            if let Ok(name) = entry.map_err(error)?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn netlink(&self, request: &[u8], receive: &mut dyn FnMut(&[u8]) -> bool) -> Result<(), Errno> {
        // SAFETY: the call takes no pointers.
        let socket = check(unsafe {
            libc::socket(
                libc::AF_NETLINK,
                libc::SOCK_RAW | libc::SOCK_CLOEXEC,
                NETLINK_RDMA,
            )
        })?;
        // SAFETY: the descriptor is new and owned by nothing else.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let timeout = libc::timeval {
            tv_sec: 5,
            tv_usec: 0,
        };
        // SAFETY: the option's value is a timeval of that length.
        check(unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVTIMEO,
                (&raw const timeout).cast(),
                size_of::<libc::timeval>() as libc::socklen_t,
            )
        })?;
        // SAFETY: the buffer is readable. An unconnected netlink socket sends to the kernel.
        let sent = check_len(unsafe {
            libc::send(
                socket.as_raw_fd(),
                request.as_ptr().cast(),
                request.len(),
                0,
            )
        })?;
        if sent != request.len() {
            return Err(Errno::new(libc::EIO));
        }
        let mut buffer = vec![0u8; NETLINK_DATAGRAM];
        for _ in 0..NETLINK_DATAGRAMS {
            // SAFETY: all-zero bytes are a valid sockaddr_nl.
            let mut from: libc::sockaddr_nl = unsafe { mem::zeroed() };
            let mut from_len = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
            // SAFETY: the kernel writes at most the given lengths into buffer and address.
            let result = unsafe {
                libc::recvfrom(
                    socket.as_raw_fd(),
                    buffer.as_mut_ptr().cast(),
                    buffer.len(),
                    libc::MSG_TRUNC,
                    (&raw mut from).cast(),
                    &mut from_len,
                )
            };
            let len = match check_len(result) {
                Ok(len) => len,
                Err(errno) if errno.raw() == libc::EINTR => continue,
                Err(errno) => return Err(errno),
            };
            // Any process may send to a netlink socket; only the kernel has
            // port 0.
            if from.nl_pid != 0 {
                continue;
            }
            let Some(datagram) = buffer.get(..len) else {
                return Err(Errno::new(libc::EMSGSIZE));
            };
            if receive(datagram) {
                return Ok(());
            }
        }
        Err(Errno::new(libc::EOVERFLOW))
    }

    fn sysfs_path(&self) -> String {
        match environment::text("SYSFS_PATH") {
            Some(path) => path.trim_end_matches('/').to_owned(),
            None => "/sys".to_owned(),
        }
    }

    fn is_real(&self) -> bool {
        true
    }
}
