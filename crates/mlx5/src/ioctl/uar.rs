//! UARs beyond those of the context.

use uverbs::driver::{Ioctl, Kind, Owned};
use uverbs::{Context, ContextRef, Error};
use zerocopy::IntoBytes;

use super::ids;

methods! {
    UAR_OBJ_ALLOC: "UAR", ids::OBJECT_UAR, ids::METHOD_UAR_ALLOC;
    UAR_OBJ_DESTROY: "UAR", ids::OBJECT_UAR, ids::METHOD_UAR_DESTROY;
}

kinds! {
    UarObject UarHandle, "a UAR", UAR_OBJ_DESTROY;
}

/// Location of a UAR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UarLocation {
    /// Offset in the command descriptor from which it is mapped.
    pub mmap_offset: u64,
    /// Bytes to map.
    pub mmap_length: u32,
    /// Number that a queue pair is created with to use it.
    pub page_id: u32,
}

/// Kinds of UARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UarKind {
    /// Registers for BlueFlame, which take whole WQEs. Not every device has
    /// them.
    BlueFlame,
    /// Registers for doorbells only, mapped without write-combining.
    Doorbells,
}

/// A UAR of an mlx5 device.
#[derive(Debug)]
pub struct Uar<C: ContextRef> {
    owned: Owned<C, UarObject>,
    location: UarLocation,
}

uverbs::owned_methods!(Uar, UarHandle, (), "Mappings of it stay valid.");

impl<C: ContextRef> Uar<C> {
    /// Allocates a UAR.
    ///
    /// # Errors
    /// EPROTONOSUPPORT if the driver does not allocate UARs, EOPNOTSUPP if the
    /// device has none of this kind, ENOMEM if none is left.
    pub fn alloc(context: &C, kind: UarKind) -> Result<Self, Error> {
        let (handle, location) = alloc(context, kind)?;
        Ok(Self::from_handle(context, handle, location))
    }

    /// Takes ownership of the UAR with number `handle`.
    pub fn from_handle(context: &C, handle: UarHandle, location: UarLocation) -> Self {
        Self {
            owned: Owned::new(context, handle),
            location,
        }
    }

    /// Returns its location.
    pub fn location(&self) -> UarLocation {
        self.location
    }
}

/// Allocates a UAR.
///
/// # Errors
/// As [`Uar::alloc`].
pub fn alloc(context: &Context, kind: UarKind) -> Result<(UarHandle, UarLocation), Error> {
    let kind = match kind {
        UarKind::BlueFlame => ids::UAR_TYPE_BLUE_FLAME,
        UarKind::Doorbells => ids::UAR_TYPE_NON_CACHED,
    };
    let mut location = UarLocation::default();
    // SAFETY: the only input is a number of an enumeration.
    let mut ioctl = unsafe { Ioctl::driver(&UAR_OBJ_ALLOC) };
    let object = ioctl.new_object(ids::ATTR_ALLOC_UAR_HANDLE);
    ioctl.constant(ids::ATTR_ALLOC_UAR_TYPE, kind);
    let outputs = [
        ioctl.output(
            ids::ATTR_ALLOC_UAR_MMAP_OFFSET,
            location.mmap_offset.as_mut_bytes(),
        ),
        ioctl.output(
            ids::ATTR_ALLOC_UAR_MMAP_LENGTH,
            location.mmap_length.as_mut_bytes(),
        ),
        ioctl.output(ids::ATTR_ALLOC_UAR_PAGE_ID, location.page_id.as_mut_bytes()),
    ];
    let answer = ioctl.run(context)?;
    let owned = Owned::<&Context, UarObject>::new(&context, UarHandle(answer.handle(object)?));
    answer.all_written(&outputs)?;
    Ok((owned.forget(), location))
}

/// Frees a UAR.
///
/// # Errors
/// EBUSY while queue pairs use it.
pub fn destroy(context: &Context, uar: UarHandle) -> Result<(), Error> {
    UarObject::destroy(context, uar)
}
