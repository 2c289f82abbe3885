//! Unreliable datagrams.

use super::cause::{Cause, DropCause, Failure};
use super::host::{Fault, Host, RecvDone, RecvKind, Source};
use super::io::Io;
use super::qp::Qp;
use super::{Operation, QpState};
use crate::packet::{
    Deth, Link, MULTICAST_QPN, OpcodeFlags, PacketBuilder, Path, Template, View, op,
};

/// Length of the GRH area that precedes the payload in a receive buffer.
const GRH_AREA: u32 = 40;

/// A queue key with this bit set stands for the queue pair's own.
const QKEY_OWN: u32 = 1 << 31;

impl<L> Qp<L> {
    /// Sends the datagram at the cursor.
    pub fn send_datagram<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        now: u64,
    ) {
        let psn = self.req.send_psn;
        let cursor = self.req.cursor;
        let mut bth = self.bth(op::SEND_ONLY, psn);
        let own_qkey = self.config.qkey;
        let source_qpn = self.config.wire_qpn.unwrap_or(self.number);
        let pending = &mut self.req.works[cursor];
        let work = &mut pending.work;
        // `take` accepts only work requests with a destination.
        let Some(to) = work.datagram.as_deref() else {
            pending.fail(Failure::NoDestination);
            return;
        };
        let template = Template::new(&to.path);
        let imm = work.operation == Operation::SendImm;
        if imm {
            bth.opcode |= 1;
        }
        bth.dest_qpn = to.qpn;
        bth.solicited = work.solicited;
        let qkey = if to.qkey & QKEY_OWN != 0 {
            own_qkey
        } else {
            to.qkey
        };
        if to.qpn == MULTICAST_QPN {
            self.multicast_path = Some(to.path);
        }
        let payload = work.length as usize;
        let mut builder = PacketBuilder::new(&io.pool, &template, bth, payload);
        builder.put(&Deth { qkey, source_qpn }.bytes());
        if imm {
            builder.put(&work.imm.to_be_bytes());
        }
        let gathered = match payload {
            0 => Ok(()),
            _ => host.gather(self.number, &mut work.local, 0, builder.space(payload)),
        };
        if gathered == Err(Fault::Absent) {
            self.wait_for_page(now);
            return;
        }
        if let Err(fault) = gathered {
            pending.fail(Failure::LocalMemory(fault));
        } else {
            let packet = builder.finish();
            if to.qpn == MULTICAST_QPN {
                io.counters.multicasts_sent += 1;
                io.counters.multicast_bytes_sent += packet.frame().len() as u64;
            }
            io.send(packet);
            self.req.send_psn = psn.plus(1);
            self.req.una = self.req.send_psn;
            self.req.high = self.req.send_psn;
            self.req.cursor += 1;
        }
        self.complete(host);
    }

    /// Processes a received datagram.
    pub fn datagram<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        view: &View<'_>,
    ) -> Result<(), DropCause> {
        let deth = view.deth().ok_or(DropCause::Malformed)?;
        let multicast = view.bth.dest_qpn == MULTICAST_QPN;
        let (packet, own) = (deth.qkey, self.config.qkey);
        if packet != own {
            return Err(DropCause::QueueKey { packet, own });
        }
        if multicast && self.config.block_multicast_loopback && self.is_own(view, deth) {
            return Err(DropCause::OwnMulticast);
        }
        let take_spare = self.resp.take_spare();
        let recv = take_spare.or_else(|| host.next_recv(self.number, None, None));
        let mut recv = recv.ok_or(DropCause::NoReceive)?;
        let length = view.payload.len() as u32 + GRH_AREA;
        let area = view.network.grh_area(view.frame);
        let room = recv.length;
        if length > room {
            // A sender must not be able to stop the queue pair by a long datagram (class D).
            self.resp.set_spare(recv);
            return Err(DropCause::DatagramLength { length, room });
        }
        let local = &mut recv.local;
        let stored = host
            .scatter(self.number, local, 0, &area)
            .and_then(|()| host.scatter(self.number, local, GRH_AREA, view.payload.bytes()));
        if stored == Err(Fault::Absent) {
            // The datagram is lost; the receive is used for the next one.
            self.resp.set_spare(recv);
            return Err(DropCause::AbsentMemory);
        }
        let cause = stored
            .err()
            .map(|fault| Cause::from(Failure::LocalMemory(fault)));
        let done = RecvDone {
            cause,
            kind: if view.has(OpcodeFlags::IMM) {
                RecvKind::SendImm
            } else {
                RecvKind::Send
            },
            length: if cause.is_none() { length } else { 0 },
            imm: view.imm(),
            solicited: view.bth.solicited,
            source: Some(Source {
                qpn: deth.source_qpn,
                link: view.network.link,
                l3: view.network.l3,
                pkey: view.bth.pkey,
                multicast,
            }),
            xrc_srqn: None,
        };
        if cause.is_some() {
            host.recv_failed(self.number, &recv);
        }
        host.recv_done(self.number, recv, done);
        if let Some(cause) = cause {
            host.report(Some(self.number), cause);
            self.fail(host, QpState::Error);
        }
        Ok(())
    }

    fn is_own(&self, view: &View<'_>, deth: Deth) -> bool {
        let sgid = |path: &Path| path.grh.map(|grh| grh.sgid);
        let same_source =
            self.multicast_path
                .as_ref()
                .is_some_and(|path| match (path.link, view.network.link) {
                    (Link::Ib { slid: a, .. }, Link::Ib { slid: b, .. }) => a == b,
                    (Link::Ether { smac: a, .. }, Link::Ether { smac: b, .. }) => a == b,
                    (Link::Ip, Link::Ip) => sgid(path) == view.network.sgid(view.frame),
                    _ => false,
                });
        same_source && deth.source_qpn == self.config.wire_qpn.unwrap_or(self.number)
    }
}
