//! Loopback: requests to a queue pair of the same HCA, without packets, if the peer takes
//! no receive for them.
//!
//! The requester and the responder run one after the other and end in the same state as
//! after an exchange of packets. Read responses, NAKs, and acknowledgements after them are
//! therefore still sent as packets.

use super::config::Service;
use super::host::{Fault, Host};
use super::io::Io;
use super::qp::Qp;
use super::state::Reply;
use crate::fabric::PortConfig;
use crate::packet::{Payload, Psn, View};

impl<L> Qp<L> {
    /// Returns whether `peer`, which [`Qp::pairs_with`] this queue pair, is reached by its
    /// address and accepts its packets; for RC also in the opposite direction.
    pub fn loops_back_to(&self, peer: &Self, home: &PortConfig) -> bool {
        self.reaches(peer, home) && (!self.is_answered() || peer.reaches(self, home))
    }

    /// Returns whether this queue pair and another one of the HCA are connected, according
    /// to their numbers, services and states. Queue pairs with recovery or congestion
    /// control keep and count packets, so they are excluded.
    pub fn pairs_with(&self, peer: &Self) -> bool {
        matches!(self.config.service, Service::Rc | Service::Uc)
            && peer.config.service == self.config.service
            && self.config.remote_qpn == peer.number
            && (!self.is_answered() || peer.config.remote_qpn == self.number)
            && peer.state.receives()
            && !self.paces
            && !peer.paces
    }

    fn is_answered(&self) -> bool {
        self.config.service == Service::Rc
    }

    /// Returns whether packets to the peer's address are for `other`, which accepts them.
    fn reaches(&self, other: &Self, home: &PortConfig) -> bool {
        let (Some(path), Some(template)) = (&self.config.path, &self.template) else {
            return false;
        };
        home.is_destination(path.link)
            && other.pkey_matches(self.config.pkey)
            && other.speaks(template.l3().0)
            && other.is_connected_to(path.link, path.grh.map(|grh| grh.sgid))
    }

    /// Returns whether all packets before this PSN have arrived, so that those in flight are
    /// duplicates.
    pub fn expects(&self, psn: Psn) -> bool {
        self.resp.expected == psn && self.state.receives()
    }

    /// Passes the request packet of a work request to the peer, which expects it.
    pub fn hand_over<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        peer: &mut Self,
        at: usize,
        psn: Psn,
    ) -> Result<(), Fault> {
        let request = self.request_packet(at, psn, None);
        let (Some(path), Some(template)) = (&self.config.path, &self.template) else {
            return Err(Fault::Protection);
        };
        let local = &mut self.req.works[at].work.local;
        let (offset, length) = (request.offset, request.payload);
        // A contiguous payload is not copied.
        let mut buffer = std::mem::take(&mut io.payload);
        let payload = match length {
            0 => Ok(Payload::Bytes(&[])),
            _ => match host.locate(self.number, local, offset, length) {
                Some(at) => Ok(Payload::Memory(at, length)),
                None => {
                    let bytes = &mut buffer[..length];
                    let gathered = host.gather(self.number, local, offset, bytes);
                    gathered.map(|()| Payload::Bytes(bytes))
                }
            },
        };
        let passed = payload.map(|payload| {
            let bytes = template.bytes().len() + request.length();
            io.counters.packets_sent += 1;
            io.counters.bytes_sent += bytes as u64;
            io.counters.packets_received += 1;
            io.counters.bytes_received += bytes as u64;
            let l3 = template.l3().0;
            let view = View::looped_back(path.link, l3, request.bth, request.headers(), payload);
            // Queue pairs that keep packets are excluded by `pairs_with`.
            if let Err(cause) = peer.request(host, io, &view) {
                io.drop_packet(host, Some(peer.number), cause);
            }
        });
        io.payload = buffer;
        passed
    }

    /// Takes the peer's acknowledgement, unless an earlier response is in flight.
    pub fn take_acknowledgement<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
        peer: &mut Self,
    ) {
        let (Some(&Reply::Ack { psn, .. }), 1) =
            (peer.resp.replies.front(), peer.resp.replies.len())
        else {
            return;
        };
        let end = psn.plus(1);
        if self.oldest_awaiting(end).is_none() {
            peer.resp.replies.clear();
            self.acknowledge(host, io, now, end);
        }
    }
}
