//! Dynamic connections (DC): an initiator connects to a target while its work requests
//! go there, and a target serves any number of initiators.
//!
//! An initiator is a requester whose peer changes between work requests. It changes to
//! another peer when all earlier requests have completed, with a new connection number.
//! A target has a responder for each initiator, which is reset when a packet with a
//! higher connection number arrives.

use super::cause::{DropCause, Failure};
use super::host::{Host, Operation, SendWork};
use super::io::Io;
use super::qp::Qp;
use super::recovery::FollowUp;
use super::state::Connection;
use crate::packet::{Psn, Template, View};

impl<L> Qp<L> {
    /// Connects to the destination of the work request at the cursor. Returns false if
    /// it has to wait for earlier requests to another destination.
    pub fn connect(&mut self, now: u64) -> bool {
        let cursor = self.req.cursor;
        let Some(pending) = self.req.works.get(cursor) else {
            return false;
        };
        let Some(to) = pending.work.datagram.as_deref() else {
            return true;
        };
        if self.initiator.connected_to() == Some(to) {
            return true;
        }
        if cursor != 0 {
            self.req.blocked = true;
            return false;
        }
        let (to, first) = (*to, pending.first);
        // Taken from the clock, so that the connections of a queue pair have higher
        // numbers than those of an earlier queue pair with the same QP number.
        let number = now.max(self.initiator.last + 1);
        self.initiator.last = number;
        self.initiator.connection = Some(Connection { to, number });
        self.adopt_connection();
        self.req.begin_at(first);
        true
    }

    /// Sets the connection's destination as the peer in the attributes.
    pub fn adopt_connection(&mut self) {
        if let Some(to) = self.initiator.connected_to() {
            self.template = Some(Template::new(&to.path));
            self.config.remote_qpn = to.qpn;
            self.config.path = Some(to.path);
        }
    }

    /// Returns why a work request ends before it is sent, or `None` if it may be sent.
    pub fn refuse_on_stream(&self, work: &SendWork<L>) -> Option<Failure> {
        match work.datagram {
            None if work.operation == Operation::Local => None,
            None => Some(Failure::NoDestination),
            Some(_) => self
                .initiator
                .is_errored(work.stream)
                .then_some(Failure::Flushed),
        }
    }

    /// Handles a failed work request. Returns whether the error is confined to its
    /// stream, so that the rest of the queue continues.
    pub fn stream_failed(&mut self, failed: &FailedRequest) -> bool {
        match failed.cause {
            // The stream was in error already.
            Failure::Flushed => return true,
            // It is unknown what the target has executed.
            Failure::Retries { .. } => return false,
            _ => {}
        }
        if !self.initiator.is_errored(failed.stream) {
            self.initiator.errored.push(failed.stream);
        }
        if self.initiator.errored.len() >= 1 << self.config.log_errored_streams.min(16) {
            return false;
        }
        if failed.answered {
            // The target has done its part; the rest of the response is skipped.
            self.req.skip_rest(failed.end, failed.missing);
        } else {
            self.begin_anew(failed.stream);
        }
        true
    }

    /// The target does not continue this connection. The remaining work requests are
    /// sent over a new one, except those of stream `without`, which are flushed.
    fn begin_anew(&mut self, without: u16) {
        let start = self.req.next_psn;
        let mut psn = start;
        for pending in &mut self.req.works {
            let sent = pending.work.datagram.is_some();
            if pending.done.is_none() && sent && pending.work.stream == without {
                pending.fail(Failure::Flushed);
            }
            if pending.done.is_some() {
                pending.packets = 0;
            }
            pending.first = psn;
            pending.received = 0;
            psn = psn.plus(pending.packets);
        }
        self.req.next_psn = psn;
        self.req.begin_at(start);
        self.req.seek(start);
        self.req.refill(&self.config);
        self.initiator.connection = None;
    }

    /// Processes a request to a DC target.
    pub fn request_of_peer<H: Host<LocalBuffers = L>>(
        &mut self,
        host: &mut H,
        io: &mut Io,
        view: &View<'_>,
    ) -> Result<(), DropCause> {
        let header = view.dceth().ok_or(DropCause::Malformed)?;
        let (packet, own) = (header.key, self.config.dc_key);
        if packet != own {
            return Err(DropCause::DcKey { packet, own });
        }
        let peer = self.peers.of(view, &header, &self.config);
        let index = peer.ok_or(DropCause::StaleConnection(header.connection))?;
        // Nothing is kept.
        let _: FollowUp = self.as_peer(index, |qp| qp.request(host, io, view))?;
        Ok(())
    }

    /// Sends one response, or one packet of it, to some initiator. Returns whether
    /// there was one.
    pub fn reply_to_peers<H: Host<LocalBuffers = L>>(&mut self, host: &mut H, io: &mut Io) -> bool {
        let list = &self.peers.list;
        match list.iter().rposition(|peer| peer.resp.has_replies()) {
            Some(index) => self.as_peer(index, |qp| qp.reply(host, io)),
            None => false,
        }
    }

    /// Runs `act` with the responder for one initiator in place of the queue pair's
    /// own.
    fn as_peer<R>(&mut self, index: usize, act: impl FnOnce(&mut Self) -> R) -> R {
        self.exchange(index);
        let result = act(self);
        self.exchange(index);
        result
    }

    fn exchange(&mut self, index: usize) {
        if let Some(peer) = self.peers.list.get_mut(index) {
            std::mem::swap(&mut self.resp, &mut peer.resp);
            std::mem::swap(&mut self.template, &mut peer.template);
            self.config.remote_qpn = peer.from.qpn;
        }
    }
}

/// A failed work request.
pub(super) struct FailedRequest {
    pub cause: Failure,
    pub stream: u16,
    /// One past its last PSN.
    pub end: Psn,
    /// A response arrived but could not be stored.
    pub answered: bool,
    /// Number of response packets still missing.
    pub missing: u32,
}
