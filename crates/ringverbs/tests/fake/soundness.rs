//! A test for each way in which wrappers of RDMA go wrong.
//! `docs/internals/soundness.md` lists them, with what the type system prevents.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ringverbs::{
    AccessFlags, BatchError, Completion, Error, Inline, Operation, PostError, Status, WindowType,
    WorkRequest,
};
use uverbs::Errno;
use uverbs::abi::ids::*;
use uverbs::abi::write::cmd;
use uverbs::kernel::fake::{Call, Target};

use crate::{DEREG_MR, DESTROY_CQ, DESTROY_QP, QUERY_GID, World};
use device_testing::rxe::layout::{self, wc};

/// Whether memory is mapped at that address.
fn is_mapped(addr: usize) -> bool {
    // SAFETY: asks about pages; changes nothing.
    unsafe { libc::msync((addr & !4095) as *mut _, 1, libc::MS_ASYNC) == 0 }
}

/// Queues of the driver's that are mapped into this process, from that offset
/// of its memory.
fn mappings(memory: &fs::File, offset: u64) -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let inode = memory.metadata().unwrap().ino().to_string();
    let offset = format!("{offset:08x}");
    maps.lines()
        .map(|line| line.split_ascii_whitespace().collect::<Vec<_>>())
        .filter(|line| line[2] == offset && line[4] == inode)
        .count()
}

/// A posted operation owns its memory, whatever becomes of the handles.
#[test]
fn memory_in_flight_outlives_all_handles() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let buffer = world.buffer(b"in flight");
    let addr = buffer.as_ptr().addr();
    qp.send(buffer, 5).unwrap();
    assert_eq!(world.live(OBJECT_MR), 1);
    let id = queues.sent()[0];
    world.complete(id, 17);
    // Done, but not read: still owned.
    assert_eq!(world.live(OBJECT_MR), 1);
    let completion = world.cq.poll_one().unwrap().unwrap();
    assert!(is_mapped(addr));
    drop(completion);
    assert_eq!(world.live(OBJECT_MR), 0);
    assert!(!is_mapped(addr));
}

/// ... until its queue pair is gone: then the kernel touches nothing of it.
#[test]
fn memory_in_flight_is_released_with_its_queue_pair() {
    let world = World::new();
    let (mut qp, _queues) = world.queue_pair(17);
    qp.send(world.buffer(b"in flight"), 5).unwrap();
    let fake = world.machine.fake.clone();
    world.machine.fake.on(DESTROY_QP, move |_| {
        let live = fake.live_objects();
        assert!(live.iter().any(|&(_, object)| object == OBJECT_MR));
        Ok(())
    });
    drop(qp);
    assert_eq!(world.live(OBJECT_MR), 0);
}

/// The poller of a completion queue that has met the queue pair lets go of it
/// when it polls next; what other handles do in between harms nothing.
#[test]
fn poller_releases_a_destroyed_queue_pair() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..2 {
        qp.send(world.buffer(b"in flight"), token).unwrap();
    }
    let ids = queues.sent();
    world.complete(ids[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    drop(qp);
    assert_eq!(world.live(OBJECT_MR), 1);
    assert!(world.cq.poll_one().unwrap().is_none());
    assert_eq!(world.live(OBJECT_MR), 0);
    // A completion that came too late.
    world.complete(ids[1], 17);
    assert!(world.cq.poll_one().unwrap().is_none());
}

/// `mem::forget` of any handle can only leak.
#[test]
fn a_forgotten_queue_pair_keeps_its_memory() {
    let world = World::new();
    let (mut qp, _queues) = world.queue_pair(17);
    let buffer = world.buffer(b"in flight");
    let addr = buffer.as_ptr().addr();
    qp.send(buffer, 5).unwrap();
    std::mem::forget(qp);
    let World {
        cq,
        domain,
        context,
        machine,
        ..
    } = world;
    drop((cq, domain, context));
    assert!(is_mapped(addr));
    assert!(machine.live().contains(&OBJECT_QP));
    std::mem::forget(machine);
}

/// A cursor that was forgotten has taken what it has shown: whatever reads next
/// goes on behind it, and nothing is given back twice.
#[test]
fn readers_continue_after_a_forgotten_cursor() {
    for shown in 1..=3 {
        let mut world = World::new();
        let (mut qp, queues) = world.queue_pair(17);
        for token in 0..3 {
            qp.send(world.buffer(b"x"), token).unwrap();
        }
        let ids = queues.sent();
        for &id in &ids {
            world.complete(id, 17);
        }
        let mut cursor = world.cq.cursor();
        for _ in 0..shown {
            cursor.next_entry().unwrap().unwrap();
        }
        std::mem::forget(cursor);
        let mut seen = Vec::new();
        let rest = ids.len() - shown;
        let count = world.cq.poll_raw(8, |entry| seen.push(entry.wr_id()));
        assert_eq!((count, &seen[..]), (rest, &ids[shown..]));
        assert_eq!(world.completions.consumer(), 3);
        // What comes later is not lost.
        qp.send(world.buffer(b"x"), 9).unwrap();
        let id = queues.sent()[0];
        world.complete(id, 17);
        let completion = world.cq.poll_one().unwrap().unwrap();
        assert_eq!(completion.token, 9);
        assert_eq!(world.completions.consumer(), 4);
    }
}

/// ... nor if the device has taken it back meanwhile.
#[test]
fn forgotten_cursor_of_an_empty_queue_releases_nothing() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.send(world.buffer(b"x"), 1).unwrap();
    world.complete(queues.sent()[0], 17);
    let mut cursor = world.cq.cursor();
    cursor.next_entry().unwrap().unwrap();
    std::mem::forget(cursor);
    world.completions.set_producer(0);
    assert!(world.cq.poll_one().unwrap().is_none());
    assert_eq!(world.completions.consumer(), 0);
}

/// Memory is deregistered, then freed.
#[test]
fn memory_is_deregistered_before_it_is_freed() {
    let world = World::new();
    let buffer = world.buffer(b"x");
    let addr = buffer.as_ptr().addr();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    world.machine.fake.on(DEREG_MR, move |_| {
        assert!(is_mapped(addr));
        counted.fetch_add(1, Ordering::Relaxed);
        Ok(())
    });
    drop(buffer);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert!(!is_mapped(addr));
}

/// Memory that cannot be deregistered stays.
#[test]
fn memory_that_the_device_may_still_write_is_leaked() {
    let world = World::new();
    let buffer = world.buffer(b"x");
    let addr = buffer.as_ptr().addr();
    world
        .machine
        .fake
        .on(DEREG_MR, |_| Err(Errno::new(libc::EBUSY)));
    drop(buffer);
    assert!(is_mapped(addr));

    let region = world.domain.alloc(64).unwrap();
    let (region, error) = region.close().unwrap_err().into_parts();
    assert_eq!(error.errno(), libc::EBUSY);
    world.machine.fake.reset(DEREG_MR);
    region.close().unwrap();
}

/// The kernel's object is destroyed, then its rings are unmapped.
#[test]
fn rings_are_unmapped_after_their_object_is_destroyed() {
    let world = World::new();
    let (qp, queues) = world.queue_pair(17);
    let offsets = [queues.send.offset, queues.recv.offset];
    let memory = world.machine.memory.try_clone().unwrap();
    world.machine.fake.on(DESTROY_QP, move |_| {
        assert_eq!(offsets.map(|at| mappings(&memory, at)), [1, 1]);
        Ok(())
    });
    // The halves go one after the other; the object goes with the second.
    let (send, recv) = qp.split();
    drop(send);
    assert_eq!(world.live(OBJECT_QP), 1);
    drop(recv);
    assert_eq!(world.live(OBJECT_QP), 0);
    let memory = world.machine.memory.try_clone().unwrap();
    assert_eq!(offsets.map(|at| mappings(&memory, at)), [0, 0]);
    world.machine.fake.reset(DESTROY_QP);

    let (qp, _queues) = world.queue_pair(18);
    let World {
        cq,
        completions,
        machine,
        domain,
        context,
    } = world;
    let offset = completions.offset;
    drop(cq);
    // The queue pair still completes there.
    assert_eq!(mappings(&memory, offset), 1);
    drop(qp);
    assert_eq!(mappings(&memory, offset), 0);
    drop((domain, context, machine));
}

/// A queue pair that cannot be destroyed is leaked with all that it uses, and
/// nobody panics.
#[test]
fn refused_destroy_on_drop_leaks() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let buffer = world.buffer(b"in flight");
    let addr = buffer.as_ptr().addr();
    qp.receive(buffer, 5).unwrap();
    world
        .machine
        .fake
        .on(DESTROY_QP, |_| Err(Errno::new(libc::EBUSY)));
    let (qp, error) = qp.close().unwrap_err().into_parts();
    assert_eq!(error.errno(), libc::EBUSY);
    drop(qp);
    assert!(is_mapped(addr));
    assert_eq!(mappings(&world.machine.memory, queues.send.offset), 1);
    assert_eq!(mappings(&world.machine.memory, queues.recv.offset), 1);
    std::mem::forget(world.machine);
}

/// Drops an object under a subscriber that panics. Returns whether it did.
fn drop_with_panic<T>(object: T) -> bool {
    let dropped = AssertUnwindSafe(|| {
        tracing::subscriber::with_default(testing::PanickingSubscriber::new(""), || drop(object));
    });
    catch_unwind(dropped).is_err()
}

/// Memory that the device may write to is leaked, also if the subscriber panics at the event
/// that reports the leak.
#[test]
fn refused_destroy_leaks_despite_a_panic() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let region = world.domain.alloc_remote(64, AccessFlags::MW_BIND).unwrap();
    let window = world.domain.memory_window(WindowType::One).unwrap();
    let part = region.slice(..).unwrap();
    qp.post(WorkRequest::bind(&window, part, AccessFlags::empty()))
        .unwrap();
    world.complete(queues.sent()[0], 17);
    drop(world.cq.poll_one().unwrap().unwrap());
    let buffer = world.buffer(b"in flight");
    let addresses = [buffer.as_ptr().addr() as u64, region.key().addr];
    qp.receive(buffer, 5).unwrap();
    drop(region);
    let destroy_mw = Target::Method(OBJECT_MW, METHOD_MW_DESTROY);
    for target in [DESTROY_QP, destroy_mw] {
        let fake = &world.machine.fake;
        fake.on(target, |_| Err(Errno::new(libc::EBUSY)));
    }
    assert!(drop_with_panic(window));
    assert!(drop_with_panic(qp));
    assert!(addresses.iter().all(|addr| is_mapped(*addr as usize)));
    assert_eq!(mappings(&world.machine.memory, queues.send.offset), 1);
    assert_eq!(mappings(&world.machine.memory, queues.recv.offset), 1);
    std::mem::forget(world.machine);
}

/// A device that is gone has taken its objects with it: nothing is leaked.
#[test]
fn removed_device_leaks_nothing() {
    let world = World::new();
    let (mut qp, _queues) = world.queue_pair(17);
    let buffer = world.buffer(b"in flight");
    let addr = buffer.as_ptr().addr();
    qp.receive(buffer, 5).unwrap();
    for target in [DESTROY_QP, DEREG_MR, QUERY_GID] {
        world
            .machine
            .fake
            .on(target, |_| Err(Errno::new(libc::EIO)));
    }
    drop(qp);
    assert!(!is_mapped(addr));
}

/// A driver that fails with the same number, of a device that is alive, is not
/// believed: what the device may still write to stays.
#[test]
fn eio_of_a_live_device_frees_nothing() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let (flying, idle) = (world.buffer(b"in flight"), world.buffer(b"idle"));
    let addresses = [flying.as_ptr().addr(), idle.as_ptr().addr()];
    qp.receive(flying, 5).unwrap();
    let fake = &world.machine.fake;
    for target in [DESTROY_QP, DESTROY_CQ, DEREG_MR] {
        fake.on(target, |_| Err(Errno::new(libc::EIO)));
    }
    // As a real one says that there is no such GID.
    fake.on(QUERY_GID, |_| Err(Errno::new(libc::ENODATA)));
    let refused = qp.close().unwrap_err();
    assert_eq!(refused.error.errno(), libc::EIO);
    drop((refused, idle));
    assert!(addresses.into_iter().all(is_mapped));
    assert_eq!(world.live(OBJECT_QP), 1);
    let World {
        cq,
        completions,
        machine,
        ..
    } = world;
    drop(cq);
    for offset in [queues.recv.offset, completions.offset] {
        assert_eq!(mappings(&machine.memory, offset), 1);
    }
    std::mem::forget(machine);
}

/// A completion queue whose destruction is refused comes back, and works; when
/// it is dropped all the same, its ring stays where the device can write it.
#[test]
fn refused_close_returns_the_completion_queue() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.send(world.buffer(b"x"), 5).unwrap();
    world.complete(queues.sent()[0], 17);
    let done = world.cq.poll_one().unwrap().unwrap();
    drop((done, qp));
    let fake = world.machine.fake.clone();
    fake.on(DESTROY_CQ, |_| Err(Errno::new(libc::EBUSY)));
    let refused = world.cq.close().unwrap_err();
    assert_eq!(refused.error.errno(), libc::EBUSY);
    let mut cq = refused.object;
    assert!(cq.poll_one().unwrap().is_none());
    assert_eq!(mappings(&world.machine.memory, world.completions.offset), 1);
    drop(cq);
    assert_eq!(mappings(&world.machine.memory, world.completions.offset), 1);

    let again = world.context.completion_queue().build().unwrap();
    assert_eq!(mappings(&world.machine.memory, world.completions.offset), 2);
    let again = again.close().unwrap_err().object;
    fake.reset(DESTROY_CQ);
    fake.take_calls();
    again.close().unwrap();
    assert_eq!(mappings(&world.machine.memory, world.completions.offset), 1);
    // Destroyed once.
    let calls = fake.take_ioctls();
    let destroys = calls.iter().filter(|call| call.target() == DESTROY_CQ);
    assert_eq!(destroys.count(), 1);
    std::mem::forget(world.machine);
}

/// Queue pairs may be made and destroyed while completions are being read.
#[test]
fn a_queue_pair_may_be_destroyed_between_completions() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..3 {
        qp.send(world.buffer(b"x"), token).unwrap();
    }
    for id in queues.sent() {
        world.complete(id, 17);
    }
    let mut qp = Some(qp);
    let mut read = 0;
    world.cq.poll_raw(3, |entry| {
        assert_eq!(entry.status(), Status::SUCCESS);
        read += 1;
        qp.take();
    });
    assert_eq!(read, 3);
}

/// What a completion does not have is not there to be read.
#[test]
fn absent_fields_are_none() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..3 {
        qp.receive(world.buffer(&[0; 60]), token).unwrap();
    }
    let ids = queues.received();
    let flags = [0, 2, 8];
    for (id, flags) in ids.into_iter().zip(flags) {
        // With bits that nobody knows.
        let flags = flags | 0xffff_0000;
        world.raise(&[
            (wc::WR_ID, id),
            (wc::WC_FLAGS, flags),
            (wc::EX, 0x0102_0304),
        ]);
    }
    let mut next = || world.cq.poll_one().unwrap().unwrap().result.unwrap();
    let plain = next();
    assert_eq!((plain.immediate(), plain.invalidated()), (None, None));
    let immediate = next();
    assert_eq!(immediate.immediate(), Some(0x0403_0201));
    assert_eq!(immediate.invalidated(), None);
    assert_eq!(next().invalidated(), Some(0x0102_0304));
}

/// A failed operation says why, and nothing else.
#[test]
fn unknown_statuses_are_kept() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.receive(world.buffer(&[0; 60]), 9).unwrap();
    let id = queues.received()[0];
    world.raise(&[
        (wc::WR_ID, id),
        (wc::STATUS, 0xdead_beef),
        (wc::OPCODE, 0xffff_ffff),
        (wc::VENDOR_ERR, 77),
        (wc::BYTE_LEN, u64::from(u32::MAX)),
    ]);
    let completion = world.cq.poll_one().unwrap().unwrap();
    assert_eq!(completion.operation, Operation::Receive);
    let failure = completion.result.unwrap_err();
    assert_eq!(failure.status, Status(0xdead_beef));
    assert_eq!(failure.vendor_err, 77);
    let text = format!("{failure} {:?}", failure.status);
    assert!(text.contains(&0xdead_beef_u32.to_string()), "{text}");
}

/// Clones of a channel are one channel, closed once.
#[test]
fn channel_is_closed_once() {
    let world = World::new();
    let channel = world.context.completion_channel().unwrap();
    let clone = channel.clone();
    let before = world.machine.fake.open_fds().len();
    world.machine.fake.take_calls();
    drop(channel);
    assert_eq!(world.machine.fake.open_fds().len(), before);
    drop(clone);
    assert_eq!(world.machine.fake.open_fds().len(), before - 1);
    let closed = world.machine.fake.take_calls();
    let closed = closed.iter().filter(|call| matches!(call, Call::Close(_)));
    assert_eq!(closed.count(), 1);
}

/// An entry that comes while the queue is being armed is seen.
#[test]
fn arming_checks_the_queue_again() {
    let world = World::new();
    let channel = world.context.completion_channel().unwrap();
    let builder = world.context.completion_queue();
    let mut cq = builder.channel(&channel).build().unwrap();
    assert!(!cq.arm(false).unwrap());
    let completions = world.machine.memory.try_clone().unwrap();
    let driver = crate::Driver {
        file: completions,
        offset: world.completions.offset,
        stride: world.completions.stride,
        slots: world.completions.slots,
    };
    world
        .machine
        .fake
        .on(Target::Write(cmd::CMD_REQ_NOTIFY_CQ), move |_| {
            driver.set_producer(1);
            Ok(())
        });
    assert!(cq.arm(false).unwrap());
}

/// Completions are handed out in the device's order.
#[test]
fn completions_are_in_order() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    for token in 0..7 {
        qp.send(world.buffer(b"x"), token).unwrap();
    }
    for id in queues.sent() {
        world.complete(id, 17);
    }
    let mut out: [Completion; 5] = Default::default();
    let mut tokens = Vec::new();
    loop {
        let count = world.cq.poll(&mut out).unwrap();
        tokens.extend(out[..count].iter().map(|done| done.token));
        if count == 0 {
            break;
        }
    }
    assert_eq!(tokens, [0, 1, 2, 3, 4, 5, 6]);
}

/// A completion that comes twice finds nothing the second time, also when its
/// place in the table is in use again.
#[test]
fn a_stale_identifier_is_corruption_not_an_operation() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.send(world.buffer(b"first"), 1).unwrap();
    let first = queues.sent()[0];
    world.complete(first, 17);
    assert_eq!(world.cq.poll_one().unwrap().unwrap().token, 1);
    // Once around the table.
    for token in 2..=9 {
        qp.send(world.buffer(b"later"), token).unwrap();
        let id = queues.sent()[0];
        if token < 9 {
            world.complete(id, 17);
            assert_eq!(world.cq.poll_one().unwrap().unwrap().token, token);
        }
    }
    world.complete(first, 17);
    let error = world.cq.poll_one().unwrap_err();
    assert!(
        matches!(error, Error::Corruption { wr_id, qp_num: 17 } if wr_id == first),
        "{error}"
    );
    // Nothing was taken for it.
    assert_eq!(qp.in_flight().0, 1);
    assert!(world.cq.poll_one().unwrap().is_none());
}

/// A completion of a destroyed queue pair is stale, also when another one
/// has its place.
#[test]
fn a_completion_of_a_former_queue_pair_is_dropped() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.send(world.buffer(b"former"), 1).unwrap();
    let id = queues.sent()[0];
    drop(qp);
    let (mut qp, queues) = world.queue_pair(18);
    qp.send(world.buffer(b"present"), 2).unwrap();
    let present = queues.sent()[0];
    assert_ne!(id, present);
    world.complete(id, 17);
    world.complete(present, 18);
    let completion = world.cq.poll_one().unwrap().unwrap();
    assert_eq!(completion.token, 2);
    assert!(world.cq.poll_one().unwrap().is_none());
}

/// Whatever the device writes, nothing panics, and no operation in flight is
/// brought to an end but by its own identifier.
#[test]
fn random_completions_are_harmless() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    qp.receive(world.buffer(b"here"), 1).unwrap();
    let live = queues.received()[0];
    for round in 0..2000 {
        let mut entry: Vec<u8> = (0..6).flat_map(|_| random().to_ne_bytes()).collect();
        // Numbers out of the air come near no operation: the other half are
        // one bit, or a little, beside the one in flight.
        match round % 4 {
            0 => layout::write(&mut entry, wc::WR_ID, live ^ 1 << (random() % 64)),
            1 => {
                let beside = live.wrapping_add(random() % 5).wrapping_sub(2);
                let beside = if beside == live { live + 3 } else { beside };
                layout::write(&mut entry, wc::WR_ID, beside);
            }
            _ => {}
        }
        world.completions.set_entry(random() as u32 % 64, &entry);
        world.completions.set_producer(random() as u32);
        for _ in 0..3 {
            match world.cq.poll_one() {
                Ok(None) | Err(Error::Corruption { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(qp.in_flight().1, 1);
}

/// ... nor by an identifier that is right but for its sequence number, its
/// queue's generation, its queue or its kind.
#[test]
fn unused_identifiers_match_nothing() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.receive(world.buffer(b"here"), 1).unwrap();
    let live = queues.received()[0];
    let (sequence, generation, index, kind) = (1, 1 << 24, 1 << 44, 1 << 63);
    let around = [sequence, generation, index]
        .into_iter()
        .flat_map(|one| [live.wrapping_add(one), live.wrapping_sub(one)]);
    for id in around.chain([live ^ kind, live ^ 1 << 23, live | 0xff_ffff]) {
        assert_ne!(id, live);
        world.complete(id, 17);
        match world.cq.poll_one() {
            Ok(None) | Err(Error::Corruption { .. }) => {}
            other => panic!("{id:#x}: {other:?}"),
        }
        assert_eq!(qp.in_flight().1, 1, "{id:#x}");
    }
    world.complete(live, 17);
    assert_eq!(world.cq.poll_one().unwrap().unwrap().token, 1);
}

/// A length that the device makes up is cut to the buffer.
#[test]
fn a_received_length_is_not_trusted() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let mut buffer = world.buffer(b"");
    let _rest = buffer.split_off(64);
    qp.receive(buffer, 1).unwrap();
    let id = queues.received()[0];
    world.raise(&[(wc::WR_ID, id), (wc::BYTE_LEN, u64::from(u32::MAX))]);
    let mut completion = world.cq.poll_one().unwrap().unwrap();
    assert_eq!(completion.take_buffer().unwrap().len(), 64);
}

#[test]
fn abandoned_batch_posts_nothing() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let access = AccessFlags::MW_BIND | AccessFlags::REMOTE_READ;
    let region = world.domain.alloc_remote(64, access).unwrap();
    let window = world.domain.memory_window(WindowType::Two).unwrap();
    let rkey = window.rkey();
    let given_up = qp.batch(|batch| {
        batch.post(WorkRequest::send(world.buffer(b"never")))?;
        for _ in 0..2 {
            let bind =
                WorkRequest::bind(&window, region.slice(..).unwrap(), AccessFlags::REMOTE_READ);
            batch.post(bind).unwrap();
            assert_ne!(window.rkey(), rkey);
        }
        // More than one receives into.
        let pieces = (0..4).map(|_| world.buffer(b"x")).collect::<Vec<_>>();
        let refused = batch.post(WorkRequest::send(pieces)).unwrap_err();
        assert_eq!(refused.data.unwrap().len(), 4);
        batch.post(WorkRequest::send(world.buffer(b"never")))?;
        Err::<(), _>(PostError {
            error: refused.error,
            data: None,
            token: 3,
        })
    });
    match given_up.unwrap_err() {
        BatchError::Abandoned(error) => assert!(matches!(error.error, Error::Limit { .. })),
        BatchError::Doorbell(error) | BatchError::Refused(error) => panic!("{error}"),
    }
    assert!(queues.sent().is_empty());
    assert_eq!(qp.in_flight().0, 0);
    // The region alone is left, and the window has the key that it had.
    assert_eq!((world.live(OBJECT_MR), window.rkey()), (1, rkey));

    let given_up = qp.receive_batch(|batch| {
        batch.receive(world.buffer(b""), 1).unwrap();
        Err::<(), _>("given up")
    });
    assert_eq!(given_up, Err("given up"));
    assert!(queues.received().is_empty());
    assert_eq!((qp.in_flight().1, world.live(OBJECT_MR)), (0, 1));

    let posted = qp.batch(|batch| batch.post(WorkRequest::send(Inline(b"after"))));
    posted.unwrap();
    assert_eq!(queues.sent().len(), 1);
}

/// The library's own signals are counted by what was posted: batches that were
/// given up do not make it miss one.
#[test]
fn abandoned_batches_do_not_fill_the_queue() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let quiet = || WorkRequest::send(Inline(b"x")).unsignaled();
    for round in 0..50 {
        qp.post(quiet())
            .unwrap_or_else(|error| panic!("round {round}: {error}"));
        let given_up = qp.batch(|batch| {
            while batch.post(quiet()).is_ok() {}
            Err::<(), _>(())
        });
        given_up.unwrap_err();
        let entries = queues.send.consume();
        let signaled = |entry: &Vec<u8>| layout::read(entry, layout::send::SEND_FLAGS) & 2 != 0;
        for entry in entries.iter().filter(|entry| signaled(entry)) {
            world.complete(layout::read(entry, layout::send::WR_ID), 17);
        }
        assert!(world.cq.poll_one().unwrap().is_none());
    }
}

/// A panic in the middle of a batch posts nothing, and loses nothing but the
/// batch.
#[test]
fn panicking_batch_posts_nothing() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let buffer = world.buffer(b"never");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let _ = qp.batch(|batch| {
            batch.post(ringverbs::WorkRequest::send(buffer)).unwrap();
            if world.live(OBJECT_MR) > 0 {
                panic!("in the middle");
            }
            Ok::<_, Error>(())
        });
    }));
    assert!(panicked.is_err());
    assert!(queues.sent().is_empty());
    assert_eq!(qp.in_flight().0, 0);
    qp.send(world.buffer(b"after"), 1).unwrap();
    assert_eq!(world.live(OBJECT_MR), 1);
    assert_eq!(queues.sent().len(), 1);
}
