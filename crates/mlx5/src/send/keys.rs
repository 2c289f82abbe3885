//! Work requests that change memory keys: binding a window, invalidating a
//! local key.
//!
//! After the control segment, which names the key, come the UMR control segment
//! (48 bytes), the key's new context (64), and its memory (64, of which 16 are
//! used); the last is absent if the key has no memory.

use uverbs::{Bind, MwType, Sge};

use super::{PER_BLOCK, SendQueue, element};
use crate::abi::{KEY_FREE, KeySegment, SEGMENT, UmrSegment, key_access, umr_flag, umr_mask};
use crate::operation::OperationFormat;
use crate::wc::opcode;
use crate::{Address, Opcode, Operands, PostError, SendWr};

/// Segments before the key's memory: control, UMR control, context.
pub(crate) const LEADING_SEGMENTS: u32 = 8;
/// Segments with the memory.
const WHOLE: u32 = 12;
/// Bytes of the longest work request that changes keys.
pub(crate) const LONGEST: usize = WHOLE as usize * SEGMENT;
/// Entries of a translation are counted in units of four.
const ONE_UNIT: u16 = 4;
/// No queue pair number, in the upper bits of a key's field.
pub(super) const ANY_QP: u32 = 0xffff_ff00;
/// The variant of a key: the low bits, which its owner chooses.
pub(super) const VARIANT: u32 = 0xff;
/// Maximum bytes of a memory window.
pub const LONGEST_WINDOW: u64 = 1 << 31;

/// Access flags of verbs.
mod access {
    pub const LOCAL_WRITE: u32 = 1 << 0;
    pub const REMOTE_WRITE: u32 = 1 << 1;
    pub const REMOTE_READ: u32 = 1 << 2;
    pub const REMOTE_ATOMIC: u32 = 1 << 3;
    pub const ZERO_BASED: u32 = 1 << 5;
}

impl SendQueue {
    /// [`SendQueue::push`] of a work request that changes keys, which has no data.
    pub(super) fn push_keys(
        &mut self,
        format: &OperationFormat,
        wr: &SendWr<'_, Address>,
    ) -> Result<(), PostError> {
        let (kind, named, change) = match (wr.opcode, wr.operands) {
            (Opcode::LOCAL_INV, _) => (opcode::LOCAL_INV, *wr, Change::unbind(MwType::TYPE_2, 0)),
            (_, Operands::Bind(bind)) => {
                let named = SendWr {
                    imm_or_key: bind.window_rkey,
                    ..*wr
                };
                (opcode::BIND_MW, named, self.bind(bind)?)
            }
            _ => return Err(PostError::BadOperation),
        };
        let segments = if change.memory.is_some() {
            WHOLE
        } else {
            LEADING_SEGMENTS
        };
        // SAFETY: 48 bytes without padding are three segments.
        let update: [[u64; 2]; 3] = unsafe { std::mem::transmute(change.update) };
        // SAFETY: 64 bytes without padding are four.
        let key: [[u64; 2]; 4] = unsafe { std::mem::transmute(change.key) };
        let control = self.control_slow(format, &named, segments - LEADING_SEGMENTS);
        let mut to = self.writer();
        to.put(control);
        (update.into_iter().chain(key)).for_each(|part| to.put(part));
        if let Some(memory) = change.memory {
            to.put(element(&memory, memory.length));
            (LEADING_SEGMENTS + 1..WHOLE).for_each(|_| to.put([0u64; 2]));
        }
        // The WQE has at least two blocks. Binds and invalidations share a device opcode, so
        // the second slot records which it is.
        let second = self.next.wrapping_add(1);
        self.advance(
            self.next,
            control[0],
            wr.wr_id,
            segments.div_ceil(PER_BLOCK),
        );
        self.queues.sends.note(second, kind.into(), self.wr_count);
        self.fence = format.fence_after;
        Ok(())
    }

    /// Returns the changes that the bind of a window makes.
    fn bind(&self, bind: &Bind) -> Result<Change, PostError> {
        let kind = bind.window_type;
        if kind != MwType::TYPE_1 && kind != MwType::TYPE_2 {
            return Err(PostError::BadOperation);
        }
        if bind.length == 0 {
            return Ok(Change::unbind(kind, bind.rkey));
        }
        if bind.length > LONGEST_WINDOW {
            return Err(PostError::Unsupported);
        }
        let zero_based = bind.access & access::ZERO_BASED != 0;
        // o10-36.2.2 of the specification; the device does not check it.
        if kind == MwType::TYPE_1 && zero_based {
            return Err(PostError::BadOperation);
        }
        let mut changes =
            umr_mask::FREE | umr_mask::MKEY | umr_mask::LEN | umr_mask::START_ADDR | RIGHTS;
        let mut flags = umr_flag::TRANSLATION_OFFSET | umr_flag::INLINE;
        let mut owner = ANY_QP;
        if kind == MwType::TYPE_2 {
            changes |= umr_mask::QPN;
            flags |= umr_flag::CHECK_FREE;
            owner = self.qp_num << 8;
        }
        Ok(Change {
            update: UmrSegment {
                flags,
                klm_octowords: ONE_UNIT.to_be(),
                mkey_mask: changes.to_be(),
                ..UmrSegment::default()
            },
            key: KeySegment {
                access_flags: rights(bind.access),
                qpn_mkey: (owner | bind.rkey & VARIANT).to_be(),
                start_addr: if zero_based { 0 } else { bind.addr.to_be() },
                len: bind.length.to_be(),
                ..KeySegment::default()
            },
            memory: Some(Sge {
                addr: bind.addr,
                length: bind.length as u32,
                lkey: bind.lkey,
            }),
        })
    }
}

/// The mask bits of the access rights.
pub(super) const RIGHTS: u64 =
    umr_mask::LOCAL_WRITE | umr_mask::REMOTE_READ | umr_mask::REMOTE_WRITE | umr_mask::ATOMIC;

/// Converts the access flags of verbs to those of a key's context.
#[inline]
pub(super) fn rights(access: u32) -> u8 {
    const FLAGS: usize = 16;
    /// Indexed by the four access rights.
    static RIGHTS: [u8; FLAGS] = {
        let each = [
            (access::LOCAL_WRITE, key_access::LOCAL_WRITE),
            (access::REMOTE_WRITE, key_access::REMOTE_WRITE),
            (access::REMOTE_READ, key_access::REMOTE_READ),
            (access::REMOTE_ATOMIC, key_access::ATOMIC),
        ];
        let mut all = [0; FLAGS];
        let mut asked = 0;
        while asked < FLAGS {
            let mut n = 0;
            while n < each.len() {
                let (flag, right) = each[n];
                if asked as u32 & flag != 0 {
                    all[asked] |= right;
                }
                n += 1;
            }
            asked += 1;
        }
        all
    };
    RIGHTS[access as usize % FLAGS]
}

/// Changes of a memory key that a work request makes.
struct Change {
    /// The fields that change.
    update: UmrSegment,
    key: KeySegment,
    /// The key's memory, if any.
    memory: Option<Sge>,
}

impl Change {
    /// Unbinds or invalidates the key.
    fn unbind(kind: MwType, rkey: u32) -> Self {
        let mut changes = umr_mask::FREE | umr_mask::MKEY;
        let mut flags = umr_flag::TRANSLATION_OFFSET | umr_flag::INLINE;
        if kind == MwType::TYPE_2 {
            changes |= umr_mask::QPN;
            flags |= umr_flag::CHECK_QPN;
        }
        Self {
            update: UmrSegment {
                flags,
                mkey_mask: changes.to_be(),
                ..UmrSegment::default()
            },
            key: KeySegment {
                free: KEY_FREE,
                qpn_mkey: (ANY_QP | rkey & VARIANT).to_be(),
                ..KeySegment::default()
            },
            memory: None,
        }
    }
}
