//! The plugin in programs with elevated privileges: no file of the calling user is read, written or
//! loaded.
//!
//! The tests create such programs, which needs root; otherwise they are skipped.

mod common;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Dir, HERE, plugin};

const NOBODY: u32 = 65534;

struct ElevatedProgram {
    dir: Dir,
    program: PathBuf,
}

/// The result of a run.
struct Run {
    output: String,
    /// The files in the user's folder.
    files: Vec<String>,
}

impl ElevatedProgram {
    fn new(name: &str) -> Option<Self> {
        // SAFETY: it has no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            testing::skip!("only root can make programs with elevated privileges");
            return None;
        }
        let dir = Dir::new(&format!("elevated-{name}"));
        fs::set_permissions(&dir.0, Permissions::from_mode(0o755)).unwrap();
        let object = dir.0.join("libringverbs-rdmav34.so");
        fs::copy(plugin(), &object).unwrap();
        let program = dir.0.join("program");
        let compiled = Command::new("cc")
            .arg("-o")
            .arg(&program)
            .arg(format!("-DPLUGIN=\"{}\"", object.display()))
            .arg(format!("{HERE}/tests/c/elevated.c"))
            .args(["-libverbs", "-ldl"])
            .output();
        if !compiled.is_ok_and(|output| output.status.success()) {
            testing::skip!(missing: "gcc libibverbs-dev", "no C compiler or no libibverbs headers");
            return None;
        }
        Some(Self { dir, program })
    }

    fn set_mode(&self, mode: u32) {
        fs::set_permissions(&self.program, Permissions::from_mode(mode)).unwrap();
    }

    /// Runs the program as nobody, with every variable set in the environment.
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
        let text = [output.stdout, output.stderr].concat();
        let mut files = Vec::new();
        for entry in fs::read_dir(&own).unwrap() {
            files.push(entry.unwrap().file_name().into_string().unwrap());
        }
        files.retain(|name| name != "sys");
        Run {
            output: String::from_utf8_lossy(&text).into_owned(),
            files,
        }
    }

    fn check_elevated(&self) {
        let Run { output, files } = self.run();
        if output.contains("elevated: 0") && is_without_set_id(&self.dir.0) {
            return testing::skip!("set-user-ID does not count on this file system");
        }
        assert!(output.contains("elevated: 1\n"), "{output}");
        assert!(output.contains("libringverbs-rdmav34.so"), "{output}");
        // libibverbs itself opens this file, whatever its rights.
        let files_of_plugin: Vec<_> = files.iter().filter(|name| *name != "verbs-log").collect();
        assert_eq!(files_of_plugin, [""; 0], "{output}");
        for word in ["ringverbs INFO", "ringverbs DEBUG", "ringverbs WARN"] {
            assert!(!output.contains(word), "{output}");
        }
        if let Ok(log) = fs::read_to_string(self.dir.0.join("own/verbs-log")) {
            assert!(!log.contains("ringverbs"), "{log}");
        }
        assert!(
            !output.contains(&format!("{}/own", self.dir.0.display())),
            "{output}"
        );
    }
}

/// Returns whether the file system is mounted with `nosuid`.
fn is_without_set_id(folder: &Path) -> bool {
    let mut found = core::mem::MaybeUninit::<libc::statvfs>::uninit();
    let path = std::ffi::CString::new(folder.to_str().unwrap()).unwrap();
    // SAFETY: a NUL-terminated path, and room for the answer.
    let status = unsafe { libc::statvfs(path.as_ptr(), found.as_mut_ptr()) };
    assert_eq!(status, 0);
    // SAFETY: it has been written.
    let found = unsafe { found.assume_init() };
    found.f_flag & libc::ST_NOSUID != 0
}

/// Shows that the other tests can fail.
#[test]
fn an_ordinary_program_writes_its_log() {
    let Some(program) = ElevatedProgram::new("ordinary") else {
        return;
    };
    let Run { output, files } = program.run();
    assert!(output.contains("elevated: 0\n"), "{output}");
    if output.contains("ringverbs: not registered") {
        return testing::skip!("this libibverbs is not a known one: {output}");
    }
    assert!(files.iter().any(|name| name == "log"), "{files:?} {output}");
    let log = fs::read_to_string(program.dir.0.join("own/log")).unwrap();
    assert!(log.contains("registered with libibverbs"), "{log}");
    assert!(log.contains("unknown device in RINGVERBS_DEVICES"), "{log}");
}

#[test]
fn set_user_id_programs_ignore_the_environment() {
    let Some(program) = ElevatedProgram::new("user") else {
        return;
    };
    program.set_mode(0o4755);
    program.check_elevated();
}

#[test]
fn set_group_id_programs_ignore_the_environment() {
    let Some(program) = ElevatedProgram::new("group") else {
        return;
    };
    program.set_mode(0o2755);
    program.check_elevated();
}

#[test]
fn programs_with_file_capabilities_ignore_the_environment() {
    let Some(program) = ElevatedProgram::new("capability") else {
        return;
    };
    let mut setcap = Command::new("setcap");
    let status = setcap.arg("cap_net_raw+ep").arg(&program.program).status();
    if !status.is_ok_and(|status| status.success()) {
        return testing::skip!("setcap cannot give a file capabilities here");
    }
    program.check_elevated();
}
