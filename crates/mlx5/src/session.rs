//! Compressed completions.
//!
//! A session of `n` completions takes the places of `n` entries. The first has
//! the title: the first completion, but for its format and for its byte count,
//! which is `n`. The second place, and every eighth after the title, has an
//! array of eight that are told by eight bytes each; what the other places have
//! is old. The title alone has an owner bit, and is written last.
//!
//! Of a completion of the peer's message the eight bytes are a hash or a
//! checksum, of which nothing here has a use, and the byte count; its slot is
//! the one after the last one's. Of one of this side's work requests they are
//! its slot, its opcode, and the byte count.

use std::mem::offset_of;

use crate::abi::{CQE_FORMAT, CQE_OWNER, CQE_TITLE, Cqe, MINI_ARRAY, MiniCqe, cqe_opcode};
use crate::{CompletionError, CompletionRing};

/// What is left of a session.
#[derive(Debug, Default)]
pub(crate) struct Session {
    /// Completions.
    pub left: u32,
    /// Those that were read.
    read: u32,
    title: Cqe,
    /// A copy: its place is given back before all of it is read.
    array: [MiniCqe; MINI_ARRAY],
}

impl Session {
    /// One step back, if one was just taken.
    pub fn undo(&mut self) {
        self.left += 1;
        self.read = self.read.wrapping_sub(1);
    }
}

impl Cqe {
    /// Whether it stands for several.
    #[inline(always)]
    pub(crate) fn is_title(&self) -> bool {
        self.op_own & CQE_FORMAT == CQE_TITLE
    }
}

impl CompletionRing {
    /// Begins the session of a title at the position.
    ///
    /// # Errors
    /// [`CompletionError::BadSession`]: none of it can be read.
    #[cold]
    pub(crate) fn open_session(&mut self, at: u32, title: &Cqe) -> Result<(), CompletionError> {
        let left = u32::from_be(title.byte_cnt);
        let kind = title.opcode();
        if !(2..=self.capacity()).contains(&left) || kind > cqe_opcode::RESP_SEND_INV {
            return Err(CompletionError::BadSession { count: left });
        }
        // SAFETY: an entry, which is this side's with the title; any bytes are
        // an array.
        let array = unsafe { self.slot(at.wrapping_add(1)).cast().read() };
        self.session = Session {
            left,
            read: 0,
            title: *title,
            array,
        };
        Ok(())
    }

    /// The next completion of the session, which is not over, in the place at
    /// `at`.
    pub(crate) fn next_of_session(&mut self, at: u32) -> Cqe {
        let slot = self.slot(at);
        let session = &mut self.session;
        let in_array = session.read as usize % MINI_ARRAY;
        if in_array == 0 && session.read != 0 {
            // SAFETY: as in `open_session`.
            session.array = unsafe { slot.cast().read() };
        }
        let mini = session.array[in_array];
        let mut cqe = session.title;
        cqe.byte_cnt = mini.byte_cnt;
        if cqe.opcode() == cqe_opcode::REQ {
            cqe.wqe_counter = mini.wqe_counter;
            let number = u32::from_be(cqe.sop_drop_qpn) & 0xff_ffff;
            cqe.sop_drop_qpn = (u32::from(mini.opcode) << 24 | number).to_be();
        } else {
            let first = u16::from_be(cqe.wqe_counter);
            cqe.wqe_counter = first.wrapping_add(session.read as u16).to_be();
        }
        let round = self.round(at);
        cqe.op_own = cqe.op_own & !CQE_FORMAT & !CQE_OWNER | round;
        let session = &mut self.session;
        session.left -= 1;
        session.read += 1;
        // What the place has may be of any round: from now on it is of this one.
        // SAFETY: a byte of an entry that is this side's.
        unsafe {
            let owner = slot.cast::<u8>().add(offset_of!(Cqe, op_own));
            owner.write(round);
        }
        cqe
    }

    /// Writes out what is unread of sessions, so that every unread completion
    /// has an entry.
    pub(crate) fn write_out(&mut self) {
        let mut at = self.position();
        loop {
            while self.session.left != 0 {
                let cqe = self.next_of_session(at);
                // SAFETY: as in `next_of_session`; an array there has been
                // copied.
                unsafe { self.slot(at).write(cqe) };
                at = at.wrapping_add(1);
            }
            self.session = Session::default();
            self.stand_at(self.position());
            if at.wrapping_sub(self.position()) >= self.capacity() {
                return;
            }
            let Some(entry) = self.written(at) else {
                return;
            };
            // SAFETY: an entry that the device has written, and that is not
            // consumed.
            let cqe = unsafe { entry.read() };
            if !(self.compresses() && cqe.is_title() && self.open_session(at, &cqe).is_ok()) {
                at = at.wrapping_add(1);
            }
        }
    }
}
