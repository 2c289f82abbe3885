//! Memory regions other than registered memory of the process: device memory, and regions
//! with on-demand paging.

use std::ptr;

use device_testing::embedded::driver::*;
use device_testing::embedded::raw::*;
use libc::{EBUSY, EFAULT, EINVAL, ENOENT, ENOMEM, EOPNOTSUPP, EPERM};
use mlx5::{CreateError, DeviceMemory};
use proptest::prelude::*;
use ringverbs_embedded::{Drive, Embedded};
use uverbs::abi::ids::*;
use uverbs::mr::{Advice, AdviseFlags, DmMrInit, MrKeys, Rereg};
use uverbs::{
    AccessFlags, Data, DmHandle, Error, MrHandle, MrInit, Opcode, PdHandle, QpType, RemoteMemory,
    SendFlags, SendWr, Sge, Udata,
};

const OK: i32 = 0;
const PAGE: usize = 4096;
/// The device memory of a context.
const SIZE: u64 = 32 * PAGE as u64;
const LOCAL_PROTECTION: u32 = 4;
const REMOTE_ACCESS: u32 = 10;
const REMOTE_OPERATION: u32 = 11;

fn errno<T>(done: Result<T, Error>) -> i32 {
    match done {
        Ok(_) => OK,
        Err(Error::Refused { errno, .. }) => errno.raw(),
        Err(error) => panic!("{error}"),
    }
}

fn create_errno<T>(done: Result<T, CreateError>) -> i32 {
    match done {
        Ok(_) => OK,
        Err(CreateError::Command(error)) => errno::<T>(Err(error)),
        Err(CreateError::TooLarge { .. }) => EINVAL,
        Err(error) => panic!("{error}"),
    }
}

/// Two connected queue pairs of two devices.
struct Pair {
    a: (Host, Cq, Qp),
    b: (Host, Cq, Qp),
}

impl Pair {
    fn new() -> Self {
        let (a, b) = Host::pair("roce", Drive::Caller);
        let (mut a_cq, mut b_cq) = (a.cq(64), b.cq(64));
        let a_qp = a.qp(QpType::RC, &mut a_cq);
        let b_qp = b.qp(QpType::RC, &mut b_cq);
        connect_pair(QpType::RC, (&a_qp, &a), (&b_qp, &b));
        Self {
            a: (a, a_cq, a_qp),
            b: (b, b_cq, b_qp),
        }
    }

    /// Executes a request of the first queue pair, and returns the status of its completion.
    fn request(&mut self, opcode: Opcode, list: &[Sge], remote: RemoteMemory) -> u32 {
        let (host, cq, qp) = &mut self.a;
        let wr = SendWr {
            remote,
            data: Data::Sges(list),
            ..SendWr::new(1, opcode, SendFlags::SIGNALED)
        };
        qp.send.begin();
        // SAFETY: the callers keep the memory, or know that it is not mapped.
        unsafe {
            qp.send.push(&wr).unwrap();
            assert!(qp.send.publish());
        }
        poll(host, cq).status
    }
}

type Memic = DeviceMemory<std::sync::Arc<uverbs::Context>>;

fn register(
    host: &Host,
    dm: &Memic,
    (offset, length): (u64, u64),
    access: AccessFlags,
) -> Result<(MrHandle, MrKeys), Error> {
    let init = DmMrInit {
        pd: host.pd,
        dm: dm.object.handle(),
        offset,
        length,
        access,
    };
    uverbs::mr::register_dm(&host.context, &init)
}

fn write(dm: &Memic, offset: u64, bytes: &[u8]) {
    // SAFETY: a slice.
    unsafe { dm.bytes.write(offset, bytes.as_ptr(), bytes.len()) }.unwrap();
}

fn read(dm: &Memic, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    // SAFETY: a slice.
    unsafe { dm.bytes.read(offset, bytes.as_mut_ptr(), length) }.unwrap();
    bytes
}

#[test]
fn peers_read_and_write_device_memory_by_offsets() {
    let mut pair = Pair::new();
    let context = std::sync::Arc::clone(&pair.b.0.context);
    let other = DeviceMemory::allocate(&context, 64, 0).unwrap();
    let dm = DeviceMemory::allocate(&context, 3 * PAGE as u64, 12).unwrap();
    let all = all() | AccessFlags::ZERO_BASED;
    let part = (64, 2 * PAGE as u64);
    let (mr, keys) = register(&pair.b.0, &dm, part, all).unwrap();
    let memory = pair.a.0.memory(2 * PAGE);
    let pattern: Vec<u8> = (0..2 * PAGE).map(|at| (at * 7 / 8) as u8).collect();
    memory.set(0, &pattern);
    let at = |addr| RemoteMemory {
        addr,
        rkey: keys.rkey,
    };
    let whole = [memory.sge(0, 2 * PAGE)];
    assert_eq!(pair.request(Opcode::RDMA_WRITE, &whole, at(0)), 0);
    assert_eq!(read(&dm, 64, 2 * PAGE), pattern);
    assert_eq!(read(&dm, 0, 64), [0; 64]);
    assert_eq!(read(&other, 0, 64), [0; 64]);

    write(&dm, 64 + 8, &5u64.to_ne_bytes());
    let few = [memory.sge(16, 24)];
    assert_eq!(pair.request(Opcode::RDMA_READ, &few, at(4)), 0);
    assert_eq!(memory.get(20, 8), 5u64.to_ne_bytes());
    // The program's own copy is a mapping of the same memory.
    let again = mlx5::DeviceBytes::of(&context, dm.object.handle()).unwrap();
    let mut word = [0; 8];
    // SAFETY: an array.
    unsafe { again.read(64 + 8, word.as_mut_ptr(), 8) }.unwrap();
    assert_eq!(word, 5u64.to_ne_bytes());

    // A local key of device memory, by offsets, too.
    let (local, local_keys) = register(&pair.b.0, &other, (0, 64), all).unwrap();
    write(&other, 0, &[9; 8]);
    let sge = Sge {
        addr: 0,
        length: 8,
        lkey: local_keys.lkey,
    };
    receive(&mut pair.a.2, 3, memory.sge(0, 8));
    post(&mut pair.b.2, 4, Operation::Send, sge);
    assert_eq!(poll(&pair.b.0, &mut pair.b.1).status, 0);
    assert_eq!(poll(&pair.a.0, &mut pair.a.1).status, 0);
    assert_eq!(memory.get(0, 8), [9; 8]);

    // The first byte that does not belong to the region.
    let last = [memory.sge(0, 1)];
    let beyond = at(2 * PAGE as u64);
    assert_eq!(
        pair.request(Opcode::RDMA_WRITE, &last, beyond),
        REMOTE_ACCESS
    );
    for mr in [mr, local] {
        uverbs::mr::destroy(&context, mr).unwrap();
    }
    drop((dm, other, memory));
    assert_eq!(pair.b.0.embedded.ranges(), pair.a.0.embedded.ranges());
}

#[test]
fn bad_device_memory_is_refused_and_leaves_nothing() {
    let embedded = Embedded::new("roce").unwrap();
    let host = Host::new(&embedded);
    let before = (embedded.objects(), embedded.ranges());
    let alloc = |length, log| DeviceMemory::allocate(&host.context, length, log);
    let max = host
        .context
        .query_device_ex(Udata::none())
        .unwrap()
        .max_dm_size;
    assert_eq!(max, SIZE);
    for (length, log, expected) in [
        (1, 0, OK),
        (SIZE, 12, OK),
        (SIZE + 1, 0, EINVAL),
        (0, 0, EINVAL),
        (64, 13, EINVAL),
        (64, u32::MAX, EINVAL),
    ] {
        assert_eq!(create_errno(alloc(length, log)), expected, "{length} {log}");
        assert_eq!((embedded.objects(), embedded.ranges()), before);
    }
    // Requests that `DeviceMemory` never makes.
    for (length, kind, expected) in [
        (64, 0, OK),
        (SIZE + 1, 0, ENOMEM),
        (u64::MAX, 0, ENOMEM),
        (64, 1, EOPNOTSUPP),
        (64, u64::MAX, EOPNOTSUPP),
    ] {
        let mut command = Command::new(OBJECT_DM, METHOD_DM_ALLOC);
        command
            .object(ATTR_ALLOC_DM_HANDLE, 0)
            .constant(ATTR_ALLOC_DM_LENGTH, length)
            .u32(ATTR_ALLOC_DM_ALIGNMENT, 0)
            .out(0x1000, 8)
            .out(0x1001, 2)
            .constant(0x1002, kind);
        // SAFETY: the command's own memory.
        let done = unsafe { command.run(&host.context) };
        // SAFETY: as above.
        let without = unsafe { command.without(0x1001).run(&host.context) };
        assert_eq!(
            without.err(),
            Some(if kind == 0 { ENOENT } else { EOPNOTSUPP })
        );
        if let Ok(attrs) = &done {
            let handle = DmHandle(created(attrs, ATTR_ALLOC_DM_HANDLE));
            uverbs::dm::destroy(&host.context, handle).unwrap();
        }
        assert_eq!(done.err().unwrap_or(OK), expected, "{length} {kind}");
    }
    let half = alloc(SIZE / 2, 0).unwrap();
    let rest = alloc(SIZE / 2, 0).unwrap();
    assert_eq!(create_errno(alloc(1, 0)), ENOMEM);
    drop(rest);

    let zero_based = AccessFlags::ZERO_BASED;
    let in_use = (embedded.objects(), embedded.ranges());
    for (range, access, expected) in [
        ((0, SIZE / 2), all() | zero_based, OK),
        ((SIZE / 2, 0), zero_based, OK),
        ((1, SIZE / 2), zero_based, EINVAL),
        ((SIZE / 2 + 1, 0), zero_based, EINVAL),
        ((u64::MAX, 2), zero_based, EINVAL),
        ((0, 64), all(), EINVAL),
        ((0, 64), zero_based | AccessFlags::MW_BIND, EINVAL),
        ((0, 64), zero_based | AccessFlags::ON_DEMAND, EINVAL),
        ((0, 64), zero_based | AccessFlags::REMOTE_WRITE, EINVAL),
        ((0, 64), zero_based | AccessFlags::RELAXED_ORDERING, OK),
    ] {
        let done = register(&host, &half, range, access);
        if let Ok((mr, _)) = done {
            // Its pages cannot be changed for others, and it keeps the memory.
            let change = Rereg {
                translation: None,
                pd: None,
                access: Some(zero_based),
            };
            // SAFETY: nothing is registered.
            let changed = unsafe { uverbs::mr::rereg(&host.context, mr, &change, Udata::none()) };
            assert_eq!(errno(changed), EINVAL);
            let freed = uverbs::dm::destroy(&host.context, half.object.handle());
            assert_eq!(errno(freed), EBUSY);
            uverbs::mr::destroy(&host.context, mr).unwrap();
        }
        assert_eq!(errno(done), expected, "{range:?} {access:?}");
        assert_eq!((embedded.objects(), embedded.ranges()), in_use);
    }
    let operation = half
        .bytes
        .for_operation(&host.context, half.object.handle(), 1);
    assert_eq!(create_errno(operation), EOPNOTSUPP);
    // A context is closed with all that it has.
    register(&host, &half, (0, 64), zero_based).unwrap();
    let context = Host::new(&embedded);
    let foreign = DmMrInit {
        pd: context.pd,
        dm: half.object.handle(),
        offset: 0,
        length: 64,
        access: zero_based,
    };
    assert_eq!(
        errno(uverbs::mr::register_dm(&context.context, &foreign)),
        ENOENT
    );
}

/// Pages of the process that are mapped, or not.
struct Pages(*mut u8, usize);

impl Pages {
    fn new(count: usize, access: i32) -> Self {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping.
        let mapped = unsafe { libc::mmap(ptr::null_mut(), count * PAGE, access, flags, -1, 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        Self(mapped.cast(), count)
    }

    fn address(&self) -> u64 {
        self.0.expose_provenance() as u64
    }

    fn protect(&self, page: usize, access: i32) {
        assert!(page < self.1);
        // SAFETY: a page of this mapping, which only the device accesses.
        let done = unsafe { libc::mprotect(self.0.add(page * PAGE).cast(), PAGE, access) };
        assert_eq!(done, 0);
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping of this value.
        unsafe { libc::munmap(self.0.cast(), self.1 * PAGE) };
    }
}

fn register_on_demand(
    host: &Host,
    (addr, length): (u64, u64),
    access: AccessFlags,
) -> Result<(MrHandle, MrKeys), Error> {
    let init = MrInit {
        pd: host.pd,
        addr,
        length,
        iova: addr,
        access: access | AccessFlags::ON_DEMAND,
    };
    // SAFETY: the tests keep the memory mapped while requests use it, or inaccessible.
    unsafe { uverbs::mr::register(&host.context, &init, Udata::none()) }
}

#[test]
fn pages_are_needed_only_when_they_are_used() {
    const READ: i32 = libc::PROT_READ;
    const WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
    let mut pair = Pair::new();
    let pages = Pages::new(4, libc::PROT_NONE);
    let range = (pages.address(), 4 * PAGE as u64);
    // Memory without on-demand paging must be mapped.
    let pinned = MrInit {
        pd: pair.b.0.pd,
        addr: range.0,
        length: range.1,
        iova: range.0,
        access: all(),
    };
    // SAFETY: it is refused.
    let refused = unsafe { uverbs::mr::register(&pair.b.0.context, &pinned, Udata::none()) };
    assert_eq!(errno(refused), EFAULT);
    let (mr, keys) = register_on_demand(&pair.b.0, range, all()).unwrap();
    let memory = pair.a.0.memory(2 * PAGE);
    memory.set(0, &[7; 2 * PAGE]);
    let at = |offset| RemoteMemory {
        addr: range.0 + offset as u64,
        rkey: keys.rkey,
    };
    let list = [memory.sge(0, 2 * PAGE)];
    for (page, access) in [(1, WRITE), (2, WRITE), (3, READ)] {
        pages.protect(page, access);
    }
    assert_eq!(pair.request(Opcode::RDMA_WRITE, &list, at(PAGE)), 0);
    memory.set(0, &[0; 2 * PAGE]);
    // The second half is in a page that may only be read.
    assert_eq!(pair.request(Opcode::RDMA_READ, &list, at(2 * PAGE)), 0);
    assert_eq!(memory.get(0, 2 * PAGE), [[7; PAGE], [0; PAGE]].concat());
    let failed = pair.request(Opcode::RDMA_WRITE, &list, at(2 * PAGE));
    assert_eq!(failed, REMOTE_OPERATION);
    uverbs::mr::destroy(&pair.b.0.context, mr).unwrap();

    // The memory of the requester.
    for (access, expected) in [(WRITE, 0), (READ, 0), (libc::PROT_NONE, LOCAL_PROTECTION)] {
        let mut pair = Pair::new();
        let (_, keys) = register_on_demand(&pair.a.0, range, all()).unwrap();
        let memory = pair.b.0.memory(PAGE);
        pages.protect(0, access);
        let sge = Sge {
            addr: range.0,
            length: PAGE as u32,
            lkey: keys.lkey,
        };
        let to = RemoteMemory {
            addr: memory.address(),
            rkey: memory.keys.rkey,
        };
        assert_eq!(pair.request(Opcode::RDMA_WRITE, &[sge], to), expected);
    }
}

#[test]
fn an_implicit_region_is_all_memory_of_the_process() {
    let mut pair = Pair::new();
    let whole = (0, u64::MAX);
    let (mr, keys) = register_on_demand(&pair.b.0, whole, all()).unwrap();
    let (_, local) = register_on_demand(&pair.a.0, whole, all()).unwrap();
    let (from, to) = (
        Pages::new(2, libc::PROT_READ | libc::PROT_WRITE),
        Pages::new(2, libc::PROT_READ | libc::PROT_WRITE),
    );
    // SAFETY: inside of the mapping.
    unsafe { from.0.write_bytes(3, 2 * PAGE) };
    let sge = Sge {
        addr: from.address(),
        length: 2 * PAGE as u32,
        lkey: local.lkey,
    };
    let at = |addr| RemoteMemory {
        addr,
        rkey: keys.rkey,
    };
    assert_eq!(
        pair.request(Opcode::RDMA_WRITE, &[sge], at(to.address())),
        0
    );
    // SAFETY: inside of the mapping, which nobody writes to now.
    let bytes = unsafe { std::slice::from_raw_parts(to.0, 2 * PAGE) };
    assert_eq!(bytes, [3; 2 * PAGE]);
    for nowhere in [0, 8, 1 << 62, u64::MAX - 2 * PAGE as u64] {
        let mut pair = Pair::new();
        let (_, keys) = register_on_demand(&pair.b.0, whole, all()).unwrap();
        let (_, local) = register_on_demand(&pair.a.0, whole, all()).unwrap();
        let sge = Sge {
            lkey: local.lkey,
            ..sge
        };
        let remote = RemoteMemory {
            addr: nowhere,
            rkey: keys.rkey,
        };
        assert_eq!(
            pair.request(Opcode::RDMA_WRITE, &[sge], remote),
            REMOTE_OPERATION
        );
    }
    uverbs::mr::destroy(&pair.b.0.context, mr).unwrap();
    let beyond = pair.request(Opcode::RDMA_WRITE, &[sge], at(to.address()));
    assert_eq!(beyond, REMOTE_ACCESS);
}

#[test]
fn bad_regions_and_advice_are_refused() {
    const PREFETCH: Advice = Advice::PREFETCH;
    const PREFETCH_WRITE: Advice = Advice::PREFETCH_WRITE;
    const NO_FAULT: Advice = Advice::PREFETCH_NO_FAULT;
    let embedded = Embedded::new("roce").unwrap();
    let host = Host::new(&embedded);
    let (pd, _) = mlx5::alloc_pd(&host.context).unwrap();
    let pages = Pages::new(2, libc::PROT_READ);
    let range = (pages.address(), 2 * PAGE as u64);
    let local = AccessFlags::LOCAL_WRITE;
    let before = (embedded.objects(), embedded.ranges());
    for (range, access, expected) in [
        (range, local, OK),
        ((range.0, 0), local, EINVAL),
        ((range.0, u64::MAX), local, EINVAL),
        ((0, u64::MAX), local, OK),
        (range, AccessFlags::REMOTE_WRITE, EINVAL),
    ] {
        let done = register_on_demand(&host, range, access);
        if let Ok((mr, _)) = done {
            uverbs::mr::destroy(&host.context, mr).unwrap();
        }
        assert_eq!(errno(done), expected, "{range:?} {access:?}");
        assert_eq!((embedded.objects(), embedded.ranges()), before);
    }
    let elsewhere = MrInit {
        pd: host.pd,
        addr: 0,
        length: u64::MAX,
        iova: PAGE as u64,
        access: local | AccessFlags::ON_DEMAND,
    };
    // SAFETY: it is refused.
    let refused = unsafe { uverbs::mr::register(&host.context, &elsewhere, Udata::none()) };
    assert_eq!(errno(refused), EINVAL);

    let (mr, keys) = register_on_demand(&host, range, local).unwrap();
    let (_, read_only) = register_on_demand(&host, range, AccessFlags::empty()).unwrap();
    let pinned = host.memory(PAGE);
    let sge = |addr, length, lkey| Sge { addr, length, lkey };
    let good = sge(range.0, 2 * PAGE as u32, keys.lkey);
    let past = sge(range.0 + 1, 2 * PAGE as u32, keys.lkey);
    let readable = sge(range.0, 8, read_only.lkey);
    let (flush, later) = (AdviseFlags::FLUSH, AdviseFlags::empty());
    let foreign: PdHandle = pd;
    for (pd, advice, flags, list, expected) in [
        (host.pd, PREFETCH, flush, &[good][..], OK),
        (host.pd, PREFETCH, flush, &[good, readable], OK),
        (host.pd, NO_FAULT, flush, &[good], OK),
        // The memory is mapped for reading only.
        (host.pd, PREFETCH_WRITE, flush, &[good], EFAULT),
        (host.pd, PREFETCH_WRITE, later, &[good], OK),
        (host.pd, PREFETCH_WRITE, later, &[readable], EPERM),
        (host.pd, PREFETCH, flush, &[past], EFAULT),
        (host.pd, NO_FAULT, flush, &[past], EFAULT),
        (host.pd, PREFETCH, later, &[past], OK),
        (foreign, PREFETCH, later, &[good], EPERM),
        (host.pd, PREFETCH, later, &[pinned.sge(0, 8)], ENOENT),
        (host.pd, PREFETCH, later, &[sge(0, 8, 12345)], ENOENT),
        (host.pd, Advice(3), flush, &[good], EOPNOTSUPP),
        (host.pd, PREFETCH, flush, &[], EINVAL),
    ] {
        let done = host.context.advise_mr(pd, advice, flags, list);
        assert_eq!(errno(done), expected, "{advice:?} {flags:?} {list:?}");
    }
    let change = |translation, access| Rereg {
        translation,
        pd: None,
        access: Some(access),
    };
    let on_demand = local | AccessFlags::ON_DEMAND;
    for (change, expected) in [
        (change(None, on_demand), EINVAL),
        (change(Some((range.0, PAGE as u64, range.0)), on_demand), OK),
        (
            change(Some((range.0, PAGE as u64, range.0)), AccessFlags::empty()),
            OK,
        ),
    ] {
        // SAFETY: mapped pages, which nothing uses.
        let done = unsafe { uverbs::mr::rereg(&host.context, mr, &change, Udata::none()) };
        assert_eq!(errno(done), expected, "{change:?}");
    }
    uverbs::mr::destroy(&host.context, mr).unwrap();
}

proptest! {
    /// A region's addresses need not be those of its memory, whatever the distance.
    #[test]
    fn addresses_of_a_region_are_relative_to_its_start(
        iova in 0..1u64 << 50,
        from in 0..3 * PAGE,
        length in 1..PAGE,
    ) {
        let mut pair = Pair::new();
        let memory = pair.b.0.memory_at(4 * PAGE, all(), Some(iova / PAGE as u64 * PAGE as u64));
        let source = pair.a.0.memory(PAGE);
        source.set(0, &[6; PAGE]);
        let first = iova / PAGE as u64 * PAGE as u64 + memory.address() % PAGE as u64;
        let remote = RemoteMemory { addr: first + from as u64, rkey: memory.keys.rkey };
        let list = [source.sge(0, length)];
        prop_assert_eq!(pair.request(Opcode::RDMA_WRITE, &list, remote), 0);
        let bytes = memory.get(0, 4 * PAGE);
        let written: Vec<_> = (0..4 * PAGE).filter(|at| bytes[*at] == 6).collect();
        prop_assert_eq!(written, (from..from + length).collect::<Vec<_>>());
    }
}
