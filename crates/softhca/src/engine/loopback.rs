//! Local loopback: what the interface hears of the frames that it sends.
//!
//! The driver says so in two places, each for frames to one and to many. The
//! context of the port (vport) says whether any come back. A TIR says whether it
//! takes those of its own transport domain, which is all that one user of the
//! card has: another user's it takes in any case. RDMA has no part in it: what
//! queue pairs send is never looked at here.

use super::core::Core;
use super::qp::Queue;
use super::steering::Object;
use crate::packet::Packet;
use crate::platform::Platform;

/// Frames to one address, and to many: bits of what is on or off.
pub(crate) const UNICAST: u32 = 1;
pub(crate) const MULTICAST: u32 = 2;

/// Which of the two a frame is.
pub(crate) fn cast(frame: &[u8]) -> u32 {
    match frame.first() {
        Some(first) if first & 1 != 0 => MULTICAST,
        _ => UNICAST,
    }
}

/// Where a frame comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Wire,
    /// A send queue of this interface, and its transport domain.
    Here {
        domain: Option<u32>,
    },
}

impl<P: Platform> Core<P> {
    /// Gives the interface what a send queue of it has sent, as far as the driver
    /// wants to have it.
    pub(crate) fn loop_back(&mut self, sqn: u32, sent: &[Packet]) {
        let origin = Origin::Here {
            domain: self.domain_of(sqn),
        };
        for packet in sent {
            let frame = packet.frame();
            if self.nic.loopback_off & cast(frame) == 0 {
                self.receive_frame(frame, origin);
            }
        }
    }

    /// The transport domain of a send queue, by its TIS.
    fn domain_of(&self, sqn: u32) -> Option<u32> {
        let Some(Queue::Sq(sq)) = self.queues.get(sqn) else {
            return None;
        };
        match self.steering.get(sq.tis) {
            Some(Object::Tis { domain }) => Some(*domain),
            _ => None,
        }
    }
}
