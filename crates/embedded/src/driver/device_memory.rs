//! Device memory: pages of the context's file, which the program maps, and to which regions
//! refer by offsets (`mlx5_ib_alloc_dm`, `mlx5_ib_reg_dm_mr`).

use std::os::fd::RawFd;

use mlx5_abi::ids::*;
use mmap_rs::MmapOptions;
use softhca::rule::Rule;
use uverbs::AccessFlags;
use uverbs::abi::ids::*;

use crate::driver::cause::{Class, Result, at_most, known_bits, refuse, require, require_support};
use crate::driver::files::MEMORY_PAGES;
use crate::driver::object::{DeviceMemory, Object, ObjectData, Summary};
use crate::driver::region::{OPTIONAL, RegionParameters};
use crate::driver::request::Request;
use crate::driver::state::State;

/// The largest alignment of an allocation, as a logarithm.
const LOG_MAX_ALIGNMENT: u32 = 12;
/// `MLX5_IB_UAPI_DM_TYPE_MEMIC`, the only type without direct rules.
const MEMIC: u64 = 0;
/// Access flags of a region of device memory (`MLX5_IB_DM_MEMIC_ALLOWED_ACCESS`).
const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::ZERO_BASED)
    .union(AccessFlags::from_bits_retain(OPTIONAL));

impl ObjectData for DeviceMemory {
    fn kind(&self) -> u16 {
        OBJECT_DM
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "device memory",
            number: self.page,
            length: self.length,
        }
    }

    fn destroy(&mut self, _: &mut State) -> Result<()> {
        Ok(())
    }

    fn release(&self, state: &mut State, file: RawFd, _: u32) {
        if let Ok(context) = state.context(file) {
            context.memory.free(self.page, self.pages);
        }
    }
}

impl State {
    pub(crate) fn alloc_dm(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        if request.has(ATTR_ALLOC_DM_TYPE) {
            let kind: u64 = request.constant(ATTR_ALLOC_DM_TYPE)?;
            require_support(kind == MEMIC, "type", kind, Rule::Is(MEMIC))?;
        }
        if !request.has(ATTR_ALLOC_DM_PAGE_INDEX) {
            let id = ATTR_ALLOC_DM_PAGE_INDEX;
            return refuse(Class::NotFound, "attribute", id, Rule::Present);
        }
        let length: u64 = request.value(ATTR_ALLOC_DM_LENGTH)?;
        let log_alignment: u32 = request.value(ATTR_ALLOC_DM_ALIGNMENT)?;
        require(length != 0, "length", length, Rule::NonZero)?;
        at_most("alignment", log_alignment, LOG_MAX_ALIGNMENT.into())?;
        let pages = length.div_ceil(MmapOptions::page_size() as u64);
        let pages = u32::try_from(pages).or_else(|_| {
            let rule = Rule::AtMost(MEMORY_PAGES.into());
            refuse(Class::NoMemory, "pages of device memory", pages, rule)
        })?;
        let (page, mapping) = self.context(fd)?.allocate_memory(pages)?;
        let handle = self.objects.insert(Object::new(
            fd,
            DeviceMemory {
                mapping,
                page,
                pages,
                length,
            },
        ));
        request.set_handle(ATTR_ALLOC_DM_HANDLE, handle);
        request.answer(ATTR_ALLOC_DM_START_OFFSET, &0u64);
        request.answer(ATTR_ALLOC_DM_PAGE_INDEX, &(page as u16));
        Ok(())
    }

    pub(crate) fn query_dm(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let handle = request.handle(ATTR_QUERY_DM_HANDLE)?;
        let &DeviceMemory { page, length, .. } = self.objects.typed::<DeviceMemory>(fd, handle)?;
        request.answer(ATTR_QUERY_DM_START_OFFSET, &0u64);
        request.answer(ATTR_QUERY_DM_PAGE_INDEX, &(page as u16));
        request.answer(ATTR_QUERY_DM_LENGTH, &length);
        Ok(())
    }

    pub(crate) fn reg_dm_mr(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let offset: u64 = request.value(ATTR_REG_DM_MR_OFFSET)?;
        let length: u64 = request.value(ATTR_REG_DM_MR_LENGTH)?;
        let flags = request.flags(ATTR_REG_DM_MR_ACCESS_FLAGS, u32::MAX)?;
        let access = AccessFlags::from_bits_retain(flags);
        let needed = AccessFlags::ZERO_BASED;
        let rule = Rule::Contains(needed.bits().into());
        require(access.contains(needed), "access_flags", flags, rule)?;
        known_bits("access_flags", flags, ACCESS.bits().into())?;
        let dm = request.handle(ATTR_REG_DM_MR_DM_HANDLE)?;
        let memory = self.objects.typed::<DeviceMemory>(fd, dm)?;
        at_most("offset", offset, memory.length)?;
        at_most("length", length, memory.length - offset)?;
        let address = memory.address();
        let pd = request.handle(ATTR_REG_DM_MR_PD_HANDLE)?;
        let wanted = RegionParameters {
            address: address + offset,
            length,
            iova: 0,
            access,
            pd,
        };
        // SAFETY: the range is part of a mapping that the device memory owns, which exists as
        // long as the region; the mapping is accessed through raw pointers only.
        let (handle, key) = unsafe { self.add_region(fd, &wanted, vec![pd, dm]) }?;
        request.set_handle(ATTR_REG_DM_MR_HANDLE, handle);
        request.answer(ATTR_REG_DM_MR_RESP_LKEY, &key);
        request.answer(ATTR_REG_DM_MR_RESP_RKEY, &key);
        Ok(())
    }
}
