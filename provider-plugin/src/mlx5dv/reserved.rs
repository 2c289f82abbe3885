//! Reserved QP numbers, which no queue pair gets, for the connection manager.

use core::ffi::c_int;
use std::sync::{Mutex, PoisonError};

use mlx5::commands::ReservedNumbers;

use super::{exported, is_ours};
use crate::abi::ibv_context;
use crate::context::CtxRef;
use crate::entry;
use crate::errno::Errno;

/// The reserved numbers of a context.
#[derive(Debug, Default)]
pub struct ReservedQpns(Mutex<Vec<QpnBlock>>);

/// A block of reserved numbers. They are handed out in order, each once, so that a freed
/// number is not reused soon.
#[derive(Debug)]
struct QpnBlock {
    numbers: ReservedNumbers<CtxRef>,
    /// Numbers that were handed out.
    given: u32,
    /// Numbers in use.
    used: Vec<u32>,
}

impl ReservedQpns {
    fn locked<T>(&self, what: impl FnOnce(&mut Vec<QpnBlock>) -> T) -> T {
        what(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Frees all blocks, before the context is closed.
    pub fn clear(&self) {
        self.locked(Vec::clear);
    }

    fn take(&self, ctx: &CtxRef) -> Result<u32, Errno> {
        self.locked(|blocks| {
            let has_room = |block: &QpnBlock| block.given < block.numbers.count;
            if !blocks.last().is_some_and(has_room) {
                blocks.try_reserve(1).map_err(|_| Errno::NOMEM)?;
                blocks.push(QpnBlock {
                    numbers: ReservedNumbers::create(ctx)?,
                    given: 0,
                    used: Vec::new(),
                });
            }
            let block = blocks.last_mut().ok_or(Errno::NOMEM)?;
            block.used.try_reserve(1).map_err(|_| Errno::NOMEM)?;
            let number = block.numbers.first + block.given;
            block.given += 1;
            block.used.push(number);
            Ok(number)
        })
    }

    /// Frees a number. A block is freed when all its numbers were handed out and freed.
    fn free(&self, number: u32) -> Result<(), Errno> {
        self.locked(|blocks| {
            let found = blocks.iter_mut().enumerate().find_map(|(at, block)| {
                let used = block.used.iter().position(|used| *used == number)?;
                block.used.swap_remove(used);
                Some(at)
            });
            let at = found.ok_or(Errno::INVAL)?;
            let block = &blocks[at];
            if block.used.is_empty() && block.given >= block.numbers.count {
                blocks.remove(at);
            }
            Ok(())
        })
    }
}

exported! {
    /// `mlx5dv_reserved_qpn_alloc`.
    fn mlx5dv_reserved_qpn_alloc(context: *mut ibv_context, number: *mut u32) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: an open context, and room for the number.
        entry::int(|| unsafe {
            let ctx = CtxRef::of(context);
            number.write(ctx.reserved().take(&ctx)?);
            Ok(())
        })
    }

    /// `mlx5dv_reserved_qpn_dealloc`. EINVAL for a number that is not reserved.
    fn mlx5dv_reserved_qpn_dealloc(context: *mut ibv_context, number: u32) -> c_int
    where is_ours(context), else libc::EOPNOTSUPP => {
        // SAFETY: an open context.
        entry::int(|| unsafe { CtxRef::of(context).reserved().free(number) })
    }
}
