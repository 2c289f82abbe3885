//! RDMA netlink: requests, and parsers of the answers.
//!
//! The parsers accept arbitrary bytes: every length is checked against the
//! input, and malformed input is an error.

use core::fmt;

use zerocopy::{FromBytes, IntoBytes};

use super::device::{CharDevice, Device, DriverId, NodeType, is_component};
use super::sysfs;
use crate::abi::netlink::{
    FLAG_DUMP, FLAG_REQUEST, MSG_DONE, MSG_ERROR, MSG_NOOP, NLDEV_CMD_GET, NLDEV_CMD_GET_CHARDEV,
    NLDEV_CMD_RES_GET, NLDEV_CMD_SYS_GET, NlAttr, NlMsgHdr, attr, nldev_type,
};
use crate::kernel::Kernel;
use crate::{Command, Errno, Error};

/// Clears the nested and byte order bits of an attribute's type, and RDMA's
/// "mandatory" bit.
const ATTR_TYPE_MASK: u16 = 0x1fff;

/// Why a netlink answer is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ParseError {
    /// A length exceeds the input, or is shorter than its header.
    Length,
    /// A required attribute is missing.
    Missing(u16),
    /// An attribute has the wrong length or an invalid value.
    Attribute(u16),
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length => f.write_str("a length exceeds the input"),
            Self::Missing(number) => write!(f, "attribute {number} is missing"),
            Self::Attribute(number) => write!(f, "attribute {number} is malformed"),
        }
    }
}

impl ParseError {
    fn what(self) -> &'static str {
        match self {
            Self::Length => "a length in a netlink message exceeds the input",
            Self::Missing(_) => "a netlink attribute is missing",
            Self::Attribute(_) => "a netlink attribute is malformed",
        }
    }
}

/// One netlink message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Header.
    pub header: NlMsgHdr,
    /// Bytes after the header.
    pub payload: &'a [u8],
}

/// Skips `len` bytes and the padding to a multiple of four.
fn take_padded(bytes: &mut &[u8], len: usize) -> Option<()> {
    let padded = len.checked_add(3)? & !3;
    // The last one may lack its padding.
    *bytes = bytes.get(padded.min(bytes.len())..)?;
    Some(())
}

/// The messages of a datagram. Stops after the first error.
#[derive(Clone, Debug)]
pub struct Messages<'a>(&'a [u8]);

impl<'a> Messages<'a> {
    /// Iterates over the messages of `datagram`.
    pub fn new(datagram: &'a [u8]) -> Self {
        Self(datagram)
    }
}

impl<'a> Iterator for Messages<'a> {
    type Item = Result<Message<'a>, ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let message = NlMsgHdr::read_from_prefix(self.0)
            .ok()
            .and_then(|(header, _)| {
                let len = header.len as usize;
                let payload = self.0.get(size_of::<NlMsgHdr>()..len)?;
                take_padded(&mut self.0, len)?;
                Some(Message { header, payload })
            });
        if message.is_none() {
            self.0 = &[];
        }
        Some(message.ok_or(ParseError::Length))
    }
}

/// The attributes of a message: number and payload. Stops after the first
/// error.
#[derive(Clone, Debug)]
pub struct Attributes<'a>(&'a [u8]);

impl<'a> Attributes<'a> {
    /// Iterates over the attributes in `payload`.
    pub fn new(payload: &'a [u8]) -> Self {
        Self(payload)
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = Result<(u16, &'a [u8]), ParseError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let attribute = NlAttr::read_from_prefix(self.0)
            .ok()
            .and_then(|(header, _)| {
                let len = usize::from(header.len);
                let payload = self.0.get(size_of::<NlAttr>()..len)?;
                take_padded(&mut self.0, len)?;
                Some((header.attr_type & ATTR_TYPE_MASK, payload))
            });
        if attribute.is_none() {
            self.0 = &[];
        }
        Some(attribute.ok_or(ParseError::Length))
    }
}

/// A device, as the device list describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMessage {
    /// Index.
    pub index: u32,
    /// Name: one component of a path.
    pub name: String,
    /// Number of ports.
    pub num_ports: u32,
    /// Node GUID, host byte order.
    pub node_guid: u64,
    /// Node type.
    pub node_type: NodeType,
}

/// Parses an integer whose length must match exactly.
fn integer<T: FromBytes>(number: u16, payload: &[u8]) -> Result<T, ParseError> {
    T::read_from_bytes(payload).map_err(|_| ParseError::Attribute(number))
}

/// Parses a NUL-terminated name that is safe as one component of a path.
fn name(number: u16, payload: &[u8]) -> Result<String, ParseError> {
    let text = core::ffi::CStr::from_bytes_until_nul(payload)
        .ok()
        .and_then(|text| text.to_str().ok());
    match text {
        Some(text) if is_component(text) => Ok(text.to_owned()),
        _ => Err(ParseError::Attribute(number)),
    }
}

/// Parses one message of the device list.
///
/// # Errors
/// [`ParseError`] if an attribute is missing or malformed.
pub fn parse_device(payload: &[u8]) -> Result<DeviceMessage, ParseError> {
    let (mut index, mut device_name, mut ports, mut guid, mut node_type) =
        (None, None, None, None, None);
    for attribute in Attributes::new(payload) {
        let (number, value) = attribute?;
        match number {
            attr::ATTR_DEV_INDEX => index = Some(integer(number, value)?),
            attr::ATTR_DEV_NAME => device_name = Some(name(number, value)?),
            attr::ATTR_PORT_INDEX => ports = Some(integer(number, value)?),
            attr::ATTR_NODE_GUID => guid = Some(integer(number, value)?),
            attr::ATTR_DEV_NODE_TYPE => node_type = Some(NodeType(integer(number, value)?)),
            _ => {}
        }
    }
    Ok(DeviceMessage {
        index: index.ok_or(ParseError::Missing(attr::ATTR_DEV_INDEX))?,
        name: device_name.ok_or(ParseError::Missing(attr::ATTR_DEV_NAME))?,
        num_ports: ports.ok_or(ParseError::Missing(attr::ATTR_PORT_INDEX))?,
        node_guid: guid.ok_or(ParseError::Missing(attr::ATTR_NODE_GUID))?,
        node_type: node_type.ok_or(ParseError::Missing(attr::ATTR_DEV_NODE_TYPE))?,
    })
}

/// The numbers of a device's objects.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectCounts {
    /// Name of the device.
    pub device: String,
    /// Numbers of objects of all processes and of the kernel, by the kernel's names, such as `qp`.
    pub counts: Vec<(String, u64)>,
}

/// Parses one message of the answer about numbers of objects.
///
/// # Errors
/// [`ParseError`] if an attribute is missing or malformed.
pub fn parse_object_counts(payload: &[u8]) -> Result<ObjectCounts, ParseError> {
    let (mut device, mut counts) = (None, Vec::new());
    for attribute in Attributes::new(payload) {
        let (number, value) = attribute?;
        match number {
            attr::ATTR_DEV_NAME => device = Some(name(number, value)?),
            attr::ATTR_RES_SUMMARY => {
                for entry in Attributes::new(value) {
                    let (number, entry) = entry?;
                    if number == attr::ATTR_RES_SUMMARY_ENTRY {
                        counts.push(parse_object_count(entry)?);
                    }
                }
            }
            _ => {}
        }
    }
    let device = device.ok_or(ParseError::Missing(attr::ATTR_DEV_NAME))?;
    Ok(ObjectCounts { device, counts })
}

/// Parses the number of the objects of one kind.
fn parse_object_count(entry: &[u8]) -> Result<(String, u64), ParseError> {
    let (mut kind, mut count) = (None, None);
    for attribute in Attributes::new(entry) {
        let (number, value) = attribute?;
        match number {
            attr::ATTR_RES_SUMMARY_ENTRY_NAME => kind = Some(name(number, value)?),
            attr::ATTR_RES_SUMMARY_ENTRY_CURR => count = Some(integer(number, value)?),
            _ => {}
        }
    }
    Ok((
        kind.ok_or(ParseError::Missing(attr::ATTR_RES_SUMMARY_ENTRY_NAME))?,
        count.ok_or(ParseError::Missing(attr::ATTR_RES_SUMMARY_ENTRY_CURR))?,
    ))
}

/// Returns the major and the minor number from their format in messages, `huge_encode_dev`
/// of the kernel: the low byte and bits 20 and up are the minor number.
fn decode_device_number(number: u64) -> (u32, u32) {
    let minor = (number & 0xff) | ((number >> 12) & 0xf_ff00);
    (((number & 0xf_ff00) >> 8) as u32, minor as u32)
}

/// Encodes a major number below 4096 and a minor number below 2^20 for a message.
pub fn encode_device_number(major: u32, minor: u32) -> u64 {
    let (major, minor) = (u64::from(major), u64::from(minor));
    (minor & 0xff) | (major << 8) | ((minor & 0xf_ff00) << 12)
}

/// Parses the answer about a character device.
///
/// # Errors
/// [`ParseError`] if an attribute is missing or malformed. The driver's number
/// is optional.
pub fn parse_char_device(payload: &[u8]) -> Result<CharDevice, ParseError> {
    let (mut device_name, mut dev, mut abi, mut driver) = (None, None, None, DriverId::UNKNOWN);
    for attribute in Attributes::new(payload) {
        let (number, value) = attribute?;
        match number {
            attr::ATTR_CHARDEV_NAME => device_name = Some(name(number, value)?),
            attr::ATTR_CHARDEV => dev = Some(integer::<u64>(number, value)?),
            attr::ATTR_CHARDEV_ABI => abi = Some(integer::<u64>(number, value)?),
            attr::ATTR_UVERBS_DRIVER_ID => driver = DriverId(integer(number, value)?),
            _ => {}
        }
    }
    let dev = dev.ok_or(ParseError::Missing(attr::ATTR_CHARDEV))?;
    let (major, minor) = decode_device_number(dev);
    Ok(CharDevice {
        name: device_name.ok_or(ParseError::Missing(attr::ATTR_CHARDEV_NAME))?,
        dev_t: libc::makedev(major, minor),
        // The upper half is reserved.
        abi_version: abi.ok_or(ParseError::Missing(attr::ATTR_CHARDEV_ABI))? as u32,
        driver_id: driver,
    })
}

/// Parses the answer about the RDMA subsystem: whether the kernel copies pinned
/// pages when a process forks. False for kernels that do not report it.
///
/// # Errors
/// [`ParseError`] if the attribute is malformed.
pub fn parse_copy_on_fork(payload: &[u8]) -> Result<bool, ParseError> {
    for attribute in Attributes::new(payload) {
        let (number, value) = attribute?;
        if number == attr::SYS_ATTR_COPY_ON_FORK {
            return integer::<u8>(number, value).map(|value| value != 0);
        }
    }
    Ok(false)
}

/// A message under construction.
#[derive(Clone, Debug)]
pub struct MessageBuilder(Vec<u8>);

impl MessageBuilder {
    /// Begins a message, whose length in `header` is ignored.
    pub fn new(header: NlMsgHdr) -> Self {
        Self(header.as_bytes().to_vec())
    }

    /// Begins a request with the flags, in addition to that of all requests.
    pub fn request(command: u16, flags: u16) -> Self {
        Self::new(NlMsgHdr {
            len: 0,
            msg_type: nldev_type(command),
            flags: FLAG_REQUEST | flags,
            seq: 1,
            pid: 0,
        })
    }

    /// Appends bytes and their padding.
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    /// Appends an attribute. Values are short names and integers.
    pub fn attribute(mut self, number: u16, value: &[u8]) -> Self {
        debug_assert!(value.len() < 1024);
        let header = NlAttr {
            len: (size_of::<NlAttr>() + value.len()) as u16,
            attr_type: number,
        };
        self.0.extend_from_slice(header.as_bytes());
        self.bytes(value)
    }

    /// Appends an attribute of a name, which the format ends with a NUL.
    pub fn name(self, number: u16, name: &str) -> Self {
        self.attribute(number, format!("{name}\0").as_bytes())
    }

    /// Appends an attribute that contains those that `fill` appends: fewer than 64 KiB.
    pub fn nested(mut self, number: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let start = self.0.len();
        let header = NlAttr {
            len: 0,
            attr_type: number,
        };
        self.0.extend_from_slice(header.as_bytes());
        let mut filled = fill(self);
        let len = filled.len() - start;
        debug_assert!(u16::try_from(len).is_ok());
        if let Some(field) = filled.0.get_mut(start..start + 2) {
            field.copy_from_slice(&(len as u16).to_ne_bytes());
        }
        filled
    }

    /// Returns the length of what the message contains so far.
    #[allow(clippy::len_without_is_empty, reason = "it always has a header")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the message.
    pub fn finish(mut self) -> Vec<u8> {
        let len = (self.0.len() as u32).to_ne_bytes();
        if let Some(field) = self.0.get_mut(..4) {
            field.copy_from_slice(&len);
        }
        self.0
    }
}

/// Builds the request for all devices.
pub fn devices_request() -> Vec<u8> {
    MessageBuilder::request(NLDEV_CMD_GET, FLAG_DUMP).finish()
}

/// Builds the request for the uverbs character device of a device.
pub fn char_device_request(index: u32) -> Vec<u8> {
    MessageBuilder::request(NLDEV_CMD_GET_CHARDEV, 0)
        .attribute(attr::ATTR_DEV_INDEX, index.as_bytes())
        .name(attr::ATTR_CHARDEV_TYPE, "uverbs")
        .finish()
}

/// Builds the request for the state of the RDMA subsystem.
pub fn system_request() -> Vec<u8> {
    MessageBuilder::request(NLDEV_CMD_SYS_GET, 0).finish()
}

/// State of an exchange after a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// More datagrams follow.
    More,
    /// The answer is complete.
    Done,
    /// The kernel returned an error.
    Refused(Errno),
}

/// Reads one datagram of the answer to `command` and passes each message's
/// payload to `each`. A dump ends with a message of its own, any other answer
/// after its first message.
///
/// # Errors
/// [`ParseError`] if the datagram is malformed, or the error of `each`.
pub fn read_answer(
    datagram: &[u8],
    command: u16,
    dump: bool,
    mut each: impl FnMut(&[u8]) -> Result<(), ParseError>,
) -> Result<Progress, ParseError> {
    for message in Messages::new(datagram) {
        let Message { header, payload } = message?;
        match header.msg_type {
            MSG_NOOP => {}
            MSG_DONE => return Ok(Progress::Done),
            MSG_ERROR => {
                let (code, _) = i32::read_from_prefix(payload).map_err(|_| ParseError::Length)?;
                // Zero is an acknowledgement.
                return Ok(if code == 0 {
                    Progress::Done
                } else {
                    Progress::Refused(Errno::new(code.saturating_neg()))
                });
            }
            number if number == nldev_type(command) => {
                each(payload)?;
                if !dump {
                    return Ok(Progress::Done);
                }
            }
            // Unrelated, such as a notification.
            _ => {}
        }
    }
    Ok(Progress::More)
}

/// Sends a request and reads the whole answer.
fn exchange(
    kernel: &dyn Kernel,
    name: Command,
    (command, dump): (u16, bool),
    request: &[u8],
    mut each: impl FnMut(&[u8]) -> Result<(), ParseError>,
) -> Result<(), Error> {
    let mut outcome = Ok(Progress::More);
    let received = kernel.netlink(request, &mut |datagram| {
        outcome = read_answer(datagram, command, dump, &mut each);
        outcome != Ok(Progress::More)
    });
    let refused = |errno| Error::refused(name, None, errno);
    received.map_err(refused)?;
    match outcome {
        Ok(Progress::Done) => Ok(()),
        Ok(Progress::Refused(errno)) => Err(refused(errno)),
        Ok(Progress::More) => Err(Error::BadAnswer {
            command: name,
            what: "the netlink answer is incomplete",
        }),
        Err(error) => {
            tracing::debug!(%error, command = name.name(), "malformed netlink answer");
            Err(Error::BadAnswer {
                command: name,
                what: error.what(),
            })
        }
    }
}

/// Lists all devices by netlink. Where netlink does not report a character
/// device, sysfs is tried.
///
/// # Errors
/// The device list is not available; the caller tries sysfs.
pub fn devices(kernel: &dyn Kernel) -> Result<Vec<Device>, Error> {
    let mut found = Vec::new();
    exchange(
        kernel,
        Command::ListDevices,
        (NLDEV_CMD_GET, true),
        &devices_request(),
        |payload| {
            found.push(parse_device(payload)?);
            Ok(())
        },
    )?;
    let mut devices = Vec::new();
    for message in found {
        let ibdev_path = sysfs::ibdev_path(kernel, &message.name);
        let char_device = match char_device(kernel, message.index) {
            Ok(char_device) => char_device,
            Err(error) => match sysfs::char_device(kernel, &ibdev_path) {
                Some(char_device) => char_device,
                None => {
                    // Some RDMA devices have no character device.
                    tracing::debug!(%error, device = message.name, "no uverbs character device");
                    continue;
                }
            },
        };
        let device = Device {
            name: message.name,
            index: Some(message.index),
            driver_id: char_device.driver_id,
            node_type: message.node_type,
            node_guid: Some(message.node_guid),
            num_ports: Some(message.num_ports),
            uverbs_name: char_device.name,
            dev_t: char_device.dev_t,
            abi_version: char_device.abi_version,
            ibdev_path,
        };
        if device.is_accessible(kernel) {
            devices.push(device);
        } else {
            tracing::debug!(
                device = device.name,
                path = device.device_path(),
                "the character device node does not exist"
            );
        }
    }
    Ok(devices)
}

/// Counts the objects of all devices.
///
/// # Errors
/// The kernel does not answer.
pub fn object_counts(kernel: &dyn Kernel) -> Result<Vec<ObjectCounts>, Error> {
    let mut found = Vec::new();
    exchange(
        kernel,
        Command::CountObjects,
        (NLDEV_CMD_RES_GET, true),
        &MessageBuilder::request(NLDEV_CMD_RES_GET, FLAG_DUMP).finish(),
        |payload| {
            found.push(parse_object_counts(payload)?);
            Ok(())
        },
    )?;
    Ok(found)
}

/// Queries the uverbs character device of a device.
///
/// # Errors
/// ENODEV if it has none.
pub fn char_device(kernel: &dyn Kernel, index: u32) -> Result<CharDevice, Error> {
    let command = Command::GetCharDevice;
    let mut found = None;
    exchange(
        kernel,
        command,
        (NLDEV_CMD_GET_CHARDEV, false),
        &char_device_request(index),
        |payload| {
            found = Some(parse_char_device(payload)?);
            Ok(())
        },
    )?;
    found.ok_or(Error::BadAnswer {
        command,
        what: "no character device in the netlink answer",
    })
}

/// Returns whether the kernel copies pinned pages when a process forks, so that
/// registered memory needs no madvise. False if the kernel does not report it.
pub fn copy_on_fork(kernel: &dyn Kernel) -> bool {
    let mut answer = false;
    let result = exchange(
        kernel,
        Command::GetSystem,
        (NLDEV_CMD_SYS_GET, false),
        &system_request(),
        |payload| {
            answer = parse_copy_on_fork(payload)?;
            Ok(())
        },
    );
    result.is_ok() && answer
}
