//! Registrations and the memory that must outlive them.

use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use mmap_rs::{MmapFlags, MmapMut, MmapOptions};
use uverbs::{AccessFlags, DmabufMrInit, Mr, MrInit, Rereg, Udata};

use crate::context::Ctx;
use crate::pd::Identity;
use crate::{CloseError, Error, ProtectionDomain, Result};

/// A registration with its memory, which outlives every use by the device.
pub struct Registered {
    mr: Mr<Ctx>,
    /// The mapping; `None` if the caller owns the memory.
    map: ManuallyDrop<Option<MmapMut>>,
    /// The address of the first byte in work requests and for peers.
    addr: u64,
    len: usize,
    lkey: u32,
    rkey: u32,
    access: AccessFlags,
    domain: ProtectionDomain,
}

// SAFETY: the mapping is plain memory that is not tied to a thread. The types
// that give access to it decide who may access which part.
unsafe impl Send for Registered {}
// SAFETY: as above; the methods of this type only read plain values.
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
                what: "the length of a region must not be zero",
            });
        }
        // The kernel rounds up to pages; rounding here gives the actual size. munmap
        // refuses a length that is not a multiple of the huge page size, which would leak
        // the mapping.
        let page = if flags.contains(MmapFlags::HUGE_PAGES) {
            huge_page_size()?
        } else {
            MmapOptions::page_size()
        };
        let len = len.checked_next_multiple_of(page).ok_or(Error::NoMemory)?;
        let map = MmapOptions::new(len)
            .map(|options| options.with_flags(flags))
            .and_then(MmapOptions::map_mut)
            .map_err(|error| Error::Map {
                what: "region's memory",
                error: to_io(error),
            })?;
        let addr = map.as_ptr().expose_provenance() as u64;
        let len = map.size();
        // SAFETY: the mapping is unmapped only after the registration is
        // destroyed (`drop`). Until then, memory that the device writes is
        // accessed by nothing else (a posted buffer), or is accessed only
        // atomically (a remote region).
        let mr = unsafe { register(domain, addr, len, access) }?;
        Ok(Self::new(domain, mr, Some(map), (addr, len), access))
    }

    /// Registers memory that the caller owns.
    ///
    /// # Safety
    /// As `ForeignRegion::register`.
    pub(super) unsafe fn foreign(
        domain: &ProtectionDomain,
        memory: NonNull<[u8]>,
        access: AccessFlags,
    ) -> Result<Self> {
        let addr = memory.cast::<u8>().as_ptr().expose_provenance() as u64;
        // SAFETY: the caller's obligation.
        let mr = unsafe { register(domain, addr, memory.len(), access) }?;
        Ok(Self::new(domain, mr, None, (addr, memory.len()), access))
    }

    /// Registers part of a DMA buffer, which the kernel keeps alive.
    pub(super) fn dmabuf(
        domain: &ProtectionDomain,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        let init = DmabufMrInit {
            pd: domain.handle(),
            offset,
            length: len as u64,
            iova,
            fd: Some(fd),
            access,
            driver_access: None,
        };
        let mr = Mr::register_dmabuf(domain.context().uverbs(), &init, Udata::none())?;
        Ok(Self::new(domain, mr, None, (iova, len), access))
    }

    fn new(
        domain: &ProtectionDomain,
        mr: Mr<Ctx>,
        map: Option<MmapMut>,
        (addr, len): (u64, usize),
        access: AccessFlags,
    ) -> Self {
        Self {
            lkey: mr.lkey(),
            rkey: mr.rkey(),
            mr,
            map: ManuallyDrop::new(map),
            addr,
            len,
            access,
            domain: domain.clone(),
        }
    }

    #[inline]
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Returns the access rights of the device and of peers.
    pub(crate) fn access(&self) -> AccessFlags {
        self.access
    }

    /// Returns the device's address of the first byte.
    #[inline]
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// Returns the first byte of the mapping; dangling without a mapping.
    pub(super) fn start(&self) -> NonNull<u8> {
        let map = self.map.as_ref();
        map.and_then(|map| NonNull::new(map.as_ptr().cast_mut()))
            .unwrap_or(NonNull::dangling())
    }

    /// Returns the length of the mapping in bytes; 0 without a mapping.
    pub(super) fn mapped_len(&self) -> usize {
        self.map.as_ref().map_or(0, MmapMut::size)
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    #[inline]
    pub(crate) fn identity(&self) -> Identity {
        self.domain.identity()
    }

    /// Changes the access rights of peers. The keys may change.
    pub(super) fn set_access(&mut self, access: AccessFlags) -> Result<()> {
        let change = Rereg {
            access: Some(access),
            ..Rereg::default()
        };
        // SAFETY: the memory is the same and is accessed as before: atomically
        // only, or as the caller of `foreign` promised.
        unsafe { self.mr.rereg(&change, Udata::none()) }?;
        self.lkey = self.mr.lkey();
        self.rkey = self.mr.rkey();
        self.access = access;
        Ok(())
    }

    /// Deregisters the memory; `drop` then frees it.
    fn deregister(&self) -> Result<()> {
        match self.mr.destroy() {
            Ok(()) => Ok(()),
            Err(_) if self.mr.has_ended() => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Returns the default size of a huge page in bytes, which MAP_HUGETLB without a
/// size uses.
fn huge_page_size() -> Result<usize> {
    let failed = |error| Error::Map {
        what: "huge pages of a region's memory",
        error,
    };
    let text = std::fs::read_to_string("/proc/meminfo").map_err(failed)?;
    default_huge_page(&text).ok_or(Error::Unsupported { what: "huge pages" })
}

/// Parses the default size from `/proc/meminfo`. A kernel without huge pages has
/// no such line.
fn default_huge_page(meminfo: &str) -> Option<usize> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let bytes = kib.checked_mul(1024)?;
    bytes.is_power_of_two().then_some(bytes)
}

/// # Safety
/// Until the registration is destroyed, the device may read the memory, and write
/// it as `access` allows.
unsafe fn register(
    domain: &ProtectionDomain,
    addr: u64,
    len: usize,
    access: AccessFlags,
) -> Result<Mr<Ctx>> {
    let init = MrInit {
        pd: domain.handle(),
        addr,
        length: len as u64,
        iova: addr,
        access,
    };
    // SAFETY: the caller's obligation.
    Ok(unsafe { Mr::register(domain.context().uverbs(), &init, Udata::none()) }?)
}

/// Deregisters and frees the memory, or returns it with the error.
pub(super) fn close(memory: Arc<Registered>) -> Result<(), CloseError<Arc<Registered>>> {
    let memory = Arc::try_unwrap(memory).map_err(|memory| {
        let error = Error::Busy {
            object: "memory region",
            users: "pieces of it, or operations in flight",
        };
        CloseError::new(memory, error)
    })?;
    match memory.deregister() {
        Ok(()) => Ok(()),
        Err(error) => Err(CloseError::new(Arc::new(memory), error)),
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if !self.mr.has_ended() {
            if let Err(error) = self.deregister() {
                // The device may still write to the memory, so it is not unmapped.
                tracing::error!(%error, "memory leaked: it could not be deregistered");
                return;
            }
        }
        // SAFETY: the registration is destroyed, so the device does not access
        // the memory, and no piece of it exists any more.
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

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("len", &self.len)
            .field("lkey", &format_args!("{:#x}", self.lkey))
            .field("rkey", &format_args!("{:#x}", self.rkey))
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::default_huge_page;

    #[test]
    fn default_huge_page_size_is_parsed() {
        let text = "HugePages_Total:       8\nHugepagesize:       2048 kB\nHugetlb: 0 kB\n";
        assert_eq!(default_huge_page(text), Some(2 << 20));
        assert_eq!(
            default_huge_page("Hugepagesize: 524288 kB"),
            Some(512 << 20)
        );
        for none in [
            "MemTotal: 1 kB\n",
            "Hugepagesize: 0 kB",
            "Hugepagesize: 3 kB",
            "Hugepagesize: x kB",
            "Hugepagesize: 99999999999999999999 kB",
        ] {
            assert_eq!(default_huge_page(none), None, "{none}");
        }
    }
}
