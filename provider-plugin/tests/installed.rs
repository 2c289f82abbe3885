//! The plugin under the libibverbs that is installed here, if there is one.
//!
//! The device is made up: a folder that looks like sysfs, which is all that
//! libibverbs needs to look for a provider.

mod common;

use std::fs;
use std::process::Command;

use common::{Dir, HERE, cc, plugin};

#[test]
fn the_installed_libibverbs_gives_us_the_device() {
    let dir = Dir::new("installed");
    let path = |name: &str| dir.0.join(name).to_str().unwrap().to_owned();
    cc(&[
        "-o",
        &path("devices"),
        &format!("{HERE}/tests/c/devices.c"),
        "-ldl",
    ]);
    let preload = format!("{HERE}/tests/c/preload.c");
    cc(&[
        "-shared",
        "-fPIC",
        "-fno-builtin",
        "-o",
        &path("preload.so"),
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
        let file = dir.0.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, content).unwrap();
    }
    // Under the names that all supported releases ask for; which of them this
    // libibverbs wants is its business.
    for pabi in [34, 57, 59, 64, 65] {
        let link = path(&format!("libringverbs-rdmav{pabi}.so"));
        std::os::unix::fs::symlink(plugin(), link).unwrap();
    }
    let output = Command::new(path("devices"))
        .env("SYSFS_PATH", path("sys"))
        .env("LD_PRELOAD", path("preload.so"))
        .env("RDMAV_DRIVERS", path("libringverbs"))
        .env("RINGVERBS_LOG", "info")
        .env_remove("RINGVERBS_LOG_FILE")
        .env_remove("VERBS_LOG_FILE")
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    if out.contains("no libibverbs") {
        println!("skipped: libibverbs.so.1 is not installed");
        return;
    }
    if err.contains("ringverbs: not registered") {
        // A release that is not in the table. It must have said so, in one
        // line, and the stock provider must have the device.
        println!("this libibverbs is not a known one: {err}");
        assert_eq!(err.matches("ringverbs").count(), 2, "{err}");
    } else {
        assert!(
            err.contains("ringverbs INFO: registered with libibverbs layout="),
            "{err}"
        );
        assert!(err.contains("ringverbs INFO: serves device=rxe0"), "{err}");
    }
    assert!(out.contains("device rxe0"), "{out}{err}");
}
