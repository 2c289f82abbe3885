//! Memory windows.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ring::Hint;
use uverbs::{Mw, MwType, Udata};

use crate::context::Ctx;
use crate::device::WindowBinding;
use crate::memory::{MemorySlice, Registered};
use crate::operation::Operation;
use crate::pd::Identity;
use crate::{AccessFlags, CloseError, Error, ProtectionDomain, Result};

/// What kind of window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowType {
    /// Belongs to a protection domain.
    One,
    /// Belongs to the queue pair that it was bound on, and can be invalidated
    /// by a work request, the peer's too.
    Two,
}

/// A key of its own for a part of a [`RemoteRegion`](crate::RemoteRegion) made
/// with `MW_BIND`: given to a peer, and taken back without touching the region.
///
/// [`WorkRequest::bind`](crate::WorkRequest::bind) binds it. It keeps the region
/// that it is bound to; one that it was bound to before, until the completion of
/// a later bind has been read.
///
/// A handle: clones refer to the same window.
#[derive(Clone)]
pub struct MemoryWindow {
    inner: Arc<Inner>,
}

/// A region, or nothing.
type Bound = Option<Arc<Registered>>;

fn same(one: &Bound, other: &Bound) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (one, other) => one.is_none() && other.is_none(),
    }
}

struct Inner {
    /// None only on the way out.
    object: Option<Mw<Ctx>>,
    rkey: Hint,
    /// What it was bound to by the last bind that is known to be done, and by
    /// those posted since, in order.
    bound: Mutex<Vec<Bound>>,
    kind: WindowType,
    domain: ProtectionDomain,
}

impl ProtectionDomain {
    /// A memory window, bound to nothing.
    ///
    /// # Errors
    /// EINVAL for a type that the device lacks; ENOMEM.
    pub fn memory_window(&self, kind: WindowType) -> Result<MemoryWindow> {
        let number = match kind {
            WindowType::One => MwType::TYPE_1,
            WindowType::Two => MwType::TYPE_2,
        };
        if !self.context().provider().has(Operation::BindWindow) {
            return Err(Error::Unsupported {
                what: "memory windows",
            });
        }
        let object = Mw::alloc(
            self.context().uverbs(),
            self.handle(),
            number,
            Udata::none(),
        )?;
        Ok(MemoryWindow {
            inner: Arc::new(Inner {
                rkey: Hint::new(object.rkey()),
                object: Some(object),
                bound: Mutex::new(Vec::new()),
                kind,
                domain: self.clone(),
            }),
        })
    }
}

impl MemoryWindow {
    /// Its type.
    pub fn kind(&self) -> WindowType {
        self.inner.kind
    }

    /// The key that it was given with the last bind that was posted. Once the
    /// completion of a bind that has failed, or was flushed, has been read, the
    /// key that it had before. What became of binds in flight on a queue pair
    /// that was destroyed nobody knows: if the next bind fails, the window has to
    /// be made anew.
    pub fn rkey(&self) -> u32 {
        self.inner.rkey.get()
    }

    /// The key that the next bind gives it: the low 8 bits are the owner's to
    /// count.
    fn next_rkey(&self) -> u32 {
        let rkey = self.rkey();
        rkey & !0xff | rkey.wrapping_add(1) & 0xff
    }

    /// A bind was not posted after all, or has failed: the kernel has counted one
    /// less. Those that were posted behind it fail too, and are counted so each.
    pub(crate) fn not_bound(&self) {
        let rkey = self.rkey();
        self.inner
            .rkey
            .set(rkey & !0xff | rkey.wrapping_sub(1) & 0xff);
    }

    /// What the next bind says, to `slice` or to nothing.
    #[cold]
    pub(crate) fn next_bind(
        &self,
        slice: Option<&MemorySlice>,
        access: AccessFlags,
    ) -> WindowBinding {
        let mark = self.inner.domain.context().provider().mark(self.inner.kind);
        WindowBinding {
            addr: slice.map_or(0, MemorySlice::device_addr),
            length: slice.map_or(0, |slice| slice.len() as u64),
            mr_lkey: slice.map_or(0, |slice| slice.memory().lkey()),
            mw_rkey: self.rkey(),
            rkey: self.next_rkey(),
            access: access.bits() | mark,
        }
    }

    /// Whether the device's windows are long enough for `slice`.
    pub(crate) fn check(&self, slice: Option<&MemorySlice>) -> Result<()> {
        let asked = slice.map_or(0, |slice| slice.len() as u64);
        let allowed = self.inner.domain.context().provider().longest_window();
        if asked > allowed {
            return Err(Error::Limit {
                what: "bytes of a memory window",
                asked,
                allowed,
            });
        }
        Ok(())
    }

    /// That bind is being posted.
    pub(crate) fn binding(&self, slice: Option<&MemorySlice>) {
        self.inner.rkey.set(self.next_rkey());
        let memory = slice.map(MemorySlice::memory).cloned();
        let mut bound = self.bound();
        if bound.last().is_none_or(|last| !same(last, &memory)) {
            bound.push(memory);
        }
    }

    /// That bind is done: what the window was bound to before is let go of, and
    /// what binds posted behind it name is kept.
    pub(crate) fn is_bound(&self, slice: Option<&MemorySlice>) {
        let memory = slice.map(MemorySlice::memory).cloned();
        let mut bound = self.bound();
        let at = bound.iter().position(|there| same(there, &memory));
        let before: Vec<_> = bound.drain(..at.unwrap_or(0)).collect();
        // Not under the lock: it may be the last of a region.
        drop(bound);
        drop(before);
    }

    fn bound(&self) -> MutexGuard<'_, Vec<Bound>> {
        let bound = self.inner.bound.lock();
        bound.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn identity(&self) -> Identity {
        self.inner.domain.identity()
    }

    /// Takes the key back and frees the window.
    ///
    /// # Errors
    /// [`Error::Busy`] with the window, while clones or operations in flight use
    /// it; the kernel's reason.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let inner = Arc::try_unwrap(self.inner).map_err(|inner| {
            let error = Error::Busy {
                object: "memory window",
                users: "clones of it, or operations in flight",
            };
            CloseError::new(Self { inner }, error)
        })?;
        let mut inner = inner;
        match inner.revoke() {
            Ok(()) => Ok(()),
            Err(error) => {
                let inner = Arc::new(inner);
                Err(CloseError::new(Self { inner }, error))
            }
        }
    }
}

impl Inner {
    /// Takes the key back. Peers reach nothing by it any more.
    fn revoke(&mut self) -> Result<(), uverbs::Error> {
        let Some(object) = self.object.take() else {
            return Ok(());
        };
        object.destroy().map_err(|(object, error)| {
            self.object = Some(object);
            error
        })
    }
}

impl Drop for Inner {
    /// Before what it is bound to: the kernel refuses to deregister a region
    /// that a window is bound to, or, with a ConnectX, leaves a window with the
    /// number of a key that may become another region's.
    fn drop(&mut self) {
        let Err(error) = self.revoke() else { return };
        if let Some(object) = self.object.take() {
            object.into_handle();
        }
        if !self.domain.context().is_gone_by(&error) {
            tracing::error!(%error, "memory window leaked, with what it is bound to");
            let bound = self.bound.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::forget(std::mem::take(bound));
        }
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow")
            .field("kind", &self.inner.kind)
            .field("rkey", &format_args!("{:#x}", self.rkey()))
            .finish()
    }
}
