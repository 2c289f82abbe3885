//! The command that `cargo xtask dist` builds, copied alone, runs programs on embedded devices.
//! `RINGVERBS_DIST` names the folder; skipped without it, and without `ibv_devinfo`.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Scratch(PathBuf);

impl Scratch {
    /// Creates a folder with the command; `None` if there is none.
    fn new(name: &str) -> Option<Self> {
        let Some(dist) = env::var_os("RINGVERBS_DIST").map(PathBuf::from) else {
            testing::skip!("RINGVERBS_DIST is not set");
            return None;
        };
        let name = format!("ringverbs-one-{name}-{}", std::process::id());
        let scratch = Self(env::temp_dir().join(name));
        fs::create_dir(&scratch.0).unwrap();
        // Not by this process: a child that another test begins would have the copy open for
        // writing, and it could not be executed meanwhile.
        let mut copy = Command::new("cp");
        let copied = copy.arg(dist.join("ringverbs")).arg(scratch.command());
        assert!(copied.status().unwrap().success());
        Some(scratch)
    }

    fn command(&self) -> PathBuf {
        self.0.join("ringverbs")
    }

    fn cache(&self) -> PathBuf {
        self.0.join("cache")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(self.command());
        command
            .args(["run", "--embedded", "--directory"])
            .arg(self.0.join("network"))
            .args(arguments)
            .env("XDG_CACHE_HOME", self.cache())
            .env("RINGVERBS_LOG", "info")
            .env_remove("LD_PRELOAD");
        command.output().unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn a_copy_of_the_command_is_enough() {
    let Some(scratch) = Scratch::new("copy") else {
        return;
    };
    if !Path::new("/usr/bin/ibv_devinfo").exists() {
        return testing::skip!(missing: "ibverbs-utils ibverbs-providers", "no ibv_devinfo");
    }
    for (options, ours) in [(&[][..], false), (&["--devices", "mlx5"], true)] {
        for _ in 0..2 {
            let output = scratch.run(&[options, &["--", "ibv_devinfo"]].concat());
            let said = text(&output);
            assert!(
                output.status.success() && said.contains("PORT_ACTIVE"),
                "{said}"
            );
            assert_eq!(said.contains("serves device=mlx5_0"), ours, "{said}");
        }
    }
    // Another version has another directory.
    assert_eq!(
        fs::read_dir(scratch.cache().join("ringverbs"))
            .unwrap()
            .count(),
        1
    );
    // A library beside the command that others can change is not taken.
    let beside = scratch.0.join("libringverbs_preload.so");
    fs::write(&beside, "").unwrap();
    let preloaded = |mode: &str| {
        let status = Command::new("chmod").arg(mode).arg(&beside).status();
        assert!(status.unwrap().success());
        text(&scratch.run(&["--require-rdma=0", "--", "sh", "-c", "echo $LD_PRELOAD"]))
    };
    let (beside, cache) = (beside.to_str().unwrap(), scratch.cache());
    assert!(preloaded("644").contains(&format!("{beside}\n")));
    assert!(preloaded("666").contains(cache.to_str().unwrap()));
}

#[test]
fn a_file_system_without_execution_is_named() {
    let Some(scratch) = Scratch::new("noexec") else {
        return;
    };
    fs::create_dir(scratch.cache()).unwrap();
    let script = "mount -t tmpfs -o noexec none $2 || exit 77\n\
        XDG_CACHE_HOME=$2 TMPDIR=$2 $1 run --embedded --directory $2/network -- true";
    let output = Command::new("unshare")
        .args(["--map-root-user", "-m", "sh", "-c", script, "sh"])
        .args([scratch.command(), scratch.cache()])
        .output();
    let said = match &output {
        Ok(output) if output.status.code() == Some(1) => text(output),
        other => {
            return testing::skip!("no mount namespace: {other:?}");
        }
    };
    if said.contains("unshare") {
        return testing::skip!("no mount namespace: {said}");
    }
    assert!(said.contains("is mounted noexec"), "{said}");
    assert!(said.contains("set XDG_CACHE_HOME to a directory"), "{said}");
}
