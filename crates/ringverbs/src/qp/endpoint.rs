//! Address exchange and connecting.

use std::fmt;
use std::str::FromStr;

use uverbs::{AccessFlags, AhAttr, GlobalRoute};

use super::{
    ConnectOptions, FlushTo, Init, Mtu, QueuePair, ReadyToReceive, ReadyToSend, State, Transition,
    Transport,
};
use crate::query::Gid;
use crate::{Context, Error, Result};

/// A port of the device and one of its GIDs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LocalAddress {
    /// The port, from 1.
    pub port: u8,
    /// Index of the GID in the port's table.
    pub gid_index: u8,
    /// The GID.
    pub gid: Gid,
    /// The port's LID; 0 on Ethernet.
    pub lid: u16,
    /// The port's MTU.
    pub mtu: Mtu,
}

impl Context {
    /// Returns a port's address with the preferred GID: the RoCE v2 GID of an IPv4
    /// address, else another RoCE v2 GID, else the first GID. A loopback address comes after
    /// the others: it does not show which network the port is on.
    ///
    /// # Errors
    /// [`Error::NoGid`]; EINVAL if there is no such port.
    pub fn local_address(&self, port: u8) -> Result<LocalAddress> {
        let gids = self.gids()?;
        let gid = gids
            .iter()
            .filter(|entry| entry.port == port)
            .min_by_key(|entry| match (entry.is_roce_v2(), entry.gid.is_ipv4()) {
                (true, true) if entry.gid.0[12] != 127 => 0,
                (true, false) => 1,
                (true, true) => 2,
                _ => 3,
            })
            .ok_or(Error::NoGid { port })?;
        self.local_address_with(port, gid.index)
    }

    /// Returns a port's address with the GID at `gid_index`.
    ///
    /// # Errors
    /// ENODATA for an empty entry, EINVAL for an index outside of the table;
    /// [`Error::Driver`] if the port's MTU is invalid.
    pub fn local_address_with(&self, port: u8, gid_index: u8) -> Result<LocalAddress> {
        let attr = self.uverbs().query_port(port)?;
        let entry = self
            .uverbs()
            .query_gid_entry(port.into(), gid_index.into())?;
        Ok(LocalAddress {
            port,
            gid_index,
            gid: Gid(entry.gid),
            lid: attr.legacy.lid,
            mtu: Mtu::from_code(attr.legacy.active_mtu).ok_or_else(|| Error::Driver {
                what: "port",
                message: format!("its MTU code {} is invalid", attr.legacy.active_mtu),
            })?,
        })
    }
}

/// The address of a peer's port, for [`ProtectionDomain::address_handle_to`].
///
/// Converted from an [`Endpoint`], from a [`LocalAddress`] (a peer on the same port), or,
/// on Ethernet, from a [`Gid`] alone.
///
/// [`ProtectionDomain::address_handle_to`]: crate::ProtectionDomain::address_handle_to
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAddress {
    /// The GID.
    pub gid: Gid,
    /// The LID, or the MLID of a multicast group; 0 on Ethernet.
    pub lid: u16,
}

impl From<Gid> for PortAddress {
    fn from(gid: Gid) -> Self {
        Self { gid, lid: 0 }
    }
}

impl From<&Endpoint> for PortAddress {
    fn from(&Endpoint { gid, lid, .. }: &Endpoint) -> Self {
        Self { gid, lid }
    }
}

impl From<&LocalAddress> for PortAddress {
    fn from(&LocalAddress { gid, lid, .. }: &LocalAddress) -> Self {
        Self { gid, lid }
    }
}

impl LocalAddress {
    /// Returns the path from this port to a peer's port.
    pub fn path_to(&self, gid: Gid, lid: u16) -> AhAttr {
        AhAttr {
            grh: GlobalRoute {
                dgid: gid.0,
                sgid_index: self.gid_index,
                hop_limit: 64,
                ..GlobalRoute::default()
            },
            dlid: lid,
            is_global: true,
            port_num: self.port,
            ..AhAttr::default()
        }
    }
}

/// The values that a peer needs to connect to a queue pair.
///
/// Its text form (`Display`, `FromStr`) is queue pair number, packet sequence
/// number, LID, MTU code and GID, in hexadecimal and separated by colons. With
/// the feature `serde` it is a structure of these fields, and numbers out of
/// range are refused. [`tcp`](crate::tcp) exchanges endpoints over TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Endpoint {
    /// Queue pair number, 24 bits.
    #[cfg_attr(
        feature = "serde",
        serde(deserialize_with = "crate::serialize::number_of_24_bits")
    )]
    pub qp_num: u32,
    /// Initial packet sequence number, 24 bits.
    #[cfg_attr(
        feature = "serde",
        serde(deserialize_with = "crate::serialize::number_of_24_bits")
    )]
    pub psn: u32,
    /// LID of the port; 0 on Ethernet.
    pub lid: u16,
    /// MTU of the port, serialised as its code.
    pub mtu: Mtu,
    /// GID of the port.
    pub gid: Gid,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            qp_num,
            psn,
            lid,
            mtu,
            gid,
        } = self;
        write!(f, "{qp_num:06x}:{psn:06x}:{lid:04x}:{:x}:", mtu.code())?;
        for byte in gid.0 {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let error = || Error::Parse {
            expected: "an endpoint (number:packet:lid:mtu:gid in hexadecimal)",
        };
        let mut parts = text.trim().split(':');
        let mut number = |digits: usize| {
            let part = parts.next().filter(|part| {
                (1..=digits).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_hexdigit())
            });
            part.and_then(|part| u128::from_str_radix(part, 16).ok())
                .ok_or_else(error)
        };
        let endpoint = Self {
            qp_num: number(6)? as u32,
            psn: number(6)? as u32,
            lid: number(4)? as u16,
            mtu: Mtu::from_code(number(1)? as u8).ok_or_else(error)?,
            gid: Gid(number(32)?.to_be_bytes()),
        };
        if parts.next().is_some() {
            return Err(error());
        }
        Ok(endpoint)
    }
}

impl QueuePair {
    /// Returns the values that a peer needs to connect to it through `local`.
    pub fn endpoint(&self, local: &LocalAddress) -> Endpoint {
        Endpoint {
            qp_num: self.qp_num(),
            psn: self.inner().psn,
            lid: local.lid,
            mtu: local.mtu,
            gid: local.gid,
        }
    }

    /// Connects the queue pair to a peer (RESET, INIT, RTR, RTS) and allows all types of
    /// remote access, for which the peer also needs keys. The peer does the same with this
    /// queue pair's [`endpoint`](Self::endpoint).
    ///
    /// A queue pair in INIT, for example with receives posted, continues from there.
    ///
    /// # Errors
    /// [`Error::State`] for a datagram queue pair; EINVAL in any other state, or if values
    /// of the peer are out of range.
    pub fn connect(&mut self, local: &LocalAddress, peer: &Endpoint) -> Result<()> {
        self.connect_with(local, peer, &ConnectOptions::new())
    }

    /// As [`connect`](Self::connect), with options. An unreliable connection uses
    /// only those of the path.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); [`Error::Limit`] for more than 7 retries.
    pub fn connect_with(
        &mut self,
        local: &LocalAddress,
        peer: &Endpoint,
        options: &ConnectOptions,
    ) -> Result<()> {
        let transport = self.transport();
        let path = options.path(local.path_to(peer.gid, peer.lid));
        let mtu = options.mtu(local.mtu, peer.mtu);
        let (receive, send): (Transition, Transition) = match transport {
            Transport::Reliable => {
                let (responder, initiator) = self.context().read_depths();
                let ready = ReadyToReceive::reliable(path, peer.qp_num, peer.psn, mtu);
                let receive = options.receive(ready, responder);
                let ready = ReadyToSend::reliable(self.inner().psn);
                (receive.into(), options.send(ready, initiator).into())
            }
            Transport::Unreliable => (
                ReadyToReceive::unreliable(path, peer.qp_num, peer.psn, mtu).into(),
                ReadyToSend::unreliable(self.inner().psn).into(),
            ),
            Transport::Datagram => {
                return Err(Error::State {
                    verb: "connect",
                    state: self.state(),
                    needed: "a connected transport; datagrams are addressed one by one",
                });
            }
        };
        // Checked before the first transition, which cannot be undone.
        send.check()?;
        self.initialize(local)?;
        self.transition(receive)?;
        self.transition(send)
    }

    /// Moves a queue pair of a connected transport from RESET to INIT, with all types of
    /// remote access allowed, so that receives can be posted before the peer is known. Does
    /// nothing in INIT.
    ///
    /// # Errors
    /// [`Error::State`] for a datagram queue pair.
    pub fn initialize(&mut self, local: &LocalAddress) -> Result<()> {
        if self.state() == State::INIT {
            return Ok(());
        }
        let writes = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let mut all = writes | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_ATOMIC;
        for (to, access) in [
            (FlushTo::GlobalVisibility, AccessFlags::FLUSH_GLOBAL),
            (FlushTo::Persistence, AccessFlags::FLUSH_PERSISTENT),
        ] {
            if self.context().can_flush_to(to) {
                all |= access;
            }
        }
        match self.transport() {
            Transport::Reliable => self.transition(Init::reliable(local.port, all)),
            Transport::Unreliable => self.transition(Init::unreliable(local.port, writes)),
            Transport::Datagram => Err(Error::State {
                verb: "initialize",
                state: self.state(),
                needed: "a connected transport",
            }),
        }
    }

    /// Makes a datagram queue pair ready to send and receive (RESET, INIT, RTR, RTS). It
    /// receives datagrams with the queue key `qkey`.
    ///
    /// # Errors
    /// [`Error::State`] for a queue pair of a connected transport.
    pub fn activate(&mut self, local: &LocalAddress, qkey: u32) -> Result<()> {
        self.transition(Init::datagram(local.port, qkey))?;
        self.transition(ReadyToReceive::datagram())?;
        self.transition(ReadyToSend::datagram(self.inner().psn))
    }
}
