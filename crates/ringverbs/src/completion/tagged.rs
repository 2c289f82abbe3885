//! Tagged messages over plain sends.
//!
//! The device matches no tags, so this does: a message travels with a header of
//! 16 bytes in front, into buffers of the library's, and is copied to where the
//! receive that it matches wants it. A message that nothing matches stays where
//! it arrived, until something does. When all buffers are taken up by such, the
//! peer is told to wait by the transport, and a message that would match waits
//! behind them; [`TaggedEndpoint::set_spill`] has such messages copied out of the
//! way.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{Completion, CompletionQueue, EntryFlags, ErrorEntry, Status, TaggedEntry, wait};
use crate::data::Payload;
use crate::device;
use crate::memory::Registered;
use crate::operation::Operation;
use crate::qp::{PostError, Transport};
use crate::{Buffer, CompletionChannel, Endpoint, Error, LocalAddress, QueuePair, Result};

/// Bytes in front of a message: tag, length, zeros, little-endian.
const HEADER: usize = 16;

/// Tokens of our own receives.
const RECEIVE: u64 = 1 << 32;

/// Which tags a receive takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TagMatch {
    /// The tag.
    pub tag: u64,
    /// Bits of it that do not matter.
    pub ignore: u64,
}

impl TagMatch {
    /// That tag, exactly.
    pub fn exact(tag: u64) -> Self {
        Self { tag, ignore: 0 }
    }

    /// Any tag.
    pub fn any() -> Self {
        Self {
            tag: 0,
            ignore: u64::MAX,
        }
    }

    /// Whether it takes `tag`.
    pub fn takes(&self, tag: u64) -> bool {
        (self.tag ^ tag) & !self.ignore == 0
    }
}

/// Receives and messages that wait for each other. Both in order: a message
/// goes to the first receive that takes it, a receive gets the first message
/// that it takes.
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

    /// A message has come: the receive that takes it.
    fn expecting(&mut self, tag: u64) -> Option<R> {
        let at = self
            .expected
            .iter()
            .position(|(which, _)| which.takes(tag))?;
        self.expected.remove(at).map(|(_, receive)| receive)
    }

    /// The first message that waits and that `which` takes.
    fn find(&self, which: TagMatch) -> Option<&(u64, M)> {
        self.unexpected.iter().find(|(tag, _)| which.takes(*tag))
    }

    /// Takes it out.
    fn claim(&mut self, which: TagMatch) -> Option<(u64, M)> {
        let at = self
            .unexpected
            .iter()
            .position(|(tag, _)| which.takes(*tag))?;
        self.unexpected.remove(at)
    }
}

/// A message that was set aside by [`TaggedEndpoint::claim`], for a receive of
/// its own.
#[derive(Debug)]
#[must_use = "a claimed message holds a buffer of the endpoint's until it is received or discarded"]
pub struct Claimed {
    tag: u64,
    message: Message,
    /// The memory of the endpoint's messages, which tells whose it is.
    pool: Arc<Registered>,
}

/// A message that is there.
#[derive(Debug)]
enum Message {
    /// Where it arrived, with its header.
    Arrived(Buffer),
    /// Out of the way, without it.
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
    /// Its tag.
    pub fn tag(&self) -> u64 {
        self.tag
    }

    /// Its bytes.
    pub fn len(&self) -> usize {
        self.message.body().len()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One end of a connection for tagged messages (`fi_tsend`, `fi_trecv`). The
/// other end is one too.
///
/// It is waited for if its completion queue has a channel: [`wait`](Self::wait),
/// or, among other descriptors, [`channel`](Self::channel) and
/// [`arm`](Self::arm).
///
/// As many messages as its depth can be there without a receive that takes them.
/// After that the peer's sends wait (the transport tries again, see
/// [`ReadyToSend::rnr_retry`](crate::qp::ReadyToSend::rnr_retry)), also of a
/// message that a receive is posted for: whoever receives in another order than
/// is sent, over more messages than that, sets [`set_spill`](Self::set_spill).
pub struct TaggedEndpoint {
    // Destroyed before the queue.
    qp: QueuePair,
    cq: CompletionQueue,
    max_message: usize,
    /// The memory of all its messages.
    pool: Arc<Registered>,
    /// Buffers for sends that are not in flight.
    spare: Vec<Buffer>,
    /// User tokens of sends in flight, by our own token.
    tokens: Vec<u64>,
    free_tokens: Vec<u32>,
    matcher: Matcher<(u64, Buffer), Message>,
    /// Messages that may be copied out of the way, and that are.
    spill: usize,
    spilled: usize,
    done: VecDeque<Result<TaggedEntry, ErrorEntry>>,
}

impl TaggedEndpoint {
    /// Over a queue pair of a reliable connection that nobody has posted to and
    /// that completes in `cq`: connected, or initialised so that it takes
    /// receives. `depth` messages may be on their way in either direction, each
    /// of up to `max_message` bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another queue pair or queue, [`Error::Limit`] for
    /// a depth over the queue pair's; what allocating says.
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
        let capacity = qp.capacity();
        let allowed = capacity.max_send_wr.min(capacity.max_recv_wr);
        if depth == 0 || depth > allowed {
            return Err(Error::Limit {
                what: "tagged messages on their way",
                asked: depth.into(),
                allowed: allowed.into(),
            });
        }
        let size = max_message
            .checked_add(HEADER)
            .filter(|size| *size <= device::MAX_MESSAGE as usize)
            .ok_or(Error::Limit {
                what: "bytes in a tagged message",
                asked: max_message as u64,
                allowed: device::MAX_MESSAGE as u64 - HEADER as u64,
            })?;
        let domain = qp.domain().clone();
        let all = size
            .checked_mul(2 * depth as usize)
            .ok_or(Error::NoMemory)?;
        let mut pool = domain.alloc(all)?.into_buffer();
        let memory = Arc::clone(pool.memory());
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

    /// The queue pair. Only the endpoint posts to it.
    pub fn queue_pair(&self) -> &QueuePair {
        &self.qp
    }

    /// Connects the queue pair: [`QueuePair::connect`].
    ///
    /// # Errors
    /// As there.
    pub fn connect(&mut self, local: &LocalAddress, peer: &Endpoint) -> Result<()> {
        self.qp.connect(local, peer)
    }

    /// How many messages that nothing matches are copied out of the way, so that
    /// others can come; 0 unless told. Each takes as much memory as it is long:
    /// a peer can make this side use `messages` times the longest message. What
    /// is there already stays where it is.
    pub fn set_spill(&mut self, messages: usize) {
        self.spill = messages;
    }

    /// Where its events go, if its completion queue has a channel.
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.cq.channel()
    }

    /// Arms it and looks again, as one act: only if this says `false` may one
    /// wait for an event of the [`channel`](Self::channel). True if there may be
    /// an entry.
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

    /// Waits until [`next_entry`](Self::next_entry) has something to look at,
    /// which need not be an entry: a message that nothing matches is none. For
    /// ever without a `timeout`; false when the time is up, or a signal handler
    /// has run. No one else may read the channel meanwhile: other queues' events
    /// are taken, and lost.
    ///
    /// # Errors
    /// [`Error::Invalid`] if its completion queue has no channel; EIO if the
    /// device is gone.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let deadline = wait::deadline(timeout);
        loop {
            if self.arm()? {
                return Ok(true);
            }
            let left = wait::left(deadline);
            let event = match self.cq.channel() {
                Some(channel) => channel.wait(left)?,
                None => None,
            };
            match event {
                Some(event) if event.is_of(&self.cq) => return Ok(true),
                // Of another queue, or of one that was armed before.
                Some(_) if !wait::is_over(deadline) => {}
                _ => return Ok(false),
            }
        }
    }

    /// Sends a message, which is copied. Its entry comes with `token`.
    ///
    /// # Errors
    /// [`Error::Limit`] for more than the longest message;
    /// [`Error::QueueFull`] while as many as `depth` are on their way; what
    /// posting says.
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

    /// Receives a message that `which` takes into `buffer`: the first that has
    /// come or will. Its entry comes with `token`. A message that is too long is
    /// an error with the bytes that fit, and how many did not.
    pub fn receive(&mut self, buffer: Buffer, which: TagMatch, token: u64) {
        match self.matcher.claim(which) {
            Some((tag, message)) => {
                self.deliver(tag, message, token, buffer, EntryFlags::empty());
            }
            None => self.matcher.expected.push_back((which, (token, buffer))),
        }
    }

    /// Tag and length of the first message that waits and that `which` takes
    /// (`FI_PEEK`). Of what has come, that is what
    /// [`next_entry`](Self::next_entry) has taken in: call that before.
    pub fn peek(&self, which: TagMatch) -> Option<(u64, usize)> {
        let (tag, message) = self.matcher.find(which)?;
        Some((*tag, message.body().len()))
    }

    /// Sets that message aside (`FI_CLAIM`).
    pub fn claim(&mut self, which: TagMatch) -> Option<Claimed> {
        let (tag, message) = self.matcher.claim(which)?;
        let pool = Arc::clone(&self.pool);
        Some(Claimed { tag, message, pool })
    }

    /// Receives a message that was set aside here.
    ///
    /// # Errors
    /// Message and buffer, if another endpoint has set it aside.
    pub fn receive_claimed(
        &mut self,
        claimed: Claimed,
        buffer: Buffer,
        token: u64,
    ) -> Result<(), (Claimed, Buffer)> {
        if !Arc::ptr_eq(&claimed.pool, &self.pool) {
            return Err((claimed, buffer));
        }
        let Claimed { tag, message, .. } = claimed;
        self.deliver(tag, message, token, buffer, EntryFlags::CLAIM);
        Ok(())
    }

    /// Forgets a message that was set aside here (`FI_DISCARD`).
    ///
    /// # Errors
    /// The message, if another endpoint has set it aside.
    pub fn discard(&mut self, claimed: Claimed) -> Result<(), Claimed> {
        if !Arc::ptr_eq(&claimed.pool, &self.pool) {
            return Err(claimed);
        }
        self.let_go(claimed.message);
        Ok(())
    }

    /// Takes a receive back that has not been matched.
    pub fn cancel(&mut self, token: u64) -> Option<Buffer> {
        let expected = &mut self.matcher.expected;
        let at = expected.iter().position(|(_, (mine, _))| *mine == token)?;
        expected.remove(at).map(|(_, (_, buffer))| buffer)
    }

    /// The next entry, in the order in which operations were done.
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
        let buffer = completion.take_buffer();
        if completion.operation == Operation::Receive {
            match (completion.result, buffer) {
                (Ok(_), Some(message)) => self.arrived(message),
                (Err(failure), _) => {
                    // Nothing will come any more: whoever waits hears of it.
                    while let Some((which, (token, buffer))) = self.matcher.expected.pop_front() {
                        self.done.push_back(Err(ErrorEntry {
                            tag: Some(which.tag),
                            provider: failure.status,
                            vendor_err: failure.vendor_err,
                            ..error(token, libc::ECANCELED, completion.qp_num, buffer)
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

    /// A message is there. What a peer writes is not believed: a header that
    /// does not fit the message is no message.
    fn arrived(&mut self, message: Buffer) {
        let Some(tag) = parse(&message) else {
            self.repost(message);
            return;
        };
        if let Some((token, buffer)) = self.matcher.expecting(tag) {
            let message = Message::Arrived(message);
            self.deliver(tag, message, token, buffer, EntryFlags::empty());
        } else if self.spilled < self.spill {
            let arrived = Message::Arrived(message);
            let copy = Message::Spilled(arrived.body().into());
            self.let_go(arrived);
            self.spilled += 1;
            self.matcher.unexpected.push_back((tag, copy));
        } else {
            let message = Message::Arrived(message);
            self.matcher.unexpected.push_back((tag, message));
        }
    }

    /// A message has been looked at for the last time.
    fn let_go(&mut self, message: Message) {
        match message {
            Message::Arrived(buffer) => self.repost(buffer),
            Message::Spilled(_) => self.spilled -= 1,
        }
    }

    /// Copies a message to where it was wanted.
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
        // Not over its capacity, and so not refused.
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
                ..error(token, libc::EMSGSIZE, self.qp.qp_num(), buffer)
            })
        });
        self.let_go(message);
    }

    /// Gives one of our buffers to the device again.
    fn repost(&mut self, mut message: Buffer) {
        message.fill_up();
        if let Err(error) = self.qp.receive(message, RECEIVE) {
            // Only when the queue pair is in error: nothing comes any more.
            tracing::debug!(%error, "a receive for tagged messages was not posted again");
        }
    }

    /// The queue pair, its queue, and the receives that were not matched.
    pub fn into_parts(self) -> (QueuePair, CompletionQueue, Vec<(u64, Buffer)>) {
        let expected = self.matcher.expected.into_iter();
        let left = expected.map(|(_, receive)| receive).collect();
        (self.qp, self.cq, left)
    }
}

/// The tag of a message whose header fits it.
fn parse(message: &[u8]) -> Option<u64> {
    let (header, body) = message.split_at_checked(HEADER)?;
    let tag = u64::from_le_bytes(*header.first_chunk()?);
    let len = u32::from_le_bytes(*header[8..].first_chunk()?);
    (len as usize == body.len()).then_some(tag)
}

fn error(token: u64, errno: i32, qp_num: u32, buffer: Buffer) -> ErrorEntry {
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
        payload: Payload::Buffer(buffer),
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
    fn a_message_goes_to_the_first_receive_that_takes_it() {
        let mut matcher = Matcher::<_, ()>::new();
        let masked = TagMatch {
            tag: 0x10,
            ignore: 0x0f,
        };
        matcher.expected.push_back((TagMatch::exact(5), "five"));
        matcher.expected.push_back((masked, "tens"));
        matcher.expected.push_back((TagMatch::any(), "any"));
        assert_eq!(matcher.expecting(0x13), Some("tens"));
        assert_eq!(matcher.expecting(0x14), Some("any"));
        assert_eq!(matcher.expecting(0x15), None);
        assert_eq!(matcher.expecting(5), Some("five"));
    }

    #[test]
    fn a_receive_gets_the_first_message_that_it_takes() {
        let mut matcher = Matcher::<(), _>::new();
        for (tag, message) in [(1, "a"), (2, "b"), (1, "c")] {
            assert!(matcher.expecting(tag).is_none());
            matcher.unexpected.push_back((tag, message));
        }
        assert_eq!(matcher.find(TagMatch::exact(2)), Some(&(2, "b")));
        assert_eq!(matcher.claim(TagMatch::exact(1)), Some((1, "a")));
        assert_eq!(matcher.claim(TagMatch::any()), Some((2, "b")));
        assert_eq!(matcher.claim(TagMatch::exact(2)), None);
        assert_eq!(matcher.claim(TagMatch::exact(1)), Some((1, "c")));
    }

    #[test]
    fn a_header_that_does_not_fit_is_no_message() {
        let mut message = [0; HEADER + 3];
        message[0] = 7;
        message[8] = 3;
        assert_eq!(parse(&message), Some(7));
        assert_eq!(parse(&message[..HEADER + 2]), None);
        assert_eq!(parse(&message[..HEADER - 1]), None);
        assert_eq!(parse(&[]), None);
    }
}
