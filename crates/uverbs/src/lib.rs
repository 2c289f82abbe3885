//! Device discovery, typed uverbs commands, and handles of kernel objects.
//!
//! ```text
//! discovery ── netlink, sysfs ──► Device ──► Context ──► Pd, Mr, Mw, Cq, Srq, Qp, Ah, Xrcd,
//!                                                        CompletionChannel, AsyncEventFile
//! ```
//!
//! A [`Context`] is an open uverbs character device. Each object created in it
//! is a handle that destroys the object once: [`destroy`](Qp::destroy) reports
//! a failure and returns the handle; dropping reports it through `tracing`.
//! Handles are generic over how they refer to the context ([`ContextRef`]): an
//! `Arc<Context>`, a plain reference, or a caller's own pointer.
//!
//! Each object's module also exposes its commands as functions that take
//! `&Context` and a typed handle number, for callers that store the number
//! elsewhere (a libibverbs provider stores it in libibverbs's structures).
//!
//! The types that work requests and completions of all devices share are here
//! too: [`Opcode`], [`SendFlags`], [`Sge`], [`WorkCompletion`].
//!
//! Commands use the ioctl interface: a native method where Linux 6.1 has one,
//! otherwise the write command invoked through ioctl. A successful command
//! allocates nothing; its frame is on the stack.
//!
//! The ioctl methods of a device's driver belong to the device's crate, which
//! builds them by [`driver`].
//!
//! All system calls go through [`kernel::Kernel`]: [`kernel::RealKernel`] calls
//! libc, the fake (feature `fake`) records the calls and returns prepared
//! answers.
//!
//! # Safety
//!
//! Safe code cannot make the kernel or a device access memory of the process,
//! or a file that the program does not hold. Functions that register memory,
//! pass addresses to a driver, or take a bare descriptor are unsafe.
//!
//! Handle numbers are plain numbers. A command by number, or a handle made by
//! `from_handle`, acts on whatever object of the context has that number,
//! regardless of who created it. It can stop, reconnect or destroy the object,
//! and so invalidate what the owner assumes: that its queue pair keeps its
//! state, that posted work requests will complete, that the region of a buffer
//! is its own. Posting relies on these assumptions. It is therefore unsafe in
//! the crates of the devices, and the poster must guarantee that nobody else
//! commands those objects; `ringverbs` does so by keeping the context private.
//!
//! All types are `Send` and `Sync` if their context reference is: the kernel
//! serialises the commands of a context.

pub mod abi;
pub mod ah;
mod async_event;
mod attr;
mod channel;
mod command;
mod context;
mod counters;
pub mod cq;
pub mod discovery;
pub mod dm;
mod dmabuf;
pub mod dmah;
mod doorbell;
pub mod driver;
pub mod environment;
mod error;
mod event_file;
pub mod flow;
mod handle;
pub mod kernel;
pub mod mr;
pub mod mw;
mod names;
mod number;
mod operation;
pub mod pd;
pub mod qp;
mod qp_attr;
mod query;
mod reason;
mod send_wr;
pub mod srq;
pub mod threads;
pub mod wq;
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
pub use counters::Counters;
pub use cq::{Cq, CqEvents, CqInit};
pub use dm::Dm;
pub use dmabuf::Dmabuf;
pub use doorbell::{DirectDoorbell, DoorbellError, PostSendDoorbell};
pub use error::{Command, Errno, Error};
pub use handle::{
    AhHandle, CountersHandle, CqHandle, DmHandle, DmahHandle, Existence, FlowHandle, MrHandle,
    MwHandle, PdHandle, QpHandle, SrqHandle, WqHandle, WqTableHandle, XrcdHandle,
};
pub use mr::{Advice, AdviseFlags, DmMrInit, DmabufMrInit, Mr, MrAttr, MrInit, Rereg};
pub use mw::{Mw, MwType};
pub use names::{completed_opcode_name, opcode_name, state_name, status_name};
pub use operation::{Opcode, SendFlags};
pub use pd::Pd;
pub use qp::{Qp, QpInit, QpInitQuery, QpOpen};
pub use qp_attr::{QpAttr, QpAttrMask};
pub use reason::Reason;
pub use send_wr::{Bind, Data, Destination, Operands, PostError, RemoteMemory, SendWr};
pub use srq::{Srq, SrqAttr, SrqInit, SrqKind, SrqModify};
pub use wq::{Wq, WqChange, WqInit, WqState};
pub use xrcd::{Xrcd, XrcdOpen};
