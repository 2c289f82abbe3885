//! Multicast memberships.

use super::*;
use crate::abi::cmd;

fn joined() -> (FakeCm, EventChannel, Id, Multicast) {
    let (fake, channel, id) = with_id(PortSpace::UDP);
    let membership = id.join_multicast(v4(), JoinFlags::SEND_ONLY).unwrap();
    (fake, channel, id, membership)
}

fn number(fake: &FakeCm) -> u32 {
    // The newest object.
    fake.live_objects().last().copied().unwrap()
}

#[test]
fn joining_and_leaving() {
    let (fake, channel, id, membership) = joined();
    let body: abi::JoinMcast = fake.take_commands()[0].body();
    assert_eq!(
        (body.id, body.addr_size, body.join_flags),
        (id.number(), 16, 1)
    );
    assert_eq!(body.uid, membership.key().0);
    let mut param = abi::UdParam {
        qp_num: 0xff_ffff,
        qkey: 0x1234,
        ..abi::UdParam::default()
    };
    param.ah_attr.dlid = 7;
    let kind = EventKind::MULTICAST_JOIN;
    let bytes = event(body.uid, number(&fake), kind, 0, param.as_bytes());
    fake.push_event(fd(&channel), &bytes);
    let event = channel.try_event().unwrap().unwrap();
    assert!(event.is_of(&id));
    assert_eq!(event.membership(), Some(membership.key()));
    let group = event.message().datagram().unwrap();
    assert_eq!(
        (group.qp_num, group.qkey, group.ah_attr.dlid),
        (0xff_ffff, 0x1234, 7)
    );
    let events = membership.leave().unwrap();
    assert_eq!((events.events_reported(), events.unacknowledged()), (1, 1));
    drop(event);
    assert!(events.wait(Some(SECOND)));
    assert_eq!(fake.live_objects(), [id.number()]);
}

#[test]
fn dropped_before_the_id() {
    let (fake, _channel, id, membership) = joined();
    fake.take_commands();
    drop(membership);
    drop(id);
    assert_eq!(numbers(&fake), [cmd::CMD_LEAVE_MCAST, cmd::CMD_DESTROY_ID]);
}

#[test]
fn destroyed_with_the_id() {
    let (fake, channel, id, membership) = joined();
    fake.take_commands();
    drop(id);
    // Its number may have been reused.
    assert_eq!(membership.leave().unwrap().events_reported(), 0);
    assert_eq!(numbers(&fake), [cmd::CMD_DESTROY_ID]);
    assert_eq!(channel.inner.table.len(), 0);
}

#[test]
fn moves_with_the_id() {
    let (fake, _first, mut id, membership) = joined();
    let second = EventChannel::open_on(Box::new(fake.clone())).unwrap();
    id.migrate(&second).unwrap();
    let kind = EventKind::MULTICAST_ERROR;
    let bytes = event(membership.key().0, number(&fake), kind, -110, &[]);
    fake.push_event(fd(&second), &bytes);
    let event = second.try_event().unwrap().unwrap();
    assert_eq!(event.membership(), Some(membership.key()));
    assert!(matches!(event.message().result(), Err(Reason::Errno(errno)) if errno.raw() == 110));
    fake.take_commands();
    drop(membership);
    assert_eq!(fake.take_commands()[0].fd, fd(&second));
}

#[test]
fn an_id_event_for_a_membership_is_malformed() {
    let (fake, channel, _id, membership) = joined();
    let bytes = event(
        membership.key().0,
        number(&fake),
        EventKind::ESTABLISHED,
        0,
        &[],
    );
    fake.push_event(fd(&channel), &bytes);
    assert!(matches!(channel.try_event(), Err(Error::BadAnswer { .. })));
}
