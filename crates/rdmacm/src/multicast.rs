//! Multicast memberships.

use std::sync::Arc;

use crate::Error;
use crate::entity::{Entity, Key, ReportedEvents, lock};
use uverbs::open_enum;

open_enum! {
    /// Membership type of a multicast group.
    JoinFlags(u16) {
        /// Send and receive.
        FULL_MEMBER = 0,
        /// Send only.
        SEND_ONLY = 1,
    }
}

/// A membership in a multicast group. Dropping it leaves the group; it also
/// ends with its id.
///
/// After [`EventKind::MULTICAST_JOIN`](crate::EventKind::MULTICAST_JOIN) the
/// user attaches the queue pair to the group: the event's
/// [`UdParam::ah_attr`](crate::UdParam::ah_attr) contains GID and LID, and is
/// the path for sends to the group.
#[derive(Debug)]
pub struct Multicast {
    entity: Arc<Entity>,
}

impl Multicast {
    pub(crate) fn new(entity: Arc<Entity>) -> Self {
        Self { entity }
    }

    /// Returns the key that its events carry.
    pub fn key(&self) -> Key {
        self.entity.key
    }

    /// Leaves the group.
    ///
    /// # Errors
    /// The kernel's reason, with the membership.
    pub fn leave(self) -> Result<ReportedEvents, (Self, Error)> {
        match self.end() {
            Ok(count) => Ok(ReportedEvents {
                entity: Arc::clone(&self.entity),
                count,
            }),
            Err(error) => Err((self, error)),
        }
    }

    /// Leaves the group, unless it was left already or the id is destroyed.
    fn end(&self) -> Result<u32, Error> {
        // Locks the id first, and keeps it locked: destroying the id ends the
        // membership and frees its number.
        let Some(owner) = &self.entity.owner else {
            return Ok(0);
        };
        let owner_alive = lock(&owner.alive);
        let mut alive = lock(&self.entity.alive);
        if !*alive || !*owner_alive {
            *alive = false;
            return Ok(0);
        }
        let count = owner.channel().ucm().leave_mcast(self.entity.number())?;
        *alive = false;
        Ok(count)
    }
}

impl Drop for Multicast {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "leaving a multicast group failed");
        }
    }
}
