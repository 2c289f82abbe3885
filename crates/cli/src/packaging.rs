//! `ringverbs packaging FOLDER`: writes shell completions and man pages, into the
//! folder that corresponds to a prefix's `share`. For packagers: completions and man pages
//! do not list this subcommand.

use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use clap::builder::Resettable;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use crate::{Cli, out};

/// Path of each shell's completions below `share`.
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "bash-completion/completions/ringverbs"),
    (Shell::Fish, "fish/vendor_completions.d/ringverbs.fish"),
    (Shell::Zsh, "zsh/site-functions/_ringverbs"),
];

/// Writes the files if the first argument is `packaging`.
#[cfg_attr(not(feature = "packaging"), allow(dead_code))]
pub fn run() -> Option<ExitCode> {
    let mut args = env::args_os().skip(1);
    if args.next()? != "packaging" {
        return None;
    }
    let folder = args.next()?;
    Some(match write(Path::new(&folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            out::print_error(&error.into());
            ExitCode::FAILURE
        }
    })
}

fn write(share: &Path) -> io::Result<()> {
    for (shell, file) in COMPLETIONS {
        let path = share.join(file);
        fs::create_dir_all(path.parent().unwrap_or(share))?;
        let mut command = Cli::command();
        clap_complete::generate(shell, &mut command, "ringverbs", &mut File::create(path)?);
    }
    let folder = share.join("man/man1");
    fs::create_dir_all(&folder)?;
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    for command in command.get_subcommands().chain([&command]) {
        page(command.clone(), &folder)?;
    }
    Ok(())
}

/// Writes the man page of a command. Notes and examples keep their line breaks, which
/// clap_mangen would remove.
fn page(command: Command, folder: &Path) -> io::Result<()> {
    let notes = command.get_after_help().map(ToString::to_string);
    let source = concat!("ringverbs ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.after_help(Resettable::Reset)).source(source);
    let mut file = File::create(folder.join(man.get_filename()))?;
    man.render(&mut file)?;
    if let Some(notes) = notes {
        writeln!(file, ".SH NOTES\n.nf")?;
        for line in notes.lines() {
            // Escapes what roff would read as a request or an escape.
            let line = line.replace('\\', "\\e").replace('-', "\\-");
            writeln!(file, "\\&{line}")?;
        }
        writeln!(file, ".fi")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_and_completions() {
        let name = format!("ringverbs-share-{}", std::process::id());
        let share = env::temp_dir().join(name);
        write(&share).unwrap();
        let read = |file: &str| fs::read_to_string(share.join(file)).unwrap();
        let commands = Cli::command();
        let commands: Vec<_> = commands.get_subcommands().map(Command::get_name).collect();
        assert!(commands.len() >= 7);
        for command in &commands {
            let page = read(&format!("man/man1/ringverbs-{command}.1"));
            assert!(page.contains(".SH SYNOPSIS"), "{page}");
        }
        for (_, file) in COMPLETIONS {
            let completions = read(file);
            assert!(commands.iter().all(|it| completions.contains(it)), "{file}");
            assert!(completions.contains("bidirectional") && !completions.contains("packaging"));
        }
        let pages = fs::read_dir(share.join("man/man1")).unwrap().count();
        assert_eq!(pages, commands.len() + 1);
        let notes = read("man/man1/ringverbs-perf.1");
        let example = "\n\\&  ringverbs perf \\-\\-op send \\-\\-sizes 8..65536";
        assert!(notes.contains(example), "{notes}");
        fs::remove_dir_all(&share).unwrap();
    }
}
