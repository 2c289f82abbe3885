//! What the machine that makes and runs a guest must have, and where it gets
//! Debian packages from.

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

/// Names the Debian archive to use, before anything that apt says.
pub const MIRROR_VARIABLE: &str = "RINGVERBS_DEBIAN_MIRROR";
/// Names the folder that guests are kept in between runs.
pub const CACHE_VARIABLE: &str = "RINGVERBS_CACHE";

/// A program, or a file by its whole path, and the Debian package that has it.
pub type Tool = (&'static str, &'static str);

/// What making a guest takes.
pub const TO_BUILD: &[Tool] = &[
    ("debootstrap", "debootstrap"),
    ("mkfs.ext4", "e2fsprogs"),
    ("unshare", "util-linux"),
    ("chroot", "coreutils"),
];

/// The keys that the Debian archive is signed with.
pub const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Whether this process may do what a guest's making takes.
pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// The processor time of all processes that this one has started and that have
/// ended.
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

/// Gives this thread, and what it starts from now on, less of the processors than
/// others have.
pub fn step_back() {
    let thread = nix::unistd::gettid().to_string();
    // Where that does not work it only takes longer.
    let _ = Command::new("renice")
        .args(["-n", "5", "-p", &thread])
        .stdout(Stdio::null())
        .status();
}

/// Makes sure that `tools` are there: installs what is missing when run by
/// root on a system with apt, and names it precisely otherwise.
pub fn require(tools: &[Tool], keyring: bool) -> Result<()> {
    // One at a time: apt-get does not wait for another one.
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
    let by_hand = format!("apt-get install {}", packages.join(" "));
    if !is_root() || which("apt-get").is_none() {
        bail!("missing packages; as root: {by_hand}");
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
    let still = missing(tools);
    if !still.is_empty() {
        bail!(
            "{by_hand} succeeded, but {} is still missing",
            still.join(", ")
        );
    }
    Ok(())
}

/// Where a program is found, looking also where only root's shell looks; or a
/// file, where it is.
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

/// The folder that guests are kept in between runs.
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

/// The Debian archive to make trees from, or `None` to leave it to
/// debootstrap's own default.
///
/// In this order: the environment variable; the archive that apt on this
/// machine is configured with; the answer of whoever sits at the terminal.
pub fn mirror() -> Result<Option<String>> {
    // Asked once, however many guests are made at the same time.
    static MIRROR: Mutex<Option<Option<String>>> = Mutex::new(None);
    let mut mirror = MIRROR.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(mirror) = &*mirror {
        return Ok(mirror.clone());
    }
    Ok(mirror.insert(choose_mirror()?).clone())
}

fn choose_mirror() -> Result<Option<String>> {
    if let Some(mirror) = mirror_of_apt() {
        return Ok(Some(mirror));
    }
    eprintln!(
        "apt on this machine is not configured with a Debian archive (or its lists are empty: \
         apt-get update).\nSet {MIRROR_VARIABLE} to the address of one to choose it."
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
    eprintln!("Leaving the choice of the archive to debootstrap.");
    Ok(None)
}

/// The archive that the environment names, or that apt is configured with.
fn mirror_of_apt() -> Option<String> {
    if let Ok(mirror) = env::var(MIRROR_VARIABLE) {
        return Some(mirror);
    }
    let out = Command::new("apt-get")
        .args(["indextargets", "--format", "$(LABEL)|$(REPO_URI)"])
        .output()
        .ok()?;
    debian_of(&String::from_utf8_lossy(&out.stdout))
}

/// The first archive labelled as Debian's in the output of
/// `apt-get indextargets --format '$(LABEL)|$(REPO_URI)'`.
fn debian_of(index_targets: &str) -> Option<String> {
    index_targets
        .lines()
        .filter_map(|line| line.split_once('|'))
        .find(|(label, uri)| *label == "Debian" && !uri.is_empty())
        .map(|(_, uri)| uri.trim_end_matches('/').to_owned())
}

/// Why the Debian archive cannot be reached; `None` if it can, or if it is
/// not known which one it is or a proxy stands between.
pub fn archive_out_of_reach() -> Option<String> {
    let mirror = mirror_of_apt()?;
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
        .map(|why| format!("the Debian archive {mirror} is out of reach ({why})"))
}

/// The host and port of an `http` or `https` address.
fn host_and_port(address: &str) -> Option<(String, u16)> {
    let (scheme, rest) = address.split_once("://")?;
    let usual = match scheme {
        "http" => 80,
        "https" => 443,
        _ => return None,
    };
    let authority = rest.split('/').next()?;
    match authority.rsplit_once(':') {
        Some((host, port)) => Some((host.to_owned(), port.parse().ok()?)),
        None => Some((authority.to_owned(), usual)),
    }
}

/// apt's proxy settings on this machine, as lines of an apt.conf.
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

/// Whether QEMU may use KVM. The device alone is not enough: where the
/// processor lacks the instructions, opening it can succeed and the guest
/// then never runs.
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
            debian_of(targets).as_deref(),
            Some("http://archive.example/debian")
        );
        assert_eq!(debian_of("Ubuntu|http://archive.example/ubuntu/\n"), None);
        assert_eq!(debian_of(""), None);
    }

    #[test]
    fn an_address_is_taken_apart() {
        let of = |address| host_and_port(address);
        assert_eq!(
            of("http://a.example/debian"),
            Some(("a.example".into(), 80))
        );
        assert_eq!(
            of("https://a.example:8443/"),
            Some(("a.example".into(), 8443))
        );
        assert_eq!(of("file:/mirror"), None);
    }

    #[test]
    fn kvm_needs_the_processor_s_flag() {
        assert!(has_virtualization("flags\t\t: fpu vmx sse\n"));
        assert!(has_virtualization("flags : svm\n"));
        assert!(!has_virtualization("flags : fpu svm_lock\nmodel : vmx\n"));
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        assert!(which("sh").is_some());
        assert!(which("no-such-program-at-all").is_none());
    }
}
