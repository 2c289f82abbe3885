//! A command of `RDMA_VERBS_IOCTL`.

use std::ffi::c_void;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;

use softhca::rule::Rule;
use uverbs::abi::ids::{ATTR_CORE_IN, ATTR_CORE_OUT, ATTR_UHW_IN, ATTR_UHW_OUT, ATTR_WRITE_CMD};
use uverbs::abi::ioctl::{ATTR_F_MANDATORY, ATTR_F_VALID_OUTPUT, Attr, IoctlHdr};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::driver::cause::{
    Class, Result, at_most, between, invalid, is, known_bits, memory, refuse, require,
    require_support, system, unsupported,
};
use crate::driver::descriptors::Descriptors;
use crate::driver::spec::{Form, Spec};
use crate::user::{Access, copyable};

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
        check_copy(
            "command",
            address,
            size_of::<IoctlHdr>() as u64,
            Access::Read,
        )?;
        // SAFETY: a header is at `argument`, by the contract.
        let header = unsafe { argument.cast::<IoctlHdr>().read_unaligned() };
        let count = usize::from(header.num_attrs);
        let length = size_of::<IoctlHdr>() + count * size_of::<Attr>();
        is("length", header.length, length as u64)?;
        at_most("length", header.length, MAX_LENGTH as u64)?;
        for field in [header.reserved1, header.reserved2.into()] {
            if field != 0 {
                return refuse(Class::Unknown, "reserved field", field, Rule::Zero);
            }
        }
        let driver = uverbs::discovery::DriverId::MLX5.0;
        is("driver_id", header.driver_id, driver.into())?;
        check_copy("command", address, length as u64, Access::Write)?;
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
                    return refuse(Class::Unknown, "attribute", attr.attr_id, Rule::Supported);
                }
                continue;
            };
            let is_repeated = self.attrs[..at].iter().any(|it| it.attr_id == attr.attr_id);
            require(!is_repeated, "attribute", attr.attr_id, Rule::Once)?;
            let checked = self.check_attribute(attr, &spec.form, &mut object);
            checked.map_err(|error| error.of(attr.attr_id))?;
        }
        let missing = |spec: &&Spec| spec.mandatory && self.find(spec.id).is_none();
        match method.iter().find(missing) {
            Some(spec) => invalid("attribute", spec.id, Rule::Present),
            None => Ok(()),
        }
    }

    /// Checks an attribute, as [`Request::check`].
    fn check_attribute(
        &self,
        attr: &Attr,
        form: &Form,
        object: &mut impl FnMut(&Form, u64) -> Result<()>,
    ) -> Result<()> {
        if !matches!(form, Form::Enum(_)) {
            let reserved = attr.enum_or_reserved;
            require(reserved == 0, "reserved field", reserved, Rule::Zero)?;
        }
        let length = u64::from(attr.len);
        match *form {
            Form::In {
                min,
                max,
                extensible,
            } => {
                let most = if extensible { u16::MAX } else { max };
                between("length", length, (min.into(), most.into()))?;
                if length > INLINE {
                    check_copy("input", attr.data, length, Access::Read)?;
                }
                let is_known = attr.len <= max || self.is_cleared(attr.attr_id, max.into());
                require_support(
                    !extensible || is_known,
                    "length",
                    length,
                    Rule::AtMost(max.into()),
                )
            }
            Form::Enum(lengths) => {
                let [number, reserved] = attr.enum_or_reserved.to_ne_bytes();
                let Some(expected) = lengths.get(usize::from(number)) else {
                    return unsupported("enumerator", number, Rule::Known);
                };
                require(reserved == 0, "reserved field", reserved, Rule::Zero)?;
                is("length", length, (*expected).into())
            }
            Form::Objects { kind, max } => {
                require(length % 4 == 0, "length", length, Rule::MultipleOf(4))?;
                between("number of objects", length / 4, (1, max.into()))?;
                if length > INLINE {
                    check_copy("input", attr.data, length, Access::Read)?;
                }
                for handle in self.handles(attr.attr_id) {
                    object(&Form::Object(kind), handle.into())?;
                }
                Ok(())
            }
            Form::Out { min, max } => {
                between("length", length, (min.into(), max.into()))?;
                check_copy("output", attr.data, length, Access::Write)
            }
            Form::New | Form::Object(_) | Form::AnyObject => {
                is("length", length, 0)?;
                object(form, attr.data)
            }
            Form::ProgramFd => {
                is("length", length, 0)?;
                match RawFd::try_from(attr.data as i64) {
                    Ok(_) => Ok(()),
                    Err(_) => invalid("descriptor", attr.data, Rule::Known),
                }
            }
            Form::Fd(_) => {
                is("length", length, 0)?;
                let Some(fd) = self.device_fd(attr.data) else {
                    return invalid("descriptor", attr.data, Rule::Known);
                };
                object(form, i64::from(fd) as u64)
            }
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
            Err(_) => invalid("length", bytes.len(), Rule::AtLeast(size_of::<T>() as u64))
                .map_err(|error| error.of(id)),
        }
    }

    /// Returns an enumerated value, which is passed as 64 bits whatever its
    /// type.
    pub(crate) fn constant<T: TryFrom<u64>>(&self, id: u16) -> Result<T> {
        let value = self.value::<u64>(id)?;
        let constant = T::try_from(value);
        constant.or_else(|_| invalid("constant", value, Rule::Known).map_err(|it| it.of(id)))
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
            _ => {
                let refused = invalid("length of flags", bytes.len(), Rule::OneOf(&[0, 4, 8]));
                return refused.map_err(|error| error.of(id));
            }
        }
        let flags = u64::from_ne_bytes(value);
        known_bits("flags", flags, known.into()).map_err(|error| error.of(id))?;
        Ok(flags as u32)
    }

    /// Returns the handle of an object that the command must name.
    ///
    /// # Errors
    /// ENOENT if it does not name one.
    pub(crate) fn handle(&self, id: u16) -> Result<u32> {
        match self.optional_handle(id) {
            Some(handle) => Ok(handle),
            None => refuse(Class::NotFound, "attribute", id, Rule::Present),
        }
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

    /// Returns the program's descriptor that an attribute contains, if present.
    pub(crate) fn program_fd(&self, id: u16) -> Option<RawFd> {
        let (_, attr) = self.find(id)?;
        RawFd::try_from(attr.data as i64).ok()
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
        let Some(descriptors) = descriptors else {
            return Ok(fd);
        };
        descriptors.publish(fd).map_err(system("descriptor", fd))
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
        let (known, length) = (room.len(), bytes.len());
        let is_known = self.is_cleared(ATTR_CORE_IN, known);
        require_support(is_known, "length", length, Rule::AtMost(known as u64))?;
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
            0 => refuse(Class::Fault, "driver output", 0u32, Rule::Present),
            room => require(
                room >= length,
                "length of the driver output",
                room,
                Rule::AtLeast(length as u64),
            ),
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

/// Checks that data of a command can be copied.
///
/// # Errors
/// EFAULT if they are not mapped.
fn check_copy(what: &'static str, address: u64, length: u64, access: Access) -> Result<()> {
    let rule = match access {
        Access::Read => Rule::Readable,
        Access::Write => Rule::Writable,
    };
    copyable(address, length, access).map_err(memory(what, address, rule))
}

/// Returns the native-endian 32-bit word at a byte offset.
pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}
