//! The objects of a replay, on one device.

use std::collections::HashMap;
use std::sync::Arc;

use embedded::Embedded;
use ringverbs::qp::LocalAddress;
use ringverbs::{
    AccessFlags, AddressHandle, CompletionQueue, Context, Device, Error, ProtectionDomain,
    QueuePair, RemoteRegion, Result,
};

/// A context of a recorded process: the process's position among the records, and its
/// descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub(crate) process: usize,
    pub(crate) context: u32,
}

/// A completion that the program has not polled yet.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// The queue pair's number in the replay.
    pub(crate) number: u32,
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) is_receive: bool,
    pub(crate) bytes: u32,
}

/// Bit in the opcodes of completions of receives.
const RECEIVE: u32 = 1 << 7;
/// Completions that are read at once.
const BATCH: usize = 64;

pub(crate) struct Queue {
    pub(crate) queue: CompletionQueue,
    pub(crate) seen: Vec<Seen>,
}

pub(crate) struct Pair {
    pub(crate) queue_pair: QueuePair,
    pub(crate) is_datagram: bool,
    /// Where its peer is.
    pub(crate) peer: Option<Place>,
}

/// Memory in the place of a recorded region.
pub(crate) struct Region {
    /// As it was recorded.
    iova: u64,
    lkey: u32,
    rkey: u32,
    /// Where the first byte is.
    start: u64,
    memory: RemoteRegion,
}

impl Region {
    /// Returns the address that stands for a recorded one, and the local or remote key.
    pub(crate) fn at(&self, address: u64) -> (u64, u32) {
        let address = self.start.wrapping_add(address.wrapping_sub(self.iova));
        (address, self.memory.key().rkey)
    }

    /// Returns the local key.
    pub(crate) fn lkey(&self) -> Result<u32> {
        Ok(self.memory.slice(..)?.raw_sge().lkey)
    }
}

/// All objects of a replay.
pub(crate) struct World {
    pub(crate) embedded: Embedded,
    device: Device,
    contexts: HashMap<Place, (Context, LocalAddress)>,
    pub(crate) domains: HashMap<(Place, String), ProtectionDomain>,
    pub(crate) queues: HashMap<(Place, u32), Queue>,
    /// By recorded number.
    pub(crate) pairs: HashMap<(Place, u32), Pair>,
    /// Numbers in the replay of the queue pairs with recorded ones, also of those that were
    /// destroyed.
    pub(crate) numbers: HashMap<(Place, u32), u32>,
    regions: HashMap<(Place, String), Arc<Region>>,
    by_lkey: HashMap<(Place, u32), Arc<Region>>,
    by_rkey: HashMap<(Place, u32), Arc<Region>>,
    paths: HashMap<Place, AddressHandle>,
}

/// Pages that regions are made of.
const PAGE: u64 = 4096;
/// What atomics need.
const WORD: u64 = 8;

impl World {
    pub(crate) fn new(embedded: Embedded) -> Self {
        Self {
            device: Device::from(embedded.clone()),
            embedded,
            contexts: HashMap::new(),
            domains: HashMap::new(),
            queues: HashMap::new(),
            pairs: HashMap::new(),
            numbers: HashMap::new(),
            regions: HashMap::new(),
            by_lkey: HashMap::new(),
            by_rkey: HashMap::new(),
            paths: HashMap::new(),
        }
    }

    /// Returns the context of a place, which is opened when it is first used, and the address of
    /// its port.
    pub(crate) fn context(&mut self, place: Place) -> Result<(Context, LocalAddress)> {
        if let Some((context, local)) = self.contexts.get(&place) {
            return Ok((context.clone(), *local));
        }
        let context = self.device.open()?;
        let local = context.local_address(1)?;
        self.contexts.insert(place, (context.clone(), local));
        Ok((context, local))
    }

    /// Closes a context with all that it has.
    pub(crate) fn close(&mut self, place: Place) {
        self.pairs.retain(|(of, _), _| *of != place);
        self.paths.remove(&place);
        self.queues.retain(|(of, _), _| *of != place);
        self.regions.retain(|(of, _), _| *of != place);
        self.by_lkey.retain(|(of, _), _| *of != place);
        self.by_rkey.retain(|(of, _), _| *of != place);
        self.domains.retain(|(of, _), _| *of != place);
        self.contexts.remove(&place);
    }

    /// Registers memory in the place of a recorded region.
    pub(crate) fn register(
        &mut self,
        place: Place,
        (name, domain): (&str, &ProtectionDomain),
        (iova, length): (u64, u64),
        access: AccessFlags,
        (lkey, rkey): (u32, u32),
    ) -> Result<()> {
        let too_long = Error::Invalid {
            what: "a region of this length",
        };
        // The first byte keeps its place in its word.
        let within = iova % WORD;
        let whole =
            (length.max(1).checked_add(within)).and_then(|it| it.checked_next_multiple_of(PAGE));
        let whole = whole.filter(|whole| *whole <= isize::MAX as u64);
        let whole = whole.ok_or(too_long)?;
        // Regions are of whole pages: the end is in the last word, so that accesses beyond it fail
        // as they did.
        let room = whole - length.max(1);
        let offset = room - (room - within) % WORD;
        let memory = RemoteRegion::alloc(domain, whole as usize, access)?;
        let region = Arc::new(Region {
            iova,
            lkey,
            rkey,
            start: memory.key().addr + offset,
            memory,
        });
        self.by_lkey.insert((place, lkey), Arc::clone(&region));
        self.by_rkey.insert((place, rkey), Arc::clone(&region));
        self.regions.insert((place, name.to_owned()), region);
        Ok(())
    }

    /// Deregisters memory. Returns false if it is not known.
    pub(crate) fn deregister(&mut self, place: Place, name: &str) -> bool {
        let Some(region) = self.regions.remove(&(place, name.to_owned())) else {
            return false;
        };
        self.by_lkey.remove(&(place, region.lkey));
        self.by_rkey.remove(&(place, region.rkey));
        true
    }

    /// Returns the region with a local key.
    pub(crate) fn local(&self, place: Place, lkey: u32) -> Option<&Region> {
        self.by_lkey.get(&(place, lkey)).map(Arc::as_ref)
    }

    /// Returns the region of a peer with a remote key: of its context, or of another one of its
    /// process.
    pub(crate) fn remote(&self, peer: Place, rkey: u32) -> Option<&Region> {
        let of_process = || {
            let mut all = self.by_rkey.iter();
            let found = all.find(|((of, key), _)| of.process == peer.process && *key == rkey);
            found.map(|(_, region)| region)
        };
        let region = self.by_rkey.get(&(peer, rkey));
        region.or_else(of_process).map(Arc::as_ref)
    }

    /// Makes the path of a context to its own port, for datagrams.
    pub(crate) fn make_path(&mut self, place: Place, domain: &ProtectionDomain) -> Result<()> {
        if self.paths.contains_key(&place) {
            return Ok(());
        }
        let (_, local) = self.context(place)?;
        let path = domain.address_handle_to(&local, &local)?;
        self.paths.insert(place, path);
        Ok(())
    }

    /// Returns a queue pair, and the path that [`make_path`](Self::make_path) has made.
    pub(crate) fn pair(
        &mut self,
        place: Place,
        number: u32,
    ) -> Option<(&mut Pair, Option<&AddressHandle>)> {
        let pair = self.pairs.get_mut(&(place, number))?;
        Some((pair, self.paths.get(&place)))
    }

    /// Reads what has completed.
    pub(crate) fn poll(&mut self) {
        for Queue { queue, seen } in self.queues.values_mut() {
            queue.poll_raw(BATCH, |entry| {
                seen.push(Seen {
                    number: entry.qp_num(),
                    wr_id: entry.wr_id(),
                    status: entry.status().0,
                    is_receive: entry.opcode() & RECEIVE != 0,
                    bytes: entry.byte_len(),
                });
            });
        }
    }
}
