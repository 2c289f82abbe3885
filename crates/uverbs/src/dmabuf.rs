//! Mappable memory of a device, exported as a DMA buffer for other devices.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use crate::abi::later;
use crate::command::Ioctl;
use crate::kernel::Descriptor;
use crate::{Command, ContextRef, Error};

/// The descriptor of a DMA buffer. Closed when dropped.
#[derive(Debug)]
pub struct Dmabuf<C: ContextRef> {
    file: Descriptor<C>,
}

impl<C: ContextRef> Dmabuf<C> {
    /// Exports what `mmap` of the device's file maps at `offset`.
    ///
    /// One system call. The descriptor is closed on exec.
    ///
    /// # Errors
    /// EINVAL if nothing is mapped there; EPROTONOSUPPORT or EOPNOTSUPP if the
    /// kernel or the driver does not support it; EMFILE, ENOMEM.
    ///
    /// # Safety
    /// `offset` must be one that the caller was given to map, of something that
    /// other devices may write to: a device that writes to doorbell registers
    /// can post anything.
    pub unsafe fn export(context: &C, offset: u64) -> Result<Self, Error> {
        let mut ioctl = Ioctl::new(
            Command::AllocDmabuf,
            later::OBJECT_DMABUF,
            later::METHOD_DMABUF_ALLOC,
        );
        let object = ioctl.new_object(later::ATTR_ALLOC_DMABUF_HANDLE);
        ioctl.u64(later::ATTR_ALLOC_DMABUF_PGOFF, offset);
        let fd = ioctl.run(context)?.fd(object)?;
        Ok(Self {
            // SAFETY: the kernel has just returned the descriptor; this is its
            // only owner.
            file: unsafe { Descriptor::new(context.clone(), fd) },
        })
    }

    /// Returns the descriptor.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Releases the descriptor without closing it.
    pub fn into_fd(self) -> RawFd {
        self.file.into_raw_fd()
    }
}

impl<C: ContextRef> AsFd for Dmabuf<C> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
