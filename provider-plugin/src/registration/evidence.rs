//! From what a libibverbs shows to the releases of rdma-core it can be.
//!
//! Three independent things tell: the private symbol version, functions that
//! came with a certain release, and the version at the end of the file's name.
//! They must agree, and what remains must be one layout. For a file without a
//! version in its name, the distribution's note in the file, the size of a
//! structure, and the user ([`VARIABLE`]) tell in its place.

use core::ffi::CStr;
use core::ops::RangeInclusive;

use uverbs::environment;

use super::objects::{Library, private_version};
use super::probe;
use crate::layout::{LAYOUTS, Layout};

/// Names the release of rdma-core where nothing else does.
pub const VARIABLE: &str = "RINGVERBS_RDMA_CORE";

/// A function whose presence tells the release.
struct Marker {
    name: &'static CStr,
    /// Its symbol version; none: the private one.
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

/// The minor number of libibverbs.so.1.N and the release it began with.
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
    /// The name ends before the release: a copy, or another system's naming.
    Absent,
    /// Minor number and release.
    Known(u32, u32),
    /// The name has something else in place of the release.
    Strange(String),
}

/// Reads the version at the end of a file name.
pub fn file_version(path: &str) -> FileVersion {
    let name = path.rsplit('/').next().unwrap_or(path);
    let Some(rest) = name.strip_prefix("libibverbs.so.1.") else {
        return FileVersion::Absent;
    };
    let mut parts = rest.split('.');
    let minor = parts.next().map(str::parse::<u32>);
    match (minor, parts.next()) {
        (Some(Ok(_)), None) => FileVersion::Absent,
        (Some(Ok(minor)), Some(release)) => match release.parse() {
            Ok(release) => FileVersion::Known(minor, release),
            Err(_) => FileVersion::Strange(rest.to_owned()),
        },
        _ => FileVersion::Strange(rest.to_owned()),
    }
}

/// What was seen.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// Private ABIs that are exported.
    pub pabis: Vec<u32>,
    /// Each marker, in the order of the table.
    pub markers: Vec<bool>,
    /// The version in the library's file name.
    pub file: FileVersion,
    /// The `N` of `-rdmavN.so` at the end of our own name, where libibverbs
    /// has asked for that.
    pub own_suffix: Option<u32>,
    /// What is looked for only if the file's name does not tell.
    pub unnamed: Unnamed,
}

/// Evidence of a library whose file name has no version.
#[derive(Clone, Debug, Default)]
pub struct Unnamed {
    /// The release in the distribution's note.
    pub package: Option<u32>,
    /// The value of [`VARIABLE`].
    pub vouched: Option<String>,
    /// Words that `ibv_qp_ex` has beyond those of release 34.
    pub qp_added: Option<usize>,
}

impl Evidence {
    /// Collects the evidence of a libibverbs; `own_suffix` is the name suffix
    /// under which it has loaded the plugin, if it has.
    pub fn gather(library: &Library<'_>, own_suffix: Option<u32>) -> Evidence {
        let private = library.pabis.first().and_then(|it| private_version(*it));
        let seen = |marker: &Marker| {
            let version = marker.version.or(private.as_deref())?;
            library.symbol(marker.name, version)
        };
        let file = library
            .file()
            .map_or(FileVersion::Absent, |f| file_version(&f));
        Evidence {
            pabis: library.pabis.clone(),
            markers: MARKERS.iter().map(|m| seen(m).is_some()).collect(),
            unnamed: match file {
                FileVersion::Known(..) => Unnamed::default(),
                _ => Unnamed {
                    package: library.notes().find_map(probe::package_release),
                    vouched: environment::text(VARIABLE),
                    qp_added: probe::qp_added(library),
                },
            },
            file,
            own_suffix,
        }
    }
}

/// The `N` of `...-rdmavN.so`.
pub fn own_suffix(name: &str) -> Option<u32> {
    name.strip_suffix(".so")?
        .rsplit_once("-rdmav")?
        .1
        .parse()
        .ok()
}

/// The one layout that all evidence allows; else why there is none.
pub fn decide(seen: &Evidence) -> Result<&'static Layout, String> {
    let &[pabi] = seen.pabis.as_slice() else {
        return Err(format!("it has several private ABIs: {:?}", seen.pabis));
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
    if let Some(suffix) = seen.own_suffix.filter(|suffix| *suffix != pabi) {
        return Err(format!(
            "its private ABI is {pabi}, but it asked for a provider of private ABI {suffix}"
        ));
    }
    // Functions: at least the release of the newest present one, below that of
    // the oldest absent one.
    let mut from = oldest;
    let mut to = newest;
    for (marker, present) in MARKERS.iter().zip(&seen.markers) {
        if *present {
            from = from.max(marker.since);
        } else {
            to = to.min(marker.since - 1);
        }
    }
    if from > to {
        return Err(format!(
            "its functions contradict each other or its private ABI {pabi} ({})",
            describe_markers(&seen.markers)
        ));
    }
    match &seen.file {
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
        FileVersion::Strange(version) if seen.unnamed.vouched.is_none() => Err(format!(
            "its version {version} is not of a form that ringverbs knows; if it is \
             rdma-core N, {VARIABLE}=N says so"
        )),
        // A vendor's version: its note has another numbering.
        FileVersion::Strange(_) => unnamed(of_pabi(), from..=to, None, &seen.unnamed),
        FileVersion::Absent => unnamed(of_pabi(), from..=to, seen.unnamed.package, &seen.unnamed),
    }
}

/// The layout of a library whose file name does not tell, by the releases that its
/// symbols allow and what else is known of it.
fn unnamed(
    of_pabi: impl Iterator<Item = &'static Layout>,
    possible: RangeInclusive<u32>,
    package: Option<u32>,
    seen: &Unnamed,
) -> Result<&'static Layout, String> {
    let (from, to) = (*possible.start(), *possible.end());
    let vouched = match &seen.vouched {
        None => None,
        Some(text) => match text.trim().parse::<u32>() {
            Ok(release) => Some(release),
            Err(_) => return Err(format!("{VARIABLE}={text} is not a release of rdma-core")),
        },
    };
    match (package, vouched) {
        (Some(package), Some(vouched)) if package != vouched => {
            return Err(format!(
                "it is of a package of rdma-core {package}, and {VARIABLE} says {vouched}"
            ));
        }
        _ => {}
    }
    let fits = |layout: &Layout| seen.qp_added.is_none_or(|added| added == layout.qp_added());
    if let Some(release) = package.or(vouched) {
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
                match seen.qp_added {
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
        .filter(|(_, seen)| **seen)
        .map(|(m, _)| m.name.to_string_lossy())
        .collect();
    if with.is_empty() {
        "none of those it could have".to_owned()
    } else {
        with.join(", ")
    }
}

/// Why nothing was registered.
#[derive(Debug)]
pub struct Refusal(String);

impl Refusal {
    /// Of a library that was found.
    pub fn new(library: &Library<'_>, reason: impl AsRef<str>) -> Refusal {
        let file = library
            .file()
            .unwrap_or_else(|| library.object.name.to_string_lossy().into_owned());
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

    /// Nothing to register with.
    pub fn no_library() -> Refusal {
        Refusal("no libibverbs in this process".to_owned())
    }

    /// Several libraries, and none of them on the call stack.
    pub fn several(one: &Library<'_>, other: &Library<'_>) -> Refusal {
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
