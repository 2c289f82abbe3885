//! Addresses of queues, for programs that access them directly (`mlx5dv_init_obj`).
//!
//! From then on the program owns a queue's indices. The writers and the reader of this crate
//! must not be used on it; they stay sound, since they trust nothing in its memory.

use std::ptr::NonNull;

use crate::abi::BLOCK;
use crate::memory::QueueMemory;
use crate::{
    Address, Arming, CqeRing, DeviceBytes, DeviceContext, QpQueues, SendQueue, SharedQueue,
};

/// Entries in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectRing {
    /// The first entry.
    pub entries: NonNull<u8>,
    /// Number of entries.
    pub count: u32,
    /// Bytes from an entry to the next.
    pub stride: u32,
    /// The first of the queue's two doorbell records.
    pub records: NonNull<u8>,
}

impl DirectRing {
    /// Entries at the beginning of the memory.
    fn of(memory: &QueueMemory, count: u32, stride: u32) -> Self {
        Self {
            entries: memory.entries.first(),
            count,
            stride,
            records: memory.records.first(),
        }
    }
}

/// A doorbell register of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectRegister {
    /// The first half of the register.
    pub at: NonNull<u8>,
    /// Bytes of a half; 0: doorbells only.
    pub half: u32,
    /// The offset in the device's file at which its page is mapped.
    pub file_offset: u64,
}

impl SendQueue {
    /// The send queue's blocks. Their doorbell record is the second one.
    pub fn direct(&self) -> DirectRing {
        let queues = self.queues();
        DirectRing {
            entries: queues.send_at(),
            count: queues.send.blocks,
            stride: BLOCK as u32,
            records: queues.memory.records.first(),
        }
    }

    /// The receives of the same queue pair. Their doorbell record is the first one.
    pub fn direct_receives(&self) -> DirectRing {
        self.queues().direct()
    }

    /// The register that its doorbells use.
    pub fn direct_register(&self) -> DirectRegister {
        let register = self.register();
        DirectRegister {
            at: register.get().address(),
            half: register.get().room() as u32,
            file_offset: register.file_offset(),
        }
    }
}

impl QpQueues {
    /// The receive queue. Its doorbell record is the first one.
    pub fn direct(&self) -> DirectRing {
        DirectRing::of(&self.memory, self.recv.entries, 1 << self.recv.shift)
    }
}

impl CqeRing {
    /// The CQEs. From now on, destroying or resetting a queue pair leaves its CQEs in the
    /// queue, since only the program knows which CQEs it has read.
    pub fn direct(&mut self) -> DirectRing {
        self.is_direct = true;
        DirectRing {
            entries: self.memory().first(),
            count: self.capacity(),
            stride: self.format().bytes() as u32,
            records: self.records().first(),
        }
    }
}

impl Arming {
    /// The CQ number.
    pub fn cqn(&self) -> u32 {
        self.cqn
    }
}

impl DeviceContext {
    /// The UAR page by which completion queues are armed, at
    /// `MLX5_CQ_DOORBELL` of it.
    pub fn direct_cq_uar(&self) -> NonNull<u8> {
        self.arm.start
    }

    /// The address of that pointer, valid as long as the context is not moved.
    pub fn direct_cq_uar_ptr(&self) -> NonNull<NonNull<u8>> {
        NonNull::from(&self.arm.start)
    }
}

impl SharedQueue {
    /// The entries, and the slots of the next receive and of the last entry.
    pub fn direct(&self) -> (DirectRing, u16, u16) {
        let entries = self.entries();
        let (head, last, stride) = entries.enter().ends();
        let ring = DirectRing::of(entries.memory(), entries.capacity() + 1, stride);
        (ring, head, last)
    }
}

impl Address {
    /// The address vector in the format of a send WQE (`struct mlx5_wqe_av`).
    pub fn direct(&self) -> NonNull<u8> {
        NonNull::from(&self.0).cast()
    }
}

impl DeviceBytes {
    /// The first mapped byte, and the number of bytes.
    pub fn direct(&self) -> (NonNull<u8>, usize) {
        (self.words().address(), self.words().len())
    }
}
