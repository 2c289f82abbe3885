//! What an operation in flight keeps besides a buffer; queues and events whose
//! handles are gone.

use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;

use ringverbs::completion::SharedCompletionQueue;
use ringverbs::qp::{Init, ReadyToReceive, ReadyToSend};
use ringverbs::raw::{Flags, SendRequest, WindowBind};
use ringverbs::{
    AccessFlags, AhAttr, Error, ForeignRegion, Inline, ProtectionDomain, QueuePair, RemoteAddr,
    SharedReceiveQueue, Status, Transport, WindowType, WorkRequest,
};
use uverbs::Errno;
use uverbs::abi::ids::*;
use uverbs::kernel::fake::{Reply, Target};

use crate::{Queues, World};
use device_testing::rxe::kernel::{CREATE_AH, CREATE_QP, CREATE_SRQ, cap};
use device_testing::rxe::layout::wc;
use device_testing::rxe::{Driver, layout};

const DESTROY_MW: Target = Target::Method(OBJECT_MW, METHOD_MW_DESTROY);

/// A queue pair of datagrams in RTS.
fn datagrams(world: &World, qp_num: u32) -> (QueuePair, Queues) {
    let (recv, send) = (world.machine.queue(7, 8), world.machine.queue(9, 8));
    let place = [recv.mminfo(), send.mminfo()].concat();
    world.machine.fake.on(CREATE_QP, move |reply| {
        reply.set(ATTR_CREATE_QP_RESP_CAP, &cap(3, 4, 96));
        reply.set(ATTR_CREATE_QP_RESP_QP_NUM, &qp_num.to_ne_bytes());
        reply.set_driver_out(&place);
        Ok(())
    });
    let builder = world.domain.queue_pair(Transport::Datagram, &world.cq);
    let mut qp = builder.build().unwrap();
    qp.transition(Init::datagram(1, 0)).unwrap();
    qp.transition(ReadyToReceive::datagram()).unwrap();
    qp.transition(ReadyToSend::datagram(0)).unwrap();
    (qp, Queues { send, recv })
}

/// A shared receive queue with 7 places, and the driver's side of it.
fn shared_receives(world: &World) -> (SharedReceiveQueue, Driver) {
    let driver = world.machine.queue(7, 8);
    let place = driver.mminfo();
    world.machine.fake.on(CREATE_SRQ, move |reply| {
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_WR, &7u32.to_ne_bytes());
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_SGE, &4u32.to_ne_bytes());
        reply.set_driver_out(&[&place[..], &5u32.to_ne_bytes(), &[0; 4]].concat());
        Ok(())
    });
    let builder = world.domain.shared_receive_queue();
    (builder.build().unwrap(), driver)
}

/// The device takes what was posted: identifiers.
fn taken(driver: &Driver) -> Vec<u64> {
    let entries = driver.consume().into_iter();
    entries
        .map(|entry| layout::read(&entry, layout::recv::WR_ID))
        .collect()
}

#[test]
fn a_close_that_is_refused_is_an_error_with_the_object() {
    fn close(domain: ProtectionDomain) -> Result<(), Error> {
        domain.close()?;
        Ok(())
    }
    let world = World::new();
    let other = world.domain.clone();
    let refused = world.domain.clone().close().unwrap_err();
    let error: &dyn std::error::Error = &refused;
    assert!(error.to_string().contains("in use by"), "{error}");
    assert!(error.source().is_none());
    // It still works.
    refused.into_object().alloc(64).unwrap();
    assert!(matches!(close(other), Err(Error::Busy { .. })));

    let domain = world.context.alloc_pd().unwrap();
    let destroy = Target::Method(OBJECT_PD, METHOD_PD_DESTROY);
    let busy = |_: &mut Reply<'_>| Err(Errno::new(libc::EBUSY));
    world.machine.fake.on(destroy, busy);
    let refused = domain.close().unwrap_err();
    assert_eq!(refused.error.errno(), libc::EBUSY);
    // The kernel's error is part of the text, so it is not its source, too.
    assert!(refused.to_string().contains("os error 16"), "{refused}");
    assert!(std::error::Error::source(&refused).is_none());
    world.machine.fake.reset(destroy);
    close(refused.object).unwrap();
}

#[test]
fn address_handle_in_flight_outlives_its_handle() {
    let mut world = World::new();
    world.machine.fake.on(CREATE_AH, |reply| {
        reply.set_driver_out(&[7u32.to_ne_bytes(), [0; 4]].concat());
        Ok(())
    });
    let (mut qp, queues) = datagrams(&world, 17);
    let path = world.domain.address_handle(&AhAttr::default()).unwrap();
    let request = WorkRequest::send(Inline(b"x")).to(&path, 1, 2);
    qp.post(request).unwrap();
    let (path, error) = path.close().unwrap_err().into_parts();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    drop(path);
    assert_eq!(world.live(OBJECT_AH), 1);
    world.complete(queues.sent()[0], 17);
    assert_eq!(world.live(OBJECT_AH), 1);
    drop(world.cq.poll_one().unwrap().unwrap());
    assert_eq!(world.live(OBJECT_AH), 0);

    // ... or until its queue pair is gone.
    let path = world.domain.address_handle(&AhAttr::default()).unwrap();
    let request = WorkRequest::send(Inline(b"x")).to(&path, 1, 2);
    qp.post(request).unwrap();
    drop(path);
    assert_eq!(world.live(OBJECT_AH), 1);
    drop(qp);
    // A completion that came too late: the poller hears that it is gone.
    world.complete(queues.sent()[0], 17);
    assert!(world.cq.poll_one().unwrap().is_none());
    assert_eq!(world.live(OBJECT_AH), 0);
}

/// ... and what it is bound to is there as long as it is.
#[test]
fn mismatched_address_handle_is_refused_with_the_memory() {
    let world = World::new();
    let (mut connection, sent) = world.queue_pair(17);
    let (mut datagrams, sent_to) = datagrams(&world, 18);
    world.machine.fake.on(CREATE_AH, |reply| {
        reply.set_driver_out(&[7u32.to_ne_bytes(), [0; 4]].concat());
        Ok(())
    });
    let path = world.domain.address_handle(&AhAttr::default()).unwrap();
    let there = RemoteAddr::new(0x1000, 7);
    let send = || WorkRequest::send(world.buffer(b"x"));
    let write = || WorkRequest::write(world.buffer(b"x"), there);
    let bad = [
        send().immediate(1).invalidate(2),
        send().invalidate(2).immediate(1),
        send().invalidate(2).immediate(1).invalidate(3),
        write().immediate(1).invalidate(2),
        write().invalidate(2),
        write().to(&path, 1, 2),
        write().to(&path, 1, 2).immediate(1),
        send().to(&path, 1, 2).immediate(1).invalidate(2),
    ];
    for request in bad {
        let text = format!("{request:?}");
        let refused = connection.post(request).unwrap_err();
        assert!(matches!(refused.error, Error::Invalid { .. }), "{text}");
        assert_eq!(&refused.data.unwrap()[..], b"x");
    }
    let request = send().immediate(1).to(&path, 1, 2).invalidate(3);
    assert!(datagrams.post(request).is_err());
    assert_eq!((sent.sent(), sent_to.sent()), (vec![], vec![]));
    connection.post(send().immediate(1).immediate(2)).unwrap();
    let request = send().to(&path, 1, 2).to(&path, 3, 4).immediate(5);
    datagrams.post(request).unwrap();
    assert_eq!((sent.sent().len(), sent_to.sent().len()), (1, 1));
}

#[test]
fn a_window_in_flight_outlives_its_handle() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let access = AccessFlags::MW_BIND | AccessFlags::REMOTE_READ;
    let region = world.domain.alloc_remote(64, access).unwrap();
    let window = world.domain.memory_window(WindowType::Two).unwrap();
    let slice = region.slice(..).unwrap();
    let bind = WorkRequest::bind(&window, slice, AccessFlags::REMOTE_READ);
    qp.post(bind).unwrap();
    drop(region);
    let kept = window.clone();
    drop(window);
    assert_eq!((world.live(OBJECT_MW), world.live(OBJECT_MR)), (1, 1));
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    assert_eq!((world.live(OBJECT_MW), world.live(OBJECT_MR)), (1, 1));
    drop(kept);
    assert_eq!((world.live(OBJECT_MW), world.live(OBJECT_MR)), (0, 0));
}

/// A window has the key that the kernel has for it: a bind that fails, or is
/// flushed, gives it none. However its completion is read.
#[test]
fn failed_bind_keeps_the_window_key() {
    for by_cursor in [false, true] {
        let mut world = World::new();
        let (mut qp, queues) = world.queue_pair(17);
        let region = world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
        let window = world.domain.memory_window(WindowType::Two).unwrap();
        let before = window.rkey();
        let mut bind = |status: [u64; 2]| {
            for _ in 0..2 {
                let slice = region.slice(..).unwrap();
                qp.post(WorkRequest::bind(&window, slice, AccessFlags::empty()))
                    .unwrap();
            }
            assert_eq!(window.rkey(), before & !0xff | (before + 2) & 0xff);
            for (id, status) in queues.sent().into_iter().zip(status) {
                world.raise(&[(layout::wc::WR_ID, id), (layout::wc::STATUS, status)]);
                if by_cursor {
                    world.cq.cursor().next_entry().unwrap().unwrap();
                } else {
                    world.cq.poll_one().unwrap().unwrap();
                }
            }
        };
        bind([10, 5]);
        assert_eq!(window.rkey(), before);
        bind([0, 0]);
        assert_eq!(window.rkey(), before & !0xff | (before + 2) & 0xff);
    }
}

/// What a window was bound to is let go of when it is bound elsewhere, also if
/// nobody hears of it.
#[test]
fn window_keeps_only_its_bound_region() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let window = world.domain.memory_window(WindowType::One).unwrap();
    let region = || world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
    let (first, second) = (region(), region());
    let bind = |to: &ringverbs::RemoteRegion| {
        WorkRequest::bind(&window, to.slice(..).unwrap(), AccessFlags::empty())
    };
    qp.post(bind(&first).unsignaled()).unwrap();
    qp.post(bind(&second)).unwrap();
    drop(first);
    assert_eq!(world.live(OBJECT_MR), 2);
    world.complete(queues.sent()[1], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    assert_eq!(world.live(OBJECT_MR), 1);
    qp.post(WorkRequest::unbind(&window)).unwrap();
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    second.close().unwrap();
}

/// What a window is bound to may be reached as long as the window is there.
#[test]
fn a_window_that_cannot_be_destroyed_keeps_its_region() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let region = world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
    let window = world.domain.memory_window(WindowType::One).unwrap();
    let part = region.slice(..).unwrap();
    qp.post(WorkRequest::bind(&window, part, AccessFlags::empty()))
        .unwrap();
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    drop(region);
    world
        .machine
        .fake
        .on(DESTROY_MW, |_| Err(Errno::new(libc::EBUSY)));
    let (window, error) = window.close().unwrap_err().into_parts();
    assert_eq!(error.errno(), libc::EBUSY);
    drop(window);
    assert_eq!((world.live(OBJECT_MW), world.live(OBJECT_MR)), (1, 1));
}

/// Completions of different queue pairs come in any order: which region the
/// window is bound to would be anybody's guess.
#[test]
fn a_window_is_bound_on_one_queue_pair_at_a_time() {
    for kind in [WindowType::One, WindowType::Two] {
        let mut world = World::new();
        let (mut one, one_s) = world.queue_pair(17);
        let (mut other, other_s) = world.queue_pair(18);
        let window = world.domain.memory_window(kind).unwrap();
        let region = || world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
        let (first, second) = (region(), region());
        let bind = |to: &ringverbs::RemoteRegion| {
            WorkRequest::bind(&window, to.slice(..).unwrap(), AccessFlags::empty())
        };
        one.post(bind(&first)).unwrap();
        let rkey = window.rkey();
        let refused = other.post(bind(&second)).unwrap_err();
        assert!(matches!(refused.error, Error::Busy { .. }), "{refused}");
        drop(refused);
        assert_eq!((window.rkey(), other_s.sent().len()), (rkey, 0));
        one.post(bind(&second)).unwrap();
        for id in one_s.sent() {
            assert!(other.post(bind(&second)).is_err());
            world.complete(id, 17);
            drop(world.cq.poll_one().unwrap().unwrap());
        }
        other.post(bind(&first)).unwrap();
        drop((first, second));
        assert_eq!(world.live(OBJECT_MR), 2);
        world.complete(other_s.sent()[0], 18);
        drop(world.cq.poll_one().unwrap().unwrap());
        assert_eq!(world.live(OBJECT_MR), 1);
    }
}

/// Whether a bind in flight was done when its queue pair was destroyed is
/// unknown: the window keeps what it was bound to, and what it may be bound to.
#[test]
fn window_keeps_the_regions_of_unfinished_binds() {
    let mut world = World::new();
    let window = world.domain.memory_window(WindowType::One).unwrap();
    let region = || world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
    let regions = [region(), region(), region()];
    let bind = |to: &ringverbs::RemoteRegion| {
        WorkRequest::bind(&window, to.slice(..).unwrap(), AccessFlags::empty())
    };
    let (mut qp, queues) = world.queue_pair(17);
    qp.post(bind(&regions[0])).unwrap();
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    qp.post(bind(&regions[1])).unwrap();
    drop(qp.close_and_drain(&mut world.cq, None).unwrap());
    let (mut qp, queues) = world.queue_pair(17);
    // The next is known again.
    qp.post(bind(&regions[2])).unwrap();
    drop(regions);
    assert_eq!(world.live(OBJECT_MR), 3);
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    assert_eq!(world.live(OBJECT_MR), 1);
    drop(window);
    drop(qp);
    assert_eq!(world.live(OBJECT_MR), 0);
}

/// A bind that was executed is flushed if an operation before it fails: the
/// window may be bound to either region, until a bind is known to be done.
#[test]
fn a_window_keeps_the_region_of_a_bind_that_was_flushed() {
    let mut world = World::new();
    let window = world.domain.memory_window(WindowType::One).unwrap();
    let region = || world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
    let regions = [region(), region(), region()];
    let bind = |to: &ringverbs::RemoteRegion| {
        WorkRequest::bind(&window, to.slice(..).unwrap(), AccessFlags::empty())
    };
    let (mut qp, queues) = world.queue_pair(17);
    qp.post(bind(&regions[0])).unwrap();
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    qp.post(bind(&regions[1])).unwrap();
    let flushed = u64::from(Status::WR_FLUSH_ERR.0);
    world.raise(&[(wc::WR_ID, queues.sent()[0]), (wc::STATUS, flushed)]);
    let failed = world.cq.poll_one().unwrap().unwrap();
    assert_eq!(failed.status(), Status::WR_FLUSH_ERR);
    qp.post(bind(&regions[2])).unwrap();
    drop((regions, failed));
    assert_eq!(world.live(OBJECT_MR), 3);
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    assert_eq!(world.live(OBJECT_MR), 1);
}

/// What a bind demands of the region (IBA 10.6.7.2) is seen when it is posted.
#[test]
fn window_access_is_limited_to_its_region() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let window = world.domain.memory_window(WindowType::Two).unwrap();
    let read = AccessFlags::REMOTE_READ;
    let all = read | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let without = world.domain.alloc_remote(64, all).unwrap();
    let with = world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
    let mut memory = [0u64; 8];
    let memory = std::ptr::NonNull::from(&mut memory[..]).cast::<u8>();
    let memory = std::ptr::NonNull::slice_from_raw_parts(memory, 64);
    // SAFETY: there is no device.
    let read_only =
        unsafe { ringverbs::ForeignRegion::register(&world.domain, memory, AccessFlags::MW_BIND) };
    let read_only = read_only.unwrap();
    let unknown = AccessFlags::from_bits_retain(1 << 31);
    for (slice, access) in [
        (without.slice(..), read),
        (without.slice(..), AccessFlags::empty()),
        (read_only.slice(..), AccessFlags::REMOTE_WRITE),
        (read_only.slice(..), AccessFlags::REMOTE_ATOMIC),
        (with.slice(..), unknown),
        (with.slice(..), AccessFlags::LOCAL_WRITE),
        (with.slice(..), AccessFlags::MW_BIND),
    ] {
        let rkey = window.rkey();
        let slice = slice.unwrap();
        let refused = WindowBind::new(&window, &slice, access).unwrap_err();
        assert!(matches!(refused, Error::Invalid { .. }), "{refused}");
        let refused = qp.post(WorkRequest::bind(&window, slice, access));
        let refused = refused.unwrap_err();
        assert!(matches!(refused.error, Error::Invalid { .. }), "{refused}");
        assert_eq!((queues.sent().len(), window.rkey()), (0, rkey));
    }
    for (slice, access) in [(with.slice(..), all), (read_only.slice(..), read)] {
        let bind = WorkRequest::bind(&window, slice.unwrap(), access);
        qp.post(bind).unwrap();
    }
    assert_eq!(queues.sent().len(), 2);
}

/// The outcome of a bind of the raw layer is not seen: its region is kept from
/// when it is written until the window is known to be bound to another.
#[test]
fn a_window_keeps_the_regions_of_raw_binds() {
    let world = World::new();
    let (mut qp, _queues) = world.queue_pair(17);
    let window = world.domain.memory_window(WindowType::Two).unwrap();
    let mut raw_bind = || {
        let region = world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
        let part = region.slice(..).unwrap();
        let bind = WindowBind::new(&window, &part, AccessFlags::empty()).unwrap();
        qp.raw_send()
            .push(&SendRequest::bind_window(1, &bind))
            .unwrap();
        bind
    };
    drop(raw_bind());
    let last = raw_bind();
    assert_eq!(world.live(OBJECT_MR), 2);
    // SAFETY: there is no device; the test says what it did.
    unsafe { last.done() };
    assert_eq!(world.live(OBJECT_MR), 1);
    window.close().unwrap();
    assert_eq!(world.live(OBJECT_MR), 0);
}

/// Whoever registered foreign memory learns from `close` when it may go: not
/// while a window is bound to it, or may still be.
#[test]
fn foreign_memory_stays_registered_while_a_window_is_bound_to_it() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let mut memory = [0u8; 64];
    let bytes = NonNull::from(&mut memory[..]);
    // SAFETY: the memory outlives the region, and no device touches it.
    let region =
        unsafe { ForeignRegion::register(&world.domain, bytes, AccessFlags::MW_BIND) }.unwrap();
    let window = world.domain.memory_window(WindowType::Two).unwrap();
    let bind = WorkRequest::bind(&window, region.slice(..).unwrap(), AccessFlags::empty());
    qp.post(bind).unwrap();
    let busy = |region: ForeignRegion| {
        let (region, error) = region.close().unwrap_err().into_parts();
        assert!(matches!(error, Error::Busy { .. }), "{error}");
        region
    };
    let region = busy(region);
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    let region = busy(region);
    // A clone of the window has the key.
    let clone = window.clone();
    drop(window);
    let region = busy(region);
    // An unbinding counts when it is done, ...
    qp.post(WorkRequest::unbind(&clone)).unwrap();
    let region = busy(region);
    let unbinding = queues.sent()[0];
    world.complete(unbinding, 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    region.close().unwrap();
    assert_eq!(world.live(OBJECT_MR), 0);
}

/// ... and of a region that was dropped the window has the last of it.
#[test]
fn window_deregisters_foreign_memory_last() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let mut memory = [0u8; 64];
    let bytes = NonNull::from(&mut memory[..]);
    // SAFETY: as above.
    let region =
        unsafe { ForeignRegion::register(&world.domain, bytes, AccessFlags::MW_BIND) }.unwrap();
    let window = world.domain.memory_window(WindowType::One).unwrap();
    let bind = WorkRequest::bind(&window, region.slice(..).unwrap(), AccessFlags::empty());
    qp.post(bind).unwrap();
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    drop(region);
    assert_eq!(world.live(OBJECT_MR), 1);
    window.close().unwrap();
    assert_eq!(world.live(OBJECT_MR), 0);
}

/// A bind of the raw layer changes the window's key when it is known to be done.
#[test]
fn raw_bind_takes_effect_on_completion() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let region = world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
    let part = region.slice(..).unwrap();
    let window = world.domain.memory_window(WindowType::Two).unwrap();
    let before = window.rkey();
    let bind = || WindowBind::new(&window, &part, AccessFlags::empty()).unwrap();
    let bound = bind();
    let request = SendRequest::bind_window(1, &bound).flags(Flags::SIGNALED);
    // Not published.
    qp.raw_send().push(&request).unwrap();
    drop(bound);
    let _ = qp.raw_send();
    assert_eq!((queues.sent().len(), window.rkey()), (0, before));
    let bound = bind();
    let request = SendRequest::bind_window(1, &bound).flags(Flags::SIGNALED);
    let mut raw = qp.raw_send();
    raw.push(&request).unwrap();
    // SAFETY: window and region live until the end.
    unsafe { raw.publish().unwrap() };
    assert_eq!((queues.sent().len(), window.rkey()), (1, before));
    let rkey = bound.rkey();
    // SAFETY: the test is the device.
    unsafe { bound.done() };
    assert_eq!(window.rkey(), rkey);
    drop((part, region));
    assert_eq!(world.live(OBJECT_MR), 1);
}

#[test]
fn a_region_in_flight_outlives_its_handle() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let access = AccessFlags::REMOTE_READ;
    let region = world.domain.alloc_remote(64, access).unwrap();
    qp.send(region.slice(8..16).unwrap(), 1).unwrap();
    let (region, error) = region.close().unwrap_err().into_parts();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    drop(region);
    assert_eq!(world.live(OBJECT_MR), 1);
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    assert_eq!(world.live(OBJECT_MR), 0);
}

/// Shared receives are the queue's, and the queue is there as long as one of
/// its queue pairs is.
#[test]
fn shared_receives_outlive_their_handle() {
    let world = World::new();
    let (mut srq, driver) = shared_receives(&world);
    let recv = world.machine.queue(9, 8);
    let place = [[0; 16], recv.mminfo()].concat();
    world.machine.fake.on(CREATE_QP, move |reply| {
        reply.set(ATTR_CREATE_QP_RESP_CAP, &cap(3, 4, 96));
        reply.set(ATTR_CREATE_QP_RESP_QP_NUM, &17u32.to_ne_bytes());
        reply.set_driver_out(&place);
        Ok(())
    });
    let builder = world.domain.queue_pair(Transport::Reliable, &world.cq);
    let qp = builder.srq(&srq).build().unwrap();
    srq.receive(world.buffer(b"shared"), 1).unwrap();
    let (srq, error) = srq.close().unwrap_err().into_parts();
    assert!(matches!(error, Error::Busy { .. }), "{error}");
    drop(srq);
    assert_eq!((world.live(OBJECT_SRQ), world.live(OBJECT_MR)), (1, 1));
    assert_eq!(taken(&driver).len(), 1);
    drop(qp);
    assert_eq!((world.live(OBJECT_SRQ), world.live(OBJECT_MR)), (0, 0));
}

/// Their completions are in no order, so each identifier is good for one.
#[test]
fn shared_receive_completes_once() {
    let mut world = World::new();
    let (mut srq, driver) = shared_receives(&world);
    srq.receive(world.buffer(b"one"), 1).unwrap();
    srq.receive(world.buffer(b"two"), 2).unwrap();
    let ids = taken(&driver);
    for (id, token) in [(ids[1], 2), (ids[0], 1)] {
        world.complete(id, 17);
        assert_eq!(world.cq.poll_one().unwrap().unwrap().token, token);
    }
    // Their places are in use again.
    srq.receive(world.buffer(b"three"), 3).unwrap();
    srq.receive(world.buffer(b"four"), 4).unwrap();
    for id in ids {
        world.complete(id, 17);
        let error = world.cq.poll_one().unwrap_err();
        assert!(matches!(error, Error::Corruption { .. }), "{error}");
    }
    assert_eq!(srq.in_flight(), 2);
}

/// No call holds the lock of a shared queue longer than it takes: one may poll
/// in the loop over completions, keep or forget them, and destroy queue pairs.
#[test]
fn srq_is_usable_while_polling() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..4 {
        qp.send(world.buffer(b"x"), token).unwrap();
    }
    for id in queues.sent() {
        world.complete(id, 17);
    }
    let World {
        cq,
        machine,
        domain,
        ..
    } = world;
    let cq = Arc::new(SharedCompletionQueue::new(cq));
    let first = cq.poll_one().unwrap().unwrap();
    let second = cq.poll_one().unwrap().unwrap();
    assert_eq!((first.token, second.token), (0, 1));
    std::mem::forget(second);
    drop(qp);
    let other = Arc::clone(&cq);
    // Completions of a destroyed queue pair are stale.
    let third = thread::spawn(move || other.poll_one().unwrap().is_none());
    assert!(third.join().unwrap());
    drop((first, cq, domain, machine));
}

/// There is nothing to acknowledge: a queue is closed with its events unread,
/// and they are taken for nobody else's.
#[test]
fn event_of_a_destroyed_queue_is_stale() {
    let world = World::new();
    let channel = world.context.completion_channel().unwrap();
    let make = || {
        let builder = world.context.completion_queue().channel(&channel);
        builder.build().unwrap()
    };
    let (first, second) = (make(), make());
    let fd = std::os::fd::AsRawFd::as_raw_fd(&channel);
    for id in [first.id(), second.id()] {
        let event = id.to_ne_bytes().to_vec();
        world.machine.fake.push_read(fd, Ok(event));
    }
    first.close().unwrap();
    let third = make();
    let event = channel.try_event().unwrap().unwrap();
    assert!(!event.is_of(&second) && !event.is_of(&third));
    let event = channel.try_event().unwrap().unwrap();
    assert!(event.is_of(&second) && !event.is_of(&third));
    assert_eq!(channel.try_event().unwrap(), None);
    second.close().unwrap();
}
