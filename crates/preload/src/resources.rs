//! RDMA netlink: objects and counters (`rdma resource`, `rdma statistic`). Those of this
//! process, as mlx5_ib has them of all processes.

use std::net::SocketAddr;

use embedded::{ConnectionId, Embedded, Resource, ResourceKind, sysfs};
use uverbs::abi::netlink::{
    NLDEV_CMD_RES_CM_ID_GET, NLDEV_CMD_RES_CQ_GET, NLDEV_CMD_RES_CTX_GET, NLDEV_CMD_RES_MR_GET,
    NLDEV_CMD_RES_PD_GET, NLDEV_CMD_RES_QP_GET, NLDEV_CMD_RES_SRQ_GET, attr,
};
use uverbs::discovery::netlink::MessageBuilder;
use uverbs::{Errno, QpType};
use zerocopy::IntoBytes;

/// Bytes of the objects of a message, above which another one begins: programs receive into
/// 4 KiB.
const MAX_OBJECTS: usize = 3072;
/// `sizeof(struct __kernel_sockaddr_storage)`.
const ADDRESS_LENGTH: usize = 128;

/// A kind of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Pd,
    Cq,
    Qp,
    CmId,
    Mr,
    Context,
    Srq,
}

impl Kind {
    /// In the order of summaries.
    const ALL: [Self; 7] = [
        Self::Pd,
        Self::Cq,
        Self::Qp,
        Self::CmId,
        Self::Mr,
        Self::Context,
        Self::Srq,
    ];

    /// Returns the kind that a command returns.
    pub(crate) fn of_command(command: u16) -> Option<Self> {
        Some(match command {
            NLDEV_CMD_RES_PD_GET => Self::Pd,
            NLDEV_CMD_RES_CQ_GET => Self::Cq,
            NLDEV_CMD_RES_QP_GET => Self::Qp,
            NLDEV_CMD_RES_CM_ID_GET => Self::CmId,
            NLDEV_CMD_RES_MR_GET => Self::Mr,
            NLDEV_CMD_RES_CTX_GET => Self::Context,
            NLDEV_CMD_RES_SRQ_GET => Self::Srq,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::Pd => "pd",
            Self::Cq => "cq",
            Self::Qp => "qp",
            Self::CmId => "cm_id",
            Self::Mr => "mr",
            Self::Context => "ctx",
            Self::Srq => "srq",
        }
    }

    /// Returns the attributes of a table of such objects, of an entry, and of its number.
    fn attributes(self) -> (u16, u16, u16) {
        match self {
            Self::Pd => (
                attr::ATTR_RES_PD,
                attr::ATTR_RES_PD_ENTRY,
                attr::ATTR_RES_PDN,
            ),
            Self::Cq => (
                attr::ATTR_RES_CQ,
                attr::ATTR_RES_CQ_ENTRY,
                attr::ATTR_RES_CQN,
            ),
            Self::Qp => (
                attr::ATTR_RES_QP,
                attr::ATTR_RES_QP_ENTRY,
                attr::ATTR_RES_LQPN,
            ),
            Self::CmId => (
                attr::ATTR_RES_CM_ID,
                attr::ATTR_RES_CM_ID_ENTRY,
                attr::ATTR_RES_CM_IDN,
            ),
            Self::Mr => (
                attr::ATTR_RES_MR,
                attr::ATTR_RES_MR_ENTRY,
                attr::ATTR_RES_MRN,
            ),
            Self::Context => (
                attr::ATTR_RES_CTX,
                attr::ATTR_RES_CTX_ENTRY,
                attr::ATTR_RES_CTXN,
            ),
            Self::Srq => (
                attr::ATTR_RES_SRQ,
                attr::ATTR_RES_SRQ_ENTRY,
                attr::ATTR_RES_SRQN,
            ),
        }
    }

    /// Returns the attribute by which a request names one object.
    pub(crate) fn number(self) -> u16 {
        self.attributes().2
    }

    /// Returns whether such objects belong to a port.
    pub(crate) fn has_port(self) -> bool {
        matches!(self, Self::Qp | Self::CmId)
    }

    fn of(resource: &Resource) -> Self {
        match resource.kind {
            ResourceKind::Context => Self::Context,
            ResourceKind::ProtectionDomain(_) => Self::Pd,
            ResourceKind::CompletionQueue { .. } => Self::Cq,
            ResourceKind::MemoryRegion { .. } => Self::Mr,
            ResourceKind::QueuePair(_) => Self::Qp,
            ResourceKind::SharedReceiveQueue { .. } => Self::Srq,
        }
    }
}

/// Which attributes of an object are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    All,
    /// The same, only of objects that have a port.
    OfPort,
    /// Its number, for its counters.
    Number,
}

/// An object: its number, and what describes it.
struct Object {
    number: u32,
    described: Described,
}

enum Described {
    Resource(Resource),
    Id(ConnectionId),
}

impl Object {
    /// Returns whether it is a queue pair that has no port yet.
    fn lacks_port(&self) -> bool {
        match &self.described {
            Described::Resource(resource) => {
                matches!(&resource.kind, ResourceKind::QueuePair(qp) if qp.port == 0)
            }
            Described::Id(_) => false,
        }
    }
}

/// Returns the objects of a kind.
fn objects(device: &Embedded, kind: Kind) -> Vec<Object> {
    if kind == Kind::CmId {
        let ids = device.connection_ids().into_iter();
        return ids
            .map(|id| Object {
                number: id.id,
                described: Described::Id(id),
            })
            .collect();
    }
    let all = device.resources().into_iter();
    all.filter(|it| Kind::of(it) == kind)
        .map(|resource| Object {
            number: resource.id,
            described: Described::Resource(resource),
        })
        .collect()
}

/// Adds the numbers of objects.
pub(crate) fn describe_summary(device: &Embedded, message: MessageBuilder) -> MessageBuilder {
    let all = device.resources();
    let ids = device.connection_ids().len();
    message.nested(attr::ATTR_RES_SUMMARY, |mut message| {
        for kind in Kind::ALL {
            let count = match kind {
                Kind::CmId => ids,
                kind => all.iter().filter(|it| Kind::of(it) == kind).count(),
            };
            message = message.nested(attr::ATTR_RES_SUMMARY_ENTRY, |message| {
                message
                    .name(attr::ATTR_RES_SUMMARY_ENTRY_NAME, kind.name())
                    .attribute(attr::ATTR_RES_SUMMARY_ENTRY_CURR, (count as u64).as_bytes())
            });
        }
        message
    })
}

/// Adds the object with a number.
pub(crate) fn describe_one(
    device: &Embedded,
    kind: Kind,
    number: u32,
    message: MessageBuilder,
) -> Result<MessageBuilder, Errno> {
    let object = objects(device, kind)
        .into_iter()
        .find(|it| it.number == number);
    let object = object.ok_or(Errno::new(libc::ENOENT))?;
    if object.lacks_port() {
        return Err(Errno::new(libc::EAGAIN));
    }
    Ok(describe(&object, kind, Detail::All, message))
}

/// Returns messages with all objects of a kind. `begin` begins one.
pub(crate) fn describe_all(
    device: &Embedded,
    kind: Kind,
    detail: Detail,
    begin: impl Fn() -> MessageBuilder,
) -> Vec<MessageBuilder> {
    let (table, entry, _) = kind.attributes();
    let is_wanted = |it: &Object| detail != Detail::OfPort || !it.lacks_port();
    let objects = objects(device, kind).into_iter().filter(is_wanted);
    let mut objects = objects.peekable();
    let mut messages = Vec::new();
    while objects.peek().is_some() {
        messages.push(begin().nested(table, |mut message| {
            while message.len() < MAX_OBJECTS {
                let Some(object) = objects.next() else { break };
                message = message.nested(entry, |message| describe(&object, kind, detail, message));
            }
            message
        }));
    }
    messages
}

/// Adds an object.
fn describe(
    object: &Object,
    kind: Kind,
    detail: Detail,
    message: MessageBuilder,
) -> MessageBuilder {
    if detail == Detail::Number {
        return message.attribute(kind.number(), object.number.as_bytes());
    }
    match &object.described {
        Described::Resource(resource) => describe_resource(resource, message),
        Described::Id(id) => describe_id(id, message),
    }
}

/// Adds the process.
fn by_process(message: MessageBuilder) -> MessageBuilder {
    message.attribute(attr::ATTR_RES_PID, std::process::id().as_bytes())
}

fn describe_resource(resource: &Resource, message: MessageBuilder) -> MessageBuilder {
    let (id, context) = (resource.id, resource.context);
    let in_pd = |message: MessageBuilder| match resource.pd {
        Some(pd) => message.attribute(attr::ATTR_RES_PDN, pd.as_bytes()),
        None => message,
    };
    match &resource.kind {
        ResourceKind::Context => {
            by_process(message.attribute(attr::ATTR_RES_CTXN, context.as_bytes()))
        }
        ResourceKind::ProtectionDomain(uses) => by_process(
            message
                .attribute(attr::ATTR_RES_LOCAL_DMA_LKEY, 0_u32.as_bytes())
                .attribute(attr::ATTR_RES_USECNT, uses.as_bytes())
                .attribute(attr::ATTR_RES_PDN, id.as_bytes())
                .attribute(attr::ATTR_RES_CTXN, context.as_bytes()),
        ),
        ResourceKind::CompletionQueue { entries, uses } => by_process(
            message
                .attribute(attr::ATTR_RES_CQE, entries.as_bytes())
                .attribute(attr::ATTR_RES_USECNT, uses.as_bytes())
                .attribute(attr::ATTR_DEV_DIM, &[0])
                .attribute(attr::ATTR_RES_CQN, id.as_bytes())
                .attribute(attr::ATTR_RES_CTXN, context.as_bytes()),
        ),
        ResourceKind::MemoryRegion { key, length } => {
            let message = message
                .attribute(attr::ATTR_RES_RKEY, key.as_bytes())
                .attribute(attr::ATTR_RES_LKEY, key.as_bytes())
                .attribute(attr::ATTR_RES_MRLEN, length.as_bytes())
                .attribute(attr::ATTR_RES_MRN, id.as_bytes());
            by_process(in_pd(message))
        }
        ResourceKind::SharedReceiveQueue {
            kind,
            cq,
            queue_pairs,
        } => {
            let mut message = in_pd(
                message
                    .attribute(attr::ATTR_RES_SRQN, id.as_bytes())
                    .attribute(attr::ATTR_RES_TYPE, &[*kind]),
            );
            if let Some(cq) = cq {
                message = message.attribute(attr::ATTR_RES_CQN, cq.as_bytes());
            }
            by_process(describe_ranges(queue_pairs, message))
        }
        ResourceKind::QueuePair(qp) => {
            let mut message = message;
            if qp.port != 0 {
                let port = u32::from(qp.port);
                message = message.attribute(attr::ATTR_PORT_INDEX, port.as_bytes());
            }
            message = message.attribute(attr::ATTR_RES_LQPN, id.as_bytes());
            // The kernel's core owns an XRC target, which no context does.
            message = match qp.kind {
                QpType::XRC_TGT => message.name(attr::ATTR_RES_KERN_NAME, "ib_uverbs"),
                _ => by_process(in_pd(message)),
            };
            if matches!(qp.kind, QpType::RC | QpType::UC) {
                message = message
                    .attribute(attr::ATTR_RES_RQPN, qp.peer.as_bytes())
                    .attribute(attr::ATTR_RES_RQ_PSN, qp.receive_psn.as_bytes());
            }
            message = message.attribute(attr::ATTR_RES_SQ_PSN, qp.send_psn.as_bytes());
            let connected = [QpType::RC, QpType::UC, QpType::XRC_INI, QpType::XRC_TGT];
            if connected.contains(&qp.kind) {
                message = message.attribute(attr::ATTR_RES_PATH_MIG_STATE, &[qp.path_mig_state]);
            }
            message
                .attribute(attr::ATTR_RES_TYPE, &[qp.kind.0 as u8])
                .attribute(attr::ATTR_RES_STATE, &[qp.state])
        }
    }
}

/// Adds numbers of queue pairs in ascending order: ranges of successive ones.
fn describe_ranges(numbers: &[u32], message: MessageBuilder) -> MessageBuilder {
    let ranges = numbers.chunk_by(|a, b| a + 1 == *b);
    let end = message.len() + MAX_OBJECTS;
    message.nested(attr::ATTR_RES_QP, |mut message| {
        for range in ranges {
            let (Some(first), Some(last)) = (range.first(), range.last()) else {
                continue;
            };
            if message.len() > end {
                break;
            }
            message = message.nested(attr::ATTR_RES_QP_ENTRY, |message| match first == last {
                true => message.attribute(attr::ATTR_RES_LQPN, first.as_bytes()),
                false => message
                    .attribute(attr::ATTR_MIN_RANGE, first.as_bytes())
                    .attribute(attr::ATTR_MAX_RANGE, last.as_bytes()),
            });
        }
        message
    })
}

fn describe_id(id: &ConnectionId, message: MessageBuilder) -> MessageBuilder {
    let mut message = message.attribute(attr::ATTR_PORT_INDEX, 1_u32.as_bytes());
    if id.queue_pair != 0 {
        message = message
            .attribute(attr::ATTR_RES_LQPN, id.queue_pair.as_bytes())
            .attribute(attr::ATTR_RES_TYPE, &[id.kind.0 as u8]);
    }
    message = message
        .attribute(attr::ATTR_RES_PS, id.space.as_bytes())
        .attribute(attr::ATTR_RES_STATE, &[id.state]);
    if let Some(local) = id.local {
        // As in the kernel, the peer's address has a family in any case.
        let peer = id.peer.unwrap_or(match local {
            SocketAddr::V4(_) => SocketAddr::from(([0; 4], 0)),
            SocketAddr::V6(_) => SocketAddr::from(([0; 16], 0)),
        });
        message = message
            .attribute(attr::ATTR_RES_SRC_ADDR, &storage(local))
            .attribute(attr::ATTR_RES_DST_ADDR, &storage(peer));
    }
    by_process(message.attribute(attr::ATTR_RES_CM_IDN, id.id.as_bytes()))
}

/// Returns an address as `struct __kernel_sockaddr_storage`.
fn storage(address: SocketAddr) -> [u8; ADDRESS_LENGTH] {
    let mut bytes = [0; ADDRESS_LENGTH];
    let mut put = |at: usize, part: &[u8]| {
        if let Some(place) = bytes.get_mut(at..at + part.len()) {
            place.copy_from_slice(part);
        }
    };
    put(2, &address.port().to_be_bytes());
    match address {
        SocketAddr::V4(address) => {
            put(0, &(libc::AF_INET as u16).to_ne_bytes());
            put(4, &address.ip().octets());
        }
        SocketAddr::V6(address) => {
            put(0, &(libc::AF_INET6 as u16).to_ne_bytes());
            put(8, &address.ip().octets());
            put(24, &address.scope_id().to_ne_bytes());
        }
    }
    bytes
}

/// Adds the counters of the port.
pub(crate) fn describe_counters(device: &Embedded, message: MessageBuilder) -> MessageBuilder {
    message.nested(attr::ATTR_STAT_HWCOUNTERS, |mut message| {
        for (name, value) in sysfs::hw_counters(device) {
            message = message.nested(attr::ATTR_STAT_HWCOUNTER_ENTRY, |message| {
                message
                    .name(attr::ATTR_STAT_HWCOUNTER_ENTRY_NAME, name)
                    .attribute(attr::ATTR_STAT_HWCOUNTER_ENTRY_VALUE, value.as_bytes())
            });
        }
        message
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_socket_addresses() {
        let v4 = storage("1.2.3.4:258".parse().unwrap());
        assert_eq!(v4[..8], [2, 0, 1, 2, 1, 2, 3, 4]);
        let v6 = storage("[102::304%5]:258".parse().unwrap());
        assert_eq!(v6[..4], [10, 0, 1, 2]);
        assert_eq!((&v6[8..10], &v6[22..26]), (&[1, 2][..], &[3, 4, 5, 0][..]));
    }

    #[test]
    fn successive_queue_pairs_are_ranges() {
        let begin = || MessageBuilder::request(0, 0);
        let ranges = describe_ranges(&[5, 7, 8, 9], begin()).finish();
        let expected = begin().nested(attr::ATTR_RES_QP, |message| {
            message
                .nested(attr::ATTR_RES_QP_ENTRY, |entry| {
                    entry.attribute(attr::ATTR_RES_LQPN, 5_u32.as_bytes())
                })
                .nested(attr::ATTR_RES_QP_ENTRY, |entry| {
                    entry
                        .attribute(attr::ATTR_MIN_RANGE, 7_u32.as_bytes())
                        .attribute(attr::ATTR_MAX_RANGE, 9_u32.as_bytes())
                })
        });
        assert_eq!(ranges, expected.finish());
    }
}
