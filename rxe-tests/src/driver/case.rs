//! A test case: the programs to run, and how their results are judged.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use crate::record::{Provider, StockExpectation};

/// How readiness of a server is detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadyCheck {
    /// A TCP socket listens on the case's port.
    Tcp,
    /// An rdma_cm identifier has the case's port.
    Cm,
    /// An rdma_cm identifier has this port.
    CmPort(u16),
    /// A queue pair of this machine is attached to the multicast group.
    Multicast(Ipv4Addr),
}

/// The programs of a case. In every argument `{dev}`, `{gid}`, `{addr}` and
/// `{port}` stand for the device, its GID index, its address, and a port that
/// no other case uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    /// One program.
    Single(String),
    /// A server and a client; both must exit with status 0.
    Pair {
        /// The server's command line.
        server: String,
        /// The client's.
        client: String,
        /// When to start the client.
        ready: ReadyCheck,
    },
    /// A server that runs until it is killed; the client must exit with status 0.
    Service {
        /// The server's command line.
        server: String,
        /// The client's.
        client: String,
        /// When to start the client.
        ready: ReadyCheck,
    },
}

/// The figures to parse from a program's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Figures {
    /// Nothing.
    None,
    /// `ibv_*_pingpong`: microseconds per exchange.
    PingPong,
    /// perftest's bandwidth table.
    Bandwidth,
    /// perftest's latency table.
    Latency,
}

/// Attempts of a case that depends on timing, the same for every provider: tools that
/// wait forever for a lost datagram, or that meet on a port. Every other case has one
/// attempt: a retry would hide the race that it looks for.
pub const ATTEMPTS: u32 = 3;

/// Returns whether `name` contains one of the filters, or there are none.
pub fn matches_filter(filters: &[String], name: &str) -> bool {
    filters.is_empty() || filters.iter().any(|filter| name.contains(filter))
}

/// A requirement that not every device meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// rdma_rxe: the case creates rxe devices, or reads rdma_rxe's queues.
    Rxe,
    /// An IP address, to connect by rdma_cm.
    Address,
}

impl Need {
    /// Returns the reason for skipping the case on a device without it.
    pub fn missing(self) -> &'static str {
        match self {
            Need::Rxe => "needs rdma_rxe",
            Need::Address => "connects by rdma_cm, and the device has no address",
        }
    }
}

/// A case, the same for every provider.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// The kind of case.
    pub group: &'static str,
    /// Its name in the group.
    pub name: String,
    /// The programs.
    pub shape: Shape,
    /// Time limit of an attempt.
    pub limit: Duration,
    /// Maximum number of attempts: one, unless the case depends on timing.
    pub attempts: u32,
    /// Figures in the client's output.
    pub figures: Figures,
    /// Whether the case is in the short list.
    pub short: bool,
    /// Whether the case also runs with ours on one side and stock on the other.
    pub mixed: bool,
    /// The result expected of stock.
    pub stock: StockExpectation,
    /// The only provider of a case of the Rust crate.
    pub native: Option<Provider>,
    /// A requirement besides a device.
    pub needs: Option<Need>,
    /// Whether ours must print exactly what stock prints.
    pub same_output: bool,
}

impl Case {
    /// Creates a case of one program.
    pub fn single(group: &'static str, name: &str, command: &str) -> Case {
        Case::new(group, name, Shape::Single(command.to_owned()))
    }

    /// Creates a case of the given shape, with the default limit.
    pub fn new(group: &'static str, name: &str, shape: Shape) -> Case {
        Case {
            group,
            name: name.to_owned(),
            shape,
            limit: Duration::from_secs(60),
            attempts: 1,
            figures: Figures::None,
            short: false,
            mixed: false,
            stock: StockExpectation::Reference,
            native: None,
            needs: None,
            same_output: false,
        }
    }

    /// Returns whether group and name contain one of the filters, or there are none.
    pub fn matches(&self, filters: &[String]) -> bool {
        matches_filter(filters, &format!("{} {}", self.group, self.name))
    }

    /// Sets the maximum number of attempts.
    pub fn attempts(mut self, attempts: u32) -> Case {
        self.attempts = attempts;
        self
    }

    /// Sets the time limit of an attempt, in seconds.
    pub fn within(mut self, seconds: u64) -> Case {
        self.limit = Duration::from_secs(seconds);
        self
    }

    /// Adds the case to the short list.
    pub fn short(mut self) -> Case {
        self.short = true;
        self
    }

    /// Also runs the case with ours on one side only.
    pub fn mixed(mut self) -> Case {
        self.mixed = true;
        self
    }

    /// Sets the figures to parse from the output.
    pub fn figures(mut self, figures: Figures) -> Case {
        self.figures = figures;
        self
    }
}

/// Values of the placeholders in a command line.
#[derive(Debug, Clone)]
pub struct Placeholders {
    /// The device.
    pub dev: String,
    /// Its GID index.
    pub gid: u32,
    /// Its address.
    pub addr: String,
    /// A port.
    pub port: u16,
}

impl Placeholders {
    /// Returns the words of a command line with the placeholders replaced.
    pub fn fill(&self, line: &str) -> Vec<String> {
        line.split_whitespace()
            .map(|word| {
                word.replace("{dev}", &self.dev)
                    .replace("{gid}", &self.gid.to_string())
                    .replace("{addr}", &self.addr)
                    .replace("{port}", &self.port.to_string())
            })
            .collect()
    }
}

impl Figures {
    /// Parses the figures of a program's output.
    pub fn read(self, output: &str) -> BTreeMap<String, f64> {
        match self {
            Figures::None => BTreeMap::new(),
            Figures::PingPong => output
                .lines()
                .filter_map(|line| line.strip_suffix(" usec/iter"))
                .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
                .map(|us| ("us/iter".to_owned(), us))
                .collect(),
            Figures::Bandwidth => table(output, &["", "", "", "MB/s", "Mpps"]),
            Figures::Latency => table(output, &["", "", "min us", "", "typical us"]),
        }
    }
}

/// Returns the last row of perftest's table, which follows the line that starts with
/// `#bytes`, named by column. Columns without a name are left out, and so are figures
/// that are not finite: perftest prints those when the processors' clocks disagree.
fn table(output: &str, columns: &[&str]) -> BTreeMap<String, f64> {
    let rows = output
        .lines()
        .map(str::trim)
        .skip_while(|line| !line.starts_with("#bytes"))
        .skip(1);
    let numbers = rows
        .map(|row| {
            row.split_whitespace()
                .map_while(|word| word.parse::<f64>().ok())
                .collect::<Vec<_>>()
        })
        .filter(|row| row.len() >= columns.len())
        .last()
        .unwrap_or_default();
    columns
        .iter()
        .zip(numbers)
        .filter(|(name, value)| !name.is_empty() && value.is_finite())
        .map(|(name, value)| ((*name).to_owned(), value))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn perftest_s_tables_are_read() {
        let bw = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      1000             120.51             118.25               0.001892
---------------------------------------------------------------------------------------
";
        let figures = Figures::Bandwidth.read(bw);
        assert_eq!(figures["MB/s"], 118.25);
        assert_eq!(figures["Mpps"], 0.001892);
        let lat = "\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]
 2       1000          20.11          300.00       25.50              26.00
";
        assert_eq!(Figures::Latency.read(lat)["typical us"], 25.5);
        assert!(Figures::Latency.read("nothing").is_empty());
        let unknown = lat.replace("20.11", "inf").replace("25.50", "-nan");
        assert!(Figures::Latency.read(&unknown).is_empty());
    }

    #[test]
    fn ping_pong_s_figure_is_read() {
        let output = "8192000 bytes in 0.50 seconds = 131.00 Mbit/sec\n\
                      1000 iters in 0.50 seconds = 500.12 usec/iter\n";
        assert_eq!(Figures::PingPong.read(output)["us/iter"], 500.12);
    }

    #[test]
    fn placeholders_are_replaced() {
        let placeholders = Placeholders {
            dev: "rxe0".into(),
            gid: 1,
            addr: "192.0.2.1".into(),
            port: 9,
        };
        assert_eq!(
            placeholders
                .fill("x -d {dev} -g {gid} {addr}:{port}")
                .join(" "),
            "x -d rxe0 -g 1 192.0.2.1:9"
        );
    }
}
