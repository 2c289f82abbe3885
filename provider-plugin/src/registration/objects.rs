//! The shared objects of the process, and the libibverbs among them.

use core::ffi::{CStr, c_int, c_void};
use core::ops::Range;
use std::borrow::Cow;
use std::ffi::CString;

use super::evidence::Refusal;
use crate::layout::LAYOUTS;

/// Private ABI numbers that are searched in a library without those of [`LAYOUTS`], for the
/// message that refuses it. A private ABI has the number of the rdma-core release that
/// introduced it.
const PABIS: Range<u32> = 13..200;

/// A loaded object.
#[derive(Debug)]
pub struct Object {
    /// The loader's name of the object; empty for the program itself.
    pub name: CString,
    segments: Vec<Range<usize>>,
    /// Notes that are within readable segments.
    notes: Vec<Range<usize>>,
}

impl Object {
    /// The name as text.
    pub fn path(&self) -> Cow<'_, str> {
        // Names in UTF-8 are borrowed; the copy with replacement characters is rare.
        (self.name.to_str()).map_or_else(|_| self.name.to_string_lossy(), Cow::Borrowed)
    }

    /// Returns whether the address is in one of the object's segments.
    pub fn contains(&self, address: usize) -> bool {
        self.segments.iter().any(|s| s.contains(&address))
    }
}

/// Returns all objects in the plugin's linker namespace, in load order.
pub fn loaded() -> Vec<Object> {
    unsafe extern "C" fn add(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        out: *mut c_void,
    ) -> c_int {
        // SAFETY: `out` is the vector that `loaded` passes below; the loader
        // calls us for each object with a description valid during the call.
        let (out, info) = unsafe { (&mut *out.cast::<Vec<Object>>(), &*info) };
        let name = if info.dlpi_name.is_null() {
            CString::default()
        } else {
            // SAFETY: the loader's names are NUL-terminated.
            unsafe { CStr::from_ptr(info.dlpi_name) }.to_owned()
        };
        let (mut segments, mut readable, mut notes) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: the loader says there are `dlpi_phnum` headers.
            let header = unsafe { &*info.dlpi_phdr.add(i) };
            let start = (info.dlpi_addr as usize).wrapping_add(header.p_vaddr as usize);
            let range = start..start.saturating_add(header.p_memsz as usize);
            match header.p_type {
                libc::PT_LOAD => {
                    if header.p_flags & libc::PF_R != 0 {
                        readable.push(range.clone());
                    }
                    segments.push(range);
                }
                libc::PT_NOTE => notes.push(range),
                _ => {}
            }
        }
        let within = |note: &Range<usize>| {
            (readable.iter()).any(|it: &Range<usize>| it.start <= note.start && note.end <= it.end)
        };
        notes.retain(within);
        out.push(Object {
            name,
            segments,
            notes,
        });
        0
    }
    let mut out: Vec<Object> = Vec::new();
    // SAFETY: `add` has the signature asked for, and gets the vector it
    // expects; dl_iterate_phdr calls it before it returns only.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut out).cast()) };
    out
}

/// Code addresses on the call stack, innermost first.
fn call_stack() -> Vec<usize> {
    #[repr(C)]
    struct UnwindContext {
        _opaque: [u8; 0],
    }
    type TraceFn = unsafe extern "C" fn(*mut UnwindContext, *mut c_void) -> c_int;
    unsafe extern "C" {
        fn _Unwind_Backtrace(trace: TraceFn, arg: *mut c_void) -> c_int;
        fn _Unwind_GetIP(context: *mut UnwindContext) -> usize;
    }
    const LIMIT: usize = 256;
    unsafe extern "C" fn add(context: *mut UnwindContext, out: *mut c_void) -> c_int {
        // SAFETY: `out` is the vector passed below, `context` the unwinder's
        // description of the current frame.
        let (out, ip) = unsafe { (&mut *out.cast::<Vec<usize>>(), _Unwind_GetIP(context)) };
        out.push(ip);
        // _URC_NO_REASON goes on, _URC_END_OF_STACK ends the walk.
        if out.len() < LIMIT { 0 } else { 5 }
    }
    let mut out: Vec<usize> = Vec::with_capacity(LIMIT);
    // SAFETY: `add` has the signature asked for and gets the vector it
    // expects; it neither unwinds nor allocates beyond the capacity.
    unsafe { _Unwind_Backtrace(add, (&raw mut out).cast()) };
    out
}

/// A hold on a loaded object.
pub struct Handle(*mut c_void);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: a handle of our own, closed once.
        unsafe { libc::dlclose(self.0) };
    }
}

impl Handle {
    /// On the object of that name, as the loader has it; the program's is
    /// empty, and stands for all that it sees.
    pub fn open(name: &CStr) -> Option<Handle> {
        let name = if name.is_empty() {
            core::ptr::null()
        } else {
            name.as_ptr()
        };
        // SAFETY: a NUL-terminated name, or null for the program itself.
        // NOLOAD: nothing is loaded, so no constructor runs.
        let handle = unsafe { libc::dlopen(name, libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        (!handle.is_null()).then_some(Handle(handle))
    }

    /// Address of a symbol that the object or what it is linked to defines.
    pub fn find(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a live handle and a NUL-terminated name.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }

    /// The same, of that version: a symbol without a version is not found.
    pub fn find_version(&self, name: &CStr, version: &CStr) -> Option<*mut c_void> {
        // SAFETY: a live handle and NUL-terminated strings.
        let address = unsafe { libc::dlvsym(self.0, name.as_ptr(), version.as_ptr()) };
        (!address.is_null()).then_some(address)
    }

    /// `verbs_register_driver_<N>` of the libibverbs of that private ABI.
    pub fn register_driver(&self, pabi: u32) -> Option<*mut c_void> {
        let name = CString::new(format!("verbs_register_driver_{pabi}")).ok()?;
        self.find_version(&name, &private_version(pabi)?)
    }
}

/// The version of libibverbs's private symbols.
pub fn private_version(pabi: u32) -> Option<CString> {
    CString::new(format!("IBVERBS_PRIVATE_{pabi}")).ok()
}

/// A libibverbs of this process.
pub struct Library<'a> {
    pub object: &'a Object,
    handle: Handle,
    /// The private ABIs whose register function it exports.
    pub pabis: Vec<u32>,
}

impl<'a> Library<'a> {
    /// The object as a libibverbs, if it is one.
    pub fn open(object: &'a Object) -> Option<Library<'a>> {
        let handle = Handle::open(&object.name)?;
        // A cheap check first: most objects are not a libibverbs.
        let init = handle.find(c"_verbs_init_and_alloc_context")?;
        if !object.contains(init as usize) {
            return None;
        }
        let its_own = |pabi: &u32| {
            let found = handle.register_driver(*pabi);
            found.is_some_and(|address| object.contains(address as usize))
        };
        // Supported private ABIs first: searching a missing name costs a search of all
        // dependencies and an error message.
        let mut pabis: Vec<u32> = LAYOUTS.iter().map(|layout| layout.pabi).collect();
        pabis.dedup();
        pabis.retain(its_own);
        if pabis.is_empty() {
            pabis.extend(PABIS.filter(its_own));
        }
        (!pabis.is_empty()).then_some(Library {
            object,
            handle,
            pabis,
        })
    }

    /// `verbs_register_driver_<N>` of the private ABI, if the library itself defines it.
    pub fn register_driver(&self, pabi: u32) -> Option<*mut c_void> {
        let address = self.handle.register_driver(pabi)?;
        self.object.contains(address as usize).then_some(address)
    }

    /// Address of a symbol that this library itself defines, at the version.
    pub fn symbol(&self, name: &CStr, version: &CStr) -> Option<*mut c_void> {
        let address = self.handle.find_version(name, version)?;
        // The search includes dependencies; their symbols do not count.
        self.object.contains(address as usize).then_some(address)
    }

    /// The notes in the library's file.
    pub fn notes(&self) -> impl Iterator<Item = &[u8]> {
        self.object.notes.iter().map(|note| {
            // SAFETY: within a readable segment of the library, which stays loaded
            // as long as the handle.
            unsafe { core::slice::from_raw_parts(note.start as *const u8, note.len()) }
        })
    }

    /// The path of the mapped file, whatever link it was opened through, and even if it was
    /// replaced since.
    pub fn file(&self) -> Option<String> {
        let segment = self.object.segments.first()?;
        mapped_whole(segment)
            .or_else(|| mapped_at(segment.start))
            .or_else(|| {
                let path = std::fs::canonicalize(self.object.name.to_str().ok()?).ok()?;
                path.to_str().map(str::to_owned)
            })
    }

    /// Keeps the library loaded for the life of the process.
    pub fn leak(self) {
        core::mem::forget(self.handle);
    }
}

/// The file that is mapped at a segment, if the segment is a single mapping.
fn mapped_whole(segment: &Range<usize>) -> Option<String> {
    let page = ring::Mapping::page_size();
    let start = segment.start / page * page;
    let end = segment.end.checked_next_multiple_of(page)?;
    let file = std::fs::read_link(format!("/proc/self/map_files/{start:x}-{end:x}")).ok()?;
    let file = file.to_str()?;
    Some(without_deleted(file).to_owned())
}

/// The file that is mapped at an address, from the list of all mappings, which is long in a
/// large program.
fn mapped_at(address: usize) -> Option<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let file = maps.lines().find_map(|line| mapped_file(line, address));
    file.map(str::to_owned)
}

/// Removes the kernel's mark of a deleted file.
fn without_deleted(file: &str) -> &str {
    file.strip_suffix(" (deleted)").unwrap_or(file)
}

/// The file of a line of /proc/self/maps, if the line covers the address.
fn mapped_file(line: &str, address: usize) -> Option<&str> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    if !(start..end).contains(&address) {
        return None;
    }
    Some(without_deleted(&rest[rest.find('/')?..]))
}

/// The libibverbs that loads the plugin: the only one, or the innermost one on the call
/// stack. The call stack is used last, since the unwinder reads tables of each object.
pub fn find_libibverbs<'a>(
    objects: &'a [Object],
    plugin_object: &Object,
) -> Result<Library<'a>, Refusal> {
    let mut all: Vec<Library<'a>> = (objects.iter())
        .filter(|object| !core::ptr::eq(*object, plugin_object))
        .filter_map(Library::open)
        .collect();
    if all.len() > 1 {
        let caller = call_stack()
            .into_iter()
            .find_map(|address| all.iter().position(|it| it.object.contains(address)));
        let Some(caller) = caller else {
            return Err(Refusal::ambiguous(&all[0], &all[1]));
        };
        return Ok(all.swap_remove(caller));
    }
    all.pop().ok_or_else(Refusal::no_library)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_may_have_any_bytes() {
        let object = |name: &[u8]| Object {
            name: CString::new(name).unwrap(),
            segments: Vec::new(),
            notes: Vec::new(),
        };
        assert_eq!(object(b"/a/libx.so").path(), "/a/libx.so");
        assert!(object(b"/\xff/libx.so").path().ends_with("/libx.so"));
    }

    #[test]
    fn this_program_is_among_the_loaded_objects() {
        let here = this_program_is_among_the_loaded_objects as *const () as usize;
        let objects = loaded();
        assert_eq!(objects.iter().filter(|o| o.contains(here)).count(), 1);
        assert!(objects.len() > 1, "libc is there as well");
    }

    #[test]
    fn the_call_stack_leads_through_this_function() {
        let stack = call_stack();
        assert!(stack.len() > 3, "{stack:x?}");
    }

    #[test]
    fn both_lookups_find_the_same_file() {
        let objects = loaded();
        let mut found = 0;
        for object in &objects {
            let segment = &object.segments[0];
            // The vDSO is no file.
            let Some(file) = mapped_at(segment.start) else {
                continue;
            };
            assert_eq!(mapped_whole(segment).as_deref(), Some(&*file));
            found += 1;
        }
        assert!(found > 1);
        assert_eq!(mapped_whole(&(1..2)), None);
    }

    #[test]
    fn lines_of_proc_maps_are_parsed() {
        let line = "7f00-7f10 r-xp 00000000 08:01 12 /usr/lib/libibverbs.so.1.14.44.0";
        assert_eq!(
            mapped_file(line, 0x7f05),
            Some("/usr/lib/libibverbs.so.1.14.44.0")
        );
        assert_eq!(mapped_file(line, 0x7f10), None);
        let gone = "7f00-7f10 r-xp 0 08:01 12 /a b/libx.so.1 (deleted)";
        assert_eq!(mapped_file(gone, 0x7f00), Some("/a b/libx.so.1"));
        for bad in ["", "zz-1 /x", "7f00 /x", "7f00-7f10 rw-p 0 00:00 0"] {
            assert_eq!(mapped_file(bad, 0x7f00), None, "{bad}");
        }
    }
}
