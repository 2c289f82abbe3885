//! UARs of an mlx5 device, beyond those of the context.

use zerocopy::IntoBytes;

use crate::abi::mlx5;
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{Command, Context, ContextRef, Error, Mlx5UarHandle};

pub(crate) enum UarKind {}

impl Kind for UarKind {
    type Handle = Mlx5UarHandle;
    type Events = ();
    fn destroy(context: &Context, handle: Mlx5UarHandle) -> Result<(), Error> {
        destroy(context, handle)
    }
}

/// Location of a UAR.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mlx5UarPlace {
    /// Offset in the command descriptor from which it is mapped.
    pub mmap_offset: u64,
    /// Bytes to map.
    pub mmap_length: u32,
    /// Number that a queue pair is created with to use it.
    pub page_id: u32,
}

/// Kinds of UARs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlx5UarKind {
    /// Registers for BlueFlame, which take whole WQEs. Not every device has
    /// them.
    BlueFlame,
    /// Registers for doorbells only, mapped without write-combining.
    Doorbells,
}

/// A UAR of an mlx5 device.
#[derive(Debug)]
pub struct Mlx5Uar<C: ContextRef> {
    owned: Owned<C, UarKind>,
    place: Mlx5UarPlace,
}

owned_methods!(Mlx5Uar, Mlx5UarHandle, (), "Mappings of it stay valid.");

impl<C: ContextRef> Mlx5Uar<C> {
    /// Allocates a UAR.
    ///
    /// # Errors
    /// EPROTONOSUPPORT if the driver does not allocate UARs, EOPNOTSUPP if the
    /// device has none of this kind, ENOMEM if none is left.
    pub fn alloc(context: &C, kind: Mlx5UarKind) -> Result<Self, Error> {
        let (handle, place) = alloc(context, kind)?;
        Ok(Self::from_handle(context, handle, place))
    }

    /// Takes ownership of the UAR with number `handle`.
    pub fn from_handle(context: &C, handle: Mlx5UarHandle, place: Mlx5UarPlace) -> Self {
        Self {
            owned: Owned::new(context, handle),
            place,
        }
    }

    /// Returns its location.
    pub fn place(&self) -> Mlx5UarPlace {
        self.place
    }
}

/// Allocates a UAR.
///
/// # Errors
/// As [`Mlx5Uar::alloc`].
pub fn alloc(context: &Context, kind: Mlx5UarKind) -> Result<(Mlx5UarHandle, Mlx5UarPlace), Error> {
    let kind = match kind {
        Mlx5UarKind::BlueFlame => mlx5::UAR_TYPE_BLUE_FLAME,
        Mlx5UarKind::Doorbells => mlx5::UAR_TYPE_NON_CACHED,
    };
    let mut place = Mlx5UarPlace::default();
    let mut ioctl = Ioctl::new(Command::AllocUar, mlx5::OBJECT_UAR, mlx5::METHOD_UAR_ALLOC);
    let object = ioctl.new_object(mlx5::ATTR_ALLOC_UAR_HANDLE);
    ioctl.constant(mlx5::ATTR_ALLOC_UAR_TYPE, kind);
    let outputs = [
        ioctl.output(
            mlx5::ATTR_ALLOC_UAR_MMAP_OFFSET,
            place.mmap_offset.as_mut_bytes(),
        ),
        ioctl.output(
            mlx5::ATTR_ALLOC_UAR_MMAP_LENGTH,
            place.mmap_length.as_mut_bytes(),
        ),
        ioctl.output(mlx5::ATTR_ALLOC_UAR_PAGE_ID, place.page_id.as_mut_bytes()),
    ];
    let answer = ioctl.run(context)?;
    let owned = Owned::<&Context, UarKind>::new(&context, Mlx5UarHandle(answer.handle(object)?));
    for output in outputs {
        answer.written(output)?;
    }
    Ok((owned.forget(), place))
}

/// Frees a UAR.
///
/// # Errors
/// EBUSY while queue pairs use it.
pub fn destroy(context: &Context, uar: Mlx5UarHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(
        Command::DestroyUar,
        mlx5::OBJECT_UAR,
        mlx5::METHOD_UAR_DESTROY,
    );
    ioctl.about(uar.0);
    ioctl.handle(mlx5::ATTR_DESTROY_UAR_HANDLE, uar.0);
    ioctl.run(context).map(drop)
}
