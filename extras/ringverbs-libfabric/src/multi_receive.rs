//! Multi-receive buffers: one large buffer for many messages.

use std::fmt;

use ringverbs::completion::{Completion, EntryFlags};
use ringverbs::qp::RecvHalf;
use ringverbs::{
    Buffer, Error, Operation, Payload, PostError, QueuePair, Registration, SharedReceiveQueue,
};

/// A queue to which receives can be posted: the receive half of a queue pair, a queue
/// pair, or a shared receive queue.
pub trait ReceivePoster: sealed::Sealed {
    /// Posts a receive.
    ///
    /// # Errors
    /// As [`RecvHalf::receive`].
    fn post_receive(&mut self, buffer: Buffer, token: u64) -> Result<(), PostError<Buffer>>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for ringverbs::qp::RecvHalf {}
    impl Sealed for ringverbs::SharedReceiveQueue {}
    impl Sealed for ringverbs::QueuePair {}
}

impl ReceivePoster for RecvHalf {
    fn post_receive(&mut self, buffer: Buffer, token: u64) -> Result<(), PostError<Buffer>> {
        self.receive(buffer, token)
    }
}

impl ReceivePoster for SharedReceiveQueue {
    fn post_receive(&mut self, buffer: Buffer, token: u64) -> Result<(), PostError<Buffer>> {
        self.receive(buffer, token)
    }
}

impl ReceivePoster for QueuePair {
    fn post_receive(&mut self, buffer: Buffer, token: u64) -> Result<(), PostError<Buffer>> {
        self.receive(buffer, token)
    }
}

/// A buffer that receives many messages (`FI_MULTI_RECV`). It is split into pieces of the
/// maximum message length, each posted as a receive, and messages are read in place. When
/// the last piece has completed, the buffer can be rejoined.
///
/// A piece is identified by its memory, because the caller chooses tokens, and other
/// receives may use the same tokens.
///
/// A message is read before the next one is taken:
///
/// ```compile_fail,E0499
/// # use ringverbs_libfabric::MultiReceive;
/// fn keep(multi: &mut MultiReceive, a: ringverbs::Completion, b: ringverbs::Completion) {
///     let first = multi.take(a).unwrap();
///     let second = multi.take(b).unwrap();
///     println!("{:?}", first.data);
/// }
/// ```
pub struct MultiReceive {
    pieces: Vec<Option<Buffer>>,
    tail: Option<Buffer>,
    registration: Registration,
    /// Address of the first piece.
    start: usize,
    /// Bytes of each piece.
    piece: usize,
    posted: usize,
}

/// A message in a [`MultiReceive`].
#[derive(Debug)]
pub struct MultiMessage<'m> {
    /// The received bytes; a datagram starts with the 40 bytes of its route header. Empty if
    /// the receive failed.
    pub data: &'m [u8],
    /// Offset of the piece in the buffer, in bytes.
    pub offset: usize,
    /// Includes `MULTI_RECV` with the last message: the buffer is released.
    pub flags: EntryFlags,
    /// The completion without its memory: immediate data, status and so on.
    pub completion: Completion,
}

impl MultiReceive {
    /// Splits `buffer` into pieces of `piece` bytes (a shorter remainder stays
    /// unused) and posts them with tokens from `first_token`.
    ///
    /// # Errors
    /// Returns the whole buffer, as [`ReceivePoster::post_receive`], if the first
    /// piece was not posted; [`Error::Invalid`] if `piece` is 0 or longer than the buffer. If
    /// a later piece does not fit in the queue, the rest of the buffer is not used: see
    /// [`MultiReceive::posted`].
    pub fn post(
        queue: &mut impl ReceivePoster,
        mut buffer: Buffer,
        piece: usize,
        first_token: u64,
    ) -> Result<Self, PostError<Buffer>> {
        if piece == 0 || piece > buffer.capacity() {
            return Err(PostError {
                error: Error::Invalid {
                    what: "the piece size of a multi-receive buffer must be from 1 to its capacity",
                },
                data: Some(buffer),
                token: first_token,
            });
        }
        let count = buffer.capacity() / piece;
        let mut this = Self {
            // Not for all pieces: the queue may have room for far fewer.
            pieces: Vec::new(),
            tail: None,
            registration: buffer.registration(),
            start: buffer.as_ptr().addr(),
            piece,
            posted: 0,
        };
        for number in 0..count {
            let front = buffer.split_to(piece);
            let token = first_token.wrapping_add(number as u64);
            match queue.post_receive(front, token) {
                Ok(()) => this.pieces.push(None),
                Err(PostError {
                    error,
                    data: Some(mut front),
                    token,
                }) => {
                    // Cannot fail: it was split off just now.
                    let _ = front.unsplit(buffer);
                    if number == 0 {
                        return Err(PostError {
                            error,
                            data: Some(front),
                            token,
                        });
                    }
                    buffer = front;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        this.posted = this.pieces.len();
        if buffer.capacity() > 0 {
            this.tail = Some(buffer);
        }
        Ok(this)
    }

    /// Returns the number of pieces that were posted.
    pub fn posted(&self) -> usize {
        self.posted
    }

    /// Returns the number of pieces in flight.
    pub fn in_flight(&self) -> usize {
        self.pieces.iter().filter(|piece| piece.is_none()).count()
    }

    /// Returns whether a completion belongs to a piece in flight.
    pub fn owns(&self, completion: &Completion) -> bool {
        self.piece_of(completion).is_some()
    }

    fn piece_of(&self, completion: &Completion) -> Option<usize> {
        match &completion.payload {
            Payload::Buffer(buffer) if completion.operation == Operation::Receive => {
                self.missing(buffer)
            }
            _ => None,
        }
    }

    /// Returns the number of the piece in flight that `buffer` is.
    fn missing(&self, buffer: &Buffer) -> Option<usize> {
        if !buffer.is_part_of(&self.registration) || buffer.capacity() != self.piece {
            return None;
        }
        // The offset of a piece before the first one wraps, and is out of range.
        let offset = buffer.as_ptr().addr().wrapping_sub(self.start);
        let number = offset / self.piece;
        let free = self.pieces.get(number)?.is_none();
        (free && offset % self.piece == 0).then_some(number)
    }

    /// Takes the completion of a piece and returns its message.
    ///
    /// # Errors
    /// Returns the completion if it does not belong to a piece of this buffer.
    pub fn take(&mut self, mut completion: Completion) -> Result<MultiMessage<'_>, Completion> {
        let Some(number) = self.piece_of(&completion) else {
            return Err(completion);
        };
        let Some(buffer) = completion.take_buffer() else {
            return Err(completion);
        };
        let offset = number * self.piece;
        let mut flags = EntryFlags::RECV | EntryFlags::MSG;
        let failed = completion.result.is_err();
        self.pieces[number] = Some(buffer);
        if self.in_flight() == 0 {
            flags |= EntryFlags::MULTI_RECV;
        }
        let data = match &self.pieces[number] {
            Some(piece) if !failed => &piece[..],
            _ => &[],
        };
        Ok(MultiMessage {
            data,
            offset,
            flags,
            completion,
        })
    }

    /// Takes a piece that was released with its queue pair.
    ///
    /// # Errors
    /// Returns the buffer if it is not a piece of this one.
    pub fn take_released(&mut self, buffer: Buffer) -> Result<(), Buffer> {
        match self.missing(&buffer) {
            Some(number) => {
                self.pieces[number] = Some(buffer);
                Ok(())
            }
            None => Err(buffer),
        }
    }

    /// Rejoins the buffer.
    ///
    /// # Errors
    /// Returns `self` while pieces are in flight.
    pub fn into_buffer(mut self) -> Result<Buffer, Self> {
        if self.in_flight() > 0 {
            return Err(self);
        }
        let mut whole: Option<Buffer> = None;
        let pieces = self.pieces.drain(..).flatten().chain(self.tail.take());
        for piece in pieces {
            match &mut whole {
                None => whole = Some(piece),
                // Cannot fail: pieces of one buffer, in order.
                Some(whole) => drop(whole.unsplit(piece)),
            }
        }
        whole.ok_or(self)
    }
}

impl fmt::Debug for MultiReceive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiReceive")
            .field("posted", &self.posted)
            .field("in_flight", &self.in_flight())
            .finish()
    }
}
