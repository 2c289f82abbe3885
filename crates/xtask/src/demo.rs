//! `cargo xtask demo`: unmodified programs on rdma_rxe, served by ringverbs.

use std::process::ExitCode;

use anyhow::{Context, Result};
use rxe_tests::guest::Suite;
use rxe_tests::record::{Outcome, Provider};

use crate::dist;
use crate::suite::{self, Request};

/// The command line.
#[derive(clap::Args)]
pub struct Arguments {
    /// The Debian release of the guest: trixie, bookworm, sid, or trixie-arm64
    #[arg(long, default_value = "trixie")]
    suite: Suite,
}

/// Builds the plugin and the guest, runs `ibv_rc_pingpong` and `ib_write_bw` in it with
/// stock and with ringverbs, and prints the figures and the proof of the provider.
pub fn demo(arguments: &Arguments) -> Result<ExitCode> {
    eprintln!("1. building the plugin");
    let plugin = dist::dist_for(arguments.suite.architecture())?;
    eprintln!("2. making and booting a guest with rdma_rxe (minutes, the first time)");
    let request = Request {
        plugin: Some(plugin),
        short: true,
        filter: vec![
            "pingpong rc -n 100 -c".into(),
            "perftest write_bw -n 200".into(),
        ],
        kernel: None,
        // Both providers are shown.
        fresh_stock: true,
    };
    let results = suite::in_guest(arguments.suite, &request)?;

    println!();
    println!(
        "Debian {}, kernel {}, rdma-core {}, device rxe0 (rdma_rxe):",
        arguments.suite, results.kernel, results.rdma_core
    );
    for case in &results.cases {
        let program = match case.group.as_str() {
            "pingpong" => format!("ibv_{}", case.name.replacen(' ', "_pingpong ", 1)),
            _ => format!("ib_{}", case.name),
        };
        let served = match case.provider {
            Provider::Stock => "rdma-core's own provider".to_owned(),
            Provider::Ours => "ringverbs".to_owned(),
            Provider::OursServer => "ringverbs server, rdma-core's client".to_owned(),
            Provider::OursClient => "rdma-core's server, ringverbs client".to_owned(),
            Provider::Native | Provider::NativeWithC | Provider::NativeWithPlugin => {
                "no provider: the Rust crate".to_owned()
            }
        };
        let figures: Vec<String> = case
            .figures
            .iter()
            .map(|(unit, value)| format!("{value} {unit}"))
            .collect();
        let how = match case.outcome {
            Outcome::Pass => figures.join(", "),
            _ => format!("FAILED: {}", case.detail),
        };
        println!("  {program:<32} {served:<40} {how}");
    }
    println!("Provider libraries in the memory maps of the programs served by ringverbs:");
    for (case, maps) in &results.proofs {
        println!("  {case}: {}", maps.join(" "));
    }
    if let Some(line) = &results.plugin_refusal {
        println!("The plugin refused this rdma-core: {line}");
    }
    let ours = |provider| results.cases.iter().any(|c| c.provider == provider);
    ours(Provider::Ours)
        .then_some(())
        .context("no case was served by ringverbs")?;
    let good = results.cases.iter().all(|c| c.outcome == Outcome::Pass);
    Ok(if good && !results.proofs.is_empty() {
        println!("ringverbs served them.");
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
