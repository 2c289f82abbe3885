//! Completion queues that move to other memory while completions are in them.

use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;

use proptest::prelude::*;
use uverbs::abi::write::{ResizeCqResp, cmd::CMD_RESIZE_CQ};
use uverbs::kernel::fake::Target;

use super::objects::{FakeDevice, is_mapped};
use super::*;
use crate::cq_ring::CqeFormat;
use crate::{CompletionQueue, Role};

/// The identifiers of what is there, as many as `most`.
fn read(ring: &mut CqeRing, most: usize) -> Vec<u64> {
    let mut out = vec![MaybeUninit::uninit(); most];
    // SAFETY: what was posted has no data.
    let taken = unsafe { poll(ring, &mut out) }.unwrap();
    let wr_id = |wc: &MaybeUninit<crate::WorkCompletion>| {
        // SAFETY: that many were written to the front.
        unsafe { wc.assume_init() }.wr_id
    };
    out[..taken].iter().map(wr_id).collect()
}

proptest! {
    /// However reading, writing and resizing take turns: everything is read
    /// once, in order, and nothing that was not written.
    #[test]
    fn resize_moves_unread_cqes(
        log2 in 1u32..4,
        turns in prop::collection::vec((0u32..9, 0usize..9, 1u32..5), 1..60),
    ) {
        let mut ring = CqeRing::plain(log2).unwrap();
        let mut device = Device::of(&ring);
        let mut pair = TestQp::new(70, Service::ReliableConnection, &cap(32, 1, 0));
        ring.attach(&pair.queues, Role::SEND).unwrap();
        let (mut written, mut had) = (0, 0);
        for (produce, consume, log2) in turns {
            for _ in 0..produce {
                // The kernel keeps one free, for the mark.
                if written - had == u64::from(ring.capacity()) - 1 {
                    break;
                }
                complete_one(&mut pair, &mut device, written);
                written += 1;
            }
            let unread = (written - had) as u32;
            if unread < 1 << log2 {
                let memory = CqeRing::new_entries(log2, CqeFormat::PLAIN, None).unwrap();
                device.move_to(memory.first(), 1 << log2);
                prop_assert!(ring.move_to(memory, log2));
                prop_assert_eq!(ring.capacity(), 1 << log2);
                // The mark has been consumed with what was read before.
                prop_assert_eq!(device.consumed(), device.written - unread);
            }
            prop_assert_eq!(ring.is_empty(), written == had);
            for wr_id in read(&mut ring, consume) {
                prop_assert_eq!(wr_id, had);
                had += 1;
            }
        }
    }
}

#[test]
fn resize_keeps_the_old_entries_during_the_command() {
    let machine = FakeDevice::new();
    let mut cq = machine.cq(7).unwrap();
    let mut pair = TestQp::new(70, Service::ReliableConnection, &cap(16, 1, 0));
    cq.ring.attach(&pair.queues, Role::SEND).unwrap();
    let mut device = Device::of(&cq.ring);
    for wr_id in 0..11 {
        complete_one(&mut pair, &mut device, wr_id);
        if wr_id < 6 {
            assert_eq!(read(&mut cq.ring, 1), [wr_id]);
        }
    }
    let device = Arc::new(Mutex::new(device));
    let played = Arc::clone(&device);
    machine.fake.on(Target::Write(CMD_RESIZE_CQ), move |reply| {
        let told = reply.call().driver_in().to_vec();
        let new = u64::from_ne_bytes(told[..8].try_into().unwrap());
        assert_eq!(
            (told.len(), &told[8..]),
            (16, &[64, 0, 0, 0, 0, 0, 0, 0][..])
        );
        let new = std::ptr::with_exposed_provenance_mut(new as usize);
        let mut device = played.lock().unwrap();
        device.move_to(NonNull::new(new).unwrap(), 32);
        reply.set_core_out(&ResizeCqResp {
            cqe: 31,
            reserved: 0,
        });
        Ok(())
    });
    let cqe = CompletionQueue::resize(&cq.object, &mut cq.ring, 20, None).unwrap();
    assert_eq!((cqe, cq.ring.capacity()), (31, 32));
    let device = &mut *device.lock().unwrap();
    assert_eq!(device.consumed(), 7);
    complete_one(&mut pair, device, 11);
    assert_eq!(read(&mut cq.ring, 16), [6, 7, 8, 9, 10, 11]);
    // The records are where they were.
    let (register, memory) = DoorbellRegister::in_memory(0);
    cq.arming.arm(register.get(), false);
    assert_eq!(device.record(1), 13);
    // SAFETY: the page that stands in for the register.
    assert_eq!(u64::from_be(unsafe { memory.read() }), 13 << 32 | 0x99);
}

/// The device may write to the new memory although a panic has ended the command.
#[test]
fn interrupted_resize_leaks_the_new_entries() {
    let machine = FakeDevice::new();
    let mut cq = machine.cq(3).unwrap();
    let address = Arc::new(Mutex::new(0));
    let told = Arc::clone(&address);
    machine.fake.on(Target::Write(CMD_RESIZE_CQ), move |reply| {
        let new = reply.call().driver_in()[..8].try_into().unwrap();
        *told.lock().unwrap() = u64::from_ne_bytes(new) as usize;
        resume_unwind(Box::new("in the command"))
    });
    // More than is cached, so that it would be unmapped.
    let resize = || CompletionQueue::resize(&cq.object, &mut cq.ring, 1 << 12, None);
    assert!(catch_unwind(AssertUnwindSafe(resize)).is_err());
    let address = *address.lock().unwrap();
    assert!(address != 0 && is_mapped(address));
}
