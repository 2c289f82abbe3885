//! Advice about memory that is to be used.

use uverbs::{Advice, AdviseFlags, Sge};

use crate::memory::{Buffer, MemorySlice, Region, Registered};
use crate::{Error, ProtectionDomain, Result};

use sealed::Extent;

/// Memory that a device can be advised of ([`ProtectionDomain::advise`]).
///
/// All of a [`Region`]; a [`Buffer`] up to its capacity; a [`MemorySlice`],
/// which is how [`RemoteRegion`](crate::RemoteRegion) and
/// [`ForeignRegion`](crate::ForeignRegion) come. References to them, so that
/// nothing has to be given away for it, and so that a list can have all kinds:
/// `&[&region as &dyn Advisable, &slice]`.
pub trait Advisable: sealed::Extent {}

mod sealed {
    use crate::memory::Registered;

    pub trait Extent {
        /// The registration, the address that the device knows the first byte
        /// by, and bytes.
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

/// Bytes of one element, which has 32 bits for them: whole pages of any size.
const MAX_ELEMENT: usize = 1 << 31;

/// Elements of one command: an attribute of the kernel's has at most 65535
/// bytes.
const MAX_ELEMENTS: usize = u16::MAX as usize / size_of::<Sge>();

impl ProtectionDomain {
    /// Advises the device about memory of on-demand regions that is to be used,
    /// however long: what is over 2 GiB goes as several elements, and what is
    /// over 4095 elements as several commands.
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
    /// [`Error::WrongDomain`], and nothing was advised; EOPNOTSUPP of a device
    /// that takes no advice. Memory of no bytes asks for nothing.
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
                // Modulo 2^64: an address of a DMA buffer's is its owner's choice.
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
