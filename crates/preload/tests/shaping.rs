//! Links with a rate, a delay and a queue, measured by perftest.

#[macro_use]
mod common;

use std::fs;

use common::*;
use testing::hosts::free_port;

/// Runs both ends of a test of perftest. Returns the numbers in the line of its results.
fn measure(world: &World, line: &str) -> Vec<f64> {
    let server = format!("{line} -d mlx5_0 -x 3 -p {}", free_port());
    let said = world.pair(&server, &format!("{server} localhost"));
    let results = said.lines().rev().find_map(|line| {
        let numbers: Result<Vec<f64>, _> = line.split_whitespace().map(str::parse).collect();
        numbers.ok().filter(|numbers| numbers.len() >= 4)
    });
    results.unwrap_or_else(|| panic!("{said}"))
}

/// Measures the rate of a link of 100 Mbit/s that loses nothing, in Gbit/s: on a busy machine
/// more than once, since programs that do not run send less, but never more.
fn lossless_rate(world: &World, line: &str) -> f64 {
    let mut rate = 0.0;
    for _ in 0..10 {
        rate = measure(world, line)[3];
        if rate >= 0.09 {
            break;
        }
    }
    rate
}

fn shaped(provider: Provider) {
    let _turn = turn();
    if !installed(&["ib_write_bw", "ib_read_lat"]) {
        return;
    }
    let mut world = World::new(provider, "roce");
    // Slow enough for a busy machine. Headers take 2.4%.
    world.link = Some("100Mbit");
    let bandwidth = "ib_write_bw -s 65536 -n 100 --report_gbits";
    let rate = lossless_rate(&world, bandwidth);
    println!("100 Mbit/s: {} Mbit/s", rate * 1000.0);
    assert!((0.09..=0.1).contains(&rate), "{rate}");
    world.link = Some("delay=2ms");
    let latency = measure(&world, "ib_read_lat -s 8 -n 100");
    println!("2 ms each way: {latency:?} us");
    assert!((4000.0..4800.0).contains(&latency[2]), "{latency:?}");
    // Lost packets are repeated.
    world.link = Some("100Mbit,queue=64KiB,ecn=16KiB");
    world.explains = true;
    let rate = measure(&world, bandwidth)[3];
    println!("with drops: {} Mbit/s", rate * 1000.0);
    assert!((0.001..=0.1).contains(&rate), "{rate}");
    let explanations = world.directory.join("explanations");
    let text = fs::read_to_string(&explanations).unwrap();
    let cause = "the link's queue of 65536 bytes is full";
    assert!(text.contains(cause), "{text}");
    fs::remove_file(&explanations).unwrap();
    // The same queue stops the sender instead.
    world.link = Some("100Mbit,queue=64KiB,pause");
    let rate = lossless_rate(&world, bandwidth);
    println!("with pauses: {} Mbit/s", rate * 1000.0);
    assert!((0.09..=0.1).contains(&rate), "{rate}");
    let text = fs::read_to_string(&explanations).unwrap_or_default();
    assert!(!text.contains("is full"), "{text}");
    world.finish();
}

with_each_provider! {
    links_have_a_rate_a_delay_and_a_queue: shaped;
}
