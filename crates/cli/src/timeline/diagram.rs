//! The events of several processes in order of time, and the arrows between them.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::Path;

use embedded::roce::pcap::Direction;
use serde_json::Value;

use super::VERSION;
use super::packet::{Packet, PacketKind};
use super::record::{Line, LineKind, Severity, cut, number};
use crate::capture::reader::{Frame, ReadError, Reader};

/// Most events that are read.
pub const MAX_EVENTS: usize = 2_000_000;
/// Clocks of hosts may differ so much that a packet seems to arrive before it was sent.
const MAX_CLOCK_DIFFERENCE: u64 = 1_000_000_000;
/// Longest name of a program or device.
const MAX_NAME: usize = 40;

/// A vertical line: a queue pair of a process, or what is of none of its queue pairs.
#[derive(Clone, PartialEq, Eq)]
pub struct Lane {
    pub process: Option<u32>,
    pub program: String,
    pub device: Option<String>,
    pub queue: Option<u32>,
    /// The address of a peer of which there is no capture.
    pub peer: Option<String>,
}

/// The kind of an event, with its data.
pub enum What {
    /// A frame was sent or received.
    Packet(Box<Packet>, Direction),
    /// A line of a record or explanation.
    Line(LineKind, Box<str>),
}

/// An event.
pub struct Event {
    /// Nanoseconds since 1970.
    pub time: u64,
    pub lane: usize,
    pub what: What,
    pub severity: Severity,
    /// Why a frame was dropped, a request refused, or a work request failed.
    pub cause: Option<Box<str>>,
}

/// An arrow or a mark of a diagram.
pub struct Entry {
    /// The event that begins it, in [`Diagram::events`].
    pub event: usize,
    /// The reception of a frame that was sent.
    pub arrival: Option<usize>,
    /// The lane at the other end of an arrow.
    pub other_lane: Option<usize>,
    /// Whether the same was sent before.
    pub is_repeated: bool,
    /// Whether the frame is lost: the destination has received later ones.
    pub is_lost: bool,
    /// Receives that were posted after this one, with nothing between.
    pub following: usize,
    pub severity: Severity,
}

/// The events of all inputs.
#[derive(Default)]
pub struct Diagram {
    pub lanes: Vec<Lane>,
    pub events: Vec<Event>,
    pub entries: Vec<Entry>,
    /// Explanations without a time.
    pub untimed: Vec<Line>,
    /// Whether there were more events than are read.
    pub is_cut: bool,
    /// Lines that are no JSON, such as the last one of a killed process.
    pub malformed_lines: usize,
    lane_numbers: HashMap<(Option<u32>, Option<u32>), Vec<usize>>,
    programs: HashMap<u32, String>,
}

/// The process and queue pair in a frame's comment, and its causes.
fn read_comment<'a>(
    comment: &'a str,
    device: &str,
) -> Option<(u32, &'a str, Option<u32>, &'a str)> {
    let (process, rest) = comment.strip_prefix("process ")?.split_once(" (")?;
    let (program, rest) = rest.split_once(&format!("), {device}"))?;
    let (queue, causes) = match rest.split_once("; ") {
        Some((queue, causes)) => (queue, causes),
        None => (rest, ""),
    };
    let queue = queue.strip_prefix(" queue pair 0x");
    let queue = queue.and_then(|digits| u32::from_str_radix(digits, 16).ok());
    Some((process.parse().ok()?, program, queue, causes))
}

/// How bad the causes in a frame's comment are.
fn severity_of(causes: &str) -> Severity {
    const REPAIRED: [&str; 4] = ["packet dropped", "frame dropped", "not ready", "no receive"];
    match causes {
        "" => Severity::Normal,
        causes if REPAIRED.iter().any(|it| causes.contains(it)) => Severity::Warning,
        _ => Severity::Error,
    }
}

impl Diagram {
    /// Returns the lane of a queue pair. A record may name it without its device.
    fn lane(&mut self, process: Option<u32>, device: Option<&str>, queue: Option<u32>) -> usize {
        let device = device.map(|name| cut(name, MAX_NAME));
        let known = self.lane_numbers.entry((process, queue)).or_default();
        for &number in known.iter() {
            let lane = &mut self.lanes[number];
            match (&lane.device, &device) {
                (None, Some(_)) => lane.device = device,
                (Some(of_lane), Some(wanted)) if of_lane != wanted => continue,
                _ => {}
            }
            return number;
        }
        let number = self.lanes.len();
        known.push(number);
        let program = process.and_then(|it| self.programs.get(&it).cloned());
        self.lanes.push(Lane {
            process,
            program: program.unwrap_or_default(),
            device,
            queue,
            peer: None,
        });
        number
    }

    /// Learns the name of a process's program.
    fn learn_program(&mut self, process: u32, program: &str) {
        let programs = &mut self.programs;
        programs
            .entry(process)
            .or_insert_with(|| cut(program, MAX_NAME));
    }

    fn has_room(&mut self) -> bool {
        self.is_cut |= self.events.len() >= MAX_EVENTS;
        !self.is_cut
    }

    /// Adds the frames of a capture.
    pub fn read_capture(&mut self, path: &Path) -> Result<(), ReadError> {
        let mut reader = Reader::open(path)?;
        while let Some(time) = reader.advance()? {
            if !self.has_room() {
                return Ok(());
            }
            if let Some(frame) = reader.frame() {
                self.add_frame(time, &frame);
            }
        }
        Ok(())
    }

    fn add_frame(&mut self, time: u64, frame: &Frame) {
        let packet = Packet::read(frame);
        let comment = read_comment(&frame.comment, &frame.device);
        let (process, queue, causes) = match comment {
            Some((process, program, queue, causes)) => {
                self.learn_program(process, program);
                (Some(process), queue, causes)
            }
            None => (None, None, ""),
        };
        let direction = frame.direction.unwrap_or(Direction::Outbound);
        let severity = match packet.kind() {
            PacketKind::Nak if packet.is_fatal() => Severity::Error,
            PacketKind::Nak => Severity::Warning,
            _ => Severity::Normal,
        };
        let event = Event {
            time,
            lane: self.lane(process, Some(&frame.device), queue),
            what: What::Packet(Box::new(packet), direction),
            severity: severity.max(severity_of(causes)),
            cause: (!causes.is_empty()).then(|| causes.into()),
        };
        self.events.push(event);
    }

    /// Adds a line of a record or explanation. `process` is that of the record. Returns the
    /// line's version if it is not known.
    pub fn read_line(&mut self, text: &str, process: &mut Option<u32>) -> Option<String> {
        let Ok(value) = serde_json::from_str::<Value>(text) else {
            self.malformed_lines += 1;
            return None;
        };
        if value
            .get("version")
            .is_some_and(|version| *version != VERSION)
        {
            return Some(cut(&value["version"].to_string(), 40));
        }
        let own = number(&value["process"]).and_then(|it| u32::try_from(it).ok());
        if value["type"] == "record" {
            *process = own;
            if let (Some(own), Some(program)) = (own, value["program"].as_str()) {
                self.learn_program(own, program);
            }
            return None;
        }
        let time = number(&value["time"]);
        let line = Line::new(value).filter(|_| self.has_room())?;
        let Some(time) = time else {
            self.untimed.push(line);
            return None;
        };
        let device = line.value["device"].as_str();
        let event = Event {
            time,
            lane: self.lane(own.or(*process), device, line.queue()),
            severity: line.severity(),
            cause: line.error().map(Into::into),
            what: What::Line(line.kind, text.into()),
        };
        self.events.push(event);
        None
    }

    /// Leaves out explanations of what captured frames tell as well.
    fn remove_repetitions(&mut self) {
        let has_frames = (self.events.iter()).any(|it| matches!(it.what, What::Packet(..)));
        if has_frames {
            let is_told = |event: &Event| {
                matches!(event.what, What::Line(LineKind::Report, _))
                    && event.severity == Severity::Warning
            };
            self.events.retain(|event| !is_told(event));
            self.untimed
                .retain(|line| line.severity() == Severity::Error);
        }
    }

    /// Orders the events by time, and joins frames that were sent with those that were received.
    pub fn join(&mut self) {
        self.remove_repetitions();
        self.events.sort_by_key(|event| event.time);
        for lane in &mut self.lanes {
            let program = lane.process.and_then(|it| self.programs.get(&it));
            lane.program = program.cloned().unwrap_or_default();
        }
        let origins = self.origins();
        let mut arrivals: HashMap<usize, Vec<usize>> = HashMap::new();
        for (arrival, origin) in &origins {
            arrivals.entry(*origin).or_default().push(*arrival);
        }
        let last_arrivals = self.last_arrivals();
        let peers = self.peers(&origins);
        let mut sent = HashSet::new();
        let mut entries = Vec::with_capacity(self.events.len());
        for (index, event) in self.events.iter().enumerate() {
            let mut entry = Entry {
                event: index,
                arrival: None,
                other_lane: None,
                is_repeated: false,
                is_lost: false,
                following: 0,
                severity: event.severity,
            };
            if let What::Packet(packet, direction) = &event.what {
                if *direction == Direction::Inbound {
                    if !origins.contains_key(&index) {
                        entries.push(entry);
                    }
                    continue;
                }
                entry.is_repeated =
                    !sent.insert((event.lane, packet.key)) && packet.is_repeatable();
                if entry.is_repeated {
                    entry.severity = entry.severity.max(Severity::Warning);
                }
                let peer = packet.destination_queue.map(|queue| (event.lane, queue));
                entry.other_lane = peer.and_then(|peer| peers.get(&peer).copied());
                if let Some(all) = arrivals.get(&index) {
                    for (number, &arrival) in all.iter().enumerate() {
                        let of_arrival = &self.events[arrival];
                        entries.push(Entry {
                            arrival: Some(arrival),
                            other_lane: Some(of_arrival.lane),
                            is_repeated: entry.is_repeated || number > 0,
                            severity: entry.severity.max(of_arrival.severity),
                            ..entry
                        });
                    }
                    continue;
                }
                let last = entry.other_lane.and_then(|lane| last_arrivals.get(&lane));
                let is_dropped = event
                    .cause
                    .as_deref()
                    .is_some_and(|it| it.contains("dropped"));
                entry.is_lost = is_dropped || last.is_some_and(|last| *last > event.time);
                if entry.is_lost {
                    entry.severity = entry.severity.max(Severity::Warning);
                }
            }
            entries.push(entry);
        }
        self.entries = self.batched(entries);
    }

    /// Joins receives that a queue pair gets one after the other.
    fn batched(&self, entries: Vec<Entry>) -> Vec<Entry> {
        let receive = |entry: &Entry| {
            let event = &self.events[entry.event];
            let is_posted = matches!(event.what, What::Line(LineKind::Receive, _));
            (is_posted && entry.severity == Severity::Normal).then_some(event.lane)
        };
        let mut batched: Vec<Entry> = Vec::with_capacity(entries.len());
        for entry in entries {
            match batched.last_mut() {
                Some(last) if receive(&entry).is_some() && receive(last) == receive(&entry) => {
                    last.following += 1;
                }
                _ => batched.push(entry),
            }
        }
        batched
    }

    /// Returns for each received frame the one that was sent, if it was captured: the last one
    /// that is equal and was not received yet, or the last one at all, which was duplicated.
    fn origins(&self) -> BTreeMap<usize, usize> {
        #[derive(Default)]
        struct Sent {
            open: VecDeque<usize>,
            last: Option<usize>,
        }
        let mut by_key: HashMap<u64, Sent> = HashMap::new();
        let mut origins = BTreeMap::new();
        let mut early = Vec::new();
        for (index, event) in self.events.iter().enumerate() {
            let What::Packet(packet, direction) = &event.what else {
                continue;
            };
            match direction {
                // A frame that was dropped when it was sent is not received.
                Direction::Outbound if event.cause.is_some() => {}
                Direction::Outbound => by_key.entry(packet.key).or_default().open.push_back(index),
                Direction::Inbound => {
                    let found = by_key.get_mut(&packet.key).and_then(|sent| {
                        sent.last = sent.open.pop_back().or(sent.last);
                        sent.last
                    });
                    match found {
                        Some(origin) => drop(origins.insert(index, origin)),
                        None => early.push((index, packet.key)),
                    }
                }
            }
        }
        for (index, key) in early {
            let Some(sent) = by_key.get_mut(&key) else {
                continue;
            };
            let limit = self.events[index].time.saturating_add(MAX_CLOCK_DIFFERENCE);
            let is_near = |origin: &usize| self.events[*origin].time <= limit;
            if let Some(origin) = sent.open.front().copied().filter(is_near) {
                sent.open.pop_front();
                origins.insert(index, origin);
            }
        }
        origins
    }

    /// Returns the time of the last frame that each lane has received.
    fn last_arrivals(&self) -> HashMap<usize, u64> {
        let mut last = HashMap::new();
        for event in &self.events {
            if let What::Packet(_, Direction::Inbound) = event.what {
                last.insert(event.lane, event.time);
            }
        }
        last
    }

    /// Returns the lane to which a lane's packets for a queue pair go: where others of them have
    /// arrived, else the only captured one of this number, else one for a peer without a capture.
    fn peers(&mut self, origins: &BTreeMap<usize, usize>) -> HashMap<(usize, u32), usize> {
        let mut peers = HashMap::new();
        for (arrival, origin) in origins {
            let (from, to) = (&self.events[*origin], &self.events[*arrival]);
            if let What::Packet(packet, _) = &from.what {
                if let Some(queue) = packet.destination_queue {
                    peers.insert((from.lane, queue), to.lane);
                }
            }
        }
        let mut by_queue: HashMap<u32, Vec<usize>> = HashMap::new();
        for (number, lane) in self.lanes.iter().enumerate() {
            if let Some(queue) = lane.queue {
                by_queue.entry(queue).or_default().push(number);
            }
        }
        let mut unknown: HashMap<(String, u32), usize> = HashMap::new();
        for event in &self.events {
            let What::Packet(packet, Direction::Outbound) = &event.what else {
                continue;
            };
            let Some(queue) = packet.destination_queue else {
                continue;
            };
            peers.entry((event.lane, queue)).or_insert_with(|| {
                if let Some([only]) = by_queue.get(&queue).map(|it| &it[..]) {
                    return *only;
                }
                let address = packet.destination_address().unwrap_or_default();
                *unknown.entry((address.clone(), queue)).or_insert_with(|| {
                    self.lanes.push(Lane {
                        process: None,
                        program: String::new(),
                        device: None,
                        queue: Some(queue),
                        peer: Some(address),
                    });
                    self.lanes.len() - 1
                })
            });
        }
        peers
    }
}
