//! What operations move: from, or to, which memory of this process.

use crate::device::{Sge, Wqe};
use crate::memory::Buffer;
use crate::pd::Identity;
use crate::{Error, Result};

/// Memory that an operation sends from or writes from.
///
/// [`Buffer`]; a `Vec` of them, gathered in order; [`Inline`] bytes, which are
/// copied at once; `()` for no data.
pub trait Source: Data {}

/// Memory that an operation receives into or reads into.
///
/// [`Buffer`]; a `Vec` of them, filled in order; `()` for no data.
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
    }
}

/// The memory of an operation in flight.
#[derive(Debug, Default)]
pub enum Payload {
    /// None.
    #[default]
    None,
    /// One buffer.
    Buffer(Buffer),
    /// Several.
    Buffers(Vec<Buffer>),
}

/// Elements that a list may have at most; more than any device takes.
const MAX_ELEMENTS: usize = 64;

/// The longest message that there is.
const MAX_MESSAGE: u64 = rxe::MAX_MESSAGE as u64;

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
    Error::WrongDomain { what: "buffer" }
}

/// The element for `length` bytes of a buffer.
#[inline(always)]
fn element(buffer: &Buffer, length: usize, domain: Identity) -> Result<Sge> {
    if buffer.memory().identity() != domain {
        return Err(wrong_domain());
    }
    if length as u64 > MAX_MESSAGE {
        return Err(too_long(length));
    }
    Ok(Sge {
        addr: buffer.device_addr(),
        length: length as u32,
        lkey: buffer.memory().lkey(),
    })
}

impl Data for Buffer {
    #[inline(always)]
    fn gather(&self, wqe: &mut Wqe<'_>, domain: Identity) -> Result<u32> {
        wqe.sge(element(self, self.len(), domain)?)
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
        post(&[element(self, self.capacity(), domain)?])
    }

    #[inline(always)]
    fn hold(self) -> Payload {
        Payload::Buffer(self)
    }
}

impl Source for Buffer {}
impl Sink for Buffer {}

/// Calls `then` with the elements for a list of buffers.
fn elements<R>(
    buffers: &[Buffer],
    length: impl Fn(&Buffer) -> usize,
    max: u32,
    domain: Identity,
    then: impl FnOnce(&[Sge]) -> Result<R>,
) -> Result<R> {
    let mut list = [Sge::default(); MAX_ELEMENTS];
    let mut used = 0;
    let mut total = 0u64;
    for buffer in buffers {
        let length = length(buffer);
        let element = element(buffer, length, domain)?;
        // An element of no bytes means 2 GiB to some devices.
        if length == 0 {
            continue;
        }
        if used == (max as usize).min(MAX_ELEMENTS) {
            return Err(too_many(buffers.len(), max));
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

impl Data for Vec<Buffer> {
    fn gather(&self, wqe: &mut Wqe<'_>, domain: Identity) -> Result<u32> {
        let max = wqe.max_sge();
        elements(
            self,
            |buffer| buffer.len(),
            max,
            domain,
            |list| wqe.sge_list(list),
        )
    }

    fn scatter<R>(
        &self,
        max: u32,
        domain: Identity,
        post: impl FnOnce(&[Sge]) -> Result<R>,
    ) -> Result<R> {
        elements(self, Buffer::capacity, max, domain, post)
    }

    fn hold(self) -> Payload {
        Payload::Buffers(self)
    }
}

impl Source for Vec<Buffer> {}
impl Sink for Vec<Buffer> {}

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
            Self::None => {}
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
            Self::None => Vec::new(),
            Self::Buffer(buffer) => vec![buffer],
            Self::Buffers(buffers) => buffers,
        }
    }
}
