//! Address handles.

use std::fmt;
use std::sync::Arc;

use uverbs::AhAttr;

use crate::device;
use crate::pd::Identity;
use crate::qp::{LocalAddress, PortAddress};
use crate::query::Gid;
use crate::{CloseError, Error, ProtectionDomain, Result};

/// The path of datagrams to a peer (`ibv_ah`).
///
/// A handle: clones refer to the same path. Operations in flight keep it alive.
#[derive(Clone)]
pub struct AddressHandle {
    inner: Arc<Inner>,
}

struct Inner {
    /// Declared before the domain, so that it is destroyed first.
    handle: device::AddressHandle,
    domain: ProtectionDomain,
    path: AhAttr,
}

impl ProtectionDomain {
    /// Creates an address handle for a path.
    ///
    /// # Errors
    /// EINVAL for a port or source GID index that does not exist.
    pub fn address_handle(&self, path: &AhAttr) -> Result<AddressHandle> {
        let context = self.context();
        let handle = (context.provider()).address_handle(context.uverbs(), self.handle(), path)?;
        Ok(AddressHandle {
            inner: Arc::new(Inner {
                handle,
                domain: self.clone(),
                path: *path,
            }),
        })
    }

    /// Creates an address handle for the path from a local address to a peer's
    /// port.
    ///
    /// # Errors
    /// As [`ProtectionDomain::address_handle`]; [`Error::Invalid`] if the local port
    /// has a LID (InfiniBand, where switches route by LID) and the peer has none.
    pub fn address_handle_to(
        &self,
        local: &LocalAddress,
        peer: impl Into<PortAddress>,
    ) -> Result<AddressHandle> {
        let PortAddress { gid, lid } = peer.into();
        if local.lid != 0 && lid == 0 {
            return Err(Error::Invalid {
                what: "on InfiniBand a path needs the peer's LID, which a GID does not contain: \
                       pass an Endpoint, or use a completion's reply_address",
            });
        }
        self.address_handle(&local.path_to(gid, lid))
    }
}

impl AddressHandle {
    /// Returns the path.
    pub fn path(&self) -> &AhAttr {
        &self.inner.path
    }

    /// Returns the address that datagrams carry.
    #[inline]
    pub(crate) fn address(&self) -> &device::Address {
        &self.inner.handle.address
    }

    #[inline]
    pub(crate) fn identity(&self) -> Identity {
        self.inner.domain.identity()
    }

    /// Destroys the address handle.
    ///
    /// # Errors
    /// Returns it with [`Error::Busy`] while clones or operations in flight use
    /// it, or with the kernel's error.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let inner = Arc::try_unwrap(self.inner).map_err(|inner| {
            let error = Error::Busy {
                object: "address handle",
                users: "clones of it, or operations in flight",
            };
            CloseError::new(Self { inner }, error)
        })?;
        inner.handle.destroy().map_err(|error| {
            let inner = Arc::new(inner);
            CloseError::new(Self { inner }, error)
        })
    }
}

impl fmt::Debug for AddressHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AddressHandle")
            .field(&Gid(self.inner.path.grh.dgid))
            .finish()
    }
}
