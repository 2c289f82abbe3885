//! Requests that make no sense, and answers that make none.

use ringverbs::qp::{Init, Mtu, ReadyToReceive, ReadyToSend, State};
use ringverbs::raw::{SendRequest, Sge};
use ringverbs::{
    AccessFlags, AhAttr, Endpoint, Error, Gid, Inline, RemoteAddr, Transport, WorkRequest,
};
use uverbs::Errno;

use crate::World;
use device_testing::rxe::kernel::{CREATE_CQ, CREATE_QP};

#[test]
fn post_in_wrong_state_returns_the_buffer() {
    let world = World::new();
    let (mut qp, queues) = world.new_queue_pair(17);
    let refused = qp.send(world.buffer(b"early"), 1).unwrap_err();
    assert!(
        matches!(
            refused.error,
            Error::State {
                state: State::RESET,
                ..
            }
        ),
        "{}",
        refused.error
    );
    assert_eq!(&refused.data.unwrap()[..], b"early");
    let refused = qp.receive(world.buffer(b"early"), 1).unwrap_err();
    assert!(refused.data.is_some());
    qp.transition(Init::reliable(1, AccessFlags::empty()))
        .unwrap();
    qp.receive(world.buffer(b""), 1).unwrap();
    assert!(qp.send(world.buffer(b"early"), 1).is_err());
    assert_eq!((queues.sent().len(), queues.received().len()), (0, 1));
}

#[test]
fn memory_of_another_domain_is_refused() {
    let world = World::new();
    let (mut qp, _queues) = world.queue_pair(17);
    let other = world.context.alloc_pd().unwrap();
    let foreign = || other.alloc(64).unwrap().into_buffer();
    let refused = qp.send(foreign(), 1).unwrap_err();
    assert!(matches!(refused.error, Error::WrongDomain { .. }));
    assert!(refused.data.is_some());
    let refused = qp.receive(vec![world.buffer(b""), foreign()], 1);
    assert_eq!(refused.unwrap_err().data.unwrap().len(), 2);
}

#[test]
fn oversized_requests_are_refused() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let pieces = |count| (0..count).map(|_| world.buffer(b"x")).collect::<Vec<_>>();
    let refused = qp.send(pieces(4), 1).unwrap_err();
    assert!(matches!(
        refused.error,
        Error::Limit {
            asked: 4,
            allowed: 3,
            ..
        }
    ));
    assert_eq!(refused.data.unwrap().len(), 4);
    qp.send(pieces(3), 1).unwrap();
    let refused = qp.receive(pieces(5), 1).unwrap_err();
    assert!(matches!(refused.error, Error::Limit { allowed: 4, .. }));
    let refused = qp.send(Inline(&[0; 97]), 1).unwrap_err();
    let said = "bytes of inline data: 97 requested, the limit is 96";
    assert_eq!(refused.error.to_string(), said);
    qp.send(Inline(&[0; 96]), 1).unwrap();
    assert_eq!(queues.sent().len(), 2);
}

/// ... by the raw layer with the same numbers.
#[test]
fn oversized_raw_requests_are_refused() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let sge = |length| Sge {
        addr: 0x1000,
        length,
        lkey: 7,
    };
    const GIB: u32 = 1 << 30;
    const MESSAGE: u64 = 2 * GIB as u64;
    let is_limit = |error: Error, asked: u64, allowed: u64| {
        let Error::Limit {
            asked: a,
            allowed: b,
            ..
        } = error
        else {
            panic!("{error}");
        };
        assert_eq!((a, b), (asked, allowed), "{error}");
    };
    let mut queue = qp.raw_send();
    let send = SendRequest::send(1);
    let mut refused = |request: SendRequest<'_>| queue.push(&request).unwrap_err();
    is_limit(refused(send.inline(&[0; 97])), 97, 96);
    is_limit(refused(send.sges(&[sge(1); 4])), 4, 3);
    let long = refused(send.sges(&[sge(GIB), sge(GIB), sge(GIB)]));
    is_limit(long, 3 * u64::from(GIB), MESSAGE);
    let long = refused(send.sges(&[sge(2 * GIB + 1)]));
    is_limit(long, MESSAGE + 1, MESSAGE);

    let mut queue = qp.raw_receive().unwrap();
    is_limit(queue.push(1, &[sge(1); 5]).unwrap_err(), 5, 4);
    let long = queue.push(1, &[sge(2 * GIB), sge(7)]).unwrap_err();
    is_limit(long, MESSAGE + 7, MESSAGE);
    for _ in 0..7 {
        queue.push(1, &[sge(1)]).unwrap();
    }
    let full = queue.push(1, &[sge(1)]).unwrap_err();
    assert!(matches!(full, Error::QueueFull { capacity: 7 }), "{full}");
    assert_eq!((queues.sent(), queues.received()), (vec![], vec![]));
}

#[test]
fn contradictory_requests_are_refused() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let at = RemoteAddr::new(0x1001, 1);
    let mut small = world.buffer(&[0; 4]);
    small.set_len(4).unwrap();
    let odd = WorkRequest::fetch_add(world.buffer(&[0; 8]), at, 1);
    assert!(matches!(
        qp.post(odd).unwrap_err().error,
        Error::Invalid { .. }
    ));
    let short = WorkRequest::fetch_add(small, RemoteAddr::new(0x1000, 1), 1);
    assert!(matches!(
        qp.post(short).unwrap_err().error,
        Error::Invalid { .. }
    ));
    let read = WorkRequest::read(world.buffer(b"x"), at).immediate(1);
    assert!(matches!(
        qp.post(read).unwrap_err().error,
        Error::Invalid { .. }
    ));
    let write = WorkRequest::write(Inline(b"x"), at).invalidate(1);
    assert!(matches!(
        qp.post(write).unwrap_err().error,
        Error::Invalid { .. }
    ));
    let atomic = WorkRequest::atomic_write(RemoteAddr::new(0x1000, 1), [0; 8]);
    assert!(matches!(
        qp.post(atomic).unwrap_err().error,
        Error::Unsupported { .. }
    ));
    assert!(queues.sent().is_empty());
}

#[test]
fn a_transition_of_another_transport_is_refused() {
    let world = World::new();
    let (mut qp, _queues) = world.new_queue_pair(17);
    let error = qp.transition(ReadyToSend::datagram(0)).unwrap_err();
    assert!(matches!(error, Error::State { .. }), "{error}");
}

#[test]
fn retries_that_do_not_fit_are_refused() {
    let world = World::new();
    let (mut qp, _queues) = world.new_queue_pair(17);
    let init = Init::reliable(1, AccessFlags::empty());
    qp.transition(init).unwrap();
    let receive = ReadyToReceive::reliable(AhAttr::default(), 1, 0, Mtu::Bytes1024);
    qp.transition(receive).unwrap();
    let ready = ReadyToSend::reliable(0);
    for bad in [ready.retry_cnt(8), ready.rnr_retry(8)] {
        let error = qp.transition(bad).unwrap_err();
        let seven = matches!(
            error,
            Error::Limit {
                asked: 8,
                allowed: 7,
                ..
            }
        );
        assert!(seven, "{error}");
        assert_eq!(qp.state(), State::RTR);
    }
    qp.transition(ready.retry_cnt(0).rnr_retry(0)).unwrap();
}

#[test]
fn objects_of_two_contexts_are_refused() {
    let (one, two) = (World::new(), World::new());
    let builder = one.domain.queue_pair(Transport::Reliable, &two.cq);
    assert!(matches!(builder.build(), Err(Error::WrongDomain { .. })));
    let channel = one.context.completion_channel().unwrap();
    let builder = two.context.completion_queue().channel(&channel);
    assert!(matches!(builder.build(), Err(Error::WrongDomain { .. })));
}

#[test]
fn kernel_errors_are_quoted() {
    let world = World::new();
    for target in [CREATE_CQ, CREATE_QP] {
        world
            .machine
            .fake
            .on(target, |_| Err(Errno::new(libc::ENOMEM)));
    }
    let error = world.context.completion_queue().build().unwrap_err();
    assert_eq!(error.errno(), libc::ENOMEM);
    assert!(error.to_string().contains("CQ_CREATE"), "{error}");
    let builder = world.domain.queue_pair(Transport::Reliable, &world.cq);
    let error = builder.build().unwrap_err();
    assert!(error.to_string().contains("QP_CREATE"), "{error}");
    // What the device says nothing of is known all the same.
    world
        .machine
        .fake
        .on(CREATE_QP, |_| Err(Errno::new(libc::EINVAL)));
    let builder = world.domain.queue_pair(Transport::Reliable, &world.cq);
    let error = builder.inline(4096).build().unwrap_err();
    let said = "bytes of inline data: 4096 requested, the limit is 512";
    assert_eq!(error.to_string(), said);
}

#[test]
fn malformed_queue_geometry_is_refused() {
    let world = World::new();
    let broken = world.machine.queue(6, 8);
    broken.put(4, 0x1234_5678);
    let mminfo = broken.mminfo();
    world.machine.fake.on(CREATE_CQ, move |reply| {
        reply.set_driver_out(&mminfo);
        Ok(())
    });
    let before = world.machine.live().len();
    let error = world.context.completion_queue().build().unwrap_err();
    assert!(matches!(error, Error::Driver { .. }), "{error}");
    assert_eq!(world.machine.live().len(), before);
}

#[test]
fn endpoints_are_read_back_or_refused() {
    let endpoint = Endpoint {
        qp_num: 0xab_cdef,
        psn: 0x12_3456,
        lid: 0,
        mtu: Mtu::Bytes4096,
        gid: "::ffff:192.168.77.1".parse::<Gid>().unwrap(),
    };
    let text = endpoint.to_string();
    assert_eq!(text.parse::<Endpoint>().unwrap(), endpoint);
    for bad in [
        "",
        ":::::",
        "1:2:3:4",
        "1000000:2:0:5:0",
        "1:2:0:9:0",
        "1:2:0:5:0:0",
        "-1:2:0:5:0",
        "+1:2:0:5:0",
        "1:2:0:5:zz",
        "1:2:0:5:000000000000000000000000000000000",
    ] {
        assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
    }
    for cut in 0..text.len() - 32 {
        assert!(text[..cut].parse::<Endpoint>().is_err(), "{}", &text[..cut]);
    }
}

#[test]
fn ranges_outside_of_a_region_are_refused() {
    let world = World::new();
    let region = world
        .domain
        .alloc_remote(4096, AccessFlags::REMOTE_READ)
        .unwrap();
    let mut byte = [0];
    for offset in [4096, usize::MAX] {
        assert!(region.read_at(offset, &mut byte).is_err());
        assert!(region.write_at(offset, &byte).is_err());
        assert!(region.load_u64(offset).is_err());
        assert!(region.slice(offset..=offset).is_err());
    }
    let (begin, end) = (2, 1);
    assert!(region.slice(begin..end).is_err());
    assert!(region.load_u64(4).is_err());
    assert!(region.load_u64(4089).is_err());
    region.read_at(4095, &mut byte).unwrap();
    region.slice(4096..).unwrap();
    assert!(world.domain.alloc(0).is_err());
    let access = AccessFlags::ZERO_BASED;
    assert!(world.domain.alloc_remote(1, access).is_err());
}

/// A region of whole pages is cut into whole pieces.
#[test]
fn pieces_of_a_region_are_all_of_the_size_asked_for() {
    let world = World::new();
    let pieces = |size| {
        let region = world.domain.alloc(3000).unwrap();
        let whole = region.len();
        let pieces: Vec<_> = region.into_buffers(size).collect();
        assert!(pieces.iter().all(|piece| piece.capacity() == size));
        assert_eq!(pieces.len(), whole.checked_div(size).unwrap_or_default());
        pieces.len()
    };
    assert!(pieces(1000) >= 3);
    assert_eq!(pieces(0), 0);
    assert_eq!(pieces(1 << 30), 0);
}
