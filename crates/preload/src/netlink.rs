//! RDMA netlink: answers to requests about the devices.

use embedded::Embedded;
use embedded::sysfs;
use nix::net::if_::{if_indextoname, if_nametoindex};
use uverbs::Errno;
use uverbs::abi::netlink::{
    FLAG_ACK, FLAG_CAPPED, FLAG_DUMP, FLAG_MULTI, FLAG_REQUEST, MSG_DONE, MSG_ERROR,
    NLDEV_CMD_DELLINK, NLDEV_CMD_GET, NLDEV_CMD_GET_CHARDEV, NLDEV_CMD_NEWLINK, NLDEV_CMD_PORT_GET,
    NLDEV_CMD_RES_GET, NLDEV_CMD_STAT_GET, NLDEV_CMD_SYS_GET, NlMsgHdr, SYS_ATTR_MONITOR_MODE,
    SYS_ATTR_PRIVILEGED_QKEY_MODE, attr, nldev_type,
};
use uverbs::discovery::netlink::{
    Attributes, Message, MessageBuilder, Messages, encode_device_number,
};
use uverbs::discovery::{DriverId, NodeType};
use zerocopy::{FromBytes, IntoBytes};

use crate::process::ProcessState;
use crate::resources::{
    Detail, Kind, describe_all, describe_counters, describe_one, describe_summary,
};
use crate::{config, tree};

const GET: u16 = nldev_type(NLDEV_CMD_GET);
const PORT_GET: u16 = nldev_type(NLDEV_CMD_PORT_GET);
const SYS_GET: u16 = nldev_type(NLDEV_CMD_SYS_GET);
const RES_GET: u16 = nldev_type(NLDEV_CMD_RES_GET);
const STAT_GET: u16 = nldev_type(NLDEV_CMD_STAT_GET);
const GET_CHARDEV: u16 = nldev_type(NLDEV_CMD_GET_CHARDEV);
const NEW_LINK: u16 = nldev_type(NLDEV_CMD_NEWLINK);
const DELETE_LINK: u16 = nldev_type(NLDEV_CMD_DELLINK);

/// Returns the datagrams that answer the requests of a datagram, which a socket with this
/// port has sent.
pub(crate) fn answers(datagram: &[u8], port: u32) -> Vec<Vec<u8>> {
    let mut datagrams = Vec::new();
    // As in the kernel, nothing is answered from the first malformed message on.
    for request in Messages::new(datagram).map_while(Result::ok) {
        if request.header.flags & FLAG_REQUEST != 0 {
            answer(&request, port, &mut datagrams);
        }
    }
    datagrams
}

/// Adds the datagrams that answer a request.
fn answer(request: &Message<'_>, port: u32, datagrams: &mut Vec<Vec<u8>>) {
    let NlMsgHdr {
        msg_type: kind,
        flags,
        seq,
        ..
    } = request.header;
    let begin = |msg_type, flags| {
        MessageBuilder::new(NlMsgHdr {
            len: 0,
            msg_type,
            flags,
            seq,
            pid: port,
        })
    };
    let dump = flags & FLAG_DUMP == FLAG_DUMP;
    let begin_part = || begin(kind, if dump { FLAG_MULTI } else { 0 });
    let objects = Arguments::parse(request.payload).and_then(|arguments| match (kind, dump) {
        (GET, true) => Ok(devices()
            .map(|device| device.describe(begin_part()))
            .collect()),
        (GET, false) => Ok(vec![arguments.device()?.describe(begin_part())]),
        (PORT_GET, true) => Ok(vec![arguments.device()?.describe_port(begin_part())]),
        (PORT_GET, false) => Ok(vec![arguments.port()?.describe_port(begin_part())]),
        (SYS_GET, false) => Ok(vec![describe_system(begin_part())]),
        (GET_CHARDEV, false) => Ok(vec![arguments.describe_char_device(begin_part())?]),
        (RES_GET, true) => {
            let summary = |it: Device| describe_summary(it.device, it.identify(begin_part()));
            Ok(devices().map(summary).collect())
        }
        (RES_GET, false) => {
            let it = arguments.device()?;
            Ok(vec![describe_summary(it.device, it.identify(begin_part()))])
        }
        (STAT_GET, false) => Ok(vec![arguments.counters(begin_part())?]),
        (STAT_GET, true) => arguments.counters_of_objects(begin_part),
        (NEW_LINK, false) => arguments.new_link().map(|()| Vec::new()),
        // The devices stay.
        (DELETE_LINK, false) => arguments.device().map(|_| Vec::new()),
        (other, dump) => {
            let command = other.wrapping_sub(nldev_type(0));
            let kind = Kind::of_command(command).ok_or(Errno::new(libc::EOPNOTSUPP))?;
            arguments.objects(kind, dump, begin_part)
        }
    });
    let error = objects.as_ref().map_or_else(|errno| -errno.raw(), |_| 0);
    datagrams.extend(objects.into_iter().flatten().map(MessageBuilder::finish));
    if error == 0 && dump {
        let done = begin(MSG_DONE, FLAG_MULTI).bytes(error.as_bytes());
        datagrams.push(done.finish());
    } else if error != 0 || flags & FLAG_ACK != 0 {
        let message = begin(MSG_ERROR, FLAG_CAPPED).bytes(error.as_bytes());
        datagrams.push(message.bytes(request.header.as_bytes()).finish());
    }
}

/// The attributes of requests.
#[derive(Default)]
struct Arguments<'a> {
    device: Option<u32>,
    port: Option<u32>,
    /// Kind of objects whose counters are asked for: the attribute of their table.
    counted: Option<u32>,
    /// Numbers of objects, with their attributes.
    numbers: Vec<(u16, u32)>,
    char_device: Option<&'a [u8]>,
    /// Name of a device.
    name: Option<&'a [u8]>,
}

impl<'a> Arguments<'a> {
    fn parse(payload: &'a [u8]) -> Result<Self, Errno> {
        let invalid = Errno::new(libc::EINVAL);
        let integer = |value| u32::read_from_bytes(value).map_err(|_| invalid);
        let mut arguments = Self::default();
        for attribute in Attributes::new(payload) {
            match attribute.map_err(|_| invalid)? {
                (attr::ATTR_DEV_INDEX, value) => arguments.device = Some(integer(value)?),
                (attr::ATTR_PORT_INDEX, value) => arguments.port = Some(integer(value)?),
                (attr::ATTR_STAT_RES, value) => arguments.counted = Some(integer(value)?),
                (attr::ATTR_CHARDEV_TYPE, value) => arguments.char_device = Some(value),
                (attr::ATTR_DEV_NAME, value) => arguments.name = Some(value),
                (number, value) if value.len() == size_of::<u32>() => {
                    arguments.numbers.push((number, integer(value)?));
                }
                _ => {}
            }
        }
        Ok(arguments)
    }

    /// Returns the device that the request names.
    fn device(&self) -> Result<Device, Errno> {
        let index = self.device.ok_or(Errno::new(libc::EINVAL))?;
        let device = devices().nth(index as usize);
        device.ok_or(Errno::new(libc::ENODEV))
    }

    /// Lets `rdma link add NAME type rxe` succeed if there is a device with this name.
    fn new_link(&self) -> Result<(), Errno> {
        let name = self.name.and_then(|name| name.strip_suffix(b"\0"));
        let name = name.and_then(|name| std::str::from_utf8(name).ok());
        let name = name.ok_or(Errno::new(libc::EINVAL))?;
        if config::device_named(name).is_some() {
            return Ok(());
        }
        config::print_error(&format!(
            "there is no embedded device {name:?}: name one so (ringverbs run --name, \
             RINGVERBS_NAMES)"
        ));
        Err(Errno::new(libc::EOPNOTSUPP))
    }

    /// Returns the device whose port the request names.
    fn port(&self) -> Result<Device, Errno> {
        match self.port {
            Some(1) => self.device(),
            _ => Err(Errno::new(libc::EINVAL)),
        }
    }

    /// Returns messages with the object that the request names, or with all of a kind.
    fn objects(
        &self,
        kind: Kind,
        all: bool,
        begin: impl Fn() -> MessageBuilder,
    ) -> Result<Vec<MessageBuilder>, Errno> {
        let it = self.device()?;
        // As in the kernel, a single object is named with its port, if it has one, and only then.
        let is_valid = match self.port {
            None => all || !kind.has_port(),
            Some(port) => port == 1 && (all || kind.has_port()),
        };
        if !is_valid {
            return Err(Errno::new(libc::EINVAL));
        }
        let begin = || it.identify(begin());
        if all {
            let detail = match self.port {
                None => Detail::All,
                Some(_) => Detail::OfPort,
            };
            return Ok(describe_all(it.device, kind, detail, begin));
        }
        let mut numbers = self.numbers.iter();
        let number = numbers.find(|(attribute, _)| *attribute == kind.number());
        let (_, number) = *number.ok_or(Errno::new(libc::EINVAL))?;
        Ok(vec![describe_one(it.device, kind, number, begin())?])
    }

    /// Describes the counters of the port that the request names.
    fn counters(&self, message: MessageBuilder) -> Result<MessageBuilder, Errno> {
        if self.counted.is_some() {
            return Err(Errno::new(libc::EINVAL));
        }
        let it = self.port()?;
        let message = it.identify(message);
        let message = message.attribute(attr::ATTR_PORT_INDEX, 1_u32.as_bytes());
        Ok(describe_counters(it.device, message))
    }

    /// Returns messages with the counters of all objects of the kind that the request names.
    /// Queue pairs share the port's counters, and memory regions have none.
    fn counters_of_objects(
        &self,
        begin: impl Fn() -> MessageBuilder,
    ) -> Result<Vec<MessageBuilder>, Errno> {
        let it = self.device()?;
        let begin = || it.identify(begin());
        match self.counted.map(u16::try_from) {
            Some(Ok(attr::ATTR_RES_QP)) => Ok(Vec::new()),
            Some(Ok(attr::ATTR_RES_MR)) => {
                Ok(describe_all(it.device, Kind::Mr, Detail::Number, begin))
            }
            _ => Err(Errno::new(libc::EINVAL)),
        }
    }

    /// Describes the character device that the request names.
    fn describe_char_device(&self, message: MessageBuilder) -> Result<MessageBuilder, Errno> {
        let describe = |name: &str, (major, minor), abi: u64| {
            message
                .name(attr::ATTR_CHARDEV_NAME, name)
                .attribute(attr::ATTR_CHARDEV_ABI, abi.as_bytes())
                .attribute(
                    attr::ATTR_CHARDEV,
                    encode_device_number(major, minor).as_bytes(),
                )
        };
        match self.char_device {
            Some(b"uverbs\0") => {
                let index = self.device()?.index;
                let number = (sysfs::UVERBS_MAJOR, sysfs::UVERBS_MINOR + index);
                let message = describe(&format!("uverbs{index}"), number, sysfs::UVERBS_ABI);
                Ok(message.attribute(attr::ATTR_UVERBS_DRIVER_ID, DriverId::MLX5.0.as_bytes()))
            }
            Some(b"rdma_cm\0") => Ok(describe("rdma_cm", sysfs::MANAGER, sysfs::MANAGER_ABI)),
            _ => Err(Errno::new(libc::ENODEV)),
        }
    }
}

/// A device of this process.
struct Device {
    index: u32,
    device: &'static Embedded,
}

/// Returns the devices; none, after an error was printed, if they or their files cannot be
/// created.
fn devices() -> impl Iterator<Item = Device> {
    let files = tree::root();
    let devices = files.and_then(|_| ProcessState::current().devices().ok());
    let devices = devices.unwrap_or_default();
    (0..)
        .zip(devices)
        .map(|(index, device)| Device { index, device })
}

impl Device {
    /// Adds what identifies the device.
    fn identify(&self, message: MessageBuilder) -> MessageBuilder {
        message
            .attribute(attr::ATTR_DEV_INDEX, self.index.as_bytes())
            .name(
                attr::ATTR_DEV_NAME,
                &config::device_name(self.index as usize),
            )
    }

    fn is_ethernet(&self) -> bool {
        let profile = config::get().and_then(|config| config.profiles.get(self.index as usize));
        profile.is_some_and(|profile| sysfs::is_ethernet(profile))
    }

    /// Describes the device.
    fn describe(&self, message: MessageBuilder) -> MessageBuilder {
        let guid = self.device.node_guid();
        let protocol = if self.is_ethernet() { "roce" } else { "ib" };
        let firmware = config::card(self.index as usize).firmware_text();
        self.identify(message)
            .attribute(attr::ATTR_PORT_INDEX, 1_u32.as_bytes())
            .name(attr::ATTR_FW_VERSION, &firmware)
            .attribute(attr::ATTR_NODE_GUID, guid.as_bytes())
            .attribute(attr::ATTR_SYS_IMAGE_GUID, guid.as_bytes())
            .attribute(attr::ATTR_DEV_NODE_TYPE, NodeType::CA.0.as_bytes())
            .name(attr::ATTR_DEV_PROTOCOL, protocol)
    }

    /// Describes the port.
    fn describe_port(&self, message: MessageBuilder) -> MessageBuilder {
        let state = sysfs::port_state(self.device);
        let message = self
            .identify(message)
            .attribute(attr::ATTR_PORT_INDEX, 1_u32.as_bytes())
            .attribute(attr::ATTR_PORT_STATE, &[state.logical.0])
            .attribute(attr::ATTR_PORT_PHYS_STATE, &[state.physical.0]);
        if self.is_ethernet() {
            return self.describe_interface(message);
        }
        let lid = u32::from(self.device.lid());
        let gids = self.device.gids();
        let prefix = gids.first().and_then(|gid| gid.first_chunk()).copied();
        message
            .attribute(
                attr::ATTR_SUBNET_PREFIX,
                u64::from_be_bytes(prefix.unwrap_or_default()).as_bytes(),
            )
            .attribute(attr::ATTR_LID, lid.as_bytes())
            .attribute(attr::ATTR_SM_LID, u32::from(Embedded::SM_LID).as_bytes())
            .attribute(attr::ATTR_LMC, &[0])
    }

    /// Adds the port's network interface: the node's if the host has one with that name.
    fn describe_interface(&self, message: MessageBuilder) -> MessageBuilder {
        // The device's interface may have been renamed.
        let given = config::node_interface(self.index as usize);
        let given = given.and_then(|name| if_nametoindex(name).ok());
        let index = given.unwrap_or_else(|| self.device.interface());
        let name = if_indextoname(index).ok();
        match name.as_ref().and_then(|name| name.to_str().ok()) {
            Some(name) => message
                .attribute(attr::ATTR_NDEV_INDEX, index.as_bytes())
                .name(attr::ATTR_NDEV_NAME, name),
            None => message,
        }
    }
}

/// Describes the RDMA subsystem. Devices are shared by network namespaces, a fork does not harm
/// registered memory (a device has the addresses of its process), programs without rights may
/// use queue keys with the top bit set, and there are no notifications.
fn describe_system(message: MessageBuilder) -> MessageBuilder {
    message
        .attribute(attr::SYS_ATTR_NETNS_MODE, &[1])
        .attribute(attr::SYS_ATTR_COPY_ON_FORK, &[1])
        .attribute(SYS_ATTR_PRIVILEGED_QKEY_MODE, &[1])
        .attribute(SYS_ATTR_MONITOR_MODE, &[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a configuration there are no devices.
    #[test]
    fn any_request_is_answered_by_messages() {
        let request = |command, flags| {
            MessageBuilder::request(command, flags)
                .attribute(attr::ATTR_DEV_INDEX, 0_u32.as_bytes())
                .name(attr::ATTR_CHARDEV_TYPE, "rdma_cm")
                .finish()
        };
        let mut errors = Vec::new();
        for command in 0..32 {
            for flags in [0, FLAG_ACK, FLAG_DUMP, FLAG_DUMP | FLAG_ACK] {
                let request = request(command, flags);
                for at in 0..request.len() {
                    for value in [0, 1, 4, 0x7f, 0xff] {
                        let mut changed = request.clone();
                        changed[at] = value;
                        check(&changed);
                        check(&changed[..at]);
                    }
                }
                for message in check(&request) {
                    let (code, _) = i32::read_from_prefix(&message).unwrap_or_default();
                    errors.push((command, flags, -code));
                }
            }
        }
        assert!(errors.contains(&(NLDEV_CMD_GET, 0, libc::ENODEV)));
        assert!(errors.contains(&(NLDEV_CMD_GET, FLAG_DUMP, 0)));
        assert!(errors.contains(&(NLDEV_CMD_PORT_GET, FLAG_ACK, libc::EINVAL)));
        assert!(errors.contains(&(NLDEV_CMD_GET_CHARDEV, FLAG_ACK, 0)));
        assert!(errors.contains(&(NLDEV_CMD_RES_GET, FLAG_DUMP, 0)));
        assert!(errors.contains(&(NLDEV_CMD_STAT_GET, 0, libc::EINVAL)));
        assert!(errors.contains(&(2, FLAG_DUMP, libc::EOPNOTSUPP)));
    }

    /// Returns the payloads of errors and ends.
    fn check(request: &[u8]) -> Vec<Vec<u8>> {
        let mut ends = Vec::new();
        for datagram in answers(request, 5) {
            let messages = Messages::new(&datagram).collect::<Result<Vec<_>, _>>();
            let messages = messages.unwrap();
            assert_eq!(messages.len(), 1);
            let Message { header, payload } = messages[0];
            assert_eq!(header.pid, 5);
            match header.msg_type {
                MSG_ERROR | MSG_DONE => ends.push(payload.to_vec()),
                _ => assert!(Attributes::new(payload).all(|it| it.is_ok())),
            }
        }
        ends
    }
}
