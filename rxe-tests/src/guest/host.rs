//! Requirements of the host that builds and runs guests, and its Debian archive.

use std::env;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

use super::progress;

/// The environment variable with the Debian archive; it overrides apt's.
pub const MIRROR_VARIABLE: &str = "RINGVERBS_DEBIAN_MIRROR";
/// The environment variable with the folder for cached guests.
pub const CACHE_VARIABLE: &str = "RINGVERBS_CACHE";

/// A program, or the absolute path of a file, and its Debian package.
pub type Tool = (&'static str, &'static str);

/// The tools that build a guest.
pub const BUILD_TOOLS: &[Tool] = &[
    ("debootstrap", "debootstrap"),
    ("mkfs.ext4", "e2fsprogs"),
    ("unshare", "util-linux"),
    ("chroot", "coreutils"),
];

/// The signing keys of the Debian archive.
pub const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Returns whether this process runs as root, which building a guest requires.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// Returns the processor time of all terminated child processes.
pub fn processor_time() -> Duration {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_CHILDREN) else {
        return Duration::ZERO;
    };
    let part = |time: TimeVal| {
        let micros = time.tv_sec().saturating_mul(1_000_000) + time.tv_usec();
        Duration::from_micros(micros.try_into().unwrap_or(0))
    };
    part(usage.user_time()) + part(usage.system_time())
}

/// Lowers the priority of this thread and of the processes that it starts.
pub fn lower_priority() {
    let thread = nix::unistd::gettid().to_string();
    // Failure is harmless.
    let _ = Command::new("renice")
        .args(["-n", "5", "-p", &thread])
        .stdout(Stdio::null())
        .status();
}

/// Installs missing tools if this is root on a system with apt.
///
/// # Errors
/// Tools are missing; the error names their packages.
pub fn require(tools: &[Tool], keyring: bool) -> Result<()> {
    // apt-get does not wait for another apt-get.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _guard = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    let missing = |tools: &[Tool]| -> Vec<&'static str> {
        let mut packages: Vec<_> = tools
            .iter()
            .filter(|(program, _)| which(program).is_none())
            .map(|(_, package)| *package)
            .collect();
        if keyring && !Path::new(KEYRING).exists() {
            packages.push("debian-archive-keyring");
        }
        packages
    };
    let packages = missing(tools);
    if packages.is_empty() {
        return Ok(());
    }
    let install_command = format!("apt-get install {}", packages.join(" "));
    if !is_root() || which("apt-get").is_none() {
        bail!("missing packages; as root: {install_command}");
    }
    eprintln!("installing on this machine: {}", packages.join(" "));
    let log = env::temp_dir().join(format!("ringverbs-apt-{}.log", std::process::id()));
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command
            .env("DEBIAN_FRONTEND", "noninteractive")
            .args(["-q", "-y", "--no-install-recommends"])
            .args(arguments);
        command
    };
    let limit = Duration::from_secs(600);
    let mut install = vec!["install"];
    install.extend(&packages);
    if progress::step("apt-get install", &log, limit, &mut apt(&install)).is_err() {
        progress::step("apt-get update", &log, limit, &mut apt(&["update"]))?;
        progress::step("apt-get install", &log, limit, &mut apt(&install))?;
    }
    let _ = fs::remove_file(&log);
    let still_missing = missing(tools);
    if !still_missing.is_empty() {
        bail!(
            "{install_command} succeeded, but {} is still missing",
            still_missing.join(", ")
        );
    }
    Ok(())
}

/// Finds a program in PATH or the system's folders, also those of root's PATH. An
/// absolute path is returned if the file exists.
pub fn which(program: &str) -> Option<PathBuf> {
    if program.starts_with('/') {
        return Some(PathBuf::from(program)).filter(|file| file.exists());
    }
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|file| {
            fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
        })
}

/// Returns the folder for cached guests.
pub fn cache() -> Result<PathBuf> {
    if let Some(dir) = env::var_os(CACHE_VARIABLE) {
        return Ok(PathBuf::from(dir));
    }
    let base = env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute())
        .or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")))
        .with_context(|| format!("neither {CACHE_VARIABLE}, XDG_CACHE_HOME nor HOME is set"))?;
    Ok(base.join("ringverbs"))
}

/// Returns the Debian archive for trees, or `None` for debootstrap's default.
///
/// In this order: the environment variable; apt's configured archive; the user's answer
/// at the terminal.
pub fn mirror() -> Result<Option<String>> {
    // The user is asked once, even if several guests are built at the same time.
    static MIRROR: Mutex<Option<Option<String>>> = Mutex::new(None);
    let mut mirror = MIRROR.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(mirror) = &*mirror {
        return Ok(mirror.clone());
    }
    Ok(mirror.insert(choose_mirror()?).clone())
}

fn choose_mirror() -> Result<Option<String>> {
    if let Some(mirror) = configured_mirror() {
        return Ok(Some(mirror));
    }
    eprintln!(
        "apt on this machine has no Debian archive configured (or its lists are empty: \
         apt-get update).\nSet {MIRROR_VARIABLE} to the URL of an archive."
    );
    if io::stdin().is_terminal() {
        eprint!("Debian archive to use (empty: debootstrap's default): ");
        io::stderr().flush()?;
        let mut answer = String::new();
        io::stdin().read_line(&mut answer)?;
        let answer = answer.trim();
        if !answer.is_empty() {
            return Ok(Some(answer.to_owned()));
        }
    }
    eprintln!("Using debootstrap's default archive.");
    Ok(None)
}

/// Returns the archive of the environment variable or of apt's configuration.
fn configured_mirror() -> Option<String> {
    if let Ok(mirror) = env::var(MIRROR_VARIABLE) {
        return Some(mirror);
    }
    let out = Command::new("apt-get")
        .args(["indextargets", "--format", "$(LABEL)|$(REPO_URI)"])
        .output()
        .ok()?;
    debian_mirror(&String::from_utf8_lossy(&out.stdout))
}

/// Returns the first archive labelled `Debian` in the output of
/// `apt-get indextargets --format '$(LABEL)|$(REPO_URI)'`.
fn debian_mirror(index_targets: &str) -> Option<String> {
    index_targets
        .lines()
        .filter_map(|line| line.split_once('|'))
        .find(|(label, uri)| *label == "Debian" && !uri.is_empty())
        .map(|(_, uri)| uri.trim_end_matches('/').to_owned())
}

/// Returns why the Debian archive is unreachable; `None` if it is reachable, not
/// configured, or behind a proxy.
pub fn archive_unreachable() -> Option<String> {
    let mirror = configured_mirror()?;
    if !apt_proxies().is_empty() || env::var_os("http_proxy").is_some() {
        return None;
    }
    let (host, port) = host_and_port(&mirror)?;
    let reached = (host.as_str(), port)
        .to_socket_addrs()
        .map_err(|error| error.to_string())
        .and_then(|addresses| {
            let mut last = "no address".to_owned();
            for address in addresses {
                match TcpStream::connect_timeout(&address, Duration::from_secs(10)) {
                    Ok(_) => return Ok(()),
                    Err(error) => last = error.to_string(),
                }
            }
            Err(last)
        });
    reached
        .err()
        .map(|reason| format!("the Debian archive {mirror} is unreachable ({reason})"))
}

/// Returns the host and port of an `http` or `https` URL.
fn host_and_port(address: &str) -> Option<(String, u16)> {
    let (scheme, rest) = address.split_once("://")?;
    let default_port = match scheme {
        "http" => 80,
        "https" => 443,
        _ => return None,
    };
    let authority = rest.split('/').next()?;
    match authority.rsplit_once(':') {
        Some((host, port)) => Some((host.to_owned(), port.parse().ok()?)),
        None => Some((authority.to_owned(), default_port)),
    }
}

/// Returns apt's proxy settings on this machine, as lines of an apt.conf.
pub fn apt_proxies() -> String {
    let out = Command::new("apt-config").arg("dump").output();
    let Ok(out) = out else { return String::new() };
    String::from_utf8_lossy(&out.stdout)
        .lines()
        .filter(|line| {
            line.starts_with("Acquire::http::Proxy") || line.starts_with("Acquire::https::Proxy")
        })
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Returns whether QEMU can use KVM. The device file is not enough: without the
/// processor's virtualization extensions it may open, but guests do not run.
pub fn kvm_works() -> bool {
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    has_virtualization(&flags)
        && fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm")
            .is_ok()
}

fn has_virtualization(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| line.split_whitespace().any(|f| f == "vmx" || f == "svm"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_debian_archive_is_recognised() {
        let targets = "Debian-Security|http://security.example/debian-security/\n\
                       Node|http://node.example/\n\
                       Debian|http://archive.example/debian/\n";
        assert_eq!(
            debian_mirror(targets).as_deref(),
            Some("http://archive.example/debian")
        );
        assert_eq!(
            debian_mirror("Ubuntu|http://archive.example/ubuntu/\n"),
            None
        );
        assert_eq!(debian_mirror(""), None);
    }

    #[test]
    fn urls_are_parsed() {
        assert_eq!(
            host_and_port("http://a.example/debian"),
            Some(("a.example".into(), 80))
        );
        assert_eq!(
            host_and_port("https://a.example:8443/"),
            Some(("a.example".into(), 8443))
        );
        assert_eq!(host_and_port("file:/mirror"), None);
    }

    #[test]
    fn kvm_needs_the_processor_s_flag() {
        assert!(has_virtualization("flags\t\t: fpu vmx sse\n"));
        assert!(has_virtualization("flags : svm\n"));
        assert!(!has_virtualization("flags : fpu svm_lock\nmodel : vmx\n"));
    }

    #[test]
    fn programs_are_found_in_path() {
        assert!(which("sh").is_some());
        assert!(which("no-such-program-at-all").is_none());
    }
}
