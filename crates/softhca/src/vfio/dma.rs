//! The guest's memory as this process has mapped it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering, fence};
use std::time::Instant;

use mmap_rs::{MmapFlags, MmapMut, MmapOptions};
use nix::sys::eventfd::EventFd;

use crate::platform::{Clock, Interrupts, Memory, Unmapped};

/// A region of the guest's address space.
struct Region {
    address: u64,
    size: u64,
    /// Regions that QEMU gives no file for are known and cannot be accessed:
    /// the firmware, the display.
    mapping: Option<MmapMut>,
}

impl Region {
    fn end(&self) -> u64 {
        // Checked when the region was added.
        self.address + self.size
    }
}

/// What a guest under QEMU is to the engine.
pub struct Guest {
    /// By address, without overlap.
    regions: Vec<Region>,
    vectors: Vec<Option<EventFd>>,
    began: Instant,
    started: u64,
}

/// Why a region was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotMapped {
    /// It overlaps another one, or is empty, or ends past the address space.
    Range,
    /// The file cannot be mapped.
    File,
}

impl Guest {
    /// No memory, no interrupts.
    pub fn new(vectors: usize) -> Guest {
        Guest {
            regions: Vec::new(),
            vectors: (0..vectors).map(|_| None).collect(),
            began: Instant::now(),
            started: 1,
        }
    }

    /// Makes a region accessible, by the file that has it.
    ///
    /// # Errors
    /// See [`NotMapped`].
    pub fn map(
        &mut self,
        address: u64,
        size: u64,
        file: Option<(OwnedFd, u64)>,
    ) -> Result<(), NotMapped> {
        let end = address.checked_add(size).ok_or(NotMapped::Range)?;
        let overlaps = self
            .regions
            .iter()
            .any(|region| region.address < end && address < region.end());
        if size == 0 || overlaps {
            return Err(NotMapped::Range);
        }
        let mapping = match file {
            None => None,
            Some((fd, offset)) => {
                let length = usize::try_from(size).map_err(|_| NotMapped::Range)?;
                let file = File::from(fd);
                // Past the file's end an access would be a bus error.
                let there = file.metadata().map_err(|_| NotMapped::File)?.len();
                if offset.checked_add(size).is_none_or(|end| end > there) {
                    return Err(NotMapped::File);
                }
                // SAFETY: the mapping is shared with QEMU and the guest, who
                // write to it at any time; it is only accessed by copying
                // through raw pointers and by atomics, never by reference.
                let options = unsafe {
                    MmapOptions::new(length)
                        .map_err(|_| NotMapped::File)?
                        .with_flags(MmapFlags::SHARED)
                        .with_file(&file, offset)
                };
                Some(options.map_mut().map_err(|_| NotMapped::File)?)
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

    /// Takes away all regions within a range.
    pub fn unmap(&mut self, address: u64, size: u64) {
        let end = address.saturating_add(size);
        self.regions
            .retain(|region| region.address < address || region.end() > end);
    }

    /// Takes away all memory.
    pub fn unmap_all(&mut self) {
        self.regions.clear();
    }

    /// Sets what is signalled for a vector.
    pub fn set_vector(&mut self, vector: usize, event: Option<EventFd>) {
        if let Some(place) = self.vectors.get_mut(vector) {
            *place = event;
        }
    }

    /// Where an address is in this process, if all of `length` bytes are in
    /// one region.
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
        // In bounds: `offset + length` is at most the mapping's length.
        Ok(mapping.as_ptr().cast_mut().wrapping_add(offset as usize))
    }
}

impl Memory for Guest {
    fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Unmapped> {
        let from = self.locate(address, out.len())?;
        // SAFETY: `locate` has checked that so many bytes are mapped; `out`
        // is this process's own memory and does not overlap the mapping. The
        // guest may write meanwhile: the bytes are then old or new ones, and
        // all values are valid.
        unsafe { ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    fn write(&self, address: u64, data: &[u8]) -> Result<(), Unmapped> {
        let to = self.locate(address, data.len())?;
        // SAFETY: as in `read`; the mapping is writable, and nobody holds a
        // reference to its bytes.
        unsafe { ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
        Ok(())
    }

    fn publish(&self, address: u64, byte: u8) -> Result<(), Unmapped> {
        let to = self.locate(address, 1)?;
        // SAFETY: in bounds, as `locate` has checked; a byte is aligned.
        let cell = unsafe { AtomicU8::from_ptr(to) };
        // Orders the entry's bytes before its owner bit; the guest's driver
        // reads the bit and then has a read barrier.
        cell.store(byte, Ordering::Release);
        Ok(())
    }

    fn read_index(&self, address: u64) -> Result<u32, Unmapped> {
        let from = self.locate(address, 4)?;
        let word = if from.cast::<u32>().is_aligned() {
            // SAFETY: in bounds, as `locate` has checked, and aligned.
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
            // It can only fail when the counter is full, and then one is
            // pending anyway.
            let _ = event.write(1);
        }
    }
}

impl Clock for Guest {
    fn now(&self) -> u64 {
        self.started + self.began.elapsed().as_nanos() as u64
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
    fn only_what_is_mapped_is_accessed() {
        let mut guest = Guest::new(1);
        guest
            .map(0x1_0000, 0x2000, Some((memory(0x3000), 0x1000)))
            .unwrap();
        guest.map(0xa_0000, 0x1000, None).unwrap();
        let short = Some((memory(0x3000), 0x2000));
        assert_eq!(guest.map(0x5_0000, 0x2000, short), Err(NotMapped::File));
        assert_eq!(guest.map(0x1_1000, 0x2000, None), Err(NotMapped::Range));
        assert_eq!(guest.map(u64::MAX, 2, None), Err(NotMapped::Range));
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
