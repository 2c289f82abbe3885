//! A device under its lock: engine, objects, files, and a turn of all of them.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use mmap_rs::{MmapMut, MmapOptions};
use nix::net::if_::if_nametoindex;
use ring::Mapping;
use roce::bits::get32;
use roce::fabric::Fabric;
use roce::packet::{Gid, Pool, ip_of_gid};
use roce::transport::{Counters, Queue};
use softhca::command::opcode as op;
use softhca::engine::counters::Stats;
use softhca::engine::eq::event;
use softhca::layout::{
    PAGE_LIST, access_register, eqc, hca_cap, header, nic_vport_context, roce_addr_layout,
};
use softhca::profile::PortKind;
use softhca::profile::cap;
use softhca::rule::Rule;
use softhca::{Hca, Settings};
use uverbs::AsyncEventType as Async;
use uverbs::abi::ids;
use uverbs::abi::write::{AsyncEventDesc, CompEventDesc};
use zerocopy::IntoBytes;

use crate::addresses::{OwnGids, PortAddresses};
use crate::driver::cause::{Cause, Class, Observer, Result, refuse};
use crate::driver::command::{self, Input, make};
use crate::driver::data::{Flows, Subscription};
use crate::driver::event::{Event, EventCounter, EventFile};
use crate::driver::explanations::Explanations;
use crate::driver::files::File;
use crate::driver::gids::{self, GID_IB, GID_ROCE_V2, GidTable, PortGid, interface_identifier};
use crate::driver::memory::Process;
use crate::driver::object::{Cq, Object, Objects};
use crate::driver::watch::{Doorbell, DoorbellWatch};
use crate::links::PortLink;

const PAGE: u64 = 4096;
/// Maximum number of turns before a queue pair is destroyed.
const MAX_FLUSH_TURNS: u32 = 16;

/// Offsets of doorbell registers in a UAR.
const ARM_CQ: u64 = 0x20;
const UPDATE_EQ: u64 = 0x48;

/// Number of completion vectors.
pub(crate) const VECTORS: u32 = 4;
const EQ_LOG_SIZE: u32 = 12;
const EQ_ENTRY: usize = 64;
const EQ_OWNER: usize = 63;

/// An event queue of the device, read only by this module.
#[derive(Debug)]
struct EventQueue {
    memory: MmapMut,
    number: u32,
    consumed: u32,
}

/// A time, read once for all that a turn decides.
#[derive(Clone, Copy)]
pub(crate) struct TurnTime {
    pub(crate) system: Instant,
    /// The same by the device's clock.
    device: u64,
}

/// State of a device.
pub(crate) struct State {
    pub(crate) hca: Hca<Process>,
    pub(crate) objects: Objects,
    pub(crate) files: HashMap<RawFd, File>,
    pub(crate) watch: DoorbellWatch,
    /// The UAR of all its queues.
    pub(crate) uar: u32,
    /// Protection domain of XRC targets, which name none: requests to them use
    /// the protection domain of the shared receive queue that they name.
    pub(crate) pd: u32,
    /// The counter set of all its queue pairs.
    pub(crate) counter_set: u32,
    /// Flow steering rules.
    pub(crate) flows: Flows,
    /// Subscriptions to events of DevX.
    pub(crate) subscriptions: Vec<Subscription>,
    /// Variant (low byte) of the last memory key.
    pub(crate) variant: u8,
    pub(crate) node_guid: u64,
    /// The device has failed: every command is refused.
    pub(crate) failed: bool,
    /// Sends that were outstanding when their queue pair was destroyed.
    pub(crate) abandoned: Vec<(u32, usize)>,
    /// Mappings of the DMA buffers of regions, by their handles.
    pub(crate) dma_buffers: HashMap<u32, Mapping>,
    /// The port's GIDs.
    pub(crate) gids: Vec<PortGid>,
    /// Index of the network interface of an Ethernet port; 0 if there is none.
    pub(crate) interface: u32,
    /// The addresses of the device, if they are the host's and peers may be other hosts.
    addresses: Option<Arc<dyn PortAddresses>>,
    /// Number of address changes that have been applied to the GIDs.
    applied_changes: u32,
    /// The link of the port; `None` if only [`Hca::set_cable`] changes it.
    link: Option<PortLink>,
    /// Bytes sent and received that [`State::take_moved`] has returned.
    taken: (u64, u64),
    /// A thread drives the device, so that posted work is sent without the program's help.
    pub(crate) has_thread: bool,
    /// Ends the process, if a fault says so.
    pub(crate) on_die: Option<fn()>,
    /// One per completion vector. The first also reports all other events.
    events: Vec<EventQueue>,
    observer: Option<Observer>,
    explanations: Arc<Mutex<Explanations>>,
}

/// The register PAOS, and a value of its administrative state.
const PORT_STATUS: u32 = 0x5006;
const UP: u32 = 1;
/// The group of capabilities of atomics.
const ATOMICS: u32 = 3;

/// Returns the port's default GID: the default prefix and the port's GUID or, on Ethernet,
/// the interface identifier derived from the MAC address.
fn default_gid(settings: &Settings) -> Gid {
    let mut gid = [0; 16];
    gid[..2].copy_from_slice(&[0xfe, 0x80]);
    if settings.profile.port == PortKind::Ethernet {
        gid[8..].copy_from_slice(&interface_identifier(settings.mac));
    } else {
        gid[8..].copy_from_slice(&settings.guid.to_be_bytes());
    }
    gid
}

impl State {
    /// Creates a device in the state after initialization by a driver.
    pub(crate) fn new(
        process: Process,
        settings: Settings,
        addresses: Option<Arc<dyn PortAddresses>>,
        table: &GidTable,
        fabric: &Fabric,
        pool: Pool,
    ) -> Result<Self> {
        let default = default_gid(&settings);
        let is_ethernet = settings.profile.port == PortKind::Ethernet;
        let gids = match &addresses {
            Some(addresses) => addresses
                .list()
                .all()
                .into_iter()
                .map(PortGid::from)
                .collect(),
            None if is_ethernet => table.gids(settings.mac),
            None => vec![PortGid::new(default, GID_IB)],
        };
        let interface = match &addresses {
            Some(addresses) => addresses.interface(),
            // Its routes lead to all loopback addresses.
            None if is_ethernet => if_nametoindex("lo").unwrap_or(0),
            None => 0,
        };
        let node_guid = settings.guid;
        let is_shaped = settings.link.is_shaped();
        let mut hca = Hca::new(process, settings, fabric, pool);
        hca.set_lossy(addresses.is_some() || is_shaped);
        // As the driver does. The default is network byte order.
        let input = Input::new(op::SET_HCA_CAP, 0x110)
            .set(hca_cap::GROUP, ATOMICS)
            .set(cap::ATOMIC_ENDIANNESS_MODE.at(hca_cap::AT), 1);
        command::run(&mut hca, &input, 16)?;
        let uar = make(&mut hca, &Input::new(op::ALLOC_UAR, 16))?;
        let pd = make(&mut hca, &Input::new(op::ALLOC_PD, 16))?;
        let output = command::run(&mut hca, &Input::new(op::ALLOC_Q_COUNTER, 16), 16)?;
        let counter_set = header::SHORT_NUMBER.get(&output);
        // The first queue selects all events; completion events need no
        // selection.
        let event_mask = |vector| if vector == 0 { u64::MAX } else { 0 };
        let queue = |vector| EventQueue::new(&mut hca, uar, event_mask(vector));
        let events = (0..VECTORS).map(queue).collect::<Result<_>>()?;
        let mut state = Self {
            hca,
            objects: Objects::default(),
            files: HashMap::new(),
            watch: DoorbellWatch::default(),
            uar,
            pd,
            counter_set,
            flows: Flows::default(),
            subscriptions: Vec::new(),
            variant: 0,
            node_guid,
            failed: false,
            abandoned: Vec::new(),
            dma_buffers: HashMap::new(),
            gids,
            interface,
            addresses,
            applied_changes: 0,
            link: None,
            taken: (0, 0),
            has_thread: false,
            on_die: None,
            events,
            observer: None,
            explanations: Arc::default(),
        };
        state.observe(None);
        if state.is_ethernet() {
            state.bring_up()?;
        }
        // Discards the port's initial event.
        state.process_events(|_, _| {});
        Ok(state)
    }

    /// Returns the last causes.
    pub(crate) fn explanations(&self) -> MutexGuard<'_, Explanations> {
        lock(&self.explanations)
    }

    /// Sets who is told why commands, work requests, accesses and packets fail, and of events.
    pub(crate) fn observe(&mut self, observer: Option<Observer>) {
        let (explanations, told) = (Arc::clone(&self.explanations), observer.clone());
        let device = softhca::cause::Observer::new(move |cause| {
            let cause = Cause::Device(*cause);
            lock(&explanations).keep(&cause);
            if let Some(told) = &told {
                told(&cause);
            }
        });
        self.hca.observe(Some(device));
        self.hca.count_operations(observer.is_some());
        self.observer = observer;
    }

    /// Returns whether somebody is told of causes.
    pub(crate) fn has_observer(&self) -> bool {
        self.observer.is_some()
    }

    /// Tells the observer a cause, and logs it.
    pub(crate) fn report(&self, cause: &Cause) {
        tracing::debug!("{cause}");
        lock(&self.explanations).keep(cause);
        if let Some(observer) = &self.observer {
            observer(cause);
        }
    }

    /// Returns the bytes delivered and received since the last call.
    #[inline]
    pub(crate) fn take_moved(&mut self) -> (u64, u64) {
        let stats = self.hca.stats();
        let (sent, received) = (stats.bytes_delivered, stats.bytes_scattered);
        let moved = (
            sent.saturating_sub(self.taken.0),
            received.saturating_sub(self.taken.1),
        );
        self.taken = (sent, received);
        moved
    }

    pub(crate) fn is_ethernet(&self) -> bool {
        self.hca.settings().profile.port == PortKind::Ethernet
    }

    /// Sets up an Ethernet port, as the network driver does.
    fn bring_up(&mut self) -> Result<()> {
        let input = Input::new(op::ACCESS_REG, 0x20)
            .set(access_register::REGISTER_ID, PORT_STATUS)
            .set(
                access_register::PAOS_ADMIN_STATUS.at(access_register::REGISTER_DATA),
                UP,
            );
        command::run(&mut self.hca, &input, 0x20)?;
        let input = Input::new(op::MODIFY_NIC_VPORT_CONTEXT, 0x200)
            .set(
                nic_vport_context::FIELD_SELECT,
                nic_vport_context::SELECT_ROCE_EN,
            )
            .set(nic_vport_context::ROCE_EN.at(nic_vport_context::AT), 1);
        command::run(&mut self.hca, &input, 16)?;
        for index in 0..self.gids.len() {
            if self.gids[index].gid != [0; 16] {
                self.set_roce_address(index)?;
            }
        }
        Ok(())
    }

    /// Sets the GID of an index in the device.
    fn set_roce_address(&mut self, index: usize) -> Result<()> {
        let mac = self.hca.settings().mac;
        let PortGid { gid, gid_type, .. } = self.gids[index];
        let version = if gid_type == GID_ROCE_V2 { 2 } else { 0 };
        let input = Input::new(op::SET_ROCE_ADDRESS, 0x30)
            .set(roce_addr_layout::ROCE_ADDRESS_INDEX, index as u32)
            .bytes(
                roce_addr_layout::AT + roce_addr_layout::SOURCE_L3_ADDRESS,
                &gid,
            )
            .bytes(roce_addr_layout::AT + roce_addr_layout::SOURCE_MAC, &mac)
            .set(
                roce_addr_layout::ROCE_VERSION.at(roce_addr_layout::AT),
                version,
            );
        command::run(&mut self.hca, &input, 16).map(drop)
    }

    /// Returns whether the device has addresses of the host, so that peers may be other hosts.
    pub(crate) fn has_host_addresses(&self) -> bool {
        self.addresses.is_some()
    }

    /// Returns the addresses of the host that the device has, if peers may be other hosts.
    pub(crate) fn host_addresses(&self) -> Option<Arc<dyn PortAddresses>> {
        self.addresses.clone()
    }

    /// Returns the length of the GID table: entries beyond the GIDs are empty.
    pub(crate) fn gid_table_length(&self) -> usize {
        match self.is_ethernet() {
            true => gids::ETHERNET,
            false => gids::INFINIBAND,
        }
    }

    /// Returns the GID of an index, unless the entry is empty.
    pub(crate) fn gid_at(&self, index: usize) -> Option<&PortGid> {
        self.gids.get(index).filter(|entry| entry.present)
    }

    /// Applies changes of the host's addresses to the GIDs. The device keeps the GID of a
    /// removed address, for queue pairs that use it when the address returns.
    fn update_gids(&mut self) -> bool {
        let Some(addresses) = &self.addresses else {
            return false;
        };
        let changes = addresses.list().changes();
        if changes == self.applied_changes {
            return false;
        }
        self.applied_changes = changes;
        let addresses = addresses.list().all();
        for (index, address) in addresses.into_iter().enumerate() {
            match self.gids.get_mut(index) {
                Some(entry) => entry.present = address.present,
                None => {
                    self.gids.push(PortGid::from(address));
                    if let Err(error) = self.set_roce_address(index) {
                        tracing::warn!(%error, index, "the device rejects a GID");
                    }
                }
            }
        }
        self.queue_device_event(1, Async::GID_CHANGE);
        true
    }

    /// Makes the port's link follow that of the wire.
    pub(crate) fn follow_link(&mut self, link: PortLink) {
        self.link = Some(link);
        if self.update_link() {
            // The device has no context that could receive the event.
            self.process_events(|_, _| {});
        }
    }

    /// Applies a change of the wire's link to the port, which reports it.
    fn update_link(&mut self) -> bool {
        let change = self.link.as_mut().and_then(PortLink::change);
        if let Some(up) = change {
            self.hca.set_cable(up);
        }
        change.is_some()
    }

    /// Returns the GIDs that the connection manager uses, of an Ethernet port that reaches no
    /// other hosts.
    pub(crate) fn own_gids(&self) -> Option<OwnGids> {
        if !self.is_ethernet() || self.has_host_addresses() {
            return None;
        }
        let indexed = || (0..=u8::MAX).zip(&self.gids).filter(|(_, it)| it.present);
        let is_ipv4 = |gid: &PortGid| ip_of_gid(gid.gid).is_ipv4();
        let first = |ipv4| {
            let mut same = indexed().filter(|(_, it)| is_ipv4(it) == ipv4);
            // Version 1 and the other family are better than nothing.
            let best = (same.clone().find(|(_, it)| it.gid_type == GID_ROCE_V2))
                .or_else(|| same.next())
                .or_else(|| indexed().next());
            best.map(|(index, it)| (it.gid, index))
        };
        Some(OwnGids {
            link_local: first(false)?,
            ipv4: first(true)?,
        })
    }

    /// Returns the port's first GID.
    pub(crate) fn gid(&self) -> Gid {
        let first = self.gids.iter().find(|entry| entry.gid != [0; 16]);
        first.map_or([0; 16], |entry| entry.gid)
    }

    /// Fails as a removed device: reports a fatal error, destroys all objects, and refuses
    /// commands from then on.
    pub(crate) fn fail(&mut self) {
        if std::mem::replace(&mut self.failed, true) {
            return;
        }
        self.queue_device_event(0, Async::DEVICE_FATAL);
        let contexts = self.files.iter();
        let contexts = contexts.filter(|(_, file)| matches!(file, File::Context(_)));
        for fd in contexts.map(|(fd, _)| *fd).collect::<Vec<_>>() {
            self.destroy_all(fd);
        }
        for file in self.files.values() {
            if let File::Events(events) = file {
                events.fail();
            }
        }
        const SYNDROME: u8 = 1;
        self.hca.set_health(SYNDROME, true);
    }

    /// Fails after a panic in a command or a turn, such as one of the program's tracing
    /// subscriber: the engine may have stopped between a write to memory and its completion.
    /// No memory is accessed from then on.
    pub(crate) fn fail_after_panic(&mut self) {
        self.hca.platform_mut().revoke_all();
        self.watch = DoorbellWatch::default();
        self.fail();
    }

    /// Performs a bounded amount of work. Returns true if more is left, or
    /// something has just happened. With many queue pairs it finds the work that registers
    /// hint at; for the rest see [`State::turn_of_part`].
    pub(crate) fn turn(&mut self, now: TurnTime) -> bool {
        let changed = self.update_link() | self.update_gids();
        let scan = match self.watch.is_large() {
            true => DoorbellWatch::scan_hinted,
            false => DoorbellWatch::scan_all,
        };
        changed | self.turn_at(now, scan)
    }

    /// Returns the number of parts that the rest of the records have after a turn.
    pub(crate) fn parts(&self) -> usize {
        match self.watch.is_large() {
            true => self.watch.parts(),
            false => 0,
        }
    }

    /// As [`State::turn`], for a part of the records.
    pub(crate) fn turn_of_part(&mut self, part: usize, parts: usize) -> bool {
        self.turn_with(|watch, on_doorbell| watch.scan_part(part, parts, on_doorbell))
    }

    /// Performs what a command has left to do. Returns whether there was anything.
    pub(crate) fn settle(&mut self) -> bool {
        self.turn_with(|_, _| {})
    }

    /// Processes the doorbells that `scan` finds, and performs a bounded amount of work.
    fn turn_with(
        &mut self,
        scan: impl FnOnce(&mut DoorbellWatch, &mut dyn FnMut(Doorbell)),
    ) -> bool {
        self.turn_at(self.time(), scan)
    }

    fn turn_at(
        &mut self,
        now: TurnTime,
        scan: impl FnOnce(&mut DoorbellWatch, &mut dyn FnMut(Doorbell)),
    ) -> bool {
        let Self { hca, watch, .. } = self;
        let register = u64::from(self.uar) * PAGE + ARM_CQ;
        let mut busy = false;
        scan(watch, &mut |doorbell| {
            busy = true;
            match doorbell {
                Doorbell::Send(qpn) => hca.ring(qpn, Queue::Send),
                Doorbell::Receive(qpn) => hca.ring(qpn, Queue::Receive),
                Doorbell::Arm(cqn, word) => {
                    let mut data = [0; 8];
                    data[..4].copy_from_slice(&word.to_be_bytes());
                    data[4..].copy_from_slice(&cqn.to_be_bytes());
                    hca.write(register, &data);
                }
            }
        });
        busy |= hca.run_at(now.device);
        self.apply_effects();
        busy |= self.process_events(Self::forward_event);
        busy
    }

    /// Reports requests that the device has refused, after their NAKs were sent.
    pub(crate) fn confirm_sent(&mut self) {
        self.hca.confirm_sent();
        self.process_events(Self::forward_event);
    }

    /// Reads the records of requests for notification.
    pub(crate) fn read_armings(&mut self) {
        self.turn_with(DoorbellWatch::scan_arms);
    }

    /// Takes turns before a queue pair is destroyed or set to the error state: a card would
    /// have sent the posted work by then, and some programs do not wait for completions.
    /// `qpn` is its number, if it is known.
    pub(crate) fn flush_sends(&mut self, qpn: Option<u32>) {
        if !self.has_thread {
            return;
        }
        let many = self.watch.is_large();
        let mut busy = match qpn.filter(|_| many) {
            Some(qpn) => self.turn_with(|watch, on_doorbell| watch.scan_ending(qpn, on_doorbell)),
            None => self.turn_with(DoorbellWatch::scan_all),
        };
        for _ in 1..MAX_FLUSH_TURNS {
            if !busy {
                break;
            }
            busy = self.turn(self.time());
        }
    }

    /// Returns the counter of completions written to a completion queue.
    pub(crate) fn completion_counter(&self, handle: u32) -> Option<Arc<AtomicU32>> {
        let cq = self.objects.with_handle(handle)?.of::<Cq>()?;
        self.hca.cq_producer_index(cq.number)
    }

    /// Returns whether the device may have work without a command.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.watch.is_empty() || self.hca.deadline().is_some()
    }

    /// Returns what changes when the device does something for other threads or devices.
    pub(crate) fn activity(&self) -> (bool, Stats, Counters) {
        let stats = Stats {
            commands: 0,
            commands_refused: 0,
            ..self.hca.stats()
        };
        (self.is_in_use(), stats, self.hca.transport_counters())
    }

    /// Reads the clock.
    pub(crate) fn time(&self) -> TurnTime {
        let system = Instant::now();
        let device = self.hca.platform().time_at(system);
        TurnTime { system, device }
    }

    /// Returns whether a timer of a queue pair has expired.
    pub(crate) fn is_timer_due(&self, now: TurnTime) -> bool {
        let expired = |at| at <= now.device;
        self.hca.next_timer().is_some_and(expired)
    }

    /// Returns the time until something is due, in nanoseconds.
    pub(crate) fn due(&self, now: TurnTime) -> Option<u64> {
        self.hca.deadline().map(|at| at.saturating_sub(now.device))
    }

    /// Processes the device's events; returns whether there were any.
    fn process_events(&mut self, mut each: impl FnMut(&mut Self, &[u8; EQ_ENTRY])) -> bool {
        let mut any = false;
        for vector in 0..self.events.len() {
            let before = self.events[vector].consumed;
            while let Some(entry) = self.events[vector].next() {
                each(self, &entry);
            }
            let EventQueue {
                number, consumed, ..
            } = self.events[vector];
            if consumed != before {
                let word = number << 24 | consumed & 0xff_ffff;
                let at = u64::from(self.uar) * PAGE + UPDATE_EQ;
                self.hca.write(at, &word.to_be_bytes());
                any = true;
            }
        }
        any
    }

    /// Forwards an event of the device.
    fn forward_event(&mut self, entry: &[u8; EQ_ENTRY]) {
        /// Offsets of a queue's number, and of the number of a completion queue
        /// in error.
        const NUMBER: usize = 32 + 24;
        const FAILED_CQ: usize = 32;
        const PORT: usize = 32 + 8;
        self.notify_subscribers(entry);
        let number = |at| get32(entry, at) & 0xff_ffff;
        let what = match entry[1] {
            event::COMPLETION => return self.queue_completion_event(number(NUMBER)),
            event::PORT_CHANGE => {
                let up = entry[3] == 4;
                let what = if up {
                    Async::PORT_ACTIVE
                } else {
                    Async::PORT_ERR
                };
                return self.queue_device_event(u64::from(entry[PORT] >> 4), what);
            }
            event::CQ_ERROR => {
                let of = number(FAILED_CQ);
                return self.queue_object_event(Async::CQ_ERR, ids::OBJECT_CQ, of);
            }
            event::SRQ_LIMIT => Async::SRQ_LIMIT_REACHED,
            event::SRQ_CATASTROPHIC => Async::SRQ_ERR,
            event::SRQ_LAST_WQE => Async::QP_LAST_WQE_REACHED,
            event::COMM_EST => Async::COMM_EST,
            event::SQ_DRAINED => Async::SQ_DRAINED,
            event::WQ_CATASTROPHIC => Async::QP_FATAL,
            event::WQ_INVALID_REQUEST => Async::QP_REQ_ERR,
            event::WQ_ACCESS => Async::QP_ACCESS_ERR,
            _ => return,
        };
        let of = number(NUMBER);
        let kind = match what {
            Async::SRQ_LIMIT_REACHED | Async::SRQ_ERR => ids::OBJECT_SRQ,
            _ => ids::OBJECT_QP,
        };
        self.queue_object_event(what, kind, of);
    }

    fn queue_completion_event(&mut self, cqn: u32) {
        let mut found = self.objects.numbered(ids::OBJECT_CQ, cqn);
        let Some(cq) = found.next().and_then(Object::of::<Cq>) else {
            return;
        };
        let Some(channel) = &cq.channel else { return };
        let record = CompEventDesc {
            cq_handle: cq.events.user_handle,
        };
        channel.push(Event {
            record: record.as_bytes().to_vec(),
            counter: Some(Arc::clone(&cq.completions)),
        });
    }

    /// Queues an event of an object in the device for each of its objects here: an XRC
    /// target has one for each time it was opened.
    fn queue_object_event(&self, what: Async, kind: u16, number: u32) {
        for object in self.objects.numbered(kind, number) {
            let Some(of) = object.data.events() else {
                continue;
            };
            let default = self.files.get(&object.file).and_then(File::default_events);
            if let Some(file) = of.file.as_ref().or(default) {
                push(file, what, of.user_handle, Some(&of.reported));
            }
        }
    }

    fn queue_device_event(&mut self, element: u64, what: Async) {
        // The device has told those of its port.
        if !matches!(what, Async::PORT_ACTIVE | Async::PORT_ERR) {
            let event = what;
            self.report(&Cause::Event { event, element });
        }
        for file in self.files.values().filter_map(File::default_events) {
            push(file, what, element, None);
        }
    }

    /// Returns the variant byte of the next memory key, different each time.
    pub(crate) fn next_variant(&mut self) -> u8 {
        self.variant = self.variant.wrapping_add(1);
        self.variant
    }
}

fn push(file: &EventFile, what: Async, element: u64, of: Option<&EventCounter>) {
    let record = AsyncEventDesc {
        element,
        event_type: what.0,
        reserved: 0,
    };
    file.push(Event {
        record: record.as_bytes().to_vec(),
        counter: of.cloned(),
    });
}

impl EventQueue {
    fn new(hca: &mut Hca<Process>, uar: u32, events: u64) -> Result<Self> {
        let length = EQ_ENTRY << EQ_LOG_SIZE;
        let memory = MmapOptions::new(length).and_then(MmapOptions::map_mut);
        let Ok(mut memory) = memory else {
            return refuse(Class::NoMemory, "event queue", length, Rule::Granted);
        };
        // Initially the device owns all entries.
        for entry in memory.chunks_exact_mut(EQ_ENTRY) {
            entry[EQ_OWNER] = 1;
        }
        let address = memory.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: the mapping is stored beside the device, and is accessed only
        // through pointers from now on.
        unsafe { hca.platform_mut().grant(address, length as u64) };
        let input = Input::new(op::CREATE_EQ, PAGE_LIST + 8)
            .fields(
                eqc::AT,
                [
                    (eqc::LOG_EQ_SIZE, EQ_LOG_SIZE),
                    (eqc::UAR_PAGE, uar),
                    (eqc::LOG_PAGE_SIZE, command::log_page_size(length as u64)),
                ],
            )
            .long(eqc::EVENT_BITMASK, events)
            .long(PAGE_LIST, address);
        let output = command::run(hca, &input, 16)?;
        Ok(Self {
            memory,
            number: header::SHORT_NUMBER.get(&output),
            consumed: 0,
        })
    }

    /// Returns the next entry, if the device has written it.
    fn next(&mut self) -> Option<[u8; EQ_ENTRY]> {
        let slot = (self.consumed & ((1 << EQ_LOG_SIZE) - 1)) as usize;
        let owner = (self.consumed >> EQ_LOG_SIZE & 1) as u8;
        let entry = self.memory.as_ptr().wrapping_add(slot * EQ_ENTRY);
        // SAFETY: the mask keeps the byte within the mapping. The device, which
        // writes it, runs under the same lock.
        if unsafe { entry.add(EQ_OWNER).read_volatile() } & 1 != owner {
            return None;
        }
        self.consumed = self.consumed.wrapping_add(1);
        // SAFETY: an entry within the mapping, as above.
        Some(unsafe { entry.cast::<[u8; EQ_ENTRY]>().read_volatile() })
    }
}

impl State {
    /// Returns the event queue for completion queues of a vector, which must
    /// exist.
    pub(crate) fn event_queue(&self, vector: u32) -> u32 {
        self.events[vector as usize].number
    }
}

/// Locks, also after a panic: causes are valid at any time.
fn lock(explanations: &Mutex<Explanations>) -> MutexGuard<'_, Explanations> {
    explanations.lock().unwrap_or_else(PoisonError::into_inner)
}
