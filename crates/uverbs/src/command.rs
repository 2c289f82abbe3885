//! One ioctl command: its attributes on the stack, the call, and its outputs.

use core::ffi::c_void;
use core::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::abi::ids;
use crate::abi::ioctl::{ATTR_F_MANDATORY, ATTR_F_VALID_OUTPUT, Attr, IoctlHdr, RDMA_VERBS_IOCTL};
use crate::driver::DriverMethod;
use crate::reason::Reason;
use crate::{Command, Context, Error};

/// The longest method (QP_CREATE) has 15 attributes and two of driver data.
pub(crate) const MAX_ATTRS: usize = 18;

/// Driver data of a command: structures of the driver's user API header, as
/// bytes.
#[derive(Debug, Default)]
pub struct Udata<'a> {
    input: &'a [u8],
    output: &'a mut [u8],
}

impl<'a> Udata<'a> {
    /// No driver data.
    pub fn none() -> Self {
        Self::default()
    }

    /// Provides a buffer for the driver's answer. It is cleared before the
    /// call, so what a driver with a shorter answer does not write is zero.
    pub fn output(output: &'a mut [u8]) -> Self {
        Self { input: &[], output }
    }

    /// Passes `input` to the driver and provides `output` for its answer.
    /// `output` is cleared before the call.
    ///
    /// # Safety
    /// If `input` contains addresses (of queues and doorbell records that the
    /// device will use, or of where to answer), each must refer to memory that
    /// is mapped, has the length that the command implies, and permits what the
    /// driver or the device does there: readable; where it writes, writable and
    /// without references to it. This must hold during the command and, for
    /// memory that the created or changed object keeps using, until the object
    /// is destroyed or the command that replaces the memory has returned. The
    /// kernel pins such pages; a device in this process cannot, and only checks
    /// that they are mapped when the command is given.
    ///
    /// [`none`](Self::none) and [`output`](Self::output) pass no addresses and
    /// are safe with every command.
    pub unsafe fn new(input: &'a [u8], output: &'a mut [u8]) -> Self {
        Self { input, output }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.input.is_empty() && self.output.is_empty()
    }
}

/// An attribute whose answer is read after the command has run.
#[derive(Clone, Copy, Debug)]
pub struct Slot(usize);

/// The kernel's input: header and attributes without a gap.
#[repr(C)]
struct Frame {
    header: IoctlHdr,
    attrs: [Attr; MAX_ATTRS],
}

const _: () = assert!(core::mem::offset_of!(Frame, attrs) == size_of::<IoctlHdr>());

/// A command under construction. Borrows its input and output buffers until it
/// has run.
pub struct Ioctl<'a> {
    command: Command,
    acts_on: Option<u32>,
    frame: Frame,
    used: usize,
    overflow: bool,
    buffers: PhantomData<&'a mut [u8]>,
}

impl<'a> Ioctl<'a> {
    pub(crate) fn new(command: Command, object_id: u16, method_id: u16) -> Self {
        Self {
            command,
            acts_on: None,
            frame: Frame {
                header: IoctlHdr {
                    object_id,
                    method_id,
                    ..IoctlHdr::default()
                },
                attrs: [Attr::default(); MAX_ATTRS],
            },
            used: 0,
            overflow: false,
            buffers: PhantomData,
        }
    }

    /// Builds a driver's method.
    ///
    /// # Safety
    /// The method must treat no input that is added ([`input`](Self::input),
    /// [`u32`](Self::u32), [`u64`](Self::u64), [`constant`](Self::constant)) as
    /// an address or a descriptor; or what it makes the kernel or the device do
    /// with the memory or file must be allowed, as [`Udata::new`] describes.
    pub unsafe fn driver(method: &'static DriverMethod) -> Self {
        Self::new(Command::Driver(method), method.object_id, method.method_id)
    }

    /// Builds the write command `number`, to be invoked through ioctl.
    pub(crate) fn write<I, O>(
        command: Command,
        number: u32,
        input: &'a I,
        output: &'a mut O,
    ) -> WriteCommand<'a>
    where
        I: IntoBytes + Immutable,
        O: IntoBytes + FromBytes,
    {
        Self::write_bytes(command, number, input.as_bytes(), output)
    }

    /// As [`write`](Self::write), of a command whose input has no fixed length.
    pub(crate) fn write_bytes<O>(
        command: Command,
        number: u32,
        input: &'a [u8],
        output: &'a mut O,
    ) -> WriteCommand<'a>
    where
        O: IntoBytes + FromBytes,
    {
        let mut ioctl = Self::new(command, ids::OBJECT_DEVICE, ids::METHOD_INVOKE_WRITE);
        ioctl.constant(ids::ATTR_WRITE_CMD, number.into());
        ioctl.input(ids::ATTR_CORE_IN, input);
        let output = output.as_mut_bytes();
        let answer = (!output.is_empty()).then(|| ioctl.output(ids::ATTR_CORE_OUT, output));
        WriteCommand { ioctl, answer }
    }

    fn push(&mut self, attr_id: u16, len: u16, data: u64) -> Slot {
        let slot = Slot(self.used);
        match self.frame.attrs.get_mut(self.used) {
            Some(attr) => {
                *attr = Attr {
                    attr_id,
                    len,
                    flags: ATTR_F_MANDATORY,
                    enum_or_reserved: 0,
                    data,
                };
                self.used += 1;
            }
            None => self.overflow = true,
        }
        slot
    }

    /// Sets the handle number that errors of the command name.
    pub fn acts_on(&mut self, handle: u32) {
        self.acts_on = Some(handle);
    }

    /// Adds input data: inline up to eight bytes, otherwise by address.
    pub fn input(&mut self, attr_id: u16, bytes: &'a [u8]) {
        // SAFETY: the bytes are readable as long as the command exists.
        unsafe { self.input_raw(attr_id, bytes) };
    }

    /// As [`input`](Self::input), of memory that only the kernel accesses if it has more
    /// than eight bytes.
    ///
    /// # Safety
    /// Up to eight bytes are readable. More are readable, or unmapped, which the kernel
    /// reports (EFAULT), until the command has run.
    pub unsafe fn input_raw(&mut self, attr_id: u16, bytes: *const [u8]) {
        let Ok(len) = u16::try_from(bytes.len()) else {
            self.overflow = true;
            return;
        };
        let mut inline = [0; 8];
        let data = match inline.get_mut(..bytes.len()) {
            Some(start) => {
                // SAFETY: readable, as the caller says.
                start.copy_from_slice(unsafe { &*bytes });
                u64::from_ne_bytes(inline)
            }
            None => bytes.cast::<u8>().expose_provenance() as u64,
        };
        self.push(attr_id, len, data);
    }

    /// Adds an input of four bytes.
    pub fn u32(&mut self, attr_id: u16, value: u32) {
        let [a, b, c, d] = value.to_ne_bytes();
        self.push(attr_id, 4, u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0]));
    }

    /// Adds an input of eight bytes.
    pub fn u64(&mut self, attr_id: u16, value: u64) {
        self.push(attr_id, 8, value);
    }

    /// Adds an enumerated value, which the kernel expects as 64 bits.
    pub fn constant(&mut self, attr_id: u16, value: u64) {
        self.push(attr_id, 8, value);
    }

    /// Adds a value of an enumeration that has no data.
    pub fn enumerated(&mut self, attr_id: u16, value: u8) {
        let slot = self.push(attr_id, 0, 0);
        if let Some(attr) = self.frame.attrs.get_mut(slot.0) {
            attr.enum_or_reserved = u16::from_ne_bytes([value, 0]);
        }
    }

    /// Adds an existing object.
    pub fn handle(&mut self, attr_id: u16, handle: u32) {
        self.push(attr_id, 0, handle.into());
    }

    /// Adds an existing object that is a descriptor.
    pub fn fd(&mut self, attr_id: u16, fd: BorrowedFd<'a>) {
        self.push(attr_id, 0, i64::from(fd.as_raw_fd()) as u64);
    }

    /// Adds the object to create; the kernel fills in its handle.
    pub fn new_object(&mut self, attr_id: u16) -> Slot {
        self.push(attr_id, 0, 0)
    }

    /// Adds an output buffer. It is cleared first, so that what the kernel does
    /// not write reads as zero.
    pub fn output(&mut self, attr_id: u16, bytes: &'a mut [u8]) -> Slot {
        bytes.fill(0);
        // SAFETY: the bytes are writable as long as the command exists.
        unsafe { self.output_raw(attr_id, bytes) }
    }

    /// Adds an output buffer that only the kernel accesses: what it does not write stays.
    ///
    /// # Safety
    /// The memory is writable, or unmapped, which the kernel reports (EFAULT), until the
    /// command has run; no reference to it is used until then.
    pub unsafe fn output_raw(&mut self, attr_id: u16, bytes: *mut [u8]) -> Slot {
        let Ok(len) = u16::try_from(bytes.len()) else {
            self.overflow = true;
            return Slot(usize::MAX);
        };
        self.push(attr_id, len, bytes.cast::<u8>().expose_provenance() as u64)
    }

    pub(crate) fn udata(&mut self, udata: Udata<'a>) {
        if !udata.input.is_empty() {
            self.input(ids::ATTR_UHW_IN, udata.input);
        }
        if !udata.output.is_empty() {
            self.output(ids::ATTR_UHW_OUT, udata.output);
        }
    }

    /// Runs the command.
    ///
    /// # Errors
    /// The kernel's, or EINVAL if the attributes do not fit into a frame.
    pub fn run(mut self, context: &Context) -> Result<Answer, Error> {
        if self.overflow {
            return Err(Error::Invalid {
                command: self.command,
                what: "more data than a command can carry",
            });
        }
        self.frame.header.driver_id = context.driver_id().0;
        self.frame.header.num_attrs = self.used as u16;
        self.frame.header.length = (size_of::<IoctlHdr>() + self.used * size_of::<Attr>()) as u16;
        let frame: *mut Frame = &mut self.frame;
        // SAFETY: `length` in the header covers the header and the used
        // attributes, which lie in the frame. Every address in an attribute is
        // that of a buffer borrowed for 'a, passed with its length. For
        // addresses inside driver data, and for memory to register, the callers
        // of the unsafe functions that take them have vouched.
        let result = unsafe {
            context
                .file()
                .ioctl(RDMA_VERBS_IOCTL, frame.cast::<c_void>())
        };
        match result {
            Ok(_) => Ok(Answer {
                command: self.command,
                attrs: self.frame.attrs,
                used: self.used,
            }),
            Err(errno) => Err(Error::Refused {
                command: self.command,
                handle: self.acts_on,
                errno,
                reason: context.kernel().refusal().map(Reason::keep),
            }),
        }
    }
}

/// A write command under construction.
pub(crate) struct WriteCommand<'a> {
    ioctl: Ioctl<'a>,
    answer: Option<Slot>,
}

impl<'a> WriteCommand<'a> {
    pub(crate) fn acts_on(mut self, handle: u32) -> Self {
        self.ioctl.acts_on(handle);
        self
    }

    pub(crate) fn udata(mut self, udata: Udata<'a>) -> Self {
        self.ioctl.udata(udata);
        self
    }

    /// Runs the command and checks that the kernel wrote the response.
    pub(crate) fn run(self, context: &Context) -> Result<(), Error> {
        let answer = self.ioctl.run(context)?;
        match self.answer {
            Some(slot) => answer.written(slot),
            None => Ok(()),
        }
    }
}

/// The attributes after the kernel wrote to them.
#[derive(Debug)]
pub struct Answer {
    command: Command,
    attrs: [Attr; MAX_ATTRS],
    used: usize,
}

impl Answer {
    fn attr(&self, slot: Slot) -> Result<&Attr, Error> {
        let attrs = self.attrs.get(..self.used).unwrap_or_default();
        attrs.get(slot.0).ok_or(self.bad("an attribute is missing"))
    }

    fn bad(&self, what: &'static str) -> Error {
        Error::BadAnswer {
            command: self.command,
            what,
        }
    }

    /// Returns the handle number of the created object.
    ///
    /// # Errors
    /// EPROTO if it is not a number of 32 bits.
    pub fn handle(&self, slot: Slot) -> Result<u32, Error> {
        u32::try_from(self.attr(slot)?.data).map_err(|_| self.bad("a handle of more than 32 bits"))
    }

    /// Returns the created descriptor.
    ///
    /// # Errors
    /// EPROTO if it is none.
    pub fn fd(&self, slot: Slot) -> Result<RawFd, Error> {
        match RawFd::try_from(self.attr(slot)?.data) {
            Ok(fd) => Ok(fd),
            Err(_) => Err(self.bad("a descriptor out of range")),
        }
    }

    /// Returns whether the kernel reports the output as written.
    pub fn is_written(&self, slot: Slot) -> bool {
        self.attr(slot)
            .is_ok_and(|attr| attr.flags & ATTR_F_VALID_OUTPUT != 0)
    }

    /// Checks that the kernel wrote the output.
    ///
    /// # Errors
    /// EPROTO if it did not.
    pub fn written(&self, slot: Slot) -> Result<(), Error> {
        if self.is_written(slot) {
            Ok(())
        } else {
            Err(self.bad("an output was not written"))
        }
    }

    /// Checks that the kernel wrote all these outputs.
    ///
    /// # Errors
    /// EPROTO if it did not.
    pub fn all_written(&self, slots: &[Slot]) -> Result<(), Error> {
        slots.iter().try_for_each(|&slot| self.written(slot))
    }
}
