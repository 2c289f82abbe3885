//! What the kernel is asked to register, change and advise; what is left when it
//! refuses.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use ringverbs::{
    AccessFlags, Advice, Advisable, AdviseFlags, Error, ForeignRegion, Region, RemoteRegion,
};
use uverbs::abi::ids::*;
use uverbs::abi::write::{self, RegMr, ReregMr, ReregMrResp, cmd};
use uverbs::kernel::fake::{IoctlCall, Reply, Target};
use uverbs::{Errno, Sge};

use crate::{DEREG_MR, World};

const REG_MR: Target = Target::Write(cmd::CMD_REG_MR);
const REREG_MR: Target = Target::Write(cmd::CMD_REREG_MR);
const REG_DMABUF: Target = Target::Method(OBJECT_MR, METHOD_REG_DMABUF_MR);
const ADVISE_MR: Target = Target::Method(OBJECT_MR, METHOD_ADVISE_MR);

/// A region's access if it is written from here only.
const LOCAL: AccessFlags = AccessFlags::LOCAL_WRITE;

/// The commands of a kind among what was asked since this was asked last.
fn asked(world: &World, target: Target) -> Vec<IoctlCall> {
    let calls = world.machine.fake.take_ioctls().into_iter();
    calls.filter(|call| call.target() == target).collect()
}

/// The only command of a kind.
fn only(world: &World, target: Target) -> IoctlCall {
    let mut calls = asked(world, target);
    assert_eq!(calls.len(), 1, "{target:?}");
    calls.remove(0)
}

fn refuse(world: &World, target: Target, errno: i32) {
    let refusal = move |_: &mut Reply<'_>| Err(Errno::new(errno));
    world.machine.fake.on(target, refusal);
}

/// The next region has those keys.
fn next_keys(world: &World, lkey: u32, rkey: u32) {
    // Numbers go up by one: a domain's is that before the region's.
    drop(world.context.alloc_pd().unwrap());
    let destroy = only(world, Target::Method(OBJECT_PD, METHOD_PD_DESTROY));
    let domain = destroy.object_number(ATTR_DESTROY_PD_HANDLE).unwrap();
    let mr_handle = domain as u32 + 1;
    world.machine.fake.on(REG_MR, move |reply| {
        reply.set_core_out(&write::RegMrResp {
            mr_handle,
            lkey,
            rkey,
        });
        Ok(())
    });
}

/// The error is of that command, with its errno and what it was about.
fn is_quoted(error: &Error, name: &str, errno: i32) {
    assert!(matches!(error, Error::Kernel(_)), "{error:?}");
    assert_eq!(error.errno(), errno, "{error}");
    let text = error.to_string();
    let reason = Errno::new(errno).to_string();
    for part in [name, "memory region", &reason] {
        assert!(text.contains(part), "no {part:?} in {text:?}");
    }
}

const MARK: &[u8] = b"memory of this test's";

/// This process's memory, without a fault where there is none.
fn own_memory() -> File {
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .open("/proc/self/mem")
        .unwrap()
}

fn mark(addr: u64) {
    own_memory().write_all_at(MARK, addr).unwrap();
}

/// Whether the memory that was marked is there: that another test may have got
/// the same place since does not matter.
fn is_marked(addr: u64) -> bool {
    let mut bytes = [0; MARK.len()];
    own_memory().read_exact_at(&mut bytes, addr).is_ok() && bytes == MARK
}

#[test]
fn foreign_memory_is_registered_as_it_is() {
    let world = World::new();
    next_keys(&world, 0xa1, 0xa2);
    let mut memory = [0u8; 100];
    let bytes = NonNull::from(&mut memory[3..]);
    let access = LOCAL | AccessFlags::REMOTE_READ;
    // SAFETY: the memory outlives the region, and no device touches it.
    let region = unsafe { ForeignRegion::register(&world.domain, bytes, access) }.unwrap();
    let request: RegMr = only(&world, REG_MR).core_in().unwrap();
    let addr = memory.as_ptr().addr() as u64 + 3;
    assert_eq!((request.start, request.length), (addr, 97));
    assert_eq!(request.hca_va, addr);
    // No more than was asked for: it may be memory that cannot be written.
    assert_eq!(request.access_flags, access.bits());
    assert_eq!((region.key().addr, region.key().rkey), (addr, 0xa2));
    assert_eq!((region.len(), region.is_empty()), (97, false));
    assert_eq!(region.slice(90..).unwrap().key().addr, addr + 90);
    assert!(matches!(region.slice(..98), Err(Error::Limit { .. })));

    let slice = region.slice(..).unwrap();
    let (region, busy) = region.close().unwrap_err().into_parts();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    drop(slice);
    refuse(&world, DEREG_MR, libc::EBUSY);
    let (region, error) = region.close().unwrap_err().into_parts();
    is_quoted(&error, "MR_DESTROY", libc::EBUSY);
    world.machine.fake.reset(DEREG_MR);
    region.close().unwrap();
    assert_eq!(world.live(OBJECT_MR), 0);
    // It is its owner's as before.
    memory.fill(1);
}

#[test]
fn foreign_memory_that_is_refused_leaves_nothing() {
    let world = World::new();
    let domain = world.context.alloc_pd().unwrap();
    refuse(&world, REG_MR, libc::EFAULT);
    let nowhere = NonNull::slice_from_raw_parts(NonNull::<u8>::dangling(), 4096);
    // SAFETY: it is refused.
    let error = unsafe { ForeignRegion::register(&domain, nowhere, LOCAL) }.unwrap_err();
    is_quoted(&error, "REG_MR", libc::EFAULT);
    assert_eq!(world.live(OBJECT_MR), 0);
    domain.close().unwrap();
}

#[test]
fn a_part_of_a_dma_buffer_is_registered_by_its_file() {
    let world = World::new();
    world.machine.fake.on(REG_DMABUF, |reply| {
        reply.set(ATTR_REG_DMABUF_MR_RESP_LKEY, &0xb1u32.to_ne_bytes());
        reply.set(ATTR_REG_DMABUF_MR_RESP_RKEY, &0xb2u32.to_ne_bytes());
        Ok(())
    });
    let (file, access) = (&world.machine.memory, LOCAL | AccessFlags::REMOTE_WRITE);
    let make =
        |domain, len| ForeignRegion::from_dmabuf(domain, file.as_fd(), 0x2010, len, 0x7010, access);
    let region = make(&world.domain, 300).unwrap();
    let call = only(&world, REG_DMABUF);
    let numbers = [
        ATTR_REG_DMABUF_MR_OFFSET,
        ATTR_REG_DMABUF_MR_LENGTH,
        ATTR_REG_DMABUF_MR_IOVA,
    ];
    assert_eq!(
        numbers.map(|id| call.u64(id).unwrap()),
        [0x2010, 300, 0x7010]
    );
    let fd = call.u32(ATTR_REG_DMABUF_MR_FD).unwrap();
    assert_eq!(fd, file.as_raw_fd() as u32);
    let flags = call.u32(ATTR_REG_DMABUF_MR_ACCESS_FLAGS).unwrap();
    assert_eq!(flags, access.bits());
    assert_eq!((region.key().addr, region.key().rkey), (0x7010, 0xb2));
    assert_eq!(region.slice(7..).unwrap().key().addr, 0x7017);
    region.close().unwrap();
    assert_eq!(world.live(OBJECT_MR), 0);

    let domain = world.context.alloc_pd().unwrap();
    refuse(&world, REG_DMABUF, libc::EOPNOTSUPP);
    is_quoted(
        &make(&domain, 300).unwrap_err(),
        "REG_DMABUF_MR",
        libc::EOPNOTSUPP,
    );
    assert_eq!(world.live(OBJECT_MR), 0);
    domain.close().unwrap();
}

#[test]
fn on_demand_memory_is_requested_and_returned_if_refused() {
    let world = World::new();
    let region = Region::alloc_on_demand(&world.domain, 5000).unwrap();
    let request: RegMr = only(&world, REG_MR).core_in().unwrap();
    let access = LOCAL | AccessFlags::ON_DEMAND;
    assert_eq!(request.access_flags, access.bits());
    assert_eq!(request.length, region.len() as u64);
    mark(request.start);
    assert!(is_marked(request.start));
    region.close().unwrap();
    assert!(!is_marked(request.start));

    let domain = world.context.alloc_pd().unwrap();
    world.machine.fake.on(REG_MR, |reply| {
        let request: RegMr = reply.call().core_in().unwrap();
        mark(request.start);
        Err(Errno::new(libc::EOPNOTSUPP))
    });
    let error = Region::alloc_on_demand(&domain, 5000).unwrap_err();
    is_quoted(&error, "REG_MR", libc::EOPNOTSUPP);
    let request: RegMr = only(&world, REG_MR).core_in().unwrap();
    assert!(!is_marked(request.start));
    assert_eq!(world.live(OBJECT_MR), 0);
    domain.close().unwrap();
}

#[test]
fn access_is_changed_in_place_and_may_change_the_key() {
    let world = World::new();
    next_keys(&world, 0xa1, 0xa2);
    let mut region = RemoteRegion::alloc(&world.domain, 64, AccessFlags::REMOTE_READ).unwrap();
    let before = region.key();
    assert_eq!(before.rkey, 0xa2);
    world.machine.fake.on(REREG_MR, |reply| {
        reply.set_core_out(&ReregMrResp {
            lkey: 0xc1,
            rkey: 0xc2,
        });
        Ok(())
    });
    world.machine.fake.take_calls();
    region.set_access(AccessFlags::REMOTE_WRITE).unwrap();
    let request: ReregMr = only(&world, REREG_MR).core_in().unwrap();
    // The access alone, and this side may write as before.
    let expected = ReregMr {
        response: 0,
        mr_handle: request.mr_handle,
        flags: 1 << 2,
        access_flags: (LOCAL | AccessFlags::REMOTE_WRITE).bits(),
        ..ReregMr::default()
    };
    assert_eq!(request, expected);
    assert_eq!((region.key().addr, region.key().rkey), (before.addr, 0xc2));
    // What is posted has the new key, too.
    let slice = region.slice(..).unwrap();
    let advice = (Advice::PREFETCH, AdviseFlags::empty());
    world.domain.advise(advice.0, advice.1, &[slice]).unwrap();
    assert_eq!(elements(&only(&world, ADVISE_MR))[0].lkey, 0xc1);

    let slice = region.slice(..8).unwrap();
    let busy = region.set_access(AccessFlags::empty()).unwrap_err();
    assert!(matches!(busy, Error::Busy { .. }), "{busy}");
    drop(slice);
    let bad = region.set_access(AccessFlags::ZERO_BASED).unwrap_err();
    assert!(matches!(bad, Error::Invalid { .. }), "{bad}");
    assert!(asked(&world, REREG_MR).is_empty());

    // Refused, it is what it was.
    for errno in [libc::EOPNOTSUPP, libc::EACCES] {
        refuse(&world, REREG_MR, errno);
        let error = region.set_access(AccessFlags::empty()).unwrap_err();
        is_quoted(&error, "REREG_MR", errno);
        let handle = request.mr_handle.to_string();
        assert!(error.to_string().contains(&handle), "{error}");
        assert_eq!(region.key().rkey, 0xc2);
        region.write_at(0, b"still here").unwrap();
    }
    world.machine.fake.take_calls();
    region.close().unwrap();
    let closed = only(&world, DEREG_MR).object_number(ATTR_DESTROY_MR_HANDLE);
    assert_eq!(closed, Some(request.mr_handle.into()));
    assert_eq!(world.live(OBJECT_MR), 0);
}

/// The elements of a command's list.
fn elements(call: &IoctlCall) -> Vec<Sge> {
    let bytes = call.bytes(ATTR_ADVISE_MR_SGE_LIST).unwrap();
    let word = |bytes: &[u8]| u32::from_ne_bytes(bytes.try_into().unwrap());
    let parts = bytes.chunks_exact(16);
    assert!(parts.remainder().is_empty());
    parts
        .map(|part| Sge {
            addr: u64::from_ne_bytes(part[..8].try_into().unwrap()),
            length: word(&part[8..12]),
            lkey: word(&part[12..]),
        })
        .collect()
}

#[test]
fn advice_works_on_every_kind_of_memory() {
    let world = World::new();
    next_keys(&world, 0xa1, 0xa2);
    let region = Region::alloc_on_demand(&world.domain, 5000).unwrap();
    let start = {
        let request: RegMr = only(&world, REG_MR).core_in().unwrap();
        request.start
    };
    let (advice, flags) = (Advice::PREFETCH_WRITE, AdviseFlags::FLUSH);
    world.domain.advise(advice, flags, &[&region]).unwrap();
    let call = only(&world, ADVISE_MR);
    assert_eq!(call.u64(ATTR_ADVISE_MR_ADVICE), Some(1));
    assert_eq!(call.u32(ATTR_ADVISE_MR_FLAGS), Some(1));
    let whole = Sge {
        addr: start,
        length: region.len() as u32,
        lkey: 0xa1,
    };
    assert_eq!(elements(&call), [whole]);

    // As far as a buffer goes, not as far as it is filled.
    let mut first = region.into_buffer();
    let second = first.split_off(1000);
    first.set_len(1).unwrap();
    world
        .domain
        .advise(advice, flags, &[first, second])
        .unwrap();
    let call = only(&world, ADVISE_MR);
    let halves = [
        Sge {
            length: 1000,
            ..whole
        },
        Sge {
            addr: start + 1000,
            length: whole.length - 1000,
            ..whole
        },
    ];
    assert_eq!(elements(&call), halves);

    // Of all kinds together; what has no bytes is left out.
    world.machine.fake.reset(REG_MR);
    let region = Region::alloc(&world.domain, 1).unwrap();
    let remote = RemoteRegion::alloc(&world.domain, 64, AccessFlags::ON_DEMAND).unwrap();
    let (slice, none) = (remote.slice(8..24).unwrap(), remote.slice(..0).unwrap());
    let mixed: [&dyn Advisable; 3] = [&region, &none, &slice];
    world.domain.advise(advice, flags, &mixed).unwrap();
    let list = elements(&only(&world, ADVISE_MR));
    assert_eq!(list.len(), 2);
    assert_eq!(
        (list[0].length as usize, list[1].length),
        (region.len(), 16)
    );
    assert_eq!(list[1].addr, remote.key().addr + 8);
    world.domain.advise(advice, flags, &[none]).unwrap();
    assert!(asked(&world, ADVISE_MR).is_empty());
}

#[test]
fn advice_about_long_memory_is_about_all_of_it() {
    const GIB: usize = 1 << 30;
    let world = World::new();
    let file = world.machine.memory.as_fd();
    let long =
        |len, iova| ForeignRegion::from_dmabuf(&world.domain, file, 0, len, iova, LOCAL).unwrap();
    let advise = |region: &ForeignRegion| {
        let slice = region.slice(..).unwrap();
        let advice = (Advice::PREFETCH, AdviseFlags::empty());
        world.domain.advise(advice.0, advice.1, &[slice]).unwrap();
        asked(&world, ADVISE_MR)
    };
    let calls = advise(&long(5 * GIB + 1, 0x1000));
    let list: Vec<_> = calls.iter().flat_map(elements).collect();
    let parts: Vec<_> = list.iter().map(|sge| (sge.addr, sge.length)).collect();
    let at = |gib: u64| 0x1000 + gib * GIB as u64;
    let two = 2 * GIB as u32;
    assert_eq!(parts, [(at(0), two), (at(2), two), (at(4), GIB as u32 + 1)]);

    // More than a command's list can have, up to the last address that there is.
    let (len, iova) = (5000 * 2 * GIB, 0u64.wrapping_sub(5000 * 2 * GIB as u64));
    let calls = advise(&long(len, iova));
    let lists: Vec<_> = calls.iter().map(elements).collect();
    assert_eq!(lists.iter().map(Vec::len).collect::<Vec<_>>(), [4095, 905]);
    let mut next = iova;
    for sge in lists.concat() {
        assert_eq!(sge.addr, next);
        next = next.wrapping_add(sge.length.into());
    }
    assert_eq!(next, 0);
}

#[test]
fn advice_that_is_refused_is_an_error() {
    let world = World::new();
    let region = Region::alloc(&world.domain, 1).unwrap();
    let other = world.context.alloc_pd().unwrap();
    world.machine.fake.take_calls();
    let (advice, flags) = (Advice::PREFETCH, AdviseFlags::empty());
    let error = other.advise(advice, flags, &[&region]).unwrap_err();
    assert!(matches!(error, Error::WrongDomain { .. }), "{error}");
    assert!(asked(&world, ADVISE_MR).is_empty());
    refuse(&world, ADVISE_MR, libc::EOPNOTSUPP);
    let error = world.domain.advise(advice, flags, &[&region]).unwrap_err();
    is_quoted(&error, "ADVISE_MR", libc::EOPNOTSUPP);
    // It is nobody's but ours afterwards.
    region.close().unwrap();
}
