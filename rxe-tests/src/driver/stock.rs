//! Cached verdicts of the stock provider.
//!
//! The same packages, kernel, emulator and cases give the same verdicts, which take half
//! of a run. Only verdicts that require something of the plugin are kept: a random
//! failure of stock must not excuse a failure of the plugin in a later run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::rates;
use crate::record::{Case, Outcome, Provider, Record, StockExpectation};

/// Cached verdicts by group and name.
#[derive(Debug, Default)]
pub struct CachedVerdicts(BTreeMap<(String, String), Case>);

impl CachedVerdicts {
    /// Reads records, one per line.
    ///
    /// # Errors
    /// The file cannot be read or parsed.
    pub fn read(path: &Path) -> Result<CachedVerdicts> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut verdicts = BTreeMap::new();
        for line in text.lines() {
            if let Record::Case(mut case) = Record::parse(line)? {
                if is_cacheable(&case) {
                    case.cached = true;
                    verdicts.insert((case.group.clone(), case.name.clone()), case);
                }
            }
        }
        Ok(CachedVerdicts(verdicts))
    }

    /// Returns the verdict of a case.
    pub fn get(&self, group: &str, name: &str) -> Option<&Case> {
        self.0.get(&(group.to_owned(), name.to_owned()))
    }

    /// Returns the names of the cases of a group.
    pub fn names<'v>(&'v self, group: &'v str) -> impl Iterator<Item = &'v str> {
        let of_group = self.0.keys().filter(move |(of, _)| of == group);
        of_group.map(|(_, name)| name.as_str())
    }
}

/// Returns whether a verdict may be reused: a pass, which the plugin must repeat; a skip,
/// which it may repeat; an expected failure.
pub fn is_cacheable(case: &Case) -> bool {
    let kept = match case.stock {
        StockExpectation::Reference => case.outcome != Outcome::Fail,
        StockExpectation::MustFail | StockExpectation::FailsSoFar => case.outcome == Outcome::Fail,
        StockExpectation::NotRun => false,
    };
    // A case without an attempt was not run on this machine.
    kept && case.provider == Provider::Stock && case.attempts > 0 && case.group != rates::GROUP
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(stock: StockExpectation, outcome: Outcome) -> Case {
        Case {
            group: "pingpong".into(),
            name: "rc".into(),
            provider: Provider::Stock,
            outcome,
            stock,
            attempts: 1,
            seconds: 1.0,
            detail: String::new(),
            earlier: String::new(),
            figures: BTreeMap::new(),
            cached: false,
        }
    }

    #[test]
    fn stock_failures_are_not_cached() {
        use Outcome::{Fail, Pass, Skip};
        use StockExpectation::{FailsSoFar, MustFail, NotRun, Reference};
        for (stock, outcome, kept) in [
            (Reference, Pass, true),
            (Reference, Skip, true),
            (Reference, Fail, false),
            (MustFail, Fail, true),
            (MustFail, Pass, false),
            (FailsSoFar, Fail, true),
            (FailsSoFar, Pass, false),
            (NotRun, Pass, false),
        ] {
            assert_eq!(
                is_cacheable(&case(stock, outcome)),
                kept,
                "{stock:?} {outcome:?}"
            );
        }
        let mut ours = case(Reference, Pass);
        ours.provider = Provider::Ours;
        assert!(!is_cacheable(&ours));
    }

    #[test]
    fn verdicts_are_found_by_group_and_name() {
        let path = std::env::temp_dir().join(format!("rv-stock-{}", std::process::id()));
        let mut failed = case(StockExpectation::Reference, Outcome::Fail);
        failed.name = "failed".into();
        let records = [
            Record::Case(case(StockExpectation::Reference, Outcome::Pass)),
            Record::Case(failed),
            Record::End,
        ];
        let lines: Vec<_> = records.iter().map(Record::line).collect();
        fs::write(&path, lines.join("\n")).unwrap();
        let verdicts = CachedVerdicts::read(&path).unwrap();
        assert!(
            verdicts
                .get("pingpong", "rc")
                .is_some_and(|case| case.cached)
        );
        assert!(verdicts.get("pingpong", "failed").is_none());
        assert!(verdicts.get("perftest", "rc").is_none());
        assert_eq!(verdicts.names("pingpong").collect::<Vec<_>>(), ["rc"]);
        assert_eq!(verdicts.names("perftest").count(), 0);
        fs::write(&path, "nonsense").unwrap();
        assert!(CachedVerdicts::read(&path).is_err());
        fs::remove_file(&path).unwrap();
    }
}
