//! Shared receive queues.

use uverbs::Sge;

use super::*;
use crate::srq::SharedQueue;
use crate::{PostError, Role};

fn sge(addr: u64) -> Sge {
    Sge {
        addr,
        length: 8,
        lkey: 2,
    }
}

/// What the device takes after `slot`.
fn next(shared: &SharedWork, slot: u16) -> u16 {
    // SAFETY: two bytes of an entry.
    u16::from_be(unsafe { shared.entry(slot).add(2).cast::<u16>().read() })
}

#[test]
fn receives_complete_in_any_order_and_their_slots_come_back() {
    let shared = Arc::new(SharedWork::sized(3, 1, &LIMITS, None).unwrap());
    let mut queue = SharedQueue::new(Arc::clone(&shared));
    assert_eq!((queue.capacity(), queue.max_sge()), (3, 1));
    let (mut ring, work) = (
        CompletionRing::plain(4).unwrap(),
        work(
            5,
            Service::Datagram,
            &cap(1, 1, 0),
            Some(Arc::clone(&shared)),
        ),
    );
    let mut device = Device::of(&ring);
    ring.attach(&work, Role::RECEIVE).unwrap();

    // The device follows the list on its own.
    let mut at = 0u16;
    let mut have = Vec::new();
    let mut posted = 0u64;
    for round in 0..50usize {
        while queue.push(posted, &[sge(posted)]).is_ok() {
            have.push((at, posted));
            // SAFETY: the receive's one segment, behind the first.
            let addr = unsafe { shared.entry(at).add(24).cast::<u64>().read() };
            assert_eq!(u64::from_be(addr), posted);
            at = next(&shared, at);
            posted += 1;
        }
        assert_eq!(queue.push(0, &[]), Err(PostError::Full));
        // SAFETY: there is no device that writes.
        unsafe { queue.publish() };
        assert_eq!(have.len(), 3);
        let (slot, wr_id) = have.remove(round * 7 % 3);
        let raised = Raised {
            opcode: 2,
            user_index: 5,
            slot,
            ..Raised::default()
        };
        device.raise(&raised);
        // SAFETY: what was posted is not written to.
        let wc = unsafe { ring.read() }.unwrap().unwrap();
        assert_eq!(wc.wr_id, wr_id);
        // Twice is once too often.
        device.raise(&raised);
        // SAFETY: as above.
        assert!(unsafe { ring.read() }.unwrap().is_err());
        ring.publish();
        for slot in [4, 5, u16::MAX] {
            assert_eq!(shared.find(slot), None);
        }
    }
}
