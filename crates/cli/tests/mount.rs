//! `ringverbs run --mount`: programs without a dynamic loader see the files of the devices.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A program that prints the first line of each file, and the names in each directory.
const SHOW: &str = r#"
#include <dirent.h>
#include <stdio.h>
#include <string.h>

int main(int argc, char **argv)
{
	for (int at = 1; at < argc; at++) {
		char line[256] = "";
		FILE *file = fopen(argv[at], "r");
		DIR *directory = opendir(argv[at]);

		if (directory)
			for (struct dirent *entry; (entry = readdir(directory));)
				printf("%s/%s\n", argv[at], entry->d_name);
		else if (file && fgets(line, sizeof(line), file))
			printf("%s: %.*s\n", argv[at], (int)strcspn(line, "\n"), line);
		else
			printf("%s: none\n", argv[at]);
	}
	return 0;
}
"#;

/// A copy of the command, a directory for the network, and a static program.
struct Scratch {
    directory: PathBuf,
    program: PathBuf,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

impl Scratch {
    /// `None`, with the reason printed, without a compiler, or where nothing can be mounted.
    fn new(name: &str) -> Option<Self> {
        let may = Command::new("unshare").args(["-Urm", "true"]).output();
        if !may.is_ok_and(|it| it.status.success()) {
            testing::skip!(missing: "util-linux", "user namespaces cannot be made");
            return None;
        }
        let name = format!("ringverbs-mount-{name}-{}", std::process::id());
        let directory = env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        let scratch = Self {
            program: directory.join("show"),
            directory,
        };
        fs::copy(env!("CARGO_BIN_EXE_ringverbs"), scratch.command()).unwrap();
        // Static programs load nothing.
        fs::write(scratch.directory.join("libringverbs_preload.so"), "").unwrap();
        fs::set_permissions(&scratch.directory, fs::Permissions::from_mode(0o755)).unwrap();
        let source = scratch.directory.join("show.c");
        fs::write(&source, SHOW).unwrap();
        let mut compiler = Command::new("cc");
        let compiler = compiler.args(["-static", "-o"]).arg(&scratch.program);
        match compiler.arg(source).output() {
            Ok(output) if output.status.success() => Some(scratch),
            _ => {
                testing::skip!(missing: "gcc libc6-dev", "no static program can be made");
                None
            }
        }
    }

    fn command(&self) -> PathBuf {
        self.directory.join("ringverbs")
    }

    /// Runs the program with options, as a user without rights.
    fn show(&self, options: &[&str], paths: &[&str]) -> String {
        let output = self.run(&[], options, paths);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{said}");
        said
    }

    fn run(&self, before: &[&str], options: &[&str], paths: &[&str]) -> Output {
        let network = self.directory.join("network");
        let command = self.command();
        let words = before.iter().map(Path::new).chain([command.as_path()]);
        let mut words = words.collect::<Vec<_>>().into_iter();
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .args(["run", "--directory"])
            .arg(&network);
        command
            .args(options)
            .arg("--")
            .arg(&self.program)
            .args(paths);
        command.env_remove("LD_PRELOAD");
        if nix::unistd::geteuid().is_root() {
            if fs::create_dir(&network).is_ok() {
                nix::unistd::chown(&network, Some(65534.into()), Some(65534.into())).unwrap();
                fs::set_permissions(&network, fs::Permissions::from_mode(0o700)).unwrap();
            }
            command.uid(65534).gid(65534);
        }
        command.output().unwrap()
    }
}

#[test]
fn static_programs_see_the_devices() {
    let Some(scratch) = Scratch::new("devices") else {
        return;
    };
    let paths = [
        "/sys/class/infiniband",
        "/sys/class/infiniband_verbs",
        "/dev/infiniband",
        "/sys/class/infiniband/rxe0/device/vendor",
        "/sys/class/infiniband/rxe0/hca_type",
        "/sys/class/infiniband/rxe0/ports/1/state",
        "/sys/class/infiniband/rxe0/ports/1/link_layer",
        "/sys/class/infiniband/rxe0/ports/1/gid_attrs/types/3",
        "/sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/3",
        "/sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/9",
        "/sys/class/infiniband/rxe0/ports/1/counters/port_xmit_data",
        "/sys/class/infiniband/rxe0/ports/1/hw_counters/np_cnp_sent",
        "/sys/class/infiniband/mlx5_1/ports/1/link_layer",
        "/sys/class/infiniband/mlx5_1/ports/1/lid",
        "/sys/class/infiniband_verbs/uverbs1/ibdev",
        "/sys/class/misc/rdma_cm/dev",
        "/sys/class/net/lo/mtu",
        "/sys/devices/system/cpu/online",
    ];
    let options = ["--embedded=roce,ib", "--mount", "--name=rxe0", "--card=cx7"];
    let said = scratch.show(&options, &paths);
    let first_line = |path: &str| {
        let text = fs::read_to_string(path).unwrap();
        format!("{path}: {}", text.trim())
    };
    let host = ["/sys/class/net/lo/mtu", "/sys/devices/system/cpu/online"];
    for line in [
        "/sys/class/infiniband/rxe0",
        "/sys/class/infiniband/mlx5_1",
        "/sys/class/infiniband_verbs/uverbs1",
        "/dev/infiniband/uverbs0",
        "/dev/infiniband/rdma_cm",
        "/sys/class/infiniband/rxe0/device/vendor: 0x15b3",
        "/sys/class/infiniband/rxe0/hca_type: MT4129",
        "/sys/class/infiniband/rxe0/ports/1/state: 4: ACTIVE",
        "/sys/class/infiniband/rxe0/ports/1/link_layer: Ethernet",
        "/sys/class/infiniband/rxe0/ports/1/gid_attrs/types/3: RoCE v2",
        "/sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/3: lo",
        "/sys/class/infiniband/rxe0/ports/1/gid_attrs/ndevs/9: none",
        "/sys/class/infiniband/rxe0/ports/1/counters/port_xmit_data: 0",
        "/sys/class/infiniband/rxe0/ports/1/hw_counters/np_cnp_sent: 0",
        "/sys/class/infiniband/mlx5_1/ports/1/link_layer: InfiniBand",
        "/sys/class/infiniband/mlx5_1/ports/1/lid: 0x2",
        "/sys/class/infiniband_verbs/uverbs1/ibdev: mlx5_1",
        "/sys/class/misc/rdma_cm/dev: 10:122",
        &first_line(host[0]),
        &first_line(host[1]),
    ] {
        assert!(said.lines().any(|it| it == line), "{line}: {said}");
    }
    // Neither the host nor the network's directory has them.
    assert!(!Path::new("/sys/class/infiniband/rxe0").exists());
    let left = fs::read_dir(scratch.directory.join("network")).unwrap();
    let names = left.map(|entry| entry.unwrap().file_name());
    let names: Vec<_> = names.filter(|name| name != "0.lock").collect();
    assert!(names.is_empty(), "{names:?}");
}

/// A program in Go, which makes system calls without the C library.
const GO: &str = r#"
package main

import (
	"fmt"
	"os"
)

func main() {
	devices, err := os.ReadDir("/sys/class/infiniband")
	for _, device := range devices {
		path := "/sys/class/infiniband/" + device.Name() + "/ports/1/link_layer"
		text, err := os.ReadFile(path)
		fmt.Print(device.Name(), " ", device.IsDir(), " ", string(text), err, "\n")
	}
	fmt.Println(err)
}
"#;

#[test]
fn programs_in_go_see_the_devices() {
    let Some(scratch) = Scratch::new("go") else {
        return;
    };
    let source = scratch.directory.join("show.go");
    fs::write(&source, GO).unwrap();
    let mut go = Command::new("go");
    let go = go.args(["build", "-o"]).arg(&scratch.program).arg(source);
    let go = go
        .env("CGO_ENABLED", "0")
        .env("GOCACHE", scratch.directory.join("cache"));
    let Ok(output) = go.output() else {
        return testing::skip!(missing: "golang-go", "no program in Go can be made");
    };
    assert!(output.status.success(), "{output:?}");
    let said = scratch.show(&["--embedded=roce,ib", "--mount"], &[]);
    let expected = "mlx5_0 false Ethernet\n<nil>\nmlx5_1 false InfiniBand\n<nil>\n<nil>\n";
    assert_eq!(said, expected);
}

/// The host of the inner command has the directories.
#[test]
fn devices_replace_those_of_the_host() {
    let Some(scratch) = Scratch::new("host") else {
        return;
    };
    let outer = scratch.command();
    let directory = scratch.directory.join("network");
    let outer = [
        outer.to_str().unwrap(),
        "run",
        "--embedded=roce,roce,roce",
        "--mount",
        "--directory",
        directory.to_str().unwrap(),
        "--",
    ];
    let paths = ["/sys/class/infiniband", "/sys/devices/ringverbs"];
    let output = scratch.run(&outer, &["--embedded=ib", "--mount"], &paths);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let is_device = |line: &&str| line.contains("/mlx5_") || line.contains("/ffff:");
    let devices: Vec<_> = said.lines().filter(is_device).collect();
    let expected = [
        "/sys/class/infiniband/mlx5_0",
        "/sys/devices/ringverbs/ffff:00:00.0",
    ];
    assert_eq!(devices, expected, "{said}");
}

#[test]
fn static_programs_see_a_node() {
    let Some(scratch) = Scratch::new("node") else {
        return;
    };
    let node = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/nodes");
    let node = node.join("eight-connectx7.toml");
    let node = format!("--node={}", node.canonicalize().unwrap().display());
    let paths = [
        "/sys/class/infiniband/mlx5_7/device/numa_node",
        "/sys/bus/pci/devices/0000:19:00.0/class",
        "/sys/devices/system/node/node1/distance",
        "/sys/class/net/lo/mtu",
    ];
    let said = scratch.show(&["--embedded", "--mount", &node], &paths);
    for (path, value) in paths.iter().zip(["1", "0x030200", "21 10", ""]) {
        let line = format!("{path}: {value}");
        assert!(said.contains(&line), "{line}: {said}");
    }
}

/// Returns whether the first line of an attribute has a form of the list of what programs read.
fn has_form(value: &str, form: &str) -> bool {
    let is_hex = |text: &str| u128::from_str_radix(text, 16).is_ok();
    let is_number = |text: &str| text.parse::<i64>().is_ok();
    let words = |count: usize| {
        let words: Vec<&str> = value.split(':').collect();
        words.len() == count && words.iter().all(|word| word.len() == 4 && is_hex(word))
    };
    match form {
        "text" => !value.is_empty(),
        "number" => is_number(value),
        "numbers" => value.split([' ', ':']).all(is_number),
        "hex" => value.strip_prefix("0x").is_some_and(is_hex),
        "guid" => words(4),
        "gid" => words(8),
        "list" => value.split([',', '-']).all(is_number),
        "mask" => value.split(',').all(is_hex),
        "state" => {
            let (number, name) = value.split_once(": ").unwrap_or_default();
            is_number(number) && !name.is_empty()
        }
        "rate" => value.contains(" Gb/sec (") && value.ends_with(')'),
        // NCCL scans "%f GT/s", UCX a list of prefixes.
        "speed" => value
            .strip_suffix(" GT/s PCIe")
            .is_some_and(|it| it.parse::<f32>().is_ok()),
        "meminfo" => value.starts_with("Node 0 MemTotal: ") && value.ends_with(" kB"),
        "binary" => true,
        _ => panic!("there is no form {form}"),
    }
}

#[test]
fn what_programs_read_is_there() {
    let Some(scratch) = Scratch::new("list") else {
        return;
    };
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let root = root.canonicalize().unwrap();
    let node = root.join("examples/nodes/two-port-connectx5.toml");
    let node = format!("--node={}", node.display());
    let list = fs::read_to_string(root.join("docs/internals/sysfs.md")).unwrap();
    let rows = list.lines().filter_map(|line| {
        let mut cells = line.split(" | ");
        let attribute = cells.next()?.strip_prefix("| `")?.strip_suffix('`')?;
        let path = attribute
            .replace("DEVICE", "/sys/class/infiniband/mlx5_1")
            .replace("PCI", "/sys/bus/pci/devices/0000:3b:00.1")
            .replace("BUS", "0000:3b");
        Some((path, cells.next()?))
    });
    let rows: Vec<_> = rows.collect();
    assert!(rows.len() > 50, "{rows:?}");
    let paths: Vec<&str> = rows.iter().map(|(path, _)| &**path).collect();
    let said = scratch.show(&["--embedded", "--mount", &node], &paths);
    for (path, form) in &rows {
        let value = said
            .lines()
            .find_map(|line| line.strip_prefix(path)?.strip_prefix(": "));
        let value = value.unwrap_or_else(|| panic!("{path}: {said}"));
        assert!(value != "none" && has_form(value, form), "{path}: {value}");
    }
    // The ways in which NCCL and Mooncake find the function of a device.
    let paths = [
        "/sys/class/pci_bus/0000:3b/../../0000:3b:00.1/class",
        "/sys/class/infiniband/mlx5_1/../../numa_node",
        "/sys/bus/pci/devices/0000:3b:00.1/infiniband",
        "/sys/bus/pci/devices/0000:3b:00.1/net",
    ];
    let said = scratch.show(&["--embedded", "--mount", &node], &paths);
    for line in [
        &format!("{}: 0x020000", paths[0]),
        &format!("{}: 0", paths[1]),
        &format!("{}/mlx5_1", paths[2]),
        &format!("{}/ens1f1np1", paths[3]),
    ] {
        assert!(said.lines().any(|it| it == line), "{line}: {said}");
    }
}

#[test]
fn forbidden_namespaces_have_a_remedy() {
    let Some(scratch) = Scratch::new("forbidden") else {
        return;
    };
    let limit = "echo 0 > /proc/sys/user/max_user_namespaces || exit 77; \
        exec setpriv --bounding-set=-all --inh-caps=-all \"$@\"";
    let before = ["unshare", "-Ur", "sh", "-c", limit, "sh"];
    let output = scratch.run(&before, &["--embedded", "--mount"], &[]);
    if output.status.code() == Some(77) {
        testing::skip!("the number of user namespaces cannot be limited");
        return;
    }
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("user.max_user_namespaces"), "{said}");
}

/// Without the option they are refused, and the option is named.
#[test]
fn static_programs_are_refused_without_the_option() {
    let Some(scratch) = Scratch::new("refused") else {
        return;
    };
    let output = scratch.run(&[], &["--embedded"], &[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    assert!(said.contains("--mount"), "{said}");
}
