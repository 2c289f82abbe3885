//! Memory regions: keys to the memory of the process.

use std::os::fd::RawFd;

use softhca::command::opcode as op;
use softhca::layout::mkc::access_mode;
use softhca::layout::{PAGE_LIST, mkc};
use softhca::rule::Rule;
use uverbs::abi::ids::*;
use uverbs::abi::write::{AllocMw, AllocMwResp, RegMr, RegMrResp, ReregMr, ReregMrResp, Sge};
use uverbs::{AccessFlags, MwType};
use zerocopy::FromBytes;

use crate::driver::cause::{
    Class, Result, invalid, is, known_bits, memory, refuse, require, require_support, reserved,
    supported_bits,
};
use crate::driver::command::{Input, NUMBER, make, run};
use crate::driver::descriptors::ObjectChange;
use crate::driver::moved;
use crate::driver::object::{Mr, Mw, Object, ObjectData, Summary, log_length};
use crate::driver::request::Request;
use crate::driver::state::State;
use crate::user::{Access, copyable, fault_in};

/// The key is not bound to a queue pair.
const ANY_QUEUE: u32 = 0xff_ffff;
/// The length of a window's list is a multiple of this.
const WINDOW_UNITS: u32 = 4;

/// Bits of [`mkc::ACCESS`].
const LOCAL_READ: u32 = 1 << 0;
const RIGHT_OF: [(AccessFlags, u32); 4] = [
    (AccessFlags::LOCAL_WRITE, 1 << 1),
    (AccessFlags::REMOTE_READ, 1 << 2),
    (AccessFlags::REMOTE_WRITE, 1 << 3),
    (AccessFlags::REMOTE_ATOMIC, 1 << 4),
];

/// Access flags that a region may have but that no bit of a key represents
/// (`IB_ACCESS_SUPPORTED`).
const NOT_IN_KEYS: AccessFlags = AccessFlags::MW_BIND
    .union(AccessFlags::ZERO_BASED)
    .union(AccessFlags::HUGETLB)
    .union(AccessFlags::ON_DEMAND)
    .union(AccessFlags::from_bits_retain(OPTIONAL));
/// `IB_ACCESS_OPTIONAL`: flags that a device may ignore.
pub(crate) const OPTIONAL: u32 = 0x3ff0_0000;
/// Flags that require writable memory (`ib_access_writable`).
pub(crate) const WRITABLE: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);

/// Access flags that can change without a new key, as with current versions of mlx5_ib.
const IN_PLACE_FLAGS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::RELAXED_ORDERING);

/// `IB_MR_REREG_...`.
const REREG_TRANSLATION: u32 = 1 << 0;
const REREG_PD: u32 = 1 << 1;
const REREG_ACCESS: u32 = 1 << 2;

/// Parameters of a region.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionParameters {
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) iova: u64,
    pub(crate) access: AccessFlags,
    pub(crate) pd: u32,
}

impl RegionParameters {
    /// Returns whether the region is the whole address space, with on-demand paging.
    fn is_implicit(&self) -> bool {
        let everything = (self.address, self.length) == (0, u64::MAX);
        self.access.contains(AccessFlags::ON_DEMAND) && everything
    }

    /// Checks that memory of the program can be registered, and maps its pages, unless they
    /// are mapped on demand.
    fn check(&self) -> Result<()> {
        rights(self.access)?;
        let same_place = (self.address ^ self.iova) % 4096 == 0;
        let ends = [self.address, self.iova].map(|from| from.checked_add(self.length));
        require(self.length != 0, "length", self.length, Rule::NonZero)?;
        require(
            same_place,
            "hca_va",
            self.iova,
            Rule::With("the same offset in a page"),
        )?;
        require(ends[0].is_some(), "start", self.address, Rule::NoWrap)?;
        require(ends[1].is_some(), "hca_va", self.iova, Rule::NoWrap)?;
        if self.is_implicit() {
            is("hca_va", self.iova, 0)?;
        }
        if self.access.contains(AccessFlags::ON_DEMAND) {
            return Ok(());
        }
        let need = match self.access.intersects(WRITABLE) {
            true => Access::Write,
            false => Access::Read,
        };
        fault_in_region(self.address, self.length, need)
    }
}

/// Faults in the memory of a region.
fn fault_in_region(address: u64, length: u64, need: Access) -> Result<()> {
    let rule = match need {
        Access::Read => Rule::Readable,
        Access::Write => Rule::Writable,
    };
    fault_in(address, length, need).map_err(memory("start", address, rule))
}

/// Converts access flags to the rights in a key.
fn rights(access: AccessFlags) -> Result<u32> {
    let known = RIGHT_OF
        .iter()
        .fold(NOT_IN_KEYS, |all, (flag, _)| all | *flag);
    known_bits("access_flags", access.bits(), known.bits().into())?;
    let remote = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let has_local = access.contains(AccessFlags::LOCAL_WRITE);
    let needed = Rule::Contains(AccessFlags::LOCAL_WRITE.bits().into());
    let is_remote = access.intersects(remote);
    require(
        !is_remote || has_local,
        "access_flags",
        access.bits(),
        needed,
    )?;
    let has = RIGHT_OF.iter().filter(|(flag, _)| access.contains(*flag));
    Ok(has.fold(LOCAL_READ, |all, (_, right)| all | right))
}

impl ObjectData for Mr {
    fn kind(&self) -> u16 {
        OBJECT_MR
    }

    fn creation(&self) -> Option<ObjectChange> {
        Some(ObjectChange::RegionRegistered {
            key: self.key,
            iova: self.iova,
            address: self.address,
            length: self.length,
            access: self.access,
        })
    }

    fn destruction(&self) -> Option<ObjectChange> {
        Some(ObjectChange::RegionDeregistered { key: self.key })
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "memory region",
            number: self.key,
            length: self.length,
        }
    }

    fn region_entry(&self, handle: u32) -> Option<(u32, u64, u32)> {
        (!self.is_on_demand()).then_some((log_length(self.length), self.address, handle))
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DESTROY_MKEY, self.key >> 8)
    }

    fn release(&self, state: &mut State, _: RawFd, handle: u32) {
        state.revoke_region(self);
        state.dma_buffers.remove(&handle);
    }
}

impl ObjectData for Mw {
    fn kind(&self) -> u16 {
        OBJECT_MW
    }

    fn summary(&self) -> Summary {
        Summary {
            name: "memory window",
            number: self.key,
            length: 0,
        }
    }

    fn destroy(&mut self, state: &mut State) -> Result<()> {
        state.destroy_number(op::DESTROY_MKEY, self.key >> 8)
    }
}

impl State {
    /// Creates a key in the device, and grants access to the memory.
    ///
    /// # Safety
    /// The memory must stay mapped until access is revoked, and must be treated as memory
    /// that others read and, if the access flags permit, write. With on-demand paging, it must
    /// be so during requests that use it.
    unsafe fn create_key(&mut self, fd: RawFd, wanted: &RegionParameters) -> Result<u32> {
        let access = wanted.access;
        let rights = rights(access)?;
        let variant = self.next_variant();
        let input = Input::new(op::CREATE_MKEY, PAGE_LIST)
            .fields(
                mkc::AT,
                [
                    (mkc::ACCESS_MODE_1_0, access_mode::PA),
                    (mkc::ACCESS, rights),
                    (mkc::QPN, ANY_QUEUE),
                    (mkc::MKEY_7_0, variant.into()),
                    (mkc::LENGTH64, wanted.is_implicit().into()),
                    (mkc::PD, self.objects.pd(fd, wanted.pd)?),
                ],
            )
            .long(mkc::AT + mkc::START_ADDR, wanted.iova)
            .long(mkc::AT + mkc::LEN, wanted.length);
        let number = make(&mut self.hca, &input)?;
        self.hca.set_key_memory(number, wanted.address);
        if !access.contains(AccessFlags::MW_BIND) {
            self.hca.forbid_binding(number);
        }
        let platform = self.hca.platform_mut();
        // SAFETY: guaranteed by the caller.
        unsafe {
            match access.contains(AccessFlags::ON_DEMAND) {
                true => platform.grant_on_demand(wanted.address, wanted.length),
                false => {
                    platform.grant(wanted.address, wanted.length);
                    platform.moved.add_registered();
                    moved::add(wanted.address, wanted.length);
                }
            }
        }
        Ok(number << 8 | u32::from(variant))
    }

    /// Creates a region, and returns its handle and its key.
    ///
    /// # Safety
    /// As for [`create_key`](Self::create_key), until the region is destroyed.
    pub(crate) unsafe fn add_region(
        &mut self,
        fd: RawFd,
        wanted: &RegionParameters,
        dependencies: Vec<u32>,
    ) -> Result<(u32, u32)> {
        // SAFETY: guaranteed by the caller.
        let key = unsafe { self.create_key(fd, wanted) }?;
        let handle = self.objects.insert(
            Object::new(
                fd,
                Mr {
                    key,
                    address: wanted.address,
                    length: wanted.length,
                    iova: wanted.iova,
                    access: wanted.access,
                    moved: 0,
                },
            )
            .using(dependencies),
        );
        Ok((handle, key))
    }

    /// Revokes the device's access to the memory of a region.
    pub(crate) fn revoke_region(&mut self, mr: &Mr) {
        let platform = self.hca.platform_mut();
        match mr.is_on_demand() {
            true => platform.revoke_on_demand(mr.address, mr.length),
            false => {
                platform.revoke(mr.address, mr.length);
                platform.moved.remove_registered(mr.moved);
                moved::remove(mr.address, mr.length);
            }
        }
    }

    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn reg_mr(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: RegMr = request.core()?;
        let wanted = RegionParameters {
            address: requested.start,
            length: requested.length,
            iova: requested.hca_va,
            access: AccessFlags::from_bits_retain(requested.access_flags),
            pd: requested.pd_handle,
        };
        wanted.check()?;
        self.check_memlock(wanted.length)?;
        // SAFETY: guaranteed by the caller.
        let (mr_handle, key) = unsafe { self.add_region(fd, &wanted, vec![wanted.pd]) }?;
        request.core_answer(&RegMrResp {
            mr_handle,
            lkey: key,
            rkey: key,
        });
        Ok(())
    }

    /// Changes the access flags or the protection domain of a region, which keeps
    /// its key.
    fn change_access(
        &mut self,
        fd: RawFd,
        handle: u32,
        wanted: &RegionParameters,
        request: &mut Request,
    ) -> Result<()> {
        let access = wanted.access;
        let rights = rights(access)?;
        let is_moved = self.objects.mr(fd, handle)?.moved != 0;
        if access.intersects(WRITABLE) && !is_moved {
            fault_in_region(wanted.address, wanted.length, Access::Write)?;
        }
        let number = self.objects.pd(fd, wanted.pd)?;
        let before = self.objects.get(fd, handle)?.dependencies.first().copied();
        let mr = self.objects.mr_mut(fd, handle)?;
        mr.access = wanted.access;
        let (key, registered) = (mr.key, mr.creation());
        self.hca.change_key(key >> 8, number, rights);
        if let Some(changes) = &mut self.objects.changes {
            changes.extend(registered);
        }
        if let Some(before) = before {
            self.objects.replace_dependency(handle, before, wanted.pd);
        }
        request.core_answer(&ReregMrResp {
            lkey: key,
            rkey: key,
        });
        Ok(())
    }

    /// Changes the parameters of a region; its key is replaced by a new one, unless
    /// only rights change.
    ///
    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn rereg_mr(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: ReregMr = request.core()?;
        let known = REREG_TRANSLATION | REREG_PD | REREG_ACCESS;
        let flags = requested.flags;
        require(flags != 0, "flags", flags, Rule::NonZero)?;
        supported_bits("flags", flags, known.into())?;
        let object = self.objects.get(fd, requested.mr_handle)?;
        let (Some(old), Some(pd)) = (object.of::<Mr>().copied(), object.dependencies.first())
        else {
            return invalid("handle", requested.mr_handle, Rule::OfType("Mr"));
        };
        let pd = *pd;
        // Only regions of device memory depend on more than their protection domain.
        let is_device_memory = object.dependencies.len() > 1;
        // The kernel always creates a region with on-demand paging anew, of the memory that the
        // request names.
        let has_memory = requested.flags & REREG_TRANSLATION != 0 || !old.is_on_demand();
        let needed = Rule::Contains(REREG_TRANSLATION.into());
        require(has_memory, "flags of an on-demand region", flags, needed)?;
        let handle = requested.mr_handle;
        require(
            !is_device_memory,
            "handle",
            handle,
            Rule::Without("device memory"),
        )?;
        let mut wanted = RegionParameters {
            address: old.address,
            length: old.length,
            iova: old.iova,
            access: old.access,
            pd,
        };
        if requested.flags & REREG_TRANSLATION != 0 {
            (wanted.address, wanted.length) = (requested.start, requested.length);
            wanted.iova = requested.hca_va;
        }
        if requested.flags & REREG_PD != 0 {
            wanted.pd = requested.pd_handle;
        }
        if requested.flags & REREG_ACCESS != 0 {
            wanted.access = AccessFlags::from_bits_retain(requested.access_flags);
        }
        let changed = old.access ^ wanted.access;
        if requested.flags & REREG_TRANSLATION == 0 && (changed - IN_PLACE_FLAGS).is_empty() {
            return self.change_access(fd, requested.mr_handle, &wanted, request);
        }
        wanted.check()?;
        // SAFETY: guaranteed by the caller.
        let key = unsafe { self.create_key(fd, &wanted) }?;
        let destroy = Input::new(op::DESTROY_MKEY, 16).set(NUMBER, old.key >> 8);
        run(&mut self.hca, &destroy, 16)?;
        self.revoke_region(&old);
        let new = Mr {
            key,
            address: wanted.address,
            length: wanted.length,
            iova: wanted.iova,
            access: wanted.access,
            moved: 0,
        };
        if let Some(changes) = &mut self.objects.changes {
            changes.extend(old.destruction());
            changes.extend(new.creation());
        }
        self.objects.replace_region(requested.mr_handle, new);
        self.objects
            .replace_dependency(requested.mr_handle, pd, wanted.pd);
        request.core_answer(&ReregMrResp {
            lkey: key,
            rkey: key,
        });
        Ok(())
    }

    /// Maps pages of regions with on-demand paging before the device uses them.
    pub(crate) fn advise_mr(&self, request: &Request) -> Result<()> {
        /// `IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE` and `..._PREFETCH_NO_FAULT`, the last.
        const PREFETCH_WRITE: u64 = 1;
        const PREFETCH_NO_FAULT: u64 = 2;
        /// `IB_UVERBS_ADVISE_MR_FLAG_FLUSH`: the pages are mapped when the command ends.
        const FLUSH: u32 = 1 << 0;
        const SEGMENT: usize = size_of::<Sge>();
        let advice: u64 = request.constant(ATTR_ADVISE_MR_ADVICE)?;
        let flush = request.flags(ATTR_ADVISE_MR_FLAGS, FLUSH)? != 0;
        let pd = request.handle(ATTR_ADVISE_MR_PD_HANDLE)?;
        let list = request.bytes(ATTR_ADVISE_MR_SGE_LIST).unwrap_or_default();
        let length = list.len();
        let unit = Rule::MultipleOf(SEGMENT as u64);
        require(length % SEGMENT == 0, "length of sg_list", length, unit)?;
        let known = Rule::AtMost(PREFETCH_NO_FAULT);
        require_support(advice <= PREFETCH_NO_FAULT, "advice", advice, known)?;
        let need = match advice {
            PREFETCH_WRITE => Access::Write,
            _ => Access::Read,
        };
        for segment in list.chunks_exact(SEGMENT) {
            let segment = Sge::read_from_bytes(segment)
                .or_else(|_| invalid("length of an entry", segment.len(), unit))?;
            let (address, length) = (segment.addr, u64::from(segment.length));
            let key = segment.lkey;
            let region = (self.objects).find::<Mr>(|mr| mr.key == key && mr.is_on_demand());
            let Some((object, mr)) = region else {
                return refuse(Class::NotFound, "lkey", key, Rule::Exists);
            };
            let is_writable = mr.access.intersects(WRITABLE);
            if !object.dependencies.contains(&pd) {
                return refuse(
                    Class::Permission,
                    "pd_handle",
                    pd,
                    Rule::With("the region's key"),
                );
            }
            if advice == PREFETCH_WRITE && !is_writable {
                return refuse(Class::Permission, "lkey", key, Rule::Writable);
            }
            let offset = address.wrapping_sub(mr.iova);
            let is_inside = offset
                .checked_add(length)
                .is_some_and(|end| end <= mr.length);
            let mapped = match is_inside {
                false => refuse(Class::Fault, "addr", address, Rule::Within(mr.length)),
                true if advice == PREFETCH_NO_FAULT => Ok(()),
                true => {
                    let at = mr.address.wrapping_add(offset);
                    copyable(at, length, need).map_err(memory("addr", at, Rule::Readable))
                }
            };
            // Without the flag, only bad keys are reported.
            if flush {
                mapped?;
            }
        }
        Ok(())
    }

    /// Allocates a memory window: a key that a work request binds.
    pub(crate) fn alloc_mw(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: AllocMw = request.core()?;
        let second = match MwType(requested.mw_type) {
            MwType::TYPE_1 => false,
            MwType::TYPE_2 => true,
            _ => return invalid("mw_type", requested.mw_type, Rule::Between(1, 2)),
        };
        let pd = self.objects.pd(fd, requested.pd_handle)?;
        let driver: mlx5_abi::AllocMw = request.driver();
        reserved("comp_mask", driver.comp_mask)?;
        reserved("reserved1", driver.reserved1)?;
        reserved("reserved2", driver.reserved2)?;
        let (known, length) = (size_of_val(&driver), request.driver_length());
        let is_known = request.driver_is_cleared(known);
        let what = "length of the driver input";
        require_support(is_known, what, length, Rule::AtMost(known as u64))?;
        let units = u32::from(driver.num_klms)
            .max(1)
            .next_multiple_of(WINDOW_UNITS);
        let variant = self.next_variant();
        let input = Input::new(op::CREATE_MKEY, PAGE_LIST).fields(
            mkc::AT,
            [
                (mkc::FREE, 1),
                (mkc::UMR_EN, 1),
                (mkc::ACCESS, LOCAL_READ),
                (mkc::ACCESS_MODE_1_0, access_mode::KLMS),
                (mkc::QPN, ANY_QUEUE),
                (mkc::MKEY_7_0, variant.into()),
                (mkc::EN_RINVAL, second.into()),
                (mkc::PD, pd),
                (mkc::TRANSLATIONS_OCTWORD_SIZE, units),
            ],
        );
        let key = make(&mut self.hca, &input)? << 8 | u32::from(variant);
        let mw_handle = self
            .objects
            .insert(Object::new(fd, Mw { key }).using(vec![requested.pd_handle]));
        request.core_answer(&AllocMwResp {
            mw_handle,
            rkey: key,
        });
        // The second word is the length of the answer.
        let length = request.room(ATTR_UHW_OUT).min(8) as u32;
        request.driver_answer(&[0, length]);
        Ok(())
    }

    pub(crate) fn query_mr(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let mr = self.objects.mr(fd, request.handle(ATTR_QUERY_MR_HANDLE)?)?;
        let (key, length, iova) = (mr.key, mr.length, mr.iova);
        request.answer(ATTR_QUERY_MR_RESP_LKEY, &key);
        request.answer(ATTR_QUERY_MR_RESP_RKEY, &key);
        request.answer(ATTR_QUERY_MR_RESP_LENGTH, &length);
        request.answer(ATTR_QUERY_MR_RESP_IOVA, &iova);
        Ok(())
    }
}
