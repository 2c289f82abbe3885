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
    /// Doorbell registers, created on first use. Shared, since all users of one
    /// write to its two halves in turn.
    registers: [std::sync::OnceLock<BlueFlame>; Self::MOST],
}

// SAFETY: the mapping is written to through the registers only.
unsafe impl Send for UarPage {}
// SAFETY: as above.
unsafe impl Sync for UarPage {}

impl UarPage {
    /// Maximum registers of a page: two per UAR, 16 UARs in a page of 64 KiB.
    const MOST: usize = 32;

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
            registers: Default::default(),
        })
    }

    pub(crate) fn register(
        &self,
        position: usize,
        make: impl FnOnce() -> BlueFlame,
    ) -> Result<NonNull<BlueFlame>, CreateError> {
        let place = self.registers.get(position);
        let place = place.ok_or(CreateError::BadAnswer {
            what: "more UARs in a page than fit",
        })?;
        Ok(NonNull::from(place.get_or_init(make)))
    }
}

/// A doorbell register of a UAR; keeps its page mapped.
#[derive(Clone, Debug)]
pub(crate) struct DoorbellRegister {
    /// One of `page.registers`.
    at: NonNull<BlueFlame>,
    page: Arc<UarPage>,
}

// SAFETY: it points to a register that any thread may use.
unsafe impl Send for DoorbellRegister {}
// SAFETY: as above.
unsafe impl Sync for DoorbellRegister {}

impl DoorbellRegister {
    /// The register at an index of a page, created by `make` on first use.
    pub(crate) fn of(
        page: Arc<UarPage>,
        position: usize,
        make: impl FnOnce() -> BlueFlame,
    ) -> Result<Self, CreateError> {
        let at = page.register(position, make)?;
        Ok(Self { at, page })
    }

    /// The offset in the device's file at which its page is mapped.
    pub(crate) fn file_offset(&self) -> u64 {
        self.page.file_offset
    }

    #[inline]
    pub(crate) fn get(&self) -> &BlueFlame {
        // SAFETY: it is in a `OnceLock` that was set, so it neither moves nor changes
        // while `page` lives.
        unsafe { self.at.as_ref() }
    }
}

#[cfg(any(test, feature = "fake"))]
pub(crate) mod testing {
    //! UarSource in ordinary memory.

    use super::*;

    impl DoorbellRegister {
        /// Creates a register in ordinary memory, and returns both.
        pub(crate) fn in_memory(half: usize) -> (Self, NonNull<u64>) {
            let mapping = Mapping::anonymous(UAR).unwrap();
            let at = mapping.as_ptr();
            let page = Arc::new(UarPage {
                mapping,
                file_offset: 0,
                registers: Default::default(),
            });
            // SAFETY: inside the mapping, which the page owns.
            let make = || unsafe { BlueFlame::new(at, half, false) };
            let register = page.register(0, make).unwrap();
            let made = Self { at: register, page };
            (made, at.cast())
        }
    }
}
