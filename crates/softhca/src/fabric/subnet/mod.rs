//! The subnet manager of a fabric. It answers path queries and multicast joins,
//! like the subnet administration of a real subnet (InfiniBand Architecture
//! Specification, volume 1, chapter "Subnet Administration").
//!
//! It has a LID of its own beside the HCAs ([`LID`]), and receives the datagrams
//! that are sent to QP 1 there. It configures nothing: LIDs follow from GUIDs
//! ([`guid`]), and ports are active without it. In a network that spans processes,
//! the subnet manager of each fabric answers the ports of that fabric. The answers
//! agree, since the LID of a GUID or of a multicast group is a function of it. Only
//! the members of a group are known to one fabric alone.

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

use mad::{ATTRIBUTE_UNSUPPORTED, Mad, Table, attribute, method};

use crate::packet::{
    Bth, Class, Deth, Grh, Link, Packet, PacketBuilder, Path, Pool, Psn, Roce, Template, View, op,
};

const DATAGRAM: u8 = Class::Ud as u8 | op::SEND_ONLY;
/// The queue pair for management datagrams, and its Q_Key.
const GSI: u32 = 1;
const GSI_KEY: u32 = 0x8001_0000;
/// Hop limit of packets with a global route.
const HOPS: u8 = 64;

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
    pub(super) fn forget(&mut self, port: u64) {
        self.groups.forget(&gid(port));
    }

    /// The members of all groups.
    #[cfg(test)]
    pub(super) fn members(&self) -> Vec<crate::packet::Gid> {
        self.groups.members()
    }

    /// Handles a packet sent to the subnet manager's port and returns the packets
    /// to send back. Anything but a request to subnet administration is discarded.
    pub(super) fn receive(&mut self, packet: &Packet, ports: &Ports) -> Vec<Packet> {
        let Ok(view) = View::of(packet) else {
            return Vec::new();
        };
        let (Some(deth), Link::Ib { slid, sl, .. }) = (view.deth(), view.network.link) else {
            return Vec::new();
        };
        let ours = view.bth.opcode == DATAGRAM
            && view.bth.dest_qpn == GSI
            && view.bth.pkey & 0x7fff == PARTITION & 0x7fff
            && deth.qkey == GSI_KEY;
        let (true, Some(request)) = (ours, Mad::read(view.payload.bytes())) else {
            return Vec::new();
        };
        let requester = RequestingPort { lid: slid, ports };
        let answers = self.administer(&request, &requester);
        let path = Path {
            link: Link::Ib {
                slid: LID,
                dlid: slid,
                sl,
            },
            // A request with a global route is answered with one.
            grh: view.network.dgid(view.frame).and_then(|_| {
                Some(Grh {
                    sgid: gid(guid(LID)),
                    dgid: ports.gid_of(slid)?,
                    flow_label: 0,
                    traffic_class: 0,
                    hop_limit: HOPS,
                })
            }),
            roce: Roce::default(),
            udp_source: 0,
        };
        let template = Template::new(&path);
        answers
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
            qkey: GSI_KEY,
            source_qpn: GSI,
        };
        builder.put(&deth.bytes());
        builder.put(mad.bytes());
        builder.finish()
    }

    /// Answers a request, with no datagram, one, or all segments of a table.
    fn administer(&mut self, request: &Mad, requester: &RequestingPort<'_>) -> Vec<Mad> {
        let what = (request.method(), request.attribute());
        if !request.expects_response() {
            return Vec::new();
        }
        if !request.is_administration() {
            return vec![request.refused(mad::VERSION_UNSUPPORTED)];
        }
        let one = |answer: Result<Vec<u8>, u16>| match answer {
            Ok(record) => vec![request.answer(&record)],
            Err(status) => vec![request.refused(status)],
        };
        match what {
            (method::GET, attribute::CLASS_PORT_INFO) => one(Ok(class_port_info())),
            (method::GET, attribute::PATH) => one(paths::single(request, requester, &self.groups)),
            (method::GET_TABLE, attribute::PATH) => {
                match paths::table(request, requester, &self.groups) {
                    Ok(records) => Table::new(request, &records).segments(),
                    Err(status) => vec![request.refused(status)],
                }
            }
            (method::SET, attribute::GROUP_MEMBER) => one(self.groups.join(request, requester)),
            (method::DELETE, attribute::GROUP_MEMBER) => one(self.groups.leave(request, requester)),
            (method::GET, attribute::GROUP_MEMBER) => one(self.groups.find(request)),
            // Services cannot be registered, so there are none.
            (method::GET, attribute::SERVICE) => one(Err(mad::NO_RECORDS)),
            (method::GET | method::SET | method::GET_TABLE | method::DELETE, _) => {
                one(Err(ATTRIBUTE_UNSUPPORTED))
            }
            _ => one(Err(mad::METHOD_UNSUPPORTED)),
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
