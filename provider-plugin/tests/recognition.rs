//! The plugin against libraries that look like libibverbs of every release.
//!
//! Each is compiled here from `c/fake_libibverbs.c` with the layout, symbol
//! versions and file name of a release, and loaded with RTLD_LOCAL.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::fake::Fake;
use common::{Dir, HERE, cc, plugin};

struct TestProgram {
    dir: Dir,
    program: PathBuf,
    plugin: PathBuf,
}

impl TestProgram {
    fn new(name: &str) -> TestProgram {
        let dir = Dir::new(name);
        let program = dir.0.join("program");
        cc(&[
            "-O1",
            "-Wall",
            "-o",
            program.to_str().unwrap(),
            &format!("{HERE}/tests/c/program.c"),
            "-rdynamic",
            "-ldl",
        ]);
        TestProgram {
            dir,
            program,
            plugin: plugin(),
        }
    }

    /// The plugin with the file name that a libibverbs of a private ABI loads.
    fn plugin_as(&self, pabi: u32) -> PathBuf {
        let link = self.dir.0.join(format!("libringverbs-rdmav{pabi}.so"));
        if !link.exists() {
            std::os::unix::fs::symlink(&self.plugin, &link).unwrap();
        }
        link
    }

    fn command(&self, mode: &str, plugin: &Path, libraries: &[&Path]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg(mode).arg(plugin).args(libraries);
        for variable in ["RINGVERBS_LOG", "VERBS_LOG_LEVEL", "RINGVERBS_RDMA_CORE"] {
            command.env_remove(variable);
        }
        // The fake device is one of rdma_rxe.
        command.env("RINGVERBS_DEVICES", "rxe");
        command
    }

    fn run(&self, mode: &str, plugin: &Path, libraries: &[&Path]) -> Run {
        let mut command = self.command(mode, plugin, libraries);
        Run(command.output().unwrap())
    }
}

struct Run(Output);

impl Run {
    fn out(&self) -> String {
        String::from_utf8_lossy(&self.0.stdout).into_owned()
    }

    fn err(&self) -> String {
        String::from_utf8_lossy(&self.0.stderr).into_owned()
    }

    /// Asserts registration with the n-th library only, without output on stderr.
    fn assert_registered(&self, with: usize) {
        assert!(self.0.status.success(), "{}{}", self.out(), self.err());
        for (i, line) in self
            .out()
            .lines()
            .filter(|l| l.contains("registrations"))
            .enumerate()
        {
            let expected = format!(": {} registrations", u32::from(i == with));
            assert!(line.ends_with(&expected), "{}{}", self.out(), self.err());
        }
        assert_eq!(self.err(), "");
    }

    /// Asserts no registration, and one line on stderr that contains each of `what`.
    fn assert_refused(&self, what: &[&str]) {
        assert!(self.0.status.success(), "{}{}", self.out(), self.err());
        assert!(self.out().contains(": 0 registrations"), "{}", self.out());
        assert!(!self.out().contains(": 1 registrations"), "{}", self.out());
        let err = self.err();
        assert_eq!(err.lines().count(), 1, "one line: {err}");
        for what in what {
            assert!(err.contains(what), "no {what:?} in {err}");
        }
    }
}

#[test]
fn every_release_is_recognised_and_its_control_path_works() {
    let bench = TestProgram::new("every");
    for release in [
        34, 35, 36, 40, 43, 44, 45, 48, 49, 56, 57, 58, 59, 61, 62, 63, 64, 65,
    ] {
        let fake = Fake::of(release);
        let library = fake.build(&bench.dir.0);
        let run = bench.run("control", &bench.plugin_as(fake.pabi), &[&library]);
        run.assert_registered(0);
        assert!(
            run.out().contains("control path ok"),
            "release {release}: {}",
            run.err()
        );
    }
}

#[test]
fn unversioned_file_is_recognised_but_for_the_newest_private_abi() {
    let bench = TestProgram::new("unnamed");
    for release in [34, 35, 36, 37, 43, 44, 45, 48, 49, 56, 57, 59, 62, 64, 65] {
        let fake = Fake {
            name: Some("libibverbs.so.1".to_owned()),
            ..Fake::of(release)
        };
        let library = fake.build(&bench.dir.0);
        let run = bench.run("load", &bench.plugin_as(fake.pabi), &[&library]);
        match release {
            65 => run.assert_refused(&["libibverbs.so.1 ", "IBVERBS_PRIVATE_65", "or later"]),
            _ => run.assert_registered(0),
        }
    }
}

#[test]
fn package_or_user_names_the_release_of_an_unversioned_file() {
    let bench = TestProgram::new("vouched");
    let build = |package: Option<&'static str>| {
        Fake {
            name: Some("libibverbs.so.1".to_owned()),
            package,
            ..Fake::of(65)
        }
        .build(&bench.dir.0.join(package.unwrap_or("none")))
    };
    let vouch = |library: &Path, release: &str| {
        let mut command = bench.command("load", &bench.plugin_as(65), &[library]);
        Run(command
            .env("RINGVERBS_RDMA_CORE", release)
            .output()
            .unwrap())
    };
    let by_package = build(Some("65.0-1.fc43"));
    bench
        .run("load", &bench.plugin_as(65), &[&by_package])
        .assert_registered(0);
    vouch(&by_package, "64").assert_refused(&["package of rdma-core 65"]);
    let later = build(Some("66.0-1"));
    bench
        .run("load", &bench.plugin_as(65), &[&later])
        .assert_refused(&["rdma-core 66"]);
    let plain = build(None);
    vouch(&plain, "65").assert_registered(0);
    vouch(&plain, "64").assert_refused(&["RINGVERBS_RDMA_CORE says rdma-core 64", "65 to 65"]);
    vouch(&plain, "66").assert_refused(&["RINGVERBS_RDMA_CORE says rdma-core 66"]);
    vouch(&plain, "newest").assert_refused(&["RINGVERBS_RDMA_CORE=newest"]);
}

#[test]
fn caller_is_recognised_under_any_name() {
    let bench = TestProgram::new("renamed");
    let fake = Fake {
        name: Some("bundled-verbs.so".to_owned()),
        ..Fake::of(57)
    };
    let library = fake.build(&bench.dir.0);
    bench
        .run("load", &bench.plugin_as(57), &[&library])
        .assert_registered(0);
}

#[test]
fn caller_is_chosen_among_two_libraries() {
    let bench = TestProgram::new("two");
    let old = Fake::of(44).build(&bench.dir.0);
    let new = Fake::of(65).build(&bench.dir.0);
    bench
        .run("load", &bench.plugin_as(44 - 10), &[&old, &new])
        .assert_registered(0);
    bench
        .run("load", &bench.plugin_as(65), &[&new, &old])
        .assert_registered(0);
    // Loaded by neither: with one library it is clear, with two it is not.
    bench
        .run("direct", &bench.plugin_as(65), &[&new])
        .assert_registered(0);
    bench
        .run("direct", &bench.plugin, &[&new, &old])
        .assert_refused(&["neither is the caller"]);
}

#[test]
fn unknown_and_contradictory_libraries_are_refused() {
    let bench = TestProgram::new("refused");
    let build = |release, pabi, name: Option<&str>| {
        Fake {
            release,
            pabi,
            name: name.map(str::to_owned),
            ..Fake::of(release)
        }
        .build(&bench.dir.0)
    };
    // A private ABI before and after those of the table.
    let library = build(65, 66, Some("libibverbs.so.1.19.66.0"));
    bench
        .run("load", &bench.plugin_as(66), &[&library])
        .assert_refused(&["libibverbs.so.1.19.66.0", "IBVERBS_PRIVATE_66"]);
    let library = build(34, 33, Some("libibverbs.so.1.11.33.0"));
    bench
        .run("load", &bench.plugin_as(33), &[&library])
        .assert_refused(&["IBVERBS_PRIVATE_33"]);
    // A later release with the newest private ABI that is known.
    let library = build(65, 65, Some("libibverbs.so.1.18.66.0"));
    bench
        .run("load", &bench.plugin_as(65), &[&library])
        .assert_refused(&["66"]);
    // Symbols of one release in the file of another.
    let library = build(50, 34, Some("libibverbs.so.1.14.44.0"));
    bench
        .run("load", &bench.plugin_as(34), &[&library])
        .assert_refused(&["rdma-core 44", "49"]);
    // Functions that the private ABI cannot have.
    let library = build(62, 57, Some("libibverbs.so.1.16.62.1"));
    bench
        .run("load", &bench.plugin_as(57), &[&library])
        .assert_refused(&["contradict"]);
    // A vendor's version.
    let library = build(49, 34, Some("libibverbs.so.1.14.2410mlnx54"));
    bench
        .run("load", &bench.plugin_as(34), &[&library])
        .assert_refused(&["2410mlnx54"]);
    // The wrong one of our names.
    let library = Fake::of(61).build(&bench.dir.0);
    bench
        .run("load", &bench.plugin_as(34), &[&library])
        .assert_refused(&["IBVERBS_PRIVATE_59", "private ABI 34"]);
}

#[test]
fn diagnostics_are_written_where_asked() {
    let bench = TestProgram::new("diag");
    let library = Fake::of(60).build(&bench.dir.0);
    let log = bench.dir.0.join("log");
    let output = bench
        .command("control", &bench.plugin_as(59), &[&library])
        .env("RINGVERBS_LOG", "debug")
        .env("RINGVERBS_LOG_FILE", &log)
        .output()
        .unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
    let log = fs::read_to_string(log).unwrap();
    assert!(
        log.contains("registered with libibverbs layout=rdma-core 59 to 61 pabi=59"),
        "{log}"
    );
    assert!(log.lines().all(|l| l.starts_with("ringverbs ")), "{log}");
}

#[test]
fn layout_mismatch_is_detected_on_open() {
    let bench = TestProgram::new("layout-mismatch");
    for (release, ops_of, context_of) in [
        (57, 57, 62), // verbs_context grew
        (64, 64, 58), // or shrank
        (57, 59, 57), // operations were inserted
        (65, 64, 65), // or are missing
    ] {
        let fake = Fake {
            ops_of,
            context_of,
            ..Fake::of(release)
        };
        let dir = bench.dir.0.join(format!("{ops_of}-{context_of}"));
        let library = fake.build(&dir);
        let run = bench.run("layout-mismatch", &bench.plugin_as(fake.pabi), &[&library]);
        assert!(run.0.status.success(), "{}{}", run.out(), run.err());
        assert!(run.out().contains(": 1 registrations"), "{}", run.out());
        assert!(run.out().contains("refused"), "{ops_of} {context_of}");
        assert_eq!(run.err().lines().count(), 1, "one line: {}", run.err());
        let structure = if context_of == release {
            "verbs_context_ops"
        } else {
            "verbs_context"
        };
        let line = format!("ringverbs: device not opened: {structure} is not that of ");
        assert!(run.err().starts_with(&line), "{}", run.err());
    }
}
