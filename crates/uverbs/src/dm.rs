//! Device memory, which programs can allocate.

use crate::abi::ids;
use crate::command::Ioctl;
use crate::driver::{DriverInput, DriverOutput};
use crate::handle::{Kind, Owned, owned_methods};
use crate::{Command, Context, ContextRef, DmHandle, Error};

pub(crate) enum DmKind {}

impl Kind for DmKind {
    type Handle = DmHandle;
    type Events = ();
    const DESTROY: Command = Command::FreeDm;
    fn destroy(context: &Context, handle: DmHandle) -> Result<(), Error> {
        destroy(context, handle)
    }
}

/// Device memory.
#[derive(Debug)]
pub struct Dm<C: ContextRef> {
    owned: Owned<C, DmKind>,
}

owned_methods!(Dm, DmHandle, (), "Mappings of it stay valid.");

impl<C: ContextRef> Dm<C> {
    /// Allocates `length` bytes, aligned to `2^log_alignment` bytes. The driver
    /// reports their location by outputs of its own; `kind` is its number of a kind of
    /// memory.
    ///
    /// # Errors
    /// EOPNOTSUPP if the device has no such memory, EINVAL for a length of 0 or
    /// an unsupported alignment, ENOMEM if none is left.
    pub fn alloc<const N: usize>(
        context: &C,
        length: u64,
        log_alignment: u32,
        kind: Option<DriverInput>,
        outputs: [DriverOutput<'_>; N],
    ) -> Result<Self, Error> {
        let mut ioctl = Ioctl::new(Command::AllocDm, ids::OBJECT_DM, ids::METHOD_DM_ALLOC);
        let object = ioctl.new_object(ids::ATTR_ALLOC_DM_HANDLE);
        ioctl.u64(ids::ATTR_ALLOC_DM_LENGTH, length);
        ioctl.u32(ids::ATTR_ALLOC_DM_ALIGNMENT, log_alignment);
        if let Some(kind) = kind {
            ioctl.constant(kind.attr_id, kind.value.into());
        }
        let outputs = outputs.map(|output| ioctl.output(output.attr_id, output.buffer));
        let answer = ioctl.run(context)?;
        let dm = Self::from_handle(context, DmHandle(answer.handle(object)?));
        answer.all_written(&outputs)?;
        Ok(dm)
    }

    /// Takes ownership of the device memory with number `handle`.
    pub fn from_handle(context: &C, handle: DmHandle) -> Self {
        Self {
            owned: Owned::new(context, handle),
        }
    }
}

/// Frees device memory.
///
/// # Errors
/// EBUSY while memory regions of it are registered.
pub fn destroy(context: &Context, dm: DmHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(Command::FreeDm, ids::OBJECT_DM, ids::METHOD_DM_FREE);
    ioctl.acts_on(dm.0);
    ioctl.handle(ids::ATTR_FREE_DM_HANDLE, dm.0);
    ioctl.run(context).map(drop)
}
