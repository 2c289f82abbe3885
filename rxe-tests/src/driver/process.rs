//! Running the programs under test, and seeing which provider served them.

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

/// Where libibverbs lists the providers that it loads.
const CONFIG: &str = "/etc/libibverbs.d";

/// libibverbs loads its providers one after another; when no new one has
/// appeared for so long, all are there.
const SETTLED: Duration = Duration::from_millis(400);

/// The shortest pause between two looks until then, for programs that end at
/// once, and the longest: looking costs an emulated processor 10 ms.
const OFTEN: Duration = Duration::from_millis(2);
const LESS_OFTEN: Duration = Duration::from_millis(20);
/// The pause afterwards.
const SELDOM: Duration = Duration::from_millis(200);

/// The pause before the next look at a process that runs for `age`.
fn pause(age: Duration, settled: bool) -> Duration {
    if settled {
        SELDOM
    } else {
        (age / 8).clamp(OFTEN, LESS_OFTEN)
    }
}

/// The library that a process is to be served by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// rdma-core's librxe.
    Stock,
    /// ringverbs.
    Ours,
    /// No library at all: a program of the Rust crate.
    None,
    /// None, but its peers are C programs that are served by librxe.
    Peers,
    /// None, but its peers are C programs that are served by ringverbs's plugin.
    PeersOfOurs,
}

impl Library {
    /// Whether the plugin serves C programs in it.
    fn is_ours(self) -> bool {
        matches!(self, Library::Ours | Library::PeersOfOurs)
    }
}

/// Where the plugin is, and how programs come by it.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// The path that libibverbs appends `-rdmav<ABI>.so` to.
    pub path: PathBuf,
    /// The configured providers are left in sight: hiding them needs root.
    pub beside_others: bool,
    /// It is preloaded as well, for mlx5: some programs are linked to the C
    /// provider, which is then mapped in them whoever serves.
    pub preload: bool,
    /// Instead of that, this `libmlx5.so.1` is in the place of rdma-core's.
    pub in_place: Option<PathBuf>,
}

impl Plugin {
    /// What the plugin's file name starts with in a memory map.
    pub fn stem(&self) -> String {
        self.path
            .file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().into_owned())
    }
}

/// A command whose device is served by `library`.
///
/// libibverbs loads the providers of its configuration besides the one that
/// the environment names. For ours they are hidden, in a mount namespace of
/// the process: then nothing but ours can serve the device.
pub fn command(library: Library, plugin: Option<&Plugin>, argv: &[String]) -> Result<Command> {
    let (program, arguments) = argv.split_first().context("an empty command")?;
    let mut command = match library {
        Library::Stock | Library::None | Library::Peers => Command::new(program),
        Library::Ours | Library::PeersOfOurs => {
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
            let mut command = match plugin.beside_others {
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
                // Any of its names will do.
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

/// Puts a path in front of those that a variable of the command names.
pub(super) fn put_in_front(command: &mut Command, name: &str, path: &Path) {
    let before = command.get_envs().find(|(key, _)| *key == name);
    let mut list = path.as_os_str().to_owned();
    if let Some((_, Some(before))) = before {
        list.push(":");
        list.push(before);
    }
    command.env(name, list);
}

/// Hides libibverbs's configured providers from this process and becomes
/// `argv`. Returns only if that fails.
pub fn become_alone(argv: &[String]) -> Result<()> {
    private_mounts()?;
    let none: Option<&str> = None;
    mount(Some("none"), CONFIG, Some("tmpfs"), MsFlags::empty(), none)
        .with_context(|| format!("cannot hide {CONFIG}"))?;
    become_program(argv)
}

/// Puts a `libmlx5.so.1` in the place of rdma-core's for this process and becomes `argv`.
/// Returns only if that fails.
pub fn become_replaced(library: &Path, argv: &[String]) -> Result<()> {
    let place = rdma_core_libmlx5()?;
    private_mounts()?;
    let none: Option<&str> = None;
    mount(Some(library), &place, none, MsFlags::MS_BIND, none)
        .with_context(|| format!("cannot replace {}", place.display()))?;
    become_program(argv)
}

/// The file that both names of rdma-core's libmlx5 lead to: the one that programs are
/// linked to, and the one that libibverbs loads.
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

fn become_program(argv: &[String]) -> Result<()> {
    let (program, arguments) = argv.split_first().context("an empty command")?;
    let error = Command::new(program).args(arguments).exec();
    bail!("cannot run {program}: {error}")
}

/// A program under test. Its process group is killed when this is dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    output: PathBuf,
    status: Option<ExitStatus>,
    /// Provider libraries seen in the memory maps of it and its children.
    seen: BTreeSet<String>,
    /// How large the memory maps were that were read last, in pages.
    sizes: BTreeMap<u32, u64>,
    began: Instant,
    next_look: Instant,
    last_new: Instant,
}

impl Running {
    /// Starts `command` with its standard output in `output`, and its standard
    /// error beside that.
    pub fn start(mut command: Command, output: &Path) -> Result<Running> {
        let _ = fs::remove_file(said(output));
        let child = command
            .env("RINGVERBS_LOG_FILE", said(output))
            .stdin(Stdio::null())
            .stdout(File::create(output)?)
            .stderr(File::create(errors(output))?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        Ok(Running {
            child,
            output: output.to_owned(),
            status: None,
            seen: BTreeSet::new(),
            sizes: BTreeMap::new(),
            began: Instant::now(),
            next_look: Instant::now(),
            last_new: Instant::now(),
        })
    }

    /// Looks at the process: its maps, and whether it has ended.
    pub fn poll(&mut self) -> Result<Option<ExitStatus>> {
        if self.status.is_none() {
            if Instant::now() >= self.next_look {
                let pid = self.child.id();
                for process in family(pid) {
                    // A map that is as large as it was has nothing new in it,
                    // and is long.
                    let size = fs::read_to_string(format!("/proc/{process}/statm"));
                    let size = first_number(&size.unwrap_or_default());
                    if self.sizes.insert(process, size) == Some(size) {
                        continue;
                    }
                    let maps = fs::read_to_string(format!("/proc/{process}/maps"));
                    for path in providers(&maps.unwrap_or_default()) {
                        if self.seen.insert(path) {
                            self.last_new = Instant::now();
                        }
                    }
                }
                // Often at first, since the process may be short, and seldom once
                // no more providers appear, since looking costs.
                let settled = !self.seen.is_empty() && self.last_new.elapsed() > SETTLED;
                self.next_look = Instant::now() + pause(self.began.elapsed(), settled);
            }
            self.status = self.child.try_wait()?;
        }
        Ok(self.status)
    }

    /// The provider libraries that were mapped, by path.
    pub fn seen(&self) -> &BTreeSet<String> {
        &self.seen
    }

    /// Whether the plugin has said that it serves the device, in this process or
    /// in a child of it. It is asked where it is preloaded.
    pub fn says_it_serves(&self, device: &str) -> bool {
        let text = fs::read_to_string(said(&self.output)).unwrap_or_default();
        let line = format!("serves device={device}");
        text.lines().any(|said| said.ends_with(&line))
    }

    /// What it has printed on its standard output.
    pub fn stdout(&self) -> String {
        let bytes = fs::read(&self.output).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// What it has printed on its standard output, and then on its standard
    /// error.
    pub fn output(&self) -> String {
        let bytes = fs::read(errors(&self.output)).unwrap_or_default();
        self.stdout() + &String::from_utf8_lossy(&bytes)
    }

    /// The process, and so the process group.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended by itself; `None` while it runs and when it was given
    /// up.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.status
    }

    /// Kills it if it still runs. It then has no exit status.
    pub fn kill_unfinished(&mut self) {
        let ended = self.status;
        self.kill();
        self.status = ended;
    }

    /// Kills the whole process group.
    pub fn kill(&mut self) {
        // While the leader is not reaped its group's number is not reused;
        // afterwards only its own descendants can still bear it.
        let _ = killpg(Pid::from_raw(self.child.id() as i32), Signal::SIGKILL);
        if self.status.is_none() {
            self.status = self.child.wait().ok();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Where the standard error goes, beside the standard output.
fn errors(output: &Path) -> PathBuf {
    output.with_extension("errors")
}

/// Where the plugin's own log goes.
fn said(output: &Path) -> PathBuf {
    output.with_extension("ringverbs")
}

/// Whether what was mapped proves that `library` served the device; else why
/// not. The file of rdma-core's provider begins with `stock`. Where the plugin
/// is preloaded that may be mapped as well, and the plugin has to have said that
/// it serves: libibverbs gives a device to one provider only.
pub fn verdict(
    library: Library,
    plugin: Option<&Plugin>,
    stock: &str,
    seen: &BTreeSet<String>,
    serves: bool,
) -> Result<(), String> {
    let preload = plugin.is_some_and(|plugin| plugin.preload);
    let stem = plugin.map(Plugin::stem).unwrap_or_default();
    let is_ours = |path: &&String| !stem.is_empty() && file_name(path).starts_with(&stem);
    let is_stock = |path: &&String| file_name(path).starts_with(stock);
    let ours = seen.iter().any(|path| is_ours(&path));
    let stock = seen.iter().any(|path| is_stock(&path));
    match (library, ours, stock) {
        (Library::Stock, false, true) => Ok(()),
        (Library::Ours | Library::PeersOfOurs, false, _) => Err("ringverbs was not mapped".into()),
        (Library::Ours | Library::PeersOfOurs, true, _) if preload && !serves => {
            Err("ringverbs was mapped, and has not said that it serves the device".into())
        }
        (Library::Ours | Library::PeersOfOurs, true, true) if !preload => {
            Err("stock's provider was mapped beside ringverbs".into())
        }
        (Library::Ours | Library::PeersOfOurs, true, _) => Ok(()),
        (Library::Stock, true, _) => Err("ringverbs was mapped in a run with stock".into()),
        (Library::Stock, false, false) => Err("rdma-core's provider was not mapped".into()),
        (Library::None, false, false) | (Library::Peers, false, _) => Ok(()),
        (Library::None | Library::Peers, true, _) => {
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

/// The paths of provider libraries in a memory map.
fn providers(maps: &str) -> BTreeSet<String> {
    maps.lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .filter(|path| {
            let name = file_name(path);
            // Some of rdma-core's are libraries besides, under their own names.
            name.contains("-rdmav") || name.starts_with("libmlx5.so")
        })
        .map(str::to_owned)
        .collect()
}

/// The first number of a line of the kernel's; 0 of one without.
fn first_number(text: &str) -> u64 {
    let word = text.split_whitespace().next().unwrap_or_default();
    word.parse().unwrap_or(0)
}

/// A process and all that descend from it.
fn family(pid: u32) -> Vec<u32> {
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
            beside_others: false,
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
    fn the_map_names_the_providers() {
        let seen = providers(MAPS);
        assert_eq!(seen.len(), 2);
        let plugin = plugin(false);
        assert!(verdict(Library::Stock, Some(&plugin), "librxe-", &seen, false).is_ok());
        assert!(verdict(Library::Ours, Some(&plugin), "librxe-", &seen, false).is_err());
    }

    #[test]
    fn provider_loaded_as_a_library_counts() {
        let maps =
            "7f00-7f01 r-xp 00000000 fe:00 1 /usr/lib/x86_64-linux-gnu/libmlx5.so.1.25.56.1\n";
        let seen = providers(maps);
        assert!(verdict(Library::Stock, None, "libmlx5.so", &seen, false).is_ok());
        assert!(verdict(Library::Stock, None, "librxe-", &seen, false).is_err());
    }

    #[test]
    fn fallback_is_not_taken_for_the_plugin() {
        let plugin = plugin(false);
        let ours = "/opt/ringverbs/libringverbs-rdmav34.so".to_owned();
        let stock = "/usr/lib/libibverbs/librxe-rdmav34.so".to_owned();
        let judge = |library, seen: &[&String]| {
            let seen = seen.iter().map(|s| (*s).clone()).collect();
            verdict(library, Some(&plugin), "librxe-", &seen, false).is_ok()
        };
        assert!(judge(Library::Ours, &[&ours]));
        assert!(!judge(Library::Ours, &[]));
        assert!(!judge(Library::Ours, &[&stock]));
        assert!(!judge(Library::Ours, &[&ours, &stock]));
        assert!(judge(Library::Stock, &[&stock]));
        assert!(!judge(Library::Stock, &[&ours]));
        assert!(judge(Library::PeersOfOurs, &[&ours]));
        assert!(!judge(Library::PeersOfOurs, &[]));
        assert!(!judge(Library::PeersOfOurs, &[&ours, &stock]));
        assert!(judge(Library::Peers, &[&stock]));
        assert!(!judge(Library::Peers, &[&ours]));
    }

    #[test]
    fn preloaded_plugin_must_log_that_it_serves() {
        let ours = "/opt/ringverbs/libringverbs-rdmav34.so".to_owned();
        let stock = "/usr/lib/libmlx5.so.1.25.56.1".to_owned();
        let judge = |preload, seen: &[&String], serves| {
            let seen = seen.iter().map(|s| (*s).clone()).collect();
            verdict(
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
        let mut running = Running::start(command, &out).unwrap();
        while running.poll().unwrap().is_none() {}
        assert!(running.says_it_serves("mlx5_1"));
        assert!(!running.says_it_serves("mlx5_"));
        for file in [said(&out), errors(&out), out] {
            fs::remove_file(file).unwrap();
        }
    }

    #[test]
    fn later_mappings_are_seen() {
        // A process, and a child of it, that become programs with a provider.
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
        let mut running = Running::start(command, &dir.join("out")).unwrap();
        while running.poll().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let seen: Vec<_> = running.seen().iter().map(|path| file_name(path)).collect();
        assert_eq!(seen, ["libone-rdmav34.so", "libtwo-rdmav34.so"]);
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn memory_map_polling_slows_down() {
        let pause = |age, settled| super::pause(Duration::from_millis(age), settled);
        assert_eq!(pause(0, false), OFTEN);
        assert_eq!(pause(80, false), Duration::from_millis(10));
        assert_eq!(pause(9000, false), LESS_OFTEN);
        assert_eq!(pause(0, true), SELDOM);
    }

    #[test]
    fn a_family_includes_children() {
        let child = Command::new("sh")
            .args(["-c", "sleep 30 & wait"])
            .process_group(0)
            .spawn()
            .unwrap();
        let mut running = Running {
            child,
            output: PathBuf::from("/dev/null"),
            status: None,
            seen: BTreeSet::new(),
            sizes: BTreeMap::new(),
            began: Instant::now(),
            next_look: Instant::now(),
            last_new: Instant::now(),
        };
        let began = Instant::now();
        while family(running.pid()).len() < 2 && began.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(family(running.pid()).len(), 2);
        running.kill();
        assert!(running.poll().unwrap().is_some());
    }
}
