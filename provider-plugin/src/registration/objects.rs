//! The shared objects of the process, and the libibverbs among them.

use core::ffi::{CStr, c_int, c_void};
use core::ops::Range;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::evidence::Refusal;

/// The symbols of a private ABI.
#[derive(Debug)]
pub struct PrivateAbi {
    /// Its number: of the rdma-core release that introduced it.
    pub number: u32,
    /// The version of libibverbs's private symbols.
    pub version: &'static CStr,
    /// The function by which providers register.
    pub register_driver: &'static CStr,
}

/// Those of [`LAYOUTS`](crate::layout::LAYOUTS).
const PRIVATE_ABIS: [PrivateAbi; 5] = [
    PrivateAbi {
        number: 34,
        version: c"IBVERBS_PRIVATE_34",
        register_driver: c"verbs_register_driver_34",
    },
    PrivateAbi {
        number: 57,
        version: c"IBVERBS_PRIVATE_57",
        register_driver: c"verbs_register_driver_57",
    },
    PrivateAbi {
        number: 59,
        version: c"IBVERBS_PRIVATE_59",
        register_driver: c"verbs_register_driver_59",
    },
    PrivateAbi {
        number: 64,
        version: c"IBVERBS_PRIVATE_64",
        register_driver: c"verbs_register_driver_64",
    },
    PrivateAbi {
        number: 65,
        version: c"IBVERBS_PRIVATE_65",
        register_driver: c"verbs_register_driver_65",
    },
];

impl PrivateAbi {
    /// The supported private ABI of that number.
    pub fn supported(number: u32) -> Option<&'static PrivateAbi> {
        PRIVATE_ABIS.iter().find(|abi| abi.number == number)
    }
}

/// Numbers that are searched in a library without a supported private ABI, for the message
/// that refuses it.
const UNSUPPORTED: Range<u32> = 13..200;

/// A loaded object.
#[derive(Debug)]
pub struct Object {
    /// The loader's name of the object; empty for the program itself.
    pub name: CString,
    base: usize,
    headers: Box<[libc::Elf64_Phdr]>,
}

impl Object {
    /// Returns whether the address is in one of the object's segments.
    pub fn contains(&self, address: usize) -> bool {
        self.segments()
            .any(|(_, segment)| segment.contains(&address))
    }

    /// Addresses of the segments that are mapped, with their flags.
    fn segments(&self) -> impl Iterator<Item = (u32, Range<usize>)> {
        self.parts(libc::PT_LOAD)
    }

    /// Addresses of the notes that are within readable segments.
    fn notes(&self) -> impl Iterator<Item = Range<usize>> {
        let is_readable = |note: &Range<usize>| {
            self.segments().any(|(flags, segment)| {
                flags & libc::PF_R != 0 && segment.start <= note.start && note.end <= segment.end
            })
        };
        (self.parts(libc::PT_NOTE).map(|(_, note)| note)).filter(is_readable)
    }

    /// Flags and addresses of the parts of a type.
    fn parts(&self, kind: u32) -> impl Iterator<Item = (u32, Range<usize>)> {
        let headers = self.headers.iter().filter(move |it| it.p_type == kind);
        headers.map(|header| {
            let start = self.base.wrapping_add(header.p_vaddr as usize);
            let end = start.saturating_add(header.p_memsz as usize);
            (header.p_flags, start..end)
        })
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
        let headers = if info.dlpi_phdr.is_null() {
            &[]
        } else {
            // SAFETY: the loader says there are `dlpi_phnum` headers.
            unsafe { core::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) }
        };
        out.push(Object {
            name,
            base: info.dlpi_addr as usize,
            headers: headers.into(),
        });
        0
    }
    // Most programs have fewer.
    let mut out: Vec<Object> = Vec::with_capacity(64);
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
    pub fn register_driver(&self, pabi: &PrivateAbi) -> Option<*mut c_void> {
        self.find_version(pabi.register_driver, pabi.version)
    }
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
        let mut library = Library {
            object,
            handle,
            pabis: Vec::new(),
        };
        // Supported private ABIs first: searching a missing name costs a search of all
        // dependencies and an error message.
        let exported = PRIVATE_ABIS
            .iter()
            .filter(|abi| library.symbol(abi.register_driver, abi.version).is_some());
        library.pabis = exported.map(|abi| abi.number).collect();
        if library.pabis.is_empty() {
            library.pabis = library.unsupported_pabis();
        }
        (!library.pabis.is_empty()).then_some(library)
    }

    /// The exported private ABIs of [`UNSUPPORTED`].
    #[cold]
    fn unsupported_pabis(&self) -> Vec<u32> {
        let is_exported = |number: &u32| {
            let name = CString::new(format!("verbs_register_driver_{number}"));
            let version = CString::new(format!("IBVERBS_PRIVATE_{number}"));
            let (Ok(name), Ok(version)) = (name, version) else {
                return false;
            };
            self.symbol(&name, &version).is_some()
        };
        UNSUPPORTED.filter(is_exported).collect()
    }

    /// Address of a symbol that this library itself defines, at the version.
    pub fn symbol(&self, name: &CStr, version: &CStr) -> Option<*mut c_void> {
        let address = self.handle.find_version(name, version)?;
        // The search includes dependencies; their symbols do not count.
        self.object.contains(address as usize).then_some(address)
    }

    /// The notes in the library's file.
    pub fn notes(&self) -> impl Iterator<Item = &[u8]> {
        self.object.notes().map(|note| {
            // SAFETY: within a readable segment of the library, which stays loaded
            // as long as the handle.
            unsafe { core::slice::from_raw_parts(note.start as *const u8, note.len()) }
        })
    }

    /// The path of the mapped file, whatever link it was opened through, and even if it was
    /// replaced since.
    pub fn file(&self) -> Option<OsString> {
        let (_, segment) = self.object.segments().next()?;
        mapped_whole(&segment)
            .or_else(|| mapped_at(segment.start))
            .or_else(|| {
                let name = OsStr::from_bytes(self.object.name.to_bytes());
                std::fs::canonicalize(name).ok().map(Into::into)
            })
    }

    /// Keeps the library loaded for the life of the process.
    pub fn leak(self) {
        core::mem::forget(self.handle);
    }
}

/// The file that is mapped at a segment, if the segment is a single mapping.
fn mapped_whole(segment: &Range<usize>) -> Option<OsString> {
    let page = ring::Mapping::page_size();
    let start = segment.start / page * page;
    let end = segment.end.checked_next_multiple_of(page)?;
    let mut link = Vec::with_capacity(64);
    link.extend_from_slice(b"/proc/self/map_files/");
    push_hexadecimal(&mut link, start);
    link.push(b'-');
    push_hexadecimal(&mut link, end);
    let file = std::fs::read_link(OsStr::from_bytes(&link)).ok()?;
    Some(without_deleted(file.into()))
}

/// Appends a number as `{:x}` formats it.
fn push_hexadecimal(text: &mut Vec<u8>, number: usize) {
    let digits = (usize::BITS - number.leading_zeros()).div_ceil(4).max(1);
    for digit in (0..digits).rev() {
        text.push(b"0123456789abcdef"[(number >> (4 * digit)) & 0xf]);
    }
}

/// The file that is mapped at an address, from the list of all mappings, which is long in a
/// large program.
fn mapped_at(address: usize) -> Option<OsString> {
    let maps = std::fs::read("/proc/self/maps").ok()?;
    let mut lines = maps.split(|byte| *byte == b'\n');
    let file = lines.find_map(|line| mapped_file(line, address))?;
    Some(without_deleted(OsStr::from_bytes(file).to_owned()))
}

/// Removes the kernel's mark of a deleted file.
fn without_deleted(file: OsString) -> OsString {
    let mut file = file.into_vec();
    if file.ends_with(b" (deleted)") {
        file.truncate(file.len() - b" (deleted)".len());
    }
    OsString::from_vec(file)
}

/// The file of a line of /proc/self/maps, if the line covers the address.
fn mapped_file(line: &[u8], address: usize) -> Option<&[u8]> {
    let range = line.split(|byte| *byte == b' ').next()?;
    let (start, end) = core::str::from_utf8(range).ok()?.split_once('-')?;
    let start = usize::from_str_radix(start, 16).ok()?;
    let end = usize::from_str_radix(end, 16).ok()?;
    if !(start..end).contains(&address) {
        return None;
    }
    let path = line.iter().position(|byte| *byte == b'/')?;
    Some(&line[path..])
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
    use crate::layout::LAYOUTS;

    #[test]
    fn every_layout_has_its_symbols() {
        let mut of_layouts: Vec<u32> = LAYOUTS.iter().map(|layout| layout.pabi).collect();
        of_layouts.dedup();
        let supported: Vec<u32> = PRIVATE_ABIS.iter().map(|abi| abi.number).collect();
        assert_eq!(supported, of_layouts);
        for abi in &PRIVATE_ABIS {
            let text = |text: &str| CString::new(format!("{text}_{}", abi.number)).unwrap();
            assert_eq!(abi.version, &*text("IBVERBS_PRIVATE"));
            assert_eq!(abi.register_driver, &*text("verbs_register_driver"));
        }
    }

    #[test]
    fn hexadecimal_is_as_of_the_formatter() {
        for number in [0, 9, 0xa, 0x10, 0x7f00_1234_5000, usize::MAX] {
            let mut text = Vec::new();
            push_hexadecimal(&mut text, number);
            assert_eq!(text, format!("{number:x}").as_bytes());
        }
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
            let (_, segment) = object.segments().next().unwrap();
            // The vDSO is no file.
            let Some(file) = mapped_at(segment.start) else {
                continue;
            };
            assert_eq!(mapped_whole(&segment), Some(file));
            found += 1;
        }
        assert!(found > 1);
        assert_eq!(mapped_whole(&(1..2)), None);
    }

    #[test]
    fn lines_of_proc_maps_are_parsed() {
        let line = b"7f00-7f10 r-xp 00000000 08:01 12 /usr/lib/libibverbs.so.1.14.44.0";
        assert_eq!(
            mapped_file(line, 0x7f05),
            Some(&b"/usr/lib/libibverbs.so.1.14.44.0"[..])
        );
        assert_eq!(mapped_file(line, 0x7f10), None);
        let spaces = b"7f00-7f10 r-xp 0 08:01 12 /a b/libx.so.1";
        assert_eq!(mapped_file(spaces, 0x7f00), Some(&b"/a b/libx.so.1"[..]));
        for bad in ["", "zz-1 /x", "7f00 /x", "7f00-7f10 rw-p 0 00:00 0"] {
            assert_eq!(mapped_file(bad.as_bytes(), 0x7f00), None, "{bad}");
        }
        assert_eq!(without_deleted("/a (deleted)".into()), "/a");
        assert_eq!(without_deleted("/a".into()), "/a");
    }
}
