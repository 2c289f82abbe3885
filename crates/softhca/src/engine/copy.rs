//! Work requests that copy local memory (MMO).

use roce::rule::{Rule, Violation};
use roce::transport::Status;

use super::core::Core;
use super::mkey::{Accessor, Rights};
use super::wqe::{OP_MOD, Segment, too_short};
use crate::platform::Platform;

/// Maximum length of one copy, as a power of two.
pub(crate) const LOG_MAX_LENGTH: u32 = 20;

/// Operation modifier that selects the copy.
const COPY: u32 = 1;
/// Offsets of the source and destination segments in the WQE. The segment before them
/// is for other operations.
const SOURCE: usize = 32;
const DESTINATION: usize = 48;
const END: usize = 64;

/// Bytes copied at once.
const PART: usize = 4096;

impl<P: Platform> Core<P> {
    /// Copies as a WQE requests. A part may have been copied when it fails. Absent
    /// memory is an error here, and is not waited for.
    pub(crate) fn copy_memory(
        &mut self,
        accessor: Accessor,
        entry: &[u8],
    ) -> Result<(), (Status, Violation)> {
        let (Some(source), Some(destination)) =
            (entry.get(SOURCE..DESTINATION), entry.get(DESTINATION..END))
        else {
            return Err((Status::LocalQpOperation, too_short(entry, END)));
        };
        if OP_MOD.get(entry) != COPY {
            let modifier = OP_MOD.get(entry);
            let violation = Violation::new("operation modifier", modifier, Rule::Is(COPY.into()));
            return Err((Status::LocalQpOperation, violation));
        }
        let (from, to) = (Segment::parse(source), Segment::parse(destination));
        let check_length = |what, length, rule, holds: bool| match holds {
            true => Ok(()),
            false => Err((Status::LocalLength, Violation::new(what, length, rule))),
        };
        let limit = 1 << LOG_MAX_LENGTH;
        let (is_same, same) = (from.length == to.length, Rule::Is(from.length.into()));
        check_length("length of the destination", to.length, same, is_same)?;
        let is_short = (1..=limit).contains(&from.length);
        let short = Rule::Between(1, limit.into());
        check_length("length of the copy", from.length, short, is_short)?;
        let mut part = [0; PART];
        let mut at = 0;
        while at < from.length {
            let n = (from.length - at).min(PART as u32);
            let bytes = &mut part[..n as usize];
            let (source, target) = (
                from.va.wrapping_add(u64::from(at)),
                to.va.wrapping_add(u64::from(at)),
            );
            let range = |va| (va, u64::from(n));
            let read = self.read_key(accessor, from.key, source, bytes, Rights::LOCAL_READ);
            self.observe_access(&read, accessor, from.key, range(source), Rights::LOCAL_READ);
            read.map_err(|_| {
                let violation = Violation::new("source of the copy", source, Rule::Readable);
                (Status::LocalProtection, violation)
            })?;
            let written = self.write_key(accessor, to.key, target, bytes, Rights::LOCAL_WRITE);
            self.observe_access(
                &written,
                accessor,
                to.key,
                range(target),
                Rights::LOCAL_WRITE,
            );
            written.map_err(|_| {
                let violation = Violation::new("destination of the copy", target, Rule::Writable);
                (Status::LocalProtection, violation)
            })?;
            at += n;
        }
        self.stats.bytes_gathered += u64::from(from.length);
        self.stats.bytes_scattered += u64::from(from.length);
        Ok(())
    }
}
