//! Work requests that change memory keys: UMR registration, memory windows,
//! invalidation.

use std::sync::Arc;

use roce::bits::{Field, field, flag, get32, get64};
use roce::transport::Fault;

use super::core::Core;
use super::mkey::{ANY_QPN, Accessor, Klm, MAX_LOG_PAGE_SIZE, Mkey, Rights, Translation};
use super::protection::{BSF_SIZE, Protection};
use crate::layout::mkc;
use crate::platform::Platform;

const CONTROL: usize = 16;
/// Offsets of the UMR control segment and of the mkey context after it.
const UMR: usize = CONTROL;
const CONTEXT: usize = UMR + 48;
const LIST: usize = CONTEXT + 64;

const INLINE: Field = flag(0, 31);
/// Fail unless the key is free; fail if it is free.
const MUST_BE_FREE: Field = flag(0, 29);
const MUST_BE_USED: Field = flag(0, 30);
const TRANSLATION_OFFSET_EN: Field = flag(0, 28);
/// Fail unless the key belongs to this queue pair.
const CHECK_QPN: Field = flag(0, 27);
const OCTOWORDS: Field = field(4, 31, 16);
/// Without an offset it is the number of 16-byte units of byte stream formats behind the list.
const OFFSET: Field = field(4, 15, 0);
const MASK: usize = 8;
/// Bits of the offset beyond the low 16.
const OFFSET_HIGH: Field = field(16, 31, 0);

/// Fields of the context that are changed.
mod mask {
    pub const LENGTH: u64 = 1 << 0;
    pub const PAGE_SIZE: u64 = 1 << 1;
    pub const START: u64 = 1 << 6;
    pub const SIGNATURE_ERROR: u64 = 1 << 9;
    pub const BSF: u64 = 1 << 12;
    pub const PD: u64 = 1 << 7;
    pub const KEY: u64 = 1 << 13;
    pub const QPN: u64 = 1 << 14;
    pub const LOCAL_READ: u64 = 1 << 17;
    pub const LOCAL_WRITE: u64 = 1 << 18;
    pub const REMOTE_READ: u64 = 1 << 19;
    pub const REMOTE_WRITE: u64 = 1 << 20;
    pub const ATOMIC: u64 = 1 << 21;
    pub const FREE: u64 = 1 << 29;
}

/// Lists come in units of this many 16-byte entries.
const UNIT: usize = 4;
/// Maximum length of a list, in 16-byte entries.
const MAX_OCTOWORDS: usize = 1 << 16;

impl<P: Platform> Core<P> {
    /// Makes a key unusable until a work request fills it in again.
    pub(crate) fn invalidate_key(
        &mut self,
        accessor: Accessor,
        key: u32,
        local: bool,
    ) -> Result<(), Fault> {
        let mkey = self.mkeys.get_mut(key >> 8).ok_or(Fault::Protection)?;
        let allowed = mkey.variant == (key & 0xff) as u8
            && !mkey.free
            && mkey.pd == accessor.pd
            && (mkey.qpn == ANY_QPN || mkey.qpn == accessor.qpn)
            && mkey.umr
            && (local || mkey.remote_invalidate);
        if !allowed {
            return Err(Fault::Protection);
        }
        mkey.free = true;
        Ok(())
    }

    /// Executes a UMR work request for `key`.
    pub(crate) fn change_key(
        &mut self,
        accessor: Accessor,
        key: u32,
        entry: &[u8],
    ) -> Result<(), &'static str> {
        let (Some(umr), Some(context)) = (entry.get(UMR..CONTEXT), entry.get(CONTEXT..LIST)) else {
            return Err("a UMR without its segments");
        };
        let mask = get64(umr, MASK);
        let count = OCTOWORDS.get(umr) as usize;
        if count > MAX_OCTOWORDS {
            return Err("a UMR with too long a list");
        }
        let list = self.read_list(accessor, entry, INLINE.is_set(umr), count)?;
        let Some(mkey) = self.mkeys.get(key >> 8) else {
            return Err("a UMR of a memory key that does not exist");
        };
        if !mkey.umr {
            return Err("a UMR of a memory key that does not allow it");
        }
        let new_pd = if mask & mask::PD != 0 {
            mkc::PD.get(context)
        } else {
            mkey.pd
        };
        if !accessor.may_use(mkey.pd) || !accessor.may_use(new_pd) {
            return Err("a UMR of a memory key of another protection domain");
        }
        if MUST_BE_FREE.is_set(umr) && !mkey.free {
            return Err("a UMR of a memory key that is in use");
        }
        if MUST_BE_USED.is_set(umr) && mkey.free {
            return Err("a UMR of a memory key that is not in use");
        }
        let frees = mask & mask::FREE != 0 && mkc::FREE.is_set(context);
        if frees && CHECK_QPN.is_set(umr) {
            // Drivers invalidate a window of type 2 thus, and bind it to a length of 0, which
            // the specification forbids; only a bind has a variant.
            if mkey.free {
                return Err("a UMR that invalidates a memory key that is not in use");
            }
            if mask & mask::KEY != 0 && mkc::MKEY_7_0.get(context) != 0 {
                return Err("a bind of a window of type 2 without memory");
            }
        }
        if CHECK_QPN.is_set(umr) && ![ANY_QPN, accessor.qpn].contains(&mkey.qpn) {
            return Err("a UMR of a memory key of another queue pair");
        }
        let new_rights = super::mkey::rights(context);
        let mut rights = mkey.rights;
        for (bit, right) in [
            (mask::LOCAL_READ, Rights::LOCAL_READ),
            (mask::LOCAL_WRITE, Rights::LOCAL_WRITE),
            (mask::REMOTE_READ, Rights::REMOTE_READ),
            (mask::REMOTE_WRITE, Rights::REMOTE_WRITE),
            (mask::ATOMIC, Rights::ATOMIC),
        ] {
            if mask & bit != 0 {
                rights = Rights(rights.0 & !right.0 | new_rights.0 & right.0);
            }
        }
        let offset = if TRANSLATION_OFFSET_EN.is_set(umr) {
            OFFSET.get(umr) as usize | (OFFSET_HIGH.get(umr) as usize) << 16
        } else {
            0
        };
        let part = ReplacedRange {
            units: count,
            offset,
            whole: offset == 0 && mask & mask::LENGTH != 0,
        };
        let log_page_size = if mask & mask::PAGE_SIZE != 0 {
            mkc::LOG_PAGE_SIZE.get(context)
        } else {
            mkey.log_page_size
        };
        let protection = match mask & mask::BSF != 0 {
            true => Some(self.protection(mkey, new_pd, umr, context, entry, count)?),
            false => None,
        };
        let entries = parse_entries(mkey, &list, part.whole)?;
        if !accessor.privileged {
            self.may_bind(accessor, mkey, &entries, rights)?;
        }
        let Some(mkey) = self.mkeys.get_mut(key >> 8) else {
            return Err("a UMR of a memory key that does not exist");
        };
        replace_translation(mkey, entries, part, log_page_size)?;
        let had_protection = mkey.protection.is_some();
        if let Some(protection) = protection {
            mkey.protection = protection;
        }
        let has_protection = mkey.protection.is_some();
        if mask & mask::SIGNATURE_ERROR != 0 {
            mkey.awaited_error = mkc::EXPECTED_SIGERR_COUNT.get(context);
        }
        mkey.log_page_size = log_page_size;
        mkey.pd = new_pd;
        mkey.rights = rights;
        if mask & mask::FREE != 0 {
            mkey.free = mkc::FREE.is_set(context);
        }
        if mask & mask::LENGTH != 0 {
            mkey.length = get64(context, mkc::LEN);
            mkey.length64 = mkc::LENGTH64.is_set(context);
        }
        if mask & mask::START != 0 {
            mkey.start = get64(context, mkc::START_ADDR);
        }
        if mask & mask::QPN != 0 {
            mkey.qpn = mkc::QPN.get(context);
        }
        if mask & mask::KEY != 0 {
            mkey.variant = mkc::MKEY_7_0.get(context) as u8;
        }
        if had_protection || has_protection {
            self.protected_keys += usize::from(has_protection);
            self.protected_keys -= usize::from(had_protection);
            self.partial_blocks.retain(|(of, _), _| *of != key >> 8);
        }
        Ok(())
    }

    /// Returns the protection that the byte stream formats behind an inline list describe.
    fn protection(
        &self,
        mkey: &Mkey,
        pd: u32,
        umr: &[u8],
        context: &[u8],
        entry: &[u8],
        listed: usize,
    ) -> Result<Option<Arc<Protection>>, &'static str> {
        if !mkc::BSF_EN.is_set(context) {
            return Ok(None);
        }
        if TRANSLATION_OFFSET_EN.is_set(umr) || !INLINE.is_set(umr) {
            return Err("byte stream formats of a UMR that are not in the work request");
        }
        let units = OFFSET.get(umr);
        if units == 0 || units > mkey.bsf_octwords || units as usize * 16 % BSF_SIZE != 0 {
            return Err("a UMR with more byte stream formats than the memory key has");
        }
        let at = LIST + listed * 16;
        let formats = entry.get(at..at + units as usize * 16);
        let formats = formats.ok_or("a UMR that ends before its byte stream formats")?;
        let encryption_key = |number| {
            let key = self.encryption_keys.get(number)?;
            (key.pd == pd).then_some(key)
        };
        let protection = Protection::parse(formats, encryption_key)?;
        let mut psvs = protection.psvs.iter().flatten();
        if !psvs.all(|psv| self.psvs.get(*psv).is_some_and(|psv| psv.pd == pd)) {
            return Err("a UMR that names a PSV of another protection domain");
        }
        Ok(protection.is_enabled().then(|| Arc::new(protection)))
    }

    /// Executes a work request that sets a PSV.
    pub(crate) fn set_psv(&mut self, accessor: Accessor, entry: &[u8]) -> Result<(), &'static str> {
        const NUMBER: Field = field(CONTROL, 23, 0);
        let psv = entry.get(..CONTROL + 16).map(|entry| NUMBER.get(entry));
        let psv = psv.and_then(|psv| self.psvs.get_mut(psv));
        match psv {
            Some(psv) if psv.pd == accessor.pd => {
                psv.ready = true;
                Ok(())
            }
            _ => Err("no such PSV, or a PSV of another protection domain"),
        }
    }

    /// Checks whether an unprivileged queue pair may bind a key to these entries: they
    /// must be parts of keys that it may use, with rights sufficient for those of the
    /// new key.
    fn may_bind(
        &self,
        accessor: Accessor,
        mkey: &Mkey,
        entries: &Entries,
        rights: Rights,
    ) -> Result<(), &'static str> {
        let Entries::Keys(keys) = entries else {
            return Err("a UMR of addresses from a program");
        };
        // Lists are padded with zeros to whole units.
        let mut keys = keys.iter().filter(|klm| **klm != Klm::default());
        let equal = matches!(mkey.translation, Translation::Ksms { .. });
        let allowed = keys.all(|klm| {
            // Entries of equal parts have no length of their own.
            let length = if equal { 0 } else { klm.length };
            self.may_refer_to(accessor, mkey, &Klm { length, ..*klm }, rights)
        });
        match allowed {
            true => Ok(()),
            false => Err("a UMR that refers to memory that may not be bound"),
        }
    }

    /// Returns the translation list of a UMR, which is inline or in memory.
    fn read_list(
        &self,
        accessor: Accessor,
        entry: &[u8],
        inline: bool,
        count: usize,
    ) -> Result<Vec<u8>, &'static str> {
        let mut bytes = vec![0; count * 16];
        if count == 0 {
            return Ok(bytes);
        }
        let rest = entry.get(LIST..).unwrap_or(&[]);
        if inline {
            let inline_list = rest
                .get(..bytes.len())
                .ok_or("a UMR that ends before its list")?;
            bytes.copy_from_slice(inline_list);
        } else {
            let segment = rest.get(..16).ok_or("a UMR without a list")?;
            self.read_key(
                accessor,
                get32(segment, 4),
                get64(segment, 8),
                &mut bytes,
                Rights::LOCAL_READ,
            )
            .map_err(|_| "a UMR whose list cannot be read")?;
        }
        Ok(bytes)
    }
}

/// Translation entries.
enum Entries {
    Pages(Vec<u64>),
    Keys(Vec<Klm>),
}

/// Parses a list for the kind of translation that the key has.
fn parse_entries(mkey: &Mkey, list: &[u8], whole: bool) -> Result<Entries, &'static str> {
    if !matches!(
        mkey.translation,
        Translation::Klms(_) | Translation::Ksms { .. }
    ) {
        let pages = list.chunks_exact(8).map(|bytes| get64(bytes, 0) & !0x4);
        return Ok(Entries::Pages(pages.collect()));
    }
    if list.is_empty() || !is_pattern(list) {
        let keys = list.chunks_exact(16).map(Klm::parse);
        return Ok(Entries::Keys(keys.collect()));
    }
    match whole {
        true => expand_pattern(list).map(Entries::Keys),
        false => Err("a UMR of a pattern for a part of a memory key"),
    }
}

/// The part of a key's list that is replaced, in 16-byte entries.
#[derive(Clone, Copy)]
struct ReplacedRange {
    units: usize,
    offset: usize,
    /// The list replaces the whole previous list: it begins at 0 and comes with the
    /// length of the key.
    whole: bool,
}

/// Replaces translation entries, or fails and changes nothing.
fn replace_translation(
    mkey: &mut Mkey,
    new: Entries,
    ReplacedRange {
        units,
        offset,
        whole,
    }: ReplacedRange,
    log_page_size: u32,
) -> Result<(), &'static str> {
    // Lists are padded to units of 64 bytes.
    if offset + units > (mkey.capacity as usize).next_multiple_of(UNIT) && units != 0 {
        return Err("a UMR with more entries than the memory key has");
    }
    if let Translation::Pages { shift, .. } | Translation::Ksms { shift, .. } =
        &mut mkey.translation
    {
        if log_page_size != 0 {
            if log_page_size > MAX_LOG_PAGE_SIZE {
                return Err("a UMR with too large a page size");
            }
            *shift = log_page_size;
        }
    }
    match (&mut mkey.translation, new) {
        (_, _) if units == 0 => {}
        (Translation::Pages { pages, .. }, Entries::Pages(new)) => {
            replace(pages, offset * 2, new);
        }
        (Translation::Klms(keys) | Translation::Ksms { keys, .. }, Entries::Keys(new)) => {
            match whole {
                true => *keys = new,
                false => replace(keys, offset, new),
            }
        }
        _ => return Err("a UMR with a list for a memory key without one"),
    }
    Ok(())
}

/// Overwrites entries from an index on, and appends those beyond the end.
fn replace<T: Clone + Default>(entries: &mut Vec<T>, first: usize, new: Vec<T>) {
    let end = first + new.len();
    if entries.len() < end {
        entries.resize(end, T::default());
    }
    entries.splice(first..end, new);
}

/// Value in place of the key that marks the first entry of a pattern (strided list).
const REPEAT: u32 = 0x400;
/// Number of repetitions, and number of the entries after it that are repeated.
const REPEAT_COUNT: usize = 8;
const REPEAT_ENTRIES: Field = field(0xc, 15, 0);
/// In a repeated entry: distance between repetitions, and bytes used of each.
const STRIDE: Field = field(0, 31, 16);
const STRIDE_BYTES: Field = field(0, 15, 0);
/// Maximum length of the list that a pattern expands to.
const MAX_EXPANDED: u64 = 1 << 16;

fn is_pattern(list: &[u8]) -> bool {
    get32(list, 4) == REPEAT
}

/// Expands a pattern to a list.
fn expand_pattern(list: &[u8]) -> Result<Vec<Klm>, &'static str> {
    let rounds = get32(list, REPEAT_COUNT);
    let count = REPEAT_ENTRIES.get(list) as usize;
    let entries = list
        .get(16..16 + count * 16)
        .ok_or("a UMR of a pattern without its entries")?;
    if u64::from(rounds) * count as u64 > MAX_EXPANDED {
        return Err("a UMR of a pattern that repeats too often");
    }
    let round = |n: u64| {
        entries.chunks_exact(16).map(move |entry| Klm {
            length: STRIDE_BYTES.get(entry),
            key: get32(entry, 4),
            va: get64(entry, 8).wrapping_add(n * u64::from(STRIDE.get(entry))),
        })
    };
    Ok((0..u64::from(rounds)).flat_map(round).collect())
}

#[cfg(test)]
mod tests {
    use roce::bits::{put32, put64};

    use super::*;

    #[test]
    fn a_pattern_equals_its_expanded_list() {
        let mut list = [0; 48];
        put32(&mut list, 4, REPEAT);
        put32(&mut list, 8, 2);
        put32(&mut list, 12, 2);
        for (n, (stride, bytes, key, va)) in [(10, 8, 0x100, 0x1000), (6, 4, 0x200, 0x2000)]
            .into_iter()
            .enumerate()
        {
            let at = 16 + n * 16;
            put32(&mut list, at, stride << 16 | bytes);
            put32(&mut list, at + 4, key);
            put64(&mut list, at + 8, va);
        }
        assert!(is_pattern(&list));
        let klm = |length, key, va| Klm { length, key, va };
        assert_eq!(
            expand_pattern(&list).unwrap(),
            [
                klm(8, 0x100, 0x1000),
                klm(4, 0x200, 0x2000),
                klm(8, 0x100, 0x100a),
                klm(4, 0x200, 0x2006)
            ]
        );
        put32(&mut list, 8, u32::MAX);
        assert!(expand_pattern(&list).is_err(), "too often");
        put32(&mut list, 8, 1);
        put32(&mut list, 12, 3);
        assert!(expand_pattern(&list).is_err(), "entries that are not there");
    }
}
