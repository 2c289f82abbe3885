//! Multicast groups.

use std::fmt;
use std::sync::Arc;

use super::{Inner, QueuePair};
use crate::query::Gid;
use crate::{CloseError, Result};

/// A queue pair's membership in a multicast group. Dropping the membership leaves the
/// group. A queue pair that is a member cannot be closed; if it is dropped, it is
/// destroyed with its last membership.
pub struct Membership {
    inner: Arc<Inner>,
    group: Gid,
    mlid: u16,
    has_left: bool,
}

impl QueuePair {
    /// Attaches the queue pair to a multicast group, whose datagrams it then
    /// receives. `mlid` is the group's LID, 0 on Ethernet. If it is a member already, both
    /// memberships are one: leaving either leaves the group.
    ///
    /// # Errors
    /// EINVAL if the address is not a multicast address, or this is not a
    /// datagram queue pair.
    pub fn join(&mut self, group: Gid, mlid: u16) -> Result<Membership> {
        self.inner().object.attach_multicast(&group.0, mlid)?;
        Ok(Membership {
            inner: Arc::clone(self.inner()),
            group,
            mlid,
            has_left: false,
        })
    }
}

impl Membership {
    /// Returns the group's address.
    pub fn group(&self) -> Gid {
        self.group
    }

    fn detach(&mut self) -> Result<()> {
        let object = &self.inner.object;
        match object.detach_multicast(&self.group.0, self.mlid) {
            Err(error) if !error.is_device_gone() => Err(error.into()),
            _ => {
                self.has_left = true;
                Ok(())
            }
        }
    }

    /// Leaves the group.
    ///
    /// # Errors
    /// Returns the membership with the kernel's error.
    pub fn leave(mut self) -> Result<(), CloseError<Self>> {
        match self.detach() {
            Ok(()) => Ok(()),
            Err(error) => Err(CloseError::new(self, error)),
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if !self.has_left {
            if let Err(error) = self.detach() {
                tracing::error!(%error, group = %self.group, "leaving a multicast group failed");
            }
        }
    }
}

impl fmt::Debug for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Membership").field(&self.group).finish()
    }
}
