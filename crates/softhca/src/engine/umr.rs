//! Work requests that change memory keys: UMR registration, memory windows,
//! invalidation.

use std::sync::Arc;

use roce::bits::{Field, field, flag, get32, get64};
use roce::rule::{Rule, Violation};
use roce::transport::Fault;

use super::core::Core;
use super::mkey::{ANY_QPN, Accessor, Klm, MAX_LOG_PAGE_SIZE, Mkey, Rights, Translation};
use super::protection::{BSF_SIZE, Protection};
use super::signed::Psv;
use super::wqe::too_short;
use crate::cause::AccessRule;
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
    pub const PD: u64 = 1 << 7;
    pub const REMOTE_INVALIDATE: u64 = 1 << 8;
    pub const SIGNATURE_ERROR: u64 = 1 << 9;
    pub const BSF: u64 = 1 << 12;
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
    ) -> Result<(), Violation> {
        let (Some(umr), Some(context)) = (entry.get(UMR..CONTEXT), entry.get(CONTEXT..LIST)) else {
            return Err(too_short(entry, LIST));
        };
        let count = OCTOWORDS.get(umr) as usize;
        if count > MAX_OCTOWORDS {
            let rule = Rule::AtMost(MAX_OCTOWORDS as u64);
            return Err(Violation::new("entries of the list", count, rule));
        }
        let list = self.read_list(accessor, entry, INLINE.is_set(umr), count)?;
        let of_key = |rule| Violation::new("memory key", key, rule);
        let Some(mkey) = self.mkeys.get(key >> 8) else {
            return Err(of_key(Rule::Exists));
        };
        let change = Change {
            umr,
            context,
            mask: get64(umr, MASK),
        };
        change.check(accessor, key, mkey)?;
        let new_pd = change.pd(mkey);
        let rights = change.rights(mkey);
        let part = change.replaced_range(count);
        let log_page_size = match change.has(mask::PAGE_SIZE) {
            true => mkc::LOG_PAGE_SIZE.get(context),
            false => mkey.log_page_size,
        };
        let protection = match change.has(mask::BSF) {
            true => Some(self.protection(mkey, new_pd, umr, context, entry, count)?),
            false => None,
        };
        let entries = parse_entries(mkey, &list, part.whole)?;
        if !accessor.privileged {
            self.may_bind(accessor, mkey, &entries, rights)?;
        }
        let mkey = self.mkeys.get_mut(key >> 8);
        let mkey = mkey.ok_or_else(|| of_key(Rule::Exists))?;
        replace_translation(mkey, entries, part, log_page_size)?;
        let had_protection = mkey.protection.is_some();
        if let Some(protection) = protection {
            mkey.protection = protection;
        }
        let has_protection = mkey.protection.is_some();
        mkey.log_page_size = log_page_size;
        mkey.pd = new_pd;
        mkey.rights = rights;
        change.apply(mkey);
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
    ) -> Result<Option<Arc<Protection>>, Violation> {
        if !mkc::BSF_EN.is_set(context) {
            return Ok(None);
        }
        let units = OFFSET.get(umr);
        let formats = |rule| Violation::new("16-byte units of byte stream formats", units, rule);
        if TRANSLATION_OFFSET_EN.is_set(umr) || !INLINE.is_set(umr) {
            return Err(formats(Rule::With("an inline list")));
        }
        if units == 0 || units > mkey.bsf_octwords {
            return Err(formats(Rule::Between(1, mkey.bsf_octwords.into())));
        }
        if units as usize * 16 % BSF_SIZE != 0 {
            return Err(formats(Rule::MultipleOf(BSF_SIZE as u64 / 16)));
        }
        let at = LIST + listed * 16;
        let end = at + units as usize * 16;
        let formats = entry.get(at..end).ok_or_else(|| too_short(entry, end))?;
        let encryption_key = |number| {
            let key = self.encryption_keys.get(number)?;
            (key.pd == pd).then_some(key)
        };
        let protection = Protection::parse(formats, encryption_key)?;
        for number in protection.psvs.into_iter().flatten() {
            check_psv(number, self.psvs.get(number), pd)?;
        }
        Ok(protection.is_enabled().then(|| Arc::new(protection)))
    }

    /// Executes a work request that sets a PSV.
    pub(crate) fn set_psv(&mut self, accessor: Accessor, entry: &[u8]) -> Result<(), Violation> {
        const NUMBER: Field = field(CONTROL, 23, 0);
        let read = entry.get(..CONTROL + 16);
        let number = NUMBER.get(read.ok_or_else(|| too_short(entry, CONTROL + 16))?);
        check_psv(number, self.psvs.get(number), accessor.pd)?;
        if let Some(psv) = self.psvs.get_mut(number) {
            psv.ready = true;
        }
        Ok(())
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
    ) -> Result<(), Violation> {
        let keys = match entries {
            Entries::Keys(keys) => keys,
            Entries::Pages(pages) => {
                let rule = Rule::With("a privileged queue pair");
                return Err(Violation::new(
                    "entries of a list of addresses",
                    pages.len(),
                    rule,
                ));
            }
        };
        // Lists are padded with zeros to whole units.
        let keys = keys.iter().filter(|klm| **klm != Klm::default());
        let equal = matches!(mkey.translation, Translation::Ksms { .. });
        for klm in keys {
            // Entries of equal parts have no length of their own.
            let length = if equal { 0 } else { klm.length };
            let klm = Klm { length, ..*klm };
            if let Err(rule) = self.may_refer_to(accessor, mkey, &klm, rights) {
                return Err(refused_entry(&klm, rule));
            }
        }
        Ok(())
    }

    /// Returns the translation list of a UMR, which is inline or in memory.
    fn read_list(
        &mut self,
        accessor: Accessor,
        entry: &[u8],
        inline: bool,
        count: usize,
    ) -> Result<Vec<u8>, Violation> {
        let mut bytes = vec![0; count * 16];
        if count == 0 {
            return Ok(bytes);
        }
        let rest = entry.get(LIST..).unwrap_or(&[]);
        if inline {
            let inline_list = rest.get(..bytes.len());
            let inline_list = inline_list.ok_or_else(|| too_short(entry, LIST + bytes.len()))?;
            bytes.copy_from_slice(inline_list);
        } else {
            let segment = rest.get(..16).ok_or_else(|| too_short(entry, LIST + 16))?;
            let (key, va, rights) = (get32(segment, 4), get64(segment, 8), Rights::LOCAL_READ);
            let read = self.read_key(accessor, key, va, &mut bytes, rights);
            self.observe_access(&read, accessor, key, (va, bytes.len() as u64), rights);
            read.map_err(|_| Violation::new("address of the list", va, Rule::Readable))?;
        }
        Ok(bytes)
    }
}

/// The change of a key by a UMR work request, but for its translation and protection.
struct Change<'e> {
    umr: &'e [u8],
    context: &'e [u8],
    mask: u64,
}

impl Change<'_> {
    /// Returns whether a field changes.
    fn has(&self, field: u64) -> bool {
        self.mask & field != 0
    }

    /// Checks whether the accessor may change the key in its state.
    fn check(&self, accessor: Accessor, key: u32, mkey: &Mkey) -> Result<(), Violation> {
        let Self { umr, context, .. } = self;
        let of_key = |rule| Violation::new("memory key", key, rule);
        if !mkey.umr {
            return Err(of_key(Rule::With("its UMR_EN")));
        }
        if let Some(pd) = [mkey.pd, self.pd(mkey)]
            .into_iter()
            .find(|it| !accessor.may_use(*it))
        {
            let what = "protection domain of the memory key";
            return Err(of_domain(what, pd, accessor.pd));
        }
        if MUST_BE_FREE.is_set(umr) && !mkey.free {
            return Err(of_key(Rule::InState("free")));
        }
        if MUST_BE_USED.is_set(umr) && mkey.free {
            return Err(of_key(Rule::InState("in use")));
        }
        let frees = self.has(mask::FREE) && mkc::FREE.is_set(context);
        if frees && CHECK_QPN.is_set(umr) {
            // Drivers invalidate a window of type 2 thus, and bind it to a length of 0, which
            // the specification forbids; only a bind has a variant.
            if mkey.free {
                return Err(of_key(Rule::InState("in use")));
            }
            let variant = mkc::MKEY_7_0.get(context);
            if self.has(mask::KEY) && variant != 0 {
                let what = "low byte of the key of a bind without memory";
                return Err(Violation::new(what, variant, Rule::Zero));
            }
        }
        if CHECK_QPN.is_set(umr) && ![ANY_QPN, accessor.qpn].contains(&mkey.qpn) {
            let (what, rule) = (
                "queue pair of the memory key",
                Rule::Is(accessor.qpn.into()),
            );
            return Err(Violation::new(what, mkey.qpn, rule));
        }
        Ok(())
    }

    /// Returns the key's protection domain after the change.
    fn pd(&self, mkey: &Mkey) -> u32 {
        match self.has(mask::PD) {
            true => mkc::PD.get(self.context),
            false => mkey.pd,
        }
    }

    /// Returns the key's rights after the change.
    fn rights(&self, mkey: &Mkey) -> Rights {
        let new = super::mkey::rights(self.context);
        let mut rights = mkey.rights;
        for (bit, right) in [
            (mask::LOCAL_READ, Rights::LOCAL_READ),
            (mask::LOCAL_WRITE, Rights::LOCAL_WRITE),
            (mask::REMOTE_READ, Rights::REMOTE_READ),
            (mask::REMOTE_WRITE, Rights::REMOTE_WRITE),
            (mask::ATOMIC, Rights::ATOMIC),
        ] {
            if self.has(bit) {
                rights = Rights(rights.0 & !right.0 | new.0 & right.0);
            }
        }
        rights
    }

    /// Returns the part of the key's list that `units` entries replace.
    fn replaced_range(&self, units: usize) -> ReplacedRange {
        let umr = self.umr;
        let offset = match TRANSLATION_OFFSET_EN.is_set(umr) {
            true => OFFSET.get(umr) as usize | (OFFSET_HIGH.get(umr) as usize) << 16,
            false => 0,
        };
        ReplacedRange {
            units,
            offset,
            whole: offset == 0 && self.has(mask::LENGTH),
        }
    }

    /// Changes the fields that no other field depends on.
    fn apply(&self, mkey: &mut Mkey) {
        let context = self.context;
        if self.has(mask::SIGNATURE_ERROR) {
            mkey.awaited_error = mkc::EXPECTED_SIGERR_COUNT.get(context);
        }
        if self.has(mask::FREE) {
            mkey.free = mkc::FREE.is_set(context);
        }
        if self.has(mask::LENGTH) {
            mkey.length = get64(context, mkc::LEN);
            mkey.length64 = mkc::LENGTH64.is_set(context);
        }
        if self.has(mask::START) {
            mkey.start = get64(context, mkc::START_ADDR);
        }
        if self.has(mask::REMOTE_INVALIDATE) {
            mkey.remote_invalidate = mkc::EN_RINVAL.is_set(context);
        }
        if self.has(mask::QPN) {
            mkey.qpn = mkc::QPN.get(context);
        }
        if self.has(mask::KEY) {
            mkey.variant = mkc::MKEY_7_0.get(context) as u8;
        }
    }
}

/// Creates the violation of an object of another protection domain.
#[cold]
fn of_domain(what: &'static str, pd: u32, own: u32) -> Violation {
    Violation::new(what, pd, Rule::Is(own.into()))
}

/// Checks that a PSV exists, and is of a protection domain.
fn check_psv(number: u32, psv: Option<&Psv>, pd: u32) -> Result<(), Violation> {
    let psv = psv.ok_or_else(|| Violation::new("PSV", number, Rule::Exists))?;
    match psv.pd == pd {
        true => Ok(()),
        false => Err(of_domain("protection domain of the PSV", psv.pd, pd)),
    }
}

/// Creates the violation of a list whose entry may not refer to its memory.
#[cold]
fn refused_entry(klm: &Klm, rule: AccessRule) -> Violation {
    let (what, value, rule) = match rule {
        AccessRule::Exists(None) => ("key of an entry", klm.key.into(), Rule::Exists),
        AccessRule::Exists(Some(variant)) => {
            let key = klm.key & !0xff | u32::from(variant);
            ("key of an entry", klm.key.into(), Rule::Is(key.into()))
        }
        AccessRule::Domain { own, key } => {
            let what = "protection domain of the key of an entry";
            (what, key.into(), Rule::Is(own.into()))
        }
        AccessRule::Rights { needed, has } => {
            let what = "rights of the key of an entry";
            (what, has.into(), Rule::Contains(needed.into()))
        }
        AccessRule::Range { length, .. } if u64::from(klm.length) > length => {
            let what = "length of an entry";
            (what, klm.length.into(), Rule::AtMost(length))
        }
        AccessRule::Range { start, length } => {
            let end = start.saturating_add(length.saturating_sub(u64::from(klm.length)));
            ("address of an entry", klm.va, Rule::Between(start, end))
        }
        AccessRule::Bindable => {
            let rule = Rule::With("the right to bind windows");
            ("key of an entry", klm.key.into(), rule)
        }
        _ => ("key of an entry", klm.key.into(), Rule::Permitted),
    };
    Violation { what, value, rule }
}

/// Translation entries.
enum Entries {
    Pages(Vec<u64>),
    Keys(Vec<Klm>),
}

/// Parses a list for the kind of translation that the key has.
fn parse_entries(mkey: &Mkey, list: &[u8], whole: bool) -> Result<Entries, Violation> {
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
        false => {
            let repetitions = get32(list, REPEAT_COUNT);
            let rule = Rule::Without("a part of a memory key");
            Err(Violation::new(
                "repetitions of the pattern",
                repetitions,
                rule,
            ))
        }
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
) -> Result<(), Violation> {
    // Lists are padded to units of 64 bytes.
    let (end, capacity) = (
        offset + units,
        (mkey.capacity as usize).next_multiple_of(UNIT),
    );
    if end > capacity && units != 0 {
        let rule = Rule::AtMost(capacity as u64);
        return Err(Violation::new(
            "end of the list in the memory key",
            end,
            rule,
        ));
    }
    if let Translation::Pages { shift, .. } | Translation::Ksms { shift, .. } =
        &mut mkey.translation
    {
        if log_page_size != 0 {
            if log_page_size > MAX_LOG_PAGE_SIZE {
                let rule = Rule::AtMost(MAX_LOG_PAGE_SIZE.into());
                return Err(Violation::new("log_page_size", log_page_size, rule));
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
        _ => {
            let rule = Rule::With("a memory key that has a list");
            return Err(Violation::new("entries of the list", units, rule));
        }
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
fn expand_pattern(list: &[u8]) -> Result<Vec<Klm>, Violation> {
    let rounds = get32(list, REPEAT_COUNT);
    let count = REPEAT_ENTRIES.get(list) as usize;
    let end = 16 + count * 16;
    let entries = list.get(16..end).ok_or_else(|| {
        let rule = Rule::AtLeast(end as u64);
        Violation::new("length of the pattern", list.len(), rule)
    })?;
    let expanded = u64::from(rounds) * count as u64;
    if expanded > MAX_EXPANDED {
        let rule = Rule::AtMost(MAX_EXPANDED);
        return Err(Violation::new(
            "entries of the expanded pattern",
            expanded,
            rule,
        ));
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
