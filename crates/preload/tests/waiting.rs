//! What waiting for an embedded device costs a program, with rdma-core's provider and with
//! ours, with wide limits, since other programs run too. `waiting` by hand prints all figures.

#[macro_use]
mod common;

use std::path::PathBuf;

use common::*;

/// Attempts of a measurement, of which one must be good: the host may be busy.
const ATTEMPTS: usize = 5;

fn world(provider: Provider, source: &str) -> Option<(World, PathBuf)> {
    let world = World::new(provider, "roce");
    let libraries = ["-libverbs", "-lpthread"];
    let program = compiled("cc", source, &libraries, &world.directory)?;
    Some((world, program))
}

/// Returns the number after a word of the output.
fn figure(output: &str, word: &str) -> f64 {
    let mut words = output.split_whitespace().skip_while(|it| *it != word);
    let number = words.nth(1).and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("no {word} in {output}"))
}

/// Runs a mode of the program until `is_good`, with its output, returns true.
fn measure(provider: Provider, mode: &str, is_good: impl Fn(&str) -> bool) {
    measure_with(provider, "waiting.c", mode, is_good);
}

fn measure_with(provider: Provider, source: &str, mode: &str, is_good: impl Fn(&str) -> bool) {
    let _turn = turn();
    let Some((world, program)) = world(provider, source) else {
        return;
    };
    let line = format!("{} {mode}", program.display());
    let attempt = || {
        let output = world.start(&line, "output.txt").good();
        (!is_good(&output)).then_some(output)
    };
    let mut bad = Vec::new();
    while let Some(output) = attempt() {
        bad.push(output);
        assert!(bad.len() < ATTEMPTS, "{mode}: {bad:?}");
    }
    world.finish();
}

/// Work between two empty polls is not delayed by sleeps.
fn works_between_polls(provider: Provider) {
    for work in ["5", "100", "300"] {
        measure(provider, &format!("gaps {work}"), |output| {
            let ratios = output.lines().map(|line| figure(line, "ratio"));
            // Eight polls of a debug build take longer than 5 us of work.
            let limit = if work == "5" { 20.0 } else { 3.0 };
            ratios.clone().count() == 3 && ratios.fold(0.0, f64::max) < limit
        });
    }
}

/// One thread posts after a pause, and another one gets the event.
fn posts_while_another_waits(provider: Provider) {
    // With sleeps that no doorbell ends it was 10 ms and 24 to 97 ms.
    for (delay, limit) in [(20, 6000.0), (300, 12_000.0)] {
        measure(provider, &format!("event {delay} 9"), |output| {
            figure(output, "median") < limit
        });
    }
}

/// The same if the pages of doorbells are mapped and unmapped unseen.
fn posts_to_hidden_pages(provider: Provider) {
    measure_with(provider, "hidden.c", "12 300", |output| {
        figure(output, "late") < 12.0
    });
}

/// An event takes one wake-up, as a message on a socket does.
fn exchanges_by_events(provider: Provider) {
    for how in ["events", "epoll"] {
        measure(provider, &format!("exchange {how} 500"), |output| {
            figure(output, "sleeps") < 5.0
        });
    }
}

fn takes_signals(provider: Provider) {
    for mode in ["blocked", "cancel", "signals"] {
        measure(provider, mode, |_| true);
    }
}

/// Threads that leave their waits, by cancellation or siglongjmp(3), leave frames to others.
fn leaves_frames_to_others(provider: Provider) {
    for mode in ["left cancel", "left jump"] {
        measure(provider, mode, |_| true);
    }
}

/// Handlers of faults, and of signals that interrupt the device, are as without it.
fn handles_signals_as_without_devices(provider: Provider) {
    let _turn = turn();
    let world = World::new(provider, "roce");
    let libraries = ["-libverbs", "-lpthread"];
    let Some(program) = compiled("cc", "handlers.c", &libraries, &world.directory) else {
        return;
    };
    let modes = [
        "jump",
        "jump_unmasked",
        "nodefer",
        "altstack",
        "inside",
        "nested",
        "sysv",
        "sigset",
        "sighold",
        "sigblock",
        "sigsetmask",
        "attribute",
        "opens",
        "actions",
        "limit",
    ];
    for mode in modes {
        world
            .start(&format!("{} {mode}", program.display()), "output.txt")
            .good();
    }
    world.finish();
}

with_each_provider! {
    waits_that_are_left_leave_frames_to_others: leaves_frames_to_others;
    handlers_are_as_without_devices: handles_signals_as_without_devices;
    work_between_polls_is_not_delayed: works_between_polls;
    a_post_wakes_the_sleeping_device: posts_while_another_waits;
    a_post_to_a_hidden_page_wakes_it: posts_to_hidden_pages;
    events_take_one_wake_up: exchanges_by_events;
    waits_end_by_signals_and_cancellation: takes_signals;
}
