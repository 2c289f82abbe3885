//! Opening and closing a device.

use core::ffi::{c_int, c_void};
use core::mem::size_of;
use core::ptr;
use std::sync::OnceLock;

use crate::abi::{ibv_context, ibv_device, verbs_device};
use crate::context::{ContextWithState, VerbsContext};
use crate::entry;
use crate::errno::Errno;
use crate::layout::{self, Layout};
use crate::library::{OpsTable, libibverbs};
use crate::mlx5::Mlx5;
use crate::mlx5::memory::ContextMemory;
use crate::mlx5dv::abi::{CONTEXT_DEVX, mlx5dv_context_attr};
use crate::mlx5dv::crypto::LoginSession;
use crate::mlx5dv::devx::SharedUar;
use crate::mlx5dv::reserved::ReservedQpns;
use crate::ops;
use crate::rxe::Rxe;
use uverbs::ContextInfo;
use uverbs::discovery::DriverId;

/// `RDMA_DRIVER_RXE` of `<rdma/ib_user_ioctl_verbs.h>`.
pub const RDMA_DRIVER_RXE: u32 = 14;
/// `RDMA_DRIVER_MLX5` of the same.
pub const RDMA_DRIVER_MLX5: u32 = 1;

/// Properties of a kind of device, for `open`.
struct Kind {
    driver_id: DriverId,
    /// Its operations in the order of libibverbs, made when the first device is opened.
    ops: fn() -> &'static OpsTable,
    /// Creates the kernel's context and the provider's state of it.
    make: fn(&mut VerbsContext) -> Result<ContextInfo, Errno>,
}

const RXE: Kind = Kind {
    driver_id: DriverId(RDMA_DRIVER_RXE),
    ops: || {
        static OPS: OnceLock<OpsTable> = OnceLock::new();
        OPS.get_or_init(|| ops::table::<Rxe>(layout::current()))
    },
    make: |state| {
        let result = state.uverbs.get_context(uverbs::Udata::none());
        result.map_err(|error| {
            tracing::warn!(%error, "cannot open the device");
            error.into()
        })
    },
};

const MLX5: Kind = Kind {
    driver_id: DriverId(RDMA_DRIVER_MLX5),
    ops: || {
        static OPS: OnceLock<OpsTable> = OnceLock::new();
        OPS.get_or_init(|| ops::table::<Mlx5>(layout::current()))
    },
    make: |state| {
        mlx5(state, |context| {
            mlx5::DeviceContext::open_with(context, mlx5::Devx::IfOffered)
        })
    },
};

/// With DevX, which `mlx5dv_open_device` requested.
const DEVX_MLX5: Kind = Kind {
    make: |state| {
        mlx5(state, |context| {
            mlx5::DeviceContext::open_with(context, mlx5::Devx::Needed)
        })
    },
    ..MLX5
};

/// With a kernel context that another process created.
const IMPORTED_MLX5: Kind = Kind {
    make: |state| mlx5(state, mlx5::DeviceContext::import),
    ..MLX5
};

fn mlx5(
    state: &mut VerbsContext,
    by: fn(&uverbs::Context) -> Result<(ContextInfo, mlx5::DeviceContext), mlx5::CreateError>,
) -> Result<ContextInfo, Errno> {
    match by(&state.uverbs) {
        Ok((info, device)) => {
            state.mlx5 = Some(device);
            Ok(info)
        }
        Err(error) => {
            tracing::warn!(%error, "cannot open the device");
            Err(error.into())
        }
    }
}

/// Bytes allocated behind the provider's state, so that a `verbs_context` larger
/// than the table says is detected before it is written past the end.
const SLACK: usize = 512;

/// `verbs_device_ops.alloc_context`: opens an rxe device over `cmd_fd`, which it
/// owns: on failure it is closed, NULL is returned and errno set.
pub unsafe extern "C" fn alloc_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    _private_data: *mut c_void,
) -> *mut c_void {
    // SAFETY: libibverbs passes a device of ours and a descriptor that is now
    // ours.
    entry::pointer(|| unsafe { open(&RXE, device, cmd_fd) })
}

/// As [`alloc_context`], of an mlx5 device. `private_data` are the attributes of
/// `mlx5dv_open_device`, which has checked them, or null.
pub unsafe extern "C" fn alloc_mlx5_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    private_data: *mut c_void,
) -> *mut c_void {
    // SAFETY: as in `alloc_context`.
    entry::pointer(|| unsafe {
        let attr = private_data.cast::<mlx5dv_context_attr>().as_ref();
        let needs_devx = attr.is_some_and(|attr| attr.flags & CONTEXT_DEVX != 0);
        let kind = if needs_devx { &DEVX_MLX5 } else { &MLX5 };
        open(kind, device, cmd_fd)
    })
}

/// `verbs_device_ops.import_context`: opens an mlx5 device over `cmd_fd`, in
/// which another process has made the kernel's context. Owns `cmd_fd`, as
/// [`alloc_context`] does.
pub unsafe extern "C" fn import_mlx5_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
) -> *mut c_void {
    // SAFETY: as in `alloc_context`.
    entry::pointer(|| unsafe { open(&IMPORTED_MLX5, device, cmd_fd) })
}

/// # Safety
/// `device` is a live `verbs_device` of ours, `cmd_fd` an open uverbs file.
unsafe fn open(kind: &Kind, device: *mut ibv_device, cmd_fd: c_int) -> Result<*mut c_void, Errno> {
    let lib = libibverbs().ok_or(Errno::IO)?;
    let layout = layout::current();
    let size = layout.context_offset() + size_of::<ContextWithState>() + SLACK;
    // SAFETY: verbs_context at offset 0 of an allocation with room for it.
    let vctx = unsafe {
        (lib.init_and_alloc_context)(device, cmd_fd, size, ptr::null_mut(), kind.driver_id.0)
    };
    if vctx.is_null() {
        return Err(Errno::last()); // has closed cmd_fd
    }
    // From here on `undo` closes cmd_fd, through libibverbs.
    // SAFETY: init_and_alloc_context has just made it; it is not used yet.
    let undo = |errno: Errno| unsafe {
        errno.set();
        (lib.uninit_context)(vctx);
        libc::free(vctx);
        errno
    };

    // SAFETY: inside the allocation, by the layout.
    let public = unsafe { vctx.byte_add(layout.context_offset()).cast::<ibv_context>() };
    // SAFETY: the word before `ibv_context` is verbs_context.sz; both are
    // inside the allocation and were written or zeroed by libibverbs.
    let as_expected = unsafe {
        public.cast::<usize>().sub(1).read() == layout.context_size()
            && (*public).device == device
            && (*public).cmd_fd == cmd_fd
            && (*public).abi_compat as usize == usize::MAX
    };
    if !as_expected {
        report_layout_mismatch(layout, "verbs_context");
        return Err(undo(Errno(libc::EPROTO)));
    }

    let with_state = public.cast::<ContextWithState>();
    // SAFETY: cmd_fd is open as long as this context is: verbs_uninit_context
    // closes it, after which the state is not used. The memory behind the
    // public context is ours and uninitialised (zeroed).
    unsafe {
        (&raw mut (*with_state).state).write(VerbsContext {
            uverbs: uverbs::Context::from_borrowed_fd(
                Box::new(uverbs::kernel::RealKernel),
                cmd_fd,
                kind.driver_id,
            ),
            mlx5: None,
            reserved: ReservedQpns::default(),
            session: LoginSession::default(),
            shared_uar: SharedUar::default(),
            allocators: ContextMemory::default(),
        });
    }
    // SAFETY: the state was written above.
    let state = unsafe { &mut (*with_state).state };
    let info = match (kind.make)(state) {
        Ok(info) => info,
        Err(errno) => {
            // SAFETY: initialised above, not used afterwards.
            unsafe { end(state) };
            return Err(undo(errno));
        }
    };
    let ops = (kind.ops)();
    // SAFETY: the context is ours until we return it; `device` is the first
    // member of a verbs_device.
    unsafe {
        (*public).num_comp_vectors = c_int::try_from(info.num_comp_vectors).unwrap_or(c_int::MAX);
        (*device.cast::<verbs_device>()).core_support = info.core_support;
        (lib.set_ops)(vctx, ops.as_ptr());
    }
    // SAFETY: set_ops has filled the public operations.
    if !unsafe { ops.is_installed(layout, &(*public).ops) } {
        report_layout_mismatch(layout, "verbs_context_ops");
        // SAFETY: initialised above, not used afterwards.
        unsafe { end(state) };
        return Err(undo(Errno(libc::EPROTO)));
    }
    // async_fd stays -1: libibverbs then makes the event file itself.
    tracing::debug!(fd = cmd_fd, "device opened");
    Ok(vctx)
}

/// Drops the provider's state of a context.
///
/// # Safety
/// It is initialised, its file is open, and it is not used afterwards.
unsafe fn end(state: *mut VerbsContext) {
    // SAFETY: as the caller says.
    unsafe {
        (*state).reserved.clear();
        (*state).session.end();
        (*state).shared_uar.end();
        if let Some(device) = &(*state).mlx5 {
            device.close(&(*state).uverbs);
        }
        ptr::drop_in_place(state);
    }
}

/// Writes one line to stderr: the release is not what its symbols and its file
/// name say. It is too late to leave the device to the stock provider.
fn report_layout_mismatch(layout: &Layout, structure: &str) {
    use std::io::Write;
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let line = format!(
            "ringverbs: device not opened: {structure} is not that of {layout}, \
             which this libibverbs appears to be; set RDMAV_DRIVERS=rxe to do without ringverbs\n"
        );
        let _ = std::io::stderr().write_all(line.as_bytes());
    });
}

/// `verbs_context_ops.free_context`. Objects that are still open are the
/// application's error; the kernel destroys them with the file.
pub unsafe extern "C" fn free_context(context: *mut ibv_context) {
    entry::unit(|| {
        let Some(lib) = libibverbs() else { return };
        // SAFETY: libibverbs passes a context that alloc_context made, once.
        unsafe {
            let vctx = context
                .byte_sub(layout::current().context_offset())
                .cast::<c_void>();
            end(&raw mut (*context.cast::<ContextWithState>()).state);
            (lib.uninit_context)(vctx); // closes the files
            libc::free(vctx); // libibverbs allocated it with calloc
        }
    });
}
