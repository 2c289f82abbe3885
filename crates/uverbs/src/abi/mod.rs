//! The kernel's uverbs ABI: structures and constants of its user API headers.
//!
//! Every structure is `#[repr(C)]` with explicit padding. Its size and the
//! relevant offsets are asserted at compile time, and a test compares them with
//! the installed C headers.
//!
//! | file | kernel header |
//! |---|---|
//! | [`ioctl`] | `rdma_user_ioctl_cmds.h`: the ioctl's frame |
//! | [`ids`] | `ib_user_ioctl_cmds.h`: objects, methods, attributes |
//! | [`later`] | the same header: additions after Linux 6.1 |
//! | [`verbs`] | `ib_user_ioctl_verbs.h`: structures of the ioctl methods |
//! | [`mod@write`] | `ib_user_verbs.h`: structures of the write commands |
//! | [`netlink`] | `rdma_netlink.h` and the parts of `netlink.h` that it needs |

pub mod ids;
pub mod ioctl;
pub mod later;
pub mod netlink;
pub mod verbs;
pub mod write;

/// Declares kernel structures: `#[repr(C)]`, public fields, convertible to and
/// from plain bytes (so no hidden padding), and an asserted size.
macro_rules! kernel_structs {
    ($($(#[$doc:meta])* $name:ident, $size:literal { $($(#[$fdoc:meta])* $field:ident : $ty:ty),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq,
                 ::zerocopy::FromBytes, ::zerocopy::IntoBytes, ::zerocopy::Immutable, ::zerocopy::KnownLayout)]
        #[allow(missing_docs, reason = "the fields are the kernel header's, by the same names")]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty),+ }
        const _: () = assert!(::core::mem::size_of::<$name>() == $size);
        #[cfg(test)]
        impl $name {
            /// Fields: name, offset, size.
            pub(crate) const FIELDS: &'static [(&'static str, usize, usize)] = &[
                $((stringify!($field), ::core::mem::offset_of!($name, $field), ::core::mem::size_of::<$ty>())),+
            ];
        }
    )+};
}
pub(crate) use kernel_structs;
