use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use super::super::configure;
use super::*;

/// A fake of dpkg and ldconfig for a tree.
struct FakeTools {
    owner: Option<&'static str>,
    diversions: RefCell<Vec<Diversion>>,
    /// Changes until the process is killed.
    changes_left: Cell<usize>,
    /// A link that must lead to a library at all times.
    library: PathBuf,
    ldconfig_runs: Cell<usize>,
}

impl Tools for &FakeTools {
    fn owner(&self, _: &Path) -> Result<Option<String>> {
        Ok(self.owner.map(str::to_owned))
    }

    fn diversions(&self) -> Result<Vec<Diversion>> {
        let diversions = self.diversions.borrow();
        let copies = diversions.iter().map(|it| Diversion {
            path: it.path.clone(),
            to: it.to.clone(),
            package: it.package.clone(),
        });
        Ok(copies.collect())
    }

    fn divert(&self, action: &str, path: &Path, to: &Path) -> Result<()> {
        let mut diversions = self.diversions.borrow_mut();
        let at = diversions.iter().position(|it| it.path == path);
        match (action, at) {
            ("--add", None) => diversions.push(Diversion {
                path: path.into(),
                to: to.into(),
                package: None,
            }),
            ("--remove", Some(at)) => drop(diversions.remove(at)),
            _ => bail!("{action} {}", path.display()),
        }
        Ok(())
    }

    fn ldconfig(&self) -> Result<()> {
        self.ldconfig_runs.set(self.ldconfig_runs.get() + 1);
        Ok(())
    }

    fn before_change(&self) -> Result<()> {
        assert!(self.library.exists(), "no libmlx5.so.1 for a moment");
        let Some(changes_left) = self.changes_left.get().checked_sub(1) else {
            bail!("killed");
        };
        self.changes_left.set(changes_left);
        Ok(())
    }
}

struct Tree {
    root: PathBuf,
    fake: FakeTools,
}

const STOCK: &str = "libmlx5.so.1.24.44.0";

impl Tree {
    /// Creates a system with rdma-core 44, with or without dpkg.
    fn new(name: &str, has_dpkg: bool) -> Tree {
        let name = format!("ringverbs-replace-{name}-{}", std::process::id());
        let root = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&root);
        let libraries = root.join("usr/lib64");
        fs::create_dir_all(libraries.join("libibverbs")).unwrap();
        fs::create_dir_all(root.join("etc/libibverbs.d")).unwrap();
        fs::write(root.join("ours.so"), "ours").unwrap();
        fs::write(libraries.join(STOCK), "rdma-core's").unwrap();
        symlink(STOCK, libraries.join(LIBMLX5)).unwrap();
        let provider = libraries.join("libibverbs/libmlx5-rdmav34.so");
        symlink(Path::new("..").join(STOCK), provider).unwrap();
        fs::write(root.join("etc/ld.so.conf"), "include ld.so.conf.d/*.conf\n").unwrap();
        fs::write(root.join("etc/libibverbs.d/mlx5.driver"), "driver mlx5").unwrap();
        Tree {
            fake: FakeTools {
                owner: has_dpkg.then_some("ibverbs-providers:amd64"),
                diversions: RefCell::default(),
                changes_left: Cell::new(usize::MAX),
                library: libraries.join(LIBMLX5),
                ldconfig_runs: Cell::new(0),
            },
            root,
        }
    }

    fn replacement(&self) -> Replacement<&FakeTools> {
        let paths = InstallPaths::for_prefix(&self.root.join("usr")).unwrap();
        Replacement::new(self.root.clone(), &paths, &self.fake)
    }

    fn install(&self) -> Result<String> {
        self.replacement().install(&self.root.join("ours.so"))
    }

    fn libraries(&self) -> PathBuf {
        self.root.join("usr/lib64")
    }

    /// Returns all files with contents, links with targets, folders, and diversions.
    fn snapshot(&self) -> BTreeMap<PathBuf, String> {
        fn add(found: &mut BTreeMap<PathBuf, String>, folder: &Path) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if let Ok(target) = fs::read_link(&path) {
                    found.insert(path, format!("-> {}", target.display()));
                } else if path.is_dir() {
                    add(found, &path);
                    found.insert(path, "folder".into());
                } else {
                    let text = fs::read_to_string(&path).unwrap();
                    found.insert(path, text);
                }
            }
        }
        let mut found = BTreeMap::new();
        add(&mut found, &self.root);
        for it in self.fake.diversions.borrow().iter() {
            found.insert(
                Path::new("diversion").join(it.path.strip_prefix("/").unwrap()),
                it.to.display().to_string(),
            );
        }
        found
    }

    /// Kills a run after each of its changes, and calls `then` on the result.
    fn kill_at_each_change(name: &str, has_dpkg: bool, is_install: bool, then: impl Fn(&Tree)) {
        let mut changes = 0;
        loop {
            let tree = Tree::new(name, has_dpkg);
            if !is_install {
                tree.install().unwrap();
            }
            tree.fake.changes_left.set(changes);
            let result = match is_install {
                true => tree.install().map(drop),
                false => tree.replacement().remove().map(drop),
            };
            tree.fake.changes_left.set(usize::MAX);
            if result.is_ok() {
                break;
            }
            then(&tree);
            changes += 1;
        }
        assert!(changes > 8, "{changes}");
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

#[test]
fn both_links_lead_to_ours_and_are_restored() {
    let tree = Tree::new("links", true);
    let before = tree.snapshot();
    let mut after = None;
    for times in 1..=2 {
        tree.install().unwrap();
        let all = tree.snapshot();
        assert_eq!(after.get_or_insert_with(|| all.clone()), &all);
        assert_eq!(tree.fake.ldconfig_runs.get(), times);
        assert_eq!(tree.fake.diversions.borrow().len(), 1 + providers().count());
    }
    let libraries = tree.libraries();
    let leads_to = |name: &str| fs::read_to_string(libraries.join(name)).unwrap();
    assert_eq!(leads_to(LIBMLX5), "ours");
    for name in providers() {
        assert_eq!(leads_to(&format!("libibverbs/{name}")), "ours");
    }
    assert_eq!(leads_to(STOCK), "rdma-core's");
    assert!(tree.replacement().remove().unwrap());
    assert_eq!(tree.snapshot(), before);
    assert_eq!(tree.fake.ldconfig_runs.get(), 3);
    assert!(!tree.replacement().remove().unwrap());
    assert_eq!(
        (tree.snapshot(), tree.fake.ldconfig_runs.get()),
        (before, 3)
    );
}

#[test]
fn our_folder_is_searched_first_without_dpkg() {
    let tree = Tree::new("folder", false);
    let before = tree.snapshot();
    let mut after = None;
    for _ in 0..2 {
        tree.install().unwrap();
        let all = tree.snapshot();
        assert_eq!(after.get_or_insert_with(|| all.clone()), &all);
    }
    let folder = tree.libraries().join(FOLDER);
    for name in providers().chain([LIBMLX5.to_owned()]) {
        assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), "ours");
    }
    let etc = |name: &str| fs::read_to_string(tree.root.join("etc").join(name)).unwrap();
    assert_eq!(
        etc("ld.so.conf.d/00-ringverbs-libmlx5.conf"),
        "/usr/lib64/ringverbs\n"
    );
    let driver = "driver mlx5\ndriver /usr/lib64/ringverbs/libmlx5\n";
    assert_eq!(etc("libibverbs.d/mlx5.driver"), driver);
    // The package's files are unchanged.
    let library = fs::read_link(tree.libraries().join(LIBMLX5)).unwrap();
    assert_eq!(library, Path::new(STOCK));
    assert!(tree.replacement().remove().unwrap());
    fs::remove_dir(tree.root.join("etc/ld.so.conf.d")).unwrap();
    assert_eq!(tree.snapshot(), before);
    assert!(!tree.replacement().remove().unwrap());

    // A configuration file that an upgrade has rewritten stays.
    tree.install().unwrap();
    let driver = tree.root.join("etc/libibverbs.d/mlx5.driver");
    fs::write(&driver, "driver mlx5 # new\n").unwrap();
    tree.replacement().remove().unwrap();
    assert_eq!(fs::read_to_string(&driver).unwrap(), "driver mlx5 # new\n");
    // Without one, the file is removed.
    fs::remove_file(&driver).unwrap();
    tree.install().unwrap();
    tree.replacement().remove().unwrap();
    assert!(!driver.exists());
}

#[test]
fn a_killed_run_is_completed_or_undone() {
    for has_dpkg in [true, false] {
        let complete = {
            let tree = Tree::new("killed", has_dpkg);
            tree.install().unwrap();
            tree.snapshot()
        };
        let restored = |tree: &Tree| {
            tree.replacement().remove().unwrap();
            let _ = fs::remove_dir(tree.root.join("etc/ld.so.conf.d"));
            let all = tree.snapshot();
            let fresh = Tree::new("killed", has_dpkg);
            assert_eq!(all, fresh.snapshot());
        };
        Tree::kill_at_each_change("killed", has_dpkg, true, |tree| {
            tree.install().unwrap();
            assert_eq!(tree.snapshot(), complete);
        });
        Tree::kill_at_each_change("killed", has_dpkg, true, restored);
        Tree::kill_at_each_change("killed", has_dpkg, false, restored);
        Tree::kill_at_each_change("killed", has_dpkg, false, |tree| {
            tree.install().unwrap();
            assert_eq!(tree.snapshot(), complete);
        });
        // A run that has made its last change has run ldconfig.
        Tree::kill_at_each_change("killed", has_dpkg, false, |tree| {
            let ldconfig_runs = tree.fake.ldconfig_runs.get();
            let found = tree.replacement().remove().unwrap();
            assert!(!found || tree.fake.ldconfig_runs.get() > ldconfig_runs);
            assert!(tree.fake.ldconfig_runs.get() >= 2);
        });
    }
}

#[test]
fn upgrades_write_the_diverted_links() {
    const NEW: &str = "libmlx5.so.1.25.57.0";
    let tree = Tree::new("upgrade", true);
    let libraries = tree.libraries();
    tree.install().unwrap();
    // An upgrade from 44 to 57, which has another private ABI.
    let diversions = tree.fake.diversions.borrow();
    let to = |path: &Path| {
        let path_in_root = Path::new("/").join(path.strip_prefix(&tree.root).unwrap());
        let diversion = diversions
            .iter()
            .find(|it| it.path == path_in_root)
            .unwrap();
        tree.root.join(diversion.to.strip_prefix("/").unwrap())
    };
    let provider = |abi: u32| libraries.join(format!("libibverbs/libmlx5-rdmav{abi}.so"));
    let library = to(&libraries.join(LIBMLX5));
    fs::write(libraries.join(NEW), "newer").unwrap();
    fs::remove_file(&library).unwrap();
    symlink(NEW, &library).unwrap();
    symlink(Path::new("..").join(NEW), to(&provider(57))).unwrap();
    fs::remove_file(to(&provider(34))).unwrap();
    fs::remove_file(libraries.join(STOCK)).unwrap();
    drop(diversions);
    let read = |path: &Path| fs::read_to_string(path).unwrap();
    let names = [libraries.join(LIBMLX5), provider(57)];
    assert!(names.iter().all(|name| read(name) == "ours"));
    // Another installation keeps what the upgrade has written.
    tree.install().unwrap();
    tree.replacement().remove().unwrap();
    assert!(names.iter().all(|name| read(name) == "newer"));
    assert!(provider(34).symlink_metadata().is_err());
    assert!(!tree.replacement().folder().exists());
}

#[test]
fn an_upgrade_after_a_killed_run_is_restored() {
    Tree::kill_at_each_change("kept", true, true, |tree| {
        let (path, aside, _) = tree.replacement().links().remove(0);
        if aside.symlink_metadata().is_err() {
            return;
        }
        // The path is diverted: the upgrade writes to `aside`.
        fs::remove_file(&aside).unwrap();
        fs::write(tree.libraries().join("newer"), "newer").unwrap();
        symlink("newer", &aside).unwrap();
        tree.install().unwrap();
        tree.replacement().remove().unwrap();
        assert_eq!(fs::read_link(path).unwrap(), Path::new("newer"));
    });
}

#[test]
fn foreign_diversions_are_unchanged() {
    let tree = Tree::new("others", true);
    let path = PathBuf::from("/usr/lib64/libibverbs/libmlx5-rdmav34.so");
    for (package, advice) in [
        (Some("vendor"), "by the package vendor"),
        (None, "dpkg-divert --local --rename --remove /usr/lib64/lib"),
    ] {
        *tree.fake.diversions.borrow_mut() = vec![Diversion {
            path: path.clone(),
            to: "/usr/lib64/elsewhere".into(),
            package: package.map(str::to_owned),
        }];
        let before = tree.snapshot();
        let error = format!("{:#}", tree.install().unwrap_err());
        assert!(error.contains(advice), "{error}");
        assert!(!tree.replacement().remove().unwrap());
        assert_eq!(tree.snapshot(), before);
    }
}

#[test]
fn errors_contain_advice() {
    let tree = Tree::new("errors", false);
    fs::write(
        tree.root.join("etc/ld.so.conf"),
        "# include ld.so.conf.d/*.conf\n",
    )
    .unwrap();
    let before = tree.snapshot();
    let error = format!("{:#}", tree.install().unwrap_err());
    assert!(error.contains("add that line first"), "{error}");
    fs::remove_file(tree.libraries().join(STOCK)).unwrap();
    let error = format!("{:#}", tree.install().unwrap_err());
    assert!(error.contains("ibverbs-providers"), "{error}");
    assert_eq!(tree.snapshot().len() + 1, before.len());
    let advice = |kind: io::ErrorKind| io_error("make", "/x".as_ref(), kind.into()).to_string();
    assert!(advice(io::ErrorKind::PermissionDenied).ends_with("; run this as root"));
    assert!(advice(io::ErrorKind::ReadOnlyFilesystem).contains("remount it writable"));
}

#[test]
fn output_of_dpkg_is_parsed() {
    let of = |path: &str, to: &str, package: Option<&str>| Diversion {
        path: path.into(),
        to: to.into(),
        package: package.map(str::to_owned),
    };
    let lines = "local diversion of /a to /b\ndiversion of /c to /d by e\nother\n";
    let found: Vec<_> = lines.lines().filter_map(diversion).collect();
    assert_eq!(found, [of("/a", "/b", None), of("/c", "/d", Some("e"))]);
    let answer = "local diversion from: /a\nlocal diversion to: /b\ndiversion by x from: /a\n\
                  ibverbs-providers:amd64: /a\n";
    assert_eq!(owner(answer), Some("ibverbs-providers:amd64"));
    assert_eq!(
        owner("local diversion from: /a\nlocal diversion to: /b\n"),
        None
    );
    assert_eq!(owner(""), None);
}

#[test]
fn the_linkers_configuration_includes_its_folder() {
    assert!(includes_folder("include ld.so.conf.d/*.conf\n"));
    assert!(includes_folder("/opt\ninclude /etc/ld.so.conf.d/*.conf"));
    assert!(!includes_folder("#include ld.so.conf.d/*.conf\n/opt\n"));
}

#[test]
fn providers_are_named_by_abi() {
    let names: Vec<_> = providers().collect();
    assert_eq!(names[0], "libmlx5-rdmav34.so");
    assert_eq!(names.last().unwrap(), "libmlx5-rdmav65.so");
}

#[test]
fn the_plugin_s_configuration_leaves_connectx_to_libmlx5() {
    let tree = Tree::new("plugin", false);
    let paths = InstallPaths::for_prefix(&tree.root.join("usr")).unwrap();
    let etc = |name: &str| fs::read_to_string(tree.root.join("etc/libibverbs.d").join(name)).ok();
    configure(&paths).unwrap();
    let before = tree.snapshot();
    assert_eq!(etc("mlx5.driver"), None);
    for _ in 0..2 {
        tree.install().unwrap();
        configure(&paths).unwrap();
        let driver = "driver mlx5\ndriver /usr/lib64/ringverbs/libmlx5\n";
        assert_eq!(etc("mlx5.driver").as_deref(), Some(driver));
        assert!(!etc(CONFIG).unwrap().contains("mlx5"));
    }
    assert!(tree.replacement().remove().unwrap());
    configure(&paths).unwrap();
    fs::remove_dir(tree.root.join("etc/ld.so.conf.d")).unwrap();
    assert_eq!(tree.snapshot(), before);

    // Where dpkg diverts, both leave each other's files alone.
    let tree = Tree::new("diverted", true);
    let paths = InstallPaths::for_prefix(&tree.root.join("usr")).unwrap();
    configure(&paths).unwrap();
    let before = tree.snapshot();
    tree.install().unwrap();
    assert!(tree.replacement().remove().unwrap());
    assert_eq!(tree.snapshot(), before);
}
