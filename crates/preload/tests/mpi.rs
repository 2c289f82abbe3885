//! Open MPI over four hosts: network namespaces on a bridge, each with a device that
//! reaches the others, on which every rank checks what it receives.
//!
//! Skipped without root, ip(8), or `apt-get install openmpi-bin libopenmpi-dev
//! ibverbs-providers`. The long form, an hour unless `SOAK_SECONDS` says otherwise:
//!
//! ```text
//! SOAK_SECONDS=600 cargo test -p ringverbs-preload --test mpi -- --ignored --nocapture
//! ```

#[macro_use]
#[allow(unused_macros, reason = "each file of tests uses a part")]
mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{PATIENCE, Provider, World, built, compiled, installed};
use testing::hosts::Namespaces;
use testing::{program, setting};

const HOSTS: usize = 4;

/// The ways to the device, of which each has a variable and options.
const WAYS: [(&str, &str, &str); 3] = [
    (
        "UCX_TLS",
        "rc_v,self",
        "--mca pml ucx --mca osc ucx -x UCX_TLS -x UCX_NET_DEVICES=mlx5_0:1",
    ),
    (
        "UCX_TLS",
        "ud_v,self",
        "--mca pml ucx --mca osc ucx -x UCX_TLS -x UCX_NET_DEVICES=mlx5_0:1",
    ),
    (
        "OMPI_MCA_mtl_ofi_provider_include",
        "verbs;ofi_rxm",
        "--mca pml cm --mca mtl ofi --mca osc pt2pt",
    ),
];

/// Runs the ranks in each way, for some seconds or once.
fn over_four_hosts(name: &str, seconds: u64) {
    if !installed(&["mpirun", "unshare"]) {
        return;
    }
    let world = World::new(Provider::Stock, "");
    let Some(program) = compiled("mpicc", "collectives.c", &[], &world.directory) else {
        return;
    };
    let Some(namespaces) = Namespaces::bridged(name, HOSTS, 1500) else {
        return;
    };
    let first = &namespaces.0[0];
    let prefix = first.strip_suffix('1').unwrap();
    // mpirun's remote shell: enters the network namespace of a host. Each has a name of
    // its own, since Open MPI tells hosts apart by their names.
    let agent = world.directory.join("agent.sh");
    let script = format!(
        "#!/bin/sh\nhost=$1; shift; number=${{host##*.}}\n\
         export RINGVERBS_EMBEDDED=roce:$host\n\
         exec ip netns exec {prefix}$number unshare --uts sh -c \"hostname host$number; $*\"\n"
    );
    fs::write(&agent, script).unwrap();
    fs::set_permissions(&agent, fs::Permissions::from_mode(0o700)).unwrap();
    let hosts: Vec<String> = (1..=HOSTS).map(|it| format!("192.0.2.{it}")).collect();
    for (variable, value, options) in WAYS {
        let line = format!(
            "hostname host1; exec mpirun --allow-run-as-root --mca orte_tmpdir_base {directory} \
             --mca plm_rsh_agent {agent} --mca oob_tcp_if_include veth0 \
             --mca btl ^openib,vader,ofi,tcp {options} -x LD_PRELOAD={library} \
             -x RINGVERBS_DIRECTORY={directory} --host {hosts} -n {HOSTS} {program} {each}",
            directory = world.directory.display(),
            agent = agent.display(),
            library = built("libringverbs_preload.so").display(),
            hosts = hosts.join(","),
            program = program.display(),
            each = seconds / WAYS.len() as u64,
        );
        let mut command = Command::new("ip");
        command
            .args([
                "netns", "exec", first, "unshare", "--uts", "sh", "-c", &line,
            ])
            .env("RINGVERBS_EMBEDDED", "roce:192.0.2.1")
            .env(variable, value)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let patience = PATIENCE + Duration::from_secs(seconds);
        let output = program::wait_with_timeout(command.spawn().unwrap(), patience);
        let said = String::from_utf8_lossy(&output.stdout);
        println!("{value}: {said}");
        let right = said.contains(&format!("{HOSTS} ranks")) && said.contains("all right");
        assert!(output.status.success() && right, "{value}: {output:?}");
    }
}

#[test]
fn open_mpi_over_four_hosts() {
    over_four_hosts("mpi", 0);
}

#[test]
#[ignore = "an hour, or SOAK_SECONDS"]
fn soak() {
    over_four_hosts("soak", setting("SOAK_SECONDS", 3600));
}
