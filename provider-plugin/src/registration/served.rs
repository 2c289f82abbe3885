//! Which devices ringverbs is to serve.

use std::os::unix::ffi::OsStrExt;

use uverbs::environment::variable;

/// Kinds of devices that are registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Served {
    pub rxe: bool,
    pub mlx5: bool,
}

impl Served {
    /// Of a release in which mlx5 is not complete.
    const DEFAULT: Self = Self {
        rxe: true,
        mlx5: false,
    };
}

/// What `RINGVERBS_DEVICES` says: kinds of devices, with commas between them.
/// Unset, rxe; in a program with raised rights it does not count.
pub fn served() -> Served {
    variable("RINGVERBS_DEVICES").map_or(Served::DEFAULT, |list| parse(list.as_bytes()))
}

fn parse(list: &[u8]) -> Served {
    let mut served = Served {
        rxe: false,
        mlx5: false,
    };
    for word in list.split(|byte| *byte == b',') {
        match word.trim_ascii() {
            b"rxe" => served.rxe = true,
            b"mlx5" => served.mlx5 = true,
            b"" => {}
            word => {
                let word = String::from_utf8_lossy(word);
                tracing::warn!(%word, "RINGVERBS_DEVICES names devices that ringverbs does not know");
            }
        }
    }
    served
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_setting_is_parsed() {
        let is = |rxe, mlx5| Served { rxe, mlx5 };
        assert_eq!(parse(b"rxe"), is(true, false));
        assert_eq!(parse(b"mlx5"), is(false, true));
        assert_eq!(parse(b" mlx5 , rxe,"), is(true, true));
        assert_eq!(parse(b""), is(false, false));
        assert_eq!(parse(b"mlx4,RXE,\xff"), is(false, false));
        assert_eq!(Served::DEFAULT, is(true, false));
    }
}
