//! Ids, and the queue pair attributes of a connection.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::RawFd;
use std::time::Duration;

use nix::ifaddrs::getifaddrs;
use rdmacm::abi;
use roce::packet::{gid_of_ip, ip_of_gid};
use uverbs::abi::write::{AhAttr, GlobalRoute};
use uverbs::{AccessFlags, QpAttrMask as Mask, QpState, QpType};

use super::connection::{ConnectionState, Ends};
use super::message::{Message, MessageKind};
use super::ports::BoundPort;
use crate::addresses::{AddressList, OwnGids};
use crate::wires::agent::{Peer, PortAddress};
use crate::{Result, refuse};

/// Queue key of datagram services (`RDMA_UDP_QKEY`).
pub(super) const QKEY: u32 = 0x0123_4567;
/// 4096 bytes, in MTU encoding.
pub(super) const MTU: u8 = 5;
/// Encoding of 0.54 s, rdma_cm's value for RoCE.
pub(super) const ACK_TIMEOUT: u8 = 17;
/// Time from the end of a connection to TIMEWAIT_EXIT: that of `cm_convert_to_ms` for the
/// timeout above, without what a card at the end that has requested it adds for its own delay.
pub(super) const TIMEWAIT: Duration = Duration::from_millis(1 << (ACK_TIMEOUT - 8));
const HOP_LIMIT: u8 = 64;

/// An id of the connection manager that has a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionId {
    /// Number.
    pub id: u32,
    /// Number of its queue pair; 0 if none is known.
    pub queue_pair: u32,
    /// Type of the queue pair.
    pub kind: QpType,
    /// Port space (`RDMA_PS_TCP`).
    pub space: u32,
    /// `enum rdma_cm_state`.
    pub state: u8,
    /// Its own address.
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub peer: Option<SocketAddr>,
}

/// A port of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalPort {
    pub(crate) ethernet: bool,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    pub(crate) node_guid: u64,
    /// Index of the GID.
    pub(crate) gid_index: u8,
    /// GIDs of RoCE v2 of a device that reaches no other hosts, with their indices.
    pub(crate) own: Option<OwnGids>,
    /// Path MTU, in MTU encoding.
    pub(crate) mtu: u8,
    /// Number of the device in its network.
    pub(crate) node: u16,
}

impl LocalPort {
    /// Returns the addresses that a peer needs.
    pub(super) fn address(self) -> PortAddress {
        PortAddress {
            ethernet: self.ethernet,
            gid: self.gid,
            lid: self.lid,
        }
    }

    /// Returns the port with the GID of an address, if the device has that address.
    pub(super) fn at(self, ip: IpAddr, hosts: Option<&AddressList>) -> Self {
        if self.own.is_some_and(|own| own.ipv4.0 == gid_of_ip(ip)) {
            return self.toward(gid_of_ip(ip));
        }
        let hosts = hosts.map(AddressList::all).unwrap_or_default();
        match hosts.iter().position(|host| host.ip == ip) {
            Some(index) => Self {
                gid: gid_of_ip(ip),
                gid_index: index as u8,
                ..self
            },
            None => self,
        }
    }

    /// Returns the port with the GID of RoCE v2 that can be used with the GID of a peer: both
    /// are IPv4 addresses, or neither is.
    pub(super) fn toward(self, peer: [u8; 16]) -> Self {
        let Some(own) = self.own else {
            return self;
        };
        let (gid, gid_index) = match ip_of_gid(peer) {
            IpAddr::V4(_) => own.ipv4,
            IpAddr::V6(_) => own.link_local,
        };
        Self {
            gid,
            gid_index,
            ..self
        }
    }
}

/// State of an id, as in rdma_cm. That of its connection is the machine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    Listening,
    /// The id has sent a request, represents one, or knows a datagram service.
    Connected,
    /// The connection has ended.
    Closed,
}

/// Parameters of the peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PeerParameters {
    pub(super) qp_num: u32,
    pub(super) psn: u32,
    pub(super) lid: u16,
    pub(super) gid: [u8; 16],
}

/// Limits on outstanding operations and retries of a queue pair.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Depths {
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
}

#[derive(Debug)]
pub(super) struct Id {
    /// The channel of the id.
    pub(super) channel: RawFd,
    /// Identifies the id in events; with 0 it has no events.
    pub(super) uid: u64,
    pub(super) space: u16,
    pub(super) datagram: bool,
    pub(super) phase: Phase,
    pub(super) port: LocalPort,
    /// The peer may be on another host.
    pub(super) may_be_remote: bool,
    pub(super) local: Option<SocketAddr>,
    pub(super) peer: Option<SocketAddr>,
    /// The port that the id owns.
    pub(super) bound_port: Option<BoundPort>,
    /// Maximum number of unread requests.
    pub(super) backlog: u32,
    /// Number of the connection, or of the request for a datagram service.
    pub(super) connection: Option<u32>,
    /// The id's request, until it is answered.
    pub(super) request: Option<Box<Message>>,
    /// Whom it was sent to.
    pub(super) asked: Vec<Peer>,
    /// Until when it is sent again, while a child of fork may come to listen.
    pub(super) awaits_heir_until: Option<Duration>,
    /// The program was told that the connection has ended, and has ended it.
    pub(super) was_disconnected: bool,
    pub(super) has_disconnected: bool,
    /// When it leaves, or has left, the state after both.
    pub(super) timewait_end: Option<Duration>,
    pub(super) psn: u32,
    pub(super) qkey: u32,
    pub(super) peer_parameters: Option<PeerParameters>,
    pub(super) depths: Depths,
    /// Number of events that were read.
    pub(super) reported: u32,
    /// AFONLY, once it is set or the id is bound.
    pub(super) family_only: Option<bool>,
    /// REUSEADDR.
    pub(super) reuses: bool,
    pub(super) ack_timeout: u8,
    pub(super) tos: u8,
    /// Number of the program's queue pair, from a request or reply.
    pub(super) queue_pair: u32,
}

impl Id {
    /// Creates an id; `psn` is where its peer begins to send.
    pub(super) fn new(
        channel: RawFd,
        port: LocalPort,
        space: u16,
        datagram: bool,
        psn: u64,
    ) -> Self {
        Self {
            channel,
            uid: 0,
            space,
            datagram,
            phase: Phase::Idle,
            port,
            may_be_remote: false,
            local: None,
            peer: None,
            bound_port: None,
            backlog: 0,
            connection: None,
            request: None,
            asked: Vec::new(),
            awaits_heir_until: None,
            was_disconnected: false,
            has_disconnected: false,
            timewait_end: None,
            psn: psn as u32 & 0xff_ffff,
            qkey: QKEY,
            peer_parameters: None,
            depths: Depths::default(),
            reported: 0,
            family_only: None,
            reuses: false,
            ack_timeout: ACK_TIMEOUT,
            tos: 0,
            queue_pair: 0,
        }
    }

    /// Returns the ends of a connection that the id requests of a peer.
    pub(super) fn ends_with(&self, peer: Peer) -> Ends {
        Ends {
            peer,
            port: self.port.address(),
            guid: self.port.node_guid,
        }
    }

    /// Returns the type of its requests.
    pub(super) fn request_kind(&self) -> MessageKind {
        match self.datagram {
            true => MessageKind::ServiceRequest,
            false => MessageKind::Request,
        }
    }

    /// Returns whether the id has a device, selected by its own or its peer's address.
    pub(super) fn is_on_device(&self) -> bool {
        match self.phase {
            Phase::Idle => false,
            // As in the kernel, a loopback address does not select a device with host addresses.
            Phase::Bound | Phase::Listening => {
                self.local.is_some_and(|local| match self.may_be_remote {
                    true => self.port.gid == gid_of_ip(local.ip()),
                    false => !local.ip().is_unspecified(),
                })
            }
            _ => true,
        }
    }

    /// Describes the id, with its number and the state of its connection.
    pub(super) fn described(&self, id: u32, connection: Option<ConnectionState>) -> ConnectionId {
        let disconnects = matches!(
            connection,
            Some(ConnectionState::DreqSent | ConnectionState::DreqRcvd | ConnectionState::Timewait)
        );
        // `enum rdma_cm_state`.
        let state = match self.phase {
            Phase::Idle => 0,
            Phase::AddressResolved => 2,
            Phase::RouteResolved => 4,
            Phase::Connected if disconnects && !self.datagram => 6,
            Phase::Connected => 5,
            Phase::Closed => 6,
            Phase::Bound => 7,
            Phase::Listening => 8,
        };
        ConnectionId {
            id,
            queue_pair: self.queue_pair,
            kind: if self.datagram {
                QpType::UD
            } else {
                QpType::RC
            },
            space: self.space.into(),
            state,
            local: self.local,
            peer: self.peer,
        }
    }

    /// Returns whether the id listens at the destination of a request. A loopback address
    /// accepts requests from the same address.
    pub(super) fn is_at(&self, address: SocketAddr, from: IpAddr) -> bool {
        let Some(local) = self.local else {
            return false;
        };
        local.port() == address.port()
            && match (local.ip(), address.ip()) {
                (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(_)) => {
                    self.family_only != Some(true)
                }
                (IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V6(_)) => true,
                (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(_)) => true,
                (local, to) => {
                    let here = self.may_be_remote && local.is_loopback() && from == to;
                    local == to || here && local.is_ipv4() == to.is_ipv4()
                }
            }
    }

    /// Stores the parameters of the peer from its message.
    pub(super) fn set_peer(&mut self, message: &Message) {
        self.peer_parameters = Some(PeerParameters {
            qp_num: message.qp_num,
            psn: message.psn,
            lid: message.port.lid,
            gid: message.port.gid,
        });
    }

    /// Returns the path to a port.
    pub(super) fn path_to(&self, gid: [u8; 16], lid: u16, global: bool) -> AhAttr {
        let ethernet = self.port.ethernet;
        let grh = GlobalRoute {
            dgid: gid,
            sgid_index: self.port.gid_index,
            hop_limit: HOP_LIMIT,
            traffic_class: self.tos,
            ..GlobalRoute::default()
        };
        let is_global = ethernet || global;
        AhAttr {
            grh: if is_global { grh } else { Default::default() },
            dlid: if ethernet { 0 } else { lid },
            is_global: is_global.into(),
            port_num: 1,
            ..AhAttr::default()
        }
    }

    /// Returns the path to the peer's port.
    pub(super) fn path(&self) -> Option<AhAttr> {
        let other = self.peer_parameters?;
        Some(self.path_to(other.gid, other.lid, false))
    }

    /// Returns the attributes that move the id's queue pair to a state.
    pub(super) fn attributes(&self, to: QpState) -> Result<abi::QpAttr> {
        if !self.is_on_device() {
            return refuse(libc::EINVAL);
        }
        let mut attr = abi::QpAttr {
            qp_state: to.0.into(),
            ..Default::default()
        };
        let mask = match (to, self.datagram) {
            (QpState::INIT, true) => {
                attr.qkey = self.qkey;
                Mask::PKEY_INDEX | Mask::PORT | Mask::QKEY
            }
            (QpState::INIT, false) => {
                // No remote access before there is a peer.
                if !matches!(
                    self.phase,
                    Phase::Bound | Phase::Listening | Phase::AddressResolved | Phase::RouteResolved
                ) {
                    let mut access = AccessFlags::REMOTE_WRITE;
                    if self.depths.responder_resources != 0 {
                        access |= AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
                    }
                    attr.qp_access_flags = access.bits();
                }
                Mask::PKEY_INDEX | Mask::PORT | Mask::ACCESS_FLAGS
            }
            (QpState::RTR, false) => {
                let (Some(other), Some(path)) = (self.peer_parameters, self.path()) else {
                    return refuse(libc::EINVAL);
                };
                attr.ah_attr = path;
                attr.path_mtu = self.port.mtu.into();
                attr.dest_qp_num = other.qp_num;
                // Each end announces the PSN at which the other begins to send.
                attr.rq_psn = self.psn;
                attr.max_dest_rd_atomic = self.depths.responder_resources;
                Mask::AV
                    | Mask::PATH_MTU
                    | Mask::DEST_QPN
                    | Mask::RQ_PSN
                    | Mask::MAX_DEST_RD_ATOMIC
                    | Mask::MIN_RNR_TIMER
            }
            (QpState::RTS, false) => {
                let Some(other) = self.peer_parameters else {
                    return refuse(libc::EINVAL);
                };
                attr.sq_psn = other.psn;
                attr.timeout = self.ack_timeout;
                attr.retry_cnt = self.depths.retry_count;
                attr.rnr_retry = self.depths.rnr_retry_count;
                attr.max_rd_atomic = self.depths.initiator_depth;
                Mask::SQ_PSN
                    | Mask::TIMEOUT
                    | Mask::RETRY_CNT
                    | Mask::RNR_RETRY
                    | Mask::MAX_QP_RD_ATOMIC
            }
            _ => return refuse(libc::EINVAL),
        };
        attr.port_num = 1;
        attr.qp_attr_mask = (mask | Mask::STATE).bits();
        Ok(attr)
    }
}

/// Returns whether an address belongs to this host, or is unspecified.
pub(super) fn is_local(ip: IpAddr) -> bool {
    ip.is_loopback() || ip.is_unspecified() || interfaces().any(|own| own == ip)
}

/// Returns the addresses of this host's interfaces.
fn interfaces() -> impl Iterator<Item = IpAddr> {
    let interfaces = getifaddrs().into_iter().flatten();
    interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|it| IpAddr::V4(it.ip()));
        v4.or_else(|| Some(IpAddr::V6(address.as_sockaddr_in6()?.ip())))
    })
}

/// Replaces an unspecified address by the loopback address of its family.
pub(super) fn unspecified_to_loopback(address: SocketAddr) -> SocketAddr {
    let ip: IpAddr = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    (ip, address.port()).into()
}

/// Returns the multicast GID of an IP multicast address. With `is_mapped`, that of an IPv4
/// address is the address itself, as in packets of RoCE v2.
pub(super) fn multicast_gid(ip: IpAddr, is_mapped: bool) -> Option<[u8; 16]> {
    if !ip.is_multicast() {
        return None;
    }
    Some(match ip {
        IpAddr::V4(ip) if !is_mapped => {
            let mut gid = [0; 16];
            gid[..2].copy_from_slice(&[0xff, 0x0e]);
            gid[10..12].fill(0xff);
            gid[12..].copy_from_slice(&ip.octets());
            gid
        }
        ip => gid_of_ip(ip),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As rdma_cm does: a message's starting PSN is where its receiver begins to send.
    #[test]
    fn each_end_begins_to_send_at_the_psn_of_the_other() {
        let port = LocalPort {
            ethernet: true,
            gid: [1; 16],
            lid: 0,
            node_guid: 1,
            gid_index: 0,
            own: None,
            mtu: MTU,
            node: 0,
        };
        let mut id = Id::new(0, port, 0x106, false, 0);
        id.phase = Phase::Connected;
        (id.psn, id.peer_parameters) = (5, Some(PeerParameters::default()));
        if let Some(other) = &mut id.peer_parameters {
            other.psn = 7;
        }
        assert_eq!(id.attributes(QpState::RTR).unwrap().rq_psn, 5);
        assert_eq!(id.attributes(QpState::RTS).unwrap().sq_psn, 7);
    }
}
