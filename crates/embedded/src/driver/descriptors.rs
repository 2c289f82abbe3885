//! Descriptors of programs that use a device through system calls.

use std::fmt;
use std::os::fd::RawFd;

use uverbs::{AccessFlags, Errno, QpState, QpType};

use crate::driver::cause::VerbError;

/// A change of a program's objects.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectChange {
    /// A queue pair was created.
    QueuePairCreated {
        /// Its number.
        number: u32,
        /// Its type.
        kind: QpType,
        /// The user handle of the command: in libibverbs the address of the `ibv_qp`.
        user_handle: u64,
        /// Sizes of its send and its receive queue, as far as it has them.
        entries: [u32; 2],
        /// Maximum number of sends that its queue has room for, if they are as short as possible.
        send_blocks: u32,
        /// Each send has a completion, also one that asks for none.
        signals_all: bool,
        /// Longest data in a send itself, in bytes.
        max_inline: u32,
        /// Handle of its shared receive queue.
        shared_queue: Option<u32>,
        /// User handle of the completion queue of its receives; `None` if it is a DC target, or
        /// if its shared receive queue has one of its own.
        receive_queue: Option<u64>,
    },
    /// A queue pair was moved to a state. RESET empties its queues.
    QueuePairModified {
        /// Its number.
        number: u32,
        /// The state.
        state: QpState,
        /// Its attributes.
        attributes: QueuePairAttributes,
    },
    /// A queue pair was destroyed.
    QueuePairDestroyed {
        /// Its number.
        number: u32,
    },
    /// A completion queue was created.
    CompletionQueueCreated {
        /// Its number.
        number: u32,
        /// The user handle of the command: in libibverbs the address of the `ibv_cq`.
        user_handle: u64,
        /// More completions than it has entries are not an error of the queue.
        ignores_overrun: bool,
    },
    /// A completion queue was destroyed.
    CompletionQueueDestroyed {
        /// As it was created.
        user_handle: u64,
        /// Number of its completion events that the program has read.
        events: u32,
    },
    /// A memory region was registered, or registered anew.
    RegionRegistered {
        /// Its key.
        key: u32,
        /// First address that requests use.
        iova: u64,
        /// Where it is in the program's memory.
        address: u64,
        /// Length in bytes.
        length: u64,
        /// Its rights.
        access: AccessFlags,
    },
    /// A memory region was deregistered.
    RegionDeregistered {
        /// Its key.
        key: u32,
    },
    /// The limit of a shared receive queue was set, for one event.
    ReceiveLimitSet {
        /// Handle of the queue.
        handle: u32,
    },
    /// The program has read an entry of the GID table.
    GidQueried {
        /// Its index; `None` for all entries.
        index: Option<u32>,
    },
    /// An object of a context was created, whatever its type.
    Created {
        /// Its handle.
        handle: u32,
        /// Its type.
        name: &'static str,
        /// Its number in the device; 0 if it has none.
        number: u32,
    },
    /// An object of a context was destroyed, by a command about it.
    Destroyed {
        /// Its handle.
        handle: u32,
        /// As it was created, of an object that has asynchronous events.
        user_handle: u64,
        /// Number of its asynchronous events that the program has read.
        events: u32,
    },
}

/// Attributes of a queue pair, as the program has set them so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePairAttributes {
    /// There is a global route.
    pub is_global: bool,
    /// Index of the source GID, and the GID.
    pub source: (u8, [u8; 16]),
    /// GID of the peer's port; without a global route its LID, in the last bytes.
    pub destination: [u8; 16],
    /// The path's hop limit.
    pub hop_limit: u8,
    /// As in `ibv_qp_attr`.
    pub timeout: u8,
    /// As in `ibv_qp_attr`.
    pub retry_count: u8,
    /// As in `ibv_qp_attr`.
    pub rnr_retry: u8,
    /// As in `ibv_qp_attr`.
    pub max_dest_rd_atomic: u8,
    /// Rights of the peer.
    pub access: AccessFlags,
}

/// Translates between the descriptors of a device and those of a program, which it may
/// duplicate and close in any order. Called under the device's lock: must not call the
/// device.
pub trait Descriptors: Send + Sync + fmt::Debug {
    /// Returns the device's descriptor for one of the program. Other numbers are returned
    /// unchanged.
    fn device(&self, program: RawFd) -> RawFd;

    /// Creates and returns a descriptor of the program for a new event file. The device's
    /// descriptor must be passed to [`Kernel::close`](uverbs::kernel::Kernel::close) when the
    /// program's last one is closed.
    ///
    /// # Errors
    /// EMFILE, ENOMEM: the event file is not created.
    fn publish(&self, device: RawFd) -> std::result::Result<RawFd, Errno>;

    /// Called when the device has refused a command of the program, not under its lock.
    fn command_refused(&self, _error: &VerbError) {}

    /// Called when the program has created a completion queue, with the user handle of the
    /// command: in libibverbs the queue's address.
    fn queue_created(&self, _user_handle: u64) {}

    /// Called when a command of the program has changed an object, if the device has an
    /// observer.
    fn object_changed(&self, _change: &ObjectChange) {}
}
