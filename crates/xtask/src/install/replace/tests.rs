use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use super::super::configure;
use super::*;

/// dpkg and ldconfig of a tree, as far as they matter here.
struct Fake {
    owner: Option<&'static str>,
    diversions: RefCell<Vec<Diversion>>,
    /// Changes until the process is killed.
    left: Cell<usize>,
    /// A name that has to lead to a library at all times.
    library: PathBuf,
    cached: Cell<usize>,
}

impl Tools for &Fake {
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
        self.cached.set(self.cached.get() + 1);
        Ok(())
    }

    fn before_change(&self) -> Result<()> {
        assert!(self.library.exists(), "no libmlx5.so.1 for a moment");
        let Some(left) = self.left.get().checked_sub(1) else {
            bail!("killed");
        };
        self.left.set(left);
        Ok(())
    }
}

struct Tree {
    root: PathBuf,
    fake: Fake,
}

const STOCK: &str = "libmlx5.so.1.24.44.0";

impl Tree {
    /// A system with rdma-core 44, of dpkg or not.
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
            fake: Fake {
                owner: has_dpkg.then_some("ibverbs-providers:amd64"),
                diversions: RefCell::default(),
                left: Cell::new(usize::MAX),
                library: libraries.join(LIBMLX5),
                cached: Cell::new(0),
            },
            root,
        }
    }

    fn place(&self) -> Replacement<&Fake> {
        let paths = InstallPaths::under(&self.root.join("usr")).unwrap();
        Replacement::new(self.root.clone(), &paths, &self.fake)
    }

    fn install(&self) -> Result<String> {
        self.place().install(&self.root.join("ours.so"))
    }

    fn libraries(&self) -> PathBuf {
        self.root.join("usr/lib64")
    }

    /// All files with their contents, links with their targets, folders, diversions.
    fn all(&self) -> BTreeMap<PathBuf, String> {
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

    /// Kills a run after each of its changes, and calls `then` on what is left.
    fn kill(name: &str, has_dpkg: bool, is_install: bool, then: impl Fn(&Tree)) {
        let mut changes = 0;
        loop {
            let tree = Tree::new(name, has_dpkg);
            if !is_install {
                tree.install().unwrap();
            }
            tree.fake.left.set(changes);
            let result = match is_install {
                true => tree.install().map(drop),
                false => tree.place().remove().map(drop),
            };
            tree.fake.left.set(usize::MAX);
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
fn both_names_lead_to_ours_and_back() {
    let tree = Tree::new("links", true);
    let before = tree.all();
    let mut after = None;
    for times in 1..=2 {
        tree.install().unwrap();
        let all = tree.all();
        assert_eq!(after.get_or_insert_with(|| all.clone()), &all);
        assert_eq!(tree.fake.cached.get(), times);
        assert_eq!(tree.fake.diversions.borrow().len(), 1 + providers().count());
    }
    let libraries = tree.libraries();
    let leads_to = |name: &str| fs::read_to_string(libraries.join(name)).unwrap();
    assert_eq!(leads_to(LIBMLX5), "ours");
    for name in providers() {
        assert_eq!(leads_to(&format!("libibverbs/{name}")), "ours");
    }
    assert_eq!(leads_to(STOCK), "rdma-core's");
    assert!(tree.place().remove().unwrap());
    assert_eq!(tree.all(), before);
    assert_eq!(tree.fake.cached.get(), 3);
    assert!(!tree.place().remove().unwrap());
    assert_eq!((tree.all(), tree.fake.cached.get()), (before, 3));
}

#[test]
fn a_folder_comes_first_without_dpkg() {
    let tree = Tree::new("folder", false);
    let before = tree.all();
    let mut after = None;
    for _ in 0..2 {
        tree.install().unwrap();
        let all = tree.all();
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
    assert!(tree.place().remove().unwrap());
    fs::remove_dir(tree.root.join("etc/ld.so.conf.d")).unwrap();
    assert_eq!(tree.all(), before);
    assert!(!tree.place().remove().unwrap());

    // A configuration that an upgrade has written anew stays.
    tree.install().unwrap();
    let driver = tree.root.join("etc/libibverbs.d/mlx5.driver");
    fs::write(&driver, "driver mlx5 # new\n").unwrap();
    tree.place().remove().unwrap();
    assert_eq!(fs::read_to_string(&driver).unwrap(), "driver mlx5 # new\n");
    // Without one, none is left.
    fs::remove_file(&driver).unwrap();
    tree.install().unwrap();
    tree.place().remove().unwrap();
    assert!(!driver.exists());
}

#[test]
fn a_killed_run_is_completed_or_undone() {
    for has_dpkg in [true, false] {
        let complete = {
            let tree = Tree::new("killed", has_dpkg);
            tree.install().unwrap();
            tree.all()
        };
        let restored = |tree: &Tree| {
            tree.place().remove().unwrap();
            let _ = fs::remove_dir(tree.root.join("etc/ld.so.conf.d"));
            let all = tree.all();
            let fresh = Tree::new("killed", has_dpkg);
            assert_eq!(all, fresh.all());
        };
        Tree::kill("killed", has_dpkg, true, |tree| {
            tree.install().unwrap();
            assert_eq!(tree.all(), complete);
        });
        Tree::kill("killed", has_dpkg, true, restored);
        Tree::kill("killed", has_dpkg, false, restored);
        Tree::kill("killed", has_dpkg, false, |tree| {
            tree.install().unwrap();
            assert_eq!(tree.all(), complete);
        });
        // A run whose last change was made has told ldconfig.
        Tree::kill("killed", has_dpkg, false, |tree| {
            let cached = tree.fake.cached.get();
            let found = tree.place().remove().unwrap();
            assert!(!found || tree.fake.cached.get() > cached);
            assert!(tree.fake.cached.get() >= 2);
        });
    }
}

#[test]
fn upgrades_write_the_diverted_links() {
    const NEW: &str = "libmlx5.so.1.25.57.0";
    let tree = Tree::new("upgrade", true);
    let libraries = tree.libraries();
    tree.install().unwrap();
    // As dpkg does from 44 to 57, which has another private ABI.
    let diversions = tree.fake.diversions.borrow();
    let to = |path: &Path| {
        let seen = Path::new("/").join(path.strip_prefix(&tree.root).unwrap());
        let diversion = diversions.iter().find(|it| it.path == seen).unwrap();
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
    tree.place().remove().unwrap();
    assert!(names.iter().all(|name| read(name) == "newer"));
    assert!(provider(34).symlink_metadata().is_err());
    assert!(!tree.place().folder().exists());
}

#[test]
fn an_upgrade_after_a_killed_run_is_kept() {
    Tree::kill("kept", true, true, |tree| {
        let (path, aside, _) = tree.place().links().remove(0);
        if aside.symlink_metadata().is_err() {
            return;
        }
        // The name is diverted: the upgrade writes the other one.
        fs::remove_file(&aside).unwrap();
        fs::write(tree.libraries().join("newer"), "newer").unwrap();
        symlink("newer", &aside).unwrap();
        tree.install().unwrap();
        tree.place().remove().unwrap();
        assert_eq!(fs::read_link(path).unwrap(), Path::new("newer"));
    });
}

#[test]
fn others_diversions_are_left_alone() {
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
        let before = tree.all();
        let error = format!("{:#}", tree.install().unwrap_err());
        assert!(error.contains(advice), "{error}");
        assert!(!tree.place().remove().unwrap());
        assert_eq!(tree.all(), before);
    }
}

#[test]
fn an_error_says_what_to_do() {
    let tree = Tree::new("errors", false);
    fs::write(
        tree.root.join("etc/ld.so.conf"),
        "# include ld.so.conf.d/*.conf\n",
    )
    .unwrap();
    let before = tree.all();
    let error = format!("{:#}", tree.install().unwrap_err());
    assert!(error.contains("add that line first"), "{error}");
    fs::remove_file(tree.libraries().join(STOCK)).unwrap();
    let error = format!("{:#}", tree.install().unwrap_err());
    assert!(error.contains("ibverbs-providers"), "{error}");
    assert_eq!(tree.all().len() + 1, before.len());
    let advice = |kind: io::ErrorKind| refused("make", "/x".as_ref(), kind.into()).to_string();
    assert!(advice(io::ErrorKind::PermissionDenied).ends_with("; run this as root"));
    assert!(advice(io::ErrorKind::ReadOnlyFilesystem).contains("remount it writable"));
}

#[test]
fn answers_of_dpkg_are_understood() {
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
fn the_plugin_s_configuration_gives_way() {
    let tree = Tree::new("plugin", false);
    let paths = InstallPaths::under(&tree.root.join("usr")).unwrap();
    let etc = |name: &str| fs::read_to_string(tree.root.join("etc/libibverbs.d").join(name)).ok();
    configure(&paths).unwrap();
    let before = tree.all();
    assert_eq!(etc("mlx5.driver"), None);
    for _ in 0..2 {
        tree.install().unwrap();
        configure(&paths).unwrap();
        let driver = "driver mlx5\ndriver /usr/lib64/ringverbs/libmlx5\n";
        assert_eq!(etc("mlx5.driver").as_deref(), Some(driver));
        assert!(!etc(CONFIG).unwrap().contains("mlx5"));
    }
    assert!(tree.place().remove().unwrap());
    configure(&paths).unwrap();
    fs::remove_dir(tree.root.join("etc/ld.so.conf.d")).unwrap();
    assert_eq!(tree.all(), before);

    // Where dpkg diverts, both leave each other's files alone.
    let tree = Tree::new("diverted", true);
    let paths = InstallPaths::under(&tree.root.join("usr")).unwrap();
    configure(&paths).unwrap();
    let before = tree.all();
    tree.install().unwrap();
    assert!(tree.place().remove().unwrap());
    assert_eq!(tree.all(), before);
}
