//! Two devices, `RXE_DEV` and `RXE_DEV1`, on the ends of a wire that loses and
//! reorders packets: every operation of a reliable connection, what arrives of
//! unreliable ones, and streams, by their content.
//! `rxe-tests/native/lossy.sh` makes the wire.
//!
//! What rdma_rxe makes of losses is not always what it should. Seen on Linux
//! 6.12 with rdma-core's provider as well (`rxe-tests/programs/losses.c`), with
//! where it is in `drivers/infiniband/sw/rxe`:
//!
//! 1. The acknowledgement of a repeated send or write, when it comes in the
//!    middle of a read's answer, lets the device forget that it is in the
//!    middle. The next packet of the answer then ends the read as a success
//!    without its bytes, and the queue pair fails. (`rxe_comp.c`: a plain
//!    acknowledgement ends the packet sequence in `COMPST_UPDATE_COMP`;
//!    `check_ack` gives up without setting a status.)
//! 2. That acknowledgement is one of the last operation that the responder has
//!    seen. If this is an atomic whose own answer is missing, the atomic ends as
//!    a success without the old value. (`duplicate_request` in `rxe_resp.c`.)
//! 3. A read of no bytes whose answer is lost is asked for again without end:
//!    the responder keeps no key of it, and then misses the key in the
//!    repetition. (`qp_resp_from_reth`, `duplicate_request`.)
//! 4. A read that is repeated after a read or write of no bytes is refused, and
//!    the queue pair fails. (`read_reply` takes the length of the last
//!    operation for that of the repeated one.)
//! 5. A fenced read or atomic is never repeated, nor is anything fenced with a
//!    read or atomic sent behind it: the queue pair stands still, without an
//!    error. A late answer is enough. Linux 6.1 and 7.2 do so, too. (`req_retry` in
//!    `rxe_req.c` leaves what it repeats counted as outstanding;
//!    `rxe_wqe_is_fenced` waits until nothing is.)
//!
//! For 1 and 2 sends and writes take turns with reads and atomics here: nothing
//! of the one is on the wire during the other. For 5 nothing has a fence. 3 and 4
//! are what `failed_operations_are_repeated` lives with, as an application has
//! to: by a new connection.
#![allow(missing_docs, reason = "a test")]

mod datagrams;
mod link;
mod reliable;
mod streams;

use link::ends;
use reliable::{Plan, operations};
use ringverbs::Transport;
use testing::setting;

fn plan() -> Plan {
    Plan {
        count: setting("MESSAGES", 200),
        seed: setting("SEED", 1),
        empty: false,
        deaths: 0,
        retries: 7,
        spoiled: false,
    }
}

#[test]
#[ignore = "needs two rxe devices"]
fn operations_transfer_all_bytes() {
    let there = plan();
    let (mut a, mut b) = ends(Transport::Reliable);
    let report = operations(&mut a, &mut b, &there);
    println!("reliable connection: {report}");
    assert_eq!(report.connections, 1, "nothing here may fail");
    // The other way on a connection of its own.
    let back = Plan {
        seed: there.seed + 1,
        ..there
    };
    let (mut a, mut b) = ends(Transport::Reliable);
    let report = operations(&mut b, &mut a, &back);
    println!("and back: {report}");
    assert_eq!(report.connections, 1, "nothing here may fail");
}

/// With operations of no bytes, of which the device loses some, and with
/// passive ends that die.
#[test]
#[ignore = "needs two rxe devices"]
fn failed_operations_are_repeated() {
    let plan = Plan {
        empty: true,
        deaths: 2,
        // Three in a row without a word of the peer's are an end.
        retries: 3,
        ..plan()
    };
    let (mut a, mut b) = ends(Transport::Reliable);
    let report = operations(&mut a, &mut b, &plan);
    println!("with failures: {report}");
    assert!(report.connections > plan.deaths, "{report}");
}

/// The checks see one byte.
#[test]
#[ignore = "needs two rxe devices"]
#[should_panic(expected = "is wrong at byte 0")]
fn wrong_byte_is_detected() {
    let plan = Plan {
        spoiled: true,
        ..plan()
    };
    let (mut a, mut b) = ends(Transport::Reliable);
    operations(&mut a, &mut b, &plan);
}
