//! Ioctl methods and attributes of a device's driver, for the device's crate.
//!
//! A driver adds to the ioctl interface in two ways: methods of driver-specific or common
//! objects ([`DriverMethod`], [`Ioctl::driver`]), and attributes of common methods
//! ([`DriverOutput`]). Their numbers are in the driver's namespace, from [`NAMESPACE`] on. A
//! driver-specific object implements [`Kind`]; [`Owned`] then destroys it once, and
//! [`owned_methods`](crate::owned_methods) gives it the methods of all handles.

pub use crate::command::{Answer, Ioctl, Slot};
pub use crate::handle::{Kind, Owned};

/// `UVERBS_ID_NS_SHIFT`: the first number of the driver's namespace, for
/// objects, methods and attributes alike.
pub const NAMESPACE: u16 = 1 << 12;

/// A method that a driver adds.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct DriverMethod {
    /// Name of the method, in the spelling of the driver's header.
    pub name: &'static str,
    /// Kind of object that it acts on, as errors name it.
    pub object: &'static str,
    /// Number of the object.
    pub object_id: u16,
    /// Number of the method.
    pub method_id: u16,
}

/// A number that a driver adds to a common method as an input. It is no address.
#[derive(Clone, Copy, Debug)]
pub struct DriverInput {
    /// Number of the attribute.
    pub attr_id: u16,
    /// The number.
    pub value: u32,
}

/// An output that a driver adds to a common method.
#[derive(Debug)]
pub struct DriverOutput<'a> {
    /// Number of the attribute.
    pub attr_id: u16,
    /// Buffer for the output. It is cleared before the call, so what a driver
    /// with a shorter answer does not write is zero.
    pub buffer: &'a mut [u8],
}
