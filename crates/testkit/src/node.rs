//! A device of a fabric, and its faults.

use embedded::Embedded;
use embedded::softhca::fault::{Faults, ParseError};
use ringverbs::cm::{self, manager::EventChannel};
use ringverbs::{Context, Device, QueuePair, Result};

use crate::leaks::Leak;
use crate::tap::{SharedWire, lock};

/// A host of a fabric, with one device.
#[derive(Debug)]
pub struct Node {
    device: Embedded,
    index: usize,
    wire: OpaqueWire,
}

/// The shared wire, without `Debug` output.
struct OpaqueWire(SharedWire);

impl std::fmt::Debug for OpaqueWire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("..")
    }
}

impl Node {
    pub(crate) fn new(device: Embedded, index: usize, wire: SharedWire) -> Self {
        Self {
            device,
            index,
            wire: OpaqueWire(wire),
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

    /// Opens an event channel of the connection manager: its ids belong to the node. For tests
    /// of single messages; `ringverbs::cm` takes [`device`](Self::device).
    ///
    /// # Errors
    /// EMFILE.
    pub fn event_channel(&self) -> std::result::Result<EventChannel, cm::manager::Error> {
        EventChannel::open_on(self.device.connection_manager())
    }

    /// Takes the link down: frames in transit to the node, and all sent ones, are lost. The
    /// program gets `PORT_ERR`; queue pairs retry until their retries are exhausted.
    pub fn link_down(&self) {
        self.device.set_cable(false);
    }

    /// Brings the link up. The program gets `PORT_ACTIVE`.
    pub fn link_up(&self) {
        self.device.set_cable(true);
    }

    /// Makes the device fail, as if unplugged: the program gets `DEVICE_FATAL`, and EIO from
    /// all commands. The device's memory is released.
    pub fn fail(&self) {
        self.device.fail();
    }

    /// Makes a queue pair fail by a device error: it enters the error state, work requests are
    /// flushed, and the program gets `QP_FATAL`. Returns false if the queue pair belongs to
    /// another node.
    pub fn fail_queue_pair(&self, qp: &QueuePair) -> bool {
        self.device.fail_queue_pair(qp.qp_num())
    }

    /// Makes the host disappear, as by a power failure: it receives and sends nothing, and its
    /// program gets no event.
    pub fn die(&self) {
        lock(&self.wire.0).dead.push(self.index);
    }

    /// Makes the host reachable again after [`die`](Self::die).
    pub fn revive(&self) {
        lock(&self.wire.0).dead.retain(|node| *node != self.index);
    }

    /// Simulates a slow receiver: the next `count` messages of reliable connections that need a
    /// receive are answered by an RNR NAK, and retried.
    pub fn hold_receives(&self, count: u32) {
        self.device.hold_receives(count);
    }

    /// Adds faults of the device, one on each line, in the language of those of unmodified
    /// programs (`docs/faults.md`): `lose opcode=send nth=3`. Matchers of devices and programs
    /// are ignored.
    ///
    /// # Errors
    /// Says where the first thing is that cannot be understood, and why; no fault is added.
    pub fn inject(&self, faults: &str) -> std::result::Result<(), ParseError> {
        self.add_faults(&Faults::parse(faults)?);
        Ok(())
    }

    pub(crate) fn add_faults(&self, faults: &Faults) {
        self.device.add_faults(faults);
    }

    /// Returns the faults of [`inject`](Self::inject) and [`hold_receives`](Self::hold_receives),
    /// and how often each has happened.
    pub fn injected(&self) -> Vec<(String, u64)> {
        self.device.faults()
    }

    /// Ends these faults.
    pub fn end_injected(&self) {
        self.device.end_faults();
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
