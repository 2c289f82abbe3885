//! What a completion means.

use std::ptr::NonNull;

use ring::{Found, Outstanding};

use crate::abi::{
    self, CQE_SCATTER_32, CQE_SCATTER_64, Cqe, SYNDROME, VENDOR_SYNDROME, cqe_opcode,
};
use crate::directory::{Directory, Entry, NUMBER, user_index};
use crate::shared::SharedWork;
use crate::wc::{flags, opcode, status, status_of, syndrome};
use crate::{CompletionError, Role, WorkCompletion};

impl Cqe {
    /// What it is about, 4 bits.
    #[inline(always)]
    pub(crate) fn opcode(&self) -> u8 {
        self.op_own >> 4
    }

    /// The user index of the queue pair that it is about.
    #[inline(always)]
    pub(crate) fn user_index(&self) -> u32 {
        user_index(self.srqn_uidx)
    }

    #[inline(always)]
    pub(crate) fn slot(&self) -> u16 {
        u16::from_be(self.wqe_counter)
    }

    /// Whether it consumed a receive.
    #[inline(always)]
    pub(crate) fn is_receive(&self) -> bool {
        matches!(
            self.opcode(),
            cqe_opcode::RESP_WR_IMM
                | cqe_opcode::RESP_SEND
                | cqe_opcode::RESP_SEND_IMM
                | cqe_opcode::RESP_SEND_INV
                | cqe_opcode::RESP_ERR
        )
    }

    /// Whether it says that a receive could not be done because memory of its
    /// list was not there (on-demand paging), and that the kernel was asked for
    /// it: the message comes again, to another receive.
    pub(crate) fn is_page_fault(&self) -> bool {
        self.opcode() == cqe_opcode::RESP_ERR
            && self.timestamp[SYNDROME] == syndrome::REMOTE_ABORTED
            && self.timestamp[VENDOR_SYNDROME] == syndrome::VENDOR_PAGE_FAULT
    }

    /// Whether data came in it.
    #[inline(always)]
    fn has_data(&self) -> bool {
        self.op_own & (CQE_SCATTER_32 | CQE_SCATTER_64) != 0
    }

    /// Gives the data that came in it, `byte_len` bytes, to where it belongs;
    /// whether it did, and there was as much room.
    ///
    /// # Safety
    /// `before` is of this completion.
    unsafe fn scatter(
        &self,
        before: Before,
        byte_len: u32,
        to: impl FnOnce(&[u8]) -> bool,
    ) -> bool {
        let byte_len = byte_len as usize;
        // 64 bytes come before the fields, if entries are that long.
        if self.op_own & CQE_SCATTER_64 != 0 {
            // SAFETY: as the caller says.
            let data = unsafe { before.read() };
            return data.is_some_and(|data| data.get(..byte_len).is_some_and(to));
        }
        // What the first fields are depends on this bit: bytes, then.
        // SAFETY: the structure has no padding and is longer than that.
        let first = unsafe { std::slice::from_raw_parts((&raw const *self).cast::<u8>(), 32) };
        first.get(..byte_len).is_some_and(to)
    }
}

/// The bytes of an entry that come before its fields.
#[derive(Clone, Copy)]
pub(crate) struct Before {
    fields: NonNull<Cqe>,
    /// How many they are: none, or 64.
    bytes: usize,
}

impl Before {
    /// There are none.
    pub(crate) const NOTHING: Self = Self {
        fields: NonNull::dangling(),
        bytes: 0,
    };

    #[inline(always)]
    pub(crate) fn of(fields: NonNull<Cqe>, bytes: usize) -> Self {
        Self { fields, bytes }
    }

    /// # Safety
    /// The entry is this side's.
    unsafe fn read(self) -> Option<[u8; 64]> {
        // SAFETY: as the caller says, and there are as many.
        (self.bytes == 64).then(|| unsafe { self.fields.cast::<[u8; 64]>().sub(1).read() })
    }
}

/// Says what a completion means, and takes note of it in the queue that it is
/// about.
///
/// # Safety
/// Every work request that is outstanding names memory that is valid, as those
/// who posted it have said (`SendQueue::publish`, `RecvQueue::publish`). `before`
/// is of this completion.
#[inline(always)]
pub(crate) unsafe fn decode(
    cqe: &Cqe,
    before: Before,
    directory: &Directory,
) -> Result<WorkCompletion, CompletionError> {
    let user_index = cqe.user_index();
    let role = match cqe.opcode() {
        cqe_opcode::REQ | cqe_opcode::REQ_ERR => Role::SEND,
        _ if cqe.is_receive() => Role::RECEIVE,
        _ => return Err(unknown(cqe)),
    };
    let entry = match directory.find(user_index) {
        Some(entry) if entry.role.contains(role) => entry,
        _ => return Err(CompletionError::UnknownQueue { user_index }),
    };
    let slot = cqe.slot();
    let taken = Taken::new(entry, role, slot).ok_or(CompletionError::UnknownRequest { slot })?;
    let mut wc = WorkCompletion {
        wr_id: taken.wr_id(),
        qp_num: u32::from_be(cqe.sop_drop_qpn) & NUMBER,
        ..WorkCompletion::default()
    };
    match cqe.opcode() {
        cqe_opcode::REQ_ERR | cqe_opcode::RESP_ERR => {
            wc.status = status_of(cqe.timestamp[SYNDROME]);
            wc.vendor_err = cqe.timestamp[VENDOR_SYNDROME].into();
        }
        // SAFETY: as the caller says; the work request is outstanding.
        cqe_opcode::REQ => unsafe { request(cqe, before, entry, &mut wc)? },
        // SAFETY: as above.
        _ => unsafe { response(cqe, before, entry, &mut wc) },
    }
    // From here on the entry is the poster's again.
    taken.complete(slot);
    Ok(wc)
}

impl Directory {
    /// Posts the receive again that a page fault gave back; whether it is one of
    /// a shared queue's, and outstanding.
    #[cold]
    pub(crate) fn post_again(&mut self, cqe: &Cqe) -> bool {
        self.shared(cqe.srqn_uidx)
            .is_some_and(|shared| shared.taking().post_again(cqe.slot()))
    }
}

/// The work request that a completion names, while it is looked at.
enum Taken<'e> {
    Own(&'e Outstanding, Found),
    Shared(&'e SharedWork, u64),
}

impl<'e> Taken<'e> {
    /// None if there is none outstanding.
    #[inline(always)]
    fn new(entry: &'e Entry, role: Role, slot: u16) -> Option<Self> {
        let own = match &entry.work.shared {
            _ if role == Role::SEND => &entry.work.sends,
            None => &entry.work.receives,
            Some(shared) => return Some(Self::Shared(shared, shared.taking().find(slot)?)),
        };
        Some(Self::Own(own, own.find(slot.into())?))
    }

    #[inline(always)]
    fn wr_id(&self) -> u64 {
        match self {
            Self::Own(_, found) => found.wr_id,
            Self::Shared(_, wr_id) => *wr_id,
        }
    }

    #[inline(always)]
    fn complete(self, slot: u16) {
        match self {
            Self::Own(queue, found) => queue.complete(found),
            Self::Shared(queue, _) => {
                queue.taking().take(slot);
            }
        }
    }
}

#[cold]
fn unknown(cqe: &Cqe) -> CompletionError {
    CompletionError::UnknownOpcode {
        completion: cqe.opcode(),
        request: (u32::from_be(cqe.sop_drop_qpn) >> 24) as u8,
    }
}

/// A work request of this side that succeeded.
///
/// # Safety
/// As for [`decode`]; the work request is outstanding.
#[inline(always)]
unsafe fn request(
    cqe: &Cqe,
    before: Before,
    entry: &Entry,
    wc: &mut WorkCompletion,
) -> Result<(), CompletionError> {
    let request = (u32::from_be(cqe.sop_drop_qpn) >> 24) as u8;
    match request {
        abi::opcode::SEND | abi::opcode::SEND_INVAL => wc.opcode = opcode::SEND,
        abi::opcode::SEND_IMM => {
            wc.opcode = opcode::SEND;
            wc.wc_flags = flags::WITH_IMM;
        }
        abi::opcode::RDMA_WRITE => wc.opcode = opcode::RDMA_WRITE,
        abi::opcode::RDMA_WRITE_IMM => {
            wc.opcode = opcode::RDMA_WRITE;
            wc.wc_flags = flags::WITH_IMM;
        }
        abi::opcode::RDMA_READ => {
            wc.opcode = opcode::RDMA_READ;
            wc.byte_len = u32::from_be(cqe.byte_cnt);
        }
        abi::opcode::ATOMIC_CS => {
            wc.opcode = opcode::COMP_SWAP;
            wc.byte_len = 8;
        }
        abi::opcode::ATOMIC_FA => {
            wc.opcode = opcode::FETCH_ADD;
            wc.byte_len = 8;
        }
        // Which of the two it was is written down where it was posted.
        abi::opcode::UMR => {
            let second = u32::from(cqe.slot()).wrapping_add(1);
            wc.opcode = if entry.work.sends.noted(second) == opcode::LOCAL_INV.into() {
                opcode::LOCAL_INV
            } else {
                opcode::BIND_MW
            };
        }
        _ => return Err(unknown(cqe)),
    }
    if cqe.has_data() {
        // SAFETY: as the caller says.
        let to = |data: &[u8]| unsafe { entry.work.scatter_send(cqe.slot(), data) };
        // SAFETY: as the caller says.
        if !entry.work.short_data || !unsafe { cqe.scatter(before, wc.byte_len, to) } {
            wc.status = status::LOC_LEN_ERR;
        }
    }
    Ok(())
}

/// A message of the peer's that arrived.
///
/// # Safety
/// As for [`decode`]; the work request is outstanding.
#[inline(always)]
unsafe fn response(cqe: &Cqe, before: Before, entry: &Entry, wc: &mut WorkCompletion) {
    wc.byte_len = u32::from_be(cqe.byte_cnt);
    wc.opcode = opcode::RECV;
    match cqe.opcode() {
        cqe_opcode::RESP_WR_IMM => {
            wc.opcode = opcode::RECV_RDMA_WITH_IMM;
            wc.wc_flags = flags::WITH_IMM;
            wc.ex = cqe.imm_inval_pkey;
        }
        cqe_opcode::RESP_SEND_IMM => {
            wc.wc_flags = flags::WITH_IMM;
            wc.ex = cqe.imm_inval_pkey;
        }
        cqe_opcode::RESP_SEND_INV => {
            wc.wc_flags = flags::WITH_INV;
            wc.ex = u32::from_be(cqe.imm_inval_pkey);
        }
        // The field has one of the three.
        _ => wc.pkey_index = u32::from_be(cqe.imm_inval_pkey) as u16,
    }
    if cqe.has_data() {
        // SAFETY: as the caller says.
        let to = |data: &[u8]| unsafe {
            match &entry.work.shared {
                None => entry.work.scatter_receive(cqe.slot(), data),
                Some(shared) => shared.scatter(cqe.slot(), data),
            }
        };
        // SAFETY: as the caller says.
        if !entry.work.short_data || !unsafe { cqe.scatter(before, wc.byte_len, to) } {
            wc.status = status::LOC_LEN_ERR;
        }
        if cqe.op_own & CQE_SCATTER_64 == 0 {
            // The fields below are data.
            return;
        }
    }
    let flags_rqpn = u32::from_be(cqe.flags_rqpn);
    wc.slid = u16::from_be(cqe.slid);
    wc.sl = (flags_rqpn >> 24 & 0xf) as u8;
    wc.src_qp = flags_rqpn & NUMBER;
    wc.dlid_path_bits = cqe.ml_path & 0x7f;
    if flags_rqpn >> 28 & 3 != 0 {
        wc.wc_flags |= flags::GRH;
    }
}
