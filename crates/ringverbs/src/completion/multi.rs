//! One large buffer for many messages.

use std::fmt;
use std::sync::Arc;

use super::{Completion, EntryFlags};
use crate::data::Payload;
use crate::memory::Registered;
use crate::qp::{PostError, RecvHalf};
use crate::{Buffer, Error, Operation, Result, SharedReceiveQueue};

/// What takes receives: the receiving half of a queue pair, or a shared receive
/// queue.
pub trait ReceivePoster: sealed::Sealed {
    /// Posts one.
    ///
    /// # Errors
    /// As [`RecvHalf::receive`].
    fn post_receive(&mut self, buffer: Buffer, token: u64) -> Result<(), PostError<Buffer>>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for crate::qp::RecvHalf {}
    impl Sealed for crate::SharedReceiveQueue {}
    impl Sealed for crate::QueuePair {}
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

impl ReceivePoster for crate::QueuePair {
    fn post_receive(&mut self, buffer: Buffer, token: u64) -> Result<(), PostError<Buffer>> {
        self.receive(buffer, token)
    }
}

/// A buffer that receives many messages (`FI_MULTI_RECV`): it is cut into
/// pieces of the longest message, each posted as a receive. Messages are looked
/// at where they arrived. When the last piece has come back the buffer is
/// whole again, and the caller's.
///
/// A piece is known by its memory: tokens are the caller's, and other receives
/// may have the same.
pub struct MultiReceive {
    pieces: Vec<Option<Buffer>>,
    tail: Option<Buffer>,
    memory: Arc<Registered>,
    /// Address of the first piece.
    start: u64,
    /// Bytes of each.
    piece: usize,
    posted: usize,
}

/// A message in a [`MultiReceive`].
#[derive(Debug)]
pub struct MultiMessage<'m> {
    /// Its bytes; of a datagram behind its route header of 40. Empty if the
    /// receive failed.
    pub data: &'m [u8],
    /// Where in the buffer it begins.
    pub offset: usize,
    /// `MULTI_RECV` with the last one: the buffer is released.
    pub flags: EntryFlags,
    /// The completion, without memory: immediate data, status and so on.
    pub completion: Completion,
}

impl MultiReceive {
    /// Posts `buffer`, cut into pieces of `piece` bytes (a rest that is shorter
    /// stays unused), under tokens from `first_token` on.
    ///
    /// # Errors
    /// As [`ReceivePoster::post_receive`], with the whole buffer, if not even
    /// the first piece was taken; [`Error::Invalid`] for pieces of no bytes, or
    /// longer than the buffer. If the queue is full later, the rest of the
    /// buffer is not used: see [`MultiReceive::posted`].
    pub fn post(
        queue: &mut impl ReceivePoster,
        mut buffer: Buffer,
        piece: usize,
        first_token: u64,
    ) -> Result<Self, PostError<Buffer>> {
        if piece == 0 || piece > buffer.capacity() {
            return Err(PostError {
                error: Error::Invalid {
                    what: "the piece of a multi-receive buffer must fit into it, and have bytes",
                },
                data: Some(buffer),
                token: first_token,
            });
        }
        let count = buffer.capacity() / piece;
        let mut this = Self {
            pieces: Vec::with_capacity(count),
            tail: None,
            memory: Arc::clone(buffer.memory()),
            start: buffer.device_addr(),
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
                    // It was cut off just now, so it fits.
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

    /// Pieces that were posted.
    pub fn posted(&self) -> usize {
        self.posted
    }

    /// Pieces that have not come back.
    pub fn in_flight(&self) -> usize {
        self.pieces.iter().filter(|piece| piece.is_none()).count()
    }

    /// Whether a completion is that of a piece in flight.
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

    /// The number of a piece that has not come back.
    fn missing(&self, buffer: &Buffer) -> Option<usize> {
        if !Arc::ptr_eq(buffer.memory(), &self.memory) || buffer.capacity() != self.piece {
            return None;
        }
        // A piece before the first wraps, and is out of range.
        let offset = buffer.device_addr().wrapping_sub(self.start);
        let piece = self.piece as u64;
        let number = usize::try_from(offset / piece).ok()?;
        let free = self.pieces.get(number)?.is_none();
        (free && offset.is_multiple_of(piece)).then_some(number)
    }

    /// Takes the completion of a piece in, and shows the message.
    ///
    /// # Errors
    /// The completion, if it is none of this buffer's.
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

    /// A piece of a queue pair that is gone comes back.
    ///
    /// # Errors
    /// The buffer, if it is none of this one's.
    pub fn take_released(&mut self, buffer: Buffer) -> Result<(), Buffer> {
        match self.missing(&buffer) {
            Some(number) => {
                self.pieces[number] = Some(buffer);
                Ok(())
            }
            None => Err(buffer),
        }
    }

    /// The whole buffer.
    ///
    /// # Errors
    /// This, while pieces are in flight.
    pub fn into_buffer(mut self) -> Result<Buffer, Self> {
        if self.in_flight() > 0 {
            return Err(self);
        }
        let mut whole: Option<Buffer> = None;
        let pieces = self.pieces.drain(..).flatten().chain(self.tail.take());
        for piece in pieces {
            match &mut whole {
                None => whole = Some(piece),
                // Pieces of one buffer, in order: they fit.
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
