//! The engine's platform: the memory of this process that the device may
//! access, and a clock.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ring::copy;
use roce::packet::Path;
use roce::transport::Access as PeerAccess;
use softhca::platform::{Clock, Interrupts, Memory, Peers, Unmapped, copy_through_buffer};

use crate::driver::moved::{MovedRegions, Part};
use crate::driver::pages::{read_protected, write_protected};
use crate::first_time::FirstTime;
use crate::peers::PeerProcesses;
use crate::user::{Access, fault_in};

thread_local! {
    /// Address and length of the last access.
    static LAST_ACCESS: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
    /// Address and length of the last source of a memory copy.
    static LAST_SOURCE: Cell<(usize, usize)> = const { Cell::new((0, 0)) };
}

/// Returns the memory of the current or last device accesses in this thread, for signal
/// handlers.
pub fn last_accesses() -> [Range<usize>; 2] {
    [LAST_ACCESS.get(), LAST_SOURCE.get()]
        .map(|(address, length)| address..address.saturating_add(length))
}

/// The functions that are called before devices read and write data in memory.
static DATA_OBSERVERS: OnceLock<(GatherObserver, ScatterObserver)> = OnceLock::new();

/// Called with the number of a queue pair, an address and a length, by the thread that drives
/// the device, under the device's lock.
pub type GatherObserver = fn(u32, u64, usize);

/// As [`GatherObserver`]; the last argument tells whether it is a write or an atomic of the queue
/// pair's peer, and not what the queue pair receives.
pub type ScatterObserver = fn(u32, u64, usize, bool);

/// Sets the functions that are called before devices of this process read data of queue pairs
/// from memory, and write it. A later call changes nothing.
pub fn observe_data(before_gather: GatherObserver, before_scatter: ScatterObserver) {
    let _ = DATA_OBSERVERS.set((before_gather, before_scatter));
}

/// The function that is called when a peer may access memory.
static ACCESS_OBSERVER: OnceLock<AccessObserver> = OnceLock::new();

/// Called with the numbers of a queue pair and of the key of a request of its peer, as
/// [`GatherObserver`].
pub type AccessObserver = fn(u32, u32, PeerAccess);

/// Sets the function that is called when devices of this process have found a request of a peer
/// permitted. A later call changes nothing.
pub fn observe_peer_accesses(accesses: AccessObserver) {
    let _ = ACCESS_OBSERVER.set(accesses);
}

/// Memory of the process that the device may access.
#[derive(Debug, Default)]
pub(crate) struct Ranges {
    /// Number of grants of each range, by its start and its exclusive end.
    ranges: BTreeMap<(u64, u64), usize>,
    /// The same ranges without overlap: the exclusive end of each by its start.
    merged: BTreeMap<u64, u64>,
    /// Cache of ranges in `merged`, indexed by bits of the address.
    recent: [Cell<Option<(u64, u64)>>; RECENT_RANGES],
}

const RECENT_RANGES: usize = 16;

/// How long a peer of this host whose process waits for a processor may be silent before its
/// timeouts count as retries, in nanoseconds.
const MAX_STARVED: u64 = 30_000_000_000;

impl Ranges {
    fn add(&mut self, address: u64, length: u64) {
        // The caller has checked that the range does not overflow.
        let range = (address, address.saturating_add(length));
        *self.ranges.entry(range).or_default() += 1;
        let (from, to) = self.unmerge(range);
        self.merged.insert(from, to);
    }

    fn remove(&mut self, address: u64, length: u64) {
        let range = (address, address.saturating_add(length));
        if let Some(times) = self.ranges.get_mut(&range) {
            *times -= 1;
            if *times == 0 {
                self.ranges.remove(&range);
                self.merge(range);
            }
        }
    }

    /// Removes the merged ranges that overlap or touch a range. Returns their union with it.
    fn unmerge(&mut self, range: (u64, u64)) -> (u64, u64) {
        self.recent = Default::default();
        let (mut from, mut to) = range;
        while let Some((&start, &end)) = self.merged.range(..=to).next_back() {
            if end < from {
                break;
            }
            self.merged.remove(&start);
            (from, to) = (from.min(start), to.max(end));
        }
        (from, to)
    }

    /// Merges the ranges that overlap or touch one that was removed.
    fn merge(&mut self, removed: (u64, u64)) {
        let (from, to) = self.unmerge(removed);
        let mut current: Option<(u64, u64)> = None;
        for &(from, to) in self.ranges.range((from, 0)..=(to, u64::MAX)).map(|it| it.0) {
            match &mut current {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ => {
                    self.merged.extend(current);
                    current = Some((from, to));
                }
            }
        }
        self.merged.extend(current);
    }

    #[inline]
    fn contains(&self, address: u64, length: u64) -> bool {
        let Some(end) = address.checked_add(length) else {
            return false;
        };
        if length == 0 {
            return true;
        }
        let recent = &self.recent[(address >> 12) as usize % RECENT_RANGES];
        let has = |range: (u64, u64)| range.0 <= address && end <= range.1;
        recent.get().is_some_and(has) || self.find((address, end), recent)
    }

    /// Looks for the merged range around another one, and remembers it.
    #[cold]
    fn find(&self, (from, to): (u64, u64), recent: &Cell<Option<(u64, u64)>>) -> bool {
        let found = self.merged.range(..=from).next_back();
        let found = found.map(|(from, to)| (*from, *to)).filter(|it| to <= it.1);
        recent.set(found.or(recent.get()));
        found.is_some()
    }
}

/// This process as the engine's platform: device addresses are its virtual
/// addresses.
#[derive(Debug)]
pub(crate) struct Process {
    ranges: Ranges,
    /// Memory of regions with on-demand paging, not all of which may be mapped.
    on_demand: Ranges,
    /// Regions whose pages the program has moved, unmapped or protected.
    pub(crate) moved: MovedRegions,
    time: Time,
    /// The processes that have the peers; `None` if they are all this one.
    peers: Option<Arc<dyn PeerProcesses>>,
    /// How long peers on other hosts may be silent before retries count, in nanoseconds.
    patience: u64,
}

/// The source of the time.
#[derive(Debug)]
enum Time {
    /// The system's clock, relative to this time.
    Real(Instant),
    /// The nanoseconds in this word.
    Simulated(Arc<AtomicU64>),
}

impl Process {
    /// Creates a platform without any memory, with a simulated clock if it is given.
    pub(crate) fn new(clock: Option<Arc<AtomicU64>>) -> Self {
        // One for all devices, also of children of fork, which share records of the clock.
        static BEGAN: FirstTime = FirstTime::new();
        let real = || Time::Real(BEGAN.get(Instant::now()));
        Self {
            ranges: Ranges::default(),
            on_demand: Ranges::default(),
            moved: MovedRegions::default(),
            time: clock.map_or_else(real, Time::Simulated),
            peers: None,
            patience: 0,
        }
    }

    /// Sets the processes that have the peers of queue pairs.
    pub(crate) fn set_peers(&mut self, peers: Arc<dyn PeerProcesses>) {
        self.peers = Some(peers);
    }

    /// Sets how long peers on other hosts may be silent before retries count.
    pub(crate) fn set_patience(&mut self, patience: Duration) {
        self.patience = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
    }

    /// Returns the wall clock time in nanoseconds since 1970. Simulated time begins then.
    pub(crate) fn wall_clock(&self) -> u64 {
        match &self.time {
            Time::Real(_) => SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_nanos() as u64),
            Time::Simulated(now) => now.load(Ordering::Acquire),
        }
    }

    /// Grants the device access to memory. A range can be granted several times.
    ///
    /// # Safety
    /// Until the range has been revoked as often as it was granted, the memory
    /// must stay mapped and readable, and writable where a command lets the
    /// device write to it; and there must be no references to bytes that are
    /// written.
    pub(crate) unsafe fn grant(&mut self, address: u64, length: u64) {
        self.ranges.add(address, length);
    }

    /// Revokes access to a range granted with the same address and length.
    pub(crate) fn revoke(&mut self, address: u64, length: u64) {
        self.ranges.remove(address, length);
    }

    /// Revokes access to all memory.
    pub(crate) fn revoke_all(&mut self) {
        self.ranges = Ranges::default();
        self.on_demand = Ranges::default();
    }

    /// As [`grant`](Self::grant), for memory whose pages need not be mapped: each access
    /// maps them, or fails.
    ///
    /// # Safety
    /// Until access is revoked, what is mapped of the range must stay so during a request that
    /// uses it, and there must be no references to bytes that are written.
    pub(crate) unsafe fn grant_on_demand(&mut self, address: u64, length: u64) {
        self.on_demand.add(address, length);
    }

    /// Revokes access that was granted by [`grant_on_demand`](Self::grant_on_demand).
    pub(crate) fn revoke_on_demand(&mut self, address: u64, length: u64) {
        self.on_demand.remove(address, length);
    }

    /// Returns whether access to all `length` bytes was granted, and all are mapped.
    pub(crate) fn contains(&self, address: u64, length: u64) -> bool {
        self.ranges.contains(address, length)
    }

    /// Returns the number of granted ranges.
    pub(crate) fn ranges(&self) -> usize {
        let ranges = [&self.ranges, &self.on_demand];
        ranges.iter().flat_map(|it| it.ranges.values()).sum()
    }

    /// Maps the pages of a range if they belong to regions with on-demand paging. Returns
    /// whether they do, and permit the access.
    #[cold]
    fn map_on_demand(&self, address: u64, length: u64, access: Access) -> bool {
        !MovedRegions::has(address)
            && self.on_demand.contains(address, length)
            && fault_in(address, length, access).is_ok()
    }

    /// Accesses memory of moved regions by parts.
    #[cold]
    fn access_moved(
        &self,
        address: u64,
        length: usize,
        mut access: impl FnMut(Part) -> bool,
    ) -> Result<(), Unmapped> {
        let done = self.moved.access(address, length, |part| {
            LAST_ACCESS.set((part.at, part.range.len()));
            access(part)
        });
        done.then_some(()).ok_or(Unmapped { address })
    }

    /// Returns the place of 8 aligned bytes of a moved region.
    #[cold]
    fn locate_moved(&self, address: u64) -> Option<Part> {
        let mut place = None;
        if address % 8 == 0 {
            let _ = self.access_moved(address, 8, |part| {
                place = Some(part);
                true
            });
        }
        place
    }

    /// Returns a pointer to an address if access to all `length` bytes was granted.
    #[inline]
    fn locate(&self, address: u64, length: usize, access: Access) -> Result<*mut u8, Unmapped> {
        if self.ranges.contains(address, length as u64)
            || self.map_on_demand(address, length as u64, access)
        {
            LAST_ACCESS.set((address as usize, length));
            Ok(ptr::with_exposed_provenance_mut(address as usize))
        } else {
            Err(Unmapped { address })
        }
    }
}

impl Memory for Process {
    #[inline]
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Unmapped> {
        let Ok(from) = self.locate(address, out.len(), Access::Read) else {
            return self.access_moved(address, out.len(), |part| {
                let Some(out) = out.get_mut(part.range) else {
                    return false;
                };
                if part.protected {
                    return read_protected(part.at, out);
                }
                // SAFETY: pages of a region; otherwise as below.
                unsafe { copy::load(ptr::with_exposed_provenance_mut(part.at), out) };
                true
            });
        };
        // SAFETY: access to the range was granted (`grant`), so it is mapped
        // and readable. The process may write to it concurrently, with atomic
        // accesses; the copy then contains old or new bytes.
        unsafe { copy::load(from, out) };
        Ok(())
    }

    #[inline]
    fn before_gather(&self, qpn: u32, address: u64, length: usize) {
        if let Some((observer, _)) = DATA_OBSERVERS.get() {
            observer(qpn, address, length);
        }
    }

    #[inline]
    fn before_scatter(&self, qpn: u32, address: u64, length: usize, is_remote: bool) {
        if let Some((_, observer)) = DATA_OBSERVERS.get() {
            observer(qpn, address, length, is_remote);
        }
    }

    #[inline]
    fn peer_accesses(&self, qpn: u32, key: u32, access: PeerAccess) {
        if let Some(observer) = ACCESS_OBSERVER.get() {
            observer(qpn, key, access);
        }
    }

    #[inline]
    fn write(&self, address: u64, data: &[u8]) -> Result<(), Unmapped> {
        let Ok(to) = self.locate(address, data.len(), Access::Write) else {
            return self.access_moved(address, data.len(), |part| {
                let Some(data) = data.get(part.range) else {
                    return false;
                };
                // SAFETY: pages of a region; otherwise as below.
                unsafe {
                    if part.protected {
                        return write_protected(part.at, data);
                    }
                    copy::store(ptr::with_exposed_provenance_mut(part.at), data);
                }
                true
            });
        };
        // SAFETY: as in `read`; memory that a key or a queue lets the device
        // write to is writable, and there are no references to its bytes.
        unsafe { copy::store(to, data) };
        Ok(())
    }

    #[inline]
    fn copies_from(&self, address: u64, length: usize) -> bool {
        self.contains(address, length as u64)
    }

    #[inline]
    fn copy(&self, from: u64, to: u64, length: usize) -> Result<(), Unmapped> {
        if MovedRegions::has(from | to) {
            return copy_through_buffer(self, from, to, length);
        }
        let source = self.locate(from, length, Access::Read)?;
        LAST_SOURCE.set((from as usize, length));
        let target = self.locate(to, length, Access::Write)?;
        if !copy::has_common_parts(source, target, length) {
            return copy_through_buffer(self, from, to, length);
        }
        // SAFETY: as in `read` and `write`, for either range.
        unsafe { copy::within(source, target, length) };
        Ok(())
    }

    #[inline]
    fn publish(&self, address: u64, byte: u8) -> Result<(), Unmapped> {
        let to = self.locate(address, 1, Access::Write)?;
        // SAFETY: `locate` has checked that the byte was granted to the device; a
        // byte is always aligned.
        let cell = unsafe { AtomicU8::from_ptr(to) };
        // Release: orders the CQE before its owner bit, which the driver reads
        // with acquire.
        cell.store(byte, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn read_index(&self, address: u64) -> Result<u32, Unmapped> {
        let from = self.locate(address, 4, Access::Read)?.cast::<u32>();
        let word = if from.is_aligned() {
            // SAFETY: `locate` has checked that the word was granted to the
            // device; it is aligned.
            let cell = unsafe { AtomicU32::from_ptr(from) };
            cell.load(Ordering::Acquire).to_ne_bytes()
        } else {
            let mut bytes = [0; 4];
            self.read(address, &mut bytes)?;
            fence(Ordering::Acquire);
            bytes
        };
        Ok(u32::from_be_bytes(word))
    }

    fn update(
        &self,
        address: u64,
        change: &mut dyn FnMut([u8; 8]) -> Option<[u8; 8]>,
    ) -> Result<[u8; 8], Unmapped> {
        let at = match self.locate(address, 8, Access::Write) {
            Ok(at) => at,
            Err(unmapped) => match self.locate_moved(address) {
                Some(Part { at, protected, .. }) if !protected => {
                    ptr::with_exposed_provenance_mut(at)
                }
                // The program cannot change it meanwhile.
                Some(_) => {
                    let mut bytes = [0; 8];
                    self.read(address, &mut bytes)?;
                    if let Some(new) = change(bytes) {
                        self.write(address, &new)?;
                    }
                    return Ok(bytes);
                }
                None => return Err(unmapped),
            },
        };
        let at = at.cast::<u64>();
        if !at.is_aligned() {
            return Err(Unmapped { address });
        }
        // SAFETY: `locate` has checked that the word was granted to the device;
        // it is aligned.
        let cell = unsafe { AtomicU64::from_ptr(at) };
        // Atomic also with respect to the process and its other devices.
        let mut before = cell.load(Ordering::Acquire);
        while let Some(new) = change(before.to_ne_bytes()) {
            let new = u64::from_ne_bytes(new);
            match cell.compare_exchange(before, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => before = now,
            }
        }
        Ok(before.to_ne_bytes())
    }
}

impl Process {
    /// Returns the device's time at `at`, which is now.
    pub(crate) fn time_at(&self, at: Instant) -> u64 {
        match &self.time {
            // Never 0, which a driver may interpret as no time.
            Time::Real(began) => 1 + (at - *began).as_nanos() as u64,
            Time::Simulated(now) => now.load(Ordering::Acquire),
        }
    }
}

impl Interrupts for Process {
    /// The event queue is checked after every turn.
    fn interrupt(&mut self, _: u16) {}
}

impl Peers for Process {
    fn is_stopped(&self, path: &Path, qpn: u32) -> bool {
        let peers = self.peers.as_ref();
        peers.is_some_and(|peers| peers.is_stopped(path, qpn))
    }

    fn max_silence(&self, path: &Path, qpn: u32) -> u64 {
        let local = |peers: &&Arc<dyn PeerProcesses>| peers.is_of_this_host(path);
        match self.peers.as_ref().filter(local) {
            Some(peers) if peers.is_starved(path, qpn) => MAX_STARVED,
            Some(_) => 0,
            None => self.patience,
        }
    }
}

impl Clock for Process {
    fn now(&self) -> u64 {
        self.time_at(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_ranges_stay_until_all_are_removed() {
        let mut ranges = Ranges::default();
        ranges.add(100, 100);
        ranges.add(150, 100);
        ranges.add(150, 100);
        ranges.add(300, 10);
        assert!(ranges.contains(100, 150) && ranges.contains(249, 1));
        assert!(!ranges.contains(99, 2) && !ranges.contains(249, 2) && !ranges.contains(260, 1));
        ranges.remove(150, 100);
        assert!(ranges.contains(200, 50));
        ranges.remove(150, 100);
        assert!(!ranges.contains(200, 1) && ranges.contains(100, 100));
        assert!(ranges.contains(300, 10) && !ranges.contains(u64::MAX, 2));
    }

    proptest::proptest! {
        /// The device has access to exactly the bytes of ranges that were granted and not
        /// revoked.
        #[test]
        fn bytes_of_granted_ranges_are_accessible(
            steps in proptest::collection::vec((0..60u64, 1..20u64, proptest::bool::ANY), 1..60),
        ) {
            let mut ranges = Ranges::default();
            let mut granted: Vec<(u64, u64)> = Vec::new();
            for (address, length, add) in steps {
                match add || granted.is_empty() {
                    true => {
                        ranges.add(address, length);
                        granted.push((address, length));
                    }
                    false => {
                        let index = address as usize % granted.len();
                        let (address, length) = granted.swap_remove(index);
                        ranges.remove(address, length);
                    }
                }
                let contains = |(at, length): &(u64, u64), byte| (*at..at + length).contains(&byte);
                let has = |byte| granted.iter().any(|range| contains(range, byte));
                for byte in 0..80 {
                    proptest::prop_assert_eq!(ranges.contains(byte, 1), has(byte));
                }
                for from in 0..70 {
                    let all = (from..from + 10).all(has);
                    proptest::prop_assert_eq!(ranges.contains(from, 10), all);
                }
                let merged: Vec<_> = ranges.merged.iter().collect();
                let apart = merged.windows(2).all(|pair| pair[0].1 < pair[1].0);
                proptest::prop_assert!(apart);
            }
        }
    }

    #[test]
    fn atomic_operations_are_atomic() {
        const EACH: u64 = 100_000;
        let word = AtomicU64::new(0);
        let address = word.as_ptr().expose_provenance() as u64;
        // Like two devices of a process.
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut process = Process::new(None);
                    // SAFETY: an atomic word that outlives the scope.
                    unsafe { process.grant(address, 8) };
                    for _ in 0..EACH {
                        let add = |now| Some((u64::from_ne_bytes(now) + 1).to_ne_bytes());
                        process.update(address, &mut { add }).unwrap();
                    }
                });
            }
        });
        assert_eq!(word.into_inner(), 2 * EACH);
    }

    #[test]
    fn only_granted_ranges_are_accessed() {
        let mut memory = [0u64; 4];
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        let mut process = Process::new(None);
        let mut out = [0; 8];
        assert!(process.read(address, &mut out).is_err());
        // SAFETY: an array of this test, not used otherwise until below.
        unsafe { process.grant(address, 16) };
        process.write(address + 8, &7u64.to_ne_bytes()).unwrap();
        assert!(process.write(address + 9, &[0; 8]).is_err());
        let before = process.update(address + 8, &mut |now| {
            Some((u64::from_ne_bytes(now) + 1).to_ne_bytes())
        });
        assert_eq!(before, Ok(7u64.to_ne_bytes()));
        assert!(process.update(address + 4, &mut |_| None).is_err());
        process.revoke(address, 16);
        assert!(process.publish(address, 1).is_err());
        assert_eq!(memory, [0, 8, 0, 0]);
    }
}
