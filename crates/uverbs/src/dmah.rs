//! DMA handles: where a device's writes to a region go in the memory system (steering
//! tags of PCIe, TPH). Linux 6.17.

use std::os::fd::BorrowedFd;

use zerocopy::IntoBytes;

use crate::abi::{ids, later};
use crate::command::Ioctl;
use crate::handle::Owned;
use crate::mr::{MrKeys, MrKind};
use crate::{AccessFlags, Command, Context, DmahHandle, Error, MrHandle, PdHandle};

/// Attributes of a handle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmahInit {
    /// The processor that reads the data, by number, and the type of the memory (`enum
    /// ib_uverbs_tph_mem_type`).
    pub steering: Option<(u32, u8)>,
    /// Processing hint of PCIe, two bits.
    pub hint: u8,
}

/// Allocates a handle.
///
/// # Errors
/// EPROTONOSUPPORT, EOPNOTSUPP if the kernel, the device or the slot has none; EINVAL for
/// a hint or a processor that there is not.
pub fn alloc(context: &Context, init: &DmahInit) -> Result<DmahHandle, Error> {
    let hint = [init.hint];
    let mut ioctl = Ioctl::new(
        Command::AllocDmah,
        later::OBJECT_DMAH,
        later::METHOD_DMAH_ALLOC,
    );
    let object = ioctl.new_object(later::ATTR_ALLOC_DMAH_HANDLE);
    if let Some((cpu, memory)) = init.steering {
        ioctl.u32(later::ATTR_ALLOC_DMAH_CPU_ID, cpu);
        ioctl.enumerated(later::ATTR_ALLOC_DMAH_TPH_MEM_TYPE, memory);
    }
    ioctl.input(later::ATTR_ALLOC_DMAH_PH, &hint);
    Ok(DmahHandle(ioctl.run(context)?.handle(object)?))
}

/// Frees a handle.
///
/// # Errors
/// EBUSY while a region uses it.
pub fn free(context: &Context, dmah: DmahHandle) -> Result<(), Error> {
    let mut ioctl = Ioctl::new(
        Command::FreeDmah,
        later::OBJECT_DMAH,
        later::METHOD_DMAH_FREE,
    );
    ioctl.acts_on(dmah.0);
    ioctl.handle(later::ATTR_FREE_DMA_HANDLE, dmah.0);
    ioctl.run(context).map(drop)
}

/// Memory of a region.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Of the process, by its first address.
    Memory(u64),
    /// Of a DMA buffer, from that offset on.
    Dmabuf(BorrowedFd<'a>, u64),
}

/// A region with a handle.
#[derive(Clone, Copy, Debug)]
pub struct DmahMrInit<'a> {
    /// Protection domain.
    pub pd: PdHandle,
    /// How the device writes to it.
    pub dmah: DmahHandle,
    /// Its memory.
    pub source: Source<'a>,
    /// Length in bytes.
    pub length: u64,
    /// Address of the first byte in work requests and for peers.
    pub iova: u64,
    /// Access rights.
    pub access: AccessFlags,
}

/// Registers memory with a handle.
///
/// # Errors
/// As [`alloc`], and as [`mr::register`](crate::mr::register).
///
/// # Safety
/// As [`mr::register`](crate::mr::register), for memory of the process.
pub unsafe fn register(
    context: &Context,
    init: &DmahMrInit<'_>,
) -> Result<(MrHandle, MrKeys), Error> {
    let mut keys = MrKeys::default();
    let mut ioctl = Ioctl::new(Command::RegMr, ids::OBJECT_MR, later::METHOD_REG_MR);
    let object = ioctl.new_object(later::ATTR_REG_MR_HANDLE);
    let lkey = ioctl.output(later::ATTR_REG_MR_RESP_LKEY, keys.lkey.as_mut_bytes());
    let rkey = ioctl.output(later::ATTR_REG_MR_RESP_RKEY, keys.rkey.as_mut_bytes());
    ioctl.handle(later::ATTR_REG_MR_PD_HANDLE, init.pd.0);
    ioctl.handle(later::ATTR_REG_MR_DMA_HANDLE, init.dmah.0);
    ioctl.u64(later::ATTR_REG_MR_IOVA, init.iova);
    match init.source {
        Source::Memory(addr) => ioctl.u64(later::ATTR_REG_MR_ADDR, addr),
        Source::Dmabuf(fd, offset) => {
            ioctl.fd(later::ATTR_REG_MR_FD, fd);
            ioctl.u64(later::ATTR_REG_MR_FD_OFFSET, offset);
        }
    }
    ioctl.u64(later::ATTR_REG_MR_LENGTH, init.length);
    ioctl.u32(later::ATTR_REG_MR_ACCESS_FLAGS, init.access.bits());
    let answer = ioctl.run(context)?;
    let owned = Owned::<&Context, MrKind>::new(&context, MrHandle(answer.handle(object)?));
    answer.all_written(&[lkey, rkey])?;
    Ok((owned.forget(), keys))
}
