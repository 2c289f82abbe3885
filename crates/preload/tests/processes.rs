//! Processes that fork, close all descriptors, become daemons, are killed, or find a full
//! directory, on embedded devices, with rdma-core's provider and with ours.

#[macro_use]
mod common;

use std::env;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use embedded::FileSizeLimit;
use testing::hosts::free_port;

/// A world with the compiled program.
fn world(provider: Provider) -> Option<(World, PathBuf)> {
    let world = World::new(provider, "roce");
    let libraries = ["-libverbs", "-lpthread"];
    let program = compiled("cc", "processes.c", &libraries, &world.directory)?;
    Some((world, program))
}

fn modes(provider: Provider) {
    let _turn = turn();
    let Some((world, program)) = world(provider) else {
        return;
    };
    for mode in [
        "use",
        "fork",
        "fork-first",
        "fork-init",
        "vfork",
        "close-range",
        "close-each",
        "close-from",
        "close-range-number",
        "close-each-number",
        "close-unseen",
        "close-standard",
        "unmap",
        "unmap-fault",
        "numbers",
        "signals",
        "threads",
        "threads-fork",
    ] {
        let line = format!("{} {mode}", program.display());
        world.start(&line, "mode.txt").good();
    }
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = World::new(provider, String::leak(format!("roce:127.199.{high}.{low}")));
    let numbers = format!("{} numbers", program.display());
    host.start(&numbers, "mode.txt").good();
    host.finish();
    let limited = format!("prlimit --nofile=64 {} no-descriptors", program.display());
    if installed(&["prlimit"]) {
        world.start(&limited, "mode.txt").good();
    }
    world.finish();
}

/// A server that becomes a daemon has devices, and its parent keeps its own.
fn daemons(provider: Provider) {
    let _turn = turn();
    let Some((world, program)) = world(provider) else {
        return;
    };
    let said = world.directory.join("daemon.txt");
    let line = format!("{} daemon {}", program.display(), said.display());
    world.start(&line, "parent.txt").good();
    let end = Instant::now() + PATIENCE;
    while fs::read_to_string(&said).unwrap_or_default() != "well" {
        assert!(Instant::now() < end, "the daemon says nothing");
        sleep(Duration::from_millis(10));
    }
    world.finish();
}

/// Programs that start concurrently in an empty directory form one network.
fn together(provider: Provider) {
    let _turn = turn();
    let Some((world, program)) = world(provider) else {
        return;
    };
    let line = format!("{} use", program.display());
    for _ in 0..3 {
        let name = |n| format!("together-{n}.txt");
        let all = (0..12).map(|n| world.start(&line, &name(n)));
        let all: Vec<_> = all.collect();
        all.into_iter().for_each(|mut one| _ = one.good());
        for entry in fs::read_dir(&world.directory).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with("sysfs-") {
                assert!(!name.contains(".new"), "{name} was left behind");
                fs::remove_dir_all(entry.path()).unwrap();
            }
        }
    }
    world.finish();
}

/// Processes that end a connection with another host, and exit at once, do end.
fn exits(provider: Provider) {
    let _turn = turn();
    const PAIRS: usize = 6;
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = |number: usize| format!("127.{}.{high}.{low}", 200 + number);
    let world = |number| World::new(provider, String::leak(format!("roce:{}", address(number))));
    let worlds: Vec<World> = (0..2 * PAIRS).map(world).collect();
    let libraries = ["-lrdmacm", "-libverbs"];
    let Some(program) = compiled("cc", "exits.c", &libraries, &worlds[0].directory) else {
        return;
    };
    let program = program.display();
    for _ in 0..3 {
        let mut running = Vec::new();
        for (number, server) in worlds[..PAIRS].iter().enumerate() {
            let line = format!("{program} serve {}", address(number));
            running.push(server.start(&line, "server.txt"));
        }
        let end = Instant::now() + PATIENCE;
        for number in 0..PAIRS {
            let server = &mut running[number];
            while server.said().is_empty() && server.child.try_wait().unwrap().is_none() {
                assert!(Instant::now() < end, "nobody listens");
                sleep(Duration::from_millis(5));
            }
            let line = format!("{program} connect {}", address(number));
            running.push(worlds[PAIRS + number].start(&line, "client.txt"));
        }
        running.into_iter().for_each(|mut one| _ = one.good());
    }
    worlds.into_iter().for_each(World::finish);
}

/// A child of fork with a device of its own does not wait for the threads of its parent.
fn heirs(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let Some(program) = compiled("cc", "heir.c", &["-libverbs"], &world.directory) else {
        return;
    };
    world.start(program.to_str().unwrap(), "heir.txt").good();
    world.finish();
}

/// A process that ends at once when it has received something, or knows of a wrong request,
/// has sent the answer.
fn ends_at_once(provider: Provider) {
    let _turn = turn();
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = String::leak(format!("roce:127.197.{high}.{low}"));
    let world = World::new(provider, host);
    let Some(program) = compiled("cc", "leaving.c", &["-libverbs"], &world.directory) else {
        return;
    };
    for what in ["length group", "access group", "success exit"] {
        let line = format!("{} {what} 50", program.display());
        world.start(&line, "leaving.txt").good();
    }
    world.finish();
}

/// No other preloaded library sees system calls of the devices.
fn interposers(provider: Provider) {
    let _turn = turn();
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = String::leak(format!("roce:127.198.{high}.{low}"));
    for devices in ["roce", host] {
        let world = World::new(provider, devices);
        let (folder, shared) = (&world.directory, ["-shared", "-fPIC", "-ldl"]);
        let Some(library) = compiled("cc", "interposer.c", &shared, folder) else {
            return;
        };
        let program = compiled("cc", "processes.c", &["-libverbs", "-lpthread"], folder);
        let line = format!("{} numbers", program.unwrap().display());
        let seen = world.directory.join("interposer.txt");
        for first in [false, true] {
            let mut command = world.command(&line);
            preload(&mut command, &library, first);
            command.env("INTERPOSER", &seen);
            if first {
                command.env("INTERPOSER_FIRST", "1");
            }
            let output = command.output().unwrap();
            assert!(output.status.success(), "{output:?}");
            let text = fs::read_to_string(&seen).unwrap();
            assert_eq!(text, "counted\n", "{devices}, interposer first: {first}");
            fs::remove_file(&seen).unwrap();
        }
        world.finish();
    }
}

/// Another preloaded library gets the program's calls of its functions.
fn layers(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let folder = world.directory.join("library");
    fs::create_dir(&folder).unwrap();
    let flags = ["-DLIBRARY", "-shared", "-fPIC", "-ldl"];
    let library = compiled("cc", "layered.c", &flags, &folder);
    let program = compiled("cc", "layered.c", &["-libverbs"], &world.directory);
    let (Some(library), Some(program)) = (library, program) else {
        return;
    };
    for first in [false, true] {
        let mut command = world.command(program.to_str().unwrap());
        preload(&mut command, &library, first);
        let output = command.output().unwrap();
        assert!(output.status.success(), "first: {first}, {output:?}");
    }
    world.finish();
}

/// Preloads another library before or after those of the command.
fn preload(command: &mut Command, library: &Path, first: bool) {
    let library = library.display();
    let mut envs = command.get_envs();
    let own = envs.find(|(name, _)| *name == "LD_PRELOAD").unwrap().1;
    let own = own.unwrap().to_str().unwrap().to_owned();
    let both = match first {
        true => format!("{library}:{own}"),
        false => format!("{own}:{library}"),
    };
    command.env("LD_PRELOAD", both);
}

/// Also with hooks of posts.
fn handlers(provider: Provider) {
    let _turn = turn();
    for explains in [false, true] {
        let mut world = World::new(provider, "roce");
        world.explains = explains;
        let Some(program) = compiled("cc", "unruly.c", &["-libverbs"], &world.directory) else {
            return;
        };
        world.start(program.to_str().unwrap(), "program.txt").good();
        world.finish();
    }
}

/// Files in memory count towards the limit, too.
fn limited_files(provider: Provider) {
    let _turn = turn();
    if !installed(&["prlimit"]) {
        return;
    }
    let Some((world, program)) = world(provider) else {
        return;
    };
    let limited = |limit: u64| {
        let line = format!("prlimit --fsize={limit} {} use", program.display());
        let mut command = world.command(&line);
        // The log is a file of the program's.
        command.env_remove("RINGVERBS_LOG_FILE").output().unwrap()
    };
    let needed = FileSizeLimit::needed();
    for limit in [0, 4096, 1 << 20, needed - 1] {
        let output = limited(limit);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code().is_some_and(|it| it != 0), "{output:?}");
        let lines = said.lines().filter(|line| line.contains("ulimit -f"));
        assert_eq!(lines.count(), 1, "{limit}: {said}");
    }
    let output = limited(needed);
    assert!(output.status.success(), "{output:?}");
    world
        .start(&format!("{} use", program.display()), "mode.txt")
        .good();
    world.finish();
}

/// Processes are killed at random moments while others continue.
fn killed(provider: Provider) {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong"]) {
        return;
    }
    let Some((world, program)) = world(provider) else {
        return;
    };
    let line = format!(
        "ibv_rc_pingpong -g 1 -c -s 5000 -n 10000 -p {}",
        free_port()
    );
    let mut server = world.start(&line, "server.txt");
    world.wait_for(&mut server);
    let mut client = world.start(&format!("{line} localhost"), "client.txt");
    let victim = format!("{} forever", program.display());
    let mut seed = 1_u64;
    for round in 0..40 {
        let name = format!("victim-{}.txt", round % 2);
        let mut one = world.start(&victim, &name);
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        sleep(Duration::from_micros((seed >> 33) % 60_000));
        one.child.kill().unwrap();
        one.child.wait().unwrap();
        assert_eq!(one.said(), "");
    }
    client.good();
    server.good();
    // More processes have joined and ended than the network has numbers.
    let line = format!("{} use", program.display());
    world.start(&line, "last.txt").good();
    world.finish();
}

with_each_provider! {
    exit_after_connections: exits;
    exit_after_completions: ends_at_once;
    exit_in_a_child_with_a_device: heirs;
    hide_system_calls: interposers;
    pass_calls_on_to_other_libraries: layers;
    use_processes_and_descriptors: modes;
    meet_the_limit_of_file_sizes: limited_files;
    wait_and_fork_in_signal_handlers: handlers;
    become_daemons: daemons;
    begin_together: together;
    are_killed: killed;
}

/// Returns what a program says in a directory of which a shell command made
/// something else, in mounts of its own; `None` where that is not allowed.
fn said_in(world: &World, program: &Path, before: &str) -> Option<String> {
    let script = format!("{before} && exec {} use", program.display());
    let mut command = world.command("unshare -m sh -c");
    // Programs of the shell itself have no devices.
    let output = command.arg(&script).output().ok()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if said.contains("not permitted") || said.contains("must be superuser") {
        testing::skip!("mounting is not allowed here");
        return None;
    }
    assert_ne!(output.status.code(), Some(0), "{said}");
    Some(said)
}

#[test]
fn a_full_directory_is_reported_in_one_line() {
    let _turn = turn();
    if !installed(&["unshare", "mount"]) {
        return;
    }
    let Some((world, program)) = world(Provider::Stock) else {
        return;
    };
    let copy = env::temp_dir().join(format!("ringverbs-processes-{}", std::process::id()));
    fs::copy(&program, &copy).unwrap();
    let place = world.directory.display();
    for (options, part) in [
        ("size=4k,mode=700", "No space left on device"),
        ("ro,mode=700", "may not write in the directory"),
    ] {
        let before = format!("mount -t tmpfs -o {options} none {place}");
        let Some(said) = said_in(&world, &copy, &before) else {
            break;
        };
        let lines: Vec<_> = (said.lines())
            .filter(|line| line.starts_with("ringverbs: "))
            .collect();
        assert_eq!(lines.len(), 1, "{options}: {said}");
        assert!(lines[0].contains(part), "{options}: {said}");
        assert!(lines[0].contains(&place.to_string()), "{options}: {said}");
    }
    fs::remove_file(copy).unwrap();
}

/// A program with raised privileges finds no devices, and creates no files.
#[test]
fn a_set_user_id_program_is_left_alone() {
    let world = World::new(Provider::Stock, "roce");
    let libraries = ["-libverbs", "-lpthread"];
    let Some(program) = compiled("cc", "processes.c", &libraries, &world.directory) else {
        return;
    };
    if !installed(&["setpriv"]) || program.metadata().unwrap().uid() != 0 {
        return testing::skip!("only root can make a set-user-ID program of another user");
    }
    let copy = env::temp_dir().join(format!("ringverbs-raised-{}", std::process::id()));
    fs::copy(&program, &copy).unwrap();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o4755)).unwrap();
    let line = format!(
        "setpriv --reuid 65534 --regid 65534 --clear-groups {}",
        copy.display()
    );
    let output = world.command(&line).output().unwrap();
    fs::remove_file(&copy).unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    // `list && count > 0` of the program.
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(!said.contains("ringverbs: "), "{said}");
    let made = fs::read_dir(&world.directory).unwrap().flatten();
    assert!(!made.into_iter().any(|it| it.file_name() == "0.lock"));
}
