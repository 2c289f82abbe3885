//! Port spaces.

use uverbs::open_enum;

open_enum! {
    /// Port space of an id (`enum rdma_ucm_port_space`).
    PortSpace(u16) {
        /// Datagrams to IPoIB.
        IPOIB = 0x0002,
        /// Connections, in a port space like TCP's.
        TCP = 0x0106,
        /// Datagrams, in a port space like UDP's.
        UDP = 0x0111,
        /// Any service, by InfiniBand addresses.
        IB = 0x013f,
    }
}
