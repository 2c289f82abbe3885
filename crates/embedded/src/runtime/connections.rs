//! The connection manager of a device.

use uverbs::kernel::Kernel;

use crate::cm::kernel::ManagerKernel;
use crate::cm::{Manager, Port};
use crate::runtime::embedded::Embedded;

impl AsRef<Manager> for Embedded {
    fn as_ref(&self) -> &Manager {
        self.runner.manager()
    }
}

impl Embedded {
    /// Returns the connection manager of its network, for
    /// `rdmacm::EventChannel::open_on`: the ids of that channel belong to this
    /// device. Addresses are those of the host's interfaces; on a network that reaches other
    /// hosts the device's own, and loopback addresses for itself. Port spaces belong to the
    /// network, which is that of a process or of all processes of a directory.
    ///
    /// A channel is readable if and only if it has an event. Messages become events
    /// on a thread of the network; with [`Drive::Caller`](crate::Drive::Caller), in
    /// [`drive`](Self::drive), commands, and waits for events.
    ///
    /// It behaves as rdma_cm does for the same commands, except that it does
    /// not support `AF_IB` addresses and `RDMA_OPTION_IB_PATH`, and does not
    /// report ADDR_CHANGE, DEVICE_REMOVAL and TIMEWAIT_EXIT. If the peer's
    /// process ends, the event is DISCONNECTED, or REJECTED before the peer has
    /// accepted.
    pub fn connection_manager(&self) -> Box<dyn Kernel> {
        let state = self.device.lock();
        let settings = state.hca.settings();
        let own = state.own_gids();
        let port = Port {
            ethernet: state.is_ethernet(),
            gid: state.gid(),
            lid: settings.lid,
            node_guid: state.node_guid,
            // After the GID of RoCE v1, if there is one.
            gid_index: own.map_or(0, |own| own.link_local.1),
            own,
            mtu: state.mtu(),
        };
        drop(state);
        Box::new(ManagerKernel::new(self.clone(), port))
    }
}
