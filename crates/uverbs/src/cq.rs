//! Completion queues.

use std::os::fd::BorrowedFd;

use zerocopy::IntoBytes;

use crate::abi::ids;
use crate::abi::write::{
    CqModeration, DestroyCqResp, ExModifyCq, ReqNotifyCq, ResizeCq, ResizeCqResp, cmd,
};
use crate::command::Ioctl;
use crate::driver::DriverInput;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{Command, Context, ContextRef, CqFlags, CqHandle, Error, Udata};

const CMD_FLAG_EXTENDED: u32 = crate::abi::write::CMD_FLAG_EXTENDED;
/// `IB_CQ_MODERATE`.
const MODIFY_MODERATION: u32 = 1 << 0;

/// Parameters of a new completion queue. Files are borrowed, not passed as
/// numbers:
///
/// ```compile_fail,E0308
/// let init = ringverbs_uverbs::CqInit { channel: Some(3), ..Default::default() };
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct CqInit<'a> {
    /// Minimum number of entries.
    pub cqe: u32,
    /// Identifies the queue in events.
    pub user_handle: u64,
    /// Completion channel that receives its completion events.
    pub channel: Option<BorrowedFd<'a>>,
    /// Completion vector, less than the context's `num_comp_vectors`.
    pub comp_vector: u32,
    /// Creation flags.
    pub flags: CqFlags,
    /// Asynchronous event file that receives its events; default: the context's
    /// first.
    pub async_fd: Option<BorrowedFd<'a>>,
    /// The driver's page index of the UAR that arms the queue.
    pub driver_uar: Option<DriverInput>,
}

/// Number of events of a queue that were read from their files before it was destroyed, for
/// callers that wait until they are acknowledged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CqEvents {
    /// Completion events.
    pub completion: u32,
    /// Asynchronous events.
    pub asynchronous: u32,
}

pub(crate) enum CqKind {}

impl Kind for CqKind {
    type Handle = CqHandle;
    type Events = CqEvents;
    const DESTROY: Command = Command::DestroyCq;
    fn destroy(context: &Context, handle: CqHandle) -> Result<CqEvents, Error> {
        destroy(context, handle)
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq<C: ContextRef> {
    owned: Owned<C, CqKind>,
    cqe: u32,
}

owned_methods!(
    Cq,
    CqHandle,
    CqEvents,
    "Returns the numbers of events that were read."
);

impl<C: ContextRef> Cq<C> {
    /// Creates a completion queue.
    ///
    /// # Errors
    /// EINVAL for too many entries or an invalid completion vector, ENOMEM.
    pub fn create(context: &C, init: &CqInit<'_>, udata: Udata<'_>) -> Result<Self, Error> {
        let (handle, cqe) = create(context, init, udata)?;
        Ok(Self::from_handle(context, handle, cqe))
    }

    /// Takes ownership of the completion queue with number `handle`.
    pub fn from_handle(context: &C, handle: CqHandle, cqe: u32) -> Self {
        Self {
            owned: Owned::new(context, handle),
            cqe,
        }
    }

    /// Returns the number of entries that it was created with.
    pub fn cqe(&self) -> u32 {
        self.cqe
    }

    /// Resizes the queue and returns the new number of entries.
    ///
    /// # Errors
    /// As [`resize`].
    pub fn resize(&self, cqe: u32, udata: Udata<'_>) -> Result<u32, Error> {
        resize(self.owned.context(), self.handle(), cqe, udata)
    }

    /// Requests notification. See [`req_notify`].
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn req_notify(&self, solicited_only: bool) -> Result<(), Error> {
        req_notify(self.owned.context(), self.handle(), solicited_only)
    }

    /// Sets the moderation of its events. See [`modify_moderation`].
    ///
    /// # Errors
    /// As [`modify_moderation`].
    pub fn modify_moderation(&self, count: u16, period: u16) -> Result<(), Error> {
        modify_moderation(self.owned.context(), self.handle(), count, period)
    }
}

/// Creates a completion queue; returns its handle and its number of entries.
///
/// # Errors
/// As [`Cq::create`].
pub fn create(
    context: &Context,
    init: &CqInit<'_>,
    udata: Udata<'_>,
) -> Result<(CqHandle, u32), Error> {
    let mut cqe = 0u32;
    let mut ioctl = Ioctl::new(Command::CreateCq, ids::OBJECT_CQ, ids::METHOD_CQ_CREATE);
    let object = ioctl.new_object(ids::ATTR_CREATE_CQ_HANDLE);
    ioctl.u32(ids::ATTR_CREATE_CQ_CQE, init.cqe);
    ioctl.u64(ids::ATTR_CREATE_CQ_USER_HANDLE, init.user_handle);
    if let Some(fd) = init.channel {
        ioctl.fd(ids::ATTR_CREATE_CQ_COMP_CHANNEL, fd);
    }
    ioctl.u32(ids::ATTR_CREATE_CQ_COMP_VECTOR, init.comp_vector);
    if !init.flags.is_empty() {
        ioctl.u32(ids::ATTR_CREATE_CQ_FLAGS, init.flags.bits());
    }
    let answered = ioctl.output(ids::ATTR_CREATE_CQ_RESP_CQE, cqe.as_mut_bytes());
    if let Some(fd) = init.async_fd {
        ioctl.fd(ids::ATTR_CREATE_CQ_EVENT_FD, fd);
    }
    if let Some(uar) = init.driver_uar {
        ioctl.u32(uar.attr_id, uar.value);
    }
    ioctl.udata(udata);
    let answer = ioctl.run(context)?;
    // Owned until the answer is validated, so that a bad answer leaks nothing.
    let owned = Owned::<&Context, CqKind>::new(&context, CqHandle(answer.handle(object)?));
    answer.written(answered)?;
    Ok((owned.forget(), cqe))
}

/// Resizes a queue and returns the new number of entries.
///
/// # Errors
/// EINVAL if it holds more than `cqe` completions, EOPNOTSUPP if the driver
/// does not support it.
pub fn resize(context: &Context, cq: CqHandle, cqe: u32, udata: Udata<'_>) -> Result<u32, Error> {
    let request = ResizeCq {
        cq_handle: cq.0,
        cqe,
        ..ResizeCq::default()
    };
    let mut resp = ResizeCqResp::default();
    Ioctl::write(Command::ResizeCq, cmd::CMD_RESIZE_CQ, &request, &mut resp)
        .acts_on(cq.0)
        .udata(udata)
        .run(context)?;
    Ok(resp.cqe)
}

/// Requests notification: the next completion (or the next solicited one) puts
/// an event into the queue's channel. Completions that are already in the queue
/// do not; poll after arming.
///
/// # Errors
/// EIO if the device was removed.
pub fn req_notify(context: &Context, cq: CqHandle, solicited_only: bool) -> Result<(), Error> {
    let request = ReqNotifyCq {
        cq_handle: cq.0,
        solicited_only: solicited_only.into(),
    };
    Ioctl::write(
        Command::ReqNotifyCq,
        cmd::CMD_REQ_NOTIFY_CQ,
        &request,
        &mut (),
    )
    .acts_on(cq.0)
    .run(context)
}

/// Delays events until `count` completions or `period` microseconds.
///
/// # Errors
/// EOPNOTSUPP if the driver does not support it.
pub fn modify_moderation(
    context: &Context,
    cq: CqHandle,
    count: u16,
    period: u16,
) -> Result<(), Error> {
    let request = ExModifyCq {
        cq_handle: cq.0,
        attr_mask: MODIFY_MODERATION,
        attr: CqModeration {
            cq_count: count,
            cq_period: period,
        },
        reserved: 0,
    };
    Ioctl::write(
        Command::ModifyCq,
        CMD_FLAG_EXTENDED | cmd::EX_CMD_MODIFY_CQ,
        &request,
        &mut (),
    )
    .acts_on(cq.0)
    .run(context)
}

/// Destroys a completion queue.
///
/// # Errors
/// EBUSY if queue pairs still use it.
pub fn destroy(context: &Context, cq: CqHandle) -> Result<CqEvents, Error> {
    let mut resp = DestroyCqResp::default();
    let mut ioctl = Ioctl::new(Command::DestroyCq, ids::OBJECT_CQ, ids::METHOD_CQ_DESTROY);
    ioctl.acts_on(cq.0);
    ioctl.handle(ids::ATTR_DESTROY_CQ_HANDLE, cq.0);
    ioctl.output(ids::ATTR_DESTROY_CQ_RESP, resp.as_mut_bytes());
    // The queue is destroyed even if the counts were not written: no error
    // after this.
    ioctl.run(context)?;
    Ok(CqEvents {
        completion: resp.comp_events_reported,
        asynchronous: resp.async_events_reported,
    })
}
