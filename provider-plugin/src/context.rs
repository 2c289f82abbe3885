//! Device contexts.
//!
//! libibverbs allocates a context: its own `verbs_context`, whose last member
//! is the public `ibv_context`, with room behind it for the provider's state.
//! Since `ibv_context` is last and does not change, our state begins right
//! after it in every layout.

use core::ffi::c_int;
use core::mem::size_of;
use core::ops::Deref;
use core::ptr::NonNull;
use std::os::fd::BorrowedFd;

use crate::abi::ibv_context;
use crate::errno::Errno;
use crate::library::{LibIbverbs, libibverbs};
use crate::mlx5::memory::ContextMemory;
use crate::mlx5dv::crypto::LoginSession;
use crate::mlx5dv::devx::SharedUar;
use crate::mlx5dv::reserved::ReservedQpns;

/// The provider's state of a context.
#[repr(C)]
pub struct VerbsContext {
    /// The kernel's context, over libibverbs's file descriptor.
    pub uverbs: uverbs::Context,
    /// For an mlx5 device: the driver's answers, and the UARs.
    pub mlx5: Option<mlx5::DeviceContext>,
    /// For an mlx5 device: numbers that were reserved.
    pub reserved: ReservedQpns,
    /// For an mlx5 device: the login for encryption keys.
    pub session: LoginSession,
    /// For an mlx5 device: the page of doorbell registers that callers share.
    pub shared_uar: SharedUar,
    /// For an mlx5 device: allocators of queue memory.
    pub allocators: ContextMemory,
}

/// `ibv_context` and what follows it.
#[repr(C)]
pub struct ContextWithState {
    /// The structure of libibverbs and applications.
    pub public: ibv_context,
    /// The provider's state.
    pub state: VerbsContext,
}

const _: () = {
    assert!(core::mem::offset_of!(ContextWithState, state) == size_of::<ibv_context>());
    // libibverbs allocates with calloc, which aligns to 16 on these machines,
    // and the public context is at a multiple of the word size.
    assert!(core::mem::align_of::<ContextWithState>() == core::mem::align_of::<usize>());
};

/// A reference to a context, for objects of the context.
///
/// `Copy`: an application must destroy all objects of a context before it closes
/// it, so the reference is valid for the object's life.
#[derive(Clone, Copy)]
pub struct CtxRef(NonNull<VerbsContext>);

// SAFETY: it is only a shared reference to a uverbs::Context, which is Sync.
unsafe impl Send for CtxRef where uverbs::Context: Sync {}
// SAFETY: as above.
unsafe impl Sync for CtxRef where uverbs::Context: Sync {}

impl CtxRef {
    /// The context of an object.
    ///
    /// # Safety
    /// `context` is open and was made by [`crate::open`].
    pub unsafe fn of(context: *mut ibv_context) -> CtxRef {
        // SAFETY: `open` laid the state out behind the public part.
        CtxRef(unsafe {
            NonNull::new_unchecked(&raw mut (*context.cast::<ContextWithState>()).state)
        })
    }
}

impl CtxRef {
    /// Reserved numbers of an mlx5 device.
    pub fn reserved<'a>(self) -> &'a ReservedQpns {
        // SAFETY: the context outlives its objects, see the type.
        unsafe { &(*self.0.as_ptr()).reserved }
    }

    /// The login of an mlx5 device.
    pub fn session<'a>(self) -> &'a LoginSession {
        // SAFETY: the context outlives its objects, see the type.
        unsafe { &(*self.0.as_ptr()).session }
    }

    /// The page of doorbell registers that callers share.
    pub fn shared_uar<'a>(self) -> &'a SharedUar {
        // SAFETY: the context outlives its objects, see the type.
        unsafe { &(*self.0.as_ptr()).shared_uar }
    }

    /// Allocators of queue memory of an mlx5 device.
    pub fn allocators<'a>(self) -> &'a ContextMemory {
        // SAFETY: the context outlives its objects, see the type.
        unsafe { &(*self.0.as_ptr()).allocators }
    }

    /// The state of an mlx5 device; EIO for another device.
    pub fn mlx5<'a>(self) -> Result<&'a mlx5::DeviceContext, Errno> {
        // SAFETY: the context outlives its objects, see the type.
        unsafe { &*self.0.as_ptr() }.mlx5.as_ref().ok_or(Errno::IO)
    }
}

// SAFETY: it is a pointer that does not change, nor do its copies.
unsafe impl uverbs::ContextRef for CtxRef {}

impl Deref for CtxRef {
    type Target = uverbs::Context;

    fn deref(&self) -> &uverbs::Context {
        // SAFETY: the context outlives its objects, see the type.
        unsafe { &self.0.as_ref().uverbs }
    }
}

impl core::fmt::Debug for CtxRef {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "CtxRef({:p})", self.0)
    }
}

/// A descriptor of libibverbs or of the application; none if it is negative.
///
/// # Safety
/// If it is not negative, it stays open for `'a`.
pub unsafe fn borrowed<'a>(fd: c_int) -> Option<BorrowedFd<'a>> {
    // SAFETY: not -1, and open, as the caller says.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Refuses a command for an object whose handle the application has changed in libibverbs's
/// structure: commands of rdma-core's providers take it from there, and the kernel finds
/// no such object.
pub fn require_handle(public: u32, own: u32) -> Result<(), Errno> {
    if public == own {
        Ok(())
    } else {
        Err(Errno::NOENT)
    }
}

/// Converts the result of a destroy command: with RDMAV_ALLOW_DISASSOC_DESTROY set, EIO means
/// that the device was removed with its objects, and counts as success.
pub fn destroyed(result: Result<(), Errno>) -> Result<(), Errno> {
    match result {
        Err(Errno::IO) if libibverbs().is_some_and(LibIbverbs::allow_disassociate_destroy) => {
            Ok(())
        }
        other => other,
    }
}
