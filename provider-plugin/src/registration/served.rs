//! Selection of the kinds of devices that the plugin registers for.

use core::ffi::CStr;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

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
    fn by_path(path: &[u8]) -> Self {
        let slash = path.iter().rposition(|byte| *byte == b'/');
        let (folder, name) = match slash {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&[][..], path),
        };
        if name.starts_with(b"libmlx5") {
            return Self {
                rxe: false,
                mlx5: true,
            };
        }
        Self {
            rxe: true,
            mlx5: !is_libmlx5_replaced(folder),
        }
    }
}

/// Returns whether the folder is libibverbs's folder of providers, with a copy of the plugin
/// that replaces libmlx5: the files that `cargo xtask install` installs.
fn is_libmlx5_replaced(folder: &[u8]) -> bool {
    let libraries = match folder.strip_suffix(b"libibverbs") {
        Some(libraries) if libraries.is_empty() || libraries.ends_with(b"/") => libraries,
        _ => return false,
    };
    let path = |name: &[u8]| {
        let mut path = Vec::with_capacity(libraries.len() + name.len());
        path.extend_from_slice(libraries);
        path.extend_from_slice(name);
        path
    };
    let link = path(b"libmlx5.so.1");
    let is_ours = std::fs::read_link(OsStr::from_bytes(&link))
        .is_ok_and(|target| target.as_os_str().as_bytes().ends_with(b".ringverbs"));
    let beside = path(b"ringverbs/libmlx5.so.1\0");
    is_ours || CStr::from_bytes_with_nul(&beside).is_ok_and(exists)
}

/// As `Path::exists`, which would make 0.2 MB more of the library resident.
fn exists(path: &CStr) -> bool {
    // SAFETY: a NUL-terminated path.
    unsafe { libc::access(path.as_ptr(), libc::F_OK) == 0 }
}

/// Returns the kinds of devices in `RINGVERBS_DEVICES`, a comma-separated list. If it is
/// unset, or the program has elevated privileges, the path of the library decides.
pub fn served_devices(path: &[u8]) -> ServedDevices {
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
        let is = |path: &str| ServedDevices::by_path(path.as_bytes());
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
        assert_eq!(is(&plugin), both);
        std::fs::remove_file(&link).unwrap();
        std::os::unix::fs::symlink("libmlx5.so.1.9999.ringverbs", &link).unwrap();
        assert_eq!(is(&plugin), rxe);
        std::fs::remove_file(&link).unwrap();
        std::fs::write(folder.join("ringverbs/libmlx5.so.1"), "").unwrap();
        assert_eq!(is(&plugin), rxe);
        // The directory of a build has the same layout.
        let built = format!("{}/ringverbs/libringverbs-rdmav34.so", folder.display());
        assert_eq!(is(&built), both);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
