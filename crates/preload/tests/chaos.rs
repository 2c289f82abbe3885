//! Programs that rely on what the specification does not promise, on devices that keep to it and
//! no more: `c/chaos_cases.c`.

#[macro_use]
mod common;

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use common::*;

/// Programs, each with an assumption that the specification does not permit.
const CASES: [&str; 11] = [
    "reuse",
    "order",
    "last-byte",
    "opcode",
    "event",
    "first-completion",
    "poll-all",
    "number",
    "established",
    "result",
    "reply",
];

/// After which time a program hangs, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);

/// Some of them, each with a seed with which it fails nearly always.
const SOME: [(&str, u32); 3] = [("opcode", 1), ("number", 1), ("established", 2)];

struct Cases {
    world: World,
    program: PathBuf,
}

impl Cases {
    /// Returns `None` if the program cannot be built.
    fn new(provider: Provider) -> Option<Self> {
        let world = World::new(provider, "roce");
        let options = &["-libverbs"];
        let program = compiled("cc", "chaos_cases.c", options, &world.directory)?;
        Some(Self { world, program })
    }

    fn command(&self, arguments: &str, variables: &[(&str, &str)]) -> Command {
        let line = format!("{} {arguments}", self.program.display());
        let mut command = self.world.command(&line);
        command.envs(variables.iter().copied());
        command
    }

    /// Returns whether the program ends well.
    fn passes(&self, arguments: &str, variables: &[(&str, &str)]) -> bool {
        let mut child = self.command(arguments, variables).spawn().unwrap();
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = child.try_wait().unwrap() {
                return status.success();
            }
            if Instant::now() > end {
                child.kill().unwrap();
                child.wait().unwrap();
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn passes_with(&self, arguments: &str, seed: u32) -> bool {
        self.passes(arguments, &[("RINGVERBS_CHAOS", &seed.to_string())])
    }
}

fn some_programs_fail(provider: Provider) {
    let _turn = turn();
    let Some(cases) = Cases::new(provider) else {
        return;
    };
    for (case, seed) in SOME {
        assert!(cases.passes(case, &[]), "{case}");
        let fails = (0..20).any(|_| !cases.passes_with(case, seed));
        assert!(fails, "{case} passes with seed {seed}");
        assert!(cases.passes_with(&format!("{case} right"), seed), "{case}");
    }
}

fn decisions_can_be_left_out(provider: Provider) {
    let _turn = turn();
    let Some(cases) = Cases::new(provider) else {
        return;
    };
    let file = cases.world.directory.join("decisions");
    let chaos = ("RINGVERBS_CHAOS", "1");
    let path = file.to_str().unwrap();
    assert!(!cases.passes("opcode", &[chaos, ("RINGVERBS_CHAOS_DECISIONS", path)]));
    let all = std::fs::read_to_string(&file).unwrap();
    let (fields, others): (Vec<&str>, Vec<&str>) =
        all.lines().partition(|line| line.starts_with("field:"));
    let only = |list: &[&str]| {
        // An empty variable is as none.
        let list = format!(",{}", list.join(","));
        cases.passes("opcode", &[chaos, ("RINGVERBS_CHAOS_ONLY", &list)])
    };
    assert!(!only(&fields), "{all}");
    assert!(only(&others), "{all}");
}

/// Runs each program as it is, and as it should be.
fn programs_fail(provider: Provider, runs: u32, seeds: u32) {
    let _turn = turn();
    let Some(cases) = Cases::new(provider) else {
        return;
    };
    for case in CASES {
        for run in 0..runs {
            assert!(cases.passes(case, &[]), "{case}: run {run}");
        }
        let failed = (1..=200).find(|seed| !cases.passes_with(case, *seed));
        assert!(failed.is_some(), "{case} passes with all seeds");
        println!("{case} fails with seed {failed:?}");
        for seed in 1..=seeds {
            assert!(
                cases.passes_with(&format!("{case} right"), seed),
                "{case}: {seed}"
            );
        }
    }
}

#[test]
#[ignore = "the long list; `some_fail` is a short one"]
fn stock_programs_fail() {
    programs_fail(Provider::Stock, 200, 200);
}

#[test]
#[ignore = "the long list; `some_fail` is a short one"]
fn our_programs_fail() {
    programs_fail(Provider::Ours, 20, 50);
}

with_each_provider! {
    some_fail: some_programs_fail;
    decisions: decisions_can_be_left_out;
}
