//! On a recorded kernel, with a driver played over memory files: what a real
//! one does only when it is broken, or never twice in the same way.

mod allocation;
mod bad_input;
mod completion;
mod connect;
mod connectx;
mod fields;
mod hostile;
mod in_flight;
mod lifetimes;
mod memory;
mod packets;
mod registration;
mod soundness;

use std::os::fd::AsRawFd;
use std::sync::Arc;

use device_testing::rxe::kernel::{CREATE_CQ, CREATE_QP, Machine, cap};
use device_testing::rxe::{Driver, layout};
use ringverbs::qp::{Init, Mtu, ReadyToReceive, ReadyToSend};
use ringverbs::{
    AccessFlags, AhAttr, Buffer, CompletionQueue, CompletionQueueRef, Context, ProtectionDomain,
    QueuePair, Transport,
};
use uverbs::abi::ids::*;
use uverbs::kernel::fake::{DRIVER, Target};

const DESTROY_QP: Target = Target::Method(OBJECT_QP, METHOD_QP_DESTROY);
const DESTROY_CQ: Target = Target::Method(OBJECT_CQ, METHOD_CQ_DESTROY);
const QUERY_GID: Target = Target::Method(OBJECT_DEVICE, METHOD_QUERY_GID_ENTRY);
const DEREG_MR: Target = Target::Method(OBJECT_MR, METHOD_MR_DESTROY);

/// A context with a protection domain and a completion queue, and the driver's
/// side of them.
struct World {
    cq: CompletionQueue,
    domain: ProtectionDomain,
    context: Context,
    completions: Driver,
    machine: Machine,
}

/// A queue pair's queues, as the driver has them.
struct Queues {
    send: Driver,
    recv: Driver,
}

/// Moves a queue pair to RTS.
fn ready(qp: &mut QueuePair) {
    qp.transition(Init::reliable(1, AccessFlags::empty()))
        .unwrap();
    let path = AhAttr::default();
    qp.transition(ReadyToReceive::reliable(path, 1, 0, Mtu::Bytes1024))
        .unwrap();
    qp.transition(ReadyToSend::reliable(0)).unwrap();
}

impl World {
    fn new() -> Self {
        Self::on(Machine::new())
    }

    /// On a kernel that has been told something.
    fn on(machine: Machine) -> Self {
        // SAFETY: the file outlives the context: both are in this value, which
        // drops it last, or are leaked together.
        let context = unsafe {
            uverbs::Context::from_borrowed_fd(
                Box::new(Arc::clone(&machine.fake)),
                machine.memory.as_raw_fd(),
                DRIVER,
            )
        };
        // SAFETY: the context is given away; the machine keeps its queues' memory.
        let context = unsafe { Context::over(context) }.unwrap();
        let completions = machine.queue(6, 64);
        let mminfo = completions.mminfo();
        machine.fake.on(CREATE_CQ, move |reply| {
            reply.set(ATTR_CREATE_CQ_RESP_CQE, &63u32.to_ne_bytes());
            reply.set_driver_out(&mminfo);
            Ok(())
        });
        let cq = context.completion_queue().build().unwrap();
        let domain = context.alloc_pd().unwrap();
        Self {
            cq,
            domain,
            context,
            completions,
            machine,
        }
    }

    /// A queue pair in RTS, with 7 places in either queue.
    fn queue_pair(&self, qp_num: u32) -> (QueuePair, Queues) {
        let (mut qp, queues) = self.new_queue_pair(qp_num);
        ready(&mut qp);
        (qp, queues)
    }

    fn new_queue_pair(&self, qp_num: u32) -> (QueuePair, Queues) {
        self.new_queue_pair_on(&self.cq.handle(), qp_num)
    }

    /// On another completion queue, which has the same memory.
    fn new_queue_pair_on(&self, cq: &CompletionQueueRef, qp_num: u32) -> (QueuePair, Queues) {
        let (recv, send) = (self.machine.queue(7, 8), self.machine.queue(9, 8));
        let place = [recv.mminfo(), send.mminfo()].concat();
        self.machine.fake.on(CREATE_QP, move |reply| {
            reply.set(ATTR_CREATE_QP_RESP_CAP, &cap(3, 4, 96));
            reply.set(ATTR_CREATE_QP_RESP_QP_NUM, &qp_num.to_ne_bytes());
            reply.set_driver_out(&place);
            Ok(())
        });
        let builder = self.domain.queue_pair(Transport::Reliable, cq);
        let builder = builder.memory_windows();
        let queues = Queues { send, recv };
        (builder.build().unwrap(), queues)
    }

    fn buffer(&self, bytes: &[u8]) -> Buffer {
        let mut buffer = self.domain.alloc(64).unwrap().into_buffer();
        buffer.copy_from(bytes).unwrap();
        buffer
    }

    /// The device completes a work request.
    fn complete(&self, wr_id: u64, qp_num: u32) {
        self.raise(&[
            (layout::wc::WR_ID, wr_id),
            (layout::wc::QP_NUM, qp_num.into()),
        ]);
    }

    /// The device writes a completion with those fields, others zero.
    fn raise(&self, fields: &[(layout::Field, u64)]) {
        let mut entry = vec![0; layout::wc::SIZE];
        for &(field, value) in fields {
            layout::write(&mut entry, field, value);
        }
        let at = self.completions.producer();
        self.completions.set_entry(at, &entry);
        self.completions
            .set_producer((at + 1) % self.completions.slots);
    }

    /// How many objects of a kind the kernel has.
    fn live(&self, object: u16) -> usize {
        let live = self.machine.live().into_iter();
        live.filter(|&there| there == object).count()
    }
}

impl Queues {
    /// The device takes what was posted to the send queue: identifiers.
    fn sent(&self) -> Vec<u64> {
        let entries = self.send.consume().into_iter();
        entries
            .map(|entry| layout::read(&entry, layout::send::WR_ID))
            .collect()
    }

    /// The device takes what was posted to the receive queue: identifiers.
    fn received(&self) -> Vec<u64> {
        let entries = self.recv.consume().into_iter();
        entries
            .map(|entry| layout::read(&entry, layout::recv::WR_ID))
            .collect()
    }
}
