//! Memory of queues from the allocators of a parent domain.

use core::ffi::c_void;
use core::ptr::NonNull;
use std::io;

use mlx5::{Lender, Lent, Purpose};

use crate::abi::*;
use crate::open::RDMA_DRIVER_MLX5;
use crate::pd::{self, pd_of};

/// `IBV_ALLOCATOR_USE_DEFAULT`.
const USE_DEFAULT: usize = usize::MAX;

/// `MLX5DV_RES_TYPE_...`: the resource type passed to the allocators.
fn resource_type(purpose: Purpose) -> u64 {
    let number = match purpose {
        Purpose::QueuePair => 1,
        Purpose::Records => 3,
        Purpose::SharedQueue => 4,
        Purpose::CompletionQueue => 5,
    };
    u64::from(RDMA_DRIVER_MLX5) << 32 | number
}

/// The allocators of a parent domain, which outlives the objects that use their memory.
pub struct Allocators {
    domain: *mut ibv_pd,
    context: *mut c_void,
    functions: pd::Allocators,
}

impl Allocators {
    /// The allocators of a domain, if it has any.
    ///
    /// # Safety
    /// `domain` is null, or live, and outlives this and what is lent.
    pub unsafe fn of(domain: *mut ibv_pd) -> Option<Self> {
        if domain.is_null() {
            return None;
        }
        // SAFETY: live, as the caller says.
        let (functions, context) = unsafe { pd_of(domain) }.allocators()?;
        Some(Self {
            domain,
            context,
            functions,
        })
    }
}

impl Lender for Allocators {
    fn lend(&self, purpose: Purpose, bytes: usize, alignment: usize) -> io::Result<Option<Lent>> {
        let (domain, context, free) = (self.domain, self.context, self.functions.free);
        let resource = resource_type(purpose);
        // SAFETY: the application's function, called with its live domain.
        let memory = unsafe { (self.functions.alloc)(domain, context, bytes, alignment, resource) };
        if memory as usize == USE_DEFAULT {
            return Ok(None);
        }
        let memory = NonNull::new(memory.cast())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: as above; the domain outlives what is lent, by `of`.
        let back = move |memory: NonNull<u8>| unsafe {
            free(domain, context, memory.as_ptr().cast(), resource)
        };
        // SAFETY: the application allows its allocators to be called wherever its
        // objects are created and destroyed.
        Ok(Some(unsafe { Lent::new(memory, Box::new(back)) }))
    }
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
            domain: null_mut(),
            context: (&raw mut seen).cast(),
            functions: pd::Allocators { alloc, free },
        };
        let lent = lender.lend(Purpose::QueuePair, 4096, 4096).unwrap();
        drop(lent.unwrap());
        assert!(lender.lend(Purpose::Records, 8, 8).unwrap().is_none());
        for purpose in [Purpose::SharedQueue, Purpose::CompletionQueue] {
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
                (0, 8192, 4096, driver | 4),
                (0, 8192, 4096, driver | 5),
            ]
        );
    }
}
