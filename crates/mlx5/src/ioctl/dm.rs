//! Location of device memory, by outputs and a query that mlx5_ib adds.

use uverbs::driver::{DriverInput, DriverMethod, DriverOutput, Ioctl};
use uverbs::{Context, ContextRef, Dm, DmHandle, Error};
use zerocopy::IntoBytes;

use super::ids;

static DM_QUERY: DriverMethod = DriverMethod {
    name: "DM_QUERY",
    object: "device memory",
    object_id: uverbs::abi::ids::OBJECT_DM,
    method_id: ids::METHOD_DM_QUERY,
};

static DM_MAP_OP_ADDR: DriverMethod = DriverMethod {
    name: "DM_MAP_OP_ADDR",
    object: "device memory",
    object_id: uverbs::abi::ids::OBJECT_DM,
    method_id: ids::METHOD_DM_MAP_OP,
};

/// Maps device memory for an operation that stores to it perform. Returns the location.
///
/// # Errors
/// EOPNOTSUPP if the device does not have the operation.
pub fn map_operation(context: &Context, dm: DmHandle, operation: u8) -> Result<DmLocation, Error> {
    let mut location = DmLocation::default();
    let operation = [operation];
    // SAFETY: the only input is a number of an enumeration.
    let mut ioctl = unsafe { Ioctl::driver(&DM_MAP_OP_ADDR) };
    ioctl.acts_on(dm.0);
    ioctl.handle(ids::ATTR_MAP_OP_HANDLE, dm.0);
    ioctl.input(ids::ATTR_MAP_OP_OPERATION, &operation);
    let outputs = [
        ioctl.output(
            ids::ATTR_MAP_OP_START_OFFSET,
            location.start_offset.as_mut_bytes(),
        ),
        ioctl.output(
            ids::ATTR_MAP_OP_PAGE_INDEX,
            location.page_index.as_mut_bytes(),
        ),
    ];
    ioctl.run(context)?.all_written(&outputs)?;
    Ok(location)
}

/// Location of device memory, as the driver reports it: untrusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmLocation {
    /// Start address; only the offset within its page is meaningful.
    pub start_offset: u64,
    /// Page index that its mmap offset contains.
    pub page_index: u16,
}

/// Allocates `length` bytes of device memory, aligned to `2^log_alignment`
/// bytes.
///
/// # Errors
/// As [`Dm::alloc`].
pub fn alloc<C: ContextRef>(
    context: &C,
    length: u64,
    log_alignment: u32,
) -> Result<(Dm<C>, DmLocation), Error> {
    let mut location = DmLocation::default();
    let outputs = [
        DriverOutput {
            attr_id: ids::ATTR_ALLOC_DM_START_OFFSET,
            buffer: location.start_offset.as_mut_bytes(),
        },
        DriverOutput {
            attr_id: ids::ATTR_ALLOC_DM_PAGE_INDEX,
            buffer: location.page_index.as_mut_bytes(),
        },
    ];
    let dm = Dm::alloc(context, length, log_alignment, None, outputs)?;
    Ok((dm, location))
}

/// Allocates memory of a kind for flow steering (`enum mlx5_ib_uapi_dm_type`), which only
/// the device accesses. Returns its address in the device as well.
///
/// # Errors
/// EOPNOTSUPP if the device's steering is not the program's; EINVAL for a length or an
/// alignment that it does not have; EPERM.
pub fn alloc_steering<C: ContextRef>(
    context: &C,
    kind: u32,
    length: u64,
    log_alignment: u32,
) -> Result<(Dm<C>, u64), Error> {
    let mut address = 0u64;
    let kind = DriverInput {
        attr_id: ids::ATTR_ALLOC_DM_TYPE,
        value: kind,
    };
    let output = DriverOutput {
        attr_id: ids::ATTR_ALLOC_DM_START_OFFSET,
        buffer: address.as_mut_bytes(),
    };
    let dm = Dm::alloc(context, length, log_alignment, Some(kind), [output])?;
    Ok((dm, address))
}

/// Queries the location of device memory and its length in bytes.
///
/// # Errors
/// ENOENT if the handle does not exist; EPROTONOSUPPORT if the kernel does not
/// support the query (before Linux 5.13).
pub fn query(context: &Context, dm: DmHandle) -> Result<(DmLocation, u64), Error> {
    let (mut location, mut length) = (DmLocation::default(), 0u64);
    // SAFETY: no input is added.
    let mut ioctl = unsafe { Ioctl::driver(&DM_QUERY) };
    ioctl.acts_on(dm.0);
    ioctl.handle(ids::ATTR_QUERY_DM_HANDLE, dm.0);
    let outputs = [
        ioctl.output(
            ids::ATTR_QUERY_DM_START_OFFSET,
            location.start_offset.as_mut_bytes(),
        ),
        ioctl.output(
            ids::ATTR_QUERY_DM_PAGE_INDEX,
            location.page_index.as_mut_bytes(),
        ),
        ioctl.output(ids::ATTR_QUERY_DM_LENGTH, length.as_mut_bytes()),
    ];
    ioctl.run(context)?.all_written(&outputs)?;
    Ok((location, length))
}
