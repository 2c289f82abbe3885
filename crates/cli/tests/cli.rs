//! Runs the command: exit status, standard output and error, no panic. Works with and
//! without RDMA.

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn ringverbs(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringverbs"));
    command.args(args).stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    let output = ringverbs(args).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!error.contains("panicked"), "{args:?}: {error}");
    output
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

const COMMANDS: [&str; 6] = ["devices", "info", "doctor", "pingpong", "perf", "trace"];

#[test]
fn every_command_has_help() {
    for command in COMMANDS {
        let output = run(&[command, "--help"]);
        assert!(output.status.success(), "{command}");
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(help.contains("Usage:") && help.contains("--json"), "{help}");
    }
}

#[test]
fn invalid_arguments_are_named_with_exit_status_2() {
    for (args, named) in [
        (&["info", "--port", "0"][..], "--port"),
        // Not the name of a program.
        (&["run", "--embeded", "--", "true"], "--embedded"),
        (
            &["run", "--embedded", "--require-rdma=x", "true"],
            "invalid",
        ),
        (&["info", "--port", "256"], "--port"),
        (&["pingpong", "--size", "0"], "--size"),
        (&["pingpong", "--mtu", "1500"], "1500"),
        (&["pingpong", "--iters", "-1"], "-1"),
        (&["pingpong", "--rx-depth", "99999999999"], "--rx-depth"),
        (&["pingpong", "--server", "host"], "--server"),
        (&["perf", "--sizes", "8,x"], "\"x\""),
        (&["perf", "--sizes", "5..7"], "power of two"),
        (&["perf", "--depth", "5000"], "--depth"),
        (&["perf", "--queue-pairs", "257"], "--queue-pairs"),
        (&["perf", "--duration", "0"], "--duration"),
        (&["perf", "--duration", "1", "-n", "5"], "--iters"),
        (&["perf", "--type", "xrc"], "xrc"),
        (&["trace"], "<PID|FILE>"),
        (&["trace", "1", "--", "true"], "[PID|FILE]"),
        (&["trace", "0"], "0"),
        (&["trace", "1", "--follow", "--json"], "--json"),
        (&["run"], "<COMMAND>"),
        (&["nonsense"], "nonsense"),
        (&[], "Usage"),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(
            stderr(&output).contains(named),
            "{args:?}: {}",
            stderr(&output)
        );
    }
}

#[test]
fn json_is_valid_without_devices() {
    let output = run(&["devices", "--json"]);
    assert!(output.status.success());
    let devices: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let last = devices.as_array().unwrap().last().unwrap();
    assert_eq!(last["name"], "embedded");
    assert_eq!(last["driver"], "in this process");

    let output = run(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["works"].as_bool(), Some(output.status.success()));
    for finding in report["findings"].as_array().unwrap() {
        let has_fix = finding.get("mend").is_some();
        assert_eq!(has_fix, finding["level"] != "ok", "{finding}");
    }
}

#[test]
fn missing_device_is_named_on_stderr_only() {
    for args in [
        ["info", "--device", "no-such-device"],
        ["pingpong", "--ib-dev", "no-such-device"],
        ["perf", "--device", "no-such-device"],
    ] {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(output.stdout.is_empty());
        assert!(
            stderr(&output).contains("no-such-device"),
            "{}",
            stderr(&output)
        );
    }
}

#[test]
fn trace_of_processes_without_queues_and_missing_processes() {
    let own_pid = std::process::id().to_string();
    let output = run(&["trace", &own_pid]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("no queue mapped"),
        "{}",
        stderr(&output)
    );

    let output = run(&["trace", "4294967295"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("no process"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn perf_refuses_unsupported_options_before_measuring() {
    let big = "16777216";
    for (args, named) in [
        (&["--plot", "picture.gif"][..], ".svg or .png"),
        (&["--plot", "/nowhere/picture.png"], "/nowhere/picture.png"),
        (&["--type", "ud", "--op", "read"], "UD has no reads"),
        (&["--type", "uc", "--op", "atomic"], "UC has no atomics"),
        (
            &["--op", "read", "--sizes", big, "--depth", "65", "-q", "2"],
            "try --depth 32,",
        ),
        (&["--depth", "4096", "-q", "256"], "at most 65536"),
        (
            &["--type", "ud", "--op", "send", "--sizes", "8..8192"],
            "4096 bytes; choose smaller",
        ),
    ] {
        let output = run(&[&["perf", "--device", "embedded"], args].concat());
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        assert!(output.stdout.is_empty(), "{args:?}: {output:?}");
        let error = stderr(&output);
        assert!(error.contains(named), "{args:?}: {error}");
    }
}

#[test]
fn closed_stdout_is_no_error() {
    for args in [
        &["doctor"][..],
        &["doctor", "--json"],
        &["devices", "--json"],
    ] {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        drop(reader);
        let output = ringverbs(args)
            .stdout(writer)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        assert_eq!(stderr(&output), "", "{args:?}");
    }
}

#[test]
fn no_colours_without_a_terminal() {
    let output = run(&["doctor"]);
    assert!(!output.stdout.contains(&0x1b));
    let forced = ringverbs(&["doctor"]).env("CLICOLOR_FORCE", "1").output();
    assert!(forced.unwrap().stdout.contains(&0x1b));
}

#[test]
fn run_sets_the_environment_of_the_plugin() {
    let dir = std::env::temp_dir().join(format!("ringverbs-run-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.to_str().unwrap();
    let run = |program: &[&str]| {
        let options = ["run", "--plugin", path, "--"];
        let mut command = ringverbs(&[&options, program].concat());
        command
            .env("RDMAV_DRIVERS", "rxe")
            .env_remove("LD_PRELOAD")
            .env_remove("RINGVERBS_DEVICES");
        command.output().unwrap()
    };
    let output = run(&["env"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("--plugin"), "{}", stderr(&output));

    // The loader warns that the file is no library, and ignores it.
    std::fs::write(dir.join("libringverbs-rdmav34.so"), b"").unwrap();
    let output = run(&["env"]);
    let variables = String::from_utf8(output.stdout.clone()).unwrap();
    for expected in [
        format!("LD_PRELOAD={path}/libringverbs-rdmav34.so"),
        format!("RDMAV_DRIVERS={path}/libringverbs:rxe"),
        "RINGVERBS_DEVICES=rxe,mlx5".to_owned(),
    ] {
        let is_set = variables.lines().any(|line| line == expected);
        assert!(is_set, "{expected}: {variables}");
    }
    assert_eq!(run(&["sh", "-c", "exit 7"]).status.code(), Some(7));
    let output = run(&["/nowhere/program"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("/nowhere/program"));
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn check_has_an_exit_status_for_errors() {
    let runner = Runner::new("check");
    let status = |options: &[&str], script: &str| {
        let mut command = Command::new(runner.0.join("ringverbs"));
        let network = runner.0.join("network");
        let command = command.args(["check", "--embedded", "--directory"]);
        let command = command.arg(network).args(options);
        let command = command.args(["--", "sh", "-c", script]);
        command.stdin(Stdio::null()).output().unwrap().status.code()
    };
    let error = "printf E >> $RINGVERBS_CHECK_ERRORS; exit 4";
    assert_eq!(status(&[], "test $RINGVERBS_CHECK = 1"), Some(0));
    assert_eq!(status(&[], "exit 4"), Some(4));
    assert_eq!(status(&[], error), Some(99));
    assert_eq!(status(&["--error-status", "7"], error), Some(7));
    assert_eq!(status(&["--error-status", "0"], error), Some(4));
    assert_eq!(status(&["--suppressions", "/nowhere"], "true"), Some(1));
    // A program without a loader.
    let program = runner.0.join("static");
    let mut bytes = std::fs::read("/bin/sh").unwrap()[..4096].to_vec();
    bytes[56..58].fill(0);
    std::fs::write(&program, bytes).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&program, mode).unwrap();
    let mut command = Command::new(runner.0.join("ringverbs"));
    let output = command
        .args(["check", "--"])
        .arg(&program)
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nothing would be checked"), "{said}");
    assert!(said.contains("RINGVERBS_CHECK=1"), "{said}");
    runner.finish();
}

#[test]
fn check_searches_the_fewest_decisions() {
    let runner = Runner::new("search");
    let search = |script: &str| {
        let mut command = Command::new(runner.0.join("ringverbs"));
        let command = command.args(["check", "--directory"]);
        let command = command.arg(runner.0.join("network"));
        let command = command.args(["--embedded", "--chaos=5", "--runs", "3", "--timeout=20"]);
        let command = command.args(["--", "sh", "-c", script]);
        let output = command.stdin(Stdio::null()).output().unwrap();
        (output.status.code(), stderr(&output))
    };
    assert_eq!(search("true").0, Some(0));
    let (status, said) = search("exit 4");
    assert_eq!(status, Some(99));
    assert!(said.contains("without chaos: exit status 4"), "{said}");
    // Fails with one of three decisions, from the second seed on.
    let (status, said) = search(
        "test ${RINGVERBS_CHAOS:-5} = 5 && exit
        printf 'send:0.0.0\nsend:0.0.1\nfield:0.0.0\n' >>$RINGVERBS_CHAOS_DECISIONS
        test $RINGVERBS_CHAOS_ONLY || exit 1
        ! grep -q send:0.0.1 ${RINGVERBS_CHAOS_ONLY#@}",
    );
    assert_eq!(status, Some(99), "{said}");
    for expected in [
        "seed 6: exit status 1",
        "1 of 3 decisions; with them alone 10 of 10 runs fail",
        "--embedded --chaos=6 --chaos-only=send:0.0.1 -- sh -c '",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    runner.finish();
}

/// On devices of the host, the library for embedded devices records and precedes the plugin.
#[test]
fn programs_on_devices_of_the_host_are_recorded() {
    let runner = Runner::new("record");
    std::fs::write(runner.0.join("libringverbs-rdmav34.so"), b"").unwrap();
    let record = runner.0.join("record.jsonl");
    let run = [
        OsStr::new("run"),
        OsStr::new("--record"),
        record.as_os_str(),
    ];
    let trace = [OsStr::new("trace")];
    for options in [&run[..], &trace] {
        let mut command = Command::new(runner.0.join("ringverbs"));
        let command = command.args(options).env_remove("LD_PRELOAD");
        let command = command.args(["--", "sh", "-c", "echo $LD_PRELOAD"]);
        let output = command.stdin(Stdio::null()).output().unwrap();
        let path = runner.0.display();
        let expected = format!("{path}/libringverbs_preload.so:{path}/libringverbs-rdmav34.so\n");
        assert_eq!(
            String::from_utf8_lossy(&output.stdout),
            expected,
            "{options:?}"
        );
    }
}

/// Returns `LD_PRELOAD` of a program that a copy of the command runs on embedded devices.
fn preloaded(command: &Path, directory: &Path) -> String {
    let mut command = Command::new(command);
    command
        .args(["run", "--embedded", "--directory"])
        .arg(directory.join("network"))
        .args(["--", "sh", "-c", "echo $LD_PRELOAD"])
        .env_remove("LD_PRELOAD");
    let output = loop {
        match command.output() {
            // Another test's child has inherited the descriptor by which the copy was written.
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                std::thread::sleep(Duration::from_millis(20));
            }
            output => break output.unwrap(),
        }
    };
    assert!(output.status.success(), "{}", stderr(&output));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn run_finds_the_library_as_the_package_installs_it() {
    let dir = std::env::temp_dir().join(format!("ringverbs-usr-{}", std::process::id()));
    let manifest = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    let manifest = manifest.unwrap();
    // The packages of both architectures have both.
    for (file, folder) in [
        ("ringverbs", "usr/bin/"),
        ("libringverbs_preload.so", "usr/lib/ringverbs/"),
    ] {
        let entry = format!("/{file}\", \"{folder}\", ");
        assert_eq!(manifest.matches(&entry).count(), 2, "{entry}");
        std::fs::create_dir_all(dir.join(folder)).unwrap();
    }
    let (command, library) = (
        dir.join("usr/bin/ringverbs"),
        dir.join("usr/lib/ringverbs/libringverbs_preload.so"),
    );
    std::fs::copy(env!("CARGO_BIN_EXE_ringverbs"), &command).unwrap();
    // The loader warns that the file is no library, and ignores it.
    std::fs::write(&library, b"").unwrap();
    assert_eq!(preloaded(&command, &dir), library.to_str().unwrap());
    std::fs::remove_dir_all(&dir).unwrap();
}

/// A shell that evaluates the output of `env`, and a file of variables, have what `run` sets.
#[test]
fn env_prints_what_run_sets() {
    let dir = std::env::temp_dir().join(format!("ringverbs-env-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let command = dir.join("ringverbs");
    std::fs::copy(env!("CARGO_BIN_EXE_ringverbs"), &command).unwrap();
    std::fs::write(dir.join("libringverbs_preload.so"), b"").unwrap();
    let expected = preloaded(&command, &dir);
    let script = |script: &str| {
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", script]).current_dir(&dir);
        shell.env_remove("LD_PRELOAD").output().unwrap()
    };
    let evaluated = script(
        "eval \"$(./ringverbs env --embedded --directory it\\'s)\"; \
         echo \"$LD_PRELOAD\"; echo \"$RINGVERBS_EMBEDDED\"; echo \"$RINGVERBS_DIRECTORY\"",
    );
    let directory = dir.canonicalize().unwrap().join("it's");
    let lines = [&expected, "roce", directory.to_str().unwrap()];
    let printed = String::from_utf8(evaluated.stdout).unwrap();
    assert_eq!(printed.lines().collect::<Vec<_>>(), lines);
    let file = script("./ringverbs env --embedded=roce,ib --format file");
    let file = String::from_utf8(file.stdout).unwrap();
    let preload = format!("LD_PRELOAD={expected}");
    assert!(file.lines().any(|line| line == preload), "{file}");
    assert!(
        file.lines()
            .any(|line| line == "RINGVERBS_EMBEDDED=roce,ib"),
        "{file}"
    );
    let refused = script("./ringverbs env --embedded=card");
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(refused.stdout, b"");
    std::fs::remove_dir_all(&dir).unwrap();
}

/// Returns the script of a file of YAML, which begins after `key` and is indented deeper.
fn script_in(file: &str, key: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .join(file);
    let text = std::fs::read_to_string(path).unwrap();
    let (_, script) = text.split_once(key).unwrap();
    let lines = script.lines().skip(1).map(|line| {
        let line = line.trim_start();
        line.strip_prefix("- ").unwrap_or(line)
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// The action for GitHub gives later steps the variables and the command; so does the file
/// for GitLab.
#[test]
fn ci_systems_get_devices() {
    if Command::new("curl").arg("--version").output().is_err() {
        testing::skip!(missing: "curl", "downloads of CI systems");
        return;
    }
    let dir = std::env::temp_dir().join(format!("ringverbs-ci-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let command = dir.join("ringverbs");
    std::fs::copy(env!("CARGO_BIN_EXE_ringverbs"), &command).unwrap();
    std::fs::write(dir.join("libringverbs_preload.so"), b"").unwrap();
    let expected = preloaded(&command, &dir);
    let start = |script: &str, variables: &[(&str, &str)]| {
        // As runners start it.
        let mut shell = Command::new("bash");
        let shell = shell.args(["-eo", "pipefail", "-c", script]);
        let shell = shell.current_dir(&dir).env_remove("LD_PRELOAD");
        shell.envs(variables.iter().copied()).output().unwrap()
    };
    let run = |script: &str, variables: &[(&str, &str)]| {
        let output = start(script, variables);
        assert!(output.status.success(), "{}", stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    // Fails, says so, and leaves no variables.
    let refused = |script: &str, variables: &[(&str, &str)], reason: &str| {
        let _ = std::fs::remove_file(dir.join("variables"));
        let output = start(script, variables);
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &stderr(&output);
        assert!(!output.status.success(), "{reason}: {said}");
        assert!(said.contains(reason), "{reason}: {said}");
        let left = std::fs::read(dir.join("variables")).unwrap_or_default();
        assert!(left.is_empty(), "{reason}");
    };
    let action = script_in("action.yml", "run: |");
    let variables = [
        ("COMMAND", "./ringverbs"),
        ("DEVICES", "roce,ib"),
        ("EXPLAIN", "why.txt"),
        ("PROVIDER", "libmlx5"),
        ("NAME", "rxe0,rxe1"),
        ("OPTIONS", "--link 1Gbit,queue=64KiB --seed 7"),
        ("RUNNER_TEMP", dir.to_str().unwrap()),
        ("GITHUB_ENV", "variables"),
        ("GITHUB_PATH", "path"),
    ];
    run(&action, &variables);
    let read = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();
    let lines = read("variables");
    for expected in [
        format!("LD_PRELOAD={expected}"),
        "RINGVERBS_EMBEDDED=roce,ib".to_owned(),
        "RINGVERBS_NAMES=rxe0,rxe1".to_owned(),
        "RINGVERBS_LINK=1Gbit,queue=64KiB".to_owned(),
        "RINGVERBS_SEED=7".to_owned(),
        format!("RINGVERBS_EXPLAIN={}", dir.join("why.txt").display()),
    ] {
        assert!(
            lines.lines().any(|line| line == expected),
            "{expected}: {lines}"
        );
    }
    let path = dir.canonicalize().unwrap();
    assert_eq!(Path::new(read("path").trim()), path);
    // With our provider, whose file is beside the command.
    std::fs::write(dir.join("libringverbs-rdmav34.so"), b"").unwrap();
    std::fs::remove_file(dir.join("variables")).unwrap();
    let mut ours = variables;
    ours[3].1 = "ringverbs";
    run(&action, &ours);
    assert!(read("variables").contains("RINGVERBS_DEVICES=mlx5\n"));
    // The same without a way to explain, and by a download.
    let mut variables = variables;
    (variables[0].1, variables[2].1) = ("", "");
    let url = format!("file://{}", dir.display());
    let machine = format!("ringverbs-{}", std::env::consts::ARCH);
    std::fs::copy(&command, dir.join(machine)).unwrap();
    std::fs::remove_file(dir.join("variables")).unwrap();
    let mut all = variables.to_vec();
    all.push(("RELEASE", &url));
    let temp = dir.join("temp");
    std::fs::create_dir_all(temp.join("ringverbs")).unwrap();
    std::fs::write(temp.join("ringverbs/libringverbs_preload.so"), b"").unwrap();
    all.push(("RUNNER_TEMP", temp.to_str().unwrap()));
    run(&action, &all);
    assert!(!read("variables").contains("EXPLAIN"));
    assert!(!read("variables").contains("RINGVERBS_DEVICES="));
    for (name, value, reason) in [
        (
            "PROVIDER",
            "mlx5",
            "::error::provider is libmlx5 or ringverbs, not mlx5",
        ),
        ("DEVICES", "card", "--embedded: there is no device \"card\""),
        ("DEVICES", "", "--embedded: there is no device \"\""),
        ("NAME", "a b", "--name: \"a b\" is no name"),
        ("OPTIONS", "--link fast", "--link"),
        ("OPTIONS", "--nonsense", "--nonsense"),
        ("OPTIONS", "* --", "unexpected argument '*'"),
        ("EXPLAIN", "nowhere/x", "--explain: "),
        (
            "COMMAND",
            "nowhere",
            "::error::ringverbs: there is no executable file nowhere",
        ),
        (
            "COMMAND",
            ".",
            "::error::ringverbs: there is no executable file .",
        ),
        (
            "COMMAND",
            "variables",
            "::error::ringverbs: there is no executable file variables",
        ),
    ] {
        let mut bad = vec![("NAME", ""), ("EXPLAIN", ""), ("OPTIONS", "")];
        let others = ours
            .iter()
            .filter(|it| !bad.iter().any(|known| known.0 == it.0));
        bad.extend(others.copied().collect::<Vec<_>>());
        let given = bad.iter_mut().find(|it| it.0 == name).unwrap();
        given.1 = value;
        refused(&action, &bad, reason);
    }
    let nowhere = format!("{url}/nowhere");
    all.push(("RELEASE", &nowhere));
    let reason = format!("::error::no command at {nowhere}: use the tag of a release");
    refused(&action, &all, &reason);
    let gitlab = script_in("examples/ci/gitlab.yml", "before_script:");
    let gitlab = gitlab.replace("/tmp/ringverbs", &command.display().to_string());
    let gitlab = format!("{gitlab}\necho $RINGVERBS_EMBEDDED");
    let source = format!("{url}/ringverbs-{}", std::env::consts::ARCH);
    let variables = [
        ("RINGVERBS_URL", source.as_str()),
        ("RINGVERBS_DEVICES_IN_SOFTWARE", "ib"),
    ];
    assert_eq!(run(&gitlab, &variables), "ib\n");
    for (name, value, reason) in [
        (
            "RINGVERBS_DEVICES_IN_SOFTWARE",
            "card",
            "--embedded: there is no device \"card\"",
        ),
        ("RINGVERBS_OPTIONS", "--link fast", "--link"),
        ("RINGVERBS_URL", &*nowhere, "nowhere"),
    ] {
        refused(
            &gitlab,
            &[&variables[..], &[(name, value)]].concat(),
            reason,
        );
    }
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn run_does_not_take_devices_for_a_program() {
    let output = run(&["run", "--embedded", "roce,ib", "--", "true"]);
    assert_eq!(output.status.code(), Some(1));
    let error = stderr(&output);
    assert!(error.contains("write --embedded=roce,ib"), "{error}");
}

#[test]
fn run_reports_a_limit_on_the_size_of_files() {
    let mut command = Command::new("sh");
    let command = command
        .args(["-c", "ulimit -f 100 && exec \"$0\" run --embedded -- true"])
        .arg(env!("CARGO_BIN_EXE_ringverbs"));
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = stderr(&output);
    assert!(
        error.contains("ulimit -f") && error.lines().count() == 1,
        "{error}"
    );
}

/// A copy of the command with a file beside it that stands for the library of embedded devices;
/// the loader ignores it.
struct Runner(PathBuf);

impl Runner {
    fn new(name: &str) -> Self {
        let name = format!("ringverbs-runner-{name}-{}", std::process::id());
        let runner = Self(std::env::temp_dir().join(name));
        std::fs::create_dir_all(&runner.0).unwrap();
        let command = runner.0.join("ringverbs");
        let built = env!("CARGO_BIN_EXE_ringverbs");
        // While a copy is written, another test's child may inherit its descriptor: then it cannot
        // be executed.
        if std::fs::hard_link(built, &command).is_err() {
            std::fs::copy(built, command).unwrap();
        }
        std::fs::write(runner.0.join("libringverbs_preload.so"), b"").unwrap();
        runner
    }

    /// Runs a script of the shell, which may write counts to its usage file.
    fn command(&self, options: &[&str], script: &str) -> Command {
        let mut command = Command::new(self.0.join("ringverbs"));
        let network = self.0.join("network");
        command
            .args(["run", "--embedded", "--directory"])
            .arg(network)
            .args(options)
            .args(["--", "sh", "-c", script])
            .env_remove("RINGVERBS_USAGE")
            .stdin(Stdio::null());
        command
    }

    /// Returns the exit status, and what the command said.
    fn run(&self, options: &[&str], script: &str) -> (Option<i32>, String) {
        let output = self.command(options, script).output().unwrap();
        let lines = stderr(&output);
        let own = lines.lines().filter(|line| line.starts_with("ringverbs:"));
        (output.status.code(), own.collect())
    }

    /// Asserts that nothing is left of the runs.
    fn finish(self) {
        let left = std::fs::read_dir(self.0.join("network")).unwrap().count();
        assert_eq!(left, 0);
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn run_reports_programs_without_rdma() {
    let runner = Runner::new("report");
    let nothing = "ringverbs: the program opened no RDMA device";
    let none: &[&str] = &[];
    assert_eq!(runner.run(none, ":"), (Some(0), nothing.into()));
    let required = ["--require-rdma"];
    assert_eq!(runner.run(&required, ":"), (Some(3), nothing.into()));
    let silent = ["--require-rdma=0"];
    assert_eq!(runner.run(&silent, ":"), (Some(0), String::new()));
    for options in [none, &required] {
        assert_eq!(runner.run(options, "exit 7"), (Some(7), String::new()));
    }
    // Two processes: an opened device each, 100 bytes sent, 260 received.
    let count = "dd bs=8 conv=notrunc of=$RINGVERBS_USAGE 2>/dev/null";
    let open = format!("printf '\\1\\0\\0\\0\\0\\0\\0\\0' | {count} seek=8");
    let both = format!(
        "{open}; printf '\\144\\0\\0\\0\\0\\0\\0\\0\\4\\1\\0\\0\\0\\0\\0\\0' | {count} seek=17"
    );
    let unused = "ringverbs: the program opened an RDMA device, but no byte went over it";
    assert_eq!(runner.run(none, &open), (Some(0), unused.into()));
    for (options, expected) in [
        (none, (Some(0), "")),
        (&required, (Some(0), "")),
        (&["--require-rdma=260"], (Some(0), "")),
        (
            &["--require-rdma=261"],
            (
                Some(3),
                "ringverbs: 260 bytes went over RDMA, fewer than 261",
            ),
        ),
    ] {
        let (code, said) = runner.run(options, &both);
        assert_eq!((code, &said[..]), expected, "{options:?}");
    }
    // The outer command counts for both.
    let inner = format!(
        "{} run --embedded -- true",
        runner.0.join("ringverbs").display()
    );
    assert_eq!(runner.run(none, &inner), (Some(0), nothing.into()));
    runner.finish();
}

#[test]
fn run_ends_as_its_program_does() {
    let runner = Runner::new("ends");
    let killed = runner.command(&[], "kill -9 $$").output().unwrap();
    assert_eq!(killed.status.signal(), Some(9), "{killed:?}");
    let start = |script: &str| {
        let mut child = runner
            .command(&[], script)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut said).unwrap();
        (child, said.trim().parse::<u32>().unwrap())
    };
    let signal = |name: &str, process: u32| {
        let kill = format!("kill -{name} {process}");
        assert!(
            Command::new("sh")
                .args(["-c", &kill])
                .status()
                .unwrap()
                .success()
        );
    };
    // Signals for the command reach the program.
    let (mut child, _) = start("trap 'exit 5' TERM; echo $$; while :; do sleep 0.05; done");
    signal("TERM", child.id());
    assert_eq!(child.wait().unwrap().code(), Some(5));
    let (mut child, _) = start("echo $$; exec sleep 100");
    // Not SIGINT, which programs in the background of a script ignore.
    signal("USR1", child.id());
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGUSR1));
    // The program does not outlive the command.
    let (mut child, program) = start("echo $$; exec sleep 100");
    signal("KILL", child.id());
    child.wait().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    let path = format!("/proc/{program}/cmdline");
    while std::fs::read(&path).is_ok_and(|words| !words.is_empty()) {
        assert!(Instant::now() < end, "process {program} is left");
        std::thread::sleep(Duration::from_millis(10));
    }
    // Its file is replaced by the next run.
    assert!(runner.0.join("network/usage-0").exists());
    assert_eq!(
        runner.run(&["--require-rdma=0"], ":"),
        (Some(0), String::new())
    );
    runner.finish();
}

/// Sequences that affect a terminal, and characters that mislead a reader.
const HOSTILE: &[u8] = b"h\x1b[2J\x1b]0;t\x07\n\x7f\xc2\x9b31m\xe2\x80\xae\xff";

/// Returns whether all characters but newlines are visible.
fn is_harmless(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return false;
    };
    let harmless =
        |c: char| c == '\n' || !c.is_control() && !('\u{202a}'..='\u{202e}').contains(&c);
    text.chars().all(harmless)
}

#[test]
fn foreign_text_is_escaped() {
    let string = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
    let text = string(HOSTILE.strip_suffix(b"\xff").unwrap());
    let not_utf8 = string(HOSTILE);
    let picture = string(&[HOSTILE, b".gif"].concat());
    let path = string(&[b"/nowhere/", HOSTILE].concat());
    let word = |text: &str| OsString::from(text);
    for args in [
        vec![text.clone()],
        vec![not_utf8.clone()],
        vec![word("info"), word("--device"), text.clone()],
        vec![word("info"), word("--json"), word("--device"), text.clone()],
        vec![word("info"), word("--port"), text.clone()],
        vec![word("pingpong"), word("--device"), text.clone()],
        vec![
            word("pingpong"),
            word("--json"),
            word("--device"),
            text.clone(),
        ],
        vec![word("perf"), word("--device"), text.clone()],
        vec![word("perf"), word("--sizes"), text.clone()],
        vec![word("perf"), word("--plot"), picture],
        vec![
            word("perf"),
            word("--device"),
            word("embedded"),
            text.clone(),
        ],
        vec![word("trace"), text.clone()],
        vec![
            word("run"),
            word("--plugin"),
            path.clone(),
            word("--"),
            word("true"),
        ],
        vec![word("run"), word("--"), path.clone()],
        vec![word("doctor")],
        vec![word("doctor"), word("--json")],
        vec![word("devices")],
        vec![word("devices"), word("--json")],
    ] {
        let mut command = ringverbs(&[]);
        let output = command
            .args(&args)
            .env("RDMAV_DRIVERS", &path)
            .env("IBV_DRIVERS", &text)
            .env("container", &text)
            .env("LD_LIBRARY_PATH", &path)
            .env("SYSFS_PATH", &path)
            .env("RINGVERBS_DEVICES", &not_utf8)
            .output()
            .unwrap();
        assert!(is_harmless(&output.stdout), "{args:?}: {output:?}");
        assert!(is_harmless(&output.stderr), "{args:?}: {output:?}");
    }
}

/// A preloaded library of the plugin's tests provides a device with a hostile name.
#[test]
fn device_names_are_escaped() {
    let dir = std::env::temp_dir().join(format!("ringverbs-names-{}", std::process::id()));
    let sys = dir.join("class/infiniband_verbs/uverbs0");
    std::fs::create_dir_all(&sys).unwrap();
    for (file, content) in [
        ("../abi_version", "6\n"),
        ("dev", "1:3\n"),
        ("abi_version", "1\n"),
        ("ibdev", "rxe\x1b[2J\u{202e}0\n"),
    ] {
        std::fs::write(sys.join(file), content).unwrap();
    }
    let object = dir.join("preload.so");
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../provider-plugin/tests/c/preload.c"
    );
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-fno-builtin", source, "-ldl", "-o"])
        .arg(&object);
    assert!(cc.status().expect("a C compiler (cc)").success());
    for args in [
        &["devices"][..],
        &["devices", "--json"],
        &["info"],
        &["doctor"],
        &["doctor", "--json"],
        &["pingpong", "--iters", "1"],
        &["perf", "--sizes", "8", "--iters", "1"],
    ] {
        let mut command = ringverbs(args);
        command.env("SYSFS_PATH", &dir).env("LD_PRELOAD", &object);
        let output = command.output().unwrap();
        let printed = [&output.stdout[..], &output.stderr].concat();
        assert!(is_harmless(&printed), "{args:?}: {output:?}");
        let printed = String::from_utf8(printed).unwrap();
        let text = printed.contains(r"rxe\u{1b}[2J\u{202e}0");
        let json = printed.contains(r"rxe\u001b[2J\u202e0");
        assert!(text || json, "{args:?}: {printed}");
    }
    std::fs::remove_dir_all(&dir).unwrap();
}
