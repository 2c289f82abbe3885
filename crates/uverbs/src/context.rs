//! An open uverbs device.

use core::ops::Deref;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use crate::abi::verbs;
use crate::discovery::{Device, DriverId};
use crate::kernel::{Descriptor, Kernel, KernelRef};
use crate::{Command, Error};

/// A handle's reference to its context: an `Arc<Context>`, a plain reference,
/// or a caller's own copyable pointer.
///
/// # Safety
/// The reference and all its clones must always dereference to the same
/// context: what is created through one is used and closed through another.
pub unsafe trait ContextRef: Deref<Target = Context> + Clone {}

// SAFETY: a shared reference and its copies always refer to the same context.
unsafe impl ContextRef for &Context {}

// SAFETY: an `Arc` and its clones always refer to the same context.
unsafe impl ContextRef for Arc<Context> {}

// SAFETY: by its contract, a `ContextRef` always refers to the same context,
// and a context keeps its kernel.
unsafe impl<C: ContextRef> KernelRef for C {
    fn kernel(&self) -> &dyn Kernel {
        Context::kernel(self)
    }
}

/// Properties of a new context, as the kernel reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextInfo {
    /// Number of completion vectors: interrupts, or processors, over which
    /// completion events can be spread.
    pub num_comp_vectors: u32,
    /// Features of the uverbs core, `CORE_SUPPORT_...` in [`verbs`].
    pub core_support: u64,
}

impl ContextInfo {
    /// Returns whether optional access flags of a memory region may be passed.
    pub fn optional_mr_access(&self) -> bool {
        self.core_support & verbs::CORE_SUPPORT_OPTIONAL_MR_ACCESS != 0
    }
}

/// An open uverbs character device. All objects that a process creates on the
/// device belong to a context.
#[derive(Debug)]
pub struct Context {
    file: Descriptor<Box<dyn Kernel>>,
    driver_id: DriverId,
}

impl Context {
    /// Opens the character device of `device`.
    /// [`get_context`](Self::get_context) then creates the kernel's context.
    ///
    /// # Errors
    /// EACCES without permission, ENOENT if the device node does not exist,
    /// ENXIO if its driver was unloaded, EINVAL if the device's driver is unknown:
    /// each command names the driver. Sysfs does not report it; a caller that
    /// knows it sets [`Device::driver_id`].
    pub fn open(kernel: Box<dyn Kernel>, device: &Device) -> Result<Self, Error> {
        if device.driver_id == DriverId::UNKNOWN {
            let what = "the device's kernel driver is unknown";
            return Err(Error::Invalid {
                command: Command::Open,
                what,
            });
        }
        let path = CString::new(device.device_path()).map_err(|_| Error::Invalid {
            command: Command::Open,
            what: "the device's name contains a NUL",
        })?;
        let file = Descriptor::open(kernel, &path, libc::O_RDWR);
        Ok(Self {
            file: file.map_err(|errno| Error::refused(Command::Open, None, errno))?,
            driver_id: device.driver_id,
        })
    }

    /// Takes ownership of an open uverbs device, and closes it when dropped.
    /// The kernel rejects every command (EINVAL) that names a driver other than
    /// the device's.
    ///
    /// # Safety
    /// `fd` must belong to `kernel` and be open, and nothing else may close it.
    pub unsafe fn from_owned_fd(kernel: Box<dyn Kernel>, fd: RawFd, driver_id: DriverId) -> Self {
        Self {
            // SAFETY: guaranteed by the caller.
            file: unsafe { Descriptor::new(kernel, fd) },
            driver_id,
        }
    }

    /// Uses an open uverbs device without closing it.
    ///
    /// # Safety
    /// `fd` must belong to `kernel`, and must stay open and refer to the same
    /// file while the context is in use: commands given to another file could
    /// do anything.
    pub unsafe fn from_borrowed_fd(
        kernel: Box<dyn Kernel>,
        fd: RawFd,
        driver_id: DriverId,
    ) -> Self {
        Self {
            // SAFETY: guaranteed by the caller.
            file: unsafe { Descriptor::borrowed(kernel, fd) },
            driver_id,
        }
    }

    /// Returns the command descriptor, through which queues are mapped.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(crate) fn file(&self) -> &Descriptor<Box<dyn Kernel>> {
        &self.file
    }

    /// Returns the kernel driver that commands name.
    pub fn driver_id(&self) -> DriverId {
        self.driver_id
    }

    /// Returns the system calls that this context uses.
    pub fn kernel(&self) -> &dyn Kernel {
        self.file.kernel()
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
