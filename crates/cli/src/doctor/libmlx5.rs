//! Finds out which libmlx5 is in use: rdma-core's, or ringverbs in its place.
//!
//! It is loaded by two names. The dynamic linker searches `libmlx5.so.1` for programs that
//! are linked to it; libibverbs loads `libmlx5-rdmavN.so` as the provider for a ConnectX.

use std::fs;
use std::path::{Path, PathBuf};

use super::provider::{Libibverbs, ProviderFile, library_directories};

const LIBMLX5: &str = "libmlx5.so.1";

/// The libraries that are loaded as libmlx5.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Libmlx5 {
    /// For programs that are linked to libmlx5.
    pub linked: Option<Library>,
    /// As libibverbs's provider.
    pub provider: Option<Library>,
}

/// A library's file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// The file, with symbolic links resolved.
    pub path: PathBuf,
    /// Whether the library is ringverbs.
    pub is_ours: bool,
}

impl Libmlx5 {
    /// Searches below `root`.
    pub fn find(
        root: &Path,
        environment: &dyn Fn(&str) -> Option<String>,
        libibverbs: Option<&Libibverbs>,
    ) -> Self {
        let library_path = environment("LD_LIBRARY_PATH");
        let directories = library_path.as_deref().unwrap_or_default().split(':');
        let directories = directories
            .filter(|path| !path.is_empty())
            .map(PathBuf::from);
        let cache = fs::read(root.join("etc/ld.so.cache")).unwrap_or_default();
        let cached = find_in_cache(&cache, LIBMLX5);
        let cached = cached.map(|path| root.join(path.strip_prefix('/').unwrap_or(path)));
        let default = library_directories(root, None);
        let mut paths = (directories.map(|directory| directory.join(LIBMLX5)))
            .chain(cached)
            .chain(default.iter().map(|directory| directory.join(LIBMLX5)));
        Self {
            linked: paths.find_map(|path| Library::read(&path)),
            provider: libibverbs.and_then(provider).and_then(Library::read),
        }
    }
}

impl Library {
    fn read(path: &Path) -> Option<Self> {
        // The plugin has this string, for instance in its messages.
        const NAME: &[u8] = b"ringverbs";
        let bytes = fs::read(path).ok()?;
        Some(Self {
            path: path.canonicalize().ok()?,
            is_ours: bytes.windows(NAME.len()).any(|part| part == NAME),
        })
    }
}

/// Returns the file that libibverbs loads first as its mlx5 provider: that of the first
/// matching name in the variable, or of the last one in the configuration.
fn provider(libibverbs: &Libibverbs) -> Option<&Path> {
    let candidates = libibverbs.providers.iter().filter_map(|provider| {
        let is_mlx5 = provider.name == "mlx5" || provider.name.ends_with("/libmlx5");
        match &provider.file {
            ProviderFile::Compatible(path) if is_mlx5 => Some((provider.from_environment, &**path)),
            _ => None,
        }
    });
    let mut candidates = candidates.peekable();
    match candidates.peek() {
        Some((true, path)) => Some(path),
        _ => candidates.last().map(|(_, path)| path),
    }
}

/// Looks up a library in the dynamic linker's cache: the first one for this architecture
/// without requirements on the processor (hwcaps).
fn find_in_cache<'a>(cache: &'a [u8], name: &str) -> Option<&'a str> {
    const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
    const HEADER: usize = 48;
    const ENTRY: usize = 24;
    /// `FLAG_ELF_LIBC6` with the flag of this 64-bit architecture.
    const FLAGS: u32 = match cfg!(target_arch = "aarch64") {
        true => 0x0a03,
        false => 0x0303,
    };
    // The table of the older format may precede this one.
    let start = cache.windows(MAGIC.len()).position(|part| part == MAGIC)?;
    let cache = &cache[start..];
    let word = |at: usize| {
        let bytes = cache.get(at..at.checked_add(4)?)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes))
    };
    let string = |at: usize| {
        let rest = cache.get(usize::try_from(word(at)?).ok()?..)?;
        let end = rest.iter().position(|byte| *byte == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    };
    let count = usize::try_from(word(MAGIC.len())?).ok()?;
    let entries = cache.get(HEADER..)?.len() / ENTRY;
    (0..count.min(entries)).find_map(|number| {
        let at = HEADER + number * ENTRY;
        let is_plain = word(at)? == FLAGS && word(at + 16)? == 0 && word(at + 20)? == 0;
        (is_plain && string(at + 4)? == name).then(|| string(at + 8))?
    })
}

#[cfg(test)]
mod tests {
    use super::super::provider::Provider;
    use super::*;

    /// Returns a cache with these names and paths, after a table of the older format.
    fn cache(entries: &[(u32, u64, &str, &str)]) -> Vec<u8> {
        let mut cache = b"glibc-ld.so.cache1.1".to_vec();
        cache.extend(u32::try_from(entries.len()).unwrap().to_le_bytes());
        cache.resize(48, 0);
        let mut strings = Vec::new();
        let first = 48 + 24 * entries.len();
        for (flags, hardware, name, path) in entries {
            let mut add = |text: &str| {
                let at = u32::try_from(first + strings.len()).unwrap();
                strings.extend(text.as_bytes());
                strings.push(0);
                at
            };
            for word in [*flags, add(name), add(path), 0] {
                cache.extend(word.to_le_bytes());
            }
            cache.extend(hardware.to_le_bytes());
        }
        cache.extend(strings);
        [b"ld.so-1.7.0\0....".to_vec(), cache].concat()
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn cache_lookup_finds_the_first_library_of_this_architecture() {
        let bytes = cache(&[
            (0x0303, 0, "libmlx5.so", "/a/libmlx5.so"),
            (0x0003, 0, LIBMLX5, "/32/libmlx5.so.1"),
            (0x0303, 1 << 62, LIBMLX5, "/v4/libmlx5.so.1"),
            (0x0303, 0, LIBMLX5, "/first/libmlx5.so.1"),
            (0x0303, 0, LIBMLX5, "/second/libmlx5.so.1"),
        ]);
        assert_eq!(find_in_cache(&bytes, LIBMLX5), Some("/first/libmlx5.so.1"));
        assert_eq!(find_in_cache(&bytes, "libother.so.1"), None);
        for end in 0..bytes.len() {
            // A truncated cache must not cause a panic.
            let _ = find_in_cache(&bytes[..end], LIBMLX5);
        }
        assert_eq!(find_in_cache(b"", LIBMLX5), None);
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn libraries_are_searched_in_the_linkers_order() {
        let root = std::env::temp_dir().join(format!("ringverbs-libmlx5-{}", std::process::id()));
        let write = |path: &str, bytes: &[u8]| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        };
        write("usr/lib64/libmlx5.so.1", b"\x7fELF mlx5dv_query_device");
        write("opt/libmlx5.so.1", b"\x7fELF RINGVERBS_LOG\0ringverbs INFO");
        write("set/libmlx5.so.1", b"\x7fELF another");
        let unset = |_: &str| None;
        let find = |environment: &dyn Fn(&str) -> Option<String>| {
            let library = Libmlx5::find(&root, environment, None).linked.unwrap();
            let path = library.path.strip_prefix(root.canonicalize().unwrap());
            (path.unwrap().display().to_string(), library.is_ours)
        };
        assert_eq!(find(&unset), ("usr/lib64/libmlx5.so.1".into(), false));
        write(
            "etc/ld.so.cache",
            &cache(&[(0x0303, 0, LIBMLX5, "/opt/libmlx5.so.1")]),
        );
        assert_eq!(find(&unset), ("opt/libmlx5.so.1".into(), true));
        let set = root.join("set").display().to_string();
        let set = |name: &str| (name == "LD_LIBRARY_PATH").then(|| set.clone());
        assert_eq!(find(&set), ("set/libmlx5.so.1".into(), false));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(Libmlx5::find(&root, &unset, None), Libmlx5::default());
    }

    #[test]
    fn provider_is_the_first_that_libibverbs_loads() {
        let named = |name: &str, from_environment, path: &str| Provider {
            name: name.into(),
            configured_in: String::new(),
            from_environment,
            file: ProviderFile::Compatible(path.into()),
        };
        let mut library = Libibverbs {
            path: PathBuf::new(),
            abi: Some(34),
            config: None,
            providers: vec![
                named("mlx5", false, "/stock"),
                named("/folder/libmlx5", false, "/ours"),
                named("rxe", false, "/rxe"),
            ],
        };
        assert_eq!(provider(&library), Some(Path::new("/ours")));
        library.providers.insert(0, named("mlx5", true, "/set"));
        assert_eq!(provider(&library), Some(Path::new("/set")));
        library.providers.clear();
        assert_eq!(provider(&library), None);
    }
}
