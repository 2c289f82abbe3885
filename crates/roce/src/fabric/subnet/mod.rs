//! The subnet manager of a fabric. It answers path queries and multicast joins,
//! like the subnet administration of a real subnet (IBA 15.2).
//!
//! It has a LID of its own ([`LID`]) and receives the datagrams for QP 1 at that LID.
//! It configures nothing: LIDs follow from GUIDs ([`guid`]), and ports are active
//! without it. In a network that spans processes, the subnet manager of each fabric
//! serves the ports of that fabric. Their responses agree, since the LID is a function
//! of the GUID or of the multicast GID. Only the members of a group are known to one
//! fabric alone.

mod groups;
mod mad;
mod paths;
mod ports;

#[cfg(test)]
pub(super) mod tests;

use groups::Groups;
pub(super) use ports::Ports;
pub use ports::{LID, SERVICE_LEVEL, gid, guid};
use ports::{PARTITION, RequestingPort};

use mad::{ATTRIBUTE_UNSUPPORTED, Mad, TableResponse, attribute, method};

use crate::packet::{
    Bth, Class, Deth, Grh, Link, Packet, PacketBuilder, Path, Pool, Psn, Roce, Template, View, op,
};

const DATAGRAM: u8 = Class::Ud as u8 | op::SEND_ONLY;
/// The queue pair for management datagrams, and its Q_Key.
const GSI: u32 = 1;
const GSI_QKEY: u32 = 0x8001_0000;
/// Hop limit of packets with a global route.
const HOP_LIMIT: u8 = 64;

/// State of the subnet manager.
pub(super) struct Subnet {
    pool: Pool,
    groups: Groups,
    psn: Psn,
}

impl Subnet {
    pub(super) fn new() -> Self {
        Self {
            pool: Pool::new(),
            groups: Groups::default(),
            psn: Psn::new(0),
        }
    }

    /// Removes a port from all groups.
    pub(super) fn remove_port(&mut self, port: u64) {
        self.groups.remove_port(&gid(port));
    }

    /// The members of all groups.
    #[cfg(test)]
    pub(super) fn members(&self) -> Vec<crate::packet::Gid> {
        self.groups.members()
    }

    /// Handles a packet sent to the subnet manager's port and returns the packets
    /// to send back. Anything but a request to subnet administration is discarded.
    pub(super) fn receive(&mut self, packet: &Packet, ports: &Ports) -> Vec<Packet> {
        let Ok(view) = View::parse_packet(packet) else {
            return Vec::new();
        };
        let (Some(deth), Link::Ib { slid, sl, .. }) = (view.deth(), view.network.link) else {
            return Vec::new();
        };
        let is_request = view.bth.opcode == DATAGRAM
            && view.bth.dest_qpn == GSI
            && view.bth.pkey & 0x7fff == PARTITION & 0x7fff
            && deth.qkey == GSI_QKEY;
        let (true, Some(request)) = (is_request, Mad::read(view.payload.bytes())) else {
            return Vec::new();
        };
        let requester = RequestingPort { lid: slid, ports };
        let responses = self.handle_request(&request, &requester);
        let path = Path {
            link: Link::Ib {
                slid: LID,
                dlid: slid,
                sl,
            },
            // The response has a GRH if the request has one.
            grh: view.network.dgid(view.frame).and_then(|_| {
                Some(Grh {
                    sgid: gid(guid(LID)),
                    dgid: ports.gid_of(slid)?,
                    flow_label: 0,
                    traffic_class: 0,
                    hop_limit: HOP_LIMIT,
                })
            }),
            roce: Roce::default(),
            udp_source: 0,
        };
        let template = Template::new(&path);
        responses
            .iter()
            .map(|mad| self.datagram(&template, view.bth.pkey, deth.source_qpn, mad))
            .collect()
    }

    fn datagram(&mut self, template: &Template, pkey: u16, to: u32, mad: &Mad) -> Packet {
        let bth = Bth {
            opcode: DATAGRAM,
            migrated: true,
            pkey,
            dest_qpn: to,
            psn: self.psn,
            ..Bth::default()
        };
        self.psn = self.psn.plus(1);
        let mut builder = PacketBuilder::new(&self.pool, template, bth, mad.bytes().len());
        let deth = Deth {
            qkey: GSI_QKEY,
            source_qpn: GSI,
        };
        builder.put(&deth.bytes());
        builder.put(mad.bytes());
        builder.finish()
    }

    /// Returns the response: no datagram, one, or all segments of a table.
    fn handle_request(&mut self, request: &Mad, requester: &RequestingPort<'_>) -> Vec<Mad> {
        let kind = (request.method(), request.attribute());
        if !request.expects_response() {
            return Vec::new();
        }
        if !request.has_supported_version() {
            return vec![request.error_response(mad::VERSION_UNSUPPORTED)];
        }
        let single = |answer: Result<Vec<u8>, u16>| match answer {
            Ok(record) => vec![request.response(&record)],
            Err(status) => vec![request.error_response(status)],
        };
        match kind {
            (method::GET, attribute::CLASS_PORT_INFO) => single(Ok(class_port_info())),
            (method::GET, attribute::PATH) => {
                single(paths::path_record(request, requester, &self.groups))
            }
            (method::GET_TABLE, attribute::PATH) => {
                match paths::table(request, requester, &self.groups) {
                    Ok(records) => TableResponse::new(request, &records).segments(),
                    Err(status) => vec![request.error_response(status)],
                }
            }
            (method::SET, attribute::GROUP_MEMBER) => single(self.groups.join(request, requester)),
            (method::DELETE, attribute::GROUP_MEMBER) => {
                single(self.groups.leave(request, requester))
            }
            (method::GET, attribute::GROUP_MEMBER) => single(self.groups.find(request)),
            // Services cannot be registered, so there are none.
            (method::GET, attribute::SERVICE) => single(Err(mad::NO_RECORDS)),
            (method::GET | method::SET | method::GET_TABLE | method::DELETE, _) => {
                single(Err(ATTRIBUTE_UNSUPPORTED))
            }
            _ => single(Err(mad::METHOD_UNSUPPORTED)),
        }
    }
}

/// The ClassPortInfo record: capabilities and the longest response time.
fn class_port_info() -> Vec<u8> {
    use crate::bits::{Field, field, put_bytes};
    const BASE_VERSION: Field = field(0, 31, 24);
    const CLASS_VERSION: Field = field(0, 23, 16);
    const CAPABILITIES_2: Field = field(4, 31, 5);
    const RESPONSE_TIME: Field = field(4, 4, 0);
    const REDIRECT_GID: usize = 8;
    /// A port may be a send-only full member of a group.
    const SEND_ONLY_FULL_MEMBER: u32 = 1 << 12;
    /// The time is 4.096 us times two to this power: 4 ms.
    const TIME: u32 = 10;

    let mut info = vec![0; 72];
    BASE_VERSION.put(&mut info, 1);
    CLASS_VERSION.put(&mut info, 2);
    CAPABILITIES_2.put(&mut info, SEND_ONLY_FULL_MEMBER);
    RESPONSE_TIME.put(&mut info, TIME);
    // No redirection.
    put_bytes(&mut info, REDIRECT_GID, &[0; 16]);
    info
}
