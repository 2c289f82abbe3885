//! The kernel's checks of a command (`ib_uverbs_ioctl` in `uverbs_ioctl.c`), and the
//! lengths of write commands (`uverbs_cmd.c`).

use std::collections::BTreeMap;

use super::call::{IoctlCall, Target};
use super::methods::{AttrType as Ty, Methods};
use crate::Errno;
use crate::abi::ids::*;
use crate::abi::ioctl::ATTR_F_MANDATORY;
use crate::abi::write::cmd::*;
use crate::abi::write::*;

/// Effect of a command on objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    None,
    Creates(u16),
    CreatesFd,
    Destroys(u32),
}

struct WriteSpec {
    number: u32,
    /// Minimum lengths of input and output.
    sizes: (usize, usize),
    creates: Option<u16>,
    creates_fd: bool,
}

const fn write<I, O>(number: u32) -> WriteSpec {
    WriteSpec {
        number,
        sizes: (size_of::<I>(), size_of::<O>()),
        creates: None,
        creates_fd: false,
    }
}

const fn write_new<I, O>(number: u32, object: u16) -> WriteSpec {
    WriteSpec {
        number,
        sizes: (size_of::<I>(), size_of::<O>()),
        creates: Some(object),
        creates_fd: false,
    }
}

const WRITES: &[WriteSpec] = &[
    write_new::<AllocPd, AllocPdResp>(CMD_ALLOC_PD, OBJECT_PD),
    write_new::<RegMr, RegMrResp>(CMD_REG_MR, OBJECT_MR),
    write::<ReregMr, ReregMrResp>(CMD_REREG_MR),
    write_new::<AllocMw, AllocMwResp>(CMD_ALLOC_MW, OBJECT_MW),
    WriteSpec {
        number: CMD_CREATE_COMP_CHANNEL,
        sizes: (8, 4),
        creates: None,
        creates_fd: true,
    },
    write::<ResizeCq, ResizeCqResp>(CMD_RESIZE_CQ),
    write::<ReqNotifyCq, ()>(CMD_REQ_NOTIFY_CQ),
    write::<ExModifyCq, ()>(CMD_FLAG_EXTENDED | EX_CMD_MODIFY_CQ),
    write::<ExModifyWq, ()>(CMD_FLAG_EXTENDED | EX_CMD_MODIFY_WQ),
    write_new::<ExCreateRwqIndTable, ExCreateRwqIndTableResp>(
        CMD_FLAG_EXTENDED | EX_CMD_CREATE_RWQ_IND_TBL,
        OBJECT_RWQ_IND_TBL,
    ),
    write::<ModifySrq, ()>(CMD_MODIFY_SRQ),
    write::<QuerySrq, QuerySrqResp>(CMD_QUERY_SRQ),
    write::<ModifyQp, ()>(CMD_MODIFY_QP),
    write::<ModifyQp, ExModifyQpResp>(CMD_FLAG_EXTENDED | CMD_MODIFY_QP),
    write::<QueryQp, QueryQpResp>(CMD_QUERY_QP),
    write_new::<OpenQp, CreateQpResp>(CMD_OPEN_QP, OBJECT_QP),
    write::<AttachMcast, ()>(CMD_ATTACH_MCAST),
    write::<DetachMcast, ()>(CMD_DETACH_MCAST),
    write_new::<CreateAh, CreateAhResp>(CMD_CREATE_AH, OBJECT_AH),
    write_new::<OpenXrcd, OpenXrcdResp>(CMD_OPEN_XRCD, OBJECT_XRCD),
    write::<QueryDevice, QueryDeviceResp>(CMD_QUERY_DEVICE),
    WriteSpec {
        number: CMD_FLAG_EXTENDED | CMD_QUERY_DEVICE,
        sizes: (8, core::mem::offset_of!(ExQueryDeviceResp, odp_caps)),
        creates: None,
        creates_fd: false,
    },
];

fn require(condition: bool, errno: i32) -> Result<(), Errno> {
    if condition {
        Ok(())
    } else {
        Err(Errno::new(errno))
    }
}

/// Checks a command as the kernel does before running it.
pub fn check(
    methods: &Methods,
    call: &IoctlCall,
    live: &BTreeMap<u32, u16>,
) -> Result<Effect, Errno> {
    let known = methods.of(call.object, call.method).next().is_some();
    require(known, libc::EPROTONOSUPPORT)?;
    let mut effect = Effect::None;
    for (index, recorded) in call.attrs.iter().enumerate() {
        let given = &recorded.attr;
        let Some(ty) = methods.attr(call.object, call.method, given.attr_id) else {
            require(given.flags & ATTR_F_MANDATORY == 0, libc::EPROTONOSUPPORT)?;
            continue;
        };
        let earlier = call.attrs.get(..index).unwrap_or_default();
        require(
            earlier
                .iter()
                .all(|other| other.attr.attr_id != given.attr_id),
            libc::EINVAL,
        )?;
        let [value, reserved] = given.enum_or_reserved.to_ne_bytes();
        let values = match ty {
            Ty::Enum(count) => count,
            _ => 1,
        };
        require(
            given.flags & !ATTR_F_MANDATORY == 0 && value < values && reserved == 0,
            libc::EINVAL,
        )?;
        match ty {
            Ty::In(least, greatest) => {
                require((least..=greatest).contains(&given.len), libc::EINVAL)?
            }
            Ty::Out(least) => require(given.len >= least, libc::EINVAL)?,
            _ => require(given.len == 0, libc::EINVAL)?,
        }
        match ty {
            Ty::New(object) => effect = Effect::Creates(object),
            Ty::NewFd => effect = Effect::CreatesFd,
            Ty::Object(object) | Ty::Destroy(object) => {
                let handle = u32::try_from(given.data).map_err(|_| Errno::new(libc::EINVAL))?;
                match live.get(&handle) {
                    Some(&found) => require(found == object, libc::EINVAL)?,
                    None => return Err(Errno::new(libc::ENOENT)),
                }
                if matches!(ty, Ty::Destroy(_)) {
                    effect = Effect::Destroys(handle);
                }
            }
            Ty::Fd => require(i32::try_from(given.data).is_ok(), libc::EBADF)?,
            Ty::In(..) | Ty::Out(_) | Ty::Enum(_) => {}
        }
    }
    let mut attrs = methods.attrs(call.object, call.method);
    let complete = attrs.all(|attr| !attr.mandatory || call.attr(attr.id).is_some());
    require(complete, libc::EINVAL)?;
    match call.target() {
        Target::Write(number) => check_write(call, number),
        Target::Method(..) => Ok(effect),
    }
}

fn check_write(call: &IoctlCall, number: u32) -> Result<Effect, Errno> {
    let spec = WRITES
        .iter()
        .find(|spec| spec.number == number)
        .ok_or(Errno::new(libc::EOPNOTSUPP))?;
    let len_in = call.bytes(ATTR_CORE_IN).map_or(0, <[u8]>::len);
    let len_out = call
        .attr(ATTR_CORE_OUT)
        .map_or(0, |recorded| usize::from(recorded.attr.len));
    require(
        len_in >= spec.sizes.0 && len_out >= spec.sizes.1,
        libc::ENOSPC,
    )?;
    Ok(match spec.creates {
        Some(object) => Effect::Creates(object),
        None if spec.creates_fd => Effect::CreatesFd,
        None => Effect::None,
    })
}
