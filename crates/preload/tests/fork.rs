//! The table of docs/embedded.md#children-of-fork: what parents and children can do with devices.

#[macro_use]
mod common;

use std::fs;

use common::*;

/// The sentence about the use of something that is the parent's.
const SENTENCE: &str = "does not work after a fork (EIO)";
/// The sentence about the use of a channel that another process has used first.
const SHARED: &str = "does not work after a fork (EIO) in all but the process that uses it first";

fn modes(provider: Provider) {
    let _turn = turn();
    let [.., high, low] = std::process::id().to_be_bytes();
    let host: &str = String::leak(format!("roce:127.190.{high}.{low}"));
    for devices in ["roce", host] {
        let world = World::new(provider, devices);
        let libraries = ["-libverbs", "-lpthread"];
        let Some(program) = compiled("cc", "fork.c", &libraries, &world.directory) else {
            return;
        };
        // Each with the number of processes that use what is their parent's.
        for (mode, refused) in [
            ("use", 0),
            ("context", 0),
            ("daemon", 0),
            ("queues", 2),
            ("workers", 0),
            ("threads", 0),
            ("spawn", 0),
            ("vfork", 0),
            ("fork-exec", 0),
            ("exec", 0),
        ] {
            let line = format!("{} {mode}", program.display());
            let said = world.start(&line, "fork.txt").good();
            assert_eq!(said.matches(SENTENCE).count(), refused, "{mode}: {said}");
            assert_eq!(said.lines().count(), refused, "{mode}: {said}");
        }
        world.finish();
    }
}

/// Children connect to their parent by the connection manager.
fn connections(provider: Provider) {
    let _turn = turn();
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = format!("127.189.{high}.{low}");
    let host: &str = String::leak(format!("roce:{address}"));
    for (devices, address) in [("roce", "127.0.0.1"), (host, &address)] {
        let world = World::new(provider, devices);
        let libraries = ["-lrdmacm", "-libverbs"];
        let Some(program) = compiled("cc", "fork_cm.c", &libraries, &world.directory) else {
            return;
        };
        let line = format!("{} {address}", program.display());
        let said = world.start(&line, "connections.txt").good();
        assert_eq!(said.matches(SHARED).count(), 3, "{said}");
        world.finish();
    }
}

/// Servers that listen, and then fork.
fn listeners(provider: Provider) {
    let _turn = turn();
    let [.., high, low] = std::process::id().to_be_bytes();
    let address = format!("127.188.{high}.{low}");
    let host: &str = String::leak(format!("roce:{address}"));
    for (devices, address) in [("roce", "127.0.0.1"), (host, &address)] {
        let world = World::new(provider, devices);
        let libraries = ["-lrdmacm", "-libverbs"];
        let Some(program) = compiled("cc", "fork_listen.c", &libraries, &world.directory) else {
            return;
        };
        // Each with the number of processes that use what another one has used first.
        for (mode, refused) in [
            ("daemon", 0),
            ("bound", 0),
            ("twice", 0),
            ("poll", 0),
            ("select", 0),
            ("gap", 0),
            ("unread", 0),
            ("child", 1),
            ("left", 0),
            ("closes", 0),
            ("parent", 2),
            ("workers", 2),
        ] {
            let line = format!("{} {mode} {address}", program.display());
            let said = world.start(&line, "listeners.txt").good();
            assert_eq!(said.matches(SHARED).count(), refused, "{mode}: {said}");
            assert_eq!(said.lines().count(), refused, "{mode}: {said}");
        }
        world.finish();
    }
}

/// Workers of Python's multiprocessing, with each of its ways to start them.
fn python(provider: Provider) {
    let _turn = turn();
    if !installed(&["python3", "cc"]) {
        return;
    }
    let world = World::new(provider, "roce");
    let libraries = ["-shared", "-fPIC", "-Dmain=run", "-libverbs", "-lpthread"];
    if compiled("cc", "fork.c", &libraries, &world.directory).is_none() {
        return;
    }
    let script = world.directory.join("workers.py");
    let library = world.directory.join("fork");
    let text = format!(
        "\
import ctypes, multiprocessing

def work():
    argv = (ctypes.c_char_p * 3)(b'fork', b'use', None)
    assert ctypes.CDLL('{}').run(2, argv) == 0

if __name__ == '__main__':
    work()
    for method in ['fork', 'spawn', 'forkserver']:
        context = multiprocessing.get_context(method)
        workers = [context.Process(target=work) for _ in range(3)]
        [worker.start() for worker in workers]
        work()
        [worker.join() for worker in workers]
        assert [worker.exitcode for worker in workers] == [0, 0, 0], method
        work()
",
        library.display()
    );
    fs::write(&script, text).unwrap();
    let line = format!("python3 {}", script.display());
    assert_eq!(world.start(&line, "python.txt").good(), "");
    world.finish();
}

with_each_provider! {
    parents_and_children_use_devices: modes;
    children_connect_to_their_parent: connections;
    servers_listen_before_they_fork: listeners;
    workers_of_python_use_devices: python;
}
