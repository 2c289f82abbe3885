//! The QP table of a completion queue.

use super::*;
use crate::Role;
use crate::qp_table::QpTable;

#[test]
fn queue_pairs_are_found_by_user_index() {
    let shared = Arc::new(SrqEntries::new(4, 1, &LIMITS, None).unwrap());
    let indices = (0..300).chain([0xff_fff0]);
    let all_queues: Vec<_> = indices
        .map(|index| {
            let shared = (index % 3 == 0).then(|| Arc::clone(&shared));
            qp_queues(index, Service::ReliableConnection, &cap(1, 1, 0), shared)
        })
        .collect();
    let mut table = QpTable::default();
    let role = |index: u32| [Role::SEND, Role::RECEIVE, Role::all()][index as usize / 3 % 3];
    let check = |table: &mut QpTable, removed: &[u32]| {
        for index in (0..400).chain([0xff_fff0, 0xff_ffff]) {
            // The uppermost bits of the field are not the user index's.
            for field in [index, index | 0x5500_0000].map(u32::to_be) {
                let expected = |of| {
                    let queues = all_queues
                        .iter()
                        .find(|queues| queues.user_index() == index)?;
                    let there = !removed.contains(&index) && role(index).contains(of);
                    there.then_some(Arc::as_ptr(queues))
                };
                let found = |queues: Option<&QpQueues>| queues.map(std::ptr::from_ref);
                assert_eq!(found(table.sender(field)), expected(Role::SEND), "{index}");
                let receiver = found(table.receiver(field));
                assert_eq!(receiver, expected(Role::RECEIVE), "{index}");
            }
        }
    };
    for queues in &all_queues {
        // One role after the other.
        for one in role(queues.user_index()).iter() {
            table.insert(queues, one).expect("there is memory");
        }
    }
    check(&mut table, &[]);
    let mut removed = Vec::new();
    for index in [0, 298, 65, 1, 0xff_fff0] {
        assert!(table.remove(index));
        removed.push(index);
        check(&mut table, &removed);
        assert!(!table.remove(index));
    }
    assert!(!table.remove(0xff_ffff));
}
