//! A command as it comes through `RDMA_VERBS_IOCTL`.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr;

use uverbs::Errno;
use uverbs::abi::ids::{ATTR_CORE_IN, ATTR_CORE_OUT, ATTR_UHW_IN, ATTR_UHW_OUT, ATTR_WRITE_CMD};
use uverbs::abi::ioctl::{ATTR_F_VALID_OUTPUT, Attr, IoctlHdr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::{Result, refuse};

/// More attributes than any command has.
const MOST: usize = 64;

/// A command: what it asks for, and its attributes.
pub(crate) struct Request {
    pub(crate) object: u16,
    pub(crate) method: u16,
    attrs: Vec<Attr>,
    /// Where they came from: answers go there.
    raw: *mut Attr,
}

impl Request {
    /// Reads a command.
    ///
    /// # Safety
    /// `argument` is a header with its attributes behind it, both writable;
    /// inputs by address are readable, outputs writable, each for its length
    /// and for as long as this is used.
    pub(crate) unsafe fn read(argument: *mut c_void) -> Result<Self> {
        // SAFETY: there is a header, by the contract.
        let header = unsafe { argument.cast::<IoctlHdr>().read() };
        let count = usize::from(header.num_attrs);
        let length = size_of::<IoctlHdr>() + count * size_of::<Attr>();
        if usize::from(header.length) != length
            || count > MOST
            || header.driver_id != uverbs::discovery::DriverId::MLX5.0
        {
            return refuse(libc::EINVAL);
        }
        // SAFETY: they follow the header, by the contract.
        let raw = unsafe { argument.byte_add(size_of::<IoctlHdr>()).cast::<Attr>() };
        // SAFETY: as many as the header says.
        let attrs = (0..count).map(|n| unsafe { raw.add(n).read() }).collect();
        Ok(Self {
            object: header.object_id,
            method: header.method_id,
            attrs,
            raw,
        })
    }

    fn find(&self, id: u16) -> Option<(usize, Attr)> {
        let at = self.attrs.iter().position(|attr| attr.attr_id == id)?;
        Some((at, self.attrs[at]))
    }

    /// An input's bytes; none if it was not given.
    pub(crate) fn bytes(&self, id: u16) -> Option<Vec<u8>> {
        let (_, attr) = self.find(id)?;
        let length = usize::from(attr.len);
        let mut bytes = vec![0; length];
        match attr.data.to_ne_bytes().get(..length) {
            Some(inline) => bytes.copy_from_slice(inline),
            None => {
                let from = ptr::with_exposed_provenance::<u8>(attr.data as usize);
                // SAFETY: an input of that length is readable, by the
                // contract of `read`; the vector is new.
                unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), length) };
            }
        }
        Some(bytes)
    }

    /// An input of a fixed form.
    pub(crate) fn value<T: FromBytes>(&self, id: u16) -> Result<T> {
        self.optional(id)?.ok_or(Errno::new(libc::EINVAL))
    }

    /// The same, if it was given.
    pub(crate) fn optional<T: FromBytes>(&self, id: u16) -> Result<Option<T>> {
        let Some(bytes) = self.bytes(id) else {
            return Ok(None);
        };
        match T::read_from_prefix(&bytes) {
            Ok((value, _)) => Ok(Some(value)),
            Err(_) => refuse(libc::EINVAL),
        }
    }

    /// The number of an object that the command names.
    pub(crate) fn handle(&self, id: u16) -> Result<u32> {
        self.optional_handle(id)?.ok_or(Errno::new(libc::EINVAL))
    }

    /// The same, if it was given.
    pub(crate) fn optional_handle(&self, id: u16) -> Result<Option<u32>> {
        let Some((_, attr)) = self.find(id) else {
            return Ok(None);
        };
        match u32::try_from(attr.data) {
            Ok(handle) => Ok(Some(handle)),
            Err(_) => refuse(libc::EINVAL),
        }
    }

    /// A descriptor that the command names, if it does.
    pub(crate) fn fd(&self, id: u16) -> Result<Option<RawFd>> {
        let Some((_, attr)) = self.find(id) else {
            return Ok(None);
        };
        match RawFd::try_from(attr.data.cast_signed()) {
            Ok(fd) => Ok(Some(fd)),
            Err(_) => refuse(libc::EBADF),
        }
    }

    /// Answers into an output, as much as there is room for.
    pub(crate) fn put(&mut self, id: u16, bytes: &[u8]) {
        let Some((at, attr)) = self.find(id) else {
            return;
        };
        let to = ptr::with_exposed_provenance_mut::<u8>(attr.data as usize);
        let length = bytes.len().min(attr.len.into());
        // SAFETY: an output of `attr.len` bytes is writable, by the contract
        // of `read`.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, length) };
        // SAFETY: an attribute of the command.
        unsafe { (*self.raw.add(at)).flags |= ATTR_F_VALID_OUTPUT };
    }

    /// Answers a value.
    pub(crate) fn answer<T: IntoBytes + Immutable>(&mut self, id: u16, value: &T) {
        self.put(id, value.as_bytes());
    }

    /// Answers the number of the object, or the descriptor, that was made.
    pub(crate) fn made(&mut self, id: u16, number: u32) {
        if let Some((at, _)) = self.find(id) {
            // SAFETY: an attribute of the command.
            unsafe { (*self.raw.add(at)).data = number.into() };
        }
    }

    /// Bytes that an output has room for.
    pub(crate) fn room(&self, id: u16) -> usize {
        self.find(id).map_or(0, |(_, attr)| attr.len.into())
    }

    /// Which write command it carries.
    pub(crate) fn write_command(&self) -> Result<u32> {
        self.value::<u64>(ATTR_WRITE_CMD).map(|it| it as u32)
    }

    /// The write command's structure.
    pub(crate) fn core<T: FromBytes>(&self) -> Result<T> {
        self.value(ATTR_CORE_IN)
    }

    /// Answers the write command.
    pub(crate) fn core_answer<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.answer(ATTR_CORE_OUT, value);
    }

    /// The driver's data, filled up with zeros to `N` bytes.
    pub(crate) fn driver<const N: usize>(&self) -> [u8; N] {
        let mut out = [0; N];
        let bytes = self.bytes(ATTR_UHW_IN).unwrap_or_default();
        let length = bytes.len().min(N);
        out[..length].copy_from_slice(&bytes[..length]);
        out
    }

    /// Answers the driver's data.
    pub(crate) fn driver_answer(&mut self, bytes: &[u8]) {
        self.put(ATTR_UHW_OUT, bytes);
    }
}

/// The native word at a byte offset of driver data.
pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// The native double word at a byte offset of driver data.
pub(crate) fn long(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}
