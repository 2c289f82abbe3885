//! Size and compression of CQEs.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use mlx5::{CqOptions, MiniFormat};
use uverbs::environment::variable;

use crate::errno::Errno;

/// The options in `RINGVERBS_MLX5_CQE`, a comma-separated list: `128` for CQEs of 128 bytes
/// instead of 64, `compressed` for compressed CQEs. Read once, when the first queue is
/// created.
///
/// Unset means neither, as with the stock provider: compression saves bus writes,
/// but costs processor time and latency.
pub fn cq_options() -> CqOptions {
    static OPTIONS: OnceLock<CqOptions> = OnceLock::new();
    *OPTIONS.get_or_init(|| {
        let requested = variable("RINGVERBS_MLX5_CQE").map(|list| parse(list.as_bytes()));
        requested.unwrap_or_default()
    })
}

/// As [`cq_options`], with the CQE size of `MLX5_CQE_SIZE`, which is read whenever a queue is
/// created, as with the stock provider.
///
/// # Errors
/// EINVAL for a size other than 64 and 128.
pub fn sized_cq_options() -> Result<CqOptions, Errno> {
    let mut options = cq_options();
    match variable("MLX5_CQE_SIZE").as_deref().map(OsStr::as_bytes) {
        None => {}
        Some(b"64") => options.wide = false,
        Some(b"128") => options.wide = true,
        Some(_) => return Err(Errno::INVAL),
    }
    Ok(options)
}

fn parse(list: &[u8]) -> CqOptions {
    let mut options = CqOptions::default();
    for word in list.split(|byte| *byte == b',') {
        match word.trim_ascii() {
            b"128" => options.wide = true,
            // The format that every device has.
            b"compressed" => options.compression = Some(MiniFormat::Hash),
            b"64" | b"" => {}
            word => {
                let word = String::from_utf8_lossy(word);
                tracing::warn!(%word, "unknown option in RINGVERBS_MLX5_CQE");
            }
        }
    }
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cqe_setting_is_parsed() {
        let is = |wide, compressed: bool| CqOptions {
            wide,
            compression: compressed.then_some(MiniFormat::Hash),
            ..CqOptions::default()
        };
        assert_eq!(parse(b""), is(false, false));
        assert_eq!(parse(b"64, \xff"), is(false, false));
        assert_eq!(parse(b"128"), is(true, false));
        assert_eq!(parse(b"compressed"), is(false, true));
        assert_eq!(parse(b" compressed, 128"), is(true, true));
        assert_eq!(cq_options(), is(false, false));
    }
}
