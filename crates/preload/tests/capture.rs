//! Captures of the frames of programs: of both ends, over shared memory and UDP, of killed
//! programs, on a full disk, and where no file can be made.

#[macro_use]
mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use testing::hosts::free_port;
use testing::pcapng::{Frame, frames, frames_before_kill};

/// Returns a line that captures a program.
fn captured(world: &World, line: &str) -> String {
    let file = world.directory.join("frames.pcapng");
    format!("env RINGVERBS_CAPTURE={} {line}", file.display())
}

/// Returns the captures in a directory.
fn files(directory: PathBuf) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let is_capture = |path: &PathBuf| path.extension().is_some_and(|it| it == "pcapng");
    paths.filter(is_capture).collect()
}

/// Returns the captures of the two ends of a pair of programs.
fn both(world: &World) -> [Vec<Frame>; 2] {
    let files = files(world.directory.clone());
    assert_eq!(files.len(), 2, "{files:?}");
    [frames(&files[0]), frames(&files[1])]
}

/// Checks that each frame that an end has sent has arrived at the other later, as it was. The last
/// ones may have been sent to a process that ended. Before the frame the capture has a header of
/// `header` bytes with the time.
fn check_that_all_arrive([first, second]: &[Vec<Frame>; 2], header: usize) {
    // Messages of the connection manager and other packets may overtake each other.
    let sorted = |end: &[Frame], is_outbound: bool| {
        let of_direction = end.iter().filter(|it| it.is_outbound == is_outbound);
        let mut found: Vec<Frame> = of_direction.cloned().collect();
        found.sort_by(|a, b| a.bytes[header..].cmp(&b.bytes[header..]));
        found
    };
    for (from, to) in [(first, second), (second, first)] {
        let (sent, arrived) = (sorted(from, true), sorted(to, false));
        assert!(sent.len() > 2);
        let mut times: Vec<_> = sent.iter().map(|it| it.time).collect();
        times.sort();
        let last = times[times.len() - 3];
        let mut arrived = arrived.iter().peekable();
        for sent in &sent {
            let Some(arrived) = arrived.next_if(|it| it.bytes[header..] == sent.bytes[header..])
            else {
                assert!(sent.time >= last, "{sent:?} has not arrived");
                continue;
            };
            assert!(sent.time <= arrived.time);
            assert_ne!(sent.comment, arrived.comment);
        }
        assert_eq!(arrived.next(), None, "this was not sent");
    }
}

fn two_processes(provider: Provider) {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong", "rping"]) {
        return;
    }
    for devices in ["roce", "ib"] {
        let world = World::new(provider, devices);
        let (gid, header) = match devices {
            "roce" => ("-g 1 ", 0),
            _ => ("", 16),
        };
        let line = format!("ibv_rc_pingpong {gid}-n 5 -c -p {}", free_port());
        let line = captured(&world, &line);
        world.pair(&line, &format!("{line} localhost"));
        let ends = both(&world);
        check_that_all_arrive(&ends, header);
        for frame in ends.iter().flatten() {
            assert!(
                frame
                    .comment
                    .contains(" (ibv_rc_pingpong), mlx5_0 queue pair 0x")
            );
        }
        world.finish();
    }
    let world = World::new(provider, "roce");
    let line = captured(&world, "rping -a 127.0.0.1 -C 2");
    world.pair(&format!("{line} -s"), &format!("{line} -c"));
    let ends = both(&world);
    check_that_all_arrive(&ends, 0);
    // Messages of the connection manager.
    for end in ends {
        let of_manager = end
            .iter()
            .filter(|it| it.comment.ends_with(" queue pair 0x1"));
        assert!(of_manager.count() >= 4, "{end:#?}");
    }
    world.finish();
}

with_each_provider! {
    both_ends_are_captured: two_processes;
}

#[test]
fn packets_to_other_hosts_are_captured() {
    let _turn = turn();
    if !installed(&["rping"]) {
        return;
    }
    let [.., high, low] = std::process::id().to_be_bytes();
    let [own, other] = [1, 2].map(|number| format!("127.{number}.{high}.{low}"));
    let world = World::new(Provider::Stock, "roce");
    let server = format!("env RINGVERBS_EMBEDDED=roce:{own} rping -s -a {own} -C 3");
    let mut server = world.start(&captured(&world, &server), "server.txt");
    let client = format!("env RINGVERBS_EMBEDDED=roce:{other} rping -c -a {own} -C 3");
    let client = captured(&world, &client);
    let end = Instant::now() + PATIENCE;
    loop {
        // Refused until the server listens.
        let mut client = world.start(&client, "client.txt");
        if client.end() == Some(0) {
            break;
        }
        assert!(Instant::now() < end, "{} {}", client.said(), server.said());
        for file in files(world.directory.clone()) {
            let ended = format!("frames-{}.pcapng", client.child.id());
            if file.ends_with(ended) {
                fs::remove_file(file).unwrap();
            }
        }
    }
    server.good();
    for end in both(&world) {
        // Packets start at the IP header.
        assert!(end.iter().all(|it| it.bytes[0] == 0x45), "{end:#?}");
        let [sent, received] = [true, false].map(|is_outbound| {
            let same = end.iter().filter(|it| it.is_outbound == is_outbound);
            same.count()
        });
        assert!(sent > 6 && received > 6, "{sent} {received}");
    }
}

#[test]
fn a_killed_program_leaves_its_frames() {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let line = format!("ibv_rc_pingpong -g 1 -n 100000000 -p {}", free_port());
    let line = captured(&world, &line);
    let mut server = world.start(&line, "server.txt");
    world.wait_for(&mut server);
    let mut client = world.start(&format!("{line} localhost"), "client.txt");
    let end = Instant::now() + PATIENCE;
    let is_long = |path: &PathBuf| fs::metadata(path).is_ok_and(|it| it.len() > 100_000);
    while files(world.directory.clone())
        .iter()
        .filter(|it| is_long(it))
        .count()
        < 2
    {
        assert!(Instant::now() < end, "{}", client.said());
        sleep(Duration::from_millis(5));
    }
    client.child.kill().unwrap();
    server.child.kill().unwrap();
    client.end();
    server.end();
    for file in files(world.directory.clone()) {
        assert!(frames_before_kill(&file).len() > 20);
    }
}

#[test]
fn a_full_disk_ends_the_capture_but_not_the_program() {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong", "unshare"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let Some(said) = world.pair_on_small_disk("RINGVERBS_CAPTURE", "frames.pcapng") else {
        return;
    };
    let reason = ".pcapng: the capture ends here: No space left on device";
    assert_eq!(said.matches(reason).count(), 1, "{said}");
    assert!(said.contains("500 iters in"), "{said}");
    let [file] = &files(world.directory.clone())[..] else {
        panic!("not one file");
    };
    let length = fs::metadata(file).unwrap().len();
    assert!((32 << 10..=64 << 10).contains(&length), "{length}");
    assert!(frames(file).len() > 10);
}

#[test]
fn a_program_does_not_run_without_its_capture() {
    let _turn = turn();
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let absent = world.directory.join("absent/frames.pcapng");
    let line = format!("env RINGVERBS_CAPTURE={} ibv_devinfo", absent.display());
    let mut program = world.start(&line, "output.txt");
    assert_eq!(program.end(), Some(1), "{}", program.said());
    let said = program.said();
    assert!(
        said.contains(".pcapng: No such file or directory"),
        "{said}"
    );
    assert!(!said.contains("hca_id"), "{said}");
    let wrong = format!(
        "env RINGVERBS_CAPTURE_SNAP=x {}",
        captured(&world, "ibv_devinfo")
    );
    let mut program = world.start(&wrong, "output.txt");
    program.end();
    let said = program.said();
    assert!(
        said.contains("RINGVERBS_CAPTURE_SNAP: use headers, all or"),
        "{said}"
    );
    // Others on the host cannot read it.
    let line = captured(&world, "ibv_devinfo");
    world.start(&line, "output.txt").good();
    let [file] = &files(world.directory.clone())[..] else {
        panic!("not one file");
    };
    let mode = fs::metadata(file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(frames(file).is_empty());
}
