//! Typed handle numbers, and the ownership that all handles share.

use core::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use crate::{Command, Context, ContextRef, Error};

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
    /// Handle number of a work queue.
    WqHandle;
    /// Handle number of an indirection table of work queues.
    WqTableHandle;
    /// Handle number of a flow.
    FlowHandle;
    /// Handle number of device memory.
    DmHandle;
    /// Handle number of a DMA handle.
    DmahHandle;
    /// Handle number of counters.
    CountersHandle;
}

/// A kind of kernel object.
pub trait Kind {
    /// Type of its handle numbers.
    type Handle: Copy + Into<u32> + fmt::Debug;
    /// What the kernel reports when the object is destroyed.
    type Events;
    /// The command that destroys it.
    const DESTROY: Command;
    /// Destroys the object.
    ///
    /// # Errors
    /// The kernel's; the object still exists.
    fn destroy(context: &Context, handle: Self::Handle) -> Result<Self::Events, Error>;
}

/// Whether a kernel object exists: its device uses the object's memory until then. The object
/// exists until the kernel has confirmed its destruction.
#[derive(Clone, Debug)]
pub struct Existence(Arc<AtomicBool>);

impl Existence {
    /// Returns whether the object was destroyed, or has gone with its device.
    pub fn has_ended(&self) -> bool {
        !self.0.load(Ordering::Acquire)
    }

    /// Returns whether both belong to the same object.
    pub fn is_same_object(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// States of an [`Owned`].
mod state {
    pub const EXISTS: u8 = 0;
    /// The destroy command is running.
    pub const ENDING: u8 = 1;
    pub const ENDED: u8 = 2;
}

/// A kernel object that is destroyed once: by [`destroy`](Self::destroy), or
/// when dropped.
pub struct Owned<C: ContextRef, K: Kind> {
    context: C,
    handle: K::Handle,
    state: AtomicU8,
    existence: OnceLock<Existence>,
}

impl<C: ContextRef, K: Kind> Owned<C, K> {
    /// Takes ownership of the object with number `handle`.
    pub fn new(context: &C, handle: K::Handle) -> Self {
        Self {
            context: context.clone(),
            handle,
            state: AtomicU8::new(state::EXISTS),
            existence: OnceLock::new(),
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

    /// Returns whether the object exists. Allocates when called first.
    pub fn existence(&self) -> &Existence {
        self.existence
            .get_or_init(|| Existence(Arc::new(AtomicBool::new(true))))
    }

    /// Returns whether the object was destroyed, or has gone with its device.
    pub fn has_ended(&self) -> bool {
        self.state.load(Ordering::Acquire) == state::ENDED
    }

    /// Destroys the object.
    ///
    /// # Errors
    /// The kernel's; the object is still owned, unless its device was removed.
    /// EINVAL if it is destroyed already, or another thread is destroying it.
    pub fn destroy(&self) -> Result<K::Events, Error> {
        self.state
            .compare_exchange(
                state::EXISTS,
                state::ENDING,
                Ordering::Acquire,
                Ordering::Relaxed,
            )
            .map_err(|_| Error::Invalid {
                command: K::DESTROY,
                what: "it is destroyed already",
            })?;
        let result = K::destroy(&self.context, self.handle);
        let ended = match &result {
            Ok(_) => true,
            Err(error) => error.is_device_gone() && self.context.is_gone(),
        };
        if let Some(existence) = self.existence.get().filter(|_| ended) {
            existence.0.store(false, Ordering::Release);
        }
        let state = if ended { state::ENDED } else { state::EXISTS };
        self.state.store(state, Ordering::Release);
        result
    }

    /// Releases the object without destroying it.
    pub fn forget(mut self) -> K::Handle {
        *self.state.get_mut() = state::ENDED;
        self.handle
    }
}

impl<C: ContextRef, K: Kind> Drop for Owned<C, K> {
    fn drop(&mut self) {
        if self.has_ended() {
            return;
        }
        if let Err(error) = self.destroy() {
            if self.has_ended() {
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
            /// EBUSY if other objects still use it; it is as before, and can be
            /// tried again. EIO if the device was removed, EINVAL if the object
            /// is destroyed already.
            pub fn destroy(&self) -> Result<$events, $crate::Error> {
                self.owned.destroy()
            }

            /// Returns whether the object was destroyed, or has gone with its
            /// device.
            pub fn has_ended(&self) -> bool {
                self.owned.has_ended()
            }

            /// Returns whether the object exists, for memory that its device uses.
            /// Allocates when called first.
            pub fn existence(&self) -> $crate::Existence {
                self.owned.existence().clone()
            }

            /// Releases the object without destroying it.
            pub fn into_handle(self) -> $handle {
                self.owned.forget()
            }
        }
    };
}
pub(crate) use owned_methods;
