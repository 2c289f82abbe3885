//! A registration, and the memory that must outlive it.

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

/// Memory with its registration, which outlives every use by the device.
pub struct Registered {
    mr: ManuallyDrop<Mr<Ctx>>,
    /// Our own memory; none where it is somebody else's.
    map: ManuallyDrop<Option<MmapMut>>,
    /// The address that work requests and peers use for the first byte.
    addr: u64,
    len: usize,
    lkey: u32,
    rkey: u32,
    access: AccessFlags,
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
        // The kernel rounds up to pages; said here, so that the size is known.
        // Of huge pages it also unmaps only whole ones: any other length is
        // refused, and the memory would stay.
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
        // SAFETY: the mapping is unmapped only after the registration is gone
        // (`drop`); what the device writes meanwhile is memory that nobody else
        // has access to (a posted buffer), or that is only reached by atomic
        // accesses (a remote region).
        let mr = unsafe { register(domain, addr, len, access) }?;
        Ok(Self::new(domain, mr, Some(map), (addr, len), access))
    }

    /// Registers memory that is somebody else's.
    ///
    /// # Safety
    /// As `ForeignRegion::register`.
    pub(super) unsafe fn foreign(
        domain: &ProtectionDomain,
        memory: NonNull<[u8]>,
        access: AccessFlags,
    ) -> Result<Self> {
        let addr = memory.cast::<u8>().as_ptr().expose_provenance() as u64;
        // SAFETY: passed on to the caller.
        let mr = unsafe { register(domain, addr, memory.len(), access) }?;
        Ok(Self::new(domain, mr, None, (addr, memory.len()), access))
    }

    /// Registers a part of a DMA buffer, which the kernel keeps alive.
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
            mr: ManuallyDrop::new(mr),
            map: ManuallyDrop::new(map),
            addr,
            len,
            access,
            domain: domain.clone(),
        }
    }

    #[inline(always)]
    pub(crate) fn lkey(&self) -> u32 {
        self.lkey
    }

    pub(crate) fn rkey(&self) -> u32 {
        self.rkey
    }

    /// What the device may do here, and peers.
    pub(crate) fn access(&self) -> AccessFlags {
        self.access
    }

    /// The address that the device knows the first byte by.
    #[inline(always)]
    pub(crate) fn addr(&self) -> u64 {
        self.addr
    }

    /// The first byte, of memory of our own.
    pub(super) fn start(&self) -> NonNull<u8> {
        let map = self.map.as_ref();
        map.and_then(|map| NonNull::new(map.as_ptr().cast_mut()))
            .unwrap_or(NonNull::dangling())
    }

    /// Bytes of our own memory that are there.
    pub(super) fn mapped_len(&self) -> usize {
        self.map.as_ref().map_or(0, MmapMut::size)
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn domain(&self) -> &ProtectionDomain {
        &self.domain
    }

    #[inline(always)]
    pub(crate) fn identity(&self) -> Identity {
        self.domain.identity()
    }

    /// Changes what peers may do. The keys may change.
    pub(super) fn set_access(&mut self, access: AccessFlags) -> Result<()> {
        let change = Rereg {
            access: Some(access),
            ..Rereg::default()
        };
        // SAFETY: the memory is the same, and is treated as before: by atomic
        // accesses only, or as its registrant has promised.
        unsafe { self.mr.rereg(&change, Udata::none()) }?;
        self.lkey = self.mr.lkey();
        self.rkey = self.mr.rkey();
        self.access = access;
        Ok(())
    }

    /// Deregisters; the memory is freed by `drop` then.
    fn deregister(&mut self) -> Result<()> {
        // SAFETY: taken here; put back, or replaced by what drops nothing.
        let mr = unsafe { ManuallyDrop::take(&mut self.mr) };
        match mr.destroy() {
            Ok(()) => Ok(()),
            Err((mr, error)) if self.domain.context().is_gone_by(&error) => {
                mr.into_handle();
                Ok(())
            }
            Err((mr, error)) => {
                self.mr = ManuallyDrop::new(mr);
                Err(error.into())
            }
        }
    }

    /// Frees the memory of a registration that is gone.
    fn free(self) {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: taken once, of a value that is not used or dropped after.
        // The registration is gone, so the device does not touch the memory.
        unsafe {
            ManuallyDrop::drop(&mut this.map);
            std::ptr::drop_in_place(&raw mut this.domain);
        }
    }
}

/// Bytes of a huge page of the default size, which is that asked for where none
/// is named.
fn huge_page_size() -> Result<usize> {
    let failed = |error| Error::Map {
        what: "huge pages of a region's memory",
        error,
    };
    let text = std::fs::read_to_string("/proc/meminfo").map_err(failed)?;
    default_huge_page(&text).ok_or(Error::Unsupported { what: "huge pages" })
}

/// The default size in `/proc/meminfo`; no such line in a kernel without huge
/// pages.
fn default_huge_page(meminfo: &str) -> Option<usize> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    let kib: usize = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    let bytes = kib.checked_mul(1024)?;
    bytes.is_power_of_two().then_some(bytes)
}

/// # Safety
/// Until the registration is gone, the device may read the memory, and write it
/// as the access says.
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
    // SAFETY: passed on to the caller.
    Ok(unsafe { Mr::register(domain.context().uverbs(), &init, Udata::none()) }?)
}

/// Deregisters and frees, or gives it back.
pub(super) fn close(memory: Arc<Registered>) -> Result<(), CloseError<Arc<Registered>>> {
    let mut memory = Arc::try_unwrap(memory).map_err(|memory| {
        let error = Error::Busy {
            object: "memory region",
            users: "pieces of it, or operations in flight",
        };
        CloseError::new(memory, error)
    })?;
    match memory.deregister() {
        Ok(()) => {
            memory.free();
            Ok(())
        }
        Err(error) => Err(CloseError::new(Arc::new(memory), error)),
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Err(error) = self.deregister() {
            // The device may still write there: the memory stays.
            tracing::error!(%error, "memory leaked: it could not be deregistered");
            return;
        }
        // SAFETY: the registration is gone, so the device does not touch the
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
    fn the_default_size_of_a_huge_page_is_found() {
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
