//! Device memory of mlx5 devices, which programs can allocate and map.

use zerocopy::IntoBytes;

use crate::abi::{ids, mlx5};
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{Command, Context, ContextRef, DmHandle, Error};

pub(crate) enum DmKind {}

impl Kind for DmKind {
    type Handle = DmHandle;
    type Events = ();
    fn destroy(context: &Context, handle: DmHandle) -> Result<(), Error> {
        destroy(context, handle)
    }
}

/// Location of device memory, as the driver reports it: untrusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mlx5DmPlace {
    /// Start address; only the offset within its page is meaningful.
    pub start_offset: u64,
    /// Page index that its mmap offset contains.
    pub page_index: u16,
}

/// Device memory of an mlx5 device.
#[derive(Debug)]
pub struct Mlx5Dm<C: ContextRef> {
    owned: Owned<C, DmKind>,
    place: Mlx5DmPlace,
}

owned_methods!(Mlx5Dm, DmHandle, (), "Mappings of it stay valid.");

impl<C: ContextRef> Mlx5Dm<C> {
    /// Allocates `length` bytes, aligned to `2^log_alignment` bytes.
    ///
    /// # Errors
    /// EOPNOTSUPP if the device has no such memory, EINVAL for a length of 0 or
    /// an unsupported alignment, ENOMEM if none is left.
    pub fn alloc(context: &C, length: u64, log_alignment: u32) -> Result<Self, Error> {
        let mut place = Mlx5DmPlace::default();
        let mut ioctl = Ioctl::new(Command::AllocDm, ids::OBJECT_DM, ids::METHOD_DM_ALLOC);
        let object = ioctl.new_object(ids::ATTR_ALLOC_DM_HANDLE);
        ioctl.u64(ids::ATTR_ALLOC_DM_LENGTH, length);
        ioctl.u32(ids::ATTR_ALLOC_DM_ALIGNMENT, log_alignment);
        let outputs = [
            ioctl.output(
                mlx5::ATTR_ALLOC_DM_START_OFFSET,
                place.start_offset.as_mut_bytes(),
            ),
            ioctl.output(
                mlx5::ATTR_ALLOC_DM_PAGE_INDEX,
                place.page_index.as_mut_bytes(),
            ),
        ];
        let answer = ioctl.run(context)?;
        let owned = Owned::new(context, DmHandle(answer.handle(object)?));
        for output in outputs {
            answer.written(output)?;
        }
        Ok(Self { owned, place })
    }

    /// Returns its location.
    pub fn place(&self) -> Mlx5DmPlace {
        self.place
    }
}

/// Queries the location of device memory and its length in bytes.
///
/// # Errors
/// ENOENT if the handle does not exist; EPROTONOSUPPORT if the kernel does not
/// support the query (before Linux 5.13).
pub fn query(context: &Context, dm: DmHandle) -> Result<(Mlx5DmPlace, u64), Error> {
    let (mut place, mut length) = (Mlx5DmPlace::default(), 0u64);
    let mut ioctl = Ioctl::new(Command::QueryDm, ids::OBJECT_DM, mlx5::METHOD_DM_QUERY);
    ioctl.about(dm.0);
    ioctl.handle(mlx5::ATTR_QUERY_DM_HANDLE, dm.0);
    let outputs = [
        ioctl.output(
            mlx5::ATTR_QUERY_DM_START_OFFSET,
            place.start_offset.as_mut_bytes(),
        ),
        ioctl.output(
            mlx5::ATTR_QUERY_DM_PAGE_INDEX,
            place.page_index.as_mut_bytes(),
        ),
        ioctl.output(mlx5::ATTR_QUERY_DM_LENGTH, length.as_mut_bytes()),
    ];
    let answer = ioctl.run(context)?;
    for output in outputs {
        answer.written(output)?;
    }
    Ok((place, length))
}

/// Frees device memory.
///
/// # Errors
/// EBUSY while memory regions of it are registered.
pub fn destroy(context: &Context, dm: DmHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(Command::FreeDm, ids::OBJECT_DM, ids::METHOD_DM_FREE);
    ioctl.about(dm.0);
    ioctl.handle(ids::ATTR_FREE_DM_HANDLE, dm.0);
    ioctl.run(context).map(drop)
}
