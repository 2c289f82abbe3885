//! Ownership: when objects are destroyed, and events acknowledged.

use uverbs::Errno;

use super::*;
use crate::abi::cmd;

#[test]
fn dropped_once() {
    let (fake, channel, id) = with_id(PortSpace::TCP);
    let number = id.number();
    drop(id);
    let asked = fake.take_commands();
    let body: abi::DestroyId = asked[0].body();
    assert_eq!((asked.len(), body.id), (1, number));
    assert_eq!(channel.inner.table.len(), 0);
    let id = channel.create_id(PortSpace::UDP).unwrap();
    id.destroy().unwrap();
    assert_eq!(numbers(&fake), [cmd::CMD_CREATE_ID, cmd::CMD_DESTROY_ID]);
}

#[test]
fn a_failed_creation_leaves_nothing() {
    let (fake, channel) = channel();
    fake.reply(cmd::CMD_CREATE_ID, Err(Errno::new(libc::ENOMEM)));
    let error = channel.create_id(PortSpace::TCP).unwrap_err();
    assert_eq!(
        error.to_string().split(';').next(),
        Some("CREATE_ID: Cannot allocate memory (os error 12)")
    );
    assert_eq!(channel.inner.table.len(), 0);
    assert_eq!(numbers(&fake), [cmd::CMD_CREATE_ID]);
}

#[test]
fn a_refused_destroy_returns_the_id() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    fake.reply(cmd::CMD_DESTROY_ID, Err(Errno::new(libc::EBUSY)));
    let (id, error) = id.destroy().unwrap_err();
    assert_eq!(
        (error.command(), error.errno().raw()),
        (Command::DestroyId, libc::EBUSY)
    );
    id.destroy().unwrap();
    assert_eq!(fake.live_objects(), []);
}

#[test]
fn the_channel_outlives_its_handle() {
    let (fake, channel, id) = with_id(PortSpace::TCP);
    let file = fd(&channel);
    drop(channel);
    assert_eq!(fake.open_fds(), [file]);
    id.bind(v4()).unwrap();
    drop(id);
    assert_eq!((fake.open_fds(), fake.live_objects()), (vec![], vec![]));
}

#[test]
fn events_outlive_their_id() {
    let (fake, channel, id) = with_id(PortSpace::TCP);
    happen(&fake, &id, EventKind::ADDR_RESOLVED, 0, &[]);
    happen(&fake, &id, EventKind::ADDR_CHANGE, 0, &[]);
    let held = channel.try_event().unwrap().unwrap();
    drop(channel.try_event().unwrap().unwrap());
    let key = id.key();
    let events = id.destroy().unwrap();
    assert_eq!((events.events_reported(), events.unacknowledged()), (2, 1));
    assert!(!events.wait(Some(Duration::from_millis(3))));
    assert_eq!((held.key(), held.kind()), (key, EventKind::ADDR_RESOLVED));
    let waiter = std::thread::spawn(move || events.wait(None));
    drop(held);
    assert!(waiter.join().unwrap());
    assert_eq!(channel.inner.table.len(), 0);
}

#[test]
fn an_id_moves_with_its_events() {
    let (fake, first, mut id) = with_id(PortSpace::TCP);
    let second = EventChannel::open_on(Box::new(fake.clone())).unwrap();
    fake.reply(cmd::CMD_MIGRATE_ID, Err(Errno::new(libc::EINVAL)));
    assert!(id.migrate(&second).is_err());
    happen(&fake, &id, EventKind::ADDR_RESOLVED, 0, &[]);
    assert!(first.try_event().unwrap().unwrap().is_of(&id));

    fake.take_commands();
    fake.reply(cmd::CMD_MIGRATE_ID, Ok(1u32.to_ne_bytes().to_vec()));
    assert_eq!(id.migrate(&second), Ok(1));
    let asked = fake.take_commands();
    let body: abi::MigrateId = asked[0].body();
    assert_eq!((asked[0].fd, body.fd), (fd(&second), fd(&first) as u32));
    happen(&fake, &id, EventKind::ADDR_CHANGE, 0, &[]);
    assert!(second.try_event().unwrap().unwrap().is_of(&id));
    // An event that a thread read from the first channel just before.
    let late = event(id.key().0, id.number(), EventKind::ADDR_CHANGE, 0, &[]);
    fake.push_event(fd(&first), &late);
    assert!(first.try_event().unwrap().unwrap().is_of(&id));
    // The first channel can be closed.
    let former = fd(&first);
    drop(first);
    assert!(!fake.open_fds().contains(&former));
    drop(id);
    assert_eq!(second.inner.table.len(), 0);
}

#[test]
fn all_types_are_send_and_sync() {
    fn check<T: Send + Sync + 'static>() {}
    check::<EventChannel>();
    check::<Event>();
    check::<Id>();
    check::<Multicast>();
    check::<ReportedEvents>();
    check::<Error>();
}
