//! The ioctl methods of mlx5_ib: UARs, DevX, the location of device
//! memory, and queries of objects that another process created through a shared
//! file.

/// Methods of the driver, by name.
macro_rules! methods {
    ($($name:ident: $object:literal, $object_id:expr, $method_id:expr;)+) => {$(
        static $name: uverbs::driver::DriverMethod = uverbs::driver::DriverMethod {
            name: stringify!($name),
            object: $object,
            object_id: $object_id,
            method_id: $method_id,
        };
    )+};
}

/// Kinds of objects of the driver: the type of their handle numbers, and the method
/// that destroys one.
macro_rules! kinds {
    ($($kind:ident $handle:ident, $doc:literal, $destroy:ident;)+) => {$(
        #[doc = concat!("Handle number of ", $doc, ".")]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $handle(pub u32);

        impl From<$handle> for u32 {
            fn from(handle: $handle) -> u32 {
                handle.0
            }
        }

        enum $kind {}

        impl uverbs::driver::Kind for $kind {
            type Handle = $handle;
            type Events = ();
            const DESTROY: uverbs::Command = uverbs::Command::Driver(&$destroy);
            fn destroy(context: &uverbs::Context, handle: $handle) -> Result<(), uverbs::Error> {
                // SAFETY: no input is added.
                let mut ioctl = unsafe { uverbs::driver::Ioctl::driver(&$destroy) };
                ioctl.acts_on(handle.0);
                // The handle is the first attribute of each of these methods.
                ioctl.handle($crate::ioctl::ids::NAMESPACE, handle.0);
                ioctl.run(context).map(drop)
            }
        }
    )+};
}

pub mod devx;
pub mod dm;
#[cfg(any(test, feature = "fake"))]
mod fake;
pub mod flow;
pub mod ids;
mod query;
pub mod uar;

pub use dm::DmLocation;
#[cfg(any(test, feature = "fake"))]
pub use fake::METHODS;
pub use query::{data_direct_access, data_direct_path, query_context, query_pd, query_port};
pub use uar::{Uar, UarHandle, UarKind, UarLocation};
