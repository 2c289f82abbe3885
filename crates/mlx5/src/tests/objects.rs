//! Objects, made with a kernel that is played.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;

use crate::ioctl::ids::*;
use uverbs::abi::ids::*;
use uverbs::kernel::fake::{DRIVER, FakeKernel, Target};
use uverbs::{Context, CqInit, PdHandle, QpInit, QpType, SrqInit, SrqKind, Udata};

use super::*;
use crate::{
    CompletionQueue, CreateError, DeviceContext, QpOptions, QueuePair, SharedReceiveQueue,
    ThreadUar,
};

pub const ALLOC_UAR: Target = Target::Method(OBJECT_UAR, METHOD_UAR_ALLOC);
pub const GET_CONTEXT: Target = Target::Method(OBJECT_DEVICE, METHOD_GET_CONTEXT);
pub const CREATE_CQ: Target = Target::Method(OBJECT_CQ, METHOD_CQ_CREATE);
pub const CREATE_QP: Target = Target::Method(OBJECT_QP, METHOD_QP_CREATE);
pub const CREATE_WQ: Target = Target::Method(OBJECT_WQ, METHOD_WQ_CREATE);
pub const CREATE_SRQ: Target = Target::Method(OBJECT_SRQ, METHOD_SRQ_CREATE);

/// The kernel, and pages that stand in for the device's registers.
pub struct FakeDevice {
    pub fake: Arc<FakeKernel>,
    pub pages: File,
    pub context: Arc<Context>,
}

/// The driver's answer to GET_CONTEXT.
pub struct UcontextAnswer {
    pub register_size: u32,
    pub registers: u32,
    pub send_entry: u16,
    pub cqe_version: u8,
    pub uars_per_page: u32,
    pub comp_mask: u32,
    pub clock_info_versions: u8,
    pub core_clock: u64,
    pub null_key: u32,
    pub inline_mode: u8,
}

pub const VALID_ANSWER: UcontextAnswer = UcontextAnswer {
    register_size: 512,
    registers: 16,
    send_entry: 1024,
    cqe_version: 1,
    uars_per_page: 1,
    comp_mask: 0,
    clock_info_versions: 0,
    core_clock: 0,
    null_key: 0,
    inline_mode: 1,
};

impl UcontextAnswer {
    pub fn bytes(&self) -> [u8; 72] {
        let mut bytes = [0; 72];
        let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        set(4, &self.register_size.to_ne_bytes());
        set(8, &self.registers.to_ne_bytes());
        set(16, &self.send_entry.to_ne_bytes());
        set(18, &512u16.to_ne_bytes());
        set(20, &(1u32 << 15).to_ne_bytes());
        set(24, &(1u32 << 15).to_ne_bytes());
        set(28, &(1u32 << 15).to_ne_bytes());
        set(32, &1u16.to_ne_bytes());
        set(36, &self.comp_mask.to_ne_bytes());
        set(44, &[self.cqe_version]);
        set(46, &[self.inline_mode]);
        set(47, &[self.clock_info_versions]);
        set(48, &self.core_clock.to_ne_bytes());
        set(60, &self.uars_per_page.to_ne_bytes());
        set(68, &self.null_key.to_ne_bytes());
        bytes
    }
}

impl FakeDevice {
    pub fn new() -> Self {
        let fake = FakeKernel::new();
        fake.add_methods(crate::ioctl::METHODS);
        let mut pages = tempfile();
        pages.write_all(&[0; 8 * 4096]).unwrap();
        // SAFETY: the file lives as long as this value, which the contexts of
        // a test do not outlive.
        let context = unsafe {
            Context::from_borrowed_fd(Box::new(Arc::clone(&fake)), pages.as_raw_fd(), DRIVER)
        };
        Self {
            fake,
            pages,
            context: Arc::new(context),
        }
    }

    pub fn open(&self, answer: &UcontextAnswer) -> Result<DeviceContext, CreateError> {
        let bytes = answer.bytes();
        self.fake.on(GET_CONTEXT, move |reply| {
            reply.set_driver_out(&bytes);
            Ok(())
        });
        DeviceContext::open(&self.context).map(|(_, device)| device)
    }

    /// The driver's input of the last such command.
    pub fn driver_in(&self, target: Target) -> Vec<u8> {
        let calls = self.fake.take_ioctls();
        let call = calls.iter().rev().find(|call| call.target() == target);
        call.unwrap().driver_in().to_vec()
    }

    pub fn cq(&self, cqe: u32) -> Result<CompletionQueue<Arc<Context>>, CreateError> {
        self.cq_of(&self.open(&VALID_ANSWER)?, cqe)
    }

    pub fn cq_of(
        &self,
        device: &DeviceContext,
        cqe: u32,
    ) -> Result<CompletionQueue<Arc<Context>>, CreateError> {
        self.fake.on(CREATE_CQ, |reply| {
            let cqe = reply.call().u32(ATTR_CREATE_CQ_CQE).unwrap();
            reply.set(ATTR_CREATE_CQ_RESP_CQE, &cqe.to_ne_bytes());
            reply.set_driver_out(&[0x99, 0, 0, 0, 0, 0, 0, 0]);
            Ok(())
        });
        let init = CqInit {
            cqe,
            ..CqInit::default()
        };
        CompletionQueue::create(&self.context, device, &init)
    }

    /// Queue pairs are made, of this register.
    pub fn answer_qp(&self, register: u32) {
        self.fake.on(CREATE_QP, move |reply| {
            reply.set(ATTR_CREATE_QP_RESP_CAP, &[0; 20]);
            reply.set(ATTR_CREATE_QP_RESP_QP_NUM, &QPN.to_ne_bytes());
            reply.set_driver_out(&[&register.to_ne_bytes()[..], &[0; 36]].concat());
            Ok(())
        });
    }

    /// Of all objects only protection domains, which the tests leave, are there.
    pub fn assert_only_domains_left(&self) {
        let live = self.fake.live_objects();
        assert!(
            live.iter().all(|(_, object)| *object == OBJECT_PD),
            "{live:?}"
        );
    }

    pub fn qp(
        &self,
        device: &DeviceContext,
        register: u32,
    ) -> Result<QueuePair<Arc<Context>>, CreateError> {
        self.qp_with(device, register, None)
    }

    pub fn qp_with(
        &self,
        device: &DeviceContext,
        register: u32,
        own: Option<&ThreadUar<Arc<Context>>>,
    ) -> Result<QueuePair<Arc<Context>>, CreateError> {
        let options = QpOptions::default();
        self.qp_of(device, QpType::RC, &options, register, own)
    }

    pub fn qp_of(
        &self,
        device: &DeviceContext,
        qp_type: QpType,
        options: &QpOptions,
        register: u32,
        own: Option<&ThreadUar<Arc<Context>>>,
    ) -> Result<QueuePair<Arc<Context>>, CreateError> {
        self.answer_qp(register);
        let pd = uverbs::pd::alloc(&self.context, Udata::none()).unwrap();
        let cq = self.cq(3)?;
        let init = QpInit {
            qp_type,
            pd: Some(pd),
            send_cq: Some(cq.object.handle()),
            recv_cq: Some(cq.object.handle()),
            cap: cap(5, 2, 0),
            ..QpInit::default()
        };
        QueuePair::create_with(&self.context, device, &init, None, options, own, None)
    }
}

fn tempfile() -> File {
    // SAFETY: a name, and no flags.
    let fd = unsafe { libc::memfd_create(c"registers".as_ptr(), 0) };
    assert!(fd >= 0);
    // SAFETY: new, and nobody else's.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
}

#[test]
fn context_requests_user_indices_and_uars() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    let asked = machine.driver_in(GET_CONTEXT);
    assert_eq!(asked.len(), 32);
    assert_eq!(asked[..8], [16, 0, 0, 0, 4, 0, 0, 0]);
    assert_eq!((asked[16], asked[24]), (1, 3));
    assert_eq!(device.limits, LIMITS);
}

/// Answers that are malformed for created and imported contexts.
pub const BAD: [(UcontextAnswer, i32); 3] = [
    (
        UcontextAnswer {
            cqe_version: 0,
            ..VALID_ANSWER
        },
        libc::EOPNOTSUPP,
    ),
    (
        UcontextAnswer {
            register_size: 4096,
            ..VALID_ANSWER
        },
        libc::EPROTO,
    ),
    (
        UcontextAnswer {
            send_entry: 0,
            ..VALID_ANSWER
        },
        libc::EPROTO,
    ),
];

#[test]
fn malformed_driver_answers_are_refused() {
    let registers = [
        (
            UcontextAnswer {
                registers: 1 << 20,
                ..VALID_ANSWER
            },
            libc::EPROTO,
        ),
        (
            UcontextAnswer {
                uars_per_page: 1 << 20,
                ..VALID_ANSWER
            },
            libc::EPROTO,
        ),
    ];
    for (i, (answer, errno)) in BAD.iter().chain(&registers).enumerate() {
        let error = FakeDevice::new().open(answer).unwrap_err();
        assert_eq!(error.errno(), *errno, "{i}: {error}");
    }
    // Without write combining there is no BlueFlame, but a device.
    FakeDevice::new()
        .open(&UcontextAnswer {
            register_size: 0,
            ..VALID_ANSWER
        })
        .unwrap();
}

#[test]
fn null_key_is_reported_by_the_driver() {
    let key = |comp_mask| {
        let answer = UcontextAnswer {
            comp_mask,
            null_key: 0x1234,
            ..VALID_ANSWER
        };
        FakeDevice::new().open(&answer).unwrap().null_key()
    };
    assert_eq!((key(0), key(1), key(2)), (None, None, Some(0x1234)));
}

#[test]
fn create_cq_names_the_queue_memory() {
    let machine = FakeDevice::new();
    let cq = machine.cq(4).unwrap();
    assert_eq!((cq.object.cqe(), cq.ring.capacity()), (7, 8));
    let told = machine.driver_in(CREATE_CQ);
    assert_eq!(told.len(), 32);
    let word = |at: usize| u64::from_ne_bytes(told[at..at + 8].try_into().unwrap());
    assert_eq!(word(0), cq.ring.entries().as_ptr() as u64);
    assert_eq!(word(8), cq.ring.records().first().as_ptr() as u64);
    assert_eq!(told[16..24], [64, 0, 0, 0, 0, 0, 0, 0]);
    // And the device knows it by the number that the driver gave.
    let (register, memory) = DoorbellRegister::in_memory(0);
    cq.arming.arm(register.get(), true);
    // SAFETY: the page that stands in for the register.
    let armed = u64::from_be(unsafe { memory.read() });
    assert_eq!(armed, 1 << 56 | 0x99);
    for cqe in [0, 1 << 24, u32::MAX] {
        assert_eq!(machine.cq(cqe).unwrap_err().errno(), libc::EINVAL);
    }
    drop(cq);
    assert!(machine.fake.live_objects().is_empty());
}

/// Whether a page is mapped.
pub fn is_mapped(address: usize) -> bool {
    let page = (address & !4095) as *mut libc::c_void;
    // SAFETY: `msync` fails with ENOMEM if nothing is mapped there.
    unsafe { libc::msync(page, 4096, libc::MS_ASYNC) == 0 }
}

#[test]
fn memory_of_objects_that_the_kernel_keeps_is_leaked() {
    const DESTROY_CQ: Target = Target::Method(OBJECT_CQ, METHOD_CQ_DESTROY);
    // More than is cached, so that it would be unmapped.
    const MANY: u32 = 1 << 12;
    let machine = FakeDevice::new();
    let addresses = |cq: &CompletionQueue<Arc<Context>>| {
        let entries = cq.ring.entries().as_ptr() as usize;
        (entries, cq.ring.records().first().as_ptr() as usize)
    };
    let freed = machine.cq(MANY).unwrap();
    let (entries, _) = addresses(&freed);
    drop(freed);
    assert!(!is_mapped(entries));

    machine
        .fake
        .on(DESTROY_CQ, |_| Err(uverbs::Errno::new(libc::EBUSY)));
    let kept = machine.cq(MANY).unwrap();
    let (entries, records) = addresses(&kept);
    assert_eq!(
        kept.object.destroy().unwrap_err().errno().raw(),
        libc::EBUSY
    );
    drop(kept);
    // In any order.
    let CompletionQueue { object, ring, .. } = machine.cq(MANY).unwrap();
    let second = ring.entries().as_ptr() as usize;
    drop(ring);
    machine.fake.reset(DESTROY_CQ);
    drop(object);
    assert!(is_mapped(entries) && is_mapped(second));
    let others: Vec<_> = (0..64).map(|_| machine.cq(1).unwrap()).collect();
    assert!(others.iter().all(|cq| addresses(cq).1 != records));
    assert!(others.iter().all(|cq| addresses(cq).0 != entries));
}

#[test]
fn an_object_is_destroyed_once_and_its_memory_is_freed() {
    let machine = FakeDevice::new();
    let cq = machine.cq(1 << 12).unwrap();
    let entries = cq.ring.entries().as_ptr() as usize;
    cq.object.destroy().unwrap();
    assert!(cq.object.has_ended() && is_mapped(entries));
    let error = cq.object.destroy().unwrap_err();
    assert!(
        error.to_string().contains("it is destroyed already"),
        "{error}"
    );
    drop(cq);
    assert!(!is_mapped(entries));
}

#[test]
fn a_queue_is_not_resized_with_the_ring_of_another() {
    let machine = FakeDevice::new();
    let one = machine.cq(3).unwrap();
    let mut other = machine.cq(3).unwrap();
    let error = CompletionQueue::resize(&one.object, &mut other.ring, 100, None).unwrap_err();
    assert_eq!(error.errno(), libc::EOPNOTSUPP);
    assert_eq!(other.ring.capacity(), 4);
}

#[test]
fn create_qp_names_the_queue_memory_and_uar() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    // The first register of UAR 6, whose number counts four of each.
    let mut qp = machine.qp(&device, 6 * 4 + 1).unwrap();
    let told = machine.driver_in(CREATE_QP);
    assert_eq!(told.len(), 56);
    let word = |at: usize| u32::from_ne_bytes(told[at..at + 4].try_into().unwrap());
    // Three blocks for what changes keys; receives of 32 bytes.
    assert_eq!((word(16), word(20), word(24)), (16, 8, 5));
    assert_eq!((word(28), word(32)), (2, qp.queues.user_index()));
    assert_eq!((qp.cap.max_send_wr, qp.cap.max_recv_wr), (5, 8));
    qp.send.begin();
    push_send(&mut qp.send, 0).unwrap();
    // SAFETY: there is no device.
    unsafe { qp.send.publish() };
    let mut register = [0; 8];
    let at = 6 * 4096 + 0x800 + 512;
    std::os::unix::fs::FileExt::read_exact_at(&machine.pages, &mut register, at).unwrap();
    assert_eq!(be32(&register, 4), QPN << 8 | 1);
    // Another one has another number, and the same page.
    let other = machine.qp(&device, 6 * 4).unwrap();
    assert_ne!(other.queues.user_index(), qp.queues.user_index());
}

/// Answers for pages of registers: the third of the file, by a number that is
/// another.
fn uars(machine: &FakeDevice, length: u32) {
    machine.fake.on(ALLOC_UAR, move |reply| {
        reply.set(ATTR_ALLOC_UAR_MMAP_OFFSET, &(3u64 * 4096).to_ne_bytes());
        reply.set(ATTR_ALLOC_UAR_MMAP_LENGTH, &length.to_ne_bytes());
        reply.set(ATTR_ALLOC_UAR_PAGE_ID, &0x77u32.to_ne_bytes());
        Ok(())
    });
}

#[test]
fn thread_domain_has_its_own_uar() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    uars(&machine, 4096);
    let own = ThreadUar::allocate(&machine.context, &device).unwrap();
    let mut pair: Vec<_> = (0..2)
        // The driver's answer means nothing then.
        .map(|_| machine.qp_with(&device, u32::MAX, Some(&own)).unwrap())
        .collect();
    let told = machine.driver_in(CREATE_QP);
    let word = |at: usize| u32::from_ne_bytes(told[at..at + 4].try_into().unwrap());
    // Short data in completions, and a page by its number.
    assert_eq!((word(28), word(36)), (2 | 1 << 10, 0x77));
    for (turn, qp) in pair.iter_mut().enumerate() {
        qp.send.begin();
        push_send(&mut qp.send, 0).unwrap();
        // SAFETY: there is no device.
        unsafe { qp.send.publish() };
        // They share the register's two halves.
        let mut register = [0; 8];
        let at = 3 * 4096 + 0x800 + 256 * turn as u64;
        std::os::unix::fs::FileExt::read_exact_at(&machine.pages, &mut register, at).unwrap();
        assert_eq!(be32(&register, 4), QPN << 8 | 1);
    }
    drop(pair);
    own.destroy().unwrap();
    machine.assert_only_domains_left();
}

#[test]
fn malformed_uar_page_is_refused() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    for length in [0, 2048, 1 << 20] {
        uars(&machine, length);
        let error = ThreadUar::allocate(&machine.context, &device).unwrap_err();
        assert_eq!(error.errno(), libc::EPROTO, "{length}");
    }
    let none = UcontextAnswer {
        register_size: 0,
        ..VALID_ANSWER
    };
    let device = machine.open(&none).unwrap();
    uars(&machine, 4096);
    let error = ThreadUar::allocate(&machine.context, &device).unwrap_err();
    assert_eq!(error.errno(), libc::EOPNOTSUPP);
    assert!(machine.fake.live_objects().is_empty());
}

#[test]
fn missing_uar_is_refused() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    for register in [2, 8 * 4, u32::MAX] {
        let error = machine.qp(&device, register).unwrap_err();
        assert_eq!(error.errno(), libc::EPROTO, "{register}");
    }
    machine.assert_only_domains_left();
}

#[test]
fn srq_size_agrees_with_the_driver() {
    let machine = FakeDevice::new();
    let device = machine.open(&VALID_ANSWER).unwrap();
    machine.fake.on(CREATE_SRQ, |reply| {
        let wr = reply.call().u32(ATTR_CREATE_SRQ_MAX_WR).unwrap();
        let sge = reply.call().u32(ATTR_CREATE_SRQ_MAX_SGE).unwrap();
        // The driver's sum: a power of two above `wr`, entries of 16 bytes
        // more than the list.
        assert_eq!(
            (
                (wr + 1).next_power_of_two(),
                (16 + sge * 16).next_power_of_two()
            ),
            (8, 64)
        );
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_WR, &wr.to_ne_bytes());
        reply.set(ATTR_CREATE_SRQ_RESP_MAX_SGE, &sge.to_ne_bytes());
        reply.set_driver_out(&[0x44, 0, 0, 0, 0, 0, 0, 0]);
        Ok(())
    });
    let pd = uverbs::pd::alloc(&machine.context, Udata::none()).unwrap();
    let init = |pd: PdHandle, max_wr| SrqInit {
        pd,
        user_handle: 0,
        max_wr,
        max_sge: 2,
        limit: 0,
        kind: SrqKind::Basic,
        async_fd: None,
    };
    let srq = SharedReceiveQueue::create(&machine.context, &device, &init(pd, 5)).unwrap();
    assert_eq!(
        (srq.recv.capacity(), srq.recv.max_sge(), srq.srq_num),
        (7, 3, 0x44)
    );
    let error = SharedReceiveQueue::create(&machine.context, &device, &init(pd, 1 << 20));
    assert_eq!(error.unwrap_err().errno(), libc::EINVAL);
}
