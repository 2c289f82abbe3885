//! Errors of programs that no device reports, each with a program that does the same as it
//! should be done, and programs of others, which are silent.

#[macro_use]
mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Output;

use common::*;

/// An error of `c/check_cases.c`, the rule that it breaks, and the beginning of the line of the
/// first place that is reported; empty if it is in another function.
const ERRORS: [(&str, &str, &str); 59] = [
    ("write", "buffer-changed", ""),
    ("send", "buffer-changed", ""),
    ("immediate", "buffer-changed", ""),
    ("unsignaled", "buffer-changed", ""),
    ("element", "buffer-changed", ""),
    (
        "list",
        "buffer-changed",
        "\t\tCHECK(!ibv_post_send(a, wr, &bad));",
    ),
    (
        "long",
        "buffer-changed",
        "\t\tCHECK(!ibv_post_send(a, &wr, &bad));",
    ),
    ("builder", "buffer-changed", "\t\tibv_wr_rdma_write(ex, "),
    ("extended", "buffer-changed", ""),
    ("iova", "buffer-changed", ""),
    ("list-builder", "buffer-changed", ""),
    ("send-builder", "buffer-changed", ""),
    ("unreliable", "buffer-changed", ""),
    ("restored", "buffer-changed", ""),
    ("restored-long", "buffer-changed", ""),
    ("resent", "buffer-changed", ""),
    ("read-into", "buffer-changed", ""),
    ("atomic-into", "buffer-changed", ""),
    ("read-over", "overlapping-access", ""),
    ("unmapped", "buffer-unmapped", ""),
    ("freed-write", "buffer-freed", ""),
    ("freed-read", "buffer-freed", ""),
    ("freed-receive", "buffer-freed", ""),
    ("deregistered", "region-deregistered", ""),
    (
        "deregistered-early",
        "region-deregistered",
        "\tCHECK(!ibv_post_send(qp, &wr, &bad));",
    ),
    ("reregistered", "region-deregistered", ""),
    (
        "deregistered-receive",
        "region-deregistered",
        "\tCHECK(!ibv_post_recv(qp, &wr, &bad));",
    ),
    (
        "never-drains",
        "queue-never-drains",
        "\t\t\tif (ibv_post_send(a, &wr, &bad))",
    ),
    ("never-drains-builder", "queue-never-drains", ""),
    ("small-sends", "completion-queue-too-small", ""),
    ("small-receives", "completion-queue-too-small", ""),
    ("small-2", "completion-queue-too-small", ""),
    ("small-builder", "completion-queue-too-small", ""),
    ("unacknowledged", "events-not-acknowledged", ""),
    ("another-domain", "another-domain", ""),
    ("another-domain-of-send", "another-domain", ""),
    ("another-context", "another-context", ""),
    ("another-context-of-receives", "another-context", ""),
    ("again-window", "use-after-destroy", ""),
    ("again-limit", "use-after-destroy", ""),
    ("again-query", "use-after-destroy", ""),
    ("again-send", "use-after-destroy", ""),
    ("again-receive", "use-after-destroy", ""),
    ("again-builder", "use-after-destroy", ""),
    ("again-modify", "use-after-destroy", ""),
    ("again-poll", "use-after-destroy", ""),
    ("again-queue-pair", "use-after-destroy", ""),
    ("again-completion-queue", "use-after-destroy", ""),
    ("again-region", "use-after-destroy", ""),
    ("again-domain", "use-after-destroy", ""),
    ("again-register", "use-after-destroy", ""),
    ("no-start", "builder-without-start", ""),
    ("start-of-another", "builder-without-start", ""),
    (
        "region",
        "leak",
        "\tmr = ibv_reg_mr(pd, memory, LENGTH, all);",
    ),
    ("domain", "leak", "\tpd = ibv_alloc_pd(context);"),
    ("completion-queue", "leak", "\t\tcq = ibv_create_cq("),
    ("queue-pair", "leak", ""),
    ("window", "leak", ""),
    ("shared-queue", "leak", ""),
];

/// The same, of `c/check_objects.c`.
const ERRORS_OF_OBJECTS: [(&str, &str, &str); 17] = [
    ("overwritten-whole", "receive-overwritten", ""),
    ("overwritten-long", "receive-overwritten", ""),
    ("overwritten-part", "receive-overwritten", ""),
    ("overwritten-elements", "receive-overwritten", ""),
    (
        "window-1",
        "window-left-bound",
        "\tCHECK(!ibv_dereg_mr(region));",
    ),
    ("window-2", "window-left-bound", ""),
    ("window-builder", "window-left-bound", ""),
    (
        "queue-pair",
        "events-not-acknowledged",
        "\tCHECK(!ibv_destroy_qp(qp));",
    ),
    (
        "shared-queue",
        "events-not-acknowledged",
        "\tCHECK(!ibv_destroy_srq(srq));",
    ),
    (
        "threads-poll",
        "two-threads",
        "\tCHECK(!ibv_start_poll(queue, &none));",
    ),
    ("threads-builder", "two-threads", "\tibv_wr_start(qp);"),
    (
        "calls-poll",
        "two-threads",
        "\t\t\tCHECK(!ibv_poll_cq(common_cq, 1, &wc));",
    ),
    (
        "calls-send",
        "two-threads",
        "\t\t\tCHECK(!ibv_post_send(common_qp, wr, &bad));",
    ),
    (
        "calls-receive",
        "two-threads",
        "\t\t\tibv_post_recv(common_qp, &receive, &bad_receive);",
    ),
    // Promised before the first completion queue.
    ("first-calls-poll", "two-threads", ""),
    ("first-calls-send", "two-threads", ""),
    ("first-calls-receive", "two-threads", ""),
];

/// The same, of `c/check_shared.c`.
const ERRORS_OF_SHARED_QUEUES: [(&str, &str, &str); 21] = [
    (
        "domain",
        "another-domain",
        "\tCHECK(!ibv_post_srq_recv(queue, &wr, &bad));",
    ),
    ("overwritten-whole", "receive-overwritten", ""),
    ("overwritten-long", "receive-overwritten", ""),
    ("overwritten-id", "receive-overwritten", ""),
    (
        "overwritten-list",
        "receive-overwritten",
        "\t\tCHECK(!ibv_post_srq_recv(srq, &first, &bad));",
    ),
    ("overwritten-two", "receive-overwritten", ""),
    (
        "deregistered",
        "region-deregistered",
        "\t\tCHECK(!ibv_dereg_mr(region));",
    ),
    ("unmapped", "buffer-unmapped", ""),
    ("own-deregistered", "region-deregistered", ""),
    ("own-unmapped", "buffer-unmapped", ""),
    ("freed", "buffer-freed", ""),
    (
        "again",
        "use-after-destroy",
        "\t\tCHECK(ibv_post_srq_recv(queue, &wr, &bad) && bad == &wr);",
    ),
    (
        "bypassed",
        "wrong-receive-queue",
        "\t\tCHECK(ibv_post_recv(b[0], &wr, &bad));",
    ),
    ("small-receives", "completion-queue-too-small", RECEIVE),
    ("small-left", "completion-queue-too-small", RECEIVE),
    ("small-late", "completion-queue-too-small", RECEIVE),
    ("small-sends", "completion-queue-too-small", WRITE_FROM),
    ("small-datagrams", "completion-queue-too-small", RECEIVE),
    ("arrived-send", "completion-queue-too-small", WRITE_FROM),
    ("arrived-resized", "completion-queue-too-small", WRITE_FROM),
    ("arrived-messages", "completion-queue-too-small", RECEIVE),
];

/// Posts of `c/check_shared.c`.
const RECEIVE: &str = "\tCHECK(!ibv_post_srq_recv(queue, &wr, &bad));";
const WRITE_FROM: &str = "\tCHECK(!ibv_post_send(qp, &write, &bad));";

/// The same, of `c/check_overlaps.c`.
const ERRORS_OF_OVERLAPS: [(&str, &str, &str); 8] = [
    ("write-write", "overlapping-access", ""),
    ("write-write-part", "overlapping-access", ""),
    (
        "write-write-builder",
        "overlapping-access",
        "\tibv_wr_rdma_write(ex, ",
    ),
    ("read-write", "overlapping-access", ""),
    ("write-read", "overlapping-access", ""),
    ("message-into-send", "overlapping-access", ""),
    ("write-into-send", "overlapping-access", ""),
    ("between-processes", "overlapping-access", ""),
];

const REFUSED_BY_OURS: [&str; 2] = ["again-queue-pair", "again-completion-queue"];

/// libmlx5 ends the program itself.
const ENDED_BY_STOCK: [&str; 1] = ["threads-builder"];

/// What is right in any case.
const RIGHT: [&str; 9] = [
    "freed-answered",
    "inline",
    "read",
    "received",
    "answered",
    "written",
    "ignores-overrun",
    "ended",
    "left-at-exit",
];

/// What is right in any case, of `c/check_objects.c`.
const RIGHT_OF_OBJECTS: [&str; 5] = [
    "overwritten-same",
    "mutex-calls-poll",
    "mutex-calls-send",
    "mutex-calls-receive",
    "mutex-first-calls-receive",
];

/// The same, of `c/check_shared.c`.
const RIGHT_OF_SHARED_QUEUES: [&str; 9] = [
    "repeated-id",
    "repeated-same-id",
    "refused",
    "ended",
    "own-ended",
    "one-after-another",
    "end-reset",
    "end-destroyed",
    "own-completions",
];

/// The same, of `c/check_overlaps.c`.
const RIGHT_OF_OVERLAPS: [&str; 7] = [
    "same-bytes",
    "beside",
    "one-queue-pair",
    "seen",
    "read-by-thread",
    "flag-into-send",
    "never",
];

/// The same, of `examples/check_rust.rs`, a program of the Rust crate: without hooks, by what the
/// device sees.
const ERRORS_OF_RUST: [(&str, &str, &str); 4] = [
    (
        "small-receives",
        "completion-queue-too-small",
        "        Ok(self.context.completion_queue()",
    ),
    ("small-sends", "completion-queue-too-small", ""),
    ("small-2", "completion-queue-too-small", ""),
    ("writes", "overlapping-access", ""),
];

const RIGHT_OF_RUST: [&str; 4] = ["in-time", "same-bytes", "beside", "one-queue-pair"];

struct Cases {
    world: World,
    program: PathBuf,
    /// Name and text of its source.
    name: String,
    source: String,
}

impl Cases {
    /// Returns `None` if the program cannot be built.
    fn new(provider: Provider, port: &'static str, program: &str) -> Option<Self> {
        let world = World::new(provider, port);
        let options = &["-g", "-O1", "-libverbs", "-lpthread"];
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c");
        Some(Self {
            program: compiled("cc", program, options, &world.directory)?,
            name: program.to_owned(),
            source: std::fs::read_to_string(path.join(program)).unwrap(),
            world,
        })
    }

    /// Of a program of the Rust crate, which cargo has built.
    fn of_rust(provider: Provider, name: &str) -> Self {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("examples")
            .join(name);
        Self {
            world: World::new(provider, "roce"),
            program: built("../examples").join(name),
            name: format!("{name}.rs"),
            source: std::fs::read_to_string(source.with_extension("rs")).unwrap(),
        }
    }

    fn run(&self, arguments: &str, variables: &[(&str, &str)]) -> Output {
        let line = format!("{} {arguments}", self.program.display());
        let mut command = self.world.command(&line);
        command.env("RINGVERBS_CHECK", "1");
        let output = command.envs(variables.iter().copied()).output().unwrap();
        assert!(output.status.success(), "{arguments}: {output:?}");
        output
    }

    /// Returns what is written to standard error.
    fn said(&self, arguments: &str, variables: &[(&str, &str)]) -> String {
        String::from_utf8(self.run(arguments, variables).stderr).unwrap()
    }

    /// Runs the program with each error, and without.
    fn finds(self, provider: Provider, errors: &[(&str, &str, &str)], right: &[&str]) {
        for &(error, rule, line) in errors {
            // Our provider refuses it without asking the device.
            if provider == Provider::Ours && REFUSED_BY_OURS.contains(&error) {
                continue;
            }
            if provider == Provider::Stock && ENDED_BY_STOCK.contains(&error) {
                continue;
            }
            let said = self.said(error, &[]);
            let begins = format!("ringverbs: mlx5_0: error {rule}: ");
            let reports = said
                .lines()
                .filter(|line| line.starts_with(&begins))
                .count();
            let all = said
                .lines()
                .filter(|line| line.contains(": error "))
                .count();
            // What uses an object that is left is left, too.
            assert!(reports != 0 && reports == all, "{error}: {said}");
            assert!(rule == "leak" || reports == 1, "{error}: {said}");
            if rule == "two-threads" {
                let numbers = said.lines().next().unwrap().split("thread ").skip(1);
                let number = |it: &str| it.split(' ').next()?.parse::<u32>().ok();
                let numbers: Vec<u32> = numbers.filter_map(number).collect();
                assert!(numbers.len() == 2 && numbers[0] != numbers[1], "{said}");
            }
            if !line.is_empty() {
                let at = self.source.lines().position(|it| it.starts_with(line));
                let place = format!(" ({}:{})\n", self.name, at.unwrap() + 1);
                assert!(said.contains(&place), "{error}: no {place}: {said}");
            }
            // After a failed work request a queue pair is not followed. Whether one without its
            // region fails is chance.
            let fails = match rule {
                "another-domain" => Some(true),
                "region-deregistered" => None,
                _ => Some(false),
            };
            let is_followed = !said.contains("not checked");
            assert!(fails != Some(is_followed), "{error}: {said}");
            let said = self.said(&format!("{error} right"), &[]);
            assert!(is_silent(&said), "{error} right: {said}");
        }
        for right in right {
            let said = self.said(right, &[]);
            assert!(is_silent(&said), "{right}: {said}");
        }
        self.world.finish();
    }
}

/// Returns whether there is nothing but the last line of each process, without errors.
fn is_silent(said: &str) -> bool {
    let is_last = |line: &str| {
        line.starts_with("ringverbs: check of process ") && line.ends_with(": errors: 0")
    };
    !said.is_empty() && said.lines().all(is_last)
}

fn finds_errors(provider: Provider) {
    let _turn = turn();
    if let Some(cases) = Cases::new(provider, "roce", "check_cases.c") {
        cases.finds(provider, &ERRORS, &RIGHT);
    }
}

fn finds_errors_of_objects(provider: Provider) {
    let _turn = turn();
    if let Some(cases) = Cases::new(provider, "roce", "check_objects.c") {
        cases.finds(provider, &ERRORS_OF_OBJECTS, &RIGHT_OF_OBJECTS);
    }
}

fn finds_errors_of_shared_queues(provider: Provider) {
    let _turn = turn();
    if let Some(cases) = Cases::new(provider, "roce", "check_shared.c") {
        cases.finds(provider, &ERRORS_OF_SHARED_QUEUES, &RIGHT_OF_SHARED_QUEUES);
    }
    // Where libmlx5 has tag matching.
    if let Some(cases) = Cases::new(provider, "ib", "check_shared.c") {
        cases.finds(provider, &[], &["own-completions"]);
    }
}

fn finds_overlaps(provider: Provider) {
    let _turn = turn();
    if let Some(cases) = Cases::new(provider, "roce", "check_overlaps.c") {
        cases.finds(provider, &ERRORS_OF_OVERLAPS, &RIGHT_OF_OVERLAPS);
    }
}

/// Programs that write to the queues themselves use no provider.
#[test]
fn errors_of_rust_are_found() {
    let _turn = turn();
    let cases = Cases::of_rust(Provider::Stock, "check_rust");
    cases.finds(Provider::Stock, &ERRORS_OF_RUST, &RIGHT_OF_RUST);
}

/// Devices that such a program makes itself, without the preloaded library, look for the same.
#[test]
fn errors_of_rust_are_found_by_a_device_of_the_program() {
    let _turn = turn();
    let cases = Cases::of_rust(Provider::Stock, "check_rust");
    let own = [("RINGVERBS_DEVICE", "embedded")];
    for (error, rule, _) in ERRORS_OF_RUST {
        let said = cases.said(error, &own);
        let first = format!("ringverbs: embedded: error {rule}: ");
        assert!(said.starts_with(&first), "{error}: {said}");
        assert!(said.ends_with(": errors: 1\n"), "{error}: {said}");
        let said = cases.said(&format!("{error} right"), &own);
        assert!(is_silent(&said), "{error}: {said}");
    }
    for right in RIGHT_OF_RUST {
        let said = cases.said(right, &own);
        assert!(is_silent(&said), "{right}: {said}");
    }
}

/// Advice of `c/check_advice.c`, some with the name of a variant.
const ADVICE: [&str; 15] = [
    "long-queue",
    "long-inline-data",
    "hop-limit",
    "link-local-gid",
    "no-reads-accepted",
    "no-timeout",
    "short-timeout",
    "no-retries",
    "endless-retries",
    "limit-not-set-again",
    "fixed-gid-index",
    "unsignaled-in-mixed-queue",
    "unused-rights",
    "unused-rights/queue-pair",
    "completions-left",
];

/// Cases of the same program without advice.
const NO_ADVICE: [&str; 2] = ["gid-table", "manager"];

/// Advice is given if asked for, and is no error.
fn gives_advice(provider: Provider) {
    let _turn = turn();
    let Some(cases) = Cases::new(provider, "roce", "check_advice.c") else {
        return;
    };
    let asked = [("RINGVERBS_CHECK_ADVICE", "1")];
    for case in ADVICE {
        let rule = case.split('/').next().unwrap();
        let said = cases.said(case, &asked);
        let first = format!("ringverbs: mlx5_0: advice {rule}: ");
        assert!(said.starts_with(&first), "{rule}: {said}");
        assert_eq!(said.matches(": advice ").count(), 1, "{case}: {said}");
        assert!(said.ends_with(": errors: 0\n"), "{case}: {said}");
        let said = cases.said(&format!("{case} right"), &asked);
        assert!(is_silent(&said), "{case}: {said}");
    }
    for case in NO_ADVICE {
        let said = cases.said(case, &asked);
        assert!(is_silent(&said), "{case}: {said}");
    }
    // Where they were given first.
    let said = cases.said("unused-rights/queue-pair", &asked);
    let mut lines = cases.source.lines();
    let at = lines.position(|it| it.contains("attr.qp_state = IBV_QPS_INIT;"));
    let place = format!(" ({}:{})\n", cases.name, at.unwrap() + 2);
    assert!(said.contains(&place), "no {place}: {said}");
    assert!(is_silent(&cases.said("hop-limit", &[])));
    cases.world.finish();
}

/// Advice on InfiniBand ports.
fn gives_advice_on_infiniband(provider: Provider) {
    let _turn = turn();
    let Some(cases) = Cases::new(provider, "ib", "check_advice.c") else {
        return;
    };
    let asked = [("RINGVERBS_CHECK_ADVICE", "1")];
    let said = cases.said("no-global-route", &asked);
    let first = "ringverbs: mlx5_0: advice no-global-route: ";
    assert!(said.starts_with(first), "{said}");
    assert_eq!(said.matches(": advice ").count(), 1, "{said}");
    for right in ["no-global-route right", "gid-of-port"] {
        let said = cases.said(right, &asked);
        assert!(is_silent(&said), "{right}: {said}");
    }
    cases.world.finish();
}

/// Each rule is in the list of all rules, has a section in the manual, and a case here.
#[test]
fn every_rule_has_a_case() {
    let source = include_str!("../src/check.rs");
    let between = |start: &str, end: &str| {
        let rest = source.split_once(start).unwrap().1;
        rest.split_once(end).unwrap().0
    };
    let names = between("fn name(self) ", "\n    }\n");
    let names: Vec<&str> = names.split('"').skip(1).step_by(2).collect();
    assert!(names.len() > 25, "{names:?}");
    let all = between("const ALL: ", "];").matches("Self::").count();
    assert_eq!(all, names.len());
    let manual = include_str!("../../../docs/check.md");
    let sections = manual.lines().filter_map(|it| it.strip_prefix("### "));
    let sections: BTreeSet<&str> = sections.collect();
    assert_eq!(sections, names.iter().copied().collect());
    let errors = [
        &ERRORS[..],
        &ERRORS_OF_OBJECTS,
        &ERRORS_OF_SHARED_QUEUES,
        &ERRORS_OF_OVERLAPS,
    ];
    let errors = errors.into_iter().flatten().map(|it| it.1);
    let cases = errors.chain(ADVICE).chain(["read-before-completion"]);
    let cases: BTreeSet<&str> = cases.collect();
    let without = names.iter().filter(|name| !cases.contains(**name));
    // Only on InfiniBand.
    assert_eq!(without.collect::<Vec<_>>(), [&"no-global-route"]);
}

/// Reads of `c/check_reads.c` that are found, with the function that reads.
const EARLY_READS: [(&str, &str); 4] = [
    ("read", "read_from"),
    ("shared", "read_from"),
    ("copy", "look"),
    ("thread", "read_from"),
];

/// Cases of `c/check_reads.c` without a report: correct ones, and reads that are not found.
const NOT_EARLY: [&str; 6] = ["write", "call", "beside", "part", "twice", "arrived"];

/// Reads of receives before their completions are found, if that is asked for.
fn finds_early_reads(provider: Provider) {
    let _turn = turn();
    let Some(cases) = Cases::new(provider, "roce", "check_reads.c") else {
        return;
    };
    let asked = [("RINGVERBS_CHECK_EARLY_READS", "1")];
    for (read, function) in EARLY_READS {
        let said = cases.said(read, &asked);
        assert!(said.ends_with(": errors: 1\n"), "{read}: {said}");
        let begins = "ringverbs: mlx5_0: error read-before-completion: ";
        assert!(said.starts_with(begins), "{read}: {said}");
        let at = format!(" {function} (check_reads.c:");
        assert!(said.contains(&at), "{read}: {said}");
        let said = cases.said(&format!("{read} right"), &asked);
        assert!(is_silent(&said), "{read} right: {said}");
    }
    for read in NOT_EARLY {
        let said = cases.said(read, &asked);
        assert!(is_silent(&said), "{read}: {said}");
    }
    // Not asked for.
    let said = cases.said("read", &[]);
    assert!(is_silent(&said), "{said}");
    cases.world.finish();
}

/// Changes of `c/check_guard.c` whose writer is found, and the function that writes.
const WRITERS: [(&str, &str); 17] = [
    ("write", "write_to"),
    ("long", "write_to"),
    ("copy", "change"),
    ("beside", "write_to"),
    ("thread", "write_to"),
    ("handler", "write_to"),
    ("fork", "write_to"),
    ("own-fault", "write_to"),
    ("answer", "write_to"),
    ("call-read", "receive_in"),
    ("call-v", "receive_in"),
    ("call-from", "receive_in"),
    ("call-pread", "receive_in"),
    ("call-list", "receive_in"),
    ("call-offset", "receive_in"),
    ("call-stream", "receive_in"),
    ("unmapped-beside", "write_to"),
];

/// Changes whose writer is not found: the memory has other data in the page, or is not guarded any
/// more.
const NO_WRITERS: [&str; 5] = [
    "one-page",
    "registered",
    "protected",
    "call-message",
    "call-window",
];

/// What changes buffers is found at the next posts, if that is asked for, and the program notices
/// nothing of it.
fn finds_writers(provider: Provider) {
    let _turn = turn();
    let Some(cases) = Cases::new(provider, "roce", "check_guard.c") else {
        return;
    };
    let asked = [("RINGVERBS_CHECK_GUARD", "1")];
    let changes = WRITERS.map(|(change, writer)| (change, Some(writer)));
    let others = NO_WRITERS.map(|change| (change, None));
    for (change, writer) in changes.into_iter().chain(others) {
        let said = cases.said(change, &asked);
        let reports = said.matches("error buffer-changed: ").count();
        assert_eq!(
            said.matches(": error ").count(),
            reports,
            "{change}: {said}"
        );
        let written: Vec<&str> = said.split("    written by thread ").skip(1).collect();
        assert_eq!(reports, 1 + written.len(), "{change}: {said}");
        assert_eq!(written.len(), writer.iter().count(), "{change}: {said}");
        for (written, function) in written.iter().zip(writer) {
            let at = format!("\n        at {function} (check_guard.c:");
            assert!(written.contains(&at), "{change}: {said}");
        }
        let said = cases.said(&format!("{change} right"), &asked);
        assert!(is_silent(&said), "{change} right: {said}");
    }
    // Not asked for.
    let said = cases.said("write", &[]);
    assert!(!said.contains("written by"), "{said}");
    assert!(said.ends_with(": errors: 1\n"), "{said}");
    cases.world.finish();
}

/// Suppressed errors are counted apart; reports may be JSON, in a file.
fn reports_have_options(provider: Provider) {
    let _turn = turn();
    let Some(cases) = Cases::new(provider, "ib", "check_cases.c") else {
        return;
    };
    let path = |name: &str| cases.world.directory.join(name);
    let (list, errors, file) = (path("list"), path("errors"), path("file"));
    std::fs::write(&list, "# known\nbuffer-changed post_of (check_cases.c\n").unwrap();
    std::fs::write(&errors, "").unwrap();
    let variable = ("RINGVERBS_CHECK_SUPPRESSIONS", list.to_str().unwrap());
    let said = cases.said("write", &[variable]);
    assert!(said.ends_with(": errors: 0, suppressed: 1\n"), "{said}");
    let said = cases.said("list", &[variable]);
    assert!(said.ends_with(": errors: 1\n"), "{said}");
    let variables = [
        ("RINGVERBS_CHECK", file.to_str().unwrap()),
        ("RINGVERBS_EXPLAIN_FORMAT", "json"),
        ("RINGVERBS_CHECK_ERRORS", errors.to_str().unwrap()),
    ];
    assert_eq!(cases.said("write", &variables), "");
    assert_eq!(std::fs::read(&errors).unwrap().len(), 1);
    let written = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<serde_json::Value> = (written.lines())
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let [report, summary] = &lines[..] else {
        panic!("{written}");
    };
    assert_eq!(report["rule"], "buffer-changed");
    assert_eq!(report["class"], "error");
    assert_eq!(report["origins"][0]["what"], "posted");
    let stack = &report["origins"][0]["call"]["stack"];
    assert_eq!(stack[0]["function"], "post_of");
    assert_eq!(summary["type"], "check");
    assert_eq!(
        (&summary["errors"], &summary["suppressed"]),
        (&1.into(), &0.into())
    );
    std::fs::write(&list, "nonsense\n").unwrap();
    let said = cases.said("write", &[variable]);
    assert!(said.contains("list:1: there is no such rule"), "{said}");
    cases.world.finish();
}

const PROGRAMS: CorrectPrograms = CorrectPrograms {
    pairs: &[
        "ibv_rc_pingpong -g 1 -n 200 -c",
        "ibv_rc_pingpong -g 1 -e -N -n 200",
        "ibv_uc_pingpong -g 1 -n 200",
        "ibv_ud_pingpong -g 1 -n 200",
        "ibv_srq_pingpong -g 1 -n 200",
        "ibv_srq_pingpong -g 1 -q 4 -n 200 -e",
        "ib_write_bw -x 1 -n 500",
        "ib_write_bw -b -q 4 -x 1 -n 200",
        "ib_write_lat -x 1 -n 200 -I 0",
        "ib_send_lat -x 1 -n 200 -I 0 -s 5000",
        "ib_send_bw -b -x 1 -n 200",
        "ib_send_lat -x 1 -n 200 --use-srq",
        "ib_read_bw -x 1 -n 200",
        "ib_read_bw -q 2 -x 1 -n 200 -s 4096",
        "ib_read_lat -x 1 -n 200",
        "ib_atomic_bw -x 1 -n 200",
    ],
    transports: &["rc_v", "rc", "ud_v", "dc_mlx5,ud_mlx5"],
};

/// Programs of others have no errors. `explain` has a shorter list.
fn correct_programs_are_silent(provider: Provider) {
    let _turn = turn();
    let mut world = World::new(provider, "roce");
    world.checks = true;
    let file = world.directory.join("errors");
    let silent = |name: &str| {
        let written = std::fs::read_to_string(&file).unwrap_or_default();
        let _ = std::fs::remove_file(&file);
        let found = written.lines().find(|line| line.contains(": error "));
        assert_eq!(found, None, "{name}: {written}");
        assert!(written.contains(": check of process "), "{name}: {written}");
    };
    if !PROGRAMS.run(&world, silent) {
        return;
    }
    let ours = built("../ringverbs");
    let line = format!("{} pingpong -n 50", ours.display());
    world.start(&line, "pingpong.txt").good();
    silent("ringverbs pingpong");
    if let Some(program) = compiled("mpicc", "collectives.c", &[], &world.directory) {
        let line = format!(
            "mpirun --allow-run-as-root --oversubscribe --mca btl ^openib,vader,ofi --mca pml ucx \
             --mca osc ucx -x UCX_TLS=rc,self -x UCX_NET_DEVICES=mlx5_0:1 -n 2 {}",
            program.display()
        );
        world.start(&line, "mpi.txt").good();
        silent("Open MPI");
    }
    world.finish();
}

#[test]
#[ignore = "the long list; `explain` has a short one"]
fn stock_correct_programs() {
    correct_programs_are_silent(Provider::Stock);
}

#[test]
#[ignore = "the long list; `explain` has a short one"]
fn our_correct_programs() {
    correct_programs_are_silent(Provider::Ours);
}

with_each_provider! {
    errors_are_found: finds_errors;
    errors_of_objects_are_found: finds_errors_of_objects;
    errors_of_shared_queues_are_found: finds_errors_of_shared_queues;
    overlaps_are_found: finds_overlaps;
    advice: gives_advice;
    advice_on_infiniband: gives_advice_on_infiniband;
    writers_are_found: finds_writers;
    early_reads_are_found: finds_early_reads;
    reports: reports_have_options;
}
