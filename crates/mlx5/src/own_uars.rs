//! UARs that are allocated page by page: those of thread domains and imported
//! contexts.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use ring::{BlueFlame, Mapping};
use uverbs::{Context, ContextRef, Dmabuf};

use crate::context::{CqDoorbell, WANTED_BFREGS, WANTED_EXCLUSIVE};
use crate::ioctl::{Uar, UarHandle, UarKind, UarLocation};
use crate::uar::{DoorbellRegister, REGISTERS, UAR, UarPage};
use crate::{CreateError, DeviceContext};

/// Maps an allocated page.
fn map(context: &Context, location: UarLocation) -> Result<Arc<UarPage>, CreateError> {
    let length = location.mmap_length as usize;
    // The checked register size applies to these too.
    if length < UAR || length > Mapping::page_size() {
        return Err(CreateError::BadAnswer {
            what: "the length of a page of registers",
        });
    }
    let page = UarPage::map_at(context, location.mmap_offset, location.page_id)?;
    Ok(Arc::new(page))
}

/// The one used register of an allocated page.
///
/// # Safety
/// `half` is half of the device's register size. If not `shared`, one caller at a
/// time posts through it.
unsafe fn only_register(
    page: &Arc<UarPage>,
    half: usize,
    shared: bool,
) -> Result<DoorbellRegister, CreateError> {
    // SAFETY: in the first UAR of the page, by the bounds that `map` and
    // `DeviceContext` checked, and kept with it. The caller
    // guarantees the rest.
    let make = || unsafe { BlueFlame::new(page.mapping.as_ptr().add(REGISTERS), half, shared) };
    DoorbellRegister::of(Arc::clone(page), 0, make)
}

/// The UAR of a thread domain: its register takes BlueFlame, without a lock.
///
/// It must be destroyed after its queue pairs: the kernel refuses before.
#[derive(Debug)]
pub struct ThreadUar<C: ContextRef> {
    register: DoorbellRegister,
    uar: Uar<C>,
}

impl<C: ContextRef> ThreadUar<C> {
    /// Allocates a page, of which one register is used.
    ///
    /// # Errors
    /// Those of UAR_OBJ_ALLOC and of mapping;
    /// [`CreateError::Unsupported`] of a device without BlueFlame.
    pub fn allocate(context: &C, device: &DeviceContext) -> Result<Self, CreateError> {
        if device.register_size() == 0 {
            return Err(CreateError::Unsupported {
                what: "a UAR of a thread domain on a device without BlueFlame",
            });
        }
        let uar = Uar::alloc(context, UarKind::BlueFlame)?;
        let page = map(context, uar.location())?;
        // SAFETY: a thread domain promises one caller at a time.
        let register = unsafe { only_register(&page, device.register_size() / 2, false)? };
        Ok(Self { register, uar })
    }

    pub(crate) fn qp_uar(&self) -> QpUar {
        QpUar {
            register: self.register.clone(),
            page_id: self.uar.location().page_id,
        }
    }

    /// Frees it.
    ///
    /// # Errors
    /// Those of UAR_OBJ_DESTROY; it is unchanged.
    pub fn destroy(&self) -> Result<(), uverbs::Error> {
        self.uar.destroy()
    }
}

/// A page of registers that a program uses itself.
#[derive(Debug)]
pub struct DirectUar<C: ContextRef> {
    /// Unmapped before it is freed.
    page: Arc<UarPage>,
    uar: Uar<C>,
}

impl<C: ContextRef> DirectUar<C> {
    /// Allocates and maps a page.
    ///
    /// # Errors
    /// Those of UAR_OBJ_ALLOC and of mapping.
    pub fn allocate(context: &C, kind: UarKind) -> Result<Self, CreateError> {
        let uar = Uar::alloc(context, kind)?;
        let page = map(context, uar.location())?;
        Ok(Self { page, uar })
    }

    /// Its number, and where it is mapped from.
    pub fn location(&self) -> UarLocation {
        self.uar.location()
    }

    /// The page's first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.page.mapping.as_ptr()
    }

    /// The first register.
    pub fn register(&self) -> NonNull<u8> {
        // SAFETY: in the page, which has a UAR at least.
        unsafe { self.start().add(REGISTERS) }
    }

    /// Exports the page as a DMA buffer for other devices.
    ///
    /// # Errors
    /// Those of [`Dmabuf::export`].
    pub fn export(&self) -> Result<Dmabuf<C>, uverbs::Error> {
        // SAFETY: what is mapped from there are registers of this context.
        unsafe { Dmabuf::export(self.uar.context(), self.location().mmap_offset) }
    }
}

/// A register, and the page number by which CREATE_QP names it.
pub(crate) struct QpUar {
    pub(crate) register: DoorbellRegister,
    pub(crate) page_id: u32,
}

#[derive(Debug)]
struct AllocatedUar {
    handle: UarHandle,
    location: UarLocation,
    /// Shared with the queue pairs that use it.
    page: Arc<UarPage>,
}

/// The UARs of an imported context. The driver's own UARs are used by the process
/// that opened the device, which alone knows the next BlueFlame half. So an
/// imported context allocates others.
///
/// They belong to the file, which other processes may keep open, so they are
/// freed when the context is closed.
#[derive(Debug)]
pub(crate) struct AllocatedUars {
    /// Bytes of a half; 0: doorbells only.
    half: usize,
    /// The first is for arming completion queues; then come those for one queue
    /// pair each, and shared ones. They are allocated on demand.
    pages: Mutex<Vec<AllocatedUar>>,
}

impl AllocatedUars {
    /// Allocates the first page.
    ///
    /// # Errors
    /// Those of UAR_OBJ_ALLOC and of mapping; [`CreateError::Unsupported`] if the
    /// page number does not fit into CREATE_CQ.
    pub(crate) fn new(context: &Context, register_size: usize) -> Result<Self, CreateError> {
        let first = Self::allocate(context, UarKind::Doorbells, |location| {
            u16::try_from(location.page_id)
                .map(drop)
                .map_err(|_| CreateError::Unsupported {
                    what: "a UAR page whose number does not fit into CREATE_CQ",
                })
        })?;
        Ok(Self {
            half: register_size / 2,
            pages: Mutex::new(vec![first]),
        })
    }

    fn allocate(
        context: &Context,
        kind: UarKind,
        check: impl FnOnce(UarLocation) -> Result<(), CreateError>,
    ) -> Result<AllocatedUar, CreateError> {
        // Freed on an error.
        let uar = Uar::alloc(&context, kind)?;
        let location = uar.location();
        check(location)?;
        let page = map(context, location)?;
        Ok(AllocatedUar {
            handle: uar.into_handle(),
            location,
            page,
        })
    }

    fn locked<T>(&self, what: impl FnOnce(&mut Vec<AllocatedUar>) -> T) -> T {
        what(&mut self.pages.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The register for arming completion queues.
    pub(crate) fn arm(&self) -> Result<CqDoorbell, CreateError> {
        self.locked(|pages| {
            let first = pages.first().ok_or(CreateError::NoMemory)?;
            // `new` has checked the number.
            Ok(CqDoorbell::of(
                &first.page,
                Some(first.location.page_id as u16),
            ))
        })
    }

    /// A shared register for doorbells only.
    pub(crate) fn doorbells(&self) -> Result<DoorbellRegister, CreateError> {
        self.locked(|pages| Self::give(pages.first(), 0, true).map(|given| given.register))
    }

    fn give(page: Option<&AllocatedUar>, half: usize, shared: bool) -> Result<QpUar, CreateError> {
        let own = page.ok_or(CreateError::NoMemory)?;
        // SAFETY: the size was checked when the device was opened; who shares
        // what `take` says.
        let register = unsafe { only_register(&own.page, half, shared)? };
        Ok(QpUar {
            register,
            page_id: own.location.page_id,
        })
    }

    /// Allocates a register for a queue pair: an unused one if there is any, else
    /// the one with the fewest users.
    pub(crate) fn take(&self, context: &Context) -> Result<QpUar, CreateError> {
        if self.half == 0 {
            return self.locked(|pages| Self::give(pages.first(), 0, true));
        }
        let exclusive = 1..=WANTED_EXCLUSIVE as usize;
        self.locked(|pages| {
            let users = |own: &AllocatedUar| Arc::strong_count(&own.page) - 1;
            // An unused page gets users only here, under the lock.
            let unused =
                |(at, own): &(usize, &AllocatedUar)| exclusive.contains(at) && users(own) == 0;
            if let Some((_, own)) = pages.iter().enumerate().find(unused) {
                return Self::give(Some(own), self.half, false);
            }
            if pages.len() < WANTED_BFREGS as usize && pages.try_reserve(1).is_ok() {
                if let Ok(own) = Self::allocate(context, UarKind::BlueFlame, |_| Ok(())) {
                    pages.push(own);
                    let shared = !exclusive.contains(&(pages.len() - 1));
                    return Self::give(pages.last(), self.half, shared);
                }
            }
            // None left: a shared one, or the first page's doorbell.
            let shared = pages.iter().skip(1 + WANTED_EXCLUSIVE as usize);
            match shared.min_by_key(|own| users(own)) {
                Some(own) => Self::give(Some(own), self.half, true),
                None => Self::give(pages.first(), 0, true),
            }
        })
    }

    /// Frees all pages, after the queues that use them.
    pub(crate) fn release(&self, context: &Context) {
        for own in self.locked(std::mem::take) {
            drop(Uar::from_handle(&context, own.handle, own.location));
        }
    }
}
