//! ABI numbers with named values.

/// Declares a type for numbers of the ABI, with names for the known values.
/// Internal to this project's crates.
#[doc(hidden)]
#[macro_export]
macro_rules! open_enum {
    ($(#[$doc:meta])* $name:ident($repr:ty) { $($(#[$vdoc:meta])* $value:ident = $number:literal,)+ }) => {
        $(#[$doc])*
        ///
        /// Values without a name are valid.
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
