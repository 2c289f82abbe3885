//! Access rights of memory keys.

/// Access rights of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Rights(pub(crate) u32);

impl Rights {
    pub(crate) const LOCAL_READ: Rights = Rights(1 << 0);
    pub(crate) const LOCAL_WRITE: Rights = Rights(1 << 1);
    pub(crate) const REMOTE_READ: Rights = Rights(1 << 2);
    pub(crate) const REMOTE_WRITE: Rights = Rights(1 << 3);
    pub(crate) const ATOMIC: Rights = Rights(1 << 4);
    pub(crate) const LOCAL: Rights = Rights(0b11);

    /// Returns whether these include a right to write.
    pub(crate) fn writes(self) -> bool {
        self.0 & (Rights::LOCAL_WRITE.0 | Rights::REMOTE_WRITE.0 | Rights::ATOMIC.0) != 0
    }

    /// Returns the rights that a key needs so that another key with these rights may
    /// refer to it. Remote rights are granted by the outer key: a window may give peers
    /// access that the inner key does not, but permits no write that the owner may not
    /// do.
    pub(crate) fn inner_rights(self) -> Rights {
        match self.writes() {
            true => Rights::LOCAL_WRITE,
            false => Rights::default(),
        }
    }

    pub(crate) fn include(self, other: Rights) -> bool {
        self.0 & other.0 == other.0
    }
}
