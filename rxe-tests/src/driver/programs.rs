//! The test programs in C and their manifest.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::case::{ATTEMPTS, Case, Need, Shape};
use crate::record::{Provider, StockExpectation};

/// The group of these cases.
pub const GROUP: &str = "programs";

/// The group of the Rust crate's programs.
pub const NATIVE: &str = "native";

/// Parses a manifest. Each line is a case:
/// `name | program and arguments | providers | limit in seconds`. Optional fields:
/// - ` | retry: reason`: the case depends on timing and has several attempts (never a
///   case that looks for a race);
/// - ` | needs: rxe`, ` | needs: address`: the case does not run on every device;
/// - ` | long: reason`: the case is not in the short list.
///
/// Providers are
/// - `both`;
/// - `ours`;
/// - `stock-fails-before=N`: stock of an rdma-core older than N must fail, since it has
///   the defect that the case shows;
/// - `stock-fails`: every known stock must fail;
/// - `same-output`: both must pass and print the same on standard output;
/// - `native`: a program of the Rust crate, which maps no provider;
/// - `native-with-c`: the same with C programs as its peers;
/// - `native-with-plugin`: the same with the plugin serving the peers.
///
/// `rdma_core` is the version in use. Empty lines and lines that start with `#` are
/// ignored.
pub fn parse_manifest(text: &str, rdma_core: &str) -> Result<Vec<Case>> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| parse_case(line, rdma_core).with_context(|| format!("in the manifest: {line}")))
        .collect()
}

fn parse_case(line: &str, rdma_core: &str) -> Result<Case> {
    let fields: Vec<&str> = line.split('|').map(str::trim).collect();
    let [name, command, providers, limit, ref more @ ..] = fields[..] else {
        bail!("expected four fields, found {}", fields.len());
    };
    let (mut attempts, mut needs, mut short) = (1, None, true);
    for field in more {
        match field
            .split_once(':')
            .map(|(key, value)| (key, value.trim()))
        {
            Some(("retry", reason)) if !reason.is_empty() => attempts = ATTEMPTS,
            Some(("long", reason)) if !reason.is_empty() => short = false,
            Some(("needs", "rxe")) => needs = Some(Need::Rxe),
            Some(("needs", "address")) => needs = Some(Need::Address),
            _ => bail!(
                "further fields are `retry: a reason`, `long: a reason`, `needs: rxe` or \
                 `needs: address`, not `{field}`"
            ),
        }
    }
    let same_output = providers == "same-output";
    let native = match providers {
        "native" => Some(Provider::Native),
        "native-with-c" => Some(Provider::NativeWithC),
        "native-with-plugin" => Some(Provider::NativeWithPlugin),
        _ => None,
    };
    let stock = match providers.split_once('=') {
        None if same_output => StockExpectation::Reference,
        None if providers == "stock-fails" => StockExpectation::FailsSoFar,
        None if providers == "both" => StockExpectation::Reference,
        None if providers == "ours" || native.is_some() => StockExpectation::NotRun,
        Some(("stock-fails-before", version)) => {
            let fixed: u32 = version.parse().context("not a release number")?;
            if major(rdma_core)? < fixed {
                StockExpectation::MustFail
            } else {
                StockExpectation::Reference
            }
        }
        _ => bail!("unknown providers `{providers}`"),
    };
    let group = if native.is_some() { NATIVE } else { GROUP };
    let mut case = Case::new(group, name, Shape::Single(command.to_owned()));
    case.short = short;
    case.limit = Duration::from_secs(limit.parse().context("the limit is not a number")?);
    case.attempts = attempts;
    case.stock = stock;
    case.native = native;
    case.needs = needs;
    case.same_output = same_output;
    Ok(case)
}

/// Returns the major release of a package version such as `56.1-1`.
pub fn major(version: &str) -> Result<u32> {
    version
        .split(|c: char| !c.is_ascii_digit())
        .next()
        .and_then(|digits| digits.parse().ok())
        .with_context(|| format!("no release in rdma-core's version `{version}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_is_read() {
        let text = "# comment\n\n\
                    a | ops one | both | 60\n\
                    b | ops two | ours | 10\n\
                    c | defects x | stock-fails-before=64 | 30\n\
                    d | dump | same-output | 30\n\
                    e | defects y | stock-fails | 30\n";
        let old = parse_manifest(text, "56.1-1").unwrap();
        let stock: Vec<_> = old.iter().map(|c| c.stock).collect();
        use StockExpectation::{FailsSoFar, MustFail, NotRun, Reference};
        assert_eq!(stock, [Reference, NotRun, MustFail, Reference, FailsSoFar]);
        let same: Vec<_> = old.iter().map(|c| c.same_output).collect();
        assert_eq!(same, [false, false, false, true, false]);
        let lines =
            "n | hello | native | 9\nm | x | native-with-c | 9\np | x | native-with-plugin | 9\n";
        let native = parse_manifest(lines, "44").unwrap();
        assert_eq!(native[0].native, Some(Provider::Native));
        assert_eq!(native[1].native, Some(Provider::NativeWithC));
        assert_eq!(native[2].native, Some(Provider::NativeWithPlugin));
        assert_eq!((native[0].group, old[0].native), (NATIVE, None));
        let again = parse_manifest("a | b | both | 3 | retry: datagrams\n", "44").unwrap();
        assert_eq!((again[0].attempts, old[0].attempts), (ATTEMPTS, 1));
        let long = parse_manifest("a | b | both | 3 | long: interpreted\n", "44").unwrap();
        assert_eq!((long[0].short, old[0].short), (false, true));
        let needs = "a | b | native | 3 | needs: rxe\n\
                     a | b | native | 3 | retry: slow | needs: address\n";
        let needs = parse_manifest(needs, "44").unwrap();
        assert_eq!((needs[0].needs, needs[0].attempts), (Some(Need::Rxe), 1));
        assert_eq!(needs[1].needs, Some(Need::Address));
        assert_eq!((needs[1].attempts, old[0].needs), (ATTEMPTS, None));
        let new = parse_manifest(text, "65.0-1").unwrap();
        assert_eq!(new[2].stock, StockExpectation::Reference);
        assert_eq!(new[2].limit, Duration::from_secs(30));
    }

    #[test]
    fn manifest_errors_name_the_line() {
        for wrong in [
            "a | b | both",
            "a | b | nobody | 3",
            "a | b | both | soon",
            "a | b | both | 3 | retry:",
            "a | b | both | 3 | often",
            "a | b | both | 3 | long:",
            "a | b | both | 3 | needs: luck",
            "a | b | both | 3 | retry: slow | often",
        ] {
            let error = parse_manifest(wrong, "44.0").unwrap_err();
            assert!(format!("{error:#}").contains(wrong), "{error:#}");
        }
        assert!(parse_manifest("a | b | stock-fails-before=64 | 3", "unknown").is_err());
    }
}
