//! Descriptors as the program of a context knows them.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use uverbs::Errno;
use uverbs::kernel::Kernel;

use crate::Result;
use crate::embedded::Embedded;
use crate::files::{ContextFile, File};
use crate::kernel::EmbeddedKernel;

/// Translates between the descriptors of a device and those that a program has,
/// which it may duplicate and close in any order. Called under the device's lock:
/// must not call the device.
pub trait Descriptors: Send + Sync + fmt::Debug {
    /// Returns the device's descriptor, given one of the program. A number that is
    /// neither is returned as it is.
    fn device(&self, program: RawFd) -> RawFd;

    /// Makes a descriptor of the program for a new event file, and returns it. The
    /// device's descriptor is to be passed to [`Kernel::close`] when the last one of
    /// the program is closed.
    ///
    /// # Errors
    /// EMFILE, ENOMEM: the event file is not created.
    fn publish(&self, device: RawFd) -> std::result::Result<RawFd, Errno>;
}

impl Embedded {
    /// Opens the device for a program that uses it through system calls, and returns
    /// its kernel and its descriptor there. Pages of registers are mapped from the
    /// descriptor, which is a file in memory: [`registers`](Self::registers) bytes at its
    /// beginning, and [UARs](Self::uar_offsets) elsewhere.
    ///
    /// # Errors
    /// EMFILE, ENFILE, ENOMEM.
    pub fn open(
        &self,
        descriptors: Arc<dyn Descriptors>,
    ) -> std::result::Result<(Arc<dyn Kernel>, RawFd), Errno> {
        let fd = self.open_file()?;
        let kernel = EmbeddedKernel::new(self.clone(), Some(descriptors));
        Ok((Arc::new(kernel), fd))
    }

    pub(crate) fn open_file(&self) -> Result<RawFd> {
        let (file, fd) = ContextFile::new()?;
        let registers = file.map_registers()?;
        let mut state = self.device.lock();
        state.watch.context(file.id, registers);
        state.files.insert(fd, File::Context(Box::new(file)));
        Ok(fd)
    }

    /// Returns the offsets, in the file that a descriptor has, of the UARs that the
    /// program allocates.
    pub fn uar_offsets() -> std::ops::Range<u64> {
        crate::files::uar_offsets()
    }

    /// Returns how many bytes of registers a descriptor has, besides UARs that the program
    /// allocates.
    pub fn registers() -> usize {
        ContextFile::length()
    }

    /// Returns the port's GID table; empty entries are zero.
    pub fn gids(&self) -> Vec<[u8; 16]> {
        let state = self.device.lock();
        let gid = |index| state.gid_at(index).map_or([0; 16], |entry| entry.gid);
        (0..state.gid_table_length()).map(gid).collect()
    }

    /// Returns the LID of an InfiniBand port; 0 on Ethernet.
    pub fn lid(&self) -> u16 {
        let state = self.device.lock();
        match state.is_ethernet() {
            true => 0,
            false => state.hca.settings().lid,
        }
    }
}
