//! Memory windows.

use std::fmt;
use std::mem::{self, ManuallyDrop};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uverbs::{Bind as BindOperands, Mw, MwType, Udata};

use crate::context::Ctx;
use crate::memory::{MemorySlice, Registered};
use crate::operation::Operation;
use crate::pd::Identity;
use crate::{AccessFlags, CloseError, Error, ProtectionDomain, Result};

/// The type of a memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowType {
    /// Type 1: belongs to a protection domain.
    One,
    /// Type 2: belongs to the queue pair that it was bound on, and can be
    /// invalidated by a work request, also one of the peer.
    Two,
}

impl From<WindowType> for MwType {
    fn from(kind: WindowType) -> Self {
        match kind {
            WindowType::One => Self::TYPE_1,
            WindowType::Two => Self::TYPE_2,
        }
    }
}

/// A memory window: a separate rkey for a part of a
/// [`RemoteRegion`](crate::RemoteRegion) that has `MW_BIND`. The key can be given
/// to a peer and revoked without affecting the region.
///
/// [`WorkRequest::bind`](crate::WorkRequest::bind) binds it. The window keeps alive
/// every region that it may be bound to, and releases a region when the successful
/// completion of a later bind was read; an unsignalled bind has no such completion.
///
/// Several binds may be in flight on one queue pair, where they complete in order.
/// Queue pairs are not ordered with each other, so a bind is refused while a bind of the
/// window is in flight on another queue pair; an unsignalled bind is in flight until a
/// later completion of its queue was read.
///
/// A handle: clones refer to the same window. Any thread may use it.
#[derive(Clone)]
pub struct MemoryWindow {
    inner: Arc<Inner>,
}

struct Inner {
    object: Mw<Ctx>,
    state: Mutex<WindowState>,
    kind: WindowType,
    domain: ProtectionDomain,
}

/// The known state of the window in the device.
struct WindowState {
    /// The key after the last posted bind.
    rkey: u32,
    /// Number of binds in flight. Each bind keeps its own region alive.
    in_flight: u32,
    /// The queue pair on which they were posted.
    queue_pair: u64,
    /// Regions that the window may be bound to: the region of the last successful bind, and
    /// the regions of all later binds that ended without success.
    bound: Vec<Arc<Registered>>,
    /// Regions of binds posted by the raw layer, whose completions are unknown here.
    raw: Vec<Arc<Registered>>,
}

/// Returns the key after the next bind, or before the last bind. Each bind increments the
/// low 8 bits, the consumer-owned variant.
fn variant(rkey: u32, step: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(step) & 0xff
}

const NEXT: u32 = 1;
const PREVIOUS: u32 = 0xff;

/// Access flags that a window may have.
const ACCESS: AccessFlags = AccessFlags::REMOTE_READ
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::ZERO_BASED)
    .union(AccessFlags::FLUSH_GLOBAL)
    .union(AccessFlags::FLUSH_PERSISTENT);

/// Access flags that change memory, for which the region needs `LOCAL_WRITE`.
const WRITES: AccessFlags = AccessFlags::REMOTE_WRITE.union(AccessFlags::REMOTE_ATOMIC);

impl ProtectionDomain {
    /// Allocates a memory window, which is not bound.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the device has no memory windows; EINVAL for a
    /// type that it lacks; ENOMEM.
    pub fn memory_window(&self, kind: WindowType) -> Result<MemoryWindow> {
        if !self.context().provider().has(Operation::BindWindow) {
            return Err(Error::Unsupported {
                what: "memory windows",
            });
        }
        let object = Mw::alloc(
            self.context().uverbs(),
            self.handle(),
            kind.into(),
            Udata::none(),
        )?;
        Ok(MemoryWindow {
            inner: Arc::new(Inner {
                state: Mutex::new(WindowState {
                    rkey: object.rkey(),
                    in_flight: 0,
                    queue_pair: 0,
                    bound: Vec::new(),
                    raw: Vec::new(),
                }),
                object,
                kind,
                domain: self.clone(),
            }),
        })
    }
}

impl MemoryWindow {
    /// Returns the type of the window.
    pub fn kind(&self) -> WindowType {
        self.inner.kind
    }

    /// Returns the key after the last posted bind. Once the completion of a failed or
    /// flushed bind was read, this is the key before that bind.
    ///
    /// The outcome of binds that were in flight when their queue pair was destroyed is
    /// unknown: if the next bind fails, allocate a new window.
    pub fn rkey(&self) -> u32 {
        self.state().rkey
    }

    fn state(&self) -> MutexGuard<'_, WindowState> {
        let state = self.inner.state.lock();
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Validates a bind as IBA 10.6.7.2 requires; not every device does.
    pub(crate) fn check(&self, to: Option<&MemorySlice>, access: AccessFlags) -> Result<()> {
        let invalid = |what| Err(Error::Invalid { what });
        if !ACCESS.contains(access) {
            return invalid("access flags that a memory window cannot have");
        }
        let Some(to) = to else { return Ok(()) };
        if to.memory().identity() != self.identity() {
            return Err(Error::WrongDomain {
                what: "region of a memory window",
            });
        }
        let region = to.memory().access();
        if !region.contains(AccessFlags::MW_BIND) {
            return invalid("a memory window is bound to a region made with MW_BIND");
        }
        if access.intersects(WRITES) && !region.contains(AccessFlags::LOCAL_WRITE) {
            return invalid("a memory window allows writes only in a region with LOCAL_WRITE");
        }
        let allowed = self.inner.domain.context().provider().max_window_length();
        if to.len() as u64 > allowed {
            return Err(Error::Limit {
                what: "bytes of a memory window",
                asked: to.len() as u64,
                allowed,
            });
        }
        Ok(())
    }

    /// Returns the operands of a bind.
    fn binding(&self, rkey: u32, slice: Option<&MemorySlice>, access: AccessFlags) -> BindOperands {
        BindOperands {
            window_rkey: rkey,
            rkey: variant(rkey, NEXT),
            window_type: self.inner.kind.into(),
            lkey: slice.map_or(0, |slice| slice.memory().lkey()),
            addr: slice.map_or(0, MemorySlice::device_addr),
            length: slice.map_or(0, |slice| slice.len() as u64),
            access: access.bits(),
        }
    }

    /// Returns the operands of a bind that the raw layer posts. Whether it is posted is
    /// unknown here, so the region is kept alive.
    pub(crate) fn raw_binding(&self, to: &MemorySlice, access: AccessFlags) -> BindOperands {
        let mut state = self.state();
        keep(&mut state.raw, to.memory());
        self.binding(state.rkey, Some(to), access)
    }

    /// Records that a bind of the raw layer has completed and bound the window to
    /// `to`.
    ///
    /// # Safety
    /// The bind has completed, and no other bind of the window was posted since.
    pub(crate) unsafe fn is_bound(&self, to: &MemorySlice, rkey: u32) {
        let mut state = self.state();
        state.rkey = rkey;
        let raw = mem::replace(&mut state.raw, vec![Arc::clone(to.memory())]);
        let bound = mem::take(&mut state.bound);
        // Dropped outside of the lock: these may be the last references to a
        // region.
        drop(state);
        drop((raw, bound));
    }

    pub(crate) fn identity(&self) -> Identity {
        self.inner.domain.identity()
    }

    /// Revokes the key and deallocates the window.
    ///
    /// # Errors
    /// Returns the window with [`Error::Busy`] while clones or operations in
    /// flight use it, or with the kernel's error.
    pub fn close(self) -> Result<(), CloseError<Self>> {
        let inner = Arc::try_unwrap(self.inner).map_err(|inner| {
            let error = Error::Busy {
                object: "memory window",
                users: "clones of it, or operations in flight",
            };
            CloseError::new(Self { inner }, error)
        })?;
        match inner.revoke() {
            Ok(()) => Ok(()),
            Err(error) => {
                let inner = Arc::new(inner);
                Err(CloseError::new(Self { inner }, error))
            }
        }
    }
}

/// Adds a region to those that are kept alive.
fn keep(kept: &mut Vec<Arc<Registered>>, region: &Arc<Registered>) {
    if !kept.iter().any(|there| Arc::ptr_eq(there, region)) {
        kept.push(Arc::clone(region));
    }
}

/// A bind as part of a work request. The outcome of a posted bind changes the window's
/// state.
#[derive(Debug)]
pub(crate) struct Bind {
    window: MemoryWindow,
    to: Option<MemorySlice>,
    access: AccessFlags,
    /// Whether it counts among the window's binds in flight.
    counted: bool,
}

impl Bind {
    pub fn new(window: &MemoryWindow, to: Option<MemorySlice>, access: AccessFlags) -> Self {
        Self {
            window: window.clone(),
            to,
            access,
            counted: false,
        }
    }

    /// Counts the bind as in flight on a queue pair, and returns its operands.
    ///
    /// # Errors
    /// [`Error::Busy`] while others are in flight on another queue pair;
    /// [`Error::WrongDomain`]; as [`MemoryWindow::check`].
    #[cold]
    pub fn begin(&mut self, queue_pair: u64, domain: Identity) -> Result<BindOperands> {
        if self.window.identity() != domain {
            return Err(Error::WrongDomain {
                what: "memory window",
            });
        }
        self.window.check(self.to.as_ref(), self.access)?;
        let mut state = self.window.state();
        if state.in_flight != 0 && state.queue_pair != queue_pair {
            return Err(Error::Busy {
                object: "memory window",
                users: "binds in flight on another queue pair",
            });
        }
        let binding = self
            .window
            .binding(state.rkey, self.to.as_ref(), self.access);
        state.queue_pair = queue_pair;
        state.rkey = binding.rkey;
        state.in_flight += 1;
        drop(state);
        self.counted = true;
        Ok(binding)
    }

    /// Removes the bind from those in flight; `None` if it was not counted.
    fn end(&mut self) -> Option<MutexGuard<'_, WindowState>> {
        if !mem::take(&mut self.counted) {
            return None;
        }
        let mut state = self.window.state();
        state.in_flight -= 1;
        Some(state)
    }

    /// Called if the bind was refused, or its batch abandoned.
    pub fn not_posted(&mut self) {
        if let Some(mut state) = self.end() {
            state.rkey = variant(state.rkey, PREVIOUS);
        }
    }

    /// Called when the bind's own completion was read. Only success releases other
    /// regions: if an earlier operation fails, a bind that was executed may be flushed.
    #[cold]
    pub fn completed(&mut self, succeeded: bool) {
        let region = self.to.as_ref().map(MemorySlice::memory).cloned();
        let Some(mut state) = self.end() else { return };
        if succeeded {
            let before = mem::replace(&mut state.bound, region.into_iter().collect());
            // Dropped outside of the lock: these may be the last references to a
            // region.
            drop(state);
            drop(before);
        } else {
            // The kernel did not increment the variant. Later binds fail as well,
            // and each steps back by one here.
            state.rkey = variant(state.rkey, PREVIOUS);
            state.keep(region);
        }
    }
}

impl Drop for Bind {
    /// Ends a bind without its own completion: retired by a later completion of its queue,
    /// or by its queue pair. Whether it was executed is unknown.
    fn drop(&mut self) {
        let region = self.to.as_ref().map(MemorySlice::memory).cloned();
        if let Some(mut state) = self.end() {
            state.keep(region);
        }
    }
}

impl WindowState {
    fn keep(&mut self, region: Option<Arc<Registered>>) {
        if let Some(region) = region {
            keep(&mut self.bound, &region);
        }
    }
}

impl Inner {
    /// Revokes the key: peers lose access.
    fn revoke(&self) -> Result<(), uverbs::Error> {
        match self.object.has_ended() {
            true => Ok(()),
            false => self.object.destroy(),
        }
    }
}

impl Drop for Inner {
    /// Runs before the region is released: the kernel refuses to deregister a region with
    /// bound windows. On ConnectX deregistration would succeed, and leave a window with a
    /// key that another region may get.
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // Not released if the window may still be bound to them: also if a panic ends this
        // function.
        let kept = ManuallyDrop::new((mem::take(&mut state.bound), mem::take(&mut state.raw)));
        if let Err(error) = self.revoke() {
            if !self.object.has_ended() {
                tracing::error!(%error, "memory window leaked, with what it is bound to");
                return;
            }
        }
        drop(ManuallyDrop::into_inner(kept));
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
