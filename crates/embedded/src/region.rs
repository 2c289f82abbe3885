//! Memory regions: keys to the memory of the process.

use std::os::fd::RawFd;

use softhca::bits::{Field, field, flag};
use softhca::command::opcode as op;
use uverbs::abi::ids::*;
use uverbs::abi::write::{AllocMw, AllocMwResp, RegMr, RegMrResp, ReregMr, ReregMrResp};
use uverbs::{AccessFlags, MwType};
use zerocopy::IntoBytes;

use crate::command::{Input, NUMBER, PAGES_AT, make, run};
use crate::object::{Mr, Object, ObjectData};
use crate::request::Request;
use crate::state::State;
use crate::user::{Access, pin};
use crate::{Result, refuse};

const RIGHTS: Field = field(0x10, 14, 10);
const MODE: Field = field(0x10, 9, 8);
const QPN: Field = field(0x14, 31, 8);
const VARIANT: Field = field(0x14, 7, 0);
const PD: Field = field(0x1c, 23, 0);
const START: usize = 0x20;
const LENGTH: usize = 0x28;
const UNITS: Field = field(0x44, 31, 0);
const LOG_PAGE: Field = field(0x48, 5, 0);
const CARRIED: Field = field(0x60, 31, 0);
const ANY_QUEUE: u32 = 0xff_ffff;
/// Modes: physical addresses, pages, parts of other keys.
const PHYSICAL: u32 = 0;
const PAGED: u32 = 1;
const OF_KEYS: u32 = 2;
/// Fields of a window: it is unbound; work requests modify it; a peer may
/// invalidate it; the maximum length of its list.
const FREE: Field = flag(0x10, 30);
const BY_WORK_REQUEST: Field = flag(0x10, 15);
const REMOTE_INVALIDATE: Field = flag(0x1c, 24);
const WINDOW_UNITS: u32 = 4;

/// Bits of [`RIGHTS`].
const LOCAL_READ: u32 = 1 << 0;
const RIGHT_OF: [(AccessFlags, u32); 4] = [
    (AccessFlags::LOCAL_WRITE, 1 << 1),
    (AccessFlags::REMOTE_READ, 1 << 2),
    (AccessFlags::REMOTE_WRITE, 1 << 3),
    (AccessFlags::REMOTE_ATOMIC, 1 << 4),
];

/// Access flags that a region may have but that no bit of a key represents
/// (`IB_ACCESS_SUPPORTED`, without on-demand paging).
const NOT_IN_KEYS: AccessFlags = AccessFlags::MW_BIND
    .union(AccessFlags::ZERO_BASED)
    .union(AccessFlags::HUGETLB)
    .union(AccessFlags::from_bits_retain(OPTIONAL));
/// `IB_ACCESS_OPTIONAL`: flags that a device may ignore.
const OPTIONAL: u32 = 0x3ff0_0000;
/// Flags that require writable memory (`ib_access_writable`).
const WRITABLE: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND);

/// Access flags that can change without a new key, as with mlx5_ib.
const IN_PLACE_FLAGS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::RELAXED_ORDERING);

/// `IB_MR_REREG_...`.
const REREG_TRANSLATION: u32 = 1 << 0;
const REREG_PD: u32 = 1 << 1;
const REREG_ACCESS: u32 = 1 << 2;

/// Parameters of a region.
#[derive(Clone, Copy, Debug)]
struct RegionParameters {
    address: u64,
    length: u64,
    iova: u64,
    access: u32,
    pd: u32,
}

/// Converts access flags to the rights in a key.
fn rights(access: AccessFlags) -> Result<u32> {
    let known = RIGHT_OF
        .iter()
        .fold(NOT_IN_KEYS, |all, (flag, _)| all | *flag);
    if !(access - known).is_empty() {
        return refuse(libc::EINVAL);
    }
    let remote = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    if access.intersects(remote) && !access.contains(AccessFlags::LOCAL_WRITE) {
        return refuse(libc::EINVAL);
    }
    let has = RIGHT_OF.iter().filter(|(flag, _)| access.contains(*flag));
    Ok(has.fold(LOCAL_READ, |all, (_, right)| all | right))
}

/// Returns the largest page size, as a logarithm, at which the first page does
/// not begin below address 0, and the addresses of the pages.
fn pages(wanted: &RegionParameters) -> Option<(u32, Vec<u64>)> {
    for shift in (12..=30).rev() {
        let size = 1u64 << shift;
        let before = wanted.iova & (size - 1);
        let Some(first) = wanted.address.checked_sub(before) else {
            continue;
        };
        let count = before.checked_add(wanted.length)?.div_ceil(size);
        let pages = (0..count).map(|page| first.wrapping_add(page << shift));
        return Some((shift, pages.collect()));
    }
    None
}

impl State {
    /// Creates a key in the device, and grants access to the memory.
    ///
    /// # Safety
    /// The memory must stay mapped until access is revoked, and must be treated as memory
    /// that others read and, if the access flags permit, write.
    unsafe fn create_key(&mut self, fd: RawFd, wanted: &RegionParameters) -> Result<u32> {
        let access = AccessFlags::from_bits_retain(wanted.access);
        let rights = rights(access)?;
        let end = wanted.address.checked_add(wanted.length);
        let same_place = (wanted.address ^ wanted.iova) % 4096 == 0;
        if wanted.length == 0 || end.is_none() || !same_place {
            return refuse(libc::EINVAL);
        }
        if wanted.iova.checked_add(wanted.length).is_none() {
            return refuse(libc::EINVAL);
        }
        let need = match access.intersects(WRITABLE) {
            true => Access::Write,
            false => Access::Read,
        };
        pin(wanted.address, wanted.length, need)?;
        let variant = self.next_variant();
        let describe = |input: Input, pd| {
            input
                .set(RIGHTS, rights)
                .set(QPN, ANY_QUEUE)
                .set(VARIANT, variant.into())
                .set(PD, pd)
                .long(START, wanted.iova)
                .long(LENGTH, wanted.length)
        };
        let pd = self.objects.pd(fd, wanted.pd)?;
        let input = if wanted.iova == wanted.address {
            describe(Input::new(op::CREATE_MKEY, PAGES_AT), pd).set(MODE, PHYSICAL)
        } else {
            let Some((shift, pages)) = pages(wanted) else {
                return refuse(libc::EINVAL);
            };
            let units = (pages.len() as u32).div_ceil(2);
            let input = Input::new(op::CREATE_MKEY, PAGES_AT + units as usize * 16)
                .set(MODE, PAGED)
                .set(UNITS, units)
                .set(LOG_PAGE, shift)
                .set(CARRIED, units);
            let mut input = describe(input, pd);
            for (n, page) in pages.iter().enumerate() {
                input = input.long(PAGES_AT + n * 8, *page);
            }
            input
        };
        let number = make(&mut self.hca, &input)?;
        if !access.contains(AccessFlags::MW_BIND) {
            self.hca.seal_key(number);
        }
        // SAFETY: guaranteed by the caller.
        unsafe { (self.hca.platform_mut()).grant(wanted.address, wanted.length) };
        Ok(number << 8 | u32::from(variant))
    }

    /// # Safety
    /// As for [`State::execute`].
    pub(crate) unsafe fn reg_mr(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: RegMr = request.core()?;
        let wanted = RegionParameters {
            address: requested.start,
            length: requested.length,
            iova: requested.hca_va,
            access: requested.access_flags,
            pd: requested.pd_handle,
        };
        // SAFETY: guaranteed by the caller.
        let key = unsafe { self.create_key(fd, &wanted) }?;
        let handle = self.objects.insert(Object {
            file: fd,
            dependencies: vec![wanted.pd],
            uses: 0,
            ranges: vec![(wanted.address, wanted.length)],
            data: ObjectData::Mr(Mr {
                key,
                address: wanted.address,
                length: wanted.length,
                iova: wanted.iova,
                access: wanted.access,
            }),
        });
        request.core_answer(&RegMrResp {
            mr_handle: handle,
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
        let access = AccessFlags::from_bits_retain(wanted.access);
        let rights = rights(access)?;
        if access.intersects(WRITABLE) {
            pin(wanted.address, wanted.length, Access::Write)?;
        }
        let number = self.objects.pd(fd, wanted.pd)?;
        let before = self.objects.get(fd, handle)?.dependencies.first().copied();
        let mr = self.objects.mr_mut(fd, handle)?;
        mr.access = wanted.access;
        let key = mr.key;
        self.hca.change_key(key >> 8, number, rights);
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
        if requested.flags == 0 {
            return refuse(libc::EINVAL);
        }
        if requested.flags & !known != 0 {
            return refuse(libc::EOPNOTSUPP);
        }
        let object = self.objects.get(fd, requested.mr_handle)?;
        let (ObjectData::Mr(mr), Some(pd)) = (&object.data, object.dependencies.first().copied())
        else {
            return refuse(libc::EINVAL);
        };
        let (old_key, old) = (mr.key, (mr.address, mr.length));
        let mut wanted = RegionParameters {
            address: mr.address,
            length: mr.length,
            iova: mr.iova,
            access: mr.access,
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
            wanted.access = requested.access_flags;
        }
        let changed = AccessFlags::from_bits_retain(mr.access ^ wanted.access);
        if requested.flags & REREG_TRANSLATION == 0 && (changed - IN_PLACE_FLAGS).is_empty() {
            return self.change_access(fd, requested.mr_handle, &wanted, request);
        }
        // SAFETY: guaranteed by the caller.
        let key = unsafe { self.create_key(fd, &wanted) }?;
        let destroy = Input::new(op::DESTROY_MKEY, 16).set(NUMBER, old_key >> 8);
        run(&mut self.hca, &destroy, 16)?;
        self.hca.platform_mut().revoke(old.0, old.1);
        let mr = self.objects.mr_mut(fd, requested.mr_handle)?;
        mr.key = key;
        (mr.address, mr.length) = (wanted.address, wanted.length);
        (mr.iova, mr.access) = (wanted.iova, wanted.access);
        let given = (wanted.address, wanted.length);
        self.objects.replace_memory(requested.mr_handle, given);
        self.objects
            .replace_dependency(requested.mr_handle, pd, wanted.pd);
        request.core_answer(&ReregMrResp {
            lkey: key,
            rkey: key,
        });
        Ok(())
    }

    /// Allocates a memory window: a key that a work request binds.
    pub(crate) fn alloc_mw(&mut self, fd: RawFd, request: &mut Request) -> Result<()> {
        let requested: AllocMw = request.core()?;
        let second = match MwType(requested.mw_type) {
            MwType::TYPE_1 => false,
            MwType::TYPE_2 => true,
            _ => return refuse(libc::EINVAL),
        };
        let pd = self.objects.pd(fd, requested.pd_handle)?;
        // Byte 4 is the number of list elements; the rest is reserved.
        let mut driver = request.driver::<8>();
        let elements = std::mem::take(&mut driver[4]);
        if driver != [0; 8] || !request.driver_is_cleared(driver.len()) {
            return refuse(libc::EOPNOTSUPP);
        }
        let units = u32::from(elements).max(1).next_multiple_of(WINDOW_UNITS);
        let variant = self.next_variant();
        let input = Input::new(op::CREATE_MKEY, PAGES_AT)
            .set(FREE, 1)
            .set(BY_WORK_REQUEST, 1)
            .set(RIGHTS, LOCAL_READ)
            .set(MODE, OF_KEYS)
            .set(QPN, ANY_QUEUE)
            .set(VARIANT, variant.into())
            .set(REMOTE_INVALIDATE, second.into())
            .set(PD, pd)
            .set(UNITS, units);
        let key = make(&mut self.hca, &input)? << 8 | u32::from(variant);
        let mw_handle = self.objects.insert(Object {
            file: fd,
            dependencies: vec![requested.pd_handle],
            uses: 0,
            ranges: Vec::new(),
            data: ObjectData::Mw { key },
        });
        request.core_answer(&AllocMwResp {
            mw_handle,
            rkey: key,
        });
        // The second word is the length of the answer.
        let length = request.room(ATTR_UHW_OUT).min(8) as u32;
        request.driver_answer([0, length].as_bytes());
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
