//! DevX: firmware commands, checked by the driver.
//!
//! A context must have been opened for it ([`Devx`](crate::Devx)); otherwise the driver
//! refuses (EINVAL). If the device refuses a command (EREMOTEIO), its answer is in the
//! output: status and syndrome.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use uverbs::driver::{DriverMethod, Ioctl, Owned};
use uverbs::{Context, ContextRef, Error};
use zerocopy::IntoBytes;

use super::ids::*;

methods! {
    DEVX_OTHER: "device", OBJECT_DEVX, METHOD_DEVX_OTHER;
    DEVX_QUERY_EQN: "device", OBJECT_DEVX, METHOD_DEVX_QUERY_EQN;
    DEVX_SUBSCRIBE_EVENT: "device", OBJECT_DEVX, METHOD_DEVX_SUBSCRIBE_EVENT;
    DEVX_OBJ_CREATE: "DevX object", OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_CREATE;
    DEVX_OBJ_DESTROY: "DevX object", OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_DESTROY;
    DEVX_OBJ_MODIFY: "DevX object", OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_MODIFY;
    DEVX_OBJ_QUERY: "DevX object", OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_QUERY;
    DEVX_OBJ_ASYNC_QUERY: "DevX object", OBJECT_DEVX_OBJ, METHOD_DEVX_OBJ_ASYNC_QUERY;
    DEVX_UMEM_REG: "DevX memory", OBJECT_DEVX_UMEM, METHOD_DEVX_UMEM_REG;
    DEVX_UMEM_DEREG: "DevX memory", OBJECT_DEVX_UMEM, METHOD_DEVX_UMEM_DEREG;
    DEVX_ASYNC_CMD_FD_ALLOC: "DevX channel", OBJECT_DEVX_ASYNC_CMD_FD, NAMESPACE;
    DEVX_ASYNC_EVENT_FD_ALLOC: "DevX channel", OBJECT_DEVX_ASYNC_EVENT_FD, NAMESPACE;
    VAR_OBJ_ALLOC: "VAR", OBJECT_VAR, METHOD_VAR_ALLOC;
    VAR_OBJ_DESTROY: "VAR", OBJECT_VAR, METHOD_VAR_DESTROY;
    PP_OBJ_ALLOC: "packet pacing entry", OBJECT_PP, METHOD_PP_ALLOC;
    PP_OBJ_DESTROY: "packet pacing entry", OBJECT_PP, METHOD_PP_DESTROY;
}

/// Objects that are destroyed when they are dropped.
macro_rules! objects {
    ($($type:ident $kind:ident $handle:ident, $doc:literal;)+) => {$(
        #[doc = concat!($doc, ", destroyed when it is dropped.")]
        #[derive(Debug)]
        pub struct $type<C: ContextRef> {
            owned: Owned<C, $kind>,
        }

        impl<C: ContextRef> $type<C> {
            /// Takes ownership of the object with number `handle`.
            pub fn from_handle(context: &C, handle: $handle) -> Self {
                Self {
                    owned: Owned::new(context, handle),
                }
            }
        }

        uverbs::owned_methods!($type, $handle, (), "Other objects may still use it: EBUSY.");
    )+};
}

kinds! {
    DevxObjectKind DevxHandle, "an object of the device", DEVX_OBJ_DESTROY;
    UmemKind UmemHandle, "memory that commands name by a number", DEVX_UMEM_DEREG;
    VarKind VarHandle, "a page for virtio doorbells", VAR_OBJ_DESTROY;
    PacketPacingKind PacketPacingHandle, "a packet pacing entry", PP_OBJ_DESTROY;
}

objects! {
    DevxObject DevxObjectKind DevxHandle, "An object of the device";
    Umem UmemKind UmemHandle, "Memory that commands name by a number";
    Var VarKind VarHandle, "A page for virtio doorbells";
    PacketPacing PacketPacingKind PacketPacingHandle, "A packet pacing entry";
}

/// Runs a command that belongs to no object.
///
/// # Errors
/// EINVAL for a command that the driver does not permit; EREMOTEIO if the device refuses it,
/// with its answer in `output`.
///
/// # Safety
/// The device may do what the command says. `input` is readable and `output` writable, or
/// not mapped (EFAULT); they may overlap. No reference to `output` is used before the
/// function returns.
pub unsafe fn general(
    context: &Context,
    input: *const [u8],
    output: *mut [u8],
) -> Result<(), Error> {
    // SAFETY: as the caller says.
    let mut ioctl = unsafe { Ioctl::driver(&DEVX_OTHER) };
    // SAFETY: as the caller says.
    unsafe {
        ioctl.input_raw(ATTR_DEVX_OTHER_IN, input);
        ioctl.output_raw(ATTR_DEVX_OTHER_OUT, output);
    }
    ioctl.run(context).map(drop)
}

/// Returns the number of the event queue of a completion vector.
///
/// # Errors
/// EINVAL if there is no such vector.
pub fn query_eqn(context: &Context, vector: u32) -> Result<u32, Error> {
    let mut number = 0u32;
    // SAFETY: the only input is a number.
    let mut ioctl = unsafe { Ioctl::driver(&DEVX_QUERY_EQN) };
    ioctl.u32(ATTR_DEVX_QUERY_EQN_VECTOR, vector);
    let slot = ioctl.output(ATTR_DEVX_QUERY_EQN_NUMBER, number.as_mut_bytes());
    ioctl.run(context)?.written(slot)?;
    Ok(number)
}

impl<C: ContextRef> DevxObject<C> {
    /// Creates an object by a command.
    ///
    /// # Errors
    /// As [`general`].
    ///
    /// # Safety
    /// As [`general`]; the device may do what the command says until the object is
    /// destroyed.
    pub unsafe fn create(
        context: &C,
        input: *const [u8],
        output: *mut [u8],
    ) -> Result<Self, Error> {
        // SAFETY: as the caller says.
        let mut ioctl = unsafe { Ioctl::driver(&DEVX_OBJ_CREATE) };
        let object = ioctl.new_object(ATTR_DEVX_OBJ_CREATE_HANDLE);
        // SAFETY: as the caller says.
        unsafe {
            ioctl.input_raw(ATTR_DEVX_OBJ_CREATE_IN, input);
            ioctl.output_raw(ATTR_DEVX_OBJ_CREATE_OUT, output);
        }
        let handle = DevxHandle(ioctl.run(context)?.handle(object)?);
        Ok(Self {
            owned: Owned::new(context, handle),
        })
    }
}

/// Queries an object by a command. `handle` is that of a [`DevxObject`], or of a
/// completion queue, queue pair, shared receive queue, work queue or indirection table
/// of verbs.
///
/// # Errors
/// As [`general`].
///
/// # Safety
/// As [`general`].
pub unsafe fn query(
    context: &Context,
    handle: u32,
    input: *const [u8],
    output: *mut [u8],
) -> Result<(), Error> {
    // SAFETY: as the caller says.
    unsafe { act(context, &DEVX_OBJ_QUERY, handle, input, output) }
}

/// Modifies an object by a command; `handle` as for [`query`].
///
/// # Errors
/// As [`general`].
///
/// # Safety
/// As [`general`].
pub unsafe fn modify(
    context: &Context,
    handle: u32,
    input: *const [u8],
    output: *mut [u8],
) -> Result<(), Error> {
    // SAFETY: as the caller says.
    unsafe { act(context, &DEVX_OBJ_MODIFY, handle, input, output) }
}

/// # Safety
/// As [`general`].
unsafe fn act(
    context: &Context,
    method: &'static DriverMethod,
    handle: u32,
    input: *const [u8],
    output: *mut [u8],
) -> Result<(), Error> {
    // SAFETY: as the caller says.
    let mut ioctl = unsafe { Ioctl::driver(method) };
    ioctl.acts_on(handle);
    // Query and modify have the same attribute numbers.
    ioctl.handle(ATTR_DEVX_OBJ_QUERY_HANDLE, handle);
    // SAFETY: as the caller says.
    unsafe {
        ioctl.input_raw(ATTR_DEVX_OBJ_QUERY_IN, input);
        ioctl.output_raw(ATTR_DEVX_OBJ_QUERY_OUT, output);
    }
    ioctl.run(context).map(drop)
}

/// Queries an object; the answer, of `length` bytes at most, is read from `channel`
/// after `wr_id`.
///
/// # Errors
/// As [`general`]; EAGAIN while too many queries are outstanding on the channel.
///
/// # Safety
/// The device may do what the command says.
pub unsafe fn query_async(
    context: &Context,
    object: DevxHandle,
    input: &[u8],
    length: usize,
    wr_id: u64,
    channel: BorrowedFd<'_>,
) -> Result<(), Error> {
    // SAFETY: as the caller says; the length is of the kernel's own memory.
    let mut ioctl = unsafe { Ioctl::driver(&DEVX_OBJ_ASYNC_QUERY) };
    ioctl.acts_on(object.0);
    ioctl.handle(ATTR_DEVX_ASYNC_QUERY_HANDLE, object.0);
    ioctl.input(ATTR_DEVX_ASYNC_QUERY_IN, input);
    ioctl.constant(ATTR_DEVX_ASYNC_QUERY_LENGTH, length as u64);
    ioctl.u64(ATTR_DEVX_ASYNC_QUERY_WR_ID, wr_id);
    ioctl.fd(ATTR_DEVX_ASYNC_QUERY_FD, channel);
    ioctl.run(context).map(drop)
}

/// Memory for [`Umem::register`].
#[derive(Clone, Copy, Debug)]
pub struct UmemInit<'a> {
    /// Its first byte.
    pub addr: u64,
    /// Its length in bytes.
    pub length: u64,
    /// The bits of `enum ibv_access_flags`.
    pub access: u32,
    /// Page sizes that the commands allow, as bits; `None`: any.
    pub page_sizes: Option<u64>,
    /// A DMA buffer, of which `addr` is an offset.
    pub dmabuf: Option<BorrowedFd<'a>>,
}

impl<C: ContextRef> Umem<C> {
    /// Registers memory. Returns it with the number that commands use.
    ///
    /// # Errors
    /// EFAULT for addresses that are not mapped, EINVAL for access or page sizes that
    /// are not possible, EOPNOTSUPP without DMA buffers.
    ///
    /// # Safety
    /// The device may access the memory as commands tell it to, until it is
    /// deregistered.
    pub unsafe fn register(context: &C, init: &UmemInit<'_>) -> Result<(Self, u32), Error> {
        let mut number = 0u32;
        // SAFETY: as the caller says.
        let mut ioctl = unsafe { Ioctl::driver(&DEVX_UMEM_REG) };
        let object = ioctl.new_object(ATTR_DEVX_UMEM_REG_HANDLE);
        ioctl.u64(ATTR_DEVX_UMEM_REG_ADDR, init.addr);
        ioctl.u64(ATTR_DEVX_UMEM_REG_LEN, init.length);
        ioctl.u32(ATTR_DEVX_UMEM_REG_ACCESS, init.access);
        if let Some(fd) = init.dmabuf {
            ioctl.fd(ATTR_DEVX_UMEM_REG_DMABUF, fd);
        }
        if let Some(sizes) = init.page_sizes {
            ioctl.u64(ATTR_DEVX_UMEM_REG_PAGE_SIZES, sizes);
        }
        let slot = ioctl.output(ATTR_DEVX_UMEM_REG_NUMBER, number.as_mut_bytes());
        let answer = ioctl.run(context)?;
        let owned = Owned::new(context, UmemHandle(answer.handle(object)?));
        answer.written(slot)?;
        Ok((Self { owned }, number))
    }
}

/// Creates a channel for [`query_async`], a descriptor that the caller closes.
///
/// # Errors
/// EMFILE, ENOMEM.
pub fn command_channel(context: &Context) -> Result<RawFd, Error> {
    // SAFETY: no input is added.
    let mut ioctl = unsafe { Ioctl::driver(&DEVX_ASYNC_CMD_FD_ALLOC) };
    let fd = ioctl.new_object(NAMESPACE);
    ioctl.run(context)?.fd(fd)
}

/// Creates a channel for events, a descriptor that the caller closes. `flags` are those
/// of `enum mlx5_ib_uapi_devx_create_event_channel_flags`: with bit 0 only cookies are
/// read from it.
///
/// # Errors
/// EMFILE, ENOMEM, EINVAL for other flags.
pub fn event_channel(context: &Context, flags: u32) -> Result<RawFd, Error> {
    // SAFETY: the only input are flags.
    let mut ioctl = unsafe { Ioctl::driver(&DEVX_ASYNC_EVENT_FD_ALLOC) };
    let fd = ioctl.new_object(NAMESPACE);
    ioctl.u32(ATTR_DEVX_EVENT_FD_FLAGS, flags);
    ioctl.run(context)?.fd(fd)
}

/// The destination of an event.
#[derive(Clone, Copy, Debug)]
pub enum EventTarget<'a> {
    /// Read from the channel, with this cookie.
    Cookie(u64),
    /// Signals this eventfd.
    EventFd(BorrowedFd<'a>),
}

/// Subscribes a channel to events of an object, or to events of none. `events` are
/// their numbers, each of 16 bits in host order.
///
/// # Errors
/// EINVAL for events that the device does not have, or that belong to no object of
/// that kind; EBUSY.
pub fn subscribe(
    context: &Context,
    channel: BorrowedFd<'_>,
    object: Option<DevxHandle>,
    events: &[u8],
    target: EventTarget<'_>,
) -> Result<(), Error> {
    // SAFETY: the descriptors are borrowed; the rest are numbers.
    let mut ioctl = unsafe { Ioctl::driver(&DEVX_SUBSCRIBE_EVENT) };
    ioctl.fd(ATTR_DEVX_SUBSCRIBE_CHANNEL, channel);
    if let Some(object) = object {
        ioctl.acts_on(object.0);
        ioctl.handle(ATTR_DEVX_SUBSCRIBE_OBJECT, object.0);
    }
    ioctl.input(ATTR_DEVX_SUBSCRIBE_EVENTS, events);
    match target {
        EventTarget::Cookie(cookie) => ioctl.u64(ATTR_DEVX_SUBSCRIBE_COOKIE, cookie),
        EventTarget::EventFd(fd) => ioctl.u32(ATTR_DEVX_SUBSCRIBE_EVENTFD, fd.as_raw_fd() as u32),
    };
    ioctl.run(context).map(drop)
}

/// Location of a [`Var`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VarLocation {
    /// Offset in the command descriptor from which it is mapped.
    pub mmap_offset: u64,
    /// Bytes to map.
    pub mmap_length: u32,
    /// Number that commands name it by.
    pub page_id: u32,
}

impl<C: ContextRef> Var<C> {
    /// Allocates a page, with flags of later kernels (`enum mlx5_ib_uapi_var_alloc_flags`).
    ///
    /// # Errors
    /// EOPNOTSUPP if the device has none, ENOSPC if none is left; EPROTONOSUPPORT if the
    /// kernel has no flags.
    pub fn alloc(context: &C, flags: u32) -> Result<(Self, VarLocation), Error> {
        let mut location = VarLocation::default();
        // SAFETY: no input is an address.
        let mut ioctl = unsafe { Ioctl::driver(&VAR_OBJ_ALLOC) };
        if flags != 0 {
            ioctl.u32(ATTR_VAR_ALLOC_FLAGS, flags);
        }
        let object = ioctl.new_object(ATTR_VAR_ALLOC_HANDLE);
        let outputs = [
            ioctl.output(
                ATTR_VAR_ALLOC_MMAP_OFFSET,
                location.mmap_offset.as_mut_bytes(),
            ),
            ioctl.output(
                ATTR_VAR_ALLOC_MMAP_LENGTH,
                location.mmap_length.as_mut_bytes(),
            ),
            ioctl.output(ATTR_VAR_ALLOC_PAGE_ID, location.page_id.as_mut_bytes()),
        ];
        let answer = ioctl.run(context)?;
        let owned = Owned::new(context, VarHandle(answer.handle(object)?));
        answer.all_written(&outputs)?;
        Ok((Self { owned }, location))
    }
}

impl<C: ContextRef> PacketPacing<C> {
    /// Allocates an entry for a rate; `limits` is the device's `set_pp_rate_limit`
    /// context. Returns it with its index.
    ///
    /// # Errors
    /// EOPNOTSUPP if the device has none, EINVAL for limits that it does not have.
    pub fn alloc(context: &C, limits: &[u8], flags: u32) -> Result<(Self, u16), Error> {
        let mut index = 0u16;
        // SAFETY: the inputs are rates and flags.
        let mut ioctl = unsafe { Ioctl::driver(&PP_OBJ_ALLOC) };
        let object = ioctl.new_object(ATTR_PP_ALLOC_HANDLE);
        ioctl.input(ATTR_PP_ALLOC_LIMITS, limits);
        ioctl.u32(ATTR_PP_ALLOC_FLAGS, flags);
        let slot = ioctl.output(ATTR_PP_ALLOC_INDEX, index.as_mut_bytes());
        let answer = ioctl.run(context)?;
        let owned = Owned::new(context, PacketPacingHandle(answer.handle(object)?));
        answer.written(slot)?;
        Ok((Self { owned }, index))
    }
}
