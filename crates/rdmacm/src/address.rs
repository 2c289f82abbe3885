//! Addresses, and conversion from and to the kernel's socket addresses.

use core::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use crate::abi::{AF_IB, SOCKADDR_IB, SOCKADDR_IN, SOCKADDR_IN6};

const AF_INET: u16 = libc::AF_INET as u16;
const AF_INET6: u16 = libc::AF_INET6 as u16;

/// An address of the connection manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// An IP address and port.
    Ip(SocketAddr),
    /// An InfiniBand address: GID and service ID.
    Ib(IbAddress),
}

impl Address {
    /// Returns the IP address and port, if it is an IP address.
    pub const fn ip(&self) -> Option<SocketAddr> {
        match *self {
            Self::Ip(address) => Some(address),
            Self::Ib(_) => None,
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(address: SocketAddr) -> Self {
        Self::Ip(address)
    }
}

impl From<(IpAddr, u16)> for Address {
    fn from(address: (IpAddr, u16)) -> Self {
        Self::Ip(address.into())
    }
}

impl From<IbAddress> for Address {
    fn from(address: IbAddress) -> Self {
        Self::Ib(address)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ip(address) => address.fmt(f),
            Self::Ib(address) => write!(
                f,
                "[{}] service {:#018x}",
                Ipv6Addr::from(address.gid),
                address.service_id
            ),
        }
    }
}

/// An InfiniBand address (`struct sockaddr_ib`). Numbers are in host byte
/// order, the GID is in wire order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct IbAddress {
    /// Partition key; zero is any.
    pub pkey: u16,
    /// Traffic class and flow label.
    pub flow_info: u32,
    /// Port GID; all zero is any.
    pub gid: [u8; 16],
    /// Service ID: port space and port.
    pub service_id: u64,
    /// Mask of the significant bits of the service ID.
    pub service_mask: u64,
    /// Scope ID.
    pub scope_id: u64,
}

/// A socket address of any family, in the kernel's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sockaddr {
    /// The bytes, zero after the address.
    pub bytes: [u8; 128],
    /// Length of the family's address in bytes.
    pub len: u16,
}

/// Writes fields one after another.
struct Writer {
    to: Sockaddr,
}

impl Writer {
    fn new(family: u16) -> Self {
        let to = Sockaddr {
            bytes: [0; 128],
            len: 0,
        };
        Self { to }.put(&family.to_ne_bytes())
    }

    fn put(mut self, field: &[u8]) -> Self {
        let at = usize::from(self.to.len);
        for (to, from) in self.to.bytes.iter_mut().skip(at).zip(field) {
            *to = *from;
        }
        // The longest address has 48 bytes.
        self.to.len += field.len() as u16;
        self
    }

    fn finish(self) -> Sockaddr {
        self.to
    }
}

/// Reads fields one after another; missing bytes read as zero.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        let (head, rest) = self.0.split_at(N.min(self.0.len()));
        for (to, from) in field.iter_mut().zip(head) {
            *to = *from;
        }
        self.0 = rest;
        field
    }
}

impl From<&Address> for Sockaddr {
    fn from(address: &Address) -> Self {
        match address {
            Address::Ip(SocketAddr::V4(v4)) => Writer::new(AF_INET)
                .put(&v4.port().to_be_bytes())
                .put(&v4.ip().octets())
                .put(&[0; 8])
                .finish(),
            Address::Ip(SocketAddr::V6(v6)) => Writer::new(AF_INET6)
                .put(&v6.port().to_be_bytes())
                // std keeps the header field's bits unchanged, so no byte swap.
                .put(&v6.flowinfo().to_ne_bytes())
                .put(&v6.ip().octets())
                .put(&v6.scope_id().to_ne_bytes())
                .finish(),
            Address::Ib(ib) => Writer::new(AF_IB)
                .put(&ib.pkey.to_be_bytes())
                .put(&ib.flow_info.to_be_bytes())
                .put(&ib.gid)
                .put(&ib.service_id.to_be_bytes())
                .put(&ib.service_mask.to_be_bytes())
                .put(&ib.scope_id.to_ne_bytes())
                .finish(),
        }
    }
}

const _: () = assert!(SOCKADDR_IN == 16 && SOCKADDR_IN6 == 28 && SOCKADDR_IB == 48);

/// Parses a socket address. Returns `None` if the family is zero (no address).
///
/// # Errors
/// [`UnknownFamily`] if the family is neither IP nor InfiniBand.
pub fn parse(bytes: &[u8]) -> Result<Option<Address>, UnknownFamily> {
    let mut fields = Reader(bytes);
    let family = u16::from_ne_bytes(fields.take());
    let port = fields.take();
    match family {
        0 => Ok(None),
        AF_INET => {
            let ip = Ipv4Addr::from(fields.take::<4>());
            let address = SocketAddrV4::new(ip, u16::from_be_bytes(port));
            Ok(Some(Address::Ip(address.into())))
        }
        AF_INET6 => {
            let flow = u32::from_ne_bytes(fields.take());
            let ip = Ipv6Addr::from(fields.take::<16>());
            let scope = u32::from_ne_bytes(fields.take());
            let address = SocketAddrV6::new(ip, u16::from_be_bytes(port), flow, scope);
            Ok(Some(Address::Ip(address.into())))
        }
        AF_IB => Ok(Some(Address::Ib(IbAddress {
            pkey: u16::from_be_bytes(port),
            flow_info: u32::from_be_bytes(fields.take()),
            gid: fields.take(),
            service_id: u64::from_be_bytes(fields.take()),
            service_mask: u64::from_be_bytes(fields.take()),
            scope_id: u64::from_ne_bytes(fields.take()),
        }))),
        other => Err(UnknownFamily(other)),
    }
}

/// A socket address of a family that is neither IP nor InfiniBand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownFamily(pub u16);
