//! Device memory: allocation, mapping, copies.

use mlx5_abi::mmap;
use ring::{DeviceWords, Mapping};
use uverbs::{Context, ContextRef, Dm, DmHandle, Dmabuf};

use crate::CreateError;
use crate::context::{file_offset, map_command};
use crate::ioctl::{self, DmLocation};

/// The mapped bytes of device memory, without the kernel object's handle.
///
/// Any thread may use it; see [`DeviceWords`] for what a copy promises.
#[derive(Debug)]
pub struct DeviceBytes {
    words: DeviceWords,
    /// The page index of the mapping.
    page_index: u16,
}

/// The reason why nothing was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyError {
    /// Beyond the memory (EFAULT).
    Beyond,
    /// Not whole words of four bytes (EINVAL).
    NotWords,
}

impl CopyError {
    /// The stock provider's errno.
    pub fn errno(self) -> i32 {
        match self {
            Self::Beyond => libc::EFAULT,
            Self::NotWords => libc::EINVAL,
        }
    }
}

impl DeviceBytes {
    fn map(context: &Context, location: DmLocation, length: u64) -> Result<Self, CreateError> {
        let bad = |what| CreateError::BadAnswer { what };
        let page = Mapping::page_size();
        let length = usize::try_from(length).map_err(|_| bad("the length of device memory"))?;
        let whole = length
            .checked_next_multiple_of(page)
            .filter(|whole| *whole != 0)
            .ok_or(bad("the length of device memory"))?;
        // The driver reports a device address, of which only the offset in the
        // page matters.
        let start = (location.start_offset % page as u64) as usize;
        let mapping = map_command(context, mmap::DEVICE_MEM, location.page_index, whole)?;
        let words = DeviceWords::new(mapping, start, length)
            .map_err(|_| bad("where device memory begins"))?;
        Ok(Self {
            words,
            page_index: location.page_index,
        })
    }

    /// Maps existing device memory of this context, by its handle.
    ///
    /// # Errors
    /// Those of DM_QUERY and of mapping; [`CreateError::BadAnswer`].
    pub fn of(context: &Context, dm: DmHandle) -> Result<Self, CreateError> {
        let (location, length) = ioctl::dm::query(context, dm)?;
        Self::map(context, location, length)
    }

    /// Maps the memory for an operation that stores to it perform.
    ///
    /// # Errors
    /// EOPNOTSUPP if the device does not have it; those of mapping.
    pub fn for_operation(
        &self,
        context: &Context,
        dm: DmHandle,
        operation: u8,
    ) -> Result<Self, CreateError> {
        let location = ioctl::dm::map_operation(context, dm, operation)?;
        Self::map(context, location, self.words.len() as u64)
    }

    /// Exports the memory's pages as a DMA buffer for other devices. `context` is
    /// its context. The buffer begins at a page boundary, possibly before the
    /// memory.
    ///
    /// # Errors
    /// Those of [`Dmabuf::export`].
    pub fn export<C: ContextRef>(&self, context: &C) -> Result<Dmabuf<C>, uverbs::Error> {
        let offset = file_offset(mmap::DEVICE_MEM, self.page_index);
        // SAFETY: this command only maps device memory, whose contents are untrusted.
        unsafe { Dmabuf::export(context, offset) }
    }

    pub(crate) fn words(&self) -> &DeviceWords {
        &self.words
    }

    /// Checks a range.
    fn check(&self, offset: u64, length: usize) -> Result<usize, CopyError> {
        let offset = usize::try_from(offset).map_err(|_| CopyError::Beyond)?;
        let end = offset.checked_add(length).ok_or(CopyError::Beyond)?;
        if end > self.words.len() {
            return Err(CopyError::Beyond);
        }
        Ok(offset)
    }

    /// Copies to the device.
    ///
    /// # Errors
    /// [`CopyError`]; nothing is copied then.
    ///
    /// # Safety
    /// `length` bytes at `from` are readable.
    pub unsafe fn write(
        &self,
        offset: u64,
        from: *const u8,
        length: usize,
    ) -> Result<(), CopyError> {
        let offset = self.check(offset, length)?;
        // SAFETY: as the caller says.
        let copied = unsafe { self.words.write(offset, from, length) };
        copied.then_some(()).ok_or(CopyError::NotWords)
    }

    /// Copies from the device.
    ///
    /// # Errors
    /// [`CopyError`]; nothing is copied then.
    ///
    /// # Safety
    /// `length` bytes at `to` are writable.
    pub unsafe fn read(&self, offset: u64, to: *mut u8, length: usize) -> Result<(), CopyError> {
        let offset = self.check(offset, length)?;
        // SAFETY: as the caller says.
        let copied = unsafe { self.words.read(offset, to, length) };
        copied.then_some(()).ok_or(CopyError::NotWords)
    }
}

/// Device memory.
#[derive(Debug)]
pub struct DeviceMemory<C: ContextRef> {
    /// The kernel's object.
    pub object: Dm<C>,
    /// The mapped bytes.
    pub bytes: DeviceBytes,
}

impl<C: ContextRef> DeviceMemory<C> {
    /// Allocates `length` bytes that begin at a multiple of
    /// `2^log_alignment` bytes, and maps them.
    ///
    /// # Errors
    /// EINVAL for more than the device has in all; those of DM_ALLOC and of
    /// mapping; [`CreateError::BadAnswer`].
    pub fn allocate(context: &C, length: u64, log_alignment: u32) -> Result<Self, CreateError> {
        if length > context.query_device_ex(uverbs::Udata::none())?.max_dm_size {
            return Err(CreateError::TooLarge {
                what: "length of device memory",
            });
        }
        let (object, location) = ioctl::dm::alloc(context, length, log_alignment)?;
        let bytes = DeviceBytes::map(context, location, length)?;
        Ok(Self { object, bytes })
    }
}
