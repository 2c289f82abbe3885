//! Diagnostics: `tracing` events, written where the environment asks for it.
//!
//! Silent by default. `RINGVERBS_LOG` is one of `error`, `warn`, `info`, `debug`;
//! where it is unset libibverbs's `VERBS_LOG_LEVEL` (1 to 4) applies.
//! The lines go to the file named by `RINGVERBS_LOG_FILE`, else by
//! `VERBS_LOG_FILE`, else to stderr. Programs with elevated privileges ignore
//! all of them.
//!
//! The subscriber does not affect the program: a program that uses `tracing` has another
//! copy of the library. The data path is not traced.

use core::fmt::{self, Write as _};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use uverbs::environment::variable;

/// The level of the two variables.
fn level(ringverbs: Option<&[u8]>, verbs: Option<&[u8]>) -> Option<Level> {
    match ringverbs {
        Some(b"error") => Some(Level::ERROR),
        Some(b"warn") => Some(Level::WARN),
        Some(b"info") => Some(Level::INFO),
        Some(b"debug") => Some(Level::DEBUG),
        Some(_) => None,
        None => match verbs {
            Some(b"1") => Some(Level::ERROR),
            Some(b"2") => Some(Level::WARN),
            Some(b"3") => Some(Level::INFO),
            Some(b"4") => Some(Level::DEBUG),
            _ => None,
        },
    }
}

/// Installs the subscriber if the environment asks for it. Registration calls this, once.
pub fn init() {
    let (ringverbs, verbs) = (variable("RINGVERBS_LOG"), variable("VERBS_LOG_LEVEL"));
    let Some(level) = level(
        ringverbs.as_deref().map(OsStr::as_bytes),
        verbs.as_deref().map(OsStr::as_bytes),
    ) else {
        return;
    };
    install(level);
}

/// Apart from [`init`], as few programs ask for it.
#[cold]
fn install(level: Level) {
    let file = variable("RINGVERBS_LOG_FILE").or_else(|| variable("VERBS_LOG_FILE"));
    let file = file.and_then(|path| OpenOptions::new().append(true).create(true).open(path).ok());
    let _ = tracing::subscriber::set_global_default(Lines { level, file });
}

/// Writes each event as one line, in one write.
struct Lines {
    level: Level,
    file: Option<File>,
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::from_level(self.level))
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let mut line = Line(format!("ringverbs {}:", metadata.level()));
        event.record(&mut line);
        line.0.push('\n');
        let _ = match &self.file {
            Some(file) => (&*file).write_all(line.0.as_bytes()),
            None => std::io::stderr().write_all(line.0.as_bytes()),
        };
    }

    // Spans are not used.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Text of one event: its message, then `name=value` of its fields.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String does not fail.
        let _ = match field.name() {
            "message" => write!(self.0, " {value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ringverbs_log_precedes_verbs_log_level() {
        assert_eq!(level(None, None), None);
        assert_eq!(level(Some(b"info"), None), Some(Level::INFO));
        assert_eq!(level(Some(b"off"), Some(b"4")), None);
        assert_eq!(level(None, Some(b"4")), Some(Level::DEBUG));
        assert_eq!(level(None, Some(b"0")), None);
        assert_eq!(level(Some(b"error"), Some(b"4")), Some(Level::ERROR));
    }

    #[test]
    fn an_event_is_one_line_with_its_fields() {
        let path = std::env::temp_dir().join(format!("ringverbs-diag-{}", std::process::id()));
        let file = File::create(&path).unwrap();
        let lines = Lines {
            level: Level::INFO,
            file: Some(file),
        };
        tracing::subscriber::with_default(lines, || {
            tracing::info!(fd = 7, "device opened");
            tracing::debug!("not this");
        });
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text, "ringverbs INFO: device opened fd=7\n");
    }
}
