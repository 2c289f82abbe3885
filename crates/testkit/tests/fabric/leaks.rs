//! Reported leaks, and permitted drop orders.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ringverbs_testkit::{Fabric, Leak};

use crate::pair::pair;

#[test]
fn leaks_are_named() {
    let fabric = Fabric::roce(2).unwrap();
    fabric.assert_no_leaks();
    let (mut a, b) = pair(&fabric);
    let number = a.qp.qp_num();
    // No receive is posted, and nothing waits for the send.
    a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
    let leaks = fabric.leaks();
    let of_queue_pair = Leak::Object {
        node: 0,
        kind: "queue pair",
        number,
    };
    let of_send = Leak::Sends {
        node: 0,
        qp_num: number,
        count: 1,
    };
    assert!(leaks.contains(&of_queue_pair) && leaks.contains(&of_send));
    let memory = |leak: &&Leak| matches!(leak, Leak::Memory { node: 0, .. });
    assert_eq!(leaks.iter().filter(memory).count(), 1);
    let panic = catch_unwind(AssertUnwindSafe(|| fabric.assert_no_leaks())).unwrap_err();
    let message = panic.downcast_ref::<String>().unwrap();
    assert!(message.contains("node 1: queue pair"), "{message}");
    drop((a, b));
    // All objects are destroyed, but the send has not completed.
    assert_eq!(fabric.leaks(), [of_send]);
}

#[test]
fn a_fabric_that_denies_leaks_panics_when_dropped() {
    let drop_with = |leak: bool| {
        let fabric = Fabric::builder().deny_leaks().build(1).unwrap();
        let context = fabric.node(0).open().unwrap();
        let domain = leak.then(|| context.alloc_pd().unwrap());
        let panic = catch_unwind(AssertUnwindSafe(|| drop(fabric)));
        drop(domain);
        panic.is_err()
    };
    assert!(drop_with(true));
    assert!(!drop_with(false));
}

#[test]
fn objects_may_be_dropped_in_any_order() {
    for first in 0..3 {
        let fabric = Fabric::roce(2).unwrap();
        let (mut a, mut b) = pair(&fabric);
        b.qp.receive(b.buffer(&[0; 8]), 1).unwrap();
        a.qp.send(a.buffer(&[5; 8]), 2).unwrap();
        match first {
            0 => {
                drop(fabric);
                // The devices outlive the fabric.
                assert!(a.complete().result.is_ok());
                drop((a, b));
            }
            1 => {
                drop(a);
                drop(fabric);
                drop(b);
            }
            _ => {
                drop((b, fabric));
                assert!(a.complete().result.is_err());
            }
        }
    }
}
