//! Verdicts of the stock provider that an earlier run has shown.
//!
//! The same packages, kernel, emulator and cases give the same verdicts, and half
//! of a run is spent on them. Only a verdict that asks something of the plugin is
//! kept: what stock failed by chance must not excuse a later run's failure.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use super::rates;
use crate::record::{Case, Outcome, Provider, Record, Stock};

/// Verdicts by group and name.
#[derive(Debug, Default)]
pub struct Verdicts(BTreeMap<(String, String), Case>);

impl Verdicts {
    /// Reads records, one on a line.
    ///
    /// # Errors
    /// The file cannot be read, or has something else in it.
    pub fn read(path: &Path) -> Result<Verdicts> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut verdicts = BTreeMap::new();
        for line in text.lines() {
            if let Record::Case(mut case) = Record::parse(line)? {
                if lasts(&case) {
                    case.cached = true;
                    verdicts.insert((case.group.clone(), case.name.clone()), case);
                }
            }
        }
        Ok(Verdicts(verdicts))
    }

    /// What stock did with a case.
    pub fn of(&self, group: &str, name: &str) -> Option<&Case> {
        self.0.get(&(group.to_owned(), name.to_owned()))
    }

    /// The names of the cases of a group.
    pub fn names<'v>(&'v self, group: &'v str) -> impl Iterator<Item = &'v str> {
        let of_group = self.0.keys().filter(move |(of, _)| of == group);
        of_group.map(|(_, name)| name.as_str())
    }
}

/// Whether a verdict may stand for that of a later run: a pass, which the plugin
/// has to repeat; a skip, which it may; a defect that has to show and did.
pub fn lasts(case: &Case) -> bool {
    let kept = match case.stock {
        Stock::Reference => case.outcome != Outcome::Fail,
        Stock::MustFail | Stock::FailsSoFar => case.outcome == Outcome::Fail,
        Stock::NotRun => false,
    };
    // No attempt: the case was not for this machine.
    kept && case.provider == Provider::Stock && case.attempts > 0 && case.group != rates::GROUP
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(stock: Stock, outcome: Outcome) -> Case {
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
        use Stock::{FailsSoFar, MustFail, NotRun, Reference};
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
            assert_eq!(lasts(&case(stock, outcome)), kept, "{stock:?} {outcome:?}");
        }
        let mut ours = case(Reference, Pass);
        ours.provider = Provider::Ours;
        assert!(!lasts(&ours));
    }

    #[test]
    fn verdicts_are_found_by_group_and_name() {
        let path = std::env::temp_dir().join(format!("rv-stock-{}", std::process::id()));
        let mut failed = case(Stock::Reference, Outcome::Fail);
        failed.name = "failed".into();
        let records = [
            Record::Case(case(Stock::Reference, Outcome::Pass)),
            Record::Case(failed),
            Record::End,
        ];
        let lines: Vec<_> = records.iter().map(Record::line).collect();
        fs::write(&path, lines.join("\n")).unwrap();
        let verdicts = Verdicts::read(&path).unwrap();
        assert!(
            verdicts
                .of("pingpong", "rc")
                .is_some_and(|case| case.cached)
        );
        assert!(verdicts.of("pingpong", "failed").is_none());
        assert!(verdicts.of("perftest", "rc").is_none());
        assert_eq!(verdicts.names("pingpong").collect::<Vec<_>>(), ["rc"]);
        assert_eq!(verdicts.names("perftest").count(), 0);
        fs::write(&path, "nonsense").unwrap();
        assert!(Verdicts::read(&path).is_err());
        fs::remove_file(&path).unwrap();
    }
}
