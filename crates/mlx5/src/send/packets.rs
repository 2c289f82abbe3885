//! Work requests of raw packets: whole Ethernet frames; and of IPoIB.
//!
//! After the control segment comes an Ethernet segment (`struct mlx5_wqe_eth_seg`): bits 7
//! and 6 of byte 4 request checksums; bytes 6 and 7 are the MSS for TSO; bytes 12 and 13 are
//! the length of the headers, which begin at byte 14 and continue in the next segments. The
//! data is the rest of the frame. For IPoIB the address and a segment of zeros precede the
//! Ethernet segment.

use core::slice;

use uverbs::Sge;

use super::{MAX_SEGMENT, PER_BLOCK, SEGMENT, SendQueue, element, inline_segments};
use crate::abi::opcode;
use crate::operation::OperationFormat;
use crate::{Address, Data, Operands, PostError, SendFlags, SendWr, Service};

/// Bytes of the headers that a device may require in the WQE: Ethernet with a VLAN tag.
pub(crate) const MAX_INLINE_HEADERS: usize = 18;
/// Minimum bytes of the headers of a TSO packet: those of Ethernet.
const MIN_HEADERS: u16 = 14;

/// Bytes of IPoIB's header: the minimum that a WQE carries.
const IPOIB_HEADER: usize = 4;
/// Bytes between an address and the Ethernet segment.
pub(crate) const PADDING: usize = SEGMENT;

/// Offset of the checksum flags in the Ethernet segment, and those of IP and of TCP
/// and UDP.
const CHECKSUM_FLAGS: usize = 4;
const CHECKSUMS: u8 = 1 << 6 | 1 << 7;
/// Offset of the length of a segment's data.
const MSS: usize = 6;
/// Offset of the headers' length, and of the headers.
const HEADERS_LENGTH: usize = 12;
const HEADERS: usize = 14;

/// Segments of `headers` bytes of headers, including the Ethernet segment.
pub(crate) fn segments(headers: usize) -> usize {
    (HEADERS + headers).div_ceil(SEGMENT)
}

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
    /// Adds a packet to the batch, for which there is room. Its headers in the WQE are the
    /// beginning of its data, or the operand of a TSO packet.
    ///
    /// # Errors
    /// [`PostError::BadOperation`] for a frame shorter than its headers, for a header length
    /// that the queue was not created for, or for checksums that the device does not compute;
    /// [`PostError::MessageTooLong`] for more data than the TSO limit.
    ///
    /// # Safety
    /// The data is readable, that of a scatter/gather list too, and the headers.
    pub(super) unsafe fn push_packet(
        &mut self,
        format: &OperationFormat,
        wr: &SendWr<'_, Address>,
    ) -> Result<(), PostError> {
        if wr.flags.contains(SendFlags::IP_CSUM) && !self.queues.checksums {
            return Err(PostError::BadOperation);
        }
        let (Data::Sges(list) | Data::Inline(list)) = wr.data;
        let bytes: u64 = list.iter().map(|sge| u64::from(sge.length)).sum();
        let headers = match format.opcode {
            opcode::TSO => self.tso_headers(wr.operands, bytes)?,
            _ => {
                let length = match self.service {
                    Service::Underlay => underlay_headers(wr.data)?,
                    _ => self.queues.inline_headers,
                };
                if bytes < length as u64 || list.is_empty() {
                    return Err(PostError::BadOperation);
                }
                Headers {
                    operand: None,
                    length,
                    mss: 0,
                }
            }
        };
        let length = headers.length;
        let (pieces, taken) = match &headers.operand {
            Some(operand) => (slice::from_ref(operand), 0),
            None => (list, length),
        };
        let rest = || skip_bytes(list, taken);
        let data_segments = match wr.data {
            Data::Sges(_) => rest().count() as u32,
            Data::Inline(_) => match rest().map(|sge| sge.length).sum() {
                0 => 0,
                length => inline_segments(length),
            },
        };
        let address = match self.service {
            Service::Underlay => {
                let address = self.address(wr.destination);
                Some(address.ok_or(PostError::BadOperation)?.0)
            }
            _ => None,
        };
        // The address and the segment of zeros precede the Ethernet segment.
        let before = address.map_or(0, |address| address.len() + PADDING / SEGMENT);
        let segments = (1 + before + segments(length)) as u32 + data_segments;
        let leading = u32::from(format.leading_segments);
        let control = self.control_slow(format, wr, segments - leading);
        let mut first = [0; HEADERS];
        first[..8].copy_from_slice(&segment(wr.flags)[0].to_ne_bytes());
        first[MSS..MSS + 2].copy_from_slice(&headers.mss.to_be_bytes());
        first[HEADERS_LENGTH..].copy_from_slice(&(length as u16).to_be_bytes());
        let mut to = self.writer();
        to.put(control);
        if let Some(address) = address {
            address.into_iter().for_each(|part| to.put(part));
            to.put([0; 2]);
        }
        // SAFETY: the headers and the data are readable, as the caller says.
        unsafe {
            to.copy(first.as_ptr(), HEADERS);
            let mut left = length;
            for piece in pieces {
                let now = left.min(piece.length as usize);
                to.copy_piece(piece.addr, now);
                left -= now;
            }
            to.fill_segment();
            match wr.data {
                Data::Sges(_) => rest().for_each(|sge| to.put(element(&sge, sge.length))),
                Data::Inline(_) => to.put_inline(rest()),
            }
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

    /// Returns the headers of a TSO packet with so many bytes of data.
    fn tso_headers(&self, operands: Operands, bytes: u64) -> Result<Headers, PostError> {
        let Operands::Tso {
            headers,
            length,
            mss,
        } = operands
        else {
            return Err(PostError::BadOperation);
        };
        let limits = &self.queues.segmentation;
        if !(MIN_HEADERS..=limits.max_headers).contains(&length) {
            return Err(PostError::BadOperation);
        }
        if bytes > limits.longest.into() {
            return Err(PostError::MessageTooLong);
        }
        Ok(Headers {
            operand: Some(Sge {
                addr: headers,
                length: length.into(),
                lkey: 0,
            }),
            length: length.into(),
            mss,
        })
    }
}

/// The headers of a packet in its WQE.
struct Headers {
    /// Where they are, unless they are the beginning of the data.
    operand: Option<Sge>,
    length: usize,
    /// Length of a segment's data, for TSO.
    mss: u16,
}

/// Returns how many bytes of an IPoIB packet are headers in its WQE. The driver requires all
/// of them in the first element.
fn underlay_headers(data: Data<'_>) -> Result<usize, PostError> {
    let (Data::Sges(list) | Data::Inline(list)) = data;
    let first = list.first().map_or(0, |sge| sge.length as usize);
    match data {
        _ if first < IPOIB_HEADER => Err(PostError::BadOperation),
        Data::Inline(_) if first >= MAX_INLINE_HEADERS => Ok(MAX_INLINE_HEADERS),
        _ => Ok(IPOIB_HEADER),
    }
}

/// The elements after the first `bytes` bytes of the list, without empty elements.
fn skip_bytes(list: &[Sge], mut bytes: usize) -> impl Iterator<Item = Sge> + Clone + '_ {
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
