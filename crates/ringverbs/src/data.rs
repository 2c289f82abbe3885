//! What operations move: from, or to, which memory of this process.

use crate::device::{self, Sge, Wqe};
use crate::memory::{Buffer, MemorySlice, Registered};
use crate::pd::Identity;
use crate::{Error, Result};

/// Memory that an operation sends from or writes from.
///
/// [`Buffer`] or [`MemorySlice`]; a `Vec` of either, gathered in order;
/// [`Inline`] bytes, which are copied at once; `()` for no data.
pub trait Source: Data {}

/// Memory that an operation receives into or reads into.
///
/// [`Buffer`] or [`MemorySlice`]; a `Vec` of either, filled in order; `()` for
/// no data.
pub trait Sink: Data {}

/// Bytes that are copied into the work request itself, so that they are free
/// again as soon as it is posted. As many as the queue pair was made for.
#[derive(Clone, Copy, Debug)]
pub struct Inline<'a>(pub &'a [u8]);

pub(crate) use sealed::Data;

mod sealed {
    use super::*;

    /// What the crate needs to know of an operation's memory.
    pub trait Data {
        /// Whether the bytes go into the work request.
        const INLINE: bool = false;

        /// Puts the data as far as it is in use into a work request. Returns
        /// how many bytes.
        #[doc(hidden)]
        fn gather(&self, wqe: &mut Wqe<'_>, domain: Identity) -> Result<u32>;

        /// Calls `post` with the elements for a receive, which are all of the
        /// memory.
        #[doc(hidden)]
        fn scatter<R>(
            &self,
            max: u32,
            domain: Identity,
            post: impl FnOnce(&[Sge]) -> Result<R>,
        ) -> Result<R>;

        /// What has to stay while the operation is in flight.
        #[doc(hidden)]
        fn hold(self) -> Payload;

        /// The same, put where it stays.
        ///
        /// # Safety
        /// `place` may be written.
        #[doc(hidden)]
        #[inline(always)]
        unsafe fn hold_at(self, place: *mut Payload)
        where
            Self: Sized,
        {
            // SAFETY: by contract.
            unsafe { place.write(self.hold()) };
        }
    }
}

/// The memory of an operation in flight.
#[derive(Debug, Default)]
#[repr(u64)]
pub enum Payload {
    /// None.
    #[default]
    None = tag::NONE,
    /// One buffer.
    Buffer(Buffer) = tag::Buffer,
    /// Several.
    Buffers(Vec<Buffer>) = tag::BUFFERS,
    /// A part of a region that is not ours alone.
    Slice(MemorySlice) = tag::Slice,
    /// Several of those.
    Slices(Vec<MemorySlice>) = tag::SLICES,
}

/// What tells the variants of [`Payload`] apart, by the names of those that are
/// written by parts.
#[allow(non_upper_case_globals)]
mod tag {
    pub const NONE: u64 = 0;
    pub const Buffer: u64 = 1;
    pub const BUFFERS: u64 = 2;
    pub const Slice: u64 = 3;
    pub const SLICES: u64 = 4;
}

/// A variant of [`Payload`] with one piece of memory, as the reference lays it
/// out: "Type layout, primitive representation of enums with fields".
#[repr(C)]
struct Variant<P> {
    tag: u64,
    piece: P,
}

const _: () = {
    assert!(size_of::<Variant<Buffer>>() <= size_of::<Payload>());
    assert!(size_of::<Variant<MemorySlice>>() <= size_of::<Payload>());
    assert!(align_of::<Variant<Buffer>>() <= align_of::<Payload>());
    assert!(align_of::<Variant<MemorySlice>>() <= align_of::<Payload>());
};

/// One piece of memory: an element of a scatter/gather list.
trait Piece {
    fn memory(&self) -> &Registered;
    fn device_addr(&self) -> u64;
    /// Bytes in use.
    fn len(&self) -> usize;
    /// Bytes that can be received.
    fn capacity(&self) -> usize;
}

impl Piece for Buffer {
    #[inline(always)]
    fn memory(&self) -> &Registered {
        self.memory()
    }
    #[inline(always)]
    fn device_addr(&self) -> u64 {
        self.device_addr()
    }
    #[inline(always)]
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
    #[inline(always)]
    fn capacity(&self) -> usize {
        self.capacity()
    }
}

impl Piece for MemorySlice {
    #[inline(always)]
    fn memory(&self) -> &Registered {
        self.memory()
    }
    #[inline(always)]
    fn device_addr(&self) -> u64 {
        self.device_addr()
    }
    #[inline(always)]
    fn len(&self) -> usize {
        self.len()
    }
    #[inline(always)]
    fn capacity(&self) -> usize {
        self.len()
    }
}

/// Elements that a list may have at most; more than any device takes.
const MAX_ELEMENTS: usize = 64;

/// The longest message that there is.
const MAX_MESSAGE: u64 = device::MAX_MESSAGE as u64;

#[cold]
fn too_many(asked: usize, allowed: u32) -> Error {
    Error::Limit {
        what: "scatter/gather elements",
        asked: asked as u64,
        allowed: allowed.into(),
    }
}

#[cold]
fn too_long(asked: usize) -> Error {
    Error::Limit {
        what: "bytes in a message",
        asked: asked as u64,
        allowed: MAX_MESSAGE,
    }
}

#[cold]
fn wrong_domain() -> Error {
    Error::WrongDomain { what: "memory" }
}

/// The element for `length` bytes of a piece.
#[inline(always)]
fn element(piece: &impl Piece, length: usize, domain: Identity) -> Result<Sge> {
    if piece.memory().identity() != domain {
        return Err(wrong_domain());
    }
    if length as u64 > MAX_MESSAGE {
        return Err(too_long(length));
    }
    Ok(Sge {
        addr: piece.device_addr(),
        length: length as u32,
        lkey: piece.memory().lkey(),
    })
}

macro_rules! data {
    ($piece:ident, $one:ident, $many:ident) => {
        impl Data for $piece {
            #[inline(always)]
            fn gather(&self, wqe: &mut Wqe<'_>, domain: Identity) -> Result<u32> {
                wqe.sge(element(self, Piece::len(self), domain)?)
            }

            #[inline(always)]
            fn scatter<R>(
                &self,
                max: u32,
                domain: Identity,
                post: impl FnOnce(&[Sge]) -> Result<R>,
            ) -> Result<R> {
                if max == 0 {
                    return Err(too_many(1, max));
                }
                post(&[element(self, Piece::capacity(self), domain)?])
            }

            #[inline(always)]
            fn hold(self) -> Payload {
                Payload::$one(self)
            }

            #[inline(always)]
            unsafe fn hold_at(self, place: *mut Payload) {
                let place: *mut Variant<$piece> = place.cast();
                // SAFETY: by contract; and this is what the variant looks like.
                // Written as a whole, tag and piece would be put together
                // elsewhere first, and read back in other parts than they were
                // written in, which processors wait for.
                unsafe {
                    (&raw mut (*place).tag).write(tag::$one);
                    (&raw mut (*place).piece).write(self);
                }
            }
        }

        impl Source for $piece {}
        impl Sink for $piece {}

        impl Data for Vec<$piece> {
            fn gather(&self, wqe: &mut Wqe<'_>, domain: Identity) -> Result<u32> {
                let max = wqe.max_sge();
                elements(self, Piece::len, max, domain, |list| wqe.sge_list(list))
            }

            fn scatter<R>(
                &self,
                max: u32,
                domain: Identity,
                post: impl FnOnce(&[Sge]) -> Result<R>,
            ) -> Result<R> {
                elements(self, Piece::capacity, max, domain, post)
            }

            fn hold(self) -> Payload {
                Payload::$many(self)
            }
        }

        impl Source for Vec<$piece> {}
        impl Sink for Vec<$piece> {}
    };
}

data!(Buffer, Buffer, Buffers);
data!(MemorySlice, Slice, Slices);

/// Calls `then` with the elements for a list of pieces.
fn elements<P: Piece, R>(
    pieces: &[P],
    length: impl Fn(&P) -> usize,
    max: u32,
    domain: Identity,
    then: impl FnOnce(&[Sge]) -> Result<R>,
) -> Result<R> {
    let mut list = [Sge::default(); MAX_ELEMENTS];
    let mut used = 0;
    let mut total = 0u64;
    for piece in pieces {
        let length = length(piece);
        let element = element(piece, length, domain)?;
        // An element of no bytes means 2 GiB to some devices.
        if length == 0 {
            continue;
        }
        if used == (max as usize).min(MAX_ELEMENTS) {
            return Err(too_many(pieces.len(), max));
        }
        list[used] = element;
        used += 1;
        total += length as u64;
    }
    if total > MAX_MESSAGE {
        return Err(too_long(total as usize));
    }
    then(&list[..used])
}

impl Data for Inline<'_> {
    const INLINE: bool = true;

    #[inline(always)]
    fn gather(&self, wqe: &mut Wqe<'_>, _domain: Identity) -> Result<u32> {
        wqe.inline(self.0)
    }

    fn scatter<R>(
        &self,
        _max: u32,
        _domain: Identity,
        _post: impl FnOnce(&[Sge]) -> Result<R>,
    ) -> Result<R> {
        Err(Error::Invalid {
            what: "nothing can be received into inline data",
        })
    }

    #[inline(always)]
    fn hold(self) -> Payload {
        Payload::None
    }
}

impl Source for Inline<'_> {}

impl Data for () {
    #[inline(always)]
    fn gather(&self, wqe: &mut Wqe<'_>, _domain: Identity) -> Result<u32> {
        wqe.no_data();
        Ok(0)
    }

    #[inline(always)]
    fn scatter<R>(
        &self,
        _max: u32,
        _domain: Identity,
        post: impl FnOnce(&[Sge]) -> Result<R>,
    ) -> Result<R> {
        post(&[])
    }

    #[inline(always)]
    fn hold(self) -> Payload {
        Payload::None
    }
}

impl Source for () {}
impl Sink for () {}

impl Payload {
    /// A message of `len` bytes was received here, filling buffer after
    /// buffer.
    #[inline(always)]
    pub(crate) fn received(&mut self, len: u32) {
        match self {
            // Slices do not know how much of them is in use.
            Self::None | Self::Slice(_) | Self::Slices(_) => {}
            Self::Buffer(buffer) => buffer.received(len as usize),
            Self::Buffers(buffers) => {
                let mut rest = len as usize;
                for buffer in buffers {
                    buffer.received(rest);
                    rest -= buffer.len();
                }
            }
        }
    }

    /// The first bytes received, of a datagram its route header, if it lies in
    /// one buffer.
    pub(crate) fn front(&self) -> Option<&[u8; 40]> {
        match self {
            Self::Buffer(buffer) => buffer.first_chunk(),
            Self::Buffers(buffers) => buffers.first()?.first_chunk(),
            _ => None,
        }
    }

    /// The buffer, if it is exactly one.
    #[inline]
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Self::Buffer(buffer) => Some(buffer),
            Self::Buffers(mut buffers) if buffers.len() == 1 => buffers.pop(),
            _ => None,
        }
    }

    /// All buffers, in order.
    pub fn into_buffers(self) -> Vec<Buffer> {
        match self {
            Self::None | Self::Slice(_) | Self::Slices(_) => Vec::new(),
            Self::Buffer(buffer) => vec![buffer],
            Self::Buffers(buffers) => buffers,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::MaybeUninit;

    /// What is written by parts reads as what is written whole.
    #[test]
    fn a_payload_is_laid_out_as_it_is_written() {
        let mut place = MaybeUninit::<Payload>::uninit();
        let to: *mut Variant<Vec<Buffer>> = place.as_mut_ptr().cast();
        // SAFETY: the place has room for the variant, all of which is written.
        let read = unsafe {
            (&raw mut (*to).tag).write(tag::BUFFERS);
            (&raw mut (*to).piece).write(Vec::with_capacity(3));
            place.assume_init()
        };
        let Payload::Buffers(buffers) = read else {
            panic!("another variant");
        };
        assert_eq!(buffers.capacity(), 3);
        let none = Payload::None;
        // SAFETY: the tag comes first.
        let tag = unsafe { (&raw const none).cast::<u64>().read() };
        assert_eq!(tag, tag::NONE);
    }
}
