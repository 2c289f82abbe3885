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
    /// Returns the default for a library at this path. Under its own name the plugin leaves ConnectX
    /// to libmlx5, of which it lacks some operations; in libmlx5's place there is
    /// nobody else.
    fn by_name(path: &str) -> Self {
        let name = path.rsplit('/').next().unwrap_or(path);
        let mlx5 = name.starts_with("libmlx5");
        Self { rxe: !mlx5, mlx5 }
    }
}

/// Returns the kinds of devices in `RINGVERBS_DEVICES`, a list separated by commas. If
/// it is unset, or the program has raised rights, the library's file name decides.
pub fn served(own: &str) -> Served {
    variable("RINGVERBS_DEVICES")
        .map_or_else(|| Served::by_name(own), |list| parse(list.as_bytes()))
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
    }

    #[test]
    fn the_library_s_name_selects_devices() {
        let rxe = Served {
            rxe: true,
            mlx5: false,
        };
        let mlx5 = Served {
            rxe: false,
            mlx5: true,
        };
        assert_eq!(Served::by_name("/opt/libringverbs-rdmav34.so"), rxe);
        assert_eq!(Served::by_name("/usr/lib/libmlx5.so.1"), mlx5);
        assert_eq!(
            Served::by_name("/usr/lib/libibverbs/libmlx5-rdmav57.so"),
            mlx5
        );
        assert_eq!(Served::by_name("libmlx5.so.1"), mlx5);
        assert_eq!(Served::by_name("/opt/libmlx5/libringverbs-rdmav34.so"), rxe);
    }
}
