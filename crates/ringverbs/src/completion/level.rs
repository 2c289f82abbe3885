//! How much a completion promises, and operations by librpma's names.

use crate::data::Source;
use crate::memory::MemorySlice;
use crate::qp::{BatchError, FlushRange, FlushTo, PostError, SendHalf, Transport, WorkRequest};
use crate::{Context, Error, Inline, Operation, QueuePair, RemoteAddr, Result};

/// What a completion promises (`FI_INJECT_COMPLETE` and its like), weakest
/// first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CompletionLevel {
    /// The buffer may be used again. Inline data promises that by itself.
    Inject,
    /// The operation needs no more of this side: it will not be sent again.
    Transmit,
    /// The data is in the peer's memory, for its reader to see.
    Delivery,
    /// The message has met a receive of the peer's.
    Match,
    /// The data outlives a loss of power.
    Commit,
}

/// What it takes to keep a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Means {
    /// The operation's own completion.
    Itself,
    /// That of a flush behind it.
    Flush(FlushTo),
    /// That of a read behind it, which pushes what was written before it.
    ReadAfterWrite,
}

/// What of a transport's it takes for an operation's completion to promise
/// `level`.
///
/// # Errors
/// [`Error::Unsupported`] if nothing does.
pub fn means_for(
    context: &Context,
    transport: Transport,
    operation: Operation,
    level: CompletionLevel,
) -> Result<Means> {
    decide(|to| context.can_flush_to(to), transport, operation, level)
}

fn decide(
    can_flush: impl Fn(FlushTo) -> bool,
    transport: Transport,
    operation: Operation,
    level: CompletionLevel,
) -> Result<Means> {
    use CompletionLevel as Level;
    let reliable = transport == Transport::Reliable;
    let unsupported = |what| Err(Error::Unsupported { what });
    match (level, operation) {
        (Level::Inject | Level::Transmit, _) => Ok(Means::Itself),
        (_, _) if !reliable => {
            unsupported("a completion level over transmit needs a reliable connection")
        }
        // The answer carries the data, or says that the message was put into
        // the receive that it met.
        (
            Level::Delivery,
            Operation::Read
            | Operation::CompareSwap
            | Operation::FetchAdd
            | Operation::Send
            | Operation::Flush
            | Operation::Receive
            | Operation::LocalInvalidate
            | Operation::BindWindow,
        ) => Ok(Means::Itself),
        (Level::Delivery, _) if can_flush(FlushTo::GlobalVisibility) => {
            Ok(Means::Flush(FlushTo::GlobalVisibility))
        }
        (Level::Delivery, _) => Ok(Means::ReadAfterWrite),
        (Level::Match, Operation::Send) => Ok(Means::Itself),
        (Level::Match, _) => unsupported("only a message can meet a receive"),
        (Level::Commit, Operation::Write | Operation::AtomicWrite)
            if can_flush(FlushTo::Persistence) =>
        {
            Ok(Means::Flush(FlushTo::Persistence))
        }
        (Level::Commit, _) => {
            unsupported("commit needs a write, and a device that flushes to persistence")
        }
    }
}

impl SendHalf {
    /// Writes to memory of the peer's, with one completion, under `token`, that
    /// promises `level`. Where a flush or a read behind the write is what that
    /// takes (see [`means_for`]), the entry is of that, and the write's memory
    /// is freed when it is read.
    ///
    /// The first that takes a read registers a page for the byte that is read:
    /// a system call.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a level that the transport cannot give; as
    /// [`SendHalf::post`]. Nothing was posted.
    pub fn write_at_level<D: Source>(
        &mut self,
        data: D,
        to: RemoteAddr,
        level: CompletionLevel,
        token: u64,
    ) -> Result<(), PostError<D>> {
        let (means, scratch) = match self.prepare(Operation::Write, level) {
            Ok(ready) => ready,
            Err(error) => {
                return Err(PostError {
                    error,
                    data: Some(data),
                    token,
                });
            }
        };
        let write = WorkRequest::write(data, to).token(token);
        if means == Means::Itself {
            return self.post(write);
        }
        let posted = self.batch(|batch| {
            batch.post(write.unsignaled())?;
            let behind = match (means, scratch) {
                (Means::Flush(kind), _) => {
                    let flush = WorkRequest::flush(to, FlushRange::Region, kind);
                    batch.post(flush.token(token)).map_err(Error::from)
                }
                (_, Some(scratch)) => {
                    let read = WorkRequest::read(scratch, to).token(token);
                    batch.post(read).map_err(PostError::into_error)
                }
                (_, None) => Ok(()),
            };
            // `prepare` has seen to it that this is not refused. If it were,
            // nothing would be posted, and the write's memory gone.
            behind.map_err(|error| PostError {
                error,
                data: None,
                token,
            })
        });
        posted.map_err(|refused| match refused {
            BatchError::Abandoned(error) => error,
            BatchError::Doorbell(error) => PostError {
                error,
                data: None,
                token,
            },
        })
    }

    /// What `level` takes, after checks of everything that could be refused
    /// once the first half is posted; and where a byte is read to, if one is.
    fn prepare(
        &mut self,
        operation: Operation,
        level: CompletionLevel,
    ) -> Result<(Means, Option<MemorySlice>)> {
        let means = means_for(self.context(), self.transport(), operation, level)?;
        if means == Means::Itself {
            return Ok((means, None));
        }
        let capacity = self.capacity().max_send_wr;
        if self.in_flight().saturating_add(2) > capacity {
            return Err(Error::QueueFull { capacity });
        }
        let scratch = match means {
            Means::ReadAfterWrite => Some(self.scratch()?),
            _ => None,
        };
        Ok((means, scratch))
    }

    /// Brings what was written before to where `kind` says (`rpma_flush`), with
    /// an entry under `token`. On a device without flush, visibility is had by
    /// a read of a byte; the first registers a page for it: a system call.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for persistence on a device without flush; as
    /// [`SendHalf::post`].
    pub fn flush(
        &mut self,
        at: RemoteAddr,
        range: FlushRange,
        kind: FlushTo,
        token: u64,
    ) -> Result<(), PostError<()>> {
        if self.context().can_flush_to(kind) {
            return self.post(WorkRequest::flush(at, range, kind).token(token));
        }
        let refused = |error| PostError {
            error,
            data: Some(()),
            token,
        };
        if kind == FlushTo::Persistence {
            return Err(refused(Error::Unsupported {
                what: "flush to persistence",
            }));
        }
        let scratch = self.scratch().map_err(refused)?;
        self.post(WorkRequest::read(scratch, at).token(token))
            .map_err(|PostError { error, data, token }| PostError {
                error,
                data: data.map(drop),
                token,
            })
    }

    /// Sends a message with immediate data (`rpma_send_with_imm`).
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    pub fn send_with_imm<D: Source>(
        &mut self,
        data: D,
        immediate: u32,
        token: u64,
    ) -> Result<(), PostError<D>> {
        self.post(WorkRequest::send(data).immediate(immediate).token(token))
    }

    /// Writes with immediate data (`rpma_write_with_imm`): the peer gets an
    /// entry of it.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    pub fn write_with_imm<D: Source>(
        &mut self,
        data: D,
        to: RemoteAddr,
        immediate: u32,
        token: u64,
    ) -> Result<(), PostError<D>> {
        self.post(
            WorkRequest::write(data, to)
                .immediate(immediate)
                .token(token),
        )
    }

    /// Writes 8 bytes all at once (`rpma_atomic_write`). On a device without
    /// the operation, an inline write of 8 aligned bytes after all before it
    /// does it, as librpma has it; that needs a queue pair with room for 8
    /// inline bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `to` is not a multiple of 8; as
    /// [`SendHalf::post`].
    pub fn atomic_write(
        &mut self,
        to: RemoteAddr,
        value: [u8; 8],
        token: u64,
    ) -> Result<(), PostError<()>> {
        let refuse = |error| {
            Err(PostError {
                error,
                data: Some(()),
                token,
            })
        };
        if !to.addr.is_multiple_of(8) {
            return refuse(Error::Invalid {
                what: "the address of an atomic write must be a multiple of 8",
            });
        }
        if self.context().can_write_atomically() {
            return self.post(WorkRequest::atomic_write(to, value).token(token));
        }
        let write = WorkRequest::write(Inline(&value), to).fence().token(token);
        self.post(write).or_else(|error| refuse(error.error))
    }
}

/// What a whole queue pair does by its sending half.
macro_rules! by_the_sending_half {
    ($(fn $name:ident $(<$data:ident>)? ($($argument:ident: $type:ty),*) -> $returned:ty;)*) => {
        impl QueuePair {$(
            #[doc = concat!("As [`SendHalf::", stringify!($name), "`].")]
            ///
            /// # Errors
            /// As there.
            pub fn $name$(<$data: Source>)?(
                &mut self,
                $($argument: $type),*
            ) -> Result<(), PostError<$returned>> {
                self.send.$name($($argument),*)
            }
        )*}
    };
}

by_the_sending_half! {
    fn write_at_level<D>(data: D, to: RemoteAddr, level: CompletionLevel, token: u64) -> D;
    fn flush(at: RemoteAddr, range: FlushRange, kind: FlushTo, token: u64) -> ();
    fn send_with_imm<D>(data: D, immediate: u32, token: u64) -> D;
    fn write_with_imm<D>(data: D, to: RemoteAddr, immediate: u32, token: u64) -> D;
    fn atomic_write(to: RemoteAddr, value: [u8; 8], token: u64) -> ();
}

#[cfg(test)]
mod tests {
    use super::*;
    use CompletionLevel as Level;

    const RC: Transport = Transport::Reliable;

    const NEVER: fn(FlushTo) -> bool = |_| false;
    const ALWAYS: fn(FlushTo) -> bool = |_| true;
    const GLOBAL: fn(FlushTo) -> bool = |to| to == FlushTo::GlobalVisibility;
    const PERSISTENT: fn(FlushTo) -> bool = |to| to == FlushTo::Persistence;

    #[test]
    fn a_write_is_delivered_by_a_flush_or_a_read() {
        let delivery = |flush| decide(flush, RC, Operation::Write, Level::Delivery).unwrap();
        for flush in [ALWAYS, GLOBAL] {
            assert_eq!(delivery(flush), Means::Flush(FlushTo::GlobalVisibility));
        }
        for flush in [NEVER, PERSISTENT] {
            assert_eq!(delivery(flush), Means::ReadAfterWrite);
        }
    }

    #[test]
    fn commit_needs_a_device_that_flushes_to_persistence() {
        let commit = |flush| decide(flush, RC, Operation::Write, Level::Commit);
        for flush in [ALWAYS, PERSISTENT] {
            assert_eq!(commit(flush).unwrap(), Means::Flush(FlushTo::Persistence));
        }
        for flush in [NEVER, GLOBAL] {
            assert!(matches!(commit(flush), Err(Error::Unsupported { .. })));
        }
        assert!(decide(ALWAYS, RC, Operation::Send, Level::Commit).is_err());
    }

    #[test]
    fn only_a_message_is_matched() {
        assert_eq!(
            decide(NEVER, RC, Operation::Send, Level::Match).unwrap(),
            Means::Itself
        );
        assert!(decide(ALWAYS, RC, Operation::Write, Level::Match).is_err());
    }

    #[test]
    fn an_unreliable_transport_promises_no_more_than_transmit() {
        for transport in [Transport::Unreliable, Transport::Datagram] {
            for level in [Level::Inject, Level::Transmit] {
                let means = decide(ALWAYS, transport, Operation::Send, level);
                assert_eq!(means.unwrap(), Means::Itself);
            }
            for level in [Level::Delivery, Level::Match, Level::Commit] {
                assert!(decide(ALWAYS, transport, Operation::Send, level).is_err());
            }
        }
    }
}
