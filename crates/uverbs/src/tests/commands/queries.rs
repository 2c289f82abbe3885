//! Device, port, GIDs.

use zerocopy::IntoBytes;

use super::super::context;
use super::*;
use crate::abi::ids::*;
use crate::abi::later::*;
use crate::abi::write::{self, CMD_FLAG_EXTENDED, cmd};
use crate::kernel::fake::Target;
use crate::*;

#[test]
fn queries() {
    let (fake, context) = context();
    fake.on(Target::Write(cmd::CMD_QUERY_DEVICE), |reply| {
        reply.set_core_out(&DeviceAttr {
            max_qp: 5,
            ..DeviceAttr::default()
        });
        Ok(())
    });
    assert_eq!(context.query_device().unwrap().max_qp, 5);
    is_write(
        &only(&fake),
        cmd::CMD_QUERY_DEVICE,
        write::QueryDevice { response: 0 },
        176,
    );

    // The answer of an older kernel is shorter, as its length states.
    fake.on(
        Target::Write(CMD_FLAG_EXTENDED | cmd::CMD_QUERY_DEVICE),
        |reply| {
            let base = DeviceAttr {
                max_cq: 6,
                ..DeviceAttr::default()
            };
            let answer = DeviceAttrEx {
                base,
                response_length: 232,
                timestamp_mask: 9,
                xrc_odp_caps: 8,
                ..Default::default()
            };
            reply.set(
                ATTR_CORE_OUT,
                answer.as_bytes().get(..232).unwrap_or_default(),
            );
            Ok(())
        },
    );
    let attr = context.query_device_ex(Udata::none()).unwrap();
    assert_eq!(
        (attr.base.max_cq, attr.timestamp_mask, attr.xrc_odp_caps),
        (6, 9, 0)
    );
    let request = write::ExQueryDevice {
        comp_mask: 0,
        reserved: 0,
    };
    is_write(
        &only(&fake),
        CMD_FLAG_EXTENDED | cmd::CMD_QUERY_DEVICE,
        request,
        304,
    );

    fake.on(Target::Method(OBJECT_DEVICE, METHOD_QUERY_PORT), |reply| {
        let attr = PortAttr {
            port_cap_flags2: 4,
            active_speed_ex: 0x100,
            ..PortAttr::default()
        };
        reply.set(ATTR_QUERY_PORT_RESP, attr.as_bytes());
        Ok(())
    });
    let attr = context.query_port(2).unwrap();
    assert_eq!((attr.port_cap_flags2, attr.active_speed_ex), (4, 0x100));
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            in64(ATTR_QUERY_PORT_PORT_NUM, 2),
            SentAttr::Out(ATTR_QUERY_PORT_RESP, 48)
        ]
    );
}

#[test]
fn the_speed_of_a_port() {
    let (fake, context) = context();
    let asked = Target::Method(OBJECT_DEVICE, METHOD_QUERY_PORT_SPEED);
    fake.on(asked, |reply| {
        let speed = 0x1_0000_0fa0u64;
        reply.set(ATTR_QUERY_PORT_SPEED_RESP, speed.as_bytes());
        Ok(())
    });
    assert_eq!(context.query_port_speed(0x102), Ok(0x1_0000_0fa0));
    let call = only(&fake);
    is_method(&call, OBJECT_DEVICE, METHOD_QUERY_PORT_SPEED);
    assert_eq!(
        sent_attrs(&call),
        [
            in64(ATTR_QUERY_PORT_SPEED_PORT_NUM, 0x102),
            SentAttr::Out(ATTR_QUERY_PORT_SPEED_RESP, 8)
        ]
    );

    fake.on(asked, |reply| {
        reply.set_unwritten(ATTR_QUERY_PORT_SPEED_RESP);
        Ok(())
    });
    let error = context.query_port_speed(1).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EPROTO);

    // A kernel without the method.
    fake.on(asked, |_| Err(Errno::new(libc::EPROTONOSUPPORT)));
    let error = context.query_port_speed(1).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EPROTONOSUPPORT);
    let text = error.to_string();
    assert!(text.starts_with("QUERY_PORT_SPEED on port: "), "{text}");
    assert!(text.ends_with("or the kernel is older than 7.0"), "{text}");
}

#[test]
fn gids() {
    let (fake, context) = context();
    let entry = GidEntry {
        gid: [3; 16],
        gid_index: 1,
        port_num: 2,
        gid_type: 2,
        netdev_ifindex: 4,
    };
    fake.on(
        Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_TABLE),
        move |reply| {
            reply.set(ATTR_QUERY_GID_TABLE_RESP_ENTRIES, entry.as_bytes());
            reply.set(ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, 1u64.as_bytes());
            Ok(())
        },
    );
    let mut entries = [GidEntry {
        gid_index: 9,
        ..GidEntry::default()
    }; 3];
    assert_eq!(context.query_gid_table(&mut entries), Ok(1));
    assert_eq!(entries, [entry, GidEntry::default(), GidEntry::default()]);
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            in64(ATTR_QUERY_GID_TABLE_ENTRY_SIZE, 32),
            in32(ATTR_QUERY_GID_TABLE_FLAGS, 0),
            SentAttr::Out(ATTR_QUERY_GID_TABLE_RESP_ENTRIES, 96),
            SentAttr::Out(ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, 8),
        ]
    );
    fake.on(
        Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_TABLE),
        |reply| {
            reply.set(ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES, u64::MAX.as_bytes());
            Ok(())
        },
    );
    let error = context.query_gid_table(&mut entries).unwrap_err();
    assert!(matches!(
        error,
        Error::BadAnswer {
            command: Command::QueryGidTable,
            ..
        }
    ));
    fake.take_calls();

    fake.on(
        Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_ENTRY),
        move |reply| {
            reply.set(ATTR_QUERY_GID_ENTRY_RESP_ENTRY, entry.as_bytes());
            Ok(())
        },
    );
    assert_eq!(context.query_gid_entry(2, 1), Ok(entry));
    assert_eq!(
        sent_attrs(&only(&fake)),
        [
            in64(ATTR_QUERY_GID_ENTRY_PORT, 2),
            in64(ATTR_QUERY_GID_ENTRY_GID_INDEX, 1),
            in32(ATTR_QUERY_GID_ENTRY_FLAGS, 0),
            SentAttr::Out(ATTR_QUERY_GID_ENTRY_RESP_ENTRY, 32),
        ]
    );
}
