//! Memory windows.

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
/// [`WorkRequest::bind`](crate::WorkRequest::bind) binds it. The window keeps
/// every region that it may be bound to. It lets go of one when the completion of
/// a later bind says done, and is read by the library; the end of an unsignaled
/// bind is not that.
///
/// Several binds may be in flight at once, on one queue pair: there they complete
/// in order. Across queue pairs the order is not known: a bind is refused as long
/// as one is in flight on another, an unsignaled one until a later completion of
/// its queue has been read.
///
/// A handle: clones refer to the same window. Any thread.
#[derive(Clone)]
pub struct MemoryWindow {
    inner: Arc<Inner>,
}

struct Inner {
    /// None only on the way out.
    object: Option<Mw<Ctx>>,
    state: Mutex<State>,
    kind: WindowType,
    domain: ProtectionDomain,
}

/// What is believed of the window in the device.
struct State {
    /// The key after the last bind that was posted.
    rkey: u32,
    /// How many binds are in flight. Each keeps its region itself.
    in_flight: u32,
    /// The queue pair that these were posted on.
    queue_pair: u64,
    /// Regions that the window may be bound to: that of the last bind whose
    /// completion said done, and of all that have ended otherwise since.
    bound: Vec<Arc<Registered>>,
    /// Regions of binds that were written by the raw layer. The library does
    /// not see their completions.
    raw: Vec<Arc<Registered>>,
}

/// The variant of a key that the next bind gives, or the last one had: the low
/// 8 bits are the owner's to count.
fn variant(rkey: u32, step: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(step) & 0xff
}

const NEXT: u32 = 1;
const PREVIOUS: u32 = 0xff;

/// What a window can allow.
const ACCESS: AccessFlags = AccessFlags::REMOTE_READ
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::ZERO_BASED)
    .union(AccessFlags::FLUSH_GLOBAL)
    .union(AccessFlags::FLUSH_PERSISTENT);

/// Those that change the memory, for which the region needs `LOCAL_WRITE`.
const WRITES: AccessFlags = AccessFlags::REMOTE_WRITE.union(AccessFlags::REMOTE_ATOMIC);

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
                state: Mutex::new(State {
                    rkey: object.rkey(),
                    in_flight: 0,
                    queue_pair: 0,
                    bound: Vec::new(),
                    raw: Vec::new(),
                }),
                object: Some(object),
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
    /// key that it had before. The outcome of binds in flight on a queue pair
    /// that was destroyed is unknown: if the next bind fails, the window has to
    /// be made anew.
    pub fn rkey(&self) -> u32 {
        self.state().rkey
    }

    fn state(&self) -> MutexGuard<'_, State> {
        let state = self.inner.state.lock();
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks a bind as the specification has it (IBA 10.6.7.2), which not
    /// every device does.
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
        let allowed = self.inner.domain.context().provider().longest_window();
        if to.len() as u64 > allowed {
            return Err(Error::Limit {
                what: "bytes of a memory window",
                asked: to.len() as u64,
                allowed,
            });
        }
        Ok(())
    }

    /// The bind's operands.
    fn binding(
        &self,
        rkey: u32,
        slice: Option<&MemorySlice>,
        access: AccessFlags,
    ) -> WindowBinding {
        let mark = self.inner.domain.context().provider().mark(self.inner.kind);
        WindowBinding {
            addr: slice.map_or(0, MemorySlice::device_addr),
            length: slice.map_or(0, |slice| slice.len() as u64),
            mr_lkey: slice.map_or(0, |slice| slice.memory().lkey()),
            mw_rkey: rkey,
            rkey: variant(rkey, NEXT),
            access: access.bits() | mark,
        }
    }

    /// The operands of a bind that the raw layer writes. Whether it is ever
    /// posted the library does not learn, so the region is kept.
    pub(crate) fn raw_binding(&self, to: &MemorySlice, access: AccessFlags) -> WindowBinding {
        let mut state = self.state();
        keep(&mut state.raw, to.memory());
        self.binding(state.rkey, Some(to), access)
    }

    /// A bind of the raw layer has completed, and the window is bound to `to`.
    ///
    /// # Safety
    /// That is so, and no other bind of the window was posted since.
    pub(crate) unsafe fn is_bound(&self, to: &MemorySlice, rkey: u32) {
        let mut state = self.state();
        state.rkey = rkey;
        let raw = mem::replace(&mut state.raw, vec![Arc::clone(to.memory())]);
        let bound = mem::take(&mut state.bound);
        // Not under the lock: they may be the last of a region.
        drop(state);
        drop((raw, bound));
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

/// Adds a region to those that are kept.
fn keep(kept: &mut Vec<Arc<Registered>>, region: &Arc<Registered>) {
    if !kept.iter().any(|there| Arc::ptr_eq(there, region)) {
        kept.push(Arc::clone(region));
    }
}

/// The bind of a window, as a part of its work request. Once it is posted, what
/// becomes of it changes what is believed of the window.
#[derive(Debug)]
pub(crate) struct Bind {
    window: MemoryWindow,
    to: Option<MemorySlice>,
    access: AccessFlags,
    /// It is among the window's binds in flight.
    begun: bool,
}

impl Bind {
    pub fn new(window: &MemoryWindow, to: Option<MemorySlice>, access: AccessFlags) -> Self {
        Self {
            window: window.clone(),
            to,
            access,
            begun: false,
        }
    }

    /// Counts it among the binds in flight, on that queue pair. Returns what is
    /// written of it.
    ///
    /// # Errors
    /// [`Error::Busy`] while others are in flight on another queue pair;
    /// [`Error::WrongDomain`]; as [`MemoryWindow::check`].
    #[cold]
    pub fn begin(&mut self, queue_pair: u64, domain: Identity) -> Result<WindowBinding> {
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
        self.begun = true;
        Ok(binding)
    }

    /// Takes it out of those in flight; nothing if it was none of them.
    fn end(&mut self) -> Option<MutexGuard<'_, State>> {
        if !mem::take(&mut self.begun) {
            return None;
        }
        let mut state = self.window.state();
        state.in_flight -= 1;
        Some(state)
    }

    /// It was written, and not posted after all.
    pub fn taken_back(&mut self) {
        if let Some(mut state) = self.end() {
            state.rkey = variant(state.rkey, PREVIOUS);
        }
    }

    /// Its own completion was read. Only one that says done lets go of other
    /// regions: behind an operation that fails, a bind that was done is flushed
    /// as well.
    #[cold]
    pub fn completed(&mut self, done: bool) {
        let region = self.to.as_ref().map(MemorySlice::memory).cloned();
        let Some(mut state) = self.end() else { return };
        if done {
            let before = mem::replace(&mut state.bound, region.into_iter().collect());
            // Not under the lock: they may be the last of a region.
            drop(state);
            drop(before);
        } else {
            // The kernel has counted one less. Binds posted behind it fail too,
            // and are counted so each.
            state.rkey = variant(state.rkey, PREVIOUS);
            state.keep(region);
        }
    }
}

impl Drop for Bind {
    /// Ended without a completion of its own: by a later one of its queue, or
    /// with its queue pair. It may have been done, or not.
    fn drop(&mut self) {
        let region = self.to.as_ref().map(MemorySlice::memory).cloned();
        if let Some(mut state) = self.end() {
            state.keep(region);
        }
    }
}

impl State {
    fn keep(&mut self, region: Option<Arc<Registered>>) {
        if let Some(region) = region {
            keep(&mut self.bound, &region);
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
            let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            mem::forget((mem::take(&mut state.bound), mem::take(&mut state.raw)));
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
