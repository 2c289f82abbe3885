//! The devices are there, and polls drive them, however a program has loaded libibverbs.

#[macro_use]
mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::*;

/// Compiles a library of `c/`.
fn library(source: &str, name: &str, options: &[&str], world: &World) -> PathBuf {
    let to = world.directory.join(name);
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/c")
        .join(source);
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    let mut command = Command::new("cc");
    let command = command
        .args(["-shared", "-fPIC", "-o"])
        .arg(&to)
        .arg(source)
        .args(options);
    assert!(command.status().unwrap().success());
    to
}

/// Returns the file of the system's libibverbs.
fn system_libibverbs() -> PathBuf {
    let printed = Command::new("cc")
        .arg("-print-file-name=libibverbs.so")
        .output()
        .unwrap();
    let name = String::from_utf8(printed.stdout).unwrap();
    fs::canonicalize(name.trim()).unwrap()
}

fn loads_libibverbs(provider: Provider) {
    let world = World::new(provider, "roce");
    let Some(program) = compiled("cc", "loading.c", &["-ldl"], &world.directory) else {
        return;
    };
    let copy = world.directory.join("libverbs-0a1b2c3d.so");
    fs::copy(system_libibverbs(), &copy).unwrap();
    let caller = library(
        "caller.c",
        "libcaller.so",
        &["-Wl,-rpath,$ORIGIN/libs"],
        &world,
    );
    library("caller.c", "libs/libother-of-runpath.so", &[], &world);
    // Both have the same providers, which serve the copy that is loaded first.
    for name in [PathBuf::from("libibverbs.so.1"), copy] {
        let words = [&program, &name, &caller].map(|it| it.display().to_string());
        let said = world.start(&words.join(" "), "loading.txt").good();
        assert!(said.ends_with("well\n"), "{said}");
        assert!(
            said.contains("dlmopen of libibverbs.so.1 is refused"),
            "{said}"
        );
    }
    world.finish();
}

with_each_provider! {
    libibverbs_is_loaded_in_each_way: loads_libibverbs;
}

/// libibverbs and libmlx5 in the program: they serve it also where ours is asked for, which is
/// said.
#[test]
fn static_programs_have_devices() {
    let world = World::new(Provider::Stock, "roce");
    let libraries = [
        "-DRDMA_STATIC_PROVIDERS=mlx5",
        "-Wl,-Bstatic",
        "-lmlx5",
        "-libverbs",
        "-lmlx5",
        "-Wl,-Bdynamic",
        "-lnl-route-3",
        "-lnl-3",
        "-lpthread",
        "-ldl",
    ];
    let Some(program) = compiled("cc", "static.c", &libraries, &world.directory) else {
        return;
    };
    let said = |devices: Option<&str>, more: &[&str]| {
        let mut command = world.command(&program.display().to_string());
        command.args(more);
        if let Some(devices) = devices {
            command.env("RINGVERBS_DEVICES", devices);
        }
        let output = command.output().unwrap();
        assert_eq!(output.stdout, b"well\n", "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    // Alone, and with a second copy in the process.
    for more in [&[][..], &["libibverbs.so.1"]] {
        assert_eq!(said(None, more), "");
    }
    let name = format!(
        "ringverbs: {} serves the device, not ringverbs:",
        program.display()
    );
    let reported = said(Some("rxe,mlx5"), &[]);
    assert!(
        reported.starts_with(&name) && reported.lines().count() == 1,
        "{reported}"
    );
    world.finish();
}
