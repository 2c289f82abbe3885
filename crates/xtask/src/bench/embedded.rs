//! Measures the embedded device: `ringverbs perf` in one process, and between two.

use std::fmt::Write as _;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{embedded_writes, report};
use crate::driver;

const BEGIN: &str =
    "<!-- embedded:begin, written by cargo xtask bench --device embedded --write -->";
const END: &str = "<!-- embedded:end -->";
/// Sizes of messages, and the number of messages of each size.
const SIZES: &str = "8..65536";
const COUNT: &str = "5000";
/// Time limit for a server to listen.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(10);

/// The figures of a size: latency in microseconds (median and 99th percentile), messages
/// per second.
struct Row {
    size: u64,
    p50: f64,
    p99: f64,
    rate: f64,
}

struct Curve {
    name: &'static str,
    colour: &'static str,
    rows: Vec<Row>,
}

/// Measures and prints the table; with `write`, writes it into docs/.
pub fn bench(write: bool) -> Result<()> {
    let command = build(&["-p", "ringverbs-cli"])?.join("ringverbs");
    let writes = embedded_writes::measure()?;
    eprintln!("sends of {SIZES} bytes, in one process, then between two");
    let curves = [
        Curve {
            name: "one process",
            colour: "#4a7fb5",
            rows: rows(&measure(&command, "embedded", &[])?)?,
        },
        Curve {
            name: "two processes",
            colour: "#c33",
            rows: measure_between_processes(&command)?,
        },
    ];
    let between_two = |size| {
        let row = curves[1].rows.iter().find(|row| row.size == size);
        row.map(|row| (row.p50, row.rate))
    };
    let hosts = embedded_writes::hosts_table(&writes).unwrap_or_default();
    let writes = embedded_writes::table(&writes, between_two(64), between_two(65536));
    let table = format!("{writes}\n{}\n{hosts}", table(&curves));
    println!("{table}");
    if write {
        let root = driver::root();
        report::replace_in(&root.join(report::SUMMARY), BEGIN, END, &table)?;
        fs::write(root.join("docs/embedded.svg"), svg(&curves))?;
    }
    Ok(())
}

/// Builds as the README does; returns the folder of the programs.
pub fn build(what: &[&str]) -> Result<PathBuf> {
    let target = driver::target_dir();
    let status = Command::new(driver::cargo())
        .current_dir(driver::root())
        .args(["build", "--quiet", "--release"])
        .args(what)
        .arg("--target-dir")
        .arg(&target)
        .status()
        .context("cannot run cargo")?;
    ensure!(status.success(), "{what:?} does not build");
    Ok(target.join("release"))
}

/// Measures all sizes; `server` are the arguments that name the server.
fn measure(command: &Path, device: &str, server: &[&str]) -> Result<Value> {
    let output = Command::new(command)
        .args(["perf", "--op", "send", "--sizes", SIZES, "-n", COUNT])
        .args(["--json", "--device", device])
        .args(server)
        .stderr(Stdio::piped())
        .output()
        .context("cannot run the command")?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ringverbs perf: {stderr}");
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn rows(report: &Value) -> Result<Vec<Row>> {
    let number = |value: &Value| value.as_f64().context("no number in the report");
    let rows = report["rows"].as_array().context("no rows in the report")?;
    let row = |row: &Value| {
        Ok(Row {
            size: number(&row["size"])? as u64,
            p50: number(&row["latency_ns"]["p50"])? * 1e-3,
            p99: number(&row["latency_ns"]["p99"])? * 1e-3,
            rate: number(&row["bandwidth"]["messages_per_second"])?,
        })
    };
    rows.iter().map(row).collect()
}

/// A directory shared by two devices, removed on drop.
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("ringverbs-bench-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    /// Returns the name of a device in the directory.
    pub fn device(&self) -> String {
        format!("embedded:{}", self.0.display())
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns an unused TCP port of this host.
pub fn free_port() -> Result<String> {
    let free = TcpListener::bind(("127.0.0.1", 0))?;
    Ok(free.local_addr()?.port().to_string())
}

/// A server, killed on drop.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // The server has exited unless there was an error.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Measures all sizes between two processes.
fn measure_between_processes(command: &Path) -> Result<Vec<Row>> {
    let (directory, port) = (Directory::new(), free_port()?);
    let device = directory.device();
    let server = Command::new(command)
        .args(["perf", "--server", "--port", &port, "--device", &device])
        .spawn()
        .context("cannot run the command")?;
    let _server = Server(server);
    let client = || measure(command, &device, &["--port", &port, "127.0.0.1"]);
    rows(&when_listening(client)?)
}

/// Repeats a client until its server listens.
pub fn when_listening<T>(client: impl Fn() -> Result<T>) -> Result<T> {
    let end = Instant::now() + LISTEN_TIMEOUT;
    loop {
        match client() {
            Err(error) if error.to_string().contains("connecting to") && Instant::now() < end => {
                sleep(Duration::from_millis(20));
            }
            result => return result,
        }
    }
}

pub fn load() -> String {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().unwrap_or("unknown").to_owned()
}

fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let model = lines.find(|(key, _)| key.trim() == "model name");
    model.map_or_else(
        || "an unknown processor".into(),
        |(_, name)| name.trim().into(),
    )
}

fn table(curves: &[Curve; 2]) -> String {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let [one, two] = curves;
    let rows: Vec<Vec<String>> = (one.rows.iter().zip(&two.rows))
        .map(|(one, two)| {
            let cells = |row: &Row| {
                let latency = format!("{:.1} ({:.0})", row.p50, row.p99);
                [latency, format!("{:.0}", row.rate)]
            };
            let size = [one.size.to_string()];
            size.into_iter()
                .chain(cells(one))
                .chain(cells(two))
                .collect()
        })
        .collect();
    format!(
        "{COUNT} sends of each size, {processors} processors ({}), load average {} afterwards.\n\n{}",
        processor(),
        load(),
        report::markdown(&HEADINGS, &rows)
    )
}

const HEADINGS: [&str; 5] = [
    "bytes",
    "one process, µs p50 (p99)",
    "messages/s",
    "two processes, µs p50 (p99)",
    "messages/s",
];

const WIDTH: f64 = 330.0;
const HEIGHT: f64 = 220.0;
const TOP: f64 = 56.0;

/// Returns two charts with logarithmic axes.
fn svg(curves: &[Curve; 2]) -> String {
    let mut text = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"900\" height=\"330\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n",
    );
    let (time, rate) = ("one way, microseconds (median)", "messages in a second");
    chart(&mut text, 70.0, time, curves, |row| row.p50);
    chart(&mut text, 520.0, rate, curves, |row| row.rate);
    for (at, curve) in (0u8..).zip(curves) {
        let x = 70.0 + f64::from(at) * 140.0;
        let _ = writeln!(
            text,
            "<line x1=\"{x}\" y1=\"14\" x2=\"{}\" y2=\"14\" stroke=\"{}\" stroke-width=\"2\"/>\
             <text x=\"{}\" y=\"18\">{}</text>",
            x + 20.0,
            curve.colour,
            x + 26.0,
            curve.name
        );
    }
    text.push_str("</svg>\n");
    text
}

fn chart(
    text: &mut String,
    left: f64,
    title: &str,
    curves: &[Curve; 2],
    figure: impl Fn(&Row) -> f64,
) {
    let rows = || curves.iter().flat_map(|curve| &curve.rows);
    let decade = |value: f64| value.max(1e-9).log10();
    let low = rows()
        .map(|row| decade(figure(row)))
        .fold(f64::MAX, f64::min)
        .floor();
    let high = rows()
        .map(|row| decade(figure(row)))
        .fold(f64::MIN, f64::max)
        .ceil();
    let high = high.max(low + 1.0);
    let power = |row: &Row| (row.size.max(1) as f64).log2();
    let (first, last) = rows()
        .map(power)
        .fold((f64::MAX, f64::MIN), |(low, high), at| {
            (low.min(at), high.max(at))
        });
    let x = |at: f64| left + WIDTH * (at - first) / (last - first).max(1.0);
    let y = |at: f64| TOP + HEIGHT * (high - at) / (high - low);
    let _ = writeln!(
        text,
        "<text x=\"{left}\" y=\"{}\" font-size=\"13\">{title}</text>",
        TOP - 14.0
    );
    let mut at = low;
    while at <= high {
        let _ = writeln!(
            text,
            "<line x1=\"{left}\" y1=\"{0:.1}\" x2=\"{1}\" y2=\"{0:.1}\" stroke=\"#ddd\"/>\
             <text x=\"{2}\" y=\"{3:.1}\" text-anchor=\"end\" fill=\"#666\">{4}</text>",
            y(at),
            left + WIDTH,
            left - 6.0,
            y(at) + 4.0,
            10f64.powf(at)
        );
        at += 1.0;
    }
    let mut at = first;
    while at <= last {
        let _ = writeln!(
            text,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#666\">{}</text>",
            x(at),
            TOP + HEIGHT + 18.0,
            2f64.powf(at)
        );
        at += 3.0;
    }
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">bytes</text>",
        left + WIDTH / 2.0,
        TOP + HEIGHT + 36.0
    );
    for curve in curves {
        let points: Vec<String> = curve
            .rows
            .iter()
            .map(|row| format!("{:.1},{:.1}", x(power(row)), y(decade(figure(row)))))
            .collect();
        let _ = writeln!(
            text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>",
            points.join(" "),
            curve.colour
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_markers() {
        assert!(report::has_markers(report::SUMMARY, BEGIN, END));
    }

    fn curve(name: &'static str, factor: f64) -> Curve {
        let row = |power: u32| Row {
            size: 1 << power,
            p50: factor * f64::from(power),
            p99: factor * 100.0,
            rate: 1e6 / factor,
        };
        Curve {
            name,
            colour: "#000",
            rows: (3..=16).map(row).collect(),
        }
    }

    #[test]
    fn report_rows_are_parsed_and_malformed_ones_refused() {
        let report = serde_json::json!({"rows": [{
            "size": 8, "latency_ns": {"p50": 1500, "p99": 3000},
            "bandwidth": {"messages_per_second": 5e5}
        }]});
        let rows = rows(&report).unwrap();
        assert_eq!((rows[0].size, rows[0].p50, rows[0].rate), (8, 1.5, 5e5));
        for wrong in [
            serde_json::json!({}),
            serde_json::json!({"rows": [{"size": 8}]}),
        ] {
            assert!(super::rows(&wrong).is_err());
        }
    }

    #[test]
    fn both_curves_are_in_the_table_and_in_both_charts() {
        let curves = [curve("one", 1.0), curve("two", 2.0)];
        assert_eq!(
            table(&curves)
                .lines()
                .filter(|line| line.starts_with("| "))
                .count(),
            15
        );
        let picture = svg(&curves);
        assert_eq!(picture.matches("<polyline").count(), 4);
        assert!(!picture.contains("NaN") && !picture.contains("inf"));
    }
}
