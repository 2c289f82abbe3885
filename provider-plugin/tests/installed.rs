//! The plugin with the installed libibverbs, if there is one.
//!
//! The device is fake: a folder that looks like sysfs suffices for libibverbs to search a
//! provider.

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use common::{Dir, HERE, cc, plugin};

struct FakeSysfs {
    dir: Dir,
}

/// The output of the device list.
struct ListOutput {
    out: String,
    err: String,
}

impl FakeSysfs {
    fn new(name: &str) -> FakeSysfs {
        let bench = FakeSysfs {
            dir: Dir::new(name),
        };
        cc(&[
            "-o",
            &bench.path("devices"),
            &format!("{HERE}/tests/c/devices.c"),
            "-ldl",
        ]);
        let preload = format!("{HERE}/tests/c/preload.c");
        let object = bench.path("preload.so");
        cc(&[
            "-shared",
            "-fPIC",
            "-fno-builtin",
            "-o",
            &object,
            &preload,
            "-ldl",
        ]);
        for (file, content) in [
            ("sys/class/infiniband_verbs/abi_version", "6\n"),
            ("sys/class/infiniband_verbs/uverbs0/dev", "231:192\n"),
            ("sys/class/infiniband_verbs/uverbs0/ibdev", "rxe0\n"),
            ("sys/class/infiniband_verbs/uverbs0/abi_version", "1\n"),
            ("sys/class/infiniband/rxe0/node_type", "1: CA\n"),
        ] {
            let file = bench.dir.0.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, content).unwrap();
        }
        // One link for the private ABI of each supported release; libibverbs loads its own.
        for pabi in [34, 57, 59, 64, 65] {
            let link = bench.path(&format!("libringverbs-rdmav{pabi}.so"));
            std::os::unix::fs::symlink(plugin(), link).unwrap();
        }
        bench
    }

    fn path(&self, name: &str) -> String {
        self.dir.0.join(name).to_str().unwrap().to_owned()
    }

    fn list(&self, library_path: &str) -> ListOutput {
        let output = Command::new(self.path("devices"))
            .env("SYSFS_PATH", self.path("sys"))
            .env("LD_PRELOAD", self.path("preload.so"))
            .env("LD_LIBRARY_PATH", library_path)
            .env("RDMAV_DRIVERS", self.path("libringverbs"))
            .env("RINGVERBS_LOG", "info")
            .env_remove("RINGVERBS_LOG_FILE")
            .env_remove("VERBS_LOG_FILE")
            .output()
            .unwrap();
        ListOutput {
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// The installed libibverbs, as the loader finds it.
fn libibverbs() -> Option<PathBuf> {
    let cache = Command::new("ldconfig").arg("-p").output().ok()?.stdout;
    let cache = String::from_utf8_lossy(&cache).into_owned();
    let line = cache
        .lines()
        .find(|l| l.contains("libibverbs.so.1 ") && l.contains("x86-64"))?;
    fs::canonicalize(line.split("=> ").nth(1)?).ok()
}

#[test]
fn installed_libibverbs_uses_the_plugin() {
    let bench = FakeSysfs::new("installed");
    let ListOutput { out, err } = bench.list("");
    if out.contains("no libibverbs") {
        return testing::skip!(missing: "libibverbs1", "libibverbs.so.1 is not installed");
    }
    if err.contains("ringverbs: not registered") {
        // A release that is not in the table. It said so in one line; the
        // stock provider has the device.
        testing::skip!("this libibverbs is not a known one: {err}");
        assert_eq!(
            err.lines().filter(|l| l.starts_with("ringverbs")).count(),
            1,
            "{err}"
        );
    } else {
        assert!(
            err.contains("ringverbs INFO: registered with libibverbs layout="),
            "{err}"
        );
        assert!(err.contains("ringverbs INFO: serves device=rxe0"), "{err}");
    }
    assert!(out.contains("device rxe0"), "{out}{err}");
}

#[test]
fn stock_provider_serves_after_a_refusal() {
    let Some(library) = libibverbs() else {
        return testing::skip!(missing: "libibverbs1", "libibverbs.so.1 is not installed");
    };
    let stock = library.with_file_name("libibverbs");
    if !stock.is_dir() {
        return testing::skip!(missing: "ibverbs-providers", "the stock providers are not installed");
    }
    // The same library, in a file that claims to be of another release.
    let bench = FakeSysfs::new("refusing");
    fs::create_dir(bench.dir.0.join("lib")).unwrap();
    fs::copy(library, bench.dir.0.join("lib/libibverbs.so.1.14.999.0")).unwrap();
    let soname = bench.dir.0.join("lib/libibverbs.so.1");
    std::os::unix::fs::symlink("libibverbs.so.1.14.999.0", soname).unwrap();
    let ListOutput { out, err } = bench.list(&bench.path("lib"));
    assert!(
        err.contains("ringverbs: not registered, the stock provider takes over: "),
        "{err}"
    );
    assert!(err.contains("libibverbs.so.1.14.999.0"), "{err}");
    assert_eq!(
        err.lines().filter(|l| l.starts_with("ringverbs")).count(),
        1,
        "{err}"
    );
    assert!(out.contains("device rxe0"), "{out}{err}");
}
