//! Queries of ids.

use std::net::SocketAddr;
use std::os::fd::RawFd;

use rdmacm::abi::{self, query};
use rdmacm::address::Sockaddr;
use rdmacm::{Address, IbAddress};
use roce::packet::gid_of_ip;
use zerocopy::IntoBytes;

use super::id::{Id, Phase};
use super::ids::Ids;
use crate::{Result, refuse};

/// The default partition, which contains all ports.
const PKEY: u16 = 0xffff;
/// An index that no device of the kernel has.
const NO_INDEX: u32 = u32::MAX;
/// `IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL`.
const PATH_FLAGS: u32 = 0b10_1011;
/// "Exactly", and a rate of 100 Gb/s.
const EXACTLY: u8 = 2;
const RATE: u8 = 16;
const LIFE_TIME: u8 = 16;

fn sockaddr(address: Option<SocketAddr>) -> Sockaddr {
    match address {
        Some(address) => Sockaddr::from(&Address::Ip(address)),
        None => Sockaddr {
            bytes: [0; 128],
            len: 0,
        },
    }
}

/// Returns the address as a GID and a service ID.
fn ib_address(id: &Id, gid: [u8; 16], address: Option<SocketAddr>) -> Sockaddr {
    let service = u64::from(id.space) << 16 | address.map_or(0, |it| it.port().into());
    let address = IbAddress {
        pkey: PKEY,
        gid,
        service_id: service,
        service_mask: u64::MAX,
        ..IbAddress::default()
    };
    Sockaddr::from(&Address::Ib(address))
}

impl Id {
    fn has_route(&self) -> bool {
        !matches!(
            self.phase,
            Phase::Idle | Phase::Bound | Phase::Listening | Phase::AddressResolved
        )
    }

    /// Returns the peer's GID and LID. Before the peer has sent them, they are the local ones
    /// for a peer on this host, and otherwise derived from its address.
    fn peer_port(&self) -> ([u8; 16], u16) {
        match (self.peer_parameters, self.peer) {
            (Some(other), _) => (other.gid, other.lid),
            (None, Some(peer)) if self.may_be_remote => (gid_of_ip(peer.ip()), 0),
            (None, _) => (self.port.gid, self.port.lid),
        }
    }

    fn addresses(&self, (from, to): (Sockaddr, Sockaddr)) -> abi::QueryAddrResp {
        let mut answer = abi::QueryAddrResp {
            src_size: from.len,
            dst_size: to.len,
            src_addr: from.bytes,
            dst_addr: to.bytes,
            ibdev_index: NO_INDEX,
            ..Default::default()
        };
        if self.is_on_device() {
            answer.node_guid = self.port.node_guid.to_be();
            answer.port_num = 1;
            answer.pkey = PKEY.to_be();
        }
        answer
    }

    fn user_path(&self) -> abi::UserPathRec {
        let (dgid, dlid) = self.peer_port();
        abi::UserPathRec {
            dgid,
            sgid: self.port.gid,
            dlid: dlid.to_be_bytes(),
            slid: self.port.lid.to_be_bytes(),
            reversible: 1,
            mtu: self.port.mtu.into(),
            pkey: PKEY.to_be_bytes(),
            hop_limit: u8::from(self.port.ethernet) * 64,
            traffic_class: self.tos,
            numb_path: 1,
            mtu_selector: EXACTLY,
            rate_selector: EXACTLY,
            rate: RATE,
            packet_life_time_selector: EXACTLY,
            packet_life_time: LIFE_TIME,
            ..Default::default()
        }
    }

    /// Returns the path in the subnet administrator's format (IBA 15.2.5.16).
    fn wire_path(&self) -> abi::PathRecData {
        let path = self.user_path();
        let mut bytes = [0u8; 64];
        bytes[8..24].copy_from_slice(&path.dgid);
        bytes[24..40].copy_from_slice(&path.sgid);
        bytes[40..42].copy_from_slice(&path.dlid);
        bytes[42..44].copy_from_slice(&path.slid);
        bytes[47] = path.hop_limit;
        bytes[48] = path.traffic_class;
        bytes[49] = 1 << 7 | path.numb_path;
        bytes[50..52].copy_from_slice(&path.pkey);
        bytes[54] = EXACTLY << 6 | self.port.mtu;
        bytes[55] = EXACTLY << 6 | RATE;
        bytes[56] = EXACTLY << 6 | LIFE_TIME;
        let mut found = abi::PathRecData {
            flags: PATH_FLAGS,
            ..Default::default()
        };
        found.path_rec.as_mut_bytes().copy_from_slice(&bytes);
        found
    }
}

impl Ids {
    pub(super) fn query(&mut self, fd: RawFd, command: &abi::Query) -> Result<Vec<u8>> {
        let id = self.id(fd, command.id)?;
        Ok(match command.option {
            query::QUERY_ADDR => {
                let both = (sockaddr(id.local), sockaddr(id.peer));
                id.addresses(both).as_bytes().to_vec()
            }
            query::QUERY_GID => {
                let from = ib_address(id, id.port.gid, id.local);
                let to = ib_address(id, id.peer_port().0, id.peer);
                id.addresses((from, to)).as_bytes().to_vec()
            }
            query::QUERY_PATH => {
                let count = u32::from(id.has_route());
                let head = abi::QueryPathResp {
                    num_paths: count,
                    ..Default::default()
                };
                let mut answer = head.as_bytes().to_vec();
                if count != 0 {
                    answer.extend(id.wire_path().as_bytes());
                }
                answer
            }
            _ => return refuse(libc::ENOSYS),
        })
    }

    pub(super) fn query_route(&mut self, fd: RawFd, number: u32) -> Result<abi::QueryRouteResp> {
        let id = self.id(fd, number)?;
        let all = id.addresses((sockaddr(id.local), sockaddr(id.peer)));
        let mut answer = abi::QueryRouteResp {
            node_guid: all.node_guid,
            port_num: all.port_num,
            ibdev_index: all.ibdev_index,
            ..Default::default()
        };
        let room = answer.src_addr.len();
        answer.src_addr.copy_from_slice(&all.src_addr[..room]);
        answer.dst_addr.copy_from_slice(&all.dst_addr[..room]);
        if id.has_route() {
            answer.num_paths = 1;
            answer.ib_route[0] = id.user_path();
        }
        Ok(answer)
    }
}
