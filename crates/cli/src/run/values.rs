//! Values of options, with errors that say what is right: clap names the option.

use std::num::NonZeroU32;

use super::DEVICES;

/// Parses a number.
pub(super) fn number(text: &str) -> Result<u64, String> {
    (text.parse()).map_err(|_| "use a number from 0 to 2^64 - 1".to_owned())
}

/// Parses a number of seconds, which can be added to any time.
pub(super) fn seconds(text: &str) -> Result<u64, String> {
    let seconds = text.parse::<u32>().map(u64::from);
    seconds.map_err(|_| "use a whole number of seconds, such as 30".to_owned())
}

/// Parses a number of bytes.
pub(super) fn bytes(text: &str) -> Result<u64, String> {
    (text.parse()).map_err(|_| "use a number of bytes, such as 1".to_owned())
}

/// Parses a number of runs.
pub(super) fn runs(text: &str) -> Result<NonZeroU32, String> {
    (text.parse()).map_err(|_| "use a number of runs from 1 on".to_owned())
}

/// Parses the kinds of devices that the plugin serves.
pub(super) fn kinds(list: &str) -> Result<String, String> {
    let is_known = |kind: &str| DEVICES.split(',').any(|it| it == kind.trim());
    match list.split(',').find(|kind| !is_known(kind)) {
        None => Ok(list.to_owned()),
        Some(kind) => Err(format!(
            "there is no kind \"{kind}\"; use rxe, mlx5 or {DEVICES}"
        )),
    }
}
