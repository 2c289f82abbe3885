//! The ports of a subnet: LIDs, GUIDs and GIDs, and the parameters of all its paths.

use crate::packet::Gid;

/// The subnet manager's LID: the last unicast LID.
pub const LID: u16 = 0xbfff;
/// The service level of all paths.
pub const SERVICE_LEVEL: u8 = 0;

/// The P_Key of the only partition. Its low 15 bits are those of full and limited
/// members.
pub(super) const PARTITION: u16 = 0xffff;
/// The selector for "exactly this value".
pub(super) const EQUAL: u32 = 2;
/// The time is 4.096 us times two to this power: 268 ms, which Linux uses on
/// Ethernet.
pub(super) const PACKET_LIFETIME: u32 = 16;
/// The upper bits of the GUIDs of HCAs; the LID is in the low 16.
const GUID_PREFIX: u64 = 0x0250_5300_0000_0000;
/// The subnet prefix of GIDs.
const SUBNET_PREFIX: u64 = 0xfe80_0000_0000_0000;

/// Returns the GUID of the port with this LID.
#[must_use]
pub const fn guid(lid: u16) -> u64 {
    GUID_PREFIX | lid as u64
}

/// Returns the GID of a port: the subnet prefix and the port's GUID.
#[must_use]
pub fn gid(guid: u64) -> Gid {
    let mut gid = [0; 16];
    gid[..8].copy_from_slice(&SUBNET_PREFIX.to_be_bytes());
    gid[8..].copy_from_slice(&guid.to_be_bytes());
    gid
}

/// Returns the GUID in a GID, if the GID is of this subnet.
fn guid_in(gid: &Gid) -> Option<u64> {
    let (prefix, guid) = gid.split_first_chunk::<8>()?;
    let guid = u64::from_be_bytes(*guid.first_chunk()?);
    (u64::from_be_bytes(*prefix) == SUBNET_PREFIX).then_some(guid)
}

/// The known ports.
#[derive(Debug, Default)]
pub(crate) struct Ports {
    /// GUID and LID of the ports of this fabric.
    pub(crate) local: Vec<(u64, u16)>,
    /// Whether there are other fabrics, whose ports have the GUIDs of [`guid`].
    pub(crate) has_remote: bool,
}

impl Ports {
    /// All ports of this fabric, including the subnet manager's.
    pub(super) fn all(&self) -> impl Iterator<Item = (u64, u16)> {
        self.local.iter().copied().chain([(guid(LID), LID)])
    }

    pub(super) fn lid_of(&self, gid: &Gid) -> Option<u16> {
        let requested = guid_in(gid)?;
        let known = self.all().find(|port| port.0 == requested);
        let derived = || {
            let lid = requested as u16;
            let is_derived = self.has_remote && requested == guid(lid) && (1..LID).contains(&lid);
            is_derived.then_some(lid)
        };
        known.map(|port| port.1).or_else(derived)
    }

    pub(super) fn gid_of(&self, lid: u16) -> Option<Gid> {
        let known = self.all().find(|port| port.1 == lid);
        let is_derived = self.has_remote && (1..LID).contains(&lid);
        let derived = || is_derived.then(|| guid(lid));
        known.map(|port| port.0).or_else(derived).map(gid)
    }
}

/// The port that sent a request.
pub(super) struct RequestingPort<'a> {
    pub(super) lid: u16,
    pub(super) ports: &'a Ports,
}
