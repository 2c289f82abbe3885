//! Memory windows.

use crate::abi::ids;
use crate::abi::write::{AllocMw, AllocMwResp, cmd};
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::open_enum;
use crate::{Command, Context, ContextRef, Error, MwHandle, PdHandle, Udata};

open_enum! {
    /// Type of a memory window.
    MwType(u8) {
        /// Bound by a verb.
        TYPE_1 = 1,
        /// Bound by a work request.
        TYPE_2 = 2,
    }
}

pub(crate) enum MwKind {}

impl Kind for MwKind {
    type Handle = MwHandle;
    type Events = ();
    const DESTROY: Command = Command::DeallocMw;
    fn destroy(context: &Context, handle: MwHandle) -> Result<(), Error> {
        destroy(context, handle)
    }
}

/// A memory window: access rights to a part of a memory region, with a separate rkey.
#[derive(Debug)]
pub struct Mw<C: ContextRef> {
    owned: Owned<C, MwKind>,
    rkey: u32,
}

owned_methods!(Mw, MwHandle, (), "");

impl<C: ContextRef> Mw<C> {
    /// Allocates an unbound window.
    ///
    /// # Errors
    /// EINVAL for a type that the device does not support, ENOMEM.
    pub fn alloc(context: &C, pd: PdHandle, kind: MwType, udata: Udata<'_>) -> Result<Self, Error> {
        alloc(context, pd, kind, udata)
            .map(|(handle, rkey)| Self::from_handle(context, handle, rkey))
    }

    /// Takes ownership of the window with number `handle` and this key.
    pub fn from_handle(context: &C, handle: MwHandle, rkey: u32) -> Self {
        Self {
            owned: Owned::new(context, handle),
            rkey,
        }
    }

    /// Returns the rkey that it was allocated with. Binding changes the key.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }
}

/// Allocates a window; returns its handle and rkey.
///
/// # Errors
/// As [`Mw::alloc`].
pub fn alloc(
    context: &Context,
    pd: PdHandle,
    kind: MwType,
    udata: Udata<'_>,
) -> Result<(MwHandle, u32), Error> {
    let request = AllocMw {
        pd_handle: pd.0,
        mw_type: kind.0,
        ..AllocMw::default()
    };
    let mut resp = AllocMwResp::default();
    Ioctl::write(Command::AllocMw, cmd::CMD_ALLOC_MW, &request, &mut resp)
        .udata(udata)
        .run(context)?;
    Ok((MwHandle(resp.mw_handle), resp.rkey))
}

/// Destroys a window.
///
/// # Errors
/// EIO if the device was removed.
pub fn destroy(context: &Context, mw: MwHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(Command::DeallocMw, ids::OBJECT_MW, ids::METHOD_MW_DESTROY);
    ioctl.acts_on(mw.0);
    ioctl.handle(ids::ATTR_DESTROY_MW_HANDLE, mw.0);
    ioctl.run(context).map(drop)
}
