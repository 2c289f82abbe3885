//! What the environment asks for.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::OnceLock;

use embedded::Network;
use uverbs::environment;

/// Devices, and the network that they are on.
#[derive(Debug)]
pub(crate) struct Config {
    /// Profiles, in the order of the devices' names.
    pub(crate) profiles: Vec<&'static str>,
    /// Directory of the network.
    pub(crate) directory: PathBuf,
}

/// Names the devices: profiles, separated by commas.
const DEVICES: &str = "RINGVERBS_EMBEDDED";
/// Names the directory that processes share.
const DIRECTORY: &str = "RINGVERBS_DIRECTORY";
/// Most devices of a process.
const MOST: usize = 16;

/// Returns what the environment asks for, as it was when this was first called;
/// `None` if it asks for nothing or for something else than there is.
pub(crate) fn get() -> Option<&'static Config> {
    static CONFIG: OnceLock<Option<Config>> = OnceLock::new();
    CONFIG.get_or_init(read).as_ref()
}

fn read() -> Option<Config> {
    let asked = environment::variable(DEVICES).filter(|asked| !asked.is_empty())?;
    match profiles(&asked) {
        Ok(profiles) => Some(Config {
            profiles,
            directory: environment::variable(DIRECTORY)
                .filter(|directory| !directory.is_empty())
                .map_or_else(Network::default_directory, PathBuf::from),
        }),
        Err(reason) => {
            complain(&format!("{DEVICES}: {reason}"));
            None
        }
    }
}

/// Returns the profiles that a list names.
fn profiles(list: &OsStr) -> Result<Vec<&'static str>, String> {
    let list = list.to_str().ok_or("this is not UTF-8")?;
    let profiles = list.split(',').map(|asked| {
        let known = Network::profiles().find(|(name, _)| *name == asked);
        known.map(|(name, _)| name).ok_or_else(|| {
            let names: Vec<&str> = Network::profiles().map(|(name, _)| name).collect();
            format!("there is no device \"{asked}\"; use {}", names.join(", "))
        })
    });
    let profiles = profiles.collect::<Result<Vec<_>, _>>()?;
    match profiles.len() {
        ..=MOST => Ok(profiles),
        _ => Err(format!("more than {MOST} devices")),
    }
}

/// Prints a line for whoever started the program.
pub(crate) fn complain(reason: &str) {
    let line = format!("ringverbs: {reason}\n");
    // SAFETY: the line is readable for its length. If it cannot be written, nobody
    // would see it.
    let _ = unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_names_known_devices() {
        assert_eq!(profiles("roce".as_ref()), Ok(vec!["roce"]));
        assert_eq!(profiles("ib,roce".as_ref()), Ok(vec!["ib", "roce"]));
        for wrong in ["", "roce,", "card", "roce ib"] {
            assert!(profiles(wrong.as_ref()).is_err(), "{wrong}");
        }
        let many = ["ib"; MOST + 1].join(",");
        assert!(profiles(many.as_ref()).is_err());
    }
}
