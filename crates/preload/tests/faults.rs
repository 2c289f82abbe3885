//! Injected faults, as programs of others see them.

#[macro_use]
mod common;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use embedded::softhca::fault::Faults;
use embedded::{FaultAnswer, FaultCounts, FaultState, RunningProcesses};
use testing::hosts::free_port;
use testing::pcapng::frames;

/// Faults of a client of `ibv_rc_pingpong`, what its end says, and how often each has happened.
struct Case {
    faults: &'static str,
    end: End,
    counts: &'static [u64],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// Both ends succeed.
    Good,
    /// The client fails, and one of the ends says this.
    Says(&'static str),
    /// The client is killed.
    Killed,
}

const fn case(faults: &'static str, end: End, counts: &'static [u64]) -> Case {
    Case {
        faults,
        end,
        counts,
    }
}

/// A case of each kind.
const SHORT: [Case; 4] = [
    case(
        "lose opcode=send nth=3\nduplicate nth=5\ncorrupt nth=9\ndelay 1ms nth=20..25\n\
         reorder nth=30\nlose way=in opcode=ack nth=2\nrnr nth=4\nnak sequence nth=6\n\
         link-down 20ms nth=40\nlose opcode=read",
        End::Good,
        &[1, 1, 1, 6, 1, 1, 1, 1, 1, 0],
    ),
    case(
        "nak remote-operational qp=#1 nth=5",
        End::Says("remote operation error"),
        &[1],
    ),
    case(
        "fail ibv_create_qp ENOMEM",
        End::Says("Couldn't create QP"),
        &[1],
    ),
    case("die nth=20", End::Killed, &[1]),
];

/// The others.
const LONG: [Case; 8] = [
    case("slow-receiver 5ms nth=3..6", End::Good, &[4]),
    case(
        "delay 100us..300us chance=0.5 seed=3\nlink-up",
        End::Good,
        &[1, 1],
    ),
    case(
        "nak remote-access nth=5",
        End::Says("remote access error"),
        &[1],
    ),
    case(
        "nak invalid-request nth=5",
        End::Says("remote invalid request error"),
        &[1],
    ),
    case("qp-error qp=#1 nth=20", End::Says("Flushed"), &[1]),
    case("qp-error qp=#1 after=20ms", End::Says("Flushed"), &[1]),
    case("memlock 1KiB", End::Says("Couldn't register MR"), &[1]),
    case(
        "fail ibv_open_device EIO\nfail ibv_modify_qp EINVAL nth=2",
        End::Says("Couldn't get context"),
        &[1, 0],
    ),
];

fn run(world: &World, case: &Case) {
    let Case {
        faults,
        end,
        counts,
    } = case;
    let (file, counted) = (world.directory.join("f"), world.directory.join("counts"));
    fs::write(&file, faults).unwrap();
    let _ = fs::remove_file(&counted);
    let count = FaultCounts::create(&counted).unwrap();
    let line = format!("ibv_rc_pingpong -g 1 -n 500 -p {}", free_port());
    let mut server = world.start(&line, "server.txt");
    world.wait_for(&mut server);
    let (file, counted) = (file.display(), counted.display());
    let client = format!("env RINGVERBS_FAULTS={file} RINGVERBS_FAULT_COUNTS={counted}");
    let mut client = world.start(&format!("{client} {line} localhost"), "client.txt");
    let status = client.end();
    let found: Vec<u64> = (0..counts.len()).map(|at| count.of(at)).collect();
    // What happens by chance happens more than once; and if the command of ibv_open_device is
    // refused, providers try others.
    let is_repeated = ["chance", "ibv_open_device"]
        .iter()
        .any(|it| faults.contains(it));
    let found: Vec<u64> = match is_repeated {
        true => found.iter().map(|it| (*it).min(1)).collect(),
        false => found,
    };
    match end {
        End::Good => {
            client.good();
            server.good();
        }
        End::Says(text) => {
            assert_ne!(status, Some(0), "{faults}: {}", client.said());
            // The server fails if it is its request that the client's fault refuses; else it may
            // wait for the client for good.
            if !client.said().contains(text) {
                server.end();
            }
            let said = client.said() + &server.said();
            assert!(said.contains(text), "{faults}: {said}");
        }
        End::Killed => {
            let status = client.child.wait().unwrap();
            assert_eq!(status.signal(), Some(libc::SIGKILL), "{}", client.said());
            server.end();
            let said = server.said();
            assert!(said.contains("transport retry counter exceeded"), "{said}");
        }
    }
    assert_eq!(found, *counts, "{faults}");
}

fn run_all(provider: Provider, cases: &[Case]) {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong"]) {
        return;
    }
    let world = World::new(provider, "roce");
    cases.iter().for_each(|case| run(&world, case));
    world.finish();
}

fn short(provider: Provider) {
    run_all(provider, &SHORT);
}

with_each_provider! {
    programs_see_faults: short;
    programs_that_run_get_faults: running;
    recorded_faults_happen_again: recorded;
}

#[test]
#[ignore = "the long list; `programs_see_faults` is a short one"]
fn all_with_stock() {
    run_all(Provider::Stock, &LONG);
}

#[test]
#[ignore = "the long list; `programs_see_faults` is a short one"]
fn all_with_ours() {
    run_all(Provider::Ours, &LONG);
}

/// Waits until `condition` returns something.
fn wait<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < end, "{what}");
        sleep(Duration::from_millis(5));
    }
}

/// Programs that run get the faults of a file in their directory, and answer.
fn running(provider: Provider) {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong"]) {
        return;
    }
    let world = World::new(provider, "roce");
    let line = format!("ibv_rc_pingpong -g 1 -n 100000000 -p {}", free_port());
    let mut server = world.start(&line, "server.txt");
    world.wait_for(&mut server);
    let mut client = world.start(&format!("{line} localhost"), "client.txt");
    let running = RunningProcesses::in_directory(&world.directory).unwrap();

    let text = "lose opcode=send nth=5\nlose device=1\nlose program=other\nqp-error qp=0x7";
    // Until both have joined: their output is buffered.
    wait("they do not run", || {
        (running.set_faults(Some(text)).unwrap() == 2).then_some(())
    });
    let answers = wait("no answers", || {
        let answers = running.fault_answers(text);
        let lost = |it: &FaultAnswer| it.of(0) == Some((FaultState::Applied, 1));
        (answers.len() == 2 && answers.iter().all(lost)).then_some(answers)
    });
    for answer in &answers {
        assert!(answer.is_accepted());
        assert_eq!(answer.of(1), Some((FaultState::Refused, 0)));
        assert_eq!(answer.of(2), Some((FaultState::OtherProgram, 0)));
        assert_eq!(answer.of(3), Some((FaultState::Refused, 0)));
        assert_eq!(answer.of(4), None);
    }
    // Of another version, and none.
    running.set_faults(Some("lose colour=red")).unwrap();
    wait("no refusals", || {
        let answers = running.fault_answers("lose colour=red");
        (answers.len() == 2 && answers.iter().all(|it| !it.is_accepted())).then_some(())
    });
    running.set_faults(None).unwrap();
    assert_eq!(running.faults(), None);

    // At their end, the counts are final.
    let text = "delay 1us opcode=send";
    running.set_faults(Some(text)).unwrap();
    wait("no answers", || {
        let answers = running.fault_answers(text);
        let delayed = |it: &FaultAnswer| it.of(0).is_some_and(|(_, count)| count > 0);
        (answers.len() == 2 && answers.iter().all(delayed)).then_some(())
    });
    assert!(running.fault_answers(text).iter().all(|it| !it.has_ended()));
    let (ended, answers) = running.end_faults().unwrap();
    assert_eq!((&ended[..], answers.len()), (text, 2));
    let counts = || answers.iter().map(|it| it.of(0)).collect::<Vec<_>>();
    let finally = counts();
    assert!(answers.iter().all(FaultAnswer::has_ended), "{finally:?}");
    let sent = || {
        let (status, _) = running.status().unwrap();
        let sent = status.iter().map(|it| it.devices[0].counter("bytes_sent"));
        sent.sum::<u64>()
    };
    let then = sent();
    wait("nothing is sent", || (sent() > then).then_some(()));
    assert_eq!(counts(), finally);

    // One of them alone.
    let text = "die nth=20";
    let one = RunningProcesses::with_number(client.child.id()).unwrap();
    assert_eq!(one.set_faults(Some(text)).unwrap(), 1);
    let status = client.child.wait().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL), "{}", client.said());
    let answers = running.fault_answers(text);
    let told: Vec<u32> = answers.iter().map(|it| it.process).collect();
    assert_eq!(told, [client.child.id()]);
    assert_eq!(answers[0].of(0), Some((FaultState::Applied, 1)));
    world.finish();
}

/// Runs a ping-pong whose ends have the faults of a file each. Returns what each has recorded,
/// and how often its first fault has happened.
fn recorded_pair(world: &World, line: &str, faults: [&str; 2]) -> [(String, u64); 2] {
    let start = |at: usize, line: &str| {
        let [file, counted, record] = ["f", "counts", "record"].map(|name| {
            let path = world.directory.join(format!("{name}-{at}"));
            path.display().to_string()
        });
        fs::write(&file, faults[at]).unwrap();
        let _ = fs::remove_file(&counted);
        let count = FaultCounts::create(counted.as_ref()).unwrap();
        let line = format!(
            "env RINGVERBS_FAULTS={file} RINGVERBS_FAULT_COUNTS={counted} \
             RINGVERBS_RECORD_FAULTS={record} {line}"
        );
        let program = world.start(&line, &format!("said-{at}"));
        let record = format!("{record}-{}", program.child.id());
        (program, record, count)
    };
    let (mut server, server_record, server_count) = start(0, line);
    world.wait_for(&mut server);
    let (mut client, client_record, client_count) = start(1, &format!("{line} localhost"));
    client.good();
    server.good();
    [(server_record, server_count), (client_record, client_count)].map(|(record, count)| {
        let text = fs::read_to_string(record).unwrap();
        let (header, faults) = text.split_once('\n').unwrap();
        assert!(
            header.starts_with("# Faults that have happened in"),
            "{header}"
        );
        // Sent and received packets have no order.
        let mut lines: Vec<&str> = faults.lines().collect();
        lines.sort_unstable_by(|a, b| b.cmp(a));
        (lines.join("\n"), count.of(0))
    })
}

/// What happens by chance is recorded as faults that do the same again, in both processes.
fn recorded(provider: Provider) {
    const FAULTS: &str = "lose opcode=send chance=0.1 seed=5\n\
                          duplicate way=in opcode=send chance=0.1 seed=6";
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong"]) {
        return;
    }
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    let host: &str = String::leak(format!("roce:127.186.{high}.{low}"));
    for (devices, name, gid) in [("roce,roce", "mlx5_1", 1), (host, "mlx5_0", 0)] {
        let world = World::new(provider, devices);
        let line = format!(
            "ibv_rc_pingpong -d {name} -g {gid} -s 1024 -n 50 -p {}",
            free_port()
        );
        // A process that does not run for 67 ms lets its peer send again.
        let again = (0..5).any(|_| {
            let first = recorded_pair(&world, &line, [FAULTS; 2]);
            for (text, count) in &first {
                let device = name.trim_start_matches("mlx5_");
                let of = format!("device={device} program=ibv_rc_pingpong qp=#1 opcode=send");
                let [lost, duplicated] = *text.lines().collect::<Vec<_>>() else {
                    panic!("{text}");
                };
                assert!(
                    lost.starts_with(&format!("lose {of} way=out nth=")),
                    "{text}"
                );
                let twice = format!("duplicate {of} way=in nth=");
                assert!(duplicated.starts_with(&twice), "{text}");
                assert!(*count > 2, "{text}");
            }
            let [server, client] = &first;
            recorded_pair(&world, &line, [&server.0, &client.0]) == first
        });
        assert!(again, "{devices}");
        world.finish();
    }
}

/// A record that cannot be written ends the program before its devices are made.
#[test]
fn a_record_that_cannot_be_written_is_an_error() {
    let _turn = turn();
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let mut program = world.start("env RINGVERBS_RECORD_FAULTS=/proc/x/y ibv_devinfo", "said");
    assert_eq!(program.end(), Some(1));
    let said = program.said();
    assert!(said.contains("/proc/x/y: No such file"), "{said}");
}

/// A record that the disk has no room for any more ends whole, and the program goes on.
#[test]
fn a_full_disk_ends_the_record() {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let faults = world.directory.join("f");
    let text = "duplicate opcode=send chance=0.5\ndelay 1us opcode=send chance=0.5";
    fs::write(&faults, text).unwrap();
    // The capture fills the disk.
    let variable = format!(
        "RINGVERBS_FAULTS={} RINGVERBS_CAPTURE={} RINGVERBS_RECORD_FAULTS",
        faults.display(),
        world.directory.join("small/frames.pcapng").display()
    );
    let Some(said) = world.pair_on_small_disk(&variable, "record.faults") else {
        return;
    };
    let reason = "the record of faults ends here: No space left";
    assert_eq!(said.matches(reason).count(), 1, "{said}");
    let files = fs::read_dir(&world.directory).unwrap();
    let names = files.map(|it| it.unwrap().file_name().into_string().unwrap());
    let names: Vec<String> = names.filter(|it| it.starts_with("record-")).collect();
    let [record] = &names[..] else {
        panic!("not one file: {names:?}");
    };
    let text = fs::read_to_string(world.directory.join(record)).unwrap();
    assert!(Faults::parse(&text).unwrap().list().len() > 1, "{text}");
}

/// The capture of a program shows each fault as often as it is counted.
#[test]
fn counts_are_those_of_the_capture() {
    const FAULTS: &str = "lose opcode=send nth=3..5\nduplicate opcode=send nth=10..12\n\
        corrupt opcode=send nth=20\nlose way=in opcode=ack nth=2..3\nrnr nth=4\n\
        delay 1ms nth=30..33\nreorder nth=50\nnak sequence nth=8\nduplicate way=in nth=9\n\
        slow-receiver 1ms nth=20..21\nlose chance=0.02 seed=9\ndelay 100us chance=0.05 seed=9";
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let [file, counted, capture] =
        ["f", "counts", "frames.pcapng"].map(|it| world.directory.join(it));
    fs::write(&file, FAULTS).unwrap();
    let count = FaultCounts::create(&counted).unwrap();
    let line = format!("ibv_rc_pingpong -g 1 -n 200 -p {}", free_port());
    let mut server = world.start(&line, "server.txt");
    world.wait_for(&mut server);
    let client = format!(
        "env RINGVERBS_FAULTS={} RINGVERBS_FAULT_COUNTS={} RINGVERBS_CAPTURE={}",
        file.display(),
        counted.display(),
        capture.display()
    );
    let mut client = world.start(&format!("{client} {line} localhost"), "client.txt");
    client.good();
    // Fails if the client's last acknowledgement is lost: nobody repeats it.
    server.end();
    let capture = format!("frames-{}.pcapng", client.child.id());
    let frames = frames(&world.directory.join(capture));
    for (at, fault) in FAULTS.lines().enumerate() {
        let said = format!("the injected fault of line {}", at + 1);
        let parts = frames.iter().flat_map(|it| it.comment.split("; "));
        let shown = parts.filter(|it| it.ends_with(&said)).count() as u64;
        assert_ne!(shown, 0, "{fault}");
        assert_eq!(shown, count.of(at), "{fault}");
    }
    world.finish();
}

#[test]
fn a_bad_file_is_refused() {
    let _turn = turn();
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let file = world.directory.join("f");
    fs::write(&file, "lose\nlose nth=x").unwrap();
    let line = format!("env RINGVERBS_FAULTS={} ibv_devinfo", file.display());
    let mut program = world.start(&line, "said");
    assert_ne!(program.end(), Some(0));
    let said = program.said();
    assert!(said.contains("f:2:10: \"x\" is not a position"), "{said}");
}
