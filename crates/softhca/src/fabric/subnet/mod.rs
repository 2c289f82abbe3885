//! The subnet manager of a fabric, as far as the ports need one: who asks it for
//! a path or joins a multicast group is answered, as by the subnet administration
//! of a real subnet (InfiniBand Architecture Specification, volume 1, chapter
//! "Subnet Administration").
//!
//! It has a LID of its own beside the HCAs ([`LID`]), and takes the datagrams that
//! are sent to QP 1 there. Nothing is configured by it: LIDs follow from GUIDs
//! ([`guid`]), and ports are active without it. Of a fabric that spans processes
//! each part answers its own ports. The answers agree, since they follow from the
//! question: the LID of a GUID, and of a multicast group, are functions of it, and
//! only who is a member of a group that it made is known to one part alone.

mod groups;
mod mad;
mod paths;

#[cfg(test)]
pub(super) mod tests;

use groups::Groups;
use mad::{ATTRIBUTE_UNSUPPORTED, Mad, Table, attribute, method};

use crate::packet::{
    Bth, Class, Deth, Draft, Gid, Grh, Link, LinkKind, Packet, Path, Pool, Psn, Roce, Template,
    View, op,
};

/// The subnet manager's LID: the last that is not multicast.
pub const LID: u16 = 0xbfff;
/// The service level of all paths.
pub const SERVICE_LEVEL: u8 = 0;

const DATAGRAM: u8 = Class::Ud as u8 | op::SEND_ONLY;
/// The queue pair for management datagrams, and the key of its queue.
const GSI: u32 = 1;
const GSI_KEY: u32 = 0x8001_0000;
/// The only partition: full and limited members' key.
const PARTITION: u16 = 0xffff;
/// What GUIDs of HCAs begin with; then comes the LID.
const GUIDS: u64 = 0x0250_5300_0000_0000;
/// What GIDs begin with.
const PREFIX: u64 = 0xfe80_0000_0000_0000;
/// Hops of what has a global route.
const HOPS: u8 = 64;

/// The GUID of the port that has a LID.
#[must_use]
pub const fn guid(lid: u16) -> u64 {
    GUIDS | lid as u64
}

/// The GID of a port: the subnet's prefix and the port's GUID.
#[must_use]
pub fn gid(guid: u64) -> Gid {
    let mut gid = [0; 16];
    gid[..8].copy_from_slice(&PREFIX.to_be_bytes());
    gid[8..].copy_from_slice(&guid.to_be_bytes());
    gid
}

/// The GUID in the GID of a port of this subnet.
fn guid_in(gid: &Gid) -> Option<u64> {
    let (prefix, guid) = gid.split_first_chunk::<8>()?;
    let guid = u64::from_be_bytes(*guid.first_chunk()?);
    (u64::from_be_bytes(*prefix) == PREFIX).then_some(guid)
}

/// The ports that there are.
#[derive(Debug, Default)]
pub(super) struct Ports {
    /// Those of this fabric, by GUID and LID.
    pub(super) here: Vec<(u64, u16)>,
    /// There are others elsewhere, known by the rule of [`guid`].
    pub(super) elsewhere: bool,
}

impl Ports {
    /// All that are known one by one, the subnet manager's too.
    fn all(&self) -> impl Iterator<Item = (u64, u16)> {
        self.here.iter().copied().chain([(guid(LID), LID)])
    }

    fn lid_of(&self, gid: &Gid) -> Option<u16> {
        let asked = guid_in(gid)?;
        let known = self.all().find(|port| port.0 == asked);
        let by_rule = || {
            let lid = asked as u16;
            let ruled = self.elsewhere && asked == guid(lid) && (1..LID).contains(&lid);
            ruled.then_some(lid)
        };
        known.map(|port| port.1).or_else(by_rule)
    }

    fn gid_of(&self, lid: u16) -> Option<Gid> {
        let known = self.all().find(|port| port.1 == lid);
        let ruled = self.elsewhere && (1..LID).contains(&lid);
        let by_rule = || ruled.then(|| guid(lid));
        known.map(|port| port.0).or_else(by_rule).map(gid)
    }
}

/// Who asks.
struct Asker<'a> {
    lid: u16,
    ports: &'a Ports,
}

/// The subnet manager's port, and what it knows.
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

    /// A port has gone: it is in no group any more.
    pub(super) fn forget(&mut self, port: u64) {
        self.groups.forget(&gid(port));
    }

    /// The members of all groups.
    #[cfg(test)]
    pub(super) fn members(&self) -> Vec<Gid> {
        self.groups.members()
    }

    /// Takes what was sent to the subnet manager's port, and gives what it sends
    /// back. What is not a request to subnet administration is lost.
    pub(super) fn receive(&mut self, packet: &Packet, ports: &Ports) -> Vec<Packet> {
        let Ok(view) = View::read(LinkKind::Ib, packet.frame()) else {
            return Vec::new();
        };
        let (Some(deth), Link::Ib { slid, sl, .. }) = (view.deth(), view.network.link) else {
            return Vec::new();
        };
        let ours = view.bth.opcode == DATAGRAM
            && view.bth.dest_qpn == GSI
            && view.bth.pkey & 0x7fff == PARTITION & 0x7fff
            && deth.qkey == GSI_KEY;
        let (true, Some(request)) = (ours, Mad::read(view.payload)) else {
            return Vec::new();
        };
        let asker = Asker { lid: slid, ports };
        let answers = self.administer(&request, &asker);
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
        let mut draft = Draft::new(&self.pool, template, bth, mad.bytes().len());
        let deth = Deth {
            qkey: GSI_KEY,
            source_qpn: GSI,
        };
        draft.put(&deth.bytes());
        draft.put(mad.bytes());
        draft.finish()
    }

    /// What a request is answered with: nothing, one datagram, or as many as a
    /// table takes.
    fn administer(&mut self, request: &Mad, asker: &Asker<'_>) -> Vec<Mad> {
        let what = (request.method(), request.attribute());
        if !request.asks() {
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
            (method::GET, attribute::PATH) => one(paths::one(request, asker, &self.groups)),
            (method::GET_TABLE, attribute::PATH) => {
                match paths::table(request, asker, &self.groups) {
                    Ok(records) => Table::new(request, &records).segments(),
                    Err(status) => vec![request.refused(status)],
                }
            }
            (method::SET, attribute::GROUP_MEMBER) => one(self.groups.join(request, asker)),
            (method::DELETE, attribute::GROUP_MEMBER) => one(self.groups.leave(request, asker)),
            (method::GET, attribute::GROUP_MEMBER) => one(self.groups.find(request)),
            // Nobody can register a service, so there is none.
            (method::GET, attribute::SERVICE) => one(Err(mad::NO_RECORDS)),
            (method::GET | method::SET | method::GET_TABLE | method::DELETE, _) => {
                one(Err(ATTRIBUTE_UNSUPPORTED))
            }
            _ => one(Err(mad::METHOD_UNSUPPORTED)),
        }
    }
}

/// What subnet administration can do, and how long it takes at most.
fn class_port_info() -> Vec<u8> {
    use crate::bits::{Field, field, put_bytes};
    const BASE_VERSION: Field = field(0, 31, 24);
    const CLASS_VERSION: Field = field(0, 23, 16);
    const CAPABILITIES_2: Field = field(4, 31, 5);
    const RESPONSE_TIME: Field = field(4, 4, 0);
    const REDIRECT_GID: usize = 8;
    /// A port that only sends can be a full member of a group.
    const SEND_ONLY_FULL_MEMBER: u32 = 1 << 12;
    /// 4.096 us times two to this: 4 ms.
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
