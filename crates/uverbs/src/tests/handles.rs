//! Ownership: each object is destroyed once, and failures are reported.

use super::{context, traced, with_pd};
use crate::abi::ids::*;
use crate::abi::write::cmd;
use crate::kernel::fake::Target;
use crate::*;

fn errno(raw: i32) -> Errno {
    Errno::new(raw)
}

#[test]
fn dropping_destroys_once() {
    let (fake, context) = context();
    drop(Pd::alloc(&context, Udata::none()).unwrap());
    let calls = fake.take_ioctls();
    assert_eq!(calls.len(), 2);
    assert_eq!(
        (calls[1].object, calls[1].method),
        (OBJECT_PD, METHOD_PD_DESTROY)
    );
    assert!(fake.live_objects().is_empty());
}

#[test]
fn destroying_destroys_once() {
    let (fake, _context, pd) = with_pd();
    pd.destroy().unwrap();
    assert_eq!(fake.take_ioctls().len(), 1, "not again on drop");
}

#[test]
fn a_failed_destroy_can_be_tried_again() {
    let (fake, _context, pd) = with_pd();
    let target = Target::Method(OBJECT_PD, METHOD_PD_DESTROY);
    fake.on(target, |_| Err(errno(libc::EBUSY)));
    let handle = pd.handle();
    let error = pd.destroy().unwrap_err();
    assert_eq!(
        error,
        Error::refused(Command::DeallocPd, Some(handle.0), errno(libc::EBUSY))
    );
    assert_eq!(fake.live_objects(), [(handle.0, OBJECT_PD)]);
    fake.reset(target);
    assert!(!pd.has_ended() && !pd.existence().has_ended());
    pd.destroy().unwrap();
    assert!(pd.has_ended() && pd.existence().has_ended());
    assert!(fake.live_objects().is_empty());
    fake.take_ioctls();
    assert!(matches!(pd.destroy(), Err(Error::Invalid { .. })));
    assert!(fake.take_ioctls().is_empty());
}

#[test]
fn a_failed_destroy_on_drop_is_logged() {
    let (fake, _context, pd) = with_pd();
    fake.on(Target::Method(OBJECT_PD, METHOD_PD_DESTROY), |_| {
        Err(errno(libc::EBUSY))
    });
    let events = traced(move || drop(pd));
    assert_eq!(events.len(), 1, "{events:?}");
    let (level, text) = &events[0];
    assert_eq!(*level, tracing::Level::ERROR);
    assert!(
        text.contains("PD_DESTROY on protection domain 257"),
        "{text}"
    );
    assert!(text.contains("busy"), "{text}");
    assert_eq!(fake.take_ioctls().len(), 1, "tried once");
}

#[test]
fn a_device_that_is_gone_is_no_error_on_drop() {
    let is_error = |events: &[(tracing::Level, _)]| {
        events
            .iter()
            .any(|(level, _)| *level <= tracing::Level::WARN)
    };
    for gone in [false, true] {
        let (fake, _context, pd) = with_pd();
        fake.on(Target::Method(OBJECT_PD, METHOD_PD_DESTROY), |_| {
            Err(errno(libc::EIO))
        });
        if gone {
            // Which the kernel answers for a device that is there.
            let entry = Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_ENTRY);
            fake.on(entry, |_| Err(errno(libc::EIO)));
        }
        let existence = pd.existence();
        let events = traced(move || drop(pd));
        assert_eq!(is_error(&events), !gone, "{events:?}");
        assert_eq!(existence.has_ended(), gone);
    }
}

#[test]
fn releasing_a_handle_does_not_destroy() {
    let (fake, context, pd) = with_pd();
    let handle = pd.into_handle();
    assert!(fake.take_ioctls().is_empty());
    drop(Pd::from_handle(&context, handle));
    assert!(fake.live_objects().is_empty());
}

#[test]
fn a_missing_output_destroys_the_new_object() {
    let (fake, context, pd) = with_pd();
    fake.on(Target::Method(OBJECT_QP, METHOD_QP_CREATE), |reply| {
        reply.set_unwritten(ATTR_CREATE_QP_RESP_QP_NUM);
        Ok(())
    });
    let init = QpInit {
        qp_type: QpType::RC,
        pd: Some(pd.handle()),
        ..QpInit::default()
    };
    let error = Qp::create(&context, &init, Udata::none()).unwrap_err();
    assert!(matches!(
        error,
        Error::BadAnswer {
            command: Command::CreateQp,
            ..
        }
    ));
    assert_eq!(error.errno().raw(), libc::EPROTO);

    fake.on(Target::Method(OBJECT_CQ, METHOD_CQ_CREATE), |reply| {
        reply.set_unwritten(ATTR_CREATE_CQ_RESP_CQE);
        Ok(())
    });
    Cq::create(
        &context,
        &CqInit {
            cqe: 1,
            ..CqInit::default()
        },
        Udata::none(),
    )
    .unwrap_err();

    fake.on(Target::Method(OBJECT_SRQ, METHOD_SRQ_CREATE), |reply| {
        reply.set_unwritten(ATTR_CREATE_SRQ_RESP_MAX_SGE);
        Ok(())
    });
    let init = SrqInit {
        pd: pd.handle(),
        user_handle: 0,
        max_wr: 1,
        max_sge: 1,
        limit: 0,
        kind: SrqKind::Basic,
        async_fd: None,
    };
    Srq::create(&context, &init, Udata::none()).unwrap_err();

    fake.on(Target::Method(OBJECT_MR, METHOD_REG_DMABUF_MR), |reply| {
        reply.set_unwritten(ATTR_REG_DMABUF_MR_RESP_RKEY);
        Ok(())
    });
    let access = AccessFlags::empty();
    let init = DmabufMrInit {
        pd: pd.handle(),
        offset: 0,
        length: 1,
        iova: 0,
        fd: None,
        access,
        driver_access: None,
    };
    Mr::register_dmabuf(&context, &init, Udata::none()).unwrap_err();
    assert_eq!(
        fake.live_objects(),
        [(pd.handle().0, OBJECT_PD)],
        "nothing leaked"
    );
}

#[test]
fn a_write_command_without_an_answer_is_an_error() {
    let (fake, context) = context();
    fake.on(Target::Write(cmd::CMD_ALLOC_PD), |reply| {
        reply.set_unwritten(ATTR_CORE_OUT);
        Ok(())
    });
    let error = Pd::alloc(&context, Udata::none()).unwrap_err();
    assert!(matches!(
        error,
        Error::BadAnswer {
            command: Command::AllocPd,
            ..
        }
    ));
}

#[test]
fn a_handle_of_more_than_32_bits_is_an_error() {
    let (fake, context) = context();
    fake.on(Target::Method(OBJECT_CQ, METHOD_CQ_CREATE), |reply| {
        reply.set_data(ATTR_CREATE_CQ_HANDLE, 1 << 32);
        Ok(())
    });
    let error = Cq::create(
        &context,
        &CqInit {
            cqe: 1,
            ..CqInit::default()
        },
        Udata::none(),
    )
    .unwrap_err();
    assert!(matches!(
        error,
        Error::BadAnswer {
            command: Command::CreateCq,
            ..
        }
    ));
}

/// Every command that creates an object passes the kernel's errno on, and
/// creates nothing.
#[test]
fn refused_creations() {
    let (fake, context, pd) = with_pd();
    let (c, p) = (&context, pd.handle());
    let access = AccessFlags::LOCAL_WRITE;
    let mr = MrInit {
        pd: p,
        addr: 0,
        length: 1,
        iova: 0,
        access,
    };
    let dmabuf = DmabufMrInit {
        pd: p,
        offset: 0,
        length: 1,
        iova: 0,
        fd: None,
        access,
        driver_access: None,
    };
    let srq = SrqInit {
        pd: p,
        user_handle: 0,
        max_wr: 1,
        max_sge: 1,
        limit: 0,
        kind: SrqKind::Basic,
        async_fd: None,
    };
    let open = QpOpen {
        xrcd: XrcdHandle(1),
        qpn: 1,
        qp_type: QpType::XRC_TGT,
        user_handle: 0,
    };
    type Attempt<'a> = Box<dyn Fn() -> Option<Error> + 'a>;
    let attempts: Vec<(Target, Command, Attempt<'_>)> = vec![
        (
            Target::Write(cmd::CMD_ALLOC_PD),
            Command::AllocPd,
            Box::new(|| Pd::alloc(c, Udata::none()).err()),
        ),
        (
            Target::Write(cmd::CMD_REG_MR),
            Command::RegMr,
            // SAFETY: the fake accesses no memory.
            Box::new(|| unsafe { Mr::register(c, &mr, Udata::none()) }.err()),
        ),
        (
            Target::Method(OBJECT_MR, METHOD_REG_DMABUF_MR),
            Command::RegDmabufMr,
            Box::new(|| Mr::register_dmabuf(c, &dmabuf, Udata::none()).err()),
        ),
        (
            Target::Write(cmd::CMD_ALLOC_MW),
            Command::AllocMw,
            Box::new(|| Mw::alloc(c, p, MwType::TYPE_1, Udata::none()).err()),
        ),
        (
            Target::Method(OBJECT_CQ, METHOD_CQ_CREATE),
            Command::CreateCq,
            Box::new(|| Cq::create(c, &CqInit::default(), Udata::none()).err()),
        ),
        (
            Target::Method(OBJECT_SRQ, METHOD_SRQ_CREATE),
            Command::CreateSrq,
            Box::new(|| Srq::create(c, &srq, Udata::none()).err()),
        ),
        (
            Target::Method(OBJECT_QP, METHOD_QP_CREATE),
            Command::CreateQp,
            Box::new(|| Qp::create(c, &QpInit::default(), Udata::none()).err()),
        ),
        (
            Target::Write(cmd::CMD_OPEN_QP),
            Command::OpenQp,
            Box::new(|| Qp::open(c, &open, Udata::none()).err()),
        ),
        (
            Target::Write(cmd::CMD_CREATE_AH),
            Command::CreateAh,
            Box::new(|| Ah::create(c, p, &AhAttr::default(), 0, Udata::none()).err()),
        ),
        (
            Target::Write(cmd::CMD_OPEN_XRCD),
            Command::OpenXrcd,
            Box::new(|| Xrcd::open(c, &XrcdOpen::default(), Udata::none()).err()),
        ),
        (
            Target::Write(cmd::CMD_CREATE_COMP_CHANNEL),
            Command::CreateCompChannel,
            Box::new(|| CompletionChannel::create(c).err()),
        ),
        (
            Target::Method(OBJECT_ASYNC_EVENT, METHOD_ASYNC_EVENT_ALLOC),
            Command::AllocAsyncEventFile,
            Box::new(|| AsyncEventFile::alloc(c).err()),
        ),
    ];
    for (target, command, attempt) in attempts {
        for raw in [libc::ENOMEM, libc::EIO, libc::EINVAL, 4095] {
            fake.on(target, move |_| Err(errno(raw)));
            let refused = Error::refused(command, None, errno(raw));
            assert_eq!(attempt(), Some(refused), "{target:?}");
        }
    }
    assert_eq!(fake.live_objects(), [(p.0, OBJECT_PD)], "nothing was made");
}

/// Commands on an object name it in their errors.
#[test]
fn refused_changes_name_the_object() {
    let (fake, context, pd) = with_pd();
    let c: &Context = &context;
    let e = || Err(errno(libc::EINVAL));
    for number in [
        cmd::CMD_RESIZE_CQ,
        cmd::CMD_REQ_NOTIFY_CQ,
        cmd::EX_CMD_MODIFY_CQ | abi::write::CMD_FLAG_EXTENDED,
        cmd::CMD_MODIFY_SRQ,
        cmd::CMD_QUERY_SRQ,
        cmd::CMD_MODIFY_QP,
        cmd::CMD_QUERY_QP,
        cmd::CMD_ATTACH_MCAST,
        cmd::CMD_DETACH_MCAST,
        cmd::CMD_REREG_MR,
    ] {
        fake.on(Target::Write(number), move |_| e());
    }
    let errors = [
        cq::resize(c, CqHandle(5), 1, Udata::none()).err(),
        cq::req_notify(c, CqHandle(5), false).err(),
        cq::modify_moderation(c, CqHandle(5), 1, 1).err(),
        srq::modify(c, SrqHandle(5), &SrqModify::default(), Udata::none()).err(),
        srq::query(c, SrqHandle(5)).err(),
        qp::modify(
            c,
            QpHandle(5),
            &QpAttr::default(),
            QpAttrMask::STATE,
            Udata::none(),
        )
        .err(),
        qp::query(c, QpHandle(5), QpAttrMask::STATE).err(),
        qp::attach_multicast(c, QpHandle(5), &[0; 16], 0).err(),
        qp::detach_multicast(c, QpHandle(5), &[0; 16], 0).err(),
        // SAFETY: the fake accesses no memory.
        unsafe { mr::rereg(c, MrHandle(5), &Rereg::default(), Udata::none()) }.err(),
        // The fake itself rejects these: object 5 does not exist.
        mr::query(c, MrHandle(5)).err(),
        mr::destroy(c, MrHandle(5)).err(),
        mw::destroy(c, MwHandle(5)).err(),
        cq::destroy(c, CqHandle(5)).err(),
        srq::destroy(c, SrqHandle(5)).err(),
        qp::destroy(c, QpHandle(5)).err(),
        ah::destroy(c, AhHandle(5)).err(),
        xrcd::destroy(c, XrcdHandle(5)).err(),
        dm::destroy(c, DmHandle(5)).err(),
        pd::destroy(c, PdHandle(5)).err(),
        // Now it exists, but is of another kind.
        qp::destroy(c, QpHandle(pd.handle().0)).err(),
    ];
    let number = pd.handle().0;
    let handles: Vec<_> = errors
        .iter()
        .map(|error| match error {
            Some(Error::Refused { handle, .. }) => *handle,
            other => panic!("{other:?}"),
        })
        .collect();
    let mut expected = vec![Some(5); errors.len() - 1];
    expected.push(Some(number));
    assert_eq!(handles, expected);
}

#[test]
fn a_context_closes_what_it_owns() {
    let fake = kernel::fake::FakeKernel::new();
    let context = fake.context();
    let fd = context.fd();
    assert_eq!(fake.open_fds(), [fd]);
    // SAFETY: the fake's descriptor stays open.
    let borrowed = unsafe {
        Context::from_borrowed_fd(
            Box::new(std::sync::Arc::clone(&fake)),
            fd,
            kernel::fake::DRIVER,
        )
    };
    drop(borrowed);
    assert_eq!(fake.open_fds(), [fd], "a borrowed descriptor stays open");
    drop(context);
    assert!(fake.open_fds().is_empty());
}

#[test]
fn commands_for_another_driver_are_refused() {
    let fake = kernel::fake::FakeKernel::new();
    let kernel = Box::new(std::sync::Arc::clone(&fake));
    // SAFETY: the fake does not know the descriptor, and reports that when it
    // is closed.
    let context = unsafe { Context::from_owned_fd(kernel, 3, discovery::DriverId::MLX5) };
    let error = context.get_context(Udata::none()).unwrap_err();
    assert_eq!(error.errno().raw(), libc::EINVAL);
}

#[test]
fn errors_say_command_object_errno_and_hint() {
    let error = Error::refused(Command::CreateQp, None, errno(libc::ENOMEM));
    let text = error.to_string();
    for part in ["QP_CREATE", "queue pair", "os error 12", "ulimit -l"] {
        assert!(text.contains(part), "{text}");
    }
    let error = Error::refused(Command::DestroyCq, Some(7), errno(libc::EBUSY));
    assert!(
        error
            .to_string()
            .starts_with("CQ_DESTROY on completion queue 7: "),
        "{error}"
    );
    assert!(!error.is_device_gone());
}
