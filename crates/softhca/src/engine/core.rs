//! The core of the device: its objects and its platform, without the transport and the
//! port.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;

use roce::rule::Violation;

use super::capabilities::Capabilities;
use super::chaos::ChaosState;
use super::counters::{OperationCounts, QCounters, Stats};
use super::cq::Cq;
use super::device_memory::DeviceMemory;
use super::eq::Eq;
use super::faults::DeviceFaults;
use super::follower::Follower;
use super::late::LateCompletion;
use super::mkey::{AbsentPage, BrokenRule, Mkey};
use super::owners::ObjectOwners;
use super::paging::Paging;
use super::protection::{EncryptionKey, LOG_MAX_ENCRYPTION_KEYS};
use super::qp::Queue;
use super::registers::{FIRST_UAR, Registers, UARS};
use super::scheduling::{self, Element};
use super::signed::{PartialBlock, Psv};
use super::srq::Srq;
use super::steering::Steering;
use super::umem::Umem;
use super::wqe::MAX_SEND_WQE;
use crate::cause::{Cause, Misuse, Observer};
use crate::settings::Settings;
use crate::table::Table;

/// Limit of ranges of reserved queue pair numbers; keeps the numbers within 24 bits.
const MAX_RESERVED_QPN_RANGES: usize = 1 << 14;
/// Initial port capabilities: extended speeds, multicast, a communication manager,
/// and little more.
const PORT_CAPABILITIES: u32 = 0x0251_0868;

/// A RoCE address of the port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RoceAddress {
    pub(crate) gid: [u8; 16],
    pub(crate) mac: [u8; 6],
    pub(crate) vlan: Option<u16>,
    /// 0 for RoCE v1, 2 for v2.
    pub(crate) version: u8,
}

/// Settings of the network interface.
#[derive(Debug)]
pub(crate) struct Nic {
    pub(crate) mac: [u8; 6],
    pub(crate) mtu: u32,
    pub(crate) port_mtu: u32,
    pub(crate) roce: bool,
    /// Kinds of sent frames that are not looped back: `UNICAST`, `MULTICAST`.
    pub(crate) disabled_loopback: u32,
    pub(crate) admin_up: bool,
}

/// The device's objects and state.
#[derive(Debug)]
pub struct Core<P> {
    pub(crate) platform: P,
    pub(crate) settings: Settings,
    pub(crate) registers: Registers,
    pub(crate) capabilities: Capabilities,
    pub(crate) stats: Stats,
    pub(crate) operations: OperationCounts,
    pub(crate) counts_operations: bool,
    pub(crate) faults: DeviceFaults,
    /// What it does late, if it has chaos.
    pub(crate) chaos: Option<Box<ChaosState<LateCompletion>>>,
    pub(crate) issi: u8,
    pub(crate) pages: Vec<u64>,
    pub(crate) node_description: [u8; 64],
    pub(crate) link_up: bool,
    /// The cable is plugged in.
    pub(crate) cable_plugged: bool,
    pub(crate) nic: Nic,
    pub(crate) roce_addresses: Vec<Option<RoceAddress>>,
    pub(crate) uars: Table<()>,
    pub(crate) pds: Table<()>,
    pub(crate) xrcds: Table<()>,
    /// Capabilities that the InfiniBand port reports.
    pub(crate) port_capabilities: u32,
    pub(crate) transport_domains: Table<()>,
    /// User contexts of programs that issue commands, and queue pair numbers reserved
    /// for them.
    pub(crate) user_contexts: Table<()>,
    pub(crate) object_owners: ObjectOwners,
    /// Memory of programs.
    pub(crate) umems: Table<Umem>,
    pub(crate) reserved_qpns: Table<()>,
    pub(crate) scheduling: Table<Element>,
    pub(crate) address_mappings: Table<()>,
    pub(crate) q_counters: Table<QCounters>,
    pub(crate) eqs: Table<Eq>,
    pub(crate) cqs: Table<Cq>,
    /// Completion queues with a session of compressed CQEs that is not written yet.
    pub(crate) cqs_with_session: Vec<u32>,
    pub(crate) mkeys: Table<Mkey>,
    /// Number of memory keys with signatures or encryption.
    pub(crate) protected_keys: usize,
    pub(crate) psvs: Table<Psv>,
    pub(crate) encryption_keys: Table<EncryptionKey>,
    /// Logins, by their user contexts.
    pub(crate) logins: Table<u32>,
    /// Partially received blocks, by key and block number.
    pub(crate) partial_blocks: HashMap<(u32, u64), PartialBlock>,
    pub(crate) queues: Table<Queue>,
    /// Buffer into which the next WQE of a send queue is read.
    pub(crate) send_wqe_buffer: Option<Box<[u8; MAX_SEND_WQE]>>,
    pub(crate) srqs: Table<Srq>,
    pub(crate) steering: Steering,
    pub(crate) device_memory: DeviceMemory,
    /// The absent page that the last translation found.
    pub(crate) absent_page: Cell<Option<AbsentPage>>,
    /// The rule of keys that the last translation broke.
    pub(crate) broken_rule: Cell<Option<BrokenRule>>,
    pub(crate) paging: Paging,
    /// The first reports of misuse.
    pub(crate) complaints: Vec<Misuse>,
    /// Is told all causes.
    pub(crate) observer: Option<Observer>,
    /// Is told of work requests, if anybody is.
    pub(crate) follower: Option<Box<Follower>>,
    /// Causes about the frame that is processed, with an observer of frames.
    pub(crate) frame_causes: Option<Vec<Cause>>,
}

/// Maximum number of causes that are kept about a frame.
const MAX_FRAME_CAUSES: usize = 4;
/// Maximum number of reports that are kept.
const MAX_COMPLAINTS: usize = 100;

impl<P> Core<P> {
    pub(crate) fn new(platform: P, settings: Settings) -> Core<P> {
        let mut node_description = [0; 64];
        let name = b"softhca";
        node_description[..name.len()].copy_from_slice(name);
        let chaos = settings.chaos.as_ref().map(|chaos| {
            let chaos = Arc::clone(chaos);
            Box::new(ChaosState::new(chaos, settings.number))
        });
        let mut core = Core {
            platform,
            registers: Registers::default(),
            capabilities: Capabilities::new(settings.profile, settings.card),
            stats: Stats::default(),
            operations: OperationCounts::default(),
            counts_operations: false,
            faults: DeviceFaults::default(),
            chaos,
            issi: 0,
            pages: Vec::new(),
            node_description,
            link_up: settings.profile.port == crate::profile::PortKind::InfiniBand,
            cable_plugged: true,
            nic: Nic {
                mac: settings.mac,
                mtu: 1500,
                port_mtu: 1522,
                roce: false,
                disabled_loopback: 0,
                admin_up: false,
            },
            roce_addresses: vec![None; 128],
            // Numbers that have a UAR page in the BAR.
            uars: Table::new(FIRST_UAR, UARS),
            pds: Table::new(1, 1 << 16),
            xrcds: Table::new(1, 1 << 16),
            port_capabilities: PORT_CAPABILITIES,
            transport_domains: Table::new(1, 1 << 16),
            user_contexts: Table::new(1, (1 << 16) - 2),
            object_owners: ObjectOwners::default(),
            umems: Table::new(1, 1 << 16),
            reserved_qpns: Table::new(0, MAX_RESERVED_QPN_RANGES),
            scheduling: Table::new(1, scheduling::MAX_ELEMENTS),
            address_mappings: Table::new(1, 1 << 16),
            q_counters: Table::new(1, 127),
            eqs: Table::new(1, 63),
            cqs: Table::new(1, 1 << 16),
            cqs_with_session: Vec::new(),
            mkeys: Table::new(settings.first_mkey, 1 << 22),
            protected_keys: 0,
            psvs: Table::new(1, 1 << 16),
            encryption_keys: Table::new(1, 1 << LOG_MAX_ENCRYPTION_KEYS),
            logins: Table::new(1, 1 << 16),
            partial_blocks: HashMap::new(),
            queues: Table::new(settings.first_qpn, 1 << 17),
            send_wqe_buffer: None,
            srqs: Table::new(1, 1 << 16),
            steering: Steering::default(),
            device_memory: DeviceMemory::new(),
            absent_page: Cell::new(None),
            broken_rule: Cell::new(None),
            paging: Paging::default(),
            complaints: Vec::new(),
            observer: None,
            follower: None,
            frame_causes: None,
            settings,
        };
        if let Some(count) = core.chaos.as_ref().and_then(|it| it.reuse_after()) {
            core.queues.set_reuse_after(count);
            core.mkeys.set_reuse_after(count);
        }
        core
    }

    /// Returns whether a protection domain exists. Number 0 is the device's own: the
    /// driver uses it for queues that access no memory (its UMR queue, its test of
    /// write combining).
    pub(crate) fn has_pd(&self, pd: u32) -> bool {
        pd == 0 || self.pds.get(pd).is_some()
    }

    /// Records and logs misuse by the driver or a program: as an error in strict mode,
    /// else as a warning.
    #[cold]
    pub(crate) fn report_misuse(&mut self, misuse: Misuse) {
        self.stats.complaints += 1;
        if self.settings.strict {
            tracing::error!("strict: {misuse}");
        } else {
            tracing::warn!("{misuse}");
        }
        if self.complaints.len() < MAX_COMPLAINTS {
            self.complaints.push(misuse);
        }
        self.observe(|_| Some(Cause::Misuse(misuse)));
    }

    /// Reports a work request that is malformed or cannot be executed.
    #[cold]
    pub(crate) fn report_work_request(&mut self, queue: u32, index: u16, violation: Violation) {
        self.report_misuse(Misuse::WorkRequest {
            queue,
            index,
            violation,
        });
    }

    /// Tells the observer a cause, which is computed only if there is an observer.
    #[inline]
    pub(crate) fn observe(&mut self, cause: impl FnOnce(&Self) -> Option<Cause>) {
        if self.observer.is_some() || self.frame_causes.is_some() {
            self.tell(cause(self));
        }
    }

    #[cold]
    fn tell(&mut self, cause: Option<Cause>) {
        let Some(cause) = cause else { return };
        if let Some(observer) = &mut self.observer {
            observer.tell(&cause);
        }
        if let Some(causes) = &mut self.frame_causes {
            if causes.len() < MAX_FRAME_CAUSES {
                causes.push(cause);
            }
        }
    }
}
