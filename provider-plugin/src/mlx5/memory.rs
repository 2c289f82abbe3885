//! Memory of queues from the allocators of a parent domain or a context.

use core::ffi::c_void;
use core::ptr::NonNull;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use mlx5::{CustomMemory, CustomRecordPages, Purpose, QueueAllocator};

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
    /// `domain` is null, or live, and outlives this and the memory that is allocated.
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

impl QueueAllocator for Allocators {
    /// If the allocator of the domain asks for the default, entries are memory of the
    /// process, and doorbell records come from the context's allocator, as in libmlx5.
    fn allocate(
        &self,
        purpose: Purpose,
        bytes: usize,
        alignment: usize,
    ) -> io::Result<Option<CustomMemory>> {
        if let Some(domain) = &self.domain {
            let memory = domain.allocate(purpose, bytes, alignment)?;
            if memory.is_some() || purpose != Purpose::Records {
                return Ok(memory);
            }
        }
        let context = self.context.as_ref();
        context
            .map(|context| context.allocate(purpose, bytes))
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
    fn allocate(
        &self,
        purpose: Purpose,
        bytes: usize,
        alignment: usize,
    ) -> io::Result<Option<CustomMemory>> {
        let (domain, context, free) = (self.domain, self.context, self.functions.free);
        let resource = resource_type(purpose);
        // SAFETY: the application's function, called with its live domain.
        let memory = unsafe { (self.functions.alloc)(domain, context, bytes, alignment, resource) };
        if memory as usize == USE_DEFAULT {
            return Ok(None);
        }
        // SAFETY: as above; the domain outlives the memory, by `of`.
        custom_memory(memory, move |memory| unsafe {
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
    records: Arc<CustomRecordPages>,
}

/// Returns memory of the given size, of any alignment.
type ContextAlloc = unsafe extern "C" fn(usize, *mut c_void) -> *mut c_void;
type ContextFree = unsafe extern "C" fn(*mut c_void, *mut c_void);

// SAFETY: the application allows its allocators to be called wherever its objects are
// created and destroyed.
unsafe impl Send for ContextAllocators {}
// SAFETY: as above.
unsafe impl Sync for ContextAllocators {}

impl ContextAllocators {
    /// Returns `None` unless both functions are given.
    pub fn new(from: &mlx5dv_ctx_allocators) -> Option<Self> {
        Some(Self {
            alloc: from.alloc?,
            free: from.free?,
            data: from.data,
            records: Arc::default(),
        })
    }

    fn allocate(&self, purpose: Purpose, bytes: usize) -> io::Result<CustomMemory> {
        let (data, free) = (self.data, self.free);
        let allocate = |bytes| {
            // SAFETY: the application's functions, with its pointer.
            let memory = unsafe { (self.alloc)(bytes, data) };
            // SAFETY: as above.
            custom_memory(memory, move |memory| unsafe { free(memory, data) })
        };
        match purpose {
            Purpose::Records => self.records.block(allocate),
            _ => allocate(bytes),
        }
    }
}

/// The allocators of a context, used by objects that are created later.
#[derive(Default)]
pub struct ContextMemory(Mutex<Option<Arc<ContextAllocators>>>);

impl ContextMemory {
    fn get(&self) -> Option<Arc<ContextAllocators>> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Replaces the allocators. Memory is freed by the allocator that it came from.
    pub fn set(&self, allocators: Option<ContextAllocators>) {
        let allocators = allocators.map(Arc::new);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = allocators;
    }
}

/// Wraps memory of an allocator; null is ENOMEM.
fn custom_memory(
    memory: *mut c_void,
    free: impl FnOnce(*mut c_void) + 'static,
) -> io::Result<CustomMemory> {
    let memory =
        NonNull::new(memory.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
    let free = move |memory: NonNull<u8>| free(memory.as_ptr().cast());
    // SAFETY: the application allows its allocators to be called wherever its objects
    // are created and destroyed.
    Ok(unsafe { CustomMemory::new(memory, Box::new(free)) })
}

#[cfg(test)]
mod tests {
    use core::ptr::null_mut;

    use super::*;

    /// Calls of the two functions: freed address, size, alignment, type.
    type Calls = Vec<(usize, usize, usize, u64)>;

    unsafe extern "C" fn alloc(
        _: *mut ibv_pd,
        context: *mut c_void,
        size: usize,
        alignment: usize,
        resource: u64,
    ) -> *mut c_void {
        // SAFETY: the pointer that the test passed.
        let calls = unsafe { &mut *context.cast::<Calls>() };
        calls.push((0, size, alignment, resource));
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
        // SAFETY: the pointer that the test passed.
        let calls = unsafe { &mut *context.cast::<Calls>() };
        calls.push((memory as usize, 0, 0, resource));
    }

    #[test]
    fn allocators_are_called_as_by_libmlx5() {
        let mut calls = Calls::new();
        let allocator = Allocators {
            domain: Some(DomainAllocators {
                domain: null_mut(),
                context: (&raw mut calls).cast(),
                functions: pd::Allocators { alloc, free },
            }),
            context: None,
        };
        let memory = allocator.allocate(Purpose::QueuePair, 4096, 4096).unwrap();
        drop(memory.unwrap());
        assert!(
            allocator
                .allocate(Purpose::Records, 8, 8)
                .unwrap()
                .is_none()
        );
        for purpose in [
            Purpose::WorkQueue,
            Purpose::SharedQueue,
            Purpose::CompletionQueue,
        ] {
            let error = allocator.allocate(purpose, 8192, 4096).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
        }
        let driver = 1 << 32;
        assert_eq!(
            calls,
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
