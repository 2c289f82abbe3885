//! Records of the verbs calls, posts and completions of programs: with both providers, by posts of
//! each kind, replayed, on a full disk, and where no file can be made.

#[macro_use]
mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use common::*;
use embedded::{Drive, Network};
use replay::{Options, Outcome, Record};
use serde_json::Value;
use testing::hosts::free_port;

/// Returns a line that records a program.
fn recorded(world: &World, line: &str) -> String {
    let file = world.directory.join("record.jsonl");
    format!("env RINGVERBS_RECORD={} {line}", file.display())
}

/// Takes the records in the directory: their lines.
fn take(world: &World) -> Vec<Vec<Value>> {
    let entries = fs::read_dir(&world.directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let files = paths.filter(|path| path.extension().is_some_and(|it| it == "jsonl"));
    let mut records: Vec<(PathBuf, Vec<Value>)> = files
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            assert!(text.ends_with('\n'));
            let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
            let lines = lines.collect();
            fs::remove_file(&path).unwrap();
            (path, lines)
        })
        .collect();
    records.sort_by_key(|(_, lines)| lines[0]["start"].as_u64());
    for (path, lines) in &records {
        let first = &lines[0];
        assert_eq!(
            (&first["type"], &first["version"]),
            (&"record".into(), &1.into())
        );
        let name = format!("record-{}.jsonl", first["process"]);
        assert!(path.ends_with(&name), "{name}");
    }
    records.into_iter().map(|(_, lines)| lines).collect()
}

/// Replays records, given their lines.
fn replayed(records: &[Vec<Value>]) -> Outcome {
    let read = |lines: &Vec<Value>| {
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        Record::read(lines.join("\n").as_bytes()).unwrap()
    };
    let records: Vec<Record> = records.iter().map(read).collect();
    let network = Network::new(Drive::Thread).unwrap();
    replay::replay(&records, &network, &Options::default()).unwrap()
}

/// Replays records of correct programs: nothing differs, and all completions come.
fn check_replay(records: &[Vec<Value>], name: &str) {
    let outcome = replayed(records);
    assert_eq!(outcome.differences, [], "{name}: {outcome:#?}");
    assert_eq!(outcome.failures, [], "{name}");
    let count = |kind| -> usize { records.iter().map(|it| of_type(it, kind).len()).sum() };
    assert_eq!(outcome.completions, count("completion") as u64, "{name}");
    assert_eq!(outcome.posts, count("post") as u64, "{name}");
    let known = |what: &String| what == "driver_ioctl" || what.contains("that was refused");
    assert!(
        outcome.left_out.keys().all(known),
        "{name}: {:?}",
        outcome.left_out
    );
}

fn of_type<'a>(record: &'a [Value], kind: &str) -> Vec<&'a Value> {
    record.iter().filter(|line| line["type"] == kind).collect()
}

fn calls<'a>(record: &'a [Value], name: &str) -> Vec<&'a Value> {
    let calls = of_type(record, "call").into_iter();
    calls.filter(|line| line["call"] == name).collect()
}

/// Checks what the record of each correct program has: each post and completion names a queue
/// pair that was created, and what is signalled has completed.
fn check(record: &[Value], name: &str) {
    let pairs: Vec<String> = (calls(record, "create_qp").iter())
        .map(|call| call["object"].as_str().unwrap().to_owned())
        .collect();
    assert!(!pairs.is_empty(), "{name}");
    let is_known = |line: &Value| {
        let number = line["qp"].as_u64().unwrap();
        pairs.contains(&format!("qp {number:#x}"))
    };
    let (posts, completions) = (of_type(record, "post"), of_type(record, "completion"));
    for line in posts.iter().chain(&completions) {
        assert!(is_known(line), "{name}: {line}");
    }
    let sends = posts.iter().filter(|post| post["send"] == true);
    let signaled = sends.filter(|post| post["signaled"] == true && post["errno"] == 0);
    let is_receive = |it: &&&Value| it["opcode"].as_str().unwrap().starts_with("RECV");
    let sent = completions.iter().filter(|it| !is_receive(it)).count();
    let signaled = signaled.count();
    assert!(sent != 0 || completions.is_empty(), "{name}");
    // Some leave the last ones unread.
    assert!(
        sent <= signaled && signaled <= sent + 2,
        "{name}: {signaled} {sent}"
    );
    assert!(
        completions.iter().all(|it| it["status"] == "success"),
        "{name}"
    );
    let states: Vec<&Value> = (calls(record, "modify_qp").iter())
        .map(|call| &call["arguments"]["qp_state"])
        .filter(|state| !state.is_null())
        .collect();
    assert!(
        states.starts_with(&[&"INIT".into(), &"RTR".into()]),
        "{name}: {states:?}"
    );
    for (made, ended) in [("create_qp", "destroy_qp"), ("reg_mr", "dereg_mr")] {
        let objects = |of| -> Vec<_> {
            let calls = calls(record, of).into_iter();
            calls.map(|call| call["object"].to_string()).collect()
        };
        assert!(!objects(made).is_empty(), "{name}");
        assert!(
            objects(ended).iter().all(|it| objects(made).contains(it)),
            "{name}"
        );
    }
    let text = record.iter().map(Value::to_string).collect::<String>();
    assert!(!text.contains("\"opcode\":null"), "{name}");
    // What hooks have seen is not told by the device.
    let hooked = |line: &Value| posts.iter().any(|post| post["qp"] == line["qp"]);
    let seen = [
        of_type(record, "device_post"),
        of_type(record, "device_completion"),
    ];
    assert!(!seen.concat().iter().any(|line| hooked(line)), "{name}");
}

/// Of a program that writes to the queues itself the device tells posts and completions.
#[test]
fn what_no_hook_sees_is_recorded_by_the_device() {
    let _turn = turn();
    let world = World::new(Provider::Stock, "roce");
    let program = built("../examples/check_rust");
    let line = recorded(&world, &format!("{} writes", program.display()));
    let output = world.command(&line).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let records = take(&world);
    let [record] = &records[..] else {
        panic!("{records:?}");
    };
    assert!(of_type(record, "post").is_empty() && of_type(record, "completion").is_empty());
    let posts = of_type(record, "device_post");
    let is_send = |line: &&&Value| line["send"] == true;
    let opcodes: Vec<_> = (posts.iter().filter(is_send))
        .map(|post| post["opcode"].as_str().unwrap())
        .collect();
    assert_eq!(opcodes, ["SEND", "RDMA_WRITE", "RDMA_WRITE"]);
    let numbers: Vec<_> = (posts.iter().filter(is_send))
        .map(|post| post["number"].as_u64().unwrap())
        .collect();
    assert_eq!(numbers, [0, 1, 0]);
    assert!(posts.iter().all(|post| post["device"] == "mlx5_0"));
    let regions: Vec<_> = (calls(record, "reg_mr").iter())
        .map(|call| call["result"]["rkey"].as_u64())
        .collect();
    let writes = posts.iter().filter(|post| post["opcode"] == "RDMA_WRITE");
    for write in writes {
        assert!(
            regions.contains(&write["remote"]["rkey"].as_u64()),
            "{write}"
        );
        assert_eq!(write["sges"][0]["length"], 64, "{write}");
    }
    let completions = of_type(record, "device_completion");
    assert_eq!(completions.iter().filter(is_send).count(), 3);
    assert_eq!(completions.len(), 4);
    assert!(completions.iter().all(|it| it["status"] == "success"));
    let outcome = replayed(&records);
    let left_out = "work requests that were posted without functions of libibverbs";
    assert_eq!(outcome.left_out[left_out], posts.len() as u64);
    assert_eq!((outcome.posts, &outcome.differences[..]), (0, &[][..]));
    world.finish();
}

fn programs(provider: Provider) {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong", "ib_write_bw", "rping"]) {
        return;
    }
    let world = World::new(provider, "roce");
    for line in [
        "ibv_rc_pingpong -g 1 -n 20 -c",
        "ibv_ud_pingpong -g 1 -n 20",
        "ibv_rc_pingpong -g 1 -n 20 -N",
        "ib_write_bw -d mlx5_0 -x 1 -n 20 -s 4096",
    ] {
        let with_port = format!("{line} -p {}", free_port());
        let with_port = recorded(&world, &with_port);
        world.pair(&with_port, &format!("{with_port} localhost"));
        let both = take(&world);
        assert_eq!(both.len(), 2);
        both.iter().for_each(|record| check(record, line));
        check_replay(&both, line);
        let writes = of_type(&both[1], "post");
        let writes = writes.iter().filter(|it| it["opcode"] == "RDMA_WRITE");
        if line.starts_with("ib_write_bw") {
            let writes: Vec<_> = writes.collect();
            assert!(writes.len() >= 20, "{}", writes.len());
            let write = writes[0];
            assert_eq!(
                (&write["bytes"], &write["inline"]),
                (&4096.into(), &false.into())
            );
            let remote = &write["remote"];
            assert!(remote["address"].as_u64().is_some() && remote["rkey"].as_u64().is_some());
            assert_eq!(write["sges"][0]["length"], 4096);
        } else {
            assert_eq!(writes.count(), 0);
        }
        if line.starts_with("ibv_ud_pingpong") {
            let sends = of_type(&both[0], "post");
            let sends = sends.iter().filter(|it| it["send"] == true);
            let peer = calls(&both[1], "create_qp")[0]["object"].as_str().unwrap();
            sends.for_each(|send| {
                let number = send["datagram"]["qp"].as_u64().unwrap();
                assert_eq!(format!("qp {number:#x}"), peer);
            });
        }
    }
    let line = recorded(&world, "rping -a 127.0.0.1 -C 5 -V");
    world.pair(&format!("{line} -s"), &format!("{line} -c"));
    let both = take(&world);
    assert_eq!(both.len(), 2);
    check_replay(&both, "rping");
    for record in &both {
        let reads_and_sends = of_type(record, "post");
        assert!(reads_and_sends.len() > 10);
        let flushed = of_type(record, "completion");
        assert!(flushed.iter().any(|it| it["status"] == "success"));
    }
    world.finish();
}

fn mistakes(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let Some(program) = compiled("cc", "faults.c", &["-libverbs"], &world.directory) else {
        return;
    };
    for (mistake, status, reason) in [
        ("local", "local protection error", "with key"),
        (
            "no-receive",
            "RNR retry counter exceeded",
            "no receive posted",
        ),
    ] {
        let line = format!("{} {mistake}", program.display());
        world.start(&recorded(&world, &line), "output.txt").end();
        let taken = take(&world);
        let [record] = &taken[..] else {
            panic!("not one record");
        };
        let outcome = replayed(&taken);
        assert_eq!(outcome.differences, [], "{mistake}: {outcome:#?}");
        let failures = outcome.failures.iter().map(|it| it.to_string());
        let failures: Vec<String> = failures.collect();
        let is_it = |it: &String| it.contains(status) && it.contains(reason);
        assert!(
            reason.is_empty() || failures.iter().any(is_it),
            "{failures:?}"
        );
        let completions = of_type(record, "completion");
        let failed = completions.iter().find(|it| it["status"] == status);
        let failed = failed.unwrap_or_else(|| panic!("{mistake}: {completions:?}"));
        // Undefined.
        assert!(failed["opcode"].is_null() && failed["bytes"].is_null());
        let posts = of_type(record, "post");
        assert!(posts.iter().any(|it| it["wr_id"] == failed["wr_id"]));
    }
    refused_by_the_peer(&world);
    // Below the hooks of the other observers, which see the same.
    let line = format!("{} local", program.display());
    let mut explained = World::new(provider, "roce");
    (explained.explains, explained.checks) = (true, true);
    explained
        .start(&recorded(&explained, &line), "output.txt")
        .end();
    let [record] = &take(&explained)[..] else {
        panic!("not one record");
    };
    assert_eq!(of_type(record, "completion").len(), 1, "{record:?}");
    let explanations = explained.directory.join("explanations");
    let explanations = fs::read_to_string(explanations).unwrap();
    let posted = explanations.split("posted by thread").nth(1);
    let posted = posted.is_some_and(|rest| rest.contains("by main (faults"));
    assert!(posted, "{explanations}");
    world.finish();
}

/// A write to another process, whose region does not permit it.
fn refused_by_the_peer(world: &World) {
    let Some(program) = compiled("cc", "other_end.c", &["-libverbs"], &world.directory) else {
        return;
    };
    let (program, directory) = (program.display(), world.directory.display());
    let script = world.directory.join("pair.sh");
    let commands = format!(
        "cd {directory} && mkfifo there back\n\
         {program} server right < there > back &\n\
         {program} client right > there < back && wait"
    );
    fs::write(&script, commands).unwrap();
    let line = recorded(world, &format!("sh {}", script.display()));
    world.start(&line, "output.txt").good();
    let both = take(world);
    let outcome = replayed(&both);
    assert_eq!(
        (both.len(), &outcome.differences),
        (2, &Vec::new()),
        "{outcome:#?}"
    );
    let failed = outcome.failures[0].to_string();
    let (reason, of_peer) = failed.split_once("; the other end: ").unwrap();
    assert!(
        reason.contains("wr_id 0x5e: remote access error: "),
        "{failed}"
    );
    assert!(
        of_peer.contains("LOCAL_WRITE, not REMOTE_WRITE"),
        "{failed}"
    );
}

with_each_provider! {
    programs_are_recorded: programs;
    failures_are_recorded: mistakes;
}

#[test]
fn a_full_disk_ends_the_record_but_not_the_program() {
    let _turn = turn();
    if !installed(&["ibv_rc_pingpong", "unshare"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let Some(said) = world.pair_on_small_disk("RINGVERBS_RECORD", "record.jsonl") else {
        return;
    };
    let reason = ".jsonl: the record ends here: No space left on device";
    assert_eq!(said.matches(reason).count(), 1, "{said}");
    assert!(said.contains("500 iters in"), "{said}");
    // Whole lines.
    let [record] = &take(&world)[..] else {
        panic!("not one record");
    };
    assert!(record.len() > 50, "{}", record.len());
}

/// One that `ringverbs trace` has left behind is not recorded any more.
#[test]
fn a_program_outlives_its_trace() {
    let _turn = turn();
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let absent = world.directory.join("absent/calls.trace");
    let line = format!("env RINGVERBS_RECORD={} ibv_devinfo", absent.display());
    let said = world.start(&line, "output.txt").good();
    assert_eq!(said.matches("the trace has ended").count(), 1, "{said}");
    assert!(said.contains("hca_id"), "{said}");
}

#[test]
fn a_program_does_not_run_without_its_record() {
    let _turn = turn();
    if !installed(&["ibv_devinfo"]) {
        return;
    }
    let world = World::new(Provider::Stock, "roce");
    let absent = world.directory.join("absent/record.jsonl");
    let line = format!("env RINGVERBS_RECORD={} ibv_devinfo", absent.display());
    let mut program = world.start(&line, "output.txt");
    assert_eq!(program.end(), Some(1), "{}", program.said());
    let said = program.said();
    assert!(said.contains(".jsonl: No such file or directory"), "{said}");
    assert!(!said.contains("hca_id"), "{said}");
    // Others on the host cannot read it.
    let line = recorded(&world, "ibv_devinfo");
    world.start(&line, "output.txt").good();
    let entries = fs::read_dir(&world.directory).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut records = paths.filter(|path| path.extension().is_some_and(|it| it == "jsonl"));
    let mode = fs::metadata(records.next().unwrap())
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
}
