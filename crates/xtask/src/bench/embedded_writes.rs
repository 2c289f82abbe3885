//! Compares the embedded device with memcpy and UDP sockets: RDMA writes in one process,
//! in processor time (`figures` of `crates/embedded/benches/rate.rs`), sends between two,
//! and both between hosts (`crates/cli/benches/hosts.rs`).

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::report::markdown;
use crate::driver;

/// A figure of the device and its reference. In one process: operations, and copies of the
/// same size, per second of processor time. Between hosts: bytes per second, or seconds, of
/// the device and of UDP sockets.
pub struct Figure {
    name: String,
    rate: f64,
    reference: f64,
}

/// Runs the benches, and prints their figures. Those between hosts need the right to
/// create network namespaces.
pub fn measure() -> Result<Vec<Figure>> {
    let mut figures = figures_of("ringverbs-embedded", "rate")?;
    figures.extend(figures_of("ringverbs-cli", "hosts")?);
    Ok(figures)
}

fn figures_of(package: &str, name: &str) -> Result<Vec<Figure>> {
    let bench = driver::build_bench(package, name)?;
    let mut child = Command::new(bench)
        .arg("figures")
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run the bench")?;
    let output = child.stdout.take().context("the bench has no output")?;
    let mut figures = Vec::new();
    for line in BufReader::new(output).lines() {
        let line = line?;
        eprintln!("{line}");
        if !line.starts_with("skipped: ") {
            figures.push(figure(&line).context("the bench printed something else")?);
        }
    }
    ensure!(child.wait()?.success(), "the bench failed");
    Ok(figures)
}

fn figure(line: &str) -> Option<Figure> {
    let mut words = line.split(' ');
    let figure = Figure {
        name: words.next()?.to_owned(),
        rate: words.next()?.parse().ok()?,
        reference: words.next()?.parse().ok()?,
    };
    words.next().is_none().then_some(figure)
}

/// Returns the table. `latency` and `bulk` are the median in microseconds and the messages
/// per second of 64 bytes and of 64 KiB between two processes.
pub fn table(figures: &[Figure], latency: Option<(f64, f64)>, bulk: Option<(f64, f64)>) -> String {
    let find = |name: &str| figures.iter().find(|figure| figure.name == name);
    let mut rows = Vec::new();
    let mut row = |what: &str, measured: String, reference: Option<(f64, f64)>| {
        let (copy, share) = reference.map_or_else(Default::default, |(rate, share)| {
            (format!("{rate:.1} GB/s"), format!("{share:.2}"))
        });
        rows.push(vec![what.to_owned(), measured, copy, share]);
    };
    let gigabytes = |rate: f64, size: f64| rate * size / 1e9;
    if let Some(small) = find("write-64") {
        let rate = format!("{:.2} million a second", small.rate / 1e6);
        row("one process, writes of 64 bytes", rate, None);
        if let Some(many) = find("write-64-many") {
            let times = small.rate / many.rate;
            let rate = format!("{:.2} million a second", many.rate / 1e6);
            let what = format!("the same on 1,000 queue pairs: {times:.2} times the cost");
            row(&what, rate, None);
        }
    }
    for (name, size, what) in [
        ("write-4096", 4096.0, "4 KiB"),
        ("write-65536", 65536.0, "64 KiB"),
    ] {
        if let Some(figure) = find(name) {
            let rate = format!("{:.2} GB/s", gigabytes(figure.rate, size));
            let reference = (
                gigabytes(figure.reference, size),
                figure.rate / figure.reference,
            );
            row(
                &format!("one process, writes of {what}"),
                rate,
                Some(reference),
            );
        }
    }
    if let Some((p50, _)) = latency {
        row(
            "two processes, 64 bytes one way",
            format!("{p50:.1} µs"),
            None,
        );
    }
    if let (Some((_, rate)), Some(copy)) = (bulk, find("copy-65536")) {
        let reference = (gigabytes(copy.rate, 65536.0), rate / copy.rate);
        let rate = format!("{:.2} GB/s", gigabytes(rate, 65536.0));
        row(
            "two processes, sends of 64 KiB to 64 buffers in turns",
            rate,
            Some(reference),
        );
    }
    markdown(&["", "measured", "memcpy of as much", "share"], &rows)
}

/// Returns the table that compares RoCE v2 between hosts with UDP sockets, if measured.
pub fn hosts_table(figures: &[Figure]) -> Option<String> {
    let find = |name: &str| figures.iter().find(|figure| figure.name == name);
    let mut rows = Vec::new();
    let rates = [
        ("hosts-write-65536", "writes"),
        ("hosts-read-65536", "reads"),
    ];
    for (name, what) in rates {
        let Figure {
            rate, reference, ..
        } = find(name)?;
        let [measured, sockets] = [rate, reference].map(|rate| format!("{:.2} GB/s", rate * 1e-9));
        let ratio = format!("{:.2}", rate / reference);
        rows.push(vec![format!("{what} of 64 KiB"), measured, sockets, ratio]);
    }
    let Figure {
        rate, reference, ..
    } = find("hosts-send-64")?;
    let [measured, sockets] = [rate, reference].map(|time| format!("{:.1} µs", time * 1e6));
    let ratio = format!("{:.1}", rate / reference);
    rows.push(vec![
        "64 bytes one way".to_owned(),
        measured,
        sockets,
        ratio,
    ]);
    Some(markdown(
        &["between hosts", "measured", "UDP sockets", "ratio"],
        &rows,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a table without the spaces that align it.
    fn unpadded(table: &str) -> String {
        let words: Vec<&str> = table.split(' ').filter(|word| !word.is_empty()).collect();
        words.join(" ")
    }

    #[test]
    fn figures_are_compared_with_memcpy() {
        let lines = [
            "write-64 2e6 9e7",
            "write-64-many 1e6 9e7",
            "write-65536 1e4 4e4",
            "copy-65536 2e4 4e4",
        ];
        let figures: Vec<Figure> = lines.map(|line| figure(line).unwrap()).into();
        let table = unpadded(&table(&figures, Some((3.5, 1.0)), Some((1.0, 1e4))));
        for part in [
            "2.00 million",
            "2.00 times",
            "0.66 GB/s | 2.6 GB/s | 0.25",
            "3.5 µs",
            "0.50 |",
        ] {
            assert!(table.contains(part), "{part}: {table}");
        }
        assert_eq!(hosts_table(&figures), None);
        let lines = [
            "hosts-write-65536 1e9 2e9",
            "hosts-read-65536 1.5e9 2e9",
            "hosts-send-64 6e-6 2e-6",
        ];
        let hosts = hosts_table(&lines.map(|line| figure(line).unwrap())).unwrap();
        let hosts = unpadded(&hosts);
        assert!(hosts.contains("1.00 GB/s | 2.00 GB/s | 0.50"), "{hosts}");
        assert!(hosts.contains("6.0 µs | 2.0 µs | 3.0"), "{hosts}");
        for wrong in [
            "",
            "write-64",
            "write-64 1",
            "write-64 1 x",
            "write-64 1 2 3",
        ] {
            assert!(figure(wrong).is_none(), "{wrong}");
        }
    }
}
