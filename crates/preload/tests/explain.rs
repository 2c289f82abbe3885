//! The reasons that are reported for mistakes of a program, once each, with both sides of what
//! was compared.

#[macro_use]
mod common;

use common::*;

/// A mistake of `c/faults.c`, parts of the reports that explain it, and the number of reports.
const MISTAKES: [(&str, &[&str], usize); 16] = [
    ("well", &[], 0),
    (
        "right",
        &[
            "request of the peer refused: RDMA write of 64 bytes",
            "the key has LOCAL_READ and LOCAL_WRITE and REMOTE_READ, not REMOTE_WRITE",
            "(RC, last set to RTS): created in process ",
            ": a region of 4096 bytes from 0x",
            ", LOCAL_WRITE and REMOTE_READ: registered by thread ",
        ],
        1,
    ),
    (
        "beyond",
        &["RDMA read of 64 bytes", "the key is for 4096 bytes from"],
        1,
    ),
    (
        "local",
        &[
            "work request failed: its local buffers",
            "the key is for 4096 bytes",
            "work request: wr_id 0x5e, RDMA write, 64 bytes, 64 at 0x",
            ", to queue pair 0x",
            "posted by thread ",
            "        at main (faults.c:POST)",
        ],
        1,
    ),
    (
        "key",
        &["request of the peer refused", "no key has this number"],
        1,
    ),
    (
        "deregistered",
        &[
            "request of the peer refused",
            "no key has this number",
            "    deregistered by thread ",
            "        at main (faults.c:DEREGISTER)",
        ],
        1,
    ),
    (
        "no-receive",
        &[
            "the peer had no receive posted",
            "(RNR)",
            "wr_id 0x5e, send, 64 bytes",
            "the other end: queue pair 0x",
            "no receive is posted, and none was since it was created",
        ],
        1,
    ),
    (
        "short",
        &[
            "a message of 64 bytes or more does not fit into the receive of 16",
            "work request: wr_id 0x4e, receive, 16 bytes, 16 at 0x",
        ],
        1,
    ),
    (
        "init",
        &[
            "packet dropped: the queue pair is in INIT",
            "no answer of the peer after 1 retries",
            "the other end: queue pair 0x",
            "(INIT): packet dropped: the queue pair is in INIT",
        ],
        2,
    ),
    (
        "builder",
        &[
            "work request failed: its local buffers",
            "work request: wr_id 0x71, RDMA write, 64 bytes",
            "        at build (faults.c:BUILD)",
        ],
        1,
    ),
    (
        "full",
        &[
            "send with wr_id 0x5e refused: ",
            "the queue is full",
            "    called by thread ",
            "        at main (faults.c:FULL)",
        ],
        1,
    ),
    (
        "full-shared",
        &[
            "shared receive queue 0x",
            ": receive with wr_id 0x4e refused: ",
            "the queue is full",
            "    called by thread ",
            "        at main (faults.c:SHARED)",
        ],
        1,
    ),
    (
        "ud-qkey",
        &["packet dropped: Q_Key 0x11 is not 0x22 of the queue pair"],
        1,
    ),
    (
        "ud-none",
        &["packet dropped: no receive is posted, and none was since it was created"],
        1,
    ),
    (
        "states",
        &[
            "ibv_modify_qp refused: there is no transition from RESET to RTS (of queue pair 0x",
            "(RC, last set to RESET): created in process ",
            "        at modified_wrongly (faults.c:MODIFY)",
            "        by main (faults.c:",
        ],
        1,
    ),
    (
        "busy",
        &[
            "ibv_dealloc_pd refused: protection domain",
            "is used by other objects",
            "(os error 16)",
        ],
        1,
    ),
];

/// Lines of `c/faults.c` that are in reports, by the names of [`MISTAKES`].
const LINES: [(&str, &str); 6] = [
    ("POST", "\tCHECK(!ibv_post_send(qp, &send, &bad));"),
    ("DEREGISTER", "\t\tCHECK(!ibv_dereg_mr(other));"),
    ("BUILD", "\t\tibv_wr_rdma_write("),
    ("FULL", "\t\tfor (int n = 0; n < 1000 && !ibv_post_send("),
    (
        "SHARED",
        "\t\tfor (int n = 0; n < 1000 && !ibv_post_srq_recv(",
    ),
    ("MODIFY", "\treturn ibv_modify_qp("),
];

/// Returns a part of a report with the numbers of its lines.
fn with_lines(part: &str) -> String {
    let source = include_str!("c/faults.c");
    LINES.iter().fold(part.to_owned(), |part, (name, text)| {
        let at = source.lines().position(|line| line.starts_with(text));
        let number = at.unwrap_or_else(|| panic!("no line {text}")) + 1;
        part.replace(&format!(":{name})"), &format!(":{number})"))
    })
}

/// Returns the reports in what was written, and the summaries: each has a line that is not
/// indented.
fn reports(written: &str) -> (Vec<String>, Vec<String>) {
    let mut reports: Vec<String> = Vec::new();
    for line in written.lines() {
        match reports.last_mut() {
            Some(report) if line.starts_with("    ") => *report += &format!("\n{line}"),
            _ => reports.push(line.to_owned()),
        }
    }
    let (summaries, reports) = (reports.into_iter())
        .partition(|report| report.starts_with("ringverbs: summary of process "));
    (reports, summaries)
}

/// The program with mistakes, in a world of its own.
struct FaultyProgram {
    world: World,
    program: std::path::PathBuf,
}

impl FaultyProgram {
    /// Returns `None` if it cannot be built.
    fn new(provider: Provider, port: &'static str) -> Option<Self> {
        let world = World::new(provider, port);
        let options = &["-g", "-O1", "-libverbs"];
        let program = compiled("cc", "faults.c", options, &world.directory)?;
        Some(Self { world, program })
    }

    /// Makes a mistake; returns what is written to standard error.
    fn run(&self, mistake: &str, variables: &[(&str, &str)]) -> String {
        let line = format!("{} {mistake}", self.program.display());
        let mut command = self.world.command(&line);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{mistake}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }
}

fn explains_mistakes(provider: Provider) {
    let _turn = turn();
    for port in ["roce", "ib"] {
        let Some(faults) = FaultyProgram::new(provider, port) else {
            return;
        };
        let file = faults.world.directory.join("explanations");
        for (mistake, parts, count) in MISTAKES {
            assert_eq!(faults.run(mistake, &[]), "", "{port} {mistake}");
            let printed = faults.run(mistake, &[("RINGVERBS_EXPLAIN", "1")]);
            let to_file = [("RINGVERBS_EXPLAIN", file.to_str().unwrap())];
            assert_eq!(faults.run(mistake, &to_file), "", "{port} {mistake}");
            let written = std::fs::read_to_string(&file).unwrap();
            std::fs::remove_file(&file).unwrap();
            for said in [printed, written] {
                let (mut found, summaries) = reports(&said);
                // A NAK may arrive before the queue pair, which is its own peer, is in error.
                found.retain(|report| !report.contains("failed: the peer refused it"));
                assert_eq!(found.len(), count, "{port} {mistake}: {said}");
                assert_eq!(summaries.len(), 1, "{port} {mistake}: {said}");
                // The sender of a dropped datagram completes with success. "full" exits before completions.
                let carried = match mistake {
                    "well" | "builder" | "ud-qkey" | "ud-none" => "RDMA has carried data",
                    "full" => "",
                    _ => "RDMA has carried no data",
                };
                assert!(summaries[0].contains(carried), "{port} {mistake}: {said}");
                let begins = |report: &String| report.starts_with("ringverbs: mlx5_0: ");
                assert!(found.iter().all(begins), "{port} {mistake}: {said}");
                let found = found.join("\n");
                for part in parts {
                    let part = with_lines(part);
                    assert!(found.contains(&part), "{port} {mistake}: no {part}: {said}");
                }
            }
        }
        faults.world.finish();
    }
}

/// Reports to standard error are not written to another file that has its number, end no program
/// whose pipe nobody reads, and are made without the thread of `main`.
fn standard_error_is_the_programs(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let options = &["-g", "-O1", "-pthread", "-libverbs"];
    let Some(program) = compiled("cc", "own_stderr.c", options, &world.directory) else {
        return;
    };
    for (use_of, is_reported) in [
        ("plain", true),
        ("closed", false),
        ("duplicated", true),
        ("pipe", false),
        ("thread", true),
    ] {
        let line = format!("{} {use_of}", program.display());
        let mut command = world.command(&line);
        let output = command.env("RINGVERBS_EXPLAIN", "1").output().unwrap();
        assert!(output.status.success(), "{use_of}: {output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            said.contains("no key has this number"),
            is_reported,
            "{use_of}: {said}"
        );
        assert!(is_reported || said.is_empty(), "{use_of}: {said}");
    }
    world.finish();
}

fn reports_are_json(provider: Provider) {
    let _turn = turn();
    let Some(faults) = FaultyProgram::new(provider, "roce") else {
        return;
    };
    let json = [
        ("RINGVERBS_EXPLAIN", "1"),
        ("RINGVERBS_EXPLAIN_FORMAT", "json"),
    ];
    let written = faults.run("local", &json);
    let lines: Vec<serde_json::Value> = (written.lines())
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let [report, summary] = &lines[..] else {
        panic!("{written}");
    };
    assert_eq!(
        (&report["version"], &report["type"]),
        (&1.into(), &"report".into())
    );
    assert_eq!(report["device"], "mlx5_0");
    assert_eq!(report["class"], "work request");
    assert!(
        report["message"]
            .as_str()
            .unwrap()
            .contains("work request failed")
    );
    assert_eq!(report["count"], 1);
    assert!(report["process"].as_u64().is_some());
    let queue_pair = &report["queue_pair"];
    assert_eq!(
        (&queue_pair["kind"], &queue_pair["state"]),
        (&"RC".into(), &"RTS".into())
    );
    let work = &report["work_request"];
    assert_eq!(work["wr_id"], "0x5e");
    assert_eq!(work["operation"], "RDMA write");
    assert_eq!(
        (&work["length"], &work["buffer_count"]),
        (&64.into(), &1.into())
    );
    assert_eq!(work["buffers"][0]["lkey"], report["region"]["key"]);
    assert_eq!(work["peer"], queue_pair["number"]);
    assert!(
        work["remote"]["address"]
            .as_str()
            .unwrap()
            .starts_with("0x")
    );
    let post = &work["posted"]["stack"][0];
    assert_eq!(
        (&post["module"], &post["function"]),
        (&"faults".into(), &"main".into())
    );
    assert!(post["file"].as_str().unwrap().ends_with("faults.c"));
    let line = with_lines("faults.c:POST)");
    assert_eq!(line, format!("faults.c:{})", post["line"]));
    assert_eq!(report["region"]["length"], 4096);
    let access: Vec<_> = report["region"]["access"].as_array().unwrap().to_vec();
    assert_eq!(access, ["LOCAL_WRITE", "REMOTE_READ"]);
    assert!(report["other_end"].is_null() && report["call"].is_null());
    assert_eq!(
        (&summary["version"], &summary["type"]),
        (&1.into(), &"summary".into())
    );
    assert_eq!(summary["queue_pairs"], 1);
    assert_eq!(summary["errors"][0]["count"], 1);
    let operation = &summary["devices"][0]["operations"][0];
    assert_eq!(operation["operation"], "RDMA write");
    assert_eq!(
        (&operation["requests"], &operation["bytes"]),
        (&1.into(), &64.into())
    );
    // A call that is refused.
    let written = faults.run("states", &json);
    let report: serde_json::Value = serde_json::from_str(written.lines().next().unwrap()).unwrap();
    assert_eq!(report["class"], "command");
    assert_eq!(report["call"]["stack"][0]["function"], "modified_wrongly");
    faults.world.finish();
}

const PROGRAMS: CorrectPrograms = CorrectPrograms {
    pairs: &[
        "ibv_rc_pingpong -g 1 -n 200",
        "ibv_rc_pingpong -g 1 -e -N -n 200",
        "ibv_ud_pingpong -g 1 -n 200",
        "ibv_srq_pingpong -g 1 -n 200",
        "ib_write_bw -x 1 -n 500",
        "ib_send_lat -x 1 -n 200",
        "ib_atomic_bw -x 1 -n 200",
    ],
    transports: &["rc", "ud", "dc_mlx5,ud_mlx5"],
};

/// Programs without mistakes have summaries, but no reports, of errors neither.
fn correct_programs_are_silent(provider: Provider) {
    let _turn = turn();
    let mut world = World::new(provider, "roce");
    (world.explains, world.checks) = (true, true);
    let file = world.directory.join("explanations");
    let silent = |name: &str| {
        let written = std::fs::read_to_string(&file).unwrap_or_default();
        let _ = std::fs::remove_file(&file);
        let (mut reports, summaries) = reports(&written);
        let before = reports.len();
        reports.retain(|report| !report.starts_with("ringverbs: check of process "));
        assert_eq!(before - reports.len(), summaries.len(), "{name}: {written}");
        assert_eq!(reports, [""; 0], "{name}");
        assert!(!summaries.is_empty(), "{name}");
        for summary in summaries {
            let carried = summary.contains(": RDMA has carried data; ");
            assert!(carried, "{name}: {summary}");
        }
    };
    if PROGRAMS.run(&world, silent) {
        world.finish();
    }
}

/// A FIFO without a reader does not stop the program.
fn does_not_wait_for_readers(provider: Provider) {
    let _turn = turn();
    let Some(faults) = FaultyProgram::new(provider, "roce") else {
        return;
    };
    let fifo = faults.world.directory.join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let said = faults.run("right", &[("RINGVERBS_EXPLAIN", fifo.to_str().unwrap())]);
    assert!(said.contains("No such device or address"), "{said}");
    std::fs::remove_file(fifo).unwrap();
    faults.world.finish();
}

/// A connection to a port on which nobody listens.
fn refused_connections(provider: Provider) {
    let _turn = turn();
    if !installed(&["rping"]) {
        return;
    }
    let mut world = World::new(provider, "roce");
    world.explains = true;
    let mut client = world.start("rping -c -a 127.0.0.1 -C 1", "client.txt");
    assert_ne!(client.end(), Some(0));
    let file = world.directory.join("explanations");
    let (reports, _) = reports(&std::fs::read_to_string(file).unwrap());
    assert_eq!(reports.len(), 1, "{reports:?}");
    for part in [
        "ringverbs: mlx5_0: connection from 127.0.0.1:",
        " to 127.0.0.1:7174 failed, event REJECTED: rejected: nobody listens on that port",
        "called by thread ",
        "at rping+0x",
    ] {
        assert!(reports[0].contains(part), "{}", reports[0]);
    }
    // It ends at `main`, also if that has no symbol.
    for part in ["__libc_start", " 0x0\n"] {
        assert!(
            !(reports[0].clone() + "\n").contains(part),
            "{}",
            reports[0]
        );
    }
    world.finish();
}

/// A mistake that is made 10,000 times is reported when it is first made, and then at each power
/// of ten; the summary has the number.
fn repetitions_are_counted(provider: Provider) {
    let _turn = turn();
    let Some(faults) = FaultyProgram::new(provider, "roce") else {
        return;
    };
    let said = faults.run("often", &[("RINGVERBS_EXPLAIN", "1")]);
    let (reports, summaries) = reports(&said);
    let counts = reports.iter().map(|report| {
        let line = report.lines().next().unwrap();
        assert!(
            line.contains("work request failed: its local buffers"),
            "{report}"
        );
        assert!(
            report.contains("work request: wr_id 0x5e, RDMA write, 64 bytes"),
            "{report}"
        );
        let count = line
            .rsplit_once(" (")
            .and_then(|it| it.1.strip_suffix(" such)"));
        count.map_or(1, |count| count.parse().unwrap())
    });
    assert_eq!(counts.collect::<Vec<u32>>(), [1, 10, 100, 1000, 10_000]);
    assert_eq!(summaries.len(), 1, "{said}");
    assert!(summaries[0].contains("kinds of errors: 1\n"), "{said}");
    assert!(
        summaries[0].contains("\n    10000 times: queue pair 0x"),
        "{said}"
    );
    faults.world.finish();
}

/// A signal handler that posts does not wait for what it interrupts.
fn handlers_may_post(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let options = &["-pthread", "-libverbs"];
    let Some(program) = compiled("cc", "handlers.c", options, &world.directory) else {
        return;
    };
    for variables in [
        &[("RINGVERBS_EXPLAIN", "1")][..],
        &[("RINGVERBS_EXPLAIN", "1"), ("RINGVERBS_CHECK", "1")],
    ] {
        // It is killed if it hangs.
        let line = format!("timeout -s KILL 100 {} posts", program.display());
        let mut command = world.command(&line);
        let output = command.envs(variables.iter().copied()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{:?} {said}", output.status);
        let (_, summaries) = reports(&said);
        let found = summaries.iter().find_map(|summary| {
            let line = (summary.lines()).find(|it| it.contains(" posts or polls in signal"))?;
            line.trim_start().split(' ').next()?.parse::<u32>().ok()
        });
        assert!(found.is_some_and(|count| count >= 300), "{said}");
    }
    world.finish();
}

with_each_provider! {
    repetitions: repetitions_are_counted;
    signal_handlers_may_post: handlers_may_post;
    fifos_without_a_reader: does_not_wait_for_readers;
    refused_connections_are_explained: refused_connections;
    correct_programs: correct_programs_are_silent;
    mistakes_are_explained: explains_mistakes;
    json_has_documented_members: reports_are_json;
    standard_error_of_the_program: standard_error_is_the_programs;
}
