//! Mapping a queue that the driver has announced.

use std::os::fd::AsFd;

use ring::{Mapping, Ring};
use uverbs::Context;

use crate::CreateError;
use crate::abi::MmapInfo;

/// Maps the queue that `info` announces and checks its geometry.
pub(crate) fn map_ring(
    context: &Context,
    info: &MmapInfo,
    entry_size: usize,
    queue: &'static str,
) -> Result<Ring, CreateError> {
    let mapping = Mapping::new(context.as_fd(), info.offset, info.size as usize)
        .map_err(|error| CreateError::Map { queue, error })?;
    Ring::new(mapping, entry_size).map_err(|error| CreateError::Geometry { queue, error })
}
