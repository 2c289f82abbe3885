//! How much a completion promises, and operations by librpma's names.

use crate::data::Source;
use crate::qp::{BatchError, FlushRange, FlushTo, PostError, Transport, WorkRequest};
use crate::{Buffer, Context, Error, Inline, Operation, QueuePair, RemoteAddr, Result};

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

impl QueuePair {
    /// Writes to memory of the peer's, with one completion, under `token`, that
    /// promises `level`. Where a flush or a read behind the write is what that
    /// takes (see [`means_for`]), the entry is of that, and the write's memory
    /// is freed when it is read.
    ///
    /// A read needs `scratch`, of at least a byte, which comes back with the
    /// entry; if it was not needed it is returned at once.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a level that the transport cannot give; as
    /// [`QueuePair::post`]. Nothing was posted.
    pub fn write_at_level<D: Source>(
        &mut self,
        data: D,
        to: RemoteAddr,
        level: CompletionLevel,
        mut scratch: Option<Buffer>,
        token: u64,
    ) -> Result<Option<Buffer>, PostError<D>> {
        let ready = self.prepare(Operation::Write, level, scratch.as_mut());
        let means = match ready {
            Ok(means) => means,
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
            self.post(write)?;
            return Ok(scratch);
        }
        let posted = self.batch(|batch| {
            batch.post(write.unsignaled())?;
            // `prepare` has seen to it that this is not refused; if it were,
            // nothing would be posted, and the memory gone.
            let refused = |error| PostError {
                error,
                data: None,
                token,
            };
            match (means, scratch.take()) {
                (Means::Flush(kind), spare) => {
                    let flush = WorkRequest::flush(to, FlushRange::Region, kind);
                    let posted = batch.post(flush.token(token));
                    posted.map_err(|error| refused(error.error))?;
                    Ok(spare)
                }
                (_, Some(scratch)) => {
                    let read = WorkRequest::read(scratch, to);
                    let posted = batch.post(read.token(token));
                    posted.map_err(|error| refused(error.error))?;
                    Ok(None)
                }
                (_, None) => Ok(None),
            }
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
    /// once the first half is posted.
    fn prepare(
        &self,
        operation: Operation,
        level: CompletionLevel,
        scratch: Option<&mut Buffer>,
    ) -> Result<Means> {
        let means = means_for(self.context(), self.transport(), operation, level)?;
        if means == Means::Itself {
            return Ok(means);
        }
        let capacity = self.capacity().max_send_wr;
        if self.in_flight().0.saturating_add(2) > capacity {
            return Err(Error::QueueFull { capacity });
        }
        if means == Means::ReadAfterWrite {
            let Some(scratch) = scratch else {
                return Err(Error::Invalid {
                    what: "this device takes a read after the write for that, and so a scratch buffer",
                });
            };
            if scratch.domain().identity() != self.domain().identity() {
                return Err(Error::WrongDomain {
                    what: "scratch buffer",
                });
            }
            scratch.set_len(1)?;
        }
        Ok(means)
    }

    /// Brings what was written before to where `kind` says (`rpma_flush`), with
    /// an entry under `token`. On a device without flush, visibility is had by
    /// a read of a byte into `scratch`, which comes back with the entry; if it
    /// was not needed it is returned at once.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for persistence on a device without flush; as
    /// [`QueuePair::post`].
    pub fn flush(
        &mut self,
        at: RemoteAddr,
        range: FlushRange,
        kind: FlushTo,
        scratch: Option<Buffer>,
        token: u64,
    ) -> Result<Option<Buffer>, PostError<Option<Buffer>>> {
        if self.context().can_flush_to(kind) {
            return match self.post(WorkRequest::flush(at, range, kind).token(token)) {
                Ok(()) => Ok(scratch),
                Err(PostError { error, .. }) => Err(PostError {
                    error,
                    data: Some(scratch),
                    token,
                }),
            };
        }
        let refuse = |error, scratch| {
            Err(PostError {
                error,
                data: Some(scratch),
                token,
            })
        };
        if kind == FlushTo::Persistence {
            return refuse(
                Error::Unsupported {
                    what: "flush to persistence",
                },
                scratch,
            );
        }
        let Some(mut buffer) = scratch else {
            let what = "this device takes a read for a flush, and so a scratch buffer";
            return refuse(Error::Invalid { what }, None);
        };
        if let Err(error) = buffer.set_len(1) {
            return refuse(error, Some(buffer));
        }
        match self.post(WorkRequest::read(buffer, at).token(token)) {
            Ok(()) => Ok(None),
            Err(PostError { error, data, .. }) => refuse(error, data),
        }
    }

    /// Sends a message with immediate data (`rpma_send_with_imm`).
    ///
    /// # Errors
    /// As [`QueuePair::post`].
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
    /// As [`QueuePair::post`].
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
    /// [`QueuePair::post`].
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
