//! `ringverbs env`: the variables that `ringverbs run` would set, for a shell or for a file of
//! variables, as CI systems and container runtimes read.

use std::ffi::OsStr;
use std::io::Write;
use std::process::ExitCode;

use uverbs::environment::variable;

use super::{Options, RunError, Settings};
use crate::error::Error;
use crate::out;

/// Arguments of `env`.
#[derive(clap::Args)]
#[command(after_help = "\
Every program that then starts has the devices; those that cannot be preloaded are not \
checked, and nothing is reported of programs that use no RDMA.
Examples: eval \"$(ringverbs env --embedded)\"
          ringverbs env --embedded --format file >> \"$GITHUB_ENV\"")]
pub struct Args {
    #[command(flatten)]
    options: Options,
    /// Format of the output
    #[arg(long, value_enum, default_value_t = Format::Shell)]
    format: Format,
}

/// How variables are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// A shell: export NAME='VALUE'
    Shell,
    /// A file of variables (GITHUB_ENV, docker --env-file): NAME=VALUE
    File,
}

/// Prints the variables.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    let variables = Settings::of(&args.options)?.variables(variable);
    let lines = variables
        .iter()
        .map(|(name, value)| args.format.line(name, value));
    // All or nothing: a shell evaluates what it got.
    let lines = lines.collect::<Result<Vec<_>, _>>()?;
    let mut out = out::stdout();
    for line in lines {
        writeln!(out, "{line}")?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Format {
    /// Returns the line for a variable.
    fn line(self, name: &str, value: &OsStr) -> Result<String, RunError> {
        let refused = |reason| RunError::Value(name.to_owned(), reason);
        let value = value.to_str().ok_or(refused("is not UTF-8"))?;
        if value.contains(['\n', '\r']) {
            return Err(refused("contains a line break"));
        }
        Ok(match self {
            Self::Shell => format!("export {name}='{}'", value.replace('\'', r"'\''")),
            Self::File => format!("{name}={value}"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_quoted_for_shells() {
        let line = |format: Format, value: &str| format.line("A", value.as_ref());
        assert_eq!(line(Format::Shell, "/a b").unwrap(), "export A='/a b'");
        assert_eq!(
            line(Format::Shell, "it's $B").unwrap(),
            r"export A='it'\''s $B'"
        );
        assert_eq!(line(Format::File, "/a b").unwrap(), "A=/a b");
        for format in [Format::Shell, Format::File] {
            assert!(line(format, "a\nB=1").is_err());
        }
    }
}
