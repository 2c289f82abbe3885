//! The cases of libibverbs's examples, perftest and librdmacm's tools.

use std::net::Ipv4Addr;

use super::case::{ATTEMPTS, Case, Figures, ReadyCheck, Shape};

/// Returns all cases of the tools of perftest and of this major version of rdma-core.
pub fn all(rdma_core: u32) -> Vec<Case> {
    // These programs exit at once, perhaps before their memory maps are read.
    let devices = [
        ("ibv_devinfo -v", "ibv_devinfo -v -d {dev}"),
        ("ibv_devices", "ibv_devices"),
    ];
    let mut cases: Vec<_> = devices
        .map(|(name, line)| Case::single("devices", name, line).short())
        .map(|case| case.attempts(ATTEMPTS))
        .into();
    // Pairs meet on a port that others may take; some wait forever for a lost datagram.
    let pairs = [ping_pong(), perftest(), rdma_cm(rdma_core)]
        .into_iter()
        .flatten();
    cases.extend(pairs.map(|case| case.attempts(ATTEMPTS)));
    cases
}

/// `ibv_*_pingpong`: every transport, with polling and with events.
fn ping_pong() -> Vec<Case> {
    // Transport, options; an asterisk marks the short list.
    const LIST: &[(&str, &str)] = &[
        ("rc", "* -n 100 -c"),
        ("rc", "* -n 100 -e"),
        ("rc", "-n 100 -N"),
        ("rc", "-n 100 -N -e"),
        ("rc", "-n 100 -s 1"),
        ("rc", "-n 100 -s 65536 -c"),
        ("rc", "-n 5 -s 1048576"),
        ("rc", "-n 100 -m 256"),
        ("rc", "-n 100 -m 4096 -s 8192"),
        ("rc", "-n 100 -r 16"),
        ("rc", "-n 100 -t"),
        ("rc", "-n 100 -o"),
        ("rc", "-n 100 -j"),
        ("uc", "* -n 100 -c"),
        ("uc", "* -n 100 -e"),
        ("uc", "-n 100 -s 1"),
        ("uc", "-n 100 -s 65536"),
        ("uc", "-n 100 -m 4096"),
        ("ud", "* -n 100 -c"),
        ("ud", "* -n 100 -e"),
        ("ud", "-n 100 -s 1"),
        ("ud", "-n 100 -r 16"),
        ("srq", "* -n 100 -c"),
        ("srq", "* -n 100 -e"),
        ("srq", "-n 100 -q 1"),
        ("srq", "-n 100 -q 32 -s 8192"),
        ("srq", "-n 100 -r 32"),
        ("xsrq", "-n 5"),
        ("xsrq", "-n 5 -e"),
    ];
    LIST.iter()
        .map(|&(transport, options)| {
            let (short, options) = split_short_mark(options);
            let command =
                format!("ibv_{transport}_pingpong -d {{dev}} -g {{gid}} -p {{port}} {options}");
            let shape = Shape::Pair {
                client: format!("{command} {{addr}}"),
                server: command,
                ready: ReadyCheck::Tcp,
            };
            let case = Case::new("pingpong", &format!("{transport} {options}"), shape)
                .figures(Figures::PingPong);
            if short { case.short().mixed() } else { case }
        })
        .collect()
}

/// perftest: operations, latency and bandwidth, both posting interfaces, inline data,
/// several queue pairs, both directions, events, connections by rdma_cm.
fn perftest() -> Vec<Case> {
    const LIST: &[(&str, &str)] = &[
        ("send_bw", "* -n 200"),
        ("send_bw", "* -n 200 --use_old_post_send"),
        ("send_bw", "-n 200 -e -s 8192"),
        ("send_bw", "-n 200 -b -s 8192"),
        ("send_bw", "-n 200 -q 4 -s 8192"),
        ("send_bw", "-n 320 -l 16 -s 64"),
        ("send_bw", "-n 200 -s 1"),
        ("send_bw", "-n 200 -s 64 -I 64"),
        ("send_bw", "-n 200 -s 64 -I 64 --use_old_post_send"),
        ("send_bw", "-n 200 -Q 1 -s 8192"),
        ("send_bw", "-n 200 -m 4096 -s 8192"),
        ("send_bw", "-n 200 -r 64 -s 8192"),
        ("send_bw", "-n 200 -c UC -s 8192"),
        ("send_bw", "-n 200 -c UD -s 1024"),
        ("send_bw", "-n 200 --use-srq -q 2 -s 8192"),
        ("send_bw", "-n 200 -R -s 8192"),
        ("send_bw", "-n 200 -R -c UD -s 1024"),
        ("send_bw", "-n 5 -a -m 1024"),
        ("send_lat", "* -n 200"),
        ("send_lat", "-n 200 --use_old_post_send"),
        ("send_lat", "-n 200 -e"),
        ("send_lat", "-n 200 -I 64 -s 64"),
        ("send_lat", "-n 200 -I 0 -s 64"),
        ("send_lat", "-n 200 -c UC"),
        ("send_lat", "-n 200 -c UD"),
        ("send_lat", "-n 200 -R"),
        ("send_lat", "-n 200 -s 65536"),
        ("write_bw", "* -n 200"),
        ("write_bw", "-n 200 --use_old_post_send -s 8192"),
        ("write_bw", "-n 200 -b -s 8192"),
        ("write_bw", "-n 200 -q 4 -s 8192"),
        ("write_bw", "-n 200 -s 64 -I 64"),
        ("write_bw", "-n 320 -l 16 -s 64"),
        ("write_bw", "-n 200 -c UC -s 8192"),
        ("write_bw", "-n 200 -R -s 8192"),
        ("write_bw", "-n 200 -q 2 -b -s 4096"),
        ("write_lat", "* -n 200"),
        ("write_lat", "-n 200 --use_old_post_send"),
        ("write_lat", "-n 200 -s 64 -I 64"),
        ("write_lat", "-n 200 -c UC"),
        ("write_lat", "-n 200 -R"),
        ("read_bw", "* -n 200"),
        ("read_bw", "-n 200 --use_old_post_send -s 8192"),
        ("read_bw", "-n 200 -b -s 8192"),
        ("read_bw", "-n 200 -q 4 -s 8192"),
        ("read_bw", "-n 200 -o 4 -s 8192"),
        ("read_bw", "-n 200 -R -s 8192"),
        ("read_bw", "-n 200 -e -s 8192"),
        ("read_lat", "* -n 200"),
        ("read_lat", "-n 200 --use_old_post_send"),
        ("read_lat", "-n 200 -e"),
        ("read_lat", "-n 200 -R"),
        ("atomic_bw", "* -n 200 -A FETCH_AND_ADD"),
        ("atomic_bw", "-n 200 -A CMP_AND_SWAP"),
        ("atomic_bw", "-n 200 -A FETCH_AND_ADD --use_old_post_send"),
        ("atomic_bw", "-n 200 -A FETCH_AND_ADD -q 2 -b"),
        ("atomic_bw", "-n 200 -A CMP_AND_SWAP -R"),
        ("atomic_lat", "* -n 200 -A FETCH_AND_ADD"),
        ("atomic_lat", "-n 200 -A CMP_AND_SWAP"),
        ("atomic_lat", "-n 200 -A CMP_AND_SWAP --use_old_post_send"),
    ];
    LIST.iter()
        .map(|&(tool, options)| {
            let (short, options) = split_short_mark(options);
            let shape = perftest_pair(tool, options);
            let figures = if tool.ends_with("_bw") {
                Figures::Bandwidth
            } else {
                Figures::Latency
            };
            let mut case =
                Case::new("perftest", &format!("{tool} {options}"), shape).figures(figures);
            if options.split(' ').any(|word| word == "-a") {
                // All sizes, up to 8 MiB.
                case = case.within(120);
            }
            if short { case.short().mixed() } else { case }
        })
        .collect()
}

/// Returns both sides of a tool of perftest. With `-R` they connect by rdma_cm.
pub(super) fn perftest_pair(tool: &str, options: &str) -> Shape {
    let command = format!("ib_{tool} -d {{dev}} -x {{gid}} -p {{port}} -F {options}");
    let by_cm = options.split(' ').any(|word| word == "-R");
    Shape::Pair {
        client: format!("{command} {{addr}}"),
        server: command,
        ready: if by_cm {
            ReadyCheck::Cm
        } else {
            ReadyCheck::Tcp
        },
    }
}

/// librdmacm's tools. In most of them `-s` names the server to connect to.
fn rdma_cm(rdma_core: u32) -> Vec<Case> {
    let pair = |name: &str, server: &str, client: &str| {
        let shape = Shape::Pair {
            server: server.to_owned(),
            client: client.to_owned(),
            ready: ReadyCheck::Cm,
        };
        Case::new("rdma_cm", name, shape)
    };
    let both = |name: &str, command: &str| {
        pair(
            name,
            &format!("{command} -p {{port}}"),
            &format!("{command} -p {{port}} -s {{addr}}"),
        )
    };
    let rping = |name: &str, options: &str| {
        pair(
            name,
            &format!("rping -s -a {{addr}} -p {{port}} {options}"),
            &format!("rping -c -a {{addr}} -p {{port}} {options}"),
        )
    };
    let udaddy = |name: &str, options: &str| {
        // Its port is fixed.
        let shape = Shape::Pair {
            server: format!("udaddy {options}"),
            client: format!("udaddy {options} -s {{addr}}"),
            ready: ReadyCheck::CmPort(7174),
        };
        Case::new("rdma_cm", name, shape)
    };
    let mckey = |name: &str, options: &str| {
        let shape = Shape::Pair {
            server: format!("mckey -m 239.1.77.1 -b {{addr}} {options}"),
            client: format!("chrt --idle 0 mckey -m 239.1.77.1 -b {{addr}} {options} -s"),
            ready: ReadyCheck::Multicast(Ipv4Addr::new(239, 1, 77, 1)),
        };
        // The sender exits without polling its completions. It destroys the address
        // handle while rdma_rxe's thread may still use it, which then drops the posted
        // datagrams, with either provider. Idle priority lets that thread run first.
        // The case takes 4 s.
        Case::new("rdma_cm", name, shape).within(20)
    };
    let udpong = Shape::Service {
        server: "udpong -S 512 -C 100 -b {addr} -p {port}".to_owned(),
        client: "udpong -S 512 -C 100 -b {addr} -p {port} -s {addr}".to_owned(),
        ready: ReadyCheck::Cm,
    };
    vec![
        rping("rping -C 20 -V", "-C 20 -V").short().mixed(),
        rping("rping -q", "-C 10 -V -q"),
        rping("rping -S 65000", "-C 10 -V -S 65000"),
        both("ucmatose", "ucmatose").short().mixed(),
        both("ucmatose -c 4", "ucmatose -c 4 -C 20 -S 1000"),
        udaddy("udaddy", "").short(),
        udaddy("udaddy -c 4", "-c 4 -C 20 -S 1000"),
        mckey("mckey", "").short(),
        mckey("mckey -c 2", "-c 2 -C 20"),
        cmtime(rdma_core),
        pair(
            "rdma_server",
            "rdma_server -p {port}",
            "rdma_client -s {addr} -p {port}",
        ),
        both("rstream", "rstream -S 4096 -C 50 -I 20"),
        both("riostream", "riostream -S 4096 -C 50 -I 20"),
        // Its server runs until it is killed.
        Case::new("rdma_cm", "udpong", udpong).within(20),
    ]
}

/// cmtime, which connects by TCP. Its made-up QP numbers must differ, since both sides
/// are on one device.
fn cmtime(rdma_core: u32) -> Case {
    if rdma_core < OLD_CMTIME {
        // Its server runs until it is killed.
        let shape = Shape::Service {
            server: "cmtime -b {addr} -c 20 -p {port}".to_owned(),
            client: "cmtime -b {addr} -c 20 -p {port} -s {addr}".to_owned(),
            ready: ReadyCheck::Cm,
        };
        return Case::new("rdma_cm", "cmtime", shape);
    }
    // The first process that binds the port is the server.
    let (serve, connect) = if rdma_core < NEW_CMTIME {
        ("", "-s {addr}")
    } else {
        ("-L -C {addr}", "-C {addr}")
    };
    let shape = Shape::Pair {
        server: format!("cmtime -b {{addr}} -c 20 -p {{port}} -q 100000 {serve}"),
        client: format!("cmtime -b {{addr}} -c 20 -p {{port}} -q 200000 {connect}"),
        ready: ReadyCheck::Tcp,
    };
    Case::new("rdma_cm", "cmtime", shape)
}

/// The first version whose cmtime makes up QP numbers.
const OLD_CMTIME: u32 = 50;

/// The first version whose cmtime supports any number of peers, with other options.
const NEW_CMTIME: u32 = 59;

/// Splits the mark of the short list from the options.
fn split_short_mark(options: &str) -> (bool, &str) {
    match options.strip_prefix("* ") {
        Some(rest) => (true, rest),
        None => (false, options),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn names_are_unique_and_clean() {
        let cases = all(NEW_CMTIME);
        let names: HashSet<_> = cases.iter().map(|c| (c.group, c.name.clone())).collect();
        assert_eq!(names.len(), cases.len());
        assert!(cases.iter().all(|c| !c.name.contains('*')));
    }

    #[test]
    fn the_short_list_has_every_transport_and_operation() {
        let short: Vec<_> = all(0).into_iter().filter(|c| c.short).collect();
        for wanted in [
            "rc", "uc", "ud", "srq", "send", "write", "read", "atomic", "rping",
        ] {
            assert!(short.iter().any(|c| c.name.starts_with(wanted)), "{wanted}");
        }
    }
}
