//! UARs that the process allocates, page by page: those of thread domains, and those of
//! contexts without UARs from the driver.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::Mapping;
use uverbs::{Context, ContextRef, Dmabuf};

use crate::context::{CqDoorbell, PER_UAR, WANTED_BFREGS, WANTED_EXCLUSIVE};
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

/// The UAR of a thread domain: its register takes BlueFlame, without a lock.
///
/// It must be destroyed after its queue pairs; before, the kernel refuses.
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
        // SAFETY: in the first UAR of the page, by the bounds that `map` and
        // `DeviceContext` checked. A thread domain promises one caller at a time.
        let register =
            unsafe { DoorbellRegister::new(&page, REGISTERS, device.register_size() / 2, false) };
        Ok(Self { register, uar })
    }

    pub(crate) fn qp_uar(&self) -> QpUar {
        QpUar {
            register: self.register.clone(),
            page_id: self.uar.location().page_id,
        }
    }

    /// Frees the UAR.
    ///
    /// # Errors
    /// Those of UAR_OBJ_DESTROY; the UAR is unchanged.
    pub fn destroy(&self) -> Result<(), uverbs::Error> {
        self.uar.destroy()
    }
}

/// A page of doorbell registers that a program accesses itself.
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
        // SAFETY: the offset maps registers of this context.
        unsafe { Dmabuf::export(self.uar.context(), self.location().mmap_offset) }
    }
}

/// A register, and the page number by which CREATE_QP names it.
#[derive(Clone, Debug)]
pub(crate) struct QpUar {
    pub(crate) register: DoorbellRegister,
    pub(crate) page_id: u32,
}

/// The UARs of a context. An imported context always allocates its UARs: UARs that old
/// kernels assign belong to the process that opened the device, which alone knows the next
/// BlueFlame half.
///
/// The UARs belong to the file, which other processes may keep open, so they are freed when
/// the context is closed.
#[derive(Debug)]
pub(crate) struct AllocatedUars {
    /// Bytes of a half; 0: doorbells only.
    half: usize,
    registers: Mutex<Registers>,
}

/// Doorbell registers, allocated on demand and assigned nearly as by libmlx5.
#[derive(Debug)]
struct Registers {
    pages: Vec<(UarHandle, UarLocation)>,
    /// A register without BlueFlame.
    doorbells: QpUar,
    /// Registers for one queue pair each; the last assigned one is at the end.
    exclusive: Vec<QpUar>,
    shared: Vec<QpUar>,
}

impl AllocatedUars {
    /// Allocates the first page, which has the register for arming completion queues.
    ///
    /// # Errors
    /// Those of UAR_OBJ_ALLOC and of mapping.
    pub(crate) fn new(
        context: &Context,
        register_size: usize,
    ) -> Result<(Self, CqDoorbell), CreateError> {
        let uar = Uar::alloc(&context, UarKind::Doorbells)?;
        let location = uar.location();
        let page = map(context, location)?;
        let doorbells = QpUar {
            // SAFETY: in the page, as `map` has checked.
            register: unsafe { DoorbellRegister::new(&page, REGISTERS, 0, true) },
            page_id: location.page_id,
        };
        let registers = Registers {
            pages: vec![(uar.into_handle(), location)],
            doorbells,
            exclusive: Vec::new(),
            shared: Vec::new(),
        };
        let uars = Self {
            half: register_size / 2,
            registers: Mutex::new(registers),
        };
        Ok((uars, CqDoorbell::of(&page, Some(location.page_id))))
    }

    fn locked(&self) -> MutexGuard<'_, Registers> {
        (self.registers.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    /// A shared register for doorbells only.
    pub(crate) fn doorbells(&self) -> DoorbellRegister {
        self.locked().doorbells.register.clone()
    }

    /// The register of a new queue pair: an unused one if there is any, else the one with
    /// the fewest users.
    pub(crate) fn take(&self, context: &Context) -> QpUar {
        let mut registers = self.locked();
        if self.half == 0 {
            return registers.doorbells.clone();
        }
        // An unused register gets users only here, under the lock.
        let unused = |all: &[QpUar]| all.iter().position(|uar| uar.register.clones() == 1);
        if registers.exclusive.len() < WANTED_EXCLUSIVE as usize
            && unused(&registers.exclusive).is_none()
        {
            let new = registers.allocate(context, self.half, false);
            registers.exclusive.extend(new.into_iter().flatten());
        }
        if let Some(at) = unused(&registers.exclusive) {
            let uar = registers.exclusive.remove(at);
            registers.exclusive.push(uar.clone());
            return uar;
        }
        if registers.shared.len() < (WANTED_BFREGS - WANTED_EXCLUSIVE) as usize {
            let new = registers.allocate(context, self.half, true);
            registers.shared.extend(new.into_iter().flatten());
        }
        let fewest = (registers.shared.iter()).min_by_key(|uar| uar.register.clones());
        fewest.unwrap_or(&registers.doorbells).clone()
    }

    /// Frees all pages, after the queues that use them.
    pub(crate) fn release(&self, context: &Context) {
        let mut registers = self.locked();
        registers.exclusive.clear();
        registers.shared.clear();
        for (handle, location) in registers.pages.drain(..) {
            drop(Uar::from_handle(&context, handle, location));
        }
    }
}

impl Registers {
    /// Allocates a page, which has two registers.
    fn allocate(
        &mut self,
        context: &Context,
        half: usize,
        shared: bool,
    ) -> Result<[QpUar; PER_UAR as usize], CreateError> {
        // Dropping it on an error frees it.
        let uar = Uar::alloc(&context, UarKind::BlueFlame)?;
        let location = uar.location();
        let page = map(context, location)?;
        self.pages.push((uar.into_handle(), location));
        Ok([0, 1].map(|index| QpUar {
            // SAFETY: in the first UAR of the page, by the bounds that `map` and
            // `DeviceContext` checked. An exclusive register belongs to one queue pair at a
            // time (`take`), whose posts are serialized.
            register: unsafe {
                DoorbellRegister::new(&page, REGISTERS + index * 2 * half, half, shared)
            },
            page_id: location.page_id,
        }))
    }
}
