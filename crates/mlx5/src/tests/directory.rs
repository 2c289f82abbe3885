//! Whose a completion is, with more queue pairs than are remembered.

use super::*;
use crate::Role;
use crate::directory::Directory;

/// Whether each queue pair's queues are found, but those of `gone`: in the order
/// of their indices, and so that each follows one that has its place, or the
/// lowest byte of its index.
fn are_told_apart(directory: &mut Directory, works: &[Arc<Work>], gone: &[u32]) {
    let count = works.len() as u32;
    let orders = [1, 64, 256].map(|step| (0..count).map(move |n| n * step % (count - 1)));
    for index in orders.into_iter().flatten() {
        let work = &works[index as usize];
        // The uppermost bits of the field are nobody's.
        for field in [index, index | 0x5500_0000].map(u32::to_be) {
            for (receives, queue) in [(false, &work.sends), (true, &work.receives)] {
                let expected = (!gone.contains(&index)).then_some(std::ptr::from_ref(queue));
                let found = directory.queue(receives, field);
                assert_eq!(found.map(std::ptr::from_ref), expected, "{index}");
                let known = directory.recent(receives, field);
                assert_eq!(known.map(std::ptr::from_ref), expected, "{index}");
                assert!(directory.shared(field).is_none(), "{index}");
            }
        }
    }
}

#[test]
fn queue_pairs_that_take_turns_are_told_apart() {
    let works: Vec<_> = (0..300)
        .map(|index| work(index, Service::ReliableConnection, &cap(1, 1, 0), None))
        .collect();
    let mut directory = Directory::default();
    for work in &works {
        let inserted = directory.insert(work, Role::SEND | Role::RECEIVE);
        inserted.expect("there is memory");
    }
    are_told_apart(&mut directory, &works, &[]);
    let mut gone = Vec::new();
    // The first and the last of those that were remembered just now.
    for index in [0, 298, 65, 1] {
        assert!(directory.remove(index).is_some());
        gone.push(index);
        for receives in [false, true] {
            assert!(directory.recent(receives, index.to_be()).is_none());
        }
        are_told_apart(&mut directory, &works, &gone);
    }
}

/// Before any was looked up, nothing is found in any place.
#[test]
fn nothing_is_remembered_at_first() {
    let directory = Directory::default();
    for way in 0..=255u32 {
        for field in [way << 24, way, !way] {
            assert!(directory.recent(false, field).is_none(), "{field:#x}");
            assert!(directory.recent(true, field).is_none(), "{field:#x}");
        }
    }
}

#[test]
fn a_shared_queue_is_found_while_its_queue_pair_is_there() {
    let shared = Arc::new(SharedWork::sized(4, 1, &LIMITS, None).unwrap());
    let works = [5, 69].map(|index| {
        let shared = Some(Arc::clone(&shared));
        work(index, Service::ReliableConnection, &cap(1, 1, 0), shared)
    });
    let mut directory = Directory::default();
    for work in &works {
        let inserted = directory.insert(work, Role::RECEIVE);
        inserted.expect("there is memory");
    }
    let found = |directory: &mut Directory, index: u32| {
        let found = directory.shared(index.to_be()).map(std::ptr::from_ref);
        assert!(found.is_none_or(|found| found == Arc::as_ptr(&shared)));
        found.is_some()
    };
    for index in [5, 69, 5, 5] {
        assert!(found(&mut directory, index), "{index}");
        assert!(directory.queue(true, index.to_be()).is_none());
        assert!(directory.queue(false, index.to_be()).is_none());
    }
    directory.remove(5);
    assert!(!found(&mut directory, 5));
    assert!(found(&mut directory, 69));
}
