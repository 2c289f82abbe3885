//! XRC domains.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::abi::ids;
use crate::abi::write::{self, OpenXrcdResp, cmd};
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{Command, Context, ContextRef, Error, Udata, XrcdHandle};

/// Parameters for opening an XRC domain.
#[derive(Clone, Copy, Debug, Default)]
pub struct XrcdOpen<'a> {
    /// File whose inode identifies the domain across processes; `None`:
    /// private.
    pub fd: Option<BorrowedFd<'a>>,
    /// `O_CREAT`, `O_EXCL` as for a file. A private domain needs `O_CREAT`.
    pub oflags: i32,
}

pub(crate) enum XrcdKind {}

impl Kind for XrcdKind {
    type Handle = XrcdHandle;
    type Events = ();
    const DESTROY: Command = Command::CloseXrcd;
    fn destroy(context: &Context, handle: XrcdHandle) -> Result<(), Error> {
        destroy(context, handle)
    }
}

/// An XRC domain, shared by XRC targets and their shared receive queues.
#[derive(Debug)]
pub struct Xrcd<C: ContextRef> {
    owned: Owned<C, XrcdKind>,
}

owned_methods!(Xrcd, XrcdHandle, (), "");

impl<C: ContextRef> Xrcd<C> {
    /// Opens or creates an XRC domain.
    ///
    /// # Errors
    /// EOPNOTSUPP if the device does not support XRC, EAGAIN if the inode has
    /// no domain and `O_CREAT` is not set.
    pub fn open(context: &C, init: &XrcdOpen<'_>, udata: Udata<'_>) -> Result<Self, Error> {
        open(context, init, udata).map(|handle| Self::from_handle(context, handle))
    }

    /// Takes ownership of the XRC domain with number `handle`.
    pub fn from_handle(context: &C, handle: XrcdHandle) -> Self {
        Self {
            owned: Owned::new(context, handle),
        }
    }
}

/// Opens or creates an XRC domain.
///
/// # Errors
/// As [`Xrcd::open`].
pub fn open(context: &Context, init: &XrcdOpen<'_>, udata: Udata<'_>) -> Result<XrcdHandle, Error> {
    let request = write::OpenXrcd {
        response: 0,
        fd: init.fd.map_or(-1, |fd| fd.as_raw_fd()) as u32,
        oflags: init.oflags as u32,
    };
    let mut resp = OpenXrcdResp::default();
    Ioctl::write(Command::OpenXrcd, cmd::CMD_OPEN_XRCD, &request, &mut resp)
        .udata(udata)
        .run(context)?;
    Ok(XrcdHandle(resp.xrcd_handle))
}

/// Closes an XRC domain.
///
/// # Errors
/// EBUSY if queues still use it.
pub fn destroy(context: &Context, xrcd: XrcdHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(
        Command::CloseXrcd,
        ids::OBJECT_XRCD,
        ids::METHOD_XRCD_DESTROY,
    );
    ioctl.acts_on(xrcd.0);
    ioctl.handle(ids::ATTR_DESTROY_XRCD_HANDLE, xrcd.0);
    ioctl.run(context).map(drop)
}
