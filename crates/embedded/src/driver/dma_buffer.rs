//! DMA buffers: regions of them (`ib_uverbs_reg_dmabuf_mr`, `mlx5_ib_reg_user_mr_dmabuf`), and
//! memory of DevX (`devx_umem_get`). The device reaches a buffer's memory by a mapping of its
//! own, so its exporter must permit that, as udmabuf does. A memfd that cannot shrink is
//! accepted, too: udmabuf makes buffers of such.

use std::os::fd::{BorrowedFd, RawFd};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::stat::fstat;
use nix::sys::statfs::fstatfs;
use nix::unistd::{Whence, lseek};
use ring::Mapping;
use softhca::rule::Rule;
use uverbs::AccessFlags;
use uverbs::abi::ids::*;

use crate::driver::cause::{Class, Result, errno_of, refuse, require, system};
use crate::driver::region::RegionParameters;
use crate::driver::request::Request;
use crate::driver::state::State;

/// `DMA_BUF_MAGIC` of <linux/magic.h>.
const DMA_BUF_MAGIC: i64 = 0x444d_4142;
/// Access flags of a region of a buffer.
const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::RELAXED_ORDERING);

/// Returns the length of a buffer; `None` if the file is not one.
fn length_of(buffer: BorrowedFd<'_>) -> nix::Result<Option<u64>> {
    if fstatfs(buffer)?.filesystem_type().0 as i64 == DMA_BUF_MAGIC {
        return Ok(u64::try_from(lseek(buffer, 0, Whence::SeekEnd)?).ok());
    }
    let seals = fcntl(buffer, FcntlArg::F_GET_SEALS).unwrap_or(0);
    if seals & SealFlag::F_SEAL_SHRINK.bits() == 0 {
        return Ok(None);
    }
    Ok(u64::try_from(fstat(buffer)?.st_size).ok())
}

/// Maps a part of a buffer, in whole pages before it.
pub(super) fn map(fd: RawFd, offset: u64, length: u64) -> Result<(Mapping, u64)> {
    if fd < 0 {
        return refuse(Class::BadDescriptor, "fd", fd as u32, Rule::Exists);
    }
    // SAFETY: the caller vouches for the descriptor during the command, as to the kernel; what is
    // done with another file than a buffer, is reading its length and kind.
    let buffer = unsafe { BorrowedFd::borrow_raw(fd) };
    let failed = |errno| system("fd", fd)(errno_of(errno));
    let Some(size) = length_of(buffer).map_err(failed)? else {
        let rule = Rule::OfType("DMA buffer");
        return refuse(Class::Invalid, "fd", fd, rule);
    };
    let end = offset.checked_add(length);
    require(end.is_some(), "offset", offset, Rule::NoWrap)?;
    let is_within = end.is_some_and(|end| end <= size);
    require(is_within, "length", length, Rule::Within(size))?;
    let from = offset - offset % Mapping::page_size() as u64;
    let mapped = Mapping::new(buffer, from, (offset - from + length) as usize);
    let mapping = mapped.map_err(|error| {
        let errno = error
            .raw_os_error()
            .map_or(nix::Error::ENOMEM, nix::Error::from_raw);
        system("mapping of a DMA buffer", fd)(errno_of(errno))
    })?;
    let address = mapping.as_ptr().as_ptr().expose_provenance() as u64;
    Ok((mapping, address + offset - from))
}

impl State {
    pub(crate) fn reg_dmabuf_mr(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let offset: u64 = request.value(ATTR_REG_DMABUF_MR_OFFSET)?;
        let length: u64 = request.value(ATTR_REG_DMABUF_MR_LENGTH)?;
        let iova: u64 = request.value(ATTR_REG_DMABUF_MR_IOVA)?;
        let buffer: u32 = request.value(ATTR_REG_DMABUF_MR_FD)?;
        let flags = request.flags(ATTR_REG_DMABUF_MR_ACCESS_FLAGS, ACCESS.bits())?;
        let same_place = (offset ^ iova) % Mapping::page_size() as u64 == 0;
        let rule = Rule::With("the same offset in a page");
        require(same_place, "iova", iova, rule)?;
        require(length != 0, "length", length, Rule::NonZero)?;
        let no_wrap = iova.checked_add(length).is_some();
        require(no_wrap, "iova", iova, Rule::NoWrap)?;
        let (mapping, address) = map(buffer as RawFd, offset, length)?;
        let pd = request.handle(ATTR_REG_DMABUF_MR_PD_HANDLE)?;
        let wanted = RegionParameters {
            address,
            length,
            iova,
            access: AccessFlags::from_bits_retain(flags),
            pd,
        };
        // SAFETY: the range is part of a mapping that is kept until the region is destroyed, and
        // accessed through raw pointers only; its file does not shrink.
        let (handle, key) = unsafe { self.add_region(fd, &wanted, vec![pd]) }?;
        self.dma_buffers.insert(handle, mapping);
        request.set_handle(ATTR_REG_DMABUF_MR_HANDLE, handle);
        request.answer(ATTR_REG_DMABUF_MR_RESP_LKEY, &key);
        request.answer(ATTR_REG_DMABUF_MR_RESP_RKEY, &key);
        Ok(())
    }
}
