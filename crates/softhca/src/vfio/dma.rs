//! Guest memory, mapped into this process.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering, fence};
use std::time::Instant;

use mmap_rs::{MmapFlags, MmapMut, MmapOptions};
use nix::sys::eventfd::EventFd;

use crate::platform::{Clock, Interrupts, Memory, Peers, Unmapped};

/// A region of the DMA address space of the guest.
struct Region {
    address: u64,
    size: u64,
    /// None if QEMU gave no file, as for firmware and display. Such a region is
    /// known but inaccessible.
    mapping: Option<MmapMut>,
}

impl Region {
    fn end(&self) -> u64 {
        // `Guest::map` checked that this does not overflow.
        self.address + self.size
    }
}

/// The platform of an HCA whose guest runs under QEMU.
pub struct Guest {
    /// Sorted by address, without overlap.
    regions: Vec<Region>,
    vectors: Vec<Option<EventFd>>,
    epoch: Instant,
    epoch_time: u64,
}

/// Reasons for which a region cannot be mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapError {
    /// The region overlaps another one, is empty, or exceeds the address space.
    Range,
    /// The file cannot be mapped.
    File,
}

impl Guest {
    /// Creates a guest without memory or interrupts.
    pub fn new(vectors: usize) -> Guest {
        Guest {
            regions: Vec::new(),
            vectors: (0..vectors).map(|_| None).collect(),
            epoch: Instant::now(),
            epoch_time: 1,
        }
    }

    /// Maps a region of a file. Without a file, the region is recorded but
    /// inaccessible.
    ///
    /// # Errors
    /// See [`MapError`].
    pub fn map(
        &mut self,
        address: u64,
        size: u64,
        file: Option<(OwnedFd, u64)>,
    ) -> Result<(), MapError> {
        let end = address.checked_add(size).ok_or(MapError::Range)?;
        let overlaps = self
            .regions
            .iter()
            .any(|region| region.address < end && address < region.end());
        if size == 0 || overlaps {
            return Err(MapError::Range);
        }
        let mapping = match file {
            None => None,
            Some((fd, offset)) => {
                let length = usize::try_from(size).map_err(|_| MapError::Range)?;
                let file = File::from(fd);
                // An access past the end of the file would raise SIGBUS.
                let file_size = file.metadata().map_err(|_| MapError::File)?.len();
                if offset.checked_add(size).is_none_or(|end| end > file_size) {
                    return Err(MapError::File);
                }
                // SAFETY: QEMU and the guest share the mapping and write to it at
                // any time. It is accessed only by copies through raw pointers and
                // by atomics, never through references.
                let options = unsafe {
                    MmapOptions::new(length)
                        .map_err(|_| MapError::File)?
                        .with_flags(MmapFlags::SHARED)
                        .with_file(&file, offset)
                };
                Some(options.map_mut().map_err(|_| MapError::File)?)
            }
        };
        let at = self.regions.partition_point(|r| r.address < address);
        self.regions.insert(
            at,
            Region {
                address,
                size,
                mapping,
            },
        );
        Ok(())
    }

    /// Removes all regions within a range.
    pub fn unmap(&mut self, address: u64, size: u64) {
        let end = address.saturating_add(size);
        self.regions
            .retain(|region| region.address < address || region.end() > end);
    }

    /// Removes all regions.
    pub fn unmap_all(&mut self) {
        self.regions.clear();
    }

    /// Sets the eventfd of an interrupt vector.
    pub fn set_vector(&mut self, vector: usize, event: Option<EventFd>) {
        if let Some(entry) = self.vectors.get_mut(vector) {
            *entry = event;
        }
    }

    /// Returns the address in this process if all `length` bytes are in one mapped
    /// region.
    fn locate(&self, address: u64, length: usize) -> Result<*mut u8, Unmapped> {
        let unmapped = Unmapped { address };
        let at = self.regions.partition_point(|r| r.end() <= address);
        let region = self.regions.get(at).ok_or(unmapped)?;
        let mapping = region.mapping.as_ref().ok_or(unmapped)?;
        let offset = address.checked_sub(region.address).ok_or(unmapped)?;
        let end = offset.checked_add(length as u64).ok_or(unmapped)?;
        if end > region.size {
            return Err(unmapped);
        }
        // In bounds: `offset + length` is at most the length of the mapping.
        Ok(mapping.as_ptr().cast_mut().wrapping_add(offset as usize))
    }
}

impl Memory for Guest {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Unmapped> {
        let from = self.locate(address, out.len())?;
        // SAFETY: `locate` checked that `out.len()` bytes are mapped at `from`.
        // `out` is this process's own memory and does not overlap the mapping. The
        // guest may write concurrently; the copy then has old or new bytes, all of
        // which are valid values.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn write(&self, address: u64, data: &[u8]) -> Result<(), Unmapped> {
        let to = self.locate(address, data.len())?;
        // SAFETY: as in `read`. The mapping is writable, and nothing holds a
        // reference to its bytes.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    fn publish(&self, address: u64, byte: u8) -> Result<(), Unmapped> {
        let to = self.locate(address, 1)?;
        // SAFETY: `locate` checked that the byte is in bounds; a byte is always
        // aligned.
        let cell = unsafe { AtomicU8::from_ptr(to) };
        // Orders the bytes of the entry before its owner bit. The guest's driver
        // reads the bit, followed by a read barrier.
        cell.store(byte, Ordering::Release);
        Ok(())
    }

    fn read_index(&self, address: u64) -> Result<u32, Unmapped> {
        let from = self.locate(address, 4)?;
        let word = if from.cast::<u32>().is_aligned() {
            // SAFETY: `locate` checked that the word is in bounds, and it is
            // aligned.
            let cell = unsafe { AtomicU32::from_ptr(from.cast()) };
            cell.load(Ordering::Acquire).to_ne_bytes()
        } else {
            let mut bytes = [0; 4];
            self.read(address, &mut bytes)?;
            fence(Ordering::Acquire);
            bytes
        };
        Ok(u32::from_be_bytes(word))
    }
}

impl Interrupts for Guest {
    fn interrupt(&mut self, vector: u16) {
        if let Some(Some(event)) = self.vectors.get(usize::from(vector)) {
            // Writing fails only if the counter is full; then an interrupt is
            // pending anyway.
            let _ = event.write(1);
        }
    }
}

impl Peers for Guest {}

impl Clock for Guest {
    fn now(&self) -> u64 {
        self.epoch_time + self.epoch.elapsed().as_nanos() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};

    fn memory(size: u64) -> OwnedFd {
        let fd = memfd_create(c"softhca-test", MFdFlags::MFD_CLOEXEC).unwrap();
        File::from(fd.try_clone().unwrap()).set_len(size).unwrap();
        fd
    }

    #[test]
    fn accesses_outside_of_mappings_fail() {
        let mut guest = Guest::new(1);
        guest
            .map(0x1_0000, 0x2000, Some((memory(0x3000), 0x1000)))
            .unwrap();
        guest.map(0xa_0000, 0x1000, None).unwrap();
        let short = Some((memory(0x3000), 0x2000));
        assert_eq!(guest.map(0x5_0000, 0x2000, short), Err(MapError::File));
        assert_eq!(guest.map(0x1_1000, 0x2000, None), Err(MapError::Range));
        assert_eq!(guest.map(u64::MAX, 2, None), Err(MapError::Range));
        guest.write(0x1_1ffc, &[1, 2, 3, 4]).unwrap();
        assert_eq!(guest.read_index(0x1_1ffc), Ok(0x0102_0304));
        guest.publish(0x1_1fff, 9).unwrap();
        assert_eq!(guest.read_index(0x1_1ffc), Ok(0x0102_0309));
        let mut out = [0; 4];
        for address in [0, 0xffff, 0x1_1ffd, 0x1_2000, 0xa_0000, u64::MAX] {
            assert!(guest.read(address, &mut out).is_err(), "{address:#x}");
        }
        guest.unmap(0x1_0000, 0x2000);
        assert!(guest.read(0x1_0000, &mut out).is_err());
    }
}
