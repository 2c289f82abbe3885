//! Work queues, which are receive queues without a queue pair, and indirection tables, which
//! distribute the packets of a queue pair over work queues (receive-side scaling, RSS).

use std::os::fd::BorrowedFd;

use zerocopy::IntoBytes;

use crate::abi::ids;
use crate::abi::write::{
    CMD_FLAG_EXTENDED, ExCreateRwqIndTable, ExCreateRwqIndTableResp, ExModifyWq, cmd,
};
use crate::command::Ioctl;
use crate::handle::{Kind, Owned, owned_methods};
use crate::{
    Command, Context, ContextRef, CqHandle, Error, PdHandle, Udata, WqHandle, WqTableHandle,
};

/// The only type of work queue: for receives.
const TYPE_RECEIVE: u64 = 0;

/// Binary logarithm of the largest table that the kernel accepts.
const LARGEST_TABLE: u32 = 13;

/// Parameters of a new work queue.
#[derive(Clone, Copy, Debug)]
pub struct WqInit<'a> {
    /// Protection domain.
    pub pd: PdHandle,
    /// Completion queue of its receives.
    pub cq: CqHandle,
    /// Minimum number of receives.
    pub max_wr: u32,
    /// Minimum number of scatter elements of a receive.
    pub max_sge: u32,
    /// `IB_UVERBS_WQ_FLAGS_*`.
    pub flags: u32,
    /// Identifies the queue in events.
    pub user_handle: u64,
    /// Asynchronous event file that receives its events; default: the context's
    /// first.
    pub async_fd: Option<BorrowedFd<'a>>,
}

/// State of a work queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WqState(pub u32);

impl WqState {
    /// New: it receives nothing.
    pub const RESET: Self = Self(0);
    /// It receives.
    pub const READY: Self = Self(1);
    /// It has failed.
    pub const ERROR: Self = Self(2);
}

/// Changes of a work queue; `None` keeps the current value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WqChange {
    /// The new state.
    pub state: Option<WqState>,
    /// The current state; the change fails if it is another.
    pub current: Option<WqState>,
    /// New flags, and which of them change.
    pub flags: Option<(u32, u32)>,
}

/// Properties of a created queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WqCreated {
    /// The device's number of the queue.
    pub wq_num: u32,
    /// Number of receives, as the driver counts them.
    pub max_wr: u32,
    /// Number of scatter elements, as the driver counts them.
    pub max_sge: u32,
}

pub(crate) enum WqKind {}

impl Kind for WqKind {
    type Handle = WqHandle;
    type Events = u32;
    const DESTROY: Command = Command::DestroyWq;
    fn destroy(context: &Context, handle: WqHandle) -> Result<u32, Error> {
        destroy(context, handle)
    }
}

/// A work queue.
#[derive(Debug)]
pub struct Wq<C: ContextRef> {
    owned: Owned<C, WqKind>,
    created: WqCreated,
}

owned_methods!(
    Wq,
    WqHandle,
    u32,
    "Returns the number of its asynchronous events that were read."
);

impl<C: ContextRef> Wq<C> {
    /// Creates a work queue, in state [`WqState::RESET`].
    ///
    /// # Errors
    /// EOPNOTSUPP for a device without work queues or flags that it does not have, EINVAL
    /// for sizes beyond its limits.
    pub fn create(context: &C, init: &WqInit<'_>, udata: Udata<'_>) -> Result<Self, Error> {
        let (handle, created) = create(context, init, udata)?;
        Ok(Self {
            owned: Owned::new(context, handle),
            created,
        })
    }

    /// Returns the device's number of it.
    pub fn wq_num(&self) -> u32 {
        self.created.wq_num
    }

    /// Changes state or flags.
    ///
    /// # Errors
    /// As [`modify`].
    pub fn modify(&self, change: &WqChange, udata: Udata<'_>) -> Result<(), Error> {
        modify(self.owned.context(), self.handle(), change, udata)
    }
}

/// Creates a work queue.
///
/// # Errors
/// As [`Wq::create`].
pub fn create(
    context: &Context,
    init: &WqInit<'_>,
    udata: Udata<'_>,
) -> Result<(WqHandle, WqCreated), Error> {
    let mut created = WqCreated::default();
    let mut ioctl = Ioctl::new(Command::CreateWq, ids::OBJECT_WQ, ids::METHOD_WQ_CREATE);
    let object = ioctl.new_object(ids::ATTR_CREATE_WQ_HANDLE);
    ioctl.u64(ids::ATTR_CREATE_WQ_USER_HANDLE, init.user_handle);
    ioctl.handle(ids::ATTR_CREATE_WQ_PD_HANDLE, init.pd.0);
    ioctl.handle(ids::ATTR_CREATE_WQ_CQ_HANDLE, init.cq.0);
    ioctl.constant(ids::ATTR_CREATE_WQ_TYPE, TYPE_RECEIVE);
    ioctl.u32(ids::ATTR_CREATE_WQ_MAX_WR, init.max_wr);
    ioctl.u32(ids::ATTR_CREATE_WQ_MAX_SGE, init.max_sge);
    ioctl.u32(ids::ATTR_CREATE_WQ_FLAGS, init.flags);
    if let Some(fd) = init.async_fd {
        ioctl.fd(ids::ATTR_CREATE_WQ_EVENT_FD, fd);
    }
    let WqCreated {
        wq_num,
        max_wr,
        max_sge,
    } = &mut created;
    let needed = [
        (ids::ATTR_CREATE_WQ_RESP_MAX_WR, max_wr),
        (ids::ATTR_CREATE_WQ_RESP_MAX_SGE, max_sge),
        (ids::ATTR_CREATE_WQ_RESP_WQ_NUM, wq_num),
    ]
    .map(|(attr, place)| ioctl.output(attr, place.as_mut_bytes()));
    ioctl.udata(udata);
    let answer = ioctl.run(context)?;
    // Owned until the answer is validated, so that a bad answer leaks nothing.
    let owned = Owned::<&Context, WqKind>::new(&context, WqHandle(answer.handle(object)?));
    answer.all_written(&needed)?;
    Ok((owned.forget(), created))
}

/// Changes state or flags of a work queue.
///
/// # Errors
/// EINVAL for a transition that there is not, EOPNOTSUPP for flags that the device does
/// not change.
pub fn modify(
    context: &Context,
    wq: WqHandle,
    change: &WqChange,
    udata: Udata<'_>,
) -> Result<(), Error> {
    const STATE: u32 = 1 << 0;
    const CURRENT: u32 = 1 << 1;
    const FLAGS: u32 = 1 << 2;
    let flag = |set: bool, bit: u32| if set { bit } else { 0 };
    let (flags, flags_mask) = change.flags.unwrap_or_default();
    let request = ExModifyWq {
        attr_mask: flag(change.state.is_some(), STATE)
            | flag(change.current.is_some(), CURRENT)
            | flag(change.flags.is_some(), FLAGS),
        wq_handle: wq.0,
        wq_state: change.state.map_or(0, |state| state.0),
        curr_wq_state: change.current.map_or(0, |state| state.0),
        flags,
        flags_mask,
    };
    let number = CMD_FLAG_EXTENDED | cmd::EX_CMD_MODIFY_WQ;
    Ioctl::write(Command::ModifyWq, number, &request, &mut ())
        .acts_on(wq.0)
        .udata(udata)
        .run(context)
}

/// Destroys a work queue; returns the number of its asynchronous events that were read.
///
/// # Errors
/// EBUSY if a table names it.
pub fn destroy(context: &Context, wq: WqHandle) -> Result<u32, Error> {
    let mut events = 0u32;
    let mut ioctl = Ioctl::new(Command::DestroyWq, ids::OBJECT_WQ, ids::METHOD_WQ_DESTROY);
    ioctl.acts_on(wq.0);
    ioctl.handle(ids::ATTR_DESTROY_WQ_HANDLE, wq.0);
    ioctl.output(ids::ATTR_DESTROY_WQ_RESP, events.as_mut_bytes());
    ioctl.run(context)?;
    Ok(events)
}

/// Creates an indirection table of these work queues, as many as a power of two. Returns
/// its handle and the device's number of it. Allocates.
///
/// # Errors
/// [`Error::Invalid`] for another number of queues or more than 8192; EINVAL for more than
/// the device allows.
pub fn create_table(context: &Context, queues: &[WqHandle]) -> Result<(WqTableHandle, u32), Error> {
    let log = queues.len().trailing_zeros();
    if !queues.len().is_power_of_two() || log > LARGEST_TABLE {
        return Err(Error::Invalid {
            command: Command::CreateWqTable,
            what: "the number of work queues is not a power of two up to 8192",
        });
    }
    let header = ExCreateRwqIndTable {
        comp_mask: 0,
        log_ind_tbl_size: log,
    };
    let mut request = header.as_bytes().to_vec();
    request.extend(queues.iter().flat_map(|queue| queue.0.to_ne_bytes()));
    // Requests are whole words of 64 bits.
    request.resize(request.len().next_multiple_of(8), 0);
    let mut resp = ExCreateRwqIndTableResp::default();
    let number = CMD_FLAG_EXTENDED | cmd::EX_CMD_CREATE_RWQ_IND_TBL;
    Ioctl::write_bytes(Command::CreateWqTable, number, &request, &mut resp).run(context)?;
    Ok((WqTableHandle(resp.ind_tbl_handle), resp.ind_tbl_num))
}

/// Destroys an indirection table.
///
/// # Errors
/// EBUSY if a queue pair uses it.
pub fn destroy_table(context: &Context, table: WqTableHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(
        Command::DestroyWqTable,
        ids::OBJECT_RWQ_IND_TBL,
        ids::METHOD_RWQ_IND_TBL_DESTROY,
    );
    ioctl.acts_on(table.0);
    ioctl.handle(ids::ATTR_DESTROY_RWQ_IND_TBL_HANDLE, table.0);
    ioctl.run(context)?;
    Ok(())
}
