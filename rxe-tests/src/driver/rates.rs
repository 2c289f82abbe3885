//! Compares perftest's rates of ours with those of stock, in one boot.
//!
//! rxe does its work in the kernel, so ours cannot gain here, but must not lose. Runs
//! alternate, and the spread of stock's runs is the tolerance: the median of ours may not
//! be worse than the worst of them.

use anyhow::Result;

use super::case::{Case, Figures, ReadyCheck, Shape};
use super::run::Runner;
use crate::record::{self, Outcome, Provider, Record, StockExpectation};

/// The group of these cases.
pub const GROUP: &str = "rates";

/// Runs of each provider.
const ROUNDS: usize = 3;

/// Attempts of a comparison before it fails.
const ATTEMPTS: u32 = 3;

/// Tool and options, the compared figure, and whether higher is better.
const LIST: &[(&str, &str, bool)] = &[
    ("send_bw -n 1000 -s 4096", "MB/s", true),
    ("write_bw -n 1000 -s 4096", "MB/s", true),
    ("read_bw -n 1000 -s 4096", "MB/s", true),
    ("send_lat -n 300 -s 64 -I 0", "typical us", false),
    ("write_lat -n 300 -s 64 -I 64", "typical us", false),
    ("read_lat -n 300 -s 64", "typical us", false),
    ("atomic_lat -n 300", "typical us", false),
];

/// Compares the rates whose names `wanted` accepts, and reports them.
pub fn run(runner: &mut Runner, wanted: impl Fn(&str) -> bool) -> Result<()> {
    for &(options, figure, higher_is_better) in LIST {
        if wanted(&format!("{GROUP} {options}")) {
            compare(runner, options, figure, higher_is_better)?;
        }
    }
    Ok(())
}

fn compare(runner: &mut Runner, options: &str, figure: &str, higher_is_better: bool) -> Result<()> {
    let command = format!("ib_{options} -d {{dev}} -x {{gid}} -p {{port}} -F");
    let shape = Shape::Pair {
        client: format!("{command} {{addr}}"),
        server: command,
        ready: ReadyCheck::Tcp,
    };
    let case = Case::new(GROUP, options, shape).figures(if higher_is_better {
        Figures::Bandwidth
    } else {
        Figures::Latency
    });
    let mut result = record::Case {
        group: GROUP.into(),
        name: format!("{options} ({figure})"),
        provider: Provider::Ours,
        outcome: Outcome::Fail,
        stock: StockExpectation::NotRun,
        attempts: 0,
        seconds: 0.0,
        detail: String::new(),
        earlier: String::new(),
        figures: [].into(),
        cached: false,
    };
    while result.outcome == Outcome::Fail && result.attempts < ATTEMPTS {
        result.attempts += 1;
        if result.attempts == 2 {
            result.earlier = std::mem::take(&mut result.detail);
        }
        let (mut stock, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            for (provider, values) in [(Provider::Stock, &mut stock), (Provider::Ours, &mut ours)] {
                match runner.measure(&case, provider)? {
                    // perftest prints `inf` if it cannot calibrate its clock.
                    Ok(figures) => match figures.get(figure) {
                        Some(value) if value.is_finite() => values.push(*value),
                        other => result.detail = format!("{provider}: {figure} is {other:?}"),
                    },
                    Err(reason) => result.detail = format!("{provider}: {reason}"),
                }
            }
        }
        if stock.len() < ROUNDS || ours.len() < ROUNDS {
            continue;
        }
        let comparison = compare_medians(&mut stock, &mut ours, higher_is_better);
        result.outcome = if comparison.is_good {
            Outcome::Pass
        } else {
            Outcome::Fail
        };
        result.detail = format!(
            "ours {:.2}, stock {:.2} ({:.2} to {:.2}) {figure}",
            comparison.ours,
            comparison.stock,
            stock[0],
            stock[ROUNDS - 1]
        );
        result.figures = [
            ("ours".to_owned(), comparison.ours),
            ("stock".to_owned(), comparison.stock),
            ("stock min".to_owned(), stock[0]),
            ("stock max".to_owned(), stock[ROUNDS - 1]),
        ]
        .into();
    }
    runner.report.write(&Record::Case(result))
}

/// The medians, and whether that of ours is good enough.
struct Comparison {
    ours: f64,
    stock: f64,
    is_good: bool,
}

/// Sorts both. Ours is good if its median is no worse than the worst run of stock.
fn compare_medians(stock: &mut [f64], ours: &mut [f64], higher_is_better: bool) -> Comparison {
    stock.sort_by(f64::total_cmp);
    ours.sort_by(f64::total_cmp);
    let median = |values: &[f64]| values.get(values.len() / 2).copied().unwrap_or(f64::NAN);
    let worst = if higher_is_better {
        stock.first()
    } else {
        stock.last()
    };
    let worst = worst.copied().unwrap_or(f64::NAN);
    let (ours, stock) = (median(ours), median(stock));
    Comparison {
        ours,
        stock,
        is_good: if higher_is_better {
            ours >= worst
        } else {
            ours <= worst
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_within_the_spread_of_stock_pass() {
        let mut stock = [100.0, 90.0, 110.0, 105.0, 95.0];
        let mut good = |ours: [f64; 5], higher_is_better| {
            compare_medians(&mut stock, &mut ours.clone(), higher_is_better).is_good
        };
        assert!(good([91.0; 5], true));
        assert!(!good([89.0; 5], true));
        assert!(good([109.0; 5], false));
        assert!(!good([111.0; 5], false));
        // One bad run of ours does not decide.
        assert!(good([10.0, 100.0, 100.0, 100.0, 100.0], true));
    }
}
