//! Work requests for a ConnectX.
//!
//! All that writes work requests writes them into rings of rdma_rxe's form. For
//! a ConnectX those are in the process's own memory, and when a batch has been
//! published, what is here carries it over to the device's queue: it stands where
//! the kernel's driver stands with rdma_rxe. So the way down to the doorbell is
//! the same code for every device, and costs rdma_rxe nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::mlx5::{Address, Bind, PostError, WindowKind};
use ::rxe::{PostedRecv, PostedSend};
use ring::{Indices, Ring, Slots};
use uverbs::{Opcode, SendFlags, Sge};

use crate::error::{Error, Result};

/// The side of a ring that a driver has otherwise.
#[derive(Debug)]
struct Taken {
    indices: Indices,
    slots: Slots,
    /// What was carried over.
    at: usize,
}

impl Taken {
    /// Of an empty ring, which has to outlive it.
    fn new(ring: &Ring) -> Self {
        Self {
            indices: ring.indices(),
            slots: ring.slots(),
            at: ring.indices().own_producer(),
        }
    }

    /// What was not carried over never is.
    fn forget(&mut self) {
        self.at = self.indices.own_producer();
        self.give_back();
    }

    /// What was carried over is the writer's again. How much the device's queue
    /// holds is not the ring's affair: the library counts what is in flight.
    fn give_back(&self) {
        self.indices.publish_consumer(self.at);
    }

    /// Carries over the receives that were published. What is refused, and what is
    /// behind it, stays where it is.
    fn receives(
        &mut self,
        mut push: impl FnMut(u64, &[Sge]) -> std::result::Result<(), PostError>,
    ) {
        let end = self.indices.own_producer();
        while self.at != end {
            // SAFETY: as in `Sender::carry`.
            let posted = unsafe { PostedRecv::at(self.slots.slot_inside(self.at)) };
            if let Err(error) = push(posted.wr_id(), posted.list()) {
                tracing::error!(%error, "a receive stays behind");
                break;
            }
            self.at = self.indices.next(self.at);
        }
    }
}

/// Carries send work requests over to a queue of a ConnectX.
#[derive(Debug)]
pub(crate) struct Sender {
    queue: ::mlx5::SendQueue,
    taken: Taken,
    paths: Arc<Paths>,
    datagram: bool,
}

impl Sender {
    /// `ring`, of the queue that is written to, outlives it.
    pub fn new(queue: ::mlx5::SendQueue, ring: &Ring, paths: &Arc<Paths>, datagram: bool) -> Self {
        Self {
            queue,
            taken: Taken::new(ring),
            paths: Arc::clone(paths),
            datagram,
        }
    }

    /// Carries over what was published, and rings.
    ///
    /// # Errors
    /// [`Error::Doorbell`] of a work request that the device's queue does not
    /// take; it and those behind it stay where they are.
    #[inline(never)]
    pub fn carry(&mut self) -> Result<()> {
        let end = self.taken.indices.own_producer();
        let mut result = Ok(());
        self.queue.begin();
        while self.taken.at != end {
            // SAFETY: a position of the ring between what was carried over and
            // what is published: written by its queue, whose writer waits.
            let posted = unsafe { PostedSend::at(self.taken.slots.slot_inside(self.taken.at)) };
            if let Err(error) = self.write(posted) {
                result = Err(Error::Doorbell {
                    errno: error.errno(),
                });
                break;
            }
            self.queue.accept();
            self.taken.at = self.taken.indices.next(self.taken.at);
        }
        // SAFETY: that is the contract of those who have published it to the
        // ring.
        unsafe { self.queue.publish() };
        self.taken.give_back();
        result
    }

    fn write(&mut self, posted: PostedSend<'_>) -> Result<(), PostError> {
        let (opcode, flags) = (posted.opcode(), posted.flags());
        let mut wqe = self.queue.open(posted.wr_id(), opcode, flags)?;
        match opcode {
            Opcode::BIND_MW => return wqe.bind_mw(&binding(posted)),
            // All of it but the key is written.
            Opcode::LOCAL_INV => {
                wqe.immediate_or_key(posted.immediate_or_key());
                return Ok(());
            }
            _ => wqe.immediate_or_key(posted.immediate_or_key()),
        };
        match opcode {
            Opcode::ATOMIC_CMP_AND_SWP | Opcode::ATOMIC_FETCH_AND_ADD => {
                let (addr, rkey, compare_add, swap) = posted.atomic();
                wqe.atomic(addr, rkey, compare_add, swap);
            }
            _ if self.datagram => {
                let (number, remote_qpn, remote_qkey) = posted.ud();
                let address = self.paths.find(number).ok_or(PostError::BadOperation)?;
                wqe.ud(&address, remote_qpn, remote_qkey);
            }
            // Sends have none, and ignore it.
            _ => {
                let (addr, rkey) = posted.rdma();
                wqe.rdma(addr, rkey);
            }
        }
        if flags.contains(SendFlags::INLINE) {
            let bytes = posted.inline();
            let piece = (bytes.as_ptr(), bytes.len());
            // SAFETY: a slice is readable for its length.
            unsafe { wqe.inline_raw([piece].into_iter()) }
        } else {
            wqe.sge_list(posted.list())
        }
    }

    /// The queue pair was reset, with nothing in flight.
    pub fn reset(&mut self) {
        self.queue.reset();
        self.taken.forget();
    }
}

/// In the access of a bind: the window is of type 2. No right has that bit.
pub(crate) const OF_QUEUE_PAIR: u32 = 1 << 31;

/// The bind of a window as `Wqe::bind_window` has written it.
#[cold]
fn binding(posted: PostedSend<'_>) -> Bind {
    let bind = posted.bind_mw();
    Bind {
        window: bind.mw_rkey,
        rkey: bind.rkey,
        kind: match bind.access & OF_QUEUE_PAIR {
            0 => WindowKind::Type1,
            _ => WindowKind::Type2,
        },
        addr: bind.addr,
        length: bind.length,
        lkey: bind.mr_lkey,
        access: bind.access & !OF_QUEUE_PAIR,
    }
}

/// A receive queue of a ConnectX.
#[derive(Debug)]
pub(crate) enum Receives {
    Own(::mlx5::RecvQueue),
    Shared(::mlx5::SharedQueue),
}

/// Carries receives over to a queue of a ConnectX.
#[derive(Debug)]
pub(crate) struct Receiver {
    queue: Receives,
    taken: Taken,
}

impl Receiver {
    /// `ring`, of the queue that is written to, outlives it.
    pub fn new(queue: Receives, ring: &Ring) -> Self {
        Self {
            queue,
            taken: Taken::new(ring),
        }
    }

    /// Carries over what was published. What the device's queue does not take
    /// stays where it is.
    #[inline(never)]
    pub fn carry(&mut self) {
        match &mut self.queue {
            Receives::Own(queue) => {
                queue.begin().keep();
                self.taken.receives(|wr_id, list| queue.push(wr_id, list));
                // SAFETY: that is the contract of those who have published it to
                // the ring.
                unsafe { queue.publish() };
            }
            Receives::Shared(queue) => {
                let mut queue = queue.locked();
                self.taken.receives(|wr_id, list| queue.push(wr_id, list));
                // SAFETY: as above.
                unsafe { queue.publish() };
            }
        }
        self.taken.give_back();
    }

    /// The queue pair was reset, with nothing in flight.
    pub fn reset(&mut self) {
        if let Receives::Own(queue) = &mut self.queue {
            queue.reset();
        }
        self.taken.forget();
    }
}

/// The address handles of a context, by number: what a work request in a ring
/// names one by.
#[derive(Debug, Default)]
pub(crate) struct Paths(Mutex<Vec<Option<Address>>>);

impl Paths {
    fn lock(&self) -> MutexGuard<'_, Vec<Option<Address>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, number: u32) -> Option<Address> {
        *self.lock().get(number as usize)?
    }

    /// Numbers one.
    pub fn insert(self: &Arc<Self>, address: Address) -> Place {
        let mut all = self.lock();
        let free = all.iter().position(Option::is_none);
        let number = free.unwrap_or(all.len());
        match all.get_mut(number) {
            Some(place) => *place = Some(address),
            None => all.push(Some(address)),
        }
        Place {
            number: number as u32,
            paths: Arc::clone(self),
        }
    }
}

/// An address handle's number; given back when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    pub number: u32,
    paths: Arc<Paths>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(place) = self.paths.lock().get_mut(self.number as usize) {
            *place = None;
        }
    }
}

/// A ring for at least `entries` entries of `bytes` bytes.
pub(crate) fn ring(entries: u32, bytes: usize) -> Result<Ring> {
    let stride = bytes.checked_next_power_of_two().ok_or(Error::NoMemory)?;
    Ring::anonymous(entries, stride.ilog2()).map_err(|error| Error::Map {
        what: "work requests",
        error,
    })
}
