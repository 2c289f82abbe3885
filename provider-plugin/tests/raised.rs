//! The plugin in programs of libibverbs that have more rights than whoever runs
//! them: nothing that this user names is read, written or loaded.
//!
//! Such programs are made here, which takes root; otherwise this is skipped.

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Dir, HERE, plugin};

const NOBODY: u32 = 65534;

struct Stage {
    dir: Dir,
    program: PathBuf,
}

/// What a program left.
struct Run {
    said: String,
    /// The files that are in the user's folder.
    files: Vec<String>,
}

impl Stage {
    fn new(name: &str) -> Option<Self> {
        // SAFETY: it has no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            println!("skipped: only root can make programs of raised rights");
            return None;
        }
        let dir = Dir::new(&format!("raised-{name}"));
        fs::set_permissions(&dir.0, Permissions::from_mode(0o755)).unwrap();
        let object = dir.0.join("libringverbs-rdmav34.so");
        fs::copy(plugin(), &object).unwrap();
        let program = dir.0.join("program");
        let compiled = Command::new("cc")
            .arg("-o")
            .arg(&program)
            .arg(format!("-DPLUGIN=\"{}\"", object.display()))
            .arg(format!("{HERE}/tests/c/raised.c"))
            .args(["-libverbs", "-ldl"])
            .output();
        if !compiled.is_ok_and(|output| output.status.success()) {
            println!("skipped: nothing can be compiled for libibverbs here");
            return None;
        }
        Some(Self { dir, program })
    }

    fn with_mode(&self, mode: u32) {
        fs::set_permissions(&self.program, Permissions::from_mode(mode)).unwrap();
    }

    /// Runs the program as nobody, whose environment asks for all that there is.
    fn run(&self) -> Run {
        let own = self.dir.0.join("own");
        fs::create_dir(&own).unwrap();
        let sysfs = own.join("sys/class/infiniband_verbs/uverbs0");
        fs::create_dir_all(&sysfs).unwrap();
        fs::write(sysfs.join("ibdev"), "theirs0\n").unwrap();
        chown(&own, Some(NOBODY), Some(NOBODY)).unwrap();
        let path = |name: &str| own.join(name);
        let output = Command::new(&self.program)
            .env("RINGVERBS_LOG", "debug")
            .env("RINGVERBS_LOG_FILE", path("log"))
            .env("VERBS_LOG_LEVEL", "4")
            .env("VERBS_LOG_FILE", path("verbs-log"))
            .env("RINGVERBS_DEVICES", "rxe,mlx5,theirs")
            .env("RINGVERBS_MLX5_CQE", "theirs")
            .env("RINGVERBS_RDMA_CORE", "theirs")
            .env(
                "RINGVERBS_DEVICE",
                format!("embedded:{}", path("wire").display()),
            )
            .env("SYSFS_PATH", path("sys"))
            .current_dir("/")
            .uid(NOBODY)
            .gid(NOBODY)
            .output()
            .unwrap();
        let said = [output.stdout, output.stderr].concat();
        let mut files = Vec::new();
        for entry in fs::read_dir(&own).unwrap() {
            files.push(entry.unwrap().file_name().into_string().unwrap());
        }
        files.retain(|name| name != "sys");
        Run {
            said: String::from_utf8_lossy(&said).into_owned(),
            files,
        }
    }

    fn check_raised(&self) {
        let Run { said, files } = self.run();
        if said.contains("raised: 0") && is_without_set_id(&self.dir.0) {
            println!("skipped: set-user-ID does not count on this file system");
            return;
        }
        assert!(said.contains("raised: 1\n"), "{said}");
        assert!(said.contains("libringverbs-rdmav34.so"), "{said}");
        // This one libibverbs itself opens, whatever its rights.
        let ours: Vec<_> = files.iter().filter(|name| *name != "verbs-log").collect();
        assert_eq!(ours, [""; 0], "{said}");
        for word in ["ringverbs INFO", "ringverbs DEBUG", "ringverbs WARN"] {
            assert!(!said.contains(word), "{said}");
        }
        if let Ok(log) = fs::read_to_string(self.dir.0.join("own/verbs-log")) {
            assert!(!log.contains("ringverbs"), "{log}");
        }
        assert!(
            !said.contains(&format!("{}/own", self.dir.0.display())),
            "{said}"
        );
    }
}

/// Whether it is mounted with `nosuid`.
fn is_without_set_id(folder: &Path) -> bool {
    let mut found = core::mem::MaybeUninit::<libc::statvfs>::uninit();
    let path = std::ffi::CString::new(folder.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path, and room for the answer.
    let asked = unsafe { libc::statvfs(path.as_ptr(), found.as_mut_ptr()) };
    assert_eq!(asked, 0);
    // SAFETY: it has been written.
    let found = unsafe { found.assume_init() };
    found.f_flag & libc::ST_NOSUID != 0
}

/// So that the others can fail.
#[test]
fn an_ordinary_program_s_log_is_written() {
    let Some(stage) = Stage::new("ordinary") else {
        return;
    };
    let Run { said, files } = stage.run();
    assert!(said.contains("raised: 0\n"), "{said}");
    if said.contains("ringverbs: not registered") {
        println!("skipped: this libibverbs is not a known one: {said}");
        return;
    }
    assert!(files.iter().any(|name| name == "log"), "{files:?} {said}");
    let log = fs::read_to_string(stage.dir.0.join("own/log")).unwrap();
    assert!(log.contains("registered with libibverbs"), "{log}");
    assert!(log.contains("RINGVERBS_DEVICES names devices"), "{log}");
}

#[test]
fn a_set_user_id_program_takes_nothing_from_its_caller() {
    let Some(stage) = Stage::new("user") else {
        return;
    };
    stage.with_mode(0o4755);
    stage.check_raised();
}

#[test]
fn a_set_group_id_program_takes_nothing_from_its_caller() {
    let Some(stage) = Stage::new("group") else {
        return;
    };
    stage.with_mode(0o2755);
    stage.check_raised();
}

#[test]
fn a_program_with_file_capabilities_takes_nothing_from_its_caller() {
    let Some(stage) = Stage::new("capability") else {
        return;
    };
    let mut setcap = Command::new("setcap");
    let status = setcap.arg("cap_net_raw+ep").arg(&stage.program).status();
    if !status.is_ok_and(|status| status.success()) {
        println!("skipped: setcap cannot give a file capabilities here");
        return;
    }
    stage.check_raised();
}
