//! Registered memory of our own.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use mmap_rs::{MmapFlags, MmapMut, MmapOptions};
use uverbs::{AccessFlags, Mr, MrInit, Udata};

use crate::context::Ctx;
use crate::memory::Buffer;
use crate::pd::Identity;
use crate::{Error, ProtectionDomain, Result};

/// Memory that was allocated and registered here, for operations posted here:
/// no peer can reach it by its own doing.
///
/// It is whole pages, filled with zeros, pinned until the last piece of it is
/// dropped. [`Region::into_buffer`] gives the memory, to be cut into pieces.
pub struct Region {
    pub(crate) memory: Arc<Registered>,
}

/// Memory with its registration, which outlives every use by the device.
pub(crate) struct Registered {
    mr: ManuallyDrop<Mr<Ctx>>,
    map: ManuallyDrop<MmapMut>,
    lkey: u32,
    rkey: u32,
    domain: ProtectionDomain,
}

// SAFETY: the mapping is plain memory that no thread is tied to; whoever hands
// out access to it says who may touch which part.
unsafe impl Send for Registered {}
// SAFETY: as above; this type's own methods only read plain values.
unsafe impl Sync for Registered {}

impl Registered {
    /// Allocates and registers whole pages, at least `len` bytes.
    pub(crate) fn alloc(
        domain: &ProtectionDomain,
        len: usize,
        flags: MmapFlags,
        access: AccessFlags,
    ) -> Result<Self> {
        if len == 0 {
            return Err(Error::Invalid {
                what: "a region of no bytes",
            });
        }
        let map = MmapOptions::new(len)
            .map(|options| options.with_flags(flags))
            .and_then(MmapOptions::map_mut)
            .map_err(|error| Error::Map {
                what: "region's memory",
                error: to_io(error),
            })?;
        let addr = map.as_ptr().expose_provenance() as u64;
        let init = MrInit {
            pd: domain.handle(),
            addr,
            length: map.size() as u64,
            iova: addr,
            access,
        };
        // SAFETY: the mapping is unmapped only after the registration is gone
        // (`drop`); what the device writes meanwhile is memory that nobody else
        // has access to (a posted buffer), or that is only reached by volatile
        // accesses (a remote region).
        let mr = unsafe { Mr::register(domain.context().uverbs(), &init, Udata::none()) }?;
        Ok(Self {
            lkey: mr.lkey(),
            rkey: mr.rkey(),
            mr: ManuallyDrop::new(mr),
            map: ManuallyDrop::new(map),
            domain: domain.clone(),
        })
    }

    #[inline(always)]
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    #[allow(dead_code, reason = "for remote regions")]
    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        NonNull::new(self.map.as_ptr().cast_mut()).unwrap_or(NonNull::dangling())
    }

    pub(crate) fn len(&self) -> usize {
        self.map.size()
    }

    pub(crate) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    #[inline(always)]
    pub(crate) fn identity(&self) -> Identity {
        self.domain.identity()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: taken here only, and not used afterwards.
        let mr = unsafe { ManuallyDrop::take(&mut self.mr) };
        if let Err((mr, error)) = mr.destroy()
            && !error.is_device_gone()
        {
            // The device may still write there: the memory stays.
            tracing::error!(%error, "memory leaked: it could not be deregistered");
            mr.into_handle();
            return;
        }
        // SAFETY: the region is deregistered, so the device does not touch the
        // memory any more, and nobody else holds a part of it.
        unsafe { ManuallyDrop::drop(&mut self.map) };
    }
}

fn to_io(error: mmap_rs::Error) -> std::io::Error {
    match error {
        mmap_rs::Error::Nix(errno) => std::io::Error::from_raw_os_error(errno as i32),
        mmap_rs::Error::Io(error) => error,
        _ => std::io::Error::from_raw_os_error(libc::EINVAL),
    }
}

impl Region {
    /// Allocates and registers `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// ENOMEM over the locked memory limit (`ulimit -l`) or without memory.
    pub fn alloc(domain: &ProtectionDomain, len: usize) -> Result<Self> {
        Self::with_flags(domain, len, MmapFlags::empty())
    }

    /// As [`Region::alloc`], in huge pages where the system has some to give:
    /// fewer entries in the device's translation table.
    ///
    /// # Errors
    /// As there; ENOMEM if no huge pages were reserved
    /// (`/proc/sys/vm/nr_hugepages`).
    pub fn alloc_huge(domain: &ProtectionDomain, len: usize) -> Result<Self> {
        Self::with_flags(domain, len, MmapFlags::HUGE_PAGES)
    }

    fn with_flags(domain: &ProtectionDomain, len: usize, flags: MmapFlags) -> Result<Self> {
        let memory = Registered::alloc(domain, len, flags, AccessFlags::LOCAL_WRITE)?;
        Ok(Self {
            memory: Arc::new(memory),
        })
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether it has no bytes; it never has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The domain that it is registered in.
    pub fn domain(&self) -> &ProtectionDomain {
        self.memory.domain()
    }

    /// All of its memory, as one buffer.
    pub fn into_buffer(self) -> Buffer {
        Buffer::whole(self)
    }

    /// All of its memory, cut into buffers of `size` bytes; the last may be
    /// shorter.
    pub fn into_buffers(self, size: usize) -> impl Iterator<Item = Buffer> {
        let mut rest = Some(self.into_buffer());
        std::iter::from_fn(move || {
            let mut piece = rest.take()?;
            if size > 0 && size < piece.capacity() {
                rest = Some(piece.split_off(size));
            }
            Some(piece)
        })
    }

    /// Deregisters and frees the memory.
    ///
    /// # Errors
    /// The kernel's reason, with the region.
    pub fn close(self) -> Result<(), (Self, Error)> {
        // A region is the only owner of its memory: buffers are made of it by
        // giving it up.
        drop(self);
        Ok(())
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("len", &self.len()).finish()
    }
}
