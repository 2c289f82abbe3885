//! Devices for programs that use them through system calls.

use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Instant;

use uverbs::Errno;
use uverbs::abi::verbs::GidEntry;
use uverbs::kernel::Kernel;

use crate::Result;
use crate::driver::descriptors::Descriptors;
use crate::driver::files::{ContextFile, File, UarCounts};
use crate::driver::inherited::InheritedContext;
use crate::runtime::embedded::Embedded;
use crate::runtime::kernel::EmbeddedKernel;

impl Embedded {
    /// Opens the device for a program that uses it through system calls, and returns its
    /// kernel and the device's descriptor. Pages are mapped from the descriptor, an in-memory
    /// file, at the offsets that [`mapping_offset`](Self::mapping_offset) returns. Reading
    /// events does not block.
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

    /// Returns a context, by the device's descriptor, that a child of fork can have, too: one
    /// without queues and regions. `None` also if the device is busy for too long. In the child,
    /// handles of new objects differ from all of its parent.
    pub fn inheritable(&self, fd: RawFd, until: Instant) -> Option<InheritedContext> {
        let state = self.device.lock_until(until)?;
        state.objects.number_children_after();
        state.inheritable(fd)
    }

    /// Makes contexts of the parent process anew, each with the file of its descriptor, before
    /// any is opened. Returns the kernel and the descriptor of each, with those of its event
    /// files ([`InheritedContext::events`]).
    ///
    /// # Errors
    /// ENOMEM, EMFILE; EINVAL for another file.
    #[allow(clippy::type_complexity, reason = "used once")]
    pub fn adopt(
        &self,
        contexts: Vec<(InheritedContext, OwnedFd)>,
        descriptors: &[Arc<dyn Descriptors>],
    ) -> std::result::Result<Vec<(Arc<dyn Kernel>, RawFd, Vec<RawFd>)>, Errno> {
        let adopted = self.device.lock().adopt(contexts);
        let adopted = adopted.map_err(|error| error.errno())?;
        let with_kernel = |((fd, events), descriptors): ((_, _), &Arc<dyn Descriptors>)| {
            let kernel = EmbeddedKernel::new(self.clone(), Some(Arc::clone(descriptors)));
            (Arc::new(kernel) as Arc<dyn Kernel>, fd, events)
        };
        Ok(adopted
            .into_iter()
            .zip(descriptors)
            .map(with_kernel)
            .collect())
    }

    pub(crate) fn open_file(&self) -> Result<RawFd> {
        let (file, fd) = ContextFile::new()?;
        let registers = file.map_registers();
        let registers =
            registers.map_err(|error| Errno::new(error.raw_os_error().unwrap_or(libc::ENOMEM)))?;
        let mut state = self.device.lock();
        state.watch.add_context(file.id, registers);
        state.files.insert(fd, File::Context(Box::new(file)));
        Ok(fd)
    }

    /// Returns the offset in a descriptor's file that mmap at `offset` stands for, with
    /// mlx5_ib's encoding of offsets: of a register page, a UAR that the program has
    /// allocated, or the clock record. `None` if the kernel would refuse the mapping.
    pub fn mapping_offset(offset: i64, length: usize) -> Option<i64> {
        crate::driver::files::mapping_offset(offset, length)
    }

    /// Returns whether the page that a program maps at `offset` has doorbell registers, given
    /// that [`mapping_offset`](Self::mapping_offset) allows it.
    pub fn is_doorbell_page(offset: i64) -> bool {
        crate::driver::files::is_doorbell_page(offset)
    }

    /// Returns the number of UARs of all open devices of the process. A caller that watches
    /// their pages ([`guard_doorbells`](crate::guard_doorbells)) sees by it whether it knows all.
    pub fn uar_counts() -> UarCounts {
        crate::driver::files::uar_counts()
    }

    /// Returns whether the page at this offset of a descriptor's file is that of a UAR that
    /// the program has allocated.
    pub fn is_allocated_uar(offset: i64) -> bool {
        crate::driver::files::is_allocated_uar(offset)
    }

    /// Returns the port's GID table; empty entries are zero.
    pub fn gids(&self) -> Vec<[u8; 16]> {
        let state = self.device.lock();
        let gid = |index| state.gid_at(index).map_or([0; 16], |entry| entry.gid);
        (0..state.gid_table_length()).map(gid).collect()
    }

    /// Returns an entry of the port's GID table, as the query of the entry does; `None` if it
    /// is empty.
    pub fn gid_entry(&self, index: usize) -> Option<GidEntry> {
        self.device.lock().gid_entry(index)
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
