//! Registration with the libibverbs that loads the plugin.
//!
//! libibverbs dlopens each provider; a constructor of the provider calls
//! `verbs_register_driver_<N>` of that same libibverbs. A process may have several
//! libibverbs, none of them in the global scope. The constructor therefore finds the calling
//! libibverbs on its call stack, takes functions from it by symbol version, and determines
//! its release of rdma-core. If the release is uncertain, nothing is registered: one line on
//! stderr gives the reason, and the stock provider takes the device.
//!
//! [`preloaded`] serves programs whose provider registers before libibverbs loads others.
//!
//! The kernel maps 64 kB around each page whose code runs, so the parts of the plugin that
//! registration uses are resident in every program that lists devices. It compares bytes
//! instead of text, allocates vectors with their capacity, and formats only what it reports.

mod evidence;
mod matching;
pub(crate) mod objects;
mod preloaded;
mod probe;
mod served;

use core::ffi::{CStr, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use std::panic::catch_unwind;

use uverbs::environment::has_elevated_privileges;

use crate::abi::*;
use crate::layout::Layout;
use crate::library::{
    self, InitAndAllocContext, InitCq, LibIbverbs, OpenDevice, SetOps, UninitContext,
};
use crate::open::{RDMA_DRIVER_MLX5, RDMA_DRIVER_RXE};
use evidence::Refusal;
use objects::{Library, Object, PrivateAbi};

/// `verbs_register_driver_<N>`.
type RegisterDriver = unsafe extern "C" fn(*const verbs_device_ops);
/// Statics that C reads; they hold pointers to other statics.
#[repr(transparent)]
struct CStatic<T>(T);
// SAFETY: never written after the program is loaded.
unsafe impl<T> Sync for CStatic<T> {}

const fn no_match() -> verbs_match_ent {
    verbs_match_ent {
        driver_data: core::ptr::null_mut(),
        u: verbs_match_key { driver_id: 0 },
        vendor: 0,
        device: 0,
        kind: VERBS_MATCH_SENTINEL,
    }
}

const fn pci(device: u16) -> verbs_match_ent {
    verbs_match_ent {
        vendor: 0x15b3,
        device,
        kind: VERBS_MATCH_PCI,
        ..no_match()
    }
}

static MLX5_MATCH_TABLE: CStatic<[verbs_match_ent; 25]> = CStatic([
    verbs_match_ent {
        u: verbs_match_key {
            driver_id: RDMA_DRIVER_MLX5 as u64,
        },
        kind: VERBS_MATCH_DRIVER_ID,
        ..no_match()
    },
    // Without netlink there is no driver id, so devices match by PCI id: those of mlx5_core,
    // ConnectX-4 to -10 and BlueField to BlueField-4, except Connect-IB, whose CQEs carry no
    // user index.
    pci(0x1013),
    pci(0x1014),
    pci(0x1015),
    pci(0x1016),
    pci(0x1017),
    pci(0x1018),
    pci(0x1019),
    pci(0x101a),
    pci(0x101b),
    pci(0x101c),
    pci(0x101d),
    pci(0x101e),
    pci(0x101f),
    pci(0x1021),
    pci(0x1023),
    pci(0x1025),
    pci(0x1027),
    pci(0x2101),
    pci(0xa2d2),
    pci(0xa2d3),
    pci(0xa2d6),
    pci(0xa2dc),
    pci(0xa2df),
    no_match(),
]);

static MATCH_TABLE: CStatic<[verbs_match_ent; 3]> = CStatic([
    verbs_match_ent {
        u: verbs_match_key {
            driver_id: RDMA_DRIVER_RXE as u64,
        },
        kind: VERBS_MATCH_DRIVER_ID,
        ..no_match()
    },
    // Without netlink there is no driver id: devices match by name.
    verbs_match_ent {
        u: verbs_match_key {
            modalias: c"rdma_device:*Nrxe*".as_ptr(),
        },
        kind: VERBS_MATCH_MODALIAS,
        ..no_match()
    },
    no_match(),
]);

static DEVICE_OPS: CStatic<verbs_device_ops> = CStatic(verbs_device_ops {
    name: c"ringverbs-rxe".as_ptr(),
    // On 64-bit machines the kernel's ABI versions 1 and 2 are the same.
    match_min_abi_version: 1,
    match_max_abi_version: 2,
    match_table: MATCH_TABLE.0.as_ptr(),
    static_providers: core::ptr::null(),
    match_device: None,
    alloc_context: Some(crate::open::alloc_context),
    // The kernel's rxe has no query_ucontext, so a context cannot be imported.
    import_context: None,
    alloc_device: Some(crate::device::alloc_device),
    uninit_device: Some(crate::device::uninit_device),
});

static MLX5_DEVICE_OPS: CStatic<verbs_device_ops> = CStatic(verbs_device_ops {
    name: c"ringverbs-mlx5".as_ptr(),
    match_min_abi_version: 1,
    match_max_abi_version: 1,
    match_table: MLX5_MATCH_TABLE.0.as_ptr(),
    static_providers: core::ptr::null(),
    match_device: Some(matching::match_mlx5),
    alloc_context: Some(crate::open::alloc_mlx5_context),
    import_context: Some(crate::open::import_mlx5_context),
    alloc_device: Some(crate::device::alloc_device),
    uninit_device: Some(crate::device::uninit_device),
});

/// Returns whether `ops` are this provider's operations for mlx5 devices.
pub(crate) fn is_mlx5(ops: *const verbs_device_ops) -> bool {
    core::ptr::eq(ops, &raw const MLX5_DEVICE_OPS.0)
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static ON_LOAD: extern "C" fn() = on_load;

/// The constructor.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn on_load() {
    // A panic must not reach the loader; the panic hook has reported it.
    let _ = catch_unwind(|| {
        let objects = objects::loaded();
        let Some(plugin_object) = plugin_object(&objects) else {
            return;
        };
        if !preloaded::is_preloaded(plugin_object) {
            match objects::find_libibverbs(&objects, plugin_object) {
                Ok(library) => {
                    let suffix = evidence::name_suffix(plugin_object.name.to_bytes());
                    register_once(library, plugin_object, suffix);
                }
                Err(refusal) => refusal.print(),
            }
        } else if !has_elevated_privileges() {
            // No message without libibverbs: a program may load it later, or never.
            if let Ok(library) = objects::find_libibverbs(&objects, plugin_object) {
                register_once(library, plugin_object, None);
            }
        }
    });
}

/// The shared object of the plugin; `None` in a program that links it as a crate.
fn plugin_object(objects: &[Object]) -> Option<&Object> {
    let here = on_load as *const () as usize;
    let plugin_object = objects.iter().find(|o| o.contains(here))?;
    let name = plugin_object.name.to_bytes();
    (name.windows(3).any(|part| part == b".so")).then_some(plugin_object)
}

/// Registers with a libibverbs, or reports why not; once per process. `name_suffix` is the
/// private ABI in the file name by which libibverbs loaded the plugin.
fn register_once(library: Library<'_>, plugin_object: &Object, name_suffix: Option<u32>) {
    static IS_DONE: AtomicBool = AtomicBool::new(false);
    // Relaxed: the loader runs constructors one at a time, and `set_libibverbs` publishes
    // what registration writes.
    if IS_DONE.swap(true, Ordering::Relaxed) {
        return;
    }
    if let Err(refusal) = register(library, plugin_object, name_suffix) {
        refusal.print();
    }
}

/// Returns the address of a function that every supported release exports.
fn need(library: &Library<'_>, pabi: &PrivateAbi, name: &CStr) -> Result<*mut c_void, Refusal> {
    library
        .symbol(name, pabi.version)
        .ok_or_else(|| Refusal::new(library, format!("{} is missing", name.to_string_lossy())))
}

fn register(
    library: Library<'_>,
    plugin_object: &Object,
    name_suffix: Option<u32>,
) -> Result<(), Refusal> {
    let layout = evidence::decide(&evidence::Evidence::gather(&library, name_suffix))
        .map_err(|reason| Refusal::new(&library, reason))?;
    let pabi = PrivateAbi::supported(layout.pabi).ok_or_else(Refusal::internal)?;
    let register_driver = need(&library, pabi, pabi.register_driver)?;
    let init_and_alloc_context = need(&library, pabi, c"_verbs_init_and_alloc_context")?;
    let set_ops = need(&library, pabi, c"verbs_set_ops")?;
    let uninit_context = need(&library, pabi, c"verbs_uninit_context")?;
    let allow = library.symbol(c"verbs_allow_disassociate_destroy", pabi.version);
    let init_cq = library.symbol(c"verbs_init_cq", pabi.version);
    let open_device = library.symbol(c"verbs_open_device", pabi.version);

    // SAFETY: each symbol was found under libibverbs's private symbol version of a supported
    // layout, in whose headers they have these types.
    let (register_driver, lib) = unsafe {
        (
            core::mem::transmute::<*mut c_void, RegisterDriver>(register_driver),
            LibIbverbs {
                layout,
                init_and_alloc_context: core::mem::transmute::<*mut c_void, InitAndAllocContext>(
                    init_and_alloc_context,
                ),
                set_ops: core::mem::transmute::<*mut c_void, SetOps>(set_ops),
                uninit_context: core::mem::transmute::<*mut c_void, UninitContext>(uninit_context),
                allow_disassociate_destroy: allow
                    .map_or(core::ptr::null(), |p| p.cast_const().cast::<bool>()),
                init_cq: init_cq.map(|f| core::mem::transmute::<*mut c_void, InitCq>(f)),
                open_device: open_device
                    .map(|f| core::mem::transmute::<*mut c_void, OpenDevice>(f)),
            },
        )
    };
    library::set_libibverbs(Box::leak(Box::new(lib)));
    // A provider is never unloaded. The leaked handle keeps libibverbs loaded, too, even if
    // an application closes it.
    library.leak();
    log_registration(layout);
    let served = served::served_devices(plugin_object.name.to_bytes());
    // SAFETY: the operations live as long as the process; libibverbs keeps a
    // pointer to them.
    unsafe {
        if served.rxe {
            register_driver(&DEVICE_OPS.0);
        }
        if served.mlx5 {
            register_driver(&MLX5_DEVICE_OPS.0);
        }
    }
    Ok(())
}

fn log_registration(layout: &Layout) {
    crate::diag::init();
    tracing::info!(%layout, pabi = layout.pabi, "registered with libibverbs");
}
