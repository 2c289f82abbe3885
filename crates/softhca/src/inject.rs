//! Faults of a text, applied to a device.

use std::sync::Arc;

use roce::packet::{Link, NetworkHeaders, OpcodeFlags, Packet, View, ip_of_gid};
use roce::transport::{Refusal, Service};

use crate::cause::FrameDrop;
use crate::engine::qp::Queue;
use crate::fault::{
    Action, Effect, Fault, Faults, Injector, OnDecision, OnFired, PacketFacts, PacketKind, Refused,
    Way,
};
use crate::hca::Hca;
use crate::platform::Platform;

impl<P: Platform> Hca<P> {
    /// Sets the faults for which `is_meant`, in the place of those that were set before.
    /// `on_fired` is told each time that one happens. A link that a fault has taken down comes
    /// up.
    pub fn inject(
        &mut self,
        faults: &Faults,
        is_meant: impl Fn(&Fault) -> bool,
        on_fired: OnFired,
    ) {
        self.end_faults();
        let former = self.core.faults.injector.take();
        let recording = former.and_then(|it| it.continued(Arc::clone(&on_fired)));
        let mut injector = match recording {
            Some(injector) => injector,
            None => Injector::new(self.queue_pair_numbers(), on_fired),
        };
        injector.add(faults, is_meant, self.core.platform.now());
        if !injector.is_empty() || injector.is_recording() {
            self.set_injector(injector);
        }
    }

    /// Tells `on_decision` from now on what faults decide, also those that are set later.
    pub fn record_faults(&mut self, on_decision: OnDecision) {
        let now = self.core.platform.now();
        let former = self.core.faults.injector.take();
        let mut injector = match former {
            Some(former) => *former,
            None => Injector::new(self.queue_pair_numbers(), Arc::new(|_| {})),
        };
        injector.record_decisions(on_decision, now);
        self.set_injector(injector);
    }

    /// Adds faults to those that are set.
    pub fn add_faults(&mut self, faults: &Faults) {
        let former = self.core.faults.injector.take();
        let mut injector = match former {
            Some(former) => *former,
            None => Injector::new(self.queue_pair_numbers(), Arc::new(|_| {})),
        };
        injector.add(faults, |_| true, self.core.platform.now());
        self.set_injector(injector);
    }

    /// Adds a fault: `action` happens to the next `count` things that it applies to.
    pub fn inject_next(&mut self, action: Action, count: u64) {
        if count != 0 {
            self.add_faults(&Faults::of_next(action, count));
        }
    }

    fn set_injector(&mut self, injector: Injector) {
        self.core.faults.injector = Some(Box::new(injector));
        self.update_loopback();
    }

    /// Ends the faults, and lets go of the packets that they hold back.
    pub fn end_faults(&mut self) {
        let Some(mut former) = self.core.faults.injector.take() else {
            return;
        };
        let now = self.core.platform.now();
        while let Some((way, packet)) = former.next_due(now, true) {
            match way {
                Way::Out => self.frames.push(packet),
                Way::In => self.received.push_back(packet),
            }
        }
        self.send_unaltered(now);
        if former.holds_link_down() {
            former.record_link_up(now);
            self.set_cable(true);
        }
        if let Some(injector) = former.continued(Arc::new(|_| {})) {
            self.core.faults.injector = Some(Box::new(injector));
        }
        self.update_loopback();
    }

    #[inline]
    pub(crate) fn has_faults(&self) -> bool {
        self.core.faults.injector.is_some()
    }

    /// Returns the faults that are set.
    pub fn injector(&mut self) -> Option<&mut Injector> {
        self.core.faults.injector.as_deref_mut()
    }

    /// Returns the numbers of the queue pairs, in the order of their creation as far as numbers
    /// tell it.
    fn queue_pair_numbers(&self) -> Vec<u32> {
        let queues = self.core.queues.iter();
        let pairs = queues.filter(|(_, queue)| matches!(queue, Queue::Qp(_)));
        let mut numbers: Vec<u32> = pairs.map(|(number, _)| number).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Returns the next effect of a fault that concerns the front end: the end of the device, or
    /// of its process.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.core.faults.injector.as_mut()?.next_outer_effect()
    }

    /// Does what faults do at a time: packets that were held back pass, links and queue pairs
    /// fail.
    pub(crate) fn run_faults(&mut self, now: u64) {
        let Some(injector) = &mut self.core.faults.injector else {
            return;
        };
        let queues = &self.core.queues;
        injector.run_timers(now, |number| queues.get(number).is_some());
        let mut received = Vec::new();
        while let Some((way, packet)) = injector.next_due(now, false) {
            match way {
                Way::Out => self.frames.push(packet),
                Way::In => received.push(packet),
            }
        }
        self.send_unaltered(now);
        for packet in received {
            self.receive(now, packet);
        }
        self.apply_effects(now);
    }

    /// Does what packets have set off.
    pub(crate) fn apply_effects(&mut self, now: u64) {
        while let Some(effect) = self.injector().and_then(|it| it.next_effect(now)) {
            let qp = effect.qp;
            match effect.action {
                Action::LinkDown(_) => self.set_cable(false),
                Action::LinkUp => self.set_cable(true),
                Action::Health(syndrome, fatal) => self.set_health(syndrome, fatal),
                Action::QpError => {
                    qp.map(|number| self.fail_queue_pair(number));
                }
                Action::CqError => {
                    let queue = qp.and_then(|number| self.send_cq_of(number));
                    queue.map(|number| self.fail_completion_queue(number));
                }
                _ => {}
            }
        }
    }

    /// Applies the faults, if there are any, to the frames that are about to be sent.
    pub(crate) fn send_by_faults(&mut self, now: u64) {
        let Some(mut injector) = self.core.faults.injector.take() else {
            return;
        };
        if injector.has_packets() {
            for packet in std::mem::take(&mut self.frames) {
                self.send_by(&mut injector, now, packet);
            }
        }
        self.core.faults.injector = Some(injector);
    }

    fn send_by(&mut self, injector: &mut Injector, now: u64, mut packet: Packet) {
        let facts = self.facts(&packet, Way::Out, injector.needs_qp());
        let decided = injector.packet(now, &facts);
        if let Some(line) = decided.lost {
            let length = packet.frame().len();
            let cause = FrameDrop::Injected(line);
            return self.core.observe_frame(facts.qp, length, cause);
        }
        let copy = decided.duplicated.then(|| packet.clone());
        if let Some(random) = decided.corrupted {
            corrupt(&mut packet, random);
        }
        for packet in [Some(packet), copy].into_iter().flatten() {
            let left = match decided.due {
                Some(due) => injector.delay(due, Way::Out, packet).err(),
                None => Some(packet),
            };
            self.frames.extend(left);
        }
    }

    /// Receives a packet, unless faults decide otherwise.
    pub(crate) fn receive_by_faults(&mut self, now: u64, mut packet: Packet) {
        let Some(mut injector) = self.core.faults.injector.take() else {
            return self.receive(now, packet);
        };
        let needs_qp = injector.needs_qp();
        let facts = self.facts(&packet, Way::In, needs_qp);
        let decided = match injector.has_packets() {
            true => injector.packet(now, &facts),
            false => Default::default(),
        };
        let delayed = |injector: &mut Injector, packet| match decided.due {
            Some(due) => injector.delay(due, Way::In, packet).err(),
            None => Some(packet),
        };
        let mut passed = [None, None];
        if let Some(line) = decided.lost {
            let length = packet.frame().len();
            let cause = FrameDrop::Injected(line);
            self.core.observe_frame(facts.qp, length, cause);
        } else {
            let copy = decided.duplicated.then(|| packet.clone());
            if let Some(random) = decided.corrupted {
                corrupt(&mut packet, random);
            }
            passed[0] = delayed(&mut injector, packet);
            passed[1] = copy.and_then(|copy| delayed(&mut injector, copy));
        }
        self.core.faults.injector = Some(injector);
        for packet in passed.into_iter().flatten() {
            match (decided.refused, facts.qp) {
                (Some(refused), Some(qpn)) => {
                    let refusal = match refused {
                        Refused::Nak(code) => Refusal::InjectedNak(code),
                        Refused::NotReady => Refusal::InjectedRnr,
                    };
                    self.transport.refuse(&mut self.core, qpn, refusal);
                }
                _ => self.receive(now, packet),
            }
        }
    }

    /// Returns what faults may ask of a packet; with `needs_qp` also the queue pair that has sent
    /// it, which is looked for.
    fn facts(&self, packet: &Packet, way: Way, needs_qp: bool) -> PacketFacts {
        let mut facts = PacketFacts {
            way,
            qp: None,
            peer_qp: None,
            peer: None,
            kind: PacketKind::Other,
            is_request: false,
            needs_receive: false,
            psn: 0,
        };
        let Ok(view) = View::parse_packet(packet) else {
            return facts;
        };
        facts.kind = PacketKind::of(&view);
        facts.psn = view.bth.psn.value();
        let gid = match way {
            Way::Out => view.network.dgid(view.frame),
            Way::In => view.network.sgid(view.frame),
        };
        facts.peer = gid.map(ip_of_gid);
        let source = view.deth().map(|it| it.source_qpn);
        let source = source.or_else(|| view.dceth().map(|it| it.source_qpn));
        match way {
            Way::Out => {
                facts.peer_qp = Some(view.bth.dest_qpn);
                let find = || needs_qp.then(|| self.sender_of(&view)).flatten();
                facts.qp = source.or_else(find);
            }
            Way::In => {
                let own = view.bth.dest_qpn;
                facts.qp = Some(own);
                let peer = || self.transport.config(own).map(|it| it.remote_qpn);
                facts.peer_qp = source.or_else(peer);
                facts.is_request = self.transport.executes_next(&view);
                let immediate = view.has(OpcodeFlags::WRITE) && view.has(OpcodeFlags::IMM);
                let begins = view.has(OpcodeFlags::SEND) && view.has(OpcodeFlags::START);
                facts.needs_receive = facts.is_request && (begins || immediate);
            }
        }
        facts
    }

    /// Returns the queue pair of a connected service that has sent a packet.
    fn sender_of(&self, view: &View<'_>) -> Option<u32> {
        let dgid = view.network.dgid(view.frame);
        let dlid = |link| match link {
            Link::Ib { dlid, .. } => Some(dlid),
            _ => None,
        };
        let pairs = self.core.queues.iter();
        let mut numbers = pairs.filter(|(_, it)| matches!(it, Queue::Qp(_)));
        let is_sender = |number: u32| {
            let config = self.transport.config(number)?;
            let path = config.path?;
            let is_connected = !matches!(config.service, Service::Ud);
            let leads = match path.grh {
                Some(grh) if dgid.is_some() => Some(grh.dgid) == dgid,
                _ => dlid(path.link) == dlid(view.network.link),
            };
            Some(is_connected && leads && config.remote_qpn == view.bth.dest_qpn)
        };
        numbers
            .find(|(number, _)| is_sender(*number) == Some(true))
            .map(|(number, _)| number)
    }
}

/// Flips a bit that the invariant CRC covers, from the transport header on.
fn corrupt(packet: &mut Packet, random: u64) {
    /// Of the transport header, whose reserved byte the CRC does not cover.
    const RESERVED: usize = 4;
    let kind = packet.kind();
    let headers = NetworkHeaders::read(kind, packet.frame()).map(|it| (it.bth_at, it.end));
    let frame = packet.frame_mut();
    let (begin, end) = headers.unwrap_or((0, frame.len()));
    let length = end.saturating_sub(begin).max(1);
    let mut at = (random >> 8) as usize % length;
    if at == RESERVED {
        at += 1;
    }
    if let Some(byte) = frame.get_mut(begin + at) {
        *byte ^= 1 << (random & 7);
    }
}
