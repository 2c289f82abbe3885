//! Runs all cases on a machine with every provider.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::case::{Case, Need, ReadyCheck, Shape, matches_filter};
use super::embedded::{self, Embedded};
use super::process::Plugin;
use super::run::{Runner, plugin_refusal};
use super::setup::{self, Device, Wiring};
use super::stock::CachedVerdicts;
use super::{lists, programs, pyverbs, rates, selection};
use crate::guest::host::which;
use crate::record::{Outcome, Provider, Record, StockExpectation};

/// The options of the command `suite`.
#[derive(Debug, clap::Args)]
pub struct Plan {
    /// The plugin, without `-rdmav<ABI>.so`; the default is stock only
    #[arg(long)]
    plugin: Option<PathBuf>,
    /// Run the short list instead of all cases
    #[arg(long)]
    short: bool,
    /// Run only the short list of this group (or of these)
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
    /// Reuse stock's verdicts in this file instead of running the cases
    #[arg(long)]
    stock_verdicts: Option<PathBuf>,
    /// Run stock only where ours does not pass; of the test programs, only in the short
    /// list: in the long one a program that fails with stock is wrong itself
    #[arg(long, requires = "plugin")]
    stock_if_needed: bool,
    /// Run only cases whose group and name contain this (or one of these)
    #[arg(long)]
    filter: Vec<String>,
    /// Also install the plugin and the command in this system with this program,
    /// which is `cargo xtask`, and remove them
    #[arg(long)]
    installer: Option<PathBuf>,
    /// Also install these Debian packages in this system, and remove them
    #[arg(long)]
    deb: Vec<PathBuf>,
    /// Use this existing device of rdma-core's libmlx5, instead of creating one with
    /// rdma_rxe
    #[arg(long, requires = "address")]
    device: Option<String>,
    /// Run the programs on embedded devices of this library, instead of the kernel's
    #[arg(long, conflicts_with_all = ["device", "installer", "deb"])]
    embedded: Option<PathBuf>,
    /// Replace rdma-core's libmlx5.so.1 by this one, instead of preloading the plugin
    #[arg(long, requires = "embedded", requires = "plugin")]
    in_place: Option<PathBuf>,
    /// The link layer of the embedded port: roce or ib
    #[arg(long, default_value = "roce")]
    port: String,
    /// The index of its GID
    #[arg(long, default_value_t = 0)]
    gid: u32,
    /// An IPv4 address of this machine, the device's own where it has one
    #[arg(long)]
    address: Option<Ipv4Addr>,
    /// Leave out cases that connect by rdma_cm: the device has no address
    #[arg(long)]
    no_cm: bool,
    /// The network device's MTU in bytes
    #[arg(long, default_value_t = 4200)]
    mtu: u32,
}

/// Runs the plan. Failed cases are reported, and are not errors.
pub fn run(plan: &Plan) -> Result<()> {
    fs::create_dir_all(&plan.scratch)
        .with_context(|| format!("cannot make {}", plan.scratch.display()))?;
    let device = device(plan)?;
    let plugin = plan.plugin.clone().map(|path| Plugin {
        path,
        keep_configured_providers: plan.embedded.is_some(),
        preload: device.preexisting,
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
    runner.report.write(&Record::Environment {
        kernel: kernel.trim().to_owned(),
        rdma_core: rdma_core.clone(),
    })?;

    let mut ours = runner.plugin.is_some();
    if ours {
        if let Some(line) = plugin_refusal(&runner)? {
            runner.report.write(&Record::Refused { line })?;
            ours = false;
        }
    }

    let cached = match &plan.stock_verdicts {
        Some(path) => CachedVerdicts::read(path)?,
        None => CachedVerdicts::default(),
    };
    let listed = cases(plan, &rdma_core)?;
    let wanted = listed.iter().filter(|case| {
        (case.short || !plan.short && !plan.brief.iter().any(|it| it == case.group))
            && case.matches(&plan.filter)
    });
    for case in wanted {
        let missing = case.needs.filter(|&need| !device_meets(plan, need));
        let missing = missing.map(|need| need.missing().to_owned());
        let missing =
            missing.or_else(|| embedded::missing_program(case).filter(|_| plan.embedded.is_some()));
        let mut single_attempt = None;
        let mut providers = providers(case, ours);
        let stock_is_last = ours && plan.stock_if_needed && is_reference_only(case, plan.short);
        if stock_is_last {
            providers.rotate_left(1);
        }
        let mut all_pass = stock_is_last;
        for provider in providers {
            if let Some(reason) = &missing {
                runner.skip(case, provider, reason)?;
                continue;
            }
            if provider == Provider::Stock && all_pass {
                continue;
            }
            // Comparisons need stock's output, which is not cached.
            if provider == Provider::Stock && !case.same_output {
                if let Some(verdict) = cached.get(case.group, &case.name) {
                    if verdict.stock == case.stock {
                        runner.report.write(&Record::Case(verdict.clone()))?;
                        continue;
                    }
                }
            }
            let result = runner.run(single_attempt.as_ref().unwrap_or(case), provider)?;
            all_pass &= result.outcome == Outcome::Pass;
            // Nothing is required of the other providers then: one attempt shows their
            // result.
            if provider == Provider::Stock
                && case.stock == StockExpectation::Reference
                && result.outcome == Outcome::Fail
            {
                single_attempt = Some(case.clone().attempts(1));
            }
        }
    }
    if ours && plan.embedded.is_none() {
        if let Some(probe) = probe_command(&listed) {
            if matches_filter(&plan.filter, selection::GROUP) {
                let installers = selection::Installers {
                    xtask: plan.installer.clone(),
                    debs: plan.deb.clone(),
                };
                selection::run(&runner, &probe, &installers)?;
            }
        }
    }
    // The rates are those of rdma_rxe.
    if ours && !plan.short && plan.device.is_none() && plan.embedded.is_none() {
        rates::run(&mut runner, |name| matches_filter(&plan.filter, name))?;
    }
    if let Some(folder) = &plan.pyverbs {
        if !plan.short {
            if let Some(wanted) = pyverbs_filter(&plan.filter) {
                if !folder.join("run_tests.py").exists() {
                    runner.report.write(&pyverbs::missing(folder))?;
                    return runner.report.write(&Record::End);
                }
                let mut run = |provider, without: &[String]| {
                    pyverbs::run(&mut runner, folder, provider, &wanted, &cached, without)
                };
                if ours && plan.stock_if_needed {
                    let passed = run(Provider::Ours, &[])?;
                    run(Provider::Stock, &passed)?;
                } else {
                    run(Provider::Stock, &[])?;
                    if ours {
                        run(Provider::Ours, &[])?;
                    }
                }
            }
        }
    }
    runner.report.write(&Record::End)
}

/// Returns the device given by the options, or creates one.
fn device(plan: &Plan) -> Result<Device> {
    if let (Some(name), Some(address)) = (&plan.device, plan.address) {
        return Ok(Device {
            name: name.clone(),
            address,
            gid: plan.gid,
            stock: "libmlx5.so",
            preexisting: true,
        });
    }
    if plan.embedded.is_some() {
        return Ok(Device {
            name: "mlx5_0".to_owned(),
            address: plan.address.unwrap_or(Ipv4Addr::LOCALHOST),
            gid: plan.gid,
            stock: "libmlx5.so",
            preexisting: true,
        });
    }
    setup::devices(Wiring::Loopback, plan.mtu)?
        .pop()
        .context("no device was made")
}

/// Returns whether the device meets a requirement.
fn device_meets(plan: &Plan, need: Need) -> bool {
    match need {
        Need::Rxe => plan.device.is_none() && plan.embedded.is_none(),
        Need::Address => !plan.no_cm,
    }
}

/// Returns the command line of a test program that checks its provider, and passes with
/// both.
fn probe_command(cases: &[Case]) -> Option<String> {
    cases.iter().find_map(|case| match &case.shape {
        Shape::Single(line)
            if case.group == programs::GROUP && case.stock == StockExpectation::Reference =>
        {
            Some(line.clone())
        }
        _ => None,
    })
}

/// The cases that remove a device.
const UNPLUG: &str = "unplug";

/// Returns all cases that can run here, in order.
fn cases(plan: &Plan, rdma_core: &str) -> Result<Vec<Case>> {
    let mut cases = lists::all(programs::major(rdma_core)?);
    if plan.embedded.is_some() {
        cases.extend(embedded::cases(&plan.port));
    }
    // Tools that this release lacks are left out.
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
        cases.retain(|case| !uses_rdma_cm(case));
    }
    for folder in [&plan.programs, &plan.native].into_iter().flatten() {
        cases.extend(manifest(folder, rdma_core)?);
    }
    // Last: on Linux 7.2, deleting the network device of a device in use (`unplug netdev`)
    // also closes rdma_rxe's UDP sockets (4791), although another device remains: the
    // module probably releases them at each repeated notification of the unregistration.
    // Loopback works without the sockets, multicast does not. Adding a device opens them
    // again; deleting an rxe device does not close them.
    cases.sort_by_key(|case| case.name == UNPLUG);
    Ok(cases)
}

/// Returns whether a case connects by rdma_cm.
fn uses_rdma_cm(case: &Case) -> bool {
    let ready = match case.shape {
        Shape::Single(_) => ReadyCheck::Tcp,
        Shape::Pair { ready, .. } | Shape::Service { ready, .. } => ready,
    };
    case.group == "rdma_cm" || ready != ReadyCheck::Tcp
}

/// Returns the filters of the pyverbs tests: `None` if no test is selected, else parts of
/// names, any of which selects a test; no parts select all tests.
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

/// Returns the cases of a folder: those of its manifest, and those that are the same on every
/// device. A folder for embedded devices has the latter alone.
fn manifest(folder: &Path, rdma_core: &str) -> Result<Vec<Case>> {
    let same = fs::read_to_string(folder.join("rules.txt"));
    let path = folder.join("manifest.txt");
    let text = match fs::read_to_string(&path) {
        Err(_) if same.is_ok() => String::new(),
        read => read.with_context(|| format!("cannot read {}", path.display()))?,
    };
    let mut cases = programs::parse_manifest(&text, rdma_core)?;
    cases.extend(programs::parse_manifest(
        &same.unwrap_or_default(),
        rdma_core,
    )?);
    Ok(cases)
}

/// Returns the providers to run a case with.
fn providers(case: &Case, ours: bool) -> Vec<Provider> {
    if let Some(native) = case.native {
        let possible = ours || native != Provider::NativeWithPlugin;
        return possible.then_some(native).into_iter().collect();
    }
    let mut providers = Vec::new();
    if case.stock != StockExpectation::NotRun {
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

/// Returns whether stock's result with a case matters only where ours does not pass.
fn is_reference_only(case: &Case, short: bool) -> bool {
    case.native.is_none()
        && case.stock == StockExpectation::Reference
        && !case.same_output
        && (short || case.group != programs::GROUP)
}

fn installed_rdma_core() -> Result<String> {
    let out = std::process::Command::new("dpkg-query")
        .args(["-W", "-f", "${Version}", "rdma-core"])
        .output()
        .context("cannot get rdma-core's version from dpkg; set it with --rdma-core")?;
    Ok(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_select_pyverbs_tests() {
        let selected = |filters: &[&str]| {
            let filters: Vec<String> = filters.iter().map(|&text| text.to_owned()).collect();
            pyverbs_filter(&filters)
        };
        let parts = |parts: &[&str]| Some(parts.iter().map(|&part| part.to_owned()).collect());
        assert_eq!(selected(&[]), parts(&[]));
        assert_eq!(selected(&["rping", "pingpong"]), None);
        assert_eq!(selected(&["pyverbs"]), parts(&[]));
        assert_eq!(
            selected(&["pyverbs tests.test_buf"]),
            parts(&["tests.test_buf"])
        );
        assert_eq!(
            selected(&["rping", "pyverbs test_a", "pyverbs test_b"]),
            parts(&["test_a", "test_b"])
        );
        // The whole group includes every part.
        assert_eq!(selected(&["pyverbs test_a", "pyverbs "]), parts(&[]));
    }

    #[test]
    fn stock_is_needed_where_a_program_may_be_wrong() {
        let pingpong = Case::single("pingpong", "rc", "ibv_rc_pingpong");
        assert!(is_reference_only(&pingpong, false));
        let mut program = Case::single(programs::GROUP, "ops", "ops");
        assert!(is_reference_only(&program, true));
        assert!(!is_reference_only(&program, false));
        program.stock = StockExpectation::MustFail;
        assert!(!is_reference_only(&program, true));
    }
}
