//! Options of devices that do what programs may not expect.

use std::ffi::OsString;
use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::str::FromStr;

use embedded::softhca::chaos::{Decision, parse_list};

use super::{Options, Settings, values};
use crate::error::Error;
use crate::out;

/// A seed, or one that is yet to be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChaosSeed(Option<u64>);

impl FromStr for ChaosSeed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "random" => Ok(Self(None)),
            number => values::number(number).map(|seed| Self(Some(seed))),
        }
    }
}

impl ChaosSeed {
    /// Returns the seed.
    pub fn given(self) -> Option<u64> {
        self.0
    }
}

/// A list of decisions, or the file that has it.
#[derive(Clone, Debug)]
pub enum Decisions {
    /// The decisions.
    List(Vec<Decision>),
    /// A file of decisions.
    File(PathBuf),
}

impl FromStr for Decisions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = |text: &str| parse_list(text).map_err(|error| error.to_string());
        let Some(path) = text.strip_prefix('@') else {
            return parsed(text).map(Self::List);
        };
        parsed(&fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?)?;
        let absolute = std::path::absolute(path).map_err(|error| error.to_string())?;
        Ok(Self::File(absolute))
    }
}

impl Decisions {
    /// Returns them as the preloaded library reads them.
    fn variable(&self) -> OsString {
        match self {
            Self::List(list) => join(list).into(),
            Self::File(path) => {
                let mut value = OsString::from("@");
                value.push(path);
                value
            }
        }
    }
}

/// Returns the text of a list. An empty variable would be as none.
pub fn join(list: &[Decision]) -> String {
    if list.is_empty() {
        return ",".to_owned();
    }
    let texts: Vec<String> = list.iter().map(ToString::to_string).collect();
    texts.join(",")
}

/// Adds the variables of the options.
pub fn set(options: &Options, settings: &mut Settings) -> Result<(), Error> {
    let Some(seed) = options.chaos else {
        return Ok(());
    };
    let seed = match seed.given() {
        Some(seed) => seed,
        None => {
            // Short enough to be typed.
            let seed = RandomState::new().build_hasher().finish() % 1_000_000;
            out::print_warning(&format!("chaos with seed {seed}"));
            seed
        }
    };
    settings.set("RINGVERBS_CHAOS", seed.to_string().into());
    if let Some(only) = &options.chaos_only {
        settings.set("RINGVERBS_CHAOS_ONLY", only.variable());
    }
    Ok(())
}
