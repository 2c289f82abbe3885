//! Multicast groups and their members.
//!
//! The fabric delivers multicast to every port, and an HCA filters by what its
//! queue pairs are attached to. Membership does not affect routing: a group only
//! records its members and their common parameters.

use super::mad::{
    INSUFFICIENT_COMPONENTS, INVALID_GID, Mad, NO_RECORDS, NO_RESOURCES, REQUEST_DENIED,
    REQUEST_INVALID, selector_matches,
};
use super::ports::{EQUAL, PACKET_LIFETIME, PARTITION, RequestingPort, SERVICE_LEVEL};
use crate::bits::{Field, field, put_bytes};
use crate::packet::Gid;

const RECORD_SIZE: usize = 52;
const MGID: usize = 0;
const PORT: usize = 16;
const QKEY: Field = field(32, 31, 0);
const MLID: Field = field(36, 31, 16);
const MTU_SELECTOR: Field = field(36, 15, 14);
const MTU: Field = field(36, 13, 8);
const TRAFFIC_CLASS: Field = field(36, 7, 0);
const PKEY: Field = field(40, 31, 16);
const RATE_SELECTOR: Field = field(40, 15, 14);
const RATE: Field = field(40, 13, 8);
const LIFETIME_SELECTOR: Field = field(40, 7, 6);
const LIFETIME: Field = field(40, 5, 0);
const SL: Field = field(44, 31, 28);
const FLOW_LABEL: Field = field(44, 27, 8);
const HOP_LIMIT: Field = field(44, 7, 0);
const SCOPE: Field = field(48, 31, 28);
const JOIN_STATE: Field = field(48, 27, 24);

/// Bit numbers of the record's components in the component mask.
mod component {
    pub const MGID: u32 = 0;
    pub const PORT: u32 = 1;
    pub const QKEY: u32 = 2;
    pub const MLID: u32 = 3;
    pub const MTU_SELECTOR: u32 = 4;
    pub const MTU: u32 = 5;
    pub const TRAFFIC_CLASS: u32 = 6;
    pub const PKEY: u32 = 7;
    pub const RATE_SELECTOR: u32 = 8;
    pub const RATE: u32 = 9;
    pub const LIFETIME_SELECTOR: u32 = 10;
    pub const LIFETIME: u32 = 11;
    pub const SL: u32 = 12;
    pub const FLOW_LABEL: u32 = 13;
    pub const HOP_LIMIT: u32 = 14;
    pub const JOIN_STATE: u32 = 16;
}

// Join states.
const FULL: u8 = 1 << 0;
const SEND_ONLY_FULL: u8 = 1 << 3;
const ALL_STATES: u8 = 0xf;

/// The broadcast group of IP over InfiniBand (RFC 4391) for the only partition. It
/// always exists.
const BROADCAST: Gid = [
    0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff,
];
const BROADCAST_KEY: u32 = 0x0b1b;
// MTU codes.
const MTU_256: u32 = 1;
const MTU_2048: u32 = 4;
const MTU_4096: u32 = 5;
// Rate codes. Ports support at most 100 Gb/s.
const RATE_2G5: u32 = 2;
const RATE_10G: u32 = 3;
const RATE_100G: u32 = 16;

/// The first multicast LID, and how many there are except the last one, which means
/// all.
const FIRST_MLID: u16 = 0xc000;
const MLIDS: u64 = 0x3fff;
/// Limit of groups.
const MAX_GROUPS: usize = 1024;

/// A group and its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    mgid: Gid,
    qkey: u32,
    pub(super) mtu: u32,
    pub(super) rate: u32,
    pub(super) lifetime: u32,
    pub(super) traffic_class: u32,
    pub(super) flow_label: u32,
    pub(super) hop_limit: u32,
    /// The GIDs and join states of the member ports.
    members: Vec<(Gid, u8)>,
}

impl Group {
    fn broadcast() -> Self {
        Self {
            mgid: BROADCAST,
            qkey: BROADCAST_KEY,
            mtu: MTU_2048,
            rate: RATE_10G,
            lifetime: PACKET_LIFETIME,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 0,
            members: Vec::new(),
        }
    }

    /// The multicast LID. It depends only on the GID, so that all fabrics compute
    /// the same one; two groups may share a LID.
    pub(super) fn mlid(&self) -> u16 {
        if self.mgid == BROADCAST {
            return FIRST_MLID;
        }
        // FNV-1a.
        let hash = self.mgid.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, b| {
            (hash ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3)
        });
        FIRST_MLID + 1 + ((hash ^ hash >> 32) % (MLIDS - 1)) as u16
    }

    /// Creates a group from a request. Fails if the request lacks a required
    /// parameter.
    fn from_request(request: &Mad, mgid: Gid) -> Result<Self, u16> {
        let component = |bit, field| request.component(bit, field);
        let required = |bit, field| component(bit, field).ok_or(INSUFFICIENT_COMPONENTS);
        required(component::PKEY, PKEY)?;
        required(component::SL, SL)?;
        // A value given exactly is used. With a bound, or without a value, the
        // default is used if it fits, else the largest value that fits.
        let select = |selector, value, default, all: std::ops::RangeInclusive<u32>| {
            let is_allowed = |it: &u32| selector_matches(selector, value, *it);
            match value {
                Some(value) if selector == Some(EQUAL) => all.contains(&value).then_some(value),
                _ if is_allowed(&default) => Some(default),
                _ => all.rev().find(is_allowed),
            }
            .ok_or(REQUEST_INVALID)
        };
        let group = Self {
            mgid,
            qkey: required(component::QKEY, QKEY)?,
            mtu: select(
                component(component::MTU_SELECTOR, MTU_SELECTOR),
                component(component::MTU, MTU),
                MTU_2048,
                MTU_256..=MTU_4096,
            )?,
            rate: select(
                component(component::RATE_SELECTOR, RATE_SELECTOR),
                component(component::RATE, RATE),
                RATE_10G,
                RATE_2G5..=RATE_100G,
            )?,
            lifetime: PACKET_LIFETIME,
            traffic_class: required(component::TRAFFIC_CLASS, TRAFFIC_CLASS)?,
            flow_label: required(component::FLOW_LABEL, FLOW_LABEL)?,
            hop_limit: component(component::HOP_LIMIT, HOP_LIMIT).unwrap_or(0),
            members: Vec::new(),
        };
        match group.matches(request) {
            true => Ok(group),
            false => Err(REQUEST_INVALID),
        }
    }
}

impl Group {
    /// Whether the group matches the parameters in the request.
    fn matches(&self, request: &Mad) -> bool {
        let component = |bit, field| request.component(bit, field);
        let is =
            |bit, field, actual| component(bit, field).is_none_or(|requested| requested == actual);
        component(component::PKEY, PKEY)
            .is_none_or(|pkey| pkey & 0x7fff == u32::from(PARTITION) & 0x7fff)
            && is(component::QKEY, QKEY, self.qkey)
            && is(component::MLID, MLID, self.mlid().into())
            && is(component::TRAFFIC_CLASS, TRAFFIC_CLASS, self.traffic_class)
            && is(component::SL, SL, SERVICE_LEVEL.into())
            && is(component::FLOW_LABEL, FLOW_LABEL, self.flow_label)
            && is(component::HOP_LIMIT, HOP_LIMIT, self.hop_limit)
            && selector_matches(
                component(component::MTU_SELECTOR, MTU_SELECTOR),
                component(component::MTU, MTU),
                self.mtu,
            )
            && selector_matches(
                component(component::RATE_SELECTOR, RATE_SELECTOR),
                component(component::RATE, RATE),
                self.rate,
            )
            && selector_matches(
                component(component::LIFETIME_SELECTOR, LIFETIME_SELECTOR),
                component(component::LIFETIME, LIFETIME),
                self.lifetime,
            )
    }

    /// Returns the record of a member; a zero GID stands for none.
    fn record(&self, port: &Gid, states: u8) -> Vec<u8> {
        let mut record = vec![0; RECORD_SIZE];
        put_bytes(&mut record, MGID, &self.mgid);
        put_bytes(&mut record, PORT, port);
        for (field, value) in [
            (QKEY, self.qkey),
            (MLID, self.mlid().into()),
            (MTU_SELECTOR, EQUAL),
            (MTU, self.mtu),
            (TRAFFIC_CLASS, self.traffic_class),
            (PKEY, PARTITION.into()),
            (RATE_SELECTOR, EQUAL),
            (RATE, self.rate),
            (LIFETIME_SELECTOR, EQUAL),
            (LIFETIME, self.lifetime),
            (SL, SERVICE_LEVEL.into()),
            (FLOW_LABEL, self.flow_label),
            (HOP_LIMIT, self.hop_limit),
            (SCOPE, u32::from(self.mgid[1] & 0xf)),
            (JOIN_STATE, states.into()),
        ] {
            field.put(&mut record, value);
        }
        record
    }

    /// Whether the group has a full or send-only full member. The broadcast group
    /// needs none.
    fn is_in_use(&self) -> bool {
        let full = |member: &(Gid, u8)| member.1 & (FULL | SEND_ONLY_FULL) != 0;
        self.mgid == BROADCAST || self.members.iter().any(full)
    }

    /// The join states of a port, which is added as a member if it is not one.
    fn states(&mut self, port: Gid) -> &mut u8 {
        let index = self.members.iter().position(|member| member.0 == port);
        let index = index.unwrap_or_else(|| {
            self.members.push((port, 0));
            self.members.len() - 1
        });
        &mut self.members[index].1
    }
}

/// All multicast groups.
pub(super) struct Groups {
    groups: Vec<Group>,
    /// The number of groups created without a GID, each of which got a generated one.
    generated_gids: u32,
}

impl Default for Groups {
    fn default() -> Self {
        Self {
            groups: vec![Group::broadcast()],
            generated_gids: 0,
        }
    }
}

/// The group, port and join states that a request names.
struct Membership {
    mgid: Gid,
    port: Gid,
    states: u8,
}

impl Membership {
    /// Reads a request. A port can join and leave only by itself.
    fn read(request: &Mad, requester: &RequestingPort<'_>) -> Result<Self, u16> {
        let mgid = request.gid(component::MGID, MGID);
        let port = request.gid(component::PORT, PORT);
        let states = request.component(component::JOIN_STATE, JOIN_STATE);
        let (Some(port), Some(states)) = (port, states) else {
            return Err(INSUFFICIENT_COMPONENTS);
        };
        match requester.ports.lid_of(&port) {
            None => return Err(INVALID_GID),
            Some(lid) if lid != requester.lid => return Err(REQUEST_DENIED),
            Some(_) => {}
        }
        let states = states as u8 & ALL_STATES;
        if states == 0 {
            return Err(REQUEST_INVALID);
        }
        Ok(Self {
            mgid: mgid.unwrap_or_default(),
            port,
            states,
        })
    }
}

impl Groups {
    pub(super) fn get(&self, mgid: &Gid) -> Option<&Group> {
        self.groups.iter().find(|group| group.mgid == *mgid)
    }

    /// The members of all groups.
    #[cfg(test)]
    pub(super) fn members(&self) -> Vec<Gid> {
        let members = self.groups.iter().flat_map(|group| &group.members);
        members.map(|member| member.0).collect()
    }

    /// Adds a port to a group. Creates the group if it does not exist and the
    /// request describes it.
    pub(super) fn join(
        &mut self,
        request: &Mad,
        requester: &RequestingPort<'_>,
    ) -> Result<Vec<u8>, u16> {
        let mut requested = Membership::read(request, requester)?;
        let generate_gid = requested.mgid == Gid::default();
        if generate_gid {
            requested.mgid = self.generate_gid(requester.lid);
        } else if requested.mgid[0] != 0xff {
            return Err(REQUEST_INVALID);
        }
        let index = match self.groups.iter().position(|g| g.mgid == requested.mgid) {
            Some(index) if self.groups[index].matches(request) => index,
            Some(_) => return Err(REQUEST_INVALID),
            None if requested.states & (FULL | SEND_ONLY_FULL) == 0 => return Err(REQUEST_INVALID),
            None if self.groups.len() >= MAX_GROUPS => return Err(NO_RESOURCES),
            None => {
                self.groups
                    .push(Group::from_request(request, requested.mgid)?);
                self.generated_gids = self.generated_gids.wrapping_add(generate_gid.into());
                self.groups.len() - 1
            }
        };
        let group = &mut self.groups[index];
        let states = group.states(requested.port);
        *states |= requested.states;
        let states = *states;
        Ok(group.record(&requested.port, states))
    }

    /// Removes some or all join states of a port.
    pub(super) fn leave(
        &mut self,
        request: &Mad,
        requester: &RequestingPort<'_>,
    ) -> Result<Vec<u8>, u16> {
        let requested = Membership::read(request, requester)?;
        let index = self.groups.iter().position(|g| g.mgid == requested.mgid);
        let group = &mut self.groups[index.ok_or(REQUEST_INVALID)?];
        let member = group.members.iter_mut().find(|m| m.0 == requested.port);
        let states = match member {
            Some((_, states)) if *states & requested.states != 0 => {
                *states &= !requested.states;
                *states
            }
            _ => return Err(REQUEST_INVALID),
        };
        let record = group.record(&requested.port, states);
        self.remove_empty();
        Ok(record)
    }

    /// Returns the record of a group, or of a member if the request names a port.
    pub(super) fn find(&self, request: &Mad) -> Result<Vec<u8>, u16> {
        let mgid = request.gid(component::MGID, MGID);
        let group = self.get(&mgid.ok_or(INSUFFICIENT_COMPONENTS)?);
        let group = group.filter(|group| group.matches(request));
        let Some(port) = request.gid(component::PORT, PORT) else {
            let group = group.ok_or(NO_RECORDS)?;
            return Ok(group.record(&Gid::default(), 0));
        };
        let group = group.ok_or(NO_RECORDS)?;
        let member = group.members.iter().find(|member| member.0 == port);
        let (_, states) = member.ok_or(NO_RECORDS)?;
        Ok(group.record(&port, *states))
    }

    /// Removes a port from all groups.
    pub(super) fn remove_port(&mut self, port: &Gid) {
        for group in &mut self.groups {
            group.members.retain(|member| member.0 != *port);
        }
        self.remove_empty();
    }

    fn remove_empty(&mut self) {
        for group in &mut self.groups {
            group.members.retain(|member| member.1 != 0);
        }
        self.groups.retain(Group::is_in_use);
    }

    /// Generates the GID of a group created without one: link-local, transient, and
    /// with the LID of the requesting port, so that other fabrics generate different
    /// ones.
    fn generate_gid(&self, lid: u16) -> Gid {
        let mut mgid = [0; 16];
        mgid[..4].copy_from_slice(&[0xff, 0x12, 0xa0, 0x1b]);
        mgid[10..12].copy_from_slice(&lid.to_be_bytes());
        mgid[12..].copy_from_slice(&self.generated_gids.to_be_bytes());
        mgid
    }
}
