//! The plugin against libraries that look like libibverbs of every release.
//!
//! Each is compiled here from `c/fake_libibverbs.c` with the layout, symbol
//! versions and file name of a release, and loaded with RTLD_LOCAL.

mod common;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{Dir, HERE, cc, plugin};

const DATA: &str = include_str!("data/rdma-core-layouts.txt");

/// What the headers of a sampled release say.
struct Sample {
    pabi: u32,
    releases: Vec<u32>,
    ops: Vec<&'static str>,
    context_offset: usize,
}

fn samples() -> Vec<Sample> {
    let mut out: Vec<Sample> = Vec::new();
    let mut current = "";
    for line in DATA.lines().filter(|l| !l.starts_with('#')) {
        let words: Vec<&'static str> = line.split(' ').collect();
        match (words[0], current) {
            ("layout", _) => {
                let releases = words[2..].iter().map(|r| r.split('.').next().unwrap());
                out.push(Sample {
                    pabi: words[1].parse().unwrap(),
                    releases: releases.map(|r| r.parse().unwrap()).collect(),
                    ops: Vec::new(),
                    context_offset: 0,
                });
            }
            ("struct", _) => current = words[1],
            (_, "verbs_context_ops") => out.last_mut().unwrap().ops.push(words[2]),
            (offset, "verbs_context") if words[2] == "context" => {
                out.last_mut().unwrap().context_offset = offset.parse().unwrap();
            }
            _ => {}
        }
    }
    out
}

/// The layout of a release: that of the newest sample that is not newer.
fn sample_of(release: u32) -> Sample {
    samples()
        .into_iter()
        .rev()
        .find(|s| s.releases[0] <= release)
        .unwrap()
}

/// What a fake library is made to look like.
struct Fake {
    release: u32,
    pabi: u32,
    /// File name; the release's own if none.
    name: Option<String>,
    /// Release whose operations it really has.
    ops_of: u32,
    /// Release whose verbs_context it really has.
    context_of: u32,
}

fn minor(release: u32) -> u32 {
    match release {
        ..=34 => 12,
        35 => 13,
        36..=58 => 14,
        59..=61 => 15,
        62..=63 => 16,
        64 => 17,
        _ => 18,
    }
}

impl Fake {
    fn of(release: u32) -> Fake {
        Fake {
            release,
            pabi: sample_of(release).pabi,
            name: None,
            ops_of: release,
            context_of: release,
        }
    }

    fn build(&self, dir: &Path) -> PathBuf {
        let dir = dir.join(format!("fake-{}-{}", self.release, self.pabi));
        fs::create_dir_all(&dir).unwrap();
        let mut ops = String::from("static const char *const op_names[] = {\n");
        for op in &sample_of(self.ops_of).ops {
            writeln!(ops, "\t\"{op}\",").unwrap();
        }
        ops.push_str("};\n");
        fs::write(dir.join("ops.h"), ops).unwrap();

        let public = [
            (35, "1.13", "ibv_import_dm"),
            (36, "1.14", "ibv_query_qp_data_in_order"),
            (59, "1.15", "ibv_alloc_dmah"),
            (62, "1.16", "ibv_dm_export_dmabuf_fd"),
            (64, "1.17", "ibv_alloc_buf"),
            (65, "1.18", "ibv_create_comp_cntr"),
        ];
        let mut map = String::from("IBVERBS_1.0 { global: fake_*; local: *; };\n");
        for (_, version, name) in public.iter().filter(|m| m.0 <= self.release) {
            writeln!(map, "IBVERBS_{version} {{ global: {name}; }};").unwrap();
        }
        let mut private = String::from(
            "_verbs_init_and_alloc_context; verbs_set_ops; verbs_uninit_context; \
             verbs_allow_disassociate_destroy; ",
        );
        for (_, name) in [(37, "__verbs_log"), (49, "ibv_wr_opcode_str")]
            .iter()
            .filter(|m| m.0 <= self.release)
        {
            write!(private, "{name}; ").unwrap();
        }
        let pabi = self.pabi;
        writeln!(
            map,
            "IBVERBS_PRIVATE_{pabi} {{ global: {private} verbs_register_driver_{pabi}; }};"
        )
        .unwrap();
        fs::write(dir.join("map"), map).unwrap();

        let own_name = format!("libibverbs.so.1.{}.{}.0", minor(self.release), self.release);
        let library = dir.join(self.name.as_ref().unwrap_or(&own_name));
        cc(&[
            "-shared",
            "-fPIC",
            "-O1",
            "-Wall",
            &format!("-DPABI={pabi}"),
            &format!("-DRELEASE={}", self.release),
            &format!(
                "-DCONTEXT_OFFSET={}",
                sample_of(self.context_of).context_offset
            ),
            &format!("-I{}", dir.display()),
            &format!("-Wl,--version-script={}", dir.join("map").display()),
            "-Wl,-soname,libibverbs.so.1",
            "-o",
            library.to_str().unwrap(),
            &format!("{HERE}/tests/c/fake_libibverbs.c"),
            "-ldl",
        ]);
        library
    }
}

struct Bench {
    dir: Dir,
    program: PathBuf,
    plugin: PathBuf,
}

impl Bench {
    fn new(name: &str) -> Bench {
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
        Bench {
            dir,
            program,
            plugin: plugin(),
        }
    }

    /// The plugin under the name that a libibverbs of a private ABI asks for.
    fn plugin_as(&self, pabi: u32) -> PathBuf {
        let link = self.dir.0.join(format!("libringverbs-rdmav{pabi}.so"));
        if !link.exists() {
            std::os::unix::fs::symlink(&self.plugin, &link).unwrap();
        }
        link
    }

    fn run(&self, mode: &str, plugin: &Path, libraries: &[&Path]) -> Run {
        let mut command = Command::new(&self.program);
        command
            .arg(mode)
            .arg(plugin)
            .args(libraries)
            .env_remove("RINGVERBS_LOG");
        Run(command.env_remove("VERBS_LOG_LEVEL").output().unwrap())
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

    /// Registered with the n-th library, silently, and with no other.
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

    /// Not registered, and one line that says each of `what`.
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
    let bench = Bench::new("every");
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
fn a_copy_without_a_version_in_its_name_is_recognised_where_that_is_certain() {
    let bench = Bench::new("unnamed");
    for release in [34, 35, 36, 37, 43, 44, 45, 48, 49, 56, 57, 59, 62, 64, 65] {
        let fake = Fake {
            name: Some("libibverbs.so.1".to_owned()),
            ..Fake::of(release)
        };
        let library = fake.build(&bench.dir.0);
        let run = bench.run("load", &bench.plugin_as(fake.pabi), &[&library]);
        match release {
            37..=48 => run.assert_refused(&["libibverbs.so.1 ", "IBVERBS_PRIVATE_34", "37 to 48"]),
            65 => run.assert_refused(&["IBVERBS_PRIVATE_65", "or later"]),
            _ => run.assert_registered(0),
        }
    }
}

#[test]
fn the_library_may_have_any_name_if_it_is_the_caller() {
    let bench = Bench::new("renamed");
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
fn of_two_libraries_the_caller_is_the_one() {
    let bench = Bench::new("two");
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
    let bench = Bench::new("refused");
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
    let bench = Bench::new("diag");
    let library = Fake::of(60).build(&bench.dir.0);
    let log = bench.dir.0.join("log");
    let output = Command::new(&bench.program)
        .arg("control")
        .arg(bench.plugin_as(59))
        .arg(&library)
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
fn a_library_that_is_not_what_its_symbols_say_is_noticed_before_any_harm() {
    let bench = Bench::new("mislaid");
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
        let run = bench.run("mislaid", &bench.plugin_as(fake.pabi), &[&library]);
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
