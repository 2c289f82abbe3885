//! Work requests that copy local memory (MMO).

use roce::transport::Status;

use super::core::Core;
use super::mkey::{Accessor, Rights};
use super::wqe::{OP_MOD, Segment};
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
    pub(crate) fn copy_memory(&mut self, accessor: Accessor, entry: &[u8]) -> Result<(), Status> {
        let (Some(source), Some(destination)) =
            (entry.get(SOURCE..DESTINATION), entry.get(DESTINATION..END))
        else {
            return Err(Status::LocalQpOperation);
        };
        if OP_MOD.get(entry) != COPY {
            return Err(Status::LocalQpOperation);
        }
        let (from, to) = (Segment::parse(source), Segment::parse(destination));
        if from.length != to.length || from.length == 0 || from.length > 1 << LOG_MAX_LENGTH {
            return Err(Status::LocalLength);
        }
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
            read.map_err(|_| Status::LocalProtection)?;
            let written = self.write_key(accessor, to.key, target, bytes, Rights::LOCAL_WRITE);
            self.observe_access(
                &written,
                accessor,
                to.key,
                range(target),
                Rights::LOCAL_WRITE,
            );
            written.map_err(|_| Status::LocalProtection)?;
            at += n;
        }
        self.stats.bytes_gathered += u64::from(from.length);
        self.stats.bytes_scattered += u64::from(from.length);
        Ok(())
    }
}
