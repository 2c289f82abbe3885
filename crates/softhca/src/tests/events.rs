//! Events in the event queue.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::{causes, commands, data, dynamic, memory, signatures};
use crate::cause::Cause;
use crate::command::opcode as op;
use crate::layout::event;
use crate::testing::driver::{Driver, Qp, SIGNALED, segment, status, word};

thread_local! {
    /// Types of the events that devices of this thread's tests have posted.
    static RECORDED: RefCell<BTreeSet<u8>> = const { RefCell::new(BTreeSet::new()) };
}

/// Called for each event that is posted.
pub(crate) fn record(kind: u8) {
    RECORDED.with_borrow_mut(|recorded| recorded.insert(kind));
}

/// Returns type and number of the queue of the events that are posted.
fn posted(driver: &Driver) -> Vec<(u8, u32)> {
    let all = (0..driver.hca.stats().eqes).map(|n| driver.read(driver.eq + n * 64, 64));
    all.map(|event| (event[1], word(&event, 56))).collect()
}

/// Makes a queue pair ready to receive, and no more.
fn prepare_to_receive(driver: &mut Driver, qp: &Qp, remote: u32) {
    driver.modify(op::RST2INIT_QP, qp.number, |input| input.or(0xa8, 13, 7));
    driver.modify(op::INIT2RTR_QP, qp.number, |input| {
        (input.or(0x20, 29, 3).or(0x2c, 0, remote).or(0x34, 0, 1)).or(0xac, 0, 100)
    });
}

/// A request that arrives before the queue pair is ready to send.
#[test]
fn the_first_request_establishes_a_connection() {
    let mut driver = Driver::new("ib");
    let cq = driver.create_cq(4);
    let (mut a, mut b) = (
        driver.create_qp(0, &cq, None),
        driver.create_qp(0, &cq, None),
    );
    driver.connect(a.number, b.number, 1);
    prepare_to_receive(&mut driver, &b, a.number);
    let (key, memory) = (driver.key, driver.pages(1));
    for _ in 0..2 {
        driver.post_recv(&mut b, &segment(64, key, memory));
        driver.post(&mut a, 0x0a, SIGNALED, &segment(8, key, memory));
    }
    assert_eq!(posted(&driver), [(event::COMM_EST, b.number)]);
}

#[test]
fn an_error_ends_the_receives_of_an_srq() {
    let mut driver = Driver::new("ib");
    let (buffer, doorbell) = (driver.pages(1), driver.pages(1));
    let srqn = driver.create_srq(buffer, doorbell);
    let cq = driver.create_cq(4);
    let a = driver.create_qp(0, &cq, Some(srqn));
    driver.connect(a.number, 1, 1);
    driver.modify(op::TO_ERR_QP, a.number, |input| input);
    driver.run();
    assert_eq!(posted(&driver), [(event::SRQ_LAST_WQE, a.number)]);
}

/// The device cannot find the work requests after one whose length is malformed.
#[test]
fn a_malformed_work_request_ends_its_queue() {
    let mut driver = Driver::new("ib");
    let (mut cq, mut a, _b) = driver.pair();
    // Without its control segment.
    driver.post_with(&mut a, 0x0a, &[], |control| control[7] = 0);
    assert_eq!(posted(&driver), [(event::WQ_CATASTROPHIC, a.number)]);
    assert_ne!(status(&driver.poll(&mut cq).unwrap()).1, 0);
}

/// Types that the device does not post: a fatal error is in its health buffer, where the driver
/// looks for it.
const NEVER_POSTED: [&str; 1] = ["INTERNAL_ERROR"];

/// Every type of events is posted, and those about the program's objects have a name of their
/// own.
#[test]
fn every_event_is_produced() {
    the_first_request_establishes_a_connection();
    an_error_ends_the_receives_of_an_srq();
    a_malformed_work_request_ends_its_queue();
    causes::misuse_and_events_are_told();
    causes::wrong_accesses();
    causes::wrong_registers();
    commands::a_command_goes_through_queue_and_mailboxes();
    commands::the_link_counts_when_it_goes_down();
    data::an_armed_cq_raises_one_event();
    data::an_srq_follows_its_next_indices();
    dynamic::only_a_drained_target_can_be_destroyed();
    memory::an_absent_page_is_requested_once();
    signatures::a_queue_pair_drains_after_a_signature_error();
    let recorded = RECORDED.with_borrow(BTreeSet::clone);
    let missing = (event::ALL.iter()).filter(|(_, kind)| !recorded.contains(kind));
    let missing: Vec<&str> = missing.map(|(name, _)| *name).collect();
    assert_eq!(missing, NEVER_POSTED);
    assert_eq!(recorded.len() + missing.len(), event::ALL.len());
    // Of the driver's own.
    let own = [
        event::COMPLETION,
        event::INTERNAL_ERROR,
        event::COMMAND,
        event::PAGE_FAULT,
    ];
    let told = (event::ALL.iter()).filter(|(_, kind)| !own.contains(kind));
    let sentences: Vec<String> = told
        .map(|&(_, kind)| {
            let cause = Cause::Event {
                kind,
                subtype: 0,
                number: 1,
            };
            let sentence = cause.to_string();
            let sentence = sentence.strip_prefix("asynchronous event: ").unwrap();
            sentence.rsplit_once(" (").unwrap().0.to_owned()
        })
        .collect();
    let distinct: BTreeSet<&String> = sentences.iter().collect();
    assert_eq!(
        distinct.len(),
        event::ALL.len() - own.len(),
        "{sentences:?}"
    );
    assert!(!sentences.iter().any(|it| it.starts_with("event:")));
}
