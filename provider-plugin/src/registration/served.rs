//! Selection of the kinds of devices that the plugin registers for.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use uverbs::environment::variable;

/// Kinds of devices that are registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedDevices {
    pub rxe: bool,
    pub mlx5: bool,
}

impl ServedDevices {
    /// Returns the default for a library at `path`: all kinds; ConnectX only for a copy that
    /// replaces libmlx5. If such a copy is installed, the plugin leaves ConnectX to it: its
    /// mlx5dv functions accept no other copy's devices.
    fn by_path(path: &str) -> Self {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        if name.starts_with("libmlx5") {
            return Self {
                rxe: false,
                mlx5: true,
            };
        }
        // Detects the files that `cargo xtask install` installs.
        let is_provider = folder == "libibverbs" || folder.ends_with("/libibverbs");
        let libraries = || Path::new(folder).parent();
        let is_replaced = is_provider
            && libraries().is_some_and(|libraries| {
                let link = libraries.join("libmlx5.so.1").read_link();
                link.is_ok_and(|target| target.as_os_str().as_bytes().ends_with(b".ringverbs"))
                    || libraries.join("ringverbs/libmlx5.so.1").exists()
            });
        Self {
            rxe: true,
            mlx5: !is_replaced,
        }
    }
}

/// Returns the kinds of devices in `RINGVERBS_DEVICES`, a comma-separated list. If it is
/// unset, or the program has elevated privileges, the path of the library decides.
pub fn served_devices(path: &str) -> ServedDevices {
    variable("RINGVERBS_DEVICES").map_or_else(
        || ServedDevices::by_path(path),
        |list| parse(list.as_bytes()),
    )
}

fn parse(list: &[u8]) -> ServedDevices {
    let mut served = ServedDevices {
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
                tracing::warn!(%word, "unknown device in RINGVERBS_DEVICES");
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
        let is = |rxe, mlx5| ServedDevices { rxe, mlx5 };
        assert_eq!(parse(b"rxe"), is(true, false));
        assert_eq!(parse(b"mlx5"), is(false, true));
        assert_eq!(parse(b" mlx5 , rxe,"), is(true, true));
        assert_eq!(parse(b""), is(false, false));
        assert_eq!(parse(b"mlx4,RXE,\xff"), is(false, false));
    }

    #[test]
    fn the_library_s_path_selects_devices() {
        let both = ServedDevices {
            rxe: true,
            mlx5: true,
        };
        let mlx5 = ServedDevices { rxe: false, ..both };
        let rxe = ServedDevices {
            mlx5: false,
            ..both
        };
        let is = ServedDevices::by_path;
        assert_eq!(is("/nowhere/libringverbs-rdmav34.so"), both);
        assert_eq!(is("libringverbs-rdmav34.so"), both);
        assert_eq!(is("/nowhere/libmlx5/libringverbs-rdmav34.so"), both);
        assert_eq!(is("/nowhere/libmlx5.so.1"), mlx5);
        assert_eq!(is("/nowhere/libibverbs/libmlx5-rdmav57.so"), mlx5);
        assert_eq!(is("libmlx5.so.1"), mlx5);

        let name = format!("ringverbs-served-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(folder.join("ringverbs")).unwrap();
        let plugin = format!("{}/libibverbs/libringverbs-rdmav34.so", folder.display());
        let link = folder.join("libmlx5.so.1");
        std::os::unix::fs::symlink("libmlx5.so.1.24.44.0", &link).unwrap();
        assert_eq!(ServedDevices::by_path(&plugin), both);
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink("libmlx5.so.1.9999.ringverbs", &link).unwrap();
        assert_eq!(ServedDevices::by_path(&plugin), rxe);
        std::fs::remove_file(&link).unwrap();
        std::fs::write(folder.join("ringverbs/libmlx5.so.1"), "").unwrap();
        assert_eq!(ServedDevices::by_path(&plugin), rxe);
        // The directory of a build has the same layout.
        let built = format!("{}/ringverbs/libringverbs-rdmav34.so", folder.display());
        assert_eq!(ServedDevices::by_path(&built), both);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
