//! Typed handle numbers, and the ownership that all handles share.

use core::fmt;

use crate::{Context, ContextRef, Error};

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)+) => {$(
        $(#[$doc])*
        ///
        /// A number that the kernel assigned, valid in one context only. An
        /// invented number cannot corrupt memory: the kernel checks number and
        /// kind.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl From<$name> for u32 {
            fn from(handle: $name) -> u32 {
                handle.0
            }
        }
    )+};
}

handles! {
    /// Handle number of a protection domain.
    PdHandle;
    /// Handle number of a memory region.
    MrHandle;
    /// Handle number of a memory window.
    MwHandle;
    /// Handle number of a completion queue.
    CqHandle;
    /// Handle number of a shared receive queue.
    SrqHandle;
    /// Handle number of a queue pair.
    QpHandle;
    /// Handle number of an address handle.
    AhHandle;
    /// Handle number of an XRC domain.
    XrcdHandle;
    /// Handle number of device memory.
    DmHandle;
}

/// A kind of kernel object.
pub trait Kind {
    /// Type of its handle numbers.
    type Handle: Copy + Into<u32> + fmt::Debug;
    /// What the kernel reports when the object is destroyed.
    type Events;
    /// Destroys the object.
    ///
    /// # Errors
    /// The kernel's; the object still exists.
    fn destroy(context: &Context, handle: Self::Handle) -> Result<Self::Events, Error>;
}

/// A kernel object that is destroyed once: by [`destroy`](Self::destroy), or
/// when dropped.
pub struct Owned<C: ContextRef, K: Kind> {
    context: C,
    handle: K::Handle,
    live: bool,
}

impl<C: ContextRef, K: Kind> Owned<C, K> {
    /// Takes ownership of the object with number `handle`.
    pub fn new(context: &C, handle: K::Handle) -> Self {
        Self {
            context: context.clone(),
            handle,
            live: true,
        }
    }

    /// Returns the object's handle number in its context.
    pub fn handle(&self) -> K::Handle {
        self.handle
    }

    /// Returns the context that the object belongs to.
    pub fn context(&self) -> &C {
        &self.context
    }

    /// Destroys the object.
    ///
    /// # Errors
    /// The kernel's; the object is still owned.
    pub fn destroy(&mut self) -> Result<K::Events, Error> {
        let events = K::destroy(&self.context, self.handle)?;
        self.live = false;
        Ok(events)
    }

    /// Releases the object without destroying it.
    pub fn forget(mut self) -> K::Handle {
        self.live = false;
        self.handle
    }
}

impl<C: ContextRef, K: Kind> Drop for Owned<C, K> {
    fn drop(&mut self) {
        if !self.live {
            return;
        }
        if let Err(error) = K::destroy(&self.context, self.handle) {
            if error.is_device_gone() {
                tracing::debug!(%error, "destroyed by the kernel");
            } else {
                tracing::error!(%error, "object leaked: the kernel refused to destroy it");
            }
        }
    }
}

impl<C: ContextRef, K: Kind> fmt::Debug for Owned<C, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.handle.fmt(f)
    }
}

/// Defines the methods that every handle type has. The type needs a parameter
/// `C: ContextRef` and a field `owned`, an [`Owned`](crate::driver::Owned).
#[macro_export]
macro_rules! owned_methods {
    ($type:ident, $handle:ty, $events:ty, $events_doc:literal) => {
        impl<C: $crate::ContextRef> $type<C> {
            /// Returns the object's handle number in its context.
            pub fn handle(&self) -> $handle {
                self.owned.handle()
            }

            /// Returns the context that the object belongs to.
            pub fn context(&self) -> &C {
                self.owned.context()
            }

            #[doc = concat!("Destroys the object. ", $events_doc)]
            ///
            /// # Errors
            /// EBUSY if other objects still use it, EIO if the device was removed.
            /// The handle is returned, to be tried again or dropped.
            pub fn destroy(mut self) -> Result<$events, (Self, $crate::Error)> {
                match self.owned.destroy() {
                    Ok(events) => Ok(events),
                    Err(error) => Err((self, error)),
                }
            }

            /// Releases the object without destroying it.
            pub fn into_handle(self) -> $handle {
                self.owned.forget()
            }
        }
    };
}
pub(crate) use owned_methods;
