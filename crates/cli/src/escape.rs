//! Escaping of text from outside.
//!
//! Names of devices and files, text from sysfs, other processes or peers, and text that
//! errors quote may contain terminal escape sequences, newlines, and characters that
//! change the text direction.

use std::fmt::{self, Display, Write as _};
use std::io::{self, Write};

/// Displays `text` on one line, with all characters that are not visible escaped
/// as in Rust strings: `\u{1b}`.
pub fn escaped<T: Display>(text: T) -> Escaped<T> {
    Escaped(text)
}

/// See [`escaped`].
#[derive(Clone, Copy, Debug)]
pub struct Escaped<T>(T);

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(EscapeWriter(f), "{}", self.0)
    }
}

struct EscapeWriter<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl fmt::Write for EscapeWriter<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            match is_visible(c) {
                true => self.0.write_char(c)?,
                false => write!(self.0, "{}", c.escape_unicode())?,
            }
        }
        Ok(())
    }
}

/// Returns whether a character is visible and does not affect the display of
/// others.
pub fn is_visible(c: char) -> bool {
    !c.is_control()
        && !matches!(c,
            // Soft hyphen, Arabic letter mark, Mongolian vowel separator.
            '\u{ad}' | '\u{61c}' | '\u{180e}'
            // Zero width; directions; line and paragraph separators; invisible
            // operators.
            | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            // Byte order mark, annotations, noncharacters, tags.
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{fffe}' | '\u{ffff}'
            | '\u{e0000}'..='\u{e007f}')
}

/// The escape sequences of this program's own styles.
const STYLES: [&str; 6] = [
    "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m",
];

/// A writer to a terminal. Newlines and this program's own styles are written as they
/// are; everything else that [`escaped`] would escape is escaped, in case a caller forgot.
pub struct TerminalWriter<W: Write> {
    /// Bytes not yet written; buffered so that no sequence is split.
    buffer: Vec<u8>,
    inner: W,
}

/// Bytes after which the buffer is written at the end of a line.
const FLUSH_SIZE: usize = 8192;

impl<W: Write> TerminalWriter<W> {
    pub fn new(inner: W) -> Self {
        let buffer = Vec::new();
        Self { buffer, inner }
    }

    fn write_buffer(&mut self) -> io::Result<()> {
        let buffer = std::mem::take(&mut self.buffer);
        self.inner.write_all(sanitized(&buffer).as_bytes())
    }
}

impl<W: Write> Write for TerminalWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= FLUSH_SIZE && bytes.ends_with(b"\n") {
            self.write_buffer()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write_buffer()?;
        self.inner.flush()
    }
}

impl<W: Write> Drop for TerminalWriter<W> {
    fn drop(&mut self) {
        let _ = self.flush();
    }
}

/// Returns the bytes as text in which only newlines and own styles are not escaped.
fn sanitized(bytes: &[u8]) -> String {
    let mut sanitized = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        let mut text = chunk.valid();
        while let Some(c) = text.chars().next() {
            let style = STYLES.iter().find(|style| text.starts_with(**style));
            let own = style.copied().or((c == '\n').then_some("\n"));
            match own {
                Some(own) => sanitized.push_str(own),
                None => sanitized.push_str(&escaped(c).to_string()),
            }
            text = &text[own.map_or(c.len_utf8(), str::len)..];
        }
        for byte in chunk.invalid() {
            // Writing to a String does not fail.
            let _ = write!(sanitized, "\\x{byte:02x}");
        }
    }
    sanitized
}

/// Escapes invisible characters of JSON, which only occur within strings.
pub fn visible_json(json: &str) -> String {
    let mut visible = String::with_capacity(json.len());
    for c in json.chars() {
        if is_visible(c) || c == '\n' {
            visible.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(visible, "\\u{unit:04x}");
            }
        }
    }
    visible
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequences that affect a terminal or the display of other text.
    const HOSTILE: &str = "a\x1b[2J\x1b]0;title\x07\n\r\t\x08\x7f\u{9b}31m\
        \u{202e}\u{2066}\u{200f}\u{feff}\u{2028}\u{e0041}z";

    #[test]
    fn escaped_text_is_visible_and_one_line() {
        let text = escaped(HOSTILE).to_string();
        assert!(text.chars().all(is_visible), "{text:?}");
        assert!(
            text.starts_with(r"a\u{1b}[2J\u{1b}]0;title\u{7}\u{a}"),
            "{text}"
        );
        assert!(text.ends_with(r"\u{202e}\u{2066}\u{200f}\u{feff}\u{2028}\u{e0041}z"));
        let plain = "rxe0: größer, 設備 <&\"'> \\";
        assert_eq!(escaped(plain).to_string(), plain);
    }

    #[test]
    fn terminal_writer_keeps_only_own_styles() {
        let style = anstyle::Style::new()
            .bold()
            .fg_color(Some(anstyle::AnsiColor::Red.into()));
        let mut got = Vec::new();
        let mut terminal = TerminalWriter::new(&mut got);
        write!(terminal, "{style}bad{style:#}\n{HOSTILE}\n").unwrap();
        terminal.write_all(b"\xff\xc3(\xe2\x80\n\xe2\x80").unwrap();
        terminal.write_all(b"\xae").unwrap();
        terminal.flush().unwrap();
        drop(terminal);
        let got = String::from_utf8(got).unwrap();
        assert!(
            got.starts_with("\x1b[1m\x1b[31mbad\x1b[0m\na\\u{1b}[2J"),
            "{got:?}"
        );
        assert!(got.ends_with("\\xff\\xc3(\\xe2\\x80\n\\u{202e}"), "{got:?}");
        let rest = STYLES.iter().fold(got, |got, style| got.replace(style, ""));
        assert!(rest.chars().all(|c| is_visible(c) || c == '\n'), "{rest:?}");
    }

    #[test]
    fn every_own_style_is_kept() {
        use crate::out;
        for style in [out::NAME, out::GOOD, out::WARN, out::BAD, out::DIM] {
            let text = out::paint(style, "text");
            assert_eq!(sanitized(text.as_bytes()), text);
        }
    }

    #[test]
    fn visible_json_has_the_same_value() {
        let value = serde_json::json!({ HOSTILE: [HOSTILE, 1] });
        let text = visible_json(&serde_json::to_string_pretty(&value).unwrap());
        assert!(text.chars().all(|c| is_visible(c) || c == '\n'), "{text:?}");
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&text).unwrap(),
            value
        );
    }
}
