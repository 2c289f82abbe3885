//! Attributes in sysfs that differ between processes.

use std::fs::File;
use std::io::{Seek, Write as _};
use std::os::fd::{IntoRawFd, RawFd};

use embedded::sysfs::{self, GidAttribute};
use nix::sys::epoll::{Epoll, EpollCreateFlags};
use nix::sys::memfd::{MFdFlags, memfd_create};
use uverbs::Errno;

use crate::process::{ProcessState, report_failed_call};
use crate::tree;
use crate::{check, config};

/// Opens an attribute, by its path below `/sys`, for reading.
pub(crate) fn open(path: &str) -> Result<RawFd, Errno> {
    let (number, name) = tree::dynamic(path).ok_or(Errno::new(libc::ENOENT))?;
    let devices = ProcessState::current().devices()?;
    let device = devices.get(number).ok_or(Errno::new(libc::ENOENT))?;
    if GidAttribute::named(name).is_some_and(|(_, index)| index >= device.gids().len()) {
        return Err(Errno::new(libc::ENOENT));
    }
    if let Some((_, index)) = GidAttribute::named(name) {
        check::gid_was_read(number, u32::try_from(index).ok());
    }
    let failed = |errno: nix::Error| Errno::new(errno as i32);
    let Some(content) = sysfs::content(device, config::node_interface(number), name) else {
        // As in sysfs, the file can be opened: reading an epoll instance is EINVAL.
        let file = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?;
        return Ok(file.0.into_raw_fd());
    };
    open_text(&content)
}

/// Returns a file with this text.
pub(crate) fn open_text(text: &str) -> Result<RawFd, Errno> {
    let failed = |errno: nix::Error| Errno::new(errno as i32);
    let file = memfd_create(c"ringverbs-sysfs", MFdFlags::MFD_CLOEXEC).map_err(failed);
    let file = file.inspect_err(|errno| report_failed_call(*errno))?;
    let mut file = File::from(file);
    let written = (file.write_all(text.as_bytes())).and_then(|()| file.rewind());
    written.map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(file.into_raw_fd())
}
