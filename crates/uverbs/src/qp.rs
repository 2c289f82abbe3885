//! Queue pairs.

use std::os::fd::BorrowedFd;

use zerocopy::IntoBytes;

use crate::abi::ids;
use crate::abi::write::{
    AttachMcast, CMD_FLAG_EXTENDED, CreateQpResp, DestroyQpResp, DetachMcast, ExModifyQp,
    ExModifyQpResp, OpenQp, QueryQp, QueryQpResp, cmd,
};
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{
    Command, Context, ContextRef, CqHandle, Error, PdHandle, QpAttr, QpAttrMask, QpCap,
    QpCreateFlags, QpHandle, QpType, SrqHandle, Udata, WqTableHandle, XrcdHandle,
};

/// `IB_UVERBS_QP_CREATE_SQ_SIG_ALL`: one of the create flags in the kernel's
/// interface, a separate attribute everywhere else.
const CREATE_SQ_SIG_ALL: u32 = 1 << 12;

/// Parameters of a new queue pair.
///
/// All types but an XRC target need `pd` and `send_cq`; all but the XRC types
/// need `recv_cq`; an XRC target needs only `xrcd`. With `table` it has neither a receive
/// queue nor `recv_cq`, and `send_cq` only if it sends.
#[derive(Clone, Copy, Debug, Default)]
pub struct QpInit<'a> {
    /// Transport service.
    pub qp_type: QpType,
    /// Protection domain.
    pub pd: Option<PdHandle>,
    /// Completion queue for sends.
    pub send_cq: Option<CqHandle>,
    /// Completion queue for receives.
    pub recv_cq: Option<CqHandle>,
    /// Shared receive queue, instead of a receive queue of its own.
    pub srq: Option<SrqHandle>,
    /// XRC domain of an XRC target.
    pub xrcd: Option<XrcdHandle>,
    /// Work queues that receive its packets.
    pub table: Option<WqTableHandle>,
    /// Minimum sizes.
    pub cap: QpCap,
    /// All sends are signalled, regardless of their flags.
    pub sq_sig_all: bool,
    /// Creation flags.
    pub flags: QpCreateFlags,
    /// Source queue pair number of its packets, if it is another queue pair's.
    pub source_qpn: Option<u32>,
    /// Identifies the queue pair in events.
    pub user_handle: u64,
    /// Asynchronous event file that receives its events; default: the context's
    /// first.
    pub async_fd: Option<BorrowedFd<'a>>,
}

/// An XRC target of another process, to be shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpOpen {
    /// XRC domain of the queue pair.
    pub xrcd: XrcdHandle,
    /// Its queue pair number.
    pub qpn: u32,
    /// Its transport service.
    pub qp_type: QpType,
    /// Identifies the queue pair in events.
    pub user_handle: u64,
}

/// Creation parameters, as returned by a query.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpInitQuery {
    /// Sizes.
    pub cap: QpCap,
    /// All sends are signalled.
    pub sq_sig_all: bool,
}

/// Properties of a created queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpCreated {
    /// Queue pair number on the wire, 24 bits.
    pub qp_num: u32,
    /// Actual sizes.
    pub cap: QpCap,
}

pub(crate) enum QpKind {}

impl Kind for QpKind {
    type Handle = QpHandle;
    type Events = u32;
    const DESTROY: Command = Command::DestroyQp;
    fn destroy(context: &Context, handle: QpHandle) -> Result<u32, Error> {
        destroy(context, handle)
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp<C: ContextRef> {
    owned: Owned<C, QpKind>,
    created: QpCreated,
}

owned_methods!(
    Qp,
    QpHandle,
    u32,
    "Returns the number of its asynchronous events that were read."
);

impl<C: ContextRef> Qp<C> {
    /// Creates a queue pair, in state RESET.
    ///
    /// # Errors
    /// EINVAL for sizes beyond the device's limits or attributes that the type
    /// does not have, EOPNOTSUPP for a type that the device does not support,
    /// EPERM for raw packets without CAP_NET_RAW.
    pub fn create(context: &C, init: &QpInit<'_>, udata: Udata<'_>) -> Result<Self, Error> {
        let (handle, created) = create(context, init, udata)?;
        Ok(Self::from_handle(context, handle, created))
    }

    /// Opens an XRC target that another process created.
    ///
    /// # Errors
    /// EINVAL if the domain has no queue pair of that number.
    pub fn open(context: &C, init: &QpOpen, udata: Udata<'_>) -> Result<Self, Error> {
        let (handle, created) = open(context, init, udata)?;
        Ok(Self::from_handle(context, handle, created))
    }

    /// Takes ownership of the queue pair with number `handle`.
    pub fn from_handle(context: &C, handle: QpHandle, created: QpCreated) -> Self {
        Self {
            owned: Owned::new(context, handle),
            created,
        }
    }

    /// Returns its number on the wire.
    pub fn qp_num(&self) -> u32 {
        self.created.qp_num
    }

    /// Returns the sizes that it was created with.
    pub fn cap(&self) -> QpCap {
        self.created.cap
    }

    /// Changes attributes, such as the state.
    ///
    /// # Errors
    /// As [`modify`].
    pub fn modify(&self, attr: &QpAttr, mask: QpAttrMask, udata: Udata<'_>) -> Result<(), Error> {
        modify(self.owned.context(), self.handle(), attr, mask, udata)
    }

    /// Queries attributes.
    ///
    /// # Errors
    /// As [`query`].
    pub fn query(&self, mask: QpAttrMask) -> Result<(QpAttr, QpInitQuery), Error> {
        query(self.owned.context(), self.handle(), mask)
    }

    /// Joins a multicast group.
    ///
    /// # Errors
    /// As [`attach_multicast`].
    pub fn attach_multicast(&self, gid: &[u8; 16], mlid: u16) -> Result<(), Error> {
        attach_multicast(self.owned.context(), self.handle(), gid, mlid)
    }

    /// Leaves a multicast group.
    ///
    /// # Errors
    /// EINVAL if it is not in the group.
    pub fn detach_multicast(&self, gid: &[u8; 16], mlid: u16) -> Result<(), Error> {
        detach_multicast(self.owned.context(), self.handle(), gid, mlid)
    }
}

/// Creates a queue pair.
///
/// # Errors
/// As [`Qp::create`].
pub fn create(
    context: &Context,
    init: &QpInit<'_>,
    udata: Udata<'_>,
) -> Result<(QpHandle, QpCreated), Error> {
    let mut created = QpCreated::default();
    let mut ioctl = Ioctl::new(Command::CreateQp, ids::OBJECT_QP, ids::METHOD_QP_CREATE);
    let object = ioctl.new_object(ids::ATTR_CREATE_QP_HANDLE);
    ioctl.constant(ids::ATTR_CREATE_QP_TYPE, init.qp_type.0.into());
    ioctl.u64(ids::ATTR_CREATE_QP_USER_HANDLE, init.user_handle);
    ioctl.input(ids::ATTR_CREATE_QP_CAP, init.cap.as_bytes());
    let objects = [
        (ids::ATTR_CREATE_QP_XRCD_HANDLE, init.xrcd.map(u32::from)),
        (ids::ATTR_CREATE_QP_PD_HANDLE, init.pd.map(u32::from)),
        (ids::ATTR_CREATE_QP_SRQ_HANDLE, init.srq.map(u32::from)),
        (
            ids::ATTR_CREATE_QP_SEND_CQ_HANDLE,
            init.send_cq.map(u32::from),
        ),
        (
            ids::ATTR_CREATE_QP_RECV_CQ_HANDLE,
            init.recv_cq.map(u32::from),
        ),
        (
            ids::ATTR_CREATE_QP_IND_TABLE_HANDLE,
            init.table.map(u32::from),
        ),
    ];
    for (attr, handle) in objects {
        if let Some(handle) = handle {
            ioctl.handle(attr, handle);
        }
    }
    let flags = init.flags.bits()
        | if init.sq_sig_all {
            CREATE_SQ_SIG_ALL
        } else {
            0
        };
    if flags != 0 {
        ioctl.u32(ids::ATTR_CREATE_QP_FLAGS, flags);
    }
    if let Some(qpn) = init.source_qpn {
        ioctl.u32(ids::ATTR_CREATE_QP_SOURCE_QPN, qpn);
    }
    if let Some(fd) = init.async_fd {
        ioctl.fd(ids::ATTR_CREATE_QP_EVENT_FD, fd);
    }
    let cap = ioctl.output(ids::ATTR_CREATE_QP_RESP_CAP, created.cap.as_mut_bytes());
    let qp_num = ioctl.output(
        ids::ATTR_CREATE_QP_RESP_QP_NUM,
        created.qp_num.as_mut_bytes(),
    );
    ioctl.udata(udata);
    let answer = ioctl.run(context)?;
    // Owned until the answer is validated, so that a bad answer leaks nothing.
    let owned = Owned::<&Context, QpKind>::new(&context, QpHandle(answer.handle(object)?));
    answer.written(cap)?;
    answer.written(qp_num)?;
    Ok((owned.forget(), created))
}

/// Opens an XRC target that another process created.
///
/// # Errors
/// As [`Qp::open`].
pub fn open(
    context: &Context,
    init: &QpOpen,
    udata: Udata<'_>,
) -> Result<(QpHandle, QpCreated), Error> {
    let request = OpenQp {
        response: 0,
        user_handle: init.user_handle,
        // The kernel names the field pd_handle, but it takes the XRC domain.
        pd_handle: init.xrcd.0,
        qpn: init.qpn,
        qp_type: u8::try_from(init.qp_type.0).map_err(|_| Error::Invalid {
            command: Command::OpenQp,
            what: "the queue pair type exceeds 255",
        })?,
        reserved: [0; 7],
    };
    let mut resp = CreateQpResp::default();
    Ioctl::write(Command::OpenQp, cmd::CMD_OPEN_QP, &request, &mut resp)
        .udata(udata)
        .run(context)?;
    let cap = QpCap {
        max_send_wr: resp.max_send_wr,
        max_recv_wr: resp.max_recv_wr,
        max_send_sge: resp.max_send_sge,
        max_recv_sge: resp.max_recv_sge,
        max_inline_data: resp.max_inline_data,
    };
    Ok((
        QpHandle(resp.qp_handle),
        QpCreated {
            qp_num: resp.qpn,
            cap,
        },
    ))
}

/// Changes attributes of a queue pair. Uses the extended command only for what
/// requires it: a rate limit, or driver data.
///
/// # Errors
/// EINVAL for a transition that the specification does not allow with these
/// attributes, or a value out of range.
pub fn modify(
    context: &Context,
    qp: QpHandle,
    attr: &QpAttr,
    mask: QpAttrMask,
    udata: Udata<'_>,
) -> Result<(), Error> {
    let base = attr.to_kernel(qp, mask);
    if !mask.contains(QpAttrMask::RATE_LIMIT) && udata.is_empty() {
        return Ioctl::write(Command::ModifyQp, cmd::CMD_MODIFY_QP, &base, &mut ())
            .acts_on(qp.0)
            .run(context);
    }
    let request = ExModifyQp {
        base,
        rate_limit: attr.rate_limit,
        reserved: 0,
    };
    let mut resp = ExModifyQpResp::default();
    Ioctl::write(
        Command::ModifyQpEx,
        CMD_FLAG_EXTENDED | cmd::CMD_MODIFY_QP,
        &request,
        &mut resp,
    )
    .acts_on(qp.0)
    .udata(udata)
    .run(context)
}

/// Queries attributes of a queue pair. A driver may return more than requested.
///
/// # Errors
/// EIO if the device was removed.
pub fn query(
    context: &Context,
    qp: QpHandle,
    mask: QpAttrMask,
) -> Result<(QpAttr, QpInitQuery), Error> {
    let request = QueryQp {
        response: 0,
        qp_handle: qp.0,
        attr_mask: mask.bits(),
    };
    let mut resp = QueryQpResp::default();
    Ioctl::write(Command::QueryQp, cmd::CMD_QUERY_QP, &request, &mut resp)
        .acts_on(qp.0)
        .run(context)?;
    let attr = QpAttr::from_kernel(&resp);
    Ok((
        attr,
        QpInitQuery {
            cap: attr.cap,
            sq_sig_all: resp.sq_sig_all != 0,
        },
    ))
}

/// Joins a multicast group, so that a UD queue pair receives its packets.
///
/// # Errors
/// EINVAL if the address is not a multicast address or the queue pair is not of
/// type UD.
pub fn attach_multicast(
    context: &Context,
    qp: QpHandle,
    gid: &[u8; 16],
    mlid: u16,
) -> Result<(), Error> {
    let request = AttachMcast {
        gid: *gid,
        qp_handle: qp.0,
        mlid,
        reserved: 0,
    };
    Ioctl::write(
        Command::AttachMcast,
        cmd::CMD_ATTACH_MCAST,
        &request,
        &mut (),
    )
    .acts_on(qp.0)
    .run(context)
}

/// Leaves a multicast group.
///
/// # Errors
/// EINVAL if it is not in the group.
pub fn detach_multicast(
    context: &Context,
    qp: QpHandle,
    gid: &[u8; 16],
    mlid: u16,
) -> Result<(), Error> {
    let request = DetachMcast {
        gid: *gid,
        qp_handle: qp.0,
        mlid,
        reserved: 0,
    };
    Ioctl::write(
        Command::DetachMcast,
        cmd::CMD_DETACH_MCAST,
        &request,
        &mut (),
    )
    .acts_on(qp.0)
    .run(context)
}

/// Destroys a queue pair; returns the number of its asynchronous events that
/// were read.
///
/// # Errors
/// EBUSY if it is in a multicast group.
pub fn destroy(context: &Context, qp: QpHandle) -> Result<u32, Error> {
    let mut resp = DestroyQpResp::default();
    let mut ioctl = Ioctl::new(Command::DestroyQp, ids::OBJECT_QP, ids::METHOD_QP_DESTROY);
    ioctl.acts_on(qp.0);
    ioctl.handle(ids::ATTR_DESTROY_QP_HANDLE, qp.0);
    ioctl.output(ids::ATTR_DESTROY_QP_RESP, resp.as_mut_bytes());
    ioctl.run(context)?;
    Ok(resp.events_reported)
}
