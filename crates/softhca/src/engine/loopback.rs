//! Local loopback of Ethernet frames that the interface sends.
//!
//! The driver controls it in two places, each separately for unicast and multicast. The
//! vport context says whether any frames are looped back. A TIR says whether it accepts
//! frames of its own transport domain, which belongs to one user of the device; it
//! always accepts those of other users. RDMA packets are not concerned: they do not
//! pass through here.

use roce::packet::Packet;

use super::core::Core;
use super::frame::{Origin, cast};
use super::qp::Queue;
use super::steering::Object;
use crate::platform::Platform;

impl<P: Platform> Core<P> {
    /// Delivers frames sent by a send queue to the interface itself, as far as loopback
    /// is enabled.
    pub(crate) fn loop_back(&mut self, sqn: u32, sent: &[Packet]) {
        let origin = Origin::Local {
            domain: self.domain_of(sqn),
        };
        for packet in sent {
            let frame = packet.frame();
            if self.nic.disabled_loopback & cast(frame) == 0 {
                self.receive_frame(frame, origin);
            }
        }
    }

    /// Returns the transport domain of a send queue, taken from its TIS.
    fn domain_of(&self, sqn: u32) -> Option<u32> {
        let Some(Queue::Sq(sq)) = self.queues.get(sqn) else {
            return None;
        };
        match self.steering.get(sq.tis) {
            Some(Object::Tis { domain, .. }) => Some(*domain),
            _ => None,
        }
    }
}
