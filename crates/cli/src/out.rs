//! Output: styles, aligned columns, JSON.

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use serde::Serialize;

use crate::error::Error;
use crate::escape::{TerminalWriter, escaped, visible_json};

/// Names.
pub const NAME: Style = Style::new().bold();
/// Good states.
pub const GOOD: Style = AnsiColor::Green.on_default();
/// Warnings.
pub const WARN: Style = AnsiColor::Yellow.on_default();
/// Errors.
pub const BAD: Style = AnsiColor::Red.on_default().bold();
/// Less important text.
pub const DIM: Style = Style::new().dimmed();

/// Returns standard output. Text that is not yet escaped is escaped here
/// ([`escaped`]); styles are removed unless the output is a terminal that supports
/// them (`NO_COLOR` and similar variables are respected).
pub fn stdout() -> impl Write {
    TerminalWriter::new(anstream::stdout())
}

/// As [`stdout`], standard error.
pub fn stderr() -> impl Write {
    TerminalWriter::new(anstream::stderr())
}

/// Returns `text` escaped and in a style.
pub fn paint(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{}{style:#}", escaped(text))
}

/// Writes `value` as JSON, followed by a newline.
pub fn json(value: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_string_pretty(value).map_err(io::Error::from)?;
    let mut out = stdout();
    writeln!(out, "{}", visible_json(&text))?;
    Ok(out.flush()?)
}

/// As [`json`], on one line.
pub fn json_line(value: &impl Serialize) -> Result<(), Error> {
    let text = serde_json::to_string(value).map_err(io::Error::from)?;
    let mut out = stdout();
    writeln!(out, "{}", visible_json(&text))?;
    Ok(out.flush()?)
}

/// Prints an error and its advice on standard error.
pub fn print_error(error: &Error) {
    let mut err = TerminalWriter::new(anstream::stderr());
    // If standard error is closed too, the message cannot be delivered.
    let _ = writeln!(err, "{} {}", paint(BAD, "ringverbs:"), escaped(error));
    if let Some(advice) = error.advice() {
        let _ = writeln!(err, "{advice}");
    }
}

/// Prints a warning on standard error.
pub fn print_warning(text: &str) {
    let mut err = TerminalWriter::new(anstream::stderr());
    // As for errors.
    let _ = writeln!(err, "{} {}", paint(WARN, "ringverbs:"), escaped(text));
}

/// Prints a line about a run on standard error.
pub fn print_note(text: &str) {
    let mut err = TerminalWriter::new(anstream::stderr());
    // As for errors.
    let _ = writeln!(err, "{} {}", paint(DIM, "ringverbs:"), escaped(text));
}

/// Prints what the command waits for on standard error.
pub fn print_waiting(text: &str) {
    let mut err = TerminalWriter::new(anstream::stderr());
    // As for errors.
    let _ = writeln!(err, "{}", paint(DIM, text));
}

/// Prints clap's error, which quotes the arguments, on standard error.
pub fn print_usage_error(error: &clap::Error) {
    let mut err = TerminalWriter::new(anstream::stderr());
    let _ = write!(err, "{}", error.render());
}

/// Prints rows in columns, each as wide as its widest cell, separated by two
/// spaces. The first row is the heading.
pub fn table(out: &mut impl Write, rows: &[Vec<String>]) -> io::Result<()> {
    let visible = |row: &Vec<String>| row.iter().map(|cell| escaped(cell).to_string()).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(visible).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    for (number, row) in rows.iter().enumerate() {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(&widths) {
            line.push_str(&format!("{cell:<width$}  "));
        }
        let line = line.trim_end();
        if number == 0 {
            writeln!(out, "{}", paint(DIM, line))?;
        } else {
            writeln!(out, "{line}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn columns_are_aligned_without_trailing_spaces() {
        let rows = [
            vec!["device".into(), "state".into()],
            vec!["rxe0".into(), "ACTIVE".into()],
            vec!["a-long-name".into()],
        ];
        let mut out = Vec::new();
        table(&mut out, &rows).unwrap();
        let text = anstream::adapter::strip_bytes(&out).into_vec();
        let text = String::from_utf8(text).unwrap();
        assert_eq!(
            text,
            "device       state\nrxe0         ACTIVE\na-long-name\n"
        );
    }
}
