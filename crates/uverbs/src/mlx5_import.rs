//! Queries of mlx5_ib about objects that another process created through a
//! shared file.

use zerocopy::IntoBytes;

use crate::abi::{ids, mlx5};
use crate::command::Ioctl;
use crate::{Command, Context, ContextInfo, Error, PdHandle};

/// Returns what [`Context::get_context`] returned, and the driver's answer, for
/// a file whose context was created elsewhere. `answer` is cleared first, so
/// what a driver with a shorter answer does not write is zero.
///
/// # Errors
/// EINVAL if the file has no context yet; EPROTONOSUPPORT if the kernel does
/// not support the query (before Linux 5.9); EIO if the device is gone.
pub fn query_context(context: &Context, answer: &mut [u8]) -> Result<ContextInfo, Error> {
    context.query_context_of(Some((mlx5::ATTR_QUERY_CONTEXT_RESP, answer)))
}

/// Returns the device's number of a protection domain.
///
/// # Errors
/// ENOENT if the handle does not exist; EPROTONOSUPPORT if the kernel does not
/// support the query (before Linux 5.9).
pub fn query_pd(context: &Context, pd: PdHandle) -> Result<u32, Error> {
    let mut number = 0u32;
    let mut ioctl = Ioctl::new(Command::QueryPd, ids::OBJECT_PD, mlx5::METHOD_PD_QUERY);
    ioctl.about(pd.0);
    ioctl.handle(mlx5::ATTR_QUERY_PD_HANDLE, pd.0);
    let slot = ioctl.output(mlx5::ATTR_QUERY_PD_NUMBER, number.as_mut_bytes());
    ioctl.run(context)?.written(slot)?;
    Ok(number)
}
