//! The QP table of a completion queue.

use super::*;
use crate::Role;
use crate::qp_table::QpTable;

#[test]
fn queue_pairs_are_found_by_user_index() {
    let shared = Arc::new(SharedWork::new(4, 1, &LIMITS, None).unwrap());
    let indices = (0..300).chain([0xff_fff0]);
    let works: Vec<_> = indices
        .map(|index| {
            let shared = (index % 3 == 0).then(|| Arc::clone(&shared));
            work(index, Service::ReliableConnection, &cap(1, 1, 0), shared)
        })
        .collect();
    let mut table = QpTable::default();
    let role = |index: u32| [Role::SEND, Role::RECEIVE, Role::all()][index as usize / 3 % 3];
    let check = |table: &mut QpTable, removed: &[u32]| {
        for index in (0..400).chain([0xff_fff0, 0xff_ffff]) {
            // The uppermost bits of the field are not the user index's.
            for field in [index, index | 0x5500_0000].map(u32::to_be) {
                let expected = |of| {
                    let work = works.iter().find(|work| work.user_index() == index)?;
                    let there = !removed.contains(&index) && role(index).contains(of);
                    there.then_some(Arc::as_ptr(work))
                };
                let found = |work: Option<&Work>| work.map(std::ptr::from_ref);
                assert_eq!(found(table.sender(field)), expected(Role::SEND), "{index}");
                let receiver = found(table.receiver(field));
                assert_eq!(receiver, expected(Role::RECEIVE), "{index}");
            }
        }
    };
    for work in &works {
        // One role after the other.
        for one in role(work.user_index()).iter() {
            table.insert(work, one).expect("there is memory");
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
