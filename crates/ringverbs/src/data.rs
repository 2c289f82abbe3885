//! Local memory of operations.

use std::fmt;
use std::slice;

use crate::device::{self, SendData, Sge};
use crate::memory::{Buffer, MemorySlice, PoolBuffer, Registered, SharedBuffer};
use crate::pd::Identity;
use crate::{Error, Result};

/// Memory that a send or write takes its data from.
///
/// [`Buffer`], [`PoolBuffer`], [`SharedBuffer`] or [`MemorySlice`]; a `Vec` of one of
/// these, gathered in order; [`Inline`] bytes, which are copied when the request is
/// posted; `()` for no data. A refused post returns the data
/// ([`PostError`](crate::PostError)) as the type `Returned`, which is an empty
/// `Inline<'static>` for inline bytes, because these were only borrowed.
pub trait Source: Data {}

/// Memory that a receive or read stores its data in.
///
/// [`Buffer`], [`PoolBuffer`] or [`MemorySlice`]; a `Vec` of one of these, filled in
/// order; `()` for no data.
pub trait Sink: Data<Returned = Self> {}

/// Memory that an operation owns and its future returns: [`Buffer`],
/// [`PoolBuffer`], [`SharedBuffer`] or [`MemorySlice`], a `Vec` of one of these, or
/// `()` for none.
pub trait Owned: Data<Returned = Self> + sealed::FromPayload {}

/// Inline data: bytes that are copied into the work request, so that the slice is
/// free as soon as the request is posted. The maximum is that of the queue pair
/// ([`QueuePairBuilder::inline`](crate::qp::QueuePairBuilder::inline)).
#[derive(Clone, Copy, Debug)]
pub struct Inline<'a>(pub &'a [u8]);

pub(crate) use sealed::{Data, Kind};

mod sealed {
    use super::*;

    /// The type of an operation's memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        None,
        Buffer,
        Buffers,
        Slice,
        Slices,
        Pooled,
        PooledList,
        Shared,
        SharedList,
    }

    /// Memory that can be taken out of a completion.
    pub trait FromPayload: Sized {
        #[doc(hidden)]
        const KIND: Kind;

        /// Returns the memory if it has this type.
        #[doc(hidden)]
        fn from_payload(payload: Payload) -> Option<Self>;
    }

    /// The crate's interface to an operation's memory.
    pub trait Data: Sized {
        /// The data that a refused post returns: owned memory; empty for borrowed
        /// bytes, which the caller still has.
        type Returned: fmt::Debug + Send + Sync + 'static;

        #[doc(hidden)]
        fn returned(self) -> Self::Returned;

        /// Calls `post` with the data of a send work request: the bytes in use, up
        /// to the length.
        #[doc(hidden)]
        fn gather<R>(
            &self,
            max_sge: u32,
            domain: Identity,
            post: impl FnOnce(SendData<'_>) -> Result<R>,
        ) -> Result<R>;

        /// Calls `post` with the SGEs of a receive, which cover the whole
        /// capacity.
        #[doc(hidden)]
        fn scatter<R>(
            &self,
            max: u32,
            domain: Identity,
            post: impl FnOnce(&[Sge]) -> Result<R>,
        ) -> Result<R>;

        /// Converts to the payload that the operation owns in flight.
        #[doc(hidden)]
        fn into_payload(self) -> Payload;

        /// Writes the result of [`into_payload`](Self::into_payload) to `slot`.
        ///
        /// # Safety
        /// `slot` is valid for writes.
        #[doc(hidden)]
        #[inline]
        unsafe fn write_payload(self, slot: *mut Payload) {
            // SAFETY: the caller's obligation.
            unsafe { slot.write(self.into_payload()) };
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
    /// A part of a region that is not exclusively owned.
    Slice(MemorySlice) = tag::Slice,
    /// Several slices.
    Slices(Vec<MemorySlice>) = tag::SLICES,
    /// One buffer of a pool.
    Pooled(PoolBuffer) = tag::Pooled,
    /// Several.
    PooledList(Vec<PoolBuffer>) = tag::POOLED_LIST,
    /// A read-only buffer.
    Shared(SharedBuffer) = tag::Shared,
    /// Several.
    SharedList(Vec<SharedBuffer>) = tag::SHARED_LIST,
}

/// Discriminants of [`Payload`]. Variants that are written field by field give their
/// discriminants their names.
#[allow(non_upper_case_globals)]
mod tag {
    pub const NONE: u64 = 0;
    pub const Buffer: u64 = 1;
    pub const BUFFERS: u64 = 2;
    pub const Slice: u64 = 3;
    pub const SLICES: u64 = 4;
    pub const Pooled: u64 = 5;
    pub const POOLED_LIST: u64 = 6;
    pub const Shared: u64 = 7;
    pub const SHARED_LIST: u64 = 8;
}

/// A variant of [`Payload`] with one piece of memory, laid out as the Rust
/// Reference specifies: "Type layout, primitive representation of enums with
/// fields".
#[repr(C)]
struct Variant<P> {
    tag: u64,
    piece: P,
}

const _: () = {
    assert!(size_of::<Variant<Buffer>>() <= size_of::<Payload>());
    assert!(size_of::<Variant<MemorySlice>>() <= size_of::<Payload>());
    assert!(size_of::<Variant<PoolBuffer>>() <= size_of::<Payload>());
    assert!(size_of::<Variant<SharedBuffer>>() <= size_of::<Payload>());
    assert!(align_of::<Variant<Buffer>>() <= align_of::<Payload>());
    assert!(align_of::<Variant<MemorySlice>>() <= align_of::<Payload>());
    assert!(align_of::<Variant<PoolBuffer>>() <= align_of::<Payload>());
    assert!(align_of::<Variant<SharedBuffer>>() <= align_of::<Payload>());
    // The size of a buffer in a queue's table.
    assert!(size_of::<Payload>() == size_of::<Variant<Buffer>>());
};

/// A piece of memory: one SGE.
trait Piece {
    fn memory(&self) -> &Registered;
    fn device_addr(&self) -> u64;
    /// Bytes in use.
    fn len(&self) -> usize;
    /// Bytes that can be received into.
    fn capacity(&self) -> usize;
}

impl Piece for Buffer {
    #[inline]
    fn memory(&self) -> &Registered {
        self.memory()
    }
    #[inline]
    fn device_addr(&self) -> u64 {
        self.device_addr()
    }
    #[inline]
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
    #[inline]
    fn capacity(&self) -> usize {
        self.capacity()
    }
}

impl Piece for MemorySlice {
    #[inline]
    fn memory(&self) -> &Registered {
        self.memory()
    }
    #[inline]
    fn device_addr(&self) -> u64 {
        self.device_addr()
    }
    #[inline]
    fn len(&self) -> usize {
        self.len()
    }
    #[inline]
    fn capacity(&self) -> usize {
        self.len()
    }
}

impl Piece for PoolBuffer {
    #[inline]
    fn memory(&self) -> &Registered {
        self.memory()
    }
    #[inline]
    fn device_addr(&self) -> u64 {
        self.device_addr()
    }
    #[inline]
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
    #[inline]
    fn capacity(&self) -> usize {
        self.capacity()
    }
}

/// A source only, because a shared buffer must not be written.
impl Piece for SharedBuffer {
    #[inline]
    fn memory(&self) -> &Registered {
        self.memory()
    }
    #[inline]
    fn device_addr(&self) -> u64 {
        self.device_addr()
    }
    #[inline]
    fn len(&self) -> usize {
        <[u8]>::len(self)
    }
    #[inline]
    fn capacity(&self) -> usize {
        0
    }
}

/// Maximum SGEs of a list; more than any device supports.
const MAX_ELEMENTS: usize = 64;

/// Maximum length of a message.
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

/// Returns the SGE for `length` bytes of a piece.
#[inline]
fn sge(piece: &impl Piece, length: usize, domain: Identity) -> Result<Sge> {
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

macro_rules! owned {
    ($memory:ty, $kind:ident) => {
        impl sealed::FromPayload for $memory {
            const KIND: Kind = Kind::$kind;

            #[inline]
            fn from_payload(payload: Payload) -> Option<Self> {
                match payload {
                    Payload::$kind(memory) => Some(memory),
                    _ => None,
                }
            }
        }

        impl Owned for $memory {}
    };
}

macro_rules! data {
    ($piece:ident, $one:ident, $many:ident) => {
        impl Data for $piece {
            type Returned = Self;

            #[inline]
            fn returned(self) -> Self {
                self
            }

            #[inline]
            fn gather<R>(
                &self,
                _max_sge: u32,
                domain: Identity,
                post: impl FnOnce(SendData<'_>) -> Result<R>,
            ) -> Result<R> {
                let sge = sge(self, Piece::len(self), domain)?;
                // As in `with_sges`, an SGE of length 0 is left out.
                let list = slice::from_ref(&sge);
                post(SendData::Sges(&list[usize::from(sge.length == 0)..]))
            }

            #[inline]
            fn scatter<R>(
                &self,
                max: u32,
                domain: Identity,
                post: impl FnOnce(&[Sge]) -> Result<R>,
            ) -> Result<R> {
                if max == 0 {
                    return Err(too_many(1, max));
                }
                post(&[sge(self, Piece::capacity(self), domain)?])
            }

            #[inline]
            fn into_payload(self) -> Payload {
                Payload::$one(self)
            }

            #[inline]
            unsafe fn write_payload(self, slot: *mut Payload) {
                let slot: *mut Variant<$piece> = slot.cast();
                // SAFETY: the caller's obligation; the layout is that of the
                // variant. Writing the enum as a whole would assemble it
                // elsewhere and copy it with accesses of other sizes, which
                // defeats store forwarding.
                unsafe {
                    (&raw mut (*slot).tag).write(tag::$one);
                    (&raw mut (*slot).piece).write(self);
                }
            }
        }

        impl Source for $piece {}

        impl Data for Vec<$piece> {
            type Returned = Self;

            #[inline]
            fn returned(self) -> Self {
                self
            }

            fn gather<R>(
                &self,
                max_sge: u32,
                domain: Identity,
                post: impl FnOnce(SendData<'_>) -> Result<R>,
            ) -> Result<R> {
                with_sges(self, Piece::len, max_sge, domain, |list| {
                    post(SendData::Sges(list))
                })
            }

            fn scatter<R>(
                &self,
                max: u32,
                domain: Identity,
                post: impl FnOnce(&[Sge]) -> Result<R>,
            ) -> Result<R> {
                with_sges(self, Piece::capacity, max, domain, post)
            }

            fn into_payload(self) -> Payload {
                Payload::$many(self)
            }
        }

        impl Source for Vec<$piece> {}

        owned!($piece, $one);
        owned!(Vec<$piece>, $many);
    };
}

data!(Buffer, Buffer, Buffers);
data!(MemorySlice, Slice, Slices);
data!(PoolBuffer, Pooled, PooledList);
data!(SharedBuffer, Shared, SharedList);

// Not `SharedBuffer`: other operations read it.
impl Sink for Buffer {}
impl Sink for MemorySlice {}
impl Sink for PoolBuffer {}
impl Sink for Vec<Buffer> {}
impl Sink for Vec<MemorySlice> {}
impl Sink for Vec<PoolBuffer> {}

/// Calls `post` with the SGEs of a list of pieces.
fn with_sges<P: Piece, R>(
    pieces: &[P],
    length: impl Fn(&P) -> usize,
    max: u32,
    domain: Identity,
    post: impl FnOnce(&[Sge]) -> Result<R>,
) -> Result<R> {
    let mut list = [Sge::default(); MAX_ELEMENTS];
    let mut used = 0;
    let mut total = 0u64;
    for piece in pieces {
        let length = length(piece);
        let sge = sge(piece, length, domain)?;
        // Some devices interpret an SGE of length 0 as 2 GiB.
        if length == 0 {
            continue;
        }
        if used == (max as usize).min(MAX_ELEMENTS) {
            return Err(too_many(pieces.len(), max));
        }
        list[used] = sge;
        used += 1;
        total += length as u64;
    }
    if total > MAX_MESSAGE {
        return Err(too_long(total as usize));
    }
    post(&list[..used])
}

impl Data for Inline<'_> {
    type Returned = Inline<'static>;

    #[inline]
    fn returned(self) -> Self::Returned {
        Inline(&[])
    }

    #[inline]
    fn gather<R>(
        &self,
        _max_sge: u32,
        _domain: Identity,
        post: impl FnOnce(SendData<'_>) -> Result<R>,
    ) -> Result<R> {
        post(SendData::Inline(&[device::inline_piece(self.0)]))
    }

    fn scatter<R>(
        &self,
        _max: u32,
        _domain: Identity,
        _post: impl FnOnce(&[Sge]) -> Result<R>,
    ) -> Result<R> {
        Err(Error::Invalid {
            what: "inline data cannot receive",
        })
    }

    #[inline]
    fn into_payload(self) -> Payload {
        Payload::None
    }
}

impl Source for Inline<'_> {}

impl Data for () {
    type Returned = ();

    #[inline]
    fn returned(self) {}

    #[inline]
    fn gather<R>(
        &self,
        _max_sge: u32,
        _domain: Identity,
        post: impl FnOnce(SendData<'_>) -> Result<R>,
    ) -> Result<R> {
        post(SendData::Sges(&[]))
    }

    #[inline]
    fn scatter<R>(
        &self,
        _max: u32,
        _domain: Identity,
        post: impl FnOnce(&[Sge]) -> Result<R>,
    ) -> Result<R> {
        post(&[])
    }

    #[inline]
    fn into_payload(self) -> Payload {
        Payload::None
    }
}

impl Source for () {}
impl Sink for () {}

impl sealed::FromPayload for () {
    const KIND: Kind = Kind::None;

    #[inline]
    fn from_payload(payload: Payload) -> Option<Self> {
        matches!(payload, Payload::None).then_some(())
    }
}

impl Owned for () {}

impl Payload {
    /// Returns the type of the memory.
    #[inline]
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::None => Kind::None,
            Self::Buffer(_) => Kind::Buffer,
            Self::Buffers(_) => Kind::Buffers,
            Self::Slice(_) => Kind::Slice,
            Self::Slices(_) => Kind::Slices,
            Self::Pooled(_) => Kind::Pooled,
            Self::PooledList(_) => Kind::PooledList,
            Self::Shared(_) => Kind::Shared,
            Self::SharedList(_) => Kind::SharedList,
        }
    }

    /// Sets the lengths of the buffers after a receive of `len` bytes, which fill the
    /// buffers in order.
    #[inline]
    pub(crate) fn received(&mut self, len: u32) {
        match self {
            // Slices have no length in use, and nothing is received into a shared
            // buffer.
            Self::None | Self::Slice(_) | Self::Slices(_) => {}
            Self::Shared(_) | Self::SharedList(_) => {}
            Self::Buffer(buffer) => buffer.received(len as usize),
            Self::Pooled(buffer) => buffer.received(len as usize),
            Self::Buffers(buffers) => {
                let mut rest = len as usize;
                for buffer in buffers {
                    buffer.received(rest);
                    rest -= buffer.len();
                }
            }
            Self::PooledList(buffers) => {
                let mut rest = len as usize;
                for buffer in buffers {
                    buffer.received(rest);
                    rest -= buffer.len();
                }
            }
        }
    }

    /// Returns the first 40 bytes received, the global route header of a datagram, if
    /// they are in one buffer.
    pub(crate) fn route_header(&self) -> Option<&[u8; 40]> {
        match self {
            Self::Buffer(buffer) => buffer.first_chunk(),
            Self::Buffers(buffers) => buffers.first()?.first_chunk(),
            Self::Pooled(buffer) => buffer.first_chunk(),
            Self::PooledList(buffers) => buffers.first()?.first_chunk(),
            _ => None,
        }
    }

    /// Returns the pool buffer if the memory is exactly one.
    pub fn into_pool_buffer(self) -> Option<PoolBuffer> {
        match self {
            Self::Pooled(buffer) => Some(buffer),
            Self::PooledList(mut buffers) if buffers.len() == 1 => buffers.pop(),
            _ => None,
        }
    }

    /// Returns the buffer if the memory is exactly one.
    #[inline]
    pub fn into_buffer(self) -> Option<Buffer> {
        match self {
            Self::Buffer(buffer) => Some(buffer),
            Self::Buffers(mut buffers) if buffers.len() == 1 => buffers.pop(),
            _ => None,
        }
    }

    /// Returns all buffers, in order.
    pub fn into_buffers(self) -> Vec<Buffer> {
        match self {
            Self::Buffer(buffer) => vec![buffer],
            Self::Buffers(buffers) => buffers,
            _ => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::MaybeUninit;

    /// A value written field by field equals a value written as a whole.
    #[test]
    fn payload_layout_matches_field_writes() {
        let mut slot = MaybeUninit::<Payload>::uninit();
        let to: *mut Variant<Vec<Buffer>> = slot.as_mut_ptr().cast();
        // SAFETY: `slot` has room for the variant, all of which is written.
        let read = unsafe {
            (&raw mut (*to).tag).write(tag::BUFFERS);
            (&raw mut (*to).piece).write(Vec::with_capacity(3));
            slot.assume_init()
        };
        let Payload::Buffers(buffers) = read else {
            panic!("another variant");
        };
        assert_eq!(buffers.capacity(), 3);
        let none = Payload::None;
        // SAFETY: the tag is the first field.
        let tag = unsafe { (&raw const none).cast::<u64>().read() };
        assert_eq!(tag, tag::NONE);
    }
}
