//! Path records: how one port reaches another port or a group.

use super::groups::Groups;
use super::mad::{
    INSUFFICIENT_COMPONENTS, INVALID_GID, Mad, NO_RECORDS, TOO_MANY_RECORDS, selector_matches,
};
use super::ports::{EQUAL, PACKET_LIFETIME, PARTITION, RequestingPort, SERVICE_LEVEL};
use crate::bits::{Field, field, put_bytes};
use crate::packet::Gid;

const RECORD_SIZE: usize = 64;
const SERVICE: usize = 0;
const DGID: usize = 8;
const SGID: usize = 24;
const DLID: Field = field(40, 31, 16);
const SLID: Field = field(40, 15, 0);
const FLOW_LABEL: Field = field(44, 27, 8);
const HOP_LIMIT: Field = field(44, 7, 0);
const TRAFFIC_CLASS: Field = field(48, 31, 24);
const REVERSIBLE: Field = field(48, 23, 23);
const PATHS: Field = field(48, 22, 16);
const PKEY: Field = field(48, 15, 0);
const SL: Field = field(52, 19, 16);
const MTU_SELECTOR: Field = field(52, 15, 14);
const MTU: Field = field(52, 13, 8);
const RATE_SELECTOR: Field = field(52, 7, 6);
const RATE: Field = field(52, 5, 0);
const LIFETIME_SELECTOR: Field = field(56, 31, 30);
const LIFETIME: Field = field(56, 29, 24);

/// Bit numbers of the record's components in the component mask.
mod component {
    pub const SERVICE: u32 = 0;
    pub const DGID: u32 = 2;
    pub const SGID: u32 = 3;
    pub const DLID: u32 = 4;
    pub const SLID: u32 = 5;
    pub const PATHS: u32 = 12;
    pub const PKEY: u32 = 13;
    pub const SL: u32 = 15;
    pub const MTU_SELECTOR: u32 = 16;
    pub const MTU: u32 = 17;
    pub const RATE_SELECTOR: u32 = 18;
    pub const RATE: u32 = 19;
    pub const LIFETIME_SELECTOR: u32 = 20;
    pub const LIFETIME: u32 = 21;
}

/// The MTU code of 4096 bytes.
const MTU_4096: u32 = 5;
/// The rate code of 100 Gb/s, which the ports report (4X EDR).
const RATE_100G: u32 = 16;

/// Properties of a path.
struct PathParameters {
    mtu: u32,
    rate: u32,
    lifetime: u32,
    flow_label: u32,
    traffic_class: u32,
    hop_limit: u32,
}

const BETWEEN_PORTS: PathParameters = PathParameters {
    mtu: MTU_4096,
    rate: RATE_100G,
    lifetime: PACKET_LIFETIME,
    flow_label: 0,
    traffic_class: 0,
    hop_limit: 0,
};

/// Returns the only path that matches the request.
pub(super) fn path_record(
    request: &Mad,
    requester: &RequestingPort<'_>,
    groups: &Groups,
) -> Result<Vec<u8>, u16> {
    if !request.has(component::DGID) && !request.has(component::DLID) {
        return Err(INSUFFICIENT_COMPONENTS);
    }
    let mut paths = table(request, requester, groups)?;
    match (paths.pop(), paths.is_empty()) {
        (None, _) => Err(NO_RECORDS),
        (Some(path), true) => Ok(path),
        (Some(_), false) => Err(TOO_MANY_RECORDS),
    }
}

/// Returns all paths from one port that match the request.
pub(super) fn table(
    request: &Mad,
    requester: &RequestingPort<'_>,
    groups: &Groups,
) -> Result<Vec<Vec<u8>>, u16> {
    let ports = requester.ports;
    let lid = |field, bit| request.component(bit, field).map(|lid| lid as u16);
    let source = match request.gid(component::SGID, SGID) {
        Some(gid) => (gid, ports.lid_of(&gid).ok_or(INVALID_GID)?),
        None => {
            let lid = lid(SLID, component::SLID).unwrap_or(requester.lid);
            (ports.gid_of(lid).ok_or(NO_RECORDS)?, lid)
        }
    };
    if lid(SLID, component::SLID).is_some_and(|lid| lid != source.1) {
        return Err(NO_RECORDS);
    }
    if let Some(gid) = request.gid(component::DGID, DGID) {
        if gid[0] == 0xff {
            let group = groups.get(&gid).ok_or(NO_RECORDS)?;
            let parameters = PathParameters {
                mtu: group.mtu,
                rate: group.rate,
                lifetime: group.lifetime,
                flow_label: group.flow_label,
                traffic_class: group.traffic_class,
                hop_limit: group.hop_limit,
            };
            let path = path(request, source, (gid, group.mlid()), &parameters);
            return Ok(path.into_iter().collect());
        }
    }
    let requested = lid(DLID, component::DLID);
    let destinations = match (request.gid(component::DGID, DGID), requested) {
        (Some(gid), _) => vec![(gid, ports.lid_of(&gid).ok_or(INVALID_GID)?)],
        (None, Some(lid)) => vec![(ports.gid_of(lid).ok_or(NO_RECORDS)?, lid)],
        (None, None) => ports
            .all()
            .map(|(guid, lid)| (super::gid(guid), lid))
            .collect(),
    };
    Ok(destinations
        .into_iter()
        .filter(|to| requested.is_none_or(|lid| lid == to.1))
        .filter_map(|to| path(request, source, to, &BETWEEN_PORTS))
        .collect())
}

/// Returns the record of a path if it matches the request.
fn path(
    request: &Mad,
    from: (Gid, u16),
    to: (Gid, u16),
    parameters: &PathParameters,
) -> Option<Vec<u8>> {
    let component = |bit, field| request.component(bit, field);
    let is_allowed = component(component::PKEY, PKEY)
        .is_none_or(|pkey| pkey & 0x7fff == u32::from(PARTITION) & 0x7fff)
        && component(component::SL, SL).is_none_or(|sl| sl == u32::from(SERVICE_LEVEL))
        && component(component::PATHS, PATHS) != Some(0)
        && selector_matches(
            component(component::MTU_SELECTOR, MTU_SELECTOR),
            component(component::MTU, MTU),
            parameters.mtu,
        )
        && selector_matches(
            component(component::RATE_SELECTOR, RATE_SELECTOR),
            component(component::RATE, RATE),
            parameters.rate,
        )
        && selector_matches(
            component(component::LIFETIME_SELECTOR, LIFETIME_SELECTOR),
            component(component::LIFETIME, LIFETIME),
            parameters.lifetime,
        );
    if !is_allowed {
        return None;
    }
    let mut record = vec![0; RECORD_SIZE];
    if request.has(component::SERVICE) {
        put_bytes(&mut record, SERVICE, &request.record()[..8]);
    }
    put_bytes(&mut record, DGID, &to.0);
    put_bytes(&mut record, SGID, &from.0);
    for (field, value) in [
        (DLID, u32::from(to.1)),
        (SLID, u32::from(from.1)),
        (FLOW_LABEL, parameters.flow_label),
        (HOP_LIMIT, parameters.hop_limit),
        (TRAFFIC_CLASS, parameters.traffic_class),
        (REVERSIBLE, 1),
        (PATHS, 1),
        (PKEY, u32::from(PARTITION)),
        (SL, u32::from(SERVICE_LEVEL)),
        (MTU_SELECTOR, EQUAL),
        (MTU, parameters.mtu),
        (RATE_SELECTOR, EQUAL),
        (RATE, parameters.rate),
        (LIFETIME_SELECTOR, EQUAL),
        (LIFETIME, parameters.lifetime),
    ] {
        field.put(&mut record, value);
    }
    Some(record)
}
