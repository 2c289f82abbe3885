//! Settings of an HCA.

use std::sync::Arc;

use roce::fabric::{PortConfig, subnet};
use roce::packet::Mtu;

use crate::card::Card;
use crate::chaos::Chaos;
use crate::link_shape::LinkShape;
use crate::profile::{PortKind, Profile};

/// Settings of an HCA.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Device profile.
    pub profile: &'static Profile,
    /// Number of the HCA in its network.
    pub number: u16,
    /// Identity and limits.
    pub card: &'static Card,
    /// GUID of the node and of its port.
    pub guid: u64,
    /// MAC address of the Ethernet port.
    pub mac: [u8; 6],
    /// The packets of the Ethernet port start at the IP header: its link is a UDP socket.
    /// RoCE v2 crosses it, and frames of the network interface beside it.
    pub starts_at_ip: bool,
    /// LID of the InfiniBand port.
    pub lid: u16,
    /// What the link does to frames that the port sends.
    pub link: LinkShape,
    /// MTU of the port: the longest datagram.
    pub mtu: Mtu,
    /// First number of queue pairs, from 0x40 on, with 2^17 below 2^24 after it.
    pub first_qpn: u32,
    /// First index of memory keys, from 0x10 on, with 2^22 below 2^24 after it.
    pub first_mkey: u32,
    /// Checks strictly: misuse by the driver or a program is logged as an error, and
    /// refused where hardware might accept it.
    pub strict: bool,
    /// What is decided to the disadvantage of programs.
    pub chaos: Option<Arc<Chaos>>,
}

impl Settings {
    /// Returns the settings of the `number`th HCA of a profile, with addresses of its
    /// own.
    pub fn numbered(profile: &'static Profile, number: u16) -> Settings {
        let [high, low] = (number + 1).to_be_bytes();
        Settings {
            profile,
            number,
            card: &Card::SOFTHCA,
            guid: subnet::guid(number + 1),
            // Locally administered address.
            mac: [0x02, 0x50, 0x53, 0, high, low],
            starts_at_ip: false,
            lid: number + 1,
            link: LinkShape::default(),
            mtu: Mtu::B4096,
            first_qpn: 0x40,
            first_mkey: 0x10,
            strict: false,
            chaos: None,
        }
    }

    pub(crate) fn port(&self) -> PortConfig {
        match self.profile.port {
            PortKind::InfiniBand => PortConfig {
                guid: self.guid,
                ..PortConfig::ib(self.lid)
            },
            PortKind::Ethernet if self.starts_at_ip => PortConfig::ip(),
            PortKind::Ethernet => PortConfig::ethernet(self.mac),
        }
    }
}
