//! The HCA: registers, engine, transport and port combined.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use roce::bits::{get32, put_bytes};
use roce::fabric::Port;
use roce::packet::{LinkKind, MULTICAST_QPN, Packet, Path, Pool, View};
use roce::pcap::Direction;
use roce::transport::{self, QpState, Service, Transport};

use crate::cause::{FrameDrop, Misuse, Observer, PORT_ACTIVE, PORT_DOWN};
use crate::engine::command_queue::{self, LOG_SIZE, LOG_STRIDE};
use crate::engine::core::Core;
use crate::engine::counters::{OperationCounts, QCounters, Stats};
use crate::engine::device_memory::{self, Access};
use crate::engine::follower::Follower;
use crate::engine::frame::Origin;
use crate::engine::mkey::{Rights, Translation};
use crate::engine::qp::{BlueFlame, Queue, Ring};
use crate::engine::registers::{FIRST_UAR, NIC_STATE, Registers};
use crate::engine::shaper::Shaper;
use crate::engine::wqe::{self, LocalBuffers};
use crate::fault::Injector;
use crate::observed_frame::{FrameObserver, ObservedFrame};
use crate::platform::Platform;
use crate::profile::PortKind;
use crate::work::WorkObserver;

pub use crate::settings::Settings;

/// Number of interrupt vectors.
pub const VECTORS: usize = 8;
/// Size of the register space (BAR 0) in bytes.
pub const BAR_SIZE: u64 = 32 << 20;

/// Size of a UAR page in bytes.
const PAGE: u64 = 4096;
const FIRMWARE_REVISION: u64 = 0x0;
const COMMAND_INTERFACE_REVISION: u64 = 0x4;
const COMMAND_QUEUE_HIGH: u64 = 0x10;
const COMMAND_QUEUE_LOW: u64 = 0x14;
const COMMAND_DOORBELL: u64 = 0x18;
const TIMER_HIGH: u64 = 0x1000;
const TIMER_LOW: u64 = 0x1004;

/// Syndrome of a completion queue in error: its memory cannot be written.
const CQ_ACCESS_VIOLATION: u8 = 2;

const ARM_CQ: u64 = 0x20;
const ARM_EQ: u64 = 0x40;
const UPDATE_EQ: u64 = 0x48;
const BLUE_FLAME: u64 = 0x800;
/// Size of a BlueFlame buffer in bytes.
const BLUE_FLAME_SIZE: u64 = 256;

const MAJOR: u32 = 16;
const MINOR: u32 = 35;
const SUBMINOR: u32 = 4030;
const COMMAND_INTERFACE: u32 = 5;

/// The state and the peer of a queue pair of a connected service.
#[derive(Clone, Copy, Debug)]
pub struct Connection {
    /// Its state.
    pub state: QpState,
    /// Number of the queue pair at the other end.
    pub peer: u32,
    /// The path to it; `None` before RTR.
    pub path: Option<Path>,
}

/// Transport steps per [`Hca::run`], and frames received at once.
const BUDGET: usize = 256;

/// Maximum number of BlueFlame buffers being written at once. A processor writes one
/// after the other.
const MAX_BLUE_FLAME_WRITES: usize = 64;

/// Maximum number of frames that are kept for queue pair 1.
const MAX_MANAGEMENT: usize = 4096;

/// A BlueFlame buffer that is being written.
#[derive(Debug)]
struct BlueFlameWrite {
    offset: u64,
    bytes: Vec<u8>,
}

/// A software HCA.
///
/// Used by one thread at a time; nothing blocks. A front end passes on register
/// accesses ([`Hca::read`], [`Hca::write`]), calls [`Hca::flush_blue_flame`] when it has no more
/// of them for now, and then [`Hca::run`].
pub struct Hca<P: Platform> {
    pub(crate) core: Core<P>,
    pub(crate) transport: Transport<LocalBuffers>,
    pub(crate) port: Arc<Port>,
    /// The link, unless frames leave at once.
    pub(crate) shaper: Option<Box<Shaper>>,
    pool: Pool,
    /// Ethernet send queues that may have WQEs to process.
    pub(crate) active_sqs: Vec<u32>,
    blue_flame_writes: Vec<BlueFlameWrite>,
    /// Buffer of the last doorbell, reused for the next.
    spare_buffer: Vec<u8>,
    pub(crate) received: VecDeque<Packet>,
    pub(crate) frames: Vec<Packet>,
    /// Frames for queue pair 1, if the front end handles them.
    management: Option<VecDeque<Packet>>,
    /// Who is shown the frames.
    frame_observer: Option<Box<dyn FrameObserver>>,
    /// The queues that have made `frames`, with an observer of frames.
    senders: Vec<u32>,
}

impl<P: Platform> AsMut<Core<P>> for Hca<P> {
    fn as_mut(&mut self) -> &mut Core<P> {
        &mut self.core
    }
}

impl<P: Platform> Hca<P> {
    /// Creates an HCA in its power-on state, attached to a fabric. `pool` is shared by
    /// all HCAs of a process.
    pub fn new(
        platform: P,
        settings: Settings,
        fabric: &roce::fabric::Fabric,
        pool: Pool,
    ) -> Hca<P> {
        let port = Arc::new(fabric.port(settings.port()));
        let shape = settings.link;
        let mut hca = Hca {
            shaper: shape.is_shaped().then(|| Box::new(Shaper::new(shape))),
            port,
            transport: Transport::new(pool.clone()),
            core: Core::new(platform, settings),
            pool,
            active_sqs: Vec::new(),
            blue_flame_writes: Vec::new(),
            spare_buffer: Vec::with_capacity(BLUE_FLAME_SIZE as usize),
            received: VecDeque::new(),
            frames: Vec::new(),
            management: None,
            frame_observer: None,
            senders: Vec::new(),
        };
        hca.update_loopback();
        hca
    }

    /// Keeps frames for queue pair 1, for [`Hca::next_management`]. Without this call they are
    /// for the queue pair that a driver has made for them, if any.
    pub fn keep_management(&mut self) {
        self.management.get_or_insert_default();
    }

    /// Returns the next frame for queue pair 1.
    pub fn next_management(&mut self) -> Option<Packet> {
        self.management.as_mut()?.pop_front()
    }

    /// Sends a frame of queue pair 1 at once.
    pub fn send_management(&mut self, now: u64, mut packet: Packet) {
        if self.frame_observer.is_some() {
            packet.add_icrc();
            self.clear_frame_causes();
            self.observe_frame(&packet, Direction::Outbound, Some(1));
        }
        self.port.send(now, packet);
    }

    /// Keeps a frame for queue pair 1; returns any other.
    fn keep_if_management(&mut self, packet: Packet) -> Option<Packet> {
        let Some(kept) = &mut self.management else {
            return Some(packet);
        };
        let is_management = View::parse_packet(&packet).is_ok_and(|it| it.bth.dest_qpn == 1);
        if !is_management || kept.len() >= MAX_MANAGEMENT {
            // The transport says why it drops it.
            return Some(packet);
        }
        kept.push_back(packet);
        None
    }

    /// Returns the platform.
    pub fn platform(&self) -> &P {
        &self.core.platform
    }

    /// Returns the platform for modification.
    pub fn platform_mut(&mut self) -> &mut P {
        &mut self.core.platform
    }

    /// Returns the HCA's port in the fabric.
    pub fn port(&self) -> &Port {
        &self.port
    }

    /// Returns the settings.
    pub fn settings(&self) -> &Settings {
        &self.core.settings
    }

    /// Returns the engine's counters.
    #[inline]
    pub fn stats(&self) -> Stats {
        self.core.stats
    }

    /// Sets whether work requests of send queues are counted by operation.
    pub fn count_operations(&mut self, counts: bool) {
        self.core.counts_operations = counts;
    }

    /// Returns the work requests of send queues by operation, as far as they were counted.
    pub fn operations(&self) -> &OperationCounts {
        &self.core.operations
    }

    /// Returns the transport's counters.
    pub fn transport_counters(&self) -> transport::Counters {
        self.transport.counters()
    }

    /// Returns a counter set.
    pub fn q_counters(&self, number: u32) -> Option<QCounters> {
        self.core.q_counters.get(number).copied()
    }

    /// Returns the number of objects of each kind.
    pub fn objects(&self) -> [(&'static str, usize); 8] {
        let core = &self.core;
        [
            ("uars", core.uars.len()),
            ("pds", core.pds.len()),
            ("mkeys", core.mkeys.len()),
            ("eqs", core.eqs.len()),
            ("cqs", core.cqs.len()),
            ("queues", core.queues.len()),
            ("srqs", core.srqs.len()),
            ("xrcds", core.xrcds.len()),
        ]
    }

    /// Returns the queue pairs: number, service, state.
    pub fn queue_pairs(&self) -> Vec<(u32, transport::Service, transport::QpView)> {
        self.core
            .queues
            .iter()
            .filter_map(|(qpn, queue)| match queue {
                Queue::Qp(qp) => Some((qpn, qp.service, self.transport.query(qpn)?)),
                _ => None,
            })
            .collect()
    }

    /// Returns the first reports of misuse by the driver or a program.
    pub fn complaints(&self) -> &[Misuse] {
        &self.core.complaints
    }

    /// Sets who is told why commands, work requests, accesses and packets fail, and of
    /// events; `None` for nobody. It is called in the midst of the work, and must not wait.
    pub fn observe(&mut self, observer: Option<Observer>) {
        self.core.observer = observer;
    }

    /// Sets who is told of the work requests of queue pairs; `None` for nobody. It is called in
    /// the midst of the work, and must not wait.
    pub fn observe_work(&mut self, observer: Option<WorkObserver>) {
        self.core.follower = observer.map(|observer| Box::new(Follower::new(observer)));
    }

    /// Sets who is shown the frames that the device sends and receives; `None` for nobody. With
    /// an observer, requests to queue pairs of the same device are frames, too.
    pub fn observe_frames(&mut self, observer: Option<Box<dyn FrameObserver>>) {
        let observed = observer.is_some();
        self.transport.record_senders(observed);
        self.core.frame_causes = observed.then(Vec::new);
        self.senders.clear();
        self.frame_observer = observer;
        self.update_loopback();
    }

    /// Lets the transport execute requests to queue pairs of the same device without packets,
    /// unless something is to see or delay these.
    pub(crate) fn update_loopback(&mut self) {
        let injector = self.core.faults.injector.as_ref();
        let has_packets = self.frame_observer.is_some()
            || self.shaper.is_some()
            || self.core.chaos.is_some()
            || injector.is_some_and(|it| it.has_packets());
        let home = (!has_packets).then(|| Arc::clone(&self.port));
        self.transport.set_loopback(home);
    }

    /// Returns whether frames wait at some port of the fabric.
    #[must_use]
    pub fn is_backlogged(&self) -> bool {
        self.port.room() < self.port.config().queue
    }

    /// Returns the time of the first timer of a queue pair.
    #[must_use]
    pub fn next_timer(&self) -> Option<u64> {
        self.transport.deadline()
    }

    /// Sets whether expired local ACK timeouts are restarted; see
    /// [`Transport::set_patient`](roce::transport::Transport::set_patient).
    pub fn set_patient(&mut self, patient: bool) {
        self.transport.set_patient(patient);
    }

    /// Sets whether the network loses packets; see
    /// [`Transport::set_lossy`](roce::transport::Transport::set_lossy).
    pub fn set_lossy(&mut self, lossy: bool) {
        self.transport.set_lossy(lossy);
    }

    /// Sets whether [`Hca::confirm_sent`] is called; see
    /// [`Transport::set_confirmed`](roce::transport::Transport::set_confirmed).
    pub fn set_confirmed(&mut self, confirmed: bool) {
        self.transport.set_confirmed(confirmed);
    }

    /// Returns whether [`Hca::confirm_sent`] has something to do.
    #[must_use]
    #[inline]
    pub fn awaits_confirmation(&self) -> bool {
        self.transport.awaits_confirmation()
    }

    /// Called when all frames that the port has accepted were sent.
    pub fn confirm_sent(&mut self) {
        self.transport.confirm_sent(&mut self.core);
        self.core.write_sessions();
    }

    /// Forbids windows and other mkeys of the driver to refer to the mkey with this number.
    /// This is for regions without the right to bind windows, which no command conveys.
    /// Returns whether the mkey exists.
    pub fn forbid_binding(&mut self, number: u32) -> bool {
        let mkey = self.core.mkeys.get_mut(number);
        mkey.map(|mkey| mkey.forbids_binding = true).is_some()
    }

    /// Changes the protection domain and the rights of the mkey with this number; the bits
    /// of the rights are in the order of an mkey context. Drivers use a work request (UMR)
    /// instead. Returns whether the mkey exists.
    pub fn change_key(&mut self, number: u32, pd: u32, rights: u32) -> bool {
        let mkey = self.core.mkeys.get_mut(number);
        mkey.map(|mkey| (mkey.pd, mkey.rights) = (pd, Rights(rights & 0b11111)))
            .is_some()
    }

    /// Makes the mkey with this number refer to contiguous memory of the platform from
    /// `address` on, whatever the addresses that requests use. No command conveys this: drivers
    /// pass a list of pages. Returns whether the mkey exists.
    pub fn set_key_memory(&mut self, number: u32, address: u64) -> bool {
        let mkey = self.core.mkeys.get_mut(number);
        mkey.map(|mkey| mkey.translation = Translation::Contiguous(address))
            .is_some()
    }

    /// Plugs in or unplugs the cable.
    pub fn set_cable(&mut self, plugged: bool) {
        self.core.cable_plugged = plugged;
        self.port.set_link(plugged);
        self.update_link();
    }

    /// Moves a queue pair to the error state, as a failure of the device would. Returns
    /// whether it exists.
    pub fn fail_queue_pair(&mut self, qpn: u32) -> bool {
        let Some(qp) = self.core.qp_mut(qpn) else {
            return false;
        };
        qp.in_error = true;
        let config = qp.config.clone();
        let now = self.core.platform.now();
        let to = transport::QpState::Error;
        let succeeded = self
            .transport
            .modify(&mut self.core, now, qpn, to, config)
            .is_ok();
        self.core
            .post_queue_event(crate::engine::eq::event::WQ_CATASTROPHIC, 0, qpn);
        succeeded
    }

    /// Returns the number of outstanding sends of a queue pair. All sends that the device
    /// has not fetched count as one.
    pub fn outstanding_sends(&self, qpn: u32) -> usize {
        let fetched = self.transport.query(qpn).map_or(0, |view| view.outstanding);
        let ring = self.core.qp(qpn).and_then(|qp| qp.send.as_ref());
        let posted = ring.is_some_and(|ring| {
            let posted = self.core.platform.read_index(ring.doorbell);
            posted.is_ok_and(|posted| posted as u16 != ring.head)
        });
        fetched + usize::from(posted)
    }

    /// Returns the state and the peer of a queue pair of a connected service.
    pub fn connection(&self, qpn: u32) -> Option<Connection> {
        let config = self.transport.config(qpn)?;
        let is_connected = match config.service {
            Service::Rc | Service::Uc | Service::XrcInitiator | Service::XrcTarget => true,
            Service::Ud | Service::DcInitiator | Service::DcTarget => false,
        };
        let state = self.transport.query(qpn)?.state;
        is_connected.then_some(Connection {
            state,
            peer: config.remote_qpn,
            path: config.path,
        })
    }

    /// Returns the producer index of a completion queue, which the device updates; it wraps.
    pub fn cq_producer_index(&self, cqn: u32) -> Option<Arc<AtomicU32>> {
        self.core.cqs.get(cqn).map(|cq| Arc::clone(&cq.written))
    }

    /// Returns the address of the doorbell records of a completion queue.
    pub fn cq_doorbell_address(&self, cqn: u32) -> Option<u64> {
        self.core.cqs.get(cqn).map(|cq| cq.doorbell)
    }

    /// Returns the address of the doorbell records of a queue pair or a send queue. The
    /// second record is the send queue's.
    pub fn queue_doorbell_address(&self, number: u32) -> Option<u64> {
        const SENDS: u64 = 4;
        let of_sends = |ring: &Ring| ring.doorbell.wrapping_sub(SENDS);
        match self.core.queues.get(number)? {
            Queue::Qp(qp) => match (&qp.recv, &qp.send) {
                (Some(receives), _) => Some(receives.doorbell),
                (None, sends) => sends.as_ref().map(of_sends),
            },
            Queue::Sq(sq) => Some(of_sends(&sq.ring)),
            Queue::Rq(_) => None,
        }
    }

    /// Returns the send CQ of a queue pair.
    pub fn send_cq_of(&self, qpn: u32) -> Option<u32> {
        self.core.qp(qpn).map(|qp| qp.send_cq)
    }

    /// Moves a completion queue to the error state. Returns whether it exists.
    pub fn fail_completion_queue(&mut self, cqn: u32) -> bool {
        let exists = self.core.cqs.get(cqn).is_some();
        // Not an overrun, which would have been found before.
        self.core.fail_cq(cqn, CQ_ACCESS_VIOLATION);
        exists
    }

    /// Updates the link: it is up if the cable is plugged in and, on Ethernet, the
    /// driver has enabled the port. Posts a port change event if the state changed.
    pub(crate) fn update_link(&mut self) {
        let core = &mut self.core;
        let admin_up = core.settings.profile.port == PortKind::InfiniBand || core.nic.admin_up;
        let up = core.cable_plugged && admin_up;
        if up != core.link_up {
            core.link_up = up;
            core.stats.link_downed += u64::from(!up);
            core.post_port_change(if up { PORT_ACTIVE } else { PORT_DOWN });
        }
    }

    /// Announces the current MAC address of an Ethernet port to the fabric.
    pub(crate) fn announce_addresses(&mut self) {
        if self.core.settings.profile.port == PortKind::Ethernet {
            let mut config = self.port.config();
            config.mac = self.core.nic.mac;
            self.port.configure(config);
        }
    }

    /// Destroys the driver's objects except EQs, UARs and transport domains, at teardown
    /// or reset.
    pub(crate) fn destroy_objects(&mut self) {
        let fresh_pages = std::mem::take(&mut self.core.pages);
        let numbers: Vec<u32> = self.core.queues.iter().map(|(number, _)| number).collect();
        for number in numbers {
            self.transport.destroy(number);
            self.core.queues.remove(number);
            if let Some(follower) = &mut self.core.follower {
                follower.empty(number);
            }
            if let Some(chaos) = &mut self.core.chaos {
                chaos.destroyed(number);
            }
        }
        self.core.pages = fresh_pages;
        clear(&mut self.core.srqs);
        clear(&mut self.core.cqs);
        self.core.cqs_with_session.clear();
        clear(&mut self.core.mkeys);
        self.core.protected_keys = 0;
        self.core.partial_blocks.clear();
        clear(&mut self.core.psvs);
        clear(&mut self.core.encryption_keys);
        clear(&mut self.core.logins);
        clear(&mut self.core.pds);
        clear(&mut self.core.xrcds);
        clear(&mut self.core.user_contexts);
        clear(&mut self.core.umems);
        self.core.object_owners.clear();
        clear(&mut self.core.reserved_qpns);
        clear(&mut self.core.scheduling);
        clear(&mut self.core.address_mappings);
        clear(&mut self.core.q_counters);
        self.core.steering.clear();
        self.core.nic.disabled_loopback = 0;
        self.core.device_memory.clear();
        self.core.paging.clear();
        self.active_sqs.clear();
    }

    /// Resets the device to its power-on state.
    pub fn reset(&mut self) {
        self.destroy_objects();
        clear(&mut self.core.eqs);
        clear(&mut self.core.uars);
        clear(&mut self.core.transport_domains);
        self.core.pages.clear();
        self.core.registers = Registers::default();
        self.core.roce_addresses.fill(None);
        self.core.issi = 0;
        self.blue_flame_writes.clear();
    }

    /// Reads registers or device memory.
    pub fn read(&mut self, offset: u64, out: &mut [u8]) {
        match device_memory::decode_offset(offset) {
            Some(Access::Plain) => {
                if self.core.device_memory.read(offset, out).is_err() {
                    out.fill(0);
                }
                return;
            }
            Some(Access::MemicOperation(operation, at)) => {
                self.core.device_memory.read_atomic(operation, at, out);
                return;
            }
            None => {}
        }
        let from = offset & !3;
        let mut words = Vec::with_capacity(out.len() + 8);
        while (words.len() as u64) < offset - from + out.len() as u64 {
            let word = self.register(from + words.len() as u64);
            words.extend_from_slice(&word.to_be_bytes());
        }
        let skip = (offset - from) as usize;
        put_bytes(out, 0, &words[skip..]);
    }

    fn register(&mut self, offset: u64) -> u32 {
        let now = self.core.platform.now();
        match offset {
            FIRMWARE_REVISION => MINOR << 16 | MAJOR,
            COMMAND_INTERFACE_REVISION => COMMAND_INTERFACE << 16 | SUBMINOR,
            COMMAND_QUEUE_HIGH => self.core.registers.commands.high,
            COMMAND_QUEUE_LOW => {
                let registers = &self.core.registers;
                registers.commands.low | registers.nic << NIC_STATE | LOG_SIZE << 4 | LOG_STRIDE
            }
            TIMER_HIGH => (now >> 32) as u32,
            TIMER_LOW => now as u32,
            other => self.health_register(other, now),
        }
    }

    /// Writes registers, device memory or UARs.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        match device_memory::decode_offset(offset) {
            // Writes past the end of device memory are ignored, as a bus ignores them.
            Some(Access::Plain) => {
                let _ = self.core.device_memory.write(offset, data);
                return;
            }
            Some(Access::MemicOperation(operation, at)) => {
                self.core.device_memory.write_atomic(operation, at, data);
                return;
            }
            None => {}
        }
        if offset >= u64::from(FIRST_UAR) * PAGE {
            if self.is_in_use() {
                self.write_uar(offset, data);
            }
            return;
        }
        let at = |n: usize| get32(data, n);
        match (offset, data.len()) {
            (COMMAND_QUEUE_HIGH, 4) => self.core.registers.commands.high = at(0),
            (COMMAND_QUEUE_LOW, 4) => {
                self.core.registers.commands.low = at(0) & !0xfff;
                self.set_nic_state(at(0));
            }
            (COMMAND_QUEUE_HIGH, 8) => {
                self.core.registers.commands.high = at(0);
                self.core.registers.commands.low = at(4) & !0xfff;
                self.set_nic_state(at(4));
            }
            (COMMAND_DOORBELL, 4) if self.has_failed() => {}
            (COMMAND_DOORBELL, 4) => {
                command_queue::ring(self, at(0), |hca, input, n| hca.execute(input, n))
            }
            _ => {}
        }
    }

    fn write_uar(&mut self, offset: u64, data: &[u8]) {
        let number = u32::try_from(offset / PAGE).unwrap_or(u32::MAX);
        if self.core.uars.get(number).is_none() {
            self.core.report_misuse(Misuse::Uar {
                page: number,
                offset: None,
                length: data.len(),
            });
            return;
        }
        match offset % PAGE {
            ARM_CQ if data.len() == 8 => {
                self.core.arm_cq(get32(data, 0), get32(data, 4));
            }
            ARM_EQ if data.len() == 4 => self.core.update_eq(get32(data, 0), true),
            UPDATE_EQ if data.len() == 4 => self.core.update_eq(get32(data, 0), false),
            offset_in_page if offset_in_page >= BLUE_FLAME => self.write_blue_flame(offset, data),
            offset_in_page => self.core.report_misuse(Misuse::Uar {
                page: number,
                offset: Some(offset_in_page),
                length: data.len(),
            }),
        }
    }

    /// Handles a write to a BlueFlame register: a doorbell, or a part of a WQE.
    fn write_blue_flame(&mut self, offset: u64, data: &[u8]) {
        let buffer = offset & !(BLUE_FLAME_SIZE - 1);
        let offset_in_buffer = (offset - buffer) as usize;
        let index = self
            .blue_flame_writes
            .iter()
            .position(|p| p.offset == buffer);
        match index {
            Some(index)
                if offset_in_buffer != 0
                    && self.blue_flame_writes[index].bytes.len() == offset_in_buffer =>
            {
                self.blue_flame_writes[index].bytes.extend_from_slice(data);
            }
            Some(index) if offset_in_buffer == 0 => {
                // The previous contents of the buffer were a doorbell.
                let before = self.blue_flame_writes.swap_remove(index);
                self.finish_blue_flame(before);
                self.begin_blue_flame(buffer, data);
            }
            None if offset_in_buffer == 0 => self.begin_blue_flame(buffer, data),
            // The rest of a WQE whose beginning was treated as a doorbell.
            _ => return,
        }
        let complete = self.blue_flame_writes.iter().position(|p| {
            p.offset == buffer
                && p.bytes.len() >= wqe::BLOCK
                && wqe::length(&p.bytes).is_none_or(|n| p.bytes.len() >= n)
        });
        if let Some(index) = complete {
            let write = self.blue_flame_writes.swap_remove(index);
            self.finish_blue_flame(write);
        }
    }

    fn begin_blue_flame(&mut self, offset: u64, data: &[u8]) {
        if self.blue_flame_writes.len() >= MAX_BLUE_FLAME_WRITES {
            self.blue_flame_writes.remove(0);
        }
        let mut bytes = std::mem::take(&mut self.spare_buffer);
        bytes.clear();
        bytes.extend_from_slice(data);
        self.blue_flame_writes
            .push(BlueFlameWrite { offset, bytes });
    }

    fn finish_blue_flame(&mut self, write: BlueFlameWrite) {
        let queue = wqe::queue(&write.bytes);
        let copy = if write.bytes.len() >= wqe::BLOCK {
            Some(BlueFlame {
                index: wqe::index(&write.bytes),
                bytes: write.bytes,
            })
        } else {
            self.spare_buffer = write.bytes;
            None
        };
        if copy.is_some() {
            self.core.stats.blue_flames += 1;
        } else {
            self.core.stats.doorbells += 1;
        }
        if !self.ring_sends(queue, copy) {
            self.core.report_misuse(Misuse::NoQueue {
                what: "queue",
                number: queue,
                by: "a doorbell of",
            });
        }
    }

    /// Rings the doorbell of a send queue, with the WQE that was written to a BlueFlame buffer.
    /// Returns false if there is no such queue.
    fn ring_sends(&mut self, number: u32, copy: Option<BlueFlame>) -> bool {
        match self.core.queues.get_mut(number) {
            Some(Queue::Qp(qp)) => {
                if let Some(sends) = &mut qp.send {
                    sends.rung = true;
                }
                if copy.is_some() {
                    qp.blue_flame = copy;
                }
                if self.core.follower.is_some() {
                    self.core.follow_sends(number);
                }
                self.transport.ring(number, transport::Queue::Send);
                true
            }
            Some(Queue::Sq(sq)) => {
                sq.ring.rung = true;
                if copy.is_some() {
                    sq.blue_flame = copy;
                }
                self.active_sqs.push(number);
                true
            }
            _ => false,
        }
    }

    /// Rings a doorbell, for front ends that watch the doorbell records themselves. A
    /// receive doorbell has an effect only in the error state, where the receives are
    /// flushed.
    pub fn ring(&mut self, qpn: u32, queue: transport::Queue) {
        self.core.stats.doorbells += 1;
        match (queue, self.core.queues.get(qpn)) {
            (transport::Queue::Receive, Some(Queue::Rq(_))) => self.core.flush_rq(qpn),
            (transport::Queue::Receive, _) => {
                if self.core.follower.is_some() {
                    self.core.follow_receives(qpn);
                }
                self.transport.ring(qpn, queue);
            }
            (transport::Queue::Send, _) => {
                self.ring_sends(qpn, None);
            }
        }
    }

    /// Flushes receives that were posted to queues in the error state. No doorbell register
    /// announces them, so front ends that do not watch the doorbell records call this
    /// periodically. Returns whether any receive queue is in the error state.
    pub fn flush_posted_receives(&mut self) -> bool {
        let in_error: Vec<_> = self.core.receive_queues_in_error().collect();
        for &(number, posted) in &in_error {
            if posted {
                match self.core.queues.get(number) {
                    Some(Queue::Rq(_)) => self.core.flush_rq(number),
                    _ => self.transport.ring(number, transport::Queue::Receive),
                }
            }
        }
        !in_error.is_empty()
    }

    /// Returns whether a BlueFlame buffer holds 8 bytes or less, which may be a
    /// doorbell or the beginning of a WQE.
    pub fn has_partial_blue_flame(&self) -> bool {
        self.blue_flame_writes.iter().any(|p| p.bytes.len() <= 8)
    }

    /// Ends a batch of accesses: a BlueFlame buffer that holds 8 bytes or less was a
    /// doorbell.
    pub fn flush_blue_flame(&mut self) {
        while let Some(index) = self
            .blue_flame_writes
            .iter()
            .position(|p| p.bytes.len() <= 8)
        {
            let write = self.blue_flame_writes.swap_remove(index);
            self.finish_blue_flame(write);
        }
    }

    /// Processes pending work, within bounds. Returns true if more can be done at once.
    pub fn run(&mut self) -> bool {
        self.run_at(self.core.platform.now())
    }

    /// As [`run`](Self::run), at a time that the caller has just read from the platform's clock.
    pub fn run_at(&mut self, now: u64) -> bool {
        let more = self.run_once(now);
        if let Some(observer) = &mut self.frame_observer {
            observer.flush();
        }
        more
    }

    fn run_once(&mut self, now: u64) -> bool {
        if self.has_failed() {
            // A failed device drops what arrives.
            self.port.recv_all(now, BUDGET, &mut self.received);
            let more = !self.received.is_empty();
            self.received.clear();
            return more;
        }
        if self.core.chaos.is_some() {
            self.release_late(now);
        }
        if self.has_faults() {
            self.run_faults(now);
        }
        let is_full = self.shaper.as_mut().is_some_and(|it| it.is_full(now));
        let mut active_sqs = std::mem::take(&mut self.active_sqs);
        active_sqs.retain(|sqn| {
            if is_full {
                return true;
            }
            let before = self.frames.len();
            let more = self.core.run_sq(*sqn, &self.pool, &mut self.frames);
            self.core.loop_back(*sqn, &self.frames[before..]);
            if self.frame_observer.is_some() {
                self.senders.resize(self.frames.len(), *sqn);
            }
            more
        });
        self.active_sqs = active_sqs;
        if !self.frames.is_empty() {
            self.send_frames(now);
        }
        self.port.recv_all(now, BUDGET, &mut self.received);
        let full = self.received.len() >= BUDGET;
        if self.core.chaos.is_some() {
            self.hold_arrivals(now);
        }
        if self.frame_observer.is_some() {
            self.receive_observed(now);
        }
        while let Some(packet) = self.received.pop_front() {
            match self.has_faults() {
                true => self.receive_by_faults(now, packet),
                false => self.receive(now, packet),
            }
        }
        let budget = if is_full { 0 } else { BUDGET };
        let more = self.transport.run(&mut self.core, now, budget);
        self.core.write_sessions();
        while let Some(packet) = self.transport.pop() {
            self.frames.push(packet);
        }
        if self.frame_observer.is_some() {
            self.senders.extend(self.transport.take_senders());
        }
        if !self.frames.is_empty() {
            if !self.core.link_up && self.frame_observer.is_none() {
                self.core.observe_unsent(&self.frames);
            }
            self.send_frames(now);
        }
        if let Some(shaper) = &mut self.shaper {
            while let Some(packet) = shaper.pop(now) {
                self.frames.push(packet);
            }
            self.port.send_all(now, self.frames.drain(..));
        }
        if self.has_faults() {
            self.apply_effects(now);
        }
        // What waits for the link has a deadline.
        let more = !is_full && (more || !self.active_sqs.is_empty());
        more || full || self.port.deadline().is_some_and(|at| at <= now)
    }

    /// Passes a received packet on.
    pub(crate) fn receive(&mut self, now: u64, packet: Packet) {
        let Some(packet) = self.keep_if_management(packet) else {
            return;
        };
        if let Some(other) = self.transport.receive(&mut self.core, now, packet) {
            if other.kind() == LinkKind::Ethernet {
                self.core.receive_frame(other.frame(), Origin::Wire);
            }
        }
    }

    /// Processes the received frames, and shows each to the observer.
    #[cold]
    fn receive_observed(&mut self, now: u64) {
        while let Some(packet) = self.received.pop_front() {
            let mut copy = packet.clone();
            copy.add_icrc();
            self.clear_frame_causes();
            self.receive_by_faults(now, packet);
            let view = View::read_unchecked(copy.kind(), copy.frame());
            let queue = view.ok().map(|view| view.bth.dest_qpn);
            let queue = queue.filter(|queue| *queue != MULTICAST_QPN);
            self.observe_frame(&copy, Direction::Inbound, queue);
        }
    }

    fn clear_frame_causes(&mut self) {
        if let Some(causes) = &mut self.core.frame_causes {
            causes.clear();
        }
    }

    /// Shows a frame to the observer, with the causes that arose meanwhile.
    fn observe_frame(&mut self, packet: &Packet, direction: Direction, queue: Option<u32>) {
        let causes = self.core.frame_causes.take();
        let injector = self.core.faults.injector.as_deref();
        if let Some(observer) = &mut self.frame_observer {
            observer.observe(&ObservedFrame {
                packet,
                direction,
                queue,
                causes: causes.as_deref().unwrap_or_default(),
                faults: injector.map_or(&[], Injector::on_packet),
            });
        }
        self.core.frame_causes = causes;
    }

    /// Sends the frames, by the link if it has a shape.
    fn send_frames(&mut self, now: u64) {
        if self.frame_observer.is_some() {
            return self.send_observed(now);
        }
        if self.has_faults() {
            self.send_by_faults(now);
        }
        self.send_unaltered(now);
    }

    /// As [`Hca::send_frames`], without faults.
    pub(crate) fn send_unaltered(&mut self, now: u64) {
        let Some(shaper) = &mut self.shaper else {
            return self.port.send_all(now, self.frames.drain(..));
        };
        for packet in self.frames.drain(..) {
            let length = packet.frame().len();
            if let Err(queue) = shaper.push(now, packet) {
                self.core
                    .drop_frame(None, length, FrameDrop::QueueFull(queue));
            }
        }
    }

    /// As [`send_frames`](Self::send_frames), and shows each to the observer.
    #[cold]
    fn send_observed(&mut self, now: u64) {
        let frames = std::mem::take(&mut self.frames);
        let mut senders = std::mem::take(&mut self.senders).into_iter();
        for packet in frames {
            let mut copy = packet.clone();
            copy.add_icrc();
            self.clear_frame_causes();
            self.frames.push(packet);
            if !self.core.link_up {
                self.core.observe_unsent(&self.frames);
            }
            self.send_by_faults(now);
            self.send_unaltered(now);
            self.observe_frame(&copy, Direction::Outbound, senders.next());
        }
    }

    /// Returns whether frames have not left the link.
    #[must_use]
    pub fn has_unsent(&self) -> bool {
        let shaper = self.shaper.as_ref();
        let faults = self.core.faults.injector.as_ref();
        shaper.is_some_and(|shaper| shaper.deadline().is_some())
            || faults.is_some_and(|it| it.has_unsent())
    }

    /// Returns the time by which [`Hca::run`] must be called again if nothing else
    /// happens.
    pub fn deadline(&self) -> Option<u64> {
        if self.has_failed() {
            return self.port.deadline();
        }
        let shaper = self.shaper.as_ref().and_then(|it| it.deadline());
        let late = self.core.chaos.as_ref().and_then(|it| it.deadline());
        let faults = self.core.faults.injector.as_ref();
        let faults = faults.and_then(|it| it.deadline(self.core.platform.now()));
        let all = [
            self.transport.deadline(),
            self.port.deadline(),
            shaper,
            late,
            faults,
        ];
        all.into_iter().flatten().min()
    }
}

fn clear<T>(table: &mut crate::table::Table<T>) {
    let numbers: Vec<u32> = table.iter().map(|(number, _)| number).collect();
    for number in numbers {
        table.remove(number);
    }
}
