//! Tagged messages over plain sends.
//!
//! Tag matching is done in software: a message is sent with a header of 16 bytes, arrives
//! in a buffer of the library, and is copied to the receive that it matches. A message
//! without a matching receive stays in its buffer until there is one. When unmatched
//! messages occupy all buffers, the transport makes the peer wait, and messages that would
//! match wait behind them; with [`TaggedEndpoint::set_spill`], unmatched messages are copied
//! out of these buffers.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use ringverbs::completion::{EntryFlags, ErrorEntry, TaggedEntry};
use ringverbs::{
    Buffer, Completion, CompletionChannel, CompletionQueue, Endpoint, Error, LocalAddress,
    Operation, Payload, PostError, QueuePair, Registration, Result, Status, Transport,
};

use crate::deadline::Deadline;

/// Bytes of the header of a message: tag, length, zeros, little-endian.
const HEADER: usize = 16;

/// The longest message of a queue pair.
const MAX_MESSAGE: usize = 1 << 31;

/// Token of the library's own receives.
const RECEIVE: u64 = 1 << 32;

/// The tags that a receive accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagMatch {
    /// The tag.
    pub tag: u64,
    /// Bits of the tag that are ignored.
    pub ignore: u64,
}

impl TagMatch {
    /// Accepts exactly this tag.
    pub fn exact(tag: u64) -> Self {
        Self { tag, ignore: 0 }
    }

    /// Accepts any tag.
    pub fn any() -> Self {
        Self {
            tag: 0,
            ignore: u64::MAX,
        }
    }

    /// Returns whether it accepts `tag`.
    pub fn takes(&self, tag: u64) -> bool {
        (self.tag ^ tag) & !self.ignore == 0
    }
}

/// Unmatched receives and messages, both in order: a message goes to the first
/// receive that accepts it, and a receive gets the first message that it accepts.
#[derive(Debug)]
struct Matcher<R, M> {
    expected: VecDeque<(TagMatch, R)>,
    unexpected: VecDeque<(u64, M)>,
}

impl<R, M> Matcher<R, M> {
    fn new() -> Self {
        Self {
            expected: VecDeque::new(),
            unexpected: VecDeque::new(),
        }
    }

    /// Removes and returns the receive for an arrived message.
    fn take_expected(&mut self, tag: u64) -> Option<R> {
        let at = self
            .expected
            .iter()
            .position(|(which, _)| which.takes(tag))?;
        self.expected.remove(at).map(|(_, receive)| receive)
    }

    /// Returns the first unmatched message that `which` accepts.
    fn find(&self, which: TagMatch) -> Option<&(u64, M)> {
        self.unexpected.iter().find(|(tag, _)| which.takes(*tag))
    }

    /// Removes and returns the first unmatched message that `which` accepts.
    fn claim(&mut self, which: TagMatch) -> Option<(u64, M)> {
        let at = self
            .unexpected
            .iter()
            .position(|(tag, _)| which.takes(*tag))?;
        self.unexpected.remove(at)
    }
}

/// A message that [`TaggedEndpoint::claim`] reserved for a specific receive.
#[derive(Debug)]
#[must_use = "a claimed message occupies a buffer until it is received or discarded"]
pub struct Claimed {
    tag: u64,
    message: Message,
    /// The memory of the endpoint's messages, which identifies the endpoint.
    pool: Registration,
}

/// A message that has arrived.
#[derive(Debug)]
enum Message {
    /// In the buffer where it arrived, with its header.
    Arrived(Buffer),
    /// Copied out of that buffer, without its header.
    Spilled(Box<[u8]>),
}

impl Message {
    fn body(&self) -> &[u8] {
        match self {
            Self::Arrived(buffer) => buffer.get(HEADER..).unwrap_or_default(),
            Self::Spilled(bytes) => bytes,
        }
    }
}

impl Claimed {
    /// Returns the tag.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.message.body().len()
    }

    /// Returns whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One end of a connection for tagged messages (`fi_tsend`, `fi_trecv`). The peer must
/// also use a `TaggedEndpoint`.
///
/// If its completion queue has a channel, a program can wait for it: by
/// [`wait`](Self::wait), or, together with other descriptors, by
/// [`channel`](Self::channel) and [`arm`](Self::arm).
///
/// It holds up to `depth` unmatched messages. Further sends of the peer wait (the transport
/// retries, see [`ReadyToSend::rnr_retry`](ringverbs::qp::ReadyToSend::rnr_retry)), even if a
/// posted receive accepts the message. A program whose receives are reordered by more than
/// `depth` messages needs [`set_spill`](Self::set_spill).
pub struct TaggedEndpoint {
    // Declared before the queue, so that it is destroyed first.
    qp: QueuePair,
    cq: CompletionQueue,
    max_message: usize,
    /// The memory of all messages.
    pool: Registration,
    /// Send buffers that are not in flight.
    spare: Vec<Buffer>,
    /// User tokens of sends in flight, by internal token.
    tokens: Vec<u64>,
    free_tokens: Vec<u32>,
    matcher: Matcher<(u64, Buffer), Message>,
    /// Maximum and current number of messages copied out of the receive buffers.
    spill: usize,
    spilled: usize,
    done: VecDeque<Result<TaggedEntry, ErrorEntry>>,
}

impl TaggedEndpoint {
    /// Creates an endpoint from an unused queue pair of a reliable connection, which
    /// completes in `cq`. The queue pair is connected, or at least initialised so that
    /// receives can be posted. Up to `depth` messages of up to `max_message` bytes may be in
    /// flight in each direction.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unsuitable queue pair, or another queue pair's
    /// completion queue; [`Error::Limit`] for a depth above the queue pair's;
    /// those of allocating memory.
    pub fn new(
        mut qp: QueuePair,
        cq: CompletionQueue,
        depth: u32,
        max_message: usize,
    ) -> Result<Self> {
        if qp.transport() != Transport::Reliable || qp.in_flight() != (0, 0) {
            return Err(Error::Invalid {
                what: "tagged messages need a fresh queue pair of a reliable connection",
            });
        }
        if !qp.completes_in(&cq) {
            return Err(Error::Invalid {
                what: "this is not the completion queue of the queue pair",
            });
        }
        let capacity = qp.capacity();
        let allowed = capacity.max_send_wr.min(capacity.max_recv_wr);
        if depth == 0 || depth > allowed {
            return Err(Error::Limit {
                what: "tagged messages in flight",
                asked: depth.into(),
                allowed: allowed.into(),
            });
        }
        let size = max_message
            .checked_add(HEADER)
            .filter(|size| *size <= MAX_MESSAGE)
            .ok_or(Error::Limit {
                what: "bytes in a tagged message",
                asked: max_message as u64,
                allowed: (MAX_MESSAGE - HEADER) as u64,
            })?;
        let domain = qp.domain().clone();
        let all = size
            .checked_mul(2 * depth as usize)
            .ok_or(Error::NoMemory)?;
        let mut pool = domain.alloc(all)?.into_buffer();
        let memory = pool.registration();
        let mut spare = Vec::with_capacity(depth as usize);
        for _ in 0..depth {
            qp.receive(pool.split_to(size), RECEIVE)
                .map_err(PostError::into_error)?;
            spare.push(pool.split_to(size));
        }
        Ok(Self {
            qp,
            cq,
            max_message,
            pool: memory,
            spare,
            tokens: vec![0; depth as usize],
            free_tokens: (0..depth).collect(),
            matcher: Matcher::new(),
            spill: 0,
            spilled: 0,
            done: VecDeque::with_capacity(2 * depth as usize),
        })
    }

    /// Returns the queue pair. Only the endpoint posts to it.
    pub fn queue_pair(&self) -> &QueuePair {
        &self.qp
    }

    /// Connects the queue pair; see [`QueuePair::connect`].
    ///
    /// # Errors
    /// As [`QueuePair::connect`].
    pub fn connect(&mut self, local: &LocalAddress, peer: &Endpoint) -> Result<()> {
        self.qp.connect(local, peer)
    }

    /// Sets the maximum number of unmatched messages that are copied out of the receive
    /// buffers, so that others can arrive; default 0. Each copy takes memory of the message's
    /// length, so a peer can make this side use `messages` times the longest message.
    /// Messages that have already arrived are not copied.
    pub fn set_spill(&mut self, messages: usize) {
        self.spill = messages;
    }

    /// Returns the channel of its events, if its completion queue has one.
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.cq.channel()
    }

    /// Arms the completion queue and checks it again. The caller may wait for an
    /// event of the [`channel`](Self::channel) only if this returns `false`; true
    /// means that there may be an entry.
    ///
    /// # Errors
    /// As [`CompletionQueue::arm`].
    pub fn arm(&mut self) -> Result<bool> {
        if self.done.is_empty() {
            self.cq.arm(false)
        } else {
            Ok(true)
        }
    }

    /// Waits until [`next_entry`](Self::next_entry) has a completion to process, which may
    /// yield no entry: an unmatched message yields none. Waits without limit if `timeout` is
    /// `None`; returns false after the timeout, or if a signal handler ran. Nothing else may
    /// read the channel during the wait, and events of other queues on it are lost.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the completion queue has no channel; EIO if the
    /// device was removed.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let deadline = Deadline::after(timeout);
        loop {
            if self.arm()? {
                return Ok(true);
            }
            let remaining = deadline.remaining();
            let event = match self.cq.channel() {
                Some(channel) => channel.wait(remaining)?,
                None => None,
            };
            match event {
                Some(event) if event.is_of(&self.cq) => return Ok(true),
                // The event belongs to another queue, or to an earlier request for
                // notification.
                Some(_) if !deadline.has_passed() => {}
                _ => return Ok(false),
            }
        }
    }

    /// Sends a message, which is copied. Its entry has `token`.
    ///
    /// # Errors
    /// [`Error::Limit`] for a message that is too long; [`Error::QueueFull`] while `depth`
    /// messages are in flight; errors of posting.
    pub fn send(&mut self, tag: u64, message: &[u8], token: u64) -> Result<()> {
        if message.len() > self.max_message {
            return Err(Error::Limit {
                what: "bytes in a tagged message",
                asked: message.len() as u64,
                allowed: self.max_message as u64,
            });
        }
        let (Some(&slot), Some(mut buffer)) = (self.free_tokens.last(), self.spare.pop()) else {
            return Err(Error::QueueFull {
                capacity: self.tokens.len() as u32,
            });
        };
        buffer.set_len(HEADER + message.len())?;
        let (header, body) = buffer.split_at_mut(HEADER);
        header.fill(0);
        header[..8].copy_from_slice(&tag.to_le_bytes());
        header[8..12].copy_from_slice(&(message.len() as u32).to_le_bytes());
        body.copy_from_slice(message);
        match self.qp.send(buffer, slot.into()) {
            Ok(()) => {}
            Err(PostError { error, data, .. }) => {
                let posted = data.is_none();
                self.spare.extend(data);
                if !posted {
                    return Err(error);
                }
            }
        }
        self.free_tokens.pop();
        self.tokens[slot as usize] = token;
        Ok(())
    }

    /// Receives into `buffer` the first message that `which` accepts, whether it has arrived
    /// or is yet to arrive. Its entry has `token`. A message that is too long is reported as
    /// an error, with the bytes that fit and the number of bytes that did not fit.
    pub fn receive(&mut self, buffer: Buffer, which: TagMatch, token: u64) {
        match self.matcher.claim(which) {
            Some((tag, message)) => {
                self.deliver(tag, message, token, buffer, EntryFlags::empty());
            }
            None => self.matcher.expected.push_back((which, (token, buffer))),
        }
    }

    /// Returns tag and length of the first unmatched message that `which` accepts
    /// (`FI_PEEK`). Only [`next_entry`](Self::next_entry) processes arrived
    /// messages: call it first.
    pub fn peek(&self, which: TagMatch) -> Option<(u64, usize)> {
        let (tag, message) = self.matcher.find(which)?;
        Some((*tag, message.body().len()))
    }

    /// Reserves the first unmatched message that `which` accepts (`FI_CLAIM`).
    pub fn claim(&mut self, which: TagMatch) -> Option<Claimed> {
        let (tag, message) = self.matcher.claim(which)?;
        let pool = self.pool.clone();
        Some(Claimed { tag, message, pool })
    }

    /// Receives a message that this endpoint has claimed.
    ///
    /// # Errors
    /// Returns message and buffer if another endpoint has claimed it.
    pub fn receive_claimed(
        &mut self,
        claimed: Claimed,
        buffer: Buffer,
        token: u64,
    ) -> Result<(), (Claimed, Buffer)> {
        if claimed.pool != self.pool {
            return Err((claimed, buffer));
        }
        let Claimed { tag, message, .. } = claimed;
        self.deliver(tag, message, token, buffer, EntryFlags::CLAIM);
        Ok(())
    }

    /// Discards a message that this endpoint has claimed (`FI_DISCARD`).
    ///
    /// # Errors
    /// Returns the message if another endpoint has claimed it.
    pub fn discard(&mut self, claimed: Claimed) -> Result<(), Claimed> {
        if claimed.pool != self.pool {
            return Err(claimed);
        }
        self.release(claimed.message);
        Ok(())
    }

    /// Cancels an unmatched receive and returns its buffer.
    pub fn cancel(&mut self, token: u64) -> Option<Buffer> {
        let expected = &mut self.matcher.expected;
        let at = expected.iter().position(|(_, (mine, _))| *mine == token)?;
        expected.remove(at).map(|(_, (_, buffer))| buffer)
    }

    /// Returns the next entry, in the order of completion. Completions of other
    /// queue pairs on the same completion queue are entries without
    /// [`EntryFlags::TAGGED`], with their memory.
    ///
    /// # Errors
    /// As [`CompletionQueue::poll`].
    pub fn next_entry(&mut self) -> Result<Option<Result<TaggedEntry, ErrorEntry>>> {
        if let Some(entry) = self.done.pop_front() {
            return Ok(Some(entry));
        }
        while let Some(completion) = self.cq.poll_one()? {
            self.completed(completion);
            if let Some(entry) = self.done.pop_front() {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    fn completed(&mut self, mut completion: Completion) {
        // Identified by memory: another queue pair may have the same token and number.
        if !self.owns(&completion.payload) {
            self.done.push_back(entry_of_other_qp(completion));
            return;
        }
        let buffer = completion.take_buffer();
        if completion.operation == Operation::Receive {
            match (completion.result, buffer) {
                (Ok(_), Some(message)) => self.arrived(message),
                (Err(failure), _) => {
                    // No more messages arrive, so all waiting receives fail.
                    while let Some((which, (token, buffer))) = self.matcher.expected.pop_front() {
                        self.done.push_back(Err(ErrorEntry {
                            tag: Some(which.tag),
                            provider: failure.status,
                            vendor_err: failure.vendor_err,
                            ..error(
                                token,
                                libc::ECANCELED,
                                completion.qp_num,
                                Payload::Buffer(buffer),
                            )
                        }));
                    }
                }
                (Ok(_), None) => {}
            }
            return;
        }
        let slot = completion.token as usize;
        let Some(&token) = self.tokens.get(slot) else {
            return;
        };
        self.free_tokens.push(slot as u32);
        self.spare.extend(buffer);
        let flags = EntryFlags::SEND | EntryFlags::TAGGED;
        self.done.push_back(match completion.result {
            Ok(_) => Ok(TaggedEntry {
                token,
                flags,
                ..TaggedEntry::default()
            }),
            Err(failure) => Err(ErrorEntry {
                token,
                flags,
                len: None,
                overflow_len: None,
                data: None,
                tag: None,
                errno: failure.status.errno(),
                provider: failure.status,
                vendor_err: failure.vendor_err,
                qp_num: completion.qp_num,
                source: None,
                payload: Payload::None,
            }),
        });
    }

    /// Returns whether the memory of an operation belongs to the endpoint.
    fn owns(&self, payload: &Payload) -> bool {
        matches!(payload, Payload::Buffer(buffer) if buffer.is_part_of(&self.pool))
    }

    /// Processes an arrived message. The peer is not trusted: a message whose
    /// header does not match its length is discarded.
    fn arrived(&mut self, message: Buffer) {
        let Some(tag) = parse(&message) else {
            self.repost(message);
            return;
        };
        if let Some((token, buffer)) = self.matcher.take_expected(tag) {
            let message = Message::Arrived(message);
            self.deliver(tag, message, token, buffer, EntryFlags::empty());
        } else if self.spilled < self.spill {
            let arrived = Message::Arrived(message);
            let copy = Message::Spilled(arrived.body().into());
            self.release(arrived);
            self.spilled += 1;
            self.matcher.unexpected.push_back((tag, copy));
        } else {
            let message = Message::Arrived(message);
            self.matcher.unexpected.push_back((tag, message));
        }
    }

    /// Releases a message after its last use.
    fn release(&mut self, message: Message) {
        match message {
            Message::Arrived(buffer) => self.repost(buffer),
            Message::Spilled(_) => self.spilled -= 1,
        }
    }

    /// Copies a message to its receive.
    fn deliver(
        &mut self,
        tag: u64,
        message: Message,
        token: u64,
        mut buffer: Buffer,
        extra: EntryFlags,
    ) {
        let body = message.body();
        let fits = body.len().min(buffer.capacity());
        let over = body.len() - fits;
        // Cannot fail: the length does not exceed the capacity.
        let _ = buffer.copy_from(&body[..fits]);
        let flags = EntryFlags::RECV | EntryFlags::TAGGED | extra;
        self.done.push_back(if over == 0 {
            Ok(TaggedEntry {
                token,
                flags,
                len: fits,
                data: None,
                tag: Some(tag),
                payload: Payload::Buffer(buffer),
            })
        } else {
            Err(ErrorEntry {
                len: Some(fits),
                overflow_len: Some(over),
                tag: Some(tag),
                flags,
                ..error(
                    token,
                    libc::EMSGSIZE,
                    self.qp.qp_num(),
                    Payload::Buffer(buffer),
                )
            })
        });
        self.release(message);
    }

    /// Reposts a buffer of the library.
    fn repost(&mut self, mut message: Buffer) {
        message.fill_up();
        if let Err(error) = self.qp.receive(message, RECEIVE) {
            // Only in the error state, where no messages arrive.
            tracing::debug!(%error, "a receive for tagged messages was not posted again");
        }
    }

    /// Returns the queue pair, its completion queue, and the unmatched receives.
    pub fn into_parts(self) -> (QueuePair, CompletionQueue, Vec<(u64, Buffer)>) {
        let expected = self.matcher.expected.into_iter();
        let left = expected.map(|(_, receive)| receive).collect();
        (self.qp, self.cq, left)
    }
}

/// Returns the tag of a message whose header matches its length.
fn parse(message: &[u8]) -> Option<u64> {
    let (header, body) = message.split_at_checked(HEADER)?;
    let tag = u64::from_le_bytes(*header.first_chunk()?);
    let len = u32::from_le_bytes(*header[8..].first_chunk()?);
    (len as usize == body.len()).then_some(tag)
}

/// Converts a completion of another queue pair.
fn entry_of_other_qp(completion: Completion) -> Result<TaggedEntry, ErrorEntry> {
    let flags = EntryFlags::of_operation(completion.operation);
    match completion.result {
        Ok(success) => Ok(TaggedEntry {
            token: completion.token,
            flags,
            len: success.byte_len as usize,
            data: success.immediate(),
            tag: None,
            payload: completion.payload,
        }),
        Err(failure) => Err(ErrorEntry {
            flags,
            provider: failure.status,
            vendor_err: failure.vendor_err,
            payload: completion.payload,
            ..error(
                completion.token,
                failure.status.errno(),
                completion.qp_num,
                Payload::None,
            )
        }),
    }
}

fn error(token: u64, errno: i32, qp_num: u32, payload: Payload) -> ErrorEntry {
    ErrorEntry {
        token,
        flags: EntryFlags::RECV | EntryFlags::TAGGED,
        len: None,
        overflow_len: None,
        data: None,
        tag: None,
        errno,
        provider: Status::SUCCESS,
        vendor_err: 0,
        qp_num,
        source: None,
        payload,
    }
}

impl fmt::Debug for TaggedEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TaggedEndpoint")
            .field("qp", &self.qp)
            .field("expected", &self.matcher.expected.len())
            .field("unexpected", &self.matcher.unexpected.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_matches_first_accepting_receive() {
        let mut matcher = Matcher::<_, ()>::new();
        let masked = TagMatch {
            tag: 0x10,
            ignore: 0x0f,
        };
        matcher.expected.push_back((TagMatch::exact(5), "five"));
        matcher.expected.push_back((masked, "tens"));
        matcher.expected.push_back((TagMatch::any(), "any"));
        assert_eq!(matcher.take_expected(0x13), Some("tens"));
        assert_eq!(matcher.take_expected(0x14), Some("any"));
        assert_eq!(matcher.take_expected(0x15), None);
        assert_eq!(matcher.take_expected(5), Some("five"));
    }

    #[test]
    fn receive_matches_first_accepted_message() {
        let mut matcher = Matcher::<(), _>::new();
        for (tag, message) in [(1, "a"), (2, "b"), (1, "c")] {
            assert!(matcher.take_expected(tag).is_none());
            matcher.unexpected.push_back((tag, message));
        }
        assert_eq!(matcher.find(TagMatch::exact(2)), Some(&(2, "b")));
        assert_eq!(matcher.claim(TagMatch::exact(1)), Some((1, "a")));
        assert_eq!(matcher.claim(TagMatch::any()), Some((2, "b")));
        assert_eq!(matcher.claim(TagMatch::exact(2)), None);
        assert_eq!(matcher.claim(TagMatch::exact(1)), Some((1, "c")));
    }

    #[test]
    fn header_length_mismatch_is_refused() {
        let mut message = [0; HEADER + 3];
        message[0] = 7;
        message[8] = 3;
        assert_eq!(parse(&message), Some(7));
        assert_eq!(parse(&message[..HEADER + 2]), None);
        assert_eq!(parse(&message[..HEADER - 1]), None);
        assert_eq!(parse(&[]), None);
    }
}
