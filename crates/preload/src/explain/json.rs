//! JSON on one line.

use std::fmt::{Display, Write as _};

/// An object that is written member by member.
#[derive(Debug)]
pub(crate) struct Object(String);

impl Object {
    pub(crate) fn new() -> Self {
        Self("{".to_owned())
    }

    /// Adds a member whose value is JSON.
    pub(crate) fn raw(mut self, name: &str, value: impl Display) -> Self {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        // Writing to a string does not fail.
        let _ = write!(self.0, "\"{name}\":{value}");
        self
    }

    /// Adds a string.
    pub(crate) fn text(self, name: &str, value: &str) -> Self {
        self.raw(name, quoted(value))
    }

    /// Adds a number of 64 bits, in hexadecimal as a string: numbers of JSON are less exact.
    pub(crate) fn hexadecimal(self, name: &str, value: u64) -> Self {
        self.raw(name, format_args!("\"{value:#x}\""))
    }

    /// Adds an object, or `null`.
    pub(crate) fn optional(self, name: &str, value: Option<String>) -> Self {
        self.raw(name, value.as_deref().unwrap_or("null"))
    }

    /// Adds a list.
    pub(crate) fn list(self, name: &str, values: impl IntoIterator<Item = String>) -> Self {
        let values: Vec<String> = values.into_iter().collect();
        self.raw(name, format_args!("[{}]", values.join(",")))
    }

    pub(crate) fn end(mut self) -> String {
        self.0.push('}');
        self.0
    }
}

/// Returns a string of JSON.
pub(crate) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => {
                quoted.push('\\');
                quoted.push(letter);
            }
            letter if letter < ' ' => {
                let _ = write!(quoted, "\\u{:04x}", u32::from(letter));
            }
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let line = Object::new()
            .text("a", "\"b\\\n\u{1}ü")
            .hexadecimal("c", u64::MAX)
            .optional("d", None)
            .list("e", ["1".to_owned(), "{}".to_owned()])
            .end();
        let parsed: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(parsed["a"], "\"b\\\n\u{1}ü");
        assert_eq!(parsed["c"], "0xffffffffffffffff");
        assert!(parsed["d"].is_null());
        assert_eq!(parsed["e"].as_array().unwrap().len(), 2);
    }
}
