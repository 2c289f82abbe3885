//! One side of a measurement: connection, memory, completions.

use std::time::{Duration, Instant};

use ringverbs::{
    AccessFlags, Buffer, Completion, Context, Endpoint, LocalAddress, Operation, ProtectionDomain,
    QueuePair, RemoteAddr, RemoteRegion, Transport, WorkRequest,
};

use super::error::PerfError;
use super::protocol::Measured;
use crate::error::Error;
use crate::poller::Poller;

/// Time without progress after which the other side is given up.
const PATIENCE: Duration = Duration::from_secs(10);
/// Completions read at once.
const BATCH: usize = 32;
/// Limit for all buffers of a side together, unless one message needs more.
const MEMORY: usize = 64 << 20;

/// Parameters of a side.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub operation: Measured,
    pub size: u32,
    pub depth: u32,
    pub events: bool,
    pub port: u8,
    pub gid_index: Option<u8>,
}

/// One side.
pub struct Side {
    plan: Plan,
    local: LocalAddress,
    qp: QueuePair,
    poller: Poller,
    /// Free buffers for operations.
    free: Vec<Buffer>,
    /// Memory for the other side's operations.
    region: Option<RemoteRegion>,
    completions: Vec<Completion>,
    /// Operations posted and completed.
    begun: u64,
    completed: u64,
    /// Messages received and processed.
    received: u64,
    served: u64,
}

fn doing(what: &str) -> impl FnOnce(ringverbs::Error) -> Error {
    Error::native(format!("measuring: {what}"))
}

impl Side {
    /// Creates all objects. Sends need receives on the other side, other
    /// operations need memory there.
    pub fn new(context: &Context, mut plan: Plan) -> Result<Self, Error> {
        // As many buffers as outstanding operations, in each direction.
        let room = plan.size.max(8) as usize;
        let fits = u32::try_from(MEMORY / room / 2).unwrap_or(u32::MAX);
        plan.depth = plan.depth.min(fits).max(1);
        let local = match plan.gid_index {
            Some(index) => context.local_address_with(plan.port, index),
            None => context.local_address(plan.port),
        };
        let local = local.map_err(doing("the port's address"))?;
        let domain = context.alloc_pd().map_err(doing("protection domain"))?;
        let poller = Poller::new(context, plan.depth.saturating_mul(2) + 2, plan.events);
        let poller = poller.map_err(doing("completion queue"))?;
        let mut qp = domain
            .queue_pair(Transport::Reliable, &poller.cq)
            .send_depth(plan.depth)
            .recv_depth(plan.depth)
            .build()
            .map_err(doing("queue pair"))?;
        qp.initialize(&local).map_err(doing("queue pair to INIT"))?;
        let count = plan.depth as usize;
        let both = if plan.operation == Measured::Send {
            2
        } else {
            1
        };
        let region = domain.alloc(room * count * both).map_err(doing("memory"))?;
        let mut free: Vec<Buffer> = region.into_buffers(room).take(count * both).collect();
        let mut side = Self {
            region: Self::reachable(&domain, plan)?,
            free: Vec::new(),
            completions: (0..BATCH).map(|_| Completion::default()).collect(),
            plan,
            local,
            qp,
            poller,
            begun: 0,
            completed: 0,
            received: 0,
            served: 0,
        };
        if plan.operation == Measured::Send {
            for buffer in free.drain(..count) {
                side.receive(buffer)?;
            }
        }
        side.free = free;
        Ok(side)
    }

    fn reachable(domain: &ProtectionDomain, plan: Plan) -> Result<Option<RemoteRegion>, Error> {
        let access = match plan.operation {
            Measured::Send => return Ok(None),
            Measured::Write => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
            Measured::Read => AccessFlags::REMOTE_READ,
            Measured::Atomic => AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_ATOMIC,
        };
        let region = domain.alloc_remote(plan.size.max(8) as usize, access);
        region.map(Some).map_err(doing("memory for the other side"))
    }

    /// Returns the address for the other side.
    pub fn endpoint(&self) -> Endpoint {
        self.qp.endpoint(&self.local)
    }

    /// Returns the memory for the other side's operations.
    pub fn key(&self) -> RemoteAddr {
        self.region
            .as_ref()
            .map(RemoteRegion::key)
            .unwrap_or_default()
    }

    /// Returns the maximum of outstanding operations.
    pub fn depth(&self) -> u32 {
        self.plan.depth
    }

    /// Connects to the other side.
    pub fn connect(&mut self, peer: &Endpoint) -> Result<(), Error> {
        let connected = self.qp.connect(&self.local, peer);
        connected.map_err(doing("connecting the queue pairs"))
    }

    fn receive(&mut self, buffer: Buffer) -> Result<(), Error> {
        let posted = self.qp.receive(buffer, 0);
        posted.map_err(|error| doing("posting a receive")(error.into_error()))
    }

    /// Posts an operation of `size` bytes. There must be a free buffer.
    pub fn begin(&mut self, size: u32, at: RemoteAddr) -> Result<(), Error> {
        let Some(mut buffer) = self.free.pop() else {
            return Err(PerfError::NoBuffer.into());
        };
        let fits = buffer.set_len(size as usize);
        fits.map_err(doing("cutting a buffer"))?;
        let request = match self.plan.operation {
            Measured::Send => WorkRequest::send(buffer),
            Measured::Write => WorkRequest::write(buffer, at),
            Measured::Read => WorkRequest::read(buffer, at),
            Measured::Atomic => WorkRequest::fetch_add(buffer, at, 1),
        };
        let posted = self.qp.post(request);
        self.begun += 1;
        posted.map_err(|error| doing("posting")(error.into_error()))
    }

    /// Returns the number of outstanding operations.
    fn outstanding(&self) -> u64 {
        self.begun - self.completed
    }

    /// Waits for completions and processes them: buffers become free, receives
    /// are posted again.
    fn progress(&mut self) -> Result<(), Error> {
        let polled = self.poller.poll(&mut self.completions, PATIENCE);
        let count = polled.map_err(doing("polling"))?;
        if count == 0 {
            return Err(PerfError::Silence(PATIENCE.as_secs()).into());
        }
        for completion in self.completions.iter_mut().take(count) {
            if let Err(failure) = completion.result {
                return Err(PerfError::Failed {
                    operation: completion.operation,
                    status: failure.to_string(),
                }
                .into());
            }
            let Some(buffer) = completion.take_buffer() else {
                continue;
            };
            if completion.operation == Operation::Receive {
                self.received += 1;
                let posted = self.qp.receive(buffer, 0);
                posted.map_err(|error| doing("posting a receive")(error.into_error()))?;
            } else {
                self.completed += 1;
                self.free.push(buffer);
            }
        }
        Ok(())
    }

    /// Measures single operations, in nanoseconds: for a send half of the round
    /// trip, for others the time from posting to completion.
    pub fn latency(
        &mut self,
        size: u32,
        at: RemoteAddr,
        iterations: u64,
        mut tick: impl FnMut(),
    ) -> Result<Vec<u64>, Error> {
        let echoed = self.plan.operation == Measured::Send;
        let mut times = Vec::with_capacity(iterations as usize);
        for _ in 0..iterations {
            let before = self.received;
            let start = Instant::now();
            self.begin(size, at)?;
            while self.outstanding() > 0 || (echoed && self.received == before) {
                self.progress()?;
            }
            let time = start.elapsed() / if echoed { 2 } else { 1 };
            times.push(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
            tick();
        }
        Ok(times)
    }

    /// Keeps the maximum of operations outstanding. Returns the total time.
    pub fn bandwidth(
        &mut self,
        size: u32,
        at: RemoteAddr,
        iterations: u64,
        mut tick: impl FnMut(),
    ) -> Result<Duration, Error> {
        let start = Instant::now();
        let mut begun = 0;
        while begun < iterations || self.outstanding() > 0 {
            while begun < iterations && self.outstanding() < u64::from(self.plan.depth) {
                self.begin(size, at)?;
                begun += 1;
                tick();
            }
            self.progress()?;
        }
        Ok(start.elapsed())
    }

    /// Receives messages, and sends each back if `echo` is set.
    pub fn serve(&mut self, size: u32, messages: u64, echo: bool) -> Result<(), Error> {
        let until = self.served + messages;
        while self.served < until || self.outstanding() > 0 {
            while self.served < self.received && !(echo && self.free.is_empty()) {
                self.served += 1;
                if echo {
                    self.begin(size, RemoteAddr::default())?;
                }
            }
            if self.served < until || self.outstanding() > 0 {
                self.progress()?;
            }
        }
        Ok(())
    }
}
