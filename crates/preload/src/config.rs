//! Configuration from the environment.

use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use embedded::softhca::card::Card;
use embedded::softhca::chaos::{Chaos, Decision, parse_list};
use embedded::softhca::fault::Faults;
use embedded::softhca::link_shape::{LinkShape, LinkShapeError};
use embedded::sysfs::{DEFAULT_NAME, MAX_DEVICES, Node, default_name, device_names};
use embedded::{
    CaptureOptions, CaptureRing, CaptureSnap, FileSizeLimit, GidTable, GidTableError, Network,
};
use uverbs::environment;

use crate::explain::Format;
use crate::{host, standard_error};

/// Devices, and the network that they are on.
#[derive(Debug)]
pub(crate) struct Config {
    /// Profiles, in the order of the devices' names.
    pub(crate) profiles: Vec<&'static str>,
    /// The devices' names, as many as profiles.
    pub(crate) names: Vec<String>,
    /// The devices' cards, as many as profiles.
    pub(crate) cards: Vec<&'static Card>,
    /// The properties of the devices' links, as many as profiles.
    pub(crate) links: Vec<LinkShape>,
    /// Address or interface of a single device that reaches other hosts.
    pub(crate) host: Option<String>,
    /// The node that programs see, if one is described.
    pub(crate) node: Option<Node>,
    /// The GID table of Ethernet ports that reach no other hosts.
    pub(crate) gids: GidTable,
    /// The seed of the devices' numbers.
    pub(crate) seed: Option<u64>,
    /// How long peers on other hosts may be silent before retries count.
    pub(crate) patience: Duration,
    /// Directory of the network, and of the files that stand for sysfs.
    pub(crate) directory: PathBuf,
    /// File in which the processes of a program count what they use.
    pub(crate) usage: Option<PathBuf>,
    /// The source of decisions about what the devices do late, or in another order.
    pub(crate) chaos: Option<Chaos>,
    /// File that gets a line for each of these decisions.
    pub(crate) decisions: Option<PathBuf>,
    /// Faults that are injected.
    pub(crate) faults: Option<Faults>,
    /// File that counts how often they happen.
    pub(crate) fault_counts: Option<PathBuf>,
    /// File of the faults that have happened, in whose name each process inserts its number.
    pub(crate) fault_record: Option<PathBuf>,
    /// Where causes of failures are reported: a file, or `1` for standard error.
    pub(crate) explain: Option<PathBuf>,
    /// The capture of the devices' frames.
    pub(crate) capture: Option<CaptureOptions>,
    /// How the program is checked.
    pub(crate) check: CheckConfig,
}

/// How a program is checked.
#[derive(Debug)]
pub(crate) struct CheckConfig {
    /// Where errors of the program are reported: a file, or `1` for standard error.
    pub(crate) report: Option<PathBuf>,
    /// The form of these reports, and of causes.
    pub(crate) format: Format,
    /// Lists the errors that are not reported.
    pub(crate) suppressions: Option<PathBuf>,
    /// The checked program is advised, too.
    pub(crate) advice: bool,
    /// Pages of buffers are write-protected to find who changes them.
    pub(crate) guard: bool,
    /// Receives are guarded against reads before their completions.
    pub(crate) early_reads: bool,
    /// File that gets a byte for each error.
    pub(crate) errors: Option<PathBuf>,
}

impl CheckConfig {
    /// Reads it, or returns the variable that is wrong, and why.
    fn read() -> Result<Self, (&'static str, String)> {
        let format = format(variable(EXPLAIN_FORMAT).as_deref());
        Ok(Self {
            report: variable(CHECK).map(PathBuf::from),
            format: format.map_err(|reason| (EXPLAIN_FORMAT, reason))?,
            suppressions: variable(SUPPRESSIONS).map(PathBuf::from),
            advice: is_set(ADVICE),
            guard: is_set(GUARD),
            early_reads: is_set(EARLY_READS),
            errors: variable(CHECK_ERRORS).map(PathBuf::from),
        })
    }
}

impl Config {
    /// Returns the network interface of Ethernet ports; `None` if the host has none with that
    /// address.
    pub(crate) fn interface(&self) -> Option<String> {
        match &self.host {
            Some(host) => Network::interface_of(host),
            // The connection manager accepts loopback addresses.
            None => Some("lo".to_owned()),
        }
    }
}

/// Profile and name prefix of a device that reaches other hosts.
const ROCE_DEVICE: &str = "roce";

/// Names the devices: profiles, separated by commas, or `roce:` with an address or
/// interface.
const DEVICES: &str = "RINGVERBS_EMBEDDED";
/// Lists the names of the devices.
const NAMES: &str = "RINGVERBS_NAMES";
/// Names the cards of the devices, or one for all.
const CARD: &str = "RINGVERBS_CARD";
/// Describes the devices' links, or one for all, separated by semicolons.
const LINK: &str = "RINGVERBS_LINK";
/// Names the file with the node that programs see.
const NODE: &str = "RINGVERBS_NODE";
/// Names the directory that processes share.
const DIRECTORY: &str = "RINGVERBS_DIRECTORY";
/// Lists the entries of the GID table ([`GidTable`]).
const GIDS: &str = "RINGVERBS_GIDS";
/// The seed of the devices' numbers, in decimal.
const SEED: &str = "RINGVERBS_SEED";
/// [`Config::patience`] in seconds.
const PATIENCE: &str = "RINGVERBS_PATIENCE";
/// The seed of [`Config::chaos`], in decimal.
const CHAOS: &str = "RINGVERBS_CHAOS";
/// Limits [`Config::chaos`] to a list of decisions, or after `@` to those of a file.
const CHAOS_ONLY: &str = "RINGVERBS_CHAOS_ONLY";
/// Names the file for [`Config::decisions`]; `ringverbs check` sets it.
const CHAOS_DECISIONS: &str = "RINGVERBS_CHAOS_DECISIONS";
/// Names the file for [`Config::usage`]; `ringverbs run` sets it.
const USAGE: &str = "RINGVERBS_USAGE";
/// Names the file with [`Config::faults`].
const FAULTS: &str = "RINGVERBS_FAULTS";
/// Names the file for [`Config::fault_counts`]; `ringverbs run` sets it.
const FAULT_COUNTS: &str = "RINGVERBS_FAULT_COUNTS";
/// Names [`Config::fault_record`].
const RECORD_FAULTS: &str = "RINGVERBS_RECORD_FAULTS";
/// Names [`Config::explain`].
const EXPLAIN: &str = "RINGVERBS_EXPLAIN";
/// Names [`CheckConfig::format`].
const EXPLAIN_FORMAT: &str = "RINGVERBS_EXPLAIN_FORMAT";
/// Names the file of the capture, how much of each frame it takes ([`CaptureSnap`]) and its ring
/// of files ([`CaptureRing`]).
const CAPTURE: &str = "RINGVERBS_CAPTURE";
const CAPTURE_SNAP: &str = "RINGVERBS_CAPTURE_SNAP";
const CAPTURE_RING: &str = "RINGVERBS_CAPTURE_RING";
/// Names [`CheckConfig::report`].
const CHECK: &str = "RINGVERBS_CHECK";
/// Names [`CheckConfig::suppressions`].
const SUPPRESSIONS: &str = "RINGVERBS_CHECK_SUPPRESSIONS";
/// `1` sets [`CheckConfig::advice`].
const ADVICE: &str = "RINGVERBS_CHECK_ADVICE";
/// `1` sets [`CheckConfig::guard`].
const GUARD: &str = "RINGVERBS_CHECK_GUARD";
/// `1` sets [`CheckConfig::early_reads`].
const EARLY_READS: &str = "RINGVERBS_CHECK_EARLY_READS";
/// `1`: without embedded devices, the program is checked on those of the host.
const CHECK_HOST: &str = "RINGVERBS_CHECK_HOST";
/// Names the file for [`CheckConfig::errors`]; `ringverbs check` sets it.
const CHECK_ERRORS: &str = "RINGVERBS_CHECK_ERRORS";

/// Returns the configuration, read from the environment by the first call; `None` if it is
/// missing or invalid.
pub(crate) fn get() -> Option<&'static Config> {
    static CONFIG: OnceLock<Option<Config>> = OnceLock::new();
    // A sanitizer's runtime calls functions of this library before.
    if CONFIG.get().is_none() && !environment::exists() {
        return None;
    }
    CONFIG.get_or_init(read).as_ref()
}

fn read() -> Option<Config> {
    let requested = variable(DEVICES)?;
    match parse(&requested) {
        Ok(config) => Some(config),
        Err((name, reason)) => {
            print_error(&format!("{name}: {reason}"));
            None
        }
    }
}

/// Returns a variable, unless it is empty.
fn variable(name: &str) -> Option<OsString> {
    environment::variable(name).filter(|value| !value.is_empty())
}

/// Returns whether a variable is `1`.
fn is_set(name: &str) -> bool {
    variable(name).is_some_and(|value| value == "1")
}

/// Returns the configuration, or the variable that is wrong, and why.
fn parse(requested: &OsStr) -> Result<Config, (&'static str, String)> {
    let of = |name| move |reason: String| (name, reason);
    let (profiles, host) = devices(requested).map_err(of(DEVICES))?;
    let names = names(variable(NAMES).as_deref(), profiles.len()).map_err(of(NAMES))?;
    let snap = option(variable(CAPTURE_SNAP)).map_err(of(CAPTURE_SNAP))?;
    let ring = option(variable(CAPTURE_RING)).map_err(of(CAPTURE_RING))?;
    Ok(Config {
        capture: variable(CAPTURE).map(|path| capture(path.as_ref(), snap, ring, &names)),
        names,
        cards: cards(variable(CARD).as_deref(), profiles.len()).map_err(of(CARD))?,
        node: node(variable(NODE).as_deref(), profiles.len()).map_err(of(NODE))?,
        links: links(variable(LINK).as_deref(), profiles.len()).map_err(of(LINK))?,
        profiles,
        host,
        gids: gids(variable(GIDS).as_deref()).map_err(of(GIDS))?,
        seed: number(variable(SEED).as_deref()).map_err(of(SEED))?,
        patience: patience(variable(PATIENCE).as_deref()).map_err(of(PATIENCE))?,
        directory: variable(DIRECTORY).map_or_else(Network::default_directory, PathBuf::from),
        chaos: chaos()?,
        decisions: variable(CHAOS_DECISIONS).map(PathBuf::from),
        usage: variable(USAGE).map(PathBuf::from),
        faults: faults(variable(FAULTS).as_deref()).map_err(of(FAULTS))?,
        fault_counts: variable(FAULT_COUNTS).map(PathBuf::from),
        fault_record: variable(RECORD_FAULTS).map(PathBuf::from),
        explain: variable(EXPLAIN).map(PathBuf::from),
        check: CheckConfig::read()?,
    })
}

/// Returns how the program is checked on devices of the host, and where errors are reported;
/// `None` if it is not.
pub(crate) fn check_on_host() -> Option<(CheckConfig, PathBuf)> {
    if !is_set(CHECK_HOST) || variable(DEVICES).is_some() {
        return None;
    }
    match CheckConfig::read() {
        Ok(config) => {
            let report = config.report.clone()?;
            Some((config, report))
        }
        Err((name, reason)) => {
            print_error(&format!("{name}: {reason}"));
            None
        }
    }
}

/// Returns the name of a device in sysfs.
pub(crate) fn device_name(number: usize) -> String {
    if let Some(name) = host::device_name(number) {
        return name;
    }
    let given = get().and_then(|config| config.names.get(number));
    given.cloned().unwrap_or_else(|| default_name(number))
}

/// Returns the number of the device with this name.
pub(crate) fn device_named(name: &str) -> Option<usize> {
    match get() {
        Some(config) => config.names.iter().position(|known| known == name),
        None => name.strip_prefix(DEFAULT_NAME)?.parse().ok(),
    }
}

/// Parses a list of names.
fn names(list: Option<&OsStr>, devices: usize) -> Result<Vec<String>, String> {
    let list = list
        .map_or(Some(""), OsStr::to_str)
        .ok_or("this is not UTF-8")?;
    device_names(list, devices).map_err(|error| error.to_string())
}

/// Returns the card of a device.
pub(crate) fn card(number: usize) -> &'static Card {
    let given = get().and_then(|config| config.cards.get(number));
    given.copied().unwrap_or(&Card::SOFTHCA)
}

/// Returns the name of the interface that a node gives a device.
pub(crate) fn node_interface(number: usize) -> Option<&'static str> {
    let place = get()?.node.as_ref()?.places.get(number)?;
    place.interface.as_deref()
}

/// Parses a list of cards.
fn cards(list: Option<&OsStr>, devices: usize) -> Result<Vec<&'static Card>, String> {
    let parse = |name: &str| Card::find(name).map_err(|error| error.to_string());
    let list = list.map(|list| (list, ','));
    one_or_each(list, devices, ("card", &Card::SOFTHCA), parse)
}

/// Parses a list of links.
fn links(list: Option<&OsStr>, devices: usize) -> Result<Vec<LinkShape>, String> {
    let parse = |text: &str| text.parse().map_err(|e: LinkShapeError| e.to_string());
    let list = list.map(|list| (list, ';'));
    one_or_each(list, devices, ("link", LinkShape::NONE), parse)
}

/// Parses a list, with its separator: one value for all devices, or one for each. `default` is
/// the value without a list, with its name.
fn one_or_each<T: Copy>(
    list: Option<(&OsStr, char)>,
    devices: usize,
    (what, default): (&str, T),
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, String> {
    let Some((list, separator)) = list else {
        return Ok(vec![default; devices]);
    };
    let list = list.to_str().ok_or("this is not UTF-8")?;
    let values = list.split(separator).map(parse);
    let values = values.collect::<Result<Vec<T>, String>>()?;
    match values[..] {
        [all] => Ok(vec![all; devices]),
        _ if values.len() == devices => Ok(values),
        _ => Err(format!(
            "not one {what}, and not one for each of {devices} devices"
        )),
    }
}

/// Reads the description of a node.
fn node(file: Option<&OsStr>, devices: usize) -> Result<Option<Node>, String> {
    let Some(file) = file.map(Path::new) else {
        return Ok(None);
    };
    let failed = |reason: &dyn std::fmt::Display| format!("{}: {reason}", file.display());
    let text = std::fs::read_to_string(file).map_err(|error| failed(&error))?;
    let node = Node::parse(&text).ok_or_else(|| failed(&"not written by `ringverbs run`"))?;
    match node.places.len() {
        places if places == devices => Ok(Some(node)),
        places => Err(failed(&format!("{places} devices, not {devices}"))),
    }
}

/// Reads a file of faults.
fn faults(file: Option<&OsStr>) -> Result<Option<Faults>, String> {
    let Some(file) = file.map(Path::new) else {
        return Ok(None);
    };
    let name = file.display();
    let text = std::fs::read_to_string(file).map_err(|error| format!("{name}: {error}"))?;
    let faults = Faults::parse(&text).map_err(|error| format!("{name}:{error}"))?;
    Ok(Some(faults))
}

/// Parses a number.
fn number(text: Option<&OsStr>) -> Result<Option<u64>, String> {
    let Some(text) = text else { return Ok(None) };
    let number = text.to_str().and_then(|text| text.parse().ok());
    match number {
        Some(number) => Ok(Some(number)),
        None => Err("not a number from 0 to 2^64 - 1".to_owned()),
    }
}

/// Parses a number of seconds.
fn patience(text: Option<&OsStr>) -> Result<Duration, String> {
    Ok(Duration::from_secs(number(text)?.unwrap_or(0)))
}

/// Returns the source of decisions, if there is a seed.
fn chaos() -> Result<Option<Chaos>, (&'static str, String)> {
    let seed = number(variable(CHAOS).as_deref()).map_err(|reason| (CHAOS, reason))?;
    let Some(chaos) = seed.map(Chaos::new) else {
        return Ok(None);
    };
    let Some(only) = variable(CHAOS_ONLY) else {
        return Ok(Some(chaos));
    };
    let only = decisions(&only).map_err(|reason| (CHAOS_ONLY, reason))?;
    Ok(Some(chaos.only(only)))
}

/// Parses a list of decisions, or reads it from the file that is named after `@`.
fn decisions(list: &OsStr) -> Result<Vec<Decision>, String> {
    let list = list.to_str().ok_or("this is not UTF-8")?;
    let list = match list.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?,
        None => list.to_owned(),
    };
    parse_list(&list).map_err(|error| error.to_string())
}

/// Parses an option.
fn option<T: FromStr<Err: Display>>(text: Option<OsString>) -> Result<Option<T>, String> {
    let Some(text) = text else { return Ok(None) };
    let text = text.to_str().ok_or("this is not UTF-8")?;
    text.parse()
        .map(Some)
        .map_err(|error: T::Err| error.to_string())
}

/// Returns the options of the capture.
fn capture(
    path: &Path,
    snap: Option<CaptureSnap>,
    ring: Option<CaptureRing>,
    names: &[String],
) -> CaptureOptions {
    let options = CaptureOptions::new(path).with_names(names);
    let options = options.with_snap(snap.unwrap_or_default());
    match ring {
        Some(ring) => options.with_ring(ring),
        None => options,
    }
}

/// Parses the form of reports.
fn format(name: Option<&OsStr>) -> Result<Format, String> {
    let format = name.map_or(Some(Format::Text), Format::named);
    format.ok_or_else(|| "use text or json".to_owned())
}

/// Parses a list of devices: their profiles, or the address of a device that reaches other
/// hosts.
fn devices(list: &OsStr) -> Result<(Vec<&'static str>, Option<String>), String> {
    let list = list.to_str().ok_or("this is not UTF-8")?;
    let host = list
        .strip_prefix(ROCE_DEVICE)
        .and_then(|it| it.strip_prefix(':'));
    if let Some(host) = host {
        if host.contains(',') {
            return Err(format!(
                "\"{ROCE_DEVICE}:\" takes one address, and no other devices"
            ));
        }
        return Ok((vec![ROCE_DEVICE], Some(host.to_owned())));
    }
    let profiles = list.split(',').map(|requested| {
        if requested.contains(':') {
            return Err(format!("\"{requested}\" cannot be one of several devices"));
        }
        let known = Network::profiles().find(|(name, _)| *name == requested);
        known.map(|(name, _)| name).ok_or_else(|| {
            let names: Vec<&str> = Network::profiles().map(|(name, _)| name).collect();
            format!(
                "there is no device \"{requested}\"; use {}",
                names.join(", ")
            )
        })
    });
    let profiles = profiles.collect::<Result<Vec<_>, _>>()?;
    match profiles.len() {
        ..=MAX_DEVICES => Ok((profiles, None)),
        _ => Err(format!("more than {MAX_DEVICES} devices")),
    }
}

/// Parses the list of GIDs; without one, or with an empty one, the GIDs are the default.
fn gids(list: Option<&OsStr>) -> Result<GidTable, String> {
    let Some(list) = list.filter(|list| !list.is_empty()) else {
        return Ok(GidTable::default());
    };
    let list = list.to_str().ok_or("this is not UTF-8")?;
    list.parse()
        .map_err(|error: GidTableError| error.to_string())
}

/// Returns whether the limit on the size of files leaves room for those of the devices; prints
/// once that it does not.
pub(crate) fn has_room_for_files() -> bool {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    let Some(limit) = FileSizeLimit::exceeded() else {
        return true;
    };
    if !PRINTED.swap(true, Ordering::Relaxed) {
        print_error(&limit.to_string());
    }
    false
}

/// Prints a line to standard error.
pub(crate) fn print_error(reason: &str) {
    standard_error::write(&format!("ringverbs: {reason}\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_have_a_default() {
        for none in [None, Some("".as_ref())] {
            assert_eq!(gids(none), Ok(GidTable::default()));
        }
        assert_eq!(gids(Some("v2".as_ref())).unwrap(), "v2".parse().unwrap());
        assert!(gids(Some("v3".as_ref())).unwrap_err().contains("\"v3\""));
    }

    #[test]
    fn a_list_names_known_devices() {
        let devices = |list: &str| devices(list.as_ref());
        assert_eq!(devices("roce"), Ok((vec!["roce"], None)));
        assert_eq!(devices("ib,roce"), Ok((vec!["ib", "roce"], None)));
        let host = |name: &str| Ok((vec!["roce"], Some(name.to_owned())));
        assert_eq!(devices("roce:fe80::1%eth0"), host("fe80::1%eth0"));
        for wrong in [
            "",
            "roce,",
            "card",
            "roce ib",
            "ib:eth0",
            "ib,roce:eth0",
            "roce:eth0,ib",
        ] {
            assert!(devices(wrong).is_err(), "{wrong}");
        }
        let many = ["ib"; MAX_DEVICES + 1].join(",");
        assert!(devices(&many).is_err());
    }
}
