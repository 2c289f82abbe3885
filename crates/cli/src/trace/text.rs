//! Queues as text.

use std::io::{self, Write};

use super::queue::{Element, Entry, EntryContent, Queue};
use crate::escape::escaped;
use crate::out::{self, paint};

/// Prints a queue and its entries.
pub fn queue(out: &mut impl Write, queue: &Queue) -> io::Result<()> {
    let kind = queue.kind.unwrap_or("queue of unknown type");
    writeln!(
        out,
        "{} {}  {}",
        paint(
            out::NAME,
            format_args!("{}+{:#x}", queue.device, queue.offset)
        ),
        paint(out::NAME, kind),
        paint(
            out::DIM,
            format_args!(
                "at {:#x}, room for {} of {} bytes",
                queue.address, queue.capacity, queue.entry_bytes
            )
        ),
    )?;
    let moving = if queue.moving { ", moving" } else { "" };
    writeln!(
        out,
        "  producer {}, consumer {}: {} pending{moving}",
        queue.producer, queue.consumer, queue.pending
    )?;
    for one in &queue.entries {
        entry(out, queue, one, false)?;
    }
    writeln!(out)
}

/// Prints an entry, after the name of its queue if `with_queue`.
pub fn entry(
    out: &mut impl Write,
    queue: &Queue,
    entry: &Entry,
    with_queue: bool,
) -> io::Result<()> {
    let mark = if entry.pending { "*" } else { " " };
    let name = match with_queue {
        true => format!("{}+{:#x} ", escaped(&queue.device), queue.offset),
        false => String::new(),
    };
    let slot = paint(out::DIM, format_args!("[{:5}]", entry.slot));
    writeln!(out, "{mark} {name}{slot} {}", describe(&entry.content))
}

fn describe(content: &EntryContent) -> String {
    match content {
        EntryContent::Completion {
            wr_id,
            status,
            opcode,
            byte_len,
            qp_num,
            src_qp,
            ..
        } => {
            let good = status == "SUCCESS";
            let status = paint(if good { out::GOOD } else { out::BAD }, status);
            let from = match src_qp {
                0 => String::new(),
                number => format!(" from QP {number:#x}"),
            };
            // The length is undefined after a failure.
            let length = match good {
                true => format!(" {byte_len} bytes"),
                false => String::new(),
            };
            format!("wr_id {wr_id:#x}  {status} {opcode}{length}  QP {qp_num:#x}{from}")
        }
        EntryContent::Send {
            wr_id,
            opcode,
            flags,
            state,
            length,
            left,
            first_psn,
            last_psn,
            remote,
            sges,
        } => {
            let style = if state.starts_with("error") {
                out::BAD
            } else {
                out::GOOD
            };
            let state = paint(style, state);
            let left = match left {
                0 => String::new(),
                left => format!(", {left} left"),
            };
            let remote = remote.as_ref().map(|remote| format!(" to {remote}"));
            let remote = remote.unwrap_or_default();
            let flags = flags.join("|");
            format!(
                "wr_id {wr_id:#x}  {state} {opcode} {length} bytes{left}{remote}  {flags} \
                 PSN {first_psn:#x}..{last_psn:#x}{}",
                elements(sges)
            )
        }
        EntryContent::Receive {
            wr_id,
            length,
            sges,
            ..
        } => format!(
            "wr_id {wr_id:#x}  room for {length} bytes{}",
            elements(sges)
        ),
        EntryContent::Unknown => "entry of unknown type; see --as".into(),
    }
}

fn elements(sges: &[Element]) -> String {
    let sges = sges.iter();
    let sges = sges.map(|sge| format!("  {:#x}+{} lkey {:#x}", sge.addr, sge.length, sge.lkey));
    sges.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::escape::is_visible;

    #[test]
    fn hostile_names_are_escaped() {
        let hostile = Queue {
            device: "uverbs\x1b[2J\n\u{202e}".into(),
            offset: 0,
            address: 0,
            kind: None,
            entry_bytes: 64,
            capacity: 1,
            producer: 1,
            consumer: 0,
            pending: 1,
            moving: false,
            entries: vec![Entry {
                slot: 0,
                pending: true,
                content: EntryContent::Unknown,
            }],
        };
        let mut got = Vec::new();
        queue(&mut got, &hostile).unwrap();
        entry(&mut got, &hostile, &hostile.entries[0], true).unwrap();
        let got = anstream::adapter::strip_bytes(&got).into_vec();
        let got = String::from_utf8(got).unwrap();
        assert_eq!(
            got.matches(r"uverbs\u{1b}[2J\u{a}\u{202e}+0x0").count(),
            2,
            "{got}"
        );
        assert!(got.chars().all(|c| is_visible(c) || c == '\n'), "{got:?}");
        assert_eq!(got.lines().count(), 5, "{got}");
    }
}
