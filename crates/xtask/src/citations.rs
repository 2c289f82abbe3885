//! Lists where the code cites the InfiniBand Architecture Specification, volume 1.
//!
//! The form is `IBA SECTION`: `IBA 9.7.6.1.3`, or `IBA A17.3.3` in an annex. `IBA release 1.5`
//! names an edition.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};

use crate::driver;

/// Folders with code that may cite.
const FOLDERS: [&str; 3] = ["crates", "provider-plugin", "fuzz/fuzz_targets"];
/// This file has examples that are none.
const EXCLUDED: &str = "citations.rs";
const NAME: &str = "IBA";
/// Other names of the specification.
const OTHER_NAMES: [&str; 3] = [
    "InfiniBand Architecture",
    "InfiniBand Specification",
    "IBTA",
];

/// A section's number: an annex, or 0, and the numbers of chapter, section and so on.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Section {
    annex: u32,
    numbers: Vec<u32>,
}

impl Section {
    /// Parses a number of at least two parts.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('.');
        let first = parts.next()?;
        let number = |text: &str| {
            let is_number = !text.is_empty() && text.bytes().all(|it| it.is_ascii_digit());
            is_number.then(|| text.parse().ok())?
        };
        let (annex, chapter) = match first.strip_prefix('A') {
            Some(annex) => (number(annex)?, None),
            None => (0, Some(number(first)?)),
        };
        let rest = parts.map(number).collect::<Option<Vec<_>>>()?;
        if rest.is_empty() {
            return None;
        }
        let numbers = chapter.into_iter().chain(rest).collect();
        Some(Self { annex, numbers })
    }
}

impl std::fmt::Display for Section {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let numbers: Vec<_> = self.numbers.iter().map(u32::to_string).collect();
        match self.annex {
            0 => write!(f, "{}", numbers.join(".")),
            annex => write!(f, "A{annex}.{}", numbers.join(".")),
        }
    }
}

/// Sections with the lines that cite them, and lines with citations of another form.
#[derive(Default)]
struct Citations {
    sections: BTreeMap<Section, Vec<String>>,
    malformed: Vec<String>,
}

impl Citations {
    /// Adds the citations of a line; `at` is its place.
    fn add_line(&mut self, line: &str, at: &str) {
        let is_word = |text: &str| {
            text.bytes()
                .next_back()
                .is_some_and(|it| it.is_ascii_alphanumeric())
        };
        let mut malformed = OTHER_NAMES.iter().any(|name| line.contains(name));
        for (start, _) in line.match_indices(NAME) {
            let rest = &line[start + NAME.len()..];
            let begins_word = rest
                .bytes()
                .next()
                .is_some_and(|it| it.is_ascii_alphanumeric());
            if is_word(&line[..start])
                || line[..start].ends_with('_')
                || begins_word
                || rest.starts_with('_')
            {
                continue;
            }
            let rest = rest.trim_start();
            let is_part = |it: char| it.is_ascii_digit() || it == '.' || it == 'A';
            let length = rest.find(|it| !is_part(it)).unwrap_or(rest.len());
            match Section::parse(rest[..length].trim_end_matches('.')) {
                Some(section) => self
                    .sections
                    .entry(section)
                    .or_default()
                    .push(at.to_owned()),
                None => malformed |= !rest.starts_with("release "),
            }
        }
        if malformed {
            self.malformed.push(format!("{at}: {}", line.trim()));
        }
    }

    fn add_folder(&mut self, folder: &Path) -> Result<()> {
        let cannot = || format!("cannot read {}", folder.display());
        let entries = fs::read_dir(folder).with_context(cannot)?;
        let mut paths = entries
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<Vec<_>>>()?;
        paths.sort();
        for path in paths {
            if path.is_dir() {
                self.add_folder(&path)?;
            } else if path.extension().is_some_and(|it| it == "rs") && !path.ends_with(EXCLUDED) {
                let text = fs::read_to_string(&path).with_context(cannot)?;
                let name = path.strip_prefix(driver::root()).unwrap_or(&path);
                for (index, line) in text.lines().enumerate() {
                    self.add_line(line, &format!("{}:{}", name.display(), index + 1));
                }
            }
        }
        Ok(())
    }
}

/// Returns all citations of the repository.
fn collect() -> Result<Citations> {
    let mut citations = Citations::default();
    for folder in FOLDERS {
        citations.add_folder(&driver::root().join(folder))?;
    }
    Ok(citations)
}

/// Prints the citations by section. Fails if one has another form.
///
/// # Errors
/// A file cannot be read.
pub fn citations() -> Result<ExitCode> {
    let citations = collect()?;
    for (section, places) in &citations.sections {
        for place in places {
            println!("{:12} {place}", section.to_string());
        }
    }
    for line in &citations.malformed {
        eprintln!("not in the form \"IBA SECTION\": {line}");
    }
    Ok(match citations.malformed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_citations_have_the_form() {
        let citations = collect().unwrap();
        assert_eq!(citations.malformed, [""; 0]);
        let cited = |section: &str| {
            citations
                .sections
                .contains_key(&Section::parse(section).unwrap())
        };
        assert!(cited("9.7.6.1.3") && cited("A17.3.3") && !cited("1.5"));
    }

    #[test]
    fn sections_are_recognised() {
        let mut citations = Citations::default();
        for line in [
            "/// The ICRC (IBA 7.8.1, IBA A17.3.3).",
            "//! of flow control: IBA 9.7.7.",
            "/// since IBA release 1.5; PORT_IBA 3, IBAN 9.1",
        ] {
            citations.add_line(line, "here");
        }
        let found: Vec<_> = citations.sections.keys().map(Section::to_string).collect();
        assert_eq!(found, ["7.8.1", "9.7.7", "A17.3.3"]);
        assert_eq!(citations.malformed, [""; 0]);
        for line in [
            "// IBA 9",
            "// (IBA table 45)",
            "// the IBA",
            "// IBA 1..2",
            "// IBA A.1",
            "// InfiniBand Architecture Specification, volume 1, 7.8.1",
        ] {
            citations.add_line(line, "there");
        }
        assert_eq!(citations.malformed.len(), 6);
        assert_eq!(citations.sections.len(), 3);
    }
}
