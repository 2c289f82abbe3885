//! An open uverbs device.

use core::ops::Deref;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use crate::abi::ids;
use crate::abi::verbs;
use crate::command::Ioctl;
use crate::discovery::{Device, DriverId};
use crate::kernel::{Descriptor, Kernel};
use crate::{Command, Error, Udata};
use zerocopy::IntoBytes;

/// How a handle refers to the context that it lives in: an `Arc<Context>`, a
/// reference, or a caller's own copyable pointer.
///
/// # Safety
/// It leads to the same context always, and so do its clones: what is made by
/// one is used and closed by the other.
pub unsafe trait ContextRef: Deref<Target = Context> + Clone {}

// SAFETY: a reference keeps where it leads to.
unsafe impl ContextRef for &Context {}

// SAFETY: an `Arc` keeps what it is of, and its clones are of the same.
unsafe impl ContextRef for Arc<Context> {}

/// What the kernel says about a new context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextInfo {
    /// Completion vectors: interrupts, or processors, that completion events
    /// can be spread over.
    pub num_comp_vectors: u32,
    /// Bits of the core's abilities, `CORE_SUPPORT_...` in [`verbs`].
    pub core_support: u64,
}

impl ContextInfo {
    /// Whether optional access flags of a memory region may be passed.
    pub fn optional_mr_access(&self) -> bool {
        self.core_support & verbs::CORE_SUPPORT_OPTIONAL_MR_ACCESS != 0
    }
}

/// An open uverbs character device, which all objects of a process on one
/// device live in.
#[derive(Debug)]
pub struct Context {
    file: Descriptor<Box<dyn Kernel>>,
    driver_id: DriverId,
}

impl Context {
    /// Opens the character device of `device`. The kernel's context is made by
    /// [`get_context`](Self::get_context).
    ///
    /// # Errors
    /// EACCES without permission, ENOENT if there is no such device node,
    /// ENXIO if its driver is gone, EINVAL if the device's driver is not known:
    /// each command names it. Sysfs does not tell it; a caller that knows it
    /// sets [`Device::driver_id`].
    pub fn open(kernel: Box<dyn Kernel>, device: &Device) -> Result<Self, Error> {
        if device.driver_id == DriverId::UNKNOWN {
            let what = "the device's kernel driver is not known";
            return Err(Error::Invalid {
                command: Command::Open,
                what,
            });
        }
        let path = CString::new(device.device_path()).map_err(|_| Error::Invalid {
            command: Command::Open,
            what: "the device's name holds a NUL",
        })?;
        let file = Descriptor::open(kernel, &path, libc::O_RDWR);
        Ok(Self {
            file: file.map_err(|errno| Error::Refused {
                command: Command::Open,
                handle: None,
                errno,
            })?,
            driver_id: device.driver_id,
        })
    }

    /// Takes over an open uverbs device, and closes it when dropped. The kernel
    /// refuses every command (EINVAL) that names another driver than its own.
    ///
    /// # Safety
    /// `fd` must be `kernel`'s and open, and nobody else may close it.
    pub unsafe fn from_owned_fd(kernel: Box<dyn Kernel>, fd: RawFd, driver_id: DriverId) -> Self {
        Self {
            // SAFETY: as the caller says.
            file: unsafe { Descriptor::new(kernel, fd) },
            driver_id,
        }
    }

    /// Uses an open uverbs device that somebody else closes.
    ///
    /// # Safety
    /// `fd` must be `kernel`'s, and stay open, and the same file, while the
    /// context is in use: commands given to another file could do anything.
    pub unsafe fn from_borrowed_fd(
        kernel: Box<dyn Kernel>,
        fd: RawFd,
        driver_id: DriverId,
    ) -> Self {
        Self {
            // SAFETY: as the caller says.
            file: unsafe { Descriptor::borrowed(kernel, fd) },
            driver_id,
        }
    }

    /// The command descriptor. Queues are mapped through it.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(crate) fn file(&self) -> &Descriptor<Box<dyn Kernel>> {
        &self.file
    }

    /// The kernel driver that commands are for.
    pub fn driver_id(&self) -> DriverId {
        self.driver_id
    }

    /// The system calls that this context uses.
    pub fn kernel(&self) -> &dyn Kernel {
        self.file.kernel()
    }

    /// Makes the kernel's context for this open file. Once for each open; all
    /// other commands need it.
    ///
    /// # Errors
    /// EINVAL if the file has a context already, EIO if the device is gone.
    pub fn get_context(&self, udata: Udata<'_>) -> Result<ContextInfo, Error> {
        let (mut vectors, mut support) = (0u32, 0u64);
        let mut ioctl = Ioctl::new(
            Command::GetContext,
            ids::OBJECT_DEVICE,
            ids::METHOD_GET_CONTEXT,
        );
        let slot = ioctl.output(
            ids::ATTR_GET_CONTEXT_NUM_COMP_VECTORS,
            vectors.as_mut_bytes(),
        );
        ioctl.output(ids::ATTR_GET_CONTEXT_CORE_SUPPORT, support.as_mut_bytes());
        ioctl.udata(udata);
        ioctl.run(self)?.written(slot)?;
        Ok(ContextInfo {
            num_comp_vectors: vectors,
            core_support: support,
        })
    }

    /// What [`get_context`](Self::get_context) said, for a file whose context
    /// somebody else has made.
    ///
    /// # Errors
    /// EOPNOTSUPP if the driver cannot share contexts.
    pub fn query_context(&self) -> Result<ContextInfo, Error> {
        self.query_context_of(None)
    }

    /// With room for the driver's answer, in an attribute of its own.
    pub(crate) fn query_context_of(
        &self,
        driver: Option<(u16, &mut [u8])>,
    ) -> Result<ContextInfo, Error> {
        let (mut vectors, mut support) = (0u32, 0u64);
        let mut ioctl = Ioctl::new(
            Command::QueryContext,
            ids::OBJECT_DEVICE,
            ids::METHOD_QUERY_CONTEXT,
        );
        let slot = ioctl.output(
            ids::ATTR_QUERY_CONTEXT_NUM_COMP_VECTORS,
            vectors.as_mut_bytes(),
        );
        ioctl.output(ids::ATTR_QUERY_CONTEXT_CORE_SUPPORT, support.as_mut_bytes());
        let driver = driver.map(|(attr, answer)| ioctl.output(attr, answer));
        let answer = ioctl.run(self)?;
        answer.written(slot)?;
        driver.map_or(Ok(()), |driver| answer.written(driver))?;
        Ok(ContextInfo {
            num_comp_vectors: vectors,
            core_support: support,
        })
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
