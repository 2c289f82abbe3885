//! The libibverbs that loaded the plugin: the functions that are used, and the
//! operations in its layout.

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::abi::*;
use crate::layout::Layout;

/// `_verbs_init_and_alloc_context`.
pub type InitAndAllocContext =
    unsafe extern "C" fn(*mut ibv_device, c_int, usize, *mut c_void, u32) -> *mut c_void;
/// `verbs_set_ops`.
pub type SetOps = unsafe extern "C" fn(*mut c_void, *const c_void);
/// `verbs_uninit_context`.
pub type UninitContext = unsafe extern "C" fn(*mut c_void);

/// `verbs_init_cq`.
pub type InitCq =
    unsafe extern "C" fn(*mut ibv_cq, *mut ibv_context, *mut ibv_comp_channel, *mut c_void);
/// `verbs_open_device`.
pub type OpenDevice = unsafe extern "C" fn(*mut ibv_device, *mut c_void) -> *mut ibv_context;

/// Functions and data of the libibverbs that loaded the plugin.
pub struct LibIbverbs {
    /// Where its structures have their members.
    pub layout: &'static Layout,
    /// Allocates and initialises a `verbs_context`; takes over the file
    /// descriptor, which it closes on failure.
    pub init_and_alloc_context: InitAndAllocContext,
    /// Copies the operations that are set into a context.
    pub set_ops: SetOps,
    /// Undoes the initialisation; the memory stays the provider's to free.
    pub uninit_context: UninitContext,
    /// `verbs_allow_disassociate_destroy`, libibverbs's answer to
    /// RDMAV_ALLOW_DISASSOC_DESTROY. Null where a build does not export it.
    pub allow_disassociate_destroy: *const bool,
    /// Initialises the public part of a queue that `mlx5dv_create_cq` has made.
    pub init_cq: Option<InitCq>,
    /// Opens a device, for `mlx5dv_open_device`.
    pub open_device: Option<OpenDevice>,
}

// SAFETY: functions and one flag of a library that stays loaded for the life
// of the process; the flag is written before any device list is made.
unsafe impl Sync for LibIbverbs {}

impl LibIbverbs {
    /// Returns whether a destroy that fails with EIO, because the device was
    /// removed, counts as success.
    pub fn allow_disassociate_destroy(&self) -> bool {
        if self.allow_disassociate_destroy.is_null() {
            return false;
        }
        // SAFETY: a C `bool` of libibverbs, which holds 0 or 1. It is read as
        // a byte, so that any other value would do no harm.
        unsafe { self.allow_disassociate_destroy.cast::<u8>().read_volatile() != 0 }
    }
}

/// Null before registration.
static LIBIBVERBS: AtomicPtr<LibIbverbs> = AtomicPtr::new(ptr::null_mut());

/// Stores the libibverbs that loaded the plugin, for the life of the process.
pub fn set_libibverbs(lib: &'static LibIbverbs) {
    // Release: who reads the pointer reads what it points to.
    LIBIBVERBS.store(ptr::from_ref(lib).cast_mut(), Ordering::Release);
}

/// The libibverbs that loaded the plugin; `None` before registration.
pub fn libibverbs() -> Option<&'static LibIbverbs> {
    // SAFETY: null, or the `&'static` that `set_libibverbs` stored, of a `Sync` type. Acquire
    // pairs with the store.
    unsafe { LIBIBVERBS.load(Ordering::Acquire).as_ref() }
}

/// Words of an [`OpsTable`]: more than any release has operations, so that a
/// libibverbs with more operations than are known reads NULL, "not set".
const WORDS: usize = 160;

/// A `verbs_context_ops` of one layout.
pub struct OpsTable {
    words: [usize; WORDS],
}

impl OpsTable {
    /// Operations, by name, in the order of a layout; those it lacks are left
    /// out.
    pub fn new(
        layout: &Layout,
        operations: impl IntoIterator<Item = (&'static str, usize)>,
    ) -> OpsTable {
        let mut words = [0; WORDS];
        for (name, function) in operations {
            if let Some(word) = layout.op_index(name).and_then(|index| words.get_mut(index)) {
                *word = function;
            }
        }
        OpsTable { words }
    }

    /// For `verbs_set_ops`.
    pub fn as_ptr(&self) -> *const c_void {
        self.words.as_ptr().cast()
    }

    /// The operation at an index; 0 if there is none.
    pub fn word(&self, index: usize) -> usize {
        self.words.get(index).copied().unwrap_or(0)
    }

    /// Returns whether `verbs_set_ops` copied the operations to the expected
    /// places. libibverbs copies some of them, from the beginning to the end of
    /// the alphabet, to the public context, which shows the order.
    pub fn is_installed(&self, layout: &Layout, public: &ibv_context_ops) -> bool {
        macro_rules! is {
            ($($member:ident)+) => {
                $(public.$member.is_some_and(|f| {
                    let ours = layout.op_index(stringify!($member)).map(|index| self.word(index));
                    ours == Some(f as usize)
                }))&&+
            };
        }
        is! {
            alloc_mw bind_mw dealloc_mw poll_cq post_recv post_send post_srq_recv req_notify_cq
        }
    }

    /// How many operations are set.
    #[cfg(test)]
    pub fn set(&self) -> usize {
        self.words.iter().filter(|word| **word != 0).count()
    }
}
