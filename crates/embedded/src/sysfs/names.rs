//! Names of devices.

use std::fmt;

/// The names of devices without a given one begin so.
pub const DEFAULT_NAME: &str = "mlx5_";
/// Greatest number of devices of a process.
pub const MAX_DEVICES: usize = 16;
/// Maximum length of a name: `IB_DEVICE_NAME_MAX` without the end of the string.
const MAX_NAME: usize = 63;

/// The reason why a list does not name the devices.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NameError {
    /// There are more names than devices, of which there are so many.
    TooMany(usize),
    /// This is no name of a device.
    Invalid(String),
    /// Two devices have this name.
    Repeated(String),
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany(devices) => write!(f, "more names than devices ({devices})"),
            Self::Invalid(name) => write!(
                f,
                "\"{name}\" is no name of a device: 1 to {MAX_NAME} letters, digits, _, - and ."
            ),
            Self::Repeated(name) => write!(f, "two devices have the name \"{name}\""),
        }
    }
}

impl std::error::Error for NameError {}

/// Returns the name of a device that is given none.
pub fn default_name(number: usize) -> String {
    format!("{DEFAULT_NAME}{number}")
}

/// Parses a list of names, separated by commas; devices without one have their default.
///
/// # Errors
/// There are more names than devices, one is malformed, or two are the same.
pub fn device_names(list: &str, devices: usize) -> Result<Vec<String>, NameError> {
    let given = list.split(',').filter(|_| !list.is_empty());
    let mut names: Vec<String> = given.map(str::to_owned).collect();
    if names.len() > devices {
        return Err(NameError::TooMany(devices));
    }
    names.extend((names.len()..devices).map(default_name));
    for (number, name) in names.iter().enumerate() {
        let is_known = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte);
        if name.is_empty()
            || name.len() > MAX_NAME
            || name.starts_with('.')
            || !name.bytes().all(is_known)
        {
            return Err(NameError::Invalid(name.clone()));
        }
        if names[..number].contains(name) {
            return Err(NameError::Repeated(name.clone()));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_names() {
        assert_eq!(device_names("", 2).unwrap(), ["mlx5_0", "mlx5_1"]);
        assert_eq!(device_names("rxe0", 2).unwrap(), ["rxe0", "mlx5_1"]);
        assert_eq!(device_names("b-1,a.0", 2).unwrap(), ["b-1", "a.0"]);
        let long = "a".repeat(MAX_NAME + 1);
        for wrong in [
            "a,b,c", "a,", ",a", "a,a", "mlx5_1", "a/b", "a b", "..", &long,
        ] {
            assert!(device_names(wrong, 2).is_err(), "{wrong}");
        }
    }
}
