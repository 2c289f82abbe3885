//! A device of a fabric, and its faults.

use embedded::Embedded;
use ringverbs::{Context, Device, QueuePair, Result};

use crate::leaks::Leak;
use crate::wire::{SharedWire, lock};

/// A host of a fabric, with one device.
#[derive(Debug)]
pub struct Node {
    device: Embedded,
    index: usize,
    wire: WireOf,
}

/// The wires; without `Debug` output.
struct WireOf(SharedWire);

impl std::fmt::Debug for WireOf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("..")
    }
}

impl Node {
    pub(crate) fn new(device: Embedded, index: usize, wire: SharedWire) -> Self {
        Self {
            device,
            index,
            wire: WireOf(wire),
        }
    }

    /// Returns its index in the fabric.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Returns the device, for code that opens it or connects by address.
    pub fn device(&self) -> Device {
        self.device.clone().into()
    }

    /// Opens the device.
    ///
    /// # Errors
    /// As [`Device::open`].
    pub fn open(&self) -> Result<Context> {
        self.device().open()
    }

    /// The link goes down: frames on their way here, and all that are sent, are lost.
    /// The program gets `PORT_ERR`; queue pairs retry until they give up.
    pub fn link_down(&self) {
        self.device.set_cable(false);
    }

    /// The link comes up. The program gets `PORT_ACTIVE`.
    pub fn link_up(&self) {
        self.device.set_cable(true);
    }

    /// The device fails as one that is unplugged: the program gets `DEVICE_FATAL`, and
    /// EIO from all commands. Its memory is released.
    pub fn fail(&self) {
        self.device.fail();
    }

    /// A queue pair fails by an error of the device: it enters the error state, work
    /// requests are flushed, and the program gets `QP_FATAL`. Returns false if the
    /// queue pair is another node's.
    pub fn fail_queue_pair(&self, qp: &QueuePair) -> bool {
        self.device.fail_queue_pair(qp.qp_num())
    }

    /// The host disappears, as by a power failure: it receives and sends nothing any
    /// more, and notices nothing.
    pub fn die(&self) {
        lock(&self.wire.0).dead.push(self.index);
    }

    /// The host is reachable again after [`die`](Self::die).
    pub fn revive(&self) {
        lock(&self.wire.0).dead.retain(|node| *node != self.index);
    }

    /// The receiver is slow: the next `count` messages of reliable connections that
    /// need a receive find none (RNR NAK), and are repeated.
    pub fn hold_receives(&self, count: u32) {
        self.device.hold_receives(count);
    }

    /// Returns the number of objects that exist on the device.
    pub fn objects(&self) -> usize {
        self.device.objects()
    }

    pub(crate) fn leaks(&self, leaks: &mut Vec<Leak>) {
        let node = self.index;
        self.device.each_object(|kind, number, bytes, sends| {
            match bytes {
                0 => leaks.push(Leak::Object { node, kind, number }),
                _ => leaks.push(Leak::Memory {
                    node,
                    key: number,
                    bytes,
                }),
            }
            if sends != 0 {
                leaks.push(Leak::Sends {
                    node,
                    qp_num: number,
                    count: sends,
                });
            }
        });
        let abandoned = self.device.abandoned_sends().into_iter();
        leaks.extend(abandoned.map(|(qp_num, count)| Leak::Sends {
            node,
            qp_num,
            count,
        }));
    }
}
