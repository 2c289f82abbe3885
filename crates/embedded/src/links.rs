//! The links of a network's ports: up or down, as the wire knows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The links of the ports of this process's devices, of which there are at most 64.
#[derive(Debug, Default)]
pub(crate) struct Links {
    /// A bit for each device, by its index, whose link is down.
    down: AtomicU64,
}

impl Links {
    /// Sets which links are down, as bits. Returns whether any has changed.
    pub(crate) fn set_down(&self, down: u64) -> bool {
        self.down.swap(down, Ordering::Relaxed) != down
    }

    /// Returns whether the link of the device with this index is up.
    pub(crate) fn is_up(&self, index: usize) -> bool {
        self.down.load(Ordering::Relaxed) >> index & 1 == 0
    }
}

/// The link of a device's port.
#[derive(Debug)]
pub(crate) struct PortLink {
    links: Arc<Links>,
    index: usize,
    /// The state that [`PortLink::change`] has returned last.
    up: bool,
}

impl PortLink {
    /// Returns the link of the device with this index, as if it had been up until now.
    pub(crate) fn new(links: Arc<Links>, index: usize) -> Self {
        Self {
            links,
            index: index.min(63),
            up: true,
        }
    }

    /// Returns whether the link is up, if that has changed since the last call.
    #[inline]
    pub(crate) fn change(&mut self) -> Option<bool> {
        let up = self.links.is_up(self.index);
        (up != std::mem::replace(&mut self.up, up)).then_some(up)
    }
}
