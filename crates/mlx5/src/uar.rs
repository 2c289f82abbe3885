//! Mapped pages of UARs.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ring::{BlueFlame, Mapping};
use uverbs::Context;

use crate::CreateError;

/// Bytes of a UAR.
pub(crate) const UAR: usize = 4096;
/// Offset of its two BlueFlame registers.
pub(crate) const REGISTERS: usize = 0x800;
/// Offset of the doorbell for arming completion queues.
pub(crate) const ARM: usize = 0x20;

/// A mapped page of UARs.
#[derive(Debug)]
pub(crate) struct UarPage {
    pub(crate) mapping: Mapping,
    /// The offset in the device's file at which it is mapped.
    file_offset: u64,
}

// SAFETY: the mapping is written to through the registers only.
unsafe impl Send for UarPage {}
// SAFETY: as above.
unsafe impl Sync for UarPage {}

impl UarPage {
    pub(crate) fn map(context: &Context, page: u32) -> Result<Self, CreateError> {
        // Command 0, MLX5_IB_MMAP_REGULAR_PAGE, in the bits above the index.
        let size = Mapping::page_size() as u64;
        Self::map_at(context, u64::from(page) * size, page)
    }

    /// Maps from an offset of the command descriptor; `page` is for the error.
    pub(crate) fn map_at(context: &Context, offset: u64, page: u32) -> Result<Self, CreateError> {
        let mapping = Mapping::new(context.as_fd(), offset, Mapping::page_size())
            .map_err(|error| CreateError::Map { page, error })?;
        Ok(Self {
            mapping,
            file_offset: offset,
        })
    }
}

/// A doorbell register of a UAR; keeps its page mapped. Clones are the same register:
/// all its users write to its two halves in turn.
#[derive(Clone, Debug)]
pub(crate) struct DoorbellRegister {
    /// The address of `register.blue_flame`: saves an instruction of a doorbell.
    at: NonNull<BlueFlame>,
    register: Arc<Register>,
}

// SAFETY: any thread may use the register.
unsafe impl Send for DoorbellRegister {}
// SAFETY: as above.
unsafe impl Sync for DoorbellRegister {}

#[derive(Debug)]
struct Register {
    blue_flame: BlueFlame,
    page: Arc<UarPage>,
}

impl DoorbellRegister {
    /// The register at a byte of a page.
    ///
    /// # Safety
    /// As of [`BlueFlame::new`], while the page is mapped.
    pub(crate) unsafe fn new(page: &Arc<UarPage>, at: usize, half: usize, shared: bool) -> Self {
        let register = Arc::new(Register {
            // SAFETY: guaranteed by the caller; the page is kept beside it.
            blue_flame: unsafe { BlueFlame::new(page.mapping.as_ptr().add(at), half, shared) },
            page: Arc::clone(page),
        });
        Self {
            at: NonNull::from(&register.blue_flame),
            register,
        }
    }

    /// The offset in the device's file at which its page is mapped.
    pub(crate) fn file_offset(&self) -> u64 {
        self.register.page.file_offset
    }

    /// The number of clones. Accesses by dropped clones happen before the return.
    pub(crate) fn clones(&self) -> usize {
        let count = Arc::strong_count(&self.register);
        ring::order::after_last_user();
        count
    }

    #[inline]
    pub(crate) fn get(&self) -> &BlueFlame {
        // SAFETY: `register` keeps it alive.
        unsafe { self.at.as_ref() }
    }
}

#[cfg(any(test, feature = "fake"))]
pub(crate) mod testing {
    //! Registers in ordinary memory.

    use super::*;

    impl DoorbellRegister {
        /// Creates a register in ordinary memory, and returns both.
        pub(crate) fn in_memory(half: usize) -> (Self, NonNull<u64>) {
            let page = Arc::new(UarPage {
                mapping: Mapping::anonymous(UAR).unwrap(),
                file_offset: 0,
            });
            // SAFETY: inside the mapping.
            let register = unsafe { Self::new(&page, 0, half, false) };
            (register, page.mapping.as_ptr().cast())
        }
    }
}
