//! Embedded devices for programs of the system, without RDMA in the kernel: the
//! preloaded library, and cases of frameworks on top of verbs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::case::{ATTEMPTS, Case, ReadyCheck, Shape};
use super::lists::perftest_pair;
use super::process::prepend_path;
use crate::guest::host::which;

/// Settings of embedded devices for programs.
#[derive(Debug, Clone)]
pub struct Embedded {
    /// The preloaded library that provides the devices.
    pub library: PathBuf,
    /// The link layer of the port: `roce` or `ib`.
    pub port: String,
    /// The folder that the processes share.
    pub directory: PathBuf,
}

impl Embedded {
    /// Creates the shared folder in `scratch`.
    pub fn new(library: &Path, port: &str, scratch: &Path) -> Result<Embedded> {
        use std::os::unix::fs::PermissionsExt;
        let directory = scratch.join("network");
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))?;
        Ok(Embedded {
            library: library.to_owned(),
            port: port.to_owned(),
            directory,
        })
    }

    /// Sets the environment that gives a program embedded devices. Their library is
    /// loaded before a preloaded plugin.
    pub fn configure(&self, command: &mut Command) {
        prepend_path(command, "LD_PRELOAD", &self.library);
        command
            .env("RINGVERBS_EMBEDDED", &self.port)
            .env("RINGVERBS_DIRECTORY", &self.directory)
            .env("RINGVERBS_LOG", "info");
    }

    /// Returns whether a program listens on a port of the network, or is bound to it.
    pub fn is_listening(&self, port: u16) -> bool {
        let end = format!("-{port}.socket");
        let entries = fs::read_dir(&self.directory).into_iter().flatten();
        let mut names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.any(|name| name.starts_with("cm-") && name.ends_with(&end))
    }

    /// Removes sockets of programs that were killed.
    pub fn remove_stale_sockets(&self) {
        for entry in fs::read_dir(&self.directory)
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("cm-") && name.ends_with(".socket") {
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

/// Returns the programs that a command line needs.
pub fn programs(line: &str) -> Vec<&str> {
    let mut words = line.split_whitespace().peekable();
    let mut found = Vec::new();
    while let Some(word) = words.next() {
        match word {
            "env" => while words.next_if(|word| word.contains('=')).is_some() {},
            "chrt" => {
                found.push(word);
                words.by_ref().take(2).for_each(drop);
            }
            _ => {
                found.push(word);
                if word == "mpirun" {
                    found.extend(line.split_whitespace().last());
                }
                break;
            }
        }
    }
    found
}

/// Returns whether UCX is installed without its module for verbs, as Debian's sid has it.
fn is_ucx_without_verbs() -> bool {
    let folders = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let mut modules = folders.map(|folder| folder.path().join("ucx"));
    modules.any(|folder| folder.is_dir() && !folder.join("libuct_ib.so.0").exists())
}

/// Returns a message that names the package of a missing program of a case.
pub fn missing_program(case: &Case) -> Option<String> {
    let lines = match &case.shape {
        Shape::Single(line) => vec![line],
        Shape::Pair { server, client, .. } | Shape::Service { server, client, .. } => {
            vec![server, client]
        }
    };
    if lines.iter().any(|line| line.contains("ucx")) && is_ucx_without_verbs() {
        return Some("the installed UCX has no verbs".to_owned());
    }
    let mut all = lines.into_iter().flat_map(|line| programs(line));
    let program = all.find(|program| which(program).is_none())?;
    let package = match program {
        COLLECTIVES => return Some(format!("{program} was not built: it needs mpicc")),
        "mpirun" => "openmpi-bin libopenmpi-dev",
        "ucx_perftest" => "ucx-utils",
        "fi_pingpong" | "fi_info" => "libfabric-bin",
        "chrt" => "util-linux",
        _ if program.starts_with("ibv_") => "ibverbs-utils ibverbs-providers",
        _ if program.starts_with("ib_") => "perftest",
        _ => "rdmacm-utils",
    };
    Some(format!(
        "{program} is not installed: apt-get install {package}"
    ))
}

/// The MPI program, which checks the received data.
pub const COLLECTIVES: &str = "ringverbs-collectives";

/// Programs of libfabric, UCX and Open MPI on a kind of port.
pub fn cases(port: &str) -> Vec<Case> {
    let mut cases = libfabric();
    cases.extend(ucx());
    cases.extend(open_mpi(port));
    cases.extend(more_perftest());
    // The programs meet on ports that others may take.
    cases
        .into_iter()
        .map(|case| case.attempts(ATTEMPTS))
        .collect()
}

fn pair(group: &'static str, name: &str, server: String, client: String) -> Case {
    let ready = ReadyCheck::Tcp;
    Case::new(
        group,
        name,
        Shape::Pair {
            server,
            client,
            ready,
        },
    )
}

fn libfabric() -> Vec<Case> {
    let list = [
        ("verbs msg", "-p verbs -e msg -c -I 100", true),
        ("verbs dgram", "-p verbs -e dgram -I 100", false),
        ("verbs;ofi_rxm", "-p verbs;ofi_rxm -e rdm -c -I 100", true),
        // libfabric 2 takes 0.7 s for a round trip of 1 MiB, also over UDP.
        ("verbs;ofi_rxd", "-p verbs;ofi_rxd -e rdm -I 10", false),
        (
            "verbs;ofi_rxm, 8 MB",
            "-p verbs;ofi_rxm -e rdm -c -I 5 -S 8388608",
            false,
        ),
    ];
    let pairs = list.map(|(name, options, short)| {
        let case = pair(
            "libfabric",
            name,
            format!("fi_pingpong {options} -B {{port}}"),
            format!("fi_pingpong {options} -P {{port}} {{addr}}"),
        );
        if short { case.short() } else { case }
    });
    let info = Case::single("libfabric", "fi_info", "fi_info -p verbs").short();
    pairs.into_iter().chain([info]).collect()
}

/// Returns the command of ucx_perftest, which some releases of Debian build with MPI: without
/// a terminal it then expects to be started by mpirun.
fn ucx_perftest() -> &'static str {
    let program = which("ucx_perftest").and_then(|path| fs::read(path).ok());
    let mut names = program.iter().flat_map(|bytes| bytes.windows(7));
    match names.any(|name| name == b"libmpi.") {
        true => "ucx_perftest -P 0",
        false => "ucx_perftest",
    }
}

fn ucx() -> Vec<Case> {
    const TRANSPORTS: [&str; 5] = [
        "rc",
        "ud",
        "rc_verbs,ud_verbs,self",
        "rc_mlx5,ud_mlx5,self",
        "dc_mlx5,ud_mlx5,self",
    ];
    const TESTS: [&str; 11] = [
        "tag_lat",
        "tag_bw -s 65536",
        "ucp_am_lat",
        "ucp_am_bw -s 65536",
        "ucp_put_lat",
        "ucp_put_bw -s 65536",
        "ucp_get -s 65536",
        "ucp_fadd",
        "ucp_cswap",
        "stream_bw -s 65536",
        "stream_lat",
    ];
    let perftest = ucx_perftest();
    let mut cases = Vec::new();
    for transport in TRANSPORTS {
        for test in TESTS {
            let run =
                format!("env UCX_TLS={transport} UCX_NET_DEVICES={{dev}}:1 {perftest} -p {{port}}");
            let case = pair(
                "UCX",
                &format!("{transport} {test}"),
                run.clone(),
                format!("{run} {{addr}} -t {test} -n 300 -w 10"),
            );
            let short = ["rc", "rc_verbs,ud_verbs,self"].contains(&transport)
                && ["tag_lat", "ucp_get -s 65536"].contains(&test);
            cases.push(if short { case.short() } else { case });
        }
    }
    for test in [
        "-x rc_verbs -t am_lat -D short",
        "-x rc_verbs -t am_bw -D zcopy",
        "-x rc_verbs -t put_bw -D zcopy",
        "-x rc_verbs -t get -D zcopy -s 4096",
        "-x ud_verbs -t am_lat -D short",
        "-x ud_verbs -t am_bw -D zcopy",
        "-x rc_verbs -t fadd",
        "-x rc_verbs -t cswap",
    ] {
        let run = format!("{perftest} -p {{port}} -d {{dev}}:1 {test} -n 300 -w 10");
        cases.push(pair(
            "UCX",
            &format!("uct {test}"),
            run.clone(),
            format!("{run} {{addr}}"),
        ));
    }
    cases
}

fn open_mpi(port: &str) -> Vec<Case> {
    /// UCX connects its queue pair for list operations by a LID.
    const TAG_MATCHING: &str = "UCX rc_mlx5, tag matching";
    // `ob1` with its own verbs code needs an InfiniBand port.
    let configurations = [
        (
            "UCX rc",
            "--mca pml ucx --mca osc ucx -x UCX_TLS=rc,self -x UCX_NET_DEVICES={dev}:1",
        ),
        (
            "UCX ud",
            "--mca pml ucx --mca osc ucx -x UCX_TLS=ud,self -x UCX_NET_DEVICES={dev}:1",
        ),
        (
            "libfabric verbs;ofi_rxm",
            "--mca pml cm --mca mtl ofi --mca mtl_ofi_provider_include verbs;ofi_rxm",
        ),
        (
            TAG_MATCHING,
            "--mca pml ucx --mca osc ucx -x UCX_TLS=rc_mlx5,ud_mlx5,self \
             -x UCX_NET_DEVICES={dev}:1 -x UCX_RC_MLX5_TM_ENABLE=y -x UCX_TM_THRESH=0",
        ),
    ];
    let mut cases = Vec::new();
    for ranks in [2, 3, 4] {
        for (name, options) in configurations {
            if name == TAG_MATCHING && port != "ib" {
                continue;
            }
            let line = format!(
                "mpirun --allow-run-as-root --oversubscribe --mca btl ^openib,vader,ofi -n {ranks} \
                 {options} {COLLECTIVES}"
            );
            let case =
                Case::single("Open MPI", &format!("{ranks} ranks, {name}"), &line).within(120);
            cases.push(if ranks == 2 && !["UCX ud", TAG_MATCHING].contains(&name) {
                case.short()
            } else {
                case
            });
        }
    }
    cases
}

/// Further cases of perftest: all sizes, more services, queue pairs and options.
fn more_perftest() -> Vec<Case> {
    const LIST: &[(&str, &str)] = &[
        ("send_bw", "-n 20 -a -b"),
        ("send_bw", "-n 100 -s 65536 -c UC"),
        ("send_bw", "-n 100 -a -c UD"),
        ("send_bw", "-n 200 -s 1024 -c UD -q 4 -b"),
        ("send_bw", "-n 500 --use-srq -q 8 -s 1024 -b"),
        ("send_bw", "-n 300 -s 64 -I 220"),
        ("send_bw", "-n 300 -e -b -q 2 -s 4096"),
        ("send_bw", "-n 100 -R -q 2 -b -s 4096"),
        ("send_bw", "-D 2 -s 4096"),
        ("send_lat", "-n 20 -a"),
        ("send_lat", "-n 100 -a -c UD"),
        ("send_lat", "-n 200 --use-srq -s 64"),
        ("send_lat", "-n 200 -R -e"),
        ("write_bw", "-n 20 -a -b -q 2"),
        ("write_bw", "-n 100 -s 65536 -c UC"),
        ("write_bw", "-n 300 -s 64 -I 220 -q 4"),
        ("write_bw", "-n 100 -R -q 4 -s 4096"),
        ("write_bw", "-n 50000 -s 8"),
        ("write_lat", "-n 20 -a"),
        ("write_lat", "-n 200 -c UC -s 4096"),
        ("read_bw", "-n 20 -a -b"),
        ("read_bw", "-n 200 -R -q 2 -s 4096"),
        ("read_lat", "-n 20 -a"),
        ("atomic_bw", "-n 500 -q 4 -e -A FETCH_AND_ADD"),
        ("atomic_bw", "-n 500 -R -b -A CMP_AND_SWAP"),
        ("atomic_lat", "-n 300 -R -A FETCH_AND_ADD"),
    ];
    LIST.iter()
        .map(|&(tool, options)| {
            let shape = perftest_pair(tool, options);
            Case::new("perftest", &format!("{tool} {options}"), shape).within(120)
        })
        .collect()
}

/// Time for a receiver to join a multicast group before the sender starts, which waits
/// three seconds itself.
pub(super) const JOIN_DELAY: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique() {
        let all: Vec<_> = [cases("ib"), super::super::lists::all(44)].concat();
        let names: HashSet<_> = all.iter().map(|case| (case.group, &case.name)).collect();
        assert_eq!(names.len(), all.len());
    }

    #[test]
    fn the_programs_of_a_line_are_found() {
        assert_eq!(programs("env A=b C=d ucx_perftest -p 1"), ["ucx_perftest"]);
        assert_eq!(programs("chrt --idle 0 mckey -s"), ["chrt", "mckey"]);
        assert_eq!(programs("mpirun -n 2 -x A=b prog"), ["mpirun", "prog"]);
        let case = Case::single("x", "y", "no-such-program 1");
        assert!(missing_program(&case).unwrap().contains("apt-get install"));
        assert_eq!(
            missing_program(&Case::single("x", "y", "env A=b sh -c true")),
            None
        );
    }
}
