//! Queries of objects that another process created through a shared file.

use uverbs::driver::{DriverInput, DriverMethod, DriverOutput, Ioctl};
use uverbs::{Context, ContextInfo, Error, PdHandle};
use zerocopy::IntoBytes;

use super::ids;

static PD_QUERY: DriverMethod = DriverMethod {
    name: "PD_QUERY",
    object: "protection domain",
    object_id: uverbs::abi::ids::OBJECT_PD,
    method_id: ids::METHOD_PD_QUERY,
};

static DATA_DIRECT_PATH: DriverMethod = DriverMethod {
    name: "GET_DATA_DIRECT_SYSFS_PATH",
    object: "device",
    object_id: uverbs::abi::ids::OBJECT_DEVICE,
    method_id: ids::METHOD_DATA_DIRECT_PATH,
};

static QUERY_PORT: DriverMethod = DriverMethod {
    name: "QUERY_PORT",
    object: "device",
    object_id: uverbs::abi::ids::OBJECT_DEVICE,
    method_id: ids::METHOD_QUERY_DRIVER_PORT,
};

/// Queries the driver's attributes of a port, `struct mlx5_ib_uapi_query_port`; its first word
/// is the mask of valid members.
///
/// # Errors
/// EINVAL for a port that does not exist; EPROTONOSUPPORT before Linux 5.14.
pub fn query_port(context: &Context, port: u32, answer: &mut [u8]) -> Result<(), Error> {
    // SAFETY: the only input is a number.
    let mut ioctl = unsafe { Ioctl::driver(&QUERY_PORT) };
    ioctl.u32(ids::ATTR_QUERY_DRIVER_PORT_NUMBER, port);
    let slot = ioctl.output(ids::ATTR_QUERY_DRIVER_PORT, answer);
    ioctl.run(context)?.written(slot)
}

/// Queries the sysfs path of the PCI function for the direct path to a GPU's memory,
/// NUL-terminated.
///
/// # Errors
/// ENODEV if the device has none, ENOSPC if there is no room; EPROTONOSUPPORT before
/// Linux 6.12.
pub fn data_direct_path(context: &Context, path: &mut [u8]) -> Result<(), Error> {
    // SAFETY: no input is added.
    let mut ioctl = unsafe { Ioctl::driver(&DATA_DIRECT_PATH) };
    let slot = ioctl.output(ids::ATTR_DATA_DIRECT_PATH, path);
    ioctl.run(context)?.written(slot)
}

/// Returns the access of a DMA buffer's region by that path, as
/// [`DmabufMrInit::driver_access`](uverbs::DmabufMrInit) takes it.
pub fn data_direct_access(access: u32) -> DriverInput {
    DriverInput {
        attr_id: ids::ATTR_REG_DMABUF_MR_ACCESS,
        value: access,
    }
}

/// Returns what [`Context::get_context`] returned, and the driver's answer, for
/// a file whose context was created elsewhere. `answer` is cleared first, so
/// what a driver with a shorter answer does not write is zero.
///
/// # Errors
/// EINVAL if the file has no context yet; EPROTONOSUPPORT if the kernel does
/// not support the query (before Linux 5.9); EIO if the device was removed.
pub fn query_context(context: &Context, answer: &mut [u8]) -> Result<ContextInfo, Error> {
    context.query_context_with([DriverOutput {
        attr_id: ids::ATTR_QUERY_CONTEXT_RESP,
        buffer: answer,
    }])
}

/// Returns the device's number of a protection domain.
///
/// # Errors
/// ENOENT if the handle does not exist; EPROTONOSUPPORT if the kernel does not
/// support the query (before Linux 5.9).
pub fn query_pd(context: &Context, pd: PdHandle) -> Result<u32, Error> {
    let mut number = 0u32;
    // SAFETY: no input is added.
    let mut ioctl = unsafe { Ioctl::driver(&PD_QUERY) };
    ioctl.acts_on(pd.0);
    ioctl.handle(ids::ATTR_QUERY_PD_HANDLE, pd.0);
    let slot = ioctl.output(ids::ATTR_QUERY_PD_NUMBER, number.as_mut_bytes());
    ioctl.run(context)?.written(slot)?;
    Ok(number)
}
