//! A command of `RDMA_VERBS_IOCTL`.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;

use uverbs::Errno;
use uverbs::abi::ids::{ATTR_CORE_IN, ATTR_CORE_OUT, ATTR_UHW_IN, ATTR_UHW_OUT, ATTR_WRITE_CMD};
use uverbs::abi::ioctl::{ATTR_F_MANDATORY, ATTR_F_VALID_OUTPUT, Attr, IoctlHdr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::driver::descriptors::Descriptors;
use crate::driver::spec::{Form, Spec};
use crate::user::{Access, copyable};
use crate::{Result, refuse};

/// Input of up to this many bytes is stored in the attribute itself.
const INLINE: u64 = 8;

/// Maximum length of a command: a page.
const MAX_LENGTH: usize = 4096;

/// A command with its attributes.
pub(crate) struct Request {
    pub(crate) object: u16,
    pub(crate) method: u16,
    attrs: Vec<Attr>,
    /// The caller's attributes, to which answers are written.
    raw: *mut Attr,
    /// How the caller knows descriptors.
    descriptors: Option<Arc<dyn Descriptors>>,
}

impl Request {
    /// Reads a command.
    ///
    /// # Safety
    /// `argument` must point to a header followed by its attributes, both
    /// writable; inputs by address must be readable and outputs writable, each
    /// for its length and as long as the `Request` is used.
    pub(crate) unsafe fn read(
        argument: *mut c_void,
        descriptors: Option<Arc<dyn Descriptors>>,
    ) -> Result<Self> {
        let address = argument.expose_provenance() as u64;
        copyable(address, size_of::<IoctlHdr>() as u64, Access::Read)?;
        // SAFETY: a header is at `argument`, by the contract.
        let header = unsafe { argument.cast::<IoctlHdr>().read_unaligned() };
        let count = usize::from(header.num_attrs);
        let length = size_of::<IoctlHdr>() + count * size_of::<Attr>();
        if usize::from(header.length) != length || length > MAX_LENGTH {
            return refuse(libc::EINVAL);
        }
        if header.reserved1 != 0 || header.reserved2 != 0 {
            return refuse(libc::EPROTONOSUPPORT);
        }
        if header.driver_id != uverbs::discovery::DriverId::MLX5.0 {
            return refuse(libc::EINVAL);
        }
        copyable(address, length as u64, Access::Write)?;
        // SAFETY: the attributes follow the header, by the contract.
        let raw = unsafe { argument.byte_add(size_of::<IoctlHdr>()).cast::<Attr>() };
        // SAFETY: `n` is less than the header's number of attributes.
        let attrs = (0..count).map(|n| unsafe { raw.add(n).read_unaligned() });
        Ok(Self {
            object: header.object_id,
            method: header.method_id,
            attrs: attrs.collect(),
            raw,
            descriptors,
        })
    }

    /// Checks the attributes against those of the method, in the kernel's
    /// order, and calls `object` for each that names an object or a descriptor.
    /// Attributes that the method does not have are ignored unless flagged as
    /// mandatory.
    ///
    /// # Errors
    /// EPROTONOSUPPORT for a mandatory attribute that the method does not have;
    /// EINVAL for an attribute that is duplicate, missing, has an invalid
    /// length or sets reserved fields; EOPNOTSUPP for nonzero data beyond the
    /// known structure; EFAULT for addresses that are not mapped; errors of
    /// `object`.
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
            let is_enum = matches!(spec.form, Form::Enum(_));
            let is_reserved = attr.enum_or_reserved != 0 && !is_enum;
            if self.attrs[..at].iter().any(is_same) || is_reserved {
                return refuse(libc::EINVAL);
            }
            let length = u64::from(attr.len);
            match spec.form {
                Form::In {
                    min,
                    max,
                    extensible,
                } => {
                    if attr.len < min || (attr.len > max && !extensible) {
                        return refuse(libc::EINVAL);
                    }
                    if length > INLINE {
                        copyable(attr.data, length, Access::Read)?;
                    }
                    if extensible && attr.len > max && !self.is_cleared(attr.attr_id, max.into()) {
                        return refuse(libc::EOPNOTSUPP);
                    }
                }
                Form::Enum(lengths) => {
                    let [number, reserved] = attr.enum_or_reserved.to_ne_bytes();
                    let Some(expected) = lengths.get(usize::from(number)) else {
                        return refuse(libc::EOPNOTSUPP);
                    };
                    if reserved != 0 || attr.len != *expected {
                        return refuse(libc::EINVAL);
                    }
                }
                Form::Objects { kind, max } => {
                    if attr.len % 4 != 0 || !(1..=max).contains(&(attr.len / 4)) {
                        return refuse(libc::EINVAL);
                    }
                    if length > INLINE {
                        copyable(attr.data, length, Access::Read)?;
                    }
                    for handle in self.handles(attr.attr_id) {
                        object(&Form::Object(kind), handle.into())?;
                    }
                }
                Form::Out { min, max } => {
                    if !(min..=max).contains(&attr.len) {
                        return refuse(libc::EINVAL);
                    }
                    copyable(attr.data, length, Access::Write)?;
                }
                Form::New | Form::Object(_) | Form::AnyObject => {
                    if attr.len != 0 {
                        return refuse(libc::EINVAL);
                    }
                    object(&spec.form, attr.data)?;
                }
                Form::Fd(_) => {
                    let fd = self.device_fd(attr.data).filter(|_| attr.len == 0);
                    let Some(fd) = fd else {
                        return refuse(libc::EINVAL);
                    };
                    object(&spec.form, i64::from(fd) as u64)?;
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

    /// Returns whether an attribute is present.
    pub(crate) fn has(&self, id: u16) -> bool {
        self.find(id).is_some()
    }

    /// Returns the bytes of an input; `None` if it is not present.
    pub(crate) fn bytes(&self, id: u16) -> Option<Vec<u8>> {
        let (_, attr) = self.find(id)?;
        let length = usize::from(attr.len);
        let mut bytes = vec![0; length];
        match attr.data.to_ne_bytes().get(..length) {
            Some(inline) => bytes.copy_from_slice(inline),
            None => {
                let from = ptr::with_exposed_provenance::<u8>(attr.data as usize);
                // SAFETY: an input of that length is readable, by the contract
                // of `read`, and `check` has found it mapped; the vector is
                // new, so the two do not overlap.
                unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), length) };
            }
        }
        Some(bytes)
    }

    /// Returns whether all bytes of an input from `at` on are zero
    /// (`ib_is_udata_cleared`).
    fn is_cleared(&self, id: u16, at: usize) -> bool {
        let bytes = self.bytes(id).unwrap_or_default();
        bytes.iter().skip(at).all(|byte| *byte == 0)
    }

    /// Returns an input of a fixed type.
    pub(crate) fn value<T: FromBytes>(&self, id: u16) -> Result<T> {
        let bytes = self.bytes(id).unwrap_or_default();
        match T::read_from_prefix(&bytes) {
            Ok((value, _)) => Ok(value),
            Err(_) => refuse(libc::EINVAL),
        }
    }

    /// Returns an enumerated value, which is passed as 64 bits whatever its
    /// type.
    pub(crate) fn constant<T: TryFrom<u64>>(&self, id: u16) -> Result<T> {
        let value = self.value::<u64>(id)?;
        T::try_from(value).or(refuse(libc::EINVAL))
    }

    /// Returns the number of an enumeration's value.
    pub(crate) fn enumerator(&self, id: u16) -> Option<u8> {
        let (_, attr) = self.find(id)?;
        Some(attr.enum_or_reserved.to_ne_bytes()[0])
    }

    /// Returns flags, which are passed as 32 or 64 bits; none if not present.
    ///
    /// # Errors
    /// EINVAL for flags that are not in `known`.
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

    /// Returns the handle of an object that the command must name.
    ///
    /// # Errors
    /// ENOENT if it does not name one.
    pub(crate) fn handle(&self, id: u16) -> Result<u32> {
        self.optional_handle(id).ok_or(Errno::new(libc::ENOENT))
    }

    /// As [`handle`](Self::handle), if present. `check` has verified that it
    /// belongs to the context.
    pub(crate) fn optional_handle(&self, id: u16) -> Option<u32> {
        let (_, attr) = self.find(id)?;
        u32::try_from(attr.data).ok()
    }

    /// Returns the handles of a list of objects; none if it is not present. As for
    /// [`optional_handle`](Self::optional_handle).
    pub(crate) fn handles(&self, id: u16) -> Vec<u32> {
        let bytes = self.bytes(id).unwrap_or_default();
        (0..bytes.len() / 4)
            .map(|at| word(&bytes, 4 * at))
            .collect()
    }

    /// Returns a descriptor that the command names, if present.
    pub(crate) fn fd(&self, id: u16) -> Option<RawFd> {
        let (_, attr) = self.find(id)?;
        self.device_fd(attr.data)
    }

    /// Returns the device's descriptor that an attribute contains.
    fn device_fd(&self, data: u64) -> Option<RawFd> {
        let number = RawFd::try_from(data as i64).ok()?;
        let descriptors = self.descriptors.as_ref();
        Some(descriptors.map_or(number, |descriptors| descriptors.device(number)))
    }

    /// Returns the caller's descriptor of a new event file.
    ///
    /// # Errors
    /// Those of [`Descriptors::publish`].
    pub(crate) fn publish(&self, fd: RawFd) -> Result<RawFd> {
        let descriptors = self.descriptors.as_ref();
        descriptors.map_or(Ok(fd), |descriptors| descriptors.publish(fd))
    }

    /// Reports a completion queue that the program has created.
    pub(crate) fn queue_created(&self, user_handle: u64) {
        if let Some(descriptors) = &self.descriptors {
            descriptors.queue_created(user_handle);
        }
    }

    /// Writes to an output, truncated to its length.
    pub(crate) fn put(&mut self, id: u16, bytes: &[u8]) {
        let Some((at, attr)) = self.find(id) else {
            return;
        };
        let to = ptr::with_exposed_provenance_mut::<u8>(attr.data as usize);
        let length = bytes.len().min(attr.len.into());
        // SAFETY: an output of `attr.len` bytes is writable, by the contract of
        // `read`, and `check` has found it writable.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, length) };
        self.mark_written(at);
    }

    /// Marks the attribute with index `at` as written.
    fn mark_written(&mut self, at: usize) {
        // SAFETY: an attribute of the command, at whatever alignment the caller
        // has it.
        unsafe {
            let flags = &raw mut (*self.raw.add(at)).flags;
            flags.write_unaligned(flags.read_unaligned() | ATTR_F_VALID_OUTPUT);
        }
    }

    /// Writes a value to an output.
    pub(crate) fn answer<T: IntoBytes + Immutable>(&mut self, id: u16, value: &T) {
        self.put(id, value.as_bytes());
    }

    /// Writes a structure to an output, zero-filled if the output is longer.
    pub(crate) fn answer_struct<T: IntoBytes + Immutable>(&mut self, id: u16, value: &T) {
        let mut bytes = value.as_bytes().to_vec();
        bytes.resize(bytes.len().max(self.room(id)), 0);
        self.put(id, &bytes);
    }

    /// Writes the handle or descriptor of the created object.
    pub(crate) fn set_handle(&mut self, id: u16, number: u32) {
        if let Some((at, _)) = self.find(id) {
            // SAFETY: an attribute of the command.
            unsafe { (&raw mut (*self.raw.add(at)).data).write_unaligned(number.into()) };
        }
    }

    /// Returns the length of an attribute's data or buffer.
    pub(crate) fn room(&self, id: u16) -> usize {
        self.find(id).map_or(0, |(_, attr)| attr.len.into())
    }

    /// Returns the number of the write command.
    pub(crate) fn write_command(&self) -> Result<u32> {
        self.constant(ATTR_WRITE_CMD)
    }

    /// Returns the structure of the write command, zero-filled if the input is
    /// shorter.
    ///
    /// # Errors
    /// EOPNOTSUPP for nonzero data beyond the known structure.
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

    /// Writes the answer to the write command.
    pub(crate) fn core_answer<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.answer_struct(ATTR_CORE_OUT, value);
    }

    /// Returns the structure of the input driver data, zero-filled if the input is shorter.
    pub(crate) fn driver<T: FromBytes + IntoBytes>(&self) -> T {
        let mut value = T::new_zeroed();
        let bytes = self.bytes(ATTR_UHW_IN).unwrap_or_default();
        let room = value.as_mut_bytes();
        let length = bytes.len().min(room.len());
        room[..length].copy_from_slice(&bytes[..length]);
        value
    }

    /// Returns the length of the input driver data.
    pub(crate) fn driver_length(&self) -> usize {
        self.room(ATTR_UHW_IN)
    }

    /// Returns whether the input driver data are zero from `at` on.
    pub(crate) fn driver_is_cleared(&self, at: usize) -> bool {
        self.is_cleared(ATTR_UHW_IN, at)
    }

    /// Checks that the output for driver data has at least `length` bytes.
    ///
    /// # Errors
    /// EFAULT if there is no output; EINVAL if it is too short: the kernel
    /// would write beyond it.
    pub(crate) fn check_driver_output(&self, length: usize) -> Result<()> {
        match self.room(ATTR_UHW_OUT) {
            0 => refuse(libc::EFAULT),
            room if room < length => refuse(libc::EINVAL),
            _ => Ok(()),
        }
    }

    /// Writes the output driver data.
    pub(crate) fn driver_answer<T: IntoBytes + Immutable>(&mut self, value: &T) {
        self.answer(ATTR_UHW_OUT, value);
    }

    /// Writes the first `length` bytes of a structure as the output driver data.
    pub(crate) fn driver_answer_until<T: IntoBytes + Immutable>(
        &mut self,
        value: &T,
        length: usize,
    ) {
        let bytes = value.as_bytes();
        self.put(ATTR_UHW_OUT, bytes.get(..length).unwrap_or(bytes));
    }
}

/// Returns the native-endian 32-bit word at a byte offset.
pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}
