//! A context that another process has made, of a kernel that is played: its
//! registers are this process's own.

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::ioctl::ids::*;
use uverbs::Context;
use uverbs::abi::ids::*;
use uverbs::kernel::fake::Target;

use super::objects::{
    ALLOC_UAR, BAD, CREATE_CQ, CREATE_QP, FakeDevice, GET_CONTEXT, UcontextAnswer, VALID_ANSWER,
};
use super::*;
use crate::{CreateError, DeviceContext, QueuePair, ThreadUar};

const QUERY_CONTEXT: Target = Target::Method(OBJECT_DEVICE, METHOD_QUERY_CONTEXT);
/// The number of the first page that is allocated; the others follow. They lie
/// in the file in this order, from its beginning.
const FIRST: u32 = 0x70;
/// One for doorbells; two of registers that a queue pair each has, six of those that they
/// share.
const PAGES: usize = 9;
/// The offsets of the halves of a page's two registers.
const HALVES: [u64; 4] = [0x800, 0x900, 0xa00, 0xb00];

/// Of a file that rdma-core's provider has opened: the driver gave it none.
const NONE_GIVEN: UcontextAnswer = UcontextAnswer {
    registers: 0,
    ..VALID_ANSWER
};

type TestQp = QueuePair<Arc<Context>>;

/// A machine that allocates so many pages of registers, and the kind of each.
fn machine(most: u32) -> (FakeDevice, Arc<std::sync::Mutex<Vec<u64>>>) {
    let machine = FakeDevice::new();
    machine.pages.set_len(0x20 * 4096).unwrap();
    let kinds = Arc::new(std::sync::Mutex::new(Vec::new()));
    let (given, count) = (Arc::clone(&kinds), AtomicU32::new(0));
    machine.fake.on(ALLOC_UAR, move |reply| {
        let number = count.fetch_add(1, Ordering::Relaxed);
        if number >= most {
            return Err(uverbs::Errno::new(libc::ENOSPC));
        }
        (given.lock().unwrap()).push(reply.call().u64(ATTR_ALLOC_UAR_TYPE).unwrap());
        let offset = u64::from(number) * 4096;
        reply.set(ATTR_ALLOC_UAR_MMAP_OFFSET, &offset.to_ne_bytes());
        reply.set(ATTR_ALLOC_UAR_MMAP_LENGTH, &4096u32.to_ne_bytes());
        reply.set(ATTR_ALLOC_UAR_PAGE_ID, &(FIRST + number).to_ne_bytes());
        Ok(())
    });
    (machine, kinds)
}

fn import(machine: &FakeDevice, answer: &UcontextAnswer) -> Result<DeviceContext, CreateError> {
    let bytes = answer.bytes();
    machine.fake.on(QUERY_CONTEXT, move |reply| {
        reply.set(ATTR_QUERY_CONTEXT_RESP, &bytes);
        Ok(())
    });
    DeviceContext::import(&machine.context).map(|(_, device)| device)
}

/// A queue pair, and the page that the driver was told for it. What the driver
/// answers about registers means nothing then.
fn pair(machine: &FakeDevice, device: &DeviceContext) -> (TestQp, u32) {
    let qp = machine.qp(device, u32::MAX).unwrap();
    let told = machine.driver_in(CREATE_QP);
    let word = |at: usize| u32::from_ne_bytes(told[at..at + 4].try_into().unwrap());
    assert_eq!(word(28) & 1 << 10, 1 << 10, "a page by its number");
    (qp, word(36) - FIRST)
}

fn read(machine: &FakeDevice, page: u32, at: u64) -> [u8; 8] {
    let mut bytes = [0; 8];
    let offset = u64::from(page) * 4096 + at;
    machine.pages.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

/// Rings, and returns which register of the page was written to.
fn ring(machine: &FakeDevice, qp: &mut TestQp, page: u32) -> usize {
    for at in HALVES {
        let offset = u64::from(page) * 4096 + at;
        machine.pages.write_all_at(&[0; 8], offset).unwrap();
    }
    qp.send.begin();
    push_send(&mut qp.send, 0).unwrap();
    // SAFETY: there is no device.
    unsafe { qp.send.publish() };
    let rung = |at: &u64| be32(&read(machine, page, *at), 4) == QPN << 8 | 1;
    HALVES.iter().position(rung).unwrap() / 2
}

#[test]
fn imported_context_allocates_its_uars() {
    // Whether the driver gave the file any, which are the other process's, or not.
    for answer in [NONE_GIVEN, VALID_ANSWER] {
        let (machine, kinds) = machine(u32::MAX);
        let device = import(&machine, &answer).unwrap();
        assert_eq!(device.limits, LIMITS);
        assert_eq!(device.cq_uar_page(), Some(FIRST));

        // Completion queues are armed in the first page, of doorbells.
        let cq = machine.cq_of(&device, 3).unwrap();
        let told = machine.driver_in(CREATE_CQ);
        assert_eq!(told[22..26], [2, 0, FIRST as u8, 0]);
        cq.arming.arm(device.cq_doorbell(), false);
        assert_eq!(be32(&read(&machine, 0, 0x20), 4), 0x99);

        let mut pairs: Vec<_> = (0..40).map(|_| pair(&machine, &device)).collect();
        assert_eq!(
            kinds.lock().unwrap()[..],
            [&[1][..], &[0; PAGES - 1]].concat()
        );
        // Four have one to themselves; the others have each as many as the next. The
        // first queue pairs of a page use its registers in turn.
        let registers: Vec<_> = (pairs.iter_mut())
            .map(|(qp, page)| (*page as usize, ring(&machine, qp, *page)))
            .collect();
        let all = (1..PAGES).flat_map(|page| [(page, 0), (page, 1)]);
        let shared = (3..PAGES).flat_map(|page| [(page, 0), (page, 1)]);
        let expected: Vec<_> = all.chain(shared.clone()).chain(shared).collect();
        assert_eq!(registers, expected);

        // One that is free again is the next queue pair's; of several that which
        // was given first.
        pairs.drain(1..3);
        for expected in [(1, 1), (2, 0), (1, 1)] {
            let (mut qp, page) = pair(&machine, &device);
            assert_eq!((page, ring(&machine, &mut qp, page)), expected);
        }

        drop((pairs, cq));
        let live = machine.fake.live_objects();
        let pages = live.iter().filter(|(_, object)| *object == OBJECT_UAR);
        assert_eq!(pages.count(), PAGES);
        device.close(&machine.context);
        machine.assert_only_domains_left();
    }
}

/// rdma-core's provider imports no other.
#[test]
fn created_context_allocates_its_uars_where_none_are_given() {
    let (machine, kinds) = machine(u32::MAX);
    let device = machine.open(&NONE_GIVEN).unwrap();
    // Several in a page, and by number.
    assert_eq!(machine.driver_in(GET_CONTEXT)[24..32], 3u64.to_ne_bytes());
    assert_eq!(device.cq_uar_page(), Some(FIRST));
    let mut pairs: Vec<_> = (0..2).map(|_| pair(&machine, &device)).collect();
    for (place, (qp, page)) in pairs.iter_mut().enumerate() {
        assert_eq!((*page, ring(&machine, qp, *page)), (1, place));
    }
    assert_eq!(kinds.lock().unwrap()[..], [1, 0]);
    drop(pairs);
    device.close(&machine.context);
    machine.assert_only_domains_left();
}

#[test]
fn queue_pairs_share_uars() {
    // Pages that there are, and what three queue pairs get: nothing but the first,
    // of doorbells; two that are the first's; four of those, and two to share.
    for (most, alone, expected) in [(1, 0, [0, 0, 0]), (2, 0, [1, 1, 0]), (4, 4, [3, 3, 3])] {
        let (machine, _) = machine(most);
        let device = import(&machine, &NONE_GIVEN).unwrap();
        let kept: Vec<_> = (0..alone).map(|_| pair(&machine, &device)).collect();
        let mut pairs: Vec<_> = (0..3).map(|_| pair(&machine, &device)).collect();
        let pages: Vec<_> = pairs.iter().map(|(_, page)| *page).collect();
        assert_eq!(pages, expected);
        for (qp, page) in &mut pairs {
            ring(&machine, qp, *page);
        }
        drop((pairs, kept));
        device.close(&machine.context);
        machine.assert_only_domains_left();
    }
}

#[test]
fn device_without_blue_flame_has_doorbells() {
    let none = UcontextAnswer {
        register_size: 0,
        ..NONE_GIVEN
    };
    let (machine, kinds) = machine(u32::MAX);
    let device = import(&machine, &none).unwrap();
    let mut both: Vec<_> = (0..2).map(|_| pair(&machine, &device)).collect();
    for (qp, page) in &mut both {
        // One place for both: there are no halves.
        assert_eq!((*page, ring(&machine, qp, 0)), (0, 0));
    }
    assert_eq!(kinds.lock().unwrap()[..], [1]);
    let error = ThreadUar::allocate(&machine.context, &device).unwrap_err();
    assert_eq!(error.errno(), libc::EOPNOTSUPP);
    drop(both);
    device.close(&machine.context);
    machine.assert_only_domains_left();
}

#[test]
fn failed_import_leaves_nothing() {
    for errno in [libc::EINVAL, libc::EIO, libc::EPROTONOSUPPORT] {
        let (machine, _) = machine(u32::MAX);
        machine
            .fake
            .on(QUERY_CONTEXT, move |_| Err(uverbs::Errno::new(errno)));
        let error = DeviceContext::import(&machine.context).unwrap_err();
        assert_eq!(error.errno(), errno);
        assert!(machine.fake.live_objects().is_empty());
    }
    for (answer, errno) in &BAD {
        let (machine, _) = machine(u32::MAX);
        assert_eq!(import(&machine, answer).unwrap_err().errno(), *errno);
        assert!(machine.fake.live_objects().is_empty());
    }
    // No page of registers, and one that is none.
    let (none, _) = machine(0);
    let error = import(&none, &NONE_GIVEN).unwrap_err();
    assert_eq!(error.errno(), libc::ENOSPC);
    let (short, _) = machine(u32::MAX);
    answer_uar(&short, 2048, 1);
    let error = import(&short, &NONE_GIVEN).unwrap_err();
    assert_eq!(error.errno(), libc::EPROTO);
    assert!(short.fake.live_objects().is_empty());
}

fn answer_uar(machine: &FakeDevice, length: u32, number: u32) {
    machine.fake.on(ALLOC_UAR, move |reply| {
        reply.set(ATTR_ALLOC_UAR_MMAP_OFFSET, &0u64.to_ne_bytes());
        reply.set(ATTR_ALLOC_UAR_MMAP_LENGTH, &length.to_ne_bytes());
        reply.set(ATTR_ALLOC_UAR_PAGE_ID, &number.to_ne_bytes());
        Ok(())
    });
}

/// An attribute has it if it does not fit into the driver's structure.
#[test]
fn completion_queue_of_a_page_with_a_large_number() {
    let (machine, _) = machine(u32::MAX);
    answer_uar(&machine, 4096, 0x1_0002);
    let device = machine.open(&NONE_GIVEN).unwrap();
    let _cq = machine.cq_of(&device, 3).unwrap();
    let calls = machine.fake.take_ioctls();
    let call = calls
        .iter()
        .find(|call| call.target() == CREATE_CQ)
        .unwrap();
    assert_eq!(call.driver_in()[22..26], [0; 4]);
    assert_eq!(call.u32(ATTR_CREATE_CQ_UAR_INDEX), Some(0x1_0002));
}
