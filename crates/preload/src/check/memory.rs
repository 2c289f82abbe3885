//! Reads of the program's memory, which may not be mapped.
//!
//! A system call that reads it (`process_vm_readv`) costs more than the check of a short message.
//! Here one function copies, and the handler of faults ([`recover`]) lets it return an error where
//! it meets an address that cannot be read.

use std::arch::global_asm;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use crate::fault;

// Copies from an address, the second argument, and returns 0, or `EFAULT` from
// `ringverbs_copy_failed` on. Faults occur from `ringverbs_copy` on before that; the function
// uses no stack.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".p2align 4",
    ".hidden ringverbs_copy\n.globl ringverbs_copy",
    ".type ringverbs_copy, @function\nringverbs_copy:",
    "mov rcx, rdx",
    "rep movsb",
    "xor eax, eax",
    "ret",
    ".hidden ringverbs_copy_failed\n.globl ringverbs_copy_failed\nringverbs_copy_failed:",
    "mov eax, {fault}",
    "ret",
    fault = const libc::EFAULT,
);
#[cfg(target_arch = "aarch64")]
global_asm!(
    ".p2align 4",
    ".hidden ringverbs_copy\n.globl ringverbs_copy",
    ".type ringverbs_copy, %function\nringverbs_copy:",
    "cmp x2, #16",
    "b.lo 2f",
    "ldp x3, x4, [x1], #16",
    "stp x3, x4, [x0], #16",
    "sub x2, x2, #16",
    "b ringverbs_copy",
    "2: cbz x2, 3f",
    "ldrb w3, [x1], #1",
    "strb w3, [x0], #1",
    "sub x2, x2, #1",
    "b 2b",
    "3: mov w0, #0",
    "ret",
    ".hidden ringverbs_copy_failed\n.globl ringverbs_copy_failed\nringverbs_copy_failed:",
    "mov w0, #{fault}",
    "ret",
    fault = const libc::EFAULT,
);

unsafe extern "C" {
    fn ringverbs_copy(to: *mut u8, from: usize, length: usize) -> c_int;
    fn ringverbs_copy_failed();
}

/// Reads memory of this process that may not be mapped. Returns what it has, or `None` if some of
/// it is not mapped, or not readable.
pub(super) fn read(address: u64, out: &mut [MaybeUninit<u8>]) -> Option<&mut [u8]> {
    let from = usize::try_from(address).ok()?;
    let to = out.as_mut_ptr().cast::<u8>();
    // SAFETY: `out` is writable. Where the program's memory cannot be read, the handler of faults
    // lets the function return; it is no compiled code that others' writes might confuse.
    let result = unsafe { ringverbs_copy(to, from, out.len()) };
    // SAFETY: all of `out` was written.
    (result == 0).then(|| unsafe { std::slice::from_raw_parts_mut(to, out.len()) })
}

/// Called in a handler of a fault, with what the kernel passes. Returns whether it was in
/// [`read`], which then returns.
///
/// # Safety
/// The argument must be the context of a handler of this thread.
pub(crate) unsafe fn recover(context: *mut c_void) -> bool {
    // SAFETY: guaranteed by the caller.
    let at = unsafe { fault::instruction_mut(context) };
    let failed = ringverbs_copy_failed as *const () as usize;
    let reads = ringverbs_copy as *const () as usize..failed;
    let is_in_read = reads.contains(&(*at as usize));
    if is_in_read {
        *at = failed as _;
    }
    is_in_read
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_mapped_is_not_read() {
        fault::install();
        let mut out = [MaybeUninit::uninit(); 70];
        let bytes: Vec<u8> = (0..70).collect();
        let at = bytes.as_ptr().expose_provenance() as u64;
        for length in [0, 1, 15, 16, 17, 70] {
            assert_eq!(
                read(at, &mut out[..length]).as_deref(),
                Some(&bytes[..length])
            );
        }
        for address in [0, 8, u64::MAX - 7, 1 << 63] {
            assert!(read(address, &mut out[..8]).is_none(), "{address:#x}");
        }
        let page = fault::page_size();
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new pages, of which the second one is protected.
        let pages = unsafe {
            let writable = libc::PROT_READ | libc::PROT_WRITE;
            let pages = libc::mmap(std::ptr::null_mut(), 2 * page, writable, private, -1, 0);
            assert_eq!(
                libc::mprotect(pages.byte_add(page), page, libc::PROT_NONE),
                0
            );
            pages
        };
        let end = (pages.expose_provenance() + page) as u64;
        assert!(read(end - 8, &mut out[..8]).is_some());
        assert!(read(end - 7, &mut out[..8]).is_none());
    }
}
