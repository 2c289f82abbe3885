//! Programs that have more rights than whoever runs them: their environment is
//! another user's, and nothing of it counts.
//!
//! The program is a copy of this one, with rights of root's, run by a user who
//! has none. Making it takes root; otherwise this is skipped.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ringverbs::cm::Listener;
use uverbs::environment;
use uverbs::kernel::{Kernel, RealKernel};

const NOBODY: u32 = 65534;
const SYSFS: &str = "/a/place/of/the/user";

/// The program that the other tests run: calls everything that reads the environment, and
/// prints the results.
#[test]
#[ignore = "run by another test"]
fn subject() {
    let variable = environment::variable("SYSFS_PATH").is_some();
    println!("elevated: {}", environment::has_elevated_privileges());
    println!("variable: {variable}, {}", RealKernel.sysfs_path());
    let listener = Listener::bind("127.0.0.1:7471".parse().unwrap());
    println!("bound: {}", listener.is_ok());
}

/// A folder for a user who has no rights, and the program in it.
struct Stage {
    folder: PathBuf,
    program: PathBuf,
}

impl Stage {
    fn new(name: &str) -> Option<Self> {
        // SAFETY: it has no preconditions.
        if unsafe { libc::geteuid() } != 0 {
            testing::skip!("only root can make programs with elevated privileges");
            return None;
        }
        let folder = format!("ringverbs-elevated-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        let program = folder.join("program");
        // By another process: a child of another test's could inherit the file
        // while it is open for writing, and then it cannot be run (ETXTBSY).
        let mut copy = Command::new("install");
        copy.args(["-m", "755"])
            .arg(std::env::current_exe().unwrap());
        assert!(copy.arg(&program).status().unwrap().success());
        Some(Self { folder, program })
    }

    /// Runs the program as nobody, who names a folder of the stage for a device.
    fn run(&self) -> (String, PathBuf) {
        let own = self.folder.join("own");
        fs::create_dir(&own).unwrap();
        chown(&own, Some(NOBODY), Some(NOBODY)).unwrap();
        let device = own.join("wire");
        let output = Command::new(&self.program)
            .args(["subject", "--exact", "--ignored", "--nocapture"])
            .env("SYSFS_PATH", SYSFS)
            .env("RINGVERBS_DEVICE", format!("embedded:{}", device.display()))
            .current_dir("/")
            .uid(NOBODY)
            .gid(NOBODY)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{said}");
        (said, device)
    }

    /// Nothing of the environment has counted.
    fn check_elevated(&self) {
        let (said, device) = self.run();
        if said.contains("elevated: false") && is_without_set_id(&self.folder) {
            return testing::skip!("set-user-ID does not count on this file system");
        }
        assert!(said.contains("elevated: true"), "{said}");
        assert!(said.contains("variable: false, /sys\n"), "{said}");
        assert!(!device.exists(), "made by the other user's rights");
    }
}

/// Whether it is mounted with `nosuid`.
fn is_without_set_id(folder: &Path) -> bool {
    let found = nix::sys::statvfs::statvfs(folder).unwrap();
    found
        .flags()
        .contains(nix::sys::statvfs::FsFlags::ST_NOSUID)
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// So that the others can fail.
#[test]
fn unprivileged_program_uses_the_environment() {
    let Some(stage) = Stage::new("ordinary") else {
        return;
    };
    let (said, device) = stage.run();
    assert!(said.contains("elevated: false"), "{said}");
    assert!(
        said.contains(&format!("variable: true, {SYSFS}\n")),
        "{said}"
    );
    assert!(said.contains("bound: true"), "{said}");
    assert!(device.is_dir(), "{said}");
}

#[test]
fn set_user_id_program_ignores_the_environment() {
    let Some(stage) = Stage::new("user") else {
        return;
    };
    fs::set_permissions(&stage.program, Permissions::from_mode(0o4755)).unwrap();
    stage.check_elevated();
}

#[test]
fn set_group_id_program_ignores_the_environment() {
    let Some(stage) = Stage::new("group") else {
        return;
    };
    fs::set_permissions(&stage.program, Permissions::from_mode(0o2755)).unwrap();
    stage.check_elevated();
}

#[test]
fn program_with_file_capabilities_ignores_the_environment() {
    let Some(stage) = Stage::new("capability") else {
        return;
    };
    let mut setcap = Command::new("setcap");
    let status = setcap.arg("cap_net_raw+ep").arg(&stage.program).status();
    if !status.is_ok_and(|status| status.success()) {
        return testing::skip!("setcap cannot give a file capabilities here");
    }
    stage.check_elevated();
}
