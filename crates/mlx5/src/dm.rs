//! Memory of the device's own: allocated, mapped, and copied to and from.

use ring::{DeviceWords, Mapping};
use uverbs::{Context, ContextRef, Dm, DmHandle, Dmabuf};

use crate::CreateError;
use crate::context::{file_offset, map_command};
use crate::ioctl::{self, DmLocation};

/// `MLX5_IB_MMAP_DEVICE_MEM`.
pub(crate) const MMAP_DEVICE_MEMORY: u8 = 8;

/// The device memory's bytes as the process sees them, wherever the number of
/// the kernel's object is kept.
///
/// Any thread may use it; see [`DeviceWords`] for what a copy promises.
#[derive(Debug)]
pub struct DeviceBytes {
    words: DeviceWords,
    /// The number that they are mapped by.
    page_index: u16,
}

/// Why nothing was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyError {
    /// Beyond the memory (EFAULT).
    Beyond,
    /// Not whole words of four bytes (EINVAL).
    NotWords,
}

impl CopyError {
    /// The errno that the stock provider gives for it.
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
        // The driver tells an address of the device's, which is nothing to the
        // process but for its place in a page.
        let start = (location.start_offset % page as u64) as usize;
        let mapping = map_command(context, MMAP_DEVICE_MEMORY, location.page_index, whole)?;
        let words = DeviceWords::new(mapping, start, length)
            .map_err(|_| bad("where device memory begins"))?;
        Ok(Self {
            words,
            page_index: location.page_index,
        })
    }

    /// Memory that somebody else has allocated in this context, by its number.
    ///
    /// # Errors
    /// Those of DM_QUERY and of mapping; [`CreateError::BadAnswer`].
    pub fn of(context: &Context, dm: DmHandle) -> Result<Self, CreateError> {
        let (location, length) = ioctl::dm::query(context, dm)?;
        Self::map(context, location, length)
    }

    /// The pages that the memory lies in, as a DMA buffer for other devices;
    /// `context` is the one that it is of. It begins where a page does, the
    /// memory perhaps later.
    ///
    /// # Errors
    /// Those of [`Dmabuf::export`].
    pub fn export<C: ContextRef>(&self, context: &C) -> Result<Dmabuf<C>, uverbs::Error> {
        let offset = file_offset(MMAP_DEVICE_MEMORY, self.page_index);
        // SAFETY: what this command maps is device memory, of any context; what
        // is read of it is not believed.
        unsafe { Dmabuf::export(context, offset) }
    }

    /// What is wrong with copying so many bytes there.
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

/// Memory of the device's own.
#[derive(Debug)]
pub struct DeviceMemory<C: ContextRef> {
    /// The kernel's object.
    pub object: Dm<C>,
    /// Its bytes.
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
                what: "more device memory than there is",
            });
        }
        let (object, location) = ioctl::dm::alloc(context, length, log_alignment)?;
        let bytes = DeviceBytes::map(context, location, length)?;
        Ok(Self { object, bytes })
    }
}
