//! Where the files of a process call the C library's `free`.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::real;

/// Decides by where a file is loaded, and a function that tells whether an address is in it.
type IsWanted<'a> = dyn FnMut(usize, &dyn Fn(usize) -> bool) -> bool + 'a;

/// Lets the files that are wanted call a function instead of `free`.
pub(super) fn replace_free(
    function: unsafe extern "C" fn(*mut c_void),
    is_wanted: &mut IsWanted<'_>,
) {
    let mut search = Search {
        function: function as *mut c_void,
        is_wanted,
    };
    // SAFETY: `change` has this type, and gets the search, which outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(change), (&raw mut search).cast()) };
}

/// The files that are changed, and how.
struct Search<'a> {
    function: *mut c_void,
    is_wanted: &'a mut IsWanted<'a>,
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

/// Changes the relocations of a file that is wanted.
unsafe extern "C" fn change(
    file: *mut libc::dl_phdr_info,
    _size: usize,
    search: *mut c_void,
) -> c_int {
    // SAFETY: the loader's description of a file, and the argument of `dl_iterate_phdr`.
    let (file, search) = unsafe { (&*file, &mut *search.cast::<Search<'_>>()) };
    let base = file.dlpi_addr as usize;
    if file.dlpi_phdr.is_null() {
        return 0;
    }
    // SAFETY: the loader's list of this length.
    let headers = unsafe { std::slice::from_raw_parts(file.dlpi_phdr, file.dlpi_phnum.into()) };
    let range = |header: &libc::Elf64_Phdr| {
        let start = base.wrapping_add(header.p_vaddr as usize);
        start..start.saturating_add(header.p_memsz as usize)
    };
    let loaded = headers.iter().filter(|it| it.p_type == libc::PT_LOAD);
    let has = |address| loaded.clone().any(|it| range(it).contains(&address));
    let dynamic = headers.iter().find(|it| it.p_type == libc::PT_DYNAMIC);
    if let Some(dynamic) = dynamic.map(range) {
        if (search.is_wanted)(base, &has) {
            let read_only = headers.iter().find(|it| it.p_type == libc::PT_GNU_RELRO);
            let read_only = read_only.map_or(0..0, range);
            // SAFETY: the dynamic section of a file that is loaded, and used: it is not unloaded
            // while the loader lists it.
            unsafe { change_file(base, dynamic.start, &read_only, search.function) };
        }
    }
    0
}

/// Changes the addresses of `free` in a file.
///
/// # Safety
/// Where a file is loaded, with its dynamic section, and what the loader has made read-only.
unsafe fn change_file(
    base: usize,
    dynamic: usize,
    read_only: &std::ops::Range<usize>,
    function: *mut c_void,
) {
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
                unsafe { write(entry, function, read_only.contains(&entry)) };
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
