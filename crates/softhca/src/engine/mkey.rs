//! Memory keys: what of the guest's memory a key gives access to.

use super::core::Core;
use crate::bits::{get32, get64};
use crate::platform::Platform;
use crate::transport::Fault;

/// Gives queues of the kernel access to all memory by its address.
pub(crate) const RESERVED_LKEY: u32 = 0x300;
/// Takes whatever is written, and reads as zeros.
pub(crate) const NULL_KEY: u32 = 0x200;
/// Ends the scatter list of a receive request.
pub(crate) const TERMINATE_LKEY: u32 = 0x100;

/// What a key allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Rights(pub(crate) u32);

impl Rights {
    pub(crate) const LOCAL_READ: Rights = Rights(1 << 0);
    pub(crate) const LOCAL_WRITE: Rights = Rights(1 << 1);
    pub(crate) const REMOTE_READ: Rights = Rights(1 << 2);
    pub(crate) const REMOTE_WRITE: Rights = Rights(1 << 3);
    pub(crate) const ATOMIC: Rights = Rights(1 << 4);
    const LOCAL: Rights = Rights(0b11);

    /// Whether these are to write.
    fn writes(self) -> bool {
        self.0 & (Rights::LOCAL_WRITE.0 | Rights::REMOTE_WRITE.0 | Rights::ATOMIC.0) != 0
    }

    /// What a key must allow for one with these rights to lead to it. Remote rights
    /// are the outer key's to give: a window opens to peers what is closed to them
    /// otherwise, but nobody writes by it what its owner may not write.
    pub(crate) fn within(self) -> Rights {
        match self.writes() {
            true => Rights::LOCAL_WRITE,
            false => Rights::default(),
        }
    }

    pub(crate) fn include(self, other: Rights) -> bool {
        self.0 & other.0 == other.0
    }
}

/// How a key finds memory.
#[derive(Debug, Clone)]
pub(crate) enum Translation {
    /// The address is the guest's own.
    Physical,
    /// Pages of one size: their addresses with [`READABLE`] and [`WRITABLE`].
    Pages { pages: Vec<u64>, shift: u32 },
    /// Parts of other keys, one after the other.
    Keys(Vec<Klm>),
    /// Parts of other keys, all of the same size.
    EqualKeys { keys: Vec<Klm>, shift: u32 },
    /// The device's own memory, from an offset in the register space on.
    Device(u64),
}

/// Bits of a page: it is there to be read, to be written. One that is not there
/// is asked for by an event (on-demand paging).
pub(crate) const READABLE: u64 = 1;
pub(crate) const WRITABLE: u64 = 2;
const PAGE_BITS: u64 = 0x7;

/// Where a translation leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// An address of the guest's.
    Guest(u64),
    /// An offset in the register space.
    Device(u64),
    /// Zeros.
    Nowhere,
}

/// A page that is not there, to be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Missing {
    pub(crate) key: u32,
    pub(crate) va: u64,
    /// Bytes from there on that are wanted.
    pub(crate) length: u64,
}

/// A part of another key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Klm {
    pub(crate) length: u32,
    pub(crate) key: u32,
    pub(crate) va: u64,
}

impl Klm {
    /// From its 16 bytes.
    pub(crate) fn parse(bytes: &[u8]) -> Klm {
        Klm {
            length: get32(bytes, 0),
            key: get32(bytes, 4),
            va: get64(bytes, 8),
        }
    }
}

/// A memory key.
#[derive(Debug, Clone)]
pub(crate) struct Mkey {
    /// The low 8 bits of the key; the number is the rest.
    pub(crate) variant: u8,
    /// Not usable: waits to be filled in by a work request.
    pub(crate) free: bool,
    pub(crate) pd: u32,
    /// The only queue pair that may use it, or all ones.
    pub(crate) qpn: u32,
    pub(crate) rights: Rights,
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// The length is that of the whole address space.
    pub(crate) length64: bool,
    /// Work requests may change it.
    pub(crate) umr: bool,
    /// A peer may invalidate it.
    pub(crate) remote_invalidate: bool,
    /// No other key leads here: a region that was registered without the right to
    /// bind windows to it. The commands of mlx5 do not say it.
    pub(crate) sealed: bool,
    pub(crate) translation: Translation,
    /// How many 16-byte units of translation it was made for.
    pub(crate) capacity: u32,
    /// The mode, as the driver gave it.
    pub(crate) mode: u32,
    pub(crate) log_page_size: u32,
}

impl Mkey {
    /// Whether a range is within the key's.
    fn has(&self, va: u64, length: u64) -> bool {
        if self.length64 {
            return va.checked_add(length).is_some();
        }
        // Below the start, the offset wraps and is past any length.
        let end = va.wrapping_sub(self.start).checked_add(length);
        end.is_some_and(|end| end <= self.length)
    }
}

/// Any queue pair.
pub(crate) const ANY_QPN: u32 = 0xff_ffff;

/// How deep keys may name other keys.
const DEPTH: u32 = 4;

/// Who asks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asker {
    pub(crate) qpn: u32,
    pub(crate) pd: u32,
    /// May use [`RESERVED_LKEY`].
    pub(crate) privileged: bool,
}

impl Asker {
    /// Whether keys of a protection domain are its own. The kernel's queue for
    /// work on keys has none, and may use those of all.
    pub(crate) fn may_use(self, pd: u32) -> bool {
        self.pd == pd || (self.pd == 0 && self.privileged)
    }
}

/// What stays the same while keys are followed.
#[derive(Debug, Clone, Copy)]
struct Walk {
    asker: Asker,
    /// The bit that a page must have.
    needs: u64,
    /// What the keys within a key must allow.
    within: Rights,
}

impl<P: Platform> Core<P> {
    /// The key's entry, if it may be used for this by the asker.
    fn key(&self, asker: Asker, key: u32, rights: Rights) -> Result<&Mkey, Fault> {
        let mkey = self.mkeys.get(key >> 8).ok_or(Fault::Protection)?;
        let usable = mkey.variant == (key & 0xff) as u8
            && !mkey.free
            && asker.may_use(mkey.pd)
            && (mkey.qpn == ANY_QPN || mkey.qpn == asker.qpn)
            && mkey.rights.include(rights);
        usable.then_some(mkey).ok_or(Fault::Protection)
    }

    /// Calls `each` for every run of contiguous guest memory of a range, with
    /// its address and its place in the range. Nothing is called if any of it
    /// may not be accessed, unless `each` itself fails.
    pub(crate) fn translate(
        &self,
        asker: Asker,
        key: u32,
        va: u64,
        length: u64,
        rights: Rights,
        each: &mut dyn FnMut(Place, u64, u64) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        if key == RESERVED_LKEY && asker.privileged {
            return each(Place::Guest(va), 0, length);
        }
        if key == NULL_KEY && Rights::LOCAL.include(rights) {
            return each(Place::Nowhere, 0, length);
        }
        let mkey = self.key(asker, key, rights)?;
        let walk = Walk {
            asker,
            needs: if rights.writes() { WRITABLE } else { READABLE },
            within: rights.within(),
        };
        self.within(walk, (key, mkey), va, length, 0, DEPTH, each)
    }

    #[allow(clippy::too_many_arguments)] // A recursion over all of them.
    fn within(
        &self,
        walk: Walk,
        (key, mkey): (u32, &Mkey),
        va: u64,
        length: u64,
        base: u64,
        depth: u32,
        each: &mut dyn FnMut(Place, u64, u64) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        if !mkey.has(va, length) {
            return Err(Fault::Protection);
        }
        let offset = va.wrapping_sub(mkey.start);
        let from_first = |size: u64| offset.checked_add(mkey.start & (size - 1));
        match &mkey.translation {
            Translation::Physical => each(Place::Guest(va), base, length),
            Translation::Device(start) => {
                let at = start.checked_add(offset).ok_or(Fault::Protection)?;
                each(Place::Device(at), base, length)
            }
            Translation::Pages { pages, shift } => {
                let page_size = 1u64 << shift;
                let mut at = from_first(page_size).ok_or(Fault::Protection)?;
                let mut left = length;
                let mut done = base;
                while left > 0 {
                    let page = pages
                        .get(usize::try_from(at >> shift).map_err(|_| Fault::Protection)?)
                        .ok_or(Fault::Protection)?;
                    if page & walk.needs == 0 {
                        self.missing.set(Some(Missing {
                            key,
                            va: va + (done - base),
                            length: left,
                        }));
                        return Err(Fault::Absent);
                    }
                    let within = at & (page_size - 1);
                    let n = left.min(page_size - within);
                    let page = page & !PAGE_BITS;
                    each(Place::Guest(page.wrapping_add(within)), done, n)?;
                    at += n;
                    done += n;
                    left -= n;
                }
                Ok(())
            }
            Translation::Keys(keys) => {
                let depth = depth.checked_sub(1).ok_or(Fault::Protection)?;
                let mut skip = offset;
                let mut left = length;
                let mut done = base;
                for klm in keys {
                    if left == 0 {
                        break;
                    }
                    let of = u64::from(klm.length);
                    if skip >= of {
                        skip -= of;
                        continue;
                    }
                    let n = left.min(of - skip);
                    let inner = self.inner(walk.asker, klm.key, walk.within)?;
                    let va = klm.va.wrapping_add(skip);
                    match inner {
                        Some(inner) => {
                            self.within(walk, (klm.key, inner), va, n, done, depth, each)?;
                        }
                        None => each(Place::Guest(va), done, n)?,
                    }
                    skip = 0;
                    done += n;
                    left -= n;
                }
                if left == 0 {
                    Ok(())
                } else {
                    Err(Fault::Protection)
                }
            }
            Translation::EqualKeys { keys, shift } => {
                let depth = depth.checked_sub(1).ok_or(Fault::Protection)?;
                let size = 1u64 << shift;
                let mut at = from_first(size).ok_or(Fault::Protection)?;
                let mut left = length;
                let mut done = base;
                while left > 0 {
                    let klm = keys
                        .get(usize::try_from(at >> shift).map_err(|_| Fault::Protection)?)
                        .ok_or(Fault::Protection)?;
                    let within = at & (size - 1);
                    let n = left.min(size - within);
                    let va = klm.va.wrapping_add(within);
                    match self.inner(walk.asker, klm.key, walk.within)? {
                        Some(inner) => {
                            self.within(walk, (klm.key, inner), va, n, done, depth, each)?;
                        }
                        None => each(Place::Guest(va), done, n)?,
                    }
                    at += n;
                    done += n;
                    left -= n;
                }
                Ok(())
            }
        }
    }

    /// A key within a key, which must allow `rights`; `None` is the reserved one.
    fn inner(&self, asker: Asker, key: u32, rights: Rights) -> Result<Option<&Mkey>, Fault> {
        if key == RESERVED_LKEY && asker.privileged {
            return Ok(None);
        }
        let mkey = self.mkeys.get(key >> 8).ok_or(Fault::Protection)?;
        let usable = mkey.variant == (key & 0xff) as u8
            && !mkey.free
            && !mkey.sealed
            && mkey.pd == asker.pd
            && (mkey.qpn == ANY_QPN || mkey.qpn == asker.qpn)
            && mkey.rights.include(rights);
        usable.then_some(Some(mkey)).ok_or(Fault::Protection)
    }

    /// Whether a key with `rights` may be made of this part of another.
    pub(crate) fn may_lead_to(&self, asker: Asker, klm: &Klm, rights: Rights) -> bool {
        match self.inner(asker, klm.key, rights.within()) {
            Ok(Some(mkey)) => mkey.has(klm.va, klm.length.into()),
            Ok(None) => true,
            Err(_) => false,
        }
    }

    /// Reads what a key gives access to.
    pub(crate) fn read_key(
        &self,
        asker: Asker,
        key: u32,
        va: u64,
        out: &mut [u8],
        rights: Rights,
    ) -> Result<(), Fault> {
        let length = out.len() as u64;
        self.translate(asker, key, va, length, rights, &mut |address, at, n| {
            // Both are within `out`, whose length was asked for.
            let part = &mut out[at as usize..(at + n) as usize];
            match address {
                Place::Guest(at) => self.platform.read(at, part).map_err(|_| Fault::Memory),
                Place::Device(at) => self.device_memory.read(at, part),
                Place::Nowhere => {
                    part.fill(0);
                    Ok(())
                }
            }
        })
    }

    /// Writes what a key gives access to.
    pub(crate) fn write_key(
        &self,
        asker: Asker,
        key: u32,
        va: u64,
        data: &[u8],
        rights: Rights,
    ) -> Result<(), Fault> {
        let length = data.len() as u64;
        self.translate(asker, key, va, length, rights, &mut |address, at, n| {
            let part = &data[at as usize..(at + n) as usize];
            match address {
                Place::Guest(at) => self.platform.write(at, part).map_err(|_| Fault::Memory),
                Place::Device(at) => self.device_memory.write(at, part),
                Place::Nowhere => Ok(()),
            }
        })
    }
}
