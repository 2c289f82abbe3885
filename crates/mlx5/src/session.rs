//! Compressed CQEs.
//!
//! A session of `n` completions occupies `n` CQEs. The first is the title: a CQE
//! of the first completion whose format is "compressed" and whose byte count is
//! `n`. The second slot, and every eighth after the title, has an array of eight
//! mini CQEs; the other slots are stale. Only the title has an owner bit, and it
//! is written last.
//!
//! A mini CQE of a receive has a hash or a checksum, which is not used, and the
//! byte count; its WQE counter is one more than the previous one's. One of a send
//! has its WQE counter, its opcode, and the byte count.

use std::mem::offset_of;

use crate::abi::{CQE_FORMAT, CQE_OWNER, CQE_TITLE, Cqe, MINI_ARRAY, MiniCqe, cqe_opcode};
use crate::{CompletionError, CqeRing};

/// A session of compressed CQEs.
#[derive(Debug, Default)]
pub(crate) struct Session {
    /// Unread completions.
    pub left: u32,
    /// Read completions.
    read: u32,
    title: Cqe,
    /// A copy: its slot is released before all of it is read.
    array: [MiniCqe; MINI_ARRAY],
}

/// Returns whether a CQE with this last byte is a title, in a ring with compression.
pub(crate) fn is_title(op_own: u8) -> bool {
    op_own & CQE_FORMAT == CQE_TITLE
}

impl CqeRing {
    /// Opens the session with the title at `at`.
    ///
    /// # Errors
    /// [`CompletionError::BadSession`]: none of it can be read.
    pub(crate) fn open_session(&mut self, at: u32, title: Cqe) -> Result<(), CompletionError> {
        let left = u32::from_be(title.byte_cnt);
        let kind = title.op_own >> 4;
        if !(2..=self.capacity()).contains(&left) || kind > cqe_opcode::RESP_SEND_INV {
            return Err(CompletionError::BadSession { count: left });
        }
        // SAFETY: an entry that the device wrote before the title and does not own; any bytes
        // are an array.
        let array = unsafe { self.slot(at.wrapping_add(1)).cast().read() };
        self.session = Session {
            left,
            read: 0,
            title,
            array,
        };
        Ok(())
    }

    /// Expands the next completion of the session to the CQE for `at`. The
    /// session must have one.
    pub(crate) fn expand(&mut self, at: u32) -> Cqe {
        let (slot, round) = (self.slot(at), self.round(at));
        let session = &mut self.session;
        let in_array = session.read as usize % MINI_ARRAY;
        if in_array == 0 && session.read != 0 {
            // SAFETY: as in `open_session`.
            session.array = unsafe { slot.cast().read() };
        }
        let mini = session.array[in_array];
        let mut cqe = session.title;
        cqe.byte_cnt = mini.byte_cnt;
        if cqe.op_own >> 4 == cqe_opcode::REQ {
            cqe.wqe_counter = mini.wqe_counter;
            let number = u32::from_be(cqe.sop_drop_qpn) & 0xff_ffff;
            cqe.sop_drop_qpn = (u32::from(mini.opcode) << 24 | number).to_be();
        } else {
            let first = u16::from_be(cqe.wqe_counter);
            cqe.wqe_counter = first.wrapping_add(session.read as u16).to_be();
        }
        cqe.op_own = cqe.op_own & !CQE_FORMAT & !CQE_OWNER | round;
        cqe
    }

    /// Consumes the completion that was expanded at `at`.
    pub(crate) fn advance_session(&mut self, at: u32) {
        self.session.left -= 1;
        self.session.read += 1;
        // The slot may have any owner bit: it gets the current round's.
        // SAFETY: a byte of an entry that the device does not own.
        unsafe {
            let owner = self.slot(at).cast::<u8>().add(offset_of!(Cqe, op_own));
            owner.write(self.round(at));
        }
    }

    /// Expands unread sessions in the ring, so that every unread completion has a
    /// CQE.
    pub(crate) fn write_out(&mut self) {
        let mut at = self.position();
        loop {
            while self.session.left != 0 {
                let cqe = self.expand(at);
                self.advance_session(at);
                // SAFETY: as in `advance_session`; an array there has been copied.
                unsafe { self.slot(at).write(cqe) };
                at = at.wrapping_add(1);
            }
            self.session = Session::default();
            if at.wrapping_sub(self.position()) >= self.capacity() {
                return;
            }
            let Some((cqe, op_own)) = self.written(at) else {
                return;
            };
            if !(self.compresses() && is_title(op_own) && self.open_session(at, cqe.copy()).is_ok())
            {
                at = at.wrapping_add(1);
            }
        }
    }
}
