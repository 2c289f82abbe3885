//! Discovery, from recorded datagrams and sysfs files of Linux 6.12 with an rxe
//! device.

use std::sync::Arc;

use crate::abi::netlink::{
    NLDEV_CMD_GET, NLDEV_CMD_GET_CHARDEV, NLDEV_CMD_RES_GET, NLDEV_CMD_SYS_GET, attr, nldev_type,
};
use crate::discovery::netlink::{
    self, DeviceMessage, MessageBuilder, ObjectCounts, ParseError, Progress, char_device_request,
    devices_request, parse_char_device, parse_device, parse_object_counts, read_answer,
    system_request,
};
use crate::discovery::{self, CharDevice, Device, DriverId, NodeType, sysfs};
use crate::kernel::fake::{Call, FakeKernel};
use crate::{Command, Context, Error};

const DEVICE_ATTRIBUTES: &[u8] =
    b"\x08\x00\x01\x00\x00\x00\x00\x00\x09\x00\x02\x00\x72\x78\x65\x30\
\x00\x00\x00\x00\x08\x00\x03\x00\x01\x00\x00\x00\x0c\x00\x04\x00\x76\x3c\x22\x01\xc0\x01\x00\x00\
\x0c\x00\x06\x00\x8f\x17\xba\xfe\xff\x06\x00\x04\x0c\x00\x07\x00\x8f\x17\xba\xfe\xff\x06\x00\x04\
\x05\x00\x0e\x00\x01\x00\x00\x00\x05\x00\x54\x00\x00\x00\x00\x00\x05\x00\x65\x00\x01\x00\x00\x00\
\x09\x00\x43\x00\x72\x6f\x63\x65\x00\x00\x00\x00";

const CHAR_DEVICE_ATTRIBUTES: &[u8] = b"\x08\x00\x49\x00\x0e\x00\x00\x00\x0c\x00\x48\x00\xc0\xe7\
\x00\x00\x00\x00\x00\x00\x0c\x00\x47\x00\x02\x00\x00\x00\x00\x00\x00\x00\x0c\x00\x46\x00\x75\x76\
\x65\x72\x62\x73\x30\x00";

const SYSTEM_ATTRIBUTES: &[u8] =
    b"\x05\x00\x42\x00\x01\x00\x00\x00\x05\x00\x60\x00\x00\x00\x00\x00\
\x05\x00\x67\x00\x01\x00\x00\x00\x05\x00\x5d\x00\x01\x00\x00\x00";

const MSG_ERROR: u16 = 2;
const MSG_DONE: u16 = 3;

fn message(message_type: u16, flags: u16, payload: &[u8]) -> Vec<u8> {
    let len = 16 + payload.len() as u32;
    let mut bytes = len.to_ne_bytes().to_vec();
    bytes.extend(message_type.to_ne_bytes());
    bytes.extend(flags.to_ne_bytes());
    bytes.extend(1u32.to_ne_bytes());
    bytes.extend(201u32.to_ne_bytes());
    bytes.extend(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn attribute(number: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = (4 + value.len() as u16).to_ne_bytes().to_vec();
    bytes.extend(number.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn done() -> Vec<u8> {
    message(MSG_DONE, 2, &[0; 4])
}

/// A host with one rxe device, as netlink describes it.
fn by_netlink() -> Arc<FakeKernel> {
    let fake = FakeKernel::new();
    let list = message(nldev_type(NLDEV_CMD_GET), 2, DEVICE_ATTRIBUTES);
    fake.set_netlink(nldev_type(NLDEV_CMD_GET), vec![list, done()]);
    let chardev = message(nldev_type(NLDEV_CMD_GET_CHARDEV), 0, CHAR_DEVICE_ATTRIBUTES);
    fake.set_netlink(nldev_type(NLDEV_CMD_GET_CHARDEV), vec![chardev]);
    fake.set_device_number("/dev/infiniband/uverbs0", libc::makedev(231, 192));
    fake
}

/// The same host, as sysfs describes it.
fn add_sysfs(fake: &FakeKernel) {
    for (file, contents) in [
        ("/sys/class/infiniband_verbs/abi_version", "6\n"),
        ("/sys/class/infiniband_verbs/uverbs0/ibdev", "rxe0\n"),
        ("/sys/class/infiniband_verbs/uverbs0/dev", "231:192\n"),
        ("/sys/class/infiniband_verbs/uverbs0/abi_version", "2\n"),
        ("/sys/class/infiniband/rxe0/node_type", "1: CA\n"),
        (
            "/sys/class/infiniband/rxe0/node_guid",
            "0400:06ff:feba:178f\n",
        ),
        (
            "/sys/class/infiniband/rxe0/ports/1/gids/1",
            "0000:0000:0000:0000:0000:ffff:c0a8:4d01\n",
        ),
        ("/sys/class/infiniband/rxe0/ports/1/pkeys/0", "0xffff\n"),
        (
            "/sys/class/infiniband/rxe0/device/infiniband_verbs/uverbs0/dev",
            "231:192\n",
        ),
        (
            "/sys/class/infiniband/rxe0/device/infiniband_verbs/uverbs0/abi_version",
            "2\n",
        ),
    ] {
        fake.set_file(file, contents);
    }
}

fn rxe0() -> Device {
    Device {
        name: "rxe0".to_owned(),
        index: Some(0),
        driver_id: DriverId::RXE,
        node_type: NodeType::CA,
        node_guid: Some(0x0400_06ff_feba_178f),
        num_ports: Some(1),
        uverbs_name: "uverbs0".to_owned(),
        dev_t: libc::makedev(231, 192),
        abi_version: 2,
        ibdev_path: "/sys/class/infiniband/rxe0".to_owned(),
    }
}

#[test]
fn netlink_requests_have_the_kernel_s_format() {
    // As recorded, except for this host's byte order.
    if cfg!(target_endian = "little") {
        assert_eq!(
            devices_request(),
            b"\x10\0\0\0\x01\x14\x01\x03\x01\0\0\0\0\0\0\0"
        );
        assert_eq!(
            char_device_request(0),
            b"\x24\0\0\0\x0f\x14\x01\0\x01\0\0\0\0\0\0\0\x08\0\x01\0\0\0\0\0\x0b\0\x45\0uverbs\0\0"
        );
        assert_eq!(
            system_request(),
            b"\x10\0\0\0\x06\x14\x01\0\x01\0\0\0\0\0\0\0"
        );
    }
}

#[cfg(target_endian = "little")]
#[test]
fn the_recorded_answers() {
    let device = DeviceMessage {
        index: 0,
        name: "rxe0".to_owned(),
        num_ports: 1,
        node_guid: 0x0400_06ff_feba_178f,
        node_type: NodeType::CA,
    };
    assert_eq!(parse_device(DEVICE_ATTRIBUTES), Ok(device));
    let char_device = CharDevice {
        name: "uverbs0".to_owned(),
        dev_t: libc::makedev(231, 192),
        abi_version: 2,
        driver_id: DriverId::RXE,
    };
    assert_eq!(parse_char_device(CHAR_DEVICE_ATTRIBUTES), Ok(char_device));
    assert_eq!(netlink::parse_copy_on_fork(SYSTEM_ATTRIBUTES), Ok(true));
    assert_eq!(
        netlink::parse_copy_on_fork(&SYSTEM_ATTRIBUTES[..24]),
        Ok(false),
        "older kernels do not say"
    );
}

#[test]
fn netlink_lists_the_device() {
    let fake = by_netlink();
    assert_eq!(discovery::devices(&fake), Ok(vec![rxe0()]));
    assert!(
        fake.take_calls()
            .iter()
            .all(|call| matches!(call, Call::Netlink(_))),
        "sysfs was not asked"
    );
}

#[test]
fn sysfs_replaces_netlink() {
    let fake = FakeKernel::new();
    add_sysfs(&fake);
    fake.set_device_number("/dev/infiniband/uverbs0", libc::makedev(231, 192));
    let expected = Device {
        index: None,
        driver_id: DriverId::UNKNOWN,
        ..rxe0()
    };
    assert_eq!(discovery::devices(&fake), Ok(vec![expected]));
}

#[test]
fn sysfs_replaces_a_character_device() {
    let fake = by_netlink();
    add_sysfs(&fake);
    let refusal = message(MSG_ERROR, 0, &(-libc::EINVAL).to_ne_bytes());
    fake.set_netlink(nldev_type(NLDEV_CMD_GET_CHARDEV), vec![refusal]);
    let expected = Device {
        driver_id: DriverId::UNKNOWN,
        ..rxe0()
    };
    assert_eq!(discovery::devices(&fake), Ok(vec![expected]));
}

#[test]
fn a_device_without_a_node_is_left_out() {
    let fake = FakeKernel::new();
    add_sysfs(&fake);
    assert_eq!(discovery::devices(&fake), Ok(vec![]));
    let fake = by_netlink();
    fake.set_netlink(nldev_type(NLDEV_CMD_GET_CHARDEV), vec![]);
    assert_eq!(
        discovery::devices(&fake),
        Ok(vec![]),
        "nor without a character device"
    );
}

#[test]
fn without_rdma_there_is_no_device() {
    assert_eq!(discovery::devices(&FakeKernel::new()), Ok(vec![]));
}

#[test]
fn several_datagrams_and_messages() {
    let fake = by_netlink();
    let get = nldev_type(NLDEV_CMD_GET);
    let other = [
        attribute(1, &1u32.to_ne_bytes()),
        attribute(2, b"rxe1\0"),
        attribute(3, &2u32.to_ne_bytes()),
        attribute(6, &5u64.to_ne_bytes()),
        attribute(14, &[4]),
    ]
    .concat();
    let mut first = message(get, 2, DEVICE_ATTRIBUTES);
    first.extend(message(get, 2, &other));
    let mut second = message(0x99, 0, &[1, 2, 3]);
    second.extend(message(get, 2, &other));
    second.extend(done());
    fake.set_netlink(get, vec![first, second]);
    let names: Vec<_> = discovery::devices(&fake)
        .unwrap()
        .into_iter()
        .map(|device| device.name)
        .collect();
    assert_eq!(names, ["rxe0", "rxe1", "rxe1"]);
}

#[test]
fn an_answer_without_an_end_is_an_error() {
    let fake = by_netlink();
    let get = nldev_type(NLDEV_CMD_GET);
    fake.set_netlink(get, vec![message(get, 2, DEVICE_ATTRIBUTES)]);
    let error = netlink::devices(&fake).unwrap_err();
    assert_eq!(
        (error.command(), error.errno().raw()),
        (Command::ListDevices, libc::EAGAIN)
    );
}

#[test]
fn refusals_and_malformed_answers_name_the_command() {
    let fake = by_netlink();
    let get = nldev_type(NLDEV_CMD_GET);
    fake.set_netlink(
        get,
        vec![message(MSG_ERROR, 0, &(-libc::EPERM).to_ne_bytes())],
    );
    let error = netlink::devices(&fake).unwrap_err();
    assert_eq!(
        (error.command(), error.errno().raw()),
        (Command::ListDevices, libc::EPERM)
    );
    fake.set_netlink(get, vec![message(get, 2, &DEVICE_ATTRIBUTES[..30])]);
    let error = netlink::devices(&fake).unwrap_err();
    assert!(
        matches!(
            error,
            Error::BadAnswer {
                command: Command::ListDevices,
                ..
            }
        ),
        "{error:?}"
    );
}

#[test]
fn copy_on_fork() {
    let fake = FakeKernel::new();
    assert!(!netlink::copy_on_fork(&fake));
    let system = nldev_type(NLDEV_CMD_SYS_GET);
    fake.set_netlink(system, vec![message(system, 0, SYSTEM_ATTRIBUTES)]);
    assert!(netlink::copy_on_fork(&fake));
}

#[test]
fn objects_are_counted() {
    let entry = |builder: MessageBuilder, name: &str, count: &[u8]| {
        builder.nested(attr::ATTR_RES_SUMMARY_ENTRY, |it| {
            it.name(attr::ATTR_RES_SUMMARY_ENTRY_NAME, name)
                .attribute(attr::ATTR_RES_SUMMARY_ENTRY_CURR, count)
        })
    };
    let answer = |count: &[u8]| {
        let builder = MessageBuilder::request(NLDEV_CMD_RES_GET, 0);
        let builder = builder.attribute(attr::ATTR_DEV_INDEX, &[0; 4]);
        let builder = builder.name(attr::ATTR_DEV_NAME, "rxe0");
        let builder = builder.nested(attr::ATTR_RES_SUMMARY, |it| {
            entry(entry(it, "pd", count), "qp", &3u64.to_ne_bytes())
        });
        builder.finish()[16..].to_vec()
    };
    let expected = ObjectCounts {
        device: "rxe0".to_owned(),
        counts: vec![("pd".to_owned(), 2), ("qp".to_owned(), 3)],
    };
    let good = answer(&2u64.to_ne_bytes());
    assert_eq!(parse_object_counts(&good), Ok(expected));
    let missing = ParseError::Missing(attr::ATTR_DEV_NAME);
    assert_eq!(parse_object_counts(&[]), Err(missing));
    let wrong = ParseError::Attribute(attr::ATTR_RES_SUMMARY_ENTRY_CURR);
    assert_eq!(parse_object_counts(&answer(&[2; 4])), Err(wrong));
}

#[test]
fn malformed_attributes() {
    let with = |number: u16, value: &[u8]| [DEVICE_ATTRIBUTES, &attribute(number, value)].concat();
    for (number, value) in [
        (1, &b"123"[..]),
        (1, b"12345"),
        (1, b""),
        (2, b"no end"),
        (2, b"\0"),
        (2, b"../etc\0"),
        (2, b"..\0"),
        (2, b"\xff\xfe\0"),
        (3, b"1234567"),
        (6, b"1234"),
        (14, b""),
    ] {
        assert_eq!(
            parse_device(&with(number, value)),
            Err(ParseError::Attribute(number)),
            "{value:?}"
        );
    }
    // The kernel may send attributes that are unknown here.
    parse_device(&with(300, b"whatever")).unwrap();
    for missing in [1, 2, 3, 6, 14] {
        let rest: Vec<u8> = netlink::Attributes::new(DEVICE_ATTRIBUTES)
            .map(Result::unwrap)
            .filter(|(number, _)| *number != missing)
            .flat_map(|(number, value)| attribute(number, value))
            .collect();
        assert_eq!(parse_device(&rest), Err(ParseError::Missing(missing)));
    }
    for missing in [70, 71, 72] {
        let rest: Vec<u8> = netlink::Attributes::new(CHAR_DEVICE_ATTRIBUTES)
            .map(Result::unwrap)
            .filter(|(number, _)| *number != missing)
            .flat_map(|(number, value)| attribute(number, value))
            .collect();
        assert_eq!(parse_char_device(&rest), Err(ParseError::Missing(missing)));
    }
}

#[test]
fn device_numbers_beyond_twenty_bits() {
    // huge_encode_dev of 511:524545.
    let (major, minor) = (511u64, 524_545u64);
    let dev = (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12);
    let bytes = [
        attribute(70, b"uverbs9\0"),
        attribute(71, &1u64.to_ne_bytes()),
        attribute(72, &dev.to_ne_bytes()),
    ]
    .concat();
    assert_eq!(
        parse_char_device(&bytes).unwrap().dev_t,
        libc::makedev(511, 524_545)
    );
}

#[test]
fn an_acknowledgement_ends_an_answer() {
    let ack = message(MSG_ERROR, 0, &[0; 20]);
    assert_eq!(
        read_answer(&ack, NLDEV_CMD_GET, true, |_| Ok(())),
        Ok(Progress::Done)
    );
    let short = message(MSG_ERROR, 0, &[0; 3]);
    assert_eq!(
        read_answer(&short[..19], NLDEV_CMD_GET, true, |_| Ok(())),
        Err(ParseError::Length)
    );
    let odd = message(MSG_ERROR, 0, &i32::MIN.to_ne_bytes());
    let refused = Progress::Refused(crate::Errno::new(i32::MAX));
    assert_eq!(
        read_answer(&odd, NLDEV_CMD_GET, true, |_| Ok(())),
        Ok(refused)
    );
}

#[test]
fn opening() {
    let fake = by_netlink();
    let device = rxe0();
    let context = Context::open(Box::new(Arc::clone(&fake)), &device).unwrap();
    let opened = Call::Open {
        path: "/dev/infiniband/uverbs0".to_owned(),
        flags: libc::O_RDWR,
        result: Ok(context.fd()),
    };
    assert_eq!(fake.take_calls(), [opened]);
    let missing = Device {
        uverbs_name: "uverbs7".to_owned(),
        ..rxe0()
    };
    let error = Context::open(Box::new(Arc::clone(&fake)), &missing).unwrap_err();
    assert_eq!(
        (error.command(), error.errno().raw()),
        (Command::Open, libc::ENOENT)
    );
    let unknown = Device {
        driver_id: DriverId::UNKNOWN,
        ..rxe0()
    };
    let error = Context::open(Box::new(fake), &unknown).unwrap_err();
    assert_eq!(
        (error.command(), error.errno().raw()),
        (Command::Open, libc::EINVAL)
    );
}

#[test]
fn sysfs_tables() {
    let fake = FakeKernel::new();
    add_sysfs(&fake);
    let path = rxe0().ibdev_path;
    assert_eq!(sysfs::read_pkey(&fake, &path, 1, 0), Ok(0xffff));
    assert_eq!(
        sysfs::read_pkey(&fake, &path, 1, 1)
            .unwrap_err()
            .errno()
            .raw(),
        libc::ENOENT
    );
    let gid = sysfs::read_gid(&fake, &path, 1, 1).unwrap();
    assert_eq!(
        gid,
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 168, 77, 1]
    );
    assert!(fake.open_fds().is_empty(), "files are closed again");
    for (file, contents) in [
        ("pkeys/2", "ffff\n".to_owned()),
        ("pkeys/3", "0x1ffff\n".to_owned()),
        ("pkeys/4", "9".repeat(500)),
    ] {
        fake.set_file(&format!("{path}/ports/1/{file}"), contents);
    }
    for index in 2..5 {
        let error = sysfs::read_pkey(&fake, &path, 1, index).unwrap_err();
        assert!(
            matches!(
                error,
                Error::BadAnswer {
                    command: Command::ReadSysfs,
                    ..
                }
            ),
            "{index}"
        );
    }
}

#[test]
fn sysfs_texts() {
    assert_eq!(sysfs::parse_node_type("4: RNIC"), NodeType::RNIC);
    assert_eq!(sysfs::parse_node_type("999: ?"), NodeType::UNKNOWN);
    assert_eq!(sysfs::parse_node_type(""), NodeType::UNKNOWN);
    assert_eq!(
        sysfs::parse_guid("0400:06ff:feba:178f"),
        Some(0x0400_06ff_feba_178f)
    );
    for wrong in [
        "",
        "0400:06ff:feba",
        "0400:06ff:feba:178f:0000",
        "0400:06ff:feba:17 8",
        "+400:06ff:feba:178f",
    ] {
        assert_eq!(sysfs::parse_guid(wrong), None, "{wrong}");
    }
    assert_eq!(
        sysfs::parse_device_number("231:192"),
        Some(libc::makedev(231, 192))
    );
    for wrong in ["", "231", "231:", "a:b", "231:192:3", "99999999999:1"] {
        assert_eq!(sysfs::parse_device_number(wrong), None, "{wrong}");
    }
}
