//! The cache of the stock provider's verdicts.
//!
//! A cache file is used only by runs with the same identity: a line that names everything
//! that can change a verdict.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::host;
use super::tree::{Image, fnv};
use crate::compare::Results;
use crate::driver::stock::is_cacheable;
use crate::record::{Case, Record};

/// Maximum age of a verdict.
const MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// A line of the file. The first line is the identity.
#[derive(Serialize, Deserialize)]
struct Entry {
    /// When the case ran, in seconds since 1970.
    at: u64,
    case: Case,
}

/// The verdicts of one identity.
pub struct VerdictCache {
    path: PathBuf,
    identity: String,
    entries: Vec<Entry>,
}

impl VerdictCache {
    /// Opens the cache for runs in `image` with the cases and the runner in the folder
    /// `sources`. It is empty if the file is missing or unreadable.
    ///
    /// # Errors
    /// The identity cannot be determined.
    pub fn open(image: &Image, sources: &Path) -> Result<VerdictCache> {
        let identity = identity(image, sources)?;
        let name = format!("{}-{:016x}.jsonl", image.suite, fnv([identity.as_bytes()]));
        let path = host::cache()?.join("stock").join(name);
        Ok(VerdictCache::read(path, identity, now()))
    }

    fn read(path: PathBuf, identity: String, now: u64) -> VerdictCache {
        let text = fs::read_to_string(&path).unwrap_or_default();
        let mut lines = text.lines();
        let mut entries = Vec::new();
        if lines.next() == Some(&identity) {
            let parsed = lines.filter_map(|line| serde_json::from_str::<Entry>(line).ok());
            entries.extend(parsed.filter(|it| now.saturating_sub(it.at) < MAX_AGE.as_secs()));
        }
        VerdictCache {
            path,
            identity,
            entries,
        }
    }

    /// Returns the verdicts as records, one per line.
    pub fn records(&self) -> String {
        let line = |entry: &Entry| Record::Case(entry.case.clone()).line() + "\n";
        self.entries.iter().map(line).collect()
    }

    /// Adds the results of a complete run, and writes the file.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn save(mut self, results: &Results) -> Result<()> {
        self.update(results, now());
        let mut text = self.identity.clone() + "\n";
        for entry in &self.entries {
            text.push_str(&serde_json::to_string(entry)?);
            text.push('\n');
        }
        let folder = self.path.parent().context("a file without a folder")?;
        let cannot = || format!("cannot write {}", self.path.display());
        fs::create_dir_all(folder).with_context(cannot)?;
        let partial = self.path.with_extension(std::process::id().to_string());
        fs::write(&partial, text).with_context(cannot)?;
        fs::rename(&partial, &self.path).with_context(cannot)?;
        remove_old(folder);
        Ok(())
    }

    fn update(&mut self, results: &Results, now: u64) {
        let fresh = |case: &&Case| !case.cached && is_cacheable(case);
        for case in results.cases.iter().filter(fresh) {
            self.entries
                .retain(|it| it.case.group != case.group || it.case.name != case.name);
            self.entries.push(Entry {
                at: now,
                case: case.clone(),
            });
        }
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Returns the identity: packages and kernel of the guest, the emulator, and the cases
/// with the code that runs them.
fn identity(image: &Image, sources: &Path) -> Result<String> {
    let read =
        |path: PathBuf| fs::read(&path).with_context(|| format!("cannot read {}", path.display()));
    let packages = read(image.tree().join("var/lib/dpkg/status"))?;
    let kernel = read(image.kernel())?;
    let initrd = read(image.initrd())?;
    let mut files = Vec::new();
    collect_files(sources, &mut files)?;
    files.sort();
    let mut cases = Vec::new();
    for file in files {
        cases.push(
            file.strip_prefix(sources)?
                .display()
                .to_string()
                .into_bytes(),
        );
        cases.push(read(file)?);
    }
    let qemu = match host::which(image.suite.architecture().qemu.0) {
        Some(path) => Command::new(path).arg("--version").output()?.stdout,
        None => Vec::new(),
    };
    Ok(format!(
        "{} rdma-core {} packages {:016x} kernel {:016x} initrd {:016x} cases {:016x} qemu {:016x} kvm {}",
        image.suite,
        image.rdma_core()?,
        fnv([packages.as_slice()]),
        fnv([kernel.as_slice()]),
        fnv([initrd.as_slice()]),
        fnv(cases.iter().map(Vec::as_slice)),
        fnv([qemu.as_slice()]),
        host::kvm_works(),
    ))
}

fn collect_files(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            collect_files(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}

/// Removes files whose verdicts are all too old.
fn remove_old(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let written = entry.metadata().and_then(|it| it.modified());
        let age = written.ok().and_then(|at| at.elapsed().ok());
        if age.is_some_and(|age| age > MAX_AGE) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::record::{Outcome, Provider, StockExpectation};

    fn case(name: &str, outcome: Outcome) -> Case {
        Case {
            group: "g".into(),
            name: name.into(),
            provider: Provider::Stock,
            outcome,
            stock: StockExpectation::Reference,
            attempts: 1,
            seconds: 1.0,
            detail: String::new(),
            earlier: String::new(),
            figures: BTreeMap::new(),
            cached: false,
        }
    }

    #[test]
    fn verdicts_are_cached_by_identity_until_they_expire() {
        let folder = std::env::temp_dir().join(format!("rv-verdicts-{}", std::process::id()));
        let path = folder.join("x.jsonl");
        let open = |identity: &str, now| VerdictCache::read(path.clone(), identity.to_owned(), now);
        let mut results = Results::default();
        results.add(Record::Case(case("passes", Outcome::Pass)));
        results.add(Record::Case(case("fails", Outcome::Fail)));
        open("this", now()).save(&results).unwrap();
        assert_eq!(open("this", now()).records().lines().count(), 1);
        assert_eq!(open("another", now()).records(), "");
        assert_eq!(open("this", now() + MAX_AGE.as_secs()).records(), "");

        // A cached verdict keeps its age.
        let mut cache = open("this", now());
        let first = cache.entries[0].at;
        results.cases[0].cached = true;
        cache.update(&results, first + 5);
        assert_eq!(cache.entries[0].at, first);
        results.cases[0].cached = false;
        cache.update(&results, first + 5);
        assert_eq!((cache.entries.len(), cache.entries[0].at), (1, first + 5));
        fs::remove_dir_all(&folder).unwrap();
    }
}
