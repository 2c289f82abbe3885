//! What the kernel is asked: device discovery, typed uverbs commands, handles.
//!
//! ```text
//! discovery ── netlink, sysfs ──► Device ──► Context ──► Pd, Mr, Mw, Cq, Srq, Qp, Ah, Xrcd,
//!                                                        CompletionChannel, AsyncEventFile
//! ```
//!
//! A [`Context`] is an open uverbs character device. Each object made in it is
//! a handle that destroys its object once: [`destroy`](Qp::destroy) reports a
//! failure and gives the handle back, drop reports it through `tracing`. The
//! handles are generic over how the context is referred to ([`ContextRef`]): an
//! `Arc<Context>`, a plain reference, or a caller's own pointer.
//!
//! Each object's module also has its commands as functions over `&Context` and
//! a typed handle number, for a caller that keeps the number elsewhere (a
//! libibverbs provider keeps it in libibverbs's structures).
//!
//! What all devices' work requests and completions have in common is here too:
//! [`Opcode`], [`SendFlags`], [`Sge`], [`WorkCompletion`].
//!
//! Commands go through the ioctl interface: its own method where Linux 6.1 has
//! one, else the write command invoked through ioctl. A command that succeeds
//! allocates nothing; frames are on the stack.
//!
//! Every system call is behind [`kernel::Kernel`]: [`kernel::RealKernel`] calls
//! libc, the fake (feature `fake`) records and answers.
//!
//! # What is safe
//!
//! Nothing that safe code can ask for here has the kernel or a device touch
//! memory of the process, or a file that the program does not hold: what
//! registers memory, tells a driver addresses, or takes a bare descriptor is
//! unsafe.
//!
//! Handle numbers are plain numbers, and a command by number, or a handle made
//! by `from_handle`, acts on whatever object of the context has that number,
//! whoever made it. It can stop, reconnect or destroy the object, and so undo
//! what its owner knows about it: that its queue pair goes on from where it is,
//! that what was posted will complete, that the region of a buffer is its own.
//! Whoever posts work requests relies on that. Posting is unsafe in the crates of
//! the devices, and part of what the poster answers for is that nobody else
//! commands those objects: it keeps the context to itself, as `ringverbs` does.
//!
//! All types are `Send` and `Sync` where their context reference is: the kernel
//! serialises commands of one context itself.

pub mod abi;
pub mod ah;
mod async_event;
mod attr;
mod channel;
mod command;
mod context;
pub mod cq;
pub mod discovery;
mod dmabuf;
mod doorbell;
pub mod environment;
mod error;
mod event_file;
mod handle;
pub mod kernel;
pub mod mlx5_dm;
pub mod mlx5_import;
pub mod mlx5_uar;
pub mod mr;
pub mod mw;
mod number;
mod operation;
pub mod pd;
pub mod qp;
mod qp_attr;
mod query;
pub mod srq;
pub mod xrcd;

#[cfg(test)]
mod tests;

pub use abi::verbs::{GidEntry, QpCap, QueryPortRespEx as PortAttr};
pub use abi::write::{
    ExQueryDeviceResp as DeviceAttrEx, QueryDeviceResp as DeviceAttr, Sge, WorkCompletion,
};
pub use ah::Ah;
pub use async_event::{AsyncEvent, AsyncEventFile, AsyncEventType};
pub use attr::{AccessFlags, AhAttr, CqFlags, GlobalRoute, QpCreateFlags, QpState, QpType};
pub use channel::CompletionChannel;
pub use command::Udata;
pub use context::{Context, ContextInfo, ContextRef};
pub use cq::{Cq, CqEvents, CqInit};
pub use dmabuf::Dmabuf;
pub use doorbell::{DirectDoorbell, PostSendDoorbell, Refused};
pub use error::{Command, Errno, Error};
pub use handle::{
    AhHandle, CqHandle, DmHandle, Mlx5UarHandle, MrHandle, MwHandle, PdHandle, QpHandle, SrqHandle,
    XrcdHandle,
};
pub use mlx5_dm::{Mlx5Dm, Mlx5DmPlace};
pub use mlx5_uar::{Mlx5Uar, Mlx5UarKind, Mlx5UarPlace};
pub use mr::{Advice, AdviseFlags, DmMrInit, DmabufMrInit, Mr, MrAttr, MrInit, Rereg};
pub use mw::{Mw, MwType};
pub use operation::{OneElement, Opcode, SendFlags};
pub use pd::Pd;
pub use qp::{Qp, QpInit, QpInitQuery, QpOpen};
pub use qp_attr::{QpAttr, QpAttrMask};
pub use srq::{Srq, SrqAttr, SrqInit, SrqKind, SrqModify};
pub use xrcd::{Xrcd, XrcdOpen};
