//! Send work requests for a ConnectX.
//!
//! All that writes them writes them into rings of rdma_rxe's form. For
//! a ConnectX those are in the process's own memory, and when a batch has been
//! published, what is here carries it over to the device's queue: it stands where
//! the kernel's driver stands with rdma_rxe. So the way down to the doorbell is
//! the same code for every device, and costs rdma_rxe nothing.

use std::borrow::Borrow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::mlx5::{Address, Bind, OneElement, PostError, PostedOne, WindowKind};
use ::rxe::PostedSend;
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

    /// All of it was, and the writer starts again with the ring's first entry.
    #[inline(always)]
    fn rewind(&mut self) {
        self.at = 0;
    }

    /// The next work request that is to be carried over, if there is one.
    #[inline(always)]
    fn send(&self, end: usize) -> Option<PostedSend<'_>> {
        // SAFETY: a position of the ring between what was carried over and what
        // is published: written by its queue, whose writer waits.
        (self.at != end).then(|| unsafe { PostedSend::at(self.slots.slot_inside(self.at)) })
    }

    /// That one was carried over.
    #[inline(always)]
    fn carried(&mut self) {
        self.at = self.indices.next(self.at);
    }
}

/// A work request in a ring, of one element, as the quick ways read it.
struct One<'r, S> {
    posted: PostedSend<'r>,
    sge: S,
}

impl<'r> One<'r, &'r Sge> {
    /// Of a list of one element. It is read in place: a copy would be read in
    /// larger pieces than it was written just before, and wait for them.
    #[inline(always)]
    fn listed(posted: PostedSend<'r>) -> Option<Self> {
        match posted.list() {
            [sge] => Some(Self { posted, sge }),
            _ => None,
        }
    }
}

impl<'r> One<'r, Sge> {
    /// Of inline data.
    #[inline(always)]
    fn inline(posted: PostedSend<'r>) -> Self {
        let bytes = posted.inline();
        let sge = Sge {
            addr: bytes.as_ptr().expose_provenance() as u64,
            length: bytes.len() as u32,
            lkey: 0,
        };
        Self { posted, sge }
    }
}

impl<S: Borrow<Sge>> OneElement for One<'_, S> {
    #[inline(always)]
    fn wr_id(&self) -> u64 {
        self.posted.wr_id()
    }
    #[inline(always)]
    fn opcode(&self) -> Opcode {
        self.posted.opcode()
    }
    #[inline(always)]
    fn flags(&self) -> SendFlags {
        self.posted.flags()
    }
    #[inline(always)]
    fn immediate_or_key(&self) -> u32 {
        self.posted.immediate_or_key()
    }
    #[inline(always)]
    fn remote_addr(&self) -> u64 {
        self.posted.rdma().0
    }
    #[inline(always)]
    fn rkey(&self) -> u32 {
        self.posted.rdma().1
    }
    #[inline(always)]
    fn sge(&self) -> &Sge {
        self.sge.borrow()
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

    /// Carries over what was published, and rings. The ring's writer starts again
    /// with its first entry.
    ///
    /// # Errors
    /// [`Error::Doorbell`] of a work request that the device's queue does not
    /// take; it and those behind it stay where they are.
    #[inline(never)]
    pub fn carry(&mut self) -> Result<()> {
        let end = self.taken.indices.own_producer();
        if self.taken.indices.next(self.taken.at) == end && self.post_alone(end) {
            self.taken.rewind();
            return Ok(());
        }
        self.carry_batch(end)
    }

    /// Posts what was published by itself, if it is one of nearly all; if not,
    /// nothing was done.
    #[inline(always)]
    fn post_alone(&mut self, end: usize) -> bool {
        let Some(posted) = self.taken.send(end) else {
            return false;
        };
        // SAFETY: as in `carry_batch`; of inline data a slice is readable.
        let told = unsafe {
            if posted.flags().contains(SendFlags::INLINE) {
                self.queue.post_one_inline(&One::inline(posted))
            } else {
                match One::listed(posted) {
                    Some(one) => self.queue.post_one(&one),
                    None => PostedOne::No,
                }
            }
        };
        if told == PostedOne::Written {
            self.queue.tell_posted();
        }
        told != PostedOne::No
    }

    #[inline(never)]
    fn carry_batch(&mut self, end: usize) -> Result<()> {
        let mut result = Ok(());
        self.queue.begin();
        while let Some(posted) = self.taken.send(end) {
            if !Self::push_one(&mut self.queue, posted) {
                let written = Self::write(&mut self.queue, &self.paths, self.datagram, posted);
                if let Err(error) = written {
                    result = Err(Error::Doorbell {
                        errno: error.errno(),
                    });
                    break;
                }
                self.queue.accept();
            }
            self.taken.carried();
        }
        // SAFETY: that is the contract of those who have published it to the
        // ring.
        unsafe { self.queue.publish() };
        match result {
            Ok(()) => self.taken.rewind(),
            Err(_) => self.taken.give_back(),
        }
        result
    }

    /// Adds a work request to the batch, if it is one of nearly all.
    #[inline(always)]
    fn push_one(queue: &mut ::mlx5::SendQueue, posted: PostedSend<'_>) -> bool {
        if posted.flags().contains(SendFlags::INLINE) {
            // SAFETY: a slice is readable for its length.
            return unsafe { queue.push_one_inline(&One::inline(posted)) };
        }
        One::listed(posted).is_some_and(|one| queue.push_one(&one))
    }

    /// Writes a work request of any kind.
    #[inline(never)]
    fn write(
        queue: &mut ::mlx5::SendQueue,
        paths: &Paths,
        datagram: bool,
        posted: PostedSend<'_>,
    ) -> Result<(), PostError> {
        let (opcode, flags) = (posted.opcode(), posted.flags());
        let mut wqe = queue.open(posted.wr_id(), opcode, flags)?;
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
            _ if datagram => {
                let (number, remote_qpn, remote_qkey) = posted.ud();
                let address = paths.find(number).ok_or(PostError::BadOperation)?;
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
