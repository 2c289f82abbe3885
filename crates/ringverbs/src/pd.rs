//! Protection domains.

use std::fmt;
use std::sync::Arc;

use uverbs::{Pd, PdHandle};

use crate::context::Ctx;
use crate::memory::Region;
use crate::{CloseError, Context, Error, Result};

/// A protection domain: regions, queue pairs and address handles work together
/// only within one.
///
/// A handle: clones refer to the same domain, which is given back when the
/// last clone and the last object made in it are gone. Any thread.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<Inner>,
}

struct Inner {
    /// Before the context: destroyed first.
    object: Pd<Ctx>,
    context: Context,
}

impl Context {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// ENOMEM, or the device's limit.
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
    /// The context that it lives in.
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    pub(crate) fn handle(&self) -> PdHandle {
        self.inner.object.handle()
    }

    /// What tells it from every other domain that is alive.
    #[inline(always)]
    pub(crate) fn identity(&self) -> Identity {
        Identity(Arc::as_ptr(&self.inner).addr())
    }

    /// Allocates and registers `len` bytes that the device may read, and write
    /// for operations posted here; peers may not touch them. See [`Region`].
    ///
    /// # Errors
    /// As [`Region::alloc`].
    pub fn alloc(&self, len: usize) -> Result<Region> {
        Region::alloc(self, len)
    }

    /// Gives the domain back to the kernel.
    ///
    /// # Errors
    /// [`Error::Busy`] with the domain, while objects made in it or other
    /// handles of it are alive; the kernel's reason.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let Inner { object, context } = Arc::try_unwrap(self.inner).map_err(|inner| {
            let error = Error::Busy {
                object: "protection domain",
                users: "objects made in it, or other handles of it",
            };
            CloseError::new(Self { inner }, error)
        })?;
        object.destroy().map_err(|(object, error)| {
            let inner = Arc::new(Inner { object, context });
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

/// A domain's address: equal only for handles of the same domain, as long as
/// one of them is alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity(usize);
