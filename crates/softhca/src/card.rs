//! Cards: what a device says of itself beside its [profile](crate::profile), from what owners
//! of cards have published (`ibv_devinfo -v`).
//!
//! The limits are what the device reports; the engine's own are those of [`Card::SOFTHCA`].

use std::fmt;

use crate::profile::cap::{
    LOG_MAX_CQ, LOG_MAX_MCG, LOG_MAX_MKEY, LOG_MAX_PD, LOG_MAX_QP, LOG_MAX_SRQ,
};
use crate::profile::{Cap, Group};

/// Identity and limits of a kind of card.
#[derive(Debug, PartialEq, Eq)]
pub struct Card {
    /// Its short name.
    pub name: &'static str,
    /// A description.
    pub about: &'static str,
    /// `vendor_part_id`, which is the device id of the PCI function, too.
    pub part_id: u16,
    /// The subsystem's device id. Those of cards are guesses.
    pub subsystem_id: u16,
    /// `hw_ver`.
    pub hardware_version: u32,
    /// Version of the firmware.
    pub firmware: [u16; 3],
    /// `board_id`.
    pub board_id: &'static str,
    /// Automatic path migration is reported; it is refused all the same.
    pub path_migration: bool,
    /// The speed of the port.
    pub speed: Speed,
    /// Numbers of objects.
    limits: Limits,
}

/// No card has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownCard<'a>(&'a str);

impl fmt::Display for UnknownCard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = Card::ALL.iter().map(|card| card.name).collect();
        write!(
            f,
            "there is no card \"{}\"; use {}",
            self.0,
            names.join(", ")
        )
    }
}

impl std::error::Error for UnknownCard<'_> {}

/// Speed of a port of four lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speed {
    /// 100 Gbit/s.
    Edr,
    /// 200 Gbit/s.
    Hdr,
    /// 400 Gbit/s.
    Ndr,
}

impl Speed {
    /// Returns the rate in Gbit/s.
    #[must_use]
    pub fn gigabits(self) -> u32 {
        match self {
            Self::Edr => 100,
            Self::Hdr => 200,
            Self::Ndr => 400,
        }
    }

    /// Returns the speed of a lane as verbs encode it (`active_speed`).
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Edr => 32,
            Self::Hdr => 64,
            Self::Ndr => 128,
        }
    }

    /// Returns the transfer rate of a lane of the PCI link, of 16, that this port can fill.
    #[must_use]
    pub fn pci_link(self) -> &'static str {
        match self {
            Self::Edr => "8.0 GT/s",
            Self::Hdr => "16.0 GT/s",
            Self::Ndr => "32.0 GT/s",
        }
    }

    /// Returns the rate as sysfs shows it.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Edr => "100 Gb/sec (4X EDR)",
            Self::Hdr => "200 Gb/sec (4X HDR)",
            Self::Ndr => "400 Gb/sec (4X NDR)",
        }
    }
}

/// Binary logarithms of the numbers of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Limits {
    queue_pairs: u8,
    completion_queues: u8,
    keys: u8,
    domains: u8,
    shared_queues: u8,
    groups: u8,
}

/// ConnectX-6 Dx, from a dump.
const CX6DX: Limits = Limits {
    queue_pairs: 17,
    completion_queues: 24,
    keys: 24,
    domains: 23,
    shared_queues: 23,
    groups: 21,
};

impl Card {
    /// What a device is without a card.
    pub const SOFTHCA: Card = Card {
        name: "softhca",
        about: "softhca itself",
        part_id: 0x1017,
        subsystem_id: 1,
        hardware_version: 0,
        firmware: [16, 35, 4030],
        board_id: "SOFTHCA000000001",
        path_migration: false,
        speed: Speed::Edr,
        limits: Limits {
            queue_pairs: 17,
            completion_queues: 16,
            keys: 22,
            domains: 16,
            shared_queues: 16,
            groups: 12,
        },
    };

    /// The cards.
    pub const ALL: &'static [Card] = &[
        Card {
            name: "cx5",
            about: "ConnectX-5, 100 Gbit/s",
            part_id: 4119,
            subsystem_id: 7,
            hardware_version: 0,
            firmware: [16, 23, 1020],
            board_id: "MT_0000000008",
            path_migration: true,
            speed: Speed::Edr,
            limits: Limits {
                queue_pairs: 18,
                domains: 24,
                ..CX6DX
            },
        },
        Card {
            name: "cx6dx",
            about: "ConnectX-6 Dx, 100 Gbit/s",
            part_id: 4125,
            subsystem_id: 0x16,
            hardware_version: 0,
            firmware: [22, 36, 1010],
            board_id: "MT_0000000359",
            path_migration: true,
            speed: Speed::Edr,
            limits: CX6DX,
        },
        // Limits of these two are a guess: those of ConnectX-6 Dx.
        Card {
            name: "cx7",
            about: "ConnectX-7, 400 Gbit/s",
            part_id: 4129,
            subsystem_id: 0x41,
            hardware_version: 0,
            firmware: [28, 42, 1000],
            board_id: "MT_0000000838",
            path_migration: true,
            speed: Speed::Ndr,
            limits: CX6DX,
        },
        Card {
            name: "bf3",
            about: "BlueField-3, 200 Gbit/s",
            part_id: 41692,
            subsystem_id: 9,
            hardware_version: 1,
            firmware: [32, 43, 1014],
            board_id: "MT_0000000884",
            path_migration: true,
            speed: Speed::Hdr,
            limits: CX6DX,
        },
    ];

    /// Returns the card with this name, which may be that of softhca itself.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Card> {
        if name == Self::SOFTHCA.name {
            return Some(&Self::SOFTHCA);
        }
        Self::ALL.iter().find(|card| card.name == name)
    }

    /// As [`named`](Self::named).
    ///
    /// # Errors
    /// There is no such card.
    pub fn find(name: &str) -> Result<&'static Card, UnknownCard<'_>> {
        Self::named(name).ok_or(UnknownCard(name))
    }

    /// Returns `fw_ver`.
    #[must_use]
    pub fn firmware_text(&self) -> String {
        let [major, minor, patch] = self.firmware;
        format!("{major}.{minor}.{patch:04}")
    }

    /// Returns `hca_type`.
    #[must_use]
    pub fn type_text(&self) -> String {
        format!("MT{}", self.part_id)
    }

    /// Returns the greatest number of queue pairs.
    #[must_use]
    pub fn max_queue_pairs(&self) -> u32 {
        1 << self.limits.queue_pairs
    }

    /// Returns the greatest number of completion queues.
    #[must_use]
    pub fn max_completion_queues(&self) -> u32 {
        1 << self.limits.completion_queues
    }

    /// Returns the greatest number of memory keys.
    #[must_use]
    pub fn max_keys(&self) -> u32 {
        1 << self.limits.keys
    }

    /// Returns the greatest number of protection domains.
    #[must_use]
    pub fn max_domains(&self) -> u32 {
        1 << self.limits.domains
    }

    /// Returns the greatest number of shared receive queues.
    #[must_use]
    pub fn max_shared_queues(&self) -> u32 {
        1 << self.limits.shared_queues
    }

    /// Returns the greatest number of multicast groups.
    #[must_use]
    pub fn max_groups(&self) -> u32 {
        1 << self.limits.groups
    }

    /// Returns the capabilities that differ from those of a profile.
    pub(crate) fn caps(&self) -> [Cap; 6] {
        let of = |field, log: u8| (Group::General, field, u32::from(log));
        let limits = &self.limits;
        [
            of(LOG_MAX_QP, limits.queue_pairs),
            of(LOG_MAX_CQ, limits.completion_queues),
            of(LOG_MAX_MKEY, limits.keys),
            of(LOG_MAX_PD, limits.domains),
            of(LOG_MAX_SRQ, limits.shared_queues),
            of(LOG_MAX_MCG, limits.groups),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profiles::PROFILES;

    /// Without a card nothing changes.
    #[test]
    fn the_limits_of_softhca_are_those_of_its_profiles() {
        for profile in PROFILES {
            let group = profile.group(Group::General);
            for (_, field, value) in Card::SOFTHCA.caps() {
                assert_eq!(field.get(&group), value, "{}", profile.name);
            }
        }
    }

    #[test]
    fn a_card_has_a_name() {
        let cx7 = Card::named("cx7").unwrap();
        assert_eq!(cx7.firmware_text(), "28.42.1000");
        assert_eq!(cx7.type_text(), "MT4129");
        assert_eq!(Card::named("cx8"), None);
        assert_eq!(Card::SOFTHCA.firmware_text(), "16.35.4030");
    }
}
