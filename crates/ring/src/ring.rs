//! Header and entries of a mapped queue.

use std::fmt;
use std::io;
use std::ptr::NonNull;

use crate::{Header, Indices, Mapping};

/// A mapped queue whose geometry has been checked against its mapping.
///
/// Slots are reached by number; the number is masked, so that no value leads
/// outside the mapping.
#[derive(Debug)]
pub struct Ring {
    slots: Slots,
    mapping: Mapping,
}

/// Address and bounds of the entries of a ring.
///
/// Plain values, to be copied into local variables of a loop: the compiler must assume
/// that a write through an entry's pointer changes a value behind a reference.
#[derive(Clone, Copy, Debug)]
pub struct Slots {
    entries: NonNull<u8>,
    indices: Indices,
}

impl Slots {
    /// The entry at `at`, or some entry if `at` is not the start of a slot inside the ring.
    /// It is valid for [`Indices::stride`] bytes while the ring lives, and aligned to the
    /// lesser of 64 bytes and the stride.
    #[inline]
    pub fn slot(&self, at: usize) -> NonNull<u8> {
        // SAFETY: made to be one.
        unsafe { self.slot_inside(self.indices.inside(at)) }
    }

    /// [`Slots::slot`] for a position that is known to be one.
    ///
    /// # Safety
    /// `at` is from this ring's [`Indices`], which give no others.
    #[inline]
    pub unsafe fn slot_inside(&self, at: usize) -> NonNull<u8> {
        // SAFETY: all slots were checked to be mapped (`Ring::new`), and this
        // is the beginning of one.
        unsafe { self.entries.add(at) }
    }
}

// SAFETY: an address; whoever writes or reads there says that it may
// (`Slots::slot`, which gives raw memory).
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

// SAFETY: the ring owns its mapping; all that is shared through it are atomics
// and raw memory whose users say who may touch it when.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

/// The header of a mapped queue contradicts its mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GeometryError {
    /// Bytes mapped.
    pub size: usize,
    /// Index mask in the header.
    pub mask: u32,
    /// Binary logarithm of the distance between entries in the header.
    pub log2_stride: u32,
    /// Bytes that an entry must have.
    pub entry_size: usize,
}

impl fmt::Display for GeometryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the driver's queue header does not fit its mapping: {} bytes mapped, index mask {:#x}, \
             entries 2^{} bytes apart, at least {} needed",
            self.size, self.mask, self.log2_stride, self.entry_size
        )
    }
}

impl std::error::Error for GeometryError {}

impl Ring {
    /// Creates a ring from a mapped queue, after a check of its geometry. Entries have at
    /// least `entry_size` bytes.
    ///
    /// # Errors
    /// The header's mask is not one less than a power of two, entries are
    /// smaller than `entry_size`, or the array does not fit the mapping.
    pub fn new(mapping: Mapping, entry_size: usize) -> Result<Self, GeometryError> {
        let size = mapping.len();
        let mut error = GeometryError {
            size,
            mask: 0,
            log2_stride: 0,
            entry_size,
        };
        if size < size_of::<Header>() {
            return Err(error);
        }
        let header = mapping.as_ptr().cast::<Header>();
        // SAFETY: the mapping is at least as large as the header and page
        // aligned. The two words are read once, and only these copies are used.
        let (log2_stride, mask) = unsafe {
            (
                (&raw const (*header.as_ptr()).log2_stride).read_volatile(),
                (&raw const (*header.as_ptr()).mask).read_volatile(),
            )
        };
        error.mask = mask;
        error.log2_stride = log2_stride;
        let slots = u64::from(mask) + 1;
        let fits = slots.is_power_of_two()
            && log2_stride < 32
            && 1u64 << log2_stride >= entry_size as u64
            && (slots << log2_stride) <= (size - size_of::<Header>()).min(1 << 32) as u64;
        if !fits {
            return Err(error);
        }
        // SAFETY: inside the mapping: it is larger than the header.
        let entries = unsafe { mapping.as_ptr().add(size_of::<Header>()) };
        Ok(Self {
            slots: Slots {
                entries,
                // SAFETY: the mapping lives in `self`; whoever copies the
                // indices out of it keeps the ring (the roles' users hold
                // both). The bounds were checked above.
                indices: unsafe { Indices::new(header, mask, log2_stride) },
            },
            mapping,
        })
    }

    /// Creates an empty ring in private memory, for at least `entries` entries that are
    /// `1 << log2_stride` bytes apart. The process is both producer and consumer.
    ///
    /// # Errors
    /// Those of mmap(2); EINVAL for a ring of more than 2^31 bytes.
    pub fn anonymous(entries: u32, log2_stride: u32) -> io::Result<Self> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let slots = (entries.checked_add(1)).and_then(u32::checked_next_power_of_two);
        let bytes = slots
            .and_then(|slots| slots.checked_mul(1u32.checked_shl(log2_stride)?))
            .ok_or_else(invalid)?;
        let mapping = Mapping::anonymous(size_of::<Header>() + bytes as usize)?;
        let mask = (bytes >> log2_stride) - 1;
        let header = mapping.as_ptr().cast::<Header>();
        // SAFETY: the mapping is new, larger than a header and page aligned.
        unsafe { header.write(Header::new(log2_stride, mask)) };
        Self::new(mapping, 1 << log2_stride).map_err(|_| invalid())
    }

    /// The indices. Copies must not outlive the ring.
    #[inline]
    pub fn indices(&self) -> Indices {
        self.slots.indices
    }

    /// Maximum number of entries in the ring.
    #[inline]
    pub fn capacity(&self) -> u32 {
        self.indices().capacity()
    }

    /// Bytes from one entry to the next.
    #[inline]
    pub fn stride(&self) -> usize {
        self.indices().stride()
    }

    /// The slots. Copies must not outlive the ring.
    #[inline]
    pub fn slots(&self) -> Slots {
        self.slots
    }

    /// Seals the ring ([`Indices::sealed`]): the driver has moved the queue, and the new
    /// memory could not be mapped.
    pub fn seal(&mut self) {
        self.slots.indices = self.slots.indices.sealed();
    }

    /// The memory, to be unmapped or retired when the queue has moved.
    pub fn into_mapping(self) -> Mapping {
        self.mapping
    }
}
