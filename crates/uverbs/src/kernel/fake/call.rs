//! A command to the fake kernel, and its answer.

use core::ffi::{c_int, c_void};
use std::os::fd::RawFd;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::methods::Methods;
use crate::Errno;
use crate::abi::ids;
use crate::abi::ioctl::{ATTR_F_VALID_OUTPUT, Attr, IoctlHdr};
use crate::discovery::DriverId;

/// Selects the command that an answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A method: object and method number of [`crate::abi::ids`].
    Method(u16, u16),
    /// A write command: number of [`crate::abi::write::cmd`], with
    /// [`CMD_FLAG_EXTENDED`](crate::abi::write::CMD_FLAG_EXTENDED) if extended.
    Write(u32),
}

/// The driver of the fake's devices; commands for another one are rejected.
pub const DRIVER: DriverId = DriverId::RXE;

/// A recorded system call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "each is the system call of that name, with its arguments"
)]
pub enum Call {
    Open {
        path: String,
        flags: c_int,
        result: Result<RawFd, Errno>,
    },
    Close(RawFd),
    Ioctl(IoctlCall),
    Read(RawFd),
    Write {
        fd: RawFd,
        bytes: Vec<u8>,
    },
    SetNonblocking {
        fd: RawFd,
        nonblocking: bool,
    },
    Netlink(Vec<u8>),
}

/// An attribute as the caller passed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The attribute itself.
    pub attr: Attr,
    /// Input data, inline or by address. Empty for outputs and objects.
    pub bytes: Vec<u8>,
}

/// A recorded ioctl command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoctlCall {
    /// The descriptor.
    pub fd: RawFd,
    /// Object number.
    pub object: u16,
    /// Method number.
    pub method: u16,
    /// The attributes, in order.
    pub attrs: Vec<Recorded>,
    /// Result of the command.
    pub result: Result<(), Errno>,
}

impl IoctlCall {
    /// # Safety
    /// `argument` must be a header followed by its attributes, whose inputs
    /// are readable.
    pub(super) unsafe fn read(
        fd: RawFd,
        argument: *mut c_void,
        methods: &Methods,
    ) -> Result<Self, Errno> {
        // SAFETY: a header is at `argument`, by the contract.
        let header = unsafe { argument.cast::<IoctlHdr>().read() };
        let attrs = usize::from(header.num_attrs);
        let length = size_of::<IoctlHdr>() + attrs * size_of::<Attr>();
        if usize::from(header.length) != length
            || header.reserved1 != 0
            || header.reserved2 != 0
            || header.driver_id != DRIVER.0
        {
            return Err(Errno::new(libc::EINVAL));
        }
        let mut call = Self {
            fd,
            object: header.object_id,
            method: header.method_id,
            attrs: Vec::with_capacity(attrs),
            result: Ok(()),
        };
        for index in 0..attrs {
            // SAFETY: `num_attrs` attributes follow the header, by the
            // contract.
            let attr = unsafe {
                argument
                    .byte_add(size_of::<IoctlHdr>())
                    .cast::<Attr>()
                    .add(index)
                    .read()
            };
            let len = usize::from(attr.len);
            let bytes = if !methods.is_input(call.object, call.method, attr.attr_id) {
                Vec::new()
            } else if let Some(inline) = attr.data.to_ne_bytes().get(..len) {
                inline.to_vec()
            } else {
                let address = core::ptr::with_exposed_provenance::<u8>(attr.data as usize);
                // SAFETY: an input of that length is readable at the address,
                // by the contract.
                unsafe { core::slice::from_raw_parts(address, len) }.to_vec()
            };
            call.attrs.push(Recorded { attr, bytes });
        }
        Ok(call)
    }

    /// Returns which command it is.
    pub fn target(&self) -> Target {
        match (self.object, self.method) {
            (ids::OBJECT_DEVICE, ids::METHOD_INVOKE_WRITE) => Target::Write(
                self.u64(ids::ATTR_WRITE_CMD)
                    .map_or(u32::MAX, |number| number as u32),
            ),
            (object, method) => Target::Method(object, method),
        }
    }

    /// Returns an attribute by its number.
    pub fn attr(&self, id: u16) -> Option<&Recorded> {
        self.attrs
            .iter()
            .find(|recorded| recorded.attr.attr_id == id)
    }

    /// Returns the bytes of an input attribute.
    pub fn bytes(&self, id: u16) -> Option<&[u8]> {
        self.attr(id).map(|recorded| recorded.bytes.as_slice())
    }

    /// Returns an input of four bytes.
    pub fn u32(&self, id: u16) -> Option<u32> {
        u32::read_from_bytes(self.bytes(id)?).ok()
    }

    /// Returns an input of eight bytes.
    pub fn u64(&self, id: u16) -> Option<u64> {
        u64::read_from_bytes(self.bytes(id)?).ok()
    }

    /// Returns the handle or descriptor in an attribute.
    pub fn object_number(&self, id: u16) -> Option<u64> {
        self.attr(id).map(|recorded| recorded.attr.data)
    }

    /// Returns the request structure of a write command.
    pub fn core_in<T: FromBytes>(&self) -> Option<T> {
        T::read_from_bytes(self.bytes(ids::ATTR_CORE_IN)?).ok()
    }

    /// Returns the input driver data.
    pub fn driver_in(&self) -> &[u8] {
        self.bytes(ids::ATTR_UHW_IN).unwrap_or_default()
    }
}

/// The answer to a command, under construction.
pub struct Reply<'a> {
    call: &'a mut IoctlCall,
    raw: *mut c_void,
    methods: &'a Methods,
}

impl<'a> Reply<'a> {
    /// `raw` is what `call` was read from, in an ioctl that has not returned.
    pub(super) fn new(call: &'a mut IoctlCall, raw: *mut c_void, methods: &'a Methods) -> Self {
        Self { call, raw, methods }
    }

    /// Returns the command.
    pub fn call(&self) -> &IoctlCall {
        self.call
    }

    /// Returns the numbers of the output attributes.
    pub fn outputs(&self) -> Vec<u16> {
        let (object, method) = (self.call.object, self.call.method);
        let ids = self.call.attrs.iter().map(|recorded| recorded.attr.attr_id);
        ids.filter(|&id| self.methods.is_output(object, method, id))
            .collect()
    }

    /// Returns the attribute that receives the handle of the created object.
    pub fn new_object(&self) -> Option<u16> {
        self.methods
            .new_object_attr(self.call.object, self.call.method)
    }

    fn raw_attr(&mut self, id: u16) -> Option<&mut Attr> {
        let index = self
            .call
            .attrs
            .iter()
            .position(|recorded| recorded.attr.attr_id == id)?;
        // SAFETY: an attribute was read from this index; the caller of ioctl
        // lends the frame until the call returns.
        Some(unsafe {
            &mut *self
                .raw
                .byte_add(size_of::<IoctlHdr>())
                .cast::<Attr>()
                .add(index)
        })
    }

    /// Writes to an output attribute, truncating to its length, and marks it
    /// written. Returns false if the command does not have the attribute.
    pub fn set(&mut self, id: u16, bytes: &[u8]) -> bool {
        let Some(attr) = self.raw_attr(id) else {
            return false;
        };
        let len = bytes.len().min(usize::from(attr.len));
        let address = core::ptr::with_exposed_provenance_mut::<u8>(attr.data as usize);
        if len > 0 {
            // SAFETY: the attribute lends that many bytes at that address.
            unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), address, len) };
        }
        attr.flags |= ATTR_F_VALID_OUTPUT;
        true
    }

    /// Writes the response structure of a write command.
    pub fn set_core_out<T: IntoBytes + Immutable>(&mut self, answer: &T) -> bool {
        self.set(ids::ATTR_CORE_OUT, answer.as_bytes())
    }

    /// Writes the output driver data.
    pub fn set_driver_out(&mut self, bytes: &[u8]) -> bool {
        self.set(ids::ATTR_UHW_OUT, bytes)
    }

    /// Clears the mark that an output was written.
    pub fn set_unwritten(&mut self, id: u16) {
        if let Some(attr) = self.raw_attr(id) {
            attr.flags &= !ATTR_F_VALID_OUTPUT;
        }
    }

    /// Sets an attribute's data to any value, as a broken kernel might.
    pub fn set_data(&mut self, id: u16, data: u64) {
        if let Some(attr) = self.raw_attr(id) {
            attr.data = data;
        }
    }

    /// Marks all outputs written, without changing their content.
    pub(super) fn mark_outputs(&mut self) {
        for id in self.outputs() {
            self.set(id, &[]);
        }
    }

    /// Sets the handle of the created object.
    pub(super) fn set_new_object(&mut self, number: u32) {
        match self.new_object() {
            Some(id) => self.set_data(id, number.into()),
            // Responses of write commands begin with the handle.
            None => {
                self.set(ids::ATTR_CORE_OUT, number.as_bytes());
            }
        }
    }
}
