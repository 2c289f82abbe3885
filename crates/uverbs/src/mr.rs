//! Memory regions.

use std::os::fd::{AsRawFd, BorrowedFd};

use bitflags::bitflags;
use zerocopy::IntoBytes;

use crate::abi::ids;
use crate::abi::write::{self, RegMrResp, ReregMrResp, Sge, cmd};
use crate::command::Ioctl;
use crate::driver::DriverInput;
use crate::handle::{Kind, Owned, owned_methods};
use crate::open_enum;
use crate::{
    AccessFlags, Command, Context, ContextRef, DmHandle, Error, MrHandle, PdHandle, Udata,
};

const REREG_TRANSLATION: u32 = 1 << 0;
const REREG_PD: u32 = 1 << 1;
const REREG_ACCESS: u32 = 1 << 2;

/// Memory to register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MrInit {
    /// Protection domain.
    pub pd: PdHandle,
    /// Address of the first byte, in this process.
    pub addr: u64,
    /// Length in bytes.
    pub length: u64,
    /// Address of the first byte in work requests and for peers. Must have the
    /// same offset in its page as `addr`.
    pub iova: u64,
    /// Access rights.
    pub access: AccessFlags,
}

/// Part of a DMA buffer to register.
#[derive(Clone, Copy, Debug)]
pub struct DmabufMrInit<'a> {
    /// Protection domain.
    pub pd: PdHandle,
    /// Offset of the first byte in the buffer.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Address of the first byte in work requests and for peers.
    pub iova: u64,
    /// The buffer. `None` registers nothing, and probes the driver: it supports
    /// DMA buffers if the error is EBADF.
    pub fd: Option<BorrowedFd<'a>>,
    /// Access rights.
    pub access: AccessFlags,
    /// Driver-specific access flags.
    pub driver_access: Option<DriverInput>,
}

/// Part of device memory to register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmMrInit {
    /// Protection domain.
    pub pd: PdHandle,
    /// The device memory.
    pub dm: DmHandle,
    /// Offset of the first byte in it.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Access rights. The kernel requires [`AccessFlags::ZERO_BASED`]:
    /// addresses that are offsets from the region's start.
    pub access: AccessFlags,
}

/// Changes of a region; `None` keeps the current value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rereg {
    /// New memory: address, length, iova.
    pub translation: Option<(u64, u64, u64)>,
    /// New protection domain.
    pub pd: Option<PdHandle>,
    /// New access.
    pub access: Option<AccessFlags>,
}

/// Attributes of a region, as the kernel reports them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MrAttr {
    /// Local key, for own work requests.
    pub lkey: u32,
    /// Remote key, for peers.
    pub rkey: u32,
    /// Length in bytes.
    pub length: u64,
    /// First address; zero if the kernel does not report it.
    pub iova: u64,
}

/// Keys of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MrKeys {
    /// Local key, for own work requests.
    pub lkey: u32,
    /// Remote key, for peers.
    pub rkey: u32,
}

open_enum! {
    /// Advice about memory that will be used.
    Advice(u32) {
        /// Fault pages in for reading.
        PREFETCH = 0,
        /// Fault pages in for writing.
        PREFETCH_WRITE = 1,
        /// Map pages that are present; fault none in.
        PREFETCH_NO_FAULT = 2,
    }
}

bitflags! {
    /// Flags of advice.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct AdviseFlags: u32 {
        /// Wait until the prefetch is complete.
        const FLUSH = 1 << 0;
        const _ = !0;
    }
}

pub(crate) enum MrKind {}

impl Kind for MrKind {
    type Handle = MrHandle;
    type Events = ();
    const DESTROY: Command = Command::DeregMr;
    fn destroy(context: &Context, handle: MrHandle) -> Result<(), Error> {
        destroy(context, handle)
    }
}

/// A registered memory region. Destroying it deregisters the memory: the device
/// does not access it afterwards.
#[derive(Debug)]
pub struct Mr<C: ContextRef> {
    owned: Owned<C, MrKind>,
    keys: MrKeys,
}

owned_methods!(
    Mr,
    MrHandle,
    (),
    "The device does not access the memory afterwards."
);

impl<C: ContextRef> Mr<C> {
    /// Registers memory.
    ///
    /// # Errors
    /// EFAULT if the memory is not mapped with the access that is requested,
    /// ENOMEM over the locked memory limit, EINVAL for contradictory access
    /// flags.
    ///
    /// # Safety
    /// As [`register`].
    pub unsafe fn register(context: &C, init: &MrInit, udata: Udata<'_>) -> Result<Self, Error> {
        // SAFETY: the caller upholds the contract of `register`.
        let (handle, keys) = unsafe { register(context, init, udata) }?;
        Ok(Self::from_handle(context, handle, keys))
    }

    /// Registers a part of a DMA buffer. The kernel keeps the buffer alive.
    ///
    /// # Errors
    /// EOPNOTSUPP if the driver does not support it.
    pub fn register_dmabuf(
        context: &C,
        init: &DmabufMrInit<'_>,
        udata: Udata<'_>,
    ) -> Result<Self, Error> {
        let (handle, keys) = register_dmabuf(context, init, udata)?;
        Ok(Self::from_handle(context, handle, keys))
    }

    /// Takes ownership of the region with number `handle` and these keys.
    pub fn from_handle(context: &C, handle: MrHandle, keys: MrKeys) -> Self {
        Self {
            owned: Owned::new(context, handle),
            keys,
        }
    }

    /// Returns the local key, for own work requests.
    pub fn lkey(&self) -> u32 {
        self.keys.lkey
    }

    /// Returns the remote key, for peers.
    pub fn rkey(&self) -> u32 {
        self.keys.rkey
    }

    /// Changes the region. Its keys may change.
    ///
    /// # Errors
    /// Those of the kernel's driver. After an error the region may be unusable,
    /// but can be destroyed.
    ///
    /// # Safety
    /// As [`rereg`].
    pub unsafe fn rereg(&mut self, change: &Rereg, udata: Udata<'_>) -> Result<(), Error> {
        // SAFETY: the caller upholds the contract of `rereg`.
        self.keys = unsafe { rereg(self.owned.context(), self.handle(), change, udata) }?;
        Ok(())
    }
}

/// Registers memory.
///
/// # Errors
/// As [`Mr::register`].
///
/// # Safety
/// Until the region is destroyed, the device, and peers that know the key, may
/// read the memory, and write it if the access flags permit. It must stay
/// mapped and must be treated as memory that others access.
pub unsafe fn register(
    context: &Context,
    init: &MrInit,
    udata: Udata<'_>,
) -> Result<(MrHandle, MrKeys), Error> {
    let request = write::RegMr {
        response: 0,
        start: init.addr,
        length: init.length,
        hca_va: init.iova,
        pd_handle: init.pd.0,
        access_flags: init.access.bits(),
    };
    let mut resp = RegMrResp::default();
    Ioctl::write(Command::RegMr, cmd::CMD_REG_MR, &request, &mut resp)
        .udata(udata)
        .run(context)?;
    Ok((
        MrHandle(resp.mr_handle),
        MrKeys {
            lkey: resp.lkey,
            rkey: resp.rkey,
        },
    ))
}

/// Registers a part of a DMA buffer.
///
/// # Errors
/// As [`Mr::register_dmabuf`].
pub fn register_dmabuf(
    context: &Context,
    init: &DmabufMrInit<'_>,
    udata: Udata<'_>,
) -> Result<(MrHandle, MrKeys), Error> {
    let mut keys = MrKeys::default();
    let mut ioctl = Ioctl::new(
        Command::RegDmabufMr,
        ids::OBJECT_MR,
        ids::METHOD_REG_DMABUF_MR,
    );
    let object = ioctl.new_object(ids::ATTR_REG_DMABUF_MR_HANDLE);
    let lkey = ioctl.output(ids::ATTR_REG_DMABUF_MR_RESP_LKEY, keys.lkey.as_mut_bytes());
    let rkey = ioctl.output(ids::ATTR_REG_DMABUF_MR_RESP_RKEY, keys.rkey.as_mut_bytes());
    ioctl.handle(ids::ATTR_REG_DMABUF_MR_PD_HANDLE, init.pd.0);
    ioctl.u64(ids::ATTR_REG_DMABUF_MR_OFFSET, init.offset);
    ioctl.u64(ids::ATTR_REG_DMABUF_MR_LENGTH, init.length);
    ioctl.u64(ids::ATTR_REG_DMABUF_MR_IOVA, init.iova);
    let fd = init.fd.map_or(-1, |fd| fd.as_raw_fd());
    ioctl.u32(ids::ATTR_REG_DMABUF_MR_FD, fd as u32);
    ioctl.u32(ids::ATTR_REG_DMABUF_MR_ACCESS_FLAGS, init.access.bits());
    if let Some(access) = init.driver_access {
        ioctl.u32(access.attr_id, access.value);
    }
    ioctl.udata(udata);
    let answer = ioctl.run(context)?;
    let owned = Owned::<&Context, MrKind>::new(&context, MrHandle(answer.handle(object)?));
    answer.written(lkey)?;
    answer.written(rkey)?;
    Ok((owned.forget(), keys))
}

/// Registers a part of device memory. No memory of the process is involved.
///
/// # Errors
/// EINVAL for a range outside the memory, for access without
/// [`AccessFlags::ZERO_BASED`], and for access that the driver does not
/// support.
pub fn register_dm(context: &Context, init: &DmMrInit) -> Result<(MrHandle, MrKeys), Error> {
    let mut keys = MrKeys::default();
    let mut ioctl = Ioctl::new(Command::RegDmMr, ids::OBJECT_MR, ids::METHOD_DM_MR_REG);
    let object = ioctl.new_object(ids::ATTR_REG_DM_MR_HANDLE);
    let lkey = ioctl.output(ids::ATTR_REG_DM_MR_RESP_LKEY, keys.lkey.as_mut_bytes());
    let rkey = ioctl.output(ids::ATTR_REG_DM_MR_RESP_RKEY, keys.rkey.as_mut_bytes());
    ioctl.handle(ids::ATTR_REG_DM_MR_PD_HANDLE, init.pd.0);
    ioctl.handle(ids::ATTR_REG_DM_MR_DM_HANDLE, init.dm.0);
    ioctl.u64(ids::ATTR_REG_DM_MR_OFFSET, init.offset);
    ioctl.u64(ids::ATTR_REG_DM_MR_LENGTH, init.length);
    ioctl.u32(ids::ATTR_REG_DM_MR_ACCESS_FLAGS, init.access.bits());
    let answer = ioctl.run(context)?;
    let owned = Owned::<&Context, MrKind>::new(&context, MrHandle(answer.handle(object)?));
    answer.written(lkey)?;
    answer.written(rkey)?;
    Ok((owned.forget(), keys))
}

/// Changes a region.
///
/// # Errors
/// As [`Mr::rereg`]; an error also if nothing is to change.
///
/// # Safety
/// As [`register`], for the new memory and access.
pub unsafe fn rereg(
    context: &Context,
    mr: MrHandle,
    change: &Rereg,
    udata: Udata<'_>,
) -> Result<MrKeys, Error> {
    let (start, length, hca_va) = change.translation.unwrap_or_default();
    let flag = |set: bool, bit: u32| if set { bit } else { 0 };
    let request = write::ReregMr {
        response: 0,
        mr_handle: mr.0,
        flags: flag(change.translation.is_some(), REREG_TRANSLATION)
            | flag(change.pd.is_some(), REREG_PD)
            | flag(change.access.is_some(), REREG_ACCESS),
        start,
        length,
        hca_va,
        pd_handle: change.pd.map_or(0, u32::from),
        access_flags: change.access.unwrap_or_default().bits(),
    };
    let mut resp = ReregMrResp::default();
    Ioctl::write(Command::ReregMr, cmd::CMD_REREG_MR, &request, &mut resp)
        .acts_on(mr.0)
        .udata(udata)
        .run(context)?;
    Ok(MrKeys {
        lkey: resp.lkey,
        rkey: resp.rkey,
    })
}

/// Queries a region.
///
/// # Errors
/// ENOENT if the handle does not exist.
pub fn query(context: &Context, mr: MrHandle) -> Result<MrAttr, Error> {
    let mut attr = MrAttr::default();
    let mut ioctl = Ioctl::new(Command::QueryMr, ids::OBJECT_MR, ids::METHOD_QUERY_MR);
    ioctl.acts_on(mr.0);
    ioctl.handle(ids::ATTR_QUERY_MR_HANDLE, mr.0);
    let needed = [
        ioctl.output(ids::ATTR_QUERY_MR_RESP_LKEY, attr.lkey.as_mut_bytes()),
        ioctl.output(ids::ATTR_QUERY_MR_RESP_RKEY, attr.rkey.as_mut_bytes()),
        ioctl.output(ids::ATTR_QUERY_MR_RESP_LENGTH, attr.length.as_mut_bytes()),
    ];
    ioctl.output(ids::ATTR_QUERY_MR_RESP_IOVA, attr.iova.as_mut_bytes());
    let answer = ioctl.run(context)?;
    for slot in needed {
        answer.written(slot)?;
    }
    Ok(attr)
}

/// Deregisters a region.
///
/// # Errors
/// EBUSY if memory windows are bound to it.
pub fn destroy(context: &Context, mr: MrHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(Command::DeregMr, ids::OBJECT_MR, ids::METHOD_MR_DESTROY);
    ioctl.acts_on(mr.0);
    ioctl.handle(ids::ATTR_DESTROY_MR_HANDLE, mr.0);
    ioctl.run(context).map(drop)
}

impl Context {
    /// Advises the device about memory of on-demand regions that will be used.
    ///
    /// # Errors
    /// EOPNOTSUPP if the driver does not support advice, EINVAL for unknown
    /// advice.
    pub fn advise_mr(
        &self,
        pd: PdHandle,
        advice: Advice,
        flags: AdviseFlags,
        sges: &[Sge],
    ) -> Result<(), Error> {
        let mut ioctl = Ioctl::new(Command::AdviseMr, ids::OBJECT_MR, ids::METHOD_ADVISE_MR);
        ioctl.handle(ids::ATTR_ADVISE_MR_PD_HANDLE, pd.0);
        ioctl.constant(ids::ATTR_ADVISE_MR_ADVICE, advice.0.into());
        ioctl.u32(ids::ATTR_ADVISE_MR_FLAGS, flags.bits());
        ioctl.input(ids::ATTR_ADVISE_MR_SGE_LIST, sges.as_bytes());
        ioctl.run(self).map(drop)
    }
}
