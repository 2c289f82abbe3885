//! All cases of a machine, under every provider, in one go.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::case::{Case, Need, Ready, Shape, chosen};
use super::embedded::{self, Embedded};
use super::process::Plugin;
use super::run::{Runner, refusal};
use super::setup::{self, Device, Wiring};
use super::stock::Verdicts;
use super::{lists, programs, pyverbs, rates, selection};
use crate::guest::host::which;
use crate::record::{Outcome, Provider, Record, Stock};

/// What to run.
#[derive(Debug, clap::Args)]
pub struct Plan {
    /// The plugin, without `-rdmav<ABI>.so`; without it only stock is run
    #[arg(long)]
    plugin: Option<PathBuf>,
    /// Run the short list instead of all cases
    #[arg(long)]
    short: bool,
    /// Of this group run only the short list (or of these)
    #[arg(long)]
    brief: Vec<String>,
    /// The folder of rdma-core's pyverbs tests
    #[arg(long)]
    pyverbs: Option<PathBuf>,
    /// The folder of the test programs and their manifest
    #[arg(long)]
    programs: Option<PathBuf>,
    /// The folder of the Rust crate's test programs and their manifest
    #[arg(long)]
    native: Option<PathBuf>,
    /// rdma-core's version, if dpkg does not know it
    #[arg(long)]
    rdma_core: Option<String>,
    /// A folder to work in
    #[arg(long, default_value = "/tmp/rxe-driver")]
    scratch: PathBuf,
    /// Write the records to this file as well
    #[arg(long)]
    out: Option<PathBuf>,
    /// Take stock's verdicts that this file has, and run what it has not
    #[arg(long)]
    stock_verdicts: Option<PathBuf>,
    /// Run only cases whose group and name contain this (or one of these)
    #[arg(long)]
    filter: Vec<String>,
    /// Also install the plugin and the command in this system for a while, with
    /// this program, which is `cargo xtask`, and remove them
    #[arg(long)]
    installer: Option<PathBuf>,
    /// The same with these Debian packages
    #[arg(long)]
    deb: Vec<PathBuf>,
    /// Use this device, which is there already and is served by rdma-core's
    /// libmlx5, instead of making one with rdma_rxe
    #[arg(long, requires = "address")]
    device: Option<String>,
    /// Give the programs embedded devices by this library, instead of the kernel's
    #[arg(long, conflicts_with_all = ["device", "installer", "deb"])]
    embedded: Option<PathBuf>,
    /// Put this libmlx5.so.1 in the place of rdma-core's, instead of preloading the
    /// plugin
    #[arg(long, requires = "embedded", requires = "plugin")]
    in_place: Option<PathBuf>,
    /// The kind of their port
    #[arg(long, default_value = "roce")]
    port: String,
    /// The index of its GID
    #[arg(long, default_value_t = 0)]
    gid: u32,
    /// An IPv4 address of this machine, the device's own where it has one
    #[arg(long)]
    address: Option<Ipv4Addr>,
    /// Leave out what connects by rdma_cm: the device has no address
    #[arg(long)]
    no_cm: bool,
    /// The card's MTU in bytes
    #[arg(long, default_value_t = 4200)]
    mtu: u32,
}

/// Runs the plan. Failed cases are reported, and are no error.
pub fn run(plan: &Plan) -> Result<()> {
    fs::create_dir_all(&plan.scratch)
        .with_context(|| format!("cannot make {}", plan.scratch.display()))?;
    let device = device(plan)?;
    let plugin = plan.plugin.clone().map(|path| Plugin {
        path,
        beside_others: plan.embedded.is_some(),
        preload: device.given,
        in_place: plan.in_place.clone(),
    });
    let mut runner = Runner::new(device, plan.mtu, plugin, plan.scratch.clone());
    runner.report.file = plan.out.clone();
    if let Some(library) = &plan.embedded {
        runner.embedded = Some(Embedded::new(library, &plan.port, &plan.scratch)?);
    }
    runner.programs = plan.programs.clone();
    runner.native = plan.native.clone();

    let rdma_core = match &plan.rdma_core {
        Some(version) => version.clone(),
        None => installed_rdma_core()?,
    };
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    runner.report.put(&Record::Environment {
        kernel: kernel.trim().to_owned(),
        rdma_core: rdma_core.clone(),
    })?;

    let mut ours = runner.plugin.is_some();
    if ours {
        if let Some(line) = refusal(&runner)? {
            runner.report.put(&Record::Refused { line })?;
            ours = false;
        }
    }

    let cached = match &plan.stock_verdicts {
        Some(path) => Verdicts::read(path)?,
        None => Verdicts::default(),
    };
    let listed = cases(plan, &rdma_core)?;
    let wanted = listed.iter().filter(|case| {
        (case.short || !plan.short && !plan.brief.iter().any(|it| it == case.group))
            && case.chosen_by(&plan.filter)
    });
    for case in wanted {
        let missing = case.needs.filter(|&need| !has(plan, need));
        let missing = missing.map(|need| need.missing().to_owned());
        let missing =
            missing.or_else(|| embedded::missing(case).filter(|_| plan.embedded.is_some()));
        let mut once = None;
        for provider in providers(case, ours) {
            if let Some(why) = &missing {
                runner.pass_over(case, provider, why)?;
                continue;
            }
            // What is compared needs the output.
            if provider == Provider::Stock && !case.same_output {
                if let Some(verdict) = cached.of(case.group, &case.name) {
                    if verdict.stock == case.stock {
                        runner.report.put(&Record::Case(verdict.clone()))?;
                        continue;
                    }
                }
            }
            let result = runner.run(once.as_ref().unwrap_or(case), provider)?;
            // Nothing is asked of the others then: they show once how they fare.
            if provider == Provider::Stock
                && case.stock == Stock::Reference
                && result.outcome == Outcome::Fail
            {
                once = Some(case.clone().attempts(1));
            }
        }
    }
    if ours && plan.embedded.is_none() {
        if let Some(probe) = probe(&listed) {
            if chosen(&plan.filter, selection::GROUP) {
                let installers = selection::Installers {
                    xtask: plan.installer.clone(),
                    debs: plan.deb.clone(),
                };
                selection::run(&runner, &probe, &installers)?;
            }
        }
    }
    // What they say is about rdma_rxe.
    if ours && !plan.short && plan.device.is_none() && plan.embedded.is_none() {
        rates::run(&mut runner, |name| chosen(&plan.filter, name))?;
    }
    if let Some(folder) = &plan.pyverbs {
        if !plan.short {
            if let Some(wanted) = pyverbs_filter(&plan.filter) {
                if !folder.join("run_tests.py").exists() {
                    runner.report.put(&pyverbs::missing(folder))?;
                    return runner.report.put(&Record::End);
                }
                pyverbs::run(&mut runner, folder, Provider::Stock, &wanted, &cached)?;
                if ours {
                    pyverbs::run(&mut runner, folder, Provider::Ours, &wanted, &cached)?;
                }
            }
        }
    }
    runner.report.put(&Record::End)
}

/// The device that was given, or one that is made.
fn device(plan: &Plan) -> Result<Device> {
    if let (Some(name), Some(address)) = (&plan.device, plan.address) {
        return Ok(Device {
            name: name.clone(),
            address,
            gid: plan.gid,
            stock: "libmlx5.so",
            given: true,
        });
    }
    if plan.embedded.is_some() {
        return Ok(Device {
            name: "mlx5_0".to_owned(),
            address: plan.address.unwrap_or(Ipv4Addr::LOCALHOST),
            gid: plan.gid,
            stock: "libmlx5.so",
            given: true,
        });
    }
    setup::devices(Wiring::Loopback, plan.mtu)?
        .pop()
        .context("no device was made")
}

/// Whether the device has what some cases need.
fn has(plan: &Plan, need: Need) -> bool {
    match need {
        Need::Rxe => plan.device.is_none() && plan.embedded.is_none(),
        Need::Address => !plan.no_cm,
    }
}

/// A test program that tells who serves it, and passes with both.
fn probe(cases: &[Case]) -> Option<String> {
    cases.iter().find_map(|case| match &case.shape {
        Shape::Single(line) if case.group == programs::GROUP && case.stock == Stock::Reference => {
            Some(line.clone())
        }
        _ => None,
    })
}

/// The cases that take a device away.
const UNPLUG: &str = "unplug";

/// All cases that can be run here, in order.
fn cases(plan: &Plan, rdma_core: &str) -> Result<Vec<Case>> {
    let mut cases = lists::all(programs::major(rdma_core)?);
    if plan.embedded.is_some() {
        cases.extend(embedded::cases(&plan.port));
    }
    // A tool that this release does not have is no case here.
    cases.retain(|case| {
        plan.embedded.is_some() || {
            let line = match &case.shape {
                Shape::Single(line) => line,
                Shape::Pair { server, .. } | Shape::Service { server, .. } => server,
            };
            line.split(' ')
                .next()
                .is_some_and(|program| which(program).is_some())
        }
    });
    if plan.no_cm {
        cases.retain(|case| !by_cm(case));
    }
    for folder in [&plan.programs, &plan.native].into_iter().flatten() {
        cases.extend(manifest(folder, rdma_core)?);
    }
    // Last: on Linux 7.2 it leaves this machine without rdma_rxe's UDP sockets
    // (4791), although a device is still there: the device's own messages to
    // itself need none, multicast does. A card that is deleted under a device in
    // use takes them along (`unplug netdev`), a device that is deleted does not:
    // the module lets go of them at each word of a card's end, which probably
    // comes again while somebody has the device. The next device that is added
    // makes them anew.
    cases.sort_by_key(|case| case.name == UNPLUG);
    Ok(cases)
}

/// Whether a case connects by rdma_cm.
fn by_cm(case: &Case) -> bool {
    let ready = match case.shape {
        Shape::Single(_) => Ready::Tcp,
        Shape::Pair { ready, .. } | Shape::Service { ready, .. } => ready,
    };
    case.group == "rdma_cm" || ready != Ready::Tcp
}

/// What the filters ask of the pyverbs tests: `None` if none of them, else
/// parts of names, of which a test has one; no parts are all tests.
fn pyverbs_filter(filters: &[String]) -> Option<Vec<String>> {
    let parts: Vec<String> = filters
        .iter()
        .filter_map(|filter| filter.strip_prefix(pyverbs::GROUP))
        .map(|part| part.trim_start().to_owned())
        .collect();
    if filters.is_empty() || parts.iter().any(String::is_empty) {
        return Some(Vec::new());
    }
    (!parts.is_empty()).then_some(parts)
}

fn manifest(folder: &Path, rdma_core: &str) -> Result<Vec<Case>> {
    let path = folder.join("manifest.txt");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    programs::manifest(&text, rdma_core)
}

/// Who serves the runs of a case.
fn providers(case: &Case, ours: bool) -> Vec<Provider> {
    if let Some(native) = case.native {
        let possible = ours || native != Provider::NativeWithPlugin;
        return possible.then_some(native).into_iter().collect();
    }
    let mut providers = Vec::new();
    if case.stock != Stock::NotRun {
        providers.push(Provider::Stock);
    }
    if ours {
        providers.push(Provider::Ours);
        if case.mixed {
            providers.extend([Provider::OursServer, Provider::OursClient]);
        }
    }
    providers
}

fn installed_rdma_core() -> Result<String> {
    let out = std::process::Command::new("dpkg-query")
        .args(["-W", "-f", "${Version}", "rdma-core"])
        .output()
        .context("cannot ask dpkg for rdma-core's version; give it with --rdma-core")?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_choose_among_the_pyverbs_tests() {
        let asked = |filters: &[&str]| {
            let filters: Vec<String> = filters.iter().map(|&text| text.to_owned()).collect();
            pyverbs_filter(&filters)
        };
        let parts = |parts: &[&str]| Some(parts.iter().map(|&part| part.to_owned()).collect());
        assert_eq!(asked(&[]), parts(&[]));
        assert_eq!(asked(&["rping", "pingpong"]), None);
        assert_eq!(asked(&["pyverbs"]), parts(&[]));
        assert_eq!(
            asked(&["pyverbs tests.test_buf"]),
            parts(&["tests.test_buf"])
        );
        assert_eq!(
            asked(&["rping", "pyverbs test_a", "pyverbs test_b"]),
            parts(&["test_a", "test_b"])
        );
        // All of them holds every part.
        assert_eq!(asked(&["pyverbs test_a", "pyverbs "]), parts(&[]));
    }
}
