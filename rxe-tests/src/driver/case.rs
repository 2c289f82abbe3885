//! A case: programs to run, and how to tell that they did what they should.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use crate::record::{Provider, Stock};

/// How to tell that a server can be connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// It listens on the case's TCP port.
    Tcp,
    /// An rdma_cm identifier has the case's port.
    Cm,
    /// An rdma_cm identifier has this port.
    CmAt(u16),
    /// A queue pair of this machine is attached to the multicast group.
    Group(Ipv4Addr),
}

/// The programs of a case. In every argument `{dev}`, `{gid}`, `{addr}` and
/// `{port}` stand for the device, its GID index, its address, and a port that
/// no other case uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Shape {
    /// One program.
    Single(String),
    /// A server and a client; both must end well.
    Pair {
        /// The server's command line.
        server: String,
        /// The client's.
        client: String,
        /// When to start the client.
        ready: Ready,
    },
    /// A server that never ends by itself: the client must end well.
    Service {
        /// The server's command line.
        server: String,
        /// The client's.
        client: String,
        /// When to start the client.
        ready: Ready,
    },
}

/// What to read out of a program's output.
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

/// How often a case that depends on timing is run before it counts as failed,
/// the same for every provider: tools that wait for ever for a datagram which a
/// busy machine lost, or that meet over a port. Every other case has one
/// attempt: where a race is looked for, one failure is what was looked for.
pub const ATTEMPTS: u32 = 3;

/// Whether one of the filters is in `name`, or there are none.
pub fn chosen(filters: &[String], name: &str) -> bool {
    filters.is_empty() || filters.iter().any(|filter| name.contains(filter))
}

/// What a case needs that not every device has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// rdma_rxe: it makes devices of its own, or looks into rdma_rxe's queues.
    Rxe,
    /// An IP address, to connect by rdma_cm.
    Address,
}

impl Need {
    /// Why a device that has not got it is no place for the case.
    pub fn missing(self) -> &'static str {
        match self {
            Need::Rxe => "it is about rdma_rxe",
            Need::Address => "it connects by rdma_cm, and the device has no address",
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
    /// What is run.
    pub shape: Shape,
    /// How long an attempt may take.
    pub limit: Duration,
    /// How many attempts it has: one, unless it depends on timing.
    pub attempts: u32,
    /// What is read from the client's output.
    pub figures: Figures,
    /// Whether the short list has it.
    pub short: bool,
    /// Whether it is also run with ours on one side and stock on the other.
    pub mixed: bool,
    /// What stock is expected to do.
    pub stock: Stock,
    /// The Rust crate's, with nobody else to run it with.
    pub native: Option<Provider>,
    /// What it needs besides a device.
    pub needs: Option<Need>,
    /// Whether ours must print the very same as stock.
    pub same_output: bool,
}

impl Case {
    /// A case of one program.
    pub fn single(group: &'static str, name: &str, command: &str) -> Case {
        Case::new(group, name, Shape::Single(command.to_owned()))
    }

    /// A case of the given shape, with the usual limit.
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
            stock: Stock::Reference,
            native: None,
            needs: None,
            same_output: false,
        }
    }

    /// Whether one of the filters is in its group and name; without filters
    /// every case is chosen.
    pub fn chosen_by(&self, filters: &[String]) -> bool {
        chosen(filters, &format!("{} {}", self.group, self.name))
    }

    /// Sets how many attempts it has.
    pub fn attempts(mut self, attempts: u32) -> Case {
        self.attempts = attempts;
        self
    }

    /// Sets the limit of an attempt, in seconds.
    pub fn within(mut self, seconds: u64) -> Case {
        self.limit = Duration::from_secs(seconds);
        self
    }

    /// Puts it in the short list.
    pub fn short(mut self) -> Case {
        self.short = true;
        self
    }

    /// Has it run mixed as well.
    pub fn mixed(mut self) -> Case {
        self.mixed = true;
        self
    }

    /// Says what to read from the output.
    pub fn figures(mut self, figures: Figures) -> Case {
        self.figures = figures;
        self
    }
}

/// What fills the placeholders in a command line.
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
    /// The words of a command line with the placeholders filled.
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
    /// Reads the figures out of a program's output; nothing where it has
    /// none.
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

/// The last row of perftest's table: the first numbers after the line that
/// starts with `#bytes`, named by column; a column without a name is left
/// out, and so is a figure that is no number: perftest does not know a time when
/// the processors' clocks disagree.
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
    fn places_are_filled() {
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
