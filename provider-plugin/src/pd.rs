//! Protection domains, thread domains and parent domains.
//!
//! A parent domain has the kernel handle of the protection domain that it
//! contains. With a thread domain the application promises that calls on objects
//! made from it do not overlap, so their queues need no lock.

use core::ffi::{c_int, c_void};
use core::ptr::NonNull;
use core::sync::atomic::{AtomicUsize, Ordering};

use uverbs::PdHandle;

use crate::abi::*;
use crate::alloc::try_box;
use crate::context::{CtxRef, destroyed};
use crate::entry;
use crate::errno::Errno;

/// Number of objects that use another one.
#[derive(Debug, Default)]
struct Users(AtomicUsize);

impl Users {
    fn add(&self) {
        // Relaxed: the caller holds a reference already.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn remove(&self) {
        // Release: the user's accesses come before the destruction.
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Acquire: see `remove`.
    fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) != 0
    }
}

/// A protection domain or a parent domain.
#[repr(C)]
pub struct Pd {
    /// The structure of libibverbs and applications.
    pub public: ibv_pd,
    /// The device's number of the domain, or 0.
    pub number: u32,
    /// For a parent domain: objects made from it. For a protection domain: its
    /// parent domains, since the kernel counts all other objects.
    users: Users,
    parent: Option<ParentDomain>,
}

/// The data of a parent domain.
pub struct ParentDomain {
    contained: NonNull<Pd>,
    thread_domain: Option<NonNull<Td>>,
    allocators: Option<Allocators>,
    pd_context: *mut c_void,
}

/// The application's functions for memory of queues.
#[derive(Clone, Copy)]
pub struct Allocators {
    /// Returns memory of the given size and alignment for a type of resource. Null is an
    /// error; `IBV_ALLOCATOR_USE_DEFAULT` requests the provider's default.
    pub alloc: AllocFn,
    /// Frees memory of `alloc`.
    pub free: FreeFn,
}

/// A thread domain.
#[repr(C)]
struct Td {
    public: ibv_td,
    users: Users,
}

/// A thread domain with the device's data.
#[repr(C)]
struct DeviceTd<T> {
    td: Td,
    device: T,
}

/// The provider's view of a protection domain.
///
/// # Safety
/// `pd` is a live protection domain or parent domain of this provider; the
/// result is not used after the application has deallocated it.
pub unsafe fn pd_of<'a>(pd: *mut ibv_pd) -> &'a Pd {
    // SAFETY: every ibv_pd that this provider hands out begins a Pd.
    unsafe { &*pd.cast::<Pd>() }
}

/// Returns whether the domain is a parent domain with a thread domain, whose
/// objects are used by one thread at a time. False for null.
///
/// # Safety
/// `pd` is null or a live domain of this provider.
pub unsafe fn thread_domain_of(pd: *mut ibv_pd) -> bool {
    // SAFETY: live, as the caller says.
    !pd.is_null() && unsafe { pd_of(pd) }.has_thread_domain()
}

impl Pd {
    /// The kernel's handle; a parent domain has that of its protection domain.
    pub fn handle(&self) -> PdHandle {
        PdHandle(self.public.handle)
    }

    /// The device's data of the thread domain, if there is one.
    ///
    /// # Safety
    /// The domain is of a context of this kind of device.
    pub unsafe fn thread<D: PdOps>(&self) -> Option<&D::ThreadDomain> {
        let domain = self.parent.as_ref()?.thread_domain?;
        // SAFETY: every thread domain of such a context was made with it, and
        // lives as long as its parent domains.
        Some(&unsafe { domain.cast::<DeviceTd<D::ThreadDomain>>().as_ref() }.device)
    }

    /// The allocators of a parent domain, and their context pointer.
    pub fn allocators(&self) -> Option<(Allocators, *mut c_void)> {
        let parent = self.parent.as_ref()?;
        Some((parent.allocators?, parent.pd_context))
    }

    /// Returns whether a thread domain promises one caller at a time.
    pub fn has_thread_domain(&self) -> bool {
        self.parent
            .as_ref()
            .is_some_and(|p| p.thread_domain.is_some())
    }
}

/// Keeps a parent domain alive while an object made from it exists. For a plain
/// protection domain the kernel does that.
#[derive(Debug)]
#[repr(transparent)]
pub struct PdRef(Option<NonNull<Pd>>);

// SAFETY: it only ever touches the domain's atomic count.
unsafe impl Send for PdRef {}
// SAFETY: as above.
unsafe impl Sync for PdRef {}

impl PdRef {
    /// Takes a reference.
    ///
    /// # Safety
    /// `pd` is null or a live domain of this provider.
    pub unsafe fn new(pd: *mut ibv_pd) -> PdRef {
        let Some(domain) = NonNull::new(pd.cast::<Pd>()) else {
            return PdRef(None);
        };
        // SAFETY: live, as the caller says.
        let domain_ref = unsafe { domain.as_ref() };
        if domain_ref.parent.is_none() {
            return PdRef(None);
        }
        domain_ref.users.add();
        PdRef(Some(domain))
    }
}

impl Drop for PdRef {
    fn drop(&mut self) {
        if let Some(domain) = self.0 {
            // SAFETY: a parent domain with users is not deallocated.
            unsafe { domain.as_ref() }.users.remove();
        }
    }
}

/// What a device implements for protection domains.
pub trait PdOps: 'static {
    /// Creates the kernel object. Returns its handle, and the device's number of the domain
    /// or 0.
    fn make_pd(ctx: &CtxRef) -> Result<(PdHandle, u32), Errno>;

    /// Finds the kernel object with a handle. Returns the device's number of the domain, or
    /// 0 if the device has none.
    fn find_pd(_ctx: &CtxRef, _pd: PdHandle) -> Result<u32, Errno> {
        Ok(0)
    }

    /// The device's data of a thread domain.
    type ThreadDomain;

    /// Creates the data of a thread domain.
    fn make_thread_domain(ctx: &CtxRef) -> Result<Self::ThreadDomain, Errno>;

    /// Releases the data of a thread domain. On an error it is unchanged.
    fn destroy_thread_domain(_thread: &mut Self::ThreadDomain) -> Result<(), Errno> {
        Ok(())
    }
}

/// A domain that has no kernel object yet.
fn new_pd(context: *mut ibv_context, parent: Option<ParentDomain>) -> Pd {
    Pd {
        public: ibv_pd { context, handle: 0 },
        number: 0,
        users: Users::default(),
        parent,
    }
}

/// `ibv_alloc_pd`.
pub unsafe extern "C" fn alloc_pd<D: PdOps>(context: *mut ibv_context) -> *mut ibv_pd {
    entry::pointer(|| {
        // SAFETY: libibverbs passes an open context of ours.
        let ctx = unsafe { CtxRef::of(context) };
        let mut pd = try_box(new_pd(context, None)).map_err(|(_, e)| e)?;
        let (handle, number) = D::make_pd(&ctx)?;
        (pd.public.handle, pd.number) = (handle.0, number);
        Ok(Box::into_raw(pd).cast())
    })
}

/// `ibv_dealloc_pd`, of protection domains and parent domains. EBUSY, and the
/// domain is unchanged, while objects made from it exist.
pub unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: libibverbs passes a live domain of ours.
    entry::int(|| unsafe {
        let domain = pd_of(pd);
        if domain.users.any() {
            return Err(Errno::BUSY);
        }
        match &domain.parent {
            Some(parent) => {
                parent.contained.as_ref().users.remove();
                if let Some(td) = parent.thread_domain {
                    td.as_ref().users.remove();
                }
            }
            None => {
                let ctx = CtxRef::of(domain.public.context);
                destroyed(uverbs::pd::destroy(&ctx, domain.handle()).map_err(Into::into))?;
            }
        }
        drop(Box::from_raw(pd.cast::<Pd>()));
        Ok(())
    })
}

/// `ibv_import_pd`: another handle of a protection domain of the same file.
pub unsafe extern "C" fn import_pd<D: PdOps>(
    context: *mut ibv_context,
    handle: u32,
) -> *mut ibv_pd {
    entry::pointer(|| {
        // SAFETY: libibverbs passes an open context of ours.
        let number = D::find_pd(&unsafe { CtxRef::of(context) }, PdHandle(handle))?;
        let mut pd = try_box(new_pd(context, None)).map_err(|(_, e)| e)?;
        (pd.public.handle, pd.number) = (handle, number);
        Ok(Box::into_raw(pd).cast())
    })
}

/// `ibv_unimport_pd`: frees the handle; the kernel's object stays.
pub unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: libibverbs passes an object of import_pd, once.
    entry::unit(|| unsafe {
        // A parent domain still refers to the domain: leak it.
        if pd_of(pd).users.any() {
            tracing::error!("a parent domain still contains the unimported protection domain");
            return;
        }
        drop(Box::from_raw(pd.cast::<Pd>()));
    });
}

/// `ibv_alloc_td`. EINVAL for attributes that are not defined yet.
pub unsafe extern "C" fn alloc_td<D: PdOps>(
    context: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    entry::pointer(|| {
        // SAFETY: the application passes its attributes.
        if unsafe { (*attr).comp_mask } != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: libibverbs passes an open context of ours.
        let ctx = unsafe { CtxRef::of(context) };
        let td = DeviceTd {
            td: Td {
                public: ibv_td { context },
                users: Users::default(),
            },
            device: D::make_thread_domain(&ctx)?,
        };
        Ok(Box::into_raw(try_box(td).map_err(|(_, e)| e)?).cast())
    })
}

/// `ibv_dealloc_td`. EBUSY while a parent domain uses it.
pub unsafe extern "C" fn dealloc_td<D: PdOps>(td: *mut ibv_td) -> c_int {
    // SAFETY: the application passes a live thread domain of ours.
    entry::int(|| unsafe {
        let domain = td.cast::<DeviceTd<D::ThreadDomain>>();
        if (*domain).td.users.any() {
            return Err(Errno::BUSY);
        }
        destroyed(D::destroy_thread_domain(&mut (*domain).device))?;
        drop(Box::from_raw(domain));
        Ok(())
    })
}

/// `ibv_alloc_parent_domain`. EINVAL for one allocator function without the other.
///
/// A provider may ignore custom allocators and `ALLOW_CC_UNPROTECTED_ALLOC`
/// (ibv_alloc_parent_domain(3)): the queues of rdma_rxe are the kernel's memory.
pub unsafe extern "C" fn alloc_parent_domain(
    _context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    const SUPPORTED: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
        | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
        | IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC;
    // SAFETY: the application passes its attributes, with live domains.
    entry::pointer(|| unsafe {
        let attr = &*attr;
        let contained = NonNull::new(attr.pd.cast::<Pd>()).ok_or(Errno::INVAL)?;
        if attr.comp_mask & !SUPPORTED != 0 {
            return Err(Errno::INVAL);
        }
        let has = |member| attr.comp_mask & member != 0;
        let allocators = if has(IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
            match (attr.alloc, attr.free) {
                (Some(alloc), Some(free)) => Some(Allocators { alloc, free }),
                (None, None) => None,
                _ => return Err(Errno::INVAL),
            }
        } else {
            None
        };
        let pd_context = if has(IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT) {
            attr.pd_context
        } else {
            core::ptr::null_mut()
        };
        let thread_domain = NonNull::new(attr.td.cast::<Td>());
        let (contained_public, number) = (&contained.as_ref().public, contained.as_ref().number);
        let parent = ParentDomain {
            contained,
            thread_domain,
            allocators,
            pd_context,
        };
        let mut pd = try_box(new_pd(contained_public.context, Some(parent))).map_err(|(_, e)| e)?;
        (pd.public.handle, pd.number) = (contained_public.handle, number);
        contained.as_ref().users.add();
        if let Some(td) = thread_domain {
            td.as_ref().users.add();
        }
        Ok(Box::into_raw(pd).cast())
    })
}

const _: () = {
    // libibverbs and applications use the public part at the beginning.
    assert!(core::mem::offset_of!(Pd, public) == 0);
    assert!(core::mem::offset_of!(Td, public) == 0);
    assert!(core::mem::offset_of!(DeviceTd<u64>, td) == 0);
};
