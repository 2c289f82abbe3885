//! The device's doorbell registers, as pages of them are mapped.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ring::{BlueFlame, Mapping};
use uverbs::Context;

use crate::CreateError;

/// Bytes of a UAR, the device's unit of registers.
pub(crate) const UAR: usize = 4096;
/// Where its two BlueFlame registers begin.
pub(crate) const REGISTERS: usize = 0x800;
/// Where completion queues are armed.
pub(crate) const ARM: usize = 0x20;

/// A mapped page of registers.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) mapping: Mapping,
    /// Made when first asked for, and kept: a register's halves are in turn
    /// whoever writes to it.
    registers: [std::sync::OnceLock<BlueFlame>; Self::MOST],
}

// SAFETY: the mapping is written to through the registers only.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    /// Registers of a page at most: 16 UARs in 64 KiB.
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

/// A register, and the page that it is in.
#[derive(Clone, Debug)]
pub(crate) struct Register {
    /// One of the page's.
    at: NonNull<BlueFlame>,
    _page: Arc<Page>,
}

// SAFETY: it leads to what any thread may use, as it may the page.
unsafe impl Send for Register {}
// SAFETY: as above.
unsafe impl Sync for Register {}

impl Register {
    /// The register at a position of a page, which `make` makes the first time.
    pub(crate) fn of(
        page: Arc<Page>,
        position: usize,
        make: impl FnOnce() -> BlueFlame,
    ) -> Result<Self, CreateError> {
        let at = page.register(position, make)?;
        Ok(Self { at, _page: page })
    }

    #[inline]
    pub(crate) fn get(&self) -> &BlueFlame {
        // SAFETY: it was made before this, and stays where it is, and as it is,
        // for as long as the page, of which this has a share.
        unsafe { self.at.as_ref() }
    }
}

#[cfg(any(test, feature = "fake"))]
pub(crate) mod testing {
    //! Registers in ordinary memory.

    use super::*;

    impl Register {
        /// In ordinary memory, which is returned.
        pub(crate) fn in_memory(half: usize) -> (Self, NonNull<u64>) {
            let mapping = Mapping::anonymous(UAR).unwrap();
            let at = mapping.as_ptr();
            let page = Arc::new(Page {
                mapping,
                registers: Default::default(),
            });
            // SAFETY: in the page, which is kept beside it.
            let make = || unsafe { BlueFlame::new(at, half, false) };
            let register = page.register(0, make).unwrap();
            let made = Self {
                at: register,
                _page: page,
            };
            (made, at.cast())
        }
    }
}
