//! Starts the programs under test, and detects the provider that serves them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

/// libibverbs's list of the providers that it loads.
const CONFIG: &str = "/etc/libibverbs.d";

/// libibverbs loads its providers one after another; all are loaded when no new one has
/// appeared for this long.
const SETTLE_TIME: Duration = Duration::from_millis(400);

/// Bounds of the interval between scans of the memory maps until then. Programs may
/// exit at once; a scan costs an emulated processor 10 ms.
const MIN_SCAN_INTERVAL: Duration = Duration::from_millis(2);
const MAX_SCAN_INTERVAL: Duration = Duration::from_millis(20);
/// The interval afterwards.
const SETTLED_SCAN_INTERVAL: Duration = Duration::from_millis(200);

/// Returns the interval until the next scan of a process of this age.
fn scan_interval(age: Duration, settled: bool) -> Duration {
    if settled {
        SETTLED_SCAN_INTERVAL
    } else {
        (age / 8).clamp(MIN_SCAN_INTERVAL, MAX_SCAN_INTERVAL)
    }
}

/// The library that must serve a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// rdma-core's librxe.
    Stock,
    /// ringverbs.
    Ours,
    /// None: a program of the Rust crate.
    None,
    /// None, but its peers are C programs served by librxe.
    StockPeers,
    /// None, but its peers are C programs served by ringverbs's plugin.
    PluginPeers,
}

impl Library {
    /// Returns whether the plugin serves C programs.
    fn is_ours(self) -> bool {
        matches!(self, Library::Ours | Library::PluginPeers)
    }
}

/// The plugin's path, and how programs load it.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// The path that libibverbs appends `-rdmav<ABI>.so` to.
    pub path: PathBuf,
    /// The configured providers are not hidden, which needs root.
    pub keep_configured_providers: bool,
    /// The plugin is also preloaded, for mlx5: some programs are linked to the C
    /// provider, which is then mapped whichever provider serves.
    pub preload: bool,
    /// Instead of preloading, this `libmlx5.so.1` replaces rdma-core's.
    pub in_place: Option<PathBuf>,
}

impl Plugin {
    /// Returns the prefix of the plugin's file name in a memory map.
    pub fn stem(&self) -> String {
        self.path
            .file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    }
}

/// Returns a command whose device is served by `library`.
///
/// libibverbs loads the configured providers besides the one named in the environment.
/// For ours they are hidden in a mount namespace of the process, so that no other
/// provider can serve the device.
pub fn command(library: Library, plugin: Option<&Plugin>, argv: &[String]) -> Result<Command> {
    let (program, arguments) = argv.split_first().context("an empty command")?;
    let mut command = match library {
        Library::Stock | Library::None | Library::StockPeers => Command::new(program),
        Library::Ours | Library::PluginPeers => {
            let plugin = plugin.context("a run with the plugin needs the plugin's path")?;
            if let Some(library) = &plugin.in_place {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg("in-place").arg(library).arg("--");
                command.arg(program).args(arguments);
                command
                    .env_remove("RDMAV_DRIVERS")
                    .env_remove("IBV_DRIVERS");
                command.env("RINGVERBS_LOG", "info");
                return Ok(command);
            }
            let mut command = match plugin.keep_configured_providers {
                true => Command::new(program),
                false => {
                    let mut alone = Command::new(std::env::current_exe()?);
                    alone.args(["alone", "--"]).arg(program);
                    alone
                }
            };
            command
                .env("RDMAV_DRIVERS", &plugin.path)
                .env("RXE_EXPECT", plugin.stem());
            if plugin.preload {
                // Any of its links will do.
                let mut file = plugin.path.clone().into_os_string();
                file.push("-rdmav34.so");
                command.env("LD_PRELOAD", file).env("RINGVERBS_LOG", "info");
            }
            command
        }
    };
    if !library.is_ours() {
        command
            .env_remove("RDMAV_DRIVERS")
            .env_remove("IBV_DRIVERS");
    }
    command.args(arguments);
    Ok(command)
}

/// Prepends a path to a list variable of the command's environment.
pub(super) fn prepend_path(command: &mut Command, name: &str, path: &Path) {
    let before = command.get_envs().find(|(key, _)| *key == name);
    let mut list = path.as_os_str().to_owned();
    if let Some((_, Some(before))) = before {
        list.push(":");
        list.push(before);
    }
    command.env(name, list);
}

/// Hides libibverbs's configured providers from this process and executes `argv`.
/// Returns only on failure.
pub fn exec_without_providers(argv: &[String]) -> Result<()> {
    private_mounts()?;
    let none: Option<&str> = None;
    mount(Some("none"), CONFIG, Some("tmpfs"), MsFlags::empty(), none)
        .with_context(|| format!("cannot hide {CONFIG}"))?;
    exec(argv)
}

/// Mounts `library` over rdma-core's libmlx5.so.1 for this process and executes `argv`.
/// Returns only on failure.
pub fn exec_with_libmlx5(library: &Path, argv: &[String]) -> Result<()> {
    let place = rdma_core_libmlx5()?;
    private_mounts()?;
    let none: Option<&str> = None;
    mount(Some(library), &place, none, MsFlags::MS_BIND, none)
        .with_context(|| format!("cannot replace {}", place.display()))?;
    exec(argv)
}

/// Returns the file behind both links of rdma-core's libmlx5: the library that programs
/// are linked to, and the provider that libibverbs loads.
fn rdma_core_libmlx5() -> Result<PathBuf> {
    let mut folders = vec![PathBuf::from("/usr/lib64"), PathBuf::from("/usr/lib")];
    // Debian has a folder for each architecture.
    let below = fs::read_dir("/usr/lib").context("cannot list /usr/lib")?;
    folders.extend(below.flatten().map(|entry| entry.path()));
    folders
        .iter()
        .find_map(|folder| fs::canonicalize(folder.join("libmlx5.so.1")).ok())
        .context("rdma-core's libmlx5.so.1 is not in /usr/lib: install ibverbs-providers")
}

fn private_mounts() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace")?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot make the mounts private")
}

fn exec(argv: &[String]) -> Result<()> {
    let (program, arguments) = argv.split_first().context("an empty command")?;
    let error = Command::new(program).args(arguments).exec();
    bail!("cannot run {program}: {error}")
}

/// A program under test. Its process group is killed on drop.
#[derive(Debug)]
pub struct TestProcess {
    child: Child,
    output: PathBuf,
    status: Option<ExitStatus>,
    /// Provider libraries found in the memory maps of the process and its children.
    mapped_providers: BTreeSet<String>,
    /// Sizes of the memory maps at the last scan, in pages, by process.
    map_sizes: BTreeMap<u32, u64>,
    began: Instant,
    next_scan: Instant,
    last_new_mapping: Instant,
}

impl TestProcess {
    /// Starts `command` with its standard output in the file `output`, and its standard
    /// error in a file beside that.
    pub fn start(mut command: Command, output: &Path) -> Result<TestProcess> {
        let _ = fs::remove_file(log_path(output));
        let child = command
            .env("RINGVERBS_LOG_FILE", log_path(output))
            .stdin(Stdio::null())
            .stdout(File::create(output)?)
            .stderr(File::create(stderr_path(output))?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        Ok(TestProcess {
            child,
            output: output.to_owned(),
            status: None,
            mapped_providers: BTreeSet::new(),
            map_sizes: BTreeMap::new(),
            began: Instant::now(),
            next_scan: Instant::now(),
            last_new_mapping: Instant::now(),
        })
    }

    /// Scans the memory maps if that is due, and returns the status of a process that
    /// has exited.
    pub fn poll(&mut self) -> Result<Option<ExitStatus>> {
        if self.status.is_none() {
            if Instant::now() >= self.next_scan {
                let pid = self.child.id();
                for process in process_tree(pid) {
                    // A map of unchanged size has no new libraries, and is long to read.
                    let size = fs::read_to_string(format!("/proc/{process}/statm"));
                    let size = first_number(&size.unwrap_or_default());
                    if self.map_sizes.insert(process, size) == Some(size) {
                        continue;
                    }
                    let maps = fs::read_to_string(format!("/proc/{process}/maps"));
                    for path in providers(&maps.unwrap_or_default()) {
                        if self.mapped_providers.insert(path) {
                            self.last_new_mapping = Instant::now();
                        }
                    }
                }
                // The process may be short-lived at first; scans are expensive later.
                let settled = !self.mapped_providers.is_empty()
                    && self.last_new_mapping.elapsed() > SETTLE_TIME;
                self.next_scan = Instant::now() + scan_interval(self.began.elapsed(), settled);
            }
            self.status = self.child.try_wait()?;
        }
        Ok(self.status)
    }

    /// Returns the paths of the provider libraries that were mapped.
    pub fn mapped_providers(&self) -> &BTreeSet<String> {
        &self.mapped_providers
    }

    /// Returns whether the plugin has logged that it serves the device, in this process
    /// or a child.
    pub fn has_logged_serving(&self, device: &str) -> bool {
        let text = fs::read_to_string(log_path(&self.output)).unwrap_or_default();
        let line = format!("serves device={device}");
        text.lines().any(|logged| logged.ends_with(&line))
    }

    /// Returns the standard output so far.
    pub fn stdout(&self) -> String {
        let bytes = fs::read(&self.output).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Returns the standard output so far, followed by the standard error.
    pub fn output(&self) -> String {
        let bytes = fs::read(stderr_path(&self.output)).unwrap_or_default();
        self.stdout() + &String::from_utf8_lossy(&bytes)
    }

    /// Returns the number of the process, which is also that of its process group.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the exit status; `None` while the process runs, or if it was killed as
    /// unfinished.
    pub fn exit_status(&self) -> Option<ExitStatus> {
        self.status
    }

    /// Kills the process group. A process that was still running has no exit status.
    pub fn kill_unfinished(&mut self) {
        let ended = self.status;
        self.kill();
        self.status = ended;
    }

    /// Kills the whole process group.
    pub fn kill(&mut self) {
        // The group's number is not reused before the leader is reaped; afterwards only
        // its descendants can have it.
        let _ = killpg(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL);
        if self.status.is_none() {
            self.status = self.child.wait().ok();
        }
    }
}

impl Drop for TestProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the file for the standard error, beside that of the standard output.
fn stderr_path(output: &Path) -> PathBuf {
    output.with_extension("errors")
}

/// Returns the file for the plugin's log.
fn log_path(output: &Path) -> PathBuf {
    output.with_extension("ringverbs")
}

/// Checks that the mapped providers prove that `library` served the device. The name of
/// rdma-core's provider starts with `stock`. With a preloaded plugin that may be mapped
/// as well, and the plugin must have logged that it serves (`serves`): libibverbs gives
/// a device to one provider only.
///
/// # Errors
/// The reason why they prove something else.
pub fn check_provider(
    library: Library,
    plugin: Option<&Plugin>,
    stock: &str,
    mapped: &BTreeSet<String>,
    serves: bool,
) -> Result<(), String> {
    let preload = plugin.is_some_and(|plugin| plugin.preload);
    let stem = plugin.map(Plugin::stem).unwrap_or_default();
    let is_ours = |path: &&String| !stem.is_empty() && file_name(path).starts_with(&stem);
    let is_stock = |path: &&String| file_name(path).starts_with(stock);
    let ours = mapped.iter().any(|path| is_ours(&path));
    let stock = mapped.iter().any(|path| is_stock(&path));
    match (library, ours, stock) {
        (Library::Stock, false, true) => Ok(()),
        (Library::Ours | Library::PluginPeers, false, _) => Err("ringverbs was not mapped".into()),
        (Library::Ours | Library::PluginPeers, true, _) if preload && !serves => {
            Err("ringverbs was mapped, but has not logged that it serves the device".into())
        }
        (Library::Ours | Library::PluginPeers, true, true) if !preload => {
            Err("stock's provider was mapped beside ringverbs".into())
        }
        (Library::Ours | Library::PluginPeers, true, _) => Ok(()),
        (Library::Stock, true, _) => Err("ringverbs was mapped in a run with stock".into()),
        (Library::Stock, false, false) => Err("rdma-core's provider was not mapped".into()),
        (Library::None, false, false) | (Library::StockPeers, false, _) => Ok(()),
        (Library::None | Library::StockPeers, true, _) => {
            Err("the plugin was mapped in a run of the Rust crate".into())
        }
        (Library::None, false, true) => {
            Err("a stock provider was mapped in a run of the Rust crate alone".into())
        }
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Returns the paths of provider libraries in a memory map.
fn providers(maps: &str) -> BTreeSet<String> {
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .filter(|path| {
            let name = file_name(path);
            // libmlx5 is also a library that programs are linked to.
            name.contains("-rdmav") || name.starts_with("libmlx5.so")
        })
        .map(str::to_owned)
        .collect()
}

/// Returns the first number of a line; 0 if there is none.
fn first_number(text: &str) -> u64 {
    let word = text.split_whitespace().next().unwrap_or_default();
    word.parse().unwrap_or(0)
}

/// Returns a process and all its descendants.
fn process_tree(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    let mut at = 0;
    while at < all.len() {
        let of = all[at];
        at += 1;
        let Ok(threads) = fs::read_dir(format!("/proc/{of}/task")) else {
            continue;
        };
        for thread in threads.flatten() {
            let children = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
            all.extend(
                children
                    .split_whitespace()
                    .filter_map(|c| c.parse::<u32>().ok()),
            );
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plugin(preload: bool) -> Plugin {
        Plugin {
            path: "/opt/ringverbs/libringverbs".into(),
            keep_configured_providers: false,
            in_place: None,
            preload,
        }
    }

    const MAPS: &str = "\
7f00-7f01 r-xp 00000000 fe:00 1 /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.56.1
7f02-7f03 r-xp 00000000 fe:00 2 /usr/lib/x86_64-linux-gnu/libibverbs/librxe-rdmav34.so
7f02-7f04 r--p 00000000 fe:00 2 /usr/lib/x86_64-linux-gnu/libibverbs/libmlx5-rdmav34.so
7f05-7f06 rw-p 00000000 00:00 0
7f07-7f08 rw-s 00000000 00:05 9 /dev/infiniband/uverbs0
";

    #[test]
    fn memory_map_names_providers() {
        let seen = providers(MAPS);
        assert_eq!(seen.len(), 2);
        let plugin = plugin(false);
        assert!(check_provider(Library::Stock, Some(&plugin), "librxe-", &seen, false).is_ok());
        assert!(check_provider(Library::Ours, Some(&plugin), "librxe-", &seen, false).is_err());
    }

    #[test]
    fn provider_loaded_as_a_library_counts() {
        let maps =
            "7f00-7f01 r-xp 00000000 fe:00 1 /usr/lib/x86_64-linux-gnu/libmlx5.so.1.25.56.1\n";
        let seen = providers(maps);
        assert!(check_provider(Library::Stock, None, "libmlx5.so", &seen, false).is_ok());
        assert!(check_provider(Library::Stock, None, "librxe-", &seen, false).is_err());
    }

    #[test]
    fn fallback_is_not_taken_for_the_plugin() {
        let plugin = plugin(false);
        let ours = "/opt/ringverbs/libringverbs-rdmav34.so".to_owned();
        let stock = "/usr/lib/libibverbs/librxe-rdmav34.so".to_owned();
        let judge = |library, seen: &[&String]| {
            let seen = seen.iter().map(|s| (*s).clone()).collect();
            check_provider(library, Some(&plugin), "librxe-", &seen, false).is_ok()
        };
        assert!(judge(Library::Ours, &[&ours]));
        assert!(!judge(Library::Ours, &[]));
        assert!(!judge(Library::Ours, &[&stock]));
        assert!(!judge(Library::Ours, &[&ours, &stock]));
        assert!(judge(Library::Stock, &[&stock]));
        assert!(!judge(Library::Stock, &[&ours]));
        assert!(judge(Library::PluginPeers, &[&ours]));
        assert!(!judge(Library::PluginPeers, &[]));
        assert!(!judge(Library::PluginPeers, &[&ours, &stock]));
        assert!(judge(Library::StockPeers, &[&stock]));
        assert!(!judge(Library::StockPeers, &[&ours]));
    }

    #[test]
    fn preloaded_plugin_must_log_that_it_serves() {
        let ours = "/opt/ringverbs/libringverbs-rdmav34.so".to_owned();
        let stock = "/usr/lib/libmlx5.so.1.25.56.1".to_owned();
        let judge = |preload, seen: &[&String], serves| {
            let seen = seen.iter().map(|s| (*s).clone()).collect();
            check_provider(
                Library::Ours,
                Some(&plugin(preload)),
                "libmlx5.so",
                &seen,
                serves,
            )
            .is_ok()
        };
        assert!(judge(true, &[&ours, &stock], true));
        assert!(judge(true, &[&ours], true));
        assert!(!judge(true, &[&ours, &stock], false));
        assert!(!judge(true, &[&ours], false));
        assert!(!judge(true, &[&stock], true));
        assert!(!judge(false, &[&ours, &stock], true));

        let out = std::env::temp_dir().join(format!("rv-says-{}", std::process::id()));
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "echo 'ringverbs INFO: serves device=mlx5_1' > $RINGVERBS_LOG_FILE",
        ]);
        let mut running = TestProcess::start(command, &out).unwrap();
        while running.poll().unwrap().is_none() {}
        assert!(running.has_logged_serving("mlx5_1"));
        assert!(!running.has_logged_serving("mlx5_"));
        for file in [log_path(&out), stderr_path(&out), out] {
            fs::remove_file(file).unwrap();
        }
    }

    #[test]
    fn providers_mapped_later_are_found() {
        // A process and its child execute programs that load a provider.
        let dir = std::env::temp_dir().join(format!("rv-later-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let libc = maps.lines().find(|line| line.contains("libc.so")).unwrap();
        let libc = &libc[libc.find('/').unwrap()..];
        for name in ["libone-rdmav34.so", "libtwo-rdmav34.so"] {
            fs::copy(libc, dir.join(name)).unwrap();
        }
        let mut command = Command::new("sh");
        command.current_dir(&dir).args([
            "-c",
            "sleep 0.2; (LD_PRELOAD=$PWD/libone-rdmav34.so sleep 0.3)
             LD_PRELOAD=$PWD/libtwo-rdmav34.so exec sleep 0.3",
        ]);
        let mut running = TestProcess::start(command, &dir.join("out")).unwrap();
        while running.poll().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let seen: Vec<_> = running
            .mapped_providers()
            .iter()
            .map(|path| file_name(path))
            .collect();
        assert_eq!(seen, ["libone-rdmav34.so", "libtwo-rdmav34.so"]);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn memory_map_polling_slows_down() {
        let scan_interval =
            |age, settled| super::scan_interval(Duration::from_millis(age), settled);
        assert_eq!(scan_interval(0, false), MIN_SCAN_INTERVAL);
        assert_eq!(scan_interval(80, false), Duration::from_millis(10));
        assert_eq!(scan_interval(9000, false), MAX_SCAN_INTERVAL);
        assert_eq!(scan_interval(0, true), SETTLED_SCAN_INTERVAL);
    }

    #[test]
    fn a_process_tree_includes_children() {
        let child = Command::new("sh")
            .args(["-c", "sleep 30 & wait"])
            .process_group(0)
            .spawn()
            .unwrap();
        let mut running = TestProcess {
            child,
            output: PathBuf::from("/dev/null"),
            status: None,
            mapped_providers: BTreeSet::new(),
            map_sizes: BTreeMap::new(),
            began: Instant::now(),
            next_scan: Instant::now(),
            last_new_mapping: Instant::now(),
        };
        let began = Instant::now();
        while process_tree(running.pid()).len() < 2 && began.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(process_tree(running.pid()).len(), 2);
        running.kill();
        assert!(running.poll().unwrap().is_some());
    }
}
