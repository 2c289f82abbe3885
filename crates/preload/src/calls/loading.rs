//! Loading libraries so that their calls reach this one.
//!
//! A library that is opened with RTLD_DEEPBIND, or in a namespace of its own (dlmopen), finds
//! the functions of the C library before those of preloaded libraries: a libibverbs in it would
//! see no device.

use std::arch::{asm, global_asm};
use std::ffi::{CStr, c_char, c_int, c_long, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::export;
use crate::config::{self, print_error};
use crate::real::{LibcFunction, Origin};

/// The C library's `dlopen`, once known.
static DLOPEN: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// Looks `dlopen` up, before its first call.
extern "C" fn find_dlopen() -> *mut c_void {
    static FUNCTION: LibcFunction = LibcFunction::new("dlopen\0");
    let found = FUNCTION.address(Origin::Program);
    DLOPEN.store(found, Ordering::Relaxed);
    found
}

// `dlopen` without RTLD_DEEPBIND. The C library takes the caller by the return address: it
// searches the caller's RUNPATH, and `$ORIGIN` is the caller's folder. Therefore this only
// changes the flags and jumps.
#[cfg(target_arch = "x86_64")]
global_asm!(
    "ringverbs_dlopen:",
    "and esi, {mask}",
    "mov rax, qword ptr [rip + {dlopen}]",
    "test rax, rax",
    "jne 2f",
    "push rdi",
    "push rsi",
    "sub rsp, 8",
    "call {find}",
    "add rsp, 8",
    "pop rsi",
    "pop rdi",
    "2:",
    "jmp rax",
    mask = const !libc::RTLD_DEEPBIND,
    dlopen = sym DLOPEN,
    find = sym find_dlopen,
);
#[cfg(target_arch = "aarch64")]
global_asm!(
    "ringverbs_dlopen:",
    "and w1, w1, {mask}",
    "adrp x16, {dlopen}",
    "ldr x16, [x16, :lo12:{dlopen}]",
    "cbnz x16, 2f",
    "stp x29, x30, [sp, -32]!",
    "stp x0, x1, [sp, 16]",
    "bl {find}",
    "mov x16, x0",
    "ldp x0, x1, [sp, 16]",
    "ldp x29, x30, [sp], 32",
    "2:",
    "br x16",
    mask = const !libc::RTLD_DEEPBIND,
    dlopen = sym DLOPEN,
    find = sym find_dlopen,
);

/// Exports `dlopen`, which a symbol of `global_asm!` cannot be. Without arguments and variables
/// the function has no code beside its jump. Code of this library must not call it by its name:
/// the compiler takes it for a function that does not return.
#[unsafe(no_mangle)]
unsafe extern "C" fn dlopen() -> ! {
    // SAFETY: the code above is for a caller of this function: nothing has changed since.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        asm!("jmp ringverbs_dlopen", options(noreturn, nostack))
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        asm!("b ringverbs_dlopen", options(noreturn, nostack))
    }
}

export! {
    dlmopen(namespace: c_long, file: *const c_char, flags: c_int) -> *mut c_void {
        static DLMOPEN: LibcFunction = LibcFunction::new("dlmopen\0");
        /// `LM_ID_BASE`: the program's own.
        const BASE: c_long = 0;
        let refused = namespace != BASE && config::get().is_some();
        let (namespace, file, flags) = match refused {
            true => {
                if !file.is_null() {
                    // SAFETY: the program passes a string.
                    let name = unsafe { CStr::from_ptr(file) }.to_string_lossy();
                    print_error(&format!(
                        "dlmopen of {name} is refused: the devices are not there in a namespace \
                         of its own; without RINGVERBS_EMBEDDED it is not"
                    ));
                }
                // Sets what dlerror returns.
                (BASE, c"/dlmopen is refused by ringverbs".as_ptr(), flags)
            }
            false => (namespace, file, flags & !libc::RTLD_DEEPBIND),
        };
        let address = DLMOPEN.address(Origin::Program);
        if address.is_null() {
            return ptr::null_mut();
        }
        // SAFETY: the C library's function of this name has this type.
        let function = unsafe {
            std::mem::transmute::<
                *mut c_void,
                unsafe extern "C-unwind" fn(c_long, *const c_char, c_int) -> *mut c_void,
            >(address)
        };
        // SAFETY: guaranteed by the caller.
        unsafe { function(namespace, file, flags) }
    }
}

#[cfg(test)]
mod tests {
    /// Nothing precedes the jump: the stack is the caller's.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn dlopen_is_a_jump() {
        // SAFETY: code of this library is readable.
        let code = unsafe { (super::dlopen as *const u8).read() };
        assert!(matches!(code, 0xe9 | 0xeb), "{code:#x}");
    }
}
