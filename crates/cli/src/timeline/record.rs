//! Lines of JSON: records of verbs calls, and explanations.

use serde_json::Value;

/// Errors by which libraries find out what a device has: EAGAIN, ENODATA, EPROTONOSUPPORT,
/// EOPNOTSUPP.
const PROBES: [u64; 4] = [
    libc::EAGAIN as u64,
    libc::ENODATA as u64,
    libc::EPROTONOSUPPORT as u64,
    libc::EOPNOTSUPP as u64,
];
/// Longest text of a field, and of one with a call stack.
const MAX_FIELD: usize = 240;
const MAX_FIELDS: usize = 40;
/// Frames of a call stack.
const MAX_STACK: usize = 8;

/// How bad an event is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Severity {
    /// As it should be.
    Normal,
    /// Repaired by the transport, or the consequence of an error.
    Warning,
    /// An error.
    Error,
}

/// The kind of a line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LineKind {
    /// A call that makes, changes or destroys an object.
    Call,
    /// A posted send.
    Post,
    /// A posted receive.
    Receive,
    /// A polled completion.
    Completion,
    /// An explanation.
    Report,
}

/// A line that is an event.
pub struct Line {
    pub kind: LineKind,
    pub value: Value,
}

/// Reads an unsigned number, or a string of one in hexadecimal.
pub fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16).ok(),
            None => text.parse().ok(),
        },
        _ => None,
    }
}

impl Line {
    /// Reads a line; `None` if it is no event.
    pub fn new(value: Value) -> Option<Self> {
        let kind = match (value["type"].as_str()?, value["send"].as_bool()) {
            ("call", _) => LineKind::Call,
            ("post", Some(false)) => LineKind::Receive,
            ("post", _) => LineKind::Post,
            ("completion", _) => LineKind::Completion,
            ("report", _) => LineKind::Report,
            _ => return None,
        };
        Some(Self { kind, value })
    }

    /// Returns the number of the queue pair that it is about.
    pub fn queue(&self) -> Option<u32> {
        let found = match self.kind {
            LineKind::Call => {
                let object = self.value["object"].as_str()?;
                let digits = object.strip_prefix("qp 0x")?;
                u64::from_str_radix(digits, 16).ok()
            }
            LineKind::Report => number(&self.value["queue_pair"]["number"]),
            _ => number(&self.value["qp"]),
        };
        u32::try_from(found?).ok()
    }

    pub fn severity(&self) -> Severity {
        let errno = number(&self.value["errno"]).unwrap_or(0);
        match self.kind {
            LineKind::Report => match self.text("class") {
                "frame" | "packet" | "management" => Severity::Warning,
                _ => Severity::Error,
            },
            LineKind::Call if self.is_probe(errno) => Severity::Normal,
            LineKind::Call | LineKind::Post | LineKind::Receive => match errno {
                0 => Severity::Normal,
                _ => Severity::Error,
            },
            LineKind::Completion => {
                let status = self.text("status").to_lowercase();
                match &status[..] {
                    "success" => Severity::Normal,
                    status if status.contains("flush") => Severity::Warning,
                    _ => Severity::Error,
                }
            }
        }
    }

    /// Returns whether a call that fails so finds out what a device has.
    fn is_probe(&self, errno: u64) -> bool {
        PROBES.contains(&errno) || self.text("call").starts_with("query_")
    }

    fn text(&self, member: &str) -> &str {
        self.value[member].as_str().unwrap_or_default()
    }

    /// Returns the label of the mark.
    pub fn label(&self) -> String {
        let value = &self.value;
        let member = |name: &str| plain(&value[name]);
        match self.kind {
            LineKind::Call => match value["arguments"]["qp_state"].as_str() {
                Some(state) => format!("{} to {state}", self.text("call")),
                None => self.text("call").to_owned(),
            },
            LineKind::Post => format!(
                "{}, {} B, wr_id {}",
                self.text("opcode"),
                member("bytes"),
                member("wr_id")
            ),
            LineKind::Receive => {
                format!("receive, {} B, wr_id {}", member("bytes"), member("wr_id"))
            }
            LineKind::Completion => {
                format!("completion of wr_id {}", member("wr_id"))
            }
            LineKind::Report => "explanation".to_owned(),
        }
    }

    /// Returns the error's text.
    pub fn error(&self) -> Option<String> {
        if self.severity() == Severity::Normal {
            return None;
        }
        Some(match self.kind {
            LineKind::Report => {
                // The lane names the queue pair.
                let message = self.text("message");
                let message = match message.split_once(": ") {
                    Some((queue, rest)) if queue.starts_with("queue pair 0x") => rest,
                    _ => message,
                };
                match self.value["other_end"].as_str() {
                    Some(other) => format!("{message}; the other end: {other}"),
                    None => message.to_owned(),
                }
            }
            LineKind::Completion => self.text("status").to_owned(),
            _ => {
                let errno = number(&self.value["errno"]).unwrap_or(0);
                let errno = i32::try_from(errno).unwrap_or(0);
                nix::errno::Errno::from_raw(errno).to_string()
            }
        })
    }

    /// Returns all fields.
    pub fn fields(&self) -> Vec<(String, String)> {
        const SHOWN_OTHERWISE: [&str; 4] = ["type", "time", "version", "process"];
        let Value::Object(members) = &self.value else {
            return Vec::new();
        };
        let mut fields = Vec::new();
        for (name, value) in members {
            if SHOWN_OTHERWISE.contains(&&name[..]) {
                continue;
            }
            add_field(&mut fields, name, value);
        }
        fields.truncate(MAX_FIELDS);
        fields
    }
}

/// Adds a member; members of objects one by one.
fn add_field(fields: &mut Vec<(String, String)>, name: &str, value: &Value) {
    match value {
        Value::Null => {}
        Value::Object(members) => {
            if let Some(stack) = members.get("stack").and_then(Value::as_array) {
                fields.push((name.to_owned(), cut(&stack_text(stack), 2 * MAX_FIELD)));
                return;
            }
            for (inner, value) in members {
                let value_text = match value {
                    Value::Null => continue,
                    Value::Object(inner) => match inner.get("stack").and_then(Value::as_array) {
                        Some(stack) => cut(&stack_text(stack), 2 * MAX_FIELD),
                        None => cut(&plain(value), MAX_FIELD),
                    },
                    value => cut(&plain(value), MAX_FIELD),
                };
                fields.push((format!("{name}: {inner}"), value_text));
            }
        }
        value => fields.push((name.to_owned(), cut(&plain(value), MAX_FIELD))),
    }
}

/// Returns the functions of a call stack, the innermost first.
fn stack_text(stack: &[Value]) -> String {
    let frames = stack.iter().take(MAX_STACK).map(|frame| {
        let function = frame["function"].as_str();
        let file = frame["file"].as_str().map(|file| {
            let name = file.rsplit('/').next().unwrap_or(file);
            format!(" ({name}:{})", plain(&frame["line"]))
        });
        let module = frame["module"].as_str().unwrap_or("?");
        format!("{}{}", function.unwrap_or(module), file.unwrap_or_default())
    });
    frames.collect::<Vec<_>>().join(" by ")
}

/// Displays a value without quotes.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// Cuts a text.
pub fn cut(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}
