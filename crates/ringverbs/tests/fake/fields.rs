//! What is written into entries, and read out of completions, field by field.

use ringverbs::raw::{Flags, SendRequest, WindowBind};
use ringverbs::{AccessFlags, WindowType, WorkRequest};

use crate::World;
use device_testing::rxe::layout::{self, send, wc};

/// `IBV_WC_RECV` and `IBV_WC_RECV_RDMA_WITH_IMM`.
const OPCODES: [u64; 2] = [128, 129];

#[test]
fn binds_of_both_layers_write_the_same_entry() {
    let world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    let access = AccessFlags::MW_BIND | AccessFlags::REMOTE_READ;
    let region = world.domain.alloc_remote(64, access).unwrap();
    let window = world.domain.memory_window(WindowType::Two).unwrap();
    let slice = || region.slice(8..40).unwrap();
    let (there, access) = (slice().raw_sge(), AccessFlags::REMOTE_READ);
    for raw in [false, true, false] {
        let before = window.rkey();
        if raw {
            let bound = WindowBind::new(&window, &slice(), access).unwrap();
            let request = SendRequest::bind_window(1, &bound).flags(Flags::SIGNALED);
            let mut queue = qp.raw_send();
            queue.push(&request).unwrap();
            // SAFETY: the region stays, and there is no device.
            unsafe { queue.publish().unwrap() };
            // SAFETY: as above; the test is the device.
            unsafe { bound.done() };
        } else {
            qp.post(WorkRequest::bind(&window, slice(), access))
                .unwrap();
        }
        let entries = queues.send.consume();
        let expected = [
            (send::MW_ADDR, there.addr),
            (send::MW_LENGTH, 32),
            (send::MW_MR_LKEY, there.lkey.into()),
            (send::MW_MW_RKEY, before.into()),
            (send::MW_RKEY, window.rkey().into()),
            (send::MW_ACCESS, access.bits().into()),
        ];
        for (field, value) in expected {
            assert_eq!(layout::read(&entries[0], field), value, "{field:?}");
        }
        // The low byte alone is the owner's to count.
        assert_eq!(window.rkey(), before & !0xff | (before + 1) & 0xff);
    }
    qp.post(WorkRequest::unbind(&window)).unwrap();
    let entries = queues.send.consume();
    for field in [
        send::MW_ADDR,
        send::MW_LENGTH,
        send::MW_MR_LKEY,
        send::MW_ACCESS,
    ] {
        assert_eq!(layout::read(&entries[0], field), 0, "{field:?}");
    }
}

/// A sender's own completion has what was sent in its flags, and no data.
#[test]
fn send_completion_has_no_received_data() {
    let mut world = World::new();
    let (mut qp, queues) = world.queue_pair(17);
    qp.send(world.buffer(b"x"), 1).unwrap();
    let id = queues.sent()[0];
    world.raise(&[(wc::WR_ID, id), (wc::WC_FLAGS, 1 | 2 | 8), (wc::EX, 7)]);
    let success = world.cq.poll_one().unwrap().unwrap().result.unwrap();
    assert_eq!((success.immediate(), success.invalidated()), (None, None));
    assert!(!success.has_grh());
}

/// A write with immediate data uses a receive up and puts nothing into it.
#[test]
fn write_with_immediate_leaves_its_receive_empty() {
    for (opcode, filled) in OPCODES.into_iter().zip([40, 0]) {
        let mut world = World::new();
        let (mut qp, queues) = world.queue_pair(17);
        for token in 0..2 {
            qp.receive(world.buffer(b""), token).unwrap();
        }
        for id in queues.received() {
            world.raise(&[
                (wc::WR_ID, id),
                (wc::OPCODE, opcode),
                (wc::BYTE_LEN, 40),
                (wc::WC_FLAGS, 2),
            ]);
        }
        let mut completion = world.cq.poll_one().unwrap().unwrap();
        let success = completion.result.unwrap();
        assert_eq!(success.byte_len, 40);
        assert_eq!(success.is_remote_write(), filled == 0);
        assert_eq!(completion.take_buffer().unwrap().len(), filled);
        let mut cursor = world.cq.cursor();
        let mut entry = cursor.next_entry().unwrap().unwrap();
        assert_eq!(entry.result().unwrap().is_remote_write(), filled == 0);
        let buffer = entry.take_payload().into_buffer();
        assert_eq!(buffer.unwrap().len(), filled);
    }
}
