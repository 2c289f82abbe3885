//! Finds the providers that libibverbs would load.
//!
//! libibverbs reads names of providers from `RDMAV_DRIVERS` (else `IBV_DRIVERS`)
//! and from the `driver NAME` lines in its configuration directory, and appends
//! `-rdmav<ABI>.so`, where ABI is the version of the library's private interface.
//! An absolute path is used as it is; a name is searched in the provider
//! directory, then in the loader's directories.

use std::fs;
use std::path::{Path, PathBuf};

use super::files::names;

/// A libibverbs with its configured providers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Libibverbs {
    /// The library's file.
    pub path: PathBuf,
    /// Version of its private interface.
    pub abi: Option<u32>,
    /// The configuration directory, if it exists.
    pub config: Option<PathBuf>,
    /// The configured providers, in order.
    pub providers: Vec<Provider>,
}

/// A configured provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Provider {
    /// The name.
    pub name: String,
    /// The variable or file that names the provider.
    pub configured_in: String,
    /// Whether an environment variable names the provider.
    pub from_environment: bool,
    /// The provider's file.
    pub file: ProviderFile,
}

/// A provider's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProviderFile {
    /// The file has this library's version of the private interface.
    Compatible(PathBuf),
    /// There are only files for other versions of the private interface.
    OtherAbi(PathBuf),
    /// Not found.
    Missing(PathBuf),
}

impl Libibverbs {
    /// Searches the library below `root`, in the loader's directories.
    pub fn find(root: &Path, environment: &dyn Fn(&str) -> Option<String>) -> Option<Self> {
        let directories = library_directories(root, environment("LD_LIBRARY_PATH").as_deref());
        let path = directories
            .iter()
            .map(|directory| directory.join("libibverbs.so.1"))
            .find(|path| path.exists())?;
        let abi = fs::read(&path).ok().and_then(|bytes| private_abi(&bytes));
        let config = config_directory(root, &path);
        let mut named = Vec::new();
        for variable in ["RDMAV_DRIVERS", "IBV_DRIVERS"] {
            if let Some(list) = environment(variable) {
                let names = list.split([':', ';']).filter(|name| !name.is_empty());
                named.extend(names.map(|name| (name.to_owned(), variable.to_owned(), true)));
                break;
            }
        }
        if let Some(config) = &config {
            for file in names(config) {
                let file = config.join(file);
                let text = fs::read_to_string(&file).unwrap_or_default();
                let file = file.display().to_string();
                named.extend(drivers(&text).map(|name| (name.to_owned(), file.clone(), false)));
            }
        }
        let providers = named
            .into_iter()
            .map(|(name, configured_in, from_environment)| {
                let file = locate(root, &directories, &path, &name, abi.unwrap_or(0));
                Provider {
                    name,
                    configured_in,
                    from_environment,
                    file,
                }
            });
        Some(Self {
            providers: providers.collect(),
            path,
            abi,
            config,
        })
    }
}

/// Returns the directories that a loader searches: those of `library_path`, then the
/// default ones.
pub fn library_directories(root: &Path, library_path: Option<&str>) -> Vec<PathBuf> {
    let architecture = std::env::consts::ARCH;
    let first = library_path.unwrap_or_default().split(':');
    let first = first.filter(|path| !path.is_empty()).map(PathBuf::from);
    let default = [
        "usr/local/lib".to_owned(),
        format!("usr/lib/{architecture}-linux-gnu"),
        format!("lib/{architecture}-linux-gnu"),
        "usr/lib64".to_owned(),
        "lib64".to_owned(),
        "usr/lib".to_owned(),
        "lib".to_owned(),
    ];
    first
        .chain(default.iter().map(|path| root.join(path)))
        .collect()
}

/// Returns the configuration directory: below /usr/local for a library there, if it
/// exists, else in /etc.
fn config_directory(root: &Path, library: &Path) -> Option<PathBuf> {
    let local = library.starts_with(root.join("usr/local"));
    let local = local.then(|| root.join("usr/local/etc/libibverbs.d"));
    let system = root.join("etc/libibverbs.d");
    local.into_iter().chain([system]).find(|path| path.is_dir())
}

/// Returns the highest number after `IBVERBS_PRIVATE_` in a library: the symbol
/// version of the functions that providers call.
fn private_abi(library: &[u8]) -> Option<u32> {
    const PREFIX: &[u8] = b"IBVERBS_PRIVATE_";
    let starts = library.windows(PREFIX.len()).enumerate();
    let starts = starts.filter(|(_, window)| *window == PREFIX);
    let numbers = starts.filter_map(|(at, _)| {
        let rest = library.get(at + PREFIX.len()..)?;
        let digits: Vec<u8> = rest
            .iter()
            .copied()
            .take_while(u8::is_ascii_digit)
            .collect();
        std::str::from_utf8(&digits).ok()?.parse().ok()
    });
    numbers.max()
}

/// Returns the names in `driver NAME` lines.
fn drivers(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some("driver"), Some(name)) => Some(name),
            _ => None,
        }
    })
}

/// Finds the file of a provider.
fn locate(
    root: &Path,
    directories: &[PathBuf],
    library: &Path,
    name: &str,
    abi: u32,
) -> ProviderFile {
    let suffix = format!("-rdmav{abi}.so");
    let stems: Vec<PathBuf> = match name.strip_prefix('/') {
        Some(below) => vec![root.join(below)],
        None => {
            let file = format!("lib{name}");
            let beside = library
                .parent()
                .map(|directory| directory.join("libibverbs").join(&file));
            let others = directories.iter().map(|directory| directory.join(&file));
            beside.into_iter().chain(others).collect()
        }
    };
    let with_suffix = |stem: &PathBuf| {
        let mut path = stem.clone().into_os_string();
        path.push(&suffix);
        PathBuf::from(path)
    };
    if let Some(path) = stems.iter().map(with_suffix).find(|path| path.exists()) {
        return ProviderFile::Compatible(path);
    }
    if let Some(path) = stems.iter().find_map(|stem| other_abi(stem)) {
        return ProviderFile::OtherAbi(path);
    }
    ProviderFile::Missing(stems.first().map(with_suffix).unwrap_or_default())
}

/// Returns a file with that stem and any version.
fn other_abi(stem: &Path) -> Option<PathBuf> {
    let directory = stem.parent()?;
    let start = format!("{}-rdmav", stem.file_name()?.to_str()?);
    let files = names(directory);
    let file = files
        .iter()
        .find(|file| file.starts_with(&start) && file.ends_with(".so"))?;
    Some(directory.join(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_abi_is_the_highest_version() {
        let library = b"\0IBVERBS_1.1\0IBVERBS_PRIVATE_34\0x\0IBVERBS_PRIVATE_\0IBVERBS_PRIVATE_9";
        assert_eq!(private_abi(library), Some(34));
        assert_eq!(private_abi(b"nothing"), None);
        assert_eq!(private_abi(b"IBVERBS_PRIVATE_99999999999999"), None);
    }

    #[test]
    fn driver_lines_are_parsed_as_in_libibverbs() {
        let text = "# driver no\n  driver rxe\n\ndriver\tmlx5 more\nother x\ndriver\n";
        assert_eq!(drivers(text).collect::<Vec<_>>(), ["rxe", "mlx5"]);
    }

    #[test]
    fn providers_of_other_versions_are_reported() {
        let root = std::env::temp_dir().join(format!("ringverbs-provider-{}", std::process::id()));
        let libraries = root.join("usr/lib64");
        let write = |path: PathBuf, bytes: &[u8]| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        write(libraries.join("libibverbs.so.1"), b"\0IBVERBS_PRIVATE_57\0");
        write(libraries.join("libibverbs/librxe-rdmav57.so"), b"");
        write(libraries.join("libibverbs/libmlx5-rdmav34.so"), b"");
        write(
            root.join("etc/libibverbs.d/a.driver"),
            b"driver rxe\ndriver mlx5\n",
        );
        write(root.join("etc/libibverbs.d/b.driver"), b"driver missing\n");
        write(root.join("opt/libmine-rdmav34.so"), b"");
        let environment =
            |name: &str| (name == "RDMAV_DRIVERS").then(|| "/opt/libmine;rxe".to_owned());
        let found = Libibverbs::find(&root, &environment);
        fs::remove_dir_all(&root).unwrap();

        let found = found.unwrap();
        assert_eq!(found.abi, Some(57));
        let states: Vec<_> = found
            .providers
            .iter()
            .map(|provider| {
                let state = match &provider.file {
                    ProviderFile::Compatible(_) => "compatible",
                    ProviderFile::OtherAbi(_) => "other",
                    ProviderFile::Missing(_) => "missing",
                };
                (provider.name.as_str(), provider.from_environment, state)
            })
            .collect();
        assert_eq!(
            states,
            [
                ("/opt/libmine", true, "other"),
                ("rxe", true, "compatible"),
                ("rxe", false, "compatible"),
                ("mlx5", false, "other"),
                ("missing", false, "missing"),
            ]
        );
    }
}
