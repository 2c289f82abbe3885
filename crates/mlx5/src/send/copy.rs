//! Inline data in one piece: the word that says how much it is, and behind it a
//! copy.

use std::ptr::NonNull;

use ring::write_pair;

use crate::abi::{INLINE_SEGMENT, SEGMENT};

/// Segments of `length` bytes of inline data, with the word that says how much; no
/// more than a queue has, so the sum is one of 32 bits.
#[inline(always)]
pub(super) fn segments_of(length: u32) -> u32 {
    // Upwards; `div_ceil` makes more of it for what may overflow.
    (4 + length + (SEGMENT as u32 - 1)) >> SEGMENT.ilog2()
}

/// Writes inline data of any length.
///
/// # Safety
/// `to` has room for the word and `length` bytes, which are readable at `from`.
#[inline(always)]
pub(super) unsafe fn write_long(to: NonNull<u64>, from: *const u8, length: u32) {
    // SAFETY: as the caller says.
    unsafe {
        to.cast::<u32>().write((length | INLINE_SEGMENT).to_be());
        // Last, so that a caller can end in it.
        let to = to.cast::<u8>().add(4).as_ptr();
        to.copy_from_nonoverlapping(from, length as usize);
    }
}

/// As [`write_long`], of data in a work request's first block. What is behind
/// them in their last segment is zeros.
///
/// By whole segments, in which the device's register gets them afterwards, and
/// without a call, for which its caller would have to keep what it knows.
///
/// # Safety
/// `to`, which is aligned to a segment, has room for the segments; `from` is
/// readable for `length` bytes, which are 1 to 44.
#[inline(always)]
pub(super) unsafe fn write_short(to: NonNull<u64>, from: *const u8, length: u32) {
    // Numbers are here as machines have them that begin with the lowest byte.
    let header = u64::from((length | INLINE_SEGMENT).swap_bytes());
    let length = length as usize;
    let eight = |at: usize| {
        // SAFETY: asked for where there are 8 bytes.
        u64::from_le(unsafe { from.add(at).cast::<u64>().read_unaligned() })
    };
    let four = |at: usize| {
        // SAFETY: asked for where there are 4 bytes.
        u64::from(u32::from_le(unsafe {
            from.add(at).cast::<u32>().read_unaligned()
        }))
    };
    let two = |at: usize| {
        // SAFETY: asked for where there are 2 bytes.
        u64::from(u16::from_le(unsafe {
            from.add(at).cast::<u16>().read_unaligned()
        }))
    };
    let one = |at: usize| {
        // SAFETY: asked for where there is a byte.
        u64::from(unsafe { from.add(at).read() })
    };
    // The last `left` bytes of as many as were read.
    let end = |bytes: u64, read: usize, left: usize| bytes >> ((read - left) * 8);
    // SAFETY: as the caller says: whole segments are written.
    let write = |to: NonNull<u64>, first: u64, second: u64| unsafe {
        write_pair(to, first.to_le(), second.to_le());
    };
    if length < 12 {
        let (first, second) = match length {
            9.. => (four(0), end(eight(length - 8), 8, length - 4)),
            5.. => (four(0), end(four(length - 4), 4, length - 4)),
            4 => (four(0), 0),
            2.. => (two(0) | one(length - 1) << ((length - 1) * 8), 0),
            _ => (one(0), 0),
        };
        write(to, header | first << 32, second);
        return;
    }
    write(to, header | four(0) << 32, eight(4));
    let (mut to, mut at) = (to, 12);
    for _ in 0..2 {
        // SAFETY: the segment after the last, if there is more.
        to = unsafe { to.add(2) };
        if at + 16 > length {
            break;
        }
        // SAFETY: as many bytes are there and a segment has.
        unsafe {
            let bytes = from.add(at).cast::<[u8; 16]>().read();
            to.cast::<[u8; 16]>().write(bytes);
        }
        at += 16;
    }
    let left = length - at;
    if left > 8 {
        write(to, eight(at), end(eight(length - 8), 8, left - 8));
    } else if left != 0 {
        write(to, end(eight(length - 8), 8, left), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_copied_and_no_other_segment_is_written() {
        #[repr(align(64))]
        struct Room([u64; 8]);

        let data: Vec<u8> = (1..=44).collect();
        for length in 1..=data.len() {
            let mut room = Room([u64::MAX; 8]);
            // Exactly as much: a reader beyond it is found by the sanitizer.
            let from = data[..length].to_vec();
            // SAFETY: room for 44 bytes and the word before them.
            unsafe {
                write_short(
                    NonNull::from(&mut room.0).cast(),
                    from.as_ptr(),
                    length as u32,
                )
            };
            let bytes: Vec<u8> = room.0.iter().flat_map(|word| word.to_ne_bytes()).collect();
            assert_eq!(bytes[..4], (length as u32 | 1 << 31).to_be_bytes());
            let end = (4 + length).next_multiple_of(16);
            assert_eq!(bytes[4..4 + length], from, "{length}");
            assert!(
                bytes[4 + length..end].iter().all(|byte| *byte == 0),
                "{length}"
            );
            assert!(bytes[end..].iter().all(|byte| *byte == 0xff), "{length}");
        }
    }
}
