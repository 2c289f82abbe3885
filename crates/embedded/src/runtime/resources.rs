//! The objects of a device, as the kernel describes them to administrators (restrack).

use std::collections::HashMap;

use uverbs::QpType;
use uverbs::abi::ids;

use crate::cm::ConnectionId;
use crate::driver::files::File;
use crate::driver::object::{Cq, Mr, Object, Pd, Qp, Srq, SrqKind};
use crate::runtime::embedded::Embedded;

/// An object of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// Its number among those of its kind; of a queue pair, the device's.
    pub id: u32,
    /// The number of its context.
    pub context: u32,
    /// The number of its protection domain, if it has one.
    pub pd: Option<u32>,
    /// Its kind, with the attributes of that kind.
    pub kind: ResourceKind,
}

/// The kind of an object, with its attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResourceKind {
    /// An open device.
    Context,
    /// A protection domain, and the number of objects that use it.
    ProtectionDomain(u64),
    /// A completion queue.
    CompletionQueue {
        /// Number of entries.
        entries: u32,
        /// Number of uses by other objects.
        uses: u64,
    },
    /// A memory region.
    MemoryRegion {
        /// Its local and remote key.
        key: u32,
        /// Its length in bytes.
        length: u64,
    },
    /// A queue pair.
    QueuePair(QueuePairResource),
    /// A shared receive queue.
    SharedReceiveQueue {
        /// `enum ib_srq_type`.
        kind: u8,
        /// The number of its completion queue, if it has one.
        cq: Option<u32>,
        /// Numbers of the queue pairs that use it, in ascending order.
        queue_pairs: Vec<u32>,
    },
}

/// Attributes of a queue pair, as a query returns them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairResource {
    /// Type.
    pub kind: QpType,
    /// Port, 0 before INIT.
    pub port: u8,
    /// State.
    pub state: u8,
    /// Number of the peer's queue pair.
    pub peer: u32,
    /// Next packet number to receive.
    pub receive_psn: u32,
    /// Next packet number to send.
    pub send_psn: u32,
    /// Path migration state.
    pub path_mig_state: u8,
}

impl Embedded {
    /// Returns the objects of all contexts that the kernel tracks for administrators, by
    /// kind and number.
    pub fn resources(&self) -> Vec<Resource> {
        let mut state = self.device.lock();
        let contexts = state.files.values().filter_map(|file| match file {
            File::Context(context) if context.initialized => Some(context.id as u32),
            _ => None,
        });
        let mut all: Vec<_> = contexts
            .map(|id| Resource {
                id,
                context: id,
                pd: None,
                kind: ResourceKind::Context,
            })
            .collect();
        // The queue pairs of each shared receive queue.
        let mut users: HashMap<u32, Vec<u32>> = HashMap::new();
        for object in state.objects.all() {
            let Some(qp) = object.of::<Qp>() else {
                continue;
            };
            for handle in &object.dependencies {
                let used = state.objects.with_handle(*handle);
                if used.and_then(Object::of::<Srq>).is_some() {
                    users.entry(*handle).or_default().push(qp.number);
                }
            }
        }
        users
            .values_mut()
            .for_each(|numbers| numbers.sort_unstable());
        let mut queue_pairs = Vec::new();
        for (handle, object) in state.objects.entries() {
            let uses = object.uses as u64;
            let of_kind = |wanted: u16| {
                let is_it = |handle: &&u32| {
                    let object = state.objects.with_handle(**handle);
                    object.is_some_and(|it| it.data.kind() == wanted)
                };
                object.dependencies.iter().find(is_it).copied()
            };
            let (id, kind) = if object.of::<Pd>().is_some() {
                (handle, ResourceKind::ProtectionDomain(uses))
            } else if let Some(cq) = object.of::<Cq>() {
                let entries = cq.cqe;
                (handle, ResourceKind::CompletionQueue { entries, uses })
            } else if let Some(mr) = object.of::<Mr>() {
                let (key, length) = (mr.key, mr.length);
                (handle, ResourceKind::MemoryRegion { key, length })
            } else if let Some(srq) = object.of::<Srq>() {
                let kind = match srq.kind {
                    SrqKind::Basic => 0,
                    SrqKind::Xrc => 1,
                    SrqKind::Tags => 2,
                };
                let kind = ResourceKind::SharedReceiveQueue {
                    kind,
                    cq: of_kind(ids::OBJECT_CQ),
                    queue_pairs: users.remove(&handle).unwrap_or_default(),
                };
                (handle, kind)
            } else if let Some(qp) = object.of::<Qp>() {
                let resource = QueuePairResource {
                    kind: QpType(qp.kind),
                    port: qp.attributes.port_num,
                    state: 0,
                    peer: qp.attributes.dest_qp_num,
                    receive_psn: 0,
                    send_psn: 0,
                    path_mig_state: qp.attributes.path_mig_state,
                };
                queue_pairs.push((object.file, handle, all.len()));
                (qp.number, ResourceKind::QueuePair(resource))
            } else {
                continue;
            };
            let context = match state.files.get(&object.file) {
                Some(File::Context(context)) => context.id as u32,
                _ => 0,
            };
            all.push(Resource {
                id,
                context,
                pd: of_kind(ids::OBJECT_PD),
                kind,
            });
        }
        for (file, handle, at) in queue_pairs {
            // Fails for a queue pair whose work queues are objects of their own.
            let Ok((now, receive, send)) = state.queried_qp(file, handle) else {
                continue;
            };
            if let Some(ResourceKind::QueuePair(qp)) = all.get_mut(at).map(|it| &mut it.kind) {
                (qp.state, qp.receive_psn, qp.send_psn) = (now, receive, send);
            }
        }
        all.sort_by_key(|it| it.id);
        all
    }

    /// Returns the ids of the connection manager in this process that have this device, by
    /// number.
    pub fn connection_ids(&self) -> Vec<ConnectionId> {
        let guid = self.node_guid();
        self.runner.manager().ids_on(guid)
    }
}
