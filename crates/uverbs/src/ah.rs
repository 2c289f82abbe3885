//! Address handles.

use crate::abi::ids;
use crate::abi::write::{CreateAh, CreateAhResp, cmd};
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{AhAttr, AhHandle, Command, Context, ContextRef, Error, PdHandle, Udata};

pub(crate) enum AhKind {}

impl Kind for AhKind {
    type Handle = AhHandle;
    type Events = ();
    const DESTROY: Command = Command::DestroyAh;
    fn destroy(context: &Context, handle: AhHandle) -> Result<(), Error> {
        destroy(context, handle)
    }
}

/// An address handle: a path to a peer, for datagrams.
#[derive(Debug)]
pub struct Ah<C: ContextRef> {
    owned: Owned<C, AhKind>,
}

owned_methods!(Ah, AhHandle, (), "");

impl<C: ContextRef> Ah<C> {
    /// Creates an address handle.
    ///
    /// # Errors
    /// EINVAL if the port or the source GID index does not exist.
    pub fn create(
        context: &C,
        pd: PdHandle,
        attr: &AhAttr,
        user_handle: u64,
        udata: Udata<'_>,
    ) -> Result<Self, Error> {
        create(context, pd, attr, user_handle, udata)
            .map(|handle| Self::from_handle(context, handle))
    }

    /// Takes ownership of the address handle with number `handle`.
    pub fn from_handle(context: &C, handle: AhHandle) -> Self {
        Self {
            owned: Owned::new(context, handle),
        }
    }
}

/// Creates an address handle.
///
/// # Errors
/// As [`Ah::create`].
pub fn create(
    context: &Context,
    pd: PdHandle,
    attr: &AhAttr,
    user_handle: u64,
    udata: Udata<'_>,
) -> Result<AhHandle, Error> {
    let request = CreateAh {
        response: 0,
        user_handle,
        pd_handle: pd.0,
        reserved: 0,
        attr: attr.to_kernel(),
    };
    let mut resp = CreateAhResp::default();
    Ioctl::write(Command::CreateAh, cmd::CMD_CREATE_AH, &request, &mut resp)
        .udata(udata)
        .run(context)?;
    Ok(AhHandle(resp.ah_handle))
}

/// Destroys an address handle.
///
/// # Errors
/// EIO if the device was removed.
pub fn destroy(context: &Context, ah: AhHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(Command::DestroyAh, ids::OBJECT_AH, ids::METHOD_AH_DESTROY);
    ioctl.acts_on(ah.0);
    ioctl.handle(ids::ATTR_DESTROY_AH_HANDLE, ah.0);
    ioctl.run(context).map(drop)
}
