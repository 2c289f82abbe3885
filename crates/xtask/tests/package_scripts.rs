//! Runs the scripts of the Debian package of the plugin by dpkg, in a tree of its own with
//! stand-ins for the packages of rdma-core. Needs no root: the scripts heed `DPKG_ROOT`.
//!
//! Skipped where dpkg is missing.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Where the scripts of the package are.
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../provider-plugin/debian");
/// The plugin's configuration, as the package installs it.
const SHARED: &str = "usr/share/ringverbs/ringverbs.driver";

struct Tree(PathBuf);

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn text(output: &Output) -> String {
    let bytes = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Tree {
    /// Creates an empty system; `None` without dpkg.
    fn new(name: &str) -> Option<Self> {
        let version = Command::new("dpkg-deb").arg("--version").output();
        if !version.is_ok_and(|output| output.status.success()) {
            testing::skip!(missing: "dpkg", "dpkg-deb is missing");
            return None;
        }
        let name = format!("ringverbs-scripts-{name}-{}", std::process::id());
        let tree = Self(env::temp_dir().join(name));
        let _ = fs::remove_dir_all(&tree.0);
        let admin = tree.path("var/lib/dpkg");
        for folder in ["updates", "info"] {
            fs::create_dir_all(admin.join(folder)).unwrap();
        }
        for file in ["status", "available"] {
            fs::write(admin.join(file), "").unwrap();
        }
        Some(tree)
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.join("root").join(path)
    }

    /// Builds a package from files, scripts and fields of its control file.
    fn package(&self, name: &str, fields: &str, files: &[(&str, &str)]) -> PathBuf {
        let folder = self.0.join("build");
        let _ = fs::remove_dir_all(&folder);
        for (path, contents) in files {
            let path = folder.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, contents).unwrap();
            let is_script =
                path.parent().unwrap().ends_with("DEBIAN") && !path.ends_with("DEBIAN/conffiles");
            let mode = if is_script { 0o755 } else { 0o644 };
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let control = format!(
            "Package: {name}\nArchitecture: all\nMaintainer: nobody\nDescription: a stand-in\n\
             {fields}\n"
        );
        fs::write(folder.join("DEBIAN/control"), control).unwrap();
        let package = self.0.join(format!("{name}.deb"));
        let output = Command::new("dpkg-deb")
            .args(["--root-owner-group", "-b"])
            .args([&folder, &package])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output));
        package
    }

    /// Builds rdma-core's package of providers.
    fn stock(&self, version: &str) -> PathBuf {
        let files = [
            ("etc/libibverbs.d/rxe.driver", "driver rxe\n"),
            ("etc/libibverbs.d/mlx5.driver", "driver mlx5\n"),
            (
                "DEBIAN/conffiles",
                "/etc/libibverbs.d/rxe.driver\n/etc/libibverbs.d/mlx5.driver\n",
            ),
        ];
        self.package("ibverbs-providers", &format!("Version: {version}"), &files)
    }

    /// Builds the plugin's package, with its scripts.
    fn plugin(&self, version: &str) -> PathBuf {
        let read = |name: &str| fs::read_to_string(Path::new(SCRIPTS).join(name)).unwrap();
        let names = ["preinst", "postinst", "prerm", "postrm"];
        let scripts = names.map(|name| (format!("DEBIAN/{name}"), read(name)));
        let mut files: Vec<(&str, &str)> = vec![(SHARED, "driver rxe\ndriver mlx5\n")];
        files.extend(scripts.iter().map(|(path, text)| (&path[..], &text[..])));
        let fields = format!("Version: {version}\nDepends: ibverbs-providers (>= 34)");
        self.package("ringverbs", &fields, &files)
    }

    fn dpkg(&self, arguments: &[&str]) -> Output {
        let mut root = std::ffi::OsString::from("--root=");
        root.push(self.path(""));
        Command::new("dpkg")
            .arg(root)
            .args(["--force-not-root", "--force-script-chrootless"])
            .args(["--force-confold", "--force-bad-path"])
            .args(["--log=/dev/null"])
            .args(arguments)
            .env("LC_ALL", "C")
            .output()
            .unwrap()
    }

    fn succeed(&self, arguments: &[&str]) {
        let output = self.dpkg(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    }

    fn fail(&self, arguments: &[&str], reason: &str) {
        let output = self.dpkg(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(text(&output).contains(reason), "{}", text(&output));
    }

    fn install(&self, package: &Path) {
        self.succeed(&["-i", package.to_str().unwrap()]);
    }

    /// Calls a script of the plugin's package, as dpkg does after an error.
    fn script(&self, name: &str, argument: &str) {
        let output = Command::new("sh")
            .arg(Path::new(SCRIPTS).join(name))
            .arg(argument)
            .env("DPKG_ROOT", self.path(""))
            .env("DPKG_ADMINDIR", self.path("var/lib/dpkg"))
            .env("DPKG_MAINTSCRIPT_PACKAGE", "ringverbs")
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}: {}", text(&output));
    }

    fn diversions(&self) -> String {
        fs::read_to_string(self.path("var/lib/dpkg/diversions")).unwrap_or_default()
    }

    /// Asserts that the stock providers are configured, and nothing of ours.
    fn assert_stock(&self) {
        let mut names: Vec<_> = fs::read_dir(self.path("etc/libibverbs.d"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["mlx5.driver", "rxe.driver"]);
        assert_eq!(self.diversions(), "");
        assert!(!self.path("etc/ringverbs").exists());
    }

    /// Asserts that our configuration is the only one, and that it exists.
    fn assert_ours(&self) {
        let entries = fs::read_dir(self.path("etc/libibverbs.d")).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.retain(|name| !name.to_string_lossy().contains("dpkg"));
        assert_eq!(names, ["ringverbs.driver"]);
        let link = fs::read_link(self.path("etc/libibverbs.d/ringverbs.driver")).unwrap();
        assert_eq!(link, Path::new("/").join(SHARED));
        assert!(self.path(SHARED).exists());
        for name in ["mlx5.driver", "rxe.driver"] {
            assert!(self.path("etc/ringverbs").join(name).exists(), "{name}");
        }
    }
}

#[test]
fn a_package_with_missing_dependencies_diverts_nothing() {
    let Some(tree) = Tree::new("missing") else {
        return;
    };
    let plugin = tree.plugin("1");
    let path = plugin.to_str().unwrap();
    tree.install(&tree.stock("33"));
    for removal in ["-r", "-P"] {
        tree.fail(&["-i", path], "dependency problems");
        assert!(tree.path(SHARED).exists(), "the package is not unpacked");
        tree.assert_stock();
        tree.succeed(&[removal, "ringverbs"]);
        tree.assert_stock();
    }
    tree.fail(&["-i", path], "dependency problems");
    tree.install(&tree.stock("44"));
    tree.assert_stock();
    tree.succeed(&["--configure", "ringverbs"]);
    tree.assert_ours();
}

#[test]
fn the_stock_providers_serve_before_and_after() {
    let Some(tree) = Tree::new("removal") else {
        return;
    };
    tree.install(&tree.stock("44"));
    tree.install(&tree.plugin("1"));
    tree.assert_ours();
    tree.install(&tree.plugin("2"));
    tree.assert_ours();
    // The stock package's new files are diverted.
    tree.install(&tree.stock("45"));
    tree.assert_ours();
    // A removal that fails is undone.
    tree.script("prerm", "remove");
    tree.assert_stock();
    tree.script("postinst", "abort-remove");
    tree.assert_ours();
    tree.succeed(&["-r", "ringverbs"]);
    tree.assert_stock();
}

#[test]
fn a_local_diversion_is_left_alone() {
    let Some(tree) = Tree::new("local") else {
        return;
    };
    tree.install(&tree.stock("44"));
    let stock = "/etc/libibverbs.d/mlx5.driver\n/etc/ringverbs/mlx5.driver\n:\n";
    fs::write(tree.path("var/lib/dpkg/diversions"), stock).unwrap();
    let plugin = tree.plugin("1");
    let reason = "/etc/libibverbs.d/mlx5.driver is diverted locally";
    tree.fail(&["-i", plugin.to_str().unwrap()], reason);
    assert!(!tree.path(SHARED).exists());
    assert_eq!(tree.diversions(), stock);
    assert!(tree.path("etc/libibverbs.d/mlx5.driver").exists());
}
