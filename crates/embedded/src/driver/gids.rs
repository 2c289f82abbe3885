//! The GID table of an Ethernet port that reaches no other hosts.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use roce::bits::get64;
use roce::packet::{Gid, gid_of_ip, ip_of_gid};
use softhca::rule::Rule;

use crate::addresses::HostAddress;
use crate::driver::cause::{Class, Result, refuse};

/// `enum ib_uverbs_gid_type`.
pub(crate) const GID_IB: u32 = 0;
pub(crate) const GID_ROCE_V1: u32 = 1;
pub(crate) const GID_ROCE_V2: u32 = 2;
/// Lengths of the GID tables of an Ethernet and of an InfiniBand port.
pub(crate) const ETHERNET: usize = 128;
pub(crate) const INFINIBAND: usize = 8;
/// Maximum number of addresses of a family.
const MAX_ADDRESSES: u8 = 8;
/// Networks of the IPv4 addresses: 127.80 to 127.87. The host accepts all of 127.0.0.0/8.
const IPV4_NETWORK: u8 = 127;
const FIRST_SUBNET: u8 = 80;
/// Prefix of the IPv6 addresses, without the last byte, which numbers them.
const IPV6_PREFIX: [u8; 7] = [0xfd, 0x52, 0x56, 0, 0, 0, 0];
const LINK_LOCAL: [u8; 8] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0];

/// An entry of the port's GID table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortGid {
    pub(crate) gid: Gid,
    pub(crate) gid_type: u32,
    /// False while the host does not have the address, and for an entry that never has one: it
    /// is empty for programs.
    pub(crate) present: bool,
}

impl PortGid {
    pub(crate) const EMPTY: Self = Self {
        gid: [0; 16],
        gid_type: GID_ROCE_V2,
        present: false,
    };

    pub(crate) fn new(gid: Gid, gid_type: u32) -> Self {
        Self {
            gid,
            gid_type,
            present: true,
        }
    }
}

impl From<HostAddress> for PortGid {
    fn from(address: HostAddress) -> Self {
        Self {
            gid: gid_of_ip(address.ip),
            gid_type: GID_ROCE_V2,
            present: address.present,
        }
    }
}

/// The kind of address of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Address {
    LinkLocal,
    /// One of several IPv4 addresses.
    Ipv4(u8),
    /// One of several unique local IPv6 addresses.
    Ipv6(u8),
}

/// An entry: the version of RoCE, and the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    gid_type: u32,
    address: Address,
}

/// The entries of the GID table of a RoCE device that reaches no other hosts, in order. It is
/// parsed from a list separated by commas: `v1` and `v2`, the versions of RoCE, for the
/// link-local address; `v1-ipv4`, `v2-ipv4`, `v1-ipv6` and `v2-ipv6` for others, of which each
/// repetition names the next one; `none` for an empty entry.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use ringverbs_embedded::{Drive, Network};
///
/// let network = Network::new(Drive::Caller)?;
/// let device = network.device_with_gids("roce", &"v2,none,v2-ipv4".parse()?)?;
/// assert!(device.gid_entry(1).is_none());
/// assert_eq!(device.gids()[2][10..13], [0xff, 0xff, 127]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidTable(Vec<Option<Entry>>);

/// Why a list is not a GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GidTableError {
    /// No such entry exists.
    Unknown(String),
    /// An Ethernet port has 128 entries.
    TooMany,
    /// A family has 8 addresses.
    TooManyAddresses(String),
    /// No entry has a GID.
    Empty,
}

impl fmt::Display for GidTableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(entry) => write!(
                f,
                "there is no GID \"{entry}\"; use v1, v2, v1-ipv4, v2-ipv4, v1-ipv6, v2-ipv6, none"
            ),
            Self::TooMany => write!(f, "more than {} entries", ETHERNET),
            Self::TooManyAddresses(entry) => {
                write!(f, "more than {MAX_ADDRESSES} times {entry}")
            }
            Self::Empty => f.write_str("all entries are empty"),
        }
    }
}

impl std::error::Error for GidTableError {}

impl Default for GidTable {
    /// As Linux orders them: those of the link-local address, then of the interface's IPv4
    /// address.
    fn default() -> Self {
        let addresses = [Address::LinkLocal, Address::Ipv4(0)].into_iter();
        let types =
            |address| [GID_ROCE_V1, GID_ROCE_V2].map(|gid_type| Some(Entry { gid_type, address }));
        Self(addresses.flat_map(types).collect())
    }
}

impl FromStr for GidTable {
    type Err = GidTableError;

    fn from_str(list: &str) -> std::result::Result<Self, GidTableError> {
        let mut entries: Vec<Option<Entry>> = Vec::new();
        for name in list.split(',') {
            if entries.len() == ETHERNET {
                return Err(GidTableError::TooMany);
            }
            let unknown = || GidTableError::Unknown(name.to_owned());
            if name == "none" {
                entries.push(None);
                continue;
            }
            let (version, family) = name.split_once('-').unwrap_or((name, ""));
            let gid_type = match version {
                "v1" => GID_ROCE_V1,
                "v2" => GID_ROCE_V2,
                _ => return Err(unknown()),
            };
            let with = |of: fn(u8) -> Address| {
                let mut numbers = (0..MAX_ADDRESSES).map(|number| Entry {
                    gid_type,
                    address: of(number),
                });
                numbers.find(|entry| !entries.contains(&Some(*entry)))
            };
            let entry = match family {
                "" if name == version => Some(Entry {
                    gid_type,
                    address: Address::LinkLocal,
                }),
                "ipv4" => with(Address::Ipv4),
                "ipv6" => with(Address::Ipv6),
                _ => return Err(unknown()),
            };
            let entry = entry.ok_or_else(|| GidTableError::TooManyAddresses(name.to_owned()))?;
            entries.push(Some(entry));
        }
        match entries.iter().any(Option::is_some) {
            true => Ok(Self(entries)),
            false => Err(GidTableError::Empty),
        }
    }
}

impl GidTable {
    /// Returns the GIDs of a device with a MAC address.
    pub(crate) fn gids(&self, mac: [u8; 6]) -> Vec<PortGid> {
        let entry = |entry: &Option<Entry>| match entry {
            Some(Entry { gid_type, address }) => PortGid::new(gid(*address, mac), *gid_type),
            None => PortGid::EMPTY,
        };
        self.0.iter().map(entry).collect()
    }
}

/// Returns the interface identifier derived from a MAC address.
pub(crate) fn interface_identifier([a, b, c, d, e, f]: [u8; 6]) -> [u8; 8] {
    [a ^ 2, b, c, 0xff, 0xfe, d, e, f]
}

fn gid(address: Address, mac: [u8; 6]) -> [u8; 16] {
    let [.., high, low] = mac;
    let mut gid = [0; 16];
    match address {
        Address::LinkLocal => gid[..8].copy_from_slice(&LINK_LOCAL),
        Address::Ipv4(number) => {
            let subnet = FIRST_SUBNET + number;
            return gid_of_ip(Ipv4Addr::new(IPV4_NETWORK, subnet, high, low).into());
        }
        Address::Ipv6(number) => {
            gid[..7].copy_from_slice(&IPV6_PREFIX);
            gid[7] = number;
        }
    }
    gid[8..].copy_from_slice(&interface_identifier(mac));
    gid
}

/// Returns the MAC address of a multicast GID.
pub(crate) fn multicast_mac(gid: &[u8; 16]) -> Option<[u8; 6]> {
    match ip_of_gid(*gid) {
        IpAddr::V4(address) if address.is_multicast() => {
            let [_, b, c, d] = address.octets();
            Some([0x01, 0, 0x5e, b & 0x7f, c, d])
        }
        IpAddr::V6(address) if address.is_multicast() => {
            let [.., c, d, e, f] = *gid;
            Some([0x33, 0x33, c, d, e, f])
        }
        _ => None,
    }
}

/// Returns the MAC address that a GID contains. An IPv4 address contains its end; the
/// device's own MAC address has the same start.
///
/// # Errors
/// EHOSTUNREACH for other GIDs: there is no neighbour discovery.
pub(crate) fn mac_of(gid: &[u8; 16], own: [u8; 6]) -> Result<[u8; 6]> {
    if let Some(mac) = multicast_mac(gid) {
        return Ok(mac);
    }
    let numbers = 0..MAX_ADDRESSES;
    if let IpAddr::V4(address) = ip_of_gid(*gid) {
        let [network, subnet, high, low] = address.octets();
        let number = subnet.checked_sub(FIRST_SUBNET);
        if network == IPV4_NETWORK && number.is_some_and(|it| numbers.contains(&it)) {
            return Ok([own[0], own[1], own[2], own[3], high, low]);
        }
    }
    let is_ipv6 = gid[..7] == IPV6_PREFIX && numbers.contains(&gid[7]);
    match gid[8..] {
        [a, b, c, 0xff, 0xfe, d, e, f] if gid[..8] == LINK_LOCAL || is_ipv6 => {
            Ok([a ^ 2, b, c, d, e, f])
        }
        _ => {
            let start = get64(gid, 0);
            refuse(Class::Unreachable, "GID", start, Rule::Exists)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_contains_the_mac_address() {
        let (own, mac) = ([2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 0x12, 0x34]);
        for number in 0..MAX_ADDRESSES {
            for address in [
                Address::LinkLocal,
                Address::Ipv4(number),
                Address::Ipv6(number),
            ] {
                assert_eq!(mac_of(&gid(address, mac), own), Ok(mac));
            }
        }
        let beyond = [Address::Ipv4(MAX_ADDRESSES), Address::Ipv6(MAX_ADDRESSES)];
        for address in beyond {
            assert!(mac_of(&gid(address, mac), own).is_err(), "{address:?}");
        }
        assert!(mac_of(&[0; 16], own).is_err());
    }

    #[test]
    fn a_list_names_entries() {
        let parse = |list: &str| list.parse::<GidTable>();
        assert_eq!(parse("v1,v2,v1-ipv4,v2-ipv4"), Ok(GidTable::default()));
        let gids = parse("none,v2-ipv4,v1-ipv4,v2-ipv4,v2-ipv6").unwrap();
        let gids = gids.gids([2, 3, 4, 5, 6, 7]);
        assert!(!gids[0].present);
        let ends: Vec<_> = gids.iter().map(|it| it.gid[13]).collect();
        assert_eq!(ends[1..], [80, 80, 81, 5]);
        let types: Vec<_> = gids.iter().map(|it| it.gid_type).collect();
        assert_eq!(types[1..], [2, 1, 2, 2]);
        for wrong in ["", "v3", "v2,", "v2-", "v2-ipv5", " v2", "ipv4"] {
            assert!(
                matches!(parse(wrong), Err(GidTableError::Unknown(_))),
                "{wrong}"
            );
        }
        assert_eq!(parse("none"), Err(GidTableError::Empty));
        let many = |entry, count| parse(&vec![entry; count].join(","));
        assert!(many("v2", 128).is_ok() && many("v2-ipv4", 8).is_ok());
        assert_eq!(many("v2", 129), Err(GidTableError::TooMany));
        let error = GidTableError::TooManyAddresses("v2-ipv4".to_owned());
        assert_eq!(many("v2-ipv4", 9), Err(error));
    }
}
