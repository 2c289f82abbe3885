//! Memory of queues from the allocators of a parent domain or a context.

use core::ffi::c_void;
use core::ptr::NonNull;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use mlx5::{Lender, Lent, LentPages, Purpose};

use crate::abi::*;
use crate::context::CtxRef;
use crate::mlx5dv::abi::mlx5dv_ctx_allocators;
use crate::open::RDMA_DRIVER_MLX5;
use crate::pd::{self, Pd};

/// `IBV_ALLOCATOR_USE_DEFAULT`.
const USE_DEFAULT: usize = usize::MAX;

/// `MLX5DV_RES_TYPE_...`: the resource type passed to the allocators.
fn resource_type(purpose: Purpose) -> u64 {
    let number = match purpose {
        Purpose::QueuePair => 1,
        Purpose::WorkQueue => 2,
        Purpose::Records => 3,
        Purpose::SharedQueue => 4,
        Purpose::CompletionQueue => 5,
    };
    u64::from(RDMA_DRIVER_MLX5) << 32 | number
}

/// The allocators for an object: those of its parent domain, and of its context.
pub struct Allocators {
    domain: Option<DomainAllocators>,
    context: Option<Arc<ContextAllocators>>,
}

impl Allocators {
    /// The allocators for objects of a domain, if there are any.
    ///
    /// # Safety
    /// `domain` is null, or live, and outlives this and what is lent.
    pub unsafe fn of(ctx: &CtxRef, domain: *mut ibv_pd) -> Option<Self> {
        // SAFETY: null or live, as the caller says.
        let parent = unsafe { domain.cast::<Pd>().as_ref() }.and_then(Pd::allocators);
        let domain = parent.map(|(functions, context)| DomainAllocators {
            domain,
            context,
            functions,
        });
        let context = ctx.allocators().get();
        (domain.is_some() || context.is_some()).then_some(Self { domain, context })
    }
}

impl Lender for Allocators {
    /// What a domain's allocators leave to the provider is the process's memory, but
    /// doorbell records are the context's, as in libmlx5.
    fn lend(&self, purpose: Purpose, bytes: usize, alignment: usize) -> io::Result<Option<Lent>> {
        if let Some(domain) = &self.domain {
            let lent = domain.lend(purpose, bytes, alignment)?;
            if lent.is_some() || purpose != Purpose::Records {
                return Ok(lent);
            }
        }
        let context = self.context.as_ref();
        context
            .map(|context| context.lend(purpose, bytes))
            .transpose()
    }
}

/// The allocators of a parent domain, which outlives the objects that use their memory.
struct DomainAllocators {
    domain: *mut ibv_pd,
    context: *mut c_void,
    functions: pd::Allocators,
}

impl DomainAllocators {
    fn lend(&self, purpose: Purpose, bytes: usize, alignment: usize) -> io::Result<Option<Lent>> {
        let (domain, context, free) = (self.domain, self.context, self.functions.free);
        let resource = resource_type(purpose);
        // SAFETY: the application's function, called with its live domain.
        let memory = unsafe { (self.functions.alloc)(domain, context, bytes, alignment, resource) };
        if memory as usize == USE_DEFAULT {
            return Ok(None);
        }
        // SAFETY: as above; the domain outlives what is lent, by `of`.
        lent(memory, move |memory| unsafe {
            free(domain, context, memory, resource)
        })
        .map(Some)
    }
}

/// The allocators of a context (`mlx5dv_set_context_attr`).
pub struct ContextAllocators {
    alloc: ContextAlloc,
    free: ContextFree,
    data: *mut c_void,
    records: Arc<LentPages>,
}

/// Memory of that size, which may be of any alignment.
type ContextAlloc = unsafe extern "C" fn(usize, *mut c_void) -> *mut c_void;
type ContextFree = unsafe extern "C" fn(*mut c_void, *mut c_void);

// SAFETY: the application allows its allocators to be called wherever its objects are
// created and destroyed.
unsafe impl Send for ContextAllocators {}
// SAFETY: as above.
unsafe impl Sync for ContextAllocators {}

impl ContextAllocators {
    /// Both functions, or none.
    pub fn new(from: &mlx5dv_ctx_allocators) -> Option<Self> {
        Some(Self {
            alloc: from.alloc?,
            free: from.free?,
            data: from.data,
            records: Arc::default(),
        })
    }

    fn lend(&self, purpose: Purpose, bytes: usize) -> io::Result<Lent> {
        let (data, free) = (self.data, self.free);
        let lend = |bytes| {
            // SAFETY: the application's functions, with its pointer.
            let memory = unsafe { (self.alloc)(bytes, data) };
            // SAFETY: as above.
            lent(memory, move |memory| unsafe { free(memory, data) })
        };
        match purpose {
            Purpose::Records => self.records.block(lend),
            _ => lend(bytes),
        }
    }
}

/// Allocators of a context, of which later objects have their memory.
#[derive(Default)]
pub struct ContextMemory(Mutex<Option<Arc<ContextAllocators>>>);

impl ContextMemory {
    fn get(&self) -> Option<Arc<ContextAllocators>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Replaces them. Memory goes back to those that it came from.
    pub fn set(&self, allocators: Option<ContextAllocators>) {
        let allocators = allocators.map(Arc::new);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = allocators;
    }
}

/// Memory of an allocator; null is ENOMEM.
fn lent(memory: *mut c_void, free: impl FnOnce(*mut c_void) + 'static) -> io::Result<Lent> {
    let memory =
        NonNull::new(memory.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let back = move |memory: NonNull<u8>| free(memory.as_ptr().cast());
    // SAFETY: the application allows its allocators to be called wherever its objects
    // are created and destroyed.
    Ok(unsafe { Lent::new(memory, Box::new(back)) })
}

#[cfg(test)]
mod tests {
    use core::ptr::null_mut;

    use super::*;

    /// Calls of the two functions: pointer given, size, alignment, type.
    type Seen = Vec<(usize, usize, usize, u64)>;

    unsafe extern "C" fn alloc(
        _: *mut ibv_pd,
        context: *mut c_void,
        size: usize,
        alignment: usize,
        resource: u64,
    ) -> *mut c_void {
        // SAFETY: what the test gave.
        let seen = unsafe { &mut *context.cast::<Seen>() };
        seen.push((0, size, alignment, resource));
        match size {
            8 => USE_DEFAULT as *mut c_void,
            4096 => 0x7000 as *mut c_void,
            _ => null_mut(),
        }
    }

    unsafe extern "C" fn free(
        _: *mut ibv_pd,
        context: *mut c_void,
        memory: *mut c_void,
        resource: u64,
    ) {
        // SAFETY: what the test gave.
        let seen = unsafe { &mut *context.cast::<Seen>() };
        seen.push((memory as usize, 0, 0, resource));
    }

    #[test]
    fn allocators_are_called_as_by_libmlx5() {
        let mut seen = Seen::new();
        let lender = Allocators {
            domain: Some(DomainAllocators {
                domain: null_mut(),
                context: (&raw mut seen).cast(),
                functions: pd::Allocators { alloc, free },
            }),
            context: None,
        };
        let lent = lender.lend(Purpose::QueuePair, 4096, 4096).unwrap();
        drop(lent.unwrap());
        assert!(lender.lend(Purpose::Records, 8, 8).unwrap().is_none());
        for purpose in [
            Purpose::WorkQueue,
            Purpose::SharedQueue,
            Purpose::CompletionQueue,
        ] {
            let error = lender.lend(purpose, 8192, 4096).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        }
        let driver = 1 << 32;
        assert_eq!(
            seen,
            [
                (0, 4096, 4096, driver | 1),
                (0x7000, 0, 0, driver | 1),
                (0, 8, 8, driver | 3),
                (0, 8192, 4096, driver | 2),
                (0, 8192, 4096, driver | 4),
                (0, 8192, 4096, driver | 5),
            ]
        );
    }
}
