//! Events: resolving their id, state changes, and malformed events.

use uverbs::Errno;

use super::*;
use crate::abi::cmd;

#[test]
fn states_follow_events() {
    let (fake, channel, id) = with_id(PortSpace::TCP);
    id.resolve_address(None, v4(), SECOND).unwrap();
    assert_eq!(id.state(), State::ResolvingAddress);
    for (kind, state) in [
        (EventKind::ADDR_ERROR, State::Bound),
        (EventKind::ADDR_RESOLVED, State::AddressResolved),
        (EventKind::ROUTE_ERROR, State::AddressResolved),
        (EventKind::ROUTE_RESOLVED, State::RouteResolved),
        (EventKind::CONNECT_RESPONSE, State::Responded),
        (EventKind::ESTABLISHED, State::Established),
        (EventKind::ADDR_CHANGE, State::Established),
        (EventKind(4711), State::Established),
        (EventKind::DISCONNECTED, State::Disconnected),
        (EventKind::TIMEWAIT_EXIT, State::Disconnected),
        (EventKind::REJECTED, State::Failed),
        (EventKind::DEVICE_REMOVAL, State::DeviceRemoved),
    ] {
        happen(&fake, &id, kind, 0, &[]);
        let event = channel.try_event().unwrap().unwrap();
        assert!(event.is_of(&id) && event.kind() == kind);
        assert_eq!(id.state(), state, "{kind:?}");
    }
    assert!(channel.try_event().unwrap().is_none());
}

#[test]
fn a_failed_command_does_not_undo_an_event() {
    let (fake, _channel, id) = with_id(PortSpace::TCP);
    fake.reply(cmd::CMD_LISTEN, Err(Errno::new(libc::ENODEV)));
    assert!(id.listen(1).is_err());
    assert_eq!(id.state(), State::Idle);
    // With an event that another thread reads concurrently.
    let before = id.entity.enter_state(State::Listening);
    id.entity.record_event(EventKind::DEVICE_REMOVAL);
    id.entity.restore_state(State::Listening, before);
    assert_eq!(id.state(), State::DeviceRemoved);
}

#[test]
fn a_wait_ends_with_an_event_or_the_timeout() {
    let (fake, channel, id) = with_id(PortSpace::TCP);
    assert!(channel.wait(Some(Duration::ZERO)).unwrap().is_none());
    assert!(
        channel
            .wait(Some(Duration::from_millis(5)))
            .unwrap()
            .is_none()
    );
    let other = channel.clone();
    let waiter = std::thread::spawn(move || other.wait(Some(Duration::MAX)).unwrap().unwrap());
    happen(&fake, &id, EventKind::ADDR_RESOLVED, 0, &[]);
    assert!(waiter.join().unwrap().is_of(&id));
}

#[test]
fn signals_do_not_end_the_wait() {
    let (fake, channel, id) = with_id(PortSpace::TCP);
    fake.reply(cmd::CMD_GET_EVENT, Err(Errno::new(libc::EINTR)));
    happen(&fake, &id, EventKind::ADDR_RESOLVED, 0, &[]);
    assert!(channel.wait(Some(SECOND)).unwrap().is_some());
    fake.reply(cmd::CMD_GET_EVENT, Err(Errno::new(libc::EIO)));
    let error = channel.wait(Some(SECOND)).unwrap_err();
    assert_eq!(
        (error.command(), error.errno().raw()),
        (Command::GetEvent, libc::EIO)
    );
}

#[test]
fn a_connection_request_has_its_own_id() {
    let (fake, channel, listening) = with_id(PortSpace::TCP);
    let number = ask(&fake, &listening);
    let mut event = channel.try_event().unwrap().unwrap();
    assert!(event.is_of(&listening));
    let asked = event.message().connection().unwrap();
    assert_eq!((asked.qp_num, asked.private_data), (0x17, &[0; 4][..]));
    assert_eq!(asked.responder_resources, 3);
    let request = event.take_request().unwrap();
    assert!(event.take_request().is_none());
    assert_eq!(
        (request.number(), request.state()),
        (number, State::Requested)
    );
    assert_eq!(request.port_space(), PortSpace::TCP);
    assert_ne!(request.key(), listening.key());
    fake.take_commands();
    request.accept(&ConnParam::default()).unwrap();
    let body: abi::Accept = fake.take_commands()[0].body();
    assert_eq!(body.uid, request.key().0, "its events name it from now on");
    happen(&fake, &request, EventKind::ESTABLISHED, 0, &[]);
    assert!(channel.try_event().unwrap().unwrap().is_of(&request));
}

#[test]
fn an_untaken_request_is_destroyed() {
    let (fake, channel, listening) = with_id(PortSpace::TCP);
    let number = ask(&fake, &listening);
    assert!(fake.live_objects().contains(&number));
    drop(channel.try_event().unwrap().unwrap());
    assert_eq!(fake.live_objects(), [listening.number()]);
}

#[test]
fn events_of_destroyed_ids() {
    let (fake, channel, id) = with_id(PortSpace::TCP);
    let (key, number) = (id.key().0, id.number());
    // As read by a thread just before another one destroyed the id.
    let late = event(key, number, EventKind::ESTABLISHED, 0, &[]);
    let request = fake.new_object();
    let late_request = event(key, request, EventKind::CONNECT_REQUEST, 0, &[]);
    let events = id.destroy().unwrap();
    fake.push_event(fd(&channel), &late);
    fake.push_event(fd(&channel), &late_request);
    assert!(channel.try_event().unwrap().is_none());
    assert_eq!(fake.live_objects(), [], "the request was destroyed too");
    // Also when the table no longer contains the id.
    drop(events);
    assert_eq!(channel.inner.table.len(), 0);
    let request = fake.new_object();
    fake.push_event(fd(&channel), &late);
    let late_request = event(key, request, EventKind::CONNECT_REQUEST, 0, &[]);
    fake.push_event(fd(&channel), &late_request);
    assert!(channel.try_event().unwrap().is_none());
    assert_eq!(fake.live_objects(), []);
}

#[test]
fn malformed_events() {
    let (fake, channel, id) = with_id(PortSpace::TCP);
    let (key, number) = (id.key().0, id.number());
    let wrong = [
        // Keys that were never assigned; zero is no key.
        event(u64::MAX, number, EventKind::ESTABLISHED, 0, &[]),
        event(0, number, EventKind::ESTABLISHED, 0, &[]),
        event(u64::MAX, number, EventKind::CONNECT_REQUEST, 0, &[]),
        // The number of another id.
        event(key, number + 1, EventKind::ESTABLISHED, 0, &[]),
        // A multicast event for an id.
        event(key, number, EventKind::MULTICAST_JOIN, 0, &[]),
        // Nothing written: all zero.
        vec![],
        vec![0; 20],
    ];
    for bytes in wrong {
        fake.push_event(fd(&channel), &bytes);
        let error = channel.try_event().unwrap_err();
        assert!(matches!(error, Error::BadAnswer { .. }), "{bytes:x?}");
        assert_eq!(error.errno().raw(), libc::EPROTO);
        // The channel stays usable.
        happen(&fake, &id, EventKind::ADDR_CHANGE, 0, &[]);
        assert!(channel.try_event().unwrap().unwrap().is_of(&id));
    }
    assert_eq!(
        fake.live_objects(),
        [number],
        "nobody else's id was destroyed"
    );
}

#[test]
fn a_truncated_event_is_zero_padded() {
    let (fake, channel, id) = with_id(PortSpace::TCP);
    let whole = event(
        id.key().0,
        id.number(),
        EventKind::REJECTED,
        28,
        &[0xff; 304],
    );
    for len in [20, 24, 27, 300, 335] {
        fake.push_event(fd(&channel), &whole[..len]);
        let event = channel.try_event().unwrap().unwrap();
        assert_eq!(event.kind(), EventKind::REJECTED);
        assert!(event.message().private_data().len() <= 255);
    }
}
