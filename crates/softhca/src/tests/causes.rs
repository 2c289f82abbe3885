//! Causes: each refused command, failed access and misuse is one value with both sides of the
//! comparison, which the observer is told.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use roce::rule::{Rule, Violation};
use roce::transport::{self, Failure, Refusal};

use super::windows::{bind_umr, window_of};
use super::{commands, data, ethernet, memory, signatures, windows};
use crate::cause::{
    AccessError, AccessRule, Cause, FrameDrop, InnerKey, Misuse, Observer, SlotFault,
};
use crate::command::opcode as op;
use crate::engine::mkey::{ANY_QPN, Accessor, Klm, Mkey, Rights, Translation};
use crate::fault::Action;
use crate::status::{CommandError, Status};
use crate::testing::driver::{Driver, Input, Qp, SIGNALED, remote, segment, status};

/// Returns the causes that the driver's device has told since the last call.
pub(super) fn observe(driver: &mut Driver) -> impl FnMut() -> Vec<Cause> + use<> {
    let causes = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&causes);
    let observer = Observer::new(move |cause| {
        record(cause);
        told.lock().unwrap().push(*cause);
    });
    driver.hca.observe(Some(observer));
    move || std::mem::take(&mut *causes.lock().unwrap())
}

thread_local! {
    /// Causes that devices of this thread's tests have told, with their sentences.
    static RECORDED: RefCell<BTreeMap<&'static str, String>> = const { RefCell::new(BTreeMap::new()) };
}

macro_rules! names {
    ($($function:ident($cause:ident) { $($variant:ident)+ })+) => {
        const NAMES: &[&str] = &[$($(concat!(stringify!($cause), "::", stringify!($variant))),+),+];

        $(fn $function(cause: $cause) -> &'static str {
            match cause {
                $($cause::$variant { .. } => {
                    concat!(stringify!($cause), "::", stringify!($variant))
                })+
            }
        })+
    };
}

names! {
    access_name(AccessRule) {
        Exists Valid Domain QueuePair Rights Range Covered Depth Bindable Unprotected Mapped
        Invalidation List
    }
    frame_name(FrameDrop) {
        LinkDown QueueFull NoBuffer TooLong NoRule State NoReceive Unmapped Injected
    }
    misuse_name(Misuse) {
        WorkRequest BlueFlame Unmapped NoQueue CqOverrun EqOverrun Uar CommandSlot
    }
    slot_name(SlotFault) {
        NotHandedOver Unmapped Delivery
    }
}

fn record(cause: &Cause) {
    let (names, sentence) = match *cause {
        Cause::Access(error) => ([access_name(error.rule); 2], error.rule.to_string()),
        Cause::Frame { cause, .. } => ([frame_name(cause); 2], cause.to_string()),
        Cause::Misuse(misuse) => {
            let name = misuse_name(misuse);
            let slot = match misuse {
                Misuse::CommandSlot { fault, .. } => slot_name(fault),
                _ => name,
            };
            ([name, slot], misuse.to_string())
        }
        _ => return,
    };
    RECORDED.with_borrow_mut(|all| {
        all.extend(names.map(|name| (name, sentence.clone())));
    });
}

/// Returns an observer that records the causes for [`every_cause_is_produced`].
pub(crate) fn recorder() -> Observer {
    Observer::new(record)
}

/// Executes a command that is refused; returns the cause.
fn refused(driver: &mut Driver, input: &Input) -> CommandError {
    let mut told = observe(driver);
    let (status, output) = driver.command(input, 16);
    let [Cause::Command { opcode, error }] = told()[..] else {
        panic!("one cause expected");
    };
    assert_eq!(opcode, u16::from_be_bytes([input.0[0], input.0[1]]));
    // What the driver reads derives from the cause.
    assert_eq!(status, error.status() as u8);
    assert_eq!(output[4..8], error.syndrome().to_be_bytes());
    error
}

#[test]
fn a_refused_command_names_what_broke_which_rule() {
    let mut driver = Driver::new("ib");
    let (cq, a, _b) = driver.pair();
    let (uar, eqn) = (driver.uar, 1);
    let create_cq = |log_size: u32, uar: u32, eqn: u32| {
        Input::new(op::CREATE_CQ, 0x118)
            .or(0x1c, 24, log_size)
            .or(0x1c, 0, uar)
            .or(0x24, 0, eqn)
    };
    type Expected = (Status, &'static str, u64, Rule);
    let cases: &[(Input, Expected)] = &[
        (
            Input::new(0xfff, 16),
            (Status::BadOpcode, "opcode", 0xfff, Rule::Supported),
        ),
        (
            create_cq(23, uar, eqn),
            (Status::ExceedsLimit, "log_cq_size", 23, Rule::AtMost(22)),
        ),
        (
            create_cq(4, 0xfff, eqn),
            (Status::BadResource, "UAR", 0xfff, Rule::Exists),
        ),
        (
            create_cq(4, uar, 63),
            (Status::BadResource, "event queue", 63, Rule::Exists),
        ),
        (
            Input::new(op::DESTROY_CQ, 16).or(8, 0, cq.number),
            (
                Status::ResourceBusy,
                "completion queue",
                cq.number.into(),
                Rule::Unused,
            ),
        ),
        (
            Input::new(op::DEALLOC_PD, 16).or(8, 0, 77),
            (Status::BadResource, "protection domain", 77, Rule::Exists),
        ),
        (
            Input::new(op::SET_ISSI, 16).or(8, 0, 7),
            (Status::BadParameter, "current_issi", 7, Rule::AtMost(1)),
        ),
        (
            // From RTS, in which the pair is.
            Input::new(op::RST2INIT_QP, 0x110).or(8, 0, a.number),
            (
                Status::BadQpState,
                "queue pair",
                a.number.into(),
                Rule::Transition { from: 3, to: 1 },
            ),
        ),
        (
            Input::new(op::QUERY_ROCE_ADDRESS, 16).or(8, 16, 200),
            (
                Status::BadIndex,
                "roce_address_index",
                200,
                Rule::AtMost(127),
            ),
        ),
        (
            // Of a user context that does not exist.
            Input::new(op::ALLOC_PD, 16).or(0, 0, 9),
            (Status::BadParameter, "uid", 9, Rule::Exists),
        ),
    ];
    for (input, expected) in cases {
        let error = refused(&mut driver, input);
        let found = (error.status(), error.what, error.value, error.rule);
        assert_eq!(found, *expected, "{error}");
    }
    driver.hca.inject_next(Action::FailCommand(op::NOP), 1);
    let error = refused(&mut driver, &Input::new(op::NOP, 16));
    assert_eq!(
        (error.status(), error.rule),
        (Status::Internal, Rule::NoFault)
    );
}

#[test]
fn equal_rules_have_equal_syndromes() {
    let mut driver = Driver::new("ib");
    let mut of = |opcode, number| {
        let error = refused(&mut driver, &Input::new(opcode, 16).or(8, 0, number));
        error.syndrome()
    };
    assert_eq!(of(op::DEALLOC_PD, 70), of(op::DEALLOC_PD, 71));
    assert_ne!(of(op::DEALLOC_PD, 70), of(op::DEALLOC_XRCD, 70));
    assert_ne!(of(op::DEALLOC_PD, 70), of(op::SET_ISSI, 7));
}

#[test]
fn a_failed_access_names_the_key_and_the_rule() {
    let mut driver = Driver::new("ib");
    let memory = driver.pages(1);
    // LOCAL_READ and LOCAL_WRITE only.
    let local = driver.create_key(memory, 64, 0, 0b11);
    let short = driver.create_key(memory, 64, 0, 0b1_1111);
    let whole = driver.key;
    let access = |rule, key, va| AccessError {
        qpn: 0,
        key,
        va,
        length: 16,
        rule,
        inner: None,
    };
    let write = |key, va| {
        let mut segments = remote(va, key);
        segments.extend(segment(16, whole, memory));
        segments
    };
    let rights = Rights::REMOTE_WRITE.0;
    let cases = [
        (
            write(local, memory),
            access(
                AccessRule::Rights {
                    needed: rights,
                    has: 0b11,
                },
                local,
                memory,
            ),
        ),
        (
            write(local ^ 0x55, memory),
            access(AccessRule::Exists(Some(local as u8)), local ^ 0x55, memory),
        ),
        (
            write(0xdead_0000, memory),
            access(AccessRule::Exists(None), 0xdead_0000, memory),
        ),
        (
            write(short, memory + 56),
            access(
                AccessRule::Range {
                    start: memory,
                    length: 64,
                },
                short,
                memory + 56,
            ),
        ),
    ];
    for (segments, expected) in cases {
        let (mut cq, mut a, b) = driver.pair();
        let mut told = observe(&mut driver);
        driver.post(&mut a, 0x08, SIGNALED, &segments);
        assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x13));
        let told = told();
        let found = told.iter().find_map(|cause| match cause {
            Cause::Access(error) => Some(*error),
            _ => None,
        });
        let expected = AccessError {
            qpn: b.number,
            ..expected
        };
        assert_eq!(found, Some(expected), "{told:?}");
        // The responder's refusal, then the requester's failure.
        let transport = told.iter().filter_map(|cause| match cause {
            Cause::Transport { qpn, cause } => Some((qpn.unwrap(), *cause)),
            _ => None,
        });
        let transport: Vec<_> = transport.collect();
        assert!(
            matches!(
                transport[..],
                [
                    (responder, transport::Cause::Refused(Refusal::RemoteMemory { .. })),
                    (requester, transport::Cause::Failed(Failure::Refused(_))),
                    ..
                ] if (requester, responder) == (a.number, b.number)
            ),
            "{transport:?}"
        );
    }
}

#[test]
fn a_local_buffer_beyond_its_key_is_named() {
    let mut driver = Driver::new("ib");
    let memory = driver.pages(1);
    let key = driver.create_key(memory, 64, 0, 0b1_1111);
    let (mut cq, mut a, _b) = driver.pair();
    let mut told = observe(&mut driver);
    let mut segments = segment(32, key, memory);
    segments.extend(segment(16, key, memory + 56));
    driver.post(&mut a, 0x0a, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x04));
    let expected = Cause::Access(AccessError {
        qpn: a.number,
        key,
        va: memory + 56,
        length: 16,
        rule: AccessRule::Range {
            start: memory,
            length: 64,
        },
        inner: None,
    });
    assert_eq!(told()[0], expected);
}

#[test]
fn an_access_through_a_window_names_the_key_within_it() {
    let (mut driver, bound) = (Driver::new("ib"), 128);
    let (mut cq, mut a, mut b) = driver.pair();
    let (whole, memory, local) = (driver.key, driver.pages(1), driver.pages(1));
    let region = driver.create_key(memory, 4096, 0, 0b11);
    let window = window_of(&mut driver);
    let umr = bind_umr(window, b.number, Some((region, memory + 64, bound)));
    driver.post_umr(&mut b, window, &umr);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (0, 0));
    let mkeys = &mut driver.hca.core.mkeys;
    mkeys.get_mut(region >> 8).unwrap().rights = Rights::LOCAL_READ;
    let mut told = observe(&mut driver);
    let mut segments = remote(memory + 72, window);
    segments.extend(segment(8, whole, local));
    driver.post(&mut a, 0x08, SIGNALED, &segments);
    assert_eq!(status(&driver.poll(&mut cq).unwrap()), (13, 0x13));
    let (va, length) = (memory + 72, 8);
    let error = AccessError {
        qpn: b.number,
        key: window,
        va,
        length,
        rule: AccessRule::Rights {
            needed: Rights::LOCAL_WRITE.0,
            has: Rights::LOCAL_READ.0,
        },
        inner: Some(InnerKey {
            key: region,
            va,
            length,
        }),
    };
    assert_eq!(told()[0], Cause::Access(error));
    let expected = format!(
        "access to 8 bytes at {va:#x} with key {window:#x}: of 8 bytes at {va:#x} with key \
         {region:#x} within it: the key has LOCAL_READ, not LOCAL_WRITE"
    );
    assert_eq!(error.to_string(), expected);
}

/// Posts a work request that is refused. Returns what the observer is told, and the status.
fn refused_work(
    driver: &mut Driver,
    post: impl FnOnce(&mut Driver, &mut Qp),
) -> (Violation, transport::Status) {
    let (mut cq, mut a, _b) = driver.pair();
    let mut told = observe(driver);
    post(driver, &mut a);
    assert_eq!(driver.poll(&mut cq).unwrap()[63] >> 4, 13);
    let told = told();
    let misuse = told.iter().find_map(|cause| match cause {
        Cause::Misuse(Misuse::WorkRequest { violation, .. }) => Some(*violation),
        _ => None,
    });
    let failure = told.iter().find_map(|cause| match cause {
        Cause::Transport {
            cause: transport::Cause::Failed(Failure::Engine(error)),
            ..
        } => Some(*error),
        _ => None,
    });
    let error = failure.unwrap_or_else(|| panic!("{told:?}"));
    assert_eq!(misuse, Some(error.violation));
    (error.violation, error.status)
}

#[test]
fn a_refused_work_request_is_told_with_its_operands() {
    let mut driver = Driver::new("roce-umr");
    let memory = driver.pages(1);
    let (whole, pd) = (driver.key, driver.pd);
    let malformed = transport::Status::LocalQpOperation;
    let of = refused_work(&mut driver, |driver, a| driver.post(a, 0x3f, SIGNALED, &[]));
    assert_eq!(of, (Violation::new("opcode", 0x3f, Rule::Known), malformed));
    let of = refused_work(&mut driver, |driver, a| driver.post(a, 0x20, SIGNALED, &[]));
    let expected = Violation::new("length of the work request", 16, Rule::AtLeast(32));
    assert_eq!(of, (expected, malformed));
    let mut copy = vec![0; 16];
    copy.extend(segment(8, whole, memory));
    copy.extend(segment(7, whole, memory + 64));
    let of = refused_work(&mut driver, |driver, a| {
        driver.post_with(a, 0x2f, &copy, |control| control[0] = 1);
    });
    let expected = Violation::new("length of the destination", 7, Rule::Is(8));
    assert_eq!(of, (expected, transport::Status::LocalLength));

    let window = window_of(&mut driver);
    let read_only = driver.create_key(memory, 64, 0, 0b1);
    let writable = driver.create_key(memory, 64, 0, 0b11);
    let free = (whole >> 8) + 1000;
    let of_entry = |what, value, rule| Violation { what, value, rule };
    let (read, write) = (Rights::LOCAL_READ.0, Rights::LOCAL_WRITE.0);
    for (key, bound, expected) in [
        (
            free << 8,
            (writable, memory, 64),
            of_entry("memory key", (free << 8).into(), Rule::Exists),
        ),
        (
            whole,
            (writable, memory, 64),
            of_entry("memory key", whole.into(), Rule::With("its UMR_EN")),
        ),
        (
            window,
            (read_only, memory, 64),
            of_entry(
                "rights of the key of an entry",
                read.into(),
                Rule::Contains(write.into()),
            ),
        ),
        (
            window,
            (writable, memory + 1, 64),
            of_entry(
                "address of an entry",
                memory + 1,
                Rule::Between(memory, memory),
            ),
        ),
        (
            window,
            (writable, memory, 65),
            of_entry("length of an entry", 65, Rule::AtMost(64)),
        ),
        (
            window,
            (free << 8, memory, 64),
            of_entry("key of an entry", (free << 8).into(), Rule::Exists),
        ),
    ] {
        let of = refused_work(&mut driver, |driver, a| {
            driver.post_umr(a, key, &bind_umr(window, a.number, Some(bound)));
        });
        assert_eq!(of, (expected, transport::Status::MemoryBind), "{expected}");
    }
    let other = driver.pd + 1;
    driver.hca.core.mkeys.get_mut(window >> 8).unwrap().pd = other;
    let of = refused_work(&mut driver, |driver, a| {
        driver.post_umr(
            a,
            window,
            &bind_umr(window, a.number, Some((writable, memory, 64))),
        );
    });
    let what = "protection domain of the memory key";
    let expected = Violation::new(what, other, Rule::Is(pd.into()));
    assert_eq!(of, (expected, transport::Status::MemoryBind));
}

#[test]
fn broken_rules_are_those_of_accesses() {
    let mut driver = Driver::new("ib");
    let memory = driver.pages(2);
    let keys = [
        driver.key,
        driver.create_key(memory, 64, 0, 0b11),
        driver.create_paged_key(memory, 4096, &[memory]),
        0xdead_0000,
    ];
    let core = &mut driver.hca.core;
    let free = keys[1] >> 8;
    for (step, is_free) in [(1, false), (2, true)] {
        core.mkeys.get_mut(free).unwrap().free = is_free;
        for (key, variant) in keys.into_iter().zip([0, 0, 1, 0]) {
            for (pd, qpn) in [(driver.pd, 5), (driver.pd + 1, 5)] {
                let accessor = Accessor {
                    qpn,
                    pd,
                    privileged: false,
                };
                for va in [0, memory, memory + 60, memory + 4090, u64::MAX - 3] {
                    for rights in [Rights::LOCAL_READ, Rights::REMOTE_WRITE, Rights::ATOMIC] {
                        let key = key ^ (variant * step);
                        let translated =
                            core.translate(accessor, key, va, 8, rights, &mut |_, _, _| Ok(()));
                        let rule = core.broken_rule(accessor, key, (va, 8), rights);
                        assert_eq!(translated.is_err(), rule.is_some(), "{key:#x} {va:#x}");
                    }
                }
            }
        }
    }
    assert_eq!(core.mkeys.get(free).unwrap().qpn, ANY_QPN);
}

#[test]
pub(super) fn misuse_and_events_are_told() {
    let mut driver = Driver::new("ib");
    let mut cq = driver.create_cq(1);
    let (mut a, _b) = driver.pair_on(&cq);
    let mut told = observe(&mut driver);
    // Three completions for a queue of two.
    for _ in 0..3 {
        driver.post(&mut a, 0x00, SIGNALED, &[]);
    }
    let expected = [
        Cause::Misuse(Misuse::CqOverrun {
            cqn: cq.number,
            entries: 2,
        }),
        Cause::Event {
            kind: crate::engine::eq::event::CQ_ERROR,
            subtype: 1,
            number: cq.number,
        },
    ];
    assert_eq!(told(), expected);
    assert_eq!(driver.hca.complaints().len(), 1);
    // An injected error is told from an overrun, of which somebody has been told.
    assert!(driver.hca.fail_completion_queue(cq.number));
    let injected = Cause::Event {
        kind: crate::engine::eq::event::CQ_ERROR,
        subtype: 2,
        number: cq.number,
    };
    assert_eq!(told(), [injected]);
    // Nobody is told any more.
    driver.hca.observe(None);
    driver.hca.set_cable(false);
    assert_eq!(told(), []);
    assert!(driver.poll(&mut cq).is_some());
}

/// Addresses without memory: of any key, and of the key for all memory.
const UNMAPPED: u64 = 1 << 40;
const MAPPED_TO_NOTHING: u64 = 1 << 30;

/// Writes 8 bytes to `va` with a key, from one queue pair of a new pair to the other.
fn write_to(driver: &mut Driver, key: u32, va: u64) {
    let (_cq, mut a, _b) = driver.pair();
    let local = driver.pages(1);
    let mut segments = remote(va, key);
    segments.extend(segment(8, driver.key, local));
    driver.post(&mut a, 0x08, SIGNALED, &segments);
}

/// Accesses that no driver permits a program to make.
pub(super) fn wrong_accesses() {
    let mut driver = Driver::new("ib");
    let whole = driver.key;
    let memory = driver.pages(1);
    write_to(&mut driver, whole, MAPPED_TO_NOTHING);
    let region = driver.create_key(memory, 4096, 0, 0b1_1111);
    let change = |driver: &mut Driver, change: &dyn Fn(&mut Mkey)| {
        change(driver.hca.core.mkeys.get_mut(region >> 8).unwrap());
        write_to(driver, region, memory);
    };
    let pd = driver.pd;
    change(&mut driver, &|key| key.pd = pd + 1);
    change(&mut driver, &|key| (key.pd, key.qpn) = (pd, 0xff));
    let refer_to = |key| {
        let (length, va) = (4096, memory);
        Translation::Klms(vec![Klm { length, key, va }])
    };
    change(&mut driver, &|key| {
        (key.qpn, key.translation) = (ANY_QPN, refer_to(region));
    });
    let (mut cq, mut a, _b) = driver.pair();
    let encrypted = signatures::encrypted_key(&mut driver, &mut cq, &mut a, 0)
        .1
        .key;
    change(&mut driver, &|key| key.translation = refer_to(encrypted));
    // The answer of an atomic is longer than the list of buffers.
    let (_cq, mut a, _b) = driver.pair();
    let mut segments = remote(memory, whole);
    segments.extend([0; 16]);
    segments.extend(segment(4, whole, memory + 64));
    driver.post(&mut a, 0x12, SIGNALED, &segments);
}

/// Doorbells of nothing, and queues that are not in memory.
pub(super) fn wrong_registers() {
    let mut driver = Driver::new("ib");
    let page = u64::from(driver.uar) * 4096;
    // A page that is not allocated; an event of a completion queue that does not exist.
    driver.hca.write(page + 100 * 4096, &[0; 8]);
    driver
        .hca
        .write(page + 0x20, &[0, 0, 0, 0, 0, 0xff, 0xff, 0xff]);
    let doorbell = driver.pages(1);
    driver.write(doorbell, &1_u32.to_be_bytes());
    let srqn = driver.create_srq(UNMAPPED, doorbell);
    let cq = driver.create_cq(4);
    let mut a = driver.create_qp(0, &cq, None);
    let b = driver.create_qp(0, &cq, Some(srqn));
    driver.connect(a.number, b.number, 1);
    driver.connect(b.number, a.number, 1);
    driver.post(&mut a, 0x0a, SIGNALED, &segment(8, driver.key, doorbell));
    // Command slots: of the driver, and not in memory.
    driver.hca.write(0x14, &0x8000_u32.to_be_bytes());
    driver.hca.write(0x18, &1_u32.to_be_bytes());
    driver.hca.write(0x10, &1_u32.to_be_bytes());
    driver.hca.write(0x18, &1_u32.to_be_bytes());
}

/// Every cause of the device is told, and has a sentence of its own.
#[test]
fn every_cause_is_produced() {
    super::faults::packets_are_lost_delayed_repeated_and_corrupted();
    a_failed_access_names_the_key_and_the_rule();
    misuse_and_events_are_told();
    wrong_accesses();
    wrong_registers();
    commands::a_malformed_mailbox_is_a_delivery_error();
    commands::the_link_counts_when_it_goes_down();
    data::a_difference_of_ring_and_blue_flame_copy_is_reported();
    data::strict_mode_reports_misuse();
    ethernet::dropped_frames_have_causes();
    ethernet::frames_that_cannot_be_sent_have_causes();
    memory::a_key_that_refers_to_itself_is_refused();
    windows::a_type_2_window_belongs_to_its_queue_pair();
    windows::a_window_is_bound_and_unbound();
    windows::each_access_is_checked_against_the_region_of_a_window();
    let mut recorded = RECORDED.with_borrow(BTreeMap::clone);
    let missing: Vec<&str> = (NAMES.iter().copied())
        .filter(|name| !recorded.contains_key(name))
        .collect();
    assert_eq!(missing, [""; 0]);
    // Its sentences are those of the slot's faults.
    recorded.remove("Misuse::CommandSlot");
    let sentences: BTreeSet<&str> = recorded.values().map(String::as_str).collect();
    assert_eq!(sentences.len(), recorded.len(), "{recorded:#?}");
}
