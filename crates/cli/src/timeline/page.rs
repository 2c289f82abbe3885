//! The page: as many entries as it has room for, as JSON for its script.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use embedded::roce::pcap::Direction;
use serde_json::{Value, json};

use super::diagram::{Diagram, Entry, Event, MAX_EVENTS, What};
use super::packet::PacketKind;
use super::record::{Line, LineKind, Severity, cut};
use crate::escape::escaped;

/// Largest page in bytes.
pub const MAX_PAGE: usize = 1_000_000;
/// Bytes reserved for a gap after each entry, and for totals.
const GAP: usize = 24;
const RESERVED: usize = 4096;
/// Entries before and after one with an error that are kept.
const NEIGHBOURS: usize = 12;
/// Explanations without a time that are shown.
const MAX_UNTIMED: usize = 50;
/// Longest text of an error.
const MAX_ERROR: usize = 1000;

const TEMPLATE: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Numbers of events that a page shows and leaves out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub entries: usize,
    pub shown: usize,
    pub errors: usize,
    pub warnings: usize,
    pub queues: usize,
}

/// Text of a page: visible, and of limited length.
fn text(text: &str, most: usize) -> Value {
    Value::String(cut(&escaped(text).to_string(), most))
}

/// Chooses entries by their costs until the budget is used: of the first and last ones, of those
/// with errors and around them, then from both ends.
fn choose(
    severities: &[Severity],
    budget: usize,
    mut cost: impl FnMut(usize) -> usize,
) -> Vec<bool> {
    let count = severities.len();
    let mut kept = vec![false; count];
    let mut left = budget;
    // Returns whether there is still room.
    let mut take = |index: usize, reserve: usize| {
        if kept.get(index).is_none_or(|kept| *kept) {
            return true;
        }
        let cost = cost(index);
        if cost + reserve > left {
            return false;
        }
        left -= cost;
        kept[index] = true;
        true
    };
    // From both ends towards the middle.
    let inwards = |length: usize| {
        (0..length).map(move |it| {
            if it % 2 == 0 {
                it / 2
            } else {
                length - 1 - it / 2
            }
        })
    };
    inwards(count).all(|index| take(index, budget - budget / 4));
    for least in [Severity::Error, Severity::Warning] {
        let marked: Vec<usize> = (0..count).filter(|it| severities[*it] == least).collect();
        for distance in 0..=NEIGHBOURS {
            inwards(marked.len()).all(|it| {
                let index = marked[it];
                index
                    .checked_sub(distance)
                    .is_none_or(|before| take(before, 0))
                    && take(index + distance, 0)
            });
        }
    }
    inwards(count).all(|index| take(index, 0));
    kept
}

/// Adds `<` in another way, so that no text ends the script or begins a comment.
fn for_script(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c")
}

/// Renders entries.
struct Renderer<'a> {
    diagram: &'a Diagram,
    start: u64,
    /// The places of lanes in the page, and its lanes in order.
    places: HashMap<usize, usize>,
    lanes: Vec<usize>,
}

impl Renderer<'_> {
    fn place(&mut self, lane: usize) -> usize {
        *self.places.entry(lane).or_insert_with(|| {
            self.lanes.push(lane);
            self.lanes.len() - 1
        })
    }

    fn time(&self, event: &Event) -> u64 {
        event.time.saturating_sub(self.start)
    }

    /// Returns an entry of the page; see page.js for its members.
    fn entry(&mut self, entry: &Entry) -> Value {
        let diagram = self.diagram;
        let event = &diagram.events[entry.event];
        let place = self.place(event.lane);
        let mut value = json!({ "t": self.time(event), "a": place });
        match &event.what {
            What::Line(kind, line) => {
                value["k"] = match kind {
                    LineKind::Call => "call",
                    LineKind::Post => "post",
                    LineKind::Receive => "receive",
                    LineKind::Completion => "completion",
                    LineKind::Report => "report",
                }
                .into();
                if let Some(line) = serde_json::from_str(line).ok().and_then(Line::new) {
                    let label = match entry.following {
                        0 => line.label(),
                        more => format!("{} receives, first: {}", more + 1, line.label()),
                    };
                    value["l"] = text(&label, 80);
                    value["f"] = fields(line.fields());
                }
            }
            What::Packet(packet, direction) => {
                value["k"] = match packet.kind() {
                    PacketKind::Data => "data",
                    PacketKind::Acknowledgement => "ack",
                    PacketKind::Nak => "nak",
                    PacketKind::Management => "cm",
                    PacketKind::Other => "other",
                }
                .into();
                let mut label = packet.label();
                if entry.is_repeated {
                    label.push_str(", again");
                    value["r"] = 1.into();
                }
                value["l"] = text(&label, 80);
                value["f"] = fields(packet.fields());
                if *direction == Direction::Inbound {
                    value["in"] = 1.into();
                }
                if let Some(other) = entry.other_lane {
                    value["b"] = self.place(other).into();
                }
                if let Some(arrival) = entry.arrival {
                    value["u"] = self.time(&diagram.events[arrival]).into();
                }
                if entry.is_lost {
                    value["x"] = 1.into();
                }
            }
        }
        let arrival = entry.arrival.map(|it| &diagram.events[it]);
        let cause = event
            .cause
            .as_ref()
            .or(arrival.and_then(|it| it.cause.as_ref()));
        match cause {
            Some(cause) => value["e"] = text(cause, MAX_ERROR),
            None if entry.is_lost => value["e"] = "no reception was captured".into(),
            None => {}
        }
        match entry.severity {
            Severity::Normal => {}
            Severity::Warning => value["s"] = 1.into(),
            Severity::Error => value["s"] = 2.into(),
        }
        value
    }

    /// Returns the length of what the page has of a lane.
    fn lane_length(&self, place: u64) -> usize {
        let lane = usize::try_from(place)
            .ok()
            .and_then(|it| self.lanes.get(it));
        lane.map_or(0, |lane| for_script(&self.lane(*lane)).len() + 1)
    }

    fn lane(&self, lane: usize) -> Value {
        let lane = &self.diagram.lanes[lane];
        let title = match (lane.queue, &lane.peer) {
            (Some(queue), _) => format!("QP {queue:#x}"),
            (None, _) => "no queue pair".to_owned(),
        };
        let owner = match (lane.process, &lane.peer) {
            (Some(process), _) => format!("{} {process}", lane.program),
            (None, Some(address)) => format!("not captured {address}"),
            (None, None) => String::new(),
        };
        let device = lane.device.as_deref().unwrap_or_default();
        json!({ "title": title, "owner": text(owner.trim(), 60), "device": text(device, 40),
            "queue": lane.queue.is_some() })
    }
}

fn fields<N: AsRef<str>>(list: Vec<(N, String)>) -> Value {
    let list = list.iter();
    list.map(|(name, value)| json!([text(name.as_ref(), 60), text(value, 500)]))
        .collect()
}

/// Returns the page, and what it shows.
pub fn render(diagram: &Diagram) -> (String, Totals) {
    let entries = &diagram.entries;
    let start = diagram.events.first().map_or(0, |event| event.time);
    let mut renderer = Renderer {
        diagram,
        start,
        places: HashMap::new(),
        lanes: Vec::new(),
    };
    let untimed: Vec<Value> = diagram
        .untimed
        .iter()
        .take(MAX_UNTIMED)
        .map(untimed)
        .collect();
    let untimed_count = diagram.untimed.len();
    let untimed = Value::from(untimed);
    let fixed = TEMPLATE.len() + STYLE.len() + SCRIPT.len() + for_script(&untimed).len() + RESERVED;
    let severities: Vec<Severity> = entries.iter().map(|entry| entry.severity).collect();
    let mut rendered: HashMap<usize, String> = HashMap::new();
    let mut seen = HashSet::new();
    let kept = choose(&severities, MAX_PAGE - fixed, |index| {
        let value = renderer.entry(&entries[index]);
        let lanes = [&value["a"], &value["b"]];
        let lanes = lanes.into_iter().filter_map(Value::as_u64);
        let new = lanes.filter(|lane| seen.insert(*lane));
        let new: usize = new.map(|place| renderer.lane_length(place)).sum();
        let line = for_script(&value);
        let cost = line.len() + GAP + new;
        rendered.insert(index, line);
        cost
    });
    let mut list = String::new();
    let mut gaps = Vec::new();
    let mut shown = 0;
    let mut skipped = 0;
    for (index, _) in kept.iter().enumerate() {
        if !kept[index] {
            skipped += 1;
            continue;
        }
        if skipped > 0 {
            gaps.push(json!([shown, skipped]));
            skipped = 0;
        }
        if shown > 0 {
            list.push(',');
        }
        list.push_str(rendered.get(&index).map_or("{}", |it| it));
        shown += 1;
    }
    let count = |severity| severities.iter().filter(|it| **it == severity).count();
    let queues = diagram
        .lanes
        .iter()
        .filter(|it| it.queue.is_some() && it.peer.is_none());
    let totals = Totals {
        entries: entries.len(),
        shown,
        errors: count(Severity::Error),
        warnings: count(Severity::Warning),
        queues: queues.count(),
    };
    let lanes: Value = renderer
        .lanes
        .iter()
        .map(|lane| renderer.lane(*lane))
        .collect();
    let about = json!({
        "start": start.to_string(),
        "lanes": lanes,
        "gaps": gaps,
        "entries": totals.entries,
        "errors": totals.errors,
        "warnings": totals.warnings,
        "untimed": untimed,
        "untimed_count": untimed_count,
        "malformed_lines": diagram.malformed_lines,
        "most": if diagram.is_cut { MAX_EVENTS } else { 0 },
    });
    let mut page = String::with_capacity(MAX_PAGE);
    let mut rest = TEMPLATE;
    while let Some((before, after)) = rest.split_once("<!--") {
        let Some((name, after)) = after.split_once("-->") else {
            break;
        };
        page.push_str(before);
        match name {
            "style" => page.push_str(STYLE),
            "script" => page.push_str(SCRIPT),
            "about" => page.push_str(&for_script(&about)),
            // Writing to a string does not fail.
            _ => drop(write!(page, "[{list}]")),
        }
        rest = after;
    }
    page.push_str(rest);
    (page, totals)
}

/// Returns an explanation without a time.
fn untimed(line: &Line) -> Value {
    let process = &line.value["process"];
    let queue = line
        .queue()
        .map_or(String::new(), |it| format!(", QP {it:#x}"));
    json!({
        "where": text(&format!("process {process}{queue}"), 80),
        "e": text(&line.error().unwrap_or_default(), MAX_ERROR),
        "f": fields(line.fields()),
    })
}
