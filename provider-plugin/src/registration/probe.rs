//! Evidence of a release in the memory of a libibverbs: its package note, its structures.

use core::mem::size_of;

use super::objects::Library;
use crate::abi::{VERBS_QP_EX, ibv_qp_ex};

/// Type and owner of the note in which distributions name the package
/// (systemd's `ELF_PACKAGE_METADATA`).
const PACKAGE: u32 = 0xcafe_1a7e;
const OWNER: &[u8] = b"FDO\0";

/// The release of rdma-core in the distribution's package note among the notes of a segment.
///
/// `None` for a vendor's package with other version numbers (`2410mlnx54`).
pub fn package_release(mut notes: &[u8]) -> Option<u32> {
    loop {
        let (header, rest) = notes.split_at_checked(12)?;
        let word = |at: usize| {
            let bytes = header.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_ne_bytes(bytes))
        };
        let (name_size, size, kind) = (word(0)?, word(4)?, word(8)?);
        let padded = |size: u32| usize::try_from(size).ok()?.checked_next_multiple_of(4);
        let (name, rest) = rest.split_at_checked(padded(name_size)?)?;
        let (text, rest) = rest.split_at_checked(padded(size)?)?;
        if kind == PACKAGE && name == OWNER {
            let text = core::str::from_utf8(text.split(|byte| *byte == 0).next()?).ok()?;
            let is_ours = member(text, "name") == Some("rdma-core");
            return is_ours
                .then(|| member(text, "version"))
                .flatten()
                .and_then(release);
        }
        notes = rest;
    }
}

/// A member of a flat JSON object whose value is a string without escapes.
fn member<'a>(json: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = json.split_once(&format!("\"{name}\""))?;
    let rest = rest.trim_start().strip_prefix(':')?;
    let (value, _) = rest.trim_start().strip_prefix('"')?.split_once('"')?;
    (!value.contains('\\')).then_some(value)
}

/// The release of a package version such as `50.0-2ubuntu0.2`.
fn release(version: &str) -> Option<u32> {
    let (upstream, _) = version.split_once('-').unwrap_or((version, ""));
    let (release, minor) = upstream.split_once('.')?;
    minor.parse::<u32>().ok()?;
    release.parse().ok()
}

/// Maximum number of extra words that are probed.
const MAX_EXTRA_WORDS: usize = 8;

/// The number of words that the library's `ibv_qp_ex` has beyond those of release 34. They
/// move `verbs_qp.comp_mask`, which the public function `ibv_qp_to_qp_ex` reads, and nothing
/// else.
pub fn extra_qp_words(library: &Library<'_>) -> Option<usize> {
    type ToQpEx = unsafe extern "C" fn(*mut u64) -> *mut u64;
    let function = library.symbol(c"ibv_qp_to_qp_ex", c"IBVERBS_1.6")?;
    // SAFETY: a public function, with pointers to structures in place of words.
    let to_qp_ex = unsafe { core::mem::transmute::<*mut core::ffi::c_void, ToQpEx>(function) };
    const FIRST: usize = size_of::<ibv_qp_ex>() / size_of::<u64>();
    let has_mask_at = |added: &usize| {
        // Twice the maximum size, so that a later release reads inside of it, too.
        let mut qp = [0_u64; 2 * (FIRST + MAX_EXTRA_WORDS)];
        qp[FIRST + added] = VERBS_QP_EX.into();
        // SAFETY: an object of the size of `verbs_qp` or longer, of which the
        // function reads 32 bits and returns the address or null.
        !unsafe { to_qp_ex(qp.as_mut_ptr()) }.is_null()
    };
    let mut found = (0..MAX_EXTRA_WORDS).filter(has_mask_at);
    match (found.next(), found.next()) {
        (Some(added), None) => Some(added),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(owner: &[u8], kind: u32, text: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for word in [owner.len() as u32, text.len() as u32, kind] {
            note.extend(word.to_ne_bytes());
        }
        for part in [owner, text] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    const UBUNTU: &str = r#"{"type":"deb","os":"ubuntu","name":"rdma-core","version":"50.0-2ubuntu0.2","architecture":"amd64"}"#;
    const FEDORA: &str = r#"{ "type" : "rpm", "name" : "rdma-core", "version" : "65.0-1.fc43" }"#;

    #[test]
    fn release_is_read_from_a_distribution_s_note() {
        for (text, release) in [(UBUNTU, 50), (FEDORA, 65)] {
            let mut notes = note(b"GNU\0", 3, &[7; 20]);
            notes.extend(note(OWNER, PACKAGE, text.as_bytes()));
            assert_eq!(package_release(&notes), Some(release));
        }
        assert_eq!(package_release(&note(b"GNU\0", 3, &[7; 20])), None);
    }

    #[test]
    fn other_notes_are_ignored() {
        for text in [
            "",
            "{}",
            r#"{"name":"rdma-core"}"#,
            r#"{"name":"rdma-core","version":7}"#,
            r#"{"name":"rdma-core","version":"2410mlnx54-1.2410068"}"#,
            r#"{"name":"rdma-core","version":"50"}"#,
            r#"{"name":"rdma-core","version":"50.0\\"}"#,
            r#"{"name":"other","version":"50.0"}"#,
            r#"{"name":"rdma-core","version":"50.0"#,
        ] {
            let notes = note(OWNER, PACKAGE, text.as_bytes());
            assert_eq!(package_release(&notes), None, "{text}");
        }
    }

    #[test]
    fn truncated_notes_are_refused() {
        let whole = note(OWNER, PACKAGE, UBUNTU.as_bytes());
        for end in 0..whole.len() {
            assert_eq!(package_release(&whole[..end]), None, "{end}");
        }
        let mut long = whole;
        for at in 0..8 {
            long[at] = 0xff;
            let _ = package_release(&long);
        }
    }
}
