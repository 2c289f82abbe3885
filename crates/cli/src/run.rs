//! `ringverbs run`: runs a program whose devices the plugin serves, whatever the
//! program is linked to.
//!
//! Sets the variables that the plugin and libibverbs read, and executes the
//! program. `RDMAV_DRIVERS` names the plugin before the configured providers.
//! `LD_PRELOAD` makes it register before a provider that the program is linked
//! to, as perftest is to libmlx5. `RINGVERBS_DEVICES` selects the devices that it
//! takes.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use uverbs::environment;

use crate::error::Error;

/// Arguments of `run`.
#[derive(clap::Args)]
#[command(after_help = "\
This has no effect on programs with raised rights, whose loader ignores it, and on static \
programs.
Example: ringverbs run -- ib_write_bw -d mlx5_0")]
pub struct Args {
    /// Kinds of devices that ringverbs serves, separated by commas; default:
    /// RINGVERBS_DEVICES, or all if that is unset
    #[arg(long, value_name = "KINDS")]
    devices: Option<String>,
    /// The plugin: a libringverbs-rdmavN.so, or the directory that contains it.
    /// Default: beside this command, or the provider directory of libibverbs
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    command: Vec<OsString>,
}

/// All kinds that the plugin supports.
const DEVICES: &str = "rxe,mlx5";
/// The name to which libibverbs appends `-rdmavN.so`.
const STEM: &str = "libringverbs";

/// The reason why the program was not run.
#[derive(Debug)]
pub enum RunError {
    /// None of these places contains the plugin.
    NoPlugin(Vec<PathBuf>),
    /// `LD_PRELOAD` would split the path.
    Name(PathBuf),
    /// The program could not be run.
    Program(OsString, std::io::Error),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPlugin(places) => {
                write!(f, "there is no {STEM}-rdmavN.so in ")?;
                for (number, place) in places.iter().enumerate() {
                    let comma = if number == 0 { "" } else { ", " };
                    write!(f, "{comma}{}", place.display())?;
                }
                f.write_str("; name it with --plugin")
            }
            Self::Name(path) => write!(
                f,
                "{}: LD_PRELOAD cannot hold a path with a space or a colon in it",
                path.display()
            ),
            Self::Program(program, error) => {
                write!(f, "running {}: {error}", Path::new(program).display())
            }
        }
    }
}

impl std::error::Error for RunError {}

impl From<RunError> for Error {
    fn from(error: RunError) -> Self {
        Self::subcommand(error)
    }
}

/// Executes the program; returns only if that fails.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let places = match &args.plugin {
        Some(path) => vec![path.clone()],
        None => places(),
    };
    let plugin = places.iter().find_map(|place| plugin_in(place));
    let plugin = plugin.ok_or(RunError::NoPlugin(places))?;
    // A relative path would depend on the working directory.
    let plugin = std::path::absolute(plugin)?;
    let settings = settings(&plugin, args.devices.as_deref(), environment::variable)?;
    let [program, arguments @ ..] = &args.command[..] else {
        return Ok(ExitCode::FAILURE); // required
    };
    let error = Command::new(program).args(arguments).envs(settings).exec();
    Err(RunError::Program(program.clone(), error).into())
}

/// Returns the default places of the plugin: beside this command, as in
/// `target/dist`, and where it is installed.
fn places() -> Vec<PathBuf> {
    let beside = env::current_exe().ok();
    let beside = beside.and_then(|path| Some(path.parent()?.to_owned()));
    let architecture = env::consts::ARCH;
    let installed = [
        format!("/usr/lib/{architecture}-linux-gnu/libibverbs"),
        "/usr/lib64/libibverbs".to_owned(),
        "/usr/lib/libibverbs".to_owned(),
    ];
    beside
        .into_iter()
        .chain(installed.map(PathBuf::from))
        .collect()
}

/// Returns the plugin's file: `place` itself, or the first one in that directory.
/// All are the same file, and a preloaded plugin ignores its name.
fn plugin_in(place: &Path) -> Option<PathBuf> {
    if place.is_file() {
        return Some(place.to_owned());
    }
    let entries = fs::read_dir(place).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let name = names.filter(|name| stem(name) == Some(STEM)).min()?;
    Some(place.join(name))
}

/// Returns `NAME` of `NAME-rdmavN.so`.
fn stem(name: &str) -> Option<&str> {
    let (stem, number) = name.strip_suffix(".so")?.rsplit_once("-rdmav")?;
    let number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    number.then_some(stem)
}

/// Returns the variables to set, given their previous values.
fn settings(
    plugin: &Path,
    devices: Option<&str>,
    before: impl Fn(&str) -> Option<OsString>,
) -> Result<Vec<(&'static str, OsString)>, RunError> {
    let bytes = plugin.as_os_str().as_encoded_bytes();
    if bytes.iter().any(|byte| b" :;".contains(byte)) {
        return Err(RunError::Name(plugin.to_owned()));
    }
    let in_front = |first: &OsStr, name: &str| {
        let mut list = first.to_owned();
        if let Some(rest) = before(name).filter(|rest| !rest.is_empty()) {
            list.push(":");
            list.push(rest);
        }
        list
    };
    let mut settings = vec![("LD_PRELOAD", in_front(plugin.as_os_str(), "LD_PRELOAD"))];
    // libibverbs appends the version of its private interface.
    let name = plugin.file_name().and_then(OsStr::to_str).and_then(stem);
    if let Some(name) = name {
        let stem = plugin.with_file_name(name);
        settings.push(("RDMAV_DRIVERS", in_front(stem.as_os_str(), "RDMAV_DRIVERS")));
    }
    let devices = match devices {
        Some(devices) => devices.into(),
        None => before("RINGVERBS_DEVICES").unwrap_or_else(|| DEVICES.into()),
    };
    settings.push(("RINGVERBS_DEVICES", devices));
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plugin_precedes_previous_settings() {
        let before = |name: &str| match name {
            "LD_PRELOAD" => Some("/lib/other.so".into()),
            "RDMAV_DRIVERS" => Some("rxe".into()),
            _ => None,
        };
        let plugin = Path::new("/opt/x/libringverbs-rdmav34.so");
        let set = settings(plugin, None, before).unwrap();
        let wanted: Vec<(&str, OsString)> = vec![
            (
                "LD_PRELOAD",
                "/opt/x/libringverbs-rdmav34.so:/lib/other.so".into(),
            ),
            ("RDMAV_DRIVERS", "/opt/x/libringverbs:rxe".into()),
            ("RINGVERBS_DEVICES", "rxe,mlx5".into()),
        ];
        assert_eq!(set, wanted);
        let set = settings(plugin, None, |_| Some("mlx5".into())).unwrap();
        assert_eq!(set[2].1, "mlx5");
        let set = settings(plugin, Some("rxe"), |_| Some("mlx5".into())).unwrap();
        assert_eq!(set[2].1, "rxe");
        assert!(settings(Path::new("/a b/libringverbs-rdmav34.so"), None, |_| None).is_err());
    }

    #[test]
    fn the_plugin_is_known_by_its_name() {
        assert_eq!(stem("libringverbs-rdmav34.so"), Some("libringverbs"));
        for other in ["libringverbs.so", "libringverbs-rdmav.so", "x-rdmav3a.so"] {
            assert_eq!(stem(other), None, "{other}");
        }
    }
}
