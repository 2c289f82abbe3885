//! What a suite's records mean: ours against stock, case by case.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use crate::record::{Case, Outcome, Provider, Record, Stock};

/// The results of one guest.
#[derive(Debug, Default)]
pub struct Results {
    /// The kernel's release.
    pub kernel: String,
    /// rdma-core's version.
    pub rdma_core: String,
    /// Every case that was run.
    pub cases: Vec<Case>,
    /// What the plugin said when it refused this rdma-core.
    pub refused: Option<String>,
    /// The providers mapped in processes of ours, by case.
    pub proofs: Vec<(String, Vec<String>)>,
    /// Records that could not be read: what they say is lost.
    pub unreadable: usize,
    /// Whether the driver came to its end.
    pub complete: bool,
    /// How long each part of the run took: preparations, and the cases of a
    /// group with a provider.
    pub spent: BTreeMap<String, Duration>,
}

/// What one case of ours, or a stock defect's case, amounts to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// As it should be.
    Pass,
    /// Against the rule.
    Fail,
    /// Not run, or failing where stock fails too.
    Skip,
}

/// Said of a case that ours fails where stock does not do it.
const UNLIKE: &str = "fails with ours, skipped with stock";

/// What fails with ours where stock says that it cannot do it at all: group,
/// name, why.
const KNOWN: &[(&str, &str, &str)] = &[(
    "pyverbs",
    "tests.test_mr.MRTest.test_mr_rereg_pd",
    "stock has no rereg_mr; the test expects that a queue pair which is reset takes its \
     completions out of the completion queue, as no provider of rxe does",
)];

/// Said of a case that stock passes and ours refuses.
const REFUSAL: &str = "refused by ours: ";

/// What stock does with a ConnectX and ours says that it does not.
struct Refused {
    group: &'static str,
    /// What the name begins with.
    name: &'static str,
    /// What it says then, one of these: whatever else is wrong with such a case
    /// is no refusal.
    said: &'static [&'static str],
    why: &'static str,
}

const REFUSED: &[Refused] = &[Refused {
    group: "pyverbs",
    name: "tests.test_mlx5_dr.",
    said: &["DrDomain creation failed", "DrActionQp creation failed"],
    why: "direct rules",
}];

/// Why ours refuses a case that has said `detail`; `None` if it is no refusal.
pub fn refusal(group: &str, name: &str, detail: &str) -> Option<&'static str> {
    REFUSED
        .iter()
        .find(|refused| {
            refused.group == group
                && name.starts_with(refused.name)
                && refused.said.iter().any(|said| detail.contains(said))
        })
        .map(|refused| refused.why)
}

fn refused(case: &Case) -> Option<&'static str> {
    refusal(&case.group, &case.name, &case.detail)
}

fn known(case: &Case) -> Option<&'static str> {
    KNOWN
        .iter()
        .find(|(group, name, _)| (*group, *name) == (&case.group, &case.name))
        .map(|(_, _, why)| *why)
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
    /// Takes in a record.
    pub fn take(&mut self, record: Record) {
        match record {
            Record::Environment { kernel, rdma_core } => {
                self.kernel = kernel;
                self.rdma_core = rdma_core;
            }
            Record::Case(case) => self.cases.push(case),
            Record::Refused { line } => self.refused = Some(line),
            Record::Proof { case, maps } => self.proofs.push((case, maps)),
            Record::End => self.complete = true,
        }
    }

    /// Adds to the time of a part of the run.
    pub fn spend(&mut self, part: &str, time: Duration) {
        *self.spent.entry(part.to_owned()).or_default() += time;
    }

    /// How stock did on a case; `None` where it was not asked.
    fn stock(&self, case: &Case) -> Option<Outcome> {
        self.cases
            .iter()
            .find(|c| c.provider == Provider::Stock && c.group == case.group && c.name == case.name)
            .map(|c| c.outcome)
    }

    /// Every case under the rule, with the reason where it is broken:
    ///
    /// - Ours, and ours mixed with stock, must pass what stock passes.
    /// - Ours must pass what stock is not asked, and what shows a defect of
    ///   stock's.
    /// - Stock must fail what shows its defect: else the case shows nothing.
    /// - What stock fails is listed, and nothing is asked of ours.
    /// - What stock skips ours must skip or pass, but for what is known.
    /// - What ours refuses, and stock does, is listed.
    pub fn verdicts(&self) -> Vec<(&Case, Verdict, String)> {
        self.cases
            .iter()
            .map(|case| {
                let (verdict, why) = self.verdict(case);
                (case, verdict, why)
            })
            .collect()
    }

    fn verdict(&self, case: &Case) -> (Verdict, String) {
        use Outcome::{Fail, Pass, Skip};
        match (case.provider, case.stock, case.outcome) {
            (Provider::Stock, Stock::MustFail, Fail) => (Verdict::Pass, "the defect shows".into()),
            (Provider::Stock, Stock::MustFail, Pass) => (
                Verdict::Fail,
                "stock passes a case that is to show its defect".into(),
            ),
            (Provider::Stock, Stock::FailsSoFar, Fail) => {
                (Verdict::Pass, "the defect shows".into())
            }
            (Provider::Stock, Stock::FailsSoFar, Pass) => {
                (Verdict::Skip, "stock no longer fails".into())
            }
            (Provider::Stock, _, Pass) => (Verdict::Pass, String::new()),
            (Provider::Stock, _, Fail) => (Verdict::Skip, format!("stock fails: {}", case.detail)),
            (_, _, Pass) => (Verdict::Pass, String::new()),
            (_, Stock::Reference, Fail) => match self.stock(case) {
                Some(Pass) => match refused(case) {
                    Some(why) => (Verdict::Skip, format!("{REFUSAL}{why}")),
                    None => (Verdict::Fail, format!("stock passes; {}", case.detail)),
                },
                Some(Skip) => match known(case) {
                    Some(why) => (Verdict::Skip, format!("{UNLIKE}; known: {why}")),
                    None => (Verdict::Fail, format!("{UNLIKE}: {}", case.detail)),
                },
                Some(_) => (Verdict::Skip, "fails with stock too".into()),
                None => (Verdict::Fail, format!("no run with stock; {}", case.detail)),
            },
            (_, Stock::NotRun | Stock::MustFail | Stock::FailsSoFar, Fail) => {
                (Verdict::Fail, case.detail.clone())
            }
            (Provider::Stock, _, Skip) => (Verdict::Skip, case.detail.clone()),
            (_, _, Skip) => match self.stock(case) {
                Some(Pass) => match refused(case) {
                    Some(why) => (Verdict::Skip, format!("{REFUSAL}{why}")),
                    None => (
                        Verdict::Fail,
                        format!("skipped, but stock passes: {}", case.detail),
                    ),
                },
                _ => (Verdict::Skip, case.detail.clone()),
            },
        }
    }

    /// Whether rdma-core's own tests could not be had.
    pub fn without_pyverbs(&self) -> bool {
        self.cases
            .iter()
            .any(|case| case.group == "pyverbs" && case.attempts == 0)
    }

    /// What passed, but not at once.
    pub fn repeated(&self) -> Vec<&Case> {
        let late = |case: &&Case| case.outcome == Outcome::Pass && case.attempts > 1;
        self.cases.iter().filter(late).collect()
    }

    /// How many of stock's verdicts an earlier run has shown.
    pub fn cached(&self) -> usize {
        self.cases.iter().filter(|case| case.cached).count()
    }

    /// A line of each of those that passed late.
    pub fn repeated_text(&self) -> String {
        let mut out = String::new();
        for case in self.repeated() {
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

    /// Counts by group and provider, of outcomes as they are.
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

    /// The results as text: a table of counts, what breaks the rule, what
    /// stock fails.
    pub fn text(&self, suite: &str) -> String {
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{suite}: kernel {}, rdma-core {}",
            self.kernel, self.rdma_core
        );
        if let Some(line) = &self.refused {
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
        for (case, verdict, why) in self.verdicts() {
            if verdict == Verdict::Skip && why.starts_with(REFUSAL) {
                let module = case.name.strip_prefix("tests.").unwrap_or(&case.name);
                let module = module.split('.').next().unwrap_or(module);
                *refused.entry(why).or_default().entry(module).or_default() += 1;
                continue;
            }
            let line = format!(
                "{} [{}] {} {}",
                case.group,
                case.provider,
                case.name,
                why.replace('\n', " / ")
            );
            match (verdict, case.provider, case.outcome) {
                (Verdict::Fail, ..) => {
                    let _ = writeln!(out, "  FAILED {line}");
                }
                (Verdict::Skip, Provider::Stock, Outcome::Fail) => {
                    let _ = writeln!(out, "  listed {line}");
                }
                (Verdict::Skip, _, Outcome::Fail) if self.stock(case) == Some(Outcome::Skip) => {
                    let _ = writeln!(out, "  listed {line}");
                }
                (Verdict::Skip, Provider::Stock, Outcome::Pass) => {
                    let _ = writeln!(out, "  note {line}");
                }
                // Most of rdma-core's own tests are for other devices, and
                // skipped with stock as well.
                (_, _, Outcome::Skip)
                    if !case.name.starts_with("tests.")
                        || case.provider != Provider::Stock
                            && self.stock(case) != Some(Outcome::Skip) =>
                {
                    let _ = writeln!(out, "  skipped {line}");
                }
                _ if case.group == "rates" => {
                    let _ = writeln!(out, "  {} {}", case.name, case.detail);
                }
                _ => {}
            }
        }
        for (why, modules) in refused {
            let count: usize = modules.values().sum();
            let modules: Vec<_> = modules.iter().map(|(m, n)| format!("{m} {n}")).collect();
            let _ = writeln!(
                out,
                "  {count} of what stock passes, {why} ({})",
                modules.join(", ")
            );
        }
        out.push_str(&self.repeated_text());
        if self.unreadable > 0 {
            let _ = writeln!(out, "  FAILED: {} unreadable records", self.unreadable);
        }
        if !self.complete {
            let _ = writeln!(out, "  FAILED: the driver did not come to its end");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(provider: Provider, stock: Stock, outcome: Outcome) -> Record {
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

    fn verdict_of_ours(stock: Option<Outcome>, kind: Stock, ours: Outcome) -> Verdict {
        let mut results = Results::default();
        if let Some(stock) = stock {
            results.take(case(Provider::Stock, kind, stock));
        }
        results.take(case(Provider::Ours, kind, ours));
        results.verdicts().pop().unwrap().1
    }

    #[test]
    fn plugin_must_pass_what_stock_passes() {
        use Outcome::{Fail, Pass, Skip};
        let rule = |stock, ours| verdict_of_ours(Some(stock), Stock::Reference, ours);
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
            let Record::Case(mut case) = case(provider, Stock::Reference, outcome) else {
                unreachable!()
            };
            results.take(Record::Case(case.clone()));
            (case.group, case.name) = (KNOWN[0].0.into(), KNOWN[0].1.into());
            results.take(Record::Case(case));
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
            let Record::Case(mut case) = case(provider, Stock::Reference, outcome) else {
                unreachable!()
            };
            (case.group, case.name) = ("pyverbs".into(), format!("{}x", REFUSED[0].name));
            case.detail = format!("no {}", REFUSED[0].said[0]);
            results.take(Record::Case(case.clone()));
            // The same case, with something else wrong.
            case.provider = Provider::OursServer;
            case.detail = "a wrong byte".into();
            if outcome == Outcome::Fail {
                results.take(Record::Case(case));
            }
        }
        let verdicts: Vec<_> = results.verdicts().iter().map(|v| v.1).collect();
        use Verdict::{Fail, Pass, Skip};
        assert_eq!(verdicts, [Pass, Skip, Skip, Fail]);
        let text = results.text("trixie");
        assert!(
            text.contains("2 of what stock passes, refused by ours: direct rules (test_mlx5_dr 2)"),
            "{text}"
        );
    }

    #[test]
    fn refusal_is_recognised_by_its_message() {
        let said = |name, said| refusal("pyverbs", name, said).is_some();
        let rules = "tests.test_mlx5_dr.Mlx5DrTest.test_root_tbl_qp_rule";
        let detail = "DrActionQp creation failed.. Errno: 95, Operation not supported";
        assert!(said(rules, detail));
        assert!(!said(rules, "DrMatcher creation failed."));
        assert!(!said("tests.test_qp.QPTest.test_create_raw_qp_ex", detail));
        assert!(refusal("perftest", rules, detail).is_none());
    }

    #[test]
    fn late_passes_are_listed() {
        let mut results = Results::default();
        let Record::Case(mut late) = case(Provider::Ours, Stock::NotRun, Outcome::Pass) else {
            unreachable!()
        };
        (late.attempts, late.earlier) = (2, "too slow".into());
        results.take(Record::Case(late));
        results.take(case(Provider::Native, Stock::NotRun, Outcome::Pass));
        assert_eq!(results.repeated().len(), 1);
        let text = results.text("trixie");
        assert!(text.contains("passed at attempt 2: g [ours] n; the first: too slow"));
    }

    #[test]
    fn a_result_without_its_reference_is_a_failure() {
        assert_eq!(
            verdict_of_ours(None, Stock::Reference, Outcome::Fail),
            Verdict::Fail
        );
        assert_eq!(
            verdict_of_ours(None, Stock::NotRun, Outcome::Fail),
            Verdict::Fail
        );
    }

    #[test]
    fn a_defect_must_show_with_stock_and_not_with_ours() {
        use Outcome::{Fail, Pass};
        let rule = |stock, ours| {
            let mut results = Results::default();
            results.take(case(Provider::Stock, Stock::MustFail, stock));
            results.take(case(Provider::Ours, Stock::MustFail, ours));
            let verdicts = results.verdicts();
            (verdicts[0].1, verdicts[1].1)
        };
        assert_eq!(rule(Fail, Pass), (Verdict::Pass, Verdict::Pass));
        assert_eq!(rule(Fail, Fail), (Verdict::Pass, Verdict::Fail));
        assert_eq!(rule(Pass, Pass), (Verdict::Fail, Verdict::Pass));
    }

    #[test]
    fn the_text_shows_what_failed_and_what_stock_fails() {
        let mut results = Results::default();
        results.take(case(Provider::Stock, Stock::Reference, Outcome::Pass));
        results.take(case(Provider::Ours, Stock::Reference, Outcome::Fail));
        let text = results.text("trixie");
        assert!(text.contains("FAILED g [ours] n"));
        assert!(text.contains("did not come to its end"));
    }
}
