//! Protection domains.

use crate::abi::ids;
use crate::abi::write::{AllocPd, AllocPdResp, cmd};
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{Command, Context, ContextRef, Error, PdHandle, Udata};

pub(crate) enum PdKind {}

impl Kind for PdKind {
    type Handle = PdHandle;
    type Events = ();
    const DESTROY: Command = Command::DeallocPd;
    fn destroy(context: &Context, handle: PdHandle) -> Result<(), Error> {
        destroy(context, handle)
    }
}

/// A protection domain: regions, queue pairs and address handles can be used
/// together only within one.
#[derive(Debug)]
pub struct Pd<C: ContextRef> {
    owned: Owned<C, PdKind>,
}

owned_methods!(Pd, PdHandle, (), "");

impl<C: ContextRef> Pd<C> {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// ENOMEM, or the driver's error at the device's limit.
    pub fn alloc(context: &C, udata: Udata<'_>) -> Result<Self, Error> {
        alloc(context, udata).map(|handle| Self::from_handle(context, handle))
    }

    /// Takes ownership of the protection domain with number `handle`.
    pub fn from_handle(context: &C, handle: PdHandle) -> Self {
        Self {
            owned: Owned::new(context, handle),
        }
    }
}

/// Allocates a protection domain.
///
/// # Errors
/// As [`Pd::alloc`].
pub fn alloc(context: &Context, udata: Udata<'_>) -> Result<PdHandle, Error> {
    let mut resp = AllocPdResp::default();
    Ioctl::write(
        Command::AllocPd,
        cmd::CMD_ALLOC_PD,
        &AllocPd::default(),
        &mut resp,
    )
    .udata(udata)
    .run(context)?;
    Ok(PdHandle(resp.pd_handle))
}

/// Destroys a protection domain.
///
/// # Errors
/// EBUSY if other objects still use it.
pub fn destroy(context: &Context, pd: PdHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(Command::DeallocPd, ids::OBJECT_PD, ids::METHOD_PD_DESTROY);
    ioctl.acts_on(pd.0);
    ioctl.handle(ids::ATTR_DESTROY_PD_HANDLE, pd.0);
    ioctl.run(context).map(drop)
}
