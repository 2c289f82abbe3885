//! The text of `ringverbs top`.

use embedded::{DeviceStatus, ProcessStatus};

use super::View;
use super::host::Traffic;
use super::rates::{self, Rates};
use crate::escape::escaped;
use crate::{out, running};

/// Counters that are columns; the others are errors.
const TRAFFIC: [&str; 7] = [
    "sends",
    "receives",
    "bytes_sent",
    "bytes_received",
    "completions",
    "packets_sent",
    "packets_received",
];

/// Returns what is seen at a time as lines, at most so many columns wide: devices, with rates
/// since an earlier time, then errors, then queues.
pub fn lines(before: Option<&View>, now: &View, columns: usize) -> Vec<String> {
    let mut text = Vec::new();
    // Writing to memory does not fail.
    if !now.devices.is_empty() {
        let _ = out::table(&mut text, &host_ports(before, now));
        let counters = host_counters(now);
        if counters.len() > 1 {
            text.push(b'\n');
            let _ = out::table(&mut text, &counters);
        }
    }
    // Without processes the heading shows that there are none.
    if now.devices.is_empty() || !now.processes.is_empty() {
        if !text.is_empty() {
            text.push(b'\n');
        }
        let _ = out::table(&mut text, &devices(before, now));
    }
    let errors = errors(now);
    if !errors.is_empty() {
        text.push(b'\n');
        let _ = out::table(&mut text, &errors);
    }
    let queue_pairs = queue_pairs(now);
    if queue_pairs.len() > 1 {
        text.push(b'\n');
        let _ = out::table(&mut text, &queue_pairs);
    }
    let queues = completion_queues(now);
    if queues.len() > 1 {
        text.push(b'\n');
        let _ = out::table(&mut text, &queues);
    }
    let text = String::from_utf8_lossy(&text);
    let mut lines: Vec<String> = text.lines().map(|line| cut(line, columns)).collect();
    if now.silent != 0 {
        lines.insert(0, cut(&running::silent(now.silent), columns));
    }
    lines
}

/// Cuts a line that is too long. Its styles, which begin and end a line, take no columns.
fn cut(line: &str, columns: usize) -> String {
    let visible = anstream::adapter::strip_str(line).to_string();
    match visible.chars().count() {
        count if count > columns => visible.chars().take(columns).collect(),
        _ => line.to_owned(),
    }
}

fn each_device(view: &View) -> impl Iterator<Item = (&ProcessStatus, &DeviceStatus)> {
    let processes = view.processes.iter();
    processes.flat_map(|it| it.devices.iter().map(move |device| (it, device)))
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

fn devices(before: Option<&View>, now: &View) -> Vec<Vec<String>> {
    let heading = match before {
        Some(_) => row([
            "process",
            "program",
            "device",
            "link",
            "QPs",
            "sends/s",
            "receives/s",
            "sent/s",
            "received/s",
            "errors",
            "capture",
        ]),
        None => row([
            "process", "program", "device", "link", "QPs", "sends", "receives", "sent", "received",
            "errors", "capture",
        ]),
    };
    let mut rows = vec![heading];
    for process in &now.processes {
        let capture = process.capture.clone().unwrap_or_default();
        let start = [process.process.to_string(), process.program.clone()];
        if process.devices.is_empty() {
            let mut row = start.to_vec();
            row.resize(10, String::new());
            row.push(capture.clone());
            rows.push(row);
        }
        for device in &process.devices {
            let errors: u64 = errors_of(device).map(|(_, count)| count).sum();
            let link = if device.is_up { "up" } else { "down" };
            let count = device.queue_pairs.len().to_string();
            let mut row = start.to_vec();
            row.extend([device.name.clone(), link.to_owned(), count]);
            row.extend(match before {
                Some(_) => traffic(rates::of(before, process, device)),
                None => traffic(Some(totals(device))),
            });
            row.extend([errors.to_string(), capture.clone()]);
            rows.push(row);
        }
    }
    rows
}

fn host_ports(before: Option<&View>, now: &View) -> Vec<Vec<String>> {
    let heading = [
        "host's device",
        "port",
        "state",
        "link",
        "interface",
        "QPs",
        "packets sent",
        "received",
        "sent",
        "received",
    ];
    let mut rows = vec![row(heading)];
    if before.is_some() {
        let traffic = rows[0].iter_mut().skip(6);
        traffic.for_each(|it| it.push_str("/s"));
    }
    for device in &now.devices {
        let queue_pairs = device.objects.get("qp").map(u64::to_string);
        for port in &device.ports {
            let text = |it: &Option<String>| it.clone().unwrap_or_default();
            let mut row = vec![
                device.name.clone(),
                port.number.to_string(),
                text(&port.state),
                text(&port.link_layer),
                text(&port.interface),
                queue_pairs.clone().unwrap_or_else(|| "-".to_owned()),
            ];
            let of = |what| match before {
                Some(before) => rates::of_host(before, (&device.name, port), what),
                None => port.traffic(what).map(|it| it as f64),
            };
            let shown = |what, unit| match of(what) {
                Some(number) => short(number) + unit,
                None => "-".to_owned(),
            };
            row.push(shown(Traffic::PacketsSent, ""));
            row.push(shown(Traffic::PacketsReceived, ""));
            row.push(shown(Traffic::BytesSent, "B"));
            row.push(shown(Traffic::BytesReceived, "B"));
            rows.push(row);
        }
    }
    rows
}

fn host_counters(now: &View) -> Vec<Vec<String>> {
    let mut rows = vec![row(["host's device", "port", "counters"])];
    for device in &now.devices {
        for port in &device.ports {
            let counters = port.others();
            let counters = counters.map(|(name, count)| format!("{count} {name}"));
            let counters: Vec<String> = counters.collect();
            if !counters.is_empty() {
                let number = port.number.to_string();
                rows.push(vec![device.name.clone(), number, counters.join(", ")]);
            }
        }
    }
    rows
}

/// Returns what a device has done, in the place of rates.
fn totals(device: &DeviceStatus) -> Rates {
    let count = |name| device.counter(name) as f64;
    Rates {
        sends: count("sends"),
        receives: count("receives"),
        bytes_sent: count("bytes_sent"),
        bytes_received: count("bytes_received"),
    }
}

fn traffic(rates: Option<Rates>) -> [String; 4] {
    let Some(rates) = rates else {
        return [(); 4].map(|()| "-".to_owned());
    };
    [
        short(rates.sends),
        short(rates.receives),
        short(rates.bytes_sent) + "B",
        short(rates.bytes_received) + "B",
    ]
}

/// Returns a number with three digits and a decimal prefix.
fn short(number: f64) -> String {
    const PREFIXES: [&str; 6] = ["", "k", "M", "G", "T", "P"];
    let mut rest = number;
    let mut prefixes = PREFIXES.iter();
    let mut prefix = prefixes.next();
    while rest >= 999.5 {
        match prefixes.next() {
            Some(next) => prefix = Some(next),
            None => break,
        }
        rest /= 1000.0;
    }
    let digits = match prefix {
        Some(&"") => 0,
        _ if rest < 9.995 => 2,
        _ if rest < 99.95 => 1,
        _ => 0,
    };
    format!("{rest:.digits$}{}", prefix.copied().unwrap_or_default())
}

fn errors_of(device: &DeviceStatus) -> impl Iterator<Item = (&str, u64)> {
    let counters = device.counters.iter();
    let counters = counters.map(|(name, value)| (name.as_str(), *value));
    counters.filter(|(name, value)| *value != 0 && !TRAFFIC.contains(name))
}

fn errors(now: &View) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for (process, device) in each_device(now) {
        let mut add = |text: String| {
            let process = process.process.to_string();
            rows.push(vec![process, device.name.clone(), text]);
        };
        let counts = errors_of(device);
        let counts = counts.map(|(name, count)| format!("{count} {}", name.replace('_', " ")));
        let counts: Vec<String> = counts.collect();
        if !counts.is_empty() {
            add(counts.join(", "));
        }
        for (number, reason) in &device.errors {
            add(format!("queue pair {number:#x}: {}", escaped(reason)));
        }
    }
    if !rows.is_empty() {
        rows.insert(0, row(["process", "device", "errors since it was opened"]));
    }
    rows
}

fn queue_pairs(now: &View) -> Vec<Vec<String>> {
    let mut rows = vec![row([
        "process",
        "device",
        "queue pair",
        "type",
        "state",
        "peer",
        "address",
        "sends",
        "receives",
    ])];
    for (process, device) in each_device(now) {
        for it in &device.queue_pairs {
            let of = |(used, all): (u32, u32)| format!("{used} of {all}");
            let receives = it.receives.map(of).unwrap_or_else(|| "-".to_owned());
            rows.push(vec![
                process.process.to_string(),
                device.name.clone(),
                format!("{:#x}", it.number),
                it.kind.clone(),
                it.state.clone(),
                it.peer.map(|peer| format!("{peer:#x}")).unwrap_or_default(),
                it.address.clone().unwrap_or_default(),
                of(it.sends),
                receives,
            ]);
        }
        if device.omitted != 0 {
            rows.push(vec![
                process.process.to_string(),
                device.name.clone(),
                format!("{} more queues", device.omitted),
            ]);
        }
    }
    rows
}

fn completion_queues(now: &View) -> Vec<Vec<String>> {
    let mut rows = vec![row(["process", "device", "completion queue", "unread"])];
    for (process, device) in each_device(now) {
        for it in &device.completion_queues {
            rows.push(vec![
                process.process.to_string(),
                device.name.clone(),
                format!("{:#x}", it.number),
                format!("{} of {}", it.unread, it.entries),
            ]);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use embedded::QueuePairStatus;

    use super::super::host::{HostDevice, HostPort};
    use super::*;

    /// A process of a hostile program, whose device has sent so much.
    fn view(seconds: u64, sends: u64) -> View {
        let device = DeviceStatus {
            name: "mlx5_0".to_owned(),
            is_up: true,
            counters: vec![
                ("sends".to_owned(), sends),
                ("bytes_sent".to_owned(), sends * 1000),
                ("timeouts".to_owned(), 3),
            ],
            queue_pairs: vec![QueuePairStatus {
                number: 0x41,
                kind: "RC".to_owned(),
                state: "RTS".to_owned(),
                peer: Some(0x52),
                sends: (1, 16),
                ..QueuePairStatus::default()
            }],
            errors: vec![(0x41, "a\u{1b}[31mreason".to_owned())],
            ..DeviceStatus::default()
        };
        View {
            processes: vec![ProcessStatus {
                process: 4711,
                program: "\u{1b}[2Jevil".to_owned(),
                time: Duration::from_secs(seconds),
                devices: vec![device],
                ..ProcessStatus::default()
            }],
            devices: Vec::new(),
            silent: 1,
        }
    }

    /// A port of rdma_rxe that has sent so many packets.
    fn host(seconds: u64, packets: u64) -> View {
        let counters = [("sent_pkts", packets), ("send_err", 2)];
        let port = HostPort {
            number: 1,
            state: Some("ACTIVE".to_owned()),
            counters: counters.map(|(name, it)| (name.to_owned(), it)).into(),
            time: Duration::from_secs(seconds),
            ..HostPort::default()
        };
        let device = HostDevice {
            name: "rxe0".to_owned(),
            objects: [("qp".to_owned(), 4)].into(),
            ports: vec![port],
        };
        View {
            devices: vec![device],
            ..View::default()
        }
    }

    #[test]
    fn devices_of_the_host_have_rates() {
        let text = lines(None, &host(1, 12_345), usize::MAX).join("\n");
        let words: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        let expected = ["rxe0", "1", "ACTIVE", "4", "12.3k", "-", "-", "-"];
        assert_eq!(words, expected, "{text}");
        assert!(
            text.ends_with("\nrxe0           1     2 send_err"),
            "{text}"
        );
        let text = lines(Some(&host(1, 100)), &host(3, 300), usize::MAX).join("\n");
        assert!(
            text.contains("packets sent/s") && text.contains("  100  "),
            "{text}"
        );
        assert!(!text.contains("process"), "{text}");
        let both = View {
            devices: host(1, 1).devices,
            ..view(1, 1)
        };
        let text = lines(None, &both, usize::MAX).join("\n");
        assert!(text.contains("rxe0") && text.contains("4711"), "{text}");
    }

    #[test]
    fn numbers_are_short() {
        let cases = [
            (0.0, "0"),
            (999.4, "999"),
            (999.5, "1.00k"),
            (12_345.0, "12.3k"),
            (999_600.0, "1.00M"),
            (5.0e20, "500000P"),
        ];
        for (number, expected) in cases {
            assert_eq!(short(number), expected, "{number}");
        }
    }

    #[test]
    fn rates_are_those_between_two_looks() {
        let (first, second) = (view(10, 100), view(12, 2100));
        let text = lines(Some(&first), &second, usize::MAX).join("\n");
        assert!(text.contains("  1.00k  "), "{text}");
        assert!(text.contains("  1.00MB  "), "{text}");
        // The same number, of a new process.
        let text = lines(Some(&second), &view(13, 5), usize::MAX).join("\n");
        assert!(text.contains("  0B  "), "{text}");
        let none = View::default();
        let text = lines(Some(&none), &first, usize::MAX).join("\n");
        assert!(text.contains("  -  "), "{text}");
    }

    #[test]
    fn lines_fit_and_are_escaped() {
        for columns in [usize::MAX, 100, 40, 1, 0] {
            let lines = lines(None, &view(1, 1), columns);
            for line in &lines {
                let visible = anstream::adapter::strip_str(line).to_string();
                assert!(visible.chars().count() <= columns, "{columns}: {line}");
            }
            let text = lines.join("\n");
            let plain = anstream::adapter::strip_str(&text).to_string();
            assert!(!plain.contains('\u{1b}'), "{plain:?}");
            if columns == usize::MAX {
                assert!(plain.contains("\\u{1b}[2Jevil"), "{plain}");
                assert!(plain.contains("3 timeouts") && plain.contains("1 of 16"));
                assert!(plain.starts_with("a process has not answered"), "{plain}");
            }
        }
    }
}
