//! Completion levels, and operations named after librpma's.

use crate::data::Source;
use crate::memory::MemorySlice;
use crate::qp::{BatchError, FlushRange, FlushTo, PostError, SendHalf, Transport, WorkRequest};
use crate::{Context, Error, Inline, Operation, QueuePair, RemoteAddr, Result};

/// The guarantee of a completion (`FI_INJECT_COMPLETE` and so on), weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CompletionLevel {
    /// The buffer may be reused. Inline data always has this guarantee.
    Inject,
    /// The operation no longer depends on this side: it will not be
    /// retransmitted.
    Transmit,
    /// The data is in the peer's memory, visible to its readers.
    Delivery,
    /// The message was matched with a receive of the peer.
    Match,
    /// The data survives a power failure.
    Commit,
}

/// The completion that reports a [`CompletionLevel`]; see [`completion_method`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompletionMethod {
    /// The operation's own completion.
    OwnCompletion,
    /// The completion of a flush after the operation.
    Flush(FlushTo),
    /// The completion of a read after the operation, which pushes earlier writes.
    ReadAfterWrite,
}

/// Returns the completion that guarantees `level` for `operation` on a transport.
///
/// # Errors
/// [`Error::Unsupported`] if no completion does.
pub fn completion_method(
    context: &Context,
    transport: Transport,
    operation: Operation,
    level: CompletionLevel,
) -> Result<CompletionMethod> {
    method_with(|to| context.can_flush_to(to), transport, operation, level)
}

fn method_with(
    can_flush: impl Fn(FlushTo) -> bool,
    transport: Transport,
    operation: Operation,
    level: CompletionLevel,
) -> Result<CompletionMethod> {
    use CompletionLevel as Level;
    let reliable = transport == Transport::Reliable;
    let unsupported = |what| Err(Error::Unsupported { what });
    match (level, operation) {
        (Level::Inject | Level::Transmit, _) => Ok(CompletionMethod::OwnCompletion),
        (_, _) if !reliable => {
            unsupported("a completion level above transmit needs a reliable connection")
        }
        // The response carries the data, or acknowledges that the message was
        // stored in its receive.
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
        ) => Ok(CompletionMethod::OwnCompletion),
        (Level::Delivery, _) if can_flush(FlushTo::GlobalVisibility) => {
            Ok(CompletionMethod::Flush(FlushTo::GlobalVisibility))
        }
        (Level::Delivery, _) => Ok(CompletionMethod::ReadAfterWrite),
        (Level::Match, Operation::Send) => Ok(CompletionMethod::OwnCompletion),
        (Level::Match, _) => unsupported("only a send is matched with a receive"),
        (Level::Commit, Operation::Write | Operation::AtomicWrite)
            if can_flush(FlushTo::Persistence) =>
        {
            Ok(CompletionMethod::Flush(FlushTo::Persistence))
        }
        (Level::Commit, _) => {
            unsupported("commit needs a write, and a device that flushes to persistence")
        }
    }
}

impl SendHalf {
    /// Writes to remote memory; the only completion has `token` and guarantees `level`. If
    /// the level needs a flush or a read after the write (see [`completion_method`]), it is
    /// the completion of the flush or read, and the write's memory is released when it is
    /// polled.
    ///
    /// The first call that needs a read registers a page for it by a system call.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a level that the transport cannot guarantee; as
    /// [`SendHalf::post`]. Nothing was posted.
    pub fn write_at_level<D: Source>(
        &mut self,
        data: D,
        to: RemoteAddr,
        level: CompletionLevel,
        token: u64,
    ) -> Result<(), PostError<D::Returned>> {
        let (method, scratch) = match self.prepare_level(Operation::Write, level) {
            Ok(ready) => ready,
            Err(error) => {
                return Err(PostError {
                    error,
                    data: Some(data.returned()),
                    token,
                });
            }
        };
        let write = WorkRequest::write(data, to).token(token);
        if method == CompletionMethod::OwnCompletion {
            return self.post(write);
        }
        let posted = self.batch(|batch| {
            batch.post(write.unsignaled())?;
            let behind = match (method, scratch) {
                (CompletionMethod::Flush(kind), _) => {
                    let flush = WorkRequest::flush(to, FlushRange::Region, kind);
                    batch.post(flush.token(token)).map_err(Error::from)
                }
                (_, Some(scratch)) => {
                    let read = WorkRequest::read(scratch, to).token(token);
                    batch.post(read).map_err(PostError::into_error)
                }
                (_, None) => Ok(()),
            };
            // `prepare_level` has checked that this is not refused. Otherwise nothing
            // would be posted, and the write's memory released.
            behind.map_err(|error| PostError {
                error,
                data: None,
                token,
            })
        });
        posted.map_err(|refused| match refused {
            BatchError::Abandoned(error) => error,
            BatchError::Doorbell(error) | BatchError::Refused(error) => PostError {
                error,
                data: None,
                token,
            },
        })
    }

    /// Returns the method for `level` and the target of its read, if any. Checks all that
    /// could be refused once the write is in the batch.
    fn prepare_level(
        &mut self,
        operation: Operation,
        level: CompletionLevel,
    ) -> Result<(CompletionMethod, Option<MemorySlice>)> {
        let method = completion_method(self.context(), self.transport(), operation, level)?;
        if method == CompletionMethod::OwnCompletion {
            return Ok((method, None));
        }
        let capacity = self.capacity().max_send_wr;
        if self.in_flight().saturating_add(2) > capacity {
            return Err(Error::QueueFull { capacity });
        }
        let scratch = match method {
            CompletionMethod::ReadAfterWrite => Some(self.scratch()?),
            _ => None,
        };
        Ok((method, scratch))
    }

    /// Flushes earlier writes to remote memory, with placement type `kind`
    /// (`rpma_flush`). The completion has `token`. On a device without the flush operation,
    /// a read of one byte ensures visibility; the first such call registers a page for it
    /// by a system call.
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
    ) -> Result<(), PostError<D::Returned>> {
        self.post(WorkRequest::send(data).immediate(immediate).token(token))
    }

    /// Writes with immediate data (`rpma_write_with_imm`), which produces a completion at
    /// the peer.
    ///
    /// # Errors
    /// As [`SendHalf::post`].
    pub fn write_with_imm<D: Source>(
        &mut self,
        data: D,
        to: RemoteAddr,
        immediate: u32,
        token: u64,
    ) -> Result<(), PostError<D::Returned>> {
        self.post(
            WorkRequest::write(data, to)
                .immediate(immediate)
                .token(token),
        )
    }

    /// Writes 8 bytes atomically (`rpma_atomic_write`). On a device without the operation,
    /// posts a [fenced](WorkRequest::fence) inline write of 8 aligned bytes, as librpma
    /// does; the queue pair then needs 8 bytes of inline data.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `to` is not a multiple of 8; as [`SendHalf::post`].
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
        if to.addr % 8 != 0 {
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

/// Methods of a queue pair that forward to its send half.
macro_rules! by_the_sending_half {
    ($(fn $name:ident $(<$data:ident>)? ($($argument:ident: $type:ty),*) -> $returned:ty;)*) => {
        impl QueuePair {$(
            #[doc = concat!("As [`SendHalf::", stringify!($name), "`].")]
            ///
            /// # Errors
            /// As that method.
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
    fn write_at_level<D>(data: D, to: RemoteAddr, level: CompletionLevel, token: u64) -> D::Returned;
    fn flush(at: RemoteAddr, range: FlushRange, kind: FlushTo, token: u64) -> ();
    fn send_with_imm<D>(data: D, immediate: u32, token: u64) -> D::Returned;
    fn write_with_imm<D>(data: D, to: RemoteAddr, immediate: u32, token: u64) -> D::Returned;
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
        let delivery = |flush| method_with(flush, RC, Operation::Write, Level::Delivery).unwrap();
        for flush in [ALWAYS, GLOBAL] {
            assert_eq!(
                delivery(flush),
                CompletionMethod::Flush(FlushTo::GlobalVisibility)
            );
        }
        for flush in [NEVER, PERSISTENT] {
            assert_eq!(delivery(flush), CompletionMethod::ReadAfterWrite);
        }
    }

    #[test]
    fn commit_needs_a_device_that_flushes_to_persistence() {
        let commit = |flush| method_with(flush, RC, Operation::Write, Level::Commit);
        for flush in [ALWAYS, PERSISTENT] {
            assert_eq!(
                commit(flush).unwrap(),
                CompletionMethod::Flush(FlushTo::Persistence)
            );
        }
        for flush in [NEVER, GLOBAL] {
            assert!(matches!(commit(flush), Err(Error::Unsupported { .. })));
        }
        assert!(method_with(ALWAYS, RC, Operation::Send, Level::Commit).is_err());
    }

    #[test]
    fn only_a_message_is_matched() {
        assert_eq!(
            method_with(NEVER, RC, Operation::Send, Level::Match).unwrap(),
            CompletionMethod::OwnCompletion
        );
        assert!(method_with(ALWAYS, RC, Operation::Write, Level::Match).is_err());
    }

    #[test]
    fn an_unreliable_transport_promises_no_more_than_transmit() {
        for transport in [Transport::Unreliable, Transport::Datagram] {
            for level in [Level::Inject, Level::Transmit] {
                let method = method_with(ALWAYS, transport, Operation::Send, level);
                assert_eq!(method.unwrap(), CompletionMethod::OwnCompletion);
            }
            for level in [Level::Delivery, Level::Match, Level::Commit] {
                assert!(method_with(ALWAYS, transport, Operation::Send, level).is_err());
            }
        }
    }
}
