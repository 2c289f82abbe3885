//! Descriptors of a device: contexts and event files.

use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use mlx5_abi::{ClockInfo, mmap};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::uio::pwrite;
use nix::unistd::ftruncate;
use ring::{Mapping, ReadOnlyMapping};
use softhca::rule::Rule;
use zerocopy::IntoBytes;

use crate::driver::cause::{Class, Result, errno_of, refuse, system};
use crate::driver::event::EventFile;
use crate::driver::file_limit::FileSizeLimit;

/// Bytes of a UAR.
pub(crate) const UAR: usize = 4096;
/// UARs of a context.
pub(crate) const UARS: u32 = 8;
/// Doorbell registers of a UAR for queue pairs.
pub(crate) const PER_UAR: u32 = 2;
/// Doorbell registers of a UAR in the numbering of registers.
const NUMBERED_PER_UAR: u32 = 4;
/// Doorbell registers of a context.
pub(crate) const REGISTERS: u32 = UARS * PER_UAR;
/// UARs that a program may allocate.
const UAR_SLOTS: u32 = 256;
/// The first page of these UARs in the file. Smaller page numbers consist of an index of 8
/// bits and a command above it (`MLX5_IB_MMAP_OFFSET_START`).
const FIRST_SLOT: u32 = 9 << 8;
/// Commands that map a UAR of the context, as three kinds of memory.
const MAP_UAR: [u8; 3] = [mmap::REGULAR_PAGE, mmap::WC_PAGE, mmap::NC_PAGE];
/// The page of the file with the clock record, version 1.
const CLOCK_RECORD: u32 = (mmap::CLOCK_INFO as u32) << 8;
/// Pages of device memory, and the first of them in the file.
pub(crate) const MEMORY_PAGES: u32 = 32;
const FIRST_MEMORY_PAGE: u32 = (mmap::DEVICE_MEM as u32) << 8;
/// Number of registers, the last ones, that are each assigned to a single queue pair.
const EXCLUSIVE_REGISTERS: u32 = 4;

/// What a descriptor refers to.
#[derive(Debug)]
pub(crate) enum File {
    /// An open device.
    Context(Box<ContextFile>),
    /// A completion channel, or a file of asynchronous events.
    Events(Arc<EventFile>),
}

/// The device memory of a context.
#[derive(Debug, Default)]
pub(crate) struct ContextMemory {
    /// The mapping in this process, made for the first allocation.
    mapping: Option<Arc<Mapping>>,
    /// Bit mask of pages in use.
    used: u32,
}

impl ContextMemory {
    /// Returns the bits of pages, at most [`MEMORY_PAGES`].
    fn mask(first: u32, pages: u32) -> u32 {
        (((1u64 << pages) - 1) << first) as u32
    }

    /// Allocates consecutive pages, and returns the index of the first.
    fn allocate(&mut self, pages: u32) -> Option<u32> {
        let is_free = |first: &u32| self.used & Self::mask(*first, pages) == 0;
        let first = (0..=MEMORY_PAGES.checked_sub(pages)?).find(is_free)?;
        self.used |= Self::mask(first, pages);
        Some(first)
    }

    /// Returns whether pages are in use.
    pub(crate) fn is_used(&self) -> bool {
        self.used != 0
    }

    /// Frees pages.
    pub(crate) fn free(&mut self, first: u32, pages: u32) {
        self.used &= !Self::mask(first, pages);
    }
}

/// An open device.
#[derive(Debug)]
pub(crate) struct ContextFile {
    /// An in-memory file, mapped as the registers. Writes to it are only hints: the doorbell
    /// records contain the same information.
    registers: OwnedFd,
    /// Unique among all opened devices, unlike the descriptor, which may be
    /// reused.
    pub(crate) id: u64,
    /// Whether GET_CONTEXT was executed.
    pub(crate) initialized: bool,
    /// The first asynchronous event file, the default for all objects.
    pub(crate) events: Option<Arc<EventFile>>,
    /// Number of the user context, if it may issue commands; otherwise 0.
    pub(crate) uid: u32,
    /// The UAR of queues that name none, if the context has one of its own.
    pub(crate) uar: Option<u32>,
    /// Transport domain of its raw packet queue pairs, made for the first of them.
    pub(crate) transport_domain: Option<u32>,
    /// The program allocates all of its UARs; set by [`ContextFile::set_initialized`].
    pub(crate) allocates_uars: bool,
    /// Its device memory.
    pub(crate) memory: ContextMemory,
    /// Bit mask of UARs that the program allocated.
    uar_slots: [u64; (UAR_SLOTS / u64::BITS) as usize],
    /// Bit mask of exclusive registers in use.
    exclusive: u32,
    /// The shared register that was assigned last.
    shared: u32,
}

impl File {
    /// Returns the event file for asynchronous events of objects that name
    /// none.
    pub(crate) fn default_events(&self) -> Option<&Arc<EventFile>> {
        match self {
            Self::Context(context) => context.events.as_ref(),
            Self::Events(_) => None,
        }
    }
}

/// Returns offset and length, in the context's file, of a UAR that the program allocated.
pub(crate) fn uar_mapping(slot: u32) -> (u64, u32) {
    let page = mmap_rs::MmapOptions::page_size();
    (u64::from(FIRST_SLOT + slot) * page as u64, page as u32)
}

/// Returns the offset, in the context's file, of the pages that a program maps at `offset`
/// of its descriptor; `None` if it may not map them.
pub(crate) fn mapping_offset(offset: i64, length: usize) -> Option<i64> {
    let page = mmap_rs::MmapOptions::page_size();
    let position = usize::try_from(offset).ok()?;
    if length == 0 || length % page != 0 || position % page != 0 {
        return None;
    }
    let number = u32::try_from(position / page).ok()?;
    if let Some(first) = number.checked_sub(FIRST_MEMORY_PAGE).map(|it| it as usize) {
        if (first + length / page) <= MEMORY_PAGES as usize {
            return Some(offset);
        }
    }
    if length != page {
        return None;
    }
    let allocated = FIRST_SLOT..FIRST_SLOT + UAR_SLOTS;
    if number == CLOCK_RECORD || allocated.contains(&number) {
        return Some(offset);
    }
    let (command, index) = (number >> 8, number & 0xff);
    let start = index as usize * page;
    let is_register = start + page <= ContextFile::length();
    let maps_uar = u8::try_from(command).is_ok_and(|command| MAP_UAR.contains(&command));
    (maps_uar && is_register).then_some(start as i64)
}

/// Returns whether a page that a program maps at `offset` of its descriptor has doorbell
/// registers, given that [`mapping_offset`] allows it.
pub(crate) fn is_doorbell_page(offset: i64) -> bool {
    let page = mmap_rs::MmapOptions::page_size() as i64;
    let number = u32::try_from(offset / page).unwrap_or(u32::MAX);
    let memory = FIRST_MEMORY_PAGE..FIRST_MEMORY_PAGE + MEMORY_PAGES;
    number != CLOCK_RECORD && !memory.contains(&number)
}

/// Returns whether the page at this offset of the context's file is that of a UAR that the
/// program has allocated.
pub(crate) fn is_allocated_uar(offset: i64) -> bool {
    let page = mmap_rs::MmapOptions::page_size() as i64;
    u32::try_from(offset / page).is_ok_and(|number| number >= FIRST_SLOT)
}

/// Number of devices opened so far.
static OPENED: AtomicU64 = AtomicU64::new(0);
static CONTEXTS_WITH_UARS: AtomicUsize = AtomicUsize::new(0);
static ALLOCATED_UARS: AtomicUsize = AtomicUsize::new(0);
static UAR_CHANGES: AtomicU64 = AtomicU64::new(0);

/// The UARs of all open devices of the process, which the program maps after it has got them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UarCounts {
    /// Number of contexts that have UARs from the beginning.
    pub contexts: usize,
    /// Number of UARs that the program has allocated, each with a page of its own.
    pub allocated: usize,
    /// Number of changes so far.
    pub changes: u64,
}

/// Returns the number of UARs now.
pub(crate) fn uar_counts() -> UarCounts {
    // First: with an older number of changes the caller only asks again.
    let changes = UAR_CHANGES.load(Ordering::Acquire);
    UarCounts {
        contexts: CONTEXTS_WITH_UARS.load(Ordering::Relaxed),
        allocated: ALLOCATED_UARS.load(Ordering::Relaxed),
        changes,
    }
}

impl ContextFile {
    /// Opens a device. Returns it with its descriptor, which the file owns.
    pub(crate) fn new() -> crate::Result<(Self, RawFd)> {
        if FileSizeLimit::exceeded().is_some() {
            return Err(errno_of(nix::Error::EFBIG));
        }
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let registers = memfd_create(c"ringverbs-registers", flags).map_err(errno_of)?;
        // Pages that are not used take no memory.
        ftruncate(&registers, Self::all() as i64).map_err(errno_of)?;
        // The program has the descriptor and must not shrink the file that the device maps.
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        fcntl(&registers, FcntlArg::F_ADD_SEALS(seals)).map_err(errno_of)?;
        Ok(Self::of(registers))
    }

    /// Returns the context of a file with registers, and its descriptor.
    pub(crate) fn of(registers: OwnedFd) -> (Self, RawFd) {
        let fd = registers.as_raw_fd();
        let file = Self {
            registers,
            id: OPENED.fetch_add(1, Ordering::Relaxed),
            initialized: false,
            events: None,
            uid: 0,
            uar: None,
            transport_domain: None,
            allocates_uars: false,
            memory: ContextMemory::default(),
            uar_slots: [0; (UAR_SLOTS / u64::BITS) as usize],
            exclusive: 0,
            shared: 0,
        };
        (file, fd)
    }

    /// Writes the clock record: the device's clock was at `cycles` at `nanoseconds` since
    /// 1970. It counts nanoseconds, so one record stays right.
    pub(crate) fn record_clock(&self, cycles: u64, nanoseconds: u64) -> Result<()> {
        let record = ClockInfo {
            nsec: nanoseconds,
            cycles,
            mult: 1,
            mask: u64::MAX,
            overflow_period: i64::MAX as u64,
            ..ClockInfo::default()
        };
        let page = mmap_rs::MmapOptions::page_size() as i64;
        let offset = i64::from(CLOCK_RECORD) * page;
        let written = pwrite(&self.registers, record.as_bytes(), offset);
        let written = written.map_err(errno_of).map(drop);
        written.map_err(system("clock record", offset))
    }

    /// Allocates pages of device memory: returns the index of the first, and the mapping of
    /// all in this process.
    ///
    /// # Errors
    /// ENOMEM.
    pub(crate) fn allocate_memory(&mut self, pages: u32) -> Result<(u32, Arc<Mapping>)> {
        let mapping = match &self.memory.mapping {
            Some(mapping) => Arc::clone(mapping),
            None => {
                let page = mmap_rs::MmapOptions::page_size();
                let offset = FIRST_MEMORY_PAGE as usize * page;
                let length = MEMORY_PAGES as usize * page;
                let mapping = Mapping::new(self.registers.as_fd(), offset as u64, length);
                let mapping = mapping.or_else(|_| {
                    refuse(
                        Class::NoMemory,
                        "mapping of device memory",
                        length,
                        Rule::Granted,
                    )
                })?;
                Arc::clone(self.memory.mapping.insert(Arc::new(mapping)))
            }
        };
        match self.memory.allocate(pages) {
            Some(first) => Ok((first, mapping)),
            None => refuse(
                Class::NoMemory,
                "pages of device memory",
                pages,
                Rule::AtMost(MEMORY_PAGES.into()),
            ),
        }
    }

    /// Returns the length of the file.
    pub(crate) fn all() -> usize {
        let page = mmap_rs::MmapOptions::page_size();
        page * (FIRST_SLOT + UAR_SLOTS) as usize
    }

    /// Maps the file.
    pub(crate) fn map_registers(&self) -> std::io::Result<ReadOnlyMapping> {
        ReadOnlyMapping::new(self.registers.as_fd(), 0, Self::all())
    }

    /// Returns the length of the registers that a context has from the beginning.
    pub(crate) fn length() -> usize {
        let page = mmap_rs::MmapOptions::page_size();
        (UARS as usize * UAR).next_multiple_of(page)
    }

    /// Returns the number of UARs in a page of the process.
    pub(crate) fn uars_per_page() -> u32 {
        (mmap_rs::MmapOptions::page_size() / UAR).clamp(1, UARS as usize) as u32
    }

    /// Assigns a register to a queue pair, an exclusive one if available, and
    /// returns its number.
    pub(crate) fn allocate_register(&mut self) -> u32 {
        let free = self.exclusive.trailing_ones();
        let index = if free < EXCLUSIVE_REGISTERS {
            self.exclusive |= 1 << free;
            REGISTERS - EXCLUSIVE_REGISTERS + free
        } else {
            self.shared = (self.shared + 1) % (REGISTERS - EXCLUSIVE_REGISTERS);
            self.shared
        };
        index / PER_UAR * NUMBERED_PER_UAR + index % PER_UAR
    }

    /// Called when GET_CONTEXT was executed. Unless the program allocates UARs, the context
    /// has some from now on.
    pub(crate) fn set_initialized(&mut self, allocates_uars: bool) {
        self.initialized = true;
        self.allocates_uars = allocates_uars;
        CONTEXTS_WITH_UARS.fetch_add(usize::from(!allocates_uars), Ordering::Relaxed);
        UAR_CHANGES.fetch_add(1, Ordering::Release);
    }

    /// Allocates a slot for a UAR; `None` if all are in use.
    pub(crate) fn allocate_uar_slot(&mut self) -> Option<u32> {
        let mut words = self.uar_slots.iter_mut().zip(0..);
        let (word, index) = words.find(|(word, _)| **word != u64::MAX)?;
        let bit = word.trailing_ones();
        *word |= 1 << bit;
        ALLOCATED_UARS.fetch_add(1, Ordering::Relaxed);
        UAR_CHANGES.fetch_add(1, Ordering::Release);
        Some(index * u64::BITS + bit)
    }

    /// Takes the slot of a UAR that a parent process has allocated.
    pub(crate) fn take_uar_slot(&mut self, slot: u32) {
        if let Some(word) = self.uar_slots.get_mut((slot / u64::BITS) as usize) {
            *word |= 1 << (slot % u64::BITS);
            ALLOCATED_UARS.fetch_add(1, Ordering::Relaxed);
            UAR_CHANGES.fetch_add(1, Ordering::Release);
        }
    }

    /// Frees the slot of a UAR.
    pub(crate) fn free_uar_slot(&mut self, slot: u32) {
        if let Some(word) = self.uar_slots.get_mut((slot / u64::BITS) as usize) {
            *word &= !(1 << (slot % u64::BITS));
            ALLOCATED_UARS.fetch_sub(1, Ordering::Relaxed);
            UAR_CHANGES.fetch_add(1, Ordering::Release);
        }
    }

    /// Frees a register.
    pub(crate) fn free_register(&mut self, number: u32) {
        let index = number / NUMBERED_PER_UAR * PER_UAR + number % NUMBERED_PER_UAR;
        if let Some(own) = index.checked_sub(REGISTERS - EXCLUSIVE_REGISTERS) {
            self.exclusive &= !(1 << own);
        }
    }
}

impl Drop for ContextFile {
    fn drop(&mut self) {
        let slots: u32 = self.uar_slots.iter().map(|word| word.count_ones()).sum();
        ALLOCATED_UARS.fetch_sub(slots as usize, Ordering::Relaxed);
        let had_uars = self.initialized && !self.allocates_uars;
        CONTEXTS_WITH_UARS.fetch_sub(usize::from(had_uars), Ordering::Relaxed);
        UAR_CHANGES.fetch_add(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exclusive_uar_is_not_shared() {
        let (mut file, _) = ContextFile::new().unwrap();
        let own: Vec<_> = (0..4).map(|_| file.allocate_register()).collect();
        assert_eq!(own, [24, 25, 28, 29]);
        let shared: Vec<_> = (0..12).map(|_| file.allocate_register()).collect();
        assert_eq!(shared[..3], [1, 4, 5]);
        assert_eq!(shared[11], 0);
        file.free_register(25);
        file.free_register(4);
        assert_eq!(
            (file.allocate_register(), file.allocate_register()),
            (25, 1)
        );
    }

    #[test]
    fn uars_have_places_of_their_own() {
        let (mut file, _) = ContextFile::new().unwrap();
        let all: Vec<_> = std::iter::from_fn(|| file.allocate_uar_slot()).collect();
        assert_eq!(all, (0..UAR_SLOTS).collect::<Vec<_>>());
        file.free_uar_slot(100);
        file.free_uar_slot(u32::MAX);
        assert_eq!(file.allocate_uar_slot(), Some(100));
        assert_eq!(file.allocate_uar_slot(), None);
        let (last, length) = uar_mapping(UAR_SLOTS - 1);
        let end = last + u64::from(length);
        assert_eq!(ContextFile::all() as u64, end);
        let page = length as usize;
        assert_eq!(mapping_offset(last as i64, page), Some(last as i64));
        assert_eq!(mapping_offset(end as i64, page), None);
    }

    #[test]
    fn allocations_of_device_memory_do_not_overlap() {
        let mut memory = ContextMemory::default();
        assert_eq!(memory.allocate(MEMORY_PAGES + 1), None);
        assert_eq!(memory.allocate(u32::MAX), None);
        assert_eq!(memory.allocate(MEMORY_PAGES), Some(0));
        assert_eq!(memory.allocate(1), None);
        memory.free(0, MEMORY_PAGES);
        let allocated = [3, 1, 28].map(|pages| memory.allocate(pages));
        assert_eq!(allocated, [Some(0), Some(3), Some(4)]);
        memory.free(0, 3);
        assert_eq!(
            [4, 2, 1].map(|pages| memory.allocate(pages)),
            [None, Some(0), Some(2)]
        );
    }

    #[test]
    fn device_memory_is_mapped_in_pages() {
        let page = mmap_rs::MmapOptions::page_size();
        let at = |index: u32| i64::from(FIRST_MEMORY_PAGE + index) * page as i64;
        let (first, last) = (at(0), at(MEMORY_PAGES - 1));
        let all = MEMORY_PAGES as usize * page;
        assert_eq!(mapping_offset(first, all), Some(first));
        assert_eq!(mapping_offset(last, page), Some(last));
        assert_eq!(mapping_offset(first, all + page), None);
        assert_eq!(mapping_offset(last, 2 * page), None);
        assert_eq!(mapping_offset(first, usize::MAX - page + 1), None);
        assert_eq!(mapping_offset(first, 0), None);
        assert_eq!(mapping_offset(first, page + 1), None);
        assert_eq!(mapping_offset(at(MEMORY_PAGES), page), None);
    }

    #[test]
    fn registers_are_mapped_page_by_page() {
        let page = mmap_rs::MmapOptions::page_size();
        let at = |command: i64, index: i64| (command << 8 | index) * page as i64;
        assert_eq!(mapping_offset(at(0, 0), page), Some(0));
        assert_eq!(mapping_offset(at(3, 7), page), Some(7 * page as i64));
        // The clock record.
        assert_eq!(mapping_offset(at(7, 0), page), Some(at(7, 0)));
        assert!(!is_doorbell_page(at(7, 0)));
        assert!(is_doorbell_page(at(0, 0)) && is_doorbell_page(at(3, 7)));
        for (offset, length) in [
            (at(0, 8), page),
            (at(0, 255), page),
            (at(1, 0), page),
            (at(5, 0), page),
            (at(7, 1), page),
            (at(0, 0), 2 * page),
            (at(0, 0) + 1, page),
            (-(page as i64), page),
            (i64::MAX, page),
        ] {
            assert_eq!(mapping_offset(offset, length), None, "{offset} {length}");
        }
    }
}
