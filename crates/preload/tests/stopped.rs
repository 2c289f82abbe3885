//! Processes that are stopped, by a signal or in a debugger, or that get no processor: the retries
//! of their peers do not count, between hosts as long as patience lasts, nor do their own when they
//! continue. With one retry.

#[macro_use]
mod common;

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::*;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Longer than the writer waits for a peer that runs: 64 times 17 ms in a directory, since
/// frames are unread, and 8 times 67 ms on an address.
const STOP: Duration = Duration::from_secs(2);
const DIRECTORY_TIMEOUT: u32 = 12;
const ADDRESS_TIMEOUT: u32 = 14;

fn writes(writer: &Running) -> usize {
    writer.said().matches("writes").count()
}

/// Waits until the writer goes on.
fn goes_on(writer: &mut Running) {
    let (before, end) = (writes(writer), Instant::now() + PATIENCE);
    while writes(writer) < before + 2 {
        let said = writer.said();
        assert!(!said.contains("status") && Instant::now() < end, "{said}");
        assert!(writer.child.try_wait().unwrap().is_none(), "{said}");
        sleep(Duration::from_millis(10));
    }
}

/// Stops a process for some time.
fn stop(process: u32) {
    let pid = Pid::from_raw(process as i32);
    kill(pid, Signal::SIGSTOP).unwrap();
    sleep(STOP);
    kill(pid, Signal::SIGCONT).unwrap();
}

/// Starts a server and a writer, which writes when this returns. `environment` is of each.
fn start(worlds: [&World; 2], environment: [&str; 2], timeout: u32) -> Option<(Running, Running)> {
    let folder = &worlds[0].directory;
    let program = compiled("cc", "stopped.c", &["-libverbs"], folder)?;
    for name in ["a", "b"] {
        // Of earlier processes.
        let _ = std::fs::remove_file(folder.join(name));
    }
    let (program, folder) = (program.display(), folder.display());
    let line = |of, role, own, peer| {
        format!("env {of} {program} {role} {folder}/{own} {folder}/{peer} {timeout}")
    };
    let server = worlds[0].start(&line(environment[0], "serve", "a", "b"), "server.txt");
    let mut writer = worlds[1].start(&line(environment[1], "write", "b", "a"), "writer.txt");
    goes_on(&mut writer);
    Some((server, writer))
}

fn stops(worlds: [&World; 2], timeout: u32) {
    let Some((mut server, mut writer)) = start(worlds, ["A=B"; 2], timeout) else {
        return;
    };
    let (serving, writing) = (server.child.id(), writer.child.id());
    for process in [serving, writing] {
        stop(process);
        goes_on(&mut writer);
    }
    if installed(&["gdb"]) {
        let commands = format!("shell sleep {}", STOP.as_secs());
        let mut gdb = Command::new("gdb");
        let gdb = gdb.args(["-q", "-batch", "-p", &serving.to_string(), "-ex", &commands]);
        let output = gdb.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        goes_on(&mut writer);
    }
    // Stopped, it is killed: from then on retries count.
    kill(Pid::from_raw(serving as i32), Signal::SIGSTOP).unwrap();
    sleep(Duration::from_secs(1));
    assert!(!writer.said().contains("status"));
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let killed = Instant::now();
    // IBV_WC_RETRY_EXC_ERR
    assert!(writer.good().ends_with("status 12\n"));
    assert!(
        killed.elapsed() < Duration::from_secs(30),
        "{:?}",
        killed.elapsed()
    );
}

fn in_a_directory(provider: Provider) {
    let _turn = turn();
    let devices = match provider {
        Provider::Stock => "roce",
        Provider::Ours => "ib",
    };
    let world = World::new(provider, devices);
    stops([&world, &world], DIRECTORY_TIMEOUT);
    world.finish();
}

fn on_addresses(provider: Provider) {
    let _turn = turn();
    let [.., high, low] = std::process::id().to_be_bytes();
    let world = |number: u8| {
        let host = format!("roce:127.{number}.{high}.{low}");
        World::new(provider, String::leak(host))
    };
    // On one address, or on two of this host: the device retries, whatever the provider.
    let worlds = [world(191), world(192)];
    let writer = match provider {
        Provider::Stock => &worlds[0],
        Provider::Ours => &worlds[1],
    };
    stops([&worlds[0], writer], ADDRESS_TIMEOUT);
    worlds.into_iter().for_each(World::finish);
}

/// Two addresses whose processes do not find each other, as of two hosts.
#[test]
fn do_not_use_up_retries_between_hosts() {
    const PATIENCE: Duration = Duration::from_secs(4);
    let _turn = turn();
    let [.., high, low] = std::process::id().to_be_bytes();
    let mut worlds = [193, 194].map(|number| {
        let host = format!("roce:127.{number}.{high}.{low}");
        World::new(Provider::Stock, String::leak(host))
    });
    worlds[1].explains = true;
    let homes = [0, 1].map(|at| format!("XDG_RUNTIME_DIR={}", worlds[at].directory.display()));
    let patient = format!("{} RINGVERBS_PATIENCE={}", homes[1], PATIENCE.as_secs());
    let pair = [&worlds[0], &worlds[1]];
    let started = start(pair, [&homes[0], &patient], ADDRESS_TIMEOUT);
    if let Some((server, mut writer)) = started {
        stop(server.child.id());
        goes_on(&mut writer);
        kill(Pid::from_raw(server.child.id() as i32), Signal::SIGSTOP).unwrap();
        let stopped = Instant::now();
        // IBV_WC_RETRY_EXC_ERR
        assert!(writer.good().ends_with("status 12\n"));
        assert!(stopped.elapsed() > PATIENCE, "{:?}", stopped.elapsed());
        let explained = std::fs::read_to_string(worlds[1].directory.join("explanations"));
        let explained = explained.unwrap();
        let reason = "it was silent for 4.0s, which did not count (patience, ";
        assert!(explained.contains(reason), "{explained}");
    }
    worlds.into_iter().for_each(World::finish);
}

/// Lets a command change each thread of a process. Returns whether that succeeds.
fn for_each_thread(process: u32, command: &str) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.into_iter().all(|task| {
        let id = task.unwrap().file_name();
        let mut words = command.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .arg(id)
            .output()
            .unwrap()
            .status
            .success()
    })
}

/// In a directory and on addresses at once. Without retries that do not count, the writers fail
/// after a tenth of a second.
#[test]
fn processes_without_a_processor_do_not_use_up_retries() {
    const TIME: Duration = Duration::from_secs(1);
    let _turn = turn();
    if !installed(&["chrt", "taskset"]) {
        return;
    }
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = |number: u8| -> &str { format!("roce:127.{number}.{high}.{low}").leak() };
    let worlds = ["roce", address(195), address(196)];
    let worlds = worlds.map(|devices| World::new(Provider::Stock, devices));
    let pairs = [([&worlds[0]; 2], 8), ([&worlds[1], &worlds[2]], 11)];
    let pairs = pairs.map(|(pair, timeout)| start(pair, ["A=B"; 2], timeout));
    let [Some(first), Some(second)] = pairs else {
        return;
    };
    let mut pairs = [first, second];
    // Their threads get the first processor, and that only when it is idle.
    let starve = |(server, _): &(Running, Running)| {
        let all = ["chrt --idle --pid 0", "taskset --pid 1"];
        all.into_iter()
            .all(|it| for_each_thread(server.child.id(), it))
    };
    if !pairs.iter().all(starve) {
        testing::skip!("processes cannot be moved to the first processor");
        return;
    }
    let busy = ["-c", "0", "sh", "-c", "while :; do :; done"];
    let mut busy = Command::new("taskset").args(busy).spawn().unwrap();
    sleep(TIME);
    busy.kill().unwrap();
    busy.wait().unwrap();
    for (server, writer) in &mut pairs {
        // Else other tests could keep the processor busy. May take a right.
        for_each_thread(server.child.id(), "chrt --other --pid 0");
        goes_on(writer);
    }
}

with_each_provider! {
    do_not_use_up_retries_in_a_directory: in_a_directory;
    do_not_use_up_retries_on_addresses: on_addresses;
}
