//! The quick way to read nearly all completions: of sends, writes and received
//! messages that succeeded, in queues
//! of their own.
//!
//! What is unusual is left to [`CompletionRing::read`]: nothing is done for it
//! here.

use std::mem::{MaybeUninit, offset_of};

use ring::Owner;

use crate::abi::{CQE_OWNER, Cqe, cqe_opcode, opcode as request};
use crate::wc::{flags, opcode};
use crate::{CompletionRing, Role, WorkCompletion};

/// Numbers of queue pairs and user indices have 24 bits.
const NUMBER: u32 = 0xff_ffff;

/// What [`CompletionRing::read_usual`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Usual {
    /// A completion, which was read.
    Taken,
    /// Nothing.
    Nothing,
    /// A completion, or something that is none, which was left.
    Other,
}

/// Reads a field of an entry once, whatever the device does meanwhile.
macro_rules! field {
    ($entry:expr, $field:ident) => {
        (&raw const (*$entry.as_ptr()).$field).read_volatile()
    };
}

impl CompletionRing {
    /// Reads the next completion into `out`, if it is one of nearly all.
    ///
    /// # Safety
    /// As for [`CompletionRing::read`].
    #[inline(always)]
    pub unsafe fn read_usual(&mut self, out: &mut MaybeUninit<WorkCompletion>) -> Usual {
        if self.session.left != 0 {
            return Usual::Other;
        }
        let at = self.position();
        let entry = self.slot(at);
        // SAFETY: a byte of the entry, which lives as long as this does.
        let owner = unsafe { Owner::new(entry.cast::<u8>().add(offset_of!(Cqe, op_own))) };
        let owner = owner.look();
        if owner & CQE_OWNER != self.round(at) || owner >> 4 == cqe_opcode::INVALID {
            return Usual::Nothing;
        }
        // Neither data in it nor a title: those bits are 0. Whether it is a
        // solicited one is nothing to a reader.
        let role = match owner & !CQE_OWNER & !SOLICITED {
            SENT => Role::SEND,
            RECEIVED | RECEIVED_IMMEDIATE => Role::RECEIVE,
            _ => return Usual::Other,
        };
        // SAFETY: an entry that the device has written; any bytes are a valid
        // one.
        let (user_index, qp_num, slot) = unsafe {
            (
                u32::from_be(field!(entry, srqn_uidx)) & NUMBER,
                u32::from_be(field!(entry, sop_drop_qpn)),
                u32::from(u16::from_be(field!(entry, wqe_counter))),
            )
        };
        let Some(known) = self.directory.find(user_index) else {
            return Usual::Other;
        };
        let work = &*known.work;
        if !known.role.contains(role) {
            return Usual::Other;
        }
        let wc = WorkCompletion {
            qp_num: qp_num & NUMBER,
            ..WorkCompletion::default()
        };
        if role == Role::SEND {
            let opcode = match (qp_num >> 24) as u8 {
                request::SEND => opcode::SEND,
                request::RDMA_WRITE => opcode::RDMA_WRITE,
                _ => return Usual::Other,
            };
            let Some(found) = work.sends.find(slot) else {
                return Usual::Other;
            };
            out.write(WorkCompletion {
                wr_id: found.wr_id,
                opcode,
                ..wc
            });
            work.sends.complete(found);
        } else {
            if work.shared.is_some() {
                return Usual::Other;
            }
            let Some(found) = work.receives.find(slot) else {
                return Usual::Other;
            };
            // SAFETY: as above.
            let (bytes, word, flags_rqpn, slid, ml_path) = unsafe {
                (
                    field!(entry, byte_cnt),
                    field!(entry, imm_inval_pkey),
                    u32::from_be(field!(entry, flags_rqpn)),
                    field!(entry, slid),
                    field!(entry, ml_path),
                )
            };
            let immediate = owner & 0xf0 == RECEIVED_IMMEDIATE;
            let global = flags_rqpn >> 28 & 3 != 0;
            out.write(WorkCompletion {
                wr_id: found.wr_id,
                opcode: opcode::RECV,
                byte_len: u32::from_be(bytes),
                // The field has one of the two.
                ex: if immediate { word } else { 0 },
                pkey_index: if immediate {
                    0
                } else {
                    u32::from_be(word) as u16
                },
                src_qp: flags_rqpn & NUMBER,
                wc_flags: if immediate { flags::WITH_IMM } else { 0 }
                    | if global { flags::GRH } else { 0 },
                slid: u16::from_be(slid),
                sl: (flags_rqpn >> 24 & 0xf) as u8,
                dlid_path_bits: ml_path & 0x7f,
                ..wc
            });
            work.receives.complete(found);
        }
        // SAFETY: as above; aligned, since the entry is.
        let time = unsafe {
            let at = entry.cast::<u8>().add(offset_of!(Cqe, timestamp));
            at.cast::<u64>().read_volatile()
        };
        self.pass(u64::from_be(time));
        Usual::Taken
    }
}

/// `MLX5_CQE_..._SE`: an event was asked for by the peer.
const SOLICITED: u8 = 0x2;
const SENT: u8 = cqe_opcode::REQ << 4;
const RECEIVED: u8 = cqe_opcode::RESP_SEND << 4;
const RECEIVED_IMMEDIATE: u8 = cqe_opcode::RESP_SEND_IMM << 4;
