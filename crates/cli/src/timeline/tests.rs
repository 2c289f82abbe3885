//! Pages of records and of captures, whatever these contain.

use embedded::roce::packet::LinkKind;
use embedded::roce::pcap::{self, Direction, Record};
use serde_json::{Value, json};

use super::diagram::Diagram;
use super::page::{MAX_PAGE, render};
use super::*;

/// An RC SEND Only of 4 bytes in IPv4 and UDP, to a queue pair with a PSN.
fn send_only(queue: u8, psn: u8) -> Vec<u8> {
    let ip = [
        0x45, 0, 0, 48, 0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2,
    ];
    let udp = [0xc0, 0, 0x12, 0xb7, 0, 28, 0, 0];
    let bth = [4, 0, 0xff, 0xff, 0, 0, 0, queue, 0x80, 0, 0, psn];
    [&ip[..], &udp, &bth, &[0; 8]].concat()
}

/// A capture of frames: time, whether it was sent, frame and comment.
fn capture(frames: &[(u64, bool, Vec<u8>, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    pcap::section(&mut out, "test");
    pcap::interface(&mut out, LinkKind::Ip, "mlx5_0");
    for (time, is_sent, frame, comment) in frames {
        Record {
            interface: 0,
            time: *time,
            kind: LinkKind::Ip,
            frame,
            snap: usize::MAX,
            shown: usize::MAX,
            direction: Some(match is_sent {
                true => Direction::Outbound,
                false => Direction::Inbound,
            }),
            comment,
        }
        .append(&mut out);
    }
    out
}

impl TemporaryFolder {
    /// Returns the data in the page of a file.
    fn page(&self, content: &[u8]) -> (Value, Vec<Value>) {
        let mut diagram = Diagram::default();
        read(&mut diagram, &self.file("input", content)).unwrap();
        diagram.join();
        data(&render(&diagram).0)
    }
}

/// Returns the data in a page.
fn data(page: &str) -> (Value, Vec<Value>) {
    assert!(page.len() <= MAX_PAGE, "{} bytes", page.len());
    let part = |id: &str| {
        let start = format!("id=\"{id}\">");
        let (_, rest) = page.split_once(&start).unwrap();
        serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
    };
    let entries: Value = part("entries");
    (part("about"), entries.as_array().unwrap().clone())
}

const SENDER: &str = "process 7 (a), mlx5_0 queue pair 0x1";
const RECEIVER: &str = "process 8 (b), mlx5_0 queue pair 0x2";

#[test]
fn arrows_lead_to_receptions() {
    let dropped = format!("{SENDER}; frame dropped: the injected fault of line 1");
    let refused = format!("{RECEIVER}; packet dropped: PSN 0x2 is not the expected 0x1");
    let content = capture(&[
        (10, true, send_only(2, 1), &dropped),
        (20, true, send_only(2, 2), SENDER),
        (30, false, send_only(2, 2), &refused),
        (40, true, send_only(2, 1), SENDER),
        (45, true, send_only(2, 2), SENDER),
        (50, false, send_only(2, 1), RECEIVER),
        (60, false, send_only(2, 2), RECEIVER),
        (70, false, send_only(2, 2), RECEIVER),
        (80, true, send_only(3, 3), SENDER),
    ]);
    let (about, entries) = TemporaryFolder::new("arrows").unwrap().page(&content);
    let shown: Vec<_> = entries
        .iter()
        .map(|it| {
            let number = |name: &str| it[name].as_u64();
            (
                number("t"),
                number("u"),
                number("b"),
                number("s"),
                number("x"),
            )
        })
        .collect();
    let (t, peer) = (Some, Some(1));
    let expected = [
        // Lost: the cause is known.
        (t(0), None, peer, Some(1), Some(1)),
        (t(10), t(20), peer, Some(1), None),
        // Sent again; the second one arrives twice.
        (t(30), t(40), peer, Some(1), None),
        (t(35), t(50), peer, Some(1), None),
        (t(35), t(60), peer, Some(1), None),
        // To a peer without a capture.
        (t(70), None, Some(2), None, None),
    ];
    assert_eq!(shown, expected);
    assert_eq!(entries[0]["l"], "SEND Only, 4 B");
    assert_eq!(entries[2]["l"], "SEND Only, 4 B, again");
    assert!(entries[0]["e"].as_str().unwrap().contains("injected"));
    let lanes = about["lanes"].as_array().unwrap();
    let owners: Vec<_> = lanes
        .iter()
        .map(|it| it["owner"].as_str().unwrap())
        .collect();
    assert_eq!(owners, ["a 7", "b 8", "not captured 192.0.2.2"]);
}

#[test]
fn a_packet_that_others_overtook_is_lost() {
    let content = capture(&[
        (10, true, send_only(2, 1), SENDER),
        (20, true, send_only(2, 2), SENDER),
        (30, false, send_only(2, 2), RECEIVER),
        (40, true, send_only(2, 3), SENDER),
    ]);
    let (_, entries) = TemporaryFolder::new("overtaken").unwrap().page(&content);
    let lost: Vec<_> = entries.iter().map(|it| it["x"].as_u64()).collect();
    // The last one may have been on its way when the capture ended.
    assert_eq!(lost, [Some(1), None, None]);
    assert_eq!(entries[0]["e"], "no reception was captured");
}

fn record_line(time: u64, status: &str) -> String {
    let line = json!({ "type": "completion", "time": time, "cq": 3, "qp": 64, "wr_id": time,
        "opcode": "RDMA_WRITE", "status": status, "bytes": 64 });
    format!("{line}\n")
}

#[test]
fn lines_of_other_versions_are_refused() {
    for version in [json!(2), json!(0), json!("1"), json!(null)] {
        let folder = TemporaryFolder::new("version").unwrap();
        let line = json!({ "type": "record", "version": version, "process": 7 });
        let input = folder.file("input", line.to_string().as_bytes());
        let error = read(&mut Diagram::default(), &input).unwrap_err();
        assert!(
            error.to_string().ends_with("this command reads 1"),
            "{error}"
        );
    }
}

#[test]
fn events_around_errors_and_at_both_ends_are_kept() {
    let first = r#"{"type":"record","version":1,"process":7,"program":"a","start":1}"#;
    let mut lines = format!("{first}\n");
    const COUNT: u64 = 30_000;
    let errors = [9_999, 20_000];
    for time in 0..COUNT {
        let status = match errors.contains(&time) {
            true => "remote access error",
            false => "success",
        };
        lines.push_str(&record_line(time, status));
    }
    let (about, entries) = TemporaryFolder::new("many").unwrap().page(lines.as_bytes());
    assert_eq!(about["entries"], COUNT);
    assert!((1_000..COUNT as usize).contains(&entries.len()));
    let times: Vec<u64> = entries.iter().map(|it| it["t"].as_u64().unwrap()).collect();
    assert!(times.is_sorted());
    for kept in [0, 500, 9_990, 9_999, 10_005, 20_000, COUNT - 500, COUNT - 1] {
        assert!(times.contains(&kept), "{kept}");
    }
    let gaps = about["gaps"].as_array().unwrap();
    let left_out: u64 = gaps.iter().map(|it| it[1].as_u64().unwrap()).sum();
    assert_eq!(left_out + entries.len() as u64, COUNT);
    for gap in gaps {
        let at = gap[0].as_u64().unwrap() as usize;
        assert_eq!(times[at] - times[at - 1] - 1, gap[1].as_u64().unwrap());
    }
}

#[test]
fn text_of_programs_is_text() {
    const HOSTILE: &str =
        "</script><script>alert(1)</script><!--about--><img src=x>\u{202e}\x1b[2J";
    let line = |kind: &str| {
        json!({ "type": kind, "time": 1, "process": 7, "program": HOSTILE, "device": HOSTILE,
            "call": HOSTILE, "opcode": HOSTILE, "status": HOSTILE, "message": HOSTILE,
            "other_end": HOSTILE, "arguments": { HOSTILE: HOSTILE }, "errno": 22,
            HOSTILE: { "stack": [{ "function": HOSTILE, "file": HOSTILE }] } })
        .to_string()
    };
    let kinds = ["record", "call", "post", "completion", "report"];
    let text: Vec<String> = kinds.iter().map(|kind| line(kind)).collect();
    let folder = TemporaryFolder::new("hostile").unwrap();
    let mut diagram = Diagram::default();
    read(
        &mut diagram,
        &folder.file("lines", text.join("\n").as_bytes()),
    )
    .unwrap();
    let comment = format!("process 7 ({HOSTILE}), mlx5_0 queue pair 0x1; {HOSTILE}");
    let frames = capture(&[(10, true, send_only(2, 1), &comment)]);
    read(&mut diagram, &folder.file("frames", &frames)).unwrap();
    diagram.join();
    let (page, _) = render(&diagram);
    assert_eq!(page.matches("<script").count(), 3);
    assert!(!page.contains("<img") && !page.contains('\u{202e}') && !page.contains('\x1b'));
    let (_, entries) = data(&page);
    assert_eq!(entries.len(), 5);
    assert!(
        entries
            .iter()
            .all(|it| it["e"].as_str().unwrap().starts_with("</script>")
                || it["e"].as_str().unwrap().contains("EINVAL"))
    );
}

#[test]
fn any_byte_may_be_wrong() {
    let folder = TemporaryFolder::new("bytes").unwrap();
    let whole = capture(&[
        (10, true, send_only(2, 1), SENDER),
        (20, false, send_only(2, 1), RECEIVER),
    ]);
    for at in 0..whole.len() {
        let mut content = whole.clone();
        content[at] ^= 0xff;
        let mut diagram = Diagram::default();
        // An error or another page, but no panic.
        let _ = read(&mut diagram, &folder.file("wrong", &content));
        diagram.join();
        data(&render(&diagram).0);
    }
    for text in [
        "{",
        "{}\nnull\n{\"type\":1}\n[[[",
        "{\"type\":\"post\",\"time\":-1}",
    ] {
        let (_, entries) = folder.page(text.as_bytes());
        assert!(entries.is_empty());
    }
    let refused = read(&mut Diagram::default(), &folder.file("text", b"plain"));
    assert!(
        refused
            .unwrap_err()
            .to_string()
            .contains("neither a capture")
    );
}
