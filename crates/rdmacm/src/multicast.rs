//! Multicast memberships.

use std::sync::Arc;

use crate::Error;
use crate::entity::{Entity, Key, Reported, lock};
use uverbs::open_enum;

open_enum! {
    /// How a group is joined.
    JoinFlags(u16) {
        /// To send and receive.
        FULL_MEMBER = 0,
        /// To send only.
        SEND_ONLY = 1,
    }
}

/// A membership in a multicast group. Left when dropped, and gone with its id.
///
/// After [`EventKind::MULTICAST_JOIN`](crate::EventKind::MULTICAST_JOIN) the
/// queue pair is attached to the group by its user: GID and LID are in the
/// event's [`UdParam::ah_attr`](crate::UdParam::ah_attr), and where to send to.
#[derive(Debug)]
pub struct Multicast {
    entity: Arc<Entity>,
}

impl Multicast {
    pub(crate) fn new(entity: Arc<Entity>) -> Self {
        Self { entity }
    }

    /// What its events name.
    pub fn key(&self) -> Key {
        self.entity.key
    }

    /// Leaves the group.
    ///
    /// # Errors
    /// The membership is given back with the kernel's reason.
    pub fn leave(self) -> Result<Reported, (Self, Error)> {
        match self.end() {
            Ok(reported) => Ok(Reported {
                entity: Arc::clone(&self.entity),
                reported,
            }),
            Err(error) => Err((self, error)),
        }
    }

    /// Leaves, unless that is done or the id is gone.
    fn end(&self) -> Result<u32, Error> {
        // The id's first, and held: its end is ours, and the number is then free.
        let Some(owner) = &self.entity.owner else {
            return Ok(0);
        };
        let owner_alive = lock(&owner.alive);
        let mut alive = lock(&self.entity.alive);
        if !*alive || !*owner_alive {
            *alive = false;
            return Ok(0);
        }
        let reported = owner.home().ucm().leave_mcast(self.entity.number())?;
        *alive = false;
        Ok(reported)
    }
}

impl Drop for Multicast {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "a multicast group was not left");
        }
    }
}
