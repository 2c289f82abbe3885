//! A stream's queue pair, buffers and credits. Nothing here blocks except
//! [`Engine::close`] and [`Engine::flush_until`].

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::events::{EventChannels, StreamEvents};
use super::fault::Fault;
use super::flow::Flow;
use super::messages::{Hello, ImmediateData};
use super::{ConnectInfo, StreamOptions};
use crate::cm::Connection;
use crate::cm::manager::Key;
use crate::completion::{Completion, CompletionQueue, Status};
use crate::memory::Buffer;
use crate::operation::Operation;
use crate::qp::{PostError, QueuePair, Transport, WorkRequest};
use crate::{Device, Gid, ProtectionDomain};

/// Number of completions that are read at once.
const BATCH: usize = 32;
/// Maximum number of messages per doorbell.
const DOORBELL: usize = 4;

/// A queue pair without memory, before it is connected.
pub(super) struct StreamQueues {
    pub qp: QueuePair,
    cq: CompletionQueue,
    channels: Arc<EventChannels>,
    options: StreamOptions,
}

impl StreamQueues {
    pub fn new(
        domain: &ProtectionDomain,
        channels: &Arc<EventChannels>,
        options: &StreamOptions,
    ) -> crate::Result<Self> {
        let context = domain.context();
        let (sends, receives) = (u32::from(options.sends), u32::from(options.receives));
        // Empty messages occupy entries too, and half of the queue may consist of
        // unsignalled messages that have completed.
        let depth = 2 * (sends + receives + 1);
        let cq = context
            .completion_queue()
            .entries(depth + receives)
            .channel(channels.completions())
            .build()?;
        let qp = domain
            .queue_pair(Transport::Reliable, &cq)
            .send_depth(depth)
            .recv_depth(receives)
            .build()?;
        Ok(Self {
            qp,
            cq,
            channels: Arc::clone(channels),
            options: options.clone(),
        })
    }

    /// Returns the channels that the stream's events arrive on.
    pub fn channels(&self) -> &EventChannels {
        &self.channels
    }

    /// Adds the stream to its channels, before its connection is moved there.
    pub fn add_to_channels(&self, connection: Key) -> StreamEvents {
        self.channels.add(self.cq.id(), connection)
    }

    /// Registers the memory of the stream, posts the receives, and returns the send buffers.
    /// The queue pair must be in INIT or a later state.
    pub fn post_receives(&mut self) -> crate::Result<Vec<Buffer>> {
        let size = self.options.size as usize;
        let domain = self.qp.domain().clone();
        let buffers = |count: u16| -> crate::Result<_> {
            let count = usize::from(count);
            let region = domain.alloc(size * count)?;
            Ok(region.into_buffers(size).take(count))
        };
        let free = buffers(self.options.sends)?.collect();
        let receives = buffers(self.options.receives)?;
        self.qp.receive_batch(|batch| {
            for buffer in receives {
                batch.receive(buffer, 0).map_err(PostError::into_error)?;
            }
            Ok::<_, crate::Error>(())
        })?;
        Ok(free)
    }
}

/// One side of a connected stream.
pub(super) struct Engine {
    qp: QueuePair,
    cq: CompletionQueue,
    events: Arc<StreamEvents>,
    connection: Connection,
    flow: Flow,
    /// Maximum bytes of a message.
    chunk: usize,
    /// Send buffers that are not in flight.
    free: Vec<Buffer>,
    /// Received buffers that are not fully read; the first is read up to `read_pos`.
    received: VecDeque<Buffer>,
    read_pos: usize,
    /// Buffers to be posted as receives again.
    to_repost: Vec<Buffer>,
    completions: Vec<Completion>,
    /// Messages since the last signalled message, and the maximum of that number.
    unsignaled: usize,
    signal_every: usize,
    /// Whether the completion queue is armed and its event was not read.
    armed: bool,
    /// The peer has disconnected.
    peer_disconnected: bool,
    /// Whether a message was flushed, and so may not have arrived.
    message_lost: bool,
    fault: Option<Fault>,
}

impl Engine {
    /// `connection` is established: the peer is ready to receive.
    pub fn new(
        queues: StreamQueues,
        free: Vec<Buffer>,
        events: StreamEvents,
        connection: Connection,
        peer: Hello,
    ) -> Self {
        let options = &queues.options;
        Self {
            flow: Flow::new(options.hello(), peer),
            chunk: options.size.min(peer.size) as usize,
            signal_every: (free.len() / 4).max(1),
            qp: queues.qp,
            cq: queues.cq,
            events: Arc::new(events),
            connection,
            free,
            received: VecDeque::new(),
            read_pos: 0,
            to_repost: Vec::new(),
            completions: Vec::with_capacity(BATCH),
            unsignaled: 0,
            armed: false,
            peer_disconnected: false,
            message_lost: false,
            fault: None,
        }
    }

    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Queries both ends.
    pub fn connect_info(&self) -> crate::Result<ConnectInfo> {
        let path = self.qp.query()?;
        let device = self.qp.domain().context().device();
        let grh = path.ah_attr.is_global.then_some(path.ah_attr.grh);
        Ok(ConnectInfo {
            local_addr: self.connection.local_addr().ok().flatten(),
            peer_addr: self.connection.peer_addr().ok().flatten(),
            device: device.map(Device::name).unwrap_or_default().to_owned(),
            qp_num: self.qp.qp_num(),
            peer_qp_num: path.dest_qp_num,
            peer_gid: grh.map(|grh| Gid(grh.dgid)),
        })
    }

    /// Returns the stream's events.
    pub fn events(&self) -> &Arc<StreamEvents> {
        &self.events
    }

    /// Processes completions, and sends credits and the end mark if they are due. Returns
    /// whether there were completions.
    pub fn progress(&mut self) -> bool {
        let mut any = false;
        loop {
            let (completions, free) = (&mut self.completions, &mut self.free);
            let reaped = self.cq.reap(
                BATCH,
                |entry, retired| completions.push(Completion::new(entry, retired)),
                |posted| free.extend(posted.payload.into_buffer()),
            );
            let mut completions = std::mem::take(&mut self.completions);
            for completion in completions.drain(..) {
                any = true;
                self.completed(completion);
            }
            self.completions = completions;
            match reaped {
                Ok(BATCH) => {}
                Ok(_) => break,
                Err(error) => {
                    self.fail(Fault::verbs(&error));
                    any = true;
                    break;
                }
            }
        }
        if any {
            self.post_receives();
            self.send_due();
        }
        any
    }

    fn completed(&mut self, mut completion: Completion) {
        let buffer = completion.take_buffer();
        match completion.result {
            Ok(success) if completion.operation == Operation::Receive => {
                let Some(buffer) = buffer else { return };
                let Some(immediate) = success.immediate().and_then(ImmediateData::decode) else {
                    self.fail(Fault::violation(super::flow::Violation::Immediate));
                    return;
                };
                if let Err(violation) = self.flow.received(immediate, buffer.len()) {
                    self.fail(Fault::violation(violation));
                    return;
                }
                if buffer.is_empty() {
                    self.to_repost.push(buffer);
                } else {
                    self.received.push_back(buffer);
                }
            }
            Ok(_) => self.free.extend(buffer),
            Err(failure) => {
                if completion.operation != Operation::Receive {
                    self.free.extend(buffer);
                    self.message_lost = true;
                }
                // A flush follows another error, which is reported.
                if failure.status != Status::WR_FLUSH_ERR {
                    self.fail(Fault::failure(failure));
                }
            }
        }
    }

    fn fail(&mut self, fault: Fault) {
        if self.fault.is_none() {
            tracing::debug!(?fault, "a stream is broken");
            self.fault = Some(fault);
        }
    }

    pub fn is_broken(&self) -> bool {
        self.peer_disconnected || self.fault.is_some()
    }

    /// Reposts the receives whose data was read.
    fn post_receives(&mut self) {
        if self.to_repost.is_empty() {
            return;
        }
        if self.is_broken() {
            self.to_repost.clear();
            return;
        }
        let to_repost = &mut self.to_repost;
        let posted = self.qp.receive_batch(|batch| {
            let mut count = 0;
            for mut buffer in to_repost.drain(..) {
                buffer.fill_up();
                match batch.receive(buffer, 0) {
                    Ok(()) => count += 1,
                    Err(error) => return Err(error.error),
                }
            }
            Ok(count)
        });
        match posted {
            Ok(count) => self.flow.posted(count),
            Err(error) => self.fail(Fault::verbs(&error)),
        }
    }

    /// Sends credits and the end mark if they are due.
    fn send_due(&mut self) {
        while !self.is_broken() {
            let Some(immediate) = self.flow.due() else {
                break;
            };
            let mut request = WorkRequest::send(()).immediate(immediate.encode());
            if self.flow.end_is_sent() {
                // The signalled end mark retires all earlier messages, and no data
                // follows.
                self.unsignaled = 0;
            } else {
                request = request.unsignaled();
            }
            if let Err(error) = self.qp.post(request) {
                self.fail(Fault::verbs(&error.error));
            }
        }
    }

    /// Passes received data to `take`, buffer by buffer, until it consumes less than it is
    /// given. Returns `None` if there is no data, 0 at the end of the stream.
    pub fn read_with(&mut self, mut take: impl FnMut(&[u8]) -> usize) -> io::Result<Option<usize>> {
        if self.received.is_empty() {
            if self.flow.peer_ended() {
                return Ok(Some(0));
            }
            return match &self.fault {
                Some(fault) => Err(fault.to_io()),
                None if self.peer_disconnected => Err(Fault::RESET.to_io()),
                None => Ok(None),
            };
        }
        let mut total = 0;
        while let Some(buffer) = self.received.front() {
            let rest = &buffer[self.read_pos..];
            let taken = take(rest).min(rest.len());
            total += taken;
            if taken < rest.len() {
                self.read_pos += taken;
                break;
            }
            self.read_pos = 0;
            self.to_repost.extend(self.received.pop_front());
        }
        if !self.to_repost.is_empty() {
            self.post_receives();
            self.send_due();
        }
        Ok(Some(total))
    }

    /// Copies and posts as much data as buffers and credits allow. Returns `None` if there
    /// are none.
    pub fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        if self.flow.is_finished() {
            return Err(Fault::SHUT_DOWN.to_io());
        }
        if let Some(error) = self.write_error() {
            return Err(error);
        }
        let mut source = Gather {
            slices,
            read_pos: 0,
        };
        if source.is_empty() {
            return Ok(Some(0));
        }
        let mut total = 0;
        while !self.is_broken() && !source.is_empty() {
            let room = (self.flow.room() as usize).min(self.free.len());
            if room == 0 {
                break;
            }
            let posted = self.post_data(&mut source, room.min(DOORBELL));
            match posted {
                Ok(bytes) => total += bytes,
                Err(error) => self.fail(Fault::verbs(&error)),
            }
        }
        match self.write_error() {
            Some(error) if total == 0 => Err(error),
            _ => Ok((total > 0).then_some(total)),
        }
    }

    fn write_error(&self) -> Option<io::Error> {
        match &self.fault {
            Some(fault) => Some(fault.to_io()),
            None if self.peer_disconnected && self.flow.peer_ended() => Some(Fault::CLOSED.to_io()),
            None if self.peer_disconnected => Some(Fault::RESET.to_io()),
            None => None,
        }
    }

    /// Posts up to `messages` data messages, for which there are credits and buffers.
    fn post_data(&mut self, source: &mut Gather<'_, '_>, messages: usize) -> crate::Result<usize> {
        let Self {
            qp,
            flow,
            free,
            unsignaled,
            ..
        } = self;
        let (chunk, every) = (self.chunk, self.signal_every);
        qp.batch(|batch| {
            let mut total = 0;
            for _ in 0..messages {
                if source.is_empty() {
                    break;
                }
                let Some(mut buffer) = free.pop() else { break };
                let len = source.copy_to(&mut buffer, chunk)?;
                let mut request = WorkRequest::send(buffer).immediate(flow.data().encode());
                *unsignaled += 1;
                if *unsignaled < every {
                    request = request.unsignaled();
                } else {
                    *unsignaled = 0;
                }
                batch.post(request).map_err(PostError::into_error)?;
                total += len;
            }
            Ok::<_, crate::Error>(total)
        })
        .map_err(Into::into)
    }

    /// Ends writing.
    pub fn finish(&mut self) {
        self.flow.finish();
        self.send_due();
    }

    /// Returns whether the end mark was posted; an error if it cannot be.
    pub fn end_is_posted(&self) -> io::Result<Option<()>> {
        if self.flow.end_is_sent() {
            return Ok(Some(()));
        }
        self.write_error().map_or(Ok(None), Err)
    }

    /// Returns whether all written data and the end mark have arrived, or the peer has ended
    /// its stream and disconnected, and so does not need the rest.
    pub fn is_flushed(&self) -> io::Result<Option<()>> {
        let arrived = self.qp.in_flight().0 == 0 && !self.message_lost;
        let peer_done = self.peer_disconnected && self.flow.peer_ended();
        if self.flow.end_is_sent() && self.fault.is_none() && (arrived || peer_done) {
            return Ok(Some(()));
        }
        self.write_error().map_or(Ok(None), Err)
    }

    /// Requests notification for the next completion. The caller may wait only if
    /// this returns `false`; [`progress`](Self::progress) must have found nothing
    /// before.
    pub fn arm(&mut self) -> io::Result<bool> {
        if self.armed {
            return Ok(false);
        }
        self.armed = true;
        self.cq
            .arm(false)
            .map_err(|error| Fault::verbs(&error).to_io())
    }

    /// Consumes the completion events.
    pub fn take_events(&mut self) -> io::Result<()> {
        match self.events.take_completions() {
            Ok(true) => self.armed = false,
            Ok(false) => {}
            Err(error) => return Err(Fault::verbs(&error).to_io()),
        }
        Ok(())
    }

    /// Processes the events of the connection.
    pub fn handle_connection_events(&mut self) {
        if let Err(error) = self.events.take_connection_event() {
            return self.fail(Fault::manager(&error));
        }
        if self.connection.has_ended() && !self.peer_disconnected {
            // A peer waits for delivery before it disconnects, so all its data has
            // arrived.
            self.progress();
            self.peer_disconnected = true;
            self.disconnect();
            self.progress();
        }
    }

    pub fn disconnect(&mut self) {
        // The peer may have disconnected at the same time.
        if let Err(error) = self.connection.disconnect(&mut self.qp) {
            tracing::debug!(%error, "disconnecting a stream");
        }
    }

    /// Sends the end mark, waits up to `timeout` until everything has arrived,
    /// and disconnects in any case.
    ///
    /// # Errors
    /// `TimedOut`, or the stream's error.
    pub fn close(&mut self, timeout: Duration) -> io::Result<()> {
        let outcome = self.flush_until(Instant::now().checked_add(timeout));
        self.disconnect();
        outcome
    }

    /// Does [`close`](Self::close) without disconnecting.
    pub fn flush_until(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.finish();
        while self.try_flush()?.is_none() {
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.events.wait(deadline)?;
            if self.events.has_connection_event() {
                self.handle_connection_events();
            }
        }
        Ok(())
    }

    /// Returns whether everything has arrived; otherwise there will be
    /// an event.
    pub fn try_flush(&mut self) -> io::Result<Option<()>> {
        loop {
            self.progress();
            if self.is_flushed()?.is_some() {
                return Ok(Some(()));
            }
            self.take_events()?;
            if !self.arm()? {
                return Ok(None);
            }
        }
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RdmaStream")
            .field("qp", &self.qp)
            .field("flow", &self.flow)
            .field("unread", &self.received.len())
            .field("fault", &self.fault)
            .finish()
    }
}

/// The bytes of several slices in sequence.
struct Gather<'s, 'd> {
    slices: &'s [IoSlice<'d>],
    /// Bytes of the first slice that are consumed.
    read_pos: usize,
}

impl Gather<'_, '_> {
    fn is_empty(&mut self) -> bool {
        while let Some((first, rest)) = self.slices.split_first() {
            if self.read_pos < first.len() {
                return false;
            }
            self.read_pos = 0;
            self.slices = rest;
        }
        true
    }

    /// Fills a buffer with the next bytes, at most `max`.
    fn copy_to(&mut self, buffer: &mut Buffer, max: usize) -> crate::Result<usize> {
        buffer.fill_up();
        let max = max.min(buffer.len());
        let mut len = 0;
        while len < max && !self.is_empty() {
            let Some(first) = self.slices.first() else {
                break;
            };
            let piece = &first[self.read_pos..];
            let count = piece.len().min(max - len);
            buffer[len..len + count].copy_from_slice(&piece[..count]);
            self.read_pos += count;
            len += count;
        }
        buffer.set_len(len)?;
        Ok(len)
    }
}
