//! Looking at a completion queue without its lock.

use super::*;
use crate::Role;

#[test]
fn empty_check_sees_new_completions() {
    let mut ring = CqeRing::plain(1).unwrap();
    // SAFETY: it is not used after the ring.
    let check = unsafe { ring.empty_check() };
    let mut device = Device::of(&ring);
    let mut pair = TestQp::new(70, Service::ReliableConnection, &cap(16, 1, 0));
    ring.attach(&pair.queues, Role::SEND).unwrap();
    for round in 0..7 {
        assert!(check.is_empty(), "{round}");
        complete_one(&mut pair, &mut device, 1);
        assert!(!check.is_empty());
        // SAFETY: there is no data.
        unsafe { read(&mut ring) }.unwrap().unwrap();
        // It is not given back yet.
        assert!(!check.is_empty());
        ring.publish();
    }
    assert!(check.is_empty());
    // While it moves nothing is called empty.
    ring.suspend().unwrap();
    assert!(!check.is_empty());
    let memory = CqeRing::new_entries(3, ring.format(), None).unwrap();
    device.move_to(memory.first(), 8);
    assert!(ring.move_to(memory, 3));
    assert!(check.is_empty());
    complete_one(&mut pair, &mut device, 1);
    assert!(!check.is_empty());
}
