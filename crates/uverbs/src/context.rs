//! An open uverbs device.

use core::ops::Deref;
use std::ffi::CString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use crate::abi::ids;
use crate::abi::verbs;
use crate::command::Ioctl;
use crate::discovery::{Device, DriverId};
use crate::driver::DriverOutput;
use crate::kernel::{Descriptor, Kernel};
use crate::{Command, Error, Udata};
use zerocopy::IntoBytes;

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
    /// ENXIO if its driver is gone, EINVAL if the device's driver is unknown:
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
            file: file.map_err(|errno| Error::Refused {
                command: Command::Open,
                handle: None,
                errno,
            })?,
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

    /// Creates the kernel's context of this open file: once per open file, and
    /// before any other command.
    ///
    /// # Errors
    /// EINVAL if the file already has a context, EIO if the device is gone.
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

    /// Returns what [`get_context`](Self::get_context) returned, for a file
    /// whose context was created elsewhere.
    ///
    /// # Errors
    /// EOPNOTSUPP if the driver cannot share contexts.
    pub fn query_context(&self) -> Result<ContextInfo, Error> {
        self.query_context_with([])
    }

    /// As [`query_context`](Self::query_context), with outputs that the driver
    /// adds.
    ///
    /// # Errors
    /// As [`query_context`](Self::query_context); EINVAL if the file has no
    /// context yet, EPROTONOSUPPORT if the kernel or the driver does not
    /// support the outputs, EIO if the device is gone.
    pub fn query_context_with<const N: usize>(
        &self,
        outputs: [DriverOutput<'_>; N],
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
        let outputs = outputs.map(|output| ioctl.output(output.attr_id, output.buffer));
        let answer = ioctl.run(self)?;
        answer.written(slot)?;
        answer.all_written(&outputs)?;
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
