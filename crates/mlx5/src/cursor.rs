//! The completion under a cursor (`ibv_start_poll`), of which fields are read on
//! demand.

use std::ptr::{self, NonNull};

use crate::abi::Cqe;
use crate::cqe::{CompletionSink, CqeRef, Decoded};
use crate::wc::flags;

/// The completion that a cursor is on.
///
/// Its CQE is read in the ring until it is released
/// ([`crate::CqeRing::publish`]). The fields are numbers only: a
/// malfunctioning device that overwrites them does no harm.
#[derive(Debug)]
pub struct CursorEntry {
    /// In the ring, or `copy`; null before the first.
    cqe: *const Cqe,
    wr_id: u64,
    status: u32,
    vendor_err: u32,
    opcode: u32,
    wc_flags: u32,
    /// A copy of a CQE that is not in the ring in this form, or no longer.
    copy: Cqe,
}

// SAFETY: it points into a ring, which moves between threads with it.
unsafe impl Send for CursorEntry {}

impl Default for CursorEntry {
    fn default() -> Self {
        Self {
            cqe: ptr::null(),
            wr_id: 0,
            status: 0,
            opcode: 0,
            wc_flags: 0,
            vendor_err: 0,
            copy: Cqe::default(),
        }
    }
}

impl CompletionSink for CursorEntry {
    #[inline]
    fn put(&mut self, cqe: CqeRef, decoded: Decoded) {
        self.wr_id = decoded.wr_id;
        self.status = decoded.status;
        self.opcode = decoded.opcode;
        self.wc_flags = decoded.wc_flags;
        self.vendor_err = decoded.vendor_err;
        self.cqe = cqe.at();
        if !cqe.in_ring {
            self.copy = cqe.copy();
            self.cqe = &raw const self.copy;
        }
    }
}

impl CursorEntry {
    /// The work request's identifier.
    #[inline]
    pub fn wr_id(&self) -> u64 {
        self.wr_id
    }

    /// The completion's status.
    #[inline]
    pub fn status(&self) -> u32 {
        self.status
    }

    /// The completion's opcode.
    #[inline]
    pub fn opcode(&self) -> u32 {
        self.opcode
    }

    /// The completion's flags.
    #[inline]
    pub fn wc_flags(&self) -> u32 {
        self.wc_flags
    }

    /// The vendor's syndrome of a failure.
    #[inline]
    pub fn vendor_err(&self) -> u32 {
        self.vendor_err
    }

    /// Immediate data, or the key that was invalidated.
    ///
    /// # Safety
    /// A completion was decoded here; since then this was not moved, and the ring
    /// not published. [`CursorEntry::keep`] precedes other changes.
    #[inline]
    pub unsafe fn imm_data(&self) -> u32 {
        // SAFETY: as the caller says.
        let immediate = unsafe { self.cqe() }.immediate();
        if self.wc_flags & flags::WITH_INV != 0 {
            u32::from_be(immediate)
        } else {
            immediate
        }
    }

    /// The CQE, for the fields that are read on demand. Fields that its kind
    /// lacks are undefined.
    ///
    /// # Safety
    /// As for [`CursorEntry::imm_data`].
    #[inline]
    unsafe fn cqe(&self) -> CqeRef {
        // SAFETY: as the caller says: it is in the ring, or `copy`.
        unsafe { CqeRef::new(NonNull::new_unchecked(self.cqe.cast_mut()), true) }
    }

    /// Copies the CQE before the ring changes.
    ///
    /// # Safety
    /// As for the fields, or there was no completion yet.
    pub unsafe fn keep(&mut self) {
        if !self.cqe.is_null() && self.cqe != &raw const self.copy {
            // SAFETY: as the caller says: entries that are replaced stay readable.
            self.copy = unsafe { self.cqe() }.copy();
            self.cqe = &raw const self.copy;
        }
    }
}

macro_rules! fields {
    ($($name:ident: $type:ty, $doc:literal;)+) => {
        impl CursorEntry {$(
            #[doc = $doc]
            ///
            /// # Safety
            /// A completion was decoded here, this has not been moved since, and the
            /// ring not been published. [`CursorEntry::keep`] comes before other
            /// changes.
            #[inline]
            pub unsafe fn $name(&self) -> $type {
                // SAFETY: as the caller says.
                unsafe { self.cqe() }.$name()
            }
        )+}
    };
}

fields! {
    byte_len: u32, "Bytes that were received, read or compared.";
    qp_num: u32, "The number of the queue pair.";
    src_qp: u32, "The number of the sender's queue pair.";
    slid: u16, "The sender's LID.";
    sl: u8, "The service level.";
    dlid_path_bits: u8, "The path bits of the destination's LID.";
    cvlan: u16, "The VLAN tag that the device has removed from a packet; 0: none.";
    flow_tag: u32, "The tag of the flow by which a packet was received.";
    tag: (u64, u32), "Tag and private data of a message with a tag.";
    time: u64, "When the CQE was written, in ticks of the device's clock.";
}
