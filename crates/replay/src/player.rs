//! Replays the events of records, one after the other.
//!
//! The event with the earliest time is next, whichever process it is of. One that must wait, a
//! completion that has not come, lets those of other processes overtake it after a while: their
//! clocks may differ.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::{Duration, Instant};

use embedded::Network;
use ringverbs::raw::{Flags, SendRequest, Sge};
use ringverbs::{RemoteAddr, Result, Transport};
use uverbs::status_name;

use crate::modification::{Modification, access};
use crate::outcome::{Difference, Failed, Outcome};
use crate::record::{Call, Completion, Event, Post, Record};
use crate::world::{Pair, Place, Queue, World};

/// How long an event waits until those of other processes overtake it.
const OVERTAKING: Duration = Duration::from_millis(250);
/// A key that no region has.
const NO_KEY: u32 = 0xffff_ff00;
/// A number that no queue pair has.
const NO_QUEUE_PAIR: u32 = 0xff_fffe;
/// The number of the queue pairs of a multicast group.
const MULTICAST: u32 = 0xff_ffff;
/// Send flags that are replayed: fence, signalled, solicited.
const FLAGS: u32 = 0b111;
/// Longest inline data of any device.
const MAX_INLINE: u64 = 4096;

/// Options of a replay.
#[derive(Clone, Debug)]
pub struct Options {
    /// The profile of the device, `roce` or `ib`; by default that of the recorded paths.
    pub profile: Option<String>,
    /// How long a recorded completion is waited for.
    pub patience: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            profile: None,
            patience: Duration::from_secs(10),
        }
    }
}

/// The reason why a replay cannot begin: the device cannot be made.
#[derive(Debug)]
pub struct ReplayError(String);

impl fmt::Display for ReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ReplayError {}

/// What has become of an event.
enum Step {
    Replayed,
    /// There is nothing to do: a query, for example.
    Ignored,
    /// It cannot be replayed: this is not.
    LeftOut(String),
    /// It must wait.
    Blocked,
}

/// What is not replayed of programs that write to the queues themselves: the device knows neither
/// their `wr_id` nor when they were posted.
const UNHOOKED: &str = "work requests that were posted without functions of libibverbs";

fn left_out(what: impl Into<String>) -> Result<Step> {
    Ok(Step::LeftOut(what.into()))
}

/// What is known of the queue pairs of the records before they are replayed.
#[derive(Default)]
struct Connections {
    /// Where queue pairs with a number are.
    places: HashMap<u32, Vec<Place>>,
    /// Their peers.
    peers: HashMap<(Place, u32), u32>,
    /// Those with work requests that have succeeded.
    working: HashSet<(Place, u32)>,
    /// An InfiniBand port has LIDs.
    has_lids: bool,
}

impl Connections {
    fn of(records: &[Record]) -> Self {
        let mut found = Self::default();
        for (process, record) in records.iter().enumerate() {
            let place = |context| Place { process, context };
            for event in &record.events {
                match event {
                    Event::Call(call) => found.note_call(place(call.context), call),
                    Event::Completion(it) if it.status == "success" => {
                        let number = it.qp.unwrap_or_default();
                        found.working.insert((place(it.context), number));
                    }
                    _ => {}
                }
            }
        }
        found
    }

    fn note_call(&mut self, place: Place, call: &Call) {
        let Some(number) = number_of(call) else {
            return;
        };
        match call.call.as_str() {
            "create_qp" => self.places.entry(number).or_default().push(place),
            "modify_qp" => {
                if let Some(peer) = call.arguments.number("dest_qp_num") {
                    self.peers.insert((place, number), peer as u32);
                }
                let path = call.arguments.get("ah_attr");
                let lid = path.and_then(|path| path["dlid"].as_u64());
                self.has_lids |= lid.is_some_and(|lid| lid != 0);
            }
            _ => {}
        }
    }

    /// Returns where a queue pair's peer may be; best the one whose peer it is.
    fn candidates(&self, number: u32, peer: u32) -> Vec<Place> {
        let all = self.places.get(&peer).map_or(&[][..], Vec::as_slice);
        let is_mutual = |place: &&Place| self.peers.get(&(**place, peer)) == Some(&number);
        let mutual = all.iter().filter(is_mutual);
        let others = all.iter().filter(|place| !is_mutual(place));
        mutual.chain(others).copied().collect()
    }
}

/// Returns the number in the name of a queue pair.
fn number_of(call: &Call) -> Option<u32> {
    let digits = call.object.as_deref()?.strip_prefix("qp 0x")?;
    u32::from_str_radix(digits, 16).ok()
}

/// Returns the handle in the name of a completion queue.
fn handle_of(name: Option<&str>) -> Option<u32> {
    name?.strip_prefix("cq ")?.parse().ok()
}

/// Replays records on a device of a network.
///
/// # Errors
/// [`ReplayError`] if there is no such device.
pub fn replay(
    records: &[Record],
    network: &Network,
    options: &Options,
) -> std::result::Result<Outcome, ReplayError> {
    let connections = Connections::of(records);
    let profile = options.profile.as_deref();
    let profile = profile.unwrap_or(if connections.has_lids { "ib" } else { "roce" });
    let embedded = network.device(profile);
    let embedded = embedded.map_err(|error| ReplayError(format!("{profile}: {error}")))?;
    let mut player = Player {
        records,
        next: vec![0; records.len()],
        world: World::new(embedded),
        connections,
        skipped: HashSet::new(),
        silent: HashSet::new(),
        absent: HashMap::new(),
        patience: options.patience,
        outcome: Outcome::default(),
    };
    for record in records.iter().filter(|record| record.missed != 0) {
        let count = &mut player.outcome.left_out;
        let count = count
            .entry("posts and polls in signal handlers".into())
            .or_default();
        *count = count.saturating_add(record.missed);
    }
    player.play();
    Ok(player.outcome)
}

struct Player<'r> {
    records: &'r [Record],
    /// The next event of each process.
    next: Vec<usize>,
    world: World,
    connections: Connections,
    /// Queue pairs that are not replayed.
    skipped: HashSet<(Place, u32)>,
    /// Queue pairs whose completions have not come.
    silent: HashSet<(Place, u32)>,
    /// Number of completions that will not come, of work requests that are left out.
    absent: HashMap<(Place, u32, u64), u64>,
    patience: Duration,
    outcome: Outcome,
}

impl<'r> Player<'r> {
    fn event(&self, process: usize) -> Option<&'r Event> {
        self.records[process].events.get(self.next[process])
    }

    /// Replays all events.
    fn play(&mut self) {
        let mut since = Instant::now();
        loop {
            let mut waiting: Vec<usize> = (0..self.records.len())
                .filter(|process| self.event(*process).is_some())
                .collect();
            waiting.sort_by_key(|process| self.event(*process).and_then(Event::time));
            let Some(first) = waiting.first().copied() else {
                break;
            };
            let others = match since.elapsed() < OVERTAKING {
                true => 1,
                false => waiting.len(),
            };
            let mut tried = waiting.into_iter().take(others);
            if tried.any(|process| self.step(process)) {
                since = Instant::now();
            } else if since.elapsed() >= self.patience {
                self.give_up(first);
                since = Instant::now();
            } else {
                self.world.poll();
                std::thread::yield_now();
            }
        }
        self.world.poll();
        let unpolled = self.world.queues.values().map(|it| it.seen.len() as u64);
        self.outcome.unpolled = unpolled.sum();
    }

    /// Replays the next event of a process. Returns false if it must wait.
    fn step(&mut self, process: usize) -> bool {
        let Some(event) = self.event(process) else {
            return false;
        };
        let place = |context| Place { process, context };
        let step = match event {
            Event::Call(call) => self.call(place(call.context), call),
            Event::Post(post) => self.post(place(post.context), post),
            Event::Completion(it) => self.completion(place(it.context), it),
            Event::DevicePost(_) => Step::LeftOut(UNHOOKED.into()),
            _ => Step::Ignored,
        };
        match step {
            Step::Blocked => return false,
            Step::LeftOut(what) => self.outcome.leave_out(what),
            Step::Ignored => {}
            Step::Replayed => match event {
                Event::Call(_) => self.outcome.calls += 1,
                Event::Post(_) => self.outcome.posts += 1,
                _ => self.outcome.completions += 1,
            },
        }
        self.next[process] += 1;
        true
    }

    fn differs(&mut self, process: usize, time: u64, what: String) {
        self.outcome.differences.push(Difference {
            process: self.records[process].process,
            time,
            what,
        });
    }

    /// Passes over an event that has waited for too long.
    fn give_up(&mut self, process: usize) {
        let seconds = self.patience.as_secs_f32();
        match self.event(process) {
            Some(Event::Completion(it)) => {
                let number = it.qp.unwrap_or_default();
                let what = format!(
                    "queue pair {number:#x}, wr_id {:#x}: recorded \"{}\", no completion within \
                     {seconds} s",
                    it.wr_id, it.status
                );
                self.differs(process, it.time, what);
                let context = it.context;
                self.silent.insert((Place { process, context }, number));
            }
            Some(Event::Call(call)) => {
                let peer = call.arguments.number("dest_qp_num").unwrap_or_default();
                let what = format!("{}: there is no queue pair {peer:#x} yet", call.call);
                self.differs(process, call.time, what);
            }
            _ => {}
        }
        self.next[process] += 1;
    }

    /// Replays a call.
    fn call(&mut self, place: Place, call: &Call) -> Step {
        // What is refused for other reasons than its arguments may succeed in the replay.
        let is_compared = matches!(call.call.as_str(), "create_qp" | "create_cq" | "modify_qp");
        if call.errno != 0 && !is_compared {
            return match call.call.starts_with("query") {
                true => Step::Ignored,
                false => Step::LeftOut(format!("{} that was refused", call.call)),
            };
        }
        let executed = self.execute(place, call);
        let what = match (&executed, call.errno) {
            (Ok(Step::Replayed), 0) | (Err(_), 1..) => return Step::Replayed,
            (Ok(Step::Replayed), errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                format!("{} was refused ({error}) and succeeds", call.call)
            }
            (Err(error), _) => format!("{} has succeeded and is refused: {error}", call.call),
            _ => return executed.unwrap_or(Step::Ignored),
        };
        self.differs(place.process, call.time, what);
        Step::Replayed
    }

    fn execute(&mut self, place: Place, call: &Call) -> Result<Step> {
        let name = call.object.clone().unwrap_or_default();
        let arguments = &call.arguments;
        match call.call.as_str() {
            "alloc_pd" => {
                let (context, _) = self.world.context(place)?;
                let domain = context.alloc_pd()?;
                self.world.domains.insert((place, name), domain);
            }
            "dealloc_pd" => drop(self.world.domains.remove(&(place, name))),
            "reg_mr" => return self.register(place, call),
            "dereg_mr" => {
                if !self.world.deregister(place, &name) {
                    return left_out("dereg_mr of a region that is not replayed");
                }
            }
            "create_cq" => {
                let (context, _) = self.world.context(place)?;
                let entries = arguments.number("cqe").unwrap_or(1);
                let entries = u32::try_from(entries).unwrap_or(u32::MAX);
                let queue = context.completion_queue().entries(entries).build()?;
                if let Some(handle) = handle_of(Some(&name)) {
                    let seen = Vec::new();
                    let queue = Queue { queue, seen };
                    self.world.queues.insert((place, handle), queue);
                }
            }
            "destroy_cq" => {
                let handle = handle_of(Some(&name)).unwrap_or_default();
                self.world.queues.remove(&(place, handle));
            }
            "create_qp" => return self.create_queue_pair(place, call),
            "modify_qp" => return self.modify(place, call),
            "destroy_qp" => {
                let number = number_of(call).unwrap_or_default();
                self.skipped.remove(&(place, number));
                if self.world.pairs.remove(&(place, number)).is_none() {
                    return left_out("destroy_qp of a queue pair that is not replayed");
                }
            }
            "close_device" => self.world.close(place),
            "open_device"
            | "create_async_events"
            | "create_comp_channel"
            | "create_ah"
            | "destroy_ah"
            | "req_notify_cq"
            | "advise_mr" => return Ok(Step::Ignored),
            name if name.starts_with("query") => return Ok(Step::Ignored),
            name => return left_out(name),
        }
        Ok(Step::Replayed)
    }

    fn register(&mut self, place: Place, call: &Call) -> Result<Step> {
        let (given, got) = (&call.arguments, &call.result);
        let Some(access) = access(given.get("access")) else {
            return left_out("reg_mr with other rights");
        };
        let key = |name| got.number(name).unwrap_or_default() as u32;
        let (Some(iova), Some(length)) = (given.number("iova"), given.number("length")) else {
            return left_out("reg_mr without an address");
        };
        let domain = (place, given.text("pd").unwrap_or_default().to_owned());
        let Some(domain) = self.world.domains.get(&domain).cloned() else {
            return left_out("reg_mr in a domain that is not replayed");
        };
        let name = call.object.as_deref().unwrap_or_default();
        let keys = (key("lkey"), key("rkey"));
        let area = (iova, length);
        self.world
            .register(place, (name, &domain), area, access, keys)?;
        Ok(Step::Replayed)
    }

    fn create_queue_pair(&mut self, place: Place, call: &Call) -> Result<Step> {
        let given = &call.arguments;
        let kind = given.text("qp_type").unwrap_or("another type");
        let transport = match kind {
            "RC" => Transport::Reliable,
            "UC" => Transport::Unreliable,
            "UD" => Transport::Datagram,
            kind => {
                self.skip(place, number_of(call));
                return left_out(format!("queue pairs of type {kind}"));
            }
        };
        if given.get("srq").is_some() {
            self.skip(place, number_of(call));
            return left_out("queue pairs with a shared receive queue");
        }
        let domain = (place, given.text("pd").unwrap_or_default().to_owned());
        let queue = |name| handle_of(given.text(name)).unwrap_or_default();
        let domain = self.world.domains.get(&domain).cloned();
        let queues = &self.world.queues;
        let [send_cq, recv_cq] =
            ["send_cq", "recv_cq"].map(|name| queues.get(&(place, queue(name))));
        let (Some(domain), Some(send_cq), Some(recv_cq)) = (domain, send_cq, recv_cq) else {
            self.skip(place, number_of(call));
            return left_out("queue pairs of objects that are not replayed");
        };
        // What the device has granted may be more.
        let size = |name| {
            let values = [given.number(name), call.result.number(name)];
            let size = values.into_iter().flatten().max().unwrap_or_default();
            u32::try_from(size).unwrap_or(u32::MAX)
        };
        let builder = domain
            .queue_pair(transport, &send_cq.queue)
            .recv_cq(&recv_cq.queue)
            .send_depth(size("max_send_wr"))
            .recv_depth(size("max_recv_wr"))
            .send_pieces(size("max_send_sge"))
            .recv_pieces(size("max_recv_sge"))
            .inline(size("max_inline_data"));
        let signals_all = given.get("sq_sig_all").and_then(|it| it.as_bool());
        let builder = match signals_all {
            Some(true) => builder.signal_all(),
            _ => builder,
        };
        let queue_pair = builder.build()?;
        let Some(number) = number_of(call) else {
            return Ok(Step::Replayed);
        };
        let is_datagram = transport == Transport::Datagram;
        if is_datagram {
            self.world.make_path(place, &domain)?;
        }
        let key = (place, number);
        self.world.numbers.insert(key, queue_pair.qp_num());
        let pair = Pair {
            queue_pair,
            is_datagram,
            peer: None,
        };
        self.world.pairs.insert(key, pair);
        Ok(Step::Replayed)
    }

    fn skip(&mut self, place: Place, number: Option<u32>) {
        self.skipped.extend(number.map(|number| (place, number)));
    }

    /// Returns the number of a queue pair's peer in the replay, and where it is; the queue pair
    /// is not replayed if there is none.
    fn peer(&self, place: Place, number: u32, peer: u32) -> Option<(u32, Option<Place>)> {
        let candidates = self.connections.candidates(number, peer);
        for candidate in &candidates {
            if let Some(found) = self.world.numbers.get(&(*candidate, peer)) {
                return Some((*found, Some(*candidate)));
            }
        }
        let is_working = self.connections.working.contains(&(place, number));
        // A program may name a queue pair that does not exist: its work requests fail.
        (!is_working).then_some((NO_QUEUE_PAIR, None))
    }

    fn modify(&mut self, place: Place, call: &Call) -> Result<Step> {
        let Some(number) = number_of(call) else {
            return left_out("modify_qp of an unknown queue pair");
        };
        let (_, local) = self.world.context(place)?;
        let recorded = call.arguments.number("dest_qp_num").map(|it| it as u32);
        let mut to = (0, None);
        if let Some(peer) = recorded {
            let candidates = self.connections.candidates(number, peer);
            let is_skipped = |of: &Place| self.skipped.contains(&(*of, peer));
            let is_known = |of: &Place| self.world.numbers.contains_key(&(*of, peer));
            let will_come = candidates.iter().any(|of| !is_skipped(of));
            if will_come && !candidates.iter().any(is_known) {
                return Ok(Step::Blocked);
            }
            match self.peer(place, number, peer) {
                Some(found) => to = found,
                None => {
                    self.skip(place, Some(number));
                    self.world.pairs.remove(&(place, number));
                    return left_out("queue pairs whose peers are in no record");
                }
            }
        }
        let Some(modification) = Modification::of(&call.arguments, &local, to.0) else {
            // What follows would differ for this reason alone.
            self.skip(place, Some(number));
            self.world.pairs.remove(&(place, number));
            return left_out("queue pairs with other attributes of modify_qp");
        };
        let Some((pair, _)) = self.world.pair(place, number) else {
            return left_out("modify_qp of a queue pair that is not replayed");
        };
        let Modification { attributes, mask } = modification;
        pair.queue_pair.modify(&attributes, mask)?;
        if recorded.is_some() {
            pair.peer = to.1;
        }
        Ok(Step::Replayed)
    }

    /// Replays a post.
    fn post(&mut self, place: Place, post: &Post) -> Step {
        let Some(number) = post.qp else {
            return Step::LeftOut("posts to shared receive queues".into());
        };
        let posted = match self.world.pairs.contains_key(&(place, number)) {
            true => self.post_to(place, number, post),
            false => left_out("posts to queue pairs that are not replayed"),
        };
        let name = format!(
            "queue pair {number:#x}, wr_id {:#x}: post of {}",
            post.wr_id,
            post.opcode.as_deref().unwrap_or("a receive")
        );
        let what = match (posted, post.errno) {
            (Ok(Step::LeftOut(what)), errno) => {
                if errno == 0 && (post.signaled || !post.send) {
                    *self.absent.entry((place, number, post.wr_id)).or_default() += 1;
                }
                return Step::LeftOut(what);
            }
            (Ok(_), 0) | (Err(_), 1..) => return Step::Replayed,
            (Ok(_), errno) => {
                let error = std::io::Error::from_raw_os_error(errno);
                format!("{name} was refused ({error}) and succeeds")
            }
            (Err(error), _) => format!("{name} has succeeded and is refused: {error}"),
        };
        self.differs(place.process, post.time, what);
        Step::Replayed
    }

    fn post_to(&mut self, place: Place, number: u32, post: &Post) -> Result<Step> {
        let mut elements = Vec::with_capacity(post.sges.len());
        for element in &post.sges {
            let (addr, lkey) = match self.world.local(place, element.lkey) {
                Some(region) => (region.at(element.address).0, region.lkey()?),
                None => (element.address, NO_KEY),
            };
            elements.push(Sge {
                addr,
                length: element.length,
                lkey,
            });
        }
        let Some(opcode) = post.opcode.as_deref() else {
            let Some((pair, _)) = self.world.pair(place, number) else {
                return left_out("receives");
            };
            let mut queue = pair.queue_pair.raw_receive()?;
            queue.push(post.wr_id, &elements)?;
            // SAFETY: as in `publish`.
            unsafe { queue.publish() };
            return Ok(Step::Replayed);
        };
        let peer = self.world.pairs.get(&(place, number));
        let peer = peer.and_then(|pair| pair.peer);
        let remote =
            post.remote.map(
                |it| match peer.and_then(|peer| self.world.remote(peer, it.rkey)) {
                    Some(region) => {
                        let (address, rkey) = region.at(it.address);
                        RemoteAddr::new(address, rkey)
                    }
                    None => RemoteAddr::new(it.address, NO_KEY),
                },
            );
        let datagram = post.datagram.map(|to| {
            let places = self.connections.places.get(&to.qp);
            let mut numbers = places.into_iter().flatten();
            let found = numbers.find_map(|place| self.world.numbers.get(&(*place, to.qp)));
            (found.copied().unwrap_or(NO_QUEUE_PAIR), to.qkey)
        });
        if post.datagram.is_some_and(|to| to.qp == MULTICAST) {
            return left_out("datagrams to multicast groups");
        }
        let Some((pair, path)) = self.world.pair(place, number) else {
            return left_out("posts");
        };
        let send = match (datagram.filter(|_| pair.is_datagram), path) {
            (Some((to, key)), Some(path)) => SendRequest::send_to(post.wr_id, path, to, key),
            _ => SendRequest::send(post.wr_id),
        };
        let request = match (opcode, remote) {
            ("SEND", _) => send,
            ("SEND_WITH_IMM", _) => send.immediate(0),
            ("RDMA_WRITE", Some(remote)) => SendRequest::write(post.wr_id, remote),
            ("RDMA_WRITE_WITH_IMM", Some(remote)) => {
                SendRequest::write(post.wr_id, remote).immediate(0)
            }
            ("RDMA_READ", Some(remote)) => SendRequest::read(post.wr_id, remote),
            ("ATOMIC_CMP_AND_SWP", Some(remote)) => {
                SendRequest::compare_swap(post.wr_id, remote, 0, 0)
            }
            ("ATOMIC_FETCH_AND_ADD", Some(remote)) => SendRequest::fetch_add(post.wr_id, remote, 0),
            (opcode, _) => return left_out(format!("posts of {opcode}")),
        };
        let request = request.flags(Flags::from_bits_retain(post.flags & FLAGS));
        let zeros = vec![0; post.bytes.min(MAX_INLINE) as usize];
        let request = match post.inline {
            true => request.inline(&zeros),
            false => request.sges(&elements),
        };
        let mut queue = pair.queue_pair.raw_send();
        queue.push(&request)?;
        // SAFETY: regions are kept until they are deregistered, and memory that is not registered
        // is not accessed: the device checks each key, under its lock, when it accesses memory,
        // and commands deregister it under that lock. Nothing of this process reads or writes
        // the memory. Completions are read by `poll_raw` only.
        unsafe { queue.publish()? };
        Ok(Step::Replayed)
    }

    /// Waits for a completion and compares it.
    fn completion(&mut self, place: Place, recorded: &Completion) -> Step {
        let number = recorded.qp.unwrap_or_default();
        if self.skipped.contains(&(place, number)) {
            return Step::LeftOut("completions of queue pairs that are not replayed".into());
        }
        let key = (place, number, recorded.wr_id);
        if let Some(count) = self.absent.get_mut(&key).filter(|count| **count != 0) {
            *count -= 1;
            return Step::LeftOut("completions of posts that are not replayed".into());
        }
        self.world.poll();
        let expected = self.world.numbers.get(&(place, number)).copied();
        let Some(queue) = self.world.queues.get_mut(&(place, recorded.cq)) else {
            return Step::LeftOut("completions of queues that are not replayed".into());
        };
        let is_it = |seen: &crate::world::Seen| {
            seen.wr_id == recorded.wr_id
                && recorded.qp.is_none_or(|_| Some(seen.number) == expected)
        };
        let Some(at) = queue.seen.iter().position(is_it) else {
            return match self.silent.contains(&(place, number)) {
                true => Step::LeftOut("completions after one that has not come".into()),
                false => Step::Blocked,
            };
        };
        let seen = queue.seen.remove(at);
        let status =
            status_name(seen.status).map_or_else(|| seen.status.to_string(), str::to_owned);
        let name = format!("queue pair {number:#x}, wr_id {:#x}", recorded.wr_id);
        if status != recorded.status {
            let what = format!(
                "{name}: recorded \"{}\", replayed \"{status}\"",
                recorded.status
            );
            self.differs(place.process, recorded.time, what);
        } else if seen.status == 0 && seen.is_receive {
            if let Some(bytes) = recorded.bytes.filter(|bytes| *bytes != seen.bytes) {
                let what = format!("{name}: recorded {bytes} bytes, replayed {}", seen.bytes);
                self.differs(place.process, recorded.time, what);
            }
        }
        const FLUSHED: u32 = 5;
        if !matches!(seen.status, 0 | FLUSHED) {
            self.outcome.failures.push(Failed {
                process: self.records[place.process].process,
                queue_pair: number,
                wr_id: recorded.wr_id,
                status,
                explanation: self.world.embedded.explanation(seen.number),
            });
        }
        Step::Replayed
    }
}
