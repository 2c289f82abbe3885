//! The results: all tables on the terminal and in the target directory, the
//! summary in docs/performance.md, and JSON.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::json;

use super::measure::{Results, Row, Spread};
use super::{layers, limits};
use crate::driver;

/// The page with the summary tables.
pub(super) const SUMMARY: &str = "docs/performance.md";

/// The lines around rdma_rxe's table on that page.
const BEGIN: &str = "<!-- layers:begin, written by cargo xtask bench --write -->";
const END: &str = "<!-- layers:end -->";

/// Writes all tables of a run to `bench/NAME.md` in the target directory, and prints its
/// path.
pub(super) fn save(name: &str, tables: &str) -> Result<()> {
    let path = driver::target_dir().join(format!("bench/{name}.md"));
    let folder = path.parent().expect("a file of a folder");
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(&path, tables))
        .with_context(|| format!("cannot write {}", path.display()))?;
    println!("all tables: {}", path.display());
    Ok(())
}

/// Formats a time, if times were measured.
pub(super) fn ns(value: f64, timed: bool) -> String {
    if !timed {
        return "-".to_owned();
    }
    format!("{value:.2}")
}

/// Formats a median and its quartiles.
pub(super) fn median_and_quartiles(spread: Spread, timed: bool) -> String {
    if !timed {
        return "-".to_owned();
    }
    format!(
        "{:.2} ({:.2} to {:.2})",
        spread.median, spread.low, spread.high
    )
}

/// Formats a ratio: the median on the page, with its quartiles at the terminal.
pub(super) fn ratio(spread: Spread, timed: bool, page: bool) -> String {
    if page {
        return ns(spread.median, timed);
    }
    median_and_quartiles(spread, timed)
}

/// Formats the quartiles alone.
pub(super) fn quartiles(spread: Spread, timed: bool) -> String {
    if !timed {
        return "-".to_owned();
    }
    format!("{:.2} to {:.2}", spread.low, spread.high)
}

/// Returns a row's cells, one per column.
fn columns(row: &Row, timed: bool) -> Vec<String> {
    let limit = limits::for_row(&row.name);
    vec![
        row.name.clone(),
        ns(row.stock_ns, timed),
        ns(row.ours_ns, timed),
        ns(row.calls_ns, timed && row.calls_ns > 0.0),
        median_and_quartiles(row.ratio, timed),
        quartiles(row.noise, timed),
        limit
            .ratio
            .map_or("-".to_owned(), |limit| format!("{limit:.2}")),
        format!("{:.1}", row.stock_count.instructions),
        format!("{:.1}", row.ours_count.instructions),
        limit
            .instructions
            .map_or("-".to_owned(), |limit| format!("{limit:.0}")),
        format!(
            "{:.2} / {:.2}",
            row.stock_count.locked, row.ours_count.locked
        ),
        verdict(row, timed),
    ]
}

/// Returns whether a row's count and time meet their limits.
fn verdict(row: &Row, timed: bool) -> String {
    let limit = limits::for_row(&row.name);
    if limit.ratio.is_none() && limit.instructions.is_none() {
        return "-".to_owned();
    }
    let count_fails = !limits::exceeded_counts(std::slice::from_ref(row)).is_empty();
    let time_fails = timed && limits::exceeds_time(row);
    match (count_fails, time_fails) {
        (false, false) => "pass".to_owned(),
        (true, false) => "FAIL: count".to_owned(),
        (false, true) => "FAIL: time".to_owned(),
        (true, true) => "FAIL: count, time".to_owned(),
    }
}

const HEADINGS: [&str; 12] = [
    "operation / batch",
    "stock ns",
    "ours ns",
    "calls alone ns",
    "ratio (quartiles)",
    "stock against itself",
    "at most",
    "stock instr.",
    "ours instr.",
    "at most",
    "locked, stock / ours",
    "",
];

/// Returns the cells of a floor, which has one column each: floors have no provider.
fn floor_columns(row: &Row, timed: bool) -> Vec<String> {
    let ns = if timed {
        format!("{:.2}", row.stock_ns)
    } else {
        "-".to_owned()
    };
    vec![
        row.name.trim_start_matches("floor-").to_owned(),
        ns,
        format!("{:.1}", row.stock_count.instructions),
        format!("{:.2}", row.stock_count.locked),
    ]
}

const FLOOR_HEADINGS: [&str; 4] = ["bare C loop", "ns", "instr.", "locked"];

/// Returns a Markdown table with aligned columns.
pub(super) fn markdown(headings: &[&str], rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> = (0..headings.len())
        .map(|i| {
            rows.iter()
                .map(|row| row[i].chars().count())
                .chain([headings[i].chars().count(), 3])
                .max()
                .unwrap_or(3)
        })
        .collect();
    let line = |cells: Vec<&str>| {
        let mut text = String::from("|");
        for (cell, width) in cells.into_iter().zip(&widths) {
            let _ = write!(text, " {cell:<width$} |");
        }
        text.push('\n');
        text
    };
    let mut text = line(headings.to_vec());
    text.push('|');
    for width in &widths {
        let _ = write!(text, "{}|", "-".repeat(width + 2));
    }
    text.push('\n');
    for row in rows {
        text.push_str(&line(row.iter().map(String::as_str).collect()));
    }
    text
}

fn tables(results: &Results) -> String {
    let timed = results.rounds > 0;
    let table = |rows: Vec<&Row>| {
        let cells: Vec<_> = rows.into_iter().map(|row| columns(row, timed)).collect();
        markdown(&HEADINGS, &cells)
    };
    let (single, others): (Vec<_>, Vec<_>) = results
        .rows
        .iter()
        .filter(|row| !row.is_floor())
        .partition(|row| row.name.starts_with("single-"));
    let (several, shared): (Vec<_>, Vec<_>) = others
        .into_iter()
        .partition(|row| row.name.starts_with("several-"));
    let floors: Vec<_> = results
        .rows
        .iter()
        .filter(|row| row.is_floor())
        .map(|row| floor_columns(row, timed))
        .collect();
    let domain = if results.thread_domain {
        ""
    } else {
        " (ours gave no thread domain: its queue pairs here are shared ones)"
    };
    format!(
        "{}; stock is {}, ours {}.\n\n\
         Thread-safe queues, used by one thread as nearly all are:\n\n{}\n\
         Queues owned by one thread by promise{domain}:\n\n{}\n\
         Thread-safe queues that several threads have used:\n\n{}\n\
         Floors:\n\n{}",
        conditions(results),
        results.stock_file,
        results.ours_file,
        table(shared),
        table(single),
        table(several),
        markdown(&FLOOR_HEADINGS, &floors),
    )
}

/// Describes rounds, processor and load.
fn conditions(results: &Results) -> String {
    format!(
        "{} rounds of processes on {}, load average before {}",
        results.rounds, results.processor, results.load
    )
}

/// Returns the summary for the page.
fn summary(results: &Results) -> String {
    format!(
        "{}.\n\n{}",
        conditions(results),
        layers::comparison(&results.layers, results.rounds > 0, true)
    )
}

/// Returns all tables for the terminal.
pub fn terminal(results: &Results) -> String {
    let timed = results.rounds > 0;
    format!(
        "{}\nThe Rust crate:\n\n{}\n{}",
        tables(results),
        layers::comparison(&results.layers, timed, false),
        layers::requirements(&results.layers, timed)
    )
}

/// Replaces the summary on its page below `root`.
pub fn write(root: &Path, results: &Results) -> Result<()> {
    replace_in(&root.join(SUMMARY), BEGIN, END, &summary(results))
}

/// Replaces the text between the lines `begin` and `end` of a page.
pub fn replace_in(page: &Path, begin: &str, end: &str, new: &str) -> Result<()> {
    let text = fs::read_to_string(page).with_context(|| {
        format!(
            "cannot read {}, whose tables are to be replaced",
            page.display()
        )
    })?;
    let text = replace_between(&text, begin, end, new).with_context(|| {
        format!(
            "{} lacks the line {begin} or the line {end}",
            page.display()
        )
    })?;
    fs::write(page, text).with_context(|| format!("cannot write {}", page.display()))
}

fn replace_between(old: &str, begin: &str, end: &str, new: &str) -> Option<String> {
    let (before, rest) = old.split_once(begin)?;
    let (_, after) = rest.split_once(end)?;
    Some(format!("{before}{begin}\n\n{new}\n{end}{after}"))
}

/// Returns the results as a JSON object. Without rounds, times are null.
pub fn json(results: &Results) -> String {
    let timed = |value: f64| (results.rounds > 0).then_some(value);
    let quartiles = |spread: Spread| [timed(spread.low), timed(spread.high)];
    let row = |row: &Row| {
        let limit = limits::for_row(&row.name);
        json!({
            "row": row.name,
            "stock_ns": timed(row.stock_ns),
            "ours_ns": timed(row.ours_ns),
            "ratio": timed(row.ratio.median),
            "ratio_quartiles": quartiles(row.ratio),
            "noise_quartiles": quartiles(row.noise),
            "ratio_limit": limit.ratio,
            "stock_instructions": row.stock_count.instructions,
            "ours_instructions": row.ours_count.instructions,
            "instructions_limit": limit.instructions,
            "stock_locked": row.stock_count.locked,
            "ours_locked": row.ours_count.locked,
            "stock_fences": row.stock_count.fences,
            "ours_fences": row.ours_count.fences,
        })
    };
    let layer = |layer: &layers::Layer| {
        json!({
            "ns": timed(layer.ns),
            "ratio": timed(layer.ratio.median),
            "ratio_quartiles": quartiles(layer.ratio),
            "instructions": layer.count.instructions,
            "locked": layer.count.locked,
            "fences": layer.count.fences,
        })
    };
    let operation = |it: &layers::Operation| json!({"row": it.name, "raw": layer(&it.raw), "safe": layer(&it.safe)});
    let whole = json!({
        "processor": results.processor,
        "load": results.load,
        "stock": results.stock_file,
        "ours": results.ours_file,
        "thread_domain": results.thread_domain,
        "rounds": results.rounds,
        "rows": results.rows.iter().map(row).collect::<Vec<_>>(),
        "layers": results.layers.iter().map(operation).collect::<Vec<_>>(),
    });
    format!("{whole:#}\n")
}

/// Returns whether a page of the repository has the lines around its tables.
#[cfg(test)]
pub fn has_markers(page: &str, begin: &str, end: &str) -> bool {
    let text = fs::read_to_string(crate::driver::root().join(page)).unwrap();
    replace_between(&text, begin, end, "").is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::measure::{Count, Spread};

    #[test]
    fn the_pages_have_the_markers() {
        assert!(has_markers(SUMMARY, BEGIN, END));
    }

    #[test]
    fn only_text_between_the_markers_changes() {
        let old = format!("above\n{BEGIN}\nold\n{END}\nbelow\n");
        let new = replace_between(&old, BEGIN, END, "new").unwrap();
        assert_eq!(new, format!("above\n{BEGIN}\n\nnew\n{END}\nbelow\n"));
        assert_eq!(replace_between("no markers", BEGIN, END, "new"), None);
    }

    #[test]
    fn a_time_above_its_limit_fails() {
        let mut row = Row {
            name: "recv/1".to_owned(),
            ratio: Spread {
                low: 0.5,
                median: 0.56,
                high: 0.6,
            },
            ours_ns: 4.0,
            ours_count: Count::default(),
            ..Row::default()
        };
        assert_eq!(verdict(&row, true), "FAIL: time");
        assert_eq!(verdict(&row, false), "pass");
        row.ratio.median = 0.55;
        assert_eq!(verdict(&row, true), "pass");
        row.ours_count.fences = 1.0;
        assert_eq!(verdict(&row, true), "FAIL: count");
    }

    #[test]
    fn json_has_null_for_what_was_not_measured() {
        let row = Row {
            name: "recv/1".to_owned(),
            ours_ns: 4.0,
            ..Row::default()
        };
        let mut results = Results {
            rows: vec![row],
            ..Results::default()
        };
        let ours = |results: &Results| {
            let report: serde_json::Value = serde_json::from_str(&json(results)).unwrap();
            report["rows"][0]["ours_ns"].clone()
        };
        assert_eq!(ours(&results), serde_json::Value::Null);
        results.rounds = 1;
        assert_eq!(ours(&results), 4.0);
    }
}
