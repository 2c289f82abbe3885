//! Shared receive queues.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::{Arc, OnceLock};

use uverbs::{Srq, SrqInit, SrqKind, SrqModify};

use crate::context::Ctx;
use crate::data::Sink;
use crate::device::{self, SharedRecvQueue};
use crate::inflight::{Posted, UnorderedTable};
use crate::operation::Operation;
use crate::qp::{Attachment, PostError, Released};
use crate::{CloseError, Context, Error, ProtectionDomain, Result};

/// Builder of a shared receive queue, from
/// [`ProtectionDomain::shared_receive_queue`].
#[must_use]
#[derive(Debug)]
pub struct SharedReceiveQueueBuilder {
    domain: ProtectionDomain,
    depth: u32,
    pieces: u32,
}

impl ProtectionDomain {
    /// Returns a builder of a shared receive queue.
    pub fn shared_receive_queue(&self) -> SharedReceiveQueueBuilder {
        SharedReceiveQueueBuilder {
            domain: self.clone(),
            depth: 64,
            pieces: 1,
        }
    }
}

impl SharedReceiveQueueBuilder {
    /// Sets the minimum depth of the queue, in receives; default 64.
    pub fn depth(mut self, receives: u32) -> Self {
        self.depth = receives;
        self
    }

    /// Sets the minimum number of SGEs (pieces of memory) per receive; default 1.
    pub fn pieces(mut self, pieces: u32) -> Self {
        self.pieces = pieces;
        self
    }

    /// Creates the queue.
    ///
    /// # Errors
    /// [`Error::Limit`] for sizes above the device's limit; ENOMEM.
    pub fn build(self) -> Result<SharedReceiveQueue> {
        let Self {
            domain,
            depth,
            pieces,
        } = self;
        let context = domain.context();
        let id = context.next_id();
        let init = SrqInit {
            pd: domain.handle(),
            user_handle: id,
            max_wr: depth,
            max_sge: pieces,
            limit: 0,
            kind: SrqKind::Basic,
            async_fd: None,
        };
        let created = match context
            .provider()
            .shared_receive_queue(context.uverbs(), &init)
        {
            Err(Error::Kernel(error)) if error.errno().raw() == libc::EINVAL => {
                let device = context.uverbs().query_device()?;
                let limits = [
                    ("depth of a shared receive queue", depth, device.max_srq_wr),
                    ("pieces of a shared receive", pieces, device.max_srq_sge),
                ];
                let over = limits
                    .into_iter()
                    .find(|(_, asked, allowed)| asked > allowed);
                return Err(
                    over.map_or(error.into(), |(what, asked, allowed)| Error::Limit {
                        what,
                        asked: asked.into(),
                        allowed: allowed.into(),
                    }),
                );
            }
            created => created?,
        };
        let capacity = created.recv.capacity();
        let table = context
            .inner()
            .srq_tables
            .insert(|id| UnorderedTable::new(id, capacity))?;
        Ok(SharedReceiveQueue {
            queue: ManuallyDrop::new(created.recv),
            inner: Arc::new(Inner {
                object: created.object,
                unmap_later: OnceLock::new(),
                entries: created.entries,
                table,
                domain,
                id,
            }),
        })
    }
}

/// A shared receive queue: a receive queue of several queue pairs (`ibv_srq`).
///
/// Posting takes `&mut self`. A receive completes in the completion queue of the queue
/// pair that consumed it, in any order. Queue pairs keep the queue's kernel object alive;
/// its receives stay in flight until all of these queue pairs are destroyed.
pub struct SharedReceiveQueue {
    queue: ManuallyDrop<SharedRecvQueue>,
    inner: Arc<Inner>,
}

/// The part of a shared receive queue that its queue pairs keep alive.
pub(crate) struct Inner {
    object: Srq<Ctx>,
    /// The ring of a dropped owner, which the device still reads.
    unmap_later: OnceLock<SharedRecvQueue>,
    /// The part that the creation of queue pairs needs.
    entries: device::SrqEntries,
    table: Arc<UnorderedTable>,
    domain: ProtectionDomain,
    id: u64,
}

impl Inner {
    pub(crate) fn object(&self) -> &Srq<Ctx> {
        &self.object
    }

    pub(crate) fn entries(&self) -> &device::SrqEntries {
        &self.entries
    }

    pub(crate) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    /// Called after the kernel object was destroyed.
    fn destroyed(&self) -> Vec<Posted> {
        self.domain
            .context()
            .inner()
            .srq_tables
            .remove(self.table.id());
        self.table.take_all()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.object.has_ended() {
            return;
        }
        // If it is not destroyed, the device may still use the receives, so they are not
        // released: also if a panic ends this function.
        let kept = ManuallyDrop::new((
            Arc::clone(&self.table),
            self.domain.clone(),
            self.unmap_later.take(),
        ));
        if let Err(error) = self.object.destroy() {
            if !self.object.has_ended() {
                tracing::error!(%error, "shared receive queue leaked, with its receives");
                return;
            }
        }
        drop(self.destroyed());
        drop(ManuallyDrop::into_inner(kept));
    }
}

impl SharedReceiveQueue {
    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// Returns the identifier that asynchronous events carry; unique in the
    /// context.
    pub fn id(&self) -> u64 {
        self.inner.id
    }

    /// Returns the protection domain.
    pub fn domain(&self) -> &ProtectionDomain {
        &self.inner.domain
    }

    /// Returns the context.
    pub fn context(&self) -> &Context {
        self.inner.domain.context()
    }

    /// Returns the number of receives that the queue holds.
    pub fn capacity(&self) -> u32 {
        self.queue.capacity()
    }

    /// Returns the number of receives in flight.
    pub fn in_flight(&self) -> u32 {
        self.inner.table.len()
    }

    /// Posts a receive into the whole capacity of `data`.
    ///
    /// # Errors
    /// Returns `data` with [`Error::QueueFull`], [`Error::Limit`] or
    /// [`Error::WrongDomain`].
    pub fn receive<D: Sink>(&mut self, data: D, token: u64) -> Result<(), PostError<D>> {
        let full = Error::QueueFull {
            capacity: self.capacity(),
        };
        // The slot is reserved and filled before the receive is published,
        // because a completion must find its operation. The SGEs are built before
        // the memory is moved.
        let Some(work) = self.inner.table.reserve() else {
            return Err(PostError {
                error: full,
                data: Some(data),
                token,
            });
        };
        let queue = &mut *self.queue;
        let max_sge = queue.max_sge();
        let pushed = data.scatter(max_sge, self.inner.domain.identity(), |list| {
            queue.push(work.0, list)
        });
        if let Err(error) = pushed {
            self.inner.table.cancel(work);
            return Err(PostError {
                error,
                data: Some(data),
                token,
            });
        }
        self.inner.table.fill(
            work,
            Posted {
                token,
                payload: data.into_payload(),
                attachment: Attachment::None,
                operation: Operation::Receive,
                unreported: false,
            },
        );
        // SAFETY: the table of receives in flight owns the memory until the
        // receive completes or the queue is destroyed.
        unsafe { self.queue.publish() };
        Ok(())
    }

    /// Requests one asynchronous event, raised when fewer than `receives` receives are left
    /// (the SRQ limit).
    ///
    /// # Errors
    /// EINVAL if the queue holds fewer than that.
    pub fn arm_limit(&mut self, receives: u32) -> Result<()> {
        let change = SrqModify {
            limit: Some(receives),
            max_wr: None,
        };
        self.queue.modify(&self.inner.object, &change)
    }

    /// Resizes the queue to hold at least `receives`. Posted receives are kept.
    ///
    /// # Errors
    /// EINVAL if more are posted or the device cannot resize; the queue is unchanged. If the
    /// new ring cannot be mapped, the queue accepts no more receives.
    pub fn resize(&mut self, receives: u32) -> Result<()> {
        let change = SrqModify {
            limit: None,
            max_wr: Some(receives),
        };
        self.queue.modify(&self.inner.object, &change)?;
        self.inner.table.grow(self.queue.capacity());
        Ok(())
    }

    /// Queries the armed limit; 0 if none is armed. A system call.
    ///
    /// # Errors
    /// EIO if the device was removed.
    pub fn limit(&self) -> Result<u32> {
        Ok(self.inner.object.query()?.limit)
    }

    /// Destroys the queue and returns the receives that were in it.
    ///
    /// # Errors
    /// Returns the queue with [`Error::Busy`] while queue pairs use it, or with
    /// the kernel's error.
    pub fn close(self) -> Result<Vec<Released>, CloseError<Self>> {
        if Arc::strong_count(&self.inner) > 1 {
            let error = Error::Busy {
                object: "shared receive queue",
                users: "queue pairs",
            };
            return Err(CloseError::new(self, error));
        }
        match self.inner.object.destroy() {
            Ok(_) => {}
            Err(_) if self.inner.object.has_ended() => {}
            Err(error) => return Err(CloseError::new(self, error)),
        }
        let left = self.inner.destroyed().into_iter();
        Ok(left.map(Released::from).collect())
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        // SAFETY: taken only here, and not used afterwards.
        let queue = unsafe { ManuallyDrop::take(&mut self.queue) };
        let _ = self.inner.unmap_later.set(queue);
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiveQueue")
            .field("handle", &self.inner.object.handle().0)
            .field("in_flight", &self.in_flight())
            .finish()
    }
}
