//! Shared receive queues.

use std::os::fd::BorrowedFd;

use zerocopy::IntoBytes;

use crate::abi::ids;
use crate::abi::write::{DestroySrqResp, ModifySrq, QuerySrq, QuerySrqResp, cmd};
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{
    Command, Context, ContextRef, CqHandle, Error, PdHandle, SrqHandle, Udata, XrcdHandle,
};

const SRQ_BASIC: u64 = 0;
const SRQ_XRC: u64 = 1;
const SRQ_TAG_MATCHING: u64 = 2;
const MODIFY_MAX_WR: u32 = 1 << 0;
const MODIFY_LIMIT: u32 = 1 << 1;

/// Type of a shared receive queue, with the parameters of that type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SrqKind {
    /// For queue pairs of one protection domain.
    #[default]
    Basic,
    /// For XRC targets of one XRC domain.
    Xrc {
        /// The XRC domain.
        xrcd: XrcdHandle,
        /// Completion queue of its receives.
        cq: CqHandle,
    },
    /// With tag matching.
    TagMatching {
        /// Completion queue of its receives.
        cq: CqHandle,
        /// Maximum number of tags.
        max_num_tags: u32,
    },
}

/// Parameters of a new shared receive queue.
#[derive(Clone, Copy, Debug)]
pub struct SrqInit<'a> {
    /// Protection domain.
    pub pd: PdHandle,
    /// Identifies the queue in events.
    pub user_handle: u64,
    /// Minimum number of receives.
    pub max_wr: u32,
    /// Minimum number of scatter elements of a receive.
    pub max_sge: u32,
    /// Raise an event when fewer receives than this are left; zero: never.
    pub limit: u32,
    /// Its type.
    pub kind: SrqKind,
    /// Asynchronous event file that receives its events; default: the context's
    /// first.
    pub async_fd: Option<BorrowedFd<'a>>,
}

/// Changes; `None` keeps the current value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SrqModify {
    /// Resize to at least this many receives.
    pub max_wr: Option<u32>,
    /// Arm the limit event.
    pub limit: Option<u32>,
}

/// Sizes of a queue, and its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SrqAttr {
    /// Maximum number of receives.
    pub max_wr: u32,
    /// Maximum number of scatter elements of a receive.
    pub max_sge: u32,
    /// Limit of the armed event; zero: not armed.
    pub limit: u32,
}

/// Properties of a created queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SrqCreated {
    /// Maximum number of receives.
    pub max_wr: u32,
    /// Maximum number of scatter elements of a receive.
    pub max_sge: u32,
    /// Number by which XRC initiators address it; XRC type only.
    pub srq_num: Option<u32>,
}

pub(crate) enum SrqKindTag {}

impl Kind for SrqKindTag {
    type Handle = SrqHandle;
    type Events = u32;
    const DESTROY: Command = Command::DestroySrq;
    fn destroy(context: &Context, handle: SrqHandle) -> Result<u32, Error> {
        destroy(context, handle)
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq<C: ContextRef> {
    owned: Owned<C, SrqKindTag>,
    created: SrqCreated,
}

owned_methods!(
    Srq,
    SrqHandle,
    u32,
    "Returns the number of its asynchronous events that were read."
);

impl<C: ContextRef> Srq<C> {
    /// Creates a shared receive queue.
    ///
    /// # Errors
    /// EINVAL for sizes beyond the device's limits, EOPNOTSUPP for a type that
    /// it does not support.
    pub fn create(context: &C, init: &SrqInit<'_>, udata: Udata<'_>) -> Result<Self, Error> {
        let (handle, created) = create(context, init, udata)?;
        Ok(Self::from_handle(context, handle, created))
    }

    /// Takes ownership of the queue with number `handle`.
    pub fn from_handle(context: &C, handle: SrqHandle, created: SrqCreated) -> Self {
        Self {
            owned: Owned::new(context, handle),
            created,
        }
    }

    /// Returns the maximum number of receives.
    pub fn max_wr(&self) -> u32 {
        self.created.max_wr
    }

    /// Returns the maximum number of scatter elements of a receive.
    pub fn max_sge(&self) -> u32 {
        self.created.max_sge
    }

    /// Returns the number by which XRC initiators address it.
    pub fn srq_num(&self) -> Option<u32> {
        self.created.srq_num
    }

    /// Resizes, or arms the limit event.
    ///
    /// # Errors
    /// As [`modify`].
    pub fn modify(&self, change: &SrqModify, udata: Udata<'_>) -> Result<(), Error> {
        modify(self.owned.context(), self.handle(), change, udata)
    }

    /// Queries sizes and limit.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn query(&self) -> Result<SrqAttr, Error> {
        query(self.owned.context(), self.handle())
    }
}

/// Creates a shared receive queue.
///
/// # Errors
/// As [`Srq::create`].
pub fn create(
    context: &Context,
    init: &SrqInit<'_>,
    udata: Udata<'_>,
) -> Result<(SrqHandle, SrqCreated), Error> {
    let (mut max_wr, mut max_sge, mut srq_num) = (0u32, 0u32, 0u32);
    let mut ioctl = Ioctl::new(Command::CreateSrq, ids::OBJECT_SRQ, ids::METHOD_SRQ_CREATE);
    let object = ioctl.new_object(ids::ATTR_CREATE_SRQ_HANDLE);
    ioctl.handle(ids::ATTR_CREATE_SRQ_PD_HANDLE, init.pd.0);
    ioctl.u64(ids::ATTR_CREATE_SRQ_USER_HANDLE, init.user_handle);
    ioctl.u32(ids::ATTR_CREATE_SRQ_MAX_WR, init.max_wr);
    ioctl.u32(ids::ATTR_CREATE_SRQ_MAX_SGE, init.max_sge);
    ioctl.u32(ids::ATTR_CREATE_SRQ_LIMIT, init.limit);
    let mut needed = [
        Some(ioctl.output(ids::ATTR_CREATE_SRQ_RESP_MAX_WR, max_wr.as_mut_bytes())),
        Some(ioctl.output(ids::ATTR_CREATE_SRQ_RESP_MAX_SGE, max_sge.as_mut_bytes())),
        None,
    ];
    let kind = match init.kind {
        SrqKind::Basic => SRQ_BASIC,
        SrqKind::Xrc { xrcd, cq } => {
            ioctl.handle(ids::ATTR_CREATE_SRQ_XRCD_HANDLE, xrcd.0);
            ioctl.handle(ids::ATTR_CREATE_SRQ_CQ_HANDLE, cq.0);
            needed[2] =
                Some(ioctl.output(ids::ATTR_CREATE_SRQ_RESP_SRQ_NUM, srq_num.as_mut_bytes()));
            SRQ_XRC
        }
        SrqKind::TagMatching { cq, max_num_tags } => {
            ioctl.handle(ids::ATTR_CREATE_SRQ_CQ_HANDLE, cq.0);
            ioctl.u32(ids::ATTR_CREATE_SRQ_MAX_NUM_TAGS, max_num_tags);
            SRQ_TAG_MATCHING
        }
    };
    ioctl.constant(ids::ATTR_CREATE_SRQ_TYPE, kind);
    if let Some(fd) = init.async_fd {
        ioctl.fd(ids::ATTR_CREATE_SRQ_EVENT_FD, fd);
    }
    ioctl.udata(udata);
    let answer = ioctl.run(context)?;
    let owned = Owned::<&Context, SrqKindTag>::new(&context, SrqHandle(answer.handle(object)?));
    for slot in needed.into_iter().flatten() {
        answer.written(slot)?;
    }
    let srq_num = matches!(init.kind, SrqKind::Xrc { .. }).then_some(srq_num);
    Ok((
        owned.forget(),
        SrqCreated {
            max_wr,
            max_sge,
            srq_num,
        },
    ))
}

/// Resizes a queue, or arms its limit event.
///
/// # Errors
/// EINVAL for a limit above the queue's size, or an unsupported size.
pub fn modify(
    context: &Context,
    srq: SrqHandle,
    change: &SrqModify,
    udata: Udata<'_>,
) -> Result<(), Error> {
    let flag = |set: bool, bit: u32| if set { bit } else { 0 };
    let request = ModifySrq {
        srq_handle: srq.0,
        attr_mask: flag(change.max_wr.is_some(), MODIFY_MAX_WR)
            | flag(change.limit.is_some(), MODIFY_LIMIT),
        max_wr: change.max_wr.unwrap_or(0),
        srq_limit: change.limit.unwrap_or(0),
    };
    Ioctl::write(Command::ModifySrq, cmd::CMD_MODIFY_SRQ, &request, &mut ())
        .acts_on(srq.0)
        .udata(udata)
        .run(context)
}

/// Queries sizes and limit.
///
/// # Errors
/// EIO if the device was removed.
pub fn query(context: &Context, srq: SrqHandle) -> Result<SrqAttr, Error> {
    let request = QuerySrq {
        srq_handle: srq.0,
        ..QuerySrq::default()
    };
    let mut resp = QuerySrqResp::default();
    Ioctl::write(Command::QuerySrq, cmd::CMD_QUERY_SRQ, &request, &mut resp)
        .acts_on(srq.0)
        .run(context)?;
    Ok(SrqAttr {
        max_wr: resp.max_wr,
        max_sge: resp.max_sge,
        limit: resp.srq_limit,
    })
}

/// Destroys a queue; returns the number of its asynchronous events that were
/// read.
///
/// # Errors
/// EBUSY if queue pairs still use it.
pub fn destroy(context: &Context, srq: SrqHandle) -> Result<u32, Error> {
    let mut resp = DestroySrqResp::default();
    let mut ioctl = Ioctl::new(
        Command::DestroySrq,
        ids::OBJECT_SRQ,
        ids::METHOD_SRQ_DESTROY,
    );
    ioctl.acts_on(srq.0);
    ioctl.handle(ids::ATTR_DESTROY_SRQ_HANDLE, srq.0);
    ioctl.output(ids::ATTR_DESTROY_SRQ_RESP, resp.as_mut_bytes());
    ioctl.run(context)?;
    Ok(resp.events_reported)
}
