//! Completions one at a time, of which no more is read than is asked for.

use std::mem::offset_of;
use std::ptr::{self, NonNull};

use crate::abi::Cqe;
use crate::directory::NUMBER;
use crate::{CompletionError, CompletionRing, WorkCompletion};

/// The completion that a cursor is on.
///
/// Its entry stays in the ring until that is published
/// ([`CompletionRing::publish`]), and is read there. A device that changes it
/// nevertheless is believed from then on: its fields are numbers that lead
/// nowhere.
#[derive(Debug)]
pub struct Shown {
    /// Where the fields are: in the ring, or `told`; null before the first.
    entry: *const Cqe,
    /// Its opcode and flags.
    what: What,
    /// One that is in no entry as it is meant, or not any more.
    told: Cqe,
    /// Of that one: what an entry says by itself has none.
    vendor_err: u32,
}

// SAFETY: it leads to entries of a ring, which is another thread's as soon as
// this is.
unsafe impl Send for Shown {}

impl Default for Shown {
    fn default() -> Self {
        Self {
            entry: ptr::null(),
            what: What::new(0, 0),
            told: Cqe::default(),
            vendor_err: 0,
        }
    }
}

/// A completion's opcode and flags, as a work completion has them. In one
/// number, which is written at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct What(u64);

impl What {
    pub const fn new(opcode: u32, wc_flags: u32) -> Self {
        Self((wc_flags as u64) << 32 | opcode as u64)
    }

    /// With a flag if `bits` are `bit`, without if they are 0.
    #[inline(always)]
    pub const fn with(self, bits: u32, bit: u32, flag: u32) -> Self {
        let place = 32 + flag.trailing_zeros() - bit.trailing_zeros();
        Self(self.0 | (bits as u64) << place)
    }

    const fn opcode(self) -> u32 {
        self.0 as u32
    }

    const fn wc_flags(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Fields of a completion, as a work completion has them. Those that its kind
/// has not are any number.
///
/// Each is called after a completion was shown, with the place where it was,
/// before the ring is published.
macro_rules! fields {
    ($($name:ident: $type:ty = |$shown:ident| $value:expr;)+) => {$(
        /// The field of that name.
        ///
        /// # Safety
        /// A completion was shown here, and its ring has not been published
        /// since. Nobody writes to it meanwhile.
        #[inline(always)]
        pub unsafe fn $name($shown: *const Self) -> $type {
            // SAFETY: as the caller says; any bytes are a field.
            unsafe { $value }
        }
    )+};
}

/// Reads a field of the entry once.
macro_rules! entry {
    ($shown:ident, $field:ident) => {
        (&raw const (*(*$shown).entry).$field).read_volatile()
    };
}

impl Shown {
    fields! {
        opcode: u32 = |shown| (*shown).what.opcode();
        wc_flags: u32 = |shown| (*shown).what.wc_flags();
        vendor_err: u32 = |shown| {
            if (*shown).entry == &raw const (*shown).told {
                (*shown).vendor_err
            } else {
                0
            }
        };
        byte_len: u32 = |shown| u32::from_be(entry!(shown, byte_cnt));
        imm_data: u32 = |shown| entry!(shown, imm_inval_pkey);
        qp_num: u32 = |shown| u32::from_be(entry!(shown, sop_drop_qpn)) & NUMBER;
        src_qp: u32 = |shown| u32::from_be(entry!(shown, flags_rqpn)) & NUMBER;
        slid: u16 = |shown| u16::from_be(entry!(shown, slid));
        sl: u8 = |shown| (u32::from_be(entry!(shown, flags_rqpn)) >> 24 & 0xf) as u8;
        dlid_path_bits: u8 = |shown| entry!(shown, ml_path) & 0x7f;
        time: u64 = |shown| {
            // Aligned, as the entry is.
            let at = (*shown).entry.cast::<u8>().add(offset_of!(Cqe, timestamp));
            u64::from_be(at.cast::<u64>().read_volatile())
        };
    }

    /// Shows an entry of the ring.
    ///
    /// # Safety
    /// `shown` is this caller's to write to.
    #[inline(always)]
    pub(crate) unsafe fn set(shown: *mut Self, entry: NonNull<Cqe>, what: What) {
        // SAFETY: as the caller says.
        unsafe {
            (*shown).entry = entry.as_ptr();
            (*shown).what = what;
        }
    }

    /// Shows what no entry says in this way.
    ///
    /// # Safety
    /// As for [`Shown::set`].
    pub(crate) unsafe fn tell(shown: *mut Self, wc: &WorkCompletion, time: u64) {
        // SAFETY: as the caller says.
        unsafe {
            (*shown).told = Cqe {
                ml_path: wc.dlid_path_bits,
                slid: wc.slid.to_be(),
                flags_rqpn: (u32::from(wc.sl) << 24 | wc.src_qp & NUMBER).to_be(),
                imm_inval_pkey: wc.ex,
                byte_cnt: wc.byte_len.to_be(),
                timestamp: time.to_be_bytes(),
                sop_drop_qpn: wc.qp_num.to_be(),
                ..Cqe::default()
            };
            (*shown).entry = &raw const (*shown).told;
            (*shown).what = What::new(wc.opcode, wc.wc_flags);
            (*shown).vendor_err = wc.vendor_err;
        }
    }

    /// The ring is about to be changed: what is shown is so in it no longer.
    ///
    /// # Safety
    /// `shown` is this caller's to write to; the ring that it was last shown of is
    /// still there.
    pub unsafe fn keep(shown: *mut Self) {
        // SAFETY: as the caller says: entries that are replaced stay readable.
        unsafe {
            let (entry, told) = ((*shown).entry, &raw mut (*shown).told);
            if !entry.is_null() && entry != told {
                told.write(entry.read_volatile());
                (*shown).vendor_err = 0;
                (*shown).entry = told;
            }
        }
    }
}

impl CompletionRing {
    /// As [`CompletionRing::read`], of any completion, to be shown in `shown`:
    /// its identifier and status.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there, and `shown` is this caller's to write to.
    pub unsafe fn show(
        &mut self,
        shown: *mut Shown,
    ) -> Option<Result<(u64, u32), CompletionError>> {
        // SAFETY: as the caller says.
        let read = unsafe { self.read()? };
        Some(read.map(|wc| {
            let time = self.time();
            // SAFETY: as the caller says.
            unsafe { Shown::tell(shown, &wc, time) };
            (wc.wr_id, wc.status)
        }))
    }
}
