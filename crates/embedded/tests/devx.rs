//! DevX: objects that a program creates by commands.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use mlx5::ioctl::UarKind;
use mlx5::ioctl::devx::{self, DevxObject, EventTarget, Umem, UmemInit};
use mlx5::{DeviceContext, Devx};
use ringverbs_embedded::{Embedded, softhca};
use roce::bits::{Field, field, flag, get32, put64};
use softhca::command::opcode as op;
use uverbs::{Context, Error};

const EBUSY: i32 = 16;
const EFAULT: i32 = 14;
const EINVAL: i32 = 22;
const EREMOTEIO: i32 = 121;
const LOCAL_WRITE: u32 = 1;
const NUMBER: Field = field(8, 23, 0);

type Shared = Arc<Context>;

/// A page that the device uses.
struct Page(*mut u8);

impl Page {
    const LAYOUT: Layout = match Layout::from_size_align(4096, 4096) {
        Ok(layout) => layout,
        Err(_) => panic!("a page is a valid layout"),
    };

    fn new() -> Self {
        // SAFETY: the layout is not empty.
        let bytes = unsafe { alloc_zeroed(Self::LAYOUT) };
        assert!(!bytes.is_null());
        Self(bytes)
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        assert!(at % 4 == 0 && at < 4096);
        // SAFETY: an aligned word of the page, accessed atomically only.
        unsafe { AtomicU32::from_ptr(self.0.add(at).cast()) }
    }

    fn get(&self, at: usize) -> u32 {
        u32::from_be(self.word(at).load(Ordering::Acquire))
    }

    fn set(&self, at: usize, value: u32) {
        self.word(at).store(value.to_be(), Ordering::Release);
    }

    fn address(&self) -> u64 {
        self.0.expose_provenance() as u64
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { dealloc(self.0, Self::LAYOUT) };
    }
}

/// A context with DevX.
struct Program {
    context: Shared,
    pd: u32,
    uar: u32,
    eqn: u32,
}

/// Queries an object by a command.
fn query_object(
    context: &Context,
    handle: impl Into<u32>,
    command: &Input,
    answer: &mut [u8],
) -> Result<(), Error> {
    // SAFETY: a query changes nothing.
    unsafe { devx::query(context, handle.into(), &command.0[..], answer) }
}

struct Input(Vec<u8>);

impl Input {
    fn new(opcode: u16, length: usize) -> Self {
        let mut bytes = vec![0; length];
        field(0, 31, 16).put(&mut bytes, opcode.into());
        Self(bytes)
    }

    fn set(mut self, field: Field, value: u32) -> Self {
        field.put(&mut self.0, value);
        self
    }

    fn put64(mut self, at: usize, value: u64) -> Self {
        put64(&mut self.0, at, value);
        self
    }
}

fn errno<T>(result: &Result<T, Error>) -> i32 {
    match result {
        Ok(_) => 0,
        Err(error) => error.errno().raw(),
    }
}

impl Program {
    fn new(embedded: &Embedded) -> Self {
        let context = Arc::new(embedded.context().unwrap());
        DeviceContext::open_with(&context, Devx::Needed).unwrap();
        let eqn = devx::query_eqn(&context, 0).unwrap();
        assert_eq!(errno(&devx::query_eqn(&context, 99)), EINVAL);
        let (_, pd) = mlx5::alloc_pd(&context).unwrap();
        let (_, uar) = mlx5::ioctl::uar::alloc(&context, UarKind::Doorbells).unwrap();
        Self {
            context,
            pd,
            uar: uar.page_id,
            eqn,
        }
    }

    fn umem(&self, page: &Page, length: u64, access: u32) -> Result<(Umem<Shared>, u32), Error> {
        self.register(page.address(), length, access, None)
    }

    fn register(
        &self,
        addr: u64,
        length: u64,
        access: u32,
        dmabuf: Option<BorrowedFd<'_>>,
    ) -> Result<(Umem<Shared>, u32), Error> {
        let init = UmemInit {
            addr,
            length,
            access,
            page_sizes: None,
            dmabuf,
        };
        // SAFETY: pages of the test, which outlive the context.
        unsafe { Umem::register(&self.context, &init) }
    }

    /// Creates an object; returns it with the answer, or the errno with the status.
    fn create(&self, input: &Input) -> Result<(DevxObject<Shared>, [u8; 16]), (i32, u8)> {
        let mut output = [0; 16];
        // SAFETY: pages of the test, which outlive the context.
        match unsafe { DevxObject::create(&self.context, &input.0[..], &mut output) } {
            Ok(object) => Ok((object, output)),
            Err(error) => Err((error.errno().raw(), output[0])),
        }
    }

    fn cq(&self, umem: u32) -> Input {
        Input::new(op::CREATE_CQ, 0x110)
            .set(field(0x14, 31, 0), umem)
            .set(field(0x1c, 28, 24), 2)
            .set(field(0x1c, 23, 0), self.uar)
            .set(field(0x24, 7, 0), self.eqn)
            .put64(0x10 + 0x38, RECORDS)
            .set(field(0x58, 31, 0), umem)
    }

    fn qp(&self, umem: u32, cq: u32) -> Input {
        Input::new(op::CREATE_QP, 0x110)
            .set(field(0x1c, 23, 0), self.pd)
            // A send queue of four blocks, no receives.
            .set(field(0x20, 14, 11), 2)
            .set(field(0x24, 23, 0), self.uar)
            .set(field(0x94, 23, 0), cq)
            .set(field(0xb4, 23, 0), cq)
            .put64(0x18 + 0xa0, RECORDS + 8)
            .set(field(0xc4, 26, 24), 3)
            .set(field(0x18 + 0xe4, 31, 0), umem)
            .put64(0x100, SENDS)
            .set(field(0x108, 31, 0), umem)
    }

    /// Creates a queue pair and its completion queue in a page.
    fn queues(&self, page: &Page) -> Queues {
        let memory = self.umem(page, 4096, LOCAL_WRITE).unwrap();
        self.queues_in(page, memory)
    }

    /// As [`queues`](Self::queues), in registered memory, which the page shows.
    fn queues_in(&self, page: &Page, (memory, umem): (Umem<Shared>, u32)) -> Queues {
        for entry in 0..4 {
            // Owned by the device, invalid.
            page.set(entry * 64 + 60, 0xf1);
        }
        let (cq, output) = self.create(&self.cq(umem)).unwrap();
        let cqn = NUMBER.get(&output);
        let (qp, output) = self.create(&self.qp(umem, cqn)).unwrap();
        let qpn = NUMBER.get(&output);
        Queues {
            qp,
            qpn,
            cq,
            cqn,
            memory,
        }
    }

    fn modify(&self, qp: &DevxObject<Shared>, input: &Input) {
        let mut output = [0; 16];
        let handle = qp.handle().into();
        // SAFETY: nothing but the queue pair changes.
        let done = unsafe { devx::modify(&self.context, handle, &input.0[..], &mut output) };
        assert_eq!(errno(&done), 0, "status {:#x}", output[0]);
    }

    /// Connects a queue pair to itself.
    fn connect(&self, qp: &DevxObject<Shared>, qpn: u32) {
        const PORT: Field = field(0x18 + 0x18 + 0x24, 23, 16);
        let lid = self.context.query_port(1).unwrap().legacy.lid;
        let modify = |opcode| Input::new(opcode, 0x110).set(NUMBER, qpn);
        self.modify(qp, &modify(op::RST2INIT_QP).set(PORT, 1));
        let to_rtr = modify(op::INIT2RTR_QP)
            .set(PORT, 1)
            .set(field(0x18 + 0x8, 31, 29), 3)
            .set(field(0x18 + 0x14, 23, 0), qpn)
            .set(field(0x18 + 0x18 + 0x4, 15, 0), lid.into());
        self.modify(qp, &to_rtr);
        self.modify(qp, &modify(op::RTR2RTS_QP));
    }
}

/// A queue pair in memory of the program. Dropped in this order.
struct Queues {
    qp: DevxObject<Shared>,
    qpn: u32,
    cq: DevxObject<Shared>,
    cqn: u32,
    memory: Umem<Shared>,
}

/// Posts a signaled NOP, the first since the reset.
fn post_nop(page: &Page, qpn: u32) {
    let at = SENDS as usize;
    page.set(at + 4, qpn << 8 | 1);
    page.set(at + 8, 8);
    page.set(RECORDS as usize + 8 + 4, 1);
}

// The page: four CQEs, four blocks of sends, doorbell records.
const SENDS: u64 = 0x100;
const RECORDS: u64 = 0x200;

/// Reads from a file of the device.
fn read(context: &Context, fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, i32> {
    // SAFETY: the device's descriptor is open until the context is closed.
    let length = unsafe { context.kernel().read(fd.as_raw_fd(), buffer) };
    length.map_err(|errno| errno.raw())
}

fn wait_until(condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
}

fn is_readable(fd: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor.
    unsafe { libc::poll(&raw mut poll, 1, 5000) == 1 }
}

#[test]
fn queues_in_memory_of_the_program_work() {
    let page = Page::new();
    let embedded = Embedded::new("ib").unwrap();
    let program = Program::new(&embedded);
    let Queues {
        memory,
        cq,
        cqn,
        qp,
        qpn,
    } = program.queues(&page);
    // A second object of the same queues keeps them, and the memory.
    assert_eq!(errno(&memory.destroy()), EBUSY);
    assert_eq!(errno(&cq.destroy()), EBUSY);

    program.connect(&qp, qpn);

    let channel = devx::event_channel(&program.context, 0).unwrap();
    // SAFETY: the device's descriptor, which the context closes.
    let channel = unsafe { BorrowedFd::borrow_raw(channel) };
    // SAFETY: makes a descriptor.
    let fd = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_NONBLOCK)) };
    let completion = 0u16.to_ne_bytes();
    let subscribe = |events: &[u8], report| {
        let object = Some(cq.handle());
        devx::subscribe(&program.context, channel, object, events, report)
    };
    assert_eq!(errno(&subscribe(&completion, EventTarget::Cookie(77))), 0);
    assert_eq!(
        errno(&subscribe(&completion, EventTarget::EventFd(fd.as_fd()))),
        0
    );
    assert_eq!(
        errno(&subscribe(&9u16.to_ne_bytes(), EventTarget::Cookie(1))),
        EINVAL
    );
    assert_eq!(errno(&subscribe(&[0; 34], EventTarget::Cookie(1))), EINVAL);
    let file = std::fs::File::open("/dev/null").unwrap();
    let other = subscribe(&completion, EventTarget::EventFd(file.as_fd()));
    assert_eq!(errno(&other), EINVAL);

    // Arms the queue, then posts a signaled NOP.
    page.set(RECORDS as usize + 4, 0);
    post_nop(&page, qpn);
    wait_until(|| page.get(60) & 0xf1 == 0);
    assert_eq!(page.get(56) & 0xff_ffff, qpn);
    assert!(is_readable(channel) && is_readable(fd.as_fd()));
    let mut event = [0; 128];
    assert_eq!(read(&program.context, channel, &mut event), Ok(8 + 64));
    assert_eq!(event[..8], 77u64.to_ne_bytes());
    assert_eq!(get32(&event[8..], 56), cqn);

    // Synchronous and asynchronous queries.
    let query = Input::new(op::QUERY_QP, 16).set(NUMBER, qpn);
    let mut output = [0; 0x110];
    let done = query_object(&program.context, qp.handle(), &query, &mut output);
    assert_eq!((errno(&done), get32(&output, 0x18) >> 28), (0, 3));
    let now = output;
    // Of another object than the one that the command names.
    let done = query_object(&program.context, cq.handle(), &query, &mut output);
    assert_eq!(errno(&done), EINVAL);
    let answers = devx::command_channel(&program.context).unwrap();
    // SAFETY: the device's descriptor, which the context closes.
    let answers = unsafe { BorrowedFd::borrow_raw(answers) };
    let background = |wr_id, length| {
        let (context, object) = (&program.context, qp.handle());
        // SAFETY: a query.
        unsafe { devx::query_async(context, object, &query.0, length, wr_id, answers) }
    };
    assert_eq!(errno(&background(5, 0x110)), 0);
    assert!(is_readable(answers));
    let mut answer = [0; 0x200];
    let short = read(&program.context, answers, &mut answer[..16]);
    assert_eq!(short, Err(libc::ENOSPC));
    let length = read(&program.context, answers, &mut answer);
    assert_eq!(length, Ok(8 + 0x110));
    assert_eq!(answer[..8], 5u64.to_ne_bytes());
    assert_eq!(answer[8..8 + 0x110], now);
    // Unread answers are limited.
    let refused = (0..100).find_map(|n| background(n, 65535).err());
    assert_eq!(refused.unwrap().errno().raw(), libc::EAGAIN);

    drop((qp, cq, memory));
    assert_eq!(embedded.complaints(), [""; 0]);
    drop(program);
}

/// As UCX does: it empties the queue, but does not reset the doorbell record.
#[test]
fn as_many_sends_as_before_may_follow_a_reset() {
    let page = Page::new();
    let embedded = Embedded::new("ib").unwrap();
    let program = Program::new(&embedded);
    let queues = program.queues(&page);
    let (qp, qpn) = (&queues.qp, queues.qpn);
    for entry in 0..3 {
        program.connect(qp, qpn);
        post_nop(&page, qpn);
        wait_until(|| page.get(entry * 64 + 60) & 0xf1 == 0);
        program.modify(qp, &Input::new(op::TO_RST_QP, 16).set(NUMBER, qpn));
        page.set(SENDS as usize + 4, 0);
    }
}

#[test]
fn queues_are_in_a_dma_buffer() {
    let embedded = Embedded::new("ib").unwrap();
    let program = Program::new(&embedded);
    // SAFETY: makes a descriptor.
    let buffer = unsafe {
        let flags = libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC;
        OwnedFd::from_raw_fd(libc::memfd_create(c"buffer".as_ptr(), flags))
    };
    let register =
        |offset, length| program.register(offset, length, LOCAL_WRITE, Some(buffer.as_fd()));
    // SAFETY: no memory is passed.
    let grown = unsafe { libc::ftruncate(buffer.as_raw_fd(), 2 * 4096) };
    assert_eq!(grown, 0);
    // It might shrink.
    assert_eq!(errno(&register(4096, 4096)), EINVAL);
    // SAFETY: no memory is passed.
    let sealed = unsafe { libc::fcntl(buffer.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) };
    assert_eq!(sealed, 0);
    for (offset, length) in [(4096, 4097), (8192, 1), (4096, 0), (u64::MAX, 2)] {
        assert_eq!(
            errno(&register(offset, length)),
            EINVAL,
            "{offset} {length}"
        );
    }
    let null = std::fs::File::open("/dev/null").unwrap();
    let other = program.register(0, 4096, LOCAL_WRITE, Some(null.as_fd()));
    assert_eq!(errno(&other), EINVAL);
    let memory = register(4096, 4096).unwrap();
    // SAFETY: a new mapping, which stays until the process ends.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            buffer.as_raw_fd(),
            4096,
        )
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    let page = ManuallyDrop::new(Page(mapped.cast()));
    // The memory keeps the buffer.
    drop(buffer);
    let queues = program.queues_in(&page, memory);
    assert_eq!(errno(&queues.memory.destroy()), EBUSY);
    program.connect(&queues.qp, queues.qpn);
    post_nop(&page, queues.qpn);
    wait_until(|| page.get(60) & 0xf1 == 0);
    assert_eq!(page.get(56) & 0xff_ffff, queues.qpn);
    drop(queues);
    assert_eq!(embedded.complaints(), [""; 0]);
}

#[test]
fn foreign_objects_are_rejected() {
    let page = Page::new();
    let embedded = Embedded::new("roce").unwrap();
    let (one, two) = (Program::new(&embedded), Program::new(&embedded));
    let (_memory, umem) = one.umem(&page, 4096, LOCAL_WRITE).unwrap();
    let (_cq, output) = one.create(&one.cq(umem)).unwrap();
    let cqn = NUMBER.get(&output);
    let (_own_memory, own) = two.umem(&page, 4096, LOCAL_WRITE).unwrap();
    // Memory, completion queue, UAR, protection domain.
    let refused = Some((EREMOTEIO, 5));
    assert_eq!(two.create(&two.cq(umem)).err(), refused);
    assert_eq!(two.create(&two.qp(own, cqn)).err(), refused);
    let uar = field(0x1c, 23, 0);
    assert_eq!(two.create(&two.cq(own).set(uar, one.uar)).err(), refused);
    let pd = field(0x1c, 23, 0);
    for (domain, of) in [(one.pd, &one), (0, &two), (one.pd, &two)] {
        let key = Input::new(op::CREATE_MKEY, 0x110)
            // Made of other keys.
            .set(field(0x10, 9, 8), 2)
            .set(field(0x14, 31, 8), 0xff_ffff)
            .set(pd, domain);
        let created = of.create(&key);
        assert_eq!(created.is_ok(), std::ptr::eq(of, &one), "{domain}");
    }
    // The driver sets the tag of the command.
    let tagged = two.cq(umem).set(field(0, 15, 0), 1);
    assert_eq!(two.create(&tagged).err(), refused);
}

#[test]
fn counters_of_flows_are_read() {
    let embedded = Embedded::new("roce").unwrap();
    let (one, two) = (Program::new(&embedded), Program::new(&embedded));
    let alloc = Input::new(op::ALLOC_FLOW_COUNTER, 0x10);
    let (counter, output) = one.create(&alloc).unwrap();
    let (foreign, _) = two.create(&alloc).unwrap();
    let number = field(8, 31, 0).get(&output);
    let read = |program: &Program, of: &DevxObject<Shared>| {
        let query = Input::new(op::QUERY_FLOW_COUNTER, 0x20).set(field(0x1c, 31, 0), number);
        let mut answer = [0xff; 0x20];
        let done = query_object(&program.context, of.handle(), &query, &mut answer);
        (errno(&done), answer)
    };
    assert_eq!(read(&one, &counter).0, 0);
    assert_eq!(read(&one, &counter).1[0x10..], [0; 16]);
    assert_eq!(read(&two, &foreign).0, EINVAL);
}

#[test]
fn keys_are_to_memory_that_was_registered() {
    let page = Page::new();
    let embedded = Embedded::new("roce").unwrap();
    let program = Program::new(&embedded);
    let (_memory, umem) = program.umem(&page, 4096, 0).unwrap();
    let key = |mode, rights| {
        Input::new(op::CREATE_MKEY, 0x110)
            .set(field(0x10, 14, 10), rights)
            .set(field(0x10, 9, 8), mode)
            .set(field(0x14, 31, 8), 0xff_ffff)
            .set(field(0x1c, 23, 0), program.pd)
            .put64(0x20, page.address())
            .put64(0x28, 4096)
            .set(field(0x48, 5, 0), 12)
            .set(field(0x64, 31, 0), umem)
    };
    let refused = Some((EREMOTEIO, 3));
    // All memory; read-only memory; addresses beyond the memory.
    assert_eq!(program.create(&key(0, 1)).err(), refused);
    assert_eq!(program.create(&key(1, 0b11)).err(), refused);
    assert_eq!(program.create(&key(1, 1).put64(0x28, 4097)).err(), refused);
    assert_eq!(program.create(&key(1, 1).put64(0x68, 1)).err(), refused);
    let all = key(1, 1).put64(0x28, u64::MAX);
    assert_eq!(program.create(&all).err(), Some((EREMOTEIO, 8)));
    assert!(program.create(&key(1, 1)).is_ok());
    let short = Input(key(1, 1).0[..0x4c].to_vec());
    assert_eq!(program.create(&short).err(), Some((EINVAL, 0)));
    // The device does not write completions there, nor use queue memory beyond it.
    assert_eq!(program.create(&program.cq(umem)).err(), refused);
    let read_only = umem;
    let (_writable, umem) = program.umem(&page, 4096, LOCAL_WRITE).unwrap();
    // The device only reads doorbell records.
    let cq = program.cq(read_only).set(field(0x58, 31, 0), umem);
    assert!(program.create(&cq).is_ok());
    for at in [4096 - 64, 4096, u64::MAX] {
        let beyond = program.cq(umem).put64(0x50, at);
        assert_eq!(program.create(&beyond).err(), refused, "{at:#x}");
        let beyond = program.cq(umem).put64(0x48, at | 8);
        assert_eq!(program.create(&beyond).is_ok(), at == 4096 - 64);
    }
    // Bytes missing at the end read as zero; the flag for umem entries is set all the same.
    for length in [0x10, 0x50, 0x5c, 0xc0, 0x10f] {
        let cut = Input(program.cq(umem).0[..length].to_vec());
        assert_eq!(program.create(&cut).is_ok(), length > 0x5b, "{length:#x}");
        let cut = Input(program.qp(umem, 0).0[..length].to_vec());
        assert!(program.create(&cut).is_err(), "{length:#x}");
    }
    let odd = program.cq(umem).put64(0x48, 4);
    assert_eq!(program.create(&odd).err(), refused);
    // A few bytes: the device has no access to the rest of their page.
    let (_few, umem) = program.umem(&page, 8, LOCAL_WRITE).unwrap();
    let (_all, entries) = program.umem(&page, 4096, LOCAL_WRITE).unwrap();
    let cq = |at| {
        program
            .cq(umem)
            .set(field(0x58, 31, 0), entries)
            .put64(0x48, at)
    };
    assert!(program.create(&cq(0)).is_ok());
    let reserved = program.qp(entries, 0).set(flag(0x20, 4), 1);
    assert_eq!(program.create(&reserved).err(), refused);
    for (length, access, error) in [
        (0, LOCAL_WRITE, EINVAL),
        (4096, 1 << 1, EINVAL),
        (4096, 1 << 3, EINVAL),
        (1 << 46, LOCAL_WRITE, EFAULT),
    ] {
        let registered = program.umem(&page, length, access);
        assert_eq!(errno(&registered), error, "{length:#x} {access:#x}");
    }
}

#[test]
fn only_queries_are_general_commands() {
    let embedded = Embedded::new("roce").unwrap();
    let program = Program::new(&embedded);
    let general = |input: &Input, output: &mut [u8]| {
        // SAFETY: queries, or refused.
        errno(&unsafe { devx::general(&program.context, &input.0[..], output) })
    };
    let mut output = [0; 16 + 4096];
    let capabilities = Input::new(op::QUERY_HCA_CAP, 16).set(field(4, 15, 0), 1);
    assert_eq!(general(&capabilities, &mut output), 0);
    assert_eq!(get32(&output, 16 + 0x10) & 0x1f, 17);
    for opcode in [
        op::ALLOC_PD,
        op::QUERY_QP,
        op::CREATE_UCTX,
        op::MANAGE_PAGES,
        0xffff,
    ] {
        assert_eq!(general(&Input::new(opcode, 16), &mut output), EINVAL);
    }
    // An opcode that the device does not support.
    let mut output = [0; 16];
    assert_eq!(general(&Input::new(0xb00, 16), &mut output), EREMOTEIO);
    assert_eq!(output[0], 2);
    for opcode in [
        op::DESTROY_QP,
        op::CREATE_EQ,
        op::CREATE_UMEM,
        op::CREATE_UCTX,
    ] {
        let refused = program.create(&Input::new(opcode, 0x120)).err();
        assert_eq!(refused, Some((EINVAL, 0)));
    }
    let plain = Arc::new(embedded.context().unwrap());
    DeviceContext::open(&plain).unwrap();
    let mut output = [0; 16];
    let alloc = Input::new(op::ALLOC_PD, 16);
    // SAFETY: refused.
    let refused = unsafe { DevxObject::create(&plain, &alloc.0[..], &mut output) };
    assert_eq!(errno(&refused), EINVAL);
}

#[test]
fn closing_a_context_releases_everything() {
    let page = Page::new();
    let embedded = Embedded::new("roce").unwrap();
    let before = (embedded.objects(), embedded.ranges());
    for _ in 0..100 {
        let program = Program::new(&embedded);
        let (memory, umem) = program.umem(&page, 4096, LOCAL_WRITE).unwrap();
        let (cq, output) = program.create(&program.cq(umem)).unwrap();
        let (qp, output) = program
            .create(&program.qp(umem, NUMBER.get(&output)))
            .unwrap();
        let attach = Input::new(op::ATTACH_TO_MCG, 0x20)
            .set(NUMBER, NUMBER.get(&output))
            .put64(0x10, 0xff << 56);
        let (member, _) = program.create(&attach).unwrap();
        let (pd, _) = program.create(&Input::new(op::ALLOC_PD, 16)).unwrap();
        // Left to the kernel, which destroys objects in use later.
        memory.into_handle();
        cq.into_handle();
        qp.into_handle();
        member.into_handle();
        pd.into_handle();
    }
    assert_eq!((embedded.objects(), embedded.ranges()), before);
}

#[test]
fn psvs_are_of_protection_domains_of_the_program() {
    let embedded = Embedded::new("roce").unwrap();
    let (program, other) = (Program::new(&embedded), Program::new(&embedded));
    let create = |by: &Program, pd| {
        let input = Input::new(op::CREATE_PSV, 16)
            .set(field(8, 31, 28), 1)
            .set(field(8, 23, 0), pd);
        let mut output = [0; 32];
        // SAFETY: it has no memory.
        let made = unsafe { DevxObject::create(&by.context, &input.0[..], &mut output) };
        made.map(|psv| (psv, get32(&output, 16)))
    };
    let (first, number) = create(&program, program.pd).unwrap();
    assert_ne!(number, 0);
    assert_eq!(errno(&create(&other, program.pd)), EREMOTEIO);
    // An answer without its number.
    let input = Input::new(op::CREATE_PSV, 16)
        .set(field(8, 31, 28), 1)
        .set(field(8, 23, 0), program.pd);
    assert_eq!(program.create(&input).unwrap_err().0, EINVAL);
    assert_eq!(errno(&first.destroy()), 0);
    let (_second, again) = create(&program, program.pd).unwrap();
    assert_ne!(again, number, "numbers are reused late");
}
