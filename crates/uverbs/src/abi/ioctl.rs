//! The frame of `RDMA_VERBS_IOCTL`: a header and an array of attributes.

use super::kernel_structs;

/// `_IOWR(0x1b, 1, struct ib_uverbs_ioctl_hdr)`. The size in the number is that
/// of the bare header; the header contains the actual length.
pub const RDMA_VERBS_IOCTL: libc::Ioctl =
    nix::request_code_readwrite!(0x1b, 1, size_of::<IoctlHdr>()) as libc::Ioctl;

/// The kernel fails the call if it does not know the attribute.
pub const ATTR_F_MANDATORY: u16 = 1 << 0;
/// Set by the kernel on an output attribute that it has written.
pub const ATTR_F_VALID_OUTPUT: u16 = 1 << 1;

kernel_structs! {
    /// `struct ib_uverbs_attr`. `data` is a pointer, up to eight bytes inline,
    /// an object's handle, or a file descriptor, depending on the attribute's
    /// type.
    Attr, 16 { attr_id: u16, len: u16, flags: u16, enum_or_reserved: u16, data: u64 }

    /// `struct ib_uverbs_ioctl_hdr` without its attributes.
    IoctlHdr, 24 { length: u16, object_id: u16, method_id: u16, num_attrs: u16, reserved1: u64, driver_id: u32, reserved2: u32 }
}

const _: () = {
    assert!(core::mem::offset_of!(Attr, data) == 8);
    assert!(core::mem::offset_of!(IoctlHdr, driver_id) == 16);
    assert!(RDMA_VERBS_IOCTL == 0xc018_1b01);
};
