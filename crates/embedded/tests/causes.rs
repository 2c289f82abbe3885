//! What an observer of a device is told: refused commands, failed accesses, and events.

use std::sync::{Arc, Mutex};

use device_testing::embedded::driver::*;
use ringverbs_embedded::Embedded;
use ringverbs_embedded::cause::Cause;
use ringverbs_embedded::roce::transport;
use ringverbs_embedded::softhca::cause::{AccessRule, Cause as DeviceCause, FrameDrop};
use ringverbs_embedded::softhca::rule::Rule;
use uverbs::abi::ids::{METHOD_PD_DESTROY, OBJECT_PD};
use uverbs::{AccessFlags, QpType};

/// Observes a device; returns the causes that it has told.
fn observe(embedded: &Embedded) -> Arc<Mutex<Vec<Cause>>> {
    let causes = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&causes);
    let observe = move |cause: &Cause| told.lock().unwrap().push(*cause);
    embedded.observe(Some(Arc::new(observe)));
    causes
}

#[test]
fn a_write_without_the_right_is_explained() {
    let host = Host::single("ib");
    let mut cq = host.cq(16);
    let mut a = host.qp(QpType::RC, &mut cq);
    let b = host.qp(QpType::RC, &mut cq);
    connect_pair(QpType::RC, (&a, &host), (&b, &host));
    let local = host.memory(64);
    let target = host.memory_at(64, AccessFlags::LOCAL_WRITE, None);
    let causes = observe(&host.embedded);
    post(&mut a, 1, Operation::Write(&target, 0), local.sge(0, 64));
    // IBV_WC_REM_ACCESS_ERR.
    assert_eq!(wait(&mut cq).status, 10);
    let causes = causes.lock().unwrap();
    let access = causes.iter().find_map(|cause| match cause {
        Cause::Device(DeviceCause::Access(error)) => Some(*error),
        _ => None,
    });
    let access = access.expect("the cause of the failed access");
    assert_eq!((access.va, access.length), (target.address(), 64));
    assert!(matches!(access.rule, AccessRule::Rights { .. }), "{access}");
    let of_transport = |cause: &&Cause| {
        matches!(
            cause,
            Cause::Device(DeviceCause::Transport {
                cause: transport::Cause::Failed(transport::Failure::Refused(_)),
                ..
            })
        )
    };
    assert_eq!(causes.iter().filter(of_transport).count(), 1);
}

#[test]
fn packets_that_the_link_loses_are_explained() {
    let host = Host::single("roce");
    let mut cq = host.cq(16);
    let mut a = host.qp(QpType::RC, &mut cq);
    let b = host.qp(QpType::RC, &mut cq);
    connect_pair(QpType::RC, (&a, &host), (&b, &host));
    let memory = host.memory(64);
    let causes = observe(&host.embedded);
    host.embedded.set_cable(false);
    post(&mut a, 1, Operation::Write(&memory, 0), memory.sge(32, 32));
    let lost = |cause: &Cause| {
        matches!(
            cause,
            Cause::Device(DeviceCause::Frame {
                cause: FrameDrop::LinkDown,
                queue: None,
                ..
            })
        )
    };
    while !causes.lock().unwrap().iter().any(lost) {
        host.embedded.drive();
    }
    host.embedded.set_cable(true);
    // Sent again.
    assert_eq!(wait(&mut cq).status, 0);
}

#[test]
fn a_removed_device_refuses_commands() {
    let host = Host::single("ib");
    host.embedded.fail();
    let error = uverbs::pd::alloc(&host.context, uverbs::Udata::none()).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EIO);
    let reason = error.reason().unwrap();
    assert!(reason.starts_with("descriptor "), "{reason}");
    assert!(reason.ends_with(" does not exist"), "{reason}");
}

#[test]
fn a_refused_command_is_explained() {
    let host = Host::single("ib");
    let memory = host.memory(64);
    let causes = observe(&host.embedded);
    let error = uverbs::pd::destroy(&host.context, host.pd).unwrap_err();
    let told = std::mem::take(&mut *causes.lock().unwrap());
    let [
        Cause::Verb {
            method,
            write,
            error: cause,
        },
    ] = told[..]
    else {
        panic!("one cause expected: {told:?}");
    };
    assert_eq!(
        (method, write),
        (Some((OBJECT_PD, METHOD_PD_DESTROY)), None)
    );
    assert!(told[0].to_string().starts_with("ibv_dealloc_pd refused: "));
    assert_eq!(error.errno(), cause.errno());
    assert_eq!(
        (cause.what, cause.rule),
        ("protection domain", Rule::Unused)
    );
    assert_eq!(
        cause.of,
        Some(ringverbs_embedded::cause::Container::Number(host.pd.0))
    );
    assert_eq!(error.reason(), Some(cause.to_string()));
    assert!(error.to_string().ends_with(&cause.to_string()), "{error}");
    // Nobody is told any more.
    host.embedded.observe(None);
    uverbs::pd::destroy(&host.context, host.pd).unwrap_err();
    assert!(causes.lock().unwrap().is_empty());
    drop(memory);
}
