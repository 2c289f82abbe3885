//! Bad values of the options of `run`, `env` and `check`: each error is one that names the option
//! and says what is right.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;
use std::time::Duration;

/// A copy of the command with files beside it that stand for the libraries.
struct Copy(PathBuf);

impl Copy {
    fn new(name: &str) -> Self {
        let name = format!("ringverbs-options-{name}-{}", std::process::id());
        let copy = Self(std::env::temp_dir().join(name));
        fs::create_dir_all(copy.0.join("own")).unwrap();
        fs::set_permissions(copy.0.join("own"), fs::Permissions::from_mode(0o700)).unwrap();
        let command = copy.0.join("ringverbs");
        fs::copy(env!("CARGO_BIN_EXE_ringverbs"), command).unwrap();
        for library in ["libringverbs_preload.so", "libringverbs-rdmav34.so"] {
            fs::write(copy.0.join(library), b"").unwrap();
        }
        copy
    }

    fn run(&self, command: &str, options: &[&str], program: &[&str]) -> Output {
        let mut process = Command::new("./ringverbs");
        process
            .current_dir(&self.0)
            .arg(command)
            .args(options)
            .args(program)
            .env("XDG_RUNTIME_DIR", self.0.join("own"));
        loop {
            match process.output() {
                // A child of another test has the copy open for writing, until it executes.
                Err(error) if error.kind() == ErrorKind::ExecutableFileBusy => {
                    thread::sleep(Duration::from_millis(1));
                }
                output => return output.unwrap(),
            }
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Options of `run` and `env`: what else is given, three bad values, and what the error says
/// beside the option.
const OPTIONS: &[(&str, &[&str], [&str; 3], &str)] = &[
    (
        "--embedded",
        &[],
        ["", "roce,card", "roce:"],
        "there are roce",
    ),
    (
        "--directory",
        &["--embedded"],
        ["", "file", "/proc/x"],
        ": ",
    ),
    ("--name", &["--embedded"], ["a,b", "a/b", "a,"], "name"),
    (
        "--gids",
        &["--embedded"],
        ["v3", "none", "v1,,v2"],
        "use |all entries are empty",
    ),
    (
        "--card",
        &["--embedded"],
        ["cx8", "", "cx5,cx5"],
        "one for all|there are cx5",
    ),
    (
        "--link",
        &["--embedded"],
        ["fast", "1Gbit,delay=x", "pause"],
        "such as|has no queue",
    ),
    (
        "--node",
        &["--embedded"],
        ["nowhere", "file", "."],
        ":1:|No such file|directory",
    ),
    (
        "--seed",
        &["--embedded"],
        ["x", "-1", "18446744073709551616"],
        "use a number from 0",
    ),
    (
        "--patience",
        &["--embedded=roce:127.0.0.1"],
        ["x", "1.5", "-1"],
        "use a whole number of seconds",
    ),
    (
        "--chaos",
        &["--embedded"],
        ["x", "", "-1"],
        "use a number from 0",
    ),
    (
        "--chaos-only",
        &["--embedded", "--chaos"],
        ["x", "@nowhere", "1-"],
        "completion:0.1.17|No such file",
    ),
    (
        "--faults",
        &["--embedded"],
        ["nowhere", "file", "."],
        ":1:|No such file|directory",
    ),
    (
        "--record-faults",
        &["--embedded"],
        ["nowhere/x", "/proc/x", "file/x"],
        "No such file|Not a directory",
    ),
    (
        "--explain",
        &["--embedded"],
        ["nowhere/x", ".", "/proc/x"],
        "No such file|directory",
    ),
    (
        "--explain-format",
        &["--embedded", "--explain"],
        ["", "xml", "TEXT"],
        "text, json",
    ),
    (
        "--capture",
        &["--embedded"],
        ["nowhere/x", "/proc/x", "file/x"],
        "No such file|directory",
    ),
    (
        "--record",
        &["--embedded"],
        ["nowhere/x", "/proc/x", "file/x"],
        "No such file|directory",
    ),
    (
        "--capture-snap",
        &["--embedded", "--capture=x"],
        ["", "0", "-1"],
        "use headers, all or a number",
    ),
    (
        "--capture-ring",
        &["--embedded", "--capture=x"],
        ["", "1x1MiB", "4x1"],
        "use 2 to 1000 files",
    ),
    (
        "--devices",
        &["--embedded"],
        ["", "card", "rxe;mlx5"],
        "use rxe, mlx5",
    ),
    (
        "--plugin",
        &["--embedded"],
        ["nowhere", "own", "/proc"],
        "there is no libringverbs-rdmavN.so",
    ),
];

/// The same of `run` alone.
const OF_RUN: &[(&str, &[&str], [&str; 3], &str)] = &[
    (
        "--require-rdma",
        &["--embedded"],
        ["x", "-1", "1KiB"],
        "use a number of bytes",
    ),
    (
        "--timeline",
        &["--embedded"],
        ["nowhere/x", ".", "/proc/x"],
        "No such file|directory",
    ),
];

/// The same of `env` alone.
const OF_ENV: &[(&str, &[&str], [&str; 3], &str)] = &[(
    "--format",
    &["--embedded"],
    ["", "json", "Shell"],
    "shell, file",
)];

/// The same of `check` alone.
const OF_CHECK: &[(&str, &[&str], [&str; 3], &str)] = &[
    (
        "--report",
        &[],
        ["nowhere/x", ".", "/proc/x"],
        "No such file|directory",
    ),
    (
        "--suppressions",
        &[],
        ["nowhere", "file/x", "own/x"],
        "No such file|directory",
    ),
    ("--error-status", &[], ["x", "256", "-1"], "0..=255|invalid"),
    (
        "--runs",
        &["--chaos"],
        ["x", "0", "-1"],
        "use a number of runs from 1 on",
    ),
    (
        "--timeout",
        &["--chaos", "--runs=1"],
        ["x", "1.5", "-1"],
        "use a whole number",
    ),
];

/// Options without values, and those that any command has.
const WITHOUT_VALUES: [&str; 7] = [
    "--early-reads",
    "--mount",
    "--advice",
    "--guard",
    "--host",
    "--help",
    "--version",
];

/// Returns the options that a command's help lists.
fn listed(help: &str) -> BTreeSet<String> {
    let lines = help.lines().map(str::trim_start);
    let options = lines.filter_map(|line| {
        let line = line.strip_prefix("-h, ").unwrap_or(line);
        let end = line.find(|it: char| !it.is_ascii_lowercase() && it != '-');
        line.starts_with("--")
            .then(|| &line[..end.unwrap_or(line.len())])
    });
    let options = options.filter(|it| it.len() > 2 && !WITHOUT_VALUES.contains(it));
    options.map(str::to_owned).collect()
}

#[test]
fn errors_name_the_option() {
    let copy = Copy::new("bad");
    fs::write(copy.0.join("file"), "?").unwrap();
    let program: &[&str] = &["--", "true"];
    let mut wrong = Vec::new();
    for (command, tables, program) in [
        ("run", [OPTIONS, OF_RUN], program),
        ("env", [OPTIONS, OF_ENV], &[]),
        ("check", [OPTIONS, OF_CHECK], program),
    ] {
        let tested = tables.iter().flat_map(|it| it.iter());
        let help = copy.run(command, &["--help"], &[]);
        let help = String::from_utf8(help.stdout).unwrap();
        let names: BTreeSet<String> = tested.clone().map(|it| it.0.to_owned()).collect();
        assert_eq!(names, listed(&help), "options of {command}");
        for (option, others, values, right) in tested {
            // What they share is tried once.
            if command != "run" && tables[0].iter().any(|it| it.0 == *option) {
                continue;
            }
            for value in values {
                let given = format!("{option}={value}");
                let mut options = others.to_vec();
                options.push(&given);
                let output = copy.run(command, &options, program);
                let said = String::from_utf8(output.stderr).unwrap();
                let is_right = right.split('|').any(|it| said.contains(it))
                    && matches!(output.status.code(), Some(1 | 2))
                    && output.stdout.is_empty()
                    && said.contains(option);
                if !is_right {
                    wrong.push(format!("{command} {given} (option, {right}): {said}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The library of embedded devices would refuse these, too, but only once a program opens one.
#[test]
fn values_that_belong_to_devices_fit_them() {
    let copy = Copy::new("fit");
    for (options, right) in [
        (
            &["--embedded", "--name=a,b"][..],
            "--name: more names than devices (1)",
        ),
        (
            &["--embedded=roce,ib", "--name=a,a"],
            "--name: two devices have the name \"a\"",
        ),
        (
            &["--embedded=roce,ib", "--name=mlx5_1"],
            "--name: two devices",
        ),
        (
            &["--embedded=roce,ib,ib", "--card=cx5,cx7"],
            "--card: 2 cards for 3 devices",
        ),
        (
            &["--embedded", "--patience=3"],
            "--patience: roce reaches no other hosts",
        ),
        (
            &["--embedded=ib,roce", "--patience=3"],
            "--patience: ib,roce reaches no other hosts",
        ),
        (
            &["--embedded=ib", "--gids=v2"],
            "--gids: ib has no roce device",
        ),
        (
            &[
                "--embedded=roce,ib",
                "--link=1Gbit",
                "--link=1Gbit",
                "--link=1Gbit",
            ],
            "--link: given 3 times",
        ),
        (
            &["--embedded=roce:eth0,ib"],
            "--embedded: there is no device \"roce:eth0\"",
        ),
        (
            &["--embedded=ib,ib,ib,ib,ib,ib,ib,ib,ib,ib,ib,ib,ib,ib,ib,ib,ib"],
            "--embedded: 17 devices; a program has at most 16",
        ),
    ] {
        let output = copy.run("env", options, &[]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{options:?}: {said}");
        assert!(
            output.stdout.is_empty() && said.contains(right),
            "{options:?}: {said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

/// `check` has devices without `--embedded`.
#[test]
fn options_of_devices_need_devices() {
    let copy = Copy::new("devices");
    for option in [
        "--directory=own",
        "--name=a",
        "--gids=v2",
        "--card=cx5",
        "--link=1Gbit",
        "--node=nowhere",
        "--seed=1",
        "--patience=1",
        "--explain",
        "--chaos",
        "--faults=file",
        "--record-faults=x",
        "--capture=x",
    ] {
        let needs = format!("{} needs --embedded", option.split('=').next().unwrap());
        for (command, options, is_refused) in [
            ("run", &[option][..], true),
            ("env", &[option], true),
            ("check", &["--host", option], true),
            ("check", &[option], false),
        ] {
            let output = copy.run(
                command,
                options,
                if command == "env" {
                    &[]
                } else {
                    &["--", "true"]
                },
            );
            let said = String::from_utf8(output.stderr).unwrap();
            assert_eq!(
                said.contains(&needs),
                is_refused,
                "{command} {options:?}: {said}"
            );
        }
    }
}

/// A FIFO that nobody reads is no place for a page.
#[test]
fn no_page_is_written_to_a_fifo_without_a_reader() {
    let copy = Copy::new("fifo");
    let fifo = copy.0.join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let options = ["--embedded", "--timeline=fifo"];
    let output = copy.run("run", &options, &["--", "true"]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("fifo: No such device or address"), "{said}");
}
