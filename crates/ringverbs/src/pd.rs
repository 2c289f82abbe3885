//! Protection domains.

use std::fmt;
use std::sync::Arc;

use uverbs::{Pd, PdHandle};

use crate::context::Ctx;
use crate::memory::Region;
use crate::{CloseError, Context, Error, Result};

/// A protection domain (`ibv_pd`). Regions, queue pairs and address handles can be used
/// together only if they belong to the same domain.
///
/// A handle: clones refer to the same domain, which is deallocated when the last
/// clone and the last object created in it are dropped. Any thread may use it.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<Inner>,
}

struct Inner {
    /// Declared before the context, so that it is destroyed first.
    object: Pd<Ctx>,
    context: Context,
}

impl Context {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// ENOMEM, or the device's limit is reached.
    pub fn alloc_pd(&self) -> Result<ProtectionDomain> {
        let handle = self.provider().alloc_pd(self.uverbs())?;
        let object = Pd::from_handle(self.uverbs(), handle);
        Ok(ProtectionDomain {
            inner: Arc::new(Inner {
                object,
                context: self.clone(),
            }),
        })
    }
}

impl ProtectionDomain {
    /// Returns the context of the domain.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(crate) fn handle(&self) -> PdHandle {
        self.inner.object.handle()
    }

    /// Returns a value that differs from that of every other live domain.
    #[inline]
    pub(crate) fn identity(&self) -> Identity {
        Identity(Arc::as_ptr(&self.inner).addr())
    }

    /// Allocates and registers `len` bytes for operations of this process; peers have no
    /// access. See [`Region`].
    ///
    /// # Errors
    /// As [`Region::alloc`].
    pub fn alloc(&self, len: usize) -> Result<Region> {
        Region::alloc(self, len)
    }

    /// Deallocates the domain.
    ///
    /// # Errors
    /// Returns the domain with [`Error::Busy`] while objects created in it or
    /// other handles of it exist, or with the kernel's error.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let inner = Arc::try_unwrap(self.inner).map_err(|inner| {
            let error = Error::Busy {
                object: "protection domain",
                users: "objects made in it, or other handles of it",
            };
            CloseError::new(Self { inner }, error)
        })?;
        inner.object.destroy().map_err(|error| {
            let inner = Arc::new(inner);
            CloseError::new(Self { inner }, error)
        })
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ProtectionDomain")
            .field(&self.inner.object.handle().0)
            .finish()
    }
}

/// The address of a domain's shared state, which identifies the domain while a handle of it
/// is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity(usize);
