//! What a sequence has made, and the model of who owns which byte.

use std::collections::BTreeMap;

use embedded::{Drive, Embedded, Network};
use ringverbs::completion::{CompletionReader, DataFormat, ErrorEntry};
use ringverbs::dynamic::{DcInitiator, DcTarget};
use ringverbs::qp::{Membership, RecvHalf, Released, SendHalf};
use ringverbs::raw::Sge;
use ringverbs::{
    AccessFlags, Buffer, BufferPool, Completion, CompletionQueue, Context, Device, Error, Inline,
    LocalAddress, MemorySlice, MemoryWindow, Operation, Payload, PoolBuffer, PostError,
    ProtectionDomain, QueuePair, RemoteRegion, SharedBuffer, SharedReceiveQueue, Status, Transport,
    WindowType,
};

use testing::pattern;

/// What a step comes to: whether it did what it is there for, or what is wrong.
pub type Done = Result<bool, String>;

/// The end time of a right that has not ended.
const OPEN: u64 = u64::MAX;

/// Memory of the program, with its expected contents.
pub struct Piece {
    pub buffer: Buffer,
    pub addr: u64,
    pub domain: u64,
    pub shadow: Vec<u8>,
}

/// Posted memory: its location, and its contents when it was posted.
pub struct PostedMemory {
    addr: u64,
    len: usize,
    domain: u64,
    shadow: Vec<u8>,
}

/// A queue of work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    Send(u64),
    Receive(u64),
    Shared(u64),
}

/// An operation's access to a peer's memory.
#[derive(Clone, Copy, Debug)]
pub struct RecordedCommand {
    pub addr: u64,
    pub len: u64,
    pub rkey: u32,
    pub needs: AccessFlags,
}

/// An operation in flight.
pub struct Flight {
    pub lane: Lane,
    pub operation: Operation,
    pub away: Vec<PostedMemory>,
    /// Its completion need not be reported.
    pub silent: bool,
    /// Another operation with the same token and without memory follows.
    pub twin: bool,
    pub born: u64,
    pub asked: Option<RecordedCommand>,
    pub invalidates: Option<u32>,
    /// Regions of which parts are written.
    pub written: Vec<u64>,
}

/// A key, and the access that it may give.
#[derive(Debug)]
pub struct Right {
    pub rkey: u32,
    pub addr: u64,
    pub len: u64,
    pub access: AccessFlags,
    pub region: u64,
    /// The window, for a key of a window.
    pub window: Option<u64>,
    bind: Option<(Lane, u64)>,
    from: u64,
    done: Option<u64>,
    until: u64,
    /// Whether it had not ended when its region was closed.
    pub is_left: bool,
}

impl PostedMemory {
    pub fn set_len(&mut self, len: usize) {
        self.len = len;
    }
}

impl Remote {
    pub fn new(id: u64, domain: u64, region: RemoteRegion, access: AccessFlags) -> Self {
        Self {
            id,
            domain,
            region,
            access,
            shadow: None,
        }
    }

    pub fn close(self) -> Result<(), Self> {
        let Self {
            id,
            domain,
            region,
            access,
            shadow,
        } = self;
        region.close().map_err(|refused| Self {
            id,
            domain,
            region: refused.into_object(),
            access,
            shadow,
        })
    }
}

impl Right {
    pub fn is_open(&self) -> bool {
        self.until == OPEN
    }
}

pub struct Dom {
    pub id: u64,
    pub context: usize,
    pub domain: ProtectionDomain,
}

pub struct Remote {
    pub id: u64,
    pub domain: u64,
    pub region: RemoteRegion,
    pub access: AccessFlags,
    /// What must be in it while nobody may write there.
    shadow: Option<Vec<u8>>,
}

pub struct Window {
    pub id: u64,
    pub domain: u64,
    pub window: MemoryWindow,
    pub kind: WindowType,
}

pub enum Poller {
    Plain(Box<CompletionQueue>),
    Reader(Box<CompletionReader<DataFormat>>),
}

impl Poller {
    pub fn queue(&mut self) -> &mut CompletionQueue {
        match self {
            Self::Plain(queue) => queue,
            Self::Reader(reader) => reader.queue_mut(),
        }
    }
}

/// Memory that several operations may read, with its expected contents.
pub struct Shadowed {
    pub memory: SharedBuffer,
    pub shadow: Vec<u8>,
    pub domain: u64,
}

/// A buffer of a pool that the program has, with its expected contents.
pub struct Pooled {
    pub memory: PoolBuffer,
    pub shadow: Vec<u8>,
    pub domain: u64,
}

/// A target of dynamic connections, and its port.
pub struct Target {
    pub target: DcTarget,
    pub local: LocalAddress,
}

/// An initiator of dynamic connections, and its port.
pub struct Initiator {
    pub initiator: DcInitiator,
    pub id: u64,
    pub domain: u64,
    pub local: LocalAddress,
}

pub struct Cq {
    pub context: usize,
    pub poller: Poller,
}

pub struct Shared {
    pub id: u64,
    pub domain: u64,
    pub queue: SharedReceiveQueue,
}

pub enum Body {
    Whole(QueuePair),
    Halves(Option<SendHalf>, Option<RecvHalf>),
}

pub struct Pair {
    pub body: Body,
    /// The queue pairs that its halves are of: the same, but after a swap.
    pub send: u64,
    pub receive: u64,
    pub domain: u64,
    pub context: usize,
    pub transport: Transport,
    pub shared: bool,
    pub number: u32,
    /// The last peer.
    pub peer: u64,
    /// Whether both sides have restarted the connection. A peer that has not treats requests as
    /// duplicates: it acknowledges them without executing them.
    pub in_step: bool,
}

/// A queue pair in the device.
struct DeviceQueuePair {
    halves: u8,
    /// Whether the handle was forgotten, so that it is never destroyed.
    forgotten: bool,
}

/// The outcome of an operation.
pub struct Ended {
    pub token: u64,
    /// `None` if it was returned without a completion.
    pub status: Option<Status>,
    pub received: usize,
    pub invalidated: Option<u32>,
    pub payload: Payload,
}

impl From<Completion> for Ended {
    fn from(from: Completion) -> Self {
        let received = match (&from.result, from.operation) {
            (Ok(success), Operation::Receive) if !success.is_remote_write() => success.byte_len,
            _ => 0,
        };
        Self {
            token: from.token,
            status: Some(from.status()),
            received: received as usize,
            invalidated: from.result.ok().and_then(|success| success.invalidated()),
            payload: from.payload,
        }
    }
}

impl From<ErrorEntry> for Ended {
    fn from(from: ErrorEntry) -> Self {
        Self {
            token: from.token,
            status: Some(from.provider),
            received: 0,
            invalidated: None,
            payload: from.payload,
        }
    }
}

impl From<Released> for Ended {
    fn from(from: Released) -> Self {
        Self {
            token: from.token,
            status: None,
            received: 0,
            invalidated: None,
            payload: from.payload,
        }
    }
}

/// What a refused operation gives back.
pub trait Back {
    fn back(self) -> Vec<Buffer>;
}

impl Back for Buffer {
    fn back(self) -> Vec<Buffer> {
        vec![self]
    }
}

impl Back for Vec<Buffer> {
    fn back(self) -> Vec<Buffer> {
        self
    }
}

impl Back for MemorySlice {
    fn back(self) -> Vec<Buffer> {
        Vec::new()
    }
}

impl Back for Inline<'static> {
    fn back(self) -> Vec<Buffer> {
        Vec::new()
    }
}

impl Back for () {
    fn back(self) -> Vec<Buffer> {
        Vec::new()
    }
}

/// The index that a number chooses of so many.
pub fn pick(number: u32, of: usize) -> Option<usize> {
    (of > 0).then(|| number as usize % of)
}

/// Where a buffer's memory begins.
pub fn address(buffer: &Buffer) -> u64 {
    buffer.raw_sge().addr
}

pub struct World {
    pub devices: Vec<Embedded>,
    /// Ranges of memory that a device has by itself.
    own: usize,
    /// With the number of its device.
    pub contexts: Vec<(Context, LocalAddress, usize)>,
    pub domains: Vec<Dom>,
    pub pieces: Vec<Piece>,
    pub remotes: Vec<Remote>,
    pub slices: Vec<(u64, u64, MemorySlice)>,
    pub windows: Vec<Window>,
    pub cqs: Vec<Cq>,
    pub shared: Vec<Shared>,
    pub pairs: Vec<Pair>,
    pub frozen: Vec<Shadowed>,
    pub pools: Vec<(BufferPool, u64)>,
    pub pooled: Vec<Pooled>,
    pub targets: Vec<Target>,
    pub initiators: Vec<Initiator>,
    /// With the queue pair that each keeps alive.
    pub memberships: Vec<(Membership, u64)>,
    pub flights: BTreeMap<u64, Flight>,
    pub rights: Vec<Right>,
    /// Addresses and keys of what is gone.
    pub gone: Vec<(u64, u32)>,
    made: BTreeMap<u64, DeviceQueuePair>,
    pub clock: u64,
    next: u64,
    /// Something was forgotten: objects may be left.
    pub leaks: bool,
    /// What completes comes in no order that is known, since the raw layer has
    /// taken completions away.
    pub taken_away: bool,
    /// How operations have ended: done, and not.
    pub ends: BTreeMap<String, (u64, u64)>,
    /// A batch that panicked has left a bind behind, until the next begins.
    pub left_behind: bool,
}

impl World {
    pub fn new(devices: usize, profile: &str) -> Self {
        let network = Network::new(Drive::Caller).unwrap();
        let devices: Vec<_> = (0..devices)
            .map(|_| network.device(profile).unwrap())
            .collect();
        Self {
            own: devices[0].ranges(),
            devices,
            contexts: Vec::new(),
            domains: Vec::new(),
            pieces: Vec::new(),
            remotes: Vec::new(),
            slices: Vec::new(),
            windows: Vec::new(),
            cqs: Vec::new(),
            shared: Vec::new(),
            pairs: Vec::new(),
            frozen: Vec::new(),
            pools: Vec::new(),
            pooled: Vec::new(),
            targets: Vec::new(),
            initiators: Vec::new(),
            memberships: Vec::new(),
            flights: BTreeMap::new(),
            rights: Vec::new(),
            gone: Vec::new(),
            made: BTreeMap::new(),
            clock: 0,
            next: 1,
            leaks: false,
            taken_away: false,
            left_behind: false,
            ends: BTreeMap::new(),
        }
    }

    /// A number that nothing else has.
    pub fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn open(&mut self, device: usize) -> Result<(), Error> {
        let context = Device::from(self.devices[device].clone()).open()?;
        let local = context.local_address(1)?;
        self.contexts.push((context, local, device));
        Ok(())
    }

    /// Has the devices work, for so many turns or until there is nothing to do.
    pub fn drive(&self, turns: u32) {
        for _ in 0..turns {
            if !self.devices[0].drive() {
                break;
            }
        }
    }

    // Memory.

    /// Takes a buffer into the program's possession, with bytes of its own.
    pub fn own(&mut self, mut buffer: Buffer, domain: u64) {
        buffer.fill_up();
        let stamp = self.fresh();
        pattern(stamp, &mut buffer);
        self.pieces.push(Piece {
            addr: address(&buffer),
            domain,
            shadow: buffer.to_vec(),
            buffer,
        });
    }

    /// Takes a region that peers may reach into the program's possession.
    pub fn own_remote(&mut self, region: RemoteRegion, domain: u64, access: AccessFlags) {
        let (id, key) = (self.fresh(), region.key());
        self.granted(Granted {
            rkey: key.rkey,
            addr: key.addr,
            len: region.len() as u64,
            access,
            region: id,
            window: None,
            bind: None,
        });
        self.remotes.push(Remote::new(id, domain, region, access));
    }

    /// Takes one of the domain's buffers out, to be posted.
    pub fn take(&mut self, number: u32, domain: u64) -> Option<(Buffer, PostedMemory)> {
        let of: Vec<_> = (0..self.pieces.len())
            .filter(|at| self.pieces[*at].domain == domain)
            .collect();
        // Occasionally from another domain.
        let at = match pick(number >> 8, of.len()) {
            Some(at) if number % 61 != 0 => of[at],
            _ => pick(number, self.pieces.len())?,
        };
        let Piece {
            buffer,
            addr,
            domain,
            shadow,
        } = self.pieces.swap_remove(at);
        let away = PostedMemory {
            addr,
            len: buffer.len(),
            domain,
            shadow,
        };
        Some((buffer, away))
    }

    pub fn take_several(
        &mut self,
        number: u32,
        domain: u64,
        count: usize,
    ) -> (Vec<Buffer>, Vec<PostedMemory>) {
        (0..count)
            .filter_map(|n| self.take(number.wrapping_add(n as u32 * 256), domain))
            .unzip()
    }

    /// What was not posted is the program's again, as it was.
    fn restore(&mut self, buffers: Vec<Buffer>, away: Vec<PostedMemory>) -> Result<(), String> {
        if buffers.len() != away.len() {
            return Err(format!(
                "{} buffers were given back of {}",
                buffers.len(),
                away.len()
            ));
        }
        for (mut buffer, away) in buffers.into_iter().zip(away) {
            buffer.fill_up();
            same_memory(&buffer, &away)?;
            self.pieces.push(Piece {
                buffer,
                addr: away.addr,
                domain: away.domain,
                shadow: away.shadow,
            });
        }
        Ok(())
    }

    /// What posting came to: the operation is in flight, or its memory is back.
    pub fn posted<D: Back>(
        &mut self,
        token: u64,
        result: Result<(), PostError<D>>,
        mut flight: Flight,
    ) -> Done {
        if let Lane::Send(id) | Lane::Receive(id) = flight.lane {
            // To a half of what is closed by another: it stays there.
            flight.silent |= !self.made.contains_key(&id);
        }
        match result {
            Ok(()) => {
                self.flights.insert(token, flight);
                Ok(true)
            }
            Err(PostError {
                data: Some(data), ..
            }) => {
                self.restore(data.back(), flight.away)?;
                Ok(false)
            }
            Err(PostError { data: None, .. }) => {
                self.flights.insert(token, flight);
                Ok(false)
            }
        }
    }

    pub fn flight(&self, lane: Lane, operation: Operation, away: Vec<PostedMemory>) -> Flight {
        Flight {
            lane,
            operation,
            away,
            silent: false,
            twin: false,
            born: self.clock,
            asked: None,
            invalidates: None,
            written: Vec::new(),
        }
    }

    // Completions.

    /// An operation has ended: everything that it had is back.
    pub fn ended(&mut self, ended: Ended) -> Result<(), String> {
        let Ended {
            token,
            status,
            received,
            invalidated,
            payload,
        } = ended;
        let Some(mut flight) = self.flights.remove(&token) else {
            if self.taken_away {
                return Ok(());
            }
            return Err(format!(
                "operation {token} has ended twice, or after it was gone: {status:?}, {payload:?}"
            ));
        };
        let done = status.is_some_and(Status::is_success);
        let ends = self
            .ends
            .entry(format!("{:?} {status:?}", flight.operation))
            .or_default();
        ends.0 += u64::from(done);
        ends.1 += u64::from(!done);
        if !matches!(flight.lane, Lane::Shared(_)) {
            self.passed_over(token, flight.lane)?;
        }
        let what = |text: String| {
            format!(
                "operation {token} ({:?}, {status:?}): {text}",
                flight.operation
            )
        };
        let buffers = payload.into_buffers();
        if flight.twin && buffers.is_empty() {
            flight.away.clear();
        } else if flight.twin {
            let mut twin = self.flight(flight.lane, Operation::Read, Vec::new());
            twin.silent = true;
            self.flights.insert(token, twin);
        }
        if buffers.len() != flight.away.len() {
            let (back, went) = (buffers.len(), flight.away.len());
            return Err(what(format!("{back} buffers came back of {went}")));
        }
        let mut may_be_written = match flight.operation {
            Operation::Receive if done => received,
            Operation::Receive => usize::MAX,
            Operation::Read => flight.away.iter().map(|away| away.len).sum(),
            Operation::CompareSwap | Operation::FetchAdd => 8,
            _ => 0,
        };
        for (mut buffer, away) in buffers.into_iter().zip(&flight.away) {
            buffer.fill_up();
            same_memory(&buffer, away).map_err(what)?;
            let room = match flight.operation {
                Operation::Read => away.len,
                _ => buffer.len(),
            };
            let written = may_be_written.min(room);
            may_be_written -= written;
            if let Some(at) = differs(&buffer[written..], &away.shadow[written..]) {
                return Err(what(format!(
                    "memory {:#x} was changed in flight, at byte {} of {}",
                    away.addr,
                    at + written,
                    buffer.len()
                )));
            }
            self.own(buffer, away.domain);
        }
        if done {
            if let Some(asked) = flight.asked {
                self.allowed(&asked, flight.born).map_err(what)?;
            }
        }
        if flight.operation == Operation::BindWindow && status.is_some() {
            self.bind_ended(token, flight.lane, done);
        }
        let revoked = match flight.operation {
            Operation::LocalInvalidate if done => flight.invalidates,
            _ => invalidated,
        };
        if let Some(rkey) = revoked {
            self.revoked(rkey, flight.lane, flight.born);
        }
        Ok(())
    }

    /// Operations of the same queue before one that has ended have ended, too.
    fn passed_over(&mut self, token: u64, lane: Lane) -> Result<(), String> {
        let earlier: Vec<_> = (self.flights.range(..token))
            .filter(|(_, flight)| flight.lane == lane)
            .map(|(token, flight)| (*token, flight.silent))
            .collect();
        for (earlier, silent) in earlier {
            if !silent && !self.taken_away {
                return Err(format!(
                    "operation {token} has ended before {earlier}, of the same queue: {lane:?}"
                ));
            }
            self.flights.remove(&earlier);
        }
        Ok(())
    }

    /// Whether something may have let an operation have what it asked for.
    fn allowed(&self, asked: &RecordedCommand, born: u64) -> Result<(), String> {
        let RecordedCommand {
            addr,
            len,
            rkey,
            needs,
        } = *asked;
        let lets = |right: &Right| {
            right.rkey == rkey
                && right.until >= born
                && right.addr <= addr
                && addr.saturating_add(len) <= right.addr + right.len
                && right.access.contains(needs)
        };
        if len == 0 || self.rights.iter().any(lets) {
            return Ok(());
        }
        let like: Vec<_> = (self.rights.iter())
            .filter(|right| right.rkey >> 8 == rkey >> 8)
            .collect();
        Err(format!(
            "nothing allowed it since {born}: {asked:x?}, but these did: {like:x?}"
        ))
    }

    // Keys.

    pub fn granted(&mut self, right: Granted) {
        self.rights.push(Right {
            rkey: right.rkey,
            addr: right.addr,
            len: right.len,
            access: right.access,
            region: right.region,
            window: right.window,
            bind: right.bind,
            from: self.clock,
            done: None,
            until: OPEN,
            is_left: false,
        });
    }

    fn end(&mut self, which: impl Fn(&Right) -> bool) {
        let clock = self.clock;
        for right in &mut self.rights {
            if right.until == OPEN && which(right) {
                right.until = clock;
            }
        }
    }

    fn bind_ended(&mut self, token: u64, lane: Lane, done: bool) {
        let clock = self.clock;
        let is_this = |right: &&mut Right| right.bind == Some((lane, token));
        let Some(this) = self.rights.iter_mut().find(is_this) else {
            return;
        };
        this.done = Some(clock);
        if !done {
            // It may have been done for all that: the device does not wait with it
            // for a read before it, whose failure then flushes both.
            return;
        }
        let (window, from) = (this.window, this.from);
        self.end(|right| {
            right.window == window
                && right.bind.is_some_and(|(there, number)| {
                    number < token && (there == lane || right.done.is_some_and(|done| done < from))
                })
        });
    }

    /// A key was invalidated by what was posted then.
    fn revoked(&mut self, rkey: u32, lane: Lane, born: u64) {
        self.end(|right| {
            right.rkey == rkey
                && right.window.is_some()
                && right.done.is_some_and(|done| {
                    done < born || right.bind.is_some_and(|(there, _)| there == lane)
                })
        });
    }

    /// A window is closed.
    pub fn window_closed(&mut self, id: u64) {
        self.end(|right| right.window == Some(id));
    }

    /// A region is closed: nothing leads there any more.
    pub fn region_closed(&mut self, id: u64) {
        let own = |right: &Right| right.region == id;
        for right in self.rights.iter().filter(|right| own(right)) {
            if right.window.is_none() {
                self.gone.push((right.addr, right.rkey));
            }
        }
        for right in self.rights.iter_mut().filter(|right| own(right)) {
            right.is_left = right.is_open();
        }
        self.end(own);
    }

    // Queue pairs.

    pub fn made(&mut self) -> u64 {
        let id = self.fresh();
        let made = DeviceQueuePair {
            halves: 2,
            forgotten: false,
        };
        self.made.insert(id, made);
        id
    }

    /// A queue pair is a member of a group, which keeps it alive as a half does.
    pub fn joined(&mut self, id: u64) {
        if let Some(made) = self.made.get_mut(&id) {
            made.halves += 1;
        }
    }

    /// A half is gone, and perhaps its queue pair.
    pub fn half_gone(&mut self, id: u64) {
        let Some(made) = self.made.get_mut(&id) else {
            return;
        };
        made.halves -= 1;
        if made.halves == 0 && !made.forgotten {
            self.destroyed(id);
        }
    }

    pub fn half_forgotten(&mut self, id: u64) {
        self.leaks = true;
        if let Some(made) = self.made.get_mut(&id) {
            made.forgotten = true;
        }
    }

    /// A queue pair is no more, and what was in flight there is released.
    pub fn destroyed(&mut self, id: u64) {
        self.made.remove(&id);
        let here = [Lane::Send(id), Lane::Receive(id)];
        self.flights
            .retain(|_, flight| !here.contains(&flight.lane));
    }

    /// A queue pair was closed and has given everything back.
    pub fn drained(&mut self, id: u64, released: Vec<Ended>) -> Result<(), String> {
        self.read_failures()?;
        for ended in released {
            self.ended(ended)?;
        }
        let here = [Lane::Send(id), Lane::Receive(id)];
        let lost = self
            .flights
            .iter()
            .find(|(_, flight)| here.contains(&flight.lane) && !flight.silent);
        if let Some((token, flight)) = lost {
            if !self.taken_away {
                return Err(format!(
                    "operation {token} ({:?}) did not come back from a queue pair that was drained",
                    flight.operation
                ));
            }
        }
        self.destroyed(id);
        Ok(())
    }

    pub fn unshared(&mut self, id: u64, released: Vec<Ended>) -> Result<(), String> {
        for ended in released {
            self.ended(ended)?;
        }
        let lane = Lane::Shared(id);
        if let Some((token, _)) = self.flights.iter().find(|(_, flight)| flight.lane == lane) {
            return Err(format!(
                "receive {token} did not come back from a shared queue that was closed"
            ));
        }
        Ok(())
    }

    // Checks.

    /// Every byte is what it should be.
    pub fn check(&mut self, all: bool) -> Result<(), String> {
        for piece in &self.pieces {
            if let Some(at) = differs(&piece.buffer, &piece.shadow) {
                return Err(format!(
                    "memory {:#x} of the program's was changed, at byte {at} of {}",
                    piece.addr,
                    piece.buffer.len()
                ));
            }
        }
        let frozen = (self.frozen.iter()).map(|it| (&it.memory[..], &it.shadow[..]));
        let pooled = (self.pooled.iter()).map(|it| (&it.memory[..], &it.shadow[..]));
        for (memory, shadow) in frozen.chain(pooled) {
            if let Some(at) = differs(memory, shadow) {
                return Err(format!(
                    "memory {:p}, frozen or of a pool, was changed, at byte {at} of {}",
                    memory.as_ptr(),
                    memory.len()
                ));
            }
        }
        let writes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        for at in 0..self.remotes.len() {
            let remote = &self.remotes[at];
            let changes = (self.rights.iter()).any(|right| {
                right.region == remote.id && right.is_open() && right.access.intersects(writes)
            }) || (self.flights.values())
                .any(|flight| flight.written.contains(&remote.id));
            let remote = &mut self.remotes[at];
            if changes {
                remote.shadow = None;
                continue;
            }
            if !all && remote.shadow.is_some() {
                continue;
            }
            let mut now = vec![0; remote.region.len()];
            remote
                .region
                .read_at(0, &mut now)
                .map_err(|error| error.to_string())?;
            if let Some(shadow) = &remote.shadow {
                if let Some(at) = differs(&now, shadow) {
                    return Err(format!(
                        "a region that nobody may write was changed, at byte {at}: {:?}",
                        remote.region
                    ));
                }
            }
            remote.shadow = Some(now);
        }
        Ok(())
    }

    /// The program writes to a region itself.
    pub fn store(&mut self, at: usize, offset: usize, bytes: &[u8]) -> Done {
        let remote = &mut self.remotes[at];
        if remote.region.write_at(offset, bytes).is_err() {
            return Ok(false);
        }
        if let Some(shadow) = &mut remote.shadow {
            shadow[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        Ok(true)
    }

    /// A completion queue, also of a reader, that is looked at in another way:
    /// behind the failure that the reader has set aside.
    pub fn queue(&mut self, at: usize) -> Result<&mut CompletionQueue, String> {
        self.read_failures()?;
        Ok(self.cqs[at].poller.queue())
    }

    /// Reads what is there of a queue's completions.
    pub fn poll_all(&mut self, at: usize) -> Result<usize, String> {
        let mut count = 0;
        loop {
            let polled = self.queue(at)?.poll_one();
            match polled {
                Ok(Some(completion)) => {
                    count += 1;
                    self.ended(completion.into())?;
                }
                Ok(None) => return Ok(count),
                Err(_) if self.taken_away => {}
                Err(error) => return Err(format!("a completion queue says: {error}")),
            }
        }
    }

    /// Reads the failed operations that readers have taken out of their queues and
    /// not shown yet.
    pub fn read_failures(&mut self) -> Result<(), String> {
        for at in 0..self.cqs.len() {
            if let Poller::Reader(reader) = &mut self.cqs[at].poller {
                if let Some(failed) = reader.read_err() {
                    self.ended(failed.into())?;
                }
            }
        }
        Ok(())
    }

    /// Everything is closed; all of it is back, and nothing is left.
    pub fn finish(mut self) -> Result<BTreeMap<String, (u64, u64)>, String> {
        self.check(true)?;
        self.clock += 1;
        self.read_failures()?;
        for (membership, id) in std::mem::take(&mut self.memberships) {
            drop(membership);
            self.half_gone(id);
        }
        self.targets.clear();
        for Initiator { initiator, id, .. } in std::mem::take(&mut self.initiators) {
            drop(initiator);
            self.half_gone(id);
            self.half_gone(id);
        }
        for pair in std::mem::take(&mut self.pairs) {
            self.close_and_drain(pair)?;
        }
        for shared in std::mem::take(&mut self.shared) {
            let id = shared.id;
            if let Ok(released) = shared.queue.close() {
                self.unshared(id, released.into_iter().map(Ended::from).collect())?;
            }
        }
        let left = (self.flights.iter()).find(|(_, flight)| match flight.lane {
            Lane::Send(id) | Lane::Receive(id) => {
                !flight.silent && self.made.get(&id).is_none_or(|made| !made.forgotten)
            }
            Lane::Shared(_) => false,
        });
        if let Some((token, flight)) = left {
            return Err(format!(
                "operation {token} ({:?}) is still in flight, on nothing",
                flight.operation
            ));
        }
        self.check(true)?;
        let devices = self.devices.clone();
        let (leaks, own) = (self.leaks, self.own);
        let ends = std::mem::take(&mut self.ends);
        drop(self);
        for device in devices {
            let (objects, ranges) = (device.objects(), device.ranges());
            if !leaks && (objects, ranges) != (0, own) {
                return Err(format!(
                    "{objects} objects and {ranges} ranges of memory are left"
                ));
            }
        }
        Ok(ends)
    }

    /// Closes a queue pair by its completion queues, if they are there.
    pub fn close_and_drain(&mut self, pair: Pair) -> Done {
        let (send, receive) = (pair.send, pair.receive);
        let whole = match pair.body {
            Body::Whole(whole) => whole,
            Body::Halves(Some(send), Some(receive)) => match QueuePair::reunite(send, receive) {
                Ok(whole) => whole,
                Err(halves) => {
                    drop(halves);
                    self.half_gone(pair.send);
                    self.half_gone(pair.receive);
                    return Ok(false);
                }
            },
            Body::Halves(send, receive) => {
                if send.is_some() {
                    self.half_gone(pair.send);
                }
                if receive.is_some() {
                    self.half_gone(pair.receive);
                }
                return Ok(false);
            }
        };
        // Which queues these are is not said: any two are tried.
        let mut whole = whole;
        for one in 0..self.cqs.len() {
            for other in 0..self.cqs.len() {
                let mut cqs: Vec<_> = self.cqs.iter_mut().map(Some).collect();
                let Some(first) = cqs[one].take() else {
                    continue;
                };
                let second = cqs[other].take().map(|cq| cq.poller.queue());
                match whole.close_and_drain(first.poller.queue(), second) {
                    Ok(released) => {
                        let released = released.into_iter().map(Ended::from).collect();
                        self.drained(send, released)?;
                        if receive != send {
                            self.half_gone(receive);
                        }
                        return Ok(true);
                    }
                    Err(refused) => whole = refused.into_object(),
                }
            }
        }
        drop(whole);
        self.half_gone(send);
        self.half_gone(receive);
        Ok(false)
    }
}

/// What a key is good for from now on.
pub struct Granted {
    pub rkey: u32,
    pub addr: u64,
    pub len: u64,
    pub access: AccessFlags,
    pub region: u64,
    pub window: Option<u64>,
    pub bind: Option<(Lane, u64)>,
}

fn same_memory(buffer: &Buffer, away: &PostedMemory) -> Result<(), String> {
    let Sge { addr, .. } = buffer.raw_sge();
    if addr == away.addr && buffer.capacity() == away.shadow.len() {
        return Ok(());
    }
    Err(format!(
        "{} bytes at {addr:#x} came back instead of {} at {:#x}",
        buffer.capacity(),
        away.shadow.len(),
        away.addr
    ))
}

/// Where bytes are not what they should be.
fn differs(there: &[u8], wanted: &[u8]) -> Option<usize> {
    if there == wanted {
        return None;
    }
    (0..wanted.len().min(there.len()))
        .find(|at| there[*at] != wanted[*at])
        .or(Some(wanted.len().min(there.len())))
}
