//! Running programs, as `ringverbs top` and `ringverbs capture` see and control them.

#[macro_use]
mod common;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use embedded::{CaptureAnswer, CaptureState, FaultState, ProcessStatus, RunningProcesses};
use testing::hosts::free_port;
use testing::pcapng::frames;

/// Waits until `condition` returns something.
fn wait<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < end, "{what}");
        sleep(Duration::from_millis(20));
    }
}

/// Waits until both ends of a pair have sent something on a queue pair.
fn wait_for_pair(processes: &RunningProcesses) -> [ProcessStatus; 2] {
    wait("they do not run", || {
        let (all, _) = processes.status().unwrap();
        let sends = |it: &ProcessStatus| {
            let device = it.devices.first()?;
            (device.queue_pairs.len() == 1).then(|| device.counter("sends"))
        };
        let both: [ProcessStatus; 2] = all.try_into().ok()?;
        let run = both.iter().all(|it| sends(it).is_some_and(|it| it > 10));
        run.then_some(both)
    })
}

/// Starts a pair of programs that do not end.
fn endless(world: &World, line: &str) -> [Running; 2] {
    let line = format!("{line} -p {}", free_port());
    let mut server = world.start(&line, "server.txt");
    world.wait_for(&mut server);
    let client = world.start(&format!("{line} 127.0.0.1"), "client.txt");
    [server, client]
}

fn started(answers: &[CaptureAnswer]) -> Vec<PathBuf> {
    let path = |it: &CaptureAnswer| match &it.state {
        CaptureState::Started(path) => Some(path.clone()),
        _ => None,
    };
    answers.iter().filter_map(path).collect()
}

/// Returns how many frames tshark finds; `None` if it is not installed.
fn decoded(file: &Path) -> Option<usize> {
    if !installed(&["tshark"]) {
        return None;
    }
    let mut command = Command::new("tshark");
    let output = command.arg("-r").arg(file).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!text.contains("Malformed"), "{text}");
    Some(text.lines().count())
}

fn seen(provider: Provider) {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong", "ib_send_lat"]) {
        return;
    }
    let world = World::new(provider, "roce");
    let pair = endless(&world, "ibv_rc_pingpong -g 1 -n 100000000");
    let processes = RunningProcesses::in_directory(&world.directory).unwrap();
    let both = wait_for_pair(&processes);
    let numbers: Vec<u32> = both.iter().map(|it| it.process).collect();
    let mut expected = pair.each_ref().map(|it| it.child.id());
    expected.sort_unstable();
    assert_eq!(numbers, expected);
    let queue_pairs = both.each_ref().map(|it| &it.devices[0].queue_pairs[0]);
    for (of, other) in [(0, 1), (1, 0)] {
        let (status, qp) = (&both[of], queue_pairs[of]);
        assert_eq!(status.program, "ibv_rc_pingpong");
        let device = &status.devices[0];
        assert!(device.is_up && device.name == "mlx5_0");
        assert!(device.objects.contains(&("queue pair".to_owned(), 1)));
        assert_eq!((&*qp.kind, &*qp.state), ("RC", "RTS"));
        assert_eq!(qp.peer, Some(queue_pairs[other].number));
        let ((sends, max_sends), (receives, max_receives)) = (qp.sends, qp.receives.unwrap());
        assert!(sends <= max_sends && (1..=2).contains(&max_sends), "{qp:?}");
        assert!(receives <= max_receives && max_receives >= 500, "{qp:?}");
        let [queue] = device.completion_queues[..] else {
            panic!("{device:?}");
        };
        assert!(queue.unread <= queue.entries && queue.entries >= 501);
    }
    // One alone, later.
    let one = RunningProcesses::with_number(numbers[0]).unwrap();
    let (later, silent) = one.status().unwrap();
    assert_eq!((later.len(), silent), (1, 0));
    assert!(later[0].time > both[0].time);
    let [then, now] = [&both[0], &later[0]].map(|it| it.devices[0].counter("bytes_sent"));
    assert!(now > then, "{then} {now}");

    captured(&world, &processes);

    // A killed process is not seen, and its peer says why it fails.
    let [mut server, client] = pair;
    server.child.kill().unwrap();
    server.end();
    let (left, silent) = processes.status().unwrap();
    assert!(left.iter().all(|it| it.process == client.child.id()));
    assert_eq!(silent, 0);
    processes.end_status();
    assert!(!world.directory.join("status").exists());
    world.finish();
}

/// Starts and stops a capture of two programs, and of one of them.
fn captured(world: &World, processes: &RunningProcesses) {
    let file = world.directory.join("frames.pcapng");
    let (answers, silent) = processes.start_capture(&file, "headers", None).unwrap();
    let files = started(&answers);
    assert_eq!((files.len(), silent), (2, 0), "{answers:?}");
    wait("no frames", || {
        let (all, _) = processes.status().unwrap();
        let has_frames = |it: &ProcessStatus| {
            let capture = it.capture.as_deref()?;
            let (_, frames) = capture.rsplit_once(": ")?;
            (frames != "0 frames").then_some(())
        };
        (all.iter().filter_map(has_frames).count() == 2).then_some(())
    });
    let (answers, silent) = processes.stop_capture().unwrap().unwrap();
    assert_eq!((answers.len(), silent), (2, 0), "{answers:?}");
    for (answer, file) in answers.iter().zip(&files) {
        assert_eq!(answer.state, CaptureState::Stopped(file.clone()));
        let frames = frames(file);
        assert_eq!(frames.len() as u64, answer.frames);
        let comment = format!(
            "process {} (ibv_rc_pingpong), mlx5_0 queue pair 0x",
            answer.process
        );
        assert!(frames.iter().all(|it| it.comment.starts_with(&comment)));
    }
    if let Some(count) = decoded(&files[0]) {
        assert_eq!(count as u64, answers[0].frames);
    }
    assert_eq!(processes.stop_capture().unwrap(), None);

    // The answer says why none is written.
    let absent = world.directory.join("absent/frames.pcapng");
    let (answers, _) = processes.start_capture(&absent, "all", None).unwrap();
    let refused = |it: &CaptureAnswer| match &it.state {
        CaptureState::Refused(reason) => reason.contains("No such file"),
        _ => false,
    };
    assert!(answers.len() == 2 && answers.iter().all(refused));
    // While all are captured, one ends.
    let file = world.directory.join("two.pcapng");
    let (answers, _) = processes
        .start_capture(&file, "128", Some("2x64KiB"))
        .unwrap();
    let one = RunningProcesses::with_number(answers[0].process).unwrap();
    let (answers, silent) = one.stop_capture().unwrap().unwrap();
    assert_eq!((answers.len(), silent), (1, 0));
    assert!(matches!(answers[0].state, CaptureState::Stopped(_)));
    let (all, _) = processes.status().unwrap();
    let capturing = all.iter().filter(|it| it.capture.is_some());
    let capturing: Vec<u32> = capturing.map(|it| it.process).collect();
    assert!(capturing.len() == 1 && capturing[0] != answers[0].process);
    processes.stop_capture().unwrap();
    let (all, _) = processes.status().unwrap();
    assert!(all.iter().all(|it| it.capture.is_none()), "{all:?}");
}

/// The command itself on embedded devices, in the place of the host's.
#[test]
fn devices_of_the_host_are_seen() {
    let _turn = turn();
    let world = World::new(Provider::Stock, "roce,ib");
    let line = format!("{} top --once --json", built("../ringverbs").display());
    let mut command = world.command(&line);
    // Where no process has joined a network.
    command.env("XDG_RUNTIME_DIR", world.directory.join("runtime"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["processes"], serde_json::json!([]));
    let devices = &document["devices"];
    assert_eq!(devices.as_array().unwrap().len(), 2, "{document}");
    let [ethernet, infiniband] = [&devices[0], &devices[1]];
    assert_eq!(
        (&ethernet["name"], &ethernet["objects"]["qp"]),
        (&"mlx5_0".into(), &0.into())
    );
    assert_eq!(ethernet["ports"][0]["state"], "ACTIVE");
    assert_eq!(ethernet["ports"][0]["counters"]["port_xmit_data"], 0);
    assert_eq!(infiniband["ports"][0]["link_layer"], "InfiniBand");
}

with_each_provider! {
    running_programs_are_seen_and_captured: seen;
}

/// Devices on addresses of the host have a directory of their own.
#[test]
fn programs_that_reach_other_hosts_are_controlled() {
    let _turn = turn();
    if !installed(&["ib_send_lat"]) {
        return;
    }
    let [.., high, low] = std::process::id().to_be_bytes();
    let world = World::new(Provider::Stock, "roce");
    let devices = format!(
        "env XDG_RUNTIME_DIR={} RINGVERBS_EMBEDDED=roce:127.3.{high}.{low}",
        world.directory.display()
    );
    let line = format!("{devices} ib_send_lat -x 0 -F -D 1000");
    let pair = endless(&world, &line);
    let (one, status) = wait("it is not seen", || {
        // Before it has joined, its directory may be absent.
        let one = RunningProcesses::with_number(pair[1].child.id()).ok()?;
        let (all, _) = one.status().unwrap();
        let status = all.into_iter().next()?;
        let sends = status.devices.first()?.counter("sends");
        (sends > 2).then_some((one, status))
    });
    assert_eq!(status.program, "ib_send_lat");
    assert_eq!(one.set_faults(Some("lose opcode=send nth=3")).unwrap(), 1);
    wait("no fault", || {
        let answers = one.fault_answers("lose opcode=send nth=3");
        let [answer] = &answers[..] else { return None };
        (answer.of(0) == Some((FaultState::Applied, 1))).then_some(())
    });
    let file = world.directory.join("frames.pcapng");
    let (answers, _) = one.start_capture(&file, "headers", None).unwrap();
    assert_eq!(started(&answers).len(), 1, "{answers:?}");
    wait("no frames", || {
        let (all, _) = one.status().unwrap();
        let capture = all.into_iter().next()?.capture?;
        (!capture.ends_with(": 0 frames")).then_some(())
    });
    let (answers, _) = one.stop_capture().unwrap().unwrap();
    let CaptureState::Stopped(file) = &answers[0].state else {
        panic!("{answers:?}");
    };
    // Packets start at the IP header.
    assert!(frames(file).iter().all(|it| it.bytes[0] == 0x45));
    world.finish();
}

/// Whoever may write in the directory would control the programs.
#[test]
fn shared_directories_are_not_controlled() {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    let world = World::new(Provider::Stock, "roce");
    fs::set_permissions(&world.directory, fs::Permissions::from_mode(0o777)).unwrap();
    let refused = RunningProcesses::in_directory(&world.directory).unwrap_err();
    assert!(
        refused.to_string().contains("other users may write"),
        "{refused}"
    );
    assert!(RunningProcesses::with_number(u32::MAX).is_err());
}
