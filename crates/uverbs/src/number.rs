//! Numbers of the ABI with names for the known values.

/// Declares a number of the ABI with names for the known values. For this
/// project's crates.
#[doc(hidden)]
#[macro_export]
macro_rules! open_enum {
    ($(#[$doc:meta])* $name:ident($repr:ty) { $($(#[$vdoc:meta])* $value:ident = $number:literal,)+ }) => {
        $(#[$doc])*
        ///
        /// Open: a value without a name here is kept, not refused.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub $repr);

        impl $name {
            $($(#[$vdoc])* pub const $value: Self = Self($number);)+
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match *self {
                    $(Self::$value => f.write_str(stringify!($value)),)+
                    Self(other) => write!(f, concat!(stringify!($name), "({})"), other),
                }
            }
        }
    };
}
