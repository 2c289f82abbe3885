//! The plugin preloaded: into programs that are linked to another provider, to
//! a libibverbs alone, or to neither.

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::fake::Fake;
use common::{Dir, HERE, cc, plugin};

/// A libibverbs, and programs that are linked to it.
struct Library {
    dir: PathBuf,
    fake: Fake,
}

impl Library {
    fn new(dir: &Dir, fake: Fake) -> Library {
        let library = fake.build(&dir.0);
        let dir = library.parent().unwrap().to_owned();
        symlink(&library, dir.join("libibverbs.so.1")).unwrap();
        Library { dir, fake }
    }

    fn cc(&self, output: &str, arguments: &[&str]) -> PathBuf {
        let output = self.dir.join(output);
        let dir = self.dir.display();
        let mut all = vec![
            "-O2".to_owned(),
            format!("-DPABI={}", self.fake.pabi),
            "-o".to_owned(),
            output.display().to_string(),
        ];
        all.extend(arguments.iter().map(|&a| a.to_owned()));
        all.extend([
            format!("-Wl,-rpath,{dir}"),
            self.dir.join("libibverbs.so.1").display().to_string(),
        ]);
        cc(&all.iter().map(String::as_str).collect::<Vec<_>>());
        output
    }

    /// Builds a provider with a name.
    fn provider(&self, name: &str) -> PathBuf {
        let source = format!("{HERE}/tests/c/provider.c");
        let define = format!("-DNAME=\"{name}\"");
        self.cc(
            &format!("{name}.so"),
            &["-shared", "-fPIC", &define, &source],
        )
    }

    /// A program that is linked to these.
    fn program(&self, provider: Option<&Path>) -> PathBuf {
        let source = format!("{HERE}/tests/c/linked.c");
        match provider {
            Some(provider) => {
                let provider = provider.to_str().unwrap();
                self.cc("linked", &["-DPROVIDER", &source, provider])
            }
            None => self.cc("alone", &[&source]),
        }
    }

    /// The plugin's file, under the name that a libibverbs of that private ABI
    /// would ask for.
    fn plugin(&self, pabi: u32) -> PathBuf {
        let link = self.dir.join(format!("libringverbs-rdmav{pabi}.so"));
        if !link.exists() {
            symlink(plugin(), &link).unwrap();
        }
        link
    }
}

fn command(program: impl AsRef<Path>, preload: Option<&Path>) -> Command {
    let mut command = Command::new(program.as_ref());
    command
        .env("RINGVERBS_DEVICES", "mlx5")
        .env_remove("LD_PRELOAD")
        .env_remove("RINGVERBS_LOG")
        .env_remove("VERBS_LOG_LEVEL");
    if let Some(plugin) = preload {
        command.env("LD_PRELOAD", plugin);
    }
    command
}

/// The registered providers, in order. Asserts an empty stderr.
fn registered(mut command: Command) -> Vec<String> {
    let output = command.output().unwrap();
    assert_eq!(text(&output.stderr), "");
    assert!(output.status.success());
    text(&output.stdout).lines().map(str::to_owned).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn preloaded_plugin_precedes_linked_providers() {
    let dir = Dir::new("linked");
    for release in [34, 35, 44, 48, 56, 58, 61, 63, 64, 65] {
        let bench = Library::new(&dir, Fake::of(release));
        let program = bench.program(Some(&bench.provider("its-own")));
        let alone = bench.program(None);
        assert_eq!(registered(command(&program, None)), ["its-own"]);
        // Nobody has asked for the name, so it says nothing.
        for name in [bench.fake.pabi, 34] {
            let plugin = bench.plugin(name);
            assert_eq!(
                registered(command(&program, Some(&plugin))),
                ["ringverbs-mlx5", "its-own"],
                "release {release}"
            );
            assert_eq!(
                registered(command(&alone, Some(&plugin))),
                ["ringverbs-mlx5"],
                "release {release}"
            );
        }
    }
}

#[test]
fn every_provider_is_registered_once() {
    let dir = Dir::new("once");
    let bench = Library::new(&dir, Fake::of(56));
    let plugin = bench.plugin(34);
    let others = [bench.provider("one"), bench.provider("two")];
    // As RDMAV_DRIVERS and the configuration would have them loaded.
    let run = |program: PathBuf| {
        let mut command = command(program, Some(&plugin));
        command.arg(&plugin).args(&others);
        registered(command)
    };
    assert_eq!(
        run(bench.program(Some(&bench.provider("its-own")))),
        ["ringverbs-mlx5", "its-own", "one", "two"]
    );
    // Linked to libibverbs alone: as it begins.
    let alone = bench.program(None);
    assert_eq!(
        registered(command(&alone, Some(&plugin))),
        ["ringverbs-mlx5"]
    );
    assert_eq!(run(alone), ["ringverbs-mlx5", "one", "two"]);
}

#[test]
fn local_load_does_not_interpose() {
    let dir = Dir::new("local");
    let bench = Library::new(&dir, Fake::of(65));
    let mut command = command(bench.program(None), None);
    command
        .arg(bench.provider("one"))
        .arg(bench.plugin(65))
        .arg(bench.provider("two"));
    assert_eq!(registered(command), ["one", "ringverbs-mlx5", "two"]);
}

#[test]
fn other_providers_stay_after_a_refusal() {
    let dir = Dir::new("unknown");
    let fake = Fake {
        name: Some("libibverbs.so.1.18.66.0".to_owned()),
        ..Fake::of(65)
    };
    let bench = Library::new(&dir, fake);
    let program = bench.program(Some(&bench.provider("its-own")));
    let output: Output = command(&program, Some(&bench.plugin(65)))
        .arg(bench.provider("one"))
        .output()
        .unwrap();
    assert_eq!(text(&output.stdout), "its-own\none\n");
    let said = text(&output.stderr);
    assert_eq!(said.lines().count(), 1, "one line: {said}");
    assert!(
        said.starts_with("ringverbs: not registered") && said.contains("66"),
        "{said}"
    );
}

#[test]
fn program_without_libibverbs_is_unaffected() {
    let plugin = plugin();
    let output = command("sh", Some(&plugin))
        .args(["-c", "ls / > /dev/null; echo done"])
        .output()
        .unwrap();
    assert!(output.status.success());
    assert_eq!(
        (text(&output.stdout), text(&output.stderr)),
        ("done\n".into(), String::new())
    );

    // Such a program may load one later, in a scope of its own.
    let dir = Dir::new("later");
    let bench = Library::new(&dir, Fake::of(59));
    let program = dir.0.join("program");
    let source = format!("{HERE}/tests/c/program.c");
    cc(&[
        "-rdynamic",
        "-o",
        program.to_str().unwrap(),
        &source,
        "-ldl",
    ]);
    let mut command = command(&program, Some(&plugin));
    command
        .arg("load")
        .arg(bench.provider("one"))
        .arg(bench.dir.join("libibverbs.so.1"));
    let said = registered(command);
    assert!(said[0].ends_with(": 2 registrations"), "{said:?}");
}

/// With the libibverbs and the libmlx5 of this system, on the stand-in for
/// mlx5's driver.
#[test]
fn a_program_that_is_linked_to_libmlx5_is_served() {
    if !Path::new("/usr/include/infiniband/mlx5dv.h").exists()
        || !Path::new("/etc/libibverbs.d/mlx5.driver").exists()
    {
        let packages = "libibverbs-dev ibverbs-providers";
        return testing::skip!(missing: packages, "no mlx5dv.h, or no libmlx5");
    }
    let dir = Dir::new("libmlx5");
    let path = |name: &str| dir.0.join(name).display().to_string();
    let (stand_in, linked, alone) = (path("standin.so"), path("linked"), path("alone"));
    let source = format!("{HERE}/bench/mlx5_standin.c");
    cc(&[
        "-std=gnu11",
        "-fPIC",
        "-shared",
        "-fvisibility=hidden",
        "-o",
        &stand_in,
        &source,
    ]);
    let source = format!("{HERE}/tests/c/opens.c");
    cc(&[
        "-DLINKED",
        "-o",
        &linked,
        &source,
        "-lmlx5",
        "-libverbs",
        "-ldl",
    ]);
    cc(&["-o", &alone, &source, "-libverbs", "-ldl"]);
    for (file, content) in [
        ("infiniband_verbs/abi_version", "6\n"),
        ("infiniband_verbs/uverbs0/dev", "1:3\n"),
        ("infiniband_verbs/uverbs0/ibdev", "mlx5_0\n"),
        ("infiniband_verbs/uverbs0/abi_version", "1\n"),
        ("infiniband/mlx5_0/node_type", "1: CA\n"),
        (
            "infiniband/mlx5_0/device/modalias",
            "pci:v000015B3d0000101Dsv000015B3sd00000001bc02sc07i00\n",
        ),
    ] {
        let file = dir.0.join("sys/class").join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
    }
    let name = path("libringverbs");
    for pabi in [34, 57, 59, 64, 65] {
        symlink(plugin(), format!("{name}-rdmav{pabi}.so")).unwrap();
    }
    /// `RINGVERBS_DEVICES` unset.
    const DEFAULT: &str = "default";
    let run = |program: &str, devices: &str, preload: bool, named: bool| {
        let mut command = Command::new(program);
        let mut before = stand_in.clone();
        if preload {
            before = format!("{before} {name}-rdmav34.so");
        }
        command
            .env("LD_PRELOAD", before)
            .env("SYSFS_PATH", path("sys"))
            .env("RINGVERBS_DEVICES", devices)
            .env_remove("RINGVERBS_LOG")
            .env_remove("IBV_DRIVERS")
            .env_remove("RDMAV_DRIVERS");
        if devices == DEFAULT {
            command.env_remove("RINGVERBS_DEVICES");
        }
        if named {
            command.env("RDMAV_DRIVERS", &name);
        }
        let output = command.output().unwrap();
        (text(&output.stdout), text(&output.stderr))
    };
    let (said, refused) = run(&alone, "mlx5", false, true);
    if refused.contains("ringverbs: not registered") {
        return testing::skip!("this libibverbs is not a known one: {refused}");
    }
    assert!(said.contains("libringverbs-rdmav"), "{said}{refused}");
    let check = |program: &str, devices: &str, preload: bool, named: bool, who: &str| {
        let (said, errors) = run(program, devices, preload, named);
        assert!(
            said.contains(who),
            "{devices} {preload} {named}: {said}{errors}"
        );
        assert_eq!(errors, "");
        if program == linked {
            assert!(said.contains("mlx5dv: 1"), "{said}");
            assert!(said.contains("query: 0, 1 offered"), "{said}");
            assert!(!said.contains("beyond"), "{said}");
        }
    };
    check(&linked, "mlx5", false, true, "libmlx5");
    check(&linked, "mlx5", true, true, "libringverbs-rdmav");
    check(&linked, "mlx5", true, false, "libringverbs-rdmav");
    check(&alone, "mlx5", true, false, "libringverbs-rdmav");
    check(&alone, DEFAULT, false, true, "libringverbs-rdmav");
    check(&linked, DEFAULT, true, false, "libringverbs-rdmav");
    check(&linked, DEFAULT, false, true, "libmlx5");
    // What it is not to serve stays with the stock provider, and the question too.
    check(&linked, "rxe", true, true, "libmlx5");
    check(&alone, "rxe", true, true, "libmlx5");
}
