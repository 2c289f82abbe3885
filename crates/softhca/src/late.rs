//! Work that a device with [`Chaos`](crate::chaos::Chaos) does late, and packets that arrive
//! late.

use roce::packet::{Class, OpcodeFlags, Packet, Psn, Syndrome, View, op};
use roce::transport::Queue;

use crate::chaos::Kind;
use crate::engine::chaos::{Arrival, WaitingWrite};
use crate::hca::Hca;
use crate::platform::Platform;

/// Nanoseconds for which the packets of an RDMA write wait for its last.
const MAX_WRITE_WAIT: u64 = 2_000_000;
/// Longest RDMA write that waits: the peer must have sent it before it needs an acknowledgement.
const MAX_WRITE: u32 = 16 << 10;

impl<P: Platform> Hca<P> {
    /// Does what is due.
    #[cold]
    pub(crate) fn release_late(&mut self, now: u64) {
        self.core.release_late(now);
        while let Some((qpn, ())) = self.core.chaos.as_mut().and_then(|it| it.sends.pop(now)) {
            self.transport.ring(qpn, Queue::Send);
        }
    }

    /// Lets packets that have arrived wait, and adds those that need not wait any longer.
    #[cold]
    pub(crate) fn hold_arrivals(&mut self, now: u64) {
        for _ in 0..self.received.len() {
            let packet = self.received.pop_front();
            let passed = packet.and_then(|packet| self.hold_arrival(now, packet));
            self.received.extend(passed);
        }
        while let Some((qpn, late)) = self.core.chaos.as_mut().and_then(|it| it.packets.pop(now)) {
            if let Some(chaos) = &mut self.core.chaos {
                // If the last packet has not come in time.
                chaos.writes.remove(&qpn);
            }
            self.received.push_back(late.packet);
        }
    }

    /// Keeps or drops a packet, or returns it.
    fn hold_arrival(&mut self, now: u64, packet: Packet) -> Option<Packet> {
        let (Ok(view), Some(chaos)) = (View::parse_packet(&packet), &mut self.core.chaos) else {
            return Some(packet);
        };
        let qpn = view.bth.dest_qpn;
        if !chaos.has(qpn) {
            return Some(packet);
        }
        let is_request = !view.has(OpcodeFlags::RESPONSE);
        let is_rc = view.opcode.is_some_and(|it| it.class == Class::Rc);
        let is_part = is_request && is_rc && !view.has(OpcodeFlags::END);
        // A packet that follows shows the peer what is missing, so that no timeout is needed.
        let retries = self.transport.config(qpn).map_or(0, |it| it.retry_count);
        if is_part && retries > 1 && chaos.decide(Kind::Loss, qpn).is_some() {
            return None;
        }
        let waits = chaos.packets.last_due(qpn);
        let mut due = chaos.decide(Kind::Packet, qpn).map(|it| it.due(now));
        let mut is_replaced = false;
        let is_acknowledgement = view
            .opcode
            .is_some_and(|it| it.operation == op::ACKNOWLEDGE)
            && matches!(view.aeth().map(|it| it.syndrome), Some(Syndrome::Ack(_)));
        if is_acknowledgement {
            if let Some(last) = chaos.packets.last_mut(qpn).filter(|it| it.is_replaced) {
                last.packet = packet;
                return None;
            }
            if let Some(choice) = chaos.decide(Kind::Acknowledgement, qpn) {
                is_replaced = true;
                due = due.max(Some(choice.due(now)));
            }
        }
        let begins = is_part && view.has(OpcodeFlags::START) && waits.is_none();
        let psn = view.bth.psn;
        match view.reth().filter(|it| it.length <= MAX_WRITE) {
            Some(reth) if begins && view.has(OpcodeFlags::WRITE) => {
                if let Some(choice) = chaos.decide(Kind::Placement, qpn) {
                    let write = WaitingWrite {
                        first: psn,
                        next: psn.plus(1),
                        rkey: reth.rkey,
                        va: reth.va,
                        length: reth.length,
                        arrived: view.payload.len() as u32,
                        choice,
                    };
                    chaos.writes.insert(qpn, write);
                    due = due.max(Some(now + MAX_WRITE_WAIT));
                }
            }
            _ if is_request => {
                let write = chaos.writes.remove(&qpn);
                if let Some(write) = write.filter(|it| it.next == psn) {
                    self.continue_write(now, qpn, write, &view);
                }
            }
            _ => {}
        }
        let Some(chaos) = &mut self.core.chaos else {
            return Some(packet);
        };
        let Some(due) = due.max(chaos.packets.last_due(qpn)) else {
            return Some(packet);
        };
        let late = Arrival {
            packet,
            is_replaced,
        };
        chaos.packets.push(qpn, due, late);
        None
    }

    /// Adds a packet to an RDMA write that waits; its last packet is placed before the others.
    fn continue_write(&mut self, now: u64, qpn: u32, mut write: WaitingWrite, view: &View<'_>) {
        let length = view.payload.len() as u32;
        if !view.has(OpcodeFlags::WRITE) || view.has(OpcodeFlags::START) {
            return;
        }
        if !view.has(OpcodeFlags::END) {
            write.next = write.next.plus(1);
            write.arrived = write.arrived.saturating_add(length);
            if let Some(chaos) = &mut self.core.chaos {
                chaos.writes.insert(qpn, write);
            }
            return;
        }
        let is_expected = self
            .transport
            .query(qpn)
            .is_some_and(|it| it.state.receives() && Psn::new(it.recv_psn) == write.first);
        let is_permitted = self.transport.config(qpn).is_some_and(|it| it.allow_write);
        if is_expected && is_permitted && write.arrived.checked_add(length) == Some(write.length) {
            self.core.place(qpn, &write, view.payload.bytes());
        }
        if let Some(chaos) = &mut self.core.chaos {
            chaos.packets.set_due(qpn, write.choice.due(now));
        }
    }
}
