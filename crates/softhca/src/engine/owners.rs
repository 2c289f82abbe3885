//! Owners of objects: user contexts of programs.

use std::collections::HashMap;

/// The driver's tag for objects that all programs may use (`MLX5_SHARED_RESOURCE_UID`).
pub(crate) const SHARED_UID: u32 = 0xffff;

/// Kinds of objects that have numbers of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum ObjectKind {
    CounterSet,
    Cq,
    General(u32),
    Mkey,
    Pd,
    Psv,
    Queue,
    Srq,
    Steering,
    TransportDomain,
    Uar,
    Umem,
    Xrcd,
}

impl ObjectKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::CounterSet => "counter set",
            Self::Cq => "completion queue",
            Self::General(_) => "general object",
            Self::Mkey => "memory key",
            Self::Pd => "protection domain",
            Self::Psv => "PSV",
            Self::Queue => "queue",
            Self::Srq => "SRQ",
            Self::Steering => "steering object",
            Self::TransportDomain => "transport domain",
            Self::Uar => "UAR",
            Self::Umem => "umem",
            Self::Xrcd => "XRC domain",
        }
    }
}

/// An object of a user context.
#[derive(Debug)]
pub(crate) struct OwnedObject {
    pub(crate) uid: u32,
    /// The umems that it uses.
    pub(crate) memory: UmemUse,
}

/// The umems of a queue's entries and doorbell records.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct UmemUse {
    pub(crate) entries: Option<u32>,
    pub(crate) records: Option<u32>,
}

/// The objects of user contexts, and the command in execution.
#[derive(Debug, Default)]
pub(crate) struct ObjectOwners {
    pub(crate) owned: HashMap<(ObjectKind, u32), OwnedObject>,
    /// User context of the command; 0 for the driver's.
    pub(crate) uid: u32,
    pub(crate) umem_use: UmemUse,
}

impl ObjectOwners {
    /// Returns the user context of the command in execution; 0 for the driver's.
    pub(crate) fn uid(&self) -> u32 {
        self.uid
    }

    /// Returns whether the command in execution is a program's.
    pub(crate) fn is_program(&self) -> bool {
        !matches!(self.uid, 0 | SHARED_UID)
    }

    pub(crate) fn owner(&self, kind: ObjectKind, number: u32) -> u32 {
        self.owned.get(&(kind, number)).map_or(0, |owned| owned.uid)
    }

    pub(crate) fn owns(&self, kind: ObjectKind, number: u32) -> bool {
        self.owner(kind, number) == self.uid
    }

    pub(crate) fn may_use(&self, kind: ObjectKind, number: u32) -> bool {
        self.owns(kind, number) || self.owner(kind, number) == SHARED_UID
    }

    pub(crate) fn is_umem_in_use(&self, umem: u32) -> bool {
        let all = self.owned.values().map(|owned| owned.memory);
        let mut all = all.flat_map(|memory| [memory.entries, memory.records]);
        all.any(|used| used == Some(umem))
    }

    pub(crate) fn clear(&mut self) {
        self.owned.clear();
    }
}
