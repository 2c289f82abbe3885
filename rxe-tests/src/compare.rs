//! Compares the results of ours with those of stock, case by case.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use crate::record::{Case, Outcome, Provider, Record, StockExpectation};

/// The results of one guest.
#[derive(Debug, Default)]
pub struct Results {
    /// The kernel's release.
    pub kernel: String,
    /// rdma-core's version.
    pub rdma_core: String,
    /// All results of cases.
    pub cases: Vec<Case>,
    /// The plugin's message if it refused this rdma-core.
    pub plugin_refusal: Option<String>,
    /// The providers mapped in processes of ours, by case.
    pub proofs: Vec<(String, Vec<String>)>,
    /// Number of records that could not be parsed.
    pub unreadable: usize,
    /// Whether the driver finished.
    pub complete: bool,
    /// Duration of each part of the run: preparations, and the cases of a group with a
    /// provider.
    pub times: BTreeMap<String, Duration>,
}

/// The verdict on the result of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The result meets the pass criteria.
    Pass,
    /// The result violates them.
    Fail,
    /// The case was skipped, or its failure is not held against ours.
    Skip,
}

/// Prefix of the reason for a case that fails with ours and is skipped with stock.
const FAILS_WHERE_STOCK_SKIPS: &str = "fails with ours, skipped with stock";

/// Known failures of ours in cases that stock skips: group, name, reason.
const KNOWN_FAILURES: &[(&str, &str, &str)] = &[(
    "pyverbs",
    "tests.test_mr.MRTest.test_mr_rereg_pd",
    "stock has no rereg_mr; the test expects that a queue pair which is reset takes its \
     completions out of the completion queue, as no provider of rxe does",
)];

/// Prefix of the reason for a case that passes with stock and is refused by ours.
const REFUSED_BY_OURS: &str = "refused by ours: ";

/// A feature of ConnectX that stock supports and ours refuses by design.
struct KnownRefusal {
    group: &'static str,
    /// Prefix of the names of its cases.
    name_prefix: &'static str,
    /// Messages of the refusal. A case that fails with another message is not refused.
    messages: &'static [&'static str],
    feature: &'static str,
}

const KNOWN_REFUSALS: &[KnownRefusal] = &[KnownRefusal {
    group: "pyverbs",
    name_prefix: "tests.test_mlx5_dr.",
    messages: &["DrDomain creation failed", "DrActionQp creation failed"],
    feature: "direct rules",
}];

/// Returns the feature that ours refuses in a case that fails with `detail`; `None` if
/// that is not a refusal by design.
pub fn known_refusal(group: &str, name: &str, detail: &str) -> Option<&'static str> {
    KNOWN_REFUSALS
        .iter()
        .find(|refusal| {
            refusal.group == group
                && name.starts_with(refusal.name_prefix)
                && refusal.messages.iter().any(|it| detail.contains(it))
        })
        .map(|refusal| refusal.feature)
}

fn refusal_of(case: &Case) -> Option<&'static str> {
    known_refusal(&case.group, &case.name, &case.detail)
}

fn known_failure(case: &Case) -> Option<&'static str> {
    KNOWN_FAILURES
        .iter()
        .find(|(group, name, _)| (*group, *name) == (&case.group, &case.name))
        .map(|(_, _, reason)| *reason)
}

/// Counts for one group and provider.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Passed.
    pub passed: usize,
    /// Failed.
    pub failed: usize,
    /// Skipped by the program itself.
    pub skipped: usize,
}

impl Results {
    /// Adds a record.
    pub fn add(&mut self, record: Record) {
        match record {
            Record::Environment { kernel, rdma_core } => {
                self.kernel = kernel;
                self.rdma_core = rdma_core;
            }
            Record::Case(case) => self.cases.push(case),
            Record::Refused { line } => self.plugin_refusal = Some(line),
            Record::Proof { case, maps } => self.proofs.push((case, maps)),
            Record::End => self.complete = true,
        }
    }

    /// Adds `time` to that of a part of the run.
    pub fn add_time(&mut self, part: &str, time: Duration) {
        *self.times.entry(part.to_owned()).or_default() += time;
    }

    /// Returns the result of a case with stock; `None` if stock did not run it.
    fn stock_outcome(&self, case: &Case) -> Option<Outcome> {
        self.cases
            .iter()
            .find(|c| c.provider == Provider::Stock && c.group == case.group && c.name == case.name)
            .map(|c| c.outcome)
    }

    /// Returns the verdict on every case, with a reason. The pass criteria:
    ///
    /// - Ours, and ours mixed with stock, must pass the cases that stock passes.
    /// - Ours must pass the cases that stock does not run, and those that show a defect
    ///   of stock.
    /// - Stock must fail the cases that show its defects; otherwise they show nothing.
    /// - Failures of stock are listed; ours may fail these cases.
    /// - Ours must skip or pass the cases that stock skips, except known failures.
    /// - Refusals by design are listed.
    pub fn verdicts(&self) -> Vec<(&Case, Verdict, String)> {
        self.cases
            .iter()
            .map(|case| {
                let (verdict, reason) = self.verdict(case);
                (case, verdict, reason)
            })
            .collect()
    }

    fn verdict(&self, case: &Case) -> (Verdict, String) {
        use Outcome::{Fail, Pass, Skip};
        match (case.provider, case.stock, case.outcome) {
            (Provider::Stock, StockExpectation::MustFail, Fail) => {
                (Verdict::Pass, "the defect shows".into())
            }
            (Provider::Stock, StockExpectation::MustFail, Pass) => (
                Verdict::Fail,
                "stock passes a case that must show its defect".into(),
            ),
            (Provider::Stock, StockExpectation::FailsSoFar, Fail) => {
                (Verdict::Pass, "the defect shows".into())
            }
            (Provider::Stock, StockExpectation::FailsSoFar, Pass) => {
                (Verdict::Skip, "stock no longer fails".into())
            }
            (Provider::Stock, _, Pass) => (Verdict::Pass, String::new()),
            (Provider::Stock, _, Fail) => (Verdict::Skip, format!("stock fails: {}", case.detail)),
            (_, _, Pass) => (Verdict::Pass, String::new()),
            (_, StockExpectation::Reference, Fail) => match self.stock_outcome(case) {
                Some(Pass) => match refusal_of(case) {
                    Some(reason) => (Verdict::Skip, format!("{REFUSED_BY_OURS}{reason}")),
                    None => (Verdict::Fail, format!("stock passes; {}", case.detail)),
                },
                Some(Skip) => match known_failure(case) {
                    Some(reason) => (
                        Verdict::Skip,
                        format!("{FAILS_WHERE_STOCK_SKIPS}; known: {reason}"),
                    ),
                    None => (
                        Verdict::Fail,
                        format!("{FAILS_WHERE_STOCK_SKIPS}: {}", case.detail),
                    ),
                },
                Some(_) => (Verdict::Skip, "fails with stock too".into()),
                None => (Verdict::Fail, format!("no run with stock; {}", case.detail)),
            },
            (
                _,
                StockExpectation::NotRun
                | StockExpectation::MustFail
                | StockExpectation::FailsSoFar,
                Fail,
            ) => (Verdict::Fail, case.detail.clone()),
            (Provider::Stock, _, Skip) => (Verdict::Skip, case.detail.clone()),
            (_, _, Skip) => match self.stock_outcome(case) {
                Some(Pass) => match refusal_of(case) {
                    Some(reason) => (Verdict::Skip, format!("{REFUSED_BY_OURS}{reason}")),
                    None => (
                        Verdict::Fail,
                        format!("skipped, but stock passes: {}", case.detail),
                    ),
                },
                _ => (Verdict::Skip, case.detail.clone()),
            },
        }
    }

    /// Returns whether rdma-core's tests were missing.
    pub fn lacks_pyverbs(&self) -> bool {
        self.cases
            .iter()
            .any(|case| case.group == "pyverbs" && case.attempts == 0)
    }

    /// Returns the cases that passed after the first attempt.
    pub fn retried(&self) -> Vec<&Case> {
        let late = |case: &&Case| case.outcome == Outcome::Pass && case.attempts > 1;
        self.cases.iter().filter(late).collect()
    }

    /// Returns the number of cached verdicts of stock.
    pub fn cached(&self) -> usize {
        self.cases.iter().filter(|case| case.cached).count()
    }

    /// Returns a line for each case that passed after the first attempt.
    pub fn retried_text(&self) -> String {
        let mut out = String::new();
        for case in self.retried() {
            let _ = writeln!(
                out,
                "  passed at attempt {}: {} [{}] {}; the first: {}",
                case.attempts,
                case.group,
                case.provider,
                case.name,
                case.earlier.replace('\n', " / ")
            );
        }
        out
    }

    /// Counts the results by group and provider.
    pub fn counts(&self) -> BTreeMap<(String, Provider), Count> {
        let mut counts: BTreeMap<_, Count> = BTreeMap::new();
        for case in &self.cases {
            let count = counts
                .entry((case.group.clone(), case.provider))
                .or_default();
            match case.outcome {
                Outcome::Pass => count.passed += 1,
                Outcome::Fail => count.failed += 1,
                Outcome::Skip => count.skipped += 1,
            }
        }
        counts
    }

    /// Returns the results as text: a table of counts, violations of the pass criteria,
    /// failures of stock.
    pub fn text(&self, suite: &str) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{suite}: kernel {}, rdma-core {}",
            self.kernel, self.rdma_core
        );
        if let Some(line) = &self.plugin_refusal {
            let _ = writeln!(
                out,
                "  the plugin refuses this rdma-core, stock takes over: {line}"
            );
        }
        let _ = writeln!(
            out,
            "  {:<10} {:<12} {:>6} {:>6} {:>7}",
            "group", "provider", "passed", "failed", "skipped"
        );
        for ((group, provider), count) in self.counts() {
            let _ = writeln!(
                out,
                "  {group:<10} {:<12} {:>6} {:>6} {:>7}",
                provider.to_string(),
                count.passed,
                count.failed,
                count.skipped
            );
        }
        for (case, maps) in &self.proofs {
            let _ = writeln!(out, "  mapped in ours ({case}): {}", maps.join(" "));
        }
        // By reason and module.
        let mut refused: BTreeMap<String, BTreeMap<&str, usize>> = BTreeMap::new();
        for (case, verdict, reason) in self.verdicts() {
            if verdict == Verdict::Skip && reason.starts_with(REFUSED_BY_OURS) {
                let module = case.name.strip_prefix("tests.").unwrap_or(&case.name);
                let module = module.split('.').next().unwrap_or(module);
                *refused
                    .entry(reason)
                    .or_default()
                    .entry(module)
                    .or_default() += 1;
                continue;
            }
            let line = format!(
                "{} [{}] {} {}",
                case.group,
                case.provider,
                case.name,
                reason.replace('\n', " / ")
            );
            match (verdict, case.provider, case.outcome) {
                (Verdict::Fail, ..) => {
                    let _ = writeln!(out, "  FAILED {line}");
                }
                (Verdict::Skip, Provider::Stock, Outcome::Fail) => {
                    let _ = writeln!(out, "  listed {line}");
                }
                (Verdict::Skip, _, Outcome::Fail)
                    if self.stock_outcome(case) == Some(Outcome::Skip) =>
                {
                    let _ = writeln!(out, "  listed {line}");
                }
                (Verdict::Skip, Provider::Stock, Outcome::Pass) => {
                    let _ = writeln!(out, "  note {line}");
                }
                // Most of rdma-core's tests are for other devices, and skipped with stock
                // as well.
                (_, _, Outcome::Skip)
                    if !case.name.starts_with("tests.")
                        || case.provider != Provider::Stock
                            && self.stock_outcome(case) != Some(Outcome::Skip) =>
                {
                    let _ = writeln!(out, "  skipped {line}");
                }
                _ if case.group == "rates" => {
                    let _ = writeln!(out, "  {} {}", case.name, case.detail);
                }
                _ => {}
            }
        }
        for (reason, modules) in refused {
            let count: usize = modules.values().sum();
            let modules: Vec<_> = modules.iter().map(|(m, n)| format!("{m} {n}")).collect();
            let _ = writeln!(
                out,
                "  {count} cases that stock passes, {reason} ({})",
                modules.join(", ")
            );
        }
        out.push_str(&self.retried_text());
        if self.unreadable > 0 {
            let _ = writeln!(out, "  FAILED: {} unreadable records", self.unreadable);
        }
        if !self.complete {
            let _ = writeln!(out, "  FAILED: the driver did not finish");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(provider: Provider, stock: StockExpectation, outcome: Outcome) -> Record {
        Record::Case(Case {
            group: "g".into(),
            name: "n".into(),
            provider,
            outcome,
            stock,
            attempts: 1,
            seconds: 0.0,
            detail: String::new(),
            earlier: String::new(),
            figures: BTreeMap::new(),
            cached: false,
        })
    }

    fn verdict_of_ours(stock: Option<Outcome>, kind: StockExpectation, ours: Outcome) -> Verdict {
        let mut results = Results::default();
        if let Some(stock) = stock {
            results.add(case(Provider::Stock, kind, stock));
        }
        results.add(case(Provider::Ours, kind, ours));
        results.verdicts().pop().unwrap().1
    }

    #[test]
    fn plugin_must_pass_what_stock_passes() {
        use Outcome::{Fail, Pass, Skip};
        let rule = |stock, ours| verdict_of_ours(Some(stock), StockExpectation::Reference, ours);
        assert_eq!(rule(Pass, Pass), Verdict::Pass);
        assert_eq!(rule(Pass, Fail), Verdict::Fail);
        assert_eq!(rule(Pass, Skip), Verdict::Fail);
        assert_eq!(rule(Fail, Fail), Verdict::Skip);
        assert_eq!(rule(Fail, Pass), Verdict::Pass);
        assert_eq!(rule(Skip, Skip), Verdict::Skip);
        assert_eq!(rule(Skip, Pass), Verdict::Pass);
        assert_eq!(rule(Skip, Fail), Verdict::Fail);
    }

    #[test]
    fn only_known_cases_may_fail_if_stock_skips() {
        let mut results = Results::default();
        for (provider, outcome) in [
            (Provider::Stock, Outcome::Skip),
            (Provider::Ours, Outcome::Fail),
        ] {
            let Record::Case(mut case) = case(provider, StockExpectation::Reference, outcome)
            else {
                unreachable!()
            };
            results.add(Record::Case(case.clone()));
            (case.group, case.name) = (KNOWN_FAILURES[0].0.into(), KNOWN_FAILURES[0].1.into());
            results.add(Record::Case(case));
        }
        let verdicts: Vec<_> = results.verdicts().iter().map(|v| v.1).collect();
        use Verdict::{Fail, Skip};
        assert_eq!(verdicts, [Skip, Skip, Fail, Skip]);
        let text = results.text("trixie");
        assert!(text.contains("FAILED g [ours] n fails with ours, skipped with stock"));
        assert!(text.contains("test_mr_rereg_pd fails with ours, skipped with stock; known"));
    }

    #[test]
    fn refusals_by_design_are_counted() {
        let mut results = Results::default();
        for (provider, outcome) in [
            (Provider::Stock, Outcome::Pass),
            (Provider::Ours, Outcome::Skip),
            (Provider::OursClient, Outcome::Fail),
        ] {
            let Record::Case(mut case) = case(provider, StockExpectation::Reference, outcome)
            else {
                unreachable!()
            };
            let refusal = &KNOWN_REFUSALS[0];
            (case.group, case.name) = ("pyverbs".into(), format!("{}x", refusal.name_prefix));
            case.detail = format!("no {}", refusal.messages[0]);
            results.add(Record::Case(case.clone()));
            // The same case, with another failure.
            case.provider = Provider::OursServer;
            case.detail = "a wrong byte".into();
            if outcome == Outcome::Fail {
                results.add(Record::Case(case));
            }
        }
        let verdicts: Vec<_> = results.verdicts().iter().map(|v| v.1).collect();
        use Verdict::{Fail, Pass, Skip};
        assert_eq!(verdicts, [Pass, Skip, Skip, Fail]);
        let text = results.text("trixie");
        assert!(
            text.contains(
                "2 cases that stock passes, refused by ours: direct rules (test_mlx5_dr 2)"
            ),
            "{text}"
        );
    }

    #[test]
    fn refusal_is_recognised_by_its_message() {
        let is_refusal = |name, detail| known_refusal("pyverbs", name, detail).is_some();
        let rules = "tests.test_mlx5_dr.Mlx5DrTest.test_root_tbl_qp_rule";
        let detail = "DrActionQp creation failed.. Errno: 95, Operation not supported";
        assert!(is_refusal(rules, detail));
        assert!(!is_refusal(rules, "DrMatcher creation failed."));
        assert!(!is_refusal(
            "tests.test_qp.QPTest.test_create_raw_qp_ex",
            detail
        ));
        assert!(known_refusal("perftest", rules, detail).is_none());
    }

    #[test]
    fn retried_passes_are_listed() {
        let mut results = Results::default();
        let Record::Case(mut late) = case(Provider::Ours, StockExpectation::NotRun, Outcome::Pass)
        else {
            unreachable!()
        };
        (late.attempts, late.earlier) = (2, "too slow".into());
        results.add(Record::Case(late));
        results.add(case(
            Provider::Native,
            StockExpectation::NotRun,
            Outcome::Pass,
        ));
        assert_eq!(results.retried().len(), 1);
        let text = results.text("trixie");
        assert!(text.contains("passed at attempt 2: g [ours] n; the first: too slow"));
    }

    #[test]
    fn a_result_without_its_reference_is_a_failure() {
        assert_eq!(
            verdict_of_ours(None, StockExpectation::Reference, Outcome::Fail),
            Verdict::Fail
        );
        assert_eq!(
            verdict_of_ours(None, StockExpectation::NotRun, Outcome::Fail),
            Verdict::Fail
        );
    }

    #[test]
    fn a_defect_must_show_with_stock_and_not_with_ours() {
        use Outcome::{Fail, Pass};
        let rule = |stock, ours| {
            let mut results = Results::default();
            results.add(case(Provider::Stock, StockExpectation::MustFail, stock));
            results.add(case(Provider::Ours, StockExpectation::MustFail, ours));
            let verdicts = results.verdicts();
            (verdicts[0].1, verdicts[1].1)
        };
        assert_eq!(rule(Fail, Pass), (Verdict::Pass, Verdict::Pass));
        assert_eq!(rule(Fail, Fail), (Verdict::Pass, Verdict::Fail));
        assert_eq!(rule(Pass, Pass), (Verdict::Fail, Verdict::Pass));
    }

    #[test]
    fn the_text_shows_failures() {
        let mut results = Results::default();
        results.add(case(
            Provider::Stock,
            StockExpectation::Reference,
            Outcome::Pass,
        ));
        results.add(case(
            Provider::Ours,
            StockExpectation::Reference,
            Outcome::Fail,
        ));
        let text = results.text("trixie");
        assert!(text.contains("FAILED g [ours] n"));
        assert!(text.contains("the driver did not finish"));
    }
}
