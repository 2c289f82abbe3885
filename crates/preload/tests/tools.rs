//! The devices work in programs that are compiled with sanitizers, or run by debuggers and
//! tracers, with the option that docs/embedded.md names.
//!
//! Skipped where a tool is not installed: `apt-get install gdb strace valgrind rr`.

#[macro_use]
mod common;

use std::path::PathBuf;
use std::process::Command;

use common::*;

const LIBRARIES: [&str; 2] = ["-libverbs", "-lpthread"];

/// Compiles the program with a further option.
fn program(world: &World, option: &str) -> Option<PathBuf> {
    let options = [&LIBRARIES[..], &["-g", option]].concat();
    compiled("cc", "instrumented.c", &options, &world.directory)
}

/// Runs a command; returns what it has printed.
fn run(command: &mut Command) -> (bool, String) {
    let output = command.output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (output.status.success(), said)
}

/// Returns the library of a sanitizer.
fn runtime(name: &str) -> String {
    let option = format!("-print-file-name={name}");
    let output = Command::new("cc").arg(option).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

/// Its kernel has a memory layout that this version of the sanitizer does not know.
fn is_unusable(said: &str) -> bool {
    let unusable = said.contains("unexpected memory mapping");
    if unusable {
        testing::skip!("the thread sanitizer of this compiler does not run on this kernel");
    }
    unusable
}

fn sanitizers(provider: Provider) {
    let world = World::new(provider, "roce");
    for (name, library, option) in [
        ("address", "libasan.so", "verify_asan_link_order=0"),
        ("thread", "libtsan.so", "ignore_noninstrumented_modules=1"),
        ("undefined", "", ""),
    ] {
        let Some(program) = program(&world, &format!("-fsanitize={name}")) else {
            return;
        };
        // The runtime of gcc is a library, which may precede the others instead.
        for is_first in [false, true] {
            let mut command = world.command(&program.display().to_string());
            command
                .env("ASAN_OPTIONS", option)
                .env("TSAN_OPTIONS", option);
            if is_first {
                let preload = command.get_envs().find(|(name, _)| *name == "LD_PRELOAD");
                let preload = preload.unwrap().1.unwrap().to_str().unwrap();
                let preload = format!("{}:{preload}", runtime(library));
                command.env("LD_PRELOAD", preload);
                if name == "address" {
                    command.env_remove("ASAN_OPTIONS");
                }
            }
            let (_, said) = run(&mut command);
            if !is_unusable(&said) {
                assert_eq!(said, "well\n", "{name}, first {is_first}");
            }
            if library.is_empty() {
                break;
            }
        }
    }
    world.finish();
}

/// Returns whether rr runs a program without the devices.
fn records_programs(world: &World) -> bool {
    let trace = world.directory.join("trace-of-true");
    let mut command = Command::new("rr");
    command.args(["record", "--output-trace-dir"]).arg(trace);
    run(command.arg("true")).0
}

fn debuggers(provider: Provider) {
    let world = World::new(provider, "roce");
    let Some(program) = program(&world, "-O0") else {
        return;
    };
    let program = program.display().to_string();
    let trace = world.directory.join("trace");
    let trace = trace.to_str().unwrap();
    let step = ["-ex", "break sends", "-ex", "run", "-ex", "next"];
    let gdb = [
        &["gdb", "-q", "-batch"][..],
        &step,
        &["-ex", "continue", &program],
    ];
    let rr = ["rr", "record", "--output-trace-dir", trace, &program];
    for words in [
        &gdb.concat()[..],
        &["strace", "-f", "-o", trace, &program],
        &["valgrind", "-q", "--error-exitcode=9", &program],
        &rr,
    ] {
        if !installed(&words[..1]) {
            continue;
        }
        if words[0] == "rr" && !records_programs(&world) {
            testing::skip!("this version of rr does not run programs on this processor");
            continue;
        }
        let (succeeded, said) = run(world.command(words[0]).args(&words[1..]));
        assert!(succeeded && said.contains("well\n"), "{words:?}: {said}");
    }
    world.finish();
}

with_each_provider! {
    sanitizers_find_nothing: sanitizers;
    debuggers_and_tracers_run_programs: debuggers;
}
