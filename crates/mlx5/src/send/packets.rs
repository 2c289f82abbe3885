//! Work requests of raw packets: whole Ethernet frames.
//!
//! After the control segment comes an Ethernet segment: bit 7 and 6 of byte 4 have the
//! device compute checksums; bytes 12 and 13 are the length of the headers that follow
//! it at byte 14, of which 16 bytes are in the next segment. The data is the rest of the
//! frame (`struct mlx5_wqe_eth_seg` of the kernel's interface).

use uverbs::Sge;

use super::{MAX_SEGMENT, PER_BLOCK, SEGMENT, SendQueue, element, inline_segments};
use crate::operation::OperationFormat;
use crate::{Address, Data, PostError, SendFlags, SendWr};

/// Bytes of the headers that a device needs in the WQE, if it needs any: those of
/// Ethernet with a VLAN tag.
pub(crate) const MAX_INLINE_HEADERS: usize = 18;
/// Segments of the longest headers.
pub(crate) const MAX_HEADER_SEGMENTS: usize = 2;

/// Offset of the checksum flags in the Ethernet segment, and those of IP and of TCP
/// and UDP.
const CHECKSUM_FLAGS: usize = 4;
const CHECKSUMS: u8 = 1 << 6 | 1 << 7;
/// Offset of the headers' length, and of the headers.
const HEADERS_LENGTH: usize = 12;
const HEADERS: usize = 14;

const _: () = assert!(HEADERS + MAX_INLINE_HEADERS == MAX_HEADER_SEGMENTS * SEGMENT);

/// The Ethernet segment of a packet with these flags, without headers.
#[inline]
pub(super) fn segment(flags: SendFlags) -> [u64; 2] {
    let checksums = match flags.contains(SendFlags::IP_CSUM) {
        true => CHECKSUMS,
        false => 0,
    };
    let mut first = [0; 8];
    first[CHECKSUM_FLAGS] = checksums;
    [u64::from_ne_bytes(first), 0]
}

impl SendQueue {
    /// Adds a packet to the batch, for which there is room.
    ///
    /// # Errors
    /// [`PostError::BadOperation`] for a frame that is shorter than its headers, or
    /// for checksums if the device does not compute them.
    ///
    /// # Safety
    /// The data is readable, that of a scatter/gather list too.
    pub(super) unsafe fn push_packet(
        &mut self,
        format: &OperationFormat,
        wr: &SendWr<'_, Address>,
    ) -> Result<(), PostError> {
        let headers = self.work.inline_headers;
        if wr.flags.contains(SendFlags::IP_CSUM) && !self.work.checksums {
            return Err(PostError::BadOperation);
        }
        let mut bytes = [0; MAX_HEADER_SEGMENTS * SEGMENT];
        bytes[..8].copy_from_slice(&segment(wr.flags)[0].to_ne_bytes());
        let (Data::Sges(list) | Data::Inline(list)) = wr.data;
        let mut filled = 0;
        for sge in list {
            let now = (headers - filled).min(sge.length as usize);
            let from = std::ptr::with_exposed_provenance::<u8>(sge.addr as usize);
            let to = bytes[HEADERS + filled..].as_mut_ptr();
            // SAFETY: readable, as the caller says; the segments have room for the headers.
            unsafe { to.copy_from_nonoverlapping(from, now) };
            filled += now;
        }
        if filled < headers || list.is_empty() {
            return Err(PostError::BadOperation);
        }
        bytes[HEADERS_LENGTH..HEADERS].copy_from_slice(&(headers as u16).to_be_bytes());
        let header_segments = match headers {
            0 => 1,
            _ => MAX_HEADER_SEGMENTS,
        };
        let rest = || without(list, headers);
        let data_segments = match wr.data {
            Data::Sges(_) => rest().count() as u32,
            Data::Inline(_) => match rest().map(|sge| sge.length).sum() {
                0 => 0,
                length => inline_segments(length),
            },
        };
        let segments = 1 + header_segments as u32 + data_segments;
        let leading = u32::from(format.leading_segments);
        let control = self.control_slow(format, wr, segments - leading);
        let mut to = self.writer();
        to.put(control);
        for half in bytes.chunks_exact(SEGMENT).take(header_segments) {
            let word =
                |at: usize| u64::from_ne_bytes(half[at..at + 8].try_into().expect("8 bytes"));
            to.put([word(0), word(8)]);
        }
        match wr.data {
            Data::Sges(_) => rest().for_each(|sge| to.put(element(&sge, sge.length))),
            // SAFETY: readable, as the caller says.
            Data::Inline(_) => unsafe { to.put_inline(rest()) },
        }
        self.advance(
            self.next,
            control[0],
            wr.wr_id,
            segments.div_ceil(PER_BLOCK),
        );
        self.fence = 0;
        Ok(())
    }
}

/// The elements after the first `bytes` bytes of the list; empty ones are left out.
fn without(list: &[Sge], mut bytes: usize) -> impl Iterator<Item = Sge> + Clone + '_ {
    list.iter().filter_map(move |sge| {
        let now = bytes.min(sge.length as usize) as u32;
        bytes -= now as usize;
        debug_assert!(sge.length < MAX_SEGMENT);
        (sge.length != now).then_some(Sge {
            addr: sge.addr.wrapping_add(now.into()),
            length: sge.length - now,
            lkey: sge.lkey,
        })
    })
}
