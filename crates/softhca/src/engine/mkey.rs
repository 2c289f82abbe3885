//! Memory keys and their translation to guest memory.

use std::sync::Arc;

use roce::bits::{get32, get64};
use roce::transport::Fault;

use super::core::Core;
use super::protection::Protection;
use crate::cause::{AccessRule, InnerKey};
use crate::layout::mkc;
use crate::platform::Platform;
pub(crate) use crate::rights::Rights;

/// Gives queues of the kernel access to all memory by its address.
pub(crate) const RESERVED_LKEY: u32 = 0x300;
/// Accepts all writes, and reads as zeros.
pub(crate) const NULL_KEY: u32 = 0x200;

/// Base-2 logarithm of the largest page. A few such pages cover the address space,
/// for keys whose pages are never present.
pub(crate) const MAX_LOG_PAGE_SIZE: u32 = 61;

/// The access rights in the first word of a context.
pub(crate) fn rights(context: &[u8]) -> Rights {
    let mut rights = 0;
    for (field, right) in [
        (mkc::LR, Rights::LOCAL_READ),
        (mkc::LW, Rights::LOCAL_WRITE),
        (mkc::RR, Rights::REMOTE_READ),
        (mkc::RW, Rights::REMOTE_WRITE),
        (mkc::A, Rights::ATOMIC),
    ] {
        if field.is_set(context) {
            rights |= right.0;
        }
    }
    Rights(rights)
}

/// Translation of a key to memory.
#[derive(Debug, Clone)]
pub(crate) enum Translation {
    /// Contiguous guest memory, from this address on.
    Contiguous(u64),
    /// Pages of one size: their addresses, with [`READABLE`] and [`WRITABLE`].
    Pages { pages: Vec<u64>, shift: u32 },
    /// Consecutive parts of other keys.
    Klms(Vec<Klm>),
    /// Consecutive parts of other keys, all of the same size.
    Ksms { keys: Vec<Klm>, shift: u32 },
    /// Device memory, from an offset in the register space on.
    Device(u64),
}

/// Flags of a page: present for reads, present for writes. An absent page is requested
/// by an event (on-demand paging).
pub(crate) const READABLE: u64 = 1;
pub(crate) const WRITABLE: u64 = 2;
const PAGE_BITS: u64 = 0x7;

/// Result of a translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Location {
    /// Guest address.
    Guest(u64),
    /// Offset in the register space.
    Device(u64),
    /// No memory: reads as zeros, writes are discarded.
    Null,
}

/// An absent page, to be requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AbsentPage {
    pub(crate) key: u32,
    pub(crate) va: u64,
    /// Length in bytes of the access from there on.
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
    /// Parses an entry of 16 bytes.
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
    /// Low 8 bits of the key; the rest is the number.
    pub(crate) variant: u8,
    /// Not usable until a work request fills it in.
    pub(crate) free: bool,
    pub(crate) pd: u32,
    /// The only queue pair that may use it, or [`ANY_QPN`].
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
    /// No window may refer to it: the region was registered without the right to bind
    /// windows, which the mlx5 commands do not convey.
    pub(crate) forbids_binding: bool,
    /// The driver created it, not a program. Such a key is a window if it refers to other
    /// keys, and may not refer to those that forbid binding.
    pub(crate) created_by_driver: bool,
    pub(crate) translation: Translation,
    /// Number of 16-byte translation entries that it was created for.
    pub(crate) capacity: u32,
    /// Access mode, as the driver gave it.
    pub(crate) mode: u32,
    pub(crate) log_page_size: u32,
    /// 16-byte units that its byte stream formats may have.
    pub(crate) bsf_octwords: u32,
    /// Signatures and encryption of its data.
    pub(crate) protection: Option<Arc<Protection>>,
    /// Wrong signatures that were reported, and the lowest bit of the next one's number, if
    /// that is to be reported.
    pub(crate) signature_errors: u32,
    pub(crate) awaited_error: u32,
}

impl Mkey {
    /// Returns whether a range is within the key's range.
    fn contains(&self, va: u64, length: u64) -> bool {
        if self.length64 {
            return va.checked_add(length).is_some();
        }
        // Below the start, the subtraction wraps to an offset that only a length close
        // to 2^64 includes.
        let end = va.wrapping_sub(self.start).checked_add(length);
        end.is_some_and(|end| end <= self.length)
    }

    /// Returns the rule of [`Mkey::contains`].
    fn range_rule(&self) -> AccessRule {
        AccessRule::Range {
            start: self.start,
            length: self.length,
        }
    }
}

/// Stands for any queue pair.
pub(crate) const ANY_QPN: u32 = 0xff_ffff;

/// Maximum nesting depth of keys.
const MAX_DEPTH: u32 = 4;

/// The queue on whose behalf memory is accessed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Accessor {
    pub(crate) qpn: u32,
    pub(crate) pd: u32,
    /// May use [`RESERVED_LKEY`].
    pub(crate) privileged: bool,
}

impl Accessor {
    /// Returns whether it may use keys of a protection domain. The kernel's UMR queue
    /// has none, and may use the keys of all.
    pub(crate) fn may_use(self, pd: u32) -> bool {
        self.pd == pd || (self.pd == 0 && self.privileged)
    }
}

/// The rule that an access breaks, and the key that breaks it, if it is one to which the
/// accessed key refers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BrokenRule {
    pub(crate) rule: AccessRule,
    pub(crate) inner: Option<InnerKey>,
}

/// Parameters that are constant during a translation.
#[derive(Debug, Clone, Copy)]
struct TranslationRequest {
    accessor: Accessor,
    /// Flag that a page must have.
    page_flag: u64,
    /// Rights that inner keys must have.
    inner_rights: Rights,
}

/// Splits the `length` bytes from `at` on at multiples of a size. `each` gets the index of the
/// multiple, the part's offset in it, and the part's offset and length in the range.
#[inline]
fn split_by_size(
    mut at: u64,
    length: u64,
    log_size: u32,
    mut each: impl FnMut(usize, u64, u64, u64) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let size = 1u64 << log_size;
    let mut done = 0;
    while done < length {
        // No list has that many entries.
        let index = usize::try_from(at >> log_size).unwrap_or(usize::MAX);
        let within = at & (size - 1);
        let n = (length - done).min(size - within);
        each(index, within, done, n)?;
        at += n;
        done += n;
    }
    Ok(())
}

impl<P: Platform> Core<P> {
    /// Returns the entry of a key, if the accessor may use it with these rights.
    fn usable_mkey(&self, accessor: Accessor, key: u32, rights: Rights) -> Result<&Mkey, Fault> {
        let mkey = self.mkeys.get(key >> 8).ok_or(Fault::Protection)?;
        let is_usable = mkey.variant == (key & 0xff) as u8
            && !mkey.free
            && accessor.may_use(mkey.pd)
            && (mkey.qpn == ANY_QPN || mkey.qpn == accessor.qpn)
            && mkey.rights.include(rights);
        is_usable.then_some(mkey).ok_or(Fault::Protection)
    }

    /// Returns the rule of [`Core::usable_mkey`] that a key breaks.
    #[cold]
    fn unusable_because(&self, accessor: Accessor, key: u32, rights: Rights) -> AccessRule {
        match self.mkeys.get(key >> 8) {
            None => AccessRule::Exists(None),
            Some(mkey) if mkey.variant != (key & 0xff) as u8 => {
                AccessRule::Exists(Some(mkey.variant))
            }
            Some(mkey) if mkey.free => AccessRule::Valid,
            Some(mkey) if !accessor.may_use(mkey.pd) => AccessRule::Domain {
                own: accessor.pd,
                key: mkey.pd,
            },
            Some(mkey) if mkey.qpn != ANY_QPN && mkey.qpn != accessor.qpn => {
                AccessRule::QueuePair(mkey.qpn)
            }
            Some(mkey) => AccessRule::Rights {
                needed: rights.0,
                has: mkey.rights.0,
            },
        }
    }

    /// Checks whether the accessor may use a key with these rights.
    pub(crate) fn may_use_key(
        &self,
        accessor: Accessor,
        key: u32,
        rights: Rights,
    ) -> Result<(), Fault> {
        self.usable_mkey(accessor, key, rights).map(drop)
    }

    /// Returns the rule that an access through a key breaks, as [`Core::translate`] decides,
    /// and the key within it that breaks it, for observers. Whether the memory itself can be
    /// accessed is not checked.
    #[cold]
    pub(crate) fn broken_rule(
        &self,
        accessor: Accessor,
        key: u32,
        (va, length): (u64, u64),
        rights: Rights,
    ) -> Option<BrokenRule> {
        let (va, length) = match self.protected_range(key) {
            None => (va, length),
            // The access is to a range on the wire. Which memory it takes is not computed:
            // all of it is checked.
            Some((start, [in_memory, on_wire])) => {
                let end = va.wrapping_sub(start).checked_add(length);
                let is_within = end.is_some_and(|end| end <= on_wire);
                if !is_within && self.usable_mkey(accessor, key, rights).is_ok() {
                    let length = on_wire;
                    let rule = AccessRule::Range { start, length };
                    return Some(BrokenRule { rule, inner: None });
                }
                (start, in_memory)
            }
        };
        self.broken_rule.take();
        let translated = self.translate(accessor, key, va, length, rights, &mut |_, _, _| Ok(()));
        translated.err().map(|_| {
            let within = self.broken_rule.take();
            within.unwrap_or_else(|| BrokenRule {
                rule: self.unusable_because(accessor, key, rights),
                inner: None,
            })
        })
    }

    /// Notes which rule an access breaks.
    #[cold]
    fn breaks(&self, (key, va, length): (u32, u64, u64), depth: u32, rule: AccessRule) -> Fault {
        let inner = (depth < MAX_DEPTH).then_some(InnerKey { key, va, length });
        self.broken_rule.set(Some(BrokenRule { rule, inner }));
        Fault::Protection
    }

    /// Translates a range: calls `each` for every contiguous run of memory, with its
    /// location, its offset in the range and its length. If a later part of the range is
    /// inaccessible, `each` has been called for the parts before it.
    pub(crate) fn translate(
        &self,
        accessor: Accessor,
        key: u32,
        va: u64,
        length: u64,
        rights: Rights,
        each: &mut dyn FnMut(Location, u64, u64) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        if key == RESERVED_LKEY && accessor.privileged {
            return each(Location::Guest(va), 0, length);
        }
        if key == NULL_KEY && Rights::LOCAL.include(rights) {
            return each(Location::Null, 0, length);
        }
        let mkey = self.usable_mkey(accessor, key, rights)?;
        let request = TranslationRequest {
            accessor,
            page_flag: if rights.writes() { WRITABLE } else { READABLE },
            inner_rights: rights.inner_rights(),
        };
        self.translate_within(request, (key, mkey), va, length, 0, MAX_DEPTH, each)
    }

    #[allow(clippy::too_many_arguments)] // A recursion over all of them.
    fn translate_within(
        &self,
        request: TranslationRequest,
        (key, mkey): (u32, &Mkey),
        va: u64,
        length: u64,
        base: u64,
        depth: u32,
        each: &mut dyn FnMut(Location, u64, u64) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let breaks = |rule| self.breaks((key, va, length), depth, rule);
        if !mkey.contains(va, length) {
            return Err(breaks(mkey.range_rule()));
        }
        let uncovered = || breaks(AccessRule::Covered);
        let offset = va.wrapping_sub(mkey.start);
        let deeper = || {
            let too_deep = || breaks(AccessRule::Depth(MAX_DEPTH));
            depth.checked_sub(1).ok_or_else(too_deep)
        };
        match &mkey.translation {
            Translation::Contiguous(first) => {
                each(Location::Guest(first.wrapping_add(offset)), base, length)
            }
            Translation::Device(start) => {
                let at = start.checked_add(offset).ok_or_else(uncovered)?;
                each(Location::Device(at), base, length)
            }
            Translation::Pages { pages, shift } => {
                let first = mkey.start & ((1u64 << shift) - 1);
                let at = offset.checked_add(first).ok_or_else(uncovered)?;
                split_by_size(at, length, *shift, |index, within, done, n| {
                    let page = pages.get(index).ok_or_else(uncovered)?;
                    if page & request.page_flag == 0 {
                        self.absent_page.set(Some(AbsentPage {
                            key,
                            va: va + done,
                            length: length - done,
                        }));
                        return Err(Fault::Absent);
                    }
                    let page = page & !PAGE_BITS;
                    each(Location::Guest(page.wrapping_add(within)), base + done, n)
                })
            }
            Translation::Klms(keys) => {
                let depth = deeper()?;
                let mut skip = offset;
                let mut left = length;
                let mut done = base;
                for klm in keys {
                    if left == 0 {
                        break;
                    }
                    let klm_length = u64::from(klm.length);
                    if skip >= klm_length {
                        skip -= klm_length;
                        continue;
                    }
                    let n = left.min(klm_length - skip);
                    self.translate_klm(request, mkey, (klm, skip), n, done, depth, each)?;
                    skip = 0;
                    done += n;
                    left -= n;
                }
                if left == 0 { Ok(()) } else { Err(uncovered()) }
            }
            Translation::Ksms { keys, shift } => {
                let depth = deeper()?;
                // The part of the first key begins at the start of the outer key, whatever
                // its address: UCX moves the start to distinguish keys to the same memory.
                split_by_size(offset, length, *shift, |index, within, done, n| {
                    let klm = keys.get(index).ok_or_else(uncovered)?;
                    let part = (klm, within);
                    self.translate_klm(request, mkey, part, n, base + done, depth, each)
                })
            }
        }
    }

    /// Translates a range of an inner key of `outer`, which begins `skip` bytes after that of
    /// the entry.
    #[allow(clippy::too_many_arguments)] // As `translate_within`.
    fn translate_klm(
        &self,
        request: TranslationRequest,
        outer: &Mkey,
        (klm, skip): (&Klm, u64),
        length: u64,
        base: u64,
        depth: u32,
        each: &mut dyn FnMut(Location, u64, u64) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let va = klm.va.wrapping_add(skip);
        let inner = self.inner_mkey(request.accessor, outer, klm.key, request.inner_rights);
        match inner.map_err(|rule| self.breaks((klm.key, va, length), depth, rule))? {
            Some(inner) => {
                self.translate_within(request, (klm.key, inner), va, length, base, depth, each)
            }
            None => each(Location::Guest(va), base, length),
        }
    }

    /// Returns an inner key of another one, which must have `rights`; `None` is the
    /// reserved key.
    fn inner_mkey(
        &self,
        accessor: Accessor,
        outer: &Mkey,
        key: u32,
        rights: Rights,
    ) -> Result<Option<&Mkey>, AccessRule> {
        if key == RESERVED_LKEY && accessor.privileged {
            return Ok(None);
        }
        let mkey = self.mkeys.get(key >> 8).ok_or(AccessRule::Exists(None))?;
        let is_usable = mkey.variant == (key & 0xff) as u8
            && !mkey.free
            && !(mkey.forbids_binding && outer.created_by_driver)
            // Only the data of the outer key may be protected.
            && mkey.protection.is_none()
            && mkey.pd == accessor.pd
            && (mkey.qpn == ANY_QPN || mkey.qpn == accessor.qpn)
            && mkey.rights.include(rights);
        is_usable.then_some(Some(mkey)).ok_or_else(|| {
            if mkey.forbids_binding && outer.created_by_driver {
                AccessRule::Bindable
            } else if mkey.protection.is_some() {
                AccessRule::Unprotected
            } else if mkey.pd != accessor.pd {
                let (own, key) = (accessor.pd, mkey.pd);
                AccessRule::Domain { own, key }
            } else {
                self.unusable_because(accessor, key, rights)
            }
        })
    }

    /// Checks whether a key with `rights` may refer to this part of another key; if not,
    /// returns the rule that this breaks.
    pub(crate) fn may_refer_to(
        &self,
        accessor: Accessor,
        outer: &Mkey,
        klm: &Klm,
        rights: Rights,
    ) -> Result<(), AccessRule> {
        match self.inner_mkey(accessor, outer, klm.key, rights.inner_rights())? {
            Some(mkey) if !mkey.contains(klm.va, klm.length.into()) => Err(mkey.range_rule()),
            _ => Ok(()),
        }
    }

    /// Reads memory through a key.
    pub(crate) fn read_key(
        &self,
        accessor: Accessor,
        key: u32,
        va: u64,
        out: &mut [u8],
        rights: Rights,
    ) -> Result<(), Fault> {
        let length = out.len() as u64;
        self.translate(accessor, key, va, length, rights, &mut |address, at, n| {
            // In bounds: `translate` splits a range of `out.len()` bytes.
            let part = &mut out[at as usize..(at + n) as usize];
            match address {
                Location::Guest(at) => {
                    self.platform.before_gather(accessor.qpn, at, part.len());
                    self.platform.read(at, part).map_err(|_| Fault::Memory)
                }
                Location::Device(at) => self.device_memory.read(at, part),
                Location::Null => {
                    part.fill(0);
                    Ok(())
                }
            }
        })
    }

    /// Writes memory through a key.
    pub(crate) fn write_key(
        &self,
        accessor: Accessor,
        key: u32,
        va: u64,
        data: &[u8],
        rights: Rights,
    ) -> Result<(), Fault> {
        let length = data.len() as u64;
        self.translate(accessor, key, va, length, rights, &mut |address, at, n| {
            let part = &data[at as usize..(at + n) as usize];
            match address {
                Location::Guest(at) => {
                    let is_remote = rights == Rights::REMOTE_WRITE;
                    self.platform
                        .before_scatter(accessor.qpn, at, part.len(), is_remote);
                    self.platform.write(at, part).map_err(|_| Fault::Memory)
                }
                Location::Device(at) => self.device_memory.write(at, part),
                Location::Null => Ok(()),
            }
        })
    }
}
