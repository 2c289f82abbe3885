//! Memory advice (`ibv_advise_mr`).

use uverbs::{Advice, AdviseFlags, Sge};

use crate::memory::{Buffer, MemorySlice, Region, Registered};
use crate::{Error, ProtectionDomain, Result};

use sealed::Extent;

/// Memory that [`ProtectionDomain::advise`] accepts.
///
/// A [`Region`] with its whole length, a [`Buffer`] with its capacity, or a
/// [`MemorySlice`] of a [`RemoteRegion`](crate::RemoteRegion) or
/// [`ForeignRegion`](crate::ForeignRegion). References implement it too, so the
/// caller keeps ownership and one list can mix types: `&[&region as &dyn
/// Advisable, &slice]`.
pub trait Advisable: sealed::Extent {}

mod sealed {
    use crate::memory::Registered;

    pub trait Extent {
        /// Returns the registration, the device's address of the first byte, and the length
        /// in bytes.
        #[doc(hidden)]
        fn extent(&self) -> (&Registered, u64, usize);
    }
}

impl Extent for Region {
    fn extent(&self) -> (&Registered, u64, usize) {
        (&self.memory, self.memory.addr(), self.len())
    }
}

impl Extent for Buffer {
    fn extent(&self) -> (&Registered, u64, usize) {
        (self.memory(), self.device_addr(), self.capacity())
    }
}

impl Extent for MemorySlice {
    fn extent(&self) -> (&Registered, u64, usize) {
        (self.memory(), self.device_addr(), self.len())
    }
}

impl<T: Extent + ?Sized> Extent for &T {
    fn extent(&self) -> (&Registered, u64, usize) {
        (**self).extent()
    }
}

impl Advisable for Region {}
impl Advisable for Buffer {}
impl Advisable for MemorySlice {}
impl<T: Advisable + ?Sized> Advisable for &T {}

/// Maximum bytes of one SGE, whose length field has 32 bits. A multiple of all
/// page sizes.
const MAX_ELEMENT: usize = 1 << 31;

/// Maximum SGEs of one command: an attribute of the kernel interface has at most
/// 65535 bytes.
const MAX_ELEMENTS: usize = u16::MAX as usize / size_of::<Sge>();

impl ProtectionDomain {
    /// Advises the device of the expected use of on-demand memory. The length is not
    /// limited: more than 2 GiB is passed as several SGEs, and more than 4095 SGEs as
    /// several commands. Empty memory is skipped.
    ///
    /// ```no_run
    /// # fn f(domain: ringverbs::ProtectionDomain) -> Result<(), ringverbs::Error> {
    /// use ringverbs::{Advice, AdviseFlags, Region};
    /// let region = Region::alloc_on_demand(&domain, 1 << 30)?;
    /// domain.advise(Advice::PREFETCH_WRITE, AdviseFlags::FLUSH, &[&region])?;
    /// let buffer = region.into_buffer();
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`Error::WrongDomain`] before anything is advised; EOPNOTSUPP if the
    /// device does not support advice.
    pub fn advise(
        &self,
        advice: Advice,
        flags: AdviseFlags,
        memory: &[impl Advisable],
    ) -> Result<()> {
        let mut list = Vec::with_capacity(memory.len());
        for piece in memory {
            let (registered, mut addr, mut rest) = piece.extent();
            if registered.identity() != self.identity() {
                return Err(Error::WrongDomain { what: "memory" });
            }
            while rest > 0 {
                let length = rest.min(MAX_ELEMENT);
                list.push(Sge {
                    addr,
                    length: length as u32,
                    lkey: registered.lkey(),
                });
                // Modulo 2^64: the caller chooses the address of a DMA buffer.
                addr = addr.wrapping_add(length as u64);
                rest -= length;
            }
        }
        let context = self.context().uverbs();
        for part in list.chunks(MAX_ELEMENTS) {
            context.advise_mr(self.handle(), advice, flags, part)?;
        }
        Ok(())
    }
}
