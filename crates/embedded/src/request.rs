//! A command as it comes through `RDMA_VERBS_IOCTL`.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr;

use uverbs::Errno;
use uverbs::abi::ids::{ATTR_CORE_IN, ATTR_CORE_OUT, ATTR_UHW_IN, ATTR_UHW_OUT, ATTR_WRITE_CMD};
use uverbs::abi::ioctl::{ATTR_F_MANDATORY, ATTR_F_VALID_OUTPUT, Attr, IoctlHdr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::spec::{Form, Spec};
use crate::user::{Need, copyable};
use crate::{Result, refuse};

/// Input of so many bytes is in the attribute itself.
const INLINE: u64 = 8;

/// Bytes of a command at most: a page.
const LONGEST: usize = 4096;

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
        let address = argument.expose_provenance() as u64;
        copyable(address, size_of::<IoctlHdr>() as u64, Need::Read)?;
        // SAFETY: there is a header, by the contract.
        let header = unsafe { argument.cast::<IoctlHdr>().read_unaligned() };
        let count = usize::from(header.num_attrs);
        let length = size_of::<IoctlHdr>() + count * size_of::<Attr>();
        if usize::from(header.length) != length || length > LONGEST {
            return refuse(libc::EINVAL);
        }
        if header.reserved1 != 0 || header.reserved2 != 0 {
            return refuse(libc::EPROTONOSUPPORT);
        }
        if header.driver_id != uverbs::discovery::DriverId::MLX5.0 {
            return refuse(libc::EINVAL);
        }
        copyable(address, length as u64, Need::Write)?;
        // SAFETY: they follow the header, by the contract.
        let raw = unsafe { argument.byte_add(size_of::<IoctlHdr>()).cast::<Attr>() };
        // SAFETY: as many as the header says.
        let attrs = (0..count).map(|n| unsafe { raw.add(n).read_unaligned() });
        Ok(Self {
            object: header.object_id,
            method: header.method_id,
            attrs: attrs.collect(),
            raw,
        })
    }

    /// Checks the attributes against those that the method has, one after the
    /// other as the kernel does, and has `object` look at each that names an
    /// object or a descriptor. Those that the method does not have are passed over
    /// if they are not said to be mandatory.
    ///
    /// # Errors
    /// EPROTONOSUPPORT for an attribute that the method has not; EINVAL for one
    /// that is there twice, has a length that it cannot have or sets what is
    /// reserved, and for one that is missing; EOPNOTSUPP for data behind what is
    /// known; EFAULT for addresses that are not memory; those of `object`.
    pub(crate) fn check(
        &self,
        method: &[Spec],
        mut object: impl FnMut(&Form, u64) -> Result<()>,
    ) -> Result<()> {
        for (at, attr) in self.attrs.iter().enumerate() {
            let Some(spec) = method.iter().find(|spec| spec.id == attr.attr_id) else {
                if attr.flags & ATTR_F_MANDATORY != 0 {
                    return refuse(libc::EPROTONOSUPPORT);
                }
                continue;
            };
            let is_same = |it: &Attr| it.attr_id == attr.attr_id;
            if self.attrs[..at].iter().any(is_same) || attr.enum_or_reserved != 0 {
                return refuse(libc::EINVAL);
            }
            let length = u64::from(attr.len);
            match spec.form {
                Form::In {
                    least,
                    most,
                    extends,
                } => {
                    if attr.len < least || (attr.len > most && !extends) {
                        return refuse(libc::EINVAL);
                    }
                    if length > INLINE {
                        copyable(attr.data, length, Need::Read)?;
                    }
                    if extends && attr.len > most && !self.is_cleared(attr.attr_id, most.into()) {
                        return refuse(libc::EOPNOTSUPP);
                    }
                }
                Form::Out { least, most } => {
                    if !(least..=most).contains(&attr.len) {
                        return refuse(libc::EINVAL);
                    }
                    copyable(attr.data, length, Need::Write)?;
                }
                Form::New | Form::Object(_) | Form::Fd(_) => {
                    if attr.len != 0 {
                        return refuse(libc::EINVAL);
                    }
                    object(&spec.form, attr.data)?;
                }
            }
        }
        let missing = |spec: &&Spec| spec.mandatory && self.find(spec.id).is_none();
        match method.iter().find(missing) {
            Some(_) => refuse(libc::EINVAL),
            None => Ok(()),
        }
    }

    fn find(&self, id: u16) -> Option<(usize, Attr)> {
        let at = self.attrs.iter().position(|attr| attr.attr_id == id)?;
        Some((at, self.attrs[at]))
    }

    /// Whether an attribute was given.
    pub(crate) fn has(&self, id: u16) -> bool {
        self.find(id).is_some()
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
                // contract of `read`, and `check` has found it mapped; the
                // vector is new.
                unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), length) };
            }
        }
        Some(bytes)
    }

    /// Whether all bytes of an input from `at` on are zero
    /// (`ib_is_udata_cleared`).
    fn is_cleared(&self, id: u16, at: usize) -> bool {
        let bytes = self.bytes(id).unwrap_or_default();
        bytes.iter().skip(at).all(|byte| *byte == 0)
    }

    /// An input of a fixed form.
    pub(crate) fn value<T: FromBytes>(&self, id: u16) -> Result<T> {
        let bytes = self.bytes(id).unwrap_or_default();
        match T::read_from_prefix(&bytes) {
            Ok((value, _)) => Ok(value),
            Err(_) => refuse(libc::EINVAL),
        }
    }

    /// An enumerated value, which is in 64 bits whatever its own type.
    pub(crate) fn constant<T: TryFrom<u64>>(&self, id: u16) -> Result<T> {
        let value = self.value::<u64>(id)?;
        T::try_from(value).or(refuse(libc::EINVAL))
    }

    /// Flags, which are in 32 bits or 64; none if they were not given.
    ///
    /// # Errors
    /// EINVAL if there are others than those of `known`.
    pub(crate) fn flags(&self, id: u16, known: u32) -> Result<u32> {
        let bytes = self.bytes(id).unwrap_or_default();
        let mut value = [0; 8];
        match (bytes.len(), value.get_mut(..bytes.len())) {
            (0 | 4 | 8, Some(room)) => room.copy_from_slice(&bytes),
            _ => return refuse(libc::EINVAL),
        }
        match u64::from_ne_bytes(value) {
            flags if flags & !u64::from(known) == 0 => Ok(flags as u32),
            _ => refuse(libc::EINVAL),
        }
    }

    /// The number of an object that the command must name.
    ///
    /// # Errors
    /// ENOENT if it does not.
    pub(crate) fn handle(&self, id: u16) -> Result<u32> {
        self.optional_handle(id).ok_or(Errno::new(libc::ENOENT))
    }

    /// The same, if it was given. It is one of the context's, by `check`.
    pub(crate) fn optional_handle(&self, id: u16) -> Option<u32> {
        let (_, attr) = self.find(id)?;
        u32::try_from(attr.data).ok()
    }

    /// A descriptor that the command names, if it does.
    pub(crate) fn fd(&self, id: u16) -> Option<RawFd> {
        let (_, attr) = self.find(id)?;
        RawFd::try_from(attr.data.cast_signed()).ok()
    }

    /// Answers into an output, as much as there is room for.
    pub(crate) fn put(&mut self, id: u16, bytes: &[u8]) {
        let Some((at, attr)) = self.find(id) else {
            return;
        };
        let to = ptr::with_exposed_provenance_mut::<u8>(attr.data as usize);
        let length = bytes.len().min(attr.len.into());
        // SAFETY: an output of `attr.len` bytes is writable, by the contract
        // of `read`, and `check` has found it so.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, length) };
        self.written(at);
    }

    /// The attribute of that index was answered.
    fn written(&mut self, at: usize) {
        // SAFETY: an attribute of the command, which is packed as the caller
        // has it.
        unsafe {
            let flags = &raw mut (*self.raw.add(at)).flags;
            flags.write_unaligned(flags.read_unaligned() | ATTR_F_VALID_OUTPUT);
        }
    }

    /// Answers a value.
    pub(crate) fn answer<T: IntoBytes + Immutable>(&mut self, id: u16, value: &T) {
        self.put(id, value.as_bytes());
    }

    /// Answers a structure that may be longer where it is read: the rest of it
    /// is zero.
    pub(crate) fn answer_struct<T: IntoBytes + Immutable>(&mut self, id: u16, value: &T) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.resize(bytes.len().max(self.room(id)), 0);
        self.put(id, &bytes);
    }

    /// Answers the number of the object, or the descriptor, that was made.
    pub(crate) fn made(&mut self, id: u16, number: u32) {
        if let Some((at, _)) = self.find(id) {
            // SAFETY: an attribute of the command.
            unsafe { (&raw mut (*self.raw.add(at)).data).write_unaligned(number.into()) };
        }
    }

    /// Bytes that an attribute has, or has room for.
    pub(crate) fn room(&self, id: u16) -> usize {
        self.find(id).map_or(0, |(_, attr)| attr.len.into())
    }

    /// Which write command it carries.
    pub(crate) fn write_command(&self) -> Result<u32> {
        self.constant(ATTR_WRITE_CMD)
    }

    /// The write command's structure. What is not given of it is zero.
    ///
    /// # Errors
    /// EOPNOTSUPP if there is more than is known, and not zero.
    pub(crate) fn core<T: FromBytes + IntoBytes>(&self) -> Result<T> {
        let mut value = T::new_zeroed();
        let bytes = self.bytes(ATTR_CORE_IN).unwrap_or_default();
        let room = value.as_mut_bytes();
        if !self.is_cleared(ATTR_CORE_IN, room.len()) {
            return refuse(libc::EOPNOTSUPP);
        }
        let length = bytes.len().min(room.len());
        room[..length].copy_from_slice(&bytes[..length]);
        Ok(value)
    }

    /// Answers the write command.
    pub(crate) fn core_answer<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.answer_struct(ATTR_CORE_OUT, value);
    }

    /// The driver's data, filled up with zeros to `N` bytes.
    pub(crate) fn driver<const N: usize>(&self) -> [u8; N] {
        let mut out = [0; N];
        let bytes = self.bytes(ATTR_UHW_IN).unwrap_or_default();
        let length = bytes.len().min(N);
        out[..length].copy_from_slice(&bytes[..length]);
        out
    }

    /// How many bytes the driver's data have.
    pub(crate) fn driver_length(&self) -> usize {
        self.room(ATTR_UHW_IN)
    }

    /// Whether the driver's data are zero from `at` on.
    pub(crate) fn driver_is_cleared(&self, at: usize) -> bool {
        self.is_cleared(ATTR_UHW_IN, at)
    }

    /// Refuses if there is not room for `length` bytes of an answer to the
    /// driver.
    ///
    /// # Errors
    /// EFAULT without any; EINVAL for too few, which the kernel would write past.
    pub(crate) fn needs_driver_room(&self, length: usize) -> Result<()> {
        match self.room(ATTR_UHW_OUT) {
            0 => refuse(libc::EFAULT),
            room if room < length => refuse(libc::EINVAL),
            _ => Ok(()),
        }
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
