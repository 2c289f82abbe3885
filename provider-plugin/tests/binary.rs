//! Dependencies and exported symbols of the built file.

mod common;

use std::process::Command;

use common::plugin;

fn readelf(arguments: &[&str]) -> String {
    let output = Command::new("readelf")
        .args(arguments)
        .arg(plugin())
        .output();
    let output = output.expect("readelf, of the binutils package");
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn it_depends_on_libc_and_libgcc_only() {
    let dynamic = readelf(&["--dynamic", "--wide"]);
    let needed: Vec<&str> = dynamic
        .lines()
        .filter(|l| l.contains("(NEEDED)"))
        .filter_map(|l| l.split(['[', ']']).nth(1))
        .collect();
    assert!(!needed.is_empty(), "{dynamic}");
    for library in needed {
        let known = ["libc.so", "ld-linux", "libm.so", "libgcc_s.so"];
        assert!(
            known.iter().any(|k| library.starts_with(k)),
            "needs {library}"
        );
    }
}

#[test]
fn only_interposed_functions_are_exported_and_no_verbs_imported() {
    let symbols = readelf(&["--dyn-syms", "--wide"]);
    let (mut exported, mut own, mut refusals) = (Vec::new(), Vec::new(), 0);
    for line in symbols.lines() {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let [_, _, _, _, _, _, index, name, ..] = columns[..] else {
            continue;
        };
        if index == "Ndx" {
            continue;
        }
        // A provider is found through its constructor, not by a name; these
        // count where it is preloaded.
        if name.trim_start_matches('_').starts_with("mlx5dv_") {
            own.push(name);
            continue;
        }
        // For libmlx5.so.1, which names them otherwise.
        if name.starts_with("ringverbs_") {
            refusals += 1;
            continue;
        }
        if index != "UND" {
            let pabi = name.strip_prefix("verbs_register_driver_");
            let pabi = pabi.and_then(|pabi| pabi.parse::<u32>().ok());
            exported.push(pabi.unwrap_or_else(|| panic!("exports {name}")));
            continue;
        }
        assert!(
            !name.contains("ibv_") && !name.contains("verbs_"),
            "imports {name}"
        );
    }
    exported.sort_unstable();
    assert_eq!(exported, [34, 57, 59, 64, 65]);
    own.sort_unstable();
    assert_eq!(own, own_functions());
    assert_eq!(refusals, 5);
}

/// The functions of libmlx5.map that are the plugin's own.
fn own_functions() -> Vec<&'static str> {
    let map = include_str!("../libmlx5.map");
    let symbols = map.lines().filter_map(|line| line.strip_prefix("    "));
    let mut own: Vec<_> = symbols
        .filter(|symbol| !symbol.contains([':', '=']))
        .collect();
    own.sort_unstable();
    own
}

#[test]
fn it_runs_with_the_glibc_of_debian_12() {
    let symbols = readelf(&["--dyn-syms", "--wide"]);
    let mut seen = 0;
    for version in symbols.split("@GLIBC_").skip(1) {
        let number: String = version
            .chars()
            .take_while(|c| c.is_ascii_digit() || *c == '.')
            .collect();
        let mut parts = number.split('.').map(|p| p.parse::<u32>().unwrap());
        let version = (parts.next().unwrap(), parts.next().unwrap_or(0));
        assert!(version <= (2, 36), "needs glibc {number}");
        seen += 1;
    }
    assert!(seen > 10, "{symbols}");
}
