//! Deferred freeing of the provider's memory.
//!
//! libibverbs' objects are in memory that the provider frees when they are destroyed. The last
//! ones are kept for a time, so that a use of an object that was destroyed reads what it was:
//! it is reported and refused then, and does not crash.

use std::collections::{HashSet, VecDeque};
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, TryLockError};

use crate::explain::lock;
use crate::promises;
use crate::real;

/// Number of allocations that are kept.
const MAX_KEPT: usize = 256;
/// Longest allocation that may be an object; longer ones are queues.
const LONGEST_OBJECT: usize = 32 << 10;

/// Addresses of allocations that are kept, oldest first.
static KEPT: Mutex<VecDeque<usize>> = Mutex::new(VecDeque::new());

/// Called by the provider instead of the C library's function.
unsafe extern "C" fn free(allocation: *mut c_void) {
    let address = allocation.expose_provenance();
    promises::freed(address);
    let mut due = allocation;
    // SAFETY: an allocation of the C library, or null, for which the function returns 0.
    let size = unsafe { libc::malloc_usable_size(allocation) };
    if (1..=LONGEST_OBJECT).contains(&size) {
        let kept = match KEPT.try_lock() {
            Ok(kept) => Some(kept),
            Err(TryLockError::Poisoned(kept)) => Some(kept.into_inner()),
            // Of another thread, or in a child of fork of one that is not there.
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(mut kept) = kept {
            kept.push_back(address);
            let oldest = (kept.len() > MAX_KEPT).then(|| kept.pop_front()).flatten();
            due = oldest.map_or(ptr::null_mut(), ptr::with_exposed_provenance_mut);
        }
    }
    // SAFETY: the provider passes an allocation that it uses no more, or has passed this one
    // before.
    unsafe { libc::free(due) };
}

/// Defers what a provider frees, given one of its functions. Each provider is changed once.
pub(crate) fn defer(function: *const c_void) {
    static CHANGED: Mutex<Option<HashSet<usize>>> = Mutex::new(None);
    let mut search = Search {
        address: function.addr(),
        is_new: |base| lock(&CHANGED).get_or_insert_with(HashSet::new).insert(base),
    };
    // SAFETY: `change` has this type, and gets the search, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(change), (&raw mut search).cast()) };
}

/// The file that has an address.
struct Search {
    address: usize,
    is_new: fn(usize) -> bool,
}

/// Entries of the dynamic section.
const DT_PLTRELSZ: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_JMPREL: u64 = 23;

/// Relocations that are the address of a symbol: `GLOB_DAT` and `JUMP_SLOT`.
#[cfg(target_arch = "x86_64")]
const ADDRESSES: [u64; 2] = [6, 7];
#[cfg(target_arch = "aarch64")]
const ADDRESSES: [u64; 2] = [1025, 1026];

/// `Elf64_Rela`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

/// Changes the relocations of the file that is searched for. Returns whether it was found.
unsafe extern "C" fn change(
    file: *mut libc::dl_phdr_info,
    _size: usize,
    search: *mut c_void,
) -> c_int {
    // SAFETY: the loader's description of a file, and the argument of `dl_iterate_phdr`.
    let (file, search) = unsafe { (&*file, &*search.cast::<Search>()) };
    let base = file.dlpi_addr as usize;
    // SAFETY: the loader's list of this length.
    let headers = unsafe { std::slice::from_raw_parts(file.dlpi_phdr, file.dlpi_phnum.into()) };
    let range = |header: &libc::Elf64_Phdr| {
        let start = base.wrapping_add(header.p_vaddr as usize);
        start..start.saturating_add(header.p_memsz as usize)
    };
    let mut loaded = headers.iter().filter(|it| it.p_type == libc::PT_LOAD);
    if !loaded.any(|header| range(header).contains(&search.address)) {
        return 0;
    }
    let dynamic = headers.iter().find(|it| it.p_type == libc::PT_DYNAMIC);
    if let Some(dynamic) = dynamic.map(range).filter(|_| (search.is_new)(base)) {
        let read_only = headers.iter().find(|it| it.p_type == libc::PT_GNU_RELRO);
        let read_only = read_only.map_or(0..0, range);
        // SAFETY: the dynamic section of a file that is loaded, and used: it is not unloaded.
        unsafe { change_file(base, dynamic.start, &read_only) };
    }
    1
}

/// Changes the addresses of `free` in a file.
///
/// # Safety
/// Where a file is loaded, with its dynamic section, and what the loader has made read-only.
unsafe fn change_file(base: usize, dynamic: usize, read_only: &std::ops::Range<usize>) {
    let value = |tag: u64| {
        let mut at: *const [u64; 2] = ptr::with_exposed_provenance(dynamic);
        loop {
            // SAFETY: the section ends with an entry whose tag is 0.
            let [found, value] = unsafe { *at };
            match found {
                0 => return None,
                found if found == tag => return Some(value as usize),
                _ => at = at.wrapping_add(1),
            }
        }
    };
    // The loader has made addresses of them, in the C library's files.
    let address = |tag| value(tag).map(|it| if it < base { base + it } else { it });
    let (Some(symbols), Some(strings)) = (address(DT_SYMTAB), address(DT_STRTAB)) else {
        return;
    };
    for (table, size) in [(DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)] {
        let (Some(table), Some(size)) = (address(table), value(size)) else {
            continue;
        };
        let count = size / size_of::<Relocation>();
        for index in 0..count {
            let relocation = ptr::with_exposed_provenance::<Relocation>(table).wrapping_add(index);
            // SAFETY: in the table.
            let Relocation { offset, info, .. } = unsafe { *relocation };
            if !ADDRESSES.contains(&(info & 0xffff_ffff)) {
                continue;
            }
            let symbol = ptr::with_exposed_provenance::<libc::Elf64_Sym>(symbols)
                .wrapping_add((info >> 32) as usize);
            // SAFETY: a relocation's symbol is in the table, and its name in the other one.
            let name = unsafe {
                let name = strings + (*symbol).st_name as usize;
                std::ffi::CStr::from_ptr(ptr::with_exposed_provenance(name))
            };
            if name == c"free" {
                let entry = base.wrapping_add(offset as usize);
                // SAFETY: the relocation is the address of the C library's function.
                unsafe { write(entry, free as *mut c_void, read_only.contains(&entry)) };
            }
        }
    }
}

/// Writes an entry of the global offset table.
///
/// # Safety
/// The address of an entry that has a function of the same type.
unsafe fn write(entry: usize, function: *mut c_void, is_read_only: bool) {
    // SAFETY: a call without pointers.
    let page_size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
    let page = ptr::with_exposed_provenance_mut::<c_void>(entry / page_size * page_size);
    let protect = |protection| {
        // SAFETY: the page of the entry, which others read, and nobody executes.
        unsafe { real::mprotect(page, page_size, protection) == 0 }
    };
    if is_read_only && !protect(libc::PROT_READ | libc::PROT_WRITE) {
        return;
    }
    // SAFETY: guaranteed by the caller; aligned as the loader requires, and writable.
    let slot = unsafe { AtomicPtr::from_ptr(ptr::with_exposed_provenance_mut(entry)) };
    slot.store(function, Ordering::Relaxed);
    if is_read_only {
        protect(libc::PROT_READ);
    }
}
