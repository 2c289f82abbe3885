//! A context whose commands go to the fake kernel and whose mappings are those of a
//! memory file.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use uverbs::abi::ids::*;
use uverbs::abi::write::cmd;
use uverbs::kernel::fake::{DRIVER, FakeKernel, Target};
use uverbs::{Context, Pd, Udata};

pub const CREATE_CQ: Target = Target::Method(OBJECT_CQ, METHOD_CQ_CREATE);
pub const CREATE_QP: Target = Target::Method(OBJECT_QP, METHOD_QP_CREATE);
pub const CREATE_SRQ: Target = Target::Method(OBJECT_SRQ, METHOD_SRQ_CREATE);
pub const RESIZE_CQ: Target = Target::Write(cmd::CMD_RESIZE_CQ);
pub const MODIFY_SRQ: Target = Target::Write(cmd::CMD_MODIFY_SRQ);
pub const CREATE_AH: Target = Target::Write(cmd::CMD_CREATE_AH);

/// A fake kernel, the memory file of its queues, and a context on both.
pub struct Machine {
    pub fake: Arc<FakeKernel>,
    pub memory: File,
    pub context: Arc<Context>,
}

impl Machine {
    pub fn new() -> Self {
        let fake = FakeKernel::new();
        let memory = super::memory();
        // SAFETY: the descriptor is open while the context is in use: this value drops both
        // together, and tests drop their clones of the context before it.
        let context = unsafe {
            Context::from_borrowed_fd(Box::new(Arc::clone(&fake)), memory.as_raw_fd(), DRIVER)
        };
        Self {
            fake,
            memory,
            context: Arc::new(context),
        }
    }

    /// Creates a queue at the end of the memory file.
    pub fn queue(&self, log2_stride: u32, slots: u32) -> super::Driver {
        let end = self.memory.metadata().unwrap().len();
        // No queue is at offset 0, so that tests detect an offset that is ignored.
        let offset = end.max(4096);
        super::Driver::at(self.memory.try_clone().unwrap(), offset, log2_stride, slots)
    }

    /// Allocates a protection domain.
    pub fn pd(&self) -> Pd<Arc<Context>> {
        Pd::alloc(&self.context, Udata::none()).unwrap()
    }

    /// Returns the types of the objects that exist.
    pub fn live(&self) -> Vec<u16> {
        let live = self.fake.live_objects().into_iter();
        live.map(|(_, object)| object).collect()
    }
}

/// Returns the kernel's response with the capacities of a queue pair.
pub fn cap(send_sge: u32, recv_sge: u32, inline: u32) -> [u8; 20] {
    let mut bytes = [0; 20];
    for (to, word) in bytes.chunks_mut(4).zip([7, 7, send_sge, recv_sge, inline]) {
        to.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}
