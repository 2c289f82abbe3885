//! The reasons for which the bytes of the two providers may differ. Each is as narrow as
//! possible; docs/internals/mlx5.md has the same list.

use std::ops::Range;

/// Why a line differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// Queues of different size.
    Sizes,
    /// The immediate field of an operation without immediate data.
    NoImmediate,
    /// The compare operand of a fetch-and-add.
    NoCompare,
    /// The words after the remote SRQ number of an XRC work request.
    AfterSrqNumber,
    /// The block in the queue of a refused work request.
    RefusedBlock,
    /// The bytes after inline data in their last segment.
    InlinePadding,
    /// The bytes after a short IPoIB header.
    HeaderPadding,
    /// Key fields that a work request does not change.
    UnchangedKeyFields,
    /// Tag fields that a change of tags does not use.
    UnusedTagFields,
    /// The source port of a handle without a flow label.
    SourcePort,
    /// Elements of no bytes in a shared receive queue.
    EmptyElements,
    /// The errno of a refusal.
    Errno,
    /// The doorbell after a refused work request.
    RefusedDoorbell,
    /// Fields of the sender in a CQE with data.
    SenderInData,
    /// The P_Key index of a message with immediate data or a key.
    PkeyIndex,
    /// Data in a CQE of 128 bytes.
    LongCqe,
}

impl Reason {
    /// All reasons, in the order of the table.
    pub const ALL: [Self; 16] = [
        Self::Sizes,
        Self::NoImmediate,
        Self::NoCompare,
        Self::AfterSrqNumber,
        Self::RefusedBlock,
        Self::InlinePadding,
        Self::HeaderPadding,
        Self::UnchangedKeyFields,
        Self::UnusedTagFields,
        Self::SourcePort,
        Self::EmptyElements,
        Self::Errno,
        Self::RefusedDoorbell,
        Self::SenderInData,
        Self::PkeyIndex,
        Self::LongCqe,
    ];

    /// Returns the name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sizes => "capacity",
            Self::NoImmediate => "no immediate data",
            Self::NoCompare => "no compare operand",
            Self::AfterSrqNumber => "after the SRQ number",
            Self::RefusedBlock => "block of a refusal",
            Self::InlinePadding => "padding of inline data",
            Self::HeaderPadding => "padding of IPoIB headers",
            Self::UnchangedKeyFields => "unchanged key fields",
            Self::UnusedTagFields => "unused tag fields",
            Self::SourcePort => "source port",
            Self::EmptyElements => "empty elements",
            Self::Errno => "errno",
            Self::RefusedDoorbell => "doorbell after a refusal",
            Self::SenderInData => "sender of a CQE with data",
            Self::PkeyIndex => "P_Key index",
            Self::LongCqe => "data of a 128-byte CQE",
        }
    }

    /// Returns the explanation.
    pub fn explanation(self) -> &'static str {
        match self {
            Self::Sizes => {
                "each provider chooses the size of entries; both have the requested capacity"
            }
            Self::NoImmediate => {
                "an operation of ibv_wr_* without immediate data or key: the stock provider \
                 writes nothing, the plugin 0; the device does not read it"
            }
            Self::NoCompare => {
                "a fetch-and-add: the stock provider writes nothing, the plugin 0; the device \
                 does not read it"
            }
            Self::AfterSrqNumber => {
                "an XRC work request: the three words after the remote SRQ number are reserved; \
                 the stock provider writes nothing, the plugin 0"
            }
            Self::RefusedBlock => {
                "a refused work request: the stock provider has written to its block, which it \
                 does not publish; the plugin has not"
            }
            Self::InlinePadding => {
                "inline data: after it, up to the end of its last segment, the stock provider \
                 writes nothing, the plugin 0; the device does not read it"
            }
            Self::HeaderPadding => {
                "a datagram of an underlay queue pair with 4 bytes of headers in its WQE: in \
                 the room of the other 14 the stock provider writes nothing, the plugin 0"
            }
            Self::UnchangedKeyFields => {
                "a window bind or a local invalidate: in key fields that the mask does not name \
                 the stock provider writes nothing, the plugin 0; the device does not read them"
            }
            Self::UnusedTagFields => {
                "a change of tags: in reserved fields, and those that it does not use, the stock \
                 provider writes nothing, the plugin 0; the device does not read them"
            }
            Self::SourcePort => {
                "RoCE version 2 without a flow label: both choose a port from 0xc000 on, the \
                 same for all packets of the address handle"
            }
            Self::EmptyElements => {
                "the stock provider writes elements of no bytes into a shared receive queue; \
                 the plugin leaves them out, as both do elsewhere"
            }
            Self::Errno => {
                "too many elements, or too much inline data: EINVAL, as ibv_post_send(3) says; \
                 the stock provider returns ENOMEM"
            }
            Self::RefusedDoorbell => {
                "a list with a work request whose inline data is refused: the stock provider \
                 rings with its unfinished control segment, the plugin with the request before \
                 it"
            }
            Self::SenderInData => {
                "a receive whose data came in the first 32 bytes of its CQE: fields of the \
                 sender hold data there, of which the stock provider returns bytes, the plugin \
                 0"
            }
            Self::PkeyIndex => {
                "a message with immediate data or a key to invalidate, which share a field with \
                 the P_Key index: the stock provider returns its low half, the plugin 0"
            }
            Self::LongCqe => {
                "data of a read or an atomic in a CQE of 128 bytes: libmlx5 of rdma-core 44 \
                 reads it from the wrong offset, that of 65 as the plugin"
            }
        }
    }
}

/// A line that differs.
pub struct Difference<'a> {
    /// The case's first line.
    pub header: &'a str,
    /// The key of the line.
    pub key: &'a str,
    /// The line of the stock provider.
    pub stock: &'a str,
    /// The plugin's.
    pub ours: &'a str,
    /// The first work request of the case, as the plugin wrote it.
    pub entry: &'a str,
    /// Bytes of the work requests of the case before this one.
    pub start: usize,
}

/// A word that posting did not write.
const UNWRITTEN: &str = "--------";

/// Returns a byte of the pattern that the program fills queues with.
fn fill_pattern(at: usize) -> u8 {
    (at.wrapping_mul(167).wrapping_add(91) ^ at >> 8) as u8
}

/// Returns whether each byte of two words is equal, or was not written by the stock
/// provider and is 0 in the plugin's.
fn is_unwritten_or_equal(old: &str, new: &str, at: usize) -> bool {
    (0..4).all(|i| {
        let byte = |word: &str| word.get(i * 2..i * 2 + 2).map(str::to_owned);
        let filled = Some(format!("{:02x}", fill_pattern(at + i)));
        byte(old) == byte(new)
            || byte(new).as_deref() == Some("00") && (old == UNWRITTEN || byte(old) == filled)
    })
}

/// Returns the reasons that together explain the difference; `None` if a part of it is
/// unexplained.
pub fn reasons(difference: &Difference) -> Option<Vec<Reason>> {
    let mut words = difference.header.split(' ').skip(1);
    let kind = words.next()?;
    let what: Vec<&str> = words.skip(1).collect();
    let (subject, number) = difference
        .key
        .split_once(' ')
        .unwrap_or((difference.key, ""));
    let refusal = what.join(" ").strip_prefix("refused: ").map(str::to_owned);
    match subject {
        "sizes" => Some(vec![Reason::Sizes]),
        "posted" => errno(difference, refusal.as_deref()?),
        "shared" => equal_without_empty_elements(difference).then(|| vec![Reason::EmptyElements]),
        "entry" => {
            let place = match what.get(1) {
                // Each request has several entries.
                Some(request) if is_protection(request) => 0,
                _ => number.parse().ok()?,
            };
            let request = request(&what, refusal.is_some(), place)?;
            entry(difference, kind, request)
        }
        "register" if refusal.as_deref() == Some("too much inline data") => {
            // The first work request was posted alone, by BlueFlame or by its doorbell.
            let whole = difference.entry.get(..16)? == difference.ours.get(..16)?;
            (whole && uses_post_send(kind)).then(|| vec![Reason::RefusedDoorbell])
        }
        "register" => {
            // Only a work request that is posted alone uses BlueFlame.
            let request = request(&what, refusal.is_some(), 0)?;
            entry(difference, kind, request)
        }
        "stray" => {
            // Cases of protection include refused requests.
            let may_be_refused =
                refusal.is_some() || what.iter().any(|request| is_protection(request));
            (may_be_refused && difference.ours.is_empty()).then(|| vec![Reason::RefusedBlock])
        }
        "from" | "completion" | "data" => completion(difference, kind, &what.join(" "), subject),
        _ => None,
    }
}

/// Explains the differences of completions read from one place: each word that differs
/// needs a reason.
fn completion(
    difference: &Difference,
    shape: &str,
    what: &str,
    subject: &str,
) -> Option<Vec<Reason>> {
    let (stock, ours) = (difference.stock.split('|'), difference.ours.split('|'));
    if stock.clone().count() != ours.clone().count() {
        return None;
    }
    let mut reasons = Vec::new();
    for (stock, ours) in stock.zip(ours).filter(|(stock, ours)| stock != ours) {
        let reason = one_completion(&words(stock), &words(ours), shape, what, subject)?;
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    Some(reasons)
}

fn one_completion(
    stock: &[&str],
    ours: &[&str],
    shape: &str,
    what: &str,
    subject: &str,
) -> Option<Reason> {
    if stock.len() != ours.len() {
        return None;
    }
    let differ: Vec<usize> = (0..stock.len()).filter(|&i| stock[i] != ours[i]).collect();
    let in_completion = what.contains("in the completion of a receive");
    match (subject, &differ[..]) {
        // The sender: each name is followed by its number.
        ("from", _) if in_completion && ours == words(UNKNOWN_SENDER) => Some(Reason::SenderInData),
        ("from", [8]) if ours[8] == "0" && has_immediate_or_key(what) => Some(Reason::PkeyIndex),
        // The flag of a GRH, which is a field of the sender.
        ("completion", [at])
            if in_completion && at.checked_sub(1).is_some_and(|at| ours[at] == "flags") =>
        {
            let flags = |text: &str| text.parse::<u32>().ok();
            (flags(stock[*at])? == flags(ours[*at])? | 1).then_some(Reason::SenderInData)
        }
        ("data", [0]) if shape.starts_with("128") && is_requester_data(what) => {
            let untouched = |text: &str| -> Vec<bool> {
                let bytes = (0..text.len()).step_by(2);
                bytes.map(|at| text.get(at..at + 2) == Some("--")).collect()
            };
            (untouched(stock[0]) == untouched(ours[0])).then_some(Reason::LongCqe)
        }
        _ => None,
    }
}

/// The line of an unknown sender.
const UNKNOWN_SENDER: &str = "000000 lid 0 service 0 bits 0 key 0";

fn words(line: &str) -> Vec<&str> {
    line.split(' ').filter(|word| !word.is_empty()).collect()
}

/// Returns whether a case's messages have immediate data, or a key to be invalidated.
fn has_immediate_or_key(what: &str) -> bool {
    let kind = what.strip_prefix("receive of kind ");
    let kind: Option<u32> = kind.and_then(|kind| kind.parse().ok());
    // The second of every four kinds is a message without either.
    kind.is_some_and(|kind| kind % 4 != 1) || what.contains("receives, read by")
}

/// Returns whether the case is about data that the requester receives.
fn is_requester_data(what: &str) -> bool {
    what.contains("in the completion of a read") || what.starts_with("an atomic")
}

/// Returns whether the queue pair is posted to with `ibv_post_send`.
fn uses_post_send(kind: &str) -> bool {
    !kind.ends_with("-wr")
}

/// Returns the case's work request at `place`: its operation, its number of elements and
/// whether they are inline.
fn request<'a>(what: &[&'a str], refused: bool, place: usize) -> Option<&'a str> {
    if refused {
        return Some("send");
    }
    if what.first() != Some(&"post") {
        return None;
    }
    what.get(place + 1).copied()
}

/// Returns whether the work request sets the protection of a memory key.
fn is_protection(request: &str) -> bool {
    request.starts_with("key-protect/")
}

/// Returns whether the entry sets a PSV, by its opcode.
fn is_set_psv(entry: &str) -> bool {
    entry.get(6..8) == Some("20")
}

/// Explains the differences of an entry: each word that differs needs a reason. BlueFlame
/// copies the entry from the queue, including unwritten bytes.
fn entry(difference: &Difference, kind: &str, request: &str) -> Option<Vec<Reason>> {
    let operation = request.split('/').next()?;
    let padding = inline_padding(difference.ours, kind, request);
    if difference.stock.len() != difference.ours.len() {
        return None;
    }
    let (xrc, dc) = (kind.starts_with("xrc"), kind.starts_with("dc"));
    let changes_keys = matches!(operation, "bind" | "local-inv");
    // The work request of the key has it in this field; that of a PSV has nothing there.
    let is_key = is_protection(request) && !is_set_psv(difference.ours);
    let mut reasons = Vec::new();
    for at in (0..difference.stock.len()).step_by(8) {
        let old = difference.stock.get(at..at + 8)?;
        let new = difference.ours.get(at..at + 8)?;
        if old == new {
            continue;
        }
        let unwritten = is_unwritten_or_equal(old, new, difference.start + at / 2);
        let reason = match at / 2 {
            12 if unwritten && !uses_post_send(kind) && !has_immediate(operation) && !is_key => {
                Reason::NoImmediate
            }
            20..32 if unwritten && xrc && !changes_keys => Reason::AfterSrqNumber,
            // After the address, if there is one.
            40 | 44 if unwritten && !xrc && !dc && operation == "fetch-add" => Reason::NoCompare,
            56 | 60 if unwritten && xrc && operation == "fetch-add" => Reason::NoCompare,
            88 | 92 if unwritten && dc && operation == "fetch-add" => Reason::NoCompare,
            96..112 if unwritten && kind.starts_with("underlay") => Reason::HeaderPadding,
            64..128 if unwritten && changes_keys => Reason::UnchangedKeyFields,
            // Opcode, flags and index; the count; reserved; tag and mask.
            20..32 if unwritten && kind == "tags" => Reason::UnusedTagFields,
            16 if unwritten && kind == "tags" && operation == "sync" => Reason::UnusedTagFields,
            32..48 if unwritten && kind == "tags" && operation != "add" => Reason::UnusedTagFields,
            28 if kind.contains("roce") && differs_in_source_port(difference, at, old, new) => {
                Reason::SourcePort
            }
            word if unwritten && differs_only_in(&padding, word, old, new) => Reason::InlinePadding,
            _ => return None,
        };
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }
    (!reasons.is_empty()).then_some(reasons)
}

/// Returns the range of bytes after a work request's inline data in their last segment;
/// empty without inline data.
fn inline_padding(line: &str, kind: &str, request: &str) -> Range<usize> {
    let address = match kind.split('-').next() {
        Some("ud" | "dc") => 48,
        Some("underlay") => 96,
        Some("xrc") => 16,
        // Checksum flags, and the frame's headers if there are any.
        Some("packet") if line.get(56..60) == Some("0000") => 16,
        Some("packet") => 32,
        _ => 0,
    };
    let begin = address + if request.starts_with("write") { 32 } else { 16 };
    let word = line.get(begin * 2..begin * 2 + 8);
    let length = word.and_then(|word| u32::from_str_radix(word, 16).ok());
    match length {
        Some(length) if request.ends_with("/inline") && length >> 31 == 1 => {
            let end = begin + 4 + (length & 0x7fff_ffff) as usize;
            end..end.next_multiple_of(16)
        }
        _ => 0..0,
    }
}

/// Returns whether two words, which start at byte `at` of the entry, differ only in the
/// padding.
fn differs_only_in(padding: &Range<usize>, at: usize, old: &str, new: &str) -> bool {
    (0..4).all(|i| {
        let place = i * 2..i * 2 + 2;
        padding.contains(&(at + i)) || old.get(place.clone()) == new.get(place)
    })
}

fn has_immediate(operation: &str) -> bool {
    operation.ends_with("-imm") || operation.ends_with("-inv")
}

/// Returns whether the words with the source port of two address vectors differ only in
/// the port, and the address handle has no flow label.
fn differs_in_source_port(difference: &Difference, at: usize, old: &str, new: &str) -> bool {
    // Four words later: 2 bits, the GID index, and 20 bits of the label.
    let label = difference.ours.get(at + 35..at + 40);
    let port = |word: &str| matches!(word.as_bytes().get(4), Some(b'c'..=b'f'));
    label == Some("00000") && old.get(..4) == new.get(..4) && port(old) && port(new)
}

/// Returns whether ours is the stock provider's entry of a shared receive queue without
/// its empty elements.
fn equal_without_empty_elements(difference: &Difference) -> bool {
    const SEGMENT: usize = 32;
    const END: &str = "00000000000001000000000000000000";
    let (Some((old_head, old)), Some((new_head, new))) = (
        difference.stock.split_at_checked(SEGMENT),
        difference.ours.split_at_checked(SEGMENT),
    ) else {
        return false;
    };
    let room = old.len() / SEGMENT;
    // The elements up to the list's end.
    fn list(text: &str) -> Vec<&str> {
        let all = (0..text.len()).step_by(SEGMENT);
        all.filter_map(|at| text.get(at..at + SEGMENT))
            .take_while(|segment| *segment != END)
            .collect()
    }
    let kept: Vec<&str> = list(old)
        .into_iter()
        .filter(|segment| !segment.starts_with("00000000"))
        .collect();
    let ours = list(new);
    // The list of ours is shorter, so its end must be present.
    old_head == new_head && old.len() == new.len() && ours == kept && ours.len() < room
}

/// Explains a difference in the errno of a refusal.
fn errno(difference: &Difference, refusal: &str) -> Option<Vec<Reason>> {
    let (old, old_rest) = difference.stock.split_once(' ')?;
    let (new, new_rest) = difference.ours.split_once(' ')?;
    let known = matches!(refusal, "too many elements" | "too much inline data");
    (known && (old, new) == ("12", "22") && old_rest == new_rest).then(|| vec![Reason::Errno])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reasons_for(header: &str, key: &str, stock: &str, ours: &str) -> Option<Vec<Reason>> {
        reasons(&Difference {
            header,
            key,
            stock,
            ours,
            entry: "0000030a00004801",
            start: 0,
        })
    }

    #[test]
    fn only_unused_immediate_fields_may_differ() {
        let (stock, ours) = (
            "0000000a0000490100000080--------",
            "0000000a000049010000008000000000",
        );
        let reasons = |header| reasons_for(header, "entry 0", stock, ours);
        assert_eq!(
            reasons("case rc-1-wr 1 post send/1"),
            Some(vec![Reason::NoImmediate])
        );
        assert_eq!(reasons("case rc-1-wr 1 post send-imm/1"), None);
        assert_eq!(reasons("case rc-1 1 post send/1"), None);
        // A difference in another word.
        let ours = ours.replace("00000080", "00000082");
        assert_eq!(
            reasons_for("case rc-1-wr 1 post send/1", "entry 0", stock, &ours),
            None
        );
        // A value other than 0.
        let ours = "0000000a000049010000008000000001";
        assert_eq!(
            reasons_for("case rc-1-wr 1 post send/1", "entry 0", stock, ours),
            None
        );
    }

    #[test]
    fn only_unwritten_bytes_after_an_srq_number_may_differ() {
        let text = |number: &str, rest: &str| format!("{:032}{number}{rest}", 0);
        let unwritten = UNWRITTEN.repeat(3);
        let zeros = "0".repeat(24);
        let explain = |header, number: &str| {
            let (stock, ours) = (text("00123456", &unwritten), text(number, &zeros));
            reasons_for(header, "entry 0", &stock, &ours)
        };
        let header = "case xrc-3 1 post send/1";
        assert_eq!(
            explain(header, "00123456"),
            Some(vec![Reason::AfterSrqNumber])
        );
        assert_eq!(explain(header, "00123457"), None);
        assert_eq!(explain("case xrc-keys 1 post bind/0", "00123456"), None);
        assert_eq!(explain("case rc-4 1 post send/1", "00123456"), None);
    }

    #[test]
    fn only_unwritten_bytes_after_inline_data_may_differ() {
        let explain = |header: &str, length: &str, stock: &str, ours: &str| {
            let text = |word: &str| format!("{:032}{length}aabbccdd{word}", 0);
            reasons_for(header, "entry 0", &text(stock), &text(ours))
        };
        // The last of 7 bytes, which start at byte 20, is byte 26.
        let left = format!("112233{:02x}", fill_pattern(27));
        let (other, ours) = (format!("112233{:02x}", !fill_pattern(27)), "11223300");
        let header = "case rc-4 1 post send/1/inline";
        let expected = Some(vec![Reason::InlinePadding]);
        assert_eq!(explain(header, "80000007", &left, ours), expected);
        assert_eq!(explain(header, "80000007", &other, ours), None);
        // A byte of the data.
        assert_eq!(explain(header, "80000008", &left, ours), None);
        assert_eq!(explain(header, "80000007", &left, "11223200"), None);
        // Not inline.
        assert_eq!(
            explain("case rc-4 1 post send/1", "80000007", &left, ours),
            None
        );
        assert_eq!(explain(header, "00000007", &left, ours), None);
        assert_eq!(
            explain("case rc-4-wr 1 post send/1/inline", "80000007", &left, ours),
            expected
        );
    }

    #[test]
    fn only_unwritten_bytes_of_a_key_may_differ() {
        let header = "case rc-keys 1 post bind/0";
        let explain = |stock: &str, ours: &str| {
            let text = |word: &str| format!("{:0128}{word}", 0);
            reasons_for(header, "register this", &text(stock), &text(ours))
        };
        // The pattern's bytes 64 to 67: 0x1b, 0xc2, 0x69, 0x10.
        assert_eq!(
            explain("40c26910", "40000000"),
            Some(vec![Reason::UnchangedKeyFields])
        );
        assert_eq!(
            explain("--------", "00000000"),
            Some(vec![Reason::UnchangedKeyFields])
        );
        assert_eq!(explain("40c26911", "40000000"), None);
        assert_eq!(explain("40c26910", "41000000"), None);
        assert_eq!(explain("40c26910", "40000001"), None);
    }

    #[test]
    fn only_unused_fields_of_a_change_of_tags_may_differ() {
        let explain = |header: &str, at: usize, stock: &str| {
            let text = |word: &str| format!("{:0at$}{word}", 0, at = at * 2);
            reasons_for(header, "entry 0", &text(stock), &text("00000000"))
        };
        let expected = Some(vec![Reason::UnusedTagFields]);
        let (add, del) = ("case tags 1 post add/1", "case tags 1 post del/0");
        // Reserved, the tag, and the index.
        assert_eq!(explain(add, 24, UNWRITTEN), expected);
        assert_eq!(explain(add, 32, UNWRITTEN), None);
        assert_eq!(explain(del, 32, UNWRITTEN), expected);
        assert_eq!(explain(del, 16, UNWRITTEN), None);
        assert_eq!(explain("case tags 1 post sync/0", 16, UNWRITTEN), expected);
        // Another queue, or a written field.
        assert_eq!(explain("case rc-1 1 post send/1", 24, UNWRITTEN), None);
        assert_eq!(explain(add, 24, "00000001"), None);
    }

    #[test]
    fn only_empty_elements_may_be_omitted() {
        let head = "0000....000000000000000000000000";
        let end = "00000000000001000000000000000000";
        let empty = "00000000123456780000100000000000";
        let full = "00000010123456780000100000000000";
        let header = "case rc-turn 1 shared receives";
        let explain = |stock: [&str; 2], ours: [&str; 2]| {
            let text = |parts: [&str; 2]| format!("{head}{}{}", parts[0], parts[1]);
            reasons_for(header, "shared 0", &text(stock), &text(ours))
        };
        assert_eq!(
            explain([empty, full], [full, end]),
            Some(vec![Reason::EmptyElements])
        );
        assert_eq!(explain([empty, full], [end, end]), None);
        assert_eq!(explain([full, full], [full, end]), None);
        assert_eq!(explain([full, end], [full, full]), None);
    }

    #[test]
    fn source_ports_may_differ_only_without_a_flow_label() {
        let vector =
            |port: &str, label: &str| format!("{:056}0400{port}{:024}00{label}{:08}", 0, 0, 0);
        let header = "case ud-roce 1 post send/1";
        let explain = |label: &str, ports: [&str; 2]| {
            reasons_for(
                header,
                "entry 0",
                &vector(ports[0], label),
                &vector(ports[1], label),
            )
        };
        assert_eq!(
            explain("100000", ["c062", "ed39"]),
            Some(vec![Reason::SourcePort])
        );
        assert_eq!(explain("100001", ["c062", "ed39"]), None);
        assert_eq!(explain("100000", ["c062", "1d39"]), None);
    }

    #[test]
    fn only_the_errno_of_a_refusal_may_differ() {
        let header = "case rc-1 1 refused: too many elements";
        let explain = |ours| reasons_for(header, "posted", "12 1 1 00000067", ours);
        assert_eq!(explain("22 1 1 00000067"), Some(vec![Reason::Errno]));
        assert_eq!(explain("22 1 1 00000068"), None);
        assert_eq!(explain("0 -1 1 00000067"), None);
    }

    #[test]
    fn only_fields_inside_the_data_of_a_completion_may_differ() {
        let header = "case 64 1 own: 5 bytes in the completion of a receive, list 0";
        let sender = "595a5b lid 22103 service 8 bits 81 key 0";
        let explain = |header, ours| reasons_for(header, "from 0", sender, ours);
        assert_eq!(
            explain(header, UNKNOWN_SENDER),
            Some(vec![Reason::SenderInData])
        );
        let half = "000000 lid 22103 service 0 bits 0 key 0";
        assert_eq!(explain(header, half), None);
        assert_eq!(explain("case 64 1 receive of kind 1", UNKNOWN_SENDER), None);
        let line = |flags| {
            format!("0000000000002425 status 0 number 72 opcode 128 bytes 5 flags {flags} extra 0")
        };
        let explain = |stock, ours| reasons_for(header, "completion 0", &line(stock), &line(ours));
        assert_eq!(explain(1, 0), Some(vec![Reason::SenderInData]));
        assert_eq!(explain(0, 1), None);
        assert_eq!(explain(3, 0), None);
    }

    #[test]
    fn a_pkey_index_may_differ_only_with_an_immediate_or_key() {
        let (stock, ours) = (
            "123450 lid 1 service 2 bits 3 key 50128",
            "123450 lid 1 service 2 bits 3 key 0",
        );
        let explain = |kind: u32, ours| {
            let header = format!("case 64 1 receive of kind {kind}");
            reasons_for(&header, "from 0", stock, ours)
        };
        assert_eq!(explain(2, ours), Some(vec![Reason::PkeyIndex]));
        assert_eq!(explain(5, ours), None);
        assert_eq!(explain(2, "123450 lid 1 service 2 bits 3 key 1"), None);
        assert_eq!(explain(2, "123451 lid 1 service 2 bits 3 key 0"), None);
    }

    #[test]
    fn data_of_a_128_byte_cqe_may_differ_only_in_values() {
        let explain = |shape: &str, ours| {
            let header = format!("case {shape} 1 own: 2 bytes in the completion of a read, list 0");
            reasons_for(&header, "data", "--0000----", ours)
        };
        assert_eq!(explain("128", "--4041----"), Some(vec![Reason::LongCqe]));
        assert_eq!(explain("64", "--4041----"), None);
        assert_eq!(explain("128", "--404142--"), None);
    }

    #[test]
    fn the_documentation_has_every_reason() {
        let page = include_str!("../../../../docs/internals/mlx5.md");
        for reason in Reason::ALL {
            assert!(
                page.contains(&format!("| {} |", reason.name())),
                "docs/internals/mlx5.md lacks the reason {:?}",
                reason.name()
            );
        }
    }
}
