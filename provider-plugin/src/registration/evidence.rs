//! Determines the release of rdma-core of a libibverbs.
//!
//! There are three independent kinds of evidence: the private symbol version, functions that
//! a certain release introduced, and the version at the end of the file name. They must
//! agree, and must leave one layout. For a file without a version in its name, the evidence
//! is the distribution's package note in the file, the size of a structure, and the user's
//! setting ([`VARIABLE`]).

use core::ffi::CStr;
use core::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;

use uverbs::environment;

use super::objects::{Library, PrivateAbi};
use super::probe;
use crate::layout::{LAYOUTS, Layout};

/// The environment variable that gives the release of rdma-core.
pub const VARIABLE: &str = "RINGVERBS_RDMA_CORE";

/// A function that a release introduced.
struct Marker {
    name: &'static CStr,
    /// The symbol version; `None`: the private one.
    version: Option<&'static CStr>,
    /// The rdma-core release that began to export it.
    since: u32,
}

const fn public(name: &'static CStr, version: &'static CStr, since: u32) -> Marker {
    Marker {
        name,
        version: Some(version),
        since,
    }
}

const fn private(name: &'static CStr, since: u32) -> Marker {
    Marker {
        name,
        version: None,
        since,
    }
}

/// From libibverbs.map of each release.
const MARKERS: &[Marker] = &[
    public(c"ibv_import_dm", c"IBVERBS_1.13", 35),
    public(c"ibv_query_qp_data_in_order", c"IBVERBS_1.14", 36),
    private(c"__verbs_log", 37),
    private(c"ibv_wr_opcode_str", 49),
    public(c"ibv_alloc_dmah", c"IBVERBS_1.15", 59),
    public(c"ibv_dm_export_dmabuf_fd", c"IBVERBS_1.16", 62),
    public(c"ibv_alloc_buf", c"IBVERBS_1.17", 64),
    public(c"ibv_create_comp_cntr", c"IBVERBS_1.18", 65),
];

/// The minor number of libibverbs.so.1.N, and the first release with it.
const MINORS: &[(u32, u32)] = &[
    (12, 34),
    (13, 35),
    (14, 36),
    (15, 59),
    (16, 62),
    (17, 64),
    (18, 65),
];

/// The version at the end of `libibverbs.so.1.<minor>.<release>.<patch>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileVersion {
    /// The name has no release: a copy, or another naming scheme.
    Absent,
    /// Minor number and release.
    Known(u32, u32),
    /// The name has no number where the release should be.
    Malformed(String),
}

/// Reads the version at the end of a file name.
pub fn file_version(path: &[u8]) -> FileVersion {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    let Some(rest) = name.strip_prefix(b"libibverbs.so.1.") else {
        return FileVersion::Absent;
    };
    let mut parts = rest.split(|byte| *byte == b'.');
    let minor = parts.next().and_then(number);
    let release = parts.next().map(number);
    match (minor, release) {
        (Some(_), None) => FileVersion::Absent,
        (Some(minor), Some(Some(release))) => FileVersion::Known(minor, release),
        _ => FileVersion::Malformed(String::from_utf8_lossy(rest).into_owned()),
    }
}

/// The number that decimal digits make.
fn number(digits: &[u8]) -> Option<u32> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0_u32, |number, byte| {
        let digit = char::from(*byte).to_digit(10)?;
        number.checked_mul(10)?.checked_add(digit)
    })
}

/// The evidence of a libibverbs.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// The exported private ABIs.
    pub pabis: Vec<u32>,
    /// Whether each marker is present, in the order of [`MARKERS`].
    pub markers: Vec<bool>,
    /// The version in the library's file name.
    pub file: FileVersion,
    /// The `N` of `-rdmavN.so` at the end of the plugin's file name, if libibverbs loaded it
    /// by that name.
    pub name_suffix: Option<u32>,
    /// Evidence that is collected only if the file name has no version.
    pub fallback: FallbackEvidence,
}

/// Evidence of a library whose file name has no version.
#[derive(Clone, Debug, Default)]
pub struct FallbackEvidence {
    /// The release in the distribution's package note.
    pub package: Option<u32>,
    /// The value of [`VARIABLE`].
    pub user_release: Option<String>,
    /// Words that `ibv_qp_ex` has beyond those of release 34.
    pub extra_qp_words: Option<usize>,
}

impl Evidence {
    /// Collects the evidence of a libibverbs. `name_suffix` is the private ABI in the file
    /// name by which libibverbs loaded the plugin.
    pub fn gather(library: &Library<'_>, name_suffix: Option<u32>) -> Evidence {
        let pabi = library.pabis.first();
        let pabi = pabi.and_then(|number| PrivateAbi::supported(*number));
        let symbol = |marker: &Marker| {
            let version = marker.version.or(pabi.map(|pabi| pabi.version))?;
            library.symbol(marker.name, version)
        };
        let file = library
            .file()
            .map_or(FileVersion::Absent, |file| file_version(file.as_bytes()));
        Evidence {
            pabis: library.pabis.clone(),
            markers: MARKERS.iter().map(|m| symbol(m).is_some()).collect(),
            fallback: match file {
                FileVersion::Known(..) => FallbackEvidence::default(),
                _ => FallbackEvidence {
                    package: library.notes().find_map(probe::package_release),
                    user_release: environment::text(VARIABLE),
                    extra_qp_words: probe::extra_qp_words(library),
                },
            },
            file,
            name_suffix,
        }
    }
}

/// The `N` of `...-rdmavN.so`.
pub fn name_suffix(name: &[u8]) -> Option<u32> {
    let name = name.strip_suffix(b".so")?;
    let suffix = name.rsplit(|byte| *byte == b'-').next()?;
    number(suffix.strip_prefix(b"rdmav")?)
}

/// Returns the only layout that all evidence allows, or the reason why there is none.
pub fn decide(evidence: &Evidence) -> Result<&'static Layout, String> {
    let &[pabi] = evidence.pabis.as_slice() else {
        return Err(format!(
            "it has ambiguous private ABIs: {:?}",
            evidence.pabis
        ));
    };
    let of_pabi = || LAYOUTS.iter().filter(|l| l.pabi == pabi);
    let (Some(oldest), Some(newest)) = (
        of_pabi().map(|l| l.first).min(),
        of_pabi().map(|l| l.last).max(),
    ) else {
        return Err(format!(
            "its private ABI {pabi} is not one that ringverbs knows"
        ));
    };
    if let Some(suffix) = evidence.name_suffix.filter(|suffix| *suffix != pabi) {
        return Err(format!(
            "its private ABI is {pabi}, but it asked for a provider of private ABI {suffix}"
        ));
    }
    // The release is at least that of the newest present function, and below that of the
    // oldest absent one.
    let mut from = oldest;
    let mut to = newest;
    for (marker, present) in MARKERS.iter().zip(&evidence.markers) {
        if *present {
            from = from.max(marker.since);
        } else {
            to = to.min(marker.since - 1);
        }
    }
    if from > to {
        return Err(format!(
            "its functions contradict each other or its private ABI {pabi} ({})",
            describe_markers(&evidence.markers)
        ));
    }
    match &evidence.file {
        FileVersion::Known(minor, release) => {
            let expected = MINORS
                .iter()
                .rev()
                .find(|(_, since)| since <= release)
                .map(|m| m.0);
            if !(from..=to).contains(release) || expected != Some(*minor) {
                return Err(format!(
                    "its file name says 1.{minor} of rdma-core {release}, \
                     its symbols rdma-core {from} to {to}"
                ));
            }
            Layout::of_release(*release)
                .ok_or_else(|| format!("rdma-core {release} is not one that ringverbs knows"))
        }
        FileVersion::Malformed(version) if evidence.fallback.user_release.is_none() => {
            Err(format!(
                "its version {version} is not of a form that ringverbs knows; if it is \
             rdma-core N, {VARIABLE}=N says so"
            ))
        }
        // A vendor's version: its package note has other version numbers.
        FileVersion::Malformed(_) => {
            decide_by_fallback(of_pabi(), from..=to, None, &evidence.fallback)
        }
        FileVersion::Absent => decide_by_fallback(
            of_pabi(),
            from..=to,
            evidence.fallback.package,
            &evidence.fallback,
        ),
    }
}

/// The layout of a library without a version in its file name, by the releases that its
/// symbols allow and the fallback evidence.
fn decide_by_fallback(
    of_pabi: impl Iterator<Item = &'static Layout>,
    possible: RangeInclusive<u32>,
    package: Option<u32>,
    evidence: &FallbackEvidence,
) -> Result<&'static Layout, String> {
    let (from, to) = (*possible.start(), *possible.end());
    let user_release = match &evidence.user_release {
        None => None,
        Some(text) => match text.trim().parse::<u32>() {
            Ok(release) => Some(release),
            Err(_) => return Err(format!("{VARIABLE}={text} is not a release of rdma-core")),
        },
    };
    match (package, user_release) {
        (Some(package), Some(user_release)) if package != user_release => {
            return Err(format!(
                "it is of a package of rdma-core {package}, and {VARIABLE} says {user_release}"
            ));
        }
        _ => {}
    }
    let fits = |layout: &Layout| {
        evidence
            .extra_qp_words
            .is_none_or(|added| added == layout.extra_qp_words())
    };
    if let Some(release) = package.or(user_release) {
        let says = match package {
            Some(_) => "its package",
            None => VARIABLE,
        };
        return match Layout::of_release(release) {
            None => Err(format!(
                "{says} says rdma-core {release}, which is not one that ringverbs knows"
            )),
            Some(layout) if possible.contains(&release) && fits(layout) => Ok(layout),
            Some(_) => Err(format!(
                "{says} says rdma-core {release}, its symbols rdma-core {from} to {to}{}",
                match evidence.extra_qp_words {
                    Some(added) => format!(", its ibv_qp_ex {added} words more than that of 34"),
                    None => String::new(),
                }
            )),
        };
    }
    let newest = LAYOUTS[LAYOUTS.len() - 1].last;
    let mut fitting = of_pabi.filter(|l| l.first <= to && l.last >= from && fits(l));
    match (fitting.next(), fitting.next()) {
        // A later release may share the newest private ABI and have another
        // layout, as happened with 34 and 59.
        (Some(layout), None) if layout.last < newest => Ok(layout),
        (None, _) => Err(format!(
            "its ibv_qp_ex is that of no rdma-core from {from} to {to}"
        )),
        _ => Err(format!(
            "it can be rdma-core {from} to {to}{}, and its file name does not tell; \
             if it is N of these, {VARIABLE}=N says so",
            if to == newest { " or later" } else { "" }
        )),
    }
}

fn describe_markers(markers: &[bool]) -> String {
    let with: Vec<_> = MARKERS
        .iter()
        .zip(markers)
        .filter(|(_, evidence)| **evidence)
        .map(|(m, _)| m.name.to_string_lossy())
        .collect();
    if with.is_empty() {
        "none of those it could have".to_owned()
    } else {
        with.join(", ")
    }
}

/// The reason why nothing was registered.
#[derive(Debug)]
pub struct Refusal(String);

impl Refusal {
    /// A refusal of a libibverbs.
    pub fn new(library: &Library<'_>, reason: impl AsRef<str>) -> Refusal {
        let file = library.file();
        let file = file.map_or_else(
            || library.object.name.to_string_lossy().into_owned(),
            |file| file.to_string_lossy().into_owned(),
        );
        let pabis: Vec<String> = library
            .pabis
            .iter()
            .map(|n| format!("IBVERBS_PRIVATE_{n}"))
            .collect();
        Refusal(format!(
            "{file} ({}): {}",
            pabis.join(", "),
            reason.as_ref()
        ))
    }

    /// There is no libibverbs to register with.
    pub fn no_library() -> Refusal {
        Refusal("no libibverbs in this process".to_owned())
    }

    /// There are several libibverbs, none of them on the call stack.
    pub fn ambiguous(one: &Library<'_>, other: &Library<'_>) -> Refusal {
        let name = |l: &Library<'_>| l.object.name.to_string_lossy().into_owned();
        Refusal(format!(
            "{} and {} are both in this process, and neither is the caller",
            name(one),
            name(other)
        ))
    }

    /// An internal error.
    pub fn internal() -> Refusal {
        Refusal("internal error in registration".to_owned())
    }

    /// One line on stderr, in one write.
    pub fn print(&self) {
        use std::io::Write;
        let line = format!(
            "ringverbs: not registered, the stock provider takes over: {}\n",
            self.0.replace('\n', " ")
        );
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests;
